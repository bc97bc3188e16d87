"""Data frame to figure, one function per figure, and the files they are saved in.

Every figure is drawn from a tidy frame with one fact a row and nothing else; the frame is saved beside the
picture, and `rebuild` draws it again from the CSV without a model (and without torch). Colours by meaning,
the same on every page and legible without colour: ablating VRHs is vermillion with filled circles, random
heads are grey with a band, layer-matched random heads are blue and dashed, the unmasked model is black.

A module holds the figures of one kind: `scores`, `overlaps`, `conditions` (side by side at one k), `sweeps` (over k),
`tasks` (models x benchmarks), `detection` (what it needs), `training` (what it changes), `performance` (what the
library's shortcuts save), `pictures`, `views` (for the widgets). `style`, `checks` and `output` serve them all.
"""

from vrhlib.figures.conditions import OUTCOMES, VARIANTS, ablation_by_model, outcomes, variants
from vrhlib.figures.detection import cost, few_samples, one_token
from vrhlib.figures.output import Figure, markdown, rebuild, save_table, shown, use_profile
from vrhlib.figures.overlaps import benchmark_overlap, method_overlap, published_heads
from vrhlib.figures.performance import performance
from vrhlib.figures.pictures import attention_maps, before_after, example, reply_rows
from vrhlib.figures.scores import (
    BANDS,
    FLOOR,
    IN_LISTS,
    area_dependence,
    head_map,
    head_maps,
    score_changes,
    score_scatter,
    sorted_scores,
    sparsity,
)
from vrhlib.figures.steering import steering
from vrhlib.figures.style import COLOUR, CONDITIONS, DASH, HATCH, LABEL, MARKER
from vrhlib.figures.sweeps import accuracy_vs_k, prior_methods, transfer, universality
from vrhlib.figures.tasks import cross_task
from vrhlib.figures.training import TRAINED, gains, training_curves
from vrhlib.figures.views import answer_view, design_view, explorer_view, refused

__all__ = [
    "COLOUR", "CONDITIONS", "DASH", "HATCH", "LABEL", "MARKER",
    "Figure", "markdown", "rebuild", "save_table", "shown", "use_profile",
    "BANDS", "FLOOR", "IN_LISTS",
    "area_dependence", "head_map", "head_maps", "score_changes", "score_scatter", "sorted_scores", "sparsity",
    "benchmark_overlap", "method_overlap", "published_heads",
    "OUTCOMES", "VARIANTS", "ablation_by_model", "outcomes", "variants",
    "accuracy_vs_k", "prior_methods", "transfer", "universality",
    "cross_task", "steering",
    "cost", "few_samples", "one_token", "performance",
    "TRAINED", "gains", "training_curves",
    "attention_maps", "before_after", "example", "reply_rows",
    "answer_view", "design_view", "explorer_view", "refused",
]  # fmt: skip
