"""Where tables and files come from: a local copy first, then the Hub at one commit; every error names the next step.

The Hub is emulated: a server on this machine answers the few requests that `datasets` and `huggingface_hub` make.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests import real_fixtures as fixtures
from vrhlib import hub, store

COMMIT, OTHER = "c0ffee" + "0" * 34, "decade" + "0" * 34
SOURCE = hub.Source(("owner/Table",), "val", 3, ("question", "number"), 0.1, "none", "accuracy")
ROWS = [fixtures.countbench_row(n) for n in range(3)]


@pytest.fixture
def shelf(root, monkeypatch, tmp_path):
    """An empty data/local, a cache to throw away, and no network."""
    fixtures.isolate(monkeypatch, tmp_path / "cache")
    return root


def local(shelf, name="owner/Table", rows=ROWS, config="default", split="val") -> Path:
    return fixtures.write(shelf, name, {split: rows}, fixtures.COUNTBENCH, config)


def changed(**facts) -> hub.Source:
    return hub.Source(**{**SOURCE.__dict__, **facts})


# ---------------------------------------------------------------- a local copy


def test_a_local_copy_is_read_with_its_pictures_undecoded(shelf):
    local(shelf)
    table, origin = hub.open_table(SOURCE)
    assert len(table) == 3 and table[0]["image"]["bytes"] == ROWS[0]["image"]["bytes"]
    assert origin.startswith("owner/Table@local:") and origin.endswith(" val")
    assert not (shelf / "data" / "hub.json").exists(), "a local copy has no commit"


def test_the_local_copy_of_the_first_id_counts_then_that_of_the_second(shelf):
    both = changed(ids=("owner/Table", "new-owner/Table"))
    local(shelf, "new-owner/Table")
    assert hub.open_table(both)[1].startswith("new-owner/Table@local:")
    local(shelf)
    assert hub.open_table(both)[1].startswith("owner/Table@local:")


def test_a_changed_local_copy_is_read_anew_and_named_differently(shelf):
    folder = local(shelf)
    first, before = hub.open_table(SOURCE)
    file = next(folder.rglob("*.parquet"))
    local(shelf, rows=[fixtures.countbench_row(9, text="longer than it was")] * 3)
    second, after = hub.open_table(SOURCE)
    assert second[0]["text"] != first[0]["text"] and before != after
    size = file.stat().st_size
    file.write_bytes(b"PAR1" + bytes(size - 8) + b"PAR1")  # of the same length
    with pytest.raises(ValueError, match="cannot be read"):
        hub.open_table(SOURCE)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            changed(columns=("question", "bbox")),
            ["lacks the columns bbox", "it has image, text, question, number", "pin"],
        ),
        (changed(rows=4), ["has 3 rows, not 4 as published", "allow_drift=True", "VRHLIB_ALLOW_DRIFT=1"]),
        (changed(rows=2), ["has 3 rows, not 2 as published"]),
        (
            changed(split="test"),
            ["laid out in another way", "'val'", "Wanted: split 'test', 3 rows", "data/local/owner/"],
        ),
        (changed(config="L1"), ["laid out in another way", "'default'", "Wanted: configuration 'L1'"]),
    ],
)
def test_another_table_than_expected_says_what_came_and_what_was_wanted(shelf, source, said):
    local(shelf)
    with pytest.raises(ValueError) as error:
        hub.open_table(source)
    assert all(words in str(error.value) for words in said), error.value


def test_other_rows_than_published_are_read_where_drift_is_allowed(shelf, monkeypatch):
    local(shelf)
    assert len(hub.open_table(changed(rows=4), allow_drift=True)[0]) == 3
    monkeypatch.setenv("VRHLIB_ALLOW_DRIFT", "1")
    assert len(hub.open_table(changed(rows=4))[0]) == 3
    with pytest.raises(ValueError, match="lacks the columns"):
        hub.open_table(changed(columns=("bbox",)), allow_drift=True)
    monkeypatch.setenv("VRHLIB_ALLOW_DRIFT", "0")
    with pytest.raises(ValueError, match="as published"):
        hub.open_table(changed(rows=4))


def test_rows_are_counted_here_whatever_the_card_of_the_data_set_says(shelf):
    card = local(shelf) / "README.md"
    said = "dataset_info:\n  splits:\n  - name: val\n    num_examples: 5\n  config_name: default\nconfigs:"
    card.write_text(card.read_text().replace("configs:", said))
    assert len(hub.open_table(SOURCE)[0]) == 3


def test_a_configuration_is_named_in_the_origin(shelf):
    local(shelf, config="L1")
    assert hub.open_table(changed(config="L1"))[1].endswith(" L1 val")


def test_damaged_and_missing_files_name_the_folder(shelf):
    folder = local(shelf)
    next(folder.rglob("*.parquet")).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(ValueError, match=rf"owner/Table cannot be read.*damaged.*put them at {folder} anew"):
        hub.open_table(SOURCE)
    for file in folder.rglob("*.*"):
        file.unlink()
    with pytest.raises(ValueError, match=rf"owner/Table is laid out in another way.*Put a whole copy at {folder}"):
        hub.open_table(SOURCE)


def test_rows_of_one_shard_that_do_not_fit_the_others_are_named_as_damage(shelf):
    folder = local(shelf)
    other = fixtures.write(shelf, "owner/Else", {"val": [fixtures.kangheng_row(0, 0)]}, fixtures.KANGHENG)
    next(other.rglob("*.parquet")).rename(folder / "data" / "val-00001-of-00002.parquet")
    with pytest.raises(ValueError, match="owner/Table cannot be read"):
        hub.open_table(SOURCE)


def test_without_network_every_id_is_tried_and_named(shelf):
    with pytest.raises(OSError) as error:
        hub.open_table(changed(ids=("owner/Table", "new-owner/Table")))
    lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines] == ["owner/Table", "new-owner/Table"]
    for line in lines:
        assert "the Hub cannot be reached" in line and "HF_HOME" in line
        assert f"{shelf}/data/local/{line.split()[0]}" in line


# ---------------------------------------------------------------- commits


def test_a_pin_in_code_goes_before_the_commit_that_answered_first(shelf):
    assert hub.pinned("owner/Table") is None
    hub.pin("owner/Table", COMMIT)
    hub.pin("owner/Table", OTHER)
    hub.pin("a/B", OTHER)
    hub.pin("c/D", None)
    assert json.loads((shelf / "data" / "hub.json").read_text()) == {"a/B": OTHER, "owner/Table": COMMIT}
    assert hub.pinned("owner/Table") == COMMIT and hub.pinned("owner/Table", OTHER) == OTHER


@pytest.mark.parametrize("content", ['{"owner/Table": ', '["owner/Table"]', ""])
def test_a_malformed_list_of_commits_says_how_to_go_on(shelf, content):
    (shelf / "data").mkdir()
    (shelf / "data" / "hub.json").write_text(content)
    with pytest.raises(ValueError, match=r"hub.json is not a JSON table of commits.*Delete it"):
        hub.open_table(SOURCE)
    local(shelf)
    assert len(hub.open_table(SOURCE)[0]) == 3, "a local copy needs no commit"


# ---------------------------------------------------------------- the Hub, emulated


class Hub(BaseHTTPRequestHandler):
    """One commit of the data sets in a folder. Owners named gated and moved are that."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def log_message(self, *args):
        pass

    def answer(self, code: int, body: object = b"", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for key, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, code: int, reason: str):
        self.answer(code, {"error": reason}, X_Error_Code=reason, X_Error_Message=reason)

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path).strip("/").split("/")
        api = path[:2] == ["api", "datasets"]
        name, rest = ("/".join(path[2:4]), path[4:]) if api else ("/".join(path[1:3]), path[3:])
        place = self.folder / name
        if path[0] not in ("api", "datasets") or not place.is_dir():
            return self.refuse(404, "RepoNotFound")
        if name.startswith("gated/") and rest not in ([], ["revision", "main"]):
            return self.refuse(403, "GatedRepo")
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        files = [file for file in place.rglob("*") if file.is_file()]
        if not api:  # datasets/<owner>/<name>/resolve/<commit>/<file>
            file = place / "/".join(rest[2:])
            if not file.is_file():
                return self.refuse(404, "EntryNotFound")
            tag = hashlib.sha1(file.read_bytes()).hexdigest()
            return self.answer(200, file.read_bytes(), ETag=f'"{tag}"', X_Repo_Commit=COMMIT)
        if rest[:1] in ([], ["revision"]):
            siblings = [{"rfilename": str(file.relative_to(place))} for file in files]
            gated = "manual" if name.startswith("gated/") else False
            return self.answer(200, {"id": name, "sha": COMMIT, "gated": gated, "private": False, "siblings": siblings})
        inside = place / "/".join(rest[2:])  # api/datasets/<owner>/<name>/tree/<commit>/<folder>
        listed = [
            {
                "type": "file" if f.is_file() else "directory",
                "path": str(f.relative_to(place)),
                "size": 1,
                "oid": "0" * 40,
            }
            for f in (inside.iterdir() if inside.is_dir() else ())
        ]
        return self.answer(200, listed)

    do_HEAD = do_GET


