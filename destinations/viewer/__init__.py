"""The page of `destinations view`: runs in a browser, live and local. Needs the extra `viewer`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import Viewer, view_run

__all__ = ["Viewer", "view_run"]


def __getattr__(name: str) -> Any:
    # The command line reads its options without importing the server.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import server
    except ImportError as error:
        raise ImportError(
            f"the page needs a package that is not installed: {error}. "
            'Run: pip install "training-destinations[viewer]"',
            name=error.name,
        ) from error
    return getattr(server, name)
