"""Media in a real browser: images and masks, sounds, videos, point clouds, histograms, tables and texts."""

import pytest

pytestmark = pytest.mark.xdist_group("browser")


def show(opened, *names, more=""):
    """Shows the media of some runs; returns their ids."""
    ids = [opened.id_of(name) for name in names]
    opened.go("media?" + "&".join(f"run={one}" for one in ids) + more)
    return ids


def panel(opened, key):
    """Returns the card of one name, in view."""
    found = opened.page.locator(f'.media[data-key="{key}"]')
    found.scroll_into_view_if_needed()
    return found


def pixel(opened, selector, x, y):
    """Returns a pixel of the first matching canvas or image, as [red, green, blue, alpha]."""
    return opened.page.evaluate(
        """async ([selector, x, y]) => { const node = document.querySelector(selector); const copy = document.createElement('canvas');
            await node.decode?.();  // Its size is known before its pixels.
            copy.width = node.naturalWidth || node.width; copy.height = node.naturalHeight || node.height;
            const context = copy.getContext('2d'); context.drawImage(node, 0, 0); return [...context.getImageData(x, y, 1, 1).data]; }""",
        [selector, x, y],
    )


def test_images_step_together(opened):
    """The slider steps through all runs' images; without one at the step, the previous image stays."""
    page = opened.page
    alpha, beta = show(opened, "alpha", "beta", more="&kind=images")
    image = f'.of-run[data-run="{alpha}"] img'
    opened.until("(selector) => document.querySelector(selector)?.naturalWidth === 8", image)
    assert pixel(opened, image, 5, 5)[:3] == [255, 255, 255], "the last step"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowLeft")
    opened.until(
        "(selector) => document.querySelector(selector)?.src.includes('100') && document.querySelector(selector).complete",
        image,
    )
    assert pixel(opened, image, 5, 5)[0] == 128
    assert "step=100" in page.url
    page.reload()
    opened.until("(selector) => document.querySelector(selector)?.naturalWidth === 8", image)
    assert pixel(opened, image, 5, 5)[0] == 128
    page.locator("#step").evaluate(
        "(slider) => { slider.value = 0; slider.dispatchEvent(new Event('input')); }"
    )
    opened.until(
        "(selector) => /0{8}_0/.test(document.querySelector(selector)?.src) && document.querySelector(selector).naturalWidth === 8",
        image,
    )
    assert pixel(opened, image, 5, 5)[0] == 0
    opened.until(
        "([run]) => document.querySelector(`.of-run[data-run=\"${run}\"] h4 .muted`)?.innerText === 'step 100'",
        [beta],
    )


def test_a_click_enlarges_a_picture_beside_the_other_runs(opened):
    """Each run has one large picture; the arrows step through time, and Escape closes it."""
    page = opened.page
    show(opened, "alpha", "beta", more="&kind=images")
    page.locator(".picture").first.click()
    opened.until("() => document.querySelectorAll('dialog.enlarged .picture').length === 2")
    opened.until("() => document.querySelector('dialog.enlarged .picture').clientWidth > 400")
    page.keyboard.press("ArrowLeft")
    opened.until("() => document.querySelector('dialog.enlarged output').innerText.startsWith('step 100')")
    assert "step=100" in page.url
    page.keyboard.press("Escape")
    opened.until(
        "() => !document.querySelector('dialog') && document.querySelectorAll('.picture').length === 2"
    )
    opened.until("() => document.querySelector('.picture').clientWidth < 100")


def test_masks_switch_by_class_and_fade(opened):
    """Each class of a mask has a switch, and the whole mask fades; the URL holds both."""
    page = opened.page
    show(opened, "alpha", more="&kind=images")
    opened.until(
        "() => document.querySelector('canvas.mask')?.width === 8 && document.querySelector('.class-button')"
    )
    sky, tree, ground = (0, 0), (0, 7), (7, 7)
    assert pixel(opened, "canvas.mask", *sky)[3] == 255
    assert pixel(opened, "canvas.mask", *tree)[3] == 255
    assert pixel(opened, "canvas.mask", *ground)[3] == 0, "class 0 is not drawn"
    page.get_by_role("button", name="sky").click()
    assert pixel(opened, "canvas.mask", *sky)[3] == 0
    assert pixel(opened, "canvas.mask", *tree)[3] == 255
    page.get_by_label("Opacity of masks").fill("0.2")
    assert page.locator("canvas.mask").first.evaluate("(canvas) => canvas.style.opacity") == "0.2"
    page.reload()
    opened.until(
        "() => document.querySelector('canvas.mask')?.width === 8 && document.querySelector('.class-button')"
    )
    assert pixel(opened, "canvas.mask", *sky)[3] == 0
    assert page.get_by_role("button", name="sky").get_attribute("aria-pressed") == "false"


