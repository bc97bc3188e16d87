"""The real benchmarks, read from small copies in their own schema: literal rows, splits, losses, construction."""

import copy
import dataclasses
import io
import itertools
import os
import subprocess
import sys
import time
import tracemalloc
import urllib.error

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from tests import real_fixtures as fixtures
from tests.real_fixtures import cell, encoded, picture
from vrhlib import evaluate, plan, real, store
from vrhlib.answers import judge
from vrhlib.benchmarks import answering, apart, grounding
from vrhlib.boxes import Box, encode_mask, to_frame
from vrhlib.real import BENCHMARKS
from vrhlib.samples import Samples
from vrhlib.scoring import score_samples

NUMBERS = range(12)


@pytest.fixture
def shelf(root, monkeypatch, tmp_path):
    """An empty data/local, a cache to throw away, and no network."""
    fixtures.isolate(monkeypatch, tmp_path / "cache")
    return root


def draw(name, split="all", n=None, seed=0, **options) -> Samples:
    asked = grounding if BENCHMARKS[name].family == "grounding" else answering
    return asked(name, split, n, seed, allow_drift=True, **options)


def refcoco(shelf, rows, name="RefCOCO"):
    fixtures.write_lmms(shelf, name, rows)


def two_a_picture(pictures=NUMBERS) -> list[dict]:
    return [fixtures.refcoco_row(n, t) for n in pictures for t in (0, 1)]


def named(samples) -> dict:
    return {s.id: s for s in samples}


def facts(sample) -> tuple:
    return sample.id, sample.image_key, sample.text, sample.box, sample.answer, sample.choices, sample.kind, sample.task


def near(box: Box) -> object:
    return pytest.approx(tuple(box), abs=1e-4)  # tables hold float32


# ---------------------------------------------------------------- literal rows


def test_a_refcoco_row_is_a_thing_with_its_first_expression(shelf):
    fixtures_row = fixtures.refcoco_row(
        0, 0, question_id="469306", image=cell(picture(0, (640, 480))), bbox=[59.05, 93.24, 375.02, 362.58],
        answer=["guy petting elephant ", "foremost person", "green shirt"],
        file_name="COCO_train2014_000000296747_0.jpg", segmentation=[60, 100, 400, 100, 400, 400, 60, 400],
    )  # fmt: skip
    refcoco(shelf, [fixtures_row])
    (sample,) = draw("refcoco")
    assert (sample.id, sample.text, sample.task) == ("refcoco-val-0", "guy petting elephant", "locate")
    assert sample.box == near(Box(59.05, 93.24, 434.07, 455.82)), "x, y, width, height in the table"
    assert sample.image_key == "000000296747" and sample.image.size == (640, 480)
    assert sample.mask["size"] == [480, 640] and sample.answer is None and sample.choices == ()


@pytest.mark.parametrize(
    ("size", "xywh", "xyxy"),
    [
        ((640, 428), [146, 137, 469, 278], (146, 137, 615, 415)),  # "bowl of carrots"
        ((640, 480), [332.89, 79.57, 38.65, 106.31], (332.89, 79.57, 371.54, 185.88)),  # COCO val 39769, a remote
        ((640, 480), [1.08, 0, 638.56, 473.53], (1.08, 0, 639.64, 473.53)),  # its couch
        ((500, 375), [366.7, 80.84, 132.8, 181.84], (366.7, 80.84, 499.5, 262.68)),  # COCO val 386298, a dog
    ],
)
def test_the_same_box_comes_out_of_both_conventions(shelf, size, xywh, xyxy):
    image = cell(picture(0, size))
    refcoco(shelf, [fixtures.refcoco_row(0, 0, image=image, bbox=xywh)])
    row = fixtures.kangheng_row(0, 0, image=image, bbox=str(list(xyxy)))
    fixtures.write(shelf, "Kangheng/refcoco", {"val": [row]}, fixtures.KANGHENG)
    for sample in (draw("refcoco")[0], draw("refcoco-unc", "val")[0]):
        assert sample.box == near(Box(*xyxy)), sample.id


def test_a_known_box_is_written_as_every_family_writes_it(shelf):
    row = fixtures.kangheng_row(
        0, 0, image=cell(picture(0, (640, 428))), question="bowl of carrots", bbox="[146.0, 137.0, 615.0, 415.0]"
    )
    fixtures.write(shelf, "Kangheng/refcoco", {"val": [row]}, fixtures.KANGHENG)
    (sample,) = draw("refcoco-unc", "val")
    written = [
        [round(c) for c in to_frame(sample.box, frame, sample.image.size, (644, 420))]
        for frame in ("resized", "permille")
    ]
    assert sample.text == "bowl of carrots" and written == [[147, 134, 619, 407], [228, 320, 961, 970]]


def test_a_refspatial_row_is_its_phrase_and_the_tight_box_of_its_mask(shelf):
    mask = np.zeros((120, 160), np.uint8)
    mask[30:50, 20:90], mask[30, 19] = 255, 1  # the edge is soft: anything above 0 belongs
    row = fixtures.refspatial_row(
        0, object="the orange box", prompt="Please point out the orange box.", step=1,
        mask=cell(encoded(Image.fromarray(mask))),
    )  # fmt: skip
    fixtures.write(shelf, "BAAI/RefSpatial-Bench", {"location": [row], "placement": [row]}, fixtures.REFSPATIAL)
    (boxed,), (pointed,) = draw("refspatial"), draw("refspatial-points", "placement")
    assert facts(boxed)[2:] == ("the orange box", Box(19, 30, 90, 50), None, (), "1 step", "locate")
    assert (boxed.pixels == (mask > 0)).all() and (pointed.pixels == (mask > 0)).all()
    assert pointed.box is None and pointed.task == "point" and pointed.text == "the orange box"
    assert (boxed.id, pointed.id) == ("refspatial-location-0", "refspatial-points-placement-0")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "1", "P"])
def test_a_mask_is_read_whatever_its_mode(shelf, mode):
    mask = np.zeros((120, 160), np.uint8)
    mask[30:50, 20:90] = 255
    row = fixtures.refspatial_row(0, mask=cell(encoded(Image.fromarray(mask).convert(mode))))
    fixtures.write(shelf, "BAAI/RefSpatial-Bench", {"location": [row]}, fixtures.REFSPATIAL)
    assert draw("refspatial")[0].box == (20, 30, 90, 50)


def test_a_toloka_row_is_a_question_about_a_coco_picture(shelf):
    row = fixtures.toloka_row(
        70, width=640, height=480, left=52, top=372, right=636, bottom=443,
        question="What equipment is used for snowboarding?",
    )  # fmt: skip
    fixtures.write_toloka(shelf, [row], {"000000000070.jpg": picture(70, (640, 480))})
    (sample,) = draw("toloka")
    assert facts(sample) == (
        "toloka-test_public-0", "000000000070", "What equipment is used for snowboarding?", Box(52, 372, 636, 443),
        None, (), "", "question",
    )  # fmt: skip
    assert (np.asarray(sample.image) == np.asarray(Image.open(io.BytesIO(picture(70, (640, 480)))))).all()


def test_a_spatial457_row_asks_for_reasoning_and_an_answer(shelf):
    rows = [
        fixtures.spatial457_row(0, question="What color is the double bus?", answer="purple"),
        fixtures.spatial457_row(1, question="Is there a large suv?", answer="False"),
        fixtures.spatial457_row(2, answer="mountain bike"),
        fixtures.spatial457_row(3, answer="3"),
        fixtures.spatial457_row(4, answer="front"),
    ]
    fixtures.write(shelf, "RyanWW/Spatial457-v2", {"validation": rows}, fixtures.SPATIAL457, "L1_single", "L1_single")
    samples = draw("spatial457")
    assert samples.max_new_tokens == 512 and "L1_single validation" in samples.origin
    assert [(s.kind, s.answer, s.chance) for s in samples] == [
        ("colour", "purple", 1 / 8), ("yes or no", "False", 1 / 2), ("shape", "mountain bike", 1 / 21),
        ("count", "3", 1 / 11), ("other", "front", None),
    ]  # fmt: skip
    text = samples[0].text
    assert "\nWhat color is the double bus?\n" in text
    assert "{" not in text.replace("{'Reasoning': '<your reasons>', 'Answer': '<your answer>'}", "")
    assert all(f"'{word}'" in text for kind in ("size", "colour", "shape") for word in real.SPATIAL457_WORDS[kind])
    replies = ["{'Reasoning': 'I see it.', 'Answer': 'purple'}", "{'Reasoning': 'none', 'Answer': 'No'}"]
    assert [judge(r, s.answer, s.rule, s.choices) for r, s in zip(replies, samples)] == ["correct"] * 2


