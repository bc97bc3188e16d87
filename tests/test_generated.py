"""Drawn data of the kinds that earlier methods use: the evidence stands once, where the span or the box says."""

import itertools
import re

import numpy as np
import pytest

from vrhlib import generated
from vrhlib.answers import judge
from vrhlib.generated import BENCHMARKS

NAMES = list(BENCHMARKS)
PICTURES = ["word-pictures", "pages"]
SMALL = {"needle-text": {"words": (100, 200)}, "word-pictures": {}, "pages": {}}
FUNCTION_WORDS = set("a an the of on in is it and under inside behind by was".split())


def draw(name, split="detect", n=12, seed=0, **options):
    return BENCHMARKS[name].draw(split, n, seed, **(SMALL[name] | options))


def words_of(text):
    return re.findall(r"\w+", text.casefold())


def vocabulary():
    """Every word that filler can hold."""
    bare = [re.sub(r"\{\w+\}", " ", template) for template in generated.TEMPLATES]
    return {word for text in (*bare, *itertools.chain(*generated.SLOTS.values())) for word in words_of(text)}


def inked(image, box, margin):
    """The box of what differs from the paper (the corner's colour) within `margin` pixels around a box."""
    x0, y0, x1, y1 = (int(side) for side in box)
    part = np.asarray(image)[y0 - margin : y1 + margin, x0 - margin : x1 + margin].astype(int)
    rows, columns = np.nonzero((part != part[0, 0]).any(-1))
    left, top = x0 - margin, y0 - margin
    return left + columns.min(), top + rows.min(), left + columns.max() + 1, top + rows.max() + 1


