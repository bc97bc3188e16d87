"""Replies under an intervention, and accuracy with its uncertainty.

Raw replies are what is stored; boxes are read from them and compared with the referent each time, so a
changed parser or threshold needs no new generation.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from statsmodels.stats.proportion import confint_proportions_2indep

from vrhlib import store, sweep
from vrhlib.agreement import shared
from vrhlib.answers import judge
from vrhlib.attention import KERNEL, KINDS, PHASES, Ablation, Intervention, fitting, head_means
from vrhlib.decoding import check, missing, reply, strict
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.outcomes import POSSIBLE, UNREADABLE, judged
from vrhlib.profiles import MODELS
from vrhlib.samples import Samples
from vrhlib.stats import Accuracy, Estimate, over_seeds, paired_difference
from vrhlib.vlm import VLM, revision
from vrhlib.wiring import load_vlm


class Condition(NamedTuple):
    """What was done: `condition` (unmasked, vrh, random, ...), number of ablated heads, seed of a control."""

    condition: str
    k: int = 0
    seed: int | None = None


UNMASKED = Condition("unmasked")
_CONDITION = ["model", "benchmark", *Condition._fields]  # what tells the rows of an accuracy table apart


SHARD = 100
"""Samples of a run: enough to be worth a trip to a worker, few enough that a lost one costs little. Runs of the first
samples serve larger sets too: asking for more computes only what is new."""


def replies(
    vlm: VLM, samples: Samples, conditions: Mapping[Condition, Intervention | None], batch_size: int = 16
) -> pd.DataFrame:
    """Greedy replies of every sample under every condition; stored per condition and shard, and resumed.

    A shard under all conditions is a cell (see `sweep`): computed here, or by the workers of the scheduler that
    DASK_SCHEDULER names. Conditions share a batch (at most `vlm.rows` sequences, fewer where memory runs out), vision
    features, and what they have in common with the untouched model (`decoding.generate`). One line per
    (condition, sample): model, benchmark, condition, k, seed, image, id, kind, task, text; x0, y0, x1, y1 (original
    pixels, absent where no box could be read or none was asked for); iou; inside (share of a reply's points in the
    mask, where the task is to point); outcome (one of `outcomes.POSSIBLE`); lost (rows of the benchmark that could not
    be asked). attrs["runs"]: keys of the runs behind it.
    """
    if without := [s.id for s in samples if s.box is None and s.task in ("locate", "question")]:
        raise ValueError(
            f"{len(without)} samples of {samples!r} have no box (first: {without[0]}); grounding needs one."
        )
    cells = [(samples[i : i + SHARD], conditions, batch_size) for i in range(0, len(samples), SHARD)]
    if sweep.client() and _sendable(vlm):
        _sent(
            vlm, [cell for cell in cells if not all(store.complete(r, vlm.profile) for r in _runs(vlm, *cell).values())]
        )
    found: dict[str, dict[str, dict]] = {}  # sample, key of a run to its record
    for cell in _free_first(vlm, cells):
        for digest, records in _computed(vlm, *cell).items():
            for name, record in records.items():
                found.setdefault(name, {})[digest] = record
    about, lines = {"model": vlm.name, "benchmark": samples.benchmark}, []
    keys = [{name: run.digest for name, run in _runs(vlm, *cell).items()} for cell in cells]
    for name in conditions:
        for (shard, *_), own in zip(cells, keys):
            for s in shard:
                verdict = judged(vlm, s, found[s.id][own[name]])
                lines.append({**about, **name._asdict(), "image": s.image_key, **verdict, "lost": len(samples.lost)})
    frame = pd.DataFrame(lines).astype({"seed": "Int64"})
    frame.attrs["runs"] = sorted({digest for own in keys for digest in own.values()})
    return frame


def _runs(vlm: VLM, shard: Samples, conditions: Mapping, batch_size: int) -> dict[Condition, store.Run]:
    limit, prints = shard.max_new_tokens or vlm.max_new_tokens, tuple(s.fingerprint for s in shard)
    return {
        name: store.Run(
            task="replies", benchmark=f"{shard.benchmark} {shard.split}", kernel=KERNEL, batch_size=batch_size,
            samples=prints, condition=a.describe() if a else {}, data=shard.origin, **vlm.identity(),
            decoding={"greedy": True, "max_new_tokens": limit, "drafted": not strict()},
        )
        for name, a in conditions.items()
    }  # fmt: skip


def _free_first(vlm: VLM, cells: list[tuple]) -> Iterator[tuple]:
    """The cells in order, but for those that another process works on: two that do the same share it."""
    left = list(cells)
    while left:
        runs = (next(iter(_runs(vlm, *cell).values())) for cell in left)
        free = (i for i, run in enumerate(runs) if not store.busy(run, vlm.profile))
        yield left.pop(next(free, 0))


@contextmanager
def _open(vlm: VLM, shard: Samples, conditions: Mapping, batch_size: int) -> Iterator[tuple[dict, dict]]:
    """What is stored of a shard, and what acts in it, both by the key of the run; equal conditions are one run."""
    runs = _runs(vlm, shard, conditions, batch_size)
    by_digest = {run.digest: (run, conditions[name]) for name, run in runs.items()}
    with ExitStack() as stack:  # in one order for all processes: no deadlock
        opened = {d: stack.enter_context(store.open_run(by_digest[d][0], vlm.profile)) for d in sorted(by_digest)}
        yield opened, {d: a for d, (_, a) in by_digest.items()}


def _computed(vlm: VLM, shard: Samples, conditions: Mapping, batch_size: int) -> dict[str, dict]:
    """Records of a shard by the key of their run; what was missing is computed."""
    limit = shard.max_new_tokens or vlm.max_new_tokens
    with _open(vlm, shard, conditions, batch_size) as (stored, acting):
        for d, results in stored.items():
            check(results.path, results.records, acting[d] is None)
        chunks = [chunk for chunk in shard.batches(batch_size) if missing(chunk, stored)]
        where = f"{shard.benchmark} {shard.split}  {len(stored)} conditions x {len(shard)} samples"
        meter = store.Meter(vlm.profile, vlm.name, vlm.device.type)
        progress = store.progress(chunks, f"{where}, batches of {batch_size}")
        for chunk, then in zip(progress, [*chunks[1:], None]):
            vlm.soon(chunk)
            vlm.soon(then)
            fitting(vlm, partial(reply, vlm, chunk, acting, stored, limit, meter))
        meter.close()
        return {d: results.records for d, results in stored.items()}


# ---------------------------------------------------------------- by workers


def _sendable(vlm: VLM) -> bool:
    """Whether a worker that loads this model by its name has the same: one that was trained here, or changed, stays
    here, and so does one that was loaded in another dtype than by default."""
    usual = torch.bfloat16 if vlm.device.type == "cuda" else torch.float32
    known = vlm.name in MODELS or Path(vlm.name).is_dir()
    return known and vlm.model.dtype == usual and vlm.revision == revision(vlm.name)


def _sent(vlm: VLM, cells: Sequence[tuple]) -> None:
    """Have workers compute cells."""
    if not cells:
        return
    source, shard = (vlm.name, tuple(vlm.given.items())), cells[0][0]
    label = f"{shard.benchmark} {shard.split}  {len(cells)} shards of {SHARD} samples, on workers"
    keys = [sorted({run.digest for run in _runs(vlm, *cell).values()}) for cell in cells]
    sweep.mapped(_cell, [(source, own, *cell) for own, cell in zip(keys, cells)], label, vlm.name)


def _cell(source: tuple[str, tuple], keys: list[str], shard: Samples, conditions: Mapping, batch_size: int) -> None:
    """One cell, in a worker. Raises RuntimeError, before it computes, if it would store it under other keys than those
    by which the caller looks for it."""
    name, given = source
    vlm = sweep.resident(_loaded, name, given)
    if sorted({run.digest for run in _runs(vlm, shard, conditions, batch_size).values()}) != keys:
        here = ", ".join(f"{k} {v}" for k, v in vlm.identity().items() if k in ("revision", "device", "dtype"))
        raise RuntimeError(
            f"A worker would store the replies of {name} under other keys than the command that asks for them: "
            f"another device, or VRHLIB_STRICT={int(strict())} only there (worker: {here}). Start workers and command "
            "on machines of one kind, with the same settings."
        )
    _computed(vlm, shard, conditions, batch_size)


def _loaded(name: str, given: tuple) -> VLM:
    return load_vlm(name, device=sweep.device(), **dict(given))


def unmasked(vlm: VLM, tests: Iterable[Samples], batch_size: int = 16) -> pd.DataFrame:
    """Replies of the model as it is on several benchmarks."""
    return together(replies(vlm, samples, {UNMASKED: None}, batch_size) for samples in tests)


def blind(vlm: VLM, tests: Iterable[Samples], batch_size: int = 16) -> pd.DataFrame:
    """Unmasked replies to the same questions about grey pictures, as condition `blind` of the same benchmark: what can
    be answered without looking. Columns as in `replies`."""
    frames = []
    for samples in tests:
        grey = unmasked(vlm, [samples.blind()], batch_size)
        seen = dict(zip((s.id for s in samples), (s.image_key for s in samples)))
        frames.append(grey.assign(condition="blind", benchmark=samples.benchmark, image=grey.id.map(seen)))
    return together(frames)


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
    batch_size: int = 16,
    short: Literal["refuse", "skip"] = "refuse",
) -> pd.DataFrame:
    """Replies with the first k heads of each group ablated, for every k, and of the unmasked model.

    A group called `random 3` is condition `random` with seed 3; layer-matched draws that came out alike are one draw,
    not several. `kind`, `phase` and `means` as in `Ablation`. Columns as in `replies`. Raises ValueError, before
    anything runs, if a group belongs to another grid or has fewer heads than the largest k (`short="skip"`: it is cut
    only as far as it goes).
    """
    cut = cut_groups(vlm, groups, ks, short)
    conditions = {name: Ablation(heads, kind, phase, means) for name, heads in cut.items()}
    return replies(vlm, samples, {UNMASKED: None} | conditions, batch_size)


def cut_groups(
    vlm: VLM, groups: Mapping[str, HeadSet], ks: Sequence[int], short: Literal["refuse", "skip"] = "refuse"
) -> dict[Condition, HeadSet]:
    """The first k heads of each group for every k above 0, by the condition that they make (see `sweep_replies`)."""
    found: dict[Condition, HeadSet] = {}
    drawn = set()
    for name, heads in groups.items():
        match = re.fullmatch(r"(.+?) (\d+)", name)
        condition, seed = (match[1], int(match[2])) if match else (name, None)
        for k in ks:
            if k and (short == "refuse" or k <= len(heads)):
                cut = heads.on(vlm.grid).top(k)
                if condition == "layer_matched":
                    if (k, alike := frozenset(cut)) in drawn:
                        continue
                    drawn.add((k, alike))
                found[Condition(condition, k, seed)] = cut
    return found


def baseline(vlm: VLM, samples: Samples, pairs: Samples, batch_size: int = 16) -> pd.DataFrame:
    """The unmasked model on a grounding benchmark, one row: model, benchmark, accuracy, low, high, n; chance (one thing
    picked at random, where samples know it); two_questions, two_low, two_high, two_n (see `two_questions`);
    unreadable. Percent."""
    plain = replies(vlm, samples, {UNMASKED: None}, batch_size)
    again = replies(vlm, pairs, {UNMASKED: None}, batch_size)
    right, both = accuracy(plain.outcome), two_questions(again, pairs)
    row = {
        "model": vlm.name, "benchmark": samples.benchmark, "accuracy": right.mean, "low": right.interval[0],
        "high": right.interval[1], "n": right.n,
        "chance": chance(samples),
        "two_questions": both.mean, "two_low": both.interval[0], "two_high": both.interval[1], "two_n": both.n,
        "unreadable": 100 * float(plain.outcome.isin(UNREADABLE).mean()),
    }  # fmt: skip
    if samples.lost:
        row["lost"] = len(samples.lost)
    frame = pd.DataFrame([row])
    frame.attrs["runs"] = plain.attrs["runs"] + again.attrs["runs"]
    return frame


def chance(samples: Samples) -> float:
    """Percent that a reader gets right who picks one of the things in view; NaN where samples do not know it."""
    return 100 * float(np.mean([np.nan if s.chance is None else s.chance for s in samples]))


def together(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Frames below each other, with the runs behind all of them (pandas would drop these where they differ)."""
    frames = list(frames)
    whole = pd.concat(frames, ignore_index=True)
    whole.attrs["runs"] = sorted({run for frame in frames for run in frame.attrs.get("runs", [])})
    return whole


