"""Replies and accuracy: crafted replies for the arithmetic, real tiny models for conditions and resume."""

import contextlib
import dataclasses
import itertools
import json
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tests import tiny
from vrhlib import decoding, evaluate, paper, store
from vrhlib.agreement import shared
from vrhlib.attention import KINDS, PHASES, Ablation, generate
from vrhlib.boxes import Box
from vrhlib.evaluate import (
    UNMASKED,
    Condition,
    ablation_sweep,
    accuracy,
    replies,
    sweep_replies,
    two_questions,
)
from vrhlib.heads import Head, HeadScores, HeadSet
from vrhlib.outcomes import OUTCOMES
from vrhlib.samples import Lost, Sample, Samples
from vrhlib.stats import paired_difference

pytestmark = pytest.mark.usefixtures("root")
GENERATE = decoding.generate
GRID = (3, 8)
RANKED = HeadSet(tuple(Head(*p) for p in [(1, 5), (0, 1), (2, 7), (1, 0)]), GRID, "VRH")
# Five of the eight heads of layer 0: the other three can stand for three of them.
CROWDED = HeadSet(tuple(Head(*p) for p in [(0, 0), (0, 1), (1, 5), (0, 2), (0, 3), (0, 4)]), GRID, "crowded")
BY_SIZE = ["noise-3", "noise-0", "noise-2", "noise-1", "noise-4"]  # the `samples` below, smallest picture first
one_class = pytest.mark.parametrize("vlm", ["qwen3-vl"], indirect=True)  # where the class of a model does not matter


@pytest.fixture
def samples() -> Samples:
    return Samples("noise", "test", tiny.samples((100, 60), (70, 150), (130, 70), (64, 90), (150, 80)))


@pytest.fixture
def calls(monkeypatch):
    """Every real call of `generate`: (sample ids, number of conditions)."""
    seen = []

    def counted(vlm, batch, conditions, limit, drafts):
        seen.append(([s.id for s in batch.samples], len(conditions)))
        return GENERATE(vlm, batch, conditions, limit, drafts)

    monkeypatch.setattr(decoding, "generate", counted)
    return seen


@pytest.fixture
def scripted(monkeypatch):
    """Replaces generation: `script(sample, condition)` gives the text, with a stop token unless it ends in `…`."""

    def install(script):
        def fake(vlm, batch, conditions, limit, drafts):
            seen = list(zip(batch.samples, batch.resized))
            rows = [[encode(vlm, script(vlm, s, c, size)) for c in conditions] for s, size in seen]
            width = max(len(ids) for row in rows for ids in row)
            ids = np.array([[ids + [-1] * (width - len(ids)) for ids in row] for row in rows])
            return decoding.Replies(ids, np.zeros(ids.shape[:2], int))

        monkeypatch.setattr(decoding, "generate", fake)

    return install


def encode(vlm, text: str) -> list[int]:
    ids = vlm.tokenizer(text.removesuffix("…"), add_special_tokens=False)["input_ids"]
    return ids if text.endswith("…") else [*ids, *vlm.stop_ids]


def right(vlm, sample, size) -> str:
    return vlm.write_box(sample.box, sample.image.size, size)


def moved(vlm, sample, size, by: float) -> str:
    """The referent's box, shifted right by a share of its width."""
    x0, y0, x1, y1 = sample.box
    shift = by * (x1 - x0)
    return vlm.write_box(Box(x0 + shift, y0, x1 + shift, y1), sample.image.size, size)


# ---------------------------------------------------------------- outcomes


def big_samples() -> Samples:
    """Boxes so large that rounding does not matter, on a picture that every class resizes."""
    image = tiny.samples((150, 100))[0].image
    boxes = [Box(14, 14, 70 + i, 90) for i in range(8)]
    items = [Sample(f"s{i}", image, "noise", f"thing {i}", box, kind="ab"[i % 2]) for i, box in enumerate(boxes)]
    return Samples("noise", "test", items)


def script(vlm, sample, condition, size) -> str:
    good, write = right(vlm, sample, size), vlm.family.written.format
    return {
        "s0": good, "s1": f"Here: {good} or {moved(vlm, sample, size, 0.9)}", "s2": moved(vlm, sample, size, 0.2),
        "s3": moved(vlm, sample, size, 0.5), "s4": "I see nothing.", "s5": good.rsplit(",", 1)[0] + "…",
        "s6": write(50, 50, 20, 60), "s7": write(1, 2, 3, 4).replace("3", "x"),
    }[sample.id]  # fmt: skip


def test_every_reply_has_the_outcome_a_reader_would_give_it(vlm, scripted):
    scripted(script)
    samples = big_samples()
    frame = replies(vlm, samples, {UNMASKED: None})
    columns = "model benchmark condition k seed image id kind task text x0 y0 x1 y1 iou inside outcome lost"
    assert list(frame.columns) == columns.split()
    assert frame.outcome.tolist() == ["correct"] * 3 + ["wrong box", "no box", "cut off", "degenerate", "malformed"]
    for _, row in frame.iterrows():
        box = Box(row.x0, row.y0, row.x1, row.y1)
        if row.outcome in ("correct", "wrong box"):
            referent = next(s.box for s in samples if s.id == row.id)
            assert row.iou == pytest.approx(box.iou(referent)) and (row.iou >= 0.5) == (row.outcome == "correct")
        else:
            assert np.isnan(box).all() and row.iou == 0
    assert frame.iou[0] > 0.95  # read in the frame of the resized picture
    assert frame.kind.tolist() == ["a", "b"] * 4 and frame.image.tolist() == ["noise"] * 8
    assert frame.attrs["runs"] and accuracy(frame.outcome).correct == 3


