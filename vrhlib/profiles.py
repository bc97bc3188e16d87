"""Models, and profiles: tables of models, benchmarks and sizes. The notebooks and the library are the same for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vrhlib import store


@dataclass(frozen=True)
class Pin:
    """A model by name: where it is and what it is. A model of a known class needs this row and nothing else.

    `source`: folder below the repository, or Hub id; `revision`: its commit. `grid`: layers x query heads, checked at
    load. `gb`: the weights in bfloat16. `visual_tokens`: of a picture of 640 x 480, for estimates. `rows`: sequences
    that run at once (fewer where memory is short). `prompt` replaces that of the family (`vlm.FAMILIES`), where prompt,
    frame of the numbers, reader of the reply and token grid are told.
    """

    source: str
    revision: str | None
    profile: str
    grid: tuple[int, int] | None = None
    backbone: str = ""
    published: str = ""  # its name in the paper's tables
    family: str = ""
    gb: float = 0.0
    visual_tokens: int = 0
    rows: int = 128
    max_new_tokens: int = 128
    prompt: str | None = None


def _nano(name: str, family: str, backbone: str) -> Pin:
    return Pin(f"data/nano/{name}", None, "nano", (10, 8), backbone, family=family, max_new_tokens=16)


_QWEN25, _QWEN3 = (28, 28), (36, 32)
MODELS = {
    "nano-qwen2.5-vl": _nano("nano-qwen2.5-vl", "qwen2_5_vl", "A"),
    "nano-internvl3": _nano("nano-internvl3", "internvl", "A"),
    "nano-qwen3-vl": _nano("nano-qwen3-vl", "qwen3_vl", "B"),
    "nano-internvl3.5": _nano("nano-internvl3.5", "internvl", "B"),
    "qwen2.5-vl-7b": Pin(
        "Qwen/Qwen2.5-VL-7B-Instruct", "cc594898137f460bfe9f0759e9844b3ce807cfb5", "paper", _QWEN25, "Qwen2.5-7B",
        "Qwen2.5-VL-7B", "qwen2_5_vl", gb=16.6, visual_tokens=391, rows=48,
    ),
    "qwen3-vl-8b": Pin(
        "Qwen/Qwen3-VL-8B-Instruct", "0c351dd01ed87e9c1b53cbc748cba10e6187ff3b", "paper", _QWEN3, "Qwen3-8B",
        "Qwen3-VL-8B", "qwen3_vl", gb=17.5, visual_tokens=300, rows=48,
    ),
    "internvl3-8b": Pin(
        "OpenGVLab/InternVL3-8B-hf", "259a3b64a14623c0ec91a045cb43f7c5af5fa6af", "paper", _QWEN25, "Qwen2.5-7B",
        "InternVL3-8B", "internvl", gb=15.9, visual_tokens=3328, rows=16,
    ),
    "internvl3.5-8b": Pin(
        "OpenGVLab/InternVL3_5-8B-HF", "741a7d03020411e666c6109218ab71e08151ef86", "paper", _QWEN3, "Qwen3-8B",
        "InternVL3.5-8B", "internvl", gb=17.1, visual_tokens=3328, rows=16,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Defaults of a profile's notebooks. Heads are found on the first of `benchmarks`.

    A model's top heads are the fewest that together hold `mass` of all attention on the referent, at most `k`; models
    are also compared at `k` itself. (In a small grid a ranking soon goes on with heads that do not look, and cutting
    them is another question; the paper cuts 20, whatever they hold: there `mass` is 1.)
    """

    models: tuple[str, ...]
    same_backbone: tuple[tuple[str, str], ...]  # pairs that grew from one language backbone
    benchmarks: tuple[str, ...]
    n_detect: int
    n_test: int
    n_pairs: int  # expressions of the two-question test
    k: int
    mass: float
    ks: tuple[int, ...]
    control_seeds: tuple[int, ...]
    cost_scales: tuple[int, ...]  # the detection-cost example is enlarged so many times
    variant_ks: tuple[int, ...]  # at which scoring variants are compared (Table A9), and
    variant_k: int  # the one of Figure 2
    n_variants: int  # test samples of these comparisons, which take many cuts
    prior_data: Mapping[str, str]  # kind of data that an earlier method finds heads on (`design_space.DATA`): benchmark
    n_prior: int  # samples of each
    families: Mapping[str, tuple[str, ...]]  # of grounding benchmarks, on which heads are cut that `benchmarks` found
    n_universal: int  # test samples of each
    universal_ks: tuple[int, ...]  # (controls are cut at the top heads' number and at k)
    n_elsewhere: int  # samples of each of these benchmarks on which heads are found once more, to compare the lists
    questions: tuple[str, ...]  # benchmarks answered in words, on which heads are cut that `benchmarks` found, and
    text_only: str  # one without pictures
    n_questions: int  # samples of each
    dpo_models: tuple[str, ...]  # trained on preference pairs, and
    dpo_data: Mapping[str, str]  # benchmark (its split train) that the pairs are about: benchmark that is tested
    n_pairs_dpo: int  # pairs of each kind, over all of `dpo_data`
    n_dpo: int  # test samples of each
    dpo_seeds: tuple[int, ...]
    recipe: Mapping[str, object]  # `dpo.Recipe`
    n_steer: int  # expressions, two a picture, that heads are made to look elsewhere for
    steer_ks: tuple[int, ...]  # numbers of heads that do (controls at the top heads' number)


