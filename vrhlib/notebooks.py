"""Runs the notebooks headless and says beforehand what a run would cost.

    python -m vrhlib.notebooks run  --profile nano 01 03 K=3
    python -m vrhlib.notebooks plan --profile paper --limit 100

papermill does the work; this file adds what it leaves out. papermill binds a parameter that nobody
reads and exits 0: here an unknown name or a value of another type is refused before anything runs.
papermill asks Jupyter for a kernel and may be given another Python's: here it is always this one. Each
notebook runs in a process of its own (`jobs`), several at once where there are cores for it, so that one
that fails or dies doesn't take the others with it. And what is up to date is not run again (`uptodate`).

A source notebook in `notebooks/` is never written to. Its executed copy goes to
`notebooks/rendered/<profile>/`, without widget state (GitHub refuses to show notebooks that carry it)
and without paths of the machine it ran on.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import os
import re
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

from vrhlib import jobs, plan, store, uptodate
from vrhlib.profiles import profile as profile_of

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_STRICT = "VRHLIB_STRICT"


class Refused(ValueError):
    """A request that cannot be run as written; its message is one line with the next step."""


@dataclass(frozen=True)
class Notebook:
    """A source notebook: `01_detect` in `notebooks/01_detect.ipynb`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name.split("_")[0]

    @cached_property
    def content(self) -> dict:
        return _read_notebook(self.path)

    def cells(self, kind: str) -> list[str]:
        return ["".join(cell["source"]) for cell in self.content["cells"] if cell["cell_type"] == kind]

    @property
    def title(self) -> str:
        headings = re.findall(r"^#+ +(.+)$", "\n".join(self.cells("markdown")[:1]), flags=re.MULTILINE)
        return headings[0].strip() if headings else "(untitled)"

    def cost(self, profile: str) -> str:
        return self.content["metadata"].get("vrhlib", {}).get("cost", {}).get(profile, "?")

    def minutes(self, profile: str) -> float:
        """What `cost` begins with; infinite where it says no time, since that may be any."""
        said = re.match(r"([\d.]+) *(s|min|h)\b", self.cost(profile))
        return float(said[1]) * {"s": 1 / 60, "min": 1, "h": 60}[said[2]] if said else float("inf")

    @property
    def source(self) -> str:
        """SHA-256 of the code cells: prose may change without making a rendered copy stale."""
        return hashlib.sha256(json.dumps(self.cells("code")).encode()).hexdigest()

    @cached_property
    def parameters(self) -> dict[str, object]:
        """Name and default of every assignment in the cell tagged `parameters`.

        Raises Refused unless there is exactly one such cell, of plain assignments like `K = 20`, with
        PROFILE among them: what papermill cannot see in there, it would override without a word.
        """
        tagged = [c for c in self.content["cells"] if "parameters" in c.get("metadata", {}).get("tags", ())]
        if len(tagged) != 1:
            raise Refused(f"{self.name} needs exactly one cell tagged `parameters`; it has {len(tagged)}.")
        defaults: dict[str, object] = {}
        try:
            for node in ast.parse("".join(tagged[0]["source"])).body:
                (target,) = node.targets  # type: ignore[attr-defined]
                defaults[target.id] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
        except (SyntaxError, ValueError, AttributeError, TypeError) as error:
            raise Refused(f"{self.name}: its parameters cell may hold only lines like `K = 20` ({error}).") from error
        if "PROFILE" not in defaults:
            raise Refused(f"{self.name}: its parameters cell must assign PROFILE, or every profile runs the same.")
        return defaults

    def rendered(self, profile: str) -> Path:
        return folder() / "rendered" / profile / self.path.name

    def failed(self, profile: str) -> Path:
        return self.rendered(profile).with_suffix(".failed.ipynb")


def folder() -> Path:
    return store.ROOT / "notebooks"


