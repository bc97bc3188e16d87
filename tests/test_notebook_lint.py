"""What a notebook here looks like: prose with a little code, no machinery, no outputs, parameters papermill can see."""

import ast
import json
import re
from pathlib import Path

import pytest

from vrhlib.notebooks import Notebook

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} | {"figures", "data", "notebooks"}
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    found = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]
    return [cell | {"source": "".join(cell["source"])} for cell in found]


def code_lines(source: str) -> list[str]:
    return [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]


def words(cells: list[dict]) -> int:
    return sum(len(re.findall(r"\w+", cell["source"])) for cell in cells)


def path_literals(source: str) -> list[str]:
    """Strings that name a file or a folder. `Qwen/Qwen3-VL-8B` and `on/off` don't; `figures/x` and `x.csv` do."""
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [s for s in strings if " " not in s.strip() and _names_a_file(s.strip())]


def _names_a_file(text: str) -> bool:
    if text.startswith(("/", "./", "../", "~/")) and len(text) > 2:
        return True
    file = re.search(r"\w\.(csv|jsonl?|png|pdf|svg|ipynb|md|txt|ya?ml|npz|pt|safetensors)$", text)
    return bool(file) or ("/" in text and text.split("/")[0] in FOLDERS)


def machinery(source: str) -> list[str]:
    """Definitions and direct plotting: both belong in vrhlib, where they are tested."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(f"def {node.name}")
        elif isinstance(node, ast.Name) and node.id in ("plt", "pyplot"):
            found.append(node.id)
    return found


def test_there_are_notebooks_and_their_names_are_numbered():
    assert NOTEBOOKS
    assert all(re.fullmatch(r"\d\d_[a-z][a-z_]*", path.stem) for path in NOTEBOOKS)


@each_notebook
def test_code_parses_and_defines_nothing_plots_nothing_and_names_no_files(path):
    for cell in cells(path, "code"):
        assert not machinery(cell["source"]), cell["id"]
        assert not path_literals(cell["source"]), cell["id"]


@each_notebook
def test_cells_are_short_and_prose_outweighs_code(path):
    code, prose = cells(path, "code"), cells(path, "markdown")
    for cell in code:
        assert len(code_lines(cell["source"])) <= 15, cell["id"]
    total = sum(len(code_lines(cell["source"])) for cell in code)
    assert total <= 90, f"{total} code lines; aim for 40 to 80"
    assert words(prose) > words(code), f"{words(prose)} words of prose, {words(code)} of code"


@each_notebook
def test_outputs_are_stripped(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None, f"{cell['id']}: run nbstripout {path.name}"
    assert "widgets" not in json.loads(path.read_text())["metadata"]


@each_notebook
def test_cell_ids_are_unique_names(path):
    # A name survives editing and reads well in a diff; Jupyter's random eight hex digits do neither.
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    assert len(set(ids)) == len(ids)
    assert not [name for name in ids if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f-]+)?", name)]


@each_notebook
def test_the_parameters_cell_is_a_few_plain_assignments(path):
    (cell,) = [c for c in cells(path, "code") if "parameters" in c["metadata"].get("tags", ())]
    assert len(code_lines(cell["source"])) <= 8
    defaults = Notebook(path).parameters  # refuses anything but plain assignments with PROFILE among them
    assert defaults["PROFILE"] == "nano"
    assert all(isinstance(value, bool | int | float | str | list) for value in defaults.values()), "papermill's types"


@each_notebook
def test_it_opens_with_its_claim_and_states_its_cost_for_both_profiles(path):
    notebook = Notebook(path)
    assert json.loads(path.read_text())["cells"][0]["cell_type"] == "markdown"
    assert notebook.title != "(untitled)"
    for profile in ("nano", "paper"):
        assert notebook.cost(profile) not in ("", "?"), f'metadata["vrhlib"]["cost"][{profile!r}]'


def test_the_lint_sees_what_it_looks_for():
    assert machinery("def f(): pass\nclass A: pass\nplt.plot(x)") == ["def f", "def A", "plt"]
    assert machinery("sorted(x, key=lambda y: y.size)") == []
    assert path_literals("load('figures/nano/x'); open(f'../{x}'); read('heads.csv'); y = '/tmp/z'")
    assert path_literals("MODEL = 'Qwen/Qwen3-VL-8B'; label = 'on/off'; print('a / b'); save('fig3')") == []
