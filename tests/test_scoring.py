"""Head scores against a brute-force loop over eager attention, one unpadded sample at a time."""

import contextlib
import dataclasses
import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch

from tests import tiny
from vrhlib import boxes, scoring, store
from vrhlib.attention import generate
from vrhlib.boxes import Box
from vrhlib.heads import Head, HeadSet
from vrhlib.samples import Sample, Samples
from vrhlib.scoring import (
    KEYS,
    QUERIES,
    SAMPLES,
    VRH,
    SampleScores,
    Scoring,
    Tokens,
    capture_cost,
    close_up,
    detect,
    score_samples,
    stability,
)

pytestmark = pytest.mark.usefixtures("root")
PAIRS = list(itertools.product(QUERIES, KEYS))
LAYERS, HEADS = 3, 8


@pytest.fixture
def samples() -> Samples:
    return Samples("noise", "detect", tiny.samples((100, 60), (70, 150), (130, 70), (64, 90), (150, 80)))


@contextlib.contextmanager
def passes(vlm):
    """A list that grows by (batch rows, query rows) with every pass through the text model."""
    seen = []
    handle = vlm.layers[0].self_attn.q_proj.register_forward_hook(lambda m, a, out: seen.append(out.shape[:2]))
    try:
        yield seen
    finally:
        handle.remove()


# ---------------------------------------------------------------- the oracle


def overlapping(grid, box: Box) -> list[int]:
    return [
        v for v, (x0, y0, x1, y1) in enumerate(grid.cells.tolist())
        if x0 < box.x1 and box.x0 < x1 and y0 < box.y1 and box.y0 < y1
    ]  # fmt: skip


@torch.no_grad()
def by_hand(vlm, sample) -> dict:
    """All attention of one sample alone, without padding: {"A": [layers, heads, T, T], rows, keys}."""
    batch = vlm.prepare([sample])
    P = batch.length
    ids = vlm.model.generate(**batch.tensors, do_sample=False, max_new_tokens=vlm.max_new_tokens)[0, P:].tolist()
    reply = [i for i in ids if i not in vlm.stop_ids]
    more = {"input_ids": torch.tensor([reply]), "attention_mask": torch.ones(1, len(reply), dtype=torch.long)}
    more["mm_token_type_ids"] = torch.zeros(1, len(reply), dtype=torch.long)
    inputs = {k: torch.cat([v, more[k].to(v.dtype)], 1) if k in more else v for k, v in batch.tensors.items()}
    vlm.model.set_attn_implementation({"text_config": "eager"})
    attentions = vlm.model(**inputs, output_attentions=True).attentions
    vlm.model.set_attn_implementation({"text_config": "sdpa"})
    image = [i for i, t in enumerate(inputs["input_ids"][0].tolist()) if t == vlm.model.config.image_token_id]
    keys = [image[v] for v in overlapping(batch.grids[0], sample.box)]
    return {
        "A": torch.cat(attentions).double().numpy(), "keys": keys,
        "output": [P - 1 + t for t in range(len(reply))], "expression": batch.expression_columns[0].tolist(),
    }  # fmt: skip


def theta(known: dict, rows: list[int], keys: str) -> np.ndarray:
    """Eq. 1 for one sample, in loops."""
    out = np.zeros((LAYERS, HEADS))
    for i, h in np.ndindex(LAYERS, HEADS):
        for row in rows:
            a = known["A"][i, h, row]
            if keys == "sum":
                out[i, h] += sum(a[k] for k in known["keys"]) / len(rows)
            else:
                out[i, h] += (int(np.argmax(a)) in known["keys"]) / len(rows)
    return out


