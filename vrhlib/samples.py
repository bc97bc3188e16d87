"""A sample: a picture, a text, and what a right reply is; and an ordered set of them, with what is missing from it.

Where samples come from is told in `benchmarks`.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from vrhlib import store
from vrhlib.answers import Rule
from vrhlib.boxes import Box, decode_mask, encode_mask

# What the text of a sample is: a phrase that names the referent or a question whose answer is the referent (both are
# answered with a box), a phrase that names a place to point at, or a whole question that is answered in words.
Task = Literal["locate", "question", "point", "answer"]


class StoredImage:
    """A picture that stays where it is stored: ten thousand samples fit in memory.

    Its pixels are read anew each time something asks for them (any attribute of `PIL.Image.Image`), its size once.
    Always RGB: transparent pictures on white, EXIF orientation ignored, as boxes were drawn on the pixels as stored.
    """

    def __init__(self, read: Callable[[], Image.Image], size: tuple[int, int] | None = None):
        self._read = read
        if size is not None:
            self.size = size

    @cached_property
    def size(self) -> tuple[int, int]:
        return self._read().size

    def load_rgb(self) -> Image.Image:
        image = self._read()
        if image.has_transparency_data:
            image = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        return image.convert("RGB")

    def __reduce__(self):
        """Goes to another process as pixels: what it is read from may be a table or a file that only this one has."""
        data = io.BytesIO()
        self.load_rgb().save(data, "PNG", compress_level=1)
        return _unpacked, (data.getvalue(), self.size)

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__array_interface__":  # copying and pickling ask for these
            raise AttributeError(name)
        return getattr(self.load_rgb(), name)


def _unpacked(png: bytes, size: tuple[int, int]) -> StoredImage:
    return StoredImage(lambda: Image.open(io.BytesIO(png)), size)


class Segment(NamedTuple):
    """A thing in a picture: what it is, its box in original pixels, its mask (run lengths) if there is one."""

    name: str
    box: Box
    mask: Mapping | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """One question about one image. `box` in original pixels; `mask` bool [height, width], run lengths as pycocotools
    writes them, or None.

    `image` is None for a text-only question. `image_key` identifies the picture across samples; `answer`, `choices`
    and `rule` are for questions whose answer is text; `kind` groups samples for a breakdown. Two readers to beat:
    `chance` is the probability of a reader who picks among what could be answered (one of the things or words in view,
    or one of the choices); `bystander` that of a reader who sees the picture but not which thing is meant, and answers
    with what most things in it have (NaN where that makes no sense).

    `segments`: what else is known to stand in the picture, the referent included; they are pointed at, never asked for.

    `context` is a text that stands before the question, `span` the characters of it (start, stop) that hold the answer:
    what a box is to a picture.
    """

    id: str
    image: Image.Image | StoredImage | None
    image_key: str
    text: str
    box: Box | None = None
    mask: np.ndarray | Mapping | None = None
    answer: str | None = None
    choices: tuple[str, ...] = ()
    kind: str = ""
    chance: float | None = None
    bystander: float = math.nan
    task: Task = "locate"
    rule: Rule = "choice"
    context: str = ""
    span: tuple[int, int] | None = None
    segments: tuple[Segment, ...] = ()

    def __post_init__(self):
        if self.span is not None and not 0 <= self.span[0] < self.span[1] <= len(self.context):
            raise ValueError(f"Sample {self.id}: {self.span} are no characters of its context ({len(self.context)}).")
        if self.image is None and (self.box is not None or self.mask is not None):
            raise ValueError(f"Sample {self.id}: a box or a mask without an image.")
        if (self.task == "answer") != (self.answer is not None):
            raise ValueError(f"Sample {self.id}: an answer belongs to the task 'answer', and to no other.")
        if self.box is not None:
            width, height = self.image.size
            x0, y0, x1, y1 = self.box
            if not (0 <= x0 < x1 <= width + 1 and 0 <= y0 < y1 <= height + 1 and x0 < width and y0 < height):
                raise ValueError(f"Sample {self.id}: {self.box} is not a box inside an image of {width} x {height}.")

        if self.mask is not None:
            shape = tuple(self.mask["size"]) if isinstance(self.mask, Mapping) else self.mask.shape
            if shape != self.image.size[::-1]:
                raise ValueError(f"Sample {self.id}: a mask of {shape} for an image of {self.image.size}.")
        if self.task == "point" and self.mask is None:
            raise ValueError(f"Sample {self.id}: a point is judged by a mask, and there is none.")

    @property
    def pixels(self) -> np.ndarray | None:
        """The mask as bool [height, width]."""
        return None if self.mask is None else decode_mask(self.mask)

    @property
    def _outline(self) -> list:
        """The mask as height, width and run lengths in text; the same for an array and for its run lengths."""
        mask = self.mask if isinstance(self.mask, Mapping) else encode_mask(self.mask, self.image.size)
        counts = mask["counts"]
        return [*map(int, mask["size"]), counts.decode() if isinstance(counts, bytes) else counts]

    @cached_property
    def fingerprint(self) -> str:
        """Changes when anything that determines a reply or a head score changes: the run key is built from it."""
        more = [self.context, self.span and [*self.span]] if self.context else []
        more += ["answer", self.answer] if self.answer is not None else []
        more += ["mask", *self._outline] if self.mask is not None else []
        box = self.box and [*map(float, self.box)]
        return store.digest([self.id, self.image_key, self.text, box, self.task, *more])


@dataclass(frozen=True)
class Lost:
    """A row of a benchmark that could not become a sample, and why; counted, never dropped in silence."""

    id: str
    reason: str


class Samples(Sequence[Sample]):
    """Samples of one benchmark and split, in order.

    `origin` says which data they are (Hub id, revision, split), `lost` which rows are missing and why, `notes` how
    many rows were read with a remark, `max_new_tokens` how long replies may get (None: the model's own limit).
    """

    def __init__(
        self,
        benchmark: str,
        split: str,
        items: Sequence[Sample],
        origin: str = "",
        lost: Sequence[Lost] = (),
        notes: Mapping[str, int] | None = None,
        max_new_tokens: int | None = None,
    ):
        if not items:
            why = f" All {len(lost)} rows were lost; the first: {lost[0].reason}." if lost else " Ask for n >= 1."
            raise ValueError(f"{benchmark} {split} is empty: there is nothing to measure.{why}")
        ids = [s.id for s in items]
        if len(set(ids)) < len(ids):
            twice = next(i for i, n in Counter(ids).items() if n > 1)
            raise ValueError(f"{benchmark} {split} repeats the sample id {twice!r}; results are keyed by it.")
        self.benchmark, self.split, self._items = benchmark, split, tuple(items)
        self.origin, self.lost, self.notes = origin, tuple(lost), dict(notes or {})
        self.max_new_tokens = max_new_tokens

    def _with(self, items: Sequence[Sample], benchmark: str | None = None) -> Samples:
        return Samples(
            benchmark or self.benchmark, self.split, items, self.origin, self.lost, self.notes, self.max_new_tokens
        )

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._with(self._items[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sample {index} of {self!r}: choose 0 to {len(self) - 1}.")
        return self._items[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._items)

    def __repr__(self) -> str:
        what = "questions" if self[0].task == "answer" else "expressions"
        where = "images" if self[0].image is not None else "texts"
        words = [f"{self.benchmark} {self.split}: {len(self)} {what} on {len(self.images)} {where}"]
        reasons = Counter(lost.reason for lost in self.lost)
        words += [f"{n} LOST: {reason}" for reason, n in reasons.items()]
        words += [f"{n} {note}" for note, n in self.notes.items()]
        return "; ".join(words) + (f" ({self.origin})" if self.origin else "")

    @property
    def images(self) -> set[str]:
        return {s.image_key for s in self}

    def batches(self, size: int) -> list[Samples]:
        """Cut into batches that need little padding: pictures of like size and texts of like length together, and the
        questions about one picture side by side, so that it is looked at once."""
        longest: dict[str, int] = {}
        for s in self:
            longest[s.image_key] = max(longest.get(s.image_key, 0), len(s.context) + len(s.text))

        def length(s: Sample) -> tuple:
            pixels = s.image.size[0] * s.image.size[1] if s.image is not None else 0
            return pixels, longest[s.image_key], s.image_key, len(s.context) + len(s.text)

        ordered = sorted(self, key=length)
        return [self._with(ordered[i : i + size]) for i in range(0, len(ordered), size)]

    def blind(self) -> Samples:
        """The same questions about grey pictures: what can be answered without looking."""
        if self[0].image is None:
            raise ValueError(f"{self!r}: there is no picture to take away.")
        grey = [replace(s, image=Image.new("RGB", s.image.size, (128,) * 3), image_key="grey") for s in self]
        return self._with(grey, f"{self.benchmark} (grey)")

    def enlarged(self, factor: int) -> Samples:
        """The same questions about the same pictures, `factor` times as wide and high (bicubic)."""
        if self[0].image is None:
            raise ValueError(f"{self!r}: there is no picture to enlarge.")
        made = []
        for s in self:
            size = s.image.size[0] * factor, s.image.size[1] * factor
            image, box = s.image.resize(size, Image.Resampling.BICUBIC), s.box and s.box.scaled(factor, factor)
            key = f"{s.image_key} x{factor}"
            made.append(replace(s, image=image, image_key=key, box=box, mask=None, id=f"{s.id} x{factor}"))
        return self._with(made, f"{self.benchmark} x{factor}")

    def disjoint(self, other: Samples, by: Literal["image", "row"] = "image") -> Samples:
        """This split, after checking that no image (or only no row) also stands in `other`; raises if one does."""
        if by == "row":
            shared, what = {s.id for s in self} & {s.id for s in other}, "rows"
        else:
            shared, what = self.images & other.images, "images"
            hashed = [{key.startswith("bytes:") for key in part.images} for part in (self, other)]
            if hashed[0] != hashed[1]:
                raise ValueError(
                    f"{self.benchmark} and {other.benchmark} identify pictures in two ways (number, and hash of the "
                    "file), so nobody can tell whether they share any. Take both sets from one benchmark."
                )
        if shared:
            raise ValueError(
                f"{len(shared)} {what} stand in both {self!r} and {other!r}; heads would be judged on the pictures "
                "they were found on. Use splits that are disjoint by image."
            )
        return self


def joined(name: str, parts: Sequence[Samples]) -> Samples:
    """Samples of several benchmarks one after the other, under one name; what was lost or noted stays told.

    Raises ValueError for none, for parts of several splits, and where two share a sample id."""
    if len(splits := {part.split for part in parts}) != 1:
        raise ValueError(f"{name}: join one split of one benchmark or more, not {', '.join(sorted(splits)) or 'none'}.")
    notes: Counter[str] = Counter()
    for part in parts:
        notes.update(part.notes)
    limits = [part.max_new_tokens for part in parts]
    items, lost = [s for part in parts for s in part], [row for part in parts for row in part.lost]
    origin = "; ".join(part.origin for part in parts if part.origin)
    return Samples(name, parts[0].split, items, origin, lost, notes, None if None in limits else max(limits))


@dataclass(frozen=True)
class Benchmark:
    """A row of the benchmark table (`benchmarks.BENCHMARKS`).

    `like`: the real benchmark that a nano one stands for. `draw(split, n, seed, **options)` gives its `Samples`;
    `options` names what else it takes. `weights`: kind of sample to weight, where the official score is not the plain
    mean over samples. `about`: identity, size, metric and licence of a real data set (`hub.Source`).
    """

    name: str
    profile: str
    family: Literal["grounding", "questions", "text"]
    like: str
    draw: Callable[..., Samples]
    splits: tuple[str, ...] = ("detect", "test", "dev")
    options: tuple[str, ...] = ()
    weights: Mapping[str, float] | None = None
    about: object = None
