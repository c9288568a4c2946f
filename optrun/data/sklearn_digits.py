"""Handwritten digits of scikit-learn: 1,797 grey images of 8 by 8 pixels."""

from __future__ import annotations

from optrun.base.errors import ConfigError
from optrun.config.schema.data import ColumnsConfig, DigitsConfig
from optrun.data.images import need_pillow
from optrun.data.source import Source, Split, cut


def load_sklearn_digits(config: DigitsConfig, *, documents: bool) -> Source:
    """Read the images and their labels, with the same split for every seed.

    Raises:
        ConfigError: scikit-learn or Pillow is not installed.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (test set), UCI,
        doi:10.24432/C50P49.
    """
    import datasets

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            f"data={config.name}: the images lie in scikit-learn, which is not installed. "
            "pip install 'optrun[benchmark]'"
        ) from error
    library = need_pillow()
    digits = load_digits()
    shades = (digits.images * (255 / 16)).round().astype("uint8")  # from 0 to 16 there
    images = [library.fromarray(pixels) for pixels in shades]
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("string"))
    columns = {"image": images, "label": [str(label) for label in digits.target]}
    every = Split(datasets.Dataset.from_dict(columns, features), f"data={config.name}")
    columns_config = ColumnsConfig(name=config.name, image_column="image", label_column="label")
    if not config.eval_fraction:
        return Source(every, {}, columns_config)
    train, evaluation, _ = cut(every, config.eval_fraction, seed=0, documents=documents)
    note = f"{len(train.rows):,} images for training, {len(evaluation.rows):,} for evaluation"
    return Source(train, {"": evaluation}, columns_config, cut_from_train=True, notes=[note])
