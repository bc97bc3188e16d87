"""Runs: what their key depends on, and what survives kills, garbage, a full house and a read-only folder."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from vrhlib import store

REPOSITORY = Path(__file__).parents[1]
RUN = store.Run(
    task="replies", model="toy", revision="r1", image_backend="pil", benchmark="scenes test",
    data="hub/table@1 val", samples=("a", "b", "c"), image_limits={"size": 64}, prompt=["Where is {text}?"],
    condition={"kind": "zero", "heads": [[1, 2]]},
    decoding={"greedy": True, "max_new_tokens": 64}, kernel="sdpa", dtype="float32", device="cpu", batch_size=8,
)  # fmt: skip


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    return tmp_path


def lines_of(root):
    (path,) = root.glob("data/runs/nano/*.jsonl")
    return path


def run_manifest(root):
    (path,) = root.glob("data/runs/nano/*.json")
    return json.loads(path.read_text())


# ---------------------------------------------------------------- run keys


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(store.Run)])
def test_every_field_of_a_run_changes_its_key(field):
    value = getattr(RUN, field)
    changes = {str: lambda v: v + "x", tuple: lambda v: (*v, "d"), list: lambda v: [*v, "d"]}
    changes |= {dict: lambda v: {**v, "k": 1}, int: lambda v: v + 1}
    changed = dataclasses.replace(RUN, **{field: changes[type(value)](value)})
    assert changed.digest != RUN.digest


def test_a_value_deep_in_the_condition_changes_the_key():
    assert dataclasses.replace(RUN, condition={"kind": "zero", "heads": [[2, 1]]}).digest != RUN.digest
    assert dataclasses.replace(RUN, samples=("b", "a", "c")).digest != RUN.digest


def test_the_order_of_a_dict_does_not_change_the_key():
    turned = dataclasses.replace(RUN, condition=dict(reversed(RUN.condition.items())))
    assert list(turned.condition) != list(RUN.condition) and turned.digest == RUN.digest
    assert store.digest({"a": 1, "b": {"c": 2, "d": 3}}) == store.digest({"b": {"d": 3, "c": 2}, "a": 1})


def test_the_version_of_a_package_changes_the_key(monkeypatch):
    before = RUN.digest
    monkeypatch.setattr(store, "versions", lambda: {"torch": "0.0.1"})
    one = RUN.digest
    monkeypatch.setattr(store, "versions", lambda: {"torch": "0.0.2"})
    assert len({before, one, RUN.digest}) == 3


def test_the_version_of_this_library_is_part_of_the_key_even_from_a_bare_checkout():
    assert "vrhlib" in store.versions()


def test_the_key_is_the_same_in_another_process(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\nfrom tests_run import RUN; print(RUN.digest)"
    (tmp_path / "tests_run.py").write_text(f"from vrhlib.store import Run\nRUN = {RUN!r}\n")
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == RUN.digest


def test_a_number_that_json_cannot_hold_has_no_digest():
    with pytest.raises(ValueError):
        store.digest({"x": float("nan")})


def test_file_digests_follow_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert store.file_digest(tmp_path / "a") == "ba7816bf8f01cfea"  # the first half of SHA-256("abc"), FIPS 180
    (tmp_path / "a").write_bytes(b"abd")
    assert store.file_digest(tmp_path / "a") != "ba7816bf8f01cfea"


# ---------------------------------------------------------------- results and resume


def test_a_run_is_resumed_where_it_stopped(root):
    with pytest.raises(KeyboardInterrupt), store.open_run(RUN, "nano") as results:
        results.add("a", {"text": "ä\n{"})
        results.add("b", {"box": [1, 2.5]})
        raise KeyboardInterrupt
    assert (run_manifest(root)["samples"], run_manifest(root)["complete"]) == (2, False)
    with store.open_run(RUN, "nano") as results:
        assert len(results) == 2 and "a" in results and "b" in results and "c" not in results
        assert results.records == {"a": {"text": "ä\n{"}, "b": {"box": [1, 2.5]}}
        results.add("c", {})
    assert (run_manifest(root)["samples"], run_manifest(root)["complete"]) == (3, True)
    assert len(lines_of(root).read_text().splitlines()) == 3


def test_another_run_reads_nothing_of_this_one(root):
    with store.open_run(RUN, "nano") as results:
        results.add("a", {})
    with store.open_run(dataclasses.replace(RUN, model="other"), "nano") as results:
        assert len(results) == 0
    with store.open_run(RUN, "paper") as results:
        assert len(results) == 0


def test_a_record_is_the_same_before_and_after_it_was_stored(root):
    """A table made in the session that computes must equal the table of the session that resumes."""
    with store.open_run(RUN, "nano") as results:
        mutable = [1, 2]
        results.add("a", {"box": (1, 2), "by layer": {3: 0.5}, "list": mutable})
        mutable.append(3)
        fresh = json.dumps(results.records["a"]), type(results.records["a"]["box"])
    with store.open_run(RUN, "nano") as results:
        assert fresh == (json.dumps(results.records["a"]), type(results.records["a"]["box"]))
        assert results.records["a"]["list"] == [1, 2]


def test_a_record_cannot_replace_the_id_of_its_sample(root):
    with store.open_run(RUN, "nano") as results:
        with pytest.raises(ValueError):
            results.add("a", {"id": "b"})
    with store.open_run(RUN, "nano") as results:
        assert "b" not in results


def test_a_sample_is_stored_once(root):
    with store.open_run(RUN, "nano") as results:
        results.add("a", {"x": 1})
        with pytest.raises(ValueError, match="'a'"):
            results.add("a", {"x": 2})
    with store.open_run(RUN, "nano") as results:
        assert results.records == {"a": {"x": 1}}


@pytest.mark.parametrize("record", [{"x": float("nan")}, {"x": np.float32(1)}, {"x": {1, 2}}])
def test_a_record_that_json_cannot_hold_leaves_the_file_as_it_was(root, record):
    with store.open_run(RUN, "nano") as results:
        results.add("a", {})
        with pytest.raises((ValueError, TypeError)):
            results.add("b", record)
        assert "b" not in results
    with store.open_run(RUN, "nano") as results:
        assert list(results.records) == ["a"]


def test_every_record_is_on_disk_as_soon_as_it_is_added(root):
    with store.open_run(RUN, "nano") as results:
        for i, name in enumerate("abc", 1):
            results.add(name, {})
            assert lines_of(root).read_bytes().count(b"\n") == i


LINES = b'{"id": "a", "x": 1}\n{"id": "b", "x": 2}\n'


@pytest.mark.parametrize("tail", [b'{"id": "c", "te', b'{"id": "c", "x": 3}', b"{", b"\x00\x00\x00", b"\xff"])
def test_a_last_line_without_its_end_is_dropped_and_computed_again(root, tail):
    with store.open_run(RUN, "nano"):
        pass
    path = root / "data/runs/nano" / f"{RUN.digest}.jsonl"
    path.write_bytes(LINES + tail)
    with store.open_run(RUN, "nano") as results:
        assert list(results.records) == ["a", "b"]
        assert path.read_bytes() == LINES
        results.add("c", {"x": 3})
    with store.open_run(RUN, "nano") as results:
        assert [r["x"] for r in results.records.values()] == [1, 2, 3]


def test_a_file_that_holds_only_half_a_line_is_a_run_without_results(root):
    path = root / "data/runs/nano" / f"{RUN.digest}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"id": "a"')
    with store.open_run(RUN, "nano") as results:
        assert len(results) == 0
        results.add("a", {})
    assert path.read_bytes() == b'{"id": "a"}\n'


@pytest.mark.parametrize(
    "line",
    [b'{"id": "b", "te', b"", b"nonsense", b"[1, 2]", b"7", b"null", b'"id"', b'{"x": 1}', b'{"id": "a"}', b"\xff\xfe",
     b"\x00\x00", b'{"id": ["b"]}', b'{"id": {"b": 1}}', b'{"id": null}'],
)  # fmt: skip
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_garbled_line_is_named_and_set_aside_and_the_others_are_used(root, capsys, line, at):
    path = root / "data/runs/nano" / f"{RUN.digest}.jsonl"
    path.parent.mkdir(parents=True)
    good = [b'{"id": "a"}', b'{"id": "z"}']
    path.write_bytes(b"\n".join([*good[: at - 1], line, *good[at - 1 :]]) + b"\n")
    with store.open_run(RUN, "nano") as results:
        assert list(results.records) == ["a", "z"]
    (said,) = capsys.readouterr().out.splitlines()
    where = 2 if line == b'{"id": "a"}' and at == 1 else at  # of two equal lines the second is the repeat
    assert said.startswith(f"{path}: line {where} (") and said.isprintable()
    assert path.read_bytes() == b"\n".join(good) + b"\n"
    aside = path.with_name(f"{path.name}.bad")
    if line == b'{"id": "a"}':
        assert "again" in said and "dropped" in said and not aside.exists()
    else:
        assert aside.name in said and aside.read_bytes() == line + b"\n"
    with store.open_run(RUN, "nano") as results:
        assert list(results.records) == ["a", "z"]
    assert capsys.readouterr().out == "", "said once"


def test_a_run_manifest_says_what_was_run_and_how_far(root):
    with store.open_run(RUN, "nano") as results:
        results.add("a", {})
        time.sleep(0.02)
    first = run_manifest(root)
    for field in dataclasses.fields(store.Run):
        assert field.name in first
    assert first["model"] == "toy" and first["condition"] == RUN.condition
    assert (first["samples"], first["new"], first["complete"]) == (1, 1, False)
    assert first["seconds"] > 0 and first["peak_mib"] > 0 and first["versions"] == store.versions()
    with store.open_run(RUN, "nano") as results:
        results.add("b", {})
        results.add("c", {})
        time.sleep(0.02)
    second = run_manifest(root)
    assert (second["samples"], second["new"], second["complete"]) == (3, 2, True)
    assert second["seconds"] > first["seconds"]


def test_looking_at_a_finished_run_leaves_its_manifest_alone(root):
    with store.open_run(RUN, "nano") as results:
        for name in "abc":
            results.add(name, {})
    (path,) = root.glob("data/runs/nano/*.json")
    before = path.read_bytes(), path.stat().st_mtime_ns
    with store.open_run(RUN, "nano"):
        pass
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_the_manifest_of_a_run_killed_at_its_last_line_is_put_right(root):
    with store.open_run(RUN, "nano") as results:
        results.add("a", {})
    with lines_of(root).open("ab") as file:  # what a second session leaves that is killed before its manifest
        file.write(b'{"id": "b"}\n{"id": "c"}\n')
    with store.open_run(RUN, "nano"):
        pass
    assert (run_manifest(root)["samples"], run_manifest(root)["complete"]) == (3, True)


def test_an_error_inside_the_block_is_not_hidden_by_a_garbled_manifest(root):
    with store.open_run(RUN, "nano"):
        pass
    (path,) = root.glob("data/runs/nano/*.json")
    path.write_text("{half")
    with pytest.raises(ZeroDivisionError), store.open_run(RUN, "nano") as results:
        results.add("a", {})
        raise ZeroDivisionError


# ---------------------------------------------------------------- found again by what it is


def finished(run: store.Run, ids="abc", **record) -> store.Run:
    with store.open_run(run, "nano") as results:
        for name in ids:
            results.add(name, record)
    return run


def found(**facts) -> list[str]:
    return [results.path.stem for results, _ in store.stored("nano", **facts)]


def test_complete_runs_are_found_by_their_facts_with_records_and_manifest(root):
    first, second = finished(RUN, x=1), finished(dataclasses.replace(RUN, model="other"), x=2)
    assert found(model="toy") == [first.digest] and found(model="other") == [second.digest]
    assert found(task="replies", batch_size=8) == sorted([first.digest, second.digest]) == found()
    assert found(task="scores") == found(model="toy", batch_size=9) == found(no_such_fact=1) == []
    ((results, told),) = store.stored("nano", model="toy")
    assert results.records == {name: {"x": 1} for name in "abc"} and told == json.loads(
        results.path.with_suffix(".json").read_text()
    )
    assert told["condition"] == RUN.condition and store.stored("paper") == []


def test_runs_that_are_unfinished_of_other_versions_or_without_a_manifest_are_not_found(root, monkeypatch):
    finished(RUN, "ab")
    assert found() == []
    whole = finished(dataclasses.replace(RUN, model="other"))
    assert found() == [whole.digest]
    with monkeypatch.context() as patch:
        patch.setattr(store, "versions", lambda: {"torch": "0.0.1"})
        assert found() == []
    (root / f"data/runs/nano/{whole.digest}.json").write_text("{half")
    assert found() == []


def test_a_run_is_found_by_its_samples_in_their_order_their_data_and_the_code(root, monkeypatch):
    finished(RUN)
    same = store.sample_set(RUN.samples, RUN.data)
    assert found(**same) == [RUN.digest] and found(**store.sample_set(list(RUN.samples), RUN.data)) == [RUN.digest]
    for other in (("b", "a", "c"), ("a", "b"), ("a", "b", "c", "d")):
        assert found(**store.sample_set(other, RUN.data)) == []
    assert found(**store.sample_set(RUN.samples, "")) == [], "shipped scenes and tables are read by other code"
    monkeypatch.setattr(store, "_code", lambda real: {"boxes.py": "edited"})
    assert found(**store.sample_set(RUN.samples, RUN.data)) == []


def test_only_lines_of_runs_that_fit_are_read(root, capsys):
    finished(RUN)
    spoiled = finished(dataclasses.replace(RUN, model="other"))
    path = root / f"data/runs/nano/{spoiled.digest}.jsonl"
    path.write_text("nonsense\n")
    assert found(model="toy") == [RUN.digest] and capsys.readouterr().out == ""
    assert found(model="other") == found(model="other") == []
    assert capsys.readouterr().out.count(f"{path}: line 1 (") == 1, "said once"
    assert path.read_text() == "nonsense\n" and not path.with_name(f"{path.name}.bad").exists(), "only read"


# ---------------------------------------------------------------- several processes

WORKER = """
import sys, time
from vrhlib import store
from vrhlib.store import Run
RUN, pause, count = {run}, float(sys.argv[1]), int(sys.argv[2])
print("started", flush=True)
with store.open_run(RUN, "nano") as results:
    new = 0
    for i in range(count):
        if f"s{{i}}" not in results:
            results.add(f"s{{i}}", {{"text": "x" * 200, "i": i}})
            new += 1
            print("added", i, flush=True)
            time.sleep(pause)
