"""What the embedded models can do, measured by free generation on held-out pictures and written to `data/nano/`.

    python -m vrhlib.nano.quality all            every model, then the pairs; minutes on two cores
    python -m vrhlib.nano.quality nano-internvl3

One JSON a model: accuracy on the test split of every benchmark (of pictures that no training step saw), beside chance
and the same questions about grey pictures; for boxes also the two-question test, for words also the best guess from the
wording alone and a bystander who does not know which thing is meant. What ablation does on the five grounding
benchmarks. Replies per second.
`pairs.json`: how much the head lists of two models agree, beside two kinds of chance.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from vrhlib import store
from vrhlib.agreement import agreements
from vrhlib.answers import judge
from vrhlib.attention import generate
from vrhlib.benchmarks import BENCHMARKS, answering, grounding
from vrhlib.evaluate import (
    UNMASKED,
    accuracy,
    accuracy_table,
    baseline,
    replies,
    sweep_replies,
    together,
)
from vrhlib.evaluate import groups as head_groups
from vrhlib.heads import HeadScores
from vrhlib.nano.models import KINDS
from vrhlib.nano.questions import plural
from vrhlib.nano.scenes import COLOURS, RELATIONS, SHAPES, SIZES, SUPERLATIVES, WORDS
from vrhlib.outcomes import UNREADABLE
from vrhlib.profiles import profile
from vrhlib.samples import Sample, Samples
from vrhlib.scoring import VRH, score_samples
from vrhlib.vlm import VLM
from vrhlib.wiring import load_vlm

GROUNDING = [b.name for b in BENCHMARKS.values() if b.family == "grounding" and b.profile == "nano"]
ANSWERING = [b.name for b in BENCHMARKS.values() if b.family != "grounding" and b.profile == "nano"]
BATCH = 64


def wording(text: str) -> str:
    """A question with its colours, shapes and other names blotted out: `How many COLOUR SHAPE are there?`."""
    groups = {"COLOUR": COLOURS, "SHAPE": [*SHAPES, *map(plural, SHAPES)], "SIZE": SIZES, "PLACE": SUPERLATIVES,
              "RELATION": RELATIONS, "WORD": WORDS}  # fmt: skip
    for name, words in groups.items():
        text = re.sub(rf"\b({'|'.join(sorted(words, key=len, reverse=True))})\b", name, text)
    return text


def constant_guess(samples: Samples, fit: Samples) -> float:
    """Percent right of a reader that knows only how a question is worded: it gives the best answer to each wording
    among other questions (`fit`)."""

    def right(guess: str, s: Sample) -> bool:
        return judge(guess, s.answer, s.rule, s.choices) == "correct"

    by_wording: dict[str, list[Sample]] = {}
    for s in fit:
        by_wording.setdefault(wording(s.text.split("\n")[-1]), []).append(s)
    answers = sorted({s.answer for s in fit}) + ["13", "24"] * (fit[0].rule == "within 25 %")
    best = {w: max(answers, key=lambda a: sum(right(a, s) for s in mine)) for w, mine in by_wording.items()}
    overall = max(answers, key=lambda a: sum(right(a, s) for s in fit))
    guesses = [best.get(wording(s.text.split("\n")[-1]), overall) for s in samples]
    return 100 * sum(right(g, s) for g, s in zip(guesses, samples)) / len(samples)


def benchmark(vlm: VLM, name: str, n: int) -> dict:
    """One row: the unmasked model on the test split, with everything its accuracy has to be compared with."""
    about = {"benchmark": name, "like": BENCHMARKS[name].like, "family": BENCHMARKS[name].family}
    if name in GROUNDING:
        samples = grounding(name, "test", n)
        row = baseline(vlm, samples, grounding(name, "test", n // 2, pairs=True), BATCH).iloc[0].to_dict()
        row |= blind(vlm, samples)
        return about | {k: v for k, v in row.items() if k != "model"}
    samples = answering(name, "test", n)
    plain = replies(vlm, samples, {UNMASKED: None}, BATCH)
    right, bystander = accuracy(plain.outcome), np.array([s.bystander for s in samples])
    row = {
        "accuracy": right.mean, "low": right.interval[0], "high": right.interval[1], "n": n,
        "chance": 100 * float(np.mean([s.chance for s in samples])),
        "guess": constant_guess(samples, answering(name, "detect", n)),
        "unreadable": 100 * float(plain.outcome.isin(UNREADABLE).mean()),
        "by_kind": {k: accuracy(o).mean for k, o in plain.groupby("kind").outcome},
    }  # fmt: skip
    if not np.isnan(bystander).all():
        row["bystander"] = 100 * float(np.nanmean(bystander))
    return about | row | (blind(vlm, samples) if samples[0].image is not None else {})


def blind(vlm: VLM, samples: Samples) -> dict:
    """Accuracy on a third of the samples with grey pictures: the same few questions, so fewer of them do."""
    grey = samples[: max(1, len(samples) // 3)].blind()
    right = accuracy(replies(vlm, grey, {UNMASKED: None}, BATCH).outcome)
    return {"blind": right.mean, "blind_n": right.n}


def phenomenon(vlm: VLM, scores: HeadScores, n: int) -> pd.DataFrame:
    """Accuracy on the five grounding benchmarks without the top heads (found on `scenes`), without as many random ones,
    and without random ones of the same layers: at the model's own k and at a tenth of all heads."""
    k, frames = profile("nano").k, []
    groups = head_groups(scores.top(k), profile("nano").control_seeds)
    for name in GROUNDING:
        samples = grounding(name, "test", n)
        ks = sorted({top(scores), k})
        frames.append(accuracy_table(sweep_replies(vlm, samples, groups, ks, batch_size=16, short="skip")))
    return together(frames)


