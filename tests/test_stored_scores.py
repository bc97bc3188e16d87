"""Head scores read from the run store without a model: found for exactly what was asked, and for nothing else."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from vrhlib import evaluate, scoring, store
from vrhlib import vlm as vlm_module
from vrhlib.design_space import VRH, Scoring
from vrhlib.profiles import MODELS
from vrhlib.samples import Sample, Samples
from vrhlib.scoring import score_samples, stored
from vrhlib.vlm import revision
from vrhlib.wiring import load_vlm

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model of this file alone, whose folder may be edited."""
    vlm = load_vlm(tiny.write("internvl3", tmp_path_factory.mktemp("own"), seed=1), device="cpu")
    vlm.max_new_tokens = 3
    return vlm


@pytest.fixture
def samples() -> Samples:
    return Samples("noise", "detect", tiny.samples())


@pytest.fixture
def scored(own, samples):
    return score_samples(own, samples, batch_size=2)


@pytest.fixture
def no_loading(monkeypatch):
    """Whatever makes a model, its configuration or its processor is gone."""
    for name in ("AutoConfig", "AutoModelForImageTextToText", "AutoProcessor", "AutoTokenizer", "load_processor"):
        monkeypatch.setattr(vlm_module, name, None)


def lines(root, run: str):
    return root / "data/runs/nano" / f"{run}.jsonl"


# ---------------------------------------------------------------- found


def test_what_was_scored_is_read_without_loading_a_model(own, samples, scored, no_loading):
    with pytest.raises(AttributeError):
        load_vlm(own.name)
    got = stored(own.name, "nano", samples)
    assert (got.model, got.benchmark, got.runs, got.ids) == (own.name, "noise", scored.runs, scored.ids)
    assert (got.replies, got.empty, got.about) == (scored.replies, scored.empty, scored.about)
    assert got.points() == scored.points() and got.sizes.keys() == scored.sizes.keys()
    for point in got.points():
        assert np.array_equal(got.theta(*point), scored.theta(*point), equal_nan=True)
    for name, sizes in scored.sizes.items():
        assert np.array_equal(got.sizes[name], sizes)
    found, want = got.score(VRH), scored.score(VRH)
    assert found.top(24) == want.top(24) and (found.n, found.runs) == (want.n, want.runs)


def test_samples_keep_their_order_whatever_the_files(own, samples, scored, root):
    path = lines(root, *scored.runs)
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    got = stored(own.name, "nano", samples)
    assert got.ids == scored.ids and np.array_equal(got.theta("output", "sum"), scored.theta("output", "sum"))


def test_whether_replies_were_right_is_not_known_and_asking_says_so(own, samples, scored):
    got = stored(own.name, "nano", samples)
    assert scored.right is not None and got.right is None and "right" not in str(got)
    for pooled in ("mean", "frequency", "active", "rank_mean", "median"):
        assert got.score(Scoring("output", "sum", pooled)).n == 3
    with pytest.raises(ValueError, match="read without the model, so nobody knows which replies are right"):
        got.score(Scoring("output", "sum", "mean_success"))


def test_a_sample_without_a_reply_stays_one(own, samples, scored, root):
    path = lines(root, *scored.runs)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["tokens"] = 0
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert stored(own.name, "nano", samples).empty == (records[1]["id"],)


# ---------------------------------------------------------------- not found


def test_nothing_is_found_where_nothing_was_scored(own, samples, root):
    assert stored(own.name, "nano", samples) is None and not (root / "data").exists()
    evaluate.replies(own, samples, {evaluate.UNMASKED: None})
    assert stored(own.name, "nano", samples) is None, "replies are no scores"


def test_an_unfinished_run_is_not_found_until_it_is_finished(own, samples, monkeypatch):
    generate, calls = scoring.generate, []

    def dies_at_the_second_batch(*words, **more):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*words, **more)

    monkeypatch.setattr(scoring, "generate", dies_at_the_second_batch)
    with pytest.raises(KeyboardInterrupt):
        score_samples(own, samples, batch_size=2)
    assert stored(own.name, "nano", samples) is None
    score_samples(own, samples, batch_size=2)
    assert stored(own.name, "nano", samples).n == 3


def other_samples(samples: Samples) -> dict[str, Samples]:
    first, *rest = samples
    asked = Sample(first.id, first.image, first.image_key, "another thing", first.box)
    shown = Sample(first.id, first.image, "another picture", first.text, first.box)
    moved = Sample(first.id, first.image, first.image_key, first.text, first.box.scaled(0.9, 0.9))
    return {
        "fewer": samples[:2], "in another order": Samples("noise", "detect", list(reversed(list(samples)))),
        "another text": Samples("noise", "detect", [asked, *rest]),
        "another picture": Samples("noise", "detect", [shown, *rest]),
        "another box": Samples("noise", "detect", [moved, *rest]),
        "from elsewhere": Samples("noise", "detect", list(samples), origin="table@1"),
    }  # fmt: skip


