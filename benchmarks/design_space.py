"""What all head scores cost beside one of them, and captured rows beside eager attention.

    python benchmarks/design_space.py --n 64 --repeats 5 --out design_space.csv

Every number is a ratio of two measurements that took turns in this process: best time over best time (or highest peak
over highest peak), and in brackets the smallest and largest ratio of a turn. Seconds would describe the machine. Run it
while nothing else runs. The embedded models stand for the real ones in kind only: in a small model the language model
is cheap, so everything that is done beside it weighs more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from vrhlib import scoring, store
from vrhlib.attention import capture, generate, with_replies
from vrhlib.benchmarks import grounding
from vrhlib.design_space import VRH
from vrhlib.samples import Samples
from vrhlib.vlm import VLM, Batch
from vrhlib.wiring import load_vlm

COLUMNS = ["model", "comparison", "image_tokens", "quantity", "ratio", "low", "high", "n", "repeats", "device"]
WITH_REPLY = "all variants / one, with the reply"
PASS_ALONE = "all variants / one, captured pass alone"
ROWS_EAGER = "one variant / eager attention"
ALL_EAGER = "all variants / eager attention"
TARGET = 1.3  # of WITH_REPLY


@dataclass(frozen=True)
class Turn:
    """One measurement: seconds, and peak memory in MiB above what was held (NaN where it was not measured)."""

    seconds: float
    mib: float = math.nan


def ratios(comparison: str, turns: Sequence[tuple[Turn, Turn]], **facts: object) -> list[dict]:
    """A row for time and, where it was measured, one for memory; `turns` are (numerator, denominator) pairs."""
    rows = []
    for quantity, best in (("seconds", min), ("mib", max)):
        values = np.array([[getattr(side, quantity) for side in turn] for turn in turns])
        if np.isfinite(values).all():
            each, (above, below) = values[:, 0] / values[:, 1], map(best, values.T)
            found = {"ratio": above / below, "low": each.min(), "high": each.max()}
            rows.append({"comparison": comparison, "quantity": quantity, "repeats": len(turns), **found, **facts})
    return rows


def alternating(first: Callable[[], object], second: Callable[[], object], repeats: int, device: object) -> list:
    """(first, second) times, after one unmeasured call of each; every other pair the second goes first."""
    works = (first, second)
    for work in works:
        work()
    turns = []
    for i in range(repeats):
        seconds = {}
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            _, seconds[which], _ = store.measure(works[which], device=device)
        turns.append((Turn(seconds[0]), Turn(seconds[1])))
    return turns


# ---------------------------------------------------------------- the two sides


def whole(vlm: VLM, samples: Samples, batch_size: int) -> np.ndarray:
    """The whole design space as the library captures it, nothing reused; VRH's values, float [n, layers, heads]."""
    before = store.ROOT
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        store.ROOT = Path(folder)
        try:
            return scoring.score_samples(vlm, samples, batch_size).theta(VRH.queries, VRH.keys)
        finally:
            store.ROOT = before


def alone(vlm: VLM, samples: Samples, batch_size: int) -> np.ndarray:
    """VRH's values and nothing else: reply, then a captured pass over prompt and reply. Nothing is stored."""
    found = []
    for i in range(0, len(samples), batch_size):
        batch = vlm.prepare(samples[i : i + batch_size])
        found.append(one_variant(vlm, batch, replies_to(vlm, batch)))
    return np.concatenate(found)


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


# ---------------------------------------------------------------- comparisons


def design_space(vlm: VLM, samples: Samples, repeats: int, batch_size: int) -> list[dict]:
    """All variants against one: from picture to numbers, and the captured pass alone."""
    difference = np.abs(whole(vlm, samples, batch_size) - alone(vlm, samples, batch_size)).max()
    if not difference < 1e-3:
        raise RuntimeError(f"{vlm.name}: both sides should give VRH's values, but they differ by {difference}.")
    batches = [vlm.see(vlm.prepare(samples[i : i + batch_size])) for i in range(0, len(samples), batch_size)]
    replies = [replies_to(vlm, batch) for batch in batches]
    names = scoring.variants(scoring.offered(samples)[0], text=False, forced=True)
    facts = {"image_tokens": len(batches[0].grids[0]), "n": len(samples)}

    def each(work: Callable, *more: object) -> None:
        for batch, said in zip(batches, replies):
            work(vlm, batch, said, *more)

    both = [partial(side, vlm, samples, batch_size) for side in (whole, alone)]
    passes = partial(each, scoring._theta, names), partial(each, one_variant)
    return [
        *ratios(WITH_REPLY, alternating(*both, repeats, vlm.device), **facts),
        *ratios(PASS_ALONE, alternating(*passes, repeats, vlm.device), **facts),
    ]