def select(words: Sequence[str]) -> list[Notebook]:
    """Notebooks named by number (`01`) or name (`01_detect`), in the order of their numbers; all if none is named."""
    found = [Notebook(path) for path in sorted(folder().glob("[0-9][0-9]_*.ipynb"))]
    if not found:
        raise Refused(f"No notebooks in {folder()}; there should be files like 01_detect.ipynb.")
    for word in words:
        if not any(word in (notebook.number, notebook.name) for notebook in found):
            raise Refused(f"No notebook {word!r}; there are {', '.join(notebook.name for notebook in found)}.")
    return [notebook for notebook in found if not words or notebook.number in words or notebook.name in words]


# ---- parameters


def parse_value(name: str, text: str, default: object) -> object:
    """Read `text` as a value of the default's type; bare words are strings.

    Whole numbers serve as floats, tuples as lists, and `A=one,two` as a list of words; nothing else is converted:
    `K=3.5` or `K=yes` against `K = 20` raises Refused.
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if default is None:
        return value
    if isinstance(default, str):
        return value if isinstance(value, str) else text
    if isinstance(default, list | tuple):
        if isinstance(value, str) and all(isinstance(member, str) for member in default):  # MODELS=one,two
            value = [word for word in value.split(",") if word]
        members = {type(member) for member in default}
        if isinstance(value, list | tuple) and (not members or {type(member) for member in value} <= members):
            return list(value)
    elif isinstance(default, float) and type(value) is int:
        return float(value)
    elif type(value) is type(default):
        return value
    raise Refused(f"{name}={text} is not {_kind(default)}; the default is {_as_words({name: default})[0]}.")


def _kind(value: object) -> str:
    names = {bool: "True or False", int: "a whole number", float: "a number", list: "a list like it", tuple: "a list"}
    return names.get(type(value), f"a {type(value).__name__}")


def _as_words(values: dict[str, object]) -> list[str]:
    """Parameters as they are typed on the command line."""
    return [f"{name}={str(value).replace(' ', '')}" for name, value in values.items()]


def bind(notebooks: Sequence[Notebook], overrides: dict[str, str]) -> dict[str, dict[str, object]]:
    """Notebook name to the overrides it takes. A name must be known to one of the notebooks at least."""
    if "PROFILE" in overrides:
        raise Refused(f"The profile is a word of its own: ./run_all.sh {overrides['PROFILE']}")
    known = sorted({name for notebook in notebooks for name in notebook.parameters} - {"PROFILE"})
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}."
            raise Refused(f"No parameter {name} in {', '.join(notebook.name for notebook in notebooks)}; {hint}")
    return {
        notebook.name: {
            name: parse_value(name, text, notebook.parameters[name])
            for name, text in overrides.items()
            if name in notebook.parameters
        }
        for notebook in notebooks
    }


def limited(overrides: dict[str, str], limit: str | None) -> dict[str, str]:
    """Overrides with `--limit N`, which is N_TEST=N for every notebook that has it."""
    if limit is None:
        return overrides
    if not limit.isdecimal() or int(limit) < 1:
        raise Refused(f"--limit takes a whole number >= 1, got {limit!r}.")
    if "N_TEST" in overrides:
        raise Refused(
            f"--limit {limit} means N_TEST={limit}; give one of the two, not N_TEST={overrides['N_TEST']} too."
        )
    return overrides | {"N_TEST": limit}


def parameters(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str]) -> dict[str, dict[str, object]]:
    """Notebook name to all its parameters. Raises Refused for models, benchmarks and numbers that cannot be meant."""
    bound = bind(notebooks, overrides)
    given = {n.name: n.parameters | {"PROFILE": profile} | bound[n.name] for n in notebooks}
    for name, values in given.items():
        try:
            plan.check_values(profile, values)
            plan.work_of(name, profile, values)
        except ValueError as error:
            raise Refused(f"{name}: {error}") from error
    return given


# ---- one notebook, in the process that is its own


def execute(notebook: Notebook, profile: str, overrides: dict[str, object]) -> tuple[str | None, bool]:
    """Run one notebook; returns what went wrong as one line, or None, and whether its kernel died.

    The executed copy replaces the previous one only if every cell ran; else what there is of it goes
    to `<name>.failed.ipynb`, and the last good copy stays.
    """
    import papermill  # a second of imports that `plan` and refusals can do without

    with tempfile.TemporaryDirectory() as temporary:
        _install_kernel(Path(temporary), notebook)
        copy, kernel = Path(temporary, notebook.path.name), _watched_kernel()
        error: str | None = None
        died = False
        try:
            papermill.execute_notebook(
                notebook.path,
                copy,
                parameters={"PROFILE": profile, **overrides},
                kernel_name="python3",
                language="python",
                cwd=folder(),
                progress_bar=False,
                stdout_file=_Lines(sys.stdout),
                stderr_file=_Lines(sys.stderr),
                coalesce_streams=True,  # one output per stream: progress lines leave only their last state
                kernel_manager_class=kernel,
            )
        except Exception as raised:  # whatever it was, it is told in one line
            died = isinstance(raised, RuntimeError) and "Kernel died" in str(raised)
            error = _one_line(raised)
            if died:
                error = f"DeadKernelError: Kernel died: it {jobs.how_it_ended(kernel.code)}"
        try:
            if copy.exists():
                _keep(copy, notebook, notebook.failed(profile) if error else notebook.rendered(profile))
        except (OSError, Refused) as raised:
            error = error or _one_line(raised)
        if not error:
            notebook.failed(profile).unlink(missing_ok=True)
        return error, died


def _watched_kernel() -> type:
    """A manager of one kernel that keeps the return code it was found dead with."""
    from jupyter_client.manager import AsyncKernelManager

    class Watched(AsyncKernelManager):
        code = None

        async def _async_is_alive(self) -> bool:
            alive = await super()._async_is_alive()
            if not alive and self.provisioner is not None and self.has_kernel and Watched.code is None:
                Watched.code = await self.provisioner.poll()
            return alive

        is_alive = _async_is_alive

    return Watched


def _install_kernel(directory: Path, notebook: Notebook) -> None:
    """Make `python3` mean this interpreter and this vrhlib, for this process only.

    A kernel of that name may be registered for the user or the machine and point to any other Python;
    JUPYTER_PATH is searched before all of those.
    """
    python = (sys.executable, "-Xfrozen_modules=off")  # unfrozen, or every kernel opens with a debugger's warning
    spec = {
        # What a cell prints or raises comes back as messages; the kernel's own log is about Jupyter, not about us.
        "argv": [*python, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--IPKernelApp.log_level=50"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "env": {
            "PYTHONPATH": _python_path(),
            "VRHLIB_ROOT": str(store.ROOT.resolve()),  # the kernel has another working directory
            "VRH_NOTEBOOK": notebook.name,
            "VRH_PROGRESS": "text",
        },
    }
    path = directory / "kernels" / "python3" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(spec))
    os.environ["JUPYTER_PATH"] = str(directory)


def _python_path() -> str:
    """This vrhlib before any other that is installed."""
    package = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))


class _Lines:
    """Passes a kernel's stream on, a line at a time.

    Progress rewrites its line with a carriage return; in a log each state becomes a line of its own.
    """

    def __init__(self, stream: TextIO):
        self.stream, self.pending, self.last = stream, "", ""

    def write(self, text: str) -> None:
        *lines, self.pending = re.split(r"[\r\n]", self.pending + text)
        if "\r" in text:  # progress doesn't end its line; don't sit on it until the next one
            lines, self.pending = [*lines, self.pending], ""
        for line in map(str.rstrip, lines):
            if line and line != self.last:
                print(line, file=self.stream)
                self.last = line

    def flush(self) -> None:
        self.stream.flush()


def _keep(copy: Path, notebook: Notebook, target: Path) -> None:
    """Write an executed copy to its place, fit for GitHub and free of this machine's paths."""
    content = _read_notebook(copy)
    metadata = content["metadata"]
    metadata.pop("widgets", None)
    metadata["vrhlib"] = {**metadata.get("vrhlib", {}), "source": notebook.source}
    for key in ("input_path", "output_path", "environment_variables", "environment"):
        metadata.get("papermill", {}).pop(key, None)
    for cell in content["cells"]:
        for output in cell.get("outputs", ()):
            # A live view without its state shows as "Error displaying widget", in place of the picture beside it.
            if len(output.get("data", {})) > 1:
                output["data"].pop(_WIDGET_VIEW, None)
    store.write_atomic(target, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _one_line(error: Exception) -> str:
    name, message = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    message = " ".join(message.split())
    return f"{name}: {message if len(message) <= 400 else message[:400] + ' …'}"


def _read_notebook(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["cells"], content["metadata"]
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} is not a notebook ({type(error).__name__}: {error}).") from error
    return content


def one(notebook: Notebook, profile: str, overrides: dict[str, str], report: Path) -> int:
    """The command of a job: run one notebook, and leave in `report` how it went."""
    jobs.end_with_parent()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    error, died = execute(notebook, profile, bind([notebook], overrides)[notebook.name])
    store.write_atomic(report, json.dumps({"error": error, "died": died}))
    return 1 if error else 0


# ---- several


@dataclass(frozen=True)
class How:
    """How notebooks are run, which changes none of their parameters."""

    jobs: int | None = None  # at once; None: as many as the profile and the cores suggest
    again: bool = False  # also what is up to date
    strict: bool = False  # replies decoded plainly, without draft verification
    cluster: str | None = None  # worker processes to start, or the address of a scheduler

    def words(self) -> list[str]:
        """As typed, without `--again`: what has run since need not run once more."""
        given = [("--jobs", self.jobs), ("--cluster", self.cluster)]
        words = [word for name, value in given if value is not None for word in (name, str(value))]
        return words + ["--strict"] * self.strict


def cores() -> int:
    """Those this process may use, which in a container or a batch job are fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def at_once(profile: str, wanted: int | None) -> int:
    """Notebooks that run at once: one on a GPU; else one a core, four at most (each holds models in memory)."""
    return wanted or (max(1, min(4, cores())) if profile == "nano" else 1)


def run(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str], how: How = How()) -> int:
    """Execute the notebooks that are not up to date, failures included; returns the exit code (0, 1, 130 if stopped).

    A paper run begins only if nothing stands in its way; else everything that does is said, and nothing is spent.
    """
    bound, given = bind(notebooks, overrides), parameters(profile, notebooks, overrides)
    _say_who_ignores(overrides, bound)
    batch = _Batch(profile, notebooks, overrides, how, bound, given)
    with _sigterm_as_ctrl_c(), _strictly(how):
        try:
            batch.look()
            if not batch.waiting:
                return batch.summary()
            if profile == "paper" and not _way_is_clear(profile, batch.waiting, overrides, given):
                return 1
            with _cluster(how) as scheduler:
                batch.run(scheduler)
        except KeyboardInterrupt:
            return batch.stopped()
    return batch.summary()


def _way_is_clear(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str], given: dict) -> bool:
    _say("Looking at GPU, disk and Hub before anything is spent ...")
    for problem in (problems := plan.check(plan.Paper({n.name: given[n.name] for n in notebooks}))):
        _say(f"vrhlib: {problem}", sys.stderr)
    if problems:
        words = shlex.join(_words(profile, notebooks, overrides))
        _say(f"Nothing was run. What a run needs: ./run_all.sh plan {words}", sys.stderr)
    elif device := os.environ.get("VRHLIB_DEVICE", ""):
        _say(
            f"VRHLIB_DEVICE={device}."
            + " Hours become days, and weights (float32) take twice the memory." * (not device.startswith("cuda"))
        )
    return not problems


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A batch system or a container that stops us says SIGTERM; kernels must not outlive that either."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """While kernels are being ended, which takes seconds, a second Ctrl-C must not leave them behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _strictly(how: How) -> Iterator[None]:
    """`--strict` for kernels and for the workers of a cluster, which both take over this environment."""
    before = os.environ.get(_STRICT)
    if how.strict:
        os.environ[_STRICT] = "1"
    try:
        yield
    finally:
        os.environ.pop(_STRICT, None) if before is None else os.environ.update({_STRICT: before})


@contextlib.contextmanager
def _cluster(how: How) -> Iterator[str | None]:
    """The address of the scheduler that is asked for, started here or elsewhere; None if none is."""
    spec = how.cluster or os.environ.get("DASK_SCHEDULER")
    if not spec:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            from vrhlib import sweep  # Dask is an extra, asked for by those who want a cluster

            address = stack.enter_context(sweep.cluster(spec))
        except (ModuleNotFoundError, ValueError, OSError, RuntimeError) as error:
            name = f"--cluster {spec}" if how.cluster else f"DASK_SCHEDULER={spec}"
            raise Refused(f"{name}: {error}") from error
        yield address


@dataclass
class _Batch:
    """Notebooks on their way: which are up to date, wait, run, have ended and how."""

    profile: str
    notebooks: Sequence[Notebook]
    overrides: dict[str, str]
    how: How
    bound: dict[str, dict[str, object]]
    given: dict[str, dict[str, object]]
    waiting: list[Notebook] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)
    running: dict[jobs.Job, tuple[Notebook, uptodate.Inputs, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    silent: bool = False

    def inputs(self, notebook: Notebook, shared: uptodate.Inputs) -> uptodate.Inputs:
        code, prose = notebook.cells("code"), notebook.cells("markdown")
        return uptodate.inputs(shared, code, prose, self.given[notebook.name])

    def look(self) -> None:
        """Sort out what is up to date, and say so."""
        recorded, problem = uptodate.recorded(self.profile)
        if problem:
            _say(problem, sys.stderr)
        shared = uptodate.shared(self.profile)
        for position, notebook in enumerate(self.notebooks, 1):
            record = recorded.get(notebook.name)
            changes = uptodate.changes(self.profile, notebook.name, record, self.inputs(notebook, shared))
            if record and not changes and not self.how.again:
                _say(
                    f"[{position}/{len(self.notebooks)}] {notebook.name}: up to date since {record['finished']} "
                    "(nothing it depends on changed); --again runs it all the same"
                )
            else:
                self.waiting.append(notebook)
                self.why[notebook.name] = f"not up to date: {changes}" if changes else "up to date, run --again"
        if len(self.waiting) < len(self.notebooks):
            _say("")

    def run(self, scheduler: str | None) -> None:
        """Run what waits, the longest first where several run. On an exception all that runs is ended."""
        several = min(at_once(self.profile, self.how.jobs), len(self.waiting))
        if several > 1:
            self.waiting.sort(key=lambda notebook: -notebook.minutes(self.profile))
            _say(f"{several} notebooks at once, lines begin with a notebook's number (--jobs 1: one after the other)\n")
        ended: SimpleQueue[jobs.Job] = SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="vrhlib-", ignore_cleanup_errors=True) as folder:
            environment = self._environment(several, scheduler)
            try:
                while self.waiting or self.running:
                    while self.waiting and len(self.running) < several:
                        self._start(self.waiting[0], Path(folder), environment, ended, several > 1)
                    self._ended(ended.get(), several > 1)
            finally:
                with _deaf():
                    self.silent = True
                    jobs.end(list(self.running), grace=3)

    def _environment(self, several: int, scheduler: str | None) -> dict[str, str]:
        environment = {**os.environ, "VRHLIB_ROOT": str(store.ROOT.resolve()), "PYTHONPATH": _python_path()}
        if several > 1:
            # Small matrices: two processes of one thread are faster than one of two, and threads that spin for shared
            # cores crawl.
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // several)))
        if scheduler:
            environment["DASK_SCHEDULER"] = scheduler
        return environment

    def _start(self, notebook: Notebook, folder: Path, environment: dict[str, str], ended, several: bool) -> None:
        prefix = _prefix(notebook, several)

        def tell(line: str, stream: TextIO) -> None:
            if not self.silent:
                _say(prefix + line, stream)

        position = list(self.notebooks).index(notebook) + 1
        _say(f"[{position}/{len(self.notebooks)}] {notebook.name}: {notebook.title}")
        words = [
            f"{self.profile} profile",
            f"cost {notebook.cost(self.profile)}",
            *_as_words(self.bound[notebook.name]),
        ]
        _say(f"{prefix}{', '.join(words)}")
        _say(f"{prefix}{self.why[notebook.name]}")
        # As things are now: what is edited while it runs makes it out of date.
        inputs = self.inputs(notebook, uptodate.shared(self.profile))
        with contextlib.suppress(OSError):  # who cannot write there is told when the notebook tries to
            uptodate.forget(self.profile, notebook.name)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        (own := folder / notebook.name).mkdir()
        known = [f"{name}={text}" for name, text in self.overrides.items() if name in notebook.parameters]
        command = [sys.executable, "-m", "vrhlib.notebooks", "one", "--profile", self.profile, notebook.name, *known]
        job = jobs.Job(command, own, environment, tell, ended)
        self.running[job] = (notebook, inputs, since)
        self.waiting.remove(notebook)

    def _ended(self, job: jobs.Job, several: bool) -> None:
        notebook, inputs, since = self.running[job]
        error = job.error()
        if not error:
            try:
                written = uptodate.outputs(self.profile, notebook.name, notebook.rendered(self.profile), since)
                uptodate.remember(self.profile, notebook.name, inputs, written)
            except OSError as problem:
                _say(f"It will be run again: {problem}", sys.stderr)
        prefix = _prefix(notebook, several)
        if words := jobs.reuse(job.ledger):
            _say(prefix + words)
        del self.running[job]
        self.seconds[notebook.name] = job.seconds
        if error:
            self.errors[notebook.name] = error
        outcome = "FAILED" if error else "done"
        _say(f"{prefix}{outcome} after {job.seconds:.0f} s{': ' + error if error else ''}\n")

    def stopped(self) -> int:
        """What a stop left, and how to go on."""
        under_way = [notebook for notebook, *_ in self.running.values()]
        left = {n.name for n in [*under_way, *self.waiting]} | self.errors.keys()
        rest = [notebook for notebook in self.notebooks if notebook.name in left]
        where = f" in {', '.join(n.name for n in self.notebooks if n in under_way)}" if under_way else ""
        _say(f"\nStopped{where}. {_resume(self.profile, rest, self.overrides, self.how)}", sys.stderr)
        return 130

    def summary(self) -> int:
        rows = [(n.name, *self._status(n.name)) for n in self.notebooks]
        _say(plan.table(("notebook", "seconds", "status"), rows))
        figures = _relative(store.figures_dir(self.profile))
        _say(f"\nfigures: {figures}/   executed notebooks: notebooks/rendered/{self.profile}/")
        failing = [notebook for notebook in self.notebooks if notebook.name in self.errors]
        for notebook in failing:
            _say(f"\n{notebook.name} failed: {self.errors[notebook.name]}", sys.stderr)
            if notebook.failed(self.profile).exists():
                _say(f"As far as it came: {_relative(notebook.failed(self.profile))}", sys.stderr)
        if failing:
            _say(_resume(self.profile, failing, self.overrides, self.how), sys.stderr)
        return 1 if failing else 0

    def _status(self, name: str) -> tuple[str, str]:
        if name not in self.seconds:
            return "-", "up to date"
        return f"{self.seconds[name]:.0f}", "FAILED" if name in self.errors else "ok"


def _prefix(notebook: Notebook, several: bool) -> str:
    return f"[{notebook.number}] " if several else "      "


def _say_who_ignores(overrides: dict[str, str], bound: dict[str, dict[str, object]]) -> None:
    for name in overrides:
        if ignoring := [notebook for notebook, values in bound.items() if name not in values]:
            _say(f"{name} is not a parameter of {', '.join(ignoring)}; it is passed to the others only.")


def _resume(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str], how: How) -> str:
    words = shlex.join([*_words(profile, notebooks, overrides), *how.words()])
    return f"To resume: ./run_all.sh {words}   (finished samples are kept)"


