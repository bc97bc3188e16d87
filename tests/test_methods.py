"""Every method as its paper or code states it, in loops over the eager attention of one unpadded sample at a time."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tests import tiny
from tests.test_design_space import farthest_from_the_line, middle, ranked, top_m
from tests.test_scoring import HEADS, LAYERS, SIZES, ByHand, echo, in_words, needles, says, writes
from vrhlib.design_space import VRH, SampleScores, Scoring
from vrhlib.methods import (
    COMPARED,
    DATA,
    FLIPS,
    METHODS,
    called,
    coarse_choices,
    design_choices,
    flips,
    method_scores,
    prior_work,
)
from vrhlib.samples import Samples
from vrhlib.scoring import score_samples

pytestmark = pytest.mark.usefixtures("root")
RIGHT = [True, False, True, False]  # which of the four samples count as answered right

# ---------------------------------------------------------------- the methods, by hand


def each_head(of: Callable[[int, int], float]) -> np.ndarray:
    return np.array([[of(i, h) for h in range(HEADS)] for i in range(LAYERS)], dtype=float)


def touched(s: ByHand) -> list[int]:
    """Columns of the image tokens whose cell overlaps the box."""
    b, found = s.sample.box, []
    for column, (x0, y0, x1, y1) in zip(s.V, s.cells):
        if x0 < b.x1 and b.x0 < x1 and y0 < b.y1 and b.y0 < y1:
            found.append(column)
    return found


def centred(s: ByHand) -> list[int]:
    b = s.sample.box
    return [column for column, (x0, y0, x1, y1) in zip(s.V, s.cells)
            if b.x0 <= (x0 + x1) / 2 < b.x1 and b.y0 <= (y0 + y1) / 2 < b.y1]  # fmt: skip


def replying(s: ByHand) -> range:
    """Rows that predict the reply's tokens: row P-1+t predicts token t."""
    return range(s.P - 1, s.P - 1 + len(s.reply))


def mass(s: ByHand, rows, keys, which="own") -> np.ndarray:
    """Mean over rows of the sum over keys."""
    A = s.A[which]
    return each_head(lambda i, h: sum(A[i, h, r, k] for r in rows for k in keys) / len(rows))


def hits(s: ByHand, rows, keys) -> np.ndarray:
    """Share of the rows whose most attended key, of all that are visible, is among `keys`."""
    return each_head(lambda i, h: sum(int(s.A["own"][i, h, r].argmax()) in keys for r in rows) / len(rows))


def vrh(s: ByHand) -> np.ndarray:
    """Mean over the reply of the mass on the referent."""
    return mass(s, replying(s), touched(s))


def copying(s: ByHand) -> np.ndarray:
    """Retrieval heads: |g and k| / |k|, g the tokens that the head attends to most while it writes them."""
    needle = [s.V[i] for i in range(*s.sample.span)]

    def recall(i: int, h: int) -> float:
        g = set()
        for t, token in enumerate(s.reply):
            j = int(s.A["own"][i, h, s.P - 1 + t].argmax())
            if j in needle and s.ids[j] == token:
                g.add(j)
        return len(g) / len(needle)

    return each_head(recall)


def calibrated(s: ByHand, rows, null_rows, keys) -> np.ndarray:
    """Mass on the evidence, minus the same with the question replaced by N/A."""
    return mass(s, rows, keys) - mass(s, null_rows, keys, "null")


def qrhead(s: ByHand) -> np.ndarray:
    """From the end of what is searched to the end of the prompt, last token included."""
    keys = [s.V[i] for i in range(*s.sample.span)] if s.sample.span else touched(s)
    return calibrated(s, range(s.V[-1] + 1, s.P), range(s.V[-1] + 1, s.null.length), keys)


def mmret(s: ByHand) -> np.ndarray:
    """The question's own tokens."""
    return calibrated(s, s.said, s.null_said, touched(s))


def a_thousandth(s: ByHand) -> list[int]:
    """Image tokens that cover more than 0.1 % of the box."""
    b, found = s.sample.box, []
    for column, (x0, y0, x1, y1) in zip(s.V, s.cells):
        shared = max(0, min(x1, b.x1) - max(x0, b.x0)) * max(0, min(y1, b.y1) - max(y0, b.y0))
        if shared / b.area * 100 > 0.1:
            found.append(column)
    return found


def ocr(s: ByHand) -> np.ndarray:
    """Rows *of* the answer's tokens, one step after those that predict them."""
    return hits(s, [s.P + t for t in s.spelled], a_thousandth(s))


