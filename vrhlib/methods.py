"""Methods that find heads, each as a named point of the design space, with the kind of data its own paper uses.

The same formula on other data is another experiment, and has another name: `vera` are heads found on documents, as its
authors do, `vera@grounding` those of its formula on pictures with boxes. At the level of the paper's Table 2 VERA and
VRH are one method; they differ in data, in the row they read, and in a normalisation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from vrhlib.design_space import SAMPLES, VRH, SampleScores, Scoring, parameter
from vrhlib.heads import HeadScores, HeadSet

FLIPS = ("flip_q", "flip_phi", "flip_omega", "q_union")


def flips(m: int) -> dict[str, Scoring]:
    """VRH with one axis turned (Figure 2, Table A9), and with both query sets at once (Table A8), by the names `FLIPS`.

    `m` of the selection frequency is not stated in the paper; here it is the k at which variants are compared, and with
    another m the heads can be others.
    """
    turned = (
        Scoring("expression", "sum", "mean"),
        Scoring("output", "argmax", "mean"),
        Scoring("output", "sum", f"frequency({m})"),
        Scoring("expression_and_output", "sum", "mean"),
    )
    return dict(zip(FLIPS, turned))


PICKED = tuple(
    Scoring(*point)
    for point in itertools.product(
        ("output", "output_answer", "prompt_last", "expression", "expression_and_output"),
        ("sum", "argmax", "mean", "share"),
        ("mean", "frequency"),
    )
)
"""Points whose heads are cut for the picker of 02_design_space, in one model."""


@dataclass(frozen=True)
class Method:
    """A method as a point of the design space.

    `data`: the kind of data its paper detects heads on, one of `DATA`; `domain` and `causal` are Table 1's columns.
    `deviation`: where the released code, or this library, departs from the paper. `ablation`: how its authors cut.
    `elsewhere`: its formula on grounding data, where its own is not defined there.
    """

    name: str
    title: str
    scoring: Scoring
    data: str
    domain: str
    causal: bool
    paper: str
    deviation: str
    ablation: str
    elsewhere: Scoring | None = None

    @property
    def on_grounding(self) -> Scoring:
        return self.elsewhere or self.scoring


DATA = {
    "grounding": "pictures with a box for each expression",
    "needle": "text with the answer somewhere in it",
    "words": "pictures of rendered words, boxes of the words",
    "pages": "rendered documents, box of the line that holds the answer",
    "pictures": "pictures and expressions, no boxes",
    "comics": "comic strips of six panels, one asked about",
    "mixed documents": "long documents of text and pictures with the answer somewhere in them",
}

METHODS = {m.name: m for m in [
    Method(
        "vrh", "VRH", VRH, "grounding", "general image", True, "Park et al., arXiv 2608.27417",
        "Prompts, overlap rule and row alignment are not stated; here any overlap, rows that predict.",
        "zero output; phase not stated (here prompt and reply)",
    ),
    Method(
        "retrieval_heads", "Retrieval Heads", Scoring("output", "copy", "mean_success"), "needle", "text", True,
        "Wu et al., ICLR 2025",
        "The code adds 1/|k| per step, the paper counts distinct tokens (used here). On a picture nothing can be "
        "copied: there only the argmax is left.",
        "query or logits zeroed: uniform attention; reply only", Scoring("output", "argmax", "mean_success"),
    ),
    Method(
        "qrhead", "QRHead", Scoring("prompt", "sum_calibrated", "mean"), "needle", "text", True,
        "Zhang et al., EMNLP 2025",
        "The code drops keys below mean - 2 sd of their document (not done here), and its BEIR variant scores by NDCG.",
        "none in the code; the paper uses that of Retrieval Heads",
    ),
    Method(
        "ocr_heads", "OCR Heads", Scoring("output_answer_emitted", "argmax", "mean_success", "box_share(0.001)"),
        "words", "visual document", True, "Baek et al., EMNLP 2025",
        "From the code: the rows of the emitted tokens, one step late. It also takes the argmax over prompt keys only, "
        "weights by the recall of the answer, and drops heads active in > 90 % of samples (none of it done here).",
        "zero output; prompt and reply",
    ),
    Method(
        "ocr_heads_aligned", "OCR Heads, aligned",
        Scoring("output_answer", "argmax", "mean_success", "box_share(0.001)"), "words", "visual document", True,
        "Baek et al., EMNLP 2025",
        "OCR Heads with the rows that predict the answer's tokens, as the other methods take them.",
        "zero output; prompt and reply",
    ),
    Method(
        "vera", "VERA", Scoring("prompt_last", "share", "mean"), "pages", "visual document", True,
        "Pei et al., arXiv 2602.10146",
        "From the code (share of visual mass at the last prompt token); under the label of Table 2 it would equal VRH.",
        "o_proj columns zeroed for good; prompt and reply",
    ),
    Method(
        "localization_heads", "Loc. Heads",
        Scoring("expression_last", "spatial_entropy", "frequency(10)", among="looking"), "pictures", "general image",
        False, "Kang et al., CVPR 2025",
        "The code thresholds the head's index, not its mass, and has no frequency; the paper (used here) thresholds "
        "mean mass at the elbow, skips two of 32 layers, and takes the last text token: here that of the expression.",
        "none",
    ),
    Method(
        "gaze_heads", "Gaze Heads", Scoring("prompt_last", "sum", "mean", "centre"), "comics", "general image", True,
        "Gandikota and Bau, arXiv 2606.14703", "Made for six-panel strips; only its formula is used here.",
        "steering by a bias of +-1e4 on the panels",
    ),
    Method(
        "mmret_heads", "MMRetHead", Scoring("expression", "sum_calibrated", "mean"), "mixed documents",
        "text and image", True, "Li et al., arXiv 2605.27243",
        "Detected on long mixed documents; only its formula is used here. Its null question is N/A five times.",
        "zero output; prompt and reply, or reply only",
    ),
    Method(
        "sparsemm", "SparseMM", Scoring("output", "hit_inverse", "mean"), "pages", "visual document", False,
        "code CR400AF-A/SparseMM",
        "Its own data are 1,000 synthetic pages with the box of each word written, words that stand there once; here "
        "pages with the box of the line that holds the answer.", "none (it sizes key-value caches)",
    ),
]}  # fmt: skip

COMPARED = ("retrieval_heads", "qrhead", "ocr_heads", "vera", "localization_heads")
"""The methods of the paper's Tables 1 and 2 and Figure 3, beside VRH."""

