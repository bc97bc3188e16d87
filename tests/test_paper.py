"""Published numbers are the published ones, and verdicts follow criteria that can go either way.

Each check is tried on both sides of each of its thresholds.
"""

import os
import shutil
import subprocess
import sys
from math import comb
from pathlib import Path

import pandas as pd
import pytest

from vrhlib import paper, store
from vrhlib.heads import HeadSet
from vrhlib.profiles import MODELS, profile


def test_published_numbers_are_those_of_the_paper():
    table = paper.published("accuracy_vs_k").set_index(["benchmark", "model", "condition", "k"]).accuracy
    assert table["RefCOCO", "Qwen2.5-VL-7B", "vrh", 5] == 79.3 and table["RefCOCO", "Qwen2.5-VL-7B", "vrh", 10] == 9.7
    assert table["RefSpatialBench", "Qwen2.5-VL-7B", "vrh", 20] == 0
    assert table["Toloka", "InternVL3.5-8B", "random", 20] == 61.3
    for name in paper.TABLES:
        frame = paper.published(name)
        assert frame["where" if name == "claims" else "source"].notna().all()


def test_published_lists_share_15_and_18_heads_within_backbones():
    counts = [paper.published_heads(a).overlap(paper.published_heads(b)) for a, b in paper.SAME_BACKBONE]
    assert counts == [15, 18]
    assert [round(100 * paper.published_heads(m).share, 2) for m in paper.MODELS] == [2.55, 1.74, 2.55, 1.74]


def test_the_published_list_of_a_model_is_found_by_the_name_of_its_profile():
    for name in profile("paper").models:
        heads = paper.listed(name)
        assert heads.grid == MODELS[name].grid and len(heads) == 20 and name in heads.name.casefold()
    assert paper.listed("nano-qwen2.5-vl") is None


def test_prior_lists_overlap_as_published():
    prior = paper.prior_heads()
    assert len(set(prior["qrhead_nq"]) & set(paper.published_heads("Qwen2.5-VL-7B"))) == 8
    assert prior["vera"].overlap(paper.published_heads("Qwen3-VL-8B")) == 7


def test_the_overlaps_of_prior_lists_stand_beside_what_chance_would_give():
    table = paper.prior_overlaps()
    rows = table[table.benchmark == "RefCOCO"].set_index(["list", "model"])
    assert rows.loc[("qrhead_nq", "Qwen2.5-VL-7B"), ["shared", "of"]].tolist() == [8, 16]
    assert rows.loc[("vera", "Qwen3-VL-8B"), ["shared", "of"]].tolist() == [7, 20]
    assert len(rows) == 4 and len(table) == 4 * 5, "each list against the two models of its grid, on five benchmarks"
    assert rows.expected["qrhead_nq", "Qwen2.5-VL-7B"] == 16 * 20 / 784
    ways = [comb(20, i) * comb(784 - 20, 16 - i) for i in range(17)]
    assert rows.p["qrhead_nq", "Qwen2.5-VL-7B"] == pytest.approx(sum(ways[8:]) / sum(ways))


def test_tables_1_and_2_are_as_printed():
    works, choices = paper.published_table1(), paper.published_table2()
    assert choices.set_index("method").T.to_dict("list") == {
        "Retrieval Heads": ["out", "argmax", "avg"],
        "QRHead": ["in", "sum", "avg"],
        "OCR Heads": ["out", "argmax", "avg"],
        "VERA": ["out", "sum", "avg"],
        "Loc. Heads": ["in", "N/A†", "freq"],
        "VRH": ["out", "sum", "mean"],
    }
    assert list(choices) == ["method", "Q", "Phi", "Omega"] and list(works) == ["method", "domain", "causal"]
    assert works.method.tolist() == choices.method.tolist()
    assert works.domain.tolist() == ["text"] * 2 + ["visual document"] * 2 + ["general image"] * 2
    assert works.causal.dtype == bool and works.method[~works.causal].tolist() == ["Loc. Heads"]


def test_published_variants_carry_their_standard_errors_in_our_names():
    table = paper.scoring_variants(20)
    assert set(table.condition) == {"vrh", *paper.FLIPS, "random", "unmasked", "q_union"}
    assert table.groupby("model").size().tolist() == [7] * 4 and set(table.k) == {0, 20}
    row = table.set_index(["model", "condition"]).loc[("Qwen2.5-VL-7B", "vrh")]
    assert (row.accuracy, row.n) == (7.48, 8611), "not that of Table A10"
    assert row.stderr == pytest.approx(100 * (0.0748 * 0.9252 / 8611) ** 0.5)
    assert table[table.condition.isin(paper.FLIPS)].stderr.between(0.28, 0.55).all()
    every = paper.scoring_variants()
    assert set(every.k) == {0, 5, 10, 20, 50} and len(every) == 4 * (1 + 4 * 5 + 1)
    with pytest.raises(ValueError, match="k=3; there are k = 5, 10, 20, 50"):
        paper.scoring_variants(3)


def test_the_papers_choice_is_not_always_the_first_of_the_four_variants():
    table = paper.scoring_variants()
    rank = table[table.condition == "vrh"].set_index(["k", "model"])["rank"]
    published = {5: [4, 3, 1, 2], 10: [2, 2, 1, 1], 20: [1, 1, 2, 1], 50: [1, 2, 2, 2]}
    assert {k: [rank[k, model] for model in paper.MODELS] for k in published} == published
    assert table["rank"].isna().tolist() == table.condition.isin(["random", "unmasked", "q_union"]).tolist()


def test_published_variants_of_qwen25_at_k_20_cannot_be_told_apart():
    table = paper.published_differences(20).set_index(["model", "variant"])
    qwen = table.loc["Qwen2.5-VL-7B"]
    assert qwen.change.to_dict() == {"flip_q": 0.2, "flip_phi": 0.65, "flip_omega": 0.53, "q_union": -0.34}
    assert qwen.p.min() > 0.1 and not qwen.differs.any()
    assert all(table.differs[model, "flip_q"] and table.z[model, "flip_q"] > 10 for model in paper.MODELS[1:])
    assert table.change["InternVL3.5-8B", "flip_phi"] > 2 * table.change["InternVL3.5-8B", "flip_q"]
    p = (0.0748 + 0.0813) / 2
    assert qwen.z["flip_phi"] == pytest.approx(0.0065 / (2 * p * (1 - p) / 8611) ** 0.5, rel=0.02)
    assert set(paper.published_differences(5).variant) == set(paper.FLIPS), "Table A8 has k=20 only"


def test_qwen_heads_lie_in_layers_14_to_19():
    assert {h.layer for h in paper.published_heads("Qwen2.5-VL-7B")} == {14, 16, 17, 18, 19}


def test_an_unknown_claim_table_or_model_is_refused_by_name():
    with pytest.raises(ValueError, match="No check for claim 'sparse-ish'"):
        paper.compare({"sparse-ish": None}, "nano", "x")
    with pytest.raises(ValueError, match="No published table"):
        paper.published("table99")
    with pytest.raises(ValueError, match="No published heads of 'Qwen9'"):
        paper.published_heads("Qwen9")


