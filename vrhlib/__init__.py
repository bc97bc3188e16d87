"""Visual retrieval heads: find the attention heads that carry what a text refers to, and test that they matter.

    from vrhlib import Ablation, ablation_sweep, detect, grounding, load_vlm

Names are imported when first used, so figures and published numbers need no torch.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "Head": "heads", "HeadSet": "heads", "HeadScores": "heads", "load_heads": "heads", "load_scores": "heads",
    "Box": "boxes", "Reply": "boxes", "TokenGrid": "boxes",
    "Accuracy": "stats", "paired_difference": "stats", "over_seeds": "stats",
    "Sample": "samples", "Samples": "samples", "grounding": "benchmarks", "answering": "benchmarks",
    "compare": "paper", "published": "paper", "published_heads": "paper",
    "VLM": "vlm", "load_vlm": "wiring",
    "Ablation": "attention", "ablate": "attention", "capture": "attention", "generate": "attention",
    "VRH": "design_space", "METHODS": "methods", "Scoring": "design_space",
    "SampleScores": "design_space", "detect": "scoring", "score_samples": "scoring", "stability": "scoring",
    "ablation_sweep": "evaluate", "replies": "evaluate", "accuracy": "evaluate",
}  # fmt: skip
__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"vrhlib has no {name!r}; it exports {', '.join(sorted(_HOME))}.")
    return getattr(importlib.import_module(f"vrhlib.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
