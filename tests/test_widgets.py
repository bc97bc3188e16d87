"""The slider shows stored results, live and as a picture."""

import base64

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from vrhlib import figures, widgets
from vrhlib.boxes import Box
from vrhlib.heads import HeadScores

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
