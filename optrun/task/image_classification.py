"""Classification of images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from optrun.data.columns import image_column
from optrun.data.examples import Example, chosen
from optrun.data.images import Images
from optrun.data.loader import Batch, ExampleSource
from optrun.data.source import Source, Split
from optrun.task.base import ModelNeeds, Task
from optrun.task.labels import label_config, read_classes


class ImageClassification(Task):
    """Images to classes.

    Preparation is deterministic: the same picture gives the same pixels at each visit.

    What other tasks take as their tokenizer is here the model's image preparation: a PIL image to
    float32 pixels of shape (channels, height, width).

    Raises:
        ConfigError: No column of images, a file that is no image, a label unseen in training.
    """

    columns = ("image_column", "label_column")
    unit = "examples"
    predictor = "optrun.runner.predictors:ImageClasses"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:  # noqa: ARG003
        """Yield nothing: there is no text."""
        return iter(())

    def inspect(self, source: Source, tokenizer: Any) -> None:
        """Read the labels of all splits, and set the image preparation to `task.image_size`."""
        self.limits = []  # no text is truncated
        size = self.config.image_size
        self.prepare = tokenizer if size is None else tokenizer.resized(size)
        self.labels, self.labels_by_split = read_classes(source)

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: Any,  # noqa: ARG002
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example for each row; images stay encoded until a batch needs them."""
        column = image_column(source, split)
        labels = self.labels_by_split[split]
        indices = chosen(len(split.rows), limit, seed=seed)  # None: all rows
        if indices is not None:
            labels = labels[indices]
        return LabelledImages(Images(split.take(indices), column), labels)

    def transform(self, example: Example, randomness: np.random.Generator) -> Example:  # noqa: ARG002
        """Decode an image and prepare its pixels, in the loader's worker if there is one."""
        return {
            "pixel_values": self.prepare(example["image"].decoded()),
            "labels": example["labels"],
        }

    def needs(self) -> ModelNeeds:
        """Require a head with an output for each class."""
        classes = {**label_config(self.labels), "problem_type": "single_label_classification"}
        return ModelNeeds({**classes, **self.config.model_values()})

    def collate(self, examples: list[Example]) -> Batch:
        """Stack the examples to a batch.

        Returns:
            `pixel_values`, shape (batch, channels, height, width), float32; `labels`, shape
            (batch,), int64.
        """
        return {
            "pixel_values": torch.from_numpy(
                np.stack([example["pixel_values"] for example in examples])
            ),
            "labels": torch.tensor([int(example["labels"]) for example in examples]),
        }


@dataclass
class LabelledImages:
    """Images with class numbers.

    Args:
        images: Encoded images.
        labels: Shape (images,), int64.
    """

    images: Images
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        return {"image": self.images[index], "labels": self.labels[index]}

    def fingerprint(self) -> str:
        """Digest the bytes of all images, and the labels."""
        return self.images.fingerprint(self.labels)
