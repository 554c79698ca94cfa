"""The JSON API of the page, asked over HTTP: each answer for a run that `RunDirectory` wrote."""

import contextlib
import http.client
import json
import math
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from destinations.runs import Run, open_runs
from tests.effort import times
from tests.test_destinations.runs.folders import write_lightning, write_run
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.served import Client, served, write_demo
from tests.waiting import open_files, until


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Gives a folder with two runs."""
    root = tmp_path_factory.mktemp("viewer") / "runs"
    write_demo(root)
    with Written(root / "other") as run:
        run.logger.log_hyperparameters({"optim": {"lr": 0.2, "name": "adam"}, "seed": 4})
        for step in range(300):
            run.log({"loss": 1 / (step + 1) + (0.5 if step >= 40 else 0.0)}, step)
    return root


@pytest.fixture(scope="module")
def page(demo):
    """Gives a page that shows them; these tests change nothing."""
    with served(demo) as client:
        yield client


@pytest.fixture(scope="module")
def digits(page):
    """Gives the id of the run with everything."""
    return page.run_id("digits")


# Runs.


def test_the_table_has_the_requested_rows_and_columns(page, demo):
    """Rows have values by column, NaN included; a missing column has no entry."""
    found = page.get("/api/runs", {"columns": "hparams.optim.lr,hparams.bad,summary.val/acc", "sort": "name"})

    assert (found["total"], found["offset"]) == (2, 0)
    assert found["columns"] == [
        {"name": "hparams.optim.lr", "kind": "number"},
        {"name": "hparams.bad", "kind": "number"},
        {"name": "summary.val/acc", "kind": "number"},
    ]
    first, second = found["rows"]
    assert first["values"] == {
        "hparams.optim.lr": 0.1,
        "hparams.bad": {"number": "nan"},
        "summary.val/acc": 200 / 300,
    }
    assert (first["name"], first["path"], first["status"], first["alive"]) == (
        "digits",
        "digits",
        "completed",
        False,
    )
    assert second["values"] == {"hparams.optim.lr": 0.2}


def test_the_table_is_a_window_of_the_matching_runs(tmp_path):
    """Filter, search, order, window and total match `destinations runs ls`."""
    root = tmp_path / "runs"
    for number in range(30):
        tags = ["odd (1)"] if number % 2 else []
        write_run(root / f"run{number:02}", hparams={"lr": number / 10}, tags=tags)
    with served(root) as page:
        found = page.get(
            "/api/runs",
            {"where": "hparams.lr >= 1", "q": "ODD (1)", "sort": "-hparams.lr", "offset": 2, "limit": 3},
        )

    assert found["total"] == 10
    assert [row["name"] for row in found["rows"]] == ["run25", "run23", "run21"]


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"where": "summary.loss ="}, "Write ==."),
        ({"where": "stats == 'failed'"}, "Did you mean status"),
        ({"columns": "hparams.optim.lrr"}, "Did you mean 'hparams.optim.lr'"),
        ({"sort": "summary.los"}, "did you mean 'summary.loss'"),
        ({"limit": "many"}, "limit must be a whole number from 0 to 1000, got 'many'."),
        ({"limit": "1001"}, "limit must be"),
        ({"offset": "-1"}, "offset must be"),
        ({"archived": "maybe"}, "archived must be 0, 1 or all"),
    ],
)
def test_a_wrong_parameter_suggests_the_nearest_right_one(page, parameters, error):
    """The server answers 400, with a text for the user."""
    assert error in page.get("/api/runs", parameters, status=400)["error"]


def test_fields_list_all_columns_and_kinds(page):
    """The answer lists what you can show, sort and filter by."""
    found = page.get("/api/fields")

    kinds = {field["name"]: field["kind"] for field in found["fields"]}
    assert {name: kinds[name] for name in ("status", "tags", "created_at", "alive", "duration")} == {
        "status": "text",
        "tags": "tags",
        "created_at": "time",
        "alive": "bool",
        "duration": "duration",
    }
    assert (kinds["hparams.optim.lr"], kinds["hparams.optim.name"], kinds["summary.loss"]) == (
        "number",
        "text",
        "number",
    )
    assert sorted(found["metrics"]) == ["loss", "train/acc", "val/acc"]


def test_groups_average_their_runs(tmp_path):
    """Mean, deviation and count cover finite values only; a group without any has none."""
    root = tmp_path / "runs"
    for name, lr, loss in [
        ("a", 0.1, 1.0),
        ("b", 0.1, 3.0),
        ("c", 0.1, math.nan),
        ("d", 1, 5.0),
        ("e", "1", None),
    ]:
        with Written(root / name) as run:
            run.logger.log_hyperparameters({"lr": lr})
            run.log({"other": 0.0} if loss is None else {"loss": loss}, 0)
    with served(root) as page:
        asked = {"group": "hparams.lr", "columns": ["summary.loss", "max.loss"]}
        groups = {one["label"]: one for one in page.get("/api/groups", asked)["groups"]}

    assert list(groups) == ["0.1", "1", '"1"']
    assert groups["0.1"]["values"]["summary.loss"] == {"mean": 2.0, "std": 2**0.5, "count": 2}
    assert groups["0.1"]["total"] == 3
    assert groups["1"]["values"]["max.loss"] == {"mean": 5.0, "std": None, "count": 1}
    assert groups['"1"']["values"] == {}


def test_a_filter_needs_no_prefix(page, digits):
    """An unambiguous name needs no prefix."""
    found = page.get("/api/runs", {"where": "loss > 0.0 and optim.lr == 0.1"})["rows"]
    wrong = page.get("/api/runs", {"where": "los > 0.0"}, status=400)

    assert [row["id"] for row in found] == [digits]
    assert "unknown field 'los'" in wrong["error"]


def test_one_answer_has_all_selected_runs(page, digits):
    """Each row has hyperparameters, metrics and constant metrics; deleted runs are left out."""
    found = page.get("/api/selected", {"run": [page.run_id("other"), "000000000000", digits]})["runs"]

    assert [row["name"] for row in found] == ["other", "digits"]
    assert found[1]["values"]["hparams.optim.lr"] == 0.1
    assert sorted(found[1]["metrics"]) == ["loss", "train/acc", "val/acc"]
    assert found[1]["constant"] == []


def test_an_edit_is_written_to_the_run_folder(tmp_path):
    """The server changes tags, note, name and archive, returns the row, and keeps the run's own files."""
    root = tmp_path / "runs"
    write_run(root / "one", tags=["own"])
    before = (root / "one" / "sidecar.json").read_bytes()
    with served(root) as page:
        run_id = page.run_id("one")
        changes = {"tags": ["own", "<b>"], "note": "the best", "archived": True, "name": "winner"}
        answer = page.request("PATCH", f"/api/runs/{run_id}", body=changes)
        listed = page.get("/api/runs")["total"]
        archived = page.get("/api/runs", {"archived": "1"})["rows"]

    row = json.loads(answer.content)
    assert (answer.status, row["tags"], row["note"], row["archived"], row["name"]) == (
        200,
        ["own", "<b>"],
        "the best",
        True,
        "winner",
    )
    assert listed == 0
    assert [one["id"] for one in archived] == [run_id]
    assert (root / "one" / "sidecar.json").read_bytes() == before
    assert Run.open(root / "one").notes == "the best"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"tags": "a"}, "tags must be a list of at most 1,000 texts"),
        ({"archived": 1}, "archived must be true or false"),
        ({"note": None}, "note must be a text"),
        ({"status": "completed"}, "unknown field 'status'"),
        (["a"], "an edit must be a JSON object"),
    ],
)
def test_a_wrong_edit_changes_nothing(page, demo, digits, body, error):
    """The server answers 400 and writes no `edits.json`."""
    answer = page.request("PATCH", f"/api/runs/{digits}", body=body)

    assert answer.status == 400
    assert error in json.loads(answer.content)["error"]
    assert not (demo / "digits" / "edits.json").exists()


