"""How often the box follows where heads are made to look."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Canvas

from vrhlib.figures.checks import check_columns, check_panels
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import COLOUR, LABEL, MARKER, legend_above, span, subplots

_COLUMNS = ["model", "benchmark", "condition", "k", "seed", "rate", "low", "high", "n", "phase"]


def steering(table: pd.DataFrame) -> Figure:
    """Boxes at the segment pointed at against the number of heads that look there, a panel a model.

    `table`: `steering.success` of `steering.sweep`. A line with intervals for the top heads, mean and range over seeds
    for controls; markers are open where heads look there in the prompt too.
    """
    check_columns(table, _COLUMNS, "steer heads and count (steering.success) first")
    check_panels(table, columns=_COLUMNS)
    return draw("steering", table)


@drawing("steering")
def _draw_steering(frame: pd.DataFrame) -> Canvas:
    panels = list(frame.groupby("model", sort=False))
    canvas, axes = subplots(3.1 * len(panels) + 0.4, 3.6, 1, len(panels), sharey=True)
    for (model, own), ax in zip(panels, axes[0]):
        plain = own[own.condition == "unmasked"].iloc[0]
        for i, ((condition, phase), rows) in enumerate(own[own.k > 0].groupby(["condition", "phase"], sort=False)):
            _line(ax, condition, phase, rows.sort_values("k"), plain, 0.15 * i)
        ax.axhline(plain.rate, color="black", lw=0.9, ls=":", label="left alone")
        ax.set(xlabel="heads that look there, k", xticks=sorted(set(own.k)), ylim=(0, None))
        ax.set_title(f"{model}, n={plain.n:.0f}")
    axes[0, 0].set_ylabel("boxes at the segment pointed at (%)")
    legend_above(canvas, axes, 3)
    return canvas


def _line(ax, condition: str, phase: str, rows: pd.DataFrame, plain, beside: float) -> None:
    """A line where there are several numbers of heads, from the model left alone on; else a marker, a little beside."""
    by_k, several = rows.groupby("k"), rows.seed.notna().any()
    ends = (by_k.rate.min(), by_k.rate.max()) if several else (by_k.low.first(), by_k.high.first())
    x, mean, low, high = list(by_k.groups), list(by_k.rate.mean()), list(ends[0]), list(ends[1])
    joined = len(x) > 1
    if joined:
        x, mean, low, high = [0, *x], [plain.rate, *mean], [plain.low, *low], [plain.high, *high]
    seeds = by_k.seed.nunique()
    what = f"range of {span(seeds.min(), seeds.max())} seeds" if several else "95 % interval"
    when = "" if phase == "decode" else ", in the prompt too"
    style = {"color": COLOUR.get(condition, "#0072B2"), "marker": MARKER.get(condition, "v"), "ms": 5, "capsize": 2}
    style |= {"ls": "-" if joined else "none"} | ({} if phase == "decode" else {"mfc": "white"})
    errors = [[m - a for m, a in zip(mean, low)], [b - m for m, b in zip(mean, high)]]
    at = x if joined else [k + beside for k in x]
    ax.errorbar(at, mean, errors, label=f"{LABEL.get(condition, condition)}{when} ({what})", **style)
