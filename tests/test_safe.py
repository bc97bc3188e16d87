"""No pickle is read, nothing is evaluated, no code comes from elsewhere: looked for in the sources, not hoped for."""

import ast
import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("[0-9]*.ipynb"))
SOURCES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for folder in ("vrhlib", "benchmarks")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
} | {
    path.name: "\n".join(
        "".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"
    )
    for path in NOTEBOOKS
}
UNSAFE = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle"}
REMOTE = re.compile(r"""(?:src|href)\s*=\s*["'](?:https?:)?//|import\s*\(?\s*["']https?:|url\(\s*["']?https?:""", re.I)


def dangers(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        found += [f"import {name}" for name in names if name.split(".")[0] in UNSAFE]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "compile", "__import__", "os.system", "torch.hub.load", "pandas.read_pickle"):
                found.append(called)
            if called in ("torch.load", "np.load", "numpy.load") or called.endswith("read_pickle"):
                found.append(called)
            for keyword in node.keywords:
                safe = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not safe:
                    found.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_reads_no_pickle_evaluates_nothing_and_trusts_no_remote_code(name):
    assert dangers(SOURCES[name]) == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from dill import loads", "eval(text)", "exec('x')", "torch.load(path)", "pd.read_pickle(p)",
     "np.load(p, allow_pickle=True)", "f(trust_remote_code=True)", "f(trust_remote_code=flag)", "run(c, shell=True)"],
)  # fmt: skip
def test_each_of_these_would_be_noticed(source):
    assert dangers(source)


def test_weights_are_read_from_safetensors_only():
    calls = re.findall(r"from_pretrained,? ?\(?[^#]*?\)", SOURCES["vrhlib/vlm.py"], re.S)
    assert any("use_safetensors=True" in call for call in calls)
    assert not list(REPOSITORY.glob("data/**/*.bin")) + list(REPOSITORY.glob("data/**/*.pt"))


@pytest.mark.parametrize(
    "path",
    [*NOTEBOOKS, *sorted((REPOSITORY / "notebooks/rendered").rglob("*.ipynb")),
     *sorted((REPOSITORY / "vrhlib").rglob("*.js")), *sorted((REPOSITORY / "vrhlib").rglob("*.html")),
     *sorted((REPOSITORY / "vrhlib").rglob("*.css"))],
    ids=lambda path: path.name,
)  # fmt: skip
def test_nothing_that_is_shown_loads_a_script_or_style_from_elsewhere(path):
    text = path.read_text()
    if path.suffix == ".ipynb":  # what a browser would run: HTML and JavaScript in outputs
        shown = [
            "".join(data) if isinstance(data, list) else str(data)
            for cell in json.loads(text)["cells"]
            for output in cell.get("outputs", ())
            for kind, data in output.get("data", {}).items()
            if kind in ("text/html", "application/javascript", "image/svg+xml")
        ]
        text = "\n".join(shown)
    assert not REMOTE.search(re.sub(r"<a\s[^>]*>", "", text)), (
        "a link may be clicked; a script or style would be fetched"
    )


def test_a_remote_script_would_be_noticed():
    for text in ('<script src="https://cdn.x/y.js">', "import('https://esm.sh/d3')", "<link href='//cdn/x.css'>",
                 "background: url(https://x/y.png)"):  # fmt: skip
        assert REMOTE.search(text)
