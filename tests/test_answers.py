"""Answers in words and numbers: literal replies, each with what it is, and properties of the readers."""

import time
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vrhlib.answers import (
    OUTCOMES,
    Rule,
    judge,
    read_choice,
    read_count,
    read_final,
    read_metres,
    read_number,
    read_option,
)

COLOURS = ("red", "green", "blue")
CHAIRS = ("a red chair", "a blue chair", "a green table", "none of the above")
many = settings(max_examples=200, deadline=None, derandomize=True)


def rows(table):
    return [pytest.param(*row, id=name) for name, row in table.items()]


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


@pytest.mark.parametrize(
    ("reply", "letter"),
    rows(
        {
            "the answer is, in parentheses": ("The answer is (B).", "B"),
            "Answer and a colon": ("Answer: C", "C"),
            "a lower-case letter after a colon": ("answer: c", "C"),
            "the correct option is": ("The correct option is D.", "D"),
            "the best choice is, with its text": ("The best choice is D) none of the above", "D"),
            "a modal verb and an adverb": ("The correct answer should therefore be (B).", "B"),
            "the answer to a question": ("The answer to this question is B because it is nearer.", "B"),
            "option after the verb": ("The answer is option B: a blue chair.", "B"),
            "a letter, then a reason": ("The answer is A because it is nearer.", "A"),
            "boxed": (r"Thus \boxed{C}", "C"),
            "boxed text in dollars": (r"$\boxed{\text{(C)}}$", "C"),
            "boxed option text": (r"\boxed{a green table}", "C"),
            "bold at the end": ("It is near, so **B**.", "B"),
            "bold parentheses at the end": ("It is near, so **(B)**.", "B"),
            "bold key": ("**Answer:** B", "B"),
            "bold key and letter": ("**Answer: B**\n\n**A** is far and **C** is a table.", "B"),
            "a heading": ("### Answer\n\nB", "B"),
            "a heading after the reasoning": ("A red chair is far.\n### Answer\n\nB. a blue chair", "B"),
            "a dash": ("The red chair is far. Final answer – B", "B"),
            "on the next line, in bold": ("The correct answer is:\n\n**B. a blue chair**", "B"),
            "fenced JSON": ('```json\n{"Reasoning": "A red chair is far.", "Answer": "B"}\n```', "B"),
            "JSON with single quotes": ("{'Reasoning': 'not the red one', 'Answer': 'B. a blue chair'}", "B"),
            "a tag, with trailing prose": ("<answer>B</answer>\nA red chair would be farther.", "B"),
            "the last statement, of a change of mind": ("The answer is A. Wait, no: the answer is C.", "C"),
            "a statement after a letter in the reasoning": ("(A) red? No.\nAnswer: C", "C"),
            "a statement before an explanation": ("Answer: B. The red chair is farther.", "B"),
            "a statement and then a thought": ("Answer: B, I think.", "B"),
            "stated as text": ("Answer: a red chair", "A"),
            "stated as text without its article": ("The answer is: the green table.", "C"),
            "stated as text with a capital article": ("Answer: A blue chair", "B"),
            "stated as text in a longer sentence": ("The answer is that one sees a blue chair.", "B"),
            "stated as text before an explanation": ("The answer is a red chair. The blue chair is far.", "A"),
            "stated as text after an abbreviation": ("Answer: St. Mary on a red chair", "A"),
            "emphasis in the last sentence": ("The answer is B, not the **green table**.", "B"),
            "an emphasised line at the end": ("It is not a red chair.\n\n**a green table**", "C"),
        }
    ),
)
def test_an_option_is_read_from_an_explicit_statement(reply, letter):
    assert read_option(reply, CHAIRS) == letter
    assert read_option(reply, CHAIRS, finished=False) == letter


