"""The four canvases in a browser, without Jupyter: what they show of a model, and what a reader's hands change.

A model here is a plain object with the five methods that the modules may use, as on a page without a kernel.
"""

import base64
import importlib.util
import io
import itertools
import math

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from PIL import Image

from tests.browser import harness

FOLDER = harness.ROOT / "vrhlib" / "widgets"

MOUNT = """async ({ source, css, values, bytes, views }) => {
  const model = {
    values, heard: {}, saved: [],
    get(name) { return this.values[name]; },
    set(name, value) {
      const same = JSON.stringify(this.values[name]) === JSON.stringify(value) && !(value instanceof DataView);
      this.values[name] = value;
      if (!same) for (const act of [...(this.heard[`change:${name}`] ?? [])]) act();
    },
    on(event, act) { (this.heard[event] ??= []).push(act); },
    off(event, act) { this.heard[event] = (this.heard[event] ?? []).filter((other) => other !== act); },
    save_changes() { this.saved.push(structuredClone({ ...this.values, image: null, maps: null })); },
    listeners() { return Object.values(this.heard).flat().length; },
  };
  for (const [name, text] of Object.entries(bytes)) {
    const padded = Uint8Array.from("##" + atob(text), (c) => c.charCodeAt(0));  // a view need not begin at byte 0
    values[name] = new DataView(padded.buffer, 2);
  }
  document.head.appendChild(document.createElement("style")).textContent = css;
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  window.model = model;
  window.cleanups = [];
  for (let i = 0; i < views; i++) {
    const el = document.body.appendChild(document.createElement("div"));
    el.id = `view${i}`;
    window.cleanups.push(module.default.render({ model, el }));
  }
  await Promise.all([...document.images].map((image) => image.getAttribute("src") && image.decode()));
}"""


def mount(page, module: str, views: int = 1, **values) -> None:
    """One model's views #view0, #view1, ... in a blank page; the model is `window.model`."""
    source = "".join((FOLDER / f"{part}.js").read_text() for part in ("draw", module))
    data = {name: base64.b64encode(v).decode() for name, v in values.items() if isinstance(v, bytes)}
    plain = {name: v for name, v in values.items() if not isinstance(v, bytes)}
    css = (FOLDER / "canvases.css").read_text()
    page.set_content("<!doctype html><meta charset=utf-8><body></body>")
    page.evaluate(MOUNT, {"source": source, "css": css, "values": plain, "bytes": data, "views": views})


def put(page, **values) -> None:
    """From the kernel's side."""
    page.evaluate("values => { for (const [name, v] of Object.entries(values)) model.set(name, v) }", values)


def got(page, name: str):
    return page.evaluate("name => model.get(name)", name)