@pytest.mark.parametrize(
    ("said", "metres"),
    [
        ("6.91 feet", 6.91 * 0.3048),
        ("Region [0] is 5.2 meters wide.", 5.2),
        ("The width of Region [0] is 30.5 centimeters.", 0.305),
        ("Region [0] is 12 inches in height.", 0.3048),
        ("Region [0] is 5'11\" tall", 71 * 0.0254),
    ],
)
def test_a_spatialrgpt_answer_is_kept_in_metres(shelf, said, metres):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": said}]
    rows = [fixtures.spatialrgpt_row(0, conversations=turns)]
    fixtures.write(shelf, "a8cheng/SpatialRGPT-Bench", {"val": rows}, fixtures.SPATIALRGPT)
    (sample,) = draw("spatialrgpt")
    assert float(sample.answer) == pytest.approx(metres, rel=1e-5)
    assert judge(f"about {metres:.3f} m", sample.answer, sample.rule) == "correct"
    assert judge(f"about {metres * 1.3:.3f} m", sample.answer, sample.rule) == "wrong answer"


def test_a_cv_bench_row_is_its_prompt_and_a_letter(shelf):
    row = fixtures.cv_bench_row(
        787, question="How many wine glasss are in the image?", choices=["0", "3", "2", "1"], answer="(D)",
        prompt="How many wine glasss are in the image? Select from the following choices.\n(A) 0\n(B) 3\n(C) 2\n(D) 1",
        filename="img/2D/count/coco_287.png", source_filename="/coco/val2017/000000412362.jpg",
    )  # fmt: skip
    fixtures.write(shelf, "nyu-visionx/CV-Bench", {"test": [row]}, fixtures.CV_BENCH)
    (sample,) = draw("cv-bench")
    assert facts(sample) == (
        "cv-bench-test-0", "/coco/val2017/000000412362.jpg",
        "How many wine glasss are in the image? Select from the following choices.\n(A) 0\n(B) 3\n(C) 2\n(D) 1\n"
        "Answer with the option's letter from the given choices directly.",
        None, "D", ("0", "3", "2", "1"), "COCO", "answer",
    )  # fmt: skip
    assert (sample.rule, sample.chance) == ("option", 0.25) and judge("1", "D", "option", sample.choices) == "correct"


def test_the_official_score_of_cv_bench_weighs_sources():
    weights = BENCHMARKS["cv-bench"].weights
    accuracy = {"ADE20K": 0.6, "COCO": 0.8, "Omni3D": 0.5}
    assert sum(weights[s] * a for s, a in accuracy.items()) == pytest.approx(((0.6 + 0.8) / 2 + 0.5) / 2)
    assert [b.name for b in BENCHMARKS.values() if b.weights] == ["cv-bench"]


def test_an_mmstar_row_gives_its_options(shelf):
    row = fixtures.mmstar_row(
        0, answer="D", category="coarse perception", question="Which option describe the object relationship in the "
        "image correctly?\nOptions: A: The suitcase is on the book., B: The suitcase is beneath the cat., C: The "
        "suitcase is beneath the bed., D: The suitcase is beneath the book.",
    )  # fmt: skip
    strange = fixtures.mmstar_row(1, question="Which letter is drawn?", answer="C")
    fixtures.write(shelf, "Lin-Chen/MMStar", {"val": [row, strange]}, fixtures.MMSTAR, "val")
    samples = draw("mmstar")
    assert samples[0].choices == (
        "The suitcase is on the book.", "The suitcase is beneath the cat.", "The suitcase is beneath the bed.",
        "The suitcase is beneath the book.",
    )  # fmt: skip
    assert samples[0].answer == "D" and samples[0].text == f"{row['question']}\n{real.LETTER}"
    assert samples[1].choices == ("A", "B", "C", "D") and samples[1].answer == "C"
    assert samples.notes["with options that were not found in the text: letters A to D"] == 1


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("What?\nOptions: A: red, B: green", ["red", "green"]),
        ("Options: A: 1, B: 2. Of those, which?\nOptions: A: 5, B: 6, C: 7", ["5", "6", "7"]),  # the last list counts
        ("Options: A: CAB: a taxi, B: a bus", ["CAB: a taxi", "a bus"]),  # a letter that ends a word is none
        ("Options: A: $3,000, B: $4,000, C: none", ["$3,000", "$4,000", "none"]),
        ("Options: A: vitamin B, B: vitamin C, C: D", ["vitamin B", "vitamin C", "D"]),
        ("Options:\nA. left\nB. right", ["left", "right"]),
        ("Options: (A) left (B) right (C) up", ["left", "right", "up"]),
        ("Options: A:yes, B:no", ["yes", "no"]),
        ("Options: A: only one", []),
        ("A: red, B: green", []),
        ("", []),
    ],
)
def test_options_are_found_in_the_text(question, options):
    assert real.listed_options(question) == options


@given(st.lists(st.from_regex(r"\A[a-z0-9][a-z0-9 ]{0,14}[a-z0-9]\Z"), min_size=2, max_size=8))
def test_any_plain_options_are_found_again(options):
    text = "Options: " + ", ".join(f"{letter}: {text}" for letter, text in zip("ABCDEFGH", options))
    assert real.listed_options(f"What is it?\n{text}") == options


def test_a_countbench_question_comes_without_the_caption(shelf):
    row = fixtures.countbench_row(0, text="A set of seven spoons", question="How many spoons are there?", number=7)
    fixtures.write(shelf, "vikhyatk/CountBenchQA", {"test": [row]}, fixtures.COUNTBENCH)
    (sample,) = draw("countbenchqa")
    assert sample.text == "How many spoons are there?\nAnswer with a single number." and "seven" not in sample.text
    assert (sample.answer, sample.rule) == ("7", "count") and judge("seven", "7", "count") == "correct"


def test_mathvista_options_are_told_by_their_text(shelf):
    question = (
        "As shown in the figure, CD is the diameter of ⊙O, chord DE ∥ OA, if the degree of ∠D is 50.0, then the degree "
        "of ∠C is ()"
    )
    query = f"Hint: ...\nQuestion: {question}\nChoices:\n(A) 25°\n(B) 30°\n(C) 40°\n(D) 50°"
    rows = [
        fixtures.mathvista_row(0, question=question, query=query, choices=["25°", "30°", "40°", "50°"], answer="25°"),
        fixtures.mathvista_row(1, choices=["4", "6", "6", "8"], answer="6"),  # three rows repeat an option
        fixtures.mathvista_row(2, choices=["1", "2"], answer="3"),
        fixtures.mathvista_row(3, multiple=False, answer="1.2"),
        fixtures.mathvista_row(4, multiple=False, answer="[0, 2]"),
    ]
    fixtures.write(shelf, "AI4Math/MathVista", {"testmini": rows}, fixtures.MATHVISTA)
    chosen = draw("mathvista")
    assert [s.id for s in chosen] == ["mathvista-testmini-0", "mathvista-testmini-1"]
    assert chosen[0].answer == "A" and chosen[0].text == f"{query}\n{real.LETTER}"
    assert (chosen[1].answer, chosen[1].chance) == ("B", 0.5)
    assert [judge(r, "B", "option", chosen[1].choices) for r in "BCD"] == ["correct", "correct", "wrong answer"]
    assert chosen.notes["with a right answer that stands twice among the options"] == 1
    assert "1 LOST: an answer that is none of the options" in repr(chosen)
    whole = draw("mathvista", subset="all")
    assert len(whole) == 3 and "subset=all" in whole.origin and "1 LOST: an answer that is not a number" in repr(whole)
    assert (whole[2].answer, whole[2].rule, whole[2].choices) == ("1.2", "number", ())
    assert whole[2].text.endswith(real.NUMBER) and judge("It is 1.2.", "1.2", "number") == "correct"


# ---------------------------------------------------------------- splits


def test_detect_and_test_share_no_picture_and_leave_none_out(shelf):
    refcoco(shelf, two_a_picture())
    for seed in range(4):
        detect, test = draw("refcoco", "detect", seed=seed, held_out=5), draw("refcoco", "test", seed=seed, held_out=5)
        assert len(detect) == 5 and test.disjoint(detect) is test
        assert detect.images | test.images == draw("refcoco").images
        assert len(test) == sum(s.image_key not in detect.images for s in draw("refcoco"))
        assert not test.notes.get("on a picture that the detection rows show too")
    assert {s.id for s in draw("refcoco", "detect", seed=0, held_out=5)} != {
        s.id for s in draw("refcoco", "detect", seed=1, held_out=5)
    }