# One run.


def test_the_details_of_a_run_are_complete(page, demo, digits):
    """It has hyperparameters, statistics, sessions, media with their steps, and what logging cost."""
    found = page.get(f"/api/runs/{digits}")

    assert found["hyperparameters"] == {
        "optim": {"lr": 0.1, "name": "adam"},
        "seed": 3,
        "bad": {"number": "nan"},
    }
    assert found["summary"]["loss"] | {"mean": None} == {
        "last": 1 / 300,
        "min": 1 / 300,
        "max": 1.0,
        "min_step": 299,
        "max_step": 0,
        "count": 300,
        "non_finite": 0,
        "mean": None,
    }
    assert (found["metrics"], found["ranks"]) == (["loss", "train/acc", "val/acc"], [0])
    assert [session["status"] for session in found["sessions"]] == ["completed"]
    assert found["media"] == {
        "images": {"Inputs": [0, 100]},
        "audio": {"tone": [5]},
        "point_clouds": {"cloud": [5]},
        "tables": {"Words": [7]},
        "histograms": {"weights": [0, 100]},
        "texts": {"Notes": [9]},
    }
    assert found["overhead"]["calls"] == 300
    assert (found["errors"], found["lost"], found["branches"]) == ([], {}, [])
    assert found["environment"]["python"] == Run.open(demo / "digits").environment["python"]


