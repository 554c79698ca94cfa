"""Runs in a bucket: folders that were uploaded, and datasets of `compact`; with a real S3 server."""

import json

import attrs
import pytest

from destinations import cli
from destinations.runs import Run, open_runs
from destinations.runs.dataset import compact
from destinations.viewer import Viewer
from destinations.viewer.mirror import Mirror
from tests.servers import s3_servers
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.served import Client, write_demo
from tests.test_destinations.viewer.test_site import answers_of
from uploads import LocalStore


@pytest.fixture(scope="module")
def moto():
    """Gives an S3 server."""
    with s3_servers.moto() as server:
        yield server


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    """Credentials of the server, and a cache of its own for each test."""
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def put_folder(server, folder, prefix):
    """Uploads a folder as it is."""
    client = server.client()
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            client.upload_file(str(path), s3_servers.BUCKET, key)


def test_folders_in_a_bucket_are_shown(moto, tmp_path):
    """With their metrics and media; checkpoints and hidden files stay where they are."""
    run = write_demo(tmp_path / "runs", rows=30)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.pt").write_bytes(b"x" * 1000)
    put_folder(moto, tmp_path / "runs", "shown/team")
    mirror = Mirror(moto.uri("shown"), tmp_path / "copy")

    left_out = mirror.refresh()
    with open_runs(mirror.folder) as runs, Viewer(runs, port=0, source="s3://bucket/shown") as viewer:
        page = Client(viewer)
        info = page.get("/api/info")
        run_id = page.run_id("digits")
        (series,) = page.get("/api/series", {"run": run_id, "metric": "loss"})["series"]
        image = page.get(f"/api/runs/{run_id}/media", {"kind": "images", "name": "Inputs"})["items"][0]
        picture = page.file(run_id, image["file"])
        refused = page.request("PATCH", f"/api/runs/{run_id}", body={"note": "x"})

    assert left_out == []
    assert (info["roots"], info["writable"]) == (["s3://bucket/shown"], False)
    assert series["y"] == [1 / (step + 1) for step in range(30)]
    assert picture.content == (run / image["file"]).read_bytes()
    assert refused.status == 409
    assert not list((tmp_path / "copy").rglob("last.pt"))


class StoreWithoutVersions(LocalStore):
    """Says of no object which version it has, as an SFTP server that sends no times."""

    def list(self, prefix=""):
        for one in super().list(prefix):
            yield attrs.evolve(one, version=None)


def test_a_copy_of_objects_without_versions_is_up_to_date(tmp_path):
    """An object of the same size may have other bytes."""
    run = write_run(tmp_path / "runs" / "one", notes="old")
    mirror = Mirror(StoreWithoutVersions(tmp_path / "runs"), tmp_path / "copy")
    mirror.refresh()
    sidecar = run / "sidecar.json"
    sidecar.write_text(sidecar.read_text().replace('"old"', '"new"'))

    mirror.refresh()

    assert json.loads((tmp_path / "copy/one/sidecar.json").read_text())["notes"] == "new"


def test_what_replaces_a_file_is_copied_before_that_is_removed(tmp_path):
    """A part that has become Parquet is in the copy at any moment, as CSV or as Parquet."""
    run = write_run(tmp_path / "runs" / "one")
    parts = run / "parts" / "metrics"
    parts.mkdir(parents=True)
    (parts / "00000001.csv").write_text("step,loss\n0,0.5\n")
    mirror = Mirror(LocalStore(tmp_path / "runs"), tmp_path / "copy")
    mirror.refresh()
    there = []
    original = mirror._copy
    copied = tmp_path / "copy/one/parts/metrics"
    mirror._copy = lambda one: there.append((copied / "00000001.csv").exists()) or original(one)

    (parts / "00000001.csv").rename(parts / "00000001.parquet")
    mirror.refresh()

    assert there == [True]
    assert [path.name for path in copied.iterdir()] == ["00000001.parquet"]


def test_a_copy_takes_only_what_changed(moto, tmp_path):
    """New rows come, what is gone goes, and nothing is fetched twice."""
    run = write_run(tmp_path / "runs" / "one", status="running", updated_at=1.7e9)
    write_run(tmp_path / "runs" / "two")
    put_folder(moto, tmp_path / "runs", "changing")
    mirror = Mirror(moto.uri("changing"), tmp_path / "copy")
    fetched = []
    original = mirror._copy
    mirror._copy = lambda one: fetched.append(one.name) or original(one)

    mirror.refresh()
    first = sorted(fetched)
    fetched.clear()
    mirror.refresh()
    unchanged = list(fetched)
    (run / "metrics.csv").write_text("step,epoch,time,loss\n0,0,1.0,2.5\n")
    put_folder(moto, run, "changing/one")
    moto.client().delete_object(Bucket=s3_servers.BUCKET, Key="changing/two/sidecar.json")
    mirror.refresh()

    assert (first, unchanged) == (["one/sidecar.json", "two/sidecar.json"], [])
    assert "one/metrics.csv" in fetched
    assert [path.name for path in (tmp_path / "copy").iterdir() if not path.name.startswith(".")] == ["one"]
    copied = Run.open(tmp_path / "copy" / "one")
    assert copied.series("loss").value.tolist() == [2.5]
    # The time of copying is no sign of life.
    assert not copied.alive


