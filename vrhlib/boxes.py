"""Boxes, points and masks: what they are, how a model writes them, and which image tokens they cover.

A `Box` is always (x0, y0, x1, y1) in pixels of the *original* image. Models write other frames: pixels
of the resized image (Qwen2.5-VL) or thousandths of each side (Qwen3-VL, InternVL). The frame is a fact
about the model, never guessed from the numbers: a guess hides a wrong scale behind plausible boxes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np


class Box(NamedTuple):
    """Corners in pixels of the original image; half-open, continuous (no +1 in widths)."""

    x0: float
    y0: float
    x1: float
    y1: float

    @property
    def area(self) -> float:
        return max(0.0, self.x1 - self.x0) * max(0.0, self.y1 - self.y0)

    def iou(self, other: Box) -> float:
        """Intersection over union, 0 for degenerate boxes."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        if width <= 0 or height <= 0:
            return 0.0
        shared = width * height
        return shared / (self.area + other.area - shared)

    @classmethod
    def of(cls, row) -> Box | None:
        """The box of a table row with x0, y0, x1, y1; None where they are missing."""
        corners = [float(row[c]) for c in cls._fields]
        return None if any(map(math.isnan, corners)) else cls(*corners)

    def scaled(self, sx: float, sy: float) -> Box:
        return Box(self.x0 * sx, self.y0 * sy, self.x1 * sx, self.y1 * sy)


Frame = Literal["resized", "permille"]
Failure = Literal["no box", "malformed", "degenerate", "cut off"]
Size = tuple[int, int]  # (width, height) in pixels


def to_frame(box: Box, frame: Frame, original: Size, resized: Size) -> Box:
    """A box as the model writes it: pixels of the resized image, or thousandths of each side."""
    width, height = _written_size(frame, resized)
    return box.scaled(width / original[0], height / original[1])


def from_frame(box: Box, frame: Frame, original: Size, resized: Size) -> Box:
    """Inverse of `to_frame`: back to pixels of the original image."""
    width, height = _written_size(frame, resized)
    return box.scaled(original[0] / width, original[1] / height)


def _written_size(frame: Frame, resized: Size) -> Size:
    return {"resized": resized, "permille": (1000, 1000)}[frame]


@dataclass(frozen=True)
class Reply:
    """Generated text and the box read from it, or the reason why there is none."""

    text: str
    box: Box | None
    failure: Failure | None = None

    def __post_init__(self):
        if (self.box is None) == (self.failure is None):
            raise ValueError("A reply has either a box or a failure; an absent box is absent, never zeros.")

    @property
    def well_formed(self) -> bool:
        """The syntax is intact, whatever the place; a degenerate box is well formed."""
        return self.failure in (None, "degenerate")


# One pattern per way of writing a box: group 1 is what stands between the brackets, group 2 the closing bracket if
# there is one. The first box of a reply counts, also where a reply lists several.
_OPENINGS = {
    "bbox_2d": re.compile(r'"bbox(?:_2d)?"\s*:\s*\[\s*\[?([^\[\]]*)(\])?'),
    "box tag": re.compile(r"\[\s*\[([^\[\]]*)(\]\s*\]?)?"),
}
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_FOUR = re.compile(r"\[\s*(" + r"\s*,\s*".join([_NUMBER.pattern] * 4) + r")\s*(\])")  # a list, without key or tag
_TWO = re.compile(r"[\[(]\s*(" + _NUMBER.pattern + r")\s*,\s*(" + _NUMBER.pattern + r")\s*[\])]")


def read_box(text: str, style: str, frame: Frame, original: Size, resized: Size, finished: bool = True) -> Reply:
    """Read the first box of a reply into original pixels.

    `style` names how the model writes boxes: "bbox_2d" (JSON, Qwen) or "box tag" ([[x0,y0,x1,y1]], InternVL); a bare
    list of four numbers is read where there is nothing of that style (the authors' own readers do so). `finished` is
    whether generation ended by itself: an unclosed box of a reply that hit the token limit is "cut off", otherwise
    "malformed". Nothing is clipped to the picture. Never raises on any text.
    """
    found = _first_box(text, style)
    if not found:
        return Reply(text, None, "no box" if finished else "cut off")
    parts = [part.strip() for part in found[1].split(",")]
    if not found[2]:
        return Reply(text, None, "malformed" if finished else "cut off")
    if len(parts) != 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        return Reply(text, None, "malformed")
    written = Box(*map(float, parts))
    box = from_frame(written, frame, original, resized)
    if not all(map(math.isfinite, (*written, *box))):
        return Reply(text, None, "malformed")
    if box.x1 <= box.x0 or box.y1 <= box.y0:
        return Reply(text, None, "degenerate")
    return Reply(text, box)


