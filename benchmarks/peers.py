"""What a user would reach for instead: Transformers' eager path, nnsight, TransformerLens.

    python -m benchmarks.peers --out peers.csv

Attention on the referent, all heads, one teacher-forced pass: by `vrhlib.attention.capture`, by `output_attentions`,
by an nnsight trace of the attention probabilities, by a TransformerLens hook on the attention pattern. Then a sweep
of twelve conditions (see `benchmarks.ablation`) by `vrhlib.decoding`, and by nnsight interventions on what `o_proj`
is given, one condition at a time. All must give the same numbers, and the same replies, before they are timed.

nnsight and TransformerLens are no dependencies of this repository. To measure them, install them into an environment of
their own, beside the versions of torch and transformers that `pyproject.toml` asks for:

    pip install --no-deps nnsight==0.8.1 transformer-lens==4.3.0
    pip install --no-deps zstandard beartype einops fancy-einsum jaxtyping wadler-lindig sentencepiece typeguard \\
        protobuf wandb transformers-stream-generator

A peer that is not installed, or that cannot take a model's class, is a row that says so.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.ablation import conditions, known_scores, naive, trimmed, verified
from benchmarks.capture import (
    as_written,
    captured_pass,
    eager,
    eager_pass,
    enlargement,
    greedy,
    mass_on_referent,
)
from benchmarks.turns import Disagreement, Found, agree, arguments, table, turns, written
from vrhlib import store
from vrhlib.attention import with_replies
from vrhlib.benchmarks import grounding
from vrhlib.vlm import VLM, Batch
from vrhlib.wiring import load_vlm

MODELS = ("nano-qwen2.5-vl", "nano-qwen3-vl", "nano-internvl3")
PACKAGES = {"Transformers eager": "transformers", "nnsight": "nnsight", "TransformerLens": "transformer-lens"}
MORE = ["peer", "version", "note"]
ROWS, SWEEP = "{} / captured rows", "{}, condition by condition / sweep of 12 conditions"


def version(peer: str) -> str:
    """Installed version of a peer's package; "" if there is none."""
    try:
        return importlib.metadata.version(PACKAGES[peer])
    except importlib.metadata.PackageNotFoundError:
        return ""


# ---------------------------------------------------------------- attention on the referent


def by_nnsight(vlm: VLM, batch: Batch, reply: list[int]) -> Callable[[], Found]:
    """A trace that reads each layer's probabilities, reduces them there and keeps the sums alone."""
    from nnsight import NNsight, save

    traced = NNsight(vlm.model)
    inputs, rows = with_replies(vlm, batch, [reply]), batch.length - 1 + np.arange(len(reply))

    @torch.inference_mode()
    def one_pass() -> Found:
        with eager(vlm):
            with traced.trace(**inputs, logits_to_keep=1):
                sums = save([])
                for layer in traced.model.language_model.layers:
                    weights = layer.self_attn.output[1]
                    sums.append(mass_on_referent(batch, weights, weights[0][:, rows]).mean(-1))
        return {"rows": torch.stack(list(sums)).float().cpu().numpy()}

    return one_pass


def by_transformer_lens(vlm: VLM, batch: Batch, reply: list[int]) -> Callable[[], Found]:
    """Hooks on every layer's attention pattern, in a bridge around a second copy of the model."""
    from transformer_lens.model_bridge.sources.transformers import boot, helpers
    from transformer_lens.model_bridge.supported_architectures.qwen2_5_vl import Qwen2_5_VLArchitectureAdapter
    from transformer_lens.model_bridge.supported_architectures.qwen3_vl import Qwen3VLArchitectureAdapter

    # Where torchvision is missing, boot() installs it, and with it another torch, into the running environment. It is
    # needed for video only; here it stays away.
    helpers._ensure_torchvision = lambda: False
    for adapter in (Qwen2_5_VLArchitectureAdapter, Qwen3VLArchitectureAdapter):
        adapter.required_libraries = []
    copy = load_vlm(vlm.name, str(vlm.device))
    copy.model.set_attn_implementation({"text_config": "eager"})
    folder = store.ROOT / "data" / "nano" / vlm.name
    bridge = boot(str(folder), hf_model=copy.model, tokenizer=copy.tokenizer, device=str(vlm.device))
    inputs, rows = with_replies(vlm, batch, [reply]), batch.length - 1 + np.arange(len(reply))
    ids = inputs.pop("input_ids")

    @torch.inference_mode()
    def one_pass() -> Found:
        sums: dict[int, torch.Tensor] = {}

        def keep(pattern, hook):
            sums[int(hook.name.split(".")[1])] = mass_on_referent(batch, pattern, pattern[0][:, rows]).mean(-1)

        hooks = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(vlm.grid[0])]
        bridge.run_with_hooks(ids, fwd_hooks=hooks, **inputs)
        return {"rows": torch.stack([sums[layer] for layer in sorted(sums)]).float().cpu().numpy()}

    return one_pass


def by_eager(vlm: VLM, batch: Batch, reply: list[int]) -> Callable[[], Found]:
    return partial(eager_pass, vlm, batch, reply)


