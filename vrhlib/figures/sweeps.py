"""Accuracy against the number k of ablated heads: a line a condition, controls as bands over their seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from vrhlib.figures.checks import ACCURACY_COLUMNS, check_conditions, check_draws, check_panels
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import (
    COLOUR,
    CONDITIONS,
    LABEL,
    MARKER,
    handles_of,
    legend_above,
    looks_of,
    method_label,
    n_of,
    not_measured,
    seeds_of,
    subplots,
)


def accuracy_vs_k(sweep: pd.DataFrame) -> Figure:
    """Accuracy against the number of ablated heads: lines with 95 % Wilson intervals, controls as bands over seeds.

    `sweep` as `evaluate.ablation_sweep` returns it.
    """
    return draw("accuracy_vs_k", sweep)


@drawing("accuracy_vs_k")
def _draw_accuracy_vs_k(sweep: pd.DataFrame) -> Canvas:
    panels = list(sweep.groupby(["model", "benchmark"], sort=False))
    canvas, axes = subplots(4.6 * len(panels), 3.9, 1, len(panels), sharey=True)
    for ((model, benchmark), frame), ax in zip(panels, axes[0]):
        base = frame[frame.condition == "unmasked"].iloc[0]
        for condition, rows in frame[frame.condition != "unmasked"].groupby("condition", sort=False):
            _line(ax, condition, rows, base)
        ax.axhline(base.accuracy, color=COLOUR["unmasked"], lw=0.9, ls=":")
        ax.annotate(
            f"unmasked {base.accuracy:.1f}", (1, base.accuracy), xycoords=("axes fraction", "data"), ha="right",
            xytext=(0, 3), textcoords="offset points", fontsize=7.5,
        )  # fmt: skip
        ax.set(xlabel="ablated heads k", ylabel="Acc@IoU 0.5 (%)", ylim=(0, 100), xticks=sorted(frame.k.unique()))
        ax.set_title(f"{model} on {benchmark}, n={base.n} a point")
    legend_above(canvas, axes)
    return canvas


def _line(ax, condition: str, rows: pd.DataFrame, base, name: str = "", seeds: str = "", **more) -> None:
    """A condition's accuracy against k, from the unmasked model on; `name` and `seeds` (how many) replace the words of
    the legend that would be read from the table of labels and from the rows."""
    colour, several = COLOUR.get(condition, "#56B4E9"), rows.seed.nunique() > 1
    by_k = rows.groupby("k").accuracy
    x, mean = [0, *by_k.groups], [base.accuracy, *by_k.mean()]
    spread = f"mean and range of {seeds or rows.seed.nunique()} seeds" if several else "95 % interval"
    style = {"color": colour, "marker": MARKER.get(condition, "v"), "ms": 4, "lw": 1.6}
    style |= {"ls": "--" if several and condition == "layer_matched" else "-"}
    style |= {"label": f"{name or LABEL.get(condition, condition)} ({spread})"} | more
    if several:
        low, high = [base.accuracy, *by_k.min()], [base.accuracy, *by_k.max()]
        ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
        ax.plot(x, mean, **style)
    else:
        rows = rows.sort_values("k")
        low, high = [base.low, *rows.low], [base.high, *rows.high]
        errors = [np.subtract(mean, low), np.subtract(high, mean)]
        ax.errorbar(x, mean, np.abs(errors), capsize=2, elinewidth=1.6, **style)


def _draws(ax, condition: str, rows: pd.DataFrame, seeds: str) -> None:
    """Random heads where they were cut and nowhere between: mean and range of the draws at each k."""
    by_k = rows.groupby("k").accuracy
    mean = by_k.mean()
    label = f"{LABEL[condition]} ({f'mean and range of {seeds} draws' if seeds else 'one draw'})"
    style = {"color": COLOUR[condition], "marker": MARKER[condition], "ms": 5, "capsize": 2.5, "elinewidth": 1.4}
    ax.errorbar(mean.index, mean, [mean - by_k.min(), by_k.max() - mean], ls="none", label=label, **style)


_OURS = {"random": {}, "layer_matched": {}, "vrh": {"lw": 2.6, "ms": 6, "zorder": 4}}


def prior_methods(table: pd.DataFrame) -> Figure:
    """Figure 3: accuracy against the number of ablated heads, for VRHs, the heads of prior methods and random heads.

    `table` as `evaluate.accuracy_table` returns it; a condition beside unmasked, vrh and random is a method's name,
    which may say its data (`retrieval_heads@needle`). Raises ValueError unless each model has one benchmark and an
    unmasked row.
    """
    check_panels(table)
    return draw("prior_methods", table)


@drawing("prior_methods")
def _draw_prior_methods(table: pd.DataFrame) -> Canvas:
    models = list(table.groupby("model", sort=False))
    canvas, axes = _two_columns(len(models), (3.9, 3.1), (2.9, 0.5))
    looks = looks_of([c for c in dict.fromkeys(table.condition) if c not in ("unmasked", *_OURS)])
    for (_, own), ax in zip(models, axes.flat):
        base, by = _ablation_panel(ax, own, _OURS), dict(list(own.groupby("condition")))
        for name in (name for name in looks if name in by):
            mean = by[name].groupby("k").accuracy.mean()
            look = {"lw": 1.4, "ms": 5, "zorder": 3, "label": method_label(name)} | looks[name]
            ax.plot([0, *mean.index], [base.accuracy, *mean], **look)
    handles = handles_of(axes, first=[LABEL["vrh"]])
    canvas.legend(handles.values(), handles, fontsize=8, loc="outside right upper", handlelength=3.6)
    return canvas


def _two_columns(panels: int, size: tuple[float, float], more: tuple[float, float]) -> tuple[Canvas, np.ndarray]:
    """Panels of accuracy against k in a row, or in two columns from the third on; `more` inches beside all of them."""
    rows, cols = (1, panels) if panels < 3 else (-(-panels // 2), 2)
    canvas, axes = subplots(size[0] * cols + more[0], size[1] * rows + more[1], rows, cols, sharey=True)
    for ax in axes.flat[panels:]:
        ax.set_axis_off()
    for ax in axes.flat[max(0, panels - cols) : panels]:
        ax.set_xlabel("ablated heads k (square-root scale)")
    canvas.supylabel("Acc@IoU 0.5 (%)", fontsize=9)
    return canvas, axes


def _ablation_panel(ax, own: pd.DataFrame, lines: Mapping[str, dict]):
    """The unmasked model and a line for each of `lines` that was measured, in that order; returns the unmasked row."""
    base, by = own[own.condition == "unmasked"].iloc[0], dict(list(own.groupby("condition")))
    ax.axhline(base.accuracy, color=COLOUR["unmasked"], lw=0.9, ls=":", label="unmasked")
    for condition, style in lines.items():
        if condition in by and "draws" in style:
            _draws(ax, condition, by[condition], style["draws"])
        elif condition in by:
            for _, rows in by[condition].groupby(style.get("by", "condition"), sort=False):
                _line(ax, condition, rows, base, **{key: style[key] for key in style if key != "by"})
    _k_axis(ax, own.k)
    ax.set_title(f"{own.model.iloc[0]} on {base.benchmark}\nunmasked {base.accuracy:.1f}, {n_of(own)} a point")
    return base


def _k_axis(ax, ks: pd.Series) -> None:
    """Percent against k on a square-root axis with a tick at every k."""
    ax.set_xscale("function", functions=(lambda k: np.sign(k) * np.sqrt(np.abs(k)), lambda r: r * np.abs(r)))
    ax.set(ylim=(-3, 103), xlim=(-0.05, ks.max() * 1.06), xticks=sorted(ks.unique()))
    ax.grid(axis="y", color="#eeeeee", lw=0.6)


def universality(table: pd.DataFrame) -> Figure:
    """Figure 4: accuracy against the number of ablated heads, a row of panels a model, a column a benchmark.

    `table`: model, benchmark, family, heads (of the whole model), chance (percent, NaN where unknown), condition
    (unmasked, vrh, random, layer_matched), k, seed, accuracy, low, high, n. Raises ValueError if a panel has no
    unmasked row, a condition is another, or rows of one point have no seeds.
    """
    columns = (*ACCURACY_COLUMNS, "low", "high", "family", "heads", "chance")
    check_panels(table, by=("model", "benchmark"), columns=columns)
    check_conditions(table, CONDITIONS, "line")
    check_draws(table)
    return draw("universality", table)


@drawing("universality")
def _draw_universality(table: pd.DataFrame) -> Canvas:
    models, benchmarks = (list(dict.fromkeys(table[column])) for column in ("model", "benchmark"))
    legend = 0.8 if len(benchmarks) < 3 else 0.0  # a narrow page stacks its entries
    size = max(2.3 * len(benchmarks) + 1.1, 4.8), 1.8 * len(models) + 1.5 + legend
    canvas, axes = subplots(*size, len(models), len(benchmarks), sharey=True)
    seeds = {c: seeds_of(table[table.condition == c]) for c in ("random", "layer_matched")}
    scales = {(tuple(sorted(own.k.unique())), own["heads"].iloc[0]) for _, own in table.groupby("model")}
    for model, line in zip(models, axes):
        own = table[table.model == model]
        for benchmark, ax in zip(benchmarks, line):
            _benchmark_panel(ax, own[own.benchmark == benchmark], seeds)
            _k_axis(ax, own.k)
            ax.set_xticklabels(_k_and_share(sorted(own.k.unique()), own["heads"].iloc[0]))
            ax.tick_params(labelsize=7, labelbottom=len(scales) > 1 or model == models[-1])
        line[0].set_yticks(range(0, 101, 25))
        line[0].set_ylabel(f"{model}\n{own['heads'].iloc[0]:.0f} heads", fontsize=8, fontweight="bold")
    for benchmark, top, bottom in zip(benchmarks, axes[0], axes[-1]):
        family = table.loc[table.benchmark == benchmark, "family"].dropna()
        words = [*textwrap.wrap(benchmark, 26), *family.iloc[:1]]
        top.set_title("\n".join(words), pad=15)
        bottom.set_xlabel("ablated heads k (square-root\nscale), share of all heads", fontsize=7.5)
    canvas.supylabel("accuracy (%)", fontsize=9)
    legend_above(canvas, axes, columns=5 if len(benchmarks) > 3 else None)
    return canvas


def _benchmark_panel(ax, rows: pd.DataFrame, seeds: Mapping[str, str]) -> None:
    if rows.empty:
        not_measured(ax, 0.5, 0.5, ha="center", transform=ax.transAxes)
        return
    base = rows[rows.condition == "unmasked"].iloc[0]
    ax.axhline(base.accuracy, color=COLOUR["unmasked"], lw=0.9, ls="--", label="unmasked")
    for condition, cut in rows[rows.condition != "unmasked"].groupby("condition", sort=False):
        if condition in seeds:
            _draws(ax, condition, cut, seeds[condition])
        else:
            _line(ax, condition, cut, base)
    if not pd.isna(base.chance):
        ax.axhline(base.chance, color=COLOUR["chance"], lw=0.9, ls=":", label="chance")
    above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right", "fontsize": 7}
    ax.annotate(n_of(rows), (1, 1), xycoords="axes fraction", **above)


def _k_and_share(ks: Sequence[int], heads: float) -> list[str]:
    """A label for every k, its share of all heads on a second line; "" where the next one would be printed over."""
    shares, labelled = _apart(ks, 0.2), _apart(ks, 0.07)
    share = {k: f"\n{100 * k / heads:{'.0f' if 10 * k >= heads else '.2g'}} %" for k in shares}
    return [f"{k:.0f}{share.get(k, '')}" if k in labelled else "" for k in ks]


def _apart(ks: Sequence[int], least: float) -> list[int]:
    """Those k that stand at least this part of a square-root axis apart, from the largest down."""
    kept = []
    for k in sorted(ks, reverse=True):
        if not kept or np.sqrt(kept[-1]) - np.sqrt(k) >= least * np.sqrt(max(ks)):
            kept.append(k)
    return kept


_TRANSFER = {
    "vrh": _OURS["vrh"] | {"name": "own heads (VRH)"},
    "borrowed": {"ms": 9, "lw": 2.0, "ls": "-.", "mfc": "none", "mew": 1.8, "zorder": 5},  # open: often on own heads
    "other_backbone": {"ms": 5, "ls": ":", "zorder": 3, "by": "seed"},  # a line for each donor
    "random": {}, "layer_matched": {},
}  # fmt: skip


def transfer(table: pd.DataFrame) -> Figure:
    """Figure 6: accuracy against k without a model's own heads, and without the heads that other models would name.

    `table`: model, benchmark, condition (unmasked, vrh, borrowed, other_backbone, random, layer_matched), k, seed (of
    other_backbone: the number of the donor, each of which has a line), accuracy, low, high, n. Raises ValueError unless
    each model has one benchmark and an unmasked row, every condition is known, and rows of one point have seeds.
    """
    check_panels(table, columns=(*ACCURACY_COLUMNS, "low", "high"))
    check_conditions(table, list(_TRANSFER), "line")
    check_draws(table)
    return draw("transfer", table)


@drawing("transfer")
def _draw_transfer(table: pd.DataFrame) -> Canvas:
    models = list(table.groupby("model", sort=False))
    canvas, axes = _two_columns(len(models), (4.3, 2.9), (0.3, 1.1))
    controls = {c: {"draws": seeds_of(table[table.condition == c])} for c in ("random", "layer_matched")}
    lines = _TRANSFER | controls
    for (_, own), ax in zip(models, axes.flat):
        _ablation_panel(ax, own, lines)
    names = [style.get("name", LABEL[condition]) for condition, style in _TRANSFER.items()]
    legend_above(canvas, axes, first=[LABEL["unmasked"], *names])
    return canvas
