"""Intervals against published tables, closed forms and their own coverage."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_about_95_of_100_intervals_hold_the_true_difference():
    held = 0
    for seed in range(200):
        rng = np.random.default_rng([7, seed])
        b = rng.random(150) < 0.5
        a = np.where(rng.random(150) < 0.4, rng.random(150) < 0.9, b)  # true difference: 0.4 * (0.9 - 0.5)
        found = paired_difference(a, b, seed)
        held += found.low <= 16 <= found.high
    assert 178 <= held <= 198  # 95 % of 200 is 190, three standard deviations are 9


def test_the_bootstrap_is_seeded():
    rng = np.random.default_rng(3)
    a, b = rng.random(80) < 0.6, rng.random(80) < 0.5
    assert paired_difference(a, b, 4) == paired_difference(a, b, 4)
    assert len({paired_difference(a, b, seed).low for seed in range(12)}) > 1


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


@pytest.mark.parametrize("values", [[], [3.0]])
def test_fewer_than_two_seeds_have_no_spread(values):
    with pytest.raises(ValueError, match="at least two"):
        over_seeds(values)


def test_a_seed_without_a_result_is_not_averaged_away():
    with pytest.raises(ValueError):
        over_seeds([50.0, math.nan, 60.0])


def test_an_estimate_prints_its_interval():
    assert str(Estimate(12.34, -1.26, 25.0, 5)) == "12.3 [-1.3, 25.0] (n=5)"
