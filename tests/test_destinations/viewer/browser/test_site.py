"""An exported site in a real browser, opened from a file: no server, no `fetch`, no modules."""

import shutil

import pytest

from destinations.cli import main
from destinations.runs import open_runs
from destinations.runs.views import save_view
from tests.test_destinations.viewer.browser.opened import Opened

pytestmark = pytest.mark.xdist_group("browser")


class OpenedSite(Opened):
    """A site opened from its folder."""

    def __init__(self, page, folder):
        self.page = page
        self.address = (folder / "index.html").as_uri()
        page.goto(self.address)

    def go(self, fragment):
        """Shows a view by its fragment."""
        self.page.goto(f"{self.address}#/{fragment}")

    def id_of(self, name):
        """Returns a run's id in URLs."""
        row = self.page.locator(".grid-row", has=self.page.get_by_role("link", name=name, exact=True))
        return row.get_attribute("data-run")


@pytest.fixture(scope="module")
def site(run_root, tmp_path_factory):
    """The exported site of the runs."""
    folder = tmp_path_factory.mktemp("site") / "site"
    assert main(["view", str(run_root), "--export", str(folder)]) == 0
    return folder


def test_a_site_opens_with_its_view(run_root, tmp_path, new_page):
    """The site has the chosen and hidden runs, the filter and the columns of the exported view."""
    root, folder = tmp_path / "runs", tmp_path / "site"
    for name in ("alpha", "beta", "seed2", "seed3"):
        shutil.copytree(run_root / name, root / name)
    with open_runs(root, cache=tmp_path / "index") as runs:
        chosen = [runs[name].run_id for name in ("alpha", "beta", "seed2")]
    saved = {
        "where": "loss < 1",
        "run": chosen,
        "off": chosen[1:2],
        "column": ["hparams.lr"],
        "goal": "min.loss",
    }
    save_view(root, "pair", saved)
    assert main(["view", str(root), "--export", str(folder), "--view", "pair"]) == 0

    opened = OpenedSite(new_page(), folder)
    opened.page.wait_for_selector(".grid-row[data-run].chosen")

    assert opened.page.locator(".grid-row .name").all_inner_texts() == ["alpha", "seed2"]
    assert opened.page.locator(".grid-row.chosen").count() == 2
    assert opened.page.locator("[role=columnheader]").all_inner_texts() == ["", "Name", "lr"]
    ids = {opened.id_of(name) for name in ("alpha", "seed2")}
    opened.page.keyboard.press("2")
    assert set(opened.drawn("loss", 2)) == ids


def test_a_site_from_a_file_shows_table_charts_and_media(new_page, site):
    """All views of a site work from a file, and after a reload."""
    page = new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    opened = OpenedSite(page, site)
    page.wait_for_selector(".grid-row[data-run]")
    assert page.locator(".grid-row .name").count() == 6
    assert page.inner_text("#live") == "exported"
    alpha, beta = opened.id_of("alpha"), opened.id_of("beta")
    page.fill("#search", "seed")
    opened.until("() => document.querySelectorAll('.grid-row .name').length === 2")
    opened.go(f"charts?run={alpha}&run={beta}")
    lines = opened.drawn("loss", 2)
    assert lines[alpha]["y"] == [1 / (1 + step) for step in range(200)]
    page.select_option("#x-axis", "relative")
    opened.until(
        "() => document.querySelector('.chart[data-metric=loss] .plot').layout.x.title === 'seconds'"
    )
    page.select_option("#x-axis", "step")
    opened.go(f"charts?run={alpha}&zoom=50~60~~~loss")
    opened.until(
        "() => document.querySelector('.chart[data-metric=loss] .plot').data?.find((one) => one.meta.part === 'line').x.length === 11"
    )
    page.reload()
    opened.until(
        "() => document.querySelector('.chart[data-metric=loss] .plot').data?.find((one) => one.meta.part === 'line').x.length === 11"
    )
    opened.go(f"media?run={alpha}")
    opened.until("() => document.querySelector('.images img')?.naturalWidth === 8")
    opened.until("() => document.querySelector('canvas.mask')?.width === 8")
    page.get_by_role("button", name="sky").click()
    assert page.locator("canvas.mask").first.evaluate("(canvas) => canvas.style.visibility") == "hidden"
    page.get_by_role("button", name="sky").click()
    assert page.locator("canvas.mask").first.evaluate("(canvas) => canvas.style.visibility") == "visible"
    for kind, ready in [
        (
            "audio",
            "document.querySelector('audio')?.duration === 1",
        ),
        ("point_clouds", "document.querySelector('canvas.cloud')?.dataset.points === '2000'"),
        ("tables", "document.querySelectorAll('.tables tbody tr').length === 3"),
        ("texts", "document.querySelector('.text-record')?.innerText.startsWith('step 199')"),
        ("histograms", "document.querySelector('.ridges')?.data?.length === 3"),
    ]:
        opened.go(f"media?run={alpha}&kind={kind}")
        opened.until(f"() => {ready}")
    opened.go(f"run/{alpha}")
    page.wait_for_selector('[data-panel="Hyperparameters"]')
    assert page.get_by_role("button", name="Edit note").count() == 0
    opened.go(f"compare?run={alpha}&run={beta}")
    opened.until("() => document.querySelector('[data-panel=Parting]')?.innerText.includes('step 0')")
    opened.go(f"explore?run={alpha}")
    opened.until("() => document.querySelector('#scatter').data?.[0].x.length > 0")
    page.wait_for_selector(".importance :text('Which hyperparameter matters needs the server')")
    page.get_by_role("combobox", name="Colour").select_option("status")
    opened.until("() => document.querySelector('#colors').innerText.includes('completed')")
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_site_names_the_views_that_need_the_server(new_page, site):
    """The site says that a filter needs the server."""
    opened = OpenedSite(new_page(), site)
    opened.page.wait_for_selector(".grid-row[data-run]")
    opened.page.fill("#filter", "hparams.lr > 0")
    opened.page.wait_for_selector(".filter-error:visible")
    assert "need the server" in opened.page.inner_text(".filter-error")


def test_a_site_keeps_its_views_in_the_history(new_page, site):
    """Back, forward and reload show each view again; old links say what is missing."""
    page = new_page()
    opened = OpenedSite(page, site)
    page.wait_for_selector(".grid-row[data-run]")
    alpha = opened.id_of("alpha")
    page.locator(f'.grid-row[data-run="{alpha}"] .pick input').check()
    views = ["runs", "charts", "media", "explore", "compare"]
    for at, view in enumerate(views[1:], 2):
        page.keyboard.press(str(at))
        opened.until("(view) => document.querySelector('main').dataset.page === view", view)
        page.reload()
        opened.until("(view) => document.querySelector('main').dataset.page === view", view)
    for view in reversed(views[:-1]):
        page.go_back()
        opened.until("(view) => document.querySelector('main').dataset.page === view", view)
    opened.until("() => document.querySelectorAll('.grid-row.chosen').length === 1")
    page.go_forward()
    opened.drawn("loss")
    for fragment, said in [
        ("run/gone", "not in the exported site"),
        ("charts?run=gone", "not in the exported site"),
        ("media?run=gone", "not in the exported site"),
        ("runs?sort=summary.gone", "no summary.gone:"),
        (f"charts?run={alpha}&x=metric:val/acc", "needs the server"),
        (f"charts?run={alpha}&band=ranks", "need the server"),
    ]:
        opened.go(fragment)
        opened.until("(said) => document.querySelector('main').innerText.includes(said)", said)
