"""Pictures with boxes and attention. Their frames hold the pictures too: facts, one a row (see `picture_rows`)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from PIL import Image

from vrhlib.boxes import Box, TokenGrid
from vrhlib.figures.output import Figure, draw, drawing
from vrhlib.figures.style import COLOUR, LABEL, subplots


def picture_rows(panel: str, image: Image.Image) -> list[dict]:
    """The picture itself as facts: one line a pixel row, hexadecimal RGB (at most 256 pixels wide)."""
    scale = min(1.0, 256 / max(image.size))
    small = image.convert("RGB").resize([max(1, round(side * scale)) for side in image.size])
    width, height = image.size
    return [
        {"panel": panel, "fact": "pixels", "row": i, "x1": width, "y1": height, "text": line.tobytes().hex()}
        for i, line in enumerate(np.asarray(small))
    ]


def box_row(panel: str, fact: str, box: Box, text: str = "") -> dict:
    """A box as a fact, in pixels of the picture."""
    return {"panel": panel, "fact": fact, "text": text, **dict(zip(("x0", "y0", "x1", "y1"), map(float, box)))}


def _value_rows(panel: str, picture: np.ndarray) -> list[dict]:
    rows, cols = np.indices(picture.shape)
    return [
        {"panel": panel, "fact": "attention", "row": r, "col": c, "value": round(float(v), 6)}
        for r, c, v in zip(rows.ravel(), cols.ravel(), picture.ravel())
    ]


def example(image: Image.Image, box: Box, grid: TokenGrid, text: str, reply: Box | None = None) -> Figure:
    """One sample on the token grid: the referent's tokens (K_s, any overlap) shaded, its box, and the reply's box."""
    rows = picture_rows(text, image) + [box_row(text, "referent", box)]
    rows += _value_rows(text, grid.picture(grid.tokens_in(box)))
    if reply:
        rows.append(box_row(text, "reply", reply))
    return draw("example", pd.DataFrame(rows))


@drawing("example")
def _draw_example(frame: pd.DataFrame) -> Canvas:
    canvas, axes = subplots(9.0, 3.5, 1, 2)
    text = frame.panel.iloc[0]
    for ax, title in zip(axes[0], ("picture", "image tokens; shaded: those the referent's box overlaps")):
        width, height = show_picture(ax, frame)
        show_boxes(ax, frame)
        ax.set_title(title)
    inside = frame[frame.fact == "attention"].pivot(index="row", columns="col", values="value").to_numpy()
    rows, cols = inside.shape
    for (r, c), value in np.ndenumerate(inside):
        cell = (c * width / cols, r * height / rows), width / cols, height / rows
        face = COLOUR["referent"] + "55" if value else "none"
        ax.add_patch(Rectangle(*cell, fc=face, ec="#888888", lw=0.5))
    axes[0, 0].legend(loc="upper left", fontsize=7, frameon=True)
    canvas.suptitle(f"“{text}”   ({rows} x {cols} = {rows * cols} tokens, {int(inside.sum())} in the box)", fontsize=10)
    return canvas


def attention_maps(
    looks: Sequence[tuple[str, Image.Image, Box | None, TokenGrid, Mapping[str, np.ndarray]]],
) -> Figure:
    """Attention over images: a row per sample (text, image, referent, grid, maps), a panel per map (values [V]).

    The panels of a row share one colour scale, and each says which share of its attention lies in the referent's box;
    of a question without a referent (None) it says the attention on the picture and no more.
    """
    rows = []
    for i, (text, image, box, grid, maps) in enumerate(looks):
        for title, values in maps.items():
            panel = f"{title}: {_looked(values, None if box is None else grid.tokens_in(box))}"
            asked = {"panel": panel, "fact": "text", "text": text}
            facts = picture_rows(panel, image) + [asked if box is None else box_row(panel, "referent", box, text)]
            rows += [fact | {"sample": i} for fact in facts + _value_rows(panel, grid.picture(values))]
    return draw("attention_maps", pd.DataFrame(rows))


def _looked(values: np.ndarray, inside: np.ndarray | None) -> str:
    """How much attention lies on the picture, and which share of it on the tokens of the box if there is one."""
    total = values.sum()
    if inside is None:
        return f"{total:.2f} on the picture"
    if total <= 1e-3:
        return f"{total:.2f}\nno attention on the picture"
    return f"{total:.2f}\n{100 * values[inside].sum() / total:.0f} % on tokens of the box"


def reply_rows(
    text: str, image: Image.Image, box: Box, grid: TokenGrid, tokens: Sequence[str], rows: np.ndarray, head: str
) -> Figure:
    """The reply token by token: where one head looks while each token is predicted. `rows` float [tokens, V].

    Of a reply of more than sixteen tokens only those with a digit are drawn, the first sixteen of them.
    """
    inside, facts = grid.tokens_in(box), []
    digits = [i for i, token in enumerate(tokens) if any(c.isdigit() for c in token)] or list(range(len(tokens)))
    for i in digits[:16] if len(tokens) > 16 else range(len(tokens)):
        values, of = rows[i], f" of {len(tokens)}" * (len(tokens) > 16)
        panel = f"{i + 1}{of}: {tokens[i]}\n{values[inside].sum():.2f} on the referent"
        facts += picture_rows(panel, image) + [box_row(panel, "referent", box, f"{head}: {text}")]
        facts += _value_rows(panel, grid.picture(values))
    return draw("attention_maps", pd.DataFrame(facts).assign(sample=0))


@drawing("attention_maps")
def _draw_attention_maps(frame: pd.DataFrame) -> Canvas:
    panels = list(frame.groupby(["sample", "panel"], sort=False))
    cols = min(5, frame.groupby("sample").panel.nunique().max())
    rows = -(-len(panels) // cols)
    canvas, axes = subplots(2.7 * cols, 2.25 * rows + 0.3, rows, cols)
    for ax in axes.ravel()[len(panels) :]:
        ax.set_axis_off()
    top = frame[frame.fact == "attention"].groupby("sample").value.max()
    for i, (((sample, title), facts), ax) in enumerate(zip(panels, axes.ravel())):
        width, height = show_picture(ax, facts, fade=0.45)
        heat = facts[facts.fact == "attention"].pivot(index="row", columns="col", values="value").to_numpy()
        style = {"cmap": "magma", "alpha": 0.65, "interpolation": "nearest", "vmin": 0, "vmax": max(top[sample], 1e-3)}
        shown = ax.imshow(heat, extent=(0, width, height, 0), **style)
        show_boxes(ax, facts)
        words = facts.loc[facts.fact.isin(["referent", "text"]), "text"].iloc[0]
        ax.set_title(title, fontsize=8)
        if i % cols == 0 and (rows == 1 or frame["sample"].nunique() > 1 or i == 0):
            ax.set_ylabel("\n".join(textwrap.wrap(words, 24)), fontsize=8)
        if (i + 1) % cols == 0 or i + 1 == len(panels):
            bar = canvas.colorbar(shown, ax=ax, shrink=0.7, pad=0.02)
            bar.ax.tick_params(labelsize=6)
    return canvas


def before_after(panels: Sequence[tuple[str, Image.Image, Box, Mapping[str, Box | None]]]) -> Figure:
    """Pictures with the referent and the boxes replied under several conditions.

    `panels`: (expression, image, referent, {condition: replied box or None}). A missing box is named under its picture.
    """
    rows = []
    for i, (text, image, referent, boxes) in enumerate(panels):
        panel = f"{i}"
        rows += picture_rows(panel, image) + [box_row(panel, "title", Box(0, 0, 0, 0), text)]
        rows.append(box_row(panel, "referent", referent))
        for condition, box in boxes.items():
            rows.append(
                box_row(panel, condition, box) if box else {"panel": panel, "fact": "no box", "text": condition}
            )
    return draw("before_after", pd.DataFrame(rows))


@drawing("before_after")
def _draw_before_after(frame: pd.DataFrame) -> Canvas:
    panels = list(frame.groupby("panel", sort=False))
    cols = min(4, len(panels))
    height = -(-len(panels) // cols)
    canvas, axes = subplots(2.9 * cols, 2.6 * height + 0.3, height, cols)
    for ax in axes.ravel()[len(panels) :]:
        ax.set_axis_off()
    for (_, facts), ax in zip(panels, axes.ravel()):
        show_picture(ax, facts)
        show_boxes(ax, facts)
        title = facts.loc[facts.fact == "title", "text"].iloc[0]
        ax.set_title("\n".join(textwrap.wrap(title, 30)))
        if missing := list(facts.loc[facts.fact == "no box", "text"]):
            ax.set_xlabel(f"no box: {', '.join(LABEL.get(m, m) for m in missing)}", fontsize=7)
    handles = {}
    for ax in axes.ravel():
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    canvas.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    return canvas


def show_picture(ax, facts: pd.DataFrame, fade: float = 0.0) -> tuple[float, float]:
    """The picture in a panel's facts, faded towards white; returns its width and height in pixels."""
    lines = facts[facts.fact == "pixels"].sort_values("row")
    pixels = np.array([np.frombuffer(bytes.fromhex(t), dtype=np.uint8).reshape(-1, 3) for t in lines.text])
    width, height = lines.x1.iloc[0], lines.y1.iloc[0]
    shown = (pixels * (1 - fade) + 255 * fade).astype(np.uint8)
    ax.imshow(shown, extent=(0, width, height, 0), interpolation="nearest")
    ax.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return width, height


