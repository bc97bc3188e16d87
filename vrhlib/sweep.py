"""Cells of a sweep on many GPUs: in this process, or by Dask's scheduler on workers of one or more machines.

A *cell* is the smallest piece of work that is handed out: one model, one benchmark, one shard of its samples, under all
conditions, which share a batch. A *run* (`store.Run`) is one condition of one shard: it has its own key, file and lock,
so a cell completes several runs. A *shard* is a slice of samples that is worth the trip: minutes, not seconds. A
*worker* is a process that computes one cell at a time and keeps one model (`resident`), on one GPU (`device`).

What makes this safe is the store and no scheduler: a key says what a result is, a file is written line by line under a
lock, and what is stored is not computed again. So a cell may be run twice, moved when a worker dies, or repeated
tomorrow; another scheduler, or two terminals on a shared folder, would do as well. Replies come back through that
folder, not through Dask: all workers must see the same one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import reprlib
import socket
import sys
import time
import uuid
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vrhlib import store

RESOURCE = "model"  # each worker has one, each cell takes one: `dask worker --resources "model=1"`
CONNECT = 15  # seconds for a scheduler to answer
PATIENCE = 600  # seconds for a first worker: queues are slow, but an empty cluster must not hang forever
LOOK = 30  # seconds without a finished cell after which workers are counted again
RETRIES = 2
ADDRESS = re.compile(r"(tcp|tls)://\[?([^\[\]/]+)\]?:([0-9]+)")
# Workers that may die before Dask gives up a cell. Each death is counted against all cells that were waiting on that
# worker, so with Dask's own 3 innocent ones would be given up.
DEATHS = 10

# As imported, not as it is on disk now: a worker that was started before an edit runs the old code.
_FILES = [path for part in ("*.py", "nano/*.py") for path in sorted(Path(__file__).parent.glob(part))]
_SOURCE = store.digest([[path.name, store.file_digest(path)] for path in _FILES])

_clients: dict[tuple[int, str], object] = {}
_held: tuple[tuple, object] | None = None


@contextmanager
def cluster(spec: str) -> Iterator[str]:
    """The address of a scheduler with workers, for DASK_SCHEDULER; one line is printed about it.

    `spec`: a number of workers, which are started on this machine and stopped on leaving (loopback only, one thread of
    Python each and an equal share of the cores for torch, at most one per GPU where there are GPUs); or what runs
    already: `tcp://host:port`, or the file that `dask scheduler --scheduler-file` wrote. Raises ModuleNotFoundError
    without Dask, ValueError for anything else, ConnectionError if no scheduler answers within 15 seconds.
    """
    _dask()
    if not re.fullmatch(r"[0-9]+", spec):
        address = _address(spec)
        with _connect(address) as there:
            print(_line(there), flush=True)
        yield address
        return
    with _local(int(spec)) as local:
        address = local.scheduler_address
        with _connect(address) as there:
            print(_line(there), flush=True)
        try:
            yield address
        finally:
            if there := _clients.pop((os.getpid(), address), None):
                there.close()  # or it would try to reconnect


def client():
    """A `distributed.Client` of the scheduler that DASK_SCHEDULER names (address or file), one per process; None if it
    is not set, and inside a worker, where a cell that waited for other cells would wait forever.

    The first call proves that the workers run this code, with these versions, on this folder. Raises RuntimeError if
    not, ConnectionError if the scheduler does not answer, TimeoutError if it has no worker after ten minutes.
    """
    spec = os.environ.get("DASK_SCHEDULER")
    if not spec or _worker() is not None:
        return None
    _dask()
    address = _address(spec)
    there = _clients.get((os.getpid(), address))
    if there is None or there.status != "running":
        if there:
            there.close()
        there = _connect(address)
        try:
            _prove(there, _workers(there))
        except BaseException:
            there.close()
            raise
        _clients[os.getpid(), address] = there
    _workers(there)
    return there


def mapped(work: Callable, cells: Iterable[tuple], label: str, model: str | Callable[..., str] | None = None) -> list:
    """`work(*cell)` for every cell, results in their order; on the workers of `client()`, or here, one after the other.

    Cells must be idempotent, and keep what they compute in the store: a cell whose worker is lost is run again
    elsewhere. `work` is a function of a module and travels by name; arguments and results are pickled, so they should
    be small. `model` names the model of a cell (a function of its arguments, or one name for all): cells of one model
    are handed out together, so that workers change models as rarely as possible. An exception is raised as it is, with
    a note that names the cell, after two more tries on workers; cells that have not started are then called off, as
    they are by Ctrl-C.
    """
    cells = [tuple(cell) for cell in cells]
    names = [model(*cell) if callable(model) else model for cell in cells]
    order = sorted(range(len(cells)), key=lambda i: names.index(names[i]))
    there = client() if cells else None
    finished = _here(work, cells, order, label) if there is None else _there(there, work, cells, order, label)
    results = dict(finished)
    return [results[i] for i in range(len(cells))]


def resident(load: Callable, *key: object) -> object:
    """`load(*key)`, kept until another key is asked for in this process: the old object is given up first (its
    `release()` is called if it has one), so that two models never share a GPU."""
    global _held
    if _held is None or _held[0] != key:
        old, _held = _held, None
        if old and (release := getattr(old[1], "release", None)):
            release()
        del old
        _held = key, load(*key)
    return _held[1]


def device() -> str | None:
    """The GPU of the worker that runs this, such as `cuda:1`; None without a GPU, outside a worker, and where
    VRHLIB_DEVICE says it.

    Dask does not divide GPUs. Where a worker sees several, it takes the one of its number: `LocalCluster` names workers
    0, 1, ..., `dask worker --name gpu --nworkers 4` names them gpu-0, ... Raises RuntimeError if its name has none,
    because workers that share a GPU unknowingly run out of memory.
    """
    name = _worker()
    if name is None or os.environ.get("VRHLIB_DEVICE"):
        return None
    count = _gpus()
    if count < 2:
        return "cuda:0" if count else None
    number = None if "://" in name else re.search(r"\d+$", name)
    if number is None:
        raise RuntimeError(
            f"Worker {name} sees {count} GPUs and has no number to choose by. Start it with --name 0 (1, 2, ...) or "
            "with CUDA_VISIBLE_DEVICES set to one of them."
        )
    return f"cuda:{int(number[0]) % count}"


def _here(work: Callable, cells: list[tuple], order: list[int], label: str) -> Iterator[tuple[int, object]]:
    for i in store.progress(order, label):
        with _named(label, cells, i):
            result = work(*cells[i])
        yield i, result


def _there(there, work: Callable, cells: list[tuple], order: list[int], label: str) -> Iterator[tuple[int, object]]:
    module, name = (getattr(work, attribute, "") for attribute in ("__module__", "__name__"))
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not work:
        raise ValueError(f"{work} cannot be sent to workers by name: put it at the top level of a module.")
    once, how = uuid.uuid4().hex[:8], {"resources": {RESOURCE: 1}, "retries": RETRIES, "fifo_timeout": 0, "pure": False}
    finished, waiting = queue.SimpleQueue(), {}
    try:
        for i in order:
            future = there.submit(_run, work, cells[i], _facts(), key=f"{name}-{once}-{i}", **how)
            waiting[future.key] = i, future
        for _, future in waiting.values():
            future.add_done_callback(finished.put)
        for _ in store.progress(order, label):
            future = _next(there, finished)
            i, _ = waiting.pop(future.key)
            with _named(label, cells, i):
                result = future.result()
            yield i, result
    except BaseException:
        with suppress(Exception, CancelledError):  # the connection may be what failed
            there.cancel([future for _, future in waiting.values()], force=True)
        raise


def _next(there, finished: queue.SimpleQueue):
    """The next finished future; counts workers where none comes for long, so that an emptied cluster is told."""
    while True:
        try:
            future = finished.get(timeout=LOOK)
        except queue.Empty:
            _workers(there)
            continue
        if future.cancelled():
            raise ConnectionError(
                f"The scheduler at {there.scheduler.address} went away or called the cells off. What they finished is "
                "stored: start a scheduler and workers again, then run the same command."
            )
        return future


def _run(work: Callable, cell: tuple, facts: dict) -> object:
    """One cell, in a worker. It may have joined after `_prove`, so it proves itself again."""
    _compare(f"{_worker()} on {socket.gethostname()}", facts, _facts())
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and (torch := sys.modules.get("torch")):  # a caller's script may have loaded it too early
        torch.set_num_threads(int(threads))
    with store.told(lambda done, of: None):  # the caller shows how far cells are; bars of many workers would be noise
        return work(*cell)


@contextmanager
def _named(label: str, cells: Sequence[tuple], i: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"This was cell {i + 1} of {len(cells)} of {label}: {reprlib.repr(cells[i])}")
        if type(error).__name__ == "KilledWorker":
            error.add_note("Its workers died, most likely for want of memory: look at their log, try a smaller batch.")
        raise


def _facts() -> dict[str, str]:
    """What a worker must have in common with its caller: it decides results, or the key they are stored under."""
    return {"source of vrhlib": _SOURCE, **store.versions()}


def _seen(token: str) -> tuple[dict[str, str], bool, str]:
    return _facts(), (store.ROOT / token).exists(), f"{socket.gethostname()}:{store.ROOT}"


def _prove(there, workers: list[str]) -> None:
    """Raises RuntimeError unless all workers have this code, these versions and this folder."""
    token = f"data/runs/.shared-{uuid.uuid4().hex}"
    path = store.write_atomic(store.ROOT / token, "")
    try:
        answers = there.run(_seen, token, workers=workers, on_error="return")
    finally:
        path.unlink()
    for worker, answer in answers.items():
        if isinstance(answer, BaseException):
            raise RuntimeError(
                f"Worker {worker} cannot import this vrhlib ({answer}). Start it in the same environment and folder."
            ) from answer
        theirs, shared, root = answer
        _compare(worker, _facts(), theirs)
        if not shared:
            raise RuntimeError(
                f"Worker {worker} keeps results in {root}, which is not {store.ROOT} of this process. Start workers in "
                "a checkout on a shared folder, or set VRHLIB_ROOT to one for all."
            )


def _compare(worker: str, ours: dict, theirs: dict) -> None:
    different = [
        f"{name} {theirs.get(name)} (its caller {ours[name]})" for name in ours if theirs.get(name) != ours[name]
    ]
    if different:
        raise RuntimeError(
            f"Worker {worker} has {', '.join(different)}; its results would not be this code's. Give it the same "
            "checkout and versions, and restart it: a worker keeps the code it started with."
        )


def _workers(there) -> list[str]:
    """Addresses of workers that take cells; waits for a first one, and says so."""
    began, said = time.monotonic(), False
    while True:
        try:
            present = there.scheduler_info()["workers"]
        except (OSError, CancelledError) as error:
            raise ConnectionError(f"The scheduler is gone ({error}). Start it, then run the same command.") from error
        if able := [address for address, facts in present.items() if facts["resources"].get(RESOURCE)]:
            return able
        have = f"{_workers_of(len(present))}, none started with --resources {RESOURCE}=1" if present else "no worker"
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(
                f"{there.scheduler.address} has {have}. Start some: dask worker {there.scheduler.address} --nthreads 1 "
                f"--memory-limit 0 --resources {RESOURCE}=1"
            )
        if not said:
            print(
                f"{there.scheduler.address} has {have}; waiting for one, {PATIENCE / 60:g} minutes at most", flush=True
            )
            said = True
        time.sleep(0.5)


def _workers_of(n: int) -> str:
    return f"{n} worker{'' if n == 1 else 's'}"


def _line(there) -> str:
    able = [w for w in there.scheduler_info()["workers"].values() if w["resources"].get(RESOURCE)]
    hosts = len({w["host"] for w in able})
    # Dask gives a link in any case; without bokeh it leads to a page that says so.
    bokeh = there.run_on_scheduler(importlib.util.find_spec, "bokeh")
    dashboard = f"dashboard {there.dashboard_link}" if bokeh else "no dashboard (pip install bokeh shows one)"
    where = f" on {hosts} hosts" if hosts > 1 else ""
    return f"Dask: {_workers_of(len(able))}{where} at {there.scheduler.address}, a cell at a time each; {dashboard}"


@contextmanager
def _local(n: int) -> Iterator:
    import dask
    from dask.system import CPU_COUNT
    from distributed import LocalCluster

    if n == 0:
        raise ValueError("0 workers compute nothing; leave the cluster out to work in one process.")
    if not os.environ.get("VRHLIB_DEVICE") and 0 < (gpus := _gpus()) < n:
        raise ValueError(f"{n} workers for {gpus} GPU(s): each needs one. Ask for {gpus}, or set VRHLIB_DEVICE=cpu.")
    share = str(max(1, CPU_COUNT // n))
    threads = {f"{name}_NUM_THREADS": share for name in ("OMP", "MKL", "OPENBLAS")}
    # Dask's own OMP_NUM_THREADS=1 would be set in this process as well, and in the kernels that it starts.
    ours = {"distributed.scheduler.allowed-failures": DEATHS, "distributed.nanny.pre-spawn-environ": {}}
    with dask.config.set(ours):
        local = LocalCluster(
            n_workers=n, threads_per_worker=1, processes=True, resources={RESOURCE: 1}, env=threads,
            host="127.0.0.1", dashboard_address="127.0.0.1:0",
            memory_limit=0,  # Dask would pause or kill a worker whose model takes more than its share
        )  # fmt: skip
    with local:
        yield local


def _connect(address: str):
    from distributed import Client

    try:
        scheme, host, port = ADDRESS.fullmatch(address).groups()
        # A Client that fails blocks later ones, so the door is tried first: a scheduler speaks at once, a small message
        # after its length in 8 bytes.
        with socket.create_connection((host, int(port)), CONNECT) as door:
            if scheme == "tcp" and not 0 < int.from_bytes(door.recv(8), "little") < 2**20:
                raise OSError("what answers is something else")
        return Client(address, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"No Dask scheduler answers at {address} ({error}). Is it running, and can this machine reach that port? "
            "Start one with `dask scheduler`, or let --cluster 2 start two workers here."
        ) from error


def _address(spec: str) -> str:
    try:
        address = spec if "://" in spec else json.loads(Path(spec).read_text())["address"]
        if not ADDRESS.fullmatch(address):
            raise ValueError(f"{address} is no tcp://host:port")
        return address
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"No cluster {spec!r}: say a number of workers for this machine (4), the address of a scheduler "
            f"(tcp://host:8786), or the file that `dask scheduler --scheduler-file` wrote ({error!r})."
        ) from error


def _dask() -> None:
    try:
        import distributed  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'Workers need Dask ({error}): pip install "vrhlib[sweep]", or leave the cluster out.', name=error.name
        ) from error


def _worker() -> str | None:
    """Name of the Dask worker that runs this; None elsewhere."""
    dask = sys.modules.get("distributed")
    try:
        return str(dask.get_worker().name) if dask else None
    except ValueError:
        return None


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
