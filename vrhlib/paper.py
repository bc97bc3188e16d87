"""Published numbers and where each was read; the comparison with ours and its verdicts.

Nothing in `data/paper` was measured here. `compare` puts a claim of the paper beside what a notebook
measured, by a criterion in code whose verdict may be "differs". `python -m vrhlib.paper` writes all claims into the
README. Under the nano profile a verdict is about small models, trained by the same people who measure them: it shows
what the pipeline finds there, and does not test the paper.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pandas as pd
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportions_ztest

from vrhlib import store
from vrhlib.agreement import grouped, shared
from vrhlib.heads import Head, HeadSet
from vrhlib.profiles import MODELS as PINS
from vrhlib.stats import Accuracy, Estimate, over_seeds

TABLES = ("accuracy_vs_k", "scoring_variants", "cross_task", "further_models", "claims", "reported_baselines",
          "prior_work", "design_choices")  # fmt: skip
MODELS = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "InternVL3-8B", "InternVL3.5-8B")
SAME_BACKBONE = (("Qwen2.5-VL-7B", "InternVL3-8B"), ("Qwen3-VL-8B", "InternVL3.5-8B"))
# Our names of benchmarks to the paper's, and to those of the official splits in the models' own reports.
_PARITY = {"refcoco": "RefCOCO", "refcoco+": "RefCOCO+", "refcocog": "RefCOCOg", "refspatial": "RefSpatialBench",
           "toloka": "Toloka"}  # fmt: skip
_CROSS = {"vaw-mcq": "VAW", "spatial457": "Spatial457", "spatialrgpt": "SpatialRGPT", "cv-bench": "CV-Bench",
          "mmstar": "MMStar", "countbenchqa": "CountBenchQA", "mathvista": "MathVista"}  # fmt: skip
_OFFICIAL = {"refcoco-unc": "RefCOCO", "refcoco+-unc": "RefCOCO+", "refcocog-umd": "RefCOCOg"}
# The scoring of the paper and each of its axes flipped alone (Table A9), in the paper's order.
FLIPS = ("flip_q", "flip_phi", "flip_omega")
_COLUMNS = ["id", "claim", "published", "ours", "interval", "difference", "verdict", "notebook"]


def published(table: str) -> pd.DataFrame:
    """A published table, one row per number, with its `source` (accuracies in percent)."""
    if table not in TABLES:
        raise ValueError(f"No published table {table!r}; there are {', '.join(TABLES)}.")
    return pd.read_csv(store.ROOT / "data" / "paper" / f"{table}.csv")


def beside(baseline: pd.DataFrame, split: str = "val") -> pd.DataFrame:
    """A table of unmasked accuracies with the published ones beside them, in a column `published`.

    For the paper's benchmarks those of the paper (Tables A1 and 3); for the official splits of RefCOCO/+/g what the
    models' authors (for Qwen3-VL, a third party) report. NaN where nobody published one; a table without any comes back
    as it is.
    """
    known = published("accuracy_vs_k")
    ours = known[(known.condition == "vrh") & (known.k == 0)].set_index(["model", "benchmark"]).accuracy.to_dict()
    reports = published("reported_baselines")
    theirs = reports[reports.split == split].set_index(["model", "benchmark"]).accuracy.to_dict()
    cross = published("cross_task").query("condition == 'unmasked'")
    ours |= cross.set_index(["model", "benchmark"]).accuracy.to_dict()
    found = []
    for model, benchmark in zip(baseline.model, baseline.benchmark):
        name = PINS[model].published if model in PINS else ""
        official = theirs.get((name, _OFFICIAL.get(benchmark)))
        found.append(ours.get((name, (_PARITY | _CROSS).get(benchmark)), official))
    if all(value is None for value in found):
        return baseline
    table = baseline.copy()
    table.insert(list(table).index("accuracy"), "published", pd.Series(found, index=table.index, dtype=float))
    return table


@functools.cache
def _lists(file: str) -> dict:
    return json.loads((store.ROOT / "data" / "paper" / file).read_text())


def published_heads(model: str, benchmark: str = "RefCOCO") -> HeadSet:
    """The paper's top-20 of a model on a benchmark (Tables A2-A6), best first."""
    lists = _lists("heads.json")
    if model not in lists["heads"] or benchmark not in lists["heads"][model]:
        raise ValueError(
            f"No published heads of {model!r} on {benchmark!r}; models: {', '.join(lists['heads'])}; "
            f"benchmarks: {', '.join(next(iter(lists['heads'].values())))}."
        )
    heads = tuple(Head(*h) for h in lists["heads"][model][benchmark])
    return HeadSet(heads, tuple(lists["grid"][model]), f"{model} on {benchmark} (published)")


def listed(model: str) -> HeadSet | None:
    """The paper's top-20 on RefCOCO of a model by the name that `profiles` gives it; None for one it does not have."""
    known = {name.casefold(): name for name in MODELS}
    return published_heads(known[model.casefold()]) if model.casefold() in known else None


def prior_heads() -> dict[str, HeadSet]:
    """Head lists released by earlier work on the same backbones, by name."""
    return {
        entry["name"]: HeadSet(tuple(Head(*h) for h in entry["heads"]), tuple(entry["grid"]), entry["name"])
        for entry in _lists("prior_heads.json")["lists"]
    }


def published_lists(model: str) -> dict[str, HeadSet]:
    """The paper's top-20 of a model on every benchmark, by the benchmark's name."""
    known = _lists("heads.json")["heads"]
    if model not in known:
        raise ValueError(f"No published heads of {model!r}; models: {', '.join(known)}.")
    return {benchmark: published_heads(model, benchmark) for benchmark in known[model]}


def _adjusted(table: pd.DataFrame) -> pd.DataFrame:
    """`table` with p_adjusted: its p_in_layer after Holm's correction for all of its rows."""
    return table.assign(p_adjusted=multipletests(table.p_in_layer, method="holm")[1])


