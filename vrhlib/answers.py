"""Answers in words and numbers: read from a reply, judged by a rule. Boxes are read in `boxes`.

A reply that holds no answer is "no answer" (or "cut off" where it hit the token limit), never a wrong one in disguise.
No reader asks another model: what a reply says is found by pattern or not at all. Where a reply states its answer more
than once, the last statement counts, because reasoning ends with its answer. For the same reason a reply that was cut
off is read only where it states its answer (`finished=False` in the readers): a number or an option that stands in
unfinished reasoning is not what the model would have answered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Literal, get_args

from vrhlib import store

# The first three judge the nano benchmarks, the others the real ones.
Rule = Literal["choice", "number", "within 25 %", "option", "count", "length", "exact", "lenient"]
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


# "the answer is", "Answer:", "'Answer': ", "<answer>", "the correct option should therefore be", a heading "Answer",
# \boxed{. A verb or a mark must follow: "to answer this, look at the red chair" states nothing.
_BE = r"(?:is|are|(?:would|should|must|will)\s(?:\w+\s)?be)\b"
_STATED = re.compile(
    rf"""(?<!/)(?<!wrong\s)(?<!incorrect\s)\b(?:answers?|(?:correct|right|best)\s(?:option|choice))\b
         (?:\s(?:to|for)\b[^.:\n]{{0,100}}?(?=\s{_BE}))?
         ["'`*_\s]*(?:{_BE}|[:：=>]|(?<=\s)[-–—]\s|(?<=\n))
       | \\boxed\s*\{{""",
    re.IGNORECASE | re.VERBOSE,
)


def _stated(text: str, pattern: re.Pattern = _STATED) -> list[str]:
    """What follows each statement of an answer, to the next one or the end of the reply; the last statement first."""
    found = list(pattern.finditer(text))
    stops = [f.start() for f in found[1:]] + [len(text)]
    return [text[f.end() : stop] for f, stop in zip(found, stops)][::-1]


# A letter that opens a statement. Upper-case A and I are words too, and so is any letter in lower case: those need a
# mark, the end, or a word that can't follow an article.
_LETTER = re.compile(
    r"""[\W_]*(?:(?i:the|correct|right|best|answer|option|choice|letter|is|therefore|thus|clearly|definitely|most|likely
                  |probably|text|textbf|mathrm|mathbf)\b[\W_]*)*
        ([A-Za-z])(?!\w|['’-]\w)(?![)*]*\s?(?:[,/&]|,?\s?(?:or|and)\b)\s?[(*]*(?:[B-HJ-Z]\b|A\b(?![ ][a-z])))
        (?:(?<=[B-HJ-Z])|(?=\s*(?:[^\w\s]|\n|\Z)|\s+(?:because|since|as|which|for|and|with|is|based|due)\b))""",
    re.VERBOSE,
)
_LONE = re.compile(r"[\W_]*(?:(?i:answer|option|choice)[\W_]+)?([A-Za-z])(?!\w|['’-]\w)([^\w\s]*)[ \t]*([^\n]*)")
_LISTED = re.compile(r"(?<!\w)([A-Z])(?=[).:]\s|\W*$)", re.MULTILINE)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
# At the end of a reply: a bold letter, or a bold line. A bold word in the last sentence is emphasis.
_LAST_BOLD = re.compile(
    r"(?:^[ \t]*|(?<!or )(?<!and )(?=\*\*\W?[A-Za-z]\W{0,2}\*\*))\*\*([^*\n]+)\*\*[\s.!]*\Z", re.MULTILINE
)
_UNDENIED = "".join(rf"(?<!{no} {article})" for no in ("not", "n't", "n’t") for article in ("", "a ", "an ", "the "))
_PARENTHESISED = re.compile(rf"(?<!\w){_UNDENIED}\(([A-Za-z])\)(?!\w)")
_NONE_OF = re.compile(r"\bnone of (?:the|these)\b", re.IGNORECASE)


def read_option(text: str, choices: Sequence[str], finished: bool = True) -> str | None:
    """The letter of the option that a reply chooses; `choices` are the texts of A, B, C, ... (benchmarks.md, 4.4).

    In this order: the last explicit statement ("the answer is (B)", "Answer: a red chair", \\boxed{B}, bold at the
    end); a reply that is a letter ("b", "(B)", "B. a red chair", B on a line of its own before an explanation); the
    only bold option; the only letter in parentheses; the only option whose text stands in the reply as whole words,
    where the longer of two texts wins and "not red" is not "red". Of options that share a text, the first.

    Not counted: letters beyond the choices, two letters in one statement ("A or B"), a capital that begins a sentence
    ("A chair is ..."), "none of the options" where no option says so.
    """
    for said in _LAST_BOLD.findall(text) + _stated(text):
        if letter := _letter_of(said, choices):
            return letter
    if (letter := _lone_letter(text, choices)) or not finished:
        return letter
    bold = {_letter_of(said, choices) for said in _BOLD.findall(text)}
    parenthesised = {found.upper() for found in _PARENTHESISED.findall(text)} & _letters(choices).keys()
    for letters in (bold - {None}, parenthesised):
        if len(letters) == 1:
            return letters.pop()
    return _by_text(text, choices)


def _letters(choices: Sequence[str]) -> dict[str, str]:
    """Letter to the option's text in the form in which texts are compared: no capitals, leading article, full stop."""
    texts = (" ".join(choice.casefold().split()).rstrip(".") for choice in choices)
    return {letter: re.sub(r"^(?:an?|the) ", "", text) for letter, text in zip(ascii_uppercase, texts)}


def _letter_of(said: str, choices: Sequence[str]) -> str | None:
    """The letter that opens a statement, else that of the one option named in its first sentence, or first line."""
    found = _LETTER.match(said)
    if found and found[1].upper() in _letters(choices):
        return found[1].upper()
    line = said.strip().split("\n")[0]
    sentence = re.split(r"(?<=[.!?])\s", line)[0]
    return _by_text(sentence, choices) or _by_text(line, choices)


def _lone_letter(text: str, choices: Sequence[str]) -> str | None:
    """The letter that a reply or its first line consists of, perhaps with a mark and that option's text."""
    found = _LONE.match(text)
    letter, mark, rest = found.groups() if found else ("", "", "")
    own = _letters(choices).get(letter.upper())
    if own is None or len(set(_LISTED.findall(text))) > 1:  # a list of the options chooses none
        return None
    rest = " ".join(rest.casefold().split())
    text_follows = mark and own and re.match(rf"\W*(?:(?:an?|the) )?{re.escape(own)}(?!\w)", rest)
    return letter.upper() if not rest or text_follows or rest.startswith(("because ", "since ")) else None


def _by_text(text: str, choices: Sequence[str]) -> str | None:
    """The one option whose text stands in `text`, as whole words, numbers as whole numbers."""
    said, named = " ".join(text.casefold().split()), []
    options = {option: letter for letter, option in reversed(_letters(choices).items()) if option}
    for option in sorted(options, key=len, reverse=True):  # a longer text takes its words from the shorter ones
        before = rf"(?<!\w)(?<!\d[.,]){_UNDENIED}" + r"(?<![-−])" * option[0].isdecimal()
        said, times = re.subn(rf"{before}{re.escape(option)}(?!\w|[.,]\d)", "\0", said)
        named += [option] * bool(times)
    none_of = _NONE_OF.search(said)  # no option's own words: those are taken
    return options[named[0]] if len(named) == 1 and not none_of else None


_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
# Not the end of a larger number: "twenty-five", "thirty five", "one point five", "two hundred and five".
_APART = "".join(rf"(?<!{before}\s)" for before in (*_WORDS, "ty", "point", "hundred", r"hundred\sand"))
_WORD = rf"(?<![\w-]){_APART}(?:{'|'.join(_WORDS)})"
_COUNT = re.compile(
    rf"(?<![\w./−-])(?<!\d,)(?:\d{{1,3}}(?:,\d{{3}}){{1,4}}|\d{{1,15}})(?!\w|[.,/]\d)"
    rf"|{_WORD}(?![\w-]| (?:hundred|thousand|point|and a half|{'|'.join(_WORDS)})\b)"
)
_ITEM = re.compile(r"^[^\w\n]*\d+[.)][*_]*\s+(?=\S)", re.MULTILINE)


def read_count(text: str, finished: bool = True) -> int | None:
    """The first whole number after the last "answer" that has one, else of the whole reply (benchmarks.md, 4.5).

    Digits ("12", "1,000") or a word from zero to twenty. Not counted: decimals, fractions, negative numbers, parts of
    words and of larger numbers ("twofold", "3D", "twenty-five"), the numbers of a list's items.
    """
    text = text.lower()
    if len(_ITEM.findall(text)) > 1:
        text = _ITEM.sub("", text)
    for said in _stated(text) + [text] * finished:
        if found := _COUNT.search(said):
            return _WORDS.index(found[0]) if found[0] in _WORDS else int(found[0].replace(",", ""))
    return None


_METRES = {
    unit: metres
    for metres, units in {
        0.001: "mm millimeter millimeters millimetre millimetres",
        0.01: "cm centimeter centimeters centimetre centimetres",
        1: "m meter meters metre metres",
        1000: "km kilometer kilometers kilometre kilometres",
        0.0254: "in inch inches '' \" ″ ”",
        0.3048: "ft foot feet ' ′ ’",
    }.items()
    for unit in units.split()
}
_REGION = re.compile(r"regions?\s*[\[(<]?\s*\d+\s*[\])>]?|\[\d+\]")
_NAMES = "|".join(unit for unit in _METRES if unit.isalpha() and unit != "in")
_LENGTH = re.compile(
    rf"""(?:(?<![\w.])(?<!\d[,/])(?<!\W[-–−])(?<!^[-–−])(?<!\de[-−])    # not part of a number, not negative
            (?P<digits>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)
           |(?P<word>{_WORD})\b)
         (?P<half>\s+and\s+a\s+half)?
         (?:(?:[-\s*$`()]|\\[,;()]|\\(?:text|mathrm)\{{)*    # "1.5-metre", "**1.5** m", "$1.5\,\text{{m}}$"
            (?P<unit>{_NAMES}
             |in(?=\s*(?:[^\w\s]|\n|\Z)|\s+(?:tall|wide|long|high|thick|deep|across|by|x|and|or|to|in)\b))
            (?![\w^]|/[a-z])
           |(?P<mark>''|["″”]|['′’](?![a-z])))""",
    re.VERBOSE,
)
_BARE_INCHES = re.compile(r"(?<=\d)(['′’])(\d\d?)(?!\w|\.\d|['′’\"″”])")  # 5'11
_JOINED = re.compile(r"[\s.,]*(?:and\s+)?")


def read_metres(text: str, finished: bool = True) -> float | None:
    """The last length of a reply, in metres (SpatialRGPT-Bench; benchmarks.md, 4.3). Of "1 to 2 m" that is 2 m.

    A number in digits or a word from zero to twenty, and a unit: mm, cm, m, km, inches, feet in their spellings.
    "5 feet 11 inches", 5'11" and "1 m 20 cm" are one length. "in" is a unit only before a mark, the end, or a word like
    "tall", "wide", "by": never in "2 in the picture". Not counted: numbers without a unit, "Region [1]", lengths that
    are zero or negative, areas and speeds, numbers in quotes ("5" is not five inches).
    """
    text = _BARE_INCHES.sub(r"\1\2″", _REGION.sub(" region ", text.lower()))
    text = text if finished else "".join(_stated(text)[:1])
    found = [f for f in _LENGTH.finditer(text) if 0 < _metres(f) < math.inf and not _quoted(f)]
    if not found or not (finished or text[found[-1].end() :].strip()):  # 5 feet, 11 inches?
        return None
    last, before = found[-1], found[-2] if len(found) > 1 else None
    if before and _JOINED.fullmatch(text, before.end(), last.start()):
        units = _unit(before), _unit(last)
        if units in ((0.3048, 0.0254), (1, 0.01)) and _metres(last) < units[0]:
            return _metres(before) + _metres(last)
    return _metres(last)


def _unit(found: re.Match) -> float:
    return _METRES[found["unit"] or found["mark"]]


def _metres(found: re.Match) -> float:
    number = float(found["digits"].replace(",", "")) if found["digits"] else _WORDS.index(found["word"])
    return (number + 0.5 * bool(found["half"])) * _unit(found)


def _quoted(found: re.Match) -> bool:
    opening = found.string[: found.start()][-1:]
    return bool(opening and found["mark"]) and opening in {0.0254: '"“', 0.3048: "'‘"}[_unit(found)]


_KEY = re.compile(r"(?<!/)\banswer\b[\"'`*_\s]*[:：=>]", re.IGNORECASE)
_VALUE = re.compile(
    r"""[\s*_`]*(?:(["'])(.*?)\1(?=\s*(?:[,}\]\n]|\Z))|(.*?)(?=[\n<}]|,\s*["']|(?<=[.!?])\s|\Z))""", re.DOTALL
)
_EDGES = " \t\r\n\"'`*_.,;:!?()[]{}<>$“”‘’"
_SAME = {"true": "yes", "false": "no"} | {word: str(n) for n, word in enumerate(_WORDS)}


def read_final(text: str, finished: bool = True) -> str | None:
    """What stands after the last "Answer" key, else the whole reply if it has five words or fewer (Spatial457).

    The template is "Reasoning: ... Answer: ..." or the same as JSON, fenced or not, with either kind of quotes; "the
    answer is ..." counts where there is no key. A value ends with its quotes, its sentence or its line. Of a reply that
    was cut off, a value that touches the end is no answer: "mountain" of "mountain bike".
    """
    values = [_VALUE.match(said) for said in _stated(text, _KEY) + _stated(text)]
    for value in ((found[2] or found[3] or "").strip(_EDGES) for found in values):
        if value:
            return value if finished or not text.rstrip().endswith(value) else None
    bare = re.sub(r"```(?:\w+\n)?", "", text)
    return bare.strip(_EDGES) or None if finished and not values and len(bare.split()) <= 5 else None


def _normal(said: str) -> str:
    said = re.sub(r"^(?:an?|the) ", "", " ".join(said.casefold().split()).strip(_EDGES))
    return _SAME.get(said, said)


_SHAPES = {
    word: shape
    for shape, words in {
        "car": "suv wagon minivan sedan truck addi car",
        "bus": "articulated regular double school bus",
        "motorbike": "chopper dirtbike scooter cruiser motorbike",
        "aeroplane": "jet fighter biplane airliner aeroplane",
        "bicycle": "road utility mountain tandem bicycle",
    }.items()
    for word in words.split()
}


def _lenient(said: str, answer: str) -> bool:
    """Right by VLMEvalKit's Spatial457 rule (vlmeval/dataset/utils/spatial457.py at 23757c4): shapes of one category,
    told by their first word, are equal; "0" and "none" answer a no, 1 to 9 a yes. It inflates: for comparison only."""
    kinds = [_SHAPES.get(name.split(" ")[0]) for name in (said, answer)]
    no, yes = answer == "no" and said in ("0", "none"), answer == "yes" and said in list("123456789")
    return said == answer or no or yes or (None not in kinds and kinds[0] == kinds[1])


def judge(text: str, answer: str, rule: Rule, choices: Sequence[str] = (), finished: bool = True) -> str:
    """One of `OUTCOMES`.

    "choice": the reply names the answer among `choices` and no other; "number": it equals the first number; "within
    25 %": the first number lies between 0.75 and 1.25 times the answer (SpatialRGPT-Bench). The real benchmarks:

    "option" (MMStar, CV-Bench, MathVista, VAW-MCQ): the reply chooses the letter `answer`, or an option of equal text;
    "count" (CountBenchQA): its count equals the answer; "length" (SpatialRGPT-Bench): its length lies between 0.75 and
    1.25 times the answer, in metres; "exact" (Spatial457): its final answer equals the answer but for case, articles,
    marks at the edges, true for yes, false for no, words for digits; "lenient": the same as VLMEvalKit judges it.
    """
    if rule not in get_args(Rule):
        raise store.unknown("rule", rule, get_args(Rule))
    said = _read(text, rule, choices, finished)
    if not finished and re.search(r"\d\.?$", text):  # 1 of 12?
        said = None
    if said is None:
        return "no answer" if finished else "cut off"
    return "correct" if _right(said, answer, rule, choices) else "wrong answer"


def _read(text: str, rule: Rule, choices: Sequence[str], finished: bool) -> str | float | None:
    match rule:
        case "choice":
            return read_choice(text, choices)
        case "number" | "within 25 %":
            return read_number(text)
        case "option":
            return read_option(text, choices, finished)
        case "count":
            return read_count(text, finished)
        case "length":
            return read_metres(text, finished)
        case _:
            return read_final(text, finished)


def _right(said, answer: str, rule: Rule, choices: Sequence[str]) -> bool:
    match rule:
        case "choice":
            return said == answer
        case "option":
            texts = _letters(choices)
            return said == answer or texts[said] == texts.get(answer)
        case "number" | "count":
            return said == float(answer)
        case "within 25 %" | "length":
            return 0.75 * float(answer) <= said <= 1.25 * float(answer)
        case "exact":
            return _normal(said) == _normal(answer)
        case "lenient":
            return _lenient(_normal(said), _normal(answer))