def _words(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str]) -> list[str]:
    """A request as it is typed, without the parameters that none of these notebooks has."""
    known = {name for notebook in notebooks for name in notebook.parameters}
    return [profile, *(n.number for n in notebooks), *(f"{k}={text}" for k, text in overrides.items() if k in known)]


# ---- what a run would cost


def overview(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str]) -> str:
    """What a run would do: cost, sequences, age of the executed copies, samples that need no recomputing; then what
    the embedded models can do, or what a paper run needs."""
    given, cached = parameters(profile, notebooks, overrides), _cached_runs(profile)
    measured = store.speeds(store.runs_dir(profile) / "speed.json")
    told, rows = plan.share_told(store.runs_dir(profile)) or plan.TOLD, []
    for n in notebooks:
        work, cost = plan.work_of(n.name, profile, given[n.name]), n.cost(profile)
        if profile == "paper":
            cost = "?" if work is None else f"{plan.hours(work, measured, told):.1f} GPU h"
        sequences = "?" if work is None else f"{sum(w.sequences for w in work):,}"
        rows.append((n.name, cost, sequences, _last_rendered(n, profile), cached.get(n.name, "-"), n.title))
    words = [plan.table(("notebook", "cost", "sequences", "last rendered", "cached", "title"), rows)]
    if profile == "nano":
        return "\n\n".join(words + _embedded())
    return "\n\n".join([*words, plan.in_words(plan.Paper(given), measured, plan.gpu_here(), plan.free_disk_gb())])


