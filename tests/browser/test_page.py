"""The page to share, in a browser: what its controls show is what stands in its data, and nothing else is asked for."""

import functools
import http.server
import json
import re
import threading

import pytest

from tests import test_page

MODELS = ["nano-qwen2.5-vl", "nano-internvl3.5"]
UNKNOWN = "Not computed for this page"


@pytest.fixture(scope="module")
def built(chromium, tmp_path_factory):
    """(path, data) of a page of two embedded models, with two pictures and eight single heads."""
    root = tmp_path_factory.mktemp("page")
    with test_page.elsewhere(root, singles=8):
        path = test_page.page.build("nano", MODELS, n=2)
    return path, json.loads(test_page.Parts(path.read_text()).scripts["data"])


@pytest.fixture(scope="module")
def address(built):
    """Where a server of this machine has the page."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built[0].parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{built[0].name}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def at(page, address, built):
    """The open page, and the data of its first model."""
    page.goto(address)
    ready(page)
    return page, built[1]["models"][0]


def ready(page) -> None:
    """Wait for the last thing that the page does when it opens."""
    page.locator("#steps .vrh-token").first.wait_for()
    page.locator("#answer code").wait_for(state="attached")


def name_of(heads) -> str:
    return ",".join(f"L{layer}H{head}" for layer, head in sorted(heads))


def chosen(page) -> set[str]:
    """The heads that are knocked out on the map."""
    return set(page.locator("#map [aria-pressed=true]").evaluate_all("all => all.map((cell) => cell.dataset.head)"))


def boxes(page) -> dict:
    """Name to box of what is drawn on the picture; every box has one stroke that carries its name."""
    drawn = page.locator("#shown [data-box]").evaluate_all("all => all.map((b) => [b.dataset.name, b.dataset.box])")
    assert len(dict(drawn)) == len(drawn)
    return {name: [float(x) for x in box.split(",")] for name, box in drawn}


def shows(page, picture: dict, name: str) -> None:
    """Assert that the reply without these heads stands there, in words and as a box."""
    known = picture["cuts"][name]
    assert page.locator("#answer code").inner_text() == known["text"].strip()
    words = page.locator("#answer").inner_text()
    assert f"IoU {known['iou']:.2f}, {known['outcome']}" in words and UNKNOWN not in words
    want = {"referent": picture["referent"], "unmasked": picture["cuts"][""]["box"]}
    want |= {"reply": known["box"]} if name else {}
    assert boxes(page) == {box: place for box, place in want.items() if place}
    assert page.locator("#shown .vrh-legend").inner_text().count("no box:") == sum(p is None for p in want.values())
    assert page.locator("#shown img").get_attribute("alt").startswith(f"picture for “{picture['text']}”; IoU")


def put(page, k: int) -> None:
    """Move the slider over k there."""
    page.locator("#k").evaluate(
        "(slider, k) => { slider.value = k; slider.dispatchEvent(new Event('input', { bubbles: true })) }", k
    )


def test_it_opens_at_the_top_k_of_the_first_model(at):
    page, model = at
    assert page.locator("#k-now").inner_text() == page.locator("#k").input_value() == str(model["k"])
    assert chosen(page) == set(name_of(model["top"][: model["k"]]).split(","))
    shows(page, model["pictures"][0], name_of(model["top"][: model["k"]]))
    assert page.locator("#map [data-head]").count() == 80
    assert page.locator("h1").inner_text() == page.title() == "Visual retrieval heads: click heads away"


def test_clicked_heads_are_looked_up_together_and_alone(at):
    page, model = at
    picture = model["pictures"][0]
    page.locator("#none").click()
    shows(page, picture, "")
    best, second = (name_of([head]) for head in model["top"][:2])
    page.locator(f"#map [data-head={second}]").click()
    shows(page, picture, second)
    page.locator(f"#map [data-head={best}]").click()
    shows(page, picture, name_of(model["top"][:2]))
    page.locator(f"#map [data-head={second}]").click()
    assert chosen(page) == {best}
    shows(page, picture, best)


def test_an_unknown_combination_says_so_and_shows_no_box_of_another(at):
    page, model = at
    page.locator("#none").click()
    pair = [model["top"][0], model["top"][2]]
    assert name_of(pair) not in model["pictures"][0]["cuts"]
    for head in pair:
        page.locator(f"#map [data-head={name_of([head])}]").click()
    words = page.locator("#answer").inner_text()
    assert UNKNOWN in words and "08_play" in words and "IoU" not in words
    assert page.locator("#answer code").inner_text() == "" and "reply" not in boxes(page)
    assert page.locator("#shown img").get_attribute("alt").endswith("this set of heads was not computed")
    page.locator("#top").click()
    shows(page, model["pictures"][0], name_of(model["top"][: model["k"]]))


def test_the_slider_cuts_the_top_heads_at_every_k(at):
    page, model = at
    assert page.locator("#k").get_attribute("max") == str(len(model["top"]))
    for k in range(len(model["top"]) + 1):
        put(page, k)
        assert page.locator("#k-now").inner_text() == str(k) and len(chosen(page)) == k
        shows(page, model["pictures"][0], name_of(model["top"][:k]))


def test_random_draws_follow_one_another_with_as_many_heads_as_the_slider_says(at):
    page, model = at
    put(page, 2)
    seen = []
    for heads in [*model["random"].values(), model["random"]["0"]]:
        page.locator("#random").click()
        seen.append(chosen(page))
        assert seen[-1] == set(name_of(heads[:2]).split(","))
        shows(page, model["pictures"][0], name_of(heads[:2]))
    assert seen[0] == seen[-1] and len({frozenset(heads) for heads in seen}) == len(model["random"])


def test_arrow_keys_go_from_token_to_token(at):
    page, model = at
    look = model["pictures"][0]["look"]
    many, mass = len(look["tokens"]), look["mass"][look["sets"].index(look["shown"])]
    line, current = page.locator("#steps .vrh-line"), page.locator("#steps [aria-current=true]")

    def stands(step: int) -> None:
        assert current.count() == 1 and current.get_attribute("data-token") == str(step)
        words = line.inner_text()
        assert words.startswith(f"token {step + 1} of {many}") and f"tokens: {mass[step]:.2f}," in words
        assert words.endswith(look["shown"])

    stands(look["step"])
    current.focus()
    page.keyboard.press("Home")
    for step in range(many):
        stands(step)
        page.keyboard.press("ArrowRight")
    stands(many - 1)
    page.keyboard.press("ArrowLeft")
    stands(many - 2)


def test_another_picture_has_its_image_reply_and_tokens_and_keeps_the_heads(at):
    page, model = at
    first, second = model["pictures"]
    put(page, 1)
    before = page.locator("#shown img").get_attribute("src")
    page.locator("#picture").select_option(label=second["text"])
    shows(page, second, name_of(model["top"][:1]))
    assert page.locator("#shown .vrh-caption").inner_text() == second["text"] != first["text"]
    assert page.locator("#shown img").get_attribute("src") != before
    tokens = page.locator("#steps .vrh-token").all_inner_texts()
    assert [token.strip() for token in tokens] == [token.strip() for token in second["look"]["tokens"]]
    assert chosen(page) == {name_of(model["top"][:1])}
    page.locator("#picture").select_option(label=first["text"])
    shows(page, first, name_of(model["top"][:1]))


def test_another_model_has_its_map_heads_and_replies(at, built):
    page, first = at
    other = built[1]["models"][1]
    assert other["top"] != first["top"]
    label = page.locator("#map .vrh-grid").get_attribute("aria-label")
    page.locator("#model").select_option(index=1)
    assert page.locator("#map .vrh-grid").get_attribute("aria-label") != label == f"{MODELS[0]}: score of every head"
    assert chosen(page) == set(name_of(other["top"][: other["k"]]).split(","))
    shows(page, other["pictures"][0], name_of(other["top"][: other["k"]]))
    best = page.locator(f"#map [data-head={name_of(other['top'][:1])}]").get_attribute("aria-label")
    assert "rank 1 of 80" in best
    assert page.locator("#steps .vrh-token").count() == len(other["pictures"][0]["look"]["tokens"])
    page.locator("#model").select_option(index=0)
    shows(page, first["pictures"][0], name_of(first["top"][: first["k"]]))


def test_it_works_from_the_disk_and_asks_nobody(chromium, built):
    path, data = built
    context = chromium.new_context()
    problems, asked = [], []
    context.on("console", lambda m: m.type in ("error", "warning") and problems.append(m.text))
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("request", lambda request: asked.append(request.url))
    try:
        page = context.new_page()
        page.goto(path.as_uri())
        ready(page)
        page.locator("#none").click()
        shows(page, data["models"][0]["pictures"][0], "")
        assert page.locator("#shown img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    finally:
        context.close()
    assert not problems
    assert asked[0] == path.as_uri() and not [url for url in asked[1:] if not re.match("(blob|data):", url)]
