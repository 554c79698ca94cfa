"""Images, with masks: PNG files below `media/`."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.run_directory.layout import MEDIA_FOLDER

from .kind import FileOf, Kind, RecordOutput, Work
from .line import Line, number_of
from .media import MEDIA_INDEX, Medium, check_name, copy_medium, medium_fields, open_file

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

    from destinations.media import Pixels
    from events import RecordError

__all__ = ["IMAGE", "Image", "Mask", "open_image", "read_pixels"]

# For some other formats, Pillow starts external programs.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_WITH_CHANNELS = 3


@contextlib.contextmanager
def open_image(path: Path) -> "Iterator[PIL.Image.Image]":
    """Opens an image file for the duration of a `with` block.

    Raises:
        OSError: the file can't be read or is not an image.
        ValueError: the image is damaged or a decompression bomb; the message has its path.
    """
    import struct

    import PIL.Image

    try:
        with open_file(path) as file, PIL.Image.open(file, formats=_IMAGE_FORMATS) as image:
            yield image
    except (SyntaxError, EOFError, struct.error, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"could not decode image {path} ({error}).") from error


def read_pixels(path: Path) -> "np.ndarray[Any, Any]":
    """Returns the pixels of an image file, `(H, W)` or `(H, W, C)`."""
    import numpy as np

    with open_image(path) as image:
        return np.array(image)


@attrs.frozen
class Mask:
    """A segmentation mask of an image; its pixels are class indices.

    Attributes:
        path: a PNG of the indices.
        overlay: a PNG of the image with the coloured mask.
    """

    path: Path
    overlay: Path | None

    def load(self) -> "np.ndarray[Any, Any]":
        """Returns the indices, `(H, W)`."""
        return read_pixels(self.path)


@attrs.frozen
class Image(Medium):
    """An image.

    Attributes:
        masks: masks by name.
        class_labels: names of the class indices.
        value_range: min and max of the logged integers, if they were scaled to pixels.
    """

    masks: Mapping[str, Mask] = attrs.field(factory=dict)
    class_labels: Mapping[int, str] = attrs.field(factory=dict)
    value_range: tuple[float, float] | None = None

    def load(self) -> "PIL.Image.Image":
        """Returns the decoded image."""
        with open_image(self.path) as image:
            image.load()
            return image

    def array(self) -> "np.ndarray[Any, Any]":
        """Returns the pixels, uint8 `(H, W)`, `(H, W, 3)` or `(H, W, 4)`."""
        return read_pixels(self.path)


def _write(
    name: str,
    *,
    images: Any,
    channels_last: bool,
    masks: "Mapping[str, Any] | None",
    mask_class_labels: "Mapping[int, str] | None",
    use_table: bool = True,  # noqa: ARG001  # only W&B uses it
    captions: Sequence[str] = (),
) -> tuple[int, Work]:
    """Copies images. Each image becomes a PNG, and each mask a PNG with an overlay."""
    from destinations.copies import size_in_bytes
    from destinations.media import iter_masks, mask_png, overlay_png, png_bytes
    from events import RecordError

    images, masks = copy_medium(images), copy_medium(masks or {})
    for mask_name in masks:
        check_name(mask_name)
    labels = None
    if mask_class_labels is not None:
        labels = {str(key): label for key, label in mask_class_labels.items()}
    texts = list(captions)

    def work(output: RecordOutput) -> None:
        def add_mask(key: str, pixels: Any, mask: Any) -> dict[str, str]:
            files = {
                "path": (".mask.png", mask_png(mask)),
                "overlay": (".overlay.png", overlay_png(pixels, mask)),
            }
            return {
                what: output.add_file(suffix, data, name=f"{name}/{key}")
                for what, (suffix, data) in files.items()
            }

        by_mask = {key: list(iter_masks(mask)) for key, mask in masks.items()}
        failures = []
        for index, pixels in enumerate(_decoded(images, channels_last)):
            if isinstance(pixels, RecordError):
                failures.append(f"image {index} of {name!r} was left out: {pixels}")
                continue
            caption = texts[index] if index < len(texts) else None
            more: dict[str, Any] = {"caption": caption or None, "shape": list(pixels.shape)}
            if pixels.value_range is not None:
                more["value_range"] = list(pixels.value_range)
            if by_mask:
                more["masks"] = {
                    key: add_mask(key, pixels.array, found[index]) for key, found in by_mask.items()
                }
                more["mask_class_labels"] = labels
            output.add_medium(".png", png_bytes(pixels.array), index=index, **more)
        if failures:
            raise RecordError("; ".join(failures))

    return size_in_bytes([images, masks]), work


def _decoded(images: Any, channels_last: bool) -> "Iterator[Pixels | RecordError]":
    """Yields each image, or the error if it can't be decoded, such as for a truncated file."""
    from destinations.media import iter_images
    from events import RecordError

    for one in images if isinstance(images, list) else [images]:
        try:
            yield from iter_images(one, channels_last)
        except RecordError as error:
            yield error


