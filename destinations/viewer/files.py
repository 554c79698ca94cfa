"""Serves files of runs, which are untrusted, and files of the page."""

import os
from pathlib import Path
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from destinations.runs.files import path_inside
from uploads.disk import UnreadableError, open_regular

__all__ = ["TYPES", "OpenFile", "page_file", "run_file"]

STATIC = Path(__file__).parent / "static"

# Types that browsers show without running anything. SVG and HTML may have scripts and can only be saved.
TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".bmp": "image/bmp",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".flac": "audio/flac",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".csv": "text/plain; charset=utf-8",
    ".json": "text/plain; charset=utf-8",
    ".jsonl": "text/plain; charset=utf-8",
    ".log": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".yaml": "text/plain; charset=utf-8",
}
_OTHER = "application/octet-stream"
_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".ico": "image/x-icon",
}


class OpenFile(FileResponse):
    """A response with an open file. It supports `Range` requests and closes the file.

    Args:
        fd: the descriptor; the response owns it.
        media_type: the type of the content.
        headers: further headers.
    """

    def __init__(self, fd: int, media_type: str, headers: dict[str, str] | None = None) -> None:
        self._fd = fd
        # By its descriptor, because the path could be another file by now.
        super().__init__(
            f"/dev/fd/{fd}", media_type=media_type, stat_result=os.fstat(fd), headers=headers or {}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left: int | None = None

        async def send_as_long(message: Message) -> None:
            """Sends as many bytes as the header says, even if the file has grown."""
            nonlocal left
            if message["type"] == "http.response.start":
                left = int(Headers(raw=message["headers"])["content-length"])
            elif left is not None:
                body = message["body"][:left]
                left -= len(body)
                has_more = message.get("more_body", False) and left > 0
                message = {**message, "body": body, "more_body": has_more}
                left = left if has_more else None
            else:
                return
            await send(message)

        try:
            await super().__call__(scope, receive, send_as_long)
        finally:
            os.close(self._fd)


def run_file(run_dir: Path, relative: str) -> OpenFile:
    """Returns a file of a run.

    Raises:
        UnreadableError: the run's store can't read it.
        FileNotFoundError: the file is missing, hidden, a link, not regular, or outside the run.
    """
    try:
        path = path_inside(run_dir, relative)
        is_hidden = any(part.startswith(".") for part in path.relative_to(run_dir).parts)
        fd = -1 if is_hidden else open_regular(path)
    except UnreadableError:
        raise
    except (OSError, ValueError):
        fd = -1
    if fd < 0:
        raise FileNotFoundError(f"no file {relative!r:.200} in this run.")
    media_type = TYPES.get(path.suffix.lower(), _OTHER)
    headers = {"Content-Security-Policy": "default-src 'none'; sandbox"}
    if media_type == _OTHER:
        headers["Content-Disposition"] = f"attachment; filename*=utf-8''{quote(path.name, safe='')}"
    return OpenFile(fd, media_type, headers)


def page_file(name: str) -> OpenFile:
    """Returns a file of the page itself.

    Raises:
        FileNotFoundError: the page has no such file.
    """
    path = STATIC / name
    media_type = _PAGE_TYPES.get(path.suffix)
    if "/" in name or "\0" in name or name.startswith(".") or media_type is None:
        raise FileNotFoundError(f"no file {name!r:.200} of the page.")
    return OpenFile(open_regular(path), media_type)
