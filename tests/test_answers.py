"""Answers in words and numbers: literal replies, each with what it is, and properties of the readers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vrhlib.answers import OUTCOMES, judge, read_choice, read_number

COLOURS = ("red", "green", "blue")


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ("red", "red"),  # the bare word
        ("Red.", "red"),  # a sentence of one word
        (" green \n", "green"),  # white space around it
        ("The circle is blue.", "blue"),  # in a sentence
        ("red or blue", None),  # two choices are none
        ("redder", None),  # a longer word that begins like one
        ("It is a coloured circle", None),  # "red" inside another word
        ("", None),  # nothing
    ],
)
def test_a_choice_is_read_as_a_whole_word_and_only_if_it_is_the_only_one(reply, read):
    assert read_choice(reply, COLOURS) == read


def test_a_reply_that_is_a_choice_wins_over_choices_inside_it():
    assert read_choice("left of", ("left", "left of")) == "left of"
    assert read_choice("1", ("1", "10")) == "1" and read_choice("10", ("1", "10")) == "10"


@pytest.mark.parametrize(
    ("reply", "read"),
    [("3", 3), ("There are 12.", 12), ("-4", -4), ("2.5 m", 2.5), ("3 of 5", 3), ("three", None), ("", None)],
)
def test_the_first_number_counts(reply, read):
    assert read_number(reply) == read


@pytest.mark.parametrize(
    ("reply", "answer", "rule", "outcome"),
    [
        ("red", "red", "choice", "correct"), ("blue", "red", "choice", "wrong answer"),
        ("mauve", "red", "choice", "no answer"),
        ("3", "3", "number", "correct"), ("3.0", "3", "number", "correct"), ("13", "3", "number", "wrong answer"),
        ("15", "20", "within 25 %", "correct"), ("25", "20", "within 25 %", "correct"),
        ("14", "20", "within 25 %", "wrong answer"), ("26", "20", "within 25 %", "wrong answer"),
        ("none", "20", "within 25 %", "no answer"),
    ],
)  # fmt: skip
def test_a_reply_is_judged_by_its_rule(reply, answer, rule, outcome):
    assert judge(reply, answer, rule, COLOURS) == outcome


def test_a_reply_that_hit_the_token_limit_without_an_answer_is_cut_off():
    assert judge("The colour of the", "red", "choice", COLOURS, finished=False) == "cut off"
    assert judge("red", "red", "choice", COLOURS, finished=False) == "correct"
    assert judge("there are 1", "1", "number", finished=False) == "cut off"  # of 12, perhaps
    assert judge("1 thing", "1", "number", finished=False) == "correct"


def test_an_unknown_rule_is_refused():
    for reply in ("3", "red", ""):
        with pytest.raises(ValueError, match="'within 25 %'"):
            judge(reply, "3", "about")


@given(st.text(max_size=60), st.sampled_from(["choice", "number", "within 25 %"]), st.booleans())
def test_any_text_has_exactly_one_outcome(text, rule, finished):
    assert judge(text, "3", rule, ("3", "red"), finished) in OUTCOMES


@given(st.integers(1, 10**6), st.floats(0.1, 3))
def test_the_band_is_three_to_five_quarters_of_the_answer(answer, share):
    said = answer * share
    expected = "correct" if 0.75 * answer <= float(f"{said:.6f}") <= 1.25 * answer else "wrong answer"
    assert judge(f"{said:.6f}", str(answer), "within 25 %") == expected
