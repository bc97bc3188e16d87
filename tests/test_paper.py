"""Published numbers are the published ones, and verdicts follow criteria that can go either way."""

from math import comb

import pandas as pd
import pytest

from vrhlib import paper, store
from vrhlib.heads import HeadSet
from vrhlib.profiles import MODELS


def sweep(vrh: float, random: float, one: float = 10.0, malformed: float = 0.0) -> pd.DataFrame:
    rows = [("unmasked", 0, None, 80.0), ("vrh", 6, None, vrh), ("one output token", 6, None, one)]
    rows += [("random", 6, seed, random + (seed - 2) / 10) for seed in range(5)]
    frame = pd.DataFrame(rows, columns=["condition", "k", "seed", "accuracy"])
    shares = {"malformed": malformed, "cut off": 0.0, "no box": 0.0}
    return frame.assign(low=frame.accuracy - 3, high=frame.accuracy + 3, n=400, **shares)


def verdict(claim: str, evidence, tmp_path, monkeypatch, profile="paper") -> str:
    table = paper.published("claims")
    monkeypatch.setattr(paper, "published", lambda name: table)
    monkeypatch.setattr(store, "ROOT", tmp_path)
    return paper.compare({claim: evidence}, profile, "01_detect").verdict.iloc[0]


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


def test_prior_lists_overlap_as_published():
    prior = paper.prior_heads()
    assert len(set(prior["qrhead_nq"]) & set(paper.published_heads("Qwen2.5-VL-7B"))) == 8
    assert prior["vera"].overlap(paper.published_heads("Qwen3-VL-8B")) == 7


def test_the_overlaps_of_prior_lists_stand_beside_what_chance_would_give():
    table = paper.prior_overlaps()
    assert list(table.columns) == ["list", "model", "shared", "of", "expected", "p"]
    rows = table.set_index(["list", "model"])
    assert rows.loc[("qrhead_nq", "Qwen2.5-VL-7B"), ["shared", "of"]].tolist() == [8, 16]
    assert rows.loc[("vera", "Qwen3-VL-8B"), ["shared", "of"]].tolist() == [7, 20]
    assert len(table) == 4, "each list against the two models of its grid"
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


@pytest.mark.parametrize(
    "vrh, random, word",
    [(20, 79, "holds"), (20, 70, "holds partly"), (60, 79, "does not hold"), (60, 30, "does not hold")],
)
def test_collapse_needs_a_fall_and_benign_random_heads(vrh, random, word, tmp_path, monkeypatch):
    assert verdict("causal-collapse", sweep(vrh, random), tmp_path, monkeypatch) == word


@pytest.mark.parametrize("falls, word", [((20, 25), "holds"), ((20, 60), "holds partly"), ((60, 61), "does not hold")])
def test_a_claim_about_several_models_holds_if_in_all_and_partly_if_in_some(falls, word, tmp_path, monkeypatch):
    evidence = {f"model {v}": sweep(v, 79) for v in falls}
    assert verdict("causal-collapse", evidence, tmp_path, monkeypatch) == word
    row = pd.read_csv(tmp_path / "figures" / "paper" / "claims.csv").iloc[0]
    assert all(f"model {v}: 80.0 to {v}.0" in row.ours for v in falls) and row.interval.count("VRH [") == 2


def test_verdicts_under_nano_say_nano(tmp_path, monkeypatch):
    assert verdict("causal-collapse", sweep(20, 79), tmp_path, monkeypatch, "nano") == "holds in nano"


@pytest.mark.parametrize("malformed, word", [(2.0, "holds"), (20.0, "does not hold")])
def test_format_is_kept_only_if_boxes_can_be_read(malformed, word, tmp_path, monkeypatch):
    assert verdict("format-kept", sweep(20, 79, malformed=malformed), tmp_path, monkeypatch) == word


@pytest.mark.parametrize("one, word", [(22.0, "holds"), (50.0, "does not hold")])
def test_one_token_must_do_what_all_do(one, word, tmp_path, monkeypatch):
    assert verdict("one-token", sweep(20, 79, one=one), tmp_path, monkeypatch) == word


@pytest.mark.parametrize("overlap, word", [([6, 5, 6, 5], "holds"), ([3, 3, 2, 4], "does not hold")])
def test_few_samples_must_find_most_heads(overlap, word, tmp_path, monkeypatch):
    frame = pd.DataFrame({"n": [10] * 4 + [200], "seed": [0, 1, 2, 3, 0], "overlap": [*overlap, 6], "k": 6})
    assert verdict("few-samples", frame, tmp_path, monkeypatch) == word