def test_a_baseline_stands_beside_the_papers_number_or_that_of_the_models_authors():
    rows = [("qwen2.5-vl-7b", "refcoco"), ("internvl3.5-8b", "refcocog"), ("internvl3-8b", "refcoco+-unc"),
            ("qwen3-vl-8b", "mmstar"), ("a folder", "refcoco")]  # fmt: skip
    table = pd.DataFrame(rows, columns=["model", "benchmark"]).assign(accuracy=50.0)
    table.attrs["runs"] = ["abc"]
    got = paper.beside(table)
    assert got.published.tolist()[:4] == [86.2, 86.8, 88.2, 63.0], "Tables A1, A1, their report, 3"
    assert got.published.isna().tolist() == [False] * 4 + [True]
    assert list(got) == ["model", "benchmark", "published", "accuracy"] and got.attrs["runs"] == ["abc"]
    assert paper.beside(table, split="testA").published[2] == 92.5
    nano = table.assign(model="nano-qwen2.5-vl", benchmark="scenes")
    assert "published" not in paper.beside(nano), (
        "the paper's numbers never stand beside a nano model's as if comparable"
    )


def test_every_pinned_model_of_the_paper_profile_has_its_published_name():
    names = [pin.published for pin in MODELS.values() if pin.profile == "paper"]
    assert sorted(names) == sorted(paper.MODELS)
    grids = {pin.published: pin.grid for pin in MODELS.values() if pin.published}
    assert all(paper.published_heads(name).grid == grid for name, grid in grids.items())


# ---------------------------------------------------------------- checks, each on both sides of its thresholds


def judge(claim: str, evidence) -> str:
    return paper.CHECKS[claim](evidence).verdict


def sweep(vrh=20.0, random=79.0, one=10.0, base=80.0, matched=(), **shares) -> pd.DataFrame:
    rows = [("unmasked", 0, None, base), ("vrh", 6, None, vrh), ("one output token", 6, None, one)]
    rows += [("random", 6, seed, random + (seed - 2) / 10) for seed in range(5)]
    rows += [("layer_matched", 6, seed, accuracy) for seed, accuracy in enumerate(matched)]
    rows += [("vrh", 3, None, base), *(("random", 3, seed, 0.0) for seed in range(5))]  # a smaller k is not judged
    frame = pd.DataFrame(rows, columns=["condition", "k", "seed", "accuracy"])
    shares = {"malformed": 0.0, "cut off": 0.0, "no box": 0.0} | shares
    return frame.assign(low=frame.accuracy - 3, high=frame.accuracy + 3, n=400, **shares)


@pytest.mark.parametrize(
    "vrh, random, matched, word",
    [
        (40.0, 79.0, (), "matches"),
        (40.25, 79.0, (), "differs"),
        (20.0, 77.1, (), "matches"),
        (20.0, 77.0, (), "within tolerance"),
        (20.0, 70.1, (), "within tolerance"),
        (20.0, 70.0, (), "differs"),
        (20.0, 79.0, (23.1, 60.0), "matches"),
        (20.0, 79.0, (23.0, 60.0), "within tolerance"),  # the upper bound of VRH is 23
        (20.0, 79.0, (20.25, 20.25), "within tolerance"),
        (20.0, 79.0, (20.0, 20.0), "differs"),
        (20.0, 70.0, (60.0, 60.0), "differs"),
    ],
)
def test_collapse_needs_a_fall_benign_random_heads_and_a_place_below_layer_matched_ones(vrh, random, matched, word):
    assert judge("causal-collapse", sweep(vrh, random, matched=matched)) == word


def test_collapse_says_both_drops_beside_the_published_ones():
    found = paper.CHECKS["causal-collapse"](sweep(22.0, 78.2, matched=(70.0, 72.0)))
    assert found.difference == "drop 58.0 (published up to 84.8); random 1.8 (< 3)"
    assert found.ours == "80.0 to 22.0 at k=6; random 78.2 (5 seeds, n=400); layer-matched 71.0"
    assert found.interval == "VRH [19.0, 25.0]; random [78.0, 78.4]; layer-matched 70.0 to 72.0"
    found = paper.CHECKS["causal-collapse"](sweep(22.0, 78.2, matched=(21.0, 25.0)))
    assert found.difference.endswith("; layer-matched 57.0"), "named where it is in the way of the claim"


def cuts_at(accuracies: dict, base: float = 80.0) -> pd.DataFrame:
    rows = [("vrh", k, accuracy) for k, accuracy in accuracies.items()] + [("unmasked", 0, base), ("random", 1, 0.0)]
    frame = pd.DataFrame(rows, columns=["condition", "k", "accuracy"])
    return frame.assign(low=frame.accuracy - 3, high=frame.accuracy + 3, n=400)


@pytest.mark.parametrize(
    "accuracies, word",
    [
        ({26: 40.0}, "matches"),
        ({27: 40.0, 26: 40.25}, "within tolerance"),
        ({100: 40.0}, "within tolerance"),
        ({101: 40.0, 100: 40.25}, "differs"),
        ({1: 79.0, 5: 40.25}, "differs"),
        ({200: 0.0, 10: 30.0, 50: 60.0}, "matches"),  # the smallest that halves, whatever stands first
    ],
)
def test_few_heads_are_those_that_halve_the_accuracy(accuracies, word):
    assert judge("head-share", (cuts_at(accuracies), 1000)) == word


def test_the_share_is_told_with_the_accuracy_it_leaves():
    found = paper.CHECKS["head-share"]((cuts_at({2: 60.0, 4: 33.0}), 80))
    assert found.ours == "halved by 4 of 80 heads = 5.0 %: 80.0 to 33.0 (n=400)" and found.interval == "[30.0, 36.0]"
    assert found.difference == "halved by 5.0 % of the heads (published 1.7 to 2.6 %)"
    found = paper.CHECKS["head-share"]((cuts_at({2: 60.0, 4: 50.0}), 80))
    assert found.ours == "not halved by 4 of 80 heads = 5.0 %: 80.0 to 50.0 (n=400)"
    assert found.difference.startswith("not halved by 5.0 %")
    for table in (cuts_at({}), pd.concat([cuts_at({2: 60.0}), cuts_at({2: 30.0})])):
        with pytest.raises(ValueError, match="one row of vrh for each k"):
            paper.CHECKS["head-share"]((table, 80))


def test_the_published_shares_match_the_published_claim():
    table = paper.published("accuracy_vs_k").query("benchmark == 'RefCOCO' and condition == 'vrh'")
    table = table.assign(condition=table.condition.where(table.k > 0, "unmasked"), low=0, high=100)
    totals = dict(zip(paper.MODELS, (784, 1152, 784, 1152)))
    found = {model: paper.CHECKS["head-share"]((table[table.model == model], totals[model])) for model in totals}
    assert [f.verdict for f in found.values()] == ["matches"] * 4
    assert [f.ours.split(" heads")[0] for f in found.values()] == [
        "halved by 10 of 784", "halved by 10 of 1152", "halved by 10 of 784", "halved by 20 of 1152",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "layers, depth, word",
    [
        ((2, 6), 9, "matches"),
        ((1, 6), 9, "within tolerance"),
        ((2, 7), 9, "within tolerance"),
        ((1, 7), 9, "differs"),
        ((0, 1, 4), 9, "differs"),
        ((0, 0, 0, 4), 9, "differs"),  # heads are counted, not layers
        ((0, 4, 4, 4), 9, "within tolerance"),
        ((14, 19), 28, "matches"),
    ],
)
def test_middle_means_the_middle_half_of_the_layers(layers, depth, word):
    heads = HeadSet(tuple((layer, i) for i, layer in enumerate(layers)), (depth, 8), "x")
    found = paper.CHECKS["middle-layers"](heads)
    assert found.verdict == word and found.ours == f"layers {min(layers)}-{max(layers)} of 0-{depth - 1}"


