"""Where results live: paths, run keys, one JSON line per sample, resume, manifests, progress.

A result is found again by what determines it. `Run` holds all of that (model, revision, image
backend, samples, prompt, condition, decoding, kernel, dtype, batch size, versions) and its digest
names the file, so one model's replies can never be served as another's, and a changed prompt or
library starts a new file instead of mixing with the old one.

What lies in a folder of runs is checked, not trusted: whatever a kill, a full disk or another hand left there, whole
lines are used, the rest is named and set aside, and what is missing is computed again.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vrhlib import __version__, jsonl, ledger
from vrhlib.ledger import reuse as reuse  # whoever asks the store for its results asks it for this too

ROOT = Path(os.environ.get("VRHLIB_ROOT") or Path(__file__).resolve().parents[1])
PROFILES = ("nano", "paper")
STORE = 1  # the format of manifests and lines; a reader refuses what is newer
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
    # Not by the process number: two machines that share a folder may have the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # gone already if all went well
    return path


def _cannot_write(path: Path, error: OSError) -> OSError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    step = "Free some space there" if full else f"Make {path.parent} a writable folder"
    told = OSError(
        f"Cannot write {path}: {error.strerror or error}. {step}, or set VRHLIB_ROOT to a writable copy of this "
        "repository. Finished samples are kept: the same command goes on after them."
    )
    told.errno = error.errno
    return told


_SAID: set[str] = set()


def say_once(text: str) -> None:
    """Print a line, unless this process has printed it before."""
    if text not in _SAID:
        _SAID.add(text)
        print(text, flush=True)


def digest(value: object) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of a value.

    Raises TypeError or ValueError for what JSON would not tell from something else: keys that are no text, NaN."""
    _check_keys(value)
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def _check_keys(value: object) -> None:
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"The key {strange[0]!r} is no text; in JSON it would be the same as {str(strange[0])!r}.")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            _check_keys(part)


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
def _code(real: bool) -> dict[str, str]:
    """File to digest, of those that decide a stored result: an edit there must not be served yesterday's numbers."""
    names = ("boxes", "samples", "real" if real else "nano/scenes", "vlm", "attention", "decoding", "scoring")
    return {f"{name}.py": file_digest(Path(__file__).parent / f"{name}.py") for name in names}


def sample_set(fingerprints: Sequence[str], data: str) -> dict:
    """What tells a stored file from one of other samples or of other code, for `stored`."""
    return {"sample_set": digest(list(fingerprints)), "code": _code(bool(data))}


class CorruptRun(ValueError):
    """A stored record does not hold what its task stores; the message names file, line and next step."""


class NewerStore(ValueError):
    """A run was stored by a newer vrhlib than this one; nothing of it is read or overwritten."""


class Results:
    """Records of one run by sample id; `add` appends a line at once, so a killed run loses one batch at most."""

    def __init__(self, path: Path):
        self.path = path
        self.records: dict[str, dict] = {}
        self._final = False  # complete, and read without a lock
        self._cut: int | None = None  # where the file ends, if half a line had to stay behind that

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.records

    def __len__(self) -> int:
        return len(self.records)

    def add(self, sample_id: str, record: dict) -> None:
        """Raises OSError with the next step if the line cannot be written; what was stored before is kept."""
        if sample_id in self.records:
            raise ValueError(f"Sample {sample_id!r} was already stored in {self.path.name}; sample ids must be unique.")
        if "id" in record:
            raise ValueError(f"A record of {sample_id!r} has a field 'id'; that name is the sample's own.")
        if self._final:
            raise CorruptRun(
                f"{self.path} is complete without {sample_id!r}: it holds a sample that is none of this run. Move the "
                "file away to compute the run again."
            )
        line = jsonl.line({"id": sample_id, **record})
        _, kept = jsonl.record(line)  # as a later session will read it
        try:
            jsonl.append(self.path, line, self._cut)
            self._cut = None
        except OSError as error:
            self._cut = getattr(error, "size", self._cut)
            raise _cannot_write(self.path, error) from error
        self.records[sample_id] = kept

    def _look(self, samples: int, spotless: bool = False) -> bool:
        """Whether all samples are there, read without writing anything; in a `spotless` file nothing is to repair."""
        try:
            lines = jsonl.read(self.path)
        except OSError as error:
            say_once(f"Cannot read {self.path}: {error.strerror}.")
            return False
        if lines.bad and not spotless:
            say_once(f"{self.path}: {_named(lines.bad)} cannot be used.")
        self.records, self._final = lines.records, len(lines.records) == samples
        return self._final and not (spotless and lines.bad)

    def _read(self) -> None:
        """What is there; bad lines are moved beside the file. The lock must be held."""
        lines, self._final = jsonl.read(self.path), False
        self.records = lines.records
        try:
            if lines.bad:
                aside = self.path.with_name(f"{self.path.name}.bad")
                if kept := [(at.start, at.end) for at in lines.bad if at not in lines.again]:
                    with aside.open("ab") as file:
                        file.writelines(jsonl.pieces(self.path, kept))
                ends = [0, *(edge for at in lines.bad for edge in (at.start, at.end)), lines.end]
                write_atomic(self.path, b"".join(jsonl.pieces(self.path, zip(ends[::2], ends[1::2]))))
                moved = f"moved to {aside.name}, what is missing is computed again" if kept else "dropped"
                print(f"{self.path}: {_named(lines.bad)}: {moved}.", flush=True)
            elif self.path.exists() and self.path.stat().st_size > lines.end:
                os.truncate(self.path, lines.end)  # a process was killed while writing
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def _named(bad: Mapping[jsonl.Line, str], most: int = 5) -> str:
    """`line 3 (no JSON…), line 7 (…) and 2 more lines`."""
    words = ", ".join(f"line {at.number} ({why})" for at, why in list(bad.items())[:most])
    return words + (f" and {len(bad) - most} more lines" if len(bad) > most else "")


