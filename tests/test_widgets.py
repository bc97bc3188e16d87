"""Views show what was stored or what a function answers: every control, what is missing, what went wrong, and a picture
for those who cannot run them. Toy data throughout: no model, and no torch."""

import base64
import html
import io
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import anywidget
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from vrhlib import figures, widgets
from vrhlib.boxes import Box, TokenGrid
from vrhlib.design_space import KEYS, ONE_ROW, QUERIES, SAMPLES, WITH_NULL, SampleScores, Scoring
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.methods import PICKED
from vrhlib.widgets import canvases, view

GRID = (3, 4)
SCORES = HeadScores(np.arange(12.0).reshape(GRID) / 10, "output/sum/mean", "toy", 5)  # ranks L2H3, L2H2, L2H1, ...
ONE, TWO, OTHER, FAR = Box(5, 5, 20, 20), Box(6, 5, 21, 20), Box(30, 5, 45, 20), Box(40, 25, 58, 38)
CAT, DOG = Image.new("RGB", (60, 40), "white"), Image.new("RGB", (80, 50), "navy")
MASK = np.zeros((40, 60), bool)
MASK[5:20, 30:45] = True
GONE = (np.nan,) * 4


@pytest.fixture(autouse=True)
def fresh():
    """Nobody has moved anything yet."""
    figures.use_profile("nano")
    for left in view._LEFT.values():
        left.clear()


def traits(widget) -> dict:
    """What a canvas shows."""
    names = set(widget.trait_names(sync=True)) - set(anywidget.AnyWidget.class_trait_names())
    return {name: getattr(widget, name) for name in names if name[0] != "_"}


def changed(widget, before: dict) -> set[str]:
    return {name for name, value in traits(widget).items() if value != before[name]}


def boxes_of(picture: canvases.Picture) -> dict:
    """Name to (label, box)."""
    return {box["name"]: (box["label"], box["box"]) for box in picture.boxes}


def button(shown: widgets.view.View, words: str):
    """The button that says so, wherever in the view."""
    found, waiting = [], [shown]
    while waiting:
        one = waiting.pop()
        waiting += getattr(one, "children", ())
        found += [one] if getattr(one, "description", None) == words else []
    (only,) = found
    return only


def alert(words: str) -> str:
    """An error as a view shows it."""
    return f'<div role="alert" class="vrh-error">{html.escape(words)}</div>'


def text_of(words: str) -> str:
    """What a reader reads of a piece of HTML."""
    return html.unescape(re.sub("<br>", "\n", re.sub("<(?!br)[^>]*>", "", words)))


# ---------------------------------------------------------------- explorer

_OUTCOMES = {"x": "correct", "-": "wrong box", "?": "no box"}


def replies(said: str, condition: str, k: int, seed=None, model="toy", benchmark="scenes", ids="abcd", **more):
    """Rows as `evaluate.replies` has them: a sign a sample; x correct, - wrong box, ? no box."""
    known = {"x": TWO, "-": OTHER, "?": GONE}
    rows = [
        dict(zip(("x0", "y0", "x1", "y1"), known[sign])) | {"id": name, "outcome": _OUTCOMES[sign]}
        for name, sign in zip(ids, said)
    ]
    frame = pd.DataFrame(rows).assign(condition=condition, k=k, seed=seed, model=model, benchmark=benchmark, **more)
    return frame.astype({"seed": "Int64"})