def test_checkpoints_say_whether_they_exist(tmp_path):
    """The list has the files and folders of the run, and the newest checkpoint of its record."""
    root = tmp_path / "runs"
    gone = str(tmp_path / "scratch" / "ep9.pt")
    write_run(root / "one", checkpoint_path=gone)
    write_run(root / "two", checkpoint_path="s3://bucket/two/ep1.pt")
    folder = root / "one" / "checkpoints"
    (folder / "ep2-ba20").mkdir(parents=True)
    (folder / "ep1-ba10.pt").write_bytes(b"12345")
    (folder / "notes.md").write_text("x")
    (folder / "link.pt").symlink_to("/etc/passwd")
    with served(root) as page:
        one, two = (page.get(f"/api/runs/{page.run_id(name)}")["checkpoints"] for name in ("one", "two"))

    assert [(found["name"], found["size"], found["exists"]) for found in one] == [
        ("ep1-ba10.pt", 5, True),
        ("ep2-ba20", None, True),
        ("ep9.pt", None, False),
    ]
    assert [(found["path"], found["exists"]) for found in two] == [("s3://bucket/two/ep1.pt", None)]


def test_a_large_foreign_run_is_shown_without_reading_all_of_it(tmp_path):
    """It has the last values of the table; for a small run the server computes the statistics."""
    root = tmp_path / "runs"
    for name, rows in (("small", 10), ("large", 400_000)):
        lines = (f"0,{number}.5,{number}" for number in range(rows))
        write_lightning(root / name, "epoch,loss,step\n" + "\n".join(lines) + "\n")
    with served(root) as page:
        small, large = (page.get(f"/api/runs/{page.run_id(name)}") for name in ("small", "large"))

    assert (small["summary"]["loss"]["last"], small["summary"]["loss"]["count"]) == (9.5, 10)
    assert (large["summary"]["loss"]["last"], large["summary"]["loss"]["count"]) == (399_999.5, 0)
    assert large["metrics"] == ["loss"]


def test_images_have_masks_labels_and_files(page, digits, demo):
    """The server sends the file unchanged, with a fixed type."""
    found = page.get(f"/api/runs/{digits}/media", {"kind": "images", "name": "Inputs"})
    image = found["items"][0]
    answer = page.file(digits, image["file"])

    assert found["total"] == 2
    assert image["labels"] == {"0": "sky", "1": "<b>sea</b>"}
    assert sorted(image["masks"]) == ["truth"]
    assert (answer.status, answer.headers["Content-Type"]) == (200, "image/png")
    assert answer.content == (demo / "digits" / image["file"]).read_bytes()
    assert page.file(digits, image["masks"]["truth"]["file"]).status == 200


def test_histograms_texts_and_tables_come_as_json(page, digits):
    """Numbers stay numbers, and markup stays text."""
    histogram = page.get(f"/api/runs/{digits}/media", {"kind": "histograms", "name": "weights"})["items"][1]
    text = page.get(f"/api/runs/{digits}/media", {"kind": "texts", "name": "Notes"})["items"][0]
    table = page.get(f"/api/runs/{digits}/table", {"name": "Words"})

    assert (histogram["step"], sum(histogram["counts"])) == (100, 100)
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert (text["step"], text["text"]) == (9, "it went <i>well</i>")
    assert table == {
        "name": "Words",
        "step": 7,
        "columns": [{"name": "word", "type": "str"}, {"name": "count", "type": "int"}],
        "rows": [["<script>", 1], ["b", None]],
        "orders": [{"up": [0, 1], "down": [1, 0]}, {"up": [0, 1], "down": [0, 1]}],
        "offset": 0,
        "total": 2,
    }


