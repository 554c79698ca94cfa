"""Runs in a bucket of a real S3 server: uploaded folders, and datasets of `compact`."""

import json
import re
import shutil
from collections import Counter

import attrs
import numpy as np
import pytest

from destinations import cli
from destinations.runs import Run, open_runs
from destinations.runs.dataset import compact
from destinations.runs.index import bucket
from destinations.runs.index.bucket import BucketCopy
from destinations.viewer import Viewer
from tests.servers import s3_servers
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.served import Client, write_demo
from tests.test_destinations.viewer.test_site import answers_of
from uploads import LocalStore, open_store
from uploads.disk import UnreadableError, open_regular


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch, s3_credentials):
    """Sets the server's credentials, and a separate cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def put_folder(server, folder, prefix):
    """Uploads a folder unchanged."""
    client = server.client()
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            client.upload_file(str(path), s3_servers.BUCKET, key)


def test_folders_in_a_bucket_are_shown(moto, tmp_path):
    """They have their metrics and media; checkpoints and hidden files are not fetched."""
    run = write_demo(tmp_path / "runs", rows=30)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.pt").write_bytes(b"x" * 1000)
    put_folder(moto, tmp_path / "runs", "shown/team")

    with open_runs(moto.uri("shown")) as runs, Viewer(runs, port=0, source="s3://bucket/shown") as viewer:
        page = Client(viewer)
        info = page.get("/api/info")
        run_id = page.run_id("digits")
        (series,) = page.get("/api/series", {"run": run_id, "metric": "loss"})["series"]
        image = page.get(f"/api/runs/{run_id}/media", {"kind": "images", "name": "Inputs"})["items"][0]
        picture = page.file(run_id, image["file"])
        refused = page.request("PATCH", f"/api/runs/{run_id}", body={"note": "x"})

    (copy,) = runs.copies
    assert copy.unreadable == {}
    assert (info["roots"], info["writable"]) == (["s3://bucket/shown"], False)
    assert series["y"] == [1 / (step + 1) for step in range(30)]
    assert picture.content == (run / image["file"]).read_bytes()
    assert refused.status == 409
    assert not list((tmp_path / "cache").rglob("last.pt"))


class StoreWithoutVersions(LocalStore):
    """Returns no object versions, like an SFTP server that sends no times."""

    def list(self, prefix=""):
        for one in super().list(prefix):
            yield attrs.evolve(one, version=None)


def test_a_copy_of_objects_without_versions_is_up_to_date(tmp_path):
    """An object of the same size may have other bytes."""
    run = write_run(tmp_path / "runs" / "one", notes="old")
    copy = BucketCopy(StoreWithoutVersions(tmp_path / "runs"), tmp_path / "copy")
    copy.refresh()
    sidecar = run / "sidecar.json"
    sidecar.write_text(sidecar.read_text().replace('"old"', '"new"'))

    copy.refresh(at_once=True)

    assert json.loads((tmp_path / "copy/one/sidecar.json").read_text())["notes"] == "new"


def test_a_replaced_file_is_fetched_with_the_rows(tmp_path):
    """A part that became Parquet in the store replaces the CSV in the copy."""
    run = write_run(tmp_path / "runs" / "one")
    parts = run / "parts" / "metrics"
    parts.mkdir(parents=True)
    (parts / "00000001.csv").write_text("step,loss\n0,0.5\n")
    copy = BucketCopy(LocalStore(tmp_path / "runs"), tmp_path / "copy")
    copy.refresh()
    copy.bring(tmp_path / "copy" / "one")

    (parts / "00000001.csv").rename(parts / "00000001.parquet")
    copy.refresh(at_once=True)
    copy.bring(tmp_path / "copy" / "one")

    assert [path.name for path in (tmp_path / "copy/one/parts/metrics").iterdir()] == ["00000001.parquet"]


def test_a_copy_fetches_only_changes(moto, tmp_path):
    """New rows are fetched, deleted files are removed, and nothing is fetched twice."""
    run = write_run(tmp_path / "runs" / "one", status="running", updated_at=1.7e9)
    write_run(tmp_path / "runs" / "two")
    put_folder(moto, tmp_path / "runs", "changing")
    copy = BucketCopy(moto.uri("changing"), tmp_path / "copy")
    fetched = []
    original = copy._copy
    copy._copy = lambda prefix, path: fetched.append(prefix + path) or original(prefix, path)

    copy.refresh()
    first = sorted(fetched)
    fetched.clear()
    copy.refresh(at_once=True)
    unchanged = list(fetched)
    (run / "metrics.csv").write_text("step,epoch,time,loss\n0,0,1.0,2.5\n")
    put_folder(moto, run, "changing/one")
    moto.client().delete_object(Bucket=s3_servers.BUCKET, Key="changing/two/sidecar.json")
    copy.refresh(at_once=True)
    copy.bring(tmp_path / "copy" / "one")

    assert (first, unchanged) == (["one/sidecar.json", "two/sidecar.json"], [])
    assert "one/metrics.csv" in fetched
    assert [path.name for path in (tmp_path / "copy").iterdir() if not path.name.startswith(".")] == ["one"]
    copied = Run.open(tmp_path / "copy" / "one")
    assert copied.series("loss").value.tolist() == [2.5]
    # The time of copying is no sign of life.
    assert not copied.alive


def test_object_names_cannot_leave_the_copy(moto, tmp_path):
    """An untrusted bucket has names with `..`, absolute names, and hidden files."""
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

    BucketCopy(moto.uri("foreign"), tmp_path / "below" / "copy").refresh()

    files = {path.relative_to(tmp_path / "below").as_posix() for path in (tmp_path / "below").rglob("*")}
    assert {name for name in files if not name.startswith("copy")} == set()
    assert {"copy/one/sidecar.json", "copy/.mirror.json"} <= files
    assert not {"copy/one/.lock", "copy/outside.csv", "copy/one/.mirror.json"} & files
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["below"]


def test_a_copy_is_bounded(moto, tmp_path, monkeypatch):
    """The largest files are left out; the report and an attempt to open one say so."""
    run = write_run(tmp_path / "runs" / "one")
    (run / "media").mkdir()
    (run / "media" / "film.mp4").write_bytes(b"x" * 100_000)
    put_folder(moto, tmp_path / "runs", "bounded")

    monkeypatch.setattr(bucket, "_MAX_BYTES", 50_000)
    copy = BucketCopy(moto.uri("bounded"), tmp_path / "copy")
    copy.refresh()

    copy.bring_files([tmp_path / "copy" / "one" / "media" / "film.mp4"])

    assert copy.unreadable == {"one/media/film.mp4": "the copy has 0 MiB at most"}
    with pytest.raises(UnreadableError, match="the copy has 0 MiB at most"):
        open_regular(tmp_path / "copy" / "one" / "media" / "film.mp4")
    assert (tmp_path / "copy" / "one" / "sidecar.json").is_file()


def test_the_command_exports_from_a_bucket(moto, tmp_path, capsys):
    """Credentials in a URI are not shown."""
    with Written(tmp_path / "runs" / "one") as run:
        run.logger.log_hyperparameters({"lr": 0.1})
        for step in range(10):
            run.log({"loss": float(step)}, step)
    put_folder(moto, tmp_path / "runs", "exported")

    code = cli.main(["view", moto.uri("exported"), "--export", str(tmp_path / "site")])

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
    """The page shows its runs, curves and differences; concurrent requests take turns."""
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


# Runs that `RunDirectory` keeps there.


class Asked:
    """A store that records its calls, by method and by name without the number."""

    def __init__(self, store):
        self.store = store
        self.asked = Counter()

    def __getattr__(self, name):
        if name in {"get", "list", "head", "put", "delete", "get_range"}:
            self.asked[name] += 1
        return getattr(self.store, name)


@pytest.fixture
def live(moto, tmp_path, monkeypatch, request):
    """A run that is written to a bucket, and its URI."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    uri = moto.uri(f"{request.node.name}/digits")
    run = Written(uri, mirror_seconds=10.0)
    yield run, uri
    run.close()


