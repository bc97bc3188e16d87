"""What a folder of runs survives: kills, garbage, other hands, a full disk, no right to write, several processes."""

import dataclasses
import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from contextlib import nullcontext

import filelock
import pytest

from tests.test_store import REPOSITORY, RUN, finished, found
from vrhlib import jsonl, store

PREAMBLE = f"""
import os, sys, time
from pathlib import Path
from vrhlib import store
from vrhlib.store import Run
RUN = {RUN!r}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """data/runs/nano of a root of its own; every notice is said anew."""
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(store, "_SAID", set())
    path = tmp_path / "data/runs/nano"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def path(folder):
    return folder / f"{RUN.digest}.jsonl"


def aside(path):
    return path.with_name(f"{path.name}.bad")


def records(run=RUN):
    with store.open_run(run, "nano") as results:
        return dict(results.records)


def python(root, code, *words, **more):
    environment = os.environ | {"VRHLIB_ROOT": str(root), "PYTHONPATH": str(REPOSITORY)} | more
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, *map(str, words)],
        env=environment, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def said_by(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


# ---------------------------------------------------------------- lines

BAD = {
    "NaN": (b'{"id": "b", "x": NaN}', "not finite"),
    "infinity": (b'{"id": "b", "x": -Infinity}', "not finite"),
    "a number beyond floats": (b'{"id": "b", "x": 1e999}', "not finite"),
    "nested beyond recursion": (b'{"id": "b", "x": ' + b"[" * 99999 + b"]" * 99999 + b"}", "nested"),
    "nested too deeply to walk through": (b'{"id": "b", "batch": ' + b"[" * 900 + b"]" * 900 + b"}", "nested"),
    "an integer beyond Python's digits": (b'{"id": "b", "x": ' + b"7" * 9999 + b"}", "9999 digits"),
    "an integer beyond floats": (b'{"id": "b", "x": ' + b"7" * 400 + b"}", "400 digits"),
    "UTF-16": ('{"id": "b"}'.encode("utf-16"), "UTF-8"),
    "a byte of no encoding": (b'{"id": "b", "x": "\xe9"}', "UTF-8 at byte 19"),
    "a surrogate in UTF-8": (b'{"id": "b", "x": "\xed\xa0\x80"}', "UTF-8"),
    "a byte-order mark": (b'\xef\xbb\xbf{"id": "b"}', "no JSON"),
    "two records in a line": (b'{"id": "b"}{"id": "c"}', "no JSON"),
    "half a record and a whole one": (b'{"id": "b", "x{"id": "c"}', "no JSON"),
    "a number as id": (b'{"id": 7}', "no text"),
    "true as id": (b'{"id": true}', "no text"),
    "no id": (b'{"x": 1}', "no sample id"),
    "a list": (b'[{"id": "b"}]', "no JSON object"),
    "terminal codes": (b'{"id": "b" \x1b[2J}', "no JSON"),
}


@pytest.mark.parametrize(("line", "why"), BAD.values(), ids=BAD)
def test_a_bad_line_costs_its_sample_and_nothing_else(path, capsys, line, why):
    path.write_bytes(b'{"id": "a", "x": 1}\n' + line + b'\n{"id": "c"}\n')
    with store.open_run(RUN, "nano") as results:
        assert results.records == {"a": {"x": 1}, "c": {}}
        results.add("b", {"x": 2})
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{path}: line 2 (") and why in said and aside(path).name in said and said.isprintable()
    assert aside(path).read_bytes() == line + b"\n"
    assert records() == {"a": {"x": 1}, "b": {"x": 2}, "c": {}} and found() == [RUN.digest]


def test_what_could_not_be_read_back_is_not_written(path, monkeypatch):
    monkeypatch.setattr(jsonl, "LIMIT", 1000)
    with store.open_run(RUN, "nano") as results:
        deep = json.loads("[" * 200 + "]" * 200)
        for value in (10**30, float("inf"), "x" * 1000, deep):
            with pytest.raises(ValueError):
                results.add("a", {"x": value})
        assert not path.exists() and "a" not in results
        results.add("a", {"x": 10**18, "flat": [[]] * 200})
    assert records() == {"a": {"x": 10**18, "flat": [[]] * 200}}


@pytest.mark.parametrize(("depth", "fits"), [(90, True), (110, False)])
def test_what_nests_too_deeply_is_neither_written_nor_read(path, depth, fits):
    value = json.loads("[" * depth + "]" * depth)
    path.write_text(json.dumps({"id": "a", "x": value}) + "\n")
    assert records() == ({"a": {"x": value}} if fits else {})
    with store.open_run(dataclasses.replace(RUN, model="other"), "nano") as results:
        with nullcontext() if fits else pytest.raises(ValueError, match="nested"):
            results.add("a", {"x": value})


def test_a_line_of_any_length_is_never_held_in_memory(path, monkeypatch, capsys):
    monkeypatch.setattr(jsonl, "LIMIT", 2**16)
    long = b'{"id": "b", "x": "' + b"x" * 2**25 + b'"}\n'
    path.write_bytes(b'{"id": "a"}\n' + long + b'{"id": "c"}\n' + long[:-1])
    tracemalloc.start()
    assert records() == {"a": {}, "c": {}}
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**23, "a quarter of that line"
    assert aside(path).read_bytes() == long and path.read_bytes() == b'{"id": "a"}\n{"id": "c"}\n'
    assert "line 2 (longer than 65536 bytes)" in capsys.readouterr().out


@pytest.mark.parametrize("length", [99, 100, 101])
def test_the_longest_line_that_is_read_is_the_longest_that_is_written(path, monkeypatch, length):
    monkeypatch.setattr(jsonl, "LIMIT", 100)
    line = b'{"id": "a", "x": "' + b"x" * (length - 21) + b'"}\n'
    assert len(line) == length
    path.write_bytes(line)
    assert ("a" in records()) is (length <= 100)
    with store.open_run(dataclasses.replace(RUN, model="other"), "nano") as results:
        try:
            results.add("a", {"x": "x" * (length - 21)})
        except ValueError:
            assert length > 100
        else:
            assert length <= 100


def test_an_equal_repeat_is_dropped_and_named(path, capsys):
    path.write_bytes(b'{"id": "a", "x": 1, "y": 2}\n{"id": "b"}\n{"y": 2, "x": 1, "id": "a"}\n')
    assert records() == {"a": {"x": 1, "y": 2}, "b": {}}
    said = capsys.readouterr().out
    assert "line 3 (sample 'a' again, as in line 1)" in said and said.count("\n") == 1
    assert path.read_bytes() == b'{"id": "a", "x": 1, "y": 2}\n{"id": "b"}\n' and not aside(path).exists()


@pytest.mark.parametrize("other", [b'{"id": "a", "x": 2}', b'{"id": "a", "x": true}', b'{"id": "a", "x": 1.0}'])
def test_of_two_records_of_a_sample_none_is_believed(path, capsys, other):
    first, again = b'{"id": "a", "x": 1}\n', b'{"id": "a", "x": 1}\n'
    path.write_bytes(first + b'{"id": "b"}\n' + other + b"\n" + again)
    assert records() == {"b": {}}
    said = capsys.readouterr().out
    assert "line 1 (sample 'a', another than in line 3), line 3 (sample 'a', another than in line 1), line 4" in said
    assert aside(path).read_bytes() == first + other + b"\n" + again and path.read_bytes() == b'{"id": "b"}\n'


def test_bad_lines_of_several_times_are_all_kept(path, capsys):
    for number in range(3):
        path.write_bytes(b'{"id": "a"}\n' + b"bad %d\n" % number * 8)
        assert records() == {"a": {}}
        assert "and 3 more lines" in capsys.readouterr().out
    assert aside(path).read_bytes() == b"".join(b"bad %d\n" % number * 8 for number in range(3))


def test_a_kill_while_bad_lines_are_moved_loses_nothing(path, monkeypatch):
    content = b'{"id": "a"}\nbad\n{"id": "b"}\n'
    path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomic", lambda *_: os.kill(0, 0) or (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            records()
    assert path.read_bytes() == content and aside(path).read_bytes() == b"bad\n"
    assert records() == {"a": {}, "b": {}} and aside(path).read_bytes() == b"bad\nbad\n"


def test_reading_only_names_bad_lines_once_and_writes_nothing(path, folder, capsys):
    finished(RUN, x=1)
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"b'))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert found() == found() == []
    assert capsys.readouterr().out.count("line 2") == 1
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


# ---------------------------------------------------------------- manifests

WRONG = {
    "half": lambda m: json.dumps(m)[:40],
    "empty": lambda m: "",
    "a list": lambda m: "[]",
    "a number": lambda m: "7",
    "not text": lambda m: b"\xff\xfe\x00",
    "nested beyond recursion": lambda m: "[" * 99999,
    "nested": lambda m: json.dumps(m | {"condition": 0}).replace(
        '"condition": 0', f'"condition": {"[" * 900 + "]" * 900}'
    ),
    "foreign": lambda m: '{"name": "package.json"}',
    "samples as text": lambda m: json.dumps(m | {"samples": "3"}),
    "samples true": lambda m: json.dumps(m | {"samples": True}),
    "complete 1": lambda m: json.dumps(m | {"complete": 1}),
    "seconds null": lambda m: json.dumps(m | {"seconds": None}),
    "seconds NaN": lambda m: json.dumps(m | {"seconds": float("nan")}),
    "a version as text": lambda m: json.dumps(m | {"store": "1"}),
    "a version true": lambda m: json.dumps(m | {"store": True}),
    "of another run": lambda m: json.dumps(m | {"digest": "0" * 16}),
    "a path": lambda m: json.dumps(m | {"digest": "../../../etc/passwd"}),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_a_manifest_that_cannot_be_used_is_named_and_written_anew(path, folder, capsys, spoil):
    finished(RUN, x=1)
    manifest = path.with_suffix(".json")
    good = json.loads(manifest.read_text())
    spoilt = spoil(good)
    manifest.write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    assert found() == []
    assert capsys.readouterr().out.count(f"{manifest} is no manifest") == 1
    assert records() == {name: {"x": 1} for name in "abc"}
    mended = json.loads(manifest.read_text())
    assert {k: mended[k] for k in ("store", "digest", "samples", "complete", "model")} == {
        "store": 1, "digest": RUN.digest, "samples": 3, "complete": True, "model": "toy"
    }  # fmt: skip
    assert found() == [RUN.digest]


def test_lines_without_a_manifest_are_used_and_get_one(path, capsys):
    finished(RUN, x=1)
    path.with_suffix(".json").unlink()
    assert found() == [] and records() == {name: {"x": 1} for name in "abc"} and found() == [RUN.digest]
    assert capsys.readouterr().out == "", "a kill before the first manifest is nothing to report"


def test_a_newer_format_is_refused_and_left_alone(path, folder, capsys):
    finished(RUN, x=1)
    other = finished(dataclasses.replace(RUN, model="other"))
    manifest = path.with_suffix(".json")
    manifest.write_text(json.dumps({"store": 2, "samples": "in another place"}))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(store.NewerStore, match=rf"{RUN.digest}\.json is of format 2.* up to 1\. Update .*move"):
        records()
    assert found() == found() == [other.digest]
    assert capsys.readouterr().out.count("is of format 2") == 1
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_manifest_names_the_digest_of_every_file_of_code(path):
    finished(RUN)
    code = json.loads(path.with_suffix(".json").read_text())["code"]
    assert {"boxes.py", "attention.py", "vlm.py", "real.py"} <= set(code)
    assert code["boxes.py"] == store.file_digest(REPOSITORY / "vrhlib/boxes.py")


def test_files_that_are_not_ours_are_named_once_and_passed_over(folder, capsys):
    finished(RUN)
    for name in ("0123456789abcdef.jsonl.bad", "speed.json", "speed.lock", "notebooks.json", "notebooks.json.lock",
                 ".x.json.0071beef.tmp"):  # fmt: skip
        (folder / name).write_text("{}")
    (folder / "features").mkdir()
    (folder / "policies").mkdir()
    assert found() == [RUN.digest] and capsys.readouterr().out == ""
    for name in ("notes.txt", "0123456789ABCDEF.jsonl", "0123456789abcde.jsonl", "copy of x.jsonl", "\x1b[2J.json",
                 "0123456789abcdef.jsonl~"):  # fmt: skip
        (folder / name).write_text("{}")
    assert found() == found() == [RUN.digest]
    (said,) = capsys.readouterr().out.splitlines()
    assert "'copy of x.jsonl' and 1 more" in said and said.isprintable()


# ---------------------------------------------------------------- a full disk, and no right to write


def full(monkeypatch, room, cut=True):
    """The disk takes `room` more bytes; with `cut` false files cannot be shortened either."""
    left, write, shorten = [room], os.write, os.ftruncate

    def limited(descriptor, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(descriptor, data[: left[0]])
        left[0] -= done
        return done

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr(os, "ftruncate", shorten if cut else fail)


@pytest.mark.parametrize("room", [0, 1, 10])
def test_a_full_disk_costs_only_the_line_that_did_not_fit(path, monkeypatch, room):
    with pytest.raises(OSError, match="No space left.*Free some space.*VRHLIB_ROOT.*kept.*same command") as error:
        with store.open_run(RUN, "nano") as results:
            results.add("a", {"x": 1})
            with monkeypatch.context() as patch:
                full(patch, room)
                results.add("b", {"x": 2})
    assert error.value.errno == errno.ENOSPC and "b" not in results
    assert path.read_bytes() == b'{"id": "a", "x": 1}\n'
    with store.open_run(RUN, "nano") as results:
        assert results.records == {"a": {"x": 1}}
        results.add("b", {"x": 2})
    assert list(records()) == ["a", "b"]


def test_a_manifest_that_cannot_be_written_matters_only_to_what_is_new(path, monkeypatch):
    finished(RUN)
    path.with_suffix(".json").unlink()

    def refuse(where, _):
        raise OSError(f"{where} has no room")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomic", refuse)
        assert list(records()) == ["a", "b", "c"]
        other = dataclasses.replace(RUN, model="other")
        with pytest.raises(OSError, match="has no room"):
            finished(other)
        full(patch, 0)
        with pytest.raises(OSError, match="No space left"):  # the first error, and not that of the manifest
            finished(dataclasses.replace(RUN, model="third"))
    assert list(records(other)) == ["a", "b", "c"] and found() == [other.digest]


def test_half_a_line_that_cannot_be_cut_off_is_cut_by_whoever_writes_or_reads_next(path, monkeypatch):
    with store.open_run(RUN, "nano") as results:
        results.add("a", {})
        for _ in range(2):
            with monkeypatch.context() as patch:
                full(patch, 4, cut=False)
                with pytest.raises(OSError, match="Cannot write"):
                    results.add("b", {})
            assert path.read_bytes() == b'{"id": "a"}\n{"id'
        results.add("b", {})  # there is space again
        assert path.read_bytes() == b'{"id": "a"}\n{"id": "b"}\n'
        with monkeypatch.context() as patch:
            full(patch, 4, cut=False)
            with pytest.raises(OSError):
                results.add("c", {})
    assert records() == {"a": {}, "b": {}} and path.read_bytes() == b'{"id": "a"}\n{"id": "b"}\n'


def test_a_file_that_may_not_grow_is_as_good_as_a_full_disk(tmp_path):
    code = (
        "import resource\n"
        "with store.open_run(RUN, 'nano') as results:\n"
        "    if sys.argv[1] == 'full': resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "    for name in 'abc':\n"
        "        if name not in results: results.add(name, {'x': name * 30_000}); print(name)\n"
    )
    process = python(tmp_path, code, "full")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "a\n"
    last = err.strip().splitlines()[-1]
    assert last.startswith("OSError: Cannot write") and "Free some space" in last and "kept" in last
    assert said_by(python(tmp_path, code, "free")) == "b\nc\n"


READ_ONLY = """
import filelock, errno
def refuse(event, values):
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    if event == "open" and str(values[0]).startswith(os.getcwd()) and values[2] & writes or event in (
        "os.mkdir", "os.rename", "os.remove", "os.truncate", "os.chmod"
    ):
        raise OSError(errno.EROFS, "Read-only file system", str(values[0]))
