"""Shares of heads above thresholds: counted by loops, with intervals whose ends can be worked out on paper."""

import itertools

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from vrhlib import sparsity
from vrhlib.boxes import Box
from vrhlib.design_space import SampleScores
from vrhlib.samples import Sample, Samples

GRID = (4, 5)
HEADS = GRID[0] * GRID[1]
MEASURES = ("above_1e-3", "above_5e-3", "between", "below", "half_share", "gini")


def captured(sums: np.ndarray, sizes=None, ids=None, runs=("run",), model: str = "toy") -> SampleScores:
    """Scores of a model from attention sums [samples, layers, heads] over `sizes` evidence tokens a sample."""
    sums = np.asarray(sums, np.float32)
    n = len(sums)
    sizes = np.ones(n) if sizes is None else np.asarray(sizes)
    return SampleScores(
        values={("output", "sum", "any"): sums}, model=model, benchmark="toy", runs=runs,
        ids=tuple(ids or (f"s{i}" for i in range(n))), sizes={"any": sizes, "none": np.full(n, 500)},
    )  # fmt: skip


def flat(*per_sample: float, heads: int = HEADS) -> np.ndarray:
    """One value a sample in the first `heads` heads, 2e-3 in the others, [samples, layers, heads]."""
    values = np.full((len(per_sample), HEADS), 2e-3)
    values[:, :heads] = np.array(per_sample)[:, None]
    return values.reshape(-1, *GRID)


def uneven(n: int = 40) -> np.ndarray:
    """Heads that differ by orders of magnitude, the same in every sample up to a tenth."""
    scale = np.logspace(-5, -0.5, HEADS).reshape(GRID)
    return scale * np.random.default_rng(1).uniform(0.9, 1.1, (n, *GRID))


def counted(means: np.ndarray) -> dict[str, float]:
    """Every measure of one score per head, by loops."""
    heads = sorted(map(float, means.ravel()), reverse=True)
    above = {t: 100 * sum(h > t for h in heads) / len(heads) for t in (1e-3, 5e-3)}
    fewest = next(k for k in range(1, len(heads) + 1) if sum(heads[:k]) >= sum(heads) / 2)
    apart = sum(abs(a - b) for a, b in itertools.product(heads, heads)) / len(heads) ** 2
    return {
        "above_1e-3": above[1e-3], "above_5e-3": above[5e-3], "between": above[1e-3] - above[5e-3],
        "below": 100 - above[1e-3], "half_share": 100 * fewest / len(heads),
        "gini": apart / (2 * sum(heads) / len(heads)),
    }  # fmt: skip


# ---------------------------------------------------------------- bands


def test_bands_equal_loops_over_heads_under_both_readings():
    sums, sizes = uneven(), np.random.default_rng(2).integers(1, 30, 40)
    found = sparsity.bands({"toy": captured(sums, sizes)}).set_index("scoring")
    assert found.index.tolist() == ["sum", "mean"]
    for scoring, values in (("sum", sums), ("mean", sums / sizes[:, None, None])):
        want = counted(values.astype(np.float32).mean(0))
        assert found.loc[scoring, list(MEASURES)].tolist() == pytest.approx([want[m] for m in MEASURES]), scoring
        assert (found.heads[scoring], found.n[scoring]) == (HEADS, 40)
        assert sum(found.loc[scoring, ["above_5e-3", "between", "below"]]) == pytest.approx(100)
    assert (found.loc["sum", list(MEASURES[:4])] != found.loc["mean", list(MEASURES[:4])]).any()


def test_equal_heads_share_equally():
    found = sparsity.bands({"toy": captured(flat(2e-3, 4e-3))}).iloc[0]
    assert (found.half_share, found["between"], found["above_5e-3"]) == (50, 100, 0)
    assert found.gini == pytest.approx(0, abs=1e-9)


def test_the_mean_is_taken_of_each_sample_before_samples_are_averaged():
    # 10 of 20 heads: sums 0.02 and 0.001 over 1 and 100 tokens. Mean of means 0.010005; of sums over tokens 2.1e-4.
    found = sparsity.bands({"toy": captured(flat(0.02, 0.001, heads=10), [1, 100])}).set_index("scoring")
    assert found["above_5e-3"].tolist() == [50, 50]
    assert found["above_1e-3"].tolist() == [100, 100], "the other heads: 2e-3 as a sum, (2e-3 + 2e-5) / 2 as a mean"


