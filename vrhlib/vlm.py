"""Loads a vision-language model, holds every difference between model families as one table, and proves
its own wiring before any science is done with it.

The model inside a `VLM` is the stock `transformers` class on stock SDPA attention; nothing is forked or
patched. What differs between families (prompt, how boxes are written, where image tokens look) is a row
of `FAMILIES`; a new model of a known class needs no code, a new class needs one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available
from transformers.utils import logging as hf_logging

from vrhlib import store
from vrhlib.boxes import Box, Frame, Reply, Size, TokenGrid, read_box, to_frame
from vrhlib.samples import Sample, Task

# ---------------------------------------------------------------- families: all differences, as data


@dataclass(frozen=True)
class Family:
    """One row per `model_type`. `grid(vlm, batch, i, size)` returns where the image tokens of row i look,
    and the size (width, height) the image was resized to."""

    prompt: str  # with {expression}: a phrase that names the referent
    question_prompt: str  # with {expression}: a question whose answer is the referent
    style: str  # how a box is written, see boxes.read_box
    frame: Frame  # what its numbers mean
    written: str  # format string of a box, for teacher forcing and round trips
    grid: Callable[[VLM, dict, int, Size], tuple[TokenGrid, Size]]
    vision: str  # path of the vision tower


def _patch_grid(vlm: VLM, tensors: dict, i: int, size: Size) -> tuple[TokenGrid, Size]:
    """Qwen: `image_grid_thw` counts patches before merging; the resized image is patches x patch size."""
    _, rows, cols = tensors["image_grid_thw"][i].tolist()
    vision = vlm.model.config.vision_config
    grid = TokenGrid.regular(rows // vision.spatial_merge_size, cols // vision.spatial_merge_size, size)
    return grid, (cols * vision.patch_size, rows * vision.patch_size)


def _tile_grid(vlm: VLM, tensors: dict, i: int, size: Size) -> tuple[TokenGrid, Size]:
    """InternVL: tiles row-major, then a thumbnail if there are several; boxes are in thousandths."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    processor = vlm.processor.image_processor
    tile = processor.size["height"], processor.size["width"]
    cols, rows = get_optimal_tiled_canvas((size[1], size[0]), tile, processor.min_patches, processor.max_patches)
    side = int(vlm.processor.image_seq_length**0.5)
    return TokenGrid.tiled(rows, cols, side, size), size


