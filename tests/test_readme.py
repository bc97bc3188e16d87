"""README.md tells the truth: what it names exists, what it tells you to type is accepted.

Read are fenced blocks, backticked spans, links and pictures. Not read is prose: a claim about a number
is checked where the number is made.
"""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from vrhlib import notebooks, paper, store
from vrhlib.benchmarks import BENCHMARKS
from vrhlib.plan import memory_gb
from vrhlib.profiles import MODELS
from vrhlib.vlm import FAMILIES

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"\.(py|sh|md|ipynb|ya?ml|toml|lock|cff|jsonl?|csv|png|pdf|safetensors|js|jinja)$")
TREE = re.compile(r"^[\s│├└─|]*")


def lies(text: str) -> list[str]:
    """Everything a README names that isn't so, as one line each."""
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.M | re.S):
        if language in ("python", "py"):
            found += wrong_python(block)
        elif language in ("", "text", "tree") and is_tree(block):
            found += wrong_tree(block)
        else:
            found += [lie for line in block.splitlines() for lie in wrong_line(line)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for span in re.findall(r"`([^`\n]+)`", prose):
        found += wrong_line(span)
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose):
        if not re.match(r"\w+:|#", target) and not exists(target.split("#")[0]):
            found.append(f"link to {target}")
    found += [f"notebook {name}" for name in re.findall(r"\b\d\d_[a-z][a-z_]*", text) if not is_notebook(name)]
    return sorted(set(found))


def wrong_line(line: str) -> list[str]:
    """What is untrue in a command line, or in a backticked span, which may be one or just a path."""
    line = re.sub(r"\s#.*", "", line.strip().removeprefix("$ "))
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    found = [f"path {word}" for word in words if looks_like_path(word) and not exists(word)]
    for position, word in enumerate(words):
        if word.endswith("run_all.sh"):
            found += wrong_run_all(words[position + 1 :])
        if word == "-m" and words[position + 1 :]:
            found += [] if is_module(words[position + 1]) else [f"module {words[position + 1]}"]
    if re.fullmatch(r"vrhlib(\.\w+)+(\(.*\))?", line):
        found += [] if is_attribute(line.split("(")[0]) else [f"name {line}"]
    return found


def wrong_run_all(words: list[str]) -> list[str]:
    """Arguments that run_all.sh would refuse. Brackets, bars and dots of a usage line are notation."""
    line = re.sub(r"--(limit|jobs|cluster)[= ]\S+|--(again|strict)\b", "", " ".join(words).split("&&")[0].split(";")[0])
    words = [word for word in re.sub(r"[\[\]|…]|\.\.\.", " ", line).split() if word != "NAME=VALUE"]
    if words and words[0] in ("test", "lab", "help", "--help", "-h"):
        return [] if words[0] == "test" or not words[1:] else [f"run_all.sh {line}"]
    if words and words[0] == "page":
        rest = [word for word in words[1:] if word not in store.PROFILES and not word.startswith("MODELS=")]
        return [f"run_all.sh {line}"] if rest else []
    words = words[1:] if words and words[0] == "plan" else words
    words = [word for word in words if word not in store.PROFILES]
    try:
        chosen = notebooks.select([word for word in words if "=" not in word])
        notebooks.bind(chosen, dict(word.split("=", 1) for word in words if "=" in word))
    except notebooks.Refused as refusal:
        return [f"run_all.sh {line}: {refusal}"]
    return []


