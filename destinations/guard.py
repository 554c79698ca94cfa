"""Checks that `events` and `uploads` are ours, since another package or file may have the same name.

It inspects the packages without importing them, which keeps `import destinations` fast.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

__all__ = ["PROJECT", "require_all", "require_own"]

PROJECT = "training-destinations"
_MARK = f'__project__ = "{PROJECT}"'


def require_own(name: str) -> None:
    """Raises if the module with that name isn't this project's.

    Raises:
        ImportError: another package or a user's file comes first.
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
        owner = _owner_of(name)
        cure = (
            f"Run: pip uninstall -y {owner} && pip install --force-reinstall --no-deps {PROJECT}"
            if owner
            else f"Rename that file, or uninstall that package, then install {PROJECT} again."
        )
        raise ImportError(
            f"package {name!r} must be the one that comes with {PROJECT}, got {found}"
            f"{f' of the package {owner}' if owner else ''}. {cure}",
            name=name,
            path=found,
        )


def require_all() -> None:
    """Checks `events` and `uploads`; a command exits with one sentence instead of a traceback.

    Raises:
        ImportError: see `require_own`.
        SystemExit: in `destinations …` and `python -m destinations …`.
    """
    try:
        require_own("events")
        require_own("uploads")
    except ImportError as error:
        if _is_command_line():
            raise SystemExit(str(error)) from None
        raise


def _is_command_line() -> bool:
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":
        arguments = sys.orig_argv
        module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
        return module in {"destinations", "destinations.cli"}
    return Path(program).name in {"destinations", "destinations.exe"}


def _owner_of(name: str) -> str:
    """Returns another installed distribution that has a package with this name, or ""."""
    import importlib.metadata

    owners = importlib.metadata.packages_distributions().get(name, [])
    return next((owner for owner in owners if owner != PROJECT), "")


def _has_mark(name: str) -> bool:
    """Returns whether the source that would be imported has our mark."""
    try:
        spec = importlib.util.find_spec(name)
        return bool(spec and spec.origin and _MARK in Path(spec.origin).read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return False
