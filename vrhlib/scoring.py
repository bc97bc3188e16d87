"""Head scores: how strongly a head looks from the answer to the thing the text names.

What can be scored, and what it is called, is told in `design_space`. Here the model runs: it replies greedily to each
sample, then one captured pass over prompt, reply, right answer and a null question leaves a number per head for every
variant (`score_samples`); `detect` reads one of them off.
"""

from __future__ import annotations

import base64
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import ndimage

from vrhlib import store
from vrhlib.attention import KERNEL, Branch, Reduction, capture, fitting, generate, with_branches, with_replies
from vrhlib.boxes import Part, Reply, TokenGrid, number_spans
from vrhlib.design_space import (
    EVIDENCE,
    ON_TEXT_ONLY,
    ONE_ROW,
    ONE_SEEDS,
    VRH,
    WITH_NULL,
    SampleScores,
    Scoring,
    parameter,
)
from vrhlib.heads import HeadScores, HeadSet
from vrhlib.outcomes import judged
from vrhlib.profiles import MODELS
from vrhlib.samples import Sample, Samples
from vrhlib.vlm import FAMILIES, VLM, Batch, revision

BOX_EVIDENCE = ("any", "centre", "overlap(0.5)", "box_share(0.001)", "soft")
NULL = "N/A"  # what stands in the expression's place in the null question
EPSILON = 1e-9  # of VERA's share

Variant = tuple[str, str, str]  # queries, keys, evidence

# ---------------------------------------------------------------- which variants a set of samples has


def offered(samples: Samples) -> tuple[tuple[str, ...], str]:
    """The evidence that every sample of a set can give, and why the rest is missing."""
    boxes, spans = ([s.id for s in samples if getattr(s, a) is None] for a in ("box", "span"))
    masks = [s.id for s in samples if s.mask is None or not s.pixels.any()]
    if not spans:
        return ("any",), "A text has words, and no cells that lie in a box."
    if boxes:
        return (), f"{len(boxes)} of {len(samples)} samples have no box (first: {boxes[0]})."
    if masks:
        return (
            BOX_EVIDENCE,
            f"{len(masks)} of {len(samples)} samples have no mask, or an empty one (first: {masks[0]}).",
        )
    return (*BOX_EVIDENCE, "mask"), ""


def _checked(samples: Samples, evidence: Sequence[str] | None) -> tuple[tuple[str, ...], str]:
    found, missing = offered(samples)
    if evidence is None:
        return found, missing
    for name in evidence:
        word, _ = parameter("evidence", name, {k: v for k, v in EVIDENCE.items() if k != "none"})
        if word not in {parameter("evidence", e, EVIDENCE)[0] for e in found}:
            raise ValueError(
                f"{samples!r}: evidence {name!r} cannot be measured. {missing} Keys that need no referent: image_mass, "
                "spatial_entropy."
            )
    return tuple(dict.fromkeys(evidence)), missing


def variants(evidence: Sequence[str], text: bool, forced: bool) -> list[Variant]:
    """What is stored of a sample, in order; `design_space` derives mean, lift, hit_inverse and sum_calibrated."""
    whole = ["output", "output_emitted", "output_answer", "output_answer_emitted", "prompt_last", "expression",
             "expression_last", "prompt", "expression_and_output", *["forced_output"] * forced]  # fmt: skip
    binary = [e for e in evidence if e != "soft"]
    found: list[Variant] = [(q, "image_mass", "none") for q in whole]
    found += [(q, k, e) for q in whole for k in ("sum", "share") for e in evidence]
    found += [(q, k, e) for q in whole for k in ("argmax", "argmax_visual", "max") for e in binary]
    found += [(q, "sum_null", e) for q in WITH_NULL for e in evidence]
    found += [(f"output_one({s})", k, e) for s in ONE_SEEDS for k in ("sum", "argmax") for e in evidence if e == "any"]
    found += [(q, "copy", "any") for q in ("output", "forced_output")[: 1 + forced] if text]
    return found + [(q, "spatial_entropy", "none") for q in ONE_ROW if not text]


# ---------------------------------------------------------------- one captured pass