def test_many_records_are_thinned_evenly(page, digits):
    """The first and the last item are included; `from` and `to` select a part of the steps."""
    histograms = {"kind": "histograms", "name": "weights"}

    few = page.get(f"/api/runs/{digits}/media", histograms | {"limit": 1})
    late = page.get(f"/api/runs/{digits}/media", histograms | {"from": 50})

    assert (few["total"], [item["step"] for item in few["items"]]) == (2, [0])
    assert [item["step"] for item in late["items"]] == [100]


def test_a_point_cloud_is_decoded(page, digits):
    """The server thins its points evenly to the limit."""
    cloud = page.get(f"/api/runs/{digits}/media", {"kind": "point_clouds", "name": "cloud"})["items"][0]
    points = page.get(f"/api/runs/{digits}/points", {"file": cloud["file"], "limit": 20})

    assert points["total"] == 50
    assert [len(points[axis]) for axis in "xyz"] == [20, 20, 20]


def test_a_part_of_a_file_is_served(page, digits, demo):
    """A player asks for the middle of a sound."""
    tone = page.get(f"/api/runs/{digits}/media", {"kind": "audio", "name": "tone"})["items"][0]
    whole = (demo / "digits" / tone["file"]).read_bytes()

    part = page.file(digits, tone["file"], headers={"Range": "bytes=40-49"})
    beyond = page.file(digits, tone["file"], headers={"Range": "bytes=999999-"})

    assert (part.status, part.content) == (206, whole[40:50])
    assert part.headers["Content-Range"] == f"bytes 40-49/{len(whole)}"
    assert beyond.status == 416


def test_a_log_is_followed_from_an_offset(tmp_path):
    """The log comes from the end, then only its new lines, whole."""
    root = tmp_path / "runs"
    write_run(root / "one")
    log = root / "one" / "train.log"
    log.write_text("first\nsecond\nthi", encoding="utf-8")
    with served(root) as page:
        path = f"/api/runs/{page.run_id('one')}"
        names = page.get(path)["logs"]
        tail = page.get(f"{path}/log", {"offset": -10, "limit": 8})
        with log.open("a", encoding="utf-8") as file:
            file.write("rd\n")
        rest = page.get(f"{path}/log", {"file": "train.log", "offset": tail["next"]})
        missing = page.get(f"{path}/log", {"file": "../one/train.log"}, status=404)

    assert names == ["train.log"]
    assert (tail["text"], tail["offset"], tail["next"], tail["size"]) == ("second\n", 6, 13, 16)
    assert rest["text"] == "third\n"
    assert "no log" in missing["error"]


# Curves.


def test_a_series_has_the_logged_values(page, digits):
    """One answer has several metrics of several runs."""
    other = page.run_id("other")

    found = page.get("/api/series", {"run": [digits, other], "metric": ["loss", "val/acc"]})["series"]

    assert [(one["run"], one["metric"]) for one in found] == [
        (digits, "loss"),
        (digits, "val/acc"),
        (other, "loss"),
        (other, "val/acc"),
    ]
    assert found[0]["x"] == list(range(300))
    assert found[0]["y"] == [1 / (step + 1) for step in range(300)]
    assert (found[0]["low"], found[0]["merged"], found[0]["rows"]) == (None, 1, 300)
    assert (found[1]["x"], found[1]["y"]) == ([0, 100, 200], [0, 100 / 300, 200 / 300])
    assert "val/acc" in found[3]["error"]
    assert found[3]["x"] == []


def test_merged_points_keep_every_spike_and_say_so(tmp_path):
    """Each point has mean, min and max of ten values; NaN and infinities are listed."""
    root = tmp_path / "runs"
    with Written(root / "one") as run:
        for step in range(1000):
            value = {500: 99.0, 505: -99.0, 7: float("nan"), 8: float("inf")}.get(step, 1.0)
            run.log({"loss": value}, step)
    with served(root) as page:
        asked = {"run": page.run_id("one"), "metric": "loss", "points": 100}
        (found,) = page.get("/api/series", asked)["series"]
        (zoomed,) = page.get("/api/series", asked | {"from": 501, "to": 510})["series"]

    assert (found["merged"], len(found["x"]), found["rows"]) == (10, 100, 1000)
    assert (found["x"][50], found["low"][50], found["high"][50], found["y"][50]) == (500, -99, 99, 0.8)
    assert (found["nan"], found["inf"], found["y"][0]) == ([7], [8], 1.0)
    # Finer data, with one neighbour on each side.
    assert (zoomed["x"], zoomed["rows"], zoomed["merged"]) == (list(range(500, 512)), 10, 1)
    assert zoomed["y"][0] == 99


