"""The design space without a model: what is refused, and each axis against loops by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vrhlib.design_space import (
    BOX_FREE,
    EVIDENCE,
    KEYS,
    ONE_SEEDS,
    QUERIES,
    SAMPLES,
    VRH,
    WITH_NULL,
    SampleScores,
    Scoring,
    axes,
    elbow,
    pool,
)
from vrhlib.heads import Head
from vrhlib.scoring import component_entropy

light = settings(max_examples=60, deadline=None, derandomize=True)

# ---------------------------------------------------------------- what is refused

REFUSED = [  # queries, keys, samples, evidence, words of the reason
    ("output", "spatial_entropy", "mean", "", "one map of one row; take queries prompt_last or expression_last"),
    ("expression", "spatial_entropy", "mean", "", "one map of one row"),
    ("output_one", "spatial_entropy", "mean", "", "one map of one row"),
    ("output", "sum_calibrated", "mean", "", "a null question has a reply of its own"),
    ("output_answer", "sum_calibrated", "mean", "", "only prompt rows compare with it: prompt_last"),
    ("expression_and_output", "sum_calibrated", "mean", "", "a null question has a reply of its own"),
    ("forced_output", "sum_calibrated", "mean", "", "a null question has a reply of its own"),
    ("prompt_last", "copy", "mean", "", "written next; take queries 'output'"),
    ("output_emitted", "copy", "mean", "", "written next"),
    ("output", "copy", "mean", "soft", "soft tokens are so in part"),
    ("output", "argmax", "mean", "soft", "Take 'any' or 'overlap"),
    ("output", "argmax_visual", "mean", "soft", "argmax_visual asks whether a token is in the referent"),
    ("output", "hit_inverse", "mean", "soft", "soft tokens are so in part"),
    ("output", "max", "mean", "soft", "soft tokens are so in part"),
    ("output", "image_mass", "mean", "any", "takes no evidence tokens; leave evidence out"),
    ("prompt_last", "spatial_entropy", "mean", "mask", "takes no evidence tokens"),
    ("output", "sum", "mean", "none", "name its tokens, e.g. evidence='any'"),
    ("output", "sum", "mean", "overlap(2)", "overlap takes 0 < t <= 1"),
    ("output", "sum", "mean", "overlap(0)", "overlap takes 0 < t <= 1"),
    ("output", "sum", "mean", "overlap", r"write overlap\(number\), with 0 < t <= 1"),
    ("output", "sum", "mean", "overlap(1.2.3)", r"write overlap\(number\)"),
    ("output", "sum", "mean", "box_share(1)", "box_share takes 0 < t < 1"),
    ("output", "sum", "mean", "box_share", r"write box_share\(number\), with 0 < t < 1"),
    ("output", "sum", "mean", "any(1)", "any takes no number"),
    ("output", "sum", "mean", "maks", "Did you mean 'mask'"),
    ("output", "sum", "frequency(0)", "", "frequency takes m >= 1"),
    ("output", "sum", "frequency(2.5)", "", r"write frequency\(number\), with m >= 1"),
    ("output", "sum", "frequency(x)", "", "frequency"),
    ("output", "sum", "frequency(-1)", "", "frequency"),
    ("output", "sum", "mean(3)", "", "mean takes no number"),
    ("output", "sum", "men", "", "Did you mean 'mean'"),
    ("output", "sum", "xyz", "", "there are 'mean', 'mean_success', 'frequency'"),
    ("output_one(9)", "sum", "mean", "", "output_one takes seeds 0 to 4"),
    ("output_one(x)", "sum", "mean", "", "output_one"),
    ("output(1)", "sum", "mean", "", "output takes no number"),
    ("outputs", "sum", "mean", "", "Did you mean 'output'"),
    ("output", "argmx", "mean", "", "Did you mean 'argmax'"),
    ("output", "sum(2)", "mean", "", "sum takes no number"),
    ("output", "sum_null", "mean", "", "sum"),
]


@pytest.mark.parametrize("queries, keys, samples, evidence, reason", REFUSED)
def test_what_means_nothing_is_refused_with_the_reason(queries, keys, samples, evidence, reason):
    with pytest.raises(ValueError, match=reason):
        Scoring(queries, keys, samples, evidence)


def test_an_unknown_choice_of_heads_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'looking'"):
        Scoring("output", "sum", "mean", among="lookin")


def allowed(queries: str, keys: str, evidence: str) -> bool:
    """What can be combined, told once more: one line per sentence of the description."""
    return all([
        (evidence == "none") == (keys in ("image_mass", "spatial_entropy")),
        keys != "spatial_entropy" or queries in ("prompt_last", "expression_last"),
        keys != "sum_calibrated" or queries in ("prompt_last", "prompt", "expression", "expression_last"),
        keys != "copy" or queries in ("output", "forced_output"),
        evidence != "soft" or keys in ("sum", "mean", "share", "lift", "sum_calibrated"),
    ])  # fmt: skip


EVERY_EVIDENCE = ("any", "centre", "overlap(0.5)", "box_share(0.001)", "soft", "mask", "none")


def test_every_combination_is_a_scoring_or_is_refused():
    assert {e.partition("(")[0] for e in EVERY_EVIDENCE} == set(EVIDENCE)
    for queries, keys, evidence in itertools.product(QUERIES, KEYS, EVERY_EVIDENCE):
        if allowed(queries, keys, evidence):
            assert Scoring(queries, keys, evidence=evidence).evidence == evidence
        else:
            with pytest.raises(ValueError, match=f"/{keys}/"):
                Scoring(queries, keys, evidence=evidence)


def test_a_scoring_prints_its_choices_and_fills_in_the_defaults():
    assert str(VRH) == "output/sum/mean" and VRH.evidence == "any"
    assert Scoring("output_one", "sum") == Scoring("output_one(0)", "sum", "mean", "any", "all")
    assert Scoring("prompt_last", "image_mass").evidence == "none"
    assert str(Scoring("prompt_last", "sum", "mean", "centre")) == "prompt_last/sum/mean/centre"
    whole = Scoring("expression_last", "spatial_entropy", "frequency(10)", among="looking")
    assert str(whole) == "expression_last/spatial_entropy/frequency(10)/looking"
    for axis in (QUERIES, KEYS, SAMPLES, EVIDENCE):
        assert all(choice.formula and str(choice).endswith(f"({choice.source})") for choice in axis.values())


# ---------------------------------------------------------------- samples to one score per head


def ranked(sample: np.ndarray) -> list[tuple[int, int]]:
    return sorted(np.ndindex(*sample.shape), key=lambda h: (-sample[h], h))


def top_m(values: np.ndarray, m: int) -> np.ndarray:
    count = np.zeros(values.shape[1:])
    for sample in values:
        for h in ranked(sample)[:m]:
            count[h] += 1 / len(values)
    return count


def mean_rank(values: np.ndarray) -> np.ndarray:
    """1 for the best and 0 for the last; a head that ties with others has the middle of their places."""
    out = np.zeros(values.shape[1:])
    for sample in values:
        flat = sample.ravel().tolist()
        for h in np.ndindex(*sample.shape):
            below, same = sum(v < sample[h] for v in flat), sum(v == sample[h] for v in flat)
            out[h] += (below + (same - 1) / 2) / (len(flat) - 1) / len(values)
    return out


def middle(values: np.ndarray) -> np.ndarray:
    out = np.zeros(values.shape[1:])
    for h in np.ndindex(*out.shape):
        v, n = sorted(values[(slice(None), *h)].tolist()), len(values)
        out[h] = v[n // 2] if n % 2 else (v[n // 2 - 1] + v[n // 2]) / 2
    return out


def by_loop(values: np.ndarray, samples: str) -> np.ndarray:
    n = len(values)
    if samples == "mean":
        return sum(values) / n
    if samples == "active":
        return sum((v > 0).astype(float) for v in values) / n
    if samples.startswith("frequency("):
        return top_m(values, min(int(samples[10:-1]), values[0].size))
    return {"rank_mean": mean_rank, "median": middle}[samples](values)


@pytest.mark.parametrize("samples", ["mean", "active", "frequency(1)", "frequency(5)", "frequency(99)", "rank_mean",
                                     "median"])  # fmt: skip
@pytest.mark.parametrize("n", [1, 2, 7])
def test_samples_are_pooled_as_loops_pool_them(samples, n):
    values = np.random.default_rng(n).normal(size=(n, 4, 6)).round(1)  # rounded: ties
    assert len(np.unique(values[0])) < 24
    np.testing.assert_allclose(pool(values, samples), by_loop(values, samples), atol=1e-12)


@pytest.mark.parametrize(("grid", "m"), [((3, 8), 2), ((5, 10), 5), ((10, 30), 20), ((2, 3), 1)])
def test_frequency_without_a_number_takes_20_or_a_tenth_of_a_small_grid(grid, m):
    values = np.random.default_rng(0).random((17, *grid)).round(1)
    np.testing.assert_allclose(pool(values, "frequency"), top_m(values, m))
    np.testing.assert_allclose(pool(values, "frequency"), pool(values, f"frequency({m})"))


def test_frequency_does_not_count_heads_that_cannot_be_chosen():
    values = np.array([[[-np.inf, 2.0, 1.0]], [[3.0, -np.inf, -np.inf]]])
    assert pool(values, "frequency(2)").tolist() == [[0.5, 0.5, 0.5]]


finite = st.floats(-1, 1, width=32)
few = arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4)), elements=finite)


@light
@given(few, st.integers(1, 30))
def test_frequency_adds_up_to_m(values, m):
    assert pool(values, f"frequency({m})").sum() == pytest.approx(min(m, values[0].size))


@light
@given(few)
def test_rank_mean_sees_only_the_order(values):
    values = values.round(2)  # so that no two values merge when they are transformed
    want = pool(values, "rank_mean")
    for change in (np.exp, lambda v: v**3 + v, lambda v: 5 * v - 3):
        np.testing.assert_allclose(pool(change(values), "rank_mean"), want, atol=1e-12)
    np.testing.assert_allclose(pool(-values, "rank_mean"), 1 - want, atol=1e-12)


def test_an_unknown_way_of_pooling_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'median'"):
        pool(np.zeros((1, 2, 2)), "medan")


def farthest_from_the_line(values) -> float:
    curve = sorted(np.ravel(values).tolist())
    n = len(curve)
    below = [curve[0] + (curve[-1] - curve[0]) * i / (n - 1) - curve[i] for i in range(n)]
    return curve[max(range(n), key=lambda i: below[i])]


@light
@given(arrays(float, st.integers(3, 30), elements=st.floats(0, 1, width=16)))
def test_the_elbow_is_the_point_farthest_below_the_line_through_the_ends(values):
    found, curve = elbow(values), np.sort(values)
    line = np.linspace(curve[0], curve[-1], len(curve))
    deepest = (line - curve).max()
    assert any(math.isclose(line[i] - v, deepest, abs_tol=1e-12) for i, v in enumerate(curve) if v == found)


def test_the_elbow_of_a_curve_drawn_by_hand():
    values = [0.9, 0.1, 0.0, 0.15, 0.05, 0.2]  # sorted: flat up to 0.2, then steep
    assert elbow(np.array(values).reshape(2, 3)) == 0.2 == farthest_from_the_line(values)


# ---------------------------------------------------------------- the parts of a map


def flood(todo: set[tuple[int, int]]) -> list[int]:
    """Areas of the 8-connected parts of a set of places (row, column), which it empties."""
    areas = []
    while todo:
        stack, area = [todo.pop()], 0
        while stack:
            r, c = stack.pop()
            area += 1
            near = {(r + i, c + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & todo
            todo -= near
            stack += near
        areas.append(area)
    return areas


def entropy_by_hand(map_: np.ndarray) -> float:
    areas = flood(set(zip(*np.nonzero(map_ > map_.mean()))))
    return -sum(a / sum(areas) * math.log(a / sum(areas)) for a in areas) if areas else math.log(map_.size)


maps = arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)),
              elements=st.sampled_from([0.0, 0.0, 0.25, 1.0]))  # fmt: skip


@light
@given(maps)
def test_entropy_of_parts_is_that_of_a_flood_fill(drawn):
    np.testing.assert_allclose(component_entropy(drawn), [entropy_by_hand(m) for m in drawn], atol=1e-12)


@light
@given(maps)
def test_entropy_of_parts_does_not_change_when_maps_are_turned_over(drawn):
    want = component_entropy(drawn)
    for turned in (drawn[:, ::-1], drawn[:, :, ::-1], drawn.transpose(0, 2, 1)):
        np.testing.assert_allclose(component_entropy(turned), want, atol=1e-12)
    np.testing.assert_allclose(component_entropy(drawn[::-1]), want[::-1], atol=1e-12)


def test_one_part_has_no_entropy_and_n_equal_parts_have_log_n():
    one, four, corners, flat = np.zeros((4, 5, 5))
    one[1:3, 1:4] = 1
    four[::4, ::4] = 1
    corners[[0, 1, 2], [0, 1, 2]] = 1  # they touch at corners: one part
    np.testing.assert_allclose(component_entropy(np.stack([one, four, corners, flat])), [0, np.log(4), 0, np.log(25)])


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, 1e-9])
@pytest.mark.parametrize("shape", [(3, 3), (7, 9), (1, 6)])
def test_a_map_of_equal_values_is_as_spread_out_as_can_be(value, shape):
    """Its mean may come out a last bit below the values."""
    for dtype in (np.float32, np.float64):
        found = component_entropy(np.full((2, *shape), value, dtype))
        np.testing.assert_allclose(found, np.log(shape[0] * shape[1]))


# ---------------------------------------------------------------- reading variants off


def scores(values: dict, **more) -> SampleScores:
    """Scores of made-up samples; |K| is 1 and |V| 4 unless said otherwise."""
    n = len(next(iter(values.values())))
    more = {"sizes": {e: np.ones(n) for *_, e in values if e != "none"} | {"none": np.full(n, 4)}} | more
    ids = tuple(f"s{i}" for i in range(n))
    return SampleScores({k: np.asarray(v, np.float32) for k, v in values.items()}, "model", "noise", ("run",), ids,
                        **more)  # fmt: skip


def drawn(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape).astype(np.float32)


def test_derived_keys_follow_their_formulas():
    names = [("prompt", k, e) for k in ("sum", "share", "argmax", "sum_null") for e in ("any", "soft")]
    values = {name: drawn(3, 2, 4, seed=i) for i, name in enumerate(names)}
    sizes = {"any": np.array([1, 2, 5]), "soft": np.array([0.5, 1.25, 4.0]), "none": np.array([10, 20, 30])}
    got = scores(values, sizes=sizes)
    for s, e in itertools.product(range(3), ("any", "soft")):
        near, whole = sizes[e][s], sizes["none"][s]
        v = {k: values["prompt", k, e][s] for k in ("sum", "share", "argmax", "sum_null")}
        np.testing.assert_allclose(got.theta("prompt", "mean", e)[s], v["sum"] / near, rtol=1e-6)
        np.testing.assert_allclose(got.theta("prompt", "lift", e)[s], v["share"] / (near / whole), rtol=1e-6)
        np.testing.assert_allclose(got.theta("prompt", "sum_calibrated", e)[s], v["sum"] - v["sum_null"], atol=1e-7)
    np.testing.assert_allclose(got.theta("prompt", "hit_inverse")[1], values["prompt", "argmax", "any"][1] / 2)
    assert ("prompt", "hit_inverse", "soft") not in got.points() and ("prompt", "lift", "soft") in got.points()


def test_points_are_exactly_what_can_be_read_off():
    got = scores({("prompt", "sum", "any"): drawn(2, 2, 2), ("output", "image_mass", "none"): drawn(2, 2, 2)})
    assert set(got.points()) == {("prompt", "sum", "any"), ("prompt", "mean", "any"), ("output", "image_mass", "none")}
    for point in itertools.product(QUERIES, KEYS, EVERY_EVIDENCE):
        if point not in got.points():
            with pytest.raises(ValueError, match="model on noise: "):
                got.theta(*point)


def test_what_was_not_captured_is_named():
    got = scores({("output", "sum", "any"): drawn(2, 2, 2)}, about="2 of 2 samples have no mask (first: s0).")
    with pytest.raises(ValueError, match=r"evidence 'mask' was not captured \(captured: any\). 2 of 2 samples have no"):
        got.score(Scoring("output", "sum", evidence="mask"))
    with pytest.raises(ValueError, match="prompt with sum was not captured for noise"):
        got.score(Scoring("prompt", "sum"))
    with pytest.raises(ValueError, match="copying is defined for text only"):
        got.score(Scoring("output", "copy"))


def with_gaps() -> tuple[SampleScores, np.ndarray]:
    """Five samples, the second without such a row; samples 1, 2 and 3 are right."""
    values = drawn(5, 2, 6).round(1)
    values[1] = np.nan
    right = np.array([False, True, True, True, False])
    return scores(
        {("output", "sum", "any"): values}, right=right, replies=("zero", "one", "two", "three", "four")
    ), values


@pytest.mark.parametrize("samples", ["mean", "frequency(3)", "active", "rank_mean", "median", "mean_success"])
def test_samples_without_a_row_are_left_out(samples):
    got, values = with_gaps()
    use = [2, 3] if samples == "mean_success" else [0, 2, 3, 4]
    found = got.score(Scoring("output", "sum", samples))
    want = by_loop(values[use].astype(float), "mean" if samples == "mean_success" else samples)
    np.testing.assert_allclose(found.values, want, atol=1e-6)
    assert (found.n, found.scoring, found.model, found.runs) == (len(use), f"output/sum/{samples}", "model", ("run",))


def test_scores_of_some_samples_only():
    got, values = with_gaps()
    found = got.score(VRH, of=[4, 1, 0])
    np.testing.assert_allclose(found.values, (values[4] + values[0]) / 2, atol=1e-6)
    assert found.n == 2
    assert got.score(Scoring("output", "sum", "mean_success"), [0, 3]).n == 1
    with pytest.raises(ValueError, match="no sample has a row of output"):
        got.score(VRH, of=[1])


def test_no_success_is_an_error_that_shows_the_first_failing_reply():
    got, _ = with_gaps()
    point = Scoring("output", "sum", "mean_success")
    with pytest.raises(ValueError, match="answered none of 1 samples of noise right.*The first reply: 'four'"):
        got.score(point, of=[4, 1])  # the right one has no row
    with pytest.raises(ValueError, match="answered none of 2 samples.*'zero'.*or score with 'mean'"):
        got.score(point, of=[0, 4])
    with pytest.raises(ValueError, match="nobody knows which replies are right"):
        scores({("output", "sum", "any"): drawn(3, 2, 2)}).score(point)


def test_one_sample_is_enough_for_every_way_of_pooling():
    got = scores({("output", "sum", "any"): drawn(1, 3, 8)}, right=np.array([True]), replies=("yes",))
    for samples in SAMPLES:
        assert got.score(Scoring("output", "sum", samples)).n == 1


def test_counts_are_told():
    values = {("output", "sum", "any"): drawn(4, 2, 2), ("output_answer", "sum", "any"): drawn(4, 2, 2),
              ("output_one(0)", "sum", "any"): drawn(4, 2, 2), ("prompt", "sum", "any"): drawn(4, 2, 2),
              ("expression_and_output", "sum", "any"): drawn(4, 2, 2)}  # fmt: skip
    for name in values:
        if name[0] != "prompt":
            values[name][3] = np.nan  # no reply at all
    values["output_answer", "sum", "any"][:2] = np.nan  # no box in two more
    told = str(scores(values, right=np.array([False, False, True, False]), empty=("s3",)))
    assert told == "4 samples of noise scored; 1 answered right; 1 without a reply, first s3; 2 without output_answer"


def test_ties_are_ranked_by_layer_then_head():
    flat = scores({("output", "sum", "any"): np.zeros((3, 2, 3))})
    assert [tuple(h) for h in flat.score(VRH).top(6)] == list(np.ndindex(2, 3))
    values = np.zeros((3, 2, 3))
    values[:, 1, 2] = 1
    tied = scores({("output", "sum", "any"): values})
    assert [tuple(h) for h in tied.score(VRH).top(3)] == [(1, 2), (0, 0), (0, 1)]


# ---------------------------------------------------------------- heads that look at the picture


@pytest.mark.parametrize(("layers", "skipped"), [(3, 0), (8, 0), (16, 1), (24, 2), (28, 2), (32, 2), (36, 2), (48, 3)])
def test_heads_look_if_their_mean_mass_is_above_the_elbow_and_their_layer_is_not_among_the_first(layers, skipped):
    mass = drawn(5, layers, 4) ** 4
    mass[:, :4] += 0.5  # the first layers look most
    got = scores({("prompt_last", "image_mass", "none"): mass})
    average = mass.astype(float).mean(0)
    threshold = farthest_from_the_line(average)
    want = [[average[i, h] >= threshold and i >= skipped for h in range(4)] for i in range(layers)]
    assert got.looking("prompt_last").tolist() == want and np.any(want[skipped]) and np.sum(want) < layers * 4


@pytest.mark.parametrize("samples", ["mean", "frequency(5)", "rank_mean", "median", "active", "mean_success"])
def test_heads_that_do_not_look_rank_behind_all_others(samples):
    mass, values = drawn(6, 16, 4, seed=1), drawn(6, 16, 4, seed=2) - 0.5
    names = {("prompt_last", "image_mass", "none"): mass, ("prompt_last", "spatial_entropy", "none"): values}
    got = scores(names, right=np.array([True, False] * 3))
    point = Scoring("prompt_last", "spatial_entropy", samples, among="looking")
    looking, found = got.looking("prompt_last"), got.score(point)
    if samples == "mean_success":
        looking = got.looking("prompt_last", np.array([True, False] * 3))
    k = int(looking.sum())
    assert found.top(k).mask().tolist() == looking.tolist() and np.isfinite(found.values).all()
    assert found.values[~looking].max() < found.values[looking].min()


def test_frequency_counts_the_most_compact_of_the_heads_that_look():
    mass, values = drawn(6, 16, 4, seed=1), drawn(6, 16, 4, seed=2)
    got = scores({("prompt_last", "image_mass", "none"): mass, ("prompt_last", "spatial_entropy", "none"): -values})
    looking = got.looking("prompt_last")
    count = np.zeros((16, 4))
    for sample in -values:
        for h in [h for h in ranked(sample) if looking[h]][:10]:
            count[h] += 1 / 6
    found = got.score(Scoring("prompt_last", "spatial_entropy", "frequency(10)", among="looking"))
    np.testing.assert_allclose(found.values[looking], count[looking], atol=1e-12)
    assert (~looking).any() and count.sum() == pytest.approx(min(10, looking.sum()))


def test_no_head_that_looks_is_an_error():
    curve = np.sort(np.linspace(0, 1, 128) ** 200)[::-1]  # steep from one of the first two layers' heads on
    mass = np.stack([curve.reshape(32, 4)] * 2)
    with pytest.raises(ValueError, match="no head beyond the first 2 layers"):
        scores({("prompt_last", "image_mass", "none"): mass}).looking("prompt_last")


# ---------------------------------------------------------------- told as tables


def test_every_choice_stands_in_the_table_of_axes():
    table = axes().set_index(["axis", "value"])
    known = {"queries": QUERIES, "keys": KEYS, "samples": SAMPLES, "evidence": EVIDENCE}
    assert list(table.index) == [(axis, name) for axis, choices in known.items() for name in choices]
    assert table.loc[("keys", "share"), "formula"] == KEYS["share"].formula and (table.source != "").all()
    assert set(WITH_NULL) <= set(QUERIES) and set(BOX_FREE) <= set(KEYS) and len(ONE_SEEDS) == 5


def test_one_sample_and_head_under_every_choice():
    names = [("prompt", "sum", "any"), ("prompt", "sum", "soft"), ("output", "sum", "any"),
             ("output", "image_mass", "none")]  # fmt: skip
    got = scores({name: drawn(2, 3, 4, seed=i) for i, name in enumerate(names)})
    table = got.one(1, Head(2, 3))
    assert table.loc["output", "image_mass"] == got.theta("output", "image_mass", "none")[1, 2, 3]
    assert table.loc["prompt", "sum"] == got.theta("prompt", "sum")[1, 2, 3]
    assert table.isna().loc["prompt", "image_mass"] and set(table) == {"sum", "mean", "image_mass"}
    assert got.one(1, Head(2, 3), "soft").loc["prompt", "sum"] == got.theta("prompt", "sum", "soft")[1, 2, 3]


def test_the_top_heads_of_several_points_by_name():
    got = scores({("output", "sum", "any"): drawn(3, 3, 4), ("prompt", "sum", "any"): drawn(3, 3, 4, seed=1)})
    found = got.tops([VRH, Scoring("prompt", "sum", "median")], 4)
    assert list(found) == ["output/sum/mean", "prompt/sum/median"]
    assert found["output/sum/mean"].heads == got.score(VRH).top(4).heads