def test_other_samples_are_not_found(own, samples, scored):
    found = {what: stored(own.name, "nano", other) for what, other in other_samples(samples).items()}
    assert found == dict.fromkeys(found)
    assert stored(own.name, "nano", samples) is not None


def test_another_revision_of_the_weights_is_not_found(own, samples, scored):
    path = next(iter(Path(own.name).glob("*.safetensors")))
    before = path.read_bytes()
    assert revision(own.name) == own.revision
    try:
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert revision(own.name) != own.revision and stored(own.name, "nano", samples) is None
    finally:
        path.write_bytes(before)
    assert stored(own.name, "nano", samples) is not None


def test_an_edited_configuration_is_another_revision_and_a_readme_is_none(own, samples, scored):
    folder = Path(own.name)
    (folder / "README.md").write_text("new")
    assert revision(own.name) == own.revision and stored(own.name, "nano", samples) is not None
    (folder / "extra.json").write_text("{}")
    try:
        assert stored(own.name, "nano", samples) is None
    finally:
        (folder / "extra.json").unlink()


def test_equal_weights_under_another_name_are_not_found(own, samples, scored, tmp_path):
    twin = shutil.copytree(own.name, tmp_path / "twin")
    assert revision(str(twin)) == own.revision and stored(str(twin), "nano", samples) is None


def test_other_code_other_versions_and_another_profile_are_not_found(own, samples, scored, monkeypatch):
    assert stored(own.name, "paper", samples) is None
    for name, other in (("_code", lambda real: ["edited"]), ("versions", lambda: {"torch": "0"})):
        with monkeypatch.context() as patch:
            patch.setattr(store, name, other)
            assert stored(own.name, "nano", samples) is None, name
    assert stored(own.name, "nano", samples) is not None


def test_of_two_runs_that_fit_none_is_taken(own, samples, scored):
    score_samples(own, samples, evidence=("any",))
    assert stored(own.name, "nano", samples).runs == scored.runs, "other evidence is another run, and does not fit"
    score_samples(own, samples, batch_size=1)
    assert stored(own.name, "nano", samples) is None


# ---------------------------------------------------------------- spoiled


def test_a_record_without_scores_is_an_error_that_names_the_file(own, samples, scored, root):
    path = lines(root, *scored.runs)
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + second.replace('"theta"', '"other"') + third)
    with pytest.raises(store.CorruptRun, match=f"{path}.*no head score"):
        stored(own.name, "nano", samples)


def test_a_garbled_line_makes_a_run_unfinished(own, samples, scored, root, capsys):
    path = lines(root, *scored.runs)
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + second[:40] + "\n" + third)
    assert stored(own.name, "nano", samples) is None
    assert f"{path}: line 2 (" in capsys.readouterr().out


def test_a_manifest_that_cannot_be_read_is_none(own, samples, scored, root):
    lines(root, *scored.runs).with_suffix(".json").write_text("{ half")
    assert stored(own.name, "nano", samples) is None


# ---------------------------------------------------------------- the revision of a model that is not loaded


def test_a_pinned_model_has_its_pinned_revision_without_a_network():
    pin = MODELS["qwen2.5-vl-7b"]
    assert revision("qwen2.5-vl-7b") == pin.revision
    assert revision("owner/unlisted") == "unpinned"


def test_a_local_copy_of_a_pinned_model_has_the_revision_of_its_files(root, own):
    copy = shutil.copytree(own.name, root / "data/local" / MODELS["qwen2.5-vl-7b"].source)
    assert revision("qwen2.5-vl-7b") == revision(str(copy)) == own.revision


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nano-qwen", ValueError, "Unknown model 'nano-qwen'.*Did you mean 'nano-qwen"),
        ("nano-qwen3-vl", OSError, "is shipped in data/nano/nano-qwen3-vl.*git checkout"),
        ("./no/folder", ValueError, "There is no folder ./no/folder"),
    ],
)
def test_a_model_that_is_not_there_has_no_revision(name, error, message):
    with pytest.raises(error, match=message):
        revision(name)
    with pytest.raises(error, match=message):
        stored(name, "nano", Samples("noise", "detect", tiny.samples()))


def test_a_run_made_otherwise_is_not_served(vlm, samples):
    """Of one part of tiled pictures, or of a model that was loaded with another prompt or other tiles."""
    score_samples(vlm, samples, part="tiles")
    assert stored(vlm.name, "nano", samples) is None
    asked = dataclasses.replace(vlm, given={"tiles": 1})
    score_samples(asked, samples)
    assert stored(vlm.name, "nano", samples) is None
    captured = score_samples(vlm, samples)
    assert stored(vlm.name, "nano", samples).runs == captured.runs


def test_a_run_that_lost_a_line_is_not_served(vlm, samples, root):
    captured = score_samples(vlm, samples)
    path = root / f"data/runs/nano/{captured.runs[0]}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert stored(vlm.name, "nano", samples) is None
