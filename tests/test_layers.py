"""Who may import whom. A module reads only from layers below its own, so each can be read alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vrhlib"
LAYERS = {
    "jsonl": 0, "ledger": 0, "store": 0,
    "profiles": 1, "features": 1, "heads": 1, "boxes": 1, "stats": 1, "answers": 1, "hub": 1, "sweep": 1,
    "samples": 2, "design_space": 2, "agreement": 2, "training": 2,
    "vlm": 3, "real": 3, "generated": 3, "methods": 3, "sparsity": 3, "paper": 3,
    "attention": 4, "benchmarks": 4, "outcomes": 4,
    "scoring": 5, "wiring": 5, "decoding": 5, "tasks": 5,
    "evaluate": 6,
    "dpo": 7, "steering": 7,
    "live": 8,
}  # fmt: skip
DRAWN = {
    "style": 0, "checks": 0,
    "output": 1,
    "scores": 2, "overlaps": 2, "conditions": 2, "sweeps": 2, "detection": 2, "pictures": 2, "tasks": 2,
    "training": 2, "steering": 2, "performance": 2,
    "views": 3,
}  # fmt: skip


def below(layers: dict[str, int]) -> dict[str, set[str]]:
    return {name: {other for other, layer in layers.items() if layer < layers[name]} for name in layers}


BELOW, FIGURES = below(LAYERS), below({f"figures.{name}": layer for name, layer in DRAWN.items()})
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
SHOWN = {"store", "profiles", "heads", "boxes", "stats", "paper", "design_space", "methods"}  # results, no model
VIEWS = ("explorer", "knockout", "picker", "steering", "stepper")
ALLOWED = BELOW | {
    "benchmarks": {"store", "samples", "real", "generated", "nano.benchmarks"},
    "real": BELOW["samples"] | {"samples"},  # reads tables, no model
    "figures": set(FIGURES),  # re-exports
    **{name: SHOWN | modules for name, modules in FIGURES.items()},
    "widgets": {f"widgets.{name}" for name in VIEWS},  # re-exports
    "widgets.canvases": set(),  # what the browser gets, and no more
    "widgets.view": SHOWN | {"figures"},
    **{f"widgets.{name}": SHOWN | {"figures", "widgets.view", "widgets.canvases"} for name in VIEWS},
    "page": {name for name in MODULES if name not in ("notebooks", "plan", "page")},  # a script on top of all
    "plan": {"store", "profiles", "hub", "benchmarks", "methods", "training"},  # no model
    "jobs": {"ledger"},
    "uptodate": {"store"},
    "notebooks": {"store", "profiles", "plan", "jobs", "uptodate", "sweep"},
    "nano.scenes": set(),
    "ledger": {"jsonl"},
    "store": {"", "jsonl", "ledger"},  # "" for __version__
    "nano.questions": {"nano.scenes"},
    "nano.benchmarks": BELOW["samples"] | {"samples", "nano.scenes", "nano.questions"},  # scenes are data to it
    "nano.models": {"nano.scenes", "nano.questions", "vlm"},  # prompts and box formats come from the one table
    "nano.pack": {"nano.scenes", "nano.questions", "nano.models", "boxes", "vlm"},
    "nano.train": {
        "nano.scenes",
        "nano.models",
        "nano.pack",
        "benchmarks",
        "vlm",
        "wiring",
        "attention",
        "store",
    },  # keeps a reply
    "nano.quality": BELOW["dpo"]
    | {"nano.models", "nano.questions", "nano.scenes"},  # a script: it measures what was trained
}
PACKAGES = {"", "nano"}  # their __init__ re-exports; it may import anything inside
VAGUE = {"utils", "util", "helpers", "common", "base", "core", "misc"}


def imports(source: str, module: str = "") -> set[str]:
    """Modules of vrhlib that a source imports, wherever in it: `nano.scenes`, `store`, … ("" is vrhlib itself)."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = ["vrhlib", *module.split(".")][: -node.level] if node.level else []
            origin = ".".join([*parents, *filter(None, [node.module])])
            names = [f"{origin}.{alias.name}" for alias in node.names] if origin.startswith("vrhlib") else []
        else:
            continue
        for name in names:
            if name.split(".")[0] == "vrhlib":
                inside = name.split(".")[1:]
                while inside and ".".join(inside) not in MODULES:  # `from vrhlib.heads import HeadSet` names a class
                    inside.pop()
                found.add(".".join(inside) if ".".join(inside) not in PACKAGES else "")
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if name not in PACKAGES])
def test_a_module_imports_only_from_below(module):
    assert module in ALLOWED, f"{module} has no layer yet: give it one here and in the tree of README.md"
    wrong = imports(MODULES[module].read_text(), module) - ALLOWED[module]
    assert not wrong, f"{module} imports {sorted(name or 'vrhlib' for name in wrong)} from its own layer or above"


def test_no_module_is_named_after_nothing():
    assert not VAGUE & {part for module in MODULES for part in module.split(".")}


def test_the_import_reader_sees_every_way_to_import():
    for source in (
        "import vrhlib.store",
        "from vrhlib import store",
        "from vrhlib.store import Run",
        "from . import store",
        "from .store import Run",
        "def f():\n    from vrhlib import store",
    ):
        assert imports(source, "heads") == {"store"}, source
    assert imports("from vrhlib.nano import scenes") == {"nano.scenes"}
    assert imports("from vrhlib import load_vlm") == {""}, "importing the package from inside is a cycle"
    assert imports("import torch\nfrom math import pi") == set()


@pytest.mark.parametrize("module", ["vrhlib", "vrhlib.figures", "vrhlib.widgets", "vrhlib.paper", "vrhlib.notebooks"])
def test_figures_views_and_the_runner_import_without_torch(module):
    # A finder, not `sys.modules["torch"] = None`: scipy looks whether torch was imported, and trips over None.
    block = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        f"import {module}"
    )
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
