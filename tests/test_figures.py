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


def variants(changes: dict[str, tuple[float, float, float]], model: str = "toy", k: int = 3) -> pd.DataFrame:
    """An accuracy table of the default, five random draws and the variants, with their change and its interval."""
    rows = [("unmasked", 0, None, 90.0, ()), ("vrh", k, None, 20.0, ())]
    rows += [("random", k, seed, 85.0 - seed, ()) for seed in range(5)]
    rows += [(c, k, None, 20.0 + change[0], change) for c, change in changes.items()]
    frame = pd.DataFrame([row[:4] for row in rows], columns=["condition", "k", "seed", "accuracy"])
    frame[["change", "change_low", "change_high"]] = [row[4] or (np.nan,) * 3 for row in rows]
    return frame.assign(model=model, benchmark="b", low=frame.accuracy - 4, high=frame.accuracy + 4, n=100)


FLIPS = {"flip_q": (30.0, 21.0, 39.0), "flip_phi": (4.0, -1.0, 9.0), "q_union": (-6.0, -9.0, -3.0)}


def prior() -> pd.DataFrame:
    rows = sweep()[sweep().condition.isin(["unmasked", "random", "vrh"])]
    methods = ["retrieval_heads@needle", "retrieval_heads@grounding", "vera", "somebody_elses"]
    return pd.concat([rows, *(rows[rows.condition == "vrh"].assign(condition=m) for m in methods)])


def bands(**changed) -> pd.DataFrame:
    rows = [("toy", "sum", "nano", 30.0, 20.0, 50.0, 200, 24), ("toy", "mean", "nano", 2.0, 5.5, 92.5, 200, 24)]
    rows += [("toy", "mean", "paper", 3.0, 11.0, 86.0, None, 784)]
    columns = ["model", "scoring", "source", "above_5e-3", "between", "below", "n", "heads"]
    return pd.DataFrame(rows, columns=columns).assign(**changed)


def areas() -> pd.DataFrame:
    rows = [(m, key, a, a * 2, a, a * 3, 50) for m in ("toy", "other") for key in ("sum", "mean") for a in (2.0, 9.0)]
    return pd.DataFrame(rows, columns=["model", "keys", "area", "share", "low", "high", "n"])


def words_on(figure) -> list[str]:
    """Every text drawn inside or above the panels."""
    titles = [ax.get_title() for ax in figure.canvas.axes] + [figure.canvas.get_suptitle()]
    return titles + [t.get_text() for ax in figure.canvas.axes for t in ax.texts]


def legend_of(figure) -> list[str]:
    return [t.get_text() for t in figure.canvas.legends[0].get_texts()]


TOPS = {"vrh": SCORES.top(3), "localization_heads@grounding": SCORES.top(4).rest().top(3)}
ACCURACIES = {"unmasked": (90.0, 84.0, 94.0), "this scoring": (20.0, 14.0, 27.0), "random": None}


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
    "variants": lambda: figures.variants(pd.concat([variants(FLIPS), variants(FLIPS, "other", 5)])),
    "prior_methods": lambda: figures.prior_methods(prior()),
    "method_overlap": lambda: figures.method_overlap(TOPS, "toy"),
    "sorted_scores": lambda: figures.sorted_scores({"toy": SCORES}, {"toy": SCORES.top(3)}),
    "sparsity": lambda: figures.sparsity(bands()),
    "area_dependence": lambda: figures.area_dependence(areas()),
    "design_view": lambda: figures.design_view(SCORES, 3, "VERA", r"plain text, even $\frac$", ACCURACIES),
    "example": lambda: figures.example(IMAGE, BOX, GRID, "the cat", Box(11, 12, 41, 52)),
    "attention_maps": lambda: figures.attention_maps([(t, IMAGE, BOX, GRID, maps(i)) for i, t in enumerate("ab")]),
    "before_after": lambda: figures.before_after(
        [("the cat", IMAGE, BOX, {"unmasked": BOX, "vrh": Box(1, 2, 20, 30), "random": None})]
    ),
    "ablation_view": lambda: figures.ablation_view(
        SCORES, 2, {"vrh": 20.0, "random": 80.0}, ("the cat", IMAGE, BOX, {"unmasked": BOX, "vrh": None})
    ),
    "refused": lambda: figures.refused("copy: copying is defined for text only, whatever $x$ costs."),
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


def test_a_star_stands_exactly_where_the_interval_of_the_change_excludes_zero():
    changes = {
        "flip_q": (3.51, 0.2, 7.0),
        "flip_phi": (-3.5, -7.0, -0.2),
        "flip_omega": (1.0, 0.0, 2.0),
        "q_union": (-0.04, -3, 3),
    }
    texts = [t.get_text() for t in figures.variants(variants(changes)).canvas.axes[0].texts]
    assert texts == ["+3.5*", "−3.5*", "+1.0", "+0.0"]  # neither the default nor random heads have one


