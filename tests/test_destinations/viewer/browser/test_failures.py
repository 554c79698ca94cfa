"""Failed requests and deleted runs in a real browser: the page reports them, and recovers by itself."""

import math
import shutil

import pytest

from destinations.runs import open_runs
from tests.effort import times
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.browser.opened import ROWS, Opened

pytestmark = pytest.mark.xdist_group("browser")


def fail_once(page, pattern, status):
    """Answers the first request for a pattern with an error, or cuts its connection if the status is None."""
    failed = []

    def answer(route):
        if failed:
            route.fallback()
        elif status is None:
            failed.append(route.abort("connectionreset"))
        else:
            failed.append(route.fulfill(status=status, json={"error": "the disk is away"}))

    page.route(pattern, answer)
    return failed


@pytest.fixture
def served(tmp_path, new_page):
    """Serves a folder that a function writes; returns its page, with `root` and `runs`."""
    server = pytest.importorskip("destinations.viewer.server")
    left = []

    def serve(write):
        root = tmp_path / "runs"
        write(root)
        runs = open_runs(root, cache=tmp_path / "index")
        left.append(runs)
        viewer = server.Viewer(runs, port=0)
        left.append(viewer)
        viewer.__enter__()
        opened = Opened(new_page(), viewer)
        opened.root, opened.viewer, opened.runs = root, viewer, runs
        opened.page.wait_for_selector(".grid-row[data-run]")
        left.append(opened.page)
        return opened

    yield serve
    for one in reversed(left):
        one.close()


def two_runs(root):
    """Writes two runs with a metric, a hyperparameter that differs, a text and a log."""
    for at, name in enumerate(("one", "two")):
        with Written(root / name) as run:
            run.logger.log_hyperparameters({"lr": 0.1 * (1 + at)})
            for step in range(3):
                run.log({"loss": float(step)}, step)
            run.logger.log_text("it went well", "Notes", step=1)
        (root / name / "train.log").write_text("words of the log\n")


# One case per kind of request: which request fails, the status, the view, and the result.
REQUESTS = [
    ("**/api/fields", 500, "runs?sort=-name", ".grid-row[data-run] [data-column='summary.loss']"),
    ("**/api/selected?*", None, "charts?run={one}", ".chart .main-svg"),
    ("**/media?*", 500, "media?run={one}", ".text-record"),
    ("**/api/runs/{one}", 500, "run/{one}", ".run-page h1"),
]
OTHER_REQUESTS = [
    (ROWS, None, "runs?sort=-name", ".grid-row[data-run] [data-column='summary.loss']"),
    ("**/api/fields", None, "charts?run={one}", ".chart .main-svg"),
    (ROWS, 500, "charts", ".chart .main-svg"),
    ("**/api/runs/{one}", None, "charts?run={one}", ".chart .main-svg"),
    ("**/api/series?*", 500, "charts?run={one}", ".chart .main-svg"),
    (ROWS, None, "media", ".text-record"),
    (ROWS, 500, "explore", "#scatter .main-svg"),
    ("**/api/compare?*", 500, "compare?run={one}&run={two}", "[data-panel=Hyperparameters]"),
    ("**/log?*", None, "run/{one}", ".log:has-text('words of the log')"),
]


@pytest.mark.parametrize(("pattern", "status", "view", "shown"), [*REQUESTS, *times([], OTHER_REQUESTS)])
def test_a_failed_request_is_repeated(served, console, pattern, status, view, shown):
    """Whichever request fails, the page repeats it by itself."""
    opened = served(two_runs)
    ids = {name: opened.id_of(name) for name in ("one", "two")}
    page = opened.page
    page.goto("about:blank")
    failed = fail_once(page, pattern.format(**ids), status)
    opened.go(view.format(**ids))
    page.wait_for_selector(shown.format(**ids))
    assert failed
    opened.until("() => !document.querySelector('.filter-error:not([hidden])')")
    assert all("500" in said or "ERR_" in said for said in console)
    console.clear()


@pytest.mark.parametrize("view", ["charts", "media"])
def test_a_page_without_its_runs_says_why(served, console, view):
    """A link to deleted runs and a link without the token say so, and not that the runs are empty."""
    opened = served(two_runs)
    page = opened.page
    opened.go(f"{view}?run=gone")
    said = {"charts": "These runs don't exist", "media": "no run has the id, name or path 'gone'"}[view]
    page.wait_for_selector(f'.empty:has-text("{said}")')
    one = opened.id_of("one")
    page.context.clear_cookies()
    opened.go(f"{view}?run={one}")
    opened.until(
        "() => document.querySelector('main').innerText.includes('Open the link that destinations view printed')"
    )
    opened.until("() => document.querySelector('#live').title.includes('Open the link')")
    assert all("401" in said or "404" in said for said in console)
    console.clear()