_COARSE = {"output": "out", "output_emitted": "out", "output_answer": "out", "output_answer_emitted": "out",
           "prompt_last": "out", "expression": "in", "expression_last": "in", "prompt": "in"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class MethodScores:
    """Head scores by method: `vera` on its own kind of data, `vera@grounding` by its formula on grounding data.

    `captured`: what was captured, by kind of data. `data`: benchmark by method. `nothing`: why a method found no head.
    """

    scores: Mapping[str, HeadScores]
    captured: Mapping[str, SampleScores]
    data: Mapping[str, str]
    nothing: Mapping[str, str]

    def tops(self, k: int, elsewhere: bool = False) -> dict[str, HeadSet]:
        """The first k heads of each method other than VRH on its own data (or `elsewhere`: of each `...@grounding`);
        fewer, or none, where fewer heads score above 0."""
        wanted = {name: s for name, s in self.scores.items() if ("@" in name) == elsewhere and name != "vrh"}
        return {name: s.found(k) for name, s in wanted.items()}

    def variants(self, k: int, m: int) -> dict[str, HeadSet]:
        """The first k heads of VRH and of each of `flips(m)`, on grounding data; fewer where fewer score above 0."""
        return {name: self.captured["grounding"].score(s).found(k) for name, s in {"vrh": VRH, **flips(m)}.items()}

    def table(self) -> pd.DataFrame:
        """A row per method: method, data, n, scored (heads with a score above 0), best (highest score), note (why there
        is none)."""
        rows = []
        for name, data in self.data.items():
            if s := self.scores.get(name):
                rows.append((name, data, s.n, int((s.values > 0).sum()), f"{s.values.max():.3g}", ""))
            else:
                rows.append((name, data, 0, 0, "", self.nothing[name]))
        frame = pd.DataFrame(rows, columns=["method", "data", "n", "scored", "best", "note"])
        frame.attrs["runs"] = sorted({run for c in self.captured.values() for run in c.runs})
        return frame


def method_scores(captured: Mapping[str, SampleScores]) -> MethodScores:
    """Head scores of every method, read off what was captured on each kind of data (`DATA`; "grounding" must be there
    and serves as "pictures", too). Methods whose kind is missing are scored on grounding data only.

    A method without a head above 0, or without a sample that the model got right, has found nothing: a ranking of
    zeros is a ranking of indices. It stands in `nothing` with the reason.
    """
    sets = {"pictures": captured["grounding"], **captured}
    wanted = {m.name: (m.scoring, sets[m.data]) for m in METHODS.values() if m.data in sets}
    for m in METHODS.values():
        if m.data not in ("grounding", "pictures"):
            wanted[f"{m.name}@grounding"] = m.on_grounding, captured["grounding"]
    scores, nothing = {}, {}
    for name, (scoring, samples) in wanted.items():
        try:
            found = samples.score(scoring)
        except ValueError as error:
            nothing[name] = str(error)
            continue
        if found.values.max() > 0:
            scores[name] = found
        else:
            nothing[name] = f"no head scores above 0 on {samples.benchmark} (n={found.n})"
    data = {name: samples.benchmark for name, (_, samples) in wanted.items()}
    return MethodScores(scores, captured, data, nothing)


def prior_work() -> pd.DataFrame:
    """Table 1: what each compared method looks at, and whether its heads were cut: method, domain, causal, source,
    detected on."""
    rows = [(m.title, m.domain, m.causal, m.paper, DATA[m.data]) for m in _compared()]
    return pd.DataFrame(rows, columns=["method", "domain", "causal", "source", "detected on"])


def design_choices() -> pd.DataFrame:
    """Table 2: methods as rows, axes as columns, read off their named points: method, queries, keys, samples, evidence,
    among, detected on, ablation."""
    axes = ["queries", "keys", "samples", "evidence", "among"]
    rows = [(m.title, *(getattr(m.scoring, axis) for axis in axes), DATA[m.data], m.ablation) for m in METHODS.values()]
    return pd.DataFrame(rows, columns=["method", *axes, "detected on", "ablation"])


def coarse_choices() -> pd.DataFrame:
    """Table 2 in the paper's own three words per method: method, Q (in or out), Phi (sum, argmax, N/A), Omega."""
    words = {"copy": "argmax", "share": "sum", "sum_calibrated": "sum", "spatial_entropy": "N/A"}
    pooled = {"mean_success": "avg", "mean": "avg", "frequency": "freq"}
    rows = []
    for m in _compared():
        s = m.scoring
        samples = pooled[parameter("samples", s.samples, SAMPLES)[0]]
        rows.append((m.title, _COARSE[s.queries], words.get(s.keys, s.keys), samples))
    return pd.DataFrame(rows, columns=["method", "Q", "Phi", "Omega"])


def _compared() -> list[Method]:
    return [METHODS[name] for name in (*COMPARED, "vrh")]


def called(scoring: Scoring) -> str:
    """The name of the method or flip that a point is, where there is one; else an empty string."""
    named = {m.on_grounding: m.title for m in METHODS.values()} | {m.scoring: m.title for m in METHODS.values()}
    turns = {"flip_q": "VRH, queries turned", "flip_phi": "VRH, keys turned", "flip_omega": "VRH, samples turned",
             "q_union": "VRH, both query sets"}  # fmt: skip
    m = re.fullmatch(r"frequency\((\d+)\)", scoring.samples)
    turned = {s: turns[name] for name, s in flips(int(m[1]) if m else 1).items()}
    default = Scoring("output", "sum", "frequency")
    return named.get(scoring) or turned.get(scoring, turns["flip_omega"] if scoring == default else "")
