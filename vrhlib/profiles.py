"""A profile is a table of models, benchmarks and sizes; the notebooks and the library are the same for all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Defaults of a profile's notebooks.

    A model's top heads are the fewest that together hold `mass` of all attention on the referent, at most `k`; models
    are also compared at `k` itself, a tenth of a small grid. (Past those that look, a ranking goes on with heads that
    do not, and cutting them is another question.)
    """

    models: tuple[str, ...]
    same_backbone: tuple[tuple[str, str], ...]  # pairs that grew from one language backbone
    benchmark: str
    n_detect: int
    n_test: int
    k: int
    mass: float
    ks: tuple[int, ...]
    control_seeds: tuple[int, ...]
    cost_scales: tuple[int, ...]  # the detection-cost example is enlarged so many times


_PROFILES = {
    "nano": Profile(
        models=("nano-qwen2.5-vl", "nano-internvl3", "nano-qwen3-vl", "nano-internvl3.5"),
        same_backbone=(("nano-qwen2.5-vl", "nano-internvl3"), ("nano-qwen3-vl", "nano-internvl3.5")),
        benchmark="scenes", n_detect=200, n_test=200, k=8, mass=0.9, ks=(1, 2, 4, 8, 12),
        control_seeds=(0, 1, 2, 3, 4), cost_scales=(1, 2, 4, 5),
    ),
}  # fmt: skip


def profile(name: str) -> Profile:
    """The profile's table. Raises ValueError for a profile without one."""
    if name not in _PROFILES:
        raise ValueError(
            f"Profile {name!r} has no models and benchmarks in this version; there is {', '.join(_PROFILES)}."
        )
    return _PROFILES[name]
