"""Several ways to the same result take turns in one process: what each costs beside another.

Seconds would describe the machine, so all that is told is ratios: best time over best time of the rounds, and the
lowest and highest ratio within a round, since what else the machine does falls on all ways of a round alike. Time is
CPU time of this process (on a GPU, wall time until the device is done). A fast wrong number is worth nothing: before
anything is timed, all ways have to give the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from vrhlib import store

COLUMNS = ["measure", "model", "image_tokens", "quantity", "ratio", "low", "high", "n", "rounds", "device"]
TIME, MEMORY = "time", "peak memory"
TOLERANCE = 1e-5  # of numbers in float32

Found = Mapping[str, object]
"""What a way found, by name: arrays of numbers, or replies as lists of token ids."""


class Disagreement(RuntimeError):
    """Two ways that should give the same do not, so comparing their cost means nothing."""


def agree(results: Mapping[str, Found], tolerance: float = TOLERANCE) -> None:
    """Hold every way's results against those of the first, wherever both have one of that name.

    Arrays of floats may differ by `tolerance`, of 1 or of their largest entry if that is more, anything else not at
    all. Raises Disagreement; also for a way that has nothing in common with the first, which nobody could check."""
    (first, wanted), *others = results.items()
    for name, found in others:
        common = wanted.keys() & found.keys()
        if not common:
            raise Disagreement(f"Nothing that {name!r} gives can be held against {first!r}, so neither is timed.")
        for what in sorted(common):
            if problem := _apart(wanted[what], found[what], tolerance):
                raise Disagreement(f"{name!r} and {first!r} should give the same {what}, but {problem}.")


def _apart(a: object, b: object, tolerance: float) -> str:
    """How two results differ; "" if they do not."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind == "f":
        if a.shape != b.shape:
            return f"one has the shape {b.shape}, the other {a.shape}"
        largest = float(np.abs(a - b).max()) / max(1.0, float(np.abs(a).max()))
        return "" if largest <= tolerance else f"they differ by {largest:.2g}"  # NaN is no agreement
    same = np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
    return "" if same else f"one is {str(b)[:80]}, the other {str(a)[:80]}"


@dataclass(frozen=True)
class Turns:
    """Seconds, and MiB above what was held before, of each way, one a round."""

    seconds: Mapping[str, Sequence[float]]
    mib: Mapping[str, Sequence[float]] = field(default_factory=dict)
    device: str = "cpu"

    def rows(self, measure: str, above: str, below: str, **facts: object) -> list[dict]:
        """A row for the time that `above` takes over that of `below`, and one for memory where it was measured."""
        found = []
        for quantity, best, values in ((TIME, min, self.seconds), (MEMORY, max, self.mib)):
            a, b = np.array(values.get(above, ())), np.array(values.get(below, ()))
            if len(a) and np.isfinite([*a, *b]).all():
                each = a / np.maximum(b, 1e-9)
                ratio = {"ratio": best(a) / max(best(b), 1e-9), "low": each.min(), "high": each.max()}
                about = {"quantity": quantity, "rounds": len(a), "device": self.device}
                found.append({"measure": measure} | ratio | about | facts)
        return found


def turns(
    ways: Mapping[str, Callable[[], Found]],
    rounds: int,
    device: object = "cpu",
    memory: Sequence[str] = (),
    tolerance: float = TOLERANCE,
) -> Turns:
    """Let ways take turns, after one unmeasured call of each, whose results must agree (see `agree`).

    Every round begins with another way. `memory`: ways whose peak memory is measured too, in two rounds of their own:
    to make a peak visible, memory is handed back before, which takes time."""
    agree({name: way() for name, way in ways.items()}, tolerance)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            began = clock(device)
            ways[name]()
            seconds[name].append(clock(device) - began)
    mib: dict[str, list[float]] = {name: [] for name in memory}
    for _ in range(2):
        for name in memory:
            mib[name].append(store.measure(ways[name], device=device)[2])
    return Turns(seconds, mib, str(device))


def clock(device: object) -> float:
    """Seconds: of this process' CPU time, or, on a GPU, on the wall once the device has done all it was asked."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


@contextlib.contextmanager
def nothing_stored() -> Iterator[None]:
    """Results go to a folder that is thrown away: nothing is found there, so all is computed; progress is not shown."""
    before = store.ROOT
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        store.ROOT = Path(folder)
        try:
            yield
        finally:
            store.ROOT = before


# ---------------------------------------------------------------- as a script


def as_shipped() -> None:
    """Forget settings of this shell that change what is measured: plain decoding, and features kept from earlier. One
    thread: several wait for each other, and what they wait is CPU time too."""
    for name in ("VRHLIB_STRICT", "VRHLIB_FEATURES_GB"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)


def table(rows: Sequence[Mapping], more: Sequence[str] = ()) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[*COLUMNS, *more])


def told(row: pd.Series) -> str:
    """A row in words."""
    where = f"{row.model}, {row.image_tokens} image tokens, n={row.n}"
    return f"{where:52}  {row.measure:52}  {row.quantity:11}  {row.ratio:6.2f} ({row.low:.2f} to {row.high:.2f})"


def arguments(about: str, models: Sequence[str], **more: tuple[object, str]) -> argparse.Namespace:
    """Options of a script: --models, --rounds, --device, --out, and `more` (name: default and help)."""
    as_shipped()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models))
    parser.add_argument("--rounds", type=int, default=3, help="turns that each way takes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file")
    for name, (default, words) in more.items():
        kind = type(default) if not isinstance(default, tuple) else type(default[0])
        several = {"nargs": "+"} if isinstance(default, tuple) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=words, **several)
    return parser.parse_args()


def written(found: pd.DataFrame, out: Path | None) -> None:
    """Print a table of ratios, and write it to `out` if that is given."""
    for _, row in found.iterrows():
        print(told(row), flush=True)
    if out:
        store.write_atomic(out, found.to_csv(index=False))
