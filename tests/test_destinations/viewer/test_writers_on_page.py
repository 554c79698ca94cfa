"""The page of a run with several writers: a curve per writer, all media, and each writer's status."""

import json
import os

import numpy as np
import pytest

from destinations.runs import open_runs
from destinations.viewer.catalog import Catalog
from destinations.viewer.site import export_site
from tests.test_destinations.runs.written import Written, write_shared
from tests.test_destinations.viewer.served import served
from tests.test_destinations.viewer.test_site import answers_of


@pytest.fixture
def root(tmp_path):
    """A folder with a run by a trainer and two writers, and a run by a trainer alone."""
    write_shared(tmp_path / "runs" / "digits")
    with Written(tmp_path / "runs" / "alone") as alone:
        for step in range(3):
            alone.log({"loss": float(step)}, step)
    return tmp_path / "runs"


def curves(answer):
    """Returns x and y of each series by metric and writer."""
    return {
        (one["metric"], one["writer"]): list(zip(one["x"], one["y"], strict=True)) for one in answer["series"]
    }


def test_a_metric_has_a_series_for_each_writer(root):
    """They are in the order of steps, even if they arrived late; a metric of one writer has one series."""
    with served(root) as page:
        digits = page.run_id("digits")
        found = page.get("/api/series", {"run": digits, "metric": ["loss", "acc", "lr", "none"]})

    assert curves(found) == {
        ("loss", ""): [(1, 10.0), (2, 20.0)],
        ("loss", "eval"): [(0, 0.5), (1, 11.0)],
        ("loss", "probe"): [(1, 12.0)],
        ("acc", "eval"): [(0, 0.1), (3, 0.3)],
        ("lr", ""): [(1, 0.1)],
        ("none", ""): [],
    }
    assert [one["error"] is None for one in found["series"]] == [True] * 5 + [False]


def test_series_of_several_runs_and_metrics_grow_independently(root):
    """New rows are appended per writer; a late row or a new writer sends the whole series."""
    with (
        Written(root / "live") as trainer,
        Written(root / "live", writer="eval") as late,
        Written(root / "live", writer="probe") as probe,
        served(root) as page,
    ):
        trainer.log({"loss": 10.0}, 1)
        late.log({"loss": 11.0, "acc": 0.1}, 1)
        late.log({"loss": 0.5, "acc": 0.3}, 0)
        probe.log({"loss": 12.0}, 1)
        page.viewer.runs.scan()
        asked = {"run": [page.run_id(name) for name in ("live", "alone")], "metric": ["loss", "acc"]}

        def grown():
            nonlocal cursors
            found = page.get("/api/series", {**asked, "after": cursors})["series"]
            cursors = [one["cursor"] for one in found]
            return {
                (one["metric"], one["writer"]): (one["append"], one["x"])
                for one in found
                if one["run"] == asked["run"][0]
            }

        cursors = [one["cursor"] for one in page.get("/api/series", asked)["series"]]
        same = grown()
        late.log({"loss": 1.0, "acc": 0.5}, 7)
        trainer.log({"loss": 2.0}, 8)
        news = grown()
        late.log({"loss": 1.0}, 4)
        trainer.log({"loss": 2.0}, 9)
        late_news = grown()
        with Written(root / "live", writer="new") as new:
            new.log({"acc": 1.0}, 5)
        begun = grown()

    assert all(value == (True, []) for value in same.values())
    assert news == {
        ("loss", ""): (True, [8]),
        ("loss", "eval"): (True, [7]),
        ("loss", "probe"): (True, []),
        ("acc", "eval"): (True, [7]),
    }
    assert late_news == {
        ("loss", ""): (True, [9]),
        ("loss", "eval"): (False, [0, 1, 4, 7]),
        ("loss", "probe"): (True, []),
        ("acc", "eval"): (True, []),
    }
    assert begun[("acc", "new")] == (False, [5])
    assert begun[("acc", "eval")] == (True, [])
    assert begun[("loss", "eval")] == (True, [])


@pytest.mark.parametrize("x", ["time", "relative", "epoch", "metric:acc"])
def test_other_axes_belong_to_each_writer(root, x):
    """Each has its own times, epochs and metrics."""
    with served(root) as page:
        found = page.get("/api/series", {"run": page.run_id("digits"), "metric": "loss", "x": x})["series"]

    counts = {one["writer"]: len(one["x"]) for one in found if one["error"] is None}
    expected = {"": 2, "eval": 2, "probe": 1}
    # A writer without this axis has an error.
    assert counts == ({"eval": 1} if x == "metric:acc" else expected)


def test_abandoned_rows_of_a_writer_are_shown_as_its_own(root):
    """The trainer's branches are shown in the same way."""
    with Written(root / "digits", writer="eval", batch=1) as late:
        late.destination.after_load(late.state, late.logger)
        late.engine.run_event("fit_start")
        late.log({"acc": 0.9}, 1)

    with served(root) as page:
        digits = page.run_id("digits")
        found = page.get("/api/series", {"run": digits, "metric": "acc", "branches": "1"})["series"]
        (branch,) = page.get(f"/api/runs/{digits}")["branches"]

    assert [(one["writer"], one["branch"] is None, one["x"]) for one in found] == [
        ("eval", True, [0, 1]),
        ("eval", False, [3]),
    ]
    assert branch["file"].startswith("writers/eval/parts/metrics/")


