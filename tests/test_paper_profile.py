"""`./run_all.sh paper` end to end: small checkpoints and tables stand where the Hub's would, in data/local.

What runs is the command a researcher types, on the CPU. Only the files are small: real ids, grids and chat templates
(`tests/checkpoints.py`), true schemas (`tests/real_fixtures.py`).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests import checkpoints, real_fixtures
from vrhlib.heads import load_heads
from vrhlib.profiles import MODELS

ROOT = Path(__file__).parents[1]
CHOSEN = ("qwen2.5-vl-7b", "internvl3-8b")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Notebooks and published numbers as they are; two models and all tables in data/local."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "data" / "paper", root / "data" / "paper")
    (root / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, root / "notebooks")
    for name in CHOSEN:
        folder = checkpoints.write(name, root / "data" / "local" / MODELS[name].source)
        # A random model never ends a reply: let a third of the vocabulary end it, though not at once.
        stops = [151645, 151643, *range(0, 151643, 3)]
        _edit(folder / "generation_config.json", eos_token_id=stops, begin_suppress_tokens=stops)
        if name.startswith("internvl"):
            _edit(folder / "preprocessor_config.json", max_patches=1)  # 13 tiles a picture would take minutes here
    real_fixtures.write_all(root, 40)
    yield root
    shutil.rmtree(root)


def _edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def run_all(root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VRHLIB", "HF_", "TRANSFORMERS"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    given = {"PATH": path, "VRHLIB_ROOT": str(root), "HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "1",
             "HF_DATASETS_CACHE": str(root / "hf" / "datasets"), "OMP_NUM_THREADS": "1"}  # fmt: skip
    return subprocess.run(
        [ROOT / "run_all.sh", *words], env=clean | given | environment, capture_output=True, text=True
    )


def test_without_a_gpu_it_stops_before_anything_is_spent(repository):
    done = run_all(repository, "paper", "01", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "VRHLIB_DEVICE=cpu" in done.stderr
    missing = [MODELS[name].source for name in MODELS if MODELS[name].profile == "paper" and name not in CHOSEN]
    assert all(source in done.stderr for source in missing), "two models are neither here nor to be had offline"
    assert not (repository / "figures").exists() and not (repository / "data" / "runs").exists()


def test_a_table_of_another_size_is_refused_by_default(repository):
    """Forty rows are not RefCOCO, and nothing runs under its name unless that is said."""
    done = run_all(repository, "paper", "01", f"MODELS={CHOSEN[0]}", "--limit", "4", VRHLIB_DEVICE="cpu")
    assert done.returncode == 1
    assert "lmms-lab/RefCOCO" in done.stderr and "40 rows, not 8811" in done.stderr


def test_the_first_notebook_runs_on_the_real_classes_and_schemas(repository):
    words = (f"MODELS={','.join(CHOSEN)}", "N_DETECT=10", "K=3", "--limit", "4")
    done = run_all(repository, "paper", "01", *words, VRHLIB_DEVICE="cpu", VRHLIB_ALLOW_DRIFT="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = repository / "figures" / "paper"
    table = pd.read_csv(figures / "table_baseline.csv")
    assert table.model.tolist() == list(CHOSEN) and table.published.tolist() == [86.2, 93.6] and (table.n == 4).all()
    claims = pd.read_csv(figures / "claims.csv").set_index("id")
    assert claims.verdict["causal-collapse"] == "not attempted"
    for name in CHOSEN:
        heads = load_heads(repository / "data" / "heads" / "paper" / f"{name}__refcoco.json")
        assert heads.grid == (28, 28) and len(heads) == 3
    assert "40 rows in the table, where 8811 were published" in done.stdout, "a drifted table says so"
    manifests = [json.loads(p.read_text()) for p in (repository / "data/runs/paper").glob("*[0-9a-f].json")]
    runs = [m for m in manifests if "complete" in m]
    assert runs and all(m["complete"] for m in runs)
    assert {m["model"] for m in runs} == set(CHOSEN) and all("nano" not in json.dumps(m["benchmark"]) for m in runs)
    head_map = json.loads((figures / "head_map.json").read_text())
    assert set(head_map["runs"]) <= {p.stem for p in (repository / "data/runs/paper").glob("*.jsonl")} != set()


def test_the_design_space_runs_on_a_real_class_and_on_generated_data(repository):
    """Needles, words and pages need no table; 03 then finds the scores stored and loads no model."""
    words, given = (f"MODELS={CHOSEN[0]}", "N_DETECT=10"), {"VRHLIB_DEVICE": "cpu", "VRHLIB_ALLOW_DRIFT": "1"}
    done = run_all(repository, "paper", "02", *words, "N_PRIOR=2", "--limit", "4", **given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures, runs = repository / "figures" / "paper", repository / "data" / "runs" / "paper"
    found = pd.read_csv(figures / "table_methods_found.csv").set_index("method")
    assert {"needle-text", "word-pictures", "pages", "refcoco"} == set(found.data)
    assert found.note["retrieval_heads"].startswith("qwen2.5-vl-7b answered none of"), "random weights know nothing"
    table = pd.read_csv(figures / "tableA9_variants.csv")
    assert set(table.k) == {0, 5, 10, 20, 50} and (table.n == 4).all()
    claims = pd.read_csv(figures / "claims.csv").set_index("id")
    assert (claims.verdict[["query-axis", "best-variant", "beats-prior"]] == "not attempted").all()
    before = {path.name: path.read_bytes() for path in runs.glob("*.jsonl")}
    done = run_all(repository, "paper", "03", *words, **given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert before == {path.name: path.read_bytes() for path in runs.glob("*.jsonl")}
    assert pd.read_csv(figures / "table_sparsity.csv").heads.tolist() == [784, 784]
