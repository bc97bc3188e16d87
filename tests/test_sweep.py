"""Cells on real worker processes of this machine: same results, lost workers, refusals, and nothing left behind."""

import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vrhlib import store, sweep
from vrhlib.profiles import profile

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "examples/slurm.md").read_text()


# Cells. Workers import this file, and write what happened to files of the shared folder.


def square(i):
    return i * i


def process(i):
    return os.getpid()


def meet(name, other):
    """Ends when its partner has started as well."""
    note(name)
    wait_until(lambda: (store.ROOT / other).exists())
    return os.getpid()


def write(name):
    note(f"{time.time_ns()} {name}")
    return name


def dies(i, times):
    """Kills its own process that many times before it succeeds."""
    for n in range(times):
        if not (store.ROOT / f"death {i} {n}").exists():
            note(f"death {i} {n}")
            os.kill(os.getpid(), signal.SIGKILL)
    return i


def fails(i):
    note(f"tried {i} {time.time_ns()}")
    if i == 3:
        raise LookupError("nothing here")
    time.sleep(0.05)


def alone(i):
    """Fails if another cell is computed by the same process."""
    busy = store.ROOT / f"busy {os.getpid()}"
    busy.touch(exist_ok=False)
    time.sleep(0.1)
    busy.unlink()
    return os.getpid()


def surroundings():
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HF_HUB_OFFLINE", "VRHLIB_ROOT")
    return {name: os.environ.get(name) for name in names}


def asks_for_a_client(address):
    os.environ["DASK_SCHEDULER"] = address
    try:
        return sweep.client() is None
    finally:
        del os.environ["DASK_SCHEDULER"]


def draws_a_bar(i):
    with redirect_stdout(io.StringIO()) as shown:
        list(store.progress(range(3), "a bar of the cell's own"))
    return shown.getvalue()


def waits(name):
    wait_until(lambda: (store.ROOT / name).exists())


def kills(pid):
    os.kill(pid, signal.SIGKILL)
    time.sleep(2)


def note(name):
    (store.ROOT / name).touch()


def noted(pattern):
    return sorted(path.name for path in store.ROOT.glob(pattern))


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "ROOT", root)
        patch.setenv("VRHLIB_ROOT", str(root))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("DASK_SCHEDULER", raising=False)
        patch.delenv("VRHLIB_DEVICE", raising=False)
        yield root


