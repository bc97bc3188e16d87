"""Synthetic pictures with exact boxes and masks, and expressions that name exactly one thing in them.

A picture is a seed. `scene` draws coloured shapes, `signs` coloured signs with a word on each, `document` a page
of lines with two words each. The things of a scene are named by *referring expressions* of six kinds:

    attribute   the red circle | the circle | the red shape
    size        the small red circle          (there is a large one too)
    position    the leftmost circle           (among several circles)
    relation    the circle above the red ring (among several circles, one of which is above it)
    long        the red circle that is above the small blue ring
    question    Which circle is above the red ring?

An expression is kept only if it is true of exactly one thing. The thing it names wins by `MARGIN` pixels (the
next leftmost thing is that far behind, the thing above the ring that far above it), and every rival of a relation
fails it by at least `CLEAR`. Boxes are half-open pixel ranges (x0, y0, x1, y1): the mask of a shape or a sign
touches all four sides of its box; a line of a document has a margin of two pixels or more.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 128, 96  # not square on purpose: a swapped axis shows at once
STEP = 2  # every box edge lies on this pixel grid
MARGIN = 12  # pixels by which a position or relation must hold
CLEAR = 4  # pixels by which every rival must fail a relation
FRAME = 2  # dark border; it gives a vision tower without absolute positions something to measure from

COLOURS = {
    "red": (214, 39, 40), "green": (44, 150, 60), "blue": (45, 85, 215), "yellow": (240, 212, 40),
    "purple": (140, 55, 175), "orange": (245, 135, 30), "cyan": (60, 200, 220),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
SIZES = {"small": (14, 16, 18), "large": (26, 28, 30, 32)}  # side in pixels
WORDS = tuple("cat dog sun map cup hat pen bus ant egg ice jar net owl fox gem".split())  # on signs and in documents
KINDS = ("attribute", "size", "position", "relation", "long", "question")
SPLITS = {"train": 0, "detect": 1, "test": 2, "dev": 3}  # first word of a picture's seed: no two splits share one
SUPERLATIVES = {"leftmost": (0, -1), "rightmost": (0, 1), "topmost": (1, -1), "lowest": (1, 1)}
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}


@dataclass(frozen=True)
class Thing:
    """One object: its words and its box, half-open (x0, y0, x1, y1) in pixels.

    A sign has a colour and a `text`; a line of a document has a `key` (its first word) and a `text` (its second).
    """

    shape: str
    colour: str
    size: str
    box: tuple[int, int, int, int]
    text: str = ""
    key: str = ""

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True)
class Expression:
    """A referring expression, its kind (one of `KINDS`), the index of the one thing it names, and how many things
    its noun alone would fit."""

    text: str
    kind: str
    referent: int
    candidates: int = 1


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
            if thing.key:
                canvas[self.mask(thing)] = rng.integers(20, 60)
                continue
            colour = np.asarray(COLOURS[thing.colour]) + rng.integers(-12, 13, 3)
            canvas[self.mask(thing)] = colour
            if thing.text:
                ink = 30 if colour @ (0.299, 0.587, 0.114) > 140 else 240
                canvas[_written(thing.text, thing.box[0] + 4, thing.box[1] + 3)] = ink
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
        if thing.key:
            return _written(thing.key, x0 + 2, y0 + 2) | _written(thing.text, x0 + 26, y0 + 2)
        mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
        mask[y0:y1, x0:x1] = True if thing.text else _stencil(thing.shape, x1 - x0)
        return mask


@cache
def _letters(word: str) -> np.ndarray:
    """A word in Pillow's built-in bitmap font, bool [11, 6 * letters]."""
    font = ImageFont.load_default_imagefont()
    picture = Image.new("1", (6 * len(word), 11))
    ImageDraw.Draw(picture).text((0, 0), word, 1, font=font)
    return np.array(picture)


