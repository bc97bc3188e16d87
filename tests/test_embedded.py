"""The shipped model is what its manifest says, and shows the phenomenon: a few heads carry the referent."""

import json

import pytest
from transformers import AutoModelForImageTextToText

from vrhlib import evaluate, scoring, store
from vrhlib.attention import Ablation
from vrhlib.boxes import Box
from vrhlib.evaluate import UNMASKED, Condition
from vrhlib.profiles import profile
from vrhlib.samples import grounding
from vrhlib.vlm import MODELS, load_vlm

NANO = [name for name, pin in MODELS.items() if pin.profile == "nano"]


@pytest.fixture(scope="module", params=NANO)
def vlm(request):
    return load_vlm(request.param)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)


@pytest.mark.parametrize("name", NANO)
def test_weights_load_with_plain_transformers_and_stay_small(name):
    folder = store.Path(__file__).parents[1] / MODELS[name].source
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True)
    about = json.loads((folder / "manifest.json").read_text())
    assert model.num_parameters() == about["parameters"]
    assert not list(folder.glob("*.bin")) and sum(p.stat().st_size for p in folder.iterdir()) < 16e6
    assert {"recipe", "stages", "quality"} <= set(about)
    quality = about["quality"]
    assert quality["n"] >= 1000 and quality["accuracy"] >= 75 and quality["two_questions"] >= 60
    failures = sum(quality["outcomes"].get(o, 0) for o in ("no box", "malformed", "cut off"))
    assert failures < 0.01 * quality["n"]


def test_it_answers_the_question_not_just_the_picture(vlm):
    samples = grounding("scene-pairs", "dev", 120, seed=1)
    answers = evaluate.replies(vlm, samples, {UNMASKED: None}, batch_size=32)
    assert evaluate.accuracy(answers.outcome).mean > 2 * 100 * sum(s.chance for s in samples) / len(samples)
    assert evaluate.two_questions(answers, samples).mean > 40


def test_cutting_the_top_heads_halves_accuracy_and_random_heads_do_not(vlm):
    scores = scoring.score_samples(vlm, grounding("scenes", "detect", 32, seed=1)).score(scoring.VRH)
    k = profile("nano").k
    assert k <= 0.1 * scores.values.size
    conditions = {UNMASKED: None, Condition("vrh", k): Ablation(scores.top(k))}
    conditions |= {Condition("random", k, s): Ablation(scores.controls(k, s)) for s in range(5)}
    answers = evaluate.replies(vlm, grounding("scenes", "test", 96, seed=1), conditions)
    table = evaluate.accuracy_table(answers).groupby("condition")[["accuracy", "malformed", "cut off", "no box"]].mean()
    assert table.accuracy["vrh"] <= table.accuracy["unmasked"] / 2
    assert table.accuracy["random"] >= table.accuracy["unmasked"] - 15  # 10 on average over many; room for n = 96
    assert table.loc["vrh", ["malformed", "cut off", "no box"]].sum() <= 10


def test_its_boxes_are_written_in_pixels_of_the_resized_picture(vlm):
    sample = grounding("scenes", "dev", 1)[0]
    batch = vlm.prepare([sample])
    assert batch.resized[0] == sample.image.size and (batch.grids[0].rows, batch.grids[0].cols) == (6, 8)
    text = vlm.write_box(sample.box, sample.image.size, batch.resized[0])
    assert vlm.read(text, sample.image.size, batch.resized[0]).box == sample.box
    assert vlm.read(text, (256, 192), batch.resized[0]).box == Box(*(2 * v for v in sample.box))
