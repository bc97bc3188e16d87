"""Steering: point at a thing, make heads look at it while the answer is written, and see where the box goes.

Ablation asks whether heads are *needed*; steering asks whether their looking is *enough*. The question stays the same
(*the red circle*), the top heads attend evenly to another thing's image tokens (`attention.Steering`), and the reply
counts as a success where its box has IoU >= 0.5 with the thing pointed at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from vrhlib.attention import Phase, Steering
from vrhlib.boxes import Box
from vrhlib.evaluate import UNMASKED, Condition, beforehand, cut_groups, groups, replies, together
from vrhlib.heads import HeadSet
from vrhlib.outcomes import IOU, UNREADABLE
from vrhlib.samples import Sample, Samples, Segment
from vrhlib.stats import Accuracy, Estimate, paired_difference
from vrhlib.vlm import VLM


def segments(asked: Samples) -> dict[str, tuple[Segment, ...]]:
    """What stands in each picture, by image key: the segments that its samples carry, else the things that they ask for
    (one thing asked for twice is one segment)."""
    found: dict[str, list[Segment]] = {}
    for s in asked:
        known = found.setdefault(s.image_key, [])
        for segment in s.segments or [Segment(s.text, s.box, s.mask)]:
            if all(segment.box.iou(other.box) < IOU for other in known):
                known.append(segment)
    return {key: tuple(several) for key, several in found.items()}


def pointed(asked: Samples) -> Samples:
    """Every sample once for every segment of its picture, which then stands in the place of the referent: `kind` is
    `referent` where the segment is what the text names (IoU >= 0.5), else `other`.

    A reply to such a sample is right if its box is at the segment. Raises ValueError if no picture has a second thing,
    or if there is one picture only, over which no interval can be had.
    """
    if len(asked.images) < 2:
        raise ValueError(f"{asked!r}: intervals resample pictures; take two or more (four expressions, if in pairs).")
    known = segments(asked)
    made = [aimed(s, segment, f"{s.id} -> {i}") for s in asked for i, segment in enumerate(known[s.image_key])]
    if all(s.kind == "referent" for s in made):
        raise ValueError(
            f"{asked!r}: no picture has a second thing to point at. Take samples with segments, or pairs=True."
        )
    return Samples(f"{asked.benchmark}, pointed", asked.split, made, asked.origin, asked.lost, asked.notes)


def aimed(sample: Sample, segment: Segment, name: str) -> Sample:
    """The sample with the segment in the place of its referent. Raises ValueError for one without a box."""
    if sample.box is None:
        raise ValueError(f"Sample {sample.id} has no box, so nobody can tell whether the answer goes elsewhere.")
    kind = "referent" if segment.box.iou(sample.box) >= IOU else "other"
    return replace(sample, id=name, box=segment.box, mask=segment.mask, kind=kind)


def steer(
    vlm: VLM,
    samples: Samples,
    groups: Mapping[str, HeadSet],
    ks: Sequence[int],
    phase: Phase = "decode",
    batch_size: int = 16,
) -> pd.DataFrame:
    """Replies to `pointed` samples with the first k heads of each group looking at the segment, for every k, and of the
    model left alone (`unmasked`).

    Columns as of `evaluate.replies`: outcome `correct` means that the box is at the segment pointed at (IoU >= 0.5);
    `centred` whether its centre lies in the segment's box; `stayed` whether it is at what the text names. Groups are
    named, and cut short, as in `evaluate.sweep_replies`.
    """
    cut = cut_groups(vlm, groups, ks, "skip")
    steered = {name: Steering(heads, phase) for name, heads in cut.items()}
    answers = replies(vlm, samples, {UNMASKED: None} | steered, batch_size)
    by_id = {s.id: s for s in samples}
    named = {(s.image_key, s.text): s.box for s in samples if s.kind == "referent"}
    boxes = [Box.of(row) for _, row in answers.iterrows()]
    asked = [by_id[name] for name in answers.id]
    answers["centred"] = [_centred(box, s.box) for box, s in zip(boxes, asked)]
    answers["stayed"] = [_stayed(box, named.get((s.image_key, s.text))) for box, s in zip(boxes, asked)]
    return answers


def _stayed(box: Box | None, named: Box | None) -> float:
    """Whether a box is at what the text names; NaN where that is none of the segments."""
    return float("nan") if named is None else float(box is not None and box.iou(named) >= IOU)


def sweep(
    vlm: VLM, samples: Samples, heads: HeadSet, ks: Sequence[int], k: int, seeds: Sequence[int], batch_size: int = 16
) -> pd.DataFrame:
    """`steer` in both phases: while the answer is written with the first of `heads` for every number of `ks`, in the
    prompt too for `k`; at `k` also with both kinds of controls, drawn from outside the first k (`evaluate.groups`).

    Columns as of `steer`, with phase (– for the model left alone, once).
    """
    parts, drawn = [], groups(heads.top(k), seeds)
    ways = ("decode", ks), ("all", [k])
    sets = [(phase, cut_groups(vlm, {"vrh": heads}, numbers, "skip")) for phase, numbers in ways]
    sets += [(phase, cut_groups(vlm, drawn, [k], "skip")) for phase, _ in ways]
    acting = [Steering(chosen, phase) for phase, each in sets for chosen in each.values()]
    beforehand(vlm, samples, acting, batch_size)
    for phase, numbers in ways:
        top = steer(vlm, samples, {"vrh": heads}, numbers, phase, batch_size)
        others = steer(vlm, samples, drawn, [k], phase, batch_size)
        known = others.condition.isin(["unmasked", *(["vrh"] if k in numbers else [])])
        found = together([top, others[~known]]).assign(phase=phase)
        alone = found.condition == "unmasked"
        found.loc[alone, "phase"] = "–"
        parts.append(found[~alone] if parts else found)
    return together(parts)


def _centred(box: Box | None, segment: Box) -> bool:
    """Whether the middle of a box lies in the segment's box."""
    if box is None:
        return False
    x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    return segment.x0 <= x < segment.x1 and segment.y0 <= y < segment.y1


