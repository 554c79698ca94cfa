"""Lists the checkpoints of a run, on this machine and in stores, and copies one. Needs no torch.

`CheckpointSaver` writes a zip file whose first member, `data.pkl`, begins with a JSON text: the batch, the
epoch and the values of the last evaluation. It is found by its key in the first bytes of the file; nothing is
unpickled, and no code in the file is run. From a store, only the two ends of the file are downloaded.

A sharded checkpoint is a folder. Its `manifest.json` has the same JSON, and the name, size and CRC-32 of each
other file.
"""

import concurrent.futures
import contextlib
import math
import os
import re
import shutil
import stat
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.runs.errors import CheckpointNotFoundError
from destinations.runs.files import clean_text, number_of, read_object, read_object_file, whole_of
from destinations.runs.run import RecordedRun
from uploads import LocalStore, RemoteObject, Store, UploadError, download_file, open_store
from uploads.disk import ABSENT, crc32_of, fsync_path, rename_new

__all__ = ["Checkpoint", "choose", "copy_checkpoint", "list_checkpoints"]

_POINTER_SUFFIX = ".symlink"

_MANIFEST = "manifest.json"
_SHARD_FILE = re.compile(r"__\d{1,6}_0\.distcp|rank-\d{1,6}\.pt|\.metadata")
_MAX_MANIFEST_BYTES = 16 << 20

_MAX_POINTER_BYTES = 1024
_HEAD_BYTES = 256 << 10
# The signature of a zip file, and its last record, which tells where its directory is.
_ZIP, _ZIP_END, _ZIP_END_BYTES = b"PK\3\4", b"PK\5\6", 22
# The key of the summary and the length of its text, as `pickle` writes them.
_SUMMARY = re.compile(rb"X\x07\0\0\0summaryq.X(.{4})", re.DOTALL)
_STORE_THREADS = 8
_SUFFIXES = (".pt", ".pth", ".ckpt")

# The errors that `zipfile` raises for damaged and for hostile files.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


@attrs.frozen
class Checkpoint:
    """A checkpoint in one place.

    Attributes:
        name: the name of the file, or of the folder with shards.
        place: "local", or "store".
        path: the path or the URI of the file, or of the manifest of shards.
        size: bytes of all files.
        step: the number of batches trained before it; None if the file lacks it.
        epoch: the complete epochs.
        time: when it was saved, in seconds since 1970.
        metrics: the values of the last evaluation, by name.
        best_by: the metric by which the run keeps the best, and "max" or "min"; or None.
        problem: the problem of the file; None if it has none.
        is_latest: whether a pointer names it.
        shards: size and CRC-32 of each file beside the manifest; empty for a single file.
    """

    name: str
    place: str
    path: str
    size: int
    step: int | None = None
    epoch: int | None = None
    time: float | None = None
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    best_by: tuple[str, str] | None = None
    problem: str | None = None
    is_latest: bool = False
    shards: Mapping[str, tuple[int, int]] = attrs.field(factory=dict)


def list_checkpoints(place: RecordedRun | str, warn: Callable[[str], None]) -> list[Checkpoint]:
    """Returns checkpoints, newest first; a local copy comes before one of the same name in a store.

    Args:
        place: a run, a folder of checkpoints, or the URI of one.
        warn: called with a message about each unreadable folder, store or pointer. An unreadable checkpoint
            has a `problem`.
    """
    if isinstance(place, RecordedRun):
        folders, uris = _places(place)
    else:
        folders, uris = ([], [place]) if "://" in place else ([Path(place)], [])
    found: dict[tuple[str, str], Checkpoint] = {}
    places: list[Path | str] = [*folders, *uris]
    for where in places:
        try:
            store = _Folder(where) if isinstance(where, Path) else open_store(where)
            for one in _in_store(store, warn):
                found.setdefault(("local" if isinstance(where, Path) else where, one.name), one)
        except ABSENT:
            continue
        except (UploadError, ValueError, ImportError, OSError) as error:
            warn(f"cannot list the checkpoints in {where}: {error}")
    # A copy that is damaged has no step of its own.
    steps = {one.name: one.step for one in found.values() if one.step is not None}

    def age(one: Checkpoint) -> tuple[int, list[int], str, bool]:
        numbers = [int(digits) for digits in re.findall(r"[0-9]{1,18}", one.name)]
        return steps.get(one.name, -1), numbers, one.name, one.place == "local"

    return sorted(found.values(), key=age, reverse=True)


