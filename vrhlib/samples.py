"""Every benchmark as `Sample`s: a picture, a text, and the referent's box in original pixels.

`grounding(benchmark, split, n, seed)` is the one way in. The splits `detect` and `test` of a benchmark
are disjoint by *image*, not by row: heads found on a picture are never judged on it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vrhlib import store
from vrhlib.boxes import Box
from vrhlib.nano import scenes


@dataclass(frozen=True, eq=False)
class Sample:
    """One question about one image. `box` in original pixels; `mask` bool [height, width] or None.

    `image_key` identifies the picture across samples; `answer` and `choices` are for questions whose
    answer is text; `kind` groups samples for a breakdown; `chance` is the probability that a reader who
    ignores the text is right (one of the things in the picture, picked at random).
    """

    id: str
    image: Image.Image
    image_key: str
    text: str
    box: Box | None = None
    mask: np.ndarray | None = None
    answer: str | None = None
    choices: tuple[str, ...] = ()
    kind: str = ""
    chance: float | None = None

    def __post_init__(self):
        if self.box is not None:
            width, height = self.image.size
            x0, y0, x1, y1 = self.box
            if not (0 <= x0 < x1 <= width + 1 and 0 <= y0 < y1 <= height + 1 and x0 < width and y0 < height):
                raise ValueError(f"Sample {self.id}: {self.box} is not a box inside an image of {width} x {height}.")

        if self.mask is not None and self.mask.shape != self.image.size[::-1]:
            raise ValueError(f"Sample {self.id}: a mask of {self.mask.shape} for an image of {self.image.size}.")

    @property
    def fingerprint(self) -> str:
        """Changes when anything that determines a reply changes: the run key is built from it."""
        return store.digest([self.id, self.image_key, self.text, self.box and [*map(float, self.box)]])


class Samples(Sequence[Sample]):
    """Samples of one benchmark and split; `n` is their number, `unit` says of what."""

    def __init__(self, benchmark: str, split: str, items: Sequence[Sample]):
        if not items:
            raise ValueError(f"{benchmark} {split} is empty: there is nothing to measure. Ask for n >= 1.")
        ids = [s.id for s in items]
        if len(set(ids)) < len(ids):
            raise ValueError(f"{benchmark} {split} repeats a sample id; results are keyed by it.")
        self.benchmark, self.split, self._items = benchmark, split, tuple(items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Samples(self.benchmark, self.split, self._items[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sample {index} of {self!r}: choose 0 to {len(self) - 1}.")
        return self._items[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"{self.benchmark} {self.split}: {len(self)} expressions on {len(self.images)} images"

    @property
    def images(self) -> set[str]:
        return {s.image_key for s in self}

    def disjoint(self, other: Samples) -> Samples:
        """This split, after checking that no image also stands in `other`; raises if one does."""
        if shared := self.images & other.images:
            raise ValueError(
                f"{len(shared)} images stand in both {self!r} and {other!r}; heads would be judged on the pictures "
                "they were found on. Use splits that are disjoint by image."
            )
        return self


# ---------------------------------------------------------------- nano: synthetic scenes


def _scenes(split: str, n: int, seed: int) -> Iterator[Sample]:
    """One expression a scene, scenes of four to eight things: with fewer, guessing looks like retrieval."""
    for i in range(n):
        drawn, rng = _scene(split, seed, i)
        yield _scene_sample(f"scene-{split}-{seed}-{i}", drawn, scenes.draw_expression(drawn, rng, scenes.MIX))


def _scene_pairs(split: str, n: int, seed: int) -> Iterator[Sample]:
    """Two expressions a scene that name two different things; n counts expressions, so n / 2 scenes."""
    if n % 2:
        raise ValueError(f"n={n}: scene-pairs come two at a time; ask for an even number.")
    for i in range(n // 2):
        drawn, rng = _scene(split, seed, i)
        first = scenes.draw_expression(drawn, rng, scenes.MIX)
        others = [e for e in scenes.expressions(drawn) if e.referent != first.referent]
        second = others[int(rng.integers(len(others)))]
        for letter, named in (("a", first), ("b", second)):
            yield _scene_sample(f"scene-pair-{split}-{seed}-{i}{letter}", drawn, named)


def _scene(split: str, seed: int, i: int) -> tuple[scenes.Scene, np.random.Generator]:
    for again in range(100):  # a scene that cannot name two of its things (one in a million) is drawn again
        key = (scenes.SPLITS[split], seed, i, again)[: 4 if again else 3]
        rng = np.random.default_rng((*key, 2))
        drawn = scenes.scene(key, int(rng.integers(4, 9)))
        if len({e.referent for e in scenes.expressions(drawn)}) > 1:
            return drawn, rng
    raise AssertionError(f"No scene of {key} names two things.")


def _scene_sample(name: str, drawn: scenes.Scene, named: scenes.Expression) -> Sample:
    thing = drawn.things[named.referent]
    return Sample(
        id=name, image=drawn.image, image_key=drawn.image_key, text=named.text, box=Box(*map(float, thing.box)),
        mask=drawn.mask(thing), kind=named.kind, chance=1 / len(drawn.things),
    )  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """A row of the benchmark table."""

    name: str
    profile: str
    unit: str
    splits: tuple[str, ...]
    draw: Callable[[str, int, int], Iterator[Sample]]


BENCHMARKS = {
    b.name: b
    for b in [
        Benchmark("scenes", "nano", "expression", ("detect", "test", "dev"), _scenes),
        Benchmark("scene-pairs", "nano", "expression", ("detect", "test", "dev"), _scene_pairs),
    ]
}


def grounding(benchmark: str, split: str, n: int, seed: int = 0) -> Samples:
    """n samples of a benchmark's split, drawn by seed.

    Raises ValueError for an unknown benchmark or split (with the nearest name) and for n < 1.
    """
    known = _lookup("benchmark", benchmark, BENCHMARKS)
    _lookup("split", split, known.splits)
    if n < 1:
        raise ValueError(f"n={n}: {benchmark} {split} would be empty. Ask for n >= 1.")
    if seed < 0:
        raise ValueError(f"seed={seed}: a seed is 0 or more.")
    return Samples(benchmark, split, list(known.draw(split, n, seed)))


def _lookup(what: str, name: str, known):
    if name not in known:
        close = difflib.get_close_matches(str(name), list(known), 1, 0.4)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"Unknown {what} {name!r}; there are {', '.join(map(repr, known))}.{hint}")
    return known[name] if isinstance(known, dict) else name
