"""Head scores against brute-force loops over eager attention, one unpadded sample at a time."""

import base64
import contextlib
import dataclasses
import itertools
import json
import math
import zlib
from functools import cached_property

import numpy as np
import pandas as pd
import pytest
import torch

from tests import tiny
from tests.test_design_space import flood
from vrhlib import boxes, scoring, store
from vrhlib.attention import generate
from vrhlib.boxes import Box
from vrhlib.design_space import KEYS, ONE_SEEDS, QUERIES, VRH, SampleScores, Scoring, pool
from vrhlib.heads import Head, HeadSet
from vrhlib.samples import Sample, Samples
from vrhlib.scoring import capture_cost, close_up, detect, score_samples, stability, stored

pytestmark = pytest.mark.usefixtures("root")
LAYERS, HEADS = 3, 8
SIZES = (180, 120), (70, 150), (130, 70), (64, 90), (150, 80)
BOXES = ("any", "centre", "overlap(0.5)", "box_share(0.001)", "soft")


@pytest.fixture
def samples() -> Samples:
    return Samples("noise", "detect", tiny.samples(*SIZES))


@contextlib.contextmanager
def passes(vlm):
    """A list that grows by (batch rows, query rows) with every pass through the text model."""
    seen = []
    handle = vlm.layers[0].self_attn.q_proj.register_forward_hook(lambda m, a, out: seen.append(out.shape[:2]))
    try:
        yield seen
    finally:
        handle.remove()


# ---------------------------------------------------------------- samples and replies


def diamond(sample: Sample) -> np.ndarray:
    """A mask inside the box of a sample that leaves out its corners."""
    width, height = sample.image.size
    y, x = np.mgrid[:height, :width] + 0.5
    x0, y0, x1, y1 = sample.box
    return abs(x - (x0 + x1) / 2) / (x1 - x0) + abs(y - (y0 + y1) / 2) / (y1 - y0) < 0.3


def masked(found: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(s, mask=diamond(s)) for s in found]


def questions(n: int = 3) -> list[Sample]:
    """Pictures with a question whose answer is a word, and the box of the thing it is about."""
    words = ["red", "seven", "a dog"]
    return [dataclasses.replace(s, text=f"what is {s.text}?", task="answer", answer=words[i % 3], rule="count")
            for i, s in enumerate(tiny.samples(*SIZES[:n]))]  # fmt: skip


def needles(n: int = 3) -> list[Sample]:
    """Texts of different lengths, half of which is the span that holds the answer."""
    made = []
    for i in range(n):
        context = "Once upon a time. " * i + "The secret number of the keeper is 4711 and not 42. Nobody knew."
        start = context.index("secret")
        made.append(Sample(f"text-{i}", None, f"text {i}", "What is it?" + " Say." * i, answer="4711", task="answer",
                           rule="count", context=context, span=(start, start + 40)))  # fmt: skip
    return made


def in_words(vlm, segments) -> list[int]:
    """Token ids of a reply that is told in pieces; the tiny tokenizers never merge letters."""
    return [i for piece in segments for i in vlm.tokenizer(piece, add_special_tokens=False)["input_ids"]]


def writes(vlm, numbers=("12", "3", "456", "78")) -> tuple[str, ...]:
    """A box as the family writes it, in pieces; every second piece is a number of it."""
    a, b, c, d = numbers
    first, last = ('{"label": "3", "bbox_2d":[', "]} 5") if vlm.family.style == "bbox_2d" else ("<box>[[", "]]</box> 5")
    return (first, a, ",", b, ",", c, ",", d, last)


def says(monkeypatch, vlm, told: dict[str, list[int]]) -> None:
    """The model's replies to some samples (by id) become these tokens; it replies to the others as ever."""
    stop = min(vlm.stop_ids)

    def replies(vlm, batch, max_new_tokens):
        own = generate(vlm, batch, max_new_tokens=max_new_tokens)[:, 0]
        lists = [[*told[s.id], stop] if s.id in told else row.tolist() for s, row in zip(batch.samples, own)]
        out = np.full((len(batch), 1, max(map(len, lists))), -1)
        for b, row in enumerate(lists):
            out[b, 0, : len(row)] = row
        return out

    monkeypatch.setattr(scoring, "generate", replies)


def greedy(vlm, sample: Sample) -> list[int]:
    batch = vlm.prepare([sample])
    ids = vlm.model.generate(**batch.tensors, do_sample=False, max_new_tokens=vlm.max_new_tokens)[0, batch.length :]
    return [i for i in ids.tolist() if i not in vlm.stop_ids]


# ---------------------------------------------------------------- the oracle


def columns_of(ids: list[int], part: list[int], last: int) -> list[int]:
    """Where a run of tokens last stands at or before a column."""
    start = max(i for i in range(last - len(part) + 2) if ids[i : i + len(part)] == part)
    return list(range(start, start + len(part)))


