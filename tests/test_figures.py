"""Figures are functions of their CSV: drawn again without a model, without torch, to the same picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from vrhlib import figures, paper, store
from vrhlib.boxes import Box, TokenGrid
from vrhlib.heads import HeadScores, HeadSet

ROOT = Path(__file__).parents[1]
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8))
BOX, GRID = Box(10, 12, 40, 50), TokenGrid.regular(4, 6, (90, 60))
SCORES = HeadScores(np.random.default_rng(1).random((4, 6)), "output/sum/mean", "toy", 12)


def sweep() -> pd.DataFrame:
    rows = [("unmasked", 0, None, 80.0)]
    rows += [("vrh", k, None, 80.0 - 20 * k) for k in (1, 2, 3)]
    rows += [("one output token", k, None, 78.0 - 20 * k) for k in (1, 2, 3)]
    rows += [("random", k, seed, 80.0 - seed - k) for seed in range(5) for k in (1, 2, 3)]
    rows += [("layer_matched", k, seed, 79.0 - 2 * seed - k) for seed in range(5) for k in (1, 2, 3)]
    frame = pd.DataFrame(rows, columns=["condition", "k", "seed", "accuracy"]).astype({"seed": "Int64"})
    shares = {"malformed": 0.0, "cut off": 1.0, "no box": 0.5}
    return frame.assign(model="toy", benchmark="b", low=frame.accuracy - 4, high=frame.accuracy + 4, n=100, **shares)


def stable() -> pd.DataFrame:
    rows = [(n, seed, min(3, 1 + n // 5), 0.9) for n in (5, 10, 20) for seed in range(4)]
    return pd.DataFrame(rows, columns=["n", "seed", "overlap", "spearman"]).assign(k=3, model="toy")


def cost() -> pd.DataFrame:
    rows = [(m, v, v * s, v * b, 3) for m, s, b in (("rows", 1e-3, 0.1), ("eager", 2e-3, 2.0)) for v in (48, 192)]
    return pd.DataFrame(rows, columns=["method", "visual_tokens", "seconds", "peak_mib", "n"]).assign(model="toy")


def maps(seed: int) -> dict:
    return {"all": np.random.default_rng(seed).random(24), "top": np.eye(24)[8]}


EVERY = {
    "head_map": lambda: figures.head_map(SCORES, SCORES.top(3)),
    "head_maps": lambda: figures.head_maps(
        {m: SCORES for m in ("toy", "other")}, {"toy": SCORES.top(3), "other": SCORES.top(2)}
    ),
    "ablation_by_model": lambda: figures.ablation_by_model(
        pd.concat([sweep().query("k in (0, 3) and condition != 'one output token'").assign(benchmark=b) for b in "bc"])
    ),
    "published_heads": lambda: figures.published_heads({m: paper.published_heads(m) for m in paper.MODELS}),
    "accuracy_vs_k": lambda: figures.accuracy_vs_k(sweep()),
    "example": lambda: figures.example(IMAGE, BOX, GRID, "the cat", Box(11, 12, 41, 52)),
    "attention_maps": lambda: figures.attention_maps([(t, IMAGE, BOX, GRID, maps(i)) for i, t in enumerate("ab")]),
    "before_after": lambda: figures.before_after(
        [("the cat", IMAGE, BOX, {"unmasked": BOX, "vrh": Box(1, 2, 20, 30), "random": None})]
    ),
    "ablation_view": lambda: figures.ablation_view(
        SCORES, 2, {"vrh": 20.0, "random": 80.0}, ("the cat", IMAGE, BOX, {"unmasked": BOX, "vrh": None})
    ),
    "one_token": lambda: figures.one_token(sweep()),
    "few_samples": lambda: figures.few_samples(stable()),
    "cost": lambda: figures.cost(cost()),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "paper").symlink_to(ROOT / "data" / "paper")
    figures.use_profile("nano")


def test_every_drawing_is_tested_here():
    assert set(EVERY) == set(figures._DRAW)


@pytest.mark.parametrize("name", EVERY)
def test_a_figure_saves_picture_vector_data_and_manifest(name, tmp_path):
    figure = EVERY[name]().save("it", note=7)
    folder = tmp_path / "figures" / "nano"
    assert {p.suffix for p in folder.iterdir()} == {".png", ".pdf", ".csv", ".json"}
    assert (folder / "it.png").read_bytes().startswith(b"\x89PNG") and (folder / "it.pdf").read_bytes().startswith(
        b"%PDF"
    )
    about = json.loads((folder / "it.json").read_text())
    assert about["drawing"] == figure.drawing and about["note"] == 7 and about["profile"] == "nano"
    assert {"versions", "git_commit", "peak_mib", "runs"} <= set(about)
    assert len(pd.read_csv(folder / "it.csv")) == len(figure.frame)


def test_every_figure_is_rebuilt_from_its_csv_with_torch_unimportable(tmp_path):
    originals = {name: draw().save(name).png() for name, draw in EVERY.items()}
    script = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        "from pathlib import Path\n"
        "from vrhlib import figures\n"
        "for csv in sorted(Path(sys.argv[1]).glob('*.csv')):\n"
        "    (csv.parent / f'{csv.stem}.again').write_bytes(figures.rebuild(csv).png())\n"
    )
    folder = tmp_path / "figures" / "nano"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VRHLIB_ROOT": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, check=True, capture_output=True)
    for name, original in originals.items():
        assert (folder / f"{name}.again").read_bytes() == original, name


def test_rebuilding_reads_the_numbers_in_the_csv(tmp_path):
    figure = EVERY["accuracy_vs_k"]().save("curve")
    csv = tmp_path / "figures" / "nano" / "curve.csv"
    csv.write_text(csv.read_text().replace("60.0", "10.0"))
    assert figures.rebuild(csv).png() != figure.png()


def test_nano_figures_say_so_and_paper_figures_do_not():
    def words(figure):
        return [t.get_text() for t in figure.canvas.texts] + [figure.canvas.get_supxlabel()]

    assert any("nano profile" in t for t in words(EVERY["accuracy_vs_k"]()))
    figures.use_profile("paper")
    assert not any("nano" in t for t in words(EVERY["accuracy_vs_k"]()))


def test_an_unwritable_figures_folder_is_a_clear_error_and_changes_nothing(tmp_path):
    (tmp_path / "figures").write_text("not a folder")
    with pytest.raises(OSError, match="Cannot write .*Make .* writable"):
        EVERY["cost"]().save("it")
    assert (tmp_path / "figures").read_text() == "not a folder"


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="Unknown profile 'nanoo'"):
        figures.use_profile("nanoo")


def test_highlighted_heads_are_the_ranked_ones():
    frame = figures.head_map(SCORES, SCORES.top(3)).frame
    ranked = frame[frame["rank"] > 0].sort_values("rank")
    assert list(zip(ranked.layer, ranked["head"])) == [tuple(h) for h in SCORES.top(3)]
    assert ranked.score.is_monotonic_decreasing


def test_attention_panels_state_the_share_in_the_box():
    inside = GRID.tokens_in(BOX)
    figure = figures.attention_maps(
        [("x", IMAGE, BOX, GRID, {"half": inside / inside.sum() + ~inside / (~inside).sum()})]
    )
    assert figure.frame.panel.iloc[0] == "half: 2.00\n50 % on tokens of the box"


def test_a_map_without_attention_says_nothing_and_shares_the_scale_of_its_row():
    looks = [("x", IMAGE, BOX, GRID, {"top": np.eye(24)[8], "rest": np.full(24, 1e-7)})]
    figure = figures.attention_maps(looks)
    assert "rest: 0.00\nno attention on the picture" in set(figure.frame.panel)
    scales = {image.get_clim() for ax in figure.canvas.axes[:2] for image in ax.images[1:]}
    assert scales == {(0, 1)}


def test_tables_are_saved_as_csv_and_markdown_with_their_label(tmp_path):
    figures.save_table(pd.DataFrame({"a": [1.234], "b": ["x|y"]}), "t")
    text = (tmp_path / "figures" / "nano" / "t.md").read_text()
    assert text.startswith("| a | b |\n| --- | --- |\n| 1.2 | x/y |\n") and "nano profile" in text


def test_head_sets_of_other_grids_are_not_counted_as_overlap():
    sets = {"a": HeadSet(((0, 0),), (2, 2), "a"), "b": HeadSet(((0, 0),), (3, 2), "b")}
    texts = [t.get_text() for ax in figures.published_heads(sets).canvas.axes for t in ax.texts]
    assert texts.count("–") == 2


def test_a_table_of_several_k_is_not_averaged_into_one_point():
    several = pd.concat([sweep().assign(benchmark=b) for b in "bc"])
    with pytest.raises(ValueError, match="Several benchmarks and several k"):
        figures.ablation_by_model(several)
    assert figures.ablation_by_model(sweep().query("condition != 'one output token'")).png().startswith(b"\x89PNG")


def test_p_values_and_correlations_are_not_rounded_away():
    frame = pd.DataFrame(
        {"p_shared": [0.0004, 0.0213], "spearman": [0.914, 0.5], "accuracy": [81.26, 3.0], "n": [3, 4]}
    )
    assert figures.shown(frame).values.tolist() == [["< 0.001", "0.91", "81.3", "3"], ["0.021", "0.50", "3.0", "4"]]
    assert "| < 0.001 | 0.91 | 81.3 | 3 |" in figures.markdown(frame)
