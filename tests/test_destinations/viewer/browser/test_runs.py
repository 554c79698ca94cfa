"""The table of runs in a real browser: search, filter, columns, groups, selection, edits, scrolling."""

import json
import shutil
import time
from urllib.parse import urlsplit

import pytest

from tests.test_destinations.runs.written import change_sidecar
from tests.test_destinations.viewer.browser.browser_runs import HOSTILE

pytestmark = pytest.mark.xdist_group("browser")


def names(page):
    """Returns the names of the rows in the document."""
    return page.locator(".grid-row .name").all_inner_texts()


def wait_for_names(opened, *expected):
    """Waits until the table has these runs, in any order."""
    opened.until(
        """(names) => JSON.stringify([...document.querySelectorAll('.grid-row .name')].map((node) => node.innerText).sort())
            === JSON.stringify([...names].sort())""",
        list(expected),
    )


def test_table(opened):
    """The table has status, last values, tags, and differing hyperparameters."""
    assert {"alpha", "beta", "seed2", "seed3", "long", HOSTILE} == set(names(opened.page))
    row = opened.page.locator(f'.grid-row[data-run="{opened.id_of("alpha")}"]')
    assert row.locator('[data-column="status"]').inner_text() == "completed"
    assert row.locator('[data-column="hparams.lr"]').inner_text() == "0.1"
    assert row.locator('[data-column="summary.loss"]').inner_text() == "0.0050"
    assert row.locator('[data-column="hparams.model"]').count() == 0, "it is the same in all runs"
    assert row.locator(".tag").all_inner_texts() == ["baseline"]


def test_search(opened):
    """`/` focuses the search, which leaves runs with the text in name, tags or note."""
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("SEED")
    wait_for_names(opened, "seed2", "seed3")
    # Its first letters leave the same runs.
    opened.until("() => location.hash.includes('q=SEED')")


def test_filter(opened, console):
    """The page takes the filters of `destinations runs`, and shows an error until the filter is right."""
    page = opened.page
    page.fill("#filter", "hparams.lr == 0.1 and summary.loss < 0.012")
    wait_for_names(opened, "alpha", "seed2")
    page.fill("#filter", "hparams.lr = 0.1")
    page.wait_for_selector(".filter-error:visible")
    assert "Write ==" in page.inner_text(".filter-error")
    assert page.get_attribute("#filter", "aria-invalid") == "true"
    page.fill("#filter", 'status == "completed" and summary.val/acc > 0.99')
    wait_for_names(opened, "alpha", "beta")
    assert not page.locator(".filter-error").is_visible()
    # The latest text stays if another control is used right away.
    page.fill("#filter", "hparams.lr == 0.01")
    page.check("#archived")
    page.uncheck("#archived")
    wait_for_names(opened, "beta")
    assert all("400" in said for said in console)
    console.clear()


def test_filter_completes_names(opened):
    """Tab accepts a column that the filter suggests."""
    page = opened.page
    page.fill("#filter", "")
    page.click("#filter")
    page.keyboard.type("val/a")
    page.wait_for_selector(".hints:visible")
    page.keyboard.press("Tab")
    page.keyboard.type(" > 0.99")
    assert page.input_value("#filter") == "summary.val/acc > 0.99"
    wait_for_names(opened, "alpha", "beta")


def test_sort(opened):
    """A click on a heading sorts, descending first."""
    page = opened.page
    page.get_by_role("columnheader", name="loss").get_by_role("button").first.click()
    opened.until("() => document.querySelector('[aria-sort=descending]')")
    opened.until("() => document.querySelector('#row-0 .name')?.innerText === 'long'")
    page.get_by_role("columnheader", name="loss").get_by_role("button").first.click()
    opened.until("() => document.querySelector('#row-0 .name')?.innerText === 'alpha'")
    assert "sort=summary.loss" in page.url


