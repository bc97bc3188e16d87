"""Greedy replies under interventions, most of them without decoding them token by token.

Most conditions (random heads, few heads) leave a reply as it was. So the reply of the untouched model is a *draft*
(speculative decoding with the untouched model as draft model, Leviathan et al. 2023, in its greedy form):

    stem      one pass of the untouched model over prompt and draft, which keeps what enters each layer and the cache
    verify    a condition changes nothing below the lowest layer it acts in, and while only the answer is touched
              (phase "decode") nothing before the answer. From there on, one pass over all that is left tells which
              token it would have written after every token of the draft
    decode    equal all along: the draft is the reply. Else the part that agrees is kept, in the cache too, and decoding
              goes on from the first token that differs

Exact for greedy decoding: every token is the largest logit of the same model under the same intervention given the same
tokens before it. What can differ is rounding, as between any two batch sizes. The rule for near ties: in float32, a
reply in which the first choice leads the second by less than `TIE` anywhere is decoded plainly (`attention.generate`);
in half precision, where two choices often are equal to the last bit, the verifying pass decides. With VRHLIB_STRICT=1
everything is decoded plainly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from vrhlib import attention, store
from vrhlib.attention import Intervention, Steering, ablate, prompt_positions, segment_columns, with_replies
from vrhlib.samples import Samples
from vrhlib.vlm import VLM, Batch

TIE = 1e-3  # of logits, in float32: rounding moves them by about 1e-5
FEW = 2048  # tokens; a pass of fewer takes nearly as long
PLAIN = (
    "_from_model_config", "assistant_confidence_threshold", "assistant_lookbehind", "bos_token_id", "do_sample",
    "eos_token_id", "max_length", "max_new_tokens", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "pad_token_id", "repetition_penalty", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p",
    "transformers_version", "trust_remote_code", "use_cache",
)  # fmt: skip
"""Generation settings that are the same here and in `attention.generate`; any other is left to the latter."""


def strict() -> bool:
    """Whether all replies are to be decoded plainly (VRHLIB_STRICT=1)."""
    return os.environ.get("VRHLIB_STRICT", "") not in ("", "0")


@dataclass(frozen=True, eq=False)
class Replies:
    """`ids`: int [B, conditions, tokens], -1 behind a reply's end. `drafted`: int [B, conditions], how many tokens of
    each reply are the draft's, found without decoding (0 for the untouched model, whose reply the draft is). `read`,
    `written`: tokens that went through the whole model at once (one that went through half of its layers counts half),
    and one after the other."""

    ids: np.ndarray
    drafted: np.ndarray
    read: float = 0.0
    written: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each reply, int [B, conditions]."""
        return (self.ids >= 0).sum(-1)


@torch.inference_mode()
def generate(
    vlm: VLM,
    batch: Batch,
    conditions: Sequence[Intervention | None],
    max_new_tokens: int | None = None,
    drafts: Sequence[Sequence[int]] | None = None,
) -> Replies:
    """Greedy replies to every sample under every condition, at most `vlm.rows` sequences at a time.

    The same as `attention.generate`, and tested against it. `drafts`: replies of the untouched model where they are
    known, token ids with the one that stops them; any others would be as exact, and slower."""
    limit, samples = max_new_tokens or vlm.max_new_tokens, range(len(batch))
    if strict() or not _plain_greedy(vlm):
        return _plainly(vlm, batch, conditions, limit)
    acting = {c: a for c, a in enumerate(conditions) if a is not None and len(a.heads)}
    read, written = 0.0, 0
    if drafts is None or len(acting) < len(conditions):
        vlm.running = max(vlm.running, len(batch))
        drafts = _trimmed(attention.generate(vlm, batch, max_new_tokens=limit)[:, 0])
        read, written = float(len(batch) * batch.length), sum(map(len, drafts))
    drafts = [_usable(vlm, draft, limit) for draft in drafts]
    found = {(b, c): (drafts[b], 0) for b in samples for c in range(len(conditions)) if c not in acting}
    if acting:
        told, more = _verified(vlm, batch, acting, drafts, limit)
        found, read = found | told, read + more
        written += sum(max(0, len(reply) - kept - 1) for reply, kept in told.values())
    ids = np.full((len(batch), len(conditions), max(len(ids) for ids, _ in found.values())), -1)
    drafted = np.zeros(ids.shape[:2], int)
    for (b, c), (reply, kept) in found.items():
        ids[b, c, : len(reply)], drafted[b, c] = reply, kept
    return Replies(ids, drafted, read, written)


