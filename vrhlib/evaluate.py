"""Replies under an intervention, and accuracy with its uncertainty.

Raw replies are what is stored; boxes are read from them and compared with the referent each time, so a
changed parser or threshold needs no new generation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from vrhlib import store
from vrhlib.answers import OUTCOMES as ANSWER_OUTCOMES
from vrhlib.answers import judge
from vrhlib.attention import KERNEL, Ablation, generate
from vrhlib.boxes import Box
from vrhlib.heads import HeadSet
from vrhlib.samples import Sample, Samples
from vrhlib.stats import Accuracy, paired_difference
from vrhlib.vlm import VLM

IOU = 0.5  # a grounding is right at this overlap or more
OUTCOMES = ("correct", "wrong box", "degenerate", "malformed", "cut off", "no box")  # of a grounding
UNREADABLE = ("malformed", "cut off", "no box", "no answer")  # there is no box, or no answer, in the reply


class Condition(NamedTuple):
    """What was done: `condition` (unmasked, vrh, random, ...), number of ablated heads, seed of a control."""

    condition: str
    k: int = 0
    seed: int | None = None


UNMASKED = Condition("unmasked")


def replies(
    vlm: VLM, samples: Samples, conditions: Mapping[Condition, Ablation | None], batch_size: int = 8, rows: int = 128
) -> pd.DataFrame:
    """Greedy replies of every sample under every condition; stored per condition, and resumed.

    Conditions are rows of one batch (at most `rows` at a time) on shared vision features. One line per
    (condition, sample): model, benchmark, condition, k, seed, id, kind, text, x0, y0, x1, y1 (original
    pixels, absent where no box could be read or none was asked for), iou, outcome (one of `OUTCOMES`, or of
    `answers.OUTCOMES` where the task is to answer in words).
    """
    if without := [s.id for s in samples if s.box is None and s.task != "answer"]:
        raise ValueError(
            f"{len(without)} samples of {samples!r} have no box (first: {without[0]}); grounding needs one."
        )
    runs = {
        name: store.Run(
            task="replies", benchmark=f"{samples.benchmark} {samples.split}", kernel=KERNEL, batch_size=batch_size,
            samples=tuple(s.fingerprint for s in samples), condition=a.describe() if a else {},
            decoding={"greedy": True, "max_new_tokens": vlm.max_new_tokens}, **vlm.identity(),
        )
        for name, a in conditions.items()
    }  # fmt: skip
    with ExitStack() as stack:
        digests = sorted({run.digest for run in runs.values()})  # one order for all processes: no deadlock
        by_digest = {run.digest: run for run in runs.values()}
        stored = {d: stack.enter_context(store.open_run(by_digest[d], vlm.profile)) for d in digests}
        acting = {runs[name].digest: a for name, a in conditions.items()}  # equal conditions are run once
        starts = [i for i in range(0, len(samples), batch_size) if _missing(samples[i : i + batch_size], stored)]
        label = f"{samples.benchmark} {samples.split}  {len(digests)} conditions x {len(samples)} samples"
        for start in store.progress(starts, f"{label}, batches of {batch_size}"):
            chunk = samples[start : start + batch_size]
            batch = vlm.prepare(chunk)
            missing = _missing(chunk, stored)
            width = max(1, rows // len(chunk))
            for i in range(0, len(missing), width):
                part = missing[i : i + width]
                ids = generate(vlm, batch, [acting[d] for d in part])
                for sample, resized, row in zip(chunk, batch.resized, ids):
                    for d, reply in zip(part, row):
                        if sample.id not in stored[d]:
                            text, finished = vlm.decode([t for t in reply.tolist() if t >= 0])
                            stored[d].add(sample.id, {"text": text, "finished": finished, "resized": list(resized)})
        about = {"model": vlm.name, "benchmark": samples.benchmark}
        lines = [
            {**about, **name._asdict(), **_read(vlm, s, stored[run.digest].records[s.id])}
            for name, run in runs.items()
            for s in samples
        ]
    frame = pd.DataFrame(lines).astype({"seed": "Int64"})
    frame.attrs["runs"] = digests
    return frame


def _missing(chunk: Samples, stored: Mapping) -> list[str]:
    return [d for d, results in stored.items() if any(s.id not in results for s in chunk)]


def _read(vlm: VLM, sample: Sample, record: dict) -> dict:
    if sample.task == "answer":
        outcome = judge(record["text"], sample.answer, sample.rule, sample.choices, record["finished"])
        box = dict.fromkeys((*Box._fields, "iou"), np.nan)
        return {"id": sample.id, "kind": sample.kind, "text": record["text"], **box, "outcome": outcome}
    reply = vlm.read(record["text"], sample.image.size, tuple(record["resized"]), record["finished"])
    iou = reply.box.iou(sample.box) if reply.box else 0.0
    outcome = reply.failure or ("correct" if iou >= IOU else "wrong box")
    box = reply.box or (np.nan,) * 4
    return {"id": sample.id, "kind": sample.kind, "text": record["text"], **dict(zip(Box._fields, box)),
            "iou": iou, "outcome": outcome}  # fmt: skip


def accuracy(outcomes: Sequence[str]) -> Accuracy:
    """Share of replies that are right; every failure counts as wrong."""
    outcomes = list(outcomes)
    return Accuracy(outcomes.count("correct"), len(outcomes))


def sweep_replies(
    vlm: VLM,
    samples: Samples,
    groups: Mapping[str, HeadSet],
    ks: Sequence[int],
    kind: str = "zero",
    phase: str = "all",
    means: torch.Tensor | None = None,
    batch_size: int = 8,
) -> pd.DataFrame:
    """Replies with the first k heads of each group ablated, for every k, and of the unmasked model.

    A group called `random 3` is condition `random` with seed 3; `kind`, `phase` and `means` as in `Ablation`. Columns
    as in `replies`. Raises ValueError,
    before anything runs, if a group has fewer heads than the largest k or belongs to another grid.
    """
    conditions: dict[Condition, Ablation | None] = {UNMASKED: None}
    for name, heads in groups.items():
        match = re.fullmatch(r"(.+?) (\d+)", name)
        condition, seed = (match[1], int(match[2])) if match else (name, None)
        for k in ks:
            if k:
                conditions[Condition(condition, k, seed)] = Ablation(heads.on(vlm.grid).top(k), kind, phase, means)
    return replies(vlm, samples, conditions, batch_size)


def baseline(vlm: VLM, samples: Samples, pairs: Samples, batch_size: int = 8) -> pd.DataFrame:
    """The unmasked model on a grounding benchmark, one row: model, benchmark, accuracy, low, high, n; chance (one thing
    picked at random, where samples know it); two_questions, two_low, two_high, two_n (see `two_questions`);
    unreadable. Percent."""
    plain = replies(vlm, samples, {UNMASKED: None}, batch_size)
    again = replies(vlm, pairs, {UNMASKED: None}, batch_size)
    right, both = accuracy(plain.outcome), two_questions(again, pairs)
    row = {
        "model": vlm.name, "benchmark": samples.benchmark, "accuracy": right.mean, "low": right.interval[0],
        "high": right.interval[1], "n": right.n,
        "chance": 100 * float(np.mean([np.nan if s.chance is None else s.chance for s in samples])),
        "two_questions": both.mean, "two_low": both.interval[0], "two_high": both.interval[1], "two_n": both.n,
        "unreadable": 100 * float(plain.outcome.isin(UNREADABLE).mean()),
    }  # fmt: skip
    frame = pd.DataFrame([row])
    frame.attrs["runs"] = plain.attrs["runs"] + again.attrs["runs"]
    return frame


def together(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Frames below each other, with the runs behind all of them (pandas would drop these where they differ)."""
    frames = list(frames)
    whole = pd.concat(frames, ignore_index=True)
    whole.attrs["runs"] = sorted({run for frame in frames for run in frame.attrs.get("runs", [])})
    return whole