def test_a_column_of_a_metric_says_what_it_shows(opened):
    """The heading says "last"; a click shows min and max over all steps, and keeps sorting by this column."""
    page = opened.page
    opened.go("runs?sort=-summary.val%2Facc")
    heading = page.get_by_role("columnheader", name="acc")
    assert heading.locator(".shown").inner_text() == "last"
    cell = f'.grid-row[data-run="{opened.id_of("beta")}"]'
    heading.locator(".shown").click()
    page.wait_for_selector(f'{cell} [data-column="min.val/acc"]')
    assert page.inner_text(f'{cell} [data-column="min.val/acc"]') == "0"
    assert "sort=-min.val" in page.url
    heading.locator(".shown").click()
    page.wait_for_selector(f'{cell} [data-column="max.val/acc"]')
    assert page.inner_text(f'{cell} [data-column="max.val/acc"]') == "0.99005"
    assert heading.get_attribute("aria-sort") == "descending"
    assert names(page)[:2] == ["alpha", "beta"]


def test_select_all_selects_all(opened):
    """The box in the heading selects all matching runs, and removes them again."""
    page = opened.page
    page.get_by_label("Select all runs").check()
    opened.until("() => document.querySelector('.actions strong')?.innerText === '6 selected'")
    page.get_by_label("Select all runs").uncheck()
    opened.until("() => !document.querySelector('.actions strong')")


def test_columns(opened):
    """The URL holds the chosen columns."""
    page = opened.page
    page.get_by_role("button", name="Columns").click()
    page.get_by_label("Find a column").fill("hparams.model")
    page.get_by_label("hparams.model").check()
    page.keyboard.press("Escape")
    opened.until(
        "() => [...document.querySelectorAll('[data-column=\"hparams.model\"]')].some((cell) => cell.innerText === 'small')"
    )
    page.reload()
    opened.until(
        "() => [...document.querySelectorAll('[data-column=\"hparams.model\"]')].some((cell) => cell.innerText === 'small')"
    )


def test_columns_without_a_dot(opened):
    """The run's own fields can be columns too, shown by their kind."""
    page = opened.page
    page.get_by_role("button", name="Columns").click()
    page.get_by_label("Find a column").fill("ended")
    page.get_by_label("ended_at").check()
    opened.until("() => /\\d:\\d\\d/.test(document.querySelector('[data-column=ended_at]')?.innerText ?? '')")


def test_groups(opened):
    """Groups start folded, with mean and deviation; an open one survives a reload, and its box selects it."""
    page = opened.page
    page.click("#group")
    page.get_by_label("hparams.lr").check()
    page.wait_for_selector(".group-row")
    groups = page.locator(".group-row").all_inner_texts()
    assert [text.split()[:2] for text in groups] == [["lr", "0.01"], ["lr", "0.1"], ["lr", "\N{EN DASH}"]]
    mean = page.locator('.group-row[data-group="0.1"] [data-column="summary.loss"]')
    assert (mean.inner_text(), "of 3 runs" in mean.get_attribute("title")) == ("0.0100 ± 0.0050", True)
    page.locator(".group-row button").nth(1).click()
    opened.until("() => document.querySelectorAll('.grid-row[data-run]').length === 3")
    page.reload()
    opened.until("() => document.querySelectorAll('.grid-row[data-run]').length === 3")
    page.get_by_label("Select the 3 runs of lr 0.1").click()
    opened.until("() => document.querySelector('.actions strong')?.innerText === '3 selected'")


def test_a_status_is_left_out_by_its_chip(own):
    """One click hides the runs of a status, another shows them; a metric needs no prefix in a filter."""
    page = own.page
    change_sidecar(own.root / "beta", status="failed")
    # No scan of the folder finds a change within a file.
    (own.root / "beta" / "touched").touch()
    page.get_by_role("button", name="failed 1").click()
    own.until("() => document.querySelectorAll('.grid-row[data-run]').length === 1")
    assert "without=failed" in page.url
    page.get_by_role("button", name="failed 1").click()
    wait_for_names(own, "alpha", "beta")
    page.fill("#filter", "val/acc > 0.992")
    wait_for_names(own, "alpha")