def _written(word: str, x: int, y: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    letters = _letters(word)
    mask[y : y + letters.shape[0], x : x + letters.shape[1]] = letters
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


def signs(seed: tuple[int, ...]) -> Scene:
    """Three to five signs of different colours with a different word on each."""
    rng = np.random.default_rng((*seed, 6))
    count = int(rng.integers(3, 6))
    colours, words = rng.permutation(list(COLOURS)), rng.permutation(WORDS)
    while True:
        placed: list[Thing] = []
        for _ in range(count * 12):
            x, y = (
                int(rng.integers(2, (limit - side) // STEP - 1)) * STEP for limit, side in ((WIDTH, 26), (HEIGHT, 16))
            )
            box = (x, y, x + 26, y + 16)
            if all(_apart(box, other.box) for other in placed):
                i = len(placed)
                placed.append(Thing("sign", str(colours[i]), "", box, text=str(words[i])))
            if len(placed) == count:
                return Scene(tuple(placed), tuple(seed))


def document(seed: tuple[int, ...]) -> Scene:
    """A page of three to five lines, each with two words of its own: `cat   sun`."""
    rng = np.random.default_rng((*seed, 7))
    count, words = int(rng.integers(3, 6)), rng.permutation(WORDS)
    lines = []
    for i in range(count):
        x, y = int(rng.integers(2, 38)) * STEP, 4 + 18 * i
        lines.append(Thing("line", "", "", (x, y, x + 46, y + 14), text=str(words[2 * i]), key=str(words[2 * i + 1])))
    return Scene(tuple(lines), tuple(seed))


def _apart(a: tuple, b: tuple, gap: int = 2) -> bool:
    return a[0] >= b[2] + gap or b[0] >= a[2] + gap or a[1] >= b[3] + gap or b[1] >= a[3] + gap


def nouns(scene: Scene) -> dict[str, list[int]]:
    """Every noun phrase without size or place, and the things it is true of."""
    fits: dict[str, list[int]] = {}
    for i, t in enumerate(scene.things):
        for noun in (t.shape, f"{t.colour} shape", f"{t.colour} {t.shape}"):
            fits.setdefault(noun, []).append(i)
    return fits


def expressions(scene: Scene) -> list[Expression]:
    """Every expression that names exactly one thing of the scene, in a fixed order."""
    things, fits = scene.things, nouns(scene)
    found: list[Expression] = []

    def offer(kind: str, text: str, question: str, referent: int, candidates: int = 1) -> None:
        found.append(Expression(text, kind, referent, candidates))
        if question:
            found.append(Expression(question, "question", referent, candidates))

    for noun, who in fits.items():
        if len(who) == 1:
            colour, _, head = noun.rpartition(" ")
            offer("attribute", f"the {noun}", f"Which {head} is {colour}?" if colour else "", who[0])
    anchors = [(e.text, e.referent) for e in found if e.kind == "attribute"]
    full = [(f"the {t.size} {t.colour} {t.shape}", i) for i, t in enumerate(things)
            if sum((t.size, t.colour, t.shape) == (o.size, o.colour, o.shape) for o in things) == 1]  # fmt: skip
    for noun, who in fits.items():
        if len(who) < 2:
            continue
        for size in SIZES:
            named = [i for i in who if things[i].size == size]
            if len(named) == 1:
                offer("size", f"the {size} {noun}", f"Which {noun} is {size}?", named[0], len(who))
        for word, (axis, sign) in SUPERLATIVES.items():
            order = sorted(who, key=lambda i: -sign * things[i].centre[axis])
            if sign * (things[order[0]].centre[axis] - things[order[1]].centre[axis]) >= MARGIN:
                offer("position", f"the {word} {noun}", f"Which {noun} is {word}?", order[0], len(who))
        for word, (axis, sign) in RELATIONS.items():
            for kind, landmarks in (("relation", anchors), ("long", full)):
                for text, anchor in landmarks:
                    if anchor in who:
                        continue
                    lead = [sign * (things[i].centre[axis] - things[anchor].centre[axis]) for i in who]
                    *rivals, best = sorted(lead)
                    if best >= MARGIN and rivals[-1] <= -CLEAR:
                        i = who[int(np.argmax(lead))]
                        that = " that is" if kind == "long" else ""
                        question = f"Which {noun} is {word} {text}?" if kind == "relation" else ""
                        offer(kind, f"the {noun}{that} {word} {text}", question, i, len(who))
    return found


def draw_kind(rng: np.random.Generator, shares: dict[str, float]) -> str:
    """One of the keys, as often as its share of the sum says."""
    weights = np.array(list(shares.values()))
    return list(shares)[int(rng.choice(len(weights), p=weights / weights.sum()))]


def draw_expression(
    scene: Scene,
    rng: np.random.Generator,
    kinds: dict[str, float],
    candidates: int = 1,
    said: list[Expression] | None = None,
) -> Expression | None:
    """One expression: first its kind by weight (among the kinds this scene offers), then uniformly.

    `candidates`: how many things its noun must fit at least. None if the scene offers no such expression.
    """
    offered: dict[str, list[Expression]] = {}
    for e in expressions(scene) if said is None else said:
        if e.candidates >= candidates:
            offered.setdefault(e.kind, []).append(e)
    names = [k for k in kinds if kinds[k] > 0 and k in offered]
    if not names:
        return None
    kind = draw_kind(rng, {k: kinds[k] for k in names})
    return offered[kind][int(rng.integers(len(offered[kind])))]
