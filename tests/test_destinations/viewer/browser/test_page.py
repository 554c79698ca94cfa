"""The frame of the page in a real browser: run page, comparison, theme, keyboard, phone, accessibility."""

import itertools
import re
from pathlib import Path

import pytest

from destinations import RunDirectory
from destinations.runs import open_runs
from events import FlightRecorder, Run
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.browser.opened import Opened

pytestmark = pytest.mark.xdist_group("browser")

VIEWS = ["runs", "charts", "media", "explore", "compare", "run"]


def show(opened, view):
    """Shows a view with two runs, and waits for its last element."""
    query = f"run={opened.id_of('alpha')}&run={opened.id_of('beta')}"
    opened.go(f"run/{opened.id_of('alpha')}" if view == "run" else f"{view}?{query}")
    last = {
        "runs": ".grid-row[data-run]", "charts": ".chart .plot .main-svg", "media": ".media figure", "explore": "#scatter .main-svg",
        "compare": '[data-panel="Parting"]', "run": '[data-panel="Hyperparameters"]',
    }  # fmt: skip
    opened.page.locator(last[view]).first.wait_for(state="attached")


def test_the_page_of_a_run_shows_settings_metrics_and_costs(opened):
    """The page has hyperparameters, metrics with their extremes, sessions, and the cost of logging."""
    page = opened.page
    show(opened, "run")
    assert page.inner_text("h1") == "alpha"
    row = next(row for row in opened.answer("runs")["rows"] if row["name"] == "alpha")
    assert f"Id {row['run_id']}" in page.inner_text(".run-page"), "the id by which the shell finds it"
    hyperparameters = page.inner_text('[data-panel="Hyperparameters"]')
    assert re.search(r"lr\s+0\.1\b", hyperparameters)
    loss = (
        page.locator('[data-panel="Metrics"] tbody tr')
        .filter(has_text="loss")
        .locator("td")
        .all_inner_texts()
    )
    assert loss[:6] == ["loss", "0.005", "0.005", "199", "1", "0"]
    cost = page.inner_text('[data-panel="What logging cost"]')
    assert "Nothing was lost" in cost
    assert re.search(r"Calls\s+200\b", cost)
    assert page.locator('[data-panel="Sessions"] tbody tr').count() == 1


def test_a_run_page_begins_with_its_curves(opened):
    """Evaluation metrics come first, above all tables, whichever runs are selected."""
    page = opened.page
    alpha = opened.id_of("alpha")
    opened.go(f"run/{alpha}?run={opened.id_of('beta')}&band=ranks")
    line = opened.drawn("loss")[alpha]
    assert line["y"] == [1 / (1 + step) for step in range(200)]
    assert page.locator(".curves .chart h3").all_inner_texts() == ["val/acc", "loss"]
    assert page.get_by_label("Pin").count() == 0
    tops = opened.tops(".run-facts", ".curves", ".panels")
    assert tops == sorted(tops)
    page.locator('.chart[data-metric="loss"]').get_by_label("Enlarge").click()
    opened.until("() => document.querySelector('.chart[data-metric=loss].wide')")
    page.locator(".run-head").get_by_role("link", name="Charts").click()
    opened.until("(id) => location.hash.startsWith('#/charts') && location.hash.includes(`run=${id}`)", alpha)


def test_compare_shows_differences_and_the_first_different_step(opened):
    """Compare shows differing hyperparameters, best values, differences from the first run, and the step."""
    page = opened.page
    show(opened, "compare")
    rows = page.locator('[data-panel="Hyperparameters"] tr:not(.section)')
    assert [row.split() for row in rows.all_inner_texts()] == [["lr", "0.1", "0.01"]]
    loss = page.locator('[data-panel="Metrics"] tr', has_text="loss")
    assert loss.locator(".best-value").all_inner_texts() == ["0.005000"], "the smaller loss is marked"
    assert loss.locator(".apart").all_inner_texts() == ["+0.005000"]
    assert "diverge at step 0, in loss" in " ".join(page.inner_text('[data-panel="Parting"]').split())
    assert page.locator(".curves .chart h3").all_inner_texts() == ["val/acc", "loss"]
    assert len(opened.drawn("loss", 2)) == 2
    page.get_by_label("Same in all").check()
    alike = page.locator('[data-panel="Same in all"] tr:not(.section)').all_inner_texts()
    assert [row.split() for row in alike] == [["seed", "1", "1"], ["model", "small", "small"]]