def test_bars_of_variants_stand_in_order_with_intervals_or_the_range_of_seeds():
    figure = figures.variants(variants({"q_union": FLIPS["q_union"], "flip_q": FLIPS["flip_q"]}))
    ax = figure.canvas.axes[0]
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["random heads", "VRH", "other queries\n(expression)", "both queries"]
    assert [bar.get_height() for bar in ax.patches] == [83, 20, 50, 14]
    ends = [bars[2][0].get_segments()[0][:, 1].tolist() for bars in ax.containers[1::2]]
    assert ends == [[81, 85], [16, 24], [46, 54], [10, 18]]
    assert "k=3, unmasked 90.0, n=100 each" in ax.get_title() and "5 seeds" in figure.canvas.get_suptitle()


@pytest.mark.parametrize(
    "table, message",
    [
        (pd.concat([variants(FLIPS), variants(FLIPS, k=5)]), "Several k for toy: select the rows of one k"),
        (pd.concat([variants(FLIPS), variants(FLIPS).assign(benchmark="c")]), "toy has 2 benchmarks in one panel"),
        (variants(FLIPS).query("condition != 'unmasked'"), "toy has no unmasked row"),
        (variants(FLIPS).replace("flip_q", "flop_q"), "No bar for flop_q: conditions are unmasked, random"),
        (variants(FLIPS).iloc[:0], "The table has no rows"),
    ],
)
def test_variants_that_cannot_stand_side_by_side_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        figures.variants(table)


def test_prior_methods_of_several_benchmarks_or_without_a_baseline_are_refused():
    with pytest.raises(ValueError, match="toy has 2 benchmarks in one panel"):
        figures.prior_methods(pd.concat([prior(), prior().assign(benchmark="c")]))
    with pytest.raises(ValueError, match="toy has no unmasked row"):
        figures.prior_methods(prior().query("condition != 'unmasked'"))


def test_every_prior_method_is_drawn_and_told_apart_known_or_not():
    figure = EVERY["prior_methods"]()
    methods = ["Retrieval Heads @ needle", "Retrieval Heads @ grounding", "VERA", "somebody_elses"]
    ours = ["VRH (95 % interval)", "unmasked", "random heads (mean and range of 5 seeds)"]
    assert legend_of(figure) == ours + methods
    lines = {line.get_label(): line for line in figure.canvas.axes[0].lines}
    looks = {(lines[m].get_color(), lines[m].get_marker(), lines[m].get_fillstyle()) for m in methods}
    assert len(looks) == 4 and not {colour for colour, *_ in looks} & {figures.COLOUR["vrh"], figures.COLOUR["random"]}
    assert lines[methods[0]].get_color() == lines[methods[1]].get_color()  # one method, two kinds of data
    assert lines["somebody_elses"].get_xydata().tolist() == [[0, 80], [1, 60], [2, 40], [3, 20]]


def test_more_unknown_methods_than_spare_looks_are_drawn_all_the_same():
    rows = prior()
    many = [rows[rows.condition == "vera"].assign(condition=f"method {i}") for i in range(9)]
    assert {f"method {i}" for i in range(9)} <= set(legend_of(figures.prior_methods(pd.concat([rows, *many]))))


def test_the_overlap_of_methods_counts_shared_heads_beside_what_chance_gives():
    tops = {"vrh": SCORES.top(3), "vera": HeadSet((*SCORES.top(5).heads[3:], SCORES.top(1).heads[0]), (4, 6))}
    words = words_on(figures.method_overlap(tops, "toy"))
    assert words[-4:] == ["3", "1", "1", "3"]
    assert "toy: heads shared by two methods' top 3\nby chance 0.4 expected (3 x 3 / 24 heads)" in words


@pytest.mark.parametrize(
    "tops, message",
    [
        ({"vrh": SCORES.top(3), "vera": SCORES.top(2)}, "not vrh 3, vera 2: cut all to one k"),
        ({"vrh": SCORES.top(0)}, "not vrh 0: cut all to one k > 0"),
        ({}, "not none"),
        ({"vrh": HeadSet(((0, 0),), (4, 6)), "vera": HeadSet(((0, 0),), (6, 4))}, "vrh 4 x 6, vera 6 x 4: detect"),
    ],
)
def test_lists_that_cannot_be_compared_are_refused(tops, message):
    with pytest.raises(ValueError, match=message):
        figures.method_overlap(tops, "toy")