def groups(heads: HeadSet, seeds: Sequence[int]) -> dict[str, HeadSet]:
    """What a sweep cuts: the heads themselves (`vrh`), and for every seed as many from outside them, drawn from the
    whole model (`random 0`) and layer by layer (`layer_matched 0`)."""
    k = len(heads)
    found = {"vrh": heads} | {f"random {s}": heads.controls(k, s) for s in seeds}
    return found | {f"layer_matched {s}": heads.controls(k, s, layer_matched=True) for s in seeds}


def accuracy_table(answers: pd.DataFrame) -> pd.DataFrame:
    """Replies to one row per condition: model, benchmark, condition, k, seed, accuracy, low, high (percent, 95 %
    Wilson), n, and the percentage of every outcome that replies of this kind can have."""
    rows = []
    keys = ["model", "benchmark", "condition", "k", "seed"]
    for values, frame in answers.groupby(keys, sort=False, dropna=False):
        right = accuracy(frame.outcome)
        possible = OUTCOMES if frame.iou.notna().any() else ANSWER_OUTCOMES  # an answer in words has no overlap
        shares = {outcome: 100 * float((frame.outcome == outcome).mean()) for outcome in possible}
        low, high = right.interval
        rows.append(dict(zip(keys, values)) | {"accuracy": right.mean, "low": low, "high": high, "n": right.n} | shares)
    table = pd.DataFrame(rows).astype({"seed": "Int64"})
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


