"""Whether a notebook has to run again: what decided its outputs last time, and whether those are still there.

After a notebook ran whole, data/runs/<profile>/notebooks.json keeps digests of everything it depends on (its cells and
parameters, this library, the embedded models, the published numbers, versions, settings) and of everything it wrote.
The file is git-ignored: a fresh clone runs everything. A record that cannot be read as one is never trusted.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from vrhlib import store

Inputs = dict[str, dict[str, str]]  # "files", "parameters", …: name to digest or value

_FORMAT = 1
_LIBRARY = (".py", ".js", ".css", ".html")
_DRAWING = ("matplotlib", "seaborn", "pandas", "scipy", "statsmodels", "trl", "peft", "datasets", "ipywidgets")
# Not the cluster: who computes a reply doesn't decide it.
_SETTINGS = ("VRHLIB_DEVICE", "VRHLIB_STRICT", "VRHLIB_ALLOW_DRIFT")


def record_file(profile: str) -> Path:
    return store.runs_dir(profile) / "notebooks.json"


def shared(profile: str) -> Inputs:
    """What all notebooks of a profile depend on. It reads the 40 MB of the embedded models, a tenth of a second."""
    package = Path(__file__).parent
    files = {f"vrhlib/{_inside(path, package)}": path for path in _files(package) if path.suffix in _LIBRARY}
    for folder in ("data/nano", "data/paper"):
        files |= {f"{folder}/{_inside(path, store.ROOT / folder)}": path for path in _files(store.ROOT / folder)}
    digests = {name: store.file_digest(path) for name, path in files.items()}
    if profile == "paper":
        digests |= _local()
    versions = store.versions() | {name: version for name in _DRAWING if (version := _version(name))}
    settings = {name: os.environ.get(name, "") for name in _SETTINGS}
    return {
        "files": digests,
        "versions": versions | {"python": platform.python_version()},
        "settings": {name: value for name, value in settings.items() if value not in ("", "0")},
    }


def inputs(shared: Inputs, code: Sequence[str], prose: Sequence[str], parameters: dict[str, object]) -> Inputs:
    """Everything that decides what one notebook writes; prose too, since the executed copy shows it."""
    own = {"code": store.digest(list(code)), "prose": store.digest(list(prose))}
    return shared | {"cells": own, "parameters": {name: repr(value) for name, value in parameters.items()}}


def _local() -> dict[str, str]:
    """Models and benchmarks put in place by hand, by size and time: gigabytes are not read to decide whether to run."""
    folder = store.ROOT / "data" / "local"
    listed = [(str(_inside(p, folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in _files(folder)]
    table = store.ROOT / "data" / "hub.json"
    return {"data/local": store.digest(listed)} | (
        {"data/hub.json": store.file_digest(table)} if table.exists() else {}
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".lock"))


def _inside(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# ---- outputs


def outputs(profile: str, notebook: str, rendered: Path, since: str) -> dict[str, str]:
    """Digest of each file that a notebook wrote since a time like 2026-01-02T03:04:05Z: its executed copy, figures and
    head lists (their manifests name it), and its rows of claims.csv, a file that all notebooks share."""
    paths = [rendered]
    for folder in (store.figures_dir(profile), store.heads_dir(profile)):
        for path in sorted(folder.rglob("*.json")):
            about = _manifest(path)
            if about.get("notebook") == notebook and str(about.get("written", "")) >= since:
                paths += [p for p in sorted(path.parent.iterdir()) if p.stem == path.stem and p.is_file()]
    found = {_inside(path, store.ROOT): store.file_digest(path) for path in dict.fromkeys(paths)}
    if rows := _claims(profile, notebook):
        found[_claims_file(profile)] = store.digest(rows)
    return found


def _manifest(path: Path) -> dict:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        about = about.get("manifest", about)
        return about if isinstance(about, dict) else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _claims_file(profile: str) -> str:
    return _inside(store.figures_dir(profile) / "claims.csv", store.ROOT)


def _claims(profile: str, notebook: str) -> list[list[str]]:
    try:
        with (store.ROOT / _claims_file(profile)).open(newline="", encoding="utf-8") as file:
            return [list(row.values()) for row in csv.DictReader(file, restval="") if row.get("notebook") == notebook]
    except (OSError, ValueError, csv.Error):
        return []


def _lost(profile: str, notebook: str, recorded: dict[str, str]) -> list[str]:
    """Recorded outputs that are missing or were changed, in words."""

    def now(name: str) -> str:
        if name == _claims_file(profile):
            return store.digest(_claims(profile, notebook))
        try:
            return store.file_digest(store.ROOT / name)
        except OSError:
            return ""

    return [f"{name} is missing or was changed" for name, digest in recorded.items() if now(name) != digest]


# ---- the record


def remember(profile: str, notebook: str, inputs: Inputs, outputs: dict[str, str]) -> None:
    """A notebook ran whole just now, on these inputs."""
    finished = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    _change(profile, lambda records: records | {notebook: _record(finished, inputs, outputs)})


def forget(profile: str, notebook: str) -> None:
    """A notebook is about to run: until it has run whole, its outputs are those of nothing in particular."""
    if record_file(profile).exists():
        _change(profile, lambda records: {name: record for name, record in records.items() if name != notebook})


def _record(finished: str, inputs: Inputs, outputs: dict[str, str]) -> dict:
    return {"finished": finished, "inputs": inputs, "outputs": outputs}


def _change(profile: str, change) -> None:
    path = record_file(profile)
    with store.held(path):  # runners may share the folder
        records = change(recorded(profile)[0])
        store.write_atomic(path, json.dumps({"format": _FORMAT, "notebooks": records}, indent=1) + "\n")


def recorded(profile: str) -> tuple[dict[str, dict], str]:
    """Notebook name to its record, and what is wrong with the file if it is not one of ours ("" if nothing is)."""
    path = record_file(profile)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}, not {_FORMAT}")
        for name, record in content["notebooks"].items():
            _check(profile, name, record)
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return {}, f"{_inside(path, store.ROOT)} is no record of finished notebooks ({reason}); it is ignored."
    return content["notebooks"], ""


def _check(profile: str, name: str, record: dict) -> None:
    """Raise unless a record is of the shape written here and speaks of nothing but this profile's outputs."""
    texts = [record["finished"], *record["outputs"], *record["outputs"].values()]
    for group in ("files", "versions", "settings", "cells", "parameters"):
        texts += [*record["inputs"][group], *record["inputs"][group].values()]
    if not all(isinstance(text, str) for text in texts) or not record["outputs"]:
        raise ValueError(f"the entry {name!r}")
    folders = (store.figures_dir(profile), store.heads_dir(profile), store.ROOT / "notebooks" / "rendered" / profile)
    for output in record["outputs"]:
        if ".." in Path(output).parts or not any((store.ROOT / output).is_relative_to(folder) for folder in folders):
            raise ValueError(f"the entry {name!r} names {output!r} as an output")


def changes(profile: str, notebook: str, record: dict | None, inputs: Inputs) -> str:
    """What makes a recorded notebook out of date, in one line; "" if nothing does."""
    if record is None:
        return "never ran here"
    before = record["inputs"]
    found = [f"its {part} changed" for part in _differing(before["cells"], inputs["cells"])]
    for group, sign in (("parameters", "="), ("settings", "="), ("versions", " ")):
        old, new = before[group], inputs[group]
        found += [f"{name}{sign}{new.get(name, 'unset')} was {old.get(name, 'unset')}" for name in _differing(old, new)]
    old, new = before["files"], inputs["files"]
    for name in _differing(old, new):
        found.append(f"{name} {'is new' if name not in old else 'is gone' if name not in new else 'changed'}")
    found += _lost(profile, notebook, record["outputs"])
    return listed(found)


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return [name for name in {**new, **old} if old.get(name) != new.get(name)]


def listed(words: Iterable[str], most: int = 3) -> str:
    """The first few, joined, and how many more there are."""
    words = list(words)
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
