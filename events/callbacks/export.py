"""`ExportForInferenceCallback`: exports the trained model."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from events.callback import Callback
from events.logger.logger import Logger
from events.names import LiteralName, format_name
from events.redaction import error_text
from events.state import State

__all__ = ["ExportForInferenceCallback"]

_log = logging.getLogger("events")

_FORMAT = "torch.export"
_OTHER_FORMATS = {
    "onnx": " Call torch.onnx.export(model, inputs, path) after fit, or in the hook fit_end of a callback.",
    "torchscript": " TorchScript is deprecated: torch.export.load reads the file of this format.",
}


class ExportForInferenceCallback(Callback):
    """Exports the model with `torch.export` when training ends, and uploads the file.

    ```python
    ExportForInferenceCallback(save_path="{run_name}/model.pt2")     # torch.export.load("model.pt2")
    ```

    A copy of the model in host memory is exported, in evaluation mode, on rank 0. A model that cannot be
    exported or written is reported, and the run ends as it would.

    Args:
        save_format: "torch.export", the only one; TorchScript is deprecated, and ONNX is one call away:
            `torch.onnx.export`.
        save_path: the name of the file, with placeholders as in `Logger.upload_file`: a path here, and the
            name that it is uploaded under.
        sample_input: the arguments of `forward`, a tensor or a tuple. Default: the inputs of the first batch.
        transforms: functions of the model, called on the copy one after another.
        dynamic_shapes: as for `torch.export.export`. Default: the sizes of the sample.

    Raises:
        ValueError: the format is unknown.
    """

    def __init__(
        self,
        save_format: str = _FORMAT,
        save_path: str = "{run_name}/model.pt2",
        sample_input: Any = None,
        transforms: Sequence[Callable[[Any], Any]] = (),
        *,
        dynamic_shapes: Any = None,
    ) -> None:
        super().__init__()
        if save_format != _FORMAT:
            hint = _OTHER_FORMATS.get(save_format, "")
            raise ValueError(f"save_format must be {_FORMAT!r}, got {save_format!r}.{hint}")
        self._save_path = save_path
        self._sample = sample_input
        self._transforms = tuple(transforms)
        self._dynamic_shapes = dynamic_shapes

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Keeps the inputs of the first batch."""
        if self._sample is None:
            batch: Any = state.batch
            match batch:
                case [*inputs, _] if inputs:
                    batch = tuple(inputs)
            self._sample = copy.deepcopy(batch)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Exports the model."""
        if state.rank != 0 or state.model is None:
            return
        try:
            self._write(self._export(state), state, logger)
        except Exception as error:  # noqa: BLE001  # whatever tracing someone's model raises, or a full disk
            _log.error("could not export the model: %s", error_text(error))

    def _write(self, exported: Any, state: State, logger: Logger) -> None:
        import torch

        from uploads.disk import replacement

        name = format_name(self._save_path, state)
        path = Path(name)
        with replacement(path) as descriptor, open(descriptor, "w+b", closefd=False) as file:
            torch.export.save(exported, file)
        if logger.has_file_upload_destination():
            logger.upload_file(LiteralName(name.strip("/")), path, overwrite=True)

    def _export(self, state: State) -> Any:
        import torch

        model: Any = copy.deepcopy(state.model).cpu().eval()
        for transform in self._transforms:
            model = transform(model)
        arguments: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        match self._sample:
            case Mapping() as inputs:
                keywords = {name: _on_host(value) for name, value in inputs.items()}
            case [*inputs]:
                arguments = tuple(map(_on_host, inputs))
            case one:
                arguments = (_on_host(one),)
        with torch.no_grad():
            return torch.export.export(model, arguments, keywords, dynamic_shapes=self._dynamic_shapes)


def _on_host(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value
