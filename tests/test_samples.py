"""Samples: splits that share no picture, boxes that lie in it, and errors that name the nearest word."""

import dataclasses
import itertools

import numpy as np
import pytest
from PIL import Image

from vrhlib import samples
from vrhlib.boxes import Box, TokenGrid
from vrhlib.nano import scenes
from vrhlib.samples import Sample, Samples, grounding

SIZES = {"detect": 500, "test": 1500, "dev": 300}


@pytest.fixture(scope="module")
def splits():
    return {split: grounding("scenes", split, n) for split, n in SIZES.items()}


def sample(name="a", box=(10, 20, 30, 40), **facts):
    return Sample(
        id=name, image=Image.new("RGB", (128, 96)), image_key=f"key of {name}", text="the ring", box=Box(*box), **facts
    )


# ---------------------------------------------------------------- splits


def test_splits_share_no_picture(splits):
    for a, b in itertools.combinations(splits.values(), 2):
        assert not a.images & b.images
        assert a.disjoint(b) is a
    assert {split: len(s.images) for split, s in splits.items()} == SIZES


def test_training_scenes_share_no_picture_with_any_split(splits):
    trained = {scenes.scene((0, 0, i)).image_key for i in range(500)}
    assert not trained & set().union(*(s.images for s in splits.values()))


def test_seeds_of_a_split_share_no_picture():
    assert not grounding("scenes", "test", 100, seed=1).images & grounding("scenes", "test", 100, seed=2).images


def test_a_shared_picture_is_found_however_the_rows_differ(splits):
    detect, test = splits["detect"], splits["test"]
    leaked = Samples("scenes", "test", [*test[:5], dataclasses.replace(detect[7], id="other", text="the other one")])
    with pytest.raises(ValueError, match="1 images.*disjoint by image"):
        leaked.disjoint(detect)
    with pytest.raises(ValueError):
        detect.disjoint(leaked)
    with pytest.raises(ValueError, match="500 images"):
        detect.disjoint(detect)


def test_a_split_is_drawn_by_seed_and_a_shorter_one_is_its_beginning(splits):
    again = grounding("scenes", "test", 40)
    for a, b in zip(again, splits["test"][:40], strict=True):
        assert (a.id, a.image_key, a.text, a.box, a.fingerprint) == (b.id, b.image_key, b.text, b.box, b.fingerprint)
        assert (np.asarray(a.image) == np.asarray(b.image)).all()
    other = grounding("scenes", "test", 40, seed=1)
    assert not {s.id for s in other} & {s.id for s in again} and not other.images & again.images


def test_samples_are_whole_and_agree_with_their_picture(splits):
    for s in itertools.chain(*splits.values()):
        rows, cols = np.nonzero(s.mask)
        assert s.mask.shape == (96, 128) and s.image.size == (128, 96) and s.image.mode == "RGB"
        assert (cols.min(), rows.min(), cols.max() + 1, rows.max() + 1) == s.box
        assert s.text.startswith("the ") and s.kind in scenes.KINDS and s.answer is None and s.choices == ()
        assert all(isinstance(v, float) for v in s.box)


def test_scenes_of_a_benchmark_have_four_to_eight_things(splits):
    """Seen in the picture: no scene of a test split is rebuilt here, its coloured regions are counted."""
    from scipy.ndimage import label

    counts = set()
    for s in splits["test"][:300]:
        picture = np.asarray(s.image).astype(int)
        coloured = picture.max(-1) - picture.min(-1) > 40
        counts.add(label(coloured, np.ones((3, 3)))[1])
    assert counts == {4, 5, 6, 7, 8}


def test_all_kinds_occur_about_as_often_as_the_mix_says(splits):
    kinds = [s.kind for s in splits["test"]]
    assert sum(scenes.MIX.values()) == pytest.approx(1)
    for kind, share in scenes.MIX.items():
        assert kinds.count(kind) / 1500 == pytest.approx(share, abs=0.06)


def test_a_scene_that_can_say_nothing_costs_no_crash_and_no_sample(monkeypatch):
    """Four like things in a square have no referring expression; such a scene is rare, and drawn again."""
    alike = [scenes.Thing("circle", "red", "small", (x, y, x + 14, y + 14)) for x in (20, 60) for y in (20, 60)]
    mute = scenes.Scene(tuple(alike), (0,))
    draw, calls = scenes.scene, []

    def sometimes_mute(*words):
        calls.append(words)
        return mute if len(calls) == 2 else draw(*words)

    monkeypatch.setattr(scenes, "scene", sometimes_mute)
    drawn = grounding("scenes", "test", 3)
    assert len(drawn) == 3 and mute.image_key not in drawn.images


# ---------------------------------------------------------------- two questions on one picture


def test_pairs_ask_for_two_things_on_one_picture(splits):
    pairs = grounding("scene-pairs", "test", 200)
    assert len(pairs) == 200 and len(pairs.images) == 100
    for a, b in zip(pairs[::2], pairs[1::2], strict=True):
        assert a.image_key == b.image_key and a.text != b.text and a.id != b.id
        assert a.box.iou(b.box) == 0 and not (a.mask & b.mask).any()
    assert not pairs.images & splits["detect"].images
    assert [s.fingerprint for s in grounding("scene-pairs", "test", 20)] == [s.fingerprint for s in pairs[:20]]


def test_an_odd_number_of_paired_questions_is_refused():
    with pytest.raises(ValueError, match="even"):
        grounding("scene-pairs", "test", 3)