def test_the_answer_about_a_run_has_the_status_of_its_writers(root):
    """It has the names, statistics and media of all; the record of a run without writers has none."""
    with Written(root / "digits", writer="eval", keep_files="copy") as late:
        late.logger.log_images(np.full((1, 4, 4), 7, np.uint8), "Inputs", step=2)
        late.logger.log_text("late", "Notes", step=1)
        late.logger.log_text("later", "Notes", step=0)
        (root / "file").write_bytes(b"x")
        late.logger.upload_file("model.pt", root / "file")

    with served(root) as page:
        digits = page.run_id("digits")
        detail = page.get(f"/api/runs/{digits}")
        (image,) = page.get(f"/api/runs/{digits}/media", {"kind": "images", "name": "Inputs"})["items"]
        content = page.file(digits, image["file"])
        other = page.get(f"/api/runs/{page.run_id('alone')}")
        (row,) = page.get("/api/selected", {"run": digits})["runs"]
        fields = page.get("/api/fields")["metrics"]

    assert [(one["name"], one["status"], one["is_alive"], one["rows"]) for one in detail["writers"]] == [
        ("eval", "completed", False, 3),
        ("probe", "completed", False, 2),
    ]
    assert all(one["seen_at"] > 0 for one in detail["writers"])
    assert detail["metrics"] == row["metrics"] == ["loss", "lr", "acc", "norm"]
    assert (detail["summary"]["loss"]["count"], detail["summary"]["loss"]["last"]) == (5, 20.0)
    assert row["constant"] == ["lr", "norm"]
    assert detail["media"]["texts"] == {"Notes": [0, 1]}
    assert image["file"].startswith("writers/eval/media/Inputs/")
    assert content.content.startswith(b"\x89PNG")
    assert [one["file"] for one in detail["artifacts"]] == ["writers/eval/artifacts/model.pt"]
    assert other["writers"] == []
    assert {"acc", "norm"} <= {*fields}


def test_a_failed_or_unreadable_writer_is_an_error_of_the_run(root):
    """The curves of the other writers are there."""
    (root / "digits" / "writers" / "probe" / "metrics.csv").unlink()
    (root / "digits" / "writers" / "probe" / "metrics.csv").mkdir()
    (root / "digits" / "writers" / "probe" / "summary.json").unlink()
    failing = Written(root / "digits", writer="eval")
    failing.engine.close(RuntimeError("out of luck"))

    with served(root) as page:
        digits = page.run_id("digits")
        detail = page.get(f"/api/runs/{digits}")
        found = page.get("/api/series", {"run": digits, "metric": ["loss", "norm"]})["series"]

    texts = [one["text"] for one in detail["errors"]]
    assert any(text.startswith("writer probe cannot be read") for text in texts)
    assert "writer eval: RuntimeError: out of luck" in texts
    assert {one["name"]: (one["status"], one["rows"]) for one in detail["writers"]} == {
        "eval": ("failed", 3),
        "probe": ("completed", None),
    }
    assert [(one["metric"], one["writer"], one["error"] is None) for one in found] == [
        ("loss", "", True),
        ("loss", "eval", True),
        ("norm", "", False),
    ]


def test_new_rows_of_a_writer_are_announced(root, tmp_path):
    """This holds even after the trainer has ended."""
    from destinations.viewer.changes import Changes
    from destinations.viewer.charts import Axis, ChartReader

    with (
        open_runs(root, cache=tmp_path / "index") as runs,
        Written(root / "digits", writer="eval") as late,
    ):
        catalog, charts = Catalog(runs), ChartReader()
        now = [0.0]
        changes = Changes(catalog, charts.cache, clock=lambda: now[0])
        digits = catalog.id_of(runs["digits"].record)
        charts.series([(digits, runs["digits"])], ["acc"], Axis(), points=100)
        changes._watched[digits] = 0.0
        changes.look()
        version = changes.version

        late.log({"acc": 0.9}, 9)
        late.flush()
        os.utime(root / "digits" / "writers" / "eval" / "heartbeat")
        now[0] += 10.0
        changes.look()

        assert changes.since(version)["runs"][digits]["rows"]
        charts.close()
        changes.close()


def test_an_exported_site_has_the_curves_and_media_of_writers(root, tmp_path):
    """The first writer of a metric keeps its key, and the others follow; files come from writers' folders."""
    with Written(root / "digits", writer="eval") as late:
        late.logger.log_images(np.full((1, 4, 4), 7, np.uint8), "Inputs", step=2)
    with open_runs(root, cache=tmp_path / "index") as runs:
        report = export_site(Catalog(runs), tmp_path / "site")
        digits = Catalog(runs).id_of(runs["digits"].record)

    found = answers_of(tmp_path / "site")
    first, eval_, probe = [found[f"series/{digits}/loss"], *found[f"series/{digits}/loss"]["further"]]
    assert [(one["writer"], one["step"], one["y"]) for one in (first, eval_, probe)] == [
        ("", [1, 2], [10.0, 20.0]),
        ("eval", [0, 1], [0.5, 11.0]),
        ("probe", [1], [12.0]),
    ]
    # Late values are in the order of steps, not of time.
    assert ("time" in first, "time" in eval_, "time" in probe) == (True, False, True)
    assert found[f"series/{digits}/acc"]["writer"] == "eval"
    assert found[f"series/{digits}/acc"]["further"] == []
    (image,) = found[f"media/{digits}/images/Inputs"]["items"]
    assert (tmp_path / "site" / "files" / digits / image["file"]).is_file()
    assert report.media_files == 1
    assert json.dumps(found[f"run/{digits}"]["writers"])