def groups(heads: HeadSet, seeds: Sequence[int]) -> dict[str, HeadSet]:
    """What a sweep cuts: the heads themselves (`vrh`), and for every seed as many from outside them, drawn from the
    whole model (`random 0`) and layer by layer (`layer_matched 0`). The last kind goes only as far as layers have heads
    left (`HeadSet.matchable`): sweep with `short="skip"`, and say what `unmatched` says."""
    k, matched = len(heads), heads.matchable
    found = {"vrh": heads} | {f"random {s}": heads.controls(k, s) for s in seeds}
    return found | {f"layer_matched {s}": heads.controls(matched, s, layer_matched=True) for s in seeds if matched}


def unmatched(model: str, heads: HeadSet, ks: Iterable[int]) -> str:
    """How many layer-matched sets there are outside the first k heads, where fewer than five, and why there are none;
    one line."""
    few = []
    for k in sorted(set(ks) - {0}):
        cut = heads.top(k)
        ways = math.prod(math.comb(int(heads.grid[1] - inside), int(inside)) for inside in cut.layers)
        if ways < 5:
            few.append(f"k={k}: {ways or f'none, {cut.crowded}'}")
    return f"{model}: layer-matched sets that there are: {'; '.join(few) or 'five or more at every k'}"


def accuracy_table(answers: pd.DataFrame) -> pd.DataFrame:
    """Replies to one row per condition: model, benchmark, condition, k, seed, accuracy, low, high (percent, 95 %
    Wilson), n, and the percentage of every outcome that replies of this kind can have; `inside` (mean share of a
    reply's points in the mask, percent) for pointing; `lost` where rows of the benchmark are missing from n."""
    rows = []
    for values, frame in answers.groupby(_CONDITION, sort=False, dropna=False):
        right = accuracy(frame.outcome)
        tasks = frame.task.unique()
        possible = dict.fromkeys(outcome for task in tasks for outcome in POSSIBLE[task])
        shares = {outcome: 100 * float((frame.outcome == outcome).mean()) for outcome in possible}
        if "point" in tasks:
            shares["inside"] = 100 * float(frame.inside.mean())
        if lost := int(frame.lost.max()):
            shares["lost"] = lost
        low, high = right.interval
        rows.append(
            dict(zip(_CONDITION, values)) | {"accuracy": right.mean, "low": low, "high": high, "n": right.n} | shares
        )
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
    shown = {outcome for possible in POSSIBLE.values() for outcome in possible} - {"correct"} | {"inside", "lost"}
    shares = [column for column in table if column in shown]
    means = by[["accuracy", "low", "high", *shares]].mean().round(1)
    frame = means.assign(seeds=by.seed.nunique().clip(lower=1), n=by.n.first()).reset_index()
    frame.attrs["runs"] = table.attrs.get("runs", [])
    return frame


