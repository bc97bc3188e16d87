"""Slider and picker show stored results, live and as a picture."""

import base64
import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from vrhlib import figures, widgets
from vrhlib.boxes import Box
from vrhlib.design_space import KEYS, ONE_ROW, QUERIES, SAMPLES, WITH_NULL, SampleScores, Scoring
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.methods import PICKED

SCORES = HeadScores(np.random.default_rng(0).random((3, 4)), "output/sum/mean", "toy", 5)
PICTURE = ("the cat", Image.new("RGB", (60, 40), "white"), Box(5, 5, 20, 20))


def answers() -> pd.DataFrame:
    rows = [("unmasked", 0, None, 5.0, "correct"), ("random", 1, 0, 5.0, "correct"), ("random", 2, 0, 5.0, "correct")]
    rows += [("vrh", 1, None, 5.0, "correct"), ("vrh", 2, None, np.nan, "no box")]
    frame = pd.DataFrame(rows, columns=["condition", "k", "seed", "x0", "outcome"])
    return frame.assign(model="toy", id="a", y0=5.0, x1=frame.x0 + 15, y1=20.0)


def shown_png(view: widgets.View) -> bytes:
    return bytes(view._picture.value)


def view() -> widgets.View:
    figures.use_profile("nano")
    return widgets.ablation_slider({"toy": SCORES}, answers(), {"a": PICTURE})


def test_moving_the_slider_draws_another_picture():
    shown = view()
    before = shown_png(shown)
    shown._controls["k"].value = 1
    assert shown_png(shown) != before and shown_png(shown).startswith(b"\x89PNG")
    shown._controls["k"].value = 2
    assert shown_png(shown) == before


def test_headless_viewers_get_a_picture_beside_the_live_view():
    data, _ = view()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_k_zero_shows_the_unmasked_model_only():
    at_zero = answers()[lambda f: f.condition == "unmasked"]
    assert widgets._accuracies(at_zero) == {"unmasked": 100.0}
    shown = view()
    shown._controls["k"].value = 0
    assert shown_png(shown).startswith(b"\x89PNG")


def test_a_missing_box_stays_missing():
    assert widgets._box(answers(), "vrh", 2, "a") is None
    assert widgets._box(answers(), "vrh", 1, "a") == Box(5, 5, 20, 20)


def test_pictures_outside_the_sweep_are_refused():
    with pytest.raises(ValueError, match="None of the pictures"):
        widgets.ablation_slider({"toy": SCORES}, answers(), {"b": PICTURE})


# ---------------------------------------------------------------- the picker of the design space

GRID = (3, 4)
BESIDE = {"unmasked": (90.0, 80.0, 95.0), "random": (70.0, 60.0, 78.0)}
PLAIN = [q for q in QUERIES if q != "output_one"]


def captured(right: bool = True) -> SampleScores:
    """What a captured pass leaves of six samples on pictures, from random numbers in the range that each key has."""
    rng, values = np.random.default_rng(0), {}
    names = [(q, k, "any") for q in PLAIN for k in ("sum", "share", "max", "argmax", "argmax_visual")]
    names += [(q, "image_mass", "none") for q in PLAIN] + [(q, "sum_null", "any") for q in WITH_NULL]
    names += [("output_one(0)", k, "any") for k in ("sum", "argmax")]
    names += [(q, "spatial_entropy", "none") for q in ONE_ROW]
    for queries, keys, evidence in names:
        random = rng.random((6, *GRID))
        known = {"argmax": random > 0.5, "argmax_visual": random > 0.5, "spatial_entropy": -random}
        values[queries, keys, evidence] = known.get(keys, random)
    return SampleScores(
        values=values, model="toy", benchmark="toys", runs=("run",), ids=tuple("abcdef"),
        sizes={"any": np.arange(1, 7), "none": np.full(6, 20)}, right=np.arange(6) < 4 if right else None,
    )  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """What the picker had drawn, in order: the arguments of `figures.design_view`, or the reason in `refused`."""
    figures.use_profile("nano")
    seen = []
    for name in ("design_view", "refused"):

        def draw(*words, name=name):
            seen.append((name, words))
            return SimpleNamespace(png=lambda: b"\x89PNG %d" % len(seen))

        monkeypatch.setattr(widgets.figures, name, draw)
    return seen


def picker(measured=None, k: int = 3, scores: SampleScores | None = None) -> widgets.View:
    return widgets.scoring_picker(scores or captured(), k, measured or {}, BESIDE)


def pick(view: widgets.View, queries: str, keys: str, samples: str = "mean") -> bytes:
    return view._draw(queries=queries, keys=keys, samples=samples)


def test_every_combination_is_drawn_or_shows_its_reason(drawn):
    scores, view = captured(), picker()
    axes = {name: control.options for name, control in view._controls.items()}
    assert axes == {"queries": tuple(QUERIES), "keys": tuple(KEYS), "samples": tuple(SAMPLES)}
    can = {(q.split("(")[0], keys) for q, keys, _ in scores.points()}
    assert len(can) > 80 and ("output", "sum") in can and ("prompt", "sum_calibrated") in can
    for queries, keys, samples in itertools.product(*axes.values()):
        assert pick(view, queries, keys, samples).startswith(b"\x89PNG")
        kind, words = drawn[-1]
        assert kind == ("design_view" if (queries, keys) in can else "refused"), (queries, keys, samples)
        if kind == "design_view":
            assert words[0].scoring.startswith(queries) and words[0].values.shape == GRID and words[1] == 3
        else:
            assert len(words[0]) > 40, "a reason, not a name"


