"""Tasks: from rows to examples, losses and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from optrun.base.plain import lookup
from optrun.config import registry
from optrun.config.schema.chat_tasks import PreferenceConfig, SftConfig
from optrun.config.schema.ranges import InnerShare, Positive, WholeNumber, at_least
from optrun.config.schema.task_base import ClassesConfig, TaskConfig

ProblemType = StrEnum(
    "ProblemType", ["single_label_classification", "regression", "multi_label_classification"]
)
"""What a label column holds."""

EmbeddingLoss = StrEnum(
    "EmbeddingLoss",
    [
        "multiple_negatives_ranking",
        "multiple_negatives_symmetric_ranking",
        "cosine_similarity",
        "cosent",
        "triplet",
    ],
)
"""What embeddings are trained by; the losses of sentence-transformers."""

EmbeddingPooling = StrEnum("EmbeddingPooling", ["mean", "cls", "last"])
"""Which states of a text become its embedding."""

EmbeddingDistance = StrEnum("EmbeddingDistance", ["cosine", "euclidean", "manhattan"])
"""How far apart two embeddings are, for the triplet loss."""


@dataclass(kw_only=True)
class CausalLmConfig(TaskConfig):
    """Next-token prediction."""

    CHUNKED_LOSS = True
    AUTO_CLASS = "AutoModelForCausalLM"
    READS_TOKENS = True
    READS_STREAMS = True
    TITLE = "language modelling"
    PIPELINE_TAG = "text-generation"
    USAGE = (
        'inputs = tokenizer("def ", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
    )

    packing: bool
    """True: documents are joined and cut into blocks of data.max_length.

    False: one row, one example.
    """
    prompt: str | None
    """Continued after training so that a person sees what was learnt; null: no sample."""
    sample_tokens: WholeNumber
    """How many tokens the sample has at most."""
    document_masking: bool = False
    """True: tokens of a block see those of their own document alone, and positions begin anew with
    each."""

    def __post_init__(self) -> None:
        """Refuse document masking without packing."""
        super().__post_init__()
        self.expect(
            self.packing or not self.document_masking,
            "document_masking",
            "false with task.packing=false",
            "Each row is an example of its own there.",
        )

    @property
    def document_masking_key(self) -> str | None:
        """The key, if positions begin anew with each document."""
        if self.document_masking:
            return "task.document_masking=true"
        return None


@dataclass(kw_only=True)
class MaskedLmConfig(TaskConfig):
    """Prediction of masked tokens (Devlin et al.

    2018): of the chosen, 80 % masked, 10 % random, 10 % kept.
    """

    CHUNKED_LOSS = True
    AUTO_CLASS = "AutoModelForMaskedLM"
    READS_STREAMS = True
    TITLE = "masked language modelling"
    PIPELINE_TAG = "fill-mask"
    USAGE = (
        'inputs = tokenizer(f"a {tokenizer.mask_token} text", return_tensors="pt")',
        "masked = inputs.input_ids == tokenizer.mask_token_id",
        "print(tokenizer.decode(model(**inputs).logits[masked].argmax(-1)))",
    )

    packing: bool
    mlm_probability: InnerShare
    """Share of tokens chosen."""


@dataclass(kw_only=True)
class SequenceClassificationConfig(ClassesConfig):
    """A label, several labels, or a number, for a text or a pair of texts."""

    AUTO_CLASS = "AutoModelForSequenceClassification"
    READS_STREAMS = True
    METRICS = ("accuracy", "f1", "mcc")
    TITLE = "text classification"
    PIPELINE_TAG = "text-classification"
    USAGE = (
        'logits = model(**tokenizer("a text", return_tensors="pt")).logits',
        "print(model.config.id2label[int(logits.argmax())])",
    )
    _LAST: ClassVar[Mapping[str, str]] = {
        "regression": "print(logits.item())",
        "multi_label_classification": (
            "print([model.config.id2label[k] for k, one in enumerate(logits[0]) if one > 0])"
        ),
    }

    problem_type: ProblemType

    def __post_init__(self) -> None:
        """Refuse class weights and metrics for other problem types."""
        super().__post_init__()
        self.expect(
            self.class_weights is None or not self.of_numbers,
            "class_weights",
            "null with task.problem_type=regression, which has no classes",
        )
        self.expect(
            not self.of_sets or not self.metrics,
            "metrics",
            "[] with task.problem_type=multi_label_classification",
            "It reports loss, f1_micro, f1_macro and exact_match.",
        )

    @classmethod
    def usage(cls, config: Mapping[str, object]) -> tuple[str, ...]:
        """Write the snippet for the type of labels and the number of texts."""
        call, show = cls.USAGE
        if lookup(config, "data", "text_pair_column") is not None:
            call = call.replace('"a text"', '"a text", "a second text"')
        return call, cls._LAST.get(str(lookup(config, "task", "problem_type")), show)

    @property
    def of_numbers(self) -> bool:
        """Regression."""
        return self.problem_type is ProblemType.regression

    @property
    def of_sets(self) -> bool:
        """Multi-label classification."""
        return self.problem_type is ProblemType.multi_label_classification

    @property
    def main_metric(self) -> str:
        """Name the metric of `problem_type`: accuracy, pearson for numbers, f1_micro for sets."""
        if self.of_numbers:
            return "pearson"
        if self.of_sets:
            return "f1_micro"
        return self.MAIN_METRIC

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Name the metrics of every evaluation, by `problem_type`; none for sets of labels."""
        if self.of_numbers:
            return ("mse", "mae", "pearson", "spearman")
        if self.of_sets:
            return ()
        return self.METRICS


