"""What is up to date is not run again: every single thing a notebook depends on makes it stale, and is named."""

import contextlib
import io
import json
import sys
import threading
from pathlib import Path

import pytest

from tests.test_notebooks_runner import write_notebook
from vrhlib import jobs, notebooks, store, uptodate

WRITES = """
import json
from vrhlib import store
for name in ("head_map", "other"):
    about = store.manifest() | ({"notebook": "09_other"} if name == "other" else {})
    store.write_atomic(store.figures_dir(PROFILE) / f"{name}.png", b"a picture")
    store.write_atomic(store.figures_dir(PROFILE) / f"{name}.json", json.dumps(about))
heads = {"scores": [], "manifest": store.manifest()}
store.write_atomic(store.heads_dir(PROFILE) / "a-model-2.5__scenes.json", json.dumps(heads))
claims = store.figures_dir(PROFILE) / "claims.csv"
claims.write_text("id,verdict,notebook\\nx,matches,01_one\\ny,differs,02_two\\n")
print("ran")
"""


class Here:
    """In place of a job: the cells are run in this process, which takes no time."""

    def __init__(self, command, folder, environment, tell, ended):
        profile, name, *overrides = command[command.index("--profile") + 1 :]
        (book,) = notebooks.select([name])
        self.ledger, self.seconds, self.failed, names = folder / "ledger.jsonl", 0.0, None, {}
        values = notebooks.bind([book], dict(word.split("=", 1) for word in overrides))[name]
        first, *cells = book.cells("code")
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
            patch.setenv("VRH_NOTEBOOK", name)
            exec(first, names)
            names |= values | {"PROFILE": profile}
            try:
                for cell in cells:
                    exec(cell, names)
                store.write_atomic(book.rendered(profile), json.dumps([names["PROFILE"], str(values)]))
            except AssertionError as error:
                self.failed = repr(error)
        for line in said.getvalue().splitlines():
            tell(line, sys.stdout)
        ended.put(self)

    def error(self) -> str | None:
        return self.failed


def say(capsys, *words: str) -> str:
    assert notebooks.main(["run", "--jobs", "1", *words]) == 0
    return capsys.readouterr().out


def ran(out: str) -> bool:
    return "      ran" in out.splitlines()


@pytest.fixture
def checkout(root, monkeypatch):
    """01_one, with a library, models and published numbers that a test may change."""
    for name in ("data/nano/a-model/weights", "data/paper/claims.csv", "vrhlib/evaluate.py", "vrhlib/widgets/draw.js"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("as it was")
    stale = json.dumps({"notebook": "01_one", "written": "2001-01-01T00:00:00Z"})
    store.write_atomic(store.figures_dir("nano") / "of_an_older_version.json", stale)
    write_notebook(root, "01_one", WRITES)
    monkeypatch.setattr(uptodate, "__file__", str(root / "vrhlib" / "uptodate.py"))
    monkeypatch.setattr(jobs, "end", lambda started, grace: None)
    return root


@pytest.fixture
def ran_once(checkout, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "Job", Here)
    assert ran(out := say(capsys)) and "      not up to date: never ran here" in out
    return checkout


def record(root: Path) -> dict:
    return json.loads((root / "data/runs/nano/notebooks.json").read_text())["notebooks"]["01_one"]


def test_what_ran_whole_is_not_run_again_and_says_since_when(checkout, capsys):
    assert ran(say(capsys)), "with a kernel of its own"
    ran_once = checkout
    assert sorted(record(ran_once)["outputs"]) == [
        "data/heads/nano/a-model-2.5__scenes.json", "figures/nano/claims.csv", "figures/nano/head_map.json",
        "figures/nano/head_map.png", "notebooks/rendered/nano/01_one.ipynb",
    ]  # fmt: skip
    out = say(capsys)
    assert not ran(out)
    since = record(ran_once)["finished"]
    assert f"01_one: up to date since {since} (nothing it depends on changed); --again runs it all the same" in out
    assert out.split("status")[1].split("figures:")[0].split()[-5:] == ["01_one", "-", "up", "to", "date"]
    assert ran(out := say(capsys, "--again")) and "up to date, run --again" in out
    assert not ran(say(capsys)), "and then it is up to date once more"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("vrhlib/evaluate.py", "vrhlib/evaluate.py changed"),
        ("vrhlib/widgets/draw.js", "vrhlib/widgets/draw.js changed"),
        ("vrhlib/new.css", "vrhlib/new.css is new"),
        ("data/nano/a-model/weights", "data/nano/a-model/weights changed"),
        ("data/paper/claims.csv", "data/paper/claims.csv changed"),
        ("figures/nano/head_map.png", "figures/nano/head_map.png is missing or was changed"),
        ("data/heads/nano/a-model-2.5__scenes.json", "data/heads/nano/a-model-2.5__scenes.json is missing or"),
        ("notebooks/rendered/nano/01_one.ipynb", "notebooks/rendered/nano/01_one.ipynb is missing or was changed"),
    ],
)  # fmt: skip
def test_a_changed_file_makes_it_stale_and_is_named(ran_once, capsys, change, said):
    (ran_once / change).write_text("another")
    assert ran(out := say(capsys)) and f"      not up to date: {said}" in out