# ---------------------------------------------------------------- all three


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_what_it_stands_for_and_takes_only_its_options(name):
    row = BENCHMARKS[name]
    assert (row.name, row.profile, row.family, row.splits) == (name, "paper", "text", ("detect", "test"))
    assert row.about is None and "Heads" in row.like or "VERA" in row.like
    with pytest.raises(ValueError, match=f"{name} is drawn.*how many"):
        row.draw("detect", None, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_the_same_data_and_splits_and_seeds_share_none(name):
    def facts(s):
        return s.fingerprint, s.answer, s.choices, s.context or s.image.load_rgb().tobytes()

    assert [*map(facts, draw(name, n=4))] == [*map(facts, draw(name, n=8)[:4])]
    sets = draw(name, n=60), draw(name, "test", 60), draw(name, seed=1, n=60)
    assert [len(s.images) for s in sets] == [60, 60, 60]
    for a, b in itertools.combinations(sets, 2):
        assert not a.images & b.images and not {s.id for s in a} & {s.id for s in b}


@pytest.mark.parametrize("name", NAMES)
def test_the_source_and_the_options_are_part_of_what_the_data_are(name):
    option, other = {"needle-text": ("words", (300,)), "word-pictures": ("size", (800, 600)), "pages": ("lines", 20)}[
        name
    ]
    a, b = draw(name), draw(name, **{option: other})
    assert not a.images & b.images
    assert (
        a.origin != b.origin and f"{option}={other}" in b.origin and re.match(r"generated\.py@[0-9a-f]{8},", b.origin)
    )


@pytest.mark.parametrize(
    "name, option, wrong",
    [
        ("needle-text", "words", (400, 99)),
        ("needle-text", "words", 400),
        ("needle-text", "words", ()),
        ("needle-text", "depths", 0),
        ("needle-text", "depths", 2.0),
        ("word-pictures", "size", (672,)),
        ("word-pictures", "size", (672, 448, 3)),
        ("word-pictures", "size", "672x448"),
        ("word-pictures", "size", (199, 448)),
        ("pages", "size", (896, 1152.0)),
        ("pages", "lines", 11),
        ("pages", "lines", True),
    ],
)
def test_an_option_that_makes_no_sense_says_what_would(name, option, wrong):
    with pytest.raises(ValueError, match=re.escape(f"{option}={wrong!r}: give ")):
        draw(name, **{option: wrong})


@pytest.mark.parametrize("name", NAMES)
def test_a_full_sentence_is_a_right_reply_and_another_answer_a_wrong_one(name):
    for s in draw(name):
        said = s.context[slice(*s.span)] if s.context else f"It was the {s.answer.capitalize()}, as one can see there."
        other = "12345" if s.context else next(c for c in s.choices if c != s.answer)
        assert judge(said, s.answer, s.rule, s.choices) == "correct"
        assert judge(said.casefold().replace(s.answer, other), s.answer, s.rule, s.choices) == "wrong answer"
        assert not re.search(rf"\b{s.answer}\b", s.text), "the question gives its answer away"


# ---------------------------------------------------------------- needle in a text


def test_the_span_holds_the_needle_at_the_bounds_of_a_sentence():
    for s in draw("needle-text", n=40):
        start, stop = s.span
        needle = s.context[start:stop]
        assert re.fullmatch(rf"The secret number of the [\w ]+ is {s.answer}, and it is written [\w ]+\.", needle)
        assert s.text.startswith(f"What is {needle.split(' is ')[0].replace('The', 'the')}, and where")
        assert re.search(r"(\A|\.\s+)\Z", s.context[:start]) and re.match(r"\s+[A-Z]|\Z", s.context[stop:])
        assert s.image is None and s.task == "answer"


def test_no_word_of_a_needle_can_stand_in_the_filler():
    """Every owner, place and number, not only those that were drawn."""
    fixed = words_of("The secret number of the is and it is written")
    needles = set(words_of(" ".join((*generated.OWNERS, *generated.HIDING)))) | set(fixed)
    assert not (needles - FUNCTION_WORDS) & vocabulary()
    assert not any(word.isdigit() for word in vocabulary())


def test_the_words_of_a_needle_stand_once_and_no_filler_stands_twice():
    for s in draw("needle-text", n=8, words=(1600,)):
        said, needle = words_of(s.context), words_of(s.context[slice(*s.span)])
        assert [said.count(w) for w in needle if w not in FUNCTION_WORDS] == [1] * (len(set(needle) - FUNCTION_WORDS))
        sentences = re.findall(r"[^.]+\.", s.context)
        assert len(set(sentences)) == len(sentences)


def test_lengths_and_depths_take_turns_and_meet_in_every_pair():
    lengths, depths = (100, 200, 300, 400), 10
    found = set()
    for i, s in enumerate(draw("needle-text", n=len(lengths) * depths, words=lengths, depths=depths)):
        length, place = lengths[i % 4], len(s.context[: s.span[0]].split())
        assert length <= len(s.context.split()) < length + 25
        found.add((length, round(9 * place / (len(s.context.split()) - 18))))
    assert len(found) >= 38  # a short text has few bounds of sentences: neighbouring depths may round to one
    ends = draw("needle-text", n=2, words=(400,), depths=2)
    assert ends[0].span[0] == 0 and ends[1].span[1] == len(ends[1].context)


def test_filler_reads_as_english():
    rng = np.random.default_rng(0)
    assert len(set(generated.TEMPLATES)) == len(generated.TEMPLATES) > 35
    for _ in range(500):
        said = generated.sentence(rng)
        assert re.fullmatch(r"[A-Z][A-Za-z, ]+\.", said) and "  " not in said and 4 <= len(said.split()) <= 22
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", said), said


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize("name, margin", [("word-pictures", 10), ("pages", 2)])
def test_the_ink_touches_all_four_sides_of_the_box(name, margin):
    for s in draw(name):
        assert inked(s.image.load_rgb(), s.box, margin) == s.box, s.id


@pytest.mark.parametrize("name, size", [("word-pictures", (560, 448)), ("pages", (640, 900))])
def test_the_size_is_an_option_and_the_picture_is_painted_when_read(name, size):
    for s in draw(name, n=3, size=list(size), **({"lines": 20} if name == "pages" else {})):
        assert s.image.size == size == s.image.load_rgb().size
        assert s.image.load_rgb() is not s.image.load_rgb()
    assert draw(name, n=1)[0].image.size == {"word-pictures": (672, 448), "pages": (896, 1152)}[name]


def test_signs_do_not_touch_and_differ_in_colour_and_word():
    numbers = set()
    for i in range(60):
        shown = generated.signs((1, 0, i), (672, 448))
        numbers.add(len(shown))
        assert len({word.text for word in shown.values()}) == len(shown)
        plates = [np.array(word.box) + [-14, -14, 14, 14] for word in shown.values()]
        for a, b in itertools.combinations(plates, 2):
            assert a[0] >= b[2] + 8 or b[0] >= a[2] + 8 or a[1] >= b[3] + 8 or b[1] >= a[3] + 8
        assert all(8 <= p[0] and 8 <= p[1] and p[2] <= 664 and p[3] <= 440 for p in plates)
        assert all(20 <= word.height <= 36 for word in shown.values())
    assert numbers == {5, 6, 7, 8, 9}


def test_the_sign_that_is_asked_for_has_the_colour_of_the_question():
    for s in draw("word-pictures", n=30):
        colour = s.text.split("the ")[1].split(" sign")[0]
        x, y = int(s.box.x0) - 5, int(s.box.y0) - 5
        assert s.image.load_rgb().getpixel((x, y)) == generated.PLATES[colour]
        assert s.answer in s.choices and s.chance == 1 / len(s.choices)


def test_sign_words_are_many_and_none_is_a_colour_or_part_of_the_question():
    assert len(set(generated.WORDS)) == len(generated.WORDS) >= 150
    assert not set(generated.WORDS) & {
        *generated.PLATES,
        *words_of("What is written on the sign? Answer with that word"),
    }


def test_a_picture_too_small_for_its_signs_is_refused():
    with pytest.raises(ValueError, match=r"size=\(200, 200\): no room for \d signs"):
        draw("word-pictures", size=(200, 200))


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("size, lines", [((896, 1152), 12), ((896, 1152), 36), ((896, 1152), 37), ((560, 800), 25)])
def test_a_page_has_its_lines_inside_its_margins_and_none_on_another(size, lines):
    for i in range(10):
        page = generated.page((1, 0, i), size, lines)
        assert len(page.lines) == lines and len(page.entries) == lines // 6
        boxes = [line.box for line in page.lines]
        assert all(a.y1 < b.y0 for a, b in itertools.pairwise(boxes))
        margin = size[0] // 14
        assert boxes[0].y0 >= margin and boxes[-1].y1 <= size[1] - margin
        assert all(margin - 1 <= b.x0 and b.x1 <= size[0] - margin for b in boxes)  # a J reaches one pixel to the left
        assert all(line.height >= 14 for line in page.lines)


def test_an_entry_answers_its_question_and_lies_inside_the_prose():
    for s in draw("pages", n=30):
        page = generated.page((1, 0, int(s.id.split("-")[-1])), (896, 1152), 36)
        (line,) = [line for line in page.lines if line.box == s.box]
        number = re.search(r"\d{4}", s.text)[0]
        assert (
            re.fullmatch(rf"\w+ {number} was \w+ by the {s.answer}\.", line.text)
            and line.text.split()[0] == page.kind.title()
        )
        place = page.lines.index(line)
        assert not page.lines[place - 1].bold and not page.lines[place + 1].bold
        everything = " ".join(line.text for line in page.lines)
        assert everything.count(number) == everything.count(s.answer) == 1
        assert set(s.choices) == {who for _, who, _ in page.entries} and s.chance == 1 / 6


def test_no_word_of_an_entry_can_stand_in_the_prose_or_a_heading():
    entries = [said.replace("{}", "") for said, _ in generated.ENTRIES.values()]
    others = vocabulary() | set(words_of(" ".join(generated.HEADINGS)))
    assert not (set(words_of(" ".join((*entries, *generated.PAYERS)))) - FUNCTION_WORDS) & others


@pytest.mark.parametrize("size, lines, most", [((896, 1152), 200, 37), ((300, 1152), 12, 0)])
def test_a_page_without_room_says_how_many_lines_it_holds(size, lines, most):
    with pytest.raises(ValueError, match=f"lines={lines}: a page of {size[0]} x 1152 holds {most}"):
        draw("pages", size=size, lines=lines)
