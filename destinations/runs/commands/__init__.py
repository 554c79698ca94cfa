"""Arguments of the `destinations runs` commands; their implementations are imported when a command runs."""

from __future__ import annotations

import argparse
import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from destinations.commands.parser import Parser

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
    "series": ("digits loss --limit 10", "digits loss --json"),
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

    def add(self, name: str, place: str, text: str, **options: Any) -> Parser:
        """Adds a command implemented by `place`, "module.function", with the options of all commands."""
        about = f"{text[0].upper()}{text[1:]}."
        examples = _EXAMPLES[name]
        parser: Parser = self._subparsers.add_parser(
            name, help=text, description=about, examples=examples, **options
        )
        roots = "folder to search for runs; repeatable (default: $DESTINATIONS_ROOT, else ./runs)"
        parser.take("--root", "FOLDER", roots, action="append")
        parser.take("--json", None, "print JSON")
        parser.set_defaults(run=functools.partial(_run, place), takes_rest=False)
        return parser


def _run(place: str, options: argparse.Namespace, session: CommandContext | None = None) -> int:
    """Imports a command, "module.function", and runs it; errors become messages and exit codes."""
    from .running import run_command

    module, _, name = place.partition(".")
    command = getattr(importlib.import_module(f".{module}", __name__), name)
    return run_command(command, options, session)


def _take_run(parser: Parser, nargs: str | None = None) -> None:
    text = "run id, id prefix, display name, path of a run folder, or s3://bucket/runs/digits"
    parser.take("run_name", "RUN", text, nargs=nargs)


def _take_branch(parser: Parser) -> None:
    text = "show the run at the end of this session: its number or id, as listed by `show`"
    parser.take("--branch", "SESSION", text)


def _take_selection(parser: Parser) -> None:
    parser.take("--where", "FILTER", "filter, e.g. 'hparams.lr > 0.1 and summary.loss < 2'")
    parser.take("--view", "NAME", "the runs of a view saved on the page")
    parser.take("--tag", "TAG", "only runs with this tag")
    parser.take("--status", "STATUS", "only runs with this status")
    parser.take("--archived", None, "include archived runs")
    parser.take("--limit -n", "N", "show at most N runs", type=_count)


def _take_output(parser: Parser, text: str, **more: Any) -> None:
    parser.take("--output -o", "FILE", text, **more)


def _take_overwrite(parser: Parser) -> None:
    parser.take("--overwrite", None, "replace an existing file")


def _take_interval(parser: Parser) -> None:
    parser.take("--interval", "TIME", "polling interval (default: 1s)", type=_seconds, default=1.0)


def _add_finding(commands: _Commands) -> None:
    parser = commands.add("ls", "listing.ls", "list runs, newest first", aliases=["list"])
    parser.take("place", "ROOT", "folder of runs, or s3://bucket/runs; as --root", nargs="*")
    _take_selection(parser)
    parser.take("--columns -c", "NAMES", "comma-separated columns: hparams.lr,summary.loss,status,age")
    parser.take("--sort", "COLUMN", "sort by this column, e.g. summary.loss or created_at")
    direction = parser.add_mutually_exclusive_group()
    text = "largest first (default for times and metrics)"
    parser.take("--descending", None, text, group=direction, default=None)
    text = "smallest first (default for other columns)"
    parser.take("--ascending", None, text, group=direction, action="store_false", dest="descending")
    text = "refresh every TIME (default: 2s) until Ctrl-C"
    parser.take("--watch", "TIME", text, nargs="?", type=_seconds, const=2.0)
    parser = commands.add("best", "listing.best", "rank runs by the best value of a metric")
    parser.take("metric", "METRIC", "metric name")
    direction = parser.add_mutually_exclusive_group(required=True)
    parser.take("--min", None, "lower is better", group=direction, action="store_false", dest="is_max")
    parser.take("--max", None, "higher is better", group=direction, dest="is_max")
    _take_selection(parser)
    parser = commands.add("diff", "show.diff", "show only the differences between runs", aliases=["compare"])
    _take_run(parser, "+")