def answers(*more: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([
        replies("xxx-", "unmasked", 0), replies("xx-?", "vrh", 1), replies("?--?", "vrh", 2),
        replies("xxx-", "random", 1, 0), replies("xx--", "random", 1, 1), replies("xxxx", "random", 2, 0),
        replies("x", "unmasked", 0, benchmark="documents", ids="e"),
        replies("-", "vrh", 1, benchmark="documents", ids="e"),
        replies("x-", "unmasked", 0, model="other", ids="ab"), replies("--", "vrh", 1, model="other", ids="ab"), *more,
    ], ignore_index=True)  # fmt: skip


PICTURES = {"a": ("the cat", CAT, ONE), "b": ("the dog", DOG, ONE), "e": ("the <i>word</i>", DOG, OTHER)}


def explorer(run=None, rows: pd.DataFrame | None = None, pictures=None) -> widgets.view.View:
    scores = {"toy": SCORES, "other": SCORES}
    return widgets.explorer(scores, answers() if rows is None else rows, pictures or PICTURES, run)


def test_the_explorer_starts_at_the_longest_cut_and_knows_what_is_stored():
    shown = explorer()
    options = [shown._model.options, shown._benchmark.options, shown._seed.options]
    assert options == [("toy", "other"), ("scenes", "documents"), (0, 1)]
    assert shown._condition.options == (("VRH", "vrh"), ("random heads", "random"))
    assert shown._k.value == shown._k.max == 2 and shown._curve.at == 2
    assert [name for _, name in shown._sample.options] == ["a", "b"], "e was not asked on this benchmark"
    assert shown._live.disabled and not shown._live.value


def test_sliding_k_shows_accuracy_outcomes_and_the_box_at_that_k():
    shown = explorer()
    at = {}
    for k in (1, 0, 2):
        shown._k.value = k
        at[k] = shown._curve.value, shown._curve.outcomes, boxes_of(shown._picture)
    before = {"referent": ("referent", list(ONE)), "unmasked": ("reply, unmasked", list(TWO))}
    assert at[0] == (75, {"correct": 75, "wrong box": 25}, before)
    cut = before | {"reply": ("reply, 1 heads cut", list(TWO))}
    assert at[1] == (50, {"correct": 50, "wrong box": 25, "no box": 25}, cut)
    assert at[2] == (0, {"no box": 50, "wrong box": 50}, before | {"reply": ("reply, 2 heads cut", None)})


def test_sliding_k_leaves_all_else_as_it_is():
    shown = explorer()
    curve, picture = traits(shown._curve), traits(shown._picture)
    shown._k.value = 1
    assert changed(shown._curve, curve) == {"at", "value", "outcomes", "label"}
    assert changed(shown._picture, picture) == {"boxes", "label"}
    assert shown._curve.label == (
        "toy on scenes: accuracy by number of ablated heads; at k=1 50.0 percent right, n=4"
    )  # fmt: skip


def test_accuracies_carry_their_wilson_intervals():
    (line,) = explorer()._curve.series
    assert (line["name"], line["label"], line["dash"]) == ("vrh", "VRH", "")
    want = [[0, 75, 30.06, 95.44], [1, 50, 15.0, 85.0], [2, 0, 0, 48.99]]  # Wilson (1927) at 3, 2 and 0 of 4, z=1.96
    assert np.allclose(line["points"], want, atol=0.01)


def test_random_heads_have_a_band_where_there_are_several_seeds_and_a_line_of_the_one_chosen():
    shown = explorer()
    assert shown._curve.band == {"label": "random heads, range of 2 seeds", "points": [[1, 50, 62.5, 75]]}
    assert shown._seed.disabled, "top heads have no seed"
    shown._condition.value = "random"
    assert not shown._seed.disabled and shown._curve.value == 100
    lines = {line["label"]: [p[:2] for p in line["points"]] for line in shown._curve.series}
    assert lines == {"VRH": [[0, 75], [1, 50], [2, 0]], "random heads, seed 0": [[0, 75], [1, 75], [2, 100]]}
    picture = traits(shown._picture)
    shown._k.value, shown._seed.value = 1, 1
    assert shown._curve.value == 50 and shown._curve.series[1]["label"] == "random heads, seed 1"
    assert [p[:2] for p in shown._curve.series[1]["points"]] == [[0, 75], [1, 50]]
    assert changed(shown._picture, picture) == {"boxes"}, "its words differ, its boxes do not"


def test_at_k_zero_the_lines_stay_those_of_the_controls():
    uniform = replies("x---", "vrh", 2, ablation="uniform", phase="all")
    shown = explorer(rows=answers().assign(ablation="zero", phase="all").pipe(lambda f: pd.concat([f, uniform])))
    shown._condition.value, shown._seed.value, shown._k.value = "random", 1, 1
    before = shown._curve.series
    shown._k.value = 0
    assert shown._curve.series == before and shown._curve.value == 75
    shown._condition.value, shown._ablation.value = "vrh", "uniform"
    assert [p[:2] for p in shown._curve.series[0]["points"]] == [[0, 75], [2, 25]]


def test_kind_and_phase_are_points_of_their_own():
    more = [replies("x---", "vrh", 2, ablation="uniform", phase="all"),
            replies("xx--", "vrh", 2, ablation="zero", phase="decode")]  # fmt: skip
    shown = explorer(rows=pd.concat([answers().assign(ablation="zero", phase="all"), *more]))
    seen = {}
    for kind, phase in itertools.product(("zero", "uniform"), ("all", "decode")):
        shown._ablation.value, shown._phase.value = kind, phase
        seen[kind, phase] = shown._curve.value
    assert seen == {("zero", "all"): 0, ("uniform", "all"): 25, ("zero", "decode"): 50, ("uniform", "decode"): None}


def test_another_picture_leaves_the_curve_alone():
    shown = explorer()
    curve, picture = traits(shown._curve), traits(shown._picture)
    shown._sample.value = "b"
    assert not changed(shown._curve, curve)
    assert changed(shown._picture, picture) == {"image", "size", "boxes", "caption", "label"}
    assert shown._picture.size == [80, 50] and shown._picture.caption == "the dog"
    assert pixels(shown._picture.image).tolist() == np.asarray(DOG).tolist()
    assert boxes_of(shown._picture)["reply"] == ("reply, 2 heads cut", list(OTHER))


def test_a_missing_box_stays_missing_and_is_said():
    shown = explorer()
    assert boxes_of(shown._picture)["reply"][1] is None
    assert shown._picture.label.endswith("and the boxes replied; no box in: reply, 2 heads cut")
    shown._k.value = 1
    assert boxes_of(shown._picture)["reply"][1] == list(TWO) and "no box" not in shown._picture.label


def test_another_benchmark_has_pictures_of_its_own():
    shown = explorer()
    shown._k.value = 1
    shown._benchmark.value = "documents"
    assert [name for _, name in shown._sample.options] == ["e"] and shown._sample.value == "e"
    assert (shown._curve.title, shown._curve.value, shown._curve.outcomes) == (
        "toy on documents",
        0,
        {"wrong box": 100},
    )
    assert shown._picture.caption == "the <i>word</i>", "a canvas takes text, not HTML"
    shown._benchmark.value = "scenes"
    assert shown._sample.value == "a" and shown._curve.value == 50


def test_another_model_has_a_curve_of_its_own():
    shown = explorer()
    shown._k.value, shown._model.value = 1, "other"
    assert (shown._curve.title, shown._curve.value, shown._curve.band) == ("other on scenes", 0, None)
    assert [p[:2] for p in shown._curve.series[0]["points"]] == [[0, 50], [1, 0]]


def test_a_k_that_was_not_measured_says_what_is_stored_and_the_next_step():
    shown = explorer(rows=answers(replies("----", "vrh", 4)))
    shown._k.value = 3
    assert text_of(shown._status.value) == (
        "k=3 was not measured here (stored: k = 1, 2, 4); hand `run=live.sweeping(...)` to compute it."
    )
    assert shown._curve.value is None and not shown._curve.outcomes and shown._curve.note == "not measured here"
    assert set(boxes_of(shown._picture)) == {"referent", "unmasked"} and shown._curve.at == 3
    assert "at k=3 not measured" in shown._curve.label
    shown._phase.value = "decode"
    assert "(nothing of this kind is stored)" in shown._status.value
    shown._phase.value, shown._k.value = "all", 4
    assert not shown._status.value and shown._curve.value == 0


class Model:
    """What `live.sweeping` would return, with a note of what it was asked and of what the view said meanwhile."""

    def __init__(self, said: str = "x--?"):
        self.said, self.asked, self.words, self.error = said, [], [], None

    def __call__(self, *, tell, **asked):
        self.asked.append(asked)
        self.words.append(text_of(self.shown._status.value))
        tell(1, 3)
        self.words.append(text_of(self.shown._status.value))
        if self.error:
            raise self.error
        found = replies(self.said, asked["condition"], asked["k"], asked["seed"], asked["model"], asked["benchmark"])
        plain = replies("xxx-", "unmasked", 0, None, asked["model"], asked["benchmark"])
        return pd.concat([plain, found]).assign(ablation=asked["kind"], phase=asked["phase"])


def live(**more) -> tuple[widgets.view.View, Model]:
    model = Model(**more)
    model.shown = explorer(run=model)
    return model.shown, model


def test_where_a_model_answers_a_point_is_asked_for_once_and_progress_is_told():
    shown, model = live()
    assert shown._k.max == 16 and {"layer_matched"} < {c for _, c in shown._condition.options}
    shown._k.value = 5
    assert not model.asked and "turn on `run live` to compute it" in shown._status.value
    shown._live.value = True
    asked = dict(model="toy", benchmark="scenes", condition="vrh", k=5, seed=None, kind="zero", phase="all")
    assert model.asked == [asked]
    assert model.words == ["toy, k=5: running", "toy, k=5: batch 1 of 3"]
    assert shown._curve.value == 25 and text_of(shown._status.value) == "toy, k=5: computed and stored"
    assert [p[:2] for p in shown._curve.series[0]["points"]][-1] == [5, 25]
    shown._k.value = 1
    shown._k.value = 5
    shown._sample.value = "b"
    assert len(model.asked) == 1 and shown._curve.value == 25
    shown._condition.value, shown._seed.value = "random", 1
    shown._ablation.value, shown._phase.value = "mean", "decode"
    assert model.asked[-1] == asked | {"condition": "random", "seed": 1, "kind": "mean", "phase": "decode"}


def test_what_is_stored_is_never_asked_for():
    shown, model = live()
    shown._live.value = True
    for k in (0, 1, 2):
        shown._k.value = k
    assert not model.asked


def test_a_model_is_asked_for_the_unmasked_replies_where_even_these_are_missing():
    model = Model()
    model.shown = explorer(run=model, rows=replies("xx--", "vrh", 2))
    assert set(boxes_of(model.shown._picture)) == {"referent", "reply"}
    model.shown._live.value, model.shown._k.value = True, 0
    want = dict(model="toy", benchmark="scenes", condition="unmasked", k=0, seed=None, kind="zero", phase="all")
    assert model.asked == [want] and model.shown._curve.value == 75


def test_an_error_is_shown_leaves_the_picture_and_goes_with_the_next_good_move():
    shown, model = live()
    shown._live.value, model.error = True, ValueError("<b>no</b> & no")
    curve, picture = traits(shown._curve), traits(shown._picture)
    shown._k.value = 6
    assert shown._error.value == alert("<b>no</b> & no") and "<b>" not in shown._error.value
    assert not shown._status.value, "nothing is running any more"
    assert not changed(shown._curve, curve) and not changed(shown._picture, picture)
    shown._k.value = 1
    assert not shown._error.value and shown._curve.value == 50
    model.error = RuntimeError()
    shown._k.value = 6
    assert shown._error.value == alert("RuntimeError"), "an error without words has a name"


def test_nothing_but_unmasked_replies_is_something_to_show():
    shown = explorer(rows=replies("xx--", "unmasked", 0))
    assert shown._curve.value == 50 and shown._condition.value is None and shown._k.max == 0


@pytest.mark.parametrize("pictures", [{"z": PICTURES["a"]}, {}])
def test_pictures_outside_the_sweep_are_refused(pictures):
    with pytest.raises(ValueError, match="None of the pictures is among the answered samples; pass samples of the"):
        widgets.explorer({"toy": SCORES}, answers(), pictures)


# ---------------------------------------------------------------- knock-outs


class Answers:
    """A reply that follows the heads: x0 moves by one pixel a head; without L2H3 and L0H0 together there is no box."""

    def __init__(self):
        self.asked, self.error = [], None

    def __call__(self, name: str, heads: HeadSet) -> dict:
        self.asked.append((name, [str(h) for h in heads]))
        if self.error and len(heads):
            raise self.error
        box = GONE if {"L2H3", "L0H0"} <= set(self.asked[-1][1]) else (5 + len(heads), 5, 20, 20)
        right = {"text": f"<b>{name}</b> [{len(heads)}]", "iou": 0.0 if box is GONE else 1 - len(heads) / 10}
        outcome = "no box" if box is GONE else "correct"
        return dict(zip(Box._fields, box)) | right | {"outcome": outcome, "seconds": 0.25 * len(heads)}


ASKED = {"a": ("the cat", CAT, ONE), "b": ("the <i>dog</i>", DOG, OTHER)}


def knockout(answer=None, k: int = 2, published=None, pictures=ASKED) -> widgets.view.View:
    return widgets.knockout(SCORES, pictures, answer or Answers(), k, published)


def test_the_map_has_all_scores_and_the_top_heads_are_out_at_first():
    listed = HeadSet(((1, 1), (2, 3)), GRID, "paper")
    heads = knockout(published=listed)._map
    assert heads.grid == [3, 4] and heads.scores == SCORES.values.ravel().tolist()
    assert heads.chosen == [[2, 3], [2, 2]] and heads.published == {"L1H1": 1, "L2H3": 2}
    assert heads.label == "toy: score of every head, layers by heads; choose heads to knock out"
    assert knockout(k=0)._map.chosen == [] and knockout()._map.published == {}


def test_clicking_heads_asks_for_exactly_these_and_shows_the_reply():
    answer = Answers()
    shown = knockout(answer)
    heads, picture = traits(shown._map), traits(shown._picture)
    answer.asked.clear()
    shown._map.chosen = [[2, 2], [1, 1], [0, 0]]
    assert answer.asked == [("a", []), ("a", ["L2H2", "L1H1", "L0H0"])]
    assert changed(shown._map, heads) == {"chosen"} and changed(shown._picture, picture) == {"boxes", "label"}
    assert boxes_of(shown._picture) == {
        "referent": ("referent", list(ONE)), "unmasked": ("reply, unmasked", [5, 5, 20, 20]),
        "reply": ("reply, 3 heads knocked out", [8, 5, 20, 20]),
    }  # fmt: skip
    assert shown._picture.label == "picture for “the cat”; without L2H2, L1H1, L0H0: IoU 0.70, correct"
    said = text_of(shown._reply.value)
    assert said == "without L2H2, L1H1, L0H0\n<b>a</b> [3]\nIoU 0.70, correct · 0.75 s"
    assert "&lt;b&gt;a&lt;/b&gt;" in shown._reply.value, "a reply is text, not HTML"
    shown._map.chosen = [[1, 1]]
    assert boxes_of(shown._picture)["reply"] == ("reply, 1 head knocked out", [6, 5, 20, 20])


def test_without_a_head_out_there_is_the_unmasked_reply_alone():
    shown = knockout()
    button(shown, "none").click()
    assert shown._map.chosen == [] and set(boxes_of(shown._picture)) == {"referent", "unmasked"}
    assert text_of(shown._reply.value) == "without no head\n<b>a</b> [0]\nIoU 1.00, correct"


def test_a_reply_without_a_box_has_none():
    shown = knockout()
    shown._map.chosen = [[2, 3], [0, 0]]
    assert boxes_of(shown._picture)["reply"] == ("reply, 2 heads knocked out", None)
    assert "IoU 0.00, no box" in shown._picture.label


def test_another_picture_is_asked_about_with_the_same_heads():
    answer = Answers()
    shown = knockout(answer)
    heads, picture = traits(shown._map), traits(shown._picture)
    answer.asked.clear()
    shown._sample.value = "b"
    assert answer.asked == [("b", []), ("b", ["L2H3", "L2H2"])] and not changed(shown._map, heads)
    assert changed(shown._picture, picture) == {"image", "size", "caption", "boxes", "label"}
    assert shown._picture.caption == "the <i>dog</i>" and shown._picture.size == [80, 50]


def test_top_k_and_random_k_put_out_as_many_as_the_slider_says():
    shown = knockout()
    before = traits(shown._map)
    shown._k.value = 3
    assert not changed(shown._map, before), "the slider alone moves no head"
    button(shown, "top k").click()
    assert shown._map.chosen == [[2, 3], [2, 2], [2, 1]]
    drawn = []
    for _ in range(3):
        button(shown, "random k").click()
        drawn.append(shown._map.chosen)
    assert drawn == [[list(h) for h in SCORES.controls(3, seed)] for seed in range(3)]
    assert len({str(heads) for heads in drawn}) == 3 and not any([2, 3] in heads for heads in drawn)


def test_more_random_heads_than_there_are_outside_the_top_are_refused_in_words():
    shown = knockout()
    shown._k.value = 9
    before = traits(shown._map) | traits(shown._picture)
    button(shown, "random k").click()
    assert "Asked for 9 control heads, but only 3 of 12 lie outside" in shown._error.value
    assert traits(shown._map) | traits(shown._picture) == before
    button(shown, "top k").click()
    assert not shown._error.value and len(shown._map.chosen) == 9


def test_an_unknown_reply_is_an_error_below_and_nothing_old_stands_there():
    answer = Answers()
    shown = knockout(answer)
    answer.error = LookupError("<b>unknown</b>")
    shown._map.chosen = [[1, 1]]
    assert shown._error.value == alert("<b>unknown</b>")
    assert set(boxes_of(shown._picture)) == {"referent", "unmasked"} and not shown._reply.value
    assert shown._picture.label == "picture for “the cat”; without L1H1: no reply"
    data, _ = shown._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG"), "the view can be shown again all the same"
    answer.error = None
    shown._map.chosen = [[1, 2]]
    assert not shown._error.value and "reply" in boxes_of(shown._picture)


def test_knocking_out_needs_a_picture():
    with pytest.raises(ValueError, match="No pictures to ask about: pass some samples"):
        knockout(pictures={})


def test_a_published_list_of_another_grid_is_refused():
    with pytest.raises(ValueError, match="belongs to a model of 4 layers x 3 heads, not 3 x 4"):
        knockout(published=HeadSet(((0, 0),), (4, 3), "theirs"))


SETS = {"vrh": SCORES.top(2), "random 0": SCORES.controls(2, 0), "layer_matched 0": HeadSet(((0, 3), (0, 2)), GRID)}


def stored() -> pd.DataFrame:
    """Replies to one sample, as a sweep over SETS leaves them, each with its condition as its text."""
    points = [("unmasked", 0, None, ONE), ("vrh", 1, None, TWO), ("vrh", 2, None, GONE), ("random", 1, 0, ONE),
              ("random", 2, 0, ONE), ("another", 1, None, FAR)]  # fmt: skip
    rows = [dict(zip(Box._fields, box)) | {"condition": c, "k": k, "seed": seed, "text": f"{c} {k}"}
            for c, k, seed, box in points]  # fmt: skip
    return pd.DataFrame(rows).assign(id="a", iou=0.5, outcome="correct").astype({"seed": "Int64"})


def test_recorded_replies_are_found_by_the_set_of_heads_in_any_order():
    answer = widgets.recorded(stored(), SETS)
    top, drawn = SETS["vrh"], SETS["random 0"]
    known = {"unmasked 0": (), "vrh 1": top.heads[:1], "vrh 2": top.heads[::-1], "random 1": drawn.heads[:1],
             "random 2": drawn.heads}  # fmt: skip
    assert {text: answer("a", HeadSet(heads, GRID))["text"] for text, heads in known.items()} == {t: t for t in known}
    assert Box.of(answer("a", top)) is None and Box.of(answer("a", drawn)) == ONE
    by_float = widgets.recorded(stored().astype({"seed": float}), SETS)  # as a CSV gives it back
    assert by_float("a", drawn)["text"] == "random 2"


@pytest.mark.parametrize(
    ("name", "heads"),
    [("a", ((0, 0),)), ("a", ((0, 3),)), ("a", tuple(SCORES.top(3))), ("b", tuple(SCORES.top(1)))],
    ids=["another head", "a set without replies", "more heads", "another sample"],
)
def test_replies_that_were_not_recorded_are_refused_with_the_next_step(name, heads):
    words = rf"exactly these {len(heads)} heads; stored are the top k and random k for k of 0, 1, 2\. Load a model"
    with pytest.raises(LookupError, match=words):
        widgets.recorded(stored(), SETS)(name, HeadSet(heads, GRID))


def test_recorded_replies_are_enough_to_play_with():
    shown = knockout(widgets.recorded(stored(), SETS), pictures={"a": ASKED["a"]})
    assert "vrh 2" in shown._reply.value and boxes_of(shown._picture)["reply"][1] is None
    button(shown, "random k").click()
    assert "random 2" in shown._reply.value and not shown._error.value
    button(shown, "random k").click()
    assert "No stored reply without exactly these 2 heads" in shown._error.value
    button(shown, "none").click()
    assert "unmasked 0" in shown._reply.value and not shown._error.value


def test_recorded_replies_need_no_torch():
    script = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        "from tests import test_widgets as toys\n"
        "shown = toys.knockout(toys.widgets.recorded(toys.stored(), toys.SETS), pictures={'a': toys.ASKED['a']})\n"
        "shown._map.chosen = [[2, 3]]\n"
        "assert 'vrh 1' in shown._reply.value and shown._repr_mimebundle_()[0]['image/png']\n"
        "print('played')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout == "played\n", done.stderr


# ---------------------------------------------------------------- stepper

TOKENS = TokenGrid.regular(2, 3, (60, 40))  # cells of 20 x 20: ONE lies in the first alone


def attention(many: int, **heads: dict[tuple[int, int], float]) -> np.ndarray:
    """[layers, heads, tokens, image tokens], zero but for L2H3={(token, image token): attention}."""
    made = np.zeros((*GRID, many, 6))
    for name, values in heads.items():
        layer, head = map(int, name[1:].split("H"))
        for at, value in values.items():
            made[(layer, head, *at)] = value
    return made


CLOSE = SimpleNamespace(
    sample=SimpleNamespace(text="the cat", image=CAT, box=ONE, task="locate"), grid=TOKENS, tokens=("[", "5"),
    reply=SimpleNamespace(box=TWO),
    attention=attention(2, L2H3={(1, 0): 0.5}, L2H2={(1, 0): 0.25, (1, 5): 0.25}, L0H0={(0, 3): 0.8},
                        L0H1={(0, 1): 0.2}),
)  # fmt: skip
COUNT = SimpleNamespace(
    sample=SimpleNamespace(text="how many?", image=DOG, box=None, task="answer"), tokens=("two",),
    grid=TokenGrid.regular(3, 2, (80, 50)), reply=SimpleNamespace(box=None),
    attention=attention(1, L2H3={(0, 5): 0.125}),
)  # fmt: skip


def stepper(looks=None, k: int = 1) -> widgets.view.View:
    return widgets.stepper(looks or {"1: the cat": CLOSE, "2: how many?": COUNT}, SCORES, k)


def maps_of(steps: canvases.Stepper) -> np.ndarray:
    """uint8 [sets, tokens, rows, cols]."""
    return np.frombuffer(steps.maps, np.uint8).reshape(len(steps.sets), len(steps.tokens), *steps.grid)


def test_maps_are_attention_over_the_peak_of_their_set():
    steps = stepper()._steps
    assert steps.sets == ["all heads", "top 1", "all but the top 1"] and steps.shown == "top 1"
    assert np.allclose(steps.peaks, [0.8, 0.5, 0.8])
    quarter, most = round(255 * 0.25 / 0.8), round(255 * 0.75 / 0.8)
    assert maps_of(steps).tolist() == [
        [[[0, 64, 0], [255, 0, 0]], [[most, 0, 0], [0, 0, quarter]]],
        [[[0, 0, 0], [0, 0, 0]], [[255, 0, 0], [0, 0, 0]]],
        [[[0, 64, 0], [255, 0, 0]], [[quarter, 0, 0], [0, 0, quarter]]],
    ]


def test_mass_is_the_attention_on_the_referents_tokens():
    steps = stepper()._steps
    assert steps.mass == [[0, 0.75], [0, 0.5], [0, 0.25]] and steps.evidence == [[0, 0]]
    assert steps.step == 1, "the view starts where the top heads look at the referent"
    assert [box["name"] for box in steps.boxes] == ["referent", "unmasked"]
    assert [box["box"] for box in steps.boxes] == [list(ONE), list(TWO)]


def test_another_k_makes_other_sets_and_leaves_the_picture():
    shown = stepper()
    steps, heads = traits(shown._steps), traits(shown._map)
    shown._k.value = 2
    assert changed(shown._steps, steps) == {"sets", "maps", "peaks", "mass", "shown"}
    assert not changed(shown._map, heads)
    assert shown._steps.sets == ["all heads", "top 2", "all but the top 2"] and shown._steps.shown == "top 2"
    assert np.allclose(shown._steps.peaks, [0.8, 0.75, 0.8]) and shown._steps.mass == [[0, 0.75], [0, 0.75], [0, 0]]
    assert maps_of(shown._steps)[1, 1].tolist() == [[255, 0, 0], [0, 0, 85]]
    shown._k.value = 0
    assert shown._steps.sets == ["all heads"] == [shown._steps.shown]


def test_a_clicked_head_is_shown_alone_and_the_last_one_only():
    shown = stepper()
    shown._map.chosen = [[0, 0]]
    assert shown._steps.sets[3:] == ["L0H0"] == [shown._steps.shown]
    assert maps_of(shown._steps)[3].tolist() == [[[0, 0, 0], [255, 0, 0]], [[0, 0, 0], [0, 0, 0]]]
    assert shown._steps.peaks[3] == 0.8 and shown._steps.mass[3] == [0, 0]
    shown._map.chosen = [[0, 0], [2, 2]]
    assert shown._map.chosen == [[2, 2]] and shown._steps.sets[3:] == ["L2H2"] == [shown._steps.shown]
    assert shown._steps.mass[3] == [0, 0.25]
    shown._map.chosen = []
    assert len(shown._steps.sets) == 3 and shown._steps.shown == "top 1"


def test_a_head_without_attention_is_dark_and_no_division_by_zero():
    shown = stepper()
    shown._map.chosen = [[1, 1]]
    assert not maps_of(shown._steps)[3].any() and 0 < shown._steps.peaks[3] < 1e-6


def test_stepping_and_choosing_a_set_need_nothing_from_python():
    shown = stepper()
    before = traits(shown._steps)
    shown._steps.step = 0
    shown._steps.shown = "all heads"
    assert changed(shown._steps, before) == {"step", "shown"}


def test_another_picture_has_its_tokens_and_a_question_no_box():
    shown = stepper()
    shown._look.value = "2: how many?"
    steps = shown._steps
    assert steps.tokens == ["two"] and steps.step == 0, "the nearest token that there is"
    assert steps.size == [80, 50] and steps.grid == [3, 2] and steps.shown == "top 1"
    assert steps.boxes == [] == steps.evidence and steps.mass == [[None]] * 3
    assert maps_of(steps)[1, 0].tolist() == [[0, 0], [0, 0], [0, 255]] and "how many?" in steps.label
    shown._look.value = "1: the cat"
    assert steps.tokens == ["[", "5"] and steps.evidence == [[0, 0]]


def test_a_reply_without_a_box_is_named_without_one():
    lost = SimpleNamespace(**vars(CLOSE) | {"reply": SimpleNamespace(box=None)})
    assert stepper({"x": lost})._steps.boxes[1] == {"name": "unmasked", "label": "reply", "box": None}


def test_a_step_that_fails_is_said_and_done_again_at_the_next_move():
    shown = stepper()
    before = traits(shown._steps)
    broken = SimpleNamespace(**vars(COUNT) | {"tokens": None})
    shown._looks["2: how many?"] = broken
    shown._look.value = "2: how many?"
    assert 'role="alert"' in shown._error.value
    shown._looks["2: how many?"] = COUNT
    shown._steps.shown = "all heads"
    assert not shown._error.value and shown._steps.tokens == ["two"] != before["tokens"]


def test_nothing_to_step_through_is_refused():
    with pytest.raises(ValueError, match=r"No close-ups to step through: pass scoring.close_up\(vlm, sample\)"):
        widgets.stepper({}, SCORES, 1)


def test_a_close_up_of_another_grid_is_refused():
    other = SimpleNamespace(**vars(CLOSE) | {"attention": np.zeros((4, 3, 2, 6))})
    with pytest.raises(ValueError, match=r"x: a close-up of another model than toy, whose grid is \(3, 4\)"):
        stepper({"fine": CLOSE, "x": other})


# ---------------------------------------------------------------- steering


class Pointing:
    """A model whose box follows two heads or more, and goes nowhere at FAR."""

    def __init__(self):
        self.asked, self.error = [], None

    def __call__(self, name: str, i: int, heads: HeadSet, phase: str) -> dict:
        self.asked.append((name, i, [str(h) for h in heads], phase))
        if self.error and i >= 0:
            raise self.error
        at = SCENES[name][3][i][1] if i >= 0 else None
        box = ONE if i < 0 or len(heads) < 2 else GONE if at == FAR else at
        hit = i < 0 or box == at
        said = {"text": f"<b>{name}</b> {i}", "iou": float(hit), "outcome": "correct" if hit else "wrong box"}
        return dict(zip(Box._fields, box)) | said


SCENES = {
    "a": ("the cat", CAT, ONE, [("cat", TWO, None), ("<i>tree</i>", OTHER, MASK), ("car", FAR, None)]),
    "b": ("the dog", DOG, ONE, [("dog", ONE, None)]),
}


def rates(*rows: tuple, **more) -> pd.DataFrame:
    """As `steering.success` returns them: condition, k, seed, rate, low, high."""
    columns = ["condition", "k", "seed", "rate", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype({"seed": "Int64"}).assign(n=40, model="toy", **more)


COUNTED = rates(("unmasked", 0, None, 2.0, 0.0, 5.0), ("vrh", 1, None, 20.0, 9.0, 31.0), ("vrh", 2, None, 60.0, 50, 70),
                ("random", 2, 0, 4.0, 1, 8), ("random", 2, 1, 6.0, 2, 9))  # fmt: skip


def steering(answer=None, k: int = 2, known: pd.DataFrame | None = None, count=None, pictures=SCENES):
    return widgets.steering(SCORES, pictures, answer or Pointing(), k, known, count)


def test_pointing_starts_at_the_first_thing_that_the_text_does_not_name():
    answer = Pointing()
    shown = steering(answer)
    assert [s["name"] for s in shown._picture.segments] == ["cat", "<i>tree</i>", "car"]
    assert shown._picture.chosen == 1 and shown._picture.caption == "asked for: the cat"
    assert answer.asked == [("a", -1, ["L2H3", "L2H2"], "decode"), ("a", 1, ["L2H3", "L2H2"], "decode")]
    assert boxes_of(shown._picture) == {
        "referent": ("what the text names", list(ONE)), "unmasked": ("reply", list(ONE)),
        "reply": ("reply, 2 heads look at the <i>tree</i>", list(OTHER)),
    }  # fmt: skip
    assert text_of(shown._reply.value) == "<b>a</b> 1\nThe box is there: IoU 1.00 with the <i>tree</i> (correct)"
    assert "<i>" not in shown._reply.value, "names and replies are text, not HTML"


def test_the_segments_are_their_masks_or_boxes():
    segments = steering()._picture.segments
    assert filled(segments[0]["path"], (40, 60)).nonzero()[1].min() == 6
    assert (filled(segments[1]["path"], (40, 60)) == MASK).all()


def test_each_control_of_pointing_asks_for_another_reply():
    answer = Pointing()
    shown = steering(answer)
    top, drawn = ["L2H3", "L2H2"], [str(h) for h in SCORES.controls(2, 0)]
    moves = [(shown._picture, "chosen", 2, ("a", 2, top, "decode")),
             (shown._k, "value", 1, ("a", 2, top[:1], "decode")),
             (shown._phase, "value", "all", ("a", 2, top[:1], "all")), (shown._k, "value", 2, ("a", 2, top, "all")),
             (shown._which, "value", "random k", ("a", 2, drawn, "all")), (shown._k, "value", 0, ("a", 2, [], "all")),
             (shown._sample, "value", "b", ("b", -1, [], "all"))]  # fmt: skip
    for widget, trait, value, asked in moves:
        setattr(widget, trait, value)
        assert answer.asked[-1] == asked


def test_pointing_elsewhere_changes_the_box_and_the_words_only():
    shown = steering()
    before = traits(shown._picture)
    shown._picture.chosen = 2
    assert changed(shown._picture, before) == {"chosen", "boxes", "label"}
    assert boxes_of(shown._picture)["reply"] == ("reply, 2 heads look at the car", None)
    assert shown._picture.label == "picture for “the cat”. The box is not there: IoU 0.00 with the car (wrong box)"
    shown._k.value = 1
    assert boxes_of(shown._picture)["reply"] == ("reply, 1 head looks at the car", list(ONE))


def test_another_picture_lets_the_segment_go():
    shown = steering()
    shown._sample.value = "b"
    assert shown._picture.chosen == -1 and [s["name"] for s in shown._picture.segments] == ["dog"]
    assert shown._picture.size == [80, 50] and set(boxes_of(shown._picture)) == {"referent", "unmasked"}
    assert "Click a thing" in shown._reply.value and "<b>b</b> -1" in text_of(shown._reply.value)


def test_a_picture_without_segments_is_shown_all_the_same():
    shown = steering(pictures={"b": ("the dog", DOG, ONE, [])})
    assert shown._picture.size == [80, 50] and shown._picture.image and shown._picture.chosen == -1


def counted(shown) -> list[str]:
    return text_of(shown._counter.value).splitlines()


def test_the_counter_counts_things_that_the_text_does_not_name_once():
    shown = steering()
    own = "with these heads you pointed at {} things that the text does not name; the box went to {} of them"
    assert counted(shown) == [own.format(0, 0)], "what is shown at first, nobody pointed at"
    for i, tried, hits in ((0, 0, 0), (2, 1, 0), (1, 2, 1), (2, 2, 1)):
        shown._picture.chosen = i
        assert counted(shown)[0] == own.format(tried, hits)
    shown._k.value = 1
    assert counted(shown)[0] == own.format(1, 0), "other heads are counted apart"
    shown._k.value = 0
    assert counted(shown)[0] == own.format(0, 0), "no head, no test"
    again = steering()
    again._k.value = 2
    assert counted(again)[0] == own.format(2, 1), "the count outlives the cell"


def test_the_rate_over_all_segments_stands_where_it_was_counted():
    shown = steering(known=COUNTED)
    assert counted(shown)[1] == (
        "all 40 such segments, top 2: 60.0 % [50.0, 70.0]; random heads: 5.0 % (mean of 2 seeds, 4.0 to 6.0)"
    )
    shown._k.value = 1
    assert counted(shown)[1] == "all 40 such segments, top 1: 20.0 % [9.0, 31.0]; random heads: not counted"
    shown._k.value = 4
    assert counted(shown)[1] == "over all segments: counted for k = 1, 2; not for this one"
    shown._phase.value = "all"
    assert counted(shown)[1] == "over all segments: counted for no k; not for this one"
    assert len(counted(steering())) == 1 and steering()._button.disabled


def test_counting_another_k_runs_once_with_what_the_controls_say_and_is_added():
    asked, words = [], []

    def count(k, phase, tell):
        asked.append((k, phase))
        tell(3, 7)
        words.append(text_of(shown._status.value))
        return rates(("unmasked", 0, None, 2.0, 0, 5), ("vrh", k, None, 80.0, 70, 90), ("random", k, 0, 5.0, 1, 9))

    shown = steering(known=COUNTED, count=count)
    shown._k.value, shown._phase.value = 3, "all"
    picture = traits(shown._picture)
    shown._button.click()
    assert asked == [(3, "all")] and words == ["k=3: batch 3 of 7"] and not shown._status.value
    assert counted(shown)[1] == (
        "all 40 such segments, top 3: 80.0 % [70.0, 90.0]; random heads: 5.0 % (mean of 1 seeds, 5.0 to 5.0)"
    )
    assert not changed(shown._picture, picture)
    shown._k.value, shown._phase.value = 2, "decode"
    assert "60.0 % [50.0, 70.0]" in counted(shown)[1], "what was counted before is kept"
    bare = steering(count=lambda k, phase, tell: rates(("vrh", k, None, 80.0, 70, 90)))
    bare._button.click()
    assert "top 2: 80.0 %" in counted(bare)[1]


def test_counting_that_fails_says_so_and_stops_saying_that_it_runs():
    def count(k, phase, tell):
        tell(3, 7)
        raise MemoryError("no <b> room")

    shown = steering(known=COUNTED, count=count)
    before = shown._counter.value
    shown._button.click()
    assert shown._error.value == alert("no <b> room") and not shown._status.value
    assert shown._counter.value == before


def test_a_thing_that_cannot_be_pointed_at_is_an_error_below():
    answer = Pointing()
    shown = steering(answer)
    answer.error = ValueError("<b>no</b> image token")
    shown._picture.chosen = 2
    assert shown._error.value == alert("<b>no</b> image token")
    assert set(boxes_of(shown._picture)) == {"referent", "unmasked"}, "no box of another thing"
    answer.error = None
    shown._picture.chosen = 1
    assert not shown._error.value and "reply" in boxes_of(shown._picture)


def test_pointing_needs_a_picture():
    with pytest.raises(ValueError, match="No pictures to point at: pass some samples with segments"):
        steering(pictures={})


# ---------------------------------------------------------------- what all views share


def picked() -> widgets.view.View:
    return picker()


VIEWS = {"explorer": explorer, "knockout": knockout, "stepper": stepper, "steering": steering, "picker": picked}


@pytest.mark.parametrize("name", VIEWS)
def test_headless_viewers_get_a_picture_beside_the_live_view(name):
    shown = VIEWS[name]()
    data, _ = shown._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == shown.model_id
    picture = base64.b64decode(data["image/png"])
    assert picture.startswith(b"\x89PNG") and min(Image.open(io.BytesIO(picture)).size) > 200


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("explorer", lambda v: setattr(v._k, "value", 1)),
        ("knockout", lambda v: setattr(v._map, "chosen", [[0, 1]])),
        ("stepper", lambda v: setattr(v._steps, "step", 0)),
        ("steering", lambda v: setattr(v._picture, "chosen", 2)),
        ("picker", lambda v: setattr(v._controls["keys"], "value", "copy")),
    ],
)
def test_the_picture_is_of_where_the_controls_stand(name, move):
    shown = VIEWS[name]()
    before = shown._still().png()
    assert shown._still().png() == before
    move(shown)
    assert shown._still().png() != before


