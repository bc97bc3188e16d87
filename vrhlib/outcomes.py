"""What a stored reply says, and whether it is right; read anew each time, so a changed parser needs no new replies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vrhlib.answers import OUTCOMES as ANSWER_OUTCOMES
from vrhlib.answers import judge
from vrhlib.boxes import Box
from vrhlib.samples import Sample
from vrhlib.vlm import VLM

IOU = 0.5  # a grounding is right at this overlap or more
OUTCOMES = ("correct", "wrong box", "degenerate", "malformed", "cut off", "no box")  # of a grounding
POINT_OUTCOMES = ("correct", "wrong point", "cut off", "no point")  # of pointing
UNREADABLE = ("malformed", "cut off", "no box", "no point", "no answer")  # nothing of the kind asked for in the reply
POSSIBLE = {"answer": ANSWER_OUTCOMES, "point": POINT_OUTCOMES, "locate": OUTCOMES, "question": OUTCOMES}  # by task


def judged(vlm: VLM, sample: Sample, record: Mapping) -> dict:
    """A stored reply, judged: id, kind, task, text, x0, y0, x1, y1 (original pixels, NaN where there is no box), iou,
    inside (share of a reply's points in the mask), outcome (one of `POSSIBLE`).

    `record`: text, finished (whether the reply ended by itself), resized (width, height of the picture as seen).
    """
    text, finished = record["text"], record["finished"]
    box, iou, inside = None, np.nan, np.nan
    if sample.task == "answer":
        outcome = judge(text, sample.answer, sample.rule, sample.choices, finished)
    elif sample.task == "point":
        points, mask = vlm.read_points(text, sample.image.size, tuple(record["resized"])), sample.pixels
        hits = [_hit(mask, x, y) for x, y in points]
        inside = float(np.mean(hits)) if hits else 0.0
        outcome = ("correct" if hits[0] else "wrong point") if hits else "no point" if finished else "cut off"
    else:
        reply = vlm.read(text, sample.image.size, tuple(record["resized"]), finished)
        box, iou = reply.box, reply.box.iou(sample.box) if reply.box and sample.box else 0.0
        outcome = reply.failure or ("correct" if iou >= IOU else "wrong box")
    corners = dict(zip(Box._fields, box or (np.nan,) * 4))
    return {"id": sample.id, "kind": sample.kind, "task": sample.task, "text": text, **corners, "iou": iou,
            "inside": inside, "outcome": outcome}  # fmt: skip


def _hit(mask: np.ndarray, x: float, y: float) -> bool:
    """Whether a point lies in the mask, bool [height, width]; a point beside the picture does not."""
    height, width = mask.shape
    return 0 <= x < width and 0 <= y < height and bool(mask[int(y), int(x)])
