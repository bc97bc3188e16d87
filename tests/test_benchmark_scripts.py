"""The scripts of `benchmarks/` run from a shell, print finite ratios and write the columns they promise."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from vrhlib.benchmarks import grounding
from vrhlib.wiring import load_vlm

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "benchmarks" / "design_space.py")
QUANTITIES = {"with the reply": {"seconds"}, "captured pass alone": {"seconds"}, "eager attention": {"seconds", "mib"}}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What a run on three scenes prints, and its table. The embedded models are found, and nothing is stored."""
    root = tmp_path_factory.mktemp("root")
    (root / "data").mkdir()
    (root / "data" / "nano").symlink_to(ROOT / "data" / "nano")
    given = {"PYTHONPATH": str(ROOT), "VRHLIB_ROOT": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = "--n 3 --repeats 2 --models nano-qwen2.5-vl --tokens 150 --device cpu --out ratios.csv".split()
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, env=os.environ | given, cwd=root, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert not (root / "data" / "runs").exists(), "a measurement is no result to keep"
    return done.stdout, pd.read_csv(root / "ratios.csv")


def test_every_comparison_has_a_finite_ratio_within_its_spread(small):
    table = small[1]
    wanted = "model, comparison, image_tokens, quantity, ratio, low, high, n, repeats, device"
    assert list(table.columns) == wanted.split(", ")
    numbers = table[["ratio", "low", "high"]]
    assert np.isfinite(numbers).all(axis=None) and (numbers > 0).all(axis=None) and (table.low <= table.high).all()
    assert (table.repeats == 2).all() and set(table.n) == {3, 1} and set(table.image_tokens) == {48, 192}
    for words, quantities in QUANTITIES.items():
        found = table[table.comparison.str.contains(words)]
        assert len(found) and (set(found.quantity) == quantities or sys.platform != "linux"), words


def test_every_row_is_printed_as_a_ratio_and_no_seconds_are(small):
    printed, table = small
    lines = printed.splitlines()
    assert len(lines) == len(table) and "second" not in printed
    for line, (_, row) in zip(lines, table.iterrows()):
        assert row.comparison in line and f"{row.ratio:.3f} ({row.low:.2f} to {row.high:.2f})" in line
        assert ("target 1.3" in line) == ("with the reply" in line)


def test_more_image_tokens_than_a_model_can_make_are_refused():
    enlargement = runpy.run_path(SCRIPT)["enlargement"]
    vlm, samples = load_vlm("nano-qwen2.5-vl", device="cpu"), grounding("scenes", "detect", 1)
    assert enlargement(vlm, samples, 48) == 1 and enlargement(vlm, samples, 49) == 2
    with pytest.raises(ValueError, match="fewer than 1000000 image tokens"):
        enlargement(vlm, samples, 10**6)


def test_a_ratio_is_best_over_best_and_its_spread_that_of_the_turns():
    script = runpy.run_path(SCRIPT)
    turn = script["Turn"]
    time, memory = script["ratios"]("a / b", [(turn(3, 20), turn(1, 10)), (turn(2, 30), turn(2, 40))], n=1)
    assert (time["quantity"], time["ratio"], time["low"], time["high"]) == ("seconds", 2, 1, 3)
    assert (memory["quantity"], memory["ratio"], memory["low"], memory["high"]) == ("mib", 0.75, 0.75, 2)
    assert [row["quantity"] for row in script["ratios"]("a / b", [(turn(1), turn(1))])] == ["seconds"]


def test_clicks_are_timed_with_nothing_stored_and_an_error_is_no_fast_click(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("nano", "heads"):
        (tmp_path / "data" / name).symlink_to(ROOT / "data" / name)
    given = {"PYTHONPATH": str(ROOT), "VRHLIB_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = str(ROOT / "benchmarks" / "clicks.py")
    words = [sys.executable, script, "--models", "nano-qwen2.5-vl", "--n", "2", "--out", "clicks.csv"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | given, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "data" / "runs").exists(), "a measurement is no result to keep"
    table = pd.read_csv(tmp_path / "clicks.csv")
    assert set(table["view"]) == {"explorer", "knockout", "stepper", "steering"} and set(table.kind) == {
        "stored",
        "live",
    }
    assert (0 < table.median_ms).all() and (table.median_ms <= table.slowest_ms).all()
    assert table.target_ms.equals(table.kind.map({"stored": 300.0, "live": 2000.0}))
    assert (table.met == (table.slowest_ms <= table.target_ms)).all()
    live = table[(table["view"] == "explorer") & (table.kind == "live")].median_ms.item()
    stored = table[(table["view"] == "explorer") & (table.kind == "stored")].median_ms.item()
    assert live > stored, "what runs a model takes longer, so it was not stored"
    assert f"of {len(table)} kinds of click within their target" in done.stdout

    timed = runpy.run_path(script)["timed"]
    view = SimpleNamespace(_error=SimpleNamespace(value=""))
    assert len(timed([lambda: None] * 3, view)) == 3
    with pytest.raises(RuntimeError, match="it broke"):
        timed([lambda: setattr(view._error, "value", "it broke")], view)
