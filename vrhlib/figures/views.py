"""What the widgets show: one position of their controls, or the reason why it has nothing to show."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas
from PIL import Image

from vrhlib.boxes import Box
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.pictures import box_row, picture_rows, show_boxes, show_picture
from vrhlib.figures.scores import head_map, outlined_map
from vrhlib.figures.style import COLOUR, LABEL, not_measured, subplots
from vrhlib.heads import HeadScores


def ablation_view(
    scores: HeadScores,
    k: int,
    accuracies: Mapping[str, float],
    picture: tuple[str, Image.Image, Box, Mapping[str, Box | None]],
) -> Figure:
    """One position of the k slider: the cut heads, the accuracy that is left, one picture's replies."""
    frame = head_map(scores, scores.top(k)).frame.assign(panel="heads", fact="head")
    text, image, referent, boxes = picture
    rows = picture_rows(text, image) + [box_row(text, "referent", referent)]
    rows += [box_row(text, c, b) if b else {"panel": text, "fact": "no box", "text": c} for c, b in boxes.items()]
    rows += [{"panel": "accuracy", "fact": "accuracy", "text": c, "value": v} for c, v in accuracies.items()]
    return draw("ablation_view", pd.concat([frame, pd.DataFrame(rows)], ignore_index=True))


@drawing("ablation_view")
def _draw_ablation_view(frame: pd.DataFrame) -> Canvas:
    canvas, axes = subplots(10.5, 3.3, 1, 3, width_ratios=[3, 2, 3])
    grid, bars, picture = axes[0]
    heads = frame[frame.fact == "head"]
    outlined_map(grid, heads)
    grid.set_title(f"{heads.model.iloc[0]}: {(heads['rank'] > 0).sum()} of {len(heads)} heads cut")
    accuracy = frame[frame.fact == "accuracy"]
    bars.barh(range(len(accuracy)), accuracy.value, color=[COLOUR.get(c, "#56B4E9") for c in accuracy.text])
    bars.set(yticks=range(len(accuracy)), yticklabels=[LABEL.get(c, c) for c in accuracy.text], xlim=(0, 100))
    for y, value in enumerate(accuracy.value):
        bars.text(min(value + 2, 80), y, f"{value:.1f}", va="center", fontsize=8)
    bars.set_title("Acc@IoU 0.5 (%)")
    facts = frame[~frame.fact.isin(["head", "accuracy"])]
    show_picture(picture, facts)
    show_boxes(picture, facts)
    picture.set_title("\n".join(textwrap.wrap(facts.panel.iloc[0], 36)))
    picture.legend(loc="upper left", bbox_to_anchor=(0, -0.02), fontsize=7, ncols=2)
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
