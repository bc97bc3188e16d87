"""Agreement of head lists and of models' scores against enumeration of all shuffles, closed forms and simulation."""

import itertools
from collections import Counter
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import fisher_exact

from vrhlib.agreement import agreement, agreements, changes, donors, grouped, overlaps, scatter, shared
from vrhlib.heads import Head, HeadScores, HeadSet
from vrhlib.paper import published_heads

many = settings(max_examples=100, deadline=None, derandomize=True)
some = settings(max_examples=50, deadline=None, derandomize=True)  # where every shuffle is enumerated


def scored(values, name="m", **facts):
    return HeadScores(np.asarray(values, dtype=float), "output/sum/mean", name, 10, **facts)


def subset(draw, grid, at_most=10**6):
    every = [Head(*at) for at in np.ndindex(*grid)]
    order = draw(st.permutations(every))
    return HeadSet(tuple(order[: draw(st.integers(0, min(at_most, len(every))))]), grid, "drawn")


@st.composite
def lists(draw, layers=3, per_layer=4, count=1):
    grid = draw(st.integers(1, layers)), draw(st.integers(1, per_layer))
    drawn = [subset(draw, grid) for _ in range(count)]
    return drawn if count > 1 else drawn[0]


def anywhere(heads):
    """All sets of as many heads on the grid."""
    return itertools.combinations(np.ndindex(*heads.grid), len(heads))


def within_layers(heads):
    """All sets with as many heads in every layer."""
    rows = [
        itertools.combinations([(layer, head) for head in range(heads.grid[1])], count)
        for layer, count in enumerate(heads.layers)
    ]
    return (sum(parts, ()) for parts in itertools.product(*rows))


def mean_and_tail(counts, observed):
    """Mean of the counts over all shuffles, and the share of shuffles with at least as many as observed."""
    tally = Counter(counts)
    total = sum(tally.values())
    mean = Fraction(sum(value * times for value, times in tally.items()), total)
    return float(mean), float(Fraction(sum(times for value, times in tally.items() if value >= observed), total))


# ---------------------------------------------------------------- two lists of heads


@some
@given(lists(count=2))
def test_both_chances_of_shared_heads_are_those_of_all_shuffles(pair):
    a, b = pair
    found, mine = shared(a, b), set(a)
    assert found.shared == sum(head in b for head in a)
    grid = mean_and_tail((len(mine.intersection(s)) for s in anywhere(b)), found.shared)
    layer = mean_and_tail((len(mine.intersection(s)) for s in within_layers(b)), found.shared)
    assert (found.expected, found.p) == pytest.approx(grid, rel=1e-9)
    assert (found.expected_in_layer, found.p_in_layer) == pytest.approx(layer, rel=1e-9)


@many
@given(lists(layers=8, per_layer=9, count=2), st.randoms(use_true_random=False))
def test_sharing_is_symmetric_and_does_not_depend_on_the_order_of_a_list(pair, random):
    a, b = pair
    found = shared(a, b)
    shuffled = HeadSet(tuple(random.sample(a.heads, len(a))), a.grid)
    assert found == pytest.approx(shared(b, a), rel=1e-9) and found == shared(shuffled, b)
    assert 0 < found.p <= 1 and 0 < found.p_in_layer <= 1
    assert found.expected == pytest.approx(len(a) * len(b) / a.mask().size)
    one, two = (np.array([[h.layer == layer for h in s] for layer in range(a.grid[0])]).sum(1) for s in pair)
    assert found.expected_in_layer == pytest.approx(sum(x * y / a.grid[1] for x, y in zip(one, two)))


@many
@given(lists(layers=8, per_layer=9, count=2))
def test_over_the_grid_the_chance_is_fishers_one_sided_test(pair):
    a, b = pair
    both = shared(a, b).shared
    table = [[both, len(a) - both], [len(b) - both, a.mask().size - len(a) - len(b) + both]]
    assert shared(a, b).p == pytest.approx(fisher_exact(table, alternative="greater").pvalue, rel=1e-7)


