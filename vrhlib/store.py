"""Where results live: paths, run keys, one JSON line per sample, resume, manifests, progress.

A result is found again by what determines it. `Run` holds all of that (model, revision, image
backend, samples, prompt, condition, decoding, kernel, dtype, batch size, versions) and its digest
names the file, so one model's replies can never be served as another's, and a changed prompt or
library starts a new file instead of mixing with the old one.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

from vrhlib import __version__

ROOT = Path(os.environ.get("VRHLIB_ROOT") or Path(__file__).resolve().parents[1])
PROFILES = ("nano", "paper")
_PACKAGES = ("torch", "transformers", "numpy", "pillow")


def _profile_dir(kind: str, profile: str) -> Path:
    if profile not in PROFILES:
        raise unknown("profile", profile, PROFILES)
    return ROOT / kind / profile


def unknown(what: str, name: object, known: Iterable[str], more: str = "") -> ValueError:
    """The error for a name that is none of `known`, with the nearest one."""
    known = list(known)
    by_lower = {k.casefold(): k for k in known}
    close = difflib.get_close_matches(str(name).casefold(), by_lower, 1, 0.4)
    hint = f" Did you mean {by_lower[close[0]]!r}?" if close else ""
    return ValueError(f"Unknown {what} {name!r}; there are {', '.join(map(repr, known))}{more}.{hint}")


def runs_dir(profile: str) -> Path:
    """Per-sample results, git-ignored: safe to delete, costs a rerun."""
    return _profile_dir("data/runs", profile)


def figures_dir(profile: str) -> Path:
    return _profile_dir("figures", profile)


def heads_dir(profile: str) -> Path:
    return _profile_dir("data/heads", profile)


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write all of a file or nothing: readers and killed processes never see half of it.

    Raises OSError with the next step when the folder cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(
            f"Cannot write {path}: {error.strerror}. Make {path.parent} a writable folder, or set VRHLIB_ROOT to a "
            "writable copy of this repository. Finished samples are kept and will be reused."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # gone already if all went well
    return path


def digest(value: object) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """First 16 hex digits of the SHA-256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


@functools.cache
def versions() -> dict[str, str]:
    """Versions that decide results."""
    return {"vrhlib": __version__, **{name: importlib.metadata.version(name) for name in _PACKAGES}}


