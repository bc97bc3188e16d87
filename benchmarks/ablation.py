"""What the tricks of an ablation sweep save, one after the other and each left out, against the naive loop.

    python -m benchmarks.ablation --out ablation.csv

One picture, twelve conditions: the unmasked model, the top heads at four k, seven draws of random heads; cut at all
positions, then while decoding only. The naive loop is what released code does: for every condition processor, vision
tower, prompt and reply again, a batch of one, heads cut by a hook on `o_proj`. Then the tricks, numbered as in the
table of the issue they come from, one on top of the other:

    2a  vision features (and the processor's work) shared by all conditions
    2b  conditions are rows of one batch
    3   what conditions have in common runs once: the prompt (phase decode), or the layers below the lowest one cut
    4   the unmasked model's reply is a draft that one pass verifies (`vrhlib.decoding`)

All give the naive loop's replies, token by token. The two ends of the ladder are compared again on the picture enlarged
(at 48 image tokens there is little prompt to share), and on several pictures at once. Last, many pictures of unequal
size: 5, batches by length (`Samples.batches`) against batches in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch

from benchmarks.capture import greedy
from benchmarks.turns import Found, Turns, arguments, table, turns, written
from vrhlib import attention, decoding, store
from vrhlib.attention import Ablation
from vrhlib.benchmarks import grounding
from vrhlib.heads import HeadScores, HeadSet, load_scores
from vrhlib.profiles import profile
from vrhlib.samples import Samples, joined
from vrhlib.vlm import VLM
from vrhlib.wiring import load_vlm

MODELS = ("nano-qwen2.5-vl", "nano-internvl3.5")
LARGER = 3  # times as wide and high
KS, CONTROLS, PHASES = (1, 2, 4, 8), 7, ("all", "decode")
ALL = "naive loop / sweep of 12 conditions, phase {}"
STEPS = {  # ladder: name, what it adds
    "shared features": "2a vision features shared, phase {}",
    "one batch": "2b conditions in one batch, phase {}",
    "shared passes": "3 prompt or lower layers run once, phase {}",
    "verified": "4 drafts verified, phase {}",
}
WITHOUT = {
    "features of its own": "sweep without 2a / sweep, phase {}",
    "one by one": "sweep without 2b / sweep, phase {}",
    "one batch": "sweep without 3 and 4 / sweep, phase {}",
    "shared passes": "sweep without 4 / sweep, phase {}",
}
MANY = "naive loop / sweep of 12 conditions on {} pictures, phase {}"
ORDER = "5 batches in order / batches by length"

Conditions = Sequence[Ablation | None]


def conditions(scores: HeadScores, phase: str) -> Conditions:
    """Twelve of them: nothing cut, the top heads at `KS`, and `CONTROLS` draws of as many others as the middle k."""
    top = [scores.top(k) for k in KS]
    drawn = [scores.controls(KS[2], seed) for seed in range(CONTROLS)]
    return [None, *(Ablation(heads, phase=phase) for heads in [*top, *drawn])]


def known_scores(vlm: VLM) -> HeadScores:
    """The stored head scores of an embedded model. Raises OSError where there are none."""
    return load_scores(store.heads_dir("nano") / f"{vlm.name}__{profile('nano').benchmarks[0]}.json", vlm.grid)


# ---------------------------------------------------------------- the naive loop, and the ladder


@torch.inference_mode()
def naive(vlm: VLM, samples: Samples, acting: Conditions) -> Found:
    """Everything again for every condition, stock `generate`, heads cut by a hook."""
    found = []
    for sample in samples:
        for condition in acting:
            batch = vlm.prepare([sample])
            with cut(vlm, condition):
                ids = vlm.model.generate(**batch.tensors, **greedy(vlm))
            found.append(trimmed(vlm, ids[0, batch.length :].tolist()))
    return {"replies": found}


@contextmanager
def cut(vlm: VLM, condition: Ablation | None):
    """Zero the heads of a condition in what `o_proj` is given; while decoding only, in passes over one token."""

    def hook(heads: HeadSet, layer: int, size: int, module, args):
        states = args[0]
        if condition.phase == "decode" and states.shape[1] > 1:
            return None
        kept = states.clone()
        for head in heads:
            if head.layer == layer:
                kept[..., head.head * size : (head.head + 1) * size] = 0
        return (kept,)

    with ExitStack() as stack:
        for layer in sorted({head.layer for head in condition.heads}) if condition else ():
            own = vlm.layers[layer].self_attn
            handle = own.o_proj.register_forward_pre_hook(partial(hook, condition.heads, layer, own.head_dim))
            stack.callback(handle.remove)
        yield


def trimmed(vlm: VLM, ids: Sequence[int]) -> list[int]:
    """Token ids up to the one that ends the reply."""
    end = next((i + 1 for i, token in enumerate(ids) if token in vlm.stop_ids), len(ids))
    return [int(i) for i in ids[:end] if i >= 0]


def shared_features(vlm: VLM, samples: Samples, acting: Conditions) -> Found:
    found = []
    for sample in samples:
        batch = vlm.see(vlm.prepare([sample]))
        found += [row for condition in acting for row in _listed(vlm, attention.generate(vlm, batch, [condition]))]
    return {"replies": found}


def one_batch(vlm: VLM, samples: Samples, acting: Conditions) -> Found:
    batch = vlm.prepare(list(samples))
    return {"replies": _listed(vlm, attention.generate(vlm, batch, acting))}


def shared_passes(vlm: VLM, samples: Samples, acting: Conditions) -> Found:
    """As `verified`, but with drafts of nothing but a stop token, of which no reply keeps anything."""
    batch = vlm.prepare(list(samples))
    plain = attention.generate(vlm, batch)
    drafts = [[min(vlm.stop_ids)]] * len(batch)
    others = decoding.generate(vlm, batch, [c for c in acting if c is not None], drafts=drafts)
    found, rest = [], iter(range(others.ids.shape[1]))
    order = [None if condition is None else next(rest) for condition in acting]
    for b in range(len(batch)):
        found += [trimmed(vlm, plain[b, 0] if c is None else others.ids[b, c]) for c in order]
    return {"replies": found}


def verified(vlm: VLM, samples: Samples, acting: Conditions) -> Found:
    """The sweep as the library runs it."""
    return {"replies": _listed(vlm, decoding.generate(vlm, vlm.prepare(list(samples)), acting).ids)}


def one_by_one(vlm: VLM, samples: Samples, acting: Conditions) -> Found:
    """As `verified`, a condition at a time, on one draft."""
    found = []
    for sample in samples:
        batch = vlm.prepare([sample])
        plain = trimmed(vlm, attention.generate(vlm, batch)[0, 0])
        for condition in acting:
            got = plain if condition is None else decoding.generate(vlm, batch, [condition], drafts=[plain]).ids
            found += [plain] if condition is None else _listed(vlm, got)
    return {"replies": found}


def own_features(vlm: VLM, samples: Samples, acting: Conditions) -> Found:
    """As `verified`, and the processor's and the vision tower's work for every condition all the same."""
    for _ in acting[1:]:
        vlm.see(vlm.prepare(list(samples)))
    return verified(vlm, samples, acting)


def _listed(vlm: VLM, ids: np.ndarray) -> list[list[int]]:
    return [trimmed(vlm, row) for several in ids.tolist() for row in several]


# ---------------------------------------------------------------- comparisons


def ladder(vlm: VLM, sample: Samples, acting: Conditions, phase: str, rounds: int) -> list[dict]:
    """Naive loop over the sweep, what each trick adds, and what each costs when it is left out."""
    steps: dict[str, Callable] = {
        "naive": naive, "shared features": shared_features, "one batch": one_batch, "shared passes": shared_passes,
        "verified": verified, "one by one": one_by_one, "features of its own": own_features,
    }  # fmt: skip
    found = turns({name: partial(step, vlm, sample, acting) for name, step in steps.items()}, rounds, vlm.device)
    facts = {"model": vlm.name, "image_tokens": len(vlm.prepare(list(sample)).grids[0]), "n": len(acting)}
    rows, before = found.rows(ALL.format(phase), "naive", "verified", **facts), "naive"
    for name, words in STEPS.items():
        rows += found.rows(words.format(phase), before, name, **facts)
        before = name
    for name, words in WITHOUT.items():
        rows += found.rows(words.format(phase), name, "verified", **facts)
    return rows


def ends(vlm: VLM, samples: Samples, acting: Conditions, rounds: int) -> Turns:
    """Naive loop and sweep."""
    ways = {name: partial(way, vlm, samples, acting) for name, way in (("naive", naive), ("sweep", verified))}
    return turns(ways, rounds, vlm.device)


def larger(vlm: VLM, sample: Samples, acting: Conditions, phase: str, rounds: int) -> list[dict]:
    """Both ends of the ladder on the picture enlarged."""
    large = sample.enlarged(LARGER)
    facts = {"model": vlm.name, "image_tokens": len(vlm.prepare(list(large)).grids[0]), "n": len(acting)}
    return ends(vlm, large, acting, rounds).rows(ALL.format(phase), "naive", "sweep", **facts)


def many(vlm: VLM, samples: Samples, acting: Conditions, phase: str, rounds: int) -> list[dict]:
    """The sweep over several pictures at once: in a batch of more rows a pass costs less a row."""
    facts = {"model": vlm.name, "image_tokens": len(vlm.prepare(samples[:1]).grids[0]), "n": len(acting) * len(samples)}
    words = MANY.format(len(samples), phase)
    return ends(vlm, samples, acting, rounds).rows(words, "naive", "sweep", **facts)


def drafted(vlm: VLM, samples: Samples, acting: Conditions) -> float:
    """Share of the tokens written under conditions that were found without decoding them."""
    got = decoding.generate(vlm, vlm.prepare(list(samples)), acting)
    cut = [c for c, condition in enumerate(acting) if condition is not None]
    return float(got.drafted[:, cut].sum() / got.lengths[:, cut].sum())


# ---------------------------------------------------------------- batches by length


def unequal(n: int, factors: Sequence[int] = (1, 2, 3)) -> Samples:
    """Scenes at several sizes, in an order that is drawn (seed 0)."""
    parts = [grounding("scenes", "test", n, seed=0).enlarged(factor) for factor in factors]
    whole = joined("unequal scenes", parts)
    return whole._with([whole[int(i)] for i in np.random.default_rng(0).permutation(len(whole))])


def in_order(samples: Samples, size: int) -> list[Samples]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def answered(vlm: VLM, batches: Sequence[Samples]) -> Found:
    """Unmasked replies by sample."""
    found = {}
    for chunk in batches:
        rows = _listed(vlm, attention.generate(vlm, vlm.prepare(chunk)))
        found |= {sample.id: row for sample, row in zip(chunk, rows)}
    return {"replies": dict(sorted(found.items()))}


def padding(vlm: VLM, batches: Sequence[Samples]) -> float:
    """Share of the columns of all prompts that hold nothing."""
    masks = [vlm.prepare(chunk).tensors["attention_mask"] for chunk in batches]
    return 1 - sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


def by_length(vlm: VLM, samples: Samples, batch_size: int, rounds: int) -> list[dict]:
    """Time in order over time by length, and the padding of both (share of all columns) as `above` and `below`."""
    cuts = {"in order": in_order(samples, batch_size), "by length": samples.batches(batch_size)}
    found: Turns = turns({name: partial(answered, vlm, cut) for name, cut in cuts.items()}, rounds, vlm.device)
    tokens = int(np.median([len(vlm.prepare([s]).grids[0]) for s in samples]))
    rows = found.rows(ORDER, "in order", "by length", model=vlm.name, image_tokens=tokens, n=len(samples))
    above, below = padding(vlm, cuts["in order"]), padding(vlm, cuts["by length"])
    return [row | {"padding_above": above, "padding_below": below} for row in rows]


MORE = ["drafted", "padding_above", "padding_below"]


def measured(vlm: VLM, n: int, rounds: int) -> list[dict]:
    """All comparisons of one model; `n` pictures where there are several."""
    scores, samples, rows = known_scores(vlm), grounding("scenes", "test", n, seed=0), []
    for phase in PHASES:
        acting = conditions(scores, phase)
        share = {"drafted": drafted(vlm, samples, acting)}
        found = ladder(vlm, samples[:1], acting, phase, rounds)
        found += larger(vlm, samples[:1], acting, phase, max(1, rounds - 2))
        found += many(vlm, samples, acting, phase, max(1, rounds - 2)) if n > 1 else []
        rows += [row | share for row in found]
    return rows + by_length(vlm, unequal(2 * n), 8, rounds)


def main() -> None:
    given = arguments(__doc__, MODELS, n=(4, "pictures, where several are compared"))
    rows = [row for name in given.models for row in measured(load_vlm(name, given.device), given.n, given.rounds)]
    written(table(rows, MORE), given.out)


if __name__ == "__main__":
    main()
