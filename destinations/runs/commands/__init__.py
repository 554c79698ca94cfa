"""The commands of `destinations runs`: their arguments; what they do is in the other modules and imported when one is run."""

import argparse
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .screen import Session

__all__ = ["EXIT_CODES", "add_commands"]

EXIT_CODES = (
    "Exit codes: 0 done; 1 it could not be done: no such run or metric, a file that cannot be written, a package that is missing, "
    "or a run that ended before the condition of `wait` held; 2 wrong usage: an argument, a filter that does not parse, a root that "
    "is missing; 124 the time of `wait` is over; 130 Ctrl-C; 141 nobody reads the output any more."
)

_SECONDS = "30, 30s, 5m, 12h, 7d or 2w"


def add_commands(subparsers: Any) -> None:
    """Adds the commands to what `ArgumentParser.add_subparsers` returned.

    The parsed namespace has `run`, to be called with the namespace; it prints errors to stderr and returns the exit code.
    """
    commands = _Commands(subparsers)
    _add_finding(commands)
    _add_reading(commands)
    _add_editing(commands)
    _add_upkeep(commands)


class _Commands:
    """Makes one parser after the other."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers = subparsers

    def add(self, name: str, place: str, text: str, **options: Any) -> argparse.ArgumentParser:
        """Adds a command, done by the function `place`, "module.function", and gives it the options that all have."""
        parser: argparse.ArgumentParser = self._subparsers.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EXIT_CODES, **options
        )
        parser.add_argument(
            "--root",
            action="append",
            metavar="FOLDER",
            help="where runs are; may be given several times (DESTINATIONS_ROOT, else ./runs)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=_Runner(place), takes_rest=False)
        return parser


class _Runner:
    """Runs a command: imports it, opens what it needs, turns errors into messages and exit codes.

    Args:
        place: "module.function" below this package.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def __call__(self, options: argparse.Namespace, session: "Session | None" = None) -> int:
        from .running import run_command

        module, _, name = self._place.partition(".")
        command = getattr(importlib.import_module(f".{module}", __name__), name)
        return run_command(command, options, session)


def _add_run(parser: argparse.ArgumentParser, **options: Any) -> None:
    parser.add_argument(
        "run_name",
        metavar="RUN",
        help="an id, the beginning of one, a display name, or the path of a folder",
        **options,
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--where", metavar="FILTER", help="such as 'hparams.lr > 0.1 and summary.loss < 2'")
    parser.add_argument("--tag", metavar="TAG", help="runs with this tag")
    parser.add_argument("--status", metavar="STATUS", help="runs of this status")
    parser.add_argument("--archived", action="store_true", help="archived runs too")
    parser.add_argument("--limit", "-n", type=_count, metavar="N", help="so many at most")


def _add_finding(commands: _Commands) -> None:
    parser = commands.add("ls", "listing.ls", "list runs, the newest first")
    _add_selection(parser)
    parser.add_argument(
        "--columns", "-c", metavar="NAMES", help="columns, with commas: hparams.lr,summary.loss,status,age"
    )
    parser.add_argument("--sort", metavar="COLUMN", help="such as summary.loss or created_at")
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--descending",
        dest="descending",
        action="store_true",
        default=None,
        help="the greatest first (times and metrics)",
    )
    direction.add_argument(
        "--ascending", dest="descending", action="store_false", help="the least first (all else)"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="TIME",
        help="show it again and again, every two seconds or as given, until Ctrl-C",
    )
    parser = commands.add("best", "listing.best", "rank runs by the best value that a metric had")
    parser.add_argument("metric", metavar="METRIC", help="the metric")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--min", dest="is_max", action="store_false", help="the least is the best")
    direction.add_argument("--max", dest="is_max", action="store_true", help="the greatest is the best")
    _add_selection(parser)
    parser = commands.add("diff", "diff.diff", "show what differs between runs, and nothing else")
    _add_run(parser, nargs="+")