def test_compare_shows_the_values_at_a_step(opened):
    """Each metric has its value at the chosen step, which is in the URL."""
    page = opened.page
    show(opened, "compare")
    page.locator("#compared").select_option("step")
    page.get_by_label("Step", exact=True).fill("9")
    opened.until(
        "() => [...document.querySelectorAll('[data-panel=Metrics] tr')].some((row) => /loss.*0\\.10*\\D.*0\\.20*\\D/s.test(row.innerText))"
    )
    assert "of=step" in page.url
    assert "step=9" in page.url


def test_dark_and_light(new_page, viewer):
    """The theme follows the system until you switch it; the page remembers that, and charts follow."""
    opened = Opened(new_page(color_scheme="dark"), viewer)
    page = opened.page
    show(opened, "charts")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert sum(map(int, re.findall(r"\d+", page.evaluate(ground))[:3])) < 100
    opened.drawn("loss", 2)
    dark = {trace["color"] for trace in opened.traces("loss").values()}
    page.keyboard.press("t")
    assert sum(map(int, re.findall(r"\d+", page.evaluate(ground))[:3])) > 600
    opened.until(
        "(dark) => !document.querySelector('.chart .plot').data.some((trace) => dark.includes(trace.line?.color))",
        list(dark),
    )
    page.reload()
    assert sum(map(int, re.findall(r"\d+", page.evaluate(ground))[:3])) > 600


def test_keyboard_reaches_every_view(opened):
    """Digits change the view, ? shows the keys and Escape closes them; the browser's back returns."""
    page = opened.page
    for key, heading in [("2", "charts"), ("3", "media"), ("4", "explore"), ("5", "compare"), ("1", "runs")]:
        page.keyboard.press(key)
        opened.until("(view) => document.querySelector('main').dataset.page === view", heading)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.go_back()
    opened.until("() => document.querySelector('main').dataset.page === 'compare'")


