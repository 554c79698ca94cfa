"""Checkpoints in a store: `save_folder` and `load_path` as URIs, and resuming on a machine that has nothing."""

import shutil
import threading

import pytest

from destinations import Artifacts, LoggerDestination
from events import Callback, CheckpointError, CheckpointSaver, read_checkpoint
from tests.servers.fault_proxy import Answer, FaultProxy
from uploads import open_store


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch, s3_credentials):
    """The folder in which this machine keeps spools; removed, it is another machine."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
    return tmp_path / "machine"


def names(uri):
    """Returns the names of all objects in a folder of a store."""
    return [one.name for one in open_store(uri).list("")]


def flip_a_bit(path):
    """Damages a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


EVERYTHING = ["ep0-ba4.pt", "ep1-ba8.pt", "ep2-ba10.pt", "latest.symlink"]


class Dies(Callback):
    """Ends a run as a machine does that fails."""

    def batch_end(self, state, logger):
        if state.timestamp.batch == 9:
            raise OSError("node failure")


def test_to_s3_and_back_on_an_empty_machine(make_trainer, metric_list, moto, machine, tmp_path):
    """The uploads are all that the next machine needs; no destination is involved."""
    settings = {"save_folder": moto.uri("checkpoints/{run_name}"), "save_interval": "4ba", "autoresume": True}
    with pytest.raises(OSError, match="node failure"):
        make_trainer(callbacks=Dies(), **settings).fit()
    shutil.rmtree(machine)

    trainer = make_trainer(loggers=metric_list, **settings)
    assert trainer.state.last_checkpoint == moto.uri("checkpoints/test/ep1-ba8.pt")
    trainer.fit()
    trainer.close()

    assert [step for step, _ in metric_list.series("loss/train/total")] == [8, 9]
    assert names(moto.uri("checkpoints/test")) == EVERYTHING
    assert read_checkpoint(moto.uri("checkpoints/test/latest"))["timestamp"]["batch"] == 10
    assert trainer.state.last_checkpoint == moto.uri("checkpoints/test/ep2-ba10.pt")


@pytest.mark.parametrize("part", ["ep1-ba8.pt", "latest.symlink"])
def test_a_store_that_loses_an_answer_in_the_middle_of_a_checkpoint(make_trainer, moto, machine, part):
    """The stored object isn't mistaken for another run's; every checkpoint is there and whole."""
    proxy = FaultProxy(moto.endpoint_url)
    proxy.fail_first(1, Answer(500, "InternalError", after_forwarding=True), part=f"/{part}")
    prefix = f"lost-{part[:3]}"
    folder = moto.at(proxy.url).uri(prefix)
    try:
        with make_trainer(save_folder=folder, save_interval="4ba") as trainer:
            trainer.fit()
    finally:
        proxy.close()

    there = moto.uri(prefix)
    # It is asked what it has.
    assert proxy.count("HEAD", f"/{part}") >= 1
    assert names(there) == EVERYTHING
    for name, batch in {"ep0-ba4.pt": 4, "ep1-ba8.pt": 8, "ep2-ba10.pt": 10, "latest": 10}.items():
        uri = there.replace("?", f"/{name}?")
        assert read_checkpoint(uri)["timestamp"]["batch"] == batch


def test_the_next_process_uploads_leftovers(make_trainer, moto):
    """It goes before training; the files are in the spool."""
    proxy, has_arrived = FaultProxy(moto.endpoint_url), threading.Event()
    proxy.plan = lambda request: Answer(503, "SlowDown") if request.method == "PUT" else None
    folder = moto.at(proxy.url).uri("left-behind")

    def notes(request):
        if request.method == "PUT" and "/latest.symlink" in request.path:
            has_arrived.set()

    def make():
        saver = CheckpointSaver(folder, close_seconds=0.0)
        return make_trainer(callbacks=saver, max_duration="1ep", autoresume=True)

    try:
        with make() as trainer:
            trainer.fit()
        before = names(moto.uri("left-behind"))
        proxy.plan = notes
        with make():
            was_sent = has_arrived.wait(60)
    finally:
        proxy.close()

    assert (before, was_sent) == ([], True)
    assert "ep1-ba5.pt" in names(moto.uri("left-behind"))


@pytest.fixture
def uri(tmp_path):
    """A folder as a URI."""
    return f"file://{tmp_path}/store"


