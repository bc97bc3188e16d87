"""The nano benchmarks: synthetic scenes as samples, one analogue for each real benchmark, never under its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from PIL import Image

from vrhlib import store
from vrhlib.boxes import Box, encode_mask
from vrhlib.nano import questions, scenes
from vrhlib.samples import Benchmark, Sample, Samples, Segment

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
                task="question" if e.kind == "question" else "locate", segments=_segments(drawn),
            )  # fmt: skip


def _segments(drawn: scenes.Scene) -> tuple[Segment, ...]:
    return tuple(
        Segment(f"{t.size} {t.colour} {t.shape}", Box(*map(float, t.box)), encode_mask(drawn.mask(t), drawn.image.size))
        for t in drawn.things
    )


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
        fact = f"{known.owners[q.about[0]]} {q.answer}"
        start = known.text.index(fact)  # an owner is named once, and no word follows two
        sample = _question(f"{benchmark}-{split}-{seed}-{i}", q, None, store.digest(known.text))
        span = (start, start + len(fact))
        yield replace(sample, chance=1 / len(known.words), context=known.text, span=span)


def _question(name: str, q: questions.Question, image: Image.Image | None, image_key: str) -> Sample:
    width = q.kind == "width"
    number = not width and q.choices and q.choices[0].isdigit()
    return Sample(
        id=name, image=image, image_key=image_key, text=q.text, answer=q.answer, choices=q.choices, kind=q.kind,
        chance=0.5 if width else 1 / len(q.choices), task="answer",
        rule="within 25 %" if width else "number" if number else "choice",
    )  # fmt: skip


def _nano_grounding(name: str, like: str, kinds: dict[str, float], candidates: int = 1) -> Benchmark:
    named = _name(kinds, candidates)

    def draw(split: str, n: int | None, seed: int, pairs: bool = False) -> Samples:
        made = list(_grounded(name, named, split, _said(name, n), seed, pairs))
        return Samples(f"{name} pairs" if pairs else name, split, made)

    return Benchmark(name, "nano", "grounding", like, draw, options=("pairs",))


def _nano_questions(name: str, like: str, kinds: dict[str, float], things: tuple[int, int] = (4, 8)) -> Benchmark:
    return _drawn(name, "questions", like, lambda *draw: _asked(name, kinds, things, *draw))


def _drawn(name: str, family: str, like: str, make: Callable[..., Iterator[Sample]]) -> Benchmark:
    def draw(split: str, n: int | None, seed: int) -> Samples:
        return Samples(name, split, list(make(split, _said(name, n), seed)))

    return Benchmark(name, "nano", family, like, draw)


def _said(name: str, n: int | None) -> int:
    if n is None:
        raise ValueError(f"{name} is drawn, not read: there is no end of it. Say how many samples (n).")
    return n


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
        _drawn("needle", "text", "needle in a text, no picture", lambda *draw: _needle("needle", *draw)),
        _drawn("rendered-words", "text", "words in a picture (OCR heads)",
               lambda *draw: _read("rendered-words", scenes.signs, questions.sign_question, *draw)),
        _drawn("rendered-list", "text", "a line of a document (VERA)",
               lambda *draw: _read("rendered-list", scenes.document, questions.line_question, *draw)),
    ]
}  # fmt: skip
