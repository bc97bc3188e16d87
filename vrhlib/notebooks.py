"""Runs the notebooks headless and says beforehand what a run would cost.

    python -m vrhlib.notebooks run  --profile nano 01 03 K=3
    python -m vrhlib.notebooks plan --profile paper --limit 100

papermill does the work; this file adds what it leaves out. papermill binds a parameter that nobody
reads and exits 0: here an unknown name or a value of another type is refused before anything runs.
papermill asks Jupyter for a kernel and may be given another Python's: here it is always this one. And
one failing notebook doesn't take the others with it.

A source notebook in `notebooks/` is never written to. Its executed copy goes to
`notebooks/rendered/<profile>/`, without widget state (GitHub refuses to show notebooks that carry it)
and without paths of the machine it ran on.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TextIO

from vrhlib import plan, store
from vrhlib.profiles import profile as profile_of

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


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


# ---- one notebook


def execute(notebook: Notebook, profile: str, overrides: dict[str, object]) -> str | None:
    """Run one notebook; returns None, or what went wrong as one line.

    The executed copy replaces the previous one only if every cell ran; else what there is of it goes
    to `<name>.failed.ipynb`, and the last good copy stays.
    """
    import papermill  # a second of imports that `plan` and refusals can do without

    with tempfile.TemporaryDirectory() as temporary:
        _install_kernel(Path(temporary), notebook)
        copy = Path(temporary, notebook.path.name)
        error: Exception | None = None
        try:
            papermill.execute_notebook(
                notebook.path,
                copy,
                parameters={"PROFILE": profile, **overrides},
                kernel_name="python3",
                language="python",
                cwd=folder(),
                progress_bar=False,
                stdout_file=_Indented(sys.stdout),
                stderr_file=_Indented(sys.stderr),
                coalesce_streams=True,  # one output per stream: progress lines leave only their last state
            )
        except Exception as raised:  # whatever it was, the other notebooks still run
            error = raised
        try:
            if copy.exists():
                _keep(copy, notebook, notebook.failed(profile) if error else notebook.rendered(profile))
        except (OSError, Refused) as raised:
            error = error or raised
        if not error:
            notebook.failed(profile).unlink(missing_ok=True)
        return _one_line(error) if error else None


def _install_kernel(directory: Path, notebook: Notebook) -> None:
    """Make `python3` mean this interpreter and this vrhlib, for this process only.

    A kernel of that name may be registered for the user or the machine and point to any other Python;
    JUPYTER_PATH is searched before all of those.
    """
    package = str(Path(__file__).resolve().parents[1])
    python = (sys.executable, "-Xfrozen_modules=off")  # unfrozen, or every kernel opens with a debugger's warning
    spec = {
        # What a cell prints or raises comes back as messages; the kernel's own log is about Jupyter, not about us.
        "argv": [*python, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--IPKernelApp.log_level=50"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "env": {
            "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
            "VRHLIB_ROOT": str(store.ROOT.resolve()),  # the kernel has another working directory
            "VRH_NOTEBOOK": notebook.name,
            "VRH_PROGRESS": "text",
        },
    }
    path = directory / "kernels" / "python3" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(spec))
    os.environ["JUPYTER_PATH"] = str(directory)


class _Indented:
    """Passes a kernel's stream on, indented, a line at a time.

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
                print(f"      {line}", file=self.stream)
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
    hint = " (often: out of memory)" if name == "DeadKernelError" else ""
    message = " ".join(message.split())
    return f"{name}: {message if len(message) <= 400 else message[:400] + ' …'}{hint}"


def _read_notebook(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["cells"], content["metadata"]
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} is not a notebook ({type(error).__name__}: {error}).") from error
    return content


# ---- the two commands


