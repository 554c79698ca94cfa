"""Untrusted files lead nowhere else and use bounded resources: links, paths, YAML, indexes, run names."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from destinations import RunDirectory, TextFile
from destinations.runs import Run, Runs, open_runs
from destinations.runs.errors import FilterError
from destinations.runs.export import export_metrics, export_runs
from destinations.runs.index.index import Index, index_name
from destinations.runs.index.root import Root
from destinations.runs.send import send
from destinations.runs.send.replay import replay
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.runs.foreign_runs import NOW, command, write_full_run, write_lightning_run

SECRET = "root:x:0:0\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A separate index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/training-destinations/runs"


@pytest.fixture
def secret(tmp_path):
    """A file that no run may show."""
    path = tmp_path / "outside/secret.csv"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


# Links and paths.


def media_run(folder, path):
    """Writes a run with a path in its indexes."""
    write_run(folder)
    line = {"step": 1, "name": "a", "path": path, "size": 1, "columns": [], "rows": 0, "index": 0, "fps": 1}
    for name, kind in (("tables.jsonl", None), ("artifacts.jsonl", None), ("media.jsonl", "image")):
        (folder / name).write_text(json.dumps({**line, "type": kind}) + "\n")
    return Run.open(folder)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path, secret):
    """No image or table of a foreign run shows a file of the user."""
    run = media_run(tmp_path / "runs/a", "media/x")
    (run.path / "media").mkdir()
    (run.path / "media/x").symlink_to(secret)

    for read in (
        lambda: run.table("a"),
        run.images()[0].read_bytes,
        run.images()[0].load,
        run.images()[0].array,
    ):
        with pytest.raises(OSError, match="symbolic link"):
            read()


@pytest.mark.parametrize(
    "path", ["media/secret.csv", "../outside/secret.csv", "/etc/passwd", "media/../../x", ""]
)
def test_path_outside_the_run_is_a_damaged_line(tmp_path, secret, path):
    """It may lead out through a linked folder, through "..", or as an absolute path."""
    run = media_run(tmp_path / "runs/a", path)
    (run.path / "media").symlink_to(secret.parent)

    assert (run.images(), run.tables(), run.artifacts()) == ([], [], [])
    assert run.damaged_lines() == {"media.jsonl": 1, "tables.jsonl": 1, "artifacts.jsonl": 1}


def test_nothing_outside_is_sent(tmp_path, secret):
    """A run is sent only with its own files."""
    run = media_run(tmp_path / "runs/a", "media/x")
    (run.path / "media").mkdir()
    (run.path / "media/x").symlink_to(secret)

    report = send(run, f"run:{tmp_path / 'sent'}")

    assert len(report.missing) == 3
    assert not any(
        SECRET in path.read_text(errors="replace")
        for path in (tmp_path / "sent").rglob("*")
        if path.is_file()
    )


@pytest.mark.parametrize("name", ["environment.json", "sessions.jsonl"])
def test_a_link_in_a_run_is_not_sent(tmp_path, secret, name, caplog):
    """Files that are copied unchanged may be links in a foreign run: they are left out and named."""
    run = media_run(tmp_path / "runs/a", "media/x")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(secret)

    send(run, f"run:{tmp_path / 'sent'}", cache=tmp_path / "cache")

    files = [path for path in (tmp_path / "sent").rglob("*") if path.is_file()]
    assert not any(SECRET in path.read_text(errors="replace") for path in files)
    assert f"left out {name}" in caplog.text


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/../../../evil", "..", "a\0b"])
def test_a_run_name_cannot_leave_a_folder(tmp_path, name):
    """It may become part of a destination's path when the run is replayed."""
    place = tmp_path / "one/two/three"
    run = write_full_run(tmp_path / "runs/a")
    sidecar = json.loads((run / "sidecar.json").read_text())
    (run / "sidecar.json").write_text(json.dumps({**sidecar, "display_name": name}))
    before = {path for path in tmp_path.rglob("*") if place not in path.parents}

    replay(Run.open(run), RunDirectory(place / "{run_name}"))
    replay(Run.open(run), TextFile(str(place / "{run_name}.log")))
    send(Run.open(f"{run}/media/.."), f"run:{place / 'sent'}")

    made = {path for path in tmp_path.rglob("*") if place not in path.parents} - before
    assert {path for path in made if tmp_path / "cache" not in (path, *path.parents)} <= {
        place,
        *place.parents,
    }
    assert len(list(place.iterdir())) == 3


# YAML.

