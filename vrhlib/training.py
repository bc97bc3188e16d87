"""What training takes of a GPU, known before anything is loaded: parameters, weights, gradients, states, activations.

As `DPOTrainer` of TRL 1.16 trains here: bfloat16 autocast, gradient checkpointing, SDPA, fused AdamW. *full* trains a
float32 copy of every parameter, of which autocast keeps bfloat16 ones for a pass, beside the bfloat16 model itself as
the reference: 20 bytes a parameter. In bfloat16 alone it would take 10, and learn nothing: a step of the paper's 2e-7
is less than half the distance between neighbouring bfloat16 numbers above 6e-5, and is rounded away there, which is
nearly everywhere. *lora* trains float32 adapters on the attention projections of the language model; with the adapters
off, the model is its own reference.

A GB is 1e9 bytes. All is calculated, nothing measured on a GPU; what the allocator loses between blocks is not counted.
(A card sold as 48 GB has 51.5e9 bytes.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from vrhlib import store
from vrhlib.profiles import MODELS
from vrhlib.profiles import profile as profile_of

CONTEXT_GB = 2.0  # CUDA itself, the vision tower's activations (in training, those of the layer worked on)
TEXT = 60  # tokens of a prompt beside those of the picture: chat template, instruction, expression
PATCHES = 4  # of a picture, for each of its tokens: all four models merge 2 x 2 (InternVL adds one a tile)
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768  # TRL's fused head: at most so many logits at once
METHODS = ("full", "lora")
BF16, FP32 = 2, 4  # bytes

Method = Literal["full", "lora"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: its language model's, its vision tower's (layers, width), and its parameters in all.

    `qk_norm`: Qwen3's norms of queries and keys, in place of Qwen2's biases of their projections.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    qk_norm: bool
    vision: tuple[int, int]
    total: int


# As the configs state them. The totals are what the classes of transformers hold at these sizes (the tests count them)
# and, twice over, `Pin.gb`; no checkpoint was opened for them.
SHAPES = {
    "qwen2.5-vl-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064, False, False, (32, 1280), 8_292_166_656),
    "qwen3-vl-8b": Shape(36, 4096, 32, 8, 128, 12288, 151936, False, True, (27, 1152), 8_767_123_696),
    "internvl3-8b": Shape(28, 3584, 28, 4, 128, 18944, 151674, False, False, (24, 1024), 7_944_373_760),
    "internvl3.5-8b": Shape(36, 4096, 32, 8, 128, 12288, 151936, False, True, (24, 1024), 8_528_318_464),
}


@dataclass(frozen=True)
class Memory:
    """Parameters, how many of them are trained (adapters are counted there alone), and GB."""

    parameters: int
    trained: int
    weights: float
    reference: float
    gradients: float
    optimiser: float
    activations: float
    context: float

    @property
    def states(self) -> float:
        """What a sharded run divides among its cards."""
        return self.weights + self.reference + self.gradients + self.optimiser

    @property
    def total(self) -> float:
        return self.states + self.activations + self.context


# ---------------------------------------------------------------- parameters


def language_parameters(shape: Shape) -> int:
    """Of the language model, with embeddings and head."""
    return (
        shape.vocab * shape.hidden * (1 if shape.tied else 2) + shape.layers * _layer_parameters(shape) + shape.hidden
    )


def _layer_parameters(shape: Shape) -> int:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    extra = 2 * shape.head_dim if shape.qk_norm else q + 2 * kv
    return shape.hidden * (2 * q + 2 * kv + 3 * shape.mlp + 2) + extra


def lora_parameters(shape: Shape, rank: int) -> int:
    """Of adapters on q_proj, k_proj, v_proj and o_proj of every layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.layers * rank * (2 * (shape.hidden + q) + 2 * (shape.hidden + kv))


# ---------------------------------------------------------------- memory


