"""Replies that were not decoded token by token, against those that were: stock generation, one sample and one
condition at a time, heads cut by a hook on `o_proj`.

The oracle shares nothing with what it checks but the model: no batch, no draft, no cache of another pass, no registered
attention function.
"""

import contextlib
import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import trace
from tests.test_attention import GRID, SOME, heads, hooked, layer, zeroing
from vrhlib import attention, decoding
from vrhlib.attention import KINDS, PHASES, Ablation, Steering
from vrhlib.decoding import generate
from vrhlib.samples import Sample

pytestmark = pytest.mark.usefixtures("root")
LATE, MIDDLE = heads((2, 3), (2, 7)), heads((1, 2), (2, 0), (2, 1))
SETS = {"layer 0": SOME, "layer 1": MIDDLE, "layer 2": LATE, "a whole layer": layer(1)}


def trimmed(ids) -> list[int]:
    return [int(i) for i in ids if i >= 0]


def found(got, samples: int, conditions: int) -> list[list[list[int]]]:
    return [[trimmed(got.ids[b, c]) for c in range(conditions)] for b in range(samples)]


@torch.no_grad()
def alone(vlm, sample: Sample, cut, phase: str = "all", limit: int | None = None) -> list[int]:
    """The loop that everybody writes: processor, vision tower, prefill and decoding for one sample, one condition."""
    inputs = vlm.prepare([sample]).tensors
    length = inputs["input_ids"].shape[1]
    with hooked(vlm, zeroing(cut, phase == "decode") if cut else lambda i, x: None):
        ids = vlm.model.generate(
            **inputs, do_sample=False, max_new_tokens=limit or vlm.max_new_tokens, eos_token_id=sorted(vlm.stop_ids),
            pad_token_id=vlm.tokenizer.pad_token_id, temperature=None, top_p=None, top_k=None, repetition_penalty=None,
        )[0, length:].tolist()  # fmt: skip
    end = next((i + 1 for i, token in enumerate(ids) if token in vlm.stop_ids), len(ids))
    return ids[:end]


def one_by_one(vlm, batch, conditions, limit=None) -> list[list[list[int]]]:
    """The same for any intervention: plain decoding, one sample and one condition at a time."""
    found = []
    for sample in batch.samples:
        own = vlm.prepare([sample])
        found.append([trimmed(attention.generate(vlm, own, [c], limit)[0, 0]) for c in conditions])
    return found


@contextlib.contextmanager
def passes(vlm):
    """Shapes [rows, columns] of everything that enters the last layer, in order."""
    seen = []
    handle = vlm.layers[-1].register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    try:
        yield seen
    finally:
        handle.remove()


def stop_at(vlm, monkeypatch, *tokens: int) -> None:
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", list(tokens))
    vlm.__dict__.pop("stop_ids", None)
    assert set(tokens) <= vlm.stop_ids


@pytest.fixture
def idle(vlm):
    """Makes heads whose output is not used, in a copy of the model: cutting them leaves every reply as it was."""
    before = vlm.model
    vlm.model = copy.deepcopy(before)

    def make(chosen):
        for head in chosen:
            weight = vlm.layers[head.layer].self_attn.o_proj.weight
            with torch.no_grad():
                weight.unflatten(1, (GRID[1], -1))[:, head.head] = 0

    yield make
    vlm.model = before


# ---------------------------------------------------------------- the same replies


@pytest.mark.parametrize("phase", PHASES)
def test_replies_equal_stock_generation_under_an_o_proj_hook_one_at_a_time(vlm, batch, phase):
    got = generate(vlm, batch, [None, *(Ablation(cut, phase=phase) for cut in SETS.values())])
    want = [[alone(vlm, s, cut, phase) for cut in (None, *SETS.values())] for s in batch.samples]
    assert found(got, 3, 5) == want
    assert len({tuple(ids) for own in want for ids in own}) > 5, "conditions that all reply alike prove nothing"