def choose(
    checkpoints: Iterable[Checkpoint], which: str, by: str | None = None, mode: str | None = None
) -> list[Checkpoint]:
    """Returns the copies of one checkpoint, local copies first.

    Args:
        checkpoints: from `list_checkpoints`.
        which: "best", "latest", or a name.
        by: the metric for "best". Default: the one by which the run keeps the best.
        mode: whether "max" or "min" is better. Default: the run's mode for this metric.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        ValueError: there is no metric to choose by, or no mode.
    """
    known = list(checkpoints)
    if not known:
        raise CheckpointNotFoundError("there is no checkpoint.")
    name = which
    whole = [one for one in known if one.problem is None]
    if which == "latest":
        name = next((one.name for one in whole if one.is_latest), whole[0].name if whole else known[0].name)
    elif which == "best":
        name = _best(whole, by, mode).name
    if found := [one for one in known if one.name == name]:
        return sorted(found, key=lambda one: one.place != "local")
    names = ", ".join(dict.fromkeys(one.name for one in known[:10]))
    raise CheckpointNotFoundError(f"there is no checkpoint {which!r}. There are {names}.")


def _best(checkpoints: list[Checkpoint], by: str | None, mode: str | None) -> Checkpoint:
    kept = next((one.best_by for one in checkpoints if one.best_by is not None), None)
    metric = by or (None if kept is None else kept[0])
    if metric is None:
        raise ValueError("this run keeps no best checkpoint. Name a metric with --by, and --mode max or min.")
    if mode is None:
        if kept is None or kept[0] != metric:
            raise ValueError(
                f"whether more of {metric!r} is better is not known. Add --mode max or --mode min."
            )
        mode = kept[1]
    known = [one for one in checkpoints if not math.isnan(one.metrics.get(metric, math.nan))]
    if not known:
        names = ", ".join(sorted({name for one in checkpoints for name in one.metrics})) or "no values at all"
        raise CheckpointNotFoundError(f"no checkpoint has a value of {metric!r}. They have {names}.")
    sign = 1.0 if mode == "max" else -1.0
    # Among equal ones the older, because `CheckpointSaver` keeps that one.
    return max(known, key=lambda one: (sign * one.metrics[metric], -(one.step or 0)))


def copy_checkpoint(
    copies: list[Checkpoint], target: Path, *, overwrite: bool, warn: Callable[[str], None]
) -> Checkpoint:
    """Copies the first undamaged copy to a file, which appears complete or not at all.

    A download is compared with the size and checksum in the store, and the file with the checksums in it. A
    sharded checkpoint becomes a folder, and each of its files is compared with the manifest.

    Args:
        copies: the copies of one checkpoint, from `choose`.
        target: the file to write, or the folder for shards; its parent folder is created.
        overwrite: whether to replace an existing file; a folder is never replaced.
        warn: called with a message about each damaged copy.

    Returns:
        The copy that was used.

    Raises:
        FileExistsError: the file exists.
        OSError: it cannot be written.
        CheckpointNotFoundError: no copy is whole.
    """
    if target.is_dir():
        raise FileExistsError(f"{target} is a folder. Choose another name.")
    if target.exists() and (copies[0].shards or not overwrite):
        raise FileExistsError(f"{target} exists. Use --overwrite to replace it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.partial")
    for one in copies:
        if one.problem is not None:
            warn(f"{one.path} is not whole: {one.problem}")
            continue
        try:
            if one.shards:
                _copy_shards(one, partial)
                rename_new(str(partial), str(target))
            else:
                _copy_file(one, partial)
                partial.replace(target) if overwrite else rename_new(str(partial), str(target))
        except (UploadError, FileNotFoundError, *_DAMAGE) as error:
            warn(f"{one.path} is not whole: {error}")
        else:
            return one
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                partial.unlink()
    raise CheckpointNotFoundError(f"no copy of {copies[0].name!r} is whole.")


def _copy_file(one: Checkpoint, target: Path) -> None:
    """Copies a checkpoint in one file, and compares every checksum in it."""
    _take(one.path, target)
    with zipfile.ZipFile(target) as archive:
        _check_members(archive, target.stat().st_size)
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"bad CRC-32 of {damaged!r}")
    fsync_path(target)


def _copy_shards(one: Checkpoint, folder: Path) -> None:
    """Copies the files of a sharded checkpoint, the manifest last."""
    folder.mkdir()
    for name, (size, crc32) in one.shards.items():
        _take(_beside(one.path, name), folder / name)
        with (folder / name).open("rb") as file:
            if (found := crc32_of(file.fileno())) != crc32 or file.seek(0, os.SEEK_END) != size:
                raise ValueError(f"{name} has CRC-32 {found:08x}, expected {crc32:08x}")
        fsync_path(folder / name)
    _take(one.path, folder / _MANIFEST)
    fsync_path(folder / _MANIFEST)
    fsync_path(folder)