@pytest.mark.parametrize(
    ("reply", "letter"),
    rows(
        {
            "a letter": ("B", "B"),
            "a lower-case letter": ("b", "B"),
            "the letter A": ("A", "A"),
            "in parentheses": ("(B)", "B"),
            "with a full stop and white space": (" B.\n", "B"),
            "in quotes": ("'B'", "B"),
            "in bold": ("**B**", "B"),
            "half a parenthesis": ("B)", "B"),
            "with its text": ("B) a blue chair", "B"),
            "with its text after a colon": ("B: a blue chair.", "B"),
            "with its text and another's": ("B. The blue chair is nearer than the red chair.", "B"),
            "after the word option": ("Option B", "B"),
            "on a line before an explanation": ("B\n\nThe image shows a red chair.", "B"),
            "before a reason": ("B because it is nearer", "B"),
            "a letter beyond the choices": ("E", None),
            "with the text of another option": ("A: a blue chair", "B"),
            "with a text that is no option": ("A: It is not visible.", None),
            "a list of the options": ("A. a red chair\nB. a blue chair\nC. a green table", None),
            "a list of the options on one line": ("A. a red chair B. a blue chair", None),
            "a letter that begins a compound": ("C-shaped", None),
            "an article with an apostrophe": ("A's", None),
        }
    ),
)
def test_an_option_is_read_from_a_reply_that_is_a_letter(reply, letter):
    assert read_option(reply, CHAIRS) == letter


@pytest.mark.parametrize(
    ("reply", "letter"),
    rows(
        {
            "one letter in parentheses": ("One sees (C) there, so (C) it is", "C"),
            "one lower-case letter in parentheses": ("One sees (c) there", "C"),
            "two letters in parentheses": ("Either (A) or (C)", None),
            "a letter in parentheses beyond the choices": ("(E) is no option, (B) is", "B"),
            "not the letter in parentheses": ("It is not (A)", None),
            "the plural in parentheses": ("The thing(s) (a)re", None),
            "the only bold option": ("It is **B. a blue chair**, not a red chair.", "B"),
            "several bold options": ("- **A. a red chair**: no\n- **B. a blue chair**: yes\n- That is all.", None),
            "the whole reply is an option": ("A blue chair.", "B"),
            "an option in a sentence": ("There is a Blue Chair in the corner", "B"),
            "none of the above is an option": ("None of the above.", "D"),
            "two options": ("a red chair and a blue chair", None),
            "one option, another one denied": ("It is not a red chair but a blue chair.", "B"),
            "an option denied": ("That isn't a red chair.", None),
            "an option inside another word": ("an infrared chair", None),
            "none of the options, which is no option": ("None of the options", None),
            "none of the options, one of them named": ("None of the options shows a red chair.", None),
            "a sentence that begins with The": ("The answer can't be told.", None),
            "a sentence that begins with A": ("A chair is in the corner.", None),
            "a sentence that begins with I": ("I think it is a table.", None),
            "a sentence that begins with D": ("Dark.", None),
            "two letters stated": ("The answer is A or B.", None),
            "two letters in bold": ("Answer: **A** or **B**", None),
            "two letters in parentheses stated": ("Answer: (A) and (C)", None),
            "letters with a slash": ("Answer: A/B", None),
            "a letter stated beyond the choices": ("Answer: E", None),
            "the article a stated": ("The answer is a chair", None),
            "the article A stated": ("The answer is A chair", None),
            "a compound stated": ("Answer: C-shaped", None),
            "the answer is not": ("The answer is not B", None),
            "the incorrect option": ("The incorrect option is A", None),
            "the incorrect answer": ("The incorrect answer is A", None),
            "the wrong answer": ("The wrong answer is A", None),
            "the word answer without a statement": ("I can answer (B)", "B"),
            "both": ("Both of them", None),
            "nothing": ("", None),
        }
    ),
)
def test_an_option_is_read_from_parentheses_or_its_text_and_never_from_a_capital(reply, letter):
    assert read_option(reply, CHAIRS) == letter