@pytest.mark.parametrize("limit", [1, 2, 3, 16])
def test_replies_that_are_cut_at_the_limit(vlm, batch, limit):
    conditions = [Ablation(cut, phase=phase) for cut in SETS.values() for phase in PHASES] + [None]
    got = generate(vlm, batch, conditions, limit)
    assert found(got, 3, 9) == one_by_one(vlm, batch, conditions, limit)
    assert got.ids.shape[-1] <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_both_phases_shares_one_batch(vlm, batch, kind):
    means = torch.randn(*vlm.grid, vlm.layers[0].self_attn.head_dim) if kind == "mean" else None
    conditions = [Ablation(cut, kind, phase, means) for cut in (SOME, MIDDLE, LATE) for phase in PHASES]
    got = generate(vlm, batch, conditions)
    assert found(got, 3, 6) == one_by_one(vlm, batch, conditions)


@pytest.mark.parametrize("phase", PHASES)
def test_steered_replies(vlm, batch, phase):
    conditions = [Steering(SOME, phase), None, Steering(LATE, phase), Ablation(LATE, phase=phase)]
    got = generate(vlm, batch, conditions)
    want = one_by_one(vlm, batch, conditions)
    assert found(got, 3, 4) == want
    assert want[0][0] != want[0][1]


@pytest.mark.parametrize("which", ["first", "second", "late", "each"])
def test_early_stop_tokens_end_some_replies_and_not_others(vlm, batch, monkeypatch, which):
    """The stop token is one that some replies write: at once, after a token, late; or one of each sample's."""
    plain = [alone(vlm, s, None) for s in batch.samples]
    place = {"first": 0, "second": 1, "late": 4, "each": 2}[which]
    stop_at(vlm, monkeypatch, *({ids[place] for ids in plain} if which == "each" else {plain[0][place]}))
    conditions = [None, *(Ablation(cut, phase=phase) for cut in SETS.values() for phase in PHASES)]
    got = generate(vlm, batch, conditions)
    assert found(got, 3, 9) == one_by_one(vlm, batch, conditions)
    assert len({len(ids) for ids in found(got, 3, 9)[0]}) > 1 or which == "first"


def test_suppressed_tokens_are_never_written(vlm, batch, monkeypatch):
    plain = generate(vlm, batch, [Ablation(SOME)])
    unwanted = sorted({int(i) for i in plain.ids[:, 0, :2].ravel()})
    before = vlm.model.generation_config.suppress_tokens
    monkeypatch.setattr(vlm.model.generation_config, "suppress_tokens", [*before, *unwanted])
    conditions = [Ablation(cut, phase=phase) for cut in SETS.values() for phase in PHASES]
    got = generate(vlm, batch, conditions)
    assert found(got, 3, 8) == one_by_one(vlm, batch, conditions)
    assert not set(unwanted) & set(got.ids.ravel().tolist())


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize(
    "draft",
    ["right", "wrong", "one token", "cut short", "too long", "of another condition", "one wrong token", "nothing",
     "pictures", "no tokens"],
)  # fmt: skip
def test_any_draft_gives_the_same_replies(vlm, batch, monkeypatch, draft, stopping):
    if stopping:  # at a token that some replies hold, and drafts that were made for another stop token go on behind it
        stop_at(vlm, monkeypatch, alone(vlm, batch.samples[0], None)[2])
    conditions = [Ablation(cut, phase=phase) for cut in SETS.values() for phase in PHASES]
    plain = [alone(vlm, s, None) for s in batch.samples]
    drafts = {
        "right": plain, "wrong": [[40 + b] * 6 for b in range(3)], "one token": [ids[:1] for ids in plain],
        "cut short": [ids[: 2 + b] for b, ids in enumerate(plain)], "too long": [ids + [40] * 30 for ids in plain],
        "of another condition": [alone(vlm, s, SOME) for s in batch.samples],
        "one wrong token": [[40]] * 3, "nothing": [[]] * 3,
        "pictures": [[ids[0], vlm.model.config.image_token_id, 40] for ids in plain], "no tokens": [[10**6, -3]] * 3,
    }[draft]  # fmt: skip
    got = generate(vlm, batch, conditions, drafts=drafts)
    assert found(got, 3, len(conditions)) == one_by_one(vlm, batch, conditions)