@pytest.mark.parametrize("axis", ["step", "epoch", "time", "relative", "metric:train/acc"])
def test_the_x_axis_is_one_of_five(page, digits, demo, axis):
    """The x axis is step, epoch, seconds since 1970 or the start, or another metric of the same row."""
    (found,) = page.get("/api/series", {"run": digits, "metric": "loss", "x": axis})["series"]

    run = Run.open(demo / "digits")
    series = run.series("loss")
    expected = {
        "step": series.step,
        "epoch": np.zeros(300),
        "time": series.time,
        "relative": series.time - run.created_at,
        "metric:train/acc": np.arange(300) / 300,
    }[axis]
    assert found["error"] is None
    np.testing.assert_allclose(found["x"], expected, rtol=0, atol=1e-5)


def test_only_new_rows_come_after_a_cursor(tmp_path):
    """A live run's rows come once each, from the journal too, across drains."""
    root = tmp_path / "runs"
    with Written(root / "one", flush_seconds=300) as run, served(root) as page:
        run.log({"loss": 0.0}, 0)
        page.viewer.runs.scan()
        asked = {"run": page.run_id("one"), "metric": "loss"}
        (found,) = page.get("/api/series", asked)["series"]
        seen, appended = list(found["y"]), []
        for step in range(1, 40):
            run.log({"loss": float(step)}, step)
            if step % 3 == 0:
                run.flush()
            if step % 5 == 0:
                (found,) = page.get("/api/series", asked | {"after": found["cursor"]})["series"]
                appended.append(found["append"])
                seen = seen + found["y"] if found["append"] else found["y"]

    assert seen == [float(step) for step in range(36)]
    assert sum(appended) >= 5


def test_a_resume_removes_later_rows_from_a_series(tmp_path):
    """A series whose early rows changed comes whole again, and the answer lists the branch."""
    root = tmp_path / "runs"
    with Written(root / "one") as run:
        for step in range(10):
            run.log({"loss": 1.0}, step)
    with served(root) as page:
        asked = {"run": page.run_id("one"), "metric": "loss"}
        (before,) = page.get("/api/series", asked)["series"]
        with Written(root / "one", batch=5) as run:
            for step in range(5, 12):
                run.log({"loss": 2.0}, step)
        (after,) = page.get("/api/series", asked | {"after": before["cursor"]})["series"]
        branches = page.get(f"/api/runs/{asked['run']}")["branches"]
        old = page.get("/api/series", asked | {"branches": "1"})["series"]

    assert (after["append"], after["x"]) == (False, list(range(12)))
    assert after["y"] == [1.0] * 5 + [2.0] * 7
    assert [(one["rank"], one["from_step"]) for one in branches] == [(0, 5)]
    assert [one["branch"] for one in old] == [None, branches[0]["branch"]]
    assert old[1]["x"] == list(range(5, 10))


def test_traces_come_without_a_name(tmp_path):
    """Such records have no step, and the page asks for them as the index lists them."""
    with Written(tmp_path / "runs" / "traced") as run:
        run.logger.log_traces({"optimizer": {"step": 3}})
    with served(tmp_path / "runs") as page:
        run_id = page.run_id("traced")
        index = page.get(f"/api/runs/{run_id}")["media"]
        (name,) = index["traces"]
        found = page.get(f"/api/runs/{run_id}/media", {"kind": "traces", "name": name})
        wrong = page.get(f"/api/runs/{run_id}/media", {"kind": "traces", "name": "other"}, status=404)

    assert (name, found["total"]) == ("", 1)
    assert found["items"][0]["traces"] == {"optimizer": {"step": 3}}
    assert "other" in wrong["error"]