@pytest.mark.parametrize(
    ("reply", "choices", "letter"),
    rows(
        {
            "the longer text wins": ("the dark blue one", ("blue", "dark blue"), "B"),
            "the longer text wins, whatever the order": ("the dark blue one", ("dark blue", "blue"), "A"),
            "the shorter text alone": ("the light blue one", ("blue", "dark blue"), "A"),
            "both the shorter and the longer": ("dark blue or just blue", ("blue", "dark blue"), None),
            "not 1 in 10": ("10", ("1", "10"), "B"),
            "not 5 in 2.5": ("2.5", ("2", "5", "2.5"), "C"),
            "not 5 in 1.5 that is no option": ("1.5", ("2", "5"), None),
            "not 500 in 1,500": ("1,500", ("1", "500", "1,500"), "C"),
            "a sign is part of a number": ("-2", ("2", "-2"), "B"),
            "a negative number that is no option": ("-2", ("2", "3"), None),
            "a number at the end of a sentence": ("There are 5.", ("5", "15"), "A"),
            "a number stated": ("Answer: 15", ("5", "15"), "B"),
            "a letter before a number": ("(B) 1", ("1", "2"), "B"),
            "marks at the edges": ("It is 45°.", ("45°", "135°"), "A"),
            "LaTeX in the option": (r"$\frac{1}{2}$", (r"\frac{1}{2}", "2"), "A"),
            "yes": ("Yes, it is.", ("Yes", "No"), "A"),
            "a full stop in the option": ("It is on the left", ("It is on the left.", "It is on the right."), "A"),
            "an option with a None of its own": ("None of these", ("1", "None of these"), "B"),
            "an option that begins with not": ("It is not visible", ("visible", "not visible"), "B"),
            "two letters in an option": ("Answer: B and C", ("A and B", "B and C"), "B"),
            "equal texts give the first letter": ("Fast", ("slow", "fast", "Fast"), "B"),
            "one choice, its text empty": ("", ("",), None),
            "no choices": ("A", (), None),
            "I is a letter where there are nine": ("I", tuple("rstuvwxyz"), "I"),
            "I is a word where there are nine": ("I think", tuple("rstuvwxyz"), None),
        }
    ),
)
def test_option_texts_are_whole_words(reply, choices, letter):
    assert read_option(reply, choices) == letter


@pytest.mark.parametrize(
    ("reply", "answer", "outcome"),
    rows(
        {
            "the letter": ("C", "C", "correct"),
            "the letter of an equal text": ("B", "C", "correct"),
            "an equal text in other capitals": ("FAST", "C", "correct"),
            "the other way round": ("C", "B", "correct"),
            "another letter": ("A", "C", "wrong answer"),
            "another text": ("slow", "B", "wrong answer"),
            "nothing to read": ("Quickly", "B", "no answer"),
        }
    ),
)
def test_any_of_the_options_of_equal_text_is_right(reply, answer, outcome):
    assert judge(reply, answer, "option", ("slow", "fast", "Fast")) == outcome


@pytest.mark.parametrize(
    ("reply", "count"),
    rows(
        {
            "a digit": ("3", 3),
            "ten is not one": ("There are 10 cups.", 10),
            "a full stop": ("4.", 4),
            "bold": ("There are **5** cups.", 5),
            "a thousands separator": ("1,000", 1000),
            "a number word": ("There are seven cups.", 7),
            "a capital number word": ("Twenty", 20),
            "zero": ("zero", 0),
            "the first of two": ("3 of the 5 cups", 3),
            "after the answer": ("I see 2 rows of 4 cups. Answer: 8", 8),
            "after the answer, a word": ("In 2 rows. The answer is eight.", 8),
            "after the last answer": ("Answer: 4. No, the answer is 5", 5),
            "the last answer has no number": ("Answer: 4. I hope this answer is right.", 4),
            "no answer has one, the reply has": ("4 cups. Answer: see above", 4),
            "a tag": ("2 rows <answer>6</answer>", 6),
            "boxed": (r"2 \times 3 = \boxed{6}", 6),
            "fenced JSON": ('```json\n{"Reasoning": "2 rows", "Answer": 6}\n```', 6),
            "a list of items": ("1. a red cup\n2. a blue cup\n3. a pan\nThree.", 3),
            "a list of items in bold": ("Cups:\n**1.** red\n**2.** blue\nSo there are 2.", 2),
            "one number and a full stop is no list": ("5. I counted them.", 5),
            "a decimal": ("2.5", None),
            "a decimal without a whole part": (".5", None),
            "a fraction": ("1/2", None),
            "a negative number": ("-4", None),
            "a decimal comma": ("2,5", None),
            "inside a longer word": ("twofold", None),
            "with letters": ("a 3D view, the 2nd", None),
            "a larger number in words": ("twenty-five", None),
            "a larger number in two words": ("twenty five", None),
            "hundreds": ("three hundred", None),
            "a number of thousands of digits": ("9" * 5000, None),
            "no number": ("many", None),
            "nothing": ("", None),
        }
    ),
)
def test_a_count_is_the_first_whole_number_after_the_answer(reply, count):
    assert read_count(reply) == count


