"""The preparation of images for a vision model: size, channels and scale of the pixels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError, message_in_one_line
from optrun.config.schema.model import FromConfigConfig, ModelConfig, PretrainedConfig
from optrun.model.configuration import scratch_configuration
from optrun.model.tokenizer import load_by_name

if TYPE_CHECKING:
    from PIL import Image

USUAL_SIZE = 224
_MEAN = 0.5
_STD = 0.5
_BILINEAR = 2
"""Pillow's number for it, as `preprocessor_config.json` writes it."""


@dataclass(eq=False)
class ScratchPreparation:
    """Prepares images as ViT does: a square by bilinear interpolation, values from -1 to 1."""

    size: int
    """Side in pixels."""
    channels: int
    """3: RGB; 1: grey."""

    def resized(self, size: int) -> ScratchPreparation:
        """Return the same preparation for another side in pixels."""
        return ScratchPreparation(size, self.channels)

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Return the values of a PIL image; shape (channels, size, size), float32."""
        from PIL import Image

        plain = scale_to_8_bits(image).convert("RGB" if self.channels == 3 else "L")
        small = plain.resize((self.size, self.size), resample=Image.Resampling.BILINEAR)
        pixels = np.asarray(small, dtype=np.float32).reshape(self.size, self.size, self.channels)
        scaled = (pixels / np.float32(255) - np.float32(_MEAN)) / np.float32(_STD)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))

    def save_pretrained(self, folder: str) -> None:
        """Write `preprocessor_config.json` for `AutoImageProcessor`.

        It then prepares images as this class does.
        """
        values = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.size, "width": self.size},
            "resample": _BILINEAR,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [_MEAN] * self.channels,
            "image_std": [_STD] * self.channels,
        }
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / "preprocessor_config.json").write_text(
            json.dumps(values, indent=2) + "\n", encoding="utf-8"
        )


class PretrainedPreparation:
    """Prepares images with the model's own image processor, on Pillow in every installation.

    Args:
        processor: A transformers image processor.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def resized(self, size: int) -> PretrainedPreparation:
        """Return the same preparation for square images of another side in pixels.

        A processor that scales the shortest edge and then crops still does so.
        """
        values = self.processor.to_dict()
        square = {"height": size, "width": size}
        if "shortest_edge" in (values.get("size") or {}):
            values["size"] = {"shortest_edge": size}
        else:
            values["size"] = square
        if values.get("crop_size") is not None:
            values["crop_size"] = square
        return PretrainedPreparation(type(self.processor).from_dict(values))

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Return the values of a PIL image; shape (channels, height, width), float32."""
        plain = scale_to_8_bits(image).convert("RGB")
        pixels = self.processor(images=plain, return_tensors="np")["pixel_values"][0]
        return np.ascontiguousarray(pixels, dtype=np.float32)

    def save_pretrained(self, folder: str) -> None:
        """Write the processor beside a model."""
        self.processor.save_pretrained(folder)


def scale_to_8_bits(image: Image.Image) -> Image.Image:
    """Scale the grey values of an image with more than 8 bits to 0 to 255.

    Pillow's own `convert` cuts values off at 255, which makes an image of 16 bits white. Other
    images are returned unchanged.

    Raises:
        ConfigError: The values are not those of 8 or 16 bits, nor fractions from 0 to 1.
    """
    from PIL import Image

    if not image.mode.startswith(("I", "F")):  # Pillow's modes of integers and of floats
        return image
    values = np.asarray(image, dtype=np.float64)
    least = float(values.min())
    most = float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and 255 < most <= 65535):
        scale = 255 / 65535  # 16 bits
    elif image.mode == "F" and most <= 1:
        scale = 255.0  # fractions
    else:
        scale = 1.0  # 8 bits already
    if least < 0 or most * scale > 255:
        raise ConfigError(
            f"this image has values from {least:g} to {most:g}: expected 8 or 16 bits, or fractions"
            " from 0 to 1."
        )
    return Image.fromarray(np.rint(values * scale).astype(np.uint8))


def load_saved_preparation(folder: Path) -> PretrainedPreparation:
    """Load the image processor of a run.

    Args:
        folder: The folder to which `save_pretrained` wrote it.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from transformers import AutoImageProcessor

    try:
        return PretrainedPreparation(AutoImageProcessor.from_pretrained(str(folder), backend="pil"))
    except Exception as error:  # OSError, ValueError, and what a damaged file brings
        raise ConfigError(
            f"{folder}: the image processor of the run cannot be loaded:"
            f" {message_in_one_line(error)}. Restore the folder."
        ) from error


def load_image_preparation(config: ModelConfig) -> ScratchPreparation | PretrainedPreparation:
    """Load the image processor of a pretrained model, or build one for a model from scratch.

    A model from scratch gets squares of its `image_size`, by default 224 pixels.

    Args:
        config: The model choice.

    Raises:
        ConfigError: A pretrained model has none, `model.tokenizer` is set, or a configuration from
            scratch is for images that are not square, or have neither 1 nor 3 channels.
    """
    if config.tokenizer is not None:
        raise ConfigError(
            f"model.tokenizer={config.tokenizer}: images need no tokenizer; leave it null."
        )
    if isinstance(config, FromConfigConfig):
        values = scratch_configuration(config)
        size = getattr(values, "image_size", None)
        if isinstance(size, list | tuple) and len(set(size)) == 1:
            size = size[0]
        if size is not None and not isinstance(size, int):
            raise ConfigError(
                f"model.config.image_size={size}: expected one number: images are made square."
            )
        channels = getattr(values, "num_channels", 3)
        if channels not in (1, 3):
            raise ConfigError(
                f"model.config.num_channels={channels}: expected 3 (RGB) or 1 (grey)."
            )
        return ScratchPreparation(size or USUAL_SIZE, channels)
    assert isinstance(config, PretrainedConfig)
    from transformers import AutoImageProcessor

    def load(path: str) -> Any:
        return AutoImageProcessor.from_pretrained(
            path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            backend="pil",
        )

    return PretrainedPreparation(load_by_name("model.path", config.path, "image processor", load))