class ByHand:
    """One sample alone, without padding: where its rows and keys stand, and all attention, from three ordinary passes
    (prompt and reply, prompt and right answer, null prompt). `spelled`: tokens of the reply that spell the answer."""

    def __init__(self, vlm, sample: Sample, reply: list[int] | None = None, spelled: list[int] = ()):
        self.vlm, self.sample, self.spelled = vlm, sample, list(spelled)
        self.reply = greedy(vlm, sample) if reply is None else reply
        self.batch = vlm.prepare([sample])
        self.null = vlm.prepare([dataclasses.replace(sample, text="N/A")])
        self.seen: dict[tuple, dict] = {}
        answer = sample.answer or vlm.write_box(sample.box, sample.image.size, self.batch.resized[0])
        self.right = in_words(vlm, [answer])
        self.P = self.batch.length
        self.ids = self.batch.tensors["input_ids"][0].tolist()
        self.said, self.null_said = self._expression(self.batch, sample.text), self._expression(self.null, "N/A")

    @cached_property
    def A(self) -> dict[str, np.ndarray]:
        """float64 [layers, heads, T, T] of each pass."""
        passes = {"own": (self.batch, self.reply), "right": (self.batch, self.right), "null": (self.null, [])}
        return {name: attention(self.vlm, *of) for name, of in passes.items()}

    @cached_property
    def V(self) -> list[int]:
        if self.sample.image is not None:
            return [i for i, t in enumerate(self.ids) if t == self.vlm.model.config.image_token_id]
        return columns_of(self.ids, in_words(self.vlm, [self.sample.context]), self.P)

    @cached_property
    def cells(self) -> list[list[float]]:
        return self.batch.grids[0].cells.tolist()

    def _expression(self, batch, text: str) -> list[int]:
        """The question is found as a whole, since a short expression stands in many places."""
        before, after = self.vlm.asks(self.sample.task).split("{expression}")
        ids, whole = batch.tensors["input_ids"][0].tolist(), in_words(self.vlm, [before, text, after])
        start = len(in_words(self.vlm, [before]))
        return columns_of(ids, whole, len(ids))[start : start + len(in_words(self.vlm, [text]))]

    def rows(self, queries: str) -> list[tuple[str, int]]:
        """(pass, row) of each query."""
        P, N, said = self.P, len(self.reply), self.said
        rows = {
            "output": [("own", P - 1 + t) for t in range(N)],
            "output_emitted": [("own", P + t) for t in range(N)],
            "output_answer": [("own", P - 1 + t) for t in self.spelled],
            "output_answer_emitted": [("own", P + t) for t in self.spelled],
            "prompt_last": [("own", P - 1)],
            "expression": [("own", r) for r in said],
            "expression_last": [("own", said[-1])],
            "prompt": [("own", r) for r in range(self.V[-1] + 1, P)],
            "forced_output": [("right", P - 1 + t) for t in range(len(self.right))],
        }
        if queries == "expression_and_output":
            return [("own", r) for r in [*said, *range(P - 1, P - 1 + N)]] if N else []
        return rows[queries]

    def null_rows(self, queries: str) -> list[tuple[str, int]]:
        P, said = self.null.length, self.null_said
        rows = {"prompt_last": [P - 1], "expression": said, "expression_last": said[-1:],
                "prompt": range(self.V[-1] + 1, P)}  # fmt: skip
        return [("null", r) for r in rows[queries]]

    @cached_property
    def K(self) -> dict[str, dict[int, float]]:
        """Columns of the referent's tokens and their weights, by evidence."""
        if self.sample.image is None:
            return {"any": {self.V[i]: 1.0 for i in range(*self.sample.span)}}  # letters are tokens
        names = BOXES if self.sample.mask is None else (*BOXES, "mask")
        return {name: self.near(name) for name in (names if self.sample.box else ())}

    def near(self, evidence: str) -> dict[int, float]:
        box, (word, _, number) = self.sample.box, evidence.partition("(")
        t = float(number[:-1]) if number else 0.0
        shared, near = [], []
        for x0, y0, x1, y1 in self.cells:
            width, height = min(x1, box.x1) - max(x0, box.x0), min(y1, box.y1) - max(y0, box.y0)
            area = max(0, width) * max(0, height)
            shared.append(area)
            near.append({
                "any": area > 0, "soft": area / ((x1 - x0) * (y1 - y0)),
                "centre": box.x0 <= (x0 + x1) / 2 < box.x1 and box.y0 <= (y0 + y1) / 2 < box.y1,
                "overlap": area > 0 and area / ((x1 - x0) * (y1 - y0)) >= t,
                "box_share": area > 0 and area / ((box.x1 - box.x0) * (box.y1 - box.y0)) >= t,
                "mask": word == "mask" and self.touches(x0, y0, x1, y1),
            }[word])  # fmt: skip
        if not any(near):
            near = [s == max(shared) for s in shared]
        return {column: float(w) for column, w in zip(self.V, near) if w}

    def touches(self, x0, y0, x1, y1) -> bool:
        """Whether a pixel of the mask lies, in part at least, in a cell."""
        ys, xs = np.nonzero(self.sample.mask)
        return bool(((xs < x1) & (xs + 1 > x0) & (ys < y1) & (ys + 1 > y0)).any())

    def theta(self, queries: str, keys: str, evidence: str = "any") -> np.ndarray:
        """Eq. 1 for one sample, [layers, heads]; NaN if it has no such row."""
        if keys == "sum_calibrated":
            return self.mean(self.rows(queries), "sum", evidence) - self.mean(self.null_rows(queries), "sum", evidence)
        return self.copied(queries) if keys == "copy" else self.mean(self.rows(queries), keys, evidence)

    def mean(self, rows: list, keys: str, evidence: str = "any") -> np.ndarray:
        out = [np.full((LAYERS, HEADS), np.nan)] * (not rows)
        for which, row in rows:
            if (which, row) not in self.seen:
                self.seen[which, row] = self.heads(which, row)
            one = self.seen[which, row]
            out.append(self.compact(which, row) if keys == "spatial_entropy" else one[keys, evidence])
        return sum(out) / len(out)

    def heads(self, which: str, row: int) -> dict[tuple[str, str], np.ndarray]:
        """Every key aggregation of one attention row, by (keys, evidence), [layers, heads] each."""
        found = {}
        for i, h in np.ndindex(LAYERS, HEADS):
            for name, value in self.phi(self.A[which][i, h, row].tolist()).items():
                found.setdefault(name, np.zeros((LAYERS, HEADS)))[i, h] = value
        return found

    def compact(self, which: str, row: int) -> np.ndarray:
        entropy = [[self.entropy(a.tolist()) for a in of] for of in self.A[which][:, :, row]]
        return -np.array(entropy)

    def phi(self, a: list[float]) -> dict[tuple[str, str], float]:
        """Every key aggregation of one head's row, by its formula."""
        V, best, visual = self.V, max(range(len(a)), key=a.__getitem__), max(self.V, key=a.__getitem__)
        whole = sum(a[k] for k in V)
        found = {("image_mass", "none"): whole}
        for e, K in self.K.items():
            mass, size, hit = sum(w * a[k] for k, w in K.items()), sum(K.values()), best in K
            share = mass / (whole + 1e-9)
            here = {"sum": mass, "mean": mass / size, "share": share, "lift": share / (size / len(V)), "argmax": hit,
                    "hit_inverse": hit / size, "argmax_visual": visual in K, "max": max(a[k] for k in K)}  # fmt: skip
            found |= {(keys, e): value for keys, value in here.items()}
        return found

    def copied(self, queries: str) -> np.ndarray:
        """Distinct tokens of K that a head saw most while the same token was written, over |K|."""
        written, K = self.reply if queries == "output" else self.right, self.K["any"]
        out = np.full((LAYERS, HEADS), np.nan)
        for i, h in np.ndindex(LAYERS, HEADS) if written else ():
            seen = set()
            for t, (which, row) in enumerate(self.rows(queries)):
                best = int(np.argmax(self.A[which][i, h, row]))
                if best in K and self.ids[best] == written[t]:
                    seen.add(best)
            out[i, h] = len(seen) / len(K)
        return out

    def entropy(self, a: list[float]) -> float:
        """Of the areas of the 8-connected parts of the map above its mean; a thumbnail is not part of the map."""
        grid = self.batch.grids[0]
        cells = self.cells[: grid.rows * grid.cols]
        across, down = sorted({c[0] for c in cells}), sorted({c[1] for c in cells})
        values = {(down.index(c[1]), across.index(c[0])): a[column] for c, column in zip(cells, self.V)}
        mean = sum(values.values()) / len(values)
        areas = flood({place for place, v in values.items() if v > mean})
        return -sum(n / sum(areas) * math.log(n / sum(areas)) for n in areas)