@pytest.mark.parametrize("gone", ["figures/nano/head_map.png", "figures/nano/claims.csv", "vrhlib/evaluate.py"])
def test_a_missing_file_makes_it_stale_and_is_named(ran_once, capsys, gone):
    (ran_once / gone).unlink()
    assert ran(out := say(capsys)) and f"not up to date: {gone} is" in out


def test_what_it_does_not_depend_on_leaves_it_up_to_date(ran_once, capsys):
    for name in ("figures/nano/other.png", "figures/nano/of_an_older_version.json", "vrhlib/notes.txt", "README.md"):
        (ran_once / name).write_text("another")
    claims = ran_once / "figures/nano/claims.csv"
    claims.write_text(claims.read_text().replace("y,differs", "y,matches"))  # another notebook judged anew
    assert not ran(say(capsys))
    claims.write_text(claims.read_text().replace("x,matches", "x,differs"))
    assert ran(say(capsys))


def test_parameters_cells_settings_and_versions_count(ran_once, capsys, monkeypatch):
    assert "not up to date: K=3 was 20, RATE=1.0 was 0.5" in say(capsys, "K=3", "RATE=1")
    assert "not up to date: K=20 was 3" in say(capsys, "RATE=1")
    write_notebook(ran_once, "01_one", WRITES, "1 + 1")
    assert "not up to date: RATE=0.5 was 1.0, its code changed" in say(capsys).replace(
        "its code changed, RATE=0.5 was 1.0", "RATE=0.5 was 1.0, its code changed"
    )
    book = json.loads((path := ran_once / "notebooks" / "01_one.ipynb").read_text())
    book["cells"][0]["source"] = ["# Another claim"]
    path.write_text(json.dumps(book))
    assert "not up to date: its prose changed" in say(capsys)
    assert "not up to date: VRHLIB_STRICT=1 was unset" in say(capsys, "--strict")
    assert not ran(say(capsys, "--strict"))
    assert "not up to date: VRHLIB_STRICT=unset was 1" in say(capsys)
    monkeypatch.setenv("VRHLIB_DEVICE", "cpu")
    assert "not up to date: VRHLIB_DEVICE=cpu was unset" in say(capsys)
    monkeypatch.setattr(store, "versions", lambda: {"torch": "9.9"})
    assert "torch 9.9 was " in say(capsys)


def test_a_run_that_failed_is_not_remembered_and_forgets_the_one_before(ran_once, capsys, monkeypatch):
    monkeypatch.setenv("FAIL", "1")
    write_notebook(ran_once, "01_one", WRITES, "import os; assert 'FAIL' not in os.environ; 1")
    assert notebooks.main(["run"]) == 1
    write_notebook(ran_once, "01_one", WRITES)  # as it was when it ran whole, and so are all outputs
    capsys.readouterr()
    assert "not up to date: never ran here" in say(capsys)


