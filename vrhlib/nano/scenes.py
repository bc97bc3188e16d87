"""Synthetic scenes: coloured shapes with exact boxes and masks, and expressions that name exactly one.

A scene is a seed. From it follow three to eight non-overlapping things (shape x colour x size), the
picture, and every *referring expression* of four kinds that singles out one of them:

    attribute   the red circle | the circle | the red shape
    size        the small red circle          (there is a large one too)
    position    the leftmost circle           (among several circles)
    relation    the circle above the red ring (among several circles, one of which is above it)

An expression is kept only if it is true of exactly one thing. The thing it names wins by `MARGIN` pixels:
the next leftmost thing is that far behind, the thing above the ring that far above it. (A rival of a relation
only has to fail it, by however little: 12 % of relations have one within 4 pixels of passing.) Boxes are
half-open pixel ranges (x0, y0, x1, y1): the mask of a thing touches all four sides of its box.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 128, 96  # not square on purpose: a swapped axis shows at once
STEP = 2  # every box edge lies on this pixel grid
MARGIN = 8  # pixels by which a position or relation must hold
FRAME = 2  # dark border; it gives a vision tower without absolute positions something to measure from

COLOURS = {
    "red": (214, 39, 40), "green": (44, 150, 60), "blue": (45, 85, 215), "yellow": (240, 212, 40),
    "purple": (140, 55, 175), "orange": (245, 135, 30), "cyan": (60, 200, 220),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
SIZES = {"small": (14, 16, 18), "large": (26, 28, 30, 32)}  # side in pixels
KINDS = ("attribute", "size", "position", "relation")
MIX = {"attribute": 0.4, "size": 0.2, "position": 0.25, "relation": 0.15}  # how often each kind is asked
SPLITS = {"train": 0, "detect": 1, "test": 2, "dev": 3}  # first word of a scene's seed: no two splits share one
_SUPERLATIVES = {"leftmost": (0, -1), "rightmost": (0, 1), "topmost": (1, -1), "lowest": (1, 1)}
_RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}


@dataclass(frozen=True)
class Thing:
    """One object: its words and its box, half-open (x0, y0, x1, y1) in pixels."""

    shape: str
    colour: str
    size: str
    box: tuple[int, int, int, int]

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True)
class Expression:
    """A referring expression, its kind (one of `KINDS`) and the index of the one thing it names."""

    text: str
    kind: str
    referent: int


@dataclass(frozen=True)
class Scene:
    """Things plus the seed that draws background and colour jitter."""

    things: tuple[Thing, ...]
    seed: tuple[int, ...]

    @cached_property
    def pixels(self) -> np.ndarray:
        """The picture, uint8 [HEIGHT, WIDTH, 3]."""
        rng = np.random.default_rng((*self.seed, 1))
        canvas = np.full((HEIGHT, WIDTH, 3), rng.integers(215, 246), dtype=np.int16)
        for thing in self.things:
            colour = np.asarray(COLOURS[thing.colour]) + rng.integers(-12, 13, 3)
            canvas[self.mask(thing)] = colour
        canvas += rng.integers(-4, 5, canvas.shape, dtype=np.int16)
        canvas[:FRAME], canvas[-FRAME:], canvas[:, :FRAME], canvas[:, -FRAME:] = 40, 40, 40, 40
        return np.clip(canvas, 0, 255).astype(np.uint8)

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.pixels)

    @property
    def image_key(self) -> str:
        """Digest of the pixels: two scenes share it only if they are the same picture."""
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()[:16]

    def mask(self, thing: Thing) -> np.ndarray:
        """Pixels of one thing, bool [HEIGHT, WIDTH]."""
        x0, y0, x1, y1 = thing.box
        mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
        mask[y0:y1, x0:x1] = _stencil(thing.shape, x1 - x0)
        return mask


def _stencil(shape: str, side: int) -> np.ndarray:
    """Filled shape on a side x side grid, touching all four sides."""
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    radius = side / 2
    match shape:
        case "circle":
            return x**2 + y**2 <= radius**2
        case "ring":
            return (x**2 + y**2 <= radius**2) & (x**2 + y**2 >= (0.5 * radius) ** 2)
        case "square":
            return np.ones((side, side), dtype=bool)
        case "diamond":
            return abs(x) + abs(y) <= radius
        case "cross":
            return (abs(x) <= side / 6) | (abs(y) <= side / 6)
        case "triangle":
            return abs(x) <= (y + radius + 0.5) / 2
    raise ValueError(f"Unknown shape {shape!r}; there are {', '.join(SHAPES)}.")


def scene(seed: tuple[int, ...], things: int | None = None) -> Scene:
    """Draw the scene of a seed, with `things` objects (default: 3 to 8, uniform).

    Shapes and colours come from small palettes drawn per scene, so that most things share their
    colour or their shape with another one: naming the shape alone rarely suffices.
    """
    rng = np.random.default_rng((*seed, 0))
    count = int(rng.integers(3, 9)) if things is None else things
    if not 1 <= count <= 8:
        raise ValueError(f"{count} things; a scene has 1 to 8, more do not fit.")
    shapes = rng.choice(SHAPES, 3, replace=False)
    colours = rng.choice(list(COLOURS), 3, replace=False)
    while True:  # a crowded draw that does not fit is drawn again
        placed: list[Thing] = []
        for _ in range(count * 12):
            size = str(rng.choice(list(SIZES)))
            side = int(rng.choice(SIZES[size]))
            x = int(rng.integers(2, (WIDTH - side) // STEP - 1)) * STEP
            y = int(rng.integers(2, (HEIGHT - side) // STEP - 1)) * STEP
            box = (x, y, x + side, y + side)
            if all(_apart(box, other.box) for other in placed):
                placed.append(Thing(str(rng.choice(shapes)), str(rng.choice(colours)), size, box))
            if len(placed) == count:
                return Scene(tuple(placed), tuple(seed))


def _apart(a: tuple, b: tuple, gap: int = 2) -> bool:
    return a[0] >= b[2] + gap or b[0] >= a[2] + gap or a[1] >= b[3] + gap or b[1] >= a[3] + gap


def expressions(scene: Scene) -> list[Expression]:
    """Every expression that names exactly one thing of the scene, in a fixed order."""
    things = scene.things
    nouns: dict[str, list[int]] = {}
    for i, t in enumerate(things):
        for noun in (t.shape, f"{t.colour} shape", f"{t.colour} {t.shape}"):
            nouns.setdefault(noun, []).append(i)

    found = [Expression(f"the {noun}", "attribute", who[0]) for noun, who in nouns.items() if len(who) == 1]
    anchors = [(e.text, e.referent) for e in found]
    for noun, who in nouns.items():
        if len(who) < 2:
            continue
        for size in SIZES:
            named = [i for i in who if things[i].size == size]
            if len(named) == 1:
                found.append(Expression(f"the {size} {noun}", "size", named[0]))
        for word, (axis, sign) in _SUPERLATIVES.items():
            order = sorted(who, key=lambda i: -sign * things[i].centre[axis])
            if sign * (things[order[0]].centre[axis] - things[order[1]].centre[axis]) >= MARGIN:
                found.append(Expression(f"the {word} {noun}", "position", order[0]))
        for text, anchor in anchors:
            if anchor in who:
                continue
            for word, (axis, sign) in _RELATIONS.items():
                lead = [sign * (things[i].centre[axis] - things[anchor].centre[axis]) for i in who]
                if sum(d > 0 for d in lead) == 1 and max(lead) >= MARGIN:
                    found.append(Expression(f"the {noun} {word} {text}", "relation", who[int(np.argmax(lead))]))
    return found


def draw_expression(scene: Scene, rng: np.random.Generator, kinds: dict[str, float]) -> Expression | None:
    """One expression: first its kind by weight (among the kinds this scene offers), then uniformly.

    None if the scene offers no expression of the wanted kinds.
    """
    offered: dict[str, list[Expression]] = {}
    for e in expressions(scene):
        offered.setdefault(e.kind, []).append(e)
    names = [k for k in kinds if kinds[k] > 0 and k in offered]
    if not names:
        return None
    weights = np.array([kinds[k] for k in names])
    kind = names[int(rng.choice(len(names), p=weights / weights.sum()))]
    return offered[kind][int(rng.integers(len(offered[kind])))]