@functools.cache
def git_commit() -> str:
    """Commit of this checkout, with `+` if tracked files differ from it; `unknown` outside git."""

    def git(*words: str) -> str:
        return subprocess.run(("git", "-C", ROOT, *words), capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


_peak = 0.0  # highest value seen before `measure` reset the kernel's own counter


def peak_mib() -> float:
    """Peak resident memory of this process so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(max(_peak, peak / (2**20 if sys.platform == "darwin" else 2**10)), 1)


def measure(work: Callable, *args: object, device: object = "cpu") -> tuple:
    """Result, seconds and peak memory (MiB above what was held at the start) of one call that runs on a torch device.

    Device memory if that is a CUDA device; else resident memory, NaN where the system keeps no
    resettable peak (only Linux does).
    """
    global _peak
    import torch

    reset = Path("/proc/self/clear_refs")
    cuda, linux = str(device).startswith("cuda"), reset.exists()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
    elif linux:
        _peak = peak_mib()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # hand freed memory back to the system, or the work would be done in it unseen
        reset.write_text("5")
        base = _status("VmRSS")
    began = time.perf_counter()
    result = work(*args)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    if cuda:
        return result, seconds, (torch.cuda.max_memory_allocated(device) - base) / 2**20
    return result, seconds, max(0.0, _status("VmHWM") - base) if linux else float("nan")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def manifest(**facts: object) -> dict:
    """What stands beside every written result: versions, commit, machine, peak memory, plus `facts`."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "git_commit": git_commit(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "notebook": os.environ.get("VRH_NOTEBOOK"),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "peak_mib": peak_mib(),
        **facts,
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that determines a result. Equal runs share a file; any difference makes another."""

    task: str  # "replies" or "scores"
    model: str
    revision: str
    image_backend: str
    benchmark: str
    data: str  # where the samples come from: Hub id, commit and split
    samples: tuple[str, ...]  # one `Sample.fingerprint` each
    image_limits: dict
    prompt: list
    condition: dict
    decoding: dict
    kernel: str
    dtype: str
    device: str
    batch_size: int

    @property
    def digest(self) -> str:
        return digest({**asdict(self), "versions": versions(), "code": _code(bool(self.data))})


@functools.cache
def _code(real: bool) -> list[str]:
    """Digests of the files that decide a stored result: an edit there must not be served yesterday's numbers."""
    files = ("boxes", "samples", "real" if real else "nano/scenes", "vlm", "attention", "scoring")
    return [file_digest(Path(__file__).parent / f"{name}.py") for name in files]


def sample_set(fingerprints: Sequence[str], data: str) -> dict:
    """What tells a stored file from one of other samples or of other code, for `stored`."""
    return {"sample_set": digest(list(fingerprints)), "code": _code(bool(data))}


class CorruptRun(ValueError):
    """A stored line cannot be read; the message names file, line and next step."""


class Results:
    """Records of one run by sample id; `add` appends a line at once, so a killed run loses one batch at most."""

    def __init__(self, path: Path):
        self.path = path
        self.records: dict[str, dict] = {}

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.records

    def __len__(self) -> int:
        return len(self.records)

    def add(self, sample_id: str, record: dict) -> None:
        if sample_id in self.records:
            raise ValueError(f"Sample {sample_id!r} was already stored in {self.path.name}; sample ids must be unique.")
        if "id" in record:
            raise ValueError(f"A record of {sample_id!r} has a field 'id'; that name is the sample's own.")
        line = json.dumps({"id": sample_id, **record}, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
        self.records[sample_id] = json.loads(line)  # as a later session will read it
        del self.records[sample_id]["id"]

    def _read(self, repair: bool = True) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole, end, tail = data.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if end else [], 1):
            try:
                record = json.loads(line)
                key = record.pop("id")
                if not isinstance(key, str):
                    raise TypeError(f"id {key!r}")
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CorruptRun(
                    f"{self.path}, line {number} is not a stored record ({error}). Delete that line to recompute "
                    "its sample, or the whole file to recompute the run."
                ) from error
            if key in self.records:
                raise CorruptRun(f"{self.path}, line {number} repeats sample {key!r}. Delete one of the two lines.")
            self.records[key] = record
        if tail and repair:  # a process was killed while writing: that sample is computed again
            with self.path.open("rb+") as file:
                file.truncate(len(data) - len(tail))


@contextmanager
def open_run(run: Run, profile: str) -> Iterator[Results]:
    """Results so far of a run, to be completed inside the block.

    One process at a time holds a run; a second one waits, then finds the work done. On leaving, also
    by an exception, the manifest beside the lines says how far the run came.
    """
    path = runs_dir(profile) / f"{run.digest}.jsonl"
    with held(path):
        results, began = Results(path), time.perf_counter()
        results._read()
        before = len(results)
        try:
            yield results
        finally:
            if len(results) > before or _told(path).get("samples") != len(results):
                _write_run_manifest(run, results, len(results) - before, time.perf_counter() - began)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """One process at a time works on a file or folder; a second one waits. Its parent folder is made.

    Raises OSError with the next step where nothing can be written there."""
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
    except OSError as error:
        raise OSError(
            f"Cannot write {path.parent}: {error}. Make it a writable folder, or set VRHLIB_ROOT to a writable copy."
        ) from error
    try:
        yield
    finally:
        lock.release()


def stored(profile: str, **facts: object) -> list[tuple[Results, dict]]:
    """Complete runs of this code and these versions whose manifest says so, each with its manifest; no model needed."""
    wanted = {"complete": True, "versions": versions(), **facts}
    found = []
    for path in sorted(runs_dir(profile).glob("*.jsonl")):
        told = _told(path)
        if all(told.get(name) == value for name, value in wanted.items()):
            results = Results(path)
            results._read(repair=False)
            if len(results) == told["samples"]:  # no line was lost since
                found.append((results, told))
    return found


def _told(path: Path) -> dict:
    """The run's manifest so far; empty if there is none to read."""
    try:
        return json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}