@many
@given(lists(layers=5, per_layer=8, count=2))
def test_the_more_heads_are_shared_the_less_likely_it_was_chance(pair):
    """From the most to the fewest heads that b can share with a, layer by layer; the layers of b stay as they are."""
    a, b = pair
    inside, outside = a.mask(), ~a.mask()
    order = [np.r_[np.flatnonzero(inside[layer]), np.flatnonzero(outside[layer])] for layer in range(a.grid[0])]
    rows = [list(order[layer][: b.layers[layer]]) for layer in range(a.grid[0])]
    steps = [[(layer, head) for layer, row in enumerate(rows) for head in row]]
    for layer, row in enumerate(rows):
        for free in [head for head in np.flatnonzero(outside[layer]) if head not in row]:
            taken = [head for head in row if inside[layer, head]]
            if taken:
                row[row.index(taken[0])] = free
                steps.append([(layer, head) for layer, row in enumerate(rows) for head in row])
    found = [shared(a, HeadSet(tuple((int(x), int(y)) for x, y in step), a.grid)) for step in steps]
    assert [f.shared for f in found] == list(range(found[0].shared, found[-1].shared - 1, -1))
    for more, fewer in itertools.pairwise(found):
        assert more.p < fewer.p and more.p_in_layer < fewer.p_in_layer
        assert (more.expected, more.expected_in_layer) == (fewer.expected, fewer.expected_in_layer)
    assert found[-1].p_in_layer == pytest.approx(1), "the fewest that these layers allow are no evidence at all"


@pytest.mark.parametrize("pair", [("Qwen2.5-VL-7B", "InternVL3-8B"), ("Qwen3-VL-8B", "InternVL3.5-8B")])
def test_the_chances_of_the_published_overlaps_are_the_sums_of_whole_numbers(pair):
    """15 and 18 of 20 shared: far out in both tails, where a sum of floats could lose everything."""
    a, b = map(published_heads, pair)
    found, (layers, per_layer) = shared(a, b), a.grid
    size = layers * per_layer
    ways = {i: comb(20, i) * comb(size - 20, 20 - i) for i in range(21)}
    tail = Fraction(sum(n for i, n in ways.items() if i >= found.shared), comb(size, 20))
    assert found.p == pytest.approx(float(tail), rel=1e-9) and found.p < 1e-20
    ways = Counter({0: 1})
    for mine, other in zip(a.layers.tolist(), b.layers.tolist()):
        grown = Counter()
        for so_far, n in ways.items():
            for i in range(min(mine, other) + 1):
                grown[so_far + i] += n * comb(mine, i) * comb(per_layer - mine, other - i)
        ways = grown
    tail = Fraction(sum(n for i, n in ways.items() if i >= found.shared), sum(ways.values()))
    assert found.p_in_layer == pytest.approx(float(tail), rel=1e-9) and found.p < found.p_in_layer < 1e-6


def test_two_grids_are_refused_with_both_named():
    a, b = HeadSet(((0, 0),), (2, 3), "mine"), HeadSet(((0, 0),), (3, 2), "yours")
    with pytest.raises(ValueError, match="yours .*3 layers x 2 heads.*2 x 3"):
        shared(a, b)
    with pytest.raises(ValueError, match="mine .*2 layers x 3 heads.*3 x 2"):
        shared(b, a)


def test_lists_without_heads_share_nothing_and_that_is_no_evidence():
    empty, full = HeadSet((), (2, 3)), HeadSet(tuple(np.ndindex(2, 3)), (2, 3))
    assert shared(empty, full) == shared(full, empty) == (0, 0, 1, 0, 1)
    assert shared(full, full) == pytest.approx((6, 6, 1, 6, 1))


# ---------------------------------------------------------------- several lists of one model


def three():
    text = {"a": "00 01 12 20 21", "b": "01 00 12 22 11", "c": "13 02 20"}
    return {name: HeadSet(tuple((int(w[0]), int(w[1])) for w in t.split()), (3, 4), name) for name, t in text.items()}


