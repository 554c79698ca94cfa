"""`CodeSnapshot`: the code of a run, kept with it."""

import fnmatch
import logging
import os
import stat
import subprocess
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from events.callback import Callback
from events.logger.logger import Logger
from events.redaction import redact, redact_text
from events.state import State

__all__ = ["CodeSnapshot"]

_log = logging.getLogger("events")

_LIST_SECONDS = 30.0
_MOST_FILES = 50_000
_PATTERNS = ("*.py", "*.toml", "*.yaml", "*.yml", "*.json", "*.cfg", "*.ini", "*.txt", "*.sh", "*.md")
# The earliest time that a ZIP file can hold: the same code is the same file.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_SHOWN_NAMES = 5


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Where programs keep keys; anywhere in a path, without regard to case.
_SECRET_PATTERNS = _words(
    ".env *.env .env.* *.env.* .netrc _netrc .npmrc .pypirc .pgpass .htpasswd .git-credentials"
    " *.pem *.key *.p12 *.pfx *.jks *.keystore *.kdbx *.asc *.gpg *.ppk id_rsa* id_dsa* id_ecdsa* id_ed25519*"
    " .ssh .aws .azure .gnupg .kube .docker kubeconfig* *service?account*.json client_secret*.json"
)
# What is code is taken whatever it is called: `tokens.py`, `secrets.py`.
_CODE_SUFFIXES = _words(".py .pyi .ipynb .sh .md .rst .c .cc .cpp .cu .h .js .ts")
# Not looked into where git does not say what belongs to the code; nor what has one of these files.
_FOLDERS_LEFT_OUT = _words(
    "__pycache__ node_modules venv virtualenv site-packages build dist wandb mlruns lightning_logs multirun"
)
_FILES_OF_OTHER_FOLDERS = ("pyvenv.cfg", "sidecar.json")

# By reason, the names of files that are not in an archive, or not as they are.
_Report = defaultdict[str, list[str]]


