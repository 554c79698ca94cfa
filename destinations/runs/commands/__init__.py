"""Arguments of the `destinations runs` commands; their implementations are imported when a command runs."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .screen import CommandContext

__all__ = ["EXIT_CODES", "add_commands"]

EXIT_CODES = """Exit codes: 0 success; 1 failure: unknown run or metric, a file that cannot be written, a
missing package, or a run that ended before the condition of `wait` held; uploads that are pending;
2 usage error: an invalid argument or filter, a missing root; 3 another process owns the spool, or
`import` could not read or write everything; 4 an upload failed permanently, or an object in the store
is missing or differs; 124 `wait` timed out; 130 Ctrl-C; 141 broken pipe.
"""

_SECONDS = "30, 30s, 5m, 1h30m, 7d or '2 weeks'"


def add_commands(subparsers: Any) -> None:
    """Adds the commands to the object that `ArgumentParser.add_subparsers` returned.

    The parsed namespace has `run`, a function of the namespace: it prints errors to stderr and returns the
    exit code.
    """
    commands = _Commands(subparsers)
    _add_finding(commands)
    _add_reading(commands)
    _add_export(commands)
    _add_editing(commands)
    _add_upkeep(commands)


_EXAMPLES = {
    "ls": (
        "--where 'summary.loss < 1' --sort summary.loss --limit 10",
        "--columns hparams.lr,summary.loss,age",
    ),
    "best": ("val/acc --max", "loss --min --tag sweep:7 --limit 3"),
    "diff": ("first second", "first second --json"),
    "show": ("digits", "digits --flight"),
    "time": ("digits", "digits --json"),
    "trace": ("digits -o trace.json", "digits -o trace.json --overwrite"),
    "checkpoints": (
        "digits",
        "get digits best --by loss/eval/total --mode min --to model.pt",
    ),
    "plot": ("loss", "loss 'val/*' first second -o plot.png"),
    "series": ("digits loss --where 'value >= 10'", "digits loss --limit 10"),
    "tail": ("digits", "digits --metric loss --lines 100 --no-follow"),
    "wait": ("'not alive' digits", "'summary.loss < 0.1' digits --timeout 2h"),
    "export": ("first second --metrics -o metrics.parquet", "digits --rows -o digits.csv"),
    "tag": ("digits +good -new", "digits"),
    "note": ("digits 'with the new loss'", "digits"),
    "rename": ("digits 'The first'", "digits ''"),
    "archive": ("digits", "first second"),
    "unarchive": ("digits", "first second"),
    "rm": ("digits", "first second --yes"),
    "gc": ("--older-than 7d", "--older-than 7d --delete"),
    "scan": ("", "--full"),
    "pack": ("digits", "first second --json"),
    "verify": ("", "digits --json"),
    "compact": ("runs dataset", "runs s3://bucket/dataset"),
    "sql": (
        "'select run_id, min(value) from metrics group by run_id' --dataset dataset",
        "'select count(*) from runs' --dataset s3://bucket/dataset --json",
    ),
    "import": ("lightning_logs --from tensorboard --root runs", "history.csv --column step=iteration"),
    "send": ("digits --to tensorboard:tb", "digits --to wandb:my-team/my-project --follow"),
}


class _Commands:
    """Builds the parser of each command with the options that all share."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers = subparsers

    def add(self, name: str, place: str, text: str, **options: Any) -> argparse.ArgumentParser:
        """Adds a command implemented by `place`, "module.function", with the options of all commands."""
        parser: argparse.ArgumentParser = self._subparsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            examples=_EXAMPLES[name],
            **options,
        )
        parser.add_argument(
            "--root",
            action="append",
            metavar="FOLDER",
            help="folder to search for runs; repeatable (default: $DESTINATIONS_ROOT, else ./runs)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=_Runner(place), takes_rest=False)
        return parser


class _Runner:
    """Imports a command and runs it; errors become messages and exit codes.

    Args:
        place: "module.function" in this package.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def __call__(self, options: argparse.Namespace, session: CommandContext | None = None) -> int:
        from .running import run_command

        module, _, name = self._place.partition(".")
        command = getattr(importlib.import_module(f".{module}", __name__), name)
        return run_command(command, options, session)


def _add_run(parser: argparse.ArgumentParser, **options: Any) -> None:
    parser.add_argument(
        "run_name",
        metavar="RUN",
        help="run id, id prefix, display name, path of a run folder, or s3://bucket/runs/digits",
        **options,
    )


def _add_branch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--branch",
        metavar="SESSION",
        help="show the run at the end of this session: its number or id, as listed by `show`",
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where", metavar="FILTER", help="filter, e.g. 'hparams.lr > 0.1 and summary.loss < 2'"
    )
    parser.add_argument("--view", metavar="NAME", help="the runs of a view saved on the page")
    parser.add_argument("--tag", metavar="TAG", help="only runs with this tag")
    parser.add_argument("--status", metavar="STATUS", help="only runs with this status")
    parser.add_argument("--archived", action="store_true", help="include archived runs")
    parser.add_argument("--limit", "-n", type=_count, metavar="N", help="show at most N runs")


def _add_finding(commands: _Commands) -> None:
    parser = commands.add("ls", "listing.ls", "list runs, newest first", aliases=["list"])
    parser.add_argument(
        "place", nargs="*", metavar="ROOT", help="folder of runs, or s3://bucket/runs; as --root"
    )
    _add_selection(parser)
    parser.add_argument(
        "--columns", "-c", metavar="NAMES", help="comma-separated columns: hparams.lr,summary.loss,status,age"
    )
    parser.add_argument(
        "--sort", metavar="COLUMN", help="sort by this column, e.g. summary.loss or created_at"
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--descending",
        dest="descending",
        action="store_true",
        default=None,
        help="largest first (default for times and metrics)",
    )
    direction.add_argument(
        "--ascending",
        dest="descending",
        action="store_false",
        help="smallest first (default for other columns)",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="TIME",
        help="refresh every TIME (default: 2s) until Ctrl-C",
    )
    parser = commands.add("best", "listing.best", "rank runs by the best value of a metric")
    parser.add_argument("metric", metavar="METRIC", help="metric name")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--min", dest="is_max", action="store_false", help="lower is better")
    direction.add_argument("--max", dest="is_max", action="store_true", help="higher is better")
    _add_selection(parser)
    parser = commands.add("diff", "show.diff", "show only the differences between runs", aliases=["compare"])
    _add_run(parser, nargs="+")


def _add_reading(commands: _Commands) -> None:
    parser = commands.add("show", "show.show", "show the details of a run")
    _add_run(parser)
    _add_branch(parser)
    parser.add_argument(
        "--ranks", action="store_true", help="metrics over ranks: min, median, max, which rank was NaN first"
    )
    parser.add_argument(
        "--flight", action="store_true", help="output of the flight recorders: which rank waits where"
    )
    parser = commands.add("time", "time.time", "show how the time of a run was spent, and its goodput")
    _add_run(parser)
    parser = commands.add("trace", "time.trace", "write the spans of a run as a trace for Perfetto")
    _add_run(parser)
    parser.add_argument(
        "--output", "-o", metavar="FILE", required=True, help=".json file, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--profiles", action="store_true", help="include the files of torch.profiler that log_traces kept"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser = commands.add(
        "checkpoints",
        "checkpoints.checkpoints",
        "list the checkpoints of a run, local and in stores, or copy one",
        usage="%(prog)s [options] RUN\n       %(prog)s [options] get RUN best|latest|NAME [--to FILE]",
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN",
        help="run id, id prefix, display name, path of a run folder, or URI of a folder of checkpoints",
    )
    parser.add_argument("--to", metavar="FILE", help="the copy (default: the name of the checkpoint)")
    parser.add_argument(
        "--by", metavar="METRIC", help="metric that decides which one is best (default: the run's own rule)"
    )
    parser.add_argument("--mode", choices=("max", "min"), help="whether higher or lower is better")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser = commands.add("plot", "plot.plot", "plot metrics of runs, in the terminal or to a file")
    parser.add_argument(
        "metrics", metavar="METRIC", nargs="+", help="metric name, or a pattern: 'loss/*'; runs may follow"
    )
    parser.add_argument(
        "--run",
        "-r",
        dest="run_name",
        action="append",
        metavar="RUN",
        help="only this run; repeatable (default: all or the selected runs)",
    )
    _add_selection(parser)
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help=".png, .svg or .pdf file; needs matplotlib (default: the terminal)",
    )
    parser.add_argument("--x", choices=("step", "time"), default="step", help="x axis (default: step)")
    parser.add_argument("--log", action="store_true", help="logarithmic y axis")
    parser = commands.add("series", "series.series", "print the values of a metric, or only matching ones")
    _add_run(parser)
    _add_branch(parser)
    parser.add_argument("metric", metavar="METRIC", help="metric name")
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        help="only matching values: 'value > 10 and step < 500', 'value == nan'",
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N values")
    parser.add_argument("--rank", type=_count, default=0, metavar="R", help="rank (default: 0)")
    parser = commands.add(
        "tail", "following.tail", "print the metric rows of a run as they are written, until it ends"
    )
    _add_run(parser)
    parser.add_argument(
        "--lines", "-n", type=_count, default=10, metavar="N", help="start with the last N rows (default: 10)"
    )
    parser.add_argument(
        "--metric", "-m", action="append", metavar="NAME", help="only this metric; repeatable"
    )
    parser.add_argument("--follow", action="store_true", help="print new rows until the run ends (default)")
    parser.add_argument("--no-follow", action="store_true", help="print the existing rows and exit")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="TIME", help="polling interval (default: 1s)"
    )
    parser = commands.add("wait", "following.wait", "wait until a condition on a run is true")
    parser.add_argument("condition", metavar="FILTER", help="filter, e.g. 'summary.loss < 0.1 or not alive'")
    _add_run(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="TIME",
        help=f"give up after this time ({_SECONDS}) with exit code 124",
    )
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="TIME", help="polling interval (default: 1s)"
    )


def _add_export(commands: _Commands) -> None:
    parser = commands.add(
        "export",
        "export.export",
        "export the table of runs, all metrics in long format, or the rows of one run",
    )
    _add_selection(parser)
    _add_run(parser, nargs="*")
    _add_branch(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--metrics", action="store_true", help="export all metrics: run_id, metric, step, time, value"
    )
    what.add_argument(
        "--rows", action="store_true", help="export the rows of one run: a column for each metric"
    )
    parser.add_argument("--rank", type=_count, default=0, metavar="R", help="rank, with --rows (default: 0)")
    parser.add_argument(
        "--output", "-o", metavar="FILE", help=".csv, .parquet or .jsonl file (default: CSV to stdout)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _add_editing(commands: _Commands) -> None:
    parser = commands.add(
        "tag",
        "editing.tag",
        "add or remove tags of a run",
        add_help=False,
        usage="%(prog)s RUN [+TAG | -TAG ...]",
    )
    # No short options: "-b" removes the tag b.
    parser.add_argument("--help", action="help", help="show this help message and exit")
    _add_run(parser)
    parser.add_argument("changes", nargs="*", metavar="+TAG|-TAG", help="add or remove a tag")
    parser.set_defaults(takes_rest=True)
    parser = commands.add("note", "editing.note", "show or replace the notes of a run")
    _add_run(parser)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="new notes; '' clears them")
    parser = commands.add("rename", "editing.rename", "set the display name of a run")
    _add_run(parser)
    parser.add_argument("text", metavar="NAME", help="display name; '' restores the name of the folder")
    for name, text in (
        ("archive", "hide runs from `ls`"),
        ("unarchive", "show archived runs in `ls` again"),
    ):
        parser = commands.add(name, f"editing.{name}", text)
        _add_run(parser, nargs="+")


def _add_upkeep(commands: _Commands) -> None:
    parser = commands.add("rm", "gc.rm", "delete runs with everything in their folders, or from a dataset")
    _add_run(parser, nargs="+")
    parser.add_argument("--yes", "-y", action="store_true", help="don't ask")
    parser.add_argument("--force", action="store_true", help="also delete runs that have forks beside them")
    parser = commands.add(
        "gc",
        "gc.gc",
        "list run folders that can be deleted: archived runs, and empty runs that did not complete",
    )
    parser.add_argument(
        "--older-than",
        type=_seconds,
        default=_seconds("30d"),
        metavar="TIME",
        help="only folders not modified for this long (default: 30d)",
    )
    parser.add_argument("--delete", action="store_true", help="delete them permanently")
    parser = commands.add("scan", "listing.scan", "update the index and report what changed")
    parser.add_argument("--full", action="store_true", help="rebuild the index from scratch")
    parser = commands.add(
        "pack",
        "export.pack",
        "convert closed parts of long runs from earlier versions to this version's Parquet",
    )
    _add_run(parser, nargs="+")
    parser = commands.add(
        "verify", "verify.verify", "read runs completely, and report what is damaged or missing"
    )
    _add_run(parser, nargs="*")
    parser = commands.add(
        "compact", "export.compact", "write finished runs to Delta Lake tables; needs deltalake"
    )
    parser.add_argument("source", metavar="ROOT", help="folder of runs")
    parser.add_argument("target", metavar="DATASET", help="folder, s3://bucket/prefix, gs://… or az://…")
    parser.add_argument("--optimize", action="store_true", help="join small files, sorted by metric and run")
    parser.add_argument(
        "--vacuum", type=float, metavar="DAYS", help="delete files that only versions older than this need"
    )
    parser.add_argument(
        "--remove-gone", action="store_true", help="remove runs from DATASET that ROOT no longer has"
    )
    parser.add_argument(
        "--include-deleted", action="store_true", help="add runs again that were deleted from DATASET"
    )
    parser.add_argument(
        "--single-writer",
        action="store_true",
        help="write to a server without conditional puts; no other compaction may run",
    )
    parser = commands.add("sql", "export.sql", "query a dataset written by `compact`; needs duckdb")
    parser.add_argument(
        "query", metavar="SQL", help="e.g. 'select run_id, min(value) from metrics group by run_id'"
    )
    parser.add_argument("--dataset", metavar="DATASET", help="dataset (default: the first root)")
    parser = commands.add(
        "send",
        "send.send",
        "send runs to a tracker or to another folder; if repeated, only new records",
        details=_targets,
    )
    _add_run(parser, nargs="*")
    _add_selection(parser)
    parser.add_argument("--all", action="store_true", help="all runs")
    parser.add_argument(
        "--to",
        required=True,
        metavar="TARGET",
        help="run:FOLDER, or NAME:PLACE of a tracker, see below",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        dest="tracker_options",
        metavar="NAME=VALUE",
        help="argument of the tracker's constructor, see below; VALUE is JSON or text; repeatable",
    )
    parser.add_argument("--follow", action="store_true", help="keep sending until the run ends")
    parser.add_argument(
        "--again", action="store_true", help="send everything again, and replace the earlier copy"
    )
    parser = commands.add(
        "import",
        "importing.import_",
        "write the runs of another logger as run folders; if repeated, only new and changed runs",
        details=_sources,
    )
    parser.add_argument("source", metavar="SOURCE", help="file, folder, or URI; see below")
    parser.add_argument(
        "--from", dest="from_source", metavar="NAME", help="source, if several are recognised"
    )
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        dest="columns",
        metavar="ROLE=NAME",
        help="column of a table that holds the step, time, epoch or run; repeatable",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="report what would be written, without writing"
    )


def _sources() -> str:
    from destinations.runs.imports import SOURCES

    return "".join(("sources:\n", *(f"  {one.name}: {one.place}\n" for one in SOURCES)))


def _targets() -> str:
    from destinations.runs.send.targets import help_text

    return help_text()


def _seconds(text: str) -> float:
    from uploads import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)