@pytest.mark.parametrize(
    ("reply", "metres"),
    rows(
        {
            "metres": ("2 m", 2),
            "meters in a sentence": ("The width is 1.25 meters.", 1.25),
            "metres, British, without a space": ("1.5metres", 1.5),
            "capitals": ("60 CM", 0.6),
            "centimeters": ("75 centimeters", 0.75),
            "millimetres with a thousands separator": ("1,200 mm", 1.2),
            "kilometres": ("0.5 km", 500),
            "no whole part": (".5 m", 0.5),
            "feet": ("6 feet", 1.8288),
            "foot, with a hyphen": ("a 6-foot wall", 1.8288),
            "ft": ("about 10ft", 3.048),
            "a foot mark": ("6'", 1.8288),
            "a prime": ("6′", 1.8288),
            "inches": ("20 inches", 0.508),
            "an inch mark": ('20"', 0.508),
            "a double prime": ("20″", 0.508),
            "a curly inch mark": ("20”", 0.508),
            "two foot marks": ("20''", 0.508),
            "feet and inches in words": ("5 feet 11 inches", 1.8034),
            "feet and inches with and": ("5 feet and 11 inches", 1.8034),
            "feet and inches in abbreviations": ("5 ft. 11 in.", 1.8034),
            "feet and inches in marks": ("5'11\"", 1.8034),
            "feet and inches in marks with a space": ("5' 11\"", 1.8034),
            "feet and inches in primes": ("5′11″", 1.8034),
            "feet and inches without an inch mark": ("5'11", 1.8034),
            "feet and inches in number words": ("five feet eleven inches", 1.8034),
            "feet and no inches": ("5 feet 0 inches", 1.524),
            "metres and centimetres": ("1 meter and 20 centimeters", 1.2),
            "the same in other units is not added": ("6 feet, 72 inches", 1.8288),
            "feet and a further inch length are not added": ("6 feet wide, 10 inches deep", 0.254),
            "a conversion in parentheses": ("5'11\" (180 cm)", 1.8),
            "a conversion after a slash": ("5.9 ft/1.8 m", 1.8),
            "a region": ("Region [1] is 3 m wide", 3),
            "a region without a unit": ("Region [1] is 3 wide", None),
            "a region right before a unit": ("Region 1 m", None),
            "a region in plain digits": ("region 2: 3 m", 3),
            "the last quantity": ("It is 2 m away and 0.5 m wide", 0.5),
            "a range": ("1 to 2 meters", 2),
            "a range with a hyphen": ("1-2 m", 2),
            "a number word": ("two meters", 2),
            "a number word with a hyphen": ("a two-meter wall", 2),
            "and a half": ("one and a half metres", 1.5),
            "bold": ("The width is **1.5** meters", 1.5),
            "LaTeX": (r"$1.5\,\text{m}$", 1.5),
            "JSON with the unit": ('{"width": "1.5 m"}', 1.5),
            "JSON without a unit": ('{"width": "5"}', None),
            "a quoted number": ("'5'", None),
            "a number in curly quotes": ("“5”", None),
            "an abbreviated inch at the end": ("20 in", 0.508),
            "an abbreviated inch before a dimension": ("20 in wide", 0.508),
            "an abbreviated inch before a mark": ("20 in, more or less", 0.508),
            "in the picture": ("there are 2 in the picture", None),
            "in this image": ("I see 2 in this image", None),
            "in image": ("2 in image 1", None),
            "in height": ("it is 2 in height", None),
            "a length before in the picture": ("1.5 m, one of 2 in the picture", 1.5),
            "a number without a unit": ("2.5", None),
            "a trailing number without a unit": ("2.5 m, and 3 of them", 2.5),
            "a negative length": ("-2 m", None),
            "a negative length in a sentence": ("It is -2 m.", None),
            "a negative length with a minus sign": ("−2 m", None),
            "a length of zero": ("0 m", None),
            "an infinite length": ("9" * 400 + " m", None),
            "an area": ("5 m²", None),
            "an area in digits": ("5 m2", None),
            "an area with a caret": ("5 m^2", None),
            "a speed": ("5 m/s", None),
            "a word that begins like a unit": ("5 men, 5 minutes, 3 inner rings", None),
            "an exponent": ("1e-3 m", None),
            "a decimal comma": ("1,5 m", None),
            "a fraction": ("1/2 m", None),
            "a version number": ("1.2.3 m", None),
            "a larger number in words": ("twenty-five feet", None),
            "a larger number in two words": ("thirty five feet", None),
            "a decimal in words": ("one point two five meters", None),
            "an apostrophe": ("the 5's", None),
            "nothing": ("", None),
        }
    ),
)
def test_a_length_is_the_last_number_with_a_unit(reply, metres):
    assert read_metres(reply) == (metres if metres is None else pytest.approx(metres))