def pair_overlaps() -> pd.DataFrame:
    """Published heads that two models of one backbone share, on each benchmark: a, b, benchmark, k, and the fields of
    `agreement.Shared`; p_adjusted as in `_adjusted`. No model runs."""
    rows = []
    for a, b in SAME_BACKBONE:
        for benchmark, one in published_lists(a).items():
            found = shared(one, published_heads(b, benchmark))
            rows.append({"a": a, "b": b, "benchmark": benchmark, "k": len(one), **found._asdict()})
    return _adjusted(pd.DataFrame(rows))


def group_clustering() -> pd.DataFrame:
    """Do the published heads of a model sit together in key-value groups? A row per model and benchmark: model,
    benchmark, k, and the fields of `agreement.Grouped`; p_adjusted. No model runs."""
    rows = []
    for model in MODELS:
        for benchmark, heads in published_lists(model).items():
            found = grouped(heads, _lists("heads.json")["kv_heads"][model])
            rows.append({"model": model, "benchmark": benchmark, "k": len(heads), **found._asdict()})
    return _adjusted(pd.DataFrame(rows))


def prior_overlaps() -> pd.DataFrame:
    """Do text and document retrieval heads recur as visual ones? Each released list against the published top-20 of
    every model with the same grid, on every benchmark, which needs no model to run: a result that the paper lacks.

    Columns: list, model, benchmark, of (length of the released list), and the fields of `agreement.Shared`, with chance
    over the grid (a mild test, since both kinds sit in middle layers) and within layers; p_adjusted.
    """
    rows = []
    for name, prior in prior_heads().items():
        for model in MODELS:
            for benchmark, heads in published_lists(model).items():
                if heads.grid == prior.grid:
                    found = shared(heads, prior)
                    rows.append({"list": name, "model": model, "benchmark": benchmark, "of": len(prior),
                                 **found._asdict()})  # fmt: skip
    return _adjusted(pd.DataFrame(rows))


def published_table1() -> pd.DataFrame:
    """Table 1, a row per method: method, domain (text, visual document, general image), causal (bool: was it tested
    that the heads matter?)."""
    return published("prior_work").drop(columns="source")


def published_table2() -> pd.DataFrame:
    """Table 2, a row per method as printed: method, Q, Phi, Omega.

    Localization heads have no Phi: they are selected by the spatial entropy of attention weights (the table's †). VERA
    and VRH make the same choices here ("avg" and "mean" are one) and differ in the data that they are detected on.
    """
    return published("design_choices").drop(columns="source")


def scoring_variants(k: int | None = None) -> pd.DataFrame:
    """RefCOCO accuracy after ablating the top k of each scoring (Tables A9, A8): of one k, or of all.

    Columns: model, condition, k, accuracy (percent), stderr (binomial, points), rank, n, source. Conditions: vrh,
    FLIPS, q_union (query tokens of prompt and reply, A8), random, unmasked (k = 0, in every selection). `rank`: place
    of vrh and FLIPS by accuracy, 1 the lowest and so the most causal; equal accuracies share the better place. Table
    A10, vrh again with the detection samples among those tested, is left out. Raises ValueError for a k that was not
    published.
    """
    table = published("scoring_variants").rename(columns={"variant": "condition"})
    table = table[table.source != "Table A10"].replace({"condition": {"q_in_or_out": "q_union"}})
    ks = sorted(set(table.k) - {0})
    if k is not None and k not in ks:
        raise ValueError(f"No published scoring variants at k={k}; there are k = {', '.join(map(str, ks))}.")
    table["stderr"] = (table.accuracy * (100 - table.accuracy) / table.n) ** 0.5
    ranked = table[table.condition.isin(["vrh", *FLIPS])]
    table["rank"] = ranked.groupby(["model", "k"]).accuracy.rank(method="min").astype("Int64")
    chosen = table[table.k.isin(ks if k is None else [k]) | (table.k == 0)].reset_index(drop=True)
    return chosen[["model", "condition", "k", "accuracy", "stderr", "rank", "n", "source"]]


def published_differences(k: int) -> pd.DataFrame:
    """Which published variants differ from vrh by more than sampling error, at one k.

    Columns: model, variant, change (accuracy minus that of vrh, points; above 0: vrh is the more causal), z and p
    (two-sided test of two proportions), differs (p < 0.05, each on its own: about one in twenty would by chance). The
    test treats the samples as unpaired, as only accuracies are published. Both answered the same samples, which usually
    makes differences surer than this.
    """
    table = scoring_variants(k)
    vrh, rows = table[table.condition == "vrh"].set_index("model").accuracy, []
    for row in table[table.condition.isin([*FLIPS, "q_union"])].itertuples():
        pair = [row.accuracy, vrh[row.model]]
        z, p = proportions_ztest([round(a * row.n / 100) for a in pair], [row.n, row.n])
        rows.append((row.model, row.condition, round(pair[0] - pair[1], 2), float(z), float(p), bool(p < 0.05)))
    return pd.DataFrame(rows, columns=["model", "variant", "change", "z", "p", "differs"])


# ---------------------------------------------------------------- claims and verdicts

# "Matches" is the published statement as printed; "within tolerance" has its direction, and its size as far as the
# check says; "not attempted" is also said of evidence that could not have spoken against the claim.
VERDICTS = ("matches", "within tolerance", "differs", "not attempted")
MATCHES, TOLERANCE, DIFFERS, NOT_ATTEMPTED = VERDICTS


class Finding(NamedTuple):
    """What a check says: our numbers, their interval, what was measured against what was published, the verdict."""

    ours: str
    interval: str
    difference: str
    verdict: str


Check = Callable[..., Finding]  # takes the evidence that a notebook hands over