def test_middle_counts_heads():
    found = paper.CHECKS["middle-layers"](HeadSet(((0, 0), (4, 0), (4, 1)), (9, 8), "x"))
    assert found.difference == "2 of 3 heads in the middle half of the layers (published all)"


@pytest.mark.parametrize(
    "malformed, word", [(5.0, "matches"), (5.25, "within tolerance"), (10.0, "within tolerance"), (10.25, "differs")]
)
@pytest.mark.parametrize("outcome", ["malformed", "cut off", "no box"])
def test_format_is_kept_only_if_boxes_can_be_read(outcome, malformed, word):
    found = paper.CHECKS["format-kept"](sweep(**{outcome: malformed}))
    assert found.verdict == word and found.difference.startswith(f"{malformed:.1f} % without")


def test_every_failure_to_read_a_box_counts():
    assert judge("format-kept", sweep(malformed=4.0, **{"cut off": 4.0, "no box": 2.0})) == "within tolerance"
    assert judge("format-kept", sweep(malformed=4.0, **{"cut off": 4.0, "no box": 4.0})) == "differs"


@pytest.mark.parametrize(
    "one, random, word",
    [
        (21.0, 79.0, "matches"),
        (19.0, 79.0, "matches"),
        (21.25, 79.0, "within tolerance"),
        (25.0, 79.0, "within tolerance"),
        (15.0, 79.0, "within tolerance"),
        (25.25, 79.0, "differs"),
        (20.0, 23.1, "matches"),
        (20.0, 22.9, "differs"),
        (25.0, 28.1, "within tolerance"),
        (25.0, 27.9, "differs"),  # above the upper bound of VRH, below that of one token
    ],
)
def test_one_token_must_do_what_all_do(one, random, word):
    assert judge("one-token", sweep(20.0, random, one=one)) == word


def test_one_token_is_told_beside_the_published_distances():
    found = paper.CHECKS["one-token"](sweep(20.0, 79.0, one=22.0))
    assert found.difference == "2.0 apart (published 0.3); random 57.0 above (78.5)"
    assert found.ours == "22.0 / 20.0 / 79.0 at k=6 (n=400)" and found.interval == "[19.0, 25.0] / [17.0, 23.0]"


def draws(overlaps, k=10, every=200) -> pd.DataFrame:
    return pd.DataFrame({"n": [10] * len(overlaps) + [every], "overlap": [*overlaps, k], "k": k})


@pytest.mark.parametrize(
    "overlaps, word",
    [
        ([10, 8, 9, 9], "matches"),
        ([9, 9, 9, 8], "within tolerance"),
        ([8, 8, 7, 9], "within tolerance"),
        ([8, 8, 8, 7], "differs"),
    ],
)
def test_few_samples_must_find_most_heads(overlaps, word):
    assert judge("few-samples", draws(overlaps)) == word


def test_ten_samples_of_fewer_than_twenty_test_nothing():
    assert judge("few-samples", draws([9] * 4, every=20)) == "matches"
    found = paper.CHECKS["few-samples"](draws([9] * 4, every=19))
    assert (found.verdict, found.difference) == ("not attempted", "10 of only 19 samples")
    assert found.ours == "9.0 of 10 from 10 samples (4 draws)", "the numbers are shown all the same"
    assert paper.CHECKS["few-samples"](draws([9] * 4)).difference.startswith("90.0 % of the heads")
    with pytest.raises(ValueError, match="at least 10 samples"):
        judge("few-samples", draws([9] * 4).query("n > 10"))


# ---------------------------------------------------------------- claims about scorings


def cuts(changes: dict, base: float = 80.0, vrh: float = 20.0, random=(79.0, 78.5, 79.5)) -> pd.DataFrame:
    """A frame of one model at k = 6: (change, low, high) of each scoring against vrh, controls without a change."""
    rows = [("unmasked", 0, base), ("vrh", 6, vrh), *(("random", 6, accuracy) for accuracy in random)]
    rows = [(*row, None, None, None) for row in rows]
    rows += [(name, 6, vrh + change[0], *change) for name, change in changes.items()]
    columns = ["condition", "k", "accuracy", "change", "change_low", "change_high"]
    return pd.DataFrame(rows, columns=columns).assign(n=400)


def flips(q, phi, omega, **others) -> dict:
    return dict(zip(paper.FLIPS, (q, phi, omega))) | others


SMALL, NONE, BIG = (1.0, -1.0, 3.0), (0.0, 0.0, 0.0), (30.0, 25.0, 35.0)
Q = (9.0, 6.0, 12.0)
CUT = {"retrieval_heads": BIG, "ocr_heads_aligned": BIG, "vera": BIG, "localization_heads": BIG}


@pytest.mark.parametrize(
    "changes, word",
    [
        (flips(Q, SMALL, SMALL), "matches"),
        (flips(Q, SMALL, (4.4, 1.0, 8.0)), "matches"),
        (flips(Q, (4.5, 1.0, 8.0), SMALL), "within tolerance"),
        (flips(Q, (-4.5, -8.0, -1.0), SMALL), "within tolerance"),
        (flips(Q, SMALL, (8.9, 6.0, 12.0)), "within tolerance"),
        (flips(Q, SMALL, (9.0, 6.0, 12.0)), "differs"),
        (flips(Q, (-9.0, -12.0, -6.0), SMALL), "differs"),
        (flips((9.0, 0.1, 18.0), SMALL, SMALL), "matches"),
        (flips((9.0, 0.0, 18.0), SMALL, SMALL), "within tolerance"),
        (flips((-9.0, -12.0, -6.0), SMALL, SMALL), "differs"),  # most, but the default is the weaker cut
        (flips(NONE, SMALL, NONE), "differs"),
        (flips(NONE, NONE, NONE), "not attempted"),
        (flips(Q, SMALL, SMALL, other=(50.0, 45.0, 55.0)), "matches"),
    ],
)
def test_the_query_axis_must_matter_most_upwards_and_beyond_sampling_error(changes, word):
    assert judge("query-axis", cuts(changes)) == word


def test_the_query_axis_row_shows_every_change_with_its_interval():
    found = paper.CHECKS["query-axis"](cuts(flips(Q, (-1.0, -3.0, 1.0), NONE)))
    assert found.ours == "vrh 20.0 at k=6 (n=400); change: flip_q +9.0, flip_phi -1.0, flip_omega +0.0"
    assert found.interval == "flip_q [+6.0, +12.0]; flip_phi [-3.0, +1.0]; flip_omega [+0.0, +0.0]"
    assert found.difference == "Q +9.0, Phi -1.0, Omega +0.0 (published Q > Phi, Omega)"
    assert paper.CHECKS["query-axis"](cuts(flips(NONE, NONE, NONE))).difference == "no other scoring changed anything"