@pytest.mark.parametrize(
    ("reply", "final"),
    rows(
        {
            "bare": ("Yes", "Yes"),
            "bare with a full stop": ("Yes.", "Yes"),
            "five words": ("It is a mountain bike", "It is a mountain bike"),
            "six words": ("It is a red mountain bike", None),
            "a bare fence": ("```\nyes\n```", "yes"),
            "a bare fence with a language": ("```json\nyes\n```", "yes"),
            "the template": ("Reasoning: it has two wheels\nAnswer: Mountain bike", "Mountain bike"),
            "the template in bold": ("**Reasoning:** two wheels\n**Answer:** Yes", "Yes"),
            "a value in bold": ("Answer: **Yes**", "Yes"),
            "the value on the next line": ("Answer:\n\nSmall\n\nIt is far.", "Small"),
            "JSON": ('{"Reasoning": "two, wheels", "Answer": "Mountain bike"}', "Mountain bike"),
            "JSON with single quotes": ("{'Reasoning': 'it's big', 'Answer': 'No'}", "No"),
            "fenced JSON with a number": ('```json\n{"Reasoning": "..", "Answer": 3}\n```', "3"),
            "JSON with a further key": ('{"Answer": 3, "Confidence": 0.9}', "3"),
            "JSON in reverse order": ("{'Answer': 'Yes', 'Reasoning': 'so the answer is clear'}", "Yes"),
            "JSON that isn't closed": ('{"Answer": "Yes', "Yes"),
            "an apostrophe in the value": ("{'Answer': 'fighter's jet'}", "fighter's jet"),
            "the last of two": ("Answer: No. Wait.\nAnswer: Yes", "Yes"),
            "the last one is empty": ("Answer: No\nAnswer:", "No"),
            "trailing prose": ("Answer: Yes. There is a car.", "Yes"),
            "trailing prose on a new line": ("Answer: Yes\nThere is a car", "Yes"),
            "a tag": ("<answer>yes</answer> because there is a car there", "yes"),
            "a sentence": ("After all that I have seen, the answer is yes.", "yes"),
            "an empty value": ("Answer:", None),
            "an empty value in JSON": ('{"Answer": ""}', None),
            "marks only": ("...", None),
            "nothing": ("", None),
        }
    ),
)
def test_a_final_answer_is_what_stands_after_the_key(reply, final):
    assert read_final(reply) == final


