"""Images of files or of a column, decoded when they are needed."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.reading import expand_home, read_bytes
from optrun.data.cache import digest, digest_of
from optrun.data.source import Split

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST_IMAGE = 2**28
"""Bytes of a file."""


def need_pillow() -> Any:
    """Import the module `PIL.Image`, or say how to install it.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "images need the package pillow, which is not installed. pip install 'optrun[vision]'"
        ) from error
    return Image


@dataclass(frozen=True)
class Encoded:
    """One image, not decoded yet."""

    content: bytes
    where: str
    """For messages: split, row, and file where there is one."""

    def decoded(self) -> Image:
        """Decode to a PIL image, turned as its camera says.

        Raises:
            ConfigError: It cannot be decoded.
        """
        try:
            return decoded(self.content)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def decoded(content: bytes) -> Image:
    """Decode an encoded image to a PIL image, turned as its camera says.

    Raises:
        ConfigError: It cannot be decoded.
    """
    library = need_pillow()
    from PIL import ImageOps

    try:
        with library.open(io.BytesIO(content)) as image:
            image.load()
            turned = ImageOps.exif_transpose(image)
    except (
        OSError,
        ValueError,
        SyntaxError,
        library.DecompressionBombError,
    ) as error:  # what Pillow raises
        raise ConfigError(f"this image cannot be decoded: {error}") from error
    if has_shape_in_alpha(turned):
        raise ConfigError(
            "this image has one colour, and its shape is in the alpha channel, which image"
            " processors drop. Save it on a background of another colour."
        )
    return turned


def has_shape_in_alpha(image: Image) -> bool:
    """Tell whether an image has one colour behind an alpha channel that varies, as logos do.

    Image processors drop that channel, as `convert("RGB")` does: one colour is left.
    """
    if "A" not in image.getbands():
        return False
    extrema = image.convert("RGBA").getextrema()
    is_constant = [low == high for low, high in extrema]
    return is_constant == [True, True, True, False]


def content_of(value: object) -> bytes | str | None:
    """Return the bytes of an image cell, else the path of its file; None or empty: no image."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | str):
        return value
    return None


class Images:
    """A column of images, each read when it is needed.

    Args:
        split: The rows.
        column: An `Image` column of `datasets`, or one of paths.

    Raises:
        ConfigError: The column holds something else; Pillow is missing.
    """

    def __init__(self, split: Split, column: str) -> None:
        import datasets

        need_pillow()
        feature = split.rows.features[column]
        if isinstance(feature, datasets.Image):
            self.rows = split.rows.select_columns([column]).cast_column(
                column, datasets.Image(decode=False)
            )
        elif getattr(feature, "dtype", None) in (
            "string",
            "binary",
            "large_string",
            "large_binary",
        ):
            self.rows = split.rows.select_columns([column])
        else:
            raise ConfigError(
                f"data.image_column={column}: {split.key} holds {feature} there, no images and no"
                " paths."
            )
        self.split = split
        self.column = column

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Encoded:
        """Read one image; a path is tried from the working folder, then from the table's folder.

        Raises:
            ConfigError: The row has none, or its file cannot be read.
        """
        value = content_of(self.rows[int(index)][self.column])
        where = f"{self.split.key}: row {self.split.number(int(index))}"
        if isinstance(value, bytes):
            return Encoded(value, where)
        if not value:
            raise ConfigError(f"{where} has no image in column {self.column}.")
        path = expand_home(value)
        if (
            self.split.folder is not None
            and not path.exists()
            and (self.split.folder / path).exists()
        ):
            path = self.split.folder / path
        try:
            return Encoded(read_bytes(path, _LARGEST_IMAGE, follow=True), f"{where} ({path})")
        except OSError as error:
            raise ConfigError(
                f"{where}: {path}: cannot be read: {error.strerror or error}."
            ) from error
        except UnreadableFileError as error:
            raise ConfigError(f"{where}: {error}") from error

    def fingerprint(self, labels: np.ndarray) -> str:
        """Digest the bytes and labels of all images, and check that Pillow can read each header.

        Args:
            labels: Shape (images,), int64.

        Raises:
            ConfigError: A row is no image, or too large; the message names the first one.
        """
        images_digest = digest_of(map(self._read_checked, range(len(self))))
        return digest(images_digest, labels.tobytes())

    def _read_checked(self, index: int) -> bytes:
        """Return the bytes of an image after a check of its header and size."""
        image = self[index]
        library = need_pillow()
        try:
            library.open(io.BytesIO(image.content)).close()
        except library.DecompressionBombError as error:
            raise ConfigError(f"{image.where}: {error} Give a smaller image.") from error
        except (OSError, ValueError, SyntaxError) as error:
            raise ConfigError(f"{image.where}: Pillow cannot read this image.") from error
        return image.content
