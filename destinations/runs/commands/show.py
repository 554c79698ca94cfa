"""`show`: all details of a run on one page. `diff`: the differences between runs."""

import argparse
import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from destinations.history.fork import Parent
from destinations.runs import MetricNotFoundError, RecordedRun
from destinations.runs.content.flight import FLIGHT_FOLDER, describe_flights
from destinations.runs.order import MISSING
from destinations.runs.record import status_of
from destinations.runs.runs import differing
from destinations.runs.streams import TRAINER
from destinations.text.formatting import cut, pad

from .fields import as_json, cell_of, local_time, status_style, texts_apart
from .running import EXIT_FAILED, EXIT_OK, UsageError, find_runs
from .screen import (
    NOTHING,
    Cell,
    Column,
    CommandContext,
    Screen,
    age_text,
    bytes_text,
    numbers,
    sparkline,
    value_text,
)
from .time import goodput_text

__all__ = ["diff", "differing_fields", "show"]

_SPARKS = 24
_MAX_NAMES = 100
_MAX_FRAMES = 8
_LAST_STEPS = 5
_MAX_SESSIONS = 20
# These fields differ between any two runs and are not interesting.
_VOLATILE = frozenset({"pid", "ppid", "session", "start", "started_at", "time", "run_dir", "format_version"})


def show(options: argparse.Namespace, session: CommandContext) -> int:
    """Shows a run."""
    (run,) = find_runs([options.run_name], options, session)
    if options.flight or options.ranks:
        (_show_flights if options.flight else _show_ranks)(run, options, session)
        return EXIT_OK
    if options.json:
        session.screen.json(_as_json(run, session.clock()))
        return EXIT_OK
    code = _show_head(run, session)
    hparams = {name: value_text(value) for name, value in run.hparams.items()}
    sections: dict[str, Callable[[], dict[str, str]]] = {
        "hyperparameters": lambda: hparams,
        "sessions": lambda: _session_texts(run),
        "writers": lambda: _writer_texts(run, session.clock()),
        "metrics": lambda: _show_metrics(run, session.screen),
        "records": lambda: _record_texts(run),
        "environment": lambda: _environment_texts(run.environment),
        "logging overhead": lambda: _receipt_texts(run.receipt),
    }
    for title, texts in sections.items():
        try:
            _show_pairs(title, texts(), session.screen)
        except BrokenPipeError:
            raise
        except OSError as error:
            session.note(f"{title} cannot be read: {error}")
            code = EXIT_FAILED
    return code


def _as_json(run: RecordedRun, now: float) -> dict[str, Any]:
    return {
        **as_json(run.record, now),
        "hyperparameters": run.hyperparameters,
        "metrics": {name: attrs.asdict(one) for name, one in run.summary.items()},
        "records": _counts(run),
        "artifacts": [{"name": one.name, "size": one.size, "path": str(one.path)} for one in run.artifacts()],
        "environment": run.environment,
        "sessions": run.sessions,
        "branches": [one.session for one in run.branches()],
        "parent": None if run.parent is None else _parent(run.parent),
        "receipt": run.receipt,
        **({"writers": [attrs.asdict(one) for one in _states(run, now)]} if run.writers else {}),
    }


