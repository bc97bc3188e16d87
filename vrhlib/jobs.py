"""Work in processes of its own: heard line by line, ended with all they started, gone if we are.

A kernel is a session of its own, and what it starts may outlive it. So each job is marked: VRHLIB_LEDGER in its
environment names a file of its own, and whatever carries that name belongs to it. The store writes to that file which
results it found again (`reuse` reads it).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

from vrhlib import ledger

MARK = "VRHLIB_LEDGER"
_KILLS_OF_MEMORY = {signal.SIGKILL, signal.SIGABRT, signal.SIGBUS}


class Job:
    """A process with a folder of its own for its ledger and its report; it puts itself into `ended` when it has."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        tell: Callable[[str, TextIO], None],
        ended: SimpleQueue[Job],
    ):
        self.ledger, self.report = folder / "ledger.jsonl", folder / "report.json"
        self.tell, self.last, self.began, self.seconds = tell, "", time.perf_counter(), 0.0
        self.process = subprocess.Popen(
            [*command, "--report", str(self.report)],
            env={**environment, MARK: str(self.ledger)},
            stdin=subprocess.PIPE,  # it ends when this closes, however we end: see `end_with_parent`
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is ours to pass on, once, in order
        )
        streams = ((self.process.stdout, sys.stdout, True), (self.process.stderr, sys.stderr, False))
        readers = [threading.Thread(target=self._pass_on, args=stream, daemon=True) for stream in streams]
        for thread in (*readers, threading.Thread(target=self._wait, args=(readers, ended), daemon=True)):
            thread.start()

    def _pass_on(self, source: TextIO, target: TextIO, progress: bool) -> None:
        for line in source:
            if line := line.rstrip():
                self.last = line if progress else self.last
                try:
                    self.tell(line, target)
                except (OSError, ValueError):
                    pass  # nobody reads us any more; the job must not block because of that

    def _wait(self, readers: Collection[threading.Thread], ended: SimpleQueue[Job]) -> None:
        self.process.wait()
        end([self], grace=2)  # a kernel that was killed leaves its workers behind, and they hold our pipes open
        for thread in readers:
            thread.join(timeout=5)
        self.seconds = time.perf_counter() - self.began
        ended.put(self)

    def error(self) -> str | None:
        """What went wrong, in one line; None if nothing did. A death is told with the last line before it."""
        try:
            report = json.loads(self.report.read_text(encoding="utf-8"))
            error, died = report["error"], report["died"]
        except (OSError, ValueError, KeyError, TypeError):  # it could not even say so
            error, died = f"its process {how_it_ended(self.process.returncode)}", True
        return f"{error}; the last it said: {self.last or 'nothing'}" if died else error


def how_it_ended(code: int | None) -> str:
    """A process's return code in words."""
    if code is None:
        return "ended, nobody knows how (often: out of memory)"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"was ended by signal {-code}"
    return f"was ended by {name.name}{' (often: out of memory)' * (name in _KILLS_OF_MEMORY)}"


def end(jobs: Sequence[Job], grace: float) -> None:
    """End all that these jobs started: SIGINT, so that a cell can still say how far it came; SIGKILL after `grace`
    seconds. Returns when none is left."""
    _end({str(job.ledger) for job in jobs}, grace)


def _end(marks: set[str], grace: float) -> None:
    for process in (left := _marked(marks)):
        _send(process, signal.SIGINT)
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = _marked(marks)
    deadline += 5
    while left and time.monotonic() < deadline:  # one that is killed may have started another just before
        for process in left:
            _send(process, signal.SIGKILL)
        time.sleep(0.05)
        left = _marked(marks)


def _marked(marks: set[str]) -> list:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) in marks:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, or another user's
    return found


def _send(process, number: int) -> None:
    import psutil

    try:
        process.send_signal(number)
    except (psutil.Error, OSError):
        pass


def end_with_parent() -> None:
    """In a job: when the process that started it is gone, however it went, end all of this job and then itself."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        _end({os.environ[MARK]}, grace=0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- the ledger


def reuse(path: Path, most: int = 4) -> str:
    """How many stored runs were found again, which were not, and why; one line, "" where none was opened."""
    try:
        lines = [line for line in ledger.reuse(path) if line["state"] in ("reused", "resumed", "new")]
    except OSError:
        lines = []
    if not lines:
        return ""
    states = Counter(line["state"] for line in lines)
    told = f"stored results: {_runs(states['reused'])} reused, {states['resumed']} resumed, {states['new']} new"
    rest = [line for line in lines if line["state"] != "reused"]
    reasons = Counter(" ".join(line["why"].split()) for line in rest if line["why"])
    cells = Counter(f"{line['model']} on {line['benchmark']}" for line in rest)
    told += f" ({_most(reasons, most, 'reason')})" * bool(reasons)
    return told + f"; not reused: {_most(cells, most, 'set')}" * bool(cells)


def _most(counts: Counter, most: int, what: str) -> str:
    told = [f"{count}: {name}" for name, count in counts.most_common(most)]
    more = len(counts) - len(told)
    return "; ".join(told + [f"... and {more} more {what}{'s' * (more != 1)}"] * (more > 0))


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"
