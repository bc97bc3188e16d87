"""Heads that are known to look at something, planted in a model, and what each method makes of them.

A trained model would not say which heads *should* be found, so here every head is written by hand: hooks replace what
`q_proj` and `k_proj` give (`q_norm` and `k_norm` where a class has them), and rotary embedding is switched off. A key
says which of eight kinds of token it is, a query how much attention each kind gets. So every head attends exactly as
its recipe says, and all that follows (rows, tokens of the referent, pooling, storage, ranking) is the library's own.
Where rows and tokens stand is read from the ids that the model is given.
"""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests import tiny
from vrhlib import scoring
from vrhlib.boxes import Box
from vrhlib.design_space import VRH, SampleScores, Scoring
from vrhlib.heads import Head
from vrhlib.methods import METHODS, flips
from vrhlib.samples import Sample, Samples
from vrhlib.scoring import score_samples
from vrhlib.vlm import VLM
from vrhlib.wiring import load_vlm

Recipe = dict[str, dict[str, float]]  # rows to the mass on kinds (or groups) of tokens; the sink gets the rest
Planted = Callable[[int, bool], Recipe]  # of a sample's number, and whether the model answers it right

LAYERS, HEADS = 5, 8
PICTURE = ("point", "core", "rim", "corner", "other corner", "elsewhere")  # kinds of image tokens
LETTERS = tuple(f"letter {i}" for i in range(6))  # of the needle
KINDS = {"picture": ("sink", "text", *PICTURE), "context": ("sink", "text", *LETTERS)}
GROUPS = {"referent": PICTURE[:3], "centre": PICTURE[:2], "picture": PICTURE, "corners": PICTURE[3:5],
          "needle": LETTERS}  # fmt: skip
NEVER = -200.0  # a logit whose softmax is exactly 0


def looks(rows: str, only: bool | None = None, **masses: float) -> Planted:
    """A head with the same recipe for all its rows; `only` in samples that are answered right (True) or wrong."""
    recipe = {row: masses for row in rows.split(", ")}
    return lambda s, right: recipe if only in (None, right) else {}


def wavering(group: int) -> Planted:
    """Sees one corner of the picture from the expression in a third of the samples, and two in the others."""
    return lambda s, right: {"expression": {"corner" if s % 3 == group % 3 else "corners": 0.5}}


SEEING = {
    "retriever": looks("output", referent=0.65, elsewhere=0.05),
    "late": looks("emitted", point=0.6, elsewhere=0.05),
    "listener": looks("expression", referent=0.7, elsewhere=0.05),
    "habitual": looks("expression, null expression", referent=0.8, elsewhere=0.05),  # whatever is asked
    "ender": looks("expression last", referent=0.85, corners=0.1),  # three parts
    "asker": looks("asking", referent=0.5, elsewhere=0.05),
    "both": looks("expression, output", referent=0.6, elsewhere=0.05),
    "gazer": looks("last", centre=0.75, elsewhere=0.05),
    "grazer": looks("last", rim=0.9, elsewhere=0.05),
    "faint": looks("output", point=0.01),
    "surveyor": looks("output", picture=0.95),
    "spotter": looks("all", corner=0.9),
    "glancer": looks("all", corner=0.005),  # as concentrated as the spotter, but hardly there
    "sunk": looks("output", point=0.35, elsewhere=0.05),  # most of it on the sink
    "pointer": looks("output", point=0.45, elsewhere=0.05, corners=0.25),  # more than on any other token
    "careful": looks("output", only=True, referent=0.75, elsewhere=0.05),
    "hapless": looks("output", only=False, point=0.5, elsewhere=0.05),
    "forced": looks("forced", referent=0.9, elsewhere=0.05),
} | {f"wavering {i}": wavering(i) for i in range(15)}  # fmt: skip
READING = {
    "copier": lambda s, right: {f"output {t}": {f"letter {t}": 0.8} for t in range(6)},
    "shifted": lambda s, right: {f"output {t}": {f"letter {(t + 1) % 6}": 0.9} for t in range(6)},
    "parrot": looks("output", **{"letter 0": 0.95}),
    "asker": looks("asking", needle=0.5),
    "habitual": looks("asking, null asking", needle=0.8),
}
DULL = {"picture": {"all": {"corners": 0.02}}, "context": {}}  # all other heads, and these in all other rows
PLACES = [Head(*divmod(int(i), HEADS)) for i in np.random.default_rng(5).permutation(LAYERS * HEADS)]


