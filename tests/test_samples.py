"""Samples: splits that share no picture, boxes that lie in it, and errors that name the nearest word."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from PIL import Image

from vrhlib.benchmarks import answering, grounding
from vrhlib.boxes import Box, TokenGrid
from vrhlib.nano import scenes
from vrhlib.nano.benchmarks import BENCHMARKS
from vrhlib.samples import Lost, Sample, Samples, joined

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


KINDS = {"scenes": {"attribute": 0.6, "position": 0.4}, "scenes-plus": {"attribute": 0.6, "size": 0.4},
         "scenes-g": {"long": 1}, "scenes-spatial": {"relation": 0.5, "position": 0.5},
         "scenes-question": {"question": 1}, "scenes-cv": {"relation": 0.5, "count": 0.5}}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kinds_occur_about_as_often_as_the_benchmark_says(name):
    load = grounding if BENCHMARKS[name].family == "grounding" else answering
    kinds = [s.kind for s in load(name, "test", 600)]
    assert set(kinds) == set(KINDS[name])
    for kind, share in KINDS[name].items():
        assert kinds.count(kind) / 600 == pytest.approx(share, abs=0.12)  # among what a scene offers


# ---------------------------------------------------------------- the other benchmarks


GROUNDING = [b.name for b in BENCHMARKS.values() if b.family == "grounding"]
ANSWERING = [b.name for b in BENCHMARKS.values() if b.family != "grounding"]
PLACE = set("leftmost rightmost topmost lowest left right above below".split())


def test_there_are_five_grounding_seven_question_and_three_text_benchmarks_each_with_its_counterpart():
    families = [b.family for b in BENCHMARKS.values() if b.profile == "nano"]
    assert [families.count(f) for f in ("grounding", "questions", "text")] == [5, 7, 3]
    assert all(b.like for b in BENCHMARKS.values()) and len({b.like for b in BENCHMARKS.values()}) == len(BENCHMARKS)


@pytest.mark.parametrize("name", [*GROUNDING, *ANSWERING])
def test_every_benchmark_is_seeded_disjoint_by_picture_and_whole(name):
    load = grounding if name in GROUNDING else answering
    parts = {split: load(name, split, 60) for split in ("detect", "test", "dev")}
    for a, b in itertools.combinations(parts.values(), 2):
        a.disjoint(b)
    assert [s.fingerprint for s in load(name, "test", 60)] == [s.fingerprint for s in parts["test"]]
    for s in parts["test"]:
        assert 0 < s.chance < 1 and s.kind
        assert (s.answer is None) == (name in GROUNDING) and (s.image is None) == (name == "needle")
        assert s.answer is None or not s.choices or s.answer in s.choices


def test_plus_has_no_word_of_place_and_long_expressions_are_long():
    assert not any(PLACE & set(s.text.split()) for s in grounding("scenes-plus", "test", 300))
    words = [len(s.text.split()) for s in grounding("scenes-g", "test", 200)]
    assert min(words) >= 9 > np.mean([len(s.text.split()) for s in grounding("scenes", "test", 200)])


def test_spatial_expressions_stand_among_at_least_three_things_that_fit_the_noun():
    for s in grounding("scenes-spatial", "test", 200):
        assert PLACE & set(s.text.split()) and s.mask is not None and s.mask.any()
        i = int(s.id.rsplit("-", 1)[1])
        world = next(w for again in range(50) if (w := _scene_of(i, again)).image_key == s.image_key)
        noun = s.text.removeprefix("the ").split()
        noun = noun[1:] if noun[0] in PLACE else noun[: next(j for j, w in enumerate(noun) if w in PLACE)]
        *colour, head = noun
        fits = [t for t in world.things if head in (t.shape, "shape") and (not colour or t.colour == colour[0])]
        assert len(fits) >= 3, s.text


def _scene_of(i, again):
    key = (scenes.SPLITS["test"], 0, i, again)[: 4 if again else 3]
    return scenes.scene(key, int(np.random.default_rng((*key, 2)).integers(4, 9)))


def test_questions_about_objects_are_answered_with_a_box():
    drawn = grounding("scenes-question", "test", 100)
    assert all(s.task == "question" and s.text.startswith("Which ") and s.text.endswith("?") for s in drawn)
    assert all(s.task == "locate" for s in grounding("scenes", "test", 20))


def test_no_question_gives_its_answer_away():
    """The answer's word stands in the question only where the question lists its choices."""
    for name in ("scenes-attribute", "scenes-count", "scenes-math", "rendered-words", "rendered-list"):
        for s in answering(name, "test", 200):
            named = re.split(" left of | right of | above | below ", s.text)[0]  # a landmark is another thing
            assert s.answer not in named.replace("?", "").split(), s.text