def send(run):
    """Sends the changes as one piece, and waits for it to arrive."""
    queue = run.destination._run.files.store.queue
    run.flush()
    queue.drain(60)
    run.destination._writer._mirror._due_at = 0.0
    run.flush()
    assert queue.drain(60).is_empty


def test_a_live_run_in_a_bucket_is_read_by_its_new_pieces(live):
    """One listing finds it; then each interval takes one request."""
    run, uri = live
    run.logger.log_hyperparameters({"lr": 0.1})
    run.log({"loss": 0.0}, 0)
    send(run)
    root = uri.replace("/digits?", "?")
    now = [0.0]
    with open_runs(root) as runs:
        (copy,) = runs.copies
        copy._clock = lambda: now[0]
        copy._list_at = now[0] + 60
        (found,) = runs.query(where="hparams.lr == 0.1")
        store = copy._store = Asked(copy._store)
        for stream in copy._runs["digits/"].live.values():
            stream.run._store = store
            stream.due_at = 0.0
        for step in range(1, 6):
            run.log({"loss": float(step)}, step)
            send(run)
            now[0] += 10.0
            runs.scan()
            (found,) = runs.query(alive=True)

            assert found.series("loss").value.tolist() == [float(at) for at in range(step + 1)]
            assert found.record.summary["loss"] == float(step)
        # Each piece, and after each the check that there is no other.
        assert store.asked == Counter(get=10)