def test_a_swept_table_counts_like_a_loop(vlm, scripted):
    samples = big_samples()

    def limit(name, k, seed) -> int:  # samples from this one on get their scripted reply
        return {"unmasked": 8, "VRH": 8 - 2 * k}.get(name, 8 - (k + (seed or 0)) // 2)

    def worse_with_k(vlm, sample, condition, size):
        name, *seed = condition.heads.name.split() if condition else ["unmasked"]
        untouched = limit(name, len(condition.heads) if condition else 0, int(seed[0]) if seed else None)
        return right(vlm, sample, size) if int(sample.id[1:]) < untouched else script(vlm, sample, condition, size)

    scripted(worse_with_k)
    groups = {"VRH": RANKED} | {f"random {s}": RANKED.controls(4, s) for s in (0, 3)}
    table = ablation_sweep(vlm, samples, groups, [0, 1, 2, 4])
    groups_and_ks = [(c, k) for c in ("VRH", "random", "random") for k in (1, 2, 4)]
    assert list(zip(table.condition, table.k)) == [("unmasked", 0), *groups_and_ks]
    assert table.seed.tolist()[4:] == [0, 0, 0, 3, 3, 3] and table.seed.isna().sum() == 4
    for _, row in table.iterrows():
        correct = max(3, limit(row.condition, row.k, None if pd.isna(row.seed) else row.seed))
        assert row.accuracy == pytest.approx(100 * correct / 8) == row.correct and row.n == 8
        assert sum(row[o] for o in OUTCOMES) == pytest.approx(100)
        low, high = wilson(correct, 8)
        assert (row.low, row.high) == (pytest.approx(low), pytest.approx(high))


def wilson(right: int, n: int) -> tuple[float, float]:
    p, z = right / n, 1.959963984540054
    centre, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return 100 * (centre - half) / (1 + z * z / n), 100 * (centre + half) / (1 + z * z / n)


def pairs() -> Samples:
    """The eight samples as two questions about each of four pictures."""
    of = big_samples()
    items = [Sample(s.id, s.image, f"picture {i // 2}", s.text, s.box, kind=s.kind) for i, s in enumerate(of)]
    return Samples("noise", "pairs", [items[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)])  # not side by side


def test_two_questions_are_right_only_together(vlm, scripted):
    scripted(script)  # right: s0, s1, s2; of the pictures 0: s0 s1, 1: s2 s3, 2: s4 s5, 3: s6 s7
    got = two_questions(replies(vlm, pairs(), {UNMASKED: None}), pairs())
    assert (got.correct, got.n) == (1, 4)


def test_a_picture_with_one_question_is_no_two_question_test(vlm, scripted):
    scripted(script)
    frame = replies(vlm, pairs(), {UNMASKED: None})
    with pytest.raises(ValueError, match="2 pictures"):
        two_questions(frame, pairs()[:6])


def test_two_questions_over_several_conditions_are_refused(vlm, scripted):
    scripted(lambda vlm, s, c, size: right(vlm, s, size) if c is None else "nothing")
    frame = replies(vlm, pairs(), named(unmasked=None, cut=Ablation(RANKED)))
    with pytest.raises(ValueError, match="condition"):
        two_questions(frame, pairs())
    assert two_questions(frame[frame.condition == "unmasked"], pairs()).correct == 4


# ---------------------------------------------------------------- real generation under conditions


def conditions() -> dict:
    late = Ablation(RANKED, phase="decode")
    return named(unmasked=None, vrh=Ablation(RANKED), one=Ablation(RANKED.top(1)), late=late)


def named(**ablations) -> dict:
    return {Condition(name): ablation for name, ablation in ablations.items()}


def test_replies_under_several_conditions_equal_single_generations(vlm, samples):
    frame = replies(vlm, samples, conditions(), batch_size=3)
    assert frame.condition.tolist() == [c.condition for c in conditions() for _ in samples]
    for sample in samples:
        for name, condition in conditions().items():
            ids = generate(vlm, vlm.prepare([sample]), [condition])[0, 0].tolist()
            text, finished = vlm.decode([i for i in ids if i >= 0])
            row = frame[(frame.condition == name.condition) & (frame.id == sample.id)].iloc[0]
            assert row.text == text
            assert row.outcome == ("no box" if finished else "cut off")
    assert frame.groupby("condition").text.agg(tuple).nunique() == 4  # every condition does something


def test_rows_of_a_batch_are_limited(vlm, samples, calls):
    wide = replies(vlm, samples, conditions(), batch_size=3)
    assert calls == [(["noise-3", "noise-0", "noise-2"], 4), (["noise-1", "noise-4"], 4)], "by size of the picture"
    calls.clear()
    vlm.prompt = f"{vlm.prompt} "  # another run
    vlm.rows = 2
    replies(vlm, samples, conditions(), batch_size=3)
    assert [(len(ids), n) for ids, n in calls] == [(2, 4), (1, 4), (2, 4)]
    calls.clear()
    vlm.prompt = vlm.prompt[:-1]
    pd.testing.assert_frame_equal(replies(vlm, samples, conditions(), batch_size=3), wide)
    assert calls == []


def test_equal_conditions_are_run_once(vlm, samples, calls):
    renamed = HeadSet(RANKED.heads, GRID, "renamed")
    same = named(a=Ablation(RANKED), b=Ablation(renamed), c=None, d=Ablation(RANKED))
    frame = replies(vlm, samples, same)
    assert calls == [(BY_SIZE, 2)]
    by_name = frame.groupby("condition").text.agg(tuple)
    assert by_name["a"] == by_name["b"] == by_name["d"] != by_name["c"]


def test_a_condition_known_from_another_sweep_is_not_run_again(vlm, samples, calls):
    replies(vlm, samples, named(unmasked=None, vrh=Ablation(RANKED)))
    calls.clear()
    replies(vlm, samples, named(baseline=None, two=Ablation(RANKED.top(2)), all=Ablation(RANKED)))
    assert calls == [(BY_SIZE, 1)]


def test_only_lost_lines_are_computed_again(vlm, samples, calls, root):
    want = replies(vlm, samples, conditions(), batch_size=2)
    calls.clear()
    paths = sorted((root / "data/runs/nano").glob("*.jsonl"))
    assert len(paths) == 4
    for path in paths[:2]:  # sample 3 of two conditions is lost; a third file ends in half a line
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["id"] != "noise-3"))
    whole = paths[2].read_text()
    paths[2].write_text(whole[:-9])
    got = replies(vlm, samples, conditions(), batch_size=2)
    last = json.loads(whole.splitlines()[-1])["id"]
    assert last == "noise-4" and calls == [(["noise-3", "noise-0"], 2), (["noise-4"], 1)]
    pd.testing.assert_frame_equal(got, want)
    assert all(len(path.read_text().splitlines()) == 5 for path in paths)


def test_an_interrupted_run_keeps_what_was_finished(vlm, samples, monkeypatch):
    done = []

    def dies_at_the_third_batch(vlm, batch, conditions, limit, drafts):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append([s.id for s in batch.samples])
        return GENERATE(vlm, batch, conditions)

    monkeypatch.setattr(decoding, "generate", dies_at_the_third_batch)
    with pytest.raises(KeyboardInterrupt):
        replies(vlm, samples, conditions(), batch_size=2)
    done.clear()
    frame = replies(vlm, samples, conditions(), batch_size=2)
    assert done == [["noise-4"]] and len(frame) == 20


def test_different_ablations_never_share_a_file(vlm, samples):
    means = torch.randn(*GRID, vlm.layers[0].self_attn.head_dim, generator=torch.Generator().manual_seed(0))
    different = named(
        zero=Ablation(RANKED), uniform=Ablation(RANKED, "uniform"), late=Ablation(RANKED, phase="decode"),
        fewer=Ablation(RANKED.top(3)), mean=Ablation(RANKED, "mean", means=means),
        other=Ablation(RANKED, "mean", means=means.flip(1)), none=None,
    )  # fmt: skip
    assert len(replies(vlm, samples[:1], different).attrs["runs"]) == 7


def test_a_resized_pictures_frame_is_kept_with_the_reply(vlm, scripted, root):
    """Boxes are read from stored replies with the size the model saw, also when nothing is generated."""
    scripted(script)
    want = replies(vlm, big_samples(), {UNMASKED: None})
    again = replies(vlm, big_samples(), {Condition("again"): None})
    pd.testing.assert_frame_equal(again.assign(condition="unmasked"), want)


# ---------------------------------------------------------------- bad input


def test_more_heads_than_a_group_ranks_are_refused_before_any_generation(vlm, samples, calls):
    with pytest.raises(ValueError, match="k=5, but VRH ranks 4 of 24 heads"):
        ablation_sweep(vlm, samples, {"VRH": RANKED}, [1, 5])
    with pytest.raises(ValueError, match="k=-1"):
        ablation_sweep(vlm, samples, {"VRH": RANKED}, [-1])
    assert calls == []


def test_heads_of_another_grid_are_refused_before_any_generation(vlm, samples, calls):
    other = HeadSet((Head(20, 1),), (28, 28), "list of a large model")
    with pytest.raises(ValueError, match="list of a large model"):
        ablation_sweep(vlm, samples, {"VRH": RANKED, "other": other}, [1])
    assert calls == []


def test_an_unknown_kind_or_phase_is_refused_before_any_generation(vlm, samples, calls):
    for words in ({"kind": "zeros"}, {"phase": "never"}):
        with pytest.raises(ValueError, match="kind"):
            ablation_sweep(vlm, samples, {"VRH": RANKED}, [1], **words)
    assert calls == []


def test_a_sample_without_a_box_is_refused_before_any_generation(vlm, samples, calls):
    bare = Samples("noise", "test", [*samples, Sample("bare", samples[0].image, "noise", "dog")])
    with pytest.raises(ValueError, match="bare"):
        replies(vlm, bare, {UNMASKED: None})
    assert calls == []


def test_accuracy_counts_every_failure_as_wrong():
    assert str(accuracy(["correct", "no box", "malformed", "correct"])) == "50.0 ± 25.0 (n=4)"
    with pytest.raises(ValueError, match="empty"):
        accuracy([])


def test_tables_of_two_sweeps_can_be_joined(vlm, scripted):
    scripted(script)
    one = ablation_sweep(vlm, big_samples(), {"VRH": RANKED}, [1])
    two = ablation_sweep(vlm, big_samples(), {"random 0": RANKED.controls(2, 0)}, [2])
    assert len(pd.concat([one, two])) == 4
    answers = [sweep_replies(vlm, big_samples(), {name: RANKED}, [1, 2]) for name in ("VRH", "random 0")]
    assert len(pd.concat(answers)) == 6 * 8


