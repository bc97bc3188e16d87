"""Intervals against published tables, closed forms and their own coverage."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, bootstrap, sem, t
from statsmodels.stats.proportion import proportion_confint

from vrhlib.stats import Accuracy, Estimate, over_seeds, paired_difference

many = settings(max_examples=200, deadline=None, derandomize=True)


# Newcombe (1998), Table I, method 3: Wilson's score interval without continuity correction.
@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_wilsons_as_published(correct, n, low, high):
    assert Accuracy(correct, n).interval == pytest.approx((100 * low, 100 * high), abs=5e-3)


counts = st.integers(1, 20_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@many
@given(counts)
def test_the_interval_is_the_closed_form_and_holds_the_mean(drawn):
    correct, n = drawn
    p, z = correct / n, 1.959963984540054
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = Accuracy(correct, n).interval
    assert (low, high) == pytest.approx((100 * (centre - half), 100 * (centre + half)), abs=1e-6)
    assert 0 <= low <= Accuracy(correct, n).mean <= high <= 100


@many
@given(counts)
def test_the_interval_is_that_of_statsmodels_in_percent(drawn):
    low, high = proportion_confint(*drawn, alpha=0.05, method="wilson")
    assert Accuracy(*drawn).interval == pytest.approx((100 * low, 100 * high), abs=1e-9)


@pytest.mark.parametrize("n", [50, 200])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_about_95_of_100_wilson_intervals_hold_the_true_accuracy(p, n):
    """Exactly (the pmf of all counts whose interval holds p), and by 20,000 benchmarks of n samples."""
    ends = np.array([Accuracy(correct, n).interval for correct in range(n + 1)])
    holds = (ends[:, 0] <= 100 * p) & (100 * p <= ends[:, 1])
    exact = binom.pmf(np.arange(n + 1), n, p)[holds].sum()
    simulated = holds[np.random.default_rng(n).binomial(n, p, 20_000)].mean()
    assert simulated == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000))
    assert 0.93 <= exact <= 0.975  # counts are whole: it swings about 95 % with p


def test_an_accuracy_prints_mean_standard_error_and_n():
    assert str(Accuracy(863, 1000)) == "86.3 ± 1.1 (n=1000)"
    assert Accuracy(863, 1000).stderr == pytest.approx(1.0873, abs=1e-4)


def test_none_and_all_right_have_a_one_sided_interval():
    none, every = Accuracy(0, 50), Accuracy(50, 50)
    assert (none.mean, none.stderr, every.mean, every.stderr) == (0, 0, 100, 0)
    assert none.interval[0] == 0 and 5 < none.interval[1] < 10
    assert every.interval[1] == 100 and 90 < every.interval[0] < 95
    assert str(none) == "0.0 ± 0.0 (n=50)"


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (-1, 5), (6, 5), (0, -1), (math.nan, 5)])
def test_counts_that_are_no_accuracy_are_refused(correct, n):
    with pytest.raises(ValueError, match="not an accuracy"):
        Accuracy(correct, n)


# ---------------------------------------------------------------- paired differences


def test_identical_answers_differ_by_exactly_nothing():
    answers = np.random.default_rng(0).random(300) < 0.7
    found = paired_difference(answers, answers.copy())
    assert (found.mean, found.low, found.high, found.n) == (0, 0, 0, 300)


def test_a_difference_has_the_sign_of_a_minus_b_in_percentage_points():
    a, b = [True] * 80 + [False] * 20, [True] * 50 + [False] * 50
    found = paired_difference(a, b)
    assert found.mean == pytest.approx(30) and found.n == 100
    assert found.low < 30 < found.high and found.low > 0
    swapped = paired_difference(b, a)
    assert swapped.mean == pytest.approx(-30) and swapped.high < 0


def test_the_interval_of_a_difference_is_paired():
    """A tenth of 1,000 answers flipped: the normal interval of the differences, much narrower than unpaired."""
    rng = np.random.default_rng(1)
    b = rng.random(1000) < 0.6
    a = b ^ (rng.random(1000) < 0.1)
    moved = 100 * (a.astype(float) - b)
    half = 1.96 * moved.std() / math.sqrt(1000)
    found = paired_difference(a, b)
    assert found.mean == pytest.approx(moved.mean())
    assert (found.low, found.high) == pytest.approx((moved.mean() - half, moved.mean() + half), abs=0.25)
    unpaired = 1.96 * math.hypot(Accuracy(int(a.sum()), 1000).stderr, Accuracy(int(b.sum()), 1000).stderr)
    assert found.high - found.low < 0.6 * 2 * unpaired


def pictures(rng, sizes, alike=0.8):
    """Two conditions on `sizes[i]` samples of picture i; a picture answers all its samples alike with chance `alike`.

    a alone is right on 25 %, b alone on 10 %, both on 40 %: the true difference is 15 points. Returns a, b, images.
    """
    images = np.repeat(np.arange(len(sizes)), sizes)
    own, common = rng.random(images.size), rng.random(len(sizes))[images]
    draw = np.where((rng.random(len(sizes)) < alike)[images], common, own)
    return (draw < 0.25) | (draw >= 0.6), (draw >= 0.25) & (draw < 0.35) | (draw >= 0.6), images


def coverage(sizes, given, rounds=1000):
    """How often 1,000 intervals hold the true 15 points; `given` says whether the function learns of the pictures."""
    held = 0
    for seed in range(rounds):
        a, b, images = pictures(np.random.default_rng([7, seed]), sizes)
        found = paired_difference(a, b, images if given else None, seed)
        held += found.low <= 15 <= found.high
    return held / rounds


# One in twenty may miss. 1,000 rounds leave a standard error of 0.7 points; a percentile bootstrap of 50 pictures is
# itself a little too narrow (by the normal 94.2 %).
@pytest.mark.parametrize("sizes", [[1] * 50, [3] * 50], ids=["one sample a picture", "three"])
def test_about_95_of_100_intervals_hold_the_true_difference(sizes):
    assert 0.925 <= coverage(sizes, given=True) <= 0.97


def test_intervals_that_do_not_know_of_pictures_miss_the_true_difference_far_too_often():
    assert 0.65 <= coverage([3] * 50, given=False) <= 0.85  # sqrt(1 + 2 * 0.8) too narrow: 77.6 % by the normal


def test_the_pictures_of_this_simulation_differ_by_15_points_and_answer_alike():
    a, b, images = pictures(np.random.default_rng(0), [3] * 20_000)
    moved = (a.astype(int) - b).reshape(-1, 3)
    assert moved.mean() == pytest.approx(0.15, abs=0.01) and (a & b).mean() == pytest.approx(0.4, abs=0.01)
    assert np.corrcoef(moved.T)[0, 1:] == pytest.approx([0.8, 0.8], abs=0.02)


@pytest.mark.parametrize("keys", [np.arange, lambda n: [f"picture {i}" for i in range(n)], lambda n: range(n, 0, -1)])
def test_one_picture_a_sample_is_no_picture_at_all(keys):
    rng = np.random.default_rng(5)
    a, b = rng.random(60) < 0.7, rng.random(60) < 0.5
    assert paired_difference(a, b, keys(60), 3) == paired_difference(a, b, seed=3)


def test_without_pictures_the_interval_is_that_of_a_bootstrap_of_the_mean():
    a, b, _ = pictures(np.random.default_rng(6), [1] * 70)
    moved = 100 * (a.astype(float) - b)
    plain = bootstrap((moved,), np.mean, n_resamples=2000, method="percentile", rng=np.random.default_rng(3))
    found = paired_difference(a, b, seed=3)
    assert (found.low, found.high) == pytest.approx(tuple(plain.confidence_interval))


def test_pictures_are_resampled_with_all_their_samples():
    """Against a loop that puts pictures together again, on pictures of one to eight samples in mixed order."""
    rng = np.random.default_rng(8)
    a, b, images = pictures(rng, rng.integers(1, 9, 30))
    mixed = rng.permutation(images.size)
    a, b, images = a[mixed], b[mixed], images[mixed]
    moved = [100 * (a[images == i].astype(float) - b[images == i]) for i in range(30)]
    means = [np.concatenate([moved[i] for i in rng.integers(0, 30, 30)]).mean() for _ in range(20_000)]
    names = [f"picture {i}" for i in images]
    found = [paired_difference(a, b, names, seed) for seed in range(10)]
    assert {f.n for f in found} == {images.size}
    assert [f.mean for f in found] == pytest.approx([100 * (a.mean() - b.mean())] * 10)
    # one end has an error of 6 % of the standard deviation of the mean, ten together 2 %
    error = 0.09 * np.std(means)
    assert np.mean([f.low for f in found]) == pytest.approx(np.percentile(means, 2.5), abs=error)
    assert np.mean([f.high for f in found]) == pytest.approx(np.percentile(means, 97.5), abs=error)


def test_samples_asked_twice_are_no_more_evidence_than_once():
    a, b, images = pictures(np.random.default_rng(9), [1] * 150)
    twice = np.repeat([a, b, images], 2, axis=1)
    once, known, unknown = (
        [paired_difference(*args, seed=seed) for seed in range(8)]
        for args in ((a, b), (*twice[:2], twice[2]), twice[:2])
    )
    assert [(k.mean, k.low, k.high) for k in known] == [pytest.approx((o.mean, o.low, o.high)) for o in once]
    assert {k.n for k in known} == {300} and {o.n for o in once} == {150}
    width = [np.mean([e.high - e.low for e in found]) for found in (once, unknown)]
    assert width[0] / width[1] == pytest.approx(math.sqrt(2), rel=0.06)


def test_the_order_of_samples_within_and_among_pictures_changes_only_the_draw():
    a, b, images = pictures(np.random.default_rng(10), [3] * 40)
    order = np.lexsort((np.arange(120) * 7 % 5, images))  # other order in the pictures, the same of the pictures
    assert paired_difference(a[order], b[order], images[order]) == paired_difference(a, b, images)


@pytest.mark.parametrize("images", [[1, 2], [1, 2, 3, 4], []])
def test_a_key_too_few_or_too_many_is_refused(images):
    with pytest.raises(ValueError, match=f"{len(images)} images for 3 answers: give one key"):
        paired_difference([True, False, True], [True, True, False], images)


def test_the_bootstrap_is_seeded():
    rng = np.random.default_rng(3)
    a, b = rng.random(80) < 0.6, rng.random(80) < 0.5
    assert paired_difference(a, b, seed=4) == paired_difference(a, b, seed=4)
    assert len({paired_difference(a, b, seed=seed).low for seed in range(12)}) > 1


@pytest.mark.parametrize(
    ("a", "b"), [([True], [True, False, True]), ([True, False], [True]), ([True, False], [True] * 3)]
)
def test_answers_to_other_numbers_of_questions_are_not_paired(a, b):
    with pytest.raises(ValueError, match=r"(?i)same|pair|length"):
        paired_difference(a, b)


@pytest.mark.filterwarnings("error")
def test_no_answers_have_no_difference():
    with pytest.raises(ValueError, match=r"(?i)empty|no sample|nothing|at least one"):
        paired_difference([], [])


# ---------------------------------------------------------------- seeds


def test_the_interval_over_seeds_is_students():
    found = over_seeds([1, 2, 3, 4, 5])
    half = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.mean, found.low, found.high, found.n) == (
        3, pytest.approx(3 - half, abs=1e-6), pytest.approx(3 + half, abs=1e-6), 5
    )  # fmt: skip
    two = over_seeds([10.0, 12.0])
    assert two.high - two.mean == pytest.approx(12.7062047, abs=1e-6)


@many
@given(st.lists(st.integers(0, 100), min_size=2, max_size=9))
def test_the_mean_over_seeds_lies_in_its_interval(values):
    found = over_seeds(values)
    assert found.mean == pytest.approx(float(Fraction(sum(values), len(values))))
    assert found.low <= found.mean <= found.high and found.n == len(values)


@many
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9).filter(lambda values: np.std(values) > 1e-6))
def test_the_interval_over_seeds_is_that_of_scipy(values):
    found, n = over_seeds(values), len(values)
    low, high = t.interval(0.95, n - 1, loc=np.mean(values), scale=sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-7)


def test_about_95_of_100_intervals_over_five_seeds_hold_the_true_mean():
    noise = np.random.default_rng(11).normal(60, 3, (2000, 5))
    found = [over_seeds(five) for five in noise]
    held = np.mean([f.low <= 60 <= f.high for f in found])
    assert held == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 2000))
    normal = np.abs(noise.mean(1) - 60) < 1.96 * noise.std(1, ddof=1) / math.sqrt(5)
    assert normal.mean() < 0.91, "which five seeds do need: 1.96 standard errors hold 88 %"


@pytest.mark.parametrize("values", [[], [3.0]])
def test_fewer_than_two_seeds_have_no_spread(values):
    with pytest.raises(ValueError, match="at least two"):
        over_seeds(values)


def test_a_seed_without_a_result_is_not_averaged_away():
    with pytest.raises(ValueError):
        over_seeds([50.0, math.nan, 60.0])


def test_an_estimate_prints_its_interval():
    assert str(Estimate(12.34, -1.26, 25.0, 5)) == "12.3 [-1.3, 25.0] (n=5)"


def test_samples_about_one_picture_have_no_spread():
    with pytest.raises(ValueError, match="All 3 samples are about one picture.*two or more"):
        paired_difference([1, 0, 1], [0, 0, 1], ["a", "a", "a"])
    same = paired_difference([1, 0], [0, 0], ["a", "b"])
    assert paired_difference([1, 0], [0, 0], [(1, 2), None]) == same == paired_difference([1, 0], [0, 0], [1, "1"])
