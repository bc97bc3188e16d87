"""The ledger of reuse: of every run that was opened, whether its results were there already, and if not, why not.

Its file has one JSON object a line, written by any number of processes; `FIELDS` names what each line says.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vrhlib import jsonl

FIELDS = {"task": str, "model": str, "benchmark": str, "state": str, "had": int, "of": int, "why": str}
SHOWN = ("image_backend", "kernel", "dtype", "device", "batch_size")  # short enough to tell both values


def reuse(path: Path) -> list[dict]:
    """What a ledger says: one dict (see FIELDS) a run and process, in order. Lines that say anything else are left out.

    `state` is reused (complete), resumed (`had` of `of` samples) or new; `why` tells what keeps a new run from being
    an old one."""
    found = []
    with suppress(FileNotFoundError):
        for _, data in jsonl.scan(Path(path)):
            with suppress(ValueError):
                said = jsonl.plain(data or b"")
                if isinstance(said, dict) and {name: type(value) for name, value in said.items()} == FIELDS:
                    found.append(said)
    return found


def note(path: Path, **said: object) -> None:
    """Add one line. Raises OSError where that cannot be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, jsonl.line({name: said[name] for name in FIELDS}))  # at once: nobody holds this file
    finally:
        os.close(descriptor)


def brief(facts: Mapping, names: Sequence[str]) -> tuple[str, ...]:
    """Facts as JSON, long ones as its digest, equal ones shared: a folder can hold thousands of runs."""
    texts = [json.dumps(facts.get(name), sort_keys=True) for name in names]
    return tuple(sys.intern(t if len(t) < 1000 else f'"{hashlib.sha256(t.encode()).hexdigest()}"') for t in texts)


def why(names: Sequence[str], now: Sequence[str], known: Iterable[Sequence[str]]) -> str:
    """How a run differs from the nearest known one, both as `brief` gives them; of equally near ones the first."""
    differences = [list(_differences(names, before, now)) for before in known]
    if not differences:
        return "never run before"
    return ", ".join(min(differences, key=len)) or "its lines are gone"


def _differences(names: Sequence[str], before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    """`attention.py changed`, `torch 2.13.0 is 2.14.1 now`, `prompt changed`, `dtype float32 is bfloat16 now`, …"""
    for name, old, new in zip(names, map(json.loads, before), map(json.loads, now)):
        if old == new:
            continue
        word = name.replace("_", " ")
        if name in ("versions", "code") and isinstance(old, dict):
            changed = [part for part in sorted(old | new) if old.get(part) != new.get(part)]
            told = "{0} {1} is {2} now" if name == "versions" else "{0} changed"
            yield from (told.format(part, old.get(part), new.get(part)) for part in changed)
        elif name == "sample_set":
            yield "other samples"
        else:
            yield f"{word} {old} is {new} now" if name in SHOWN else f"{word} changed"
