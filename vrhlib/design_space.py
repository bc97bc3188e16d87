"""The design space of head scores, as names: which tokens look, how their attention is pooled, how samples are.

    score[l, h]  =  Omega over samples  of  mean over q in Q  of  Phi( attention[l, h, q, :], K )            (Eq. 1)

A `Scoring` is one point of it: Q from `QUERIES`, Phi from `KEYS`, Omega from `SAMPLES`, K from `EVIDENCE`; what cannot
be combined is refused with the reason. `VRH` is the paper's choice; what other papers chose is told in `methods`.
`SampleScores` holds what one captured pass left of every
sample (see `scoring.score_samples`): any point is read off it, without a model and without torch.

Written A[l, h, q, k], post-softmax over all visible keys; a prompt of P tokens, a reply of N. Row P-1+t *predicts*
reply token t; row P+t is the query *of* that token. V are the tokens of the picture, or of the text that is searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from vrhlib import store
from vrhlib.heads import Head, HeadScores, HeadSet


@dataclass(frozen=True)
class Choice:
    """A value of an axis: its formula, and who uses it."""

    formula: str
    source: str

    def __str__(self) -> str:
        return f"{self.formula}  ({self.source})"


ONE_SEEDS = range(5)  # of `output_one(seed)`: a token is drawn for each when a sample is captured

QUERIES = {
    "output": Choice("rows P-1 ... P+N-2: those that predict the model's own greedy reply, brackets included, stop "
                     "token not", "VRH; Retrieval Heads"),
    "output_emitted": Choice("rows P ... P+N-1: those of the emitted tokens, one step later", "OCR Heads, as released"),
    "output_answer": Choice("of `output`, the rows that predict the numbers of the box, or the answer's words", "ours"),
    "output_answer_emitted": Choice("of `output_emitted`, the rows of those same tokens", "OCR Heads, as released"),
    "output_one": Choice("one row of `output`, drawn per sample: output_one(seed)", "VRH, Figure 7b"),
    "prompt_last": Choice("row P-1, which predicts the first reply token", "VERA, Gaze Heads"),
    "expression": Choice("the tokens of the expression (or question) in the prompt, chat suffix excluded",
                         "VRH's Q_in, in our reading; MMRetHead"),
    "expression_last": Choice("the last token of the expression", "Localization Heads, under a chat template"),
    "prompt": Choice("all tokens from the end of the picture (or context) to the end of the prompt, P-1 included",
                     "QRHead"),
    "expression_and_output": Choice("`expression` and `output` together, one mean over both", "VRH, Table A8"),
    "forced_output": Choice("rows that predict the *right* answer, teacher-forced after the prompt", "ours"),
}  # fmt: skip

KEYS = {
    "sum": Choice("sum over K of A", "VRH, Gaze Heads"),
    "argmax": Choice("1 if the most attended of *all* visible keys (text and first token included) is in K", "VRH's "
                     "Phi_argmax; OCR Heads, over prompt keys"),
    "argmax_visual": Choice("1 if the most attended key of V is in K: no sink outside the picture can win", "ours"),
    "mean": Choice("sum over K of A, divided by |K|", "ours: the scale on which Figure 5 makes sense"),
    "max": Choice("largest A in K", "ours"),
    "share": Choice("sum over K / (sum over V + 1e-9)", "VERA, as released; no floor, so a head blind to V can win"),
    "lift": Choice("share / (|K| / |V|): 1 for a head that spreads evenly over V", "ours"),
    "hit_inverse": Choice("argmax / |K|: favours small referents", "SparseMM"),
    "sum_calibrated": Choice("sum, minus the same with the expression replaced by N/A", "MMRetHead; QRHead without its "
                             "trimming of keys below mean - 2 sd"),
    "copy": Choice("distinct tokens of K that were the most attended key and equal the token then written, over |K|; "
                   "text only", "Retrieval Heads"),
    "image_mass": Choice("sum over V of A; no referent needed", "Localization Heads' first criterion"),
    "spatial_entropy": Choice("minus the entropy (nats) of the areas of the 8-connected parts of relu(A - mean over "
                              "the map, thumbnail left out); no referent needed, one row only",
                              "Localization Heads' second criterion"),
}  # fmt: skip

SAMPLES = {
    "mean": Choice("mean over all samples, failures included", "VRH"),
    "mean_success": Choice("mean over the samples that the model got right", "Retrieval Heads (ROUGE > 50); ranks like "
                           "OCR Heads' weighting by recall where an answer is all right or all wrong"),
    "frequency": Choice("share of samples that have the head in their top m: frequency(m)", "Localization Heads, m=10; "
                        "VRH's Omega_freq, whose m is not stated: without one, 20, or a tenth of a grid under 200"),
    "active": Choice("share of samples with a value above 0", "OCR Heads, MMRetHead"),
    "rank_mean": Choice("mean over samples of the head's rank, 1 for the best and 0 for the last; ties share", "ours"),
    "median": Choice("median over samples", "ours"),
}  # fmt: skip

EVIDENCE = {
    "any": Choice("tokens whose cell overlaps the box at all, or of the words that hold the answer", "VRH"),
    "centre": Choice("tokens whose cell has its centre in the box", "Gaze Heads"),
    "overlap": Choice("tokens with at least t of their cell in the box: overlap(t)", "ours"),
    "box_share": Choice("tokens that cover at least t of the box: box_share(t)", "OCR Heads, t = 0.001"),
    "soft": Choice("all tokens, weighted by the share of their cell in the box", "ours"),
    "mask": Choice("tokens whose cell holds a pixel of the mask", "ours"),
    "none": Choice("no referent", "Localization Heads"),
}  # fmt: skip

ON_TEXT_ONLY = "copying is defined for text only: a token of a picture is no word that could be written."
ONE_ROW = ("prompt_last", "expression_last")
WITH_NULL = ("prompt_last", "expression", "expression_last", "prompt")
BOX_FREE = ("image_mass", "spatial_entropy")
_NEEDS_NUMBER = {"overlap": (float, "0 < t <= 1"), "box_share": (float, "0 < t < 1"), "frequency": (int, "m >= 1"),
                 "output_one": (int, f"seeds {ONE_SEEDS.start} to {ONE_SEEDS.stop - 1}")}  # fmt: skip
_CALL = re.compile(r"(\w+)\(([\d.]+)\)")


def parameter(axis: str, name: str, known: Mapping[str, Choice]) -> tuple[str, float | int | None]:
    """`frequency(10)` to ("frequency", 10); raises ValueError for an unknown name or a number that is none."""
    found = _CALL.fullmatch(name)
    word = found[1] if found else name
    if word not in known:
        raise store.unknown(axis, name, known)
    kind, allowed = _NEEDS_NUMBER.get(word, (None, ""))
    if kind is None:
        if found:
            raise ValueError(f"{axis} {name!r}: {word} takes no number.")
        return word, None
    if not found and word in ("frequency", "output_one"):
        return word, None  # their defaults
    try:
        value = kind(found[2])
    except (TypeError, ValueError):
        raise ValueError(f"{axis} {name!r}: write {word}(number), with {allowed}.") from None
    good = {"overlap": 0 < value <= 1, "box_share": 0 < value < 1, "frequency": value >= 1,
            "output_one": value in ONE_SEEDS}[word]  # fmt: skip
    if not good:
        raise ValueError(f"{axis} {name!r}: {word} takes {allowed}.")
    return word, value


@dataclass(frozen=True)
class Scoring:
    """One point of the design space, by name; prints as queries/keys/samples.

    `evidence` is "any" unless said otherwise, and "none" for keys that need no referent. `among`: the heads that can be
    chosen, "all", or "looking": Localization Heads' criterion, heads beyond the first sixteenth of the layers (two of
    32) whose mean `image_mass` is not below the elbow of its sorted curve; all others rank behind them. Raises
    ValueError for unknown names and for combinations that mean nothing.
    """

    queries: str
    keys: str
    samples: str = "mean"
    evidence: str = ""
    among: str = "all"

    def __post_init__(self):
        queries, seed = parameter("queries", self.queries, QUERIES)
        if queries == "output_one" and seed is None:
            object.__setattr__(self, "queries", "output_one(0)")
        keys, _ = parameter("keys", self.keys, KEYS)
        parameter("samples", self.samples, SAMPLES)
        free = keys in BOX_FREE
        object.__setattr__(self, "evidence", self.evidence or ("none" if free else "any"))
        evidence, _ = parameter("evidence", self.evidence, EVIDENCE)
        if self.among not in ("all", "looking"):
            raise store.unknown("among", self.among, ("all", "looking"))
        if reason := refusal(queries, keys, evidence):
            raise ValueError(f"{self}: {reason}")

    def __str__(self) -> str:
        more = [self.evidence] * (self.evidence not in ("any", "none")) + [self.among] * (self.among != "all")
        return "/".join([self.queries, self.keys, self.samples, *more])


def refusal(queries: str, keys: str, evidence: str) -> str:
    """Why these three mean nothing together; empty if they do."""
    if keys in BOX_FREE and evidence != "none":
        return f"{keys} looks at the whole picture and takes no evidence tokens; leave evidence out."
    if keys not in BOX_FREE and evidence == "none":
        return f"{keys} measures attention on a referent; name its tokens, e.g. evidence='any'."
    if keys == "spatial_entropy" and queries not in ONE_ROW:
        return f"spatial_entropy describes one map of one row; take queries {' or '.join(ONE_ROW)}."
    if keys == "sum_calibrated" and queries not in WITH_NULL:
        return f"a null question has a reply of its own; only prompt rows compare with it: {', '.join(WITH_NULL)}."
    if keys == "copy" and queries not in ("output", "forced_output"):
        return "copying compares the most attended token with the one that is written next; take queries 'output'."
    if evidence == "soft" and keys not in ("sum", "mean", "share", "lift", "sum_calibrated"):
        return (
            f"{keys} asks whether a token is in the referent; soft tokens are so in part. Take 'any' or 'overlap(t)'."
        )
    return ""


VRH = Scoring("output", "sum", "mean")
"""The paper's choice: output tokens, attention mass on the referent, mean over samples."""