@pytest.fixture(scope="module")
def two(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_gpus", lambda: 0)
        with sweep.cluster("2") as address:
            yield address


@pytest.fixture
def workers(two, monkeypatch):
    monkeypatch.setenv("DASK_SCHEDULER", two)
    return two


@pytest.fixture(params=["here", "workers"])
def either(request, folder):
    """A test that must hold in this process and on workers."""
    if request.param == "workers":
        request.getfixturevalue("workers")
    return request.param


@pytest.fixture
def told():
    """What a caller is told of the progress inside."""
    seen = []
    with store.told(lambda done, of: seen.append((done, of))):
        yield seen


# ---- the same results, wherever


def test_results_come_in_the_order_of_the_cells(either, told):
    assert sweep.mapped(square, ([i] for i in (5, 3, 9, 1, 1)), "squares") == [25, 9, 81, 1, 1]
    assert told == [(done, 5) for done in range(6)]


def test_no_cells_are_no_work(either):
    assert sweep.mapped(square, [], "nothing") == []


def test_without_a_scheduler_cells_run_in_this_process(folder):
    assert set(sweep.mapped(process, [(i,) for i in range(3)], "here")) == {os.getpid()}
    assert sweep.client() is None


def test_two_workers_compute_at_once(workers):
    pids = sweep.mapped(meet, [("left", "right"), ("right", "left")], "at once")
    assert len({*pids, os.getpid()}) == 3


@pytest.mark.parametrize("where", ["here", "one worker"])
def test_cells_of_a_model_stay_together_in_the_order_given(folder, where, monkeypatch):
    cells = [(f"{model}{i}",) for i in range(8) for model in "ba"]
    for path in folder.glob("* [ab][0-9]"):
        path.unlink()
    with ExitStack() as stack:
        if where == "one worker":
            monkeypatch.setattr(sweep, "_gpus", lambda: 0)
            monkeypatch.setenv("DASK_SCHEDULER", stack.enter_context(sweep.cluster("1")))
        assert sweep.mapped(write, cells, "models", lambda name: name[0]) == [name for (name,) in cells]
    together = [f"b{i}" for i in range(8)] + [f"a{i}" for i in range(8)]
    assert [name.split()[1] for name in noted("* [ab][0-9]")] == together


def test_one_name_for_all_cells_is_a_model_too(either):
    assert sweep.mapped(square, [(2,), (1,)], "one model", "nano") == [4, 1]


def test_a_cell_draws_no_bar_on_a_worker(workers):
    assert sweep.mapped(draws_a_bar, [(0,)], "quiet") == [""]
    assert "own" in draws_a_bar(0)


def test_a_torch_that_was_loaded_too_early_takes_its_share_of_the_cores(monkeypatch):
    given = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=given.append))
    for threads in ("3", "", "4,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert sweep._run(square, (2,), sweep._facts()) == 4
    assert given == [3]


@pytest.mark.parametrize("work", [lambda i: i, "nested"])
def test_what_has_no_name_is_not_sent(workers, work):
    def nested(i):
        return i

    with pytest.raises(ValueError, match="top level of a module"):
        sweep.mapped(nested if work == "nested" else work, [(1,)], "nameless")


# ---- workers and cells that fail


def test_a_worker_killed_more_often_than_dask_forgives_costs_no_result(workers):
    assert sweep.mapped(dies, [(i, 4 * (i == 2)) for i in range(10)], "deaths") == list(range(10))
    assert len(noted("death 2 *")) == 4, "it was killed"


def test_an_exception_names_its_cell_and_calls_the_others_off(either):
    for path in noted("tried *"):
        (store.ROOT / path).unlink()
    with pytest.raises(LookupError, match="nothing here") as caught:
        sweep.mapped(fails, [(i,) for i in range(400)], "doomed")
    assert caught.value.__notes__ == ["This was cell 4 of 400 of doomed: (3,)"]
    assert len(noted("tried 3 *")) == (1 if either == "here" else 1 + sweep.RETRIES)
    sweep.mapped(square, [(i,) for i in range(4)], "after the running ones")
    assert len(noted("tried *")) < 300, "400 were queued"


def test_ctrl_c_calls_cells_off(workers):
    for path in noted("tried *"):
        (store.ROOT / path).unlink()

    def interrupt(done, of):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), store.told(interrupt):
        sweep.mapped(fails, [(i,) for i in range(10, 410)], "stopped")
    sweep.mapped(square, [(i,) for i in range(4)], "after the running ones")
    assert 2 <= len(noted("tried *")) < 300


def test_a_cluster_that_lost_its_workers_is_told(workers, monkeypatch):
    looks = []

    def look(there):
        looks.append(there)
        if len(looks) == 3:
            raise TimeoutError("no worker any more")

    sweep.client()
    monkeypatch.setattr(sweep, "_workers", look)
    monkeypatch.setattr(sweep, "LOOK", 0.1)
    with pytest.raises(TimeoutError, match="any more"):
        sweep.mapped(waits, [("the end",)], "endless")
    note("the end")


def test_a_worker_asks_for_no_cluster_of_its_own(workers):
    assert sweep.mapped(asks_for_a_client, [(workers,)], "inside") == [True]


# ---- refusals


def test_a_worker_with_other_code_is_refused_before_and_after_it_is_known(workers, monkeypatch):
    there = sweep.client()
    monkeypatch.setattr(sweep, "_SOURCE", "0123456789abcdef")
    with pytest.raises(RuntimeError) as before:
        sweep._prove(there, sweep._workers(there))
    with pytest.raises(RuntimeError) as later:  # one that joined after the client had looked
        sweep.mapped(square, [(1,)], "late")
    monkeypatch.undo()
    for error in (before, later):
        assert f"source of vrhlib {sweep._SOURCE} (its caller 0123456789abcdef)" in str(error.value)
        assert "restart it" in str(error.value)