def _embedded() -> list[str]:
    """What the embedded models can do, as measured when they were made (`vrhlib.nano.quality`), as two tables."""
    paths = [store.ROOT / "data" / "nano" / f"{model}.json" for model in profile_of("nano").models]
    about = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    if not about:
        return []
    names = tuple(a["model"].removeprefix("nano-") for a in about)
    by_name = [{row["benchmark"]: row for row in a["benchmarks"]} for a in about]
    every = {name: row for rows in by_name for name, row in rows.items()}
    rows = [(name, row["like"], *(_quality(mine.get(name)) for mine in by_name)) for name, row in every.items()]
    n = sorted({row["n"] for mine in by_name for row in mine.values()})
    words = (
        f"Embedded models on test pictures, % right, n={' or '.join(map(str, n))} a benchmark. In brackets: for boxes, "
        "two\nquestions about one picture both right; for words, the best reader that need not look where it is asked\n"
        "to (chance, a guess from the wording, a bystander, the same question about a grey picture)."
    )
    cuts = [row for a in about for row in a["ablation"]]
    ks = [sorted({row["k"] for row in a["ablation"] if row["k"]}) for a in about]
    ablation = [
        (name, *(", ".join(_ablation(a, name, k) for k in mine) for a, mine in zip(about, ks)))
        for name in dict.fromkeys(row["benchmark"] for row in cuts)
    ]
    cut = (
        f"% right when top heads are cut, n={' or '.join(map(str, sorted({row['n'] for row in cuts})))}: unmasked > k "
        "heads: top | random | layer-matched random (means over seeds)"
    )
    return [
        f"{words}\n{plan.table(('benchmark', 'stands for', *names), rows)}",
        f"{cut}\n{plan.table(('benchmark', *names), ablation)}",
    ]


