"""Checkpoints in shards: each rank writes its part of the tensors, in the format of torch's own checkpoints.

A checkpoint is a folder with these files:

- `__{rank}_0.distcp`: the tensors of a rank, one after the other, each as `torch.save` writes it.
- `.metadata`: the location of each part of each tensor, as `torch.distributed.checkpoint` (DCP) writes it.
- `rank-{rank}.pt`: everything else of that rank, for `torch.load(weights_only=True)`.
- `manifest.json`: the number of ranks, a summary, and name, size and CRC-32 of the other files. Rank 0 writes
  it last, and a folder without it is not a checkpoint.

A tensor's key is its location in a whole checkpoint, "model.0.weight". DCP's planners decide which rank
writes which part; that takes one collective, only when shapes have changed. Reading has no collectives: each
rank reads the parts that it needs, from any number of ranks, and verifies their files.
"""

import copy
import json
import math
import os
import pickle  # of DCP's format; see `_MetadataUnpickler`
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from events.errors import CheckpointError
from events.state import State
from events.trainer import distributed
from events.trainer.weights import plain_name

from .files import MANIFEST, METADATA, SHARD_FILE, Written, new_file, tensors_of, values_of
from .plain import has_plain_storage
from .writer import Request

__all__ = [
    "Fetch",
    "ShardPlan",
    "ShardRequest",
    "ShardedCheckpoint",
    "WrittenShard",
    "complete",
    "files_of",
]

Fetch = Callable[[str, str], object]
"""Downloads a file to the folder of the manifest, given the names of the checkpoint and the file."""


