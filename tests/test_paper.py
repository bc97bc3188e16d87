"""Published numbers are the published ones, and verdicts follow criteria that can go either way."""

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
