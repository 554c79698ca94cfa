"""A real browser for the tests of the page; an error in its console fails the test."""

import shutil
from urllib.parse import urlsplit

import pytest

from destinations.runs import open_runs
from tests.test_destinations.viewer.browser.browser_runs import write_runs

WAIT_MS = 60_000
# Requests for rows of the table: names in a query that is too long for an address are sent as a body.
ROWS = "**/api/runs*"


def browser_path():
    """The browser of this machine; None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return None


@pytest.fixture(scope="package")
def chromium():
    """Headless Chromium, one for this folder: to start it and to load the page for the first time takes two seconds."""
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
    """A folder of runs with everything that the page shows, the same for this folder: tests that write make their own."""
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
    """What the console of the browser has said of errors; a test takes out what it expects."""
    return []


@pytest.fixture(scope="package")
def left_pages():
    """Pages that tests have left, by the options of their contexts."""
    return {}


@pytest.fixture
def new_page(chromium, left_pages, console):
    """Opens a page of its own context; arguments are those of Playwright's `new_context`.

    One that an earlier test has left is emptied and used again: another context, and the process of its page, take a
    second of the processor.
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
        of_visited = {"origin": f"{visited.scheme}://{visited.netloc}", "storageTypes": "local_storage"}
        devtools = page.context.new_cdp_session(page)
        devtools.send("Storage.clearDataForOrigin", of_visited)
        devtools.detach()
        left.append(page)
    assert console == [], "the browser reported errors"


def _page_of_its_own(chromium, options):
    """Returns a page in a new context."""
    context = chromium.new_context(
        **{"viewport": {"width": 1360, "height": 860}, "accept_downloads": True, **options}
    )
    context.set_default_timeout(WAIT_MS)
    return context.new_page()


class Opened:
    """The page of a server, as tests use it."""

    def __init__(self, page, viewer):
        self.page = page
        self.address = viewer.address
        self.token = viewer.token
        page.goto(viewer.url)

    def go(self, fragment):
        """Shows a view by its fragment, as someone does who was sent a link."""
        self.page.goto(f"{self.address}/#/{fragment}")

    def id_of(self, name):
        """The id of a run in URLs."""
        answer = self.answer("runs?limit=1000&archived=all")
        return next(row["id"] for row in answer["rows"] if row["name"] == name)

    def answer(self, query):
        """What the server answers to a request of the page's API."""
        # As fetch of a browser does where the server has closed an idle connection in that moment.
        return self.page.request.get(f"{self.address}/api/{query}", max_retries=3).json()

    def traces(self, metric, part="line"):
        """The data that Plotly has drawn for a metric: by run id, x and y of each trace of a kind."""
        return _by_run(self.page.evaluate(_TRACES, [metric, part]), part)

    def until(self, condition, argument=None):
        """Waits until a function of JavaScript returns something, and returns it; what is not there yet is waited for."""
        tolerant = f"""(argument) => {{
            try {{ return ({condition})(argument); }}
            catch (error) {{ if (error instanceof TypeError) return false; throw error; }}
        }}"""
        return self.page.wait_for_function(tolerant, arg=argument, timeout=WAIT_MS).json_value()

    def tops(self, *selectors):
        """The upper ends of elements, the last of each selector, in one look: a view may be drawn again right after."""
        return self.until(
            "(all) => all.map((one) => [...document.querySelectorAll(one)].at(-1).getBoundingClientRect().y)",
            list(selectors),
        )

    def drawn(self, metric, count=1):
        """Waits until a chart has at least so many lines, and returns them."""
        # In one look: the chart may be drawn again right after.
        found = self.page.wait_for_function(
            f"([metric, count]) => {{ const found = ({_TRACES})([metric, null]);"
            "return found.filter((trace) => ['line', 'median'].includes(trace.part)).length >= count && found; }",
            arg=[metric, count],
            timeout=WAIT_MS,
        ).json_value()
        return _by_run(found, "line")


_TRACES = """([metric, part]) => [...document.querySelectorAll('.chart')].filter((card) => card.dataset.metric === metric)
    .flatMap((card) => [...(card.querySelector('.plot').data ?? [])])
    .map((trace) => ({part: trace.meta?.part, run: trace.meta?.run ?? trace.meta?.band, branch: trace.meta?.branch, runs: trace.meta?.runs ?? [],
        x: [...(trace.x ?? [])], y: [...(trace.y ?? [])], color: trace.line?.color, dash: trace.line?.dash}))
    .filter((trace) => part === null || trace.part === part)"""


def _by_run(traces, part):
    """Returns the traces of a kind by run id; rows that a resume has left are "left"."""
    of_part = [trace for trace in traces if trace["part"] == part]
    return {trace["run"] if trace.get("branch") is None else "left": trace for trace in of_part}


@pytest.fixture
def opened(new_page, viewer):
    """The page of `run_root`, with the table of runs shown."""
    opened = Opened(new_page(), viewer)
    opened.page.wait_for_selector(".grid-row[data-run]")
    return opened
