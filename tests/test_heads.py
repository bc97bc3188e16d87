"""Head sets as values: order, refusals, controls, ties, overlap, files; and the published lists' own overlaps."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, rankdata

from vrhlib.heads import Head, HeadScores, HeadSet, load_heads, load_scores, overlap_matrix

many = settings(max_examples=150, deadline=None, derandomize=True)

# Top-20 lists on RefCOCO as published, (layer, head), descending.
PUBLISHED = {
    "Qwen2.5-VL-7B": (
        (28, 28),
        "19.17 16.0 18.16 16.20 19.22 19.20 16.1 19.23 19.15 17.18 "
        "16.7 14.11 14.16 16.6 16.17 19.26 19.19 14.23 17.14 18.15",
    ),
    "InternVL3-8B": (
        (28, 28),
        "16.20 16.0 19.22 16.1 19.23 19.17 19.20 16.6 14.11 19.15 "
        "16.4 17.24 18.16 16.16 16.17 20.21 16.7 19.19 14.16 14.8",
    ),
    "Qwen3-VL-8B": (
        (36, 32),
        "20.15 21.10 18.19 18.15 21.11 21.18 17.27 17.4 19.3 22.4 "
        "21.8 20.8 18.5 23.13 20.17 20.18 23.30 21.25 20.16 23.10",
    ),
    "InternVL3.5-8B": (
        (36, 32),
        "21.11 20.15 21.10 19.3 18.15 17.4 21.18 18.19 17.27 20.17 "
        "24.13 21.8 20.18 20.16 21.25 20.8 18.5 22.4 18.21 23.30",
    ),
}


def published(model):
    grid, text = PUBLISHED[model]
    return HeadSet(tuple(Head(*map(int, word.split("."))) for word in text.split()), grid, model)


@st.composite
def head_sets(draw, smallest=0):
    grid = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    every = [Head(layer, head) for layer in range(grid[0]) for head in range(grid[1])]
    order = draw(st.permutations(every))
    return HeadSet(tuple(order[: draw(st.integers(min(smallest, len(every)), len(every)))]), grid, "drawn")


# ---------------------------------------------------------------- values


def test_a_head_prints_layer_then_head_and_parses_back():
    assert str(Head(19, 17)) == "L19H17"
    assert Head.parse("L19H17") == Head(layer=19, head=17)
    assert Head.parse("L0H0") == (0, 0)


@pytest.mark.parametrize("text", ["", "19.17", "H17L19", "L19", "L-1H2", "L1H2 ", "L1H2\n", "l1h2", "L1.0H2", "(1, 2)"])
def test_other_ways_of_writing_a_head_are_refused(text):
    with pytest.raises(ValueError, match="L19H17"):
        Head.parse(text)


def test_layer_and_head_are_held_against_their_own_axis():
    HeadSet((Head(35, 31),), (36, 32))
    with pytest.raises(ValueError, match="swapped"):
        HeadSet((Head(31, 35),), (36, 32))
    for outside in [(36, 0), (0, 32), (-1, 0), (0, -1)]:
        with pytest.raises(ValueError, match="36 layers x 32 heads"):
            HeadSet((outside,), (36, 32))


def test_an_index_that_is_no_whole_number_is_refused():
    with pytest.raises((TypeError, ValueError)):
        HeadSet(((1.7, 2),), (4, 4))
    with pytest.raises((TypeError, ValueError)):
        HeadSet((("1", 2),), (4, 4))


def test_a_head_listed_twice_is_refused_by_name():
    with pytest.raises(ValueError, match="L1H2"):
        HeadSet((Head(1, 2), Head(0, 0), (np.int64(1), np.int32(2))), (4, 4), "list")


def test_membership_does_not_depend_on_the_type_of_the_pair():
    heads = HeadSet([[1, 2], (3, 0)], (4, 4))
    assert (1, 2) in heads and [1, 2] in heads and Head(1, 2) in heads and np.array([3, 0]) in heads
    assert (2, 1) not in heads and [0, 3] not in heads
    assert list(heads) == [Head(1, 2), Head(3, 0)] and all(type(h) is Head for h in heads)


def test_equal_sets_are_equal_and_hash_alike_whatever_they_were_made_from():
    a, b = HeadSet(([np.int64(1), 2],), [4, 4]), HeadSet((Head(1, 2),), (4, 4))
    assert a == b and hash(a) == hash(b)


def test_twenty_heads_are_2_55_percent_of_784():
    heads = published("Qwen2.5-VL-7B")
    assert heads.share == pytest.approx(0.0255, abs=5e-5) and heads.share == 20 / 784
    assert str(heads) == "Qwen2.5-VL-7B: 20 heads (2.6% of 784)"


@many
@given(head_sets())
def test_mask_and_layers_count_what_a_loop_counts(heads):
    mask = heads.mask()
    assert mask.shape == heads.grid and mask.dtype == bool
    for layer in range(heads.grid[0]):
        for head in range(heads.grid[1]):
            assert mask[layer, head] == ((layer, head) in list(heads))
    assert heads.layers.tolist() == [sum(h.layer == layer for h in heads) for layer in range(heads.grid[0])]


def test_top_keeps_the_order_and_refuses_more_than_there_are():
    heads = published("Qwen3-VL-8B")
    assert heads.top(3).heads == ((20, 15), (21, 10), (18, 19))
    assert len(heads.top(0)) == 0 and heads.top(20) == heads
    with pytest.raises(ValueError, match="36 layers x 32"):
        heads.top(21)
    with pytest.raises(ValueError):
        heads.top(-1)


# ---------------------------------------------------------------- controls


@many
@given(head_sets(), st.integers(0, 2**40))
def test_controls_are_seeded_nested_and_outside_the_set(heads, seed):
    free = heads.grid[0] * heads.grid[1] - len(heads)
    whole = heads.controls(free, seed)
    assert len(set(whole)) == free and not set(whole) & set(heads)
    for n in range(free + 1):
        assert heads.controls(n, seed).heads == whole.heads[:n]
    with pytest.raises(ValueError, match=str(free)):
        heads.controls(free + 1, seed)


def test_seeds_draw_different_controls():
    heads = published("Qwen2.5-VL-7B")
    assert len({heads.controls(20, seed).heads for seed in range(50)}) == 50


def test_controls_fall_on_every_free_head_equally_often():
    heads = HeadSet(((0, 0), (1, 1)), (2, 3))
    drawn = [heads.controls(1, seed).heads[0] for seed in range(2000)]
    counts = np.array([drawn.count(h) for h in set(drawn)])
    assert len(counts) == 4 and abs(counts - 500).max() < 100  # 5 standard deviations


@pytest.mark.parametrize("layer_matched", [False, True])
def test_fewer_than_no_controls_are_refused(layer_matched):
    with pytest.raises(ValueError):
        published("Qwen2.5-VL-7B").controls(-1, 0, layer_matched)


def can_follow(heads, n):
    """By matching, head by head (Kuhn): can each of the first n take another head of its layer, all different?"""
    taken = {}

    def place(i, seen):
        for other in range(heads.grid[1]):
            at = (heads.heads[i].layer, other)
            if at not in heads and at not in seen:
                seen.add(at)
                if at not in taken or place(taken[at], seen):
                    taken[at] = i
                    return True
        return False

    return all(place(i, set()) for i in range(n))


@many
@given(head_sets())
def test_as_many_heads_are_matchable_as_a_bipartite_matching_finds(heads):
    assert heads.matchable == max(n for n in range(len(heads) + 1) if can_follow(heads, n))
    free = (~heads.mask()).sum(1)
    for n in range(len(heads) + 1):
        assert (heads.top(n).layers > free).any() == (n > heads.matchable)


@many
@given(head_sets())
def test_crowded_names_the_layer_that_ends_matching_and_is_empty_if_none_does(heads):
    if heads.matchable == len(heads):
        assert heads.crowded == ""
    else:
        layer = heads.heads[heads.matchable].layer
        outside, inside = (~heads.mask()).sum(1)[layer], heads.mask().sum(1)[layer]
        assert (
            heads.crowded == f"layer {layer} has {outside} heads outside the set for the {inside} of its heads inside"
        )
        assert inside > outside


@many
@given(head_sets(), st.integers(0, 2**40))
def test_layer_matched_controls_are_nested_outside_the_set_and_in_its_layers(heads, seed):
    whole = heads.controls(heads.matchable, seed, layer_matched=True)
    assert len(set(whole)) == len(whole) == heads.matchable and not set(whole) & set(heads)
    assert [h.layer for h in whole] == [h.layer for h in heads.top(heads.matchable)], "each in the layer of its own"
    for n in range(heads.matchable + 1):
        drawn = heads.controls(n, seed, layer_matched=True)
        assert drawn.heads == whole.heads[:n] and drawn.grid == heads.grid
        assert drawn.layers.tolist() == heads.top(n).layers.tolist()


@many
@given(head_sets())
def test_more_layer_matched_controls_than_a_layer_has_are_refused_by_layer_and_numbers(heads):
    for n in range(heads.matchable + 1, len(heads) + 1):
        layer = heads.heads[heads.matchable].layer
        outside, inside = heads.grid[1] - heads.layers[layer], heads.layers[layer]
        why = rf"drawn: layer {layer} has {outside} heads outside .* {inside} .*k <= {heads.matchable}\."
        with pytest.raises(ValueError, match=why):
            heads.controls(n, 0, layer_matched=True)
    with pytest.raises(ValueError, match=rf"{len(heads) + 1} control|{len(heads)} heads of drawn"):
        heads.controls(len(heads) + 1, 0, layer_matched=True)


def test_a_full_layer_does_not_borrow_from_its_neighbours():
    heads = HeadSet(((0, 0), (1, 0), (1, 1), (2, 0)), (4, 2), "full")
    assert heads.matchable == 1 and heads.controls(1, 0, layer_matched=True).heads == ((0, 1),)
    for n in (2, 3, 4):
        with pytest.raises(ValueError, match=r"full: layer 1 has 0 heads outside the set for the 2 .*Use k <= 1"):
            heads.controls(n, 0, layer_matched=True)
    assert len(heads.controls(4, 0)) == 4, "uniform draws have room"


@many
@given(head_sets())
def test_layer_matched_controls_differ_by_seed_exactly_where_there_is_a_choice(heads):
    n = heads.matchable
    free, drawn = (~heads.mask()).sum(1), heads.top(n).layers
    choices = math.prod(math.perm(int(f), int(d)) for f, d in zip(free, drawn))
    found = [heads.controls(n, seed, layer_matched=True).heads for seed in range(40)]
    assert found[:3] == [heads.controls(n, seed, layer_matched=True).heads for seed in range(3)]
    assert (len(set(found)) > 1) == (choices > 1) and len(set(found)) <= choices


def test_layer_matched_controls_fall_on_every_free_head_of_a_layer_equally_often():
    heads = HeadSet(((1, 0), (0, 2), (1, 3)), (3, 5))
    drawn = [heads.controls(3, seed, layer_matched=True) for seed in range(3000)]
    first, other, second = (Counter(d.heads[i] for d in drawn) for i in range(3))
    assert set(first) == set(second) == {(1, 1), (1, 2), (1, 4)} and set(other) == {(0, 0), (0, 1), (0, 3), (0, 4)}
    joint = Counter((d.heads[0], d.heads[2]) for d in drawn)
    assert len(joint) == 6
    for counts in (first, second, other, joint):
        assert chisquare(list(counts.values())).pvalue > 1e-3


def test_layer_matched_controls_of_scores_follow_their_own_top():
    drawn = scores(np.random.default_rng(0).random((6, 8)))
    for n in range(1, 12):
        assert drawn.controls(n, 3, True) == drawn.top(n).controls(n, 3, layer_matched=True)
        assert drawn.controls(n, 3, True).layers.tolist() == drawn.top(n).layers.tolist()


def test_layer_matching_without_enough_heads_to_follow_is_refused():
    with pytest.raises(ValueError, match="20 heads"):
        published("Qwen2.5-VL-7B").controls(21, 0, layer_matched=True)


def test_layer_matched_controls_of_the_published_lists_have_their_histogram():
    for model in PUBLISHED:
        heads = published(model)
        for seed in range(5):
            control = heads.controls(20, seed, layer_matched=True)
            assert control.layers.tolist() == heads.layers.tolist() and control.overlap(heads) == 0


# ---------------------------------------------------------------- scores


def scores(values, **facts):
    return HeadScores(np.asarray(values, dtype=float), **({"scoring": "VRH", "model": "toy", "n": 5} | facts))


def test_ties_are_broken_by_layer_and_then_by_head():
    ranked = scores([[1, 2, 1], [2, 1, 2]]).ranked()
    assert [str(h) for h in ranked] == ["L0H1", "L1H0", "L1H2", "L0H0", "L0H2", "L1H1"]
    assert [str(h) for h in scores([[0.0, -0.0], [-0.0, 0.0]]).ranked()] == ["L0H0", "L0H1", "L1H0", "L1H1"]


@many
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_ranking_is_the_sorted_list_of_a_loop(layers, heads, data):
    flat = data.draw(st.lists(st.integers(-2, 3), min_size=layers * heads, max_size=layers * heads))
    values = np.array(flat, dtype=float).reshape(layers, heads)
    expected = sorted(np.ndindex(layers, heads), key=lambda at: (-values[at], at))
    assert scores(values).ranked().heads == tuple(expected)
    assert scores(values).top(1).heads == tuple(expected[:1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        scores([[1, bad]])


def test_scores_without_two_axes_are_refused():
    for shape in [(4,), (2, 2, 2), ()]:
        with pytest.raises(ValueError, match="layers, heads"):
            scores(np.zeros(shape))


def test_asking_for_more_heads_than_the_model_has_names_the_grid():
    with pytest.raises(ValueError, match="2 layers x 3"):
        scores(np.arange(6).reshape(2, 3)).top(7)


def test_controls_of_scores_lie_outside_their_own_top():
    drawn = scores(np.random.default_rng(0).random((6, 8)))
    for n in range(1, 25):
        assert drawn.controls(n, 3).overlap(drawn.top(n)) == 0
    with pytest.raises(ValueError, match="23 of 48"):
        drawn.controls(25, 3)


@many
@given(
    st.lists(st.integers(-9, 40), min_size=2, max_size=30).filter(lambda flat: max(flat) > 0),
    st.sampled_from([0.1, 0.25, 0.5, 0.8, 0.9, 1.0]),
)
def test_share_holding_is_the_first_prefix_that_reaches_the_fraction(flat, fraction):
    ordered = sorted((max(value, 0) for value in flat), reverse=True)
    needed = next(m for m in range(1, len(flat) + 1) if sum(ordered[:m]) >= fraction * sum(ordered) - 1e-9)
    assert scores([flat]).share_holding(fraction) == pytest.approx(needed / len(flat))


@pytest.mark.parametrize(
    ("fraction", "most", "heads"), [(0.5, 9, 1), (0.9, 9, 3), (0.9, 2, 2), (1.0, 9, 4), (0.51, 9, 2)]
)
def test_the_fewest_heads_that_hold_a_share_of_the_mass(fraction, most, heads):
    assert scores([[5, 3], [1, 1]]).fewest(fraction, most) == heads


@pytest.mark.parametrize("empty", [[[0, 0]], [[-3, -1]], [[0, -1]]])
def test_without_a_positive_score_there_is_nothing_to_hold(empty):
    nothing = scores(empty, scoring="output/argmax/mean")
    for ask in (
        lambda: nothing.share_holding(0.5),
        lambda: nothing.fewest(0.5, 2),
        lambda: nothing.held_by(nothing.top(1)),
    ):
        with pytest.raises(ValueError, match="toy has a positive output/argmax/mean score.*output/sum/mean"):
            ask()
    assert nothing.gini() == 0


def test_the_share_above_a_threshold_counts_what_is_strictly_above():
    drawn = scores([[0.001, 0.002, -1, 0.005]])
    assert [drawn.share_above(at) for at in (-2, 0, 0.001, 0.005)] == [1, 0.75, 0.5, 0]


@many
@given(st.lists(st.integers(-3, 40), min_size=1, max_size=30).filter(lambda flat: max(flat) > 0))
def test_gini_is_half_the_mean_absolute_difference_over_the_mean(flat):
    held = [max(value, 0) for value in flat]
    apart = sum(abs(a - b) for a in held for b in held)
    assert scores([flat]).gini() == pytest.approx(apart / (2 * len(held) * sum(held)))


@many
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(1e-6, 1e6))
def test_gini_lies_in_0_to_1_and_does_not_depend_on_the_unit(flat, unit):
    flat = np.array(flat).round(6)
    assert 0 <= scores([flat]).gini() < 1
    assert scores([flat * unit]).gini() == pytest.approx(scores([flat]).gini(), abs=1e-9)


def test_gini_is_0_for_equal_heads_and_all_but_one_nth_for_a_single_one():
    for unit in (1e-9, 1.0, 1e6):
        assert scores(np.full((3, 4), unit)).gini() == 0
        assert scores(np.eye(12)[:1].reshape(3, 4) * unit).gini() == pytest.approx(11 / 12)


def test_one_head_that_holds_everything_is_one_share():
    assert scores([[0, 0], [9, 0]]).share_holding(0.99) == 0.25
    assert scores(np.ones((4, 5))).share_holding(0.5) == 0.5


def test_spearman_is_the_correlation_of_the_ranks():
    a = [[86, 97, 99, 100, 101], [103, 106, 110, 112, 113]]  # the textbook example: rho = -29/165
    b = [[2, 20, 28, 27, 50], [29, 7, 17, 6, 12]]
    assert scores(a).spearman(scores(b)) == pytest.approx(-29 / 165)
    tied = [[1, 1, 2, 3, 3], [4, 5, 5, 5, 6]]
    expected = np.corrcoef(rankdata(tied), rankdata(b))[0, 1]
    assert scores(tied).spearman(scores(b)) == pytest.approx(expected)


def test_scores_on_other_grids_are_not_correlated():
    with pytest.raises(ValueError, match="grids"):
        scores(np.arange(6).reshape(2, 3)).spearman(scores(np.arange(6).reshape(3, 2)))


# ---------------------------------------------------------------- overlap


def test_models_on_one_backbone_share_15_and_18_of_their_published_20_heads():
    assert published("Qwen2.5-VL-7B").overlap(published("InternVL3-8B")) == 15
    assert published("Qwen3-VL-8B").overlap(published("InternVL3.5-8B")) == 18


def test_heads_of_models_of_other_shapes_are_not_counted_as_shared():
    with pytest.raises(ValueError, match="28 x 28|36 layers x 32"):
        published("Qwen2.5-VL-7B").overlap(published("Qwen3-VL-8B"))
    with pytest.raises(ValueError, match="Detect heads"):
        published("Qwen2.5-VL-7B").on((36, 32))
    assert published("Qwen2.5-VL-7B").on((28, 28)) == published("Qwen2.5-VL-7B")


def test_the_overlap_matrix_marks_pairs_that_mean_nothing():
    matrix = overlap_matrix(published(model) for model in PUBLISHED)
    assert matrix.tolist() == [[20, 15, -1, -1], [15, 20, -1, -1], [-1, -1, 20, 18], [-1, -1, 18, 20]]


# ---------------------------------------------------------------- files


def test_heads_and_scores_come_back_from_their_file(tmp_path):
    drawn = scores(np.random.default_rng(1).random((6, 8)).round(6), n=200)
    path = drawn.save(tmp_path / "deep" / "toy.json", k=5, benchmark="scenes")
    heads, again = load_heads(path), load_scores(path)
    assert heads == drawn.top(5)
    assert (again.values == drawn.values).all() and (again.scoring, again.model, again.n) == ("VRH", "toy", 200)
    assert json.loads(path.read_text())["manifest"]["benchmark"] == "scenes"
    assert HeadSet.from_json(json.loads(json.dumps(heads.to_json()))) == heads


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e-9])
def test_stored_scores_rank_the_heads_as_the_stored_list_does(tmp_path, unit):
    drawn = scores(np.random.default_rng(2).random((6, 8)) * unit)
    path = drawn.save(tmp_path / "toy.json", k=48)
    assert load_scores(path).top(48).heads == load_heads(path).heads


@pytest.mark.parametrize("load", [load_heads, load_scores])
def test_a_missing_list_names_the_notebook_that_makes_it(tmp_path, load):
    with pytest.raises(FileNotFoundError, match="01_detect"):
        load(tmp_path / "none.json")


GOOD = {
    "name": "toy",
    "grid": [2, 3],
    "heads": [[0, 1]],
    "scores": [[1, 2, 3], [4, 5, 6]],
    "scoring": "VRH",
    "model": "toy",
    "n": 5,
}
GARBLED = {
    "empty": b"", "cut": json.dumps(GOOD).encode()[:40], "not text": b"\x80\x81\xff\x00",
    "a list": b"[1, 2]", "null": b"null",
    "no grid": json.dumps({k: v for k, v in GOOD.items() if k != "grid"}).encode(),
    "no heads": json.dumps({k: v for k, v in GOOD.items() if k != "heads"}).encode(),
    "grid of one": json.dumps(GOOD | {"grid": [2]}).encode(),
    "triples": json.dumps(GOOD | {"heads": [[0, 1, 2]]}).encode(),
    "words": json.dumps(GOOD | {"heads": ["ab"]}).encode(),
    "numbers": json.dumps(GOOD | {"heads": [1, 2]}).encode(),
    "outside": json.dumps(GOOD | {"heads": [[2, 0]]}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("what", GARBLED)
def test_a_garbled_list_names_its_file_and_the_next_step(tmp_path, what):
    path = tmp_path / "toy.json"
    path.write_bytes(GARBLED[what])
    with pytest.raises(ValueError, match=r"toy\.json.*01_detect"):
        load_heads(path)


@pytest.mark.parametrize(
    "change",
    [
        {"scores": None},
        {"scores": [[1, 2], [3, 4]]},
        {"scores": [[1, 2, 3], [4, 5]]},
        {"scores": [["a"] * 3] * 2},
        {"scores": ...},
        {"n": ...},
    ],
)
def test_garbled_scores_name_their_file_and_the_next_step(tmp_path, change):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps({k: v for k, v in (GOOD | change).items() if v is not ...}))
    with pytest.raises(ValueError, match=r"toy\.json.*01_detect"):
        load_scores(path)


@pytest.mark.parametrize("load", [load_heads, load_scores])
def test_heads_of_another_grid_are_refused_with_both_grids_and_the_next_step(tmp_path, load):
    path = scores(np.arange(6).reshape(2, 3)).save(tmp_path / "toy.json", k=2)
    assert load(path, [2, 3]).grid == load(path).grid == (2, 3)
    with pytest.raises(ValueError, match=r"toy\.json .*2 layers x 3 heads.*3 x 2.*01_detect") as refused:
        load(path, grid=(3, 2))
    assert "not a head list" not in str(refused.value)


def test_more_heads_than_the_grid_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="2 layers x 3"):
        scores(np.arange(6).reshape(2, 3)).save(tmp_path / "toy.json", k=7)
    assert not list(tmp_path.iterdir())


def test_a_set_and_the_rest_are_all_heads_once():
    chosen = HeadSet(((1, 2), (0, 1)), (3, 4), "top")
    assert sorted(chosen.heads + chosen.rest().heads) == [Head(layer, h) for layer in range(3) for h in range(4)]


def test_the_share_that_heads_hold_is_their_part_of_the_total():
    scores = HeadScores(np.array([[1.0, 2.0], [3.0, 4.0]]), "x", "m", 5)
    assert scores.held_by(scores.top(1)) == pytest.approx(0.4)
    assert scores.held_by(scores.ranked()) == pytest.approx(1.0)
    assert scores.held_by(scores.top(0)) == 0
    with pytest.raises(ValueError, match="2 layers x 3"):
        scores.held_by(HeadSet((Head(0, 0),), (2, 3), "another grid"))


def test_runs_stand_in_the_file_and_come_back(tmp_path):
    scores = HeadScores(np.eye(2), "x", "m", 5, runs=("abc", "def"))
    path = scores.save(tmp_path / "heads.json", 2)
    assert load_scores(path).runs == ("abc", "def")


def test_a_ranking_of_zeros_is_not_followed():
    some = scores([[0.2, 0.0, -0.1], [0.0, 0.5, 0.0]])
    assert [tuple(h) for h in some.found(2)] == [(1, 1), (0, 0)] == [tuple(h) for h in some.found(5)]
    assert len(some.top(5)) == 5 and len(scores([[0.0, 0.0]]).found(1)) == 0
