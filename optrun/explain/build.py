"""Collect the facts of a configuration: model, parameter groups, schedule, memory, data.

Nothing is trained and no weight is read. A sample of the rows of local files is read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optrun.base.formatting import list_names
from optrun.base.plain import PlainMapping
from optrun.config.schema.clip import NormClipConfig, ValueClipConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig, refuse_ended_fork
from optrun.data.cache import pop_discard_messages
from optrun.explain.data import Sampled, sample_data
from optrun.explain.facts import (
    Facts,
    ForkFacts,
    TensorFacts,
    TrunkState,
    total,
)
from optrun.explain.memory import rank_count, rank_memory
from optrun.explain.schedule import assumed_steps, named_steps, sample_curve
from optrun.explain.waits import reason_to_wait
from optrun.model.attention import describe_document_masking, device_type, refuse_attention
from optrun.model.build import ModelSpec, build_model
from optrun.model.configuration import refuse_unknown
from optrun.model.quantization import require_quantization, tensor_bytes
from optrun.model.tokenizer import load_tokenizer
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.build import build_optimizer, options_of
from optrun.optimizer.footprint import state_bytes
from optrun.optimizer.inherited_state import inherit_state
from optrun.optimizer.kernels.report import kernel_row
from optrun.optimizer.transfer import build_run_groups
from optrun.param_groups.growth import Growth
from optrun.param_groups.parametrization import parametrize
from optrun.scheduler import Scheduler, build_scheduler
from optrun.scheduler.build import describe_fork_schedule
from optrun.scheduler.builders import count_warmup_steps


def explain(
    config: RunConfig,
    model: nn.Module | None = None,
    trunk: TrunkState | None = None,
) -> Facts:
    """Build everything on the meta device, and collect the facts of the configuration.

    Args:
        config: The whole configuration.
        model: Used in place of the configured model, and without muP; preferably on the meta
            device.
        trunk: The checkpoint that the run forks from; None: it is no fork.

    Raises:
        ConfigError: Training would refuse the configuration before its first step, regardless of
            the data.
    """
    notes: list[str] = []

    # 1. Sample the data, and build the model on the meta device. A model that cannot be built is
    # refused before the data are read, which may take long.
    growth: Mapping[str, Growth] = {}
    if model is None:
        _refuse_model(config)
    data_notes: list[str] = []
    sampled = sample_data(config, data_notes)
    if model is None:
        spec = None if sampled is None else sampled.spec
        if spec is None:
            spec = model_spec(config, notes)
        model, growth, model_notes = _build_meta_model(config, spec)
        notes += model_notes

    # 2. Note what was decided: on the configuration, the data and the batch.
    config_notes = (config.default_lr_note(), config.schedule_note())
    notes += [*filter(None, config_notes), *data_notes, *pop_discard_messages()]
    micro_batch, per_step = config.training.step_over(rank_count(config))
    if per_step > 1 or config.training.global_batch_size is not None:
        notes.append(
            f"a step is over {micro_batch * per_step:,} examples: {per_step:,} micro-batches of"
            f" {micro_batch:,}, over all ranks"
        )

    # 3. Count the steps of the schedule; that of a fork may begin anew at the checkpoint.
    known_steps, steps_from = _count_steps(config, sampled)
    steps = assumed_steps(config.scheduler) if known_steps is None else known_steps
    if trunk is not None:
        refuse_ended_fork(
            trunk.folder,
            trunk.step,
            steps,
            f"training.num_train_epochs={config.training.num_train_epochs:g}",
        )
        steps -= trunk.schedule_from

    # 4. Build groups, optimizer and schedule as a run does.
    groups = build_run_groups(config, model, growth, notes=notes)
    optimizer = build_optimizer(config.optimizer, groups, lr=config.lr)
    scheduler = build_scheduler(optimizer, config.scheduler, num_training_steps=steps)

    # 5. Describe the tensors: what the optimizer does with each, their bytes, which are frozen.
    curve = sample_curve(scheduler.multiplier, config.scheduler, steps)
    optimizer_bytes = state_bytes(optimizer)
    tensors = _describe_tensors(config, optimizer, optimizer_bytes, curve.peak)
    params = dict(model.named_parameters())
    trainable = [param for param in params.values() if param.requires_grad]
    frozen = {name: param for name, param in params.items() if not param.requires_grad}
    weight_sizes = tensor_bytes(model)
    notes += _note_tied_parameters(model, params)

    # 6. Describe schedule, fork and options.
    warmup_steps = count_warmup_steps(config.scheduler, steps)
    fork = None if trunk is None else _fork_facts(trunk, optimizer, scheduler, steps)
    options = options_of(config.optimizer)
    if hasattr(config.optimizer, "dialect"):
        options = {"dialect": config.optimizer.dialect, **options}
    is_sharded = config.distributed.name == "fsdp"
    return Facts(
        model=type(model).__name__,
        task=config.task.name,
        optimizer=config.optimizer.name,
        kernel=kernel_row(optimizer, device_type(config.training.device), sharded=is_sharded),
        waits=reason_to_wait(config, optimizer),
        lr=config.lr,
        param_groups=config.param_groups.name,
        rules=[_rule_in_words(index, rule) for index, rule in enumerate(config.param_groups.rules)],
        scheduler=config.scheduler.name,
        warmup_steps=warmup_steps,
        warmup_share=warmup_steps / steps if config.scheduler.num_warmup_steps is None else None,
        clip=_clip_in_words(config),
        steps=steps,
        steps_from=steps_from,
        in_steps=known_steps is not None or bool(named_steps(config.scheduler)),
        tensors=tensors,
        frozen=list(frozen),
        frozen_parameters=sum(param.numel() for param in frozen.values()),
        curve=curve,
        weight_dtype=weight_dtype(config),
        weight_bytes=sum(weight_sizes.values()),
        gradient_bytes=sum(param.numel() * param.itemsize for param in trainable),
        state_bytes=total([tensor.state_bytes for tensor in tensors]),
        rank_memory=rank_memory(config, params, weight_sizes, optimizer_bytes),
        data=sampled,
        branch=fork,
        options=options,
        notes=notes,
    )


def _refuse_model(config: RunConfig) -> None:
    """Refuse a model before the data are read, if it cannot be built.

    Raises:
        ConfigError: Quantization without its package, an attention that the device lacks, or an
            unknown key in `model.config`.
    """
    require_quantization(config.model)
    refuse_attention(config.model, config.training.device, config.training.precision.value)
    base = getattr(config.parametrization, "base", {})
    refuse_unknown(config.model, config.task.AUTO_CLASS, base)


def _rule_in_words(index: int, rule: PlainMapping) -> str:
    """Write a rule of `param_groups.rules`, such as "[0] bias: lr_scale 2"."""
    options = ", ".join(f"{key} {value}" for key, value in rule.items() if key != "pattern")
    return f"[{index}] {rule['pattern']}: {options}"


def _build_meta_model(
    config: RunConfig, spec: ModelSpec
) -> tuple[nn.Module, Mapping[str, Growth], list[str]]:
    """Build the model on the meta device.

    Returns:
        The model, with the adapter if there is one; how much larger each parameter is than in the
        base model of muP, by name (empty without muP); and notes, such as how documents in a packed
        block are kept apart.
    """
    # muP compares the shapes of this model with those of its base, so it builds both. Without muP
    # nothing is built here: the model of the configuration comes back, and no sizes.
    parametrized = parametrize(config, lambda chosen: build_model(chosen, spec, meta=True)[0])
    model, notes = build_model(parametrized.model, spec, adapter=config.adapter, meta=True)
    masking_key = config.task.document_masking_key
    if masking_key is not None:
        notes = [*notes, describe_document_masking(model, masking_key)]
    return model, parametrized.sizes, notes


def weight_dtype(config: RunConfig) -> str:
    """Name the dtype of the weights, such as `float32`, or for QLoRA "4 bits and bfloat16"."""
    dtype = config.model.dtype.value
    quantization = getattr(config.model, "quantization", None)
    if quantization is None:
        return dtype
    return f"{quantization.removesuffix('bit')} bits and {dtype}"


def _note_tied_parameters(model: nn.Module, params: Mapping[str, Tensor]) -> list[str]:
    """Write a note for each parameter with several names.

    For example "transformer.wte.weight is also lm_head.weight: tied, counted once."

    params: Each parameter once, by its first name.
    """
    first_name_of = {id(param): name for name, param in params.items()}
    other_names = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in params:
            first_name = first_name_of[id(param)]
            other_names[first_name].append(name)
    return [
        f"{name} is also {list_names(names, 2)}: tied, counted once."
        for name, names in other_names.items()
    ]


def model_spec(config: RunConfig, notes: list[str]) -> ModelSpec:
    """Collect the task's requirements on the model, without data.

    Loads the tokenizer, unless the run trains one.

    Args:
        config: The whole configuration.
        notes: Changed in place: a note is added if the task counts something, such as labels, from
            the data.
    """
    task = config.task
    if task.COUNTED_FROM_DATA:
        notes.append(
            f"The number of {task.COUNTED_FROM_DATA} comes from the data, which were not read: here"
            " it is that of the model's configuration."
        )
    # 1. A model of images has no tokenizer.
    if task.PROCESSOR != "AutoTokenizer":
        return ModelSpec(task.AUTO_CLASS, task.model_values())

    # 2. A model of texts needs an embedding for each token id, and enough positions.
    trains_tokenizer = isinstance(config.model, FromConfigConfig) and config.model.tokenizer is None
    tokenizer = None if trains_tokenizer else load_tokenizer(config.model)
    positions = task.positions(config.data.max_length)
    spec = ModelSpec.of_tokenizer(task.AUTO_CLASS, task.model_values(), positions, tokenizer)
    if trains_tokenizer:
        return replace(spec, vocab_size=getattr(config.model, "vocab_size", None))
    return spec


def _count_steps(config: RunConfig, sampled: Sampled | None) -> tuple[int | None, str]:
    """Count the optimizer steps of the run.

    Returns:
        The steps, None if only the run can count its examples; and where they come from:
        `max_steps`, `data` or, for None, `assumed`.
    """
    if config.training.max_steps is not None:
        return config.training.max_steps, "max_steps"
    if sampled is None or sampled.examples is None:
        return None, "assumed"
    from optrun.data.loader import EpochPlan

    # Examples of a micro-batch; micro-batches of a step, over all ranks.
    micro_batch, per_step = config.training.step_over(rank_count(config))
    plan = EpochPlan(
        examples=sampled.examples,
        batch_size=micro_batch,
        accumulation=per_step,
        seed=config.seed,
    )
    # Half an epoch of 5 steps is 3 steps.
    total_steps = math.ceil(config.training.num_train_epochs * plan.steps_per_epoch)
    return max(1, total_steps), "data"


def _describe_tensors(
    config: RunConfig,
    optimizer: Optimizer,
    optimizer_bytes: Mapping[str, int | None],
    peak: float,
) -> list[TensorFacts]:
    """Describe every trainable tensor, in the order of the optimizer's groups.

    Args:
        config: Names the optimizer of groups without one of their own.
        optimizer: The optimizer.
        optimizer_bytes: Bytes of optimizer state by name of the tensor; None: unknown.
        peak: Highest multiplier of the schedule.

    Example: the run has lr 0.1, the schedule a peak of 1, a group `lr_scale` 0.5, so an
    `initial_lr` of 0.05, and layerwise decay gives a tensor in it the ratio 0.9. Then `lr_peak` is
    0.05 * 1 * 0.9, and `lr_scale` 0.5 * 0.9. A tensor that the optimizer exempts by name has no
    decay.
    """
    tensors = []
    for index, group in enumerate(optimizer.param_groups):
        # 1. What the whole group shares. If groups name optimizers of their own, `members` has
        # these by name, and one of them steps this group; else the optimizer itself does.
        stepper = getattr(optimizer, "members", {}).get(group.get("optimizer"), optimizer)
        decay = float(group.get("weight_decay", 0.0))
        # The lr of the group divided by the run's lr; optrun's optimizers call it `lr_ratio`. None:
        # the group has an absolute lr.
        scale = group.get("lr_ratio", group.get("lr_scale"))
        # The lr of a tensor divided by that of its group, by name: layerwise decay inside of an
        # optimizer. Empty for most optimizers.
        ratios: Mapping[str, float] = getattr(stepper, "lr_ratios", {})

        # 2. What depends on the tensor: the optimizer decides by its name.
        for name, param in zip(group["param_names"], group["params"], strict=True):
            ratio = ratios.get(name, 1.0)
            # By an option such as `exclude_from_weight_decay`.
            exempt = isinstance(stepper, NamedOptimizer) and not stepper.decays(name)
            adapted = None  # no trust ratio in this optimizer
            if hasattr(stepper, "adapted"):
                adapted = bool(stepper.adapted(name, group))
            tensors.append(
                TensorFacts(
                    name=name,
                    shape=tuple(param.shape),
                    group=index,
                    layer=group.get("layer", "all"),
                    role=group.get("role", ""),
                    optimizer=group.get("optimizer", config.optimizer.name),
                    lr_peak=float(group["initial_lr"]) * peak * ratio,
                    lr_scale=None if scale is None else float(scale) * ratio,
                    weight_decay=0.0 if exempt else decay,
                    adapted=adapted,
                    rule=group.get("rule", ""),
                    parameters=param.numel(),
                    state_bytes=optimizer_bytes.get(name),
                )
            )
    return tensors


def _clip_in_words(config: RunConfig) -> str:
    """Write the clipping choice with its limits, such as "global_norm 1"; "none" without."""
    clip = config.clip
    if isinstance(clip, NormClipConfig):
        return f"{clip.name} {clip.max_norm:g}"
    if isinstance(clip, ValueClipConfig):
        low = -clip.max_value if clip.min_value is None else clip.min_value
        return f"{clip.name} [{low:g}, {clip.max_value:g}]"
    return clip.name


def _fork_facts(
    trunk: TrunkState,
    optimizer: Optimizer,
    scheduler: Scheduler,
    steps: int,
) -> ForkFacts:
    """Describe what a fork takes over from its trunk, the run whose checkpoint it continues from.

    Args:
        trunk: Description of the checkpoint.
        optimizer: Optimizer of the fork, on the meta device; changed in place: it loads the
            trunk's state, if that fits.
        scheduler: Schedule of the fork, at step 0.
        steps: Length of the schedule.

    Example: a fork from step 100, with a schedule of 50 steps that begins there
    (`schedule_from=100`), has the lr of its step 0 first. If the schedule continues that of the
    trunk (`schedule_from=0`), it has the lr of step 100.
    """
    # 1. The learning rates of the first step, one for each group.
    first_step = trunk.step - trunk.schedule_from
    first_lrs = [base_lr * scheduler.multiplier(first_step) for base_lr in scheduler.base_lrs]

    # 2. Load the trunk's optimizer state, as tensors without values, to see whether it fits.
    tensors = {}
    for name, (dtype_name, shape) in trunk.tensors.items():
        dtype = getattr(torch, dtype_name, torch.float32)
        # A step count, of shape (), lies on the CPU, whatever the device.
        tensors[name] = torch.zeros(shape, dtype=dtype, device="meta" if shape else "cpu")
    # Such as "the trunk's, by parameter name (Lamb)", or "anew: ..." with the reason.
    state_in_words = inherit_state(optimizer, tensors, trunk.optimizer)

    # 3. Where the schedule begins and ends.
    end = trunk.schedule_from + steps
    schedule = describe_fork_schedule(scheduler.name, trunk.schedule_from, trunk.step, end)
    return ForkFacts(trunk.folder, trunk.step, state_in_words, schedule, float(max(first_lrs)))