def test_a_scene_that_can_name_only_one_thing_costs_no_crash_and_no_pair(monkeypatch):
    """Of four like things and a ring at the very left, every expression names the ring."""
    rows = [("ring", (4, 40))] + [("circle", (x, y)) for x in (40, 80) for y in (20, 60)]
    lone = scenes.Scene(tuple(scenes.Thing(s, "red", "small", (x, y, x + 14, y + 14)) for s, (x, y) in rows), (0,))
    assert {e.referent for e in scenes.expressions(lone)} == {0}
    draw, calls = scenes.scene, []

    def sometimes_lone(*words):
        calls.append(words)
        return lone if len(calls) == 2 else draw(*words)

    monkeypatch.setattr(scenes, "scene", sometimes_lone)
    drawn = grounding("scene-pairs", "test", 6)
    assert len(drawn) == 6 and lone.image_key not in drawn.images


def test_chance_is_one_of_the_things_in_the_picture(splits):
    chances = {round(1 / s.chance, 9) for s in splits["test"]}
    assert chances == {4, 5, 6, 7, 8}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "box",
    [
        (-1, 0, 5, 5),
        (5, 5, 5, 9),
        (5, 5, 9, 5),
        (9, 9, 5, 5),
        (0, 0, 130, 96),
        (0, 0, 128, 98),
        (np.nan, 0, 5, 5),
        (0, 0, np.inf, 5),
        (0, 0, 0, 0),
    ],
)
def test_a_box_outside_its_picture_is_refused(box):
    with pytest.raises(ValueError, match="128 x 96"):
        sample(box=box)


def test_a_box_may_end_one_pixel_late_as_some_annotations_do():
    assert sample(box=(0, 0, 129, 97)).box.x1 == 129
    assert sample(box=(0, 0, 128, 96)).box == (0, 0, 128, 96)


@pytest.mark.parametrize("box", [(128, 0, 129, 10), (0, 96, 10, 97), (127.5, 95.5, 129, 97)])
def test_every_box_that_is_accepted_covers_a_token(box):
    try:
        accepted = sample(box=box)
    except ValueError:
        return  # refused at the door, which is as good
    assert TokenGrid.regular(6, 8, accepted.image.size).tokens_in(accepted.box).any()


@pytest.mark.parametrize("shape", [(128, 96), (48, 64), (96, 128, 1)])
def test_a_mask_of_another_shape_than_its_picture_is_refused(shape):
    with pytest.raises(ValueError, match="mask"):
        sample(mask=np.ones(shape, dtype=bool))


def test_an_unknown_benchmark_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="Unknown benchmark 'scene'.*Did you mean 'scenes'"):
        grounding("scene", "test", 5)
    with pytest.raises(ValueError, match="Unknown benchmark 'qqq'; there are 'scenes'"):
        grounding("qqq", "test", 5)


def test_an_unknown_split_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="Unknown split 'tets'.*'detect'.*Did you mean 'test'"):
        grounding("scenes", "tets", 5)


def test_training_scenes_are_no_benchmark():
    with pytest.raises(ValueError, match="Unknown split 'train'"):
        grounding("scenes", "train", 5)


@pytest.mark.parametrize("n", [0, -3])
def test_an_empty_benchmark_is_refused(n):
    with pytest.raises(ValueError, match="n >= 1"):
        grounding("scenes", "test", n)


def test_a_negative_seed_is_refused_in_plain_words():
    with pytest.raises(ValueError, match="seed"):
        grounding("scenes", "test", 2, seed=-1)


def test_two_samples_of_one_id_are_refused():
    with pytest.raises(ValueError, match="repeats"):
        Samples("scenes", "test", [sample("a"), sample("b"), sample("a")])


# ---------------------------------------------------------------- values


def test_slices_are_samples_and_items_are_single():
    drawn = grounding("scenes", "dev", 6)
    part = drawn[1:4]
    assert type(part) is Samples and (part.benchmark, part.split, len(part)) == ("scenes", "dev", 3)
    assert [s.id for s in part] == [s.id for s in drawn][1:4]
    assert drawn[-1] is list(drawn)[-1] and drawn[np.int64(2)] is drawn[2]
    assert [s.id for s in drawn[::-2]] == [s.id for s in drawn][::-2]
    assert repr(part) == "scenes dev: 3 expressions on 3 images"
    with pytest.raises(ValueError, match="empty"):
        drawn[6:]
    with pytest.raises(IndexError):
        drawn[6]


@pytest.mark.parametrize(
    "change", [{"text": "the cross"}, {"box": Box(10, 20, 30, 41)}, {"box": None}, {"image_key": "other"}, {"id": "b"}]
)
def test_a_fingerprint_changes_with_whatever_determines_the_reply(change):
    assert dataclasses.replace(sample(), **change).fingerprint != sample().fingerprint


def test_a_fingerprint_does_not_change_by_itself():
    assert sample().fingerprint == sample().fingerprint
    assert sample(box=(10, 20, 30, 40)).fingerprint == sample(box=(10.0, 20.0, 30.0, 40.0)).fingerprint


def test_the_model_was_trained_on_seeds_that_no_evaluated_split_uses():
    """Training and benchmarks read one table, so a split cannot come to mean two things."""
    from vrhlib.nano import train

    assert train.SPLITS is scenes.SPLITS and len(set(scenes.SPLITS.values())) == len(scenes.SPLITS)
    assert "train" not in samples.BENCHMARKS["scenes"].splits
