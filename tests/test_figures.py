"""Figures are functions of their CSV: drawn again without a model, without torch, to the same picture."""

import json
import os
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from vrhlib import figures, paper, store
from vrhlib.boxes import Box, TokenGrid
from vrhlib.heads import HeadScores, HeadSet

ROOT = Path(__file__).parents[1]
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8))
BOX, GRID = Box(10, 12, 40, 50), TokenGrid.regular(4, 6, (90, 60))
SCORES = HeadScores(np.random.default_rng(1).random((4, 6)), "output/sum/mean", "toy", 12)


def sweep() -> pd.DataFrame:
    rows = [("unmasked", 0, None, 80.0)]
    rows += [("vrh", k, None, 80.0 - 20 * k) for k in (1, 2, 3)]
    rows += [("one output token", k, None, 78.0 - 20 * k) for k in (1, 2, 3)]
    rows += [("random", k, seed, 80.0 - seed - k) for seed in range(5) for k in (1, 2, 3)]
    rows += [("layer_matched", k, seed, 79.0 - 2 * seed - k) for seed in range(5) for k in (1, 2, 3)]
    frame = pd.DataFrame(rows, columns=["condition", "k", "seed", "accuracy"]).astype({"seed": "Int64"})
    shares = {"malformed": 0.0, "cut off": 1.0, "no box": 0.5}
    return frame.assign(model="toy", benchmark="b", low=frame.accuracy - 4, high=frame.accuracy + 4, n=100, **shares)


