"""The notebook runner, on tiny notebooks that need no model: what it refuses, survives and leaves behind."""

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from vrhlib import notebooks, plan, store

PARAMETERS = 'PROFILE = "nano"\nK = 20\nKS = [1, 2, 5]\nRATE = 0.5\nMODEL = "qwen"\nLIVE = True'
FAIL = "print('before')\nraise ValueError('the first line\\nand a second')"
PROVENANCE = "import json, os, sys\nprint('facts', json.dumps([sys.executable, PROFILE, K, os.environ['VRH_NOTEBOOK'],"
PROVENANCE += " os.environ['VRH_PROGRESS'], os.getcwd()]))\nimport vrhlib; print('vrhlib', vrhlib.__path__[0])"


def write_notebook(root: Path, name: str, *sources: str, parameters: str = PARAMETERS, **metadata) -> Path:
    cells = [new_markdown_cell(f"# {name} makes a claim\n\nAnd some prose.")]
    cells += [new_code_cell(parameters, metadata={"tags": ["parameters"]})] if parameters else []
    book = new_notebook(cells=[*cells, *map(new_code_cell, sources)], metadata=metadata)
    path = root / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(book, path)
    return path


def outputs(path: Path) -> list[dict]:
    return [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", ())]


def stdout(path: Path) -> str:
    return "".join("".join(o["text"]) for o in outputs(path) if o.get("name") == "stdout")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty root, with a `python3` kernel registered for the user that cannot run anything."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": ["/bin/false"], "display_name": "wrong", "language": "python"}))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PATH", "")  # the runner sets it; monkeypatch takes it back
    monkeypatch.setattr(store, "ROOT", tmp_path)
    return tmp_path


# ---- refusals: one line on stderr, exit 2, and nothing has run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["09"], "No notebook '09'; there are 01_one, 02_two."),
        (["k=3"], "No parameter k in 01_one, 02_two; did you mean K?"),
        (["MODLE=x"], "No parameter MODLE in 01_one, 02_two; did you mean MODEL?"),
        (["01", "ONLY_TWO=3"], "No parameter ONLY_TWO in 01_one; there are K, KS, LIVE, MODEL, RATE."),
        (["K=3.5"], "K=3.5 is not a whole number; the default is K=20."),
        (["K=many"], "K=many is not a whole number; the default is K=20."),
        (["K="], "K= is not a whole number; the default is K=20."),
        (["K=True"], "K=True is not a whole number; the default is K=20."),
        (["KS=3"], "KS=3 is not a list like it; the default is KS=[1,2,5]."),
        (["KS=['a']"], "KS=['a'] is not a list like it; the default is KS=[1,2,5]."),
        (["RATE=fast"], "RATE=fast is not a number; the default is RATE=0.5."),
        (["LIVE=1"], "LIVE=1 is not True or False; the default is LIVE=True."),
        (["PROFILE=paper"], "The profile is a word of its own: ./run_all.sh paper"),
        (["--jobs", "0"], "--jobs takes a whole number >= 1, got '0'."),
        (["--jobs", "two"], "--jobs takes a whole number >= 1, got 'two'."),
        (
            ["--cluster", "0"],
            "--cluster takes a number of worker processes or an address like tcp://host:8786, got '0'.",
        ),
        (["--cluster", ""], "--cluster takes a number of worker processes"),
        (["--limit", "0"], "--limit takes a whole number >= 1, got '0'."),
        (["--limit", "1.5"], "--limit takes a whole number >= 1, got '1.5'."),
        (["--limit=3", "N_TEST=4"], "--limit 3 means N_TEST=3; give one of the two, not N_TEST=4 too."),
        (["--limit", "3", "01"], "No parameter N_TEST in 01_one"),
        (["MODELS=nano-qwen3"], "02_two: Unknown model of the nano profile 'nano-qwen3'; there are 'nano-qwen2.5-vl'"),
        (["MODELS=qwen3-vl-8b"], "02_two: Unknown model of the nano profile 'qwen3-vl-8b'"),
        (["BENCHMARKS=scene"], "02_two: Unknown benchmark of the nano profile 'scene'"),
        (["N_TEST=-2"], "02_two: N_TEST=-2: it takes a number, or 0 for the profile's."),
        (["--profile", "paper", "K=many"], "K=many is not a whole number"),
        (["--profile", "paper", "MODELS=qwen3-vl"], "Unknown model of the paper profile 'qwen3-vl'"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line_before_anything_runs(root, capsys, monkeypatch, words, message):
    monkeypatch.setattr(plan, "check", None)  # nor is the Hub asked
    write_notebook(root, "01_one", "open('ran', 'w')")
    two = PARAMETERS + "\nONLY_TWO = 1\nN_TEST = 0\nMODELS = []\nBENCHMARKS = []"
    write_notebook(root, "02_two", "open('ran', 'w')", parameters=two)
    assert notebooks.main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1
    assert not out and not list(root.rglob("ran"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("K = 20", "must assign PROFILE"),
        ("", "exactly one cell tagged `parameters`"),
        ('PROFILE = "nano"\nN: int = 3', "only lines like `K = 20`"),
        ('PROFILE = "nano"\nN = len("abc")', "only lines like `K = 20`"),
        ('PROFILE = "nano"\nA, B = 1, 2', "only lines like `K = 20`"),
        ('PROFILE = "nano', "only lines like `K = 20`"),
    ],
)
def test_a_parameters_cell_that_papermill_cannot_override_is_refused(root, capsys, parameters, message):
    write_notebook(root, "01_one", parameters=parameters)
    assert notebooks.main(["run"]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_notebook_is_refused_by_name(root, capsys):
    write_notebook(root, "01_one").write_text("{}")
    assert notebooks.main(["plan"]) == 2
    assert "01_one.ipynb is not a notebook" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("3", 20, 3),
        ("-3", 20, -3),
        ("3", 0.5, 3.0),
        ("1e-3", 0.5, 1e-3),
        ("qwen3", "x", "qwen3"),
        ("7", "x", "7"),
        ("'7'", "x", "7"),
        ("a=b", "x", "a=b"),
        ("False", True, False),
        ("[1, 2]", [5], [1, 2]),
        ("1,2", [5], [1, 2]),
        ("[]", [5], []),
        ("['a']", [], ["a"]),
        ("one,two-2.5", [], ["one", "two-2.5"]),  # MODELS=one,two
        ("one", ["a"], ["one"]),
        ("None", None, None),
    ],
)
def test_a_value_takes_the_type_of_the_default(text, default, value):
    parsed = notebooks.parse_value("NAME", text, default)
    assert parsed == value and type(parsed) is type(value)


