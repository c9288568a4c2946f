"""A label for an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import ImageClassificationConfig
from optrun.data.columns import image_column, label_column, refuse_unused
from optrun.data.examples import Example, chosen
from optrun.data.images import Images
from optrun.data.source import Source
from optrun.task.base import Batch, MetricAccumulator, ModelNeeds, Task, TextKind
from optrun.task.labels import label_config, row_classes
from optrun.task.sequence_classification import CLASS_METRICS, LabelMetrics

_COLUMNS = ("image_column", "label_column")


class ImageClassification(Task):
    """Images to classes. Preparation is deterministic: the same picture gives the same pixels at each visit.

    Args:
        config: The task choice.
        data: Limits.
        source: Rows.
        tokenizer: The model's image preparation: a PIL image to float32 pixels of shape (channels, height, width).
        seed: Picks examples where they are limited.

    Raises:
        ConfigError: No column of images, a file that is no image, a label unseen in training.
    """

    name = "image_classification"
    auto_class = "AutoModelForImageClassification"
    unit = "examples"
    text_kind = TextKind.NONE

    def __init__(
        self, config: ImageClassificationConfig, data: DataConfig, source: Source, tokenizer: Any, *, seed: int
    ) -> None:
        super().__init__()
        refuse_unused(source.columns, _COLUMNS, self.name)
        self.main_metric, self.mode = "accuracy", "max"
        self.prepare = tokenizer if config.image_size is None else tokenizer.resized(config.image_size)
        self.image_size = config.image_size
        columns = label_column(source, source.train), label_column(source, source.eval)
        self.labels, *numbers = row_classes(source, *columns)
        made = []
        for split, labels, limit, picks in (
            (source.train, numbers[0], data.max_train_examples, seed),
            (source.eval, numbers[1], data.max_eval_examples, None),
        ):
            column = image_column(source, split)
            indices = chosen(len(split.rows), limit, seed=picks)
            images = Images(split.take(indices), column)
            made.append(LabelledImages(images, labels if indices is None else labels[indices]))
        self.train, self.eval = made

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:  # noqa: ARG003
        """No text."""
        return iter(())

    def transform(self, example: Example, randomness: np.random.Generator) -> Example:  # noqa: ARG002
        """Decode and prepare; in the worker, where there is one."""
        return {"pixel_values": self.prepare(example["image"].decoded()), "labels": example["labels"]}

    def needs(self) -> ModelNeeds:
        """A model with an image-classification head."""
        config: dict[str, Any] = {**label_config(self.labels), "problem_type": "single_label_classification"}
        if self.image_size is not None:
            config["image_size"] = self.image_size
        return ModelNeeds(config)

    def collate(self, examples: list[Example]) -> Batch:
        """`pixel_values` of shape (batch, channels, height, width), float32; `labels` of shape (batch,), int64."""
        return {
            "pixel_values": torch.from_numpy(np.stack([example["pixel_values"] for example in examples])),
            "labels": torch.tensor([int(example["labels"]) for example in examples]),
        }

    def weight(self, batch: Batch) -> int:
        """Examples."""
        return int(batch["labels"].shape[0])

    def metric_names(self) -> list[str]:
        """Of a classifier."""
        return CLASS_METRICS

    def evaluation(self) -> MetricAccumulator:
        """Loss, accuracy, F1, Matthews correlation."""
        return LabelMetrics(len(self.labels))


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
        """Digest of bytes and labels."""
        return self.images.fingerprint(self.labels)