def saved(page, name: str) -> list:
    """The values of `name` at each save_changes."""
    return page.evaluate("name => model.saved.map((values) => values[name])", name)


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(60, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def box_of(page, selector: str) -> tuple[float, float, float, float]:
    """x, y, width, height of a shape on the page, without its stroke."""
    return tuple(
        page.evaluate(
            """selector => {
              const shape = document.querySelector(selector), box = shape.getBBox(), at = shape.getScreenCTM();
              return [box.x * at.a + at.e, box.y * at.d + at.f, box.width * at.a, box.height * at.d];
            }""",
            selector,
        )
    )


def line(page) -> str:
    return page.locator("#view0 .vrh-line").inner_text()


# ---- the classes


@pytest.fixture(scope="module")
def canvases():
    spec = importlib.util.spec_from_file_location("canvases", FOLDER / "canvases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRAITS = {
    "HeadMap": "grid scores published chosen disabled word label",
    "Picture": "image size boxes segments chosen caption disabled label",
    "Stepper": "image size tokens sets shown maps peaks mass grid evidence boxes step opacity label",
    "Curve": "series band at value outcomes title note label",
}


@pytest.mark.parametrize("name", TRAITS)
def test_every_trait_is_synced_and_the_module_asks_for_no_other(canvases, name):
    cls = getattr(canvases, name)
    synced = {trait for trait in cls.class_own_traits(sync=True) if not trait.startswith("_")}
    assert synced == set(TRAITS[name].split())
    assert cls().get_state().keys() >= synced
    source = canvases.module(name.lower())
    assert cls._esm == source or str(cls._esm) == source
    asked = {word.split('"')[0] for word in source.split('model.get("')[1:] + source.split('list("')[1:]}
    assert asked == synced
    assert not [word for word in ("import ", "innerHTML", "fetch(", "console.") if word in source]


@pytest.mark.parametrize("name", TRAITS)
@pytest.mark.parametrize("values", ["defaults", "none"])
def test_an_empty_model_renders_and_says_so(page, canvases, name, values):
    state = {trait: getattr(canvases, name)().trait_values()[trait] for trait in TRAITS[name].split()}
    mount(page, name.lower(), **(state if values == "defaults" else dict.fromkeys(state)))

    said = page.locator("#view0").inner_text()
    words = {
        "HeadMap": "no heads yet",
        "Picture": "no picture yet",
        "Stepper": "no reply yet",
        "Curve": "ablated heads",
    }
    assert words[name] in said
    for trait, value in state.items():  # and one by one, as they come
        if not isinstance(value, bytes):
            put(page, **{trait: value})


@pytest.mark.parametrize("name", TRAITS)
def test_cleaning_up_leaves_no_listener(page, name):
    mount(page, name.lower(), views=2)
    before = page.evaluate("model.listeners()")
    page.evaluate("cleanups[0]()")
    assert page.evaluate("model.listeners()") == before / 2 > 0
    page.evaluate("cleanups[1]()")
    assert page.evaluate("model.listeners()") == 0


@pytest.mark.parametrize("name", ["headmap", "picture", "stepper"])
def test_whatever_takes_keys_keeps_them_from_jupyter(page, name):
    """Lumino looks at the element with the focus itself: an attribute further out would not do."""
    mount(page, name, **{"headmap": HEADS, "picture": PICTURE, "stepper": stepper_values()}[name])
    focusable = page.locator("#view0 :is([tabindex], button, input, select)")
    unguarded = page.locator("#view0 :is([tabindex], button, input, select):not([data-lm-suppress-shortcuts])")
    assert focusable.count() > 2 and unguarded.count() == 0


# ---- HeadMap

SCORES = [round(0.3 * math.exp(-i / 7), 4) for i in range(80)]
SCORES[29], SCORES[0] = 0.2511, 0.0412  # L3H5 is second of all
HEADS = {"grid": [10, 8], "scores": SCORES, "published": {"L3H5": 7, "L0H1": 1}, "chosen": [], "label": "heads"}


def cell(page, head: str, view: int = 0):
    return page.locator(f'#view{view} [data-head="{head}"]')


def test_a_head_is_a_cell_that_says_its_score_and_ranks(page):
    mount(page, "headmap", **HEADS)
    assert page.locator("[data-head]").count() == 80
    cell(page, "L3H5").hover()
    assert line(page) == "L3H5: score 0.251, rank 2 of 80, published rank 7"
    assert cell(page, "L3H5").get_attribute("aria-label") == line(page)
    cell(page, "L0H0").hover()
    assert line(page) == "L0H0: score 0.041, rank 15 of 80, not on the published list"
    put(page, published={}, scores=[0.00123, *SCORES[1:-1], None])
    assert cell(page, "L0H0").get_attribute("aria-label") == "L0H0: score 0.0012, rank 39 of 79"
    assert cell(page, "L9H7").get_attribute("aria-label") == "L9H7: no score"
    page.mouse.move(900, 700)
    assert line(page) == "no head knocked out"


def test_layer_0_is_at_the_bottom_as_in_the_printed_maps_and_head_0_on_the_left(page):
    mount(page, "headmap", **HEADS)
    (x0, y0, *_), (x1, y1, *_), (x2, y2, *_) = (box_of(page, f'[data-head="{h}"]') for h in ("L0H0", "L1H0", "L0H1"))
    assert (x1 == x0, y1 < y0) == (y2 == y0, x2 > x0) == (True, True)


def test_brightness_is_the_score_on_cividis_from_0(page):
    mount(page, "headmap", **HEADS)
    for head, i in (("L0H1", 1), ("L3H5", 29), ("L2H0", 16), ("L9H7", 79)):
        fill = cell(page, head).get_attribute("fill")
        shown = [int(part) for part in fill.removeprefix("rgb(").removesuffix(")").split(",")]
        meant = 255 * np.array(to_rgb(colormaps["cividis"](SCORES[i] / max(SCORES))))
        assert np.abs(np.array(shown) - meant).max() < 8, head


def test_a_click_knocks_out_and_puts_back_in_every_view(page):
    mount(page, "headmap", views=2, **HEADS)
    cell(page, "L3H5").click()
    cell(page, "L9H0", view=1).click()
    assert got(page, "chosen") == saved(page, "chosen")[-1] == [[3, 5], [9, 0]]
    for view in (0, 1):
        pressed = page.locator(f'#view{view} [aria-pressed="true"]')
        assert pressed.evaluate_all("cells => cells.map((c) => c.dataset.head)") == ["L3H5", "L9H0"]
        assert page.locator(f"#view{view} .vrh-grid .vrh-mark").count() == 2
    page.mouse.move(900, 5)
    cell(page, "L3H5").evaluate("cell => cell.blur()")
    cell(page, "L9H0", view=1).evaluate("cell => cell.blur()")
    assert line(page) == "knocked out: L3H5, L9H0"
    put(page, word="shown")
    assert line(page) == "shown: L3H5, L9H0" and page.locator("#view0 .vrh-legend").inner_text().startswith("shown")
    cell(page, "L3H5").click()  # the cross lies over the cell, and lets the click through
    assert got(page, "chosen") == [[9, 0]]


def test_the_mark_lies_on_the_head_in_vermillion(page):
    mount(page, "headmap", **HEADS | {"chosen": [[4, 6]]})
    x, y, width, height = box_of(page, '[data-head="L4H6"]')
    frame = box_of(page, '.vrh-grid .vrh-mark path[stroke="#D55E00"]')
    assert frame == pytest.approx((x, y, width, height), abs=2)
    put(page, chosen=[[0, 0], [99, 0], [0, 8]])  # of another model's grid: not drawn
    assert page.locator(".vrh-grid .vrh-mark").count() == page.locator('[aria-pressed="true"]').count() == 1


def test_keys_walk_the_grid_through_one_tab_stop(page):
    mount(page, "headmap", **HEADS)
    here = "document.activeElement.dataset?.head"
    page.keyboard.press("Tab")
    assert page.evaluate(here) == "L0H0"
    for key, head in [("ArrowUp", "L1H0"), ("ArrowRight", "L1H1"), ("End", "L1H7"), ("ArrowRight", "L1H7"),
                      ("ArrowDown", "L0H7"), ("ArrowDown", "L0H7"), ("ArrowLeft", "L0H6"), ("Home", "L0H0"),
                      ("ArrowLeft", "L0H0"), ("ArrowRight", "L0H1")]:  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate(here) == head, key
    assert line(page).startswith("L0H1: score 0.26")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert got(page, "chosen") == [[0, 1], [0, 2]]
    page.keyboard.press("Enter")
    assert got(page, "chosen") == [[0, 1]]
    page.keyboard.press("Escape")
    assert got(page, "chosen") == saved(page, "chosen")[-1] == []
    page.keyboard.press("Tab")
    assert page.evaluate(here) is None
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(here) == "L0H2"  # where the keys had been


def test_focus_outlives_new_scores_and_choices(page):
    mount(page, "headmap", **HEADS)
    cell(page, "L2H3").focus()
    put(page, chosen=[[2, 3]], scores=SCORES[::-1], published={})
    assert page.evaluate("document.activeElement.dataset.head") == "L2H3"
    assert line(page) == cell(page, "L2H3").get_attribute("aria-label")


def test_a_disabled_map_still_tells_and_takes_nothing(page):
    mount(page, "headmap", **HEADS | {"disabled": True, "chosen": [[1, 1]]})
    cell(page, "L3H5").click(force=True)  # Playwright itself would wait for it to be enabled
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert got(page, "chosen") == [[1, 1]] and saved(page, "chosen") == []
    assert line(page).startswith("L3H5: score")
    assert cell(page, "L3H5").get_attribute("aria-disabled") == "true"
    put(page, disabled=False)
    page.keyboard.press("Enter")
    assert got(page, "chosen") == [[1, 1], [3, 5]]


def test_a_grid_of_36_by_32_fits_and_hits_the_right_cell(page):
    values = HEADS | {"grid": [36, 32], "scores": [i / 1152 for i in range(1152)], "published": {}}
    mount(page, "headmap", **values)
    assert page.locator("[data-head]").count() == 1152
    grid = page.locator(".vrh-grid").bounding_box()
    assert 440 < grid["width"] <= 520 and grid["height"] < 620
    x, y, width, height = box_of(page, '[data-head="L35H31"]')
    assert width == height >= 12
    assert x + width < grid["x"] + grid["width"] and y + height < grid["y"] + grid["height"]
    page.mouse.click(x + width / 2, y + height / 2)
    assert got(page, "chosen") == [[35, 31]]
    assert line(page) == "L35H31: score 0.999, rank 1 of 1152"
    put(page, grid=[10, 8], scores=SCORES, chosen=[])  # another model
    assert page.locator("[data-head]").count() == 80


# ---- Picture

RING = "M20 20H60V60H20Z M30 30H50V50H30Z"  # a square with a square hole
PICTURE = {
    "image": png(100, 80), "size": [100, 80], "caption": "the left ring", "label": "a scene", "chosen": -1,
    "boxes": [
        {"name": "reply", "label": "reply, 4 heads cut", "box": [40, 10, 90, 50]},
        {"name": "referent", "label": "referent", "box": [18, 18, 62, 62]},
        {"name": "unmasked", "label": "unmasked reply", "box": None},
        {"name": "sft", "label": "fine-tuned", "box": [90, 70, 70, 60]},
    ],
    "segments": [{"name": "ring", "path": RING}, {"name": "neighbour", "path": "M60 20H80V60H60Z"},
                 {"name": "inner square", "path": "M35 35H45V45H35Z"}],
}  # fmt: skip


def at_pixel(page, x: float, y: float) -> tuple[float, float]:
    """Where on the page a pixel of the original picture is, as the image itself says."""
    image = page.locator("#view0 img").bounding_box()
    width, height = got(page, "size")
    return image["x"] + x * image["width"] / width, image["y"] + y * image["height"] / height


@pytest.mark.parametrize("width, height, shown", [(100, 80, 400), (640, 480, 420), (300, 100, 420), (50, 400, 70)])
def test_boxes_lie_where_the_picture_has_them(page, width, height, shown):
    x0, y0, x1, y1 = box = [0.1 * width, 0.2 * height, 0.7 * width, 0.9 * height]
    boxes = [{"name": "referent", "label": "referent", "box": box}]
    mount(page, "picture", image=png(width, height), size=[width, height], boxes=boxes, chosen=-1)
    image = page.locator("img").bounding_box()
    assert image["width"] == pytest.approx(shown, abs=0.5)
    assert image["height"] == pytest.approx(shown * height / width, abs=0.5)
    (left, top), (right, bottom) = at_pixel(page, x0, y0), at_pixel(page, x1, y1)
    assert box_of(page, '[data-name="referent"]') == pytest.approx((left, top, right - left, bottom - top), abs=0.6)
    pixelated = page.locator("img").evaluate("image => getComputedStyle(image).imageRendering") == "pixelated"
    assert pixelated == (width < 420)


def test_a_box_says_its_name_its_pixels_and_its_meaning(page):
    mount(page, "picture", **PICTURE)
    drawn = page.locator(".vrh-boxes [data-name]").evaluate_all(
        "all => all.map((r) => [r.dataset.name, r.dataset.box, r.getAttribute('stroke'), "
        "r.getAttribute('stroke-dasharray') !== ''])"
    )
    assert drawn == [
        ["referent", "18,18,62,62", "#009E73", False],
        ["reply", "40,10,90,50", "#D55E00", True],
        ["sft", "90,70,70,60", "#0072B2", True],
    ]
    legend = page.locator(".vrh-legend").inner_text()
    assert sorted(legend.split("\n")) == ["fine-tuned", "no box: unmasked reply", "referent", "reply, 4 heads cut"]
    assert page.locator(".vrh-legend svg").count() == 3
    x, y, width, height = box_of(page, '[data-name="sft"]')  # corners the wrong way round
    assert (x, y) == pytest.approx(at_pixel(page, 70, 60)) and (width, height) == pytest.approx((80, 40))
    assert page.locator(".vrh-caption").inner_text() == "the left ring"
    assert page.locator("img").get_attribute("alt") == "a scene"
    put(page, boxes=[{"name": "unmasked", "label": "unmasked reply", "box": [1, 2, 3, 4]}], caption="<b>another</b>")
    strokes = page.locator(".vrh-boxes rect").evaluate_all("all => all.map((r) => r.getAttribute('stroke'))")
    assert strokes == ["#fff", "#000000"]  # a casing, or it were lost on a dark picture
    assert page.locator(".vrh-caption").inner_text() == "<b>another</b>"


@pytest.mark.parametrize("pixel, chosen", [((25, 40), 0), ((58, 58), 0), ((62, 40), 1), ((40, 40), 2), ((32, 32), -1),
                                           ((10, 10), -1), ((79, 22), 1), ((81, 22), -1)])  # fmt: skip
def test_a_click_chooses_the_segment_under_it_and_none_in_a_hole(page, pixel, chosen):
    mount(page, "picture", **PICTURE)
    page.mouse.click(*at_pixel(page, *pixel))
    assert got(page, "chosen") == chosen
    assert saved(page, "chosen") == ([] if chosen == -1 else [chosen])
    pressed = page.locator('[aria-pressed="true"]').evaluate_all("all => all.map((p) => Number(p.dataset.segment))")
    assert pressed == ([] if chosen == -1 else [chosen])


def test_a_second_click_takes_the_choice_back_in_every_view(page):
    mount(page, "picture", views=2, **PICTURE)
    page.mouse.click(*at_pixel(page, 25, 40))
    page.mouse.click(*at_pixel(page, 65, 40))
    assert page.locator('#view1 [data-segment="1"]').get_attribute("aria-pressed") == "true"
    page.mouse.click(*at_pixel(page, 65, 40))
    assert saved(page, "chosen") == [0, 1, -1]
    assert page.locator('[aria-pressed="true"]').count() == 0
    put(page, chosen=2)
    page.locator("#view0 .vrh-segment").nth(1).evaluate("segment => segment.blur()")
    page.mouse.move(900, 700)
    assert line(page) == "chosen: inner square"


def test_a_segment_shows_when_hovered_and_says_its_name(page):
    mount(page, "picture", **PICTURE)
    fill = "segment => getComputedStyle(segment).fill"
    ring = page.locator('[data-segment="0"]')
    assert ring.evaluate(fill) == "rgba(0, 0, 0, 0)" and line(page) == "3 segments to choose from"
    page.mouse.move(*at_pixel(page, 25, 40))
    assert ring.evaluate(fill).startswith("rgba(86, 180, 233") and line(page) == "ring"
    page.mouse.move(*at_pixel(page, 32, 32))  # the hole
    assert ring.evaluate(fill) == "rgba(0, 0, 0, 0)" and line(page) == "3 segments to choose from"


def test_keys_walk_the_segments_through_one_tab_stop(page):
    mount(page, "picture", **PICTURE)
    here = "document.activeElement.dataset?.segment"
    page.keyboard.press("Tab")
    for key, segment in [("Home", "0"), ("ArrowLeft", "0"), ("ArrowRight", "1"), ("ArrowDown", "2"), ("ArrowDown", "2"),
                         ("ArrowUp", "1"), ("End", "2"), ("ArrowLeft", "1")]:  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate(here) == segment, key
    assert line(page) == "neighbour"
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert saved(page, "chosen") == [1, 2, -1]
    put(page, disabled=True)
    page.keyboard.press("Enter")
    page.mouse.click(*at_pixel(page, 25, 40))
    assert got(page, "chosen") == -1
    page.keyboard.press("Tab")
    assert page.evaluate(here) is None


def test_a_new_picture_replaces_the_old_one(page):
    mount(page, "picture", **PICTURE)
    before = page.locator("img").screenshot()
    page.evaluate(
        "text => model.set('image', new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer))",
        base64.b64encode(png(100, 80, seed=1)).decode(),
    )
    page.locator("img").evaluate("image => image.decode()")
    assert page.locator("img").screenshot() != before
    page.evaluate("model.set('image', new DataView(new ArrayBuffer(0)))")
    assert line(page) == "no picture yet" and not page.locator("img").is_visible()


# ---- Stepper

ROWS, COLS = 4, 5
REPLY = ["[", "12", ",", " 3", "4", "]"]
SETS = ["all heads", "top 4", "L3H5"]


def hottest(which: int, token: int) -> tuple[int, int]:
    """Where the hand-made map of a set and a token peaks: another cell for each of the two."""
    return (which + token) % ROWS, (2 * token + which) % COLS


def stepper_values(tokens=REPLY, **more) -> dict:
    maps = np.full((len(SETS), len(tokens), ROWS, COLS), 20, np.uint8)
    for s, t in itertools.product(range(len(SETS)), range(len(tokens))):
        maps[s, t, *hottest(s, t)] = 255
    mass = [[round(0.1 * s + 0.01 * t, 2) for t in range(len(tokens))] for s in range(len(SETS))]
    return {
        "image": png(100, 80), "size": [100, 80], "tokens": list(tokens), "sets": SETS, "shown": "top 4",
        "maps": maps.tobytes(), "peaks": [0.5, 0.123, 0.9], "mass": mass, "grid": [ROWS, COLS],
        "evidence": [[1, 1], [1, 2], [2, 2]], "boxes": PICTURE["boxes"], "step": 0, "opacity": 0.65, "label": "a reply",
    } | more  # fmt: skip


def heat(page) -> np.ndarray:
    """What the canvas holds, [rows, cols, 4]."""
    pixels, width = page.locator("#view0 canvas").evaluate(
        "c => [[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data], c.width]"
    )
    return np.array(pixels).reshape(-1, width, 4)


def brightest(page) -> tuple[int, int]:
    values = heat(page)[..., :3].sum(-1)
    return tuple(int(i) for i in np.unravel_index(values.argmax(), values.shape))


def test_the_map_of_the_token_and_the_set_is_shown_in_magma(page):
    mount(page, "stepper", **stepper_values())
    for which, token in [(1, 0), (1, 5), (0, 3), (2, 2)]:
        put(page, shown=SETS[which], step=token)
        assert heat(page).shape == (ROWS, COLS, 4) and brightest(page) == hottest(which, token)
        for value, at in [(255, hottest(which, token)), (20, hottest(which, token + 1))]:
            assert heat(page)[at][:3] == pytest.approx(255 * np.array(colormaps["magma"](value)[:3]), abs=4)
    canvas, image = (page.locator(tag).bounding_box() for tag in ("canvas", "img"))
    assert canvas == image
    assert page.locator("canvas").evaluate("c => getComputedStyle(c).imageRendering") == "pixelated"


def test_the_hottest_cell_of_the_page_is_where_the_map_says(page):
    mount(page, "stepper", **stepper_values(boxes=[], evidence=[], opacity=1, step=3))
    shot = np.asarray(Image.open(io.BytesIO(page.locator("canvas").screenshot())).convert("L"))
    height, width = shot.shape
    cells = shot[: height // ROWS * ROWS, : width // COLS * COLS]
    cells = cells.reshape(ROWS, height // ROWS, COLS, width // COLS).mean((1, 3))
    assert np.unravel_index(cells.argmax(), cells.shape) == hottest(1, 3)


def test_arrows_step_and_stop_at_the_ends(page):
    mount(page, "stepper", views=2, **stepper_values())
    first = page.locator("#view0 .vrh-frame").screenshot()
    page.locator("#view0 .vrh-step").focus()
    page.keyboard.press("ArrowLeft")
    assert got(page, "step") == 0 and saved(page, "step") == []
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert saved(page, "step") == [1, 2]
    assert page.locator("#view0 .vrh-frame").screenshot() != first
    assert brightest(page) == hottest(1, 2)
    for view in (0, 1):
        current = page.locator(f'#view{view} [aria-current="true"]')
        assert current.count() == 1 and current.inner_text() == ","
        assert page.locator(f"#view{view} .vrh-step").input_value() == "2"
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert got(page, "step") == 5
    page.keyboard.press("Home")
    assert got(page, "step") == 0
    assert saved(page, "step") == [1, 2, 5, 0]  # nothing saved where nothing moved


def test_arrows_step_from_the_menu_of_sets_and_from_the_picture_but_not_from_opacity(page):
    mount(page, "stepper", **stepper_values())
    page.locator(".vrh-shown").focus()
    page.keyboard.press("ArrowRight")
    assert (got(page, "step"), got(page, "shown")) == (1, "top 4")
    page.locator(".vrh-frame").click(position={"x": 5, "y": 5})
    page.keyboard.press("ArrowRight")
    assert got(page, "step") == 2
    page.locator(".vrh-opacity").focus()
    page.keyboard.press("ArrowLeft")
    assert got(page, "step") == 2 and got(page, "opacity") == pytest.approx(0.6)
    page.keyboard.press("Home")
    assert got(page, "step") == 2 and saved(page, "opacity")[-1] == 0
    assert page.locator("canvas").evaluate("c => getComputedStyle(c).opacity") == "0"


def test_the_line_names_the_token_and_the_attention_on_the_referent(page):
    mount(page, "stepper", **stepper_values(step=3))
    words = "attention on the referent's image tokens"
    assert line(page) == f'token 4 of 6 " 3" · {words}: 0.13, summed over the heads of top 4'
    page.locator(".vrh-shown").select_option("L3H5")
    assert got(page, "shown") == saved(page, "shown")[-1] == "L3H5"
    assert line(page) == f'token 4 of 6 " 3" · {words}: 0.23, of L3H5'
    assert brightest(page) == hottest(2, 3)
    assert "0.90" in page.locator(".vrh-scale").inner_text()
    put(page, mass=[])
    assert line(page) == 'token 4 of 6 " 3"'


def test_a_token_is_a_button(page):
    mount(page, "stepper", **stepper_values(["[", "4\n", "<b>"]))
    buttons = page.locator(".vrh-token")
    assert buttons.all_inner_texts() == ["[", "4⏎", "<b>"]
    buttons.nth(2).click()
    assert got(page, "step") == 2 and buttons.nth(2).get_attribute("aria-current") == "true"
    page.keyboard.press("ArrowLeft")  # focus goes along
    assert page.evaluate("document.activeElement.dataset.token") == "1"
    assert buttons.nth(1).evaluate("b => getComputedStyle(b).fontWeight") == "700"
    assert buttons.nth(0).evaluate("b => getComputedStyle(b).fontWeight") == "400"
    assert page.locator('.vrh-token[tabindex="0"]').count() == 1


def test_the_evidence_is_outlined_along_its_outer_edge(page):
    mount(page, "stepper", **stepper_values())
    x, y, width, height = box_of(page, '.vrh-over path[stroke="#009E73"]')
    (left, top), (right, bottom) = at_pixel(page, 20, 20), at_pixel(page, 60, 60)  # rows 1-2, columns 1-2 of 4 x 5
    assert (x, y, x + width, y + height) == pytest.approx((left, top, right, bottom), abs=0.6)
    d = page.locator('.vrh-over path[stroke="#009E73"]').get_attribute("d")
    assert d.count("M") == 8  # three cells have twelve sides, and share two, each counted twice
    assert page.locator(".vrh-boxes [data-name]").count() == 3
    assert "image tokens of the referent" in page.locator("#view0").inner_text()
    put(page, evidence=[])
    assert page.locator('.vrh-over path[stroke="#009E73"]').count() == 0


@pytest.mark.parametrize("step, shown", [(-3, 0), (99, 5), (None, 0)])
def test_a_step_out_of_range_shows_the_nearest_and_is_left_alone(page, step, shown):
    mount(page, "stepper", **stepper_values(step=step))
    assert page.locator('[aria-current="true"]').get_attribute("data-token") == str(shown)
    assert brightest(page) == hottest(1, shown)
    assert got(page, "step") == step


def test_a_reply_of_300_tokens_scrolls_and_keeps_the_current_one_in_sight(page):
    mount(page, "stepper", **stepper_values([f" {i}" for i in range(300)]))
    row = page.locator(".vrh-tokens")
    assert row.bounding_box()["height"] < 200 and page.locator(".vrh-stepper").bounding_box()["width"] <= 540
    page.locator(".vrh-step").focus()
    page.keyboard.press("End")
    (last, outside) = page.locator('[aria-current="true"]').bounding_box(), row.bounding_box()
    assert page.locator('[aria-current="true"]').inner_text().strip() == "299"
    assert outside["y"] <= last["y"] and last["y"] + last["height"] <= outside["y"] + outside["height"]
    page.keyboard.press("Home")
    assert row.evaluate("row => row.scrollTop") < 10


def test_maps_that_do_not_fit_are_not_drawn(page):
    values = stepper_values()
    one_more = values["maps"][: ROWS * COLS * (len(REPLY) + 1)]  # all of the first set, one token of the next
    mount(page, "stepper", **values | {"maps": one_more})
    assert page.locator("canvas").is_visible()
    put(page, step=1)
    assert not page.locator("canvas").is_visible()
    put(page, tokens=[])
    assert line(page) == "no reply yet" and page.locator(".vrh-token").count() == 0


# ---- Curve

POINTS = [[0, 90.0, 84.0, 94.0], [1, 70.0, 60.0, 78.0], [4, 35.5, 27.0, 45.0], [8, 0.0, 0.0, 3.7]]
CURVE = {
    "series": [{"name": "vrh", "label": "VRH", "colour": "#D55E00", "dash": "", "points": POINTS},
               {"name": "unmasked", "label": "unmasked", "colour": "#000000", "dash": "4 3",
                "points": [[0, 90, None, None]]}],
    "band": {"label": "random heads", "points": [[0, 90, 90, 90], [4, 80, 85, 89], [8, 70, 80, 88]]},
    "at": 4, "value": 35.5, "title": "accuracy", "note": "n=100; 95 % Wilson intervals", "label": "a curve",
    "outcomes": {"no box": 10.0, "correct": 35.5, "something new": 4.5, "wrong box": 50.0, "malformed": 0.0},
}  # fmt: skip


def test_points_stand_higher_for_accuracy_and_further_right_for_k(page):
    mount(page, "curve", **CURVE)
    dots = page.locator('[data-series="vrh"]').evaluate_all(
        "all => all.map((c) => [+c.dataset.k, +c.dataset.accuracy, c.cx.baseVal.value, c.cy.baseVal.value])"
    )
    ks, accuracies, xs, ys = np.array(dots).T
    assert [*zip(ks, accuracies)] == [(k, accuracy) for k, accuracy, *_ in POINTS]
    assert (np.diff(xs) > 0).all() and (np.diff(ys) > 0).all()
    assert ys == pytest.approx(ys[3] - accuracies * (ys[3] - ys[0]) / 90)  # a straight scale
    bars = page.locator(".vrh-interval")
    assert bars.count() == 4  # the point without an interval has no bar
    for i, (_, _, low, high) in enumerate(POINTS):
        y, height = bars.nth(i).evaluate("bar => [bar.getBBox().y, bar.getBBox().height]")
        scale = (ys[3] - ys[0]) / 90
        assert (y, y + height) == pytest.approx((ys[3] - high * scale, ys[3] - low * scale), abs=0.1)
    for k, low, _, high in CURVE["band"]["points"]:  # ranges of controls, beside the points
        x, y, height = page.locator(f'.vrh-band[data-k="{k}"]').evaluate(
            "bar => [bar.getBBox().x + bar.getBBox().width / 2, bar.getBBox().y, bar.getBBox().height]"
        )
        assert (y, y + height) == pytest.approx((ys[3] - high * scale, ys[3] - low * scale), abs=0.1)
        assert x == pytest.approx(xs[ks.tolist().index(k)] - 5, abs=0.1)
    legend = page.locator(".vrh-legend").first.inner_text()
    assert [word for word in ("VRH", "unmasked", "random heads") if word not in legend] == []


def test_the_ring_is_at_the_current_point(page):
    mount(page, "curve", **CURVE)
    svg = page.locator("svg[data-at]")
    for k, accuracy, *_ in POINTS:
        put(page, at=k, value=accuracy)
        ring = [float(page.locator(".vrh-ring").get_attribute(name)) for name in ("cx", "cy")]
        dot = page.locator(f'[data-series="vrh"][data-k="{k}"]')
        assert ring == [float(dot.get_attribute(name)) for name in ("cx", "cy")]
        assert page.locator(".vrh-at").get_attribute("d").startswith(f"M{dot.get_attribute('cx')} ")
        assert (float(svg.get_attribute("data-at")), float(svg.get_attribute("data-value"))) == (k, accuracy)
        assert f"at k={k}: {accuracy:.1f} % right" in svg.text_content()
    put(page, value=None)
    assert page.locator(".vrh-ring").count() == 0 and svg.get_attribute("data-value") == ""
    inside = box_of(page, ".vrh-at")[0]
    put(page, at=100)  # beyond every series: the axis grows
    assert box_of(page, ".vrh-at")[0] == pytest.approx(inside, abs=1)
    assert float(page.locator('[data-series="vrh"][data-k="8"]').get_attribute("cx")) < 250


def test_outcomes_fill_the_bar_in_the_order_of_the_figures(page):
    mount(page, "curve", views=2, **CURVE)
    parts = page.locator("#view0 [data-outcome]").evaluate_all(
        "all => all.map((r) => [r.dataset.outcome, r.x.baseVal.value, r.width.baseVal.value, r.getAttribute('fill')])"
    )
    assert [name for name, *_ in parts] == ["correct", "wrong box", "malformed", "no box", "something new"]
    widths = np.array([width for _, _, width, _ in parts])
    assert widths / widths.sum() * 100 == pytest.approx([35.5, 50, 0, 10, 4.5])
    assert [x for _, x, *_ in parts] == pytest.approx(parts[0][1] + np.cumsum([0, *widths[:-1]]))
    full = widths.sum()
    assert full == pytest.approx(page.locator("#view0 .vrh-rule").first.evaluate("rule => rule.getBBox().width"))
    legend = page.locator("#view0 .vrh-legend").nth(1)
    assert legend.inner_text().split("\n") == [
        "correct 35.5 %", "wrong box 50.0 %", "malformed 0.0 %", "no box 10.0 %", "something new 4.5 %",
    ]  # fmt: skip
    others = page.locator("#view1 [data-outcome]").evaluate_all("all => all.map((r) => r.getAttribute('fill'))")
    assert not {fill for *_, fill in parts} & set(others)  # ids of one page
    for fill in [*(fill for *_, fill in parts), *others]:
        assert page.locator(fill.removeprefix("url(").removesuffix(")")).count() == 1
    put(page, outcomes={"correct": 100.0})
    assert float(page.locator("#view0 [data-outcome]").get_attribute("width")) == pytest.approx(full)
    put(page, outcomes={"correct": 60.0, "no answer": 30.0})  # a tenth is not accounted for, and stays empty
    shown = page.locator("#view0 [data-outcome]").evaluate_all("all => all.map((r) => Number(r.getAttribute('width')))")
    assert shown == pytest.approx([0.6 * full, 0.3 * full])


def test_outcomes_are_told_apart_without_colour(page):
    outcomes = ["correct", "wrong box", "degenerate", "malformed", "cut off", "no box"]
    mount(page, "curve", **CURVE | {"outcomes": {name: 100 / 6 for name in outcomes}})
    hatches = page.locator("pattern path").evaluate_all("all => all.map((p) => p.getAttribute('d'))")
    assert len(set(hatches)) == 6
    fills = page.locator("pattern rect").evaluate_all("all => all.map((p) => p.getAttribute('fill'))")
    style = importlib.import_module("vrhlib.figures.style")
    assert fills == [style.COLOUR[name] for name in outcomes]


def test_a_black_line_follows_the_theme(page):
    mount(page, "curve", **CURVE)
    page.evaluate("document.body.style.setProperty('--jp-ui-font-color1', 'rgb(238, 238, 238)')")
    fill = "dot => getComputedStyle(dot).fill"
    assert page.locator('[data-series="unmasked"]').evaluate(fill) == "rgb(238, 238, 238)"
    assert page.locator('[data-series="vrh"]').first.evaluate(fill) == "rgb(213, 94, 0)"