def _usable(vlm: VLM, draft: Sequence[int], limit: int) -> list[int]:
    """As much of a draft as a reply could be: up to its first stop token, and to what cannot be read again."""
    config = vlm.model.config
    size, pictures = vlm.model.lm_head.weight.shape[0], (config.image_token_id, getattr(config, "video_token_id", None))
    found: list[int] = []
    for token in draft[:limit]:
        if not 0 <= token < size or token in pictures:
            break
        found.append(token)
        if token in vlm.stop_ids:
            break
    return found or [min(vlm.stop_ids)]


def _plainly(vlm: VLM, batch: Batch, conditions: Sequence, limit: int) -> Replies:
    width, parts = max(1, vlm.rows // len(batch)), []
    for i in range(0, len(conditions), width):
        vlm.running = max(vlm.running, len(batch) * len(conditions[i : i + width]))
        parts.append(attention.generate(vlm, batch, conditions[i : i + width], limit))
    most = max(part.shape[-1] for part in parts)
    padded = [np.pad(p, ((0, 0), (0, 0), (0, most - p.shape[-1])), constant_values=-1) for p in parts]
    ids = np.concatenate(padded, 1)
    return Replies(ids, np.zeros(ids.shape[:2], int), float(batch.length * ids[..., 0].size), int((ids >= 0).sum()))


def _trimmed(ids: np.ndarray) -> list[list[int]]:
    return [[int(i) for i in row if i >= 0] for row in ids]


def _plain_greedy(vlm: VLM) -> bool:
    """Whether this model's greedy decoding is what this module does: layers of full attention, and logits that
    generation settings leave alone, but for tokens that are suppressed."""
    kinds = set(getattr(vlm.model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    changed = set(vlm.model.generation_config.to_diff_dict()) - set(PLAIN)
    return kinds == {"full_attention"} and not changed


# ---------------------------------------------------------------- stem


@dataclass(eq=False)
class _Stem:
    """One pass of the untouched model over prompts of S columns and drafts; W columns in all, hidden size N."""

    length: int  # S
    mask: torch.Tensor  # int [B, W]
    positions: torch.Tensor  # int [B, W], or [3, B, W] with axes of a picture
    entering: dict[int, torch.Tensor]  # layer to what enters it, [B, W, N]
    cache: DynamicCache
    first: torch.Tensor  # int [B, 1], the first token of each reply, and
    lead: torch.Tensor  # float [B, 1], by how much its logit leads
    deepstack: list[list[torch.Tensor]]  # what Qwen3-VL adds behind its first layers: [layer][sample], [V, N]
    pictures: torch.Tensor | None  # and where, bool [B, W]

    @property
    def last(self) -> torch.Tensor:
        """Position at the end of each prompt, int [B]."""
        return self.positions[..., : self.length].movedim(-2, 0).flatten(1).amax(1)


def _stem(vlm: VLM, batch: Batch, drafts: list[list[int]], layers: set[int]) -> _Stem:
    inputs, S = with_replies(vlm, batch, [draft[:-1] for draft in drafts]), batch.length
    if max(map(len, drafts)) == 1:  # nothing stands behind the prompts: take away the column that `with_replies` keeps
        inputs |= {name: inputs[name][:, :S] for name in ("input_ids", "attention_mask", "mm_token_type_ids")
                   if name in inputs}  # fmt: skip
    W, positions = inputs["input_ids"].shape[1], prompt_positions(vlm, batch.tensors)
    after = torch.arange(1, W - S + 1, device=positions.device)
    last = positions.amax(-1, keepdim=True)
    last = last.amax(0).expand_as(last) if last.ndim == 3 else last  # as text goes on after a picture
    inputs["position_ids"] = torch.cat([positions, last + after], -1)
    text, entering, given = vlm.model.model.language_model, {}, {}

    def keep(layer: int):
        return vlm.layers[layer].register_forward_pre_hook(lambda module, args: entering.__setitem__(layer, args[0]))

    hooks = [keep(layer) for layer in layers]
    hooks.append(text.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True))
    try:
        with _read_from(vlm, S - 1):
            out = vlm.model.model(**inputs, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    pictures, deepstack = given.get("visual_pos_masks"), given.get("deepstack_visual_embeds") or []
    if pictures is not None:
        counts = pictures.sum(1).tolist()
        deepstack = [list(added.split(counts)) for added in deepstack]
    first, lead = _leading(vlm, out.last_hidden_state[:, S - 1 : S])
    mask, positions = inputs["attention_mask"], inputs["position_ids"]
    return _Stem(S, mask, positions, entering, out.cache, first, lead, deepstack, pictures)


# ---------------------------------------------------------------- verify


@dataclass(eq=False)
class _Open:
    """Sequences that left their draft, ready to be decoded on: R rows of W columns."""

    at: list[tuple[int, int]]  # (sample, condition)
    conditions: list[Intervention]
    written: list[list[int]]  # the part that agrees, and the first token that does not
    kept: list[int]  # tokens of that part
    mask: torch.Tensor  # int [R, W]: the rest of the draft is hidden
    position: torch.Tensor  # int [R], of the last token written
    states: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of every layer, [R, KV, W, D]


def _verified(
    vlm: VLM, batch: Batch, conditions: dict[int, Intervention], drafts: list[list[int]], limit: int
) -> tuple[dict, float]:
    """(sample, condition) to its reply and how much of it was drafted; and how many tokens were read for it."""
    starts = {c: (condition.phase, int(min(h.layer for h in condition.heads))) for c, condition in conditions.items()}
    order = sorted(conditions, key=lambda c: starts[c])
    B, S, W = len(batch), batch.length, batch.length + max(map(len, drafts)) - 1
    parts = list(_parts(order, starts, B * (W - S), B * W, max(1, vlm.rows // B)))
    vlm.running = max(vlm.running, B)
    stem = _stem(vlm, batch, drafts, {layer for *_, layer in parts})
    found, waiting, doubtful, read = {}, [], set(), float(B * W)
    for part, phase, layer in parts:
        columns = W - S if phase == "decode" else W
        read += B * len(part) * columns * (1 - layer / vlm.grid[0])
        if sum(len(w.at) for w in waiting) + B * len(part) > vlm.rows:  # no more than fit beside this pass
            done, doubts = _decoded(vlm, batch, waiting, limit)
            found, doubtful = found | done, doubtful | doubts
        vlm.running = max(vlm.running, B * len(part))
        told = _told(vlm, batch, stem, [conditions[c] for c in part], phase, layer)
        left, done, doubts = _compared(vlm, stem, part, conditions, drafts, limit, layer, *told)
        found |= done
        doubtful |= doubts
        waiting += [left] if left else []
        del told, left  # whose memory decoding needs
    del stem
    done, doubts = _decoded(vlm, batch, waiting, limit)
    found, doubtful = found | done, doubtful | doubts
    for c in sorted({c for _, c in doubtful}):
        again = _trimmed(attention.generate(vlm, batch, [conditions[c]], limit)[:, 0])
        found |= {(b, c): (again[b], 0) for b in range(B) if (b, c) in doubtful}
        read += B * batch.length
    return found, read


def _parts(
    order: Sequence[int], starts: Mapping[int, tuple[str, int]], behind: int, whole: int, width: int
) -> Iterator[tuple[list[int], str, int]]:
    """Conditions that are verified in one pass, at most `width`, and where it starts: those of one lowest layer, or of
    several where each alone would be a pass of less than FEW tokens. `behind`, `whole`: tokens of a condition in phase
    decode, and else."""
    part: list[int] = []
    for c in order:
        phase, layer = starts[c]
        if part:
            before, lowest = starts[part[0]]
            small = len(part) * (behind if phase == "decode" else whole) < FEW
            if phase != before or len(part) == width or (layer != lowest and not small):
                yield part, before, lowest
                part = []
        part.append(c)
    if part:
        yield part, *starts[part[0]]


def _told(
    vlm: VLM, batch: Batch, stem: _Stem, conditions: list, phase: str, layer: int
) -> tuple[torch.Tensor, torch.Tensor, DynamicCache]:
    """Which token each condition would write at every place of the draft, int [R, T], and by how much its logit leads,
    float [R, T]; and the cache of its pass, filled from `layer` on. Rows: every sample under all conditions in turn."""
    n, S, text = len(conditions), stem.length, vlm.model.model.language_model
    behind = phase == "decode"  # only what stands behind the prompts is touched; their last row tells the first token
    begin = S if behind else 0
    first, lead = (v.repeat_interleave(n, 0) for v in (stem.first, stem.lead))
    if behind and stem.mask.shape[1] == S:
        return first, lead, _repeated(stem, S, n, 0)
    cache, more = _repeated(stem, S, n, layer) if behind else DynamicCache(), {}
    if stem.pictures is not None and stem.deepstack[layer:] and not behind:
        more["visual_pos_masks"] = stem.pictures.repeat_interleave(n, 0)
        several = [[own for own in added for _ in range(n)] for added in stem.deepstack[layer:]]
        more["deepstack_visual_embeds"] = [torch.cat(added) for added in several]
    targets = None
    if any(isinstance(condition, Steering) for condition in conditions):
        targets = segment_columns(batch).repeat_interleave(n, 0)
    with (
        _from(vlm, layer),
        _read_from(vlm, 0 if behind else S - 1),
        ablate(vlm, conditions * len(batch), S, targets, layer),
    ):
        out = text(
            inputs_embeds=stem.entering[layer][:, begin:].repeat_interleave(n, 0),
            attention_mask=stem.mask.repeat_interleave(n, 0), cache=cache, use_cache=True,
            position_ids=stem.positions[..., begin:].repeat_interleave(n, -2), **more,
        ).last_hidden_state  # fmt: skip
    token, gaps = _leading(vlm, out if behind else out[:, S - 1 :])
    return (torch.cat([first, token], 1), torch.cat([lead, gaps], 1), cache) if behind else (token, gaps, cache)


def _leading(vlm: VLM, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token with the largest logit behind each hidden state, int [R, T], and by how much it leads, float [R, T]."""
    tokens, leads = [], []
    for part in hidden.split(max(1, 512 // len(hidden)), 1):  # a vocabulary is large: 512 places take 0.3 GB
        best, token = _logits(vlm, part).topk(2)
        tokens.append(token[..., 0])
        leads.append(best[..., 0] - best[..., 1])
    return torch.cat(tokens, 1), torch.cat(leads, 1)


def _logits(vlm: VLM, hidden: torch.Tensor) -> torch.Tensor:
    logits = vlm.model.lm_head(hidden).float()
    if suppressed := vlm.model.generation_config.suppress_tokens:
        logits[..., suppressed] = -torch.inf
    return logits


@contextmanager
def _from(vlm: VLM, layer: int) -> Iterator[None]:
    """The text model without its layers below one; what it is given enters there."""
    text, every = vlm.model.model.language_model, vlm.layers
    try:
        text.layers = every[layer:]
        yield
    finally:
        text.layers = every


@contextmanager
def _read_from(vlm: VLM, column: int) -> Iterator[None]:
    """In the last layer only keys and values are needed of the columns before one, whose output nobody reads: what
    makes queries, and what comes after the attention, leaves them out (zeros in their place)."""

    def only(module, args):
        return (args[0][:, column:],)

    def whole(module, args, out):
        return torch.nn.functional.pad(out, (0, 0, column, 0))

    last = vlm.layers[-1]
    parts = (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp) if column else ()
    hooks = [part.register_forward_pre_hook(only) for part in parts]
    hooks += [part.register_forward_hook(whole) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _repeated(stem: _Stem, columns: int, copies: int, layer: int) -> DynamicCache:
    """The stem's cache of the first columns, each sample in several rows. Below `layer`, where nobody will look, only
    as much of it as tells its length."""
    states = [(own.keys[:, :, :columns], own.values[:, :, :columns]) for own in stem.cache.layers]
    return _cache(
        (v[:1, :1, :, :1] if i < layer else v.repeat_interleave(copies, 0) for v in pair)
        for i, pair in enumerate(states)
    )


def _cache(states: Iterable[Iterable[torch.Tensor]]) -> DynamicCache:
    """Keys and values of every layer as a cache; nothing is copied."""
    cache = DynamicCache()
    for keys, values in states:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _compared(
    vlm: VLM, stem: _Stem, part: list[int], conditions: dict, drafts: list[list[int]], limit: int, layer: int,
    token: torch.Tensor, lead: torch.Tensor, cache: DynamicCache,
) -> tuple[_Open | None, dict, set]:  # fmt: skip
    """What has to be decoded on, what is finished, and what is too near a tie to be told here; the last three arguments
    as `_told` returns them."""
    tie = _tie(vlm)
    done, doubtful, rows, at, written, kept = {}, set(), [], [], [], []
    for row, (said, gaps) in enumerate(zip(token.tolist(), lead.tolist())):
        (b, c), draft = (row // len(part), part[row % len(part)]), drafts[row // len(part)]
        whole = draft[-1] in vlm.stop_ids or len(draft) >= limit  # else nobody knows yet what follows its last token
        known = len(draft) if whole else len(draft) - 1
        agreed = next((t for t in range(known) if draft[t] != said[t]), known)
        ids = draft[:agreed] + said[agreed : agreed + (agreed < len(draft))]
        if min(gaps[: len(ids)]) < tie:
            doubtful.add((b, c))
        elif ids[-1] in vlm.stop_ids or len(ids) >= limit:
            done[b, c] = ids, agreed
        else:
            rows.append(row)
            at.append((b, c))
            written.append(ids)
            kept.append(agreed)
    if not rows:
        return None, done, doubtful
    row, agreed = torch.tensor([rows, kept], device=token.device)
    sample = row // len(part)
    columns = torch.arange(stem.mask.shape[1], device=token.device)
    mask = stem.mask[sample] * (columns < stem.length + agreed[:, None])  # hides what the draft went on with
    position = stem.last[sample] + agreed + 1
    pairs = [(stem.cache.layers[i], sample) if i < layer else (own, row) for i, own in enumerate(cache.layers)]
    states = [(own.keys[index], own.values[index]) for own, index in pairs]
    return _Open(at, [conditions[c] for _, c in at], written, kept, mask, position, states), done, doubtful


def _tie(vlm: VLM) -> float:
    """By how much a token has to lead; see the module's rule."""
    return TIE if vlm.model.dtype == torch.float32 else 0.0


# ---------------------------------------------------------------- decode


def _decoded(vlm: VLM, batch: Batch, waiting: list[_Open], limit: int) -> tuple[dict, set]:
    """Replies of all sequences that wait, by (sample, condition), and how much of each was drafted; and those that came
    too near a tie. Nothing waits any more."""
    if not waiting:
        return {}, set()
    at, conditions, written, kept = (
        [value for w in waiting for value in getattr(w, name)] for name in ("at", "conditions", "written", "kept")
    )
    mask, position = torch.cat([w.mask for w in waiting]), torch.cat([w.position for w in waiting])
    cache = _cache(_joined([w.states for w in waiting]))
    waiting.clear()
    vlm.running = max(vlm.running, len(at))
    text, targets = vlm.model.model.language_model, None
    if any(isinstance(condition, Steering) for condition in conditions):
        targets = segment_columns(batch)[[b for b, _ in at]]
    token = torch.tensor([ids[-1:] for ids in written], device=vlm.device)
    rows = list(range(len(at)))  # places in `at`
    alive, doubtful, tie = set(rows), set(), _tie(vlm)
    while alive:
        steered = None if targets is None else targets[rows]
        with ablate(vlm, [conditions[i] for i in rows], batch.length, steered):
            while 2 * len(alive) > len(rows):  # sequences that ended run along until they are half of all
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                out = text(
                    inputs_embeds=text.embed_tokens(token), attention_mask=mask, position_ids=position[:, None],
                    cache=cache, use_cache=True,
                ).last_hidden_state  # fmt: skip
                (token, lead), position = _leading(vlm, out), position + 1
                for i, (new,), (gap,) in zip(rows, token.tolist(), lead.tolist()):
                    if i in alive:
                        written[i].append(new)
                        doubtful |= {at[i]} if gap < tie else set()
                        if gap < tie or new in vlm.stop_ids or len(written[i]) >= limit:
                            alive.remove(i)
        still = [r for r, i in enumerate(rows) if i in alive]
        rows, mask, position, token = [rows[r] for r in still], mask[still], position[still], token[still]
        if still:
            cache.batch_select_indices(torch.tensor(still, device=vlm.device))
    return {w: (ids, part) for w, ids, part in zip(at, written, kept) if w not in doubtful}, doubtful


def _joined(several: list[list]) -> Iterator[list[torch.Tensor]]:
    """Keys and values of every layer, rows of several parts below each other; a part's are given up layer by layer."""
    for i in range(len(several[0])):
        yield [torch.cat(parts) for parts in zip(*(states[i] for states in several))]
        for states in several:
            states[i] = None


# ---------------------------------------------------------------- a batch, stored


def reply(vlm: VLM, chunk: Samples, acting: Mapping, stored: Mapping, limit: int, meter: store.Meter) -> None:
    """Generate and store what is missing of a chunk, `vlm.rows` sequences at a time. `acting`, `stored`: what acts in
    each run, and its results, by the run's key."""
    plain = next((stored[d].records for d, condition in acting.items() if condition is None), {})
    for i in range(0, len(chunk), vlm.rows):
        piece = chunk[i : i + vlm.rows]
        lacking = missing(piece, stored)
        if not lacking:
            continue
        batch = vlm.prepare(piece)
        known = all(s.id in plain for s in piece)
        got = generate(
            vlm, batch, [acting[d] for d in lacking], limit, [plain[s.id]["ids"] for s in piece] if known else None
        )
        meter.add(got.read, got.written)
        about = {"batch": len(piece), "rows": vlm.running}
        for b, (sample, resized) in enumerate(zip(piece, batch.resized)):
            for c, d in enumerate(lacking):
                if sample.id not in stored[d]:
                    ids = [token for token in got.ids[b, c].tolist() if token >= 0]
                    text, finished = vlm.decode(ids)
                    record = {"text": text, "finished": finished, "resized": list(resized), **about}
                    record |= {"tokens": len(ids), "drafted": int(got.drafted[b, c])}
                    # A text is read back as other tokens than were written: drafts are kept as they are.
                    stored[d].add(sample.id, record | ({"ids": ids} if acting[d] is None else {}))


def missing(chunk: Samples, stored: Mapping) -> list[str]:
    """Which of the stored runs, by their keys, lack a sample of the chunk."""
    return [d for d, results in stored.items() if any(s.id not in results for s in chunk)]


def check(path: Path, records: Mapping[str, Mapping], drafts: bool) -> None:
    """Raises CorruptRun for a stored line that holds no reply; `drafts`: those of the untouched model keep tokens."""
    types = {"text": str, "finished": bool, "resized": list, "tokens": int, "drafted": int}
    types |= {"ids": list} if drafts else {}
    for name, record in records.items():
        wrong = [key for key, kind in types.items() if type(record.get(key)) is not kind]
        numbers = [n for key in ("resized", "ids") if isinstance(record.get(key), list) for n in record[key]]
        if wrong or any(type(n) is not int for n in numbers) or len(record["resized"]) != 2:
            raise store.CorruptRun(
                f"{path}: the line of sample {name!r} holds no reply ({', '.join(wrong) or 'numbers'}). Delete that "
                "line to compute it again, or the whole file."
            )
