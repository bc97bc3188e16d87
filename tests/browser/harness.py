"""A real browser and a real JupyterLab for tests: find one, watch a page, drive a notebook as a reader would.

    def test_a_view(page, lab):
        notebook = lab.open(page, path)  # or app="notebook", for Notebook 7
        notebook.run_all()
        notebook.output(2).get_by_role("slider").press("ArrowRight")

Notebook 7 sees a key before the output does and keeps those it has a shortcut for (arrows, Enter, letters), unless the
element or one above it has the attribute data-lm-suppress-shortcuts. JupyterLab asks the output first.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = {"width": 1280, "height": 900}

# ---- the browser


class NoBrowser(Exception):
    """There is none here; says what was looked for and what to do about it."""


def launch(playwright, environment: Mapping[str, str] = os.environ):
    """A running Chromium: the one VRHLIB_BROWSER names, else the first that starts of those on PATH and Playwright's.

    Raises NoBrowser when there is none, and RuntimeError when the one that was asked for does not start.
    """
    asked = environment.get("VRHLIB_BROWSER")
    if asked:
        path = shutil.which(asked, path=environment.get("PATH"))
        try:
            return _start(playwright, path or asked)
        except Exception as error:
            raise RuntimeError(f"VRHLIB_BROWSER={asked} does not start: {_first_line(error)}") from error
    found = [shutil.which(name, path=environment.get("PATH")) for name in NAMES]
    tried = []
    for path in [*dict.fromkeys(filter(None, found)), None]:  # a file isn't enough: Ubuntu's is a stub for its snap
        try:
            return _start(playwright, path)
        except Exception as error:
            tried.append(f"{path or 'its own'}: {_first_line(error)}")
    raise NoBrowser(
        f"No browser: looked for {', '.join(NAMES)} on PATH and for Playwright's own ({'; '.join(tried)}). "
        "`apt install chromium`, `playwright install chromium` or VRHLIB_BROWSER=/path/to/chromium brings one."
    )


def _start(playwright, path: str | None):
    """Chromium without a name server: whatever a page tries, nothing but this machine is found."""
    rules = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
    # Playwright starts it without its sandbox, which neither root nor most containers could have.
    return playwright.chromium.launch(executable_path=path, args=[f"--host-resolver-rules={rules}"], timeout=60_000)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def without_a_browser(environment: Mapping[str, str] = os.environ) -> str:
    """What its tests do: "fail" where CI would otherwise pass without having looked at anything, else "skip"."""
    return "fail" if environment.get("CI") and environment.get("VRHLIB_NO_BROWSER") != "1" else "skip"


# ---- a page and what goes wrong on it

INSIDE = r"(data|blob|about|(https?|wss?)://(127\.0\.0\.1|localhost)(:\d+)?(/|$))"
OUTSIDE = re.compile(rf"^(?!{INSIDE})")

# Errors that say nothing about a view: a pattern of the message and the stack after it, and why it is harmless.
HARMLESS = {
    r"(?s)reading 'schema'\).*/static/notebook/": "two plugins of Notebook 7 race at its start (jupyter/notebook#7862)",
    r"(?s)'filebrowser:open-path' not registered.*/static/notebook/": (
        "a page of JupyterLab leaves its path in settings that Notebook 7 at the same server reads, too"
    ),
    r"403 \(Forbidden\) .*/static/notebook/\w+\.woff2?$": (
        "the server of Notebook 7 keeps MathJax's fonts from its own page; formulas are drawn in another font"
    ),
}


def is_harmless(text: str) -> bool:
    return any(re.search(pattern, text) for pattern in HARMLESS)


@contextmanager
def watched_page(browser, problems: list[str] | None = None) -> Iterator:
    """A fresh page. Raises AssertionError at the end if there were console errors, uncaught errors, or requests to
    anywhere but this machine (which are refused). `problems`: a list to fill as they come, if you want to look."""
    problems = [] if problems is None else problems
    context = browser.new_context(viewport=SIZE, service_workers="block")  # route() is blind to what those ask for

    def say(problem: str) -> None:
        if problem not in problems:
            problems.append(problem)

    def on_console(message) -> None:
        where = message.location.get("url", "")
        if message.type != "error" or is_harmless(f"{message.text} {where}"):
            return
        if where.startswith("http") and OUTSIDE.match(where):
            return  # "Failed to load resource", of a request that is named already
        say(f"console error: {message.text}" + (f" ({where})" if where else ""))

    def on_error(error) -> None:
        text = error.error.stack or f"Error: {error.error.message}"  # not all that is thrown is an Error
        if not is_harmless(text):
            say(f"uncaught {text}")

    def on_request(request) -> None:  # redirects too, which route() doesn't see
        if OUTSIDE.match(request.url):
            say(f"request to {request.url}")

    def on_socket(socket) -> None:
        say(f"request to {socket.url}")
        socket.close()

    context.on("console", on_console)
    context.on("weberror", on_error)
    context.on("request", on_request)
    context.route(OUTSIDE, lambda route: route.abort())
    context.route_web_socket(OUTSIDE, on_socket)
    page = context.new_page()
    page.set_default_timeout(20_000)
    try:
        yield page
        page.wait_for_timeout(50)  # what the last action set off
    finally:
        context.close()
    assert not problems, "the page had problems:\n" + "\n".join(f"  {problem}" for problem in problems)


# ---- JupyterLab


class CellFailed(AssertionError):
    """A cell of the notebook raised; the text is its traceback."""


class Lab:
    """A JupyterLab of its own, with an empty folder to serve and nobody's settings; Notebook 7 is at the same port.

    It runs with this Python and imports vrhlib from this checkout, and so do its kernels.
    """

    SETTINGS = {
        "@jupyterlab/notebook-extension:tracker": {
            "windowingMode": "none",  # every output is in the page, on the screen or not
            "autoStartDefaultKernel": True,  # no dialog for a notebook that names no kernel
        },
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    OPTIONS = (
        "--no-browser",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",  # any free one
        "--LabApp.news_url=None",
        "--LabApp.extension_manager=readonly",
        "--LabApp.expose_app_in_browser=True",  # window.jupyterapp, through which Notebook asks and tells
        "--JupyterNotebookApp.expose_app_in_browser=True",
    )

    def __init__(self, folder: Path, *, timeout: float = 60):
        self.root, self.log, self._token, self._opened = folder / "notebooks", folder / "log", secrets.token_hex(16), 0
        self.root.mkdir(parents=True)
        places = {
            "JUPYTER_CONFIG_DIR": folder / "config",
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_RUNTIME_DIR": folder / "runtime",
            "JUPYTERLAB_SETTINGS_DIR": folder / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
            "IPYTHONDIR": folder / "ipython",
        }
        labconfig = places["JUPYTER_CONFIG_DIR"] / "labconfig"
        labconfig.mkdir(parents=True)
        (labconfig / "default_setting_overrides.json").write_text(json.dumps(self.SETTINGS))
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = (
            os.environ
            | {name: str(place) for name, place in places.items()}
            | {
                "JUPYTER_TOKEN": self._token,
                "JUPYTER_PREFER_ENV_PATH": "1",  # labextensions and the kernel of this Python's environment
                "PYTHONPATH": paths,
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
        )
        command = [sys.executable, "-m", "jupyterlab", *self.OPTIONS, f"--ServerApp.root_dir={self.root}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--allow-root")
        with self.log.open("w") as log:
            self._server = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self.url = self._answering(places["JUPYTER_RUNTIME_DIR"], timeout)
        except BaseException:
            self.stop()
            raise

    def _answering(self, runtime: Path, timeout: float) -> str:
        """The address, once it answers there."""
        deadline = time.monotonic() + timeout
        note = runtime / f"jpserver-{self._server.pid}.json"
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                self.url = json.loads(note.read_text())["url"].rstrip("/")
                self.ask("api/status")
                return self.url
            except (OSError, ValueError):  # not there, half written, not listening
                time.sleep(0.1)
        status = f"did not answer in {timeout:.0f} s" if self._server.poll() is None else "ended at once"
        raise RuntimeError(f"JupyterLab {status}. Its log:\n{self.log.read_text()[-5000:]}")

    def ask(self, path: str, method: str = "GET"):
        """What the server's REST API says."""
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        request.add_header("Authorization", f"token {self._token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def open(self, page, path: Path, app: str = "lab", *, timeout: float = 60) -> "Notebook":
        """Copy the notebook at `path` into the served folder and open the copy; returns when its kernel is ready.

        `app`: "lab" (JupyterLab) or "notebook" (Notebook 7). The kernel ends with the page.
        """
        self._opened += 1
        folder = self.root / str(self._opened)  # one each, so names may repeat
        folder.mkdir()
        shutil.copy(path, folder)
        name = urllib.request.quote(f"{folder.name}/{Path(path).name}")
        # A workspace each: another's tabs would come back otherwise.
        address = {"lab": f"lab/workspaces/{self._opened}/tree/{name}", "notebook": f"notebooks/{name}"}[app]
        page.goto(f"{self.url}/{address}?token={self._token}", wait_until="domcontentloaded")
        notebook = Notebook(page, self)
        page.once("close", lambda _: notebook.shut_down())
        notebook.wait_for_kernel(timeout)
        return notebook

    def stop(self) -> None:
        """First as asked, which ends the kernels too; then by force."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            try:
                os.killpg(self._server.pid, number)
                self._server.wait(patience)
            except ProcessLookupError:
                self._server.wait(patience)
                return
            except subprocess.TimeoutExpired:
                pass


class Notebook:
    """A notebook open in a page. Cells are counted as in the file, markdown included; -1 is the last one."""

    PANEL = "window.jupyterapp?.shell.currentWidget"
    CELLS = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell"

    def __init__(self, page, lab: Lab):
        self.page, self._lab, self._kernel = page, lab, None

    def wait_for_kernel(self, timeout: float) -> None:
        kernel = f"{self.PANEL}?.sessionContext?.session?.kernel"
        ready = f"{self.PANEL}.context.isReady && k.connectionStatus === 'connected' && k.status === 'idle'"
        self.page.wait_for_function(
            f"() => {{ const k = {kernel}; return k && {ready} && k.id }}", timeout=timeout * 1000
        )
        self._kernel = self.page.evaluate(f"() => {kernel}.id")
        self.page.locator(self.CELLS).first.wait_for()

    def cell(self, i: int):
        """The i-th cell on the page, scrolled into view."""
        cell = self.page.locator(self.CELLS).nth(i)
        cell.scroll_into_view_if_needed()
        return cell

    def output(self, i: int):
        """What the i-th cell put under itself, scrolled into view. A locator: narrow it with `.get_by_role(...)`."""
        output = self.cell(i).locator(".jp-Cell-outputArea")
        output.scroll_into_view_if_needed()
        return output

    def run_all(self, timeout: float = 120) -> None:
        """Run every cell, as the menu does. Raises CellFailed with the traceback of the first that raised."""
        self._run("notebook:run-all-cells", range(self.page.locator(self.CELLS).count()), timeout)

    def run_cell(self, i: int, timeout: float = 120) -> None:
        """Run the i-th cell, as Ctrl-Enter does."""
        i = range(self.page.locator(self.CELLS).count())[i]
        self.page.evaluate(f"i => {{ const panel = {self.PANEL}; panel.content.activeCellIndex = i }}", i)
        self._run("notebook:run-cell", [i], timeout)

    def _run(self, command: str, cells, timeout: float) -> None:
        start = "c => { const r = window.vrhlibRun = {}; jupyterapp.commands.execute(c).finally(() => { r.done = 1 }) }"
        self.page.evaluate(start, command)
        done = f"() => window.vrhlibRun.done && {self.PANEL}.sessionContext.session.kernel.status === 'idle'"
        try:
            self.page.wait_for_function(done, timeout=timeout * 1000)
        except Exception as error:
            unfinished = [cell["source"] for cell in self.contents() if cell.get("execution_count") is None]
            raise TimeoutError(f"not done after {timeout} s; not run: {unfinished[:3]}") from error
        contents = self.contents()
        for i in cells:
            cell = contents[i]
            if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
                continue
            for output in cell["outputs"]:
                if output["output_type"] == "error":
                    trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output["traceback"]))
                    raise CellFailed(f"cell {i}:\n{trace or output['evalue']}")
            assert cell["execution_count"] is not None, f"cell {i} was not run"

    def contents(self) -> list[dict]:
        """The cells as they would be saved now."""
        return self.page.evaluate(f"() => {self.PANEL}.content.model.toJSON().cells")

    def shut_down(self) -> None:
        kernel, self._kernel = self._kernel, None
        try:
            if kernel:
                self._lab.ask(f"api/kernels/{kernel}", "DELETE")
        except urllib.error.HTTPError as error:
            if error.code != 404:  # gone already
                raise