def test_the_end_of_a_run_is_noticed(live):
    """The reader then has the folder's last rows and documents."""
    run, uri = live
    run.log({"loss": 1.0}, 0)
    send(run)
    with open_runs(uri) as runs:
        (found,) = runs.query()
        assert found.shown_status == "running"
        run.log({"loss": 2.0}, 1)
        run.logger.log_images(np.zeros((2, 2), np.uint8), "Inputs", step=1)
        run.close()
        runs.scan(full=True)
        (found,) = runs.query()

        assert (found.name, found.shown_status) == ("digits", "completed")
        assert found.series("loss").value.tolist() == [1.0, 2.0]
        assert found.images()[0].load().size == (2, 2)
        assert found.place == uri.partition("?")[0]


def test_ended_runs_cost_one_request_each_and_none_the_second_time(moto, tmp_path, monkeypatch):
    """Their rows are fetched when they are read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number in range(3):
        with Written(moto.uri(f"ended/run{number}")) as run:
            run.logger.log_hyperparameters({"number": number})
            run.log({"loss": float(number)}, 0)
    store = Asked(open_store(moto.uri("ended")))
    copy = BucketCopy(store, tmp_path / "copy")
    copy.refresh()
    first, store.asked = store.asked, Counter()
    BucketCopy(store, tmp_path / "copy").refresh()

    assert first == Counter(list=1, get=3)
    assert store.asked == Counter(list=1)
    assert not list((tmp_path / "copy").rglob("metrics.csv"))
    with open_runs(moto.uri("ended")) as runs:
        found = runs.query(sort_by="hparams.number")
        assert [run.record.summary["loss"] for run in found] == [0.0, 1.0, 2.0]
        assert runs.best("loss", is_max=True)[0].value == 2.0
        assert runs["run1"].series("loss").value.tolist() == [1.0]


def test_commands_take_a_uri(live, capsys):
    """`ls`, `show` and `tail` do; commands that delete or edit say why they don't."""
    run, uri = live
    for step in range(3):
        run.log({"loss": step / 2}, step)
    send(run)
    root = uri.replace("/digits?", "?")

    codes = [
        cli.main(["runs", *arguments])
        for arguments in (
            ["ls", root, "--columns", "status,summary.loss"],
            ["show", uri],
            ["tail", uri, "--no-follow", "--lines", "1"],
            ["rm", uri, "--yes"],
            ["gc", "--root", root],
            ["tag", "--root", root, "digits", "+good"],
        )
    ]
    said = capsys.readouterr()

    assert codes == [0, 0, 0, 2, 2, 1]
    assert "digits" in said.out
    assert uri.partition("?")[0] in said.out
    assert "step 2  loss 1" in said.out
    assert said.err.count("are deleted by the tools of the store") == 2
    assert "Edit it on the machine" in said.err