@pytest.mark.parametrize(
    "changes, word",
    [
        (flips(Q, SMALL, NONE), "matches"),
        (flips(Q, SMALL, (-0.1, -3.0, 3.0)), "within tolerance"),
        (flips(Q, (-1.0, -3.0, 0.0), SMALL), "within tolerance"),
        (flips(Q, (-1.0, -3.0, -0.1), SMALL), "differs"),
        (flips(Q, SMALL, SMALL, q_union=(-4.0, -6.0, -2.0)), "differs"),
        (flips(NONE, NONE, NONE), "not attempted"),
    ],
)
def test_the_best_variant_is_beaten_by_none(changes, word):
    assert judge("best-variant", cuts(changes)) == word


def test_what_leaves_less_is_counted_and_the_lowest_named():
    found = paper.CHECKS["best-variant"](cuts(flips((-30.0, -41.0, -20.0), (-1.0, -3.0, 1.0), NONE)))
    assert found.difference == "2 of 3 leave less than VRH, flip_q -30.0 (published 0)"
    assert paper.CHECKS["best-variant"](cuts(flips(Q, SMALL, NONE))).difference == (
        "0 of 3 leave less than VRH (published 0)"
    )
    found = paper.CHECKS["beats-prior"](cuts({"vera": (-4.0, -6.0, -2.0), "qrhead": (-9.0, -12.0, -6.0)}))
    assert found.difference == "1 of 2 leave less than VRH, vera -4.0 (published 0); 3 not cut"
    assert found.ours.endswith("; not cut, fewer than k heads found: retrieval_heads, ocr_heads, localization_heads")
    assert "qrhead -9.0" in found.ours and "qrhead [-12.0, -6.0]" in found.interval


@pytest.mark.parametrize(
    "changes, random, word",
    [
        (CUT | {"vera": (3.0, 0.1, 5.0)}, (79, 78, 80), "matches"),
        (CUT | {"vera": (3.0, 0.0, 5.0)}, (79, 78, 80), "within tolerance"),
        (CUT | {"vera": (-1.0, -3.0, 0.0)}, (79, 78, 80), "within tolerance"),
        (CUT | {"vera": (-4.0, -6.0, -0.1)}, (79, 78, 80), "differs"),
        (CUT, (20, 19, 24), "within tolerance"),
        (CUT, (10, 11, 9), "differs"),
        ({"vera": BIG}, (79, 78, 80), "within tolerance"),  # the others found too few heads to be cut
        ({"qrhead": BIG}, (79, 78, 80), "not attempted"),  # not one that the claim names
        (CUT | {"sparsemm": (-9.0, -12.0, -6.0)}, (79, 78, 80), "matches"),
    ],
)
def test_vrh_must_cost_more_than_every_earlier_method_and_random_heads(changes, random, word):
    assert judge("beats-prior", cuts(changes, random=random)) == word


@pytest.mark.parametrize("claim", ["causal-collapse", "head-share", "query-axis", "best-variant", "beats-prior"])
def test_a_model_with_nothing_to_lose_tests_no_claim_about_losses(claim):
    def found(base):
        if claim == "causal-collapse":
            return paper.CHECKS[claim](sweep(2.0, base, base=base))
        if claim == "head-share":
            return paper.CHECKS[claim]((cuts_at({2: 1.0}, base), 1000))
        good = CUT if claim == "beats-prior" else flips(Q, (3.0, 1.0, 5.0), (3.0, 1.0, 5.0))
        return paper.CHECKS[claim](cuts(good, base=base))

    assert found(20.0).verdict == "matches" and "published" in found(20.0).difference
    assert found(19.9).verdict == "not attempted" and found(19.9).difference == "unmasked 19.9: nothing to lose"
    assert found(19.9).ours, "the numbers are shown all the same"


def test_scorings_can_be_compared_without_an_unmasked_row():
    frame = cuts(flips(Q, SMALL, SMALL)).query("condition != 'unmasked'")
    assert [judge(claim, frame) for claim in ("query-axis", "best-variant")] == ["matches"] * 2


@pytest.mark.parametrize("claim", ["query-axis", "best-variant", "beats-prior"])
def test_frames_that_compare_nothing_are_refused_with_the_next_step(claim):
    good = cuts(flips(SMALL, SMALL, SMALL))
    bad = {
        "k = \\[6, 7\\]": pd.concat([good, good.assign(k=7)]),
        "one frame per model": pd.concat([good, good]),
        "conditions unmasked, random": good[good.condition != "vrh"],
        "conditions unmasked, vrh": good[~good.condition.isin(paper.FLIPS)],
        "of flip_q.*paired difference": good.drop(columns=["change", "change_low"]),
        "of flip_phi:": good.assign(change_high=good.change_high.where(good.condition != "flip_phi")),
    }
    for message, frame in bad.items():
        with pytest.raises(ValueError, match=message):
            paper.CHECKS[claim](frame)
    with pytest.raises(ValueError, match="No change against vrh of flip_omega:"):
        paper.CHECKS["query-axis"](good[good.condition != "flip_omega"])


@pytest.mark.parametrize(
    "summed, word",
    [
        ((14.9, 4.0), "matches"),
        ((15.0, 4.0), "within tolerance"),
        ((14.9, 4.1), "within tolerance"),
        ((22.4, 6.0), "within tolerance"),
        ((22.5, 6.0), "differs"),
        ((14.9, 6.1), "differs"),
    ],
)
@pytest.mark.parametrize("mean", [(90.0, 90.0), (1.0, 0.0)])
def test_sparsity_is_judged_on_the_papers_formula_with_the_mean_beside(mean, summed, word):
    shares = pd.DataFrame([("mean", *mean), ("sum", *summed)], columns=["scoring", "above_1e-3", "above_5e-3"])
    found = paper.CHECKS["sparse"](shares)
    assert found.verdict == word
    assert found.ours.startswith(f"sum: {summed[0]:.1f} % above 1e-3, {summed[1]:.1f} %")
    assert f"mean: {mean[0]:.1f} %" in found.ours
    assert found.difference == f"{summed[0]:.1f} % above 1e-3 (< 15), {summed[1]:.1f} % above 5e-3 (<= 4)"
    with pytest.raises(ValueError, match="sum is missing"):
        paper.CHECKS["sparse"](shares[:1])


def test_the_methods_that_beats_prior_names_are_those_compared_in_the_paper_but_qrhead():
    from vrhlib.methods import COMPARED

    assert set(paper.PRIOR) == set(COMPARED) - {"qrhead"}


def test_the_sparse_claim_shows_its_intervals():
    shares = pd.DataFrame({"scoring": ["sum", "mean"], "above_1e-3": [10.0, 5.0], "above_5e-3": [3.0, 2.0]})
    assert paper.CHECKS["sparse"](shares).interval == "exact"
    ends = {
        f"above_{t}_{end}": [v, v]
        for t, low, high in (("1e-3", 8, 12), ("5e-3", 2, 4))
        for end, v in (("low", low), ("high", high))
    }
    assert paper.CHECKS["sparse"](shares.assign(**ends)).interval == "sum: [8.0, 12.0], [2.0, 4.0]"


# ---------------------------------------------------------------- many models and benchmarks, and two of one backbone