def test_paired_drops_compare_the_same_samples():
    right = {"unmasked": [1, 1, 1, 0, 1, 1], "vrh": [0, 0, 1, 0, 0, 1], "random": [1, 1, 0, 0, 1, 1]}
    rows = [
        {"condition": c, "k": 0 if c == "unmasked" else 3, "seed": 0 if c == "random" else None, "id": str(i),
         "outcome": "correct" if ok else "wrong box"}
        for c, oks in right.items()
        for i, ok in enumerate(oks)
    ]  # fmt: skip
    table = evaluate.paired_drops(pd.DataFrame(rows).sample(frac=1, random_state=0), 3).set_index("condition")
    assert table.change["vrh"] == pytest.approx(-50) and table.change["random"] == pytest.approx(-100 / 6)
    assert (table.low <= table.change).all() and (table.change <= table.high).all() and (table.n == 6).all()
    assert table.high["vrh"] < 0  # n = 6: three pairs turned wrong, none right


# ---------------------------------------------------------------- answers in words, baselines, groups, summaries


def asked() -> Samples:
    words = [("red", "choice", ("red", "blue")), ("3", "number", ()), ("20", "within 25 %", ())]
    shown = tiny.samples((100, 60), (70, 150), (130, 70))
    made = [
        Sample(f"q{i}", s.image, s.image_key, "what?", task="answer", answer=a, rule=r, choices=c, kind=r)
        for i, (s, (a, r, c)) in enumerate(zip(shown, words))
    ]
    return Samples("asked", "test", made)


def test_answers_in_words_are_judged_by_their_rule_and_have_no_box(vlm, scripted):
    said = {"q0": "blue", "q1": "3", "q2": "no idea"}
    scripted(lambda vlm, s, c, size: said[s.id])
    frame = replies(vlm, asked(), {UNMASKED: None})
    assert (
        frame.outcome.tolist() == ["wrong answer", "correct", "no answer"]
        and frame[["x0", "iou"]].isna().to_numpy().all()
    )
    table = evaluate.accuracy_table(frame)
    assert table.accuracy[0] == pytest.approx(100 / 3) and table["no answer"][0] == pytest.approx(100 / 3)
    assert "wrong box" not in table


def test_questions_without_a_picture_are_answered_and_swept(vlm):
    facts = [
        Sample(f"f{i}", None, f"f{i}", t, task="answer", answer="cat") for i, t in enumerate(["red cat. red?", "a?"])
    ]
    frame = sweep_replies(vlm, Samples("facts", "test", facts), {"vrh": RANKED}, [2])
    assert len(frame) == 4 and set(frame.outcome) <= {"correct", "wrong answer", "no answer", "cut off"}


def test_a_baseline_has_chance_both_questions_and_unreadable_replies(vlm, scripted):
    scripted(lambda vlm, s, c, size: right(vlm, s, size) if s.id in ("a0", "a1", "b0") else "nothing here")
    shown = tiny.samples((100, 60), (70, 150))
    pairs = [dataclasses.replace(s, id=f"{letter}{i}", chance=0.25) for s, letter in zip(shown, "ab") for i in range(2)]
    row = evaluate.baseline(vlm, Samples("p", "test", pairs), Samples("p", "test", pairs)).iloc[0]
    assert (row.accuracy, row.chance, row.unreadable, row.two_questions, row.two_n) == (75, 25, 25, 50, 2)
    assert row.low < 75 < row.high and row.two_low < 50 < row.two_high


def test_groups_are_the_heads_and_two_kinds_of_controls_outside_them():
    found = evaluate.groups(RANKED, (0, 3))
    assert list(found) == ["vrh", "random 0", "random 3", "layer_matched 0", "layer_matched 3"]
    for name, heads in found.items():
        assert len(heads) == 4 and (name == "vrh" or not heads.overlap(RANKED))
    assert found["layer_matched 0"].layers.tolist() == RANKED.layers.tolist()


def test_layer_matched_controls_go_as_far_as_layers_have_heads_left():
    found = evaluate.groups(CROWDED, (0, 3))
    assert {name: len(heads) for name, heads in found.items()} == {
        "vrh": 6, "random 0": 6, "random 3": 6, "layer_matched 0": 4, "layer_matched 3": 4
    }  # fmt: skip
    for k in range(5):
        assert found["layer_matched 3"].top(k).layers.tolist() == CROWDED.top(k).layers.tolist()
    assert not found["layer_matched 3"].overlap(CROWDED)
    full = HeadSet(tuple(Head(0, h) for h in range(8)), GRID, "a whole layer")
    assert list(evaluate.groups(full, (0, 3))) == ["vrh", "random 0", "random 3"], "no head of layer 0 is left"


def test_numbers_of_heads_without_enough_layer_matched_sets_are_named():
    """Sets counted by listing them: as many heads from outside, with the same number in every layer."""
    sets = {}
    for k in range(1, 7):
        free, cut = [head.layer for head in CROWDED.top(k).rest()], sorted(h.layer for h in CROWDED.top(k))
        sets[k] = sum(sorted(layers) == cut for layers in itertools.combinations(free, k)) if k < 5 else None
    assert {k: n for k, n in sets.items() if n is not None} == {1: 7, 2: 15, 3: 105, 4: 70}
    line = evaluate.unmatched("m", CROWDED, [6, 5, 2, 1, 0, 6])
    assert line == (
        "m: layer-matched sets that there are: k=6: none, layer 0 has 3 heads outside the set for the 5 of its heads "
        "inside"
    ), "at k=5 four of eight heads are cut, which leaves one choice there and seven elsewhere"
    assert (
        evaluate.unmatched("m", CROWDED, [3, 4, 5]) == "m: layer-matched sets that there are: five or more at every k"
    )
    four = HeadSet(tuple(Head(0, h) for h in range(4)), GRID, "half a layer")
    assert evaluate.unmatched("m", four, [1, 4]) == "m: layer-matched sets that there are: k=4: 1"


def test_a_summary_averages_seeds_and_counts_them():
    rows = [("unmasked", 0, None, 80.0), ("vrh", 4, None, 20.0), ("vrh", 2, None, 50.0), ("random", 4, 0, 70.0),
            ("random", 4, 1, 60.0)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["condition", "k", "seed", "accuracy"]).astype({"seed": "Int64"})
    frame = frame.assign(model="m", benchmark="b", low=0.0, high=9.0, n=10, **dict.fromkeys(OUTCOMES[1:], 1.0))
    found = evaluate.summary(frame).set_index(["condition", "k"])
    assert found.accuracy.to_dict() == {("unmasked", 0): 80, ("vrh", 4): 20, ("vrh", 2): 50, ("random", 4): 65}
    assert found.seeds.tolist() == [1, 1, 1, 2] and (found.n == 10).all()
    parts = evaluate.at_each_k(frame)
    assert list(parts) == ["m, k=4", "m, k=2"] and parts["m, k=2"].accuracy.tolist() == [80, 50]


def test_frames_together_keep_the_runs_behind_all_of_them():
    frames = [pd.DataFrame({"a": [i]}) for i in range(3)]
    for frame, runs in zip(frames, (["x", "y"], ["y", "z"], [])):
        frame.attrs["runs"] = runs
    whole = evaluate.together(frames)
    assert (
        whole.a.tolist() == [0, 1, 2] and whole.attrs["runs"] == ["x", "y", "z"] and whole.index.tolist() == [0, 1, 2]
    )


# ---------------------------------------------------------------- against another condition on the same samples


def told(condition: str, right: set[int], k: int = 3, seed: int | None = None, order=range(10), **about) -> list[dict]:
    """Replies to ten samples, listed in an order; those of the numbers in `right` are correct."""
    facts = {"model": "m", "benchmark": "b", "condition": condition, "k": k, "seed": seed, "task": "locate", "lost": 0}
    return [
        facts | {"id": f"s{i}", "outcome": "correct" if i in right else "wrong box", "inside": np.nan} | about
        for i in order
    ]


def answers_of(*parts: list[dict]) -> pd.DataFrame:
    frame = pd.DataFrame([row for part in parts for row in part]).astype({"seed": "Int64"})
    frame.attrs["runs"] = ["one", "two"]
    return frame


UNCUT = told("unmasked", set(range(9)), k=0)


