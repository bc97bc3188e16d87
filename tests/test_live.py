"""A click gives what a sweep gives for the same heads and picture, whatever was clicked before."""

from pathlib import Path

import numpy as np
import pytest

from vrhlib import evaluate, grounding, live, steering
from vrhlib.attention import Steering, generate
from vrhlib.evaluate import Condition
from vrhlib.heads import Head, HeadScores, HeadSet, load_scores
from vrhlib.samples import Samples
from vrhlib.wiring import load_vlm

MODELS = ("nano-qwen2.5-vl", "nano-internvl3.5")
SAME = ["text", "x0", "y0", "x1", "y1", "iou", "outcome"]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request):
    return load_vlm(request.param, device="cpu")


@pytest.fixture
def vlm(loaded, root):
    return loaded


def scores(vlm) -> HeadScores:
    """As detected: cutting or steering these heads changes replies."""
    return load_scores(Path(__file__).parents[1] / "data" / "heads" / "nano" / f"{vlm.name}__scenes.json", vlm.grid)


def equal(reply: dict, row) -> bool:
    return all(reply[c] == row[c] or (reply[c] != reply[c] and row[c] != row[c]) for c in SAME)


def test_a_knock_out_is_what_an_ablation_sweep_computes(vlm):
    samples = grounding("scenes", "test", 5)
    heads = {"vrh": scores(vlm).top(6), "layer": HeadSet(tuple(Head(1, h) for h in range(6)), vlm.grid, "layer 1")}
    swept = evaluate.sweep_replies(vlm, samples, heads, [2, 6]).set_index(["condition", "k", "id"])
    answer, changed = live.Live(vlm).without(samples), 0
    for s in reversed(samples):
        plain = answer(s.id, HeadSet((), vlm.grid, "none"))
        assert equal(plain, swept.loc["unmasked", 0, s.id])
        for name, k in (("vrh", 6), ("layer", 6), ("vrh", 2)):
            reply = answer(s.id, heads[name].top(k))
            assert equal(reply, swept.loc[name, k, s.id]), (name, k, s.id)
            changed += reply["text"] != plain["text"]
    assert changed > 2, "heads that change nothing prove nothing"
    table = evaluate.ablation_sweep(vlm, samples, heads, [6]).set_index(["condition", "k"])
    mine = [answer(s.id, heads["layer"])["outcome"] == "correct" for s in samples]
    assert table.loc[("layer", 6), "accuracy"] == 100 * np.mean(mine)


def test_pointing_is_what_steering_a_whole_set_computes(vlm):
    asked = grounding("scenes", "test", 4, pairs=True)
    points, top = steering.pointed(asked), scores(vlm).top(8)
    found = steering.steer(vlm, points, {"vrh": top}, [8]).set_index(["condition", "id"])
    answer, changed = live.Live(vlm).toward(asked), 0
    for s in asked:
        plain = answer(s.id, -1, top)
        for i in range(len(steering.segments(asked)[s.image_key])):
            reply = answer(s.id, i, top)
            assert equal(reply, found.loc["vrh", f"{s.id} -> {i}"])
            changed += reply["text"] != plain["text"]
    assert changed > 2
    nobody = HeadSet((), vlm.grid, "none")
    assert answer(asked[0].id, 0, nobody)["text"] == answer(asked[0].id, -1, nobody)["text"]


def test_the_phase_of_steering_reaches_the_model(vlm):
    asked = grounding("scenes", "test", 2, pairs=True)
    answer, layer = live.Live(vlm).toward(asked), HeadSet(tuple(Head(1, h) for h in range(8)), vlm.grid, "layer 1")
    for phase in ("decode", "all"):
        reply = answer(asked[0].id, 1, layer, phase)
        there = steering.aimed(asked[0], steering.segments(asked)[asked[0].image_key][1], "x")
        ids = generate(vlm, vlm.prepare([there]), [Steering(layer, phase)])[0, 0]
        assert reply["text"] == vlm.decode([int(i) for i in ids if i >= 0])[0]


def test_what_was_answered_is_answered_from_memory_and_pictures_keep_their_features(vlm, monkeypatch):
    samples, one = grounding("scenes", "test", 2), live.Live(vlm)
    answer, top = one.without(samples), scores(vlm).top(3)
    first = answer(samples[0].id, top)
    seen, look = [], type(vlm.model).get_image_features
    monkeypatch.setattr(type(vlm.model), "get_image_features", lambda *a, **k: seen.append(1) or look(*a, **k))
    again = answer(samples[0].id, HeadSet(top.heads[::-1], vlm.grid, "reversed"))
    assert again == first | {"seconds": 0.0} and first["seconds"] > 0
    answer(samples[0].id, top.top(2))  # other heads, same picture: its features are there
    assert not seen
    answer(samples[1].id, top)
    assert len(seen) == 1, "another picture is looked at once"


def test_few_pictures_are_kept(vlm):
    samples, one = grounding("scenes", "test", live.PICTURES + 2), live.Live(vlm)
    for s in samples:
        one.answer(s)
    assert len(one._batches) == live.PICTURES