def test_held_out_rows_are_the_first_by_digest(shelf):
    refcoco(shelf, two_a_picture())
    ids = [f"refcoco-val-{i}" for i in range(24)]
    for seed, count in ((0, 5), (3, 9)):
        first = sorted(ids, key=lambda name: store.digest([seed, name]))[:count]  # noqa: B023
        assert {s.id for s in draw("refcoco", "detect", seed=seed, held_out=count)} == set(first)


def test_the_papers_split_by_row_says_how_many_pictures_it_shares(shelf):
    refcoco(shelf, two_a_picture())
    detect = draw("refcoco", "detect", held_out=5)
    test = draw("refcoco", "test", held_out=5, split_by="row")
    assert len(test) == 19 and test.disjoint(detect, by="row") is test
    shared = sum(s.image_key in detect.images for s in test)
    assert shared > 0 and test.notes["on a picture that the detection rows show too"] == shared
    assert f"{shared} on a picture that the detection rows show too" in repr(test)
    with pytest.raises(ValueError, match="disjoint by image"):
        test.disjoint(detect)
    refcoco(shelf, [fixtures.refcoco_row(n, 0) for n in range(6)])
    assert "detection rows" not in repr(draw("refcoco", "test", held_out=2, split_by="row")), "none is shared"


@pytest.mark.parametrize("name", ["countbenchqa", "refspatial", "cv-bench"])
def test_pictures_without_a_name_are_told_apart_by_their_bytes(shelf, name):
    """Every picture stands in three rows."""
    rows = {
        "countbenchqa": ("vikhyatk/CountBenchQA", "test", fixtures.COUNTBENCH, fixtures.countbench_row),
        "refspatial": ("BAAI/RefSpatial-Bench", "location", fixtures.REFSPATIAL, fixtures.refspatial_row),
        "cv-bench": ("nyu-visionx/CV-Bench", "test", fixtures.CV_BENCH, fixtures.cv_bench_row),
    }[name]
    source, split, features, row = rows
    fixtures.write(shelf, source, {split: [row(n // 3) for n in range(18)]}, features)
    detect, test = draw(name, "detect", held_out=3), draw(name, "test", held_out=3)
    assert len(draw(name).images) == (3 if name == "cv-bench" else 6), "CV-Bench names two pictures alike"
    assert (
        detect.images and not detect.images & test.images and len(detect.images | test.images) == len(draw(name).images)
    )


def test_200_rows_are_held_out_by_default_and_half_of_a_small_table(shelf):
    refcoco(shelf, two_a_picture())
    assert len(draw("refcoco", "detect")) == 12
    one = fixtures.refcoco_row(0, 0)
    refcoco(shelf, [one | {"file_name": f"COCO_train2014_{n:012d}_0.jpg"} for n in range(403)])
    assert [len(draw("refcoco", split)) for split in ("detect", "test")] == [200, 203]


def test_n_is_drawn_by_seed_keeps_the_order_and_nests(shelf):
    refcoco(shelf, two_a_picture())
    whole = [s.id for s in draw("refcoco")]
    assert whole == [f"refcoco-val-{i}" for i in range(24)]
    four, nine = ([s.id for s in draw("refcoco", n=n)] for n in (4, 9))
    assert len(four) == 4 and set(four) < set(nine) and nine == sorted(nine, key=whole.index) != whole[:9]
    assert [s.id for s in draw("refcoco", n=9)] == nine != [s.id for s in draw("refcoco", n=9, seed=1)]
    a, b = draw("refcoco", n=4), draw("refcoco", n=4)
    assert [s.fingerprint for s in a] == [s.fingerprint for s in b]


def test_asking_for_more_than_there_is_says_how_much_there_is(shelf):
    refcoco(shelf, two_a_picture())
    with pytest.raises(ValueError, match=r"n=25: refcoco all has 24.*n=None"):
        draw("refcoco", n=25)
    with pytest.raises(ValueError, match=r"n=6: refcoco detect has 5.*held_out"):
        draw("refcoco", "detect", n=6, held_out=5)
    for count in (24, 0, -1):
        with pytest.raises(ValueError, match=rf"held_out={count}: of the 24 rows.*1 to 23"):
            draw("refcoco", "test", held_out=count)
    with pytest.raises(ValueError, match="Did you mean 'image'"):
        draw("refcoco", "test", split_by="images")
    with pytest.raises(ValueError, match="Did you mean 'held_out'"):
        draw("refcoco", "test", heldout=3)


def test_a_test_split_without_pictures_of_its_own_is_refused(shelf):
    refcoco(shelf, two_a_picture(range(2)) * 3)
    with pytest.raises(ValueError, match="All pictures of refcoco.*smaller held_out"):
        draw("refcoco", "test", held_out=11)


def test_official_splits_are_used_whole(shelf):
    rows = {split: [fixtures.kangheng_row(n, 0) for n in range(k)] for split, k in (("val", 3), ("test", 5))}
    fixtures.write(shelf, "Kangheng/refcocog", rows, fixtures.KANGHENG)
    assert BENCHMARKS["refcocog-umd"].splits == ("val", "test")
    assert [len(draw("refcocog-umd", split)) for split in ("val", "test")] == [3, 5]
    assert draw("refcocog-umd", "test")[4].id == "refcocog-umd-test-4"
    with pytest.raises(ValueError, match="held_out"):
        draw("refcocog-umd", "test", held_out=2)


# ---------------------------------------------------------------- expressions and pairs


def test_one_expression_or_all_or_one_at_random(shelf):
    rows = two_a_picture(range(6))
    refcoco(shelf, rows)
    first, every = draw("refcoco"), draw("refcoco", expression="all")
    assert [s.text for s in first] == [row["answer"][0] for row in rows]
    assert [s.text for s in every] == [text for row in rows for text in row["answer"]]
    assert [s.id for s in every[:4]] == ["refcoco-val-0", "refcoco-val-0-e1", "refcoco-val-0-e2", "refcoco-val-1"]
    assert all(s.box == named(first)[s.id.split("-e")[0]].box for s in every)
    assert every[0].image is every[1].image is not every[3].image, "one picture a row, not one an expression"
    drawn, other = draw("refcoco", expression="random"), draw("refcoco", expression="random", seed=1)
    assert [s.id.split("-e")[0] for s in drawn] == [s.id for s in first]
    assert all(named(every)[s.id].text == s.text for s in drawn), "an id is one expression, however it was chosen"
    assert len({s.id[-2:] for s in drawn if "-e" in s.id}) == 2 and [s.text for s in drawn] != [s.text for s in other]
    assert "expression=random" in drawn.origin and "expression" not in first.origin
    with pytest.raises(ValueError, match="Did you mean 'first'"):
        draw("refcoco", expression="firsts")


def test_all_expressions_of_a_row_fall_on_one_side(shelf):
    refcoco(shelf, two_a_picture())
    detect = draw("refcoco", "detect", held_out=4, expression="all")
    test = draw("refcoco", "test", held_out=4, expression="all", split_by="row")
    assert len(detect) == 12 and len(test) == 60
    assert not {s.id.split("-e")[0] for s in detect} & {s.id.split("-e")[0] for s in test}
    assert len(draw("refcoco", "detect", n=7, held_out=4, expression="all")) == 7, "n counts expressions"


def test_pairs_are_two_things_in_one_picture(shelf):
    refcoco(shelf, two_a_picture())
    for split in ("all", "test"):
        options = {"held_out": 4} if split == "test" else {}
        pairs = draw("refcoco", split, pairs=True, expression="all", **options)
        assert pairs.benchmark == "refcoco pairs" and len(pairs) % 2 == 0
        for a, b in zip(pairs[::2], pairs[1::2], strict=True):
            assert a.image_key == b.image_key and a.box.iou(b.box) < 0.5 and a.text != b.text
        assert len(pairs) == 2 * len(pairs.images)
        other = draw("refcoco", split, pairs=True, expression="all", seed=0 if split == "test" else 1, **options)
        assert ([s.id for s in other] == [s.id for s in pairs]) == (split == "test"), "the seed chooses the expressions"
    six = draw("refcoco", n=6, pairs=True)
    assert len(six) == 6 and len(six.images) == 3
    with pytest.raises(ValueError, match=r"n=26: refcoco all has 24"):
        draw("refcoco", n=26, pairs=True)


def test_two_sentences_about_one_thing_are_no_pair(shelf):
    refcoco(shelf, [fixtures.refcoco_row(n, 0, bbox=[8, 8, 40, 40 - t]) for n in range(4) for t in (0, 1)])
    with pytest.raises(ValueError, match="No picture of refcoco shows two things"):
        draw("refcoco", pairs=True)


def test_of_a_pair_both_are_lost_or_neither(shelf):
    rows = two_a_picture(range(3))
    rows[2]["answer"] = [" "]
    refcoco(shelf, rows)
    pairs = draw("refcoco", pairs=True)
    assert [s.id for s in pairs] == ["refcoco-val-0", "refcoco-val-1", "refcoco-val-4", "refcoco-val-5"]
    assert {lost.id: lost.reason for lost in pairs.lost} == {
        "refcoco-val-2": "no text", "refcoco-val-3": "the other one of its pair was lost",
    }  # fmt: skip


# ---------------------------------------------------------------- rows that cannot be used


def test_boxes_past_the_edge_are_clipped_and_counted(shelf):
    boxes = [[100, 80, 60.5, 40.9], [100, 80, 80, 60], [-4, -3, 50, 40], [0, 0, 161, 121]]
    refcoco(shelf, [fixtures.refcoco_row(n, 0, bbox=box) for n, box in enumerate(boxes)])
    samples = draw("refcoco")
    assert samples[0].box == near(Box(100, 80, 160.5, 120.9)), "a pixel past the edge is how annotators count"
    assert samples[1].box == Box(100, 80, 160, 120) and samples[2].box == Box(0, 0, 46, 37)
    assert samples[3].box == Box(0, 0, 161, 121) and samples.notes == {
        "boxes clipped to the picture": 2, "rows in the table, where 8811 were published": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"bbox": [10, 10, 0, 5]}, "a box without area in the picture"),
        ({"bbox": [200, 10, 20, 20]}, "a box without area in the picture"),
        ({"bbox": [10, 10, 20]}, "no box of four numbers"),
        ({"bbox": [10, 10, float("nan"), 20]}, "no box of four numbers"),
        ({"bbox": None}, "a row that is not as expected: TypeError"),
        ({"answer": []}, "no text"),
        ({"answer": None}, "no text"),
        ({"answer": ["  "]}, "no text"),
        ({"file_name": "elephant.jpg"}, "a file name without the number of a COCO picture"),
        ({"file_name": None}, "a file name without the number of a COCO picture"),
        ({"image": cell(b"<html>not found</html>")}, "a picture that cannot be read"),
        ({"image": cell(b"\xff\xd8\xff\xe0 half a head")}, "a picture that cannot be read"),
        ({"image": None}, "no picture"),
    ],
)
def test_a_broken_row_is_lost_with_its_reason_and_the_others_stay(shelf, broken, reason):
    rows = [fixtures.refcoco_row(n, 0) for n in range(5)]
    rows[2] |= broken
    refcoco(shelf, rows)
    samples = draw("refcoco")
    assert [s.id for s in samples] == [f"refcoco-val-{i}" for i in (0, 1, 3, 4)]
    assert [lost.id for lost in samples.lost] == ["refcoco-val-2"]
    assert samples.lost[0].reason.startswith(reason) and f"1 LOST: {reason}" in repr(samples)
    parts = [draw("refcoco", split, held_out=2) for split in ("detect", "test")]
    assert sum(map(len, parts)) == 4 and sum(len(part.lost) for part in parts) == 1, "lost in its split as well"
    assert [lost.id.split("-e")[0] for lost in draw("refcoco", expression="all").lost][:1] == ["refcoco-val-2"]


def test_broken_rows_are_not_taken_for_one_picture(shelf):
    rows = [fixtures.refcoco_row(n, 0, **({} if n % 2 else {"file_name": "elephant.jpg"})) for n in range(12)]
    refcoco(shelf, rows)
    detect, test = (draw("refcoco", split, held_out=6) for split in ("detect", "test"))
    assert len(detect.lost) + len(test.lost) == 6 and detect.lost and test.lost


def test_where_every_row_is_lost_the_first_reason_is_shown(shelf):
    refcoco(shelf, [fixtures.refcoco_row(n, 0, bbox=[0, 0, 0, 0]) for n in range(3)])
    with pytest.raises(ValueError, match="All 3 rows were lost; the first: a box without area"):
        draw("refcoco")


def test_a_picture_cut_short_says_which_when_it_is_needed(shelf):
    rows = [fixtures.refcoco_row(n, 0) for n in range(3)]
    rows[1]["image"] = cell(rows[1]["image"]["bytes"][:-300])
    refcoco(shelf, rows)
    samples = draw("refcoco")
    assert samples[1].image.size == fixtures.SIZE, "the head is whole"
    with pytest.raises(OSError, match=r"row 1 of lmms-lab/RefCOCO@local:\w+ val cannot be read.*fetch it anew"):
        samples[1].image.load_rgb()


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (np.zeros((120, 160), np.uint8), "an empty mask"),
        (np.full((60, 80), 255, np.uint8), "a mask of another size than its picture"),
        (b"no mask", "a mask that cannot be read"),
        (None, "no picture"),
    ],
)
def test_a_mask_that_says_nothing_is_lost(shelf, mask, reason):
    content = encoded(Image.fromarray(mask)) if isinstance(mask, np.ndarray) else mask
    rows = [fixtures.refspatial_row(0), fixtures.refspatial_row(1, mask=content and cell(content))]
    fixtures.write(shelf, "BAAI/RefSpatial-Bench", {"location": rows}, fixtures.REFSPATIAL)
    assert [lost.reason for lost in draw("refspatial").lost] == [reason]