def test_scores_equal_a_brute_force_loop_over_eager_attention(vlm, samples):
    got = score_samples(vlm, samples, batch_size=3)  # batches of 3 and 2, both left-padded
    assert set(got.values) == set(PAIRS) and got.n == 5
    for s, sample in enumerate(samples):
        known = by_hand(vlm, sample)
        for keys in ("sum", "argmax"):
            for queries in ("output", "expression"):
                want = theta(known, known[queries], keys)
                np.testing.assert_allclose(got.values[queries, keys][s], want, atol=1e-5)
            candidates = [theta(known, [row], keys) for row in known["output"]]
            drawn = got.values["one output", keys][s]
            assert min(np.abs(drawn - c).max() for c in candidates) < 1e-5
    assert np.ptp(got.values["output", "sum"]) > 0.05 and got.values["output", "argmax"].any()


def test_one_output_token_is_the_same_for_every_head_and_key_choice(vlm, samples):
    got = score_samples(vlm, samples)
    chosen = []
    for s, sample in enumerate(samples):
        known = by_hand(vlm, sample)
        errors = [np.abs(got.values["one output", "sum"][s] - theta(known, [r], "sum")).max() for r in known["output"]]
        chosen.append(int(np.argmin(errors)))
        want = theta(known, [known["output"][chosen[-1]]], "argmax")
        np.testing.assert_allclose(got.values["one output", "argmax"][s], want, atol=1e-6)
    assert len(set(chosen)) > 1  # drawn anew for each sample


def test_scores_do_not_depend_on_the_batch_size(vlm, samples):
    one, many = score_samples(vlm, samples, batch_size=1), score_samples(vlm, samples, batch_size=8)
    for pair in PAIRS:
        np.testing.assert_allclose(one.values[pair], many.values[pair], atol=1e-5)


# ---------------------------------------------------------------- the axes alone


def tokens(length=10, replied=4, expression=(3, 4)) -> Tokens:
    return Tokens(length, replied, np.array(expression), np.random.default_rng(0))


def test_output_rows_are_those_that_predict_the_reply():
    assert QUERIES["output"](tokens()).tolist() == [9, 10, 11, 12]
    assert QUERIES["expression"](tokens()).tolist() == [3, 4]
    drawn = {int(QUERIES["one output"](Tokens(10, 4, np.array([]), np.random.default_rng(i)))[0]) for i in range(60)}
    assert drawn == {9, 10, 11, 12}


def test_one_hot_rows_are_scored_where_they_look():
    """Row r looks only at column r - 7: of the output rows 9 to 12, those to columns 3 and 4 hit."""
    A = torch.zeros(1, 1, 14, 14)
    A[0, 0, range(7, 14), range(7)] = 1
    inside = torch.zeros(1, 1, 1, 14)
    inside[..., [3, 4]] = 1
    rows = A[:, :, QUERIES["output"](tokens())]
    for keys in ("sum", "argmax"):
        assert KEYS[keys](rows, inside).flatten().tolist() == [0, 1, 1, 0]


def test_a_sink_outside_the_picture_wins_the_argmax():
    row = torch.tensor([0.9, 0.02, 0.05, 0.03]).expand(2, 3, 1, 4)
    inside = torch.zeros(2, 1, 1, 4)
    inside[0, ..., 2] = 1
    inside[1, ..., 0] = 1
    assert KEYS["argmax"](row, inside)[:, 0, 0].tolist() == [0, 1]
    torch.testing.assert_close(KEYS["sum"](row, inside)[:, 0, 0], torch.tensor([0.05, 0.9]))


def test_argmax_is_averaged_after_the_indicator():
    rows = torch.tensor([[0.6, 0.4], [0.0, 1.0]]).view(1, 1, 2, 2)  # the mean row would point to column 1
    inside = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    assert KEYS["argmax"](rows, inside).mean() == 0.5


def selection(values: np.ndarray, m: int) -> np.ndarray:
    count = np.zeros(values.shape[1:])
    for sample in values:
        ranked = sorted(np.ndindex(*sample.shape), key=lambda h: (-sample[h], h))
        for h in ranked[:m]:
            count[h] += 1 / len(values)
    return count


