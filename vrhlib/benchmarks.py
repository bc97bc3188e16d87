"""Every benchmark by name: `grounding(...)` gives samples whose answer is a box (or a point), `answering(...)` those
whose answer is a word or a number.

The splits `detect` and `test` of a benchmark are disjoint by *image* unless `split_by="row"` is asked for: heads found
on a picture are not judged on it. The nano benchmarks stand in the place of real ones (the column `like`) and never
under their names; the real ones are read from the Hub and never replaced by anything else. Text, words and pages on
which earlier methods look for their heads are made here, under both profiles.
"""

from __future__ import annotations

from vrhlib import store
from vrhlib.generated import BENCHMARKS as GENERATED
from vrhlib.nano.benchmarks import BENCHMARKS as NANO
from vrhlib.real import BENCHMARKS as REAL
from vrhlib.samples import Benchmark, Samples

BENCHMARKS: dict[str, Benchmark] = NANO | REAL | GENERATED


def grounding(benchmark: str, split: str, n: int | None = None, seed: int = 0, **options: object) -> Samples:
    """n samples (None: all there are) of a benchmark's split whose answer is a box, drawn by seed.

    With `pairs=True` two expressions a picture, about two different things (n counts expressions). Real benchmarks take
    more options, see `real`. Raises ValueError for an unknown benchmark, split or option (with the nearest name), for
    n < 1, and for an odd n with `pairs`; what can go wrong with real data is said in `hub.open_table`.
    """
    known = _known(benchmark, split, n, seed, ("grounding",), options)
    if options.get("pairs") and n and n % 2:
        raise ValueError(f"n={n}: pairs come two at a time; ask for an even number.")
    return known.draw(split, n, seed, **options)


def answering(benchmark: str, split: str, n: int | None = None, seed: int = 0, **options: object) -> Samples:
    """n samples of a benchmark's split whose answer is a word or a number, drawn by seed; raises like `grounding`."""
    return _known(benchmark, split, n, seed, ("questions", "text"), options).draw(split, n, seed, **options)


def _known(benchmark: str, split: str, n: int | None, seed: int, families: tuple[str, ...], options: dict) -> Benchmark:
    if benchmark in BENCHMARKS and BENCHMARKS[benchmark].family not in families:
        other = "answering" if "grounding" in families else "grounding"
        raise ValueError(f"{benchmark} is of the other kind: use {other}({benchmark!r}, ...).")
    known = _lookup("benchmark", benchmark, {k: b for k, b in BENCHMARKS.items() if b.family in families})
    _lookup("split", split, known.splits)
    for option in options:
        _lookup(f"option of {benchmark}", option, known.options)
    if n is not None and type(n) is not int:
        raise ValueError(f"n={n!r} is not a whole number of samples.")
    if n is not None and n < 1:
        raise ValueError(f"n={n}: {benchmark} {split} would be empty. Ask for n >= 1.")
    if seed < 0:
        raise ValueError(f"seed={seed}: a seed is 0 or more.")
    return known


def _lookup(what: str, name: str, known):
    if name not in known:
        raise store.unknown(what, name, known)
    return known[name] if isinstance(known, dict) else name
