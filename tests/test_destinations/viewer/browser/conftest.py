"""A real browser for the tests of the page; an error in its console fails the test."""

import contextlib
from urllib.parse import urlsplit

import pytest

from destinations.runs import open_runs
from tests.test_destinations.viewer.browser.browser_runs import write_runs
from tests.test_destinations.viewer.browser.opened import WAIT_MS, Opened, browser_path


@pytest.fixture(scope="package")
def chromium():
    """Headless Chromium, shared by this folder: starting it and loading the page takes two seconds."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = browser_path()
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--autoplay-policy=no-user-gesture-required", "--disable-dev-shm-usage"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def run_root(tmp_path_factory):
    """A folder of runs with everything that the page shows; tests that write make their own."""
    root = tmp_path_factory.mktemp("browser") / "runs"
    write_runs(root)
    return root


@pytest.fixture(scope="package")
def viewer(run_root, tmp_path_factory):
    """The server of the page, on `run_root`."""
    server = pytest.importorskip("destinations.viewer.server")
    with (
        open_runs(run_root, cache=tmp_path_factory.mktemp("index")) as runs,
        server.Viewer(runs, port=0) as viewer,
    ):
        yield viewer


@pytest.fixture
def console():
    """Errors in the browser's console; a test removes the ones it expects."""
    return []


@pytest.fixture(scope="package")
def left_pages():
    """Pages of earlier tests, by the options of their contexts."""
    return {}


@pytest.fixture
def new_page(chromium, left_pages, console):
    """Opens a page in its own context; takes the arguments of Playwright's `new_context`.

    It empties and reuses a page of an earlier test: another context with its process takes a second of CPU.
    """
    opened = []

    def said_on_console(said):
        if said.type in {"error", "warning"}:
            console.append(f"{said.text} {said.location['url']}")

    def raised(error):
        console.append(f"{error}\n{error.stack or ''}")

    def open_page(**options):
        left = left_pages.setdefault(repr(options), [])
        page = left.pop() if left else _page_of_its_own(chromium, options)
        opened.append((left, page))
        page.on("console", said_on_console)
        page.on("pageerror", raised)
        return page

    yield open_page
    for left, page in opened:
        if page.is_closed():
            page.context.close()
            continue
        page.remove_listener("console", said_on_console)
        page.remove_listener("pageerror", raised)
        page.unroute_all(behavior="ignoreErrors")
        visited = urlsplit(page.url)
        page.goto("about:blank")
        page.mouse.move(0, 0)
        page.context.clear_cookies()
        left.append(page)
        # A server of a test's own had another port, so it leaves nothing for the next one.
        if visited.scheme == "about":
            continue
        of_visited = {"origin": f"{visited.scheme}://{visited.netloc}", "storageTypes": "local_storage"}
        devtools = page.context.new_cdp_session(page)
        devtools.send("Storage.clearDataForOrigin", of_visited)
        devtools.detach()
    assert console == [], "the browser reported errors"


def _page_of_its_own(chromium, options):
    """Returns a page in a new context."""
    context = chromium.new_context(
        **{"viewport": {"width": 1360, "height": 860}, "accept_downloads": True, **options}
    )
    context.set_default_timeout(WAIT_MS)
    return context.new_page()


@pytest.fixture
def open_root(new_page, tmp_path):
    """Opens the page of a folder of runs, by default `runs` in the test's own folder."""
    server = pytest.importorskip("destinations.viewer.server")
    with contextlib.ExitStack() as stack:

        def open_page(root=tmp_path / "runs"):
            runs = stack.enter_context(open_runs(root, cache=tmp_path / "index"))
            opened = Opened(new_page(), stack.enter_context(server.Viewer(runs, port=0)))
            # Otherwise the page would report that its server is gone.
            stack.callback(opened.page.goto, "about:blank")
            return opened

        yield open_page


@pytest.fixture
def opened(new_page, viewer):
    """The page of `run_root`, with the table of runs shown."""
    opened = Opened(new_page(), viewer)
    opened.page.wait_for_selector(".grid-row[data-run]")
    return opened
