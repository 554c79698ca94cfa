"""Writes the weights of a checkpoint to a separate file, for inference and for other programs."""

import os
from pathlib import Path
from typing import Any

import torch

from events.errors import CheckpointError

from .plain import has_plain_storage
from .reading import read_checkpoint

__all__ = ["export_weights"]


def export_weights(checkpoint: str | Path, path: str | Path) -> Path:
    """Writes the weights of the model in a checkpoint to a file, which appears whole or not at all.

    ```python
    export_weights("checkpoints/latest.symlink", "model.pt")      # or "model.safetensors"
    ```

    A `.safetensors` file contains tied weights several times; a `.pt` or `.pth` file, for
    `torch.load(weights_only=True)`, contains them once.

    Args:
        checkpoint: a file, a folder, a pointer or a URI; see `read_checkpoint`.
        path: the file to write; an existing one is replaced.

    Returns:
        The path.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: it is damaged, or its model has something that safetensors cannot hold: a value that
            is no tensor, or a sparse or quantized tensor, or one of an unknown type.
        ValueError: the file has another ending.
        ImportError: safetensors is not installed.
    """
    from uploads.disk import fsync_path, replacement

    path = Path(path)
    if path.suffix not in {".safetensors", ".pt", ".pth"}:
        raise ValueError(f"weights are exported to a .safetensors, .pt or .pth file, got {path.name!r}.")
    if path.suffix == ".safetensors":
        import safetensors.torch  # Fails before a large file is read.
    weights: dict[str, Any] = read_checkpoint(checkpoint)["model"]
    if path.suffix != ".safetensors":
        with replacement(path, durable=True) as descriptor, open(descriptor, "wb", closefd=False) as file:
            torch.save(dict(weights), file)
        return path
    others = [
        name
        for name, value in weights.items()
        if not isinstance(value, torch.Tensor) or not has_plain_storage(value)
    ]
    if others:
        raise CheckpointError(
            f"a .safetensors file holds dense tensors alone, but the model has {others[0]!r}. "
            "Export to a .pt file."
        )
    tensors = {name: value.clone().contiguous() for name, value in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-0.tmp")
    try:
        try:
            safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
        except KeyError as error:  # Of its table of types.
            raise CheckpointError(
                f"a .safetensors file has no tensors of type {error}. Export to a .pt file."
            ) from error
        fsync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
