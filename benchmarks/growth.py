"""How cost grows: with the number of samples, of conditions, and of image tokens.

    python -m benchmarks.growth --out growth.csv

Time relative to the smallest of each, and the exponent of the power law that fits best: 1 is linear, less is cheaper
than that. Samples: unmasked replies, in batches of eight. Conditions: one picture under so many draws of random heads.
Image tokens: one picture enlarged, reply and captured pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from benchmarks.ablation import answered, known_scores, verified
from benchmarks.capture import enlargement, forced
from benchmarks.turns import arguments, clock
from vrhlib import store
from vrhlib.attention import Ablation
from vrhlib.benchmarks import grounding
from vrhlib.vlm import VLM
from vrhlib.wiring import load_vlm

COLUMNS = ["model", "axis", "x", "relative", "low", "high", "exponent", "rounds", "device"]
SAMPLES, CONDITIONS, TOKENS = (8, 16, 32), (1, 2, 4, 8, 16), (48, 192, 768, 1500)


def grown(works: Mapping[float, Callable[[], object]], rounds: int, device: object) -> list[dict]:
    """Time of each size relative to the smallest, best over best, with the lowest and highest of a round."""
    for work in works.values():
        work()
    seconds: dict[float, list[float]] = {x: [] for x in works}
    for _ in range(rounds):
        for x, work in works.items():
            began = clock(device)
            work()
            seconds[x].append(clock(device) - began)
    first = np.maximum(seconds[next(iter(works))], 1e-9)
    rows = []
    for x, took in seconds.items():
        each = np.array(took) / first
        rows.append({"x": x, "relative": min(took) / min(first), "low": each.min(), "high": each.max()})
    fitted = exponent([row["x"] for row in rows], [row["relative"] for row in rows])
    return [row | {"exponent": fitted, "rounds": rounds, "device": str(device)} for row in rows]


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the power law through the points, by least squares of the logarithms; NaN for a single one."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(x) > 1 else float("nan")


def measured(
    vlm: VLM,
    rounds: int,
    samples: Sequence[int] = SAMPLES,
    conditions: Sequence[int] = CONDITIONS,
    tokens: Sequence[int] = TOKENS,
) -> list[dict]:
    """All three curves of a model, in the columns of `COLUMNS`."""
    scores, drawn = known_scores(vlm), grounding("scenes", "test", max(samples), seed=0)
    acting = [Ablation(scores.controls(4, seed)) for seed in range(max(conditions))]
    curves = {
        "samples": {n: partial(answered, vlm, drawn[:n].batches(8)) for n in samples},
        "conditions": {c: partial(verified, vlm, drawn[:1], acting[:c]) for c in conditions},
    }
    rows = [{"axis": axis} | row for axis, works in curves.items() for row in grown(works, rounds, vlm.device)]
    works = {}
    for wanted in tokens:
        batch = vlm.prepare(drawn[:1].enlarged(enlargement(vlm, drawn, wanted)))
        works[len(batch.grids[0])] = partial(forced, vlm, batch)
    rows += [{"axis": "image tokens"} | row for row in grown(works, rounds, vlm.device)]
    return [{"model": vlm.name} | row for row in rows]


def main() -> None:
    given = arguments(
        __doc__, ["nano-qwen2.5-vl"], samples=(SAMPLES, "numbers of samples"), tokens=(TOKENS, "image tokens"),
        conditions=(CONDITIONS, "numbers of conditions"),
    )  # fmt: skip
    rows: list[dict] = []
    for name in given.models:
        vlm = load_vlm(name, given.device)
        rows += measured(vlm, given.rounds, given.samples, given.conditions, given.tokens)
    found = pd.DataFrame(rows, columns=COLUMNS)
    for _, row in found.iterrows():
        print(f"{row.model}  {row.axis:12} {row.x:6.0f}  {row.relative:7.2f} (exponent {row.exponent:.2f})", flush=True)
    if given.out:
        store.write_atomic(given.out, found.to_csv(index=False))


if __name__ == "__main__":
    main()
