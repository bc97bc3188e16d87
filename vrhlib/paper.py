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

from vrhlib import store
from vrhlib.heads import Head, HeadSet
from vrhlib.profiles import MODELS as PINS
from vrhlib.stats import Accuracy, over_seeds

TABLES = ("accuracy_vs_k", "scoring_variants", "cross_task", "further_models", "claims", "reported_baselines")
MODELS = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "InternVL3-8B", "InternVL3.5-8B")
SAME_BACKBONE = (("Qwen2.5-VL-7B", "InternVL3-8B"), ("Qwen3-VL-8B", "InternVL3.5-8B"))
# Our names of benchmarks to the paper's, and to those of the official splits in the models' own reports.
_PARITY = {"refcoco": "RefCOCO", "refcoco+": "RefCOCO+", "refcocog": "RefCOCOg", "refspatial": "RefSpatialBench",
           "toloka": "Toloka"}  # fmt: skip
_OFFICIAL = {"refcoco-unc": "RefCOCO", "refcoco+-unc": "RefCOCO+", "refcocog-umd": "RefCOCOg"}
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


# ---------------------------------------------------------------- claims and verdicts

# A check takes the evidence a notebook hands over and returns (ours, interval, holds): holds is True, False, None for
# "partly", or UNTESTED where the evidence could not have spoken against the claim.
Check = Callable[..., tuple[str, str, bool | None | str]]
UNTESTED = "untested"


def _largest_k(sweep: pd.DataFrame) -> int:
    return int(sweep.loc[sweep.condition == "vrh", "k"].max())


def _at(sweep: pd.DataFrame, condition: str, k: int) -> pd.DataFrame:
    return sweep[(sweep.condition == condition) & (sweep.k == k)]


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
    if base.accuracy < 20:
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


CHECKS: dict[str, Check] = {
    "causal-collapse": _collapse,
    "head-share": _share,
    "middle-layers": _middle,
    "format-kept": _format,
    "one-token": _one_token,
    "few-samples": _few_samples,
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
