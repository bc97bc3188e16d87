"""Files of one JSON object a line that nobody vouches for: what can be read of them, and where the rest lies.

A line may be cut, doubled, overwritten or not ours at all. Reading never fails over a line's content: a line is a
record that was written whole, or it is bad, with a reason, and its place in the file lets it be set aside.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LIMIT = 64 * 2**20  # bytes of one line; more than this is read past in pieces, never into memory as a whole
_DIGITS = 20  # of an integer: 64 bits, and nothing that overflows a float
_DEPTH = 100  # of lists in lists: whoever walks through a value has stack enough left


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:20]} is not finite")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def plain(data: bytes) -> object:
    """The value of UTF-8 JSON. Raises ValueError, and no other error, for anything else, NaN and Infinity included."""
    if len(data) > LIMIT:
        raise ValueError(f"more than {LIMIT} bytes")
    try:
        value = json.loads(data.decode(), parse_constant=_number, parse_float=_number, parse_int=_integer)
        if data.count(b"[") + data.count(b"{") > _DEPTH and _deep(value):
            raise RecursionError
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _deep(value: object) -> bool:
    level = [value]
    for _ in range(_DEPTH + 1):
        level = [
            part for v in level if isinstance(v, dict | list) for part in (v.values() if isinstance(v, dict) else v)
        ]
    return bool(level)


def line(value: object) -> bytes:
    """A value as one line. Raises ValueError or TypeError for what JSON cannot hold."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def record(data: bytes) -> tuple[str, dict]:
    """Sample id and record of one stored line. Raises ValueError for anything else."""
    value = plain(data)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if not isinstance(key := value.pop("id", None), str):
        raise ValueError("no sample id" if key is None else "a sample id that is no text")
    return key, value


class Line(NamedTuple):
    """A place in a file; `start` and `end` in bytes, the newline included."""

    number: int
    start: int
    end: int


@dataclass
class Lines:
    """What a file holds: records by sample id, bad lines with reasons, and where its last whole line ends (bytes)."""

    records: dict[str, dict] = field(default_factory=dict)
    bad: dict[Line, str] = field(default_factory=dict)
    again: set[Line] = field(default_factory=set)  # those of the bad that only repeat a record
    end: int = 0


def scan(path: Path) -> Iterator[tuple[Line, bytes | None]]:
    """Each line with its bytes, None if it is longer than LIMIT. What follows the last newline is no line."""
    with path.open("rb") as file:
        number = start = 0
        while data := file.readline(LIMIT + 1):
            end, piece = start + len(data), data
            while not piece.endswith(b"\n") and (piece := file.readline(LIMIT)):
                data, end = None, end + len(piece)
            if not piece:
                return
            number += 1
            yield Line(number, start, end), data
            start = end


def read(path: Path) -> Lines:
    """All of a file of records; nothing if there is no file.

    Of a repeated sample id the repeat is bad; if the two records differ, nobody knows which is right, and all are.
    """
    lines, first, disputed = Lines(), {}, {}
    try:
        for at, data in scan(path):
            lines.end = at.end
            try:
                if data is None:
                    raise ValueError(f"longer than {LIMIT} bytes")
                key, value = record(data)
            except ValueError as error:
                lines.bad[at] = str(error)
                continue
            if key in disputed:
                lines.bad[at] = f"sample {key[:40]!a} again, see line {disputed[key].number}"
            elif key not in first:
                lines.records[key], first[key] = value, at
            elif _same(lines.records[key], value):
                lines.bad[at] = f"sample {key[:40]!a} again, as in line {first[key].number}"
                lines.again.add(at)
            else:
                del lines.records[key]
                disputed[key] = first[key]
                lines.bad[first[key]] = f"sample {key[:40]!a}, another than in line {at.number}"
                lines.bad[at] = f"sample {key[:40]!a}, another than in line {first[key].number}"
    except FileNotFoundError:
        return Lines()
    lines.bad = dict(sorted(lines.bad.items()))
    return lines


def _same(one: dict, other: dict) -> bool:
    """Equal as JSON: 1, 1.0 and true are three things."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def pieces(path: Path, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes from each start to each end, at most a MiB at a time."""
    with path.open("rb") as file:
        for start, end in places:
            file.seek(start)
            while start < end and (piece := file.read(min(2**20, end - start))):
                start += len(piece)
                yield piece


class HalfLine(OSError):
    """A line could not be written whole, nor cut off again: the file should be `size` bytes long."""

    def __init__(self, error: OSError, size: int):
        super().__init__(*error.args)
        self.size = size


def append(path: Path, data: bytes, size: int | None = None) -> None:
    """All of a line at the end of a file (cut to `size` bytes before, if that is given), or nothing of it.

    Raises OSError if that fails, HalfLine if part of the line had to stay.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        before = os.fstat(descriptor).st_size if size is None else size
        try:
            if size is not None:
                os.ftruncate(descriptor, size)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except BaseException as error:
            try:
                os.ftruncate(descriptor, before)
            except OSError:
                raise HalfLine(error if isinstance(error, OSError) else OSError(str(error)), before) from error
            raise
    finally:
        os.close(descriptor)