def test_selection(opened):
    """Arrows move, Space and x select, and the URL holds the selection."""
    page = opened.page
    page.focus(".grid")
    for key in ("ArrowDown", "Space", "ArrowDown", "x"):
        page.keyboard.press(key)
    opened.until("() => document.querySelectorAll('.grid-row.chosen').length === 2")
    chosen = [page.locator(".grid-row.chosen").nth(at).get_attribute("data-run") for at in (0, 1)]
    assert all(f"run={one}" in page.url for one in chosen)
    page.reload()
    opened.until("() => document.querySelectorAll('.grid-row.chosen').length === 2")
    assert "2 selected" in page.inner_text(".actions")


def test_hostile_texts(opened):
    """Names, tags and notes with markup are text in every view."""
    page = opened.page
    row = page.locator(f'.grid-row[data-run="{opened.id_of(HOSTILE)}"]')
    assert row.locator(".name").inner_text() == HOSTILE
    assert row.locator(".tag").all_inner_texts() == ["<b>bold</b>", "javascript:alert(1)"]
    for view in ("run", "charts", "media", "explore", "compare"):
        fragment = (
            f"run/{opened.id_of(HOSTILE)}"
            if view == "run"
            else f"{view}?run={opened.id_of(HOSTILE)}&run={opened.id_of('alpha')}"
        )
        opened.go(fragment)
        opened.until("(text) => document.querySelector('main').innerText.includes(text)", HOSTILE[:12])
        assert (
            page.evaluate(
                "document.querySelectorAll('main img[src=x], main script, main b > b, [onerror]').length"
            )
            == 0
        )
        assert page.evaluate(
            "[...document.querySelectorAll('a[href]')].every((link) => !link.href.startsWith('javascript:'))"
        )
        assert page.title() != "1"


@pytest.fixture
def own(run_root, tmp_path, open_root):
    """The page of a copy of the runs, which the test may change."""
    root = tmp_path / "runs"
    for name in ("alpha", "beta"):
        shutil.copytree(run_root / name, root / name)
        # The table shows their date, because an age would change during the test.
        change_sidecar(root / name, created_at=1.6e9)
    opened = open_root(root)
    opened.root = root
    opened.page.wait_for_selector(".grid-row[data-run]")
    return opened


def test_the_first_run_appears(own):
    """A run that starts to match the filter appears in an empty table."""
    page = own.page
    own.go("runs?where=%22new%22%20in%20tags")
    page.wait_for_selector(".grid-body .empty")
    token = {"Authorization": f"Bearer {own.token}"}
    answer = page.request.patch(
        f"{own.address}/api/runs/{own.id_of('beta')}", data={"tags": ["new"]}, headers=token
    )
    assert answer.ok
    wait_for_names(own, "beta")
    own.until("() => document.querySelector('.count').innerText === '1 run'")


