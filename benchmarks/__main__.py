"""Measure everything that `benchmarks` holds, and write tables, figure and the paragraph of README.md.

    python -m benchmarks            all of it: some minutes on two cores, while nothing else runs
    python -m benchmarks --readme   README.md's paragraph from the tables that are there, nothing measured
    python -m benchmarks --only capture growth    some scripts again, the other tables as they are

Tables go to figures/nano/performance/. Peers are measured where they are installed (see benchmarks/peers.py), the whole
run by benchmarks/whole_run.py, a GPU by benchmarks/gpu.py; their tables are read if they are there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from benchmarks import ablation, capture, design_space, growth, peers, summary
from benchmarks.turns import as_shipped, table
from vrhlib import figures, store
from vrhlib.wiring import load_vlm

SCRIPTS = ("capture", "ablation", "design_space", "growth", "peers")


def folder() -> Path:
    return store.figures_dir("nano") / "performance"


def measure(name: str, quick: bool) -> pd.DataFrame:
    """One script's table with the sizes of a full run, or with the smallest ones."""
    rounds, rows = 1 if quick else 3, []
    tokens, models = (60, 1) if quick else (1500, 4)
    if name == "capture":
        for model in capture.MODELS[: 1 + models]:
            rows += capture.measured(capture.model(model, "cpu"), tokens, rounds)
        return table(rows)
    if name == "ablation":
        for model in ablation.MODELS[:models]:
            rows += ablation.measured(load_vlm(model, "cpu"), 2 if quick else 4, rounds)
        return table(rows, ablation.MORE)
    if name == "design_space":
        for model in design_space.MODELS[:models]:
            rows += design_space.measured(load_vlm(model, "cpu"), 4 if quick else 16, 60 if quick else 800, rounds)
        return table(rows)
    if name == "growth":
        sizes = ((2, 4), (1, 2), (48, 192)) if quick else (growth.SAMPLES, growth.CONDITIONS, growth.TOKENS)
        return pd.DataFrame(growth.measured(load_vlm("nano-qwen2.5-vl", "cpu"), rounds, *sizes), columns=growth.COLUMNS)
    for model in peers.MODELS[:models]:
        rows += peers.measured(model, 60 if quick else 768, rounds)
    return table(rows, peers.MORE)


def write(name: str, quick: bool, say: Callable[[str], None]) -> None:
    """Measure one script and write its table. Peers that are not installed leave an earlier table as it is."""
    path = folder() / f"{name}.csv"
    if name == "peers" and not (peers.version("nnsight") or peers.version("TransformerLens")) and path.exists():
        return say(f"peers: not installed here, {path.name} stays as it is")
    began = time.perf_counter()
    found = measure(name, quick)
    store.write_atomic(path, found.to_csv(index=False))
    say(f"{name}: {len(found)} rows in {time.perf_counter() - began:.0f} s")


def read() -> dict[str, pd.DataFrame]:
    """The tables that are there."""
    return {path.stem: pd.read_csv(path, keep_default_na=True) for path in sorted(folder().glob("*.csv"))}


def conclude(machine: str) -> pd.DataFrame:
    """Write summary and figure from the tables that are there."""
    tables = read()
    found = summary.summarised(tables).assign(machine=machine)
    store.write_atomic(folder() / "summary.csv", found.to_csv(index=False))
    figures.use_profile("nano")
    figures.performance(summary.drawn(found, tables.get("growth"))).save("performance/performance")
    return found


def rewrite_readme() -> None:
    """The paragraph between the markers of README.md, from summary.csv. Raises OSError where nothing was measured."""
    path = folder() / "summary.csv"
    if not path.exists():
        raise OSError(f"There is no {path}. Run `python -m benchmarks` first.")
    found, readme = pd.read_csv(path, keep_default_na=False), store.ROOT / "README.md"
    text = summary.paragraph(found, found.machine.iloc[0])
    store.write_atomic(readme, summary.inserted(readme.read_text(encoding="utf-8"), text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="measure these alone")
    parser.add_argument("--readme", action="store_true", help="write README.md's paragraph, measure nothing")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes: to see that everything runs")
    given = parser.parse_args()
    if not given.readme:
        as_shipped()
        for name in given.only:
            write(name, given.quick, lambda text: print(text, flush=True))
        found = conclude(summary.machine())
        print(found[["measure", "ratio", "target", "met", "model"]].to_string(index=False, float_format="%.2f"))
    rewrite_readme()


if __name__ == "__main__":
    main()
