"""Checks that `events` and `uploads` are ours: another package or file of that name may come first.

The packages are inspected without an import, which keeps `import destinations` fast.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

__all__ = ["require_own"]

PROJECT = "training-destinations"
_MARK = f'__project__ = "{PROJECT}"'


def require_own(name: str) -> None:
    """Raises if the module of that name is not this project's.

    Raises:
        ImportError: another package, or a file of the user, was found first.
    """
    if name not in sys.modules and _has_mark(name):
        return
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"package {name!r} must be importable beside 'destinations', got: {error}. "
            f"Install {PROJECT} again: pip install --force-reinstall --no-deps {PROJECT}",
            name=name,
        ) from error
    if getattr(module, "__project__", None) != PROJECT:
        found = getattr(module, "__file__", None) or next(
            iter(getattr(module, "__path__", ())), "an unknown place"
        )
        raise ImportError(
            f"package {name!r} must be the one that comes with {PROJECT}, got {found}. "
            f"Rename that file, or uninstall that package, then install {PROJECT} again.",
            name=name,
            path=found,
        )


def _has_mark(name: str) -> bool:
    """Returns whether the source that an import would run has our mark."""
    try:
        spec = importlib.util.find_spec(name)
        return bool(spec and spec.origin and _MARK in Path(spec.origin).read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return False