def test_changes_are_paired_by_id_in_whatever_order_the_replies_stand():
    right = {0, 1, 2, 3, 4}
    turned, mixed = range(9, -1, -1), (3, 9, 0, 5, 7, 1, 8, 2, 6, 4)
    frame = answers_of(
        UNCUT, told("vrh", right, order=mixed), told("same", right, order=turned), told("two less", {0, 1, 2})
    )
    found = evaluate.against(frame).set_index("condition")
    assert found.loc["same", ["change", "change_low", "change_high"]].tolist() == [0, 0, 0], "every pair is alike"
    assert found.change["two less"] == pytest.approx(-20)
    want = paired_difference([i in {0, 1, 2} for i in range(10)], [i in right for i in range(10)])
    low, high = found.loc["two less", ["change_low", "change_high"]]
    # Two of ten pairs differ, none upwards. Paired by position, one would be -100 and others +100.
    assert -70 < low < -20 < high <= 0 and abs(low - want.low) <= 10
    assert found.loc["vrh", ["change", "change_low", "change_high"]].tolist() == [0, 0, 0], "against itself"
    assert found.loc["unmasked", ["change", "change_low", "change_high"]].isna().all()


def test_a_table_with_changes_is_the_accuracy_table_with_three_more_columns():
    controls = [told("random", set(range(s + 4)), seed=s) for s in (0, 3)]
    frame = answers_of(UNCUT, told("vrh", {0, 1}), *controls)
    found, plain = evaluate.against(frame), evaluate.accuracy_table(frame)
    pd.testing.assert_frame_equal(found[plain.columns], plain)
    assert list(found.columns) == [*plain.columns, "change", "change_low", "change_high"]
    assert found.attrs["runs"] == ["one", "two"]
    by_seed = found[found.condition == "random"].set_index("seed")
    assert by_seed.change.to_dict() == {0: pytest.approx(20), 3: pytest.approx(50)}, "every seed has its own row"


def test_the_reference_is_that_of_the_same_model_benchmark_and_k():
    parts = [UNCUT]
    references = {("m", "b", 3): 1, ("m", "b", 5): 4, ("n", "b", 3): 6, ("m", "c", 3): 8}
    for (model, benchmark, k), right in references.items():
        about = {"model": model, "benchmark": benchmark}
        parts += [told("other", {0, 1, 2}, k, **about), told("vrh", set(range(right)), k, **about)]
    found = evaluate.against(answers_of(*parts))
    other = found[found.condition == "other"].set_index(["model", "benchmark", "k"])
    for at, right in references.items():
        assert other.change[at] == pytest.approx(10 * (3 - right)), at


def test_another_condition_can_be_the_reference():
    found = evaluate.against(answers_of(UNCUT, told("vrh", {0}), told("other", {0, 1, 2})), reference="other")
    assert found.set_index("condition").change["vrh"] == pytest.approx(-20)


def test_a_reference_that_is_missing_at_some_k_is_an_error_that_says_where():
    frame = answers_of(UNCUT, told("vrh", {0}), told("other", {0}), told("other", {0}, k=5))
    with pytest.raises(ValueError, match="m, k=5: no 'vrh' to compare with; sweep it at the same k"):
        evaluate.against(frame)
    assert len(evaluate.against(frame[frame.k != 5])) == 3


def changes(rows: dict[str, tuple[float, float, float]], model: str = "m", k: int = 3) -> pd.DataFrame:
    frame = pd.DataFrame([(name, *row) for name, row in rows.items()],
                         columns=["condition", "change", "change_low", "change_high"])  # fmt: skip
    return frame.assign(model=model, k=k, benchmark="scenes")


def test_conditions_are_told_apart_by_whether_the_interval_holds_zero():
    nothing = (np.nan,) * 3
    table = pd.concat([
        changes({"unmasked": nothing}, k=0),
        changes({"vrh": (0, 0, 0), "random": (50, 40, 60), "layer_matched": (50, 40, 60), "worse": (-20, -30.04, -10),
                 "worst": (-40, -50, -0.1), "better": (20.25, 0.5, 30), "up to zero": (-5, -10, 0),
                 "from zero": (5, 0, 10), "unclear": (1, -3, 5), "equal": (0, 0, 0), "wavers": (0, -5, 5)}),
        changes({"vrh": (0, 0, 0), "worse": (0, 0, 0)}, k=5),
        changes({"vrh": (0, 0, 0), "other": (7, 5, 9)}, model="n"),
        changes({"vrh": (0, 0, 0), "other": (-7, -9, -5)}, model="n").assign(benchmark="words"),
    ])  # fmt: skip
    found = evaluate.told_apart(table)
    assert list(found.columns) == ["model", "benchmark", "k", "lower", "higher", "alike", "same"]
    assert list(zip(found.model, found.k)) == [("m", 3), ("m", 5), ("n", 3), ("n", 3)]
    first, second, third, elsewhere = found.itertuples()
    assert elsewhere.benchmark == "words" and elsewhere.lower == "other -7.0 [-9.0, -5.0]" and elsewhere.higher == "–"
    assert first.lower == "worse -20.0 [-30.0, -10.0]; worst -40.0 [-50.0, -0.1]"
    assert first.higher == "better +20.2 [0.5, 30.0]"
    assert [words.split(" [")[0] for words in first.alike.split("; ")] == [
        "up to zero -5.0", "from zero +5.0", "unclear +1.0", "wavers +0.0"
    ]  # fmt: skip
    assert first.same == "equal"
    assert (second.lower, second.higher, second.alike, second.same) == ("–", "–", "–", "worse")
    assert (third.lower, third.higher) == ("–", "other +7.0 [5.0, 9.0]")


def test_told_apart_reads_what_against_wrote():
    cut = [told("other", set()), told("equal", set(range(5))), told("one more", set(range(6)))]
    table = evaluate.against(answers_of(UNCUT, told("vrh", set(range(5))), *cut, told("random", set(), seed=1)))
    (row,) = evaluate.told_apart(table).itertuples()
    assert row.lower.startswith("other -50.0 [") and row.same == "equal" and row.alike.startswith("one more +10.0")


def test_short_groups_are_cut_only_as_far_as_they_go(vlm, samples, calls):
    groups = {"VRH": RANKED, "two": RANKED.top(2), "none": RANKED.top(0), "random 3": RANKED.controls(3, 3)}
    with pytest.raises(ValueError, match="k=4, but VRH ranks 2 of 24 heads"):
        sweep_replies(vlm, samples[:1], groups, [1, 2, 4])
    assert calls == [], "refused before anything runs"
    found = sweep_replies(vlm, samples[:1], groups, [1, 2, 4], short="skip")
    rows = list(zip(found.condition, found.k))
    assert rows == [("unmasked", 0), *(("VRH", k) for k in (1, 2, 4)), ("two", 1), ("two", 2),
                    ("random", 1), ("random", 2)]  # fmt: skip
    assert found.seed.tolist()[-2:] == [3, 3]
    texts = found.set_index(["condition", "k"]).text
    assert texts["two", 2] == texts["VRH", 2], "and as far as it goes it is cut"


# ---------------------------------------------------------------- expressions about one picture


def test_two_samples_of_one_picture_are_resampled_together():
    """Ten pictures with two expressions that always fare alike say as much as ten samples, not as twenty."""
    first, second = range(10), range(10, 20)
    picture = [f"picture {i}" for i in first]
    right = {"unmasked": set(range(9)), "vrh": {0, 1, 2, 3}, "other": {0, 1}}

    def frame(both: bool, image: bool) -> pd.DataFrame:
        parts = []
        for condition, fine in right.items():
            for order in (first, second)[: 1 + both]:
                rows = told(
                    condition, fine | {i + 10 for i in fine}, k=0 if condition == "unmasked" else 3, order=order
                )
                parts.append([row | ({"image": p} if image else {}) for row, p in zip(rows, picture)])
        return answers_of(*parts)

    bounds = {}
    for case in itertools.product((False, True), repeat=2):
        drops = evaluate.paired_drops(frame(*case), 3).set_index("condition")
        other = evaluate.against(frame(*case)).set_index("condition").loc["other"]
        assert drops.change.to_dict() == {"vrh": pytest.approx(-50), "other": pytest.approx(-70)}
        assert drops.n.tolist() == [20 if case[0] else 10] * 2, "n counts samples"
        bounds[case] = (*drops.loc["vrh", ["low", "high"]], other.change_low, other.change_high)
    for same in ((False, True), (False, False)):
        assert bounds[True, True] == pytest.approx(bounds[same])
    for low, high in ((0, 1), (2, 3)):
        taken_apart = bounds[True, False][high] - bounds[True, False][low]
        assert taken_apart < 0.9 * (bounds[True, True][high] - bounds[True, True][low]), "sqrt(2) too sure"