@pytest.mark.parametrize("package", ["torch", "transformers", "numpy"])
def test_a_worker_with_another_version_is_refused(package):
    ours = sweep._facts()
    with pytest.raises(RuntimeError, match=rf"worker has {package} 0\.1 \(its caller {re.escape(ours[package])}\)"):
        sweep._compare("worker", ours, ours | {package: "0.1"})
    with pytest.raises(RuntimeError, match=f"{package} None"):
        sweep._compare("worker", ours, {k: v for k, v in ours.items() if k != package})


def test_a_worker_on_another_folder_is_refused(workers, monkeypatch, tmp_path):
    there = sweep.client()
    monkeypatch.setattr(store, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="VRHLIB_ROOT") as caught:
        sweep._prove(there, sweep._workers(there))
    assert str(tmp_path) in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the token is gone"


@pytest.mark.parametrize(
    "spec", ["nosuch", "0", "-1", "2.5", "http://127.0.0.1:8786", "tcp://127.0.0.1", "127.0.0.1:1"]
)
def test_a_cluster_that_is_none_is_told_how_to_name_one(spec):
    with pytest.raises(ValueError, match="leave the cluster out|number of workers.*tcp://host:8786.*scheduler-file"):
        with sweep.cluster(spec):
            pass


def test_a_file_without_an_address_is_no_cluster(tmp_path):
    for text in ("", "[]", '{"id": "x"}', '{"address": "somewhere"}', '{"address": 7}'):
        (tmp_path / "scheduler.json").write_text(text)
        with pytest.raises(ValueError, match="dask scheduler --scheduler-file"):
            with sweep.cluster(str(tmp_path / "scheduler.json")):
                pass


