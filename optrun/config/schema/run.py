"""The whole configuration of a run."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from optrun.base.errors import ConfigError
from optrun.base.formatting import rate
from optrun.config import registry
from optrun.config.schema.adapter import AdapterConfig, LoraConfig, QloraConfig
from optrun.config.schema.callbacks import callback_configs
from optrun.config.schema.chat_tasks import PreferenceConfig
from optrun.config.schema.checkpoint import CheckpointConfig
from optrun.config.schema.checks import Checked, expect
from optrun.config.schema.clip import ClipConfig
from optrun.config.schema.data import DataConfig
from optrun.config.schema.distributed import DistributedConfig, FsdpConfig
from optrun.config.schema.model import ModelConfig, PretrainedConfig, WeightDtype
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.config.schema.param_groups import ParamGroupsConfig
from optrun.config.schema.parametrization import ParametrizationConfig
from optrun.config.schema.ranges import Positive, matching, whole_number
from optrun.config.schema.scheduler import ConstantConfig, SchedulerConfig
from optrun.config.schema.task_base import TaskConfig
from optrun.config.schema.tracking import TrackingConfig
from optrun.config.schema.training import Precision, TrainingConfig

BranchSchedule = StrEnum("BranchSchedule", ["continue", "restart"])
"""Where the schedule of a branch stands: at the step of its trunk, or at the start of a curve over
what is left."""

_OF_A_TRUNK = "it on the command line, where its trunk is looked up, and in no file and no recipe"
_OF_A_SWEEP = "SWEEP_DIR beside lr=auto on the command line of a single run"


@dataclass(kw_only=True)
class RunConfig(Checked):
    """One field per configuration group, and the top-level keys."""

    lr: Positive
    """Peak learning rate; the schedule multiplies it."""
    seed: Annotated[
        int, whole_number("a whole number from 0 to 2**63 - 1", lambda x: 0 <= x < 2**63)
    ]
    run_name: str | None
    resume: str | None
    model: ModelConfig
    adapter: AdapterConfig
    task: TaskConfig
    data: DataConfig
    parametrization: ParametrizationConfig
    param_groups: ParamGroupsConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    clip: ClipConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    tracking: TrackingConfig
    distributed: DistributedConfig
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Name of a registered callback to its keys and values."""
    branch_from: Annotated[str, matching(r".+@[0-9a-f]{16}", _OF_A_TRUNK)] | None = None
    """Checkpoint of another run that this one started from, `FOLDER@DIGEST`."""
    branch_schedule: BranchSchedule = BranchSchedule["continue"]
    lr_from: Annotated[str, matching(r".+: lr .+, 90 % interval .+", _OF_A_SWEEP)] | None = None
    """Where `lr` came from, with its interval, if `lr=auto` was typed."""
    matters: Positive | None = None
    """Smallest difference of the main metric that counts in a verdict; None: a standard deviation
    between seeds."""

    def __post_init__(self) -> None:
        """Refuse invalid callbacks and contradictory choices.

        `adapter=qlora` sets `model.quantization`.
        """
        super().__post_init__()
        callback_configs(self.callbacks)
        self.expect(
            self.branch_from is not None or self.branch_schedule is BranchSchedule["continue"],
            "branch_schedule",
            "continue, since only a run with branch_from can start its schedule anew",
        )
        if self.data.OF_TOKENS:
            self._expect_reader_of_tokens()
        if self.data.streamed_by is not None:
            self._expect_reader_of_streams(self.data.streamed_by)
        self._check_loss()
        if isinstance(self.adapter, QloraConfig):
            self._quantise_base()
        self._check_quantization()
        if self.model.dtype is WeightDtype.bfloat16:
            self._expect_float32_copy()

    def _check_loss(self) -> None:
        """Refuse label smoothing without classes, and a chunked loss for tasks that have none."""
        has_classes = (
            self.task.LABEL_SMOOTHING and not self.task.of_numbers and not self.task.of_sets
        )
        labels = ""
        if self.task.of_numbers:
            labels = " and numbers as labels"
        elif self.task.of_sets:
            labels = " and any number of labels"
        self.training.expect(
            self.training.label_smoothing_factor == 0 or has_classes,
            "label_smoothing_factor",
            f"0 with task={self.task.name}{labels}",
            "There are no classes to spread a target over.",
        )
        self.training.expect(
            self.training.chunked_loss.lower() != "true" or self.task.CHUNKED_LOSS,
            "chunked_loss",
            f"auto or false with task={self.task.name}",
            "It is for causal_lm, sft, preference and masked_lm.",
        )

    def _check_quantization(self) -> None:
        """Refuse quantised weights that would be trained, sharded, or changed by LoRA's init."""
        bits = getattr(self.model, "quantization", None)
        if bits is None:
            return
        self.model.expect(
            isinstance(self.adapter, LoraConfig),
            "quantization",
            f"null with adapter={self.adapter.name}",
            "Quantised weights cannot be trained; adapter=lora trains factors beside them.",
        )
        self.model.expect(
            not isinstance(self.distributed, FsdpConfig),
            "quantization",
            "null with distributed=fsdp",
            "Quantised weights cannot be sharded; distributed=ddp keeps all of them on each rank.",
        )
        self.adapter.expect(
            getattr(self.adapter, "keeps_base", True),
            "init_lora_weights",
            f"true with model.quantization={bits}",
            "pissa and olora change the base weights, and quantised weights cannot be changed.",
        )

    def _quantise_base(self) -> None:
        """Set `model.quantization=4bit` for `adapter=qlora`; refuse a model without weights."""
        model = self.model
        expect(
            isinstance(model, PretrainedConfig),
            "adapter",
            self.adapter.name,
            f"none or lora with model={model.name}",
            "It quantises pretrained weights: model=pretrained model.path=NAME.",
        )
        assert isinstance(model, PretrainedConfig)
        model.quantization = "4bit"

    def _expect_float32_copy(self) -> None:
        """Refuse bfloat16 weights unless the trained ones have a float32 copy.

        bfloat16 has 8 significant bits, so a step below 1/256 of a weight would be rounded away.
        An optimizer with `master_weights` keeps such a copy; one named in a rule of `param_groups`
        is refused. Under an adapter only its factors are trained, and these are float32.
        """
        bf16 = self.training.precision is Precision.bf16
        self.training.expect(bf16, "precision", f"bf16 with model.dtype={self.model.dtype}")
        self.model.expect(
            not isinstance(self.distributed, FsdpConfig),
            "dtype",
            "float32 with distributed=fsdp",
            "distributed.param_dtype=bfloat16 computes in bfloat16 from float32 shards.",
        )
        if isinstance(self.adapter, LoraConfig):
            return
        name = self.optimizer.name
        keeps_copy = getattr(self.optimizer, "master_weights", False)
        for rule in reversed(self.param_groups.rules):  # the message names the first
            if "optimizer" in rule:
                name = str(rule["optimizer"])
                keeps_copy = False
        advice = "optimizer.master_weights=true"
        if not hasattr(self.optimizer, "master_weights"):
            advice = f"optimizer=lamb {advice}"
        self.model.expect(
            keeps_copy,
            "dtype",
            f"float32 with optimizer={name}, which keeps no float32 copy of what it steps: a step"
            " below 1/256 of a weight would be lost",
            f"Give {advice} (adamwdl and schedule_free have it, too), or adapter=lora, whose"
            " factors are float32.",
        )

    def _expect_reader_of_streams(self, key: str) -> None:
        """Refuse streamed data for tasks that read no streams, packed chats, and sets of labels.

        Args:
            key: The key that turns streaming on, such as `data.streaming`.
        """
        stream_tasks = [
            name for name, schema in registry.schemas("task").items() if schema.READS_STREAMS
        ]
        expect(
            self.task.READS_STREAMS,
            key,
            True,
            f"false with task={self.task.name}",
            f"Tasks that read streams: {', '.join(sorted(stream_tasks))}.",
        )
        self.task.expect(
            self.task.joins_documents or not getattr(self.task, "packing", False),
            "packing",
            f"false with {key}=true and task={self.task.name}",
            "Packing chats into blocks needs the lengths of all rows.",
        )
        self.task.expect(
            not self.task.of_sets,
            "problem_type",
            f"another with {key}=true",
            "optrun reads one label for each row of a stream, no sets of labels.",
        )

    def _expect_reader_of_tokens(self) -> None:
        """Refuse data of token ids for tasks on texts, without packing, or without a tokenizer."""
        data = f"data={self.data.name}"
        expect(
            self.task.READS_TOKENS,
            "task",
            self.task.name,
            "causal_lm",
            f"{data} has token ids, not texts.",
        )
        packing = getattr(self.task, "packing", True)
        self.task.expect(packing, "packing", "true", f"{data} is one stream, cut into blocks.")
        self.model.expect(
            self.model.tokenizer is not None or isinstance(self.model, PretrainedConfig),
            "tokenizer",
            "the hub name or the folder of the tokenizer that the ids were made with",
            f"{data} has no texts on which one could be trained.",
        )

    def default_lr_note(self) -> str | None:
        """Explain the default lr of a pretrained model or an adapter.

        The default is that of the optimizer times `default_lr_factor` of the adapter, or without an
        adapter of the pretrained model. None if lr was set to another value, or if the model is new
        and has no adapter.
        """
        group = "model"
        weights = "pretrained weights"
        preference_lr = "1e-6"
        if isinstance(self.adapter, LoraConfig):
            group = "adapter"
            weights = "the factors"
            preference_lr = "1e-5"
        factor = getattr(getattr(self, group), "default_lr_factor", None)
        if factor is None or not math.isclose(self.lr, self.optimizer.default_lr * factor):
            return None
        note = (
            f"lr={rate(self.lr)} is the default of optimizer={self.optimizer.name},"
            f" {rate(self.optimizer.default_lr)}, times {group}.default_lr_factor={factor:g} for"
            f" {weights}; lr=VALUE sets another"
        )
        if isinstance(self.task, PreferenceConfig):
            note = f"warning: {note}. task=preference usually takes far less: lr={preference_lr}"
        if self.scheduler.num_warmup_steps is None and self.scheduler.warmup_ratio is None:
            note += ". No warm-up is set: scheduler.warmup_ratio=0.1 is usual here"
        return note

    def schedule_note(self) -> str | None:
        """Warn if a schedule changes the lr of a schedule-free optimizer; None if not."""
        if not self.optimizer.SCHEDULE_FREE or isinstance(self.scheduler, ConstantConfig):
            return None
        return (
            f"warning: scheduler={self.scheduler.name} moves the lr of"
            f" optimizer={self.optimizer.name}, where an average of the weights takes the place of"
            " a schedule. Its paper: scheduler=constant scheduler.warmup_ratio=0.05"
        )


def refuse_ended_fork(where: str, step: int, total: int, key: str) -> None:
    """Refuse a branch from a checkpoint at or after the last step of the branch.

    Args:
        where: The checkpoint that the branch starts from, for the message.
        step: Optimizer step of the checkpoint.
        total: Optimizer steps of the branch, with those before the checkpoint.
        key: The key that sets `total`, with its value, for the message.

    Raises:
        ConfigError: `step` is at least `total`.
    """
    if step >= total:
        raise ConfigError(
            f"{key}: {total:,} steps in all, and the trunk {where} is at step {step:,}: nothing"
            f" would be trained. Expected more than {step:,}, such as"
            f" training.max_steps={step + max(step // 10, 1)}."
        )