@pytest.mark.parametrize(("grid", "m"), [((3, 8), 2), ((5, 10), 5), ((10, 30), 20)])
def test_selection_frequency_counts_the_samples_that_put_a_head_in_their_top_m(grid, m):
    values = np.random.default_rng(0).random((17, *grid)).round(1)  # rounded: many ties
    got = SAMPLES["freq"](values)
    np.testing.assert_allclose(got, selection(values, m))
    assert got.sum() == pytest.approx(m)


def test_selection_frequency_of_a_very_small_grid_still_selects():
    assert SAMPLES["freq"](np.random.default_rng(0).random((4, 2, 3))).sum() > 0


def test_the_mean_counts_every_sample():
    values = np.zeros((4, 1, 2))
    values[0] = 1
    assert SAMPLES["mean"](values).tolist() == [[0.25, 0.25]]


def scores(values: dict) -> SampleScores:
    return SampleScores(values, "model", "noise", ("run",))


def test_ties_are_ranked_by_layer_then_head():
    flat = scores({("output", "sum"): np.zeros((3, 2, 3), np.float32)})
    want = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [tuple(h) for h in flat.score(VRH).top(6)] == want
    values = np.zeros((3, 2, 3), np.float32)
    values[:, 1, 2] = 1
    assert [tuple(h) for h in scores({("output", "sum"): values}).score(VRH).top(3)] == [(1, 2), (0, 0), (0, 1)]


def test_layer_and_head_are_not_swapped(vlm, samples):
    got = score_samples(vlm, samples)
    best = detect(vlm, samples).top(1).heads[0]
    mean = got.values["output", "sum"].astype(float).mean(0)
    assert best == Head(*np.unravel_index(mean.argmax(), mean.shape)) and mean.shape == vlm.grid


def test_detect_reads_its_scores_off_the_captured_pass(vlm, samples):
    captured = score_samples(vlm, samples)
    for point in itertools.starmap(Scoring, itertools.product(QUERIES, KEYS, SAMPLES)):
        got = detect(vlm, samples, point)
        want = SAMPLES[point.samples](captured.values[point.queries, point.keys].astype(np.float64))
        assert np.array_equal(got.values, want) and got.scoring == str(point) and got.n == 5


def test_unknown_axis_values_are_refused_with_the_nearest_name():
    for point, hint in {
        ("outputs", "sum", "mean"): "Did you mean 'output'",
        ("output", "argmx", "mean"): "Did you mean 'argmax'",
        ("output", "sum", "frequency"): "Did you mean 'freq'",
        ("output", "sum", "xyz"): "there are 'mean', 'freq'",
    }.items():
        with pytest.raises(ValueError, match=hint):
            Scoring(*point)
    assert str(VRH) == "output/sum/mean"


# ---------------------------------------------------------------- stored and resumed


def test_a_second_call_runs_no_model(vlm, samples):
    first = score_samples(vlm, samples, batch_size=2)
    with passes(vlm) as seen:
        again = score_samples(vlm, samples, batch_size=2)
        detect(vlm, samples, Scoring("expression", "argmax", "freq"), batch_size=2)
    assert seen == [] and again.runs == first.runs
    for pair in PAIRS:
        assert np.array_equal(again.values[pair], first.values[pair])


