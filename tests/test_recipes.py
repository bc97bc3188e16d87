"""How a policy is trained, as data: the profile's recipe, changes to it, and what cannot be meant."""

from dataclasses import asdict

import pytest

from vrhlib.profiles import profile
from vrhlib.training import Recipe, recipe_of


@pytest.mark.parametrize("name", ["nano", "paper"])
def test_a_profile_has_a_recipe_that_fits_into_one_card(name):
    recipe = recipe_of(name)
    assert recipe.method == "lora" and recipe.loss == "dpo"
    assert {key: getattr(recipe, key) for key in profile(name).recipe} == dict(profile(name).recipe)


def test_the_full_recipe_is_the_papers():
    recipe = recipe_of("paper", ["method=full"])
    assert (recipe.method, recipe.learning_rate, recipe.epochs) == ("full", 2e-7, 4)
    assert recipe_of("paper", ["method=full", "learning_rate=1e-6"]).learning_rate == 1e-6, "what is said goes first"
    assert recipe_of("paper", ["method=lora"]) == recipe_of("paper")


def test_changes_are_read_as_what_they_change():
    recipe = recipe_of("nano", ["beta=0.2", "batch_size=8", "at_once=4", "epochs=0.5", "loss=sft", "seed=3"])
    assert asdict(recipe) | {"beta": 0.2, "batch_size": 8, "at_once": 4, "epochs": 0.5, "loss": "sft", "seed": 3} == (
        asdict(recipe)
    )
    assert recipe.but(seed=4).seed == 4 and recipe.seed == 3


@pytest.mark.parametrize(
    "change, message",
    [
        ("betta=0.2", "Unknown part of a recipe 'betta'.*Did you mean 'beta'"),
        ("beta", "write it as beta=0.1"),
        ("beta=", "write it as beta=0.1"),
        ("batch_size=2.5", "write it as batch_size=16"),
        ("method=lorra", "Unknown method 'lorra'.*Did you mean 'lora'"),
        ("loss=ppo", "Unknown loss 'ppo'"),
        ("beta=0", "beta=0.0 of a recipe must be above 0"),
        ("rank=-1", "rank=-1 of a recipe must be above 0"),
        ("at_once=3", "batch_size=16 pairs cannot be split into passes of 3"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_next_step(change, message):
    with pytest.raises(ValueError, match=message):
        recipe_of("nano", [change])


def test_a_recipe_has_a_stated_default_for_what_the_paper_does_not_give():
    recipe = Recipe()
    assert (recipe.beta, recipe.batch_size, recipe.rank, recipe.alpha) == (0.1, 16, 16, 32)