def stands(shown) -> dict:
    """Where everything that a person can move stands."""
    return {name: getattr(*part) for name, part in shown._parts.items()}


MOVES = {
    "explorer": {"k": 1, "condition": "random", "seed": 1, "sample": "b"},
    "knockout": {"sample": "b", "k": 5, "chosen": [[0, 1], [1, 1]]},
    "stepper": {"k": 3, "head": [[1, 2]], "shown": "all heads", "step": 0},
    "steering": {"k": 3, "which": "random k", "phase": "all", "chosen": 2},
    "picker": {"queries": "expression", "keys": "share", "samples": "median"},
}


@pytest.mark.parametrize("name", MOVES)
def test_a_view_made_again_goes_on_from_where_it_stood(name):
    shown = VIEWS[name]()
    start = stands(shown)
    for part, value in MOVES[name].items():
        setattr(*shown._parts[part], value)
    assert stands(shown) == start | MOVES[name]
    again = VIEWS[name]()
    assert stands(again) == stands(shown) and not again._error.value
    assert again._still().png() == shown._still().png()


def test_the_explorer_goes_on_at_its_benchmark_and_picture():
    explorer()._benchmark.value = "documents"
    again = explorer()
    assert again._curve.title == "toy on documents" and again._sample.value == "e"


def test_pointing_goes_on_at_another_picture_without_a_thing_chosen():
    steering()._sample.value = "b"
    again = steering()
    assert again._sample.value == "b" and again._picture.chosen == -1
    again._sample.value = "a"
    assert again._picture.chosen == -1 and len(again._picture.segments) == 3