@dataclass(kw_only=True)
class TokenClassificationConfig(ClassesConfig):
    """A label for each word.

    Data.text_column holds lists of words, data.label_column lists of labels.
    """

    AUTO_CLASS = "AutoModelForTokenClassification"
    MAIN_METRIC = "f1"
    TITLE = "token classification"
    PIPELINE_TAG = "token-classification"
    USAGE = (
        'words = "words of a text".split()',
        'inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")',
        "found = model(**inputs).logits[0].argmax(-1).tolist()",
        "first = [inputs.word_ids().index(number) for number in range(len(words))]",
        "print([(word, model.config.id2label[found[place]]) for word, place in zip(words, first)])",
    )


@dataclass(kw_only=True)
class EmbeddingConfig(TaskConfig):
    """Texts to vectors, close for related texts."""

    MODE = "max"
    LABEL_SMOOTHING = False
    EMBEDS = True
    TITLE = "sentence embedding"
    PIPELINE_TAG = "sentence-similarity"
    USAGE = (
        'inputs = tokenizer(["a text", "another text"], padding=True, return_tensors="pt")',
        "states = model(**inputs).last_hidden_state  # pooled, and normalised, by modules.json:",
        '# sentence_transformers.SentenceTransformer(folder).encode(["a text", "another text"])',
        "print(states.shape)",
    )

    loss: EmbeddingLoss
    """The ranking losses and `triplet` read texts that belong together; the others a score of each
    pair."""
    scale: Positive
    """1 / temperature of the ranking losses and of `cosent`."""
    margin: Positive
    """By how much a negative is to be further away than the positive (`triplet`)."""
    distance: EmbeddingDistance
    """Of `triplet`."""
    pooling: EmbeddingPooling | None
    """Null: what modules.json of the model says; else `mean`."""
    normalize: bool | None
    """Whether embeddings have length 1. Null: what modules.json of the model says; else true."""
    recall_at: list[int]
    """The k of each eval/recall_at_k."""

    def __post_init__(self) -> None:
        """Refuse invalid ranks of recall, and metrics of numbers without scores."""
        super().__post_init__()
        is_valid = bool(self.recall_at) and all(k >= 1 for k in self.recall_at)
        self.expect(is_valid, "recall_at", "numbers of 1 or more, such as [1, 10]")
        self.expect(
            self.of_numbers or not self.metrics,
            "metrics",
            f"[] with task.loss={self.loss.value}, whose rows have no scores",
        )

    @property
    def of_numbers(self) -> bool:
        """Whether each pair has a score."""
        return self.loss in (EmbeddingLoss.cosine_similarity, EmbeddingLoss.cosent)

    @property
    def over_step(self) -> bool:
        """Whether the loss compares all examples of a step, and is no mean over each by itself."""
        return self.loss not in (EmbeddingLoss.cosine_similarity, EmbeddingLoss.triplet)

    @property
    def main_metric(self) -> str:
        """Name the metric of the loss: spearman, accuracy of triplets, or ndcg_at_10."""
        if self.of_numbers:
            return "spearman"
        if self.loss is EmbeddingLoss.triplet:
            return "accuracy"
        return "ndcg_at_10"

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Name the correlations of pairs with scores; none for other losses."""
        if self.of_numbers:
            return ("spearman", "pearson")
        return ()


@dataclass(kw_only=True)
class Seq2SeqLmConfig(TaskConfig):
    """A text from a text: data.text_column to data.target_column."""

    AUTO_CLASS = "AutoModelForSeq2SeqLM"
    TITLE = "sequence to sequence"
    PIPELINE_TAG = "text2text-generation"
    USAGE = (
        'inputs = tokenizer("a text", return_tensors="pt")',
        (
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0],"
            " skip_special_tokens=True))"
        ),
    )

    max_target_length: Annotated[int, at_least(2)]
    """Tokens of the target, at most."""

    def positions(self, max_length: int) -> int:
        """Count the positions of the longer side."""
        return max(max_length, self.max_target_length)


@dataclass(kw_only=True)
class ImageClassificationConfig(ClassesConfig):
    """A label for an image."""

    AUTO_CLASS = "AutoModelForImageClassification"
    PROCESSOR = "AutoImageProcessor"
    METRICS = ("accuracy", "f1", "mcc")
    COUNTED_FROM_DATA = "classes"
    TITLE = "image classification"
    PIPELINE_TAG = "image-classification"
    USAGE = (
        "import PIL.Image",
        'image = PIL.Image.open("image.png").convert("RGB")',
        'logits = model(**processor(image, return_tensors="pt")).logits',
        "print(model.config.id2label[int(logits.argmax())])",
    )

    image_size: int | None
    """Side in pixels; null: what the model's image processor or configuration says."""

    def model_values(self) -> dict[str, Any]:
        """Return the size of the images, if it is given."""
        if self.image_size is None:
            return {}
        return {"image_size": self.image_size}


SCHEMAS: Mapping[str, type[TaskConfig]] = registry.add_builtin(
    "task",
    {
        "causal_lm": (CausalLmConfig, "optrun.task.causal_lm:CausalLm"),
        "sft": (SftConfig, "optrun.task.sft:Sft"),
        "preference": (PreferenceConfig, "optrun.task.preference:Preference"),
        "masked_lm": (MaskedLmConfig, "optrun.task.masked_lm:MaskedLm"),
        "sequence_classification": (
            SequenceClassificationConfig,
            "optrun.task.sequence_classification:SequenceClassification",
        ),
        "token_classification": (
            TokenClassificationConfig,
            "optrun.task.token_classification:TokenClassification",
        ),
        "embedding": (EmbeddingConfig, "optrun.task.embedding:Embedding"),
        "seq2seq_lm": (Seq2SeqLmConfig, "optrun.task.seq2seq_lm:Seq2SeqLm"),
        "image_classification": (
            ImageClassificationConfig,
            "optrun.task.image_classification:ImageClassification",
        ),
    },
)
