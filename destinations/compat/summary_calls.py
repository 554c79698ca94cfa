"""The calls of PyTorch's writer for TensorBoard, as records of any run: see `SummaryCalls`."""

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from destinations.media import to_numpy
from events import BinnedValues, as_picture

from .arrays import as_bytes, curve_rows, grid_of, pixels_of, videos_side_by_side

__all__ = ["Seconds", "Step", "SummaryCalls"]

_log = logging.getLogger("destinations")

Array = np.ndarray[Any, Any]
Step = int | None
Seconds = float | None

_DEFAULT_BINS = 64
_MAX_THRESHOLDS = 127
_COUNTS = "true positives,false positives,true negatives,false negatives"
_PR_COLUMNS = f"threshold,{_COUNTS},precision,recall".split(",")


def _not_kept(what: str) -> Callable[..., None]:
    """Returns a method that takes any arguments and warns once that they are not kept."""

    def add(self: "SummaryCalls", *_: Any, **__: Any) -> None:
        self._say_not_kept(what)

    add.__doc__ = f"Warns once that {what} is not kept."
    return add


class SummaryCalls:
    """The methods of `torch.utils.tensorboard.SummaryWriter` that log; `put` decides where to.

    ```python
    from destinations.compat.summary_calls import SummaryCalls

    class Shown(SummaryCalls):
        def put(self, method, value, step, walltime, **others):
            print(method, value, step)

    Shown().add_scalar("loss", 0.5, 3)  # prints: log_metrics {'loss': 0.5} 3
    ```
    """

    def put(self, method: str, value: Any, step: Step, walltime: Seconds, **others: Any) -> None:
        """Logs one record by a method of `Logger`, such as "log_images", and its first argument.

        If the value is a function, call it and report its errors. `walltime` is in seconds since 1970, None
        for now.
        """
        raise NotImplementedError

    def add_hparams(
        self,
        hparam_dict: Mapping[str, Any],
        metric_dict: Mapping[str, Any],
        hparam_domain_discrete: Mapping[str, Sequence[Any]] | None = None,
        run_name: str | None = None,
        global_step: Step = None,
    ) -> None:
        """Logs hyperparameters of the run, and metrics; a TypeError if one of the two is not a dict."""
        dicts: tuple[Any, ...] = (hparam_dict, metric_dict)
        if not all(isinstance(one, Mapping) for one in dicts):
            given = " and ".join(type(one).__name__ for one in dicts)
            raise TypeError(f"hparam_dict and metric_dict must be dicts, got {given}.")
        if hparam_domain_discrete:
            self._say_not_kept("the domain of hyperparameters")
        self.put("log_hyperparameters", dict(hparam_dict), None, None)
        for tag, value in metric_dict.items():
            self.add_scalar(tag, value, global_step)

    def add_scalar(
        self,
        tag: str,
        scalar_value: Any,
        global_step: Step = None,
        walltime: Seconds = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        """Logs a scalar; the last two arguments are ignored."""
        self.put("log_metrics", {tag: _scalar(scalar_value, walltime)}, global_step, walltime)

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: Step = None,
        walltime: Seconds = None,
    ) -> None:
        """Logs scalars as "main_tag/tag", in one row."""
        values = {f"{main_tag}/{tag}": _scalar(value, walltime) for tag, value in tag_scalar_dict.items()}
        self.put("log_metrics", values, global_step, walltime)

    def add_tensor(self, tag: str, tensor: Any, global_step: Step = None, walltime: Seconds = None) -> None:
        """Logs the shape and up to 10,000 values of a tensor as a table of one row."""

        def rows() -> list[list[Any]]:
            array = to_numpy(tensor)
            return [[list(array.shape), array]]

        self.put("log_table", ["shape", "values"], global_step, walltime, rows=rows, name=tag)

    def add_histogram(
        self,
        tag: str,
        values: Any,
        global_step: Step = None,
        bins: Any = "tensorflow",
        walltime: Seconds = None,
        max_bins: int | None = None,
    ) -> None:
        """Logs a histogram of values in any shape.

        `bins` is "tensorflow" for 64 of equal width, a number, edges, or the name of a rule in
        `numpy.histogram`; `max_bins` limits their number, unless they are edges.
        """

        def binned() -> Any:
            array = to_numpy(values).astype(np.float64).ravel()
            finite = array[np.isfinite(array)]
            number = len(np.histogram_bin_edges(finite, bins)) - 1
            counts, edges = np.histogram(finite, min(number, max_bins or number))
            mean, std = (float(finite.mean()), float(finite.std())) if finite.size else (None, None)
            return BinnedValues(counts, edges, non_finite=array.size - finite.size, mean=mean, std=std)

        if isinstance(bins, str) and bins != "tensorflow":
            self.put("log_histogram", binned, global_step, walltime, name=tag)
            return
        if isinstance(bins, str | int):
            number = _DEFAULT_BINS if isinstance(bins, str) else bins
            bins = min(number, max_bins or number)
        self.put("log_histogram", values, global_step, walltime, name=tag, bins=bins)

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
        global_step: Step = None,
        walltime: Seconds = None,
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

        self.put("log_histogram", binned, global_step, walltime, name=tag)

    def add_image(
        self,
        tag: str,
        img_tensor: Any,
        global_step: Step = None,
        walltime: Seconds = None,
        dataformats: str = "CHW",
    ) -> None:
        """Logs an image; several, with an "N" in `dataformats`, as a grid of eight columns.

        `img_tensor` is uint8, or float clipped to [0, 1]. `dataformats` has a letter for each of its
        dimensions: N, C, H or W.
        """
        self._put_pixels(tag, lambda: pixels_of(img_tensor, dataformats), global_step, walltime)

    def add_images(
        self,
        tag: str,
        img_tensor: Any,
        global_step: Step = None,
        walltime: Seconds = None,
        dataformats: str = "NCHW",
    ) -> None:
        """Logs images as one grid of eight columns; see `add_image`."""
        self.add_image(tag, img_tensor, global_step, walltime, dataformats)

    def add_image_with_boxes(
        self,
        tag: str,
        img_tensor: Any,
        box_tensor: Any,
        global_step: Step = None,
        walltime: Seconds = None,
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

        self._put_pixels(tag, drawn, global_step, walltime)

    def add_figure(
        self, tag: str, figure: Any, global_step: Step = None, close: bool = True, walltime: Seconds = None
    ) -> None:
        """Logs a figure of matplotlib, or a list of them as one grid, and closes them unless told not to."""
        figures = figure if isinstance(figure, list) else [figure]

        def drawn() -> Array:
            return grid_of(np.stack([np.asarray(as_picture(one).convert("RGB")) for one in figures]))

        self._put_pixels(tag, drawn, global_step, walltime)
        if close and (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            for one in figures:
                pyplot.close(one)

    def add_video(
        self, tag: str, vid_tensor: Any, global_step: Step = None, fps: float = 4, walltime: Seconds = None
    ) -> None:
        """Logs videos `(N, T, C, H, W)`, side by side as one."""

        def frames() -> Array:
            return videos_side_by_side(as_bytes(to_numpy(vid_tensor)))

        self.put("log_video", frames, global_step, walltime, fps=fps, name=tag)

    def add_audio(
        self,
        tag: str,
        snd_tensor: Any,
        global_step: Step = None,
        sample_rate: int = 44100,
        walltime: Seconds = None,
    ) -> None:
        """Logs audio `(1, L)` or `(L,)`, float clipped to [-1, 1]."""

        def samples() -> Array:
            array = to_numpy(snd_tensor).squeeze()
            if array.dtype.kind != "f":
                return array
            return (array.clip(-1, 1) * np.iinfo(np.int16).max).astype(np.int16)

        self.put("log_audio", samples, global_step, walltime, sample_rate=sample_rate, name=tag)

    def add_text(
        self, tag: str, text_string: str, global_step: Step = None, walltime: Seconds = None
    ) -> None:
        """Logs a text."""
        self.put("log_text", text_string, global_step, walltime, name=tag)

    def add_pr_curve(
        self,
        tag: str,
        labels: Any,
        predictions: Any,
        global_step: Step = None,
        num_thresholds: int = _MAX_THRESHOLDS,
        weights: Any = None,
        walltime: Seconds = None,
    ) -> None:
        """Logs a precision-recall curve as a table, with a row for each of at most 127 thresholds in [0, 1].

        `labels` are 0 or 1 and `predictions` probabilities, one per sample; `weights` may have one per sample
        too.
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

        self.put("log_table", _PR_COLUMNS, global_step, walltime, rows=rows, name=tag)

    def add_pr_curve_raw(
        self,
        tag: str,
        true_positive_counts: Any,
        false_positive_counts: Any,
        true_negative_counts: Any,
        false_negative_counts: Any,
        precision: Any,
        recall: Any,
        global_step: Step = None,
        num_thresholds: int = _MAX_THRESHOLDS,
        weights: Any = None,
        walltime: Seconds = None,
    ) -> None:
        """Logs a precomputed precision-recall curve, like `add_pr_curve`."""
        counts = (true_positive_counts, false_positive_counts, true_negative_counts, false_negative_counts)

        def rows() -> list[list[float]]:
            return curve_rows(*map(to_numpy, (*counts, precision, recall)))

        self.put("log_table", _PR_COLUMNS, global_step, walltime, rows=rows, name=tag)

    def add_mesh(
        self,
        tag: str,
        vertices: Any,
        colors: Any = None,
        faces: Any = None,
        config_dict: Mapping[str, Any] | None = None,
        global_step: Step = None,
        walltime: Seconds = None,
    ) -> None:
        """Logs the vertices `(B, N, 3)` of meshes as point clouds, with their colours."""
        if faces is not None:
            self._say_not_kept("the faces of a mesh")
        if config_dict:
            self._say_not_kept("the configuration of a mesh")

        def colours() -> Any:
            array = None if colors is None else to_numpy(colors)
            return array if array is None or array.dtype.kind == "f" else array.astype(np.uint8)

        self.put("log_point_cloud", vertices, global_step, walltime, name=tag, colors=colours)

    add_graph = add_onnx_graph = _not_kept("a graph")
    add_embedding = _not_kept("an embedding")
    # The page draws any metrics in one chart.
    add_custom_scalars = _not_kept("a layout of custom scalars")
    add_custom_scalars_multilinechart = add_custom_scalars_marginchart = add_custom_scalars

    def _put_pixels(self, tag: str, pixels: Callable[[], Array], step: Step, walltime: Seconds) -> None:
        self.put("log_images", pixels, step, walltime, name=tag, channels_last=True)

    def _say_not_kept(self, what: str) -> None:
        told: set[str] = self.__dict__.setdefault("_not_kept", set())
        if what not in told:
            told.add(what)
            _log.warning(
                "SummaryWriter: %s is not kept in a run folder. Further calls are not reported.", what
            )


def _scalar(value: Any, walltime: Seconds) -> Any:
    """Converts a string with a number; with a `walltime`, reads a value on a device at once."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value.item() if walltime is not None and getattr(value, "is_cpu", True) is False else value
