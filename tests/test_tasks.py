"""Tables of question answering: against loops, on replies made by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from vrhlib import evaluate, tasks
from vrhlib.samples import Sample, Samples
from vrhlib.stats import Accuracy


def replies(rights: dict) -> pd.DataFrame:
    """{(model, benchmark, condition, k, seed): which samples are right}; a picture each."""
    return pd.DataFrame([
        {"model": m, "benchmark": b, "condition": c, "k": k, "seed": seed, "id": f"{b}-{i}", "image": f"{b} {i}",
         "task": "answer", "kind": "", "text": "red" if right else "blue", "lost": 0,
         "outcome": "correct" if right else "wrong answer"}
        for (m, b, c, k, seed), several in rights.items() for i, right in enumerate(several)
    ]).astype({"seed": "Int64"})  # fmt: skip


def measured(n: int = 40) -> tuple[pd.DataFrame, dict]:
    rng, rights = np.random.default_rng(1), {}
    for b, (base, cut, grey) in {"colours": (0.9, 0.4, 0.3), "sums": (0.3, 0.3, 0.3)}.items():
        rights["m", b, "unmasked", 0, None] = rng.random(n) < base
        rights["m", b, "vrh", 4, None] = rng.random(n) < cut
        rights["m", b, "blind", 0, None] = rng.random(n) < grey
        for seed in range(3):
            rights["m", b, "random", 4, seed] = rng.random(n) < base
            rights["m", b, "layer_matched", 4, seed] = rng.random(n) < base
    return replies(rights), rights


def test_the_floor_is_what_the_same_questions_give_without_a_picture():
    answers, rights = measured()
    cells = evaluate.cells(answers, {"m": 4})
    table = tasks.with_floor(cells, answers, {"colours": 25.0}).set_index("benchmark")
    for b in ("colours", "sums"):
        seen, grey = (100 * np.mean(rights["m", b, c, 0, None]) for c in ("unmasked", "blind"))
        row = table.loc[b]
        assert math.isclose(row.blind, grey) and math.isclose(row.above_blind, seen - grey, abs_tol=1e-9)
        assert row.blind_low < grey < row.blind_high and row.above_blind_low <= row.above_blind <= row.above_blind_high
    assert table.above_blind_low["colours"] > 0 > table.above_blind_low["sums"]
    assert table.chance["colours"] == 25 and math.isnan(table.chance["sums"])
    assert set(cells) < set(table.reset_index()), "nothing of the cells is lost"
    half = answers.drop(answers[(answers.condition == "blind") & (answers.benchmark == "sums")].index[:1])
    with pytest.raises(ValueError, match="m on sums: ask the same questions about grey pictures first"):
        tasks.with_floor(cells, half, {})


def test_blind_replies_do_not_count_as_unmasked_ones():
    answers, rights = measured()
    plain = evaluate.cells(answers[answers.condition != "blind"], {"m": 4})
    pd.testing.assert_frame_equal(evaluate.cells(answers, {"m": 4}), plain)


def test_table_3_has_a_row_a_condition_and_a_column_a_benchmark():
    answers, rights = measured()
    table = tasks.by_benchmark(evaluate.accuracy_table(answers), {"m": 4})
    assert list(table) == ["model", "condition", "colours", "sums"]
    assert table.condition.tolist() == ["blind", "unmasked", "random", "layer_matched", "vrh"]
    random = table[table.condition == "random"].iloc[0]
    each = [100 * np.mean(rights["m", "colours", "random", 4, seed]) for seed in range(3)]
    assert math.isclose(random.colours, np.mean(each))
    other = tasks.by_benchmark(evaluate.accuracy_table(answers), {"m": 5})
    assert other.condition.tolist() == ["blind", "unmasked"], "nothing was cut at that k"


def test_answers_that_turned_were_right_and_are_wrong_without_the_heads():
    answers, rights = measured()
    found = tasks.turned(answers, "m", 4, 6, seed=0)
    assert len(found) == 6 and len(set(found)) == 6
    for b, name in found:
        i = int(name.rsplit("-", 1)[1])
        assert rights["m", b, "unmasked", 0, None][i] and not rights["m", b, "vrh", 4, None][i]
    assert [b for b, _ in found[:2]] == ["colours", "sums"], "benchmarks take turns"
    assert found == tasks.turned(answers, "m", 4, 6, seed=0) != tasks.turned(answers, "m", 4, 6, seed=1)
    assert tasks.turned(answers, "nobody", 4, 6, seed=0) == []


def texts() -> Samples:
    context = "Red circle cat,  blue star sun."
    return Samples("needle", "test", [
        Sample(f"t{i}", None, f"t{i}", "What belongs to the red circle?", answer="cat", choices=("cat", "sun", "map"),
               task="answer", chance=0.5, context=context)
        for i in range(4)
    ])  # fmt: skip


def test_a_reply_stands_in_the_text_as_whole_words_or_it_does_not():
    samples = texts()
    said = {"unmasked": ["cat", "Sun.", "map", ""], "vrh": ["ca", "red  circle", "map", "sun"]}
    outcome = {"cat": "correct", "": "no answer"}
    frame = pd.DataFrame([
        {"model": "m", "benchmark": "needle", "condition": c, "k": 0 if c == "unmasked" else 2, "seed": pd.NA,
         "id": s.id, "text": text, "outcome": outcome.get(text, "wrong answer")}
        for c, words in said.items() for s, text in zip(samples, words)
    ])  # fmt: skip
    table = tasks.text_only(frame, samples).set_index("condition")
    assert table.from_text.to_dict() == {"unmasked": 50.0, "vrh": 50.0}
    assert table.accuracy.to_dict() == {"unmasked": 25.0, "vrh": 0.0}
    assert table.readable.to_dict() == {"unmasked": 75.0, "vrh": 100.0}
    low, high = Accuracy(1, 4).interval
    assert np.isclose(table.low["unmasked"], low) and np.isclose(table.high["unmasked"], high)
    assert table.n.tolist() == [4, 4] and (table.chance == 50).all()
    with pytest.raises(ValueError, match="have no text before the question"):
        tasks.text_only(frame, Samples("x", "test", [Sample("t0", None, "a", "q", answer="a", task="answer")]))