def _add_reading(commands: _Commands) -> None:
    parser = commands.add("show", "show.show", "show the details of a run")
    _take_run(parser)
    _take_branch(parser)
    parser.take("--ranks", None, "metrics over ranks: min, median, max, which rank was NaN first")
    parser.take("--flight", None, "output of the flight recorders: which rank waits where")
    parser = commands.add("time", "time.time", "show how the time of a run was spent, and its goodput")
    _take_run(parser)
    parser = commands.add("trace", "time.trace", "write the spans of a run as a trace for Perfetto")
    _take_run(parser)
    _take_output(parser, ".json file, for ui.perfetto.dev", required=True)
    parser.take("--profiles", None, "include the files of torch.profiler that log_traces kept")
    _take_overwrite(parser)
    _add_checkpoints(commands)
    parser = commands.add("plot", "plot.plot", "plot metrics of runs, in the terminal or to a file")
    parser.take("metrics", "METRIC", "metric name, or a pattern: 'loss/*'; runs may follow", nargs="+")
    text = "only this run; repeatable (default: all or the selected runs)"
    parser.take("--run -r", "RUN", text, action="append", dest="run_name")
    _take_selection(parser)
    _take_output(parser, ".png, .svg or .pdf file; needs matplotlib (default: the terminal)")
    parser.take("--x", None, "x axis (default: step)", choices=("step", "time"), default="step")
    parser.take("--log", None, "logarithmic y axis")
    parser = commands.add("series", "series.series", "print the values of a metric")
    _take_run(parser)
    _take_branch(parser)
    parser.take("metric", "METRIC", "metric name")
    parser.take("--limit", "N", "only the first N values", type=_count)
    parser.take("--rank", "R", "rank (default: 0)", type=_count, default=0)
    text = "print the metric rows of a run as they are written, until it ends"
    parser = commands.add("tail", "following.tail", text)
    _take_run(parser)
    parser.take("--lines -n", "N", "start with the last N rows (default: 10)", type=_count, default=10)
    parser.take("--metric -m", "NAME", "only this metric; repeatable", action="append")
    parser.take("--follow", None, "print new rows until the run ends (default)")
    parser.take("--no-follow", None, "print the existing rows and exit")
    _take_interval(parser)
    parser = commands.add("wait", "following.wait", "wait until a condition on a run is true")
    parser.take("condition", "FILTER", "filter, e.g. 'summary.loss < 0.1 or not alive'")
    _take_run(parser)
    parser.take(
        "--timeout", "TIME", f"give up after this time ({_SECONDS}) with exit code 124", type=_seconds
    )
    _take_interval(parser)


def _add_checkpoints(commands: _Commands) -> None:
    parser = commands.add(
        "checkpoints",
        "checkpoints.checkpoints",
        "list the checkpoints of a run, local and in stores, or copy one",
        usage="%(prog)s [options] RUN\n       %(prog)s [options] get RUN best|latest|NAME [--to FILE]",
    )
    text = "run id, id prefix, display name, path of a run folder, or URI of a folder of checkpoints"
    parser.take("words", "RUN", text, nargs="+")
    parser.take("--to", "FILE", "the copy (default: the name of the checkpoint)")
    parser.take("--by", "METRIC", "metric that decides which one is best (default: the run's own rule)")
    parser.take("--mode", None, "whether higher or lower is better", choices=("max", "min"))
    _take_overwrite(parser)


def _add_export(commands: _Commands) -> None:
    text = "export the table of runs, all metrics in long format, or the rows of one run"
    parser = commands.add("export", "export.export", text)
    _take_selection(parser)
    _take_run(parser, "*")
    _take_branch(parser)
    what = parser.add_mutually_exclusive_group()
    parser.take("--metrics", None, "export all metrics: run_id, metric, step, time, value", group=what)
    parser.take("--rows", None, "export the rows of one run: a column for each metric", group=what)
    parser.take("--rank", "R", "rank, with --rows (default: 0)", type=_count, default=0)
    _take_output(parser, ".csv, .parquet or .jsonl file (default: CSV to stdout)")
    _take_overwrite(parser)


