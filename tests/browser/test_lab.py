"""The harness itself: a page is watched, and a slider and an anywidget really move in JupyterLab and Notebook 7."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.browser import harness

SLIDER = """
import ipywidgets
slider = ipywidgets.IntSlider(20, 0, 100, description="k")
said = ipywidgets.Label()
slider.observe(lambda change: setattr(said, "value", f"k is {change.new}"), "value")
ipywidgets.VBox([slider, said])
"""
COUNTER = '''
import anywidget, traitlets
class Counter(anywidget.AnyWidget):
    _esm = """
    function render({ model, el }) {
        const button = document.createElement("button");
        const show = () => { button.textContent = `clicked ${model.get("count")}`; };
        button.dataset.lmSuppressShortcuts = "true";
        button.onclick = () => { model.set("count", model.get("count") + 1); model.save_changes(); };
        model.on("change:count", show);
        show();
        el.append(button);
    }
    export default { render };
    """
    count = traitlets.Int(0).tag(sync=True)
counter = Counter()
heard = ipywidgets.Label("Python heard nothing")
counter.observe(lambda change: setattr(heard, "value", f"Python heard {change.new}"), "count")
ipywidgets.VBox([counter, heard])
'''


def write(folder, *cells):
    path = folder / "a notebook.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Two widgets"), *map(new_code_cell, cells)]), path)
    return path


# ---- notebooks


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_widgets_move(page, lab, tmp_path, app):
    from playwright.sync_api import expect

    filler = "for i in range(60): print(i)"  # the counter is far below the fold
    notebook = lab.open(page, write(tmp_path, SLIDER, filler, COUNTER), app)
    notebook.run_all()

    output = notebook.output(1)
    handle = output.get_by_role("slider")
    expect(handle).to_have_attribute("aria-valuenow", "20.0")
    start, track = handle.bounding_box(), output.locator(".noUi-base").bounding_box()
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * 0.75, start["y"] + start["height"] / 2, steps=5)
    page.mouse.up()
    expect(output).to_contain_text(re.compile("k is 7[4-7]"))  # by a pixel
    if app == "lab":  # Notebook 7 keeps the arrows for itself, unless an element has data-lm-suppress-shortcuts
        k = int(float(handle.get_attribute("aria-valuenow")))
        handle.press("ArrowRight")
        handle.press("ArrowRight")
        expect(output).to_contain_text(f"k is {k + 2}")

    output = notebook.output(3)
    expect(output).to_contain_text("Python heard nothing")
    button = output.get_by_role("button")
    button.click()
    button.press("Enter")  # which would begin to edit the cell
    expect(button).to_have_text("clicked 2")
    expect(output).to_contain_text("Python heard 2")


def test_a_failing_cell_is_raised_with_its_traceback(page, lab, tmp_path):
    notebook = lab.open(page, write(tmp_path, "a = 1", "a / 0", "b = 2"))
    with pytest.raises(harness.CellFailed, match=r"(?s)cell 2:.*a / 0.*ZeroDivisionError"):
        notebook.run_all()
    notebook.run_cell(-1)
    with pytest.raises(harness.CellFailed, match="cell 2:"):
        notebook.run_cell(2)


def test_the_kernel_imports_this_checkout_and_ends_with_its_page(chromium, lab, tmp_path):
    with harness.watched_page(chromium) as page:
        notebook = lab.open(page, write(tmp_path, "import sys, vrhlib; print(sys.executable); print(vrhlib.__file__)"))
        notebook.run_all()
        (output,) = notebook.contents()[1]["outputs"]
        assert len(lab.ask("api/kernels")) == 1
    python, vrhlib = "".join(output["text"]).split("\n")[:2]
    assert python == harness.sys.executable
    assert vrhlib == str(harness.ROOT / "vrhlib" / "__init__.py")
    assert lab.ask("api/kernels") == []


def test_a_lab_that_does_not_start_shows_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.Lab, "OPTIONS", ("--no-such-option",))
    with pytest.raises(RuntimeError, match=r"(?s)ended at once. Its log:.*unrecognized arguments: --no-such-option"):
        harness.Lab(tmp_path / "lab", timeout=30)


# ---- pages


HERE = "<title>here</title><script>%s</script>"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("console.error('one', 'two')", "console error: one two"),
        ("setTimeout(() => { throw new Error('lost') })", "uncaught Error: lost"),
        ("Promise.reject(new Error('broken'))", "uncaught Error: broken"),
        ("setTimeout(() => { throw 'a string' })", "a string"),
        ("fetch('https://example.org/x.js').catch(() => 0)", "request to https://example.org/x.js"),
        ("new Image().src = 'http://192.0.2.1/x.png'", "request to http://192.0.2.1/x.png"),
        ("new WebSocket('wss://example.org/socket')", "request to wss://example.org/socket"),
        ("fetch('http://127.0.0.1.example.org/').catch(() => 0)", "request to http://127.0.0.1.example.org/"),
    ],
)
def test_a_problem_on_the_page_fails_the_test(chromium, script, problem):
    problems = []
    with pytest.raises(AssertionError, match="the page had problems"):
        with harness.watched_page(chromium, problems) as page:
            page.set_content(HERE % script)
            page.wait_for_timeout(200)
    assert len(problems) == 1 and problem in problems[0].splitlines()[0]


def test_a_quiet_page_passes(page):
    picture = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw=="
    page.set_content(HERE % f"console.warn('hm'); new Image().src = '{picture}'; URL.createObjectURL(new Blob())")
    assert page.title() == "here" and page.viewport_size == harness.SIZE


# ---- the browser


class Playwright:
    """Starts what exists, as far as `launch` can tell."""

    def __init__(self, *works: str | None):
        self.works, self.chromium, self.tried = works, self, []

    def launch(self, executable_path, **options):
        self.tried.append(executable_path)
        if executable_path not in self.works:
            raise ValueError("would not start\nand more")
        return executable_path


def tools(folder, *names) -> dict[str, str]:
    for name in names:
        (folder / name).touch(0o755)
    return {"PATH": str(folder)}


def test_the_first_browser_that_starts_is_taken(tmp_path):
    environment = tools(tmp_path, "google-chrome", "chromium-browser")
    stub, chrome = str(tmp_path / "chromium-browser"), str(tmp_path / "google-chrome")
    assert harness.launch(Playwright(chrome), environment) == chrome, "a stub of Ubuntu's is no reason to stop"
    own = Playwright(None)
    assert harness.launch(own, environment) is None and own.tried == [stub, chrome, None], "Playwright's own, last"
    asked = Playwright(chrome, stub)
    assert harness.launch(asked, environment | {"VRHLIB_BROWSER": chrome}) == chrome and asked.tried == [chrome]


def test_without_a_browser_it_says_what_to_do(tmp_path):
    with pytest.raises(harness.NoBrowser, match="chromium-browser.*`apt install chromium`.*VRHLIB_BROWSER=") as caught:
        harness.launch(Playwright(), {"PATH": str(tmp_path)})
    assert "would not start" in str(caught.value) and "and more" not in str(caught.value)
    with pytest.raises(RuntimeError, match="VRHLIB_BROWSER=/nowhere does not start: would not start"):
        harness.launch(Playwright(), tools(tmp_path, "chromium") | {"VRHLIB_BROWSER": "/nowhere"})


def test_ci_cannot_pass_by_skipping():
    assert harness.without_a_browser({}) == "skip"
    assert harness.without_a_browser({"CI": "true"}) == "fail"
    assert harness.without_a_browser({"CI": "true", "VRHLIB_NO_BROWSER": "1"}) == "skip"