def test_overlaps_are_symmetric_with_k_on_the_diagonal():
    table = overlaps(three())
    assert list(zip(table.a, table.b)) == list(itertools.product("abc", repeat=2)) and (table.heads == 12).all()
    counts = table.pivot(index="a", columns="b", values="shared").loc[[*"abc"], [*"abc"]].to_numpy()
    assert counts.tolist() == [[5, 3, 0], [3, 5, 0], [0, 0, 3]]  # a and c: among the first three of each
    ks = table.pivot(index="a", columns="b", values="k").to_numpy()
    assert ks.tolist() == [[5, 5, 3], [5, 5, 3], [3, 3, 3]] and (np.diag(counts) == np.diag(ks)).all()
    for column in ("p", "p_in_layer", "expected", "expected_in_layer"):
        square = table.pivot(index="a", columns="b", values=column).to_numpy()
        assert square == pytest.approx(square.T)


def test_overlaps_carry_the_chances_of_the_two_lists_cut_to_one_length():
    sets = three()
    for row in overlaps(sets).itertuples():
        cut = shared(sets[row.a].top(row.k), sets[row.b].top(row.k))
        assert cut == (row.shared, row.expected, row.p, row.expected_in_layer, row.p_in_layer)


def test_overlaps_of_lists_on_two_grids_are_refused():
    with pytest.raises(ValueError, match="3 layers x 4 heads.*4 x 3|4 layers x 3 heads.*3 x 4"):
        overlaps(three() | {"other": HeadSet(((3, 0),), (4, 3), "other")})


# ---------------------------------------------------------------- key-value groups


