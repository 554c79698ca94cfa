"""`CodeSnapshot`: archives the code of a run."""

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

_GIT_TIMEOUT_SECONDS = 30.0
_MAX_FILES = 50_000
_PATTERNS = ("*.py", "*.toml", "*.yaml", "*.yml", "*.json", "*.cfg", "*.ini", "*.txt", "*.sh", "*.md")
# The earliest time of the ZIP format, for reproducible archives.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAX_SHOWN_NAMES = 5


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of files and folders with credentials; case-insensitive, anywhere in a path.
_SECRET_PATTERNS = _words(
    ".env *.env .env.* *.env.* .netrc _netrc .npmrc .pypirc .pgpass .htpasswd .git-credentials"
    " *.pem *.key *.p12 *.pfx *.jks *.keystore *.kdbx *.asc *.gpg *.ppk id_rsa* id_dsa* id_ecdsa* id_ed25519*"
    " .ssh .aws .azure .gnupg .kube .docker .gcloud gcloud .kaggle .huggingface .terraform.d kubeconfig*"
    " *service?account*.json client_secret*.json kaggle.json .dockercfg .envrc .boto .s3cfg .my.cnf"
    " .databrickscfg .vault-token .htaccess .cdsapirc .condarc pip.conf *.tfvars *_history"
)
# Code is included whatever its name: `tokens.py`, `secrets.py`.
_CODE_SUFFIXES = _words(".py .pyi .ipynb .sh .md .rst .c .cc .cpp .cu .h .js .ts")
# Skipped outside of git repositories, as are folders that contain one of the files below.
_SKIPPED_FOLDERS = _words(
    "__pycache__ node_modules venv virtualenv site-packages build dist wandb mlruns lightning_logs multirun"
)
_SKIPPED_FOLDER_MARKERS = ("pyvenv.cfg", "sidecar.json")

# The names of files left out or changed, by reason.
_Report = defaultdict[str, list[str]]


