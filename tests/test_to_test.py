"""Where heads are cut and found: which split or rows of a benchmark, without the pictures that heads were found on."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from tests import real_fixtures as fixtures
from tests.real_fixtures import cell, encoded
from vrhlib import benchmarks
from vrhlib.benchmarks import ALIKE, apart, grounding, to_find, to_test, to_train
from vrhlib.boxes import Box
from vrhlib.samples import Lost, Sample, Samples

pytestmark = pytest.mark.usefixtures("root")


def view(number: int) -> Image.Image:
    """A picture of its own for every number, smooth as photographs are at a distance."""
    noise = np.random.default_rng([number, 77]).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(fixtures.SIZE, Image.Resampling.BICUBIC)


def encoded_anew(image: Image.Image, quality: int, size: tuple[int, int]) -> Image.Image:
    file = io.BytesIO()
    image.resize(size).save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def seen(name: str, key: str, image: Image.Image) -> Sample:
    return Sample(name, image, key, "the ring", Box(1, 1, 20, 20))


def shown(benchmark: str, pictures: dict[str, Image.Image], twice: bool = False) -> Samples:
    """A sample (or two) for every picture, by key."""
    items = [seen(f"{k}{half}", k, image) for k, image in pictures.items() for half in ("", "b")[: 1 + twice]]
    return Samples(benchmark, "all", items)


def left_out(samples: Samples) -> tuple[str, int]:
    """The note of `apart`: how pictures were compared, and how many samples were left out."""
    ((note, count),) = [(note, count) for note, count in samples.notes.items() if note.startswith("left out")]
    return note.rsplit("compared by ", 1)[1].removesuffix(")"), count


# ---------------------------------------------------------------- the same picture in another benchmark


def test_samples_of_a_picture_that_heads_were_found_on_are_left_out_and_counted():
    found_on = shown("one", {"1": view(1), "2": view(2), "3": view(3)})
    items = [*shown("other", {"2": view(8), "4": view(4), "3": view(9), "5": view(1)}, twice=True)]
    lost = [Lost("x", "no picture")]
    other = Samples("other", "test", items, "table@1", lost, {"boxes clipped to the picture": 2}, max_new_tokens=9)
    kept = apart(other, found_on)
    assert [s.id for s in kept] == ["4", "4b", "5", "5b"], "a number decides: 5 looks like picture 1, and 2 does not"
    assert kept.notes == {
        "boxes clipped to the picture": 2,
        "left out: its picture served to find heads (one, compared by number)": 4,
    }
    assert (kept.benchmark, kept.split, kept.origin, kept.lost) == ("other", "test", "table@1", tuple(lost))
    assert kept.max_new_tokens == 9 and kept.images == {"4", "5"} and not kept.images & found_on.images
    assert "4 left out: its picture served to find heads" in repr(kept)
    assert len(other) == 8 and len(other.notes) == 1, "what was given is as it was"


def test_it_is_noted_too_that_no_picture_had_to_be_left_out():
    found_on, other = shown("one", {"1": view(1)}), shown("other", {"2": view(1), "3": view(2)})
    kept = apart(other, found_on)
    assert left_out(kept) == ("number", 0) and [s.id for s in kept] == ["2", "3"]


def test_hashes_are_compared_with_hashes_and_not_by_pixels():
    found_on = shown("one", {"bytes:01": view(1), "bytes:02": view(2)})
    kept = apart(shown("other", {"bytes:03": view(1), "bytes:02": view(3)}), found_on)
    assert left_out(kept)[1] == 1 and kept.images == {"bytes:03"}


ANEW = [(30, (80, 60)), (60, (320, 240)), (75, (113, 90)), (95, fixtures.SIZE)]


@pytest.mark.parametrize("numbered", ["found_on", "samples"])
def test_a_picture_encoded_anew_is_found_by_what_it_shows(numbered):
    def key(number: int, kind: str) -> str:
        return f"{number:012d}" if kind == numbered else f"bytes:{number:04x}"

    found_on = shown("one", {key(i, "found_on"): view(i) for i in range(12)})
    again = {key(100 + i, "samples"): encoded_anew(view(i), *how) for i, how in enumerate(ANEW)}
    others = {key(200 + i, "samples"): encoded_anew(view(i), *ANEW[i % 4]) for i in range(20, 40)}
    upside_down = {key(300, "samples"): view(5).rotate(180)}
    kept = apart(shown("other", again | others | upside_down, twice=True), found_on)
    assert left_out(kept) == ("pixels", 2 * len(ANEW))
    assert [s.image_key for s in kept][::2] == [*others, *upside_down], "in the order that they came in"


def distances(pictures: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
    return np.array([[np.abs(a - b).mean() for b in others] for a in pictures])


def thumbnail(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L").resize((16, 16)), dtype=float)


def test_the_threshold_lies_far_from_pictures_encoded_anew_and_below_all_others():
    views = [view(i) for i in range(30)]
    plain = [thumbnail(v) for v in views]
    for how in ANEW:
        anew = np.diag(distances(plain, [thumbnail(encoded_anew(v, *how)) for v in views]))
        assert anew.max() < ALIKE / 2
    assert distances(plain, plain)[np.triu_indices(30, 1)].min() > 9 * ALIKE


def test_no_two_of_two_hundred_nano_scenes_are_taken_for_one():
    """They are more alike than photographs: one ground, a few things. (With thousands, some come below the threshold;
    nano benchmarks number their pictures alike and are never compared by pixels.)"""
    scenes = grounding("scenes", "test", 200)
    assert len(scenes.images) == 200
    small = [thumbnail(s.image) for s in scenes]
    nearest = distances(small, small)[np.triu_indices(200, 1)].min()
    assert 2 * ALIKE < nearest < 3 * ALIKE, f"{nearest:.1f}"
    hashed = Samples("copy", "test", [dataclasses.replace(s, image_key=f"bytes:{s.image_key}") for s in scenes[50:]])
    kept = apart(hashed, scenes[:100])
    assert [s.id for s in kept] == [s.id for s in scenes[100:]] and left_out(kept) == ("pixels", 50)


def test_nothing_left_is_an_error():
    pictures = {"1": view(1), "2": view(2)}
    with pytest.raises(ValueError, match="All 4 pictures of other all.*take more or others"):
        apart(shown("other", pictures, twice=True), shown("one", pictures))


# ---------------------------------------------------------------- nano: drawn without end, so a split is held out


def test_nano_heads_are_cut_on_the_test_split_of_every_benchmark():
    found_on = grounding("scenes", "detect", 10)
    for name in ("scenes", "scenes-plus", "scenes-question"):
        samples = to_test(name, found_on, 12, seed=1)
        assert (samples.benchmark, samples.split, len(samples)) == (name, "test", 12)
        assert [s.id for s in samples] == [s.id for s in grounding(name, "test", 12, seed=1)]
        assert left_out(samples) == ("number", 0) and samples.disjoint(found_on) is samples


def test_nano_heads_are_found_on_the_detect_split_of_every_benchmark():
    samples = to_find("scenes-plus", 7, seed=2)
    assert (samples.split, len(samples)) == ("detect", 7)
    assert [s.id for s in samples] == [s.id for s in grounding("scenes-plus", "detect", 7, seed=2)]


def test_a_nano_benchmark_has_no_all_of_its_samples():
    with pytest.raises(ValueError, match="Say how many samples"):
        to_test("scenes-plus", grounding("scenes", "detect", 2), None)


def test_names_are_looked_up_and_words_are_not_for_pointing():
    found_on = grounding("scenes", "detect", 2)
    draws = (lambda b: to_test(b, found_on, 5), lambda b: to_find(b, 5), lambda b: to_train(b, 5, [found_on]))
    for draw in draws:
        with pytest.raises(ValueError, match="Unknown benchmark 'scene-plus'.*Did you mean 'scenes-plus'"):
            draw("scene-plus")
    for draw in draws[1:]:
        with pytest.raises(ValueError, match="cv-bench is of the other kind: use answering"):
            draw("cv-bench")


def test_questions_are_tested_on_pictures_that_did_not_serve_to_find_heads():
    found_on = grounding("scenes", "detect", 5)
    asked = to_test("scenes-attribute", found_on, 6)
    assert asked.split == "test" and len(asked) == 6 and all(s.task == "answer" for s in asked)
    assert not asked.images & found_on.images
    assert asked.notes == {"left out: its picture served to find heads (scenes, compared by number)": 0}
    shared = Samples("other", "detect", [dataclasses.replace(found_on[0], image_key=asked[2].image_key)])
    again = to_test("scenes-attribute", shared, 6)
    assert [s.id for s in again] == [s.id for s in asked if s.id != asked[2].id]


def test_training_reads_pictures_that_no_other_split_holds():
    found_on, test = grounding("scenes", "detect", 5), grounding("scenes-g", "test", 5)
    train = to_train("scenes-g", 6, [found_on, test])
    assert train.split == "dev" and len(train) == 6, "the scenes that made the weights are no benchmark"
    assert sorted(train.notes) == [
        "left out: its picture is held out (scenes, compared by number)",
        "left out: its picture is held out (scenes-g, compared by number)",
    ]
    shared = Samples("other", "test", [dataclasses.replace(test[0], image_key=train[1].image_key)])
    assert [s.id for s in to_train("scenes-g", 6, [shared])] == [s.id for s in train if s.id != train[1].id]


# ---------------------------------------------------------------- real: rows are few, so other benchmarks give all


@pytest.fixture
def shelf(root, monkeypatch, tmp_path):
    """Small copies, fewer rows than published: RefCOCO of pictures 0 to 7 with two things each, RefCOCO+ of 4 to 11,
    Toloka of one question on each of 0 to 11, and RefSpatial-Bench, which names no picture, of 2, 3 and 20 to 29."""
    fixtures.isolate(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("VRHLIB_ALLOW_DRIFT", "1")

    def photo(number: int) -> bytes:
        return encoded(view(number), "JPEG")

    def two(numbers):
        return [fixtures.refcoco_row(n, t, image=cell(photo(n))) for n in numbers for t in (0, 1)]

    fixtures.write_lmms(root, "RefCOCO", two(range(8)))
    fixtures.write_lmms(root, "RefCOCOplus", two(range(4, 12)))
    fixtures.write_toloka(
        root, [fixtures.toloka_row(n) for n in range(12)], {f"{n:012d}.jpg": photo(n) for n in range(12)}
    )
    spots = [fixtures.refspatial_row(n, image=cell(encoded(view(n)))) for n in (2, 3, *range(20, 30))]
    fixtures.write(root, "BAAI/RefSpatial-Bench", {"location": spots}, fixtures.REFSPATIAL)
    return root


def found_on_pictures(*numbers: int) -> Samples:
    """Detection samples of RefCOCO on these pictures and no others."""
    keys = {f"{n:012d}" for n in numbers}
    every = grounding("refcoco", "all")
    return Samples("refcoco", "detect", [s for s in every if s.image_key in keys], every.origin)


def capped(monkeypatch, name: str, rows: int) -> None:
    """Let a benchmark say that so many rows are published."""
    known = benchmarks.BENCHMARKS[name]
    about = dataclasses.replace(known.about, rows=rows)
    monkeypatch.setitem(benchmarks.BENCHMARKS, name, dataclasses.replace(known, about=about))


def test_heads_are_tested_on_the_test_split_of_the_benchmark_they_were_found_on(shelf):
    found_on = grounding("refcoco", "detect", 3, seed=1)
    samples = to_test("refcoco", found_on, None, seed=1)
    assert samples.split == "test" and [s.id for s in samples] == [s.id for s in grounding("refcoco", "test", seed=1)]
    assert left_out(samples) == ("number", 0) and samples.disjoint(found_on) is samples
    two = to_test("refcoco", found_on, 2, seed=1)
    assert [s.id for s in two] == [s.id for s in grounding("refcoco", "test", 2, seed=1)]


def test_a_test_split_of_another_seed_loses_the_pictures_it_shares(shelf):
    plain = grounding("refcoco", "test", seed=0)
    shared = sorted(plain.images)[:1]
    found_on = found_on_pictures(int(shared[0]), *(n for n in range(8) if f"{n:012d}" not in plain.images))
    samples = to_test("refcoco", found_on, None, seed=0)
    assert [s.id for s in samples] == [s.id for s in plain if s.image_key not in shared]
    assert left_out(samples)[1] == len(plain) - len(samples) > 0 and len(samples) > 0


def test_all_rows_of_another_benchmark_are_tested_but_those_on_the_pictures_served(shelf):
    found_on = found_on_pictures(2, 5, 7)
    plus = to_test("refcoco+", found_on, None)
    assert plus.split == "all" and left_out(plus) == ("number", 4)
    assert plus.images == {f"{n:012d}" for n in (4, 6, 8, 9, 10, 11)} and len(plus) == 12
    asked = to_test("toloka", found_on, None)
    assert asked.split == "all" and left_out(asked) == ("number", 3)
    assert [s.image_key for s in asked] == [f"{n:012d}" for n in (0, 1, 3, 4, 6, 8, 9, 10, 11)]
    assert all(s.task == "question" for s in asked)


def test_a_benchmark_that_names_no_pictures_is_compared_by_what_they_show(shelf):
    """The same pictures stand in RefCOCO as JPEG and here as PNG."""
    both = to_test("refspatial", found_on_pictures(2, 3, 5), None)
    assert left_out(both) == ("pixels", 2)
    assert [s.id for s in both] == [f"refspatial-location-{i}" for i in range(2, 12)]
    assert left_out(to_test("refspatial", found_on_pictures(3, 5), None)) == ("pixels", 1)
    assert left_out(to_test("refspatial", found_on_pictures(0, 1, 4, 6), None)) == ("pixels", 0)


def test_fewer_rows_than_asked_for_are_all_rows(shelf, monkeypatch):
    """n is held against the published number of rows, and drawn before pictures are left out."""
    for name, rows in (("refspatial", 12), ("toloka", 12), ("refcoco+", 16)):
        capped(monkeypatch, name, rows)
        found_on = found_on_pictures(2, 7)
        every, many = to_test(name, found_on, None), to_test(name, found_on, rows + 1)
        assert [s.id for s in many] == [s.id for s in every] and many.notes == every.notes
        few = to_test(name, found_on, 6, seed=3)
        drawn = grounding(name, "all", 6, seed=3)
        assert len(few) + left_out(few)[1] == 6 and {s.id for s in few} < {s.id for s in grounding(name, "all")}
        assert [s.id for s in few] == [s.id for s in drawn if s.id in {s.id for s in every}]
        assert [s.id for s in to_find(name, rows + 100)] == [s.id for s in grounding(name, "all")]


def test_heads_to_compare_are_found_on_any_rows(shelf):
    for name in ("refcoco", "refcoco+", "toloka", "refspatial"):
        found = to_find(name, 5, seed=4)
        assert (found.split, len(found)) == (grounding(name, "all").split, 5)
        assert [s.id for s in found] == [s.id for s in grounding(name, "all", 5, seed=4)]
        assert not any(note.startswith("left out") for note in found.notes), "nothing is tested on them"
