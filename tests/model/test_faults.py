"""A short run and its continuation, with one fault at each call to the disk: what readers have is right, or something says that it is not."""

import contextlib
import errno
import itertools
import logging
import os
import re
import threading

import pytest

from destinations.runs import MetricNotFoundError, Run, RunNotFoundError, open_runs
from tests.effort import times
from tests.model import readers
from tests.model.histories import History, Record
from tests.model.session import Session
from tests.model.test_histories import has_all, has_all_metrics

BY_PATH = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "link", "stat", "scandir", "listdir")
BY_DESCRIPTOR = ("write", "pwrite", "ftruncate", "fsync", "fdatasync", "pread", "read", "fstat")
PLACES = {
    "refusal": BY_PATH + BY_DESCRIPTOR,
    "truncation": ("write", "pwrite", "pread", "read"),
    "absence": BY_PATH,
}
USUAL = ("was completed: it is continued", "training continues from an earlier place")
"""What a run and its continuation say without a fault."""
THROUGH = re.compile(r"/proc/self/fd/(\d+)")


class OneFault:
    """A disk on which one call of this process below a folder fails. The lock guards the count.

    Attributes:
        count: how many calls there were.
        failed: the call that failed, with its path; "" before.
    """

    def __init__(self, root, kind, number):
        self.count, self.failed = 0, ""
        self._root, self._kind, self._number = str(root), kind, number
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def within(self):
        """Replaces the system's calls within the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in PLACES[self._kind]:
                patch.setattr(os, name, self._faulty(name, getattr(os, name)))
            yield self

    def _faulty(self, name, real):
        readlink = os.readlink

        def where(path):
            with contextlib.suppress(OSError, TypeError):
                if isinstance(path, int):
                    return readlink(f"/proc/self/fd/{path}")
                return THROUGH.sub(lambda found: readlink(found[0]), os.fspath(path))
            return ""

        def call(path=".", *arguments, **options):
            place = where(path)
            with self._lock:
                is_ours = place.startswith(self._root) and not self.failed
                self.count += is_ours
                is_now = is_ours and self.count == self._number
                if is_now:
                    self.failed = f"{name} {place}"
            if not is_now:
                return real(path, *arguments, **options)
            if self._kind == "absence":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
            if self._kind == "truncation" and "read" in name:
                found = real(path, *arguments, **options)
                return found[: len(found) // 2]
            if self._kind == "truncation":
                real(path, bytes(arguments[0])[: len(arguments[0]) // 2], *arguments[1:])
            raise OSError(errno.EIO, os.strerror(errno.EIO), place)

        return call


class Story:
    """A run of two sessions; the second continues from a checkpoint of the first."""

    def __init__(self, place):
        self.model, self._numbers = History(place), itertools.count(1)
        self.errors = []

    def tell(self):
        """Runs the sessions; `errors` keeps what they raise."""
        saved = self._tell_session("none", None)
        if saved is not None:
            self._tell_session("checkpoint", saved)

    def _tell_session(self, proof, saved):
        session = Session()
        try:
            session.begin(
                self.model.place,
                proof,
                saved=saved,
                is_strict=False,
                flush_seconds=0.01,
                close_seconds=5.0,
                **({"mirror_seconds": 0.05} if "://" in self.model.place else {}),
            )
            self.model.begin(self.model.checkpoints[0] if saved else None)
            self._log(session, "hyperparameters", "metrics", "texts", "metrics")
            session.batch()
            session.flush()
            self.model.checkpoint(session.checkpoint())
            self._log(session, "metrics", "images", "texts", "tables")
            return self.model.checkpoints[0].saved
        except Exception as error:  # noqa: BLE001  # whatever it says
            self.errors.append(error)
            return None
        finally:
            try:
                session.close()
            except Exception as error:  # noqa: BLE001  # as above
                self.errors.append(error)

    def _log(self, session, *kinds):
        for kind in kinds:
            number = next(self._numbers)
            at = session.log(kind, "loss" if kind == "metrics" else "note", number, None)
            self.model.log(Record(kind, "loss" if kind == "metrics" else "note", at, number))


def compare(model, run):
    """Asserts that a reader has the records of the run."""
    has_all_metrics(readers.by_read_rows(run.path), model.metrics(), set())
    for kind in ("texts", "images", "tables"):
        has_all(readers.records_of(run, kind), model.of(kind), set())
    for _, number in model.of("hyperparameters")[-1:]:
        assert run.hyperparameters.get("newest") == f"config {number}"


def opened(place, cache):
    """Returns the run, from its folder or its store."""
    if "://" not in place:
        return Run.open(place)
    with open_runs(place.rpartition("/")[0], cache=cache) as runs:
        for run in runs.query():
            if run.place == place:
                return run
    raise RunNotFoundError(place)


def shape(path):
    """Returns a path without the parts that differ between two runs."""
    return re.sub(r"\b[0-9a-f]*[0-9][0-9a-f]*\b", "N", path)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("where", ["folder", "store"])
def test_a_single_disk_fault_loses_nothing_silently(tmp_path, monkeypatch, caplog, where, kind):
    """After any one call was refused, cut short or found nothing, all is there, or the loss was reported."""
    caplog.set_level(logging.WARNING)
    silent = {}
    for number in itertools.count(1, times(100, 1)):
        base = tmp_path / str(number)
        monkeypatch.setenv("XDG_STATE_HOME", str(base / "state"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        monkeypatch.setenv("UPLOADS_HOME", str(base / "uploads"))
        root = base / "runs"
        root.mkdir(parents=True)
        story = Story(f"{root.as_uri() if where == 'store' else root}/run")
        caplog.clear()
        with OneFault(root, kind, number).within() as disk:
            story.tell()
        said = [one for one in caplog.messages if not any(usual in one for usual in USUAL)] + story.errors
        if not disk.failed:
            compare(story.model, opened(story.model.place, base / "index"))
            # There are no more calls.
            assert said == []
            break
        try:
            run = opened(story.model.place, base / "index")
            said += [run.record.problem] if run.record.problem else []
            compare(story.model, run)
        except (AssertionError, MetricNotFoundError) as error:
            if not said:
                call, _, path = disk.failed.partition(" ")
                silent.setdefault(f"{kind} of {call} {shape(path.removeprefix(str(root)))}", str(error))
        except (OSError, RunNotFoundError, ValueError):
            # A reader reports that it cannot read the run.
            pass
    assert silent == {}
