"""Ten tasks that people do with a sweep in the viewer, with the clicks that each may take; for a test and a benchmark.

The tenth task, sending others a read-only site, is a command: `destinations view runs --export site/`.
"""

import attrs
import numpy as np

from tests.sweep import SPIKE_AT

__all__ = ["TASKS", "Hand", "Task", "add_images"]

BEST = "resnet50-imagenet-baseline-lr0.01-"
SPIKED = "resnet50-imagenet-baseline-lr0.3-wd0-seed0"
WITH_IMAGES = ("images-a", "images-b")


class Hand:
    """Clicks, drags, chooses and presses keys, and counts them.

    Args:
        opened: the page, an `Opened` of the browser tests.
    """

    def __init__(self, opened):
        self.opened = opened
        self.page = opened.page
        self.clicks = 0

    def click(self, locator):
        """Clicks."""
        self.clicks += 1
        locator.click()

    def press(self, key):
        """Presses a key."""
        self.clicks += 1
        self.page.keyboard.press(key)

    def choose(self, locator, value):
        """Chooses from a list."""
        self.clicks += 1
        locator.select_option(value)

    def drag(self, locator, start, end):
        """Drags across an element, from one share of its width to another."""
        self.clicks += 1
        box = self.opened.box(locator)
        self.page.mouse.move(box["x"] + box["width"] * start, box["y"] + box["height"] / 2)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] * end, box["y"] + box["height"] / 2 + 2, steps=3)
        self.page.mouse.up()

    def until(self, condition, argument=None):
        """Waits for a condition in JavaScript."""
        return self.opened.until(condition, argument)


@attrs.frozen
class Task:
    """A task.

    Attributes:
        name: its description.
        begin: goes to where the task begins; neither counted nor timed.
        act: does the task, and waits until the result is on screen.
        most: the most clicks that it may take.
    """

    name: str
    begin: object
    act: object
    most: int = 2


def add_images(log_to):
    """Adds two runs with images; `log_to` opens a run to be written."""
    for name in WITH_IMAGES:
        with log_to(name) as run:
            for step in (0, 100):
                run.logger.log_images(np.full((4, 4), step / 100), "Inputs", step=step)


def _runs(fragment="runs"):
    def begin(hand):
        hand.opened.go(fragment)
        hand.page.wait_for_selector(".grid-row[data-run], .group-row")

    return begin


def _charts(*names):
    def begin(hand):
        chosen = names or [f"{BEST}wd0-seed{seed}" for seed in range(5)]
        hand.opened.go("charts?" + "&".join(f"run={hand.opened.id_of(name)}" for name in chosen))
        hand.page.wait_for_selector(".split .page")
        if chosen[0] not in WITH_IMAGES:
            hand.opened.drawn("loss", len(chosen))

    return begin


def _best(hand):
    hand.click(hand.page.get_by_role("columnheader", name="val/acc").get_by_role("button").first)
    hand.until(f"() => document.querySelector('#row-0 .name')?.innerText.includes('{BEST}')")


def _best_against_second(hand):
    for place in (0, 1):
        hand.click(hand.page.locator(f"#row-{place} .pick input"))
    hand.press("5")
    hand.page.wait_for_selector('[data-panel="Parting"] .parting p')


def _rate_matters(hand):
    hand.click(hand.page.get_by_role("link", name="Explore"))
    hand.until("() => document.querySelector('#scatter').data?.[0].x.length >= 190")


def _zoom(hand):
    hand.drag(hand.page.locator('.chart[data-metric="loss"] .nsewdrag'), 0.57, 0.67)
    hand.until(
        """(step) => { const line = document.querySelector('.chart[data-metric=loss] .plot').data
            ?.find((one) => ['line', 'raw'].includes(one.meta.part) && one.y[one.x.indexOf(step)] === 50);
            return Boolean(line); }""",
        SPIKE_AT,
    )


def _images(hand):
    hand.click(hand.page.get_by_role("link", name="Media").first)
    hand.page.wait_for_selector(".images img")
    hand.clicks += 1
    hand.page.locator("#step").fill("0")
    hand.until("() => document.querySelectorAll('.images img').length === 2")
    hand.until("() => document.querySelector('.images output').innerText.includes('step 0')")


def _bands(hand):
    hand.choose(hand.page.locator("#band"), "range")
    hand.page.wait_for_selector(".band-legend li")
    hand.until("() => document.querySelector('.chart .plot').data?.some((one) => one.meta.part === 'median')")


def _hide_failed(hand):
    hand.click(hand.page.locator(".chip", has_text="failed"))
    hand.until("() => document.querySelector('.count').innerText === '194 runs'")


def _export_chart(hand):
    card = hand.page.locator('.chart[data-metric="loss"]')
    card.hover()
    hand.click(card.get_by_label("Save loss"))
    with hand.page.expect_download():
        hand.click(hand.page.get_by_role("button", name="PNG", exact=True))


def _group(hand):
    hand.click(hand.page.locator("#group"))
    hand.click(hand.page.get_by_label("hparams.lr", exact=True))
    hand.until("() => document.querySelectorAll('.group-row').length === 9")


TASKS = [
    Task("best run", _runs(), _best, 1),
    Task("best against second", _runs("runs?sort=-summary.val%2Facc"), _best_against_second, 3),
    Task("does the learning rate matter", _runs(), _rate_matters, 1),
    Task("zoom on a spike", _charts(SPIKED), _zoom, 1),
    Task("images at a step of two runs", _charts(*WITH_IMAGES), _images),
    Task("bands over seeds", _charts(), _bands, 1),
    Task("hide failed runs", _runs(), _hide_failed, 1),
    Task("export a chart", _charts(SPIKED), _export_chart),
    Task("group by learning rate", _runs(), _group),
]
