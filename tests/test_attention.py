"""Captured rows and ablations against independent oracles: eager attention, hooks on `o_proj`, loops by hand.

The oracles run the stock model on the processor's own tensors (pixels, not shared features), so they
share no code with what they check.
"""

import contextlib
import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import StaticCache
from transformers.masking_utils import AttentionMaskInterface

from tests import tiny
from tests.conftest import trace
from vrhlib.attention import (
    KERNEL,
    Ablation,
    Branch,
    Steering,
    ablate,
    capture,
    generate,
    head_means,
    segment_columns,
    with_branches,
    with_replies,
)
from vrhlib.heads import Head, HeadSet
from vrhlib.samples import Sample
from vrhlib.wiring import load_vlm

pytestmark = pytest.mark.usefixtures("root")
GRID = (3, 8)
REPLIES = [[70, 71, 72, 73, 74], [80, 81], [90, 91, 92]]
SOME = HeadSet((Head(0, 1), Head(1, 5), Head(1, 0), Head(2, 7)), GRID)


def heads(*pairs) -> HeadSet:
    return HeadSet(tuple(Head(*p) for p in pairs), GRID)


def layer(i: int) -> HeadSet:
    return heads(*((i, h) for h in range(8)))


@contextlib.contextmanager
def eager(vlm):
    vlm.model.set_attn_implementation({"text_config": "eager"})
    try:
        yield
    finally:
        vlm.model.set_attn_implementation({"text_config": "sdpa"})


@contextlib.contextmanager
def hooked(vlm, edit):
    """Calls `edit(layer, x)` on the input of every `o_proj`, x: [B, q, heads, head_dim], before it is used."""

    def hook(module, args, i):
        x = args[0].unflatten(-1, (vlm.grid[1], -1)).clone()
        edit(i, x)
        return (x.flatten(-2),)

    handles = [
        m.self_attn.o_proj.register_forward_pre_hook(lambda module, args, i=i: hook(module, args, i))
        for i, m in enumerate(vlm.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def zeroing(chosen: HeadSet, decode_only=False):
    def edit(i, x):
        if not (decode_only and x.shape[1] > 1):
            for head in chosen:
                if head.layer == i:
                    x[:, :, head.head] = 0

    return edit


def o_proj_inputs(vlm, inputs) -> list[torch.Tensor]:
    """[B, T, heads, head_dim] per layer of one pass."""
    seen = []
    with hooked(vlm, lambda i, x: seen.append(x)), torch.no_grad():
        vlm.model(**inputs)
    return seen


def forced(batch, replies=REPLIES) -> dict:
    """Prompt and replies as one sequence, written out by hand from the processor's tensors."""
    width = max(map(len, replies))
    more = {
        "input_ids": torch.tensor([r + [0] * (width - len(r)) for r in replies]),
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in replies]),
        "mm_token_type_ids": torch.zeros(len(replies), width, dtype=torch.long),
    }
    return {k: torch.cat([v, more[k].to(v.dtype)], 1) if k in more else v for k, v in batch.tensors.items()}


@torch.no_grad()
def logits(vlm, inputs) -> torch.Tensor:
    return vlm.model(**inputs).logits


@torch.no_grad()
def eager_rows(vlm, inputs) -> torch.Tensor:
    """All attention, [B, layers, heads, T, T]."""
    with eager(vlm):
        return torch.stack(vlm.model(**inputs, output_attentions=True).attentions, 1)


@torch.no_grad()
def captured(vlm, inputs, rows, **more) -> torch.Tensor:
    with capture(vlm, rows, {"rows": lambda a: a}, **more) as got:
        vlm.model(**inputs)
    return got["rows"]


def mixed_rows(batch) -> torch.Tensor:
    """Out of order, some unused: the last prompt row, reply rows, expression tokens, the first visible token."""
    S = batch.length
    first = batch.tensors["attention_mask"].argmax(1).tolist()
    rows = [[S + 1, S - 1, first[b], *words.tolist()[:3]] for b, words in enumerate(batch.expression_columns)]
    assert {len(r) for r in rows} == {4, 6}
    return torch.tensor([[-1] * (6 - len(r)) + r for r in rows])


# ---------------------------------------------------------------- capture


def test_captured_rows_equal_eager_attention(vlm, batch):
    rows, inputs = mixed_rows(batch), forced(batch)
    want = eager_rows(vlm, inputs)
    got = captured(vlm, inputs, rows)
    assert got.shape == (3, *GRID, 6, inputs["input_ids"].shape[1])
    for b, r in np.ndindex(*rows.shape):
        expected = want[b, :, :, rows[b, r]] if rows[b, r] >= 0 else torch.zeros_like(got[b, :, :, r])
        torch.testing.assert_close(got[b, :, :, r], expected, atol=1e-5, rtol=0)
    assert (want.max(-1).values[..., -1] - want.min(-1).values[..., -1]).max() > 0.1  # far from uniform: a real test


@pytest.mark.parametrize("mask", ["mask of ones", "no mask"])
def test_captured_rows_equal_eager_attention_for_one_sample(vlm, mask):
    batch = vlm.prepare(tiny.samples()[:1])
    inputs = forced(batch, REPLIES[:1])
    if mask == "no mask":
        del inputs["attention_mask"]
    rows = torch.arange(batch.length - 3, batch.length + 4)[None]
    want = eager_rows(vlm, inputs)[:, :, :, rows[0]]
    torch.testing.assert_close(captured(vlm, inputs, rows), want, atol=1e-5, rtol=0)


