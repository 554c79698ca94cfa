"""The table of fields: a field declared in `RunRecord` is known everywhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

USE_THE_FIELD = """
import csv, io, json, sys
from destinations.runs import open_runs
from destinations.runs.commands.fields import OWN_FIELDS, check_fields, field_of
from destinations.runs.export import export_runs

with open_runs(sys.argv[1], cache=sys.argv[2]) as runs:
    found = runs.query(where="cluster == 'north'")
    stream = io.StringIO()
    export_runs(runs.query(sort_by="cluster"), stream, format="csv")
    check_fields(["cluster"], [], [])
    print(json.dumps({
        "filtered": [run.run_id for run in found],
        "sorted": [run.run_id for run in runs.query(sort_by="cluster")],
        "compared": runs.compare(["a", "b"])["cluster"],
        "flat": [row["cluster"] for row in runs.to_dicts(sort_by="run_id")],
        "exported": [row["cluster"] for row in csv.DictReader(stream.getvalue().splitlines())],
        "column": field_of(found[0].record, "cluster", 0.0),
        "is_column": "cluster" in OWN_FIELDS,
    }))
"""


def test_a_field_is_added_in_one_module(tmp_path):
    """The index, filters, sorting, `compare`, `to_dicts`, exports and columns follow from `record.py`."""
    for package in ("destinations", "events", "uploads"):
        shutil.copytree(ROOT / package, tmp_path / "code" / package)
    module = tmp_path / "code" / "destinations" / "runs" / "record.py"
    text = module.read_text(encoding="utf-8")
    before = "    problem: str | None ="
    added = '    cluster: str | None = _field("text", default=None)\n'
    assert before in text
    module.write_text(text.replace(before, added + before), encoding="utf-8")
    for run_id, cluster in (("a", "south"), ("b", "north")):
        folder = tmp_path / "runs" / run_id
        folder.mkdir(parents=True)
        sidecar = {"run_id": run_id, "status": "completed", "format_version": 1, "cluster": cluster}
        (folder / "sidecar.json").write_text(json.dumps(sidecar), encoding="utf-8")

    result = subprocess.run(
        [sys.executable, "-c", USE_THE_FIELD, str(tmp_path / "runs"), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "code")},
    )

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "filtered": ["b"],
        "sorted": ["b", "a"],
        "compared": {"a": "south", "b": "north"},
        "flat": ["south", "north"],
        "exported": ["north", "south"],
        "column": "north",
        "is_column": True,
    }
