"""What a run would take, and what stands in its way: counted against a real run, without GPU, network or torch."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vrhlib import benchmarks, hub, notebooks, plan, store
from vrhlib.profiles import MODELS, profile

ROOT = Path(__file__).parents[1]
BOOKS = {path.stem: notebooks.Notebook(path) for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
PAPER = profile("paper")


def a_run(**changes) -> plan.Paper:
    """Notebook 01 on the paper's models and data."""
    return plan.Paper({"01_detect": BOOKS["01_detect"].parameters | {"PROFILE": "paper"} | changes})


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """Nothing was downloaded, no copy is here, and whoever asks the Hub has to say what it answers."""
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(hub, "cached", lambda name, kind, revision=None: False)
    monkeypatch.setattr(hub, "reachable", None)
    monkeypatch.delenv("VRHLIB_DEVICE", raising=False)


# ---------------------------------------------------------------- work


@pytest.mark.parametrize("name", ["nano", "paper"])
@pytest.mark.parametrize("book", BOOKS)
def test_every_notebook_has_its_work_written_down(book, name):
    work = plan.work_of(book, name, BOOKS[book].parameters)
    assert work and all(w.sequences > 0 and w.read > 0 and w.model in MODELS for w in work)
    assert set(plan.WORK) <= set(BOOKS), "and no notebook that is gone"
    assert plan.work_of("99_unknown", name, {}) is None


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The notebooks and what is shipped, in a folder to throw away."""
    monkeypatch.setenv("JUPYTER_PATH", "")  # the runner sets it; monkeypatch takes it back
    (tmp_path / "notebooks").mkdir()
    for book in BOOKS.values():
        shutil.copy(book.path, tmp_path / "notebooks")
    (tmp_path / "data").mkdir()
    for shipped in ("nano", "paper"):
        (tmp_path / "data" / shipped).symlink_to(ROOT / "data" / shipped)
    return tmp_path


def stored() -> Counter:
    """Samples in the run store by (task, benchmark and split)."""
    manifests = [json.loads(path.read_text()) for path in store.runs_dir("nano").glob("*.json")]
    found = Counter()
    for m in manifests:
        if "samples" in m:  # not the table of speeds
            found[m["task"], m["benchmark"]] += m["samples"]
    return found


def planned(book: str, *words: str) -> list[plan.Work]:
    given = notebooks.parameters("nano", [BOOKS[book]], dict(word.split("=", 1) for word in words))
    return [w for w in plan.work_of(book, "nano", given[book]) if w.stored]


def replies_of(work: list[plan.Work]) -> int:
    return sum(w.replies for w in work)


def test_a_run_of_01_stores_no_more_than_planned_and_not_much_less(checkout):
    words = ["N_DETECT=10", "N_TEST=4", "MODELS=nano-qwen2.5-vl"]
    assert notebooks.main(["run", "01", *words]) == 0
    (found,) = [json.loads(path.read_text()) for path in store.heads_dir("nano").glob("*.json")]
    most, own = replies_of(planned("01_detect", *words)), f"K={len(found['heads'])}"
    count = sum(stored().values())
    assert count > 150, "the sweeps are among them"
    # The pictures to try it on are all four test pictures here: what is cut on them is partly cut anyway.
    tried = sum(w.replies for w in planned("01_detect", *words, own) if w.what == "replies, to try it")
    known = replies_of(planned("01_detect", *words, own))
    # Equal cuts are one: single heads drawn by two seeds, layer-matched controls where the heads are half of a layer;
    # and there are none where they are more than half, as eight heads of this model are.
    assert count <= known and 0 < known - tried <= 1.2 * count
    assert known <= most and most - tried <= 1.5 * count, "how many heads it cuts, it does not know before"


def test_a_run_of_02_stores_no_more_than_planned_and_leaves_03_nothing_to_do(checkout, monkeypatch):
    words = ["N_DETECT=10", "N_TEST=4", "N_PRIOR=3", "K=3", "MODELS=nano-qwen2.5-vl"]
    assert 3 not in profile("nano").variant_ks, "K may be another than those"
    assert notebooks.main(["run", "02", *words]) == 0
    work, found = planned("02_design_space", *words), stored()
    scores = Counter({("scores", f"{w.benchmark} detect"): w.replies for w in work if w.what == "head scores"})
    assert Counter({name: n for name, n in found.items() if name[0] == "scores"}) == scores
    assert sum(scores.values()) == 10 + 3 * 3, "grounding, text, words and pages"
    pairs = sum(w.replies for w in work if w.what == "two questions a picture")
    assert found["replies", "scenes pairs test"] == pairs == 4
    cuts, most = found["replies", "scenes test"], replies_of(work) - sum(scores.values()) - pairs
    # Methods that find nothing are not cut, and points of the picker share their heads: with so few samples about half.
    assert 100 < cuts <= most <= 2.5 * cuts

    def kept() -> dict:
        return {path: path.read_bytes() for path in store.runs_dir("nano").iterdir() if path.stem != "notebooks"}

    before = kept()
    monkeypatch.setenv("VRHLIB_DEVICE", "no such device")  # whoever loads a model asks for it
    assert notebooks.main(["run", "03", "N_DETECT=10", "MODELS=nano-qwen2.5-vl"]) == 0
    assert kept() == before
    assert replies_of(planned("03_sparsity", "N_DETECT=10", "MODELS=nano-qwen2.5-vl")) == 10, "if nothing were stored"
    assert notebooks.main(["run", "03", "N_DETECT=9", "MODELS=nano-qwen2.5-vl"]) == 1, "other samples need the model"


def test_a_run_of_04_stores_no_more_than_planned_and_05_finds_its_own_cuts_there(checkout):
    words = ["N_DETECT=6", "N_TEST=2", "K=3", "MODELS=nano-qwen2.5-vl"]
    assert notebooks.main(["run", "04", "BENCHMARKS=scenes-question", *words]) == 0
    work, found = planned("04_universality", "BENCHMARKS=scenes-question", *words), stored()
    scores = Counter({("scores", f"{w.benchmark} detect"): w.replies for w in work if w.what.startswith("head scores")})
    assert Counter({name: n for name, n in found.items() if name[0] == "scores"}) == scores and len(scores) == 2
    for name, split in (("scenes", "test"), ("scenes", "detect"), ("scenes-question", "test")):
        on = [w for w in work if w.benchmark == name and not w.what.startswith("head scores")]
        most = replies_of([w for w in on if ("detection" in w.what) == (split == "detect")])
        assert found["replies", f"{name} {split}"] <= most <= 1.6 * found["replies", f"{name} {split}"], (
            "eight heads of this model fill a layer: no layer-matched control there, but the plan does not know"
        )

    before = stored()
    assert notebooks.main(["run", "05", *words]) == 0
    assert stored() == before, "alone, a model has nobody to borrow from, and its own cuts are stored"
    assert replies_of(planned("05_transfer", *words)) >= found["replies", "scenes test"] / 3


def test_a_run_of_06_stores_what_is_planned_but_equal_controls(checkout):
    words = ["N_DETECT=6", "N_TEST=2", "K=3", "MODELS=nano-qwen3-vl"]
    assert notebooks.main(["run", "06", "BENCHMARKS=scenes-attribute", *words]) == 0
    work, found = planned("06_cross_task", "BENCHMARKS=scenes-attribute", *words), stored()
    assert found["scores", "scenes detect"] == 6 == replies_of([w for w in work if w.what == "head scores"])
    for name, what in (("scenes-attribute", "replies, unmasked and ablated"), ("needle", "replies without a picture")):
        most = replies_of([w for w in work if (w.benchmark, w.what) == (name, what)])
        assert found["replies", f"{name} test"] <= most == 2 * 13 <= 1.2 * found["replies", f"{name} test"]
    assert found["replies", "scenes-attribute (grey) test"] == 2
    assert sum(found.values()) <= replies_of(work)


def test_a_run_of_08_stores_what_is_planned_but_for_things_that_are_not_there(checkout):
    words = ["N_DETECT=6", "N_TEST=4", "K=3", "MODELS=nano-qwen2.5-vl"]
    assert notebooks.main(["run", "08", *words]) == 0
    work, found = planned("08_play", *words), stored()
    assert found["scores", "scenes detect"] == 6 == replies_of([w for w in work if w.what == "head scores"])
    steered = replies_of([w for w in work if w.what == "replies while heads look elsewhere"])
    things = found["replies", "scenes pairs, pointed test"]
    assert things <= steered <= 2.2 * things, "a scene has four to eight things, eight are planned for"
    cut = replies_of([w for w in work if w.what == "replies, unmasked and ablated"])
    assert found["replies", "scenes test"] <= cut <= 1.3 * found["replies", "scenes test"]
    assert sum(found.values()) <= replies_of(work)

    # And headless its views are pictures: no widget is left that nobody could show.
    (path,) = checkout.rglob("rendered/nano/08_play.ipynb")
    executed = json.loads(path.read_text())
    assert "widgets" not in executed["metadata"]
    shown = {
        c["id"]: c["outputs"][-1]["data"] for c in executed["cells"] if c["id"].startswith("play-") and "outputs" in c
    }
    assert sorted(shown) == ["play-explorer", "play-heads", "play-point", "play-steps"]
    for name, data in shown.items():
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG"), name
        assert "application/vnd.jupyter.widget-view+json" not in data, name


def test_a_run_of_07_stores_what_is_planned_and_again_trains_nothing(checkout, capfd):
    words = ["N_DETECT=6", "N_PAIRS=6", "N_TEST=2", "RECIPE=epochs=1,batch_size=2,at_once=2"]
    assert notebooks.main(["run", "07", *words]) == 0
    work, found = planned("07_dpo", *words), stored()
    assert found["scores", "scenes detect"] == 4 * 6 and sum(found.values()) == replies_of(work)
    for name in profile("nano").dpo_data:
        assert found["pairs", f"{name} dev"] == 0, "stored under the name of all three"
        assert found["replies", f"{name} test"] == 10 * 2
    assert found["pairs", "pairs dev"] == 3 * 6
    policies = sorted((store.runs_dir("nano") / "policies").glob("*/manifest.json"))
    assert len(policies) == 9
    before = [path.read_bytes() for path in policies]
    capfd.readouterr()
    assert notebooks.main(["run", "07", "--again", *words]) == 0
    said = capfd.readouterr().out
    assert "step" not in said and "samples" not in said, "nothing is trained, drawn or asked again"
    assert [path.read_bytes() for path in policies] == before and stored() == found


@pytest.mark.parametrize(
    "notebook, given, message",
    [
        ("06_cross_task", {"BENCHMARKS": ["scenes"]}, "scenes is not answered in words; scenes-attribute, "),
        ("06_cross_task", {"K": 41}, "controls need as many heads outside"),
        ("07_dpo", {"RECIPE": ["method=lorra"]}, "Did you mean 'lora'"),
        ("07_dpo", {"KEEP": "diferent"}, "Did you mean 'different'"),
        ("07_dpo", {"TEMPERATURE": 0.0}, "sampled, at one above 0"),
        ("07_dpo", {"MODELS": ["nano-qwen3-vl", "nano-internvl3"]}, "trains one model; choose one"),
        ("07_dpo", {"N_PAIRS": 2}, "N_PAIRS=2: at least one of each of scenes-g, "),
    ],
)
def test_what_06_and_07_cannot_do_is_refused_beforehand(notebook, given, message):
    with pytest.raises(ValueError, match=message):
        plan.work_of(notebook, "nano", BOOKS[notebook].parameters | given)


def test_training_is_planned_by_its_recipe_and_its_memory_told():
    def trained(*recipe: str) -> int:
        given = BOOKS["07_dpo"].parameters | {"PROFILE": "paper", "RECIPE": list(recipe)}
        return sum(w.read for w in plan.work_of("07_dpo", "paper", given) if w.what.startswith("training"))

    assert trained("epochs=2") * 2 == trained("epochs=4") == trained()
    run = plan.Paper({"07_dpo": BOOKS["07_dpo"].parameters | {"PROFILE": "paper"}})
    text = plan.in_words(run, {}, None, 500.0)
    assert "Memory of training in GB (07_dpo), 1 pair at once" in text and "The recipe chosen is lora" in text
    for model in PAPER.models:
        full, lora = (next(line for line in text.splitlines() if line.startswith(model) and f"  {how}" in line)
                      for how in ("full", "lora, rank 16"))  # fmt: skip
        assert "(sharded)" in full and lora.endswith("fits"), "as the paper trains it, it needs more than one card"
    assert "Memory of training" not in plan.in_words(a_run(), {}, None, 500.0)
    assert {i.name for i in run.items if i.kind == "dataset"} == {"refcoco", *profile("paper").dpo_data,
                                                                 *profile("paper").dpo_data.values()}  # fmt: skip


def test_04_plans_every_benchmark_with_the_rows_it_has():
    work = plan.work_of("04_universality", "paper", BOOKS["04_universality"].parameters)
    mine = {(w.benchmark, w.what): w for w in work if w.model == "qwen2.5-vl-7b"}
    tested = {b: w.samples for (b, what), w in mine.items() if what == "replies, unmasked and ablated"}
    assert tested == {"refcoco": 500, "refcoco+": 500, "refcocog": 500, "refspatial": 100, "toloka": 500}
    assert mine["refspatial", "head scores, to compare"].samples == 100
    # Unmasked, five k of the top heads, two kinds of controls with five seeds at k = 20 alone.
    assert mine["toloka", "replies, unmasked and ablated"].conditions == 1 + 5 + 10
    # Three kinds in two phases, of which one is among these: VRHs and five random sets.
    assert mine["refcoco", "kinds and phases of ablation"].conditions == 5 * 6
    all_rows = plan.work_of("04_universality", "paper", BOOKS["04_universality"].parameters | {"N_TEST": -1})
    assert {w.samples for w in all_rows if w.what.startswith("replies, ")} == {8611, 3805, 7573, 100, 1705}
    lent = plan.work_of("05_transfer", "paper", BOOKS["05_transfer"].parameters)
    assert {w.conditions for w in lent if w.what.startswith("replies")} == {1 + 5 + 10 + 5}, "one lender of five k each"
    with pytest.raises(ValueError, match="mmstar has no boxes to ground.*refspatial, toloka"):
        plan.work_of("04_universality", "paper", BOOKS["04_universality"].parameters | {"BENCHMARKS": ["mmstar"]})


def test_only_01_and_02_need_pairs_and_nobody_gets_more_detection_samples_than_are_held_out():
    def work(book: str, **changes) -> list[plan.Work]:
        return plan.work_of(book, "paper", BOOKS[book].parameters | changes)

    for book in ("03_sparsity", "05_transfer"):
        assert {w.benchmark for w in work(book, BENCHMARKS=["toloka"])} == {"toloka"}
        assert work(book, BENCHMARKS=["refspatial"], N_DETECT=50, N_TEST=50)
    with pytest.raises(ValueError, match="N_DETECT=51: of refspatial, 50 rows are held out for detection"):
        work("05_transfer", BENCHMARKS=["refspatial"], N_DETECT=51, N_TEST=40)
    for book in BOOKS:
        with pytest.raises(ValueError, match="N_DETECT=201: of refcoco, 200 rows are held out"):
            work(book, N_DETECT=201)
    for name in ("refcocog-umd", "refspatial-points"):
        with pytest.raises(ValueError, match=f"{name} has no boxes to ground, or no rows held out"):
            work("04_universality", BENCHMARKS=[name])


def test_the_plan_knows_the_kinds_and_phases_of_ablation():
    from vrhlib.attention import KINDS, PHASES

    assert (plan._KINDS, plan._PHASES) == (KINDS, PHASES)


def test_equal_conditions_are_counted_once():
    # Unmasked, 5 k x (top, 5 random, 5 layer-matched), one output token; the sweep of all models at k is among them.
    assert len(plan._cuts(PAPER, 20, closely=True)) == 1 + 5 * 11 + 1
    assert len(plan._cuts(PAPER, 20, closely=False)) == 1 + 11
    # Own k and the profile's are two numbers of heads, with controls of their own.
    assert len(plan._cuts(PAPER, 7, closely=False)) == 1 + 2 * 11


def test_numbers_follow_the_parameters():
    def sequences(**changes) -> int:
        return sum(w.sequences for w in a_run(**changes).work["01_detect"])

    usual = sequences()
    assert sequences(N_TEST=PAPER.n_test) == usual == sequences(K=PAPER.k), "0 means the profile's number"
    assert sequences(N_TEST=5) < usual / 40
    assert usual - sequences(N_DETECT=100) == 2 * 100 * len(PAPER.models), "read once to reply, once for attention"
    assert usual > sequences(MODELS=["internvl3-8b"]) > sequences(MODELS=["internvl3-8b"], K=3)
    (only,) = {w.benchmark for w in a_run(BENCHMARKS=["refcoco+"]).work["01_detect"]}
    assert only == "refcoco+"
    whole = a_run(N_TEST=-1).work["01_detect"]
    assert max(w.samples for w in whole) == 8811 - PAPER.n_detect, "-1 is all there are"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"BENCHMARKS": ["refspatial"]}, "refspatial has no pairs, or no rows held out for detection; refcoco, "),
        ({"BENCHMARKS": ["refcoco-unc"]}, "or no rows held out for detection"),
        ({"BENCHMARKS": ["toloka"]}, "toloka has no pairs"),
        ({"BENCHMARKS": ["refcoco+"], "N_TEST": 3700}, "3900 rows of refcoco.* are more than its 38"),
        ({"BENCHMARKS": ["refcoco+", "refcoco"]}, "01_detect takes one benchmark; choose one of refcoco., refcoco"),
    ],
)
def test_a_benchmark_that_cannot_give_what_01_asks_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        a_run(**changes).work  # noqa: B018
    assert a_run(BENCHMARKS=["refcocog"]).work


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"MODELS": "qwen2.5-vl-7b"}, "Unknown model of the nano profile 'qwen2.5-vl-7b'.*Did you mean 'nano-qwen2"),
        ({"BENCHMARKS": "scenes,scenes-g"}, "takes one benchmark; choose one of scenes, scenes-g"),
        ({"BENCHMARKS": "refcoco"}, "Unknown benchmark of the nano profile 'refcoco'"),
        ({"N_DETECT": "-1"}, "N_DETECT=-1: it takes a number, or 0 for the profile's"),
        ({"N_PRIOR": "-1"}, "N_PRIOR=-1: it takes a number, or 0 for the profile's"),
        ({"K": "-2"}, "K=-2: it takes a number, or 0 for the profile's"),
        ({"K": "3.5"}, "K=3.5 is not a whole number"),
    ],
)
@pytest.mark.parametrize("book", BOOKS)
def test_what_no_notebook_can_run_is_refused_beforehand(book, overrides, message):
    if (name := next(iter(overrides))) not in BOOKS[book].parameters:
        message = f"No parameter {name} in {book}"
    if book == "06_cross_task" and "takes one" in message:
        message = "scenes is not answered in words; scenes-attribute, "
    if book == "04_universality" and "takes one" in message:  # it takes several, but they must be groundings
        overrides, message = {"BENCHMARKS": "scenes,scenes-math"}, "scenes-math has no boxes to ground"
    with pytest.raises(notebooks.Refused, match=message):
        notebooks.parameters("nano", [BOOKS[book]], overrides)


def test_the_work_of_02_follows_its_parameters():
    def work(**changes) -> list[plan.Work]:
        return plan.work_of("02_design_space", "nano", BOOKS["02_design_space"].parameters | changes)

    nano, kinds = profile("nano"), len(profile("nano").prior_data)

    def cuts(**changes) -> set[int]:
        return {w.conditions for w in work(**changes) if w.what == "replies, unmasked and ablated"}

    assert replies_of(work()) == replies_of(work(N_PRIOR=nano.n_prior, K=nano.variant_k, N_TEST=nano.n_variants))
    own = {w.benchmark: w.samples for w in work(N_PRIOR=7, N_DETECT=5) if w.what == "head scores"}
    assert own == {"scenes": 5} | dict.fromkeys(nano.prior_data.values(), 7)
    assert replies_of(work()) - replies_of(work(N_PRIOR=nano.n_prior - 1)) == len(nano.models) * kinds
    (usual,), (another,) = cuts(K=nano.variant_ks[0]), cuts(K=max(nano.variant_ks) + 1)
    share = (usual - 1) // len(nano.variant_ks)
    assert 10 < another - usual <= share, "a k of its own is one more at which everything is cut"
    one = replies_of(work(MODELS=["nano-internvl3"]))
    (picker,) = [w for w in work() if w.what == "points of the picker"]
    assert replies_of(work()) == len(nano.models) * (one - picker.replies) + picker.replies


def test_the_work_of_03_is_what_02_does_anyway():
    usual = {(w.model, w.benchmark, w.samples, w.passes) for w in planned("02_design_space") if w.what == "head scores"}
    few = planned("03_sparsity")
    assert {(w.model, w.benchmark, w.samples, w.passes) for w in few} < usual and len(few) == 4
    assert all(w.what == "head scores" and w.conditions == 1 for w in few)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"MODELS": ["qwen3-vl"]}, "Unknown model of the paper profile 'qwen3-vl'.*Did you mean 'qwen3-vl-8b'"),
        ({"MODELS": ["nano-qwen3-vl"]}, "Unknown model of the paper profile 'nano-qwen3-vl'"),
        ({"BENCHMARKS": ["refcoc"]}, "Unknown benchmark of the paper profile 'refcoc'.*Did you mean 'refcoco'"),
        ({"BENCHMARKS": ["scenes"]}, "Unknown benchmark of the paper profile 'scenes'"),
        ({"N_TEST": -2}, "N_TEST=-2: it takes a number, or 0 for the profile's .-1: all"),
        ({"K": -1}, "K=-1"),
    ],
)
def test_a_name_of_the_other_profile_or_of_none_is_unknown(given, message):
    with pytest.raises(ValueError, match=message):
        plan.check_values("paper", given)
    plan.check_values("paper", {"MODELS": ["qwen3-vl-8b"], "BENCHMARKS": ["refcoco"], "N_TEST": 3, "KS": [-1]})


# ---------------------------------------------------------------- hours


def test_measured_speed_replaces_the_stated_one_once_there_is_a_minute_of_it_on_a_gpu():
    work = a_run().work["01_detect"]
    mine, others = ([w for w in work if (w.model == "qwen3-vl-8b") == own] for own in (True, False))
    reads, writes = plan.SPEED["qwen3-vl-8b"]
    stated = plan.hours(mine, {})
    tokens = [plan.spent(w) for w in mine]
    assert stated == pytest.approx(sum(read / reads + written / writes for read, written in tokens) / 3600)
    half_as_fast = {"qwen3-vl-8b on cuda": [20 * reads, 10 * writes, 60.0]}  # 30 s, as stated
    assert plan.hours(mine, half_as_fast) == pytest.approx(2 * stated)
    assert plan.hours(others, half_as_fast) == plan.hours(others, {}), "of the others nothing was measured"
    for unheard in ({"qwen3-vl-8b on cuda": [20 * reads, 10 * writes, 59.0]}, {"qwen3-vl-8b on cpu": [9, 9, 900.0]}):
        assert plan.hours(mine, unheard) == stated

    lines = plan.in_words(a_run(), half_as_fast, None, 1000).splitlines()
    speeds = {line.split()[0]: line for line in lines if line.startswith(PAPER.models) and "/" in line}
    assert speeds.keys() == set(PAPER.models)
    assert speeds["qwen3-vl-8b"].endswith("measured here, 2.00 x the time stated")
    assert all(line.endswith("  stated") for name, line in speeds.items() if name != "qwen3-vl-8b")


def test_every_paper_model_has_a_stated_speed_and_fits_the_card_it_is_stated_for():
    assert plan.SPEED.keys() == {name for name, pin in MODELS.items() if pin.profile == "paper"}
    for model in plan.SPEED:
        low, high = plan.memory_gb(model)
        assert MODELS[model].gb + 1 < low < high < 48
        assert plan.memory_gb(model, eager=3328)[0] < 51.5, "RTX A6000: 49,140 MiB"


def test_what_conditions_share_is_not_counted_twice():
    alone = plan.Work("qwen2.5-vl-7b", "refcoco", "replies", 1, 100)
    assert plan.spent(alone) == (alone.read, alone.written), "one condition has nothing to share"
    looked = plan.Work("qwen2.5-vl-7b", "refcoco", "head scores", 1, 100, passes=2)
    assert plan.spent(looked) == (looked.read, looked.written)
    several = plan.Work("qwen2.5-vl-7b", "refcoco", "replies", 11, 100)
    prompt, reply, share = several.length, several.reply, plan.shared_layers("qwen2.5-vl-7b")
    read, written = plan.spent(several, told=0.75)
    assert read == pytest.approx(100 * (prompt + (prompt + reply) * (1 + 10 * (1 - share))))
    assert written == pytest.approx(100 * reply * (1 + 10 * 0.25))
    late = plan.Work("qwen2.5-vl-7b", "refcoco", "replies", 11, 100, decode=10)
    assert plan.spent(late)[0] == pytest.approx(100 * (2 * prompt + reply + 10 * reply)), "the prompt is shared"


def test_shared_layers_are_those_below_published_and_random_heads():
    published = json.loads((Path(__file__).parents[1] / "data/paper/heads.json").read_text())["heads"]
    for model, lowest in plan.LOWEST.items():
        found = published[MODELS[model].published].values()
        assert lowest == min(layer for heads in found for layer, _ in heads)
    rng, (depth, heads) = np.random.default_rng(0), MODELS["qwen3-vl-8b"].grid
    drawn = [rng.choice(depth * heads, 20, replace=False).min() // heads for _ in range(4000)]
    assert plan.shared_layers("qwen3-vl-8b") == pytest.approx((17 + np.mean(drawn)) / 2 / depth, abs=0.003)


def test_the_ladder_goes_down_and_ends_at_the_estimate():
    work = [w for notebook in a_run().work.values() for w in notebook]
    hours = [value for _, value in plan.ladder(work, {})]
    assert hours == sorted(hours, reverse=True) and len(hours) == 5
    seen_once = sum(
        w.samples * MODELS[w.model].visual_tokens * plan.VISION[w.model] / plan.SPEED[w.model][0] for w in work
    )
    assert hours[-1] == pytest.approx(plan.hours(work, {}) + seen_once / 3600)
    text = plan.in_words(a_run(), {}, None, 1000)
    assert "one sequence at a time" in text and f"{hours[0]:.1f}" in text and "as in the embedded models" in text


def test_the_share_that_needs_no_decoding_is_counted_in_stored_runs(root):
    folder = store.runs_dir("paper")
    folder.mkdir(parents=True)
    facts = {"task": "replies", "condition": {"kind": "zero"}, "samples": 60, "drafted": 45}
    facts["decoding"] = {"drafted": True}
    (folder / "a.json").write_text(json.dumps(facts))
    assert plan.share_told(folder) is None, "too few"
    (folder / "b.json").write_text(json.dumps(facts | {"drafted": 30}))
    for i, other in enumerate(
        ({"condition": {}}, {"task": "scores"}, {"drafted": None}, {"decoding": {"drafted": False}, "drafted": 0})
    ):
        (folder / f"c{i}.json").write_text(json.dumps(facts | other))
    (folder / "d.json").write_text("{ half")
    assert plan.share_told(folder) == pytest.approx(75 / 120)
    assert "counted in stored runs" in plan.in_words(a_run(), {}, None, 1000)


# ---------------------------------------------------------------- words


def test_the_plan_names_every_model_and_benchmark_and_its_totals_add_up():
    run = a_run()
    text = plan.in_words(run, {}, None, 1000)
    for model in PAPER.models:
        assert f"{MODELS[model].source}@{MODELS[model].revision[:8]}" in text
    assert "lmms-lab/RefCOCO or lmms-lab-encoder/RefCOCO" in text and "8,811" in text and "Licence: COCO" in text
    rows = [line for line in text.splitlines() if line.startswith(("01_detect", "all "))]
    numbers = [[float(word.replace(",", "")) for word in row.split()[-4:]] for row in rows]
    assert len(numbers) == 1 + len(run.work["01_detect"])
    for column in zip(*numbers):
        assert sum(column[:-1]) == pytest.approx(column[-1], abs=0.005 * len(column)), "each is rounded to 0.01"
    conditions, samples, sequences = (float(word.replace(",", "")) for word in rows[1].split()[-6:-3])
    assert conditions * samples == sequences == 57_000


def test_a_notebook_that_nobody_wrote_down_gets_a_question_mark_and_what_it_is_given():
    run = plan.Paper({"98_new": {"MODELS": ["internvl3-8b"]}, "99_newer": {"BENCHMARKS": ["mmstar", "vaw-mcq"]}})
    assert {item.name for item in run.items} == {*PAPER.models, *PAPER.benchmarks, "mmstar", "vaw-mcq"}
    text = plan.in_words(run, {}, None, 1000)
    assert [line.split() for line in text.splitlines() if line.startswith("98_new")] == [["98_new", *"?" * 9]]
    assert "vaw-mcq needs github.com/adobe-research/vaw_dataset" in text, "what the user brings is said"


def test_what_is_here_is_not_downloaded_and_tables_take_their_size_twice(monkeypatch, tmp_path):
    sizes = {item.name: item.gb for item in a_run().items}
    assert a_run().disk_gb == pytest.approx(sum(sizes.values()) + sizes["refcoco"])

    asked = {}
    monkeypatch.setattr(hub, "cached", lambda name, kind, revision: asked.update({name: revision}) or "Qwen2.5" in name)
    (tmp_path / "data/local/lmms-lab-encoder/RefCOCO").mkdir(parents=True)  # the second of its names
    run = a_run()
    statuses = {item.name: item.here for item in run.items}
    assert statuses["qwen2.5-vl-7b"] == "cached" and statuses["refcoco"] == "local copy"
    assert list(statuses.values()).count("") == 3
    pin = MODELS["qwen3-vl-8b"]
    assert asked[pin.source] == pin.revision, "another commit than the pinned one is none"
    assert run.disk_gb == pytest.approx(sum(sizes[m] for m in PAPER.models[1:]))
    text = plan.in_words(run, {}, None, 1000)
    assert text.count("to download") == 3 and "0.0 GB of tables are to be downloaded" in text


def test_disk_and_gpu_are_warned_about_only_when_too_small():
    run = a_run()
    least = max(low for low, _ in run.memory.values())

    def text(gpu, disk_gb: float) -> str:
        return plan.in_words(run, {}, gpu, disk_gb)

    assert "WARNING" not in text(None, 1000) and "GPU: not known here." in text(None, 1000)
    assert "WARNING" not in text(("A6000", 51.5), run.disk_gb + plan.SPARE_GB)
    assert "Disk: WARNING" in text(None, run.disk_gb + plan.SPARE_GB - 0.1)
    assert "GPU: WARNING, its memory is too small: T4 with 16.0 GB" in text(("T4", 16.0), 1000)
    assert "WARNING" not in text(("just enough", least), 1000)


def test_the_cost_table_needs_room_for_eager_attention_in_the_model_looked_at_closely():
    first, alone = a_run().memory, a_run(MODELS=["internvl3-8b"]).memory
    assert first["qwen2.5-vl-7b"][0] > plan.memory_gb("qwen2.5-vl-7b")[0] + 3
    assert first["internvl3-8b"] == plan.memory_gb("internvl3-8b")
    assert alone["internvl3-8b"][0] > plan.memory_gb("internvl3-8b")[0] + 15


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'NVIDIA RTX A6000, 49140'; echo 'Tesla T4, 15360'", ("NVIDIA RTX A6000", 49140 * 2**20 / 1e9)),
        ("echo 'No devices were found'", None),
        ("echo 'driver mismatch'; exit 9", None),
    ],
)
def test_nvidia_smi_is_read_or_not_known(script, found, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert plan.gpu_here() == found


@pytest.mark.parametrize("words", [["--profile", "paper", "--limit", "3"], ["02", "K=3"]])
def test_a_plan_needs_neither_torch_nor_the_network(words):
    code = """
