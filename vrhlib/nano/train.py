"""How the embedded weights were made: `python -m vrhlib.nano.train qwen2.5-vl-nano`.

Question -> box does not learn to *retrieve* from scratch: the model soon writes well-formed boxes of
some object and stays there. Three stages break that plateau (CPU, seeded, resumable):

    backbone  the language stack alone. Image tokens are *codes*: fixed vectors that say which colour,
              shape, size and box the thing under the token has. Several expressions share one scene,
              each seeing only the image and itself; loss on the reply. At first one image token a thing
              is visible and the expression runs straight into its box (grounded captioning); then all
              tokens, and the chat format. Halfway, looking at the picture starts to cost a little.
    tower     the vision tower alone, dense: every image token regresses the code of its thing.
    tune      the language stack on pictures, seen through the frozen tower. (Letting the tower learn too cost
              accuracy: 87 % of boxes right before, 74 % a hundred steps later, on 320 questions.)

Because both sides were built against the same codes, the tower plugs into the backbone without a
separate alignment stage. Muon on the matrices, AdamW on embeddings, norms and biases; heads are
dropped per sequence, so that no single head holds the reply's syntax.

The cost of looking is a choice that shapes the result: without it half of the attention on a referent came
from heads that look everywhere, and cutting the top six of 64 heads took accuracy from 70 % only to 40 %.
It says nothing about where to look. That the heads which do look are few is therefore partly made by training,
here; in large models it is found.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from vrhlib.nano import scenes
from vrhlib.nano.scenes import COLOURS, HEIGHT, MIX, SHAPES, SIZES, SPLITS, STEP, WIDTH

PATCH = 16
ROWS, COLS = HEIGHT // PATCH, WIDTH // PATCH
PROMPT = "Locate {expression}."
REPLY = '{{"bbox_2d":[{0},{1},{2},{3}]}}'
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights."""

    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 256  # 32 per head: of a head's dimensions only the slowly rotating ones match content
    mlp: int = 512
    tower_layers: int = 3
    tower_hidden: int = 128
    tower_heads: int = 4
    seed: int = 0
    backbone_steps: int = 1750  # at a constant rate; `tune` decays
    easy_steps: int = 200  # the first backbone steps: one to three things a scene
    sparse_steps: int = 500  # the first backbone steps: one visible image token a thing, no background
    caption_steps: int = 1000  # expression and box side by side; then the chat format
    # From this backbone step on, every head that looks at the picture costs a little (times the square root of its
    # mean attention there, so two heads sharing a job cost more than one). Idle heads of large models park their
    # attention on the first token; without a reason to, those of a small one spread it over the image.
    thrift_step: int = 1500
    thrift: float = 0.04
    tune_thrift: float = 0.01
    tower_steps: int = 900
    tune_steps: int = 1000
    scenes_per_step: int = 8
    questions_per_scene: int = 10
    muon_lr: float = 0.01
    adam_lr: float = 2e-3
    head_dropout: float = 0.1  # share of heads dropped per sequence, reached slowly after the captions
    late_head_dropout: float = 0.02  # and from thrift_step on
    code_noise: float = 0.15


RECIPES = {"qwen2.5-vl-nano": Recipe()}


