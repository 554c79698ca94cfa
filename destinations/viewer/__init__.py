"""The page of `destinations view`: runs in a browser, live and local. Needs starlette and uvicorn."""

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
            f"the viewer needs a package that is not installed: {error}. Run: pip install starlette uvicorn",
            name=error.name,
        ) from error
    return getattr(server, name)