def _show_head(run: RecordedRun, session: CommandContext) -> int:
    record, screen, now = run.record, session.screen, session.clock()
    status = status_of(record, now)
    parts = [screen.styled(record.name, "bold")]
    if record.run_id != record.name:
        parts.append(record.run_id)
    screen.line("  ".join([*parts, screen.styled(status, status_style(status))]))
    screen.line(run.place)
    since = None if record.created_at is None else now - record.created_at
    times = "" if since is None else f"started {age_text(since)} ago, "
    if since is not None and run.alive:
        times += f"running; last heartbeat {age_text(_since_heartbeat(run, now))} ago"
    elif since is not None:
        times += f"took {cell_of(record, 'duration', now).text}"
    sessions: list[dict[str, Any]] = []
    spent, code = None, EXIT_OK
    problems = [record.problem] if record.problem else []
    try:
        sessions, spent = run.sessions, run.time_report()
    except OSError as error:
        session.note(f"sessions cannot be read: {error}")
        code = EXIT_FAILED
    # The section of the metrics reports runs that can't be read at all.
    with contextlib.suppress(OSError):
        problems = run.problems()
    last = sessions[-1] if sessions else {}
    for text in (
        times + (f", in {len(sessions)} sessions" if len(sessions) > 1 else ""),
        "" if spent is None else goodput_text(spent),
        "" if spent is None else value_text(spent.slow_steps_text or spent.slow_text),
        f"tags: {', '.join(record.tags)}" if record.tags else "",
        f"notes: {value_text(record.notes)}" if record.notes else "",
        "" if run.parent is None else f"forked from {value_text(str(run.parent))}",
        "archived" if record.archived else "",
        f"checkpoint: {record.checkpoint_path}" if record.checkpoint_path else "",
        *(f"problem: {problem}" for problem in problems),
        f"ended by {value_text(last['exception'])}" if last.get("exception") else "",
        f"stopped: {value_text(last['stop_reason'])}" if last.get("stop_reason") else "",
    ):
        if text:
            screen.line(text if screen.width is None else cut(text, screen.width))
    return code


def _since_heartbeat(run: RecordedRun, now: float) -> float | None:
    return None if run.record.heartbeat_at is None else now - run.record.heartbeat_at


def _show_pairs(title: str, pairs: dict[str, str], screen: Screen) -> None:
    if not pairs:
        return
    screen.line()
    screen.line(screen.styled(title, "bold"))
    width = min(max(len(name) for name in pairs), 40)
    for name, text in pairs.items():
        line = f"  {pad(name, width)}  {text}"
        screen.line(line if screen.width is None else cut(line, screen.width))


def _show_metrics(run: RecordedRun, screen: Screen) -> dict[str, str]:
    summary = run.summary
    if not summary:
        return {}
    screen.line()
    titles = numbers("last", "min", "at step", "max", "at step", "values")
    rows = [
        (
            *(name, one.last, one.min, one.min_step, one.max, one.max_step, one.count),
            Cell(_trend(run, name), "cyan"),
        )
        for name, one in summary.items()
    ]
    screen.table([Column("metric", is_whole=True), *titles, "trend"], rows)
    return {}


def _trend(run: RecordedRun, name: str) -> str:
    try:
        return sparkline(run.series(name).value.tolist(), _SPARKS)
    except MetricNotFoundError:
        # The summary of a damaged run may have metrics that its rows lack.
        return NOTHING


def _states(run: RecordedRun, now: float) -> list[Any]:
    if not run.writers:
        return []
    # It imports numpy.
    from destinations.runs.content.writers import writer_states

    return writer_states(run, now)


def _writer_texts(run: RecordedRun, now: float) -> dict[str, str]:
    """Returns a line for each named writer: status, rows, last heartbeat."""
    texts = {}
    for one in _states(run, now):
        rows = "rows cannot be read" if one.rows is None else f"{one.rows} row{'s' * (one.rows != 1)}"
        seen = "" if one.seen_at is None else f", last sign of life {age_text(now - one.seen_at)} ago"
        texts[one.name] = f"{one.status}, {rows}{seen}"
    return texts


def _session_texts(run: RecordedRun) -> dict[str, str]:
    """Returns a line for each session: how it ended, whether it left a branch, and which settings differ."""
    from destinations.run_directory.documents import (
        flat_hyperparameters,
        hyperparameter_files,
        session_hyperparameters,
    )

    lines, branches, files = run.sessions, {one.session for one in run.branches()}, None
    texts = {}
    for line in lines[-_MAX_SESSIONS:] if len(lines) > 1 else ():
        files = hyperparameter_files(run.path) if files is None else files
        own: dict[str, Any] = {}
        # An earlier version kept none of them by session.
        with contextlib.suppress(OSError, ValueError):
            own = flat_hyperparameters(session_hyperparameters(run.path, line, files=files))
        others = {name: value for name, value in own.items() if run.hparams.get(name, MISSING) != value}
        named = ", ".join(f"{name}={value_text(value)}" for name, value in others.items())
        session = str(line.get("session"))
        is_left = ", left a branch" if session in branches else ""
        texts[f"{line.get('number')}  {value_text(session)}"] = (
            f"{value_text(str(line.get('status')))}{is_left}{f'; {named}' if named else ''}"
        )
    return texts


