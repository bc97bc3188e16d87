"""After installation the nano profile needs no network: a model loads, is scored and answers with sockets shut."""

import socket

import pytest

from vrhlib import evaluate, scoring, store
from vrhlib.benchmarks import grounding
from vrhlib.profiles import MODELS
from vrhlib.wiring import load_vlm


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the nano profile tried to reach the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)


@pytest.mark.parametrize("name", [name for name, pin in MODELS.items() if pin.profile == "nano"])
def test_nano_models_load_score_and_answer_without_network(name, no_network, tmp_path, monkeypatch):
    vlm = load_vlm(name)
    monkeypatch.setattr(store, "ROOT", tmp_path)
    scores = scoring.score_samples(vlm, grounding("scenes", "dev", 2)).score(scoring.VRH)
    answers = evaluate.replies(vlm, grounding("scenes", "dev", 2), {evaluate.UNMASKED: None})
    assert scores.grid == vlm.grid and len(answers) == 2


def test_the_guard_guards(no_network):
    with pytest.raises(AssertionError, match="tried to reach"):
        socket.create_connection(("127.0.0.1", 9))