def cells(*rows: tuple) -> pd.DataFrame:
    """(unmasked, vrh, random_drop) of each model and benchmark."""
    frame = pd.DataFrame(rows, columns=["unmasked", "vrh", "random_drop"])
    frame["drop"] = frame.unmasked - frame.vrh
    frame = frame.assign(drop_low=frame["drop"] - 5, drop_high=frame["drop"] + 5, k=5, n=200, unreadable=0.0)
    frame = frame.assign(random_drop_low=frame.random_drop - 1, random_drop_high=frame.random_drop + 1)
    return frame.assign(model=[f"m{i // 2}" for i in frame.index], benchmark=[f"b{i % 2}" for i in frame.index])


GOOD, BAD = (80.0, 20.0, 1.0), (80.0, 60.0, 1.0)


@pytest.mark.parametrize(
    "rows, word",
    [
        ([GOOD] * 20, "matches"),
        ([GOOD] * 19, "within tolerance"),  # the claim is about twenty
        ([*[GOOD] * 9, BAD], "within tolerance"),
        ([*[GOOD] * 8, BAD], "differs"),
        ([*[GOOD] * 18, BAD, BAD], "within tolerance"),
        ([*[GOOD] * 17, *[BAD] * 3], "differs"),
        ([(80.0, 40.0, 10.0)] * 20, "matches"),
        ([(80.0, 40.1, 10.0)], "differs"),
        ([(80.0, 40.0, 10.1)], "differs"),
        ([*[GOOD] * 20, (19.9, 19.9, 1.0)], "matches"),  # has nothing to lose, so does not count
        ([GOOD, (20.0, 19.9, 1.0)], "differs"),
        ([(19.9, 1.0, 1.0)] * 3, "not attempted"),
    ],
)
def test_universal_counts_the_pairs_that_fall_to_half_while_random_heads_cost_little(rows, word):
    assert judge("universal", cells(*rows)) == word


@pytest.mark.parametrize(
    "more, word",
    [
        ({"unreadable": 10.0, "beyond_matched_low": 0.1}, "matches"),
        ({"unreadable": 10.1}, "differs"),
        ({"beyond_matched_low": 0.0}, "differs"),
        ({"beyond_matched_low": float("nan")}, "matches"),  # the layers have no heads left to draw
    ],
)
def test_broken_replies_and_what_any_heads_of_these_layers_do_are_no_support(more, word):
    assert judge("universal", cells(*[GOOD] * 20).assign(**more)) == word


def test_universal_names_the_smallest_drop_and_every_pair_that_fails():
    rows = cells(GOOD, (80.0, 51.0, 2.0), (80.0, 10.0, 12.0), (10.0, 9.0, 50.0)).assign(unreadable=[1, 2, 30, 99])
    found = paper.CHECKS["universal"](rows.iloc[::-1])
    assert found.ours == (
        "1 of 3 model x benchmark pairs fall to half or less, in readable replies, more than layer-matched draws, "
        "random heads costing at most 10; smallest drop 29.0 (m0 on b1, k=5, n=200); replies without a readable box "
        "1.0 to 30.0 %; not: m1 on b0 (drop 70.0, random 12.0, unreadable 30 %), m0 on b1 (drop 29.0, random 2.0, "
        "unreadable 2 %); 1 not counted (unmasked under 20)"
    )
    assert found.interval == "smallest drop [24.0, 34.0]; random drop 1.0 to 12.0 [11.0, 13.0]"
    assert found.difference == "1 of 3 (published 20 of 20)"
    every = paper.CHECKS["universal"](cells(GOOD, GOOD)).ours
    assert "not:" not in every and "not counted" not in every
    none = paper.CHECKS["universal"](cells((10.0, 1.0, 1.0)))
    assert none[:3] == ("0 of 1 pairs count", "–", "unmasked under 20: nothing to lose")


def published_cells(k: int) -> pd.DataFrame:
    table = paper.published("accuracy_vs_k").query("k in [0, @k]")
    wide = table.pivot(index=["model", "benchmark"], columns=["condition", "k"], values="accuracy").reset_index()
    unmasked, vrh, random = wide["vrh", 0], wide["vrh", k], wide["random", k]
    frame = cells(*zip(unmasked, vrh, unmasked - random))
    return frame.assign(model=wide["model"], benchmark=wide["benchmark"]).dropna()  # of some, only k=20 was published


def test_all_published_pairs_show_the_published_claim_at_20_heads_and_not_at_5():
    found = paper.CHECKS["universal"](published_cells(20))
    assert (found.verdict, found.difference) == ("matches", "20 of 20 (published 20 of 20)")
    assert "smallest drop 33.0 (InternVL3-8B on RefSpatialBench" in found.ours
    assert "random drop -1.0 to 10.0" in found.interval
    assert judge("universal", published_cells(5)) == "differs" and len(published_cells(5)) > 10


def test_universal_refuses_gaps_and_pairs_told_twice():
    rows = cells(GOOD, GOOD)
    with pytest.raises(ValueError, match="measure drop_low, unreadable in every row"):
        judge("universal", rows.drop(columns="drop_low").assign(unreadable=[1.0, None]))
    with pytest.raises(ValueError, match="one row per model and benchmark"):
        judge("universal", pd.concat([rows, rows.assign(k=8)]))


def pair(**changes) -> pd.DataFrame:
    """Both directions; a value for both, or one for each."""
    frame = pd.DataFrame({"model": ["a", "b"], "source": ["b", "a"]}).assign(
        k=20, shared=15, spearman=0.9, p_in_layer=0.001, own_drop=60.0, borrowed_drop=55.0, borrowed_low=50.0,
        borrowed_high=60.0, random_drop=1.0, n=200,
    )  # fmt: skip
    return frame.assign(**changes)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({}, "matches"),
        ({"shared": 14}, "matches"),
        ({"shared": 13}, "within tolerance"),
        ({"shared": [14, 13]}, "within tolerance"),
        ({"shared": 7, "k": 10}, "matches"),
        ({"spearman": 0.85}, "matches"),
        ({"spearman": [0.9, 0.84]}, "within tolerance"),
        ({"spearman": 0.5}, "within tolerance"),
        ({"spearman": [0.9, 0.49]}, "differs"),
        ({"shared": 13, "p_in_layer": 0.049}, "within tolerance"),
        ({"shared": 13, "p_in_layer": [0.001, 0.05]}, "differs"),
        ({"p_in_layer": [0.001, 0.05]}, "differs"),  # as many as layers explain
        ({"random_drop": 49.9}, "matches"),
        ({"random_drop": [1.0, 50.0]}, "differs"),
        ({"matched_drop": [49.9, float("nan")]}, "matches"),
        ({"matched_drop": [50.0, float("nan")]}, "differs"),
        ({"other_drop": [54.9, float("nan")]}, "matches"),
        ({"other_drop": [float("nan"), 55.0]}, "differs"),  # then any list of plausible heads would do
        ({"borrowed_drop": 30.0}, "matches"),
        ({"borrowed_drop": [30.0, 29.9]}, "differs"),
        ({"shared": 13, "borrowed_drop": [29.9, 30.0]}, "differs"),
        ({"own_drop": [10.0, 60.0]}, "matches"),
        ({"own_drop": [9.9, 60.0]}, "not attempted"),
        ({"own_drop": [60.0, 0.0]}, "not attempted"),
    ],
)
def test_models_of_one_backbone_must_share_heads_scores_and_damage_both_ways(changes, word):
    assert judge("same-backbone", pair(**changes)) == word


