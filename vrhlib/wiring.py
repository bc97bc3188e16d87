"""Loads a vision-language model and proves that it is wired as the rest of the library assumes.

This runs at every load and takes seconds. Where each image token looks is proven by `VLM.check`, on demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vrhlib.attention import capture
from vrhlib.samples import Sample
from vrhlib.vlm import VLM, Batch, WiringError, load_unproven

# How far captured rows times values may differ from what `o_proj` is given, relative to its largest entry. In bfloat16
# the stock kernel rounds probabilities to eight bits, the captured ones stay float32.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def load_vlm(
    name: str | Path,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    prompt: str | None = None,
    tiles: int | None = None,
    instead_of: VLM | None = None,
) -> VLM:
    """Load a model of `profiles.MODELS` by name, or any model of a known family from a folder or Hub id.

    `prompt` (with {expression}) replaces that of the model's pin or family; `tiles` the largest number of tiles that
    InternVL cuts a picture into (12 as shipped, and in the paper's Table A11; its authors evaluate RefCOCO with 6).
    `instead_of`: a loaded model that is given up for this one, before its weights are read, so that two never share a
    GPU; if it is the one asked for, it is what you get.

    Only safetensors, never remote code. Default device: VRHLIB_DEVICE, else CUDA where there is one; default dtype:
    bfloat16 on CUDA, float32 on CPU. Raises ValueError or OSError with the next step if the name is unknown, weights
    are missing or of another shape, or are another model's, MemoryError if they do not fit, and WiringError if the
    proof of wiring fails.
    """
    if instead_of is not None:
        if instead_of.name == str(name) and (device, dtype, prompt, tiles) == (None,) * 4:
            return instead_of
        instead_of.release()
    try:
        vlm = load_unproven(name, device, dtype, prompt, tiles)
        vlm.wiring = prove(vlm)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"{name} does not fit into the device's memory ({' '.join(str(error).split())[:160]}). Free it (nvidia-smi "
            "shows who holds it; load_vlm(..., instead_of=vlm) gives up the model before), or take a larger device."
        ) from error
    return vlm


@torch.inference_mode()
def prove(vlm: VLM) -> dict:
    """Check on one small picture what every result rests on. Returns the measured effects.

    The prompt holds as many image tokens as the grid (`VLM.prepare` sees to that). Every layer's `o_proj` reads heads x
    head_dim columns, and cutting all of them changes the logits. Captured attention rows sum to 1, and the rows of head
    h, times the values of its group, are what `o_proj` is given in the columns of head h: so rows, heads and groups are
    in the order that the library takes them for. The picture reaches the answer. Values and `o_proj`'s input come from
    hooks, independent of the attention function that captures.
    """
    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3), dtype=np.uint8)
    batch, grey = (
        vlm.prepare([Sample("wiring", image, "wiring", "the circle")])
        for image in (Image.fromarray(noise), Image.new("RGB", (160, 160), (128, 128, 128)))
    )
    plain, seen = _logits(vlm, batch), {}
    layers, heads = vlm.grid
    try:
        with _watched(vlm, seen), capture(vlm, torch.tensor([[batch.length - 1]]), {"rows": _whole}) as got:
            vlm.model(**vlm.inputs(batch), logits_to_keep=1)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:  # a layer without our attention function, or one too many
        ran = f"{len(seen)} attention layers ran, config.json says {layers}"
        raise WiringError(f"{vlm.name}: {ran}. {error}") from error
    rows = got["rows"][0, :, :, 0]
    if (off := (rows.sum(-1) - 1).abs().max().item()) > 1e-4:
        raise WiringError(f"{vlm.name}: captured attention rows sum to 1 ± {off:.2g}.")
    bound = TOLERANCE[vlm.model.dtype]
    worst = 0.0
    for i, layer in enumerate(vlm.layers):
        size = layer.self_attn.head_dim
        values, given = seen[i]
        if given.shape[-1] != heads * size:
            raise WiringError(f"{vlm.name}: o_proj of layer {i} reads {given.shape[-1]} columns, not {heads} heads.")
        values = values[0].unflatten(-1, (-1, size)).transpose(0, 1)  # [groups, S, head_dim]
        expected = rows[i][:, None] @ values.repeat_interleave(heads // len(values), 0).float()
        apart = (expected.flatten() - given[0, -1].float()).abs().max().item() / given[0, -1].abs().max().item()
        worst = max(worst, apart)
        if not apart <= bound:
            raise WiringError(
                f"{vlm.name}: in layer {i}, captured rows times values differ from what o_proj is given by {apart:.2g} "
                f"of its largest entry (at most {bound:g} expected): rows, heads or groups are in another order."
            )
    effect = {i: (_logits(vlm, batch, cut=i) - plain).abs().max().item() for i in range(layers)}
    if dead := [i for i, change in effect.items() if not change > 0]:
        raise WiringError(f"{vlm.name}: cutting all heads of layers {dead} leaves the logits as they were.")
    if not (_logits(vlm, grey) - plain).abs().max() > 0:
        raise WiringError(f"{vlm.name}: the picture does not reach the answer.")
    return {"layer_effect": effect, "rows_times_values": worst}


def _whole(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _logits(vlm: VLM, batch: Batch, cut: int | None = None) -> torch.Tensor:
    """Logits after the prompt, if wanted with all heads of a layer cut by a plain hook."""
    with ExitStack() as stack:
        if cut is not None:
            hook = vlm.layers[cut].self_attn.o_proj.register_forward_pre_hook(lambda m, a: (torch.zeros_like(a[0]),))
            stack.callback(hook.remove)
        return vlm.model(**vlm.inputs(batch), logits_to_keep=1).logits[0, -1].float()


@contextmanager
def _watched(vlm: VLM, seen: dict[int, list]) -> Iterator[None]:
    """Per layer, the values [B, S, groups x head_dim] and what `o_proj` is given [B, S, heads x head_dim]."""

    def keep(i: int, x: torch.Tensor) -> None:
        seen.setdefault(i, []).append(x)

    with ExitStack() as stack:
        for i, layer in enumerate(vlm.layers):
            value = layer.self_attn.v_proj.register_forward_hook(lambda m, a, out, i=i: keep(i, out))
            output = layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a, i=i: keep(i, a[0]))
            stack.callback(value.remove), stack.callback(output.remove)
        yield
