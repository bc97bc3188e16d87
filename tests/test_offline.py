"""After installation the nano profile needs no network: a model loads, is scored and answers with sockets shut."""

import socket

import pytest

from vrhlib import Ablation, dpo, evaluate, scoring, store
from vrhlib.benchmarks import grounding, to_train
from vrhlib.heads import HeadSet
from vrhlib.profiles import MODELS
from vrhlib.training import Recipe
from vrhlib.wiring import load_vlm


@pytest.fixture
def no_network(monkeypatch):
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise AssertionError(f"the nano profile tried to reach the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return tried  # libraries catch what is raised, and warn


@pytest.mark.parametrize("name", [name for name, pin in MODELS.items() if pin.profile == "nano"])
def test_nano_models_load_score_and_answer_without_network(name, no_network, tmp_path, monkeypatch):
    vlm = load_vlm(name)
    monkeypatch.setattr(store, "ROOT", tmp_path)
    scores = scoring.score_samples(vlm, grounding("scenes", "dev", 2)).score(scoring.VRH)
    answers = evaluate.replies(vlm, grounding("scenes", "dev", 2), {evaluate.UNMASKED: None})
    assert scores.grid == vlm.grid and len(answers) == 2


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_nano_model_is_trained_and_read_again_without_network(method, no_network, tmp_path, monkeypatch):
    vlm = load_vlm("nano-internvl3")
    monkeypatch.setattr(store, "ROOT", tmp_path)
    samples, heads = to_train("scenes", 4, []), HeadSet(((1, 0), (1, 1)), vlm.grid)
    pairs = dpo.preference_pairs(vlm, samples, {"vrh": Ablation(heads)})
    recipe = Recipe(method=method, learning_rate=1e-3, epochs=1, batch_size=2, at_once=2)
    with dpo.tuned(vlm, dpo.train(vlm, samples, pairs, recipe)) as trained:
        assert len(evaluate.unmasked(trained, [samples])) == 4
    assert no_network == []


def test_the_guard_guards(no_network):
    with pytest.raises(AssertionError, match="tried to reach"):
        socket.create_connection(("127.0.0.1", 9))
    assert len(no_network) == 1