def test_notebooks_are_selected_by_number_or_name_and_run_in_order(root):
    for name in ("03_c", "01_a", "02_b"):
        write_notebook(root, name)
    assert [n.name for n in notebooks.select(["02_b", "01", "01_a"])] == ["01_a", "02_b"]
    assert [n.name for n in notebooks.select([])] == ["01_a", "02_b", "03_c"]


# ---- runs


def test_one_failing_notebook_does_not_stop_the_others(root, capsys, monkeypatch):
    write_notebook(root, "01_good", PROVENANCE, vrhlib={"cost": {"nano": "3 min, 1 GiB"}})
    write_notebook(root, "02_bad", FAIL, "print('after')", parameters='PROFILE = "nano"')
    write_notebook(root, "03_also_good", "print('here too', K)")
    assert notebooks.main(["run", "--jobs", "1", "K=3"]) == 1
    out, err = capsys.readouterr()
    rendered = root / "notebooks" / "rendered" / "nano"

    # what was said
    assert "[1/3] 01_good: 01_good makes a claim" in out and "nano profile, cost 3 min, 1 GiB, K=3" in out
    assert "K is not a parameter of 02_bad; it is passed to the others only." in out
    assert "      here too 3" in out.splitlines(), "the notebook's own lines are passed on"
    assert [line.split()[-1] for line in out.splitlines()[-5:-2]] == ["ok", "FAILED", "ok"]
    assert "figures: figures/nano/" in out
    assert "02_bad failed: ValueError: the first line and a second" in err
    assert "notebooks/rendered/nano/02_bad.failed.ipynb" in err
    assert "./run_all.sh nano 02 --jobs 1   (finished samples are kept)" in err, "02_bad has no K and would refuse it"

    # what was left
    copies = sorted(path.name for path in rendered.iterdir())
    assert copies == ["01_good.ipynb", "02_bad.failed.ipynb", "03_also_good.ipynb"]
    assert stdout(rendered / "02_bad.failed.ipynb") == "before\n"

    # which Python ran it, and as what
    lines = dict(line.split(" ", 1) for line in stdout(rendered / "01_good.ipynb").splitlines())
    assert json.loads(lines["facts"]) == [sys.executable, "nano", 3, "01_good", "text", str(root / "notebooks")]
    assert Path(lines["vrhlib"]) == Path(notebooks.__file__).parent

    # mended, it runs, and the failed copy goes
    write_notebook(root, "02_bad", "print('mended')")
    assert notebooks.main(["run", "02"]) == 0
    assert not (rendered / "02_bad.failed.ipynb").exists() and stdout(rendered / "02_bad.ipynb") == "mended\n"