def _change(answers: pd.DataFrame, base: pd.DataFrame) -> Estimate:
    """Accuracy minus that of `base`, on the same samples (matched by id), points; see `stats.paired_difference`."""
    before = (base.outcome == "correct").set_axis(base.id)[answers.id]
    images = answers.image.tolist() if "image" in answers else None
    return paired_difference((answers.outcome == "correct").tolist(), before.tolist(), images)


def paired_drops(answers: pd.DataFrame, k: int) -> pd.DataFrame:
    """Change of accuracy against the unmasked model on the same samples, percentage points, 95 % paired bootstrap over
    images.

    `answers` as `sweep_replies` returns them, of one model on one benchmark; one row per condition and seed at k:
    condition, seed, change, low, high, n.
    """
    base, rows = answers[answers.condition == "unmasked"], []
    for (condition, seed), frame in answers[answers.k == k].groupby(["condition", "seed"], sort=False, dropna=False):
        change = _change(frame, base)
        rows.append((condition, seed, change.mean, change.low, change.high, change.n))
    return pd.DataFrame(rows, columns=["condition", "seed", "change", "low", "high", "n"]).astype({"seed": "Int64"})


def against(answers: pd.DataFrame, reference: str = "vrh") -> pd.DataFrame:
    """`accuracy_table` with the change against another condition at the same k, on the same samples: change,
    change_low, change_high (percentage points, 95 % paired bootstrap over images; NaN for the unmasked model).

    Raises ValueError where the reference is missing at some k.
    """
    base = dict(list(answers[answers.condition == reference].groupby(["model", "benchmark", "k"])))
    changes = []
    for (model, benchmark, condition, k, _), frame in answers.groupby(_CONDITION, sort=False, dropna=False):
        if condition == "unmasked":
            changes.append((np.nan,) * 3)
            continue
        if (model, benchmark, k) not in base:
            raise ValueError(f"{model}, k={k}: no {reference!r} to compare with; sweep it at the same k.")
        change = _change(frame, base[model, benchmark, k])
        changes.append((change.mean, change.low, change.high))
    table = accuracy_table(answers)
    table[["change", "change_low", "change_high"]] = changes
    return table


