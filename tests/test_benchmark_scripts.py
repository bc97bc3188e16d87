"""The scripts of `benchmarks/` run, on the smallest sizes: same results first, then finite ratios in the columns they
promise. Arithmetic, summary and README.md are tested in test_performance.py."""

import os
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks import ablation, capture, design_space, gpu, growth, models, peers, turns
from benchmarks.turns import Disagreement
from vrhlib.attention import Ablation
from vrhlib.benchmarks import grounding
from vrhlib.training import SHAPES
from vrhlib.wiring import load_vlm

ROOT = Path(__file__).parents[1]
NAME = "nano-qwen2.5-vl"
TINY = {
    "like": NAME,
    "text": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 96, "max_position_embeddings": 4096, "mrope_section": [2, 3, 3]},
    "vision": models._QWEN | {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
                              "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 112},
}  # fmt: skip
TINY_TILES = {
    "like": "nano-internvl3",
    "text": {key: value for key, value in TINY["text"].items() if key != "mrope_section"},
    "vision": models._TILE | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                              "intermediate_size": 48},
}  # fmt: skip


@pytest.fixture(scope="module")
def vlm():
    return load_vlm(NAME, device="cpu")


def elsewhere(folder: Path, *data: str) -> dict[str, str]:
    """Environment of a script that finds the embedded models and writes nothing into this checkout."""
    (folder / "data").mkdir()
    for name in data:
        (folder / "data" / name).symlink_to(ROOT / "data" / name)
    given = {"PYTHONPATH": str(ROOT), "VRHLIB_ROOT": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | given


def well_formed(found: pd.DataFrame) -> None:
    numbers = found[["ratio", "low", "high"]]
    assert list(found.columns[: len(turns.COLUMNS)]) == turns.COLUMNS and len(found)
    assert np.isfinite(numbers).all(axis=None) and (numbers > 0).all(axis=None)
    assert (found.low <= found.high).all() and set(found.quantity) <= {"time", "peak memory"}
    assert not found.duplicated(["measure", "model", "image_tokens", "quantity", "n"]).any()


# ---------------------------------------------------------------- capture


def test_capture_compares_three_passes_and_three_ways_to_a_new_reply(vlm):
    found = turns.table(capture.measured(vlm, 48, 1))
    well_formed(found)
    timed = found[found.quantity == "time"]
    assert set(timed.measure) == {
        capture.PLAIN, capture.EAGER, capture.FORCED, capture.INSIDE, capture.KNOWN,
    } and set(found.image_tokens) == {48}  # fmt: skip
    assert set(found[found.quantity == "peak memory"].measure) == (
        {capture.PLAIN, capture.EAGER} if sys.platform == "linux" else set()
    )
    assert vlm.model.config.get_text_config()._attn_implementation == "sdpa"


def test_rows_that_differ_are_refused(vlm, monkeypatch):
    plain = capture.captured_pass

    def wrong(*args):
        found = plain(*args)
        return found | {"rows": found["rows"] + 1e-3}

    monkeypatch.setattr(capture, "captured_pass", wrong)
    with pytest.raises(Disagreement, match="rows"):
        capture.measured(vlm, 48, 1)


def test_more_image_tokens_than_a_model_can_make_are_refused(vlm):
    samples = grounding("scenes", "detect", 1)
    assert capture.enlargement(vlm, samples, 48) == 1 and capture.enlargement(vlm, samples, 49) == 2
    with pytest.raises(ValueError, match="fewer than 1000000 image tokens"):
        capture.enlargement(vlm, samples, 10**6)


# ---------------------------------------------------------------- ablation


@pytest.mark.parametrize("phase", ablation.PHASES)
def test_every_step_of_the_ladder_gives_the_naive_loops_replies(vlm, phase):
    acting = ablation.conditions(ablation.known_scores(vlm), phase)
    assert len(acting) == 12 and acting[0] is None and len({frozenset(c.heads) for c in acting[1:]}) == 11
    assert all(c.phase == phase for c in acting[1:])
    sample, few = grounding("scenes", "test", 1), [acting[0], acting[4], acting[-1]]
    found = turns.table(ablation.ladder(vlm, sample, few, phase, 1))
    well_formed(found)
    words = {ablation.ALL, *ablation.STEPS.values(), *ablation.WITHOUT.values()}
    assert set(found.measure) == {w.format(phase) for w in words} and (found.n == 3).all()
    time = dict(zip(found.measure, found.ratio))
    steps = [time[w.format(phase)] for w in ablation.STEPS.values()]
    assert time[ablation.ALL.format(phase)] == pytest.approx(np.prod(steps)), "the steps make up the whole"


def test_the_naive_loop_cuts_what_the_library_cuts(vlm):
    """And it matters: the replies are not the unmasked model's."""
    samples, scores = grounding("scenes", "test", 2), ablation.known_scores(vlm)
    for phase in ablation.PHASES:
        acting = [None, Ablation(scores.top(8), phase=phase)]
        one, ours = (way(vlm, samples, acting)["replies"] for way in (ablation.naive, ablation.one_batch))
        assert one == ours and len(one) == 4
        assert one[0] != one[1] and one[2] != one[3]
    assert not vlm.layers[0].self_attn.o_proj._forward_pre_hooks, "hooks are gone"


def test_replies_that_differ_are_refused(vlm, monkeypatch):
    monkeypatch.setattr(ablation, "verified", lambda *args: {"replies": [[1]]})
    acting = [None, Ablation(ablation.known_scores(vlm).top(2))]
    with pytest.raises(Disagreement, match="verified"):
        ablation.ladder(vlm, grounding("scenes", "test", 1), acting, "all", 1)


def test_batches_by_length_hold_less_padding_and_give_the_same_replies(vlm):
    samples = ablation.unequal(2, (1, 2))
    assert len({s.image.size for s in samples}) == 2 and len(samples) == 4
    (found,) = ablation.by_length(vlm, samples, 2, 1)
    assert 0 <= found["padding_below"] < found["padding_above"] < 1 and found["n"] == 4
    assert [len(chunk) for chunk in ablation.in_order(samples, 3)] == [3, 1]


def test_a_stop_ends_a_reply(vlm):
    stop = min(vlm.stop_ids)
    assert ablation.trimmed(vlm, [7, stop, 9, 9]) == [7, stop] and ablation.trimmed(vlm, [7, 8, -1]) == [7, 8]


# ---------------------------------------------------------------- design space, growth


def test_the_design_space_is_held_against_one_variant_and_eager(vlm):
    found = turns.table(design_space.measured(vlm, 3, 150, 1))
    well_formed(found)
    assert set(found.measure) == {
        design_space.WITH_REPLY, design_space.PASS_ALONE, design_space.ROWS_EAGER, design_space.ALL_EAGER,
    } and set(found.n) == {3, 1} and set(found.image_tokens) == {48, 192}  # fmt: skip


def test_a_measurement_is_no_result_to_keep(tmp_path):
    words = [sys.executable, "-m", "benchmarks.growth", "--samples", "1", "2", "--conditions", "1", "2", "--tokens",
             "48", "192", "--rounds", "1", "--device", "cpu", "--out", "growth.csv"]  # fmt: skip
    given = elsewhere(tmp_path, "nano", "heads")
    done = subprocess.run(words, capture_output=True, text=True, env=given, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "data" / "runs").exists()
    found = pd.read_csv(tmp_path / "growth.csv")
    assert list(found.columns) == growth.COLUMNS and len(found) == 6
    assert set(found.axis) == {"samples", "conditions", "image tokens"}
    assert (found.groupby("axis").relative.first() == 1).all() and np.isfinite(found.exponent).all()
    assert len(done.stdout.splitlines()) == 6


# ---------------------------------------------------------------- models of the real sizes, GPU, peers


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "internvl3-8b"])
def test_random_models_have_the_real_ones_parameters(name):
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(models.config(name))
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].total
    with pytest.raises(ValueError, match="Did you mean 'qwen2.5-vl-7b'"):
        models.config("qwen2.5-vl-7")


