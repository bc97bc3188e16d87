"""Head scores: how strongly a head looks from the answer to the thing the text names.

A score has three choices (Eq. 1 of the paper): which query tokens look, how attention over the referent's
image tokens is pooled, and how samples are pooled. `VRH` is the paper's choice; the others are the methods
it compares with, and differ only here. Each choice is one entry of `QUERIES`, `KEYS` or `SAMPLES`; all
combinations come from one captured pass over each sample (`score_samples`), and `detect` reads one off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch

from vrhlib import store
from vrhlib.attention import KERNEL, capture, fitting, generate, with_replies
from vrhlib.boxes import Part, Reply, TokenGrid
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.samples import Sample, Samples
from vrhlib.vlm import VLM, Batch

# ---------------------------------------------------------------- the three axes


@dataclass(frozen=True)
class Scoring:
    """One point of the design space, by name."""

    queries: str
    keys: str
    samples: str

    def __post_init__(self):
        for axis, known in (("queries", QUERIES), ("keys", KEYS), ("samples", SAMPLES)):
            name = getattr(self, axis)
            if name not in known:
                raise store.unknown(axis, name, known)

    def __str__(self) -> str:
        return f"{self.queries}/{self.keys}/{self.samples}"


@dataclass(frozen=True)
class Tokens:
    """Where things stand in one teacher-forced sequence: prompt of `length` columns, then `replied` tokens."""

    length: int
    replied: int
    expression: np.ndarray
    rng: np.random.Generator


# Q: columns of the query tokens. Row length-1+t *predicts* reply token t; its input is token t-1.
QUERIES: dict[str, Callable[[Tokens], np.ndarray]] = {
    # All tokens of the model's own greedy reply, brackets included, without the stop token.
    "output": lambda t: t.length - 1 + np.arange(t.replied),
    # The referring expression's own tokens in the prompt; neither instruction nor chat suffix.
    "expression": lambda t: t.expression,
    # One output token, drawn at random per sample.
    "one output": lambda t: t.length - 1 + t.rng.integers(0, t.replied, 1),
}

# Phi: attention rows [B, H, R, kv] and the referent's keys [B, 1, 1, kv] (1 inside, 0 elsewhere) to [B, H, R].
KEYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # Total attention mass on the referent.
    "sum": lambda rows, inside: (rows * inside).sum(-1),
    # 1 where the most attended of *all* visible keys (text and first token included) is in the referent.
    "argmax": lambda rows, inside: inside.expand_as(rows).gather(-1, rows.argmax(-1, keepdim=True)).squeeze(-1),
}


def _selection_frequency(values: np.ndarray) -> np.ndarray:
    """How often a head is among a sample's top m. The paper leaves m open: 20, or 10 % of a smaller grid."""
    flat = values.reshape(len(values), -1)
    m = max(1, min(20, flat.shape[1] // 10))
    order = np.argsort(-flat, axis=1, kind="stable")[:, :m]  # stable: ties by layer, then head
    return np.bincount(order.ravel(), minlength=flat.shape[1]).reshape(values.shape[1:]) / len(values)


# Omega: per-sample values [samples, layers, heads] to [layers, heads].
SAMPLES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    # Mean over all samples, failures included: dropping failed replies would select for heads that work.
    "mean": lambda values: values.mean(0),
    "freq": _selection_frequency,
}

VRH = Scoring("output", "sum", "mean")
"""The paper's choice: output tokens, attention mass on the referent, mean over samples."""

# ---------------------------------------------------------------- one captured pass


@dataclass(frozen=True, eq=False)
class SampleScores:
    """Theta(s) of Eq. 1 for every sample, head and (queries, keys) pair: float32 [samples, layers, heads] each.

    `empty`: ids of samples that the model replied nothing to; they have no output token and no Theta."""

    values: dict[tuple[str, str], np.ndarray]
    model: str
    benchmark: str
    runs: tuple[str, ...]
    empty: tuple[str, ...] = ()

    def __str__(self) -> str:
        without = f"; {len(self.empty)} without a reply, first {self.empty[0]}" if self.empty else ""
        return f"{self.n} samples of {self.benchmark} scored{without}"

    @property
    def n(self) -> int:
        return len(next(iter(self.values.values())))

    def score(self, scoring: Scoring, of: Sequence[int] | None = None) -> HeadScores:
        """Pool samples (all, or the chosen indices) into one score per head."""
        values = self.values[scoring.queries, scoring.keys]
        values = values if of is None else values[np.asarray(of)]
        pooled = SAMPLES[scoring.samples](values.astype(np.float64))
        return HeadScores(pooled, str(scoring), self.model, len(values), self.runs)


Evidence = Literal["box", "mask"]


def score_samples(
    vlm: VLM, samples: Samples, batch_size: int = 8, evidence: Evidence = "box", part: Part = "both"
) -> SampleScores:
    """Capture each sample once and reduce it to every (queries, keys) pair; stored, and resumed if interrupted.

    The model replies greedily, then one teacher-forced pass over prompt and reply yields all rows. The referent's image
    tokens K_s are those that its box overlaps (the paper), or its mask (`evidence="mask"`); of a tiled picture those of
    tiles and thumbnail, or of one of the two (`part`). Samples with an empty reply have no output token to score: they
    are kept apart (`SampleScores.empty`), and if there is nothing else that is a ValueError, as is a sample without
    the box or mask asked for.
    """
    if evidence not in get_args(Evidence):
        raise store.unknown("evidence", evidence, get_args(Evidence))
    if without := [s.id for s in samples if getattr(s, evidence) is None]:
        raise ValueError(
            f"{len(without)} samples have no {evidence} (first: {without[0]}): attention to their referent cannot be "
            "measured."
        )
    limit = samples.max_new_tokens or vlm.max_new_tokens
    masks = [store.digest(np.packbits(s.pixels).tobytes().hex()) for s in samples] if evidence == "mask" else None
    run = store.Run(
        task="scores", benchmark=f"{samples.benchmark} {samples.split}", kernel=KERNEL, batch_size=batch_size,
        samples=tuple(s.fingerprint for s in samples), decoding={"greedy": True, "max_new_tokens": limit},
        condition={"queries": list(QUERIES), "keys": list(KEYS), "evidence": evidence, "part": part, "masks": masks},
        data=samples.origin, **vlm.identity(),
    )  # fmt: skip
    with store.open_run(run, vlm.profile) as results:
        # Chunks stay where they are when a run resumes: a batch's composition can move the last bits.
        chunks = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
        todo = [chunk for chunk in chunks if any(s.id not in results for s in chunk)]
        label = f"{samples.benchmark} {samples.split}  scoring {len(samples)} samples, batches of {batch_size}"
        meter = store.Meter(vlm.profile, vlm.name, vlm.device.type)
        for chunk in store.progress(todo, label):
            fitting(vlm, partial(_score, vlm, chunk, results, limit, evidence, part, meter))
        meter.close()
        records = {s.id: results.records[s.id] for s in samples}
    empty = tuple(name for name, record in records.items() if "empty" in record)
    if len(empty) == len(records):
        raise ValueError(
            f"{vlm.name} replied nothing to any of {len(samples)} samples of {samples!r}: no output token to score. "
            f"Look at its prompt: {vlm.question(samples[0].text, samples[0].task)!r}."
        )
    pairs = list(itertools.product(QUERIES, KEYS))
    values = {(q, k): _of(records, f"{q}/{k}") for q, k in pairs}
    return SampleScores(values, vlm.name, samples.benchmark, (run.digest,), empty)


def _score(
    vlm: VLM, chunk: Samples, results: store.Results, limit: int, evidence: Evidence, part: Part, meter: store.Meter
) -> None:
    """Score and store what is missing of a chunk, `vlm.rows` samples at a time."""
    for i in range(0, len(chunk), vlm.rows):
        piece = chunk[i : i + vlm.rows]
        if all(s.id in results for s in piece):
            continue
        vlm.running = len(piece)
        batch = vlm.prepare(piece)
        ids = generate(vlm, batch, max_new_tokens=limit)[:, 0]
        meter.add(2 * len(batch) * batch.length, ids.size)
        for sample, theta in zip(piece, _theta(vlm, batch, [_text_ids(vlm, row) for row in ids], evidence, part)):
            if sample.id not in results:
                results.add(sample.id, theta | {"batch": len(piece), "rows": vlm.running})


def _of(records: Mapping[str, dict], name: str) -> np.ndarray:
    return np.array([r[name] for r in records.values() if "empty" not in r], dtype=np.float32)


def _text_ids(vlm: VLM, ids: np.ndarray) -> list[int]:
    return [int(i) for i in ids if i >= 0 and i not in vlm.stop_ids]


def _theta(
    vlm: VLM, batch: Batch, replies: list[list[int]], evidence: Evidence = "box", part: Part = "both"
) -> list[dict]:
    """Per sample {"output/sum": [layers][heads], ...}, the mean over its query rows, or {"empty": True}."""
    if not any(replies):
        return [{"empty": True} for _ in replies]
    inputs = with_replies(vlm, batch, replies)
    total = inputs["input_ids"].shape[1]
    inside = torch.zeros(len(batch), 1, 1, total, device=vlm.device)
    rows: list[dict[str, np.ndarray]] = []
    for b, (sample, reply) in enumerate(zip(batch.samples, replies)):
        grid = batch.grids[b]
        near = grid.tokens_in(sample.box) if evidence == "box" else grid.tokens_of(sample.pixels)
        inside[b, ..., batch.image_columns[b][near & grid.part(part)]] = 1
        if not reply:
            rows.append({})
            continue
        seed = int(store.digest(sample.id)[:8], 16)
        tokens = Tokens(batch.length, len(reply), batch.expression_columns[b], np.random.default_rng(seed))
        rows.append({name: pick(tokens) for name, pick in QUERIES.items()})
    wanted = [np.concatenate([np.zeros(0, int), *r.values()]) for r in rows]
    padded = np.full((len(batch), max(map(len, wanted))), -1)
    for b, columns in enumerate(wanted):
        padded[b, : len(columns)] = columns
    reduce = {name: lambda a, phi=phi: phi(a, inside[..., : a.shape[-1]]) for name, phi in KEYS.items()}
    with torch.inference_mode(), capture(vlm, torch.from_numpy(padded), reduce) as got:
        vlm.model(**inputs, logits_to_keep=1)
    out = []
    for b, chosen in enumerate(rows):
        ends = np.cumsum([len(c) for c in chosen.values()])
        theta = {} if chosen else {"empty": True}
        for (name, columns), end in zip(chosen.items(), ends):
            for key in KEYS:
                mean = got[key][b, :, :, end - len(columns) : end].mean(-1)
                theta[f"{name}/{key}"] = np.round(mean.cpu().numpy().astype(float), 7).tolist()
        out.append(theta)
    return out


def detect(vlm: VLM, samples: Samples, scoring: Scoring = VRH, batch_size: int = 8) -> HeadScores:
    """Score every head of a model (Eq. 1): `detect(vlm, samples).top(20)` are its visual retrieval heads."""
    return score_samples(vlm, samples, batch_size).score(scoring)


# ---------------------------------------------------------------- one sample, looked at closely


@dataclass(frozen=True, eq=False)
class CloseUp:
    """One sample's greedy reply and where every head looks while each of its tokens is predicted.

    `attention`: float [layers, heads, reply tokens, V], mass on every image token.
    """

    sample: Sample
    grid: TokenGrid
    tokens: tuple[str, ...]
    reply: Reply
    attention: np.ndarray
    question: str = ""

    def __str__(self) -> str:
        box, reply = self.sample.box, self.reply
        found = f"IoU {reply.box.iou(box):.2f}" if reply.box else reply.failure
        return f"question  {self.question}\nreply     {reply.text}\nreferent  {tuple(box)}   {found}"

    def over(self, heads: HeadSet) -> np.ndarray:
        """Attention of all the heads together, averaged over the reply's tokens, float [V].

        A sum: the top heads and the rest add up to all heads.
        """
        return self.attention[heads.on(self.attention.shape[:2]).mask()].sum(0).mean(0)

    def mass(self, heads: HeadSet) -> pd.DataFrame:
        """Attention of each head to the tokens that touch the referent's box: a row per head, a column per token."""
        inside = self.grid.tokens_in(self.sample.box)
        values = [self.attention[h.layer, h.head][:, inside].sum(-1) for h in heads]
        columns = [f"{i + 1}: {token}" for i, token in enumerate(self.tokens)]
        return pd.DataFrame(values, index=[str(h) for h in heads], columns=columns)

    def panels(self, sets: Mapping[str, HeadSet]) -> tuple:
        """What `figures.attention_maps` draws as one row: text, image, referent, grid, and a map per head set."""
        s = self.sample
        return s.text, s.image, s.box, self.grid, {title: self.over(heads) for title, heads in sets.items()}


def close_up(vlm: VLM, sample: Sample) -> CloseUp:
    """Reply to one sample and keep the attention rows over its image."""
    batch = vlm.prepare([sample])
    ids = generate(vlm, batch)[0, 0]
    text, finished = vlm.decode([int(i) for i in ids if i >= 0])
    reply = _text_ids(vlm, ids)
    if not reply:
        raise ValueError(f"{vlm.name} replied nothing to sample {sample.id} ({sample.text!r}): choose another example.")
    columns = torch.from_numpy(batch.image_columns[0]).to(vlm.device)
    rows = torch.arange(len(reply))[None] + batch.length - 1
    with torch.inference_mode(), capture(vlm, rows, {"image": lambda a: a[..., columns]}) as got:
        vlm.model(**with_replies(vlm, batch, [reply]), logits_to_keep=1)
    tokens = tuple(vlm.tokenizer.decode([i]) for i in reply)
    read = vlm.read(text, sample.image.size, batch.resized[0], finished)
    question = vlm.question(sample.text, sample.task)
    return CloseUp(sample, batch.grids[0], tokens, read, got["image"][0].cpu().numpy(), question)


# ---------------------------------------------------------------- stability (Figures 7b, 7c) and cost (Table A11)


def stability(
    captured: SampleScores, sizes: Sequence[int], k: int, seeds: int = 20, scoring: Scoring = VRH
) -> pd.DataFrame:
    """Top-k overlap of heads found from few samples with those from all: columns n, seed, overlap, spearman.

    For each size, `seeds` random subsets without replacement.
    """
    if not sizes:
        raise ValueError(f"No subset sizes to try: {captured.n} detection samples are too few, use at least 10.")
    everything = captured.score(scoring)
    reference, rows = everything.top(k), []
    for n in sizes:
        if n > captured.n:
            raise ValueError(f"Stability over {n} samples, but only {captured.n} were captured.")
        for seed in range(seeds):
            subset = np.random.default_rng([seed, n]).choice(captured.n, n, replace=False)
            scores = captured.score(scoring, subset)
            rows.append((n, seed, scores.top(k).overlap(reference), scores.spearman(everything)))
    return pd.DataFrame(rows, columns=["n", "seed", "overlap", "spearman"]).assign(k=k, model=captured.model)


def capture_cost(vlm: VLM, sample: Sample, scales: Sequence[int], repeats: int = 5) -> pd.DataFrame:
    """One detection pass by captured rows and by eager attention, on the sample enlarged `scales` times.

    Both run the same teacher-forced sequence and reduce the same output rows. Columns: method, visual_tokens,
    seconds (best of `repeats`), peak_mib (above what was held before), n (= repeats).
    """
    rows, differences = [], []
    for scale in scales:
        width, height = sample.image.size
        image = sample.image.resize((width * scale, height * scale))
        box = sample.box.scaled(scale, scale)
        large = Sample(f"{sample.id} x{scale}", image, f"{sample.image_key} x{scale}", sample.text, box)
        batch = vlm.see(vlm.prepare([large]))
        reply = vlm.tokenizer(vlm.write_box(large.box, image.size, batch.resized[0]), add_special_tokens=False)[
            "input_ids"
        ]
        found: dict[str, np.ndarray] = {}
        for method, one_pass in (("rows", _pass_rows), ("eager", _pass_eager)):
            measured = [store.measure(one_pass, vlm, batch, reply, device=vlm.device) for _ in range(repeats)]
            found[method] = measured[0][0]
            seconds, peak = min(m[1] for m in measured), max(m[2] for m in measured)
            rows.append((method, len(batch.grids[0]), seconds, peak, repeats))
        differences.append(float(abs(found["rows"] - found["eager"]).max()))
    table = pd.DataFrame(rows, columns=["method", "visual_tokens", "seconds", "peak_mib", "n"]).assign(model=vlm.name)
    table.attrs["largest_difference"] = max(differences)
    return table


def _pass_rows(vlm: VLM, batch: Batch, reply: list[int]) -> np.ndarray:
    return np.array(_theta(vlm, batch, [reply])[0]["output/sum"])


@torch.inference_mode()
def _pass_eager(vlm: VLM, batch: Batch, reply: list[int]) -> np.ndarray:
    """The same quantity from full attention matrices, as `output_attentions` gives them."""
    inputs = with_replies(vlm, batch, [reply])
    rows = batch.length - 1 + np.arange(len(reply))
    keys = batch.image_columns[0][batch.grids[0].tokens_in(batch.samples[0].box)]
    vlm.model.set_attn_implementation({"text_config": "eager"})
    try:
        attentions = vlm.model(**inputs, output_attentions=True, logits_to_keep=1).attentions
    finally:
        vlm.model.set_attn_implementation({"text_config": "sdpa"})
    return np.stack([a[0][:, rows][..., keys].sum(-1).mean(-1).float().cpu().numpy() for a in attentions])
