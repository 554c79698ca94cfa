"""One damaged run never affects the others: tests damage each file in many ways, and run every reader."""

import json
import os
import shutil

import pytest

from destinations.runs import MetricNotFoundError, Run, open_runs
from destinations.runs.content.follow import Follower
from destinations.runs.export import export_metrics, export_runs
from tests.effort import times
from tests.test_destinations.runs.foreign_runs import (
    NOW,
    command,
    copy_run,
    write_full_run,
    write_killed_run,
    write_lightning_run,
)

# By then, no heartbeat is fresh.
LATER = NOW + 1e9
DEEP = 10_000
CONTENTS = {
    "empty": b"",
    "feeds": b"\n\n\n",
    "nul": b"\0" * 4096,
    "latin": b"\xff\xfe\x80" * 100,
    "list": b"[1, 2, 3]\n",
    "null": b"null\n",
    "text": b'"text"\n',
    "torn": b'{"run_id": "x", "step": 1, "na',
    "deep": b"[" * DEEP + b"]" * DEEP + b"\n",
    "deep-objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"\n",
    "deep-braces": b"{" * DEEP,
    "rather-deep": b'{"a":' * 400 + b"1" + b"}" * 400 + b"\n",
    "digits": b'{"run_id": "x", "created_at": '
    + b"9" * 10_000
    + b', "summary": {"loss": '
    + b"9" * 400
    + b"}}\n",
    "quote": b'"' * 101,
    "cells": b"step,epoch,time,loss\n"
    + b"9" * 400
    + b",1e999,"
    + b"9" * 5000
    + b',[1]\n1,nan,inf,true\n-1,,,"x"\n',
    "header": b"step,step,loss,loss\n1,2,3\n",
}
ODD = [
    None,
    True,
    -1,
    1.5,
    "",
    "text",
    "\x1b[31m\n\0\ud800",
    10**30,
    10**400,
    1e300,
    float("nan"),
    float("inf"),
    [],
    [[]],
    ["a", 1, None, {}],
    {},
    {"": None},
    {"a": {"b": [1]}},
]
# One in this many odd values is tried; the next place tries the next one of `ODD`.
ONE_IN = times(3 * len(ODD) + 1, 11)
JSON_FILES = ["sidecar.json", "summary.json", "environment.json", "edits.json", "journal/rank0/position.json"]
LINE_FILES = [
    "sessions.jsonl",
    "media.jsonl",
    "tables.jsonl",
    "histograms.jsonl",
    "texts.jsonl",
    "traces.jsonl",
    "artifacts.jsonl",
]
OTHER_FILES = [
    "metrics.csv",
    "hparams.yaml",
    "heartbeat",
    "journal/rank0/00000001.journal",
    "media/Inputs/00000003_0.png",
    "media/Sound/00000003_0.wav",
    "media/Cloud/00000003_0.ply",
    "tables/Table/00000003_0.csv",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a run of each kind."""
    root = tmp_path_factory.mktemp("whole")
    write_full_run(root / "full")
    write_killed_run(root / "killed")
    write_lightning_run(root / "lightning")
    (root / "full/edits.json").write_text('{"added_tags": ["a"], "notes": "n", "archived": false}')
    (root / "full/traces.jsonl").write_text('{"step": 1, "time": 1.0, "traces": {"a": {"b": 1}}}\n')
    return root


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder for the damaged runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def damage(whole, root, name, target):
    """Returns a copy of the run with such a file, and the file's path."""
    kind = next(
        one for one in ("full", "killed", "lightning") if (whole / one / name).exists() or one == "lightning"
    )
    run = copy_run(whole / kind, root / target)
    if (run / "sidecar.json").exists():
        sidecar = json.loads((run / "sidecar.json").read_text())
        (run / "sidecar.json").write_text(json.dumps({**sidecar, "run_id": target}))
    return run / name


def read_everything(run):
    """Reads everything from a run; unreadable data raises one of the documented errors."""
    questions = [
        lambda: run.alive,
        lambda: run.hyperparameters,
        lambda: run.summary,
        lambda: run.environment,
        lambda: run.sessions,
        lambda: run.receipt,
        run.ranks,
        run.metric_names,
        lambda: run.series("loss"),
        lambda: list(run.blocks()),
        lambda: first_look(run),
        lambda: [one.load() for one in run.images()],
        lambda: [one.array() for one in run.images()],
        lambda: [mask.load() for one in run.images() for mask in one.masks.values()],
        lambda: [one.load() for one in run.audio()],
        lambda: [one.load() for one in run.point_clouds()],
        lambda: [one.read_bytes() for one in run.videos()],
        lambda: [run.table(one.name, one.step).to_dicts() for one in run.tables()],
        run.histograms,
        run.texts,
        run.traces,
        run.artifacts,
        run.record_counts,
        run.damaged_lines,
    ]
    for question in questions:
        try:
            question()
        except (OSError, ValueError, MetricNotFoundError):
            continue


def first_look(run):
    """Follows the rows of a run for one look."""
    with Follower(run.path) as follower:
        return list(follower.poll())


def check_all(root, whole):
    """Runs every command and reader over the damaged runs, with a good one beside them."""
    copy_run(whole / "full", root / "good")
    sidecar = json.loads((root / "good/sidecar.json").read_text())
    (root / "good/sidecar.json").write_text(json.dumps({**sidecar, "run_id": "good", "tags": ["fine"]}))
    with open_runs(root) as runs:
        for run in runs.query(archived=None):
            read_everything(run)
            repr(run)
        runs.to_dicts(archived=None)
        runs.compare([run.path for run in runs.query(archived=None)])
        runs.query(where="summary.loss < 1 and hparams.optim.lr > 0", sort_by="created_at")
        export_runs(runs.query(archived=None), root.parent / "runs.parquet", overwrite=True)
        export_metrics(runs.query(archived=None), root.parent / "metrics.parquet", overwrite=True)
    for arguments in (
        ["ls", "--archived", "-n", "5000"],
        ["ls", "--json", "--archived"],
        ["ls", "-c", "run,created_at,ended_at,age,duration,tags,notes,path,problem,summary.loss"],
        ["best", "loss", "--min"],
        ["export"],
        ["export", "--json"],
        ["export", "--metrics"],
        ["export", "--metrics", "--json"],
        ["scan", "--full"],
    ):
        code, output, _ = command(*arguments, "--root", root, now=LATER)
        # An export of metrics reports missing ones.
        assert code in ({0, 3} if "--metrics" in arguments else {0})
        assert "good" in output or arguments[0] == "scan"
    assert command("gc", "--older-than", "0s", "--root", root, now=LATER)[0] == 0
    for path in sorted(root.iterdir()):
        for arguments in (
            ["show", f"{path}/"],
            ["show", f"{path}/", "--json"],
            ["tail", f"{path}/", "--no-follow"],
            ["diff", f"{path}/", f"{root}/good/"],
        ):
            code, output, errors = command(*arguments, "--root", root, now=LATER)
            assert code in {0, 1}
            assert output or errors or arguments[0] == "tail"
        command("wait", "summary.loss < 0", f"{path}/", "--timeout", "0", "--root", root, now=LATER)


@pytest.mark.parametrize("name", [*JSON_FILES, *LINE_FILES, *OTHER_FILES])
def test_a_file_with_other_content(whole, root, name):
    """An empty, torn, binary or deeply nested file, a folder, FIFO, device or link costs at most its own run."""
    for how, content in CONTENTS.items():
        damage(whole, root, name, how).write_bytes(content)
    secret = root.parent / "secret.json"
    secret.write_text('{"run_id": "secret"}\n')
    for how, make in {
        "folder": lambda path: path.mkdir(),
        "fifo": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "link": lambda path: path.symlink_to(secret),
        "loop": lambda path: path.symlink_to(path.name),
        "gone": lambda path: None,
    }.items():
        path = damage(whole, root, name, how)
        path.unlink()
        make(path)

    check_all(root, whole)


@pytest.mark.parametrize("name", [*JSON_FILES, *LINE_FILES])
def test_a_value_of_another_type(whole, root, name):
    """Each value in a JSON file may have any type and size."""
    source = next(whole / kind / name for kind in ("full", "killed") if (whole / kind / name).exists())
    lines = source.read_text().splitlines() if name.endswith(".jsonl") else [source.read_text()]
    document = json.loads(lines[0])
    count = 0
    for place in places(document):
        for value in ODD:
            # A different odd value for each place keeps the number of runs small; all are tried in turn.
            if (count := count + 1) % ONE_IN:
                continue
            changed = json.loads(lines[0])
            put(changed, place, value)
            damage(whole, root, name, f"run{count}").write_text(
                "\n".join([json.dumps(changed), *lines[1:], ""])
            )

    assert count >= ONE_IN
    check_all(root, whole)


def places(value, at=()):
    """Returns the places of values in a document."""
    if isinstance(value, dict):
        return [place for key, item in value.items() for place in [(*at, key), *places(item, (*at, key))]][
            :60
        ]
    if isinstance(value, list):
        return [place for key, item in enumerate(value) for place in [(*at, key), *places(item, (*at, key))]][
            :6
        ]
    return []


def put(document, place, value):
    """Puts a value into a document."""
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


def test_an_undamaged_run_is_read_completely(whole, root):
    """This checks the reference for the damaged runs."""
    shutil.copytree(whole, root / "whole")

    with open_runs(root) as runs:
        counts = {run.path.name: len(run.series("loss")) for run in runs}
        full = Run.open(root / "whole/full")

    assert counts == {"full": 5, "killed": 5, "lightning": 2}
    assert {kind: one.count for kind, one in full.record_counts().items()} == {
        "images": 1,
        "audio": 1,
        "point_clouds": 1,
        "tables": 1,
        "histograms": 1,
        "texts": 1,
        "traces": 1,
        "artifacts": 1,
    }
    assert full.damaged_lines() == {}