def test_an_answer_beyond_the_options_is_lost(shelf):
    rows = [fixtures.cv_bench_row(n, answer=answer) for n, answer in enumerate(["(A)", "(E)", "", "AB", "(a)"])]
    fixtures.write(shelf, "nyu-visionx/CV-Bench", {"test": rows}, fixtures.CV_BENCH)
    samples = draw("cv-bench")
    assert len(samples) == 1 and {lost.reason for lost in samples.lost} == {"an answer that is none of the options"}


# ---------------------------------------------------------------- masks


def test_a_mask_is_the_outline_filled(shelf):
    """Against a rasteriser written apart from it: even-odd rule at pixel centres."""
    rng = np.random.default_rng(0)
    rows, outlines = [], []
    for n in range(6):
        angles = np.sort(rng.uniform(0, 2 * np.pi, 15))
        radii = rng.uniform(20, 45, 15)
        outlines.append(np.stack([80 + radii * np.cos(angles), 60 + radii * np.sin(angles)], 1).astype(np.float32))
        rows.append(fixtures.refcoco_row(n, 0, segmentation=outlines[-1].ravel().tolist()))
    refcoco(shelf, rows)
    for sample, outline in zip(draw("refcoco"), outlines, strict=True):
        y, x = np.mgrid[:120, :160] + 0.5
        inside = np.zeros((120, 160), bool)
        for (x0, y0), (x1, y1) in itertools.pairwise([*outline, outline[0]]):
            if y0 != y1:
                inside ^= ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
        iou = (sample.pixels & inside).sum() / (sample.pixels | inside).sum()
        assert iou > 0.95, iou
        assert sample.mask == encode_mask(outline.ravel().tolist(), fixtures.SIZE)


