"""A profile is a table of models, benchmarks and sizes; the notebooks and the library are the same for all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Defaults of a profile's notebooks. `k` heads are "the top heads", at most a tenth of a small grid."""

    models: tuple[str, ...]
    benchmark: str
    pairs: str  # two questions a picture
    n_detect: int
    n_test: int
    k: int
    ks: tuple[int, ...]
    control_seeds: tuple[int, ...]
    cost_scales: tuple[int, ...]  # the detection-cost example is enlarged so many times


_PROFILES = {
    "nano": Profile(
        models=("qwen2.5-vl-nano",), benchmark="scenes", pairs="scene-pairs", n_detect=200, n_test=300, k=6,
        ks=(1, 2, 4, 6), control_seeds=(0, 1, 2, 3, 4), cost_scales=(1, 2, 4, 5),
    ),
}  # fmt: skip


def profile(name: str) -> Profile:
    """The profile's table. Raises ValueError for a profile without one."""
    if name not in _PROFILES:
        raise ValueError(
            f"Profile {name!r} has no models and benchmarks in this version; there is {', '.join(_PROFILES)}."
        )
    return _PROFILES[name]