# ---------------------------------------------------------------- sweeps of several benchmarks


def names_its_cut(vlm, sample, condition, size) -> str:
    return "nothing cut" if condition is None else cut_of(condition.heads)


def cut_of(heads) -> str:
    return "without " + " ".join(map(str, sorted(heads)))


AT = ["benchmark", "condition", "k", "seed", "id"]


def rows_at(frame: pd.DataFrame) -> list[tuple]:
    """(benchmark, condition, k, seed) of a frame of replies, each once, in order."""
    return list(frame[AT[:-1]].fillna(-1).drop_duplicates().itertuples(index=False, name=None))


@one_class
def test_a_causal_sweep_cuts_heads_at_every_k_and_controls_at_some(vlm, samples, scripted):
    scripted(names_its_cut)
    tests = [samples[:3], Samples("other", "test", tiny.samples((90, 60), (60, 80)))]
    frame = evaluate.causal_sweep(vlm, iter(tests), RANKED, (1, 2, 3), (2, 4), seeds=(0, 3), batch_size=2)
    controls = {}
    for condition, k, seed in itertools.product(("random", "layer_matched"), (2, 4), (0, 3)):
        drawn = RANKED.top(k).controls(k, seed, layer_matched=condition == "layer_matched")
        assert not drawn.overlap(RANKED.top(k)) and len(drawn) == k
        controls[condition, k, seed] = cut_of(drawn)
    assert all(controls[c, k, 0] != controls[c, k, 3] for c, k, _ in controls), "no layer-matched draw twice here"
    want = [("unmasked", 0, -1), *(("vrh", k, -1) for k in (1, 2, 3, 4)), *controls]
    assert sorted(rows_at(frame)) == sorted((b, *at) for b in ("noise", "other") for at in want)
    assert not frame.duplicated(AT).any() and len(frame) == (3 + 2) * len(want)
    assert frame.groupby("benchmark").id.nunique().to_dict() == {"noise": 3, "other": 2}
    cut = {("unmasked", 0, -1): "nothing cut"} | {("vrh", k, -1): cut_of(RANKED.top(k)) for k in (1, 2, 3, 4)}
    cut |= controls
    for (_, *at), rows in frame.fillna({"seed": -1}).groupby(AT[:-1]):
        assert set(rows.text) == {cut[tuple(at)]}, at


@one_class
def test_a_causal_sweep_is_the_separate_sweeps_below_each_other(vlm, samples):
    tests = [samples[:2], Samples("other", "test", tiny.samples((90, 60)))]
    frame = evaluate.causal_sweep(vlm, tests, RANKED, (1, 2), (2,), seeds=(3,), batch_size=2)
    parts = []
    for test in tests:
        parts += [replies(vlm, test, {UNMASKED: None}, 2)]
        for name, heads in (evaluate.groups(RANKED.top(2), (3,)) | {"vrh": RANKED}).items():
            for k in (1, 2) if name == "vrh" else (2,):
                parts += [sweep_replies(vlm, test, {name: heads}, [k], batch_size=2).query("condition != 'unmasked'")]
    apart = evaluate.together(parts)
    pd.testing.assert_frame_equal(
        frame.sort_values(AT, ignore_index=True), apart.sort_values(AT, ignore_index=True), check_like=True
    )
    assert frame.text.nunique() > 5, "and the conditions differ"
    assert frame.attrs["runs"] == sorted(set(frame.attrs["runs"])) and len(frame.attrs["runs"]) == 2 * 5


@one_class
def test_a_causal_sweep_cuts_other_lists_beside_the_heads(vlm, samples, scripted):
    scripted(names_its_cut)
    other = HeadSet(tuple(Head(*p) for p in [(2, 0), (0, 7)]), GRID, "other")
    frame = evaluate.causal_sweep(vlm, [samples[:2]], RANKED, (), (2,), (0, 1), {"flip_q": other}, batch_size=2)
    assert set(frame[frame.condition == "flip_q"].text) == {cut_of(other)}
    plain = evaluate.causal_sweep(vlm, [samples[:2]], RANKED, (), (2,), (0, 1), batch_size=2)
    pd.testing.assert_frame_equal(frame[frame.condition != "flip_q"].reset_index(drop=True), plain)


@one_class
def test_the_blind_reader_is_asked_the_same_about_grey(vlm, samples, monkeypatch):
    seen, whole = [], GENERATE
    monkeypatch.setattr(decoding, "generate", lambda vlm, batch, *a: seen.append(batch) or whole(vlm, batch, *a))
    frame = evaluate.blind(vlm, [samples])
    (batch,) = seen
    assert all(np.asarray(s.image).min() == np.asarray(s.image).max() == 128 for s in batch.samples)
    assert {s.id: s.image.size for s in batch.samples} == {s.id: s.image.size for s in samples}
    assert frame.condition.unique().tolist() == ["blind"] and frame.benchmark.unique().tolist() == ["noise"]
    assert frame.id.tolist() == [s.id for s in samples] and frame.image.tolist() == [s.image_key for s in samples]
    plain = evaluate.unmasked(vlm, [samples[:2], samples[2:]])
    assert plain.condition.unique().tolist() == ["unmasked"] and plain.id.tolist() == [s.id for s in samples]
    assert len(plain.attrs["runs"]) == 2 and not set(plain.attrs["runs"]) & set(frame.attrs["runs"])


@one_class
def test_a_causal_sweep_leaves_layer_matched_controls_out_where_a_layer_is_empty(vlm, samples, scripted):
    scripted(names_its_cut)
    frame = evaluate.causal_sweep(vlm, [samples[:1]], CROWDED, (), (4, 6), seeds=(0,))
    want = [("unmasked", 0, -1), ("vrh", 4, -1), ("vrh", 6, -1), ("random", 4, 0), ("random", 6, 0),
            ("layer_matched", 4, 0)]  # fmt: skip
    assert sorted(rows_at(frame)) == sorted(("noise", *at) for at in want) and len(frame) == len(want)


@one_class
def test_layer_matched_draws_that_came_out_alike_are_one_draw(vlm, samples, calls):
    """Four of the eight heads of a layer leave one set of four others, whatever the seed; random draws stay as many."""
    half = HeadSet(tuple(Head(0, h) for h in range(4)), GRID, "half a layer")
    frame = sweep_replies(vlm, samples[:1], evaluate.groups(half, (0, 1, 2)), [2, 4], batch_size=2)
    seeds = frame[frame.condition == "layer_matched"].groupby("k").seed.apply(list).to_dict()
    sets = {k: {frozenset(half.controls(4, s, layer_matched=True).top(k)) for s in (0, 1, 2)} for k in (2, 4)}
    assert {k: len(found) for k, found in seeds.items()} == {k: len(found) for k, found in sets.items()}
    assert seeds[4] == [0] and len(frame[(frame.condition == "random") & (frame.k == 4)]) == 3


