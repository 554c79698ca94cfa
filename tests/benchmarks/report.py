"""Keeps the figures of benchmarks in `results.json`, from which the site's page "Benchmarks" is made.

A benchmark runs several times, its rounds. The ratio of a figure to its peer, which ran beside it, is compared with the
last time: it is worse if today's best round is more than a tenth above last time's worst round. The figures of another
machine are replaced, not compared.
"""

import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .timing import Table

__all__ = ["RESULTS", "collect", "keep", "machine", "markdown", "share_of_others", "worse"]

RESULTS = Path(__file__).with_name("results.json")
NOISE = 1.1

Result = dict[str, Any]


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Says what figures were measured on: the processor, cores, Python and torch."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    processor = found[1].strip() if found else platform.processor() or platform.machine()
    cores = os.cpu_count() or 1
    return (
        f"{processor}, {cores} core{'' if cores == 1 else 's'}, "
        f"Python {platform.python_version()}, torch {metadata.version('torch').partition('+')[0]}"
    )


def share_of_others(seconds: float = 2.0) -> float:
    """Returns the share of all processors that are busy over so many seconds, in which this process waits."""
    import psutil

    return float(psutil.cpu_percent(seconds)) / 100


def collect(rounds: Sequence[Sequence[Table]], today: datetime | None = None) -> Result:
    """Returns the figures of several rounds of one benchmark, for `results.json`.

    Args:
        rounds: the tables of each round.
        today: the date to note; default: now.

    Raises:
        ValueError: two rows of a table have one name.
    """
    tables: dict[str, Result] = {}
    for tables_of_round in rounds:
        for table in tables_of_round:
            if len({row.name for row in table.rows}) < len(table.rows):
                raise ValueError(
                    f"rows of a table must have different names, got two alike in {table.title!r}."
                )
            rows = tables.setdefault(table.title, {"peer": table.peer, "rows": {}})["rows"]
            for row in table.rows:
                found = rows.setdefault(
                    row.name, {"unit": row.unit, "budget": row.budget, "here": [], "peer": []}
                )
                found["here"].append(row.value)
                found["peer"].append(row.peer)
    when = today or datetime.now(UTC)
    return {"machine": machine(), "date": f"{when:%Y-%m-%d}", "rounds": len(rounds), "tables": tables}


def worse(last: Result | None, new: Result) -> list[str]:
    """Names the ratios that are worse than the last time, beyond noise.

    Args:
        last: what `collect` returned then, or None.
        new: what it returned now.
    """
    if last is None or last["machine"] != new["machine"]:
        return []
    found = []
    for title, table in new["tables"].items():
        for name, row in table["rows"].items():
            before = _ratios(last["tables"].get(title, {}).get("rows", {}).get(name))
            now = _ratios(row)
            if before and now and min(now) > max(before) * NOISE:
                found.append(
                    f"{title}: {name}: {statistics.median(now):.2f} times the peer, "
                    f"{statistics.median(before):.2f} on {last['date']}"
                )
    return found


def markdown(result: Result) -> str:
    """Returns the tables of one benchmark as Markdown: medians, and the range of the ratio over the rounds."""
    rounds = "one round" if result["rounds"] == 1 else f"medians of {result['rounds']} rounds"
    parts = [f"{result['machine']}; {result['date']}, {rounds}."]
    for title, table in result["tables"].items():
        rows: Mapping[str, Result] = table["rows"]
        columns = {
            "": lambda name, row: name,
            "here": lambda name, row: _cell(row["here"], row["unit"]),
            "budget": lambda name, row: _cell([row["budget"]], row["unit"]),
            table["peer"]: lambda name, row: _cell(row["peer"], row["unit"]),
            "ratio": lambda name, row: _range(_ratios(row)),
        }
        cells = {head: [cell(name, row) for name, row in rows.items()] for head, cell in columns.items()}
        shown = [head for head in columns if not head or any(cells[head])]
        lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
        lines += [f"| {' | '.join(line)} |" for line in zip(*(cells[head] for head in shown), strict=True)]
        parts.append(f"**{title}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def keep(name: str, result: Result) -> list[str]:
    """Stores the figures of a benchmark; returns what is worse than the last time."""
    results: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = worse(results.get(name), result)
    results[name] = result
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n")
    return found


def _ratios(row: Result | None) -> list[float]:
    if row is None:
        return []
    pairs = zip(row["here"], row["peer"], strict=True)
    return [here / peer for here, peer in pairs if here is not None and peer]


def _cell(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):,.3g} {unit}" if known else ""


def _range(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    return f"{middle:.2g} ({least:.2g} to {most:.2g})" if len(ratios) > 1 else f"{middle:.2g}"