def test_a_band_has_median_extremes_and_straggler(tmp_path):
    """Runs that differ only in the seed are one band."""
    root = tmp_path / "runs"
    for seed, offset in enumerate([0.0, 0.1, 5.0]):
        with Written(root / f"seed{seed}") as run:
            run.logger.log_hyperparameters({"seed": seed, "lr": 0.1})
            for step in range(10):
                run.log({"loss": step + offset}, step)
    with served(root) as page:
        ids = [page.run_id(f"seed{seed}") for seed in range(3)]
        (band,) = page.get("/api/band", {"run": ids, "metric": "loss", "over": "hparams.seed"})["bands"]
        each = page.get("/api/band", {"run": ids, "metric": "loss", "group": "hparams.seed"})["bands"]
        wrong = page.get("/api/band", {"run": ids, "metric": "loss"}, status=400)

    assert (band["label"], band["x"], band["count"]) == ("all", list(range(10)), [3] * 10)
    assert band["low"] == [float(step) for step in range(10)]
    assert band["median"] == [step + 0.1 for step in range(10)]
    assert band["high"] == [step + 5.0 for step in range(10)]
    assert (band["straggler"]["run"], round(band["straggler"]["distance"], 6)) == (ids[2], 4.9)
    assert [one["label"] for one in each] == ["0", "1", "2"]
    assert "one of group, over, ranks and split" in wrong["error"]


def test_a_band_keeps_the_extremes_of_runs_with_different_steps(tmp_path):
    """A spike survives between two points of a band, even if runs log at different steps."""
    root = tmp_path / "runs"
    for seed in range(2):
        with Written(root / f"seed{seed}") as run:
            run.logger.log_hyperparameters({"seed": seed})
            for step in range(seed, 180, 2):
                run.log({"loss": 100.0 if step == 51 else -7.0 if step == 76 else 1.0}, step)
    with served(root) as page:
        ids = [page.run_id(f"seed{seed}") for seed in range(2)]
        asked = {"run": ids, "metric": "loss", "over": "hparams.seed", "points": 100}
        (band,) = page.get("/api/band", asked)["bands"]

    assert (len(band["x"]), max(band["high"]), min(band["low"])) == (100, 100.0, -7.0)


def test_an_integer_keeps_its_digits(tmp_path):
    """A seed of 63 bits comes as its digits, because JavaScript would round it."""
    root = tmp_path / "runs"
    seeds = {"large": (1 << 62) + 1, "small": (1 << 53) - 1}
    with Written(root / "run") as run:
        run.logger.log_hyperparameters(seeds)
        run.log({"loss": 1.0}, 0)
    with served(root) as page:
        (row,) = page.get("/api/runs", {"columns": [f"hparams.{name}" for name in seeds]})["rows"]
        nested = page.get(f"/api/runs/{row['id']}")["hyperparameters"]

    assert row["values"] == {
        "hparams.large": {"number": "4611686018427387905"},
        "hparams.small": (1 << 53) - 1,
    }
    assert nested == {"large": {"number": "4611686018427387905"}, "small": (1 << 53) - 1}


def test_a_column_of_best_values_sorts_as_the_command_ranks(tmp_path):
    """`max.NAME` and `min.NAME` cover all steps; runs without a finite value come last in both directions."""
    root = tmp_path / "runs"
    for name, values in {"late": [0.1, 0.9], "early": [0.95, 0.2], "low": [0.3], "nan": [math.nan]}.items():
        with Written(root / name) as run:
            for step, value in enumerate(values):
                run.log({"acc": value}, step)
    with Written(root / "without") as run:
        run.log({"loss": 1.0}, 0)
    with served(root) as page:
        down, up, last = (
            page.get("/api/runs", {"sort": sort, "columns": ["max.acc", "min.acc"]})["rows"]
            for sort in ("-max.acc", "min.acc", "-summary.acc")
        )
        part = page.get("/api/runs", {"sort": "-max.acc", "offset": 1, "limit": 1, "where": "name != 'late'"})
        wrong = page.get("/api/runs", {"columns": "max.ac"}, status=400)

    assert [row["name"] for row in down] == ["early", "late", "low", "without", "nan"]
    assert [row["values"].get("max.acc") for row in down] == [0.95, 0.9, 0.3, None, None]
    assert [row["name"] for row in up] == ["late", "early", "low", "without", "nan"]
    assert [row["values"].get("min.acc") for row in up] == [0.1, 0.2, 0.3, None, None]
    assert [row["name"] for row in last] == ["late", "low", "early", "nan", "without"]
    assert (part["total"], [row["name"] for row in part["rows"]]) == (4, ["low"])
    assert "summary.ac" in wrong["error"]


