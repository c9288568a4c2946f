"""Base classes of task schemas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from optrun.config import registry
from optrun.config.schema.checks import Checked, expect_positive
from optrun.config.schema.metric import chosen_metrics


@dataclass(kw_only=True)
class TaskConfig(Checked):
    """Base class of task schemas: facts about a task, known without torch."""

    GROUP = "task."
    AUTO_CLASS: ClassVar[str] = "AutoModel"
    """The transformers class that builds a model with the head for it."""
    PROCESSOR: ClassVar[str] = "AutoTokenizer"
    """The transformers class that prepares the inputs; `AutoImageProcessor` where they are images.
    """
    MAIN_METRIC: ClassVar[str] = "loss"
    """The metric that says which checkpoint is best."""
    MODE: ClassVar[str] = "min"
    """Which direction of it is better: `min` or `max`."""
    METRICS: ClassVar[tuple[str, ...]] = ()
    """Registered metrics that each evaluation reports besides the loss and those of `task.metrics`.
    """
    LABEL_SMOOTHING: ClassVar[bool] = True
    """Whether `training.label_smoothing_factor` means something: the loss is a cross-entropy over
    classes or tokens."""
    CHUNKED_LOSS: ClassVar[bool] = False
    """Whether `training.chunked_loss` means something: its targets are tokens of the output head's
    vocabulary."""
    READS_TOKENS: ClassVar[bool] = False
    """Whether it takes rows of token ids, as `data=tokens` has them."""
    READS_STREAMS: ClassVar[bool] = False
    """Whether it takes rows that are not all there at once, as `data.streaming=true` has them."""
    EMBEDS: ClassVar[bool] = False
    """Whether its models are written so that sentence-transformers loads them, too."""
    COUNTED_FROM_DATA: ClassVar[str] = ""
    """What of the model the data decides, such as `labels`; explain, which reads no data, says so.
    """
    TITLE: ClassVar[str] = ""
    """What the model card calls it, such as `text classification`."""
    PIPELINE_TAG: ClassVar[str] = ""
    """The tag of the Hugging Face hub, such as `text-classification`."""
    USAGE: ClassVar[tuple[str, ...]] = ()
    """Lines of the card's snippet that use `model` and `tokenizer` (or `processor`)."""

    name: str
    metrics: list[str] = field(default_factory=list)
    """Further metrics of each evaluation, by their registered names; written as eval/NAME."""

    def __post_init__(self) -> None:
        """Refuse unknown and unsuitable metrics."""
        super().__post_init__()
        chosen_metrics(self.metrics, self.kind, of_numbers=self.of_numbers)

    @property
    def kind(self) -> str:
        """The registered choice, even under a name of the user's own."""
        names = [name for name, schema in registry.schemas("task").items() if schema is type(self)]
        if self.name in names or not names:
            return self.name
        return names[0]

    @classmethod
    def usage(cls, config: Mapping[str, object]) -> tuple[str, ...]:  # noqa: ARG003
        """Write the lines of the card's snippet, for the resolved configuration of a run."""
        return cls.USAGE

    @property
    def of_numbers(self) -> bool:
        """Whether it predicts numbers, and no classes."""
        return False

    @property
    def of_sets(self) -> bool:
        """Whether an example has any number of labels, each with a probability of its own."""
        return False

    @property
    def main_metric(self) -> str:
        """The metric to choose the best checkpoint; its direction is `MODE`."""
        return self.MAIN_METRIC

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Registered metrics of every evaluation."""
        return self.METRICS

    @property
    def joins_documents(self) -> bool:
        """Whether rows are joined before they are cut: a text file is then one row."""
        return bool(getattr(self, "packing", False))

    @property
    def document_masking_key(self) -> str | None:
        """The override that keeps the documents of a block apart, such as `task.packing=true`.

        None: attention may cross them.
        """
        return None

    def positions(self, max_length: int) -> int:
        """Count the required positions of the model for `data.max_length`."""
        return max_length

    def model_values(self) -> dict[str, Any]:
        """Return values for the transformers configuration."""
        return {}


@dataclass(kw_only=True)
class ClassesConfig(TaskConfig):
    """Base class of tasks with classes."""

    MAIN_METRIC = "accuracy"
    MODE = "max"
    COUNTED_FROM_DATA = "labels"

    class_weights: Any = None
    """Weight of each class in the training loss: `balanced` (inverse to its number of training
    rows), or a mapping from label to weight, such as {rare: 3.0} (a label that is not named has the
    weight 1); null: all classes have the same weight. With
    task.problem_type=multi_label_classification it weighs the examples that have the label;
    `balanced` is then the number of examples without the label for each one with it."""

    def __post_init__(self) -> None:
        """Refuse weights of another form, or none above 0."""
        super().__post_init__()
        weights = self.class_weights
        expected = "balanced, or a mapping from label to weight, such as {rare: 3.0}"
        if weights is None or weights == "balanced":
            return
        self.expect(isinstance(weights, Mapping) and bool(weights), "class_weights", expected)
        for label, weight in weights.items():
            expect_positive(f"task.class_weights.{label}", weight)