print("new", new, flush=True)
"""


def worker(root, pause, count):
    environment = os.environ | {"VRHLIB_ROOT": str(root), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER.format(run=repr(RUN)), str(pause), str(count)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
    )  # fmt: skip


def outcome(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return int(out.split("new ")[1])


def test_of_two_processes_on_one_run_the_second_waits_and_finds_all_done(tmp_path):
    processes = [worker(tmp_path, 0.01, 40) for _ in range(2)]
    assert sorted(map(outcome, processes)) == [0, 40]
    records = [json.loads(line) for line in lines_of(tmp_path).read_text().splitlines()]
    assert [r["id"] for r in records] == [f"s{i}" for i in range(40)]


def test_kill_9_keeps_finished_lines_and_hands_the_run_to_whoever_waits(tmp_path):
    first = worker(tmp_path, 0.05, 1000)
    while first.stdout.readline() != "added 4\n":
        assert first.poll() is None, first.stderr.read()
    second = worker(tmp_path, 0, 30)
    assert second.stdout.readline() == "started\n"
    time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    new = outcome(second)
    records = [json.loads(line) for line in lines_of(tmp_path).read_text().splitlines()]
    assert [r["id"] for r in records] == [f"s{i}" for i in range(30)]
    assert new <= 25  # the five lines seen before the kill were kept
    assert run_manifest(tmp_path)["samples"] == 30


# ---------------------------------------------------------------- files


def test_a_file_is_written_whole_with_its_folders_and_no_trace(tmp_path):
    path = store.write_atomic(tmp_path / "a" / "b" / "x.txt", "grün")
    assert path.read_bytes() == "grün".encode()
    store.write_atomic(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01" and os.listdir(path.parent) == ["x.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("odd")])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, error):
    path = tmp_path / "x.txt"
    path.write_text("old")

    def fail(*_):
        raise error

    monkeypatch.setattr(store.os, "replace", fail)
    with pytest.raises(type(error)):
        store.write_atomic(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.txt"]


def test_text_that_cannot_be_encoded_leaves_the_old_content(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        store.write_atomic(path, "\ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.txt"]


def test_a_folder_that_is_a_file_gives_the_next_step(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x.txt", tmp_path / "file" / "deeper" / "x.txt"):
        with pytest.raises(OSError, match=r"Cannot write .*VRHLIB_ROOT"):
            store.write_atomic(path, "new")


def test_a_target_that_is_a_folder_gives_the_next_step_and_leaves_no_trace(tmp_path):
    (tmp_path / "x.txt").mkdir()
    with pytest.raises(OSError, match=r"Cannot write .*VRHLIB_ROOT"):
        store.write_atomic(tmp_path / "x.txt", "new")
    assert os.listdir(tmp_path) == ["x.txt"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_read_only_folder_gives_the_next_step():
    with pytest.raises(OSError, match=r"Cannot write .*VRHLIB_ROOT"):
        store.write_atomic(Path("/proc/vrhlib.txt"), "new")
    with pytest.raises(OSError, match=r"Cannot write .*VRHLIB_ROOT"):
        store.write_atomic(Path("/proc/vrhlib/deeper/x.txt"), "new")


def test_a_run_in_an_unwritable_folder_gives_the_next_step(tmp_path, monkeypatch):
    (tmp_path / "data").write_text("a file where a folder is needed")
    monkeypatch.setattr(store, "ROOT", tmp_path)
    with pytest.raises(OSError, match=r"Cannot write .*VRHLIB_ROOT"):
        with store.open_run(RUN, "nano"):
            pass


@pytest.mark.parametrize("folder", [store.runs_dir, store.figures_dir, store.heads_dir])
def test_an_unknown_profile_is_refused_with_those_there_are(folder):
    with pytest.raises(ValueError, match="'Nano'.*'nano', 'paper'"):
        folder("Nano")
    assert {folder("nano").name, folder("paper").name} == {"nano", "paper"}


# ---------------------------------------------------------------- manifest, memory, progress


def test_a_manifest_names_versions_commit_machine_and_what_it_is_told(monkeypatch):
    monkeypatch.setenv("VRH_NOTEBOOK", "01_detect")
    found = store.manifest(k=20, seed=3)
    assert (found["k"], found["seed"], found["notebook"]) == (20, 3, "01_detect")
    assert found["versions"]["numpy"] == np.__version__ and found["python"] == sys.version.split()[0]
    assert "cores" in found["machine"] and found["peak_mib"] > 10
    assert time.strptime(found["written"], "%Y-%m-%dT%H:%M:%SZ")
    json.dumps(found, allow_nan=False)


def test_outside_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert store.git_commit.__wrapped__() == "unknown"


def test_the_commit_is_marked_when_tracked_files_differ(tmp_path, monkeypatch):
    def git(*words):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(("git", "-C", tmp_path, *identity, *words), check=True, capture_output=True)

    git("init")
    (tmp_path / "x").write_text("1")
    git("add", "x")
    git("commit", "-m", "x")
    monkeypatch.setattr(store, "ROOT", tmp_path)
    clean = store.git_commit.__wrapped__()
    assert len(clean) == 12 and not clean.endswith("+")
    (tmp_path / "x").write_text("2")
    assert store.git_commit.__wrapped__() == clean + "+"


@pytest.fixture
def no_cuda(monkeypatch):
    absent = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", absent)


def allocate(mib):
    return len(np.ones(mib * 2**20, dtype=np.uint8)) // 2**20


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps a peak that can be reset")


@linux
def test_measure_sees_what_a_call_allocates_and_frees(no_cuda):
    for _ in range(2):
        result, seconds, mib = store.measure(allocate, 100)
        assert result == 100 and 80 < mib < 200 and 0 < seconds < 10
    _, slept, nothing = store.measure(time.sleep, 0.05)
    assert 0.05 <= slept < 5 and 0 <= nothing < 20


@linux
def test_the_peak_of_a_process_never_falls_across_measurements(no_cuda):
    allocate(300)
    peak = store.peak_mib()
    assert peak > 300
    store.measure(allocate, 1)
    assert store.peak_mib() >= peak
    with pytest.raises(ZeroDivisionError):
        store.measure(lambda: 1 / 0)
    assert store.peak_mib() >= peak


@linux
def test_the_peak_inside_a_measured_call_counts_for_the_process(no_cuda):
    before = store.peak_mib()
    store.measure(allocate, int(before) + 50)
    assert store.peak_mib() > before + 40


def test_progress_is_plain_text_when_headless(monkeypatch, capsys):
    monkeypatch.setenv("VRH_PROGRESS", "text")
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert list(store.progress(range(4), "RefCOCO val  VRH k=20")) == [0, 1, 2, 3]
    shown = capsys.readouterr()
    assert "RefCOCO val  VRH k=20" in shown.out and "4/4" in shown.out and not shown.err
    assert "\x1b" not in shown.out and "|" not in shown.out and shown.out.isascii() and shown.out.endswith("\n")


def test_progress_of_nothing_says_nothing(monkeypatch, capsys):
    monkeypatch.setenv("VRH_PROGRESS", "text")
    assert list(store.progress([], "scenes")) == [] and capsys.readouterr().out == ""


def test_tokens_and_seconds_add_up_over_calls_and_processes(root, monkeypatch):
    clock = iter([0.0, 2.0, 5.0, 10.0, 11.0])
    monkeypatch.setattr(store, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    first = store.Meter("nano", "toy", "cuda")
    first.add(100, 10)
    first.add(50, 5)
    first.close()
    second = store.Meter("nano", "toy", "cuda")
    second.add(1, 2)
    second.close()
    second.close()  # nothing is counted twice
    path = store.runs_dir("nano") / "speed.json"
    assert store.speeds(path) == {"toy on cuda": [151, 17, 6.0]}
    for garbage in ("{ half", "[1]", '{"toy on cuda": [1, 2]}', '{"toy on cuda": ["1", 2, 3]}', '{"toy on cuda": 7}'):
        path.write_text(garbage)
        assert store.speeds(path) == {}


def test_whoever_wants_to_be_told_is_told_instead_of_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("VRH_PROGRESS", "text")
    told = []
    with store.told(lambda done, of: told.append((done, of))):
        for item in store.progress("abc", "scenes"):
            told.append(item)
        assert list(store.progress([], "scenes")) == []
    assert told == [(0, 3), "a", (1, 3), "b", (2, 3), "c", (3, 3)] and capsys.readouterr().out == ""
    with pytest.raises(ZeroDivisionError), store.told(lambda done, of: 1 / 0):
        list(store.progress("a", "scenes"))
    assert list(store.progress("a", "scenes")) == ["a"] and "scenes" in capsys.readouterr().out, "a bar again"