def test_what_changes_while_it_runs_makes_it_stale(ran_once, capsys):
    edit = f"open({str(ran_once / 'vrhlib' / 'evaluate.py')!r}, 'a').write('edited')"
    write_notebook(ran_once, "01_one", WRITES, edit)
    assert "its code changed" in say(capsys)
    assert "not up to date: vrhlib/evaluate.py changed" in say(capsys)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"half": ',
        "[" * 9999,
        '{"format": 2, "notebooks": {}}',
        '{"format": 1, "notebooks": {"01_one": {}}}',
        '{"format": 1, "notebooks": {"01_one": {"finished": "now", "inputs": {}, "outputs": {"a": "b"}}}}',
        "outputs: {}",
        "outputs: nothing",
        "outputs: elsewhere",
        "\xff",
    ],
)
def test_a_record_that_is_none_is_named_and_never_trusted(ran_once, capsys, content):
    path = ran_once / "data/runs/nano/notebooks.json"
    whole = json.loads(path.read_text())
    outputs = whole["notebooks"]["01_one"]["outputs"]
    if content == "outputs: {}":
        outputs.clear()
    elif content == "outputs: nothing":
        outputs["figures/nano/head_map.png"] = None
    elif content == "outputs: elsewhere":
        outputs["figures/nano/../../notebooks/01_one.ipynb"] = "0"
    path.write_text(json.dumps(whole) if content.startswith("outputs") else content, encoding="latin-1")
    assert notebooks.main(["run"]) == 0
    out, err = capsys.readouterr()
    assert ran(out) and "data/runs/nano/notebooks.json is no record of finished notebooks" in err
    assert not ran(say(capsys)), "it is written anew"


def test_a_record_outside_its_folder_is_not_read(ran_once):
    entry = record(ran_once)
    entry["outputs"]["/dev/zero"] = "0"
    path = ran_once / "data/runs/nano/notebooks.json"
    path.write_text(json.dumps({"format": 1, "notebooks": {"01_one": entry}}))
    records, problem = uptodate.recorded("nano")
    assert records == {} and "/dev/zero" in problem


def test_records_of_other_notebooks_and_profiles_are_kept(ran_once, capsys, monkeypatch):
    write_notebook(ran_once, "02_two", "print('ran two')")
    say(capsys, "02")
    out = say(capsys)
    assert out.count("up to date since") == 2
    monkeypatch.setattr(notebooks.plan, "check", lambda run: [])
    assert "not up to date: never ran here" in say(capsys, "--profile", "paper", "02")
    monkeypatch.setattr(notebooks.plan, "check", lambda run: 1 / 0)
    out = say(capsys, "--profile", "paper", "02")
    assert "02_two: up to date since" in out and "Looking at GPU" not in out, "nothing is spent, nothing is checked"
    (ran_once / "data/local/Org/model").mkdir(parents=True)
    (ran_once / "data/local/Org/model/weights").write_text("put there by hand")
    monkeypatch.setattr(notebooks.plan, "check", lambda run: [])
    assert "not up to date: data/local changed" in say(capsys, "--profile", "paper", "02")
    assert say(capsys).count("up to date since") == 2, "the nano profile has nothing to do with it"


def test_runners_that_share_a_folder_wait_for_each_other(checkout):
    """Else each would write what it had read before, and one record would be lost."""
    written = {"notebooks/rendered/nano/02_two.ipynb": "0"}
    inputs = uptodate.inputs(uptodate.shared("nano"), [], [], {})
    other = threading.Thread(target=uptodate.remember, args=("nano", "02_two", inputs, written))
    with store.held(uptodate.record_file("nano")):
        other.start()
        other.join(timeout=0.5)
        assert other.is_alive() and uptodate.recorded("nano") == ({}, "")
    other.join(timeout=30)
    assert list(uptodate.recorded("nano")[0]) == ["02_two"]


def test_the_decision_needs_no_torch(ran_once, capsys, monkeypatch):
    for name in ("torch", "transformers", "papermill"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not ran(say(capsys))


def test_the_library_is_all_that_is_imported_or_shown(root):
    """The real package, not that of `checkout`."""
    names = uptodate.shared("nano")["files"]
    assert {"vrhlib/evaluate.py", "vrhlib/nano/scenes.py", "vrhlib/widgets/page.js", "vrhlib/widgets/page.html",
            "vrhlib/widgets/canvases.css"} <= names.keys()  # fmt: skip
    assert not [name for name in names if "__pycache__" in name]


def test_long_lists_of_changes_are_cut():
    assert uptodate.listed("abc") == "a, b, c" and uptodate.listed("abcde") == "a, b, c and 2 more"