def _finding(ours: str, interval: str, difference: str, matches: bool, near: bool, untested: str = "") -> Finding:
    """`near`: within tolerance. `untested`: why the evidence could not have spoken against the claim, if it could not;
    the reason then stands in place of the difference."""
    if untested:
        return Finding(ours, interval, untested, NOT_ATTEMPTED)
    return Finding(ours, interval, difference, MATCHES if matches else TOLERANCE if near else DIFFERS)


def _complete(frame: pd.DataFrame, claim: str, columns: list[str]) -> pd.DataFrame:
    """The frame, if it has these columns and no gaps in them: a missing number would count as a failure."""
    if lacking := [c for c in columns if c not in frame or frame[c].isna().any()]:
        raise ValueError(f"The claim {claim} reads {', '.join(columns)}; measure {', '.join(lacking)} in every row.")
    return frame.reset_index(drop=True)


def _largest_k(sweep: pd.DataFrame) -> int:
    return int(sweep.loc[sweep.condition == "vrh", "k"].max())


def _at(sweep: pd.DataFrame, condition: str, k: int) -> pd.DataFrame:
    return sweep[(sweep.condition == condition) & (sweep.k == k)]


def _nothing_to_lose(frame: pd.DataFrame) -> str:
    """Says so of a model that is right in under 20 % before any head is cut."""
    unmasked = frame.loc[frame.condition == "unmasked", "accuracy"].min()
    return f"unmasked {unmasked:.1f}: nothing to lose" if unmasked < 20 else ""


def _largest_published_drop() -> float:
    """Of all models and benchmarks of Table A1, top 20 heads cut, points."""
    table = published("accuracy_vs_k").query("condition == 'vrh'")
    accuracy = table.pivot(index=["model", "benchmark"], columns="k", values="accuracy")
    return float((accuracy[0] - accuracy[20]).max())


def _collapse(sweep: pd.DataFrame) -> Finding:
    """At the largest k. Matches: VRH at least halves the accuracy; random heads cost under 3 points on average; and
    VRH, by its upper bound, falls below every layer-matched draw, where there are any. Within tolerance: VRH at least
    halves it, random heads cost under 10 points, VRH falls below the mean of the layer-matched draws. Not attempted: a
    model that is right in under 20 % has nothing to lose."""
    k, base = _largest_k(sweep), sweep.loc[sweep.condition == "unmasked"].iloc[0]
    vrh, random = _at(sweep, "vrh", k).iloc[0], over_seeds(_at(sweep, "random", k).accuracy)
    matched, cost = _at(sweep, "layer_matched", k).accuracy, round(base.accuracy - random.mean, 6)
    ours = (
        f"{base.accuracy:.1f} to {vrh.accuracy:.1f} at k={k}; random {random.mean:.1f} ({random.n} seeds, n={base.n})"
    )
    interval = f"VRH [{vrh.low:.1f}, {vrh.high:.1f}]; random [{random.low:.1f}, {random.high:.1f}]"
    difference = f"drop {base.accuracy - vrh.accuracy:.1f} (published up to {_largest_published_drop():.1f})"
    difference += f"; random {cost:.1f} (< 3)"
    below_all, below_mean = bool((matched > vrh.high).all()), matched.empty or vrh.accuracy < matched.mean()
    if len(matched):
        ours += f"; layer-matched {matched.mean():.1f}"
        interval += f"; layer-matched {matched.min():.1f} to {matched.max():.1f}"
        difference += "" if below_all else f"; layer-matched {base.accuracy - matched.mean():.1f}"
    halved = vrh.accuracy <= base.accuracy / 2
    matches, near = halved and cost < 3 and below_all, halved and cost < 10 and below_mean
    return _finding(ours, interval, difference, matches, near, _nothing_to_lose(sweep))


def _share(evidence: tuple[pd.DataFrame, int]) -> Finding:
    """`evidence`: an accuracy table (unmasked, and vrh at several k), and how many heads the model has.

    Judged is the smallest k of the table that leaves at most half of the unmasked accuracy, as a share of all heads.
    Matches: at most 2.6 %, as printed (RefCOCO in Table A1 does: 20 of 784, 20 of 1152). Within tolerance: at most
    10 %. Differs: more, or no k of the table does. Not attempted: right in under 20 % unmasked."""
    table, total = evidence
    base, cuts = table.loc[table.condition == "unmasked"].iloc[0], table[table.condition == "vrh"].sort_values("k")
    if cuts.empty or cuts.k.duplicated().any():
        raise ValueError("The claim head-share reads one row of vrh for each k: hand over the sweep of one model.")
    halves = cuts[cuts.accuracy <= base.accuracy / 2]
    row = cuts.iloc[-1] if halves.empty else halves.iloc[0]
    share, verb = 100 * row.k / total, "not halved" if halves.empty else "halved"
    ours = f"{verb} by {row.k} of {total} heads = {share:.1f} %: {base.accuracy:.1f} to {row.accuracy:.1f} (n={row.n})"
    difference = f"{verb} by {share:.1f} % of the heads (published 1.7 to 2.6 %)"
    matches, near = (not halves.empty and share <= limit for limit in (2.6, 10))
    return _finding(ours, f"[{row.low:.1f}, {row.high:.1f}]", difference, matches, near, _nothing_to_lose(table))


def _middle(heads: HeadSet) -> Finding:
    """Matches: every top head lies in the middle half of the layers (published: 14-19 of 0-27). Within tolerance: at
    least half of them do."""
    layers, depth = sorted(h.layer for h in heads), heads.grid[0] - 1
    inside = sum(0.25 * depth <= layer <= 0.75 * depth for layer in layers)
    difference = f"{inside} of {len(heads)} heads in the middle half of the layers (published all)"
    matches, near = inside == len(heads), 2 * inside >= len(heads)
    return _finding(f"layers {layers[0]}-{layers[-1]} of 0-{depth}", "exact", difference, matches, near)