sys.addaudithook(refuse)
with store.open_run(RUN, "nano") as results:
    print(sorted(results.records))
print([r.path.name for r, _ in store.stored("nano", model="toy")])
"""


def contents(folder):
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


@pytest.mark.parametrize("without", [(), (".lock",), (".lock", ".json")])
def test_a_complete_run_is_read_from_where_nothing_can_be_written(path, folder, without):
    finished(RUN)
    for suffix in without:
        path.with_suffix(suffix).unlink()
    before = contents(folder)
    told = [] if ".json" in without else [path.name]
    assert said_by(python(store.ROOT, READ_ONLY)) == f"['a', 'b', 'c']\n{told}\n"
    assert contents(folder) == before


def test_a_complete_run_with_half_a_line_behind_it_is_read_from_where_nothing_can_be_written(path, folder):
    finished(RUN)
    path.write_bytes(path.read_bytes() + b'{"id": "d"')
    before = contents(folder)
    assert said_by(python(store.ROOT, READ_ONLY)).startswith("['a', 'b', 'c']\n")
    assert contents(folder) == before


@pytest.mark.parametrize("garbage", [b"", b"nonsense\n"])
def test_an_unfinished_run_where_nothing_can_be_written_is_an_error_with_the_next_step(path, folder, garbage):
    finished(RUN, "ab")
    path.write_bytes(path.read_bytes() + garbage)
    before = contents(folder)
    process = python(store.ROOT, READ_ONLY)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "OSError: Cannot write" in err and "VRHLIB_ROOT" in err.splitlines()[-1]
    assert contents(folder) == before


def test_a_complete_run_takes_no_lock(path, folder):
    finished(RUN)
    path.with_suffix(".lock").unlink()
    with store.open_run(RUN, "nano") as one, store.open_run(RUN, "nano") as other:
        assert len(one) == len(other) == 3
        with pytest.raises(ValueError, match="complete without 'd'"):
            one.add("d", {})
    assert not path.with_suffix(".lock").exists() and "d" not in records()


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_said_plainly(path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"cannot lock files.*VRHLIB_ROOT.*local disk"):
        records()


def test_a_system_without_locks_is_said_plainly(path, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(OSError, match=r"cannot lock files \(no locks here\).*local disk"):
        records()


def test_whoever_waits_says_so_once_and_then_goes_on(path, monkeypatch, capsys):
    monkeypatch.setattr(store, "_PATIENCE", 0.05)
    holder = python(
        store.ROOT, "with store.open_run(RUN, 'nano') as r:\n    print('held', flush=True); input(); r.add('a', {})"
    )
    assert holder.stdout.readline() == "held\n"
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(records()), daemon=True)
    waiting.start()
    said = ""
    while "waiting" not in said:
        time.sleep(0.01)
        said += capsys.readouterr().out
        assert waiting.is_alive()
    assert said == f"waiting for another process that computes {path.name}\n"
    holder.communicate("\n", timeout=60)
    waiting.join(60)
    assert seen == [{"a": {}}] and capsys.readouterr().out == ""


def test_speeds_of_several_processes_add_up(tmp_path):
    code = (
        "meter = store.Meter('nano', sys.argv[1], 'cpu')\n"
        "print('ready', flush=True); input()\n"
        "for _ in range(40): meter.add(1, 2); meter.close()\n"
    )
    processes = [python(tmp_path, code, name) for name in ("toy", "toy", "other")]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        said_by(process)
    speeds = store.speeds(tmp_path / "data/runs/nano/speed.json")
    assert {name: counts[:2] for name, counts in speeds.items()} == {"toy on cpu": [80, 160], "other on cpu": [40, 80]}


MANY = """
import dataclasses
names, budget = tuple(f"s{i}" for i in range(24)), int(sys.argv[2])  # samples until this process waits for its end
runs = [dataclasses.replace(RUN, model=f"toy {m}", samples=names) for m in range(4)]
computed = os.open("computed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for run in runs if sys.argv[1] == "0" else runs[::-1]:
    with store.open_run(run, "nano") as results:
        for name in names:
            if name not in results:
                if not budget:
                    time.sleep(1000)
                budget -= 1
                os.write(computed, f"{run.model}\\n".encode())
                results.add(name, {"x": run.model + "x" * 500})
"""


def test_two_processes_on_one_folder_and_kills_among_them_double_and_lose_nothing(tmp_path):
    rng, kills, computed = random.Random(7), 0, tmp_path / "computed"
    computed.touch()
    for _ in range(6):
        before, wanted = computed.stat().st_size, rng.randrange(1, 7) * len("toy 0\n")
        pair = [python(tmp_path, MANY, which, 6) for which in rng.sample((0, 1), 2)]
        while computed.stat().st_size < before + wanted:
            time.sleep(0.001)
            assert pair[0].poll() is None and pair[1].poll() is None
        for process in pair:
            process.kill()
            process.communicate()
            kills += process.returncode == -signal.SIGKILL
    assert kills == 12
    for process in [python(tmp_path, MANY, which, -1) for which in (0, 1)]:
        said_by(process)
    files = list((tmp_path / "data/runs/nano").glob("*.jsonl"))
    assert len(files) == 4 and not list((tmp_path / "data/runs/nano").glob("*.bad"))
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert sorted(line["id"] for line in lines) == sorted(f"s{i}" for i in range(24))
        assert len({line["x"] for line in lines}) == 1
        told = json.loads(file.with_suffix(".json").read_text())
        assert told["complete"] and told["samples"] == 24
    assert 96 <= computed.read_text().count("\n") <= 96 + kills, "one sample more a kill, at most"


# ---------------------------------------------------------------- kill -9, and the same command again

TOY = """
import dataclasses, signal
names, chunk = [f"s{i}" for i in range(40)], 4
runs = [dataclasses.replace(RUN, condition={"k": k}, samples=tuple(names)) for k in range(3)]
budget = int(sys.argv[1])  # chunks until this process waits for its end
computed = os.open("computed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
table = "k,id,x\\n"
for k, run in enumerate(runs):
    with store.open_run(run, "nano") as results:
        for start in range(0, len(names), chunk):
            lacking = [n for n in names[start : start + chunk] if n not in results]
            if not lacking:
                continue
            if not budget:
                time.sleep(1000)
            budget -= 1
            os.write(computed, f"{k} {' '.join(lacking)}\\n".encode())
            print("chunk", flush=True)
            for name in lacking:
                time.sleep(0.001)
                results.add(name, {"x": f"{k} {name} " + "ä" * 300})
        table += "".join(f"{k},{n},{results.records[n]['x']}\\n" for n in names)
store.write_atomic(Path("out.csv"), table)
"""


def test_kills_at_any_moment_change_no_byte_of_the_outcome(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir(), killed.mkdir()
    said_by(python(undisturbed, TOY, -1))
    rng, kills = random.Random(3), 0
    for attempt in range(22):
        process = python(killed, TOY, 2)
        seen = rng.choice((0, 1, 1, 1, 2))  # chunks begun when it is killed
        for _ in range(seen):
            assert process.stdout.readline() == "chunk\n", process.stderr.read()
        time.sleep(rng.random() * (0.3 if not seen else 0.006))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert not (killed / "out.csv").exists(), attempt
    assert kills == 22
    said_by(python(killed, TOY, -1))
    assert (killed / "out.csv").read_bytes() == (undisturbed / "out.csv").read_bytes()
    counted = {}
    for root in (undisturbed, killed):
        lines = [line.split() for line in (root / "computed").read_text().splitlines()]
        counted[root] = Counter((k, name) for k, *names in lines for name in names)
    assert set(counted[killed]) == set(counted[undisturbed]) and set(counted[undisturbed].values()) == {1}
    assert counted[killed].total() <= 120 + 4 * kills, "at most one chunk more a kill"
    for file in (undisturbed / "data/runs/nano").glob("*.jsonl"):
        assert (killed / "data/runs/nano" / file.name).read_bytes() == file.read_bytes()
        a, b = (json.loads((r / "data/runs/nano" / file.with_suffix(".json").name).read_text()) for r in counted)
        assert all(a[name] == b[name] for name in ("samples", "complete", "sample_set", "code", "condition"))


AT_A_CALL = """
import signal
at, calls = int(sys.argv[1]), [0]
def killing(name, half):
    real = getattr(os, name)
    def call(first, *rest):
        calls[0] += 1
        if calls[0] == at:
            half(real, first, *rest)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(first, *rest)
    setattr(os, name, call)
killing("write", lambda real, descriptor, data: real(descriptor, data[: len(data) // 2]))
killing("replace", lambda real, *paths: None)
killing("truncate", lambda real, *paths: None)
with store.open_run(RUN, "nano") as results:
    for name in "abc":
        if name not in results: results.add(name, {"x": name * 9})
"""


@pytest.mark.parametrize("start", [b"", b'{"id": "a"\n{"id": "b", "x": "bbbbbbbbb"}\n', b'{"id": "b'])
def test_a_kill_at_each_call_that_writes_is_mended_by_the_next(path, folder, start):
    """Half of a line, a line without its manifest, a manifest or a mended file not yet in place."""
    codes = []
    for at in range(1, 9):
        for left in folder.iterdir():
            left.unlink()
        if start:
            path.write_bytes(start)
        process = python(store.ROOT, AT_A_CALL, at)
        process.communicate(timeout=60)
        codes.append(process.returncode)
        with store.open_run(RUN, "nano") as results:
            for name in "abc":
                if name not in results:
                    results.add(name, {"x": name * 9})
            assert results.records == {name: {"x": name * 9} for name in "abc"}
        lines = path.read_bytes().splitlines()
        assert len(lines) == 3 and found() == [RUN.digest]
        if codes[-1] == 0:
            break
    assert codes[-1] == 0 and codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1) and len(codes) >= 5
