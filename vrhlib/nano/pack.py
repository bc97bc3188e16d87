"""Training batches: many questions behind one picture (or one list of facts), at little more than the cost of one.

Every question sees the prefix (picture or facts) and itself only, at the positions it would have alone, so a packed
question is computed exactly as if it stood alone. The attention function uses that: it computes text against prefix
and text against its own question, and never the blocks between questions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from vrhlib.boxes import Box, to_frame
from vrhlib.nano import questions, scenes
from vrhlib.nano.models import Nano, numerals, picture
from vrhlib.nano.scenes import HEIGHT, SPLITS, WIDTH, Scene
from vrhlib.vlm import FAMILIES

ANSWER = 1.5  # weight of a one-word answer in the loss; each of a box's four numbers weighs 1


@dataclass
class World:
    """A picture (or facts in text) with questions about it: (kind, text of the user, reply) each."""

    pairs: list[tuple[str, str, str]]
    scene: Scene | None = None
    facts: str = ""


# ---------------------------------------------------------------- what is asked and how it is written


class Speech:
    """How a model is asked for boxes and writes them; `bare` is the backbones' way, before any model's own."""

    def __init__(self, nano: Nano, bare: bool = False):
        self.bare, self.family = bare, FAMILIES[nano.kind.family]

    def box(self, box: tuple, stretch: float) -> str:
        if self.bare:  # places on the line, on the backbone's even numerals
            line = [v * (stretch if i % 2 else 1) for i, v in enumerate(box)]
            return "[" + ",".join(str(2 * round(v / 2)) for v in line) + "]"
        size = WIDTH, HEIGHT
        return self.family.written.format(*to_frame(Box(*box), self.family.frame, size, size))

    def locate(self, e: scenes.Expression) -> str:
        if self.bare:
            return e.text if e.kind == "question" else f"Locate {e.text}."
        prompt = self.family.question_prompt if e.kind == "question" else self.family.prompt
        return prompt.replace("{expression}", e.text)


@dataclass(frozen=True)
class Mix:
    """What a batch is made of: shares of the kinds of picture, of questions among the pairs of a scene, and the
    kinds of expression and of question."""

    worlds: dict[str, float]
    vqa: float
    expressions: dict[str, float]
    questions: dict[str, float] = field(default_factory=dict)
    things: tuple[int, int] = (3, 8)
    plain_facts: float = 0.0  # share of the lists of facts whose owners are one word
    reading: float = 1.0  # questions about a text (facts, signs, a document), as a share of those about a scene


def draw_world(seed: tuple[int, ...], mix: Mix, speech: Speech, pairs: int, stretch: float, caption: bool) -> World:
    """The world of a seed, with at most `pairs` questions. Captions are an expression and its box side by side."""
    rng = np.random.default_rng((*seed, 2))
    kind = scenes.draw_kind(rng, mix.worlds)
    reading = int(pairs * mix.reading)
    if kind == "facts":
        known = questions.facts(seed, bool(mix.plain_facts) and rng.random() < mix.plain_facts)
        asked = [questions.fact_question(known, rng) for _ in range(reading)]
        return World([(q.kind, q.text, q.answer) for q in asked], facts=known.text + "\n")
    if kind in ("signs", "document"):
        drawn = (scenes.signs if kind == "signs" else scenes.document)(seed)
        ask = questions.sign_question if kind == "signs" else questions.line_question
        asked = [ask(drawn, rng) for _ in range(reading)]
        return World([(q.kind, q.text, q.answer) for q in asked], drawn)
    single = kind == "single"
    drawn = scenes.scene(seed, 1 if single else int(rng.integers(mix.things[0], mix.things[1] + 1)))
    said, made = scenes.expressions(drawn), []
    for _ in range(pairs // 2 if single else pairs):
        if rng.random() < (0.8 if single else mix.vqa):
            q = questions.draw_question(drawn, rng, {"single": 1.0} if single else mix.questions, said)
            made += [(q.kind, q.text, q.answer)] if q else []
        elif e := scenes.draw_expression(drawn, rng, mix.expressions, said=said):
            text = e.text.removeprefix("the") if caption else speech.locate(e)
            written = speech.box(drawn.things[e.referent].box, stretch)
            made.append(("caption" if caption else e.kind, text, written))
    return World(made, drawn)


# ---------------------------------------------------------------- batches


class Packer:
    """`planar`, `rows` and `cols`: how the image tokens lie; a backbone trains with several layouts. `tiles`: the
    image tokens come so many times (InternVL's tiles and thumbnail of a large picture)."""

    def __init__(self, nano: Nano, bare: bool = False, planar: bool | None = None, rows: int = 0, cols: int = 0,
                 permille: bool | None = None, tiles: int = 1):  # fmt: skip
        kind = nano.kind
        self.nano, self.speech = nano, Speech(nano, bare)
        self.planar = kind.planar if planar is None else planar
        self.permille = kind.permille if permille is None else permille
        self.rows, self.cols, self.tiles = rows or kind.rows, cols or kind.cols, tiles
        self.stretch = WIDTH / HEIGHT if self.permille else 1.0
        self.encode = lru_cache(200_000)(
            lambda text: tuple(nano.tokenizer(text, add_special_tokens=False)["input_ids"])
        )
        system = f"<|im_start|>system\n{kind.system}<|im_end|>\n" if kind.system and not bare else ""
        self.start = self.encode(f"{system}<|im_start|>user\n")
        self.open, self.close = self.encode(kind.opening), self.encode(kind.closing)
        self.pad = nano.id(kind.pad)
        self.numerals = {nano.id(text) for text in numerals(kind.permille)}

    @property
    def image_tokens(self) -> int:
        return self.rows * self.cols * self.tiles

    def _prefix(self, world: World) -> tuple[list[int], np.ndarray, slice]:
        """Token ids, positions int [3, n + 1] (the last is where text goes on), and which of them are the image."""
        if world.scene is None:
            ids = [*self.start, *self.encode(world.facts)]
            return ids, np.tile(np.arange(len(ids) + 1), (3, 1)), slice(0, 0)
        n, v = len(self.start) + len(self.open), self.image_tokens
        ids = [*self.start, *self.open, *[self.pad] * v, *self.close]
        if not self.planar:
            return ids, np.tile(np.arange(len(ids) + 1), (3, 1)), slice(n, n + v)
        row, col = np.divmod(np.arange(v), self.cols)
        image = np.stack([np.full(v, n), n + row, n + col])
        tail = n + max(self.rows, self.cols) + np.arange(len(self.close) + 1)
        return ids, np.concatenate([np.tile(np.arange(n), (3, 1)), image, np.tile(tail, (3, 1))], 1), slice(n, n + v)

    def pair(self, kind: str, text: str, reply: str) -> tuple[list[int], list[float]]:
        """Token ids and, per token, the weight of *predicting* it in the loss: numbers and answers count in full."""
        q = self.encode(text if kind == "caption" else f"{text}<|im_end|>\n<|im_start|>assistant\n")
        r = self.encode(f"{reply}<|im_end|>\n")
        box = len(r) > 6
        full = [1.0 * (t in self.numerals) if box else ANSWER * (i == 0) for i, t in enumerate(r[:-1])]
        weights = [w or 0.1 for w in full] + [0.0]
        return [*q, *r], [0.0] * len(q) + weights

    def batch(self, worlds: list[World], shown: np.ndarray | None = None) -> dict:
        """`shown` bool [world, V] hides image tokens. Text is laid out as S questions of L tokens behind P prefix
        tokens: ids [B, P + S * L]."""
        prefixes = [self._prefix(w) for w in worlds]
        packed = [[self.pair(*p) for p in w.pairs] for w in worlds]
        B, P = len(worlds), max(len(ids) for ids, _, _ in prefixes)
        S, L = max(map(len, packed)), max(len(ids) for pairs in packed for ids, _ in pairs)
        ids = np.zeros((B, P + S * L), dtype=np.int64)
        pos = np.zeros((3, B, P + S * L), dtype=np.int64)
        weight = np.zeros((B, P + S * L), dtype=np.float32)
        valid, image = np.zeros((B, P), bool), np.zeros((B, P), bool)
        real = np.zeros((B, S, L), bool)
        for b, (prefix, places, seen) in enumerate(prefixes):
            n = len(prefix)
            ids[b, :n], pos[:, b, :n], valid[b, :n] = prefix, places[:, :-1], True
            image[b, seen] = True
            if shown is not None and worlds[b].scene is not None:
                valid[b, seen] = shown[b]
            for s, (tokens, weights) in enumerate(packed[b]):
                here = slice(P + s * L, P + s * L + len(tokens))
                ids[b, here], weight[b, here], real[b, s, : len(tokens)] = tokens, weights, True
                pos[:, b, here] = places[0, -1] + np.arange(len(tokens))
        valid, causal = torch.from_numpy(valid), torch.ones(L, L, dtype=torch.bool).tril()
        ahead = torch.ones(P, P, dtype=torch.bool).tril()
        prefix_ok = (ahead & valid[:, None]) | torch.eye(P, dtype=torch.bool)
        text_ok = torch.cat([valid[:, None].expand(B, L, P), causal.expand(B, L, L)], 2)
        bias = [torch.zeros(m.shape).masked_fill_(~m, -1e4) for m in (prefix_ok, text_ok)]
        kinds = [[k for k, _, _ in w.pairs] for w in worlds]
        return {
            "ids": torch.from_numpy(ids), "pos": torch.from_numpy(pos), "weight": torch.from_numpy(weight),
            "prefix_bias": bias[0][:, None], "text_bias": bias[1][:, None, None], "image": torch.from_numpy(image),
            "real": torch.from_numpy(real) & torch.from_numpy(image.any(1))[:, None, None],
            "shape": (P, S, L), "kinds": kinds,
        }  # fmt: skip


_PACK: dict = {}


def _packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Plain matmul-softmax; at small head sizes the backward of fused attention is far slower on a CPU."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    if "shape" not in _PACK or not hasattr(module, "layer_idx"):
        return (((query * scaling) @ key.transpose(2, 3)).softmax(-1).to(value.dtype) @ value).transpose(1, 2), None
    P, S, L = _PACK["shape"]
    B, H, _, d = query.shape
    query = (query * scaling).to(value.dtype)
    key = key.to(value.dtype)
    front = ((query[:, :, :P] @ key[:, :, :P].transpose(2, 3)) + _PACK["prefix_bias"]).softmax(-1)
    front = front.to(value.dtype) @ value[:, :, :P]
    q, k, v = (x[:, :, P:].reshape(B, H, S, L, d) for x in (query, key, value))
    far = (query[:, :, P:] @ key[:, :, :P].transpose(2, 3)).view(B, H, S, L, P)
    near = q @ k.transpose(3, 4)
    weights = (torch.cat([far, near], 4) + _PACK["text_bias"]).softmax(-1)
    if "looks" in _PACK:  # each head's mean attention from the text behind a picture to the picture
        there = (weights[..., :P] * _PACK["image"][:, None, None, None]).sum(-1) * _PACK["real"][:, None]
        _PACK["looks"].append(there.sum((0, 2, 3)) / _PACK["real"].sum().clamp(min=1))
    weights = weights.to(value.dtype)
    back = (weights[..., :P].reshape(B, H, S * L, P) @ value[:, :, :P]) + (weights[..., P:] @ v).view(B, H, S * L, d)
    out = torch.cat([front, back], 2) * _PACK["gate"][:, module.layer_idx, :, None, None].to(value.dtype)
    return out.transpose(1, 2), None


# No mask function goes with it, on purpose: the mask is the batch's own.
AttentionInterface.register("packed", _packed_attention)


@dataclass
class Outcome:
    """Loss, and per reply (in batch order) its kind and whether all of it is right (teacher forced; a number counts
    as right within 4 of the 128 places of the line)."""

    loss: torch.Tensor
    kinds: list[str]
    right: np.ndarray

    def __str__(self) -> str:
        kinds = np.array(self.kinds)
        return " ".join(f"{k} {self.right[kinds == k].mean():.2f}" for k in dict.fromkeys(sorted(self.kinds)))


def run(nano: Nano, batch: dict, features: torch.Tensor, gate: torch.Tensor,
        deep: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Last hidden states [B, P + S * L, hidden], and each head's mean look at the pictures [layers, heads].

    `features` [pictures, V, hidden] for the worlds that have a picture; `gate` [B, layers, heads] of 0 and 1.
    """
    batch = {k: v.to(nano.device) if torch.is_tensor(v) else v for k, v in batch.items()}
    features, gate = features.to(nano.device), gate.to(nano.device)
    embeds = nano.model.get_input_embeddings()(batch["ids"])
    where = F.pad(batch["image"], (0, embeds.shape[1] - batch["shape"][0]))
    embeds = embeds.masked_scatter(where[..., None].expand_as(embeds), features.to(embeds.dtype))
    looks: list[torch.Tensor] = []
    _PACK.update({k: batch[k] for k in ("shape", "prefix_bias", "text_bias", "image", "real")}, gate=gate, looks=looks)
    extra = {"visual_pos_masks": where, "deepstack_visual_embeds": [d.flatten(0, 1) for d in deep]} if deep else {}
    positions = batch["pos"] if nano.kind.planar else batch["pos"][0]
    hidden = nano.language(inputs_embeds=embeds, position_ids=positions, use_cache=False, **extra)[0]
    _PACK.clear()
    return hidden, torch.stack(looks)


def reply_loss(nano: Nano, batch: dict, features: torch.Tensor, gate: torch.Tensor, thrift: float = 0.0,
               deep: list[torch.Tensor] | None = None) -> Outcome:  # fmt: skip
    """Weighted cross-entropy of the replies plus the cost of looking; arguments as in `run`."""
    with torch.autocast(nano.device.type, torch.bfloat16):
        hidden, looks = run(nano, batch, features, gate, deep)
    ids, weight = (batch[k][:, 1:].to(nano.device) for k in ("ids", "weight"))
    wanted = weight > 0
    target, weight = ids[wanted], weight[wanted]
    logits = hidden[:, :-1][wanted].float() @ nano.table().T
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    loss = loss + thrift * (looks.float() + 1e-4).sqrt().sum()
    value, said = nano.values, logits.detach().argmax(-1)
    number = (weight == 1) & (value[said] >= 0)  # of a box
    hit = torch.where(number, (value[said] - value[target]).abs() <= 4, said == target) | (weight < 1)
    P, S, L = batch["shape"]
    reply = torch.arange(wanted.numel()).view(wanted.shape)[wanted.cpu()]
    row, column = reply // wanted.shape[1], reply % wanted.shape[1] + 1 - P
    index = (row * S + column // L).numpy()
    right = np.ones(len(batch["kinds"]) * S, bool)
    np.logical_and.at(right, index, hit.cpu().numpy())
    kinds = [k for world in batch["kinds"] for k in world]
    kept = np.concatenate([np.arange(len(ks)) + b * S for b, ks in enumerate(batch["kinds"])]) if kinds else []
    return Outcome(loss, kinds, right[kept])


class Batches:
    """Worlds of a split by step, packed: the same numbers for the same seed, whatever ran before."""

    def __init__(self, packer: Packer, seed: int, scenes_per_step: int, pairs: int):
        self.packer, self.seed, self.n, self.pairs = packer, seed, scenes_per_step, pairs

    def worlds(self, split: str, step: int, mix: Mix, caption: bool = False, count: int | None = None) -> list[World]:
        n, p = count or self.n, self.packer
        made = [
            draw_world((SPLITS[split], self.seed, step * n + i), mix, p.speech, self.pairs, p.stretch, caption)
            for i in range(n)
        ]
        return [w for w in made if w.pairs]

    def codes(self, worlds: list[World], noise: float, step: int) -> torch.Tensor:
        """What a perfect tower would show, plus noise; float [pictures, V, hidden]."""
        p = self.packer
        clean = [p.nano.codes.of(picture(w.scene, p.rows, p.cols, p.permille)) for w in worlds if w.scene is not None]
        if not clean:
            return torch.zeros(0, p.image_tokens, p.nano.shape.hidden)
        codes = torch.stack(clean)
        jitter = np.random.default_rng((self.seed, step, 4)).standard_normal(codes.shape, dtype=np.float32)
        return codes + noise * torch.from_numpy(jitter)

    def shown(self, worlds: list[World], keep: float, step: int) -> np.ndarray:
        """One token of every thing, and each other token with probability `keep`; bool [world, V]."""
        p, out = self.packer, []
        for i, w in enumerate(worlds):
            rng = np.random.default_rng((self.seed, step, i, 5))
            seen = rng.random(p.image_tokens) < keep
            if w.scene is not None:
                owner = picture(w.scene, p.rows, p.cols, p.permille).owner
                for thing in range(len(w.scene.things)):
                    if (mine := np.flatnonzero(owner == thing)).size:
                        seen[rng.choice(mine)] = True
            out.append(seen)
        return np.stack(out)
