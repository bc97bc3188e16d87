"""Tiny random checkpoints of the four real classes, written in the files the Hub would give."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

QWEN = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
INTERN = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
]
TEXT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
            max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None)  # fmt: skip
CLASSES = ("qwen2.5-vl", "qwen3-vl", "internvl3", "internvl3.5")


def template(image: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        + image
        + "{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(special: list[str], image: str, **roles) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        chat_template=template(image), extra_special_tokens=roles or special[1:],
    )  # fmt: skip


def write(kind: str, folder: Path, seed: int = 0, **text) -> Path:
    """Save a random model of a class with its processor files; keyword arguments change the text config."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if kind.startswith("qwen"):
        tok = tokenizer(QWEN, "<|vision_start|><|image_pad|><|vision_end|>")
    else:
        tok = tokenizer(
            INTERN, "<IMG_CONTEXT>\n", start_image_token="<img>", end_image_token="</img>",
            context_image_token="<IMG_CONTEXT>", video_token="<video>",
        )  # fmt: skip
    ids = tok.convert_tokens_to_ids
    text = TEXT | dict(vocab_size=len(tok), eos_token_id=ids("<|im_end|>"), pad_token_id=ids("<|endoftext|>")) | text
    if kind == "qwen2.5-vl":
        vision = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=48, patch_size=14, window_size=56,
                      fullatt_block_indexes=[1], out_hidden_size=text["hidden_size"])  # fmt: skip
        text["rope_parameters"] = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))
        )
        image = Qwen2VLImageProcessorPil(
            patch_size=14, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 60}
        )
    elif kind == "qwen3-vl":
        vision = dict(depth=3, hidden_size=32, num_heads=2, intermediate_size=48, patch_size=16, spatial_merge_size=2,
                      out_hidden_size=text["hidden_size"], num_position_embeddings=64,
                      deepstack_visual_indexes=[0, 1])  # fmt: skip
        text = text | dict(
            head_dim=16,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True),
        )
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids)))
        image = Qwen2VLImageProcessorPil(
            patch_size=16, merge_size=2, size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 60}
        )
    else:
        backbone = dict(model_type="qwen2") if kind == "internvl3" else dict(model_type="qwen3", head_dim=16)
        vision = dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            image_size=[56, 56],
            patch_size=[14, 14],
        )
        config = InternVLConfig(text_config=text | backbone, vision_config=vision, image_token_id=ids("<IMG_CONTEXT>"),
                                image_seq_length=4, downsample_ratio=0.5)  # fmt: skip
        model = InternVLForConditionalGeneration(config)
        image = GotOcr2ImageProcessorPil(
            size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=6
        )
    with torch.no_grad():  # sharper than the default initialisation, so that attention is far from uniform
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                p.normal_(std=0.15)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                p.fill_(2.0)
            elif "norm" not in name:
                p.normal_(std=0.1)
    stop = [ids("<|im_end|>")]
    # A random model may write its own image token, and a second pass over that reply would want another image.
    images = [model.config.image_token_id, getattr(model.config, "video_token_id", ids("<video>"))]
    model.generation_config = GenerationConfig(
        eos_token_id=stop, pad_token_id=ids("<|endoftext|>"), suppress_tokens=images
    )
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    image.save_pretrained(folder)
    _save_processor_config(kind, folder)
    return folder


def _qwen_ids(ids) -> dict:
    return dict(image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"), tie_word_embeddings=False,
                vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"))  # fmt: skip


def _save_processor_config(kind: str, folder: Path) -> None:
    import json

    name = {"qwen2.5-vl": "Qwen2_5_VLProcessor", "qwen3-vl": "Qwen3VLProcessor"}.get(kind, "InternVLProcessor")
    extra = {"image_seq_length": 4} if name == "InternVLProcessor" else {}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name} | extra))


def samples(*sizes: tuple[int, int]) -> list:
    """One sample of noise a size (width, height), with boxes and expressions of different lengths."""
    import numpy as np
    from PIL import Image

    from vrhlib.boxes import Box
    from vrhlib.samples import Sample

    texts = ["red dot", "the große 猫 left of it", "a", "one of two things"]
    made = []
    for i, (w, h) in enumerate(sizes or ((100, 60), (70, 150), (130, 70))):
        noise = np.random.default_rng([w, h, i]).integers(0, 256, (h, w, 3), dtype=np.uint8)
        box = Box(0.1 * w + i, 0.2 * h, 0.5 * w, 0.6 * h)
        made.append(Sample(f"noise-{i}", Image.fromarray(noise), f"noise {w} x {h}, {i}", texts[i % 4], box))
    return made
