"""`destinations doctor`: checks the installation, and reports what will not work and what to do.

Uses only the disk, unless a store is given.
"""

import contextlib
import difflib
import importlib
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.guard import PROJECT, require_own

__all__ = ["Check", "checks"]

_FREE_GIB = 1
_GIB = 1 << 30
_MAX_SKEW_SECONDS = 5.0
# 2025-01-01, before the first release.
_OLDEST_TIME = 1_735_689_600
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(\[[^\]]*\])?\s*(?P<limits>[<>=!~][^;]*)?;?.*?extra == ['\"](?P<extra>[\w-]+)['\"]"
)
_MINIMUM = re.compile(r">=\s*([\d.]+)")
# Extras for those who develop this project.
_OURS = frozenset({"all", "dev", "docs"})


@attrs.frozen
class Check:
    """The result of a check.

    Attributes:
        name: the subject of the check.
        state: "ok", "warning" (something optional will not work) or "problem".
        text: the finding, and what to do.
    """

    name: str
    state: str
    text: str


def checks(root: Path, store: str | None = None, extras: Sequence[str] = ()) -> Iterator[Check]:
    """Yields the results.

    Args:
        root: the folder of the runs.
        store: a URI or path; it is asked for an object.
        extras: names of extras that the user needs: one that is not installed is a problem.
    """
    for check in (_python, _packages, _torch, _ranks):
        yield check()
    yield from _extras(extras)
    yield _disk(root)
    yield _spool()
    yield _clock(root)
    yield from _credentials(store or "")
    if store is not None:
        yield _store(store)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} at {sys.executable}")


def _packages() -> Check:
    try:
        for name in ("events", "uploads"):
            require_own(name)
    except ImportError as error:
        return Check("packages", "problem", str(error))
    modules = map(importlib.import_module, ("destinations", "events", "uploads"))
    places = {Path(str(module.__file__)).parent.parent for module in modules}
    if len(places) > 1:
        return Check(
            "packages",
            "problem",
            f"destinations, events and uploads are in several places: {', '.join(map(str, sorted(places)))}. "
            f"Install {PROJECT} again: pip install --force-reinstall --no-deps {PROJECT}",
        )
    (place,) = places
    version = _version_of(PROJECT)
    if version is None:
        return Check(
            "packages",
            "warning",
            f"in {place}, but not installed: extras and entry points are unknown. "
            f"Run: pip install -e {place}",
        )
    return Check("packages", "ok", f"{PROJECT} {version} in {place}")


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "problem", f"cannot be imported: {error}. Trainer and Run need it.")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Check("torch", "ok", f"{torch.__version__}, {devices} CUDA devices")


def _ranks() -> Check:
    from events import find_ranks

    try:
        found = find_ranks()
    except ValueError as error:
        return Check("ranks", "problem", str(error))
    text = f"rank {found.rank} of {found.world_size}, local rank {found.local_rank}: {found.source}"
    return Check("ranks", "ok", text)


def _extras(wanted: Sequence[str]) -> Iterator[Check]:
    """Yields complete extras, missing extras, and each extra that is incomplete or too old.

    A missing extra is reported as a problem only if it is `wanted`.
    """
    try:
        requirements = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return
    # By extra, each package with its problem, or "".
    extras: dict[str, dict[str, str]] = {}
    for requirement in requirements:
        found = _REQUIREMENT.fullmatch(requirement.strip())
        if found is not None and found["extra"] not in _OURS and found["name"] != PROJECT:
            problem = _problem_of(found["name"], found["limits"] or "")
            extras.setdefault(found["extra"], {})[found["name"]] = problem
    complete = [extra for extra, packages in extras.items() if not any(packages.values())]
    absent = [extra for extra, packages in extras.items() if not any(map(_version_of, packages))]
    left_out = [extra for extra in absent if extra not in wanted]
    if complete:
        yield Check("extras", "ok", ", ".join(complete))
    if left_out:
        yield Check(
            "not installed",
            "ok",
            f"{', '.join(left_out)}. To add one: pip install {' '.join(extras[left_out[0]])}",
        )
    for extra in sorted(set(wanted) - set(extras)):
        near = difflib.get_close_matches(extra, extras, n=1)
        meant = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(extras)}."
        yield Check(f"extra {extra}", "problem", f"no extra has this name. {meant}")
    for extra, packages in extras.items():
        problems = {package: problem for package, problem in packages.items() if problem}
        if problems and extra not in left_out:
            yield Check(
                f"extra {extra}",
                "problem" if extra in wanted else "warning",
                f"{', '.join(problems.values())}. Run: pip install --upgrade {' '.join(problems)}",
            )


