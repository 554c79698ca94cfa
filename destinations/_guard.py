"""Makes sure that `events` and `uploads` are ours: both names are plain, and somebody else's may come first."""

import importlib

__all__ = ["require_own"]

PROJECT = "training-destinations"


def require_own(name: str) -> None:
    """Refuses a module of that name that is not this project's.

    Raises:
        ImportError: another package, or a file of the user's, was found first.
    """
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
