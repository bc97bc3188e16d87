"""The four embedded models: real `transformers` classes, tiny, in two pairs that share a language backbone.

    nano-qwen2.5-vl    Qwen2_5_VLForConditionalGeneration          backbone A (Qwen2 text)
    nano-internvl3     InternVLForConditionalGeneration            backbone A
    nano-qwen3-vl      Qwen3VLForConditionalGeneration, DeepStack  backbone B (Qwen3 text, QK-norm)
    nano-internvl3.5   InternVLForConditionalGeneration            backbone B

Each keeps the conventions of the model it stands for: chat template, special tokens, prompt and reply format,
frame of its numbers (resized pixels or thousandths), order and grid of its image tokens. The vocabulary is made of
the words of the scenes; the fixed parts of a prompt are one token each, which keeps sequences short.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from vrhlib.nano.questions import MOST, plural
from vrhlib.nano.scenes import (
    COLOURS,
    HEIGHT,
    RELATIONS,
    SHAPES,
    SIZES,
    STEP,
    SUPERLATIVES,
    WIDTH,
    WORDS,
    Scene,
)
from vrhlib.vlm import FAMILIES

PATCH = 16
TILE = 128  # side of an InternVL tile: a scene of 128 x 96 fills one, stretched


@dataclass(frozen=True)
class Shape:
    """Sizes that all four models share: 80 heads of 32 dimensions (of a head's dimensions only the slowly rotating
    ones match content, so narrower heads learned worse)."""

    layers: int = 10
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 256
    mlp: int = 256
    tower_layers: int = 3
    tower_hidden: int = 128
    tower_heads: int = 4


@dataclass(frozen=True)
class Kind:
    """A row per model: its backbone and class, how its image tokens lie and boxes are written, its chat template."""

    backbone: str
    family: str  # row of vlm.FAMILIES
    tower: str  # whose vision tower: the two InternVL models share one, as the real ones do
    rows: int  # image tokens of a scene
    cols: int
    planar: bool  # image positions in two dimensions (M-RoPE), or one after the other
    permille: bool  # numbers are thousandths of a side, or pixels of the resized image
    system: str | None
    image: str  # what the chat template writes for an image
    opening: str  # what the processor makes of it, before and after the image tokens
    closing: str
    pad: str  # the image token
    special: tuple[str, ...]


_QWEN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_INTERN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<ref>", "</ref>",
                   "<box>", "</box>")  # fmt: skip
_QWEN = dict(rows=HEIGHT // PATCH, cols=WIDTH // PATCH, planar=True,
             image="<|vision_start|><|image_pad|><|vision_end|>", opening="<|vision_start|>",
             closing="<|vision_end|>", pad="<|image_pad|>", special=_QWEN_SPECIAL)  # fmt: skip
_INTERN = dict(family="internvl", tower="internvit", rows=TILE // PATCH, cols=TILE // PATCH, planar=False,
               permille=True, system=None, image="<IMG_CONTEXT>\n", opening="<img>", closing="</img>\n",
               pad="<IMG_CONTEXT>", special=_INTERN_SPECIAL)  # fmt: skip
KINDS = {
    "nano-qwen2.5-vl": Kind("A", "qwen2_5_vl", "qwen2.5", permille=False, system="You are a helpful assistant.",
                            **_QWEN),
    "nano-internvl3": Kind("A", **_INTERN),
    "nano-qwen3-vl": Kind("B", "qwen3_vl", "qwen3", permille=True, system=None, **_QWEN),
    "nano-internvl3.5": Kind("B", **_INTERN),
}  # fmt: skip
# A backbone trains in the language stack of one of its models, with numbers on the common line.
BACKBONES = {
    "A": replace(KINDS["nano-qwen2.5-vl"], system=None), "B": replace(KINDS["nano-qwen3-vl"], permille=False)
}  # fmt: skip


# ---------------------------------------------------------------- words


def vocabulary() -> list[str]:
    """Every word of every prompt and answer, in the spelling it has there (most with the space before)."""
    singular = [*SHAPES, "shape", "sign", "object"]
    inside = [*COLOURS, *SHAPES, *SIZES, *WORDS, *SUPERLATIVES, *(w for r in RELATIONS for w in r.split()), *singular]
    inside += [plural(s) for s in singular]
    inside += ("What Which How Is Compared with are more is or and than many wide in percent of the image there size "
               "colour shape does say stands beside belongs to that Where").split()  # fmt: skip
    bare = [*COLOURS, *SHAPES, *SIZES, *WORDS, *(plural(s) for s in SHAPES), "yes", "no", "left", "right", "higher",
            "lower", "the", "What", "Which", "How", "Is", "Compared", "Locate"]  # fmt: skip
    inside += ["higher", "lower"]
    return sorted({f" {w}" for w in inside} | set(bare) | {".", ",", ":", "?", "\n", "user\n", "assistant\n"})


@cache
def phrases() -> tuple[str, ...]:
    """The fixed parts of all prompts and boxes, one token each."""
    found = {"[", "]", "system\nYou are a helpful assistant."}
    for family in FAMILIES.values():
        for prompt in (family.prompt, family.question_prompt):
            found |= {part.strip(" ") if part.endswith(" ") else part
                      for part in re.split(r"\{expression\}|<ref>|</ref>", prompt)}  # fmt: skip
        found |= {
            p.replace("{{", "{").replace("}}", "}") for p in re.split(r"\{\d:\.0f\}|<box>|</box>", family.written)
        }
    return tuple(
        sorted((p for p in found if len(p.strip()) > 1 or p in ("[", "]")), key=lambda part: (-len(part), part))
    )


def numerals(permille: bool) -> dict[str, float]:
    """Numbers that a box can hold, and their place on the common line 0..128 (where both sides of a picture end)."""
    if not permille:
        return {str(v): float(v) for v in range(0, WIDTH + 1, STEP)}
    values = {round(1000 * v / side) for side in (WIDTH, HEIGHT) for v in range(0, side + 1, STEP)}
    return {str(v): v * WIDTH / 1000 for v in sorted(values)}


def build_tokenizer(kind: Kind) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges make every word, number, and fixed part of a prompt one token."""
    words = vocabulary() + list(phrases())
    words += sorted({*numerals(kind.permille), *map(str, range(MOST + 1)), *(str(v) for v in range(11, 27))}, key=int)
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    pieces = "|".join(map(re.escape, phrases())) + r"|user\n|assistant\n|\d+| ?[A-Za-z]+|\s|[^\sA-Za-z\d]"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pieces.replace("\\ ", " ")), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", *kind.special]
    trainer = trainers.BpeTrainer(
        vocab_size=8000, min_frequency=1, show_progress=False, special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator([w for w in words for _ in range(2)], trainer)
    roles = {} if kind.planar else dict(start_image_token="<img>", end_image_token="</img>",
                                        context_image_token="<IMG_CONTEXT>", video_token="<video>")  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        chat_template=chat_template(kind), extra_special_tokens=roles or special[1:],
    )  # fmt: skip


