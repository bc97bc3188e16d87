"""A reply token by token: where all heads, the top heads, the rest, or one head look."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vrhlib import figures
from vrhlib.heads import Head, HeadScores, HeadSet
from vrhlib.widgets.canvases import HeadMap, Stepper
from vrhlib.widgets.view import View, boxed, menu, number, png, row


def stepper(looks: Mapping[str, object], scores: HeadScores, k: int) -> View:
    """Step through a reply; the attention of a set of heads lies over the picture, summed over its heads.

    `looks`: name to `scoring.CloseUp` of the model that `scores` belong to; `k`: how many heads are the top heads. A
    click on the map of scores shows one head alone. Nothing runs: all attention was captured.
    """
    return Steps(looks, scores, k)


class Steps(View):
    def __init__(self, looks, scores, k):
        if not looks:
            raise ValueError("No close-ups to step through: pass scoring.close_up(vlm, sample) of some samples.")
        if wrong := [name for name, look in looks.items() if look.attention.shape[:2] != scores.grid]:
            raise ValueError(
                f"{wrong[0]}: a close-up of another model than {scores.model}, whose grid is {scores.grid}."
            )
        self._looks, self._scores, self._asked = looks, scores, None
        self._look = menu("picture", looks)
        self._k = number("k", min(scores.values.size - 1, max(16, 2 * k)), k)
        self._map = HeadMap(
            grid=list(scores.grid), scores=[float(v) for v in scores.values.ravel()],
            label=f"{scores.model}: score of every head; choose one to see where it looks", word="shown alone",
        )  # fmt: skip
        first = next(iter(looks.values()))
        inside = None if first.sample.box is None else first.grid.tokens_in(first.sample.box)
        seen = first.attention[scores.top(k).mask()].sum(0)  # [T, V]
        looking = (seen if inside is None else seen[:, inside]).sum(1)
        self._steps = Stepper(step=int(looking.argmax()))  # where there is something to see
        remembered = {"look": (self._look, "value"), "k": (self._k, "value"), "head": (self._map, "chosen"),
                      "shown": (self._steps, "shown"), "step": (self._steps, "step")}  # fmt: skip
        parts = [row(self._look, self._k), row(self._map, self._steps)]
        self._begin(("stepper", scores.model, *looks), parts, remembered, {"head": self._one_head})

    def _one_head(self) -> None:
        """Of the heads clicked, the last; its map is shown at once."""
        self._map.chosen = self._map.chosen[-1:]
        if self._map.chosen:
            self._steps.shown = str(Head(*self._map.chosen[0]))

    def _sets(self) -> dict[str, HeadSet]:
        k = self._k.value
        top = self._scores.top(k)
        sets = {"all heads": self._scores.ranked()}
        if k:
            sets |= {f"top {k}": top, f"all but the top {k}": top.rest()}
        for pair in self._map.chosen:
            sets[str(Head(*pair))] = HeadSet((Head(*pair),), self._scores.grid, str(Head(*pair)))
        return sets

    def _show(self) -> None:
        look, sets = self._looks[self._look.value], self._sets()
        if (asked := (self._look.value, tuple(sets))) == self._asked:
            return  # stepping needs nothing from here
        sample, grid = look.sample, look.grid
        over = {name: look.attention[heads.mask()].sum(0) for name, heads in sets.items()}  # [T, V]
        peaks = {name: max(float(np.max(grid.picture(values.T))), 1e-9) for name, values in over.items()}
        sheets = [np.moveaxis(grid.picture(v.T), -1, 0) / peaks[name] for name, v in over.items()]
        inside = None if sample.box is None else grid.tokens_in(sample.box)
        shown = self._steps.shown
        with self._steps.hold_sync():
            self._steps.image, self._steps.size = png(sample.image), list(sample.image.size)
            self._steps.tokens, self._steps.sets = list(look.tokens), list(sets)
            self._steps.maps = np.round(255 * np.stack(sheets)).astype(np.uint8).tobytes()
            self._steps.peaks = list(peaks.values())
            self._steps.mass = [
                [None if inside is None else round(float(m), 4) for m in (v if inside is None else v[:, inside]).sum(1)]
                for v in over.values()
            ]
            self._steps.grid = [grid.rows, grid.cols]
            cells = [] if inside is None else np.argwhere(grid.picture(inside)).tolist()
            self._steps.evidence = cells
            replied = [] if sample.task == "answer" else [boxed("unmasked", "reply", look.reply.box)]
            referent = [] if sample.box is None else [boxed("referent", "referent", sample.box)]
            self._steps.boxes = [*referent, *replied]
            self._steps.step = min(self._steps.step, max(0, len(look.tokens) - 1))
            self._steps.shown = _same_kind(shown, list(sets))
            self._steps.label = f"picture for “{sample.text}” with the attention of heads while a reply is written"
        self._asked = asked

    def _in_words(self) -> str:
        return f"{self._steps.label}; {self._steps.shown}, token {self._steps.step + 1} of {len(self._steps.tokens)}"

    def _still(self) -> figures.Figure:
        look, step = self._looks[self._look.value], self._steps.step
        s, token = look.sample, look.tokens[self._steps.step]
        maps = {name: look.attention[heads.mask()].sum(0)[step] for name, heads in self._sets().items()}
        words = f"{s.text}: token {step + 1} of {len(look.tokens)}, {token!r}"
        return figures.attention_maps([(words, s.image, s.box, look.grid, maps)])


def _same_kind(shown: str, sets: list[str]) -> str:
    """The set that was shown, or what stands for it now: with another k still the top heads, or all but them."""
    kind = next((words for words in ("all but the top", "all heads", "top") if shown.startswith(words)), "top")
    return shown if shown in sets else next((name for name in sets if name.startswith(kind)), sets[0])