def test_sorted_scores_fall_with_their_top_marked_and_zeros_on_the_floor():
    values = np.zeros((4, 6))
    values.flat[[7, 3, 20, 11]] = 0.4, 0.3, 0.2, 0.1
    scores = HeadScores(values, "output/sum/mean", "toy", 12)
    figure = figures.sorted_scores({"toy": scores}, {"toy": scores.top(2)})
    frame, ax = figure.frame, figure.canvas.axes[0]
    assert frame.score.is_monotonic_decreasing and list(frame["rank"]) == list(range(1, 25))
    assert list(frame[frame.top].score) == [0.4, 0.3]
    curve, top, *thresholds = ax.lines
    assert curve.get_ydata()[4:].tolist() == [figures.FLOOR] * 20 and top.get_xdata().tolist() == [1, 2]
    assert [line.get_ydata()[0] for line in thresholds] == [1e-3, 5e-3] and "below 1e-6 drawn there" in ax.get_ylabel()
    assert np.allclose(frame.half_share, 2 / 24) and np.allclose(frame.gini, scores.gini())
    assert f"half of the mass: 8.3 % of heads\nGini {scores.gini():.2f}" in words_on(figure)


def test_a_floor_that_no_score_reaches_is_not_mentioned():
    assert EVERY["sorted_scores"]().canvas.axes[0].get_ylabel() == "head score"


def test_sorted_scores_need_the_top_heads_of_every_model_on_its_grid():
    with pytest.raises(ValueError, match="No top heads for other: pass the detected list"):
        figures.sorted_scores({"toy": SCORES, "other": SCORES}, {"toy": SCORES.top(3)})
    with pytest.raises(ValueError, match="belongs to a model of 6 layers x 4 heads"):
        figures.sorted_scores({"toy": SCORES}, {"toy": HeadSet(((0, 0),), (6, 4))})


def test_bands_of_heads_fill_the_bar_and_the_narrow_ones_have_no_number():
    sums, means = EVERY["sparsity"]().canvas.axes
    for ax, bars in ((sums, 1), (means, 2)):
        ends = np.array([[patch.get_x() + patch.get_width() for patch in band] for band in ax.containers])
        assert ends.shape == (3, bars) and np.allclose(ends[-1], 100)
    numbers = [t.get_text() for t in means.texts if not t.get_text().startswith("paper")]
    assert numbers == ["6", "11", "92", "86"]
    assert [label.get_text() for label in sums.get_yticklabels()] == [
        "toy (nano)\nn=200, 24 heads", "toy (paper)\nn not given, 784 heads",
    ]  # fmt: skip


def test_the_published_shares_are_lines_at_4_and_15_percent():
    for ax in EVERY["sparsity"]().canvas.axes:
        at = {lines.get_segments()[0][0, 0] for lines in ax.collections}
        assert at == {4, 15} and sum(t.get_text().startswith("paper: ") for t in ax.texts) == 2


def test_bands_that_do_not_add_up_and_other_panels_are_refused():
    with pytest.raises(ValueError, match=r"The bands of toy \(sum\) sum to 90.0, not 100"):
        figures.sparsity(bands(below=[40.0, 92.5, 86.0]))
    with pytest.raises(ValueError, match="Panels are sum and mean .* the table has argmax, mean"):
        figures.sparsity(bands(scoring=["argmax", "mean", "mean"]))
    with pytest.raises(ValueError, match="the table has argmax"):
        figures.area_dependence(areas().assign(keys="argmax"))
    with pytest.raises(ValueError, match="the table has nothing"):
        figures.area_dependence(areas().iloc[:0])


def test_a_line_a_model_rises_with_the_area_whatever_the_order_of_rows():
    figure = figures.area_dependence(areas().iloc[::-1])
    assert [ax.get_title() for ax in figure.canvas.axes] == [
        "sum over the referent's tokens\nn=50 a bin", "mean over the referent's tokens\nn=50 a bin",
    ]  # fmt: skip
    for ax in figure.canvas.axes:
        assert [bars[0].get_ydata().tolist() for bars in ax.containers] == [[4, 18], [4, 18]]
        assert len({bars[0].get_marker() for bars in ax.containers}) == 2


def test_a_point_of_the_design_space_says_what_was_not_measured():
    figure = figures.design_view(SCORES, 3, "", "a formula of words " * 9, ACCURACIES)
    words = words_on(figure)
    assert figure.canvas.get_suptitle() == "no named method" and words.count("not measured") == 1
    assert {"90.0", "20.0", "toy: top 3 of 24 heads, n=12"} <= set(words)
    assert any(w.startswith("a formula of words") and "\n" in w for w in words)
    bars = figure.canvas.axes[2]
    assert [bar.get_width() for bar in bars.patches] == [90, 20]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["unmasked", "this scoring", "random heads"]
    assert len(figure.canvas.axes[1].patches) == 3


def test_a_design_view_of_more_heads_than_there_are_is_refused():
    with pytest.raises(ValueError, match="k=25"):
        figures.design_view(SCORES, 25, "VERA", "", ACCURACIES)