def memory(model: str, method: Method, rank: int = 16, pairs: int = 1, tokens: int | None = None) -> Memory:
    """Of training one of `SHAPES`. Raises ValueError for a model that is not there, or an unknown method.

    `pairs` go through the model at once; each is two sequences of `tokens`: picture, prompt and reply. By default the
    picture is one of 640 x 480, and the reply as long as one may be.
    """
    if model not in SHAPES:
        raise store.unknown("model", model, SHAPES)
    if method not in METHODS:
        raise store.unknown("method", method, METHODS)
    if min(rank, pairs, 1 if tokens is None else tokens) < 1:
        raise ValueError(f"rank={rank}, pairs={pairs} and tokens={tokens} must be at least 1.")
    shape, pin, full = SHAPES[model], MODELS[model], method == "full"
    tokens = pin.visual_tokens + TEXT + pin.max_new_tokens if tokens is None else tokens
    trained = shape.total if full else lora_parameters(shape, rank)
    weights = BF16 * shape.total
    worked_on = activations(shape, method, 2 * pairs, tokens, reply=min(tokens, pin.max_new_tokens))
    return Memory(
        parameters=shape.total, trained=trained, weights=(weights + FP32 * trained) / 1e9,
        reference=weights / 1e9 if full else 0.0, gradients=FP32 * trained / 1e9, optimiser=2 * FP32 * trained / 1e9,
        activations=worked_on / 1e9, context=CONTEXT_GB,
    )  # fmt: skip


def activations(shape: Shape, method: Method, sequences: int, tokens: int, reply: int) -> int:
    """Bytes that are held at the worst moment of the backward pass: what the checkpoints keep, and then either the head
    or one recomputed layer.

    The vision tower's checkpoints are kept under LoRA too, though nothing is trained there: gradients are asked of the
    embeddings of every submodel (`enable_input_require_grads`). Hidden states are in the dtype of the model that is
    trained, float32 in full, where autocast gives the projections bfloat16 ones.
    """
    patches = PATCHES * max(0, tokens - TEXT - reply)
    size = FP32 if method == "full" else BF16
    kept = sequences * size * (_states(shape, tokens) + shape.vision[0] * shape.vision[1] * patches)
    return kept + max(sequences * tokens * _layer(shape, tokens), _head(shape, method, sequences * reply))


def _states(shape: Shape, tokens: int) -> int:
    """Numbers in the hidden states before every layer, and in those that the last norm keeps."""
    return (shape.layers + 4) * shape.hidden * tokens


def _layer(shape: Shape, tokens: int) -> int:
    """Bytes a token of a layer that is recomputed and passed backwards.

    Norms keep a float32 copy and two of bfloat16. Attention: q, k and v (repeated for every query head), its output.
    MLP: gate, its activation, up, and three gradients. The mask: one byte a key, and two where it is added.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * shape.hidden + ((q + kv) if shape.qk_norm else 0)
    extra = (FP32 + BF16) * norms + 2 * BF16 * shape.hidden  # the inputs of the projections
    return extra + 4 * BF16 * q + 6 * BF16 * shape.mlp + 3 * tokens


def _head(shape: Shape, method: Method, reply: int) -> int:
    """Of replies alone, and in tiles, as `trl.kernels.ChunkedLogProbFunction` goes backwards; gradients are summed in
    float32. A trained head is float32, too: its rows are copied to bfloat16 tile by tile, and its new gradient stands
    beside that of the passes before."""
    tile, hidden = min(reply, HEAD_TOKENS) * HEAD_COLUMNS * BF16, reply * shape.hidden * FP32
    return tile + hidden + (shape.hidden * (shape.vocab * FP32 + HEAD_COLUMNS * BF16) if method == "full" else 0)


# ---------------------------------------------------------------- whether it fits


def cards(
    model: str, method: Method, rank: int = 16, pairs: int = 1, tokens: int | None = None, card_gb: float = 48.0
) -> int | None:
    """How many cards a run needs, with `pairs` at once on each. Above 1, they divide weights, reference, gradients and
    states among them, and gather a layer and the head where they come to them. None if no number is enough: activations
    are not divided."""
    needed, shape = memory(model, method, rank, pairs, tokens), SHAPES[model]
    if needed.total <= card_gb:
        return 1
    gathered = FP32 * (_layer_parameters(shape) + shape.vocab * shape.hidden) / 1e9
    left = card_gb - needed.activations - needed.context - gathered
    return max(2, math.ceil(needed.states / left)) if left > 0 else None


def memory_rows(
    models: Sequence[str], rank: int = 16, pairs: int = 1, tokens: int | None = None, card_gb: float = 48.0
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of a table: each model, in full and with adapters; sizes in GB. The last column says what a run
    needs, and of how many pairs at once if it needs less for fewer."""
    header = ("model", "recipe", "trained", "share", "weights", "reference", "gradients", "optimiser", "activations",
              "context", "in all", f"on {card_gb:g} GB")  # fmt: skip
    rows = []
    for model in models:
        for method in METHODS:
            m = memory(model, method, rank, pairs, tokens)
            sizes = m.weights, m.reference, m.gradients, m.optimiser, m.activations, m.context, m.total
            recipe = method if method == "full" else f"lora, rank {rank}"
            share = f"{m.trained / m.parameters:.2%}"
            verdict = _verdict(model, method, rank, pairs, tokens, card_gb)
            rows.append((model, recipe, f"{m.trained:,}", share, *(f"{size:.2f}" for size in sizes), verdict))
    return header, rows


