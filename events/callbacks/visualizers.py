"""`ImageVisualizer` and `EvalOutputLogging`: what goes into the model and what comes out of it, to look at.

Tensors are handed to the logger as they are on the device; it copies them without waiting.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Literal, get_args

from events.callback import Callback
from events.logger.logger import Logger
from events.state import State
from events.timestamp import Time

from .periodic import BATCHES_OR_EPOCHS, Periodic

__all__ = ["EvalOutputLogging", "ImageVisualizer"]

Mode = Literal["input", "segmentation"]
# Images are (N, H, W) or (N, C, H, W).
_IMAGE_DIMENSIONS = (3, 4)


class ImageVisualizer(Periodic):
    """Logs images of the training data as `Images/Train`, and of each evaluation as `Images/Eval`.

    ```python
    Trainer(..., callbacks=[ImageVisualizer("1ep", num_images=4)], loggers=[RunDirectory("runs/mine")])
    ```

    With `mode="segmentation"` they have two masks: `prediction`, the class of the highest output, and
    `ground_truth`. Negative targets ("ignore") become one class above the highest.

    Args:
        interval: how often to log training images, in batches or epochs; a bare number counts batches. Of an
            evaluation, the first batch is logged.
        mode: "input", or "segmentation" with masks.
        num_images: how many images of a microbatch.
        channels_last: whether images are `(N, H, W, C)`, and outputs too.
        input_key: where the images are in a batch; see `State.batch_get_item`.
        target_key: where the targets are, `(N, H, W)` classes or one-hot `(N, C, H, W)`.

    Raises:
        ValueError: the mode is unknown, or the interval is in another unit.
    """

    def __init__(
        self,
        interval: Time | str | int = "100ba",
        mode: Mode = "input",
        num_images: int = 8,
        channels_last: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        super().__init__(interval, BATCHES_OR_EPOCHS)
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}.")
        self._is_segmentation = mode == "segmentation"
        self._num_images = num_images
        self._channels_last = channels_last
        self._input_key = input_key
        self._target_key = target_key

    def after_forward(self, state: State, logger: Logger) -> None:
        """Logs training images, if they are due."""
        if self._is_due:
            self._is_due = False
            self._log("Images/Train", state, logger)

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Logs images of the first batch of an evaluation."""
        if not state.eval_timestamp.batch:
            self._log("Images/Eval", state, logger)

    def _log(self, name: str, state: State, logger: Logger) -> None:
        images = state.batch_get_item(self._input_key)
        if images.dim() not in _IMAGE_DIMENSIONS or images.numel() <= images.shape[0]:
            return
        count = self._num_images
        masks = self._masks(state) if self._is_segmentation else None
        logger.log_images(images[:count], name, self._channels_last, masks=masks)

    def _masks(self, state: State) -> dict[str, Any]:
        import torch

        classes = -1 if self._channels_last else 1
        outputs: Any = state.outputs
        if isinstance(outputs, list | tuple):
            outputs = torch.stack(list(outputs))
        outputs = outputs[: self._num_images]
        targets = state.batch_get_item(self._target_key)[: self._num_images]
        if targets.dim() == outputs.dim():
            targets = targets.argmax(dim=classes)
        return {
            "prediction": outputs.argmax(dim=classes),
            "ground_truth": torch.where(targets < 0, outputs.shape[classes], targets),
        }


class EvalOutputLogging(Callback):
    """Logs a table of samples of each evaluation, with the model's outputs.

    The table `eval_outputs/<label>` has the columns `sample`, `input`, `output` and `target`, and a column
    for each name in `batch_keys_to_log`.

    ```python
    EvalOutputLogging(num_samples=16, show_output=lambda logits: tokenizer.decode(logits.argmax(-1)))
    ```

    Args:
        batch_keys_to_log: further parts of the batch, as columns; see `State.batch_get_item`.
        num_samples: how many samples of each evaluation, from its beginning.
        input_key: where the inputs are in a batch.
        target_key: where the targets are; None for none.
        show_input: makes a cell of one sample's input, for example a tokenizer's `decode`.
        show_output: the same for its output.
    """

    def __init__(
        self,
        batch_keys_to_log: Sequence[Any] = (),
        num_samples: int = 8,
        *,
        input_key: Any = 0,
        target_key: Any = 1,
        show_input: Callable[[Any], Any] | None = None,
        show_output: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        self._num_samples = num_samples
        self._shown: dict[str, tuple[Callable[[State], Any], Callable[[Any], Any] | None]] = {
            "input": (methodcaller("batch_get_item", input_key), show_input),
            "output": (attrgetter("outputs"), show_output),
        }
        if target_key is not None:
            self._shown["target"] = (methodcaller("batch_get_item", target_key), None)
        for key in batch_keys_to_log:
            self._shown[str(key)] = (methodcaller("batch_get_item", key), None)
        self._rows: list[list[Any]] = []

    def eval_start(self, state: State, logger: Logger) -> None:
        """Begins a table."""
        self._rows = []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Adds the samples of a batch, until there are enough."""
        missing = self._num_samples - len(self._rows)
        if missing <= 0:
            return
        columns = []
        for read, show in self._shown.values():
            # Clones: a slice of the logits would keep all of them in memory.
            values = [_own(one) for one in list(read(state))[:missing]]
            columns.append(values if show is None else [show(one) for one in values])
        for row in zip(*columns, strict=False):
            self._rows.append([len(self._rows), *row])

    def eval_end(self, state: State, logger: Logger) -> None:
        """Logs the table."""
        rows, self._rows = self._rows, []
        if rows:
            name = f"eval_outputs/{state.dataloader_label}"
            logger.log_table(["sample", *self._shown], rows, name=name)


def _own(value: Any) -> Any:
    return value.detach().clone() if hasattr(value, "detach") else value
