"""Images of any mode have the values that a person sees."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from optrun.base.errors import ConfigError
from optrun.data.images import decoded
from optrun.model.images import ScratchPreparation, scale_to_8_bits

GREY = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)


def prepared(image: Any, form: str = "PNG", **options: Any) -> np.ndarray:
    file = io.BytesIO()
    image.save(file, form, **options)
    return ScratchPreparation(8, 3)(decoded(file.getvalue()))


def test_modes_agree() -> None:
    plain = Image.fromarray(GREY)
    expected = prepared(plain)
    assert expected.min() == -1
    assert expected.max() == 1
    sixteen = Image.fromarray(GREY.astype(np.uint16) * 257)
    turned = plain.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    opaque = Image.merge("LA", (plain, Image.new("L", plain.size, 255)))
    for name, found in {
        "16 bits": prepared(sixteen),
        "16 bits in a tiff": prepared(sixteen, "TIFF"),
        "fractions": prepared(Image.fromarray(GREY.astype(np.float32) / 255), "TIFF"),
        "palette": prepared(plain.convert("P")),
        "alpha": prepared(opaque),
        "cmyk": prepared(plain.convert("RGB").convert("CMYK"), "TIFF"),
        "turned by its camera": prepared(turned, exif=exif),
    }.items():
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=name)


def test_values_that_nobody_knows_are_refused() -> None:
    for values in (np.full((2, 2), 70000), np.full((2, 2), -3)):
        with pytest.raises(ConfigError, match="expected 8 or 16 bits"):
            scale_to_8_bits(Image.fromarray(values.astype(np.int32)))


def test_a_shape_that_lies_in_alpha_alone_is_refused() -> None:
    """Without its alpha channel, a black logo on nothing is a black square."""
    pixels = np.zeros((4, 4, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    for place, is_refused in (((0, 0, 3), True), ((0, 0, 1), False)):
        shape = pixels.copy()
        shape[place] = 9
        file = io.BytesIO()
        Image.fromarray(shape).save(file, "png")
        if is_refused:
            with pytest.raises(ConfigError, match="alpha channel"):
                decoded(file.getvalue())
        else:
            assert decoded(file.getvalue()).size == (4, 4)
