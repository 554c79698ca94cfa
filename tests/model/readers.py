"""What each reader says of a run, as plain lists: of each record its name, its step where it has one, and the number it is known by."""

import contextlib
import csv
import io
import json
import threading

from PIL import Image

from destinations import cli
from destinations.run_directory import read_rows
from destinations.runs import MetricNotFoundError
from destinations.runs.export import export_metrics, export_rows

__all__ = ["Looker", "by_cli", "by_export", "by_read_rows", "by_run", "records_of"]

KINDS = ("texts", "images", "tables", "histograms", "traces", "files")


def by_read_rows(folder):
    """The values of `read_rows`, by metric, in their order."""
    found = {}
    for row in read_rows(folder):
        for name, value in row.metrics.items():
            found.setdefault(name, []).append((row.step, int(value)))
    return found


def by_run(run, writer=""):
    """The values of `Run.series`, by metric: of the trainer, or of all writers (None)."""
    found = {}
    for name in run.metric_names():
        # A metric that only other writers have, or only a branch.
        with contextlib.suppress(MetricNotFoundError):
            series = run.series(name, writer=writer)
            found[name] = list(zip(series.step.tolist(), map(int, series.value.tolist()), strict=True))
    return {name: values for name, values in found.items() if values}


def by_export(run, target):
    """The values of the two exports of rows, by metric."""
    export_metrics([run], target / "metrics.jsonl", overwrite=True)
    long = {}
    for line in (target / "metrics.jsonl").read_text().splitlines():
        one = json.loads(line)
        long.setdefault(one["metric"], []).append((one["step"], int(one["value"])))
    export_rows(run, target / "rows.csv", overwrite=True)
    wide = {}
    with (target / "rows.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if cell and name not in {"step", "epoch", "time", "writer"}:
                    wide.setdefault(name, []).append((int(row["step"]), int(float(cell))))
    return long, wide


def by_cli(root, name, metrics):
    """The output of `runs show --json`, and the values of `runs series --json`, by metric."""
    values = {}
    for metric in metrics:
        document = _command("series", name, metric, "--json", "--root", str(root))
        values[metric] = [(one["step"], int(one["value"])) for one in document["values"]]
    return _command("show", name, "--json", "--root", str(root)), values


def _command(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(["runs", *arguments])
    assert code == 0, out.getvalue()
    return json.loads(out.getvalue())


def records_of(run, kind):
    """The records of a kind in order, each read as far as its content.

    A record whose file never came is left out: its machine was lost before it sent the file.
    """
    match kind:
        case "texts":
            return [(one.name, one.step, int(one.text.split()[1])) for one in run.texts()]
        case "images":
            return [(one.name, one.step, _number_of(one.path)) for one in run.images() if one.path.exists()]
        case "tables":
            there = (one for one in run.tables() if one.path.exists())
            return [(one.name, one.step, int(one.path.read_text().split()[-1])) for one in there]
        case "histograms":
            return [(one.name, one.step, round(one.moments["mean"])) for one in run.histograms()]
        case "traces":
            return [(name, number) for one in run.traces() for name, number in one.traces.items()]
        case "files":
            return [(one.name, int(one.path.read_text())) for one in run.artifacts()]
    raise ValueError(kind)


def _number_of(path):
    with Image.open(path) as image:
        red, green, blue = image.convert("RGB").getpixel((0, 0))
    return red << 16 | green << 8 | blue


class _Turns(threading.Event):
    """Replaces the event that ends `Run.follow`: it waits for a turn instead of some time."""

    def __init__(self):
        super().__init__()
        self.asked, self.answered = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout=None):
        self.answered.release()
        self.asked.acquire()
        return self.is_set()


class Looker:
    """A reader that follows a run in a thread, and looks only on request.

    Attributes:
        rows: what it was given so far.
    """

    def __init__(self, run):
        self.rows = []
        self._error = None
        self._turns = _Turns()
        self._thread = threading.Thread(target=self._follow, args=(run,), daemon=True)
        self._thread.start()
        self._wait()

    def look(self):
        """Looks once; returns everything it was given so far, as (writer, metric, step, number)."""
        self._turns.asked.release()
        self._wait()
        return [
            (row.writer, name, row.step, int(value))
            for row in self.rows
            for name, value in row.metrics.items()
        ]

    def close(self):
        """Ends it."""
        self._turns.set()
        self._turns.asked.release()
        self._thread.join(60)

    def _follow(self, run):
        try:
            for row in run.follow(poll_seconds=1.0, stop=self._turns):
                self.rows.append(row)
        except Exception as error:  # noqa: BLE001  # the test gets it
            self._error = error
        self._turns.answered.release()

    def _wait(self):
        assert self._turns.answered.acquire(timeout=60)
        if self._error is not None:
            raise self._error
