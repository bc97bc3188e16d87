"""08_play as a reader plays with it, in JupyterLab and in Notebook 7: the whole notebook is run in small, then k is
dragged, heads are clicked, tokens stepped with the arrow keys and a thing pointed at. What the page shows must be what
the library computes for the same heads, segment and picture."""

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.browser import harness
from vrhlib import evaluate, grounding, scoring, steering, store
from vrhlib.boxes import Box
from vrhlib.heads import Head, HeadSet
from vrhlib.live import Live
from vrhlib.wiring import load_vlm

REPOSITORY = Path(__file__).parents[2]
MODEL, N_DETECT, N_TEST, K = "nano-qwen2.5-vl", 12, 6, 4
SMALL = {"MODELS": [MODEL], "N_DETECT": N_DETECT, "N_TEST": N_TEST, "K": K}


@pytest.fixture(scope="module")
def playing(chromium, tmp_path_factory):
    """The notebook in small, a JupyterLab whose results go to a folder of their own, and what the library says."""
    root = tmp_path_factory.mktemp("root")
    (root / "data").mkdir()
    for name in ("nano", "paper"):
        (root / "data" / name).symlink_to(REPOSITORY / "data" / name)
    notebook = json.loads((REPOSITORY / "notebooks" / "08_play.ipynb").read_text())
    (parameters,) = [c for c in notebook["cells"] if c["id"] == "parameters"]
    parameters["source"].append("\n" + "\n".join(f"{name} = {value!r}" for name, value in SMALL.items()))
    path = root / "08_play.ipynb"
    path.write_text(json.dumps(notebook))
    patch = pytest.MonkeyPatch()
    patch.setenv("VRHLIB_ROOT", str(root))
    patch.setattr(store, "ROOT", root)
    lab = harness.Lab(tmp_path_factory.mktemp("lab"))
    vlm = load_vlm(MODEL, device="cpu")
    at = {c["id"]: i for i, c in enumerate(notebook["cells"])}
    detect = grounding("scenes", "detect", N_DETECT)
    test, asked = grounding("scenes", "test", N_TEST), grounding("scenes", "test", N_TEST, pairs=True)
    yield SimpleNamespace(lab=lab, path=path, at=at, vlm=vlm, detect=detect, test=test, asked=asked)
    lab.stop()
    patch.undo()


def shows(output, name: str, box) -> None:
    """The picture comes to show this box under this name, in pixels of the picture; None: it comes to show none."""
    from playwright.sync_api import expect

    found = output.locator(f'.vrh-picture [data-name="{name}"]')
    if box is None:
        expect(found).to_have_count(0)
    else:
        expect(found).to_have_attribute("data-box", ",".join(f"{round(float(x), 1):g}" for x in box))


