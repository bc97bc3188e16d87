"""How long the whole of it takes: every notebook from a fresh clone, again from what is stored, and once more.

    python -m benchmarks.whole_run --out figures/nano/performance/whole_run.csv

Clones this checkout at HEAD into a temporary folder (what is not committed is not measured) and runs ./run_all.sh there
three times in the active environment: *cold*, nothing stored; *cached* (--again: every notebook runs, replies and
policies are stored); *unchanged*, nothing to do. `told`: of the stored replies under an intervention, the share that
needed no decoding. Wall seconds and CPU seconds of all processes, run while nothing else
runs: about an hour on two cores. Words after -- go to ./run_all.sh (`-- 03` runs one notebook).
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from vrhlib import store
from vrhlib.plan import share_told

COLUMNS = ["run", "wall_seconds", "cpu_seconds", "cores", "at_once", "told", "commit", "words"]
RUNS = {"cold": [], "cached": ["--again"], "unchanged": []}


def clone(source: Path, folder: Path) -> Path:
    """The repository at HEAD, without what is not committed or ignored."""
    subprocess.run(["git", "clone", "--quiet", str(source), str(folder)], check=True)
    return folder


def environment() -> dict[str, str]:
    """This shell's, with this Python first and without what would point at other results."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VRHLIB_", "DASK_")) and k != "PYTHONPATH"}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def run(folder: Path, words: list[str]) -> dict:
    """One run: wall and CPU seconds, and how many notebooks ran at once. Raises RuntimeError, with the last lines, if
    it fails: half a run is no measurement."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        ["./run_all.sh", *words], cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise RuntimeError(f"./run_all.sh {' '.join(words)} ended with {done.returncode}:\n{last}")
    several = re.search(r"^(\d+) notebooks at once", done.stdout, re.M)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_seconds": wall, "cpu_seconds": cpu, "at_once": int(several[1]) if several else 1}


def measured(source: Path, words: list[str]) -> pd.DataFrame:
    """All three runs of a clone of `source`."""
    with tempfile.TemporaryDirectory() as folder:
        copy, rows = clone(source, Path(folder) / "clone"), []
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=copy, check=True, capture_output=True, text=True
        ).stdout.strip()
        for name, more in RUNS.items():
            rows.append({"run": name, "commit": commit, "words": " ".join(words)} | run(copy, [*words, *more]))
            told = share_told(copy / "data" / "runs" / "nano") if name == "cold" else None
            rows[-1]["told"] = float("nan") if told is None else told
            print(f"{name}: {rows[-1]['wall_seconds']:.0f} s, CPU {rows[-1]['cpu_seconds']:.0f} s", flush=True)
    return pd.DataFrame(rows).assign(cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=store.ROOT, help="checkout to clone")
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("words", nargs="*", help="for ./run_all.sh, after --")
    given = parser.parse_args()
    found = measured(given.source, given.words)[COLUMNS].round({"wall_seconds": 1, "cpu_seconds": 1, "told": 4})
    if given.out:
        store.write_atomic(given.out, found.to_csv(index=False))


if __name__ == "__main__":
    main()
