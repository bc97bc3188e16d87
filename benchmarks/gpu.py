"""Detection and a sweep on a GPU, with models of the real sizes and random weights: five minutes, no download.

    python -m benchmarks.gpu --out gpu.csv

Per model and number of image tokens: seconds a sample for detection (processor, vision tower, a reply of 24 tokens, a
captured pass), with eager attention in place of captured rows beside it; tokens a second while the reply is written;
peak memory, weights included; and what the paper's Table A11 reports for InternVL3-8B on an A6000. Then the sweep of
`benchmarks.ablation` at the smallest number of image tokens, against the naive loop.

What a pass costs does not depend on the weights, but how much of a draft is kept does: with random weights the sweep's
ratio says what batching saves, not what drafts do. And in bfloat16 two near-equal logits may change places between
batch sizes, so replies are compared in share (`same`), captured rows to 3e-2.

This has run on a CPU, on small configurations; on a GPU it has NOT been run yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
from PIL import Image

from benchmarks.ablation import naive, verified
from benchmarks.capture import captured_pass, eager_pass, own_reply
from benchmarks.models import random_vlm
from benchmarks.turns import agree, arguments, clock
from vrhlib import store
from vrhlib.attention import Ablation, generate
from vrhlib.boxes import Box
from vrhlib.heads import HeadSet
from vrhlib.samples import Sample, Samples
from vrhlib.vlm import VLM

MODELS, TOKENS = ("internvl3-8b", "qwen2.5-vl-7b"), (256, 3328)
# Table A11: (GiB, seconds a sample), InternVL3-8B on an A6000; "fused" there is what is captured here.
A11 = {("captured", 256): (14.92, 1.41), ("captured", 3328): (16.01, 2.31),
       ("eager", 256): (15.09, 1.77), ("eager", 3328): (34.59, 4.86)}  # fmt: skip
COLUMNS = ["model", "method", "image_tokens", "seconds", "tokens_per_s", "peak_gib", "paper_seconds", "paper_gib",
           "ratio", "same", "n", "rounds", "device"]  # fmt: skip
SWEEP = "naive loop / sweep of 12 conditions"


def picture(vlm: VLM, tokens: int, seed: int = 0) -> Sample:
    """Noise that makes exactly so many image tokens, with a box in its middle. Raises ValueError where none does."""
    width, height = vlm.family.unit(vlm)
    cells = tokens
    if vlm.tile_tokens:
        cells = max(1, tokens // vlm.tile_tokens - 1)  # several tiles come with a thumbnail
    rows = next(r for r in range(int(cells**0.5), 0, -1) if cells % r == 0)
    size = cells // rows * width, rows * height
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    box = Box(0.3 * size[0], 0.3 * size[1], 0.7 * size[0], 0.7 * size[1])
    sample = Sample(f"noise {tokens}", Image.fromarray(noise), f"noise {size} {seed}", "the red circle", box)
    if (made := len(vlm.prepare([sample]).grids[0])) != tokens:
        raise ValueError(f"{vlm.name} makes {made} image tokens of {size[0]} x {size[1]} pixels, not {tokens}.")
    return sample


def detection(vlm: VLM, sample: Sample, one_pass: Callable) -> dict:
    """What one sample takes until its rows are there."""
    batch = vlm.prepare([sample])
    return one_pass(vlm, batch, own_reply(vlm, batch))


def timed(work: Callable, rounds: int, device: torch.device) -> tuple[float, float]:
    """Best seconds of a call, and peak memory of the device (of the process, on a CPU) in GiB, weights included."""
    cuda, took = device.type == "cuda", []
    work()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(rounds):
        began = clock(device)
        work()
        took.append(clock(device) - began)
    return min(took), (torch.cuda.max_memory_allocated(device) / 2**30 if cuda else store.peak_mib() / 2**10)


def measured(vlm: VLM, tokens: tuple[int, ...] | list[int], rounds: int) -> list[dict]:
    """Detection at each number of image tokens, and the sweep at the first, in the columns of `COLUMNS`."""
    about = {"model": vlm.name, "n": 1, "rounds": rounds, "device": str(vlm.device)}
    exact = vlm.model.dtype == torch.float32
    rows, paper = [], vlm.name.endswith("internvl3-8b")
    for count in tokens:
        sample = picture(vlm, count)
        batch = vlm.see(vlm.prepare([sample]))
        reply = own_reply(vlm, batch)
        ways = {"captured": captured_pass, "eager": eager_pass}
        found = {name: {"rows": way(vlm, batch, reply)["rows"]} for name, way in ways.items()}
        agree(found, 1e-5 if exact else 3e-2)
        writing, _ = timed(partial(generate, vlm, batch), rounds, vlm.device)
        reading, _ = timed(partial(generate, vlm, batch, max_new_tokens=1), rounds, vlm.device)
        speed = (len(reply) - 1) / max(writing - reading, 1e-9)
        for name, way in ways.items():
            seconds, gib = timed(partial(detection, vlm, sample, way), rounds, vlm.device)
            gib_there, seconds_there = A11.get((name, count), (np.nan, np.nan)) if paper else (np.nan, np.nan)
            rows.append(about | {
                "method": name, "image_tokens": count, "seconds": seconds, "tokens_per_s": speed, "peak_gib": gib,
                "paper_seconds": seconds_there, "paper_gib": gib_there,
            })  # fmt: skip
    samples = Samples("noise", "test", [picture(vlm, tokens[0])])
    return [*rows, about | {"image_tokens": tokens[0]} | sweep(vlm, samples, rounds)]


def sweep(vlm: VLM, samples: Samples, rounds: int) -> dict:
    """Time of the naive loop over that of the sweep, twelve conditions of eight random heads, and the share of replies
    that came out the same."""
    pick = np.random.default_rng(0)
    layers, heads = vlm.grid
    acting: list[Ablation | None] = [None]
    for _ in range(11):
        cells = pick.permutation(layers * heads)[:8]
        acting.append(Ablation(HeadSet([divmod(int(cell), heads) for cell in cells], vlm.grid)))
    one, ours = naive(vlm, samples, acting)["replies"], verified(vlm, samples, acting)["replies"]
    if vlm.model.dtype == torch.float32:
        agree({"naive loop": {"replies": one}, "sweep": {"replies": ours}})
    first, _ = timed(partial(naive, vlm, samples, acting), rounds, vlm.device)
    second, _ = timed(partial(verified, vlm, samples, acting), rounds, vlm.device)
    same = float(np.mean([a == b for a, b in zip(one, ours)]))
    return {"method": SWEEP, "seconds": second, "ratio": first / second, "same": same, "n": len(acting)}


def main() -> None:
    given = arguments(__doc__, MODELS, tokens=(TOKENS, "image tokens"))
    half = given.device.startswith("cuda")
    rows: list[dict] = []
    for name in given.models:
        vlm = random_vlm(name, given.device, torch.bfloat16 if half else torch.float32)
        rows += measured(vlm, given.tokens, given.rounds)
        vlm.release()
    found = pd.DataFrame(rows, columns=COLUMNS)
    print(found.round(3).to_string(index=False))
    if given.out:
        store.write_atomic(given.out, found.to_csv(index=False))


if __name__ == "__main__":
    main()