def axes() -> pd.DataFrame:
    """Every value of every axis: axis, value, formula, source."""
    known = {"queries": QUERIES, "keys": KEYS, "samples": SAMPLES, "evidence": EVIDENCE}
    rows = [(axis, name, c.formula, c.source) for axis, choices in known.items() for name, c in choices.items()]
    return pd.DataFrame(rows, columns=["axis", "value", "formula", "source"])


# ---------------------------------------------------------------- samples to one score per head


def _frequency(values: np.ndarray, m: int | None) -> np.ndarray:
    heads = values[0].size
    m = min(m or max(1, min(20, heads // 10)), heads)
    flat = values.reshape(len(values), -1)
    order = np.argsort(-flat, axis=1, kind="stable")[:, :m]  # ties by layer, then head
    order = order[np.take_along_axis(flat, order, 1) > -np.inf]  # who cannot be chosen is not counted
    return np.bincount(order, minlength=heads).reshape(values.shape[1:]) / len(values)


def _few_enough(samples: str, chosen: np.ndarray) -> str:
    """`frequency(m)` with an m that can tell heads apart: where no more than m of them can be chosen, all would be
    chosen in every sample, and m shrinks with the grid (Localization Heads' 10 is for 1,024 heads; it is 1 of 80)."""
    name, m = parameter("samples", samples, SAMPLES)
    scaled = max(1, round((m or 0) * chosen.size / 1024))
    return f"frequency({scaled})" if name == "frequency" and m and m >= chosen.sum() else samples


def _rank_mean(values: np.ndarray) -> np.ndarray:
    ranks = rankdata(values.reshape(len(values), -1), axis=1) - 1
    return ranks.mean(0).reshape(values.shape[1:]) / max(1, ranks.shape[1] - 1)


_POOL: dict[str, Callable[[np.ndarray, int | None], np.ndarray]] = {
    "mean": lambda values, _: values.mean(0),
    "mean_success": lambda values, _: values.mean(0),  # of the right samples, which `SampleScores.score` selects
    "frequency": _frequency,
    "active": lambda values, _: (values > 0).mean(0),
    "rank_mean": lambda values, _: _rank_mean(values),
    "median": lambda values, _: np.median(values, axis=0),
}


def pool(values: np.ndarray, samples: str) -> np.ndarray:
    """Omega: float [samples, layers, heads] to [layers, heads]."""
    name, number = parameter("samples", samples, SAMPLES)
    return _POOL[name](np.asarray(values, dtype=np.float64), number)


def elbow(values: np.ndarray) -> float:
    """The value at the elbow of a sorted curve: the point farthest from the line through its ends (Satopaa 2011).

    The paper of Localization Heads says "maximum curvature" and gives no formula.
    """
    curve = np.sort(np.asarray(values, dtype=float).ravel())
    line = np.linspace(curve[0], curve[-1], curve.size)
    return float(curve[np.argmax(line - curve)])


# ---------------------------------------------------------------- what a captured pass leaves


@dataclass(frozen=True, eq=False)
class SampleScores:
    """Theta(s) of Eq. 1 of every sample and head, for every variant that was captured.

    `values`: (queries, keys, evidence) to float32 [samples, layers, heads], NaN where a sample has no such row (a reply
    without a box has no `output_answer`). `sizes`: |K| by evidence and |V| as "none", int or float [samples]. `right`:
    whether the model answered a sample right. `replies`: its words. `empty`: ids of samples without any reply.
    """

    values: Mapping[tuple[str, str, str], np.ndarray]
    model: str
    benchmark: str
    runs: tuple[str, ...]
    ids: tuple[str, ...]
    sizes: Mapping[str, np.ndarray] = field(default_factory=dict)
    right: np.ndarray | None = None
    replies: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    about: str = ""  # why some evidence is missing

    def __str__(self) -> str:
        words = [f"{self.n} samples of {self.benchmark} scored"]
        if self.right is not None:
            words.append(f"{int(self.right.sum())} answered right")
        if self.empty:
            words.append(f"{len(self.empty)} without a reply, first {self.empty[0]}")
        for queries in sorted({q for q, *_ in self.values}):
            missing = int(np.isnan(self._row(queries)).sum()) - len(self.empty) * (
                "output" in queries and queries != "forced_output"
            )
            words += [f"{missing} without {queries}"] * (missing > 0 and "_one" not in queries)
        return "; ".join(words)

    def _row(self, queries: str) -> np.ndarray:
        return next(v for (q, *_), v in self.values.items() if q == queries)[:, 0, 0]

    @property
    def n(self) -> int:
        return len(self.ids)

    def points(self) -> list[tuple[str, str, str]]:
        """Every (queries, keys, evidence) that can be read off, derived ones included."""
        evidence = ["none", *(e for e in self.sizes if e != "none")]
        queries = dict.fromkeys(q for q, *_ in self.values)
        found = [(q, k, e) for q in queries for k in KEYS for e in evidence]
        return [point for point in found if not self._lacks(*point)]

    def _lacks(self, queries: str, keys: str, evidence: str) -> str:
        """Why a variant cannot be read off; empty if it can."""
        plain = [parameter(a, n, k)[0] for a, n, k in (("queries", queries, QUERIES), ("evidence", evidence, EVIDENCE))]
        if reason := refusal(plain[0], keys, plain[1]):
            return reason
        source = {"mean": "sum", "lift": "share", "hit_inverse": "argmax"}.get(keys, keys)
        needed = [(queries, source, evidence)]
        if keys == "sum_calibrated":
            needed = [(queries, "sum", evidence), (queries, "sum_null", evidence)]
        if all(key in self.values for key in needed):
            return ""
        if keys == "copy":
            text = (queries, keys, "any") in self.values
            return "copying is measured on evidence 'any'." if text else ON_TEXT_ONLY
        if evidence not in self.sizes:
            have = ", ".join(e for e in self.sizes if e != "none") or "none"
            return f"evidence {evidence!r} was not captured (captured: {have}). {self.about}".strip()
        return f"{queries} with {keys} was not captured for {self.benchmark}."

    def theta(self, queries: str, keys: str, evidence: str = "any") -> np.ndarray:
        """Theta(s) of every sample, float64 [samples, layers, heads]. Raises ValueError with the reason if it cannot be
        read off."""
        if reason := self._lacks(queries, keys, evidence):
            raise ValueError(f"{self.model} on {self.benchmark}: {reason}")

        def captured(name: str) -> np.ndarray:
            return np.asarray(self.values[queries, name, evidence], dtype=np.float64)

        size = np.asarray(self.sizes[evidence], dtype=float)[:, None, None]
        if keys == "mean":
            return captured("sum") / size
        if keys == "hit_inverse":
            return captured("argmax") / size
        if keys == "lift":
            return captured("share") * np.asarray(self.sizes["none"], dtype=float)[:, None, None] / size
        if keys == "sum_calibrated":
            return captured("sum") - captured("sum_null")
        return captured(keys)

    def one(self, index: int, head: Head, evidence: str = "any") -> pd.DataFrame:
        """Theta of one sample and head under every queries (rows) and keys (columns) that can be read off."""
        cells = {}
        for queries, keys, near in self.points():
            if near in (evidence, "none"):
                cells.setdefault(keys, {})[queries] = self.theta(queries, keys, near)[index][head]
        return pd.DataFrame(cells)

    def tops(self, scorings: Sequence[Scoring], k: int) -> dict[str, HeadSet]:
        """The first k heads of several points, by their names; fewer where fewer score above 0. Points that these
        samples cannot give are left out, and `score` says why."""
        found = {}
        for scoring in scorings:
            with suppress(ValueError):
                found[str(scoring)] = self.score(scoring).found(k)
        return found

    def score(self, scoring: Scoring, of: Sequence[int] | None = None) -> HeadScores:
        """Pool samples (all, or the chosen indices) into one score per head; `n` says how many counted.

        Samples without such a row are left out. Raises ValueError if none is left, for `mean_success` with the first
        failing reply."""
        values = self.theta(scoring.queries, scoring.keys, scoring.evidence)
        use = ~np.isnan(values[:, 0, 0])
        if of is not None:
            chosen = np.zeros(self.n, bool)
            chosen[np.asarray(of)] = True
            use &= chosen
        if scoring.samples == "mean_success":
            use &= self._succeeded(use)
        if not use.any():
            raise ValueError(f"{self.model} on {self.benchmark}: no sample has a row of {scoring.queries}.")
        values = values[use]
        if scoring.among == "looking":
            chosen = self.looking(scoring.queries, use)
            pooled = pool(np.where(chosen, values, -np.inf), _few_enough(scoring.samples, chosen))
            pooled = np.where(chosen, pooled, pooled[chosen].min() - 1.0)  # the others rank last
        else:
            pooled = pool(values, scoring.samples)
        return HeadScores(pooled, str(scoring), self.model, len(values), self.runs)

    def _succeeded(self, use: np.ndarray) -> np.ndarray:
        if self.right is None:
            raise ValueError(
                f"{self.model}: these scores were read without the model, so nobody knows which replies are right."
            )
        right = self.right
        if not (right & use).any():
            first = next((r for r, wrong in zip(self.replies, use & ~right) if wrong), "")
            raise ValueError(
                f"{self.model} answered none of {int(use.sum())} samples of {self.benchmark} right, so there is no "
                f"mean over successes. The first reply: {first!r}. Look at prompt and reader, or score with 'mean'."
            )
        return right

    def looking(self, queries: str, use: np.ndarray | None = None) -> np.ndarray:
        """Localization Heads' first criterion, bool [layers, heads]; the mean mass decides, not each sample's."""
        mass = self.theta(queries, "image_mass", "none")
        mass = mass[~np.isnan(mass[:, 0, 0]) if use is None else use].mean(0)
        chosen = mass >= elbow(mass)
        skipped = round(len(mass) / 16)
        chosen[:skipped] = False
        if not chosen.any():
            raise ValueError(f"{self.model}: no head beyond the first {skipped} layers looks enough to be chosen.")
        return chosen
