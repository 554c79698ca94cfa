"""`ModelHistograms`: histograms of a model's gradients and parameters, as `wandb.watch` logs them."""

from typing import Any, Literal

from events import Callback, Logger, State

__all__ = ["ModelHistograms"]


class ModelHistograms(Callback):
    """Logs a histogram of each gradient and parameter of a model, every few batches.

    ```python
    Trainer(..., callbacks=[ModelHistograms(model, log="all", log_freq=500)])
    ```

    The names are the same as in `wandb.watch`: `gradients/<parameter>` and `parameters/<parameter>`. They are
    logged before the optimizer steps, with the step of the batch. A gradient on a device is copied whole,
    without waiting for it.

    Args:
        model: the model.
        log: "gradients", "parameters", "all", or None for nothing.
        log_freq: the number of batches from one record to the next.

    Raises:
        ValueError: an argument has none of the values above.
    """

    def __init__(
        self,
        model: Any,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
    ) -> None:
        if log not in {"gradients", "parameters", "all", None}:
            raise ValueError(f'log must be "gradients", "parameters", "all" or None, got {log!r}.')
        if log_freq < 1:
            raise ValueError(f"log_freq must be at least 1 batch, got {log_freq}.")
        self._model = model
        self._has_gradients = log in {"gradients", "all"}
        self._has_parameters = log in {"parameters", "all"}
        self._log_freq = log_freq

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Logs the histograms, if they are due."""
        if int(state.timestamp.batch) % self._log_freq:
            return
        for name, parameter in self._model.named_parameters():
            if not parameter.numel():
                continue
            if self._has_gradients and parameter.grad is not None and not parameter.grad.is_sparse:
                logger.log_histogram(parameter.grad, f"gradients/{name}")
            if self._has_parameters:
                logger.log_histogram(parameter, f"parameters/{name}")
