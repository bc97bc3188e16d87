"""What `benchmarks/` says it measured: arithmetic of the ratios, targets, the summary, its figure, and README.md."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import ablation, capture, design_space, growth, peers, summary, turns, whole_run
from benchmarks.turns import Disagreement, Turns, agree
from vrhlib import figures, store

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "figures" / "nano" / "performance"

# ---------------------------------------------------------------- what is compared


def test_a_ratio_is_best_over_best_and_its_spread_that_of_the_rounds():
    found = Turns({"a": [3, 2], "b": [1, 2]}, {"a": [20, 30], "b": [10, 40]}, "cpu")
    time, memory = found.rows("a / b", "a", "b", model="m", n=1)
    assert (time["quantity"], time["ratio"], time["low"], time["high"]) == ("time", 2, 1, 3)
    assert (memory["quantity"], memory["ratio"], memory["low"], memory["high"]) == ("peak memory", 0.75, 0.75, 2)
    assert (time["measure"], time["model"], time["rounds"]) == ("a / b", "m", 2)
    assert [row["quantity"] for row in Turns({"a": [1], "b": [1]}).rows("a / b", "a", "b")] == ["time"]
    unknown = Turns({"a": [1], "b": [1]}, {"a": [np.nan], "b": [1]})
    assert len(unknown.rows("a / b", "a", "b")) == 1, "memory that the system does not tell is no row"


ROWS = np.array([[0.5, 0.25]], dtype=np.float32)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"rows": ROWS}, True),
        ({"rows": ROWS + 5e-6}, True),
        ({"rows": ROWS + 5e-5}, False),
        ({"rows": ROWS * np.nan}, False),
        ({"rows": ROWS[:, :1]}, False),
        ({"rows": ROWS.T}, False),
        ({"replies": [[1, 2]]}, True),
        ({"replies": [[1, 2]], "rows": ROWS + 1}, False),
        ({"replies": [[1, 3]]}, False),
        ({"replies": [[1, 2], [3]]}, False),
        ({"something else": 1}, False),
        ({}, False),
    ],
)
def test_ways_that_do_not_give_the_same_are_refused_before_anything_is_timed(other, same):
    calls = []

    def second():
        calls.append(1)
        return other

    ways = {"first": lambda: {"rows": ROWS, "replies": [[1, 2]]}, "second": second}
    if same:
        assert turns.turns(ways, 2).seconds.keys() == ways.keys() and len(calls) == 3
    else:
        with pytest.raises(Disagreement, match="second"):
            turns.turns(ways, 2)
        assert len(calls) == 1, "nothing was timed"


def test_large_numbers_may_differ_by_as_much_of_their_size():
    large = np.array([20.0, -3.0])
    agree({"a": {"logits": large}, "b": {"logits": large + 1e-4}})
    with pytest.raises(Disagreement, match="logits"):
        agree({"a": {"logits": large}, "b": {"logits": large + 1e-3}})


def test_every_round_begins_with_another_way():
    order = []
    ways = {name: lambda name=name: order.append(name) or {"n": 1} for name in "abc"}
    found = turns.turns(ways, 3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(len(seconds) == 3 for seconds in found.seconds.values()) and not found.mib


def test_settings_of_the_shell_do_not_change_what_is_measured(monkeypatch):
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setenv("VRHLIB_STRICT", "1")
    monkeypatch.setenv("VRHLIB_FEATURES_GB", "20")
    try:
        turns.as_shipped()
        from vrhlib import decoding

        assert not decoding.strict() and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_the_exponent_is_that_of_a_power_law():
    assert growth.exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert growth.exponent([1, 2, 4], [5, 5, 5]) == pytest.approx(0)
    assert np.isnan(growth.exponent([1], [1]))


# ---------------------------------------------------------------- the summary


@pytest.mark.parametrize(
    ("ratio", "target", "verdict"),
    [
        (1.10, "<= 1.1", "yes"), (1.11, "<= 1.1", "no"), (2.0, ">= 2", "yes"), (1.99, ">= 2", "no"), (1.0, "< 1", "no"),
        (0.99, "< 1", "yes"), (float("nan"), "<= 1.1", "no"), (float("nan"), ">= 2", "no"), (3.0, "", ""),
    ],
)  # fmt: skip
def test_a_target_is_met_or_not_by_its_ratio_alone(ratio, target, verdict):
    assert summary.met(ratio, target) == verdict


def test_a_target_that_is_no_comparison_is_refused():
    with pytest.raises(ValueError, match="not 'about 5'"):
        summary.met(5, "about 5")


def row(measure, ratio, model="nano-a", quantity="time", tokens=48, **more):
    facts = {"measure": measure, "model": model, "image_tokens": tokens, "quantity": quantity, "ratio": ratio,
             "low": 0.9 * ratio, "high": 1.2 * ratio, "n": 12, "rounds": 2, "device": "cpu"}  # fmt: skip
    return facts | more


def tables(
    plain=1.04, eager=2.5, memory=12.0, naive=(6.0, 4.0), space=1.2, conditions=0.4, runs=(1800.0, 300.0, 9.0)
) -> dict[str, pd.DataFrame]:
    models = (summary.LARGE, "nano-a", "nano-b")
    captured = [row(capture.PLAIN, plain + 0.01 * i, m) for i, m in enumerate(models)]
    captured += [row(capture.EAGER, eager + i, m) for i, m in enumerate(models)]
    captured += [row(capture.EAGER, memory + i, m, "peak memory") for i, m in enumerate(models)]
    captured += [row(measure, 1.5) for measure in (capture.FORCED, capture.INSIDE, capture.KNOWN)]
    swept = [row(ablation.ORDER, 1.3)]
    for phase in ablation.PHASES:
        swept += [row(ablation.ALL.format(phase), r, m) for r, m in zip(naive, models[1:])]
        swept += [row(ablation.ALL.format(phase), 7.0, models[1], tokens=432), row(ablation.MANY.format(4, phase), 8.0)]
        for words in {*ablation.STEPS.values(), *ablation.WITHOUT.values()}:
            swept += [row(words.format(phase), r, m) for r, m in zip((1.5, 0.9), models[1:])]
    spaces = [row(design_space.WITH_REPLY, space + 0.3 * (t == 48), m, tokens=t) for m in models[1:] for t in (48, 832)]
    curve = [
        {"model": "nano-a", "axis": axis, "x": x, "relative": x**e, "low": x**e, "high": x**e, "exponent": e,
         "rounds": 2, "device": "cpu"}
        for axis, e in (("samples", 1.0), ("conditions", conditions), ("image tokens", 0.6)) for x in (1, 2, 4)
    ]  # fmt: skip
    beside = [row(peers.ROWS.format("nnsight"), 2.0, peer="nnsight", version="0.8.1", note=""),
              row(peers.SWEEP.format("nnsight"), np.nan, peer="nnsight", version="0.8.1", note="why")]  # fmt: skip
    whole = [{"run": name, "wall_seconds": s, "cpu_seconds": s, "cores": 2, "at_once": 2, "commit": "abc", "words": "",
              "told": 0.62 if name == "cold" else np.nan}
             for name, s in zip(("cold", "cached", "unchanged"), runs)]  # fmt: skip
    made = {"capture": captured, "ablation": swept, "design_space": spaces, "growth": curve, "peers": beside,
            "whole_run": whole}  # fmt: skip
    return {name: pd.DataFrame(rows) for name, rows in made.items()}


def named(found: pd.DataFrame, words: str) -> pd.Series:
    return found[found.measure.str.startswith(words)].iloc[0]


def test_the_worst_model_stands_for_all_against_a_target():
    found = summary.summarised(tables())
    assert named(found, "captured / plain pass (large").ratio == pytest.approx(1.04)
    assert named(found, "captured / plain pass (embedded").ratio == pytest.approx(1.06)  # the most costly
    assert named(found, "eager / captured, time (embedded").ratio == pytest.approx(3.5)  # the least gained
    sweep = named(found, "naive / sweep of 12 conditions, all, 48")
    assert (sweep.ratio, sweep.low, sweep.model, sweep.met) == (4.0, pytest.approx(3.6), "nano-b", "no")
    assert named(found, "naive / sweep of 12 conditions, decode, 432").met == "yes"
    step = named(found, "2a")
    assert step.ratio == 0.9, "of two models, the lower"
    assert (step.low, step.high, step.met) == (pytest.approx(0.81), pytest.approx(1.8), ""), "all models' rounds"


def test_memory_is_told_as_ours_over_eagers():
    found = named(summary.summarised(tables(memory=8.0)), "captured / eager, peak memory (large")
    assert found.ratio == pytest.approx(1 / 8) and found.met == "no"
    assert found.low == pytest.approx(1 / 9.6) and found.high == pytest.approx(1 / 7.2)
    assert named(summary.summarised(tables(memory=10.0)), "captured / eager, peak memory (large").met == "yes"


@pytest.mark.parametrize(
    ("changed", "words", "verdict"),
    [
        ({"plain": 1.2}, "captured / plain pass (large", "no"), ({"eager": 1.5}, "eager / captured, time (large", "no"),
        ({"space": 1.29}, "design space / one variant, enlarged", "yes"),
        ({"space": 1.29}, "design space / one variant, shipped", "no"),
        ({"conditions": 1.1}, "exponent of time over conditions", "no"),
        ({}, "exponent of time over conditions", "yes"), ({}, "exponent of time over samples", "yes"),
        ({"naive": (5.0, 5.0)}, "naive / sweep of 12 conditions, all, 48", "yes"),
    ],
)  # fmt: skip
def test_verdicts_follow_the_ratios(changed, words, verdict):
    assert named(summary.summarised(tables(**changed)), words).met == verdict


def test_what_did_not_run_is_not_in_the_summary():
    given = tables()
    found = summary.summarised({"capture": given["capture"]})
    assert set(found.part) == {"a", "1"}
    whole = summary.summarised(given)
    assert list(whole[whole.unit == "s"].ratio) == [1800, 300, 9] and list(whole[whole.unit == "s"].met) == [
        "no",
        "no",
        "yes",
    ]
    assert whole[whole.unit == "share"].ratio.item() == 0.62 and whole[whole.unit == "share"].met.item() == ""
    assert len(whole[whole.part == "peers"]) == 1, "a peer that gave no ratio has no row"


# ---------------------------------------------------------------- README.md and the figure


def test_readmes_paragraph_says_what_is_missed():
    found = summary.summarised(tables())
    text = summary.paragraph(found, "a machine")
    assert "**missed**: naive / sweep of 12 conditions, all, 48 tokens (4.00, not ≥ 5)" in " ".join(text.split())
    for one in found[found.target != ""].itertuples():
        assert any(
            line.startswith(f"| {one.measure}") and line.endswith(f"| {one.met} |") for line in text.splitlines()
        )
    assert "| every notebook, nothing stored, 2 cores, 2 notebooks at once | 1,800 s | ≤ 900 s | no |" in text
    assert "every notebook, nothing stored, 2 cores, 2 notebooks at once (1,800 s, not ≤ 900 s)" in " ".join(
        text.split()
    )
    assert "replies under an intervention of all notebooks, 62 % needed no decoding" in " ".join(text.split())
    better = tables(naive=(6.0, 6.0), space=0.9, runs=(800.0, 50.0, 9.0))
    good = summary.paragraph(summary.summarised(better), "a machine")
    aimed = int((found.target != "").sum())
    assert f"{aimed} of {aimed} targets are met." in " ".join(good.split()) and "missed" not in good


def test_the_paragraph_goes_between_its_markers_and_nowhere_else():
    begin, end = summary.MARKERS
    readme = f"before\n{begin}\nold\n{end}\nafter\n"
    new = summary.inserted(readme, "new")
    assert new == f"before\n{begin}\nnew\n{end}\nafter\n" and summary.inserted(new, "new") == new
    for wrong in ("no markers", f"{end}\n{begin}", f"{begin}{begin}{end}"):
        with pytest.raises(ValueError, match="once each"):
            summary.inserted(wrong, "new")


def test_readme_says_what_the_summary_says():
    path = FOLDER / "summary.csv"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = summary.MARKERS
    if not path.exists():
        assert readme.split(begin)[1].split(end)[0].strip() == "", "numbers that no summary.csv stands behind"
        return
    found = pd.read_csv(path, keep_default_na=False)
    assert summary.inserted(readme, summary.paragraph(found, found.machine.iloc[0])) == readme, (
        "README.md and summary.csv differ: python -m benchmarks --readme"
    )
    assert [summary.met(r, t) for r, t in zip(found.ratio, found.target)] == list(found.met)


def test_the_figure_is_saved_beside_its_tables_and_drawn_again_from_its_csv(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    given = tables()
    frame = summary.drawn(summary.summarised(given), given["growth"])
    assert set(frame.panel) == {"ratio", "growth"} and not frame.measure.str.startswith("every notebook").any()
    figures.use_profile("nano")
    saved = figures.performance(frame).save("performance/performance")
    folder = tmp_path / "figures" / "nano" / "performance"
    assert {path.suffix for path in folder.iterdir()} == {".png", ".pdf", ".csv", ".json"}
    assert figures.rebuild(folder / "performance.csv").png() == saved.png()
    assert json.loads((folder / "performance.json").read_text())["drawing"] == "performance"
    texts = [t.get_text() for ax in saved.canvas.axes for t in ax.texts]
    assert sum("≥" in t or "≤" in t for t in texts) == int((frame.target.fillna("") != "").sum())
    ticks = [line.get_xdata() for line in saved.canvas.axes[0].lines if line.get_linewidth() == 2.2]
    aimed = [float(target.split()[-1]) for target in frame.target.fillna("") if target]
    assert [x[0] for x in ticks] == aimed and all(x[0] == x[1] for x in ticks)
    with pytest.raises(ValueError, match="python -m benchmarks"):
        figures.performance(frame[frame.panel == "growth"])


# ---------------------------------------------------------------- the whole run


@pytest.fixture
def checkout(tmp_path):
    """A repository whose run_all.sh says how it was called, and fails on demand."""
    source = tmp_path / "source"
    source.mkdir()
    script = source / "run_all.sh"
    script.write_text(
        '#!/bin/sh\necho 2 notebooks at once, lines begin with a number\necho ran "$@" >>ran\n'
        '[ ! -e committed ] || [ -z "$VRHLIB_STRICT" ] || exit 4\n[ "$1" != 99 ] || { echo no notebook 99; exit 3; }\n'
    )
    script.chmod(0o755)
    (source / "committed").touch()
    (source / "not_committed").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "run_all.sh", "committed"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], cwd=source, check=True)
    return source


def test_the_whole_run_is_that_of_a_fresh_clone_cold_cached_and_unchanged(checkout, monkeypatch, capsys):
    monkeypatch.setenv("VRHLIB_STRICT", "1")
    calls = []
    original = whole_run.run
    monkeypatch.setattr(
        whole_run, "run", lambda folder, words: calls.append((folder, words)) or original(folder, words)
    )
    found = whole_run.measured(checkout, ["03"])
    assert list(found.run) == ["cold", "cached", "unchanged"] and (found.at_once == 2).all()
    assert [words for _, words in calls] == [["03"], ["03", "--again"], ["03"]]
    assert len({folder for folder, _ in calls}) == 1 and not calls[0][0].exists() and calls[0][0] != checkout
    assert not (checkout / "ran").exists(), "the checkout itself is left alone"
    assert (found.wall_seconds > 0).all() and (found.cores >= 1).all() and found.commit.nunique() == 1
    assert set(whole_run.COLUMNS) == set(found.columns)


def test_half_a_run_is_no_measurement(checkout):
    with pytest.raises(RuntimeError, match="(?s)ended with 3.*no notebook 99"):
        whole_run.measured(checkout, ["99"])


def test_the_environment_of_a_run_is_this_python_and_no_other_results(monkeypatch):
    for name in ("VRHLIB_ROOT", "DASK_SCHEDULER", "PYTHONPATH"):
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("KEPT", "yes")
    found = whole_run.environment()
    assert not {"VRHLIB_ROOT", "DASK_SCHEDULER", "PYTHONPATH"} & set(found) and found["KEPT"] == "yes"
    assert found["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_readme_is_rewritten_from_the_summary_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    script = runpy.run_module("benchmarks.__main__", run_name="not main")
    with pytest.raises(OSError, match="python -m benchmarks"):
        script["rewrite_readme"]()
    (tmp_path / "README.md").write_text("\n".join(["top", *summary.MARKERS, "end"]))
    for name, frame in tables().items():
        store.write_atomic(script["folder"]() / f"{name}.csv", frame.to_csv(index=False))
    script["conclude"]("this machine")
    script["rewrite_readme"]()
    text = (tmp_path / "README.md").read_text()
    found = pd.read_csv(script["folder"]() / "summary.csv", keep_default_na=False)
    assert text.startswith("top\n") and text.endswith("\nend") and "this machine" in text
    assert summary.inserted(text, summary.paragraph(found, "this machine")) == text
    assert (script["folder"]() / "performance.png").exists()
    aimed = found[found.target != ""]
    assert len(aimed) and all(summary.met(r, t) == m for r, t, m in zip(aimed.ratio, aimed.target, aimed.met))
