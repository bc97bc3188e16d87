"""`./run_all.sh paper` for notebooks 06 and 07, as `test_paper_profile` for the first three: files run side by side."""

import json

import pandas as pd

from tests.test_paper_profile import CHOSEN, repository, run_all
from vrhlib.profiles import profile

__all__ = ["repository"]  # a fixture
GIVEN = {"VRHLIB_DEVICE": "cpu", "VRHLIB_ALLOW_DRIFT": "1"}


def test_heads_are_cut_in_all_seven_question_benchmarks_and_in_text_alone(repository):
    done = run_all(repository, "paper", "06", f"MODELS={CHOSEN[0]}", "N_DETECT=4", "K=3", "--limit", "2", **GIVEN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures, seven = repository / "figures" / "paper", list(profile("paper").questions)
    table = pd.read_csv(figures / "table3_cross_task.csv")
    assert list(dict.fromkeys(table.benchmark)) == seven
    for b, own in table.groupby("benchmark"):
        conditions = own.condition.value_counts()
        assert conditions[["unmasked", "vrh", "blind"]].tolist() == [1, 1, 1] and conditions["random"] == 5, b
        assert set(own.k) == {0, 3} and 1 <= own.n.max() <= 2
    base = pd.read_csv(figures / "table_cross_baseline.csv").set_index("benchmark")
    assert base.published.to_dict() == dict(zip(seven, (63.8, 68.2, 36.1, 75.1, 58.3, 83.9, 71.5)))
    assert base.blind.notna().all() and base.chance["spatialrgpt"] != base.chance["spatialrgpt"], "lengths have none"
    text = pd.read_csv(figures / "table_text_only.csv")
    assert set(text.condition) == {"unmasked", "vrh", "flip_q", "random", "layer_matched"} and set(text.benchmark) == {
        "needle-text"
    }
    assert "left out: its picture served to find heads (refcoco, compared by pixels)" in done.stdout
    claims = pd.read_csv(figures / "claims.csv").set_index("id")
    assert claims.verdict["cross-task"] in ("not attempted", "differs"), "random weights see nothing"


def test_a_real_class_is_trained_on_pairs_about_the_training_tables(repository):
    words = (f"MODELS={CHOSEN[0]}", "N_DETECT=4", "N_PAIRS=6", "--limit", "3")
    words += ("RECIPE=epochs=1,batch_size=2,rank=2,learning_rate=0.001",)
    done = run_all(repository, "paper", "07", *words, **GIVEN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = repository / "figures" / "paper"
    pairs = pd.read_csv(figures / "table_dpo_pairs.csv").set_index("kind")
    assert list(pairs.index) == ["vrh", "random"] and (pairs.pairs == pairs.kept).all() and pairs.pairs["vrh"] >= 3
    gains = pd.read_csv(figures / "figA3_dpo.csv")
    assert list(dict.fromkeys(gains.benchmark)) == ["refcoco", "refcoco+", "refcocog", "mean of benchmarks"]
    assert set(gains.condition) == {"dpo vrh", "dpo random", "sft"} and set(gains.seed.dropna()) == {0, 1, 2}
    curves = pd.read_csv(figures / "dpo_curves.csv")
    assert curves.groupby(["condition", "seed"]).ngroups == 9 and curves.loss.notna().all()
    policies = list((repository / "data" / "runs" / "paper" / "policies").glob("*/manifest.json"))
    assert len(policies) == 9
    for path in policies:
        about = json.loads(path.read_text())
        assert about["model"] == CHOSEN[0] and about["recipe"]["rank"] == 2 and about["versions"]["torch"]
        assert [p.name for p in (path.parent / "lora").glob("adapter_*")] and not (path.parent / "checkpoints").exists()
    moved = pd.read_csv(figures / "table_dpo_heads.csv")
    assert moved.k.eq(20).all() and len(moved) == 3
    assert "its picture is held out (refcoco, compared by number)" in done.stdout
    claims = pd.read_csv(figures / "claims.csv").set_index("id")
    assert claims.verdict["dpo"] == "differs", "a model that writes no box has none to gain"


def test_a_real_class_is_steered_to_the_two_things_of_a_picture_and_its_views_know_the_published_list(repository):
    words = (f"MODELS={CHOSEN[0]}", "N_DETECT=2", "K=3", "--limit", "4")
    done = run_all(repository, "paper", "08", *words, **GIVEN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = pd.read_csv(repository / "figures" / "paper" / "table_steering.csv")
    assert set(table.n) == {4} and set(table.pictures) == {2}, "each of four expressions with the other thing"
    decode = table[table.phase == "decode"]
    assert set(decode[decode.condition == "vrh"].k) == {3, 5, 10, 20, 50}
    assert set(table[table.condition == "layer_matched"].k) == {3} and set(table.phase) == {"–", "decode", "all"}
    executed = json.loads((repository / "notebooks" / "rendered" / "paper" / "08_play.ipynb").read_text())
    views = [c for c in executed["cells"] if c["id"].startswith("play-") and "outputs" in c]
    assert len(views) == 4 and all("image/png" in c["outputs"][-1]["data"] for c in views)