@pytest.mark.parametrize(
    ("queries", "keys", "samples", "reason"),
    [
        ("output", "spatial_entropy", "mean", "one map of one row; take queries prompt_last or expression_last"),
        ("output", "sum_calibrated", "mean", "only prompt rows compare with it"),
        ("prompt", "copy", "mean", "take queries 'output'"),
        ("output", "copy", "mean", "copying is defined for text only"),
        ("output_one", "share", "mean", "output_one(0) with share was not captured for toys"),
        ("output", "sum", "mean_success", "nobody knows which replies are right"),
    ],
)
def test_a_combination_that_cannot_be_read_off_shows_the_reason(drawn, queries, keys, samples, reason):
    pick(picker(scores=captured(right=False)), queries, keys, samples)
    kind, (text,) = drawn[-1]
    assert kind == "refused" and reason in text


def test_a_reason_is_a_picture_with_its_words():
    figures.use_profile("nano")
    shown = figures.refused("it costs $5, or $6, because " + "so " * 60 + "it is")
    assert shown.png().startswith(b"\x89PNG")
    (words,) = [text.get_text() for text in shown.canvas.texts if "costs" in text.get_text()]
    assert words.split() == shown.frame.text[0].split() and max(map(len, words.splitlines())) <= 100


@pytest.fixture(scope="module")
def live() -> widgets.View:
    figures.use_profile("nano")
    return picker()


@pytest.mark.parametrize("keys", [k for k in KEYS if k != "copy"])
def test_every_kind_of_score_can_be_drawn(live, keys):
    queries = next(q for q in ("output", "prompt_last") if any(p[:2] == (q, keys) for p in captured().points()))
    assert pick(live, queries, keys).startswith(b"\x89PNG")


def accuracies_of(words: tuple) -> dict:
    """The bars that `figures.design_view` was given."""
    return words[-1]


def test_a_measured_bar_is_found_by_the_set_of_heads_in_any_order(drawn):
    heads = captured().score(Scoring("expression", "share", "median")).top(3)
    turned = HeadSet(heads.heads[::-1], GRID)
    table = pd.DataFrame([("unmasked", 0, 9.0, 8, 10), ("mine", 3, 40.0, 30, 50), ("mine", 2, 55.0, 45, 65),
                          ("other", 3, 1.0, 0, 2)], columns=["condition", "k", "accuracy", "low", "high"])  # fmt: skip
    measured = widgets.cut_accuracies(table, {"mine": turned})
    assert measured == {frozenset(heads.heads): (40, 30, 50), frozenset(turned.top(2).heads): (55, 45, 65)}
    view = picker(measured)
    pick(view, "expression", "share", "median")
    bars = accuracies_of(drawn[-1][1])
    assert bars == {"unmasked": BESIDE["unmasked"], "this scoring": (40, 30, 50), "random": BESIDE["random"]}
    assert list(bars) == ["unmasked", "this scoring", "random"]
    pick(view, "output", "max", "median")
    other = captured().score(Scoring("output", "max", "median")).top(3)
    assert set(other) != set(heads) and accuracies_of(drawn[-1][1])["this scoring"] is None


def test_every_point_that_is_cut_for_the_picker_has_its_bar(drawn):
    points = captured().tops(PICKED, 3)
    assert len(points) == len(PICKED) == len(set(PICKED))
    rows = [(name, 3, float(i), float(i), float(i)) for i, name in enumerate(points)]
    table = pd.DataFrame(rows, columns=["condition", "k", "accuracy", "low", "high"])
    view = picker(widgets.cut_accuracies(table, points))
    for point in PICKED:
        pick(view, point.queries, point.keys, point.samples)
        bar = accuracies_of(drawn[-1][1])["this scoring"]
        assert bar is not None and points[rows[int(bar[0])][0]].mask().tolist() == points[str(point)].mask().tolist()


def test_a_named_method_is_called_by_its_name(drawn):
    view = picker()
    names = {("output", "sum"): "VRH", ("expression", "sum"): "VRH, queries turned", ("prompt_last", "share"): "VERA",
             ("output", "max"): ""}  # fmt: skip
    for (queries, keys), name in names.items():
        pick(view, queries, keys)
        scores, k, called, formula, _ = drawn[-1][1]
        assert called == name and str(QUERIES[queries]) in formula and str(KEYS[keys]) in formula


def bar_words(shown: figures.Figure) -> list[str]:
    return [text.get_text() for axes in shown.canvas.axes for text in axes.texts]


def test_what_was_not_measured_says_so(monkeypatch):
    shown, draw = [], figures.design_view
    monkeypatch.setattr(widgets.figures, "design_view", lambda *words: shown.append(draw(*words)) or shown[-1])
    picker()
    assert bar_words(shown[-1]).count("not measured") == 1
    picker({frozenset(captured().score(Scoring("output", "sum")).top(3).heads): (40.0, 30.0, 50.0)})
    words = bar_words(shown[-1])
    assert "not measured" not in words and {"90.0", "40.0", "70.0"} <= set(words)


def test_the_picker_starts_at_vrh_moves_and_carries_a_picture(drawn):
    view = picker()
    assert {axis: control.value for axis, control in view._controls.items()} == {
        "queries": "output", "keys": "sum", "samples": "mean"
    }  # fmt: skip
    before = shown_png(view)
    view._controls["keys"].value = "copy"
    assert drawn[-1][0] == "refused" and shown_png(view) != before
    data, _ = view._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]) == shown_png(view)
    assert "application/vnd.jupyter.widget-view+json" in data