def test_a_rendered_copy_carries_no_widget_state_and_no_path_of_this_machine(root):
    live = "from IPython.display import display\nimport ipywidgets\ndisplay(ipywidgets.IntSlider(7))\n"
    live += f"display({{'text/plain': 'x', 'image/png': 'aGk=', {notebooks._WIDGET_VIEW!r}: {{}}}}, raw=True)"
    source = write_notebook(root, "01_live", live, vrhlib={"cost": {"nano": "1 s"}})
    before = source.read_text()
    assert notebooks.main(["run"]) == 0
    copy = root / "notebooks" / "rendered" / "nano" / "01_live.ipynb"
    metadata = json.loads(copy.read_text())["metadata"]
    assert "widgets" not in metadata
    assert not {"input_path", "output_path", "environment"} & set(metadata["papermill"])
    assert str(root) not in copy.read_text()
    assert any(set(o.get("data", ())) == {"text/plain", "image/png"} for o in outputs(copy)), "the picture stays, alone"
    assert metadata["vrhlib"]["cost"] == {"nano": "1 s"}
    nbformat.validate(nbformat.read(copy, as_version=4))
    assert source.read_text() == before


def test_a_copy_that_cannot_be_written_is_a_failure_with_a_next_step(root, capsys):
    write_notebook(root, "01_good", "print('fine')")
    (root / "notebooks" / "rendered").write_text("a file where a folder should be")
    assert notebooks.main(["run"]) == 1
    assert "01_good failed: OSError: Cannot write" in capsys.readouterr().err


def test_progress_becomes_one_line_per_state(capsys):
    stream = notebooks._Lines(sys.stdout)
    for text in ("\rval  0/9", "\rval  4/9  ", "\rval  4/9", "\rval  9/9\n", "half a ", "line\n\n"):
        stream.write(text)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["val  0/9", "val  4/9", "val  9/9", "half a line"]


def test_a_paper_run_begins_only_if_nothing_stands_in_its_way(root, capsys, monkeypatch):
    parameters = PARAMETERS + "\nN_TEST = 0\nMODELS = []"
    write_notebook(root, "01_one", "print('ran on', PROFILE, N_TEST)", parameters=parameters)
    write_notebook(root, "02_two", parameters='PROFILE = "nano"')
    seen = []
    monkeypatch.setattr(plan, "check", lambda run: seen.append(run.given) or ["no GPU here", "no disk there"])
    words = ["run", "--profile", "paper", "--limit", "7", "MODELS=qwen3-vl-8b"]
    assert notebooks.main(words) == 1
    out, err = capsys.readouterr()
    given = {"N_TEST": 7, "MODELS": ["qwen3-vl-8b"], "K": 20, "PROFILE": "paper"}
    assert given.items() <= seen[0]["01_one"].items() and seen[0]["02_two"] == {"PROFILE": "paper"}
    assert err.splitlines()[:2] == ["vrhlib: no GPU here", "vrhlib: no disk there"]
    assert "./run_all.sh plan paper 01 02 MODELS=qwen3-vl-8b N_TEST=7" in err
    assert "[1/2]" not in out and not (root / "notebooks" / "rendered").exists()

    monkeypatch.setattr(plan, "check", lambda run: [])
    assert notebooks.main(words) == 0
    out = capsys.readouterr().out
    assert "      ran on paper 7" in out.splitlines() and "days" not in out
    assert "N_TEST is not a parameter of 02_two; it is passed to the others only." in out

    monkeypatch.setenv("VRHLIB_DEVICE", "cpu")
    assert notebooks.main([*words, "01"]) == 0
    assert "VRHLIB_DEVICE=cpu. Hours become days," in capsys.readouterr().out


def test_a_nano_run_asks_for_nothing(root, monkeypatch):
    monkeypatch.setattr(plan, "check", None)
    write_notebook(root, "01_one")
    assert notebooks.main(["run"]) == 0


# ---- plan


def write_run(root: Path, name: str, **manifest) -> None:
    folder = root / "data" / "runs" / "nano"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(manifest))