def _parse(line: Line) -> Image:
    fields = line.fields
    masks = {
        str(name): Mask(
            Line(line.run_dir, mask).path(),
            Line(line.run_dir, mask).path("overlay") if mask.get("overlay") else None,
        )
        for name, mask in (fields.get("masks") or {}).items()
    }
    labels = {int(key): str(label) for key, label in (fields.get("mask_class_labels") or {}).items()}
    bounds: Any = [number_of(bound) for bound in fields.get("value_range") or ()]
    return Image(
        **medium_fields(line),
        masks=masks,
        class_labels=labels,
        value_range=(bounds[0], bounds[1]) if len(bounds) == 2 else None,  # noqa: PLR2004  # min, max
    )


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    first = lines[0].fields
    images: Any = [_array_of(line) for line in lines]
    # Restore the original position of the channels.
    is_last = [
        image.ndim == _WITH_CHANNELS
        and list(line.fields.get("shape") or ()) == [*image.shape[1:], image.shape[0]]
        for line, image in zip(lines, images, strict=True)
    ]
    labels = first.get("mask_class_labels")
    texts = [str(line.fields.get("caption") or "") for line in lines]
    return {
        "images": [
            _channels_last(image, as_array=all(is_last)) if last else image
            for last, image in zip(is_last, images, strict=True)
        ],
        "channels_last": all(is_last),
        "masks": {
            mask: [read_pixels(Line(line.run_dir, line.fields["masks"][mask]).file()) for line in lines]
            for mask in first.get("masks") or {}
        }
        or None,
        "mask_class_labels": None if labels is None else {int(key): label for key, label in labels.items()},
        "captions": texts if any(texts) else None,
    }


def _array_of(line: Line) -> "np.ndarray[Any, Any]":
    """Returns an image, `(H, W)` or `(C, H, W)`: uint8, or integers in the original value range."""
    import numpy as np

    from destinations.media import picture_array

    with open_image(line.file()) as picture:
        pixels = picture_array(picture)
    if pixels.ndim == _WITH_CHANNELS:
        pixels = np.moveaxis(pixels, -1, 0)
    elif len(line.fields.get("shape") or ()) == _WITH_CHANNELS:  # A single channel.
        pixels = pixels[None]
    value_range = line.fields.get("value_range")
    if value_range is None:
        return pixels
    low, high = map(float, value_range)
    # Integers, because floats are clipped to [0, 1]. Scaling them again gives the same pixels.
    integers: np.ndarray[Any, Any] = np.round(low + pixels / 255.0 * (high - low)).astype(np.int64)
    return integers


def _channels_last(image: Any, *, as_array: bool) -> Any:
    """Returns `(C, H, W)` as `(H, W, C)`; without `as_array`, uint8 as a PIL image."""
    import numpy as np

    moved = np.ascontiguousarray(np.moveaxis(image, 0, -1))
    if as_array or moved.dtype != np.uint8:
        return moved
    import PIL.Image

    return PIL.Image.fromarray(moved)


def _page_fields(image: Image, fields: dict[str, Any], file_of: FileOf) -> dict[str, Any]:
    masks = {
        name: {
            "file": file_of(mask.path),
            "overlay": None if mask.overlay is None else file_of(mask.overlay),
        }
        for name, mask in image.masks.items()
    }
    return {**fields, "masks": masks, "labels": fields.pop("class_labels")}


IMAGE = Kind(
    name="image",
    index=MEDIA_INDEX,
    write=_write,
    parse=_parse,
    replay=_replay,
    copies={"images": copy_medium, "masks": copy_medium},
    method="log_images",
    shows="image",
    folder=MEDIA_FOLDER,
    is_grouped=True,
    page_fields=_page_fields,
)