def ocr_aligned(s: ByHand) -> np.ndarray:
    return hits(s, [s.P - 1 + t for t in s.spelled], a_thousandth(s))


def vera(s: ByHand) -> np.ndarray:
    """Share of the visual mass at the last prompt token."""
    A, K = s.A["own"], touched(s)
    last = s.P - 1
    return each_head(lambda i, h: sum(A[i, h, last, k] for k in K) / (sum(A[i, h, last, k] for k in s.V) + 1e-9))


def gaze(s: ByHand) -> np.ndarray:
    """Raw mass at the last prompt token on the tokens with their centre in the region."""
    return mass(s, [s.P - 1], centred(s))


def sparsemm(s: ByHand) -> np.ndarray:
    """Hits count less the larger the region."""
    return hits(s, replying(s), touched(s)) / len(touched(s))


def both(s: ByHand) -> np.ndarray:
    return mass(s, [*s.said, *replying(s)], touched(s))


def mean(values: list[np.ndarray]) -> np.ndarray:
    return sum(values) / len(values)


def of_right(values: list[np.ndarray]) -> np.ndarray:
    return mean([v for v, right in zip(values, RIGHT) if right])


def localization(known: list[ByHand]) -> np.ndarray:
    """How often a head is among the 10 of a sample with the least entropy, of the heads that look at the picture: those
    whose mean mass on it is not below the elbow, beyond the first sixteenth of the layers (none of three). Where
    no more than 10 look, 10 of 1,024 heads are less than one of 24, and it is the one with the least."""
    last = [s.said[-1] for s in known]
    looks = mean([mass(s, [row], s.V) for s, row in zip(known, last)])
    chosen = looks >= farthest_from_the_line(looks)
    count, m = np.zeros((LAYERS, HEADS)), 10 if chosen.sum() > 10 else 1
    for s, row in zip(known, last):
        entropy = each_head(lambda i, h, s=s, row=row: s.entropy(s.A["own"][i, h, row].tolist()))
        for head in [h for h in ranked(-entropy) if chosen[h]][:m]:
            count[head] += 1 / len(known)
    return np.where(chosen, count, -1)


BY_HAND: dict[str, Callable[[list[ByHand]], np.ndarray]] = {
    "vrh": lambda known: mean([vrh(s) for s in known]),
    "retrieval_heads": lambda known: of_right([hits(s, replying(s), touched(s)) for s in known]),
    "qrhead": lambda known: mean([qrhead(s) for s in known]),
    "ocr_heads": lambda known: of_right([ocr(s) for s in known]),
    "ocr_heads_aligned": lambda known: of_right([ocr_aligned(s) for s in known]),
    "vera": lambda known: mean([vera(s) for s in known]),
    "localization_heads": localization,
    "gaze_heads": lambda known: mean([gaze(s) for s in known]),
    "mmret_heads": lambda known: mean([mmret(s) for s in known]),
    "sparsemm": lambda known: mean([sparsemm(s) for s in known]),
    "flip_q": lambda known: mean([mass(s, s.said, touched(s)) for s in known]),
    "flip_phi": lambda known: mean([hits(s, replying(s), touched(s)) for s in known]),
    "flip_omega": lambda known: top_m(np.array([vrh(s) for s in known]), 5),
    "q_union": lambda known: mean([both(s) for s in known]),
}


def grounded(vlm, monkeypatch, n: int = 4) -> tuple[SampleScores, list[ByHand]]:
    """Samples on pictures, all answered with some box; which of them are right is told by `RIGHT`."""
    found = tiny.samples(*SIZES[:n])
    numbers = [("12", "3", "456", "78"), ("1", "2", "3", "4"), ("100", "5", "600", "70"), ("9", "9", "99", "99")]
    pieces = {s.id: writes(vlm, numbers[i]) for i, s in enumerate(found)}
    replies = {key: in_words(vlm, piece) for key, piece in pieces.items()}
    says(monkeypatch, vlm, replies)
    captured = score_samples(vlm, Samples("noise", "detect", found), batch_size=3)
    return (
        dataclasses.replace(captured, right=np.array(RIGHT[:n])),
        [ByHand(vlm, s, replies[s.id], spelled(vlm, pieces[s.id])) for s in found],
    )