def _beside(path: str, name: str) -> str:
    """Returns the path or URI of a file beside another one."""
    if "://" not in path:
        return str(Path(path).with_name(name))
    folder, question, query = _parent(path).partition("?")
    return f"{folder}/{name}{question}{query}"


def _take(source: str, target: Path) -> None:
    """Copies a local file, or downloads one."""
    folder = None if "://" in source else Path(source).parent
    name = source if folder is None else Path(source).name
    download_file(name, target, store=folder, progress_bar=False, overwrite=True)


def _check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Raises BadZipFile where members are compressed or overlap, which torch never writes: a zip bomb."""
    members = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in members):
        raise zipfile.BadZipFile("it is compressed, as torch writes no checkpoint")
    if sum(one.file_size for one in members) > size:
        raise zipfile.BadZipFile("its members are larger than the file")


def _places(run: RecordedRun) -> tuple[list[Path], list[str]]:
    """Returns the folders and URIs that have checkpoints of a run."""
    folders = [run.path / "checkpoints"]
    sidecar = read_object_file(run.path / "sidecar.json")
    newest, there = run.checkpoint_path or "", sidecar.get("checkpoint_uris")
    uris = [newest] if "://" in newest else []
    uris += [str(uri) for uri in there if "://" in str(uri)] if isinstance(there, list) else []
    if newest and "://" not in newest:
        folder, known_as = Path(newest).parent, str(sidecar.get("run_dir") or "")
        if Path(newest).name == _MANIFEST:
            folder = folder.parent
        if known_as and folder.is_relative_to(known_as):  # The folder of the run may have been moved.
            folder = run.path / folder.relative_to(known_as)
        elif not folder.is_absolute():
            folder = Path(str(run.environment.get("working_directory") or ".")) / folder
        folders.insert(0, folder)
    folders += sorted({one.path.parent for one in run.artifacts() if one.path.suffix in _SUFFIXES})
    uris = [_parent(uri) if uri.partition("?")[0].endswith(f"/{_MANIFEST}") else uri for uri in uris]
    return list(dict.fromkeys(folders)), list(dict.fromkeys(map(_parent, uris)))


def _parent(uri: str) -> str:
    """Returns the URI of the folder of an object, with the same options."""
    path, question, query = (uri, "", "") if uri.startswith("file:") else uri.partition("?")
    return f"{path.rpartition('/')[0]}{question}{query}"


class _Folder(LocalStore):
    """A folder as a store; it lists its own files and the files of sharded checkpoints in it."""

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        del prefix
        for path in sorted(self.root.iterdir()):
            files = [path]
            with contextlib.suppress(OSError):
                if (path / _MANIFEST).is_file():
                    files = sorted(path.iterdir())
            for one in files:
                with contextlib.suppress(OSError):
                    state = one.lstat()
                    if stat.S_ISREG(state.st_mode):
                        yield RemoteObject(one.relative_to(self.root).as_posix(), state.st_size)

    def uri(self, name: str = "") -> str:
        return str(self.root / name)


def _in_store(store: Store, warn: Callable[[str], object]) -> list[Checkpoint]:
    place = "local" if isinstance(store, _Folder) else "store"
    listed = [one for one in store.list("") if not one.name.startswith(".")]
    objects = [one for one in listed if "/" not in one.name and one.name.endswith(_SUFFIXES)]
    manifests = [one for one in listed if one.name.count("/") == 1 and one.name.endswith(f"/{_MANIFEST}")]
    sizes = {one.name: one.size for one in listed}
    pointers = [name for name in sizes if "/" not in name and name.endswith(_POINTER_SUFFIX)]
    small = [name for name in pointers if sizes[name] <= _MAX_POINTER_BYTES]
    pointed = _targets(small, lambda name: _read_at(store, name, 0, sizes[name]), warn)

    def look(one: RemoteObject) -> Checkpoint:
        found = Checkpoint(
            clean_text(one.name),
            place,
            clean_text(store.uri(one.name)),
            one.size,
            is_latest=one.name in pointed,
        )
        end = max(0, one.size - _ZIP_END_BYTES)
        try:
            head = _read_at(store, one.name, 0, min(one.size, _HEAD_BYTES))
            tail = _read_at(store, one.name, end, one.size - end)
        except (UploadError, OSError) as error:
            return attrs.evolve(found, problem=str(error) or type(error).__name__)
        if not (head.startswith(_ZIP) and tail.startswith(_ZIP_END)):
            return attrs.evolve(found, problem="not a zip file, or cut short")
        return _summarized(found, _summary_in(head))

    def look_at_shards(one: RemoteObject) -> Checkpoint:
        folder = one.name.partition("/")[0]
        found = Checkpoint(clean_text(folder), place, clean_text(store.uri(one.name)), one.size)
        try:
            content = _read_at(store, one.name, 0, min(one.size, _MAX_MANIFEST_BYTES))
        except UploadError as error:
            return attrs.evolve(found, problem=str(error))
        return _in_shards(
            found, content, lambda name: sizes.get(f"{folder}/{name}"), is_latest=folder in pointed
        )

    with concurrent.futures.ThreadPoolExecutor(_STORE_THREADS) as threads:
        files = threads.map(look, objects)
        return [*files, *threads.map(look_at_shards, manifests)]


def _targets(
    pointers: Iterable[str], read: Callable[[str], bytes], warn: Callable[[str], object]
) -> set[str]:
    """Returns the names that pointers lead to; warns about unreadable pointers."""
    found = set()
    for name in pointers:
        try:
            found.add(_pointed(read(name)))
        except (UploadError, OSError) as error:
            warn(f"cannot read the pointer {name}: {error}")
    return found


def _pointed(content: bytes) -> str:
    """Returns the name that a pointer leads to: a file, or the folder of a manifest."""
    name = content.decode(errors="replace").strip().removesuffix(f"/{_MANIFEST}")
    return name.rpartition("/")[2]


def _read_at(store: Store, name: str, offset: int, count: int) -> bytes:
    content = b""
    chunks = store.get(name, offset)
    try:
        for chunk in chunks:
            content += chunk
            if len(content) >= count:
                break
    finally:
        if hasattr(chunks, "close"):
            chunks.close()
    return content[:count]


def _in_shards(
    found: Checkpoint, content: bytes, size_of: Callable[[str], int | None], *, is_latest: bool
) -> Checkpoint:
    """Returns a sharded checkpoint with the fields read from its manifest, or with its problem.

    Args:
        found: the checkpoint, with the size of its manifest.
        content: the content of the manifest.
        size_of: returns the size of a file beside the manifest, or None if it is missing.
        is_latest: whether a pointer names it.
    """
    found = attrs.evolve(found, is_latest=is_latest)
    try:
        manifest = read_object(content)
        files = _files_in(manifest)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return attrs.evolve(found, problem=f"not a manifest of shards: {clean_text(str(error))}")
    wrong = [name for name, (size, _) in sorted(files.items()) if size_of(name) != size]
    problem = f"{wrong[0]} is missing or cut short" if wrong else None
    size = found.size + sum(size for size, _ in files.values())
    summary = manifest.get("summary")
    found = attrs.evolve(found, size=size, problem=problem, shards=files)
    return _summarized(found, summary if isinstance(summary, dict) else {})


def _files_in(manifest: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the size and CRC-32 of each file that a manifest names."""
    files = {}
    for name, one in manifest["files"].items():
        size, crc32 = whole_of(one["size"]), whole_of(one["crc32"])
        if size is None or crc32 is None:
            raise ValueError("a size or CRC-32 is not a whole number")
        files[name] = size, crc32
    if not files or not all(map(_SHARD_FILE.fullmatch, files)):
        raise ValueError("it names no files, or others")
    return files


def _summarized(found: Checkpoint, summary: Mapping[str, Any]) -> Checkpoint:
    metrics, best = summary.get("metrics"), summary.get("best_by")
    values = (
        {str(name): number_of(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}
    )
    rule = None
    if isinstance(best, dict) and isinstance(best.get("metric"), str):
        rule = best["metric"], "min" if best.get("mode") == "min" else "max"
    return attrs.evolve(
        found,
        step=whole_of(summary.get("batch")),
        epoch=whole_of(summary.get("epoch")),
        time=number_of(summary.get("time")),
        metrics={name: value for name, value in values.items() if value is not None},
        best_by=rule,
    )


def _summary_in(head: bytes) -> dict[str, Any]:
    """Returns the summary at the beginning of a file; empty if there is none."""
    if (found := _SUMMARY.search(head)) is None:
        return {}
    text = head[found.end() : found.end() + int.from_bytes(found[1], "little")]
    try:
        return read_object(text)
    except ValueError:
        return {}
