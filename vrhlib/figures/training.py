"""What training on masked negatives changes: accuracy against the untrained model, and how training went."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure as Canvas

from vrhlib.figures.checks import check_columns
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import (
    COLOUR,
    DASH,
    HATCH,
    LABEL,
    MARKER,
    legend_above,
    n_of,
    not_measured,
    span,
    subplots,
)

TRAINED = ("dpo vrh", "dpo random", "sft")
_MEAN = "mean of benchmarks"  # the group that stands apart


def _check_trained(table: pd.DataFrame, mark: str) -> None:
    """Raise ValueError if a condition is no way of training."""
    if unknown := set(table.condition) - set(TRAINED):
        raise ValueError(f"No {mark} for {', '.join(sorted(unknown))}: conditions are {', '.join(TRAINED)}.")


def gains(table: pd.DataFrame) -> Figure:
    """Figure A3: accuracy against the untrained model, a group of bars a benchmark, the mean of benchmarks set apart.

    `table`: benchmark (or "mean of benchmarks"), condition (of `TRAINED`), seed (NA in the row of their mean), gain
    (points), low, high (of a mean: 95 % interval, paired bootstrap over pictures; NaN in a seed's row), seeds (how many
    the mean is of), n, unmasked (accuracy of the untrained model, percent). Raises ValueError if a condition is
    another, if a mean has no seeds, seeds no mean or another number than `seeds`, or a benchmark two untrained
    accuracies.
    """
    columns = ("benchmark", "condition", "seed", "gain", "low", "high", "seeds", "n", "unmasked")
    check_columns(table, columns, "evaluate the trained models first")
    _check_trained(table, "bar")
    for (benchmark, condition), own in table.groupby(["benchmark", "condition"], sort=False):
        _check_seeds(f"{condition} on {benchmark}", own)
    for benchmark, own in table.groupby("benchmark", sort=False):
        if own.unmasked.max() - own.unmasked.min() > 0.05:
            raise ValueError(f"{benchmark} has several untrained accuracies: select the rows of one model.")
    return draw("gains", table)


def _check_seeds(name: str, own: pd.DataFrame) -> None:
    means, seeds = own[own.seed.isna()], own[own.seed.notna()]
    if not len(seeds):
        raise ValueError(f"{name} has a mean without seeds: add a row for each seed.")
    if not len(means):
        raise ValueError(f"{name} has seeds without a mean: add a row with seed NA and the mean's interval.")
    if len(means) > 1 or seeds.seed.duplicated().any():
        raise ValueError(f"{name} has several rows for its mean or a seed: select the rows of one model.")
    if means.seeds.iloc[0] != len(seeds):
        raise ValueError(f"{name} is a mean of {means.seeds.iloc[0]} seeds, but has rows for {len(seeds)}: add them.")


@drawing("gains")
def _draw_gains(table: pd.DataFrame) -> Canvas:
    groups = sorted(dict.fromkeys(table.benchmark), key=lambda name: name == _MEAN)
    places = [i + 0.3 * (name == _MEAN and i > 0) for i, name in enumerate(groups)]
    conditions = [c for c in TRAINED if (table.condition == c).any()]
    slot = 0.86 / len(conditions)
    canvas, axes = subplots(max(1.3 * places[-1] + 3.0, 5.6), 4.3)
    ax = axes[0, 0]
    for i, condition in enumerate(conditions):
        rows = table[table.condition == condition]
        label = f"{LABEL[condition]} ({_spread(rows.loc[rows.seed.isna(), 'seeds'], 'mean of {}')})"
        for place, group in zip(places, groups):
            own, x = rows[rows.benchmark == group], place + (i - (len(conditions) - 1) / 2) * slot
            if own.empty:
                not_measured(ax, x, 0, rotation=90, rotation_mode="anchor", ha="left")
            else:
                _gain(ax, x, slot, condition, own, label)
    ax.plot([], [], "o", mfc="none", mec="#555555", ms=4.5, ls="none", label="single seeds (open)")
    ax.axhline(0, color="black", lw=0.9)
    if groups[-1] == _MEAN and len(groups) > 1:
        ax.axvline(places[-1] - 0.65, color="#777777", lw=0.8)
    ax.set_xticks(places, [_untrained(name, table[table.benchmark == name]) for name in groups], fontsize=8)
    ax.set(xlim=(-0.55, places[-1] + 0.55), ylabel="gain over the untrained model (points)")
    ax.margins(y=0.08)
    ax.grid(axis="y", color="#eeeeee", lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(axis="x", length=0)
    single = table[table.benchmark != _MEAN]
    words = f"{n_of(single)} a benchmark; " if len(single) else ""
    words += "whiskers: 95 % interval, paired bootstrap over pictures"
    ax.set_title(textwrap.fill(words, round(10 * canvas.get_figwidth())))
    first = [LABEL[condition] for condition in conditions]
    legend_above(canvas, axes, columns=2 if canvas.get_figwidth() > 6.2 else 1, first=first)
    return canvas


def _gain(ax, x: float, slot: float, condition: str, own: pd.DataFrame, label: str) -> None:
    """A bar to the mean with its interval, and beside it the single seeds."""
    mean, seeds = own[own.seed.isna()].iloc[0], own[own.seed.notna()]
    at, beside = x - 0.12 * slot, x + 0.3 * slot
    style = {"color": COLOUR[condition], "hatch": HATCH.get(condition), "ec": "white", "lw": 0, "label": label}
    ax.bar(at, mean.gain, 0.5 * slot, **style)
    if pd.notna(mean.low):
        ax.errorbar(at, mean.gain, [[mean.gain - mean.low], [mean.high - mean.gain]], color="black", capsize=3, lw=1)
    marker = {"marker": MARKER[condition], "ms": 4.5, "mfc": "none", "mec": COLOUR[condition], "mew": 1.1}
    ax.plot([beside] * len(seeds), seeds.gain, ls="none", zorder=3, **marker)


def _untrained(benchmark: str, own: pd.DataFrame) -> str:
    lines, accuracy = textwrap.wrap(benchmark, 18), own.unmasked.dropna()
    return "\n".join(lines + ([f"untrained {accuracy.iloc[0]:.1f}"] if len(accuracy) else []))


def _spread(counts: Sequence[int], several: str) -> str:
    """How many seeds stand behind a bar or a line: `1 seed`, or what `several` says of `3 seeds`."""
    words = span(min(counts), max(counts))
    return "1 seed" if words == "1" else several.format(f"{words} seeds")


_CURVES = {"loss": "loss", "margin": "reward margin", "accuracy": "reward accuracy (%)"}


def training_curves(frame: pd.DataFrame) -> Figure:
    """How training went: loss, reward margin and reward accuracy by step, mean and range over the seeds.

    `frame`: condition (of `TRAINED`), seed, step, loss, margin, accuracy (percent of pairs whose chosen reply has the
    higher reward); margin and accuracy are NaN for sft, whose loss is another quantity. Raises ValueError if a
    condition is another, or a step of a seed has two rows.
    """
    check_columns(frame, ("condition", "seed", "step", *_CURVES), "train first, and keep the log of every seed")
    _check_trained(frame, "line")
    if (again := frame.duplicated(["condition", "seed", "step"])).any():
        row = frame[again].iloc[0]
        raise ValueError(f"{row.condition}, seed {row.seed}: step {row.step} has two rows: select one training.")
    return draw("training_curves", frame)


@drawing("training_curves")
def _draw_training_curves(frame: pd.DataFrame) -> Canvas:
    canvas, axes = subplots(10.8, 3.9, 1, len(_CURVES))
    for ax, (column, words) in zip(axes[0], _CURVES.items()):
        for condition in (c for c in TRAINED if (frame.condition == c).any()):
            own = frame[(frame.condition == condition) & frame[column].notna()]
            if len(own):
                _curve(ax, condition, own, column)
        if not ax.lines:
            not_measured(ax, 0.5, 0.5, ha="center", transform=ax.transAxes)
        ax.set(xlabel="training step", ylabel=words, title=words.partition(" (")[0])
        ax.grid(axis="y", color="#eeeeee", lw=0.6)
    axes[0, 2].set_ylim(0, 103)
    legend_above(canvas, axes, columns=2)
    return canvas


def _curve(ax, condition: str, own: pd.DataFrame, column: str) -> None:
    by_step = own.groupby("step")[column]
    words = _spread([own.seed.nunique()], "mean and range of {}")
    label = f"{LABEL[condition]} ({words}{'; its loss is another quantity' if condition == 'sft' else ''})"
    if own.seed.nunique() > 1:
        ax.fill_between(list(by_step.groups), by_step.min(), by_step.max(), color=COLOUR[condition], alpha=0.18, lw=0)
    mean = by_step.mean()
    ax.plot(mean.index, mean, color=COLOUR[condition], ls=DASH[condition], lw=1.8, label=label)