def test_cells_are_what_paper_and_pencil_give():
    unreadable = {4: "no box", 5: "malformed", 6: "cut off", 7: "degenerate"}
    vrh = [row | {"outcome": unreadable.get(i, row["outcome"])} for i, row in enumerate(told("vrh", {0, 1, 2}))]
    first = [
        UNCUT, vrh, told("vrh", set(), k=5), told("random", set(), k=5, seed=0),
        *(told("random", set(range(n)), seed=s) for s, n in enumerate((8, 6, 7))),
        *(told("layer_matched", set(range(n)), seed=s) for s, n in enumerate((5, 7))),
    ]  # fmt: skip
    other = {"model": "n", "benchmark": "c"}
    second = [told("unmasked", {0, 1, 2, 3}, k=0, **other), told("vrh", {0, 1, 2, 3, 4, 5}, k=5, **other),
              *(told("random", set(range(n)), k=5, seed=s, **other) for s, n in enumerate((4, 4)))]  # fmt: skip
    table = evaluate.cells(answers_of(*first, *second), {"m": 3, "n": 5})
    assert table.attrs["runs"] == ["one", "two"]
    assert (
        list(table.columns)
        == (
            "model benchmark k n unmasked vrh drop drop_low drop_high random_drop random_drop_low random_drop_high "
            "matched_drop beyond_matched beyond_matched_low beyond_matched_high unreadable"
        ).split()
    )
    m, n = table.itertuples()
    assert (m.model, m.benchmark, m.k, m.n) == ("m", "b", 3, 10)
    assert (m.unmasked, m.vrh, m.drop) == pytest.approx((90, 30, 60))
    assert 0 < m.drop_low < 60 < m.drop_high <= 100
    # Drops of 10, 30 and 20 points: standard deviation 10, and t(0.975, 2) = 4.3027.
    assert m.random_drop == pytest.approx(20) and m.matched_drop == pytest.approx((40 + 20) / 2)
    half = 4.302653 * 10 / 3**0.5
    assert (m.random_drop_low, m.random_drop_high) == pytest.approx((20 - half, 20 + half))
    in_words = paired_difference([i < 9 for i in range(10)], [i < 3 for i in range(10)])
    assert (m.drop_low, m.drop_high) == pytest.approx((in_words.low, in_words.high), abs=10.01)
    assert m.unreadable == pytest.approx(30), "a degenerate box is a box"
    # Layer-matched draws are right in five and seven of ten, on average 60 %, and the heads leave 30 %.
    average = [(i < 5) / 2 + (i < 7) / 2 for i in range(10)]
    beyond = paired_difference(average, [i < 3 for i in range(10)])
    assert m.beyond_matched == pytest.approx(30) and m.beyond_matched_low < 30 < m.beyond_matched_high
    assert (m.beyond_matched_low, m.beyond_matched_high) == pytest.approx((beyond.low, beyond.high), abs=5.01)
    assert (n.model, n.benchmark, n.k, n.unmasked, n.vrh) == ("n", "c", 5, 40, 60) and n.drop == pytest.approx(-20)
    assert (n.random_drop, n.random_drop_low, n.random_drop_high, n.unreadable) == (0, 0, 0, 0)
    assert np.isnan([n.matched_drop, n.beyond_matched, n.beyond_matched_low]).all(), "no such draw is no drop of 0"


def test_pooled_benchmarks_count_every_sample_once():
    both = [
        part
        for name, uncut, cut in (("a", range(9), {0, 1}), ("b", range(5), {4}))
        for part in (told("unmasked", set(uncut), k=0, benchmark=name), told("vrh", cut, benchmark=name))
    ]
    both += [told("random", set(range(s + 3)), seed=s, benchmark=name) for s in (0, 1) for name in "ab"]
    pooled = evaluate.pooled(answers_of(*both), "two benchmarks")
    assert pooled.attrs["runs"] == ["one", "two"]
    assert set(pooled.benchmark) == {"two benchmarks"} and pooled.id.nunique() == 20
    table = evaluate.accuracy_table(pooled).set_index(["condition", "seed"])
    assert (table.n == 20).all() and table.accuracy.tolist() == pytest.approx([70, 15, 30, 40])
    (cell,) = evaluate.cells(pooled, {"m": 3}).itertuples()
    assert cell.n == 20 and cell.drop == pytest.approx(55) and cell.random_drop == pytest.approx(35)


# ---------------------------------------------------------------- what masking means, and on which samples


@one_class
def test_every_kind_and_phase_of_masking_is_measured(vlm, samples, monkeypatch):
    """Random models name no box; here every other reply counts as right, so that there is something to compare."""
    judged, frames, first = evaluate.judged, {}, {}
    sweep = evaluate.sweep_replies

    def by_chance(vlm, sample, record):
        outcome = "correct" if zlib.crc32(record["text"].encode()) % 2 else "no box"
        return judged(vlm, sample, record) | {"outcome": outcome}

    def noted(vlm, samples, groups, ks, kind, phase, **more):
        frames[kind, phase] = sweep(vlm, samples, groups, ks, kind, phase, **more)
        return frames[kind, phase]

    def first_tokens(vlm, batch, conditions, limit, drafts):
        got = GENERATE(vlm, batch, conditions, limit, drafts)
        for i, sample in enumerate(batch.samples):
            for c, tokens in zip(conditions, got.ids[i]):
                at = ("none", "none", "") if c is None else (c.kind, c.phase, cut_of(c.heads))
                first[(*at, sample.id)] = tokens[0]
        return got

    monkeypatch.setattr(evaluate, "judged", by_chance)
    monkeypatch.setattr(evaluate, "sweep_replies", noted)
    monkeypatch.setattr(decoding, "generate", first_tokens)
    shown = Samples("noise", "test", tiny.samples((100, 60), (70, 150), (130, 70), (64, 90), (90, 90)))
    groups = {"vrh": RANKED, "random 0": RANKED.controls(4, 0), "short": RANKED.top(2)}
    table = evaluate.sensitivity(vlm, shown, groups, 4, samples[:2], batch_size=5)

    plain = table[table.condition == "unmasked"]
    assert len(plain) == 1 and (plain.kind + plain.phase).item() == "––" and plain.change.isna().all()
    cut = table[table.condition != "unmasked"]
    want = [(*at, c) for at in itertools.product(KINDS, PHASES) for c in ("vrh", "random")]
    assert list(zip(cut.kind, cut.phase, cut.condition)) == want and len(want) == 12, "and none of the short group"
    assert cut.seed.fillna(-1).tolist() == [-1, 0] * 6 and (cut.k == 4).all()
    for row in cut.itertuples():
        frame = frames[row.kind, row.phase]
        here, before = (
            (frame[frame.condition == c].outcome == "correct").tolist() for c in (row.condition, "unmasked")
        )
        assert row.accuracy == pytest.approx(100 * sum(here) / 5)
        assert row.change == pytest.approx(100 * (sum(here) - sum(before)) / 5)
        assert row.change_low <= row.change <= row.change_high
    assert cut.change.nunique() > 1 and set(table.attrs["runs"]) == {
        r for f in frames.values() for r in f.attrs["runs"]
    }

    pd.testing.assert_frame_equal(frames["zero", "all"], sweep(vlm, shown, groups, [4], short="skip", batch_size=5))
    texts = {at: f[f.condition == "vrh"].text.tolist() for at, f in frames.items()}
    for a, b in itertools.combinations(texts, 2):
        assert texts[a] != texts[b], f"{a} and {b} are one thing"
    untouched, changed = {}, {}
    for (_, phase, _, sample), token in first.items():
        if phase != "none":
            same = token == first["none", "none", "", sample]
            (untouched if phase == "decode" else changed).setdefault(bool(same), []).append(sample)
    assert set(untouched) == {True}, "the first token comes from the last position of the prompt"
    assert False in changed and len(untouched[True]) == 3 * 2 * 5


def test_detection_samples_are_added_to_those_tested_as_counts():
    found = range(20, 25)
    test = answers_of(
        UNCUT, told("vrh", {0, 1}), told("vrh", {0}, k=5), told("random", set(range(7)), seed=0),
        told("random", set(range(6)), seed=1),
    )  # fmt: skip
    seen = answers_of(
        told("unmasked", set(found), k=0, order=found), told("vrh", {24}, order=found),
        told("random", {20, 21}, seed=1, order=found),
    )  # fmt: skip
    seen.attrs["runs"] = ["three"]
    table = evaluate.with_detection(test, seen)
    assert list(zip(table.condition, table.k, table.seed.fillna(-1))) == [
        ("unmasked", 0, -1), ("vrh", 3, -1), ("random", 3, 1)
    ], "not k=5 and not seed 0: these were not asked about the detection samples"  # fmt: skip
    assert table.without.tolist() == pytest.approx([90, 20, 60]) and table.n_without.tolist() == [10] * 3
    assert table["with"].tolist() == pytest.approx([100 * 14 / 15, 100 * 3 / 15, 100 * 8 / 15])
    assert table.n_with.tolist() == [15] * 3
    assert table.found_on.tolist() == pytest.approx([100, 20, 40]) and table.n_found_on.tolist() == [5] * 3
    assert table.difference.tolist() == pytest.approx([10, 0, -20])
    # Newcombe (1998), method 10: from the Wilson intervals of the two, 5 of 5 and 9 of 10.
    one, two = evaluate.Accuracy(5, 5), evaluate.Accuracy(9, 10)
    low = ((one.mean - one.interval[0]) ** 2 + (two.interval[1] - two.mean) ** 2) ** 0.5
    high = ((one.interval[1] - one.mean) ** 2 + (two.mean - two.interval[0]) ** 2) ** 0.5
    assert (table.low[0], table.high[0]) == pytest.approx((10 - low, 10 + high))
    assert "seed" not in evaluate.with_detection(test, seen[seen.seed.isna()]), "no column of nothing"
    assert table.attrs["runs"] == ["one", "three", "two"]