def test_questions_in_text_alone(vlm):
    texts = [Sample(f"t{i}", None, f"t{i}", "the colour", task="answer", answer="red", context=context)
             for i, context in enumerate(["it is red", "the thing that we saw there is red"])]  # fmt: skip
    batch = vlm.prepare(texts)
    conditions = [None, *(Ablation(cut, phase=phase) for cut in SETS.values() for phase in PHASES)]
    assert found(generate(vlm, batch, conditions), 2, 9) == one_by_one(vlm, batch, conditions)


# ---------------------------------------------------------------- without decoding


@pytest.mark.parametrize("phase", PHASES)
def test_a_condition_that_changes_nothing_is_told_by_one_pass(vlm, batch, idle, monkeypatch, phase):
    monkeypatch.setattr(decoding, "FEW", 0)
    idle([*SOME, *MIDDLE, *LATE])
    drafts = [alone(vlm, s, None) for s in batch.samples]
    with passes(vlm) as ran:
        got = generate(vlm, batch, [Ablation(cut, phase=phase) for cut in (SOME, MIDDLE, LATE)], drafts=drafts)
    assert found(got, 3, 3) == [[ids] * 3 for ids in drafts]
    assert (got.drafted == got.lengths).all()
    width = max(map(len, drafts)) - 1
    whole = (3, batch.length + width)
    assert got.written == 0 and got.read == pytest.approx(
        3 * whole[1] + 3 * (whole[1] if phase == "all" else width) * (3 / 3 + 2 / 3 + 1 / 3)
    )
    assert ran == [whole] + [whole if phase == "all" else (3, width)] * 3


def test_only_what_left_its_draft_is_decoded_and_only_from_there(vlm, batch, idle):
    idle(LATE)
    drafts = [alone(vlm, s, None) for s in batch.samples]
    want = [alone(vlm, s, layer(1)) for s in batch.samples]
    agreed = [next(t for t, (x, y) in enumerate(zip(d, w)) if x != y) for d, w in zip(drafts, want)]
    with passes(vlm) as ran:
        got = generate(vlm, batch, [Ablation(LATE), Ablation(layer(1))], drafts=drafts)
    assert [trimmed(row) for row in got.ids[:, 1]] == want
    assert got.drafted[:, 1].tolist() == agreed and (got.drafted[:, 0] == got.lengths[:, 0]).all()
    steps = [shape for shape in ran if shape[1] == 1]
    assert len(steps) == max(len(w) - a - 1 for w, a in zip(want, agreed))
    assert got.written == sum(len(w) - a - 1 for w, a in zip(want, agreed))
    assert {rows for rows, _ in steps} <= {1, 2, 3}, "of six sequences three left their draft"


def test_layers_below_the_lowest_that_is_touched_run_once_for_all_conditions(vlm, batch, idle, monkeypatch):
    monkeypatch.setattr(decoding, "FEW", 0)
    idle([*MIDDLE, *LATE])
    rows = {i: [] for i in range(3)}
    handles = [
        block.register_forward_pre_hook(lambda module, args, i=i: rows[i].append(args[0].shape[0]))
        for i, block in enumerate(vlm.layers)
    ]
    drafts = [alone(vlm, s, None) for s in batch.samples]
    for seen in rows.values():
        seen.clear()
    generate(vlm, batch, [Ablation(MIDDLE), Ablation(LATE), Ablation(LATE, "uniform")], drafts=drafts)
    for handle in handles:
        handle.remove()
    assert rows[0] == [3] and rows[1] == [3, 3] and rows[2][:3] == [3, 3, 6]


def test_small_passes_of_different_lowest_layers_are_one(vlm, batch):
    conditions = [Ablation(LATE), Ablation(SOME), Ablation(MIDDLE), Ablation(LATE, phase="decode")]
    drafts = [alone(vlm, s, None) for s in batch.samples]
    with passes(vlm) as ran:
        got = generate(vlm, batch, conditions, drafts=drafts)
    assert [rows for rows, _ in ran[:3]] == [3, 3 * 3, 3 * 1], "the untouched model; three in one pass; phase decode"
    assert found(got, 3, 4) == one_by_one(vlm, batch, conditions)