@contextmanager
def open_run(run: Run, profile: str) -> Iterator[Results]:
    """Results so far of a run, to be completed inside the block.

    One process at a time holds a run; a second one waits, then finds the work done. A complete run is read without
    being held, so also from where nothing can be written. On leaving, also by an exception, the manifest beside the
    lines says how far the run came. Raises OSError or NewerStore with the next step.
    """
    path = runs_dir(profile) / f"{run.digest}.jsonl"
    results, began, of = Results(path), time.perf_counter(), len(run.samples)
    with ExitStack() as stack:
        if not (_told(path).get("complete") and results._look(of, spotless=True)):
            try:
                stack.enter_context(held(path))
                results._read()
            except OSError:
                if not results._look(of):
                    raise
        before = len(results)
        _note(run, path, before)
        try:
            yield results
        except BaseException:
            with suppress(OSError):  # of a full disk the first error tells more
                _settle(run, results, before, began)
            raise
        _settle(run, results, before, began)


def _settle(run: Run, results: Results, before: int, began: float) -> None:
    """Write the manifest anew if it does not say how things are."""
    told, new, complete = _told(results.path), len(results) - before, len(results) == len(run.samples)
    if results._final or (not new and (told.get("samples"), told.get("complete")) == (len(results), complete)):
        return
    try:
        _write_run_manifest(run, results, new, time.perf_counter() - began)
    except OSError:
        if new or not complete:
            raise  # else all that was asked for could be read, from where nothing can be written


_PATIENCE = 10  # seconds until a wait for another process is told
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """One process at a time works on a file or folder; a second one waits. Its parent folder is made.

    Raises OSError with the next step where nothing can be written there, or where files cannot be locked."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            print(f"waiting for another process that computes {path.name}", flush=True)
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise _cannot_write(path, error) from error
        raise OSError(
            f"The file system of {path.parent} cannot lock files ({error}), and without locks two processes could "
            "spoil each other's results. Set VRHLIB_ROOT to a copy of this repository on a local disk."
        ) from error
    try:
        yield
    finally:
        lock.release()


def complete(run: Run, profile: str) -> bool:
    """Whether all of a run is stored; looked at without waiting for whoever holds it."""
    path = runs_dir(profile) / f"{run.digest}.jsonl"
    return bool(_told(path, refuse=False).get("complete")) and Results(path)._look(len(run.samples), spotless=True)


def busy(run: Run, profile: str) -> bool:
    """Whether another process holds a run at this moment: then something else can be done first."""
    from filelock import FileLock, Timeout

    path = (runs_dir(profile) / run.digest).with_suffix(".lock")
    try:
        if path.exists():
            FileLock(path).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        pass  # whoever opens the run will say it
    return False


def stored(profile: str, **facts: object) -> list[tuple[Results, dict]]:
    """Complete runs of this code and these versions whose manifest says so, each with its manifest; no model needed.

    Nothing is written. What is garbled, of a newer vrhlib or not ours is named once and passed over."""
    wanted = {"complete": True, "versions": versions(), **facts}
    found = []
    for path in _listed(profile, ".jsonl"):
        told = _told(path, refuse=False)
        if all(told.get(name) == value for name, value in wanted.items()):
            results = Results(path)
            if results._look(told["samples"]):  # no line was lost since
                found.append((results, told))
    return found


_RUN = r"[0-9a-f]{16}"
_OURS = re.compile(
    rf"{_RUN}\.(jsonl|json|lock|jsonl\.bad)|(speed|notebooks|claims)(\.json)?\.(json|lock)|features|policies"
)
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # what `write_atomic` leaves if it is killed


def _listed(profile: str, suffix: str) -> list[Path]:
    """Files of runs; names that are not ours are told once."""
    folder = runs_dir(profile)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    strange = [ascii(name) for name in names if not _OURS.fullmatch(name) and not _PARTIAL.fullmatch(name)]
    if strange:
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        say_once(f"{folder} also holds {', '.join(strange[:5])}{more}: no results of runs, passed over.")
    return [folder / name for name in names if re.fullmatch(_RUN + re.escape(suffix), name)]


_PLAIN = {"store": (int,), "digest": (str,), "samples": (int,), "complete": (bool,), "seconds": (int, float)}


def _told(path: Path, refuse: bool = True) -> dict:
    """The manifest beside a run's lines; empty if there is none, or none that can be used, which is said.

    A newer format is an error (NewerStore) if it's to `refuse`, else named and passed over."""
    path = path.with_suffix(".json")
    try:
        with path.open("rb") as file:
            told = jsonl.plain(file.read(jsonl.LIMIT + 1))
        if not isinstance(told, dict):
            raise ValueError("no JSON object")
        if type(version := told.get("store")) is int and version > STORE:
            raise NewerStore(
                f"{path} is of format {version}, and this vrhlib {__version__} reads formats up to {STORE}. Update "
                "vrhlib, or move that file and its .jsonl away to compute the run again."
            )
        if "store" not in told and "sample_set" in told:
            return {}  # of a vrhlib that wrote no format; its code is not this one's
        if wrong := [name for name, types in _PLAIN.items() if type(told.get(name)) not in types]:
            raise ValueError(f"not as written by vrhlib: {', '.join(wrong)}")
        if told["digest"] != path.stem:
            raise ValueError("that of another run")
        return told
    except FileNotFoundError:
        return {}
    except NewerStore as error:
        if refuse:
            raise
        say_once(str(error))
    except (OSError, ValueError) as error:
        say_once(f"{path} is no manifest of a run ({error}); it counts as missing.")
    return {}


