"""`GrowingCsv`: a CSV that grows by lines, for what must be on disk before its line is full."""

import os
from pathlib import Path


def cell_of(text: str) -> str:
    """Returns a text as a cell of a CSV, in one line."""
    text = " ".join(text.split())[:200]
    return '"' + text.replace('"', '""') + '"' if '"' in text or "," in text else text


class GrowingCsv:
    """A CSV that grows by lines, of which the last one may be written again.

    Args:
        path: of the file; created with its header if it is empty.
        header: its first line.
    """

    def __init__(self, path: Path, header: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._end = os.fstat(self._fd).st_size
        self._width = 0
        if not self._end:
            self.write(header, is_last=True)
        elif os.pread(self._fd, 1, self._end - 1) != b"\n":
            self.write("", is_last=True)

    def write(self, text: str, *, is_last: bool) -> None:
        """Writes a line in place of one that is not the last; spaces cover the rest of a longer one.

        Args:
            text: the line.
            is_last: whether it stays as it is.
        """
        data = text.encode("utf-8", "backslashreplace").ljust(self._width) + b"\n"
        view, at = memoryview(data), self._end
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done
        self._width = len(data) - 1
        if is_last:
            self._end, self._width = self._end + len(data), 0

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