_PROFILES = {
    "nano": Profile(
        models=("nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5"),
        same_backbone=(("nano-qwen2.5-vl", "nano-internvl3"), ("nano-qwen3-vl", "nano-internvl3.5")),
        benchmarks=("scenes",), n_detect=200, n_test=200, n_pairs=200, k=8, mass=0.9, ks=(1, 2, 4, 8, 12),
        control_seeds=(0, 1, 2, 3, 4), cost_scales=(1, 2, 4, 5),
        variant_ks=(2, 5, 8), variant_k=5, n_variants=100, n_prior=100,
        prior_data={"needle": "needle", "words": "rendered-words", "pages": "rendered-list"},
        families={"referring expressions": ("scenes", "scenes-plus", "scenes-g"), "place": ("scenes-spatial",),
                  "question to box": ("scenes-question",)},
        n_universal=100, universal_ks=(1, 2, 4, 8), n_elsewhere=100,
        questions=("scenes-attribute", "scenes-single", "scenes-width", "scenes-cv", "scenes-mixed", "scenes-count",
                   "scenes-math"), text_only="needle", n_questions=100,
        # Benchmarks on which this model is right in 80 to 85 %: on `scenes` there is less to gain.
        dpo_models=("nano-internvl3",), n_pairs_dpo=144, n_dpo=200, dpo_seeds=(0, 1, 2),
        dpo_data={name: name for name in ("scenes-g", "scenes-spatial", "scenes-question")},
        recipe={"method": "lora", "learning_rate": 1e-3, "epochs": 1, "batch_size": 16, "at_once": 16},
        n_steer=40, steer_ks=(1, 2, 4, 8),
    ),
    "paper": Profile(
        models=("qwen2.5-vl-7b", "qwen3-vl-8b", "internvl3-8b", "internvl3.5-8b"),
        same_backbone=(("qwen2.5-vl-7b", "internvl3-8b"), ("qwen3-vl-8b", "internvl3.5-8b")),
        benchmarks=("refcoco",), n_detect=200, n_test=1000, n_pairs=500, k=20, mass=1.0, ks=(1, 3, 5, 10, 20),
        control_seeds=(0, 1, 2, 3, 4), cost_scales=(1, 2),
        variant_ks=(5, 10, 20, 50), variant_k=20, n_variants=1000, n_prior=200,
        prior_data={"needle": "needle-text", "words": "word-pictures", "pages": "pages"},
        families={"referring expressions": ("refcoco", "refcoco+", "refcocog"), "place": ("refspatial",),
                  "question to box": ("toloka",)},
        n_universal=500, universal_ks=(1, 3, 5, 10, 20), n_elsewhere=200,
        questions=("vaw-mcq", "spatial457", "spatialrgpt", "cv-bench", "mmstar", "countbenchqa", "mathvista"),
        text_only="needle-text", n_questions=500,
        dpo_models=("qwen2.5-vl-7b",), n_pairs_dpo=6000, n_dpo=1000, dpo_seeds=(0, 1, 2),
        dpo_data={"refcoco-train": "refcoco", "refcoco+-train": "refcoco+", "refcocog-train": "refcocog"},
        recipe={"method": "lora", "learning_rate": 1e-5, "epochs": 4, "batch_size": 16, "at_once": 1},
        n_steer=200, steer_ks=(5, 10, 20, 50),
    ),
}  # fmt: skip


def profile(name: str) -> Profile:
    """The profile's table. Raises ValueError for a profile that there is not."""
    if name not in _PROFILES:
        raise store.unknown("profile", name, _PROFILES)
    return _PROFILES[name]