def test_same_backbone_tells_both_directions():
    found = paper.CHECKS["same-backbone"](
        pair(shared=4, k=4, spearman=[0.53, 0.6], own_drop=[60.0, 50.0], p_in_layer=[0.012, 0.03])
    )
    assert found.difference == "shared 4 of 4, Spearman 0.53 (published 0.89 to 0.91); damage 0.92, 1.10 of own"
    assert found.ours == (
        "a with heads of b, k=4: 4 of 4 shared (p 0.012 in layers), Spearman 0.53; own cost 60.0, borrowed 55.0, "
        "random 1.0 (n=200); b with heads of a, k=4: 4 of 4 shared (p 0.030 in layers), Spearman 0.60; own cost 50.0, "
        "borrowed 55.0, random 1.0 (n=200)"
    )
    assert found.interval == "a: borrowed [50.0, 60.0]; b: borrowed [50.0, 60.0]"
    more = paper.CHECKS["same-backbone"](pair(matched_drop=[20.0, None], other_drop=[3.0, 70.0]))
    assert "random 1.0, layer-matched 20.0, another backbone at most 3.0 (n=200)" in more.ours
    assert "random 1.0, another backbone at most 70.0 (n=200)" in more.ours
    assert more.difference.endswith("of own; heads of another backbone cost up to 70.0")
    assert paper.CHECKS["same-backbone"](pair(k=[20, 18])).difference.startswith("shared 15 of 20, 15 of 18, Spearman")
    weak = paper.CHECKS["same-backbone"](pair(own_drop=[4.0, 60.0]))
    assert weak.difference == "own heads cost only 4.0: nothing to carry over" and "own cost 4.0" in weak.ours


def test_same_backbone_refuses_one_direction_and_gaps():
    bad = [pair()[:1], pd.concat([pair(), pair(k=8)]), pair(source=["b", "c"]), pair(model="a", source="b")]
    for frame in bad:
        with pytest.raises(ValueError, match="two rows, a model with another's heads cut, and the reverse"):
            judge("same-backbone", frame)
    with pytest.raises(ValueError, match="measure p_in_layer in every row"):
        judge("same-backbone", pair(p_in_layer=[0.01, None]))


# ---------------------------------------------------------------- answers in words, and training


def tasks(*rows: tuple) -> pd.DataFrame:
    """(unmasked, vrh, random_drop, above_blind_low) of each model and benchmark; intervals of drops are 10 wide."""
    frame = cells(*[row[:3] for row in rows])
    return frame.assign(above_blind_low=[row[3] for row in rows], blind=20.0)


SEEN, KEPT, UNSEEN = (80.0, 50.0, 1.0, 30.0), (80.0, 78.0, 1.0, 30.0), (80.0, 50.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "rows, word",
    [
        ([SEEN] * 28, "matches"),
        ([SEEN] * 27, "within tolerance"),  # the claim is about twenty-eight
        ([*[SEEN] * 28, UNSEEN], "matches"),  # answered without looking: does not count
        ([*[SEEN] * 27, UNSEEN], "within tolerance"),
        ([*[SEEN] * 9, KEPT], "within tolerance"),
        ([*[SEEN] * 8, KEPT], "differs"),
        ([(80.0, 75.0, 1.0, 30.0)], "differs"),  # the interval of the drop begins at 0
        ([(80.0, 74.9, 1.0, 30.0)], "within tolerance"),
        ([(80.0, 50.0, 5.0, 30.0)], "within tolerance"),
        ([(80.0, 50.0, 5.1, 30.0)], "differs"),
        ([(80.0, 74.0, 6.0, 0.1)], "differs"),
        ([UNSEEN] * 3, "not attempted"),
    ],
)
def test_cross_task_counts_cells_above_the_blind_reader_that_lose_more_than_random_heads_cost(rows, word):
    assert judge("cross-task", tasks(*rows)) == word


def test_cross_task_names_what_fails_and_what_does_not_count():
    found = paper.CHECKS["cross-task"](tasks(SEEN, KEPT, (60.0, 20.0, 3.0, 10.0), UNSEEN))
    assert found.ours == (
        "2 of 3 model x benchmark pairs lose accuracy, random heads costing at most 5, 2 of them more than with "
        "layer-matched draws; drops 2.0 to 40.0 (least: m0 on b1, k=5, n=200); not: m0 on b1 (drop 2.0, random 1.0); "
        "not counted, not above the blind reader: m1 on b1"
    )
    assert found.interval == "smallest drop [-3.0, 7.0]; random drop 1.0 to 3.0 [2.0, 4.0]"
    assert found.difference == "2 of 3 (published 28 of 28); 1 not above the blind reader"
    matched = tasks(SEEN, SEEN, SEEN).assign(beyond_matched_low=[0.0, 0.1, float("nan")])
    assert paper.CHECKS["cross-task"](matched).difference == "2 of 3 (published 28 of 28)"
    many = paper.CHECKS["cross-task"](tasks(*[KEPT] * 7)).ours
    assert many.count("(drop 2.0, random 1.0)") == 5 and many.endswith("and 2 more")
    with pytest.raises(ValueError, match="measure above_blind_low in every row"):
        judge("cross-task", cells(SEEN[:3]).assign(blind=1.0))
    with pytest.raises(ValueError, match="one row per model and benchmark"):
        judge("cross-task", pd.concat([tasks(SEEN), tasks(SEEN)]))


def test_the_published_table_3_shows_the_published_claim():
    """Blind accuracies are not published: taken as far below; intervals as those of two proportions are narrow."""
    table = paper.published("cross_task")
    wide = table.pivot(index=["model", "benchmark"], columns="condition", values="accuracy").reset_index()
    rows = zip(wide.unmasked, wide.vrh, wide.unmasked - wide.random, [10.0] * len(wide))
    frame = tasks(*rows).assign(model=wide.model, benchmark=wide.benchmark)
    found = paper.CHECKS["cross-task"](frame)
    assert len(frame) == 28 and (found.verdict, found.difference) == ("matches", "28 of 28 (published 28 of 28)")


def gained(against=(1.0, 0.2, 1.8), gain=(2.0, 1.0, 3.0), seeds=3, spread=0.5) -> pd.DataFrame:
    """(difference, low, high) of VRH negatives against random ones, and against the untrained model."""
    rows = {("dpo vrh", "dpo random"): against, ("dpo vrh", "untrained"): gain, ("dpo vrh", "sft"): (0.1, -1.0, 1.2)}
    return pd.DataFrame([
        {"a": a, "b": b, "difference": d, "low": low, "high": high, "seeds_low": d - spread, "seeds_high": d + spread,
         "seeds": seeds, "n": 600}
        for (a, b), (d, low, high) in rows.items()
    ])  # fmt: skip


