"""Loads a vision-language model and holds every difference between model families as one table. (`wiring.load_vlm`
loads and proves that the model is wired as this table says.)

The model inside a `VLM` is the stock `transformers` class on stock SDPA attention; nothing is forked or
patched. What differs between families (prompt, how boxes are written, where image tokens look) is a row
of `FAMILIES`; a new model of a known class needs no code, a new class needs one row.
"""

from __future__ import annotations

import gc
import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available
from transformers.utils import logging as hf_logging

from vrhlib import features, hub, store
from vrhlib.boxes import Box, Frame, Reply, Size, TokenGrid, read_box, read_points, to_frame
from vrhlib.profiles import MODELS, Pin
from vrhlib.samples import Sample, Task

# ---------------------------------------------------------------- families: all differences, as data


@dataclass(frozen=True)
class Family:
    """One row per `model_type`. `grid(vlm, batch, i, size)` returns where the image tokens of row i look,
    and the size (width, height) the image was resized to; `unit(vlm)` the (width, height) whose multiples are not
    resized."""

    prompt: str  # with {expression}: a phrase that names the referent
    question_prompt: str  # with {expression}: a question whose answer is the referent
    point_prompt: str  # with {expression}: a place to point at
    style: str  # how a box is written, see boxes.read_box
    frame: Frame  # what its numbers mean
    written: str  # format string of a box, for teacher forcing and round trips
    grid: Callable[[VLM, dict, int, Size], tuple[TokenGrid, Size]]
    unit: Callable[[VLM], Size]
    vision: str  # path of the vision tower
    mixing: str  # how the modules are called that bring another patch's content into a patch


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


def _patch_unit(vlm: VLM) -> Size:
    vision = vlm.model.config.vision_config
    return (vision.patch_size * vision.spatial_merge_size,) * 2


def _tile_unit(vlm: VLM) -> Size:
    size = vlm.processor.image_processor.size
    return size["width"], size["height"]


_QWEN_BOX = '{{"bbox_2d":[{0:.0f},{1:.0f},{2:.0f},{3:.0f}]}}'
_INTERNVL_BOX = "<box>[[{0:.0f},{1:.0f},{2:.0f},{3:.0f}]]</box>"
_INTERNVL_PROMPT = (
    "Please provide the bounding box coordinate of the region this sentence describes: <ref>{expression}</ref>"
)
_JSON = "Report bbox coordinates in JSON format."
_ANSWER = "{expression} Answer with the bbox coordinates in JSON format."
FAMILIES = {
    # Prompts for boxes are the authors' (QwenLM/Qwen3-VL issues 991 and 1721, InternVL's evaluate_grounding.py). Those
    # for questions, and for points in Qwen3-VL and InternVL, are ours; Qwen2.5-VL's for points is RoboRefer's.
    "qwen2_5_vl": Family(
        "Locate {expression} in this image and output the bbox coordinates in JSON format.", _ANSWER,
        "Locate {expression} in this image and output the point coordinates in JSON format.",
        "bbox_2d", "resized", _QWEN_BOX, _patch_grid, _patch_unit, "model.visual", "attn.proj",
    ),
    "qwen3_vl": Family(
        f'Locate every object that matches the description "{{expression}}" in the image. {_JSON}', _ANSWER,
        'Locate the place that matches the description "{expression}" in the image. Report its point coordinates in '
        "JSON format.",
        "bbox_2d", "permille", _QWEN_BOX, _patch_grid, _patch_unit, "model.visual", "attn.proj",
    ),
    "internvl": Family(
        _INTERNVL_PROMPT, "{expression} Please provide the bounding box coordinate of the answer.",
        "Please provide the point coordinate of the region this sentence describes: <ref>{expression}</ref>",
        "box tag", "permille", _INTERNVL_BOX, _tile_grid, _tile_unit, "model.vision_tower",
        "attention.projection_layer",
    ),
}  # fmt: skip


# ---------------------------------------------------------------- the loaded model

_THREAD = ThreadPoolExecutor(1, "vrhlib-prepare")
_SOURCE = store.file_digest(Path(__file__))  # decides what features of a picture are


