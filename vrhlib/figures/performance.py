"""What the library's shortcuts cost and save: ratios with their targets, and how cost grows."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Canvas

from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import COLOUR, HATCH, subplots

_VERDICT = {  # colour, hatch, words
    "yes": (COLOUR["correct"], None, "target met"),
    "no": (COLOUR["wrong box"], HATCH["wrong box"], "target missed"),
    "": (COLOUR["random"], None, "no target"),
}
_AXIS = {"samples": ("o", "-"), "conditions": ("s", "--"), "image tokens": ("^", "-.")}
_CURVE = {"samples": "#0072B2", "conditions": "#D55E00", "image tokens": "#009E73"}


def performance(table: pd.DataFrame) -> Figure:
    """Bars of ratios (log scale) with lowest and highest round, targets as black ticks; beside them time against the
    number of samples, conditions and image tokens, all relative to the smallest.

    `table`: panel (`ratio` or `growth`), measure (of a ratio; of growth what grows), x (growth alone), ratio, low,
    high; of ratios target (`<= 1.1`, `>= 5`, or nothing) and met (yes, no, or nothing). Raises ValueError without any
    ratio."""
    if not (table.panel == "ratio").any():
        raise ValueError("There is no ratio to draw: run `python -m benchmarks` first.")
    return draw("performance", table)


@drawing("performance")
def _draw_performance(table: pd.DataFrame) -> Canvas:
    bars, growth = table[table.panel == "ratio"], table[table.panel == "growth"]
    canvas, axes = subplots(12.4, 1.3 + 0.27 * len(bars), 1, 2, width_ratios=[1.5, 1])
    _bars(axes[0, 0], bars)
    _growth(axes[0, 1], growth)
    return canvas


def _bars(ax, rows: pd.DataFrame) -> None:
    seen = set()
    for y, row in enumerate(rows.itertuples()):
        met = row.met if isinstance(row.met, str) else ""
        colour, hatch, words = _VERDICT[met]
        ax.barh(y, row.ratio - 1, 0.66, left=1, color=colour, hatch=hatch, ec="#555555", lw=0.5,
                label=None if met in seen else words)  # fmt: skip
        seen.add(met)
        ax.plot([row.low, row.high], [y, y], color="black", lw=1)
        target, end = row.target if isinstance(row.target, str) else "", max(row.high, row.ratio, 1)
        if target:
            at = float(target.split()[-1])
            ax.plot([at, at], [y - 0.42, y + 0.42], color="black", lw=2.2)
            end = max(end, at)
        told = f"{row.ratio:.2f}" + (f"  ({target.replace('<=', '≤').replace('>=', '≥')})" if target else "")
        ax.annotate(told, (end, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5)
    ax.axvline(1, color="black", lw=0.8)
    ax.set_xscale("log")
    ends = rows[["low", "high", "ratio"]].to_numpy()
    ax.set(yticks=range(len(rows)), xlim=(min(0.5, 0.9 * ends.min()), 2.6 * max(5, ends.max())))
    ax.set_yticklabels(rows.measure, fontsize=7.5)
    ticks = [t for t in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.invert_yaxis()
    ax.set_xlabel("ratio of CPU time (of peak memory where it says so), log scale;\nline: rounds, tick: target")
    ax.set_title("Two ways to the same result")
    ax.legend(fontsize=7.5, loc="lower left")  # only shares of memory, the first bars, reach so far left


def _growth(ax, rows: pd.DataFrame) -> None:
    widest = 1.0
    for axis, own in rows.groupby("measure", sort=False):
        times = own.x / own.x.min()
        widest = max(widest, times.max())
        marker, dash = _AXIS.get(axis, ("v", ":"))
        label = f"{axis}: {own.x.min():.0f} to {own.x.max():.0f}"
        ax.plot(times, own.ratio, marker=marker, ls=dash, ms=5, label=label, color=_CURVE.get(axis, "#CC79A7"))
        ax.fill_between(times, own.low, own.high, color=_CURVE.get(axis, "#CC79A7"), alpha=0.15, lw=0)
    ax.plot([1, widest], [1, widest], color="black", lw=0.9, ls=":", label="linear")
    ax.set(xscale="log", yscale="log", xlabel="times as many", ylabel="times as long")
    highest = max([widest, *rows.high])
    for axis, end in ((ax.xaxis, widest), (ax.yaxis, highest)):
        powers = [2**i for i in range(12) if 2**i <= 1.01 * end]
        axis.set_ticks(powers, [f"{power:g}" for power in powers])
        axis.set_ticks([], minor=True)
    ax.set_title("How cost grows")
    ax.legend(fontsize=7.5, loc="upper left")