def test_an_edit_keeps_changes_by_others(tmp_path):
    """Tags added elsewhere stay, and a note changed elsewhere isn't replaced."""
    root = tmp_path / "runs"
    write_run(root / "one", tags=["own"])
    with served(root) as page:
        path = f"/api/runs/{page.run_id('one')}"
        with open_runs(root, cache=tmp_path / "shell") as shell:
            shell.edit("one", tags=["own", "shell"], notes="of the shell")
        tags = page.request("PATCH", path, body={"tags": ["page"], "was": {"tags": ["own"]}})
        note = page.request("PATCH", path, body={"note": "of the page", "was": {"note": ""}})
        again = page.request("PATCH", path, body={"note": "both", "was": {"note": "of the shell"}})

    assert json.loads(tags.content)["tags"] == ["shell", "page"]
    assert (note.status, "changed meanwhile, to 'of the shell'" in note.content.decode()) == (409, True)
    assert json.loads(again.content)["note"] == "both"


def test_a_band_over_ranks_names_the_slow_one(tmp_path):
    """Each rank is a member of the band."""
    root = tmp_path / "runs"
    for rank in range(4):
        with Written(root / "one", rank=rank, all_ranks=True) as run:
            for step in range(10):
                run.log({"step_seconds": 3.0 if rank == 2 else 1.0}, step)
    with served(root) as page:
        run_id = page.run_id("one")
        (band,) = page.get("/api/band", {"run": run_id, "metric": "step_seconds", "ranks": 1})["bands"]

    assert [member["rank"] for member in band["members"]] == [0, 1, 2, 3]
    assert band["straggler"] == {"run": run_id, "rank": 2, "distance": 2.0}
    assert (set(band["low"]), set(band["median"]), set(band["high"])) == ({1.0}, {1.0}, {3.0})


def test_compare_lists_differences_and_the_first_different_step(page, digits):
    """The answer has the differing hyperparameters and the first step with another loss."""
    other = page.run_id("other")

    found = page.get("/api/compare", {"run": [digits, other]})

    fields = {field["name"]: field["values"] for field in found["fields"]}
    assert fields["hparams.optim.lr"] == {digits: 0.1, other: 0.2}
    assert fields["hparams.bad"] == {digits: {"number": "nan"}}
    assert "hparams.optim.name" not in fields
    assert found["parts"] == [{"a": digits, "b": other, "metrics": {"loss": 40}, "unread": 0}]


def test_compare_reads_all_metrics(tmp_path):
    """Two runs of five hundred metrics that differ in one of the last don't agree."""
    root = tmp_path / "runs"
    for number, name in enumerate(["one", "other"]):
        with Written(root / name) as run:
            for step in range(3):
                run.log({f"layer/{at:03}": float(number * (at == 480)) for at in range(500)}, step)
    with served(root) as page:
        ids = [page.run_id("one"), page.run_id("other")]
        (part,) = page.get("/api/compare", {"run": ids})["parts"]

    assert len(part["metrics"]) == 500
    assert [name for name, step in part["metrics"].items() if step is not None] == ["layer/480"]


# Faults.


def test_missing_things_are_404_with_a_text(page, digits):
    """Unknown runs, names, files and paths are 404."""
    for path, parameters in [
        ("/api/runs/000000000000", {}),
        ("/api/runs/digits", {}),
        ("/api/nothing", {}),
        (f"/api/runs/{digits}/media", {"kind": "images", "name": "Input"}),
        (f"/api/runs/{digits}/table", {"name": "Words", "step": 8}),
        (f"/api/runs/{digits}/files/media/nothing.png", {}),
    ]:
        assert page.get(path, parameters, status=404)["error"]
    assert page.request("PUT", "/api/runs").status == 405


def test_an_unchanged_answer_is_not_sent_again(page):
    """A request with the previous answer's tag gets 304."""
    first = page.request("GET", "/api/fields")

    again = page.request("GET", "/api/fields", headers={"If-None-Match": first.headers["ETag"]})

    assert (again.status, again.content) == (304, b"")


def test_a_run_deleted_while_shown_is_404(tmp_path):
    """Its answers are 404; the series of the other runs still come."""
    root = tmp_path / "runs"
    write_demo(root, "one", 10)
    write_demo(root, "two", 10)
    with served(root) as page:
        one, two = page.run_id("one"), page.run_id("two")
        asked = {"run": [one, two], "metric": "loss"}
        page.get("/api/series", asked)
        shutil.rmtree(root / "one")
        series = page.get("/api/series", asked)["series"]
        page.get(f"/api/runs/{one}", status=404)

    assert "not there" in series[0]["error"]
    assert len(series[1]["x"]) == 10