@pytest.mark.parametrize("outline", [[], None, [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [5, 5, 5, 5, 5, 5]])
def test_a_thing_without_an_outline_has_no_mask_and_is_counted(shelf, outline):
    refcoco(shelf, [fixtures.refcoco_row(0, 0), fixtures.refcoco_row(1, 0, segmentation=outline)])
    samples = draw("refcoco")
    assert samples[0].mask is not None and samples[1].mask is None
    assert samples.notes["without a mask: no outline in the table"] == 1


# ---------------------------------------------------------------- pictures that are fetched


class Web:
    """Answers `urlopen` from a dict; hosts that are not in it do not answer, pages that are not in it are 404."""

    def __init__(self, pages):
        self.pages, self.asked = pages, []
        self.hosts = {url.split("/")[2] for url in pages}

    def __call__(self, url, timeout):
        self.asked.append(url)
        time.sleep(0.02)  # so that two requests for one picture would meet
        if url.split("/")[2] not in self.hosts:
            raise urllib.error.URLError("no such host")
        if url not in self.pages:
            raise urllib.error.HTTPError(url, 404, "not found", None, None)
        answer = io.BytesIO(self.pages[url])
        html = self.pages[url].startswith(b"<")
        answer.headers = type("H", (), {"get_content_type": lambda _: "text/html" if html else "image/jpeg"})()
        return answer


@pytest.fixture
def web(monkeypatch):
    def open_web(pages):
        from huggingface_hub import constants

        made = Web(pages)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("urllib.request.urlopen", made)
        return made

    return open_web


COCO = "http://images.cocodataset.org"


def test_toloka_pictures_come_from_coco_when_their_own_address_is_dead(shelf, web):
    rows = [fixtures.toloka_row(n) for n in range(4)] + [fixtures.toloka_row(1, question="And which is blue?")]
    pages = {f"{COCO}/val2017/{1:012d}.jpg": picture(1), f"{COCO}/unlabeled2017/{2:012d}.jpg": picture(2)}
    made = web(pages | {f"{COCO}/train2017/{3:012d}.jpg": b"<html>moved</html>"})
    fixtures.write_toloka(shelf, rows, {f"{0:012d}.jpg": picture(0)})
    samples = draw("toloka")
    assert [s.id for s in samples] == [f"toloka-test_public-{i}" for i in (0, 1, 2, 4)]
    assert {lost.id: lost.reason for lost in samples.lost} == {
        "toloka-test_public-3": "no picture: no answer from images.cocodataset.org (404)"
    }
    assert "1 LOST: no picture: no answer from images.cocodataset.org (404)" in repr(samples)
    assert not any(f"{0:012d}" in url for url in made.asked), "a local COCO folder goes first"
    assert len(set(made.asked)) == len(made.asked), "a picture of two questions is fetched once"
    again = len(made.asked)
    assert len(draw("toloka", n=2)) >= 1 and not any(f"{1:012d}" in url for url in made.asked[again:]), "kept"


def test_only_drawn_pictures_are_fetched_and_losses_do_not_change_the_draw(shelf, web):
    fixtures.write_toloka(shelf, [fixtures.toloka_row(n) for n in NUMBERS], {})
    made = web({f"{COCO}/train2017/{n:012d}.jpg": picture(n) for n in NUMBERS if n % 2})
    some = draw("toloka", n=6)
    assert len(some) + len(some.lost) == 6 and some.lost
    assert {url.split("/")[-1] for url in made.asked} == {
        f"{int(s.id.split('-')[-1]):012d}.jpg" for s in [*some, *some.lost]
    }
    web({f"{COCO}/train2017/{n:012d}.jpg": picture(n) for n in NUMBERS})
    assert {s.id for s in draw("toloka", n=6)} == {s.id for s in [*some, *some.lost]}


def test_a_picture_of_another_size_is_not_the_one_that_was_annotated(shelf):
    fixtures.write_toloka(
        shelf, [fixtures.toloka_row(n) for n in range(3)],
        {f"{0:012d}.jpg": picture(0), f"{1:012d}.jpg": picture(1, (161, 120)), f"{2:012d}.jpg": b"no picture"},
    )  # fmt: skip
    samples = draw("toloka")
    assert [s.id for s in samples] == ["toloka-test_public-0"]
    reasons = [lost.reason for lost in samples.lost]
    assert reasons[0] == "a picture of another size than the table says"
    assert reasons[1].startswith("a picture that cannot be read, in ") and "delete it" in reasons[1]


def test_a_picture_of_another_checksum_is_not_used(shelf):
    import hashlib

    fixtures.write_toloka(
        shelf, [fixtures.toloka_row(n) for n in range(2)], {f"{n:012d}.jpg": picture(n) for n in range(2)}
    )
    lines = [f"{hashlib.sha256(picture(0)).hexdigest()}  imgs/{0:012d}.jpg", f"{'0' * 64} *imgs/{1:012d}.jpg"]
    (shelf / "data" / "local" / "toloka_images").mkdir()
    (shelf / "data" / "local" / "toloka_images" / "images.sha256").write_text("\n".join(lines))
    samples = draw("toloka")
    assert [s.id for s in samples] == ["toloka-test_public-0"] and samples.lost[0].reason.startswith(
        "no picture: not in"
    )


def test_offline_a_missing_picture_says_that_fetching_is_forbidden(shelf):
    fixtures.write_toloka(shelf, [fixtures.toloka_row(n) for n in range(2)], {f"{0:012d}.jpg": picture(0)})
    assert "HF_HUB_OFFLINE forbids" in draw("toloka").lost[0].reason


# ---------------------------------------------------------------- training tables

TRAINING = {"refcoco-train": "refcoco", "refcoco+-train": "refcocoplus", "refcocog-train": "refcocog"}


def trained(shelf, rows, pictures=NUMBERS, name="refcoco-train", **options) -> Samples:
    files = {f"COCO_train2014_{n:012d}.jpg": picture(n) for n in pictures}
    fixtures.write_jxu(shelf, TRAINING[name], rows, files)
    return draw(name, "train", **options)


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_row_is_a_thing_with_its_first_caption_and_a_picture_beside_the_table(shelf, name):
    row = fixtures.jxu_row(
        580957, 0, captions=["bowl behind the others can only see part ", "dish in top right corner"],
        file_name="COCO_train2014_000000580957_3.jpg", bbox=[20.5, 30.25, 60.0, 70.0],
        image_path="coco/train2014/COCO_train2014_000000580957.jpg",
    )  # fmt: skip
    (sample,) = trained(shelf, [row], [580957], name)
    assert facts(sample) == (
        f"{name}-train-0", "000000580957", "bowl behind the others can only see part", Box(20.5, 30.25, 60, 70), None,
        (), "", "locate",
    )  # fmt: skip
    assert (np.asarray(sample.image) == np.asarray(Image.open(io.BytesIO(picture(580957))))).all()
    assert sample.mask is None and f"jxu124/{TRAINING[name]}@local:" in draw(name, "train").origin


def test_the_box_of_a_training_row_is_where_its_thing_is(shelf):
    samples = trained(shelf, [fixtures.jxu_row(n, t) for n in NUMBERS for t in (0, 1)])
    assert [s.box for s in samples] == [Box(*box) for n in NUMBERS for _, _, box in fixtures.things(n)]
    assert "boxes clipped to the picture" not in samples.notes, "as x, y, width, height some would leave the picture"


def test_every_caption_of_a_training_row_can_be_had(shelf):
    rows = [fixtures.jxu_row(n, t) for n in range(6) for t in (0, 1)]
    every = trained(shelf, rows, expression="all")
    assert [s.text for s in every] == [text for row in rows for text in row["captions"]]
    assert [s.id for s in every[2:4]] == ["refcoco-train-train-0-e2", "refcoco-train-train-1"]
    assert "expression=all" in every.origin and every[0].image is every[2].image
    drawn = draw("refcoco-train", "train", expression="random")
    assert len(drawn) == 12 and {named(every)[s.id].text for s in drawn} == {s.text for s in drawn} != {
        row["captions"][0] for row in rows
    }
    pairs = draw("refcoco-train", "train", pairs=True)
    assert len(pairs) == 12 and len(pairs.images) == 6


def test_training_pictures_are_fetched_from_coco_once_and_only_those_that_were_drawn(shelf, web):
    fixtures.write_jxu(shelf, "refcoco", [fixtures.jxu_row(n, t) for n in NUMBERS for t in (0, 1)])
    address = f"{COCO}/train2014/COCO_train2014_{{:012d}}.jpg"
    made = web({address.format(n): picture(n) for n in NUMBERS})
    some = draw("refcoco-train", "train", n=5)
    assert len(some) == 5 and not some.lost
    assert sorted(made.asked) == sorted(address.format(int(key)) for key in some.images)
    place = shelf / "data" / "local" / "coco" / "train2014"
    assert {file.name for file in place.iterdir()} == {url.split("/")[-1] for url in made.asked}
    pairs = draw("refcoco-train", "train", n=4, pairs=True)
    assert len(set(made.asked)) == len(made.asked) == len(pairs.images | some.images), "what was fetched is kept"


def test_a_training_picture_that_cannot_be_had_is_lost_and_counted(shelf, web):
    rows = [fixtures.jxu_row(n, 0) for n in range(5)]
    samples = trained(shelf, rows, [0, 1, 2, 4])
    assert [lost.id for lost in samples.lost] == ["refcoco-train-train-3"] and len(samples) == 4
    assert "1 LOST: no picture: not in data/local, and HF_HUB_OFFLINE forbids to fetch it" in repr(samples)
    web({f"{COCO}/train2014/other.jpg": b""})
    (lost,) = draw("refcoco-train", "train").lost
    assert lost == real.Lost("refcoco-train-train-3", "no picture: no answer from images.cocodataset.org (404)")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"bbox": [20, 10, 20, 50]}, "a box without area in the picture"),
        ({"bbox": [60, 10, 20, 50]}, "a box without area in the picture"),
        ({"bbox": [161, 10, 200, 50]}, "a box without area in the picture"),
        ({"bbox": [10, 10, 20]}, "no box of four numbers"),
        ({"bbox": None}, "a row that is not as expected: TypeError"),
        ({"captions": []}, "no text"),
        ({"captions": None}, "no text"),
        ({"captions": [" "]}, "no text"),
        ({"image_path": "coco/train2014/elephant.jpg"}, "a file name without the number of a COCO picture"),
        ({"image_path": None}, "a file name without the number of a COCO picture"),
        ({"image_path": "COCO_train2014_000000000099.jpg"}, "no picture: not in data/local"),
    ],
)
def test_a_broken_training_row_is_lost_with_its_reason_and_the_others_stay(shelf, broken, reason):
    rows = [fixtures.jxu_row(n, 0) for n in range(4)]
    samples = trained(shelf, [*rows[:2], rows[2] | broken, rows[3]])
    assert [s.id for s in samples] == [f"refcoco-train-train-{i}" for i in (0, 1, 3)]
    assert [lost.id for lost in samples.lost] == ["refcoco-train-train-2"]
    assert samples.lost[0].reason.startswith(reason)


