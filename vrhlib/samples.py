"""Every benchmark as `Sample`s: a picture, a text, and what a right reply is.

`grounding(benchmark, split, n, seed)` gives samples whose answer is a box, `answering(...)` those whose answer is a
word or a number. The splits `detect` and `test` of a benchmark are disjoint by *image*, not by row: heads found on a
picture are never judged on it.

The nano benchmarks stand in the place of real ones (the column `like` of `BENCHMARKS`) and never under their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image

from vrhlib import store
from vrhlib.answers import Rule
from vrhlib.boxes import Box
from vrhlib.nano import questions, scenes

# What the text of a sample is: a phrase that names the referent, a question whose answer is the referent (both are
# answered with a box), or a whole question that is answered in words.
Task = Literal["locate", "question", "answer"]


@dataclass(frozen=True, eq=False)
class Sample:
    """One question about one image. `box` in original pixels; `mask` bool [height, width] or None.

    `image` is None for a text-only question. `image_key` identifies the picture across samples; `answer`, `choices`
    and `rule` are for questions whose answer is text; `kind` groups samples for a breakdown. Two readers to beat:
    `chance` is the probability of a reader who picks among what could be answered (one of the things or words in view,
    or one of the choices); `bystander` that of a reader who sees the picture but not which thing is meant, and answers
    with what most things in it have (NaN where that makes no sense).
    """

    id: str
    image: Image.Image | None
    image_key: str
    text: str
    box: Box | None = None
    mask: np.ndarray | None = None
    answer: str | None = None
    choices: tuple[str, ...] = ()
    kind: str = ""
    chance: float | None = None
    bystander: float = math.nan
    task: Task = "locate"
    rule: Rule = "choice"

    def __post_init__(self):
        if self.image is None and (self.box is not None or self.mask is not None):
            raise ValueError(f"Sample {self.id}: a box or a mask without an image.")
        if (self.task == "answer") != (self.answer is not None):
            raise ValueError(f"Sample {self.id}: an answer belongs to the task 'answer', and to no other.")
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
        return store.digest([self.id, self.image_key, self.text, self.box and [*map(float, self.box)], self.task])


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
        what = "questions" if self[0].task == "answer" else "expressions"
        where = "images" if self[0].image is not None else "texts"
        return f"{self.benchmark} {self.split}: {len(self)} {what} on {len(self.images)} {where}"

    @property
    def images(self) -> set[str]:
        return {s.image_key for s in self}

    def blind(self) -> Samples:
        """The same questions about grey pictures: what can be answered without looking."""
        if self[0].image is None:
            raise ValueError(f"{self!r}: there is no picture to take away.")
        grey = [replace(s, image=Image.new("RGB", s.image.size, (128,) * 3), image_key="grey") for s in self]
        return Samples(f"{self.benchmark} (grey)", self.split, grey)

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
        return Samples(f"{self.benchmark} x{factor}", self.split, made)

    def disjoint(self, other: Samples) -> Samples:
        """This split, after checking that no image also stands in `other`; raises if one does."""
        if shared := self.images & other.images:
            raise ValueError(
                f"{len(shared)} images stand in both {self!r} and {other!r}; heads would be judged on the pictures "
                "they were found on. Use splits that are disjoint by image."
            )
        return self


# ---------------------------------------------------------------- nano: synthetic scenes

Named = Callable[[scenes.Scene, np.random.Generator], scenes.Expression | None]


def _name(kinds: dict[str, float], candidates: int = 1) -> Named:
    return lambda drawn, rng: scenes.draw_expression(drawn, rng, kinds, candidates)


def _grounded(benchmark: str, named: Named, split: str, n: int, seed: int, pairs: bool) -> Iterator[Sample]:
    """One expression a scene, scenes of four to eight things: with fewer, guessing looks like retrieval.

    With `pairs`, two expressions of a scene that name two different things; n counts expressions.
    """

    def pick(drawn: scenes.Scene, rng: np.random.Generator) -> list[scenes.Expression] | None:
        first = named(drawn, rng)
        if not first or not pairs:
            return [first] if first else None
        for _ in range(30):
            second = named(drawn, rng)
            if second.referent != first.referent:
                return [first, second]
        return None

    for i in range(n // 2 if pairs else n):
        drawn, chosen = _until(split, seed, i, pick)
        for letter, e in zip("ab" if pairs else ("",), chosen):
            thing = drawn.things[e.referent]
            yield Sample(
                id=f"{benchmark}-{split}-{seed}-{i}{letter}", image=drawn.image, image_key=drawn.image_key, text=e.text,
                box=Box(*map(float, thing.box)), mask=drawn.mask(thing), kind=e.kind, chance=1 / len(drawn.things),
                task="question" if e.kind == "question" else "locate",
            )  # fmt: skip


def _until(split: str, seed: int, i: int, pick: Callable, things: tuple[int, int] = (4, 8)) -> tuple:
    """Scene i of a split and what `pick` finds in it; a scene that does not offer it is drawn again."""
    for again in range(200):
        key = (scenes.SPLITS[split], seed, i, again)[: 4 if again else 3]
        rng = np.random.default_rng((*key, 2))
        drawn = scenes.scene(key, int(rng.integers(things[0], things[1] + 1)))
        if found := pick(drawn, rng):
            return drawn, found
    raise AssertionError(f"No scene of {key} offers what is asked for.")


def _asked(benchmark: str, kinds: dict[str, float], things: tuple[int, int], split: str, n: int, seed: int):
    """One question a scene; its kind is drawn first, and scenes until one offers it.

    Widths come from two classes of size; they take turns, or a constant guess would be right two times in three.
    """
    for i in range(n):
        kind = scenes.draw_kind(np.random.default_rng((scenes.SPLITS[split], seed, i, 9)), kinds)

        def pick(drawn: scenes.Scene, rng: np.random.Generator, kind=kind, large=bool(i % 2)):
            q = questions.draw_question(drawn, rng, {kind: 1.0})
            wrong_size = q and kind == "width" and (drawn.things[q.about[0]].size == "large") != large
            return None if wrong_size else q

        drawn, q = _until(split, seed, i, pick, things)
        sample = _question(f"{benchmark}-{split}-{seed}-{i}", q, drawn.image, drawn.image_key)
        yield replace(sample, bystander=_bystander(drawn, q)) if q.kind == "attribute" else sample


def _bystander(drawn: scenes.Scene, q: questions.Question) -> float:
    values = [getattr(t, q.text.split()[1]) for t in drawn.things]  # "What colour is ...?"
    most = max(map(values.count, values))
    commonest = {v for v in values if values.count(v) == most}
    return (q.answer in commonest) / len(commonest)


def _read(benchmark: str, draw: Callable, ask: Callable, split: str, n: int, seed: int) -> Iterator[Sample]:
    for i in range(n):
        drawn = draw((scenes.SPLITS[split], seed, i))
        q = ask(drawn, np.random.default_rng((*drawn.seed, 2)))
        box = Box(*map(float, drawn.things[q.about[0]].box))
        sample = _question(f"{benchmark}-{split}-{seed}-{i}", q, drawn.image, drawn.image_key)
        yield replace(sample, box=box, chance=1 / len(drawn.things))


def _needle(benchmark: str, split: str, n: int, seed: int) -> Iterator[Sample]:
    for i in range(n):
        key = (scenes.SPLITS[split], seed, i)
        known = questions.facts(key)
        q = questions.fact_question(known, np.random.default_rng((*key, 2)))
        asked = replace(q, text=f"{known.text}\n{q.text}")
        sample = _question(f"{benchmark}-{split}-{seed}-{i}", asked, None, store.digest(known.text))
        yield replace(sample, chance=1 / len(known.words))


def _question(name: str, q: questions.Question, image: Image.Image | None, image_key: str) -> Sample:
    width = q.kind == "width"
    number = not width and q.choices and q.choices[0].isdigit()
    return Sample(
        id=name, image=image, image_key=image_key, text=q.text, answer=q.answer, choices=q.choices, kind=q.kind,
        chance=0.5 if width else 1 / len(q.choices), task="answer",
        rule="within 25 %" if width else "number" if number else "choice",
    )  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """A row of the benchmark table. `like` is the real benchmark it stands for; `draw` takes split, n and seed (and
    `pairs`, if it is about grounding)."""

    name: str
    profile: str
    family: Literal["grounding", "questions", "text"]
    like: str
    draw: Callable[..., Iterator[Sample]]
    splits: tuple[str, ...] = ("detect", "test", "dev")


def _nano_grounding(name: str, like: str, kinds: dict[str, float], candidates: int = 1) -> Benchmark:
    named = _name(kinds, candidates)
    return Benchmark(name, "nano", "grounding", like,
                     lambda split, n, seed, pairs=False: _grounded(name, named, split, n, seed, pairs))  # fmt: skip


def _nano_questions(name: str, like: str, kinds: dict[str, float], things: tuple[int, int] = (4, 8)) -> Benchmark:
    return Benchmark(
        name, "nano", "questions", like, lambda split, n, seed: _asked(name, kinds, things, split, n, seed)
    )


BENCHMARKS = {
    b.name: b
    for b in [
        _nano_grounding("scenes", "RefCOCO", {"attribute": 0.6, "position": 0.4}),
        _nano_grounding("scenes-plus", "RefCOCO+ (no words of place)", {"attribute": 0.6, "size": 0.4}),
        _nano_grounding("scenes-g", "RefCOCOg (long expressions)", {"long": 1.0}),
        _nano_grounding("scenes-spatial", "RefSpatial-Bench (place among distractors)",
                        {"relation": 0.5, "position": 0.5}, candidates=3),
        _nano_grounding("scenes-question", "Toloka WSDM Cup (question to box)", {"question": 1.0}),
        _nano_questions("scenes-attribute", "VAW", {"attribute": 1.0}),
        _nano_questions("scenes-single", "Spatial457 L1", {"single": 1.0}, (1, 1)),
        _nano_questions("scenes-width", "SpatialRGPT-Bench width (two sizes, at its tolerance)", {"width": 1.0}),
        _nano_questions("scenes-cv", "CV-Bench (relation and count)", {"relation": 0.5, "count": 0.5}),
        _nano_questions("scenes-mixed", "MMStar", {"mixed": 1.0}),
        _nano_questions("scenes-count", "CountBenchQA", {"count": 1.0}),
        _nano_questions("scenes-math", "MathVista", {"arithmetic": 1.0}),
        Benchmark("needle", "nano", "text", "needle in a text, no picture",
                  lambda *draw: _needle("needle", *draw)),
        Benchmark("rendered-words", "nano", "text", "words in a picture (OCR heads)",
                  lambda *draw: _read("rendered-words", scenes.signs, questions.sign_question, *draw)),
        Benchmark("rendered-list", "nano", "text", "a line of a document (VERA)",
                  lambda *draw: _read("rendered-list", scenes.document, questions.line_question, *draw)),
    ]
}  # fmt: skip


def grounding(benchmark: str, split: str, n: int, seed: int = 0, pairs: bool = False) -> Samples:
    """n samples of a benchmark's split whose answer is a box, drawn by seed.

    With `pairs` two expressions a picture, about two different things (n counts expressions). Raises ValueError for
    an unknown benchmark or split (with the nearest name), for n < 1, and for an odd n with `pairs`.
    """
    known = _known(benchmark, split, n, seed, ("grounding",))
    if pairs and n % 2:
        raise ValueError(f"n={n}: pairs come two at a time; ask for an even number.")
    name = f"{benchmark} pairs" if pairs else benchmark
    return Samples(name, split, list(known.draw(split, n, seed, pairs)))


def answering(benchmark: str, split: str, n: int, seed: int = 0) -> Samples:
    """n samples of a benchmark's split whose answer is a word or a number, drawn by seed; raises like `grounding`."""
    known = _known(benchmark, split, n, seed, ("questions", "text"))
    return Samples(benchmark, split, list(known.draw(split, n, seed)))


def _known(benchmark: str, split: str, n: int, seed: int, families: tuple[str, ...]) -> Benchmark:
    known = _lookup("benchmark", benchmark, {k: b for k, b in BENCHMARKS.items() if b.family in families})
    _lookup("split", split, known.splits)
    if n < 1:
        raise ValueError(f"n={n}: {benchmark} {split} would be empty. Ask for n >= 1.")
    if seed < 0:
        raise ValueError(f"seed={seed}: a seed is 0 or more.")
    return known


def _lookup(what: str, name: str, known):
    if name not in known:
        raise store.unknown(what, name, known)
    return known[name] if isinstance(known, dict) else name
