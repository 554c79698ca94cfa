"""Late answers, and answers in another order than their requests, in a real browser."""

import pytest

from destinations.runs import open_runs
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.browser.opened import ROWS, WAIT_MS, Opened

pytestmark = pytest.mark.xdist_group("browser")


class Held:
    """Holds back the server's answers to requests for a pattern.

    Args:
        page: sends the requests.
        pattern: matches URLs, with stars.
    """

    def __init__(self, page, pattern):
        self.page = page
        self.pattern = pattern
        self.answers = []
        page.route(pattern, self._hold)

    def _hold(self, route):
        self.answers.append((route, route.fetch()))

    def wait_for(self, count):
        """Waits until it holds a number of answers."""
        for _ in range(WAIT_MS // 10):
            if len(self.answers) >= count:
                return
            self.page.wait_for_timeout(10)
        raise AssertionError(f"{len(self.answers)} of {count} were asked for at {self.pattern}")

    def give(self, place=0):
        """Gives the page one answer."""
        route, response = self.answers.pop(place)
        route.fulfill(response=response)

    def give_all(self, *, newest_first=False):
        """Gives the page all answers, and holds none from then on."""
        while self.answers:
            self.give(-1 if newest_first else 0)
        self.page.unroute(self.pattern)


def settle(page):
    """Waits until the page has used its answers and sent the requests that follow."""
    for _ in range(3):
        page.evaluate("fetch('api/info').then((answer) => answer.json())")


def test_the_table_is_shown_in_whatever_order_answers_arrive(run_root, tmp_path, new_page):
    """A change is announced during loading: a newer answer that arrives first doesn't empty the table."""
    server = pytest.importorskip("destinations.viewer.server")
    with open_runs(run_root, cache=tmp_path / "index") as runs, server.Viewer(runs, port=0) as viewer:
        page = new_page()
        fields, rows = Held(page, "**/api/fields"), Held(page, ROWS)
        Opened(page, viewer)
        # The table and the line of the view send requests.
        fields.wait_for(1)
        fields.give_all()
        rows.wait_for(2)
        rows.give()
        settle(page)
        rows.give_all(newest_first=True)
        page.wait_for_selector(".grid-row[data-run]")
        page.goto("about:blank")


def test_charts_show_the_runs_chosen_last(tmp_path, open_root):
    """A late answer about a run that is no longer chosen is not shown."""
    root = tmp_path / "runs"
    for name in ("one", "other"):
        with Written(root / name) as run:
            run.log({f"loss of {name}": 1.0}, 0)
    opened = open_root(root)
    opened.go("charts")
    opened.drawn("loss of other")
    edited = f"{opened.address}/api/runs/{opened.id_of('other')}"
    late = Held(opened.page, "**/api/selected?*")
    token = {"Authorization": f"Bearer {opened.token}"}
    assert opened.page.request.patch(edited, data={"note": "edited"}, headers=token).ok
    late.wait_for(1)
    opened.page.get_by_label("Take other out").click()
    late.give_all(newest_first=True)
    opened.until("() => document.querySelectorAll('.chart').length === 1")
    settle(opened.page)
    assert opened.page.locator(".chart").count() == 1


def test_explore_shows_the_runs_of_the_last_filter(opened):
    """A late answer to the previous filter is dropped."""
    page = opened.page
    opened.go("explore?sx=hparams.lr&sy=summary.loss")
    opened.until("() => document.querySelector('#scatter').data?.[0].x.length === 4")
    late = Held(page, ROWS)
    page.fill("#filter", "hparams.lr == 0.1")
    late.wait_for(1)
    page.fill("#filter", "hparams.lr == 0.01")
    late.wait_for(2)
    late.give_all(newest_first=True)
    opened.until("() => document.querySelector('#scatter').data?.[0].x.length === 1")
    settle(page)
    assert page.evaluate("document.querySelector('#scatter').data[0].x") == [0.01]


def test_words_on_an_axis_have_the_order_of_the_table(tmp_path, open_root):
    """Numbers come before texts, by size, as the server sorts them."""
    root = tmp_path / "runs"
    for place, size in enumerate([10, "auto", 2, "Auto"]):
        with Written(root / f"run-{place}") as run:
            run.logger.log_hyperparameters({"size": size})
            run.log({"loss": float(place)}, 0)
    opened = open_root(root)
    opened.go("explore?sx=hparams.size&sy=summary.loss")
    opened.until("() => document.querySelector('#scatter').data?.[0].x.length === 4")
    shown = opened.page.evaluate("document.querySelector('#scatter').layout.x.ticks")
    categories = [text for _, text in shown]
    ticks = opened.page.locator("[data-axis='hparams.size'] text:not(.axis-name)")
    rows = opened.answer("runs?sort=hparams.size&columns=hparams.size")
    assert categories == [str(row["values"]["hparams.size"]) for row in rows["rows"]]
    assert categories == ["2", "10", "Auto", "auto"]
    assert [place for place, _ in shown] == [0, 1, 2, 3]
    heights = [(float(tick.get_attribute("y")), tick.text_content()) for tick in ticks.all()]
    assert [text for _, text in sorted(heights, reverse=True)] == categories


def test_the_log_of_the_file_chosen_last_is_shown(tmp_path, open_root):
    """The late text of the previous file is dropped."""
    root = tmp_path / "runs"
    with Written(root / "one") as run:
        run.log({"loss": 1.0}, 0)
    for name in ("first", "second"):
        (root / "one" / f"{name}.log").write_text(f"words of the {name}\n")
    opened = open_root(root)
    late = Held(opened.page, "**/log?*")
    opened.go(f"run/{opened.id_of('one')}")
    late.wait_for(1)
    opened.page.get_by_label("Log file").select_option("second.log")
    late.give_all()
    opened.until("() => document.querySelector('pre.log').innerText === 'words of the second\\n'")


def last_value(opened, metric="loss"):
    """Returns the last value of a chart's first line, as a condition for `until`."""
    return (
        f"document.querySelector('.chart[data-metric=\"{metric}\"] .plot').data"
        "?.find((one) => one.meta.part === 'line')?.y.at(-1)"
    )


@pytest.fixture
def live(tmp_path, new_page):
    """The page with the charts of a live run, and the run."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path / "runs"
    with Written(root / "live") as run, Written(root / "other") as other:
        for step in range(5):
            run.log({"loss": float(step)}, step)
            other.log({"loss": -1.0}, step)
        run.flush()
        other.flush()
        with open_runs(root, cache=tmp_path / "index") as runs, server.Viewer(runs, port=0) as viewer:
            opened = Opened(new_page(), viewer)
            opened.go(f"charts?run={opened.id_of('live')}")
            opened.drawn("loss")
            yield opened, run
            opened.page.goto("about:blank")


def told_of(page, act):
    """Acts, and waits until the page learns of a change of a run."""
    with page.expect_response(
        lambda answer: "/api/changes" in answer.url and answer.json()["runs"], timeout=60_000
    ):
        act()


def test_rows_announced_during_a_request_appear(live):
    """The last rows of a run are drawn although they were announced while an earlier answer was pending."""
    opened, run = live
    page = opened.page
    late = Held(page, "**/api/series?*")
    run.log({"loss": 5.0}, 5)
    run.flush()
    late.wait_for(1)

    def log_the_last():
        run.log({"loss": 6.0}, 6)
        run.close()

    told_of(page, log_the_last)
    # Changes from here on are held back, because they would make the page request the rows after all.
    opened.until("() => document.querySelector('.legend .status').innerText === 'completed'")
    page.route("**/api/changes?*", lambda _: None)
    late.give_all()
    opened.until(f"() => {last_value(opened)} === 6")
    assert opened.traces("loss")[opened.id_of("live")]["y"] == [float(step) for step in range(7)]


def test_rows_are_drawn_once_if_a_run_is_chosen_meanwhile(live):
    """New rows that arrive after all rows were requested again are not added twice."""
    opened, run = live
    page = opened.page
    late = Held(page, "**/api/series?*")
    page.evaluate(
        """async (id) => (await import("./static/state.js")).selectRuns([id], true)""", opened.id_of("other")
    )
    late.wait_for(1)

    def log_more():
        run.log({"loss": 5.0}, 5)
        run.flush()

    told_of(page, log_more)
    settle(page)
    late.give_all()
    opened.drawn("loss", 2)
    opened.until("() => document.querySelector('.chart .plot').data.some((one) => one.y.at(-1) === 5)")
    lines = opened.drawn("loss", 2)
    assert lines[opened.id_of("live")]["y"] == [float(step) for step in range(6)]
    assert lines[opened.id_of("other")]["y"] == [-1.0] * 5


def test_a_chart_changed_before_its_values_arrive_is_drawn(viewer, new_page):
    """A button pressed while the values are loading leaves the chart whole."""
    page = new_page()
    late = Held(page, "**/api/series?*")
    opened = Opened(page, viewer)
    alpha = opened.id_of("alpha")
    page.goto("about:blank")
    page.goto(f"{opened.address}/#/charts?run={alpha}")
    late.wait_for(1)
    page.wait_for_selector(".chart")
    settle(page)
    for _ in range(3):
        page.click("#log-y")
    late.give_all()
    opened.drawn("loss")
    opened.until("() => document.querySelector('.chart[data-metric=loss] .plot').layout.yaxis.type === 'log'")
    assert page.locator(".chart[data-metric=loss] .scatterlayer path.js-line").count() == 1