def _format(sweep: pd.DataFrame) -> Finding:
    """Replies under VRH ablation without a readable box (a box without area is readable), at the largest k. Matches: at
    most 5 %. Within tolerance: at most 10 %."""
    row = _at(sweep, "vrh", _largest_k(sweep)).iloc[0]
    failed = Accuracy(round(row[["malformed", "cut off", "no box"]].sum() * row.n / 100), int(row.n))
    ours = f"{failed.mean:.1f} % without a readable box at k={row.k} (n={row.n})"
    interval = "[{:.1f}, {:.1f}]".format(*failed.interval)
    difference = f"{failed.mean:.1f} % without a readable box (published rare; <= 5)"
    return _finding(ours, interval, difference, failed.mean <= 5, failed.mean <= 10)


def _one_token(sweep: pd.DataFrame) -> Finding:
    """Heads of one random output token and of all of them, cut at the largest k. Matches: accuracies within 1 point of
    each other, random heads above the upper bounds of both. Within tolerance: within 5 points, and random above."""
    k = _largest_k(sweep)
    one, every = _at(sweep, "one output token", k).iloc[0], _at(sweep, "vrh", k).iloc[0]
    random = over_seeds(_at(sweep, "random", k).accuracy)
    ours = f"{one.accuracy:.1f} / {every.accuracy:.1f} / {random.mean:.1f} at k={k} (n={every.n})"
    interval = f"[{one.low:.1f}, {one.high:.1f}] / [{every.low:.1f}, {every.high:.1f}]"
    apart, gap = round(abs(one.accuracy - every.accuracy), 6), random.mean - max(one.accuracy, every.accuracy)
    difference = f"{apart:.1f} apart (published 0.3); random {gap:.1f} above (78.5)"
    above = random.mean > max(one.high, every.high)
    return _finding(ours, interval, difference, apart <= 1 and above, apart <= 5 and above)


def _few_samples(stable: pd.DataFrame) -> Finding:
    """Matches: ten samples find on average at least 90 % of the heads that all samples find. Within tolerance: 80 %.
    Not attempted: all are fewer than twenty."""
    if not (stable.n == 10).any():
        raise ValueError("The claim few-samples looks at subsets of 10: detect on at least 10 samples.")
    k, ten, every = int(stable.k.iloc[0]), over_seeds(stable.loc[stable.n == 10, "overlap"]), stable.n.max()
    found = round(100 * ten.mean / k, 6)
    ours, interval = f"{ten.mean:.1f} of {k} from 10 samples ({ten.n} draws)", f"[{ten.low:.1f}, {ten.high:.1f}]"
    difference = f"{found:.1f} % of the heads from 10 samples (published nearly all)"
    untested = "" if every >= 20 else f"10 of only {every} samples"
    return _finding(ours, interval, difference, found >= 90, found >= 80, untested)


_CONTROLS = ("unmasked", "vrh", "random", "layer_matched")


def _changes(frame: pd.DataFrame, needed: tuple[str, ...] = ()) -> dict[str, Estimate]:
    """Accuracy with the heads of another scoring cut minus accuracy with VRHs cut, points, on the same samples.

    `frame`: one model, one k; columns condition, k, accuracy, n, change, change_low, change_high. Those of the scorings
    `needed`, or of all in the frame but the controls. Raises ValueError with the next step.
    """
    columns, others = ["change", "change_low", "change_high"], frame[~frame.condition.isin(_CONTROLS)]
    ks = [int(k) for k in frame.loc[frame.condition != "unmasked", "k"].unique()]
    if len(ks) != 1 or others.empty or others.condition.duplicated().any() or not (frame.condition == "vrh").any():
        raise ValueError(
            f"This claim compares other scorings with vrh in one model at one k, a row each; got k = {ks} and "
            f"conditions {', '.join(frame.condition)}. Hand over one frame per model, of one k."
        )
    rows = others.set_index("condition").reindex(columns=[*columns, "n"])
    names = needed or tuple(rows.index)
    if missing := [c for c in names if c not in rows.index or rows.loc[c].isna().any()]:
        raise ValueError(
            f"No change against vrh of {', '.join(missing)}: ablate those heads on the samples of vrh, and add the "
            "paired difference as change, change_low, change_high."
        )
    return {name: Estimate(*map(float, rows.loc[name, columns]), int(rows.loc[name, "n"])) for name in names}


def _against_vrh(frame: pd.DataFrame, changes: Mapping[str, Estimate]) -> tuple[str, str]:
    vrh = frame[frame.condition == "vrh"].iloc[0]
    ours = ", ".join(f"{name} {change.mean:+.1f}" for name, change in changes.items())
    interval = "; ".join(f"{name} [{change.low:+.1f}, {change.high:+.1f}]" for name, change in changes.items())
    return f"vrh {vrh.accuracy:.1f} at k={vrh.k} (n={vrh.n}); change: {ours}", interval


def _nothing_changed(frame: pd.DataFrame, changes: Mapping[str, Estimate]) -> str:
    """Says so where scorings were not told apart (the same heads, say), or where there was nothing to lose."""
    same = all(change.mean == 0 for change in changes.values())
    return _nothing_to_lose(frame) or ("no other scoring changed anything" if same else "")


def _leave_less(changes: Mapping[str, Estimate]) -> str:
    """How many leave a lower accuracy than VRH, and which the lowest."""
    less, lowest = sum(change.mean < 0 for change in changes.values()), min(changes, key=lambda c: changes[c].mean)
    worst = f", {lowest} {changes[lowest].mean:+.1f}" if less else ""
    return f"{less} of {len(changes)} leave less than VRH{worst} (published 0)"