@pytest.mark.parametrize(
    "changes, word",
    [
        ({}, "matches"),
        ({"against": (1.0, 0.0, 2.0)}, "within tolerance"),
        ({"gain": (2.0, -0.1, 4.0)}, "within tolerance"),
        ({"spread": 1.0}, "within tolerance"),  # within the spread over seeds
        ({"against": (0.0, -1.0, 1.0)}, "differs"),
        ({"gain": (-0.1, -1.0, 1.0)}, "differs"),  # better than random negatives, and worse than no training
        ({"seeds": 2}, "not attempted"),
    ],
)
def test_dpo_must_beat_random_negatives_and_no_training(changes, word):
    assert judge("dpo", gained(**changes)) == word


def test_dpo_tells_every_comparison_with_both_intervals():
    found = paper.CHECKS["dpo"](gained())
    assert found.ours == (
        "dpo vrh minus dpo random +1.0; dpo vrh minus untrained +2.0; dpo vrh minus sft +0.1 (3 seeds, n=600)"
    )
    assert found.interval.startswith("dpo vrh minus dpo random [+0.2, +1.8], over seeds [+0.5, +1.5]; ")
    assert found.difference == "VRH against random negatives +1.0, against untrained +2.0 (published +0.78)"
    assert paper.CHECKS["dpo"](gained(seeds=2)).difference == "2 seeds: three at least"
    with pytest.raises(ValueError, match="compares dpo vrh with untrained: measure that"):
        judge("dpo", gained().query("b != 'untrained'"))
    backwards = gained().iloc[::-1].assign(seeds=[2, 3, 3])
    assert judge("dpo", backwards) == "matches", "seeds are those of what is claimed, in whatever order"


# ---------------------------------------------------------------- compare, and the file of claims

SHARES = pd.DataFrame({"scoring": ["sum", "mean"], "above_1e-3": [10.0, 5.0], "above_5e-3": [3.0, 2.0]})
EXAMPLES = {
    "causal-collapse": sweep(matched=(21.0, 60.0)), "head-share": (cuts_at({4: 33.0}), 80),
    "middle-layers": HeadSet(((4, 0), (5, 1)), (9, 8), "x"), "format-kept": sweep(), "one-token": sweep(),
    "few-samples": draws([9] * 4), "query-axis": cuts(flips(Q, SMALL, SMALL)),
    "best-variant": cuts(flips((-30.0, -41.0, -20.0), SMALL, SMALL)),
    "beats-prior": cuts(CUT | {"localization_heads": (-14.0, -20.0, -8.0)}), "sparse": SHARES,
    "universal": cells(*[GOOD] * 20), "same-backbone": pair(),
    "cross-task": tasks(*[SEEN] * 28), "dpo": gained(),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "figures_dir", lambda profile: tmp_path / "figures" / profile)
    return tmp_path / "figures"


def stored(folder: Path, profile: str = "nano") -> pd.DataFrame:
    return pd.read_csv(folder / profile / "claims.csv", keep_default_na=False)


def test_every_difference_is_a_short_phrase_with_numbers_beside_the_published(folder):
    table = paper.compare(EXAMPLES, "nano", "01_detect").set_index("id")
    assert list(table.index) == list(paper.CHECKS), "an example of each check"
    assert table.difference.str.len().max() <= 85
    assert table.difference.str.contains(r"\d").all() and table.difference.str.contains(r"\(.*\)").all()
    assert not table.verdict.eq("not attempted").any()


@pytest.mark.parametrize("profile", store.PROFILES)
def test_a_row_of_claims_has_the_published_words_and_a_verdict_without_suffix(profile, folder):
    frame = paper.compare({"format-kept": sweep()}, profile, "01_detect")
    assert list(frame) == ["id", "claim", "published", "ours", "interval", "difference", "verdict", "notebook"]
    row = frame.iloc[0]
    assert (row.id, row.published, row.verdict) == ("format-kept", "parse failures rare", "matches")
    assert (row.ours, row.interval) == ("0.0 % without a readable box at k=6 (n=400)", "[0.0, 1.0]")
    pd.testing.assert_frame_equal(stored(folder, profile), frame, check_dtype=False)


MODELS_SAY = {"matches": sweep(20.0), "within tolerance": sweep(20.0, 76.0), "differs": sweep(60.0),
              "not attempted": sweep(1.0, 10.0, base=10.0)}  # fmt: skip


@pytest.mark.parametrize(
    "said, word, count",
    [
        (["matches"], "matches", ""),
        (["matches", "matches"], "matches", ""),
        (["matches", "within tolerance"], "within tolerance", "matches in 1 of 2, within tolerance in 1: "),
        (["differs", "matches", "differs", "matches"], "differs", "matches in 2 of 4, differs in 2: "),
        (["within tolerance", "differs"], "differs", "within tolerance in 1 of 2, differs in 1: "),
        (["not attempted", "matches"], "matches", "matches in 1 of 2, not attempted in 1: "),
        (["not attempted", "differs"], "differs", "differs in 1 of 2, not attempted in 1: "),
        (["not attempted", "not attempted"], "not attempted", ""),
        ([], "not attempted", ""),
    ],
)
def test_the_verdict_on_several_models_is_the_worst_of_those_attempted(said, word, count, folder):
    evidence = {f"nano-m{i}": MODELS_SAY[verdict] for i, verdict in enumerate(said)}
    row = paper.compare({"causal-collapse": evidence}, "nano", "01_detect").iloc[0]
    assert row.verdict == word
    each = {name: paper.CHECKS["causal-collapse"](frame) for name, frame in evidence.items()}
    phrases = [f"{name[5:]}: {found.difference}" for name, found in each.items()]
    if len(said) > 1 and "not attempted" not in said:  # then all of them name the published numbers, and once is enough
        published = [" (published up to 84.8)", " (< 3)"]
        assert all(number in phrase for number in published for phrase in phrases)
        phrases = [phrase.replace(published[0], "").replace(published[1], "") for phrase in phrases]
        phrases[-1] += " (published up to 84.8; < 3)"
    assert row.difference == count + ("; ".join(phrases) or "–")
    assert row.ours == ("; ".join(f"{name}: {found.ours}" for name, found in each.items()) or "–")
    assert row.interval == ("; ".join(f"{name}: {found.interval}" for name, found in each.items()) or "–")


def test_only_what_every_model_says_in_brackets_stands_once():
    said = {"a": "drop 5.0 (published 80); random 1.0 (< 3)", "b": "drop 7.0 (published 80); random 9.0 (< 10)"}
    assert paper._once(said) == "a: drop 5.0; random 1.0 (< 3); b: drop 7.0; random 9.0 (< 10) (published 80)"
    assert paper._once({"a": "x (1)", "b": "y (2)"}) == "a: x (1); b: y (2)" and paper._once({"": "x (1)"}) == "x (1)"


def test_names_of_pairs_are_shortened_too(folder):
    row = paper.compare({"same-backbone": {"nano-a and nano-b": pair()}}, "nano", "01_detect").iloc[0]
    assert row.difference.startswith("a and b: shared 15 of 20") and row.ours.startswith("nano-a and nano-b: a with")