# ---------------------------------------------------------------- tokenizer, config, codes


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges make every word, number and reply bracket of the scenes one token."""
    words = ["Locate", ".", "user", "assistant", "system", "\n", '{"bbox_2d":[', ",", "]}", *map(str, range(WIDTH + 1))]
    words += [f" {w}" for w in (*COLOURS, *SHAPES, *SIZES, *scenes._SUPERLATIVES)]
    words += [f" {w}" for phrase in scenes._RELATIONS for w in phrase.split()] + [" the", " shape"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    pieces = Regex(r'\{"bbox_2d":\[|\]\}|\d+| ?[A-Za-z]+|\s|[^\sA-Za-z\d]')
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, min_frequency=1, show_progress=False, special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator([w for w in words for _ in range(2)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        chat_template=CHAT, extra_special_tokens=list(SPECIAL[1:]),
    )  # fmt: skip


def build_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    token = tokenizer.convert_tokens_to_ids
    head_dim = recipe.hidden // recipe.heads
    text = dict(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden, intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=token("<|im_end|>"), pad_token_id=token("<|endoftext|>"),
        rope_parameters=dict(rope_type="default", rope_theta=1e6,
                             mrope_section=[head_dim // 4, head_dim // 8, head_dim // 8]),
    )  # fmt: skip
    vision = dict(
        depth=recipe.tower_layers, hidden_size=recipe.tower_hidden, num_heads=recipe.tower_heads,
        intermediate_size=2 * recipe.tower_hidden, patch_size=PATCH, spatial_merge_size=1, temporal_patch_size=1,
        window_size=16 * PATCH, fullatt_block_indexes=list(range(recipe.tower_layers)),
        out_hidden_size=recipe.hidden,
    )  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True,
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
    )  # fmt: skip


class Codes:
    """Fixed vectors for what an image token can show. Attributes are orthogonal directions; the four box
    edges are Fourier features of the pixel value, each in a subspace of its own, so that one linear map
    per edge reads any value: heads need not learn a table."""

    WAVELENGTHS = (256, 128, 64, 32, 16, 8)  # pixels

    def __init__(self, hidden: int):
        basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(7)))[0]
        self.words = {w: 4 * basis[i] for i, w in enumerate((*COLOURS, *SHAPES, *SIZES))}
        self.background = 4 * basis[len(self.words)]
        width, start = 2 * len(self.WAVELENGTHS), len(self.words) + 1
        values = torch.arange(0, WIDTH + 1, STEP)
        angle = 2 * math.pi * values[:, None] / torch.tensor(self.WAVELENGTHS)
        wave = torch.cat([angle.cos(), angle.sin()], 1) / math.sqrt(len(self.WAVELENGTHS))
        edges = [3 * wave @ basis[start + i * width : start + (i + 1) * width] for i in range(5)]
        self.edges, self.numbers = torch.stack(edges[:4]), edges[4]  # [4, value, hidden], [value, hidden]

    def of(self, thing: scenes.Thing | None) -> torch.Tensor:
        if thing is None:
            return self.background
        words = self.words[thing.colour] + self.words[thing.shape] + self.words[thing.size]
        return words + sum(self.edges[i, v // STEP] for i, v in enumerate(thing.box))


def token_owner(scene: scenes.Scene) -> np.ndarray:
    """Index of the thing that covers most of each image token, -1 for background; int [ROWS * COLS]."""
    x0, y0, x1, y1 = np.array([t.box for t in scene.things]).T[..., None, None]
    left, top = np.arange(COLS) * PATCH, np.arange(ROWS)[:, None] * PATCH
    width = np.clip(np.minimum(x1, left + PATCH) - np.maximum(x0, left), 0, None)
    height = np.clip(np.minimum(y1, top + PATCH) - np.maximum(y0, top), 0, None)
    area = width * height
    return np.where(area.max(0) > 0, area.argmax(0), -1).reshape(-1)


def build_model(recipe: Recipe) -> tuple[Qwen2_5_VLForConditionalGeneration, PreTrainedTokenizerFast, Codes]:
    torch.manual_seed(recipe.seed)
    tokenizer, codes = build_tokenizer(), Codes(recipe.hidden)
    model = Qwen2_5_VLForConditionalGeneration(build_config(recipe, tokenizer))
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.normal_(std=2 / math.sqrt(recipe.hidden))
        for word, code in codes.words.items():
            table[tokenizer.convert_tokens_to_ids(f"Ġ{word}")] = code
        for i, code in enumerate(codes.numbers):
            table[tokenizer.convert_tokens_to_ids(str(i * STEP))] = code
    model.tie_weights()
    return model, tokenizer, codes


# ---------------------------------------------------------------- batches: many questions behind one image


class Packer:
    """Packs several question-reply pairs behind one image; each sees the image and itself only.

    Position ids repeat for every pair, so a packed pair is computed exactly as if it stood alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
        self.before = self.encode("<|im_start|>user\n<|vision_start|>")
        self.after = self.encode("<|vision_end|>")
        self.image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        n = len(self.before)
        rows, cols = np.divmod(np.arange(ROWS * COLS), COLS)
        text = np.arange(n)
        tail = n + max(ROWS, COLS) + np.arange(len(self.after))
        image = np.stack([np.full(ROWS * COLS, n), n + rows, n + cols])
        self.prefix_ids = np.array([*self.before, *[self.image] * (ROWS * COLS), *self.after])
        self.prefix_pos = np.concatenate([np.tile(text, (3, 1)), image, np.tile(tail, (3, 1))], 1)

    def pair(self, expression: str, box: tuple, chat: bool) -> tuple[list[int], list[int]]:
        """Token ids and, per token, the weight of *predicting* it in the loss."""
        question = PROMPT.format(expression=expression) + "<|im_end|>\n<|im_start|>assistant\n"
        q = self.encode(question if chat else expression.removeprefix("the"))
        r = self.encode(REPLY.format(*box) + "<|im_end|>\n")
        weights = [0.1, 1, 0.1, 1, 0.1, 1, 0.1, 1, 0.1, 0.1, 0]  # bracket x0 , y0 , x1 , y1 bracket end newline
        assert len(r) == len(weights), (REPLY.format(*box), r)
        return q + r, [0] * len(q) + weights

    def batch(self, worlds: list, chat: bool, shown: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """`worlds`: per scene (scene, expressions); `shown` bool [scene, ROWS * COLS] hides image tokens."""
        prefix = len(self.prefix_ids)
        packed = [[self.pair(e.text, s.things[e.referent].box, chat) for e in chosen] for s, chosen in worlds]
        length = prefix + max(sum(len(ids) for ids, _ in pairs) for pairs in packed)
        B = len(worlds)
        ids = np.zeros((B, length), dtype=np.int64)
        pos = np.zeros((3, B, length), dtype=np.int64)
        segment = np.full((B, length), -1)
        weight = np.zeros((B, length), dtype=np.float32)
        ids[:, :prefix], pos[:, :, :prefix], segment[:, :prefix] = self.prefix_ids, self.prefix_pos[:, None], 0
        for b, pairs in enumerate(packed):
            at = prefix
            for s, (pair_ids, pair_weight) in enumerate(pairs):
                here = slice(at, at + len(pair_ids))
                ids[b, here], weight[b, here], segment[b, here] = pair_ids, pair_weight, s + 1
                pos[:, b, here] = self.prefix_pos[0, -1] + 1 + np.arange(len(pair_ids))
                at += len(pair_ids)
        seg = torch.from_numpy(segment)
        order = torch.arange(length)
        visible = (seg[:, :, None] == seg[:, None]) | (seg[:, None] == 0)
        visible &= (order[:, None] >= order) & (seg[:, None] >= 0) | torch.eye(length, dtype=torch.bool)
        if shown is not None:
            start = len(self.before)
            visible[:, :, start : start + ROWS * COLS] &= torch.from_numpy(shown)[:, None]
            visible |= torch.eye(length, dtype=torch.bool)
        bias = torch.zeros(B, 1, length, length).masked_fill_(~visible[:, None], -1e4)
        return {"ids": torch.from_numpy(ids), "pos": torch.from_numpy(pos), "bias": bias,
                "weight": torch.from_numpy(weight)}  # fmt: skip


_PACK: dict = {}


def _packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Plain matmul-softmax: at head_dim 16 the backward of fused attention is far slower on a CPU."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = (query * scaling) @ key.transpose(2, 3)
    if "bias" in _PACK and hasattr(module, "layer_idx"):
        weights = (logits + _PACK["bias"]).softmax(-1)
        if "looks" in _PACK:  # each head's mean attention from the text behind the image to the image
            start, end = _PACK["image"]
            _PACK["looks"].append(weights[:, :, end + 1 :, start:end].sum(-1).mean((0, 2)))
        out = weights.to(value.dtype) @ value
        out = out * _PACK["gate"][:, module.layer_idx, :, None, None].to(out.dtype)
    else:
        out = logits.softmax(-1).to(value.dtype) @ value
    return out.transpose(1, 2), None


# No mask function goes with it, on purpose: the mask is the batch's own block-diagonal bias.
AttentionInterface.register("packed", _packed_attention)


def _shown(scene: scenes.Scene, keep: float, seed: tuple) -> np.ndarray:
    """One token of every thing, and each other token with probability `keep`."""
    rng = np.random.default_rng((*seed, 5))
    owner = token_owner(scene)
    shown = rng.random(owner.size) < keep
    for i in range(len(scene.things)):
        if (mine := np.flatnonzero(owner == i)).size:
            shown[rng.choice(mine)] = True
    return shown


def draw_world(seed: tuple, questions: int, kinds: dict, easy: bool = False) -> tuple:
    rng = np.random.default_rng((*seed, 2))
    drawn = scenes.scene(seed, int(rng.integers(1, 4)) if easy else None)
    picks = [scenes.draw_expression(drawn, rng, kinds) for _ in range(questions)]
    return drawn, [p for p in picks if p]


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


class Stage:
    """One stage: steps with a schedule, a log line now and then, a checkpoint to resume from."""

    def __init__(
        self,
        name: str,
        work: Path,
        steps: int,
        module: torch.nn.Module,
        opts: list,
        decay: float = 0.4,
        every: int = 250,
    ):
        self.name, self.path, self.steps, self.decay = name, work / f"{name}.safetensors", steps, decay
        self.module, self.opts, self.every = module, opts, every
        self.base = [[g["lr"] for g in o.param_groups] for o in opts]
        self.start, self.spent = 0, 0.0

    def resume(self) -> Stage:
        if self.path.exists():
            state = load_file(self.path)
            meta = json.loads(self.path.with_suffix(".json").read_text())
            self.start, self.spent = meta["step"], meta["cpu_seconds"]
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
        state = {f"model.{k}": v.contiguous() for k, v in self.module.state_dict().items() if "lm_head" not in k}
        for i, o in enumerate(self.opts):
            for index, fields in o.state_dict()["state"].items():
                state |= {f"opt{i}.{index}.{k}": v.contiguous() for k, v in fields.items() if torch.is_tensor(v)}
        tmp = self.path.with_suffix(".tmp")
        save_file({k: v.clone() for k, v in state.items()}, tmp)
        os.replace(tmp, self.path)
        self.path.with_suffix(".json").write_text(json.dumps({"step": step, "cpu_seconds": seconds}))

    def run(self, loss_of, report) -> None:
        began = time.process_time() - self.spent
        for step in range(self.start, self.steps):
            for o, base in zip(self.opts, self.base):
                for g, lr in zip(o.param_groups, base):
                    g["lr"] = lr * schedule(step, self.steps, self.decay)
            loss = loss_of(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            for o in self.opts:
                o.step()
                o.zero_grad(set_to_none=True)
            if (step + 1) % 50 == 0:
                line = report(step) if (step + 1) % 100 == 0 else ""
                spent = time.process_time() - began
                print(
                    f"{self.name} {step + 1:5d}/{self.steps} loss {loss.item():.3f} {line} {spent:.0f} CPU-s",
                    flush=True,
                )
            if (step + 1) % self.every == 0 or step + 1 == self.steps:
                self.save(step + 1, time.process_time() - began)


# ---------------------------------------------------------------- the three stages


def _reply_loss(
    model, batch: dict, features: torch.Tensor, gate: torch.Tensor, thrift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy of the reply (plus the cost of looking), and hits [replies, 4] (within 4 px, teacher
    forced)."""
    embeds = model.get_input_embeddings()(batch["ids"])
    start = len(batch["before"])
    embeds = torch.cat([embeds[:, :start], features.to(embeds.dtype), embeds[:, start + ROWS * COLS :]], 1)
    looks: list[torch.Tensor] = []
    _PACK.update(bias=batch["bias"], gate=gate, image=(start, start + ROWS * COLS), looks=looks)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=batch["pos"], use_cache=False)[0]
    _PACK.clear()
    wanted = batch["weight"][:, 1:] > 0
    target, weight = batch["ids"][:, 1:][wanted], batch["weight"][:, 1:][wanted]
    logits = hidden[:, :-1][wanted].float() @ model.get_input_embeddings().weight.T
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    loss = loss + thrift * (torch.stack(looks).float() + 1e-4).sqrt().sum()
    number = weight == 1
    value = batch["values"]
    hit = (value[logits[number].argmax(-1)] - value[target[number]]).abs() <= 4
    return loss, hit.view(-1, 4)


def _gate(recipe: Recipe, batch: int, p: float, seed: tuple) -> torch.Tensor:
    keep = np.random.default_rng((*seed, 3)).random((batch, recipe.layers, recipe.heads)) >= p
    return torch.from_numpy(keep.astype(np.float32))


def _language_batches(recipe: Recipe, tokenizer) -> tuple:
    packer = Packer(tokenizer)
    values = torch.full((len(tokenizer),), -999)
    for v in range(WIDTH + 1):
        values[tokenizer.convert_tokens_to_ids(str(v))] = v

    def build(
        split: str, step: int, chat: bool, kinds: dict, keep: float = 1.0, easy: bool = False, count: int | None = None
    ) -> tuple:
        n = count or recipe.scenes_per_step
        worlds = [
            draw_world((SPLITS[split], recipe.seed, step * n + i), recipe.questions_per_scene, kinds, easy)
            for i in range(n)
        ]
        shown = np.stack([_shown(s, keep, (recipe.seed, step, i)) for i, (s, _) in enumerate(worlds)])
        batch = packer.batch(worlds, chat, shown if keep < 1 else None)
        batch |= {"before": packer.before, "values": values}
        return worlds, batch

    return build


def _by_kind(worlds: list, hits: torch.Tensor) -> str:
    kinds = np.array([e.kind for _, chosen in worlds for e in chosen])
    right = hits.all(1).numpy()
    parts = [f"{k} {right[kinds == k].mean():.2f}" for k in scenes.KINDS if (kinds == k).any()]
    return f"x0 {hits[:, 0].float().mean():.2f} all {right.mean():.3f} ({', '.join(parts)})"


def train_backbone(recipe: Recipe, work: Path) -> None:
    model, tokenizer, codes = build_model(recipe)
    model.set_attn_implementation({"text_config": "packed"})
    build = _language_batches(recipe, tokenizer)
    parameters = [(n, p) for n, p in model.named_parameters() if "visual" not in n]

    def features(worlds: list, step: int) -> torch.Tensor:
        grids = [[codes.of(s.things[i] if i >= 0 else None) for i in token_owner(s)] for s, _ in worlds]
        clean = torch.stack([torch.stack(g) for g in grids])
        noise = torch.from_numpy(np.random.default_rng((recipe.seed, step, 4)).standard_normal(clean.shape))
        return clean + recipe.code_noise * noise.float()

    def loss_of(step: int) -> torch.Tensor:
        caption = step < recipe.caption_steps
        kinds = {"attribute": 1.0} if step < recipe.sparse_steps else MIX
        keep = min(1.0, max(0.0, step / recipe.sparse_steps - 1))
        worlds, batch = build("train", step, not caption, kinds, keep, easy=step < recipe.easy_steps)
        p = recipe.head_dropout * min(1.0, max(0.0, step / recipe.caption_steps - 1))
        p = recipe.late_head_dropout if step >= recipe.thrift_step else p
        gate = _gate(recipe, len(worlds), p, (recipe.seed, step))
        thrift = recipe.thrift * (step >= recipe.thrift_step)
        return _reply_loss(model, batch, features(worlds, step), gate, thrift)[0]

    def report(step: int) -> str:
        keep = min(1.0, max(0.0, step / recipe.sparse_steps - 1))
        worlds, batch = build("dev", 0, step >= recipe.caption_steps, MIX, keep, count=32)
        with torch.no_grad():
            gate = torch.ones(len(worlds), recipe.layers, recipe.heads)
            return _by_kind(worlds, _reply_loss(model, batch, features(worlds, -1 % 2**32), gate)[1])

    opts = optimisers(recipe, parameters)
    stage = Stage("backbone", work, recipe.backbone_steps, model.model.language_model, opts, decay=0.0)
    stage.resume().run(loss_of, report)


def pixels_to_patches(pictures: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised patches as the image processor makes them, and grid_thw; scenes need no resizing."""
    x = torch.from_numpy(np.stack(pictures)).float() / 255
    x = ((x - 0.5) / 0.5).view(len(pictures), ROWS, PATCH, COLS, PATCH, 3)
    patches = x.permute(0, 1, 3, 5, 2, 4).reshape(len(pictures) * ROWS * COLS, -1)
    return patches, torch.tensor([[1, ROWS, COLS]] * len(pictures))


def _tower(model, pictures: list[np.ndarray]) -> torch.Tensor:
    """Image features [scene, ROWS * COLS, hidden]."""
    patches, grid = pixels_to_patches(pictures)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.model.visual(patches, grid_thw=grid).pooler_output
    return out.float().view(len(pictures), ROWS * COLS, -1)


def train_tower(recipe: Recipe, work: Path, batch: int = 48) -> None:
    model, _, codes = build_model(recipe)
    model.set_attn_implementation({"vision_config": "packed"})
    visual = model.model.visual
    heads = {"colour": list(COLOURS), "shape": list(SHAPES), "size": list(SIZES)}
    readout = {k: torch.stack([codes.words[w] for w in ws]) for k, ws in heads.items()}

    def losses(split: str, step: int, count: int) -> tuple[torch.Tensor, dict]:
        worlds = [scenes.scene((SPLITS[split], recipe.seed, 10**6 + step * count + i)) for i in range(count)]
        owners = [token_owner(s) for s in worlds]
        out = _tower(model, [s.pixels for s in worlds]).flatten(0, 1)
        things = [s.things[i] if i >= 0 else None for s, o in zip(worlds, owners) for i in o]
        target = torch.stack([codes.of(t) for t in things])
        on = torch.tensor([t is not None for t in things])
        loss = F.mse_loss(out, target) * 4
        scores = {}
        for field, words in heads.items():
            gold = torch.tensor([words.index(getattr(t, field)) for t in things if t])
            logits = out[on] @ readout[field].T / 4
            loss = loss + F.cross_entropy(logits, gold)
            scores[field] = (logits.argmax(-1) == gold).float().mean().item()
        for i in range(4):
            gold = torch.tensor([t.box[i] // STEP for t in things if t])
            logits = out[on] @ codes.edges[i].T
            loss = loss + 0.5 * F.cross_entropy(logits, gold)
            scores["xyxy"[i] + "0011"[i]] = ((logits.argmax(-1) - gold).abs() <= 1).float().mean().item()
        return loss, scores

    def report(step: int) -> str:
        with torch.no_grad():
            return " ".join(f"{k} {v:.3f}" for k, v in losses("dev", 0, 64)[1].items())

    opts = optimisers(recipe, list(visual.named_parameters()), scale=1.5)
    Stage("tower", work, recipe.tower_steps, visual, opts).resume().run(
        lambda step: losses("train", step, batch)[0], report
    )


def train_tune(recipe: Recipe, work: Path) -> None:
    model, tokenizer, _ = build_model(recipe)
    model.set_attn_implementation({"text_config": "packed", "vision_config": "packed"})
    for name, module in (("backbone", model.model.language_model), ("tower", model.model.visual)):
        state = load_file(work / f"{name}.safetensors")
        module.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("model.")})
    build = _language_batches(recipe, tokenizer)

    def features(worlds: list) -> torch.Tensor:
        with torch.no_grad():
            return _tower(model, [s.pixels for s, _ in worlds])

    def loss_of(step: int) -> torch.Tensor:
        worlds, batch = build("train", 10**5 + step, True, MIX)
        gate = _gate(recipe, len(worlds), recipe.late_head_dropout, (recipe.seed, 10**5 + step))
        return _reply_loss(model, batch, features(worlds), gate, recipe.tune_thrift)[0]

    def report(step: int) -> str:
        worlds, batch = build("dev", 0, True, MIX, count=32)
        with torch.no_grad():
            gate = torch.ones(len(worlds), recipe.layers, recipe.heads)
            return _by_kind(worlds, _reply_loss(model, batch, features(worlds), gate)[1])

    parameters = [(n, p) for n, p in model.model.named_parameters() if "visual" not in n]
    opts = optimisers(recipe, parameters)
    Stage("tune", work, recipe.tune_steps, model.model, opts).resume().run(loss_of, report)


def export(name: str, recipe: Recipe, work: Path, folder: Path) -> None:
    """Write the folder that `AutoModelForImageTextToText.from_pretrained` reads: bfloat16 safetensors, tokenizer,
    chat template and processor files, and the manifest with recipe, steps and seconds."""
    model, tokenizer, _ = build_model(recipe)
    state = load_file(work / "tune.safetensors")
    model.model.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("model.")})
    stop, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = GenerationConfig(eos_token_id=[stop], pad_token_id=pad, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": 1, "temporal_patch_size": 1,
        "size": {"shortest_edge": PATCH * PATCH, "longest_edge": 4096 * PATCH * PATCH},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True,
    }  # fmt: skip
    for file, value in {
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": image | {"video_processor_type": "Qwen2VLVideoProcessor"},
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor"},
    }.items():
        (folder / file).write_text(json.dumps(value, indent=1) + "\n")
    stages = {s: json.loads((work / f"{s}.json").read_text()) for s in STAGES}
    about = {"model": name, "recipe": asdict(recipe), "stages": stages, "parameters": model.num_parameters(),
             "torch": torch.__version__}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")


def measure(name: str, folder: Path, n: int = 1000) -> dict:
    """Held-out quality by free generation, written into the manifest: accuracy on n scenes of four to eight things,
    by kind of expression, replies without a box, and both questions right on n / 2 scenes."""
    from vrhlib.evaluate import UNMASKED, accuracy, replies, two_questions
    from vrhlib.samples import grounding
    from vrhlib.vlm import load_vlm

    vlm = load_vlm(folder, prompt=PROMPT)
    vlm.max_new_tokens = 16
    single, pairs = grounding("scenes", "dev", n), grounding("scene-pairs", "dev", n)
    answers = replies(vlm, single, {UNMASKED: None}, batch_size=32)
    both = two_questions(replies(vlm, pairs, {UNMASKED: None}, batch_size=32), pairs)
    found = {
        "split": "dev", "n": n, "accuracy": round(accuracy(answers.outcome).mean, 2),
        "by_kind": answers.groupby("kind").outcome.apply(lambda o: round(accuracy(o).mean, 2)).to_dict(),
        "outcomes": answers.outcome.value_counts().to_dict(),
        "two_questions": round(both.mean, 2), "two_questions_n": both.n,
        "chance": round(100 * float(np.mean([s.chance for s in single])), 2),
    }  # fmt: skip
    about = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(about | {"quality": found}, indent=1) + "\n")
    return found


STAGES = {"backbone": train_backbone, "tower": train_tower, "tune": train_tune}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=RECIPES)
    parser.add_argument("--stage", choices=STAGES, help="one stage only; backbone and tower can run side by side")
    parser.add_argument("--work", type=Path, default=Path("data/runs/training"), help="checkpoints, to resume from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the model folder goes (default: data/nano/MODEL)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe, work = RECIPES[args.model], args.work / args.model
    work.mkdir(parents=True, exist_ok=True)
    for name, stage in STAGES.items():
        if args.stage in (None, name):
            stage(recipe, work)
    if args.stage is None:
        folder = args.out or Path("data/nano") / args.model
        export(args.model, recipe, work, folder)
        print(json.dumps(measure(args.model, folder), indent=1))


if __name__ == "__main__":
    main()