def test_a_head_on_the_threshold_is_not_above_it():
    on, over = np.float64(np.float32(5e-3)), np.float64(np.nextafter(np.float32(5e-3), np.float32(1)))
    found = sparsity.bands({"toy": captured(flat(on, on)), "more": captured(flat(over, over), model="more")})
    # float32 puts 5e-3 a little below the threshold, and its neighbour above.
    assert on < 5e-3 < over and found["above_5e-3"].tolist() == [0, 0, 100, 100]


def test_intervals_hold_the_point_and_narrow_to_it_where_samples_are_equal():
    found = sparsity.bands({"toy": captured(uneven())})
    for name, (_, row) in itertools.product(MEASURES, found.iterrows()):
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"], name
    assert (found.gini_low < found.gini_high).all(), "samples differ, and so do resamples"
    equal = sparsity.bands({"toy": captured(np.repeat(uneven(1), 12, 0))})
    for name in MEASURES:
        assert equal[f"{name}_low"].tolist() == pytest.approx(equal[name].tolist()), name
        assert equal[f"{name}_high"].tolist() == pytest.approx(equal[name].tolist()), name


def test_an_interval_is_over_samples():
    # Five heads have 0.1 in one of two samples and nothing in the other: a resample misses them one time in four.
    found = sparsity.bands({"toy": captured(flat(0.1, 0.0, heads=5))}).iloc[0]
    assert (found["above_5e-3"], found["above_5e-3_low"], found["above_5e-3_high"]) == (25, 0, 25)
    assert (found["below_low"], found["below_high"]) == (0, 25)
    # In two of four samples, it misses them with (1/2)^4 = 6 %, more than 2.5; in four of eight, with 0.4 %.
    found = sparsity.bands({"toy": captured(flat(0.1, 0.1, 0.0, 0.0, heads=5))}).iloc[0]
    assert (found["above_5e-3_low"], found["above_5e-3_high"]) == (0, 25)
    found = sparsity.bands({"toy": captured(flat(*[0.1] * 4, *[0.0] * 4, heads=5))}).iloc[0]
    assert (found["above_5e-3_low"], found["above_5e-3_high"]) == (25, 25)


def test_intervals_are_the_same_at_every_call():
    once, again = (sparsity.bands({"toy": captured(uneven())}) for _ in range(2))
    pd.testing.assert_frame_equal(once, again)


def test_samples_without_an_output_row_are_left_out():
    sums, sizes = uneven(), np.arange(1, 41)
    holes = sums.copy()
    holes[[3, 30]] = np.nan
    kept = np.setdiff1d(np.arange(40), [3, 30])
    found = sparsity.bands({"toy": captured(holes, sizes)})
    pd.testing.assert_frame_equal(found, sparsity.bands({"toy": captured(sums[kept], sizes[kept])}))
    assert found.n.tolist() == [38, 38]


def test_runs_of_all_models_stand_behind_both_tables():
    scores = {m: captured(uneven(8), runs=runs, model=m) for m, runs in (("a", ("z", "x")), ("b", ("x", "y")))}
    tables = sparsity.bands(scores), sparsity.by_area(scores, boxed(range(1, 9)), bins=2)
    for table in tables:
        assert table.attrs["runs"] == ["x", "y", "z"]
        assert table.model.drop_duplicates().tolist() == ["a", "b"]


# ---------------------------------------------------------------- what the threshold depends on


def boxed(sides, width: int = 100, height: int = 50) -> Samples:
    """A sample a box; sides (int, square boxes) in pixels, on pictures of one size or of one each."""
    sizes = [(width, height)] * len(sides) if isinstance(width, int) else list(zip(width, height))
    pictures = {size: Image.new("RGB", size) for size in sizes}
    items = [
        Sample(f"s{i}", pictures[size], f"picture {i}", "it", Box(0, 0, side, side))
        for i, (side, size) in enumerate(zip(sides, sizes))
    ]
    return Samples("toy", "detect", items)