def spelled(vlm, pieces) -> list[int]:
    """Which tokens of a reply told in pieces are in one of its numbers: every second piece is one."""
    lengths = [len(in_words(vlm, [piece])) for piece in pieces]
    return [t for p in range(1, len(pieces), 2) for t in range(sum(lengths[:p]), sum(lengths[: p + 1]))]


def test_every_method_and_flip_equals_its_formula_on_pictures(vlm, monkeypatch):
    captured, known = grounded(vlm, monkeypatch)
    points = {name: m.on_grounding for name, m in METHODS.items()} | flips(5)
    assert set(points) == set(BY_HAND)
    found = {}
    for name, point in points.items():
        got, want = captured.score(point), BY_HAND[name](known)
        if name == "localization_heads":  # who does not look has no frequency, and ranks last
            assert (got.values[want < 0] < got.values[want >= 0].min()).all() and (want < 0).any()
            assert (got.values[want < 0] <= 0).all(), "so that they do not count as found"
            np.testing.assert_allclose(got.values[want >= 0], want[want >= 0], atol=1e-6)
        else:
            np.testing.assert_allclose(got.values, want, atol=2e-5, err_msg=name)
        assert got.n == (2 if point.samples == "mean_success" else 4)
        found[name] = got
    values = {name: s.values.round(6).tobytes() for name, s in found.items()}
    assert len(set(values.values())) == len(values), "no two of them say the same"


def test_retrieval_heads_and_qrhead_equal_their_formulas_on_texts(vlm, monkeypatch):
    found = needles(4)
    replies = {found[0].id: echo(vlm, found[0]), found[1].id: echo(vlm, found[1]), found[2].id: in_words(vlm, ["4711"])}
    says(monkeypatch, vlm, replies)
    captured = score_samples(vlm, Samples("needles", "detect", found), batch_size=3)
    captured = dataclasses.replace(captured, right=np.array(RIGHT))
    known = [ByHand(vlm, s, replies.get(s.id)) for s in found]
    got = captured.score(METHODS["retrieval_heads"].scoring)
    np.testing.assert_allclose(got.values, of_right([copying(s) for s in known]), atol=1e-6)
    assert got.values.max() > 0 and got.n == 2
    got = captured.score(METHODS["qrhead"].scoring)
    np.testing.assert_allclose(got.values, mean([qrhead(s) for s in known]), atol=2e-5)


def test_one_sample_is_enough_for_every_method(vlm, monkeypatch):
    captured, known = grounded(vlm, monkeypatch, n=1)
    for name, point in ({name: m.on_grounding for name, m in METHODS.items()} | flips(5)).items():
        want = BY_HAND[name](known)
        got = captured.score(point).values
        got = np.where(want == -1, -1, got) if name == "localization_heads" else got
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)


def test_other_ways_of_pooling_what_vrh_measures(vlm, monkeypatch):
    captured, known = grounded(vlm, monkeypatch)
    values = np.array([vrh(s) for s in known])
    got = {name: captured.score(Scoring("output", "sum", name)).values for name in ("median", "active", "frequency(5)")}
    np.testing.assert_allclose(got["median"], middle(values), atol=2e-5)
    np.testing.assert_allclose(got["frequency(5)"], top_m(values, 5), atol=1e-6)
    assert (got["active"] == 1).all()
    hit = np.array([hits(s, replying(s), touched(s)) for s in known])
    np.testing.assert_allclose(captured.score(Scoring("output", "argmax", "active")).values, (hit > 0).mean(0))


# ---------------------------------------------------------------- all methods at once


def test_all_methods_are_read_off_what_was_captured(vlm, monkeypatch):
    captured, _ = grounded(vlm, monkeypatch)
    says(monkeypatch, vlm, {s.id: in_words(vlm, ["I do not know."]) for s in needles()})
    text = score_samples(vlm, Samples("needles", "detect", needles()), batch_size=3)
    got = method_scores({"grounding": captured, "needle": text})
    own = {name for name in got.data if "@" not in name}
    assert own == {m.name for m in METHODS.values() if m.data in ("grounding", "pictures", "needle")}
    assert {name for name in got.data if "@" in name} == {
        f"{m.name}@grounding" for m in METHODS.values() if m.data not in ("grounding", "pictures")
    }
    assert got.data["qrhead"] == "needles" and got.data["qrhead@grounding"] == got.data["vrh"] == "noise"
    assert "answered none of 3 samples of needles right" in got.nothing["retrieval_heads"]
    for name, scores in got.scores.items():
        method = METHODS[name.partition("@")[0]]
        used = method.on_grounding if "@" in name or method.data != "needle" else method.scoring
        source = text if got.data[name] == "needles" else captured
        assert np.array_equal(scores.values, source.score(used).values) and scores.values.max() > 0
    table = got.table().set_index("method")
    assert list(table.index) == list(got.data) and table.loc["retrieval_heads", "note"].startswith(text.model)
    assert table.loc["vrh", ["n", "scored"]].tolist() == [4, 24] and table.loc["retrieval_heads", "n"] == 0
    assert set(got.tops(5)) == set(got.scores) & own - {"vrh"}
    assert all("@" in name for name in got.tops(5, elsewhere=True))
    assert {name: len(h) for name, h in got.variants(6, 5).items()} == dict.fromkeys(["vrh", *FLIPS], 6)


