"""`TorchRLLogger`: a logger for torchrl's trainers and recorders; `from_torchrl`: theirs as a destination.

Everything runs in the logging thread.
"""

import contextlib
import datetime as dt
import itertools
import logging
import math
import multiprocessing
import multiprocessing.util
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from destinations.base import LoggerDestination
from destinations.registry import create_destination
from destinations.run_directory import RunDirectory
from destinations.text.formatting import flattened
from events import Callback, Destination, Logger
from uploads import needs_package

from .media import log_images, log_videos
from .session import Session, SessionContext, log_values, whole

with needs_package("this adapter", "torchrl"):
    from tensordict import TensorDictBase, is_non_tensor
    from torchrl.record.loggers.common import Logger as TorchRLBase

__all__ = ["FromTorchRL", "TorchRLLogger", "from_torchrl", "generate_exp_name", "get_logger"]

_log = logging.getLogger("destinations")

_VIDEO_FPS = 30  # The default of torchrl's CSVLogger.
# Higher than the queues of `multiprocessing`, so that the run is closed before them.
_CLOSE_PRIORITY = 10
_MAX_NAMES = 2  # exp_name and log_dir
_VIDEO_DIMENSIONS = 4


class TorchRLLogger(SessionContext, TorchRLBase):
    """Logs the records of torchrl to destinations.

    ```python
    logger = TorchRLLogger(RunDirectory("runs/cartpole"))
    logger.log_metrics(tensordict, step=frames)
    logger.close()
    ```

    or, like torchrl's own loggers, `TorchRLLogger("cartpole", "runs")`, which writes to `runs/cartpole`.

    torchrl has no loop events for loggers: the first record fires `INIT` and `FIT_START`, `close` fires
    `FIT_END` and closes the run; its batch count is the largest step logged.

    **End of the run.** A program that ends without a call of `close` completes the run, unless an exception
    ended it. `sys.exit(1)` cannot be told from a regular end then.

    **Values.** A tensor that is not a scalar is logged as a histogram. Values on a device are copied
    asynchronously.

    **Steps.** Without a step, each name has its own counter.

    **Processes.** With `service_backend="process"`, torchrl makes the logger in another process, where it
    is closed when that process ends. Each call waits for an answer of that process, about a millisecond.

    Args:
        given: destinations that receive the records; or `exp_name` and `log_dir`, by position.
        exp_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name, the same on all ranks of a `torchrun`.
        log_dir: the value of `log_dir`, and, without destinations, the parent of the run's folder,
            `<log_dir>/<exp_name>`. Default: the folder of a `RunDirectory`.
        video_fps: frames per second of videos that are logged without `fps`.
        video_format: ignored, as of `CSVLogger`: the destinations choose, `RunDirectory` writes MP4.
        callbacks: callbacks of this project.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
    """

    def __init__(
        self,
        *given: Destination | str,
        exp_name: str | None = None,
        log_dir: str | None = None,
        video_fps: float = _VIDEO_FPS,
        video_format: str | None = None,
        callbacks: Callback | Iterable[Callback] = (),
        raise_errors: bool = False,
    ) -> None:
        names: list[Any] = list(itertools.takewhile(lambda one: isinstance(one, str), given))
        destinations: list[Any] = list(given[len(names) :])
        if len(names) > _MAX_NAMES:
            raise TypeError(f"TorchRLLogger takes exp_name and log_dir by position, got {names}.")
        exp_name = exp_name or next(iter(names), None)
        log_dir = log_dir or next(iter(names[1:]), "runs" if names else None)
        if not destinations and exp_name and log_dir:
            destinations = [RunDirectory(Path(log_dir) / exp_name)]
        self._session = session = Session(
            destinations, callbacks, exp_name, raise_errors=raise_errors, is_end_reported=False
        )
        if multiprocessing.parent_process() is not None:
            # Such a process ends without the interpreter's own exit, which would close the run.
            multiprocessing.util.Finalize(session, _finish, (session,), exitpriority=_CLOSE_PRIORITY)
        self._counts: Counter[str] = Counter()
        self._video_fps = video_fps
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
        self._log({name: value}, step)

    def log_metrics(
        self, metrics: Mapping[str, Any] | TensorDictBase, step: int | None = None, *, keys_sep: str = "/"
    ) -> Mapping[str, Any]:
        """Logs scalars as one record of metrics, other tensors as histograms, strings as texts.

        A value that cannot be logged is dropped. If a subclass overrides `log_scalar`, it is called for each
        value, as by torchrl, with numbers and lists, and so the call waits for the device.

        Args:
            metrics: values by name; a TensorDict or a dict may be nested.
            step: the step.
            keys_sep: separator of nested names.

        Returns:
            The values by flat name, as numbers and lists, as by torchrl. If one is on a device, they are
            converted when the mapping is first read, because that waits for the device.
        """
        if isinstance(metrics, TensorDictBase):
            # A text in it is a `NonTensorData`, several are a `NonTensorStack`.
            flat = {
                name: value.tolist() if is_non_tensor(value) else value
                for name, value in metrics.flatten_keys(keys_sep).items()
            }
        else:
            flat = flattened(metrics, keys_sep, keeps_empty=False)
        host = HostMetrics(flat)
        if type(self).log_scalar is not TorchRLLogger.log_scalar:
            for name, value in host.items():
                self.log_scalar(name, value, step=step)
        else:
            self._log(flat, step)
        return host if any(map(_is_on_device, flat.values())) else dict(host)

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        logger = self.experiment
        step = self._step(list(values), step)
        try:
            log_values(logger, values, step, are_histograms=True)
        finally:
            self._session.advance_to(step)

    def _step(self, names: Sequence[str], step: int | None) -> int:
        number = whole(step, max((self._counts[name] for name in names), default=0))
        for name in names:
            self._counts[name] = number + 1
        return number if step is None else step

    def log_video(self, name: str, video: Any, step: int | None = None, **kwargs: Any) -> None:
        """Logs videos `(T, C, H, W)` or `(N, T, C, H, W)`; `fps` defaults to `video_fps`."""
        step = self._step([name], step)
        log_videos(self.experiment, name, video, step, fps=kwargs.get("fps") or self._video_fps)

    def log_image(self, name: str, image: Any, step: int | None = None, **kwargs: Any) -> None:
        """Logs one image or a list of images; torchrl's own loggers cannot."""
        log_images(self.experiment, name, image, self._step([name], step))

    def log_hparams(self, cfg: Any) -> None:
        """Logs hyperparameters: a dict, a dataclass, a namespace, or an OmegaConf configuration."""
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
        _finish(self._session)
        self._service_shutdown = True

    def _end(self, exception: BaseException | None) -> None:
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