@given(
    st.lists(st.tuples(st.sampled_from(["all", "decode"]), st.integers(0, 5)), min_size=1, max_size=30),
    st.integers(1, 40), st.integers(0, 30), st.integers(1, 300), st.integers(0, 900),
)  # fmt: skip
def test_every_condition_is_verified_once_from_no_higher_than_its_lowest_layer(starts, width, behind, more, few):
    starts, whole = dict(enumerate(starts)), behind + more
    order = sorted(starts, key=lambda c: starts[c])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "FEW", few)
        parts = list(decoding._parts(order, starts, behind, whole, width))
    assert [c for part, *_ in parts for c in part] == order
    for part, phase, lowest in parts:
        assert len(part) <= width and {starts[c][0] for c in part} == {phase}
        assert lowest == min(starts[c][1] for c in part)
        size = behind if phase == "decode" else whole
        first = [c for c in part if starts[c][1] != lowest]
        if first:  # others joined only as long as the pass was small
            assert part.index(first[0]) * size < few or few == 0 and not first


def test_the_last_layer_leaves_out_what_nobody_reads(vlm, batch):
    drafts = [alone(vlm, s, None) for s in batch.samples]
    seen = {"q": [], "k": [], "mlp": []}
    last = vlm.layers[-1]
    parts = {"q": last.self_attn.q_proj, "k": last.self_attn.k_proj, "mlp": last.mlp.gate_proj}
    handles = [
        part.register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args[0].shape[1]))
        for name, part in parts.items()
    ]
    generate(vlm, batch, [Ablation(SOME)], 6, drafts)
    for handle in handles:
        handle.remove()
    behind, W = max(map(len, drafts)), batch.length - 1 + max(map(len, drafts))
    assert seen["k"][:2] == [W, W], "the untouched model, and the condition"
    assert seen["mlp"][:2] == [behind, behind], "the last row of the prompt, and the draft"


def test_no_more_sequences_at_once_than_rows(vlm, batch):
    conditions = [Ablation(cut, phase=phase) for cut in SETS.values() for phase in PHASES]
    want = found(generate(vlm, batch, conditions), 3, 8)
    vlm.rows, vlm.running = 6, 0
    with passes(vlm) as ran:
        assert found(generate(vlm, batch, conditions), 3, 8) == want
    assert max(rows for rows, _ in ran) == vlm.running == 6


def test_the_vision_tower_runs_once_whatever_the_conditions(vlm, batch):
    calls = []
    handle = vlm.model.get_submodule(vlm.family.vision).register_forward_hook(lambda *_: calls.append(1))
    generate(vlm, batch, [None, *(Ablation(cut) for cut in SETS.values())])
    generate(vlm, batch, [Ablation(SOME)])
    handle.remove()
    assert len(calls) == 1