def test_chance_is_what_a_guesser_gets_who_counts_the_choices_in_the_question_or_the_picture():
    """Choices are counted here from the words of the question, or from the world, not from the sample."""
    fields = {"colour": 7, "shape": 6, "size": 2}
    for name in ("scenes-attribute", "scenes-single"):
        assert all(s.chance == pytest.approx(1 / fields[s.text.split()[1]]) for s in answering(name, "test", 100))
    for s in answering("scenes-mixed", "test", 200):
        listed = re.split(", | or ", s.text.removesuffix("?").rpartition(": ")[2].rpartition(" is ")[2])
        assert s.chance == pytest.approx(1 / len(listed)) and set(s.choices) == set(listed), s.text
    for s in answering("needle", "test", 100):
        assert s.chance == pytest.approx(1 / (s.context.count(",") + 1))
        said = s.context[slice(*s.span)]  # the fact that holds the answer, and the one thing that the question names
        assert said.split()[-1] == s.answer and s.text == f"What belongs to the {said.rpartition(' ')[0]}?"
    for name, draw in (("rendered-words", scenes.signs), ("rendered-list", scenes.document)):
        for i, s in enumerate(answering(name, "test", 50)):
            assert s.chance == pytest.approx(1 / len(draw((2, 0, i)).things))


def test_a_bystander_answers_with_what_most_things_have():
    rng, drawn = np.random.default_rng(0), answering("scenes-attribute", "test", 300)
    right = []
    for s in drawn:
        i = int(s.id.rsplit("-", 1)[1])
        world = next(w for again in range(50) if (w := _scene_of(i, again)).image_key == s.image_key)
        values = [getattr(t, s.text.split()[1]) for t in world.things]
        most = max(map(values.count, values))
        right.append(rng.choice(sorted({v for v in values if values.count(v) == most})) == s.answer)
    assert np.mean(right) == pytest.approx(np.mean([s.bystander for s in drawn]), abs=0.06)
    assert np.mean(right) > 0.45, "a reader that need not know which thing is meant is hard to beat: keep it in view"


def test_widths_come_from_both_sizes_in_turn():
    answers = [int(s.answer) for s in answering("scenes-width", "test", 60)]
    assert [a >= 20 for a in answers] == [bool(i % 2) for i in range(60)]


def test_counts_and_sums_are_those_of_the_picture():
    """Counted again from colours in the pixels, not from the scene's own list."""
    from scipy.ndimage import label

    seen = 0
    for s in answering("scenes-count", "test", 300):
        words = s.text.removeprefix("How many ").removesuffix(" are there?").split()
        if len(words) == 2 and words[1] == "shapes":
            picture = np.asarray(s.image).astype(int)
            colours = np.array(list(scenes.COLOURS.values()))
            nearest = np.abs(picture[..., None, :] - colours).sum(-1).argmin(-1)
            coloured = (picture.max(-1) - picture.min(-1) > 40) & (nearest == list(scenes.COLOURS).index(words[0]))
            regions, number = label(coloured, np.ones((3, 3)))
            sizes = np.bincount(regions.ravel())[1:]
            assert int((sizes > 30).sum()) == int(s.answer), s.text
            seen += 1
    assert seen > 30


def test_blind_samples_keep_the_question_and_lose_the_picture():
    drawn = answering("scenes-attribute", "test", 5)
    for a, b in zip(drawn, drawn.blind(), strict=True):
        assert (a.text, a.answer, a.id, a.image.size) == (b.text, b.answer, b.id, b.image.size)
        assert np.asarray(b.image).std() == 0 and a.fingerprint != b.fingerprint
    with pytest.raises(ValueError, match="no picture to take away"):
        answering("needle", "test", 2).blind()


def test_enlarged_samples_keep_the_referent():
    drawn = grounding("scenes", "test", 4)
    for a, b in zip(drawn, drawn.enlarged(2), strict=True):
        assert b.image.size == (256, 192) and b.box == Box(*(2 * v for v in a.box)) and b.text == a.text
        crop = np.asarray(b.image.crop(tuple(map(int, b.box)))).reshape(-1, 3).mean(0)
        assert np.abs(crop - np.asarray(a.image.crop(tuple(map(int, a.box)))).reshape(-1, 3).mean(0)).max() < 6