def told_apart(table: pd.DataFrame, reference: str = "vrh") -> pd.DataFrame:
    """Which conditions cost more or less than the reference, by `against`: a row per model, benchmark and k: lower,
    higher (change with its interval, which excludes 0), alike (the interval holds 0), same (all replies judged alike).

    Each interval stands for itself: of twenty that hold nothing, one excludes 0 by chance.
    """
    rows = []
    cut = table[~table.condition.isin(["unmasked", "random", "layer_matched", reference])]
    for (model, benchmark, k), frame in cut.groupby(["model", "benchmark", "k"], sort=False):
        found: dict[str, list[str]] = {"lower": [], "higher": [], "alike": [], "same": []}
        for row in frame.itertuples():
            words = f"{row.condition} {row.change:+.1f} [{row.change_low:.1f}, {row.change_high:.1f}]"
            side = "lower" if row.change_high < 0 else "higher" if row.change_low > 0 else "alike"
            unchanged = row.change == row.change_low == row.change_high == 0
            found["same" if unchanged else side].append(row.condition if unchanged else words)
        rows.append(
            {"model": model, "benchmark": benchmark, "k": k}
            | {side: "; ".join(words) or "–" for side, words in found.items()}
        )
    return pd.DataFrame(rows)


def causal_sweep(
    vlm: VLM,
    tests: Iterable[Samples],
    heads: HeadSet,
    ks: Sequence[int],
    control_ks: Sequence[int],
    seeds: Sequence[int],
    others: Mapping[str, HeadSet] = MappingProxyType({}),
    batch_size: int = 16,
) -> pd.DataFrame:
    """Replies on several benchmarks with the first k of `heads` cut, and of each of `others`, for k of `ks` and
    `control_ks`; at the latter also with both kinds of controls (see `groups`), drawn for each k from outside the k
    heads that are cut."""
    frames, cut = [], {"vrh": heads, **others}
    sets = [cut_groups(vlm, cut, sorted({*ks, *control_ks}))]
    sets += [cut_groups(vlm, groups(heads.top(k), seeds), [k], "skip") for k in control_ks]
    for samples in tests:
        beforehand(vlm, samples, [Ablation(chosen) for each in sets for chosen in each.values()], batch_size)
        frames.append(sweep_replies(vlm, samples, cut, sorted({*ks, *control_ks}), batch_size=batch_size))
        for k in control_ks:
            drawn = sweep_replies(vlm, samples, groups(heads.top(k), seeds), [k], batch_size=batch_size, short="skip")
            frames.append(drawn[~drawn.condition.isin(["unmasked", "vrh"])])
    return together(frames)


