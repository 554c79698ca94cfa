"""`SummaryWriter`: the calls of PyTorch's writer for TensorBoard, into a run folder.

Its methods run in the thread that calls them, one at a time, and hand over to a `Run`.
"""

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from destinations.media import to_numpy
from destinations.run_directory import RunDirectory
from events import BinnedValues, Destination, Event, Run

from .arrays import as_bytes, curve_rows, figure_pixels, grid_of, pixels_of

__all__ = ["SummaryWriter"]

_log = logging.getLogger("destinations")

Array = np.ndarray[Any, Any]
_Step = int | None
_Seconds = float | None

_DEFAULT_BINS = 64
_MAX_THRESHOLDS = 127
_COUNTS = ("true positives", "false positives", "true negatives", "false negatives")
_PR_COLUMNS = ("threshold", *_COUNTS, "precision", "recall")


class SummaryWriter:
    """Takes the calls of `torch.utils.tensorboard.SummaryWriter`, and writes a run folder.

    ```python
    from destinations.compat import SummaryWriter

    with SummaryWriter("runs/mnist") as writer:
        writer.add_scalar("loss/train", 0.5, global_step=1)
    print(open_runs("runs")["mnist"].series("loss/train").value)  # [0.5]
    ```

    **Tags** are the names of metrics and records. `add_scalars(main, {"a": 1})` logs "main/a".

    **Steps.** A call without `global_step` is of step 0. Steps may go back, and a step may come again, each
    tag on its own: every call is a row of its own, and none replaces another; only `purge_step` removes rows.

    **Values.** A scalar may be a number, an array or a tensor of one element on any device, or a string that
    holds a number; it is kept in double precision. A value that cannot be logged costs itself, as everywhere
    in this project: it is reported once, and no call raises for it.

    **Hyperparameters.** The first `add_hparams` without a `run_name` is of the run itself; every other one
    makes a run of its own below it, named `run_name` or by the time.

    **Several ranks.** Rank 0 writes; those of other ranks write nothing.

    **Not kept**, and said once each: graphs, embeddings, layouts of custom scalars, faces and configurations
    of meshes, domains of hyperparameters.

    **Threading.** Any thread may call it. **After close**, a call opens the run again.

    Args:
        log_dir: the folder of the run, which is continued if it is one. Default: `runs/` with the date, the
            host and `comment`.
        comment: the end of the default name.
        purge_step: rows of this step and later ones are moved out of the run that is continued.
        max_queue: ignored: a row is safe when its call returns.
        flush_secs: ignored, likewise.
        filename_suffix: ignored: the files of a run have names of their own.
        event_files: also write event files for TensorBoard into the folder.

    Raises:
        ValueError: `log_dir` is a URL.
        RunPathError: the folder is not writable.
        RunInUseError: another process writes to it.
        ImportError: event files are asked for, and the package `tensorboard` is not installed.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        filename_suffix: str = "",
        *,
        event_files: bool = False,
    ) -> None:
        if not log_dir:
            name = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}{comment}"
            log_dir = Path("runs") / name
        if "://" in os.fspath(log_dir):
            raise ValueError(
                f"log_dir must be a local folder, got {os.fspath(log_dir)!r}. "
                "For a bucket, use a Run with RunDirectory and Artifacts."
            )
        self.log_dir = os.fspath(log_dir)
        self.purge_step = purge_step
        self.max_queue = max_queue
        self.flush_secs = flush_secs
        self.filename_suffix = filename_suffix
        self._event_files = event_files
        # Guards all below: a call, and the opening and closing of the run.
        self._lock = threading.RLock()
        self._run: Run | None = None
        # That of the call in progress, if it was given.
        self._walltime: _Seconds = None
        self._has_hparams = False
        self._told: set[str] = set()
        self._opened()

    def get_logdir(self) -> str:
        """Returns the folder of the run."""
        return self.log_dir

    def add_hparams(
        self,
        hparam_dict: Mapping[str, Any],
        metric_dict: Mapping[str, Any],
        hparam_domain_discrete: Mapping[str, Sequence[Any]] | None = None,
        run_name: str | None = None,
        global_step: _Step = None,
    ) -> None:
        """Logs hyperparameters, and metrics that belong to them.

        Raises:
            TypeError: one of the two is not a dict.
        """
        dicts: tuple[Any, ...] = (hparam_dict, metric_dict)
        if not all(isinstance(one, Mapping) for one in dicts):
            given = " and ".join(type(one).__name__ for one in dicts)
            raise TypeError(f"hparam_dict and metric_dict must be dicts, got {given}.")
        if hparam_domain_discrete:
            self._say_not_kept("the domain of hyperparameters")
        folder = Path(self.log_dir)
        below = folder / (run_name or str(time.time()))
        if below.resolve() == folder.resolve() or not (run_name or self._has_hparams):
            self._has_hparams = True
            self._call("log_hyperparameters", dict(hparam_dict))
            for tag, value in metric_dict.items():
                self.add_scalar(tag, value, global_step)
            return
        with SummaryWriter(below, event_files=self._event_files) as other:
            other.add_hparams(hparam_dict, metric_dict, global_step=global_step)

    def add_scalar(
        self,
        tag: str,
        scalar_value: Any,
        global_step: _Step = None,
        walltime: _Seconds = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        """Logs a scalar; the last two arguments are ignored."""
        self._log("log_metrics", {tag: _scalar(scalar_value, walltime)}, global_step, walltime)

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: _Step = None,
        walltime: _Seconds = None,
    ) -> None:
        """Logs scalars as "main_tag/tag", in one row."""
        values = {f"{main_tag}/{tag}": _scalar(value, walltime) for tag, value in tag_scalar_dict.items()}
        self._log("log_metrics", values, global_step, walltime)

    def add_tensor(self, tag: str, tensor: Any, global_step: _Step = None, walltime: _Seconds = None) -> None:
        """Logs the shape and the values of a tensor, up to 10,000, as a table of one row."""

        def rows() -> list[list[Any]]:
            array = to_numpy(tensor)
            return [[list(array.shape), array]]

        self._log("log_table", ["shape", "values"], global_step, walltime, rows=rows, name=tag)

    def add_histogram(
        self,
        tag: str,
        values: Any,
        global_step: _Step = None,
        bins: Any = "tensorflow",
        walltime: _Seconds = None,
        max_bins: int | None = None,
    ) -> None:
        """Logs a histogram.

        Args:
            tag: the name.
            values: in any shape.
            global_step: as for all.
            bins: "tensorflow" for 64 of equal width; a number, edges, or the name of a rule of
                `numpy.histogram`.
            walltime: as for all.
            max_bins: the largest number of bins; edges that are given stay as they are.
        """

        def binned() -> Any:
            array = to_numpy(values).astype(np.float64).ravel()
            finite = array[np.isfinite(array)]
            number = len(np.histogram_bin_edges(finite, bins)) - 1
            counts, edges = np.histogram(finite, min(number, max_bins or number))
            mean, std = (float(finite.mean()), float(finite.std())) if finite.size else (None, None)
            return BinnedValues(counts, edges, non_finite=array.size - finite.size, mean=mean, std=std)

        if isinstance(bins, str) and bins != "tensorflow":
            self._log("log_histogram", binned, global_step, walltime, name=tag)
            return
        if isinstance(bins, str | int):
            number = _DEFAULT_BINS if isinstance(bins, str) else bins
            bins = min(number, max_bins or number)
        self._log("log_histogram", values, global_step, walltime, name=tag, bins=bins)

    def add_histogram_raw(
        self,
        tag: str,
        min: float,  # noqa: A002  # as theirs
        max: float,  # noqa: A002  # as theirs
        num: int,
        sum: float,  # noqa: A002  # as theirs
        sum_squares: float,
        bucket_limits: Any,
        bucket_counts: Any,
        global_step: _Step = None,
        walltime: _Seconds = None,
    ) -> None:
        """Logs a histogram of counts; each limit is the upper edge of its bin, the lowest edge is `min`."""

        def binned() -> BinnedValues:
            limits = [float(limit) for limit in bucket_limits]
            lowest = float(min) if min < limits[0] else math.nextafter(limits[0], -math.inf)
            mean = float(sum) / num if num else None
            variance = None if mean is None else float(sum_squares) / num - mean**2
            std = None if variance is None else math.sqrt(variance if variance > 0 else 0.0)
            return BinnedValues(
                [float(count) for count in bucket_counts],
                [lowest, *limits],
                count=num,
                min=float(min),
                max=float(max),
                mean=mean,
                std=std,
            )

        self._log("log_histogram", binned, global_step, walltime, name=tag)

    def add_image(
        self,
        tag: str,
        img_tensor: Any,
        global_step: _Step = None,
        walltime: _Seconds = None,
        dataformats: str = "CHW",
    ) -> None:
        """Logs an image; several, with an "N" in `dataformats`, as a grid of eight columns.

        Args:
            tag: the name.
            img_tensor: uint8, or float in [0, 1]; what is beyond is clipped.
            global_step: as for all.
            walltime: as for all.
            dataformats: a letter for each dimension, of N, C, H and W.
        """
        self._log_pixels(tag, lambda: pixels_of(img_tensor, dataformats), global_step, walltime)

    def add_images(
        self,
        tag: str,
        img_tensor: Any,
        global_step: _Step = None,
        walltime: _Seconds = None,
        dataformats: str = "NCHW",
    ) -> None:
        """Logs images as one grid of eight columns; see `add_image`."""
        self.add_image(tag, img_tensor, global_step, walltime, dataformats)

    def add_image_with_boxes(
        self,
        tag: str,
        img_tensor: Any,
        box_tensor: Any,
        global_step: _Step = None,
        walltime: _Seconds = None,
        rescale: float = 1,
        dataformats: str = "CHW",
        labels: Any = None,
    ) -> None:
        """Logs an image with red boxes `(N, 4)`: left, top, right, bottom; each may have a label."""

        def drawn() -> Array:
            from PIL import Image, ImageDraw

            image = Image.fromarray(pixels_of(img_tensor, dataformats))
            draw, boxes = ImageDraw.Draw(image), to_numpy(box_tensor).astype(float).tolist()
            texts = [labels] if isinstance(labels, str) else labels
            for index, (left, top, right, bottom) in enumerate(boxes):
                draw.rectangle((left, top, right, bottom), outline="red", width=2)
                if texts is not None and len(texts) == len(boxes):
                    draw.text((left + 3, top + 2), str(texts[index]), fill="red")
            size = int(image.width * rescale), int(image.height * rescale)
            return np.asarray(image if rescale == 1 else image.resize(size, Image.Resampling.LANCZOS))

        self._log_pixels(tag, drawn, global_step, walltime)

    def add_figure(
        self, tag: str, figure: Any, global_step: _Step = None, close: bool = True, walltime: _Seconds = None
    ) -> None:
        """Logs a figure of matplotlib, or a list of them as one grid, and closes them unless told not to."""
        figures = figure if isinstance(figure, list) else [figure]

        def drawn() -> Array:
            return grid_of(np.stack([figure_pixels(one) for one in figures]))

        self._log_pixels(tag, drawn, global_step, walltime)
        if close and (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            for one in figures:
                pyplot.close(one)

    def add_video(
        self, tag: str, vid_tensor: Any, global_step: _Step = None, fps: float = 4, walltime: _Seconds = None
    ) -> None:
        """Logs videos `(N, T, C, H, W)`, side by side as one."""

        def frames() -> Array:
            videos = as_bytes(to_numpy(vid_tensor))
            grids = [grid_of(np.moveaxis(frame, 1, -1)) for frame in np.moveaxis(videos, 1, 0)]
            return np.moveaxis(np.stack(grids), -1, 1)

        self._log("log_video", frames, global_step, walltime, fps=fps, name=tag)

    def add_audio(
        self,
        tag: str,
        snd_tensor: Any,
        global_step: _Step = None,
        sample_rate: int = 44100,
        walltime: _Seconds = None,
    ) -> None:
        """Logs audio `(1, L)` or `(L,)`, float in [-1, 1]; what is beyond is clipped."""

        def samples() -> Array:
            array = to_numpy(snd_tensor).squeeze()
            if array.dtype.kind != "f":
                return array
            return (array.clip(-1, 1) * np.iinfo(np.int16).max).astype(np.int16)

        self._log("log_audio", samples, global_step, walltime, sample_rate=sample_rate, name=tag)

    def add_text(
        self, tag: str, text_string: str, global_step: _Step = None, walltime: _Seconds = None
    ) -> None:
        """Logs a text."""
        self._log("log_text", text_string, global_step, walltime, name=tag)

    def add_pr_curve(
        self,
        tag: str,
        labels: Any,
        predictions: Any,
        global_step: _Step = None,
        num_thresholds: int = _MAX_THRESHOLDS,
        weights: Any = None,
        walltime: _Seconds = None,
    ) -> None:
        """Logs a precision-recall curve as a table, with a row for each of at most 127 thresholds.

        Args:
            tag: the name.
            labels: 0 or 1 for each sample.
            predictions: a probability for each.
            global_step: as for all.
            num_thresholds: of equal distance, from 0 to 1.
            weights: one for each sample, or for all.
            walltime: as for all.
        """

        def rows() -> list[list[float]]:
            count = min(num_thresholds, _MAX_THRESHOLDS)
            truth = to_numpy(labels).astype(np.float64).ravel()
            weight = 1.0 if weights is None else to_numpy(weights).astype(np.float64).ravel()
            # The last threshold that a prediction reaches.
            reached = np.floor(to_numpy(predictions).ravel() * (count - 1)).astype(np.int64)
            positives, negatives = (
                np.bincount(reached, one * weight, minlength=count)[::-1].cumsum()[::-1]
                for one in (truth, 1 - truth)
            )
            missed = positives[0] - positives
            precision = positives / np.maximum(positives + negatives, 1e-7)
            recall = positives / np.maximum(positives + missed, 1e-7)
            return curve_rows(positives, negatives, negatives[0] - negatives, missed, precision, recall)

        self._log("log_table", _PR_COLUMNS, global_step, walltime, rows=rows, name=tag)

    def add_pr_curve_raw(
        self,
        tag: str,
        true_positive_counts: Any,
        false_positive_counts: Any,
        true_negative_counts: Any,
        false_negative_counts: Any,
        precision: Any,
        recall: Any,
        global_step: _Step = None,
        num_thresholds: int = _MAX_THRESHOLDS,
        weights: Any = None,
        walltime: _Seconds = None,
    ) -> None:
        """Logs a precision-recall curve that is computed already, as `add_pr_curve` does."""
        counts = (true_positive_counts, false_positive_counts, true_negative_counts, false_negative_counts)

        def rows() -> list[list[float]]:
            return curve_rows(*map(to_numpy, (*counts, precision, recall)))

        self._log("log_table", _PR_COLUMNS, global_step, walltime, rows=rows, name=tag)

    def add_mesh(
        self,
        tag: str,
        vertices: Any,
        colors: Any = None,
        faces: Any = None,
        config_dict: Mapping[str, Any] | None = None,
        global_step: _Step = None,
        walltime: _Seconds = None,
    ) -> None:
        """Logs the vertices `(B, N, 3)` of meshes as point clouds, with their colours."""
        if faces is not None:
            self._say_not_kept("the faces of a mesh")
        if config_dict:
            self._say_not_kept("the configuration of a mesh")

        def colours() -> Any:
            array = None if colors is None else to_numpy(colors)
            return array if array is None or array.dtype.kind == "f" else array.astype(np.uint8)

        self._log("log_point_cloud", vertices, global_step, walltime, name=tag, colors=colours)

    def add_graph(
        self, model: Any, input_to_model: Any = None, verbose: bool = False, use_strict_trace: bool = True
    ) -> None:
        """Says once that graphs are not kept; the model is not traced."""
        self._say_not_kept("a graph")

    def add_onnx_graph(self, prototxt: Any) -> None:
        """Says once that graphs are not kept."""
        self._say_not_kept("a graph")

    def add_embedding(
        self,
        mat: Any,
        metadata: Any = None,
        label_img: Any = None,
        global_step: _Step = None,
        tag: str = "default",
        metadata_header: Any = None,
    ) -> None:
        """Says once that embeddings are not kept."""
        self._say_not_kept("an embedding")

    def add_custom_scalars(self, layout: Mapping[str, Any]) -> None:
        """Says once that layouts are not kept; the page draws any metrics in one chart."""
        self._say_not_kept("a layout of custom scalars")

    def add_custom_scalars_multilinechart(
        self, tags: Sequence[str], category: str = "default", title: str = "untitled"
    ) -> None:
        """Says once that layouts are not kept, as `add_custom_scalars`."""
        self._say_not_kept("a layout of custom scalars")

    def add_custom_scalars_marginchart(
        self, tags: Sequence[str], category: str = "default", title: str = "untitled"
    ) -> None:
        """Says once that layouts are not kept, as `add_custom_scalars`."""
        self._say_not_kept("a layout of custom scalars")

    def flush(self) -> None:
        """Writes what waits; blocks. Rows of metrics are safe without it."""
        with self._lock:
            if self._run is not None:
                self._run.flush()

    def close(self) -> None:
        """Ends the run as completed; a second call does nothing, and a later record opens it again."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the run: as completed, or as what the exception says."""
        self._end(exception)

    def _end(self, exception: BaseException | None) -> None:
        with self._lock:
            run, self._run = self._run, None
            if run is not None:
                run.__exit__(None if exception is None else type(exception), exception, None)

    def _opened(self) -> Run:
        """Returns the run; begins it, as at the first call, and at one after `close`."""
        if self._run is not None:
            return self._run
        folder = RunDirectory(self.log_dir, if_exists="resume", clock=self._now)
        loggers: list[Destination] = [folder]
        if self._event_files:
            from destinations.trackers.tensorboard.destination import TensorBoard

            loggers.append(TensorBoard(self.log_dir, clock=self._now))
        run = Run(loggers, run_name=Path(self.log_dir).absolute().name)
        run.run_event(Event.INIT)
        if folder.run_dir not in {None, Path(self.log_dir).absolute()}:
            self.log_dir = str(
                folder.run_dir
            )  # the given one is written to by another writer of this process
        if self.purge_step is not None:
            run.state.timestamp = run.state.timestamp.copy(batch=int(self.purge_step))
            run.fit_start()
            self.purge_step = None
        self._run = run
        return run

    def _now(self) -> float:
        return time.time() if self._walltime is None else float(self._walltime)

    def _log_pixels(
        self, tag: str, pixels: Callable[[], Array], global_step: _Step, walltime: _Seconds
    ) -> None:
        self._log("log_images", pixels, global_step, walltime, name=tag, channels_last=True)

    def _log(self, method: str, value: Any, global_step: _Step, walltime: _Seconds, **others: Any) -> None:
        """Logs a record of a step; the logger calls a value that is a function, and reports its errors."""
        step = 0 if global_step is None else int(global_step)
        with self._lock:
            self._walltime = walltime
            try:
                self._call(method, value, step=step, **others)
            finally:
                self._walltime = None
            state = self._opened().state
            if step > state.timestamp.batch.value:
                state.timestamp = state.timestamp.copy(batch=step)

    def _call(self, method: str, *arguments: Any, **others: Any) -> None:
        with self._lock:
            getattr(self._opened(), method)(*arguments, **others)

    def _say_not_kept(self, what: str) -> None:
        with self._lock:
            if what not in self._told:
                self._told.add(what)
                _log.warning("SummaryWriter: %s is not kept in a run folder. This is said once.", what)


def _scalar(value: Any, walltime: _Seconds) -> Any:
    """Returns a string that holds a number as that; with a time, a number that need not be waited for."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value.item() if walltime is not None and getattr(value, "is_cpu", True) is False else value