def _write_run_manifest(run: Run, results: Results, new: int, seconds: float) -> None:
    path = results.path.with_suffix(".json")
    earlier = _told(path).get("seconds", 0.0)
    sizes = Counter(str(record["batch"]) for record in results.records.values() if "batch" in record)
    at_once = Counter(str(record["rows"]) for record in results.records.values() if "rows" in record)
    facts = asdict(run) | {"samples": len(results), "batch_sizes": dict(sizes), "sequences_at_once": dict(at_once)}
    facts |= sample_set(run.samples, run.data)
    done = len(results) == len(run.samples)
    text = json.dumps(manifest(**facts, complete=done, seconds=round(earlier + seconds, 2), new=new), indent=1)
    write_atomic(path, text + "\n")


class Meter:
    """Counts tokens and seconds of a model's passes into data/runs/<profile>/speed.json, for estimates.

    `add` takes the tokens read (prompts) and written since the last call."""

    def __init__(self, profile: str, model: str, device: str):
        self.path = runs_dir(profile) / "speed.json"
        self.name = f"{model} on {device}"
        self.last, self.counts = time.perf_counter(), [0, 0, 0.0]
        self.saved = self.last

    def add(self, read: int, written: int) -> None:
        now = time.perf_counter()
        self.counts = [a + b for a, b in zip(self.counts, (read, written, now - self.last))]
        self.last = now
        if now - self.saved > 60:
            self.close()

    def close(self) -> None:
        if self.counts[2]:
            known = speeds(self.path)
            total = [a + b for a, b in zip(known.get(self.name, [0, 0, 0.0]), self.counts)]
            write_atomic(self.path, json.dumps(known | {self.name: [total[0], total[1], round(total[2], 2)]}) + "\n")
        self.counts, self.saved = [0, 0, 0.0], self.last


def speeds(path: Path) -> dict[str, list]:
    """`<model> on <device>` to [tokens read, tokens written, seconds]; empty if nothing was measured."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


_TOLD: ContextVar[Callable[[int, int], None] | None] = ContextVar("vrh_told", default=None)


@contextmanager
def told(tell: Callable[[int, int], None]) -> Iterator[None]:
    """Inside, long work draws no bar of its own: `tell(done, of)` is called before its first step and after each."""
    token = _TOLD.set(tell)
    try:
        yield
    finally:
        _TOLD.reset(token)


def _telling(items: Sequence, tell: Callable[[int, int], None]) -> Iterator:
    for done, item in enumerate(items):
        tell(done, len(items))
        yield item
    tell(len(items), len(items))


def progress(items: Sequence, label: str) -> Iterable:
    """A tqdm progress bar; plain text lines when headless (VRH_PROGRESS=text, set by the notebook runner).

    Nothing is shown where nothing is left to do.
    """
    if not items:
        return items
    if tell := _TOLD.get():
        return _telling(items, tell)
    from tqdm.auto import tqdm as notebook_tqdm
    from tqdm.std import tqdm as text_tqdm

    if os.environ.get("VRH_PROGRESS") == "text" or not _in_notebook():
        line = "{desc}  {n_fmt}/{total_fmt}  {elapsed}{postfix}"
        return text_tqdm(items, desc=label, mininterval=10, file=sys.stdout, bar_format=line, ascii=True)
    return notebook_tqdm(items, desc=label)


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules
