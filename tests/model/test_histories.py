"""Random histories of runs, in killed processes, against plain lists: every reader tells the same history.

A run is logged to, killed, closed, continued from any checkpoint or at its end, begun again beside itself, added to by
named writers, deleted and begun anew; a reader follows it. `histories` has the lists, `session` the processes, and
`readers` what each reader returns.
"""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from destinations.runs import Run, RunNotFoundError, open_runs
from tests.effort import times
from tests.model import readers
from tests.model.histories import History, Record
from tests.model.session import Processes, SessionError
from tests.servers.fork_server import ForkServer
from tests.waiting import until

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "0"))
STEPS = st.integers(0, 6)
ACTIONS = st.one_of(
    st.sampled_from([("batch", "", 0), ("save", "", 0), ("save", "batch", 0), ("hyperparameters", "", 0)]),
    st.tuples(st.just("metrics"), st.sampled_from(["loss", "acc", "loss+acc"]), STEPS),
    st.tuples(st.sampled_from(readers.KINDS), st.sampled_from(["note", "sample"]), STEPS),
)
WITHOUT_STEP = {"traces", "files", "hyperparameters"}


def has_all(seen, expected, doubtful):
    """Asserts that a reader has exactly the expected records, in order.

    Args:
        seen: tuples that end with the number of a record.
        expected: the same.
        doubtful: numbers that may be missing.
    """
    numbers = {one[-1] for one in seen}
    assert seen == [one for one in expected if one[-1] not in doubtful or one[-1] in numbers]


def has_all_metrics(seen, expected, doubtful):
    """Asserts `has_all` for each metric."""
    for name in seen.keys() | expected.keys():
        has_all(seen.get(name, []), expected.get(name, []), doubtful)


def _by_step(metrics):
    return {name: sorted(values) for name, values in metrics.items()}


