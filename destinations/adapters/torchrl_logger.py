"""`TorchRLLogger`: a logger for the trainers and recorders of torchrl.

Everything runs in the logging thread.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from events import Callback, Destination, Logger

from .media import log_images, log_videos
from .session import Session, as_tuple, missing_package_error, plain_values

try:
    from tensordict import TensorDictBase
    from torchrl.record.loggers.common import Logger as TorchRLBase
except ImportError as error:
    raise missing_package_error("torchrl", "torchrl", error) from error

__all__ = ["TorchRLLogger"]

_VIDEO_FPS = 30  # The default of torchrl's CSVLogger.


class TorchRLLogger(TorchRLBase):
    """Logs the records of torchrl to destinations.

    ```python
    logger = TorchRLLogger(RunDirectory("runs/cartpole"))
    logger.log_metrics(tensordict, step=frames)
    logger.close()
    ```

    torchrl has no loop events for loggers: the first record fires `INIT` and `FIT_START`, `close` fires
        `FIT_END` and
    closes the run; its batch count is the largest step logged.

    **Values.** A tensor that is not a scalar is logged as a histogram. Values on a device are copied
    asynchronously.

    **Steps.** Without a step, each name has its own counter.

    Args:
        destinations: destinations that receive the records.
        exp_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name, which is an error with several ranks.
        log_dir: the value of `log_dir`. Default: the folder of a `RunDirectory`.
        callbacks: callbacks of this project.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
    """

    def __init__(
        self,
        *destinations: Destination,
        exp_name: str | None = None,
        log_dir: str | None = None,
        callbacks: Callback | Iterable[Callback] = (),
        raise_errors: bool = False,
    ) -> None:
        self._session = Session(destinations, as_tuple(callbacks), exp_name, raise_errors=raise_errors)
        self._counts: Counter[str] = Counter()
        folder = self._session.folder
        super().__init__(self._session.state.run_name, log_dir or (None if folder is None else str(folder)))

    def _create_experiment(self) -> None:
        """Does nothing; see `experiment`."""

    @property
    def experiment(self) -> Logger:
        """The `Logger` of the run, with all its methods."""
        if not self._session.is_open:
            self._session.fit_start(self._session.state.timestamp)
        return self._session.logger

    @experiment.setter
    def experiment(self, _: None) -> None:
        """Ignores the assignment in torchrl's constructor."""

    def log_scalar(self, name: str, value: Any, step: int | None = None, **kwargs: Any) -> None:
        """Logs one scalar."""
        self.log_metrics({name: value}, step)

    def log_metrics(
        self, metrics: Mapping[str, Any] | TensorDictBase, step: int | None = None, *, keys_sep: str = "/"
    ) -> dict[str, Any]:
        """Logs scalars as one record of metrics, and other tensors as histograms.

        Args:
            metrics: values by name; a TensorDict may be nested.
            step: the step.
            keys_sep: separator of the names in a nested TensorDict.

        Returns:
            The values by flat name. Values in host memory are converted to numbers and lists, as by torchrl;
            values on a device stay there, because converting them would synchronize.
        """
        flat = (
            dict(metrics.flatten_keys(keys_sep).items())
            if isinstance(metrics, TensorDictBase)
            else dict(metrics)
        )
        logger = self.experiment
        step = self._step(list(flat), step)
        scalars, others = plain_values(flat)
        if scalars:
            logger.log_metrics(scalars, step)
        for name, value in others.items():
            self._log_other(logger, name, value, step)
        self._session.advance_to(step)
        return {name: _host_value(value) for name, value in flat.items()}

    def _log_other(self, logger: Logger, name: str, value: Any, step: int) -> None:
        if isinstance(value, str):
            logger.log_text(value, name=name, step=step)
        elif hasattr(value, "shape") and all(value.shape):
            logger.log_histogram(value, name=name, step=step)
        else:
            logger.log_traces({name: value})

    def _step(self, names: Sequence[str], step: int | None) -> int:
        if step is None:
            step = max((self._counts[name] for name in names), default=0)
        for name in names:
            self._counts[name] = int(step) + 1
        return int(step)

    def log_video(self, name: str, video: Any, step: int | None = None, **kwargs: Any) -> None:
        """Logs videos `(T, C, H, W)` or `(N, T, C, H, W)`; `fps` defaults to 30."""
        step = self._step([name], step)
        log_videos(self.experiment, name, video, step, fps=kwargs.get("fps") or _VIDEO_FPS)

    def log_image(self, name: str, image: Any, step: int | None = None, **kwargs: Any) -> None:
        """Logs one image or a list of images; torchrl's own loggers cannot."""
        log_images(self.experiment, name, image, self._step([name], step))

    def log_hparams(self, cfg: Any) -> None:
        """Logs hyperparameters: a dict, or an OmegaConf configuration."""
        self.experiment.log_hyperparameters(cfg)

    def log_histogram(self, name: str, data: Any, **kwargs: Any) -> None:
        """Logs a histogram; accepts `step` and `bins`."""
        step = self._step([name], kwargs.get("step"))
        self.experiment.log_histogram(data, name=name, step=step, bins=kwargs.get("bins") or 64)

    def log_str(self, name: str, value: str, step: int | None = None) -> None:
        """Logs a text."""
        self.experiment.log_text(value, name=name, step=self._step([name], step))

    def flush(self, timeout: float | None = None) -> None:
        """Writes all accepted records; blocks."""
        if self._session.is_open:
            self._session.logger.flush()

    def shutdown(self, timeout: float | None = None) -> None:
        """Fires `FIT_END`; closes the run as completed, once."""
        self._session.fit_end()
        self._session.close()
        self._service_shutdown = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception is None:
            self.shutdown()
        else:
            self._session.close(exception)

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"session": self._session.state_dict(), "counts": dict(self._counts)}

    def _load_checkpoint_state(self, state_dict: Mapping[str, Any]) -> None:
        if "session" in state_dict:
            self._session.resume(state_dict["session"])
            self._counts = Counter(state_dict["counts"])

    def __repr__(self) -> str:
        return f"TorchRLLogger(exp_name={self.exp_name!r})"


def _host_value(value: Any) -> Any:
    """Returns an array in host memory as a number or a list; other values unchanged."""
    device = getattr(value, "device", None)
    if device is None or getattr(device, "type", "cpu") != "cpu" or not hasattr(value, "tolist"):
        return value
    return value.item() if math.prod(value.shape) == 1 else value.tolist()