def success(answers: pd.DataFrame, kind: str = "other") -> pd.DataFrame:
    """How often the box goes where one points, a row per model, condition, k and seed; percent.

    Columns: model, benchmark, condition, k, seed (and phase, where the replies have it); rate, low, high (boxes at the
    segment, 95 % bootstrap over pictures: segments of one picture are no independent trials; where none or all are,
    Wilson's for as many trials as pictures); centre, centre_low, centre_high (boxes whose centre lies in the segment's
    box, whatever their size); stayed (boxes at what the text names); unreadable (replies without a box); n (segments
    pointed at), pictures. `kind`: `other` counts things that the text does not name, `referent` the one that it does.
    """
    chosen, rows = answers[answers.kind == kind], []
    by = ["model", "benchmark", *Condition._fields, *(["phase"] if "phase" in answers else [])]
    for values, frame in chosen.groupby(by, sort=False, dropna=False):
        at, centred = ((frame.outcome == "correct"), frame.centred)
        rate, centre = (_share(hits, frame.image) for hits in (at, centred))
        rows.append(dict(zip(by, values)) | {
            "rate": rate.mean, "low": rate.low, "high": rate.high,
            "centre": centre.mean, "centre_low": centre.low, "centre_high": centre.high,
            "stayed": 100 * float(frame.stayed.mean()),
            "unreadable": 100 * float(frame.outcome.isin(UNREADABLE).mean()), "n": rate.n,
            "pictures": frame.image.nunique(),
        })  # fmt: skip
    table = pd.DataFrame(rows).astype({"seed": "Int64"})
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


def _share(hits: pd.Series, images: pd.Series) -> Estimate:
    """Percent of hits, 95 % interval over pictures."""
    if hits.nunique() > 1:
        return paired_difference(hits, [False] * len(hits), images.tolist())
    pictures = images.nunique()
    same = Accuracy(pictures if hits.iloc[0] else 0, pictures)
    return Estimate(same.mean, *same.interval, len(hits))


def compared(answers: pd.DataFrame, k: Mapping[str, int]) -> pd.DataFrame:
    """How much more often the box follows the top heads than it does otherwise, a row per model, phase and what they
    are compared with (unmasked, random, layer_matched: the mean over draws), at `k[model]` heads; points.

    `answers` as `sweep` returns them, of one or several models. Columns: model, phase, k, against, draws; more, low,
    high (95 % bootstrap over pictures, paired), n. Only things that the text does not name count.
    """
    rows, others = [], answers[answers.kind == "other"]
    for model, own in others.groupby("model", sort=False):
        at = own[(own.k == k[model]) | (own.k == 0)].assign(hit=lambda f: f.outcome == "correct")
        for phase, mine in at[at.condition == "vrh"].groupby("phase", sort=False):
            for against in ("unmasked", "random", "layer_matched"):
                drawn = at[(at.condition == against) & at.phase.isin([phase, "–"])]
                if drawn.empty:  # no other head of these layers is left
                    continue
                mean = drawn.groupby("id").hit.mean()[mine.id]
                more = paired_difference(mine.hit.astype(float), mean, mine.image.tolist())
                rows.append((model, phase, k[model], against, max(1, drawn.seed.nunique()), more.mean, more.low,
                             more.high, more.n))  # fmt: skip
    table = pd.DataFrame(rows, columns=["model", "phase", "k", "against", "draws", "more", "low", "high", "n"])
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table
