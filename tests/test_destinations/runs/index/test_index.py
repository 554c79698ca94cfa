"""The index is a cache: the runs are found whatever happens to it."""

import contextlib
import logging
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from destinations.runs import open_runs
from destinations.runs.index.index import VERSION, cache_folder
from tests.test_destinations.runs.folders import clock, write_run

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def root(tmp_path):
    """A folder with two runs."""
    for name in "ab":
        write_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.fixture
def cache(tmp_path):
    """A missing folder for indexes."""
    return tmp_path / "cache"


def scanned(root, cache, **options):
    """Returns the report of opening, and the number of runs."""
    with open_runs(root, cache=cache, clock=clock, **options) as runs:
        return runs.report, len(runs)


def index_file(cache):
    """Returns the only index file."""
    (path,) = cache.glob("*.sqlite")
    return path


def test_next_process_knows_the_runs_found(root, cache):
    """Without a scan, it gives the last scan's answers."""
    scanned(root, cache)

    report, count = scanned(root, cache, scan=False)

    assert (report.runs, count) == (0, 2)
    assert scanned(root, cache)[0].unchanged == 2


def test_the_index_is_in_the_users_cache_folder_and_not_with_the_runs(root, tmp_path, monkeypatch):
    """The folder of runs may be shared or read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    before = sorted(root.rglob("*"))

    scanned(root, None)

    assert cache_folder() == tmp_path / "xdg" / "training-destinations" / "runs"
    assert index_file(cache_folder()).name.startswith("runs-")
    assert sorted(root.rglob("*")) == before


def damage_by(statement):
    """Returns a function that changes the file by SQL."""

    def act(path):
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(statement)
            db.commit()

    return act


def overwrite(path):
    """Replaces the database with a text."""
    path.write_bytes(b"no database at all, but long enough to look like one" * 100)


def cut_off(path):
    """Cuts off the end of the file."""
    path.write_bytes(path.read_bytes()[:5000])


def scramble(path):
    """Overwrites everything except the first page."""
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


UNUSABLE = {
    "newer": (damage_by(f"PRAGMA user_version = {VERSION + 1}"), "is of a newer version"),
    "older": (damage_by("PRAGMA user_version = 0"), "is of an older version"),
    "another program's": (damage_by("PRAGMA application_id = 7"), "is of another program"),
    "no database": (overwrite, "is corrupt"),
    "cut off": (cut_off, "is corrupt"),
    "scrambled": (scramble, "is corrupt"),
    "without a table": (damage_by("DROP TABLE folders"), "is corrupt"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_index_is_rebuilt_and_reported_once(name, root, cache, caplog):
    """The report has a warning, and one is logged; all runs are there."""
    act, expected = UNUSABLE[name]
    scanned(root, cache)
    act(index_file(cache))
    caplog.set_level(logging.WARNING, "destinations")

    report, count = scanned(root, cache)
    again, _ = scanned(root, cache)

    assert (report.added, count) == (2, 2)
    assert [expected in warning for warning in report.warnings] == [True]
    assert [record.getMessage() for record in caplog.records] == list(report.warnings)
    assert (again.unchanged, again.warnings) == (2, ())


@pytest.mark.parametrize("act", [cut_off, scramble, overwrite])
def test_index_damaged_while_open_is_rebuilt(act, root, cache):
    """The next scan finds everything again."""
    with open_runs(root, cache=cache, clock=clock) as runs:
        act(index_file(cache))
        for path in cache.glob("*-journal"):
            path.unlink()
        write_run(root / "c")

        report = runs.scan()

        assert (report.runs, len(runs)) == (3, 3)
    assert scanned(root, cache)[0].runs == 3


@pytest.mark.parametrize("act", [scramble, overwrite])
def test_index_damaged_between_scan_and_query_is_rebuilt(act, root, cache):
    """The query still gets an answer."""
    scanned(root, cache)
    with open_runs(root, cache=cache, scan=False, clock=clock) as runs:
        act(index_file(cache))

        found = runs.query(where="status == 'completed'")

        assert len(found) == len(runs) == 2
        assert len(runs.report.warnings) == 1


def test_an_index_may_be_deleted_at_any_time(root, cache):
    """This includes an open index: the next scan creates another."""
    with open_runs(root, cache=cache, clock=clock) as runs:
        index_file(cache).unlink()
        write_run(root / "c")

        report = runs.scan()

        assert (report.runs, report.added, report.warnings) == (3, 3, ())
        assert index_file(cache).exists()


@pytest.mark.parametrize("kind", ["a file", "a file above", "a folder of the name"])
def test_without_a_cache_folder_the_index_is_in_memory(kind, root, tmp_path):
    """The report gives the reason; everything else works."""
    cache = tmp_path / "cache"
    if kind == "a file":
        cache.touch()
    elif kind == "a file above":
        cache.touch()
        cache /= "below"
    else:
        scanned(root, cache)
        path = index_file(cache)
        path.unlink()
        path.mkdir()

    report, count = scanned(root, cache)

    assert (report.runs, count) == (2, 2)
    assert [("in memory" in warning) for warning in report.warnings] == [True]


def test_missing_home_does_not_raise(root, monkeypatch):
    """A container may have no home."""
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    report, count = scanned(root, None)

    assert (report.runs, count) == (2, 2)
    assert report.warnings == (
        "index has no folder (Could not determine home directory.); using one in memory.",
    )


def no_home():
    """Raises as `Path.home` does without a home."""
    raise RuntimeError("Could not determine home directory.")


def test_read_only_index_continues_in_memory(root, cache):
    """On a full disk, for instance, SQLite can't write, so the scan starts over."""
    with open_runs(root, cache=cache, clock=clock) as runs:
        runs._roots[0].index._db.execute("PRAGMA query_only = ON")
        write_run(root / "c")

        report = runs.scan()

        assert (report.runs, len(runs)) == (3, 3)
        assert ["in memory" in warning for warning in report.warnings] == [True]