import sys, importlib.machinery, socket
class Missing:  # like a package that is installed but cannot be loaded
    def find_spec(name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'transformers'): return importlib.machinery.ModuleSpec(name, Missing)
    def create_module(spec): raise ModuleNotFoundError(spec.name)
sys.meta_path.insert(0, Missing)
def refuse(*args, **kwargs): raise AssertionError(f'a plan tried to reach the network: {args}')
socket.socket.connect = socket.getaddrinfo = refuse
from vrhlib import notebooks
assert notebooks.main(['plan', *sys.argv[1:]]) == 0
assert 'torch' not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = {book for book in BOOKS if book in done.stdout}
    assert said == ({"02_design_space"} if "02" in words else set(BOOKS))


# ---------------------------------------------------------------- what stands in its way

GONE = {"refcoco": "refcoco: not on the Hub"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_gb": None}, "No CUDA device"),
        ({"gpu_gb": 20.0}, "qwen2.5-vl-7b needs 22.9 GB of GPU memory, and 20.0 GB are free"),
        ({"disk_gb": 73.0}, "77.7 GB of disk are needed, and 73.0 GB are free"),
        ({"refused": GONE}, "refcoco: not on the Hub"),
    ],
)
def test_each_precondition_alone_names_itself(changes, message):
    fine = {"refused": {}, "device": "cuda", "gpu_gb": 51.5, "disk_gb": 100.0}
    assert plan.obstacles(a_run(), **fine) == []
    (problem,) = plan.obstacles(a_run(), **fine | changes)
    assert message in problem and "\n" not in problem


