"""Every benchmark by name: `grounding(...)` gives samples whose answer is a box (or a point), `answering(...)` those
whose answer is a word or a number.

The splits `detect` and `test` of a benchmark are disjoint by *image* unless `split_by="row"` is asked for: heads found
on a picture are not judged on it. The nano benchmarks stand in the place of real ones (the column `like`) and never
under their names; the real ones are read from the Hub and never replaced by anything else. Text, words and pages on
which earlier methods look for their heads are made here, under both profiles.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vrhlib import store
from vrhlib.generated import BENCHMARKS as GENERATED
from vrhlib.nano.benchmarks import BENCHMARKS as NANO
from vrhlib.real import BENCHMARKS as REAL
from vrhlib.samples import Benchmark, Sample, Samples

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


def to_test(benchmark: str, found_on: Samples, n: int | None, seed: int = 0) -> Samples:
    """n samples (None: all; at most the rows that its table has) of a benchmark, grounding or questions, on which heads
    found on `found_on` are cut.

    Of the benchmark that they were found on: its test split. Of another: its split `all`, where there is one, since
    nothing was held out there for them, else `test`. Either way without the pictures of `found_on` (see `apart`), so
    perhaps fewer than n.
    """
    own = benchmark == found_on.benchmark
    split = "test" if own else _widest(benchmark, "test")
    draw = answering if _lookup("benchmark", benchmark, BENCHMARKS).family == "questions" else grounding
    return apart(draw(benchmark, split, at_most(benchmark, n, len(found_on) * own), seed), found_on)


def to_find(benchmark: str, n: int, seed: int = 0) -> Samples:
    """n samples (all, if there are fewer) of a grounding benchmark to find heads on that are only compared with other
    lists, never tested: from its split `all`, where there is one (small benchmarks have no rows to hold out), else from
    `detect`."""
    return grounding(benchmark, _widest(benchmark, "detect"), at_most(benchmark, n), seed)


def to_train(benchmark: str, n: int, held_out: Iterable[Samples], seed: int = 0) -> Samples:
    """n samples of a grounding benchmark to train on, at most as many as there are, without the pictures of `held_out`
    (see `apart`): of its split `train`, or of `dev` in the nano ones, whose weights were made on scenes of `train`."""
    known = _lookup("benchmark", benchmark, BENCHMARKS)
    samples = grounding(benchmark, "train" if "train" in known.splits else "dev", at_most(benchmark, n), seed)
    for other in held_out:
        samples = apart(samples, other, "is held out")
    return samples


def _widest(benchmark: str, otherwise: str) -> str:
    return "all" if "all" in _lookup("benchmark", benchmark, BENCHMARKS).splits else otherwise


def at_most(benchmark: str, n: int | None, held_out: int = 0) -> int | None:
    """n, or the rows of a real benchmark less those held out, where they are fewer; None stays None (all)."""
    about = _lookup("benchmark", benchmark, BENCHMARKS).about
    return min(n, about.rows - held_out) if about and n is not None else n


def apart(samples: Samples, found_on: Samples, why: str = "served to find heads") -> Samples:
    """The samples without those whose picture stands in other samples (of a benchmark that `served to find heads`, or
    whatever `why` says), perhaps in another benchmark; `notes` counts what was left out, also if it was nothing.

    Pictures are compared by their numbers where both benchmarks number them alike, by their files where both hash them,
    and else by what they show (16 x 16 grey pixels). Raises ValueError if nothing is left.
    """
    hashed = [{key.startswith("bytes:") for key in part.images} for part in (samples, found_on)]
    if hashed[0] == hashed[1]:
        how = "file" if True in hashed[0] else "number"
        served = {s.id for s in samples if s.image_key in found_on.images}
    else:
        how, served = "pixels", _alike(samples, found_on)
    note = f"left out: its picture {why} ({found_on.benchmark}, compared by {how})"
    kept = [s for s in samples if s.id not in served]
    if not kept:
        raise ValueError(
            f"All {len(samples)} pictures of {samples!r} are among those of which each {why}: take more or others."
        )
    notes = {**samples.notes, note: len(served)}
    return Samples(samples.benchmark, samples.split, kept, samples.origin, samples.lost, notes, samples.max_new_tokens)


# Mean difference of grey levels, of 255, up to which two thumbnails show one picture: encoding it again or in another
# size moves up to 1.2, other photographs are tens apart.
ALIKE = 3.0


def _alike(samples: Iterable[Sample], others: Iterable[Sample]) -> set[str]:
    known = np.array([_thumbnail(s) for s in others])
    return {s.id for s in samples if np.abs(known - _thumbnail(s)).mean((1, 2)).min() <= ALIKE}


def _thumbnail(sample: Sample) -> np.ndarray:
    return np.asarray(sample.image.convert("L").resize((16, 16)), dtype=float)


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
