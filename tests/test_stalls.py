"""Nothing inside the attention function waits for the device: on a GPU each wait would cost as much as a layer.

There is none here, so the calls that would wait are watched: numbers and arrays taken from a tensor, and indexing by a
boolean tensor, whose size nobody knows beforehand.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.test_attention import REPLIES, SOME
from vrhlib import attention, decoding, scoring
from vrhlib.attention import KINDS, Ablation, Steering, ablate, capture, head_means, segment_columns, with_replies
from vrhlib.samples import Samples

pytestmark = pytest.mark.usefixtures("root")
aten = torch.ops.aten
WAITS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal)


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.inside, self.seen, self.calls = False, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_boolean = func.overloadpacket is aten.index and any(i is not None and i.dtype == torch.bool for i in args[1])
        if self.inside and (func.overloadpacket in WAITS or by_boolean):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watch(monkeypatch):
    """Watches what happens inside the attention function while the block runs."""
    watch, real = Watch(), attention._vrh_attention

    def watched(*args, **kwargs):
        watch.inside, watch.calls = True, watch.calls + 1
        try:
            return real(*args, **kwargs)
        finally:
            watch.inside = False

    def told(name, method):
        def call(tensor, *args, **kwargs):
            moves = name != "to" or "cpu" in args  # by name; to where the model runs it is asked as a device
            if watch.inside and moves and not kwargs.get("non_blocking"):
                watch.seen.append(name)
            return method(tensor, *args, **kwargs)

        return call

    for name in ("cpu", "numpy", "tolist", "item", "to", "__float__", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, told(name, getattr(torch.Tensor, name)))
    attention.AttentionInterface.register(attention.KERNEL, watched)
    with contextlib.ExitStack() as stack:
        stack.callback(attention.AttentionInterface.register, attention.KERNEL, real)
        with watch:
            yield watch


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_ablating_waits_for_nothing(vlm, batch, watch, kind):
    means = torch.randn(*vlm.grid, vlm.layers[0].self_attn.head_dim) if kind == "mean" else None
    with ablate(vlm, [Ablation(SOME, kind, means=means), None, Ablation(SOME, kind, "decode", means)], batch.length):
        vlm.model(**with_replies(vlm, batch, REPLIES))
    assert watch.calls == 3 and watch.seen == []


@torch.inference_mode()
def test_steering_and_capturing_wait_for_nothing(vlm, batch, watch):
    rows = torch.tensor([[batch.length - 1, batch.length, -1], [4, -1, batch.length], [-1, 3, 2]])
    with capture(vlm, rows, {"rows": lambda a: a[..., :4]}, Steering(SOME), batch.length, segment_columns(batch)):
        vlm.model(**with_replies(vlm, batch, REPLIES))
    assert watch.calls == 3 and watch.seen == []


def test_the_whole_design_space_waits_for_nothing(vlm, watch):
    scoring.score_samples(vlm, Samples("noise", "detect", tiny.samples((100, 60), (70, 150))))
    assert watch.calls >= 3 and watch.seen == []


def test_replies_and_means_wait_for_nothing(vlm, batch, watch):
    decoding.generate(vlm, batch, [None, Ablation(SOME), Ablation(SOME, phase="decode")])
    head_means(vlm, [batch])
    assert watch.calls > 6 and watch.seen == []


@pytest.mark.parametrize("wait", [torch.Tensor.sum, lambda a: a.cpu(), lambda a: float(a.sum()), lambda a: a[a > 0]])
@torch.inference_mode()
def test_a_wait_would_be_seen(vlm, batch, watch, wait):
    rows = torch.tensor([[batch.length - 1]] * 3)
    with capture(vlm, rows, {"rows": lambda a: (wait(a), a[..., 0])[1]}):
        vlm.model(**vlm.inputs(batch))
    assert bool(watch.seen) == (wait is not torch.Tensor.sum)