BY = {"Transformers eager": by_eager, "nnsight": by_nnsight, "TransformerLens": by_transformer_lens}


# ---------------------------------------------------------------- ablation


@torch.inference_mode()
def ablated_by_nnsight(traced, vlm: VLM, samples, acting, lengths: list[int]) -> Found:
    """Replies, a condition at a time. `lengths`: tokens of each reply; a trace has to know beforehand how many steps it
    intervenes in (an open loop ends with the reply, but what it set was lost here: the replies were the unmasked
    model's)."""
    found, size = [], vlm.layers[0].self_attn.head_dim
    for condition, steps in zip(acting, lengths):
        batch = vlm.prepare(list(samples))
        if condition is None:
            ids = vlm.model.generate(**batch.tensors, **greedy(vlm))
        else:
            layers = sorted({head.layer for head in condition.heads})
            with traced.generate(dict(batch.tensors), **greedy(vlm)) as tracer:
                for _ in tracer.iter[0:steps]:
                    for layer in layers:
                        projection = traced.model.language_model.layers[layer].self_attn.o_proj
                        states = projection.input.clone()
                        for head in condition.heads:
                            if head.layer == layer:
                                states[..., head.head * size : (head.head + 1) * size] = 0
                        projection.input = states
                ids = tracer.result.save()
        found.append(trimmed(vlm, ids[0, batch.length :].tolist()))
    return {"replies": found}


def sweeps(vlm: VLM, rounds: int) -> list[dict]:
    """nnsight's sweep over ours, both against the naive loop's replies."""
    from nnsight import TransformersModel

    samples, acting = grounding("scenes", "test", 1, seed=0), conditions(known_scores(vlm), "all")
    wanted = naive(vlm, samples, acting)
    lengths = [len(reply) for reply in wanted["replies"]]
    traced = TransformersModel(vlm.model, task="image-text-to-text", tokenizer=vlm.tokenizer, processor=vlm.processor)
    ways = {
        "ours": partial(verified, vlm, samples, acting),
        "nnsight": partial(ablated_by_nnsight, traced, vlm, samples, acting, lengths),
    }
    agree({"naive loop": wanted} | {name: way() for name, way in ways.items()})
    facts = {"model": vlm.name, "image_tokens": len(vlm.prepare(list(samples)).grids[0]), "n": len(acting)}
    return turns(ways, rounds, vlm.device).rows(SWEEP.format("nnsight"), "nnsight", "ours", **facts)


# ---------------------------------------------------------------- both


def measured(name: str, tokens: int, rounds: int, device: str = "cpu") -> list[dict]:
    """Ratios of every peer that is installed and takes the model; a row without a ratio says why there is none."""
    vlm, samples = load_vlm(name, device), grounding("scenes", "test", 1, seed=0)
    batch = vlm.see(vlm.prepare(samples.enlarged(enlargement(vlm, samples, tokens))))
    facts = {"model": vlm.name, "image_tokens": len(batch.grids[0]), "n": 1}
    rows: list[dict] = []
    for peer, build in BY.items():
        about = {"peer": peer, "version": version(peer)}

        def compare(peer=peer, build=build) -> list[dict]:
            reply = as_written(vlm, batch)
            ways = {"captured": partial(captured_pass, vlm, batch, reply), peer: build(vlm, batch, reply)}
            return turns(ways, rounds, vlm.device, tuple(ways)).rows(ROWS.format(peer), peer, "captured", **facts)

        rows += [row | about for row in _or_why(compare, about["version"], ROWS.format(peer), facts)]
    vlm = load_vlm(name, device)  # nnsight wraps the modules of the one above
    samples = vlm.prepare(list(samples))
    facts = {"model": vlm.name, "image_tokens": len(samples.grids[0]), "n": 12}
    about = {"peer": "nnsight", "version": version("nnsight")}
    found = _or_why(partial(sweeps, vlm, rounds), about["version"], SWEEP.format("nnsight"), facts)
    return rows + [row | about for row in found]


def _or_why(compare: Callable[[], list[dict]], installed: str, measure: str, facts: dict) -> list[dict]:
    """Rows of a comparison, or one that says why there are none. What disagrees is no reason: it is raised."""
    why = "not installed"
    if installed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [row | {"note": ""} for row in compare()]
        except Disagreement:
            raise
        except Exception as error:  # a peer may fail in any way; which way is the finding
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return [facts | {"measure": measure, "quantity": "time", "note": why}]


def main() -> None:
    given = arguments(__doc__, MODELS, tokens=(768, "image tokens, at least"))
    rows = [row for name in given.models for row in measured(name, given.tokens, given.rounds, given.device)]
    found = table(rows, MORE)
    written(found[found.ratio.notna()], None)
    for _, row in found[found.ratio.isna()].iterrows():
        print(f"{row.model}: {row.measure}: {row.note}")
    if given.out:
        store.write_atomic(given.out, found.to_csv(index=False))


if __name__ == "__main__":
    main()