def beforehand(vlm: VLM, samples: Samples, acting: Sequence[Intervention], batch_size: int) -> None:
    """Compute what several sweeps of the same samples will ask for, in one go: the part that all conditions share with
    the untouched model is then read once, not once a sweep."""
    replies(vlm, samples, {UNMASKED: None} | {Condition(str(i)): a for i, a in enumerate(acting)}, batch_size)


def cells(answers: pd.DataFrame, k: Mapping[str, int]) -> pd.DataFrame:
    """What cutting the top heads does, a row per model and benchmark, at `k[model]` heads.

    Columns: model, benchmark, k, n; unmasked, vrh (accuracy, percent); in points drop, drop_low, drop_high (95 % paired
    bootstrap over images), random_drop, random_drop_low, random_drop_high (mean and 95 % t interval over seeds),
    matched_drop (mean over layer-matched draws), beyond_matched, beyond_matched_low, beyond_matched_high (how much more
    the heads cost than these draws on average, paired over images), all NaN where there is no such draw; unreadable
    (percent of the replies without these heads that hold no box)."""
    rows = []
    for (model, benchmark), frame in answers.groupby(["model", "benchmark"], sort=False):
        changes = paired_drops(frame, k[model]).set_index("condition")
        vrh = changes.loc["vrh"]
        random = over_seeds(-changes.loc[["random"], "change"])
        cut = frame[(frame.condition == "vrh") & (frame.k == k[model])]
        unmasked = accuracy(frame[frame.condition == "unmasked"].outcome)
        matched = frame[(frame.condition == "layer_matched") & (frame.k == k[model])]
        beyond = _beyond(matched, cut) if len(matched) else Estimate(*(np.nan,) * 3, 0)
        rows.append({
            "model": model, "benchmark": benchmark, "k": k[model], "n": unmasked.n, "unmasked": unmasked.mean,
            "vrh": accuracy(cut.outcome).mean, "drop": 0.0 - vrh.change, "drop_low": 0.0 - vrh.high,
            "drop_high": 0.0 - vrh.low,
            "random_drop": random.mean, "random_drop_low": random.low, "random_drop_high": random.high,
            "matched_drop": 0.0 - float(changes.loc[changes.index == "layer_matched", "change"].mean()),
            "beyond_matched": beyond.mean, "beyond_matched_low": beyond.low, "beyond_matched_high": beyond.high,
            "unreadable": 100 * float(cut.outcome.isin(UNREADABLE).mean()),
        })  # fmt: skip
    table = pd.DataFrame(rows)
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


