"""Whether a stored reply is right, at the edges: which box, which point, and which outcomes there are."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vrhlib.boxes import Box, Reply
from vrhlib.outcomes import POSSIBLE, UNREADABLE, judged
from vrhlib.samples import Sample

PICTURE = Image.new("RGB", (40, 30))
REFERENT = Box(0, 0, 20, 10)


def saying(box: Box | None = None, failure: str = "", points=()) -> SimpleNamespace:
    """A model whose reader finds this in a reply."""
    return SimpleNamespace(read=lambda *_: Reply("told", box, failure or None), read_points=lambda *_: list(points))


def record(finished: bool = True, text: str = "told") -> dict:
    return {"text": text, "finished": finished, "resized": [40, 30]}


@pytest.mark.parametrize(
    ("box", "outcome"),
    [
        (REFERENT, "correct"),
        (Box(0, 0, 10, 10), "correct"),  # exactly half
        (Box(0, 0, 9.99, 10), "wrong box"),
        (Box(20, 10, 30, 20), "wrong box"),  # touches
    ],
)
def test_half_of_the_union_is_enough(box, outcome):
    found = judged(saying(box), Sample("a", PICTURE, "p", "it", REFERENT, kind="near"), record())
    assert found["outcome"] == outcome and found["iou"] == pytest.approx(box.iou(REFERENT))
    assert [found[c] for c in Box._fields] == list(box) and (found["id"], found["kind"]) == ("a", "near")


def test_a_reply_without_a_box_keeps_its_reason_and_has_no_corners():
    found = judged(saying(failure="malformed"), Sample("a", PICTURE, "p", "it", REFERENT), record())
    assert (found["outcome"], found["iou"]) == ("malformed", 0)
    assert np.isnan([found[c] for c in Box._fields]).all() and np.isnan(found["inside"])


def mask() -> np.ndarray:
    """True in the first two columns and in the last one."""
    found = np.zeros((30, 40), bool)
    found[:, [0, 1, -1]] = True
    return found


@pytest.mark.parametrize(
    ("points", "outcome", "inside"),
    [
        ([(1.99, 0)], "correct", 1),
        ([(2, 0)], "wrong point", 0),
        ([(39.9, 29.9)], "correct", 1),
        ([(40, 5)], "wrong point", 0),  # beside the picture, on its right
        ([(39, 30)], "wrong point", 0),  # below it
        ([(-0.5, 5)], "wrong point", 0),  # and on its left, where cutting off decimals would give column 0
        ([(-1, 5)], "wrong point", 0),  # which would be the last column
        ([(0, 0), (20, 0), (1, 1), (20, 1)], "correct", 0.5),  # the first decides, all are counted
        ([(20, 0), (0, 0)], "wrong point", 0.5),
        ([], "no point", 0),
    ],
)
def test_a_point_is_right_where_the_mask_is(points, outcome, inside):
    sample = Sample("a", PICTURE, "p", "there", mask=mask(), task="point")
    found = judged(saying(points=points), sample, record())
    assert (found["outcome"], found["inside"]) == (outcome, inside) and np.isnan(found["iou"])
    cut = judged(saying(points=points), sample, record(finished=False))["outcome"]
    assert cut == ("cut off" if not points else outcome)


def test_an_answer_in_words_needs_no_reader():
    sample = Sample("a", PICTURE, "p", "what?", task="answer", answer="red", choices=("red", "blue"))
    outcomes = [judged(None, sample, record(text=text))["outcome"] for text in ("red", "blue", "a cat")]
    assert outcomes == ["correct", "wrong answer", "no answer"]


def test_every_unreadable_outcome_is_possible_and_none_is_right():
    known = {outcome for possible in POSSIBLE.values() for outcome in possible}
    assert set(UNREADABLE) <= known - {"correct", "wrong box", "wrong point", "wrong answer", "degenerate"}
    assert all("correct" in possible for possible in POSSIBLE.values())
