"""Lists of top heads: those published, and how many heads the lists of two methods or benchmarks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from vrhlib.figures.checks import check_columns
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import COLOUR, method_label, subplots
from vrhlib.heads import HeadSet, overlap_matrix


def published_heads(sets: Mapping[str, HeadSet]) -> Figure:
    """Published head lists on their models' grids, heads per layer, and overlap where grids agree (no model run)."""
    frame = pd.DataFrame(
        [(name, *s.grid, i + 1, h.layer, h.head) for name, s in sets.items() for i, h in enumerate(s)],
        columns=["model", "layers", "heads", "rank", "layer", "head"],
    )
    return draw("published_heads", frame)


@drawing("published_heads")
def _draw_published_heads(frame: pd.DataFrame) -> Canvas:
    sets = _sets_of(frame)
    canvas = Canvas(figsize=(3.0 * len(sets) + 3.4, 4.4), layout="constrained")
    axes = canvas.subplots(1, 2 * len(sets) + 1, width_ratios=[3, 1] * len(sets) + [4.2])
    for (name, heads), grid, side in zip(sets.items(), axes[::2], axes[1::2]):
        layers, per_layer = heads.grid
        cells = np.full(heads.grid, np.nan)
        for i, h in enumerate(heads):
            cells[h] = len(heads) - i
        grid.imshow(cells, cmap="Oranges", aspect="auto", origin="lower", vmin=-6, vmax=len(heads))
        grid.set(xlabel="head", ylabel="layer", xticks=range(0, per_layer, 8), yticks=range(0, layers, 4))
        grid.set_title(f"{name}\n{len(heads)} of {layers * per_layer} = {heads.share:.1%}")
        grid.grid(color="#eeeeee", lw=0.4)
        grid.set_axisbelow(True)
        side.barh(range(layers), heads.layers, color=COLOUR["vrh"])
        side.set(ylim=grid.get_ylim(), yticks=[], xlabel="per layer")
    matrix, names, ax = overlap_matrix(sets.values()), list(sets), axes[-1]
    shown = np.where(matrix < 0, np.nan, matrix).astype(float)
    ax.imshow(shown, cmap="Blues", vmin=0, vmax=26)
    for i, j in np.ndindex(matrix.shape):
        text = "–" if matrix[i, j] < 0 else str(matrix[i, j])
        ax.text(j, i, text, ha="center", va="center", fontsize=10, color="white" if matrix[i, j] > 16 else "black")
    ax.set(yticks=range(len(names)), yticklabels=names, xticks=range(len(names)), xticklabels=names)
    ax.tick_params(axis="x", rotation=35)
    for label in ax.get_xticklabels():
        label.set_ha("right")
    ax.set_title("shared top-20 heads\n(– other grid)")
    canvas.suptitle(
        "Published lists (RefCOCO, Tables A2–A6), darker = higher rank; not measured here", fontsize=9, color="#555555"
    )
    return canvas


def _sets_of(frame: pd.DataFrame, by: str = "model") -> dict[str, HeadSet]:
    return {
        name: HeadSet(tuple(zip(f["layer"], f["head"])), (f.layers.iloc[0], f.heads.iloc[0]), name)
        for name, f in frame.groupby(by, sort=False)
    }


def method_overlap(tops: Mapping[str, HeadSet], model: str) -> Figure:
    """Heads shared by the top-k lists of several methods on one model; a name may say its data (`vera@documents`).

    Raises ValueError unless the lists have one length k > 0 and one grid.
    """
    if len({len(s) for s in tops.values()}) != 1 or not all(map(len, tops.values())):
        lengths = ", ".join(f"{name} {len(s)}" for name, s in tops.items())
        raise ValueError(f"Lists of one length are compared, not {lengths or 'none'}: cut all to one k > 0 (`top(k)`).")
    if len({s.grid for s in tops.values()}) != 1:
        grids = ", ".join(f"{name} {s.grid[0]} x {s.grid[1]}" for name, s in tops.items())
        raise ValueError(f"Lists of one model share its grid, not {grids}: detect every list on {model}.")
    frame = pd.DataFrame(
        [(model, name, *s.grid, i + 1, *h) for name, s in tops.items() for i, h in enumerate(s)],
        columns=["model", "method", "layers", "heads", "rank", "layer", "head"],
    )
    return draw("method_overlap", frame)