@torch.no_grad()
def attention(vlm, batch, more: list[int]) -> np.ndarray:
    """All attention of an unpadded prompt and the tokens after it, float64 [layers, heads, T, T]."""
    added = {"input_ids": more, "attention_mask": [1] * len(more), "mm_token_type_ids": [0] * len(more)}
    inputs = {k: torch.cat([v, torch.tensor([added[k]], dtype=v.dtype)], 1) if k in added else v
              for k, v in batch.tensors.items()}  # fmt: skip
    vlm.model.set_attn_implementation({"text_config": "eager"})
    try:
        return torch.cat(vlm.model(**inputs, output_attentions=True).attentions).double().numpy()
    finally:
        vlm.model.set_attn_implementation({"text_config": "sdpa"})


def check(captured: SampleScores, known: list[ByHand]) -> None:
    """Every point that can be read off, of every sample, is what the loops give."""
    for s, alone in enumerate(known):
        for point in captured.points():
            if not point[0].startswith("output_one"):
                got, want = captured.theta(*point)[s], alone.theta(*point)
                np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4, err_msg=f"sample {s}, {point}")


def expected_points(evidence: tuple[str, ...], text: bool) -> set:
    """All that the design space allows; one output token is kept for the sum and the argmax over any overlap only."""
    found = set()
    for q, k, e in itertools.product(QUERIES, KEYS, (*evidence, "none")):
        with contextlib.suppress(ValueError):
            Scoring(q, k, evidence=e)
            if (k != "copy" or text) and (k != "spatial_entropy" or not text) and q != "output_one":
                found.add((q, k, e))
    one = itertools.product(ONE_SEEDS, ("sum", "mean", "argmax", "hit_inverse"))
    return found | {(f"output_one({seed})", k, "any") for seed, k in one}


def test_every_point_on_pictures_equals_loops_over_eager_attention(vlm, monkeypatch):
    found = masked(tiny.samples(*SIZES[:3]))
    box, talk = in_words(vlm, writes(vlm)), in_words(vlm, ["at 10, 20"])
    says(monkeypatch, vlm, {"noise-0": box, "noise-1": talk})  # the third replies by itself
    captured = score_samples(vlm, Samples("noise", "detect", found), batch_size=2)
    lengths = [len(in_words(vlm, [piece])) for piece in writes(vlm)]
    spelled = [t for p in (1, 3, 5, 7) for t in range(sum(lengths[:p]), sum(lengths[: p + 1]))]
    assert vlm.tokenizer.decode([box[t] for t in spelled]) == "12345678"
    known = [ByHand(vlm, found[0], box, spelled), ByHand(vlm, found[1], talk), ByHand(vlm, found[2])]
    check(captured, known)
    assert set(captured.points()) == expected_points((*BOXES, "mask"), text=False)
    assert "2 without output_answer;" in str(captured) and "2 without output_answer_emitted" in str(captured)
    sizes = {e: [sum(k.K[e].values()) for k in known] for e in (*BOXES, "mask")}
    for e, size in sizes.items():
        np.testing.assert_allclose(captured.sizes[e], size)
    assert captured.sizes["none"].tolist() == [len(k.V) for k in known]
    assert len({tuple(np.round(s, 6)) for s in sizes.values()}) > 3, "evidence differs here"


