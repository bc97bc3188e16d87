"""One sweep, done in every way there is, writes the same file: in one process, killed over and over, by two processes
on one folder, and by two workers of a cluster of which one dies.

The models are tiny and random; the pictures noise. What is compared is the CSV, byte by byte.
"""

import dataclasses
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests import tiny
from vrhlib import decoding, evaluate, store
from vrhlib.attention import Ablation
from vrhlib.evaluate import UNMASKED, Condition, replies
from vrhlib.heads import Head, HeadSet
from vrhlib.samples import Samples
from vrhlib.wiring import load_vlm

REPOSITORY = Path(__file__).parents[1]
SHARD = 4
SIZES = [(56 + 14 * (i % 5), 56 + 14 * (i % 3)) for i in range(22)]
ASKED = Samples("noise", "test", tiny.samples(*SIZES), max_new_tokens=6)
CUT = HeadSet((Head(1, 5), Head(0, 1), Head(2, 7), Head(1, 0)), (3, 8))
CONDITIONS = {UNMASKED: None, Condition("late", 4): Ablation(CUT, phase="decode")} | {
    Condition("vrh", k): Ablation(CUT.top(k)) for k in (1, 2, 4)
}


def sweep(folder: str, out: str) -> None:
    """The command that is repeated: every reply under every condition, as a CSV."""
    evaluate.SHARD = SHARD
    vlm = load_vlm(folder, device="cpu")
    written(vlm, Path(out))


