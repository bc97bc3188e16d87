"""Do two lists of heads, or two models' scores, agree by more than chance? And do heads cluster in key-value groups?

Two kinds of chance stand side by side everywhere. Over the *grid*: heads fall anywhere in the model. Within *layers*:
heads keep their layer and only their place in it is random. Retrieval heads crowd in a few layers, so the first is a
mild test; the second asks for more than "the top heads sit in the same layers". Counts are judged exactly
(hypergeometric, or a sum of hypergeometrics), rank correlations by scipy's approximation over the grid and by
permutation within layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from math import comb
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import hypergeom, rankdata, spearmanr

from vrhlib.heads import HeadScores, HeadSet


class Shared(NamedTuple):
    """Heads that two lists share; how many chance would give and how often at least as many (p), over the grid and
    within layers."""

    shared: int
    expected: float
    p: float
    expected_in_layer: float
    p_in_layer: float


def shared(a: HeadSet, b: HeadSet) -> Shared:
    """Compare two lists of heads of models with one grid; raises ValueError for two grids, naming both."""
    count, (layers, heads) = a.overlap(b), a.grid
    p = float(hypergeom.sf(count - 1, layers * heads, len(a), len(b)))
    pmf = np.ones(1)  # of the number shared, one layer after the other
    for mine, other in zip(a.layers, b.layers):
        pmf = np.convolve(pmf, hypergeom.pmf(np.arange(min(mine, other) + 1), heads, mine, other))
    expected_in_layer = float((a.layers * b.layers).sum() / heads)
    p_in_layer = min(1.0, float(pmf[count:].sum()))
    return Shared(count, len(a) * len(b) / (layers * heads), min(1.0, p), expected_in_layer, p_in_layer)


class Agreement(NamedTuple):
    """How much two models' scores agree. `shared` heads of their two top-k lists (see `Shared`); `spearman` over all
    heads, and the chance of at least as much correlation if heads were shuffled over the grid (Student's t), or within
    their layers (permutations)."""

    k: int
    heads: int
    shared: int
    expected: float
    expected_in_layer: float
    p_shared: float
    p_shared_in_layer: float
    spearman: float
    p_spearman: float
    p_spearman_in_layer: float


def agreement(a: HeadScores, b: HeadScores, k: int, permutations: int = 2000, seed: int = 0) -> Agreement:
    """Compare two models' head scores; their grids must agree."""
    tops, rng = shared(a.top(k), b.top(k)), np.random.default_rng(seed)
    found = spearmanr(a.values.ravel(), b.values.ravel(), alternative="greater")
    ranks_a, ranks_b = (rankdata(s.values).reshape(s.grid) for s in (a, b))
    centred, as_correlated = ranks_a - ranks_a.mean(), 1  # the observed order counts as one: no p value is 0
    for _ in range(permutations):
        order = np.argsort(rng.random(a.grid), axis=1)
        as_correlated += (centred * np.take_along_axis(ranks_b, order, 1)).sum() >= (centred * ranks_b).sum() - 1e-9
    return Agreement(
        k, a.values.size, tops.shared, tops.expected, tops.expected_in_layer, tops.p, tops.p_in_layer,
        float(found.statistic), float(found.pvalue), float(as_correlated / (permutations + 1)),
    )  # fmt: skip


def agreements(
    scores: Mapping[str, HeadScores], tops: Mapping[str, HeadSet], same_backbone: Iterable[tuple[str, str]]
) -> pd.DataFrame:
    """`agreement` of every two models whose grids agree, over as many heads as the shorter of their two top lists has:
    a, b, same_backbone, and the fields of `Agreement`."""
    same = {frozenset(pair) for pair in same_backbone}
    rows = [
        {
            "a": a,
            "b": b,
            "same_backbone": {a, b} in same,
            **agreement(scores[a], scores[b], min(len(tops[a]), len(tops[b])))._asdict(),
        }
        for a, b in itertools.combinations(scores, 2)
        if scores[a].grid == scores[b].grid
    ]
    columns = ["a", "b", "same_backbone", *Agreement._fields]
    found = pd.DataFrame(rows, columns=columns).sort_values("same_backbone", ascending=False, kind="stable")
    found.attrs["runs"] = sorted({run for s in scores.values() for run in s.runs})
    return found


def scatter(scores: Mapping[str, HeadScores], tops: Mapping[str, HeadSet], agreed: pd.DataFrame) -> pd.DataFrame:
    """Every head of the pairs in `agreed` (`agreements`), a row per pair and head: a, b, relation (same or other
    backbone), layer, head, x, y (its scores in a and b), top (in whose top list it is: both, a, b or neither), k,
    shared, spearman, n."""
    rows, lists = [], {(True, True): "both", (True, False): "a", (False, True): "b", (False, False): "neither"}
    for pair in agreed.itertuples():
        ones, twos = (set(tops[model].top(pair.k)) for model in (pair.a, pair.b))
        about = {"a": pair.a, "b": pair.b, "relation": "same backbone" if pair.same_backbone else "other backbone"}
        for at, x in np.ndenumerate(scores[pair.a].values):
            where = {"layer": at[0], "head": at[1], "x": x, "y": scores[pair.b].values[at]}
            where["top"] = lists[at in ones, at in twos]
            more = {"k": pair.k, "shared": pair.shared, "spearman": pair.spearman, "n": scores[pair.a].n}
            rows.append(about | where | more)
    columns = ["a", "b", "relation", "layer", "head", "x", "y", "top", "k", "shared", "spearman", "n"]
    table = pd.DataFrame(rows, columns=columns)
    table.attrs["runs"] = agreed.attrs.get("runs", [])
    return table


def overlaps(lists: Mapping[str, HeadSet]) -> pd.DataFrame:
    """Every ordered pair of lists of one model (found on several benchmarks, say): a, b, k (heads of the shorter one),
    heads (of the model), shared, and the chances of `Shared`. Raises ValueError if grids differ."""
    rows = []
    for (a, one), (b, other) in itertools.product(lists.items(), repeat=2):
        k = min(len(one), len(other))
        found = shared(one.top(k), other.top(k))
        rows.append({"a": a, "b": b, "k": k, "heads": one.grid[0] * one.grid[1], **found._asdict()})
    return pd.DataFrame(rows)


class Grouped(NamedTuple):
    """How far heads sit together in key-value groups: under grouped-query attention `size` query heads of a layer read
    the same keys and values. `pairs` of heads of the list that share a group, `groups` that hold any of them; the pairs
    that chance would give and how often at least as many (p), over the grid and within layers."""

    size: int
    groups: int
    pairs: int
    expected: float
    p: float
    expected_in_layer: float
    p_in_layer: float


def grouped(heads: HeadSet, kv_heads: int) -> Grouped:
    """Do heads cluster in key-value groups (query head h reads group h // size)? Exact, by counting the ways to fill
    groups. Raises ValueError unless the groups divide the heads of a layer."""
    layers, per_layer = heads.grid
    if kv_heads < 1 or per_layer % kv_heads:
        raise ValueError(f"{per_layer} query heads do not fall into {kv_heads} key-value groups of one size.")
    size = per_layer // kv_heads
    filled = np.zeros((layers, kv_heads), dtype=int)
    for head in heads:
        filled[head.layer, head.head // size] += 1
    pairs = int((filled * (filled - 1) // 2).sum())
    anywhere = _pairs_by_chance(len(heads), layers * kv_heads, size)
    in_layer = np.ones(1)
    for count in heads.layers:
        in_layer = np.convolve(in_layer, _pairs_by_chance(int(count), kv_heads, size))
    (expected, p), (expected_in_layer, p_in_layer) = (_mean_and_tail(pmf, pairs) for pmf in (anywhere, in_layer))
    return Grouped(size, int((filled > 0).sum()), pairs, expected, p, expected_in_layer, p_in_layer)


def _pairs_by_chance(heads: int, groups: int, size: int) -> np.ndarray:
    """Probability of 0, 1, ... pairs in one group when `heads` fall on groups x size places, all ways alike."""
    ways = np.zeros((heads + 1, comb(heads, 2) + 1), dtype=object)  # [heads placed, pairs so far], whole numbers
    ways[0, 0] = 1
    for _ in range(groups):
        grown = np.zeros_like(ways)
        for here in range(min(size, heads) + 1):
            more = comb(here, 2)
            grown[here:, more:] += comb(size, here) * ways[: heads + 1 - here, : ways.shape[1] - more]
        ways = grown
    total = comb(groups * size, heads)
    return np.array([w / total for w in ways[heads]], dtype=float)


def _mean_and_tail(pmf: np.ndarray, count: int) -> tuple[float, float]:
    return float(pmf @ np.arange(pmf.size)), min(1.0, float(pmf[count:].sum()))


def donors(
    model: str, scores: Mapping[str, HeadScores], same_backbone: Iterable[tuple[str, str]]
) -> tuple[dict[str, str], list[str]]:
    """Whose heads can be cut in a model, and whose cannot: condition (`borrowed`: of the model with the same backbone;
    `other_backbone 0`, ...: of the others with the same grid) to the name of the donor, and a reason for each other
    model (two grids)."""
    siblings = {other for pair in same_backbone if model in pair for other in pair} & set(scores) - {model}
    if len(siblings) > 1:
        raise ValueError(f"{model} shares its backbone with {' and '.join(sorted(siblings))}: choose one.")
    found, refused = {}, []
    for donor in (name for name in scores if name != model):
        try:
            scores[donor].ranked().on(scores[model].grid)
        except ValueError as error:
            refused.append(f"not cut in {model}: {error}")
            continue
        strangers = sum(name.startswith("other_backbone") for name in found)
        found["borrowed" if donor in siblings else f"other_backbone {strangers}"] = donor
    return found, refused


def changes(before: HeadScores, after: Mapping[str, HeadScores], k: int) -> pd.DataFrame:
    """Did heads move in training? A row per condition of `after` and head: condition, layer, head, before, after
    (scores), top (among the k best before); and, the same in all rows of a condition, k, shared (of the k best before
    and after), spearman (over all heads), p_in_layer (of as many shared by chance within layers), held_before,
    held_after (share of all attention on the referent that the k best heads *before* hold)."""
    parts, top = [], before.top(k)
    layer, head = np.indices(before.grid)
    for condition, scores in after.items():
        lists = shared(top, scores.top(k))
        parts.append(pd.DataFrame({
            "condition": condition, "layer": layer.ravel(), "head": head.ravel(), "before": before.values.ravel(),
            "after": scores.values.ravel(), "top": top.mask().ravel(), "k": k, "shared": lists.shared,
            "spearman": before.spearman(scores), "p_in_layer": lists.p_in_layer, "held_before": before.held_by(top),
            "held_after": scores.held_by(top),
        }))  # fmt: skip
    frame = pd.concat(parts, ignore_index=True)
    frame.attrs["runs"] = sorted({run for scores in (before, *after.values()) for run in scores.runs})
    return frame