def test_every_point_on_texts_equals_loops_over_eager_attention(vlm, monkeypatch):
    found = needles()
    parrot = echo(vlm, found[0])
    said = in_words(vlm, ["It is ", "4711", ", I read."])
    says(monkeypatch, vlm, {"text-0": parrot, "text-1": said})
    captured = score_samples(vlm, Samples("needles", "detect", found), batch_size=2)
    spelled = list(range(6, 10))
    known = [ByHand(vlm, found[0], parrot), ByHand(vlm, found[1], said, spelled), ByHand(vlm, found[2])]
    check(captured, known)
    assert set(captured.points()) == expected_points(("any",), text=True)
    assert captured.right.tolist() == [False, True, False] and captured.sizes["any"].tolist() == [40] * 3
    copied = captured.theta("output", "copy")[0]
    assert copied.max() > 0, "the parrot says what heads look at, so some of them copy"
    assert ((copied * 40).round(6) % 1 == 0).all() and copied.max() < len(parrot) / 40, "each token once"


def echo(vlm, sample: Sample) -> list[int]:
    """A reply whose tokens are those that some head sees most in the span while they are predicted, one head a time."""
    batch, reply = vlm.prepare([sample]), []
    alone = ByHand(vlm, sample, [])
    inside, first = set(alone.K["any"]), None
    for _ in range(8):
        top = attention(vlm, batch, reply)[:, :, -1].argmax(-1).ravel().tolist()
        first = (
            first if first is not None and top[first] in inside else next(h for h, k in enumerate(top) if k in inside)
        )
        reply.append(alone.ids[top[first]])
    return reply


def test_every_point_on_questions_about_pictures_equals_loops_over_eager_attention(vlm, monkeypatch):
    found = questions()
    said, wrong = in_words(vlm, ["It is ", "RED", ", red."]), in_words(vlm, ["blue"])
    says(monkeypatch, vlm, {"noise-0": said, "noise-1": wrong})
    captured = score_samples(vlm, Samples("questions", "detect", found), batch_size=3)
    known = [ByHand(vlm, found[0], said, [6, 7, 8]), ByHand(vlm, found[1], wrong), ByHand(vlm, found[2])]
    check(captured, known)
    assert set(captured.points()) == expected_points(BOXES, text=False)
    assert [k.right for k in known] == [in_words(vlm, [w]) for w in ("red", "seven", "a dog")]


def test_pictures_of_one_shape_in_a_batch_keep_their_own_maps(vlm):
    """Maps of one shape are split into parts together, and have to come back to their samples."""
    found = tiny.samples((150, 110), (70, 150), (150, 110), (150, 110), (70, 150))
    got = score_samples(vlm, Samples("noise", "detect", found), batch_size=5)
    for queries in ("prompt_last", "expression_last"):
        values = got.theta(queries, "spatial_entropy", "none")
        for s, sample in enumerate(found):
            np.testing.assert_allclose(values[s], ByHand(vlm, sample, []).theta(queries, "spatial_entropy"), atol=1e-5)
        assert abs(values[0] - values[2]).max() > 0.1 and abs(values[1] - values[4]).max() > 0.1


def test_rows_that_predict_and_rows_of_the_emitted_tokens_differ(vlm, samples):
    got = score_samples(vlm, samples)
    for keys in ("sum", "argmax_visual", "share"):
        assert not np.allclose(got.theta("output", keys), got.theta("output_emitted", keys), atol=1e-3)
    first = got.theta("prompt_last", "sum") - got.theta("output", "sum")
    assert abs(first).max() > 1e-2 and abs(got.theta("forced_output", "sum") - got.theta("output", "sum")).max() > 1e-2


def test_a_sink_outside_the_picture_wins_the_argmax(vlm, samples):
    got = score_samples(vlm, samples)
    everywhere, visual = got.theta("output", "argmax"), got.theta("output", "argmax_visual")
    assert (everywhere <= visual + 1e-6).all() and (everywhere < visual - 0.1).any() and everywhere.any()
    alone = ByHand(vlm, samples[0])
    rows = alone.A["own"][:, :, [row for _, row in alone.rows("output")]].argmax(-1)
    assert (rows < alone.V[0]).any(), "some heads look at what stands before the picture"


def test_one_output_token_is_the_same_for_every_head_and_key_choice(vlm, samples):
    got, chosen = score_samples(vlm, samples), {seed: [] for seed in ONE_SEEDS}
    for (s, sample), seed in itertools.product(enumerate(samples), ONE_SEEDS):
        alone = ByHand(vlm, sample) if seed == 0 else alone  # noqa: F821
        each = [alone.mean([row], "sum") for row in alone.rows("output")]
        errors = [abs(got.theta(f"output_one({seed})", "sum")[s] - one).max() for one in each]
        t = int(np.argmin(errors))
        want = alone.mean([alone.rows("output")[t]], "argmax")
        np.testing.assert_allclose(got.theta(f"output_one({seed})", "argmax")[s], want, atol=1e-6)
        assert errors[t] < 1e-5
        chosen[seed].append(t)
    assert all(len(set(of)) > 1 for of in chosen.values()), "drawn anew for each sample"
    assert len({tuple(of) for of in chosen.values()}) == len(ONE_SEEDS), "and for each seed"


def test_scores_do_not_depend_on_the_batch_size(vlm, samples):
    one, many = score_samples(vlm, samples, batch_size=1), score_samples(vlm, samples, batch_size=8)
    for name in many.values:
        np.testing.assert_allclose(one.values[name], many.values[name], atol=1e-5)