def test_a_training_box_past_the_edge_is_clipped_and_counted(shelf):
    samples = trained(shelf, [fixtures.jxu_row(0, 0, bbox=[100, 80, 180, 140]), fixtures.jxu_row(1, 0)])
    assert samples[0].box == Box(100, 80, 160, 120) and samples.notes["boxes clipped to the picture"] == 1


def test_a_training_table_gives_no_other_split_and_is_not_read_without_its_columns(shelf):
    for name, folder in TRAINING.items():
        trained(shelf, [fixtures.jxu_row(0, 0)], name=name)
        assert BENCHMARKS[name].splits == ("train",)
        for split in ("test", "detect"):
            with pytest.raises(ValueError, match=f"Unknown split '{split}'; there are 'train'"):
                draw(name, split)  # the table has a "test": it is testA
        with pytest.raises(ValueError, match="held_out"):
            draw(name, "train", held_out=2)
        with pytest.raises(ValueError, match=rf"jxu124/{folder} at local:\w+, split train, has 1 rows, not 42"):
            grounding(name, "train")
        for column in ("image_path", "captions", "bbox"):
            row = {k: v for k, v in fixtures.jxu_row(0, 0).items() if k != column}
            features = {k: v for k, v in fixtures.JXU.items() if k != column}
            fixtures.write(shelf, f"jxu124/{folder}", {"train": [row]}, fixtures.datasets.Features(features))
            with pytest.raises(ValueError, match=f"lacks the columns {column}; it has sent_ids, "):
                draw(name, "train")


def test_training_and_validation_rows_of_one_coco_picture_are_told_by_its_number(shelf):
    """Also where the picture looks different: another size, as some copies have it."""
    rows = [fixtures.jxu_row(n, t) for n in range(4) for t in (0, 1)]
    train = trained(shelf, rows)
    for name, folder in (("refcoco", "RefCOCO"), ("refcoco+", "RefCOCOplus"), ("refcocog", "RefCOCOg")):
        val = [fixtures.refcoco_row(n, 0, image=cell(picture(n + 50))) for n in (2, 3, 8)]
        refcoco(shelf, val, folder)
        tested = draw(name)
        assert train.images & tested.images == {f"{2:012d}", f"{3:012d}"}
        kept = apart(train, tested)
        assert kept.images == {f"{0:012d}", f"{1:012d}"} and len(kept) == 4
        assert kept.notes[f"left out: its picture served to find heads ({name}, compared by number)"] == 4


def test_the_plan_says_that_training_pictures_are_fetched(shelf):
    run = plan.Paper({"99_new": {"BENCHMARKS": list(TRAINING)}})
    assert {item.name: item.ids for item in run.items if item.kind == "dataset"} == {
        name: (f"jxu124/{folder}",) for name, folder in TRAINING.items()
    }
    words = plan.in_words(run, {}, None, 1000)
    for name in TRAINING:
        assert f"{name} needs pictures: fetched from COCO, one by one (13 GB if all of train2014 is kept in" in words


# ---------------------------------------------------------------- VAW-MCQ


def vaw(shelf, rows, pictures=NUMBERS):
    fixtures.write_vaw(shelf, rows, {f"{2370000 + n}.jpg": picture(n) for n in pictures})
    return draw("vaw-mcq")


def test_a_vaw_question_is_built_from_explicit_labels(shelf):
    row = fixtures.vaw_row(
        0, 0, object_name="tarp", positive_attributes=["blue", "striped"],
        negative_attributes=["red", "tan", "white", "plaid"], instance_bbox=[8.0, 8.0, 40.0, 40.5],
    )  # fmt: skip
    (sample,) = vaw(shelf, [row])
    assert sample.text.splitlines()[0] == "What color is the tarp?" and sample.kind == "color"
    assert sample.text.splitlines()[1:5] == [f"{a}. {c}" for a, c in zip("ABCD", sample.choices)]
    assert sample.text.splitlines()[5] == real.LETTER and sample.rule == "option" and sample.chance == 0.25
    assert (
        set(sample.choices) == {"blue", "red", "tan", "white"} and sample.choices["ABCD".index(sample.answer)] == "blue"
    )
    assert sample.box == Box(8, 8, 48, 48.5) and sample.image_key == "2370000" and sample.id == "vaw-mcq-test-0"


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, "color"),
        ({"positive_attributes": ["red", "blue"]}, None),  # which of the two?
        ({"negative_attributes": ["red", "tan"]}, None),  # too few explicit negatives, whatever is unlabelled
        ({"positive_attributes": ["blue", "metal"],
          "negative_attributes": ["red", "wooden", "plastic", "brick"]}, "material"),
        ({"positive_attributes": ["light colored"]}, None),  # a tone is no colour
        ({"positive_attributes": ["blue", "blue"]}, "color"),  # said twice
        ({"negative_attributes": ["red", "red", "red", "tan"]}, None),
        ({"negative_attributes": ["blue", "red", "tan", "white"]}, "color"),  # a negative that is positive as well
        ({"negative_attributes": ["blue", "red", "tan"]}, None),
        ({"object_name": "parcel"}, None),  # the same name stands twice in its picture
        ({"positive_attributes": ["tiled", "gray", "light colored"], "object_name": "floor",
          "negative_attributes": ["multicolored", "maroon", "weathered", "speckled", "carpeted"]}, None),  # a real row
    ],
)  # fmt: skip
def test_a_thing_is_asked_about_only_if_the_answer_is_sure(shelf, changed, kind):
    plain = {"positive_attributes": ["blue"], "negative_attributes": ["red", "tan", "white", "gray", "metal"]}
    rows = [fixtures.vaw_row(0, 0, **plain | changed), fixtures.vaw_row(0, 1), fixtures.vaw_row(1, 0)]
    asked = named(vaw(shelf, rows))
    assert ("vaw-mcq-test-1" in asked) == (changed.get("object_name") != "parcel"), "of two with one name, neither"
    assert (asked["vaw-mcq-test-0"].kind if "vaw-mcq-test-0" in asked else None) == kind
    if kind:
        right = asked["vaw-mcq-test-0"].choices["ABCD".index(asked["vaw-mcq-test-0"].answer)]
        wrong = set(asked["vaw-mcq-test-0"].choices) - {right}
        assert right in rows[0]["positive_attributes"] and wrong <= set(rows[0]["negative_attributes"]) - {right}
        assert all(kind in [k for k, v in fixtures.ATTRIBUTE_TYPES.items() if c in v] for c in {right, *wrong})


def test_vaw_questions_are_the_same_on_every_machine_and_hide_the_answer(shelf):
    rows = [fixtures.vaw_row(n, t) for n in range(60) for t in (0, 1)]
    samples = vaw(shelf, rows, range(60))
    assert [facts(s) for s in samples] == [facts(s) for s in draw("vaw-mcq", seed=7)], "a seed draws, it does not build"
    turned = [row | {"negative_attributes": row["negative_attributes"][::-1]} for row in rows]
    assert [facts(s) for s in samples] == [facts(s) for s in vaw(shelf, turned, range(60))]
    assert samples[0].choices == ("blue", "purple", "red", "green") and samples[0].answer == "C", "pinned"
    places = [s.answer for s in samples]
    assert all(15 <= places.count(letter) <= 45 for letter in "ABCD"), "no place is the answer's"
    assert not draw("vaw-mcq", "detect").images & draw("vaw-mcq", "test").images


