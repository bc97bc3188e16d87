"""Uncertainty: an accuracy that carries its interval, differences on the same samples, mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, t
from statsmodels.stats.proportion import proportion_confint


@dataclass(frozen=True)
class Accuracy:
    """`correct` of `n` right, in percent; prints as 86.3 ± 1.1 (n=1000), the standard error after ±."""

    correct: int
    n: int

    def __post_init__(self):
        if not 0 <= self.correct <= self.n or self.n == 0:
            raise ValueError(f"{self.correct} of {self.n} right is not an accuracy; an empty benchmark has none.")

    @property
    def mean(self) -> float:
        return 100 * self.correct / self.n

    @property
    def stderr(self) -> float:
        p = self.correct / self.n
        return 100 * math.sqrt(p * (1 - p) / self.n)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval in percent (Wilson 1927): sensible at 0 and 100, where ± is not."""
        low, high = proportion_confint(self.correct, self.n, method="wilson")
        p = self.correct / self.n  # rounding can leave a bound 1e-16 on the wrong side of it
        return 100 * max(0.0, min(float(low), p)), 100 * min(1.0, max(float(high), p))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.stderr:.1f} (n={self.n})"


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval over `n` units (samples or seeds)."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}] (n={self.n})"


def paired_difference(
    a: Sequence[bool], b: Sequence[bool], images: Sequence[object] | None = None, seed: int = 0
) -> Estimate:
    """Accuracy of `a` minus `b` on the same samples, percentage points, 95 % paired bootstrap over images.

    Samples stay in pairs: both conditions answer the same questions, so most of the noise cancels. What is resampled
    are pictures (`images`: one key per sample; without it every sample is its own): expressions about one picture are
    no independent trials. `n` of the result counts samples.
    """
    if not len(a) == len(b) > 0:
        raise ValueError(
            f"{len(a)} and {len(b)} answers are no pairs: both must answer the same samples, at least one."
        )
    if images is not None and len(images) != len(a):
        raise ValueError(f"{len(images)} images for {len(a)} answers: give one key per sample.")
    difference = 100.0 * (np.asarray(a, dtype=float) - np.asarray(b, dtype=float))
    mean = float(difference.mean())
    if not difference.any():  # no sample moved
        return Estimate(0.0, 0.0, 0.0, difference.size)
    keys = range(len(a)) if images is None else images
    of = pd.factorize(pd.Series(list(keys), dtype=object), use_na_sentinel=False)[0]
    sums, counts = np.bincount(of, difference), np.bincount(of)
    if sums.size < 2:
        raise ValueError(f"All {len(a)} samples are about one picture, which has no spread; test on two or more.")
    if np.ptp(difference) == 0:  # every sample moved alike; there is nothing to resample
        return Estimate(mean, mean, mean, difference.size)
    result = bootstrap(
        (sums, counts), lambda total, n, axis: total.sum(axis) / n.sum(axis), paired=True, vectorized=True,
        n_resamples=2000, method="percentile", rng=np.random.default_rng(seed),
    )  # fmt: skip
    return Estimate(mean, *map(float, result.confidence_interval), difference.size)


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over seeds with a 95 % t interval; one seed has no interval and raises."""
    values = np.asarray(values, dtype=float)
    if values.size < 2:
        raise ValueError(f"{values.size} seed has no spread; use at least two (five is the rule here).")
    if not np.isfinite(values).all():
        raise ValueError(f"{values} has a seed without a result.")
    half = t.ppf(0.975, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size)
    return Estimate(float(values.mean()), float(values.mean() - half), float(values.mean() + half), values.size)
