"""What the widgets show: one position of their controls, or the reason why it has nothing to show."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas
from PIL import Image

from vrhlib.boxes import Box
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.pictures import box_row, picture_rows, show_boxes, show_picture
from vrhlib.figures.scores import head_map, outlined_map
from vrhlib.figures.style import COLOUR, LABEL, MARKER, not_measured, stacked_bars, subplots
from vrhlib.heads import HeadScores, HeadSet


def explorer_view(
    where: tuple[str, int, float | None, str],
    lines: Mapping[str, Sequence[Sequence[float]]],
    band: Mapping | None,
    outcomes: Mapping[str, float],
    picture: tuple[str, Image.Image, Mapping[str, Box | None]],
) -> Figure:
    """One position of the explorer: accuracy against k, what the replies become, one picture's boxes.

    `where`: (title, k, accuracy there or None, note); `lines`: condition to [[k, accuracy, low, high], ...]; `band`:
    {"label", "points": [[k, low, mean, high], ...]} or None; `outcomes`: percent; `picture`: (expression, image,
    {referent, unmasked, reply: box or None}).
    """
    title, k, value, note = where
    rows = [{"panel": title, "fact": "at", "x0": k, "value": value, "text": note}]
    for condition, points in lines.items():
        rows += [
            {"panel": title, "fact": "line", "text": condition, "x0": x, "value": y, "y0": low, "y1": high}
            for x, y, low, high in points
        ]
    for x, low, mean, high in (band or {}).get("points", []):
        rows.append(
            {"panel": title, "fact": "band", "text": band["label"], "x0": x, "value": mean, "y0": low, "y1": high}
        )
    rows += [{"panel": title, "fact": "outcome", "text": name, "value": share} for name, share in outcomes.items()]
    return draw("explorer_view", pd.DataFrame(rows + _answered(*picture)))


def _answered(text: str, image: Image.Image, boxes: Mapping[str, Box | None]) -> list[dict]:
    """A picture with the boxes of a referent and of replies, as facts."""
    rows = picture_rows(text, image)
    for name, box in boxes.items():
        fact = "changed" if name == "reply" else name
        rows.append(box_row(text, fact, box) if box else {"panel": text, "fact": "no box", "text": fact})
    return rows


def _show_answered(ax, facts: pd.DataFrame) -> None:
    show_picture(ax, facts)
    show_boxes(ax, facts)
    ax.set_title("\n".join(textwrap.wrap(facts.panel.iloc[0], 40)))
    if missing := list(facts.loc[facts.fact == "no box", "text"]):
        ax.set_xlabel(
            f"no box: {', '.join('reply, heads changed' if m == 'changed' else m for m in missing)}", fontsize=7
        )
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.06), fontsize=7, ncols=2)


@drawing("explorer_view")
def _draw_explorer_view(frame: pd.DataFrame) -> Canvas:
    mine = frame.fact.isin(["at", "line", "band", "outcome"])
    facts, picture, at = frame[mine], frame[~mine], frame[frame.fact == "at"].iloc[0]
    canvas = Canvas(figsize=(9.6, 3.9), layout="constrained")
    axes = canvas.subplot_mosaic([["curve", "picture"], ["bar", "picture"]], height_ratios=[5, 1], width_ratios=[5, 4])
    curve, bar = axes["curve"], axes["bar"]
    for label, points in facts[facts.fact == "band"].groupby("text", sort=False):
        curve.errorbar(
            points.x0, points.value, [points.value - points.y0, points.y1 - points.value], fmt="s", ms=4, capsize=3,
            color=COLOUR["random"], label=label,
        )  # fmt: skip
    for condition, points in facts[facts.fact == "line"].groupby("text", sort=False):
        style = {"color": COLOUR.get(condition, "#0072B2"), "marker": MARKER.get(condition, "v"), "ms": 4, "capsize": 2}
        errors = [(points.value - points.y0).abs(), (points.y1 - points.value).abs()]
        curve.errorbar(points.x0, points.value, errors, label=LABEL.get(condition, condition), **style)
    curve.axvline(at.x0, color="#555555", lw=0.8, ls=":")
    if pd.notna(at.value):
        curve.plot(
            at.x0, at.value, "o", ms=11, mfc="none", mec="black", mew=1.6, label=f"k = {at.x0:.0f}: {at.value:.1f}"
        )
    curve.set(xlabel="heads cut, k", ylabel="Acc@IoU 0.5 (%)", ylim=(0, 103))
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.set_title(f"{at.panel}, {at.text}")
    if curve.get_legend_handles_labels()[0]:
        curve.legend(fontsize=7, loc="best")
    shares = facts[facts.fact == "outcome"].set_index("text").value
    parts = {name: name for name in COLOUR if name in shares.index}
    stacked_bars(bar, [0], shares.to_frame().T.reset_index(drop=True), parts) if parts else not_measured(bar, 2, 0)
    bar.set(xlim=(0, 100), yticks=[], xlabel=f"replies at k = {at.x0:.0f} (%)")
    if parts:
        bar.legend(fontsize=7, ncols=len(parts), loc="upper left", bbox_to_anchor=(0, -0.9))
    _show_answered(axes["picture"], picture)
    return canvas


def answer_view(
    scores: HeadScores, heads: HeadSet, picture: tuple[str, Image.Image, Mapping[str, Box | None]], words: str
) -> Figure:
    """What becomes of one reply when heads are changed: their place on the map of scores, the picture with the boxes
    (referent, unmasked, reply), and the reply in words."""
    frame = head_map(scores, heads).frame.assign(panel="heads", fact="head")
    rows = [*_answered(*picture), {"panel": picture[0], "fact": "words", "text": words}]
    return draw("answer_view", pd.concat([frame, pd.DataFrame(rows)], ignore_index=True))


@drawing("answer_view")
def _draw_answer_view(frame: pd.DataFrame) -> Canvas:
    canvas, axes = subplots(8.2, 3.7, 1, 2, width_ratios=[1, 1])
    grid, picture = axes[0]
    heads, facts = frame[frame.fact == "head"], frame[~frame.fact.isin(["head", "words"])]
    outlined_map(grid, heads)
    chosen = heads[heads["rank"] > 0]
    grid.plot(chosen["head"], chosen.layer, "x", color=COLOUR["vrh"], ms=5)
    grid.set_title(f"{heads.model.iloc[0]}: {len(chosen)} of {len(heads)} heads")
    _show_answered(picture, facts)
    words = str(frame.loc[frame.fact == "words", "text"].iloc[0])
    lines = [line for part in words.splitlines() for line in textwrap.wrap(part, 110)]
    canvas.suptitle("\n".join(lines), fontsize=8, parse_math=False)
    return canvas


def design_view(
    scores: HeadScores,
    k: int,
    name: str,
    formula: str,
    accuracies: Mapping[str, tuple[float, float, float] | None],
) -> Figure:
    """One point of the design space: its head map, and the accuracy its top k heads leave.

    `name` the method it is ("" for none); `formula` plain text; `accuracies` (percent, low, high) by condition, in
    order (unmasked, this scoring, random), None where nothing was measured.
    """
    frame = head_map(scores, scores.top(k)).frame.assign(fact="head")
    rows = [{"fact": "name", "text": name or "no named method"}, {"fact": "formula", "text": formula}]
    for condition, measured in accuracies.items():
        value, low, high = measured or (np.nan,) * 3
        rows.append({"fact": "accuracy", "text": condition, "value": value, "low": low, "high": high})
    frame = pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)
    frame.attrs["runs"] = list(scores.runs)
    return draw("design_view", frame)


@drawing("design_view")
def _draw_design_view(frame: pd.DataFrame) -> Canvas:
    heads, accuracy = frame[frame.fact == "head"], frame[frame.fact == "accuracy"]
    name, formula = (str(frame.loc[frame.fact == fact, "text"].iloc[0]) for fact in ("name", "formula"))
    lines = [line for part in formula.splitlines() for line in textwrap.wrap(part, 105)]
    first, cut = heads.iloc[0], (heads["rank"] > 0).sum()
    canvas = Canvas(figsize=(8.6, 3.9 + 0.17 * len(lines)), layout="constrained")
    layout = {"height_ratios": [0.17 * max(1, len(lines)), 3.4], "width_ratios": [3, 2]}
    axes = canvas.subplot_mosaic([["words", "words"], ["map", "bars"]], gridspec_kw=layout)
    canvas.suptitle(name, fontsize=11, fontweight="bold")
    axes["words"].set_axis_off()
    axes["words"].text(0.5, 0.5, "\n".join(lines), ha="center", va="center", fontsize=8, parse_math=False)
    outlined_map(axes["map"], heads)
    axes["map"].set_title(f"{first.model}: top {cut} of {len(heads)} heads, n={first.n:.0f}")
    bars = axes["bars"]
    for y, row in enumerate(accuracy.itertuples()):
        _accuracy_bar(bars, y, row)
    bars.set_yticks(range(len(accuracy)), [LABEL.get(c, c) for c in accuracy.text])
    bars.set(xlim=(0, 118), xticks=range(0, 101, 20), ylim=(len(accuracy) - 0.4, -0.6), xlabel="Acc@IoU 0.5 (%)")
    bars.set_title(f"accuracy, {cut} heads cut, 95 % intervals")
    return canvas


def _accuracy_bar(ax, y: int, row) -> None:
    if np.isnan(row.value):
        return not_measured(ax, 2, y)
    ax.barh(y, row.value, 0.6, color=COLOUR.get(row.text, COLOUR["vrh"]), alpha=0.85)
    ax.errorbar(row.value, y, xerr=[[row.value - row.low], [row.high - row.value]], color="black", capsize=3, lw=1)
    ax.text(row.high + 2, y, f"{row.value:.1f}", va="center", fontsize=8)


def refused(reason: str) -> Figure:
    """The reason why there is nothing to draw, in the place of a picture."""
    return draw("refused", pd.DataFrame({"text": [reason]}))


@drawing("refused")
def _draw_refused(frame: pd.DataFrame) -> Canvas:
    canvas = Canvas(figsize=(8.6, 1.6), layout="constrained")
    words = "\n".join(textwrap.wrap(str(frame.text.iloc[0]), 100))
    canvas.text(0.5, 0.5, words, ha="center", va="center", fontsize=9, color="#555555", parse_math=False)
    return canvas
