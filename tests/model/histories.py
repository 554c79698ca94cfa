"""The histories that runs should have, as plain lists: what was logged before a loaded checkpoint belongs, what came after does not.

No step is compared, except where a loop names the batch that it continues at. Records of every kind are alike.
"""

import attrs

__all__ = ["Checkpoint", "History", "Record"]


@attrs.frozen
class Record:
    """Something that was logged, known by a number that is given once.

    Attributes:
        kind: as `session.Session.log` has it.
        name: of the metrics, joined by "+", or of the record.
        step: that it was logged at.
        number: of the record.
    """

    kind: str
    name: str
    step: int
    number: int


@attrs.frozen
class Checkpoint:
    """A checkpoint: what the session returned, and the records that belonged to the run then.

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
        doubtful: numbers of records that may be there or not: a kill took them before they were written.
        writers: the records of each named writer.
        checkpoints: all that were saved.
        sessions: how many there were.
        configs: the session that logged hyperparameters, by the number of the record.
        names_batches: whether a session has continued by a batch.
        unsent: the numbers of rows that the store may lack, if the machine is lost.
    """

    def __init__(self, place):
        self.place = place
        self.records, self.logged, self.doubtful = [], {}, set()
        self.writers, self.checkpoints, self.configs = {}, [], {}
        self.sessions = 0
        self.names_batches = False
        self.unsent = set()
        self._unflushed = []

    def begin(self, checkpoint=None, batch=None):
        """A session begins: after a checkpoint, at a batch, or at the end."""
        self.sessions += 1
        if checkpoint is not None:
            self.records = list(checkpoint.records)
        if batch is not None:
            # When exactly a loop that names a batch takes back what is later is not promised.
            self.names_batches = True
            self.doubtful |= {one.number for one in self.records if one.step >= batch}

    def log(self, record):
        """The session has logged a record."""
        self.records.append(record)
        self.logged[record.number] = record
        self.unsent.add(record.number)
        if record.kind == "hyperparameters":
            self.configs[record.number] = self.sessions
        elif record.kind != "metrics":
            self._unflushed.append(record.number)

    def flush(self):
        """All that was logged is written."""
        self._unflushed = []

    def kill(self):
        """The session is killed; rows and hyperparameters were safe when the call had returned."""
        self.doubtful.update(self._unflushed)
        self._unflushed = []

    def checkpoint(self, saved):
        """The session saves a checkpoint."""
        self.checkpoints.append(Checkpoint(saved, self.sessions, tuple(self.records)))

    def log_as(self, writer, record):
        """A named writer has logged a record."""
        self.writers.setdefault(writer, []).append(record)

    def of(self, kind):
        """The records of a kind as readers have them: name, step unless it is given by no call, and number."""
        found = [one for one in self.records if one.kind == kind]
        if kind in {"traces", "files", "hyperparameters"}:
            return [(one.name, one.number) for one in found]
        return [(one.name, one.step, one.number) for one in found]

    def metrics(self, writer=""):
        """The values by metric: (step, number)."""
        found = {}
        for one in self.writers.get(writer, []) if writer else self.records:
            for name in one.name.split("+") if one.kind == "metrics" else ():
                found.setdefault(name, []).append((one.step, one.number))
        return found
