"""Links, the history and the focus in a real browser: the page shows the requested view."""

import pytest

from destinations.viewer.commands import page_to

pytestmark = pytest.mark.xdist_group("browser")


def row(opened, name):
    """Returns the row of a run in the table."""
    return opened.page.locator(f'.grid-row[data-run="{opened.id_of(name)}"]')


def test_a_link_has_the_current_selection(opened):
    """A run opened after others were chosen leaves them chosen, even if its row was drawn before."""
    page = opened.page
    row(opened, "alpha").locator(".pick input").check()
    row(opened, "beta").locator(".name a").click()
    page.wait_for_selector(".run-page h1")
    assert f"run={opened.id_of('alpha')}" in page.url
    page.go_back()
    opened.until("() => document.querySelectorAll('.grid-row.chosen').length === 1")


def test_a_removed_run_stays_out(opened):
    """The links beside charts lead to the current selection, and keep how charts are shown."""
    page = opened.page
    alpha, beta = opened.id_of("alpha"), opened.id_of("beta")
    opened.go(f"charts?run={alpha}&run={beta}")
    opened.drawn("loss", 2)
    page.click("#log-y")
    page.locator(f'.legend [data-run="{beta}"]').get_by_label("Take beta out").click()
    page.locator(".sidebar").get_by_role("link", name="Choose").click()
    opened.until("() => document.querySelectorAll('.grid-row.chosen').length === 1")
    assert beta not in page.url
    assert "logy=1" in page.url


def test_skip_to_content_keeps_the_view(opened):
    """The first link of the page moves the focus to the content and keeps the view."""
    page = opened.page
    opened.go(f"charts?run={opened.id_of('alpha')}&smooth=0.5")
    opened.drawn("loss")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.evaluate("document.querySelector('main').dataset.page") == "charts"
    assert "smooth=0.5" in page.url


def test_the_focus_stays_where_the_keyboard_left_it(opened):
    """A control that is drawn again keeps the focus; on another page the content has it."""
    page = opened.page
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "theme"
    heading = page.get_by_role("columnheader", name="loss").get_by_role("button").first
    heading.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-sort=descending]")
    assert page.evaluate("document.activeElement.parentElement.title") == "summary.loss"
    page.focus(".grid")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".run-page h1")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_link_to_a_missing_column_shows_the_table_without_it(opened):
    """An old link doesn't lead to an empty table, and a message names what was left out."""
    for query, left in [
        ("sort=-summary.gone", "summary.gone"),
        ("group=hparams.gone", "hparams.gone"),
        ("column=hparams.lr&column=summary.lost", "summary.lost"),
        ("sort=nonsense&unknown=1&constructor=2", "nonsense"),
    ]:
        opened.go(f"runs?{query}")
        opened.page.wait_for_selector(f".filter-error:visible:has-text('no {left}:')")
        assert row(opened, "alpha").is_visible()


def test_a_link_to_no_run_shows_the_table(opened):
    """A link to the page of a run without an id shows all runs."""
    opened.go("run/")
    opened.page.wait_for_selector(".grid-row[data-run]")


def test_back_and_forward_go_through_all_pages(opened):
    """Each step in the history shows its page with its selection."""
    page = opened.page
    views = ["runs", "charts", "media", "explore", "compare"]
    opened.go(f"runs?run={opened.id_of('alpha')}&run={opened.id_of('beta')}")
    opened.until("() => document.querySelectorAll('.grid-row.chosen').length === 2")
    for at, view in enumerate(views[1:], 2):
        page.keyboard.press(str(at))
        opened.until("(view) => document.querySelector('main').dataset.page === view", view)
    for view in reversed(views[:-1]):
        page.go_back()
        opened.until("(view) => document.querySelector('main').dataset.page === view", view)
    opened.until("() => document.querySelectorAll('.grid-row.chosen').length === 2")
    for view in views[1:]:
        page.go_forward()
        opened.until("(view) => document.querySelector('main').dataset.page === view", view)


def test_the_url_has_the_last_of_many_changes(opened):
    """A fast slider leaves its last position in the URL and in the history."""
    page = opened.page
    opened.go(f"charts?run={opened.id_of('alpha')}")
    opened.drawn("loss")
    page.evaluate(
        """async () => {
            const { update } = await import("./static/state.js");
            const notes = [];
            const replace = history.replaceState;
            globalThis.notes = () => notes.length;
            history.replaceState = function (...given) { notes.push(given[2]); return replace.apply(this, given); };
            for (let at = 0; at <= 300; at += 1) update({ smooth: String(at / 400) });
        }"""
    )
    opened.until("() => location.hash.includes('smooth=0.75')")
    assert page.evaluate("notes()") <= 60
    page.evaluate(
        """async () => {
            const { update } = await import("./static/state.js");
            for (let at = 0; at <= 10; at += 1) update({ smooth: String(at / 100) });
            update({ page: "media" });
        }"""
    )
    page.go_back()
    opened.until("() => document.querySelector('main').dataset.page === 'charts'")
    assert "smooth=0.1" in page.url
    assert page.input_value("#smooth") == "0.1"


def test_a_panel_works_with_the_keyboard(opened):
    """Escape returns the focus to the button of a panel; a panel that loses the focus closes."""
    page = opened.page
    button = page.locator("#group")
    button.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    opened.until("() => location.hash.includes('group=status')")
    page.keyboard.press("Escape")
    assert button.evaluate("(node) => node === document.activeElement")
    assert button.get_attribute("aria-expanded") == "false"
    page.get_by_role("button", name="Columns").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".popover:visible")
    page.focus("#search")
    opened.until("() => !document.querySelector('.popover:not([hidden])')")


def test_a_file_that_leads_to_the_page_opens_it(viewer, new_page):
    """With `--open`, a browser that comes from a file keeps the cookie, and shows the runs."""
    page = new_page()
    with page_to(viewer.url) as file:
        page.goto(file.as_uri())
        page.wait_for_selector(".grid-row")
    assert "token" not in page.url