def test_captured_rows_while_generating_equal_eager_attention(vlm, batch):
    S, T = batch.length, 5
    settings = dict(do_sample=False, max_new_tokens=T, min_new_tokens=T)
    with eager(vlm):
        out = vlm.model.generate(**batch.tensors, **settings, output_attentions=True, return_dict_in_generate=True)
    order = [3, 0, 4, 1, 2]  # asked for out of order
    rows = (torch.tensor(order) + S - 1).expand(3, -1)
    with capture(vlm, rows, {"rows": lambda a: F.pad(a, (0, S + T - a.shape[-1]))}) as got:
        ids = vlm.model.generate(**batch.tensors, **settings)
    assert torch.equal(ids, out.sequences)
    for t, step in enumerate(out.attentions):
        want = torch.stack([a[:, :, -1] for a in step], 1)
        row = got["rows"][:, :, :, order.index(t)]
        torch.testing.assert_close(row[..., : S + t], want, atol=1e-5, rtol=0)
        assert not row[..., S + t :].any()


def test_row_p_minus_1_plus_t_predicts_token_t(vlm, batch):
    S, T = batch.length, 4
    with eager(vlm):
        out = vlm.model.generate(
            **batch.tensors, do_sample=False, max_new_tokens=T, min_new_tokens=T, output_attentions=True,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    reply = out.sequences[:, S:].tolist()
    inputs = forced(batch, reply)
    rows = torch.arange(S - 1, S - 1 + T).expand(3, -1)
    got, plain = captured(vlm, inputs, rows), logits(vlm, inputs)
    for t in range(T):
        want = torch.stack([a[:, :, -1] for a in out.attentions[t]], 1)
        torch.testing.assert_close(got[:, :, :, t, : S + t], want, atol=1e-5, rtol=0)
        torch.testing.assert_close(plain[:, S - 1 + t], out.logits[t], atol=1e-4, rtol=0)
    shifted = torch.stack([a[:, :, -1] for a in out.attentions[1]], 1)
    assert (got[:, :, :, 0, :S] - shifted[..., :S]).abs().max() > 1e-3  # one row off would be seen


def test_rows_handed_to_reductions_sum_to_one_and_see_no_padding_and_no_future(vlm, batch):
    rows, inputs = mixed_rows(batch), forced(batch)
    seen = []
    with capture(vlm, rows, {"sum": lambda a: seen.append(a.clone()) or a.sum(-1)}) as got, torch.no_grad():
        vlm.model(**inputs)
    used = (rows >= 0).float()
    torch.testing.assert_close(got["sum"], used[:, None, None].expand_as(got["sum"]), atol=1e-5, rtol=0)
    assert len(seen) == GRID[0]
    for attention in seen:
        for b, r in np.ndindex(*rows.shape):
            hidden = inputs["attention_mask"][b] == 0
            hidden[max(int(rows[b, r]), 0) + 1 :] = True
            assert not attention[b, :, r, hidden].any()


def test_several_reductions_share_one_pass(vlm, batch):
    rows, inputs = mixed_rows(batch), forced(batch)
    full = captured(vlm, inputs, rows)
    reduce = {"first ten": lambda a: a[..., :10], "peak": lambda a: a.max(-1).values}
    with capture(vlm, rows, reduce) as got, torch.no_grad():
        vlm.model(**inputs)
    assert torch.equal(got["first ten"], full[..., :10]) and torch.equal(got["peak"], full.max(-1).values)


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("kind", ["qwen2.5-vl", "internvl3.5"])
def test_captured_rows_and_uniform_attention_are_right_for_any_group_size(kind, kv_heads, tmp_path):
    vlm = load_vlm(tiny.write(kind, tmp_path, seed=kv_heads, num_key_value_heads=kv_heads), device="cpu")
    batch = vlm.prepare(tiny.samples())
    rows, inputs = torch.full((3, 1), batch.length), forced(batch)
    want = eager_rows(vlm, inputs)[..., batch.length, :]
    torch.testing.assert_close(captured(vlm, inputs, rows)[..., 0, :], want, atol=1e-5, rtol=0)
    check_uniform(vlm, inputs, heads((1, 2), (1, 7)))


@pytest.mark.parametrize("kind", ["qwen3-vl", "internvl3.5"])
def test_head_dim_need_not_be_hidden_size_over_heads(kind, tiny_models):
    vlm = tiny_models[kind]
    assert vlm.layers[0].self_attn.head_dim * GRID[1] != vlm.model.config.get_text_config().hidden_size


def test_a_row_that_never_came_by_is_an_error(vlm, batch):
    rows = torch.tensor([[batch.length - 1, batch.length + 3]] * 3)  # the second lies behind the prompt
    with pytest.raises(RuntimeError, match="1 of 2 rows"):
        captured(vlm, batch.tensors, rows)


def test_two_passes_in_one_capture_are_an_error(vlm, batch):
    rows = torch.full((3, 1), batch.length - 1)
    with pytest.raises(RuntimeError, match="one pass"):
        with capture(vlm, rows, {"mass": lambda a: a.sum(-1)}), torch.no_grad():
            vlm.model(**batch.tensors)
            vlm.model(**batch.tensors)


def test_capture_under_ablation_equals_eager_attention_under_an_o_proj_hook(vlm, batch):
    rows, inputs = mixed_rows(batch), forced(batch)
    with hooked(vlm, zeroing(SOME)):
        want = eager_rows(vlm, inputs)
    got = captured(vlm, inputs, rows, conditions=Ablation(SOME))
    for b, r in np.argwhere(rows.numpy() >= 0):
        torch.testing.assert_close(got[b, :, :, r], want[b, :, :, rows[b, r]], atol=1e-5, rtol=0)
    plain = captured(vlm, inputs, rows)
    assert torch.equal(got[:, 0], plain[:, 0])  # nothing acts before layer 0's own attention
    assert (got[:, 1] - plain[:, 1]).abs().max() > 1e-3


def test_capture_with_one_condition_per_row_ablates_only_that_row(vlm, batch):
    rows, inputs = mixed_rows(batch), forced(batch)
    got = captured(vlm, inputs, rows, conditions=[None, Ablation(SOME), Ablation(SOME, "uniform")])
    plain = captured(vlm, inputs, rows)
    zero = captured(vlm, inputs, rows, conditions=Ablation(SOME))
    uniform = captured(vlm, inputs, rows, conditions=Ablation(SOME, "uniform"))
    for b, want in enumerate([plain, zero, uniform]):
        torch.testing.assert_close(got[b], want[b], atol=1e-6, rtol=0)
    assert (zero[1] - plain[1]).abs().max() > 1e-3 and (uniform[2] - zero[2]).abs().max() > 1e-3


# ---------------------------------------------------------------- no condition, no trace


def test_without_a_condition_logits_are_bit_identical_to_the_stock_model(vlm, batch):
    stock = type(vlm.model).from_pretrained(vlm.name, dtype=torch.float32, attn_implementation="sdpa").eval()
    want, before = stock(**batch.tensors).logits, trace(vlm)
    assert torch.equal(logits(vlm, batch.tensors), want)
    with ablate(vlm, None):
        assert torch.equal(logits(vlm, batch.tensors), want)
    with ablate(vlm, [None, Ablation(SOME), None]):
        mixed = logits(vlm, batch.tensors)
    assert torch.equal(mixed[0], want[0]) and torch.equal(mixed[2], want[2]) and not torch.equal(mixed[1], want[1])
    with capture(vlm, torch.full((3, 1), batch.length - 1), {"mass": lambda a: a.sum(-1)}):
        assert torch.equal(logits(vlm, batch.tensors), want)
    assert torch.equal(logits(vlm, batch.tensors), want) and trace(vlm) == before


def test_an_empty_head_set_and_no_condition_are_the_same(vlm, batch):
    with ablate(vlm, Ablation(heads())):
        got = logits(vlm, batch.tensors)
    assert torch.equal(got, logits(vlm, batch.tensors))


def test_everything_is_undone_after_an_exception(vlm, batch):
    want, before = logits(vlm, batch.tensors), trace(vlm)
    for body in (lambda: logits(vlm, batch.tensors), lambda: None):
        with pytest.raises(KeyError, match="inside"), ablate(vlm, Ablation(SOME)):
            body()
            raise KeyError("inside")
    with pytest.raises(ZeroDivisionError), capture(vlm, torch.zeros(3, 1).long(), {"bad": lambda a: 1 / 0}):
        logits(vlm, batch.tensors)
    assert trace(vlm) == before
    assert torch.equal(logits(vlm, batch.tensors), want)


def test_the_context_restores_the_attention_function_it_found(vlm, batch):
    with eager(vlm):
        with ablate(vlm, None):
            logits(vlm, batch.tensors)
        assert vlm.model.config.get_text_config()._attn_implementation == "eager"
    assert vlm.model.config.vision_config._attn_implementation == "sdpa"


# ---------------------------------------------------------------- ablation


def test_zero_ablation_equals_an_o_proj_pre_hook_exactly(vlm, batch):
    inputs = forced(batch)
    with hooked(vlm, zeroing(SOME)):
        want = logits(vlm, inputs)
    with ablate(vlm, Ablation(SOME)):
        got = logits(vlm, inputs)
    visible = inputs["attention_mask"].bool()
    assert torch.equal(got, want)
    assert (got - logits(vlm, inputs))[visible].abs().max() > 0.1


def test_zero_ablation_equals_zeroed_o_proj_columns(vlm, batch):
    edited = copy.deepcopy(vlm.model)
    with torch.no_grad():
        for head in SOME:
            o_proj = edited.model.language_model.layers[head.layer].self_attn.o_proj
            width = o_proj.in_features // GRID[1]
            o_proj.weight[:, head.head * width : (head.head + 1) * width] = 0
        want = edited(**batch.tensors).logits
    with ablate(vlm, Ablation(SOME)):
        torch.testing.assert_close(logits(vlm, batch.tensors), want, atol=1e-5, rtol=0)


def test_zeroing_query_head_5_leaves_the_heads_of_its_key_group_alone(vlm, batch):
    plain = o_proj_inputs(vlm, batch.tensors)
    with ablate(vlm, Ablation(heads((1, 5)))):
        got = o_proj_inputs(vlm, batch.tensors)
    others = [h for h in range(8) if h != 5]
    assert torch.equal(got[0], plain[0])
    assert torch.equal(got[1][:, :, others], plain[1][:, :, others])
    assert not got[1][:, :, 5].any() and plain[1][:, :, 5].any()


@torch.no_grad()
def check_uniform(vlm, inputs, chosen):
    """Mean of the values of every visible position, recomputed from `v_proj` in a loop over positions."""
    values, got = {}, []
    handles = [
        m.self_attn.v_proj.register_forward_hook(lambda module, args, out, i=i: values.__setitem__(i, out))
        for i, m in enumerate(vlm.layers)
    ]
    with ablate(vlm, Ablation(chosen, "uniform")), hooked(vlm, lambda i, x: got.append(x)):
        vlm.model(**inputs)
    for handle in handles:
        handle.remove()
    config = vlm.model.config.get_text_config()
    group = config.num_attention_heads // config.num_key_value_heads
    for head in chosen:
        value = values[head.layer].unflatten(-1, (config.num_key_value_heads, -1))[:, :, head.head // group]
        for b, p in np.argwhere(inputs["attention_mask"].numpy() == 1):
            visible = [j for j in range(p + 1) if inputs["attention_mask"][b, j]]
            want = sum(value[b, j] for j in visible) / len(visible)
            torch.testing.assert_close(got[head.layer][b, p, head.head], want, atol=1e-5, rtol=1e-5)


def test_uniform_ablation_is_the_mean_of_the_visible_values(vlm, batch):
    check_uniform(vlm, forced(batch), heads((0, 3), (1, 4), (2, 7)))


def test_uniform_ablation_of_one_unpadded_sample_is_the_mean_of_the_visible_values(vlm):
    check_uniform(vlm, vlm.prepare(tiny.samples()[:1]).tensors, heads((1, 4)))


def test_uniform_and_mean_ablation_leave_other_heads_alone(vlm, batch):
    plain = o_proj_inputs(vlm, batch.tensors)
    for ablation in (Ablation(heads((1, 5)), "uniform"), Ablation(heads((1, 5)), "mean", means=random_means(vlm))):
        with ablate(vlm, ablation):
            got = o_proj_inputs(vlm, batch.tensors)
        others = [h for h in range(8) if h != 5]
        assert torch.equal(got[1][:, :, others], plain[1][:, :, others])


def test_uniform_ablation_is_not_zero_ablation(vlm, batch):
    out = []
    for kind in ("zero", "uniform"):
        with ablate(vlm, Ablation(SOME, kind)):
            out.append(logits(vlm, batch.tensors)[:, -1])
    assert (out[0] - out[1]).abs().max() > 0.05


def random_means(vlm) -> torch.Tensor:
    return torch.randn(*GRID, vlm.layers[0].self_attn.head_dim, generator=torch.Generator().manual_seed(1))


def test_mean_ablation_puts_the_given_means_in_place(vlm, batch):
    means = random_means(vlm)

    def edit(i, x):
        for head in SOME:
            if head.layer == i:
                x[:, :, head.head] = means[i, head.head]

    with hooked(vlm, edit):
        want = logits(vlm, batch.tensors)
    with ablate(vlm, Ablation(SOME, "mean", means=means)):
        got = logits(vlm, batch.tensors)
    assert torch.equal(got, want)
    assert (got - logits(vlm, batch.tensors)).abs().max() > 0.1


def test_means_of_two_conditions_in_one_batch_are_kept_apart(vlm, batch):
    one, two = random_means(vlm), -random_means(vlm)
    conditions = [Ablation(SOME, "mean", means=one), None, Ablation(SOME, "mean", means=two)]
    with ablate(vlm, conditions):
        got = logits(vlm, batch.tensors)
    for b, condition in enumerate(conditions):
        with ablate(vlm, condition):
            torch.testing.assert_close(got[b], logits(vlm, batch.tensors)[b], atol=1e-5, rtol=0)


def test_head_means_equal_a_brute_force_average_over_real_positions(vlm, batch):
    total, count = torch.zeros(*GRID, vlm.layers[0].self_attn.head_dim, dtype=torch.float64), 0
    batches = [batch, vlm.prepare(tiny.samples((60, 90), (140, 60)))]
    for b in batches:
        outputs = o_proj_inputs(vlm, b.tensors)
        for row, column in np.argwhere(b.tensors["attention_mask"].numpy() == 1):
            count += 1
            for i in range(GRID[0]):
                total[i] += outputs[i][row, column].double()
    got = head_means(vlm, batches)
    torch.testing.assert_close(got, (total / count).float(), atol=1e-6, rtol=1e-5)


def test_means_over_no_batch_are_an_error(vlm):
    with pytest.raises(ValueError, match="[Nn]o "):
        head_means(vlm, [])


# ---------------------------------------------------------------- phases


def caches(out) -> list[torch.Tensor]:
    return [torch.stack([entry.keys, entry.values]) for entry in out.cache.layers]


@pytest.mark.parametrize("kind", ["zero", "uniform", "mean"])
def test_decode_phase_leaves_the_prefill_cache_and_the_first_token_bit_identical(vlm, batch, kind):
    S, means = batch.length, random_means(vlm) if kind == "mean" else None
    settings = dict(
        do_sample=False, max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True, output_logits=True
    )
    plain = vlm.model.generate(**batch.tensors, **settings)
    with ablate(vlm, Ablation(SOME, kind, "decode", means), prompt_length=S):
        got = vlm.model.generate(**batch.tensors, **settings)
    for a, b in zip(caches(got), caches(plain)):
        assert a.shape[-2] == S + 3 and torch.equal(a[..., :S, :], b[..., :S, :])
    assert torch.equal(got.logits[0], plain.logits[0])
    assert (got.logits[1] - plain.logits[1]).abs().max() > 1e-2


@torch.no_grad()
def test_phase_all_changes_the_cache_only_above_the_ablated_layer(vlm, batch):
    visible = batch.tensors["attention_mask"].bool()
    plain = caches(vlm.model(**batch.tensors, use_cache=True))
    for i in range(GRID[0]):
        with ablate(vlm, Ablation(heads((i, 5)))):
            got = caches(vlm.model(**batch.tensors, use_cache=True))
        for j, (a, b) in enumerate(zip(got, plain)):
            assert torch.equal(a, b) == (j <= i), (i, j)
            moved = (a - b).abs().sum((0, 2, 4)) > 0
            assert not (j > i) or moved[visible].all()


@pytest.mark.parametrize("kind", ["zero", "uniform"])
def test_decode_phase_in_a_teacher_forced_pass_touches_only_rows_after_the_prompt(vlm, batch, kind):
    inputs, S = forced(batch), batch.length
    plain = logits(vlm, inputs)
    with ablate(vlm, Ablation(SOME, kind, "decode"), prompt_length=S):
        got = logits(vlm, inputs)
    assert torch.equal(got[:, :S], plain[:, :S])
    for b, reply in enumerate(REPLIES):
        assert ((got - plain)[b, S : S + len(reply)].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("phase", ["all", "decode"])
@pytest.mark.parametrize("kind", ["zero", "uniform", "mean"])
def test_generation_with_cache_equals_a_teacher_forced_pass_under_ablation(vlm, batch, kind, phase):
    S, T = batch.length, 4
    ablation = Ablation(SOME, kind, phase, random_means(vlm) if kind == "mean" else None)
    with ablate(vlm, ablation, prompt_length=S):
        out = vlm.model.generate(
            **batch.tensors, do_sample=False, max_new_tokens=T, min_new_tokens=T, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    inputs = forced(batch, out.sequences[:, S:].tolist())
    with ablate(vlm, ablation, prompt_length=S):
        again = logits(vlm, inputs)
    torch.testing.assert_close(again[:, S - 1 : S - 1 + T], torch.stack(out.logits, 1), atol=1e-4, rtol=0)


def test_decode_phase_without_the_prompt_length_is_refused(vlm):
    with pytest.raises(ValueError, match="prompt_length"), ablate(vlm, [None, Ablation(SOME, phase="decode")]):
        pass


# ---------------------------------------------------------------- conditions as rows of one batch


def several(vlm) -> list:
    return [
        Ablation(SOME), None, Ablation(layer(1), "uniform"), Ablation(SOME, "mean", means=random_means(vlm)),
        Ablation(layer(2), phase="decode"),
    ]  # fmt: skip


@torch.no_grad()
def test_logits_of_a_mixed_batch_equal_single_runs(vlm, batch):
    conditions = several(vlm)
    with ablate(vlm, conditions * 3, batch.length):
        got = vlm.model(**vlm.inputs(batch, copies=5)).logits.unflatten(0, (3, 5))
    for c, condition in enumerate(conditions):
        with ablate(vlm, condition, batch.length):
            want = logits(vlm, batch.tensors)
        for b in range(3):
            seen = batch.tensors["attention_mask"][b].bool()
            torch.testing.assert_close(got[b, c][seen], want[b][seen], atol=1e-5, rtol=0)


def test_replies_of_a_mixed_batch_equal_single_runs(vlm, batch):
    conditions = several(vlm)
    got = generate(vlm, batch, conditions)
    assert got.shape[:2] == (3, 5)
    for b, sample in enumerate(batch.samples):
        alone = vlm.prepare([sample])
        for c, condition in enumerate(conditions):
            want = generate(vlm, alone, [condition])[0, 0]
            assert trimmed(got[b, c]) == trimmed(want)
    assert len({tuple(got[0, c]) for c in range(5)}) > 2  # the conditions do act


def trimmed(ids) -> list[int]:
    return [int(i) for i in ids if i >= 0]


def test_zero_ablated_replies_equal_stock_generation_under_an_o_proj_hook(vlm, batch):
    settings = dict(do_sample=False, max_new_tokens=6)
    got = generate(vlm, batch, [Ablation(SOME), Ablation(SOME, phase="decode"), None])
    for c, edit in enumerate([zeroing(SOME), zeroing(SOME, decode_only=True), lambda i, x: None]):
        with hooked(vlm, edit):
            ids = vlm.model.generate(**batch.tensors, **settings)[:, batch.length :]
        for b in range(3):
            want = until_stop(vlm, ids[b].tolist())
            assert trimmed(got[b, c])[: len(want)] == want and len(trimmed(got[b, c])) == len(want)


def until_stop(vlm, ids) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in vlm.stop_ids), len(ids) - 1)
    return ids[: end + 1]


def test_replies_do_not_depend_on_the_sampling_settings_that_come_with_a_model(vlm, batch, monkeypatch):
    want = generate(vlm, batch, [None, Ablation(SOME)])
    for name, value in dict(do_sample=True, temperature=3.0, top_k=3, repetition_penalty=9.0).items():
        monkeypatch.setattr(vlm.model.generation_config, name, value)
    assert np.array_equal(generate(vlm, batch, [None, Ablation(SOME)]), want)


def test_replies_are_minus_one_after_the_first_stop_token(vlm, batch, monkeypatch):
    plain = generate(vlm, batch)[:, 0]
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", [int(plain[1, 2])])
    vlm.__dict__.pop("stop_ids", None)
    got = generate(vlm, batch)[:, 0]
    vlm.__dict__.pop("stop_ids", None)
    end = plain[1].tolist().index(plain[1, 2]) + 1
    assert got[1, :end].tolist() == plain[1, :end].tolist() and (got[1, end:] == -1).all()


def test_the_vision_tower_runs_once_per_batch_whatever_the_conditions(vlm, batch):
    calls = []
    tower = vlm.model.get_submodule(vlm.family.vision)
    handle = tower.register_forward_hook(lambda *_: calls.append(1))
    generate(vlm, batch, several(vlm))
    generate(vlm, batch, [Ablation(SOME, phase="decode")])
    with torch.no_grad(), ablate(vlm, Ablation(SOME)):
        vlm.model(**with_replies(vlm, batch, REPLIES))
    handle.remove()
    assert len(calls) == 1


@torch.inference_mode()
def test_teacher_forcing_inputs_pad_prompts_left_and_replies_right(vlm, batch):
    got, want = with_replies(vlm, batch, REPLIES), forced(batch)
    assert got["attention_mask"].tolist() == want["attention_mask"].tolist()
    seen = want["attention_mask"].bool()
    assert torch.equal(got["input_ids"][seen], want["input_ids"][seen])
    torch.testing.assert_close(vlm.model(**got).logits[seen], vlm.model(**want).logits[seen], atol=1e-5, rtol=0)


# ---------------------------------------------------------------- a silent no-op is impossible


@pytest.mark.parametrize("kind", ["zero", "uniform"])
def test_ablating_any_whole_layer_changes_the_logits(vlm, batch, kind):
    plain = logits(vlm, batch.tensors)[:, -1]
    for i in range(GRID[0]):
        with ablate(vlm, Ablation(layer(i), kind)):
            moved = (logits(vlm, batch.tensors)[:, -1] - plain).abs().amax(-1)
        assert (moved > 1e-2).all(), i


def test_every_single_head_matters(vlm, batch):
    plain = logits(vlm, batch.tensors)[:, -1]
    for i, h in np.ndindex(*GRID):
        with ablate(vlm, Ablation(heads((i, h)))):
            assert (logits(vlm, batch.tensors)[:, -1] - plain).abs().max() > 1e-4, (i, h)


def looked_at(batch) -> list[list[int]]:
    """Columns of each sample's segment, by a loop over cells of the grid."""
    found = []
    for sample, grid, columns in zip(batch.samples, batch.grids, batch.image_columns):
        box = sample.box
        found.append([int(c) for (x0, y0, x1, y1), c in zip(grid.cells, columns)
                      if min(x1, box.x1) > max(x0, box.x0) and min(y1, box.y1) > max(y0, box.y0)])  # fmt: skip
    return found


@contextlib.contextmanager
def pointing(vlm, chosen: HeadSet, columns: list[list[int]], first: int):
    """Stock attention; before `o_proj` the chosen heads' outputs are averages of value states over given columns, which
    hooks on `v_proj` have kept, for queries at `first` or later that come after one of these columns."""
    values = {}
    keep = [m.self_attn.v_proj.register_forward_hook(lambda module, args, out, i=i: values.__setitem__(i, out))
            for i, m in enumerate(vlm.layers)]  # fmt: skip

    def edit(i, x):
        for head in (h for h in chosen if h.layer == i):
            for b, places in enumerate(columns):
                states = values[i][b].unflatten(-1, (-1, x.shape[-1]))
                shared = vlm.grid[1] // states.shape[1]
                for q in range(first, x.shape[1]):
                    before = [c for c in places if c <= q]
                    if before:
                        x[b, q, head.head] = states[before, head.head // shared].mean(0)

    try:
        with hooked(vlm, edit):
            yield
    finally:
        for handle in keep:
            handle.remove()


@pytest.mark.parametrize("phase", ["all", "decode"])
def test_steering_is_the_average_value_of_the_segment_by_hooks_on_v_proj_and_o_proj(vlm, batch, phase):
    inputs, first = forced(batch), batch.length if phase == "decode" else 0
    with pointing(vlm, SOME, looked_at(batch), first):
        want = logits(vlm, inputs)
    with ablate(vlm, Steering(SOME, phase), batch.length, segment_columns(batch)):
        got = logits(vlm, inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], atol=2e-4, rtol=0)
    plain = logits(vlm, inputs)
    assert (got - plain)[real].abs().max() > 0.1
    before = torch.arange(real.shape[1]) < batch.length
    moved = (got - plain)[real & before].abs().max()
    assert moved == 0 if phase == "decode" else moved > 0.1


def test_steered_heads_put_all_their_attention_on_the_segment(vlm, batch):
    """Seen from the next layer: with all heads of layer 0 steered, what stands elsewhere in the picture is not read."""
    other = [dataclasses.replace(s, box=s.box.scaled(0.5, 0.5)) for s in batch.samples]
    inputs = forced(batch)
    with ablate(vlm, Steering(layer(0), "all"), batch.length, segment_columns(batch)):
        one = logits(vlm, inputs)
    with ablate(
        vlm, Steering(layer(0), "all"), batch.length, segment_columns(dataclasses.replace(batch, samples=other))
    ):
        two = logits(vlm, inputs)
    assert (one - two).abs().max() > 1e-2


def test_segment_columns_are_the_tokens_of_the_box_or_else_of_the_mask(vlm, batch):
    for row, want in zip(segment_columns(batch), looked_at(batch)):
        assert row.nonzero().ravel().tolist() == sorted(want) and want
    width, height = batch.samples[0].image.size
    corner = np.zeros((height, width), dtype=bool)
    corner[-1, -1] = True
    masked = dataclasses.replace(batch, samples=[dataclasses.replace(s, mask=None) for s in batch.samples])
    masked.samples[0] = dataclasses.replace(masked.samples[0], mask=corner)
    found = segment_columns(masked)[0].nonzero().ravel().tolist()
    cells = [c for c, cell in zip(batch.image_columns[0], batch.grids[0].cells) if tuple(cell[2:]) == (width, height)]
    assert found == sorted(map(int, cells)) and found != looked_at(batch)[0]


def test_a_sample_without_a_segment_cannot_be_steered(vlm, batch):
    batch.samples[1] = dataclasses.replace(batch.samples[1], box=None)
    with pytest.raises(ValueError, match="noise-1 has no segment"):
        generate(vlm, batch, [None, Steering(SOME)])


def test_steered_replies_of_a_mixed_batch_equal_single_runs(vlm, batch):
    mixed = [Steering(SOME, "all"), None, Ablation(SOME), Steering(layer(1))]
    apart = [Steering(SOME), Steering(layer(1)), None]  # all decode: these share a prefill
    for conditions in (mixed, apart):
        together = generate(vlm, batch, conditions)
        for i, condition in enumerate(conditions):
            for b, sample in enumerate(batch.samples):
                single = generate(vlm, vlm.prepare([sample]), [condition])
                assert trimmed(together[b, i]) == trimmed(single[0, 0])
    assert len({tuple(trimmed(row)) for row in generate(vlm, batch, mixed)[0]}) > 1


@pytest.mark.parametrize("phase", ["all", "decode"])
def test_steered_generation_with_cache_equals_a_teacher_forced_pass(vlm, batch, phase):
    steering = Steering(SOME, phase)
    replies = [trimmed(row[0]) for row in generate(vlm, batch, [steering])]
    with ablate(vlm, steering, batch.length, segment_columns(batch)):
        scores = logits(vlm, with_replies(vlm, batch, replies))
    scores[..., vlm.model.generation_config.suppress_tokens] = -torch.inf
    for b, reply in enumerate(replies):
        assert scores[b, batch.length - 1 : batch.length - 1 + len(reply)].argmax(-1).tolist() == reply


def test_steering_without_targets_or_with_an_unknown_phase_is_refused(vlm, batch):
    with pytest.raises(ValueError, match="targets"), ablate(vlm, Steering(SOME), batch.length):
        pass
    with pytest.raises(ValueError, match="phase"):
        Steering(SOME, "prefill")
    assert Steering(SOME).describe() != Steering(SOME, "all").describe() != Ablation(SOME).describe()


def test_a_context_in_which_the_model_never_ran_is_an_error(vlm):
    before = trace(vlm)
    with pytest.raises(RuntimeError, match=r"never reached"), ablate(vlm, Ablation(SOME)):
        pass
    with pytest.raises(RuntimeError), capture(vlm, torch.zeros(1, 1).long(), {"mass": lambda a: a.sum(-1)}):
        pass
    assert trace(vlm) == before


def test_switching_the_attention_function_inside_the_context_is_an_error(vlm, batch):
    with pytest.raises(RuntimeError, match="never reached"), ablate(vlm, Ablation(SOME)):
        vlm.model.set_attn_implementation({"text_config": "eager"})
        logits(vlm, batch.tensors)


def test_a_static_cache_is_refused(vlm, batch):
    config = vlm.model.config.get_text_config()
    with pytest.raises(ValueError, match="StaticCache"), ablate(vlm, Ablation(SOME)):
        cache = StaticCache(config=config, max_cache_len=batch.length + 8)
        vlm.model(**batch.tensors, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="StaticCache"), ablate(vlm, None):
        vlm.model.generate(**batch.tensors, max_new_tokens=2, cache_implementation="static", disable_compile=True)


def test_a_missing_mask_function_is_refused(vlm, batch, monkeypatch):
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, KERNEL)
    with pytest.raises(RuntimeError, match="mask function"), ablate(vlm, None):
        logits(vlm, batch.tensors)


def test_conditions_for_another_batch_size_are_refused(vlm, batch):
    with pytest.raises(ValueError, match="2 batch rows"), ablate(vlm, [None, Ablation(SOME)]):
        logits(vlm, batch.tensors)
    rows = torch.zeros(2, 1).long()
    with pytest.raises(ValueError, match="2 batch rows"):
        captured(vlm, batch.tensors, rows)
    with pytest.raises(ValueError, match="conditions for 2 batch rows"):
        captured(vlm, batch.tensors, rows, conditions=[None] * 3)


def test_heads_of_another_grid_are_refused(vlm):
    other = HeadSet((Head(0, 0),), (28, 28), "list of a large model")
    with pytest.raises(ValueError, match="large model"), ablate(vlm, Ablation(other)):
        pass
    with pytest.raises(ValueError, match="L3H0 does not exist"):
        heads((3, 0))


def test_nested_contexts_are_refused(vlm, batch):
    rows = torch.full((3, 1), batch.length - 1)
    with ablate(vlm, Ablation(SOME)):
        with pytest.raises(RuntimeError, match="already open"), capture(vlm, rows, {"mass": lambda a: a.sum(-1)}):
            pass
        got = logits(vlm, batch.tensors)  # the outer context still acts
    with ablate(vlm, Ablation(SOME)):
        assert torch.equal(logits(vlm, batch.tensors), got)


def test_means_of_another_model_are_refused(vlm, batch):
    for shape in [(5, 8, 4), (3, 4, 8), (7, 8, vlm.layers[0].self_attn.head_dim)]:
        ablation = Ablation(SOME, "mean", means=torch.zeros(shape))
        with pytest.raises((ValueError, RuntimeError), match="means"), ablate(vlm, ablation):
            logits(vlm, batch.tensors)


def test_an_unknown_kind_or_phase_is_refused():
    for words in ({"kind": "zeros"}, {"phase": "prefill"}, {"kind": "mean"}, {"kind": "zero", "means": torch.zeros(1)}):
        with pytest.raises(ValueError, match="[Aa]blation kind"):
            Ablation(SOME, **words)


def test_what_an_ablation_does_is_all_in_its_description(vlm):
    means = random_means(vlm)
    different = [
        Ablation(SOME), Ablation(SOME, "uniform"), Ablation(SOME, phase="decode"), Ablation(SOME.top(3)),
        Ablation(SOME, "mean", means=means), Ablation(SOME, "mean", means=means.flip(1)),
        Ablation(SOME, "mean", means=means.flip(2)), Ablation(SOME, "mean", means=means.flip(0)),
    ]  # fmt: skip
    described = [a.describe() for a in different]
    assert all(described[i] != described[j] for i in range(8) for j in range(i))
    assert Ablation(SOME, "mean", means=means.clone()).describe() == described[4]


# ---------------------------------------------------------------- several continuations in one pass


def alone(vlm, batch, b: int, start: int, ids) -> dict:
    """Inputs of an ordinary pass over one row's prompt up to column `start`, without padding, and then `ids`."""
    tensors, length = vlm.prepare([batch.samples[b]]).tensors, start - padding(batch)[b]
    more = {"input_ids": list(ids), "attention_mask": [1] * len(ids), "mm_token_type_ids": [0] * len(ids)}
    return {
        k: torch.cat([v[:, :length], torch.tensor([more[k]], dtype=v.dtype)], 1) if k in more else v
        for k, v in tensors.items()
    }


def padding(batch) -> list[int]:
    return (batch.tensors["attention_mask"] == 0).sum(1).tolist()


@torch.no_grad()
def states(vlm, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of every layer [layers, B, T, hidden], and logits [B, T, vocabulary]."""
    seen = []
    handles = [m.register_forward_hook(lambda m, a, out: seen.append(out)) for m in vlm.layers]
    try:
        found = vlm.model(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(seen), found


def null_branch(vlm, batch, b: int) -> tuple[Branch, dict]:
    """The prompt's other ending, N/A for the expression, from the token where the two part; and the null prompt."""
    sample = batch.samples[b]
    null = vlm.prepare([dataclasses.replace(sample, text="N/A")]).tensors
    mine, other = vlm.prepare([sample]).tensors["input_ids"][0].tolist(), null["input_ids"][0].tolist()
    parted = next(i for i, (x, y) in enumerate(zip(mine, other)) if x != y)
    return Branch(parted + padding(batch)[b], other[parted:]), null


def several_branches(vlm, batch) -> list[list[Branch]]:
    """A reply, another one (none for the first row), a null question, and an empty branch in between."""
    S = batch.length
    others = [[], [60, 61, 62, 63], [64]]
    return [
        [Branch(S, REPLIES[b]), Branch(S, []), null_branch(vlm, batch, b)[0], Branch(S, others[b])] for b in range(3)
    ]


def test_every_branch_is_what_a_pass_over_prompt_and_branch_alone_gives(vlm, batch):
    branches = several_branches(vlm, batch)
    inputs, columns = with_branches(vlm, batch, branches)
    layers, scores = states(vlm, inputs)
    assert len(set(padding(batch))) == 3 and len({len(g) for g in batch.grids}) > 1
    for b, own in enumerate(branches):
        pad = padding(batch)[b]
        for branch, at in zip(own, columns[b]):
            assert inputs["input_ids"][b, at].tolist() == list(branch.ids)
            want, logits_alone = states(vlm, alone(vlm, batch, b, branch.start, branch.ids))
            place = [*range(pad, branch.start), *at]
            torch.testing.assert_close(layers[:, b, place], want[:, 0], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(scores[b, place], logits_alone[0], atol=1e-4, rtol=0)


def test_captured_rows_of_every_branch_are_eager_attention_of_that_branch_alone(vlm, batch):
    branches = several_branches(vlm, batch)
    inputs, columns = with_branches(vlm, batch, branches)
    every = [np.concatenate([[batch.length - 1], *columns[b]]).astype(int) for b in range(3)]
    rows = torch.tensor([[*r, *[-1] * (max(map(len, every)) - len(r))] for r in every])
    got = captured(vlm, inputs, rows)
    for b, own in enumerate(branches):
        for branch, at in zip(own, columns[b]):
            want = eager_rows(vlm, alone(vlm, batch, b, branch.start, branch.ids))[0]
            place = np.array([*range(padding(batch)[b], branch.start), *at])
            hidden = np.setdiff1d(np.arange(got.shape[-1]), place)
            for i, column in enumerate(at):
                row = got[b, :, :, every[b].tolist().index(column)]
                torch.testing.assert_close(row[..., place], want[:, :, len(place) - len(at) + i], atol=1e-5, rtol=0)
                assert not row[..., hidden].any()


def test_the_null_question_as_a_branch_is_the_null_prompt_alone(vlm, batch):
    made = [null_branch(vlm, batch, b) for b in range(3)]
    inputs, columns = with_branches(vlm, batch, [[Branch(batch.length, REPLIES[b]), made[b][0]] for b in range(3)])
    layers, scores = states(vlm, inputs)
    for b, (branch, null) in enumerate(made):
        assert branch.start < batch.length  # the two prompts part before the end of either
        want, logits_alone = states(vlm, null)
        place = [*range(padding(batch)[b], branch.start), *columns[b][1]]
        torch.testing.assert_close(layers[:, b, place], want[:, 0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(scores[b, place], logits_alone[0], atol=1e-4, rtol=0)


def test_branches_do_not_see_each_other(vlm, batch):
    branches = several_branches(vlm, batch)
    inputs, columns = with_branches(vlm, batch, branches)
    layers, scores = states(vlm, inputs)
    for changed in range(len(branches[1])):
        other = [[Branch(x.start, [i + 1 for i in x.ids]) if n == changed else x for n, x in enumerate(own)]
                 for own in branches]  # fmt: skip
        again, same = with_branches(vlm, batch, other)
        layers_now, scores_now = states(vlm, again)
        for b, own in enumerate(columns):
            assert all((x == y).all() for x, y in zip(own, same[b]))
            for n, at in enumerate(own):
                moved = not torch.equal(scores[b, at], scores_now[b, at])
                assert moved == (n == changed and len(at) > 0), (b, n, changed)
            prompt = slice(padding(batch)[b], batch.length)
            assert torch.equal(layers[:, b, prompt], layers_now[:, b, prompt])


def test_all_branches_empty_is_the_prompt_alone(vlm, batch):
    inputs, columns = with_branches(vlm, batch, [[Branch(batch.length, [])], [], [Branch(5, [])]])
    assert [[len(c) for c in own] for own in columns] == [[0], [], [0]]
    visible = batch.tensors["attention_mask"].bool()
    got, want = logits(vlm, inputs)[:, : batch.length], logits(vlm, batch.tensors)
    torch.testing.assert_close(got[visible], want[visible], atol=1e-4, rtol=0)


def test_branches_of_texts_need_no_picture(vlm):
    facts = ["The number is 12345, they say.", "It is 7."]
    texts = [Sample(str(i), None, f, "What is it?", answer="7", task="answer", context=f) for i, f in enumerate(facts)]
    batch = vlm.prepare(texts)
    branches = [[Branch(batch.length, [70, 71]), null_branch(vlm, batch, b)[0]] for b in range(2)]
    inputs, columns = with_branches(vlm, batch, branches)
    scores = logits(vlm, inputs)
    for b, own in enumerate(branches):
        for branch, at in zip(own, columns[b]):
            want = logits(vlm, alone(vlm, batch, b, branch.start, branch.ids))[0]
            place = [*range(padding(batch)[b], branch.start), *at]
            torch.testing.assert_close(scores[b, place], want, atol=1e-4, rtol=0)