def _finish(session: Session) -> None:
    session.fit_end()
    session.close()


class HostMetrics(Mapping[str, Any]):
    """The result of `log_metrics` if a value is on a device; converts the values at the first read.

    Args:
        values: by flat name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._converted: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if self._converted is None:
            self._converted = {key: _host_value(value) for key, value in self._values.items()}
        return self._converted[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


def _is_on_device(value: Any) -> bool:
    return getattr(value, "is_cpu", True) is False


def _host_value(value: Any) -> Any:
    """Returns an array as a number or a list; other values unchanged, and those that cannot be converted."""
    if not hasattr(value, "shape") or not hasattr(value, "tolist"):
        return value
    try:
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    except Exception:  # noqa: BLE001  # a sparse tensor, or one without values
        return value


def generate_exp_name(model_name: str, experiment_name: str) -> str:
    """Returns a unique name: both names, eight random hexadecimal digits, and the local time.

    ```python
    print(generate_exp_name("ppo", "cartpole"))
    ```
    """
    now = dt.datetime.now().astimezone()
    return f"{model_name}_{experiment_name}_{uuid.uuid4().hex[:8]}_{now:%y_%m_%d-%H_%M_%S}"


def get_logger(
    logger_type: str | None,
    logger_name: str,
    experiment_name: str,
    *,
    state_dict: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> TorchRLLogger | None:
    """Returns a logger, with the signature of torchrl's function of this name.

    ```python
    logger = get_logger("csv", "logs", "cartpole")
    ```

    Args:
        logger_type: "csv" for a `RunDirectory`, "tensorboard", "wandb", "mlflow" or "trackio" for those
            trackers, the name of any other destination with `destination_kwargs`; "" or None for no logger.
        logger_name: the folder that holds the run's, as `log_dir` of `TorchRLLogger`.
        experiment_name: the name of the run.
        state_dict: of a logger to be continued.
        kwargs: `wandb_kwargs`, `mlflow_kwargs`, `trackio_kwargs` or `destination_kwargs`, for the
            constructor; the others are for `TorchRLLogger`, `service_backend` among them.

    Raises:
        ValueError: there is no destination of that name.
    """
    if not logger_type:
        return None
    if state_dict is not None:
        logger_name, experiment_name = str(state_dict["log_dir"]), str(state_dict["exp_name"])
    by_type = {
        kind: dict(kwargs.pop(f"{kind}_kwargs", None) or {})
        for kind in ("wandb", "mlflow", "trackio", "destination")
    }
    folder, others = Path(logger_name) / experiment_name, by_type["destination"]
    own: dict[str, tuple[str, dict[str, Any]]] = {
        "csv": ("RunDirectory", {"run_dir": folder, **others}),
        "tensorboard": ("TensorBoard", {"log_dir": folder, **others}),
        "wandb": ("WandB", _wandb_arguments(by_type["wandb"], logger_name)),
        "mlflow": (
            "MLflow",
            {
                "tracking_uri": Path(logger_name).absolute().as_uri(),
                "experiment": experiment_name,
                **by_type["mlflow"],
            },
        ),
        "trackio": ("Trackio", {"project": "torchrl", **by_type["trackio"]}),
    }
    name, arguments = own.get(logger_type, (logger_type, others))
    destination = create_destination(name, **arguments)
    logger = TorchRLLogger(destination, exp_name=experiment_name, log_dir=logger_name, **kwargs)
    if state_dict is not None:
        logger.load_state_dict(state_dict)
    return logger


def _wandb_arguments(given: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Converts arguments of torchrl's logger for `WandB`; unknown ones go to `wandb.init`."""
    arguments = {"project": "torchrl", "dir": folder, **given}
    if arguments.pop("offline", False):
        arguments["mode"] = "offline"
    for theirs, ours in (("id", "run_id"), ("save_dir", "dir"), ("log_dir", "dir")):
        if theirs in arguments:
            arguments[ours] = arguments.pop(theirs)
    for unused in ("video_fps", "log_env_packages"):
        arguments.pop(unused, None)
    return arguments