def test_plan_says_cost_age_and_what_is_cached(root, capsys, monkeypatch):
    source = write_notebook(root, "01_one", "1 + 1", vrhlib={"cost": {"nano": "3 min, 1 GiB", "paper": "2 h, 40 GiB"}})
    write_notebook(root, "02_two")
    write_run(root, "a.json", notebook="01_one", complete=True, samples=200)
    write_run(root, "b.json", notebook="01_one", complete=False, samples=30)
    write_run(root, "c.json", half="a manifest")
    monkeypatch.setitem(sys.modules, "papermill", None)  # a plan needs neither papermill nor torch

    def rows(*words: str) -> list[list[str]]:
        assert notebooks.main(["plan", *words]) == 0
        return [line.split("  ") for line in capsys.readouterr().out.splitlines()[2:]]

    one, two = rows()
    assert one[0] == "01_one" and one[-1] == "01_one makes a claim"
    assert {"3 min, 1 GiB", "2 runs (1 unfinished), 230 samples"} <= set(one) and " never" in "  ".join(one)
    assert "?" in "  ".join(two) and "-" in "  ".join(two)
    assert rows("01", "K=3")[0] == one, "parameters are taken"
    paper = "  ".join(rows("--profile", "paper", "01")[0]).split()
    assert paper[:4] == ["01_one", "?", "?", "never"], "nobody wrote down what 01_one runs"

    copy = root / "notebooks" / "rendered" / "nano" / "01_one.ipynb"
    copy.parent.mkdir(parents=True)
    book = json.loads(source.read_text())
    book["metadata"]["papermill"] = {"end_time": "2026-01-02T03:04:05", "parameters": {"PROFILE": "nano", "K": 3}}
    book["metadata"]["vrhlib"] = {"source": notebooks.Notebook(source).source}
    copy.write_text(json.dumps(book))
    assert "2026-01-02 K=3" in "  ".join(rows("01")[0])
    write_notebook(root, "01_one", "1 + 2")
    assert "2026-01-02 K=3 (source changed since)" in "  ".join(rows("01")[0])


def test_plan_shows_what_the_embedded_models_can_do(root, capsys):
    write_notebook(root, "01_one")
    folder = root / "data" / "nano"
    folder.mkdir(parents=True)
    rows = [
        {"benchmark": "boxes", "like": "RefX", "family": "grounding", "n": 1000, "accuracy": 87.25,
         "two_questions": 70.5},
        {"benchmark": "words", "like": "VX", "family": "questions", "n": 1000, "accuracy": 64.0, "chance": 14.3,
         "guess": 20.0, "blind": 35.5},
    ]  # fmt: skip
    cut = [{"benchmark": "boxes", "condition": c, "k": k, "n": 300, "accuracy": a}
           for c, k, a in (("unmasked", 0, 87), ("vrh", 8, 21), ("vrh", 12, 3), ("random", 8, 84), ("random", 8, 86),
                           ("layer_matched", 8, 60))]  # fmt: skip
    other = [rows[1] | {"accuracy": 70.0, "bystander": 50.0}, rows[0] | {"accuracy": 91.0, "n": 500}]  # another order
    for name, mine in (("nano-qwen3-vl", other), ("nano-internvl3", rows)):
        (folder / f"{name}.json").write_text(json.dumps({"model": name, "benchmarks": mine, "ablation": cut, "k": 8}))
    assert notebooks.main(["plan"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["benchmark", "stands", "for", "internvl3", "qwen3-vl"] in lines
    assert ["boxes", "RefX", "87.2", "(70.5)", "91.0", "(70.5)"] in lines
    assert ["words", "VX", "64.0", "(35.5)", "70.0", "(50.0)"] in lines
    assert ["boxes", *"87 > 8: 21 | 85 | 60, 87 > 12: 3 | - | -".split() * 2] in lines and "n=500 or 1000" in " ".join(
        map(" ".join, lines)
    )
    assert notebooks.main(["plan", "--profile", "paper"]) == 0
    assert "RefX" not in capsys.readouterr().out, "what the nano models can do says nothing about a paper run"


def test_parameters_and_limit_change_what_a_plan_counts(root, capsys):
    source = Path(notebooks.__file__).parents[1] / "notebooks" / "01_detect.ipynb"
    (root / "notebooks").mkdir()
    (root / "notebooks" / source.name).write_text(source.read_text())

    def sequences(*words: str) -> int:
        assert notebooks.main(["plan", *words]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("01_detect"))
        return int(re.split(r"\s{2,}", line)[2].replace(",", ""))

    for name in store.PROFILES:
        usual = sequences("--profile", name)
        assert sequences("--profile", name, "--limit", "9") == sequences("--profile", name, "N_TEST=9") < usual / 8
        assert sequences("--profile", name, "N_DETECT=9") < usual
    assert notebooks.main(["plan", "KK=3"]) == 2, "and a typo is one here as well"


def test_a_plan_says_which_package_it_lacks(root, capsys, monkeypatch):
    write_notebook(root, "01_one", parameters='PROFILE = "nano"\nBENCHMARKS = []')
    monkeypatch.setattr(plan, "benchmark_table", lambda: __import__("no_such_package"))
    assert notebooks.main(["plan"]) == 0, "embedded models need no table of benchmarks"
    assert notebooks.main(["plan", "BENCHMARKS=scenes"]) == 1
    assert "this needs no_such_package" in capsys.readouterr().err