def test_with_another_k_the_stepper_shows_the_same_kind_of_set():
    from vrhlib.widgets.stepper import _same_kind

    sets = ["all heads", "top 3", "all but the top 3", "L0H1"]
    shown = {"all heads": "all heads", "top 2": "top 3", "all but the top 2": "all but the top 3", "L0H1": "L0H1"}
    assert {name: _same_kind(name, sets) for name in shown} == shown
    assert _same_kind("L2H2", sets) == "top 3" and _same_kind("top 2", ["all heads"]) == "all heads"


def test_where_a_control_stood_is_ignored_when_it_is_no_more():
    first = knockout()
    first._k.value = 5
    view._LEFT[first._key]["sample"] = "gone"
    again = knockout()
    assert again._sample.value == "a" and again._k.value == 5 and not again._error.value


def test_views_of_other_models_or_pictures_do_not_share_where_they_stood():
    steering()._picture.chosen = 2
    assert steering(pictures={"a": SCENES["a"]})._picture.chosen == 1


def test_an_error_in_the_first_state_is_raised():
    answer, pointing = Answers(), Pointing()
    answer.error, pointing.error = LookupError("no such reply"), LookupError("no such reply")
    for make in (lambda: knockout(answer), lambda: steering(pointing)):
        with pytest.raises(LookupError, match="no such reply"):
            make()
    assert len(answer.asked) == len(pointing.asked) == 2, "the reply as it is, the one that fails, and no second try"
    with pytest.raises(AttributeError):
        explorer(pictures={"a": ("the cat", None, ONE)})


