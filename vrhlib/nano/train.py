"""How the embedded weights were made: `python -m vrhlib.nano.train all` (seeded, resumable; the shipped ones on a CPU).

Question -> box does not learn to *retrieve* from scratch: the model soon writes well-formed boxes of some object and
stays there. Three stages break that plateau:

    backbone  two language stacks, A and B, before any image. Object tokens are *codes*: fixed vectors that say which
              colour, shape, size and box the thing under the token has; beside them stand lists of facts in plain
              text. At first one token a thing is visible and an expression runs straight into its box (grounded
              captioning); then all tokens, questions and the chat format. Late, looking at a picture costs a little.
    tower     the vision towers alone, dense: every image token regresses the code of its thing. The two InternVL
              models share one, as the real ones share InternViT-300M.
    tune      each of the four models: its backbone, its tower, its own vocabulary, chat template, prompts, frame and
              mix of tasks; on pixels. The tower stays frozen. (Letting it learn too cost accuracy: 87 % of boxes
              right before, 74 % a hundred steps later, on 320 questions.) Qwen3-VL's DeepStack merger starts at zero
              and learns here.

What did not work: the facts. Look-up in plain text stayed at chance (one word of the list at random) through both
backbones, also after half of the lists had one-word owners, and in a trial of 225 steps of nothing else; no head came
to look one word back. So these backbones hold no text retrieval heads. Sums and differences of two counts are not
learned either. Backbone A, without QK-norm, is the weaker one throughout.

Because all sides were built against the same codes, a tower plugs into a backbone without an alignment stage. Muon
on the matrices, AdamW on embeddings, norms and biases; heads are dropped per sequence, so that no single head holds
the reply's syntax.

The cost of looking is a choice that shapes the result: without it half of the attention on a referent came from heads
that look everywhere (in an earlier model of 64 heads, cutting the top six then took accuracy from 70 % only to 40 %).
It says nothing about where to look. That the heads which do look are few is therefore partly made by training, here;
in large models it is found.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from vrhlib import store
from vrhlib.attention import generate
from vrhlib.benchmarks import grounding
from vrhlib.nano import scenes
from vrhlib.nano.models import KINDS, Nano, Shape, picture
from vrhlib.nano.pack import Batches, Mix, Packer, reply_loss
from vrhlib.nano.scenes import COLOURS, HEIGHT, SHAPES, SIZES, SPLITS, STEP, WIDTH, WORDS
from vrhlib.wiring import load_vlm

NAMED = {"attribute": 0.3, "size": 0.14, "position": 0.24, "relation": 0.12}
SPOKEN = NAMED | {"long": 0.1, "question": 0.1}
ASKED = {"attribute": 0.2, "relation": 0.15, "width": 0.1, "count": 0.2, "arithmetic": 0.2, "mixed": 0.15}
_TUNED_WORLDS = {"scene": 0.81, "single": 0.03, "signs": 0.05, "document": 0.07, "facts": 0.04}
_TUNED_ASKED = {"attribute": 0.17, "relation": 0.15, "width": 0.08, "count": 0.23, "arithmetic": 0.22, "mixed": 0.15}
# After the first tuned model answered 59 % of the counts and 43 % of the sums, the InternVL mixes ask for more of both.
_COUNTED = {"attribute": 0.14, "relation": 0.13, "width": 0.07, "count": 0.28, "arithmetic": 0.26, "mixed": 0.12}
TUNED = Mix(_TUNED_WORLDS, 0.4, SPOKEN, _TUNED_ASKED, plain_facts=0.3)


@dataclass(frozen=True)
class Recipe:
    """The numbers behind the weights of one backbone, tower or model. The mixes of tasks by step are in `backbone_mix`;
    a manifest also names the commit of this code."""

    shape: Shape = Shape()
    seed: int = 0
    backbone_steps: int = 3400  # at a constant rate; `tune` decays
    easy_steps: int = 200  # the first backbone steps: one to three things a scene
    sparse_steps: int = 500  # the first backbone steps: one visible image token a thing, no background
    caption_steps: int = 1000  # expression and box side by side; then the chat format
    # From this backbone step on, every head that looks at the picture costs a little (times the square root of its
    # mean attention there, so two heads sharing a job cost more than one). Idle heads of large models park their
    # attention on the first token; without a reason to, those of a small one spread it over the image.
    thrift_step: int = 3050
    thrift: float = 0.04
    tune_thrift: float = 0.01
    tower_steps: int = 2000
    tune_steps: int = 1400
    tiled_every: int = 8  # every so many steps InternVL is tuned on pictures of twice the size: tiles and thumbnail
    scenes_per_step: int = 8
    questions_per_scene: int = 10
    muon_lr: float = 0.01
    adam_lr: float = 2e-3
    # Without QK-norm attention logits grow with the weights (to twice those of B by step 2000), and a full step then
    # moves them too far: from `calm_step` on, queries and keys take `calm` of a step.
    calm_step: int = 10**6
    calm: float = 1.0
    head_dropout: float = 0.05  # share of heads dropped per sequence, reached slowly after the captions
    late_head_dropout: float = 0.02  # and from thrift_step on
    code_noise: float = 0.15
    tune_mix: Mix = field(default=TUNED)


RECIPES = {
    "A": Recipe(seed=1, backbone_steps=4000, thrift_step=3650, calm_step=2250, calm=0.33),
    "B": Recipe(seed=2),
    # The two models of a pair see other pictures, in another order, and in other shares.
    "nano-qwen2.5-vl": Recipe(seed=11, tune_steps=1900),
    "nano-internvl3": Recipe(seed=12, tune_steps=1900, tune_mix=replace(TUNED, vqa=0.45, questions=_COUNTED)),
    "nano-qwen3-vl": Recipe(seed=13, tune_mix=replace(TUNED, vqa=0.43)),
    "nano-internvl3.5": Recipe(seed=14, tune_steps=1200, tune_mix=replace(TUNED, vqa=0.55, questions=_COUNTED)),
    "qwen2.5": Recipe(seed=21), "qwen3": Recipe(seed=22), "internvit": Recipe(seed=23),
}  # fmt: skip


# ---------------------------------------------------------------- optimisation


def optimisers(recipe: Recipe, parameters: list[tuple[str, torch.nn.Parameter]], scale: float = 1.0) -> list:
    matrices = [p for n, p in parameters if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    rest = [p for n, p in parameters if not (p.ndim == 2 and "embed" not in n and "lm_head" not in n)]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr * scale, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(rest, lr=recipe.adam_lr * scale, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(step: int, steps: int, decay: float, warmup: int = 50) -> float:
    """Factor of the learning rate: linear warm-up, and linear decay over the last `decay` of the steps."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (decay * steps) if decay else 1.0)