def test_vaw_files_are_fetched_at_a_pinned_commit_and_pictures_from_either_folder(shelf, web):
    fixtures.write_vaw(shelf, [fixtures.vaw_row(n, 0) for n in range(2)])
    files = {name: (shelf / "data/local/vaw_dataset/data" / name) for name in ("test.json", "attribute_types.json")}
    commit = BENCHMARKS["vaw-mcq"].about.revision
    base = f"https://raw.githubusercontent.com/adobe-research/vaw_dataset/{commit}/data"
    pages = {f"{base}/{name}": file.read_bytes() for name, file in files.items()}
    genome = "https://cs.stanford.edu/people/rak248"
    pages |= {f"{genome}/VG_100K/2370000.jpg": picture(0), f"{genome}/VG_100K_2/2370001.jpg": picture(1)}
    for file in files.values():
        file.unlink()
    with pytest.raises(OSError, match=r"VAW's test.json cannot be had.*Clone github.com/adobe-research/vaw_dataset to"):
        draw("vaw-mcq")
    made = web(pages)
    assert len(draw("vaw-mcq")) == 2 and files["test.json"].exists() and len(made.asked) == 5
    assert commit[:12] in draw("vaw-mcq").origin and len(made.asked) == 5, "everything is kept"
    files["test.json"].write_text('[{"image_id": ')
    with pytest.raises(ValueError, match=r"test.json is not JSON.*Delete it"):
        draw("vaw-mcq")


def test_vaw_instances_are_counted_and_their_columns_checked(shelf):
    fixtures.write_vaw(shelf, [fixtures.vaw_row(0, 0)])
    with pytest.raises(ValueError, match="has 1 rows, not 31819 as published"):
        answering("vaw-mcq", "all")
    fixtures.write_vaw(shelf, [{k: v for k, v in fixtures.vaw_row(0, 0).items() if k != "negative_attributes"}])
    with pytest.raises(ValueError, match="lacks the columns negative_attributes"):
        draw("vaw-mcq")


# ---------------------------------------------------------------- SpatialRGPT-Bench


def rgpt(shelf, rows, features=fixtures.SPATIALRGPT, **options):
    fixtures.write(shelf, "a8cheng/SpatialRGPT-Bench", {"val": rows}, features)
    return draw("spatialrgpt", **options)


def test_sizes_are_the_default_and_all_lengths_an_option(shelf):
    kinds = ["width_data", "height_data", "distance_data", "horizontal_distance_data", "vertical_distance_data"]
    rows = [fixtures.spatialrgpt_row(n, kind) for n, kind in enumerate([*kinds, "direction", "tall_choice"])]
    assert [s.kind for s in rgpt(shelf, rows)] == ["width", "height"]
    every = draw("spatialrgpt", subset="quantitative")
    assert [s.kind for s in every] == ["width", "height", "distance", "horizontal_distance", "vertical_distance"]
    assert "subset=quantitative" in every.origin and every[2].box == fixtures.things(2)[0][2]
    with pytest.raises(ValueError, match="'size', 'quantitative'"):
        draw("spatialrgpt", subset="all")


def test_nested_cells_are_read_as_cells_or_as_their_text(shelf):
    text = rgpt(shelf, [fixtures.spatialrgpt_row(3)])
    nested = rgpt(shelf, [fixtures.spatialrgpt_row(3, nested=True)], fixtures.SPATIALRGPT_NESTED)
    assert [facts(s) for s in text] == [facts(s) for s in nested]
    assert text[0].text == f"How wide is Region [0]?\n{real.DRAWN}\n{real.LENGTH}" and text[0].rule == "length"


def label(text: str, colour: str, size: int) -> np.ndarray:
    """White letters on a colour, as large as they are."""
    font = ImageFont.load_default(size=size)
    left, top, right, low = font.getbbox(text)
    image = Image.new("RGB", (int(right), int(low - top)), colour)
    ImageDraw.Draw(image).text((0, -top), text, fill="white", font=font)
    return np.asarray(image)


def stands_in(small: np.ndarray, image: np.ndarray) -> list[tuple[int, int]]:
    """Every (x, y) where the small picture stands in the other one, to the pixel."""
    height, width = small.shape[:2]
    down, right = np.unravel_index(small.sum(2).argmax(), (height, width))  # a white pixel: there are few
    found = np.argwhere((image == small[down, right]).all(2)) - (down, right)
    return [(int(x), int(y)) for y, x in found if np.array_equal(image[y : y + height, x : x + width], small)]


def test_each_region_is_drawn_with_the_number_that_the_text_gives_it(shelf):
    sample = rgpt(shelf, [fixtures.spatialrgpt_row(0, "distance_data")], subset="quantitative")[0]
    plain, drawn = (np.asarray(i, int) for i in (Image.open(io.BytesIO(picture(0, kind="PNG"))), sample.image))
    assert drawn.shape == plain.shape and sample.image.size == fixtures.SIZE
    boxes = [box for _, _, box in fixtures.things(0)]
    for i, (x0, y0, x1, y1) in enumerate(boxes):
        colour = np.array([int(real.REGION_COLOURS[i][k : k + 2], 16) for k in (1, 3, 5)])
        left = drawn[y0 + 3 : y1 - 3, x0], drawn[y0 + 3 : y1 - 3, x1]
        assert all((edge == colour).all() for edge in left)
        written = label(f"[{i}]", real.REGION_COLOURS[i], 14)
        assert stands_in(written, drawn) == [(x0, max(0, y0 - len(written)))]
        assert (drawn[y0 + 10 : y1 - 10, x0 + 8 : x1 - 8] == plain[y0 + 10 : y1 - 10, x0 + 8 : x1 - 8]).all()
    assert sample.box == boxes[0], "the first region in the text"


@pytest.mark.parametrize("size", [(64, 48), (640, 480), (2000, 1500)])
def test_numbers_can_be_read_at_any_size(size):
    plain = Image.new("RGB", size, "#808080")
    box = Box(size[0] * 0.4, size[1] * 0.4, size[0] * 0.8, size[1] * 0.8)
    zero, one = (np.asarray(real.draw_regions(plain, boxes), int) for boxes in ([box], [box, box]))
    rows, cols = np.nonzero((zero != 128).any(2)[: int(box.y0)])
    height, width = np.ptp(rows) + 1, np.ptp(cols) + 1
    assert height >= max(9, min(size) / 40) and width >= max(9, min(size) / 40), "the label above the frame"
    assert (np.asarray(plain) == 128).all() and (zero[0] == 128).all(), "a copy is drawn on"
    letters = max(14, round(min(size) / 24))
    for i in (0, 1):
        assert stands_in(label(f"[{i}]", real.REGION_COLOURS[i], letters), one.astype(np.uint8)), "both are seen"