def test_a_view_that_was_left_where_it_fails_begins_anew_and_says_why():
    """Or a cell that is run again would raise for as long as its kernel lives."""
    shown = knockout(widgets.recorded(stored(), SETS), pictures={"a": ASKED["a"]})
    shown._map.chosen = [[0, 0]]
    assert "No stored reply" in shown._error.value
    again = knockout(widgets.recorded(stored(), SETS), pictures={"a": ASKED["a"]})
    assert again._map.chosen == [[2, 3], [2, 2]] and "vrh 2" in again._reply.value
    assert "No stored reply" in again._error.value
    button(again, "none").click()
    assert not again._error.value
    steering()._picture.chosen = 2
    fewer = steering(pictures={**SCENES, "a": (*SCENES["a"][:3], SCENES["a"][3][:2])})
    assert fewer._picture.chosen == 1 and 'role="alert"' in fewer._error.value


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_small_pictures_keep_their_pixels(mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).convert(mode)
    assert (pixels(view.png(image)) == np.asarray(image.convert("RGB"))).all()
    assert view.png(image).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("size", "want"),
    [((1280, 400), (640, 200)), ((300, 1280), (150, 640)), ((640, 640), (640, 640)), ((5000, 1), (640, 1))],
)
def test_large_pictures_are_bounded_on_their_longer_side(size, want):
    assert Image.open(io.BytesIO(view.png(Image.new("RGB", size)))).size == want


