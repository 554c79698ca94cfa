"""`CodeSnapshot`: the code of a run, kept with it."""

import logging
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from .callback import Callback
from .logger import Logger
from .state import State

__all__ = ["CodeSnapshot"]

_log = logging.getLogger("events")

_GIT_SECONDS = 30.0
_PATTERNS = ("*.py", "*.toml", "*.yaml", "*.yml", "*.json", "*.cfg", "*.ini", "*.txt", "*.sh", "*.md")
# The earliest time that a ZIP file can hold: the same code is the same file.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


class CodeSnapshot(Callback):
    """Hands an archive of the code to the destinations that take files, when the run begins.

    In a git repository the files are those that git tracks, as they are now, and those that it does not ignore; elsewhere all
    below the folder but hidden ones. Only what fits a pattern is taken, and no large file: this is for code, not for data.
    What was left out for its size, or could not be read, is reported. Where git takes longer than 30 s there is no archive: which
    files it ignores is not known then.

    Blocks for as long as reading and compressing takes, once, on rank 0; training goes on where it fails.

    Args:
        root: the folder; the working directory where none is given.
        patterns: names of files, as a shell would match them.
        remote_file_name: what the archive is called; placeholders as in `Logger.upload_file`.
        max_file_bytes: how large a file may be.
        max_bytes: how large all may be together; what comes later in the alphabet is left out.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        patterns: Sequence[str] = _PATTERNS,
        remote_file_name: str = "{run_name}/code.zip",
        max_file_bytes: int = 1 << 20,
        max_bytes: int = 50 << 20,
    ) -> None:
        self._root = None if root is None else Path(root)
        self._patterns = tuple(patterns)
        self._remote_file_name = remote_file_name
        self._max_file_bytes = max_file_bytes
        self._max_bytes = max_bytes
        self._git_seconds = _GIT_SECONDS

    def init(self, state: State, logger: Logger) -> None:
        """Makes the archive and hands it on."""
        if state.rank != 0 or not logger.has_file_upload_destination():
            return
        root = (self._root or Path()).absolute()
        try:
            with tempfile.TemporaryDirectory(prefix="code-") as folder:
                archive = Path(folder) / "code.zip"
                left_out = self._write(root, archive)
                logger.upload_file(self._remote_file_name, archive, overwrite=True)
        except OSError as error:
            _log.warning("CodeSnapshot could not keep the code in %s: %s", root, error)
            return
        if left_out:
            _log.warning(
                "CodeSnapshot left out %d files, too large or not readable: %s",
                len(left_out),
                ", ".join(left_out[:5]) + (", …" if len(left_out) > 5 else ""),  # noqa: PLR2004
            )

    def _write(self, root: Path, archive: Path) -> list[str]:
        left_out, total = [], 0
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for name in sorted(set(_files(root, self._git_seconds))):
                if not any(PurePosixPath(name).match(pattern) for pattern in self._patterns):
                    continue
                try:
                    size = (root / name).stat().st_size
                    if size > self._max_file_bytes or total + size > self._max_bytes:
                        left_out.append(name)
                        continue
                    content = (root / name).read_bytes()
                except OSError:
                    left_out.append(name)
                    continue
                total += size
                file.writestr(zipfile.ZipInfo(name, _ZIP_EPOCH), content, zipfile.ZIP_DEFLATED)
        return left_out


def _files(root: Path, git_seconds: float) -> Iterator[str]:
    """Returns the names of files below a folder, with "/" between their parts."""
    tracked = _git_files(root, git_seconds)
    if tracked is not None:
        yield from (name for name in tracked if (root / name).is_file())
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _git_files(root: Path, seconds: float) -> list[str] | None:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=True)  # noqa: S603  # fixed
    except subprocess.TimeoutExpired as error:
        # All files would be taken otherwise, those that git is to ignore among them.
        raise TimeoutError(
            f"git must list its files within {seconds:g} s, got nothing until then."
        ) from error
    except (OSError, subprocess.SubprocessError):
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