@pytest.mark.parametrize(
    ("reply", "answer", "exact", "lenient"),
    rows(
        {
            "equal": ("Answer: red", "red", True, True),
            "other capitals and marks": ("Answer: 'Red'.", "red", True, True),
            "an article": ("A sedan", "Sedan", True, True),
            "true for yes": ("True", "Yes", True, True),
            "no for false": ("No", "False", True, True),
            "a word for a digit": ("Answer: two", "2", True, True),
            "a digit for a word": ("2", "two", True, True),
            "another colour": ("blue", "red", False, False),
            "another size": ("small", "large", False, False),
            "a longer phrase": ("red car", "red", False, False),
            "the opposite": ("False", "Yes", False, False),
            "zero for no": ("0", "No", False, True),
            "none for no": ("None", "No", False, True),
            "no for zero": ("no", "0", False, False),
            "a number for yes": ("3", "Yes", False, True),
            "a word that is a number for yes": ("three", "Yes", False, True),
            "a two-digit number for yes": ("12", "Yes", False, False),
            "zero for yes": ("0", "Yes", False, False),
            "a car of another kind": ("wagon", "suv", False, True),
            "a bus of another kind": ("school bus", "double bus", False, True),
            "an aeroplane of another kind": ("fighter jet", "biplane", False, True),
            "a motorbike of another kind": ("chopper", "scooter", False, True),
            "a bicycle of another kind": ("road bike", "Mountain bike", False, True),
            "a vehicle of another category": ("dirtbike", "Mountain bike", False, False),
            "a shape that isn't the first word": ("red wagon", "suv", False, False),
        }
    ),
)
def test_spatial457_strictly_and_as_vlmevalkit_judges_it(reply, answer, exact, lenient):
    assert judge(reply, answer, "exact") == ("correct" if exact else "wrong answer")
    assert judge(reply, answer, "lenient") == ("correct" if lenient else "wrong answer")


@pytest.mark.parametrize(
    ("reply", "answer", "rule", "outcome"),
    rows(
        {
            "an option": ("Answer: B", "B", "option", "correct"),
            "another option": ("Answer: A", "B", "option", "wrong answer"),
            "no option": ("The answer...", "B", "option", "no answer"),
            "a count": ("There are five.", "5", "count", "correct"),
            "another count": ("10", "1", "count", "wrong answer"),
            "no count": ("2.5", "2", "count", "no answer"),
            "a length": ("1 m", "1", "length", "correct"),
            "a length in another unit": ("40 inches", "1", "length", "correct"),
            "a length at the lower edge": ("3 m", "4", "length", "correct"),
            "a length at the upper edge": ("5 m", "4", "length", "correct"),
            "a length below the band": ("2.99 m", "4", "length", "wrong answer"),
            "a length above the band": ("5.01 m", "4", "length", "wrong answer"),
            "a length without a unit": ("4", "4", "length", "no answer"),
            "no final answer": ("I can see the car over there.", "Yes", "exact", "no answer"),
            "no final answer, leniently": ("I can see the car over there.", "Yes", "lenient", "no answer"),
        }
    ),
)
def test_a_reply_of_a_real_benchmark_is_judged_by_its_rule(reply, answer, rule, outcome):
    assert judge(reply, answer, rule, COLOURS) == outcome


@pytest.mark.parametrize(
    ("reply", "answer", "rule", "outcome"),
    rows(
        {
            "an option in the reasoning": ("There is a red thing, so the", "A", "option", "cut off"),
            "a letter in the reasoning": ("If (A) were right, then", "A", "option", "cut off"),
            "a letter stated": ("The answer is (A) because of the", "A", "option", "correct"),
            "another letter stated": ("The answer is (B) because of the", "A", "option", "wrong answer"),
            "a lone letter": ("A", "A", "option", "correct"),
            "a count in the reasoning": ("There are 5 cups on the", "5", "count", "cut off"),
            "a count stated": ("Answer: 5\nI counted", "5", "count", "correct"),
            "a count that may have another digit": ("Answer: 1", "1", "count", "cut off"),
            "a length in the reasoning": ("The door is 2 m high, hence the", "2", "length", "cut off"),
            "a length stated": ("The answer is 2 m, given the", "2", "length", "correct"),
            "feet without their inches": ("The answer is 5 feet", "1.8", "length", "cut off"),
            "a final answer in JSON": ("{'Answer': 'road bike'", "road bike", "exact", "correct"),
            "half a final answer": ("Answer: road", "road bike", "exact", "cut off"),
            "half a final answer, leniently": ("{'Answer': 'road", "road bike", "lenient", "cut off"),
            "a short reply": ("road", "road bike", "exact", "cut off"),
            "only the reasoning": ("Reasoning: the bike has", "road bike", "exact", "cut off"),
        }
    ),
)
def test_a_reply_that_was_cut_off_is_read_only_where_it_states_its_answer(reply, answer, rule, outcome):
    assert judge(reply, answer, rule, COLOURS, finished=False) == outcome