def filled(path: str, shape: tuple[int, int]) -> np.ndarray:
    """SVG path data of horizontal and vertical lines to pixels, bool [height, width]: centres by the even-odd rule."""
    y, x = (axis + 0.5 for axis in np.indices(shape))
    inside, at, start = np.zeros(shape, bool), (0.0, 0.0), (0.0, 0.0)
    for command, numbers in re.findall(r"([MHVhvzZ])([^MHVhvzZ]*)", path):
        one, two = [*map(float, numbers.split()), 0.0, 0.0][:2]
        known = {"M": (one, two), "H": (one, at[1]), "V": (at[0], one), "h": (at[0] + one, at[1]),
                 "v": (at[0], at[1] + one), "z": start, "Z": start}  # fmt: skip
        moved = known[command]
        if command == "M":
            start = moved
        elif moved[0] == at[0]:  # a vertical side: it counts for all centres on the right of it
            inside ^= (x > at[0]) & (y > min(at[1], moved[1])) & (y < max(at[1], moved[1]))
        else:
            assert moved[1] == at[1], f"{path} has a slanted side"
        at = moved
    return inside


def test_the_fill_of_these_tests_knows_holes():
    ring = filled("M0 0H5V5H0ZM1 1h3v3h-3z", (6, 6))
    assert ring[:5, :5].sum() == ring.sum() == 16 and not ring[1:4, 1:4].any()