def test_a_link_without_a_token_explains_what_to_do(served, console):
    """Without a token, a browser gets a page that explains it; once it had the token, the link works."""
    opened = served(two_runs)
    page = opened.page
    page.context.clear_cookies()
    page.goto("about:blank")
    link = f"{opened.address}/#/explore"
    page.goto(link)
    text = page.inner_text("body")
    assert (
        "Open the address that `destinations view` printed, with ?token=\N{HORIZONTAL ELLIPSIS} in it."
        in text
    )
    assert "{" not in text
    page.goto(opened.viewer.url)
    page.goto(link)
    page.wait_for_selector("#scatter .main-svg")
    assert all("401" in said for said in console)
    console.clear()


def test_a_silent_server_is_shown_as_offline(served, console):
    """A request for changes that nothing answers, as after a sleep, ends after a minute."""
    opened = served(two_runs)
    page = opened.page
    page.clock.install()
    page.goto("about:blank")
    page.route("**/api/changes?*", lambda _: None)
    with page.expect_request("**/api/changes?*"):
        opened.go("runs")
    page.wait_for_selector(".grid-row[data-run]")
    assert page.inner_text("#live") == "live"
    page.clock.fast_forward(61_000)
    opened.until("() => document.querySelector('#live').innerText === 'offline'")
    assert page.locator(".grid-row[data-run]").count() == 2
    console.clear()


def test_a_deleted_run_is_shown_as_gone(served, console):
    """The page reports a folder that is deleted while shown, and shows it again once it returns."""
    opened = served(two_runs)
    page = opened.page
    gone = opened.id_of("one")
    opened.go(f"run/{gone}")
    page.wait_for_selector(".run-page h1")
    kept = shutil.move(opened.root / "one", opened.root.parent / "kept")
    opened.until("() => document.querySelector('.run-page').innerText.includes('no run has')")
    shutil.move(kept, opened.root / "one")
    page.wait_for_selector(".run-page h1")
    opened.go(f"charts?run={gone}&run={opened.id_of('two')}")
    opened.drawn("loss", 2)
    shutil.rmtree(opened.root / "one")
    opened.until(
        "(id) => document.querySelector(`.legend [data-run='${id}'] .status`)?.innerText === 'not found'",
        gone,
    )
    assert page.locator(f'.legend [data-run="{gone}"] a').inner_text() == "one", "its name stays"
    assert all("404" in said for said in console)
    console.clear()


def test_numbers_at_the_edges_of_a_double_are_drawn(served):
    """The largest and smallest numbers, and metrics without a finite value, leave a working chart."""

    def write(root):
        for at in range(2):
            with Written(root / f"odd{at}") as run:
                run.logger.log_hyperparameters({"lr": [1e308, -1e308][at], "n": [math.nan, math.inf][at]})
                for step in range(5):
                    run.log(
                        {
                            "huge": 1e308 * (-1) ** step,
                            "tiny": 5e-324,
                            "mixed": [math.nan, 1.0, math.inf, -1e308, 1e308][step],
                            "nan": math.nan,
                            "inf": math.inf,
                        },
                        step,
                    )

    opened = served(write)
    page = opened.page
    query = "&".join(f"run={opened.id_of(name)}" for name in ("odd0", "odd1"))
    for more in ("", "&smooth=0.9", "&band=ranks", "&x=metric:huge", "&logy=1", "&x=metric:tiny&logx=1"):
        opened.go(f"charts?{query}{more}")
        for metric in ("huge", "tiny", "mixed"):
            page.wait_for_selector(f".chart[data-metric={metric}] .main-svg")
            opened.until(
                "(metric) => document.querySelector(`.chart[data-metric=${metric}] .plot`).layout.yaxis.range.every(Number.isFinite)",
                metric,
            )
    opened.go("explore?sx=hparams.lr&sy=summary.huge")
    page.wait_for_selector("#scatter .main-svg")
    opened.go("explore?sx=hparams.n&sy=summary.inf")
    page.wait_for_selector("#parallel polyline", state="attached")