def against_eager(vlm: VLM, samples: Samples, factor: int, repeats: int) -> list[dict]:
    """One sample, enlarged: the pass that captures one variant, or all, against `output_attentions`."""
    large = samples[:1].enlarged(factor)
    batch = vlm.see(vlm.prepare(large))
    sample = batch.samples[0]
    written = vlm.write_box(sample.box, sample.image.size, batch.resized[0])
    reply = vlm.tokenizer(written, add_special_tokens=False)["input_ids"]
    names = scoring.variants(scoring.offered(large)[0], text=False, forced=True)
    one, every = [], []
    for turn in range(-1, repeats):  # the first is not counted
        table = scoring.capture_cost(vlm, samples[0], [factor], repeats=1).set_index("method")
        _, seconds, mib = store.measure(scoring._theta, vlm, batch, [reply], names, device=vlm.device)
        rows, eager = (Turn(table.seconds[method], table.peak_mib[method]) for method in ("rows", "eager"))
        if turn >= 0:
            one.append((rows, eager))
            every.append((Turn(seconds, mib), eager))
    facts = {"image_tokens": len(batch.grids[0]), "n": 1}
    return ratios(ROWS_EAGER, one, **facts) + ratios(ALL_EAGER, every, **facts)


def enlargement(vlm: VLM, samples: Samples, tokens: int) -> int:
    """How many times a picture has to be enlarged to make at least so many image tokens; where pictures are cut into
    tiles, the model may from now on cut as many more of them."""
    processor = vlm.processor.image_processor
    tiles = getattr(processor, "max_patches", None)
    for factor in range(1, 9):
        if tiles:
            processor.max_patches = tiles * factor**2
        if len(vlm.prepare(samples[:1].enlarged(factor)).grids[0]) >= tokens:
            return factor
    raise ValueError(
        f"{vlm.name} makes fewer than {tokens} image tokens of a picture 8 times as wide. Ask for fewer (--tokens)."
    )


def measured(name: str, options: argparse.Namespace) -> pd.DataFrame:
    """Every ratio of a model, one a row."""
    vlm, samples = load_vlm(name, options.device), grounding("scenes", "detect", options.n, seed=0)
    device = str(vlm.device)
    rows = design_space(vlm, samples, options.repeats, options.batch_size)
    factor = enlargement(vlm, samples, options.tokens)
    few = samples[: max(1, options.n // 8)].enlarged(factor)
    rows += design_space(vlm, few, options.repeats, options.batch_size)
    rows += against_eager(vlm, samples, factor, options.repeats)
    return pd.DataFrame(rows).assign(model=name, device=device)[COLUMNS]


def told(row: pd.Series) -> str:
    """A row in words."""
    span, kind = f"({row.low:.2f} to {row.high:.2f})", {"seconds": "time", "mib": "peak memory"}[row.quantity]
    where = f"{row.model}, {row.image_tokens} image tokens, n={row.n}"
    goal = f"  target {TARGET}" if row.comparison == WITH_REPLY else ""
    return f"{where:48}  {row.comparison:40}  {kind:11}  {row.ratio:6.3f} {span}{goal}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=64, help="scenes; an eighth of them for enlarged pictures")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["nano-qwen2.5-vl", "nano-internvl3.5"])
    parser.add_argument("--device", help="cpu, cuda; default: CUDA where there is one")
    parser.add_argument("--tokens", type=int, default=800, help="image tokens of an enlarged picture, at least")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, help="CSV file: " + ", ".join(COLUMNS))
    return parser.parse_args()


def main() -> None:
    options, tables = arguments(), []
    for name in options.models:
        tables.append(measured(name, options))
        for _, row in tables[-1].iterrows():
            print(told(row), flush=True)
    if options.out:
        store.write_atomic(options.out, pd.concat(tables).to_csv(index=False))


if __name__ == "__main__":
    main()
