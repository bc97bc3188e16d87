"""Shared by the tests: tiny random models of the four real classes, loaded once, and a root folder to throw away."""

from copy import copy

import pytest
import torch

from tests import tiny
from vrhlib import store
from vrhlib.wiring import load_vlm

torch.set_num_threads(1)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Results go to a temporary folder, here and in subprocesses."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setattr(store, "ROOT", folder)
    monkeypatch.setenv("VRHLIB_ROOT", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """kind -> loaded model; also the proof that `load_vlm` takes a folder of each class."""
    models = {kind: load_vlm(tiny.write(kind, tmp_path_factory.mktemp(kind)), device="cpu") for kind in tiny.CLASSES}
    for vlm in models.values():
        # With the first `output_attentions` transformers installs recorders of its own, for good: do it here,
        # so that every hook that appears later is ours.
        vlm.model.set_attn_implementation({"text_config": "eager"})
        vlm.model(**vlm.prepare(tiny.samples()[:1]).tensors, output_attentions=True)
        vlm.model.set_attn_implementation({"text_config": "sdpa"})
    return models


@pytest.fixture(params=tiny.CLASSES)
def vlm(request, tiny_models):
    """Each class in turn; afterwards the model must be the stock one again, whatever the test did."""
    vlm = copy(tiny_models[request.param])  # fields may be changed; the weights are shared
    vlm.max_new_tokens = 6
    before = trace(vlm)
    yield vlm
    assert trace(vlm) == before, "the test (or the code it ran) left hooks or another attention function behind"


@pytest.fixture
def batch(vlm):
    """Three pictures of different shapes, expressions of different lengths: two rows are left-padded."""
    batch = vlm.prepare(tiny.samples())
    assert batch.tensors["attention_mask"].sum(1).unique().numel() == 3
    return batch


def trace(vlm) -> dict:
    """What an intervention could leave behind on a model."""
    config = vlm.model.config
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in vlm.model.modules())
    implementations = [c._attn_implementation for c in (config, config.text_config, config.vision_config)]
    edits = sum(p._version for p in vlm.model.parameters())
    return {"hooks": hooks, "implementations": implementations, "edits of weights": edits}