def score_samples(
    vlm: VLM, samples: Samples, batch_size: int = 8, evidence: Sequence[str] | None = None, part: Part = "both"
) -> SampleScores:
    """Capture each sample once and reduce it to every variant of `design_space`; stored, and resumed if interrupted.

    The model replies greedily; then one pass over the prompt and three continuations of it (that reply, the right
    answer, a null question: see `attention.with_branches`) yields all rows. `evidence`: the sets of tokens that can be
    the referent, by default all that boxes, masks or text spans of the samples give; of a tiled picture those of tiles
    and thumbnail, or of one of the two (`part`). An empty reply has no output rows; if there is no other, that is a
    ValueError, as is evidence that the samples do not have.
    """
    evidence, missing = _checked(samples, evidence)
    text = samples[0].image is None
    if text and not samples[0].context:
        raise ValueError(f"{samples!r}: neither a picture nor a context, so there is nothing that heads could look at.")
    names = _variants_of(samples, evidence)
    limit = samples.max_new_tokens or vlm.max_new_tokens
    run = store.Run(
        task="scores", benchmark=f"{samples.benchmark} {samples.split}", kernel=KERNEL, batch_size=batch_size,
        samples=tuple(s.fingerprint for s in samples), decoding={"greedy": True, "max_new_tokens": limit},
        condition=_condition(samples, evidence, part, vlm.given),
        data=samples.origin, **vlm.identity(),
    )  # fmt: skip
    with store.open_run(run, vlm.profile) as results:
        # Batches stay what they are when a run resumes: a batch's composition can move the last bits.
        todo = [chunk for chunk in samples.batches(batch_size) if any(s.id not in results for s in chunk)]
        label = f"{samples.benchmark} {samples.split}  scoring {len(samples)} samples, batches of {batch_size}"
        meter = store.Meter(vlm.profile, vlm.name, vlm.device.type)
        for chunk, then in zip(store.progress(todo, label), [*todo[1:], None]):
            vlm.soon(chunk)
            vlm.soon(then)
            fitting(vlm, partial(_score, vlm, chunk, results, limit, names, part, meter))
        meter.close()
        records = [results.records[s.id] for s in samples]
    captured = _gathered(vlm.name, vlm.grid, samples, names, records, missing, results.path)
    right = [judged(vlm, s, r)["outcome"] == "correct" for s, r in zip(samples, records)]
    captured = replace(captured, right=np.array(right))
    if len(captured.empty) == captured.n:
        raise ValueError(
            f"{vlm.name} replied nothing to any of {len(samples)} samples of {samples!r}: no output token to score. "
            f"Look at its prompt: {vlm.question(samples[0].text, samples[0].task)!r}."
        )
    return captured


def _variants_of(samples: Samples, evidence: Sequence[str]) -> list[Variant]:
    return variants(evidence, text=samples[0].image is None, forced=samples[0].task != "point")


def _condition(samples: Samples, evidence: Sequence[str], part: Part, given: Mapping) -> dict:
    """What the run key knows of a scoring pass beside model and samples; needs no model."""
    names = ["/".join(name) for name in _variants_of(samples, evidence)]
    return {"variants": names, "part": part, "null": NULL, "given": dict(given)}


def stored(model: str, profile: str, samples: Samples) -> SampleScores | None:
    """What `score_samples` left of these samples by its defaults (model as `load_vlm(model)` gives it, all evidence,
    both parts), read without loading the model; None unless exactly one such run is complete. Whether replies were
    right is not known here: reading them takes the model's processor."""
    evidence, missing = offered(samples)
    same = store.sample_set([s.fingerprint for s in samples], samples.origin)
    condition = _condition(samples, evidence, "both", given={})
    if model in MODELS:
        family = FAMILIES[MODELS[model].family]
        same["prompt"] = [MODELS[model].prompt or family.prompt, family.question_prompt, family.point_prompt]
    found = store.stored(profile, task="scores", model=model, revision=revision(model), condition=condition, **same)
    if len(found) != 1:
        return None
    results, names = found[0][0], _variants_of(samples, evidence)
    records = [results.records[s.id] for s in samples]
    grid = MODELS[model].grid if model in MODELS else None
    return _gathered(model, grid, samples, names, records, missing, results.path)