def top(scores: HeadScores) -> int:
    """How many heads count as the top heads of a model."""
    return scores.fewest(profile("nano").mass, profile("nano").k)


def speed(vlm: VLM, n: int = 512) -> float:
    """Replies per second to groundings in batches, on all cores, vision included."""
    samples = grounding("scenes", "dev", n)
    generate(vlm, vlm.prepare(samples[:BATCH]))
    began = time.perf_counter()
    for i in range(0, n, BATCH):
        generate(vlm, vlm.prepare(samples[i : i + BATCH]))
    return n / (time.perf_counter() - began)


def measure(name: str, n: int = 1000, n_ablation: int = 150) -> dict:
    """Everything about one model, written to data/nano/NAME.json."""
    vlm = load_vlm(name)
    captured = score_samples(vlm, grounding("scenes", "detect", profile("nano").n_detect), BATCH)
    scores = captured.score(VRH)
    large = None
    if not KINDS[name].planar:  # InternVL cuts these into 2 x 2 tiles and a thumbnail
        double = grounding("scenes", "test", n // 2).enlarged(2)
        right = accuracy(replies(vlm, double, {UNMASKED: None}, BATCH // 4).outcome)
        large = {"accuracy": right.mean, "low": right.interval[0], "high": right.interval[1], "n": right.n}
    about = {
        "model": name, "split": "test", "scenes_at_twice_the_size": large, "replies_per_second": speed(vlm),
        "benchmarks": [benchmark(vlm, b, n) for b in (*GROUNDING, *ANSWERING)],
        "k": top(scores), "half_of_the_mass_in": scores.share_holding(0.5),
        "ablation": json.loads(phenomenon(vlm, scores, n_ablation).to_json(orient="records", double_precision=2)),
        "heads": [list(h) for h in scores.top(top(scores))], "scores": scores.values.tolist(),
    }  # fmt: skip
    store.write_atomic(folder() / f"{name}.json", _written(about))
    return about


def folder() -> Path:
    return store.ROOT / "data" / "nano"


def pairs() -> pd.DataFrame:
    """Agreement of every two models' scores, written to data/nano/pairs.json; needs `measure` of all of them."""
    values = {name: np.array(measured(name)["scores"]) for name in KINDS}
    scores = {name: HeadScores(v, str(VRH), name, profile("nano").n_detect) for name, v in values.items()}
    table = agreements(scores, {name: s.top(top(s)) for name, s in scores.items()}, profile("nano").same_backbone)
    store.write_atomic(folder() / "pairs.json", json.dumps(table.to_dict("records"), indent=1) + "\n")
    return table


def measured(name: str) -> dict:
    """What `measure` wrote. Raises FileNotFoundError with the command that writes it."""
    path = folder() / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: python -m vrhlib.nano.quality {name}")
    return json.loads(path.read_text())


def _written(value) -> str:
    def short(x):
        if isinstance(x, float):
            return round(x, 9 if abs(x) < 1 else 2)  # small scores keep their order
        if isinstance(x, dict):
            return {k: short(v) for k, v in x.items()}
        return [short(v) for v in x] if isinstance(x, list | tuple) else x

    return json.dumps(short(value), indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*KINDS, "all", "pairs"])
    parser.add_argument("--n", type=int, default=1000, help="held-out samples a benchmark")
    parser.add_argument("--speed", action="store_true", help="only print replies per second")
    options = parser.parse_args()
    if options.speed:
        for name in KINDS if options.model == "all" else [options.model]:
            rate = speed(load_vlm(name))
            print(f"{name}: {rate:.0f} replies/s in batches of {BATCH}, {torch.get_num_threads()} threads")
        return
    for name in KINDS if options.model == "all" else [options.model]:
        if name != "pairs":
            print(json.dumps({k: v for k, v in measure(name, options.n).items() if k not in ("scores", "ablation")}))
    if options.model in ("all", "pairs"):
        print(pairs().to_string())


if __name__ == "__main__":
    main()