def chat_template(kind: Kind) -> str:
    system = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + kind.system + "<|im_end|>\n{% endif %}"
        if kind.system
        else ""
    )
    return (
        system + "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + kind.image.replace("\n", "{{ '\n' }}")
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip


# ---------------------------------------------------------------- codes


class Codes:
    """Fixed vectors for what an image token can show: the common language of towers and backbones.

    Attributes are orthogonal directions; box edges are Fourier features of their place on the line 0..128, each edge
    in a subspace of its own, so that one linear map per edge reads any value and heads need not learn a table. The
    token that holds a thing's centre carries a direction for that, so that things can be counted.
    """

    WAVELENGTHS = (256, 128, 64, 32, 16, 8)

    def __init__(self, hidden: int):
        basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(7)))[0]
        self.names = [*COLOURS, *SHAPES, *SIZES, "sign", "line", "background", "centre", "start",
                      *(f"says {w}" for w in WORDS), *(f"key {w}" for w in WORDS)]  # fmt: skip
        self.index = {n: i for i, n in enumerate(self.names)}
        self.directions = 4 * basis[: len(self.names)]
        width, start = 2 * len(self.WAVELENGTHS), len(self.names)
        parts = basis[start : start + 5 * width].view(5, width, hidden)
        self.edge_bases, self.number_basis = 3 * parts[:4], 3 * parts[4]

    def waves(self, line: torch.Tensor) -> torch.Tensor:
        """Fourier features [..., 12] of places on the line."""
        angle = 2 * math.pi * line[..., None] / torch.tensor(self.WAVELENGTHS)
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(len(self.WAVELENGTHS))

    def number(self, line: torch.Tensor) -> torch.Tensor:
        return self.waves(line) @ self.number_basis

    def edges(self, line: torch.Tensor) -> torch.Tensor:
        """Sum of the codes of four edges; `line` [..., 4]."""
        return torch.einsum("...ew,ewh->...h", self.waves(line), self.edge_bases)

    def of(self, picture: Picture) -> torch.Tensor:
        """What every image token should show, [rows * cols, hidden]."""
        table = torch.stack([
            self.directions[[self.index[n] for n in names]].sum(0) + self.edges(torch.tensor(line))
            for names, line in zip(picture.names, picture.lines)
        ] + [self.directions[self.index["background"]]])  # fmt: skip
        out = table[torch.from_numpy(picture.owner)]
        return out + torch.from_numpy(picture.centre)[:, None] * self.directions[self.index["centre"]]


