"""How every figure looks: a colour, marker, dash and hatch for each meaning, and the words that name it.

Also the panels, legends and labels that figures of several kinds share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas

# Okabe-Ito, by meaning.
COLOUR = {
    "vrh": "#D55E00", "random": "#7F7F7F", "layer_matched": "#0072B2", "unmasked": "#000000",
    "one output token": "#CC79A7", "referent": "#009E73", "rows": "#0072B2", "eager": "#E69F00",
    "flip_q": "#56B4E9", "flip_phi": "#CC79A7", "flip_omega": "#009E73", "q_union": "#E69F00",
    "retrieval_heads": "#56B4E9", "qrhead": "#0072B2", "ocr_heads": "#009E73", "vera": "#E69F00",
    "localization_heads": "#CC79A7", "sparsemm": "#8F8400",  # yellow, darkened for white paper
    "ocr_heads_aligned": "#009E73",
    "above_5e-3": "#D55E00", "between": "#F5C88A", "below": "#E4E4E4",
    "borrowed": "#009E73", "other_backbone": "#CC79A7", "chance": "#555555",
    "correct": "#009E73", "wrong box": "#E69F00", "degenerate": "#56B4E9", "malformed": "#CC79A7",
    "cut off": "#8F8400", "no box": "#E4E4E4",
    "both": "#D55E00", "a": "#0072B2", "b": "#CC79A7", "neither": "#7F7F7F",
    "dpo vrh": "#D55E00", "dpo random": "#7F7F7F", "sft": "#0072B2", "not above blind": "#EDEDED",
}  # fmt: skip
LABEL = {
    "vrh": "VRH", "random": "random heads", "layer_matched": "layer-matched random", "unmasked": "unmasked",
    "flip_q": "other queries (expression)", "flip_phi": "other keys (argmax)",
    "flip_omega": "other samples (frequency)", "q_union": "both queries",
    "retrieval_heads": "Retrieval Heads", "qrhead": "QRHead", "ocr_heads": "OCR Heads", "vera": "VERA",
    "localization_heads": "Localization Heads", "sparsemm": "SparseMM", "ocr_heads_aligned": "OCR Heads, aligned",
    "gaze_heads": "Gaze Heads", "mmret_heads": "MMRetHead",
    "above_5e-3": "> 5e-3", "between": "1e-3 to 5e-3", "below": "< 1e-3",
    "sum": "sum over the referent's tokens", "mean": "mean over the referent's tokens",
    "borrowed": "heads of the same-backbone model", "other_backbone": "heads of another backbone",
    "both": "in both top lists", "a": "only in the list of the model on x", "b": "only in the list of the model on y",
    "neither": "in neither list",
    "dpo vrh": "DPO, VRH negatives", "dpo random": "DPO, random-head negatives",
    "sft": "fine-tuned on the chosen replies (SFT)",
}  # fmt: skip
MARKER = {
    "vrh": "o", "random": "s", "layer_matched": "^", "one output token": "D", "rows": "o", "eager": "s",
    "retrieval_heads": "^", "qrhead": "D", "ocr_heads": "v", "vera": "s", "localization_heads": "P", "sparsemm": "X",
    "ocr_heads_aligned": "<",
    "borrowed": "D", "other_backbone": "v", "both": "o", "a": ">", "b": "^", "neither": ".",
    "dpo vrh": "o", "dpo random": "s", "sft": "D",
}  # fmt: skip
DASH = {
    "retrieval_heads": "--", "qrhead": ":", "ocr_heads": "-.", "vera": (0, (5, 1)),
    "localization_heads": (0, (3, 1, 1, 1, 1, 1)), "sparsemm": (0, (1, 1)), "ocr_heads_aligned": (0, (4, 1, 1, 1)),
    "dpo vrh": "-", "dpo random": "--", "sft": ":",
}  # fmt: skip
HATCH = {
    "flip_q": "//", "flip_phi": "\\\\", "flip_omega": "..", "q_union": "xx", "between": "///", "below": "..",
    "wrong box": "//", "degenerate": "\\\\", "malformed": "..", "cut off": "xx", "no box": "--",
    "dpo random": "//", "sft": "..", "not above blind": "////",
}  # fmt: skip
CONDITIONS = ("unmasked", "random", "layer_matched", "vrh")
# Colour, marker and dash of whatever has no row above, in turn.
_SPARE = [("#0072B2", "p", "-"), ("#E69F00", "d", "--"), ("#009E73", "<", "-."), ("#CC79A7", ">", ":"),
          ("#56B4E9", "*", (0, (5, 1))), ("#8F8400", "h", (0, (3, 1, 1, 1)))]  # fmt: skip
RC = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110, "pdf.fonttype": 42,
      "axes.titlesize": 9, "axes.titleweight": "bold", "legend.frameon": False}  # fmt: skip


def subplots(width: float, height: float, rows: int = 1, cols: int = 1, **kwargs) -> tuple[Canvas, np.ndarray]:
    """An empty canvas of so many inches and its panels [rows, cols]."""
    canvas = Canvas(figsize=(width, height), layout="constrained")
    return canvas, canvas.subplots(rows, cols, squeeze=False, **kwargs)


def handles_of(axes: np.ndarray, first: Sequence[str] = ()) -> dict[str, object]:
    """Legend entries of all panels, each label once; those that begin with `first` come first, in that order."""
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels())}
    ahead = {label: h for words in first for label, h in handles.items() if label.startswith(words)}
    return ahead | handles


def legend_above(canvas: Canvas, axes: np.ndarray, columns: int | None = None, first: Sequence[str] = ()) -> None:
    """One legend for all panels, above them: inside, it would lie on a curve."""
    handles = handles_of(axes, first)
    width = canvas.get_figwidth()
    columns = columns or (4 if width > 9 else 2 if width > 6.2 else 1)  # a label is up to three inches long
    canvas.legend(handles.values(), handles.keys(), fontsize=7.5, loc="outside upper center", ncols=columns)


def looks_of(names: Sequence[str]) -> dict[str, dict]:
    """Colour, marker and dash for every name; `method@data` looks like its method, its marker filled differently from
    the second kind of data on, and a name without a colour of its own takes the next spare one."""
    spare, looks, times = itertools.cycle(_SPARE), {}, {}
    for name in names:
        base = name.partition("@")[0]
        if base not in times:
            own = (COLOUR[base], MARKER[base], DASH[base]) if base in DASH else next(spare)
            times[base] = dict(zip(("color", "marker", "ls"), own)), itertools.cycle(("full", "none", "left", "bottom"))
        look, fills = times[base]
        looks[name] = look | {"fillstyle": next(fills)}
    return looks


def method_label(name: str) -> str:
    """A method's name in words; what follows @ is the data it was detected on."""
    base, _, data = name.partition("@")
    return LABEL.get(base, base) + (f" @ {data.replace('_', ' ')}" if data else "")


