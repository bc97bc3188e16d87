"""Slide k: the accuracy that is left, what becomes of the replies, and one picture's boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import ipywidgets
import pandas as pd
from PIL import Image

from vrhlib import figures
from vrhlib.boxes import Box
from vrhlib.figures import COLOUR, LABEL
from vrhlib.heads import HeadScores
from vrhlib.stats import Accuracy
from vrhlib.widgets.canvases import Curve, Picture
from vrhlib.widgets.view import View, boxed, menu, number, png, row

SEEDED = ("random", "layer_matched")
KINDS, PHASES = ("zero", "uniform", "mean"), ("all", "decode")  # as in `attention`, which needs torch
MOST = 16  # heads that the slider reaches at least, where a model can compute what was not stored


class Point(NamedTuple):
    """One position of the controls, but for the picture."""

    model: str
    benchmark: str
    condition: str
    seed: int | None
    ablation: str
    phase: str
    k: int


_BY = list(Point._fields)


def explorer(
    scores: Mapping[str, HeadScores],
    answers: pd.DataFrame,
    pictures: Mapping[str, tuple[str, Image.Image, Box]],
    run: Callable[..., pd.DataFrame] | None = None,
) -> View:
    """Slide k; choose model, benchmark, which heads are cut, seed of a control, and what cutting means and when.

    `scores`: model to head scores; `answers` as `evaluate.sweep_replies` returns them, of one or several models and
    benchmarks, perhaps with `ablation` (kind) and `phase`; `pictures`: sample id to (expression, image, referent).
    `run` as `live.sweeping` returns it: computes a point that is not among the answers, where `run live` is on. Raises
    ValueError if no picture was answered.
    """
    return Explorer(scores, answers, pictures, run)


class Explorer(View):
    def __init__(self, scores, answers, pictures, run):
        self._scores, self._pictures, self._run = scores, pictures, run
        self._rows: dict[Point, pd.DataFrame] = {}
        self._add(answers)
        shown = [i for i in pictures if (answers.id == i).any()]
        if not shown:
            raise ValueError("None of the pictures is among the answered samples; pass samples of the sweep.")
        self._shown = shown
        cut = [p.condition for p in self._rows if p.k]
        conditions = list(dict.fromkeys([*cut, *(("vrh", *SEEDED) if run else ())]))
        largest = max([p.k for p in self._rows] + [MOST] * (run is not None))
        seeds = sorted({p.seed for p in self._rows if p.seed is not None}) or [0]
        self._model = menu("model", dict.fromkeys(p.model for p in self._rows))
        self._benchmark = menu("benchmark", dict.fromkeys(p.benchmark for p in self._rows))
        self._condition = menu("cut", [(LABEL.get(c, c), c) for c in conditions])
        self._seed = menu("seed", seeds)
        self._ablation, self._phase = menu("kind", KINDS), menu("phase", PHASES)
        start = max((p.k for p in self._rows if p.condition == conditions[0]), default=0) if conditions else 0
        self._k = number("k", largest, start)
        self._sample = menu("picture", [])
        self._live = ipywidgets.ToggleButton(
            value=False, description="run live", disabled=run is None,
            tooltip="compute what was not stored" if run else "no model was handed to this view",
        )  # fmt: skip
        self._curve, self._picture = Curve(), Picture()
        remembered = {
            "model": (self._model, "value"), "benchmark": (self._benchmark, "value"),
            "sample": (self._sample, "value"), "condition": (self._condition, "value"), "seed": (self._seed, "value"),
            "ablation": (self._ablation, "value"), "phase": (self._phase, "value"), "k": (self._k, "value"),
            "live": (self._live, "value"),
        }  # fmt: skip
        parts = [
            row(self._model, self._benchmark, self._condition, self._seed),
            row(self._k, self._ablation, self._phase, self._live),
            row(self._sample),
            row(self._curve, self._picture),
        ]
        self._begin(("explorer", *scores, *shown), parts, remembered, {"benchmark": self._other_pictures})

    def _add(self, answers: pd.DataFrame) -> None:
        """Index answers by the point that they belong to; the unmasked model is one point, whatever would be cut."""
        known = {"ablation": "zero", "phase": "all"}
        frame = answers.assign(**{name: value for name, value in known.items() if name not in answers})
        for values, part in frame.groupby(_BY, sort=False, dropna=False):
            point = Point(*values)._replace(seed=None if pd.isna(values[3]) else int(values[3]), k=int(values[-1]))
            if point.condition == "unmasked":
                point = _plain(point.model, point.benchmark)
            self._rows.setdefault(point, part.drop_duplicates("id").set_index("id"))

    def _other_pictures(self) -> None:
        known = self._rows.get(_plain(self._model.value, self._benchmark.value))
        names = [i for i in self._shown if known is None or i in known.index] or self._shown
        before = self._sample.value
        self._sample.options = [(self._pictures[i][0], i) for i in names]
        self._sample.value = before if before in names else names[0]

    @property
    def _chosen(self) -> Point:
        """Where the controls stand, also at k=0, where they make no difference to the replies."""
        seed = self._seed.value if self._condition.value in SEEDED else None
        return Point(self._model.value, self._benchmark.value, self._condition.value, seed, self._ablation.value,
                     self._phase.value, self._k.value)  # fmt: skip

    @property
    def _point(self) -> Point:
        chosen = self._chosen
        return chosen if chosen.k else _plain(chosen.model, chosen.benchmark)

    def _show(self) -> None:
        point = self._point
        self._seed.disabled = self._condition.value not in SEEDED
        if point not in self._rows and self._live.value:
            self._compute(point)
        rows = self._rows.get(point)
        if rows is None:
            self._say(self._missing(point))
        self._draw_curve(point, rows)
        self._draw_picture(point, rows)

    def _compute(self, point: Point) -> None:
        def tell(done: int, of: int) -> None:
            self._say(f"{point.model}, k={point.k}: batch {done} of {of}")

        self._say(f"{point.model}, k={point.k}: running")
        condition = "unmasked" if point.k == 0 else point.condition
        found = self._run(
            model=point.model, benchmark=point.benchmark, condition=condition, k=point.k, seed=point.seed,
            kind=point.ablation, phase=point.phase, tell=tell,
        )  # fmt: skip
        self._add(found)
        self._say(f"{point.model}, k={point.k}: computed and stored")

    def _missing(self, point: Point) -> str:
        same = sorted(p.k for p in self._rows if p._replace(k=0) == point._replace(k=0))
        there = f"stored: k = {', '.join(map(str, same))}" if same else "nothing of this kind is stored"
        step = "turn on `run live` to compute it" if self._run else "hand `run=live.sweeping(...)` to compute it"
        if self._live.value:
            step = "there is no such cut"
        return f"k={point.k} was not measured here ({there}); {step}."

    def _line(self, point: Point) -> list[list[float]]:
        """Accuracy with its interval at every stored k of the point's kind, from the unmasked model on."""
        plain = _plain(point.model, point.benchmark)
        known = {p.k: rows for p, rows in self._rows.items() if p == plain or p._replace(k=0) == point._replace(k=0)}
        right = {k: Accuracy(int((rows.outcome == "correct").sum()), len(rows)) for k, rows in sorted(known.items())}
        return [[k, a.mean, *a.interval] for k, a in right.items()]

    def _draw_curve(self, point: Point, rows: pd.DataFrame | None) -> None:
        same = self._chosen
        vrh = same._replace(condition="vrh", seed=None)
        lines = {"vrh": self._line(vrh)}
        if same.condition not in ("vrh", None):  # None: nothing was cut
            lines[same.condition] = self._line(same)
        words = {c: LABEL.get(c, c) + (f", seed {same.seed}" if c in SEEDED else "") for c in lines}
        self._curve.series = [
            {"name": c, "label": words[c], "colour": COLOUR.get(c, "#0072B2"), "dash": "" if c == "vrh" else "5 3",
             "points": points} for c, points in lines.items() if len(points) > 1 or c == "vrh"
        ]  # fmt: skip
        self._curve.band = self._band(vrh)
        n = 0 if rows is None else len(rows)
        right = None if rows is None else 100 * float((rows.outcome == "correct").mean())
        shares = {} if rows is None else (100 * rows.outcome.value_counts(normalize=True)).to_dict()
        self._curve.value, self._curve.at, self._curve.outcomes = right, float(point.k), shares
        self._curve.title = f"{point.model} on {point.benchmark}"
        self._curve.note = f"n={n}; bars: 95 % Wilson intervals" if n else "not measured here"
        said = "not measured" if right is None else f"{right:.1f} percent right, n={n}"
        self._curve.label = f"{self._curve.title}: accuracy by number of ablated heads; at k={point.k} {said}"

    def _band(self, vrh: Point) -> dict | None:
        """Range over the seeds of random heads at every k that has several."""
        by_k: dict[int, list[float]] = {}
        for p, rows in self._rows.items():
            if p.condition == "random" and p._replace(condition="vrh", seed=None, k=vrh.k) == vrh:
                by_k.setdefault(p.k, []).append(100 * float((rows.outcome == "correct").mean()))
        points = [[k, min(v), sum(v) / len(v), max(v)] for k, v in sorted(by_k.items()) if len(v) > 1]
        several = max((len(v) for v in by_k.values()), default=0)
        return {"label": f"random heads, range of {several} seeds", "points": points} if points else None

    def _boxes(self, point: Point, rows: pd.DataFrame | None) -> dict[str, Box | None]:
        name = self._sample.value
        plain = self._rows.get(_plain(point.model, point.benchmark))
        boxes = {"referent": self._pictures[name][2]}
        if plain is not None and name in plain.index:
            boxes["unmasked"] = Box.of(plain.loc[name])
        if rows is not None and point.k and name in rows.index:
            boxes["reply"] = Box.of(rows.loc[name])
        return boxes

    def _draw_picture(self, point: Point, rows: pd.DataFrame | None) -> None:
        text, image, _ = self._pictures[self._sample.value]
        words = {"referent": "referent", "unmasked": "reply, unmasked", "reply": f"reply, {point.k} heads cut"}
        boxes = self._boxes(point, rows)
        self._picture.image, self._picture.size = png(image), list(image.size)
        self._picture.boxes = [boxed(name, words[name], box) for name, box in boxes.items()]
        self._picture.caption = text
        missing = [words[name] for name, box in boxes.items() if box is None]
        none = f"; no box in: {', '.join(missing)}" if missing else ""
        self._picture.label = f"picture for “{text}” with the referent and the boxes replied{none}"

    def _in_words(self) -> str:
        return f"{self._curve.label}. {self._picture.label}"

    def _still(self) -> figures.Figure:
        point = self._point
        rows = self._rows.get(point)
        text, image, _ = self._pictures[self._sample.value]
        lines = {line["name"]: line["points"] for line in self._curve.series}
        where = (self._curve.title, point.k, self._curve.value, self._curve.note)
        return figures.explorer_view(where, lines, self._curve.band, self._curve.outcomes,
                                     (text, image, self._boxes(point, rows)))  # fmt: skip


def _plain(model: str, benchmark: str) -> Point:
    return Point(model, benchmark, "unmasked", None, "zero", "all", 0)