# ---------------------------------------------------------------- samples and scripted replies


def scenes() -> Samples:
    """Six pictures whose box covers some cells and cuts others; the last is answered wrong."""
    made = []
    for i, (x, y) in enumerate(((50, 50), (50, 50), (60, 45), (50, 55), (70, 50), (60, 50))):
        image, box = tiny.samples((196, 140))[0].image.copy(), Box(x, y, x + 70, y + 45)
        made.append(Sample(f"s{i}", image, f"picture {i}", ["red dot", "a cup", "big bird", "it"][i % 4], box))
    return Samples("scenes", "detect", made)


def signs() -> Samples:
    """The same pictures with a word to read in the box; the last is answered wrong."""
    words = ("wolf", "harbour", "tea", "moon", "rope", "lamp")
    made = [
        Sample(s.id, s.image, s.image_key, "which word is it", s.box, answer=w, choices=words, task="answer")
        for s, w in zip(scenes(), words)
    ]
    return Samples("signs", "detect", made)


def needles() -> Samples:
    """Four texts with six letters to copy; the last is copied in reverse."""
    made = []
    for i in range(4):
        before, code = "some text " * (i + 1), f"{i}h7Kx2"
        at, context = len(before), f"{before}{code} and more text"
        made.append(Sample(f"n{i}", None, context, "say the code", answer=code, choices=(code,), task="answer",
                           context=context, span=(at, at + len(code))))  # fmt: skip
    return Samples("needles", "detect", made)


def written(vlm: VLM, sample: Sample, right: bool, resized) -> str:
    """What the model is made to reply."""
    if sample.answer is None:
        width, height = sample.image.size
        return vlm.write_box(sample.box if right else Box(0, 0, width / 9, height / 9), sample.image.size, resized)
    return sample.answer if right else sample.answer[::-1]


# ---------------------------------------------------------------- where tokens and rows stand


def find(ids: list[int], part: list[int], start: int = 0) -> int:
    return next(i for i in range(start, len(ids)) if ids[i : i + len(part)] == part)


def kinds_of_tokens(vlm: VLM, sample: Sample, grid, ids: list[int], first: int) -> np.ndarray:
    """The kind of every column, as an index into `KINDS`."""
    names = KINDS["picture" if sample.image is not None else "context"]
    kinds = np.full(len(ids), names.index("text"))
    kinds[first] = names.index("sink")
    if sample.image is None:
        at = find(ids, vlm.tokenizer(sample.answer)["input_ids"])
        kinds[at : at + 6] = [names.index(letter) for letter in LETTERS]
        return kinds
    columns = [i for i, token in enumerate(ids) if token == vlm.model.config.image_token_id]
    for column, (x0, y0, x1, y1) in zip(columns, grid.cells.tolist(), strict=True):
        near = x0 < sample.box.x1 and sample.box.x0 < x1 and y0 < sample.box.y1 and sample.box.y0 < y1
        inside = sample.box.x0 <= (x0 + x1) / 2 < sample.box.x1 and sample.box.y0 <= (y0 + y1) / 2 < sample.box.y1
        kinds[column] = names.index("core" if inside else "rim" if near else "elsewhere")
    kinds[kinds.tolist().index(names.index("core"))] = names.index("point")
    for corner, place in (("corner", (0, 0)), ("other corner", (-1, -1))):
        assert kinds[columns[grid.order[place]]] == names.index("elsewhere")
        kinds[columns[grid.order[place]]] = names.index(corner)
    assert set(kinds) == set(range(8))
    return kinds