def test_names_of_objects_lead_nowhere(moto, tmp_path):
    """A foreign bucket has names with `..`, absolute ones, and hidden files."""
    client = moto.client()
    sidecar = json.dumps({"run_id": "one", "status": "completed"}).encode()
    for key in (
        "foreign/one/sidecar.json",
        "foreign/../outside/sidecar.json",
        "foreign/one/../../outside.csv",
        "foreign//etc/sidecar.json",
        "foreign/one/.lock",
        "foreign/one/.mirror.json",
    ):
        client.put_object(Bucket=s3_servers.BUCKET, Key=key, Body=sidecar)

    Mirror(moto.uri("foreign"), tmp_path / "below" / "copy").refresh()

    files = {path.relative_to(tmp_path / "below").as_posix() for path in (tmp_path / "below").rglob("*")}
    assert {name for name in files if not name.startswith("copy")} == set()
    assert {"copy/one/sidecar.json", "copy/.mirror.json"} <= files
    assert not {"copy/one/.lock", "copy/outside.csv", "copy/one/.mirror.json"} & files
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["below"]


def test_a_copy_is_bounded(moto, tmp_path):
    """The largest files are left out, and said."""
    run = write_run(tmp_path / "runs" / "one")
    (run / "media").mkdir()
    (run / "media" / "film.mp4").write_bytes(b"x" * 100_000)
    put_folder(moto, tmp_path / "runs", "bounded")

    left_out = Mirror(moto.uri("bounded"), tmp_path / "copy", max_bytes=50_000).refresh()

    assert left_out == ["one/media/film.mp4: the copy has 0 MiB at most"]
    assert (tmp_path / "copy" / "one" / "sidecar.json").is_file()


@pytest.mark.parametrize("is_dataset", [False, True])
def test_the_command_exports_from_a_bucket(moto, tmp_path, capsys, is_dataset):
    """Folders, and datasets that `compact` has written; the credentials of a URI are not shown."""
    with Written(tmp_path / "runs" / "one") as run:
        run.logger.log_hyperparameters({"lr": 0.1})
        for step in range(10):
            run.log({"loss": float(step)}, step)
    if is_dataset:
        compact(open_runs(tmp_path / "runs"), moto.uri("exported"))
    else:
        put_folder(moto, tmp_path / "runs", "exported-folders")
    uri = moto.uri("exported" if is_dataset else "exported-folders")

    code = cli.main(["view", uri, "--export", str(tmp_path / "site")])

    said = capsys.readouterr()
    assert code == 0, said.err
    found = answers_of(tmp_path / "site")
    (row,) = found["runs"]["rows"]
    logged = {name: value for name, value in row["values"].items() if "." in name}
    assert (row["name"], logged) == (
        "one",
        {"hparams.lr": 0.1, "summary.loss": 9.0, "min.loss": 0.0, "max.loss": 9.0},
    )
    curve = found[f"series/{row['id']}/loss"]
    assert (curve["step"], curve["y"]) == (list(range(10)), [float(step) for step in range(10)])
    assert found["info"]["writable"] is False
    assert "endpoint_url" not in json.dumps(found["info"])


def test_a_dataset_is_served(moto, tmp_path):
    """Runs, their curves and what differs; many requests at once take turns."""
    for number in range(2):
        with Written(tmp_path / "runs" / f"run{number}") as run:
            for step in range(10):
                run.log({"loss": float(step + number * (step > 4))}, step)
    compact(open_runs(tmp_path / "runs"), tmp_path / "dataset")
    with open_runs(tmp_path / "dataset") as runs, Viewer(runs, port=0) as viewer:
        page = Client(viewer)
        ids = [page.run_id(f"run{number}") for number in range(2)]
        series = page.get("/api/series", {"run": ids, "metric": "loss"})["series"]
        epochs = page.get("/api/series", {"run": ids[0], "metric": "loss", "x": "epoch"})["series"][0]
        compared = page.get("/api/compare", {"run": ids})
        detail = page.get(f"/api/runs/{ids[0]}")

    assert [len(one["x"]) for one in series] == [10, 10]
    assert "Use x=step" in epochs["error"]
    assert compared["parts"][0]["metrics"] == {"loss": 5}
    assert detail["summary"]["loss"]["last"] == 9.0


def test_several_uris_are_refused(capsys):
    """The page shows one bucket, or folders."""
    assert cli.main(["view", "s3://a/b", "s3://c/d"]) == 2

    assert "one URI must be given by itself" in capsys.readouterr().err