def _add_editing(commands: _Commands) -> None:
    usage, text = "%(prog)s RUN [+TAG | -TAG ...]", "add or remove tags of a run"
    parser = commands.add("tag", "editing.tag", text, add_help=False, usage=usage)
    # No short options: "-b" removes the tag b.
    parser.add_argument("--help", action="help", help="show this help message and exit")
    _take_run(parser)
    parser.take("changes", "+TAG|-TAG", "add or remove a tag", nargs="*")
    parser.set_defaults(takes_rest=True)
    parser = commands.add("note", "editing.note", "show or replace the notes of a run")
    _take_run(parser)
    parser.take("text", "TEXT", "new notes; '' clears them", nargs="?")
    parser = commands.add("rename", "editing.rename", "set the display name of a run")
    _take_run(parser)
    parser.take("text", "NAME", "display name; '' restores the name of the folder")
    _take_run(commands.add("archive", "editing.archive", "hide runs from `ls`"), "+")
    _take_run(commands.add("unarchive", "editing.unarchive", "show archived runs in `ls` again"), "+")


def _add_upkeep(commands: _Commands) -> None:
    parser = commands.add("rm", "gc.rm", "delete runs with everything in their folders, or from a dataset")
    _take_run(parser, "+")
    parser.take("--yes -y", None, "don't ask")
    parser.take("--force", None, "also delete runs that have forks beside them")
    text = "list run folders that can be deleted: archived runs, and empty runs that did not complete"
    parser = commands.add("gc", "gc.gc", text)
    text = "only folders not modified for this long (default: 30d)"
    parser.take("--older-than", "TIME", text, type=_seconds, default=_seconds("30d"))
    parser.take("--delete", None, "delete them permanently")
    parser = commands.add("scan", "listing.scan", "update the index and report what changed")
    parser.take("--full", None, "rebuild the index from scratch")
    text = "convert closed parts of long runs from earlier versions to this version's Parquet"
    _take_run(commands.add("pack", "export.pack", text), "+")
    text = "read runs completely, and report what is damaged or missing"
    _take_run(commands.add("verify", "verify.verify", text), "*")
    text = "write finished runs to Delta Lake tables; needs deltalake"
    parser = commands.add("compact", "export.compact", text)
    parser.take("source", "ROOT", "folder of runs")
    parser.take("target", "DATASET", "folder, s3://bucket/prefix, gs://… or az://…")
    parser.take("--optimize", None, "join small files, sorted by metric and run")
    parser.take("--vacuum", "DAYS", "delete files that only versions older than this need", type=float)
    parser.take("--remove-gone", None, "remove runs from DATASET that ROOT no longer has")
    parser.take("--include-deleted", None, "add runs again that were deleted from DATASET")
    text = "write to a server without conditional puts; no other compaction may run"
    parser.take("--single-writer", None, text)
    parser = commands.add("sql", "export.sql", "query a dataset written by `compact`; needs duckdb")
    parser.take("query", "SQL", "e.g. 'select run_id, min(value) from metrics group by run_id'")
    parser.take("--dataset", "DATASET", "dataset (default: the first root)")
    text = "send runs to a tracker or to another folder; if repeated, only new records"
    parser = commands.add("send", "send.send", text, details=_targets)
    _take_run(parser, "*")
    _take_selection(parser)
    parser.take("--all", None, "all runs")
    parser.take("--to", "TARGET", "run:FOLDER, or NAME:PLACE of a tracker, see below", required=True)
    text = "argument of the tracker's constructor, see below; VALUE is JSON or text; repeatable"
    parser.take("--option", "NAME=VALUE", text, action="append", default=[], dest="tracker_options")
    parser.take("--follow", None, "keep sending until the run ends")
    parser.take("--again", None, "send everything again, and replace the earlier copy")
    text = "write the runs of another logger as run folders; if repeated, only new and changed runs"
    parser = commands.add("import", "importing.import_", text, details=_sources)
    parser.take("source", "SOURCE", "file, folder, or URI; see below")
    parser.take("--from", "NAME", "source, if several are recognised", dest="from_source")
    text = "column of a table that holds the step, time, epoch or run; repeatable"
    parser.take("--column", "ROLE=NAME", text, action="append", default=[], dest="columns")
    parser.take("--dry-run", None, "report what would be written, without writing")


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
