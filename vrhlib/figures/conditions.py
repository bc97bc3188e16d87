"""Conditions side by side, a number of ablated heads at a time: what accuracy is left, and what the replies become."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.figure import Figure as Canvas

from vrhlib.figures.checks import ACCURACY_COLUMNS, check_conditions, check_one_k, check_panels, check_sums
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import (
    COLOUR,
    CONDITIONS,
    HATCH,
    LABEL,
    MARKER,
    legend_above,
    n_of,
    not_measured,
    seeds_of,
    signed,
    stacked_bars,
    star,
    subplots,
)


def ablation_by_model(table: pd.DataFrame) -> Figure:
    """Accuracy of several models: unmasked, top heads cut, random heads cut. Side by side stand the numbers of heads
    cut, or the benchmarks if there are several.

    `table` as `evaluate.accuracy_table` returns it; raises ValueError if a model has several benchmarks and several k.
    """
    cut = table[table.condition != "unmasked"].groupby("model")
    if ((cut.k.nunique() > 1) & (cut.benchmark.nunique() > 1)).any():
        raise ValueError("Several benchmarks and several k: select the rows of one k for each model.")
    return draw("ablation_by_model", table)


@drawing("ablation_by_model")
def _draw_ablation_by_model(table: pd.DataFrame) -> Canvas:
    models, by = list(table.groupby("model", sort=False)), "benchmark" if table.benchmark.nunique() > 1 else "k"
    groups = max(own.loc[own.condition != "unmasked", by].nunique() for _, own in models)
    canvas, axes = subplots(max(2.5, 0.75 * groups + 1.4) * len(models) + 0.5, 3.6, 1, len(models), sharey=True)
    offset = {"unmasked": -0.24, "random": -0.08, "layer_matched": 0.08, "vrh": 0.24}
    draws = {condition: seeds_of(table[table.condition == condition]) for condition in offset}
    for (model, own), ax in zip(models, axes[0]):
        names = list(dict.fromkeys(own.loc[own.condition != "unmasked", by]))
        for condition, x in offset.items():
            mine = own[own.condition == condition]
            for i, name in enumerate(names):
                rows = mine if condition == "unmasked" and by == "k" else mine[mine[by] == name]
                if rows.empty:
                    continue
                mean, seeds = rows.accuracy.mean(), draws[condition]
                ends = (rows.accuracy.min(), rows.accuracy.max()) if seeds else (rows.low.min(), rows.high.max())
                label = f"{LABEL[condition]} ({f'mean and range of {seeds} seeds' if seeds else '95 % interval'})"
                ax.errorbar(
                    i + x, mean, [[mean - ends[0]], [ends[1] - mean]], fmt=MARKER.get(condition, "_"), ms=5, capsize=2,
                    color=COLOUR[condition], label=label, clip_on=False,
                )  # fmt: skip
        ticks = [f"{name} heads" for name in names] if by == "k" else names
        ax.set(ylim=(0, 103), xlim=(-0.6, len(names) - 0.4), xticks=range(len(names)), xticklabels=ticks)
        ax.tick_params(axis="x", rotation=0 if by == "k" else 30)
        ax.set_title(f"{model}\n{'' if by == 'k' else f'k={own.k.max()}, '}n={own.n.min()} each")
        ax.grid(axis="y", color="#eeeeee", lw=0.6)
    axes[0, 0].set_ylabel("Acc@IoU 0.5 (%)")
    legend_above(canvas, axes)
    return canvas


VARIANTS = ("random", "layer_matched", "vrh", "flip_q", "flip_phi", "flip_omega", "q_union")


def variants(table: pd.DataFrame) -> Figure:
    """Figure 2: accuracy without the top heads of each variant of the score, one panel a model.

    `table`: model, benchmark, condition (unmasked, random, vrh, flip_q, ...), k, seed, accuracy, low, high, n, and each
    variant's change against vrh with its paired interval (change, change_low, change_high), in percentage points.
    Raises ValueError unless each model has one k, one benchmark and an unmasked row, and every condition is known.
    """
    check_panels(table)
    check_one_k(table[table.condition != "unmasked"])
    check_conditions(table, VARIANTS, "bar")
    return draw("variants", table)


@drawing("variants")
def _draw_variants(table: pd.DataFrame) -> Canvas:
    models = list(table.groupby("model", sort=False))
    canvas, axes = subplots(max(3.3 * len(models) + 0.6, 5.4), 4.4, 1, len(models), sharey=True)
    for (model, own), ax in zip(models, axes[0]):
        base, cut = own[own.condition == "unmasked"].iloc[0], own[own.condition != "unmasked"]
        present = [c for c in VARIANTS if (cut.condition == c).any()]
        for x, condition in enumerate(present):
            _variant_bar(ax, x, condition, cut[cut.condition == condition])
        ax.axhline(base.accuracy, color=COLOUR["unmasked"], lw=1.1, ls="--", label="unmasked")
        labels = [LABEL[c].replace(" (", "\n(") for c in present]
        ax.set_xticks(range(len(present)), labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
        ax.set(ylim=(0, 112), xlim=(-0.6, len(present) - 0.4), yticks=range(0, 101, 20))
        words = f"k={cut.k.max():.0f}, unmasked {base.accuracy:.1f}, {n_of(own)} each"
        ax.set_title(f"{model} on {base.benchmark}\n{words}")
    axes[0, 0].set_ylabel("Acc@IoU 0.5 (%)")
    seeds = table[table.condition == "random"].groupby("model").seed.nunique().min()
    spread = f"; random heads: mean and range of {seeds} seeds" if seeds > 1 else ""
    words = f"Whiskers: 95 % Wilson intervals{spread}. "
    words += "Numbers: change against VRH in points, *\u00a0where its 95 % interval (paired bootstrap) excludes 0. "
    words += "Dashed: unmasked."
    canvas.suptitle(textwrap.fill(words, round(15 * canvas.get_figwidth())), fontsize=8, color="#333333")
    return canvas


def _variant_bar(ax, x: int, condition: str, rows: pd.DataFrame) -> None:
    mean, low, high = _point(rows)
    ax.bar(x, mean, 0.72, color=COLOUR[condition], hatch=HATCH.get(condition), ec="white", lw=0)
    ax.errorbar(x, mean, [[mean - low], [high - mean]], color="black", capsize=2.5, lw=1)
    row = rows.iloc[0]
    if condition in ("random", "layer_matched", "vrh") or pd.isna(row.change):
        return
    words = signed(row.change) + star(row.change_low, row.change_high)
    behind = {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.85}
    ax.text(x, high + 2.5, words, ha="center", fontsize=8, bbox=behind)


def _point(rows: pd.DataFrame) -> tuple[float, float, float]:
    """Accuracy and its ends: mean and range of several seeds, or the one value with its 95 % interval."""
    mean = rows.accuracy.mean()
    if rows.seed.nunique() > 1:
        return mean, rows.accuracy.min(), rows.accuracy.max()
    return mean, min(mean, rows.low.min()), max(mean, rows.high.max())


# In the order of `outcomes.OUTCOMES`, which is not imported: outcomes needs the models (torch).
OUTCOMES = ("correct", "wrong box", "degenerate", "malformed", "cut off", "no box")


def outcomes(table: pd.DataFrame) -> Figure:
    """Figure 7a: what becomes of the replies, one panel a model, a bar for each condition divided into its outcomes.

    `table` as `evaluate.accuracy_table` returns it for a grounding benchmark: model, benchmark, condition (unmasked,
    random, layer_matched, vrh), k, seed, accuracy, n, and the percentage of each of `OUTCOMES`; bars are means over
    seeds. Raises ValueError unless each model has one benchmark, one k beside 0, and shares that sum to 100.
    """
    check_panels(table, columns=(*ACCURACY_COLUMNS, *OUTCOMES))
    check_conditions(table, CONDITIONS, "bar")
    cut = table[table.condition != "unmasked"]
    check_one_k(cut)
    if bare := [model for model in dict.fromkeys(table.model) if model not in set(cut.model)]:
        raise ValueError(f"Nothing was ablated in {', '.join(bare)}: add the rows of one k for each model.")
    check_sums(table, OUTCOMES, "condition", "outcomes", "replies")
    return draw("outcomes", table)


@drawing("outcomes")
def _draw_outcomes(table: pd.DataFrame) -> Canvas:
    models = list(table.groupby("model", sort=False))
    conditions = [c for c in CONDITIONS if (table.condition == c).any()]
    cols = min(2, len(models))
    rows = -(-len(models) // cols)
    height = (0.36 * len(conditions) + 0.75) * rows + 0.9
    canvas, axes = subplots(4.4 * cols + 1.5, height, rows, cols, sharex=True, sharey=True)
    parts = {outcome: outcome for outcome in OUTCOMES if table[outcome].sum() > 0}
    for (model, own), ax in zip(models, axes.flat):
        means = own.groupby("condition")[list(parts)].mean().fillna(0.0)
        present = [c for c in conditions if c in means.index]
        stacked_bars(ax, [conditions.index(c) for c in present], means.loc[present], parts)
        for y in set(range(len(conditions))) - {conditions.index(c) for c in present}:
            not_measured(ax, 1.5, y)
        controls = own[own.condition.isin(["random", "layer_matched"])]
        words = f", controls: {f'mean of {seeds_of(controls)} seeds' if seeds_of(controls) else '1 seed'}"
        ax.set_title(
            f"{model} on {own.benchmark.iloc[0]}, k={own.k.max():.0f}\n{n_of(own)}{words if len(controls) else ''}"
        )
        ax.tick_params(axis="y", length=0)
    axes[0, 0].set(xlim=(0, 100), ylim=(len(conditions) - 0.5, -0.5))
    axes[0, 0].set_yticks(range(len(conditions)), [LABEL[c] for c in conditions])
    for ax in axes.flat[max(0, len(models) - cols) : len(models)]:
        ax.set_xlabel("share of replies (%)")
        ax.tick_params(labelbottom=True)
    for ax in axes.flat[len(models) :]:
        ax.set_axis_off()
    legend_above(canvas, axes, columns=len(parts))
    return canvas