def test_labels_stay_in_the_picture_and_apart():
    picture_size = (300, 200)
    boxes = [Box(0, 0, 120, 90), Box(0, 0, 125, 95), Box(250, 150, 301, 200.5), Box(0, 0, 300, 200)]
    image = np.asarray(real.draw_regions(Image.new("RGB", picture_size, "black"), boxes), int)
    colours = [[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in real.REGION_COLOURS]
    areas = [(image == colour).all(2).sum() for colour in colours[: len(boxes)]]
    assert all(area > 80 for area in areas), "every label is seen"


def test_regions_can_be_told_in_the_text_instead(shelf):
    sample = rgpt(shelf, [fixtures.spatialrgpt_row(0, "distance_data")], subset="quantitative", regions="text")[0]
    (a, b) = (box for _, _, box in fixtures.things(0))
    assert sample.text.splitlines()[1:3] == [
        f"Region [{i}] is the box from ({x0}, {y0}) to ({x1}, {y1}) in pixels; the picture is 160 x 120."
        for i, (x0, y0, x1, y1) in enumerate((a, b))
    ]
    assert (np.asarray(sample.image) == np.asarray(Image.open(io.BytesIO(picture(0, kind="PNG"))))).all()
    assert (
        real.DRAWN not in sample.text
        and sample.fingerprint != draw("spatialrgpt", subset="quantitative")[0].fingerprint
    )


def test_the_region_asked_about_keeps_its_number(shelf):
    boxes = [[10, 10, 40, 40], [50, 20, 90, 70], [-5, 100, 400, 300]]
    rows = [
        fixtures.spatialrgpt_row(0, bbox=boxes, text_q="How wide is Region [1]?"),
        fixtures.spatialrgpt_row(1, bbox=boxes, text_q="How wide is Region [2]?"),
        fixtures.spatialrgpt_row(2, bbox=boxes, text_q="How wide is Region [3]?"),
        fixtures.spatialrgpt_row(3, bbox=boxes, text_q="How wide is it?"),
        fixtures.spatialrgpt_row(4, conversations=[{"value": ""}, {"value": "It is wide."}]),
    ]
    samples = rgpt(shelf, rows)
    assert [s.box for s in samples] == [Box(50, 20, 90, 70), Box(0, 100, 160, 120)]
    assert samples.notes["boxes clipped to the picture"] >= 2
    assert [lost.reason for lost in samples.lost] == [
        "a question about a region that is not given", "a question about a region that is not given",
        "no length in the answer",
    ]  # fmt: skip


# ---------------------------------------------------------------- the table as a whole


def test_another_number_of_rows_is_refused_or_noted(shelf, monkeypatch):
    refcoco(shelf, two_a_picture(range(4)))
    with pytest.raises(
        ValueError, match=r"lmms-lab/RefCOCO at local:\w+, split val, has 8 rows, not 8811 as published"
    ):
        grounding("refcoco", "all")
    assert "8 rows in the table, where 8811 were published" in repr(grounding("refcoco", "all", allow_drift=True))
    monkeypatch.setenv("VRHLIB_ALLOW_DRIFT", "1")
    assert grounding("refcoco", "all").notes == {"rows in the table, where 8811 were published": 8}
    monkeypatch.setenv("VRHLIB_ALLOW_DRIFT", "0")
    with pytest.raises(ValueError, match="as published"):
        grounding("refcoco", "all")


def test_the_published_number_of_rows_carries_no_note(shelf):
    refcoco(shelf, two_a_picture(range(4)))
    table = real._TABLES["refcoco"]
    eight = dataclasses.replace(table, about=dataclasses.replace(table.about, rows=8))
    samples = real._draw("refcoco", eight, "all", None, 0)
    assert samples.notes == {} and len(samples) == 8


def test_samples_hold_no_pixels(shelf):
    noise = np.random.default_rng(0).integers(0, 255, (30, 480, 640, 3), np.uint8)
    rows = [fixtures.refcoco_row(n, 0, image=cell(encoded(Image.fromarray(p), "JPEG"))) for n, p in enumerate(noise)]
    stored = sum(len(row["image"]["bytes"]) for row in rows)
    refcoco(shelf, rows)
    draw("refcoco")  # imports
    tracemalloc.start()
    samples = draw("refcoco")
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert stored > 5e6 and held < stored / 10, (held, stored)
    assert np.asarray(samples[7].image).shape == (480, 640, 3)


def test_every_picture_is_the_one_of_its_row(shelf):
    refcoco(shelf, two_a_picture())
    for sample in draw("refcoco", "test", n=6, held_out=4):
        number = int(sample.id.split("-")[-1]) // 2
        assert (np.asarray(sample.image) == np.asarray(Image.open(io.BytesIO(picture(number))))).all()


def test_transparent_pictures_are_put_on_white(shelf):
    image = Image.new("RGBA", (160, 120), (0, 0, 0, 0))
    fixtures.write(
        shelf, "vikhyatk/CountBenchQA", {"test": [fixtures.countbench_row(0, image=cell(encoded(image)))]},
        fixtures.COUNTBENCH,
    )  # fmt: skip
    assert (np.asarray(draw("countbenchqa")[0].image) == 255).all()


def test_every_benchmark_opens_from_the_copies_that_a_script_writes(shelf, monkeypatch):
    fixtures.write_all(shelf, 10)
    monkeypatch.setenv("VRHLIB_ALLOW_DRIFT", "1")
    for name, benchmark in BENCHMARKS.items():
        for split in benchmark.splits:
            ask = grounding if benchmark.family == "grounding" else answering
            samples = ask(name, split, 2)
            assert len(samples) == 2 and not samples.lost and samples.origin, (name, split, samples)
            assert all(s.text and s.image.size == fixtures.SIZE for s in samples)
            if benchmark.family == "questions":
                assert all(s.task == "answer" and s.answer for s in samples)
                assert all(judge(s.answer, s.answer, s.rule, s.choices) == "correct" for s in samples if s.choices)
            else:
                assert all(s.box is not None or s.task == "point" for s in samples)
    assert len(grounding("refcoco", "all").images) >= 8


def test_each_row_of_the_table_says_what_it_is():
    assert len({b.like for b in BENCHMARKS.values()}) == len(BENCHMARKS) == 19
    for name, benchmark in BENCHMARKS.items():
        about = benchmark.about
        assert benchmark.name == name and benchmark.profile == "paper" and "allow_drift" in benchmark.options
        assert about.licence and about.metric and about.gb > 0 and (about.ids or about.needs), name
        assert about.revision is None or len(about.revision) == 40, name
        assert ("held_out" in benchmark.options) == (benchmark.splits == ("all", "detect", "test"))
    published = {name: b.about.rows for name, b in BENCHMARKS.items()}
    assert published | {"vaw-mcq": 0} == {
        "refcoco": 8811, "refcoco+": 3805, "refcocog": 7573, "refcoco-unc": 10834, "refcoco+-unc": 10758,
        "refcocog-umd": 4896, "refcoco-train": 42404, "refcoco+-train": 42278, "refcocog-train": 42226,
        "refspatial": 100, "refspatial-points": 100, "toloka": 1705, "vaw-mcq": 0, "spatial457": 670,
        "spatialrgpt": 1406, "cv-bench": 2638, "mmstar": 1500, "countbenchqa": 491, "mathvista": 1000,
    }  # fmt: skip


def test_every_split_has_a_published_number_of_its_own(shelf):
    fixtures.write_all(shelf, 10)
    wanted = {
        "refcoco-unc": {"val": 10834, "testA": 5657, "testB": 5095},
        "refcoco+-unc": {"val": 10758, "testA": 5726, "testB": 4889},
        "refcocog-umd": {"val": 4896, "test": 9602},
        "refcoco-train": {"train": 42404}, "refcoco+-train": {"train": 42278}, "refcocog-train": {"train": 42226},
        "refspatial-points": {"location": 100, "placement": 100, "unseen": 77},
    }  # fmt: skip
    for name, splits in wanted.items():
        for split, rows in splits.items():
            with pytest.raises(ValueError, match=rf"split {split}, has \d+ rows, not {rows} as published"):
                grounding(name, split)


def test_the_list_of_benchmarks_needs_neither_torch_nor_datasets():
    code = "import sys, vrhlib.real; print({'torch', 'datasets', 'transformers', 'pycocotools'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_a_table_without_a_row_of_what_was_asked_says_so(shelf):
    fixtures.write(shelf, "AI4Math/MathVista", {"testmini": [fixtures.mathvista_row(0, False)]}, fixtures.MATHVISTA)
    with pytest.raises(ValueError, match=r"None of the 1 rows of AI4Math.*testmini.*subset=multi_choice"):
        draw("mathvista")


# ---------------------------------------------------------------- asked of a model


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    root = tmp_path_factory.mktemp("filled")
    fixtures.write_all(root, 16)
    return root


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_asked_of_a_model(name, filled, tmp_path, monkeypatch, tiny_models):
    fixtures.isolate(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(store, "ROOT", filled)
    vlm = copy.copy(tiny_models["qwen3-vl"])
    vlm.max_new_tokens, row = 4, BENCHMARKS[name]
    samples = draw(name, row.splits[0], 3)
    samples.max_new_tokens = samples.max_new_tokens and 4  # Spatial457 reasons at length
    frame = evaluate.replies(vlm, samples, {evaluate.UNMASKED: None}, batch_size=2)
    table = evaluate.accuracy_table(frame)
    assert table.n.item() == 3 and set(frame.task) == {samples[0].task}
    assert frame.outcome.isin([column for column in table.columns] + ["correct"]).all()
    right = evaluate.accuracy_table(frame.assign(outcome="correct"))
    assert right.accuracy.item() == 100
    if name == "refcoco":
        by_box, by_mask = (score_samples(vlm, samples, evidence=[e]).theta("output", "sum", e) for e in ("any", "mask"))
        assert by_box.shape == by_mask.shape and (by_box >= by_mask - 1e-6).all(), "a thing's outline lies in its box"
    if row.weights:
        assert set(row.weights) >= set(frame.kind)