def spread(tokens, per_token: float = 1e-4) -> SampleScores:
    """Heads that spread evenly: the sum grows with the referent's tokens, the mean over them does not."""
    return captured(np.repeat(per_token * np.asarray(tokens, float), HEADS).reshape(-1, *GRID), tokens)


def test_a_sum_moves_with_the_referent_and_a_mean_does_not():
    sides = [40, 5, 20, 10, 44, 6, 22, 12]  # shuffled; a token each 5 x 5 pixels
    tokens = [side**2 // 25 for side in sides]
    found = sparsity.by_area({"toy": spread(tokens)}, boxed(sides), bins=4)
    by_keys = {keys: frame.reset_index(drop=True) for keys, frame in found.groupby("keys", sort=False)}
    assert list(by_keys) == ["sum", "mean"] and list(found.columns) == [
        "model", "keys", "area", "share", "low", "high", "n"
    ]  # fmt: skip
    # Bins: sides 5 and 6, 10 and 12, 20 and 22, 40 and 44; tokens 1, 1, 4, 5, 16, 19, 64, 77; 1e-4 for each.
    assert by_keys["sum"].share.tolist() == [0, 0, 0, 100], "of sums only the last two, 6.4e-3 and 7.7e-3, are above"
    assert by_keys["mean"].share.tolist() == [0] * 4
    for frame in by_keys.values():
        pairs = [(5, 6), (10, 12), (20, 22), (40, 44)]
        want = [100 * (a**2 + b**2) / 2 / 5000 for a, b in pairs]
        assert frame.area.tolist() == pytest.approx(want), "percent of the picture, in order"
        assert frame.n.tolist() == [2] * 4


def test_bins_are_cut_by_the_share_of_the_picture_not_by_pixels():
    # The larger the box in pixels, the larger its picture: shares fall from 25 % to 1 %.
    sides, widths = [10, 20, 30, 40], [20, 80, 150, 400]
    found = sparsity.by_area({"toy": spread([100, 80, 1, 1])}, boxed(sides, widths, widths), bins=2)
    sums = found[found["keys"] == "sum"]
    assert sums.area.tolist() == pytest.approx([(4 + 1) / 2, (25 + 6.25) / 2])
    assert sums.share.tolist() == [0, 100], "the first two samples, 100 and 80 tokens, cover most"


def test_samples_are_found_by_id_in_whatever_order_they_were_captured():
    sides = [5, 10, 20, 40]
    tokens = np.array([1, 4, 16, 64])
    order = [2, 0, 3, 1]
    scores = captured(
        np.repeat(1e-4 * tokens[order], HEADS).reshape(-1, *GRID), tokens[order], [f"s{i}" for i in order]
    )
    found = sparsity.by_area({"toy": scores}, boxed(sides), bins=4)
    assert found.share.tolist() == [0, 0, 0, 100, 0, 0, 0, 0]


def test_bins_have_equal_numbers_and_leave_out_samples_without_a_row():
    sides = list(range(5, 49, 4))  # 11 samples: bins of 3, 3, 3 and 2
    scores = spread([side**2 // 5 for side in sides])
    scores.values["output", "sum", "any"][[0, 10]] = np.nan
    found = sparsity.by_area({"toy": scores}, boxed(sides))
    assert found.n.tolist() == [2, 3, 3, 1] * 2
    whole = sparsity.by_area({"toy": spread([side**2 // 5 for side in sides])}, boxed(sides))
    assert whole.n.tolist() == [3, 3, 3, 2] * 2


def test_shares_and_intervals_of_a_bin_are_those_of_its_samples_alone():
    sides, sums = list(range(4, 20)), uneven(16) * np.linspace(0.05, 1, 16)[:, None, None]
    found = sparsity.by_area({"toy": captured(sums)}, boxed(sides), bins=2)
    for row, part in zip(found.itertuples(), (sums[:8], sums[8:])):
        alone = sparsity.bands({"toy": captured(part)}).iloc[0]
        assert (row.share, row.low, row.high) == (
            alone["above_5e-3"], alone["above_5e-3_low"], alone["above_5e-3_high"]
        )  # fmt: skip
        assert row.share == pytest.approx(counted(part.mean(0))["above_5e-3"])