def test_the_gpu_script_runs_on_a_cpu_with_a_small_configuration(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(models, "CONFIGS", models.CONFIGS | {"tiny": TINY})
    given = Namespace(models=["tiny"], tokens=[4, 12], rounds=1, device="cpu", out=tmp_path / "gpu.csv")
    monkeypatch.setattr(gpu, "arguments", lambda *args, **kwargs: given)
    gpu.main()
    found = pd.read_csv(tmp_path / "gpu.csv")
    assert list(found.columns) == gpu.COLUMNS and "tiny" in capsys.readouterr().out
    passes, swept = found[found.method != gpu.SWEEP], found[found.method == gpu.SWEEP]
    assert list(zip(passes.method, passes.image_tokens)) == [(m, t) for t in (4, 12) for m in ("captured", "eager")]
    assert (passes[["seconds", "tokens_per_s", "peak_gib"]] > 0).all(axis=None) and passes.paper_gib.isna().all()
    assert len(swept) == 1 and swept.ratio.item() > 0 and swept.same.item() == 1 and swept.n.item() == 12
    assert "NOT been run" in gpu.__doc__


def test_pictures_make_exactly_the_image_tokens_they_should(monkeypatch):
    monkeypatch.setattr(models, "CONFIGS", models.CONFIGS | {"tiny": TINY, "tiny tiles": TINY_TILES})
    patches, tiles = models.random_vlm("tiny"), models.random_vlm("tiny tiles")
    for vlm, counts in ((patches, (256, 3328, 12)), (tiles, (256, 3328))):
        for count in counts:
            assert len(vlm.prepare([gpu.picture(vlm, count)]).grids[0]) == count
    with pytest.raises(ValueError, match="not 300"):
        gpu.picture(tiles, 300)
    assert len(capture.own_reply(patches, patches.prepare([gpu.picture(patches, 12)]))) == models.REPLY


def test_the_papers_numbers_stand_only_beside_the_model_they_are_of():
    assert gpu.A11["captured", 256] == (14.92, 1.41) and gpu.A11["captured", 3328] == (16.01, 2.31)


def test_a_peer_that_is_missing_or_fails_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(peers, "version", lambda peer: {"Transformers eager": "5", "nnsight": ""}.get(peer, "4"))
    monkeypatch.setattr(peers, "BY", {"Transformers eager": peers.by_eager, "nnsight": None, "TransformerLens": None})
    found = turns.table(peers.measured(NAME, 48, 1), peers.MORE)
    measured, others = found[found.ratio.notna()], found[found.ratio.isna()]
    well_formed(measured)
    assert set(measured.peer) == {"Transformers eager"} and set(measured.version) == {"5"}
    notes = dict(zip(others.measure, others.note))
    assert notes[peers.ROWS.format("nnsight")] == "not installed" == notes[peers.SWEEP.format("nnsight")]
    assert notes[peers.ROWS.format("TransformerLens")].startswith("TypeError")


def test_a_peer_with_other_numbers_is_no_finding_but_an_error(monkeypatch):
    monkeypatch.setattr(peers, "BY", {"Transformers eager": lambda *args: lambda: {"rows": np.zeros((10, 8))}})
    with pytest.raises(Disagreement):
        peers.measured(NAME, 48, 1)


# ---------------------------------------------------------------- clicks


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