def _add_reading(commands: _Commands) -> None:
    parser = commands.add("show", "show.show", "show what is known of a run")
    _add_run(parser)
    parser = commands.add("plot", "plot.plot", "draw a metric of runs into a file; needs the extra `plot`")
    parser.add_argument("metric", metavar="METRIC", help="the metric")
    _add_run(parser, nargs="+")
    parser.add_argument(
        "--output", "-o", default="plot.png", metavar="FILE", help="a .png, .svg or .pdf file (plot.png)"
    )
    parser.add_argument(
        "--x", choices=("step", "time"), default="step", help="what the horizontal axis shows (step)"
    )
    parser.add_argument("--log", action="store_true", help="a logarithmic vertical axis")
    parser = commands.add("tail", "following.tail", "print the rows of a run as they come, until it ends")
    _add_run(parser)
    parser.add_argument(
        "--lines", "-n", type=_count, default=10, metavar="N", help="of those there are, the last N (10)"
    )
    parser.add_argument(
        "--metric", "-m", action="append", metavar="NAME", help="only this metric; may be repeated"
    )
    parser.add_argument("--no-follow", action="store_true", help="only what is there now")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="TIME", help="look so often (1s)")
    parser = commands.add("wait", "following.wait", "wait until a condition holds for a run")
    parser.add_argument("condition", metavar="FILTER", help="such as 'summary.loss < 0.1 or not alive'")
    _add_run(parser)
    parser.add_argument(
        "--timeout", type=_seconds, metavar="TIME", help=f"give up after {_SECONDS}; exit code 124"
    )
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="TIME", help="look so often (1s)")
    parser = commands.add("export", "export.export", "write the table of runs, or all metrics in long form")
    _add_selection(parser)
    _add_run(parser, nargs="*")
    parser.add_argument(
        "--metrics", action="store_true", help="every metric: run_id, metric, step, time, value"
    )
    parser.add_argument(
        "--output", "-o", metavar="FILE", help="a .csv, .parquet or .jsonl file; CSV on the screen without it"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file where it exists")


def _add_editing(commands: _Commands) -> None:
    parser = commands.add(
        "tag",
        "editing.tag",
        "add tags to a run, and take tags away",
        add_help=False,
        usage="%(prog)s RUN [+TAG | -TAG ...]",
    )
    # No short options: "-b" takes the tag b away.
    parser.add_argument("--help", action="help", help="show this help message and exit")
    _add_run(parser)
    parser.add_argument("changes", nargs="*", metavar="+TAG|-TAG", help="add a tag, or take one away")
    parser.set_defaults(takes_rest=True)
    parser = commands.add("note", "editing.note", "show or replace the notes of a run")
    _add_run(parser)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the new notes; '' for none")
    parser = commands.add("rename", "editing.rename", "give a run a name to display")
    _add_run(parser)
    parser.add_argument("text", metavar="NAME", help="the name; '' for that of its folder")
    for name, text in (
        ("archive", "put runs away: they are listed no more"),
        ("unarchive", "list runs again"),
    ):
        parser = commands.add(name, f"editing.{name}", text)
        _add_run(parser, nargs="+")


def _add_upkeep(commands: _Commands) -> None:
    parser = commands.add(
        "gc",
        "gc.gc",
        "say which folders could go: archived runs, and runs that ended without success and hold nothing",
    )
    parser.add_argument(
        "--older-than",
        type=_seconds,
        default=_seconds("30d"),
        metavar="TIME",
        help="untouched for so long (30d)",
    )
    parser.add_argument("--delete", action="store_true", help="delete them, for good")
    parser = commands.add("scan", "upkeep.scan", "look at what changed below the roots")
    parser.add_argument("--full", action="store_true", help="build the index anew")
    parser = commands.add(
        "compact", "upkeep.compact", "turn finished runs into a Parquet dataset; needs the extra `query`"
    )
    parser.add_argument("source", metavar="ROOT", help="a folder of runs")
    parser.add_argument("target", metavar="DEST", help="a folder, or s3://bucket/prefix")
    parser = commands.add(
        "sql", "upkeep.sql", "query a dataset that `compact` wrote; needs the extra `query`"
    )
    parser.add_argument(
        "query", metavar="SQL", help="such as 'select run_id, min(value) from metrics group by run_id'"
    )
    parser.add_argument("--dataset", metavar="DEST", help="the dataset (the root)")
    parser = commands.add(
        "send", "send.send", "send a run to a tracker, or into a folder; again, and only what is new goes"
    )
    _add_run(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="TARGET",
        help="tensorboard:FOLDER, wandb:PROJECT, mlflow:URI, trackio:PROJECT or run:FOLDER",
    )
    parser.add_argument("--follow", action="store_true", help="go on sending until the run ends")
    parser.add_argument(
        "--again", action="store_true", help="send everything anew, in the place of what was sent"
    )
    parser.add_argument(
        "--abandoned", action="store_true", help="send rows, too, that training left when it went back"
    )


def _seconds(text: str) -> float:
    from .text import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)
