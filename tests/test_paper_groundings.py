"""`./run_all.sh paper` for notebooks 04 and 05, as `test_paper_profile` for the first three: files run side by side."""

import pandas as pd

from tests.test_paper_profile import CHOSEN, repository, run_all

__all__ = ["repository"]  # a fixture


def test_heads_are_cut_on_all_five_groundings_and_borrowed_by_the_other_real_class(repository):
    """Pictures that served to find heads are left out on the other benchmarks: by number, or by what they show."""
    given = {"VRHLIB_DEVICE": "cpu", "VRHLIB_ALLOW_DRIFT": "1"}
    done = run_all(repository, "paper", "04", f"MODELS={CHOSEN[0]}", "N_DETECT=4", "K=3", "--limit", "4", **given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = repository / "figures" / "paper"
    table = pd.read_csv(figures / "table_universal_baseline.csv").set_index("benchmark")
    assert table.published.to_dict() == {
        "refcoco": 86.2, "refcoco+": 78.5, "refcocog": 82.8, "refspatial": 43.0, "toloka": 67.4
    }  # fmt: skip
    assert table.n.to_dict() == {"refcoco": 4, "refcoco+": 3, "refcocog": 2, "refspatial": 2, "toloka": 3}
    assert table.chance.isna().all(), "real pictures do not tell what else is in them"
    for how in ("refcoco, compared by number", "refcoco, compared by pixels"):
        assert f"left out: its picture served to find heads ({how})" in done.stdout
    swept = pd.read_csv(figures / "tableA1_grounding.csv")
    assert set(swept[swept.condition == "vrh"].k) == {1, 3, 5, 10, 20}
    assert set(swept[swept.condition == "layer_matched"].k) == {3, 20} and swept.seed.max() == 4
    ways = pd.read_csv(figures / "table_ablation_kinds.csv")
    assert len(ways[["kind", "phase"]].drop_duplicates()) == 1 + 6
    claims = pd.read_csv(figures / "claims.csv").set_index("id")
    assert (claims.verdict[["universal", "head-share"]] == "not attempted").all(), "random weights have nothing to lose"

    done = run_all(
        repository, "paper", "05", f"MODELS={','.join(CHOSEN)}", "N_DETECT=4", "K=3", "--limit", "4", **given
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    moved = pd.read_csv(figures / "table_transfer.csv")
    assert list(zip(moved.model, moved.source)) == [CHOSEN, CHOSEN[::-1]] and (moved.relation == "same backbone").all()
    claims = pd.read_csv(figures / "claims.csv").set_index("id")
    assert claims.verdict["same-backbone"] == "not attempted" and "nothing to carry over" in claims.difference.iloc[-1]
