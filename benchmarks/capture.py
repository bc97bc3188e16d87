"""What it costs to see the attention of a few rows: beside a pass that looks at nothing, and beside eager attention.

    python -m benchmarks.capture --out capture.csv

One picture of at least --tokens image tokens, one reply. Three passes over the same sequence: with rows captured, plain
(SDPA), and eager with `output_attentions`. Then three ways to a *new* reply and its rows: the reply first and one
captured pass after it (what the library does), rows captured at every step of generating, and eager attention there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from benchmarks.models import CONFIGS, random_vlm
from benchmarks.turns import Found, Turns, arguments, table, turns, written
from vrhlib.attention import capture, generate, with_replies
from vrhlib.benchmarks import grounding
from vrhlib.samples import Samples
from vrhlib.vlm import VLM, Batch
from vrhlib.wiring import load_vlm

PLAIN = "captured rows / plain forward"
EAGER = "eager attention / captured rows"
FORCED = "1 captured in generate, eager / reply, then captured pass"
INSIDE = "1 captured in generate, SDPA / reply, then captured pass"
KNOWN = "1 captured in generate, eager / captured pass, reply known"
MODELS = ("random-wide", "nano-qwen2.5-vl", "nano-qwen3-vl")  # InternVL's tiles come to 3,136 tokens: minutes if eager


def model(name: str, device: str) -> VLM:
    """An embedded model, or one with random weights."""
    return random_vlm(name, device) if name in CONFIGS else load_vlm(name, device)


def enlargement(vlm: VLM, samples: Samples, tokens: int) -> int:
    """How many times a picture has to be enlarged to make at least so many image tokens; where pictures are cut into
    tiles, the model may from now on cut as many more of them."""
    processor = vlm.processor.image_processor
    tiles = getattr(processor, "max_patches", None)
    for factor in range(1, 17):
        if tiles:
            processor.max_patches = tiles * factor**2
        if len(vlm.prepare(samples[:1].enlarged(factor)).grids[0]) >= tokens:
            return factor
    raise ValueError(
        f"{vlm.name} makes fewer than {tokens} image tokens of a picture 16 times as wide. Ask for fewer (--tokens)."
    )


def mass_on_referent(batch: Batch, rows: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Attention on the referent's image tokens, summed: [..., kv] to [...]; `rows` tells where the numbers live."""
    keys = batch.image_columns[0][batch.grids[0].tokens_in(batch.samples[0].box)]
    inside = torch.zeros(attention.shape[-1], device=rows.device)
    inside[keys] = 1
    return attention.float() @ inside


def as_written(vlm: VLM, batch: Batch) -> list[int]:
    """The right box as the family writes it, token ids."""
    written = vlm.write_box(batch.samples[0].box, batch.samples[0].image.size, batch.resized[0])
    return vlm.tokenizer(written, add_special_tokens=False)["input_ids"]


@contextmanager
def eager(vlm: VLM):
    """The text stack on Transformers' eager attention, the only one that can hand out its matrices."""
    vlm.model.set_attn_implementation({"text_config": "eager"})
    try:
        yield
    finally:
        vlm.model.set_attn_implementation({"text_config": "sdpa"})


# ---------------------------------------------------------------- one pass


@torch.inference_mode()
def captured_pass(vlm: VLM, batch: Batch, reply: list[int]) -> Found:
    """Mean mass on the referent of the rows that predict a reply, float [layers, heads], and the last logits."""
    inputs = with_replies(vlm, batch, [reply])
    rows = torch.arange(len(reply))[None] + batch.length - 1
    place = inputs["input_ids"]
    with capture(vlm, rows, {"sum": lambda a: mass_on_referent(batch, place, a)}) as got:
        out = vlm.model(**inputs, logits_to_keep=1)
    return {"rows": _numbers(got["sum"][0].mean(-1)), "logits": _numbers(out.logits[0, -1])}


@torch.inference_mode()
def plain_pass(vlm: VLM, batch: Batch, reply: list[int]) -> Found:
    """The same sequence, nobody looking."""
    out = vlm.model(**with_replies(vlm, batch, [reply]), logits_to_keep=1)
    return {"logits": _numbers(out.logits[0, -1])}


@torch.inference_mode()
def eager_pass(vlm: VLM, batch: Batch, reply: list[int]) -> Found:
    """What `captured_pass` gives, read off full attention matrices."""
    inputs, rows = with_replies(vlm, batch, [reply]), batch.length - 1 + np.arange(len(reply))
    with eager(vlm):
        out = vlm.model(**inputs, output_attentions=True, logits_to_keep=1)
    mass = [mass_on_referent(batch, a, a[0][:, rows]).mean(-1) for a in out.attentions]
    return {"rows": _numbers(torch.stack(mass)), "logits": _numbers(out.logits[0, -1])}