def shoot(output, name: str) -> None:
    """Keep what is seen for the README, if VRHLIB_SCREENSHOTS names a folder for it."""
    if folder := os.environ.get("VRHLIB_SCREENSHOTS"):
        seen = Image.open(io.BytesIO(output.locator(".vrh-view").first.screenshot(animations="disabled")))
        seen.convert("RGB").save(Path(folder) / f"{name}.png", optimize=True)


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_reader_plays(page, playing, app):
    from playwright.sync_api import expect

    page.set_viewport_size({"width": 1700, "height": 1500})  # a view whole
    notebook = playing.lab.open(page, playing.path, app)
    notebook.run_all(timeout=400)
    scores = scoring.detect(playing.vlm, playing.detect)
    asks = Live(playing.vlm)
    alerts = page.locator('.vrh-view [role="alert"]')
    assert alerts.count() == 0
    cells = notebook.contents()  # beside each live view stands its picture
    for name in ("play-explorer", "play-heads", "play-steps", "play-point"):
        shown = [output["data"] for output in cells[playing.at[name]]["outputs"] if "data" in output]
        assert any({"image/png", "application/vnd.jupyter.widget-view+json"} <= set(data) for data in shown), name

    # Explorer: k is dragged from 4 to 2, then one further by key; the curve's point and the picture's box follow.
    explorer = notebook.output(playing.at["play-explorer"])
    swept = evaluate.sweep_replies(playing.vlm, playing.test, {"vrh": scores.top(K)}, [1, 2, 4])
    right = (swept.outcome == "correct").groupby(swept.k).mean() * 100
    plot = explorer.locator("[data-at]")
    expect(plot).to_have_attribute("data-at", "4")
    first = playing.test[0].id
    replied = swept[(swept.condition == "vrh") & (swept.id == first)].set_index("k")
    shows(explorer, "reply", Box.of(replied.loc[4]))
    shows(explorer, "referent", playing.test[0].box)
    handle, track = explorer.get_by_role("slider").first, explorer.locator(".noUi-base").first.bounding_box()
    most = int(float(handle.get_attribute("aria-valuemax")))
    begin = handle.bounding_box()
    y = begin["y"] + begin["height"] / 2
    page.mouse.move(begin["x"] + begin["width"] / 2, y)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * 2 / most, y, steps=4)
    page.mouse.up()
    expect(plot).to_have_attribute("data-at", "2")
    assert float(plot.get_attribute("data-value")) == pytest.approx(right[2])
    shows(explorer, "reply", Box.of(replied.loc[2]))
    shoot(explorer, "explorer")
    handle.press("ArrowRight")
    expect(explorer).to_contain_text("k=3 was not measured here (stored: k = 1, 2, 4)")
    shows(explorer, "reply", None)
    explorer.get_by_role("button", name="run live").click()
    expect(explorer).to_contain_text("computed and stored")
    three = evaluate.ablation_sweep(playing.vlm, playing.test, {"vrh": scores.top(3)}, [3]).set_index("k")
    expect(explorer).to_contain_text(f"at k=3: {three.accuracy[3]:.1f} % right")
    assert float(plot.get_attribute("data-value")) == pytest.approx(three.accuracy[3])
    # Run again, the cell goes on where it was.
    notebook.run_cell(playing.at["play-explorer"])
    expect(notebook.output(playing.at["play-explorer"]).locator("[data-at]")).to_have_attribute("data-at", "3")

    # Knock-out: none, then two heads by click and by key.
    heads = notebook.output(playing.at["play-heads"])
    heads.get_by_role("button", name="none").click()
    expect(heads).to_contain_text("without no head")
    one, two = scores.top(2)
    heads.locator(f'[data-head="{one}"]').click()
    expect(heads).to_contain_text(f"without {one}")
    heads.locator(f'[data-head="{two}"]').focus()
    page.keyboard.press("Enter")
    expect(heads).to_contain_text(f"without {one}, {two}")
    pair = HeadSet((Head(*one), Head(*two)), playing.vlm.grid, "two heads")
    reply = asks.without(playing.test)(first, pair)
    expect(heads).to_contain_text(reply["text"])
    shows(heads, "reply", Box.of(reply))
    shows(heads, "unmasked", Box.of(asks.answer(playing.test[0])))
    table = evaluate.ablation_sweep(playing.vlm, playing.test[:1], {"vrh": pair}, [2]).set_index("condition")
    assert (reply["outcome"] == "correct") == (table.accuracy["vrh"] == 100)

    heads.get_by_role("button", name="top k").click()
    shows(heads, "reply", Box.of(asks.without(playing.test)(first, scores.top(K))))
    shoot(heads, "knockout")

    # Stepper: the arrow keys go from token to token, and the pixels of the overlay change.
    steps = notebook.output(playing.at["play-steps"])
    now = steps.locator('[aria-current="true"]')
    look = asks.looks(playing.test[:1])[f"1: {playing.test[0].text}"]
    steps.locator(".vrh-tokens button").first.click()
    heat = steps.locator("canvas").first
    seen = []
    for i in range(4):
        expect(steps).to_contain_text(f"token {i + 1} of {len(look.tokens)}")
        assert now.inner_text().strip() == look.tokens[i].strip() and now.count() == 1
        seen.append(heat.evaluate("c => c.toDataURL()"))
        if i == 3:  # the best head looks
            shoot(steps, "stepper")
        page.keyboard.press("ArrowRight")
    top = look.attention[scores.top(K).mask()].sum(0)[:4].round(2)
    assert len(set(seen)) == len({row.tobytes() for row in top}) > 2, "tokens have maps of their own"
    steps.locator(f'[data-head="{one}"]').click()
    expect(steps.locator("select.vrh-shown")).to_have_value(str(one))

    # Pointing: a thing that the text does not name is clicked, and the box is what steering computes.
    point = notebook.output(playing.at["play-point"])
    sample, things = playing.asked[0], steering.segments(playing.asked)[playing.asked[0].image_key]
    others = [i for i, thing in enumerate(things) if thing.box.iou(sample.box) < 0.5]
    assert int(point.locator('[aria-pressed="true"]').get_attribute("data-segment")) == others[0]
    point.locator(f'[data-segment="{others[0]}"]').click()  # let go
    expect(point).to_contain_text("Click a thing")
    shows(point, "reply", None)
    page.mouse.move(2, 2)
    point.locator(f'[data-segment="{others[0]}"]').blur()
    shoot(point, "steering_before")
    for i in others[1:3]:
        point.locator(f'[data-segment="{i}"]').click()
        expect(point).to_contain_text(f"heads look at the {things[i].name}")
        reply = asks.toward(playing.asked)(sample.id, i, scores.top(K))
        expect(point).to_contain_text(reply["text"])
        shows(point, "reply", Box.of(reply))
        expect(point).to_contain_text(f"IoU {reply['iou']:.2f} with the {things[i].name}")
        if reply["outcome"] == "correct":
            shoot(point, "steering_after")
    assert alerts.count() == 0
