"""Click heads away on the map of scores, any of them together, and see where the box goes."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping

import ipywidgets
import pandas as pd
from PIL import Image

from vrhlib import figures
from vrhlib.boxes import Box
from vrhlib.heads import Head, HeadScores, HeadSet
from vrhlib.widgets.canvases import HeadMap, Picture
from vrhlib.widgets.view import View, boxed, menu, number, png, row

Answer = Callable[[str, HeadSet], Mapping]


def knockout(
    scores: HeadScores,
    pictures: Mapping[str, tuple[str, Image.Image, Box]],
    answer: Answer,
    k: int = 0,
    published: HeadSet | None = None,
) -> View:
    """The map of all heads; a click takes one away, and the reply without it follows.

    `pictures`: sample id to (expression, image, referent). `answer(id, heads)` gives the reply without these heads:
    text, x0, y0, x1, y1, iou, outcome, perhaps seconds (`live.Live.without`), or raises LookupError where it is not
    known (`recorded`). `k`: how many of the top heads are away at first; `published`: the paper's list for this model.
    """
    return KnockOut(scores, pictures, answer, k, published)


def recorded(answers: pd.DataFrame, sets: Mapping[str, HeadSet]) -> Answer:
    """What `knockout` asks, from stored replies of one model and benchmark, for where no model is loaded.

    `answers` as `evaluate.sweep_replies` returns them, `sets` what it was given (group name to heads).
    """
    known: dict[tuple[frozenset, str], Mapping] = {}
    for row_ in answers.to_dict("records"):
        name = row_["condition"] if pd.isna(row_["seed"]) else f"{row_['condition']} {int(row_['seed'])}"
        if row_["condition"] == "unmasked" or name in sets:
            heads = frozenset() if row_["condition"] == "unmasked" else frozenset(sets[name].top(int(row_["k"])))
            known[heads, row_["id"]] = row_

    def answer(name: str, heads: HeadSet) -> Mapping:
        if (key := (frozenset(heads), name)) not in known:
            sizes = sorted({len(cut) for cut, _ in known})
            raise LookupError(
                f"No stored reply without exactly these {len(heads)} heads; stored are the top k and random k for k of "
                f"{', '.join(map(str, sizes))}. Load a model to try any: live.Live(load_vlm(...)).without(samples)."
            )
        return known[key]

    return answer


class KnockOut(View):
    def __init__(self, scores, pictures, answer, k, published):
        if not pictures:
            raise ValueError("No pictures to ask about: pass some samples.")
        self._scores, self._pictures, self._answer, self._draws = scores, pictures, answer, 0
        ranks = {} if published is None else {str(h): i + 1 for i, h in enumerate(published.on(scores.grid))}
        self._map = HeadMap(
            grid=list(scores.grid), scores=[float(v) for v in scores.values.ravel()], published=ranks,
            chosen=[list(h) for h in scores.top(k)],
            label=f"{scores.model}: score of every head, layers by heads; choose heads to knock out",
        )  # fmt: skip
        self._picture, self._reply = Picture(), ipywidgets.HTML()
        self._sample = menu("picture", [(text, name) for name, (text, *_) in pictures.items()])
        self._k = number("k", min(scores.values.size, max(16, 2 * k)), k)
        buttons = {"top k": self._top, "random k": self._random, "none": lambda: []}
        made = [ipywidgets.Button(description=words, layout={"width": "auto"}) for words in buttons]
        for button, heads in zip(made, buttons.values()):
            button.on_click(lambda _, heads=heads: self._choose(heads))
        remembered = {"sample": (self._sample, "value"), "k": (self._k, "value"), "chosen": (self._map, "chosen")}
        parts = [row(self._sample, self._k, *made), row(self._map, ipywidgets.VBox([self._picture, self._reply]))]
        self._begin(("knockout", scores.model, scores.scoring, *pictures), parts, remembered)

    def _top(self) -> list[list[int]]:
        return [list(h) for h in self._scores.top(self._k.value)]

    def _random(self) -> list[list[int]]:
        """As many heads from outside the top k; another draw at each click."""
        drawn = self._scores.controls(self._k.value, seed=self._draws)
        self._draws += 1
        return [list(h) for h in drawn]

    def _choose(self, heads: Callable[[], list[list[int]]]) -> None:
        try:
            self._map.chosen = heads()
        except ValueError as error:
            self._guarded(lambda error=error: _raise(error))

    @property
    def _heads(self) -> HeadSet:
        chosen = tuple(Head(*pair) for pair in self._map.chosen)
        return HeadSet(chosen, self._scores.grid, "chosen heads")

    def _show(self) -> None:
        heads, (text, image, referent) = self._heads, self._pictures[self._sample.value]
        self._picture.image, self._picture.size, self._picture.caption = png(image), list(image.size), text
        plain = self._answer(self._sample.value, HeadSet((), self._scores.grid, "no heads"))
        boxes = [boxed("referent", "referent", referent), boxed("unmasked", "reply, unmasked", Box.of(plain))]
        names = ", ".join(map(str, heads)) or "no head"
        label = f"picture for “{text}”; without {names}: "
        # If the next line fails, nothing old stands there.
        self._picture.boxes, self._picture.label, self._reply.value = boxes, f"{label}no reply", ""
        self._words = f"without {names}: no reply"
        reply = self._answer(self._sample.value, heads) if len(heads) else plain
        if len(heads):
            words = f"reply, {len(heads)} {'head' if len(heads) == 1 else 'heads'} knocked out"
            boxes = [*boxes, boxed("reply", words, Box.of(reply))]
        self._picture.boxes = boxes
        self._picture.label, self._words = label + self._said(reply), f"{reply['text']}\n{self._said(reply)}"
        took = f" · {reply['seconds']:.2f} s" if reply.get("seconds") else ""
        self._reply.value = (
            f'<div class="vrh-line">without {html.escape(names)}<br><code>{html.escape(reply["text"])}</code><br>'
            f"<b>{html.escape(self._said(reply))}</b>{took}</div>"
        )

    def _said(self, reply: Mapping) -> str:
        return f"IoU {reply['iou']:.2f}, {reply['outcome']}"

    def _in_words(self) -> str:
        return self._picture.label

    def _still(self) -> figures.Figure:
        heads, (text, image, _) = self._heads, self._pictures[self._sample.value]
        boxes = {b["name"]: None if b["box"] is None else Box(*b["box"]) for b in self._picture.boxes}
        return figures.answer_view(self._scores, heads, (text, image, boxes), self._words)


def _raise(error: Exception) -> None:
    raise error
