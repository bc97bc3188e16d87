"""Attention heads as values: a head, a ranked set on its grid, and a score for every head of a model.

Indices are zero-based and always (layer, head); `head` counts *query* heads, also under grouped-query
attention. A `HeadSet` carries the (layers, heads) grid of its model, so that twenty heads read as
2.6 % of 784 and cannot be cut silently in a model of another shape.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr

from vrhlib import store


class Head(NamedTuple):
    """One attention head, zero-based; prints as L19H17."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, text: str) -> Head:
        if not (match := re.fullmatch(r"L(\d+)H(\d+)", text)):
            raise ValueError(f"{text!r} is not a head; write it as L19H17 (layer, then head, zero-based).")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class HeadSet:
    """Ranked heads (best first) of a model with `grid` = (layers, heads per layer)."""

    heads: tuple[Head, ...]
    grid: tuple[int, int]
    name: str = "heads"

    def __post_init__(self):
        object.__setattr__(self, "heads", tuple(Head(*map(operator.index, h)) for h in self.heads))
        object.__setattr__(self, "grid", (int(self.grid[0]), int(self.grid[1])))
        layers, per_layer = self.grid
        for head in self.heads:
            if not (0 <= head.layer < layers and 0 <= head.head < per_layer):
                raise ValueError(
                    f"{self.name}: {head} does not exist in a model of {layers} layers x {per_layer} heads. "
                    "Heads are (layer, head), zero-based: are the two swapped, or is it another model's list?"
                )
        if len(set(self.heads)) < len(self.heads):
            twice = next(h for i, h in enumerate(self.heads) if h in self.heads[:i])
            raise ValueError(f"{self.name}: {twice} is listed twice.")

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self):
        return iter(self.heads)

    def __contains__(self, head) -> bool:
        return tuple(head) in self.heads

    def __str__(self) -> str:
        return f"{self.name}: {len(self)} heads ({self.share:.1%} of {self.grid[0] * self.grid[1]})"

    @property
    def share(self) -> float:
        """Fraction of all heads of the model."""
        return len(self) / (self.grid[0] * self.grid[1])

    @property
    def layers(self) -> np.ndarray:
        """Heads per layer, int [layers]."""
        return np.bincount([h.layer for h in self.heads], minlength=self.grid[0])

    def top(self, k: int) -> HeadSet:
        """The first k heads. Raises if there are fewer: a shorter list would be another experiment."""
        if not 0 <= k <= len(self):
            raise ValueError(
                f"k={k}, but {self.name} ranks {len(self)} of {self.grid[0] * self.grid[1]} heads "
                f"({self.grid[0]} layers x {self.grid[1]}). Choose k between 0 and {len(self)}."
            )
        return HeadSet(self.heads[:k], self.grid, self.name)

    def rest(self) -> HeadSet:
        """All heads of the model outside this set, by layer, then head."""
        return HeadSet(tuple(map(tuple, np.argwhere(~self.mask()))), self.grid, f"all but {self.name}")

    def on(self, grid: tuple[int, int]) -> HeadSet:
        """The same set for a model of `grid`; raises unless the shapes agree (same-backbone transfer)."""
        if tuple(grid) != self.grid:
            raise ValueError(
                f"{self.name} belongs to a model of {self.grid[0]} layers x {self.grid[1]} heads, not "
                f"{grid[0]} x {grid[1]}: its indices mean nothing there. Detect heads on that model instead."
            )
        return self

    def mask(self) -> np.ndarray:
        """True at the heads of the set, bool [layers, heads]."""
        mask = np.zeros(self.grid, dtype=bool)
        if self.heads:
            mask[tuple(np.array(self.heads).T)] = True
        return mask

    def overlap(self, other: HeadSet) -> int:
        """Number of shared heads; the grids must agree."""
        return len(set(self.heads) & set(other.on(self.grid).heads))

    def controls(self, n: int, seed: int, layer_matched: bool = False, skip_layers: Collection[int] = ()) -> HeadSet:
        """n random heads outside this set, seeded; nested in n, so the first k serve for every k <= n. None lies in
        `skip_layers`.

        `layer_matched` draws for each head of this set, best first, another head of the same layer, so that both sets
        have as many heads in every layer: a stricter control, since retrieval heads crowd in a few layers where uniform
        draws rarely fall. Raises ValueError where a layer has too few heads left (`matchable` says how far it goes).
        """
        rng = np.random.default_rng([seed, 0x5EED])
        free = [Head(*map(int, h)) for h in np.argwhere(~self.mask())]
        free = [head for head in free if head.layer not in skip_layers]
        if layer_matched and self.matchable < n <= len(self):
            raise ValueError(f"{self.name}: {self.crowded}. Use k <= {self.matchable}.")
        if not 0 <= n <= len(free):
            raise ValueError(
                f"Asked for {n} control heads, but only {len(free)} of {self.grid[0] * self.grid[1]} lie outside "
                f"{self.name} ({len(self)} heads){f' and layers {sorted(skip_layers)}' if skip_layers else ''}. "
                "Use a smaller k."
            )
        order = [free[i] for i in rng.permutation(len(free))]
        if layer_matched:
            if n > len(self):
                raise ValueError(f"Layer matching follows the {len(self)} heads of {self.name}; asked for {n}.")
            order = [order.pop([other.layer for other in order].index(head.layer)) for head in self.heads[:n]]
        kind = "layer-matched" if layer_matched else "random"
        return HeadSet(tuple(order[:n]), self.grid, f"{kind} {seed}")

    @property
    def matchable(self) -> int:
        """For how many heads, best first, another head of the same layer is left outside the set."""
        left = self.grid[1] - self.layers
        for i, head in enumerate(self.heads):
            if left[head.layer] == 0:
                return i
            left[head.layer] -= 1
        return len(self)

    @property
    def crowded(self) -> str:
        """Why layer-matched controls end where they do; empty if they do not."""
        if self.matchable == len(self):
            return ""
        layer = self.heads[self.matchable].layer
        inside = self.layers[layer]
        return f"layer {layer} has {self.grid[1] - inside} heads outside the set for the {inside} of its heads inside"

    def to_json(self) -> dict:
        return {"name": self.name, "grid": list(self.grid), "heads": [list(h) for h in self.heads]}

    @classmethod
    def from_json(cls, value: dict) -> HeadSet:
        return cls(tuple(Head(*h) for h in value["heads"]), tuple(value["grid"]), value["name"])