def wrong_python(block: str) -> list[str]:
    found = []
    try:
        tree = ast.parse(block)
    except SyntaxError as error:
        return [f"python block: {error}"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vrhlib":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [f"name {name}" for name in names if not is_attribute(name)]
        if isinstance(node, ast.Import):
            found += [f"module {alias.name}" for alias in node.names if not is_module(alias.name)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [f"path {node.value}"] * (looks_like_path(node.value) and not exists(node.value))
    return found


def is_tree(block: str) -> bool:
    firsts = [TREE.sub("", line).split("  ")[0].strip() for line in block.splitlines()]
    return any(re.fullmatch(r"[\w.-]+/", first) for first in firsts)


def wrong_tree(block: str) -> list[str]:
    """A tree: one or more names, two spaces or a #, a comment. Deeper indentation means inside the folder above."""
    found: list[str] = []
    parents: list[tuple[int, Path]] = []
    for line in filter(str.strip, block.splitlines()):
        indent = len(TREE.match(line).group())
        column, *comment = re.split(r"\s{2,}|\s#", line[indent:].rstrip(), maxsplit=1)
        names = re.split(r"[,\s]+", column)
        if not comment and not all(name.endswith("/") or FILE.search(name) for name in names):
            continue  # a comment's second line
        parents = [(depth, folder) for depth, folder in parents if depth < indent]
        inside = parents[-1][1] if parents else Path()
        if not parents and not (ROOT / names[0]).exists() and names[0].rstrip("/") in (ROOT.name, "vrhlib-main", "."):
            continue  # the tree's root, if it is drawn
        found += [f"tree entry {inside / name}" for name in names if not exists(str(inside / name))]
        if names[-1].endswith("/"):
            parents.append((indent, inside / names[-1]))
    return found


def looks_like_path(word: str) -> bool:
    word = word.strip("\"'()[],:;")
    if "://" in word or word.startswith(("~", "-", "/")) or "=" in word or not re.fullmatch(r"[\w./<>*{},…-]+", word):
        return False
    first = word.removeprefix("./").split("/")[0]
    inside = "/" in word and ((ROOT / first).exists() or word.startswith("./") or word.endswith("/"))
    return inside or bool(FILE.search(word)) or word in ("LICENSE", ".gitignore")


def exists(word: str) -> bool:
    """In the checkout, or in a folder that git ignores (it comes with the first run). `<profile>` is any name."""
    word = word.strip("\"'()[],:;").removeprefix("./").rstrip("/")
    braces = re.search(r"\{([^{}]*)\}", word)
    if braces:
        return all(exists(word.replace(braces.group(), choice.strip(), 1)) for choice in braces.group(1).split(","))
    pattern = re.sub(r"<[^>]+>|…|[A-Z]{3,}(?=\.)", "*", word)
    ignored = [line.strip().rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip()]
    written_by_a_run = ["data/hub.json"]
    if any(word == folder or word.startswith(folder + "/") for folder in ignored + written_by_a_run):
        return True
    if any((ROOT / folder / word).exists() for folder in ("", "figures/nano", "figures/paper")):
        return True
    return "*" in pattern and any(ROOT.glob(pattern))


def is_notebook(name: str) -> bool:
    return (ROOT / "notebooks" / f"{name}.ipynb").exists()


def is_module(name: str) -> bool:
    if name.split(".")[0] != "vrhlib":
        return importlib.util.find_spec(name.split(".")[0]) is not None
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_attribute(name: str) -> bool:
    """Is `vrhlib.heads.HeadSet` there, as a module or as a name in one?"""
    if is_module(name):
        return True
    owner, _, last = name.rpartition(".")
    return bool(owner) and is_module(owner) and hasattr(importlib.import_module(owner), last)


def test_readme_names_nothing_that_does_not_exist():
    text = (ROOT / "README.md").read_text()
    assert "./run_all.sh" in text and "./run_all.sh test" in text
    assert lies(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "`vrhlib/nonsense.py`",
        "`notebook/01_detect.py`",
        "see [the figure](figures/nano/nonsense.png)",
        '<img src="figures/nonsense.png">',
        "`./run_all.sh papr`",
        "```bash\n./run_all.sh nano 99   # one notebook\n```",
        "```\n./run_all.sh lab 01\n```",
        "`./run_all.sh page 01`",
        "`python -m vrhlib.nonsense`",
        "`vrhlib.heads.Nonsense`",
        "```python\nfrom vrhlib.heads import Nonsense\n```",
        "```python\nimport vrhlib.nonsense\n```",
        "open 99_nonsense first",
        "```\nvrhlib/        the library\n  heads.py     heads\n  nonsense.py  nothing\n```",
        "```\n├── vrhlib/\n│   └── nonsense.py   # nothing\n└── tests/\n```",
    ],
)
def test_a_lie_is_found(text):
    assert lies(text)


@pytest.mark.parametrize(
    "text",
    [
        "`vrhlib/heads.py`, `LICENSE`, `requirements.lock`, `Qwen/Qwen3-VL-8B-Instruct`, `86.3 ± 1.1`, `o_proj`",
        "`data/runs/nano/` is a cache; [this](pyproject.toml), [that](https://example.org/x.png), [here](#costs)",
        "`./run_all.sh test`, `./run_all.sh help`, `./run_all.sh test tests/test_readme.py`",
        "`./run_all.sh page paper MODELS=qwen2.5-vl-7b`",
        "`python -m vrhlib.nano.train MODEL`, `python -m venv x`, `vrhlib.heads.HeadSet`",
        "```python\nfrom vrhlib.heads import HeadSet\nheads = HeadSet\n```",
        "```\nvrhlib/        the library,\n               read it\n  heads.py     heads\n  nano/        scenes\n"
        "    scenes.py  drawn\ntests/         facts\npyproject.toml requirements.lock   versions\n```",
        "```\n├── vrhlib/\n│   ├── heads.py   # heads\n│   └── nano/\n│       └── scenes.py\n└── tests/\n```",
        "```\nnotebook   seconds  status\nmodel/k         20  ok\n```",
    ],
)
def test_the_truth_is_not_called_a_lie(text):
    assert lies(text) == []


def rows_of(heading: str) -> dict[str, str]:
    """Lines of a section's tables by what stands in their first cell."""
    section = (ROOT / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}


def test_the_tables_of_models_and_benchmarks_are_those_of_the_code():
    rows = rows_of("The real models and benchmarks")
    pins = {name: pin for name, pin in MODELS.items() if pin.profile == "paper"}
    real = {name: b for name, b in BENCHMARKS.items() if b.profile == "paper"}
    assert rows.keys() == pins.keys() | real.keys()
    for name, pin in pins.items():
        family, (layers, heads) = FAMILIES[pin.family], pin.grid
        frame = {"resized": "pixels of the resized picture", "permille": "thousandths of each side"}[family.frame]
        least, full = memory_gb(name)
        said = [pin.source, pin.revision[:8], f"{layers} × {heads} = {layers * heads:,}", pin.backbone, family.prompt,
                f"| {pin.gb} / {least:.0f} / {full:.0f} |", f"| {frame} |"]  # fmt: skip
        assert [part for part in said if part not in rows[name]] == [], name
    for name, benchmark in real.items():
        about, said = benchmark.about, [benchmark.like]
        said += [*about.ids, f"{about.rows:,}", about.licence, about.config or ""] if about else ["generated here"]
        said += list(benchmark.splits) if benchmark.splits[0] != "all" else [about.split]
        assert [part for part in said if part not in rows[name]] == [], name
    published = {"RefCOCO", "RefCOCO+", "RefCOCOg", "RefSpatial", "Toloka", "VAW", "Spatial457", "SpatialRGPT",
                 "CV-Bench", "MMStar", "CountBenchQA", "MathVista"}  # fmt: skip
    assert [n for n in published if not any(n.casefold() in b.like.casefold() for b in real.values())] == []


def test_the_table_of_claims_is_what_the_notebooks_last_found():
    """If not: `python -m vrhlib.paper` writes it."""
    text = (ROOT / "README.md").read_text()
    assert text == paper.with_claims(text, "nano")