def from_torchrl(logger: Any) -> "FromTorchRL":
    """Returns a destination for our `Trainer` or `Run` that logs to a logger of torchrl.

    ```python
    Trainer(..., loggers=[from_torchrl(CSVLogger("cartpole"))])
    ```

    Raises:
        TypeError: it is not a logger of torchrl.
    """
    if not isinstance(logger, TorchRLBase) or isinstance(logger, TorchRLLogger):
        raise TypeError(
            f"from_torchrl must get a logger of torchrl, such as CSVLogger, got {type(logger).__name__}. "
            "Destinations of this project need no wrapping."
        )
    return FromTorchRL(logger)


class FromTorchRL(LoggerDestination):
    """Wraps a logger of torchrl for our `Trainer` or `Run`; made by `from_torchrl`.

    ```python
    Trainer(..., loggers=[FromTorchRL(CSVLogger("cartpole"))])
    ```

    Passes on the records that torchrl has: metrics, hyperparameters, histograms, videos `(T, C, H, W)` and,
    if the logger has `log_str`, texts. Records that the logger does not implement are left out, with one
    warning.
    Its calls block the training thread, and it is closed with the run.

    Args:
        logger: a logger of torchrl.
    """

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self.wrapped = logger
        self._missing: set[str] = set()

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        if method in self._missing:
            return
        with contextlib.suppress(NotImplementedError):
            if hasattr(self.wrapped, method):
                getattr(self.wrapped, method)(*arguments, **named)
                return
        self._missing.add(method)
        _log.warning("%s has no %s; these records are left out.", type(self.wrapped).__name__, method)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._call("log_hparams", hyperparameters)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._call("log_metrics", dict(metrics), step)

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        self._call("log_str", name, text, step)

    def log_histogram(
        self, values: Any, name: str = "Histogram", step: int | None = None, bins: Any = 64
    ) -> None:
        import numpy as np

        self._call("log_histogram", name, np.asarray(values).reshape(-1), step=step, bins=bins)

    def log_video(  # type: ignore[override]  # the logger says that it takes no caption
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        import torch

        if len(getattr(video, "shape", ())) == _VIDEO_DIMENSIONS:  # Encoded videos are for others.
            self._call("log_video", name, torch.as_tensor(video)[None], step)

    def flush(self) -> None:
        self._call("flush")

    def post_close(self) -> None:
        self.wrapped.shutdown()