@dataclass(frozen=True, eq=False)
class HeadScores:
    """One score per head, float [layers, heads]; higher looks more at the referent. `n` samples; `runs` behind them."""

    values: np.ndarray
    scoring: str
    model: str
    n: int
    runs: tuple[str, ...] = ()

    def __post_init__(self):
        values = np.asarray(self.values, dtype=np.float64)
        if values.ndim != 2 or not np.isfinite(values).all():
            raise ValueError(f"Scores of {self.model} must be a finite [layers, heads] array, got {values.shape}.")
        object.__setattr__(self, "values", values)

    @property
    def grid(self) -> tuple[int, int]:
        return self.values.shape

    def ranked(self) -> HeadSet:
        """All heads, best first; ties by layer, then head, so that equal inputs give equal lists."""
        layer, head = np.indices(self.grid)
        order = np.lexsort((head.ravel(), layer.ravel(), -self.values.ravel()))
        heads = (divmod(int(i), self.grid[1]) for i in order)
        return HeadSet(tuple(Head(*h) for h in heads), self.grid, f"{self.scoring} heads of {self.model}")

    def top(self, k: int) -> HeadSet:
        return self.ranked().top(k)

    def found(self, k: int) -> HeadSet:
        """The first k heads; fewer where fewer score above 0: a ranking of zeros is a ranking of indices."""
        return self.top(min(k, int((self.values > 0).sum())))

    def controls(self, n: int, seed: int, layer_matched: bool = False) -> HeadSet:
        """n random heads outside the top n (see `HeadSet.controls`)."""
        return self.top(n).controls(n, seed, layer_matched)

    def spearman(self, other: HeadScores) -> float:
        """Rank correlation over all heads; the grids must agree."""
        if other.grid != self.grid:
            raise ValueError(f"Cannot correlate scores on grids {self.grid} and {other.grid}.")
        return float(spearmanr(self.values.ravel(), other.values.ravel()).statistic)

    @property
    def _held(self) -> np.ndarray:
        """Scores as shares of their total, float [layers, heads]; a negative score holds nothing."""
        held = np.clip(self.values, 0, None)
        if not held.any():
            raise ValueError(
                f"No head of {self.model} has a positive {self.scoring} score, so there is no total to share out. "
                "Use a scoring whose scores are amounts of attention, such as output/sum/mean."
            )
        return held / held.sum()

    def share_holding(self, fraction: float) -> float:
        """Smallest share of heads that together hold `fraction` of the total score.

        Negative scores count as 0. Raises ValueError if no score is positive.
        """
        ordered = np.sort(self._held.ravel())[::-1]
        reached = np.searchsorted(np.cumsum(ordered), fraction * ordered.sum() * (1 - 1e-12)) + 1
        return min(1.0, reached / ordered.size)

    def share_above(self, threshold: float) -> float:
        """Fraction of all heads whose score is above `threshold` (not equal to it); as in Figure 5, but no percent."""
        return float((self.values > threshold).mean())

    def gini(self) -> float:
        """Gini coefficient of the scores: 0 if all heads score alike, (n - 1) / n if one of n heads holds everything.

        Half the mean absolute difference of two heads, over the mean score. Negative scores are clipped at 0; if none
        is positive all are alike, and it is 0.
        """
        if self.values.max() <= 0:
            return 0.0
        ordered = np.sort(self._held.ravel())
        n = ordered.size
        return max(0.0, float((2 * np.arange(1, n + 1) - n - 1) @ ordered / n))

    def held_by(self, heads: HeadSet) -> float:
        """Share of the total score that these heads hold (negative scores count as 0)."""
        return float(self._held[heads.on(self.grid).mask()].sum())

    def fewest(self, fraction: float, most: int) -> int:
        """How many top heads it takes to hold `fraction` of the total score; `most` if it takes more."""
        return min(most, round(self.share_holding(fraction) * self.values.size))

    def save(self, path: Path, k: int, **facts: object) -> Path:
        """Write the top k heads and all scores as JSON, with `facts` and a manifest."""
        value = self.top(k).to_json() | {
            "model": self.model, "scoring": self.scoring, "n": self.n,
            "scores": self.values.tolist(), "manifest": store.manifest(runs=list(self.runs), **facts),
        }  # fmt: skip
        return store.write_atomic(path, json.dumps(value) + "\n")