def test_a_benchmark_of_the_other_kind_is_refused():
    with pytest.raises(ValueError, match="needle is of the other kind: use answering"):
        grounding("needle", "test", 5)
    with pytest.raises(ValueError, match="mmstar is of the other kind: use answering"):
        grounding("mmstar", "all")
    with pytest.raises(ValueError, match="Unknown benchmark 'RefCoco'.*Did you mean 'refcoco'"):
        grounding("RefCoco", "test", 5)
    for n in ("5", 2.5, True):
        with pytest.raises(ValueError, match="not a whole number"):
            grounding("scenes", "test", n)
    with pytest.raises(ValueError, match="Unknown benchmark 'scenes-cvv'.*Did you mean 'scenes-cv'"):
        answering("scenes-cvv", "test", 5)


def test_a_box_without_a_picture_is_refused():
    with pytest.raises(ValueError, match="without an image"):
        Sample("a", None, "k", "what?", box=Box(0, 0, 1, 1), task="answer", answer="x")
    with pytest.raises(ValueError, match="no picture to enlarge"):
        answering("needle", "test", 2).enlarged(2)


def test_an_answer_without_its_task_is_refused():
    with pytest.raises(ValueError, match="task 'answer'"):
        sample(answer="red")
    with pytest.raises(ValueError, match="task 'answer'"):
        sample(task="answer")


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
    pairs = grounding("scenes", "test", 200, pairs=True)
    assert len(pairs) == 200 and len(pairs.images) == 100
    for a, b in zip(pairs[::2], pairs[1::2], strict=True):
        assert a.image_key == b.image_key and a.text != b.text and a.id != b.id
        assert a.box.iou(b.box) == 0 and not (a.mask & b.mask).any()
    assert not pairs.images & splits["detect"].images
    assert [s.fingerprint for s in grounding("scenes", "test", 20, pairs=True)] == [s.fingerprint for s in pairs[:20]]


def test_an_odd_number_of_paired_questions_is_refused():
    with pytest.raises(ValueError, match="even"):
        grounding("scenes", "test", 3, pairs=True)


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
    drawn = grounding("scenes", "test", 6, pairs=True)
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
    from vrhlib.nano import pack, train

    assert train.SPLITS is pack.SPLITS is scenes.SPLITS and len(set(scenes.SPLITS.values())) == len(scenes.SPLITS)
    assert "train" not in BENCHMARKS["scenes"].splits


def test_pictures_known_by_number_and_by_hash_cannot_be_told_apart():
    numbered = Samples("a", "test", [sample("a")])
    hashed = Samples("b", "test", [dataclasses.replace(sample("b"), image_key="bytes:0123")])
    with pytest.raises(ValueError, match="identify pictures in two ways"):
        numbered.disjoint(hashed)
    assert numbered.disjoint(hashed, by="row") is numbered


def test_another_right_answer_is_another_sample():
    """It decides which rows of a reply are scored, and what is teacher-forced."""
    red, blue = (
        Sample("a", None, "text", "What?", answer=word, task="answer", context="x") for word in ("red", "blue")
    )
    assert red.fingerprint != blue.fingerprint


def test_a_span_outside_its_context_is_refused():
    with pytest.raises(ValueError, match="no characters of its context"):
        Sample("a", None, "text", "What?", answer="x", task="answer", context="one two", span=(4, 9))


def test_joined_samples_keep_what_was_lost_and_noted():
    one = Samples("one", "train", [sample("a")], "hub one", [Lost("x", "gone")], {"left out": 2}, 40)
    two = Samples("two", "train", [sample("b"), sample("c")], "hub two", (), {"left out": 1, "clipped": 3}, 60)
    both = joined("both", [one, two])
    assert [s.id for s in both] == ["a", "b", "c"] and both.split == "train" and both.benchmark == "both"
    assert both.lost == one.lost and both.notes == {"left out": 3, "clipped": 3}
    assert both.origin == "hub one; hub two" and both.max_new_tokens == 60
    assert joined("x", [one, Samples("t", "train", [sample("b")])]).max_new_tokens is None, "the model's own limit"
    with pytest.raises(ValueError, match="join one split .* not test, train"):
        joined("both", [one, Samples("t", "test", [sample("b")])])
    with pytest.raises(ValueError, match="not none"):
        joined("both", [])
    with pytest.raises(ValueError, match="repeats the sample id 'a'"):
        joined("both", [one, one])