def written(vlm, out: Path) -> None:
    store.write_atomic(out, replies(vlm, ASKED, CONDITIONS, batch_size=2).to_csv(index=False))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny.write("qwen3-vl", tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def wanted(model, tmp_path_factory) -> bytes:
    """In one process, undisturbed."""
    root = tmp_path_factory.mktemp("undisturbed")
    process = started(model, root)
    assert process.wait(timeout=300) == 0
    text = (root / "out.csv").read_bytes()
    assert len(pd.read_csv(io.BytesIO(text))) == len(CONDITIONS) * len(ASKED)
    return text


def started(model: str, root: Path, out: str = "out.csv", **environment: str) -> subprocess.Popen:
    code = f"from tests.test_same_sweep import sweep; sweep({model!r}, {str(root / out)!r})"
    env = {**os.environ, "VRHLIB_ROOT": str(root), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=env)


def records(root: Path) -> list[tuple]:
    """(run, sample) of every stored line."""
    paths = sorted((root / "data/runs/nano").glob("*.jsonl"))
    return [(path.stem, json.loads(line)["id"]) for path in paths for line in path.read_text().splitlines()]


def test_killed_at_twenty_random_moments(model, wanted, tmp_path, monkeypatch):
    """A fork a try, so that the model is read once; from an empty store again whenever it came to its end. What is
    computed is counted in a file that survives."""
    vlm, generate = load_vlm(model, device="cpu"), decoding.generate

    def counted(vlm, batch, conditions, limit, drafts):
        got = generate(vlm, batch, conditions, limit, drafts)
        with (store.ROOT / "computed").open("a") as file:
            file.writelines(f"{s.id} {len(conditions)}\n" for s in batch.samples)
        return got

    monkeypatch.setattr(decoding, "generate", counted)
    monkeypatch.setattr(evaluate, "SHARD", SHARD)

    def attempt(seconds: float | None = None) -> bool:
        """Whether it came to its end."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sys.stdout = open(os.devnull, "w")
                written(vlm, store.ROOT / "out.csv")
                code = 0
            finally:
                os._exit(code)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1] == 0

    def check(kills: int) -> None:
        assert (store.ROOT / "out.csv").read_bytes() == wanted
        found, whole = records(store.ROOT), len(CONDITIONS) * len(ASKED)
        assert len(found) == len(set(found)) == whole
        lines = (store.ROOT / "computed").read_text().splitlines()
        computed = sum(int(line.split()[1]) for line in lines)
        assert whole <= computed <= whole + kills * 2 * len(CONDITIONS), "a batch of two more per kill, at most"

    rng, total, halfway = random.Random(0), 0, 0
    monkeypatch.setattr(store, "ROOT", tmp_path / "whole")
    began = time.perf_counter()
    assert attempt()
    whole = time.perf_counter() - began  # on this machine, today
    check(0)
    for turn in range(40):
        if total >= 20:
            break
        monkeypatch.setattr(store, "ROOT", tmp_path / f"turn {turn}")
        kills = 0
        while not attempt(rng.uniform(0, whole / 2) if kills < 20 else None):
            kills += 1
            halfway += 0 < len(records(store.ROOT)) < len(CONDITIONS) * len(ASKED)
        check(kills)
        total += kills
    assert total >= 20 and halfway >= 5, "killed while something was half done"


def test_two_processes_on_one_folder(model, wanted, tmp_path):
    both = [started(model, tmp_path, out) for out in ("one.csv", "two.csv")]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes() == wanted
    found = records(tmp_path)
    assert len(found) == len(set(found)) == len(CONDITIONS) * len(ASKED)


def test_two_workers_of_which_one_is_killed(model, wanted, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    from vrhlib import sweep as sweeps

    monkeypatch.setenv("VRHLIB_ROOT", str(tmp_path))
    monkeypatch.setattr(store, "ROOT", tmp_path)
    with sweeps.cluster("2") as address, distributed.Client(address) as there:
        process = started(model, tmp_path, DASK_SCHEDULER=address)
        deadline = time.monotonic() + 240
        while not records(tmp_path):  # a worker has begun
            assert time.monotonic() < deadline and process.poll() in (None, 0)
            time.sleep(0.05)
        pids = there.run(os.getpid)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        assert process.wait(timeout=300) == 0
    assert (tmp_path / "out.csv").read_bytes() == wanted
    found = records(tmp_path)
    assert len(found) == len(set(found)) == len(CONDITIONS) * len(ASKED)


@pytest.fixture
def vlm(model, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    return load_vlm(model, device="cpu")


def test_what_a_worker_could_not_load_by_name_stays_here(vlm):
    assert evaluate._sendable(vlm)
    assert not evaluate._sendable(dataclasses.replace(vlm, revision=f"{vlm.revision}+policy")), "it was trained here"
    assert not evaluate._sendable(dataclasses.replace(vlm, name="of no folder"))
    vlm.model.to(torch.bfloat16)
    assert not evaluate._sendable(vlm), "a worker would load it in float32"


@pytest.mark.parametrize("change", ["strict", "dtype"])
def test_a_worker_that_would_store_under_other_keys_says_so_before_it_computes(vlm, model, monkeypatch, change):
    shard = ASKED[:2]
    keys = sorted(run.digest for run in evaluate._runs(vlm, shard, CONDITIONS, 2).values())
    monkeypatch.setattr(evaluate, "_computed", lambda *_: None)
    evaluate._cell((model, ()), keys, shard, CONDITIONS, 2)
    monkeypatch.setattr(evaluate, "_computed", lambda *_: pytest.fail("it computed"))
    if change == "strict":
        monkeypatch.setenv("VRHLIB_STRICT", "1")
    else:
        monkeypatch.setattr(type(vlm.model), "dtype", torch.bfloat16)
    with pytest.raises(RuntimeError, match="under other keys.*Start workers and command"):
        evaluate._cell((model, ()), keys, shard, CONDITIONS, 2)


def test_nothing_is_sent_where_all_is_stored(vlm, monkeypatch):
    want = replies(vlm, ASKED[:3], CONDITIONS, batch_size=2)
    monkeypatch.setattr(evaluate.sweep, "client", lambda: object())
    monkeypatch.setattr(evaluate.sweep, "mapped", lambda *_: pytest.fail("it was sent"))
    pd.testing.assert_frame_equal(replies(vlm, ASKED[:3], CONDITIONS, batch_size=2), want)
    with pytest.raises(pytest.fail.Exception, match="it was sent"):
        replies(vlm, ASKED[:4], CONDITIONS, batch_size=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("text", 5), ("finished", "yes"), ("resized", [1]), ("resized", ["a", 1]), ("tokens", None), ("ids", [1.5]),
     ("drafted", True)],
)  # fmt: skip
def test_a_stored_line_that_holds_no_reply_is_an_error_that_names_it(vlm, field, value):
    frame = replies(vlm, ASKED[:3], {UNMASKED: None}, batch_size=2)
    (digest,) = frame.attrs["runs"]
    path = store.runs_dir("nano") / f"{digest}.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | {field: value}), *rest]) + "\n")
    name = json.loads(first)["id"]
    with pytest.raises(store.CorruptRun, match=f"{digest}.jsonl: the line of sample '{name}'.*Delete that line"):
        replies(vlm, ASKED[:3], {UNMASKED: None}, batch_size=2)
