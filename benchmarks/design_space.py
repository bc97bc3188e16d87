"""What all head scores cost beside one of them, and captured rows beside eager attention.

    python -m benchmarks.design_space --n 16 --out design_space.csv

The embedded models stand for the real ones in kind only: in a small model the language model is cheap, so everything
that is done beside it weighs more.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.capture import as_written, captured_pass, eager_pass, enlargement
from benchmarks.turns import Found, arguments, nothing_stored, table, turns, written
from vrhlib import scoring
from vrhlib.attention import capture, generate, with_replies
from vrhlib.benchmarks import grounding
from vrhlib.design_space import VRH
from vrhlib.samples import Samples
from vrhlib.vlm import VLM, Batch
from vrhlib.wiring import load_vlm

WITH_REPLY = "all variants / one, with the reply"
PASS_ALONE = "all variants / one, captured pass alone"
ROWS_EAGER = "one variant / eager attention"
ALL_EAGER = "all variants / eager attention"
MODELS = ("nano-qwen2.5-vl", "nano-internvl3.5")
_VRH = ("output", "sum", "any")  # of `scoring.variants`


# ---------------------------------------------------------------- the two sides


def whole(vlm: VLM, samples: Samples, batch_size: int) -> Found:
    """The whole design space as the library captures it, nothing reused; VRH's values, float [n, layers, heads]."""
    with nothing_stored():
        return {"values": scoring.score_samples(vlm, samples, batch_size).theta(VRH.queries, VRH.keys)}


def alone(vlm: VLM, samples: Samples, batch_size: int) -> Found:
    """VRH's values and nothing else: reply, then a captured pass over prompt and reply. Nothing is stored."""
    found = []
    for i in range(0, len(samples), batch_size):
        batch = vlm.prepare(samples[i : i + batch_size])
        found.append(one_variant(vlm, batch, replies_to(vlm, batch)))
    return {"values": np.concatenate(found)}


def replies_to(vlm: VLM, batch: Batch) -> list[list[int]]:
    """Greedy replies as token ids, without the one that ends them."""
    return [[int(i) for i in row if i >= 0 and i not in vlm.stop_ids] for row in generate(vlm, batch)[:, 0]]


@torch.inference_mode()
def one_variant(vlm: VLM, batch: Batch, replies: list[list[int]]) -> np.ndarray:
    """Attention on the referent, mean over the rows that predict each reply, float [B, layers, heads]."""
    inputs = with_replies(vlm, batch, replies)
    inside = torch.zeros(len(batch), 1, inputs["input_ids"].shape[1], 1)
    rows = torch.full((len(batch), max(map(len, replies))), -1)
    for b, (sample, reply) in enumerate(zip(batch.samples, replies)):
        inside[b, 0, batch.image_columns[b][batch.grids[b].tokens_in(sample.box)]] = 1
        rows[b, : len(reply)] = torch.arange(len(reply)) + batch.length - 1
    inside = inside.to(vlm.device)
    with capture(vlm, rows, {"sum": lambda a: (a @ inside)[..., 0]}) as got:
        vlm.model(**inputs, logits_to_keep=1)
    counts = np.array([len(reply) for reply in replies])[:, None, None]
    return got["sum"].sum(-1).cpu().numpy() / counts


def vrh_of(sample: dict, names: list) -> np.ndarray:
    """VRH's values among all that a captured pass left of a sample, float [layers, heads]."""
    return scoring._unpack(sample["theta"])[names.index(_VRH)]


# ---------------------------------------------------------------- comparisons


def design_space(vlm: VLM, samples: Samples, rounds: int, batch_size: int) -> list[dict]:
    """All variants against one: from picture to numbers, and the captured pass alone."""
    batches = [vlm.see(vlm.prepare(samples[i : i + batch_size])) for i in range(0, len(samples), batch_size)]
    replies = [replies_to(vlm, batch) for batch in batches]
    names = scoring.variants(scoring.offered(samples)[0], text=False, forced=True)
    facts = {"model": vlm.name, "image_tokens": len(batches[0].grids[0]), "n": len(samples)}

    def every_variant() -> Found:
        found = [scoring._theta(vlm, batch, said, names) for batch, said in zip(batches, replies)]
        return {"values": np.stack([vrh_of(sample, names) for several in found for sample in several])}

    def one() -> Found:
        return {"values": np.concatenate([one_variant(vlm, b, said) for b, said in zip(batches, replies)])}

    both = {name: partial(side, vlm, samples, batch_size) for name, side in (("all", whole), ("one", alone))}
    return [
        *turns(both, rounds, vlm.device).rows(WITH_REPLY, "all", "one", **facts),
        *turns({"all": every_variant, "one": one}, rounds, vlm.device).rows(PASS_ALONE, "all", "one", **facts),
    ]


def against_eager(vlm: VLM, samples: Samples, factor: int, rounds: int) -> list[dict]:
    """One sample, enlarged: the pass that captures one variant, or all, against `output_attentions`."""
    large = samples[:1].enlarged(factor)
    batch = vlm.see(vlm.prepare(large))
    reply = as_written(vlm, batch)
    names = scoring.variants(scoring.offered(large)[0], text=False, forced=True)

    def every_variant() -> Found:
        return {"rows": vrh_of(scoring._theta(vlm, batch, [reply], names)[0], names)}

    ways = {"one": partial(captured_pass, vlm, batch, reply), "eager": partial(eager_pass, vlm, batch, reply),
            "all": every_variant}  # fmt: skip
    found = turns(ways, rounds, vlm.device, tuple(ways))
    facts = {"model": vlm.name, "image_tokens": len(batch.grids[0]), "n": 1}
    return found.rows(ROWS_EAGER, "one", "eager", **facts) + found.rows(ALL_EAGER, "all", "eager", **facts)


def measured(vlm: VLM, n: int, tokens: int, rounds: int, batch_size: int = 8) -> list[dict]:
    """Every ratio of a model: on `n` scenes, and on an eighth of them enlarged to `tokens` image tokens."""
    samples = grounding("scenes", "detect", n, seed=0)
    rows = design_space(vlm, samples, rounds, batch_size)
    factor = enlargement(vlm, samples, tokens)
    rows += design_space(vlm, samples[: max(1, n // 8)].enlarged(factor), rounds, batch_size)
    return rows + against_eager(vlm, samples, factor, rounds)


def main() -> None:
    given = arguments(
        __doc__, MODELS, n=(16, "scenes; an eighth of them for enlarged pictures"),
        tokens=(800, "image tokens of an enlarged picture, at least"), batch_size=(8, "samples at once"),
    )  # fmt: skip
    rows = [
        row
        for name in given.models
        for row in measured(load_vlm(name, given.device), given.n, given.tokens, given.rounds, given.batch_size)
    ]
    written(table(rows), given.out)


if __name__ == "__main__":
    main()