def load_heads(path: Path, grid: tuple[int, int] | None = None) -> HeadSet:
    """Read a detected list, of a model of `grid` (layers, heads per layer) if given.

    Raises FileNotFoundError or ValueError with the next step.
    """
    return _load(path, HeadSet.from_json, grid)


def _load(path: Path, make, grid: tuple[int, int] | None):
    try:
        found = make(json.loads(Path(path).read_text()))
    except FileNotFoundError:
        raise FileNotFoundError(f"No heads at {path} yet. Run notebooks/01_detect.ipynb for that model.") from None
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a head list ({error!r}). Delete it and rerun 01_detect.") from error
    if grid is not None and found.grid != tuple(grid):
        raise ValueError(
            f"{path} holds heads of a model of {found.grid[0]} layers x {found.grid[1]} heads, but this model has "
            f"{grid[0]} x {grid[1]}. Run notebooks/01_detect.ipynb for this model, or read the file of the right one."
        )
    return found


def load_scores(path: Path, grid: tuple[int, int] | None = None) -> HeadScores:
    """Read the scores that stand beside a detected list; arguments and errors as for `load_heads`."""

    def make(value: dict) -> HeadScores:
        runs = tuple(value.get("manifest", {}).get("runs", ()))
        scores = HeadScores(np.array(value["scores"]), value["scoring"], value["model"], value["n"], runs)
        HeadSet.from_json(value).on(scores.grid)
        return scores

    return _load(path, make, grid)


def overlap_matrix(sets: Iterable[HeadSet]) -> np.ndarray:
    """Shared heads of every pair, int [sets, sets]; -1 where the grids differ and a count means nothing."""
    sets = list(sets)
    return np.array([[a.overlap(b) if a.grid == b.grid else -1 for b in sets] for a in sets])