def told(path: Path) -> dict:
    """What a checkpoint says of itself: step, cpu_seconds, curve, recipe."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["about"])


class Stage:
    """One stage: steps with a schedule, a log line now and then, a checkpoint to resume from."""

    def __init__(
        self,
        name: str,
        work: Path,
        recipe: Recipe,
        steps: int,
        module: torch.nn.Module,
        opts: list,
        decay: float = 0.4,
        every: int = 250,
        calmed: Sequence[torch.nn.Parameter] = (),
        calm: tuple[int, float] = (0, 1.0),
    ):
        """`calmed` parameters move only a share `calm[1]` of each step from step `calm[0]` on."""
        self.calmed, self.calm = list(calmed), calm
        self.recipe = json.loads(json.dumps(asdict(recipe)))
        self.name, self.path, self.steps, self.decay = name, work / f"{name}.safetensors", steps, decay
        self.module, self.opts, self.every = module, opts, every
        self.base = [[g["lr"] for g in o.param_groups] for o in opts]
        self.start, self.spent, self.curve = 0, 0.0, []

    def resume(self) -> Stage:
        """Go on from the checkpoint, if there is one. Raises ValueError if it was made with other numbers."""
        if self.path.exists():
            state, about = load_file(self.path), told(self.path)
            if about["recipe"] != self.recipe:
                raise ValueError(f"{self.path} was made with another recipe. Move it away, or restore the recipe.")
            self.start, self.spent, self.curve = about["step"], about["cpu_seconds"], about["curve"]
            self.module.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("model.")}, strict=False)
            for i, o in enumerate(self.opts):
                full = o.state_dict()
                for k, v in state.items():
                    if k.startswith(f"opt{i}."):
                        _, index, field = k.split(".", 2)
                        full["state"].setdefault(int(index), {})[field] = v
                o.load_state_dict(full)
        return self

    def save(self, step: int, seconds: float) -> None:
        """Weights, optimiser, step and curve in one file, replaced in one go."""
        state = {f"model.{k}": v.contiguous() for k, v in self.module.state_dict().items() if "lm_head" not in k}
        for i, o in enumerate(self.opts):
            for index, fields in o.state_dict()["state"].items():
                state |= {f"opt{i}.{index}.{k}": v.contiguous() for k, v in fields.items() if torch.is_tensor(v)}
        about = {"step": step, "cpu_seconds": round(seconds, 1), "curve": self.curve, "recipe": self.recipe}
        tmp = self.path.with_suffix(".tmp")
        save_file({k: v.clone() for k, v in state.items()}, tmp, {"about": json.dumps(about)})
        os.replace(tmp, self.path)

    def run(self, loss_of, report) -> None:
        began = time.process_time() - self.spent
        for step in range(self.start, self.steps):
            for o, base in zip(self.opts, self.base):
                for g, lr in zip(o.param_groups, base):
                    g["lr"] = lr * schedule(step, self.steps, self.decay)
            loss = loss_of(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            calmed = self.calmed if step >= self.calm[0] else []
            before = [p.detach().clone() for p in calmed]
            for o in self.opts:
                o.step()
                o.zero_grad(set_to_none=True)
            with torch.no_grad():
                for p, old in zip(calmed, before):
                    p.copy_(torch.lerp(old, p, self.calm[1]))
            if (step + 1) % 50 == 0:
                line = report(step) if (step + 1) % 100 == 0 else ""
                self.curve += [[step + 1, line]] if line else []
                spent = time.process_time() - began
                print(
                    f"{self.name} {step + 1:5d}/{self.steps} loss {loss.item():.3f} {line} {spent:.0f} CPU-s",
                    flush=True,
                )
            if (step + 1) % self.every == 0 or step + 1 == self.steps:
                self.save(step + 1, time.process_time() - began)


# ---------------------------------------------------------------- the stages


def _gate(recipe: Recipe, batch: int, p: float, seed: tuple) -> torch.Tensor:
    keep = np.random.default_rng((*seed, 3)).random((batch, recipe.shape.layers, recipe.shape.heads)) >= p
    return torch.from_numpy(keep.astype(np.float32))


def backbone_mix(recipe: Recipe, step: int) -> Mix:
    """Captions of named things, then all expressions and questions; facts in text from the start."""
    if step < recipe.sparse_steps:
        most = 3 if step < recipe.easy_steps else 8
        things = (1 if most == 3 else 3, most)
        return Mix({"scene": 0.9, "facts": 0.1}, 0.0, {"attribute": 1.0}, things=things, reading=0.5)
    if step < recipe.caption_steps:
        return Mix({"scene": 0.84, "document": 0.06, "facts": 0.1}, 0.15, NAMED, ASKED, reading=0.5)
    worlds = {"scene": 0.7, "single": 0.03, "signs": 0.03, "document": 0.09, "facts": 0.15}
    # Facts were still guessed at step 2000; half of them with one-word owners from then on.
    return Mix(worlds, 0.33, SPOKEN, ASKED, plain_facts=0.5 * (step >= 2250))


def _queries_and_keys(nano: Nano) -> list[torch.nn.Parameter]:
    return [p for n, p in nano.language.named_parameters() if n.endswith(("q_proj.weight", "k_proj.weight"))]


def train_backbone(which: str, recipe: Recipe, work: Path) -> None:
    nano = Nano(which, recipe.shape, recipe.seed)
    nano.model.set_attn_implementation({"text_config": "packed"})
    # Two layouts in turn, those of the two kinds of model that will grow from it.
    layouts = [
        Packer(nano, bare=True, permille=which == "B"),
        Packer(nano, bare=True, planar=False, rows=8, cols=8, permille=True),
    ]
    batches = [Batches(p, recipe.seed, recipe.scenes_per_step, recipe.questions_per_scene) for p in layouts]

    def outcome(
        split: str, step: int, at: int, layout: int, count: int | None = None, p: float = 0.0, thrift: float = 0.0
    ):
        source = batches[layout]
        worlds = source.worlds(split, step, backbone_mix(recipe, at), at < recipe.caption_steps, count)
        keep = min(1.0, max(0.0, at / recipe.sparse_steps - 1))
        batch = source.packer.batch(worlds, source.shown(worlds, keep, step) if keep < 1 else None)
        codes = source.codes(worlds, recipe.code_noise, step)
        return reply_loss(nano, batch, codes, _gate(recipe, len(worlds), p, (recipe.seed, step)), thrift)

    def loss_of(step: int) -> torch.Tensor:
        p = recipe.head_dropout * min(1.0, max(0.0, step / recipe.caption_steps - 1))
        late = step >= recipe.thrift_step
        p, thrift = (recipe.late_head_dropout, recipe.thrift) if late else (p, 0.0)
        return outcome("train", step, step, step % 2, None, p, thrift).loss

    def report(step: int) -> str:
        with torch.no_grad():
            return " | ".join(str(outcome("dev", layout, step, layout, 24)) for layout in range(2))

    opts = optimisers(recipe, [(n, p) for n, p in nano.model.named_parameters() if "visual" not in n])
    stage = Stage(f"backbone-{which}", work, recipe, recipe.backbone_steps, nano.language, opts, decay=0.0,
                  calmed=_queries_and_keys(nano), calm=(recipe.calm_step, recipe.calm))  # fmt: skip
    stage.resume().run(loss_of, report)


def train_tower(which: str, recipe: Recipe, work: Path, batch: int = 48) -> None:
    name = next(n for n, k in KINDS.items() if k.tower == which)
    nano = Nano(name, recipe.shape, recipe.seed)
    nano.model.set_attn_implementation({"vision_config": "packed"})
    kind, codes, vision = nano.kind, nano.codes, nano.vision
    groups = {"colour": COLOURS, "shape": (*SHAPES, "sign", "line"), "size": SIZES,
              "says": [f"says {w}" for w in WORDS], "key": [f"key {w}" for w in WORDS]}  # fmt: skip
    readout = {k: codes.directions[[codes.index[n] for n in names]] for k, names in groups.items()}
    grids = [torch.arange(0, side + 1, STEP) * (128 / side if kind.permille else 1.0) for side in (WIDTH, HEIGHT)]
    tables = [torch.einsum("nw,wh->nh", codes.waves(grids[i % 2]), codes.edge_bases[i]) for i in range(4)]

    def draw(split: str, i: int) -> scenes.Scene:
        seed = (SPLITS[split], recipe.seed, 10**6 + i)
        return (scenes.signs if i % 7 == 5 else scenes.document if i % 7 == 6 else scenes.scene)(seed)

    def losses(split: str, step: int, count: int) -> tuple[torch.Tensor, dict]:
        drawn = [draw(split, step * count + i) for i in range(count)]
        seen = [picture(s, kind.rows, kind.cols, kind.permille) for s in drawn]
        out = nano.see([s.pixels for s in drawn])[0].flatten(0, 1)
        loss = F.mse_loss(out, torch.cat([codes.of(p) for p in seen]).to(out)) * 4
        owned = [(p.names[i], p.lines[i], j + b * kind.rows * kind.cols)
                 for b, p in enumerate(seen) for j, i in enumerate(p.owner) if i >= 0]  # fmt: skip
        scores = {}
        for field_, names in groups.items():
            index = {n: i for i, n in enumerate(names)}
            gold = [(index[n], j) for have, _, j in owned for n in have if n in index]
            target, where = (torch.tensor(x, device=out.device) for x in zip(*gold))
            logits = out[where] @ readout[field_].to(out).T / 4
            loss = loss + F.cross_entropy(logits, target)
            scores[field_] = (logits.argmax(-1) == target).float().mean().item()
        where = torch.tensor([j for *_, j in owned], device=out.device)
        lines = torch.tensor([line for _, line, _ in owned])
        for i in range(4):
            target = (lines[:, i, None] - grids[i % 2]).abs().argmin(1).to(out.device)
            logits = out[where] @ tables[i].to(out).T
            loss = loss + 0.5 * F.cross_entropy(logits, target)
            scores["xyxy"[i] + "0011"[i]] = ((logits.argmax(-1) - target).abs() <= 1).float().mean().item()
        return loss, scores

    def report(step: int) -> str:
        with torch.no_grad():
            return " ".join(f"{k} {v:.3f}" for k, v in losses("dev", 0, 63)[1].items())

    opts = optimisers(recipe, [(n, p) for n, p in vision.named_parameters() if "deepstack" not in n], scale=1.5)
    Stage(f"tower-{which}", work, recipe, recipe.tower_steps, vision, opts).resume().run(
        lambda step: losses("train", step, batch)[0], report
    )


def _load(module: torch.nn.Module, path: Path, strict: bool = True) -> None:
    state = load_file(path)
    module.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("model.")}, strict=strict)


def train_tune(name: str, recipe: Recipe, work: Path) -> None:
    kind = KINDS[name]
    backbone, nano = Nano(kind.backbone, recipe.shape), Nano(name, recipe.shape, recipe.seed)
    _load(backbone.language, work / f"backbone-{kind.backbone}.safetensors")
    _load(nano.vision, work / f"tower-{kind.tower}.safetensors", strict=False)
    nano.inherit(backbone)
    nano.model.set_attn_implementation({"text_config": "packed", "vision_config": "packed"})
    learns = dict(nano.language.named_parameters(prefix="language"))
    for key, p in nano.vision.named_parameters():
        p.requires_grad_("deepstack" in key)
        if "deepstack" in key:
            learns[key] = p
            if "linear_fc2" in key:
                torch.nn.init.zeros_(p)
    n, pairs = recipe.scenes_per_step, recipe.questions_per_scene
    source = Batches(Packer(nano), recipe.seed, n, pairs)
    tiled = Batches(Packer(nano, tiles=5), recipe.seed, max(1, n // 2), pairs)

    def outcome(split: str, step: int, count: int | None = None, p: float = 0.0, thrift: float = 0.0):
        large = not kind.planar and count is None and step % recipe.tiled_every == recipe.tiled_every - 1
        batches = tiled if large else source
        worlds = batches.worlds(split, 10**5 + step, recipe.tune_mix, False, count)
        features, deep = nano.see([w.scene.pixels for w in worlds if w.scene is not None], large)
        gate = _gate(recipe, len(worlds), p, (recipe.seed, 10**5 + step))
        return reply_loss(nano, batches.packer.batch(worlds), features, gate, thrift, deep)

    def report(step: int) -> str:
        with torch.no_grad():
            return str(outcome("dev", 0, 48))

    opts = optimisers(recipe, list(learns.items()))
    stage = Stage(f"tune-{name}", work, recipe, recipe.tune_steps, nano.model.model, opts,
                  calmed=_queries_and_keys(nano), calm=(0, RECIPES[kind.backbone].calm))  # fmt: skip
    stage.resume().run(
        lambda step: outcome("train", step, None, recipe.late_head_dropout, recipe.tune_thrift).loss, report
    )


def export(name: str, work: Path, folder: Path) -> None:
    """Write the model's folder; its manifest holds the recipe, what every stage took and how it went, and a reply."""
    kind, recipe = KINDS[name], RECIPES[name]
    nano = Nano(name, recipe.shape, recipe.seed)
    made = {stage: told(work / f"{stage}.safetensors") for stage in stages(name)}
    for stage, about in made.items():
        steps = {"backbone": "backbone_steps", "tower": "tower_steps", "tune": "tune_steps"}[stage.split("-")[0]]
        if about["step"] != about["recipe"][steps]:
            raise ValueError(f"{stage} is at step {about['step']} of {about['recipe'][steps]}: finish it first.")
    _load(nano.model.model, work / f"tune-{name}.safetensors")
    about = {
        "model": name, "backbone": kind.backbone, "tower": kind.tower, "stages": made,
        "parameters": nano.model.num_parameters(), "torch": torch.__version__, "git_commit": store.git_commit(),
    }  # fmt: skip
    nano.export(folder, about)