class CodeSnapshot(Callback):
    """Hands an archive of the code to the destinations that take files, when the run begins.

    In a git repository the files are those that git tracks, as they are now. Elsewhere they are those below
    the folder, without hidden ones, environments, runs, and folders such as `build` and `wandb`, up to
    50,000. Only what fits a pattern is taken, and no large
    file: this is for code, not for data. A symbolic link is kept as a link, and never followed.

    Files that are named like secrets (`credentials.json`, `token.txt`, `*.pem`, `.env`) are left out. Secrets
    inside the others are replaced by `[redacted]`: in code the known formats and quoted strings that are
    assigned to a secret's name, elsewhere as in `redact_text`.

    All that was left out or changed is reported. Where git fails, or takes longer than 30 s, there is no
    archive: what belongs to the code is not known then.

    Blocks for as long as reading, searching for secrets and compressing takes, about a second for 2 MB, once,
    on rank 0; training goes on where it fails.

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
        self._git_seconds = _LIST_SECONDS

    def init(self, state: State, logger: Logger) -> None:
        """Makes the archive and hands it on."""
        if state.rank != 0 or not logger.has_file_upload_destination():
            return
        try:
            root = (self._root or Path()).absolute()
        except OSError as error:
            _log.warning("CodeSnapshot could not keep the code: the working directory is gone: %s", error)
            return
        try:
            with tempfile.TemporaryDirectory(prefix="code-") as folder:
                archive = Path(folder) / "code.zip"
                report = self._write(root, archive)
                logger.upload_file(self._remote_file_name, archive, overwrite=True)
        except OSError as error:
            _log.warning("CodeSnapshot could not keep the code in %s: %s", root, redact_text(str(error)))
            return
        for reason, names in report.items():
            more = ", …" if len(names) > _SHOWN_NAMES else ""
            _log.warning(
                "CodeSnapshot %s (%d): %s", reason, len(names), ", ".join(names[:_SHOWN_NAMES]) + more
            )

    def _write(self, root: Path, archive: Path) -> _Report:
        report, total = _Report(list), 0
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for name in sorted(set(_files(root, self._git_seconds, self._is_wanted, report))):
                if not self._is_wanted(name):
                    continue
                if _is_named_like_a_secret(name):
                    report["left out files that are named like secrets"].append(name)
                    continue
                try:
                    entry, content = _read(root, name, self._max_file_bytes)
                except FileNotFoundError:
                    continue  # Tracked, and deleted.
                except _TooLargeError:
                    report["left out files that are too large"].append(name)
                    continue
                except OSError:
                    report["left out files that cannot be read"].append(name)
                    continue
                if total + len(content) > self._max_bytes:
                    report["left out files that are too large"].append(name)
                    continue
                total += len(content)
                kept = _without_secrets(name, content)
                if kept != content:
                    report["took secrets out of files"].append(name)
                file.writestr(entry, kept, zipfile.ZIP_DEFLATED)
        return report

    def _is_wanted(self, name: str) -> bool:
        return any(PurePosixPath(name).match(pattern) for pattern in self._patterns)


class _TooLargeError(OSError):
    """A file is larger than it may be."""


def _read(root: Path, name: str, max_bytes: int) -> tuple[zipfile.ZipInfo, bytes]:
    """Returns an entry of an archive and its content; for a symbolic link, where it leads.

    Raises:
        OSError: it is no regular file and no link, is too large, or is reached through a link to another
            folder.
    """
    path = root / name
    entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(root)):
        raise OSError("a folder of its path leads out of the root")
    if path.is_symlink():
        entry.create_system = 3  # Unix, without which the mode means nothing.
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        return entry, os.fsencode(path.readlink())
    # Without waiting for a writer, where it is a FIFO.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _TooLargeError
    return entry, content


def _is_named_like_a_secret(name: str) -> bool:
    path = PurePosixPath(name.lower())
    if any(fnmatch.fnmatchcase(part, pattern) for part in path.parts for pattern in _SECRET_PATTERNS):
        return True
    stem = PurePosixPath(name).name.split(".", 1)[0]
    return path.suffix not in _CODE_SUFFIXES and redact({stem: "x1"}) != {stem: "x1"}


def _without_secrets(name: str, content: bytes) -> bytes:
    # Byte for byte what it was, where it is no UTF-8.
    text = content.decode("utf-8", "surrogateescape")
    is_code = PurePosixPath(name.lower()).suffix in _CODE_SUFFIXES
    return redact_text(text, only_literals=is_code).encode("utf-8", "surrogateescape")


def _files(root: Path, seconds: float, is_wanted: Callable[[str], bool], report: _Report) -> Iterator[str]:
    """Yields the names of files below a folder, with "/" between their parts."""
    tracked = _git_files(root, seconds, "--cached")
    if tracked is not None:
        yield from tracked
        others = _git_files(root, seconds, "--others", "--exclude-standard") or ()
        if untracked := sorted(filter(is_wanted, others)):
            report["left out files that git does not track; `git add` them"] = untracked
        return
    deadline, count = time.monotonic() + seconds, 0
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = sorted(name for name in folders if _is_looked_into(Path(folder) / name))
        for name in (*names, *links):
            count += 1
            if count > _MOST_FILES or time.monotonic() > deadline:
                report[f"looked at {_MOST_FILES:,} files at most; give a smaller root"].append(folder)
                return
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_looked_into(folder: Path) -> bool:
    return not (
        folder.name.startswith(".")
        or folder.name in _FOLDERS_LEFT_OUT
        or folder.name.endswith(".egg-info")
        or any((folder / name).exists() for name in _FILES_OF_OTHER_FOLDERS)
    )


def _git_files(root: Path, seconds: float, *which: str) -> list[str] | None:
    """Returns what git lists, or None where there is no repository, or no git.

    Raises:
        OSError: git failed, or took too long.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", *which]
    try:
        done = subprocess.run(  # noqa: S603  # fixed
            command, capture_output=True, timeout=seconds, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except subprocess.TimeoutExpired as error:
        # All files would be taken otherwise, those that git is to ignore among them.
        raise TimeoutError(
            f"git must list its files within {seconds:g} s, got nothing until then."
        ) from error
    except OSError:
        return None
    if done.returncode == 0:
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    said = done.stderr.decode(errors="replace").strip()
    if "not a git repository" in said or "cannot change to" in said:
        return None
    raise OSError(f"git must list its files, got: {said[:500]}")