def _first_box(text: str, style: str) -> re.Match | None:
    return _OPENINGS[style].search(text) or _FOUR.search(text)


def number_spans(text: str, style: str) -> list[tuple[int, int]]:
    """Characters (start, stop) of the numbers of the box that `read_box` reads; none if there is no box to read."""
    if not (found := _first_box(text, style)):
        return []
    return [(found.start(1) + m.start(), found.start(1) + m.end()) for m in _NUMBER.finditer(found[1])]


def read_points(text: str, frame: Frame, original: Size, resized: Size) -> list[tuple[float, float]]:
    """All points of a reply, [x, y] or (x, y), in original pixels; a box in it counts as its centre."""
    corners = [m.groups() * 2 for m in _TWO.finditer(text)] or [m[1].split(",") for m in _FOUR.finditer(text)]
    boxes = [from_frame(Box(*map(float, four)), frame, original, resized) for four in corners]
    centres = [((b.x0 + b.x1) / 2, (b.y0 + b.y1) / 2) for b in boxes]
    return [point for point in centres if all(map(math.isfinite, point))]


# ---------------------------------------------------------------- masks


def encode_mask(segmentation: object, size: Size) -> dict:
    """Run lengths (pycocotools) of COCO polygons, of run lengths as lists, or of an array [height, width] (> 0)."""
    from pycocotools import mask as coco

    width, height = size
    if isinstance(segmentation, np.ndarray):
        return coco.encode(np.asfortranarray(segmentation > 0, dtype=np.uint8))
    if isinstance(segmentation, Mapping):
        listed = isinstance(segmentation["counts"], list)
        return coco.frPyObjects(dict(segmentation), height, width) if listed else dict(segmentation)
    polygons: Sequence = segmentation if isinstance(segmentation[0], Sequence) else [segmentation]
    return coco.merge(coco.frPyObjects([list(map(float, p)) for p in polygons], height, width))


def decode_mask(mask: np.ndarray | Mapping) -> np.ndarray:
    """Bool [height, width] of run lengths, or of an array as it is."""
    if isinstance(mask, np.ndarray):
        return mask.astype(bool)
    from pycocotools import mask as coco

    return coco.decode(dict(mask)).astype(bool)


def box_of_mask(mask: np.ndarray) -> Box:
    """The tight box of a mask, bool [height, width]. Raises ValueError if it is empty."""
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not rows.size:
        raise ValueError("The mask is empty.")
    return Box(float(cols[0]), float(rows[0]), float(cols[-1] + 1), float(rows[-1] + 1))


# ---------------------------------------------------------------- image tokens

Part = Literal["both", "tiles", "thumbnail"]
Rule = Literal["any", "centre", "overlap", "box_share", "soft"]


