"""Choose queries, keys and samples: which method that is, its heads, and what is left without them."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping

import ipywidgets
import pandas as pd

from vrhlib import figures
from vrhlib.design_space import KEYS, QUERIES, SAMPLES, SampleScores, Scoring
from vrhlib.heads import HeadSet
from vrhlib.methods import called
from vrhlib.widgets.view import View, menu, row

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
    return Picker(captured, k, measured, beside)


class Picker(View):
    AXES = {"queries": QUERIES, "keys": KEYS, "samples": SAMPLES}
    START = {"queries": "output", "keys": "sum", "samples": "mean"}

    def __init__(self, captured, k, measured, beside):
        self._captured, self._heads, self._measured, self._beside = captured, k, measured, dict(beside)
        self._controls = {axis: menu(axis, known, value=self.START[axis]) for axis, known in self.AXES.items()}
        self._picture = ipywidgets.HTML()
        parts = [row(*self._controls.values()), self._picture]
        remembered = {axis: (control, "value") for axis, control in self._controls.items()}
        self._begin(("scoring_picker", captured.model, captured.benchmark), parts, remembered)

    def _show(self) -> None:
        self._shown = figure, words = self._drawn()
        shown = base64.b64encode(figure.png()).decode()
        alt = html.escape(words, quote=True)
        self._picture.value = f'<img style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{shown}">'

    def _in_words(self) -> str:
        return self._shown[1]

    def _still(self) -> figures.Figure:
        return self._shown[0]

    def _drawn(self) -> tuple[figures.Figure, str]:
        """The figure of the point that is picked, and the same in words."""
        point = {axis: control.value for axis, control in self._controls.items()}
        try:
            scoring = Scoring(**point)
            scores = self._captured.score(scoring)
        except ValueError as error:
            return figures.refused(str(error)), str(error)
        formula = "\n".join(f"{axis}  {self.AXES[axis][value]}" for axis, value in point.items())
        found, name = scores.found(self._heads), called(scoring)
        bars = {"unmasked": self._beside["unmasked"], "this scoring": self._measured.get(frozenset(found.heads))}
        heads = ", ".join(map(str, found)) or "none"
        words = f"{'/'.join(point.values())}{f' ({name})' if name else ''}: top heads {heads}"
        return figures.design_view(scores, self._heads, name, formula, bars | self._beside), words