def test_audio_plays(opened):
    """The browser plays a sound."""
    show(opened, "alpha", more="&kind=audio")
    panel(opened, "audio/Tone")
    opened.until("() => document.querySelector('audio')?.duration === 1")
    opened.page.evaluate("document.querySelector('audio').play()")
    opened.until("() => document.querySelector('audio').currentTime > 0.1")


def test_video_has_frames(opened):
    """The browser decodes a video."""
    show(opened, "alpha", more="&kind=videos")
    panel(opened, "videos/Clip")
    opened.until("() => document.querySelector('video')?.videoWidth === 32")


def test_point_cloud_turns(opened):
    """The mouse and keys turn a point cloud."""
    page = opened.page
    show(opened, "alpha", more="&kind=point_clouds")
    panel(opened, "point_clouds/Cloud")
    opened.until(
        "() => document.querySelector('canvas.cloud')?.dataset.points === '2000' && document.querySelector('canvas.cloud').dataset.turn"
    )
    picture = "document.querySelector('canvas.cloud').toDataURL()"
    opened.until(f"() => {picture}.length > 5000")
    before = page.evaluate(picture)
    turn = page.locator("canvas.cloud").get_attribute("data-turn")
    box = page.locator("canvas.cloud").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 130, steps=3)
    page.mouse.up()
    opened.until("(turn) => document.querySelector('canvas.cloud').dataset.turn !== turn", turn)
    assert page.evaluate(picture) != before
    turn = page.locator("canvas.cloud").get_attribute("data-turn")
    page.locator("canvas.cloud").press("ArrowLeft")
    opened.until("(turn) => document.querySelector('canvas.cloud').dataset.turn !== turn", turn)


def test_histograms_over_time(opened):
    """Each step has a ridge, above the logged edges."""
    show(opened, "alpha", more="&kind=histograms")
    panel(opened, "histograms/weights")
    opened.until("() => document.querySelector('.ridges')?.data?.length === 3")
    steps = opened.page.evaluate("document.querySelector('.ridges').data.map((trace) => trace.meta.step)")
    assert steps == [0, 100, 199]
    highest = opened.page.evaluate(
        "document.querySelector('.ridges').data.map((trace) => trace.x[trace.y.indexOf(Math.max(...trace.y))])"
    )
    assert highest[0] < 1.0 < highest[2], "the mean that was logged moved from 0 to 2"


def test_tables_sort_and_filter(opened):
    """A click on a heading sorts a table, ascending first; the filter leaves the matching rows."""
    page = opened.page
    show(opened, "alpha", more="&kind=tables")
    table = panel(opened, "tables/Errors")
    table.get_by_role("button", name="digit").click()
    cells = table.locator("tbody tr td:first-child")
    assert cells.all_inner_texts() == ["1", "2", "3"]
    table.get_by_role("button", name="share").click()
    table.get_by_role("button", name="share").click()
    assert table.locator("tbody tr td:last-child").all_inner_texts() == ["0.9", "0.5", "0.1"]
    page.get_by_label("Filter rows").fill("0.9")
    assert cells.all_inner_texts() == ["1"]


def test_texts_and_search(opened):
    """Texts keep their lines; search leaves the matching names."""
    show(opened, "alpha", more="&find=note")
    panel(opened, "texts/Notes")
    opened.until("() => document.querySelector('.text-record')?.innerText === 'step 199\\nsecond line'")
    assert opened.page.locator(".media").count() == 1


def test_runs_without_media_are_named(opened):
    """The page names them beside the media of other runs, and if there are no media at all."""
    page = opened.page
    show(opened, "alpha", "seed2", "long")
    opened.until("() => document.querySelectorAll('.media').length > 3")
    opened.until(
        "() => document.querySelector('main').innerText.includes('No media were logged by seed2, long.')"
    )
    show(opened, "seed2")
    page.wait_for_selector(".empty:text('No media were logged by this run.')")
    show(opened, "alpha")
    opened.until("() => document.querySelectorAll('.media').length > 3")
    assert "No media" not in page.inner_text("main")
