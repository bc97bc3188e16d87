"""The ledger: which runs were found again, how far others came, and what made the rest new."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tests.test_store import REPOSITORY, RUN, finished
from vrhlib import ledger, store


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """The lines since the last call, read as a process that begins now would write the next ones."""
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(store, "_SAID", set())
    file, seen = tmp_path / "ledger.jsonl", []

    def more():
        lines = store.reuse(file)[len(seen) :]
        seen.extend(lines)
        store._NOTED.clear()
        store._history.cache_clear()
        return lines

    more()
    monkeypatch.setenv("VRHLIB_LEDGER", str(file))
    yield more
    store._NOTED.clear()
    store._history.cache_clear()


def opened(run=RUN, **changes):
    with store.open_run(dataclasses.replace(run, **changes), "nano"):
        pass


def test_new_resumed_and_reused_runs_are_told_apart(noted):
    about = {"task": "replies", "model": "toy", "benchmark": "scenes test", "of": 3}
    finished(RUN, "ab")
    assert noted() == [about | {"state": "new", "had": 0, "why": "never run before"}]
    finished(RUN, "")
    assert noted() == [about | {"state": "resumed", "had": 2, "why": ""}]
    with store.open_run(RUN, "nano") as results:
        results.add("c", {})
    assert noted() == [about | {"state": "resumed", "had": 2, "why": ""}]
    opened()
    assert noted() == [about | {"state": "reused", "had": 3, "why": ""}]


def test_a_run_is_noted_once_a_process_and_only_if_asked(noted, monkeypatch):
    opened()
    opened()
    opened(model="other")
    assert [line["model"] for line in noted()] == ["toy", "other"]
    monkeypatch.delenv("VRHLIB_LEDGER")
    opened()
    assert noted() == []


CHANGES = {
    "revision changed": {"revision": "r2"},
    "prompt changed": {"prompt": ["Point at {text}."]},
    "other samples": {"samples": ("a", "b", "d")},
    "decoding changed": {"decoding": {"greedy": True, "max_new_tokens": 65}},
    "data changed": {"data": "hub/table@2 val"},
    "image limits changed": {"image_limits": {"size": 65}},
    "batch size 8 is 16 now": {"batch_size": 16},
    "dtype float32 is bfloat16 now": {"dtype": "bfloat16"},
    "device cpu is cuda now": {"device": "cuda"},
    "kernel sdpa is eager now": {"kernel": "eager"},
    "image backend pil is torchvision now": {"image_backend": "torchvision"},
    "never run before": {"condition": {"kind": "mean"}},
}


@pytest.mark.parametrize(("why", "change"), CHANGES.items(), ids=CHANGES)
def test_a_new_run_says_what_keeps_it_from_being_an_old_one(noted, why, change):
    finished(RUN)
    noted()
    opened(**change)
    assert [(line["state"], line["why"]) for line in noted()] == [("new", why)]


@pytest.mark.parametrize("field", ["task", "model", "benchmark"])
def test_a_run_of_another_task_model_or_benchmark_is_no_old_one(noted, field):
    finished(RUN)
    noted()
    opened(**{field: "other"})
    assert noted()[0]["why"] == "never run before"


def test_edited_files_and_other_versions_are_named(noted, monkeypatch):
    finished(RUN)
    noted()
    code, versions = store._code(True), store.versions()
    monkeypatch.setattr(store, "_code", lambda real: code | {"attention.py": "x", "boxes.py": "y"})
    opened()
    assert noted()[0]["why"] == "attention.py changed, boxes.py changed"
    monkeypatch.setattr(store, "versions", lambda: versions | {"torch": "9.9", "more": "1"})
    opened(batch_size=9)
    why = "batch size 8 is 9 now, more None is 1 now, torch {} is 9.9 now, attention.py changed, boxes.py changed"
    assert noted()[0]["why"] == why.format(versions["torch"])


def test_of_several_old_runs_the_nearest_is_named_and_of_equally_near_ones_the_newest(noted, monkeypatch):
    finished(dataclasses.replace(RUN, batch_size=2, dtype="float16"))
    finished(dataclasses.replace(RUN, dtype="float64"))
    opened(dtype="float32", batch_size=9, revision="r9")  # nothing was stored of this one: it is no old run
    noted()
    opened()
    assert noted()[0]["why"] == "dtype float64 is float32 now"
    for path in store.runs_dir("nano").glob("*.json"):
        told = json.loads(path.read_text())
        told["written"] = {"float64": "2020-01-01T00:00:00Z"}.get(told["dtype"], told["written"])
        path.write_text(json.dumps(told))
    finished(dataclasses.replace(RUN, kernel="eager"))
    noted()
    opened(prompt=["Where is {text}?"])
    assert noted()[0]["why"] == "kernel eager is sdpa now"


def test_a_run_whose_lines_were_taken_away_is_told(noted):
    finished(RUN)
    noted()
    (store.runs_dir("nano") / f"{RUN.digest}.jsonl").unlink()
    opened()
    assert noted()[0]["why"] == "its lines are gone"


def test_manifests_are_read_once_and_only_for_a_new_run(noted, monkeypatch):
    finished(RUN)
    noted()
    calls, listed = [], store._listed
    monkeypatch.setattr(store, "_listed", lambda *words: calls.append(words) or listed(*words))
    opened()
    assert calls == []
    opened(model="other")
    opened(model="third")
    assert calls == [("nano", ".json")]


def test_thousands_of_runs_are_kept_by_digests_of_what_is_long(noted):
    long = {"masks": ["m" * 16] * 10_000}
    finished(dataclasses.replace(RUN, condition=long, prompt=["p" * 100_000]))
    noted()
    opened(condition=long)
    assert noted()[0]["why"] == "prompt changed"
    known = store._history("nano", store.ROOT)
    assert sum(len(text) for key, rest in known.items() for text in (*key, *rest[0])) < 3000


def test_garbage_in_the_folder_and_in_the_ledger_is_passed_over(noted, tmp_path, capsys):
    finished(RUN)
    good = noted()
    folder = store.runs_dir("nano")
    (folder / "0123456789abcdef.json").write_text("{ half")
    (folder / "0123456789abcde0.json").write_text(json.dumps({"store": 9}))
    (folder / "notes.txt").write_text("")
    opened(batch_size=16)
    good += noted()
    assert good[1]["why"] == "batch size 8 is 16 now" and capsys.readouterr().out.count("\n") == 3
    file = tmp_path / "ledger.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    more = [b"nonsense\n", b"[]\n", b"\xff\n", b"{}\n", first.replace(b'"had": 0', b'"had": "0"'),
            first.replace(b'"why"', b'"how"'), first.replace(b'"of": 3', b'"of": NaN'), b"[" * 9999 + b"\n",
            first.replace(b'"had": 0', b'"had": false')]  # fmt: skip
    file.write_bytes(first + b"".join(more) + second + first[:-9])
    assert ledger.reuse(file) == good and ledger.reuse(tmp_path / "none") == []


def test_a_ledger_that_cannot_be_written_is_said_once_and_stops_nothing(noted, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VRHLIB_LEDGER", str(tmp_path / "no" / "such" / "folder"))
    finished(RUN)
    finished(dataclasses.replace(RUN, model="other"))
    assert capsys.readouterr().out.count("cannot be written") == 1
    assert len(list(store.runs_dir("nano").glob("*.jsonl"))) == 2


def test_lines_of_several_processes_do_not_mix(tmp_path):
    code = (
        "import dataclasses\nfrom vrhlib import store\nfrom vrhlib.store import Run\nRUN = " + repr(RUN) + "\n"
        "for i in range(40):\n"
        "    with store.open_run(dataclasses.replace(RUN, model=f'{i} ' + 'x' * 9000), 'nano'): pass\n"
    )
    file = tmp_path / "ledger.jsonl"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "VRHLIB_LEDGER": str(file), "VRHLIB_ROOT": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(file.read_bytes().splitlines()) == len(store.reuse(file)) == 120