def _problem_of(package: str, limits: str) -> str:
    """Returns the problem of an installed package, or ""."""
    version = _version_of(package)
    if version is None:
        return f"{package} is not installed"
    minimum = _MINIMUM.search(limits)
    if minimum and _numbers(version) < _numbers(minimum[1]):
        return f"{package} {version} is older than {minimum[1]}"
    return ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3]]


def _existing(path: Path) -> Path:
    """Returns the path, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def _disk(root: Path) -> Check:
    from uploads.disk import file_system_of, is_network_file_system

    folder = _existing(root)
    if not os.access(folder, os.W_OK):
        return Check("disk", "problem", f"{folder} is not writable. Choose another folder for runs.")
    free = shutil.disk_usage(folder).free / _GIB
    kind = file_system_of(folder)
    text = f"{free:.1f} GiB free in {folder}"
    if free < _FREE_GIB:
        return Check("disk", "problem", f"{text}. Delete what you can spare: destinations runs gc")
    if kind and is_network_file_system(kind):
        return Check("disk", "warning", f"{text}, a network file system ({kind}): logging is slower there.")
    return Check("disk", "ok", text)


def _spool() -> Check:
    """Checks the folder of uploads without `spool=`, which may be in a read-only home."""
    from uploads import default_spools

    root = next(default_spools("")).parents[1]
    nearest = next(one for one in (root, *root.parents) if os.path.lexists(one))
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Check("spool", "ok", f"uploads wait in {root}")
    text = f"{nearest} is not a writable folder: uploads need Artifacts(..., spool=FOLDER), or UPLOADS_HOME"
    return Check("spool", "warning", f"{text}=FOLDER in the environment.")


def _clock(root: Path) -> Check:
    now = time.time()
    if now < _OLDEST_TIME:
        return Check("clock", "problem", f"it says {time.ctime(now)}: stores refuse requests. Set the clock.")
    folder = _existing(root)
    skew = 0.0
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        skew = os.fstat(file.fileno()).st_mtime - now
    if abs(skew) > _MAX_SKEW_SECONDS:
        return Check(
            "clock",
            "warning",
            f"the file server of {folder} is {skew:+.0f} s off: running runs may be shown as killed. "
            "Synchronise the clocks.",
        )
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)))


def _credentials(store: str) -> Iterator[Check]:
    """Yields where credentials are found, by name only. A store in S3 without them is a warning."""
    home = Path.home()
    aws = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / ".aws/credentials"))
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        yield Check("s3", "ok", "credentials in AWS_ACCESS_KEY_ID")
    elif aws.is_file() or (home / ".aws/config").is_file():
        profile = os.environ.get("AWS_PROFILE", "default")
        yield Check("s3", "ok", f"profile {profile!r} of {aws}")
    else:
        text = "no credentials found: s3:// works only on a machine with a role. Run: aws configure"
        yield Check("s3", "warning" if store.startswith("s3:") else "ok", text)
    key = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if key and not Path(key).is_file():
        yield Check("gs", "warning", f"GOOGLE_APPLICATION_CREDENTIALS names {key!r}, which is no file.")
    if _version_of("wandb") and not (os.environ.get("WANDB_API_KEY") or _is_in_netrc("api.wandb.ai")):
        yield Check("wandb", "warning", "no API key found. Run: wandb login, or set WANDB_MODE=offline")


def _version_of(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_in_netrc(host: str) -> bool:
    import netrc

    try:
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def _store(uri: str) -> Check:
    from uploads import UploadError, open_store, redact_text

    try:
        store: Any = open_store(uri)
        store.head("destinations-doctor")
    except (UploadError, OSError, ValueError, ImportError) as error:
        return Check("store", "problem", redact_text(f"{uri}: {error}"))
    return Check("store", "ok", redact_text(f"{store.uri()} answers"))