@given(arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))))
def test_the_outline_of_a_mask_drawn_back_is_the_mask(mask):
    path = view.outline(Box(0, 0, 1, 1), mask)
    assert (filled(path, mask.shape) == mask).all() and (path == "") == (not mask.any())


def test_outlines_know_holes_parts_and_empty_rows():
    mask = np.zeros((7, 9), bool)
    mask[1:4, 1:4], mask[2, 2] = True, False
    mask[5, [0, 7, 8]] = True
    assert (filled(view.outline(Box(0, 0, 9, 7), mask), mask.shape) == mask).all()
    assert view.outline(Box(0, 0, 9, 7), mask).count("M") == 4, (
        "edges only: around the ring, around its hole, around two parts"
    )


def test_the_outline_of_a_box_is_the_box():
    drawn = filled(view.outline(Box(2, 1, 5.0, 3), None), (6, 8))
    want = np.zeros((6, 8), bool)
    want[1:3, 2:5] = True
    assert (drawn == want).all() and view.outline(Box(0.25, 1, 2, 3), None) == "M0.25 1H2V3H0.25Z"


def test_a_box_is_rounded_for_the_browser_and_none_stays_none():
    assert view.boxed("reply", "words", Box(0.06, 1, 2.24, 3)) == {
        "name": "reply", "label": "words", "box": [0.1, 1, 2.2, 3]
    }  # fmt: skip
    assert view.boxed("reply", "words", None)["box"] is None