def rows_by_name(vlm: VLM, sample: Sample, ids: list[int], said: str) -> dict[str, np.ndarray]:
    """Query rows: prompt, then reply, then the right answer, then what differs in a prompt that asks for N/A."""

    def tokens(text: str) -> list[int]:
        return vlm.tokenizer(text)["input_ids"]

    asked, header, reply = tokens(sample.text), tokens("<|im_start|>assistant\n"), tokens(said)
    start, end = find(ids, asked), find(ids, header) + len(header)
    after = end + len(reply)
    assert ids[end:after] == reply
    null, stop = find(ids, tokens("N/A"), after), find(ids, header, after) + len(header)
    one_by_one = {f"output {t}": np.array([end - 1 + t]) for t in range(len(reply))}
    return one_by_one | {
        "all": np.arange(len(ids)), "output": np.arange(end - 1, after - 1), "emitted": np.arange(end, after),
        "expression": np.arange(start, start + len(asked)), "asking": np.arange(start, end),
        "expression last": np.array([start + len(asked) - 1]), "last": np.array([end - 1]),
        "forced": np.arange(after, null - 1), "null expression": np.arange(null, null + 3),
        "null asking": np.arange(null, stop),
    }  # fmt: skip


def logits(recipe: Recipe, rows: dict[str, np.ndarray], counts: dict[str, int]) -> np.ndarray:
    """Of one head, [T, 8]: what softmax turns into the recipe's masses; `counts` are the tokens of each kind."""
    out = np.full((len(rows["all"]), 8), NEVER)
    for name, masses in recipe.items():
        mass = dict.fromkeys(counts, 0.0) | {"sink": 1 - sum(masses.values())}
        for group, total in masses.items():
            members = GROUPS.get(group, (group,))
            for kind in members:
                mass[kind] += total * counts[kind] / sum(counts[m] for m in members)
        out[rows[name]] = [np.log(m / counts[kind]) if m else NEVER for kind, m in mass.items()]
    return out


# ---------------------------------------------------------------- planting


def planted(vlm: VLM, samples: Samples, recipes: dict[str, Planted], ids: torch.Tensor) -> tuple:
    """Queries [layers, B, T, heads, 8] (as logits) and keys [B, T, 8] (one-hot kinds) of a pass over all samples."""
    (together,) = samples.batches(len(samples))  # in the order in which they share a batch
    batch, pad, place_of = vlm.prepare(together), vlm.tokenizer.pad_token_id, {s.id: i for i, s in enumerate(samples)}
    queries, keys = np.zeros((LAYERS, len(samples), ids.shape[1], HEADS, 8)), np.zeros((*ids.shape, 8))
    for b, (sample, own) in enumerate(zip(together, ids.tolist())):
        i = place_of[sample.id]
        right = i < len(samples) - 1
        rows = rows_by_name(vlm, sample, own, written(vlm, sample, right, batch.resized[b]))
        first = next(i for i, token in enumerate(own) if token != pad)
        kinds = kinds_of_tokens(vlm, sample, batch.grids[b], own, first)
        source = "picture" if sample.image is not None else "context"
        counts = {name: int((kinds == i).sum()) for i, name in enumerate(KINDS[source])}
        keys[b, np.arange(len(own)), kinds] = 1
        dull = logits({"all": {}} | DULL[source], rows, counts)
        queries[:, b] = dull[:, None]
        for place, recipe in zip(PLACES, recipes.values()):
            every = {"all": {}} | DULL[source] | recipe(i, right)
            queries[place.layer, b, :, place.head] = logits(every, rows, counts)
    return torch.from_numpy(queries).float(), torch.from_numpy(keys).float()


