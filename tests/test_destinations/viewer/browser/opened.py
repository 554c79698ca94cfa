"""The page in a real browser, for tests and benchmarks."""

import shutil

WAIT_MS = 60_000
# Requests for rows of the table: if the query is too long for a URL, the body has the names.
ROWS = "**/api/runs*"


def browser_path():
    """Returns the browser of this machine, or None."""
    for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return None


class Opened:
    """The page of a server, as tests use it."""

    def __init__(self, page, viewer):
        self.page = page
        self.address = viewer.address
        self.token = viewer.token
        page.goto(viewer.url)

    def go(self, fragment):
        """Shows a view by its fragment, like a link."""
        self.page.goto(f"{self.address}/#/{fragment}")

    def id_of(self, name):
        """Returns a run's id in URLs."""
        answer = self.answer("runs?limit=1000&archived=all")
        return next(row["id"] for row in answer["rows"] if row["name"] == name)

    def answer(self, query):
        """Returns the server's answer to a request of the page's API."""
        # A browser's fetch does this if the server closes an idle connection in that moment.
        return self.page.request.get(f"{self.address}/api/{query}", max_retries=3).json()

    def traces(self, metric, part="line"):
        """Returns what is drawn for a metric: by run id, x and y of each trace of a kind."""
        return _by_run(self.page.evaluate(_TRACES, [metric, part]), part)

    def until(self, condition, argument=None):
        """Waits until a JavaScript function returns a truthy value, and returns it."""
        tolerant = f"""(argument) => {{
            try {{ return ({condition})(argument); }}
            catch (error) {{ if (error instanceof TypeError) return false; throw error; }}
        }}"""
        return self.page.wait_for_function(tolerant, arg=argument, timeout=WAIT_MS).json_value()

    def box(self, locator):
        """Returns where an element is; waits for one that is being drawn again."""
        for _ in range(WAIT_MS // 1000):
            locator.wait_for()
            if (found := locator.bounding_box()) is not None:
                return found
        raise AssertionError(f"{locator} is nowhere")

    def hovered(self, metric, part="", height=0.5):
        """Moves the mouse over the middle of a chart, and returns its hover text once that contains a part.

        A chart that is being drawn ignores the mouse, so the mouse moves again.
        """
        from playwright.sync_api import TimeoutError as LateError

        area = self.page.locator(f'[data-metric="{metric}"] .nsewdrag')
        condition = """([metric, part]) => {
            const box = document.querySelector(`[data-metric="${metric}"] .hover-box`);
            return box && !box.hidden && box.innerText.includes(part) && box.innerText;
        }"""
        for _ in range(WAIT_MS // 1000):
            box = self.box(area)
            self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * height, steps=3)
            try:
                return self.page.wait_for_function(condition, arg=[metric, part], timeout=1000).json_value()
            except LateError:
                self.page.mouse.move(box["x"] + box["width"] / 2 + 5, box["y"] + box["height"] * height)
        raise AssertionError(f"nothing is said beside {metric}")

    def tops(self, *selectors):
        """Returns the tops of elements, the last of each selector, at once: the view may be redrawn after."""
        return self.until(
            "(all) => all.map((one) => [...document.querySelectorAll(one)].at(-1).getBoundingClientRect().y)",
            list(selectors),
        )

    def drawn(self, metric, count=1):
        """Waits until a chart has at least so many lines, and returns them."""
        # All at once, because the chart may be redrawn right after.
        found = self.page.wait_for_function(
            f"([metric, count]) => {{ const found = ({_TRACES})([metric, null]);"
            "return found.filter((trace) => ['line', 'median'].includes(trace.part)).length >= count && found; }",
            arg=[metric, count],
            timeout=WAIT_MS,
        ).json_value()
        return _by_run(found, "line")


_TRACES = """([metric, part]) => [...document.querySelectorAll('.chart')].filter((card) => card.dataset.metric === metric)
    .flatMap((card) => [...(card.querySelector('.plot')?.data ?? [])])
    .map((trace) => ({part: trace.meta?.part, run: trace.meta?.run ?? trace.meta?.band, branch: trace.meta?.branch,
        x: [...(trace.x ?? [])], y: [...(trace.y ?? [])], color: trace.line?.color, dash: trace.line?.dash}))
    .filter((trace) => part === null || trace.part === part)"""


def _by_run(traces, part):
    """Returns the traces of a kind by run id; rows that a resume abandoned have the key "left"."""
    of_part = [trace for trace in traces if trace["part"] == part]
    return {trace["run"] if trace.get("branch") is None else "left": trace for trace in of_part}
