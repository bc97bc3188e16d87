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

import numpy as np
import pandas as pd
import torch

from vrhlib import store
from vrhlib.attention import KERNEL, capture, generate, with_replies
from vrhlib.boxes import Reply, TokenGrid
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
    """Theta(s) of Eq. 1 for every sample, head and (queries, keys) pair: float32 [samples, layers, heads] each."""

    values: dict[tuple[str, str], np.ndarray]
    model: str
    benchmark: str
    runs: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(next(iter(self.values.values())))

    def score(self, scoring: Scoring, of: Sequence[int] | None = None) -> HeadScores:
        """Pool samples (all, or the chosen indices) into one score per head."""
        values = self.values[scoring.queries, scoring.keys]
        values = values if of is None else values[np.asarray(of)]
        return HeadScores(SAMPLES[scoring.samples](values.astype(np.float64)), str(scoring), self.model, len(values))


def score_samples(vlm: VLM, samples: Samples, batch_size: int = 8) -> SampleScores:
    """Capture each sample once and reduce it to every (queries, keys) pair; stored, and resumed if interrupted.

    The model replies greedily, then one teacher-forced pass over prompt and reply yields all rows. Raises
    ValueError if a sample has no box, or if a reply is empty (there would be no output token to score).
    """
    if without := [s.id for s in samples if s.box is None]:
        raise ValueError(
            f"{len(without)} samples have no box (first: {without[0]}): attention to their referent cannot be measured."
        )
    run = store.Run(
        task="scores", benchmark=f"{samples.benchmark} {samples.split}", kernel=KERNEL, batch_size=batch_size,
        samples=tuple(s.fingerprint for s in samples), decoding={"greedy": True, "max_new_tokens": vlm.max_new_tokens},
        condition={"queries": list(QUERIES), "keys": list(KEYS)}, **vlm.identity(),
    )  # fmt: skip
    with store.open_run(run, vlm.profile) as results:
        # Chunks stay where they are when a run resumes: a batch's composition can move the last bits.
        chunks = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
        todo = [chunk for chunk in chunks if any(s.id not in results for s in chunk)]
        label = f"{samples.benchmark} {samples.split}  scoring {len(samples)} samples, batches of {batch_size}"
        for chunk in store.progress(todo, label):
            batch = vlm.prepare(chunk)
            replies = [_text_ids(vlm, row[0], s) for row, s in zip(generate(vlm, batch), chunk)]
            for sample, theta in zip(chunk, _theta(vlm, batch, replies)):
                if sample.id not in results:
                    results.add(sample.id, theta)
        records = [results.records[s.id] for s in samples]
    pairs = list(itertools.product(QUERIES, KEYS))
    values = {(q, k): np.array([r[f"{q}/{k}"] for r in records], dtype=np.float32) for q, k in pairs}
    return SampleScores(values, vlm.name, samples.benchmark, (run.digest,))


def _text_ids(vlm: VLM, ids: np.ndarray, sample: Sample) -> list[int]:
    reply = [int(i) for i in ids if i >= 0 and i not in vlm.stop_ids]
    if not reply:
        raise ValueError(
            f"{vlm.name} replied nothing to sample {sample.id} ({sample.text!r}): no output token to score."
        )
    return reply


def _theta(vlm: VLM, batch: Batch, replies: list[list[int]]) -> list[dict]:
    """Per sample {"output/sum": [layers][heads], ...}: the mean over its query rows."""
    inputs = with_replies(vlm, batch, replies)
    total = inputs["input_ids"].shape[1]
    inside = torch.zeros(len(batch), 1, 1, total, device=vlm.device)
    rows: list[dict[str, np.ndarray]] = []
    for b, (sample, reply) in enumerate(zip(batch.samples, replies)):
        inside[b, ..., batch.image_columns[b][batch.grids[b].tokens_in(sample.box)]] = 1
        seed = int(store.digest(sample.id)[:8], 16)
        tokens = Tokens(batch.length, len(reply), batch.expression_columns[b], np.random.default_rng(seed))
        rows.append({name: pick(tokens) for name, pick in QUERIES.items()})
    wanted = [np.concatenate(list(r.values())) for r in rows]
    padded = np.full((len(batch), max(map(len, wanted))), -1)
    for b, columns in enumerate(wanted):
        padded[b, : len(columns)] = columns
    reduce = {name: lambda a, phi=phi: phi(a, inside[..., : a.shape[-1]]) for name, phi in KEYS.items()}
    with torch.inference_mode(), capture(vlm, torch.from_numpy(padded), reduce) as got:
        vlm.model(**inputs, logits_to_keep=1)
    out = []
    for b, chosen in enumerate(rows):
        ends = np.cumsum([len(c) for c in chosen.values()])
        theta = {}
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
    reply = _text_ids(vlm, ids, sample)
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
        found = {}
        for method, one_pass in (("rows", _pass_rows), ("eager", _pass_eager)):
            measured = [store.measure(one_pass, vlm, batch, reply) for _ in range(repeats)]
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