@pytest.mark.parametrize("layers, word", [((3, 4), "holds"), ((0, 4), "holds partly"), ((0, 7), "does not hold")])
def test_middle_means_the_middle_half_of_the_layers(layers, word, tmp_path, monkeypatch):
    heads = HeadSet(tuple((layer, 0) for layer in layers), (8, 8), "x")
    assert verdict("middle-layers", heads, tmp_path, monkeypatch) == word


def test_claims_are_merged_by_claim_and_notebook(tmp_path, monkeypatch):
    verdict("causal-collapse", sweep(60, 79), tmp_path, monkeypatch)
    monkeypatch.undo()
    verdict("format-kept", sweep(60, 79), tmp_path, monkeypatch)
    monkeypatch.undo()
    verdict("causal-collapse", sweep(20, 79), tmp_path, monkeypatch)
    rows = pd.read_csv(tmp_path / "figures" / "paper" / "claims.csv")
    assert list(rows.columns) == paper._COLUMNS
    assert list(zip(rows.id, rows.verdict)) == [("causal-collapse", "holds"), ("format-kept", "holds")]


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
    assert (
        got.published.tolist()[:3] == [86.2, 86.8, 88.2] and got.published.isna().tolist() == [False] * 3 + [True] * 2
    )
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


def test_a_claim_that_could_not_have_failed_is_not_tested(tmp_path, monkeypatch):
    nothing = sweep(0, 4).assign(accuracy=lambda f: f.accuracy.where(f.condition != "unmasked", 5.0))
    assert verdict("causal-collapse", nothing, tmp_path, monkeypatch) == "not tested", "right in 5 %: nothing to lose"
    both = {"a": sweep(20, 79), "b": nothing}
    assert verdict("causal-collapse", both, tmp_path, monkeypatch, "nano") == "holds partly in nano"
    same = pd.DataFrame({"n": [10] * 4, "overlap": [6] * 4, "k": 6})
    assert verdict("few-samples", same, tmp_path, monkeypatch) == "not tested", "ten of ten samples"


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
CUT = {"retrieval_heads": BIG, "ocr_heads_aligned": BIG, "vera": BIG, "localization_heads": BIG}


@pytest.mark.parametrize(
    "changes, word",
    [
        (flips((9.0, 6.0, 12.0), SMALL, SMALL), "holds"),
        (flips((-9.0, -12.0, -6.0), SMALL, SMALL), "holds partly"),  # most, but the default is the weaker cut
        (flips((2.0, -1.0, 5.0), SMALL, SMALL), "holds partly"),
        (flips((9.0, 6.0, 12.0), (-30.0, -33.0, -27.0), SMALL), "holds partly"),
        (flips((9.0, 6.0, 12.0), SMALL, (9.0, 6.0, 12.0)), "holds partly"),
        (flips(SMALL, (9.0, 6.0, 12.0), NONE), "does not hold"),
        (flips(NONE, SMALL, NONE), "does not hold"),
        (flips(NONE, NONE, NONE), "not tested"),
        (flips((9.0, 6.0, 12.0), SMALL, SMALL, other=(50.0, 45.0, 55.0)), "holds"),
    ],
)
def test_the_query_axis_must_matter_most_and_beyond_sampling_error(changes, word, tmp_path, monkeypatch):
    assert verdict("query-axis", cuts(changes), tmp_path, monkeypatch) == word


def test_the_query_axis_row_shows_every_change_with_its_interval(tmp_path, monkeypatch):
    verdict("query-axis", cuts(flips((9.0, 6.0, 12.0), (-1.0, -3.0, 1.0), NONE)), tmp_path, monkeypatch)
    row = pd.read_csv(tmp_path / "figures" / "paper" / "claims.csv").iloc[0]
    assert row.ours == "vrh 20.0 at k=6 (n=400); change: flip_q +9.0, flip_phi -1.0, flip_omega +0.0"
    assert row.interval == "flip_q [+6.0, +12.0]; flip_phi [-3.0, +1.0]; flip_omega [+0.0, +0.0]"