def test_layer_and_head_are_not_swapped(vlm, samples):
    mean = score_samples(vlm, samples).theta("output", "sum").mean(0)
    assert detect(vlm, samples).top(1).heads[0] == Head(*np.unravel_index(mean.argmax(), mean.shape))
    assert mean.shape == vlm.grid == (LAYERS, HEADS)


def test_detect_reads_its_scores_off_the_captured_pass(vlm, samples):
    captured = score_samples(vlm, samples)
    with passes(vlm) as seen:
        for i, (q, k, e) in enumerate(captured.points()):
            if e not in ("any", "none") or q.startswith("output_answer"):
                continue  # these replies hold no answer
            how = ("mean", "frequency(3)", "rank_mean")[i % 3]
            got = detect(vlm, samples, Scoring(q, k, how))
            np.testing.assert_array_equal(got.values, pool(captured.theta(q, k, e), how))
            assert got.scoring == f"{q}/{k}/{how}" and got.n == 5 and got.runs == captured.runs
    assert seen == []


def test_evidence_that_is_asked_for_is_captured_too(vlm, samples):
    point = Scoring("output", "sum", evidence="overlap(0.9)")
    got = detect(vlm, samples, point).values
    want = score_samples(vlm, samples, evidence=("any", "overlap(0.9)"))
    np.testing.assert_allclose(got, want.theta("output", "sum", "overlap(0.9)").mean(0), atol=1e-6)
    assert set(want.sizes) == {"any", "overlap(0.9)", "none"}
    with pytest.raises(ValueError, match=r"evidence 'centre' was not captured \(captured: any, overlap\(0.9\)\)"):
        want.score(Scoring("output", "sum", evidence="centre"))


# ---------------------------------------------------------------- replies and what they lack


def test_a_right_box_counts_as_success_and_a_reply_without_a_box_is_left_out(vlm, samples, monkeypatch):
    resized = vlm.prepare(list(samples)).resized
    right = vlm.write_box(samples[0].box, samples[0].image.size, resized[0])
    told = {"noise-0": in_words(vlm, [right]), "noise-1": in_words(vlm, writes(vlm, ("0", "0", "1", "1")))}
    says(monkeypatch, vlm, told | {f"noise-{i}": in_words(vlm, ["nowhere"]) for i in (2, 3, 4)})
    got = score_samples(vlm, samples, batch_size=3)
    assert got.right.tolist() == [True, False, False, False, False] and got.replies[2] == "nowhere"
    answer = got.score(Scoring("output_answer", "sum"))
    assert answer.n == 2 and "3 without output_answer" in str(got) and "1 answered right" in str(got)
    np.testing.assert_allclose(answer.values, got.theta("output_answer", "sum")[:2].mean(0))
    success = got.score(Scoring("output", "sum", "mean_success"))
    assert success.n == 1 and np.array_equal(success.values, got.theta("output", "sum")[0])


def test_no_success_shows_the_first_reply(vlm, samples, monkeypatch):
    says(monkeypatch, vlm, {s.id: in_words(vlm, [f"no idea {i}"]) for i, s in enumerate(samples)})
    with pytest.raises(ValueError, match="answered none of 5 samples of noise right.*The first reply: 'no idea 0'"):
        detect(vlm, samples, Scoring("output", "argmax", "mean_success"))


def silent(vlm, monkeypatch, sample):
    """Let the model stop at once where its reply would begin as that to `sample` does."""
    first = generate(vlm, vlm.prepare([sample]))[0, 0, 0]
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", [int(first)])
    vlm.__dict__.pop("stop_ids", None)


def test_samples_without_a_reply_are_counted_and_left_out(vlm, samples, monkeypatch):
    said = in_words(vlm, ["hm"])
    says(monkeypatch, vlm, {"noise-1": [], "noise-4": []} | {f"noise-{i}": said for i in (0, 2, 3)})
    got = score_samples(vlm, samples, batch_size=2)
    assert got.empty == ("noise-1", "noise-4") and got.n == 5
    assert got.score(VRH).n == 3 and got.score(Scoring("prompt_last", "sum")).n == 5
    for queries in ("output", "expression_and_output", "output_one(2)", "output_emitted"):
        assert np.isnan(got.theta(queries, "sum")[:, 0, 0]).tolist() == [False, True, False, False, True]
    check(got, [ByHand(vlm, s, [] if s.id in got.empty else said) for s in samples[:2]])
    assert "2 without a reply, first noise-1" in str(got)
    again = score_samples(vlm, samples, batch_size=2)  # from the store
    assert again.empty == got.empty and np.array_equal(again.score(VRH).values, got.score(VRH).values)


def test_a_reply_that_stops_at_once_is_empty(vlm, samples, monkeypatch):
    silent(vlm, monkeypatch, samples[0])
    quiet = [s.id for s in samples if generate(vlm, vlm.prepare([s]))[0, 0, 0] in vlm.stop_ids]
    if len(quiet) < len(samples):
        assert score_samples(vlm, samples).empty == tuple(quiet) and "noise-0" in quiet
    vlm.__dict__.pop("stop_ids", None)


def test_no_reply_at_all_is_an_error_that_shows_the_prompt(vlm, samples, monkeypatch):
    silent(vlm, monkeypatch, samples[0])
    with pytest.raises(ValueError, match="replied nothing to any of 1 samples.*red dot"):
        score_samples(vlm, samples[:1])
    vlm.__dict__.pop("stop_ids", None)