def n_of(rows: pd.DataFrame) -> str:
    """The number of samples behind the rows, as a title says it: `n=200`, `n=96–200`."""
    low, high = rows.n.min(), rows.n.max()
    return "n not given" if np.isnan(low) else f"n={span(low, high)}"


def span(low: float, high: float, digits: int = 0) -> str:
    """One number, or the two ends of several: `200`, `96–200`."""
    ends = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return ends[0] if ends[0] == ends[1] else "–".join(ends)


def signed(value: float, digits: int = 1) -> str:
    """A change with its sign: `+3.5`, `−3.5`, and `+0.0` whatever the sign of what was rounded away."""
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def star(low: float, high: float) -> str:
    """`*` where an interval excludes 0, which a missing one does not."""
    return "*" if low > 0 or high < 0 else ""


def ink_on(colour: object) -> str:
    """Black or white, whichever has more contrast on this colour (WCAG relative luminance)."""
    channels = np.array(to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "white"


def seeds_of(rows: pd.DataFrame) -> str:
    """How many seeds stand behind a point, over all points of the lines that have several; "" if none has."""
    counts = rows.groupby(["model", "benchmark", "condition", "k"]).seed.nunique()
    counts = counts[counts.groupby(["model", "benchmark", "condition"]).transform("max") > 1]
    return "" if counts.empty else span(counts.min(), counts.max())


def not_measured(ax, x: float, y: float, **more) -> None:
    """Say so in the place where a bar or a line would be."""
    ax.text(x, y, "not measured", va="center", fontsize=8, style="italic", color="#555555", **more)


def stacked_bars(ax, y: Sequence[int], rows: pd.DataFrame, parts: Mapping[str, str]) -> None:
    """A bar of 100 % a row, divided into its parts (column: label), the wide ones with their number."""
    left = np.zeros(len(rows))
    behind = {"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
    for part, label in parts.items():
        shares = rows[part].to_numpy()
        style = {"color": COLOUR[part], "hatch": HATCH.get(part), "ec": "#777777", "lw": 0.5}
        ax.barh(y, shares, 0.62, left=left, label=label, **style)
        for at, start, share in zip(y, left, shares):
            if share >= 4:
                ax.text(start + share / 2, at, f"{share:.0f}", ha="center", va="center", fontsize=7.5, bbox=behind)
        left = left + shares
