"""How few heads hold the attention: shares of heads above a threshold, Gini, and what the threshold depends on.

Works on what a captured pass left (`design_space.SampleScores`): no model runs. The paper's Figure 5 counts heads above
1e-3 and 5e-3 of its score. A sum over a region grows with the region, so such a count is a statement about boxes as
much as about heads; the mean over the region's tokens has another scale. Both are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from vrhlib.design_space import VRH, SampleScores, Scoring
from vrhlib.heads import HeadScores
from vrhlib.samples import Samples

THRESHOLDS = (1e-3, 5e-3)
SCORINGS = {"sum": VRH, "mean": Scoring("output", "mean", "mean")}
RESAMPLES = 500


def bands(captured: Mapping[str, SampleScores]) -> pd.DataFrame:
    """Figure 5 and its companions, a row per model and scoring: model, scoring, above_1e-3, above_5e-3, between, below,
    half_share (percent of the heads; the last is the fewest that hold half of the score), gini, heads, n; and for each
    a 95 % percentile interval over samples (`<name>_low`, `<name>_high`)."""
    rows = []
    for model, scores in captured.items():
        for name, scoring in SCORINGS.items():
            values = _values(scores, scoring)
            rows.append({"model": model, "scoring": name, **_with_intervals(values, model),
                         "heads": values[0].size, "n": len(values)})  # fmt: skip
    return _with_runs(rows, captured)


def by_area(captured: Mapping[str, SampleScores], samples: Samples, bins: int = 4) -> pd.DataFrame:
    """How the share of heads above the higher threshold moves with the size of the referent.

    Samples are cut into bins of equal number by the share of the picture that their box covers. A row per model, keys
    and bin: model, keys (sum or mean), area (median, percent of the picture), share (percent of heads), low, high, n.
    """
    area = np.array([100 * s.box.area / (s.image.size[0] * s.image.size[1]) for s in samples])
    cuts = np.array_split(np.argsort(area, kind="stable"), min(bins, len(area)))
    rows = []
    for model, scores in captured.items():
        at = {name: i for i, name in enumerate(scores.ids)}
        for name, scoring in SCORINGS.items():
            for cut in cuts:
                values = _values(scores, scoring, [at[samples[int(i)].id] for i in cut])
                found = _with_intervals(values, model)
                low, high = found["above_5e-3_low"], found["above_5e-3_high"]
                rows.append((model, name, np.median(area[cut]), found["above_5e-3"], low, high, len(values)))
    columns = ["model", "keys", "area", "share", "low", "high", "n"]
    return _with_runs([dict(zip(columns, row)) for row in rows], captured)


def _values(scores: SampleScores, scoring: Scoring, of: Sequence[int] | None = None) -> np.ndarray:
    """Theta of the samples that have it, [samples, layers, heads]."""
    values = scores.theta(scoring.queries, scoring.keys, scoring.evidence)
    values = values if of is None else values[np.asarray(of)]
    return values[~np.isnan(values[:, 0, 0])]


def _with_intervals(values: np.ndarray, model: str) -> dict[str, float]:
    rng, n = np.random.default_rng(0), len(values)
    weights = [np.bincount(rng.integers(0, n, n), minlength=n) / n for _ in range(RESAMPLES)]
    drawn = pd.DataFrame([_numbers(np.tensordot(w, values, 1), model) for w in weights])
    low, high = (drawn.quantile(q) for q in (0.025, 0.975))
    ends = {f"{name}_{end}": float(of[name]) for name in drawn for end, of in (("low", low), ("high", high))}
    return _numbers(values.mean(0), model) | ends


def _numbers(values: np.ndarray, model: str) -> dict[str, float]:
    scores = HeadScores(values, "mean over samples", model, 1)
    low, high = (100 * scores.share_above(t) for t in THRESHOLDS)
    return {"above_1e-3": low, "above_5e-3": high, "between": low - high, "below": 100 - low,
            "half_share": 100 * scores.share_holding(0.5), "gini": scores.gini()}  # fmt: skip


def _with_runs(rows: list[dict], captured: Mapping[str, SampleScores]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    frame.attrs["runs"] = sorted({run for scores in captured.values() for run in scores.runs})
    return frame
