"""Answers in words and numbers: read from a reply, judged by a rule. Boxes are read in `boxes`.

A reply that holds no answer is "no answer" (or "cut off" where it hit the token limit), never a wrong one in disguise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from vrhlib import store

Rule = Literal["choice", "number", "within 25 %"]
OUTCOMES = ("correct", "wrong answer", "cut off", "no answer")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def read_choice(text: str, choices: Sequence[str]) -> str | None:
    """The one choice that a reply names, as a whole word; None if it names none or several."""
    said = text.strip().strip(".").casefold()
    exact = [c for c in choices if c.casefold() == said]
    if exact:
        return exact[0]
    named = [c for c in choices if re.search(rf"(?<!\w){re.escape(c.casefold())}(?!\w)", said)]
    return named[0] if len(named) == 1 else None


def read_number(text: str) -> float | None:
    """The first number of a reply."""
    found = _NUMBER.search(text)
    return float(found[0]) if found else None


def judge(text: str, answer: str, rule: Rule, choices: Sequence[str] = (), finished: bool = True) -> str:
    """One of `OUTCOMES`. "choice": the reply names the answer among `choices` and no other; "number": it equals the
    first number; "within 25 %": the first number lies between 0.75 and 1.25 times the answer (SpatialRGPT-Bench)."""
    if rule not in get_args(Rule):
        raise store.unknown("rule", rule, get_args(Rule))
    said = read_choice(text, choices) if rule == "choice" else read_number(text)
    if not finished and re.search(r"\d\.?$", text):  # 1 of 12?
        said = None
    if said is None:
        return "no answer" if finished else "cut off"
    if rule == "choice":
        right = said == answer
    elif rule == "number":
        right = said == float(answer)
    else:
        right = 0.75 * float(answer) <= said <= 1.25 * float(answer)
    return "correct" if right else "wrong answer"
