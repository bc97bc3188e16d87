"""The page to share: which sets of heads it knows, that no text gets loose, and that it says what a model said."""

import base64
import json
import re
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from vrhlib import grounding, live, page, store, widgets
from vrhlib.attention import Ablation
from vrhlib.evaluate import Condition
from vrhlib.heads import Head, HeadScores, HeadSet, load_scores
from vrhlib.wiring import load_vlm

ROOT = Path(__file__).parents[1]
MODEL = "nano-qwen2.5-vl"
SCORES = HeadScores(np.arange(12.0).reshape(3, 4), "output/sum/mean", "toy", 5)


@contextmanager
def elsewhere(root: Path, singles: int = page.SINGLES, heads: bool = True):
    """Results go to `root`, which has the embedded models and, if asked for, their head lists."""
    (root / "data").mkdir(parents=True)
    for name in ("nano", "paper", *(["heads"] if heads else [])):
        (root / "data" / name).symlink_to(ROOT / "data" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "ROOT", root)
        patch.setattr(page, "SINGLES", singles)
        patch.setenv("VRHLIB_DEVICE", "cpu")
        yield patch


class Parts(HTMLParser):
    """Tags with their attributes, the text of every script by its id or type, the text of all else."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.scripts, self.words, self._in = [], {}, "", None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self._in = dict(attributes).get("id", "main")
            self.scripts[self._in] = ""

    def handle_endtag(self, tag):
        self._in = None if tag == "script" else self._in

    def handle_data(self, data):
        if self._in is None:
            self.words += data
        else:
            self.scripts[self._in] += data


# ---------------------------------------------------------------- which heads are cut


def test_every_single_head_of_a_small_model_is_cut():
    singles = [heads.heads for name, heads in page.cuts(SCORES, 2, [0]).items() if name.condition.startswith("without")]
    assert sorted(singles) == [(Head(layer, head),) for layer in range(3) for head in range(4)]


def test_of_a_large_model_the_first_and_a_seeded_draw_of_the_others_are_cut():
    large = HeadScores(np.random.default_rng(0).random((20, 16)), "s", "large", 5)
    names = page.cuts(large, 2, [])
    singles = [heads.heads[0] for name, heads in names.items() if name.condition.startswith("without")]
    ranked = large.ranked().heads
    assert len(singles) == len(set(singles)) == page.SINGLES == 120 and tuple(singles[:60]) == ranked[:60]
    drawn = [ranked.index(head) for head in singles[60:]]
    assert min(drawn) >= 60 and max(drawn) > 250, "from all the others, not from the next best"
    assert list(page.cuts(large, 2, [])) == list(names)


def test_the_top_heads_are_cut_up_to_twice_k():
    found = page.cuts(SCORES, 2, [])
    assert {n.k: h.heads for n, h in found.items() if n.condition == "vrh"} == {
        k: SCORES.top(k).heads for k in (2, 3, 4)
    }
    assert found[Condition("without L2H3", 1)].heads == SCORES.top(1).heads, "the top one is a single head"
    assert max(n.k for n in page.cuts(SCORES, 5, [])) == 6, "half of all heads, or there were no random ones"


def test_random_heads_are_nested_draws_from_outside_the_top():
    found, top = page.cuts(SCORES, 2, [0, 3]), set(SCORES.top(4))
    draws = {seed: [found[Condition("random", k, seed)].heads for k in (1, 2, 3, 4)] for seed in (0, 3)}
    for several in draws.values():
        assert [len(heads) for heads in several] == [1, 2, 3, 4] and not set(several[-1]) & top
        assert all(heads == several[-1][: len(heads)] for heads in several)
    assert draws[0][-1] != draws[3][-1]


# ---------------------------------------------------------------- the file

WILD = "</script><b>bold</b> <!-- $title ${x} $$ \u2028 &amp; \"quoted\" 'q' <script>alert(1)</script> é 猫"
TOY = {"profile": "nano", "title": WILD, "about": WILD, "models": [{"name": WILD, "cuts": {"": {"text": WILD}}}]}
PLAIN = {"profile": "nano", "title": "t", "about": "a", "models": []}


def test_whatever_a_reply_says_it_stays_data():
    parts, plain = Parts(page.html(TOY)), Parts(page.html(PLAIN))
    assert json.loads(parts.scripts["data"]) == TOY
    assert parts.tags == plain.tags, "no text became a tag"
    assert WILD in parts.words and parts.scripts.keys() == plain.scripts.keys() == {"modules", "data", "main"}
    assert "<" not in parts.scripts["data"] and "\u2028" not in parts.scripts["data"]


def test_the_page_carries_its_canvases_their_style_and_its_script_as_they_are():
    folder, parts = Path(widgets.__file__).parent, Parts(page.html(PLAIN))
    want = {name: page.canvases.module(name) for name in ("headmap", "picture", "stepper")}
    assert json.loads(parts.scripts["modules"]) == want
    assert parts.scripts["main"].strip() == (folder / "page.js").read_text().strip()
    assert (folder / "canvases.css").read_text() in page.html(PLAIN)


def test_no_placeholder_is_left():
    assert not re.search(r"\$(title|about|style|modules|data|script)\b", page.html(PLAIN))
    assert re.search(r"\$title", (Path(widgets.__file__).parent / "page.html").read_text()), "there are some"


def test_the_page_asks_nobody_for_anything():
    text, parts = page.html(PLAIN), Parts(page.html(PLAIN))
    assert set(re.findall(r"(?:https?|wss?):/*[^\s\"'`\\]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not [tag for tag, of in parts.tags if tag in ("link", "img", "iframe", "base") or {"src", "href"} & set(of)]
    assert not re.search(r"@import|url\(\s*[\"']?(?!#|\$)\w+:", text)
    (policy,) = [of["content"] for tag, of in parts.tags if of.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules
    assert {word for rule in rules.values() for word in rule.split()} == {"'none'", "'unsafe-inline'", "blob:", "data:"}


def test_a_number_that_is_none_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.html(PLAIN | {"models": [{"iou": float("nan")}]})


# ---------------------------------------------------------------- from a model


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(path, data) of a page of one embedded model: two pictures, six single heads."""
    root = tmp_path_factory.mktemp("page")
    with elsewhere(root, singles=6):
        path = page.build("nano", [MODEL], n=2)
    return path, json.loads(Parts(path.read_text()).scripts["data"])