def keep_reply(name: str, folder: Path) -> None:
    """Store one picture and the model's greedy reply, so that anybody can check that the weights are what they were."""
    vlm = load_vlm(folder)
    sample = grounding("scenes", "dev", 1)[0]
    batch = vlm.prepare([sample])
    ids = [int(i) for i in generate(vlm, batch)[0, 0] if i >= 0]
    sample.image.save(folder / "example.png", optimize=True)
    about = json.loads((folder / "manifest.json").read_text())
    about["example"] = {"prompt": vlm.chat(sample.text)[0], "reply_ids": ids, "reply": vlm.tokenizer.decode(ids)}
    (folder / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")


def check(work: Path, steps: int = 4) -> None:
    """Run the first steps of every kind of stage twice and compare bits. Raises AssertionError where they differ."""
    runs = [(train_backbone, "A"), (train_tower, "qwen2.5"), (train_tune, "nano-qwen2.5-vl")]
    short = {"backbone_steps": steps, "tower_steps": steps, "tune_steps": steps}
    for again in range(2):
        (work / f"check-{again}").mkdir(parents=True, exist_ok=True)
        for train, which in runs:
            train(which, replace(RECIPES[which], **short), work / f"check-{again}")
    for path in sorted((work / "check-0").glob("*.safetensors")):
        one, two = load_file(path), load_file(work / "check-1" / path.name)
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one), f"{path.stem} differs"
        print(f"{path.stem}: {steps} steps, twice the same bits")


