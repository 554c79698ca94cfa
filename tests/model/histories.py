"""The histories that runs should have, as plain lists: they keep what was logged before a loaded checkpoint.

No step is compared, except where a loop names the batch it continues at. Records of every kind are alike.
"""

import attrs

__all__ = ["Checkpoint", "History", "Record"]


@attrs.frozen
class Record:
    """A logged record, identified by a unique number.

    Attributes:
        kind: as `session.Session.log` has it.
        name: of the metrics, joined by "+", or of the record.
        step: at which it was logged.
        number: of the record.
    """

    kind: str
    name: str
    step: int
    number: int


@attrs.frozen
class Checkpoint:
    """A checkpoint: the session's return value, and the records that belonged to the run then.

    Attributes:
        saved: what `session.Session.checkpoint` returned.
        session: the number of the session that saved it.
        records: of the run at that moment.
    """

    saved: dict
    session: int
    records: tuple


class History:
    """What one run should hold.

    Attributes:
        place: the folder or URI of the run.
        records: what belongs to it, in the order of logging.
        logged: all that was ever logged, by number.
        doubtful: numbers of records that may be missing, because a kill came before they were written.
        writers: the records of each named writer.
        checkpoints: all that were saved.
        sessions: how many there were.
        logged_by: the number of the session that logged a record, by the number of the record.
        names_batches: whether a session has continued by a batch.
        branches: what belonged to the run at the end of each session, by its number.
        unsent: the numbers of rows that the store may lack, if the machine is lost.
        is_completed: whether the last session has closed it.
    """

    def __init__(self, place):
        self.place = place
        self.records, self.logged, self.doubtful = [], {}, set()
        self.writers, self.checkpoints, self.logged_by = {}, [], {}
        self.sessions = 0
        self.names_batches = False
        self.unsent = set()
        self.branches = {}
        self.is_completed = False
        self._unflushed = []

    def begin(self, checkpoint=None, batch=None):
        """A session begins: after a checkpoint, at a batch, or at the end."""
        self.branches[self.sessions] = list(self.records)
        self.sessions += 1
        self.is_completed = False
        if checkpoint is not None:
            self.records = list(checkpoint.records)
        if batch is not None:
            # Nothing promises when exactly a loop that names a batch takes back later records.
            self.names_batches = True
            self.doubtful |= {one.number for one in self.records if one.step >= batch}

    def follow(self, checkpoint):
        """The session, which has not trained, follows a checkpoint: its records continue from there."""
        own = [one for one in self.records if self.logged_by[one.number] == self.sessions]
        self.records = [*checkpoint.records, *own]

    def log(self, record):
        """The session has logged a record."""
        self.records.append(record)
        self.logged[record.number] = record
        self.unsent.add(record.number)
        self.logged_by[record.number] = self.sessions
        if record.kind not in {"metrics", "hyperparameters"}:
            self._unflushed.append(record.number)

    def flush(self):
        """All logged records are written."""
        self._unflushed = []

    def complete(self):
        """The session ends like a program that has completed."""
        self.flush()
        self.unsent.clear()
        self.is_completed = True

    def kill(self):
        """The session is killed; rows and hyperparameters were safe once their calls had returned."""
        self.doubtful.update(self._unflushed)
        self._unflushed = []

    def checkpoint(self, saved):
        """The session saves a checkpoint."""
        self.checkpoints.append(Checkpoint(saved, self.sessions, tuple(self.records)))

    def log_as(self, writer, record):
        """A named writer has logged a record."""
        self.writers.setdefault(writer, []).append(record)

    @property
    def configs(self):
        """The numbers of all hyperparameters that were logged."""
        return {number for number, one in self.logged.items() if one.kind == "hyperparameters"}

    def of(self, kind, records=None):
        """The records of a kind as readers have them: name, step unless calls give none, and number.

        They come from `records`, or from the run.
        """
        found = [one for one in (self.records if records is None else records) if one.kind == kind]
        if kind in {"traces", "files", "hyperparameters"}:
            return [(one.name, one.number) for one in found]
        return [(one.name, one.step, one.number) for one in found]

    def metrics(self, writer="", records=None):
        """The values by metric, as (step, number), of the run, a writer, or `records`."""
        found = {}
        own = self.records if records is None else records
        for one in self.writers.get(writer, []) if writer else own:
            for name in one.name.split("+") if one.kind == "metrics" else ():
                found.setdefault(name, []).append((one.step, one.number))
        return found