@dataclass(frozen=True)
class Picture:
    """A scene as a grid of image tokens sees it.

    `names` and `lines`: code names and four edges (on the line) of every thing; `owner` int [V], the thing that
    covers most of a token, -1 for background; `centre` bool [V], the token holds its thing's centre.
    """

    names: list[list[str]]
    lines: list[list[float]]
    owner: np.ndarray
    centre: np.ndarray


def picture(scene: Scene, rows: int, cols: int, permille: bool) -> Picture:
    names = []
    for t in scene.things:
        if t.key:
            names.append(["line", f"key {t.key}", f"says {t.text}"])
        else:
            names.append([t.colour, "sign", f"says {t.text}"] if t.text else [t.colour, t.shape, t.size])
    boxes = np.array([t.box for t in scene.things], dtype=float)
    stretch = WIDTH / HEIGHT if permille else 1.0
    lines = boxes * [1, stretch, 1, stretch]
    x0, y0, x1, y1 = boxes.T[..., None, None]
    wide, high = WIDTH / cols, HEIGHT / rows
    left, top = np.arange(cols) * wide, np.arange(rows)[:, None] * high
    width = np.clip(np.minimum(x1, left + wide) - np.maximum(x0, left), 0, None)
    height = np.clip(np.minimum(y1, top + high) - np.maximum(y0, top), 0, None)
    area = width * height
    owner = np.where(area.max(0) > 0, area.argmax(0), -1).reshape(-1)
    centre = np.zeros(rows * cols, bool)
    for i, (a, b, c, d) in enumerate(boxes):
        token = int((b + d) / 2 // high) * cols + int((a + c) / 2 // wide)
        centre[token] |= owner[token] == i
    return Picture(names, lines.tolist(), owner, centre)


# ---------------------------------------------------------------- models


def build_config(kind: Kind, shape: Shape, tokenizer: PreTrainedTokenizerFast):
    token = tokenizer.convert_tokens_to_ids
    head_dim = shape.hidden // shape.heads
    text = dict(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=token("<|im_end|>"), pad_token_id=token("<|endoftext|>"),
    )  # fmt: skip
    if kind.backbone == "B":
        text["head_dim"] = head_dim
    rope = dict(rope_type="default", rope_theta=1e6)
    if kind.planar:
        sections = dict(mrope_section=[head_dim // 4, head_dim // 8, head_dim // 8])
        text["rope_parameters"] = rope | sections | ({} if kind.backbone == "A" else {"mrope_interleaved": True})
        vision = dict(
            depth=shape.tower_layers, hidden_size=shape.tower_hidden, num_heads=shape.tower_heads,
            intermediate_size=2 * shape.tower_hidden, patch_size=PATCH, spatial_merge_size=1, temporal_patch_size=1,
            out_hidden_size=shape.hidden,
        )  # fmt: skip
        ids = dict(image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
                   vision_start_token_id=token("<|vision_start|>"),
                   vision_end_token_id=token("<|vision_end|>"))  # fmt: skip
        if kind.backbone == "A":
            vision |= dict(window_size=16 * PATCH, fullatt_block_indexes=list(range(shape.tower_layers)))
            return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
        vision |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
        return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    text |= dict(model_type="qwen2" if kind.backbone == "A" else "qwen3", rope_parameters=rope)
    vision = dict(
        hidden_size=shape.tower_hidden, num_hidden_layers=shape.tower_layers, num_attention_heads=shape.tower_heads,
        intermediate_size=2 * shape.tower_hidden, image_size=[TILE, TILE], patch_size=[PATCH, PATCH],
        layer_scale_init_value=1.0,
    )  # fmt: skip
    return InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=token("<IMG_CONTEXT>"), tie_word_embeddings=True,
        image_seq_length=kind.rows * kind.cols, downsample_ratio=1.0,
    )  # fmt: skip


_CLASSES = {"qwen2_5_vl": Qwen2_5_VLForConditionalGeneration, "qwen3_vl": Qwen3VLForConditionalGeneration,
            "internvl": InternVLForConditionalGeneration}  # fmt: skip


def _resized(image: Image.Image, width: int, height: int) -> np.ndarray:
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def _tiles(pixels: np.ndarray) -> list[np.ndarray]:
    """A picture at twice its size as InternVL sees it: 2 x 2 tiles row by row, then the whole as a thumbnail."""
    double = Image.fromarray(_resized(Image.fromarray(pixels), 2 * WIDTH, 2 * HEIGHT))
    canvas = _resized(double, 2 * TILE, 2 * TILE)
    parts = [canvas[y : y + TILE, x : x + TILE] for y in (0, TILE) for x in (0, TILE)]
    return [*parts, _resized(double, TILE, TILE)]


class Nano:
    """A model under construction, with everything training needs to know about it; on the GPU if there is one.

    Weights are drawn on the CPU, so that a seed means the same everywhere.
    """

    def __init__(self, name: str, shape: Shape = Shape(), seed: int = 0):
        torch.manual_seed(seed)
        self.mixed_precision, self.device = True, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.name, self.kind, self.shape = name, KINDS.get(name) or BACKBONES[name], shape
        self.tokenizer, self.codes = build_tokenizer(self.kind), Codes(shape.hidden)
        self.model = _CLASSES[self.kind.family](build_config(self.kind, shape, self.tokenizer))
        rows = self.table()
        with torch.no_grad():
            rows.normal_(std=2 / math.sqrt(shape.hidden))
            for word in (*COLOURS, *SHAPES, *SIZES):
                code = self.codes.directions[self.codes.index[word]]
                rows[self.id(f"Ġ{word}")] = code
                rows[self.id(word)] = code + self.codes.directions[self.codes.index["start"]]
            for word in WORDS:
                says, key = (self.codes.directions[self.codes.index[f"{how} {word}"]] for how in ("says", "key"))
                rows[self.id(f"Ġ{word}")] = (says + key) / math.sqrt(2)
                rows[self.id(word)] = says + self.codes.directions[self.codes.index["start"]]
            for text, line in numerals(self.kind.permille).items():
                rows[self.id(text)] = self.codes.number(torch.tensor(line))
            for name, p in self.language.named_parameters():  # sharper attention than the default from the start
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    p.fill_(1.5)
                elif self.kind.backbone == "A" and name.endswith(("q_proj.weight", "k_proj.weight")):
                    p.mul_(3)
        self.model.tie_weights()
        self.model.to(self.device)

    def id(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        assert found is not None and found != self.tokenizer.unk_token_id, token
        return found

    def table(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def language(self) -> torch.nn.Module:
        return self.model.model.language_model

    @property
    def vision(self) -> torch.nn.ModuleDict:
        """The tower with its projector (Qwen's is inside the tower)."""
        m = self.model.model
        parts = (
            {"tower": m.visual} if self.kind.planar else {"tower": m.vision_tower, "projector": m.multi_modal_projector}
        )
        return torch.nn.ModuleDict(parts)

    @cached_property
    def values(self) -> torch.Tensor:
        """Place on the line of every numeral, -999 for other tokens; float [vocabulary]."""
        found = torch.full((len(self.tokenizer),), -999.0)
        for text, line in numerals(self.kind.permille).items():
            found[self.id(text)] = line
        return found.to(self.device)

    def inherit(self, backbone: Nano) -> None:
        """Take over a backbone's language stack: layers as they are, words by their spelling, numbers by their place
        on the line (between two of the backbone's numerals, a mixture of both)."""
        state = {k: v for k, v in backbone.language.state_dict().items() if "embed_tokens" not in k}
        self.language.load_state_dict(state, strict=False)
        old, known = backbone.table().detach(), backbone.tokenizer.get_vocab()
        with torch.no_grad():
            for token, i in self.tokenizer.get_vocab().items():
                if token in known:
                    self.table()[i] = old[known[token]]
            if self.kind.permille:
                anchors = {line: old[known[text]] for text, line in numerals(False).items()}
                for text, line in numerals(True).items():
                    low = STEP * int(line // STEP)
                    high, share = min(low + STEP, WIDTH), (line - low) / STEP
                    self.table()[self.id(text)] = (1 - share) * anchors[low] + share * anchors[high]
        self.model.tie_weights()

    def see(self, pictures: list[np.ndarray], large: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Image features [n, V, hidden] of uint8 pictures [HEIGHT, WIDTH, 3], and DeepStack features if the model
        has them; pixels as the model's image processor makes them. `large`: at twice the size, which InternVL cuts
        into 2 x 2 tiles and follows with a thumbnail."""
        n, kind = len(pictures), self.kind
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed_precision):
            if kind.planar:
                x = torch.from_numpy(np.stack(pictures)).float() / 255
                x = ((x - 0.5) / 0.5).view(n, kind.rows, PATCH, kind.cols, PATCH, 3)
                patches = x.permute(0, 1, 3, 5, 2, 4).reshape(n * kind.rows * kind.cols, -1)
                grid = torch.tensor([[1, kind.rows, kind.cols]] * n, device=self.device)
                out = self.model.model.visual(patches.to(self.device), grid_thw=grid)
                deep = getattr(out, "deepstack_features", None) or ()
                deep = [d.float().view(n, kind.rows * kind.cols, -1) for d in deep]
                return out.pooler_output.float().view(n, kind.rows * kind.cols, -1), deep
            tiles = [t for p in pictures for t in (_tiles(p) if large else [_resized(Image.fromarray(p), TILE, TILE)])]
            x = torch.from_numpy(np.stack(tiles)).float().permute(0, 3, 1, 2) / 255
            pixels = ((x - 0.5) / 0.5).to(self.device)
            out = self.model.model.get_image_features(pixel_values=pixels, return_dict=True)
            return out.pooler_output.float().reshape(n, -1, self.shape.hidden), []

    def export(self, folder: Path, about: dict) -> None:
        """Write what `AutoModelForImageTextToText.from_pretrained` reads: bfloat16 safetensors, tokenizer, chat
        template and processor files, and the manifest."""
        stop, pad = self.id("<|im_end|>"), self.id("<|endoftext|>")
        self.model.generation_config = GenerationConfig(eos_token_id=[stop], pad_token_id=pad, do_sample=False)
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True}
        if self.kind.planar:
            image = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": 1,
                     "temporal_patch_size": 1, **normal,
                     "size": {"shortest_edge": PATCH * PATCH, "longest_edge": 4096 * PATCH * PATCH}}  # fmt: skip
            video = image | {
                "video_processor_type": f"{'Qwen2' if self.kind.backbone == 'A' else 'Qwen3'}VLVideoProcessor"
            }
            processor = {"processor_class": "Qwen2_5_VLProcessor" if self.kind.backbone == "A" else "Qwen3VLProcessor"}
        else:
            image = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": TILE, "width": TILE},
                     "crop_to_patches": True, "min_patches": 1, "max_patches": 4, **normal}  # fmt: skip
            video = {
                "video_processor_type": "InternVLVideoProcessor",
                "size": {"height": TILE, "width": TILE},
                **normal,
            }
            processor = {"processor_class": "InternVLProcessor", "image_seq_length": self.kind.rows * self.kind.cols}
        files = {"preprocessor_config": image, "video_preprocessor_config": video, "processor_config": processor,
                 "manifest": about}  # fmt: skip
        for file, value in files.items():
            (folder / f"{file}.json").write_text(json.dumps(value, indent=1) + "\n")