# ---------------------------------------------------------------- the picker of the design space

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
            at = len(seen)
            return SimpleNamespace(png=lambda: b"\x89PNG %d" % at)

        monkeypatch.setattr(figures, name, draw)
    return seen


def picker(measured=None, k: int = 3, scores: SampleScores | None = None) -> widgets.view.View:
    return widgets.scoring_picker(scores or captured(), k, measured or {}, BESIDE)


def pick(shown: widgets.view.View, queries: str, keys: str, samples: str = "mean") -> bytes:
    for axis, value in {"queries": queries, "keys": keys, "samples": samples}.items():
        shown._controls[axis].value = value
    return png_of(shown)


def png_of(shown: widgets.view.View) -> bytes:
    """The picture in the view."""
    (data,) = re.findall(r'src="data:image/png;base64,([^"]*)"', shown._picture.value)
    return base64.b64decode(data)


def alt_of(shown: widgets.view.View) -> str:
    (words,) = re.findall(r'<img [^>]*alt="([^"]*)"', shown._picture.value)
    return html.unescape(words)


def test_every_combination_is_drawn_or_shows_its_reason(drawn):
    scores, shown = captured(), picker()
    axes = {name: control.options for name, control in shown._controls.items()}
    assert axes == {"queries": tuple(QUERIES), "keys": tuple(KEYS), "samples": tuple(SAMPLES)}
    can = {(q.split("(")[0], keys) for q, keys, _ in scores.points()}
    assert len(can) > 80 and ("output", "sum") in can and ("prompt", "sum_calibrated") in can
    for queries, keys, samples in itertools.product(*axes.values()):
        assert pick(shown, queries, keys, samples).startswith(b"\x89PNG")
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
    shown = picker(scores=captured(right=False))
    pick(shown, queries, keys, samples)
    kind, (text,) = drawn[-1]
    assert kind == "refused" and reason in text
    assert alt_of(shown) == text == shown._drawn()[1] and not shown._error.value, "a reason is no error"


def test_a_reason_is_a_picture_with_its_words():
    figures.use_profile("nano")
    shown = figures.refused("it costs $5, or $6, because " + "so " * 60 + "it is")
    assert shown.png().startswith(b"\x89PNG")
    (words,) = [text.get_text() for text in shown.canvas.texts if "costs" in text.get_text()]
    assert words.split() == shown.frame.text[0].split() and max(map(len, words.splitlines())) <= 100


@pytest.mark.parametrize("keys", [k for k in KEYS if k != "copy"])
def test_every_kind_of_score_can_be_drawn(keys):
    shown = picker()
    queries = next(q for q in ("output", "prompt_last") if any(p[:2] == (q, keys) for p in captured().points()))
    assert pick(shown, queries, keys).startswith(b"\x89PNG")
    assert alt_of(shown).startswith(f"{queries}/{keys}/mean")
    assert ("top heads L" in alt_of(shown)) == (keys != "spatial_entropy"), "whose toy scores are all below 0"


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
    shown = picker(measured)
    pick(shown, "expression", "share", "median")
    bars = accuracies_of(drawn[-1][1])
    assert bars == {"unmasked": BESIDE["unmasked"], "this scoring": (40, 30, 50), "random": BESIDE["random"]}
    assert list(bars) == ["unmasked", "this scoring", "random"]
    pick(shown, "output", "max", "median")
    other = captured().score(Scoring("output", "max", "median")).top(3)
    assert set(other) != set(heads) and accuracies_of(drawn[-1][1])["this scoring"] is None


def test_every_point_that_is_cut_for_the_picker_has_its_bar(drawn):
    points = captured().tops(PICKED, 3)
    assert len(points) == len(PICKED) == len(set(PICKED))
    rows = [(name, 3, float(i), float(i), float(i)) for i, name in enumerate(points)]
    table = pd.DataFrame(rows, columns=["condition", "k", "accuracy", "low", "high"])
    shown = picker(widgets.cut_accuracies(table, points))
    for point in PICKED:
        pick(shown, point.queries, point.keys, point.samples)
        bar = accuracies_of(drawn[-1][1])["this scoring"]
        assert bar is not None and points[rows[int(bar[0])][0]].mask().tolist() == points[str(point)].mask().tolist()


def test_a_named_method_is_called_by_its_name(drawn):
    shown = picker()
    names = {("output", "sum"): "VRH", ("expression", "sum"): "VRH, queries turned", ("prompt_last", "share"): "VERA",
             ("output", "max"): ""}  # fmt: skip
    for (queries, keys), name in names.items():
        pick(shown, queries, keys)
        scores, k, called, formula, _ = drawn[-1][1]
        assert called == name and str(QUERIES[queries]) in formula and str(KEYS[keys]) in formula
        heads = ", ".join(map(str, scores.found(k)))
        assert alt_of(shown) == f"{queries}/{keys}/mean{f' ({name})' if name else ''}: top heads {heads}"


def bar_words(shown: figures.Figure) -> list[str]:
    return [text.get_text() for axes in shown.canvas.axes for text in axes.texts]


def test_what_was_not_measured_says_so(monkeypatch):
    shown, draw = [], figures.design_view
    monkeypatch.setattr(figures, "design_view", lambda *words: shown.append(draw(*words)) or shown[-1])
    picker()
    assert bar_words(shown[-1]).count("not measured") == 1
    picker({frozenset(captured().score(Scoring("output", "sum")).top(3).heads): (40.0, 30.0, 50.0)})
    words = bar_words(shown[-1])
    assert "not measured" not in words and {"90.0", "40.0", "70.0"} <= set(words)


def test_the_picker_starts_at_vrh_moves_and_carries_a_picture(drawn):
    shown = picker()
    assert {axis: control.value for axis, control in shown._controls.items()} == {
        "queries": "output", "keys": "sum", "samples": "mean"
    }  # fmt: skip
    before = png_of(shown)
    shown._controls["keys"].value = "copy"
    assert drawn[-1][0] == "refused" and png_of(shown) != before
    data, _ = shown._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]) == b"\x89PNG %d" % len(drawn)
    assert data["text/plain"].startswith("output/copy/mean") or drawn[-1][1][0] == data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_the_words_of_a_picture_are_escaped(drawn):
    shown = picker()
    shown._drawn = lambda: (SimpleNamespace(png=lambda: b"x"), '"> <b>')
    shown._show()
    assert alt_of(shown) == '"> <b>' and "<b>" not in shown._picture.value