def _query_axis(frame: pd.DataFrame) -> Finding:
    """Matches: flipping Q costs the cut most of its damage, by more than sampling error, and the other flips move
    accuracy less than half as much. Within tolerance: Q moves accuracy up and most, but its interval holds 0, or
    another flip moves it half as much or more. Differs: another moves it as much, or Q moves it down. Not attempted: no
    flip changes anything."""
    changes = _changes(frame, FLIPS)
    flip_q, *others = changes.values()
    next_most = max(abs(other.mean) for other in others)
    near = flip_q.mean > next_most  # and so above 0
    matches = near and flip_q.low > 0 and next_most < flip_q.mean / 2
    moves = (f"{axis} {change.mean:+.1f}" for axis, change in zip(("Q", "Phi", "Omega"), changes.values()))
    difference = f"{', '.join(moves)} (published Q > Phi, Omega)"
    return _finding(*_against_vrh(frame, changes), difference, matches, near, _nothing_changed(frame, changes))


def _best_variant(frame: pd.DataFrame) -> Finding:
    """Matches: no other scoring leaves a lower accuracy than VRH. Within tolerance: some do, all within sampling error.
    Counts whatever the frame has beside controls. Not attempted: no variant changes anything."""
    changes = _changes(frame)
    matches = all(change.mean >= 0 for change in changes.values())
    near = all(change.high >= 0 for change in changes.values())
    shown = *_against_vrh(frame, changes), _leave_less(changes)
    return _finding(*shown, matches, near, _nothing_changed(frame, changes))


PRIOR = ("retrieval_heads", "ocr_heads", "vera", "localization_heads")  # whom the claim beats-prior names


def _beats_prior(frame: pd.DataFrame) -> Finding:
    """Matches: VRH leaves a lower accuracy than the heads of every earlier method that the claim names, each detected
    on its own kind of data, and than random heads (interval over seeds), by more than sampling error. Within tolerance:
    some differ by less than that, or found too few heads to be cut. Not attempted: none found enough. Methods that the
    claim does not name are shown, not judged."""
    changes = _changes(frame)
    judged = {name: change for name, change in changes.items() if name.removesuffix("_aligned") in PRIOR}
    missing = [name for name in PRIOR if name not in {n.removesuffix("_aligned") for n in judged}]
    vrh, random = (frame.loc[frame.condition == name, "accuracy"] for name in ("vrh", "random"))
    changes["random"] = judged["random"] = over_seeds(random - vrh.iloc[0])
    matches = not missing and all(change.low > 0 for change in judged.values())
    near = all(change.high >= 0 for change in judged.values())
    ours, interval = _against_vrh(frame, changes)
    ours += f"; not cut, fewer than k heads found: {', '.join(missing)}" if missing else ""
    difference = _leave_less(judged) + (f"; {len(missing)} not cut" if missing else "")
    nobody = "no earlier method found k heads" if len(missing) == len(PRIOR) else ""
    return _finding(ours, interval, difference, matches, near, _nothing_to_lose(frame) or nobody)


def _sparse(shares: pd.DataFrame) -> Finding:
    """Under 15 % of heads above 1e-3 and at most 4 % above 5e-3, with attention on the referent summed (Eq. 1).

    `shares`: rows scoring = "sum" and "mean" (per image token), columns above_1e-3, above_5e-3, percent of all heads.
    Matches: both numbers fit, under sum. Within tolerance: both fit 1.5 times the limits (22.5 %, 6 %), under sum. The
    mean is shown, not judged: the paper's numbers may be on another scale than its formula. A head that finds the
    referent should put far more than 0.005 of its attention there, yet the paper counts 0-4 % of heads above that, in
    one model none, while cutting 20 heads destroys grounding. It does not say what it divided by, so we judge the
    formula as written and fit nothing.
    """
    rows = shares.set_index("scoring")
    if missing := {"sum", "mean"} - set(rows.index):
        raise ValueError(f"The claim sparse looks at scores under sum and mean; {', '.join(missing)} is missing.")
    low, high = rows.loc["sum", ["above_1e-3", "above_5e-3"]].astype(float)
    ours = "; ".join(
        f"{name}: {rows.loc[name, 'above_1e-3']:.1f} % above 1e-3, {rows.loc[name, 'above_5e-3']:.1f} % above 5e-3"
        for name in ("sum", "mean")
    )
    columns = ["above_1e-3_low", "above_1e-3_high", "above_5e-3_low", "above_5e-3_high"]
    ends = rows.loc["sum"].reindex(columns)
    interval = "sum: [{:.1f}, {:.1f}], [{:.1f}, {:.1f}]".format(*ends) if ends.notna().all() else "exact"
    difference = f"{low:.1f} % above 1e-3 (< 15), {high:.1f} % above 5e-3 (<= 4)"
    return _finding(ours, interval, difference, low < 15 and high <= 4, low < 22.5 and high <= 6)


def _universal(cells: pd.DataFrame) -> Finding:
    """`cells`: a row per model and benchmark: model, benchmark, k, n, unmasked, vrh (percent), drop, drop_low,
    drop_high (points, paired interval), random_drop, random_drop_low, random_drop_high (mean over seeds, t interval),
    unreadable (percent of replies under VRH ablation), beyond_matched_low (by how many points VRHs cost more than
    layer-matched draws, lower end; NaN where there are none).

    A cell shows the claim if VRH leaves at most half of the unmasked accuracy and random heads cost at most 10 points,
    which all 20 published cells at k = 20 (Table A1) do; and, of which nothing is published, if at most 10 % of the
    replies are unreadable and VRHs cost more than layer-matched draws. Matches: all cells show it, and there are the
    twenty that the claim is about. Within tolerance: at least 90 % of those there are. Cells that are right in under
    20 % unmasked do not count; not attempted: no cell counts."""
    columns = ["model", "benchmark", "k", "n", "unmasked", "vrh", "drop", "drop_low", "drop_high", "random_drop",
               "random_drop_low", "random_drop_high", "unreadable"]  # fmt: skip
    cells = _complete(cells, "universal", columns)
    if cells.duplicated(["model", "benchmark"]).any():
        raise ValueError("The claim universal reads one row per model and benchmark: hand over those of one k.")
    able = cells[cells.unmasked >= 20]
    if able.empty:
        return Finding(f"0 of {len(cells)} pairs count", "–", "unmasked under 20: nothing to lose", NOT_ATTEMPTED)
    shows = (
        (able.vrh <= able.unmasked / 2)
        & (able.random_drop <= 10)
        & (able.unreadable <= 10)
        & ~_no_more_than_matched(able)
    )
    ours, interval = _cells_in_words(able, shows)
    ours += f"; {len(cells) - len(able)} not counted (unmasked under 20)" if len(able) < len(cells) else ""
    difference = f"{shows.sum()} of {len(able)} (published 20 of 20)"
    all_of_them = shows.all() and len(able) >= len(published("accuracy_vs_k")[["model", "benchmark"]].drop_duplicates())
    return _finding(ours, interval, difference, all_of_them, 10 * shows.sum() >= 9 * len(able))


