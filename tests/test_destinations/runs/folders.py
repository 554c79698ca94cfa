"""Handmade run folders in the formats of `RunDirectory`, stable-pretraining and Lightning."""

import json
import os

__all__ = ["HOUR", "NOW", "age", "clock", "write_lightning", "write_run"]

NOW = 1_700_000_000.0
HOUR = 3600.0


def clock():
    """The current time in most tests."""
    return NOW


def write_run(folder, run_id=None, *, old=True, beat=None, **fields):
    """Writes a run folder; `format_version=None` makes it one of stable-pretraining.

    Args:
        folder: the run.
        run_id: its id; by default the name of the folder.
        old: whether the files look an hour old, so that a scan trusts their times.
        beat: time of the heartbeat.
        fields: fields of the sidecar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "run_id": run_id or folder.name,
        "status": "completed",
        "created_at": NOW - HOUR,
        "format_version": 1,
    }
    content |= fields
    content = {name: value for name, value in content.items() if value is not None}
    temporary = folder / "sidecar.tmp"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(folder / "sidecar.json")
    if beat is not None:
        (folder / "heartbeat").touch()
        os.utime(folder / "heartbeat", (beat, beat))
    if old:
        age(folder)
    return folder


def write_lightning(folder, csv="epoch,loss,step\r\n0,0.5,1\r\n", hparams=None):
    """Writes a folder of Lightning's `CSVLogger`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(csv, encoding="utf-8", newline="")
    if hparams is not None:
        (folder / "hparams.yaml").write_text(hparams, encoding="utf-8")
    return folder


_ages = iter(range(10**9))


def age(*folders):
    """Makes folders and their sidecars look an hour old, each slightly younger than the previous one."""
    for folder in folders:
        then = NOW - HOUR + next(_ages)
        for path in (folder / "sidecar.json", folder):
            if path.exists():
                os.utime(path, (then, then))