_VERSION = 1
# The name of a folder, which must not lead out of its parent.
_NAME = re.compile(r"[^./\\\0-\x1f][^/\\\0-\x1f]{0,254}")
_MANIFEST_BYTES = 16 << 20
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = frozenset(
    {
        (_METADATA_MODULE, "BytesStorageMetadata"),
        (_METADATA_MODULE, "ChunkStorageMetadata"),
        (_METADATA_MODULE, "Metadata"),
        (_METADATA_MODULE, "MetadataIndex"),
        (_METADATA_MODULE, "StorageMeta"),
        (_METADATA_MODULE, "TensorProperties"),
        (_METADATA_MODULE, "TensorStorageMetadata"),
        (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)


@attrs.frozen
class WrittenShard(Written):
    """The files that a rank has written; size and CRC-32 describe `values_of(rank)`.

    Attributes:
        tensors: the file with its tensors, or None if there are none.
        lengths: the size of each tensor in that file, in bytes.
    """

    tensors: Written | None
    lengths: tuple[int, ...]


def files_of(written: WrittenShard, rank: int) -> dict[str, Written]:
    """Returns the files of a rank by name."""
    files = {values_of(rank): Written(written.size, written.crc32)}
    return files if written.tensors is None else files | {tensors_of(rank): written.tensors}


@attrs.frozen
class ShardRequest(Request):
    """Asks for the files of a rank to be written; `path` is the manifest.

    Attributes:
        rank: the rank.
    """

    rank: int = 0

    def write(self, values: Any, is_wanted: Callable[[], bool] = lambda: True) -> WrittenShard:
        """Writes the files, and waits for the disk.

        Args:
            values: the result of `ShardPlan.divide`.
            is_wanted: asked before each write.

        Raises:
            OSError: they could not be written.
            AbandonedError: they were no longer wanted.
        """
        folder = self.path.parent
        with new_file(folder / values_of(self.rank), is_wanted) as file:
            torch.save(values["rest"], file)  # type: ignore[arg-type]  # it needs only `write` and `flush`
        lengths = []
        if not values["tensors"]:
            return WrittenShard(file.size, file.crc32, None, ())
        with new_file(folder / tensors_of(self.rank), is_wanted) as shard:
            for tensor in values["tensors"]:
                before = shard.size
                # `torch.save` writes the whole storage of a view.
                is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
                torch.save(
                    tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format),
                    shard,  # type: ignore[arg-type]  # as above
                )
                lengths.append(shard.size - before)
        return WrittenShard(file.size, file.crc32, Written(shard.size, shard.crc32), tuple(lengths))


class ShardPlan:
    """Decides which rank writes which part of each tensor; recomputed only when shapes have changed.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._local: Any = None
        self._plans: list[Any] = []
        self._metadata: Any = None

    def divide(self, checkpoint: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
        """Returns the part that this rank writes; a collective, which every rank must enter.

        Args:
            checkpoint: this rank's checkpoint, from `checkpoint_of` or `weights_of`.
            model: its parameters are shared by all ranks; its buffers are saved by rank 0.

        Returns:
            "tensors", the list of tensors in this rank's file; and "rest", the checkpoint without tensors,
            but with their locations by key under "tensors".
        """
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        tensors, rest = _take_out(checkpoint)
        if self._rank != 0:
            named = model.named_parameters(remove_duplicate=False)
            parameters = {f"model.{plain_name(name)}" for name, _ in named}
            tensors = {
                key: tensor
                for key, tensor in tensors.items()
                if key in parameters or not key.startswith("model.") or distributed.is_dtensor(tensor)
            }
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=self._rank == 0)
        local = planner.create_local_plan()
        if distributed.any_rank(local != self._local):
            self._local = local
            self._plans, self._metadata = planner.create_global_plan(distributed.gather(local))
        parts = [planner.resolve_data(item) for item in self._plans[self._rank].items]
        return {"tensors": [part.detach() for part in parts], "rest": rest}

    def metadata(self, lengths: Sequence[Sequence[int]]) -> bytes:
        """Returns the content of `.metadata`.

        Args:
            lengths: the size in bytes of each tensor in the file of each rank.
        """
        # torch doesn't export it, but every `.metadata` contains it.
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        places = {}
        for rank, (plan, sizes) in enumerate(zip(self._plans, lengths, strict=True)):
            offset = 0
            for item, size in zip(plan.items, sizes, strict=True):
                places[item.index] = _StorageInfo(tensors_of(rank), offset, size)
                offset += size
        metadata = copy.copy(self._metadata)
        metadata.storage_data = places
        return pickle.dumps(metadata)


def _take_out(checkpoint: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors of modules and optimizers by key, and a copy of the checkpoint without them."""
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, list[Any]] = {}
    known: dict[Any, str] = {}

    def without(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if not distributed.is_dtensor(value) and (value.dim() == 0 or not has_plain_storage(value)):
                return value
            key = known.setdefault(_identity(value), ".".join(map(str, path)))
            tensors[key] = value
            places.setdefault(key, []).append(list(path))
            return None
        if type(value) in {dict, OrderedDict}:
            rest = copy.copy(value)  # With the attributes of a module's `state_dict`.
            rest.update((name, without(one, (*path, name))) for name, one in value.items())
            return rest
        if type(value) is list:
            return [without(one, (*path, index)) for index, one in enumerate(value)]
        return value

    rest = {
        name: without(value, (name,)) if name in {"model", "modules", "optimizers"} else value
        for name, value in checkpoint.items()
    }
    return tensors, {**rest, "tensors": places}


def _identity(tensor: torch.Tensor) -> Any:
    """Returns a key that only tied tensors share."""
    whole: Any = tensor
    local = whole.to_local() if distributed.is_dtensor(tensor) else tensor
    if local.numel() == 0:
        return id(tensor)
    storage = local.untyped_storage()._cdata  # noqa: SLF001  # its identity
    return storage, local.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.dtype


def complete(
    folder: Path,
    plan: ShardPlan,
    written: Sequence[WrittenShard],
    pointer: tuple[Path, str] | None,
    summary: Mapping[str, Any],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Writes `.metadata`, the manifest and the pointer, in this order; on rank 0, after all ranks.

    Args:
        folder: the folder of the checkpoint.
        plan: the plan that divided it.
        written: the files of each rank.
        pointer: the path and the text of the pointer, or None.
        summary: its description, as plain values.
        is_wanted: asked before each file.

    Raises:
        OSError: a file could not be written.
        AbandonedError: the checkpoint was no longer wanted.
    """
    from uploads.disk import replace_file

    with new_file(folder / METADATA, is_wanted) as file:
        file.write(plan.metadata([one.lengths for one in written]))
    files: dict[str, Written] = {METADATA: Written(file.size, file.crc32)}
    for rank, one in enumerate(written):
        files |= files_of(one, rank)
    manifest = {
        "version": _VERSION,
        "name": folder.name,
        "world_size": len(written),
        "summary": summary,
        "files": {name: {"size": one.size, "crc32": one.crc32} for name, one in sorted(files.items())},
    }
    with new_file(folder / MANIFEST, is_wanted) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    if pointer is not None:
        replace_file(pointer[0], pointer[1].encode(), durable=True)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`, which DCP pickles, without running code: it only knows that file's classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{METADATA} must hold metadata of tensors, got {module}.{name}")


class ShardedCheckpoint:
    """A checkpoint in shards, to be read.

    Args:
        manifest: the path of its manifest.
        fetch: called for a file that is missing or damaged.

    Raises:
        OSError: the manifest cannot be read.
        CheckpointError: it is not a manifest.
    """

    def __init__(self, manifest: Path, fetch: Fetch | None = None) -> None:
        from uploads.disk import read_regular

        self._folder = manifest.parent
        self._fetch = fetch
        # Intact files with their status at that time, because torch opens them by name.
        self._checked: dict[str, os.stat_result] = {}
        try:
            content = json.loads(read_regular(manifest, _MANIFEST_BYTES))
            version, name, world_size = content["version"], content["name"], content["world_size"]
            files = {name: Written(one["size"], one["crc32"]) for name, one in content["files"].items()}
            is_valid = (
                type(world_size) is int
                and 0 < world_size <= len(files)
                and _NAME.fullmatch(name)
                and all(SHARD_FILE.fullmatch(name) for name in files)
                and all(type(one.size) is int and type(one.crc32) is int for one in files.values())
                and all(name in files for name in (METADATA, *map(values_of, range(world_size))))
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{str(manifest)!r} must be the manifest of a checkpoint: {error}"
            ) from error
        if not is_valid or version != _VERSION:
            raise CheckpointError(
                f"{str(manifest)!r} must be the manifest of a checkpoint of version {_VERSION}, "
                f"got version {version!r}."
            )
        self.name = name
        self.world_size = world_size
        self._files = files

    def checksums(self) -> dict[str, int]:
        """Returns the CRC-32 of each of its files but the manifest, by name."""
        return {name: one.crc32 for name, one in self._files.items()}

    def read(self, device: torch.device | str = "cpu", state: State | None = None) -> dict[str, Any]:
        """Returns the checkpoint like a single-file one; executes no code from its files.

        Args:
            device: the device of tensors that are not sharded.
            state: the run to load it into. Tensors are sharded like its parameters, and values per rank are
                this rank's, or rank 0's if the number of ranks has changed. None reads everything of all
                ranks.

        Raises:
            CheckpointError: a file that is needed is missing or damaged.
        """
        # If the number of ranks has changed, rank 0's values give the position of the run.
        is_same = state is not None and state.world_size == self.world_size
        first = state.rank if state is not None and is_same else 0
        own = {first, *range(self.world_size)} if state is None else {first, state.rank}
        values = {rank: self._values(rank, device) for rank in own if rank < self.world_size}
        checkpoint = values[first]
        for name in ("random", "random_at_epoch_start", "train_metrics") if "random" in checkpoint else ():
            checkpoint[name] = [
                values[rank][name][0] if rank in values else None for rank in range(self.world_size)
            ]
        places = checkpoint.pop("tensors")
        for key, tensor in self._tensors(places, device, state).items():
            for path in places[key]:
                part = checkpoint
                for name in path[:-1]:
                    part = part[name]
                part[path[-1]] = tensor
        self._check_unchanged()
        return checkpoint

    def _values(self, rank: int, device: torch.device | str) -> dict[str, Any]:
        values: dict[str, Any] = torch.load(
            self._path(values_of(rank)), map_location=device, weights_only=True
        )
        return values

    def _tensors(
        self, places: Mapping[str, Any], device: torch.device | str, state: State | None
    ) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        with self._path(METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        placed = {} if state is None else _placed(state)
        tensors: dict[str, torch.Tensor] = {}
        for key, paths in places.items():
            saved = metadata.state_dict_metadata[key]
            # Anything else would be unpickled by DCP; a part that is in no file would be left as it is.
            is_tensor = isinstance(saved, TensorStorageMetadata)
            if not is_tensor or sum(math.prod(chunk.sizes) for chunk in saved.chunks) != math.prod(
                saved.size
            ):
                raise CheckpointError(f"{METADATA} must have all parts of the tensor {key!r}.")
            like = placed.get(_place_of(paths[0]))
            dtype = saved.properties.dtype
            if like is not None and like.size() == saved.size:
                tensors[key] = torch.empty_like(like.detach(), dtype=dtype)
            else:
                tensors[key] = torch.empty(saved.size, dtype=dtype, device=device)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, metadata, is_coordinator=False)
        plan = planner.finish_plan(planner.create_local_plan())
        for item in plan.items:
            self._path(metadata.storage_data[item.storage_index].relative_path)
        reader = FileSystemReader(self._folder)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(plan, planner).wait()
        return tensors

    def _path(self, name: str) -> Path:
        """Returns the path of an intact file; fetches it if necessary."""
        path = self._folder / name
        if name in self._checked:
            return path
        if name not in self._files:
            raise CheckpointError(f"{str(path)!r} is not in the manifest of the checkpoint.")
        found = self._whole(path)
        if self._fetch is not None and found is None:
            self._fetch(self.name, name)
            found = self._whole(path)
        if found is None:
            raise CheckpointError(f"{str(path)!r} must be as its manifest says, but is missing or damaged.")
        self._checked[name] = found
        return path

    def _check_unchanged(self) -> None:
        """Checks files again that were replaced after they were found intact.

        Another rank of this machine may have downloaded the same file.

        Raises:
            CheckpointError: a file is no longer intact.
        """
        for name, before in self._checked.items():
            path = self._folder / name
            after = path.lstat() if path.exists() else None
            is_same = (
                after is not None
                and os.path.samestat(before, after)
                and (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
            )
            if not is_same and self._whole(path) is None:
                raise CheckpointError(f"{str(path)!r} must not change while it is read, but was replaced.")

    def _whole(self, path: Path) -> os.stat_result | None:
        """Returns the status of a file if size and CRC-32 match the manifest, else None; reads it all."""
        from uploads.disk import crc32_of, open_regular

        expected = self._files[path.name]
        try:
            descriptor = open_regular(path)
        except OSError:
            return None
        try:
            found = os.fstat(descriptor)
            is_whole = found.st_size == expected.size and crc32_of(descriptor) == expected.crc32
            return found if is_whole else None
        finally:
            os.close(descriptor)


def _place_of(path: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the location of the tensor that determines how the one at a path is divided."""
    match path:
        case "optimizers", number, _, parameter, *_:
            return "optimizers", number, parameter
        case *places, name:
            return *places, plain_name(name)
    return ()


def _placed(state: State) -> dict[tuple[Any, ...], torch.Tensor]:
    """Returns the sharded tensors of a run: of modules by name, and parameters also by optimizer."""
    modules: list[tuple[tuple[str, ...], Any]] = [(("model",), state.model)]
    modules += [(("modules", name), one) for name, one in state.parts.find().parts.items()]
    found: dict[tuple[Any, ...], torch.Tensor] = {}
    for place, module in modules:
        if isinstance(module, torch.nn.Module):
            named = (*module.named_buffers(), *module.named_parameters(remove_duplicate=False))
            found |= {(*place, plain_name(name)): one for name, one in named}
    for number, optimizer in enumerate(state.optimizers):
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        found |= {("optimizers", number, index): one for index, one in enumerate(parameters)}
    return {place: one for place, one in found.items() if distributed.is_dtensor(one)}
