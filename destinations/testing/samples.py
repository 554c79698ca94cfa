"""One of each kind of thing that can be logged, and neighbours that misbehave."""

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from destinations.base import LoggerDestination
from destinations.kinds import KINDS
from events import Callback, Logger, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "WEIRD_NAMES",
    "LogsInClose",
    "UploadsThatFail",
    "every_kind_of_record",
    "is_lone_surrogate",
    "pixels",
]


class UploadsThatFail(LoggerDestination):
    """Takes files and loses every one of them, loudly."""

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        raise OSError(f"no way to store {remote_file_name}")

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        raise RuntimeError("no way to store metrics either")


class LogsInClose(Callback):
    """Logs a last metric when the run is closed."""

    def close(self, state: State, logger: Logger) -> None:
        logger.log_metrics({"last": 1.0}, step=99)


WEIRD_NAMES = (
    "",
    " ",
    "a/b/c",
    "/absolute",
    "../../up",
    "line\nbreak",
    "carriage\rreturn",
    "tab\there",
    "nul\0byte",
    "comma,semicolon;",
    "quote\"and'apostrophe",
    "{run_name}",
    "%s %d",
    "größe",
    "损失",
    "🙂",
    "lone\udc80surrogate",
    "step",
    "epoch",
    "CON",
    "x" * 300,
)


def is_lone_surrogate(name: str) -> bool:
    """Returns whether a name contains a lone surrogate, which UTF-8 cannot encode."""
    return any("\ud800" <= char <= "\udfff" for char in name)


def pixels(*shape: int) -> Any:
    """Returns an array of consecutive uint8 values."""
    import numpy as np

    return np.arange(math.prod(shape), dtype="uint8").reshape(shape)


def every_kind_of_record(folder: Path) -> "list[Callable[[Logger], None]]":
    """Returns a call for each documented argument of each `log_*` method."""
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(pixels(8, 9))
    path = folder / "picture.png"
    picture.save(path)
    sound = np.sin(np.linspace(0, 9, 800)).astype("float32")
    wav = _wav_bytes()
    arrays: list[Any] = [
        pixels(8, 9),
        pixels(1, 8, 9),
        pixels(3, 8, 9),
        pixels(4, 8, 9),
        pixels(2, 3, 8, 9),
        pixels(3, 8, 9) / 255,
        (pixels(3, 8, 9) / 255).astype("float16"),
        [pixels(3, 8, 9), pixels(8, 9)],
        picture,
        [picture, picture.convert("RGB"), picture.convert("RGBA")],
        path,
        str(path),
    ]
    last: list[Any] = [pixels(8, 9, 3), pixels(2, 8, 9, 3)]
    values: list[Any] = [pixels(8), [1, 2, 3.5], np.array([math.nan, 1.0]), np.array(3.0), pixels(2, 2) > 1]
    rows: list[list[Any]] = [
        [1, "a\nb", None],
        [math.nan, np.float32(0.1), picture],
        [True, [1, 2], pixels(2, 2)],
    ]
    for tensor in _tensors():
        arrays.append(tensor)
        values.append(tensor)
        rows.append([tensor, tensor.sum(), {"nested": tensor}])
    calls: list[Callable[[Logger], None]] = [
        *(lambda log, one=one: log.log_images(one, "images") for one in arrays),
        *(lambda log, one=one: log.log_images(one, "last", channels_last=True) for one in last),
        lambda log: log.log_images(
            pixels(2, 3, 8, 9),
            "masked",
            masks={"truth": pixels(2, 8, 9), "guess": [pixels(8, 9), pixels(8, 9)]},
            mask_class_labels={0: "nothing", 1: "cat"},
            use_table=False,
        ),
        *(lambda log, one=one: log.log_histogram(one, "histogram") for one in values),
        lambda log: log.log_histogram(pixels(8), "edges", bins=[0, 1, 10]),
        lambda log: log.log_table(["a", "b", "c"], rows, "table", step=3),
        lambda log: log.log_table([], [], "empty"),
        lambda log: log.log_text("first line\nsecond line\n", "text"),
        lambda log: log.log_text("", "nothing"),
        *(
            lambda log, one=one: log.log_audio(one, 8000, "audio")
            for one in (sound, np.stack([sound, sound]), (sound * 32767).astype("int16"), wav)
        ),
        lambda log: log.log_video(pixels(2, 3, 8, 10), 12.5, "video"),
        lambda log: log.log_video(pixels(2, 1, 8, 10) / 255, 10, "grey"),
        lambda log: log.log_point_cloud(pixels(4, 3).astype("float32"), "points"),
        lambda log: log.log_point_cloud(pixels(2, 4, 3) / 9, "clouds", colors=pixels(2, 4, 4)),
        lambda log: log.log_images(pixels(2, 3, 8, 9), "told", captions=["a cat", ""]),
        lambda log: log.log_images([pixels(8, 9), path], "told", captions=["first\nline", "größe"]),
        lambda log: log.log_table(["a"], [[1]], "told", caption="of one row"),
        lambda log: log.log_audio(sound, 8000, "told", caption="a tone"),
        lambda log: log.log_video(pixels(2, 3, 8, 10), 12.5, "told", caption="two frames", format="gif"),
        lambda log: log.log_point_cloud(pixels(4, 3).astype("float32"), "told", caption="four points"),
        lambda log: log.log_traces({"a": object(), "b": pixels(2, 2), "c": {"d": [1, None]}, "e": print}),
    ]
    return calls + [
        lambda log, kind=kind, one=one: log.log_record(kind.method.removeprefix("log_"), one)
        for kind in KINDS
        for one in kind.samples
    ]


def _tensors() -> list[Any]:
    try:
        import torch
    except ImportError:
        return []
    image = torch.rand(3, 8, 9)
    return [image, image.to(torch.bfloat16), image.requires_grad_() * 1, image[:, ::2, ::2]]


def _wav_bytes() -> bytes:
    import io
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(itertools.chain.from_iterable((n % 256, 0) for n in range(80))))
    return buffer.getvalue()