def stages(name: str) -> dict[str, tuple]:
    """What a model needs, in order: stage name to (function, arguments)."""
    kind = KINDS[name]
    return {
        f"backbone-{kind.backbone}": (train_backbone, kind.backbone),
        f"tower-{kind.tower}": (train_tower, kind.tower),
        f"tune-{name}": (train_tune, name),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*KINDS, "all"])
    parser.add_argument("--stage", help="one stage only (backbone-A, tower-qwen3, ...); they can run side by side")
    parser.add_argument("--work", type=Path, default=Path("data/runs/training"), help="checkpoints, to resume from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("data/nano"), help="where the model folders go")
    parser.add_argument("--check", action="store_true", help="run a few steps of every stage twice; compare bits")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.check:
        with tempfile.TemporaryDirectory(dir=args.work) as scratch:
            check(Path(scratch))
        return
    names = list(KINDS) if args.model == "all" else [args.model]
    if args.stage and args.stage not in (known := sorted({stage for name in names for stage in stages(name)})):
        parser.error(f"no stage {args.stage!r} of {args.model}; there are {', '.join(known)}")
    for name in names:
        for stage, (train, which) in stages(name).items():
            if args.stage in (None, stage):
                train(which, RECIPES[which], args.work)
        if args.stage is None:
            export(name, args.work, args.out / name)
            keep_reply(name, args.out / name)


if __name__ == "__main__":
    main()
