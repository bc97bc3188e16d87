"""Point at a thing: the chosen heads look there while the answer is written, and the box may follow."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

import ipywidgets
import pandas as pd
from PIL import Image

from vrhlib import figures
from vrhlib.boxes import Box, decode_mask
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.widgets.canvases import Picture
from vrhlib.widgets.view import View, boxed, menu, number, outline, png, row

Segments = Sequence[tuple[str, Box, object]]  # name, box, mask (run lengths or array) or None
HEADS = ("top k", "random k")
IOU = 0.5  # from which a segment is what the text names; `outcomes.IOU`, which needs torch


def steering(
    scores: HeadScores,
    pictures: Mapping[str, tuple[str, Image.Image, Box, Segments]],
    answer: Callable[[str, int, HeadSet, str], Mapping],
    k: int,
    rates: pd.DataFrame | None = None,
    count: Callable[..., pd.DataFrame] | None = None,
) -> View:
    """Every thing of a picture is a segment: hover lights it up, a click makes the top k heads look there.

    `pictures`: sample id to (expression, image, referent, segments); `answer(id, i, heads, phase)` as
    `live.Live.toward` returns it. `rates`: how often the box followed over a whole set, as `steering.success` returns
    it, of this model, perhaps with `phase`; `count(k, phase, tell)` computes such a table for another k
    (`live.counting`).
    """
    return Steering(scores, pictures, answer, k, rates, count)


class Steering(View):
    def __init__(self, scores, pictures, answer, k, rates, count):
        if not pictures:
            raise ValueError("No pictures to point at: pass some samples with segments.")
        self._scores, self._pictures, self._answer, self._count = scores, pictures, answer, count
        self._key = ("steering", scores.model, *pictures)
        self._tried, counted = self._kept("tried"), self._kept("counted")
        self._begun = False  # what is shown at first, nobody pointed at
        given = [] if rates is None else [rates.assign(phase=rates.get("phase", "decode"))]
        self._rates = pd.concat([*given, *counted.values()], ignore_index=True) if given or counted else pd.DataFrame()
        _, _, referent, segments = next(iter(pictures.values()))
        others = [i for i, (_, box, _) in enumerate(segments) if box.iou(referent) < IOU]
        self._picture = Picture(chosen=next(iter(others), -1))
        self._reply, self._counter = ipywidgets.HTML(), ipywidgets.HTML()
        self._sample = menu("picture", [(text, name) for name, (text, *_) in pictures.items()])
        self._k = number("k", min(scores.values.size // 2, max(16, 2 * k)), k)
        self._which, self._phase = menu("heads", HEADS), menu("phase", ("decode", "all"))
        self._button = ipywidgets.Button(description="count all segments", disabled=count is None)
        self._button.on_click(lambda _: self._guarded(self._count_all))
        remembered = {
            "sample": (self._sample, "value"), "k": (self._k, "value"), "which": (self._which, "value"),
            "phase": (self._phase, "value"), "chosen": (self._picture, "chosen"),
        }  # fmt: skip
        parts = [
            row(self._sample, self._k, self._which, self._phase),
            row(self._picture, ipywidgets.VBox([self._reply, self._counter, self._button])),
        ]
        self._begin(self._key, parts, remembered, {"sample": self._other_picture})
        self._begun = True

    def _other_picture(self) -> None:
        """Segments of the picture; the one chosen is let go, unless it is there too after a cell was run again."""
        _, image, _, segments = self._pictures[self._sample.value]
        drawn = [{"name": name, "path": outline(box, None if mask is None else decode_mask(mask))}
                 for name, box, mask in segments]  # fmt: skip
        self._picture.size, self._picture.image = list(image.size), png(image)
        if drawn != self._picture.segments:
            kept = self._picture.chosen if not self._picture.segments else -1
            self._picture.segments = drawn
            self._picture.chosen = kept if kept < len(drawn) else -1

    @property
    def _heads(self) -> HeadSet:
        k = self._k.value
        return self._scores.top(k) if self._which.value == HEADS[0] else self._scores.controls(k, seed=0)

    def _show(self) -> None:
        name, i, heads = self._sample.value, self._picture.chosen, self._heads
        text, _, referent, segments = self._pictures[name]
        self._picture.caption = f"asked for: {text}"
        plain = self._answer(name, -1, heads, self._phase.value)
        boxes = [boxed("referent", "what the text names", referent), boxed("unmasked", "reply", Box.of(plain))]
        words = "Click a thing, or Tab to the picture and use the arrow keys and Enter."
        said = f"<code>{html.escape(plain['text'])}</code>"
        if i >= 0:
            self._picture.boxes = boxes
            steered = self._answer(name, i, heads, self._phase.value)
            hit = steered["outcome"] == "correct"
            if self._begun and len(heads) and segments[i][1].iou(referent) < IOU:  # else it is no test
                self._tried.setdefault((heads.heads, self._phase.value), {})[name, i] = hit
            look = "1 head looks" if len(heads) == 1 else f"{len(heads)} heads look"
            boxes.append(boxed("reply", f"reply, {look} at the {segments[i][0]}", Box.of(steered)))
            words = f"{'The box is there' if hit else 'The box is not there'}: IoU {steered['iou']:.2f} with the " + (
                f"{segments[i][0]} ({steered['outcome']})"
            )
            said = f"<code>{html.escape(steered['text'])}</code>"
        self._picture.boxes = boxes
        self._picture.label = f"picture for “{text}”. {words}"
        self._reply.value = f'<div class="vrh-line">{said}<br><b>{html.escape(words)}</b></div>'
        self._counter.value = f'<div class="vrh-line">{self._counted()}</div>'

    def _counted(self) -> str:
        """What was tried here, and the rate over a whole set where it was measured at this k."""
        tried = self._tried.get((self._heads.heads, self._phase.value), {})
        words = f"you pointed at {len(tried)} things that the text does not name; the box went to {sum(tried.values())}"
        lines = [f"with these heads {words} of them"]
        if len(self._rates):
            known = self._rates[self._rates.phase == self._phase.value]
            at = known[known.k == self._k.value]
            rate = {c: f"{r.rate:.1f} % [{r.low:.1f}, {r.high:.1f}]"
                    for c, r in at[at.condition == "vrh"].set_index("condition").iterrows()}  # fmt: skip
            if rate:
                n, random = int(at.n.iloc[0]), at[at.condition == "random"].rate
                spread = (
                    f"{random.mean():.1f} % (mean of {len(random)} seeds, {random.min():.1f} to {random.max():.1f})"
                )
                beside = spread if len(random) else "not counted"
                lines.append(f"all {n} such segments, top {self._k.value}: {rate['vrh']}; random heads: {beside}")
            else:
                ks = ", ".join(map(str, sorted(set(known.k) - {0})))
                lines.append(f"over all segments: counted for {f'k = {ks}' if ks else 'no k'}; not for this one")
        return "<br>".join(map(html.escape, lines))

    def _count_all(self) -> None:
        k, phase = self._k.value, self._phase.value
        found = self._count(k, phase, lambda done, of: self._say(f"k={k}: batch {done} of {of}"))
        self._kept("counted")[k, phase] = found.assign(phase=phase)
        self._rates = pd.concat([self._rates, found.assign(phase=phase)], ignore_index=True).drop_duplicates(
            ["condition", "k", "seed", "phase"]
        )
        self._counter.value = f'<div class="vrh-line">{self._counted()}</div>'
        self._say("")

    def _in_words(self) -> str:
        return self._picture.label

    def _still(self) -> figures.Figure:
        text, image, *_ = self._pictures[self._sample.value]
        boxes = {b["name"]: None if b["box"] is None else Box(*b["box"]) for b in self._picture.boxes}
        return figures.answer_view(self._scores, self._heads, (text, image, boxes), self._picture.label)