# Each line of its output is one outcome; a fresh process, because the address of the Hub is read at import.
ASK = """
import json, sys, time
time.sleep = lambda seconds: None  # retries
from vrhlib import hub
for asked in json.loads(sys.argv[1]):
    how = asked.pop("how", "open")
    try:
        if how == "open":
            table, origin = hub.open_table(hub.Source(**asked))
            said = [origin, len(table), type(table[0].get("image")).__name__]
        else:
            said = getattr(hub, how)(**asked)
    except Exception as error:
        said = [type(error).__name__, str(error)]
    print("SAID", json.dumps(said))
"""


def ask(root: Path, asked: list[dict], **environment: str) -> list:
    plain = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "TRANSFORMERS_", "VRH")) and "proxy" not in k.lower()
    }
    given = {"HF_HOME": str(root / "hf"), "VRHLIB_ROOT": str(root), "VRH_PROGRESS": "text", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(asked)], env=plain | given | environment, cwd=Path(__file__).parents[1],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == len(asked), done.stderr
    return said


def table(name: str, **facts) -> dict:
    return {k: v for k, v in (SOURCE.__dict__ | {"ids": [name]} | facts).items() if v is not None}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A Hub with a table, one of the layout of Toloka, and a gated one; and what was asked of it in three sessions."""
    there, root = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("root")
    for name in ("owner/Table", "gated/Table", "owner/ThreeWords"):
        local(there, name)
    fixtures.write_toloka(there, [fixtures.toloka_row(n) for n in range(3)])
    Hub.folder = there / "data" / "local"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    asks = [
        table("owner/Table"),
        table("owner/Table", revision=COMMIT),
        table("owner/Table", revision=OTHER),
        table("gated/Table"),
        table("owner/Nowhere"),
        table("owner/Nowhere", ids=["owner/Nowhere", "owner/ThreeWords"]),
        table("toloka/WSDMCup2023", split="test_public", columns=["image", "question"], config="default"),
        table("owner/Table", rows=4),
        table("owner/Table", split="test"),
        *({"how": "reachable", "name": name, "kind": "dataset"} for name in ("owner/Table", "gated/Table", "owner/No")),
        {"how": "reachable", "name": "owner/Table", "kind": "dataset", "revision": OTHER},
        *({"how": "cached", "name": f"owner/{name}", "kind": "dataset"} for name in ("Table", "ThreeWords", "No")),
    ]
    online = ask(root, asks, HF_ENDPOINT=address)
    pins = json.loads((root / "data" / "hub.json").read_text())
    offline = ask(root, [*asks[:4], asks[9]], HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    server.shutdown()
    server.server_close()
    dead = ask(root, [table("owner/Unseen", ids=["owner/Unseen", "owner/Table"]), asks[9]], HF_ENDPOINT=address)
    return {"root": root, "online": online, "pins": pins, "offline": offline, "dead": dead}


def test_a_table_is_downloaded_and_its_commit_is_kept(served):
    assert served["online"][0] == served["online"][1] == [f"owner/Table@{COMMIT[:18]} val", 3, "dict"]
    assert served["pins"] == {name: COMMIT for name in ("owner/Table", "owner/ThreeWords", "toloka/WSDMCup2023")}


def test_a_commit_that_is_gone_says_where_its_pin_is(served):
    kind, said = served["online"][2]
    assert kind == "OSError" and OTHER in said and "data/hub.json, or vrhlib/real.py" in said


def test_a_gated_table_says_how_to_get_in(served):
    kind, said = served["online"][3]
    assert kind == "OSError" and "is gated" in said and "hf auth login" in said
    assert "https://huggingface.co/datasets/gated/Table" in said and "data/local/gated/Table" in said


def test_an_unknown_table_is_not_replaced_and_the_next_id_is_tried(served):
    kind, said = served["online"][4]
    assert kind == "OSError" and said.startswith("owner/Nowhere is not on the Hub (any more)") and "data/local" in said
    assert served["online"][5][0].startswith("owner/ThreeWords@c0ffee")


def test_a_csv_table_with_a_configuration_of_another_name_is_read(served):
    assert served["online"][6] == [f"toloka/WSDMCup2023@{COMMIT[:18]} default test_public", 3, "str"]


def test_what_comes_from_the_hub_is_checked_like_a_local_copy(served):
    assert served["online"][7][0] == "ValueError" and f"at {COMMIT}" in served["online"][7][1]
    assert served["online"][8][0] == "OSError" and "the data set may have moved" in served["online"][8][1]


def test_what_can_be_had_is_known_before_it_is_loaded(served):
    there, gated, unknown, gone = served["online"][9:13]
    assert there is None and "is gated" in gated and "hf auth login" in gated
    assert "is not on the Hub" in unknown and f"no commit {OTHER}" in gone
    assert served["online"][13:] == [True, True, False]


def test_offline_the_same_table_comes_from_the_cache(served):
    assert served["offline"][0] == served["offline"][1] == served["online"][0]


def test_offline_another_commit_than_the_pinned_one_is_refused(served):
    kind, said = served["offline"][2]
    assert kind == "OSError" and f"at commit {COMMIT}, but {OTHER} is pinned" in said


def test_offline_a_table_that_was_never_loaded_says_how_to_bring_it(served):
    kind, said = served["offline"][3]
    assert kind == "OSError" and "gated/Table is not on this machine" in said and "HF_HOME" in said
    assert "HF_HUB_OFFLINE is set" in served["offline"][4]


def test_a_hub_that_does_not_answer_is_asked_once(served):
    kind, said = served["dead"][0]
    assert kind == "OSError" and "owner/Unseen is not on this machine and the Hub cannot be reached" in said
    assert "HTTPS_PROXY" in said and "owner/Table" not in said, "the other id would wait for the same network"
    assert "The Hub does not answer for owner/Table" in served["dead"][1]


# ---------------------------------------------------------------- single files


class Files(BaseHTTPRequestHandler):
    """Each path is served as its own text; some fail in their own way."""

    asked: list[str] = []

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.asked.append(self.path)
        if "missing" in self.path:
            return self.send_error(404)
        body, promised = self.path.encode(), len(self.path) + 5 * ("short" in self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8" if "page" in self.path else "image/jpeg")
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def files(shelf, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request._opener", None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Files.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_file_is_fetched_once_into_the_first_folder(shelf, files):
    found = hub.fetch("a.jpg", ["x", "y"], [f"{files}/a.jpg"])
    assert found == shelf / "data/local/x/a.jpg" and found.read_text() == "/a.jpg"
    assert hub.fetch("a.jpg", ["x", "y"], [f"{files}/a.jpg"]) == found and Files.asked == ["/a.jpg"]


def test_a_local_file_in_any_folder_goes_first(shelf, files):
    (shelf / "data/local/y").mkdir(parents=True)
    (shelf / "data/local/y/a.jpg").write_text("mine")
    assert hub.fetch("a.jpg", ["x", "y"], [f"{files}/a.jpg"]).read_text() == "mine" and Files.asked == []
    (shelf / "data/local/y/a.jpg").write_text("")
    assert hub.fetch("a.jpg", ["x", "y"], [f"{files}/a.jpg"]).read_text() == "/a.jpg", "an empty file is none"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/missing.jpg", r"\(404\)"), ("/page.jpg", "a web page in its place"), ("/short.jpg", "IncompleteRead")],
)
def test_the_next_address_is_tried_and_the_last_reason_is_told(shelf, files, path, reason):
    with pytest.raises(hub.FileMissing, match=reason):
        hub.fetch("a.jpg", ["x"], [f"{files}{path}"])
    assert not (shelf / "data/local/x/a.jpg").exists(), "nothing of it is kept"
    assert hub.fetch("a.jpg", ["x"], [f"{files}{path}", f"{files}/a.jpg"]).read_text() == "/a.jpg"


def test_a_file_of_another_checksum_is_fetched_again_or_refused(shelf, files):
    right = hashlib.sha256(b"/a.jpg").hexdigest()
    (shelf / "data/local/x").mkdir(parents=True)
    (shelf / "data/local/x/a.jpg").write_text("another")
    assert hub.fetch("a.jpg", ["x"], [f"{files}/b.jpg", f"{files}/a.jpg"], right).read_text() == "/a.jpg"
    with pytest.raises(hub.FileMissing, match="another file"):
        hub.fetch("a.jpg", ["x"], [f"{files}/b.jpg"], "0" * 64)
    assert not (shelf / "data/local/x/a.jpg").exists()


def test_a_host_that_does_not_answer_is_given_up(shelf, files, monkeypatch):
    import urllib.request

    tried, ask_for = [], urllib.request.urlopen
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: (tried.append(url), ask_for(url, timeout=1))[1])
    for n in range(5):
        assert hub.fetch(f"{n}.jpg", ["x"], ["http://127.0.0.1:9/a.jpg", f"{files}/{n}.jpg"]).exists()
    assert sum(":9/" in url for url in tried) == hub.GIVE_UP == 3
    with pytest.raises(hub.FileMissing, match="no answer from 127.0.0.1:9, given up"):
        hub.fetch("6.jpg", ["x"], ["http://127.0.0.1:9/a.jpg"])
    for n in range(5):  # a file that is not there is an answer
        with pytest.raises(hub.FileMissing, match="404"):
            hub.fetch("7.jpg", ["x"], [f"{files}/missing{n}.jpg"])


def test_what_is_no_address_is_no_file(shelf, files):
    for url in ("elephant.jpg", "", "ftp:/x"):
        with pytest.raises(hub.FileMissing):
            hub.fetch("a.jpg", ["x"], [url])


def test_offline_nothing_is_fetched(shelf):
    with pytest.raises(hub.FileMissing, match="not in data/local, and HF_HUB_OFFLINE forbids to fetch it"):
        hub.fetch("a.jpg", ["x"], ["http://127.0.0.1:9/a.jpg"])


def test_a_folder_that_cannot_be_written_is_an_error_not_a_missing_file(shelf, files):
    (shelf / "data").mkdir(exist_ok=True)
    (shelf / "data" / "local").write_text("a file in its place")
    with pytest.raises(OSError, match="Cannot write") as error:
        hub.fetch("a.jpg", ["x"], [f"{files}/a.jpg"])
    assert not isinstance(error.value, hub.FileMissing)


# ---------------------------------------------------------------- before a run


def test_free_space_is_that_of_the_nearest_folder_there_is(tmp_path):
    import shutil

    assert hub.free_gb(tmp_path / "not" / "yet" / "there") == pytest.approx(
        shutil.disk_usage(tmp_path).free / 1e9, rel=0.1
    )


def test_a_local_copy_counts_as_cached(shelf):
    assert not hub.cached("owner/Table", "dataset") and not hub.cached("owner/Model", "model")
    local(shelf)
    (store.ROOT / "data" / "local" / "owner" / "Model").mkdir()
    assert hub.cached("owner/Table", "dataset") and hub.cached("owner/Model", "model")