@contextlib.contextmanager
def planting(vlm: VLM, samples: Samples, recipes: dict[str, Planted]):
    """All heads attend as their recipes say, in passes over these samples in one batch."""
    now: dict = {}

    def begin(module, args, kwargs):
        now["queries"], now["keys"] = planted(vlm, samples, recipes, kwargs["input_ids"])

    def still(module, args, out):
        return torch.ones_like(out[0]), torch.zeros_like(out[1])

    def replaced(which: str, layer: int, scaling: float):
        def hook(module, args, out):
            new = out.reshape(*out.shape[:2], -1, vlm.layers[layer].self_attn.head_dim) * 0
            new[..., :8] = now["queries"][layer] / scaling if which == "q" else now["keys"][:, :, None]
            return new.reshape(out.shape)

        return hook

    with contextlib.ExitStack() as stack:
        stack.callback(vlm.model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        stack.callback(vlm.model.model.language_model.rotary_emb.register_forward_hook(still).remove)
        for i, layer in enumerate(vlm.layers):
            for which in "qk":
                own = layer.self_attn
                module = getattr(own, f"{which}_norm", None) or getattr(own, f"{which}_proj")
                stack.callback(module.register_forward_hook(replaced(which, i, own.scaling)).remove)
        yield


def scored(vlm: VLM, samples: Samples, recipes: dict[str, Planted], monkeypatch) -> SampleScores:
    """The samples scored with planted heads and scripted replies, all but the last of them right."""

    def generate(vlm, batch, max_new_tokens):
        replies = [written(vlm, s, s is not samples[-1], r) for s, r in zip(batch.samples, batch.resized)]
        ids = [[*vlm.tokenizer(text)["input_ids"], vlm.tokenizer.eos_token_id] for text in replies]
        longest = max(map(len, ids))
        return np.array([[row + [-1] * (longest - len(row))] for row in ids])

    monkeypatch.setattr(scoring, "generate", generate)
    with planting(vlm, samples, recipes):
        return score_samples(vlm, samples, batch_size=len(samples))


@pytest.fixture(scope="module", params=("qwen2.5-vl", "internvl3", "internvl3.5", "qwen3-vl"))
def captured(request, tmp_path_factory):
    """Kind of data to scores of a model of each class, computed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring.store, "ROOT", tmp_path_factory.mktemp("root"))
        folder = tiny.write(request.param, tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)
        vlm = load_vlm(folder, device="cpu")
        sets = {"scenes": (scenes(), SEEING), "signs": (signs(), SEEING), "needles": (needles(), READING)}
        return {name: scored(vlm, samples, recipes, patch) for name, (samples, recipes) in sets.items()}


# ---------------------------------------------------------------- each method finds its own


BY_METHOD = {  # method: kind of data, the head that it must find, and that head's score
    "vrh": ("scenes", "retriever", 0.65),
    "retrieval_heads": ("needles", "copier", 1.0),
    "qrhead": ("needles", "asker", None),
    "ocr_heads": ("signs", "late", 1.0),
    "ocr_heads_aligned": ("signs", "pointer", 1.0),
    "vera": ("signs", "faint", 1.0),
    "gaze_heads": ("scenes", "gazer", 0.75),
    "mmret_heads": ("scenes", "listener", 0.7),
    "sparsemm": ("signs", "pointer", None),
}
BY_POINT = {  # point: the same, where the next method, or one choice less, finds another head
    METHODS["retrieval_heads"].on_grounding: ("scenes", "pointer", 1.0),
    METHODS["qrhead"].scoring: ("scenes", "asker", None),
    flips(5)["flip_q"]: ("scenes", "habitual", 0.8),
    flips(5)["flip_phi"]: ("scenes", "pointer", 1.0),
    flips(5)["q_union"]: ("scenes", "both", 0.6),
    Scoring("output_emitted", "sum"): ("signs", "late", 0.6),
    Scoring("forced_output", "sum"): ("scenes", "forced", None),
    Scoring("prompt_last", "sum"): ("scenes", "grazer", 0.9),
    Scoring("expression_last", "sum"): ("scenes", "ender", 0.85),
    Scoring("output", "image_mass"): ("scenes", "surveyor", 0.95),
    Scoring("output", "max"): ("scenes", "late", None),
    Scoring("output", "sum", "mean_success"): ("scenes", "careful", 0.75),
    Scoring("output", "sum", "median"): ("scenes", "careful", 0.75),
    Scoring("output", "sum", "mean"): ("needles", "parrot", 0.95),
    Scoring("prompt", "sum"): ("needles", "habitual", None),
}
RECIPES = {"scenes": SEEING, "signs": SEEING, "needles": READING}


def of(captured: dict, data: str, scoring: Scoring) -> dict[str, float]:
    """Score by planted head, and the best of all the others as "dull"."""
    values = captured[data].score(scoring).values.copy()
    found = {}
    for name, place in zip(RECIPES[data], PLACES):
        found[name], values[place.layer, place.head] = values[place.layer, place.head], -np.inf
    return found | {"dull": values.max()}


def finds(captured: dict, scoring: Scoring, data: str, head: str, value: float | None) -> None:
    found = of(captured, data, scoring)
    first, second = sorted(found, key=found.get, reverse=True)[:2]
    assert first == head and found[first] > found[second] + 0.01, (first, second, found)
    assert captured[data].score(scoring).top(1).heads == (PLACES[[*RECIPES[data]].index(head)],)
    assert value is None or found[head] == pytest.approx(value, abs=1e-5)


def test_every_method_is_tried():
    assert set(BY_METHOD) == set(METHODS) - {"localization_heads"}


@pytest.mark.parametrize("name", BY_METHOD)
def test_a_method_ranks_its_head_first(captured, name):
    finds(captured, METHODS[name].scoring, *BY_METHOD[name])


@pytest.mark.parametrize("point", BY_POINT, ids=str)
def test_a_point_ranks_its_head_first(captured, point):
    finds(captured, point, *BY_POINT[point])


def test_localization_heads_finds_all_heads_with_one_spot_and_cannot_tell_the_referent(captured):
    point = METHODS["localization_heads"].scoring
    found = of(captured, "scenes", point)
    one_spot = {"listener", "habitual", "asker", "both", "spotter"}
    assert {name for name, value in found.items() if value == 1} == one_spot
    assert [found[f"wavering {i}"] for i in range(15)] == pytest.approx([1 / 3] * 15)
    assert found["dull"] <= 0 and found["surveyor"] <= 0 and found["glancer"] < 0, "these do not look"
    assert of(captured, "scenes", VRH)["spotter"] == 0


# ---------------------------------------------------------------- and what it makes of the others


def test_one_row_late_costs_one_row_of_the_reply(captured):
    words = [len(reply) for reply in captured["signs"].replies]
    missed = np.mean([(n - 1) / n for n in words])
    predicting, emitted = (of(captured, "signs", Scoring(q, "sum")) for q in ("output", "output_emitted"))
    assert predicting["retriever"] == pytest.approx(0.65, abs=1e-5)
    assert emitted["retriever"] == pytest.approx(0.65 * missed, abs=1e-5)
    assert emitted["late"] == pytest.approx(0.6, abs=1e-5)
    assert predicting["late"] == pytest.approx(0.6 * missed, abs=1e-5)
    in_prompt = of(captured, "signs", Scoring("prompt_last", "sum"))
    assert in_prompt["late"] == 0 and in_prompt["retriever"] == pytest.approx(0.65, abs=1e-5)


def test_heads_that_look_from_the_prompt_are_nothing_to_vrh_and_the_other_way_round(captured):
    output, expression = (of(captured, "scenes", Scoring(q, "sum")) for q in ("output", "expression"))
    assert output["listener"] == output["habitual"] == expression["retriever"] == expression["late"] == 0
    assert output["forced"] == 0 < of(captured, "scenes", Scoring("forced_output", "sum"))["forced"]


def test_calibration_takes_away_who_looks_whatever_is_asked(captured):
    for data in ("scenes", "needles"):
        plain, against_null = (of(captured, data, Scoring("expression", k)) for k in ("sum", "sum_calibrated"))
        assert plain["habitual"] == pytest.approx(0.8, abs=1e-5)
        assert against_null["habitual"] == pytest.approx(0, abs=1e-5)
        assert plain["asker"] == pytest.approx(0.5, abs=1e-5) == against_null["asker"]


def test_an_even_gaze_is_worth_the_area_of_the_referent(captured):
    sizes = captured["scenes"].sizes
    area = np.mean(sizes["any"] / sizes["none"])
    assert of(captured, "scenes", VRH)["surveyor"] == pytest.approx(0.95 * area, abs=1e-5)
    assert of(captured, "scenes", Scoring("output", "share"))["surveyor"] == pytest.approx(area, abs=1e-5)
    assert of(captured, "scenes", Scoring("output", "lift"))["surveyor"] == pytest.approx(1, abs=1e-5)


def test_a_share_has_no_floor_and_a_sum_has(captured):
    """A head with a hundredth of its attention on the picture, all of it on the referent."""
    share, mass = (of(captured, "scenes", Scoring("prompt_last", k)) for k in ("share", "sum"))
    assert max(share, key=share.get) == "faint" and share["faint"] == pytest.approx(1, abs=1e-5)
    assert mass["faint"] == pytest.approx(0.01, abs=1e-5) and mass["faint"] < mass["surveyor"]


def test_a_sink_hides_a_head_from_argmax_but_not_from_argmax_among_the_picture(captured):
    every, visual = (of(captured, "scenes", Scoring("output", k)) for k in ("argmax", "argmax_visual"))
    assert every["sunk"] == every["retriever"] == every["spotter"] == visual["spotter"] == 0
    assert visual["sunk"] == visual["retriever"] == every["pointer"] == 1


def test_a_head_at_the_rim_is_in_the_referent_or_not_by_the_rule_for_cells(captured):
    by = {e: of(captured, "scenes", Scoring("prompt_last", "sum", evidence=e)) for e in ("any", "centre")}
    assert by["any"]["grazer"] == pytest.approx(0.9, abs=1e-5) and by["centre"]["grazer"] == 0
    assert by["any"]["gazer"] == pytest.approx(by["centre"]["gazer"], abs=1e-6)


def test_a_frequency_asks_how_often_and_a_mean_how_much(captured):
    mean, often = (of(captured, "scenes", Scoring("output", "sum", s)) for s in ("mean", "frequency"))
    assert mean["careful"] > mean["both"] > mean["late"]
    assert often["careful"] == pytest.approx(5 / 6) and often["late"] == often["both"] == often["retriever"] == 1


def test_only_right_answers_count_for_a_mean_over_successes(captured):
    every, right = (of(captured, "scenes", Scoring("output", "argmax", s)) for s in ("mean", "mean_success"))
    assert every["hapless"] == pytest.approx(1 / 6) and right["hapless"] == 0
    assert of(captured, "needles", Scoring("output", "copy", "mean"))["copier"] == pytest.approx(3 / 4)


def test_looking_at_the_needle_is_not_copying_it(captured):
    looked, copied = (of(captured, "needles", Scoring("output", k, "mean_success")) for k in ("argmax", "copy"))
    assert looked["copier"] == looked["shifted"] == looked["parrot"] == 1
    assert copied["copier"] == 1 and copied["parrot"] == pytest.approx(1 / 6)  # the same letter again and again
    assert copied["shifted"] < 0.1 and copied["asker"] == 0