@pytest.fixture(scope="module")
def vlm():
    return load_vlm(MODEL, device="cpu")


@pytest.fixture
def asked(root):
    return grounding("scenes", "test", 2, 0)


def scores() -> HeadScores:
    return load_scores(ROOT / "data" / "heads" / "nano" / f"{MODEL}__scenes.json")


def test_the_page_stands_with_the_figures_of_its_profile_and_says_what_it_is(built):
    path, data = built
    assert path.parts[-4:] == ("figures", "nano", "page", "index.html") and data["profile"] == "nano"
    (model,), words = data["models"], Parts(path.read_text()).words
    assert model["name"] == MODEL and model["grid"] == [10, 8] and model["published"] == {}
    assert "not the paper's numbers" in words and "2 pictures of scenes, drawn by seed 0" in words
    assert np.allclose(np.reshape(model["scores"], (10, 8)), scores().values, atol=1e-6)


def test_all_that_its_buttons_can_ask_for_is_there(built):
    """As `key` in page.js names them: by layer, then head."""
    (model,) = built[1]["models"]
    known = [set(picture["cuts"]) for picture in model["pictures"]]
    assert known[0] == known[1] and len(model["top"]) == 2 * model["k"]
    assert model["top"] == [list(head) for head in scores().top(2 * model["k"])] and len(model["random"]) == 5
    wanted = {""}
    for heads in (model["top"], *model["random"].values()):
        wanted |= {",".join(f"L{a}H{b}" for a, b in sorted(heads[:k])) for k in range(1, len(heads) + 1)}
    assert wanted <= known[0]
    singles = {name for name in known[0] if name.count("L") == 1}
    assert {str(h) for h in scores().top(3)} <= singles and len(known[0] - wanted - singles) == 0


