"""Published numbers and where each was read; the comparison with ours and its verdicts.

Nothing in `data/paper` was measured here. `compare` puts a claim of the paper beside what a notebook
measured, by a criterion in code whose verdict may be "does not hold". Under the nano profile it says "in nano":
a small model, trained by the same people who measure it, demonstrates; it does not test the paper.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping

import pandas as pd
from scipy.stats import hypergeom
from statsmodels.stats.proportion import proportions_ztest

from vrhlib import store
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
_OFFICIAL = {"refcoco-unc": "RefCOCO", "refcoco+-unc": "RefCOCO+", "refcocog-umd": "RefCOCOg"}
# The scoring of the paper and each of its axes flipped alone (Table A9), in the paper's order.
FLIPS = ("flip_q", "flip_phi", "flip_omega")
_COLUMNS = ["id", "claim", "published", "ours", "interval", "verdict", "notebook"]


def published(table: str) -> pd.DataFrame:
    """A published table, one row per number, with its `source` (accuracies in percent)."""
    if table not in TABLES:
        raise ValueError(f"No published table {table!r}; there are {', '.join(TABLES)}.")
    return pd.read_csv(store.ROOT / "data" / "paper" / f"{table}.csv")


def beside(baseline: pd.DataFrame, split: str = "val") -> pd.DataFrame:
    """A table of unmasked accuracies with the published ones beside them, in a column `published`.

    For the paper's benchmarks those of the paper; for the official splits of RefCOCO/+/g what the models' authors (for
    Qwen3-VL, a third party) report. NaN where nobody published one; a table without any comes back as it is.
    """
    known = published("accuracy_vs_k")
    ours = known[(known.condition == "vrh") & (known.k == 0)].set_index(["model", "benchmark"]).accuracy.to_dict()
    reports = published("reported_baselines")
    theirs = reports[reports.split == split].set_index(["model", "benchmark"]).accuracy.to_dict()
    found = []
    for model, benchmark in zip(baseline.model, baseline.benchmark):
        name = PINS[model].published if model in PINS else ""
        official = theirs.get((name, _OFFICIAL.get(benchmark)))
        found.append(ours.get((name, _PARITY.get(benchmark)), official))
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


def prior_heads() -> dict[str, HeadSet]:
    """Head lists released by earlier work on the same backbones, by name."""
    return {
        entry["name"]: HeadSet(tuple(Head(*h) for h in entry["heads"]), tuple(entry["grid"]), entry["name"])
        for entry in _lists("prior_heads.json")["lists"]
    }


def prior_overlaps() -> pd.DataFrame:
    """Do text and document retrieval heads recur as visual ones? Each released list against the published RefCOCO
    top-20 of every model with the same grid, which needs no model to run.

    Columns: list, model, shared, of (length of the released list), expected (shared by chance), p (chance of at least
    as many if heads fell anywhere on the grid, hypergeometric: a mild test, since both kinds sit in middle layers).
    """
    rows = []
    for name, prior in prior_heads().items():
        for model in MODELS:
            heads = published_heads(model)
            if heads.grid == prior.grid:
                total, shared = heads.grid[0] * heads.grid[1], heads.overlap(prior)
                p = float(hypergeom.sf(shared - 1, total, len(heads), len(prior)))
                rows.append((name, model, shared, len(prior), len(heads) * len(prior) / total, p))
    return pd.DataFrame(rows, columns=["list", "model", "shared", "of", "expected", "p"])


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

# A check takes the evidence a notebook hands over and returns (ours, interval, holds): holds is True, False, None for
# "partly", or UNTESTED where the evidence could not have spoken against the claim.
Check = Callable[..., tuple[str, str, bool | None | str]]
UNTESTED = "untested"


def _largest_k(sweep: pd.DataFrame) -> int:
    return int(sweep.loc[sweep.condition == "vrh", "k"].max())


def _at(sweep: pd.DataFrame, condition: str, k: int) -> pd.DataFrame:
    return sweep[(sweep.condition == condition) & (sweep.k == k)]


def _nothing_to_lose(frame: pd.DataFrame) -> bool:
    """Is the model right in under 20 % before any head is cut?"""
    return bool((frame.loc[frame.condition == "unmasked", "accuracy"] < 20).any())


def _collapse(sweep: pd.DataFrame) -> tuple:
    """VRH at least halves the accuracy; random heads cost under 3 points on average; and VRH falls below every
    layer-matched draw, where there are any. The first alone is "partly". A model that is right in under 20 % has
    nothing to lose."""
    k, base = _largest_k(sweep), sweep.loc[sweep.condition == "unmasked"].iloc[0]
    vrh, random = _at(sweep, "vrh", k).iloc[0], over_seeds(_at(sweep, "random", k).accuracy)
    matched = _at(sweep, "layer_matched", k).accuracy
    ours = (
        f"{base.accuracy:.1f} to {vrh.accuracy:.1f} at k={k}; random {random.mean:.1f} ({random.n} seeds, n={base.n})"
    )
    interval = f"VRH [{vrh.low:.1f}, {vrh.high:.1f}]; random [{random.low:.1f}, {random.high:.1f}]"
    if len(matched):
        ours += f"; layer-matched {matched.mean():.1f}"
        interval += f"; layer-matched {matched.min():.1f} to {matched.max():.1f}"
    falls, benign = vrh.accuracy <= base.accuracy / 2, base.accuracy - random.mean < 3
    below = bool((matched > vrh.high).all())
    if _nothing_to_lose(sweep):
        return ours, interval, UNTESTED
    return ours, interval, True if falls and benign and below else None if falls else False


def _share(heads: HeadSet) -> tuple:
    """A choice of k, which the collapse has to justify; no finding, and nothing that could fail."""
    return f"{len(heads)}/{heads.grid[0] * heads.grid[1]} = {heads.share:.1%}", "exact", UNTESTED


def _middle(heads: HeadSet) -> tuple:
    """Every top head lies in the middle half of the layers (published: 14-19 of 0-27)."""
    layers = sorted({h.layer for h in heads})
    depth = heads.grid[0] - 1
    inside = [0.25 * depth <= layer <= 0.75 * depth for layer in layers]
    ours = f"layers {layers[0]}-{layers[-1]} of 0-{depth}"
    return ours, "exact", True if all(inside) else None if any(inside) else False


def _format(sweep: pd.DataFrame) -> tuple:
    """At most 5 % of replies under VRH ablation have no readable box (a box without area is readable)."""
    row = _at(sweep, "vrh", _largest_k(sweep)).iloc[0]
    failed = Accuracy(round(row[["malformed", "cut off", "no box"]].sum() * row.n / 100), int(row.n))
    low, high = failed.interval
    return (
        f"{failed.mean:.1f} % without a readable box at k={row.k} (n={row.n})",
        f"[{low:.1f}, {high:.1f}]",
        failed.mean <= 5,
    )


def _one_token(sweep: pd.DataFrame) -> tuple:
    """Heads of one random output token and of all of them: accuracies within 5 points, random heads above both."""
    k = _largest_k(sweep)
    one, every = _at(sweep, "one output token", k).iloc[0], _at(sweep, "vrh", k).iloc[0]
    random = over_seeds(_at(sweep, "random", k).accuracy)
    ours = f"{one.accuracy:.1f} / {every.accuracy:.1f} / {random.mean:.1f} at k={k} (n={every.n})"
    interval = f"[{one.low:.1f}, {one.high:.1f}] / [{every.low:.1f}, {every.high:.1f}]"
    return ours, interval, abs(one.accuracy - every.accuracy) <= 5 and random.mean > max(one.high, every.high)


def _few_samples(stable: pd.DataFrame) -> tuple:
    """Ten samples find at least 80 % of the heads that all samples (twenty at least) find."""
    if not (stable.n == 10).any():
        raise ValueError("The claim few-samples looks at subsets of 10: detect on at least 10 samples.")
    k, ten = int(stable.k.iloc[0]), over_seeds(stable.loc[stable.n == 10, "overlap"])
    return (
        f"{ten.mean:.1f} of {k} from 10 samples ({ten.n} draws)",
        f"[{ten.low:.1f}, {ten.high:.1f}]",
        ten.mean >= 0.8 * k if stable.n.max() >= 20 else UNTESTED,
    )


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


def _query_axis(frame: pd.DataFrame) -> tuple:
    """Flipping Q costs the cut most of its damage, by more than sampling error, and the other flips move accuracy less
    than half as much. Where Q moves accuracy most but in the other direction, or others move it as much, "partly". If
    no flip changes anything (the same heads, say), the axes were not told apart."""
    changes = _changes(frame, FLIPS)
    flip_q, *others = changes.values()
    largest = abs(flip_q.mean) > max(abs(other.mean) for other in others)
    differs = not flip_q.low <= 0 <= flip_q.high
    little = max(abs(other.mean) for other in others) < abs(flip_q.mean) / 2
    whole = largest and differs and little and flip_q.mean > 0
    holds = True if whole else None if largest or differs else False
    same = all(change.mean == 0 for change in changes.values())
    return *_against_vrh(frame, changes), UNTESTED if same or _nothing_to_lose(frame) else holds


def _best_variant(frame: pd.DataFrame) -> tuple:
    """No other scoring leaves a lower accuracy than VRH; "partly" if one does within sampling error. Counts whatever
    the frame has beside controls. If no variant changes anything, nothing was compared."""
    changes = _changes(frame)
    worse = any(change.high < 0 for change in changes.values())
    first = all(change.mean >= 0 for change in changes.values())
    same = all(change.mean == 0 for change in changes.values())
    holds = False if worse else True if first else None
    return *_against_vrh(frame, changes), UNTESTED if same or _nothing_to_lose(frame) else holds


PRIOR = ("retrieval_heads", "ocr_heads", "vera", "localization_heads")  # whom the claim beats-prior names


def _beats_prior(frame: pd.DataFrame) -> tuple:
    """VRH leaves a lower accuracy than the heads of every earlier method that the claim names, each detected on its own
    kind of data, and than random heads (interval over seeds), by more than sampling error; "partly" if some differ by
    less than that, or found too few heads to be cut. Methods that the claim does not name are shown, not judged."""
    changes = _changes(frame)
    judged = {name: change for name, change in changes.items() if name.removesuffix("_aligned") in PRIOR}
    missing = [name for name in PRIOR if name not in {n.removesuffix("_aligned") for n in judged}]
    vrh, random = (frame.loc[frame.condition == name, "accuracy"] for name in ("vrh", "random"))
    changes["random"] = judged["random"] = over_seeds(random - vrh.iloc[0])
    worse = any(change.high < 0 for change in judged.values())
    lowest = all(change.low > 0 for change in judged.values())
    holds = False if worse else True if lowest and not missing else None
    ours, interval = _against_vrh(frame, changes)
    ours += f"; not cut, fewer than k heads found: {', '.join(missing)}" if missing else ""
    return ours, interval, UNTESTED if _nothing_to_lose(frame) or len(missing) == len(PRIOR) else holds


def _sparse(shares: pd.DataFrame) -> tuple:
    """Under 15 % of heads above 1e-3 and at most 4 % above 5e-3, with attention on the referent summed (Eq. 1).

    `shares`: rows scoring = "sum" and "mean" (per image token), columns above_1e-3, above_5e-3, percent of all heads.
    "Partly" if only one of the two numbers fits, or only the mean does. The mean is there because the paper's numbers
    may be on another scale than its formula: a head that finds the referent should put far more than 0.005 of its
    attention there, yet the paper counts 0-4 % of heads above that, in one model none, while cutting 20 heads destroys
    grounding. It does not say what it divided by, so we judge the formula as written and fit nothing.
    """
    rows = shares.set_index("scoring")
    if missing := {"sum", "mean"} - set(rows.index):
        raise ValueError(f"The claim sparse looks at scores under sum and mean; {', '.join(missing)} is missing.")
    fits = {name: (rows.loc[name, "above_1e-3"] < 15, rows.loc[name, "above_5e-3"] <= 4) for name in ("sum", "mean")}
    ours = "; ".join(
        f"{name}: {rows.loc[name, 'above_1e-3']:.1f} % above 1e-3, {rows.loc[name, 'above_5e-3']:.1f} % above 5e-3"
        for name in fits
    )
    columns = ["above_1e-3_low", "above_1e-3_high", "above_5e-3_low", "above_5e-3_high"]
    ends = rows.loc["sum"].reindex(columns)
    interval = "sum: [{:.1f}, {:.1f}], [{:.1f}, {:.1f}]".format(*ends) if ends.notna().all() else "exact"
    return ours, interval, True if all(fits["sum"]) else None if any(fits["sum"]) or all(fits["mean"]) else False


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
}
_WORDS = {True: "holds", None: "holds partly", False: "does not hold", UNTESTED: "not tested"}


def _together(found: Mapping[str, tuple]) -> tuple:
    verdicts = {holds for _, _, holds in found.values()}
    holds = verdicts.pop() if len(verdicts) == 1 else None
    if len(found) == 1:
        return *next(iter(found.values()))[:2], holds
    ours, interval = ("; ".join(f"{name}: {row[i]}" for name, row in found.items()) for i in (0, 1))
    return ours, interval, holds


def compare(evidence: Mapping[str, object], profile: str, notebook: str) -> pd.DataFrame:
    """Claims beside our measurements, and merged into figures/<profile>/claims.csv.

    `evidence` maps claim ids to what its check reads (a sweep, a head set, a stability frame), or to that for each of
    several models by name: then it holds if it holds in all of them, and partly if only in some. Columns: id, claim,
    published, ours, interval, verdict, notebook. Raises ValueError for an unknown claim.
    """
    known = published("claims").set_index("id")
    rows = []
    for claim, measured in evidence.items():
        if claim not in CHECKS:
            raise ValueError(f"No check for claim {claim!r}; there are {', '.join(CHECKS)}.")
        each = measured if isinstance(measured, Mapping) else {"": measured}
        ours, interval, holds = _together({name: CHECKS[claim](one) for name, one in each.items()})
        verdict = _WORDS[holds] + (" in nano" if profile == "nano" else "")
        rows.append((claim, known.claim[claim], known.published[claim], ours, interval, verdict, notebook))
    frame = pd.DataFrame(rows, columns=_COLUMNS)
    path = store.figures_dir(profile) / "claims.csv"
    earlier = pd.read_csv(path) if path.exists() else frame.iloc[:0]
    kept = earlier[~(earlier.id.isin(frame.id) & (earlier.notebook == notebook))]
    store.write_atomic(path, pd.concat([kept, frame]).sort_values(["id", "notebook"]).to_csv(index=False))
    return frame