def _cells_in_words(cells: pd.DataFrame, shows: pd.Series) -> tuple[str, str]:
    """Ours and interval of the claim universal: how many cells show it, the extremes, and the cells that don't."""
    least = cells.loc[cells["drop"].idxmin()]
    ours = (
        f"{shows.sum()} of {len(cells)} model x benchmark pairs fall to half or less, in readable replies, more than "
        f"layer-matched draws, random heads costing at most 10; "
        f"smallest drop {least['drop']:.1f} ({least.model} on {least.benchmark}, k={least.k}, n={least.n}); replies "
        f"without a readable box {cells.unreadable.min():.1f} to {cells.unreadable.max():.1f} %"
    )
    fail = [
        f"{cell.model} on {cell.benchmark} (drop {cell.drop:.1f}, random {cell.random_drop:.1f}, unreadable "
        f"{cell.unreadable:.0f} %)"
        for cell in cells[~shows].itertuples()
    ]
    ours += f"; not: {', '.join(fail)}" if fail else ""
    return ours, _ends_of(cells)


def _ends_of(cells: pd.DataFrame) -> str:
    """The interval of the smallest drop, and the range of random drops with the interval of the largest."""
    least, most = cells.loc[cells["drop"].idxmin()], cells.loc[cells.random_drop.idxmax()]
    smallest = f"smallest drop [{least.drop_low:.1f}, {least.drop_high:.1f}]"
    random = f"{cells.random_drop.min():.1f} to {most.random_drop:.1f}"
    return f"{smallest}; random drop {random} [{most.random_drop_low:.1f}, {most.random_drop_high:.1f}]"


def _no_more_than_matched(cells: pd.DataFrame) -> pd.Series:
    """Where VRHs do not cost more than layer-matched draws, bool; where there is no such draw, nothing says so."""
    return cells.get("beyond_matched_low", pd.Series(float("nan"), cells.index)) <= 0


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p {value:.3f}"


def _same_backbone(pair: pd.DataFrame) -> Finding:
    """`pair`: a row per direction: model, source (whose heads are borrowed), k, shared, spearman, p_in_layer (of as
    many of the k shared by chance within layers), own_drop, borrowed_drop, borrowed_low, borrowed_high (points, paired
    interval of borrowed_drop), random_drop, n; matched_drop and other_drop (the most that heads of another backbone
    cost), NaN where there are none.

    Needed in both directions: more heads are shared than by chance within layers (p < 0.05); borrowed heads do at least
    half the damage of own ones, more than random and layer-matched draws, and more than any list of another backbone.
    Matches: at least 0.7 of the heads are shared, too (published 15, 18 and 14 of 20), and Spearman is at least 0.85
    (0.909, 0.89). Within tolerance: Spearman is at least 0.5. Not attempted: own heads cost under 10 points in a
    direction."""
    columns = ["model", "source", "k", "shared", "spearman", "p_in_layer", "own_drop", "borrowed_drop",
               "borrowed_low", "borrowed_high", "random_drop", "n"]  # fmt: skip
    pair = _complete(pair, "same-backbone", columns)
    if len(pair) != 2 or set(zip(pair.model, pair.source)) != set(zip(pair.source, pair.model)):
        raise ValueError("The claim same-backbone reads two rows, a model with another's heads cut, and the reverse.")
    rows = list(pair.itertuples())
    ours = "; ".join(
        f"{r.model} with heads of {r.source}, k={r.k}: {r.shared} of {r.k} shared ({_p(r.p_in_layer)} in layers), "
        f"Spearman {r.spearman:.2f}; own cost {r.own_drop:.1f}, borrowed {r.borrowed_drop:.1f}, "
        f"random {r.random_drop:.1f}{_more(r)} (n={r.n})"
        for r in rows
    )
    interval = "; ".join(f"{r.model}: borrowed [{r.borrowed_low:.1f}, {r.borrowed_high:.1f}]" for r in rows)
    if (least := pair.own_drop.min()) < 10:
        return Finding(ours, interval, f"own heads cost only {least:.1f}: nothing to carry over", NOT_ATTEMPTED)
    counts = ", ".join(dict.fromkeys(f"{r.shared} of {r.k}" for r in rows))
    damage = ", ".join(f"{r.borrowed_drop / r.own_drop:.2f}" for r in rows)
    difference = f"shared {counts}, Spearman {pair.spearman.min():.2f} (published 0.89 to 0.91); damage {damage} of own"
    if (strangers := pair.get("other_drop", pd.Series(dtype=float)).max()) >= pair.borrowed_drop.min():
        difference += f"; heads of another backbone cost up to {strangers:.1f}"
    controls = pair.reindex(columns=["random_drop", "matched_drop"]).max(axis=1)
    beyond = (pair.borrowed_low > controls) & ~(pair.get("other_drop", float("nan")) >= pair.borrowed_drop)
    needed = (beyond & (2 * pair.borrowed_drop >= pair.own_drop) & (pair.p_in_layer < 0.05)).all()
    many, alike = (10 * pair.shared >= 7 * pair.k).all(), (pair.spearman >= 0.85).all()
    return _finding(ours, interval, difference, needed and many and alike, needed and (pair.spearman >= 0.5).all())


