"""Models x benchmarks at one number of ablated heads: which tasks the heads serve."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from vrhlib.figures.checks import check_columns, check_one_k
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import COLOUR, HATCH, ink_on, n_of, not_measured, signed, span, star, subplots

COLUMNS = (
    "model", "benchmark", "k", "n", "unmasked", "vrh", "drop", "drop_low", "drop_high", "random_drop",
    "random_drop_low", "random_drop_high", "matched_drop", "blind", "chance", "above_blind", "above_blind_low",
    "above_blind_high",
)  # fmt: skip


def cross_task(table: pd.DataFrame) -> Figure:
    """Table 3 as a picture: accuracy before and after the top heads are ablated, a row a model, a column a benchmark.

    `table`, a row a model and benchmark: model, benchmark, k, n; unmasked, vrh (percent); drop = unmasked - vrh and its
    paired 95 % interval drop_low, drop_high (points); random_drop with random_drop_low, random_drop_high, and
    matched_drop (NaN where there is none); blind (percent, on grey pictures; NaN for a task without a picture), chance
    (percent or NaN); above_blind = unmasked - blind with above_blind_low, above_blind_high (points, paired). Optional:
    like (the real benchmark that this one stands for).

    Shaded by the drop, from 0 to the largest (at least a point). Where a model is not above its blind floor
    (above_blind_low <= 0), nothing shows that it needs the picture to answer: the cell is hatched and has no drop.
    Raises ValueError if a column is missing, a model has several k, a cell several rows, a number of a cell is missing,
    or a difference is not that of its two accuracies.
    """
    check_columns(table, COLUMNS, "measure models on benchmarks, unmasked, ablated and blind, first")
    check_one_k(table)
    if (again := table.duplicated(["model", "benchmark"])).any():
        row = table[again].iloc[0]
        raise ValueError(f"{row.model} on {row.benchmark} has several rows: keep one, the mean over seeds.")
    needed = [c for c in COLUMNS[2:9] if table[c].isna().any()]
    if needed:
        row = table[table[needed[0]].isna()].iloc[0]
        raise ValueError(f"{row.model} on {row.benchmark} has no {needed[0]}: measure it, or leave its row out.")
    _check_difference(table, "drop", "unmasked", "vrh")
    _check_difference(table[table.blind.notna()], "above_blind", "unmasked", "blind")
    return draw("cross_task", table)


def _check_difference(table: pd.DataFrame, name: str, of: str, less: str) -> None:
    """Raise ValueError unless a column is the difference of two others and has the lower end of its interval."""
    off = table[~((table[of] - table[less] - table[name]).abs() <= 0.5) | table[f"{name}_low"].isna()]
    if len(off):
        row = off.iloc[0]
        raise ValueError(
            f"{row.model} on {row.benchmark}: {name} is {row[name]:.1f} [{row[f'{name}_low']:.1f}, "
            f"{row[f'{name}_high']:.1f}], but {of} - {less} is {row[of] - row[less]:.1f}: "
            "give the difference of the two in points (positive where the first is higher) and its interval."
        )


@drawing("cross_task")
def _draw_cross_task(table: pd.DataFrame) -> Canvas:
    models, benchmarks = (list(dict.fromkeys(table[column])) for column in ("model", "benchmark"))
    floor = table.above_blind_low <= 0  # missing for a task without a picture, which has no floor
    most = table.loc[~floor, "drop"].max()
    scale = Normalize(0, np.fmax(most, 1.0), clip=True)  # less than a point is no full shade
    shades = LinearSegmentedColormap.from_list("drop", ["#FFFFFF", COLOUR["vrh"]])
    titles = [_title(name, table[table.benchmark == name]) for name in benchmarks]
    ks = [table.loc[table.model == model, "k"].iloc[0] for model in models]
    names = [f"{textwrap.fill(model, 20)}\n{k:.0f} heads cut" for model, k in zip(models, ks)]
    across, down = (max(words.count("\n") + 1 for words in labels) for labels in (titles, names))
    width = max(1.75 * len(benchmarks) + 1.7, 6.0)
    height = max(0.78, 0.16 * down) * len(models) + 0.16 * across + 1.55 + 1.6 / width
    canvas, axes = subplots(width, height)
    ax = axes[0, 0]
    rows = {(row.model, row.benchmark): row for row in table.itertuples()}
    for y, model in enumerate(models):
        for x, benchmark in enumerate(benchmarks):
            if row := rows.get((model, benchmark)):
                _cell(ax, x, y, row, shades(scale(row.drop)))
            else:
                not_measured(ax, x, y, ha="center")
    ax.set(xlim=(-0.5, len(benchmarks) - 0.5), ylim=(len(models) - 0.5, -0.5))
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(benchmarks)), titles, fontsize=8)
    ax.set_yticks(range(len(models)), names, fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if most > 0:
        style = {"location": "bottom", "pad": 0.02, "shrink": min(1.0, 4.2 / width), "aspect": 40, "fraction": 0.05}
        bar = canvas.colorbar(ScalarMappable(scale, shades), ax=ax, **style)
        bar.set_label("shade: drop in accuracy without the top heads (points)", fontsize=8)
        bar.ax.tick_params(labelsize=7.5)
    words = "not above blind: not shown to beat its accuracy on grey pictures, so that a drop means nothing"
    key = Patch(fc=COLOUR["not above blind"], ec="#AAAAAA", hatch=HATCH["not above blind"], lw=0.8, label=words)
    style = {"title": textwrap.fill(_legend(table), round(17 * width)), "title_fontsize": 8, "fontsize": 8}
    canvas.legend(handles=[key] if floor.any() else [], loc="outside upper center", **style)
    return canvas


def _legend(table: pd.DataFrame) -> str:
    """What the lines of a cell mean, and the star."""
    matched = bool(table.matched_drop.notna().any())
    words = "Cells: accuracy (%) unmasked → without the top heads, and the change in points [95 % interval, paired]; "
    words += f"the change without as many random heads{', layer-matched random heads (matched)' * matched}; "
    words += "blind: accuracy on grey pictures. *\u00a0where the 95 % interval excludes 0"
    return f"{words}{' (matched has none)' * matched}."


def _title(benchmark: str, own: pd.DataFrame) -> str:
    """A benchmark's name, what it stands for, its number of samples, and what guessing gives."""
    lines = textwrap.wrap(benchmark, 24)
    if "like" in own and own["like"].notna().any():
        lines += textwrap.wrap(f"like {own['like'].dropna().iloc[0]}", 28)
    chance = own.chance.dropna()
    guess = f", chance {span(chance.min(), chance.max(), 1)}" if len(chance) else ""
    return "\n".join([*lines, n_of(own) + guess])