SCAN_IN_A_LOOP = """
import sys
from destinations.runs import open_runs
root, cache, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
with open_runs(root, cache=cache) as runs:
    for _ in range(times):
        report = runs.scan(full=True)
        assert report.warnings == (), report.warnings
    print(len(runs), len(runs.query(where="hparams.x >= 0")))
"""


def test_two_processes_may_scan_at_once(tmp_path, cache):
    """Each finds all runs, neither waits forever, and the index is valid afterwards."""
    for number in range(60):
        write_run(tmp_path / "runs" / f"r{number}", hparams={"x": number, f"own{number}": 1})
    command = [sys.executable, "-c", SCAN_IN_A_LOOP, str(tmp_path / "runs"), str(cache), "5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]

    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    assert outputs == ["60 60\n", "60 60\n"]
    with contextlib.closing(sqlite3.connect(index_file(cache))) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("SELECT count(*), count(DISTINCT path) FROM runs").fetchall() == [(60, 60)]


def test_threads_take_turns(root, cache):
    """Queries, lookups and scans of one object may run in any thread."""
    failures = []
    with open_runs(root, cache=cache, clock=clock) as runs:

        def work():
            try:
                for _ in range(10):
                    runs.scan()
                    assert len(runs.query(where="status == 'completed'")) == 2
                    assert runs["a"].record.run_id == "a"
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)

    assert failures == []


def test_a_full_scan_reads_everything_again(root, cache):
    """It also reads files rewritten in place, which no timestamp shows."""
    with open_runs(root, cache=cache, clock=clock) as runs:
        path = root / "a" / "sidecar.json"
        state = path.stat()
        path.write_text(path.read_text().replace("completed", "preempted"))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        unseen = runs.scan()

        report = runs.scan(full=True)

        assert (unseen.changed, report.changed, report.is_full) == (0, 2, True)
        assert runs["a"].record.status == "preempted"


def test_opening_runs_loads_nothing_heavy(root, cache):
    """No torch, numpy, YAML, pandas or readers of media and rows: a command line starts at once."""
    code = (
        "import sys\nfrom destinations.runs import open_runs\n"
        f"with open_runs({str(root)!r}, cache={str(cache)!r}) as runs: runs.query(where='alive')\n"
        "heavy = ('torch', 'numpy', 'pandas', 'yaml', 'boto3', 'PIL', 'tqdm', 'asyncio', 'duckdb', 'pyarrow')\n"
        "ours = ('runs.content', 'history.snapshot')\n"
        "heavy += tuple('destinations.' + name for name in ours)\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_index_is_complete_after_a_killed_first_scan(root, cache):
    """A first scan creates SQL's indexes at its end; if they are missing, the next scan does."""
    scanned(root, cache)
    with contextlib.closing(sqlite3.connect(index_file(cache))) as db:
        made = db.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE INDEX%'").fetchall()
        for (name,) in made:
            db.execute(f"DROP INDEX {name}")

    report, count = scanned(root, cache)

    assert (report.unchanged, count, report.warnings) == (2, 2, ())
    with contextlib.closing(sqlite3.connect(index_file(cache))) as db:
        assert db.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE INDEX%'").fetchall() == made
        assert ("runs_by_creation",) in made