_BOX_STYLE = {
    "referent": dict(ec=COLOUR["referent"], lw=2.6, ls="-"), "reply": dict(ec="black", lw=1.6, ls="--"),
    "unmasked": dict(ec="black", lw=1.6, ls="--"), "vrh": dict(ec=COLOUR["vrh"], lw=2.2, ls="-."),
    "random": dict(ec="#555555", lw=1.4, ls=":"), "changed": dict(ec=COLOUR["vrh"], lw=2.2, ls="-."),
}  # fmt: skip
_OUTSET = {"unmasked": 1.0, "random": 2.0, "reply": 1.0}  # pixels outward, so that equal boxes stay visible


def show_boxes(ax, facts: pd.DataFrame) -> None:
    """The boxes in a panel's facts: the referent, and each condition's reply."""
    label = {"vrh": "reply, VRHs ablated", "random": "reply, random heads ablated", "unmasked": "reply, unmasked",
             "changed": "reply, heads changed"}  # fmt: skip
    for row in facts[facts.fact.isin(list(_BOX_STYLE))].itertuples():
        out = _OUTSET.get(row.fact, 0.0)
        corner, width, height = (row.x0 - out, row.y0 - out), row.x1 - row.x0 + 2 * out, row.y1 - row.y0 + 2 * out
        style = _BOX_STYLE[row.fact] | {"label": label.get(row.fact, row.fact)}
        ax.add_patch(Rectangle(corner, width, height, fill=False, **style))
