"""Models of a real model's proportions with random weights: what a pass costs does not depend on what the weights say.

They are built from a config, on the device that will run them, with tokeniser and image processor of an embedded model:
nothing is downloaded and no folder written. Replies are nonsense of a fixed length, since what would end them is
suppressed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from vrhlib import store
from vrhlib.training import SHAPES
from vrhlib.vlm import FAMILIES, VLM, load_processor

REPLY = 24  # tokens: about what a box takes
_QWEN = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TILE = {"image_size": [448, 448], "patch_size": [14, 14]}
_LIMITS = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16384}


def _text(name: str) -> dict:
    shape = SHAPES[name]
    return {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.mlp, "vocab_size": shape.vocab,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    }  # fmt: skip


CONFIGS: dict[str, dict] = {
    # Heads, groups and MLP in the proportions of a real model, as wide and deep as a CPU can run at 1,500 image tokens.
    # (Depth matters to memory: eager attention keeps the matrices of every layer.)
    "random-wide": {
        "like": "nano-qwen2.5-vl",
        "text": {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
                 "intermediate_size": 2112, "max_position_embeddings": 32768, "mrope_section": [8, 12, 12]},
        "vision": _QWEN | {"depth": 2, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256,
                           "out_hidden_size": 768, "fullatt_block_indexes": [1], "window_size": 112},
    },
    # As the models' configs state them; the parameters come to `training.SHAPES[...].total`.
    "qwen2.5-vl-7b": {
        "like": "nano-qwen2.5-vl",
        "text": _text("qwen2.5-vl-7b") | {"mrope_section": [16, 24, 24]},
        "vision": _QWEN | {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
                           "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112},
    },
    "internvl3-8b": {
        "like": "nano-internvl3",
        "text": _text("internvl3-8b"),
        "vision": _TILE | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                           "intermediate_size": 4096, "attention_bias": True},
    },
}  # fmt: skip


def config(name: str, **text: object) -> AutoConfig:
    """Configuration of one of `CONFIGS`; keyword arguments change that of its language model. Raises ValueError for a
    name that is none of them."""
    if name not in CONFIGS:
        raise store.unknown("random model", name, CONFIGS)
    about = CONFIGS[name]
    found = AutoConfig.from_pretrained(store.ROOT / "data" / "nano" / about["like"]).to_dict()
    sizes = dict(about["text"]) | text
    rope = dict(found["text_config"]["rope_parameters"])
    if section := sizes.pop("mrope_section", None):
        rope["mrope_section"] = section
    found["text_config"] |= sizes | {"rope_parameters": rope, "layer_types": None, "tie_word_embeddings": False}
    found["vision_config"] |= about["vision"]
    found["tie_word_embeddings"] = False
    if found["model_type"] == "internvl":
        found |= {"image_seq_length": 256, "downsample_ratio": 0.5}
    return AutoConfig.for_model(**found)


def random_vlm(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, reply: int = REPLY, rows: int = 16, **text
) -> VLM:
    """One of `CONFIGS` with random weights (seed 0), made where it will run; every reply has `reply` tokens.

    It is a `VLM` like any other, but its name stands for no file, so nothing of it can be stored."""
    about, like = CONFIGS.get(name, {}), config(name, **text)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(like, dtype=dtype, attn_implementation="sdpa").eval()
    processor = load_processor(str(store.ROOT / "data" / "nano" / about["like"]))
    _as_large(processor, about["vision"])
    family = FAMILIES[like.model_type]
    vlm = VLM(f"random {name}", model, processor, family, family.prompt, reply, "random", rows=rows)
    never = {like.image_token_id, getattr(like, "video_token_id", None)} - {None}
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.suppress_tokens = sorted(never | vlm.stop_ids)
    return vlm


def _as_large(processor: object, vision: Mapping) -> None:
    """Let an embedded model's processor cut pictures as the real one's does."""
    image = processor.image_processor
    if "patch_size" in vision and "spatial_merge_size" in vision:
        image.patch_size, image.merge_size = vision["patch_size"], vision["spatial_merge_size"]
        image.temporal_patch_size, image.size = vision["temporal_patch_size"], _LIMITS
    else:
        height, width = vision["image_size"]
        image.size, image.min_patches, image.max_patches = {"height": height, "width": width}, 1, 12
        processor.image_seq_length = 256
