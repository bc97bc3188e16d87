"""One click, one answer: what the widgets ask of a loaded model.

A click changes heads or a segment, not the picture: its vision features are kept, and an answer once given is given
again from memory. Replies are those of `attention.generate`, so a click on heads replies as `evaluate.ablation_sweep`
does for the same heads and picture.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from vrhlib import store
from vrhlib.attention import Ablation, Intervention, Steering, fitting, generate
from vrhlib.evaluate import causal_sweep, groups, mean_outputs, sweep_replies
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.outcomes import judged
from vrhlib.samples import Sample, Samples
from vrhlib.scoring import CloseUp, close_up
from vrhlib.steering import aimed, pointed, segments, steer, success
from vrhlib.vlm import VLM, Batch
from vrhlib.wiring import load_vlm

PICTURES = 8  # whose vision features are kept


class _Models:
    """The model that a view was given, and one of its own where another is asked for, or where that one was given up
    for another by a later cell. What was given is never given up here: the notebook may still need it."""

    def __init__(self, given: VLM):
        self._given, self._own = given, None

    def loaded(self, name: str) -> VLM:
        if name == self._given.name and self._given.model is not None:
            return self._given
        if self._own is None or self._own.name != name:
            self._own = load_vlm(name, instead_of=self._own)
        return self._own


class Live:
    """Answers of a loaded model to one sample at a time.

    Everything it returns is as `evaluate.replies` has it: text, x0, y0, x1, y1, iou, outcome, and `seconds` that the
    answer took (0 where it was known).
    """

    def __init__(self, vlm: VLM):
        self._name, self._limit, self._models = vlm.name, vlm.max_new_tokens, _Models(vlm)
        self._batches: OrderedDict[str, Batch] = OrderedDict()
        self._known: dict[str, dict] = {}

    @property
    def vlm(self) -> VLM:
        return self._models.loaded(self._name)

    def answer(self, sample: Sample, condition: Intervention | None = None, limit: int | None = None) -> dict:
        """The greedy reply to a sample under a condition (None: the model left alone), judged. `limit`: tokens that it
        may take (None: the model's own)."""
        limit = limit or self._limit
        key = store.digest([sample.fingerprint, condition and condition.describe(), limit])
        if key in self._known:
            return self._known[key] | {"seconds": 0.0}
        began, found, vlm = time.perf_counter(), {}, self.vlm

        def work() -> None:
            batch = self._prepared(sample)
            vlm.running = 1
            ids = generate(vlm, batch, [condition], limit)[0, 0]
            text, finished = vlm.decode([int(i) for i in ids if i >= 0])
            found.update(text=text, finished=finished, resized=list(batch.resized[0]))

        fitting(vlm, work)
        self._known[key] = judged(vlm, sample, found)
        return self._known[key] | {"seconds": time.perf_counter() - began}

    def _prepared(self, sample: Sample) -> Batch:
        """The sample as a batch of one; features of a picture seen before are taken from there."""
        key = store.digest([sample.image_key, sample.text, sample.task])
        if key in self._batches:
            self._batches.move_to_end(key)
            return Batch(**vars(self._batches[key]) | {"samples": [sample]})
        self._batches[key] = self.vlm.see(self.vlm.prepare([sample]))
        if len(self._batches) > PICTURES:
            self._batches.popitem(last=False)
        return self._batches[key]

    def without(self, samples: Samples) -> Callable[[str, HeadSet], dict]:
        """`answer(id, heads)`: the reply to a sample with these heads cut (zero, all positions)."""
        by_id, limit = {s.id: s for s in samples}, samples.max_new_tokens
        return lambda name, heads: self.answer(by_id[name], Ablation(heads) if len(heads) else None, limit)

    def toward(self, samples: Samples) -> Callable[[str, int, HeadSet, str], dict]:
        """`answer(id, i, heads, phase)`: the reply while these heads look at segment i of the sample's picture, judged
        by that segment; i=-1: left alone, judged by the referent."""
        by_id, known, limit = {s.id: s for s in samples}, segments(samples), samples.max_new_tokens

        def answer(name: str, i: int, heads: HeadSet, phase: str = "decode") -> dict:
            sample = by_id[name]
            if i < 0:
                return self.answer(sample, None, limit)
            there = aimed(sample, known[sample.image_key][i], f"{name} -> {i}")
            return self.answer(there, Steering(heads, phase) if len(heads) else None, limit)

        return answer

    def looks(self, samples: Sequence[Sample]) -> dict[str, CloseUp]:
        """Close-ups of samples, by what they ask."""
        return {f"{i + 1}: {s.text}": close_up(self.vlm, s) for i, s in enumerate(samples)}


def counting(
    vlm: VLM, asked: Samples, scores: HeadScores, seeds: Sequence[int], batch_size: int = 16
) -> Callable[..., pd.DataFrame]:
    """`count(k, phase, tell)`: how often the box follows, over every segment of every picture (`steering.success`), for
    the top k heads and as many random ones of each seed; stored, so a number is computed once."""
    points, models = pointed(asked), _Models(vlm)

    def count(k: int, phase: str, tell: Callable[[int, int], None]) -> pd.DataFrame:
        cut = {n: h for n, h in groups(scores.top(k), seeds).items() if not n.startswith("layer")}
        with store.told(tell):
            return success(steer(models.loaded(vlm.name), points, cut, [k], phase, batch_size))

    return count


Run = Callable[..., pd.DataFrame]


def sweeping(
    vlm: VLM, tests: Mapping[str, Samples], scores: Mapping[str, HeadScores], seen: Samples, batch_size: int = 16
) -> Run:
    """`run(model, benchmark, condition, k, seed, kind, phase, tell)`: the replies of a whole test set at one point of a
    sweep, stored like any other, so a point is computed once. Columns as of `evaluate.replies`, with ablation (its
    kind) and phase.

    `tests`: benchmark to samples; `scores`: model to head scores, whose top heads are cut; `seen`: samples whose
    prompts give the outputs of kind `mean`; `tell(done, of)` is called as it goes on. Another model than
    `vlm` is loaded beside it.
    """
    models, means = _Models(vlm), {}

    def run(
        model: str, benchmark: str, condition: str, k: int, seed: int | None, kind: str, phase: str,
        tell: Callable[[int, int], None],
    ) -> pd.DataFrame:  # fmt: skip
        with store.told(tell):
            asked = models.loaded(model)
            if kind == "mean" and model not in means:
                means[model] = mean_outputs(asked, seen, batch_size)
            cut = {} if condition == "unmasked" else chosen_heads(scores[model], condition, k, seed)
            more = {"means": means[model]} if kind == "mean" else {}
            found = sweep_replies(
                asked, tests[benchmark], cut, [k], kind, phase, batch_size=batch_size, short="skip", **more
            )
        return found[(found.condition == condition) | (found.condition == "unmasked")].assign(
            ablation=kind, phase=phase
        )

    return run


def chosen_heads(scores: HeadScores, condition: str, k: int, seed: int | None) -> dict[str, HeadSet]:
    """The group that is cut at k under a condition of `evaluate.groups`, by its name there."""
    known = groups(scores.top(k), [] if seed is None else [seed])
    name = condition if seed is None else f"{condition} {seed}"
    if len(known.get(name, ())) < k:
        raise ValueError(f"{scores.model} has no {name} at k={k}: {scores.top(k).crowded or 'no such condition'}.")
    return {name: known[name]}


def pictures(samples: Samples) -> dict[str, tuple]:
    """What the widgets need to show samples: id to (text, image, referent)."""
    return {s.id: (s.text, s.image, s.box) for s in samples}


def first_look(
    vlm: VLM, scores: HeadScores, samples: Samples, ks: Sequence[int], most: int, seeds: Sequence[int], seen: Samples
) -> tuple:
    """Arguments of `widgets.explorer` for a few samples: replies without the top heads and without both kinds of
    controls for the numbers of `ks` up to `most`, and the rest live; `seen` as in `sweeping`."""
    ks = [k for k in ks if k <= most]
    swept = causal_sweep(vlm, [samples], scores.top(most), ks, ks, seeds)
    run = sweeping(vlm, {samples.benchmark: samples}, {vlm.name: scores}, seen)
    return {vlm.name: scores}, swept, pictures(samples), run