def _quality(row: dict | None) -> str:
    if row is None:
        return "-"
    other = row.get("two_questions", max(row.get(key, 0) for key in ("chance", "guess", "bystander", "blind")))
    return f"{row['accuracy']:.1f} ({other:.1f})"


def _ablation(about: dict, benchmark: str, k: int) -> str:
    words = []
    for condition in ("unmasked", "vrh", "random", "layer_matched"):
        wanted = (benchmark, condition)
        rows = [r for r in about["ablation"] if r["k"] in (0, k)]
        values = [r["accuracy"] for r in rows if (r["benchmark"], r["condition"]) == wanted]
        words.append(f"{sum(values) / len(values):.0f}" if values else "-")
    return "{0} > {4}: {1} | {2} | {3}".format(*words, k)


def _last_rendered(notebook: Notebook, profile: str) -> str:
    if not notebook.rendered(profile).exists():
        return "never"
    metadata = _read_notebook(notebook.rendered(profile))["metadata"]
    papermill = metadata.get("papermill", {})
    overrides = {name: value for name, value in papermill.get("parameters", {}).items() if name != "PROFILE"}
    words = [str(papermill.get("end_time"))[:10], *_as_words(overrides)]
    if metadata.get("vrhlib", {}).get("source") != notebook.source:
        words.append("(source changed since)")
    return " ".join(words)


