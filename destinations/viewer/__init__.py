"""The page of `destinations view`: runs in a browser, live and local. Needs the extra `viewer`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import Viewer

__all__ = ["Viewer"]


def __getattr__(name: str) -> Any:
    # The command line reads its options without importing the server.
    if name == "Viewer":
        from .server import Viewer

        return Viewer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