def _more(row) -> str:
    """What other controls cost, where there are any."""
    known = {"layer-matched": "matched_drop", "another backbone at most": "other_drop"}
    costs = {words: getattr(row, column, float("nan")) for words, column in known.items()}
    return "".join(f", {words} {cost:.1f}" for words, cost in costs.items() if cost == cost)


def _cross_task(cells: pd.DataFrame) -> Finding:
    """`cells`: a row per model and benchmark: model, benchmark, k, n, unmasked, vrh, blind (percent), drop, drop_low,
    drop_high (points, paired interval), random_drop, random_drop_low, random_drop_high (mean over seeds, t interval),
    above_blind_low (unmasked minus blind, lower end of the paired interval); beyond_matched_low (by how many points
    VRHs cost more than layer-matched draws, lower end; NaN or absent where there are none).

    A cell counts if the model is better than without looking, by more than sampling error: else there is nothing that
    sight could lose. It shows the claim if VRHs cost something (interval above 0), more than random heads, which cost
    at most 5 points (published up to 4.6), and, of which nothing is published, more than layer-matched draws. Matches:
    all 28 cells count and show it. Within tolerance: at least 90 % of those that count. Not attempted: none counts."""
    columns = ["model", "benchmark", "k", "n", "unmasked", "vrh", "blind", "drop", "drop_low", "drop_high",
               "random_drop", "random_drop_low", "random_drop_high", "above_blind_low"]  # fmt: skip
    cells = _complete(cells, "cross-task", columns)
    if cells.duplicated(["model", "benchmark"]).any():
        raise ValueError("The claim cross-task reads one row per model and benchmark: hand over those of one k.")
    able = cells[cells.above_blind_low > 0]
    if able.empty:
        return Finding(f"0 of {len(cells)} cells count", "–", "no model is better than without looking", NOT_ATTEMPTED)
    falls = (able.drop_low > 0) & (able["drop"] > able.random_drop) & (able.random_drop <= 5)
    shows, least = falls & ~_no_more_than_matched(able), able.loc[able["drop"].idxmin()]
    ours = (
        f"{falls.sum()} of {len(able)} model x benchmark pairs lose accuracy, random heads costing at most 5, "
        f"{shows.sum()} of them more than with layer-matched draws; "
        f"drops {able['drop'].min():.1f} to {able['drop'].max():.1f} (least: {least.model} on {least.benchmark}, "
        f"k={least.k}, n={least.n})"
    )
    fail = [f"{c.model} on {c.benchmark} (drop {c.drop:.1f}, random {c.random_drop:.1f})"
            for c in able[~shows].itertuples()]  # fmt: skip
    ours += f"; not: {', '.join(fail[:5])}" if fail else ""
    ours += f" and {len(fail) - 5} more" if len(fail) > 5 else ""
    blind = [f"{c.model} on {c.benchmark}" for c in cells[cells.above_blind_low <= 0].itertuples()]
    ours += f"; not counted, not above the blind reader: {', '.join(blind)}" if blind else ""
    difference = f"{shows.sum()} of {len(able)} (published 28 of 28)"
    difference += f"; {len(blind)} not above the blind reader" if blind else ""
    everywhere = shows.all() and len(able) == len(published("cross_task")[["model", "benchmark"]].drop_duplicates())
    return _finding(ours, _ends_of(able), difference, everywhere, 10 * shows.sum() >= 9 * len(able))


def _dpo(differences: pd.DataFrame) -> Finding:
    """`differences`: what one policy is better than another, mean over benchmarks and seeds: a, b ("dpo vrh", "dpo
    random", "sft", "untrained"), difference, low, high (points, paired interval over pictures), seeds_low, seeds_high
    (t interval over seeds), seeds, n.

    Matches: VRH negatives beat random ones and the untrained model, both by more than sampling error of the pictures
    and of the seeds. Within tolerance: they beat both, by less than that. Not attempted: fewer than three seeds."""
    columns = ["a", "b", "difference", "low", "high", "seeds_low", "seeds_high", "seeds", "n"]
    rows = _complete(differences, "dpo", columns).set_index(["a", "b"])
    wanted = [("dpo vrh", "dpo random"), ("dpo vrh", "untrained")]
    if missing := [pair for pair in wanted if pair not in rows.index]:
        raise ValueError(f"The claim dpo compares {' and '.join(map(' with '.join, missing))}: measure that.")
    shown = [(f"{a} minus {b}", rows.loc[(a, b)]) for a, b in rows.index]
    ours = "; ".join(f"{name} {r.difference:+.1f}" for name, r in shown)
    interval = "; ".join(f"{name} [{r.low:+.1f}, {r.high:+.1f}], over seeds [{r.seeds_low:+.1f}, {r.seeds_high:+.1f}]"
                         for name, r in shown)  # fmt: skip
    against, gain = (rows.loc[pair] for pair in wanted)
    seeds = int(min(against.seeds, gain.seeds))
    ours += f" ({seeds} seeds, n={int(against.n)})"
    difference = f"VRH against random negatives {against.difference:+.1f}, against untrained {gain.difference:+.1f}"
    difference += " (published +0.78)"
    sure = all(min(r.low, r.seeds_low) > 0 for r in (against, gain))
    near = against.difference > 0 and gain.difference > 0
    few = "" if seeds >= 3 else f"{seeds} seeds: three at least"
    return _finding(ours, interval, difference, sure, near, few)


CHECKS: dict[str, Check] = {
    "causal-collapse": _collapse,
    "head-share": _share,
    "middle-layers": _middle,
    "format-kept": _format,
    "one-token": _one_token,
    "few-samples": _few_samples,
    "query-axis": _query_axis,
    "best-variant": _best_variant,
    "beats-prior": _beats_prior,
    "sparse": _sparse,
    "universal": _universal,
    "same-backbone": _same_backbone,
    "cross-task": _cross_task,
    "dpo": _dpo,
}