def _cell(ax, x: int, y: int, row, shade: Sequence[float]) -> None:
    if row.above_blind_low <= 0:
        shade, hatch = COLOUR["not above blind"], HATCH["not above blind"]
        behind = {"boxstyle": "square,pad=0.2", "fc": "white", "ec": "none", "alpha": 0.85}
        gap = f"{signed(row.above_blind)} [{_end(row.above_blind_low)}, {_end(row.above_blind_high)}]"
        lines = [_accuracies(row), "not above blind", f"blind {row.blind:.1f}", f"above it {gap}"]
    else:
        hatch, behind, lines = None, None, _effect(row)
    ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc=shade, ec="#AAAAAA", lw=0.8, hatch=hatch, clip_on=False))
    style = {"ha": "center", "va": "center", "fontsize": 7.5, "linespacing": 1.25, "color": ink_on(shade)}
    ax.text(x, y, "\n".join(lines), bbox=behind, **style)


def _accuracies(row) -> str:
    return f"{row.unmasked:.1f} → {row.vrh:.1f}"


def _effect(row) -> list[str]:
    """What a cell says: the two accuracies, the change and its interval, that of the controls, the blind floor."""
    ends = f"[{_end(-row.drop_high)}, {_end(-row.drop_low)}]"
    lines = [_accuracies(row), f"{signed(-row.drop)}{star(row.drop_low, row.drop_high)} {ends}"]
    random = f"random {signed(-row.random_drop)}{star(row.random_drop_low, row.random_drop_high)}"
    controls = [] if pd.isna(row.random_drop) else [random]
    controls += [] if pd.isna(row.matched_drop) else [f"matched {signed(-row.matched_drop)}"]
    lines += [" · ".join(controls)] if controls else []
    return [*lines, "no picture to hide" if pd.isna(row.blind) else f"blind {row.blind:.1f}"]


def _end(value: float) -> str:
    """An end of an interval in whole points, or to one decimal where that would round it to 0; 0 has no sign."""
    return "0" if abs(value) < 0.05 else signed(value, 0 if abs(value) > 0.5 else 1)