@drawing("method_overlap")
def _draw_method_overlap(frame: pd.DataFrame) -> Canvas:
    sets = _sets_of(frame, by="method")
    matrix, names, k = overlap_matrix(sets.values()), [method_label(name) for name in sets], frame["rank"].max()
    total = int(frame.layers.iloc[0] * frame.heads.iloc[0])
    side = 0.46 * len(names) + 2.4
    canvas, axes = subplots(max(side, 4.6), max(side, 4.0))
    ax = axes[0, 0]
    _shared_heads(ax, matrix, names, k)
    canvas.suptitle(
        f"{frame.model.iloc[0]}: heads shared by two methods' top {k}\n"
        f"by chance {k * k / total:.1f} expected ({k} x {k} / {total} heads)",
        fontsize=9, fontweight="bold",
    )  # fmt: skip
    return canvas


def _shared_heads(ax, matrix: np.ndarray, names: Sequence[str], k: int) -> None:
    """Numbers of shared heads [lists, lists], darker for a larger share of k; NaN where two were not compared."""
    ax.imshow(matrix / k, cmap="Blues", vmin=0, vmax=1.25)
    for (i, j), shared in np.ndenumerate(matrix):
        words, colour = "–" if np.isnan(shared) else f"{shared:.0f}", "white" if shared > 0.7 * k else "black"
        ax.text(j, i, words, ha="center", va="center", fontsize=9, color=colour)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    ax.spines[:].set_visible(False)


def benchmark_overlap(frame: pd.DataFrame) -> Figure:
    """Heads shared by the top-k lists found on different benchmarks, a matrix a model, a row of matrices a source.

    `frame`: source (whose lists), model, k, heads (of the whole model), a, b (benchmarks; a pair once is enough),
    shared. Raises ValueError unless a panel has one k > 0 and the two rows of a pair, if there are two, agree.
    """
    columns = ("source", "model", "k", "heads", "a", "b", "shared")
    check_columns(frame, columns, "compare the top heads of the benchmarks first")
    for (source, model), own in frame.groupby(["source", "model"], sort=False):
        _check_overlap(f"{model} ({source})", own)
    return draw("benchmark_overlap", frame)


def _check_overlap(panel: str, own: pd.DataFrame) -> None:
    """Raise ValueError unless a panel has one k > 0, and one number from 0 to k for each pair."""
    if own.k.nunique() > 1 or not own.k.min() > 0:
        ks = ", ".join(map(str, sorted(set(own.k))))
        raise ValueError(f"Lists of one k > 0 are compared; {panel} has k={ks}: cut all to one.")
    numbers = {}
    for row in own[own.a != own.b].itertuples():
        pair = f"{panel}: {row.a} and {row.b}"
        if not 0 <= row.shared <= row.k:
            raise ValueError(f"{pair} share {row.shared} of {row.k} heads: count heads, not percent.")
        if numbers.setdefault(frozenset((row.a, row.b)), row.shared) != row.shared:
            raise ValueError(f"{pair} have two numbers of shared heads: keep one.")


@drawing("benchmark_overlap")
def _draw_benchmark_overlap(frame: pd.DataFrame) -> Canvas:
    sources = [list(own.groupby(["model", "source"], sort=False)) for _, own in frame.groupby("source", sort=False)]
    cols, most = max(map(len, sources)), max(len(_lists(own)) for panels in sources for _, own in panels)
    side = min(max(0.42 * most, 2.0), 11.4 / cols)
    canvas, axes = subplots(max(side * cols + 1.5, 4.6), (side + 1.2) * len(sources) + 0.3, len(sources), cols)
    for panels, line in zip(sources, axes):
        for i, (((model, source), own), ax) in enumerate(zip(panels, line)):
            names, k, heads = _lists(own), int(own.k.iloc[0]), own["heads"].iloc[0]
            _shared_heads(ax, _overlap_of(own, names), names, k)
            named = i == 0 or names != _lists(panels[i - 1][1])
            ax.tick_params(length=0, labelleft=named)
            ax.set_title(f"{model} ({source})\ntop {k}, by chance {k * k / heads:.2g}", fontsize=8)
        for ax in line[len(panels) :]:
            ax.set_axis_off()
    canvas.suptitle("Heads shared by the top lists of two benchmarks", fontsize=9, fontweight="bold")
    return canvas


def _lists(pairs: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys([*pairs.a, *pairs.b]))


def _overlap_of(pairs: pd.DataFrame, names: Sequence[str]) -> np.ndarray:
    """Shared heads [names, names], k on the diagonal, NaN where a pair has no row."""
    matrix, at = np.full((len(names), len(names)), np.nan), {name: i for i, name in enumerate(names)}
    for row in pairs.itertuples():
        matrix[[at[row.a], at[row.b]], [at[row.b], at[row.a]]] = row.shared
    np.fill_diagonal(matrix, pairs.k.iloc[0])
    return matrix