def test_the_newest_stays_on_this_machine_and_is_taken_where_the_store_lags(
    make_trainer, uri, machine, tmp_path
):
    """A store that lost its newest, or never got it, is behind what is here."""
    with make_trainer(save_folder=uri, save_interval="4ba") as trainer:
        trainer.fit()
    (tmp_path / "store" / "ep2-ba10.pt").unlink()
    (tmp_path / "store" / "latest.symlink").write_text("ep1-ba8.pt")

    with make_trainer(save_folder=uri, autoresume=True, max_duration="3ep") as trainer:
        batch = int(trainer.state.timestamp.batch)

    assert batch == 10
    [folder] = machine.glob("*.checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == ["ep2-ba10.pt", "latest.symlink"]


def test_a_damaged_checkpoint_in_the_store_is_skipped_with_a_warning(
    make_trainer, uri, machine, tmp_path, caplog
):
    """The one before it is taken."""
    with make_trainer(save_folder=uri, save_interval="4ba") as trainer:
        trainer.fit()
    shutil.rmtree(machine)
    flip_a_bit(tmp_path / "store" / "ep2-ba10.pt")

    trainer = make_trainer(save_folder=uri, autoresume=True)

    assert trainer.state.timestamp.batch == 8
    assert "ep2-ba10.pt" in caplog.text
    assert "The previous checkpoint is tried." in caplog.text


@pytest.mark.parametrize("options", [{}, {"save_sharded": True}], ids=["file", "shards"])
def test_a_damaged_copy_here_is_downloaded_again(make_trainer, uri, machine, tmp_path, caplog, options):
    """The store has a whole one; where it has not, the one before it is taken."""
    with make_trainer(save_folder=uri, save_interval="4ba", **options) as trainer:
        trainer.fit()
    [copy] = [path for path in machine.glob("*.checkpoints/*ba10*") for path in [path, *path.glob("__0*")]][
        -1:
    ]
    flip_a_bit(copy)

    trainer = make_trainer(save_folder=uri, autoresume=True, **options)

    assert trainer.state.timestamp.batch == 10
    flip_a_bit(copy)
    flip_a_bit(tmp_path / "store" / copy.relative_to(next(machine.glob("*.checkpoints"))))
    assert make_trainer(save_folder=uri, autoresume=True, **options).state.timestamp.batch == 8


def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(make_trainer, tmp_path):
    """That would throw away what can perhaps be repaired."""
    make_trainer(save_folder=tmp_path).fit()
    for path in tmp_path.glob("*.pt"):
        flip_a_bit(path)

    with pytest.raises(CheckpointError, match="ep2-ba10"):
        make_trainer(save_folder=tmp_path, autoresume=True)


def test_a_store_with_another_run_of_the_name_is_refused(make_trainer, uri, machine):
    """Before training, and nothing is changed; save_overwrite=True allows it."""
    with make_trainer(save_folder=uri, max_duration="1ep") as trainer:
        trainer.fit()
    shutil.rmtree(machine)

    with pytest.raises(FileExistsError, match=r"must be new for a new run, but file://.*/store holds"):
        make_trainer(save_folder=uri, max_duration="1ep")
    with make_trainer(save_folder=uri, max_duration="1ep", save_overwrite=True) as trainer:
        trainer.fit()

    assert trainer.state.timestamp.batch == 5


@pytest.mark.parametrize(
    ("template", "options"), [("{run_name}", {}), ("", {"save_sharded": True})], ids=["file", "shards"]
)
def test_names_that_a_destination_has_of_another_run_are_refused(make_trainer, tmp_path, template, options):
    """The machine has nothing of it; runs of other names, and this run resumed, are let in."""

    def make(folder, **arguments):
        artifacts = Artifacts(f"{tmp_path}/store/{template}", spool=tmp_path / folder / "spool", free_bytes=0)
        arguments = {"loggers": artifacts, "max_duration": "1ep", **options, **arguments}
        return make_trainer(save_folder=tmp_path / folder / "saved", **arguments)

    with make("first") as trainer:
        trainer.fit()

    with pytest.raises(FileExistsError, match=r"a destination holds 'test/checkpoints/.*another run_name"):
        make("second")
    for number, allowed in enumerate(
        [
            {"run_name": "tes"},
            {"autoresume": True},
            {"save_overwrite": True},
            {"save_filename": "n{batch}.pt"},
        ]
    ):
        if "save_filename" in allowed:
            allowed["save_latest_filename"] = None
        make(f"allowed-{number}", **allowed).close()


def test_a_store_is_asked_by_one_listing_however_much_it_has(make_trainer, moto):
    """It has a thousand names; this run's are found among them, whatever their names."""
    for name in ("other-0.txt", "other-1.txt", "test-ba3.pt"):
        moto.client().put_object(Bucket="bucket", Key=f"full/{name}", Body=b"")
    proxy = FaultProxy(moto.endpoint_url)
    settings = {"save_folder": moto.at(proxy.url).uri("full"), "save_latest_filename": None}
    try:
        with pytest.raises(FileExistsError, match=r"'test-ba3\.pt' of another run"):
            make_trainer(save_filename="{run_name}-ba{batch}.pt", **settings)
        asked = [(one.method, "list-type" in one.path) for one in proxy.seen]
        make_trainer(save_filename="{run_name}-ep{epoch}.pt", **settings).close()
    finally:
        proxy.close()

    assert asked == [("GET", True)]


def test_a_store_that_may_not_be_listed_keeps_no_run_from_starting(make_trainer, moto, tmp_path, caplog):
    """Both a destination and a folder in a store report it."""
    proxy = FaultProxy(moto.endpoint_url)
    proxy.plan = lambda request: Answer(403, "AccessDenied") if request.method == "GET" else None
    uri = moto.at(proxy.url).uri("refuses")
    try:
        make_trainer(save_folder=tmp_path / "saved", loggers=Artifacts(uri, close_seconds=0.0)).close()
        make_trainer(save_folder=uri).close()
    finally:
        proxy.close()

    assert caplog.text.count("cannot look for checkpoints in the store: ") == 2


def test_destinations_do_not_get_checkpoints_of_a_folder_in_a_store(make_trainer, uri):
    """It would be there twice."""

    class Files(LoggerDestination):
        def __init__(self):
            self.files = []

        def can_upload_files(self):
            return True

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            self.files.append(remote_file_name)

    files = Files()

    make_trainer(save_folder=uri, loggers=files).fit()

    assert files.files == []


@pytest.mark.parametrize("name", ["store/ep1-ba8.pt", "store/latest", "store/latest.symlink"])
def test_load_path_takes_a_uri(make_trainer, uri, tmp_path, name):
    """It leads to a checkpoint, or to a pointer with or without its ending."""
    with make_trainer(save_folder=uri, save_interval="4ba") as trainer:
        trainer.fit()

    trainer = make_trainer(load_path=f"file://{tmp_path}/{name}")

    assert trainer.state.timestamp.batch == (8 if "ba8" in name else 10)


@pytest.mark.parametrize("options", [{}, {"save_sharded": True}], ids=["file", "shards"])
def test_load_path_takes_the_uri_of_a_folder(make_trainer, uri, tmp_path, options):
    """What was passed as save_folder: the newest, by the pointer, or by the numbers in the names."""
    with make_trainer(save_folder=uri, save_interval="4ba", **options) as trainer:
        trainer.fit()

    assert make_trainer(load_path=uri).state.timestamp.batch == 10
    (tmp_path / "store/latest.symlink").unlink()
    assert read_checkpoint(uri)["timestamp"]["batch"] == 10
    with pytest.raises(FileNotFoundError):
        read_checkpoint(f"{uri}/none")


def test_load_path_takes_a_folder_and_latest(make_trainer, tmp_path):
    """A folder means its newest, and "latest" the newest of the run."""
    make_trainer(save_folder=tmp_path, save_interval="4ba").fit()

    assert make_trainer(load_path=tmp_path).state.timestamp.batch == 10
    assert make_trainer(load_path="latest", save_folder=tmp_path).state.timestamp.batch == 10
    with pytest.raises(FileNotFoundError, match="load_path='latest' found no checkpoint"):
        make_trainer(load_path="latest", save_folder=tmp_path / "none")


def test_an_invalid_uri_raises_at_once(make_trainer):
    """The error does not wait for the first checkpoint."""
    with pytest.raises(ValueError, match="did you mean 's3'"):
        make_trainer(save_folder="s33://bucket/x")