def test_all_that_is_wrong_is_said_at_once():
    assert len(plan.obstacles(a_run(), GONE, "cuda", None, 1.0)) == 3


def test_another_device_that_was_asked_for_needs_no_gpu_and_a_second_gpu_is_one():
    assert plan.obstacles(a_run(), {}, "cpu", None, 100.0) == []
    assert len(plan.obstacles(a_run(), {}, "cuda:1", 10.0, 100.0)) == 1


def test_a_full_disk_does_not_matter_when_everything_is_here(monkeypatch):
    monkeypatch.setattr(hub, "cached", lambda name, kind, revision: True)
    assert plan.obstacles(a_run(), {}, "cuda", 51.5, 0.0) == []
    assert plan.unreachable(a_run().items) == {}, "and the Hub is not asked"


def test_the_hub_is_asked_for_all_at_once_and_one_of_several_names_is_enough(monkeypatch):
    together, revisions = threading.Barrier(5, timeout=20), {}

    def reachable(name, kind, revision):
        revisions[name] = revision
        if name != "lmms-lab-encoder/RefCOCO":
            together.wait()  # broken, and an error, unless four models and a table wait here
        return {"lmms-lab/RefCOCO": "moved", "Qwen/Qwen3-VL-8B-Instruct": "gated: accept its terms"}.get(name)

    monkeypatch.setattr(hub, "reachable", reachable)
    assert plan.unreachable(a_run().items) == {"qwen3-vl-8b": "qwen3-vl-8b: gated: accept its terms"}
    about = benchmarks.BENCHMARKS["refcoco"].about
    assert [revisions[name] for name in about.ids] == [about.revision, None], "a commit is one repository's"

    monkeypatch.setattr(hub, "reachable", lambda name, kind, revision: f"{name} does not answer")
    said = plan.unreachable(a_run().items)
    assert said.keys() == {*PAPER.models, "refcoco"}
    assert "lmms-lab/RefCOCO does not answer Or else: lmms-lab-encoder/RefCOCO does not answer" in said["refcoco"]


