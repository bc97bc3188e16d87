"""Run keys and stored files against what hypothesis can think of."""

import dataclasses
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.test_store import RUN
from vrhlib import jsonl, store

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FIELDS = [field.name for field in dataclasses.fields(store.Run)]


# ---------------------------------------------------------------- keys

# Values that look alike: as text, as numbers, empty in several ways.
ALIKE = [1, 1.0, "1", True, "True", "true", 0, 0.0, "0", False, None, "None", "null", "", " ", [], {}, [[]], "[]", -1]
leaves = st.one_of(st.sampled_from(ALIKE), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
values = st.recursive(leaves, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3))


def typed(value):
    """Equal for what is one value in JSON: the order of a dict is none, and 1, 1.0 and True are three things."""
    if isinstance(value, dict):
        return "dict", frozenset((key, typed(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(typed, value))
    return type(value).__name__, repr(value)


@st.composite
def changed(draw, value):
    """The value with something in it put, taken away, moved or replaced; perhaps by the same again."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        rest = {k: v for k, v in value.items() if k != key}
        what = draw(st.sampled_from(["inside", "gone", "renamed", "more"]))
        if what == "more":
            return value | {draw(st.text()): draw(leaves)}
        name = key if what == "inside" else draw(st.text())
        return rest if what == "gone" else rest | {name: draw(changed(value[key])) if what == "inside" else value[key]}
    if isinstance(value, list | tuple) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        what = draw(st.sampled_from(["inside", "gone", "twice", "last", "nested"]))
        part = {"inside": lambda: [draw(changed(value[at]))], "gone": list, "twice": lambda: [value[at]] * 2,
                "last": list, "nested": lambda: [[value[at]]]}[what]()  # fmt: skip
        moved = [value[at]] if what == "last" else []
        return [*value[:at], *part, *value[at + 1 :], *moved]
    return draw(leaves)


@pytest.mark.parametrize("field", FIELDS)
@few
@given(data=st.data())
def test_any_change_of_a_field_changes_the_key_and_nothing_else_does(field, data):
    old = data.draw(st.just(getattr(RUN, field)) | values)
    new = data.draw(changed(old) | st.sampled_from(ALIKE))
    one, other = (dataclasses.replace(RUN, **{field: value}).digest for value in (old, new))
    assert (one == other) is (typed(old) == typed(new))


@few
@given(value=values, data=st.data())
def test_the_order_in_which_a_dict_was_made_is_no_difference(value, data):
    def turned(part):
        if isinstance(part, dict):
            return {key: turned(part[key]) for key in data.draw(st.permutations(sorted(part)))}
        return [turned(p) for p in part] if isinstance(part, list) else part

    assert store.digest(turned(value)) == store.digest(value)


@given(one=values, other=values, names=st.tuples(st.sampled_from(FIELDS), st.sampled_from(FIELDS)))
@few
def test_two_fields_that_change_places_make_another_key(one, other, names):
    assume(names[0] != names[1] and typed(one) != typed(other))
    here = dataclasses.replace(RUN, **dict(zip(names, (one, other))))
    there = dataclasses.replace(RUN, **dict(zip(names, (other, one))))
    assert here.digest != there.digest


@pytest.mark.parametrize("key", [1, True, None, 1.5, (1, 2)])
def test_a_key_that_is_no_text_is_refused_wherever_it_is(key):
    for value in ({key: 0}, [{"a": ({key: 0},)}], {"a": {"b": {key: 0}}}):
        with pytest.raises(TypeError):
            store.digest(value)
    with pytest.raises(TypeError):
        _ = dataclasses.replace(RUN, condition={"heads": {key: 0}}).digest


def test_the_version_of_each_package_is_part_of_the_key(monkeypatch):
    known, keys = store.versions(), {RUN.digest}
    assert set(known) >= {"vrhlib", "torch", "transformers", "numpy", "pillow"}
    for name in known:
        for other in (known | {name: "0.0.1"}, {n: v for n, v in known.items() if n != name}):
            with monkeypatch.context() as patch:
                patch.setattr(store, "versions", lambda: other)  # noqa: B023
                keys.add(RUN.digest)
    assert len(keys) == 1 + 2 * len(known)


@pytest.mark.parametrize("data", ["hub/table@1 val", ""])
def test_each_file_that_decides_a_result_is_part_of_the_key(monkeypatch, data):
    run = dataclasses.replace(RUN, data=data)
    names, digest, before = list(store._code(bool(data))), store.file_digest, run.digest
    assert {"boxes.py", "samples.py", "vlm.py", "attention.py", "decoding.py", "scoring.py"} < set(names)
    assert ("real.py" in names, "nano/scenes.py" in names) == (bool(data), not data)
    keys = set()
    for name in names:
        edited = Path(store.__file__).parent / name
        assert edited.exists()
        with monkeypatch.context() as patch:
            patch.setattr(store, "_code", store._code.__wrapped__)
            patch.setattr(store, "file_digest", lambda path: "edited" if path == edited else digest(path))  # noqa: B023
            keys.add(run.digest)
    assert len(keys | {before}) == len(names) + 1 and store._code(bool(data)) and run.digest == before


# ---------------------------------------------------------------- files

_OPENED: list[str] | None = None


def _listen(event, values):
    if _OPENED is not None and event == "open":
        _OPENED.append(str(values[0]))


sys.addaudithook(_listen)


@contextmanager
def folder():
    """data/runs/nano of a root of its own; afterwards, nothing outside it was opened, and nothing odd was made."""
    global _OPENED
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "ROOT", Path(root))
        place = Path(root) / "data/runs/nano"
        place.mkdir(parents=True)
        (Path(root) / "canary").write_text("nobody reads this")
        _OPENED = []
        try:
            yield place
            assert not [name for name in _OPENED if "canary" in name or "passwd" in name]
            inside = {Path(name) for name in _OPENED if name.startswith(root)} - {place}
            assert inside and {path.parent for path in inside} == {place}
        finally:
            _OPENED = None
        made = {path.name.removeprefix(RUN.digest) for path in place.iterdir()}
        assert made <= {".jsonl", ".json", ".lock", ".jsonl.bad"}, made
        assert os.listdir(root) in (["canary", "data"], ["data", "canary"])


def read() -> dict[str, dict]:
    """As a session that goes on with the run reads it."""
    with store.open_run(RUN, "nano") as results:
        return dict(results.records)


lines_ = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda v: json.dumps(v).encode(), values),
    st.builds(lambda i, v: json.dumps({"id": i, "x": v}).encode(), st.sampled_from("abc") | values, values),
)
ends = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b""])


@few
@given(content=st.one_of(st.binary(max_size=300), st.lists(st.tuples(lines_, ends).map(b"".join)).map(b"".join)))
def test_any_bytes_are_read_and_no_line_is_lost(content):
    with folder() as place:
        path = place / f"{RUN.digest}.jsonl"
        path.write_bytes(content)
        assert isinstance(store.stored("nano"), list)
        records = read()
        *lines, _ = content.split(b"\n")
        kept = path.read_bytes().split(b"\n")[:-1]
        aside = path.with_name(f"{path.name}.bad")
        bad = aside.read_bytes().split(b"\n")[:-1] if aside.exists() else []
        assert set(kept) | set(bad) <= set(lines) and len(kept) == len(records)
        for line in set(lines) - set(kept) - set(bad):  # only repeats go
            key, value = jsonl.record(line)
            assert typed(records[key]) == typed(value)
        assert {k: typed(v) for k, v in map(jsonl.record, kept)} == {k: typed(v) for k, v in records.items()}
        assert read() == records and path.read_bytes().split(b"\n")[:-1] == kept


WRITTEN = {name: {"text": f'"{name}"\n\\ {{"id": "z"}} ä' * 3, "box": [i, 0.5 * i], "deep": {"id": name}}
           for i, name in enumerate("abcdef")}  # fmt: skip
WHOLE = [jsonl.line({"id": name, **record}) for name, record in WRITTEN.items()]
pieces = st.one_of(
    st.sampled_from(WHOLE),
    st.builds(lambda line, at: line[: at % len(line)], st.sampled_from(WHOLE), st.integers(0)),  # cut, then glued
    st.builds(lambda n: bytes(n), st.integers(1, 50)),  # a page that never reached the disk
    st.builds(lambda b: b + b"\n", st.binary(max_size=20)),
)


@few
@given(content=st.lists(pieces, max_size=12).map(b"".join))
def test_of_cut_glued_doubled_and_emptied_lines_only_whole_records_come_back(content):
    with folder() as place:
        (place / f"{RUN.digest}.jsonl").write_bytes(content)
        records = read()
        assert all(WRITTEN[name] == record for name, record in records.items())
        alone = {line for line in content.split(b"\n")[:-1]} & {line[:-1] for line in WHOLE}
        assert {name for name, _ in map(jsonl.record, alone)} == set(records), "each that stands whole on a line"


@few
@given(content=st.binary(max_size=300), at=st.integers(0), replaced=st.binary(max_size=30))
def test_bytes_written_over_never_end_in_another_error(content, at, replaced):
    """A changed letter cannot be told from another text, but it must not break the reader."""
    with folder() as place:
        path, whole = place / f"{RUN.digest}.jsonl", b"".join(WHOLE)
        at %= len(whole)
        path.write_bytes(whole[:at] + replaced + whole[at + len(content) :])
        assert all(isinstance(name, str) and isinstance(record, dict) for name, record in read().items())


told = ["store", "digest", "samples", "complete", "seconds", "versions", "code", "sample_set", "task", "model",
        "condition", "written", "new", "benchmark"]  # fmt: skip
odd = st.one_of(values, st.sampled_from(["../../../canary", "/etc/passwd", "canary", 10**30, "é" * 500, "\ud800"]))


@few
@given(
    content=st.one_of(
        st.binary(max_size=200),
        values.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(st.sampled_from(told) | st.text(), odd),
    ),
    cut=st.none() | st.integers(0),
    had=st.sampled_from(["", "ab", "abc"]),
)
def test_any_manifest_is_read_or_refused_and_never_followed(content, cut, had):
    with folder() as place, pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as elsewhere:
        patch.setenv("VRHLIB_LEDGER", f"{elsewhere}/ledger")
        with store.open_run(RUN, "nano") as results:
            for name in had:
                results.add(name, {"x": name})
        manifest, lines = place / f"{RUN.digest}.json", place / f"{RUN.digest}.jsonl"
        if isinstance(content, dict):
            content = json.dumps(json.loads(manifest.read_text()) | content).encode()
        manifest.write_bytes(content if cut is None else content[: cut % (len(content) + 1)])
        before = manifest.read_bytes(), lines.read_bytes() if had else b""
        assert all(results.path == lines for results, _ in store.stored("nano"))
        with store.open_run(dataclasses.replace(RUN, batch_size=9), "nano"):
            pass  # looks for what is different, in all manifests
        for left in place.iterdir():
            if not left.name.startswith(RUN.digest):
                left.unlink()
        try:
            assert read() == {name: {"x": name} for name in had}
        except store.NewerStore:
            assert json.loads(before[0])["store"] > 1
            assert (manifest.read_bytes(), lines.read_bytes() if had else b"") == before
        else:
            told = json.loads(manifest.read_text())
            assert told["samples"] == len(had) and told["complete"] is (had == "abc")