@pytest.mark.parametrize("answer", [None, b"", b"SSH-2.0-OpenSSH_9.2\r\n"], ids=["nobody", "silence", "a stranger"])
def test_a_scheduler_that_does_not_answer_is_named_with_the_next_step(answer, monkeypatch):
    monkeypatch.setattr(sweep, "CONNECT", 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("DASK_SCHEDULER", address)
        if answer is None:
            listener.close()
        for ask in (sweep.client, sweep.cluster(address).__enter__):
            with ExitStack() as stack, pytest.raises(ConnectionError, match=f"{address}.*dask scheduler"):
                if answer:
                    stack.enter_context(greeting(listener, answer))
                ask()


@contextmanager
def greeting(listener, words):
    """Whoever connects hears these words."""
    kept = []

    def serve():
        while True:
            try:
                door, _ = listener.accept()
            except OSError:
                return
            door.sendall(words)
            kept.append(door)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield
    finally:
        for door in kept:
            door.close()


def test_without_dask_there_are_no_workers_but_everything_else(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert sweep.mapped(square, [(3,)], "without") == [9]
    assert sweep.device() is None
    monkeypatch.setenv("DASK_SCHEDULER", "tcp://127.0.0.1:1")
    for ask in (sweep.client, sweep.cluster("2").__enter__):
        with pytest.raises(ModuleNotFoundError, match=r'pip install "vrhlib\[sweep\]"'):
            ask()


def test_importing_it_loads_neither_dask_nor_torch():
    code = "import sys, vrhlib.sweep; print({'dask', 'distributed', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


# ---- the model and the GPU of a worker


def test_one_model_is_kept_and_given_up_before_the_next_is_loaded(monkeypatch):
    monkeypatch.setattr(sweep, "_held", None)
    log = []

    def load(name, size=1):
        log.append(f"load {name}")
        if name == "broken":
            raise OSError("no weights")
        return SimpleNamespace(name=name, size=size, release=lambda: log.append(f"release {name}"))

    first = sweep.resident(load, "a", 2)
    assert first.size == 2 and sweep.resident(load, "a", 2) is first
    assert log == ["load a"]
    assert sweep.resident(load, "b").name == "b"
    assert log == ["load a", "release a", "load b"]
    with pytest.raises(OSError):
        sweep.resident(load, "broken")
    assert sweep.resident(load, "b").name == "b"
    assert log[3:] == ["release b", "load broken", "load b"], "given up once, and not served after that"
    assert sweep.resident(lambda name: [name], "c") == ["c"]
    assert sweep.resident(lambda name: [name], "d") == ["d"], "a list has nothing to release"


@pytest.mark.parametrize(
    ("name", "gpus", "wanted"),
    [
        ("0", 4, "cuda:0"), ("3", 4, "cuda:3"), ("6", 4, "cuda:2"), ("node7-1", 4, "cuda:1"), ("gpu-12", 8, "cuda:4"),
        ("5", 1, "cuda:0"), ("tcp://10.0.0.1:40001", 1, "cuda:0"), ("3", 0, None), (None, 4, None),
    ],
)  # fmt: skip
def test_a_worker_takes_the_gpu_of_its_number(name, gpus, wanted, monkeypatch):
    monkeypatch.setattr(sweep, "_worker", lambda: name)
    monkeypatch.setattr(sweep, "_gpus", lambda: gpus)
    monkeypatch.delenv("VRHLIB_DEVICE", raising=False)
    assert sweep.device() == wanted
    monkeypatch.setenv("VRHLIB_DEVICE", "cuda:7")
    assert sweep.device() is None, "what the user says goes first"


@pytest.mark.parametrize("name", ["tcp://10.0.0.1:40001", "gpu"])
def test_a_worker_without_a_number_does_not_guess_among_gpus(name, monkeypatch):
    monkeypatch.setattr(sweep, "_worker", lambda: name)
    monkeypatch.setattr(sweep, "_gpus", lambda: 2)
    monkeypatch.delenv("VRHLIB_DEVICE", raising=False)
    with pytest.raises(RuntimeError, match="--name 0"):
        sweep.device()


def test_more_workers_than_gpus_are_refused(folder, monkeypatch):
    monkeypatch.setattr(sweep, "_gpus", lambda: 1)
    with pytest.raises(ValueError, match="Ask for 1, or set VRHLIB_DEVICE=cpu"):
        with sweep.cluster("2"):
            pass


# ---- clusters


def test_a_local_cluster_is_on_loopback_shares_the_cores_and_leaves_nothing(folder, monkeypatch, capsys):
    from dask.system import CPU_COUNT

    monkeypatch.setattr(sweep, "_gpus", lambda: 0)
    for name in ("OMP", "MKL", "OPENBLAS"):
        monkeypatch.delenv(f"{name}_NUM_THREADS", raising=False)
    me = psutil.Process()
    before, ours = {p.pid for p in me.children(recursive=True)}, listening(me)
    with sweep.cluster("1") as address:
        line = rf"Dask: 1 worker at {address}, .*; (dashboard http://127.0.0.1:\d+/status|no dashboard .+)\n"
        assert re.fullmatch(line, capsys.readouterr().out)
        monkeypatch.setenv("DASK_SCHEDULER", address)
        (found,) = sweep.mapped(surroundings, [()], "surroundings")
        assert {found[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {str(CPU_COUNT)}
        assert found["HF_HUB_OFFLINE"] == "1" and found["VRHLIB_ROOT"] == str(folder)
        assert "OMP_NUM_THREADS" not in os.environ, "kernels that are started now keep all cores"
        children = [p for p in me.children(recursive=True) if p.pid not in before]
        ports = set().union(*(listening(p) for p in [me, *children])) - ours
        assert len(ports) >= 3, "scheduler, nanny and worker"
        assert {host for host, _ in ports} == {"127.0.0.1"}
        there = sweep.client()
        assert [w["memory_limit"] for w in there.scheduler_info()["workers"].values()] == [0], "Dask kills no model"
    # What is left is this process's own resource tracker, which Python keeps.
    assert not [p for p in psutil.wait_procs(children, timeout=3)[1] if "resource_tracker" not in " ".join(line_of(p))]
    assert listening(me) == ours and there.status == "closed"
    with pytest.raises(ConnectionError):
        sweep.client()


def listening(process):
    return {tuple(c.laddr) for c in process.net_connections() if c.status == psutil.CONN_LISTEN}


def test_a_dashboard_is_linked_only_where_it_can_be_seen(two, monkeypatch, capsys):
    for found, wanted in (
        (object(), r"dashboard http://127.0.0.1:\d+/status"),
        (None, r"no dashboard \(pip install bokeh"),
    ):
        monkeypatch.setattr("distributed.Client.run_on_scheduler", lambda *_, found=found: found)
        with sweep.cluster(two) as address:
            assert address == two
        assert re.search(rf"^Dask: 2 workers at {two}.*; {wanted}", capsys.readouterr().out)


def test_the_guide_for_several_machines(folder, monkeypatch, tmp_path, capsys):
    """Its own commands, with two machines played by this one: nobody there, workers for nothing, workers."""
    monkeypatch.setattr(sweep, "PATIENCE", 2)
    file = tmp_path / "scheduler.json"
    with ExitStack() as stack:
        scheduler = stack.enter_context(started("dask scheduler", "--port 0 --dashboard-address 127.0.0.1:0", file))
        wait_until(file.exists)
        monkeypatch.setenv("DASK_SCHEDULER", str(file))
        with sweep.cluster(str(file)):
            assert "Dask: 0 workers at tcp://127.0.0.1" in capsys.readouterr().out
        with pytest.raises(TimeoutError, match=r"has no worker\. Start some: dask worker tcp://.*--resources model=1"):
            sweep.client()
        assert "has no worker; waiting for one" in capsys.readouterr().out
        monkeypatch.setattr(sweep, "PATIENCE", 60)

        threads = "--nworkers 2 --nthreads 3"  # more than the guide says: the resource alone must keep cells apart
        stack.enter_context(started("dask worker", threads, file))
        sweep.client()
        wait_until(lambda: len(sweep._workers(sweep.client())) == 2)
        names = {w["name"] for w in sweep.client().scheduler_info()["workers"].values()}
        assert {name[-2:] for name in names} == {"-0", "-1"}, "numbered, so that each finds its GPU"
        assert len(set(sweep.mapped(alone, [(i,) for i in range(12)], "alone"))) == 2

        there = sweep.client()
        monkeypatch.setattr(sweep, "LOOK", 1)
        with pytest.raises(ConnectionError, match="run the same command"):
            sweep.mapped(kills, [(scheduler.pid,)], "no scheduler")
        there.close()


def test_a_worker_without_the_resource_or_with_an_older_checkout(folder, monkeypatch, tmp_path):
    shutil.copytree(ROOT / "vrhlib", tmp_path / "older/vrhlib", ignore=shutil.ignore_patterns("__pycache__", "*.js"))
    with (tmp_path / "older/vrhlib/boxes.py").open("a") as source:
        source.write("# an edit\n")
    file = tmp_path / "scheduler.json"
    monkeypatch.setattr(sweep, "PATIENCE", 60)
    with ExitStack() as stack:
        stack.enter_context(started("dask scheduler", "--port 0 --dashboard-address 127.0.0.1:0", file))
        wait_until(file.exists)
        monkeypatch.setenv("DASK_SCHEDULER", str(file))
        stack.enter_context(started("dask worker", '--nworkers 1 --resources "other=1"', file))
        with sweep._connect(sweep._address(str(file))) as there:
            there.wait_for_workers(1, timeout=60)
        monkeypatch.setattr(sweep, "PATIENCE", 1)
        with pytest.raises(TimeoutError, match="1 worker, none started with --resources model=1"):
            sweep.client()
        monkeypatch.setattr(sweep, "PATIENCE", 60)
        stack.enter_context(started("dask worker", "--nworkers 1 --name older", file, tmp_path / "older"))
        with pytest.raises(RuntimeError, match=rf"has source of vrhlib \w+ \(its caller {sweep._SOURCE}\)"):
            sweep.client()


@contextmanager
def started(command, more, file, code=ROOT):
    """A command of the guide as it stands there, but on loopback, with its own scheduler file and `more` (the last word
    counts); ended with all it started."""
    (line,) = re.findall(rf"^{command} .+$", GUIDE, re.M)
    line = line.replace('"$PWD/data/runs/scheduler.json"', str(file)).replace("--interface ib0", "--host 127.0.0.1")
    words = shlex.split(line.replace('"$(hostname)"', "here") + " " + more)
    words[0] = str(Path(sys.executable).with_name("dask"))
    names = os.pathsep.join([str(code), str(ROOT / "tests")])
    with (file.parent / "log").open("a") as log:
        there = {"cwd": file.parent, "env": os.environ | {"PYTHONPATH": names}}
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, **there)
    try:
        yield process
    finally:
        all_of_it = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        process.terminate()
        process.wait(60)
        assert not psutil.wait_procs([p for p in all_of_it if p is not process], timeout=60)[1]


def test_the_guide_for_slurm(folder, monkeypatch, tmp_path, capsys):
    """Its script as it stands, with an `sbatch` that starts jobs here; the results come from two jobs."""
    jobs, programs = tmp_path / "jobs", tmp_path / "bin"
    jobs.mkdir()
    programs.mkdir()
    (programs / "sbatch").write_text(f"""#!/bin/sh
        cp "$1" {jobs}/$$
        setsid bash {jobs}/$$ >{jobs}/$$.log 2>&1 </dev/null &
        echo "Submitted batch job $!"
    """)
    (programs / "scancel").write_text('#!/bin/sh\nfor job; do kill -- "-$job"; done\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    command = 'subprocess.run(["./run_all.sh", "paper"], env=os.environ | there, check=True)'
    assert command in script
    for old, new in ((command, "run(there)"), ("ib0", "lo"), ("_jobs=8", "_jobs=2")):
        script = script.replace(old, new)
    found = []

    def run(there):
        monkeypatch.setenv("DASK_SCHEDULER", there["DASK_SCHEDULER"])
        found.extend(sweep.mapped(meet, [("job a", "job b"), ("job b", "job a")], "jobs"))
        found.extend(sweep.mapped(surroundings, [()], "surroundings"))
        sweep.client().close()

    import dask

    with dask.config.set({"distributed.scheduler.allowed-failures": 3}):  # the script sets it for good
        exec(script, {"run": run})
    assert len(set(found[:2])) == 2
    assert found[2]["OMP_NUM_THREADS"] == "8" and found[2]["HF_HUB_OFFLINE"] == "1"
    job = capsys.readouterr().out
    for wanted in ("#SBATCH --gres=gpu:1", "#SBATCH --cpus-per-task=8", "#SBATCH -p gpu", "#SBATCH -t 08:00:00"):
        assert wanted in job.splitlines()
    (worker,) = [line for line in job.splitlines() if "dask_worker" in line]
    assert " --resources model=1 --memory-limit 0" in worker and " --nthreads 1 " in worker
    wait_until(lambda: not [p for p in psutil.process_iter() if str(jobs) in " ".join(line_of(p))])


def line_of(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return []


def test_the_guide_says_what_the_code_does():
    assert (sweep.DEATHS, sweep.PATIENCE, sweep.RESOURCE) == (10, 600, "model")
    assert "more than ten workers" in " ".join(GUIDE.split()) and "waits ten minutes" in GUIDE
    assert f"ALLOWED_FAILURES={sweep.DEATHS}" in GUIDE and f'allowed-failures": {sweep.DEATHS}' in GUIDE
    (models,) = re.findall(r"^models=\((.+)\)$", GUIDE, re.M)
    assert tuple(models.split()) == profile("paper").models
