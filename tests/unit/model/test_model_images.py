"""The same pixels here and where the exported model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.model import SCHEMAS
from optrun.model.images import PretrainedPreparation, ScratchPreparation, load_image_preparation


def picture(mode: str = "RGB") -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_what_is_saved_prepares_the_same(tmp_path: Path) -> None:
    own = ScratchPreparation(8, 3)
    own.save_pretrained(str(tmp_path))
    loaded = load_image_preparation(_pretrained(tmp_path))
    assert isinstance(loaded, PretrainedPreparation)
    assert np.allclose(own(picture()), loaded(picture()), atol=1e-6)
    assert np.allclose(own.resized(5)(picture()), loaded.resized(5)(picture()), atol=1e-6)
    loaded.save_pretrained(str(tmp_path / "again"))
    assert (tmp_path / "again" / "preprocessor_config.json").is_file()


def _pretrained(path: Path, **options: Any) -> Any:
    return choice("model", SCHEMAS, "pretrained", {"path": str(path), **options})


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
def test_any_mode_becomes_that_of_the_model(mode: str) -> None:
    for channels in (1, 3):
        pixels = ScratchPreparation(8, channels)(picture(mode))
        assert pixels.shape == (channels, 8, 8)
        assert pixels.dtype == np.float32
        assert -1 <= pixels.min() <= pixels.max() <= 1


def test_size_and_channels_come_from_the_architecture() -> None:
    made = load_image_preparation(choice("model", SCHEMAS, "vit_tiny", {}))
    assert isinstance(made, ScratchPreparation)
    assert (made.size, made.channels) == (32, 3)
    grey = choice("model", SCHEMAS, "vit_tiny", {"config": {"image_size": 12, "num_channels": 1}})
    made = load_image_preparation(grey)
    assert isinstance(made, ScratchPreparation)
    assert (made.size, made.channels) == (12, 1)
    resnet = load_image_preparation(
        choice("model", SCHEMAS, "from_config", {"model_type": "resnet"})
    )
    assert isinstance(resnet, ScratchPreparation)
    assert resnet.size == 224


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path=.*no image processor can be loaded"):
        load_image_preparation(_pretrained(tmp_path))
    with pytest.raises(ConfigError, match=r"model.tokenizer=x: images need no tokenizer"):
        load_image_preparation(choice("model", SCHEMAS, "vit_tiny", {"tokenizer": "x"}))
    with pytest.raises(ConfigError, match=r"model.config.num_channels=4"):
        load_image_preparation(
            choice("model", SCHEMAS, "vit_tiny", {"config": {"num_channels": 4}})
        )