def at_each_k(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """An accuracy table cut into parts of one model and one k, by name (`model, k=8`), each with the unmasked rows."""
    cut, plain = (table[table.condition.eq("unmasked") == unmasked] for unmasked in (False, True))
    return {
        f"{model}, k={k}": pd.concat([plain[plain.model == model], rows])
        for (model, k), rows in cut.groupby(["model", "k"], sort=False)
    }


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """An accuracy table, one row per model, benchmark, condition and k: means over the seeds of a control (also of its
    interval bounds), the number of seeds and n; percent to one decimal."""
    by = table.groupby(["model", "benchmark", "condition", "k"], sort=False)
    shares = [o for o in (*OUTCOMES, *ANSWER_OUTCOMES[1:]) if o in table and o != "correct"]
    means = by[["accuracy", "low", "high", *dict.fromkeys(shares)]].mean().round(1)
    frame = means.assign(seeds=by.seed.nunique().clip(lower=1), n=by.n.first()).reset_index()
    frame.attrs["runs"] = table.attrs.get("runs", [])
    return frame


def paired_drops(answers: pd.DataFrame, k: int) -> pd.DataFrame:
    """Change of accuracy against the unmasked model on the same samples, percentage points, 95 % paired bootstrap.

    `answers` as `sweep_replies` returns them; one row per condition and seed at k: condition, seed, change, low,
    high, n.
    """
    right = answers.assign(right=answers.outcome == "correct").set_index("id").right
    base = right[(answers.condition == "unmasked").to_numpy()]
    rows = []
    for (condition, seed), frame in answers[answers.k == k].groupby(["condition", "seed"], sort=False, dropna=False):
        change = paired_difference((frame.outcome == "correct").tolist(), base[frame.id].tolist())
        rows.append((condition, seed, change.mean, change.low, change.high, change.n))
    return pd.DataFrame(rows, columns=["condition", "seed", "change", "low", "high", "n"]).astype({"seed": "Int64"})


def ablation_sweep(vlm: VLM, samples: Samples, groups: Mapping[str, HeadSet], ks: Sequence[int], **how) -> pd.DataFrame:
    """Accuracy against k for every group: `accuracy_table` of `sweep_replies`."""
    return accuracy_table(sweep_replies(vlm, samples, groups, ks, **how))


def two_questions(answers: pd.DataFrame, samples: Samples) -> Accuracy:
    """Share of pictures whose questions, about different things, are *all* answered right.

    A reader that ignores the question gives one box to both and scores 0 here, whatever its accuracy.
    """
    if answers.id.duplicated().any():
        raise ValueError("two_questions judges one condition at a time: select the rows of one first.")
    right = dict(zip(answers.id, answers.outcome == "correct"))
    by_image: dict[str, list[bool]] = {}
    for s in samples:
        by_image.setdefault(s.image_key, []).append(bool(right[s.id]))
    if alone := sum(len(v) < 2 for v in by_image.values()):
        raise ValueError(f"{alone} pictures of {samples!r} have one question; the test needs two each (pairs=True).")
    return Accuracy(sum(map(all, by_image.values())), len(by_image))