def _together(found: Mapping[str, Finding]) -> Finding:
    """Of several models: the worst verdict among those attempted, every number, and how many say what if not all say
    the same. Of none (no pair of models was chosen, say): not attempted."""
    if not found:
        return Finding("–", "–", "–", NOT_ATTEMPTED)
    counts = {verdict: sum(f.verdict == verdict for f in found.values()) for verdict in VERDICTS}
    counts = {verdict: count for verdict, count in counts.items() if count}
    attempted = [verdict for verdict in counts if verdict != NOT_ATTEMPTED]
    joined = ["; ".join(f"{name}: {f[i]}" if name else f[i] for name, f in found.items()) for i in (0, 1)]
    difference = _once({name.replace("nano-", ""): f.difference for name, f in found.items()})
    if len(counts) > 1:
        first, *rest = (f"{verdict} in {count}" for verdict, count in counts.items())
        difference = f"{', '.join([f'{first} of {len(found)}', *rest])}: {difference}"
    return Finding(*joined, difference, attempted[-1] if attempted else NOT_ATTEMPTED)


def _once(phrases: Mapping[str, str]) -> str:
    """Phrases behind their names, joined; what all of them say in brackets, the published number, stands once."""
    first, *others = phrases.values()
    common = [said for said in re.findall(r" \(([^()]*)\)", first) if all(f" ({said})" in other for other in others)]
    if not others or not common:
        return "; ".join(f"{name}: {phrase}" if name else phrase for name, phrase in phrases.items())
    for said in common:
        phrases = {name: phrase.replace(f" ({said})", "") for name, phrase in phrases.items()}
    return f"{'; '.join(f'{name}: {phrase}' for name, phrase in phrases.items())} ({'; '.join(common)})"


def compare(evidence: Mapping[str, object], profile: str, notebook: str) -> pd.DataFrame:
    """Claims beside our measurements; in figures/<profile>/claims.csv they replace all that this notebook judged.

    `evidence` maps claim ids to what its check reads (a sweep, a head set, a stability frame), or to that for each of
    several models by name: the verdict is then the worst of those attempted. Columns: id, claim, published, ours,
    interval, difference, verdict (one of VERDICTS), notebook. Raises ValueError for an unknown claim.
    """
    known = published("claims").set_index("id")
    rows = []
    for claim, measured in evidence.items():
        if claim not in CHECKS:
            raise ValueError(f"No check for claim {claim!r}; there are {', '.join(CHECKS)}.")
        each = measured if isinstance(measured, Mapping) else {"": measured}
        finding = _together({name: CHECKS[claim](one) for name, one in each.items()})
        rows.append((claim, known.claim[claim], known.published[claim], *finding, notebook))
    with store.held(store.runs_dir(profile) / "claims"):  # notebooks that run at once share the file
        frame, others = pd.DataFrame(rows, columns=_COLUMNS), _stored(profile).query("notebook != @notebook")
        whole = _in_order(pd.concat([others, frame]))
        store.write_atomic(store.figures_dir(profile) / "claims.csv", whole.to_csv(index=False))
    return frame


def _stored(profile: str) -> pd.DataFrame:
    """The rows of claims.csv; none of a file that is missing, broken or older, since notebooks write it anew."""
    try:
        frame = pd.read_csv(store.figures_dir(profile) / "claims.csv", dtype=str, keep_default_na=False)
    except (FileNotFoundError, ValueError):  # what pandas cannot parse or decode is a ValueError
        frame = pd.DataFrame()
    frame = frame.reindex(columns=_COLUMNS).astype(object)
    known = frame.id.isin(published("claims").id) & frame.verdict.isin(VERDICTS)
    return frame[known & frame.notna().all(axis=1)]


def _in_order(claims: pd.DataFrame) -> pd.DataFrame:
    """By the order of the published list, then by notebook."""
    place = {claim: i for i, claim in enumerate(published("claims").id)}
    return claims.sort_values(["id", "notebook"], key=lambda c: c.map(place) if c.name == "id" else c)


# ---------------------------------------------------------------- the table of claims in the README

_BEGIN, _END = "<!-- claims: python -m vrhlib.paper -->", "<!-- /claims -->"


def claims_table(profile: str) -> pd.DataFrame:
    """Every published claim, as often as notebooks judged it: claim (id and sentence), published, difference, verdict,
    notebook."""
    judged = _in_order(_stored(profile))[["id", "difference", "verdict", "notebook"]]
    table = published("claims").merge(judged, on="id", how="left")
    table = table.fillna({"difference": "–", "verdict": NOT_ATTEMPTED, "notebook": "–"})
    return table.assign(claim="`" + table.id + "` " + table.claim).drop(columns=["id", "where"])


def _markdown(table: pd.DataFrame) -> str:
    lines = [list(table), ["---"] * table.shape[1], *table.values.tolist()]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def with_claims(readme: str, profile: str) -> str:
    """A README's text with the table of claims between its two marker lines. Raises ValueError without them."""
    lines = readme.split("\n")
    if not lines.count(_BEGIN) == lines.count(_END) == 1 or lines.index(_BEGIN) > lines.index(_END):
        raise ValueError(f"README.md needs one line {_BEGIN} where the table goes, and one line {_END} below it.")
    head, tail = lines[: lines.index(_BEGIN) + 1], lines[lines.index(_END) :]
    return "\n".join([*head, "", _markdown(claims_table(profile)), *tail])


def main() -> None:
    """Write the table of claims of the nano profile into README.md."""
    path = store.ROOT / "README.md"
    text = path.read_text()
    try:
        new = with_claims(text, "nano")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if new != text:
        store.write_atomic(path, new)
    counts = claims_table("nano").verdict.value_counts().reindex(VERDICTS, fill_value=0)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{path}: table of claims {'unchanged' if new == text else 'written'} ({said}).")


if __name__ == "__main__":
    main()