def _gathered(
    model: str,
    grid: tuple[int, int] | None,
    samples: Samples,
    names: Sequence[Variant],
    records: Sequence[dict],
    missing: str,
    path: Path,
) -> SampleScores:
    ids, shape = tuple(s.id for s in samples), grid and (len(names), *grid)
    for name, record in zip(ids, records):
        try:
            theta = _unpack(record["theta"])
            shape = shape or (len(names), *theta.shape[1:])
            whole = theta.shape == shape and {"text", "finished", "resized", "tokens"} <= set(record)
            if not whole or not all(float(v) > 0 for v in record["sizes"].values()):
                raise ValueError(f"an array of {theta.shape} and {', '.join(record)}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise store.CorruptRun(
                f"{path}: the line of sample {name!r} holds no head scores ({error!r}). Delete that line to compute it "
                "again, or the whole file."
            ) from error
    stacked = np.stack([_unpack(r["theta"]) for r in records])
    sizes = {name: np.array([r["sizes"][name] for r in records]) for name in records[0]["sizes"]}
    return SampleScores(
        values={name: stacked[:, i] for i, name in enumerate(names)}, model=model, benchmark=samples.benchmark,
        runs=(path.stem,), ids=ids, sizes=sizes, replies=tuple(r["text"] for r in records), about=missing,
        empty=tuple(name for name, r in zip(ids, records) if r["tokens"] == 0),
    )  # fmt: skip


def _pack(array: np.ndarray) -> str:
    """A float32 array as text for a stored line: shape, then compressed bytes; NaNs are kept."""
    shape = "x".join(map(str, array.shape))
    return f"{shape}:{base64.b64encode(zlib.compress(np.ascontiguousarray(array, '<f4').tobytes(), 1)).decode()}"


def _unpack(text: str) -> np.ndarray:
    shape, _, data = text.partition(":")
    try:
        flat = np.frombuffer(zlib.decompress(base64.b64decode(data)), dtype="<f4")
    except zlib.error as error:
        raise ValueError(str(error)) from None
    return flat.reshape([int(n) for n in shape.split("x")])


