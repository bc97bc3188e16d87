"""What detection needs: how few output tokens and samples find the heads, and what a pass costs."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Canvas

from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import COLOUR, MARKER, subplots


def one_token(sweep: pd.DataFrame) -> Figure:
    """Figure 7b: accuracy after ablating heads found from one random output token, from all, and random heads."""
    return draw("one_token", sweep)


@drawing("one_token")
def _draw_one_token(sweep: pd.DataFrame) -> Canvas:
    canvas, axes = subplots(4.6, 3.2)
    ax, k = axes[0, 0], sweep.k.max()
    rows = sweep[(sweep.k == k) | (sweep.condition == "unmasked")]
    names = {
        "unmasked": "unmasked",
        "random": "random\nheads",
        "one output token": "one random\noutput token",
        "vrh": "all output\ntokens",
    }
    names = {c: n for c, n in names.items() if (rows.condition == c).any()}
    for x, condition in enumerate(names):
        part = rows[rows.condition == condition]
        mean, low, high = part.accuracy.mean(), part.low.min(), part.high.max()
        ax.bar(
            x,
            mean,
            0.6,
            color=COLOUR[condition],
            alpha=0.85,
            hatch="//" if condition == "one output token" else None,
            ec="white",
        )
        ax.errorbar(x, mean, [[max(0, mean - low)], [max(0, high - mean)]], color="black", capsize=3, lw=1)
        ax.text(x + 0.06, mean + 1.5, f"{mean:.1f}", ha="left", fontsize=8)
    ax.set(xticks=range(len(names)), xticklabels=names.values(), ylabel="Acc@IoU 0.5 (%)", ylim=(0, 100))
    seeds = rows.loc[rows.condition == "random", "seed"].nunique()
    ax.set_title(
        f"{rows.model.iloc[0]}: {k} heads ablated, n={rows.n.iloc[0]}\n95 % Wilson; random: hull over {seeds} seeds"
    )
    return canvas


def few_samples(stable: pd.DataFrame) -> Figure:
    """Figure 7c: overlap of the top k from few samples with the top k from all, mean and range over draws."""
    return draw("few_samples", stable)


@drawing("few_samples")
def _draw_few_samples(stable: pd.DataFrame) -> Canvas:
    canvas, axes = subplots(4.6, 3.2)
    ax, k = axes[0, 0], stable.k.iloc[0]
    by_n = stable.groupby("n").overlap
    sizes = list(by_n.groups)
    ax.fill_between(range(len(sizes)), by_n.min(), by_n.max(), color=COLOUR["vrh"], alpha=0.18, lw=0)
    ax.plot(range(len(sizes)), by_n.mean(), color=COLOUR["vrh"], marker="o", ms=4)
    ax.axhline(k, color="black", lw=0.8, ls=":")
    ax.set(
        xticks=range(len(sizes)),
        xticklabels=sizes,
        xlabel="detection samples",
        ylabel=f"shared with the top {k} of all",
        ylim=(0, k * 1.08),
    )
    ax.set_title(
        f"{stable.model.iloc[0]}: heads from few samples\nmean and range of {stable.seed.nunique()} draws a size"
    )
    return canvas


def cost(table: pd.DataFrame) -> Figure:
    """Table A11 as a picture: seconds and peak memory of one detection pass, captured rows against eager attention."""
    return draw("cost", table)


@drawing("cost")
def _draw_cost(table: pd.DataFrame) -> Canvas:
    canvas, axes = subplots(7.2, 3.0, 1, 2)
    names = {"rows": "captured rows", "eager": "eager attention"}
    for ax, column, label in zip(
        axes[0], ("seconds", "peak_mib"), ("seconds (best of runs)", "peak extra memory (MiB)")
    ):
        for method, rows in table.groupby("method", sort=False):
            ax.plot(
                rows.visual_tokens, rows[column], color=COLOUR[method], marker=MARKER[method], ms=4, label=names[method]
            )
        ax.set(xlabel="image tokens", ylabel=label, ylim=(0, None))
        ax.legend(fontsize=8)
    canvas.suptitle(
        f"{table.model.iloc[0]}: one language-model pass, vision features and reply given",
        fontsize=9,
        fontweight="bold",
    )
    return canvas