def pairs_in(heads, size):
    held = Counter((layer, head // size) for layer, head in heads)
    return sum(n * (n - 1) // 2 for n in held.values())


@st.composite
def grouped_lists(draw):
    layers, kv_heads, size = draw(st.sampled_from([(1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 2), (2, 3, 2), (2, 1, 4)]))
    return subset(draw, (layers, kv_heads * size)), kv_heads


@some
@given(grouped_lists())
def test_both_chances_of_pairs_in_groups_are_those_of_all_shuffles(drawn):
    heads, kv_heads = drawn
    found, size = grouped(heads, kv_heads), heads.grid[1] // kv_heads
    together = [one.layer == two.layer and one.head // size == two.head // size
                for one, two in itertools.combinations(heads, 2)]  # fmt: skip
    assert (found.size, found.pairs) == (size, sum(together))
    assert found.groups == len({(h.layer, h.head // size) for h in heads})
    grid = mean_and_tail((pairs_in(s, size) for s in anywhere(heads)), found.pairs)
    layer = mean_and_tail((pairs_in(s, size) for s in within_layers(heads)), found.pairs)
    assert (found.expected, found.p) == pytest.approx(grid, rel=1e-9)
    assert (found.expected_in_layer, found.p_in_layer) == pytest.approx(layer, rel=1e-9)


@pytest.mark.parametrize(("model", "kv_heads"), [("Qwen2.5-VL-7B", 4), ("Qwen3-VL-8B", 8)])
def test_the_published_lists_are_grouped_as_often_as_simulated_ones(model, kv_heads):
    heads, rng, rounds = published_heads(model), np.random.default_rng(0), 5000
    found, (layers, per_layer) = grouped(heads, kv_heads), heads.grid
    size = per_layer // kv_heads
    assert found.pairs == pairs_in(heads, size)

    def pairs_of(cells):  # int [rounds, heads], flat indices -> pairs of each round
        held = np.sort(cells // size, axis=1)  # per_layer is a multiple of size: no group spans two layers
        return sum((held[:, step:] == held[:, :-step]).sum(1) for step in range(1, held.shape[1]))

    grid = np.stack([rng.choice(layers * per_layer, len(heads), replace=False) for _ in range(rounds)])
    own = [layer * per_layer + np.argsort(rng.random((rounds, per_layer)), axis=1)[:, :count]
           for layer, count in enumerate(heads.layers) if count]  # fmt: skip
    for cells, expected, p in (
        (grid, found.expected, found.p), (np.hstack(own), found.expected_in_layer, found.p_in_layer)
    ):  # fmt: skip
        drawn = pairs_of(cells)
        assert drawn.mean() == pytest.approx(expected, abs=4 * drawn.std() / rounds**0.5)
        assert (drawn >= found.pairs).mean() == pytest.approx(p, abs=4 * (p * (1 - p) / rounds) ** 0.5 + 1 / rounds)
    assert found.p < 0.001 < found.p_in_layer < 0.05, "much of the crowding is that of a few layers, not all"


@many
@given(lists(layers=4, per_layer=6))
def test_one_group_a_layer_and_groups_of_one_leave_nothing_to_chance_within_layers(heads):
    in_layers, alone = grouped(heads, 1), grouped(heads, heads.grid[1])
    assert in_layers.pairs == sum(comb(n, 2) for n in heads.layers) == pytest.approx(in_layers.expected_in_layer)
    assert in_layers.p_in_layer == pytest.approx(1) and in_layers.size == heads.grid[1]
    assert alone == pytest.approx((1, len(heads), 0, 0, 1, 0, 1))
    assert 0 < in_layers.p <= 1


@many
@given(lists(layers=6, per_layer=8))
def test_the_expected_pairs_are_those_of_two_heads_times_the_pairs_of_heads(heads):
    """Linearity: any two heads share a group as often as two drawn places do."""
    for kv_heads in (n for n in range(1, 9) if heads.grid[1] % n == 0):
        found, (layers, per_layer) = grouped(heads, kv_heads), heads.grid
        size, total = per_layer // kv_heads, layers * per_layer
        assert found.expected == pytest.approx(comb(len(heads), 2) * (size - 1) / max(1, total - 1))
        by_layer = [comb(int(n), 2) * (size - 1) / max(1, per_layer - 1) for n in heads.layers]
        assert found.expected_in_layer == pytest.approx(sum(by_layer))
        assert 0 < found.p <= 1 and 0 < found.p_in_layer <= 1


@pytest.mark.parametrize("kv_heads", [3, 5, 56, 0, -1, -4])
def test_groups_of_unequal_size_are_refused(kv_heads):
    with pytest.raises(ValueError, match=f"28 query heads .* {kv_heads} key-value"):
        grouped(published_heads("Qwen2.5-VL-7B"), kv_heads)


# ---------------------------------------------------------------- scores of two models


def test_a_model_agrees_with_itself_as_much_as_can_be():
    values = np.random.default_rng(0).random((6, 8))
    found = agreement(scored(values), scored(values), 5, permutations=400)
    assert (found.k, found.shared, found.spearman, found.heads) == (5, 5, pytest.approx(1), 48)
    assert found.expected == pytest.approx(25 / 48) and found.p_spearman < 1e-4
    assert found.p_shared == pytest.approx(1 / comb(48, 5))
    layers = np.bincount([h.layer for h in scored(values).top(5)])
    assert found.p_shared_in_layer == pytest.approx(1 / np.prod([comb(8, n) for n in layers]))
    assert found.p_spearman_in_layer == 1 / 401, "no shuffle comes near; the observed order counts as one"


def test_models_that_share_only_their_layers_agree_on_the_grid_but_not_within_layers():
    """Top heads in the same layers by construction, at places drawn apart: the stricter chance is not impressed."""
    rng, levels = np.random.default_rng(1), np.arange(8)[:, None] * 1.0
    strict, loose = [], []
    for _ in range(30):
        found = agreement(*(scored(levels + 0.9 * rng.random((8, 10))) for _ in "ab"), 10, permutations=200)
        loose.append(found.p_spearman)
        strict.append(found.p_spearman_in_layer)
        assert (found.shared, found.expected_in_layer, found.p_shared_in_layer) == pytest.approx((10, 10, 1))
        assert found.p_shared == pytest.approx(1 / comb(80, 10)), "the whole top layer, whatever the order in it"
    assert max(loose) < 1e-3 and 0.3 < np.mean(strict) < 0.7 and min(strict) > 0.004


def test_unrelated_models_agree_by_chance():
    rng = np.random.default_rng(2)
    found = [
        agreement(scored(rng.random((8, 10))), scored(rng.random((8, 10))), 8, permutations=100) for _ in range(100)
    ]
    assert np.mean([f.shared for f in found]) == pytest.approx(0.8, abs=0.3)
    assert np.mean([f.expected_in_layer for f in found]) == pytest.approx(0.8, abs=0.12)
    assert {f.expected for f in found} == {0.8}
    for p in ("p_spearman", "p_spearman_in_layer"):
        assert 0.38 < np.mean([getattr(f, p) for f in found]) < 0.62
    for p in ("p_shared", "p_shared_in_layer", "p_spearman", "p_spearman_in_layer"):
        assert np.mean([getattr(f, p) <= 0.05 for f in found]) <= 0.12


def test_the_correlation_within_layers_is_judged_by_all_shuffles():
    """On two layers of three heads 36 orders are all there are; ties included."""
    a, b = np.array([[1, 2, 3], [3, 3, 9]]), np.array([[5, 6, 6], [1, 8, 7]])
    rho = [scored(a).spearman(scored([b[0][list(x)], b[1][list(y)]]))
           for x, y in itertools.product(itertools.permutations(range(3)), repeat=2)]  # fmt: skip
    exact = np.mean(np.array(rho) >= rho[0] - 1e-9)
    found = agreement(scored(a), scored(b), 2, permutations=4000)
    assert 0.05 < exact < 0.9 and found.spearman == pytest.approx(rho[0])
    assert found.p_spearman_in_layer == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 4000) ** 0.5)


def test_the_shared_heads_of_two_models_are_those_of_their_top_lists():
    rng = np.random.default_rng(4)
    a, b = (scored(rng.random((4, 6)).round(1)) for _ in "ab")  # with ties
    for k in (0, 1, 5, 24):
        found = agreement(a, b, k, permutations=1)
        assert shared(a.top(k), b.top(k)) == (
            found.shared, found.expected, found.p_shared, found.expected_in_layer, found.p_shared_in_layer
        )  # fmt: skip


def test_agreement_is_seeded_and_never_without_a_chance():
    rng = np.random.default_rng(5)
    a, b = (scored(rng.random((3, 4))) for _ in "ab")
    drawn = [agreement(a, b, 3, permutations=50, seed=seed).p_spearman_in_layer for seed in range(8)]
    assert drawn[3] == agreement(a, b, 3, permutations=50, seed=3).p_spearman_in_layer
    assert len(set(drawn)) > 1 and min(drawn) >= 1 / 51


# ---------------------------------------------------------------- several models


def models():
    rng = np.random.default_rng(3)
    scores = {m: scored(rng.random((4, 5)), m, runs=(f"run {m}", "shared run")) for m in "abc"}
    return scores | {"d": scored(rng.random((4, 6)), "d", runs=("run d",))}


def test_agreements_name_the_pairs_and_leave_out_other_grids():
    scores = models()
    table = agreements(scores, {m: s.top(3 + (m == "b")) for m, s in scores.items()}, [("c", "a")])
    assert list(zip(table.a, table.b)) == [("a", "c"), ("a", "b"), ("b", "c")]
    assert table.same_backbone.tolist() == [True, False, False] and (table.k == 3).all()
    for row in table.itertuples():
        alone = agreement(scores[row.a], scores[row.b], 3)
        assert (row.shared, row.p_shared, row.spearman) == (alone.shared, alone.p_shared, alone.spearman)
    assert table.attrs["runs"] == ["run a", "run b", "run c", "run d", "shared run"]


def test_one_model_alone_agrees_with_nobody():
    only = {"a": models()["a"]}
    table = agreements(only, {"a": only["a"].top(3)}, [("a", "b")])
    assert table.empty and table.attrs["runs"] == ["run a", "shared run"]


def test_scores_on_two_grids_do_not_agree():
    with pytest.raises(ValueError, match="4 layers x 6 heads.*4 x 5"):
        agreement(models()["a"], models()["d"], 3)


def test_scatter_has_a_row_for_every_head_of_every_pair():
    scores = models()
    tops = {m: s.top(6) for m, s in scores.items()}
    agreed = agreements(scores, tops, [("c", "a")])
    table = scatter(scores, tops, agreed)
    assert len(table) == 3 * 20 and table.attrs["runs"] == agreed.attrs["runs"]
    assert not table.duplicated(["a", "b", "layer", "head"]).any()
    for row in table.itertuples():
        at = row.layer, row.head
        assert (row.x, row.y) == (scores[row.a].values[at], scores[row.b].values[at]) and row.n == 10
        where = {(1, 1): "both", (1, 0): "a", (0, 1): "b", (0, 0): "neither"}
        assert row.top == where[at in tops[row.a], at in tops[row.b]]
    for pair in agreed.itertuples():
        rows = table[(table.a == pair.a) & (table.b == pair.b)]
        both, k = pair.shared, pair.k
        counts = {"both": both, "a": k - both, "b": k - both, "neither": 20 - 2 * k + both}
        assert rows.top.value_counts().to_dict() == {name: n for name, n in counts.items() if n}
        assert set(rows.relation) == {"same backbone" if {pair.a, pair.b} == {"a", "c"} else "other backbone"}
        assert {*rows.k, *rows.shared} == {k, both} and set(rows.spearman) == {pair.spearman}


def test_scatter_cuts_both_lists_to_the_length_that_was_compared():
    scores = models()
    tops = {"a": scores["a"].top(6), "b": scores["b"].top(4), "c": scores["c"].top(6)}
    table = scatter(scores, tops, agreements({m: scores[m] for m in "ab"}, tops, []))
    for mine in "ab":
        marked = table[table.top.isin([mine, "both"])]
        assert set(zip(marked.layer, marked["head"])) == set(scores[mine].top(4))


def test_without_pairs_there_is_nothing_to_scatter():
    only = {"a": models()["a"]}
    found = scatter(only, {"a": only["a"].top(3)}, agreements(only, {"a": only["a"].top(3)}, []))
    assert found.empty and found.attrs["runs"] == ["run a", "shared run"]


def test_a_sibling_lends_its_heads_and_the_others_are_numbered():
    scores = models()
    found, refused = donors("a", scores, [("c", "a"), ("b", "x")])
    assert found == {"other_backbone 0": "b", "borrowed": "c"}
    found, _ = donors("b", scores, [("c", "a"), ("x", "b")])
    assert found == {"other_backbone 0": "a", "other_backbone 1": "c"}, "its sibling is not here; the others are"


def test_a_donor_of_another_grid_is_refused_with_both_grids():
    scores = models()
    found, (why,) = donors("a", scores, [])
    assert found == {"other_backbone 0": "b", "other_backbone 1": "c"}, "without pairs nobody is a sibling"
    assert why.startswith("not cut in a: ") and "of d " in why
    assert "4 layers x 6 heads" in why and "4 x 5" in why
    found, refused = donors("d", scores, [("a", "d")])  # a sibling by name, but of another shape
    assert found == {} and len(refused) == 3 and all("4 layers x 5 heads" in r and "4 x 6" in r for r in refused)


def test_a_model_alone_has_no_donors():
    assert donors("a", {"a": models()["a"]}, [("a", "b")]) == ({}, [])


def test_two_siblings_are_refused_since_one_of_them_would_be_lost():
    scores = {name: scored(np.eye(3), name) for name in "abc"}
    with pytest.raises(ValueError, match="a shares its backbone with b and c: choose one"):
        donors("a", scores, [("a", "b"), ("a", "c")])
    assert donors("a", {name: scores[name] for name in "ab"}, [("a", "b"), ("a", "c")]) == ({"borrowed": "b"}, [])


def test_what_training_did_to_the_scores_is_told_head_by_head():
    before = scored(np.array([[4.0, 3.0, 0.0], [2.0, 1.0, 0.0]]), "m")
    same, other = scored(2 * before.values, "m"), scored(before.values[::-1].copy(), "m")
    frame = changes(before, {"same": same, "other": other}, 2)
    assert list(dict.fromkeys(frame.condition)) == ["same", "other"] and len(frame) == 12
    for condition, after in (("same", same), ("other", other)):
        own = frame[frame.condition == condition]
        for row in own.itertuples():
            assert (row.before, row.after) == (before.values[row.layer, row.head], after.values[row.layer, row.head])
            assert row.top == ((row.layer, row.head) in [(0, 0), (0, 1)])
        assert own.k.eq(2).all() and np.isclose(own.held_before.iloc[0], 0.7)
    first = frame.groupby("condition", sort=False).first()
    assert first.shared.to_dict() == {"same": 2, "other": 0} and np.isclose(first.spearman["same"], 1)
    assert np.isclose(first.held_after["same"], 0.7) and np.isclose(first.held_after["other"], 0.3)
    assert frame.attrs["runs"] == sorted({*before.runs, *same.runs, *other.runs})