def _parent(parent: Parent) -> dict[str, Any]:
    return {
        "path": str(parent.path),
        "run_id": parent.run_id,
        "session": parent.follows.session,
        "step": parent.follows.step,
        "problem": parent.problem or None,
    }


def _counts(run: RecordedRun) -> dict[str, int]:
    return {kind: one.count for kind, one in run.record_counts().items()}


def _record_texts(run: RecordedRun) -> dict[str, str]:
    texts = {}
    for kind, found in run.record_counts().items():
        names = itertools.islice(found.names.items(), _MAX_NAMES)
        named = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in names if name)
        if len(found.names) > _MAX_NAMES:
            named += ", …"
        about = f", {bytes_text(found.size)}" if found.size else ""
        texts[kind.replace("_", " ")] = f"{found.count}{about}{f': {value_text(named)}' if named else ''}"
    return texts


def _environment_texts(environment: dict[str, Any]) -> dict[str, str]:
    """Returns the short entries; package lists are left to `--json` and `diff`."""
    texts = {}
    for name, value in environment.items():
        if isinstance(value, dict):
            short = {key: item for key, item in value.items() if item not in (None, "", [], {})}
            if name != "packages" and short:
                texts[name] = ", ".join(f"{key}={value_text(item)}" for key, item in short.items())
        elif name == "time" and isinstance(value, int | float):
            texts[name] = local_time(value)
        elif value not in (None, "", []):
            texts[name] = " ".join(map(str, value)) if isinstance(value, list) else value_text(value)
    return texts


def _receipt_texts(receipt: dict[str, Any]) -> dict[str, str]:
    texts = {
        "per call": f"p50 {receipt['p50_us']} µs, p99 {receipt['p99_us']} µs"
        if receipt.get("p50_us") is not None and receipt.get("p99_us") is not None
        else "",
        "rows": value_text(receipt.get("calls")) if receipt.get("calls") is not None else "",
        "lost": ", ".join(
            f"{receipt[name]} {name.replace('_', ' ')}"
            for name in ("dropped", "damaged_bytes", "waiting_rows")
            if receipt.get(name)
        ),
        "errors": value_text(receipt["errors"]) if receipt.get("errors") else "",
        "last error": value_text(receipt["last_error"]) if receipt.get("last_error") else "",
    }
    return {name: text for name, text in texts.items() if text}


def _show_flights(run: RecordedRun, options: argparse.Namespace, session: CommandContext) -> None:
    """Shows the output of the ranks' flight recorders: where each group of ranks is, and its stack."""
    flights, screen = run.flights(), session.screen
    if options.json:
        screen.json({"flights": [one.document for one in flights]})
        return
    if not flights:
        session.note(f"no flight records in {run.path / FLIGHT_FOLDER}")
        return
    for line in describe_flights(flights):
        screen.line(screen.styled(value_text(line), "bold"))
    shown = set()
    for one in flights:
        if one.stack and (one.reason, one.waits_at) not in shown:
            shown.add((one.reason, one.waits_at))
            age = None if one.time is None else session.clock() - one.time
            frames = {
                value_text(f"{frame.place} {frame.function}"): value_text(frame.code) for frame in one.stack
            }
            last = dict(list(frames.items())[-_MAX_FRAMES:])
            _show_pairs(f"stack of rank {one.rank}, {age_text(age)} ago", last, screen)
    steps = {
        value_text(step.get("step")): value_text(step.get("metrics"))
        for step in flights[0].steps[-_LAST_STEPS:]
    }
    _show_pairs(f"last steps of rank {flights[0].rank}", steps, screen)