def test_a_bucket_is_compacted_beside_its_runs(live, capsys):
    """A run's rows are fetched once it has ended, and become a dataset in the same bucket."""
    run, uri = live
    for step in range(3):
        run.log({"loss": step / 2}, step)
    run.close()
    root, dataset = uri.replace("/digits?", "?"), uri.replace("/digits?", "-dataset?")

    codes = [
        cli.main(["runs", "compact", root, dataset]),
        cli.main(["runs", "sql", "select sum(value) from metrics", "--dataset", dataset]),
    ]

    assert codes == [0, 0]
    assert "1.5" in capsys.readouterr().out


def test_a_compaction_on_another_machine_rewrites_no_values(live, tmp_path):
    """Rows are identified by their place in the run, not by the time of copying."""
    run, uri = live
    run.log({"loss": 1.0}, 0)
    run.close()
    reports = []
    for machine in ("one", "two"):
        with open_runs(uri, cache=tmp_path / machine) as runs:
            copy = runs.copies[0]
            reports.append(compact(runs, tmp_path / "dataset"))
            shutil.rmtree(copy.folder)

    assert [(one.added, one.changed, one.unchanged) for one in reports] == [(1, 0, 0), (0, 0, 1)]


def test_damaged_pieces_hide_no_run(live, moto):
    """A run without a readable piece is shown with its problem, and the others as usual."""
    run, uri = live
    run.log({"loss": 1.0}, 0)
    send(run)
    with Written(uri.replace("/digits?", "/other?")) as other:
        other.log({"loss": 2.0}, 0)
    key = uri.partition("?")[0].removeprefix(f"s3://{s3_servers.BUCKET}/")
    client = moto.client()
    names = [one["Key"] for one in client.list_objects_v2(Bucket=s3_servers.BUCKET, Prefix=key)["Contents"]]
    for name in names:
        if name.endswith(".zip"):
            client.put_object(Bucket=s3_servers.BUCKET, Key=name, Body=b"PK damaged")

    with open_runs(uri.replace("/digits?", "?")) as runs:
        assert {one.name: one.status for one in runs.query()} == {"digits": "unknown", "other": "completed"}
        # A slow machine may have sent another piece meanwhile.
        damage = r"(\d{8})-\1\.zip is damaged"
        assert re.search(f"sidecar.json cannot be read: {damage}", runs["digits"].record.problem)
        with pytest.raises(UnreadableError, match=damage):
            runs["digits"].series("loss")


def test_several_machines_write_one_run(live):
    """A named writer has its own session and pieces; readers see one run."""
    run, uri = live
    for step in range(4):
        run.log({"loss": float(step)}, step)
    send(run)
    writer = Written(uri, writer="eval", mirror_seconds=10.0)
    writer.log({"val/acc": 0.5}, 2)
    writer.log({"val/acc": 0.25, "loss": 9.0}, 1)
    send(writer)
    with open_runs(uri.replace("/digits?", "?")) as runs:
        (found,) = runs.query()
        assert (found.name, found.writers) == ("digits", ["eval"])
        assert found.series("val/acc").step.tolist() == [1, 2]
        assert found.series("loss").value.tolist() == [0.0, 1.0, 9.0, 2.0, 3.0]
        assert found.writer("eval").shown_status == "running"
        writer.log({"val/acc": 0.75}, 3)
        writer.close()
        runs.scan(full=True)
        (found,) = runs.query()

        assert found.series("val/acc").value.tolist() == [0.25, 0.5, 0.75]
        assert (found.shown_status, found.writer("eval").shown_status) == ("running", "completed")