@pytest.mark.parametrize(
    "changes, word",
    [
        (flips((9.0, 6.0, 12.0), SMALL, NONE), "holds"),
        (flips((9.0, 6.0, 12.0), (-1.0, -3.0, 1.0), SMALL), "holds partly"),
        (flips((9.0, 6.0, 12.0), (-1.0, -3.0, 0.0), SMALL), "holds partly"),
        (flips((9.0, 6.0, 12.0), (-4.0, -6.0, -2.0), SMALL), "does not hold"),
        (flips((9.0, 6.0, 12.0), SMALL, SMALL, q_union=(-4.0, -6.0, -2.0)), "does not hold"),
        (flips(NONE, NONE, NONE), "not tested"),
    ],
)
def test_the_best_variant_is_beaten_by_none(changes, word, tmp_path, monkeypatch):
    assert verdict("best-variant", cuts(changes), tmp_path, monkeypatch) == word


@pytest.mark.parametrize(
    "changes, random, word",
    [
        (CUT | {"vera": (3.0, 1.0, 5.0)}, (79, 78, 80), "holds"),
        (CUT | {"vera": SMALL}, (79, 78, 80), "holds partly"),
        (CUT | {"vera": (-1.0, -3.0, 1.0)}, (79, 78, 80), "holds partly"),
        (CUT | {"vera": (-4.0, -6.0, -2.0)}, (79, 78, 80), "does not hold"),
        (CUT, (20, 19, 24), "holds partly"),
        (CUT, (10, 11, 9), "does not hold"),
        ({"vera": BIG}, (79, 78, 80), "holds partly"),  # the others found too few heads to be cut
        ({"qrhead": BIG}, (79, 78, 80), "not tested"),  # not one that the claim names
        (CUT | {"sparsemm": (-9.0, -12.0, -6.0)}, (79, 78, 80), "holds"),
    ],
)
def test_vrh_must_cost_more_than_every_earlier_method_and_random_heads(changes, random, word, tmp_path, monkeypatch):
    assert verdict("beats-prior", cuts(changes, random=random), tmp_path, monkeypatch) == word


@pytest.mark.parametrize("claim", ["query-axis", "best-variant", "beats-prior"])
def test_a_model_with_nothing_to_lose_tests_no_claim_about_scorings(claim, tmp_path, monkeypatch):
    good = CUT if claim == "beats-prior" else flips((9.0, 6.0, 12.0), (3.0, 1.0, 5.0), (3.0, 1.0, 5.0))
    assert verdict(claim, cuts(good, base=19.9), tmp_path, monkeypatch) == "not tested"
    monkeypatch.undo()
    assert verdict(claim, cuts(good, base=20), tmp_path, monkeypatch) == "holds"
    monkeypatch.undo()
    assert verdict(claim, cuts(good).query("condition != 'unmasked'"), tmp_path, monkeypatch) == "holds"


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
    "summed, mean, word",
    [
        ((14.9, 4.0), (90, 90), "holds"),
        ((15.0, 4.0), (90, 90), "holds partly"),
        ((14.9, 4.1), (90, 90), "holds partly"),
        ((60.0, 30.0), (14.9, 4.0), "holds partly"),
        ((60.0, 30.0), (14.9, 4.1), "does not hold"),
        ((60.0, 30.0), (20.0, 0.0), "does not hold"),
    ],
)
def test_sparsity_is_judged_on_the_papers_formula_with_the_mean_beside(summed, mean, word, tmp_path, monkeypatch):
    rows = [("mean", *mean), ("sum", *summed)]
    shares = pd.DataFrame(rows, columns=["scoring", "above_1e-3", "above_5e-3"])
    assert verdict("sparse", shares, tmp_path, monkeypatch) == word
    ours = pd.read_csv(tmp_path / "figures" / "paper" / "claims.csv").ours[0]
    assert ours.startswith(f"sum: {summed[0]:.1f} % above 1e-3, {summed[1]:.1f} %") and f"mean: {mean[0]:.1f} %" in ours
    with pytest.raises(ValueError, match="sum is missing"):
        paper.CHECKS["sparse"](shares[:1])


def test_the_methods_that_beats_prior_names_are_those_compared_in_the_paper_but_qrhead():
    from vrhlib.methods import COMPARED

    assert set(paper.PRIOR) == set(COMPARED) - {"qrhead"}


def test_the_sparse_claim_shows_its_intervals():
    shares = pd.DataFrame({"scoring": ["sum", "mean"], "above_1e-3": [10.0, 5.0], "above_5e-3": [3.0, 2.0]})
    assert paper.CHECKS["sparse"](shares)[1] == "exact"
    ends = {
        f"above_{t}_{end}": [v, v]
        for t, low, high in (("1e-3", 8, 12), ("5e-3", 2, 4))
        for end, v in (("low", low), ("high", high))
    }
    assert paper.CHECKS["sparse"](shares.assign(**ends))[1] == "sum: [8.0, 12.0], [2.0, 4.0]"