def _cached_runs(profile: str) -> dict[str, str]:
    """Notebook name to "3 runs (1 unfinished), 1200 samples", from the manifests beside the stored runs."""
    counts: dict[str, list[int]] = {}
    for path in store.runs_dir(profile).glob("*.json"):
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            facts = (1, int(not manifest["complete"]), int(manifest["samples"]))
            name = str(manifest["notebook"])
        except (ValueError, KeyError, TypeError):
            continue  # not a manifest, or half of one: the run store will say so when it reads the run
        counts[name] = [a + b for a, b in zip(counts.get(name, [0, 0, 0]), facts, strict=True)]
    return {
        name: f"{runs} run{'s' * (runs != 1)}{f' ({unfinished} unfinished)' * bool(unfinished)}, {samples} samples"
        for name, (runs, unfinished, samples) in counts.items()
    }


def _relative(path: Path) -> Path:
    return path.relative_to(store.ROOT) if path.is_relative_to(store.ROOT) else path


def _say(text: str, stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:  # a terminal or a log that knows ASCII only
        print(text.encode("ascii", "replace").decode(), file=stream, flush=True)


# ---- JupyterLab


def lab() -> None:
    """Open JupyterLab in notebooks/: on this machine only, and with a token, whatever Jupyter's configuration says.

    Arguments win over every configuration file. They are given here, to a call, and not on the command line, which all
    users of the machine can read. JUPYTER_TOKEN chooses the token.
    """
    from jupyterlab.labapp import LabApp

    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    provider = "jupyter_server.auth.identity.PasswordIdentityProvider"
    os.chdir(folder())
    LabApp.launch_instance(
        [
            "--ServerApp.ip=localhost",
            "--ServerApp.sock=",
            "--ServerApp.allow_remote_access=False",
            f"--ServerApp.identity_provider_class={provider}",
            f"--IdentityProvider.token={token}",
            f"--PasswordIdentityProvider.token={token}",  # the setting of the subclass would go before the other
            "--PasswordIdentityProvider.hashed_password=",
            "--ServerApp.use_redirect_file=True",  # else the browser is started with the token on its command line
        ]
    )


# ---- the command line


def _how(options: argparse.Namespace) -> How:
    count = options.jobs
    if count is not None and (not count.isdecimal() or int(count) < 1):
        raise Refused(f"--jobs takes a whole number >= 1, got {count!r}.")
    spec = options.cluster
    if spec is not None and re.fullmatch(r"[-+.\d]*", spec) and (not spec.isdecimal() or int(spec) < 1):
        raise Refused(f"--cluster takes a number of worker processes or an address like tcp://host:8786, got {spec!r}.")
    if options.command == "plan" and (count is not None or options.again):
        raise Refused("A plan runs nothing: --jobs and --again are for a run.")
    return How(int(count) if count else None, options.again, options.strict, spec)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vrhlib.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "plan", "lab", "one"), help="`one` is how `run` runs each of them")
    parser.add_argument("--profile", choices=store.PROFILES, default="nano")
    parser.add_argument("--limit", metavar="N", help="at most N samples in every evaluation (N_TEST=N)")
    parser.add_argument("--jobs", metavar="N", help="notebooks at once (nano: one a core, four at most; paper: 1)")
    parser.add_argument("--again", action="store_true", help="run also what is up to date")
    parser.add_argument("--strict", action="store_true", help="decode replies plainly, without draft verification")
    parser.add_argument("--cluster", metavar="N|ADDRESS", help="Dask: workers to start, or a scheduler that runs")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", metavar="01 | NAME=VALUE", help="notebooks and parameters; all if none")
    options = parser.parse_intermixed_args(argv)
    try:
        if options.command == "lab":
            lab()
            return 0
        how = _how(options)
        overrides = limited(dict(word.split("=", 1) for word in options.words if "=" in word), options.limit)
        notebooks = select([word for word in options.words if "=" not in word])
        if options.command == "one":
            return one(notebooks[0], options.profile, overrides, options.report)
        if options.command == "run":
            return run(options.profile, notebooks, overrides, how)
        _say(overview(options.profile, notebooks, overrides))
    except Refused as refusal:
        _say(f"vrhlib: {refusal}", sys.stderr)
        return 2
    except ModuleNotFoundError as missing:  # a plan may be asked of any Python
        _say(f"vrhlib: this needs {missing.name}. Any command but plan and help makes an environment.", sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