def test_a_method_that_finds_no_head_says_so():
    zeros = np.zeros((3, 2, 4), np.float32)
    names = [("output", "sum", "any"), ("output", "argmax", "any"), ("prompt_last", "share", "any")]
    values = dict.fromkeys(names, zeros) | {names[0]: zeros + 1}
    sizes, ids = {"any": np.ones(3), "none": np.full(3, 9)}, ("a", "b", "c")
    got = method_scores(
        {"grounding": SampleScores(values, "model", "noise", ("run",), ids, sizes, np.ones(3, bool), ("x",) * 3)}
    )
    assert list(got.scores) == ["vrh"] and got.tops(3) == {}
    assert got.nothing["retrieval_heads@grounding"] == "no head scores above 0 on noise (n=3)"
    assert "expression with sum_calibrated was not captured" in got.nothing["mmret_heads@grounding"]
    assert "vera" not in got.data, "its own kind of data was not captured"


# ---------------------------------------------------------------- tables


def test_every_method_and_flip_is_a_point_that_can_be_made():
    assert set(COMPARED) < set(METHODS) and METHODS["vrh"].scoring == VRH
    for name, method in METHODS.items():
        assert method.name == name and method.data in DATA and method.deviation.endswith(".") and method.ablation
        assert method.on_grounding.keys != "copy", "nothing can be copied from a picture"
        assert called(method.scoring)
    for name, axis in {"flip_q": "queries", "flip_phi": "keys", "flip_omega": "samples", "q_union": "queries"}.items():
        assert {a for a in ("queries", "keys", "samples", "evidence", "among")
                if getattr(flips(5)[name], a) != getattr(VRH, a)} == {axis}  # fmt: skip


def test_points_are_called_by_their_methods():
    assert called(VRH) == "VRH" and called(flips(5)["flip_phi"]) == "VRH, keys turned"
    assert called(Scoring("output", "argmax", "mean_success")) == "Retrieval Heads"
    assert called(Scoring("prompt_last", "max", "median")) == ""
    assert len({called(point) for point in flips(5).values()}) == len(FLIPS)


def test_table_1_is_the_papers():
    table = prior_work()
    assert list(zip(table.method, table.domain, table.causal)) == [
        ("Retrieval Heads", "text", True), ("QRHead", "text", True), ("OCR Heads", "visual document", True),
        ("VERA", "visual document", True), ("Loc. Heads", "general image", False), ("VRH", "general image", True),
    ]  # fmt: skip
    assert set(table["detected on"]) <= set(DATA.values()) and table.source.str.len().min() > 0


def test_table_2_is_the_papers():
    """The paper writes avg for the others and mean for VRH; it is one word here. N/A: by the entropy of a map."""
    assert coarse_choices().values.tolist() == [
        ["Retrieval Heads", "out", "argmax", "avg"],
        ["QRHead", "in", "sum", "avg"],
        ["OCR Heads", "out", "argmax", "avg"],
        ["VERA", "out", "sum", "avg"],
        ["Loc. Heads", "in", "N/A", "freq"],
        ["VRH", "out", "sum", "avg"],
    ]
    assert list(coarse_choices()) == ["method", "Q", "Phi", "Omega"]


def test_design_choices_has_a_row_per_method():
    table = design_choices().set_index("method")
    assert len(table) == len(METHODS) and (table.ablation != "").all()
    assert table.loc["VERA", ["queries", "keys", "samples", "evidence"]].tolist() == [
        "prompt_last",
        "share",
        "mean",
        "any",
    ]
    assert table.loc["Loc. Heads", "evidence":"among"].tolist() == ["none", "looking"]