def test_edit(own):
    """The reader edits note and tags in place, and the page writes them to the run folder."""
    page = own.page
    row = page.locator(f'.grid-row[data-run="{own.id_of("beta")}"]')
    row.locator('[data-column="note"]').dblclick()
    page.get_by_label("Note", exact=True).fill("diverged at 50")
    page.keyboard.press("Enter")
    own.until(
        "() => [...document.querySelectorAll('[data-column=note]')].some((node) => node.innerText === 'diverged at 50')"
    )
    row.locator('[data-column="tags"]').dblclick()
    page.get_by_label("Tags, separated by commas").fill("bad, again")
    page.keyboard.press("Enter")
    own.until("() => [...document.querySelectorAll('.tag')].some((node) => node.innerText === 'again')")
    edits = json.loads((own.root / "beta" / "edits.json").read_text())
    assert edits["notes"] == "diverged at 50"
    assert edits["added_tags"] == ["bad", "again"]
    page.reload()
    own.until(
        "() => [...document.querySelectorAll('[data-column=note]')].some((node) => node.innerText === 'diverged at 50')"
    )
    # An unchanged field writes nothing, on the run page neither.
    page.request.patch(
        f"{own.address}/api/runs/{own.id_of('beta')}",
        data={"note": "diverged\nat 50", "tags": ["size:1,2"]},
        headers={"Authorization": f"Bearer {own.token}"},
    )
    before = (own.root / "beta" / "edits.json").read_bytes()
    own.until("() => document.querySelector('#table, .grid').innerText.includes('size:1,2')")
    for column, label in (("note", "Note"), ("tags", "Tags, separated by commas")):
        row.locator(f'[data-column="{column}"]').dblclick()
        page.get_by_label(label, exact=True).press("Enter")
    own.go(f"run/{own.id_of('beta')}")
    for name in ("note", "tags"):
        page.get_by_role("button", name=f"Edit {name}").click()
        page.locator(".in-place").press("Enter")
        page.locator(".in-place").wait_for(state="detached")
    assert (own.root / "beta" / "edits.json").read_bytes() == before
    page.get_by_role("button", name="Edit tags").click()
    page.locator(".in-place").fill("size:1,2, new")
    page.keyboard.press("Enter")
    own.until("() => document.body.innerText.includes('size:1,2, new')")
    edits = json.loads((own.root / "beta" / "edits.json").read_text())
    assert (edits["notes"], edits["added_tags"]) == ("diverged\nat 50", ["size:1,2", "new"])


def test_unchanged_rows_stay_in_the_document(own):
    """A change of a run redraws only its row, so that a click on another isn't lost."""
    page = own.page
    beta, alpha = own.id_of("beta"), own.id_of("alpha")
    page.evaluate("(run) => { document.querySelector(`.grid-row[data-run='${run}']`).isOld = true; }", alpha)
    token = {"Authorization": f"Bearer {own.token}"}
    answer = page.request.patch(
        f"{own.address}/api/runs/{beta}", data={"note": "from elsewhere"}, headers=token
    )
    assert answer.ok
    own.until(
        "() => [...document.querySelectorAll('[data-column=note]')].some((node) => node.innerText === 'from elsewhere')"
    )
    assert page.evaluate("(run) => document.querySelector(`.grid-row[data-run='${run}']`).isOld", alpha)


def test_archive(own):
    """An archived run leaves the table, and is listed with the archived ones."""
    page = own.page
    page.locator(f'.grid-row[data-run="{own.id_of("beta")}"] .pick input').click()
    page.get_by_role("button", name="Archive", exact=True).click()
    wait_for_names(own, "alpha")
    page.check("#archived")
    wait_for_names(own, "beta")


def test_ten_thousand_runs(tmp_path, open_root):
    """Ten thousand runs scroll; the page creates and requests only the rows in view."""
    root = tmp_path / "runs"
    now = time.time()
    for index in range(10_000):
        folder = root / f"run{index:05}"
        folder.mkdir(parents=True)
        (folder / "sidecar.json").write_text(json.dumps({
            "schema_version": 1, "run_id": folder.name, "status": "completed", "created_at": now - index, "updated_at": now,
            "tags": [], "notes": "", "hparams": {"lr": index % 7}, "summary": {"loss": 1 / (1 + index)},
        }))  # fmt: skip
    opened = open_root(root)
    opened.page.wait_for_selector(".grid-row[data-run]")
    asked = []
    opened.page.on("request", lambda request: asked.append(request.url))
    assert opened.page.evaluate("document.querySelector('.grid').scrollHeight") > 250_000
    opened.page.get_by_label("Select all runs").check()
    opened.page.wait_for_selector(".toast:text('Selected 1000 of 10')")
    opened.page.get_by_role("button", name="Clear").click()
    asked.clear()
    opened.page.evaluate("document.querySelector('.grid').scrollTop = 1e9")
    opened.until(
        "() => [...document.querySelectorAll('.grid-row .name')].some((node) => node.innerText === 'run09999')"
    )
    assert opened.page.locator(".grid-body .grid-row").count() < 100
    assert len([url for url in asked if urlsplit(url).path == "/api/runs"]) <= 3, (
        "only the window in view is asked for"
    )