# ---------------------------------------------------------------- samples that lack something


def bare(samples) -> Samples:
    return Samples("pictures", "detect", [dataclasses.replace(s, box=None) for s in samples])


def test_samples_without_boxes_can_be_scored_by_keys_that_need_none(vlm, samples):
    got, whole = score_samples(vlm, bare(samples)), score_samples(vlm, samples)
    assert {(k, e) for _, k, e in got.points()} == {("image_mass", "none"), ("spatial_entropy", "none")}
    for point in got.points():
        want = whole.theta(*point) * (np.nan if point[0] == "forced_output" else 1)  # nobody knows the right answer
        np.testing.assert_allclose(got.theta(*point), want, atol=1e-5)
    assert detect(vlm, bare(samples), Scoring("prompt_last", "image_mass")).n == 5
    with pytest.raises(ValueError, match=r"'any' was not captured \(captured: none\). 5 of 5 samples have no box"):
        got.score(VRH)
    with pytest.raises(ValueError, match="first: noise-0"):
        got.score(VRH)


def test_a_box_in_the_reply_about_a_sample_without_one_is_not_right(vlm, samples, monkeypatch):
    says(monkeypatch, vlm, {s.id: in_words(vlm, writes(vlm)) for s in samples})
    got = score_samples(vlm, bare(samples))
    assert not got.right.any() and not np.isnan(got.theta("output_answer", "image_mass", "none")).any()


def test_a_scoring_that_needs_boxes_is_refused_before_any_pass(vlm, samples):
    mixed = Samples("noise", "detect", [*samples, dataclasses.replace(samples[0], id="bare", box=None)])
    needs = [VRH, Scoring("output", "sum", evidence="mask"), Scoring("prompt_last", "sum", evidence="centre")]
    with passes(vlm) as seen:
        for point in needs:
            with pytest.raises(ValueError, match="1 of 6 samples have no box.*first: bare.*image_mass"):
                detect(vlm, mixed, point)
        with pytest.raises(ValueError, match="evidence 'any' cannot be measured"):
            score_samples(vlm, mixed, evidence=("any",))
        with pytest.raises(ValueError, match="5 of 5 samples have no mask"):
            detect(vlm, samples, Scoring("output", "sum", evidence="mask"))
        with pytest.raises(ValueError, match="Did you mean 'mask'"):
            score_samples(vlm, samples, evidence=("masks",))
    assert seen == []


def test_a_text_without_context_or_with_a_box_rule_is_refused(vlm):
    talk = Sample("talk", None, "talk", "What is red?", answer="a", task="answer")
    with passes(vlm) as seen:
        with pytest.raises(ValueError, match="neither a picture nor a context"):
            score_samples(vlm, Samples("talk", "detect", [talk]))
        with pytest.raises(ValueError, match="no cells that lie in a box"):
            detect(vlm, Samples("needles", "detect", needles()), Scoring("output", "sum", evidence="centre"))
    assert seen == []


def test_a_mask_that_fills_its_box_gives_the_same_tokens(vlm, samples):
    """And a tenth of it fewer; run lengths are masks too."""

    def covered(sample, share):
        mask = np.zeros(sample.image.size[::-1], bool)
        x0, y0, x1, y1 = map(int, sample.box)
        mask[y0:y1, x0 : x0 + max(1, int(share * (x1 - x0)))] = True
        return dataclasses.replace(sample, box=Box(x0, y0, x1, y1), mask=boxes.encode_mask(mask, sample.image.size))

    full, half = (Samples("noise", "detect", [covered(s, share) for s in samples]) for share in (1, 0.1))
    got = score_samples(vlm, full)
    np.testing.assert_allclose(got.theta("output", "sum", "any"), got.theta("output", "sum", "mask"), atol=1e-6)
    less = score_samples(vlm, half)
    assert (less.theta("output", "sum", "mask") <= less.theta("output", "sum", "any") + 1e-6).all()
    assert (less.sizes["mask"] < less.sizes["any"]).any() and less.runs != got.runs


def test_another_mask_is_another_run(vlm, samples):
    def spot(*corners):
        mask = np.zeros(samples[0].image.size[::-1], bool)
        mask[slice(*corners[:2]), slice(*corners[2:])] = True
        return Samples("noise", "detect", [dataclasses.replace(samples[0], mask=mask)])

    runs = {score_samples(vlm, spot(*c)).runs for c in ((0, 9, 0, 9), (30, 50, 30, 50), (0, 9, 0, 9))}
    assert len(runs) == 2
    # Also where only the box counts: a mask is part of what a sample is, since heads can be made to look at it.
    by_box = {score_samples(vlm, spot(*c), evidence=("any",)).runs for c in ((0, 9, 0, 9), (30, 50, 30, 50))}
    assert len(by_box) == 2


def test_a_tiny_box_has_at_least_one_token_by_every_rule(vlm, samples):
    small = Sample("small", samples[0].image, "noise", samples[0].text, Box(31, 17, 31.5, 17.5))
    got = score_samples(vlm, Samples("noise", "detect", [small]))
    for evidence in BOXES:
        values = got.theta("output", "sum", evidence)
        assert (values > 0).all() and (values < 1).all() and got.sizes[evidence][0] > 0


