"""One file to share: head maps, a reply token by token and what becomes of replies without heads, of a few pictures.

`./run_all.sh page` computes it on the profile's models and writes `figures/<profile>/page/index.html`: the very
canvases of the widgets over stored values, no kernel, no network. It asks for single heads, the top heads and random
ones; what was not computed, the page says.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

import pandas as pd

from vrhlib import live, paper, store, widgets
from vrhlib.attention import Ablation
from vrhlib.benchmarks import grounding
from vrhlib.boxes import Box
from vrhlib.evaluate import UNMASKED, Condition, replies
from vrhlib.heads import HeadScores, HeadSet, load_scores
from vrhlib.profiles import profile as profile_of
from vrhlib.samples import Samples
from vrhlib.vlm import VLM
from vrhlib.widgets import canvases
from vrhlib.wiring import load_vlm

PICTURES = 6
SINGLES = 120  # heads that are cut alone, at most: all of an embedded model, the first and a seeded draw of a large one
LISTED = "VRH heads are those of data/heads; replies are greedy, heads are set to zero in prompt and answer"
_WIDGETS = Path(widgets.__file__).parent


def cuts(scores: HeadScores, k: int, seeds: Sequence[int]) -> dict[Condition, HeadSet]:
    """What the page knows the replies to: every single head (the first `SINGLES`), the top 1 to 2k, and random draws of
    as many from outside the top 2k."""
    most = min(2 * k, scores.values.size // 2)
    top = scores.top(most)
    singles = scores.ranked().heads
    if len(singles) > SINGLES:
        rest = list(singles[SINGLES // 2 :])
        singles = (*singles[: SINGLES // 2], *random.Random(0).sample(rest, SINGLES - SINGLES // 2))
    found = {Condition(f"without {h}", 1): HeadSet((h,), scores.grid, str(h)) for h in singles}
    found |= {Condition("vrh", n): top.top(n) for n in range(2, most + 1)}
    drawn = {seed: top.controls(most, seed) for seed in seeds}
    return found | {Condition("random", n, s): heads.top(n) for s, heads in drawn.items() for n in range(1, most + 1)}


def model_data(vlm: VLM, scores: HeadScores, k: int, samples: Samples, seeds: Sequence[int]) -> dict:
    """All that the page shows of one model, as JSON."""
    asked = cuts(scores, k, seeds)
    known = {UNMASKED: None} | {name: Ablation(heads) for name, heads in asked.items()}
    answers: dict[str, dict[Condition, Mapping]] = {s.id: {} for s in samples}
    for row in replies(vlm, samples, known).to_dict("records"):
        seed = None if pd.isna(row["seed"]) else int(row["seed"])
        answers[row["id"]][Condition(row["condition"], int(row["k"]), seed)] = row
    names = {UNMASKED: ""} | {name: _named(heads) for name, heads in asked.items()}
    pictures = []
    for s in samples:
        look = live.Live(vlm).looks([s])
        pictures.append({
            "text": s.text, "size": list(s.image.size), "referent": list(s.box),
            "cuts": {names[name]: _answer(row) for name, row in answers[s.id].items()},
            "look": _stepped(widgets.stepper(look, scores, k)),
        })  # fmt: skip
    listed = {str(h): i + 1 for i, h in enumerate(paper.listed(vlm.name) or ())}
    return {
        "name": vlm.name, "grid": list(scores.grid), "scores": [round(float(v), 6) for v in scores.values.ravel()],
        "published": listed, "n": scores.n, "scoring": scores.scoring, "k": k, "pictures": pictures,
        "top": [list(h) for h in asked[max((c for c in asked if c.condition == "vrh"), key=lambda c: c.k)]],
        "random": {s: [list(h) for h in asked[Condition("random", len(cut), s)]] for s, cut in _largest(asked).items()},
    }  # fmt: skip


def _largest(asked: Mapping[Condition, HeadSet]) -> dict[int, HeadSet]:
    """The longest random draw of each seed."""
    found: dict[int, HeadSet] = {}
    for name, heads in asked.items():
        if name.condition == "random" and len(heads) > len(found.get(name.seed, ())):
            found[name.seed] = heads
    return found


def _named(heads: HeadSet) -> str:
    """A set of heads as the page looks it up: in order of layer and head."""
    return ",".join(map(str, sorted(heads)))


def _answer(row: Mapping) -> dict:
    box = Box.of(row)
    return {"text": row["text"], "box": box and [round(float(x), 1) for x in box], "iou": round(float(row["iou"]), 3),
            "outcome": row["outcome"]}  # fmt: skip


def _stepped(view) -> dict:
    """The traits of a stepper, bytes in base 64 under `$bytes`."""
    steps = view._steps
    names = ("image", "size", "tokens", "sets", "shown", "maps", "peaks", "mass", "grid", "evidence", "boxes", "step",
             "opacity", "label")  # fmt: skip
    values = {name: getattr(steps, name) for name in names}
    return {n: {"$bytes": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for n, v in values.items()}


def html(data: Mapping) -> str:
    """The whole page: canvases, their style, the data and the few lines that join them."""
    modules = {name: canvases.module(name) for name in ("headmap", "picture", "stepper")}
    words = {name: escape(data[name]) for name in ("title", "about")}
    return Template((_WIDGETS / "page.html").read_text()).substitute(
        words,
        style=(_WIDGETS / "canvases.css").read_text(),
        modules=_inert(modules),
        data=_inert(data),
        script=(_WIDGETS / "page.js").read_text(),
    )


def _inert(value: object) -> str:
    """JSON that no text in it can end the script element of."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def build(profile: str, models: Sequence[str] = (), n: int = PICTURES, seed: int = 0) -> Path:
    """Compute and write the page of a profile; returns its path.

    Raises ValueError for a model that the profile does not have, and FileNotFoundError where heads were not found yet,
    naming the notebook that does.
    """
    defaults = profile_of(profile)
    benchmark = defaults.benchmarks[0]
    lists = store.heads_dir(profile)
    chosen = list(models or defaults.models)
    for name in chosen:
        if name not in defaults.models:
            raise store.unknown("model", name, defaults.models)
    scores = {m: load_scores(lists / f"{m}__{benchmark}.json") for m in chosen}  # before anything is loaded
    samples, made, vlm = grounding(benchmark, "test", n, seed), [], None
    for name in chosen:
        vlm = load_vlm(name, instead_of=vlm)
        load_scores(lists / f"{name}__{benchmark}.json", vlm.grid)
        made.append(model_data(vlm, scores[name], scores[name].fewest(defaults.mass, defaults.k), samples,
                               defaults.control_seeds))  # fmt: skip
        print(
            f"{name}: {len(made[-1]['pictures'][0]['cuts'])} sets of heads cut on {len(samples)} pictures", flush=True
        )
    nano = "nano profile: small embedded models on synthetic scenes; not the paper's numbers. "
    note = nano if profile == "nano" else ""
    data = {"profile": profile, "title": "Visual retrieval heads: click heads away", "models": made,
            "about": f"{note}{len(samples)} pictures of {benchmark}, drawn by seed {seed}. {LISTED}. "
                     f"Commit {store.manifest(profile=profile)['git_commit']}."}  # fmt: skip
    return store.write_atomic(store.figures_dir(profile) / "page" / "index.html", html(data))


def main() -> None:
    parser = argparse.ArgumentParser(prog="run_all.sh page", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=store.PROFILES, default="nano")
    parser.add_argument("--models", default="", help="names, separated by commas; all of the profile if left out")
    given = parser.parse_args()
    try:
        written = build(given.profile, [m for m in given.models.split(",") if m])
    except (OSError, ValueError, MemoryError) as error:
        sys.exit(f"page: {error}")
    print(f"page: {written} ({written.stat().st_size / 1e6:.1f} MB, no network needed)")


if __name__ == "__main__":
    main()