# ---------------------------------------------------------------- layouts


def test_a_wide_table_has_a_column_for_every_k():
    rows = [
        ("b", "m", "unmasked", 0, None, 80.0), ("b", "m", "vrh", 4, None, 20.0), ("b", "m", "vrh", 10, None, 10.0),
        ("b", "m", "random", 4, 0, 70.0), ("b", "m", "random", 4, 1, 60.0),
        ("c", "m", "unmasked", 0, None, 50.0), ("c", "m", "vrh", 4, None, 5.0), ("c", "m", "vrh", 1, None, 45.0),
        ("b", "n", "unmasked", 0, None, 0.0), ("b", "n", "vrh", 4, None, 1.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["benchmark", "model", "condition", "k", "seed", "accuracy"])
    found = evaluate.wide(table.astype({"seed": "Int64"}))
    nothing = np.nan
    want = pd.DataFrame(
        [("b", "m", "vrh", 80, nothing, 20, 10), ("b", "m", "random", 80, nothing, 65, nothing),
         ("b", "n", "vrh", 0, nothing, 1, nothing), ("c", "m", "vrh", 50, 45, 5, nothing)],
        columns=["benchmark", "model", "condition", "k=0", "k=1", "k=4", "k=10"],
    )  # fmt: skip
    pd.testing.assert_frame_equal(found, want, check_dtype=False)


def test_the_published_table_is_laid_out_as_it_was_printed(monkeypatch):
    monkeypatch.setattr(store, "ROOT", Path(__file__).parents[1])
    table = paper.published("accuracy_vs_k")
    known = {(r.benchmark, r.model, r.condition, r.k): r.accuracy for r in table.itertuples()}
    found = evaluate.wide(table)
    ks = sorted({k for *_, k in known})
    assert list(found.columns) == ["benchmark", "model", "condition", *(f"k={k}" for k in ks)] and ks[0] == 0
    cells = {
        (row["benchmark"], row["model"], row["condition"], k): row[f"k={k}"] for _, row in found.iterrows() for k in ks
    }
    cut = {at: value for at, value in known.items() if at[-1] > 0}
    assert {at: v for at, v in cells.items() if at[-1] and not np.isnan(v)} == pytest.approx(cut)
    assert len(cut) > 100 and {at[:3] for at in cells} == {at[:3] for at in cut}
    for at, value in cells.items():
        if at[-1] == 0:
            assert value in [v for (b, m, _, k), v in known.items() if (b, m, k) == (*at[:2], 0)], at


def known(name: str, *first: tuple) -> HeadScores:
    """Scores of a model whose best heads are these, in order."""
    values = np.random.default_rng(len(first)).random(GRID)
    for i, at in enumerate(first):
        values[at] = 9 - i
    return HeadScores(values, "x", name, 5)


SCORES = {
    "a": known("a", (0, 0), (0, 1), (1, 2), (2, 3)), "b": known("b", (0, 1), (1, 2), (2, 3), (2, 4)),
    "c": known("c", (0, 0), (2, 7), (2, 6), (2, 5)), "d": known("d", (1, 7), (1, 6), (1, 5), (1, 4)),
}  # fmt: skip


def lent() -> pd.DataFrame:
    """Sweeps of two models, a at k=4 and b at k=3; what stands at another k is there to be overlooked."""
    a, b = {"model": "a"}, {"model": "b"}
    parts = [
        told("unmasked", set(range(9)), k=0, **a), told("vrh", {0}, k=4, **a), told("vrh", {9}, k=3, **a),
        told("borrowed", {0, 1, 2}, k=4, **a), told("borrowed", set(range(10)), k=3, **a),
        told("other_backbone", set(range(7)), k=4, seed=0, **a), told("other_backbone", set(), k=4, seed=1, **a),
        *(told("random", set(range(n)), k=4, seed=s, **a) for s, n in enumerate((8, 6))),
        told("layer_matched", set(), k=4, seed=0, **a),
        told("unmasked", set(range(5)), k=0, **b), told("vrh", {0, 1}, k=3, **b), told("borrowed", {0, 1, 9}, k=3, **b),
        told("random", set(range(5)), k=3, seed=0, **b),
    ]  # fmt: skip
    return answers_of(*([row | {"image": f"p{int(row['id'][1:]) // 2}"} for row in part] for part in parts))


def test_borrowed_heads_are_compared_with_a_models_own():
    sources = {"a": {"borrowed": "b", "other_backbone 0": "c", "other_backbone 1": "d"}, "b": {"borrowed": "a"}}
    table = evaluate.transfers(lent(), sources, SCORES, {"a": 4, "b": 3})
    assert table.attrs["runs"] == ["one", "two"]
    assert (
        list(table.columns)
        == (
            "model source relation k n shared p_in_layer spearman own_drop borrowed_drop borrowed_low borrowed_high "
            "less less_low less_high random_drop matched_drop unreadable other_drop"
        ).split()
    )
    assert list(zip(table.model, table.source, table.relation, table.k, table.n)) == [
        ("a", "b", "same backbone", 4, 10), ("a", "c", "other", 4, 10), ("a", "d", "other", 4, 10),
        ("b", "a", "same backbone", 3, 10),
    ]  # fmt: skip
    assert table.shared.tolist() == [3, 1, 0, 2], "of the lists that are cut: four heads in a, three in b"
    for row in table.itertuples():
        one, two = SCORES[row.model], SCORES[row.source]
        assert row.p_in_layer == shared(one.top(row.k), two.top(row.k)).p_in_layer
        assert row.spearman == one.spearman(two)
    assert table.matched_drop.tolist()[:3] == pytest.approx([90] * 3) and np.isnan(table.matched_drop[3])
    assert table.other_drop.tolist()[:3] == pytest.approx([90] * 3) and np.isnan(table.other_drop[3])
    with pytest.raises(ValueError, match=r"a: heads of d \(other_backbone 1\) were not cut at k=3; sweep it"):
        evaluate.transfers(lent(), {"a": {"other_backbone 1": "d"}}, SCORES, {"a": 3})
    assert table.own_drop.tolist() == pytest.approx([80, 80, 80, 30])
    assert table.borrowed_drop.tolist() == pytest.approx([60, 20, 90, 20]), "seed 0 is c, seed 1 is d"
    assert table.less.tolist() == pytest.approx([20, 60, -10, 10])
    assert table.random_drop.tolist() == pytest.approx([20, 20, 20, 0])
    images = [i // 2 for i in range(10)]
    right = [  # unmasked, own heads cut, borrowed heads cut
        (set(range(9)), {0}, {0, 1, 2}), (set(range(9)), {0}, set(range(7))), (set(range(9)), {0}, set()),
        (set(range(5)), {0, 1}, {0, 1, 9}),
    ]  # fmt: skip
    for row, case in zip(table.itertuples(), right, strict=True):
        before, own, borrowed = ([i in some for i in range(10)] for some in case)
        drop = paired_difference(borrowed, before, images)
        less = paired_difference(borrowed, own, images)
        assert (row.borrowed_low, row.borrowed_high) == pytest.approx((-drop.high, -drop.low))
        assert (row.less_low, row.less_high) == pytest.approx((less.low, less.high))
        assert row.borrowed_low < row.borrowed_high and row.less_low < row.less_high


def test_a_model_that_nobody_lends_to_has_no_row_but_all_columns():
    some = evaluate.transfers(lent(), {"a": {"borrowed": "b"}}, SCORES, {"a": 4})
    none = evaluate.transfers(lent(), {"a": {}}, SCORES, {"a": 4})
    assert none.empty and list(none.columns) == list(some.columns) and len(some) == 1


def test_chance_is_a_mean_and_unknown_where_a_sample_does_not_know_it():
    shown = tiny.samples((100, 60), (70, 150))
    known = [dataclasses.replace(s, chance=c) for s, c in zip(shown, (0.25, 0.5))]
    assert evaluate.chance(Samples("noise", "test", known)) == pytest.approx(37.5)
    assert np.isnan(evaluate.chance(Samples("noise", "test", [known[0], shown[1]])))


# ---------------------------------------------------------------- memory


@contextlib.contextmanager
def short_of_memory(vlm, most: int):
    """A device on which passes of more than so many sequences run out of memory; yields how many were asked for."""
    asked = []

    def limited(module, args, kwargs):
        rows = (kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]).shape[0]
        asked.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = vlm.model.model.language_model.register_forward_pre_hook(limited, with_kwargs=True)
    try:
        yield asked
    finally:
        handle.remove()


@pytest.mark.parametrize("most", [9, 4, 2, 1])
def test_out_of_memory_halves_what_runs_at_once_and_loses_nothing(vlm, samples, monkeypatch, root, capsys, most):
    several = conditions() | {Condition("more", 1, i): Ablation(RANKED.controls(4, i)) for i in range(4)}
    want = replies(vlm, samples, several, batch_size=3)
    monkeypatch.setattr(evaluate.store, "ROOT", root / "short")
    vlm.rows = 16
    with short_of_memory(vlm, most) as asked:
        pd.testing.assert_frame_equal(replies(vlm, samples, several, batch_size=3), want)
    assert most / 2 <= vlm.rows <= max(most, 7)
    refused = [i for i, rows in enumerate(asked) if rows > most]
    assert 1 <= len(refused) <= 3 and max(asked[refused[-1] + 1 :]) <= most, "once it is known what fits, it is kept to"
    assert f"out of memory; going on with {vlm.rows}" in capsys.readouterr().out
    used = {9: {"3": 3, "2": 2}, 4: {"3": 3, "2": 2}, 2: {"1": 5}, 1: {"1": 5}}[most]
    for digest in want.attrs["runs"]:
        manifest = json.loads((root / f"short/data/runs/nano/{digest}.json").read_text())
        assert sum(manifest["sequences_at_once"].values()) == len(samples)
        assert manifest["batch_sizes"] == used or most in (2, 4)
        assert max(map(int, manifest["sequences_at_once"])) <= most


def test_a_single_sequence_that_does_not_fit_is_an_error_with_the_next_step(vlm, samples):
    with short_of_memory(vlm, 0), pytest.raises(MemoryError, match="not even one sequence.*nvidia-smi"):
        replies(vlm, samples, {UNMASKED: None})


# ---------------------------------------------------------------- pointing, other rules, official scores, lost rows


def pointing() -> Samples:
    mask = np.zeros((100, 150), bool)
    mask[20:60, 30:90] = True
    image = tiny.samples((150, 100))[0].image
    return Samples(
        "places", "test", [Sample(f"p{i}", image, "n", "a place", mask=mask, task="point") for i in range(6)]
    )


def test_points_are_judged_by_the_mask(vlm, scripted):
    def at(sample, size, x, y):
        return vlm.write_box(Box(x, y, x + 10, y + 10), sample.image.size, size)

    def text(vlm, sample, condition, size):
        whole = at(sample, size, 40, 30)
        x, y = whole.split("[")[-1].split(",")[:2]
        away, beside = at(sample, size, 120, 80), at(sample, size, 200, 30)
        far = away.split("[")[-1].split(",")[:2]
        return {
            "p0": f"[{x}, {y}]", "p1": f"({far[0]}, {far[1]}) and ({x}, {y})", "p2": whole, "p3": beside,
            "p4": "There is none.", "p5": "It is at (1…",
        }[sample.id]  # fmt: skip

    scripted(text)
    frame = replies(vlm, pointing(), {UNMASKED: None})
    assert frame.outcome.tolist() == ["correct", "wrong point", "correct", "wrong point", "no point", "cut off"]
    assert frame.inside.tolist() == [1, 0.5, 1, 0, 0, 0]
    table = evaluate.accuracy_table(frame)
    assert table.accuracy.item() == pytest.approx(100 / 3) and table.inside.item() == pytest.approx(250 / 6)
    assert table["no point"].item() == pytest.approx(100 / 6) and "no box" not in table


def test_a_point_without_a_mask_is_refused():
    with pytest.raises(ValueError, match="mask"):
        Sample("p", tiny.samples()[0].image, "n", "a place", task="point")


def test_the_same_replies_can_be_judged_by_another_rule(vlm, scripted):
    image = tiny.samples()[0].image
    asked = [Sample(f"q{i}", image, "n", "What?", task="answer", answer=a, rule="exact")
             for i, a in enumerate(["3", "yes"])]  # fmt: skip
    samples = Samples("things", "test", asked)
    scripted(lambda vlm, s, c, size: "3")
    strict = replies(vlm, samples, {UNMASKED: None})
    lenient = evaluate.rejudged(strict, samples, "lenient")
    assert strict.outcome.tolist() == ["correct", "wrong answer"]
    assert lenient.outcome.tolist() == ["correct", "correct"], "lenient: a number from 1 to 9 says yes"


def test_the_official_score_weights_kinds_not_samples():
    kinds = ["ADE20K"] * 2 + ["COCO"] * 8 + ["Omni3D"] * 4
    right = [1, 1] + [0] * 8 + [1, 1, 1, 0]
    frame = pd.DataFrame({
        "model": "m", "benchmark": "b", "condition": "unmasked", "k": 0, "seed": pd.NA, "kind": kinds,
        "outcome": ["correct" if r else "wrong answer" for r in right],
    })  # fmt: skip
    weights = {"ADE20K": 0.25, "COCO": 0.25, "Omni3D": 0.5}
    row = evaluate.weighted(frame, weights).iloc[0]
    assert row.accuracy == pytest.approx(62.5) and row.n == 14, "half of (100 + 0) / 2, half of 75"
    assert accuracy(frame.outcome).mean == pytest.approx(100 * 5 / 14)
    assert row.low == pytest.approx(62.5 - 1.96 * (0.25 * 75 * 25 / 4) ** 0.5)
    with pytest.raises(ValueError, match="Omni3D"):
        evaluate.weighted(frame[:10], weights)


def test_lost_rows_stand_beside_n(vlm, scripted, samples):
    scripted(lambda vlm, s, c, size: right(vlm, s, size))
    lost = [Lost("x", "picture not found"), Lost("y", "picture not found")]
    short = Samples("noise", "test", list(samples), lost=lost)
    table = evaluate.accuracy_table(replies(vlm, short, {UNMASKED: None}))
    assert table.lost.item() == 2 and table.n.item() == len(samples)
    assert evaluate.summary(table).lost.item() == 2
    assert "2 LOST: picture not found" in repr(short) and "2 LOST" in repr(short[:2])
    assert "lost" not in evaluate.accuracy_table(replies(vlm, samples, {UNMASKED: None}))


def test_a_benchmark_may_allow_longer_replies(vlm, samples, monkeypatch):
    limits = []

    def counted(vlm, batch, conditions, limit, drafts):
        limits.append(limit)
        return GENERATE(vlm, batch, conditions, limit, drafts)

    monkeypatch.setattr(decoding, "generate", counted)
    longer = Samples("noise", "test", list(samples), max_new_tokens=9)
    replies(vlm, longer[:2], {UNMASKED: None})
    replies(vlm, samples[:2], {UNMASKED: None})
    assert limits == [9, vlm.max_new_tokens] and vlm.max_new_tokens != 9
    assert generate(vlm, vlm.prepare(samples[:2]), max_new_tokens=9).shape[-1] > vlm.max_new_tokens


def test_samples_of_another_revision_are_another_run(vlm, samples, calls):
    for origin in ("table@1", "table@2"):
        replies(vlm, Samples("noise", "test", list(samples), origin=origin), {UNMASKED: None})
    assert len(calls) == 2, "same ids, texts and boxes, but the pictures may differ"
