"""Audio: WAV files below `media/`, or the files that were logged."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.run_directory.layout import MEDIA_FOLDER
from uploads.disk import read_regular

from .kind import Kind, RecordOutput, Work
from .line import Line, whole_of
from .media import MAX_MEDIUM_BYTES, MEDIA_INDEX, Medium, copy_medium, medium_fields, open_file

if TYPE_CHECKING:
    import numpy as np

__all__ = ["AUDIO", "Audio", "read_sound"]

_DEFAULT_RATE = 44100


def read_sound(path: Path) -> "tuple[np.ndarray[Any, np.dtype[np.int16]], int]":
    """Returns the samples of a WAV file, int16 `(frames, channels)`, and its sample rate in Hz.

    Raises:
        ValueError: the file is not a WAV of 16 bits; the message has its path.
    """
    import wave

    import numpy as np

    try:
        with open_file(path) as raw, wave.open(raw) as file:
            if file.getsampwidth() != 2:  # noqa: PLR2004  # bytes
                raise ValueError(f"audio {path} has {8 * file.getsampwidth()} bits, not 16. Open its path.")
            channels = file.getnchannels()
            size = min(MAX_MEDIUM_BYTES, os.fstat(raw.fileno()).st_size)
            data = file.readframes(min(file.getnframes(), size // max(1, 2 * channels)))
            whole = len(data) // (2 * channels)
            return np.frombuffer(data, "<i2", whole * channels).reshape(-1, channels), file.getframerate()
    except (wave.Error, EOFError, RuntimeError) as error:
        raise ValueError(f"audio {path} is not a WAV file ({error}). Open its path.") from error


@attrs.frozen
class Audio(Medium):
    """An audio clip.

    Attributes:
        sample_rate: in Hz; None if unknown.
    """

    sample_rate: int | None = None

    def load(self) -> "tuple[np.ndarray[Any, np.dtype[np.int16]], int]":
        """Returns the samples of a WAV file, int16 `(frames, channels)`, and its sample rate.

        Raises:
            ValueError: the file is not a WAV of 16 bits.
        """
        return read_sound(self.path)


def _write(_name: str, *, audio: Any, sample_rate: int, caption: str | None = None) -> tuple[int, Work]:
    from destinations.copies import size_in_bytes
    from destinations.media import wav_bytes

    copied = copy_medium(audio)
    shape = None if isinstance(copied, bytes) else list(copied.shape)

    def work(output: RecordOutput) -> None:
        data = wav_bytes(copied, sample_rate)
        output.add_medium(".wav", data, caption=caption, sample_rate=sample_rate, shape=shape)

    return size_in_bytes(copied), work


def _parse(line: Line) -> Audio:
    return Audio(**medium_fields(line), sample_rate=line.whole("sample_rate"))


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    (line,) = lines
    rate = whole_of(line.fields.get("sample_rate")) or _DEFAULT_RATE
    return {"audio": _sound_of(line), "sample_rate": rate}


def _sound_of(line: Line) -> "np.ndarray[Any, Any] | bytes":
    """Returns audio as int16 `(samples,)` or `(channels, samples)`, or the bytes of an encoded file."""
    path, shape = line.file(), line.fields.get("shape")
    if shape is None:
        return read_regular(path, MAX_MEDIUM_BYTES)
    samples, _ = read_sound(path)
    return samples[:, 0] if len(shape) == 1 else samples.T


AUDIO = Kind(
    name="audio",
    index=MEDIA_INDEX,
    write=_write,
    parse=_parse,
    replay=_replay,
    copies={"audio": copy_medium},
    plural="audio",
    noun="sound",
    shows="audio",
    folder=MEDIA_FOLDER,
)
