"""What all adapters share: a run that opens on first use, and how it ends."""

import os
import pickle
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from destinations import Artifacts, InMemory, RunDirectory
from destinations.adapters.session import Session, length_of, samples_in
from destinations.testing import RecordingDestination
from events import Event, Phase, RunStatus, Timestamp
from tests.servers.stores import StoreThatFails
from uploads.errors import TransientStoreError


def test_nothing_is_opened_or_made_before_its_first_use(tmp_path):
    """The folder is known but doesn't exist yet."""
    session = Session([RunDirectory(tmp_path / "{run_name}")], run_name="mine")

    assert session.folder == tmp_path / "mine"
    assert not session.is_open
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("runs/digits", r"for a folder, RunDirectory\('runs/digits'\)"),
        ([InMemory()], "without the inner list"),
        (InMemory, r"Write InMemory\(\.\.\.\)"),
    ],
    ids=["folder", "list", "class"],
)
def test_anything_but_a_destination_raises_at_once(given, expected):
    """The error comes before a trainer loads its data."""
    with pytest.raises(TypeError, match=expected):
        Session([given], run_name="mine")


def test_a_run_without_destinations_raises(caplog):
    """One example is the logger of a callback whose class was passed to the trainer."""
    for name, destinations in (("mine", []), ("other", [InMemory()])):
        session = Session(destinations, run_name=name)
        session.logger.log_metrics({"loss": 1.0})
        session.close()

    (line,) = caplog.messages
    assert line.startswith("run 'mine' has no destinations: nothing is logged. Give some where")


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [("given", "other", "given"), (None, "other", "other"), (None, None, "folder")],
)
def test_the_name_comes_from_the_argument_the_environment_or_the_folder(
    tmp_path, monkeypatch, given, variable, expected
):
    """The first one available in this order is used."""
    monkeypatch.delenv("RUN_NAME", raising=False)
    if variable:
        monkeypatch.setenv("RUN_NAME", variable)

    session = Session([RunDirectory(tmp_path / "folder")], run_name=given)

    assert session.state.run_name == expected


def test_several_ranks_must_agree_on_a_name(monkeypatch):
    """Otherwise each rank would invent its own name and wait forever for the others."""
    monkeypatch.delenv("RUN_NAME", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ValueError, match=r"run_name must be given with several ranks \(2"):
        Session([InMemory()]).open()

    Session([InMemory()], run_name="agreed").open()