def _beyond(matched: pd.DataFrame, cut: pd.DataFrame) -> Estimate:
    """Accuracy under several draws, on average, minus that of `cut`, on the same samples."""
    average = (matched.outcome == "correct").groupby(matched.id).mean()[cut.id]
    images = cut.image.tolist() if "image" in cut else None
    return paired_difference(average.tolist(), (cut.outcome == "correct").tolist(), images)


def pooled(answers: pd.DataFrame, name: str) -> pd.DataFrame:
    """The replies of several benchmarks as those of one, called `name`; every sample counts once."""
    lost = answers.groupby("benchmark").lost.max().sum()
    joined = answers.assign(id=answers.benchmark + " " + answers.id, benchmark=name, lost=lost)
    joined.attrs["runs"] = answers.attrs.get("runs", [])
    return joined


def sensitivity(
    vlm: VLM, samples: Samples, groups: Mapping[str, HeadSet], k: int, seen: Samples, batch_size: int = 16
) -> pd.DataFrame:
    """What "masking" a head means, and when, does to accuracy: the first k heads of each group under every kind of
    ablation (`attention.KINDS`) in every phase (`attention.PHASES`).

    `seen`: the samples whose prompts give the mean outputs of kind `mean`. `accuracy_table` with kind and phase
    ("–" for the unmasked model), and the change against the unmasked model with its interval (change, change_low,
    change_high). Groups with fewer heads are left out.
    """
    means, tables, ways = mean_outputs(vlm, seen, batch_size), [], list(itertools.product(KINDS, PHASES))
    cut = cut_groups(vlm, groups, [k], "skip").values()
    acting = [Ablation(heads, *way, means if way[0] == "mean" else None) for way in ways for heads in cut]
    beforehand(vlm, samples, acting, batch_size)
    for kind, phase in ways:
        given = {"means": means} if kind == "mean" else {}
        answers = sweep_replies(vlm, samples, groups, [k], kind, phase, batch_size=batch_size, short="skip", **given)
        changes = paired_drops(answers, k).rename(columns={"low": "change_low", "high": "change_high"})
        table = accuracy_table(answers).merge(changes.drop(columns="n"), how="left", on=["condition", "seed"])
        table.attrs["runs"] = answers.attrs["runs"]
        unmasked = table.condition == "unmasked"
        tables.append(table[~unmasked | (not tables)].assign(kind=kind, phase=phase))
        if len(tables) == 1:
            tables[0].loc[unmasked, ["kind", "phase"]] = "–"
    return together(tables)