def test_tiles_and_thumbnail_add_up_to_both(vlm, samples):
    covered = Samples("noise", "detect", masked(list(samples)))
    parts = {p: score_samples(vlm, covered, part=p) for p in ("tiles", "thumbnail", "both")}
    grids = vlm.prepare(list(samples)).grids
    for evidence in ("any", "soft", "mask"):
        tiles, thumbnail, both = (got.theta("output", "sum", evidence) for got in parts.values())
        for i, grid in enumerate(grids):
            if len(grid) > grid.rows * grid.cols:  # a thumbnail is there
                np.testing.assert_allclose(tiles[i] + thumbnail[i], both[i], atol=1e-5)
                assert thumbnail[i].max() > 0 and tiles[i].max() > 0
            else:
                assert np.array_equal(tiles[i], both[i]) and np.array_equal(thumbnail[i], both[i])
    assert len({got.runs for got in parts.values()}) == 3
    with pytest.raises(ValueError, match="choose one of"):
        score_samples(vlm, samples, part="corner")


# ---------------------------------------------------------------- stored and resumed


def test_a_second_call_runs_no_model(vlm, samples):
    first = score_samples(vlm, samples, batch_size=2)
    with passes(vlm) as seen:
        again = score_samples(vlm, samples, batch_size=2)
        detect(vlm, samples, Scoring("expression", "argmax", "frequency"), batch_size=2)
    assert seen == [] and again.runs == first.runs and again.replies == first.replies
    for name in first.values:
        assert np.array_equal(again.values[name], first.values[name], equal_nan=True)


def test_one_pass_a_batch_besides_the_reply(vlm, samples):
    vlm.max_new_tokens = 1
    with passes(vlm) as seen:
        score_samples(vlm, samples[:4], batch_size=2)
    assert [rows for rows, _ in seen] == [2] * 4  # a prefill and one captured pass for each of two batches


def test_scores_are_read_without_a_model(vlm, samples):
    assert stored(vlm.name, vlm.profile, samples) is None
    first = score_samples(vlm, samples, batch_size=2)
    with passes(vlm) as seen:
        got = stored(vlm.name, vlm.profile, samples)
    assert seen == [] and (got.runs, got.ids, got.replies, got.empty) == (first.runs, first.ids, first.replies, ())
    assert got.right is None and set(got.points()) == set(first.points())
    for name in first.values:
        assert np.array_equal(got.values[name], first.values[name], equal_nan=True)
    assert stored(vlm.name, vlm.profile, samples[:2]) is None
    score_samples(vlm, samples, batch_size=3)
    assert stored(vlm.name, vlm.profile, samples) is None, "two runs: which one is meant?"


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
    first, second, third = ([s.id for s in batch] for batch in samples.batches(2))
    assert prepared == [first, second, second, third] and len(third) == 1
    monkeypatch.setattr(store, "ROOT", tmp_path / "elsewhere")  # the same without an interruption
    want = score_samples(vlm, samples, batch_size=2)
    for name in want.values:
        np.testing.assert_allclose(got.values[name], want.values[name], atol=1e-6)


def test_order_of_samples_is_theirs_not_the_files(vlm, samples, root):
    first = score_samples(vlm, samples, batch_size=2)
    path = next((root / "data/runs/nano").glob("*.jsonl"))
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    again = score_samples(vlm, samples, batch_size=2)
    assert np.array_equal(again.theta("output", "sum"), first.theta("output", "sum"))
    assert again.ids == first.ids and np.array_equal(again.sizes["soft"], first.sizes["soft"])


def test_other_token_limits_samples_and_models_have_their_own_files(vlm, samples, tiny_models, root):
    runs = {score_samples(vlm, samples).runs[0], score_samples(vlm, samples[:3]).runs[0]}
    vlm.max_new_tokens = 3
    runs.add(score_samples(vlm, samples).runs[0])
    vlm.prompt = vlm.prompt.replace("{expression}", "the {expression}")
    runs.add(score_samples(vlm, samples).runs[0])
    runs.add(score_samples(vlm, samples, evidence=("any",)).runs[0])
    other = dataclasses.replace(next(m for m in tiny_models.values() if m.name != vlm.name), max_new_tokens=3)
    runs.add(score_samples(other, samples[:1]).runs[0])
    assert len(runs) == 6 == len(list((root / "data/runs/nano").glob("*.jsonl")))


def packed(*shape) -> str:
    zeros = np.zeros(shape, "<f4").tobytes()
    return "x".join(map(str, shape)) + ":" + base64.b64encode(zlib.compress(zeros)).decode()