_QWEN_BOX = '{{"bbox_2d":[{0:.0f},{1:.0f},{2:.0f},{3:.0f}]}}'
_INTERNVL_BOX = "<box>[[{0:.0f},{1:.0f},{2:.0f},{3:.0f}]]</box>"
_INTERNVL_PROMPT = (
    "Please provide the bounding box coordinate of the region this sentence describes: <ref>{expression}</ref>"
)
_JSON = "Report bbox coordinates in JSON format."
_ANSWER = "{expression} Answer with the bbox coordinates in JSON format."
FAMILIES = {
    "qwen2_5_vl": Family(
        "Locate {expression} in this image and output the bbox coordinates in JSON format.", _ANSWER,
        "bbox_2d", "resized", _QWEN_BOX, _patch_grid, "model.visual",
    ),
    "qwen3_vl": Family(
        f'Locate every object that matches the description "{{expression}}" in the image. {_JSON}', _ANSWER,
        "bbox_2d", "permille", _QWEN_BOX, _patch_grid, "model.visual",
    ),
    "internvl": Family(
        _INTERNVL_PROMPT, "{expression} Please provide the bounding box coordinate of the answer.",
        "box tag", "permille", _INTERNVL_BOX, _tile_grid, "model.vision_tower",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pin:
    """A model of a profile: where it is, at which revision, and what it takes instead of its family's prompt."""

    source: str  # folder below the repository, or Hub id
    revision: str | None
    profile: str
    prompt: str | None = None
    max_new_tokens: int = 128


MODELS = {
    name: Pin(f"data/nano/{name}", None, "nano", max_new_tokens=16)
    for name in ("nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5")
}


# ---------------------------------------------------------------- the loaded model


@dataclass
class Batch:
    """Left-padded prompts of several samples, ready for the model. S is the padded prompt length."""

    samples: list[Sample]
    tensors: dict[str, torch.Tensor]  # input_ids [B, S], attention_mask [B, S], pixel_values, ...
    grids: list[TokenGrid]
    resized: list[Size]
    image_columns: list[np.ndarray]  # per sample int [V]: columns of its image tokens
    expression_columns: list[np.ndarray]  # per sample: columns of the expression's tokens
    features: object = None  # vision features, once computed

    @property
    def length(self) -> int:
        return self.tensors["input_ids"].shape[1]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass
class VLM:
    """A loaded model with its processor, its family's row and its name.

    `grid` is (layers, query heads per layer).
    """

    name: str
    model: torch.nn.Module
    processor: object
    family: Family
    prompt: str
    max_new_tokens: int
    revision: str
    profile: str | None = None
    wiring: dict = field(default_factory=dict)

    @property
    def grid(self) -> tuple[int, int]:
        text = self.model.config.get_text_config()
        return text.num_hidden_layers, text.num_attention_heads

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def layers(self) -> torch.nn.ModuleList:
        return self.model.model.language_model.layers

    @property
    def tokenizer(self):
        return self.processor.tokenizer

    @cached_property
    def stop_ids(self) -> set[int]:
        """Token ids that end a reply."""
        stop = self.model.generation_config.eos_token_id
        return set(stop if isinstance(stop, list) else [stop])

    @property
    def image_backend(self) -> str:
        """Image processor class: backends differ in pixels, so it is part of every run key."""
        return type(self.processor.image_processor).__name__

    def identity(self) -> dict:
        """What a run key needs to know about the model."""
        return {
            "model": self.name, "revision": self.revision, "image_backend": self.image_backend,
            "prompt": [self.prompt, self.family.question_prompt],
            "dtype": str(self.model.dtype).removeprefix("torch."), "device": self.device.type,
        }  # fmt: skip

    def write_box(self, box: Box, original: Size, resized: Size) -> str:
        """The text this family writes for a box given in original pixels."""
        return self.family.written.format(*to_frame(box, self.family.frame, original, resized))

    def read(self, text: str, original: Size, resized: Size, finished: bool = True) -> Reply:
        """The box of a reply in original pixels, or the reason why there is none."""
        return read_box(text, self.family.style, self.family.frame, original, resized, finished)

    def asks(self, task: Task) -> str:
        """The prompt of a task, with {expression} where the sample's text goes."""
        return {"locate": self.prompt, "question": self.family.question_prompt, "answer": "{expression}"}[task]

    def question(self, expression: str, task: Task = "locate") -> str:
        """The prompt with the expression in it; other braces stay as they are."""
        return self.asks(task).replace("{expression}", expression)

    def chat(self, expression: str, task: Task = "locate", image: bool = True) -> tuple[str, range]:
        """Prompt in the model's chat template (one image placeholder), and where the expression stands in it."""
        content = self.question(expression, task)
        parts = [{"type": "image"}] * image + [{"type": "text", "text": content}]
        message = {"role": "user", "content": parts}
        text = self.processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        start = text.rindex(content) + self.asks(task).index("{expression}")
        return text, range(start, start + len(expression))

    def prepare(self, samples: Sequence[Sample]) -> Batch:
        """Tokenise, process images and locate image and expression tokens of several samples.

        Samples without an image have an empty grid. Raises ValueError for a batch of both kinds.
        """
        samples = list(samples)
        seen = [s.image is not None for s in samples]
        if any(seen) != all(seen):
            raise ValueError("A batch has pictures or none: prepare samples with and without an image apart.")
        texts, spans = zip(*(self.chat(s.text, s.task, s.image is not None) for s in samples))
        images = {"images": [_rgb(s) for s in samples]} if seen[0] else {}
        inputs = self.processor(**images, text=list(texts), padding=True, padding_side="left", return_tensors="pt")
        tensors = {k: v.to(self.device) for k, v in inputs.items()}
        if seen[0]:
            grids, resized = zip(*(self.family.grid(self, tensors, i, s.image.size) for i, s in enumerate(samples)))
        else:
            grids, resized = [TokenGrid.none()] * len(samples), [(1, 1)] * len(samples)
        ids = tensors["input_ids"].cpu().numpy()
        columns = [np.flatnonzero(row == self.model.config.image_token_id) for row in ids]
        for sample, grid, found in zip(samples, grids, columns):
            if len(grid) != len(found):
                raise ValueError(
                    f"{self.name}, sample {sample.id}: the prompt holds {len(found)} image tokens, but the image grid "
                    f"has {len(grid)}. Processor files and model do not belong together."
                )
        words = [self._expression_columns(t, span, row) for t, span, row in zip(texts, spans, ids)]
        return Batch(samples, tensors, list(grids), list(resized), columns, words)

    def _expression_columns(self, text: str, span: range, ids: np.ndarray) -> np.ndarray:
        """Counted from the end: prompts are left-padded and the image, however long, stands before the text."""
        plain = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        total = len(plain["input_ids"])
        inside = [j for j, (a, b) in enumerate(plain["offset_mapping"]) if a < span.stop and b > span.start]
        columns = np.array([len(ids) - total + j for j in inside])
        if [plain["input_ids"][j] for j in inside] != ids[columns].tolist():
            raise ValueError(f"{self.name}: lost track of the expression's tokens in {text!r}.")
        return columns

    @torch.inference_mode()
    def see(self, batch: Batch) -> Batch:
        """Run the vision tower once; later passes over this batch reuse its features."""
        if batch.features is None and "pixel_values" in batch.tensors:
            extra = {"image_grid_thw": batch.tensors["image_grid_thw"]} if "image_grid_thw" in batch.tensors else {}
            pixels = batch.tensors["pixel_values"]
            batch.features = self.model.get_image_features(pixel_values=pixels, return_dict=True, **extra)
        return batch

    def inputs(self, batch: Batch, copies: int = 1) -> dict:
        """Keyword arguments for the model: each sample `copies` times in a row, vision features shared."""
        self.see(batch)
        tensors = {k: v.repeat_interleave(copies, 0) for k, v in batch.tensors.items() if k != "pixel_values"}
        if batch.features is None:
            return tensors
        tiles = [len(columns) for columns in batch.image_columns]
        return tensors | {"mm_encoder_outputs": {"image": _repeat_features(batch.features, copies, tiles)}}

    def decode(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Text of generated ids up to the stop token, and whether there was one."""
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        return self.tokenizer.decode(list(ids)[:end], skip_special_tokens=True), end is not None


def _rgb(sample: Sample) -> Image.Image:
    try:
        return sample.image.convert("RGB")
    except (OSError, SyntaxError) as error:  # PIL reads lazily: a truncated file shows only now
        raise ValueError(f"The image of sample {sample.id} cannot be read ({error}). Fetch it again.") from error


def _repeat_features(features, copies: int, tokens: list[int]):
    """Each image's features `copies` times in a row. Qwen keeps one tensor per image, InternVL one per tile."""
    out = copy(features)

    def repeated(value):
        if isinstance(value, (tuple, list)):
            return tuple(v for v in value for _ in range(copies))
        tiles = [n // value.shape[1] for n in tokens]
        return torch.cat([part for t in value.split(tiles) for part in [t] * copies])

    out.pooler_output = repeated(features.pooler_output)
    if getattr(features, "deepstack_features", None) is not None:
        out.deepstack_features = [repeated(layer) for layer in features.deepstack_features]
    return out


# ---------------------------------------------------------------- loading


def load_vlm(
    name: str | Path, device: str | None = None, dtype: torch.dtype | None = None, prompt: str | None = None
) -> VLM:
    """Load a model of `MODELS` by name, or any model of a known family from a folder or Hub id.

    `prompt` (with {expression}) replaces that of the model's pin or family.

    Only safetensors, never remote code. Default device: CUDA where there is one; default dtype: bfloat16
    on CUDA, float32 on CPU. Raises ValueError or OSError with the next step if the name is unknown,
    weights are missing or of another shape, or the wiring check fails.
    """
    pin = MODELS.get(str(name)) or _unlisted(str(name))
    source, local = _locate(name, pin)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    where = {"revision": pin.revision} if not local else {}
    config = _explained(name, source, AutoConfig.from_pretrained, source, trust_remote_code=False, **where)
    if config.model_type not in FAMILIES:
        raise ValueError(f"{name} is a {config.model_type!r}; known families: {', '.join(FAMILIES)}. Add a row there.")
    model, info = _explained(
        name, source, AutoModelForImageTextToText.from_pretrained, source, dtype=dtype, use_safetensors=True,
        trust_remote_code=False, attn_implementation="sdpa", output_loading_info=True,
        ignore_mismatched_sizes=True, **where,
    )  # fmt: skip
    broken = {k: sorted(map(str, v))[:3] for k, v in info.items() if v and k != "error_msgs"}
    if broken:
        raise ValueError(f"The weights of {name} do not fit its config.json: {broken}. Fetch both from one revision.")
    family = FAMILIES[config.model_type]
    prompt = prompt or pin.prompt or family.prompt
    if prompt.count("{expression}") != 1:
        raise ValueError(f"The prompt needs {{expression}} once, got {prompt!r}.")
    revision = pin.revision or (_folder_digest(Path(source)) if local else "unpinned")
    vlm = VLM(
        str(name), model.to(device).eval(), _explained(name, source, load_processor, source, **where), family, prompt,
        pin.max_new_tokens, revision, pin.profile,
    )  # fmt: skip
    vlm.wiring = prove_wiring(vlm)
    return vlm


def _locate(name: str | Path, pin: Pin) -> tuple[str, bool]:
    """Where the files are, and whether that is a folder. A shipped model is never looked for on the Hub."""
    for folder in (store.ROOT / pin.source, Path(pin.source)):
        if folder.is_dir():
            return str(folder), True
    if str(name) in MODELS and pin.profile == "nano":
        raise OSError(
            f"{name} is shipped in {pin.source}, but {store.ROOT / pin.source} is gone. Restore it with "
            f"`git checkout -- {pin.source}`."
        )
    return pin.source, False


def _unlisted(name: str) -> Pin:
    if not Path(name).exists() and "/" not in name:
        raise store.unknown("model", name, MODELS, ", or give a folder or Hub id")
    return Pin(name, None, "nano" if Path(name).exists() else "paper")


def _explained(name, source: str, load: Callable, *args, **kwargs):
    """Call a loader; whatever it raises (transformers has many ways) becomes one line with the next step."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # in a notebook it leaves a dead widget behind
    try:
        return load(*args, **kwargs)
    except Exception as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        folder = Path(source)
        if folder.is_dir():
            wanted = ["config.json", "tokenizer.json", "preprocessor_config.json"]
            wanted += [] if list(folder.glob("*.safetensors.index.json")) else ["model.safetensors"]
            missing = [f for f in wanted if not (folder / f).exists()]
            hint = f"missing: {', '.join(missing)}; " if missing else ""
            step = f"{hint}restore the folder with `git checkout -- {folder}` or copy the files of one revision there"
        else:
            step = "check the name, the network, or download it once (HF_HOME, HF_HUB_OFFLINE=1 uses what is there)"
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"Cannot load {name} from {source}: {what} Next: {step}.") from error
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _folder_digest(folder: Path) -> str:
    """Content of a local model: name and bytes of every file that decides its outputs."""
    names = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".jinja"))
    return store.digest([[p.name, store.file_digest(p)] for p in names if p.name != "manifest.json"])


def load_processor(source: str, **where):
    """AutoProcessor where torchvision works; otherwise the same class on the PIL image backend.

    Without torchvision the stock AutoProcessor fails only because of its *video* processor, which images
    do not need.
    """
    if is_torchvision_available():
        return AutoProcessor.from_pretrained(source, trust_remote_code=False, **where)
    base = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(source, **where))]

    class ImageOnly(base):
        def check_argument_for_proper_class(self, name, arg):
            if name == "video_processor" and arg is None:
                return type(None)
            return super().check_argument_for_proper_class(name, arg)

        @classmethod
        def _get_arguments_from_pretrained(cls, path, processor_dict=None, **kwargs):
            image = AutoImageProcessor.from_pretrained(path, backend="pil", **where)
            return [image, AutoTokenizer.from_pretrained(path, **where), None]

    ImageOnly.__name__, ImageOnly.__qualname__ = base.__name__, base.__qualname__
    return ImageOnly.from_pretrained(source, **where)


# ---------------------------------------------------------------- proof of wiring


class WiringError(RuntimeError):
    """The loaded model is not wired as this library assumes; the message says what differs."""


@torch.inference_mode()
def prove_wiring(vlm: VLM) -> dict:
    """Check on one grey picture, with hooks only (independent of `attention`), what every result rests on.

    Every layer's `o_proj` reads heads x head_dim columns; cutting all heads of a layer changes the
    logits, for each layer; the image reaches the answer; and painting the place where one image token
    looks moves that token more than the others, top right and bottom left, so that a transposed or
    mirrored grid is noticed. Returns the measured effects.
    """
    size = (192, 160)
    grey = Image.new("RGB", size, (128, 128, 128))
    batch = vlm.prepare([Sample("wiring", grey, "grey", "the circle")])
    layers, heads = vlm.grid
    logits, width = {}, {}

    def run(tensors, cut: int | None = None):
        def zero(module, args, layer):
            width[layer] = args[0].shape[-1]
            return (torch.zeros_like(args[0]),) if layer == cut else None

        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a, i=i: zero(m, a, i))
            for i, layer in enumerate(vlm.layers)
        ]
        try:
            return vlm.model(**tensors, logits_to_keep=1).logits[0, -1].float()
        finally:
            for hook in hooks:
                hook.remove()

    plain = run(batch.tensors)
    if len(width) != layers:
        raise WiringError(f"{vlm.name}: {len(width)} attention layers ran, config.json says {layers}.")
    for i, layer in enumerate(vlm.layers):
        if width[i] != heads * layer.self_attn.head_dim:
            raise WiringError(f"{vlm.name}: o_proj of layer {i} reads {width[i]} columns, not {heads} heads.")
        logits[i] = (run(batch.tensors, cut=i) - plain).abs().max().item()
    if dead := [i for i, effect in logits.items() if not effect > 0]:
        raise WiringError(f"{vlm.name}: cutting all heads of layers {dead} leaves the logits as they were.")
    shifts = {}
    for corner, (row, col) in {"top right": (0, -1), "bottom left": (-1, 0)}.items():
        x0, y0, x1, y1 = batch.grids[0].cells[batch.grids[0].order[row, col]]
        inner = Box(0.9 * x0 + 0.1 * x1, 0.9 * y0 + 0.1 * y1, 0.1 * x0 + 0.9 * x1, 0.1 * y0 + 0.9 * y1)
        painted = grey.copy()
        painted.paste((255, 0, 0), tuple(map(round, inner)))
        other = vlm.prepare([Sample("wiring", painted, corner, "the circle")])
        shift = (_features(vlm, batch) - _features(vlm, other)).float().norm(dim=-1).cpu().numpy()
        near = batch.grids[0].tokens_in(inner)
        tiles = np.isin(np.arange(len(near)), batch.grids[0].order)
        for part in (tiles, ~tiles):  # a thumbnail's tokens on their own: it sees the same place again
            if not part.any():
                continue
            moved = shift[part & (shift > 0)]  # other tiles, encoded on their own, stay where they were
            if not moved.size:
                raise WiringError(f"{vlm.name}: painting the {corner} of a picture moves no image token.")
            least, bar = float(shift[near & part].min()), float(np.quantile(moved, 0.9))
            shifts[corner] = least, bar
            if not least >= bar > 0:
                raise WiringError(
                    f"{vlm.name}: painting the {corner} of a picture moves the image tokens that look there by "
                    f"{least:.3g}, but a tenth of the others by more than {bar:.3g}: their order is another."
                )
        if not (run(other.tensors) - plain).abs().max() > 0:
            raise WiringError(f"{vlm.name}: the picture does not reach the answer.")
    return {"layer_effect": logits, "painted_shift": shifts}


def _features(vlm: VLM, batch: Batch) -> torch.Tensor:
    pooled = vlm.see(batch).features.pooler_output
    return (
        torch.cat([p.reshape(-1, p.shape[-1]) for p in pooled]) if isinstance(pooled, tuple) else pooled.flatten(0, 1)
    )