def mean_outputs(vlm: VLM, samples: Samples, batch_size: int) -> torch.Tensor:
    """`attention.head_means` over the prompts of many samples, one batch on the device at a time."""
    parts: list[tuple[torch.Tensor, int]] = []

    def read(chunk: Samples) -> None:
        found = []
        for i in range(0, len(chunk), vlm.rows):
            batch = vlm.prepare(chunk[i : i + vlm.rows])
            vlm.running = len(batch)
            found.append((head_means(vlm, [batch]).double(), int(vlm.inputs(batch)["attention_mask"].sum())))
        parts.extend(found)  # at the end: where memory runs out, the chunk is read again

    for start in range(0, len(samples), batch_size):
        fitting(vlm, partial(read, samples[start : start + batch_size]))
    return (sum(mean * n for mean, n in parts) / sum(n for _, n in parts)).float()


def with_detection(test: pd.DataFrame, found_on: pd.DataFrame) -> pd.DataFrame:
    """Does it matter whether the samples that heads were found on are among those they are tested on (Table A10)?

    `test`: replies to test samples, `found_on`: to the detection samples. A row per condition that both have: model,
    benchmark, condition, k; without, n_without, with, n_with (accuracies in percent, as in the paper); found_on,
    n_found_on (accuracy on the detection samples alone); difference, low, high (found_on - without, points, 95 %
    Newcombe interval: other samples, so nothing is paired).
    """
    tested, seen = (
        dict(list(part.assign(seed=part.seed.fillna(-1)).groupby(_CONDITION, sort=False))) for part in (test, found_on)
    )
    rows = []
    for at in (at for at in tested if at in seen):
        alone, other = (accuracy(parts[at].outcome) for parts in (tested, seen))
        both = Accuracy(alone.correct + other.correct, alone.n + other.n)
        low, high = confint_proportions_2indep(other.correct, other.n, alone.correct, alone.n, method="newcomb")
        rows.append(dict(zip(_CONDITION, at)) | {
            "without": alone.mean, "n_without": alone.n, "with": both.mean, "n_with": both.n, "found_on": other.mean,
            "n_found_on": other.n, "difference": other.mean - alone.mean, "low": 100 * low, "high": 100 * high,
        })  # fmt: skip
    table = pd.DataFrame(rows).astype({"seed": "Int64"}).replace({"seed": {-1: pd.NA}}).dropna(axis=1, how="all")
    table.attrs["runs"] = sorted({*test.attrs.get("runs", []), *found_on.attrs.get("runs", [])})
    return table


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """An accuracy table in the layout of the paper's Table A1: a row per benchmark, model and condition, a column per
    k (k=0: unmasked); means over seeds, percent, NaN where nothing was cut at that k."""
    plain, cut = table[table.k == 0], table[table.k > 0]
    by = ["benchmark", "model"]
    rows = cut.pivot_table(index=[*by, "condition"], columns="k", values="accuracy", sort=False).sort_index(axis=1)
    base = plain.drop_duplicates(by).set_index(by).accuracy
    rows.insert(0, 0, base.loc[rows.index.droplevel("condition")].to_numpy())
    return rows.rename(columns="k={}".format).rename_axis(columns=None).reset_index()