def test_a_notebook_replaces_all_its_claims_and_none_of_others(folder):
    paper.compare({name: EXAMPLES[name] for name in ("format-kept", "causal-collapse")}, "nano", "01_detect")
    paper.compare({name: EXAMPLES[name] for name in ("sparse", "format-kept")}, "nano", "03_sparsity")
    paper.compare({"format-kept": sweep(malformed=50.0)}, "nano", "01_detect")
    rows = stored(folder)
    assert list(zip(rows.id, rows.notebook, rows.verdict)) == [
        ("sparse", "03_sparsity", "matches"),
        ("format-kept", "01_detect", "differs"),
        ("format-kept", "03_sparsity", "matches"),
    ]
    paper.compare({"format-kept": sweep()}, "paper", "01_detect")
    assert len(stored(folder)) == 3 and len(stored(folder, "paper")) == 1, "profiles have a file each"


def test_claims_stand_in_the_papers_order_then_by_notebook(folder):
    for notebook in ("02_design_space", "01_detect"):
        paper.compare(dict(reversed(EXAMPLES.items())), "nano", notebook)
    rows = stored(folder)
    order = [claim for claim in paper.published("claims").id if claim in EXAMPLES]
    assert rows.id.tolist() == [claim for claim in order for _ in range(2)]
    assert rows.notebook.tolist() == ["01_detect", "02_design_space"] * len(order)


OLD = b"id,claim,published,ours,interval,verdict,notebook\nsparse,a,b,c,d,matches,03_sparsity\n"


@pytest.mark.parametrize(
    "content", [OLD, b"", b"\n\n", b"\xff\xfe\x00\x81", b'a,b\n1,2,3,4\n"', b"<<<<<<< HEAD\nid,claim\n"]
)
def test_an_older_or_broken_file_of_claims_is_written_anew(content, folder):
    (folder / "nano").mkdir(parents=True)
    (folder / "nano" / "claims.csv").write_bytes(content)
    assert (paper.claims_table("nano").verdict == "not attempted").all()
    paper.compare({"format-kept": sweep()}, "nano", "01_detect")
    assert stored(folder).id.tolist() == ["format-kept"] and list(stored(folder)) == paper._COLUMNS


def test_of_a_file_with_the_columns_of_today_only_rows_with_the_words_of_today_are_kept(folder):
    paper.compare({name: EXAMPLES[name] for name in ("sparse", "query-axis", "universal")}, "nano", "02_design_space")
    rows = stored(folder).replace({"id": {"universal": "no-more-a-claim"}})
    rows.loc[rows.id == "query-axis", "verdict"] = "holds"
    rows.assign(extra=1).to_csv(folder / "nano" / "claims.csv", index=False)
    paper.compare({"format-kept": sweep()}, "nano", "01_detect")
    assert stored(folder).id.tolist() == ["sparse", "format-kept"] and list(stored(folder)) == paper._COLUMNS


# ---------------------------------------------------------------- the table of claims in the README

README = """# A title

<!-- claims: python -m vrhlib.paper -->
| an | older |
<!-- /claims -->

after | it
"""


def test_the_table_of_claims_has_every_claim_and_says_which_nobody_judged(folder):
    paper.compare({name: EXAMPLES[name] for name in ("format-kept", "sparse")}, "nano", "03_sparsity")
    paper.compare({"format-kept": sweep(malformed=50.0)}, "nano", "01_detect")
    table, known = paper.claims_table("nano"), paper.published("claims")
    assert list(table) == ["claim", "published", "difference", "verdict", "notebook"]
    twice = [c for claim in known.id for c in [claim] * (2 if claim == "format-kept" else 1)]
    assert table.claim.str.extract("^`(.*?)` ")[0].tolist() == twice
    sparse = table[table.claim == "`sparse` Fewer than 15% of heads score above 1e-3; 0-4% above 5e-3"]
    assert sparse.values.tolist() == [
        [sparse.claim.item(), "<15%; 0-4%", "10.0 % above 1e-3 (< 15), 3.0 % above 5e-3 (<= 4)", "matches",
         "03_sparsity"]
    ]  # fmt: skip
    kept = table[table.claim.str.startswith("`format-kept`")]
    assert kept[["verdict", "notebook"]].values.tolist() == [["differs", "01_detect"], ["matches", "03_sparsity"]]
    others = table.drop([*sparse.index, *kept.index])[["difference", "verdict", "notebook"]]
    assert len(others) == len(known) - 2 and set(map(tuple, others.values)) == {("–", "not attempted", "–")}
    paper_profile = paper.claims_table("paper")
    assert len(paper_profile) == len(known) and paper_profile.verdict.eq("not attempted").all()


def test_a_readme_gets_the_table_between_its_markers_and_nothing_else(folder):
    paper.compare({"best-variant": {"a|b": EXAMPLES["best-variant"]}}, "nano", "02_design_space")
    new = paper.with_claims(README, "nano")
    assert paper.with_claims(new, "nano") == new
    before, table, after = new.partition("-->\n")[0], *new.partition("-->\n")[2].split("<!-- /claims -->")
    assert before == "# A title\n\n<!-- claims: python -m vrhlib.paper " and after == "\n\nafter | it\n"
    lines = table.strip("\n").splitlines()
    assert lines[:2] == ["| claim | published | difference | verdict | notebook |", "| --- | --- | --- | --- | --- |"]
    assert len(lines) == 2 + len(paper.published("claims")) and all(line.count("|") == 6 for line in lines)
    assert "| a/b: 1 of 3 leave less than VRH, flip_q -30.0 (published 0) | differs | 02_design_space |" in lines[5]
    assert "older" not in new
    paper.compare({"best-variant": EXAMPLES["query-axis"]}, "nano", "02_design_space")
    assert paper.with_claims(new, "nano") != new


@pytest.mark.parametrize(
    "text",
    [
        "# A title\n",
        README.replace("<!-- /claims -->", ""),
        README.replace("<!-- claims: python -m vrhlib.paper -->", "<!-- claims -->"),
        README + README,
        "<!-- /claims -->\n<!-- claims: python -m vrhlib.paper -->\n",
        README.replace("<!-- /claims -->", "text <!-- /claims -->"),
    ],
)
def test_a_readme_without_its_markers_is_refused_with_the_next_step(text, folder):
    with pytest.raises(ValueError, match="one line <!-- claims: python -m vrhlib.paper --> where the table goes"):
        paper.with_claims(text, "nano")


def test_the_command_writes_the_readme_or_says_what_is_missing(tmp_path):
    shutil.copytree(store.ROOT / "data" / "paper", tmp_path / "data" / "paper")
    readme = tmp_path / "README.md"

    def run():
        command, root = [sys.executable, "-m", "vrhlib.paper"], Path(paper.__file__).parents[1]
        given = os.environ | {"VRHLIB_ROOT": str(tmp_path), "PYTHONPATH": str(root)}
        return subprocess.run(command, cwd=root, env=given, capture_output=True, text=True)

    readme.write_text(README)
    first, text, second = run(), readme.read_text(), run()
    assert (first.returncode, first.stderr) == (0, "") and "| `dpo` " in text and text.endswith("after | it\n")
    assert "table of claims written (0 matches, 0 within tolerance, 0 differs, 14 not attempted)" in first.stdout
    assert "table of claims unchanged" in second.stdout and readme.read_text() == text
    readme.write_text("# A title\n")
    bare = run()
    assert bare.returncode == 1 and "<!-- /claims --> below it" in bare.stderr and "Traceback" not in bare.stderr
    assert readme.read_text() == "# A title\n"