class CodeSnapshot(Callback):
    """Uploads an archive of the code through the destinations when the run starts.

    ```python
    snapshot = CodeSnapshot(patterns=["*.py", "*.yaml"])
    Trainer(..., callbacks=[snapshot], loggers=[Artifacts("store/{run_name}")])
    ```

    In a git repository the archive holds the tracked files, as they are in the working tree. Elsewhere it
    holds the files below the folder, up to 50,000, without hidden files, environments, runs, and folders such
    as `build` and `wandb`. Only files that match a pattern are included, and no large ones: this is for code,
    not for data. A symbolic link is stored as a link and never followed.

    Files named like credentials (`credentials.json`, `token.txt`, `*.pem`, `.env`) are left out. Secrets
    within files are replaced by `[redacted]`: in code the known formats, and quoted strings assigned to a
    secret's name; elsewhere as in `redact_text`.

    Everything left out or changed is reported. If git fails or takes longer than 30 s, there is no archive,
    as it is unknown then which files to ignore.

    Blocks once, on rank 0, for reading, redacting and compressing: about a second for 2 MB. A failure is
    reported, and training continues.

    Args:
        root: the folder. Default: the working directory.
        patterns: shell patterns of file names to include.
        remote_file_name: the name of the archive; placeholders as in `Logger.upload_file`.
        max_file_bytes: the largest size of a file.
        max_bytes: the largest total size; files later in the alphabet are left out.
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
        self._git_seconds = _GIT_TIMEOUT_SECONDS

    def init(self, state: State, logger: Logger) -> None:
        """Writes and uploads the archive."""
        if state.rank != 0 or not logger.has_file_upload_destination():
            return
        try:
            root = (self._root or Path()).absolute()
        except OSError as error:
            _log.warning("CodeSnapshot could not archive the code: the working directory is gone: %s", error)
            return
        try:
            with tempfile.TemporaryDirectory(prefix="code-") as folder:
                archive = Path(folder) / "code.zip"
                report = self._write(root, archive)
                logger.upload_file(self._remote_file_name, archive, overwrite=True)
        except OSError as error:
            _log.warning("CodeSnapshot could not archive the code in %s: %s", root, redact_text(str(error)))
            return
        for reason, names in report.items():
            more = ", …" if len(names) > _MAX_SHOWN_NAMES else ""
            _log.warning(
                "CodeSnapshot %s (%d): %s",
                reason,
                len(names),
                _escaped(", ".join(names[:_MAX_SHOWN_NAMES])) + more,
            )

    def _write(self, root: Path, archive: Path) -> _Report:
        report, total = _Report(list), 0
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for name in sorted(set(_files(root, self._git_seconds, self._is_wanted, report))):
                if not self._is_wanted(name):
                    continue
                try:
                    entry, content = _read(root, name, min(self._max_file_bytes, self._max_bytes - total))
                except FileNotFoundError:
                    continue  # Tracked, but deleted.
                except OSError as error:
                    reason = str(error) if isinstance(error, _LeftOutError) else "that cannot be read"
                    report[f"left out files {reason}"].append(name)
                    continue
                total += len(content)
                kept = _without_secrets(name, content)
                if kept != content:
                    report["took secrets out of files"].append(name)
                file.writestr(entry, kept, zipfile.ZIP_DEFLATED)
        return report

    def _is_wanted(self, name: str) -> bool:
        return any(PurePosixPath(name).match(pattern) for pattern in self._patterns)


class _LeftOutError(OSError):
    """A file that is not archived, with the reason."""


def _read(root: Path, name: str, max_bytes: int) -> tuple[zipfile.ZipInfo, bytes]:
    """Returns a ZIP entry and its content; for a symbolic link, its target.

    Raises:
        OSError: named like a secret, not a regular file or link, too large, or outside the root by way of a
            link.
    """
    if _is_named_like_a_secret(name):
        raise _LeftOutError("that are named like secrets")
    path = root / name
    entry = zipfile.ZipInfo(_escaped(name), _ZIP_EPOCH)
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(root)):
        raise OSError("its folder is outside the root")
    if path.is_symlink():
        entry.create_system = 3  # Unix; otherwise the mode is ignored.
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        return entry, os.fsencode(path.readlink())
    # Does not block on a FIFO.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _LeftOutError("that are too large")
    return entry, content


def _escaped(name: str) -> str:
    """Returns a name with escapes for bytes that are not UTF-8, which neither ZIP files nor logs can hold."""
    return name.encode("utf-8", "backslashreplace").decode()


def _is_named_like_a_secret(name: str) -> bool:
    path = PurePosixPath(name.lower())
    if any(fnmatch.fnmatchcase(part, pattern) for part in path.parts for pattern in _SECRET_PATTERNS):
        return True
    stem = PurePosixPath(name).name.split(".", 1)[0]
    return path.suffix not in _CODE_SUFFIXES and redact({stem: "x1"}) != {stem: "x1"}


def _without_secrets(name: str, content: bytes) -> bytes:
    # Bytes that are not UTF-8 survive the round trip.
    text = content.decode("utf-8", "surrogateescape")
    is_code = PurePosixPath(name.lower()).suffix in _CODE_SUFFIXES
    return redact_text(text, only_literals=is_code).encode("utf-8", "surrogateescape")


def _files(root: Path, seconds: float, is_wanted: Callable[[str], bool], report: _Report) -> Iterator[str]:
    """Yields the relative POSIX paths of the files of a folder."""
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
        folders[:] = sorted(name for name in folders if _is_code_folder(Path(folder) / name))
        for name in (*names, *links):
            count += 1
            if count > _MAX_FILES or time.monotonic() > deadline:
                report[f"stopped after {_MAX_FILES:,} files; choose a smaller root"].append(folder)
                return
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_code_folder(folder: Path) -> bool:
    return not (
        folder.name.startswith(".")
        or folder.name in _SKIPPED_FOLDERS
        or folder.name.endswith(".egg-info")
        or any((folder / name).exists() for name in _SKIPPED_FOLDER_MARKERS)
    )


def _git_files(root: Path, seconds: float, *which: str) -> list[str] | None:
    """Returns the files that git lists, or None without a repository or git.

    Raises:
        OSError: git failed or timed out.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", *which]
    try:
        done = subprocess.run(  # noqa: S603  # fixed
            command, capture_output=True, timeout=seconds, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except subprocess.TimeoutExpired as error:
        # Falling back to all files would include ignored ones.
        raise TimeoutError(f"git ls-files timed out after {seconds:g} s.") from error
    except OSError:
        return None
    if done.returncode == 0:
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    message = done.stderr.decode(errors="replace").strip()
    if "not a git repository" in message or "cannot change to" in message:
        return None
    raise OSError(f"git ls-files failed: {message[:500]}")