def test_a_phone_shows_each_view_without_scrolling_sideways(new_page, viewer):
    """On a phone, nothing lies beside the screen."""
    opened = Opened(new_page(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True), viewer)
    for view in VIEWS:
        show(opened, view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390, view
        assert opened.page.evaluate("innerWidth") == 390, view


def test_a_phone_shows_three_columns_and_charts_first(new_page, viewer):
    """The table has name, status and the main metric; charts stand above the list of runs."""
    opened = Opened(new_page(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True), viewer)
    show(opened, "runs")
    heads = opened.page.locator("[role=columnheader]").all_inner_texts()
    assert heads == ["", "Name", "Status", "val/acc"]
    assert opened.until("() => document.querySelector('.grid').scrollWidth <= 390")
    show(opened, "charts")
    chart = opened.box(opened.page.locator(".chart").first)["y"]
    assert chart < 210
    assert chart < opened.box(opened.page.locator(".sidebar"))["y"]


BROKEN = """
() => {
    // Words that are split over two lines.
    const broken = [];
    const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode;
        if (!node.parentElement.checkVisibility() || node.parentElement.closest('svg, option, .log')) continue;
        for (const { 0: word, index } of node.data.matchAll(/[a-z0-9]+/gi)) {
            const range = document.createRange();
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const tops = [...range.getClientRects()].map(({ top }) => Math.round(top));
            if (word.length < 20 && new Set(tops).size > 1) broken.push(word);
        }
    }
    return broken;
}
"""


@pytest.fixture(scope="module")
def long_names(tmp_path_factory):
    """The server of two runs with long names of all kinds, and more tags than fit."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path_factory.mktemp("long") / "runs"
    for at in (1, 2):
        name = f"resnet50-imagenet-baseline-lr0.3-weight_decay0.04-seed{at}"
        with Written(root / name, tags=["baseline", "imagenet", "augmented", "second-try"]) as run:
            run.logger.log_hyperparameters(
                {"lr": 0.1 * at, "seed": at, "optimizer.schedule.warmup_fraction_of_all_steps": 0.05 * at}
            )
            for step in range(20):
                run.log(
                    {"val/top5_accuracy_of_the_averaged_weights": step / at, "loss": 1 / (step + at)}, step
                )
            run.logger.log_text("it went well", "Notes_of_the_evaluation_of_averaged_weights", step=1)
    with (
        open_runs(root, cache=tmp_path_factory.mktemp("index")) as runs,
        server.Viewer(runs, port=0) as viewer,
    ):
        yield viewer


@pytest.mark.parametrize("width", [360, 400])
def test_a_phone_breaks_no_word_inside(long_names, new_page, width):
    """Long names break after their separators, nothing lies beside the screen, and axes scroll."""
    opened = Opened(
        new_page(viewport={"width": width, "height": 800}, is_mobile=True, has_touch=True), long_names
    )
    ids = [row["id"] for row in opened.answer("runs")["rows"]]
    last = {"runs": ".grid-row[data-run]", "charts": ".chart .main-svg", "media": ".text-record",
            "explore": "#parallel polyline", "compare": "[data-panel=Parting]", "run": ".curves .main-svg"}  # fmt: skip
    for view in VIEWS:
        opened.go(f"run/{ids[0]}" if view == "run" else f"{view}?run={ids[0]}&run={ids[1]}")
        opened.page.locator(last[view]).first.wait_for(state="attached")
        assert opened.page.evaluate(BROKEN) == [], view
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, view
    opened.go("explore?sx=hparams.lr")
    names = opened.page.locator("#parallel .axis-name")
    names.first.wait_for()
    boxes = names.evaluate_all(
        "(all) => all.map((one) => [one.getBoundingClientRect().left, one.getBoundingClientRect().right])"
    )
    assert all(right <= left for (_, right), (left, _) in itertools.pairwise(boxes))


def test_clipped_tags_fade_out(long_names, new_page):
    """Tags without room fade out, and the tooltip lists all of them."""
    opened = Opened(new_page(), long_names)
    cell = opened.page.locator('.grid-row[data-run] [data-column="tags"]').first
    tags = cell.locator(".fading")
    assert tags.evaluate("(node) => node.scrollWidth > node.clientWidth")
    assert "gradient" in tags.evaluate("(node) => getComputedStyle(node).maskImage")
    assert cell.get_attribute("title") == "baseline, imagenet, augmented, second-try"


AXE = Path(__file__).parents[3] / "page" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_view(new_page, viewer, scheme):
    """axe-core checks names for screen readers, contrast, headings and landmarks, light and dark."""
    if not AXE.is_file():
        pytest.skip("needs axe-core: make page")
    opened = Opened(new_page(color_scheme=scheme), viewer)
    for view in VIEWS:
        show(opened, view)
        opened.page.evaluate(AXE.read_text())
        found = opened.page.evaluate(
            "async () => (await axe.run()).violations.map(({ id, nodes }) => [id, nodes[0].html])"
        )
        assert found == [], view
        assert opened.page.evaluate(
            "document.querySelectorAll('[id]').length === new Set([...document.querySelectorAll('[id]')].map((node) => node.id)).size"
        ), view


def test_focus_is_seen_and_reaches_the_controls(opened):
    """Tab goes through the controls, and the focused one has an outline."""
    page = opened.page
    show(opened, "charts")
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "(() => { const node = document.activeElement; return node.id || node.getAttribute('aria-label') || node.innerText; })()"
            )
        )
        assert page.evaluate(
            "(() => { const node = document.activeElement; const style = getComputedStyle(node); return style.outlineStyle !== 'none' || node.closest('.field') !== null; })()"
        )
    assert {"Skip to content", "search", "x-axis", "smooth"} <= seen


def test_the_page_contacts_no_other_servers(new_page, viewer):
    """The page needs only its own server."""
    page = new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    opened = Opened(page, viewer)
    for view in VIEWS:
        show(opened, view)
    assert [url for url in asked if not url.startswith((viewer.address, "data:", "blob:"))] == []


def test_the_page_of_a_run_shows_its_flight_recordings(tmp_path, open_root):
    """The page shows which rank waits where, and the stacks; text of the run stays text."""

    def train_and_fail():
        with Run(RunDirectory(tmp_path / "runs" / "failed"), FlightRecorder(), run_name="failed") as run:
            run.log_metrics({"loss": 0.5})
            run.batch_end()
            raise ValueError("<img src=x onerror=alert(1)>")

    with pytest.raises(ValueError, match="<img"):
        train_and_fail()
    opened = open_root()
    opened.go(f"run/{opened.id_of('failed')}")
    panel = opened.page.locator('[data-panel="Flight recording"]')
    panel.locator("summary").click()
    text = panel.inner_text()

    assert "rank 0: exception, at test_page.py:" in text
    assert "<img src=x onerror=alert(1)>" in text
    assert "in train_and_fail" in text.replace(
        "test_the_page_of_a_run_shows_its_flight_recordings.<locals>.", ""
    )


def test_the_page_of_a_run_shows_its_time(tmp_path, open_root):
    """The page shows a band of times with the goodput, and a table of faults and their costs."""
    run = tmp_path / "runs" / "slow"
    (run / "time").mkdir(parents=True)
    (run / "metrics.csv").write_text("step,epoch,time,loss\n1,0,1.0,2.0\n")
    (run / "time" / "rank-0.csv").write_text(
        "session,begin,end,step,start,data,forward,backward\n100,100,110,9,1,2,3,4\n150,150,160,19,1,2,3,4\n"
    )
    opened = open_root()
    opened.go(f"run/{opened.id_of('slow')}")
    panel = opened.page.locator('[data-panel="Time"]')
    text = panel.inner_text()
    faults = opened.page.locator('[data-panel="Faults"]').inner_text()
    # Above everything else about the run.
    tops = opened.tops('[data-panel="Time"]', ".panels")
    widths = opened.until(
        "() => { const all = [...document.querySelectorAll('.time-band span')].map((one) => one.clientWidth);"
        " return all.length && all; }"
    )

    assert "Goodput 23.3 % of 1 min" in text
    assert sorted(line for line in text.splitlines() if line.startswith(("training", "gone"))) == [
        "gone 66.7 %, 40 s",
        "training 23.3 %, 14 s",
    ]
    # Training, data, starting, gone.
    assert [round(width * 60 / sum(widths)) for width in widths] == [14, 4, 2, 40]
    assert "Lost" in faults
    assert tops[0] < tops[1]


def test_paper_is_light(opened):
    """A dark page prints text and charts dark on white, without controls."""
    page = opened.page
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    opened.go(f"charts?run={opened.id_of('alpha')}")
    opened.drawn("loss")
    page.emulate_media(media="print")
    opened.until("() => document.querySelector('.chart .xtick text').getAttribute('fill') === '#5d5f66'")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(26, 27, 30)"
    assert not page.locator("#header").is_visible()
    assert not page.locator(".sidebar").is_visible()
    page.emulate_media(media="screen")
    opened.until("() => document.querySelector('.chart .xtick text').getAttribute('fill') === '#a2a5ad'")
    page.emulate_media(media="null")


def test_the_list_of_runs_is_widened_and_stays_so(opened):
    """Keys move the edge of the list, and a reload keeps its width."""
    page = opened.page
    show(opened, "charts")
    width = "document.querySelector('.sidebar').clientWidth"
    before = page.evaluate(width)
    page.get_by_role("separator").press("ArrowRight")
    after = page.evaluate(width)
    assert after > before
    page.reload()
    opened.until("(after) => document.querySelector('.sidebar').clientWidth === after", after)


def test_the_list_of_runs_has_one_tab_stop_a_run(opened):
    """The keys x and Delete replace the buttons of a run."""
    page = opened.page
    show(opened, "charts")
    beta = page.locator(f'.legend [data-run="{opened.id_of("beta")}"]')
    beta.wait_for()
    assert beta.locator("a, button:not([tabindex='-1'])").count() == 1
    beta.locator("a").press("x")
    opened.until("() => document.querySelectorAll('.legend .off').length === 1")
    beta.locator("a").press("Delete")
    opened.until("() => document.querySelectorAll('.legend li').length === 1")


@pytest.fixture
def noted(tmp_path, new_page):
    """The page of a run with a note of several lines, a log, a checkpoint and an artifact."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path / "runs"
    with Written(root / "a") as run:
        run.log({"loss": 0.5}, 0)
    (root / "a" / "train.log").write_text("first line\n" * 50)
    (root / "a" / "checkpoints").mkdir()
    (root / "a" / "checkpoints" / "ep1.pt").write_bytes(b"weights")
    with (
        open_runs(root, cache=tmp_path / "index") as runs,
        server.Viewer(runs, port=0) as viewer,
    ):
        runs.edit("a", notes="one\ntwo\nthree")
        opened = Opened(new_page(viewport={"width": 1440, "height": 900}), viewer)
        opened.go(f"run/{opened.id_of('a')}")
        opened.page.wait_for_selector('[data-panel="Log"]')
        yield opened
        opened.page.goto("about:blank")


def test_the_page_of_a_run_keeps_lines_and_links_files_beside_the_log(noted):
    """A note keeps its lines, the name of a checkpoint downloads it, and the log stands at the side."""
    page = noted.page
    assert "one\ntwo\nthree" in page.inner_text(".run-facts >> nth=1")
    with page.expect_download() as download:
        page.get_by_role("link", name="ep1.pt").click()
    assert download.value.path().read_bytes() == b"weights"
    log, curves = noted.box(page.locator('[data-panel="Log"]')), noted.box(page.locator(".curves"))
    assert log["x"] >= curves["x"] + curves["width"]
    assert log["y"] < 400


def test_a_star_makes_a_run_a_favourite(noted):
    """The star adds a tag, which filters and the shell know, and removes it again."""
    page = noted.page
    for label, tags in [("Favourite", ["favourite"]), ("Remove from favourites", [])]:
        page.locator(".run-head").get_by_label(label, exact=True).click()
        noted.until("(on) => document.querySelector('.star').ariaPressed === String(on)", bool(tags))
        assert noted.answer("runs")["rows"][0]["tags"] == tags