def _verdict(model: str, method: Method, rank: int, pairs: int, tokens: int | None, card_gb: float) -> str:
    needed = {n: cards(model, method, rank, n, tokens, card_gb) or math.inf for n in range(pairs, 0, -1)}
    best = min(needed, key=needed.get)  # of equals the first, which has most pairs
    if needed[best] == math.inf:
        return "too small for one pair"
    told = "fits" if needed[best] == 1 else f"needs {needed[best]} x {card_gb:g} GB (sharded)"
    return told if best == pairs else f"{told} with {_pairs(best)} at once"


def _pairs(number: int) -> str:
    return f"{number} pair" if number == 1 else f"{number} pairs"


def refuse_if_too_large(
    model: str, method: Method, free_gb: float, rank: int = 16, pairs: int = 1, tokens: int | None = None
) -> None:
    """Raises MemoryError, with the next step, where training does not fit into `free_gb`: what is free, and what the
    model itself takes of it if it is loaded already. Passes models that are not in `SHAPES`."""
    if model not in SHAPES or (needed := memory(model, method, rank, pairs, tokens).total) <= free_gb:
        return
    steps = []
    if method == "full":
        adapters = memory(model, "lora", rank, pairs, tokens).total
        steps.append(f"train adapters (RECIPE=method=lora), which takes {adapters:.1f} GB")
    if pairs > 1:
        one = memory(model, method, rank, 1, tokens).total
        steps.append(f"let fewer pairs run at once (with 1 it takes {one:.1f} GB)")
    steps.append("end what else runs on the GPU (nvidia-smi shows it)")
    steps.append("take a larger GPU")
    raise MemoryError(
        f"Training {model} ({method}, {_pairs(pairs)} at once) needs {needed:.1f} GB of GPU memory, and "
        f"{free_gb:.1f} GB are free. What helps: {'; '.join(steps)}."
    )


# ---------------------------------------------------------------- recipes

KEEP = ("all", "different", "better")  # which pairs: all (the paper), two different replies, the better box chosen


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a policy is trained. The paper: full, 2e-7, 4 epochs; it gives no beta, batch size or schedule.

    `loss`: dpo, or sft, which fits the chosen replies alone on the same batches in the same order (a control: what does
    plain fine-tuning on these replies give?). `at_once`: pairs per pass; the rest of `batch_size` is accumulated.
    """

    method: Literal["lora", "full"] = "lora"
    loss: Literal["dpo", "sft"] = "dpo"
    learning_rate: float = 1e-5
    epochs: float = 4.0
    beta: float = 0.1
    batch_size: int = 16
    at_once: int = 1
    rank: int = 16
    alpha: int = 32
    seed: int = 0

    def __post_init__(self):
        for name, values in (("method", ("lora", "full")), ("loss", ("dpo", "sft"))):
            if getattr(self, name) not in values:
                raise store.unknown(name, getattr(self, name), values)
        for name in ("learning_rate", "epochs", "beta", "batch_size", "at_once", "rank", "alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} of a recipe must be above 0.")
        if self.batch_size % self.at_once:
            raise ValueError(f"batch_size={self.batch_size} pairs cannot be split into passes of {self.at_once}.")

    def but(self, **changes: object) -> Recipe:
        return replace(self, **changes)


PAPER = {"method": "full", "learning_rate": 2e-7, "epochs": 4}  # the numbers that it gives (Appendix B)


def recipe_of(profile: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a profile with changes like `beta=0.2`; `method=full` starts from the paper's numbers.

    Raises ValueError for a name that a recipe does not have, or a value of another type."""
    defaults = dict(profile_of(profile).recipe)
    types, wanted = {f.name: type(f.default) for f in fields(Recipe)}, {}
    for change in changes:
        name, said, value = str(change).partition("=")
        if name not in types:
            raise store.unknown("part of a recipe", name, types)
        try:
            wanted[name] = types[name](value)
        except ValueError:
            said = ""
        if not said or not value:
            raise ValueError(f"RECIPE={change}: write it as {name}={getattr(Recipe(), name)}.")
    start = defaults | PAPER if wanted.get("method") == "full" else defaults
    return Recipe(**(start | wanted))
