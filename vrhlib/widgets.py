"""Sliders over stored results. Nothing here runs a model: every position of a slider was measured before.

Each view carries a picture of its first state in its MIME bundle, so that GitHub, nbconvert and a headless
run show something where JupyterLab shows the live view.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import ipywidgets
import pandas as pd
from PIL import Image

from vrhlib import figures
from vrhlib.boxes import Box
from vrhlib.design_space import KEYS, QUERIES, SAMPLES, SampleScores, Scoring
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.methods import called


class View(ipywidgets.VBox):
    """Controls above a picture that is drawn again when one of them moves.

    `draw(**values)` returns the PNG for the controls' values.
    """

    def __init__(self, draw, controls: Mapping[str, ipywidgets.Widget]):
        self._draw, self._controls = draw, dict(controls)
        self._picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        super().__init__([ipywidgets.HBox(list(controls.values())), self._picture])
        for control in controls.values():
            control.observe(lambda _: self._refresh(), "value")
        self._refresh()

    def _refresh(self) -> None:
        self._picture.value = self._draw(**{name: control.value for name, control in self._controls.items()})

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**(data or {}), "image/png": base64.b64encode(self._picture.value).decode()}, metadata


def ablation_slider(
    scores: Mapping[str, HeadScores],
    answers: pd.DataFrame,
    pictures: Mapping[str, tuple[str, Image.Image, Box]],
) -> View:
    """Slide k: the heads that are cut, the accuracy that is left, and one picture's replies.

    `scores`: model name to head scores; `answers` as `evaluate.sweep_replies` returns them (one or several
    models); `pictures`: sample id to (expression, image, referent). Raises ValueError if no picture was answered.
    """
    shown = [i for i in pictures if (answers.id == i).any()]
    if not shown:
        raise ValueError("None of the pictures is among the answered samples; pass samples of the sweep.")
    ks = sorted(answers.loc[answers.condition == "vrh", "k"].unique().tolist())
    controls = {
        "model": ipywidgets.Dropdown(options=list(scores), description="model"),
        "k": ipywidgets.SelectionSlider(options=[0, *ks], value=ks[-1], description="k", continuous_update=False),
        "sample": ipywidgets.Dropdown(options=[(pictures[i][0], i) for i in shown], description="sample"),
    }

    def draw(model: str, k: int, sample: str) -> bytes:
        text, image, referent = pictures[sample]
        mine = answers[answers.model == model]
        boxes = {c: _box(mine, c, k, sample) for c in ("unmasked", "vrh", "random")}
        at_k = mine[((mine.k == k) & (mine.condition != "unmasked")) if k else (mine.condition == "unmasked")]
        return figures.ablation_view(scores[model], k, _accuracies(at_k), (text, image, referent, boxes)).png()

    return View(draw, controls)


Bar = tuple[float, float, float]  # accuracy and its interval, percent


def cut_accuracies(table: pd.DataFrame, sets: Mapping[str, HeadSet]) -> dict[frozenset, Bar]:
    """Accuracy and interval by the set of heads that was cut, from an accuracy table whose conditions are names of
    `sets`; the order of heads makes no difference to a cut."""
    rows = table[table.condition.isin(list(sets))]
    return {
        frozenset(sets[condition].top(int(k)).heads): (accuracy, low, high)
        for condition, k, accuracy, low, high in rows[["condition", "k", "accuracy", "low", "high"]].itertuples(
            index=False
        )
    }


def scoring_picker(
    captured: SampleScores, k: int, measured: Mapping[frozenset, Bar], beside: Mapping[str, Bar]
) -> View:
    """Choose queries, keys and samples: which method that is, its top k heads, and the accuracy without them.

    `measured` as `cut_accuracies` returns it; `beside`: bars to compare with (unmasked, random). Combinations that mean
    nothing, or that these samples cannot give, show the reason instead.
    """
    axes = {"queries": QUERIES, "keys": KEYS, "samples": SAMPLES}
    start = {"queries": "output", "keys": "sum", "samples": "mean"}
    controls = {
        axis: ipywidgets.Dropdown(options=list(known), value=start[axis], description=axis)
        for axis, known in axes.items()
    }

    def draw(**point: str) -> bytes:
        try:
            scoring = Scoring(**point)
            scores = captured.score(scoring)
        except ValueError as error:
            return figures.refused(str(error)).png()
        formula = "\n".join(f"{axis}  {axes[axis][value]}" for axis, value in point.items())
        bars = {"unmasked": beside["unmasked"], "this scoring": measured.get(frozenset(scores.found(k).heads))}
        return figures.design_view(scores, k, called(scoring), formula, bars | dict(beside)).png()

    return View(draw, controls)


def _box(answers: pd.DataFrame, condition: str, k: int, sample: str) -> Box | None:
    rows = answers[(answers.id == sample) & (answers.condition == condition)]
    rows = rows if condition == "unmasked" else rows[rows.k == k]
    return None if rows.empty else Box.of(rows.iloc[0])


def _accuracies(answers: pd.DataFrame) -> dict[str, float]:
    """Percent right per condition, random seeds pooled."""
    return (100 * (answers.outcome == "correct").groupby(answers.condition, sort=False).mean()).to_dict()
