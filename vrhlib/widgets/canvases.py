"""Pictures that answer a click: heads on their grid, a picture with boxes and segments, a reply by tokens, a curve.

Each is one ES module, `draw.js` and its own file below it, plain DOM and SVG without a library, so that a page without
a kernel can run the very same code on stored values. A trait is the whole interface: nothing is computed in the browser
that is not one of them, and an empty one shows as nothing or as a short text, never as an error.
"""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

_HERE = Path(__file__).parent


def module(name: str) -> str:
    """The source of a canvas as one ES module."""
    return "".join((_HERE / f"{part}.js").read_text() for part in ("draw", name))


class HeadMap(anywidget.AnyWidget):
    """Scores of all heads, layers x heads, brighter for higher; a click or Enter knocks a head out or puts it back."""

    _esm = module("headmap")
    _css = _HERE / "canvases.css"

    grid = traitlets.List(traitlets.Int(), help="[layers, heads per layer]").tag(sync=True)
    scores = traitlets.List(help="one float a head, row-major over `grid`; None: no score, and no rank").tag(sync=True)
    published = traitlets.Dict(help="head name, as L19H17, to its published rank from 1; may be empty").tag(sync=True)
    chosen = traitlets.List(help="[layer, head] of the heads knocked out, in the order of the clicks").tag(sync=True)
    disabled = traitlets.Bool(False, help="whether clicks and keys leave `chosen` as it is").tag(sync=True)
    word = traitlets.Unicode("knocked out", help="what a click makes of a head, for the legend").tag(sync=True)
    label = traitlets.Unicode("head scores", help="what a screen reader calls the grid").tag(sync=True)


class Picture(anywidget.AnyWidget):
    """A picture under boxes, with segments to choose from. All geometry is in pixels of the original picture.

    `boxes`: {"name": "referent" | "unmasked" | "reply" | any other, which decides the stroke, "label": words of the
    legend, "box": [x0, y0, x1, y1], or None for a reply without one, which the legend says}.
    `segments`: {"name": words, "path": SVG path data, holes by the even-odd rule}; where two overlap, the later is hit.
    """

    _esm = module("picture")
    _css = _HERE / "canvases.css"

    image = traitlets.Bytes(help="a PNG of any resolution, stretched over `size`").tag(sync=True)
    size = traitlets.List(traitlets.Int(), help="[width, height] in original pixels").tag(sync=True)
    boxes = traitlets.List(traitlets.Dict(), help="see above").tag(sync=True)
    segments = traitlets.List(traitlets.Dict(), help="see above").tag(sync=True)
    chosen = traitlets.Int(-1, help="index of the chosen segment; -1: none").tag(sync=True)
    caption = traitlets.Unicode(help="words above the picture").tag(sync=True)
    disabled = traitlets.Bool(False, help="whether clicks and keys leave `chosen` as it is").tag(sync=True)
    label = traitlets.Unicode("picture", help="alternative text").tag(sync=True)


class Stepper(anywidget.AnyWidget):
    """Where sets of heads look while a reply is written, token by token, over the picture. Needs no kernel to step.

    The attention of a set is the sum over its heads, so the `mass` of four heads can exceed 1. `boxes` as in `Picture`.
    """

    _esm = module("stepper")
    _css = _HERE / "canvases.css"

    image = traitlets.Bytes(help="a PNG of any resolution, stretched over `size`").tag(sync=True)
    size = traitlets.List(traitlets.Int(), help="[width, height] in original pixels").tag(sync=True)
    tokens = traitlets.List(traitlets.Unicode(), help="the reply's tokens, decoded one by one").tag(sync=True)
    sets = traitlets.List(traitlets.Unicode(), help="names of the sets of heads, as `top 4`").tag(sync=True)
    shown = traitlets.Unicode(help="the set that is shown; one not in `sets` shows the first").tag(sync=True)
    maps = traitlets.Bytes(help="uint8 [sets, tokens, rows, cols], C order: attention / peak * 255").tag(sync=True)
    peaks = traitlets.List(traitlets.Float(), help="per set, the attention that 255 stands for").tag(sync=True)
    mass = traitlets.List(help="per set, per token: attention on the evidence tokens, or None").tag(sync=True)
    grid = traitlets.List(traitlets.Int(), help="[rows, cols] of image tokens over the whole picture").tag(sync=True)
    evidence = traitlets.List(help="[row, col] of the referent's image tokens; may be empty").tag(sync=True)
    boxes = traitlets.List(traitlets.Dict(), help="as in `Picture`").tag(sync=True)
    step = traitlets.Int(0, help="index of the token shown; out of range, the nearest is").tag(sync=True)
    opacity = traitlets.Float(0.65, help="of the attention over the picture, 0 to 1").tag(sync=True)
    label = traitlets.Unicode("picture with attention", help="alternative text").tag(sync=True)


class Curve(anywidget.AnyWidget):
    """Accuracy against the number k of ablated heads, where on it we are, and what the replies become there.

    `series`: {"name", "label": words of the legend, "colour": CSS colour (black follows the theme), "dash": SVG dash
    array in pixels or "", "points": [[k, accuracy, low, high], ...]}. `band`: {"label", "points":
    [[k, low, mean, high], ...]}, or empty. Accuracies and their ends are percent; a missing low or high is None.
    """

    _esm = module("curve")
    _css = _HERE / "canvases.css"

    series = traitlets.List(traitlets.Dict(), help="see above").tag(sync=True)
    band = traitlets.Dict(allow_none=True, default_value=None, help="see above").tag(sync=True)
    at = traitlets.Float(0, help="k now; need not be a measured one").tag(sync=True)
    value = traitlets.Float(None, allow_none=True, help="accuracy now, percent; None: unknown").tag(sync=True)
    outcomes = traitlets.Dict(help="outcome name to percent of the replies at `at`; may be empty").tag(sync=True)
    title = traitlets.Unicode(help="words above").tag(sync=True)
    note = traitlets.Unicode(help="words below, as `n=100; 95 % Wilson intervals`").tag(sync=True)
    label = traitlets.Unicode("accuracy by number of ablated heads", help="alternative text").tag(sync=True)