def transfers(
    answers: pd.DataFrame,
    sources: Mapping[str, Mapping[str, str]],
    scores: Mapping[str, HeadScores],
    k: Mapping[str, int],
) -> pd.DataFrame:
    """How much damage borrowed heads do, a row per model and donor, at `k[model]` heads.

    `answers`: sweeps of every model with its own heads (`vrh`), controls, and each condition of `sources[model]`, which
    maps it to the donor (`agreement.donors`). Columns: model, source, relation, k, n; shared, p_in_layer (of the two
    lists that are cut, `agreement.shared`), spearman (of all scores); in points own_drop, borrowed_drop, borrowed_low,
    borrowed_high (95 % paired bootstrap over images), less, less_low, less_high (damage of own heads minus that of
    borrowed ones, paired), random_drop, matched_drop (means over draws, NaN where there is none); unreadable (percent
    of the replies without the borrowed heads that hold no box); other_drop (the most that heads of another backbone
    cost in this model). Raises ValueError where heads were not cut at that k.
    """
    rows = []
    for model, donors in sources.items():
        own = answers[answers.model == model]
        drops, at = paired_drops(own, k[model]), own[own.k == k[model]]
        mean = drops.groupby("condition").change.mean()
        for condition, source in donors.items():
            here, mine = (_named(frame, condition) for frame in (drops, at))
            if here.empty:
                raise ValueError(f"{model}: heads of {source} ({condition}) were not cut at k={k[model]}; sweep it.")
            less, row = _change(mine, at[at.condition == "vrh"]), here.iloc[0]
            lists = shared(scores[model].top(k[model]), scores[source].top(k[model]))
            rows.append({
                "model": model, "source": source,
                "relation": "same backbone" if condition == "borrowed" else "other", "k": k[model], "n": row.n,
                "shared": lists.shared, "p_in_layer": lists.p_in_layer,
                "spearman": scores[model].spearman(scores[source]), "own_drop": -mean["vrh"],
                "borrowed_drop": -row.change, "borrowed_low": -row.high, "borrowed_high": -row.low,
                "less": less.mean, "less_low": less.low, "less_high": less.high, "random_drop": -mean["random"],
                "matched_drop": -mean.get("layer_matched", np.nan),
                "unreadable": 100 * float(mine.outcome.isin(UNREADABLE).mean()),
            })  # fmt: skip
    table = pd.DataFrame(rows, columns=_TRANSFERS)
    table["other_drop"] = table.model.map(table[table.relation == "other"].groupby("model").borrowed_drop.max())
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


_TRANSFERS = ["model", "source", "relation", "k", "n", "shared", "p_in_layer", "spearman", "own_drop", "borrowed_drop",
              "borrowed_low", "borrowed_high", "less", "less_low", "less_high", "random_drop", "matched_drop",
              "unreadable"]  # fmt: skip


def _named(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows of a condition by its name in a sweep: `random 3` is `random` with seed 3."""
    condition, _, seed = name.partition(" ")
    return frame[(frame.condition == condition) & (frame.seed.eq(int(seed)) if seed else frame.seed.isna())]


def ablation_sweep(vlm: VLM, samples: Samples, groups: Mapping[str, HeadSet], ks: Sequence[int], **how) -> pd.DataFrame:
    """Accuracy against k for every group: `accuracy_table` of `sweep_replies`."""
    return accuracy_table(sweep_replies(vlm, samples, groups, ks, **how))


def rejudged(answers: pd.DataFrame, samples: Samples, rule: str) -> pd.DataFrame:
    """The same replies judged by another rule (`answers.Rule`): Spatial457 leniently, beside the strict score."""
    by_id = {s.id: s for s in samples}
    cut = answers.outcome == "cut off"
    judged = [
        judge(text, by_id[name].answer, rule, by_id[name].choices, not is_cut)
        for name, text, is_cut in zip(answers.id, answers.text, cut)
    ]
    return answers.assign(outcome=judged)


def weighted(answers: pd.DataFrame, weights: Mapping[str, float]) -> pd.DataFrame:
    """The official score of a benchmark that weights kinds of samples (CV-Bench): the weighted mean of the kinds'
    accuracies, one row per condition: model, benchmark, condition, k, seed, accuracy, low, high (percent, 95 % normal
    interval), n. Raises ValueError where a kind with a weight is missing."""
    rows = []
    for values, frame in answers.groupby(_CONDITION, sort=False, dropna=False):
        parts = {kind: accuracy(part.outcome) for kind, part in frame.groupby("kind")}
        if missing := sorted(set(weights) - set(parts)):
            raise ValueError(f"{frame.benchmark.iloc[0]}: no samples of {', '.join(missing)}; ask for more of it.")
        mean = sum(weights[kind] * parts[kind].mean for kind in weights)
        variance = sum((w**2 * parts[k].mean * (100 - parts[k].mean) / parts[k].n) for k, w in weights.items())
        low, high = max(0.0, mean - 1.96 * variance**0.5), min(100.0, mean + 1.96 * variance**0.5)
        n = sum(parts[kind].n for kind in weights)
        rows.append(dict(zip(_CONDITION, values)) | {"accuracy": mean, "low": low, "high": high, "n": n})
    return pd.DataFrame(rows).astype({"seed": "Int64"})


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