class Folder(RuleBasedStateMachine):
    """Runs in a folder of one machine."""

    server = None
    loses_what_is_not_sent = False

    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="model-"))
        self.root = self.base / "runs"
        self.processes = Processes(self.server, self.base)
        self.numbers = itertools.count(1)
        self.runs, self.now, self.process, self.looker = [], None, None, None
        self.options, self.wrote = {}, {}
        self.has_own_steps = self.is_sound = True
        # The present session: whether it has trained, and whether it continues at a batch.
        self.has_trained = self.names_batch = False

    @initialize(own_steps=st.booleans())
    def choose(self, own_steps):
        self.has_own_steps = own_steps

    # Sessions.

    is_live = property(lambda self: self.process is not None)
    is_idle = property(lambda self: self.process is None)

    @precondition(lambda self: self.is_idle)
    @rule(
        data=st.data(),
        proof=st.sampled_from(["none", "resume", "checkpoint", "checkpoint", "batch"]),
        has_config=st.booleans(),
        early=st.sampled_from([None, None, "texts", "metrics"]),
        trains=st.booleans(),
        flush_seconds=st.sampled_from([0.01, 1000.0]),
        small_parts=st.booleans(),
    )
    def begin(self, data, proof, has_config, early, trains, flush_seconds, small_parts):
        run = data.draw(st.sampled_from(self.runs)) if self.runs else None
        checkpoint = None
        if run is None:
            proof = "none"
        elif proof in {"checkpoint", "batch"}:
            found = self.checkpoints(run, by_batch=proof == "batch")
            if found:
                checkpoint = data.draw(st.sampled_from(found))
            else:
                proof = "resume"
        place = f"{self.root}/run" if run is None else run.place
        records = []
        if has_config:
            records.append(("hyperparameters", "", next(self.numbers), None))
        if early:
            records.append(
                (early, "loss" if early == "metrics" else "note", next(self.numbers), self.step(0))
            )
        machine = self.machine(data)
        self.process = self.processes.start(self.base / machine)
        found = self.process.call(
            "begin",
            place,
            proof,
            saved=checkpoint and checkpoint.saved,
            early=records,
            trains=trains,
            **{"flush_seconds": flush_seconds, "small_parts": small_parts, **self.options},
        )
        if proof == "none":
            assert found not in {one.place for one in self.runs}
            run = History(found)
            self.runs.append(run)
        else:
            assert found == run.place
        self.takes_over(run, machine)
        run.begin(
            checkpoint if proof == "checkpoint" else None,
            checkpoint.saved["batch"] if proof == "batch" else None,
        )
        self.now = run
        self.has_trained, self.names_batch = trains or checkpoint is not None, proof == "batch"
        for kind, name, number, step in records:
            run.log(Record(kind, name, step or 0, number))
        self.check(run)

    def machine(self, data):
        """Returns the machine that a session runs on."""
        return "machine"

    def takes_over(self, run, machine):
        """A session begins to write a run on a machine."""

    def step(self, step):
        return step if self.has_own_steps else None

    def checkpoints(self, run, *, by_batch=False):
        """Returns the checkpoints that a session can continue from."""
        found = run.checkpoints
        if by_batch:
            if self.has_own_steps:
                return []
            found = [one for one in found if not any(two.step >= one.saved["batch"] for two in one.records)]
            if run.is_completed:
                # Training from the beginning is then a new run.
                found = [one for one in found if one.saved["batch"]]
        return found

    @precondition(lambda self: self.is_live)
    @rule(actions=st.lists(ACTIONS, min_size=3, max_size=9))
    def work(self, actions):
        for kind, name, step in actions:
            match kind:
                case "batch":
                    self.batch()
                case "save":
                    if name:
                        self.batch()
                    self.now.checkpoint(self.process.call("checkpoint"))
                case "files":
                    # A file of the same name replaces the one before.
                    self.log(kind, f"{name}-{self.now.sessions}-{len(self.now.logged)}", step)
                case _:
                    self.log(kind, name, step)

    def batch(self):
        self.process.call("batch")
        self.has_trained = True

    def log(self, kind, name, step):
        number = next(self.numbers)
        step = None if kind in WITHOUT_STEP else self.step(step)
        at = self.process.call("log", kind, name, number, step)
        self.now.log(Record(kind, name, at, number))

    @precondition(lambda self: self.is_live)
    @rule(way=st.sampled_from(["kill", "kill when all is written", "close"]))
    def end(self, way):
        run, process = self.now, self.process
        if way == "close":
            process.call("close")
            process.end()
            run.complete()
        else:
            if way != "kill":
                self.settle()
            process.kill()
            run.kill()
        self.process, self.now = None, None
        self.check(run)

    def settle(self):
        """Waits until everything logged is written."""
        self.process.call("flush")
        self.now.flush()

    # What else happens to a run.

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def meanwhile(self, data):
        data.draw(st.sampled_from(self.events()))(data)

    def events(self):
        found = [self.write_as_another, self.follow]
        if self.is_idle:
            return [*found, self.delete]
        return [*found, self.load_again, self.check_now, self.begin_twice]

    def write_as_another(self, data):
        run = data.draw(st.sampled_from(self.runs))
        writer = data.draw(st.sampled_from(["eval", "probe"]))
        steps, ends = data.draw(st.lists(STEPS, max_size=3)), data.draw(st.booleans())
        process = self.processes.start(self.base / "machine")
        process.call("begin", run.place, "none", writer=writer, trains=False, **self.options)
        for step in steps:
            number = next(self.numbers)
            at = process.call("log", "metrics", "loss", number, step)
            run.log_as(writer, Record("metrics", "loss", at, number))
        if ends or self.loses_what_is_not_sent:
            process.call("close")
            process.end()
        else:
            process.kill()
        self.check(run)

    def load_again(self, data):
        # Until rows pass the batch that a loop has named, it is open which checkpoint the session follows.
        found = [] if self.names_batch else self.checkpoints(self.now)
        if found:
            checkpoint = data.draw(st.sampled_from(found))
            self.process.call("load_again", checkpoint.saved)
            if self.has_trained or checkpoint.session == self.now.sessions:
                self.now.begin(checkpoint)
            else:
                self.now.follow(checkpoint)
            self.has_trained = True
            self.check(self.now)

    def begin_twice(self, data):
        proof = data.draw(st.sampled_from(["none", "resume"]))
        process = self.processes.start(self.base / self.wrote.get(self.now.place, "machine"))
        with pytest.raises(SessionError, match=r"^RunInUseError"):
            process.call("begin", self.now.place, proof, **self.options)
        process.kill()
        self.check(self.now)

    def delete(self, data):
        run = data.draw(st.sampled_from(self.runs))
        self.stop_looking()
        self.remove(run)
        self.runs.remove(run)

    def remove(self, run):
        shutil.rmtree(run.place)

    def check_now(self, data):
        self.check(self.now)

    def follow(self, data):
        if self.looker is None:
            run = data.draw(st.sampled_from(self.runs))
            self.looker = (run, readers.Looker(Run.open(run.place)))
        self.look()

    def look(self):
        """Asserts that a follower was given each row once, and has all rows that belong, in order."""
        run, looker = self.looker
        seen = [one for one in looker.look() if not one[0]]
        assert len(seen) == len(set(seen)), "a row was given twice"
        for name, expected in run.metrics().items():
            given = [(step, number) for _, metric, step, number in seen if metric == name]
            assert [one for one in given if one in set(expected)] == [
                one for one in expected if one[-1] not in run.doubtful or one in given
            ]

    def stop_looking(self):
        if self.looker is not None:
            self.looker[1].close()
            self.looker = None

    # What readers return.

    def doubtful(self, model):
        """Returns the numbers of records that readers need not have."""
        return model.doubtful

    def check(self, model):
        """Asserts that all cheap readers have the history of a run."""
        self.is_sound = False
        if model is self.now:
            self.settle()
        self.compare(model)
        self.is_sound = True

    def compare(self, model):
        """Asserts that the readers of a run have its history."""
        run = Run.open(model.place)
        self.check_rows(model, run)
        self.check_records(model, run)
        self.check_configurations(model, run)

    def check_rows(self, model, run):
        has_all_metrics(readers.by_read_rows(run.path), model.metrics(), self.doubtful(model))
        has_all_metrics(readers.by_run(run), model.metrics(), self.doubtful(model))
        for writer in model.writers:
            if writer in run.writers:
                # Steps of a named writer may be late; its values are read in their order.
                assert _by_step(readers.by_run(run, writer)) == _by_step(model.metrics(writer))
            else:
                assert not model.metrics(writer)

    def check_records(self, model, run):
        for kind in readers.KINDS:
            has_all(readers.records_of(run, kind), model.of(kind), self.doubtful(model))

    def check_branches(self, model, run):
        """Asserts that each session is unchanged since it ended, whatever came after it."""
        for number, records in itertools.islice(model.branches.items(), 1, None):
            branch, doubtful = run.branch(number), self.doubtful(model)
            has_all_metrics(readers.by_run(branch), model.metrics(records=records), doubtful)
            for kind in readers.KINDS:
                has_all(readers.records_of(branch, kind), model.of(kind, records), doubtful)
            self.check_hyperparameters(model, branch, records)
            known = {one.number for one in records} - doubtful - {one.number for one in model.records}
            if known and not model.names_batches:
                own = {one for one in known if model.logged_by[one] == number}
                assert not own or branch.session in {one.session for one in run.branches()}

    def check_configurations(self, model, run):
        found = [run.configuration(one["session"])["hyperparameters"] for one in run.sessions]
        for number in model.configs - self.doubtful(model):
            assert any(one.get(f"only_{number}") == number for one in found)
        self.check_hyperparameters(model, run, model.records)

    def check_hyperparameters(self, model, run, records):
        if model.names_batches or self.doubtful(model) & model.configs:
            return
        expected = {}
        for _, number in model.of("hyperparameters", records):
            expected |= {"newest": f"config {number}", f"only_{number}": number}
        assert run.hyperparameters == expected

    def check_all(self, model):
        """Asserts that the other readers agree."""
        with open_runs(self.root, cache=self.base / "cache") as runs:
            (run,) = [one for one in runs.query() if one.place == model.place]
            self.check_rows(model, run)
            for found in readers.by_export(run, self.base):
                # The rows of writers are among them.
                of_writers = {one.number for every in model.writers.values() for one in every}
                own = {
                    name: [one for one in values if one[-1] not in of_writers]
                    for name, values in found.items()
                }
                has_all_metrics(own, model.metrics(), self.doubtful(model))
            self.check_branches(model, run)
            assert {name for name, one in run.summary.items() if one.count} == set(readers.by_run(run, None))
        if not model.writers:
            document, values = readers.by_cli(self.root, run.name, readers.by_run(run))
            has_all_metrics(values, model.metrics(), self.doubtful(model))
            assert document["run_id"] == run.run_id

    def teardown(self):
        try:
            if self.is_sound and self.is_live:
                self.end("kill when all is written")
            for run in self.runs if self.is_sound else ():
                self.check_all(run)
            if self.is_sound and self.looker is not None:
                self.look()
        finally:
            self.processes.kill()
            self.stop_looking()
            shutil.rmtree(self.base, ignore_errors=True)


