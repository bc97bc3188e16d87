"""Questions whose answer is a word or a number.

Seven kinds about scenes, each in the place of a real benchmark (see `samples`), one about signs, one about
documents, and one about a list of facts in plain text, without a picture. Expressions inside a question never
contain its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vrhlib.nano.scenes import (
    COLOURS,
    MARGIN,
    RELATIONS,
    SHAPES,
    SIZES,
    WIDTH,
    WORDS,
    Expression,
    Scene,
    draw_kind,
    expressions,
    nouns,
)

MOST = 6  # the largest answer to a question of number


@dataclass(frozen=True)
class Question:
    """A question, its answer, what could be answered, the things it is about (indices), and its kind."""

    text: str
    answer: str
    choices: tuple[str, ...]
    about: tuple[int, ...]
    kind: str


Rng = np.random.Generator


def _one(rng: Rng, items: list):
    return items[int(rng.integers(len(items)))]


def _without(scene: Scene, said: list[Expression], field: str) -> list[Expression]:
    """Expressions that name their referent without a word of the field. (A landmark's words count where it follows
    "above" or "below", not where it follows "of": such relations are asked about less often.)"""
    known = {"colour": COLOURS, "shape": SHAPES, "size": SIZES}[field]
    named = [e for e in said if e.kind in ("attribute", "position", "size", "relation")]
    return [e for e in named if not any(w in known for w in e.text.split(" of ")[0].split())]


def _attribute(scene: Scene, rng: Rng, said: list[Expression]) -> Question | None:
    field = str(rng.choice(["colour", "shape", "size"], p=[0.45, 0.4, 0.15]))
    usable = _without(scene, said, field)
    if not usable:
        return None
    e = _one(rng, usable)
    choices = tuple({"colour": COLOURS, "shape": SHAPES, "size": SIZES}[field])
    return Question(
        f"What {field} is {e.text}?", getattr(scene.things[e.referent], field), choices, (e.referent,), "attribute"
    )


def _single(scene: Scene, rng: Rng, said: list[Expression]) -> Question | None:
    if len(scene.things) != 1:
        return None
    field = str(rng.choice(["colour", "shape", "size"], p=[0.4, 0.4, 0.2]))
    choices = tuple({"colour": COLOURS, "shape": SHAPES, "size": SIZES}[field])
    return Question(f"What {field} is the object?", getattr(scene.things[0], field), choices, (0,), "single")


def _width(scene: Scene, rng: Rng, said: list[Expression]) -> Question | None:
    usable = _without(scene, said, "size")
    if not usable:
        return None
    e = _one(rng, usable)
    x0, _, x1, _ = scene.things[e.referent].box
    text = f"How wide is {e.text} in percent of the image?"
    return Question(text, str(round(100 * (x1 - x0) / WIDTH)), (), (e.referent,), "width")


def _pair(scene: Scene, rng: Rng, said: list[Expression]) -> tuple[Expression, Expression] | None:
    named = [e for e in said if e.kind == "attribute"]
    if len({e.referent for e in named}) < 2:
        return None
    a = _one(rng, named)
    return a, _one(rng, [e for e in named if e.referent != a.referent])


def _relation(scene: Scene, rng: Rng, said: list[Expression]) -> Question | None:
    if not (pair := _pair(scene, rng, said)):
        return None
    a, b = pair
    word = str(rng.choice(list(RELATIONS)))
    axis, sign = RELATIONS[word]
    by = sign * (scene.things[a.referent].centre[axis] - scene.things[b.referent].centre[axis])
    if abs(by) < MARGIN:
        return None
    answer = "yes" if by > 0 else "no"
    return Question(f"Is {a.text} {word} {b.text}?", answer, ("yes", "no"), (a.referent, b.referent), "relation")


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("cross") else "s")


_NUMBERS = tuple(map(str, range(MOST + 1)))


def _count(scene: Scene, rng: Rng, said: list[Expression]) -> Question | None:
    by_number: dict[int, list] = {
        0: [(f"{c} {s}", []) for c in COLOURS for s in SHAPES if f"{c} {s}" not in nouns(scene)]
    }
    for noun, who in nouns(scene).items():
        by_number.setdefault(len(who), []).append((noun, who))
    number = _one(rng, [n for n in by_number if n <= MOST])  # else most answers would be 1
    noun, who = _one(rng, by_number[number])
    return Question(f"How many {plural(noun)} are there?", str(len(who)), _NUMBERS, tuple(who), "count")


def _heads(scene: Scene, rng: Rng) -> tuple[tuple[str, list[int]], tuple[str, list[int]]] | None:
    """Two shapes, or two colours, of the scene, with who they are."""
    found = nouns(scene)
    colour = rng.random() < 0.5
    groups = [(n, w) for n, w in found.items() if (n.endswith(" shape") if colour else " " not in n)]
    if len(groups) < 2:
        return None
    i, j = rng.choice(len(groups), 2, replace=False)
    return groups[int(i)], groups[int(j)]


def _arithmetic(scene: Scene, rng: Rng, said: list[Expression]) -> Question | None:
    if not (pair := _heads(scene, rng)):
        return None
    (a, who), (b, other) = sorted(pair, key=lambda g: -len(g[1]))
    add = rng.random() < 0.5
    value = len(who) + len(other) if add else len(who) - len(other)
    if value > MOST:
        return None
    text = (
        f"How many {plural(a)} and {plural(b)} are there?"
        if add
        else f"How many more {plural(a)} than {plural(b)} are there?"
    )
    return Question(text, str(value), _NUMBERS, (*who, *other), "arithmetic")


def _mixed(scene: Scene, rng: Rng, said: list[Expression]) -> Question | None:
    """Choices stand in the question, and all are in the picture."""
    form = str(rng.choice(["attribute", "side", "more"], p=[0.5, 0.25, 0.25]))
    if form == "attribute":
        question = _attribute(scene, rng, said)
        if not question:
            return None
        field = question.text.split()[1]
        others = sorted({getattr(t, field) for t in scene.things} - {question.answer})
        if not others:
            return None
        choices = [question.answer, *map(str, rng.permutation(others)[:2])]
        about, answer, stem = question.about, question.answer, question.text[:-1] + ":"
    elif form == "side":
        if not (pair := _pair(scene, rng, said)):
            return None
        a, b = pair
        axis = int(rng.integers(2))
        by = scene.things[a.referent].centre[axis] - scene.things[b.referent].centre[axis]
        if abs(by) < MARGIN:
            return None
        choices = [["left", "right"], ["higher", "lower"]][axis]
        answer, about = choices[int(by > 0)], (a.referent, b.referent)
        stem = f"Compared with {b.text}, {a.text} is"
    else:
        if not (pair := _heads(scene, rng)):
            return None
        (a, who), (b, other) = pair
        if len(who) == len(other):
            return None
        many = plural(a), plural(b)
        choices, about = [m.split()[0] for m in many], (*who, *other)
        answer = choices[int(len(other) > len(who))]
        stem = "Which are more:"
    choices = [str(c) for c in rng.permutation(choices)]
    text = f"{stem} {', '.join(choices[:-1])} or {choices[-1]}?"
    return Question(text, answer, tuple(choices), about, "mixed")


QUESTIONS: dict[str, Callable[[Scene, Rng, list[Expression]], Question | None]] = {
    "attribute": _attribute, "single": _single, "width": _width, "relation": _relation, "count": _count,
    "arithmetic": _arithmetic, "mixed": _mixed,
}  # fmt: skip


def draw_question(
    scene: Scene, rng: Rng, kinds: dict[str, float], said: list[Expression] | None = None
) -> Question | None:
    """One question about a scene: kind by weight, then whatever the scene offers; None after twelve tries in vain."""
    said = expressions(scene) if said is None else said
    for _ in range(12):
        if question := QUESTIONS[draw_kind(rng, kinds)](scene, rng, said):
            return question
    return None


def sign_question(scene: Scene, rng: Rng) -> Question:
    """What a sign of `scenes.signs` says."""
    i = int(rng.integers(len(scene.things)))
    thing = scene.things[i]
    return Question(f"What does the {thing.colour} sign say?", thing.text, WORDS, (i,), "sign")


def line_question(scene: Scene, rng: Rng) -> Question:
    """The second word of a line of `scenes.document`."""
    i = int(rng.integers(len(scene.things)))
    thing = scene.things[i]
    return Question(f"What stands beside {thing.key}?", thing.text, WORDS, (i,), "line")


@dataclass(frozen=True)
class Facts:
    """A list of facts in plain text, and who has which word."""

    text: str
    owners: tuple[str, ...]
    words: tuple[str, ...]


def facts(seed: tuple[int, ...], plain: bool = False) -> Facts:
    """Five to eight facts about shapes that share colours and forms: `red circle cat, blue circle sun`.

    `plain`: four to six facts whose owners are one word, all different: `circle cat, ring sun`."""
    rng = np.random.default_rng((*seed, 8))
    if plain:
        owners = tuple(map(str, rng.permutation(SHAPES)[: int(rng.integers(4, 7))]))
        words = tuple(map(str, rng.permutation(WORDS)[: len(owners)]))
        return Facts(", ".join(f"{o} {w}" for o, w in zip(owners, words)) + ".", owners, words)
    shapes, colours = rng.choice(SHAPES, 3, replace=False), rng.choice(list(COLOURS), 3, replace=False)
    every = [f"{c} {s}" for c in colours for s in shapes]
    owners = tuple(map(str, rng.permutation(every)[: int(rng.integers(5, 9))]))
    words = tuple(map(str, rng.permutation(WORDS)[: len(owners)]))
    return Facts(", ".join(f"{o} {w}" for o, w in zip(owners, words)) + ".", owners, words)


def fact_question(known: Facts, rng: Rng) -> Question:
    i = int(rng.integers(len(known.owners)))
    return Question(f"What belongs to the {known.owners[i]}?", known.words[i], WORDS, (i,), "fact")