def test_the_model_is_the_stock_one_afterwards_also_after_an_exception(vlm, batch, monkeypatch):
    before, layers = trace(vlm), vlm.layers
    generate(vlm, batch, [Ablation(LATE)])
    assert trace(vlm) == before and vlm.layers is layers
    monkeypatch.setattr(decoding, "_logits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(vlm, batch, [Ablation(LATE)], drafts=[[70, 71, 72]] * 3)
    assert trace(vlm) == before and vlm.layers is layers


# ---------------------------------------------------------------- near ties, and no drafts


def test_a_reply_near_a_tie_is_decoded_plainly(vlm, batch, monkeypatch):
    conditions = [Ablation(LATE), Ablation(SOME)]
    want = found(generate(vlm, batch, conditions), 3, 2)
    plainly = []
    plain = attention.generate
    monkeypatch.setattr(
        attention, "generate", lambda *a, **k: plainly.append(a[2] if len(a) > 2 else [None]) or plain(*a, **k)
    )
    monkeypatch.setattr(decoding, "TIE", 1e9)  # everything is near a tie
    got = generate(vlm, batch, conditions)
    assert found(got, 3, 2) == want and not got.drafted.any()
    assert plainly == [[None], [conditions[0]], [conditions[1]]]


def test_a_tie_while_decoding_on_is_decoded_plainly_too(vlm, batch, monkeypatch):
    """Verified tokens lead clearly, a later one does not: that reply, and no other, is decoded plainly."""
    conditions = [Ablation(SOME), Ablation(MIDDLE)]
    want = found(generate(vlm, batch, conditions), 3, 2)
    leading, plain, calls, again = decoding._leading, attention.generate, [], []

    def tied(vlm, hidden):
        token, lead = leading(vlm, hidden)
        if hidden.shape[1] == 1 and len(hidden) > 3:  # a step of decoding, and not the first token of the stem
            calls.append(len(hidden))
            lead[0] = 0
        return token, lead

    def counted(vlm, batch, conditions=(None,), *more, **named):
        again.append(list(conditions))
        return plain(vlm, batch, conditions, *more, **named)

    monkeypatch.setattr(decoding, "_leading", tied)
    monkeypatch.setattr(attention, "generate", counted)
    assert found(generate(vlm, batch, conditions), 3, 2) == want
    assert calls and again[0] == [None] and 1 <= len(again[1:]) <= 2 and again[1] != [None]


def test_in_half_precision_the_verifying_pass_decides(vlm, batch, monkeypatch):
    before = vlm.model
    vlm.model = copy.deepcopy(before).to(torch.bfloat16)
    try:
        batch.tensors = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch.tensors.items()}
        monkeypatch.setattr(decoding, "TIE", 1e9)
        conditions = [None, Ablation(LATE), Ablation(SOME, phase="decode")]
        got = generate(vlm, batch, conditions)
        assert np.array_equal(got.ids, generate(vlm, batch, conditions).ids)
        assert got.ids[:, 0].tolist() == attention.generate(vlm, batch)[:, 0].tolist()
        assert got.drafted[:, 1:].any(), "nothing was left to the plain loop"
    finally:
        vlm.model = before


def test_strict_decodes_everything_plainly(vlm, batch, monkeypatch):
    conditions = [None, Ablation(LATE), Ablation(SOME, phase="decode")]
    want = generate(vlm, batch, conditions)
    monkeypatch.setenv("VRHLIB_STRICT", "1")
    monkeypatch.setattr(decoding, "_verified", lambda *_: 1 / 0)
    got = generate(vlm, batch, conditions)
    assert found(got, 3, 3) == found(want, 3, 3) and not got.drafted.any()
    monkeypatch.setenv("VRHLIB_STRICT", "0")
    with pytest.raises(ZeroDivisionError):
        generate(vlm, batch, conditions)


@pytest.mark.parametrize("setting", [{"no_repeat_ngram_size": 2}, {"min_new_tokens": 3}, {"bad_words_ids": [[40]]}])
def test_generation_settings_that_change_logits_are_left_to_the_plain_loop(vlm, batch, monkeypatch, setting):
    for name, value in setting.items():
        monkeypatch.setattr(vlm.model.generation_config, name, value, raising=False)
    conditions = [None, Ablation(SOME)]
    monkeypatch.setattr(decoding, "_verified", lambda *_: 1 / 0)
    assert found(generate(vlm, batch, conditions), 3, 2) == one_by_one(vlm, batch, conditions)


def test_layers_of_another_kind_than_full_attention_are_left_to_the_plain_loop(vlm, batch, monkeypatch):
    config = vlm.model.config.get_text_config()
    monkeypatch.setattr(config, "layer_types", ["full_attention", "sliding_attention", "full_attention"], raising=False)
    assert not decoding._plain_greedy(vlm)


def test_conditions_without_heads_reply_as_the_model_itself(vlm, batch):
    nothing = type(SOME)((), GRID)
    got = generate(vlm, batch, [Ablation(nothing), None])
    assert np.array_equal(got.ids[:, 0], got.ids[:, 1]) and not got.drafted.any()


def test_all_orders_of_conditions_give_the_same(vlm, batch):
    conditions = [Ablation(LATE), None, Ablation(SOME, phase="decode"), Ablation(MIDDLE)]
    want = found(generate(vlm, batch, conditions), 3, 4)
    for order in itertools.islice(itertools.permutations(range(4)), 1, 24, 7):
        got = found(generate(vlm, batch, [conditions[i] for i in order]), 3, 4)
        assert got == [[own[i] for i in order] for own in want]