SPOILED = {
    "no scores": lambda r: r.pop("theta"),
    "no base64": lambda r: r.update(theta="9x3x8:!!"),
    "no zlib": lambda r: r.update(theta="9x3x8:AAAA"),
    "cut short": lambda r: r.update(theta=r["theta"][:-40]),
    "another shape": lambda r: r.update(theta="1x" + r["theta"]),
    "fewer variants": lambda r: r.update(theta=packed(5, 3, 8)),
    "another grid": lambda r: r.update(theta=packed(int(r["theta"].split("x")[0]), 4, 8)),
    "null": lambda r: r.update(theta=None),
    "no sizes": lambda r: r.pop("sizes"),
    "no text": lambda r: r.pop("text"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("n", [1, 2])
def test_a_spoiled_line_is_an_error_that_names_its_file(tiny_models, samples, root, spoil, n):
    vlm = dataclasses.replace(tiny_models["internvl3"], max_new_tokens=6)
    other = score_samples(vlm, samples[2:4])
    captured = score_samples(vlm, samples[:n])
    path = root / f"data/runs/nano/{captured.runs[0]}.jsonl"
    first, *rest = path.read_text().splitlines()
    record = json.loads(first)
    spoil(record)
    path.write_text("\n".join([json.dumps(record), *rest]) + "\n")
    with pytest.raises(store.CorruptRun, match=str(path)):
        score_samples(vlm, samples[:n])
    again = score_samples(vlm, samples[2:4])
    assert np.array_equal(again.theta("output", "sum"), other.theta("output", "sum"))
    path.unlink()
    assert np.array_equal(score_samples(vlm, samples[:n]).theta("output", "sum"), captured.theta("output", "sum"))


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
    np.testing.assert_allclose(got.theta("output", "sum"), want.theta("output", "sum"), atol=1e-5)
    manifest = json.loads((root / f"short/data/runs/nano/{got.runs[0]}.json").read_text())
    assert manifest["batch_sizes"] == {"2": 4, "1": 1} and manifest["batch_size"] == 4


def test_the_reply_limit_of_a_benchmark_holds_while_scoring(vlm, samples, monkeypatch):
    limits = []

    def counted(vlm, batch, max_new_tokens):
        limits.append(max_new_tokens)
        return generate(vlm, batch, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(scoring, "generate", counted)
    score_samples(vlm, Samples("noise", "detect", list(samples), max_new_tokens=3)[:2])
    assert limits == [3]


# ---------------------------------------------------------------- stability and cost


def made_up(values: np.ndarray) -> SampleScores:
    n = len(values)
    ids, sizes = tuple(f"s{i}" for i in range(n)), {"any": np.ones(n), "none": np.full(n, 4)}
    return SampleScores({("output", "sum", "any"): values}, "model", "noise", ("run",), ids, sizes)


def test_stability_has_a_row_per_size_and_seed():
    values = np.random.default_rng(0).random((12, 4, 6)).astype(np.float32)
    values[:, 0, 0] += 3
    captured = made_up(values)
    table = stability(captured, [2, 12], k=5, seeds=4)
    assert list(table.columns) == ["n", "seed", "overlap", "spearman", "k", "model"]
    assert table.n.tolist() == [2] * 4 + [12] * 4 and table.seed.tolist() == [0, 1, 2, 3] * 2
    assert (table[table.n == 12].overlap == 5).all() and np.allclose(table[table.n == 12].spearman, 1)
    assert (table[table.n == 2].overlap >= 1).all() and table[table.n == 2].spearman.nunique() > 1
    pd.testing.assert_frame_equal(table, stability(captured, [2, 12], k=5, seeds=4))


def test_stability_over_more_samples_than_captured_is_refused():
    captured = made_up(np.random.default_rng(0).random((3, 2, 2)).astype(np.float32))
    with pytest.raises(ValueError, match="only 3"):
        stability(captured, [4], k=1)
    with pytest.raises(ValueError, match="use at least 10"):
        stability(captured, [], k=1)


def test_stability_of_one_output_token(vlm, samples):
    table = stability(score_samples(vlm, samples), [2, 5], k=4, seeds=2, scoring=Scoring("output_one(3)", "sum"))
    assert (table[table.n == 5].overlap == 4).all()


def test_captured_rows_and_eager_attention_measure_the_same_pass(vlm, samples):
    batch = vlm.prepare(samples[:1])
    rows = scoring._pass_rows(vlm, batch, [70, 71, 72])
    np.testing.assert_allclose(rows, scoring._pass_eager(vlm, batch, [70, 71, 72]), atol=1e-5)
    assert rows.shape == vlm.grid


def test_capture_cost_has_a_row_per_method_and_size(vlm, samples):
    table = capture_cost(vlm, samples[1], scales=[1, 2], repeats=1)
    assert list(table.columns) == ["method", "visual_tokens", "seconds", "peak_mib", "n", "model"]
    assert table.method.tolist() == ["rows", "eager"] * 2 and (table.seconds > 0).all()
    assert table.visual_tokens.is_monotonic_increasing
    assert 0 < table.attrs["largest_difference"] < 1e-5
    assert vlm.model.config.get_text_config()._attn_implementation == "sdpa"


def test_a_close_up_shows_the_rows_that_predict_the_reply(vlm, samples):
    for sample in samples[:3]:
        alone, got = ByHand(vlm, sample), close_up(vlm, sample)
        rows = [row for _, row in alone.rows("output")]
        want = alone.A["own"][:, :, rows][..., alone.V]
        np.testing.assert_allclose(got.attention, want, atol=1e-5)
        assert len(got.tokens) == len(rows) and got.grid.cells.shape == (len(alone.V), 4)
        assert got.reply.failure in ("no box", "cut off")
        chosen = HeadSet((Head(1, 5), Head(2, 0)), vlm.grid)
        np.testing.assert_allclose(got.over(chosen), (want[1, 5] + want[2, 0]).mean(0), atol=1e-5)


def test_a_close_up_is_the_scored_attention_and_adds_up_over_heads(vlm, samples):
    sample = samples[0]
    look = close_up(vlm, sample)
    assert look.attention.shape == (*vlm.grid, len(look.tokens), len(look.grid))
    inside = look.grid.tokens_in(sample.box)
    scored = score_samples(vlm, samples[:1]).score(VRH).values
    np.testing.assert_allclose(look.attention[..., inside].sum(-1).mean(-1), scored, atol=1e-6)
    some = HeadSet(((0, 1), (2, 5)), vlm.grid, "some")
    both = HeadSet(some.heads + some.rest().heads, vlm.grid, "all")
    np.testing.assert_allclose(look.over(some) + look.over(some.rest()), look.over(both), atol=1e-6)
    assert look.panels({"a": some})[0] == sample.text
    table = look.mass(some)
    assert list(table.index) == ["L0H1", "L2H5"] and table.shape[1] == len(look.tokens)
    np.testing.assert_allclose(table.mean(axis=1), [scored[0, 1], scored[2, 5]], atol=1e-6)