def run(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str]) -> int:
    """Execute notebooks one after the other, failures included; returns the exit code (0, 1, or 130 on Ctrl-C).

    A paper run begins only if nothing stands in its way; else everything that does is said, and nothing is spent.
    """
    bound, given = bind(notebooks, overrides), parameters(profile, notebooks, overrides)
    _say_who_ignores(overrides, bound)
    if profile == "paper":
        _say("Looking at GPU, disk and Hub before anything is spent ...")
        for problem in (problems := plan.check(plan.Paper(given))):
            _say(f"vrhlib: {problem}", sys.stderr)
        if problems:
            words = shlex.join(_words(profile, notebooks, overrides))
            _say(f"Nothing was run. What a run needs: ./run_all.sh plan {words}", sys.stderr)
            return 1
        if device := os.environ.get("VRHLIB_DEVICE", ""):
            _say(
                f"VRHLIB_DEVICE={device}."
                + " Hours become days, and weights (float32) take twice the memory." * (not device.startswith("cuda"))
            )
    seconds: dict[str, float] = {}
    errors: dict[str, str] = {}
    for position, notebook in enumerate(notebooks, 1):
        _say(f"[{position}/{len(notebooks)}] {notebook.name}: {notebook.title}")
        words = [f"{profile} profile", f"cost {notebook.cost(profile)}", *_as_words(bound[notebook.name])]
        _say("      " + ", ".join(words))
        began = time.perf_counter()
        try:
            error = execute(notebook, profile, bound[notebook.name])
        except KeyboardInterrupt:
            rest = [n for n in notebooks if n.name in errors or n.name not in seconds]
            _say(f"\nStopped in {notebook.name}. {_resume(profile, rest, overrides)}", sys.stderr)
            return 130
        seconds[notebook.name] = time.perf_counter() - began
        if error:
            errors[notebook.name] = error
        outcome = "FAILED" if error else "done"
        _say(f"      {outcome} after {seconds[notebook.name]:.0f} s{': ' + error if error else ''}\n")

    rows = [(n.name, f"{seconds[n.name]:.0f}", "FAILED" if n.name in errors else "ok") for n in notebooks]
    _say(plan.table(("notebook", "seconds", "status"), rows))
    _say(f"\nfigures: {_relative(store.figures_dir(profile))}/   executed notebooks: notebooks/rendered/{profile}/")
    if not errors:
        return 0
    failing = [notebook for notebook in notebooks if notebook.name in errors]
    first = failing[0]
    _say(f"\n{first.name} failed: {errors[first.name]}", sys.stderr)
    if first.failed(profile).exists():
        _say(f"As far as it came: {_relative(first.failed(profile))}", sys.stderr)
    _say(_resume(profile, failing, overrides), sys.stderr)
    return 1


def _say_who_ignores(overrides: dict[str, str], bound: dict[str, dict[str, object]]) -> None:
    for name in overrides:
        if ignoring := [notebook for notebook, values in bound.items() if name not in values]:
            _say(f"{name} is not a parameter of {', '.join(ignoring)}; it is passed to the others only.")


def _resume(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str]) -> str:
    return f"To resume: ./run_all.sh {shlex.join(_words(profile, notebooks, overrides))}   (finished samples are kept)"


def _words(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str]) -> list[str]:
    """A request as it is typed, without the parameters that none of these notebooks has."""
    known = {name for notebook in notebooks for name in notebook.parameters}
    return [profile, *(n.number for n in notebooks), *(f"{k}={text}" for k, text in overrides.items() if k in known)]


def overview(profile: str, notebooks: Sequence[Notebook], overrides: dict[str, str]) -> str:
    """What a run would do: cost, sequences, age of the executed copies, samples that need no recomputing; then what
    the embedded models can do, or what a paper run needs."""
    given, cached = parameters(profile, notebooks, overrides), _cached_runs(profile)
    measured = store.speeds(store.runs_dir(profile) / "speed.json")
    rows = []
    for n in notebooks:
        work, cost = plan.work_of(n.name, profile, given[n.name]), n.cost(profile)
        if profile == "paper":
            cost = "?" if work is None else f"{plan.hours(work, measured):.1f} GPU h"
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
    print(text, file=stream or sys.stdout, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vrhlib.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "plan"))
    parser.add_argument("--profile", choices=store.PROFILES, default="nano")
    parser.add_argument("--limit", metavar="N", help="at most N samples in every evaluation (N_TEST=N)")
    parser.add_argument("words", nargs="*", metavar="01 | NAME=VALUE", help="notebooks and parameters; all if none")
    options = parser.parse_intermixed_args(argv)
    try:
        overrides = limited(dict(word.split("=", 1) for word in options.words if "=" in word), options.limit)
        notebooks = select([word for word in options.words if "=" not in word])
        if options.command == "run":
            return run(options.profile, notebooks, overrides)
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