def _numbers(values: torch.Tensor) -> np.ndarray:
    return values.float().cpu().numpy()


# ---------------------------------------------------------------- a new reply and its rows


def own_reply(vlm: VLM, batch: Batch) -> list[int]:
    """The model's greedy reply without what ends it."""
    return [int(i) for i in generate(vlm, batch)[0, 0] if i >= 0 and i not in vlm.stop_ids]


def forced(vlm: VLM, batch: Batch) -> Found:
    """The reply, then one captured pass over it: what the library does."""
    reply = own_reply(vlm, batch)
    return {"reply": reply, "rows": captured_pass(vlm, batch, reply)["rows"]}


@torch.inference_mode()
def inside(vlm: VLM, batch: Batch, count: int) -> Found:
    """Rows captured while the reply is generated. (How many there will be is told beforehand: an advantage.)"""
    rows = torch.arange(count)[None] + batch.length - 1
    place = batch.tensors["input_ids"]
    with capture(vlm, rows, {"sum": lambda a: mass_on_referent(batch, place, a)}) as got:
        ids = vlm.model.generate(**vlm.inputs(batch), **greedy(vlm))
    return {"reply": _reply(vlm, ids[0, batch.length :]), "rows": _numbers(got["sum"][0].mean(-1))}


@torch.inference_mode()
def inside_eager(vlm: VLM, batch: Batch, count: int) -> Found:
    """The same, from the matrices that eager attention hands out at every step."""
    with eager(vlm):
        out = vlm.model.generate(
            **vlm.inputs(batch), **greedy(vlm), output_attentions=True, return_dict_in_generate=True
        )
    steps = [
        torch.stack([mass_on_referent(batch, a, a[0, :, -1]) for a in layers]) for layers in out.attentions[:count]
    ]
    return {"reply": _reply(vlm, out.sequences[0, batch.length :]), "rows": _numbers(torch.stack(steps).mean(0))}


def greedy(vlm: VLM) -> dict:
    """Settings of a stock `generate` that decodes as the library does."""
    return dict(
        do_sample=False, num_beams=1, max_new_tokens=vlm.max_new_tokens, pad_token_id=vlm.tokenizer.pad_token_id,
        eos_token_id=sorted(vlm.stop_ids), temperature=None, top_p=None, top_k=None, repetition_penalty=None,
    )  # fmt: skip


def _reply(vlm: VLM, ids: torch.Tensor) -> list[int]:
    ids = ids.tolist()
    end = next((i for i, token in enumerate(ids) if token in vlm.stop_ids), len(ids))
    return ids[:end]


# ---------------------------------------------------------------- comparisons


def measured(vlm: VLM, tokens: int, rounds: int, tolerance: float = 1e-5) -> list[dict]:
    """Ratios of one model at `tokens` image tokens or a few more."""
    samples = grounding("scenes", "detect", 1, seed=0)
    large = samples.enlarged(enlargement(vlm, samples, tokens))
    batch = vlm.see(vlm.prepare(large))
    facts = {"model": vlm.name, "image_tokens": len(batch.grids[0]), "n": 1}
    reply = as_written(vlm, batch)
    ways: dict[str, Callable] = {
        name: partial(one, vlm, batch, reply)
        for name, one in (("captured", captured_pass), ("plain", plain_pass), ("eager", eager_pass))
    }
    found = turns(ways, rounds, vlm.device, tuple(ways), tolerance)
    rows = found.rows(PLAIN, "captured", "plain", **facts) + found.rows(EAGER, "eager", "captured", **facts)
    count = len(own_reply(vlm, batch))
    new = {
        "forced": partial(forced, vlm, batch), "inside": partial(inside, vlm, batch, count),
        "eager": partial(inside_eager, vlm, batch, count),
    }  # fmt: skip
    replied = turns(new, max(1, rounds - 2), vlm.device, (), tolerance)
    known = found.seconds["captured"][: len(replied.seconds["forced"])]
    both = Turns(replied.seconds | {"pass": known}, {}, replied.device)
    for measure, above, below in ((FORCED, "eager", "forced"), (INSIDE, "inside", "forced"), (KNOWN, "eager", "pass")):
        rows += both.rows(measure, above, below, **facts)
    return rows


def main() -> None:
    given = arguments(__doc__, MODELS, tokens=(1500, "image tokens, at least"))
    rows = [row for name in given.models for row in measured(model(name, given.device), given.tokens, given.rounds)]
    written(table(rows), given.out)


if __name__ == "__main__":
    main()
