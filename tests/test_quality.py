"""What is written about the embedded models: guesses are the best there are, files are read back."""

import json

import numpy as np
import pytest

from vrhlib import store
from vrhlib.answers import judge
from vrhlib.benchmarks import answering
from vrhlib.nano import quality
from vrhlib.nano.models import KINDS
from vrhlib.samples import Sample, Samples


def asked(rows):
    made = [Sample(f"s{i}", None, f"k{i}", text, task="answer", answer=a, choices=("1", "2", "3"), kind="count",
                   chance=1 / 3, rule="number") for i, (text, a) in enumerate(rows)]  # fmt: skip
    return Samples("toy", "dev", made)


def test_a_constant_guess_is_the_commonest_answer_to_each_wording_elsewhere():
    fit = [("How many red rings?", "1"), ("How many blue crosses?", "1"), ("How many rings?", "2"), ("What else?", "3")]
    ask = [("How many cyan squares?", "1"), ("How many circles?", "2"), ("Never heard?", "1"), ("What else?", "1")]
    assert quality.constant_guess(asked(ask), asked(fit)) == 75  # the unknown wording gets the commonest answer of all


def test_wording_blots_out_names_and_keeps_the_form():
    assert quality.wording("How many red crosses are there?") == "How many COLOUR SHAPE are there?"
    assert quality.wording("What size is the lowest ring left of the large square?") == (
        "What size is the PLACE SHAPE RELATION the SIZE SHAPE?"
    )
    assert quality.wording("How many red shapes are there?") == "How many COLOUR shapes are there?"


@pytest.mark.parametrize("name", ["scenes-count", "scenes-width", "scenes-cv", "scenes-math"])
def test_the_guess_beats_every_single_answer_and_a_reader_of_the_form(name):
    """Two guessers written apart from it: one answer for all, and one answer for each number of words."""
    samples, fit = answering(name, "test", 400), answering(name, "detect", 400)
    guess = quality.constant_guess(samples, fit)
    answers = {s.answer for s in fit}

    def best(mine):
        return max(answers, key=lambda a: sum(judge(a, s.answer, s.rule, s.choices) == "correct" for s in mine))

    by_length = {n: best([s for s in fit if len(s.text.split()) == n]) for n in {len(s.text.split()) for s in fit}}
    one = best(fit)
    for guesses in ([one] * len(samples), [by_length.get(len(s.text.split()), one) for s in samples]):
        right = [judge(g, s.answer, s.rule, s.choices) == "correct" for g, s in zip(guesses, samples)]
        assert guess >= 100 * np.mean(right) - 3, guess


def test_pairs_are_compared_from_the_written_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    (tmp_path / "data" / "nano").mkdir(parents=True)
    rng, same = np.random.default_rng(0), {}
    for name, kind in KINDS.items():
        base = same.setdefault(kind.backbone, rng.random((10, 8)))
        about = {"scores": (base + 0.01 * rng.random((10, 8))).tolist()}
        (tmp_path / "data" / "nano" / f"{name}.json").write_text(json.dumps(about))
    table = quality.pairs()
    assert table.same_backbone.tolist() == [True, True, False, False, False, False]
    assert table.shared[:2].min() >= 6 and table.spearman[:2].min() > 0.95 and table.spearman[2:].max() < 0.4
    written = json.loads((tmp_path / "data" / "nano" / "pairs.json").read_text())
    assert [r["shared"] for r in written] == table.shared.tolist()


def test_a_missing_measurement_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="python -m vrhlib.nano.quality nano-internvl3"):
        quality.measured("nano-internvl3")
