"""Checks of other tools' SQLite databases: which tables they have, and whether they are damaged."""

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote


def _rows_of(path: Path, statement: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
        return [text for (text,) in database.execute(statement)]


def has_tables(path: Path, *names: str) -> bool:
    """Returns whether a file is an SQLite database with these tables."""
    try:
        return set(names) <= {*_rows_of(path, "select name from sqlite_master")}
    except sqlite3.Error:
        return False


def damage_of(path: Path) -> str:
    """Returns the first problem that SQLite finds in a database; "" if there is none."""
    try:
        first, *_ = _rows_of(path, "pragma quick_check(1)")
    except sqlite3.Error as error:
        first = str(error)
    return "" if first == "ok" else f"SQLite finds damage in {path}: {first}"
