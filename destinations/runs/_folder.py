"""What one folder says of its run, without any index."""

from pathlib import Path
from typing import Any

from destinations.run_directory.layout import HEARTBEAT, HPARAMS, SIDECAR, metrics_name

from ._lines import number_of, read_object
from .errors import RunNotFoundError
from .record import RunRecord

__all__ = ["read_folder"]


def read_folder(path: Path) -> RunRecord:
    """Reads a run.

    Raises:
        RunNotFoundError: there is no run in the folder.
    """
    path = path.absolute()
    sidecar = read_object(path / SIDECAR)
    try:
        heartbeat_at: float | None = (path / HEARTBEAT).stat().st_mtime
    except OSError:
        heartbeat_at = None
    if not sidecar:
        if not (path / metrics_name(0)).exists():
            raise RunNotFoundError(str(path))
        flat = _flat("", _yaml(path / HPARAMS))
        return RunRecord(path, path.name, "lightning-csv", "unknown", hparams=flat, heartbeat_at=heartbeat_at)
    tags = sidecar.get("tags")
    summary = sidecar.get("summary") or {}
    return RunRecord(
        path,
        str(sidecar.get("run_id") or path.name),
        "run-directory" if "format_version" in sidecar else "stable-pretraining",
        str(sidecar.get("status") or "unknown"),
        created_at=number_of(sidecar.get("created_at")),
        ended_at=number_of(sidecar.get("ended_at")),
        updated_at=number_of(sidecar.get("updated_at")),
        tags=tuple(map(str, tags)) if isinstance(tags, list) else (),
        notes=str(sidecar.get("notes") or ""),
        display_name=sidecar.get("display_name"),
        archived=sidecar.get("archived") is True,
        hparams=dict(sidecar.get("hparams") or {}),
        summary={name: value for name, value in summary.items() if isinstance(value, int | float)},
        checkpoint_path=sidecar.get("checkpoint_path"),
        heartbeat_at=heartbeat_at,
    )


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flat(f"{prefix}.{key}" if prefix else str(key), item)
        return found
    return {prefix: value}