def test_a_killed_run_keeps_its_finished_samples(vlm, samples, monkeypatch, tmp_path):
    prepared = []

    def dies_at_the_second_batch(vlm, batch, max_new_tokens):
        prepared.append([s.id for s in batch.samples])
        if len(prepared) == 2:
            raise KeyboardInterrupt
        return generate(vlm, batch, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(scoring, "generate", dies_at_the_second_batch)
    with pytest.raises(KeyboardInterrupt):
        score_samples(vlm, samples, batch_size=2)
    got = score_samples(vlm, samples, batch_size=2)
    assert prepared == [["noise-0", "noise-1"], ["noise-2", "noise-3"], ["noise-2", "noise-3"], ["noise-4"]]
    monkeypatch.setattr(store, "ROOT", tmp_path / "elsewhere")  # the same without an interruption
    want = score_samples(vlm, samples, batch_size=2)
    for pair in PAIRS:
        np.testing.assert_allclose(got.values[pair], want.values[pair], atol=1e-6)


def test_order_of_samples_is_theirs_not_the_files(vlm, samples, root):
    first = score_samples(vlm, samples, batch_size=2)
    path = next((root / "data/runs/nano").glob("*.jsonl"))
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    again = score_samples(vlm, samples, batch_size=2)
    assert np.array_equal(again.values["output", "sum"], first.values["output", "sum"])


def test_other_token_limits_samples_and_models_have_their_own_files(vlm, samples, tiny_models, root):
    runs = {score_samples(vlm, samples).runs[0], score_samples(vlm, samples[:3]).runs[0]}
    vlm.max_new_tokens = 3
    runs.add(score_samples(vlm, samples).runs[0])
    vlm.prompt = vlm.prompt.replace("{expression}", "the {expression}")
    runs.add(score_samples(vlm, samples).runs[0])
    other = next(m for m in tiny_models.values() if m.name != vlm.name)
    runs.add(score_samples(other, samples[:1]).runs[0])
    assert len(runs) == 5 == len(list((root / "data/runs/nano").glob("*.jsonl")))


def test_a_sample_without_a_box_is_refused_before_any_pass(vlm, samples):
    bare = Sample("bare", samples[0].image, "noise", "dog")
    with passes(vlm) as seen, pytest.raises(ValueError, match="bare"):
        score_samples(vlm, Samples("noise", "detect", [*samples, bare]))
    assert seen == []


def silent(vlm, monkeypatch, sample):
    """Let the model stop at once where its reply would begin as that to `sample` does."""
    first = generate(vlm, vlm.prepare([sample]))[0, 0, 0]
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", [int(first)])
    vlm.__dict__.pop("stop_ids", None)


def test_samples_without_a_reply_are_counted_and_left_out(vlm, samples, monkeypatch):
    whole = score_samples(vlm, samples)
    vlm.prompt = vlm.prompt + " "  # another run
    silent(vlm, monkeypatch, samples[0])
    first = [row[0, 0] in vlm.stop_ids for row in [generate(vlm, vlm.prepare([s]))[0] for s in samples]]
    if all(first):
        pytest.skip("this random model begins every reply alike")
    got = score_samples(vlm, samples)
    assert got.empty == tuple(s.id for s, quiet in zip(samples, first) if quiet) and got.empty
    assert got.n == whole.n - len(got.empty) == got.score(VRH).n
    assert f"{len(got.empty)} without a reply, first {got.empty[0]}" in str(got)
    again = score_samples(vlm, samples)  # from the store
    assert again.empty == got.empty and np.array_equal(again.values["output", "sum"], got.values["output", "sum"])
    vlm.__dict__.pop("stop_ids", None)


def test_no_reply_at_all_is_an_error_that_shows_the_prompt(vlm, samples, monkeypatch):
    silent(vlm, monkeypatch, samples[0])
    with pytest.raises(ValueError, match="replied nothing to any of 1 samples.*red dot"):
        score_samples(vlm, samples[:1])
    vlm.__dict__.pop("stop_ids", None)


def test_a_mask_can_stand_for_the_box(vlm, samples):
    """A mask that fills its box exactly gives the same tokens, hence the same scores; half of it gives fewer."""

    def masked(sample, share):
        mask = np.zeros(sample.image.size[::-1], bool)
        x0, y0, x1, y1 = map(int, sample.box)
        mask[y0:y1, x0 : x0 + max(1, int(share * (x1 - x0)))] = True
        return dataclasses.replace(sample, box=Box(x0, y0, x1, y1), mask=boxes.encode_mask(mask, sample.image.size))

    full, half = (Samples("noise", "detect", [masked(s, share) for s in samples]) for share in (1, 0.1))
    by_box, by_mask = (score_samples(vlm, full, evidence=e).values["output", "sum"] for e in ("box", "mask"))
    assert np.array_equal(by_box, by_mask)
    assert (score_samples(vlm, half, evidence="mask").values["output", "sum"] <= by_mask + 1e-6).all(), "another run"
    with pytest.raises(ValueError, match="have no mask"):
        score_samples(vlm, samples, evidence="mask")
    with pytest.raises(ValueError, match="Did you mean 'mask'"):
        score_samples(vlm, samples, evidence="masks")


def test_tiles_and_thumbnail_add_up_to_both(vlm, samples):
    tiles, thumbnail, both = (
        score_samples(vlm, samples, part=p).values["output", "sum"] for p in ("tiles", "thumbnail", "both")
    )
    grids = vlm.prepare(list(samples)).grids
    for i, grid in enumerate(grids):
        if len(grid) > grid.rows * grid.cols:  # a thumbnail is there
            np.testing.assert_allclose(tiles[i] + thumbnail[i], both[i], atol=1e-5)
            assert thumbnail[i].max() > 0 and tiles[i].max() > 0
        else:
            assert np.array_equal(tiles[i], both[i]) and np.array_equal(thumbnail[i], both[i])
    with pytest.raises(ValueError, match="choose one of"):
        score_samples(vlm, samples, part="corner")


def test_out_of_memory_halves_the_batch_and_goes_on(vlm, samples, monkeypatch, root):
    want = score_samples(vlm, samples, batch_size=4)

    def limited(vlm, batch, max_new_tokens):
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(vlm, batch, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(scoring, "generate", limited)
    monkeypatch.setattr(store, "ROOT", root / "short")
    vlm.rows = 5
    got = score_samples(vlm, samples, batch_size=4)
    assert vlm.rows == 2
    np.testing.assert_allclose(got.values["output", "sum"], want.values["output", "sum"], atol=1e-5)
    manifest = json.loads((root / f"short/data/runs/nano/{got.runs[0]}.json").read_text())
    assert manifest["batch_sizes"] == {"2": 4, "1": 1} and manifest["batch_size"] == 4


def test_a_tiny_box_has_at_least_one_token(vlm, samples):
    small = Sample("small", samples[0].image, "noise", samples[0].text, Box(31, 17, 31.5, 17.5))
    values = score_samples(vlm, Samples("noise", "detect", [small])).values["output", "sum"]
    assert (values > 0).all() and (values < 1).all()


# ---------------------------------------------------------------- stability and cost


def test_stability_has_a_row_per_size_and_seed():
    values = np.random.default_rng(0).random((12, 4, 6)).astype(np.float32)
    values[:, 0, 0] += 3
    captured = scores({("output", "sum"): values})
    table = stability(captured, [2, 12], k=5, seeds=4)
    assert list(table.columns) == ["n", "seed", "overlap", "spearman", "k", "model"]
    assert table.n.tolist() == [2] * 4 + [12] * 4 and table.seed.tolist() == [0, 1, 2, 3] * 2
    assert (table[table.n == 12].overlap == 5).all() and np.allclose(table[table.n == 12].spearman, 1)
    assert (table[table.n == 2].overlap >= 1).all() and table[table.n == 2].spearman.nunique() > 1
    pd.testing.assert_frame_equal(table, stability(captured, [2, 12], k=5, seeds=4))


def test_stability_over_more_samples_than_captured_is_refused():
    captured = scores({("output", "sum"): np.random.default_rng(0).random((3, 2, 2)).astype(np.float32)})
    with pytest.raises(ValueError, match="only 3"):
        stability(captured, [4], k=1)


def test_captured_rows_and_eager_attention_measure_the_same_pass(vlm, samples):
    batch = vlm.prepare(samples[:1])
    rows = scoring._pass_rows(vlm, batch, [70, 71, 72])
    np.testing.assert_allclose(rows, scoring._pass_eager(vlm, batch, [70, 71, 72]), atol=1e-5)
    assert rows.shape == vlm.grid


def test_capture_cost_has_a_row_per_method_and_size(vlm, samples):
    table = capture_cost(vlm, samples[0], scales=[1, 2], repeats=1)
    assert list(table.columns) == ["method", "visual_tokens", "seconds", "peak_mib", "n", "model"]
    assert table.method.tolist() == ["rows", "eager"] * 2 and (table.seconds > 0).all()
    assert table.visual_tokens.is_monotonic_increasing
    assert 0 <= table.attrs["largest_difference"] < 1e-5


def test_a_close_up_shows_the_rows_that_predict_the_reply(vlm, samples):
    for sample in samples:
        known, got = by_hand(vlm, sample), close_up(vlm, sample)
        image = np.flatnonzero(vlm.prepare([sample]).tensors["input_ids"][0] == vlm.model.config.image_token_id)
        want = known["A"][:, :, known["output"]][..., image]
        np.testing.assert_allclose(got.attention, want, atol=1e-5)
        assert len(got.tokens) == len(known["output"]) and got.grid.cells.shape == (len(image), 4)
        assert got.reply.failure in ("no box", "cut off")
        chosen = HeadSet((Head(1, 5), Head(2, 0)), vlm.grid)
        np.testing.assert_allclose(got.over(chosen), (want[1, 5] + want[2, 0]).mean(0), atol=1e-5)


def test_a_close_up_is_the_scored_attention_and_adds_up_over_heads(vlm, samples):
    sample = samples[0]
    look = scoring.close_up(vlm, sample)
    assert look.attention.shape == (*vlm.grid, len(look.tokens), len(look.grid))
    inside = look.grid.tokens_in(sample.box)
    scored = score_samples(vlm, samples[:1]).score(scoring.VRH).values
    np.testing.assert_allclose(look.attention[..., inside].sum(-1).mean(-1), scored, atol=1e-6)
    some = HeadSet(((0, 1), (2, 5)), vlm.grid, "some")
    both = HeadSet(some.heads + some.rest().heads, vlm.grid, "all")
    np.testing.assert_allclose(look.over(some) + look.over(some.rest()), look.over(both), atol=1e-6)
    assert look.panels({"a": some})[0] == sample.text


def test_capture_and_eager_cost_passes_agree(vlm, samples):
    table = scoring.capture_cost(vlm, samples[0], (1,), repeats=1)
    assert list(table.method) == ["rows", "eager"] and (table.seconds > 0).all()
    assert 0 < table.attrs["largest_difference"] < 1e-5
    assert vlm.model.config.get_text_config()._attn_implementation == "sdpa"


def test_another_mask_is_another_run(vlm, samples, root):
    def masked(*corners):
        mask = np.zeros(samples[0].image.size[::-1], bool)
        mask[slice(*corners[:2]), slice(*corners[2:])] = True
        return Samples("noise", "detect", [dataclasses.replace(samples[0], mask=mask)])

    runs = {
        score_samples(vlm, masked(*c), evidence="mask").runs for c in ((0, 9, 0, 9), (30, 50, 30, 50), (0, 9, 0, 9))
    }
    assert len(runs) == 2
    assert score_samples(vlm, masked(0, 9, 0, 9)).runs == score_samples(vlm, masked(30, 50, 30, 50)).runs, "by box"


def test_the_reply_limit_of_a_benchmark_holds_while_scoring(vlm, samples, monkeypatch):
    limits = []

    def counted(vlm, batch, max_new_tokens):
        limits.append(max_new_tokens)
        return generate(vlm, batch, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(scoring, "generate", counted)
    score_samples(vlm, Samples("noise", "detect", list(samples), max_new_tokens=3)[:2])
    assert limits == [3]
