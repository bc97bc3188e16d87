"""How long a click takes until the view has its answer: on stored results, and live on the embedded models.

    python benchmarks/clicks.py --out clicks.csv

Milliseconds on this machine, in the kernel: from a control's or a canvas's new value to the traits that the browser is
sent (drawing them took the browser 1 to 3 ms where it was looked at). Median and slowest of the clicks. The targets,
300 ms stored and 2 s live, are stated beside; run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from vrhlib import figures, store, widgets
from vrhlib.benchmarks import grounding
from vrhlib.evaluate import groups, sweep_replies
from vrhlib.heads import HeadScores, load_scores
from vrhlib.live import Live, pictures, sweeping
from vrhlib.profiles import profile
from vrhlib.steering import segments
from vrhlib.vlm import VLM
from vrhlib.wiring import load_vlm

TARGETS = {"stored": 300.0, "live": 2000.0}  # milliseconds
COLUMNS = ["model", "view", "click", "kind", "median_ms", "slowest_ms", "clicks", "target_ms", "met"]


def timed(moves: Iterable[Callable[[], None]], view: widgets.view.View) -> list[float]:
    """Milliseconds of each move. Raises RuntimeError if the view shows an error: that would be a fast click."""
    took = []
    for move in moves:
        began = time.perf_counter()
        move()
        took.append(1000 * (time.perf_counter() - began))
        if view._error.value:
            raise RuntimeError(view._error.value)
    return took


def measured(name: str, n: int) -> list[dict]:
    """Clicks on every view of one model, nothing stored before: columns as in `COLUMNS`."""
    vlm, before = load_vlm(name), store.ROOT
    scores = load_scores(store.heads_dir("nano") / f"{name}__{profile('nano').benchmarks[0]}.json", vlm.grid)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        store.ROOT = Path(folder)
        try:
            return clicked(vlm, scores, n)
        finally:
            store.ROOT = before


def clicked(vlm: VLM, scores: HeadScores, n: int) -> list[dict]:
    defaults, name = profile("nano"), vlm.name
    test, k = grounding(defaults.benchmarks[0], "test", n), scores.fewest(defaults.mass, defaults.k)
    asked, live, rows = grounding(defaults.benchmarks[0], "test", n, pairs=True), Live(vlm), []

    def row(view: str, click: str, kind: str, took: list[float]) -> None:
        slowest = max(took)
        rows.append(dict(zip(COLUMNS, (name, view, click, kind, round(statistics.median(took), 1), round(slowest, 1),
                                       len(took), TARGETS[kind], slowest <= TARGETS[kind]))))  # fmt: skip

    swept = sweep_replies(vlm, test, groups(scores.top(k), defaults.control_seeds), range(1, k + 1), short="skip")
    run = sweeping(vlm, {test.benchmark: test}, {name: scores}, test)
    view = widgets.explorer({name: scores}, swept, pictures(test), run)
    row("explorer", "another k", "stored", timed((lambda i=i: setattr(view._k, "value", i) for i in range(k)), view))
    view._live.value = True
    beyond = [k + 1, k + 2, k + 3]
    row("explorer", f"another k, {n} pictures", "live",
        timed((lambda i=i: setattr(view._k, "value", i) for i in beyond), view))  # fmt: skip

    heads = [list(h) for h in scores.ranked()]
    view = widgets.knockout(scores, pictures(test), live.without(test), k)
    choices = [heads[i : i + 2] for i in range(0, 20, 2)]
    moves = [lambda c=c: setattr(view._map, "chosen", c) for c in choices]
    row("knockout", "two heads", "live", timed(moves, view))
    row("knockout", "the same again", "stored", timed(moves, view))
    stored = widgets.recorded(swept, groups(scores.top(k), defaults.control_seeds))
    view = widgets.knockout(scores, pictures(test), stored, k)
    moves = [lambda i=i: setattr(view._map, "chosen", heads[:i]) for i in range(k)]
    row("knockout", "top k, no model", "stored", timed(moves, view))

    looks = live.looks(test[:3])
    view = widgets.stepper(looks, scores, k)
    moves = [lambda h=h: setattr(view._map, "chosen", [h]) for h in heads[:10]]
    row("stepper", "one head", "stored", timed(moves, view))
    moves = [lambda name=name: setattr(view._look, "value", name) for name in reversed(looks)]
    row("stepper", "another picture", "stored", timed(moves, view))

    things = segments(asked)
    scenes = {s.id: (s.text, s.image, s.box, things[s.image_key]) for s in asked}
    view = widgets.steering(scores, scenes, live.toward(asked), k)
    count = len(things[asked[0].image_key])
    moves = [lambda i=i: setattr(view._picture, "chosen", i) for i in reversed(range(count))]
    row("steering", "a segment", "live", timed(moves, view))
    row("steering", "the same again", "stored", timed(moves, view))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(profile("nano").models), help="embedded models, by commas")
    parser.add_argument("--n", type=int, default=16, help="pictures (even)")
    parser.add_argument("--out", default="", help="write the table to this CSV")
    given = parser.parse_args()
    figures.use_profile("nano")
    table = pd.DataFrame([row for name in given.models.split(",") for row in measured(name, given.n)], columns=COLUMNS)
    print(table.to_string(index=False))
    missed = table[~table.met]
    print(f"{len(table) - len(missed)} of {len(table)} kinds of click within their target, slowest click counted")
    if given.out:
        table.to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