def stable() -> pd.DataFrame:
    rows = [(n, seed, min(3, 1 + n // 5), 0.9) for n in (5, 10, 20) for seed in range(4)]
    return pd.DataFrame(rows, columns=["n", "seed", "overlap", "spearman"]).assign(k=3, model="toy")


def cost() -> pd.DataFrame:
    rows = [(m, v, v * s, v * b, 3) for m, s, b in (("rows", 1e-3, 0.1), ("eager", 2e-3, 2.0)) for v in (48, 192)]
    return pd.DataFrame(rows, columns=["method", "visual_tokens", "seconds", "peak_mib", "n"]).assign(model="toy")


def variants(changes: dict[str, tuple[float, float, float]], model: str = "toy", k: int = 3) -> pd.DataFrame:
    """An accuracy table of the default, five random draws and the variants, with their change and its interval."""
    rows = [("unmasked", 0, None, 90.0, ()), ("vrh", k, None, 20.0, ())]
    rows += [("random", k, seed, 85.0 - seed, ()) for seed in range(5)]
    rows += [(c, k, None, 20.0 + change[0], change) for c, change in changes.items()]
    frame = pd.DataFrame([row[:4] for row in rows], columns=["condition", "k", "seed", "accuracy"])
    frame[["change", "change_low", "change_high"]] = [row[4] or (np.nan,) * 3 for row in rows]
    return frame.assign(model=model, benchmark="b", low=frame.accuracy - 4, high=frame.accuracy + 4, n=100)


FLIPS = {"flip_q": (30.0, 21.0, 39.0), "flip_phi": (4.0, -1.0, 9.0), "q_union": (-6.0, -9.0, -3.0)}


def prior() -> pd.DataFrame:
    rows = sweep()[sweep().condition.isin(["unmasked", "random", "vrh"])]
    methods = ["retrieval_heads@needle", "retrieval_heads@grounding", "vera", "somebody_elses"]
    return pd.concat([rows, *(rows[rows.condition == "vrh"].assign(condition=m) for m in methods)])


def bands(**changed) -> pd.DataFrame:
    rows = [("toy", "sum", "nano", 30.0, 20.0, 50.0, 200, 24), ("toy", "mean", "nano", 2.0, 5.5, 92.5, 200, 24)]
    rows += [("toy", "mean", "paper", 3.0, 11.0, 86.0, None, 784)]
    columns = ["model", "scoring", "source", "above_5e-3", "between", "below", "n", "heads"]
    return pd.DataFrame(rows, columns=columns).assign(**changed)


def areas() -> pd.DataFrame:
    rows = [(m, key, a, a * 2, a, a * 3, 50) for m in ("toy", "other") for key in ("sum", "mean") for a in (2.0, 9.0)]
    return pd.DataFrame(rows, columns=["model", "keys", "area", "share", "low", "high", "n"])


def universal(models=("nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5")) -> pd.DataFrame:
    """Four models on five benchmarks; the last model has other k, another grid, and no layer-matched heads; random
    heads stop one k earlier, and one benchmark was not measured in the first model."""
    families = {
        "scenes": "grounding",
        "documents": "grounding",
        "pointing": "pointing",
        "counting": "questions",
        "needle": "text",
    }
    rows = []
    for i, model in enumerate(models):
        ks, heads = ((1, 2, 5, 10, 20), 784) if i == 3 else ((1, 2, 4, 8), 80)
        for j, (benchmark, family) in enumerate(families.items()):
            if (i, j) == (0, 4):
                continue
            about = model, benchmark, family, heads, [np.nan, np.nan, 12.5, 11.1, 50.0][j], 200 if j < 3 else 96
            own = [("unmasked", 0, None, 95.0 - 3 * j)]
            own += [("vrh", k, None, 95.0 - 3 * j - 90 * (n + 1) / len(ks) * (j < 4)) for n, k in enumerate(ks)]
            own += [("random", k, seed, 93.0 - 3 * j - seed) for seed in range(5 - i) for k in ks[1:-1]]
            own += [("layer_matched", k, seed, 85.0 - 5 * seed - k) for seed in range(5) for k in ks[-2:] if i != 3]
            rows += [(*about, *row) for row in own]
    columns = ["model", "benchmark", "family", "heads", "chance", "n", "condition", "k", "seed", "accuracy"]
    frame = pd.DataFrame(rows, columns=columns).astype({"seed": "Int64"})
    frame["accuracy"] = frame.accuracy.clip(0, 100)
    return frame.assign(low=(frame.accuracy - 6).clip(0, 100), high=(frame.accuracy + 6).clip(0, 100))


def replied(**changed) -> pd.DataFrame:
    shares = {
        "unmasked": (91.0, 9.0, 0.0, 0.0, 0.0, 0.0),
        "random": (86.0, 12.0, 0.0, 2.0, 0.0, 0.0),
        "layer_matched": (70.0, 24.0, 1.0, 5.0, 0.0, 0.0),
        "vrh": (33.0, 40.0, 8.0, 6.5, 0.0, 12.5),
    }
    rows = []
    for model, k in (("nano-qwen2.5-vl", 4), ("nano-internvl3", 5), ("nano-internvl3.5", 20)):
        for condition, (right, wrong, *rest) in shares.items():
            if (model, condition) == ("nano-internvl3", "layer_matched"):
                continue
            for seed in range(5) if condition in ("random", "layer_matched") else (None,):
                moved = (seed or 0) * 2.0
                own = (right - moved, wrong + moved, *rest)
                rows.append((model, condition, 0 if condition == "unmasked" else k, seed, own[0], *own))
    columns = ["model", "condition", "k", "seed", "accuracy", *figures.OUTCOMES]
    frame = pd.DataFrame(rows, columns=columns).astype({"seed": "Int64"})
    return frame.assign(benchmark="scenes", n=200).assign(**changed)


def transferred() -> pd.DataFrame:
    rows = []
    for i, model in enumerate(("nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5")):
        ks = (5, 10, 20) if i == 3 else (2, 4, 8)
        own = [("unmasked", 0, None, 95.0 - i)]
        own += [("vrh", k, None, 90.0 - 20 * n - 40) for n, k in enumerate(ks)]
        own += [("borrowed", k, None, 90.0 - 22 * n - 5) for n, k in enumerate(ks) if i != 2]
        own += [("other_backbone", k, donor, 92.0 - 3 * n - 4 * donor) for n, k in enumerate(ks) for donor in (0, 1)]
        own += [("random", k, seed, 93.0 - n - seed) for n, k in enumerate(ks) for seed in range(5)]
        own += [("layer_matched", k, seed, 80.0 - 8 * n - 2 * seed) for n, k in enumerate(ks[1:]) for seed in range(3)]
        rows += [(model, *row) for row in own]
    frame = pd.DataFrame(rows, columns=["model", "condition", "k", "seed", "accuracy"]).astype({"seed": "Int64"})
    return frame.assign(benchmark="scenes", low=frame.accuracy - 5, high=(frame.accuracy + 5).clip(upper=100), n=200)


def overlaps(**changed) -> pd.DataFrame:
    nano = ["scenes", "documents", "icons", "clutter", "pointing"]
    published = ["RefCOCO", "TextVQA", "OCRBench v2", "Visual-RFT"]
    rows = []
    for source, models, k, heads, names in (
        ("nano", ["nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5"], 5, 80, nano),
        ("published", ["qwen2.5-vl-7b", "internvl3-8b", "qwen3-vl-8b"], 20, 784, published),
    ):
        for model in models:
            pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
            rows += [(source, model, k, heads, a, b, (i + len(model)) % (k + 1)) for i, (a, b) in enumerate(pairs)]
    return pd.DataFrame(rows, columns=["source", "model", "k", "heads", "a", "b", "shared"]).assign(**changed)


def scattered(pairs: int = 4, heads: int = 80, k: int = 5, shared: int = 4) -> pd.DataFrame:
    models = ["nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5"]
    rng, frames = np.random.default_rng(0), []
    for i, (a, b) in enumerate([*combinations(models, 2)][:pairs]):
        x = np.sort(10 ** rng.uniform(-7, -0.5, heads))[::-1]
        y = x * 10 ** rng.normal(0, 0.05 if i == 0 else 0.3, heads)
        top = ["both"] * shared + ["a"] * (k - shared) + ["b"] * (k - shared) + ["neither"] * (heads - 2 * k + shared)
        facts = {"relation": "other backbone" if i % 2 else "same backbone", "k": k, "shared": shared}
        facts |= {"a": a, "b": b, "spearman": 0.87 - i / 10, "n": 200}
        at = {"layer": np.arange(heads) // 8, "head": np.arange(heads) % 8}
        frames.append(pd.DataFrame({**facts, **at, "x": x, "y": y, "top": top}))
    return pd.concat(frames, ignore_index=True)


TASKS = {
    "scenes": "RefCOCO", "documents": "TextVQA", "icons-in-a-rather-long-name": "ScreenSpot-v2",
    "clutter": "HR-Bench 4K", "pointing": "PixMo-Points", "counting": "TallyQA, complex questions", "needle": None,
}  # fmt: skip


def tasks(models=("nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5"), benchmarks=TASKS):
    """Four models on seven benchmarks: effects of every size, one cell at its blind floor, one task without a picture,
    one cell that was not measured, and benchmarks without layer-matched heads or chance."""
    rows = []
    for i, model in enumerate(models):
        for j, benchmark in enumerate(benchmarks):
            if (i, j) == (1, 4):
                continue
            unmasked = 97.0 - 2 * i - 5 * j
            vrh = min(max(3.0, 10.0 * i + 18.0 * j - 30.0), unmasked + j - 5)
            blind = np.nan if benchmark == "needle" else unmasked - 1.5 if (i, j) == (2, 5) else 12.0 + 2 * j
            drop, above = unmasked - vrh, unmasked - blind
            random, matched = (0.6 + j, -1.4 + j, 2.6 + j), np.nan if j == 2 else 2.1 + i
            chance = {"counting": 12.5, "clutter": 11.1 + i}.get(benchmark, np.nan)
            n, effect = 200 if j < 4 else 96 + i, (unmasked, vrh, drop, drop - 6, drop + 6)
            own = (model, benchmark, (2, 4, 5, 20)[i], n, *effect)
            rows.append((*own, *random, matched, blind, chance, above, above - 7, above + 7))
    frame = pd.DataFrame(rows, columns=list(figures.tasks.COLUMNS))
    return frame.assign(like=frame.benchmark.map(TASKS))


def cell(**changed) -> pd.DataFrame:
    """One model on one benchmark, its differences recomputed."""
    frame = tasks(["toy"], ["scenes"]).assign(**{"unmasked": 91.0, "vrh": 48.0, "blind": 12.0, "k": 4} | changed)
    ends = {"drop_low": 34.0, "drop_high": 52.0, "random_drop": 0.6, "above_blind_low": 60.0}
    frame = frame.assign(drop=frame.unmasked - frame.vrh, above_blind=frame.unmasked - frame.blind)
    return frame.assign(**ends | changed)


def trained(benchmarks=tuple(TASKS), seeds=3) -> pd.DataFrame:
    """Gains on the benchmarks and their mean, single seeds and their mean; sft was not evaluated on the last one."""
    rows = []
    for j, benchmark in enumerate((*benchmarks, "mean of benchmarks")):
        for condition, gain in (("dpo vrh", 2.4 - 0.3 * j), ("dpo random", 0.7 - 0.2 * j), ("sft", -1.0 + 0.3 * j)):
            if (condition, benchmark) == ("sft", "needle"):
                continue
            about, n = (benchmark, condition), 1316 if benchmark.startswith("mean") else 200 - 4 * j
            own = [gain + 0.5 * (seed - (seeds - 1) / 2) for seed in range(seeds)]
            rows.append((*about, pd.NA, float(np.mean(own)), gain - 1.6, gain + 1.7, seeds, n, 85.7 - 3 * j))
            rows += [(*about, seed, g, np.nan, np.nan, seeds, n, 85.7 - 3 * j) for seed, g in enumerate(own)]
    columns = ["benchmark", "condition", "seed", "gain", "low", "high", "seeds", "n", "unmasked"]
    return pd.DataFrame(rows, columns=columns).astype({"seed": "Int64"})


def training_log(seeds=3) -> pd.DataFrame:
    rows, rng = [], np.random.default_rng(0)
    for condition, speed in (("dpo vrh", 1.0), ("dpo random", 0.6), ("sft", 0.8)):
        for seed in range(seeds):
            for step in range(5, 205, 5):
                done = 1 - np.exp(-step * speed / 60)
                noise = rng.normal(0, 0.02)
                rewards = (
                    (np.nan, np.nan) if condition == "sft" else (4 * done + noise * 5, 50 + 48 * done + noise * 50)
                )
                rows.append((condition, seed, step, 0.69 - 0.5 * done + noise, *rewards))
    return pd.DataFrame(rows, columns=["condition", "seed", "step", "loss", "margin", "accuracy"])


def changed_scores(conditions=("dpo vrh", "dpo random"), heads=80, k=5, moved=0) -> pd.DataFrame:
    rng, frames = np.random.default_rng(0), []
    for i, condition in enumerate(conditions):
        before = np.sort(10 ** rng.uniform(-7, -0.5, heads))[::-1]
        at = {"layer": np.arange(heads) // 8, "head": np.arange(heads) % 8}
        facts = {"shared": k - moved, "k": k, "spearman": 0.99 - i / 10}
        after = before * 10 ** rng.normal(0, 0.05 + 0.1 * i, heads)
        own = {"condition": condition, **at, "before": before, "after": after, "top": np.arange(heads) < k}
        frames.append(pd.DataFrame(own | facts))
    return pd.concat(frames, ignore_index=True)


def words_on(figure) -> list[str]:
    """Every text drawn inside or above the panels."""
    titles = [ax.get_title() for ax in figure.canvas.axes] + [figure.canvas.get_suptitle()]
    return titles + [t.get_text() for ax in figure.canvas.axes for t in ax.texts]


def legend_of(figure) -> list[str]:
    return [t.get_text() for t in figure.canvas.legends[0].get_texts()]


STEERED = ["model", "benchmark", "condition", "k", "seed", "rate", "low", "high", "n", "phase"]


def steered(models=("toy",), ks=(1, 3), phases=("decode", "all"), **changed) -> pd.DataFrame:
    """As `steering.success` makes it: the model left alone, its top heads at every k, five draws of two kinds of
    controls at the last; in the prompt too only at the last k."""
    rows = []
    for i, model in enumerate(models):
        for phase in phases:
            own = [("unmasked", 0, None, 2.0 + i)]
            own += [("vrh", k, None, 20.0 * k - 5 * i) for k in (ks if phase == "decode" else ks[-1:])]
            drawn = [("random", 4.0), ("layer_matched", 9.0)]
            own += [(name, ks[-1], seed, rate + seed) for name, rate in drawn for seed in range(5)]
            rows += [(model, phase, *row) for row in own]
    frame = pd.DataFrame(rows, columns=["model", "phase", "condition", "k", "seed", "rate"]).astype({"seed": "Int64"})
    ends = {"low": frame.rate - 2, "high": frame.rate + 3, "centre": frame.rate + 10, "centre_low": frame.rate + 6}
    more = {"centre_high": frame.rate + 15, "unreadable": 1.5, "n": 120, "pictures": 30, "benchmark": "scenes"}
    return frame.assign(**ends, **more).assign(**changed)


LINES = {"vrh": [[0, 75.0, 60, 85], [2, 40.0, 30, 52]], "random": [[0, 75.0, 60, 85], [2, 70.0, 55, 82]]}
BAND = {"label": "random heads, range of 2 seeds", "points": [[2, 66.0, 70.0, 74.0]]}
SHARES = {"no box": 20.0, "correct": 40.0, "wrong box": 40.0}
ANSWERED = ("the cat", IMAGE, {"referent": BOX, "unmasked": Box(11, 12, 41, 52), "reply": Box(1, 2, 20, 30)})
LOST = ("the cat", IMAGE, {"referent": BOX, "unmasked": BOX, "reply": None})
NOWHERE = ("toy on b", 5, None, "not measured here")


def explored(where=("toy on b", 2, 40.0, "n=100"), lines=LINES, band=BAND, shares=SHARES, picture=ANSWERED):
    return figures.explorer_view(where, lines, band, shares, picture)


TOPS = {"vrh": SCORES.top(3), "localization_heads@grounding": SCORES.top(4).rest().top(3)}
ACCURACIES = {"unmasked": (90.0, 84.0, 94.0), "this scoring": (20.0, 14.0, 27.0), "random": None}


def maps(seed: int) -> dict:
    return {"all": np.random.default_rng(seed).random(24), "top": np.eye(24)[8]}


def measured_ratios() -> pd.DataFrame:
    bars = [("ratio", "a / b", None, r, 0.9 * r, 1.1 * r, t, m) for r, t, m in
            ((1.04, "<= 1.1", "yes"), (4.0, ">= 5", "no"), (0.08, "<= 0.1", "yes"), (1.5, "", ""))]  # fmt: skip
    grown = [("growth", axis, x, x**e, x**e, x**e, "", "") for axis, e in (("samples", 1), ("conditions", 0.4))
             for x in (1, 2, 4)]  # fmt: skip
    return pd.DataFrame(bars + grown, columns=["panel", "measure", "x", "ratio", "low", "high", "target", "met"])


EVERY = {
    "head_map": lambda: figures.head_map(SCORES, SCORES.top(3)),
    "head_maps": lambda: figures.head_maps(
        {m: SCORES for m in ("toy", "other")}, {"toy": SCORES.top(3), "other": SCORES.top(2)}
    ),
    "ablation_by_model": lambda: figures.ablation_by_model(
        pd.concat([sweep().query("k in (0, 3) and condition != 'one output token'").assign(benchmark=b) for b in "bc"])
    ),
    "published_heads": lambda: figures.published_heads({m: paper.published_heads(m) for m in paper.MODELS}),
    "accuracy_vs_k": lambda: figures.accuracy_vs_k(sweep()),
    "variants": lambda: figures.variants(pd.concat([variants(FLIPS), variants(FLIPS, "other", 5)])),
    "prior_methods": lambda: figures.prior_methods(prior()),
    "method_overlap": lambda: figures.method_overlap(TOPS, "toy"),
    "sorted_scores": lambda: figures.sorted_scores({"toy": SCORES}, {"toy": SCORES.top(3)}),
    "sparsity": lambda: figures.sparsity(bands()),
    "area_dependence": lambda: figures.area_dependence(areas()),
    "design_view": lambda: figures.design_view(SCORES, 3, "VERA", r"plain text, even $\frac$", ACCURACIES),
    "example": lambda: figures.example(IMAGE, BOX, GRID, "the cat", Box(11, 12, 41, 52)),
    "attention_maps": lambda: figures.attention_maps([(t, IMAGE, BOX, GRID, maps(i)) for i, t in enumerate("ab")]),
    "before_after": lambda: figures.before_after(
        [("the cat", IMAGE, BOX, {"unmasked": BOX, "vrh": Box(1, 2, 20, 30), "random": None})]
    ),
    "explorer_view": explored,
    "answer_view": lambda: figures.answer_view(
        SCORES, SCORES.top(2), ANSWERED, "{[1, 2, 20, 30]}\nIoU $0.1$, wrong box"
    ),
    "steering": lambda: figures.steering(steered(["toy", "other"])),
    "refused": lambda: figures.refused("copy: copying is defined for text only, whatever $x$ costs."),
    "one_token": lambda: figures.one_token(sweep()),
    "few_samples": lambda: figures.few_samples(stable()),
    "cost": lambda: figures.cost(cost()),
    "outcomes": lambda: figures.outcomes(replied()),
    "universality": lambda: figures.universality(universal()),
    "transfer": lambda: figures.transfer(transferred()),
    "benchmark_overlap": lambda: figures.benchmark_overlap(overlaps()),
    "score_scatter": lambda: figures.score_scatter(scattered()),
    "cross_task": lambda: figures.cross_task(tasks()),
    "gains": lambda: figures.gains(trained()),
    "training_curves": lambda: figures.training_curves(training_log()),
    "score_changes": lambda: figures.score_changes(changed_scores()),
    "performance": lambda: figures.performance(measured_ratios()),
}
# The same drawings at other sizes: one of everything, long names, what is missing.
ONE_QUESTION = [("how many cats are there?", IMAGE, None, GRID, maps(0))]
OTHERS = {
    "cross_task of one cell": lambda: figures.cross_task(cell().drop(columns="like")),
    "cross_task at its floor": lambda: figures.cross_task(cell(above_blind_low=-1.0, matched_drop=np.nan)),
    "cross_task of long names": lambda: figures.cross_task(tasks(["somebody-elses/" * 4], ["a benchmark, " * 5, "b"])),
    "gains of one seed": lambda: figures.gains(trained(["scenes"], 1).query("benchmark == 'scenes'")),
    "gains of a mean": lambda: figures.gains(trained([]).assign(unmasked=np.nan, low=np.nan, high=np.nan)),
    "training_curves of one seed": lambda: figures.training_curves(training_log(1)),
    "training_curves of sft": lambda: figures.training_curves(training_log(1).query("condition == 'sft'")),
    "score_changes of one condition": lambda: figures.score_changes(changed_scores(["another"], 784, 20, 3)),
    "score_changes of three": lambda: figures.score_changes(changed_scores(figures.TRAINED, moved=1)),
    "explorer_view of what was not measured": lambda: explored(NOWHERE, {"vrh": []}, None, {}, LOST),
    "explorer_view of one condition": lambda: explored(lines={"vrh": LINES["vrh"]}, band=None),
    "explorer_view of a condition without a colour": lambda: explored(lines=LINES | {"mine": LINES["vrh"]}),
    "answer_view without a head or a box": lambda: figures.answer_view(SCORES, SCORES.top(0), LOST, "x " * 200),
    "steering of one number of heads": lambda: figures.steering(steered(ks=(3,), phases=("all",))),
    "steering without controls": lambda: figures.steering(steered().query("condition in ('unmasked', 'vrh')")),
    "attention_maps without a box": lambda: figures.attention_maps(ONE_QUESTION),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "paper").symlink_to(ROOT / "data" / "paper")
    figures.use_profile("nano")


def test_every_drawing_is_tested_here():
    assert set(EVERY) == set(figures.output._DRAW)


@pytest.mark.parametrize("name", EVERY)
def test_a_figure_saves_picture_vector_data_and_manifest(name, tmp_path):
    figure = EVERY[name]().save("it", note=7)
    folder = tmp_path / "figures" / "nano"
    assert {p.suffix for p in folder.iterdir()} == {".png", ".pdf", ".csv", ".json"}
    assert (folder / "it.png").read_bytes().startswith(b"\x89PNG") and (folder / "it.pdf").read_bytes().startswith(
        b"%PDF"
    )
    about = json.loads((folder / "it.json").read_text())
    assert about["drawing"] == figure.drawing and about["note"] == 7 and about["profile"] == "nano"
    assert {"versions", "git_commit", "peak_mib", "runs"} <= set(about)
    assert len(pd.read_csv(folder / "it.csv")) == len(figure.frame)


def test_every_figure_is_rebuilt_from_its_csv_with_torch_unimportable(tmp_path):
    originals = {name: draw().save(name).png() for name, draw in EVERY.items()}
    script = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        "from pathlib import Path\n"
        "from vrhlib import figures\n"
        "for csv in sorted(Path(sys.argv[1]).glob('*.csv')):\n"
        "    (csv.parent / f'{csv.stem}.again').write_bytes(figures.rebuild(csv).png())\n"
    )
    folder = tmp_path / "figures" / "nano"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VRHLIB_ROOT": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, check=True, capture_output=True)
    for name, original in originals.items():
        assert (folder / f"{name}.again").read_bytes() == original, name


@pytest.mark.parametrize("name", OTHERS)
def test_one_of_everything_and_what_is_missing_are_rebuilt_from_the_csv_too(name, tmp_path):
    original = OTHERS[name]().save("it").png()
    assert figures.rebuild(tmp_path / "figures" / "nano" / "it.csv").png() == original


def test_rebuilding_reads_the_numbers_in_the_csv(tmp_path):
    figure = EVERY["accuracy_vs_k"]().save("curve")
    csv = tmp_path / "figures" / "nano" / "curve.csv"
    csv.write_text(csv.read_text().replace("60.0", "10.0"))
    assert figures.rebuild(csv).png() != figure.png()


def test_nano_figures_say_so_and_paper_figures_do_not():
    def words(figure):
        return [t.get_text() for t in figure.canvas.texts] + [figure.canvas.get_supxlabel()]

    assert any("nano profile" in t for t in words(EVERY["accuracy_vs_k"]()))
    figures.use_profile("paper")
    assert not any("nano" in t for t in words(EVERY["accuracy_vs_k"]()))


def test_an_unwritable_figures_folder_is_a_clear_error_and_changes_nothing(tmp_path):
    (tmp_path / "figures").write_text("not a folder")
    with pytest.raises(OSError, match="Cannot write .*Make .* writable"):
        EVERY["cost"]().save("it")
    assert (tmp_path / "figures").read_text() == "not a folder"


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="Unknown profile 'nanoo'"):
        figures.use_profile("nanoo")


def test_highlighted_heads_are_the_ranked_ones():
    frame = figures.head_map(SCORES, SCORES.top(3)).frame
    ranked = frame[frame["rank"] > 0].sort_values("rank")
    assert list(zip(ranked.layer, ranked["head"])) == [tuple(h) for h in SCORES.top(3)]
    assert ranked.score.is_monotonic_decreasing


def test_attention_panels_state_the_share_in_the_box():
    inside = GRID.tokens_in(BOX)
    figure = figures.attention_maps(
        [("x", IMAGE, BOX, GRID, {"half": inside / inside.sum() + ~inside / (~inside).sum()})]
    )
    assert figure.frame.panel.iloc[0] == "half: 2.00\n50 % on tokens of the box"


def test_a_question_without_a_referent_has_no_box_and_says_only_what_lies_on_the_picture():
    looks = [("how many?", IMAGE, None, GRID, {"all 80 heads": np.full(24, 1.23 / 24), "rest": np.zeros(24)})]
    looks.append(("the cat", IMAGE, BOX, GRID, {"all 80 heads": np.full(24, 0.1)}))
    figure = figures.attention_maps(looks)
    asked, rest, shown = figure.canvas.axes[:3]
    assert asked.get_title() == "all 80 heads: 1.23 on the picture" and rest.get_title() == "rest: 0.00 on the picture"
    assert "% on tokens of the box" in shown.get_title()
    assert [len(ax.patches) for ax in (asked, rest, shown)] == [0, 0, 1]
    assert asked.get_ylabel() == "how many?"
    assert set(figure.frame[figure.frame["sample"] == 0].fact) == {"pixels", "text", "attention"}
    assert set(figure.frame[figure.frame["sample"] == 1].fact) == {"pixels", "referent", "attention"}


def test_a_map_without_attention_says_nothing_and_shares_the_scale_of_its_row():
    looks = [("x", IMAGE, BOX, GRID, {"top": np.eye(24)[8], "rest": np.full(24, 1e-7)})]
    figure = figures.attention_maps(looks)
    assert "rest: 0.00\nno attention on the picture" in set(figure.frame.panel)
    scales = {image.get_clim() for ax in figure.canvas.axes[:2] for image in ax.images[1:]}
    assert scales == {(0, 1)}


def test_tables_are_saved_as_csv_and_markdown_with_their_label(tmp_path):
    figures.save_table(pd.DataFrame({"a": [1.234], "b": ["x|y"]}), "t")
    text = (tmp_path / "figures" / "nano" / "t.md").read_text()
    assert text.startswith("| a | b |\n| --- | --- |\n| 1.2 | x/y |\n") and "nano profile" in text


def test_head_sets_of_other_grids_are_not_counted_as_overlap():
    sets = {"a": HeadSet(((0, 0),), (2, 2), "a"), "b": HeadSet(((0, 0),), (3, 2), "b")}
    texts = [t.get_text() for ax in figures.published_heads(sets).canvas.axes for t in ax.texts]
    assert texts.count("–") == 2


def test_a_table_of_several_k_is_not_averaged_into_one_point():
    several = pd.concat([sweep().assign(benchmark=b) for b in "bc"])
    with pytest.raises(ValueError, match="Several benchmarks and several k"):
        figures.ablation_by_model(several)
    assert figures.ablation_by_model(sweep().query("condition != 'one output token'")).png().startswith(b"\x89PNG")


def test_p_values_and_correlations_are_not_rounded_away():
    frame = pd.DataFrame(
        {"p_shared": [0.0004, 0.0213], "spearman": [0.914, 0.5], "accuracy": [81.26, 3.0], "n": [3, 4]}
    )
    assert figures.shown(frame).values.tolist() == [["< 0.001", "0.91", "81.3", "3"], ["0.021", "0.50", "3.0", "4"]]
    assert figures.shown(frame[::-1]).index.tolist() == ["", ""], "row numbers say nothing, least of all in disorder"
    assert figures.shown(frame.set_axis(["a", "b"])).index.tolist() == ["a", "b"]
    gaps = pd.DataFrame({"x": [-0.04, None], "seed": pd.array([pd.NA, 3], dtype="Int64")})
    assert figures.shown(gaps).values.tolist() == [["0.0", "–"], ["–", "3"]]
    assert "| < 0.001 | 0.91 | 81.3 | 3 |" in figures.markdown(frame)


def test_a_star_stands_exactly_where_the_interval_of_the_change_excludes_zero():
    changes = {
        "flip_q": (3.51, 0.2, 7.0),
        "flip_phi": (-3.5, -7.0, -0.2),
        "flip_omega": (1.0, 0.0, 2.0),
        "q_union": (-0.04, -3, 3),
    }
    texts = [t.get_text() for t in figures.variants(variants(changes)).canvas.axes[0].texts]
    assert texts == ["+3.5*", "−3.5*", "+1.0", "+0.0"]  # neither the default nor random heads have one


def test_bars_of_variants_stand_in_order_with_intervals_or_the_range_of_seeds():
    figure = figures.variants(variants({"q_union": FLIPS["q_union"], "flip_q": FLIPS["flip_q"]}))
    ax = figure.canvas.axes[0]
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["random heads", "VRH", "other queries\n(expression)", "both queries"]
    assert [bar.get_height() for bar in ax.patches] == [83, 20, 50, 14]
    ends = [bars[2][0].get_segments()[0][:, 1].tolist() for bars in ax.containers[1::2]]
    assert ends == [[81, 85], [16, 24], [46, 54], [10, 18]]
    assert "k=3, unmasked 90.0, n=100 each" in ax.get_title() and "5 seeds" in figure.canvas.get_suptitle()


@pytest.mark.parametrize(
    "table, message",
    [
        (pd.concat([variants(FLIPS), variants(FLIPS, k=5)]), "Several k for toy: select the rows of one k"),
        (pd.concat([variants(FLIPS), variants(FLIPS).assign(benchmark="c")]), "toy has 2 benchmarks in one panel"),
        (variants(FLIPS).query("condition != 'unmasked'"), "toy has no unmasked row"),
        (variants(FLIPS).replace("flip_q", "flop_q"), "No bar for flop_q: conditions are unmasked, random"),
        (variants(FLIPS).iloc[:0], "The table has no rows"),
    ],
)
def test_variants_that_cannot_stand_side_by_side_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.variants(table)


def test_prior_methods_of_several_benchmarks_or_without_a_baseline_are_refused():
    with pytest.raises(ValueError, match="toy has 2 benchmarks in one panel"):
        figures.prior_methods(pd.concat([prior(), prior().assign(benchmark="c")]))
    with pytest.raises(ValueError, match="toy has no unmasked row"):
        figures.prior_methods(prior().query("condition != 'unmasked'"))


def test_every_prior_method_is_drawn_and_told_apart_known_or_not():
    figure = EVERY["prior_methods"]()
    methods = ["Retrieval Heads @ needle", "Retrieval Heads @ grounding", "VERA", "somebody_elses"]
    ours = ["VRH (95 % interval)", "unmasked", "random heads (mean and range of 5 seeds)"]
    assert legend_of(figure) == ours + methods
    lines = {line.get_label(): line for line in figure.canvas.axes[0].lines}
    looks = {(lines[m].get_color(), lines[m].get_marker(), lines[m].get_fillstyle()) for m in methods}
    assert len(looks) == 4 and not {colour for colour, *_ in looks} & {figures.COLOUR["vrh"], figures.COLOUR["random"]}
    assert lines[methods[0]].get_color() == lines[methods[1]].get_color()  # one method, two kinds of data
    assert lines["somebody_elses"].get_xydata().tolist() == [[0, 80], [1, 60], [2, 40], [3, 20]]


def test_more_unknown_methods_than_spare_looks_are_drawn_all_the_same():
    rows = prior()
    many = [rows[rows.condition == "vera"].assign(condition=f"method {i}") for i in range(9)]
    assert {f"method {i}" for i in range(9)} <= set(legend_of(figures.prior_methods(pd.concat([rows, *many]))))


def test_the_overlap_of_methods_counts_shared_heads_beside_what_chance_gives():
    tops = {"vrh": SCORES.top(3), "vera": HeadSet((*SCORES.top(5).heads[3:], SCORES.top(1).heads[0]), (4, 6))}
    words = words_on(figures.method_overlap(tops, "toy"))
    assert words[-4:] == ["3", "1", "1", "3"]
    assert "toy: heads shared by two methods' top 3\nby chance 0.4 expected (3 x 3 / 24 heads)" in words


@pytest.mark.parametrize(
    "tops, message",
    [
        ({"vrh": SCORES.top(3), "vera": SCORES.top(2)}, "not vrh 3, vera 2: cut all to one k"),
        ({"vrh": SCORES.top(0)}, "not vrh 0: cut all to one k > 0"),
        ({}, "not none"),
        ({"vrh": HeadSet(((0, 0),), (4, 6)), "vera": HeadSet(((0, 0),), (6, 4))}, "vrh 4 x 6, vera 6 x 4: detect"),
    ],
)
def test_lists_that_cannot_be_compared_are_refused(tops, message):
    with pytest.raises(ValueError, match=message):
        figures.method_overlap(tops, "toy")


def test_sorted_scores_fall_with_their_top_marked_and_zeros_on_the_floor():
    values = np.zeros((4, 6))
    values.flat[[7, 3, 20, 11]] = 0.4, 0.3, 0.2, 0.1
    scores = HeadScores(values, "output/sum/mean", "toy", 12)
    figure = figures.sorted_scores({"toy": scores}, {"toy": scores.top(2)})
    frame, ax = figure.frame, figure.canvas.axes[0]
    assert frame.score.is_monotonic_decreasing and list(frame["rank"]) == list(range(1, 25))
    assert list(frame[frame.top].score) == [0.4, 0.3]
    curve, top, *thresholds = ax.lines
    assert curve.get_ydata()[4:].tolist() == [figures.FLOOR] * 20 and top.get_xdata().tolist() == [1, 2]
    assert [line.get_ydata()[0] for line in thresholds] == [1e-3, 5e-3] and "below 1e-6 drawn there" in ax.get_ylabel()
    assert np.allclose(frame.half_share, 2 / 24) and np.allclose(frame.gini, scores.gini())
    assert f"half of the mass: 8.3 % of heads\nGini {scores.gini():.2f}" in words_on(figure)


def test_a_floor_that_no_score_reaches_is_not_mentioned():
    assert EVERY["sorted_scores"]().canvas.axes[0].get_ylabel() == "head score"


def test_sorted_scores_need_the_top_heads_of_every_model_on_its_grid():
    with pytest.raises(ValueError, match="No top heads for other: pass the detected list"):
        figures.sorted_scores({"toy": SCORES, "other": SCORES}, {"toy": SCORES.top(3)})
    with pytest.raises(ValueError, match="belongs to a model of 6 layers x 4 heads"):
        figures.sorted_scores({"toy": SCORES}, {"toy": HeadSet(((0, 0),), (6, 4))})


def test_bands_of_heads_fill_the_bar_and_the_narrow_ones_have_no_number():
    sums, means = EVERY["sparsity"]().canvas.axes
    for ax, bars in ((sums, 1), (means, 2)):
        ends = np.array([[patch.get_x() + patch.get_width() for patch in band] for band in ax.containers])
        assert ends.shape == (3, bars) and np.allclose(ends[-1], 100)
    numbers = [t.get_text() for t in means.texts if not t.get_text().startswith("paper")]
    assert numbers == ["6", "11", "92", "86"]
    assert [label.get_text() for label in sums.get_yticklabels()] == [
        "toy (nano)\nn=200, 24 heads", "toy (paper)\nn not given, 784 heads",
    ]  # fmt: skip


def test_the_published_shares_are_lines_at_4_and_15_percent():
    for ax in EVERY["sparsity"]().canvas.axes:
        at = {lines.get_segments()[0][0, 0] for lines in ax.collections}
        assert at == {4, 15} and sum(t.get_text().startswith("paper: ") for t in ax.texts) == 2


def test_bands_that_do_not_add_up_and_other_panels_are_refused():
    with pytest.raises(ValueError, match=r"The bands of toy \(sum\) sum to 90.0, not 100"):
        figures.sparsity(bands(below=[40.0, 92.5, 86.0]))
    with pytest.raises(ValueError, match="Panels are sum and mean .* the table has argmax, mean"):
        figures.sparsity(bands(scoring=["argmax", "mean", "mean"]))
    with pytest.raises(ValueError, match="the table has argmax"):
        figures.area_dependence(areas().assign(keys="argmax"))
    with pytest.raises(ValueError, match="the table has nothing"):
        figures.area_dependence(areas().iloc[:0])


def test_a_line_a_model_rises_with_the_area_whatever_the_order_of_rows():
    figure = figures.area_dependence(areas().iloc[::-1])
    assert [ax.get_title() for ax in figure.canvas.axes] == [
        "sum over the referent's tokens\nn=50 a bin", "mean over the referent's tokens\nn=50 a bin",
    ]  # fmt: skip
    for ax in figure.canvas.axes:
        assert [bars[0].get_ydata().tolist() for bars in ax.containers] == [[4, 18], [4, 18]]
        assert len({bars[0].get_marker() for bars in ax.containers}) == 2


def test_a_point_of_the_design_space_says_what_was_not_measured():
    figure = figures.design_view(SCORES, 3, "", "a formula of words " * 9, ACCURACIES)
    words = words_on(figure)
    assert figure.canvas.get_suptitle() == "no named method" and words.count("not measured") == 1
    assert {"90.0", "20.0", "toy: top 3 of 24 heads, n=12"} <= set(words)
    assert any(w.startswith("a formula of words") and "\n" in w for w in words)
    bars = figure.canvas.axes[2]
    assert [bar.get_width() for bar in bars.patches] == [90, 20]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["unmasked", "this scoring", "random heads"]
    assert len(figure.canvas.axes[1].patches) == 3


def test_a_design_view_of_more_heads_than_there_are_is_refused():
    with pytest.raises(ValueError, match="k=25"):
        figures.design_view(SCORES, 25, "VERA", "", ACCURACIES)


@cache
def drawn(name: str) -> figures.Figure:
    """A figure that several tests only read: twenty panels take seconds to draw."""
    return EVERY[name]()


def titles_of(figure) -> list[str]:
    return [ax.get_title() for ax in figure.canvas.axes]


def line_of(ax, label: str) -> list[list[float]]:
    """Points of the line or the error bars whose legend entry begins like this."""
    handles = dict(zip(*reversed(ax.get_legend_handles_labels())))
    (handle,) = (h for name, h in handles.items() if name.startswith(label))
    return getattr(handle, "lines", [handle])[0].get_xydata().tolist()


NEEDED = {
    "outcomes": (replied, "run the ablations first"),
    "universality": (universal, "run the ablations first"),
    "transfer": (transferred, "run the ablations first"),
    "benchmark_overlap": (overlaps, "compare the top heads of the benchmarks first"),
    "score_scatter": (scattered, "compare the scores of two models first"),
    "cross_task": (lambda: tasks().drop(columns="like"), "measure models on benchmarks, unmasked, ablated and blind"),
    "gains": (trained, "evaluate the trained models first"),
    "training_curves": (training_log, "train first, and keep the log of every seed"),
    "score_changes": (changed_scores, "score the heads before and after training first"),
    r"steering": (lambda: steered()[STEERED], r"steer heads and count \(steering.success\) first"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_table_without_rows_or_columns_is_refused_with_the_next_step(name):
    table, step = NEEDED[name]
    for empty in (table().iloc[:0], pd.DataFrame()):
        with pytest.raises(ValueError, match=f"The table has no rows: {step}"):
            getattr(figures, name)(empty)
    for column in set(table()) - ({"accuracy"} if name == "outcomes" else set()):
        with pytest.raises(ValueError, match=f"The table has no column {column}: {step}"):
            getattr(figures, name)(table().drop(columns=column))


def test_a_row_of_panels_a_model_a_column_a_benchmark():
    figure, table = drawn("universality"), universal()
    axes = np.array(figure.canvas.axes).reshape(4, 5)
    assert [ax.get_title() for ax in axes[0]] == [
        "scenes\ngrounding", "documents\ngrounding", "pointing\npointing", "counting\nquestions", "needle\ntext",
    ]  # fmt: skip
    assert [ax.get_ylabel() for ax in axes[:, 0]] == [
        "nano-qwen2.5-vl\n80 heads", "nano-internvl3\n80 heads", "nano-qwen3-vl\n80 heads",
        "nano-internvl3.5\n784 heads",
    ]  # fmt: skip
    for model, line in zip(dict.fromkeys(table.model), axes):
        for benchmark, ax in zip(dict.fromkeys(table.benchmark), line):
            own = table[(table.model == model) & (table.benchmark == benchmark)]
            words = [t.get_text() for t in ax.texts]
            if own.empty:
                assert words == ["not measured"] and not ax.lines
                continue
            vrh = own[own.condition.isin(["unmasked", "vrh"])]
            assert line_of(ax, "VRH") == vrh[["k", "accuracy"]].values.tolist()
            assert line_of(ax, "unmasked") == [[0, own.accuracy.iloc[0]], [1, own.accuracy.iloc[0]]]
            mean = own[own.condition == "random"].groupby("k").accuracy.mean()
            assert line_of(ax, "random") == [*map(list, mean.items())], "where they were cut, and not from 0 on"
            assert mean.index.min() > 0
            assert words == [f"n={own.n.iloc[0]}"]
            labels = ax.get_legend_handles_labels()[1]
            assert ("chance" in labels) == own.chance.notna().all()
            assert any(name.startswith("layer-matched") for name in labels) == (model != "nano-internvl3.5")
            assert ax.get_ylim() == (-3, 103)


def test_one_legend_entry_a_condition_however_many_seeds_its_panels_have():
    assert sorted(legend_of(drawn("universality"))) == [
        "VRH (95 % interval)", "chance", "layer-matched random (mean and range of 5 draws)",
        "random heads (mean and range of 2–5 draws)", "unmasked",
    ]  # fmt: skip


def test_ticks_say_k_and_its_share_of_all_heads_where_there_is_room():
    def ticks(ax):
        return [label.get_text() for label in ax.get_xticklabels()]

    axes = drawn("universality").canvas.axes
    assert ticks(axes[0]) == ["0\n0 %", "1", "2\n2.5 %", "4\n5 %", "8\n10 %"]
    assert ticks(axes[-1]) == ["0\n0 %", "1\n0.13 %", "2", "5\n0.64 %", "10\n1.3 %", "20\n2.6 %"]
    assert all(ax.xaxis.get_tick_params()["labelbottom"] for ax in axes)
    alike = figures.universality(universal().query("k in (0, 2) and heads == 80")).canvas.axes
    assert [ax.xaxis.get_tick_params()["labelbottom"] for ax in alike] == [False] * 10 + [True] * 5


@pytest.mark.parametrize(
    "table, message",
    [
        (universal().query("condition != 'unmasked'"), "nano-qwen2.5-vl on scenes has no unmasked row"),
        (universal().replace("vrh", "vera"), "No line for vera: conditions are unmasked, random, layer_matched, vrh"),
        (universal().assign(seed=pd.NA), "on scenes has several rows for random at k=2: number the draws"),
    ],
)
def test_panels_without_a_baseline_and_draws_without_a_number_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.universality(table)


def test_bars_of_outcomes_are_means_over_seeds_in_a_fixed_order():
    figure = figures.outcomes(replied().sample(frac=1, random_state=0).sort_values("model", kind="stable"))
    panels = dict(zip([title.split(" on ")[0] for title in titles_of(figure)], figure.canvas.axes))
    ax = panels["nano-qwen2.5-vl"]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "unmasked", "random heads", "layer-matched random", "VRH",
    ]  # fmt: skip
    widths = np.array([[bar.get_width() for bar in part] for part in ax.containers])
    assert widths.T.tolist() == [[91, 9, 0, 0, 0], [82, 16, 0, 2, 0], [66, 28, 1, 5, 0], [33, 40, 8, 6.5, 12.5]]
    assert [bar.get_y() + bar.get_height() / 2 for bar in ax.containers[0]] == [0, 1, 2, 3]
    assert ax.get_title() == "nano-qwen2.5-vl on scenes, k=4\nn=200, controls: mean of 5 seeds"
    assert sorted(t.get_text() for t in ax.texts) == sorted("91 9 82 16 66 28 5 33 40 8 6 12".split())
    assert legend_of(figure) == ["correct", "wrong box", "degenerate", "malformed", "no box"]  # none was cut off
    words = [t.get_text() for t in panels["nano-internvl3"].texts]
    assert words.count("not measured") == 1


def test_outcomes_without_controls_have_two_bars_and_no_word_on_seeds():
    (ax,) = figures.outcomes(replied().query("model == 'nano-internvl3' and condition != 'random'")).canvas.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["unmasked", "VRH"]
    assert ax.get_title() == "nano-internvl3 on scenes, k=5\nn=200"


@pytest.mark.parametrize(
    "table, message",
    [
        (replied(model="m"), "Several k for m: select the rows of one k"),
        (replied().query("condition == 'unmasked'"), "Nothing was ablated in nano-qwen2.5-vl, nano-internvl3, nano"),
        (replied(**{"no box": 0.0}), r"The outcomes of nano-qwen2.5-vl \(vrh\) sum to 87.5, not 100: .* all replies"),
        (pd.concat([replied(), replied(benchmark="c")]), "nano-qwen2.5-vl has 2 benchmarks in one panel"),
        (replied().replace("vrh", "vera"), "No bar for vera"),
    ],
)
def test_outcomes_that_cannot_be_divided_into_one_bar_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.outcomes(table)


def test_borrowed_heads_are_a_line_and_each_donor_of_another_backbone_is_one():
    figure = EVERY["transfer"]()
    assert legend_of(figure) == [
        "unmasked", "own heads (VRH) (95 % interval)", "heads of the same-backbone model (95 % interval)",
        "heads of another backbone (95 % interval)", "random heads (mean and range of 5 draws)",
        "layer-matched random (mean and range of 3 draws)",
    ]  # fmt: skip
    first, _, third, last = figure.canvas.axes
    assert first.get_title() == "nano-qwen2.5-vl on scenes\nunmasked 95.0, n=200 a point"
    assert line_of(first, "own heads") == [[0, 95], [2, 50], [4, 30], [8, 10]]
    assert line_of(last, "heads of the same") == [[0, 92], [5, 85], [10, 63], [20, 41]]
    donors = [[*map(list, zip(*line.lines[0].get_data()))] for line in first.containers
              if line.get_label().startswith("heads of another")]  # fmt: skip
    own = transferred().query("model == 'nano-qwen2.5-vl' and condition == 'other_backbone'")
    assert donors == [[[0, 95], *rows[["k", "accuracy"]].values.tolist()] for _, rows in own.groupby("seed")]
    assert len(donors) == 2
    assert not any(name.startswith("heads of the same") for name in third.get_legend_handles_labels()[1])


@pytest.mark.parametrize(
    "table, message",
    [
        (pd.concat([transferred(), transferred().assign(benchmark="c")]), "has 2 benchmarks in one panel"),
        (transferred().query("condition != 'unmasked'"), "nano-qwen2.5-vl has no unmasked row"),
        (transferred().replace("vrh", "vera"), "No line for vera: conditions are unmasked, vrh, borrowed"),
        (transferred().assign(seed=1).query("condition == 'unmasked' or condition == 'other_backbone'"), "the donors"),
    ],
)
def test_transfers_that_cannot_be_drawn_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.transfer(table)


def test_matrices_of_benchmarks_are_symmetric_with_k_on_the_diagonal():
    table = overlaps()
    figure = figures.benchmark_overlap(table)
    assert titles_of(figure)[:2] + titles_of(figure)[4:5] == [
        "nano-qwen2.5-vl (nano)\ntop 5, by chance 0.31", "nano-internvl3 (nano)\ntop 5, by chance 0.31",
        "qwen2.5-vl-7b (published)\ntop 20, by chance 0.51",
    ]  # fmt: skip
    for ax, side, k in ((figure.canvas.axes[0], 5, 5), (figure.canvas.axes[4], 4, 20)):
        shown = np.array([t.get_text() for t in ax.texts], dtype=int).reshape(side, side)
        assert (shown == shown.T).all() and (shown.diagonal() == k).all()
        assert np.allclose(ax.images[0].get_array(), shown / k)
    own = table[(table.source == "nano") & (table.model == "nano-qwen2.5-vl")]
    cells = [t.get_text() for t in figure.canvas.axes[0].texts]
    assert [int(cells[i * 5 + j]) for i in range(5) for j in range(i + 1, 5)] == own.shared.tolist()
    assert not figure.canvas.axes[7].axison  # three published models under four of ours


def test_benchmarks_that_were_not_compared_have_a_dash_and_either_order_of_a_pair_counts():
    table = pd.DataFrame([("nano", "toy", 3, 24, "x", "y", 2), ("nano", "toy", 3, 24, "z", "x", 1)],
                         columns=["source", "model", "k", "heads", "a", "b", "shared"])  # fmt: skip
    ax = figures.benchmark_overlap(table).canvas.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["x", "z", "y"]
    assert [t.get_text() for t in ax.texts] == ["3", "1", "2", "1", "3", "–", "2", "–", "3"]


@pytest.mark.parametrize(
    "table, message",
    [
        (pd.concat([overlaps(), overlaps(k=7)]), r"one k > 0 are compared; nano-qwen2.5-vl \(nano\) has k=5, 7"),
        (overlaps(k=0), "has k=0: cut all to one"),
        (overlaps(shared=60), "scenes and documents share 60 of 5 heads: count heads, not percent"),
        (pd.concat([overlaps(shared=1), overlaps(shared=2)]), "scenes and documents have two numbers"),
    ],
)
def test_overlaps_that_contradict_themselves_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.benchmark_overlap(table)


def test_every_head_is_a_point_at_its_two_scores_and_small_ones_lie_on_the_floor():
    table = scattered(2)
    figure = figures.score_scatter(table)
    for (_, own), ax in zip(table.groupby(["a", "b"], sort=False), figure.canvas.axes):
        for line, top in zip(ax.lines, ("neither", "a", "b", "both")):
            rows = own[own.top == top][["x", "y"]].clip(lower=figures.FLOOR)
            assert line.get_xydata().tolist() == rows.values.tolist()
            assert line.get_label() == figures.LABEL[top]
            assert line.get_fillstyle() == ("none" if top in "ab" else "full")
        assert len({line.get_marker() for line in ax.lines}) == 4
        assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_xlim()[0] < figures.FLOOR
    ax = figure.canvas.axes[0]
    assert ax.get_title() == "nano-qwen2.5-vl and nano-internvl3\nsame backbone, n=200\nshared 4 of 5, Spearman 0.87"
    assert ax.get_xlabel() == "head score in nano-qwen2.5-vl\n(below 1e-6 drawn there)"
    above = figures.score_scatter(table.assign(x=table.x.clip(lower=1e-5))).canvas.axes[0]
    assert above.get_xlabel() == "head score in nano-qwen2.5-vl" and "drawn there" in above.get_ylabel()


@pytest.mark.parametrize("shared, names", [(0, 0), (1, 1), (6, 6), (7, 0)])
def test_up_to_six_shared_heads_are_named_apart_from_each_other(shared, names):
    ax = figures.score_scatter(scattered(1, 784, 20, shared)).canvas.axes[0]
    assert sorted(t.get_text() for t in ax.texts) == [f"L0H{i}" for i in range(names)]
    heights = sorted(t.get_position()[1] for t in ax.texts)
    assert np.all(np.diff(heights) > 0.059) and all(0 <= height <= 1 for height in heights)


def test_points_of_an_unknown_kind_or_another_number_than_shared_are_refused():
    with pytest.raises(ValueError, match="No marker for first: column top says neither, a, b, both"):
        figures.score_scatter(scattered().replace({"top": {"a": "first"}}))
    with pytest.raises(ValueError, match="nano-qwen2.5-vl and nano-internvl3 share 3 heads, .* marks 4 as both"):
        figures.score_scatter(scattered().assign(shared=3))


def key_of(figure) -> str:
    """What the legend says above its entries."""
    return figure.canvas.legends[0].get_title().get_text().replace("\n", " ")


def cells_of(figure) -> list[str]:
    """Words of every cell, row by row."""
    return [t.get_text() for t in figure.canvas.axes[0].texts]


def test_a_cell_says_accuracies_change_controls_and_the_blind_floor():
    figure = figures.cross_task(cell(n=96, chance=12.5))
    assert cells_of(figure) == ["91.0 → 48.0\n−43.0* [−52, −34]\nrandom −0.6 · matched −2.1\nblind 12.0"]
    ax = figure.canvas.axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["scenes\nlike RefCOCO\nn=96, chance 12.5"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["toy\n4 heads cut"]
    words = key_of(figure)
    assert "without as many random heads, layer-matched random heads (matched); blind: accuracy on grey" in words
    assert words.endswith("*\u00a0where the 95 % interval excludes 0 (matched has none).")
    assert not legend_of(figure), "nothing is hatched"
    alone = figures.cross_task(cell(matched_drop=np.nan, random_drop=-0.3).drop(columns="like"))
    assert cells_of(alone)[0].splitlines()[2] == "random +0.3" and "matched" not in key_of(alone)
    assert [t.get_text() for t in alone.canvas.axes[0].get_xticklabels()] == ["scenes\nn=200"]
    assert cells_of(figures.cross_task(cell(random_drop=np.nan, matched_drop=np.nan)))[0].count("\n") == 2


@pytest.mark.parametrize(
    "vrh, low, high, words",
    [
        (48.0, 34.0, 52.0, "−43.0* [−52, −34]"),
        (90.0, 0.3, 2.0, "−1.0* [−2, −0.3]"),
        (90.0, 0.0, 2.0, "−1.0 [−2, 0]"),
        (90.0, -0.7, 2.5, "−1.0 [−2, +1]"),
        (95.0, -7.0, -0.2, "+4.0* [+0.2, +7]"),
        (91.0, -2.0, 2.0, "+0.0 [−2, +2]"),
    ],
)
def test_a_star_stands_in_a_cell_exactly_where_the_interval_excludes_zero(vrh, low, high, words):
    assert cells_of(figures.cross_task(cell(vrh=vrh, drop_low=low, drop_high=high)))[0].splitlines()[1] == words


@pytest.mark.parametrize("low, high, star", [(0.2, 9.0, "*"), (-9.0, -0.2, "*"), (0.0, 2.0, ""), (np.nan,) * 2 + ("",)])
def test_random_heads_have_their_own_star(low, high, star):
    figure = figures.cross_task(cell(random_drop_low=low, random_drop_high=high))
    assert cells_of(figure)[0].splitlines()[2] == f"random −0.6{star} · matched −2.1"


def test_cells_are_hatched_exactly_where_the_model_is_not_above_blind():
    table = tasks()
    figure, words = drawn("cross_task"), "not above blind"
    ax = figure.canvas.axes[0]
    rows = {(row.model, row.benchmark): row for row in table.itertuples()}
    expected = [rows.get((m, b)) for m in dict.fromkeys(table.model) for b in TASKS]
    patches = {tuple(np.add(p.get_xy(), 0.5)): p for p in ax.patches}
    assert len(patches) == 27 and len(ax.texts) == 28
    hatched = 0
    for (y, x), row, text in zip(np.ndindex(4, 7), expected, ax.texts):
        assert text.get_position() == (x, y)
        if row is None:
            assert (x, y) not in patches and text.get_text() == "not measured"
            continue
        floor = row.above_blind_low <= 0
        hatched += floor
        assert bool(patches[x, y].get_hatch()) == (words in text.get_text()) == floor
        assert text.get_text().startswith(f"{row.unmasked:.1f} → {row.vrh:.1f}\n")
    assert hatched == 1
    assert legend_of(figure)[0].startswith("not above blind: ")
    (line,) = [t for t in cells_of(figure) if words in t]
    assert line == "68.0 → 68.0\nnot above blind\nblind 66.5\nabove it +1.5 [−6, +8]"
    assert "no picture to hide" in cells_of(figure)[6] and "blind" not in cells_of(figure)[6]
    touching = figures.cross_task(cell(above_blind_low=0.0)), figures.cross_task(cell(above_blind_low=0.1))
    assert [bool(f.canvas.axes[0].patches[0].get_hatch()) for f in touching] == [True, False]


def test_cells_are_darker_for_a_larger_drop_and_white_without_one():
    table = pd.concat([
        cell(benchmark=f"b{drop}", vrh=91.0 - drop, drop_low=drop - 1.0, above_blind_low=0.0 if drop == 90 else 60.0)
        for drop in (-5, 0, 20, 40, 90)
    ])  # fmt: skip
    figure = figures.cross_task(table)
    faces = [patch.get_facecolor()[:3] for patch in figure.canvas.axes[0].patches]
    assert faces[:2] == [(1, 1, 1)] * 2, "no drop, no shade"
    assert np.allclose(faces[3], to_rgb(figures.COLOUR["vrh"])), "the largest drop above the floor has the full colour"
    assert np.allclose(faces[2], (np.array(faces[3]) + 1) / 2, atol=0.005), "and half of it half the colour"
    assert np.allclose(faces[4], to_rgb(figures.COLOUR["not above blind"]))
    assert "drop in accuracy" in figure.canvas.axes[1].get_xlabel() and figure.canvas.axes[1].get_xlim() == (0, 40)
    assert len(figures.cross_task(table[[drop in ("b0", "b90") for drop in table.benchmark]]).canvas.axes) == 1
    small = figures.cross_task(cell(vrh=90.6, drop_low=-1.0)).canvas.axes
    assert small[1].get_xlim() == (0, 1) and small[0].patches[0].get_facecolor()[2] > 0.5, "under a point is no drop"


def test_ink_has_contrast_on_any_shade():
    assert [figures.style.ink_on(c) for c in ("white", "#D55E00", "#0072B2", "#6B2F00", "black")] == [
        "black", "black", "white", "white", "white",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "table, message",
    [
        (pd.concat([cell(), cell(benchmark="b", k=5)]), "Several k for toy: select the rows of one k"),
        (pd.concat([cell(), cell()]), "toy on scenes has several rows: keep one"),
        (cell(drop_low=np.nan), "toy on scenes has no drop_low: measure it, or leave its row out"),
        (cell(drop=-43.0), r"toy on scenes: drop is -43.0 \[34.0, 52.0\], but unmasked - vrh is 43.0: give the diff"),
        (cell(above_blind_low=np.nan), r"above_blind is 79.0 \[nan, .* but unmasked - blind is 79.0"),
        (cell(above_blind=12.0), "above_blind is 12.0"),
    ],
)
def test_cells_that_cannot_be_read_as_an_effect_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.cross_task(table)


def test_gains_are_bars_from_zero_with_their_interval_and_seeds_beside_them():
    table, figure = trained(), drawn("gains")
    (ax,) = figure.canvas.axes
    labels = [t.get_text() for t in ax.get_xticklabels()]
    assert labels[0] == "scenes\nuntrained 85.7" and labels[-1] == "mean of benchmarks\nuntrained 64.7"
    assert len(labels) == 8 and "n=176–200 a benchmark" in ax.get_title()
    assert ax.get_ylabel() == "gain over the untrained model (points)"
    seeds = [line for line in ax.lines if line.get_marker() in ("o", "s", "D") and len(line.get_xdata())]
    whiskers = [box[2][0].get_segments()[0] for box in ax.containers if hasattr(box, "has_yerr")]
    for condition in figures.TRAINED:
        bars = [box[0] for box in ax.containers if box.get_label().startswith(figures.LABEL[condition])]
        own = table[table.condition == condition]
        means = own[own.seed.isna()]
        assert [bar.get_y() + bar.get_height() for bar in bars] == pytest.approx(means.gain.tolist())
        assert {bar.get_hatch() for bar in bars} == {figures.HATCH.get(condition)}
        assert {bar.get_facecolor()[:3] for bar in bars} == {to_rgb(figures.COLOUR[condition])}
        mine, seeds = seeds[: len(bars)], seeds[len(bars) :]
        ends, whiskers = whiskers[: len(bars)], whiskers[len(bars) :]
        assert np.allclose([end[:, 1] for end in ends], means[["low", "high"]])
        for benchmark, bar, line, end in zip(means.benchmark, bars, mine, ends):
            assert list(line.get_ydata()) == own[(own.benchmark == benchmark) & own.seed.notna()].gain.tolist()
            assert (line.get_marker(), line.get_markerfacecolor()) == (figures.MARKER[condition], "none")
            assert line.get_xdata()[0] > bar.get_x() + bar.get_width(), "beside the bar, not on it"
            assert np.allclose(end[:, 0], bar.get_x() + bar.get_width() / 2)
    for looks in (figures.HATCH, figures.MARKER, figures.COLOUR, figures.DASH):
        assert len({looks.get(c) for c in figures.TRAINED}) == 3
    assert [t.get_text() for t in ax.texts] == ["not measured"], "sft on the last benchmark"
    assert [list(line.get_ydata()) for line in ax.lines if line.get_color() == "black" and line.get_lw() == 0.9] == [
        [0, 0]
    ]
    assert legend_of(figure) == [
        "DPO, VRH negatives (mean of 3 seeds)", "DPO, random-head negatives (mean of 3 seeds)",
        "fine-tuned on the chosen replies (SFT) (mean of 3 seeds)", "single seeds (open)",
    ]  # fmt: skip


def test_the_mean_of_benchmarks_stands_last_behind_a_line_wherever_its_rows_are():
    table = trained(["b", "c"])
    (ax,) = figures.gains(table.iloc[::-1]).canvas.axes
    first, second, mean = ax.get_xticks()
    assert [t.get_text().split("\n")[0] for t in ax.get_xticklabels()] == ["c", "b", "mean of benchmarks"]
    (apart,) = [line.get_xdata()[0] for line in ax.lines if line.get_color() == "#777777"]
    assert second + 0.5 < apart < mean - 0.5 and mean - second > second - first
    for rest in ("benchmark == 'b'", "benchmark == 'mean of benchmarks'"):
        assert not [
            line for line in figures.gains(table.query(rest)).canvas.axes[0].lines if line.get_color() == "#777777"
        ]


def test_one_seed_is_called_one_and_a_mean_without_an_interval_has_no_whisker():
    one = figures.gains(trained(["scenes"], 1))
    assert legend_of(one)[0] == "DPO, VRH negatives (1 seed)"
    bare = figures.gains(trained([]).assign(low=np.nan, high=np.nan, unmasked=np.nan)).canvas.axes[0]
    assert not [box for box in bare.containers if hasattr(box, "has_yerr")]
    assert [t.get_text() for t in bare.get_xticklabels()] == ["mean of benchmarks"]


ONE = trained(["scenes"]).query("benchmark == 'scenes'")


@pytest.mark.parametrize(
    "table, message",
    [
        (ONE.replace("sft", "ppo"), "No bar for ppo: conditions are dpo vrh, dpo random, sft"),
        (ONE[ONE.seed.isna()], "dpo vrh on scenes has a mean without seeds: add a row for each seed"),
        (ONE[ONE.seed.notna() | (ONE.condition != "sft")], "sft on scenes has seeds without a mean: add a row with"),
        (pd.concat([ONE, ONE[ONE.seed.isna()]]), "dpo vrh on scenes has several rows for its mean or a seed"),
        (pd.concat([ONE, ONE[ONE.seed == 1]]), "dpo vrh on scenes has several rows for its mean or a seed"),
        (ONE[(ONE.seed != 2).fillna(True)], "dpo vrh on scenes is a mean of 3 seeds, but has rows for 2: add them"),
        (ONE.assign(unmasked=np.arange(len(ONE)) * 1.0), "scenes has several untrained accuracies"),
    ],
)
def test_gains_without_their_seeds_or_mean_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.gains(table)


def test_curves_are_means_over_seeds_and_sft_has_only_a_dotted_loss():
    log, figure = training_log(), drawn("training_curves")
    for ax, column in zip(figure.canvas.axes, ("loss", "margin", "accuracy")):
        lines = {line.get_color(): line for line in ax.lines}
        for condition, dash in (("dpo vrh", "-"), ("dpo random", "--"), ("sft", ":")):
            if condition == "sft" and column != "loss":
                assert figures.COLOUR[condition] not in lines
                continue
            own = log[log.condition == condition].groupby("step")[column]
            line = lines[figures.COLOUR[condition]]
            assert line.get_linestyle() == dash and np.allclose(line.get_ydata(), own.mean())
            assert line.get_xdata().tolist() == list(range(5, 205, 5))
        assert len(ax.collections) == len(ax.lines)
        band = ax.collections[0].get_paths()[0].vertices
        own = log[log.condition == "dpo vrh"].groupby("step")[column]
        assert np.isclose(band[:, 1].max(), own.max().max()) and np.isclose(band[:, 1].min(), own.min().min())
    assert legend_of(figure) == [
        "DPO, VRH negatives (mean and range of 3 seeds)", "DPO, random-head negatives (mean and range of 3 seeds)",
        "fine-tuned on the chosen replies (SFT) (mean and range of 3 seeds; its loss is another quantity)",
    ]  # fmt: skip
    one = figures.training_curves(training_log(1))
    assert not any(ax.collections for ax in one.canvas.axes) and legend_of(one)[0] == "DPO, VRH negatives (1 seed)"
    sft = OTHERS["training_curves of sft"]().canvas.axes
    assert [[t.get_text() for t in ax.texts] for ax in sft] == [[], ["not measured"], ["not measured"]]


@pytest.mark.parametrize(
    "frame, message",
    [
        (training_log(1).replace("sft", "ppo"), "No line for ppo: conditions are dpo vrh, dpo random, sft"),
        (training_log().assign(seed=0), "dpo vrh, seed 0: step 5 has two rows: select one training"),
    ],
)
def test_logs_that_are_no_curves_are_refused(frame, message):
    with pytest.raises(ValueError, match=message):
        figures.training_curves(frame)


def test_heads_after_training_stand_against_themselves_before():
    frame = changed_scores()
    figure = figures.score_changes(frame)
    for (condition, own), ax in zip(frame.groupby("condition", sort=False), figure.canvas.axes):
        same, others, top = ax.lines
        assert same.get_xdata().tolist() == same.get_ydata().tolist() == list(ax.get_xlim()) == list(ax.get_ylim())
        for line, rows in ((others, own[~own.top]), (top, own[own.top])):
            expected = rows[["before", "after"]].clip(lower=figures.FLOOR)
            assert line.get_xydata().tolist() == expected.values.tolist() and line.get_fillstyle() == "full"
        assert (top.get_color(), top.get_marker()) == (figures.COLOUR["vrh"], "o") and others.get_marker() == "."
        assert ax.get_title().startswith(f"{figures.LABEL[condition]}:\n5 of 5 shared, Spearman 0.")
        assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_xlim()[0] < figures.FLOOR
        assert sorted(t.get_text() for t in ax.texts) == [f"L0H{i}" for i in range(5)]
    assert ax.get_xlabel() == "head score before training\n(below 1e-6 drawn there)"
    assert ax.get_ylabel() == "head score after training\n(below 1e-6 drawn there)"
    assert legend_of(figure) == ["no change", "other heads", "top heads before training"]
    (ax,) = OTHERS["score_changes of one condition"]().canvas.axes
    assert ax.get_title() == "another:\n17 of 20 shared, Spearman 0.99" and not ax.texts


def test_changes_of_two_trainings_in_one_panel_and_other_top_heads_than_k_are_refused():
    with pytest.raises(ValueError, match="dpo vrh has several values of shared, spearman: select the rows of one seed"):
        figures.score_changes(pd.concat([changed_scores(), changed_scores().assign(shared=2, spearman=0.5)]))
    with pytest.raises(ValueError, match="Column top marks 5 heads of dpo vrh, not k=4: mark the top k"):
        figures.score_changes(changed_scores().assign(k=4))


def test_the_explorer_shows_its_lines_the_ring_at_k_and_what_replies_become():
    curve, picture, bar = explored().canvas.axes
    assert line_of(curve, "VRH") == [[0, 75], [2, 40]] and line_of(curve, "random heads, range") == [[2, 70]]
    assert [h.get_label() for h in curve.containers] == ["random heads, range of 2 seeds", "VRH", "random heads"]
    spans = [box[2][0].get_segments()[-1][:, 1].tolist() for box in curve.containers]
    assert np.allclose(spans, [[66, 74], [30, 52], [55, 82]])
    (ring,) = [line for line in curve.lines if line.get_markersize() == 11]
    assert ring.get_xydata().tolist() == [[2, 40]] and ring.get_label() == "k = 2: 40.0"
    assert ring.get_markerfacecolor() == "none", "the point below stays visible"
    (at,) = [line for line in curve.lines if line.get_linestyle() == ":"]
    assert at.get_xdata() == [2, 2] and curve.get_title() == "toy on b, n=100"
    assert (curve.get_ylim(), bar.get_xlim()) == ((0, 103), (0, 100)) and bar.get_xlabel() == "replies at k = 2 (%)"
    assert [(b.get_label(), b[0].get_width()) for b in bar.containers] == [
        ("correct", 40), ("wrong box", 40), ("no box", 20),
    ]  # fmt: skip
    assert picture.get_title() == "the cat" and len(picture.patches) == 3 and not picture.get_xlabel()


def test_a_point_that_was_not_measured_has_a_place_and_no_ring():
    curve, _, bar = OTHERS["explorer_view of what was not measured"]().canvas.axes
    assert not [line for line in curve.lines if line.get_markersize() == 11]
    assert [line.get_xdata() for line in curve.lines if line.get_linestyle() == ":"] == [[5, 5]]
    assert [t.get_text() for t in bar.texts] == ["not measured"] and not bar.patches


def test_a_reply_without_a_box_is_named_below_the_picture():
    without = figures.answer_view(SCORES, SCORES.top(1), LOST, "no numbers").canvas.axes[1]
    assert without.get_xlabel() == "no box: reply, heads changed" and len(without.patches) == 2
    both = figures.answer_view(
        SCORES, SCORES.top(1), (*LOST[:2], {"referent": BOX, "unmasked": None, "reply": None}), "x"
    )
    assert both.canvas.axes[1].get_xlabel() == "no box: unmasked, reply, heads changed"
    assert not EVERY["answer_view"]().canvas.axes[1].get_xlabel()


def test_an_answer_shows_the_heads_that_changed_it_in_any_number():
    figure = figures.answer_view(SCORES, SCORES.top(2), ANSWERED, "the reply $x\nits outcome")
    heads, picture = figure.canvas.axes[:2]
    (crosses,) = [line for line in heads.lines if line.get_marker() == "x"]
    assert {tuple(map(int, at)) for at in crosses.get_xydata()} == {(h.head, h.layer) for h in SCORES.top(2)}
    assert heads.get_title() == "toy: 2 of 24 heads"
    assert figure.canvas.get_suptitle() == "the reply $x\nits outcome"
    drawn = {p.get_label(): (p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in picture.patches}
    assert drawn["reply, heads changed"] == (1, 2, 19, 28) and len(drawn) == 3
    none = figures.answer_view(SCORES, SCORES.top(0), ANSWERED, "x").canvas.axes[0]
    assert none.get_title() == "toy: 0 of 24 heads"


def test_steering_rises_from_the_model_left_alone_a_panel_a_model():
    figure = figures.steering(steered(["toy", "other"]))
    toy, other = figure.canvas.axes
    assert titles_of(figure) == ["toy, n=120", "other, n=120"]
    assert line_of(toy, "VRH (95") == [[0, 2], [1, 20], [3, 60]] and line_of(other, "VRH (95") == [
        [0, 3],
        [1, 15],
        [3, 55],
    ]
    assert line_of(toy, "left alone") == [[0, 2], [1, 2]]
    for ax in (toy, other):
        assert ax.get_ylim()[0] == 0 and ax.get_xticks().tolist() == [0, 1, 3]
        rows = dict(zip(*reversed(ax.get_legend_handles_labels())))
        ((x, mean),) = line_of(ax, "random heads (range of 5 seeds)")
        assert mean == 6 and 3 < x < 4, "beside the other points of its k"
        low, high = rows["random heads (range of 5 seeds)"].lines[2][0].get_segments()[0][:, 1]
        assert (low, high) == (4, 8), "a range over seeds"
        ends = rows["VRH (95 % interval)"].lines[2][0].get_segments()
        assert [float(np.ptp(end[:, 1])) for end in ends] == [5, 5, 5], "intervals"
        faces = {label: bars.lines[0].get_markerfacecolor() for label, bars in rows.items() if label != "left alone"}
        assert {label for label, face in faces.items() if face == "white"} == {
            label for label in faces if "in the prompt too" in label
        }
    assert len(legend_of(figure)) == 7


@pytest.mark.parametrize(
    "table, message",
    [
        (steered().query("condition != 'unmasked'"), "toy has no unmasked row"),
        (pd.concat([steered(), steered(benchmark="c")]), "toy has 2 benchmarks in one panel"),
    ],
)
def test_steering_without_a_baseline_or_of_several_benchmarks_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.steering(table)