BOMBS = {
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
    "merges": "a0: &a0 {x: 1, y: 2}\n"
    + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: 1}}\n" for i in range(1, 40)),
    "itself": "a: &a [*a]\n",
    "deep": "a: " + "[" * 5000 + "]" * 5000 + "\n",
    "deep-mappings": "{a: " * 5000 + "1" + "}" * 5000 + "\n",
    "digits": f"a: {'9' * 10_000}\n",
    "date": "a: 2024-99-99\n",
    "object": "a: !!python/object/apply:os.system ['touch hacked']\n",
    "key": "? [1, 2]\n: 3\n",
    "binary": "a: !!binary '???'\n",
    "large": "a: " + "x" * (5 << 20) + "\n",
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_hyperparameters_that_expand_are_refused(tmp_path, name, monkeypatch):
    """A file of a few lines may expand to billions of values, in a run of Lightning or our own."""
    monkeypatch.chdir(tmp_path)
    lightning = write_lightning_run(tmp_path / "runs/lightning")
    ours = write_run(tmp_path / "runs/ours", hparams={"lr": 0.1})
    for run in (lightning, ours):
        (run / "hparams.yaml").write_text(BOMBS[name])

    with open_runs(tmp_path / "runs") as runs:
        found = {run.run_id: run for run in runs}

    assert set(found) == {"lightning", "ours"}
    assert found["lightning"].record.problem or name in {"digits", "object", "key", "binary"}
    assert len(found["lightning"].hparams) < 10
    assert len(str(found["ours"].hyperparameters)) < 20_000
    assert not Path("hacked").exists()


# Export.


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("export", [export_runs, export_metrics])
def test_an_export_does_not_overwrite_by_default(tmp_path, suffix, export):
    """An existing file is an error; with `overwrite`, it is replaced as a whole."""
    runs = [Run.open(write_full_run(tmp_path / "runs/a"))]
    path = tmp_path / f"out.{suffix}"
    path.write_text("precious")

    with pytest.raises(FileExistsError, match="exists"):
        export(runs, path)
    before = path.read_text()
    export(runs, path, overwrite=True)

    assert before == "precious"
    assert path.read_bytes() != b"precious"
    assert {one.name for one in tmp_path.iterdir()} <= {"runs", path.name, "cache"}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("export", [export_runs, export_metrics])
def test_file_created_during_an_export_is_kept(tmp_path, suffix, export):
    """It didn't exist when the export began, and nobody asked to overwrite it."""
    run = Run.open(write_full_run(tmp_path / "runs/a"))
    path = tmp_path / f"out.{suffix}"

    def runs():
        path.write_text("precious")
        yield run

    with pytest.raises(FileExistsError):
        export(runs(), path)

    assert path.read_text() == "precious"
    assert {one.name for one in tmp_path.iterdir()} <= {"runs", path.name, "cache"}


def test_the_command_says_how_to_replace_a_file(tmp_path):
    """The command fails, and `--overwrite` replaces the file."""
    write_full_run(tmp_path / "runs/a")
    path = tmp_path / "out.csv"
    path.write_text("precious")

    code, _, errors = command("export", "-o", path, "--root", tmp_path / "runs")
    again = command("export", "-o", path, "--overwrite", "--root", tmp_path / "runs")

    assert (code, again[0]) == (1, 0)
    assert "exists" in errors
    assert path.read_text().startswith("run_id,")


def test_unreadable_run_does_not_end_an_export(tmp_path):
    """The error has its name and the reason, and the exit code is 3; the other run has all its rows."""
    write_full_run(tmp_path / "runs/good")
    bad = write_full_run(tmp_path / "runs/bad")
    (bad / "metrics.csv").unlink()
    os.mkfifo(bad / "metrics.csv")

    code, output, errors = command("export", "--metrics", "--root", tmp_path / "runs")

    assert code == 3
    assert sum(line.startswith("good,") for line in output.splitlines()) == 10
    assert "metrics of run bad" in errors
    assert "not a regular file" in errors


# The index.


def scribble(path):
    """Overwrites pages of a database."""
    content = bytearray(path.read_bytes())
    content[4096 * 2 : 4096 * 8] = b"\xff" * 4096 * 6
    path.write_bytes(content)


def in_sql(*statements):
    """Returns a function that changes a database."""

    def change(path):
        with sqlite3.connect(path) as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    return change


INDEXES = {
    "pages": scribble,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no database\n" * 100),
    "newer": in_sql("PRAGMA user_version = 99"),
    "table": in_sql("DROP TABLE folders"),
    "bytes": in_sql("UPDATE runs SET notes = CAST(x'ff80' AS TEXT)"),
    "integer id": in_sql(
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, 'run_id TEXT', 'run_id') WHERE name = 'runs'",
        "PRAGMA writable_schema = RESET",
        "UPDATE runs SET run_id = 7",
    ),
    "tags": in_sql("UPDATE runs SET tags = '[1, {}]'"),
    "cells": in_sql("UPDATE cells SET cells = '{\"x\": 1}'"),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "dangling": lambda path: (path.unlink(), path.symlink_to("/nowhere/at/all")),
}