def test_a_damaged_run_shows_its_undamaged_data(tmp_path):
    """A torn CSV, a garbage index and a broken image are errors of their own, and the rest is served."""
    root = tmp_path / "runs"
    folder = write_demo(root, "one", 10)
    csv = folder / "metrics.csv"
    lines = csv.read_bytes().splitlines(keepends=True)
    csv.write_bytes(b"".join([*lines[:5], b"\xff\x00,nonsense\n", *lines[5:8], lines[8][:-4]]))
    (folder / "media.jsonl").write_bytes(b"{]\n" + (folder / "media.jsonl").read_bytes())
    (folder / "summary.json").write_bytes(b"\x00")
    (folder / "environment.json").write_bytes(b"[" * 100_000)
    with served(root) as page:
        run_id = page.run_id("one")
        (series,) = page.get("/api/series", {"run": run_id, "metric": "loss"})["series"]
        found = page.get(f"/api/runs/{run_id}")

    assert series["y"][:3] == [1.0, 0.5, 1 / 3]
    assert found["damaged_lines"] == {"media.jsonl": 1}
    assert found["environment"] == {}
    assert found["media"]["images"] == {"Inputs": [0, 100]}


def test_a_file_of_the_wrong_kind_is_a_bad_request(page, digits):
    """The server answers 400 with a text instead of failing."""
    image = page.get(f"/api/runs/{digits}/media", {"kind": "images", "name": "Inputs"})["items"][0]["file"]

    assert "PLY" in page.get(f"/api/runs/{digits}/points", {"file": image}, status=400)["error"]


def test_many_requests_at_once_are_answered(page, digits):
    """The server answers all of them, while others wait for changes."""
    count = times(100, 1000)
    version = page.get("/api/info")["version"]

    def wait():
        # The server may end before it answers.
        with contextlib.suppress(OSError, http.client.HTTPException):
            page.request("GET", "/api/changes", {"since": version})

    waiting = [threading.Thread(target=wait, daemon=True) for _ in range(50)]
    for thread in waiting:
        thread.start()
    paths = ["/api/runs", "/api/fields", f"/api/runs/{digits}", "/api/info"]

    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(lambda number: page.request("GET", paths[number % 4]).status, range(count)))

    assert found == [200] * count


def test_open_files_are_closed(page, digits):
    """The server closes files even if a client doesn't read to the end."""
    image = page.get(f"/api/runs/{digits}/media", {"kind": "images", "name": "Inputs"})["items"][0]["file"]
    for _ in range(20):
        page.file(digits, image)
        page.file(digits, image, headers={"Range": "bytes=1-0"})
    page.get("/api/info")

    # The server closes a file after its last byte was read here.
    until(lambda: not [path for path in open_files() if path.endswith(image.rsplit("/", 1)[1])])


def test_runs_and_a_run_open_their_page_from_python(demo, tmp_path):
    """`view` serves until you close it; the page of a run has only that run."""
    with open_runs(demo, cache=tmp_path / "cache") as runs, runs.view(port=0) as viewer:
        assert Client(viewer).get("/api/runs")["total"] == 2
        assert viewer.address in viewer._repr_html_()
    with Run.open(demo / "digits").view(port=0) as viewer:
        assert [row["name"] for row in Client(viewer).get("/api/runs")["rows"]] == ["digits"]


def test_every_route_is_documented(page):
    """docs/viewer-api.md has a section for each route, and no others."""
    text = (Path(__file__).parents[3] / "docs" / "viewer-api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^### (GET|PATCH) (/api/\S+)$", text, re.MULTILINE))

    asgi = page.viewer._server.config.app._app
    routes = {
        (method, route.path.replace("{id}", "ID"))
        for route in asgi.routes
        if route.path.startswith("/api/")
        # Every GET route also accepts POST.
        for method in route.methods - {"HEAD", "POST"}
    }
    files = ("GET", "/api/runs/ID/files/{path:path}")
    by_post = {route.path for route in asgi.routes if "POST" in (route.methods or ())}
    assert {path for method, path in documented if method == "GET"} == {
        path.replace("{id}", "ID") for path in by_post
    }
    assert routes - {files} == documented
    assert "`GET /api/runs/ID/files/FILE`" in text