def _show_ranks(run: RecordedRun, options: argparse.Namespace, session: CommandContext) -> None:
    """Shows the last value of each metric over ranks, the rank that was NaN first, and seconds per step."""
    ranks, screen = run.ranks(), session.screen
    summaries = {rank: run.summary_of(rank, TRAINER) for rank in ranks}
    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary))
    first_nan: dict[str, tuple[int, int]] = {}
    seconds: dict[int, float | None] = {}
    for place, name in enumerate(names):
        has_nan = any(name in one and one[name].non_finite for one in summaries.values())
        # One metric is enough for the time of steps; others are read only if a rank had a NaN.
        if has_nan or place == 0:
            try:
                found = run.ranks(name)
            except MetricNotFoundError:
                continue
            seconds = seconds or found.seconds_per_step
            if found.first_nan is not None:
                first_nan[name] = found.first_nan
    if options.json:
        screen.json(
            {
                "ranks": ranks,
                "metrics": {
                    name: {str(rank): one[name].last for rank, one in summaries.items() if name in one}
                    for name in names
                },
                "first_nan": {name: {"rank": rank, "step": step} for name, (rank, step) in first_nan.items()},
                "seconds_per_step": {str(rank): value for rank, value in seconds.items()},
            }
        )
        return
    titles = numbers("min", "rank", "median", "max", "rank", "first NaN")
    lasts = {"seconds per step": {rank: value for rank, value in seconds.items() if value is not None}}
    for name in names:
        found_lasts = {rank: one[name].last for rank, one in summaries.items() if name in one}
        lasts[name] = {
            rank: value for rank, value in found_lasts.items() if value is not None and math.isfinite(value)
        }
    rows = []
    for name, values in lasts.items():
        nan = first_nan.get(name)
        if not values and nan is None:
            continue
        low, high = (pick(values, key=values.__getitem__, default=None) for pick in (min, max))
        least, most = (None if rank is None else values[rank] for rank in (low, high))
        median = statistics.median(values.values()) if values else None
        first = None if nan is None else f"rank {nan[0]}, step {nan[1]}"
        rows.append((name, least, low, median, most, high, first))
    screen.table([Column("last value of", is_whole=True), *titles], rows)


def diff(options: argparse.Namespace, session: CommandContext) -> None:
    """Shows the hyperparameters, environment, git state and metrics that differ between runs."""
    if len(options.run_name) < 2:  # noqa: PLR2004  # runs
        raise UsageError("diff compares two runs or more. Name another: destinations runs diff RUN RUN")
    found = find_runs(options.run_name, options, session)
    rows = {
        name: [values.get(place, MISSING) for place in range(len(found))]
        for name, values in differing_fields(found).items()
    }
    if options.json:
        shown = {name: [None if one is MISSING else one for one in values] for name, values in rows.items()}
        session.screen.json({"runs": [run.record.run_id for run in found], "differences": shown})
        return
    if not rows:
        session.note("no differences")
        return
    columns = [Column("", is_whole=True), *(name.rstrip("/") for name in options.run_name)]
    session.screen.table(columns, [(name, *texts_apart(values)) for name, values in rows.items()])


def differing_fields(runs: list[RecordedRun]) -> dict[str, dict[int, Any]]:
    """Returns the differing fields by name; each has a value per run, in the order of the runs."""
    return differing([_fields(run) for run in runs])


def _fields(run: RecordedRun) -> dict[str, Any]:
    record = run.record
    fields: dict[str, Any] = {"status": run.shown_status, "tags": sorted(record.tags)}
    fields |= {f"hparams.{name}": value for name, value in record.hparams.items()}
    fields |= _flat("environment", run.environment)
    fields |= {f"summary.{name}": value for name, value in record.summary.items()}
    return fields


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if name not in _VOLATILE:
            flat |= _flat(f"{prefix}.{name}", item)
    return flat