@dataclass(frozen=True, eq=False)
class TokenGrid:
    """Where each image token looks: `cells` float [V, 4] in original pixels, in the order of the tokens.

    `rows` x `cols` is the layout for drawing. Tiled models (InternVL) see the image twice: `cells` lists
    the tile tokens tile by tile, then those of the thumbnail, which spans the whole image again.
    """

    cells: np.ndarray
    rows: int
    cols: int
    order: np.ndarray  # int [rows, cols]: which token is drawn at (row, col)

    @classmethod
    def regular(cls, rows: int, cols: int, image: Size) -> TokenGrid:
        """Row-major grid over the whole image (Qwen: `image_grid_thw` divided by the merge size)."""
        return cls(_cells(rows, cols, image), rows, cols, np.arange(rows * cols).reshape(rows, cols))

    @classmethod
    def none(cls) -> TokenGrid:
        """The grid of a prompt without an image: no tokens."""
        return cls(np.zeros((0, 4)), 0, 0, np.zeros((0, 0), dtype=int))

    @classmethod
    def tiled(cls, tile_rows: int, tile_cols: int, side: int, image: Size) -> TokenGrid:
        """`side` x `side` tokens a tile, tiles row-major; the thumbnail comes last if there are several tiles."""
        rows, cols = tile_rows * side, tile_cols * side
        order = np.arange(rows * cols).reshape(tile_rows, tile_cols, side, side)
        order = order.transpose(0, 2, 1, 3).reshape(rows, cols)
        cells = np.empty((rows * cols, 4))
        cells[order.ravel()] = _cells(rows, cols, image)
        if tile_rows * tile_cols > 1:
            cells = np.concatenate([cells, _cells(side, side, image)])
        return cls(cells, rows, cols, order)

    def __len__(self) -> int:
        return len(self.cells)

    def part(self, name: Part) -> np.ndarray:
        """Tokens of the tiles, of the thumbnail, or both, bool [V]. A picture of one tile has no thumbnail, and that
        tile stands for both."""
        if name not in get_args(Part):
            raise ValueError(f"Image tokens of {name!r}: choose one of {', '.join(get_args(Part))}.")
        if name == "both":
            return np.ones(len(self), bool)
        tiles = np.isin(np.arange(len(self)), self.order)
        return tiles if name == "tiles" or tiles.all() else ~tiles

    def tokens_in(self, box: Box) -> np.ndarray:
        """Image tokens whose cell overlaps the box (the paper's K_s), bool [V]; at least one is True.

        Raises ValueError if the box lies outside the image.
        """
        x0, y0, x1, y1 = self.cells.T
        inside = (np.minimum(x1, box.x1) > np.maximum(x0, box.x0)) & (np.minimum(y1, box.y1) > np.maximum(y0, box.y0))
        if not inside.any():  # a box without area, or one beside the image
            x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
            inside = (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)
        if not inside.any():
            raise ValueError(f"{box} lies outside the image of {x1.max():g} x {y1.max():g} pixels.")
        return inside

    def weights(self, box: Box, rule: Rule = "any", t: float = 0.0, part: Part = "both") -> np.ndarray:
        """How much each image token belongs to the box, float [V]; something is above 0 in any case.

        any: 1 where its cell overlaps the box; centre: where the cell's centre is in it; overlap: where at least `t` of
        the cell is; box_share: where the cell holds at least `t` of the box; soft: the share of the cell in the box.
        For a box so small that no cell fulfils the rule, the cell that holds most of it does.
        """
        x0, y0, x1, y1 = self.cells.T
        across = np.clip(np.minimum(x1, box.x1) - np.maximum(x0, box.x0), 0, None)
        down = np.clip(np.minimum(y1, box.y1) - np.maximum(y0, box.y0), 0, None)
        allowed = self.part(part)
        near, shared = self.tokens_in(box) & allowed, across * down * allowed
        x, y, cell = (x0 + x1) / 2, (y0 + y1) / 2, (x1 - x0) * (y1 - y0)
        if rule == "any" or not shared.any():
            return near.astype(float)
        found = {
            "centre": (box.x0 <= x) & (x < box.x1) & (box.y0 <= y) & (y < box.y1) & allowed,
            "overlap": near & (shared >= t * cell),
            "box_share": near & (shared >= t * box.area),
            "soft": shared / cell,
        }[rule]
        return (found if found.any() else shared == shared.max()).astype(float)

    def tokens_of(self, mask: np.ndarray) -> np.ndarray:
        """Image tokens whose cell contains a pixel of the mask, bool [V]. `mask`: bool [height, width]."""
        height, width = np.shape(mask)
        if (width, height) != (self.cells[:, 2].max(), self.cells[:, 3].max()):
            raise ValueError(f"A mask of {width} x {height} pixels is not of this image.")
        if not np.any(mask):
            raise ValueError("The referent's mask is empty.")
        # Number of mask pixels left of and above every pixel corner: four look-ups a cell, whatever the image's size.
        total = np.pad(np.asarray(mask, dtype=np.int64), ((1, 0), (1, 0))).cumsum(0).cumsum(1)
        x0, y0 = np.floor(self.cells[:, :2]).astype(int).T
        x1, y1 = np.ceil(self.cells[:, 2:]).astype(int).T
        return total[y1, x1] - total[y0, x1] - total[y1, x0] + total[y0, x0] > 0

    def picture(self, values: np.ndarray) -> np.ndarray:
        """Per-token values laid out as the image, [rows, cols]; a thumbnail's values are not shown."""
        return np.asarray(values)[self.order]


def _cells(rows: int, cols: int, image: Size) -> np.ndarray:
    # Multiplied before divided: an edge that falls on a whole pixel is that pixel, not 1e-14 beside it.
    x = np.arange(cols + 1) * image[0] / cols
    y = np.arange(rows + 1) * image[1] / rows
    left, top = np.meshgrid(x[:-1], y[:-1])
    right, bottom = np.meshgrid(x[1:], y[1:])
    return np.stack([left, top, right, bottom], -1).reshape(-1, 4)