class Bucket(Folder):
    """Runs in a store that two machines write to; each check asks the store, as a third machine does."""

    loses_what_is_not_sent = True

    def __init__(self):
        super().__init__()
        self.store = self.root
        self.root = self.store.as_uri()
        self.options = {"mirror_seconds": 0.1, "flush_seconds": 0.05}
        # For each run, the machine with all its rows; and a hanging process, with machine, run and session.
        self.wrote, self.hanging = {}, None

    def machine(self, data):
        hung = self.hanging and self.hanging[1]
        return data.draw(st.sampled_from([one for one in ("here", "there") if one != hung]))

    def takes_over(self, run, machine):
        if self.wrote.get(run.place, machine) != machine:
            # Rows that the other machine did not send may be lost.
            run.doubtful |= run.unsent
            run.unsent.clear()
        self.wrote[run.place] = machine

    def compare(self, model):
        if model is not self.now:
            self.compare_once(model)
            return

        def has_come():
            try:
                self.compare_once(model)
            except (AssertionError, RunNotFoundError):
                return False
            return True

        try:
            until(has_come, 20)
        except AssertionError:
            self.compare_once(model)
        model.unsent.clear()

    def compare_once(self, model):
        with open_runs(self.root, cache=self.base / "cache") as runs:
            found = [one for one in runs.query() if one.place == model.place]
            if not found:
                raise RunNotFoundError(model.place)
            self.check_rows(model, found[0])
            self.check_records(model, found[0])
            self.check_configurations(model, found[0])

    def settle(self):
        super().settle()
        self.compare(self.now)

    def doubtful(self, model):
        return super().doubtful(model) | (set() if model is self.now else model.unsent)

    def events(self):
        found = [one for one in super().events() if one != self.follow]
        if self.hanging:
            return [one for one in found if one != self.delete] + [self.wake] * self.is_idle
        return [*found, self.hang] if self.is_live else found

    def hang(self, data):
        if data.draw(st.booleans()):
            self.settle()
        self.process.stop()
        self.hanging = (self.process, self.wrote[self.now.place], self.now, self.now.sessions)
        self.process, self.now = None, None

    def wake(self, data):
        ends = data.draw(st.booleans())
        (process, _, run, session), self.hanging = self.hanging, None
        process.wake()
        if run.sessions == session:
            self.process, self.now = process, run
            return
        # Another machine took over: its rows are now a branch, as far as the machine has sent them.
        number = next(self.numbers)
        at = process.call("log", "metrics", "loss", number, 3)
        run.branches[session].append(Record("metrics", "loss", at, number))
        run.doubtful.add(number)
        if ends:
            process.call("close")
            process.end()
        else:
            process.kill()
        self.check(run)

    def remove(self, run):
        shutil.rmtree(self.store / run.place.rpartition("/")[2])


@pytest.fixture(scope="module")
def server():
    """Runs the sessions of all histories."""
    with ForkServer("tests.model.session", "destinations.run_directory.run_directory", "PIL.Image") as found:
        yield found


def test_every_reader_tells_the_history_of_runs_in_a_folder(server, tmp_path, monkeypatch):
    """Whatever sessions did, readers have exactly the records that belong to the run by its checkpoints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try_histories(Folder, server, times(6, 5000))


def test_every_reader_tells_the_history_of_runs_in_a_bucket(server, tmp_path, monkeypatch):
    """The same holds for runs that several machines write to a store, and that a reader reads from there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try_histories(Bucket, server, times(2, 300))


def try_histories(kind, server, count):
    """Runs random histories; each run of `make test` has the same."""
    run_state_machine_as_test(
        type(kind.__name__, (kind,), {"server": server}),
        settings=settings(
            max_examples=EXAMPLES or count,
            stateful_step_count=int(os.environ.get("MODEL_STEPS", "15")),
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.generate, *([] if "MODEL_QUICK" in os.environ else [Phase.shrink])],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