@pytest.mark.parametrize("how", list(INDEXES))
def test_unusable_index_hides_no_run(tmp_path, cache, how):
    """The runs are still listed, and a problem of the index is reported; an empty file is none."""
    write_run(tmp_path / "runs/good")
    command("ls", "--root", tmp_path / "runs")
    INDEXES[how](cache / index_name(str(tmp_path / "runs")))

    code, output, errors = command("ls", "--root", tmp_path / "runs", now=NOW)

    assert code == 0
    assert "good" in output
    assert errors.startswith("index ") or how == "empty"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any file")
def test_read_only_index_file_is_kept_in_memory(tmp_path, cache):
    """A warning says that the index is kept in memory."""
    write_run(tmp_path / "runs/good")
    command("ls", "--root", tmp_path / "runs")
    (cache / index_name(str(tmp_path / "runs"))).chmod(0o400)

    code, output, errors = command("ls", "--root", tmp_path / "runs", now=NOW)

    assert code == 0
    assert "good" in output
    assert "using one in memory" in errors


def test_locked_index_is_kept_in_memory(tmp_path, cache):
    """After a while, a warning says that the index is kept in memory."""
    write_run(tmp_path / "runs/good")
    command("ls", "--root", tmp_path / "runs")
    folder = str(tmp_path / "runs")
    other = sqlite3.connect(cache / index_name(folder), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    with Runs([Root(folder, Index(folder, cache, busy_seconds=0.1))]) as runs:
        report = runs.scan()
        names = [run.run_id for run in runs]
    other.close()

    assert names == ["good"]
    assert "locked" in " ".join(report.warnings)


# Arguments.


@pytest.mark.parametrize(
    "where",
    [
        "(" * 10_000,
        "(" * 10_000 + "alive" + ")" * 10_000,
        "not " * 10_000 + "alive",
        "alive and " * 10_000 + "alive",
        'name ~ "' + "(" * 5000 + '"',
        "created_at > now" + "-1d" * 10_000 + " and",
        "summary.loss > " + "[" * 5000,
    ],
    ids=range(7),
)
def test_an_endless_filter_is_refused(tmp_path, where):
    """The error is a filter error, not one of Python's own."""
    write_run(tmp_path / "runs/good")

    with open_runs(tmp_path / "runs") as runs, pytest.raises(FilterError):
        runs.query(where=where)
    assert command("ls", "--where", where, "--root", tmp_path / "runs")[0] == 2


@pytest.mark.parametrize(
    "where",
    [
        f"hparams.x > {'9' * 10_000}",
        f"hparams.x == -{'9' * 400}",
        "created_at < now-" + "9" * 400 + "w",
        f"hparams.{'x' * 10_000} == 1",
        "created_at > now" + "-1d" * 1000,
        'run_id == "\'; DROP TABLE runs; --"',
    ],
)
def test_a_filter_of_odd_values_is_answered(tmp_path, where):
    """Numbers beyond everything, long names and SQL in a text are harmless."""
    write_run(tmp_path / "runs/good", hparams={"x": 1})

    with open_runs(tmp_path / "runs") as runs:
        assert len(runs.query(where=where)) <= 1
        assert len(runs) == 1


@pytest.mark.parametrize("run_id", ["--root", "-n", "--help", "--json", "-1"])
def test_id_that_looks_like_an_option_is_found(tmp_path, run_id):
    """It works after `--`, or as a path."""
    write_run(tmp_path / "runs/odd", run_id=run_id)

    code, output, _ = command("show", "--root", tmp_path / "runs", "--", run_id)

    assert code == 0
    assert output.startswith(f"odd  {run_id}")


def test_wrong_clocks_give_no_negative_age(tmp_path):
    """A run that begins tomorrow, or ends before it begins, has an age and a duration of 0."""
    write_run(tmp_path / "runs/late", created_at=NOW + 1e6, ended_at=NOW - 1e6)
    write_run(tmp_path / "runs/later", created_at=9e11, ended_at=-9e11, updated_at=9e11)

    code, output, _ = command(
        "ls", "-c", "age,duration,created_at,ended_at", "--root", tmp_path / "runs", now=NOW
    )
    shown = command("show", tmp_path / "runs/later", "--root", tmp_path / "runs", now=NOW)

    assert (code, shown[0]) == (0, 0)
    assert [line.split()[:3] for line in output.splitlines()[1:]] == [
        ["later", "0s", "0s"],
        ["late", "0s", "0s"],
    ]
