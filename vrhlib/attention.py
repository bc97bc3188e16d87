"""The only file that touches a running model: captures attention rows, ablates heads, steers them.

One attention function, registered as "vrh" on the *text* stack while a context manager is open, wraps
stock SDPA. It can do three things with the queries, keys and values it is handed:

    capture   recompute the attention rows of a few chosen queries, reduce them on the spot to one number
              per head, and forget them: full attention matrices never exist
    ablate    replace the output of chosen heads, per row of the batch, so that conditions share a batch
    steer     make chosen heads attend evenly to chosen image tokens, and to nothing else

Queries and keys arrive after rotary embedding, keys and values not yet repeated for grouped queries; the
function's output, [B, query, heads, head_dim], goes straight into `o_proj`. So zeroing a head there is the
paper's ablation: its contribution never reaches the residual stream. Outside the context managers the
model is the stock one again, also after an exception.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from transformers import AttentionInterface, LogitsProcessor
from transformers.cache_utils import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, sdpa_mask

from vrhlib import store
from vrhlib.heads import HeadSet
from vrhlib.vlm import VLM, Batch

Kind = Literal["zero", "uniform", "mean"]
Phase = Literal["all", "decode"]
KINDS: tuple[Kind, ...] = ("zero", "uniform", "mean")
PHASES: tuple[Phase, ...] = ("all", "decode")
KERNEL = "vrh"
_STEER = 1 + len(KINDS)  # after the codes of the kinds of ablation


@dataclass(frozen=True, eq=False)
class Ablation:
    """What is done to which heads, and when.

    `kind`: zero sets the head's output to 0 (the paper); uniform makes it attend equally to every visible
    key (what "zero the logits" amounts to, Wu et al. 2025); mean replaces it by its average over a data set
    (`means`, float [layers, heads, head_dim], from `head_means`).
    `phase`: all positions, or decode: only query positions at or after the end of the prompt. The first
    generated token comes from the last prompt position, so decode leaves it untouched.
    """

    heads: HeadSet
    kind: Kind = "zero"
    phase: Phase = "all"
    means: torch.Tensor | None = None

    def __post_init__(self):
        if self.kind not in KINDS or self.phase not in PHASES:
            raise ValueError(
                f"Ablation kind is one of {KINDS} and phase one of {PHASES}, not {self.kind}, {self.phase}."
            )
        if (self.kind == "mean") != (self.means is not None):
            raise ValueError(
                "Ablation kind 'mean' needs `means` (see attention.head_means); the other kinds take none."
            )

    def describe(self) -> dict:
        """For run keys: everything that determines the effect."""
        means = None
        if self.means is not None:  # rounded: the last bit of a GPU's average is not another experiment
            rounded = self.means.float().cpu().numpy().round(5) + 0.0
            means = hashlib.sha256(rounded.tobytes()).hexdigest()[:16]
        return {"heads": [str(h) for h in sorted(self.heads)], "kind": self.kind, "phase": self.phase, "means": means}


@dataclass(frozen=True, eq=False)
class Steering:
    """Heads that are made to attend evenly to the image tokens of the *sample's* own segment (its mask if it has one,
    else its box; any overlap) and to nothing else: where a person points, in place of where the model looks.

    `phase`: decode (the paper's project page: "decode-only, matching how VRHs were detected"), or all. The first
    generated token comes from the last prompt position, so decode leaves it untouched. A position that stands before
    the segment in the prompt cannot see it, and is left alone.
    """

    heads: HeadSet
    phase: Phase = "decode"
    means: None = field(default=None, init=False)  # as an ablation has them

    def __post_init__(self):
        if self.phase not in PHASES:
            raise ValueError(f"Steering phase is one of {PHASES}, not {self.phase!r}.")

    def describe(self) -> dict:
        """For run keys: everything that determines the effect, but for the segment, which is the sample's."""
        return {"heads": [str(h) for h in sorted(self.heads)], "kind": "steer", "phase": self.phase}


Intervention = Ablation | Steering

# A reduction gets attention rows float [B, heads, R, kv], post-softmax over the visible keys, and returns
# a tensor [B, heads, R, ...]. kv may be shorter than the full sequence while generating.
Reduction = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Plan:
    """What the attention function should do in the passes of one context."""

    batch: int | None  # None: any
    layers: int
    first: int = 0  # layers below are not run
    rows: torch.Tensor | None = None  # int [B, R], columns of the padded sequence, -1 unused
    reduce: dict[str, Reduction] = field(default_factory=dict)
    codes: np.ndarray | None = None  # int [B, layers, heads]: 0 leave, 1 + KINDS.index(kind), or _STEER
    start: torch.Tensor | None = None  # int [B]: first query column that is ablated or steered
    targets: torch.Tensor | None = None  # bool [B, S] columns of the prompt that steered heads attend to
    means: torch.Tensor | None = None  # [B, layers, heads, head_dim], where kind is mean
    sums: torch.Tensor | None = None  # [layers, heads, head_dim] running sum of head outputs, where the model runs
    valid: torch.Tensor | None = None  # bool [B, T] columns that count for `sums`, there too

    def __post_init__(self):
        self.parts = {name: [[] for _ in range(self.layers)] for name in self.reduce}
        self.done: list[list[int]] = [[] for _ in range(self.layers)]
        self.calls = np.zeros(self.layers, dtype=int)
        self.moved: tuple | None = None
        self.placed: dict[tuple, torch.Tensor] = {}
        self.row_list = None if self.rows is None else self.rows.tolist()
        # Which kinds act in which layer is decided once, in Python: asking a tensor would stall a GPU.
        if self.codes is not None:
            self.active = [sorted(set(np.unique(self.codes[:, i])) - {0}) for i in range(self.layers)]

    # -- capture

    def capture(self, layer: int, query, key, mask, scaling: float) -> None:
        offset, count = key.shape[2] - query.shape[2], query.shape[2]
        inside = [[offset <= row < offset + count for row in rows] for rows in self.row_list]
        picked = [r for r in range(len(inside[0])) if any(rows[r] for rows in inside)]
        if not picked:
            return
        if (which := tuple(picked)) not in self.placed:  # once for all layers: a copy can stall a GPU
            self.placed[which] = self.rows[:, picked].to(query.device)
        rows = self.placed[which]
        local = (rows - offset).clamp(0, count - 1)
        attention = _attention_rows(query, key, mask, local, rows.clamp(min=0), scaling)
        attention *= (rows >= 0)[:, None, :, None]
        for name, reduction in self.reduce.items():
            self.parts[name][layer].append(reduction(attention))
        self.done[layer] += picked

    def captured(self) -> dict[str, torch.Tensor]:
        """name -> float [B, layers, heads, R, ...]; raises if a row or a layer never came by."""
        wanted = list(range(self.rows.shape[1]))
        for layer, done in enumerate(self.done):
            if sorted(done) != wanted:
                raise RuntimeError(
                    f"Capture saw {len(set(done))} of {len(wanted)} rows in layer {layer}. Run one pass over the whole "
                    "sequence (or generate up to the last row) inside the context; one pass only."
                )
        out = {}
        for name, layers in self.parts.items():
            stacked = torch.stack([torch.cat(parts, dim=2) for parts in layers], dim=1)
            order = torch.tensor(np.argsort(self.done[0]), device=stacked.device)
            out[name] = stacked.index_select(3, order)
        return out

    # -- ablate

    def ablate(self, layer: int, out, query, value, mask):
        offset = value.shape[2] - query.shape[2]
        columns = torch.arange(offset, offset + query.shape[2], device=out.device)
        start, codes, means, targets = self._on(out)
        reached = columns[None] >= start[:, None]  # [B, q]
        for code in self.active[layer]:
            chosen = codes[:, layer] == code  # [B, heads]
            where = (reached[:, :, None] & chosen[:, None])[..., None]
            kind = "steer" if code == _STEER else KINDS[code - 1]
            if kind == "zero":
                other = torch.zeros((), dtype=out.dtype, device=out.device)
            elif kind == "uniform":
                other, _ = _mean_value(value, mask, columns, out.shape[2])
            elif kind == "mean":
                other = means[:, None, layer]
            else:
                other, seen = _mean_value(value, mask, columns, out.shape[2], targets)
                where = where & seen[..., None, None]
            out = torch.where(where, other, out)
        return out

    def _on(self, out) -> tuple:
        """What `ablate` needs, where the model runs; moved once a plan, since a copy stalls a GPU."""
        if self.moved is None:
            means = None if self.means is None else self.means.to(out)
            targets = None if self.targets is None else self.targets.to(out.device)
            self.moved = self.start.to(out.device), torch.from_numpy(self.codes).to(out.device), means, targets
        return self.moved

    # -- means

    def accumulate(self, layer: int, out) -> None:
        self.sums[layer] += (out.double() * self.valid[..., None, None]).sum((0, 1))


_ACTIVE: ContextVar[_Plan | None] = ContextVar("vrh_plan", default=None)


def _attention_rows(query, key, mask, local, rows, scaling):
    """Post-softmax rows float32 [B, heads, R, kv] of chosen queries.

    `local` int [B, R] indexes `query` [B, heads, q, d]; `rows` are the same as columns of the sequence. Keys
    [B, kv_heads, kv, d] are shared by groups of query heads and not repeated.
    """
    B, H, _, D = query.shape
    KV, kv, R = key.shape[1], key.shape[2], local.shape[1]
    chosen = query.gather(2, local[:, None, :, None].expand(B, H, R, D))
    logits = chosen.reshape(B, KV, H // KV * R, D).float() @ key.transpose(2, 3).float()
    logits = logits.view(B, H, R, kv) * scaling
    if mask is None:  # plain causal: no padding in this batch
        visible = torch.arange(kv, device=key.device) <= rows[..., None]
    else:
        visible = mask[:, 0].gather(1, local[..., None].expand(B, R, mask.shape[-1]))
    # finfo.min, not -inf: a padding row sees nothing and must not turn into NaN.
    return logits.masked_fill(~visible[:, None], torch.finfo(torch.float32).min).softmax(-1)


def _mean_value(value, mask, columns, heads: int, among=None):
    """Mean of the visible values for every query, [B, q, heads, d]: attention with all logits equal; and which queries
    see any of them, bool [B, q]. `among` bool [B, S]: only these columns count, of the first S."""
    kv = value.shape[2]
    if mask is None:
        visible = (torch.arange(kv, device=value.device) <= columns[:, None])[None].expand(value.shape[0], -1, -1)
    else:
        visible = mask[:, 0].expand(value.shape[0], -1, -1)
    if among is not None:
        visible = visible & torch.nn.functional.pad(among, (0, kv - among.shape[1]))[:, None]
    weights = visible.float() / visible.sum(-1, keepdim=True).clamp(min=1)
    mean = (weights[:, None] @ value.float()).to(value.dtype)  # [B, kv_heads, q, d]
    return mean.repeat_interleave(heads // value.shape[1], 1).transpose(1, 2), visible.any(-1)


def _vrh_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    plan, layer = _ACTIVE.get(), getattr(module, "layer_idx", None)
    if plan is None or layer is None:
        return out, None
    if plan.batch not in (None, query.shape[0]):
        raise ValueError(f"The plan is for {plan.batch} batch rows, but the model was run on {query.shape[0]}.")
    plan.calls[layer] += 1
    if plan.rows is not None:
        plan.capture(layer, query, key, attention_mask, scaling)
    if plan.codes is not None and plan.active[layer]:
        out = plan.ablate(layer, out, query, value, attention_mask)
    if plan.sums is not None:
        plan.accumulate(layer, out)
    return out, None


AttentionInterface.register(KERNEL, _vrh_attention)
# Without a mask function of the same name transformers hands over no mask at all, silently: padded rows
# would attend to padding.
AttentionMaskInterface.register(KERNEL, sdpa_mask)


@contextmanager
def _running(vlm: VLM, plan: _Plan) -> Iterator[_Plan]:
    """Put the plan into effect; everything is undone on leaving, also by an exception."""
    if _ACTIVE.get() is not None:
        raise RuntimeError(
            "Another capture or ablation is already open; give the ablation to `capture` as `conditions`."
        )
    if KERNEL not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise RuntimeError(
            f"No mask function is registered for {KERNEL!r}: padded batches would be wrong. Reimport vrhlib."
        )

    def refuse_static_cache(module, args, kwargs):
        if isinstance(kwargs.get("cache"), StaticCache):
            raise ValueError(
                "A StaticCache pads keys to its full length, so query positions cannot be told from it. "
                "Use the default DynamicCache while capturing or ablating."
            )

    text = vlm.model.model.language_model
    before = vlm.model.config.get_text_config()._attn_implementation
    guard = text.register_forward_pre_hook(refuse_static_cache, with_kwargs=True)
    token = _ACTIVE.set(plan)
    try:
        vlm.model.set_attn_implementation({"text_config": KERNEL})
        yield plan
    finally:
        _ACTIVE.reset(token)
        guard.remove()
        vlm.model.set_attn_implementation({"text_config": before})
    if len(missed := np.flatnonzero(plan.calls[plan.first :] == 0) + plan.first):
        raise RuntimeError(
            f"{vlm.name}: layers {missed.tolist()} never reached the registered attention "
            "function, so nothing was captured or ablated there. Run the model inside the context."
        )


def _codes(vlm: VLM, conditions: Sequence[Intervention | None]) -> np.ndarray:
    codes = np.zeros((len(conditions), *vlm.grid), dtype=np.int8)
    for row, condition in enumerate(conditions):
        if condition is not None:
            code = _STEER if isinstance(condition, Steering) else 1 + KINDS.index(condition.kind)
            codes[row][condition.heads.on(vlm.grid).mask()] = code
    return codes


def segment_columns(batch: Batch) -> torch.Tensor:
    """Columns of the padded prompts that show each sample's segment, bool [B, S]: image tokens that its mask touches if
    it has one, else its box. Raises ValueError for a sample with neither."""
    columns = torch.zeros(len(batch), batch.length, dtype=torch.bool)
    for row, sample in enumerate(batch.samples):
        if sample.mask is None and sample.box is None:
            raise ValueError(f"Sample {sample.id} has no segment to look at: steering needs a mask or a box.")
        grid = batch.grids[row]
        inside = grid.tokens_in(sample.box) if sample.mask is None else grid.tokens_of(sample.pixels)
        columns[row, batch.image_columns[row][inside]] = True
    return columns


def _plan(vlm: VLM, conditions, prompt_length: int | None, targets: torch.Tensor | None = None, **more) -> _Plan:
    """Conditions as codes; a single condition holds for any batch, a sequence for exactly its rows."""
    single = conditions is None or isinstance(conditions, Intervention)
    rows = [conditions] if single else list(conditions)
    if prompt_length is None and any(a is not None and a.phase == "decode" for a in rows):
        raise ValueError("Phase 'decode' starts where the prompt ends: give prompt_length.")
    start = torch.tensor([prompt_length if a is not None and a.phase == "decode" else 0 for a in rows])
    means = None
    if any(a is not None and a.means is not None for a in rows):
        none = torch.zeros(*vlm.grid, vlm.layers[0].self_attn.head_dim)
        given = [none if a is None or a.means is None else a.means for a in rows]
        if wrong := {tuple(m.shape) for m in given} - {tuple(none.shape)}:
            raise ValueError(f"{vlm.name} needs means of shape {tuple(none.shape)}, not {wrong}.")
        means = torch.stack(given)
    batch = None if single else len(rows)
    if not any(isinstance(a, Steering) for a in rows):
        targets = None
    elif targets is None or batch not in (None, len(targets)):
        raise ValueError(
            "Steering needs `targets`: columns to look at (see segment_columns), a row per row of the batch."
        )
    else:
        batch = len(targets)
    return _Plan(batch, vlm.grid[0], codes=_codes(vlm, rows), start=start, means=means, targets=targets, **more)


def acting() -> bool:
    """Whether a capture or an ablation is open in this context."""
    return _ACTIVE.get() is not None


@contextmanager
def ablate(
    vlm: VLM,
    conditions: Intervention | None | Sequence[Intervention | None],
    prompt_length: int | None = None,
    targets: torch.Tensor | None = None,
    first: int = 0,
) -> Iterator[None]:
    """Run the model with heads ablated or steered: one condition for all, or one per row of the batch.

    A sequence has one entry per batch row, None for an untouched row. `prompt_length` (columns of the padded prompt) is
    needed for phase "decode", `targets` (bool [rows, S], see `segment_columns`) for steering. `first`: the first layer
    that will be run (`decoding` has what enters it from another pass); the others need not come by. Raises ValueError
    if a head does not exist in this model.

        with ablate(vlm, [None, Ablation(heads)]):
            vlm.model.generate(**vlm.inputs(batch, copies=2))
    """
    with _running(vlm, _plan(vlm, conditions, prompt_length, targets, first=first)):
        yield


@contextmanager
def capture(
    vlm: VLM,
    rows: torch.Tensor,
    reduce: dict[str, Reduction],
    conditions: Intervention | None | Sequence[Intervention | None] = None,
    prompt_length: int | None = None,
    targets: torch.Tensor | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Record reduced attention rows of one pass, if wanted under ablation or steering (arguments as of `ablate`).

    `rows` int [B, R] are query columns of the padded sequence (-1: unused, reduces to 0-attention): **row
    S-1+t predicts token t** of a reply to a prompt of S columns. Each reduction turns rows [B, heads, R, kv]
    into [B, heads, R, ...]; after the block the dict holds name -> float32 [B, layers, heads, R, ...].
    """
    got: dict[str, torch.Tensor] = {}
    plan = _plan(vlm, conditions, prompt_length, targets, rows=rows, reduce=reduce)
    if plan.batch not in (None, rows.shape[0]):
        raise ValueError(f"{plan.batch} conditions for {rows.shape[0]} batch rows.")
    plan.batch = rows.shape[0]
    with _running(vlm, plan):
        yield got
    got.update(plan.captured())


# ---------------------------------------------------------------- passes


def fitting(vlm: VLM, work: Callable[[], None]) -> None:
    """Call `work`; where the device's memory runs out, halve `vlm.rows` (sequences that run at once) and call it again.

    `work` has to look at `vlm.rows`, to say in `vlm.running` how many sequences it runs, and to keep what it has
    finished. Raises MemoryError if one sequence is too many.
    """
    while True:
        vlm.running = 0
        try:
            return work()
        except RuntimeError as error:
            if not _ran_out(error):
                raise
            said = " ".join(str(error).split())[:160]
        # After the block, so that the failed pass is no longer held by the exception.
        tried = min(vlm.rows, vlm.running or vlm.rows)
        if tried == 1:
            raise MemoryError(
                f"{vlm.name}: not even one sequence fits into the memory of {vlm.device} ({said}). Free it (nvidia-smi "
                "shows who holds it), use smaller pictures (tiles=6 for InternVL), or a larger device."
            )
        vlm.rows = tried // 2
        gc.collect()
        if vlm.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{vlm.name}: out of memory; going on with {vlm.rows} sequences at once", flush=True)


def _ran_out(error: RuntimeError) -> bool:
    """PyTorch's own error, or one of the libraries below it, which come without a type."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


class Sampling(LogitsProcessor):
    """Draws the next token at a temperature: adds Gumbel noise to the scaled logits, whose argmax is then a draw from
    their softmax (the Gumbel-max trick).

    The noise of a row's step comes from the row's seed and the step alone, so a draw does not depend on what else is in
    the batch, nor on when it is made. `seeds`: one per row; `start`: columns of the padded prompt.
    """

    def __init__(self, temperature: float, seeds: Sequence[int], start: int):
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: sampling needs one above 0; greedy replies need no sampling.")
        self.temperature, self.seeds, self.start = temperature, list(seeds), start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        generator, step = torch.Generator(scores.device), input_ids.shape[1] - self.start
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, seed in zip(noise, self.seeds, strict=True):
            row.exponential_(generator=generator.manual_seed(int(store.digest([seed, step])[:15], 16)))
        return scores.float() / self.temperature - noise.log()


@torch.inference_mode()
def generate(
    vlm: VLM,
    batch: Batch,
    conditions: Sequence[Intervention | None] | Sequence[Sequence[Intervention | None]] = (None,),
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seeds: Sequence[Sequence[int]] | None = None,
) -> np.ndarray:
    """Replies to every sample under every condition, int [B, conditions, tokens], padded with -1.

    All conditions of a sample are rows of one batch on one set of vision features; `conditions` are the same for all
    samples, or a sequence of them for each. Decoded token by token, each on its own prefill (`decoding.generate` gives
    the same greedy replies sooner). Greedy, unless there is a `temperature`: then each reply is drawn with its own seed
    (`seeds` [B, conditions], see `Sampling`).
    """
    own = conditions if isinstance(conditions[0], Sequence) else [conditions] * len(batch)
    B, C, rows = len(batch), len(own[0]), [condition for several in own for condition in several]
    tokenizer, length = vlm.tokenizer, batch.length
    settings = dict(
        do_sample=False, num_beams=1, max_new_tokens=max_new_tokens or vlm.max_new_tokens, use_cache=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=sorted(vlm.stop_ids),
        temperature=None, top_p=None, top_k=None, repetition_penalty=None,
    )  # fmt: skip
    if temperature is not None:
        settings["logits_processor"] = [Sampling(temperature, [seed for several in seeds for seed in several], length)]
    steered = any(isinstance(condition, Steering) for condition in rows)
    targets = segment_columns(batch).repeat_interleave(C, 0) if steered else None
    if any(rows):
        with ablate(vlm, rows, length, targets):
            ids = vlm.model.generate(**vlm.inputs(batch, C), **settings)[:, length:]
    else:
        ids = vlm.model.generate(**vlm.inputs(batch, C), **settings)[:, length:]
    ids = ids.cpu().numpy()
    stop = np.isin(ids, list(vlm.stop_ids))
    ended = np.cumsum(stop, axis=1) - stop > 0  # columns after the first stop token are padding
    return np.where(ended, -1, ids).reshape(B, C, -1)


def with_replies(vlm: VLM, batch: Batch, replies: Sequence[Sequence[int]]) -> dict:
    """Model inputs for one teacher-forced pass: left-padded prompts, then right-padded replies (token ids)."""
    inputs = vlm.inputs(batch)
    width = max(1, max(map(len, replies)))
    ids = torch.full((len(batch), width), vlm.tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, reply in enumerate(replies):
        ids[row, : len(reply)] = torch.as_tensor(list(reply), dtype=ids.dtype)
        mask[row, : len(reply)] = 1
    more = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": torch.zeros_like(ids)}
    return {k: torch.cat([v, more[k].to(v)], 1) if k in more else v for k, v in inputs.items()}


@dataclass(frozen=True)
class Branch:
    """Token ids that go on after the first `start` columns of a padded prompt: a reply (start = its length), or another
    ending of the prompt."""

    start: int
    ids: Sequence[int]


def with_branches(vlm: VLM, batch: Batch, branches: Sequence[Sequence[Branch]]) -> tuple[dict, list[list[np.ndarray]]]:
    """Model inputs for one pass over several continuations of each prompt, and where they stand.

    Every branch of a sample sees the prompt up to its start and itself, never another branch, at the positions it would
    have alone: one pass gives what a pass for each would give, and reads picture and prompt once. Returns the inputs
    (attention mask bool [B, 1, T, T], explicit position ids) and, per sample and branch, int [len(ids)] columns.
    """
    inputs = vlm.inputs(batch)
    real, length = inputs["attention_mask"].bool(), batch.length
    total = length + max(1, max(sum(len(b.ids) for b in own) for own in branches))
    positions = prompt_positions(vlm, inputs)
    grown = torch.zeros(*positions.shape[:-1], total, dtype=positions.dtype, device=positions.device)
    grown[..., :length] = positions
    ids = torch.full((len(batch), total), vlm.tokenizer.pad_token_id, device=vlm.device)
    ids[:, :length] = inputs["input_ids"]
    seen = torch.eye(total, dtype=torch.bool, device=vlm.device).repeat(len(batch), 1, 1)  # padding sees itself
    causal = torch.ones(length, length, dtype=torch.bool, device=vlm.device).tril()
    seen[:, :length, :length] |= causal & real[:, None] & real[..., None]
    columns: list[list[np.ndarray]] = []
    for row, own in enumerate(branches):
        columns.append([])
        at = length
        for branch in own:
            here = slice(at, at + len(branch.ids))
            ids[row, here] = torch.as_tensor(list(branch.ids), dtype=ids.dtype, device=ids.device)
            after = torch.arange(1, len(branch.ids) + 1, device=grown.device)
            grown[..., row, here] = grown[..., row, : branch.start].max() + after  # as text goes on after a picture
            seen[row, here, : branch.start] = real[row, : branch.start]
            seen[row, here, here] = torch.ones(len(after), len(after), dtype=torch.bool, device=vlm.device).tril()
            columns[-1].append(np.arange(here.start, here.stop))
            at = here.stop
    more = {"input_ids": ids, "attention_mask": seen[:, None], "position_ids": grown}
    if "mm_token_type_ids" in inputs:
        kinds = torch.zeros_like(ids)
        kinds[:, :length] = inputs["mm_token_type_ids"]
        more["mm_token_type_ids"] = kinds
    return inputs | more, columns


def prompt_positions(vlm: VLM, inputs: dict) -> torch.Tensor:
    """Position ids of padded prompts as the model would make them: int [B, S], or [3, B, S] with axes of a picture."""
    mask = inputs["attention_mask"]
    if "image_grid_thw" in inputs:
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        return vlm.model.model.get_rope_index(**{name: inputs[name] for name in names})[0]
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


@torch.inference_mode()
def head_means(vlm: VLM, batches: Sequence[Batch]) -> torch.Tensor:
    """Average output of every head over all prompt positions, padding excluded; float32 [layers, heads, head_dim].

    The reference of mean ablation.
    """
    if not batches:
        raise ValueError("No batches, no means: give head_means at least one.")
    layers, heads = vlm.grid
    sums = torch.zeros(layers, heads, vlm.layers[0].self_attn.head_dim, dtype=torch.float64, device=vlm.device)
    positions = 0
    for batch in batches:
        inputs = vlm.inputs(batch)
        plan = _Plan(len(batch), layers, sums=sums, valid=inputs["attention_mask"].bool())
        with _running(vlm, plan):
            vlm.model(**inputs, logits_to_keep=1)
        positions += int(plan.valid.sum())
    return (sums / positions).float().cpu()