@dataclass
class Batch:
    """Left-padded prompts of several samples, ready for the model. S is the padded prompt length."""

    samples: list[Sample]
    tensors: dict[str, torch.Tensor]  # input_ids [B, S], attention_mask [B, S], pixel_values, ...
    grids: list[TokenGrid]
    resized: list[Size]
    image_columns: list[np.ndarray]  # per sample int [V]: columns of its image tokens
    expression_columns: list[np.ndarray]  # per sample: columns of the expression's tokens
    context_columns: list[np.ndarray]  # per sample: columns of the text before the question, if there is one
    span_columns: list[np.ndarray]  # and of the part of it that holds the answer
    # Vision features once computed: of each sample what takes its image tokens' place, [V, hidden] or [tiles, V of one,
    # hidden], then what Qwen3-VL adds behind its first layers.
    features: list[tuple[torch.Tensor, ...]] | None = None

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
    rows: int = 128  # sequences that run at once, at most
    running: int = 0  # and in the pass that began last
    wiring: dict = field(default_factory=dict, repr=False)
    given: dict = field(default_factory=dict)  # `prompt` and `tiles` that `load_vlm` was asked for
    _begun: dict = field(
        default_factory=dict, repr=False
    )  # batches that a thread prepares, by prompt and ids of samples,
    _aside: list = field(default_factory=list, repr=False)  # and the tokenizer it prepares them with

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
        """Token ids that end a reply: those of generation_config.json, and the chat template's own end token. (A file
        without the latter would let replies run on, and the head scores average over what follows.)"""
        stop = self.model.generation_config.eos_token_id
        known = {self.tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])} - {None}
        if not known:
            raise ValueError(f"{self.name}: neither generation_config.json nor the tokenizer says what ends a reply.")
        return known

    @property
    def image_backend(self) -> str:
        """Image processor class: backends differ in pixels, so it is part of every run key."""
        return type(self.processor.image_processor).__name__

    @property
    def image_limits(self) -> dict:
        """Between which sizes pictures are resized (Qwen), or how they are cut into tiles (InternVL)."""
        processor = self.processor.image_processor
        names = ("size", "patch_size", "merge_size", "min_patches", "max_patches", "crop_to_patches")
        found = {name: getattr(processor, name, None) for name in names}
        plain = {k: asdict(v) if is_dataclass(v) else v for k, v in found.items()}
        plain["size"] = {k: v for k, v in dict(plain["size"]).items() if v is not None}
        return {k: v for k, v in plain.items() if v is not None}

    def check(self, cells: int = 24, seed: int = 0, size: Size | None = None) -> dict:
        """Prove where image tokens look: invert one cell of a picture, and exactly the token of that cell must move.

        While this runs, what mixes patches in the vision tower is cut (`Family.mixing`), so that a token sees its own
        cell only; the picture's size (width, height) must be one that is not resized, and is found if not given. A
        thumbnail is resized, so there the token that moves most must look at the cell. `cells` of them, corners
        included. Raises WiringError naming the first that differs.
        """
        return _check(self, cells, seed, size)

    def release(self) -> None:
        """Give up the weights, so that another model finds the device's memory free."""
        self.model = None
        self._begun.clear()  # what was prepared ahead holds the model, too
        gc.collect()  # modules and hooks refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def identity(self) -> dict:
        """What a run key needs to know about the model."""
        return {
            "model": self.name, "revision": self.revision, "image_backend": self.image_backend,
            "image_limits": self.image_limits,
            "prompt": [self.asks(task) for task in ("locate", "question", "point")],
            "dtype": str(self.model.dtype).removeprefix("torch."), "device": self.device.type,
        }  # fmt: skip

    def write_box(self, box: Box, original: Size, resized: Size) -> str:
        """The text this family writes for a box given in original pixels."""
        return self.family.written.format(*to_frame(box, self.family.frame, original, resized))

    def read(self, text: str, original: Size, resized: Size, finished: bool = True) -> Reply:
        """The box of a reply in original pixels, or the reason why there is none."""
        return read_box(text, self.family.style, self.family.frame, original, resized, finished)

    def read_points(self, text: str, original: Size, resized: Size) -> list[tuple[float, float]]:
        """All points of a reply in original pixels."""
        return read_points(text, self.family.frame, original, resized)

    def asks(self, task: Task) -> str:
        """The prompt of a task, with {expression} where the sample's text goes."""
        family = self.family
        return {"locate": self.prompt, "question": family.question_prompt, "point": family.point_prompt,
                "answer": "{expression}"}[task]  # fmt: skip

    def question(self, expression: str, task: Task = "locate") -> str:
        """The prompt with the expression in it; other braces stay as they are."""
        return self.asks(task).replace("{expression}", expression)

    def chat(self, expression: str, task: Task = "locate", image: bool = True, context: str = "") -> tuple[str, range]:
        """Prompt in the model's chat template (one image placeholder), and where the expression stands in it.

        A `context` stands before the question, on a line of its own."""
        before = f"{context}\n" if context else ""
        content = before + self.question(expression, task)
        parts = [{"type": "image"}] * image + [{"type": "text", "text": content}]
        message = {"role": "user", "content": parts}
        text = self.processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        start = text.rindex(content) + len(before) + self.asks(task).index("{expression}")
        return text, range(start, start + len(expression))

    @property
    def threaded(self) -> bool:
        """Whether batches are prepared by a thread while the model runs: on a CPU they would take turns."""
        return self.device.type == "cuda"

    def soon(self, samples: Sequence[Sample] | None) -> None:
        """Begin to `prepare` what will be asked for (decode pictures, process them), beside the model's work."""
        if samples is None or not self.threaded:
            return
        piece = list(samples[: self.rows])
        key = (self.prompt, *(s.id for s in piece))
        if key not in self._begun:
            if not self._aside:  # a tokenizer keeps its padding as state, so the thread has one of its own
                self._aside.append(deepcopy(self.tokenizer))
            processor = copy(self.processor)
            processor.tokenizer = self._aside[0]
            aside = replace(self, processor=processor)  # made anew each time: the prompt may have been changed
            while len(self._begun) > 1:  # cut otherwise than foreseen, and never asked for
                del self._begun[next(iter(self._begun))]
            self._begun[key] = _THREAD.submit(aside._prepared, piece)

    def prepare(self, samples: Sequence[Sample]) -> Batch:
        """Tokenise, process images and locate image and expression tokens of several samples.

        Samples without an image have an empty grid. Raises ValueError for a batch of both kinds.
        """
        samples = list(samples)
        begun = self._begun.pop((self.prompt, *(s.id for s in samples)), None)
        if begun is not None:
            batch = begun.result()
            if all(map(operator.is_, batch.samples, samples)):
                return batch
        return self._prepared(samples)

    def _prepared(self, samples: list[Sample]) -> Batch:
        seen = [s.image is not None for s in samples]
        if any(seen) != all(seen):
            raise ValueError("A batch has pictures or none: prepare samples with and without an image apart.")
        texts, spans = zip(*(self.chat(s.text, s.task, s.image is not None, s.context) for s in samples))
        images = {"images": [_rgb(s) for s in samples]} if seen[0] else {}
        inputs = self.processor(**images, text=list(texts), padding=True, padding_side="left", return_tensors="pt")
        tensors = {k: self._there(v) for k, v in inputs.items()}
        if seen[0]:
            grids, resized = zip(*(self.family.grid(self, tensors, i, s.image.size) for i, s in enumerate(samples)))
        else:
            grids, resized = [TokenGrid.none()] * len(samples), [(1, 1)] * len(samples)
        ids = inputs["input_ids"].numpy()
        columns = [np.flatnonzero(row == self.model.config.image_token_id) for row in ids]
        for sample, grid, found in zip(samples, grids, columns):
            if len(grid) != len(found):
                raise ValueError(
                    f"{self.name}, sample {sample.id}: the prompt holds {len(found)} image tokens, but the image grid "
                    f"has {len(grid)}. Processor files and model do not belong together."
                )
        places = [self._columns(t, (span, *_context(s, t, span)), row)
                  for s, t, span, row in zip(samples, texts, spans, ids)]  # fmt: skip
        return Batch(samples, tensors, list(grids), list(resized), columns, *map(list, zip(*places)))

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the model's device; to a GPU from pinned memory, without waiting for it."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def tokens(self, text: str, spans: Sequence[range]) -> tuple[list[int], list[np.ndarray]]:
        """Token ids of a prompt's text, and for each span of characters the tokens that touch it, int indices."""
        plain = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, stops = np.array(plain["offset_mapping"]).reshape(-1, 2).T
        inside = [np.flatnonzero((starts < s.stop) & (stops > s.start)) if s else np.zeros(0, int) for s in spans]
        return plain["input_ids"], inside

    def _columns(self, text: str, spans: Sequence[range], ids: np.ndarray) -> list[np.ndarray]:
        """Counted from the end: prompts are left-padded and the image, however long, stands before the text."""
        plain, inside = self.tokens(text, spans)
        columns = [len(ids) - len(plain) + index for index in inside]
        for span, index, found in zip(spans, inside, columns):
            if np.array(plain)[index].tolist() != ids[found].tolist():
                where = text[span.start : span.stop]
                raise ValueError(f"{self.name}: lost track of the tokens of {where!r} in {text!r}.")
        return columns

    @torch.inference_mode()
    def see(self, batch: Batch) -> Batch:
        """Run the vision tower once for every picture of a batch; later passes over this batch reuse its features, and
        later batches what is kept on disk (`features`, if it is asked for)."""
        if batch.features is None and "pixel_values" in batch.tensors:
            sizes = batch.tensors.get("image_grid_thw")
            # Rows of the pixels that belong to each picture: patches (Qwen) or tiles (InternVL).
            tiles = [len(columns) // (self.tile_tokens or 1) for columns in batch.image_columns]
            pixels = batch.tensors["pixel_values"].split(sizes.prod(1).tolist() if sizes is not None else tiles)
            first = _first_alike(batch.samples, pixels)
            keys = {i: self._picture(pixels[i]) for i in set(first)} if features.limit_gb() else {}
            seen = {i: features.load(self.profile, key, self.device) for i, key in keys.items()}
            size = [len(columns) for columns in batch.image_columns]
            seen = {i: kept for i, kept in seen.items() if kept and all(v[..., 0].numel() == size[i] for v in kept)}
            if unseen := sorted(set(first) - set(seen)):
                extra = {"image_grid_thw": sizes[unseen]} if sizes is not None else {}
                together = torch.cat([pixels[i] for i in unseen])
                out = self.model.get_image_features(pixel_values=together, return_dict=True, **extra)
                levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
                if isinstance(levels[0], torch.Tensor):
                    levels = [level.split([tiles[i] for i in unseen]) for level in levels]
                seen |= dict(zip(unseen, zip(*levels)))
                for i in unseen if keys else ():
                    features.save(self.profile, keys[i], seen[i])
            batch.features = [seen[i] for i in first]
        return batch

    def _picture(self, pixels: torch.Tensor) -> str:
        """What determines a picture's features, as a key."""
        about = self.revision, self.image_backend, self.image_limits, str(self.model.dtype), self.device.type, _SOURCE
        content = hashlib.sha256(pixels.cpu().numpy().tobytes()).hexdigest()
        return store.digest([*about, list(pixels.shape), content, store.versions()])

    def inputs(self, batch: Batch, copies: int = 1) -> dict:
        """Keyword arguments for the model: each sample `copies` times in a row, vision features shared."""
        self.see(batch)
        tensors = {k: v.repeat_interleave(copies, 0) for k, v in batch.tensors.items() if k != "pixel_values"}
        if batch.features is None:
            return tensors
        pooled, *deep = ([level for level in levels for _ in range(copies)] for levels in zip(*batch.features))
        out = BaseModelOutputWithPooling(pooler_output=torch.cat(pooled) if self.tile_tokens else tuple(pooled))
        out.deepstack_features = [tuple(level) for level in deep]
        return tensors | {"mm_encoder_outputs": {"image": out}}

    @property
    def tile_tokens(self) -> int | None:
        """Image tokens of a tile; None for a family that cuts no tiles."""
        return getattr(self.processor, "image_seq_length", None)

    def decode(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Text of generated ids up to the stop token, and whether there was one."""
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        return self.tokenizer.decode(list(ids)[:end], skip_special_tokens=True), end is not None


def _context(sample: Sample, text: str, expression: range) -> tuple[range, range]:
    """Where a sample's context stands in its prompt, and where the part that holds the answer does."""
    if not sample.context:
        return range(0), range(0)
    start = text.rindex(sample.context, 0, expression.start)
    part = sample.span or (0, 0)
    return range(start, start + len(sample.context)), range(start + part[0], start + part[1])


def _rgb(sample: Sample) -> Image.Image:
    try:
        return sample.image.convert("RGB")
    except (OSError, SyntaxError) as error:  # PIL reads lazily: a truncated file shows only now
        raise ValueError(f"The image of sample {sample.id} cannot be read ({error}). Fetch it again.") from error


def _first_alike(samples: Sequence[Sample], pixels: Sequence[torch.Tensor]) -> list[int]:
    """For each sample the first of the batch that shows the same picture; compared pixel by pixel."""
    first: list[int] = []
    for i, sample in enumerate(samples):
        alike = (j for j in first if samples[j].image_key == sample.image_key and torch.equal(pixels[j], pixels[i]))
        first.append(next(alike, i))
    return first


# ---------------------------------------------------------------- loading


def load_unproven(
    name: str | Path,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    prompt: str | None = None,
    tiles: int | None = None,
) -> VLM:
    """A model of `MODELS` by name, or any model of a known family from a folder or Hub id, before its wiring is proven.

    Arguments and errors as in `wiring.load_vlm`.
    """
    pin = MODELS.get(str(name)) or _unlisted(str(name))
    source, local = _locate(name, pin)
    device = device or os.environ.get("VRHLIB_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    where = {} if local else {"revision": hub.pinned(pin.source, pin.revision)}
    config = _explained(name, source, AutoConfig.from_pretrained, source, trust_remote_code=False, **where)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{name} is a {config.model_type!r}; known families: {', '.join(FAMILIES)}. Add a row to "
            "FAMILIES in vrhlib/vlm.py."
        )
    text = config.get_text_config()
    grid = text.num_hidden_layers, text.num_attention_heads
    if pin.grid and grid != pin.grid:
        raise ValueError(
            f"{source} has {grid[0]} layers x {grid[1]} heads, {name} has {pin.grid[0]} x {pin.grid[1]}: it is another "
            f"model, and its results would stand under a wrong name. Restore the files of {pin.source}."
        )
    model, info = _explained(
        name, source, AutoModelForImageTextToText.from_pretrained, source, dtype=dtype, use_safetensors=True,
        trust_remote_code=False, attn_implementation="sdpa", output_loading_info=True,
        ignore_mismatched_sizes=True, **where,
    )  # fmt: skip
    broken = {k: sorted(map(str, v))[:3] for k, v in info.items() if v and k != "error_msgs"}
    if broken:
        raise ValueError(f"The weights of {name} do not fit its config.json: {broken}. Fetch both from one revision.")
    family = FAMILIES[config.model_type]
    given = {name: value for name, value in {"prompt": prompt, "tiles": tiles}.items() if value is not None}
    prompt = prompt or pin.prompt or family.prompt
    if prompt.count("{expression}") != 1:
        raise ValueError(f"The prompt needs {{expression}} once, got {prompt!r}.")
    commit = getattr(config, "_commit_hash", None) or pin.revision or "unpinned"
    if not local:
        hub.pin(pin.source, getattr(config, "_commit_hash", None))
    processor = _explained(name, source, load_processor, source, **where)
    if tiles is not None:
        if tiles < 1:
            raise ValueError(f"tiles={tiles}: a picture is one tile at least.")
        if not hasattr(processor.image_processor, "max_patches"):
            raise ValueError(f"{name} does not cut pictures into tiles; leave out tiles={tiles}.")
        processor.image_processor.max_patches = tiles
    return VLM(
        str(name), model.to(device).eval(), processor, family, prompt, pin.max_new_tokens,
        _folder_digest(Path(source)) if local else commit, pin.profile, pin.rows, given=given,
    )  # fmt: skip


def _locate(name: str | Path, pin: Pin) -> tuple[str, bool]:
    """Where the files are, and whether that is a folder. A shipped model is never looked for on the Hub."""
    given = (store.ROOT / pin.source, hub.local_copy(pin.source)) if str(name) in MODELS else (Path(pin.source),)
    for folder in given:
        if folder and folder.is_dir():
            return str(folder), True
    if str(name) in MODELS and pin.profile == "nano":
        raise OSError(
            f"{name} is shipped in {pin.source}, but {store.ROOT / pin.source} is gone. Restore it with "
            f"`git checkout -- {pin.source}`."
        )
    return pin.source, False


def revision(name: str) -> str:
    """What `VLM.revision` will be of a model, without loading it. Raises like `load_unproven`."""
    pin = MODELS.get(name) or _unlisted(name)
    source, local = _locate(name, pin)
    return _folder_digest(Path(source)) if local else hub.pinned(pin.source, pin.revision) or "unpinned"


def _unlisted(name: str) -> Pin:
    there = Path(name).is_dir()
    if not there and (Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ValueError(
            f"There is no folder {name}. Give a folder, a Hub id (owner/name), or one of {', '.join(MODELS)}."
        )
    if not there and "/" not in name:
        raise store.unknown("model", name, MODELS, ", or give a folder or Hub id")
    return Pin(name, None, "nano" if there else "paper", rows=16)


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
            mine = folder.resolve().is_relative_to(store.ROOT / "data" / "nano")
            restore = f"restore the folder with `git checkout -- {folder}` or " if mine else ""
            step = f"{hint}{restore}copy all files of one revision there"
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


# ---------------------------------------------------------------- proof of the grid of image tokens


class WiringError(RuntimeError):
    """The loaded model is not wired as this library assumes; the message says what differs."""


@torch.inference_mode()
def _check(vlm: VLM, cells: int, seed: int, size: Size | None) -> dict:
    width, height = size or _unresized(vlm)
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
    sample = Sample("check", picture, "check", "the circle")
    with _deaf(vlm):
        batch = vlm.prepare([sample])
        grid = batch.grids[0]
        tiles = np.flatnonzero(grid.part("tiles"))
        corners = grid.order[[0, 0, -1, -1], [0, -1, 0, -1]]
        others = np.random.default_rng(seed).permutation(np.setdiff1d(tiles, corners))[: max(0, cells - 4)]
        plain = _image_tokens(vlm, batch)
        for token in map(int, (*corners, *others)):
            corner = tuple(round(x) for x in grid.cells[token])
            changed = picture.copy()
            changed.paste(ImageOps.invert(picture.crop(corner)), corner)
            again = vlm.prepare([Sample("check", changed, f"check {token}", "the circle")])
            shift = (_image_tokens(vlm, again) - plain).norm(dim=-1).cpu().numpy()
            moved = np.flatnonzero(shift[tiles] > 1e-3 * shift[tiles].max())
            where = grid.tokens_in(Box(*grid.cells[token]))
            thumbnail = np.setdiff1d(np.arange(len(grid)), tiles)
            if shift[tiles].max() == 0 or moved.tolist() != np.flatnonzero(where[tiles]).tolist():
                raise WiringError(
                    f"{vlm.name}: inverting the cell of image token {token} (pixels {corner}) moves the tokens "
                    f"{tiles[moved].tolist()[:8]}: image tokens lie in another order than `Family.grid` says."
                )
            if len(thumbnail) and not where[thumbnail[shift[thumbnail].argmax()]]:
                raise WiringError(f"{vlm.name}: the thumbnail's tokens lie in another order than `Family.grid` says.")
    return {"image_tokens": len(grid), "rows": grid.rows, "cols": grid.cols, "cells": min(cells, len(tiles))}


def _unresized(vlm: VLM) -> tuple[int, int]:
    """A size (width, height), landscape if possible, that the model's processor leaves as it is."""
    unit = vlm.family.unit(vlm)
    for scale in range(1, 40):
        for across, down in ((3, 2), (2, 1), (2, 2)):
            size = across * scale * unit[0], down * scale * unit[1]
            batch = vlm.prepare([Sample("size", Image.new("RGB", size), "size", "the circle")])
            grid = batch.grids[0]
            square = grid.cols * size[1] == grid.rows * size[0] and grid.cols % (across * scale) == 0
            if batch.resized[0] == size and square:
                return size
    raise WiringError(f"{vlm.name}: no multiple of {unit[0]} x {unit[1]} pixels is left unresized.")


@contextmanager
def _deaf(vlm: VLM) -> Iterator[None]:
    """The vision tower with everything cut that brings another patch's content into a patch."""
    tower = vlm.model.get_submodule(vlm.family.vision)
    cut = [m for name, m in tower.named_modules() if name.endswith(vlm.family.mixing)]
    if not cut:
        raise WiringError(f"{vlm.name}: no module of its vision tower is called *{vlm.family.mixing}.")
    with ExitStack() as stack:
        for module in cut:
            stack.callback(module.register_forward_hook(lambda m, a, out: torch.zeros_like(out)).remove)
        yield


def _image_tokens(vlm: VLM, batch: Batch) -> torch.Tensor:
    """What the language model is given for the image tokens of a batch, float [V, hidden]."""
    pooled = [levels[0] for levels in vlm.see(batch).features]
    return torch.cat([p.reshape(-1, p.shape[-1]) for p in pooled]).float()