def test_its_answers_are_those_of_a_click_in_the_notebook(built, vlm, asked):
    (model,), changed = built[1]["models"], 0
    answer = live.Live(vlm).without(asked)
    for sample, picture in zip(asked, model["pictures"]):
        assert picture["text"] == sample.text and picture["referent"] == list(sample.box)
        assert picture["size"] == list(sample.image.size)
        for name in [*list(picture["cuts"])[::6], ",".join(f"L{a}H{b}" for a, b in sorted(model["top"]))]:
            heads = HeadSet(tuple(map(Head.parse, filter(None, name.split(",")))), vlm.grid)
            said, found = answer(sample.id, heads), picture["cuts"][name]
            box = page.Box.of(said)
            assert (found["text"], found["outcome"]) == (said["text"], said["outcome"])
            assert found["iou"] == pytest.approx(said["iou"], abs=5e-4)
            assert found["box"] == (box and pytest.approx(list(box), abs=0.051))
            changed += found["text"] != picture["cuts"][""]["text"]
    assert changed > 2, "replies that never change prove nothing"


def test_its_replies_are_stepped_through_as_in_the_notebook(built, vlm, asked):
    (model,) = built[1]["models"]
    for sample, picture in zip(asked, model["pictures"]):
        steps = widgets.stepper(live.Live(vlm).looks([sample]), scores(), model["k"])._steps
        look = picture["look"]
        for name in ("maps", "image"):
            assert base64.b64decode(look[name]["$bytes"]) == getattr(steps, name)
        for name in ("tokens", "sets", "shown", "mass", "grid", "evidence", "boxes", "step", "size"):
            assert look[name] == getattr(steps, name), name


def test_every_set_of_heads_is_cut_as_the_page_names_it(vlm, asked, monkeypatch):
    seen = {}
    monkeypatch.setattr(page, "SINGLES", 3)
    whole = page.replies
    monkeypatch.setattr(page, "replies", lambda vlm, samples, known: seen.update(known) or whole(vlm, samples, known))
    data = page.model_data(vlm, scores(), 1, asked[:1], [4])
    cut = {",".join(map(str, sorted(a.heads))) if a else "" for a in seen.values()}
    assert set(data["pictures"][0]["cuts"]) == cut
    assert all(a is None or a.describe() == Ablation(a.heads).describe() for a in seen.values()), "zero, everywhere"
    assert list(data["random"]) == [4] and len(data["random"][4]) == 2


def test_a_model_whose_heads_were_not_found_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "load_vlm", lambda *a, **k: pytest.fail("a model was loaded"))
    with elsewhere(tmp_path / "root", heads=False):
        with pytest.raises(FileNotFoundError, match=rf"No heads at .*{MODEL}__scenes.json yet. Run .*01_detect.ipynb"):
            page.build("nano", [MODEL])
        assert not (tmp_path / "root" / "figures").exists()


def test_one_unknown_model_of_several_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(page, "load_vlm", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match="'nano-qwen2.5'.*Did you mean 'nano-qwen2.5-vl'"):
        page.build("nano", [MODEL, "nano-qwen2.5"])


def test_the_command_prints_where_the_page_is(monkeypatch, capsys, tmp_path):
    asked, path = [], tmp_path / "index.html"
    path.write_text("x" * 2_300_000)
    monkeypatch.setattr(page, "build", lambda profile, models: asked.append((profile, models)) or path)
    monkeypatch.setattr("sys.argv", ["page", "--models", "a,b,"])
    page.main()
    assert asked == [("nano", ["a", "b"])]
    assert capsys.readouterr().out == f"page: {path} (2.3 MB, no network needed)\n"


def test_the_command_fails_in_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["page", "--models", "nobodys-model"])
    with pytest.raises(SystemExit, match=r"^page: [^\n]*'nobodys-model'[^\n]*$"):
        page.main()