def _score(
    vlm: VLM, chunk: Samples, results: store.Results, limit: int, names: list[Variant], part: Part, meter: store.Meter
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
        found = _theta(vlm, batch, [_text_ids(vlm, row) for row in ids], names, part)
        for sample, row, resized, theta in zip(piece, ids, batch.resized, found):
            if sample.id not in results:
                text, finished = vlm.decode([int(t) for t in row if t >= 0])
                more = {"text": text, "finished": finished, "resized": list(resized), "batch": len(piece)}
                results.add(sample.id, theta | more | {"rows": vlm.running})


def _text_ids(vlm: VLM, ids: np.ndarray) -> list[int]:
    return [int(i) for i in ids if i >= 0 and i not in vlm.stop_ids]


# ---------------------------------------------------------------- rows of a sample


@dataclass(frozen=True, eq=False)
class Rows:
    """Where one sample's query rows stand in a pass over prompt, reply, right answer and null question.

    `queries`: by name, columns of the padded sequence; `null`: the same for the null question; `searched`: those of V.
    """

    queries: Mapping[str, np.ndarray]
    null: Mapping[str, np.ndarray]
    searched: np.ndarray

    @property
    def all(self) -> np.ndarray:
        return np.unique(np.concatenate([*self.queries.values(), *self.null.values()])).astype(int)


def answer_tokens(vlm: VLM, sample: Sample, reply: Sequence[int]) -> np.ndarray:
    """Which tokens of a reply spell the numbers of its box, or the right answer's words; int indices, maybe none."""
    texts = [vlm.tokenizer.decode(list(reply[:n]), skip_special_tokens=True) for n in range(len(reply) + 1)]
    if sample.task == "answer":
        found = re.search(rf"(?<!\w){re.escape(sample.answer)}(?!\w)", texts[-1], re.IGNORECASE)
        spans = [found.span()] if found else []
    else:
        spans = number_spans(texts[-1], vlm.family.style)
    ends = np.array([len(t) for t in texts])
    return np.array([t for t in range(len(reply)) if any(ends[t] < b and ends[t + 1] > a for a, b in spans)], dtype=int)


def _right_answer(vlm: VLM, sample: Sample, resized: tuple[int, int]) -> list[int]:
    """Token ids of the right answer as the model would write it; none where that is a place to point at, or unknown."""
    if sample.task == "answer":
        text = sample.answer
    elif sample.box is None or sample.task == "point":
        return []
    else:
        text = vlm.write_box(sample.box, sample.image.size, resized)
    return vlm.tokenizer(text, add_special_tokens=False)["input_ids"]


def _null_question(vlm: VLM, batch: Batch, b: int) -> tuple[Branch, np.ndarray, int]:
    """The prompt's other ending, with N/A for the expression: the branch from where the two part, the indices of N/A's
    tokens, and by how much an index of the null prompt lies left of its column while both still agree."""
    sample, image = batch.samples[b], batch.samples[b].image is not None
    plain, _ = vlm.tokens(vlm.chat(sample.text, sample.task, image, sample.context)[0], [])
    text, span = vlm.chat(NULL, sample.task, image, sample.context)
    null, (inside,) = vlm.tokens(text, [span])
    parted = next((i for i, (x, y) in enumerate(zip(plain, null)) if x != y), min(len(plain), len(null)))
    parted = min(parted, len(null) - 1)  # the last row has to stand in the branch
    shift = batch.length - len(plain)
    return Branch(parted + shift, null[parted:]), inside, shift


def _rows(vlm: VLM, batch: Batch, b: int, reply: list[int], columns: list[np.ndarray], null: tuple) -> Rows:
    """Query rows of a sample by name; `columns` are those of its reply, the right answer and the null question."""
    sample, last = batch.samples[b], batch.length - 1
    written, forced, ending = columns
    searched = batch.image_columns[b] if sample.image is not None else batch.context_columns[b]
    predicting = np.concatenate([[last], written[:-1]])[: len(reply)]
    answer, said = answer_tokens(vlm, sample, reply), batch.expression_columns[b]
    queries = {
        "output": predicting, "output_emitted": written, "output_answer": predicting[answer],
        "output_answer_emitted": written[answer], "prompt_last": np.array([last]), "expression": said,
        "expression_last": said[-1:], "prompt": np.arange(searched[-1] + 1, last + 1),
        "expression_and_output": np.union1d(said, predicting) if reply else np.zeros(0, int),
        "forced_output": np.concatenate([[last], forced[:-1]])[: len(forced)],
    }  # fmt: skip
    for seed in ONE_SEEDS if reply else ():
        rng = np.random.default_rng([int(store.digest(sample.id)[:8], 16), seed])
        queries[f"output_one({seed})"] = predicting[rng.integers(0, len(reply), 1)]
    branch, inside, shift = null
    parted = branch.start - shift
    at = np.array([ending[i - parted] if i >= parted else i + shift for i in inside], dtype=int)
    before = np.arange(searched[-1] + 1, branch.start)
    other = {"prompt_last": ending[-1:], "expression": at, "expression_last": at[-1:],
             "prompt": np.concatenate([before, ending])}  # fmt: skip
    return Rows(queries, other, searched)


# ---------------------------------------------------------------- attention rows to numbers


@dataclass(eq=False)
class _Pooling:
    """Reduces attention rows [B, heads, R, kv] to what all keys need, while the pass runs.

    `weights` float [B, E + 1, kv]: evidence sets, and V last. `members` int [B, binary evidence, most]: their columns,
    -1 unused. `searched`: columns of V, int [V] each. `single` bool [B, R]: rows whose map is split into parts.
    """

    weights: torch.Tensor
    members: torch.Tensor
    searched: list[torch.Tensor]
    single: np.ndarray
    grids: list[TokenGrid]
    kept: list[list[torch.Tensor]] = field(default_factory=list)  # of every layer, the maps of each sample

    def reductions(self, text: bool) -> dict[str, Reduction]:
        found = {"mass": self.mass, "largest": self.largest, "top": lambda a: a.argmax(-1), "top_searched": self.top}
        return found if text else found | {"maps": self.maps}

    def mass(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weights[:, None].transpose(-1, -2)

    def largest(self, rows: torch.Tensor) -> torch.Tensor:
        found = [_picked(rows, of).amax(-1) for of in self.members.unbind(1)]
        return torch.stack(found, -1) if found else rows[..., :0]

    def top(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.masked_fill(self.weights[:, None, None, -1] == 0, -1.0).argmax(-1)

    def maps(self, rows: torch.Tensor) -> torch.Tensor:
        """Keeps each single row's map for `entropy`, on its way to the CPU: to wait for it here would stall a GPU at
        every layer."""
        found = [rows[b][:, at][..., self.searched[b]] for b, at in enumerate(self.at)]
        self.kept.append([values.to("cpu", non_blocking=True) for values in found])
        return rows[..., 0]

    def entropy(self) -> np.ndarray:
        """Minus the entropy of the parts of each single row's map, [layers, B, heads, R]; 0 for the other rows. To be
        asked when the pass is over and something was waited for."""
        out = np.zeros((len(self.kept), len(self.grids), self.kept[0][0].shape[0], self.single.shape[1]), np.float32)
        for layer, several in zip(out, self.kept):
            for alike in self.alike:  # pictures of one shape at once: many small calls cost more than the work in them
                maps = np.concatenate([several[b].numpy()[..., self.grids[b].order] for b in alike])
                found = -component_entropy(maps.reshape(-1, *maps.shape[2:])).reshape(maps.shape[:2])
                for b, one in zip(alike, np.split(found, len(alike))):
                    layer[b][:, self.single[b]] = one
        return out

    @cached_property
    def at(self) -> list[torch.Tensor]:
        """Indices of the single rows, int [n] each; where the model runs."""
        return [torch.from_numpy(np.flatnonzero(one)).to(self.weights.device) for one in self.single]

    @cached_property
    def alike(self) -> list[list[int]]:
        """Batch rows by the shape of their picture, and the number of rows whose map is split."""
        groups: dict[tuple, list[int]] = {}
        for b, grid in enumerate(self.grids):
            groups.setdefault((grid.order.shape, int(self.single[b].sum())), []).append(b)
        return list(groups.values())


def _picked(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Attention on chosen columns, [B, heads, R, n]; -1 where a column is -1."""
    index = columns.clamp(min=0)[:, None, None].expand(*rows.shape[:3], -1)
    return rows.gather(-1, index).masked_fill((columns < 0)[:, None, None], -1.0)


def component_entropy(maps: np.ndarray) -> np.ndarray:
    """Entropy (nats) of the areas of the connected parts of each map, float [n, rows, cols] to [n].

    A map is cut at its mean; parts are 8-connected, and weigh by area (Kang et al. 2025, Appendix B.1; their code
    weighs by attention). A map without any part, all its values equal, is as spread out as can be: log(rows x cols).
    """
    maps = maps.astype(np.float64)
    above = maps > (1 + 1e-9) * maps.mean((1, 2), keepdims=True)  # the mean of equal values can be rounded below them
    within = np.zeros((3, 3, 3), int)
    within[1] = 1  # neighbours in the same map only
    parts, count = ndimage.label(above, within)
    areas = np.bincount(parts.ravel(), minlength=count + 1)[1:].astype(float)
    owner = np.zeros(count + 1, int)
    owner[parts.ravel()] = np.arange(parts.size) // maps[0].size  # a part lies in one map
    owner = owner[1:]
    total = np.bincount(owner, areas, minlength=len(maps))
    share = areas / total[owner] if count else areas
    entropy = np.bincount(owner, -share * np.log(np.maximum(share, 1e-300)), minlength=len(maps))
    return np.where(total > 0, entropy, np.log(maps[0].size))


def _referents(vlm: VLM, batch: Batch, b: int, evidence: Sequence[str], part: Part) -> dict[str, np.ndarray]:
    """Weights of the searched tokens by evidence, float [V] each."""
    sample, grid = batch.samples[b], batch.grids[b]
    if sample.image is None:
        return {name: np.isin(batch.context_columns[b], batch.span_columns[b]).astype(float) for name in evidence}
    found = {}
    for name in evidence:
        word, t = parameter("evidence", name, EVIDENCE)
        inside = grid.tokens_of(sample.pixels) & grid.part(part) if word == "mask" else None
        found[name] = grid.weights(sample.box, word, t or 0.0, part) if inside is None else inside.astype(float)
    return found


@torch.inference_mode()
def _theta(vlm: VLM, batch: Batch, replies: list[list[int]], names: list[Variant], part: Part = "both") -> list[dict]:
    """Per sample: theta (packed float32 [variants, layers, heads]), sizes (|K| by evidence, |V|), tokens replied."""
    evidence = list(dict.fromkeys(e for *_, e in names if e != "none"))
    nulls = [_null_question(vlm, batch, b) for b in range(len(batch))]
    forced = [_right_answer(vlm, s, r) for s, r in zip(batch.samples, batch.resized)]
    branches = [[Branch(batch.length, r), Branch(batch.length, f), n[0]] for r, f, n in zip(replies, forced, nulls)]
    inputs, columns = with_branches(vlm, batch, branches)
    rows = [_rows(vlm, batch, b, replies[b], columns[b], nulls[b]) for b in range(len(batch))]
    referents = [_referents(vlm, batch, b, evidence, part) for b in range(len(batch))]
    wanted = _padded([r.all for r in rows])
    pooling = _pooling(vlm, batch, rows, referents, wanted, inputs["input_ids"].shape[1])
    text = batch.samples[0].image is None
    with capture(vlm, torch.from_numpy(wanted), pooling.reductions(text)) as got:
        vlm.model(**inputs, logits_to_keep=1)
    mine = {name: value.movedim(1, 0).cpu().numpy() for name, value in got.items() if name != "maps"}
    got = mine | ({} if text else {"entropy": pooling.entropy()})  # [layers, B, heads, R, ...]
    ids = inputs["input_ids"].cpu().numpy()
    out = []
    for b, (own, near) in enumerate(zip(rows, referents)):
        mine = {name: value[:, b, :, : len(own.all)] for name, value in got.items()}
        found = _reduced(mine, own, near, ids[b], replies[b], forced[b])
        missing = np.full(vlm.grid, np.nan, np.float32)
        theta = np.stack([found.get(name, missing) for name in names])
        sizes = {name: float(w.sum()) for name, w in near.items()} | {"none": len(own.searched)}
        out.append({"theta": _pack(theta), "sizes": sizes, "tokens": len(replies[b])})
    return out


def _padded(lists: Sequence[np.ndarray]) -> np.ndarray:
    """Int arrays as one [n, longest], -1 behind the shorter ones."""
    out = np.full((len(lists), max(map(len, lists), default=0)), -1)
    for row, values in enumerate(lists):
        out[row, : len(values)] = values
    return out


def _pooling(
    vlm: VLM, batch: Batch, rows: list[Rows], referents: list[dict], wanted: np.ndarray, total: int
) -> _Pooling:
    names = list(referents[0])
    weights = np.zeros((len(batch), len(names) + 1, total), np.float32)
    members = []
    for b, (own, near) in enumerate(zip(rows, referents)):
        weights[b, :-1, own.searched] = np.stack([near[n] for n in names], -1) if names else 0
        weights[b, -1, own.searched] = 1
        members.append(_padded([own.searched[near[n] > 0] for n in names if n != "soft"]))
    most = max(m.shape[1] for m in members)
    members = np.stack([np.pad(m, ((0, 0), (0, most - m.shape[1])), constant_values=-1) for m in members])
    single = [np.isin(wanted[b], np.concatenate([own.queries[q] for q in ONE_ROW])) for b, own in enumerate(rows)]

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(vlm.device)

    return _Pooling(there(weights), there(members), [there(r.searched) for r in rows], np.array(single),
                    batch.grids)  # fmt: skip


def _reduced(
    got: dict, rows: Rows, referents: dict, ids: np.ndarray, reply: list, forced: list
) -> dict[Variant, np.ndarray]:
    """Every stored variant of one sample that it has rows for, [layers, heads] each. `got`: [layers, heads, R, ...]."""
    at = {int(column): r for r, column in enumerate(rows.all)}
    names = list(referents)
    binary = [name for name in names if name != "soft"]
    inside = np.zeros((len(ids), len(binary)), bool)
    for e, name in enumerate(binary):
        inside[rows.searched[referents[name] > 0], e] = True
    mass, seen = got["mass"][..., :-1], got["mass"][..., -1:]
    each = np.concatenate([seen, mass, mass / (seen + EPSILON), got["largest"], inside[got["top"]],
                           inside[got["top_searched"]]], -1, dtype=np.float32)  # fmt: skip
    labels = [("image_mass", "none"), *itertools.product(("sum", "share"), names),
              *itertools.product(("max", "argmax", "argmax_visual"), binary)]  # fmt: skip
    found: dict[Variant, np.ndarray] = {}
    for queries, mean in _means(each, rows.queries, at):
        found |= {(queries, *label): values for label, values in zip(labels, mean)}
    for queries, mean in _means(mass, rows.null, at):
        found |= {(queries, "sum_null", name): values for name, values in zip(names, mean)}
    if "entropy" in got:
        single = {queries: rows.queries[queries] for queries in ONE_ROW}
        found |= {(q, "spatial_entropy", "none"): mean[0] for q, mean in _means(got["entropy"][..., None], single, at)}
    written = {"output": reply, "forced_output": forced} if "any" in binary else {}
    for queries, tokens in written.items():
        if tokens:
            top = got["top"][:, :, [at[int(c)] for c in rows.queries[queries]]]
            found[queries, "copy", "any"] = _copied(top, tokens, ids, inside[:, binary.index("any")])
    return found


def _means(
    values: np.ndarray, queries: Mapping[str, np.ndarray], at: Mapping[int, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Mean of values [layers, heads, R, n] over each set of query rows, as (name, [n, layers, heads]); empty sets are
    left out. One product for all sets: each is a row of ones, so that counts of hits stay exact, and ties ties."""
    chosen = {name: [at[int(c)] for c in columns] for name, columns in queries.items() if len(columns)}
    weights = np.zeros((len(chosen), values.shape[2]), np.float32)
    for row, places in zip(weights, chosen.values()):
        row[places] = 1
    sums = np.moveaxis(weights @ values, (2, 3), (0, 1))
    yield from zip(chosen, sums / weights.sum(1)[:, None, None, None])


def _copied(top: np.ndarray, written: list[int], ids: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Share of the evidence's tokens that a head copied, [layers, heads]; `top` int [layers, heads, tokens]."""
    hit = inside[top] & (ids[top] == np.array(written))
    place = np.where(hit, top, -1)
    ordered = np.sort(place, axis=-1)
    fresh = np.diff(ordered, axis=-1, prepend=-1) > 0
    return (fresh & (ordered >= 0)).sum(-1) / inside.sum()


def detect(vlm: VLM, samples: Samples, scoring: Scoring = VRH, batch_size: int = 8) -> HeadScores:
    """Score every head of a model (Eq. 1): `detect(vlm, samples).top(20)` are its visual retrieval heads.

    Raises ValueError before the model runs if the samples lack what the scoring needs.
    """
    if scoring.evidence != "none":
        _checked(samples, [scoring.evidence])
    if scoring.keys == "copy" and samples[0].image is not None:
        raise ValueError(f"{scoring}: {ON_TEXT_ONLY}")
    default, _ = offered(samples)
    more = () if scoring.evidence in (*default, "none") else (scoring.evidence,)
    return score_samples(vlm, samples, batch_size, (*default, *more)).score(scoring)


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
        if self.sample.task == "answer":
            return f"question  {self.question}\nreply     {reply.text}\nanswer    {self.sample.answer}"
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


def close_up(vlm: VLM, sample: Sample, most: int = 128) -> CloseUp:
    """Reply to one sample and keep the attention rows over its image; of a reply of more than `most` tokens those of
    the last, where reasoning ends with its answer (all rows of a long one would not fit into memory)."""
    batch = vlm.prepare([sample])
    ids = generate(vlm, batch)[0, 0]
    text, finished = vlm.decode([int(i) for i in ids if i >= 0])
    reply = _text_ids(vlm, ids)
    if not reply:
        raise ValueError(f"{vlm.name} replied nothing to sample {sample.id} ({sample.text!r}): choose another example.")
    columns = torch.from_numpy(batch.image_columns[0]).to(vlm.device)
    rows = (torch.arange(len(reply))[None] + batch.length - 1)[:, -most:]
    with torch.inference_mode(), capture(vlm, rows, {"image": lambda a: a[..., columns]}) as got:
        vlm.model(**with_replies(vlm, batch, [reply]), logits_to_keep=1)
    tokens = tuple(vlm.tokenizer.decode([i]) for i in reply[-most:])
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


@torch.inference_mode()
def _pass_rows(vlm: VLM, batch: Batch, reply: list[int]) -> np.ndarray:
    """The paper's variant alone: mass on the referent, mean over the rows that predict the reply."""
    inputs = with_replies(vlm, batch, [reply])
    inside = torch.zeros(inputs["input_ids"].shape[1], device=vlm.device)
    inside[batch.image_columns[0][batch.grids[0].tokens_in(batch.samples[0].box)]] = 1
    rows = torch.arange(len(reply))[None] + batch.length - 1
    with capture(vlm, rows, {"sum": lambda a: a @ inside}) as got:
        vlm.model(**inputs, logits_to_keep=1)
    return got["sum"][0].mean(-1).cpu().numpy()


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