PIECES = [
    *("answer", "Answer:", " is ", "(A)", "B", "**", "\\boxed{", "}", "red", "5", "'", '"', "1,000", ".", "\n", " "),
    *("feet", "in", " m", "two", "and a half", "Region [1]", "None of the", "not ", "<", "-", "ſ", "ı", "²", "½", "٣"),
]
pieces = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)


@many
@given(st.text(max_size=60) | pieces, st.sampled_from(get_args(Rule)), st.booleans())
def test_any_text_has_exactly_one_outcome_by_every_rule(text, rule, finished):
    answer, choices = ("A", ("red", "5")) if rule == "option" else ("5", ("5", "red"))
    outcome = judge(text, answer, rule, choices, finished)
    assert outcome in OUTCOMES and outcome != ("no answer" if not finished else "cut off")


@many
@given(st.text(max_size=60) | pieces, st.lists(st.text(max_size=5), max_size=8), st.booleans())
def test_an_option_is_among_the_choices_or_none(text, choices, finished):
    assert read_option(text, choices, finished) in {None, *"ABCDEFGH"[: len(choices)]}


TEMPLATES = [
    *("The answer is ({})", "the answer is {}.", "Answer: {}", "**Answer:** {}", "**Answer: {}**", "Answer\n{}"),
    *(
        "Final answer: **{}**",
        "The correct option is {}",
        "The right choice is ({}).",
        "So it's **{}**.",
        "({})",
        "{}.",
    ),
    *("\\boxed{{{}}}", "$\\boxed{{\\text{{{}}}}}$", '{{"Answer": "{}"}}', "{{'answer': '{}'}}", "<answer>{}</answer>"),
]


@many
@given(st.sampled_from("ABCDEFGH"), st.sampled_from(TEMPLATES), st.booleans())
def test_a_letter_in_any_template_is_read_back(letter, template, lower):
    choices = ["one thing", "two things", "three", "four", "five", "six", "seven", "eight"]
    assert read_option(template.format(letter.lower() if lower else letter), choices) == letter
    assert read_option(template.format(letter), choices[: ord(letter) - ord("A")]) is None


@many
@given(
    st.integers(1, 10**5).map(lambda n: n / 100) | st.integers(1, 20),
    st.sampled_from(
        [(1, "m"), (1, "meters"), (0.01, "cm"), (0.01, "centimetres"), (0.001, "mm"), (1000, "kilometers")]
        + [(0.0254, "inches"), (0.0254, "in"), (0.0254, '"'), (0.3048, "ft"), (0.3048, "feet"), (0.3048, "'")]
    ),
    st.sampled_from(["{}", "{}.", "The width of Region [1] is {}.", "It's about **{}**", "2 m? No, {}", "{}\n"]),
)
def test_a_number_with_a_unit_is_read_back_in_metres(number, unit, template):
    metres, name = unit
    said = f"{number}{'' if name in chr(34) + chr(39) else ' '}{name}"
    assert read_metres(template.format(said)) == pytest.approx(number * metres)


@many
@given(st.integers(0, 10**6), st.sampled_from(["{}", "There are {:,} of them.", "2 rows. Answer: {}", "{}!"]))
def test_a_count_is_read_back(number, template):
    assert read_count(template.format(number)) == number


@pytest.mark.parametrize("piece", ["the answer is unclear. ", "answer: ", "**", "_", "\n", "1 ", "A. ", '"', "not a "])
def test_a_reply_that_repeats_itself_is_read_in_no_time(piece):
    start = time.perf_counter()
    for rule in get_args(Rule):
        judge(piece * 1000, "5", rule, CHAIRS)
    assert time.perf_counter() - start < 2