_NOTED: set[tuple[str, Path]] = set()
_ALIKE = ("task", "model", "benchmark", "condition")  # runs that differ in these are other runs, not outdated ones
_REST = (*(f.name for f in fields(Run) if f.name not in (*_ALIKE, "samples")), "sample_set", "versions", "code")


def _note(run: Run, path: Path, had: int) -> None:
    """Once per run and process: a line in the ledger that VRHLIB_LEDGER names, if it names one."""
    name, of = os.environ.get("VRHLIB_LEDGER", ""), len(run.samples)
    if not name or (name, path) in _NOTED:
        return
    _NOTED.add((name, path))
    state, why = "reused" if had >= of else "resumed" if had else "new", ""
    if state == "new":
        now = asdict(run) | sample_set(run.samples, run.data) | {"versions": versions()}
        known = _history(path.parent.name, ROOT).get(ledger.brief(now, _ALIKE), ())
        why = ledger.why(_REST, ledger.brief(now, _REST), known)
    try:
        ledger.note(name, task=run.task, model=run.model, benchmark=run.benchmark, state=state, had=had, of=of, why=why)
    except OSError as error:  # it only informs
        say_once(f"{name} cannot be written ({error.strerror}); what is reused is not noted there.")


@functools.cache
def _history(profile: str, root: Path) -> dict[tuple, list[tuple]]:
    """What was stored when this process first asked, newest first."""
    written: dict[tuple, dict[tuple, str]] = {}
    for path in _listed(profile, ".json"):
        if (told := _told(path, refuse=False)).get("samples"):
            known, rest = written.setdefault(ledger.brief(told, _ALIKE), {}), ledger.brief(told, _REST)
            known[rest] = max(known.get(rest, ""), str(told.get("written")))
    return {key: sorted(known, key=known.get, reverse=True) for key, known in written.items()}


def _write_run_manifest(run: Run, results: Results, new: int, seconds: float) -> None:
    path, earlier = results.path.with_suffix(".json"), _told(results.path).get("seconds", 0.0)
    sizes = Counter(str(record["batch"]) for record in results.records.values() if "batch" in record)
    at_once = Counter(str(record["rows"]) for record in results.records.values() if "rows" in record)
    told = sum(record["drafted"] == record["tokens"] for record in results.records.values() if "drafted" in record)
    facts = asdict(run) | {"samples": len(results), "batch_sizes": dict(sizes), "sequences_at_once": dict(at_once)}
    facts["drafted"] = told  # replies that needed no decoding (see `decoding`)
    facts |= sample_set(run.samples, run.data) | {"store": STORE, "digest": run.digest}
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
            with held(self.path):  # other processes count into the same file
                known = speeds(self.path)
                total = [a + b for a, b in zip(known.get(self.name, [0, 0, 0.0]), self.counts)]
                total = [total[0], total[1], round(total[2], 2)]
                write_atomic(self.path, json.dumps(known | {self.name: total}) + "\n")
        self.counts, self.saved = [0, 0, 0.0], self.last


def speeds(path: Path) -> dict[str, list]:
    """`<model> on <device>` to [tokens read, tokens written, seconds]; empty if nothing was measured."""
    try:
        known = jsonl.plain(path.read_bytes())
    except (OSError, ValueError):
        return {}
    known = known if isinstance(known, dict) else {}
    return {name: counts for name, counts in known.items() if _counts(counts)}


def _counts(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(count) in (int, float) for count in value)


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
