"""What all views share: where their controls stood, what went wrong, and a picture for those who cannot run them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress

import ipywidgets
import numpy as np
import traitlets
from PIL import Image

from vrhlib.boxes import Box
from vrhlib.figures import Figure

# Where the controls of each view stood when they last moved: a cell that is run again goes on from there.
_LEFT: dict[Hashable, dict[str, object]] = {}
WIDEST = 640  # pixels of a picture as the browser gets it


class View(ipywidgets.VBox):
    """Controls and canvases; `_show` draws what they stand at, `_still` the same as a figure.

    A subclass builds its parts, then calls `_begin`. An error while a person plays is shown below the view and leaves
    what was there; one in the first state is raised, or a headless run would pass in silence.
    """

    def _begin(
        self,
        key: Hashable,
        parts: Sequence[ipywidgets.Widget],
        remembered: Mapping[str, tuple[ipywidgets.Widget, str]],
        moved: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        """Lay out the parts and draw the first state.

        `remembered`: name to (widget, trait) of everything that a person moves; what `key` had there before is put
        back where it still exists. `moved`: what to do when one of them changes, before everything is drawn.
        """
        self._error, self._status = ipywidgets.HTML(), ipywidgets.HTML()
        self._parts, self._key, self._quiet = remembered, key, True
        self._before = dict(moved or {})
        super().__init__([*parts, self._status, self._error])
        self.add_class("vrh-view")
        self._put({})
        first, left = {name: getattr(*part) for name, part in remembered.items()}, _LEFT.setdefault(key, {})
        try:
            self._put(left)
            self._show()
        except Exception as error:
            if not left:
                raise
            left.clear()  # what a person left there fails now: begin anew, or the cell could not be run again
            self._put(first)
            self._show()
            self._fail(error)
        self._quiet = False
        for name, (widget, trait) in remembered.items():
            widget.observe(lambda change, name=name: self._moved(name, change.new), trait)

    def _put(self, values: Mapping[str, object]) -> None:
        """Move the controls there, as far as they know the values."""
        for name, (widget, trait) in self._parts.items():
            if name in values:
                with suppress(traitlets.TraitError, ValueError):
                    setattr(widget, trait, values[name])
            if name in self._before:
                self._before[name]()

    def _show(self) -> None:
        raise NotImplementedError

    def _still(self) -> Figure:
        raise NotImplementedError

    def _in_words(self) -> str:
        """What is shown, for those who cannot see it."""
        raise NotImplementedError

    def _kept(self, name: str) -> dict:
        """Something of this view's own that outlives the cell, as the controls' values do; empty at first."""
        return _LEFT.setdefault((self._key, name), {})

    def _moved(self, name: str, value: object) -> None:
        _LEFT[self._key][name] = value
        if self._quiet:  # moved by us
            return

        def work() -> None:
            if name in self._before:
                self._before[name]()
            self._show()

        self._guarded(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what a person asked for; what goes wrong stands below the view, not in a log that nobody reads."""
        self._quiet = True
        try:
            self._say("")
            self._error.value = ""
            work()
        except Exception as error:
            self._say("")  # whatever was running is not any more
            self._fail(error)
        finally:
            self._quiet = False

    def _fail(self, error: Exception) -> None:
        said = html.escape(str(error) or type(error).__name__)
        self._error.value = f'<div role="alert" class="vrh-error">{said}</div>'

    def _say(self, words: str) -> None:
        self._status.value = f'<div role="status" class="vrh-line">{html.escape(words)}</div>' if words else ""

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        shown = {"image/png": base64.b64encode(self._still().png()).decode(), "text/plain": self._in_words()}
        return {**(data or {}), **shown}, metadata


def png(image: Image.Image) -> bytes:
    """A picture as the browser gets it: PNG, at most `WIDEST` pixels wide or high."""
    buffer, scale = io.BytesIO(), min(1.0, WIDEST / max(image.size))
    small = image.convert("RGB")
    if scale < 1:
        small = small.resize([max(1, round(side * scale)) for side in image.size])
    small.save(buffer, format="PNG")
    return buffer.getvalue()


def boxed(name: str, label: str, box: Box | None) -> dict:
    """A box as `canvases.Picture` wants it."""
    return {"name": name, "label": label, "box": None if box is None else [round(float(x), 1) for x in box]}


def outline(box: Box, mask: np.ndarray | None) -> str:
    """SVG path data of a segment in pixels: the edges of its mask, closed loop by loop (even-odd), or its box."""
    if mask is None:
        return f"M{box.x0:g} {box.y0:g}H{box.x1:g}V{box.y1:g}H{box.x0:g}Z"
    inside = np.pad(mask.astype(np.int8), 1)
    across, down = np.diff(inside, axis=0)[:, 1:-1], np.diff(inside, axis=1)[1:-1]
    after: dict[tuple[int, int], list[tuple[int, int]]] = {}  # corner to the corners that an edge leads to, mask right
    for y, x in np.argwhere(across).tolist():
        start, end = ((x, y), (x + 1, y))[:: int(across[y, x])]
        after.setdefault(start, []).append(end)
    for y, x in np.argwhere(down).tolist():
        start, end = ((x, y + 1), (x, y))[:: int(down[y, x])]
        after.setdefault(start, []).append(end)
    return "".join(_loops(after))


def _loops(after: dict[tuple[int, int], list[tuple[int, int]]]) -> Iterator[str]:
    """Path data of the closed loops that edges form; straight on is one line."""
    while after:
        first = at = next(iter(after))
        words, along = [f"M{at[0]} {at[1]}"], None
        while True:
            ends = after[at]
            to = ends.pop()
            if not ends:
                del after[at]
            word = f"H{to[0]}" if to[1] == at[1] else f"V{to[1]}"
            words[len(words) - (word[0] == along) :] = [word]
            at, along = to, word[0]
            if at == first:
                break
        yield "".join([*words[:-1], "Z"])


def menu(name: str, options: Sequence, **more) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=list(options), description=name, layout={"width": "max-content"}, **more)


def number(name: str, most: int, value: int = 0, **more) -> ipywidgets.IntSlider:
    """A slider over whole numbers from 0; arrow keys move it."""
    return ipywidgets.IntSlider(
        value=min(value, most), min=0, max=most, description=name, continuous_update=False, **more
    )


def row(*parts: ipywidgets.Widget) -> ipywidgets.HBox:
    return ipywidgets.HBox(list(parts), layout={"flex_flow": "row wrap", "align_items": "flex-start"})