def test_what_is_no_repository_of_the_hub_is_left_to_its_reader():
    (item,) = plan.Paper({"99": {"BENCHMARKS": ["vaw-mcq"]}}).items[-1:]
    assert item.ids == () and plan.unreachable([item]) == {}
    assert plan.unreachable([replace(item, here="local copy")]) == {}


def test_check_asks_this_machine(monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "reachable", lambda *words: None)
    monkeypatch.setattr(plan, "free_disk_gb", lambda: 100.0)
    monkeypatch.setattr(plan, "free_gpu_gb", lambda device: asked.append(device))
    assert "No CUDA device" in plan.check(a_run())[0] and asked == ["cuda"]
    monkeypatch.setenv("VRHLIB_DEVICE", "cpu")
    assert plan.check(a_run()) == [] and asked == ["cuda"], "another device was asked for, so no GPU is looked for"


def test_a_gpu_is_looked_for_where_torch_would_find_it():
    assert (plan.free_gpu_gb("cuda") is None) != torch.cuda.is_available()
    assert plan.free_gpu_gb("cuda:99") is None


def test_more_heads_than_controls_can_match_are_refused_before_anything_runs():
    given = BOOKS["02_design_space"].parameters
    assert plan.work_of("02_design_space", "nano", given | {"K": 40})
    with pytest.raises(ValueError, match="K=41: controls need as many heads outside; nano-qwen2.5-vl has 80 in all"):
        plan.work_of("02_design_space", "nano", given | {"K": 41})
