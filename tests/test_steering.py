"""Pointing: what stands in a picture, who is asked about what, how often the box follows, and the intervals of it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests import tiny
from vrhlib import grounding, steering
from vrhlib.attention import Steering
from vrhlib.boxes import Box, box_of_mask, decode_mask
from vrhlib.evaluate import replies
from vrhlib.heads import Head, HeadSet
from vrhlib.samples import Sample, Samples, Segment
from vrhlib.stats import Accuracy

pytestmark = pytest.mark.usefixtures("root")


def sample(name: str, box: Box, key: str = "one", **more) -> Sample:
    return Sample(name, Image.new("RGB", (100, 100)), key, f"the {name}", box, **more)


LEFT, RIGHT, LOW = Box(0, 0, 20, 20), Box(60, 0, 80, 20), Box(0, 70, 30, 100)


def test_segments_of_a_scene_are_its_things_with_their_masks():
    asked = grounding("scenes", "test", 6, pairs=True)
    known = steering.segments(asked)
    for s in asked:
        things = known[s.image_key]
        assert 4 <= len(things) <= 8 and len({t.name for t in things}) > 1
        assert [t for t in things if t.box == s.box], "the referent is one of them"
        for t in things:
            mask = decode_mask(t.mask)
            assert mask.shape == (96, 128) and tuple(box_of_mask(mask)) == tuple(t.box)
            colour = t.name.split()[1]
            inside = np.asarray(s.image)[mask].mean(0)
            assert {"red": 0, "green": 1, "blue": 2}.get(colour, inside.argmax()) == inside.argmax()


def test_without_segments_of_their_own_the_things_asked_for_are_the_segments():
    twice = sample("same again", LEFT._replace(x1=21.0))
    asked = Samples("b", "test", [sample("a", LEFT), sample("b", RIGHT), twice, sample("c", LOW, "two")])
    known = steering.segments(asked)
    assert [s.name for s in known["one"]] == ["the a", "the b"] and [s.box for s in known["two"]] == [LOW]


def test_every_sample_is_pointed_at_every_segment_of_its_picture():
    asked = Samples("b", "test", [sample("a", LEFT), sample("b", RIGHT), sample("c", LOW, "two")])
    points = steering.pointed(asked)
    assert [(s.text, s.box, s.kind) for s in points[:4]] == [
        ("the a", LEFT, "referent"), ("the a", RIGHT, "other"), ("the b", LEFT, "other"), ("the b", RIGHT, "referent"),
    ]  # fmt: skip
    assert len({s.id for s in points}) == len(points) == 5 and points.benchmark != asked.benchmark


def test_a_set_with_one_thing_a_picture_has_nothing_else_to_point_at():
    with pytest.raises(ValueError, match="pairs=True"):
        steering.pointed(Samples("b", "test", [sample("a", LEFT), sample("b", RIGHT, "two")]))


def test_one_picture_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="two or more"):
        steering.pointed(Samples("b", "test", [sample("a", LEFT), sample("b", RIGHT)]))


def test_the_mask_of_a_segment_is_in_the_run_key_of_a_sample():
    """Two segments may share a box and not a mask, and heads look at the mask."""
    full, half = np.ones((100, 100), bool), np.tri(100, dtype=bool)
    one, two = (sample("a", Box(0, 0, 100, 100), mask=m) for m in (full, half))
    assert one.fingerprint != two.fingerprint != sample("a", Box(0, 0, 100, 100)).fingerprint
    from vrhlib.boxes import encode_mask

    assert replace(two, mask=encode_mask(half, (100, 100))).fingerprint == two.fingerprint


def pointed_at(*things: Segment) -> Samples:
    """Two pictures of noise with these things in each."""
    return steering.pointed(Samples("noise", "test", [replace(s, segments=things) for s in tiny.samples()[:2]]))


def test_steered_replies_are_stored_and_differ_by_segment_and_phase(vlm):
    points = pointed_at(Segment("a", Box(0, 0, 30, 30)), Segment("b", Box(40, 30, 70, 60)))
    layer = HeadSet(tuple(Head(0, h) for h in range(8)), vlm.grid, "layer 0")
    answers = steering.steer(vlm, points, {"vrh": layer}, [8])
    assert (
        len(answers) == 2 * len(points) == 8
        and set(answers.condition) == {"unmasked", "vrh"}
        and set(answers.kind) == {"other"}
    )
    plain = answers[answers.condition == "unmasked"]
    assert (plain.groupby("image").text.nunique() == 1).all(), "the question is one and the same"
    again = steering.steer(vlm, points, {"vrh": layer}, [8], "all")
    keys = set(again.attrs["runs"]) & set(answers.attrs["runs"])
    assert len(keys) == 1, "only the unmasked run is shared by the two phases"
    by_hand = replies(vlm, points, {steering.Condition("vrh", 8): Steering(layer)})
    assert by_hand.attrs["runs"][0] in answers.attrs["runs"]


def test_controls_are_drawn_from_outside_the_heads_and_look_at_the_same_things(vlm):
    points = pointed_at(Segment("a", Box(0, 0, 30, 30)))
    heads = HeadSet(tuple(Head(0, h) for h in range(8)), vlm.grid, "layer 0")
    answers = steering.sweep(vlm, points, heads.top(4), [1, 2], 2, [0, 1])
    counted = answers.groupby(["phase", "condition", "k"]).seed.nunique().to_dict()
    controls = {(phase, c, 2): 2 for phase in ("decode", "all") for c in ("random", "layer_matched")}
    top = {("decode", "vrh", 1): 0, ("decode", "vrh", 2): 0, ("all", "vrh", 2): 0}
    assert counted == {("–", "unmasked", 0): 0} | controls | top
    assert not answers.duplicated(["id", "condition", "k", "seed", "phase"]).any()
    assert set(steering.success(answers).n) == {2}, "the model left alone is counted once"


def frame(outcomes: str, pictures: str, condition: str = "vrh", kind: str = "other") -> pd.DataFrame:
    """`x` hit, `-` astray, `=` where it was, `?` unreadable."""
    known = {"x": "correct", "-": "wrong box", "=": "wrong box", "?": "no box"}
    return pd.DataFrame({
        "model": "m", "benchmark": "b", "condition": condition, "k": 4, "seed": pd.NA, "kind": kind,
        "image": list(pictures), "outcome": [known[o] for o in outcomes], "centred": [o == "x" for o in outcomes],
        "stayed": [float(o == "=") for o in outcomes], "phase": "decode",
        "id": [str(i) for i in range(len(outcomes))],
    }).astype({"seed": "Int64"})  # fmt: skip


def test_the_rate_counts_hits_among_things_that_the_text_does_not_name():
    answers = pd.concat([frame("xx-=?", "aabbb"), frame("xxxx", "abab", kind="referent")])
    (row,) = steering.success(answers).to_dict("records")
    assert (
        row["stayed"] == 20
        and row["rate"] == row["centre"] == 40
        and row["n"] == 5
        and row["pictures"] == 2
        and row["unreadable"] == 20
    )
    (row,) = steering.success(answers, "referent").to_dict("records")
    assert row["rate"] == 100 and row["n"] == 4


def test_intervals_resample_pictures_not_segments():
    """Twelve pictures in which all four segments fare alike are twelve trials, not forty-eight."""
    alike = steering.success(frame("x" * 24 + "-" * 24, "".join(c * 4 for c in "abcdefghijkl"))).iloc[0]
    apart = steering.success(frame("x" * 24 + "-" * 24, "abcdefghijkl" * 4)).iloc[0]
    assert alike.rate == apart.rate == 50
    assert alike.high - alike.low > 40 and apart.high - apart.low < 15


@pytest.mark.parametrize(
    ("box", "inside"),
    [(Box(0, 0, 10, 10), True), (Box(0, 0, 40, 40), False), (Box(15, 15, 24, 24), True), (None, False)],
)
def test_a_box_is_centred_where_its_middle_lies_in_the_segment(box, inside):
    assert steering._centred(box, LEFT) is inside


@pytest.mark.parametrize(("outcomes", "rate"), [("--------", 0), ("xxxxxxxx", 100)])
def test_none_and_all_have_an_interval_of_as_many_trials_as_pictures(outcomes, rate):
    row = steering.success(frame(outcomes, "aabbccdd")).iloc[0]
    assert row.rate == rate and row.n == 8 and row.pictures == 4
    low, high = Accuracy(4 * rate // 100, 4).interval
    assert (row.low, row.high) == (low, high) and high - low > 40


def test_top_heads_are_compared_pair_by_pair_with_the_mean_of_the_draws():
    def drawn(
        outcomes: str, condition: str, seed: int | None = None, phase: str = "decode", k: int = 4
    ) -> pd.DataFrame:
        return frame(outcomes, "abcd", condition).assign(seed=seed, phase=phase, k=k).astype({"seed": "Int64"})

    answers = pd.concat([
        drawn("----", "unmasked", None, "–", 0), drawn("xxx-", "vrh"), drawn("x---", "random", 0),
        drawn("xx--", "random", 1), drawn("xxxx", "vrh", None, "decode", 2), drawn("xxxx", "random", 0, "all"),
        drawn("x---", "vrh", None, "all"), frame("xxxx", "abcd", kind="referent"),
    ])  # fmt: skip
    table = steering.compared(answers, {"m": 4}).set_index(["phase", "against"])
    assert sorted(table.index) == [("all", "random"), ("all", "unmasked"), ("decode", "random"), ("decode", "unmasked")]
    decode = table.loc[("decode", "random")]
    assert (decode.more, decode.draws, decode.n, decode.k) == (37.5, 2, 4, 4), "3 of 4, less the mean of 1 and 2 of 4"
    assert decode.low < 37.5 < decode.high and table.loc[("decode", "unmasked"), "more"] == 75
    assert table.loc[("all", "random"), "more"] == -75 and table.loc[("all", "unmasked"), "more"] == 25


def test_a_box_that_stays_is_told_from_one_that_goes_astray(vlm):
    first, second = tiny.samples()[:2]
    asked = [replace(s, segments=(Segment("it", s.box), Segment("b", Box(40, 30, 70, 60)))) for s in (first, second)]
    answers = steering.steer(vlm, steering.pointed(Samples("noise", "test", asked)), {}, [])
    assert answers.stayed.isin([0.0, 1.0]).all() and len(answers) == 4
    assert steering._stayed(Box(0, 0, 10, 10), Box(0, 0, 10, 12)) == 1 and steering._stayed(None, LEFT) == 0
    assert steering._stayed(Box(50, 50, 60, 60), LEFT) == 0 and np.isnan(steering._stayed(LEFT, None))


def test_a_sample_without_a_box_is_refused_in_words():
    with pytest.raises(ValueError, match="has no box"):
        steering.aimed(replace(sample("a", LEFT), box=None), Segment("b", RIGHT), "x")
