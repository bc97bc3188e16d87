"""Scores of heads: on the grid, by rank, in bands, and against another model's scores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from vrhlib.figures.checks import check_columns, check_sums
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import COLOUR, LABEL, MARKER, legend_above, looks_of, n_of, stacked_bars, subplots
from vrhlib.heads import HeadScores, HeadSet


def head_map(scores: HeadScores, highlight: HeadSet) -> Figure:
    """Score of every head, layers x heads, with the highlighted (top-k) heads outlined, and heads per layer."""
    layer, head = np.indices(scores.grid)
    rank = {h: i + 1 for i, h in enumerate(highlight)}
    frame = pd.DataFrame({
        "model": scores.model, "scoring": scores.scoring, "n": scores.n, "layer": layer.ravel(), "head": head.ravel(),
        "score": scores.values.ravel().round(6),
        "rank": [rank.get((a, b), 0) for a, b in zip(layer.ravel(), head.ravel())],
    })  # fmt: skip
    frame.attrs["runs"] = list(scores.runs)
    return draw("head_map", frame)


@drawing("head_map")
def _draw_head_map(frame: pd.DataFrame) -> Canvas:
    values = frame.pivot(index="layer", columns="head", values="score").to_numpy()
    layers, heads = values.shape
    canvas, axes = subplots(
        max(4.8, 0.28 * heads + 3.2),
        max(3.2, 0.22 * layers + 1.3),
        1,
        2,
        width_ratios=[heads, max(3, heads / 3)],
        sharey=True,
    )
    grid, side = axes[0]
    image = grid.imshow(values, cmap="cividis", aspect="auto", origin="lower", vmin=0)
    top = frame[frame["rank"] > 0].sort_values("rank")
    for row in top.itertuples():
        grid.add_patch(Rectangle((row.head - 0.5, row.layer - 0.5), 1, 1, fill=False, ec=COLOUR["vrh"], lw=1.8))
        light = row.score < 0.6 * values.max()
        grid.text(
            row.head, row.layer, row.rank, ha="center", va="center", fontsize=7, color="white" if light else "black"
        )
    grid.set(
        xlabel="head",
        ylabel="layer",
        xticks=range(0, heads, max(1, heads // 12)),
        yticks=range(0, layers, max(1, layers // 12)),
    )
    first = frame.iloc[0]
    words = f"{first.model}: attention on the referent, per head\n{first.scoring} (queries/keys/samples), n={first.n}"
    canvas.suptitle(words, fontsize=9, fontweight="bold")
    canvas.colorbar(image, ax=grid, pad=0.02, label="head score")
    side.tick_params(labelleft=False)
    counts = np.bincount(top.layer, minlength=layers)
    side.barh(range(layers), counts, color=COLOUR["vrh"])
    side.set(xlabel=f"of top {len(top)}", xticks=range(0, counts.max() + 1, max(1, counts.max() // 3)))
    side.set_title("per layer")
    return canvas


def head_maps(scores: Mapping[str, HeadScores], tops: Mapping[str, HeadSet]) -> Figure:
    """Head scores of several models side by side, their top heads outlined; each map has its own scale, 1 at its best
    head."""
    rows = []
    for model, s in scores.items():
        rank = {h: i + 1 for i, h in enumerate(tops[model])}
        rows += [(model, s.scoring, s.n, *at, round(v, 6), rank.get(at, 0)) for at, v in np.ndenumerate(s.values)]
    columns = ["model", "scoring", "n", "layer", "head", "score", "rank"]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["runs"] = [run for s in scores.values() for run in s.runs]
    return draw("head_maps", frame)


@drawing("head_maps")
def _draw_head_maps(frame: pd.DataFrame) -> Canvas:
    models = list(frame.groupby("model", sort=False))
    canvas, axes = subplots(2.5 * len(models) + 0.9, 3.9, 1, len(models))
    for (model, own), ax in zip(models, axes[0]):
        values = own.pivot(index="layer", columns="head", values="score").to_numpy()
        image = ax.imshow(
            values / max(values.max(), 1e-12), cmap="cividis", aspect="auto", origin="lower", vmin=0, vmax=1
        )
        for row in own[own["rank"] > 0].itertuples():
            ax.add_patch(Rectangle((row.head - 0.5, row.layer - 0.5), 1, 1, fill=False, ec=COLOUR["vrh"], lw=1.8))
        ax.set(
            xlabel="head",
            ylabel="layer" if ax is axes[0, 0] else "",
            xticks=range(0, values.shape[1], max(2, values.shape[1] // 7)),
        )
        ax.set_yticks(range(0, values.shape[0], max(1, values.shape[0] // 10)))
        ax.set_title(f"{model}\nbest head {values.max():.2f}, n={own.n.iloc[0]}")
    canvas.colorbar(image, ax=list(axes[0]), pad=0.02, label="score / best score")
    return canvas


def outlined_map(ax, heads: pd.DataFrame) -> None:
    """Scores [layers, heads], brighter for higher; the ranked heads outlined."""
    values = heads.pivot(index="layer", columns="head", values="score")
    ax.imshow(values, cmap="cividis", aspect="auto", origin="lower", vmin=min(0.0, values.to_numpy().min()))
    for row in heads[heads["rank"] > 0].itertuples():
        ax.add_patch(Rectangle((row.head - 0.5, row.layer - 0.5), 1, 1, fill=False, ec=COLOUR["vrh"], lw=1.8))
    ax.set(xlabel="head", ylabel="layer")


FLOOR = 1e-6  # lowest score a logarithmic axis shows
_ON_FLOOR = f"(below {FLOOR:.0e} drawn there)".replace("e-0", "e-")


def sorted_scores(scores: Mapping[str, HeadScores], tops: Mapping[str, HeadSet]) -> Figure:
    """Every head's score by rank (log axis), one panel a model: its top heads marked, and how few hold half the mass.

    Scores below `FLOOR` are drawn there. Raises ValueError if a model has no top heads.
    """
    if missing := [model for model in scores if not len(tops.get(model, ()))]:
        raise ValueError(f"No top heads for {', '.join(missing)}: pass the detected list of every model with scores.")
    rows = []
    for model, s in scores.items():
        facts = model, s.scoring, s.n, round(s.share_holding(0.5), 6), round(s.gini(), 6)
        top = set(tops[model].on(s.grid))
        rows += [(*facts, i + 1, *h, float(f"{s.values[h]:.6g}"), h in top) for i, h in enumerate(s.ranked())]
    columns = ["model", "scoring", "n", "half_share", "gini", "rank", "layer", "head", "score", "top"]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["runs"] = [run for s in scores.values() for run in s.runs]
    return draw("sorted_scores", frame)


@drawing("sorted_scores")
def _draw_sorted_scores(frame: pd.DataFrame) -> Canvas:
    models = list(frame.groupby("model", sort=False))
    canvas, axes = subplots(max(2.9 * len(models) + 0.9, 4.4), 3.9, 1, len(models), sharey=True)
    for (model, own), ax in zip(models, axes[0]):
        first, height = own.iloc[0], own.score.clip(lower=FLOOR)
        ax.plot(own["rank"], height, color="#555555", lw=1.4, label="every head")
        top = own.top.astype(bool)
        ax.plot(own["rank"][top], height[top], "o", color=COLOUR["vrh"], ms=4, label="top heads")
        ax.axvspan(0, first.half_share * len(own) + 0.5, color="#56B4E9", alpha=0.22, lw=0, label="hold half the mass")
        for threshold in (1e-3, 5e-3):
            ax.axhline(threshold, color="black", lw=0.8, ls=":")
        ax.set(yscale="log", xlabel="rank of the head", xlim=(0, len(own) + 1))
        ax.text(
            0.97, 0.97, f"half of the mass: {100 * first.half_share:.1f} % of heads\nGini {first.gini:.2f}",
            transform=ax.transAxes, ha="right", va="top", fontsize=8,
        )  # fmt: skip
        ax.set_title(f"{model}\n{first.scoring}, n={first.n}\ntop {top.sum()} of {len(own)} heads")
    axes[0, 0].set(ylabel="head score", ylim=(FLOOR / 1.5, 10 * frame.score.max()))
    for threshold, words in ((1e-3, "1e-3"), (5e-3, "5e-3")):
        axes[0, -1].annotate(f" {words}", (1, threshold), xycoords=("axes fraction", "data"), va="center", fontsize=7.5)
    legend_above(canvas, axes)
    if (frame.score < FLOOR).any():
        axes[0, 0].set_ylabel(f"head score {_ON_FLOOR}")
    return canvas


BANDS = ("above_5e-3", "between", "below")


def _panels(keys: pd.Series) -> list[str]:
    """The panels of a table in order; raises ValueError unless they are sum, mean or both."""
    found = set(keys)
    if not found or found - {"sum", "mean"}:
        names = ", ".join(sorted(map(str, found))) or "nothing"
        raise ValueError(f"Panels are sum and mean over the referent's tokens; the table has {names}.")
    return [key for key in ("sum", "mean") if key in found]


def sparsity(table: pd.DataFrame) -> Figure:
    """Figure 5: share of heads with a score above 5e-3, between, and below 1e-3, a bar a model, sum beside mean.

    `table`: model, scoring (sum or mean), source (whose numbers), above_5e-3, between, below (percent), n, heads.
    Raises ValueError if the bands of a row do not sum to 100, or a scoring is another.
    """
    _panels(table.scoring)
    check_sums(table, BANDS, "scoring", "bands", "heads")
    return draw("sparsity", table)


@drawing("sparsity")
def _draw_sparsity(table: pd.DataFrame) -> Canvas:
    panels = _panels(table.scoring)
    bars = list(dict.fromkeys(zip(table.model, table.source)))
    canvas, axes = subplots(4.3 * len(panels) + 1.8, 0.52 * len(bars) + 2.0, 1, len(panels), sharey=True)
    for key, ax in zip(panels, axes[0]):
        own = table[table.scoring == key]
        y = [bars.index(bar) for bar in zip(own.model, own.source)]
        stacked_bars(ax, y, own, {band: f"score {LABEL[band]}" for band in BANDS})
        for x, top, dash, words in ((4, -1.3, ":", "0–4 % above 5e-3"), (15, -0.8, "--", "< 15 % above 1e-3")):
            ax.vlines(x, top - 0.15, len(bars) - 0.5, color="black", lw=1.1, ls=dash)
            ax.text(x + 0.8, top, f"paper: {words}", fontsize=7.5, va="center")
        ax.set(xlim=(0, 100), ylim=(len(bars) - 0.5, -1.6), xlabel="share of heads (%)")
        ax.tick_params(axis="y", length=0, labelsize=8)
        ax.set_title(LABEL[key])
    facts = [table[(table.model == m) & (table.source == s)] for m, s in bars]
    axes[0, 0].set_yticks(
        range(len(bars)), [f"{m} ({s})\n{n_of(f)}, {f.heads.iloc[0]:.0f} heads" for (m, s), f in zip(bars, facts)]
    )
    legend_above(canvas, axes)
    return canvas


def area_dependence(table: pd.DataFrame) -> Figure:
    """Share of heads above 5e-3 against the size of the referent, a line a model, sum beside mean over its tokens.

    `table`: model, keys (sum or mean), area (median percent of the picture that the referents of a bin cover), share
    (percent of heads), low, high, n (samples of the bin). Raises ValueError if keys is another.
    """
    _panels(table["keys"])
    return draw("area_dependence", table)


@drawing("area_dependence")
def _draw_area_dependence(table: pd.DataFrame) -> Canvas:
    panels, widest = _panels(table["keys"]), table.area.max()
    canvas, axes = subplots(3.9 * len(panels) + 0.4, 3.9, 1, len(panels))
    looks = looks_of(list(dict.fromkeys(table.model)))
    for key, ax in zip(panels, axes[0]):
        own = table[table["keys"] == key]
        for i, (model, look) in enumerate(looks.items()):
            rows = own[own.model == model].sort_values("area")
            x = rows.area + 0.012 * widest * (i - (len(looks) - 1) / 2)  # apart, or equal areas hide the intervals
            errors = [(rows.share - rows.low).clip(lower=0), (rows.high - rows.share).clip(lower=0)]
            ax.errorbar(x, rows.share, errors, label=model, ms=5, lw=1.5, elinewidth=0.8, capsize=2, **look)
        ax.set(xlabel="picture covered by the referent\n(%, median of the bin; models drawn side by side)")
        ax.set(xlim=(0, 1.08 * widest))
        ax.set(ylim=(0, max(1.0, 1.08 * np.nanmax(own[["share", "high"]].to_numpy()))))
        ax.set_title(f"{LABEL[key]}\n{n_of(own)} a bin")
    axes[0, 0].set_ylabel("heads with a score above 5e-3 (%)")
    legend_above(canvas, axes)
    return canvas


IN_LISTS = ("neither", "a", "b", "both")


def score_scatter(frame: pd.DataFrame) -> Figure:
    """Every head's score in one model against its score in another (log axes), a panel a pair of models.

    `frame`: a (model on x), b (on y), relation, layer, head, x, y, top (neither, a, b, both: whose list of top heads
    holds it), k, shared, spearman, n. Scores below `FLOOR` are drawn there. Raises ValueError if `top` is another or
    marks another number of heads than `shared`.
    """
    columns = ("a", "b", "relation", "layer", "head", "x", "y", "top", "k", "shared", "spearman", "n")
    check_columns(frame, columns, "compare the scores of two models first")
    if unknown := set(frame.top) - set(IN_LISTS):
        names = ", ".join(sorted(map(str, unknown)))
        raise ValueError(f"No marker for {names}: column top says {', '.join(IN_LISTS)}.")
    for (a, b), own in frame.groupby(["a", "b"], sort=False):
        if (both := (own.top == "both").sum()) != own.shared.iloc[0]:
            raise ValueError(
                f"{a} and {b} share {own.shared.iloc[0]} heads, but column top marks {both} as both: "
                "compute the two from one pair of lists."
            )
    return draw("score_scatter", frame)


@drawing("score_scatter")
def _draw_score_scatter(frame: pd.DataFrame) -> Canvas:
    pairs = [own for _, own in frame.groupby(["a", "b"], sort=False)]
    canvas, axes = _square_panels(len(pairs), frame)
    for own, ax in zip(pairs, axes.flat):
        _scatter_panel(ax, own)
    legend_above(canvas, axes)
    return canvas


def _square_panels(panels: int, scores: pd.DataFrame) -> tuple[Canvas, np.ndarray]:
    """Square panels with the same log axes, down to the floor, that hold the scores (columns x and y)."""
    cols = 2 if panels == 4 else min(3, panels)
    rows = -(-panels // cols)
    canvas, axes = subplots(max(4.1 * cols, 4.6), 4.1 * rows + 0.7, rows, cols)
    values = scores[["x", "y"]].clip(lower=FLOOR).to_numpy()
    for ax in axes.flat[:panels]:
        ax.set(xscale="log", yscale="log", xlim=(values.min() / 1.8, values.max() * 2))
        ax.set(ylim=ax.get_xlim(), box_aspect=1)
    for ax in axes.flat[panels:]:
        ax.set_axis_off()
    return canvas, axes


def _scatter_panel(ax, own: pd.DataFrame) -> None:
    first = own.iloc[0]
    for zorder, (top, rows) in enumerate([(top, own[own.top == top]) for top in IN_LISTS], start=2):
        _points(ax, rows, top, "none" if top in ("a", "b") else "full", LABEL[top], zorder)
    both = own[own.top == "both"]
    if len(both) <= 6:
        _names_beside(ax, both)
    _score_axes(ax, own, f"head score in {first.a}", f"head score in {first.b}")
    words = f"{first.relation}, {n_of(own)}\nshared {first.shared:.0f} of {first.k:.0f}, Spearman {first.spearman:.2f}"
    ax.set_title(f"{first.a} and {first.b}\n{words}")


def _points(ax, rows: pd.DataFrame, look: str, fill: str, label: str, zorder: int) -> None:
    """Heads at their two scores x and y, those below the floor on it."""
    if len(rows):
        style = {"color": COLOUR[look], "marker": MARKER[look], "ms": 4 if look == "neither" else 6, "ls": "none"}
        style |= {"fillstyle": fill, "label": label, "zorder": zorder}
        ax.plot(rows.x.clip(lower=FLOOR), rows.y.clip(lower=FLOOR), **style)


def _score_axes(ax, own: pd.DataFrame, x: str, y: str) -> None:
    """What stands on the axes of x and y, and that the floor holds smaller scores if there are any."""
    for name, words in (("x", x), ("y", y)):
        floor = f"\n{_ON_FLOOR}" if (own[name] < FLOOR).any() else ""
        ax.set(**{f"{name}label": f"{words}{floor}"})


def _names_beside(ax, heads: pd.DataFrame) -> None:
    """Names of heads in a column at the right of the panel, a thin line from each to its point."""
    heads = heads.sort_values(["y", "x"], ascending=False)
    points = heads[["x", "y"]].clip(lower=FLOOR).to_numpy()
    low, high = np.log(ax.get_ylim())
    at, gap = (np.log(points[:, 1]) - low) / (high - low), 0.06
    for i in range(1, len(at)):
        at[i] = min(at[i], at[i - 1] - gap)
    at += max(0.0, -at.min(initial=0.0))  # a crowd at the foot of the panel is lifted as a whole
    for row, point, height in zip(heads.itertuples(), points, at):
        line = {"arrowstyle": "-", "lw": 0.5, "color": "#555555", "shrinkA": 0, "shrinkB": 2}
        where = {"xytext": (1.02, height), "textcoords": "axes fraction", "va": "center", "fontsize": 7.5}
        ax.annotate(f"L{row.layer}H{row.head}", point, arrowprops=line, annotation_clip=False, **where)


def score_changes(frame: pd.DataFrame) -> Figure:
    """Do heads move in training? Every head's score after it against its score before (log axes), a panel a condition.

    `frame`: condition, layer, head, before, after, top (is it among the top k before?), and the facts of a condition in
    each of its rows: k, shared (how many of these are among the top k after, too), spearman. Scores below `FLOOR` are
    drawn there. Raises ValueError if a condition has two values of a fact, or `top` marks another number of heads
    than k.
    """
    columns = ("condition", "layer", "head", "before", "after", "top", "shared", "k", "spearman")
    check_columns(frame, columns, "score the heads before and after training first")
    for condition, own in frame.groupby("condition", sort=False):
        if several := [fact for fact in ("shared", "k", "spearman") if own[fact].nunique(dropna=False) > 1]:
            raise ValueError(f"{condition} has several values of {', '.join(several)}: select the rows of one seed.")
        if (marked := own.top.astype(bool).sum()) != own.k.iloc[0]:
            raise ValueError(f"Column top marks {marked} heads of {condition}, not k={own.k.iloc[0]}: mark the top k.")
    return draw("score_changes", frame)


@drawing("score_changes")
def _draw_score_changes(frame: pd.DataFrame) -> Canvas:
    frame = frame.rename(columns={"before": "x", "after": "y"})
    conditions = list(frame.groupby("condition", sort=False))
    canvas, axes = _square_panels(len(conditions), frame)
    for (condition, own), ax in zip(conditions, axes.flat):
        first, top = own.iloc[0], own[own.top.astype(bool)]
        ax.plot(ax.get_xlim(), ax.get_xlim(), color="#555555", lw=0.8, ls="--", zorder=1, label="no change")
        _points(ax, own.drop(top.index), "neither", "full", "other heads", 2)
        _points(ax, top, "vrh", "full", "top heads before training", 3)
        if len(top) <= 6:
            _names_beside(ax, top)
        _score_axes(ax, own, "head score before training", "head score after training")
        words = f"{first.shared:.0f} of {first.k:.0f} shared, Spearman {first.spearman:.2f}"
        ax.set_title(f"{LABEL.get(condition, condition)}:\n{words}")
    legend_above(canvas, axes, columns=min(3, axes.shape[1] + 1))
    return canvas