def test_a_point_run_live_is_stored_and_told(vlm):
    samples, told = grounding("scenes", "test", 9), []
    run = live.sweeping(vlm, {"scenes": samples}, {vlm.name: scores(vlm)}, samples, batch_size=4)

    def point(**more):
        asked = dict(model=vlm.name, benchmark="scenes", condition="vrh", k=3, seed=None, kind="zero", phase="all")
        return run(**asked | more, tell=lambda done, of: told.append((done, of)))

    found = point()
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)] and set(found.condition) == {"vrh", "unmasked"}
    assert set(found.ablation) == {"zero"} and set(found.phase) == {"all"} and len(found) == 18
    want = evaluate.sweep_replies(vlm, samples, {"vrh": scores(vlm).top(3)}, [3])
    assert found[found.condition == "vrh"].text.tolist() == want[want.condition == "vrh"].text.tolist()
    told.clear()
    assert point().text.tolist() == found.text.tolist() and not told, "stored: nothing is left to do"
    drawn = point(condition="random", seed=2)
    same = evaluate.sweep_replies(vlm, samples, {"random 2": scores(vlm).controls(3, 2)}, [3])
    assert drawn.text.tolist() == same[same.condition.isin(["unmasked", "random"])].text.tolist()
    assert len(point(condition="unmasked", k=0)) == 9
    assert set(point(kind="mean", phase="decode").ablation) == {"mean"}


def test_layer_matched_heads_that_do_not_exist_are_refused_in_words(vlm):
    full = np.zeros(vlm.grid)
    full[0] = 1
    crowded = HeadScores(full, "s", vlm.name, 1)
    with pytest.raises(ValueError, match="layer_matched 0 at k=8"):
        live.chosen_heads(crowded, "layer_matched", 8, 0)
    assert len(live.chosen_heads(scores(vlm), "random", 4, 1)["random 1"]) == 4
    full[0, 4:] = 0.5
    full[1] = 0.9  # a layer and a half: of the first layer's heads four are left, and eight are asked for
    half = HeadScores(full + np.linspace(0, 1e-3, full.size).reshape(full.shape), "s", vlm.name, 1)
    with pytest.raises(ValueError, match="layer_matched 0 at k=12: layer"):
        live.chosen_heads(half, "layer_matched", 12, 0)


def test_counting_gives_the_rate_over_all_segments(vlm):
    asked, told = grounding("scenes", "test", 4, pairs=True), []
    count = live.counting(vlm, asked, scores(vlm), (0, 1), batch_size=8)
    table = count(2, "decode", lambda done, of: told.append(done))
    points = steering.pointed(asked)
    others = sum(s.kind == "other" for s in points)
    assert set(table.n) == {others} and told[-1] == -(-len(points) // 8)
    found = steering.steer(vlm, points, {"vrh": scores(vlm).top(2)}, [2])
    want = steering.success(found).set_index("condition").loc["vrh", "rate"]
    assert table.set_index("condition").loc["vrh", "rate"] == want
    assert sorted(table[table.condition == "random"].seed) == [0, 1]
    assert Condition("vrh", 2) in [Condition(*row) for row in table[["condition", "k"]].itertuples(index=False)]


def test_a_first_look_is_what_the_live_points_would_be(vlm):
    samples = grounding("scenes", "test", 3)
    known, swept, shown, run = live.first_look(vlm, scores(vlm), samples, (1, 2, 9), 4, (0, 1), samples)
    assert set(swept.k) == {0, 1, 2} and list(known) == [vlm.name]
    assert list(shown) == [s.id for s in samples] and shown[samples[0].id][2] == samples[0].box
    for condition, seed in (("vrh", None), ("random", 1), ("layer_matched", 0)):
        point = run(vlm.name, "scenes", condition, 2, seed, "zero", "all", lambda done, of: None)
        mine = swept[(swept.condition == condition) & (swept.k == 2)]
        mine = mine if seed is None else mine[mine.seed == seed]
        assert point[point.condition == condition].text.tolist() == mine.text.tolist() and len(mine) == 3


def test_a_model_that_a_later_cell_gave_up_is_loaded_again_and_the_notebooks_own_is_left_alone(root):
    """Run All leaves the first cell's view with a released model; its clicks must still be answered."""
    (root / "data").mkdir()
    (root / "data" / "nano").symlink_to(Path(__file__).parents[1] / "data" / "nano")
    samples = grounding("scenes", "test", 2)
    first = load_vlm(MODELS[0], device="cpu")
    heads, one = scores(first), live.Live(first)
    answer, run = one.without(samples), live.sweeping(first, {"scenes": samples}, {first.name: heads}, samples)
    count = live.counting(first, grounding("scenes", "test", 4, pairs=True), heads, (0,))
    before = answer(samples[0].id, heads.top(2))["text"]
    second = load_vlm(MODELS[1], instead_of=first)
    assert first.model is None
    assert answer(samples[0].id, heads.top(2))["text"] == before, "from memory"
    assert one._models._own is None, "and nothing was loaded for it"
    assert answer(samples[1].id, heads.top(4))["text"] and one.vlm is not first
    assert [look.reply.text for look in one.looks(samples[:1]).values()] == [one.answer(samples[0])["text"]]
    quiet = lambda done, of: None  # noqa: E731
    point = run(first.name, "scenes", "vrh", 2, None, "zero", "all", quiet)
    assert point[point.condition == "vrh"].text.iloc[0] == before
    assert set(count(1, "decode", quiet).condition) == {"unmasked", "vrh", "random"}
    other = live.sweeping(second, {"scenes": samples}, {first.name: heads, second.name: scores(second)}, samples)
    assert len(other(first.name, "scenes", "vrh", 1, None, "zero", "all", quiet)) == 4
    assert second.model is not None, "what the notebook holds is not taken from it"


def test_a_reply_may_be_as_long_as_the_samples_say(vlm):
    samples = grounding("scenes", "test", 1)
    short = Samples(samples.benchmark, samples.split, list(samples), max_new_tokens=3)
    nobody, one = HeadSet((), vlm.grid, "none"), live.Live(vlm)
    long, cut = (one.without(several)(samples[0].id, nobody) for several in (samples, short))
    assert long["outcome"] != "cut off" == cut["outcome"] and long["text"].startswith(cut["text"])
