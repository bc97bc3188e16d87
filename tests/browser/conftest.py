"""A browser, a watched page in it, and a JupyterLab to open there. They need more than Python, so they may be missing:
then these tests are skipped with the next step, except in CI, which must not pass without having looked."""

import os

import pytest

from tests.browser import harness


def _missing(reason: str) -> None:
    if harness.without_a_browser() == "fail":
        pytest.fail(f"{reason} (CI is set, so this fails; VRHLIB_NO_BROWSER=1 would skip)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="package")
def chromium():
    """A running browser (Playwright's `Browser`), shared by the tests of this folder."""
    if os.environ.get("VRHLIB_NO_BROWSER") == "1":
        pytest.skip("VRHLIB_NO_BROWSER=1: the tests that need a browser were told to stay out")
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError as error:
        _missing(f'No playwright ({error}): `pip install -e ".[test]"` brings it')
    with sync_playwright() as playwright:
        try:
            browser = harness.launch(playwright)
        except harness.NoBrowser as error:
            _missing(str(error))
        expect.set_options(timeout=20_000)  # other tests may be using the cores
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A fresh page of 1280 x 900. The test fails at its end if the page logged an error, left one uncaught, or asked
    any machine but this one for something."""
    with harness.watched_page(chromium) as page:
        yield page


@pytest.fixture(scope="package")
def lab(chromium, tmp_path_factory):
    """A running JupyterLab (and Notebook 7), `harness.Lab`; its kernels import this checkout's vrhlib."""
    lab = harness.Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.stop()
