"""Kernels that die, runners that are stopped: the others go on, nothing stays behind, and what to do next is said."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import vrhlib
from tests.test_notebooks_runner import write_notebook
from vrhlib import jobs, notebooks

# A child of the kernel that has left its session, as a worker that was started for good would.
CHILD = "import os, subprocess, sys, time\n"
CHILD += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True)\n"
CHILD += "print('pids', os.getppid(), os.getpid(), child.pid, flush=True)\n"
PROGRESS = "print('test  4/9', flush=True)\ntime.sleep(0.5)\n"


def gone(pid: int, seconds: float = 0) -> bool:
    """Now, or within some seconds; a zombie is gone as well."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def pids(said: str) -> list[int]:
    return [int(word) for word in re.search(r"pids ([\d ]+)", said)[1].split()]


def start(root: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "vrhlib.notebooks", "run", *words],
        env=os.environ | {"VRHLIB_ROOT": str(root), "PYTHONPATH": str(Path(notebooks.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job starts deaf to Ctrl-C
    )


def test_a_kernel_that_dies_fails_its_notebook_and_the_others_run(root, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(notebooks, "cores", lambda: 6)
    write_notebook(root, "01_short", "import os\nprint('threads', os.environ['OMP_NUM_THREADS'])")
    write_notebook(root, "02_dies", CHILD + PROGRESS + "os.kill(os.getpid(), 9)", vrhlib={"cost": {"nano": "2 min"}})
    said = entry("new", "never run")
    note = f"import os\nopen(os.environ['VRHLIB_LEDGER'], 'a').write({said!r})"
    write_notebook(root, "03_long", note, vrhlib={"cost": {"nano": "1 h, 1 GiB"}})
    assert notebooks.main(["run", "--jobs", "2", "K=3"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "[02] test  4/9" in lines, "lines begin with the number"
    assert "[01] threads 3" in lines, "cores are shared"
    began = [line.split("]")[0][1:] for line in lines if re.match(r"\[\d/3\]", line)]
    assert began == ["1/3", "3/3", "2/3"], "the longest first, and one of unknown cost may be any"
    assert [line.split()[::2] for line in lines if re.match(r"0\d_\w+ +\d+ ", line)] == [
        ["01_short", "ok"],
        ["02_dies", "FAILED"],
        ["03_long", "ok"],
    ], "in the notebooks' order"
    assert (
        "[03] stored results: 0 runs reused, 0 resumed, 1 new (1: never run); not reused: 1: toy on scenes test"
        in lines
    )
    assert "[01] stored results" not in out
    died = "DeadKernelError: Kernel died: it was ended by SIGKILL (often: out of memory); the last it said: test  4/9"
    assert f"\n02_dies failed: {died}\n" in err and "[02] FAILED after" in out and died in out
    assert "To resume: ./run_all.sh nano 02 K=3 --jobs 2   (finished samples are kept)" in err
    assert all(gone(pid) for pid in pids(out)), "also what the dead kernel had started"


def test_a_kernel_that_exits_by_itself_is_told_from_one_that_was_killed(root, capsys):
    write_notebook(root, "01_exits", PROGRESS.replace("time.sleep(0.5)", "import os; os._exit(3)"))
    assert notebooks.main(["run"]) == 1
    died = "01_exits failed: DeadKernelError: Kernel died: it exited with code 3; the last it said:"
    assert died in (err := capsys.readouterr().err) and "memory" not in err


def test_if_papermill_itself_dies_that_is_told_as_well(root, capsys):
    write_notebook(root, "01_dies", CHILD + PROGRESS + "os.kill(os.getppid(), 9)\ntime.sleep(60)")
    write_notebook(root, "02_goes_on", "print('here')")
    assert notebooks.main(["run", "--jobs", "1"]) == 1
    out, err = capsys.readouterr()
    assert "01_dies failed: its process was ended by SIGKILL (often: out of memory); the last it said: test  4/9" in err
    assert "      here" in out.splitlines() and "To resume: ./run_all.sh nano 01 --jobs 1 " in err
    assert all(gone(pid) for pid in pids(out))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_kernels_and_all_they_started_and_says_how_to_resume(root, number):
    write_notebook(root, "01_done", "print('quick')")
    slow = CHILD + "try:\n    time.sleep(60)\nfinally:\n    open('cell-could-finish', 'w').close()"
    write_notebook(root, "02_slow", slow)
    write_notebook(root, "03_never", "print('never')")
    process = start(root, "K=3", "--jobs", "1", "--strict", "--again")
    said = next(line for line in process.stdout if "pids" in line)
    time.sleep(0.5)  # it prints before it tries
    process.send_signal(number)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - began < 30
    resume = "./run_all.sh nano 02 03 K=3 --jobs 1 --strict"
    assert f"Stopped in 02_slow. To resume: {resume}   (finished samples are kept)" in err
    # Indented lines are a child's: what is ended may log that its kernel is gone.
    assert not re.search(r"^Traceback", err, re.MULTILINE) and "never" not in out
    assert all(gone(pid) for pid in pids(said))
    assert (root / "notebooks" / "cell-could-finish").exists(), "the store says how far a run came"


def test_kernels_do_not_outlive_a_runner_that_is_killed(root):
    write_notebook(root, "01_slow", CHILD + "time.sleep(60)")
    process = start(root)
    said = next(line for line in process.stdout if "pids" in line)
    process.kill()
    process.communicate(timeout=30)
    assert all(gone(pid, seconds=20) for pid in pids(said))


# ---- how many at once, in which order


@pytest.mark.parametrize(("cores", "nano"), [(1, 1), (2, 2), (3, 3), (4, 4), (64, 4)])
def test_a_laptop_runs_as_many_as_it_has_cores_and_a_gpu_one(monkeypatch, cores, nano):
    monkeypatch.setattr(notebooks, "cores", lambda: cores)
    assert notebooks.at_once("nano", None) == nano and notebooks.at_once("paper", None) == 1
    assert notebooks.at_once("nano", 7) == notebooks.at_once("paper", 7) == 7


def test_minutes_are_read_from_the_cost(root):
    costs = {"8 min, 2 CPU cores": 8, "1.5 h": 90, "30 s": 0.5, "GPU hours, see": float("inf"), "minutes": float("inf")}
    for cost, minutes in costs.items():
        path = write_notebook(root, "01_one", vrhlib={"cost": {"nano": cost}})
        assert notebooks.Notebook(path).minutes("nano") == minutes
        assert notebooks.Notebook(path).minutes("paper") == float("inf")


def test_threads_that_were_asked_for_stay(monkeypatch):
    batch = notebooks._Batch("nano", [], {}, notebooks.How(), {}, {})
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert batch._environment(2, None)["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" not in batch._environment(1, None), "one alone takes what it likes"
    monkeypatch.setattr(notebooks, "cores", lambda: 3)
    assert batch._environment(4, None)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was ended by SIGKILL (often: out of memory)"),
        (-11, "was ended by SIGSEGV"),
        (-99, "was ended by signal 99"),
        (3, "exited with code 3"),
        (0, "exited with code 0"),
        (None, "ended, nobody knows how (often: out of memory)"),
    ],
)
def test_how_a_process_ended_is_said_as_far_as_it_is_known(code, words):
    assert jobs.how_it_ended(code) == words


# ---- the ledger


def entry(state: str, why: str = "", model: str = "toy", benchmark: str = "scenes test") -> str:
    facts = {"task": "replies", "model": model, "benchmark": benchmark, "state": state, "had": 0, "of": 9, "why": why}
    return json.dumps(facts) + "\n"


def test_reused_runs_are_counted_and_the_others_explained(tmp_path):
    file = tmp_path / "ledger.jsonl"
    assert jobs.reuse(file) == ""
    entries = [("reused", "", 312), ("resumed", "interrupted", 4), ("new", "never run before", 18), ("new", "a.py", 2)]
    lines = [entry(state, why) for state, why, n in entries for _ in range(n)]
    file.write_text("".join(lines))
    assert jobs.reuse(file) == (
        "stored results: 312 runs reused, 4 resumed, 20 new (18: never run before; 4: interrupted; 2: a.py); "
        "not reused: 24: toy on scenes test"
    )
    more = [entry("new", f"reason\n{n}", benchmark=f"b{n} test") for n in range(4)]
    file.write_text("".join(lines + more))
    assert "24 new (18: never run before; 4: interrupted; 2: a.py; 1: reason 0; ... and 3 more reasons)" in jobs.reuse(
        file
    )
    assert jobs.reuse(file).endswith(
        "not reused: 24: toy on scenes test; 1: toy on b0 test; 1: toy on b1 test; 1: toy on b2 test; "
        "... and 1 more set"
    )


def test_what_is_no_line_of_a_ledger_counts_as_absent(tmp_path):
    file = tmp_path / "ledger.jsonl"
    bad = ["", "{", "[]", "3", "null", '"new"', "{}", '{"state": "old"}', '{"state": "new", "why": 3}', entry("old")]
    file.write_bytes(
        "\n".join(bad).encode() + b"\n\xff\xfe\n" + entry("reused").encode() + entry("new").encode() + b'{"sta'
    )
    assert jobs.reuse(file) == "stored results: 1 run reused, 0 resumed, 1 new; not reused: 1: toy on scenes test"
    file.write_text("{")
    assert jobs.reuse(file) == "" == jobs.reuse(tmp_path)


# ---- a cluster, and decoding plainly


@pytest.fixture
def sweep(monkeypatch):
    """Where `vrhlib.sweep` will be: it keeps what it was asked for, and what was set when it was."""
    module, seen = types.ModuleType("vrhlib.sweep"), []

    @contextmanager
    def cluster(spec: str):
        if spec == "9":
            raise ModuleNotFoundError("A cluster needs Dask: pip install vrhlib[sweep]")
        if spec.startswith("tcp://nowhere"):
            raise ConnectionError("no scheduler answers")
        seen.append((spec, os.environ.get("VRHLIB_STRICT")))
        yield f"tcp://started-for-{spec}"
        seen.append("closed")

    module.cluster = cluster
    monkeypatch.setitem(sys.modules, "vrhlib.sweep", module)
    monkeypatch.setattr(vrhlib, "sweep", module, raising=False)
    monkeypatch.delenv("DASK_SCHEDULER", raising=False)
    return seen


TELL = "import os\nprint('told', os.environ.get('DASK_SCHEDULER'), os.environ.get('VRHLIB_STRICT'))"


def test_kernels_are_told_of_the_cluster_and_to_decode_plainly(root, capsys, monkeypatch, sweep):
    monkeypatch.delenv("VRHLIB_STRICT", raising=False)
    write_notebook(root, "01_one", TELL)
    assert notebooks.main(["run", "--cluster", "2", "--strict"]) == 0
    assert "      told tcp://started-for-2 1" in capsys.readouterr().out.splitlines()
    assert sweep == [("2", "1"), "closed"], "its workers take over the environment"
    assert "VRHLIB_STRICT" not in os.environ
    assert notebooks.main(["run", "--cluster", "3", "--strict"]) == 0
    assert len(sweep) == 2, "nothing is to be run, so nothing is started; who computes changes no result"
    capsys.readouterr()
    monkeypatch.setenv("DASK_SCHEDULER", "tcp://mine:1")
    assert notebooks.main(["run"]) == 0
    assert "      told tcp://started-for-tcp://mine:1 None" in capsys.readouterr().out.splitlines()


def test_without_dask_or_a_scheduler_the_run_is_refused_before_anything_runs(root, capsys, monkeypatch, sweep):
    write_notebook(root, "01_one", TELL)
    assert notebooks.main(["run", "--cluster", "9"]) == 2
    out, err = capsys.readouterr()
    assert err == "vrhlib: --cluster 9: A cluster needs Dask: pip install vrhlib[sweep]\n" and not out
    assert notebooks.main(["run", "--cluster", "tcp://nowhere:1"]) == 2
    assert capsys.readouterr().err == "vrhlib: --cluster tcp://nowhere:1: no scheduler answers\n"
    monkeypatch.setenv("DASK_SCHEDULER", "tcp://nowhere:2")
    assert notebooks.main(["run"]) == 2
    assert capsys.readouterr().err == "vrhlib: DASK_SCHEDULER=tcp://nowhere:2: no scheduler answers\n"
    assert not (root / "notebooks" / "rendered").exists()


def test_a_failed_run_says_all_of_it_again(root, capsys, sweep):
    write_notebook(root, "01_one", "1 / 0")
    assert notebooks.main(["run", "--cluster", "2", "--strict", "--again"]) == 1
    assert "To resume: ./run_all.sh nano 01 --cluster 2 --strict   (finished" in capsys.readouterr().err


def test_a_plan_takes_both_and_runs_nothing(root, capsys, sweep):
    write_notebook(root, "01_one", TELL)
    assert notebooks.main(["plan", "--cluster", "2", "--strict"]) == 0 and not sweep
    capsys.readouterr()
    for words in (["--jobs", "2"], ["--again"]):
        assert notebooks.main(["plan", *words]) == 2
        assert "A plan runs nothing: --jobs and --again are for a run." in capsys.readouterr().err