def test_torchrun_ranks_keep_their_common_name_after_a_restart(tmp_path, torch_server):
    """Each rank is a process that knows the others only through the store of torchrun's agent."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    program = (
        "import sys\n"
        "from destinations import RunDirectory\n"
        "from destinations.adapters.ml_logger import MlLogger\n"
        "folder = sys.argv[1] + '/{run_name}'\n"
        "with MlLogger(RunDirectory(folder, all_ranks=True), num_steps=1) as logger:\n"
        "    logger.log_scalar('loss', 0.5)\n"
        "    logger.write(0, 'train')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RUN_NAME"} | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
    }
    for rank, restarts in (("1", "0"), ("1", "1"), ("0", "1")):
        more = {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": restarts}
        done = torch_server.run(program, tmp_path, env=environment | more, timeout_s=120)
        assert done.returncode == 0, done.stderr

    (folder,) = tmp_path.iterdir()
    assert {"metrics.csv", "metrics.rank1.csv"} <= {one.name for one in folder.iterdir()}


def test_a_stage_after_success_is_running():
    """An evaluation and a prediction run after fit; if one fails, the run has failed."""
    session = Session([], run_name="mine")
    session.fit_start(Timestamp())
    session.stage_start(Phase.EVAL, "eval")
    session.stage_end()
    in_fit = session.state.status
    session.fit_end()
    session.succeed()
    found = []
    for phase in (Phase.EVAL, Phase.PREDICT):
        session.stage_start(phase, "data")
        found.append(session.state.status)
        session.stage_end()
        found.append(session.state.status)
    session.stage_start(Phase.EVAL, "data")
    session.close(ValueError("no"))

    assert in_fit is RunStatus.RUNNING
    assert found == [RunStatus.RUNNING, RunStatus.COMPLETED] * 2
    assert session.state.status is RunStatus.FAILED


def test_a_closed_session_reopens_at_its_position():
    """Records after close are in the same run, at the same batch."""
    memory = InMemory()
    session = Session([memory], run_name="mine", raise_errors=True)
    session.fit_start(Timestamp())
    session.batch_end()
    session.close(ValueError("once"))

    session.logger.log_metrics({"loss": 1.0})

    assert (session.is_open, session.state.status, session.state.exception) == (
        True,
        RunStatus.RUNNING,
        None,
    )
    assert memory.records[-1].step == 1


def test_an_init_that_raises_leaves_nothing_open(raising):
    """Another run can use the destinations at once."""
    memory = InMemory()

    with pytest.raises(RuntimeError, match="no"):
        Session([memory], [raising(Event.INIT, RuntimeError("no"))], "mine").open()

    Session([memory], run_name="mine").open()


def test_a_checkpoints_name_is_never_reused_for_another_file(tmp_path):
    """A file from elsewhere gets a number; a newer version of the same file keeps the name."""
    session = Session([RunDirectory(tmp_path / "run")], raise_errors=True)
    for folder, text in (("a", "first"), ("b", "second"), ("a", "first, newer")):
        path = tmp_path / folder / "epoch={epoch}.ckpt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        session.upload_checkpoint(path, tmp_path / "elsewhere", link=False)
    (tmp_path / "b" / path.name).unlink()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / path.name).write_text("third")
    session.upload_checkpoint(tmp_path / "c" / path.name, tmp_path / "elsewhere", link=False)
    session.close()

    kept = {one.name: one.read_text() for one in (tmp_path / "run/artifacts/checkpoints").iterdir()}
    assert kept == {"epoch={epoch}.ckpt": "first, newer", "epoch={epoch}-3.ckpt": "third"}


def test_two_destinations_of_a_class_keep_their_own_state():
    """Their order tells them apart; if one fails to return its state, only that state is missing."""

    class Stateful(RecordingDestination):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def state_dict(self):
            return {"value": 1 / self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    session = Session([Stateful(1.0), Stateful(0), Stateful(4.0)], run_name="mine")
    session.open()
    saved = pickle.loads(pickle.dumps(session.state_dict()))  # noqa: S301  # made here
    others = [Stateful(0.0), Stateful(7.0), Stateful(0.0)]

    Session(others, run_name="mine").resume(saved)

    assert [one.value for one in others] == [1.0, 7.0, 0.25]


def test_batches_count_samples():
    """A dataloader may yield anything."""
    numpy = pytest.importorskip("numpy")

    counts = [samples_in(batch) for batch in (numpy.zeros((4, 2)), {"a": [numpy.zeros(3)]}, (1, 2), "text")]

    assert counts == [4, 3, 0, 0]
    assert (length_of([1, 2]), length_of(iter([]))) == (2, None)


PROGRAM = """
import sys
from destinations import RunDirectory
from destinations.adapters.session import Session
from events import Timestamp
session = Session([RunDirectory(sys.argv[1])])
session.fit_start(Timestamp())
session.logger.log_metrics({"loss": 1.0})
if sys.argv[2] == "completes":
    session.fit_end()
    session.succeed()
elif sys.argv[2] == "raises":
    raise ValueError("diverged")
else:
    sys.exit(0)
"""


@pytest.mark.parametrize(
    ("ending", "status", "exception"),
    [
        ("completes", "completed", None),
        ("raises", "failed", "ValueError: diverged"),
        ("exits", "failed", None),
    ],
)
def test_the_end_of_the_program_closes_open_runs(tmp_path, environment, sidecar, ending, status, exception):
    """The run has the exception that ended it; `sys.exit` inside fit is a failure, whatever its code."""
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), ending],
        env=environment,
        capture_output=True,
        timeout=500,
        check=False,
    )

    written = sidecar(tmp_path / "run")
    assert (written["status"], written["exception"]) == (status, exception)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 2


def test_a_deleted_checkpoint_makes_room_in_a_full_spool(tmp_path):
    """The newest one waits for the store, as it would in the trainer's own folder."""
    store = StoreThatFails(*[TransientStoreError("away")] * 1000)
    artifacts = Artifacts(store, spool=tmp_path / "spool", spool_bytes=150, close_seconds=0, free_bytes=0)
    session = Session([artifacts], raise_errors=True)
    paths = [tmp_path / f"{name}.ckpt" for name in "ab"]
    for index, path in enumerate(paths):
        path.write_bytes(b"x" * 100)
        if index:
            paths[0].unlink()
        session.upload_checkpoint(path, tmp_path)

    waiting = artifacts.queue.backlog()
    session.close()

    assert [name.rpartition("/")[2] for name in waiting.remaining] == ["b.ckpt"]
    assert (waiting.dropped, waiting.failures) == (1, ())
