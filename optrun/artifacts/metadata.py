"""What `state.json` of a checkpoint says beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from optrun.artifacts.metrics import from_json
from optrun.base.plain import PlainDict, PlainMapping

ABSENT: Any = object()
"""Value of a key that every whole checkpoint has, and this file has not: `refuse_invalid_state`
says so before it is used."""


@dataclass(kw_only=True)
class CheckpointMetadata:
    """Everything in a checkpoint but tensors: counters, schedule, random states, configuration.

    Each field is a key of `state.json` and holds plain values.
    """

    global_step: int
    """Optimizer steps done."""
    format: int | None = None
    epoch: int | None = None
    step_in_epoch: int | None = None
    train: PlainDict = ABSENT
    """Counters of `TrainState`."""
    random: PlainDict = ABSENT
    """States of the random generators of Python, numpy and torch."""
    scheduler: PlainDict = ABSENT
    """`state_dict` of the schedule."""
    scaler: PlainDict = ABSENT
    """`state_dict` of `torch.amp.GradScaler`; empty where the precision is not fp16."""
    optimizer: PlainDict = ABSENT
    """State by parameter name; tensors stand in their own file, and here by name and shape."""
    callbacks: PlainDict | None = None
    """States of the loop's components, by configuration key; None: no component has one."""
    stop: PlainDict | None = None
    """The request of a component to end training early; None: there is none."""
    config: PlainDict = ABSENT
    """Resolved values that the run was started with."""
    config_digest: str | None = None
    run_id: str | None = None
    """Of which run it is; None: of none."""
    branch: PlainDict | None = None
    """Where a branch left its trunk: `folder`, `digest`, `run_id`, `step`, and `schedule_from`, the
    step that its schedule counts from. None: the run began at step 0."""
    plan: PlainDict = ABSENT
    """Which examples each step sees, as `plan_values` says it."""
    tokenizer: str | None = None
    """Digest of its vocabulary."""
    environment: PlainDict | None = None
    """Versions and hardware that bit-equality depends on."""
    plugins: list[PlainDict] | None = None
    """What outside of optrun the choices came from."""
    model_class: str = ABSENT
    """Of transformers."""
    model_config: PlainDict = ABSENT
    """Of transformers, after JSON."""
    generation_config: PlainDict | None = None
    """How the model generates, as transformers writes it. None: it does not."""
    adapter: PlainDict | None = None
    """`base`, a digest of the frozen weights, which are not saved; `target_modules`
    and `modules_to_save`: what it was put into. None: all weights are saved."""
    reference: str | None = None
    """Digest of the weights that preferences are measured against: those that training started
    from. None: no task of the kind, or a loss without a reference."""
    total_steps: int | None = None
    parameters: list[str] | None = None
    trainable: list[str] | None = None
    """Names of the parameters that may hold neither NaN nor infinity."""

    def to_dict(self) -> PlainDict:
        """Convert to a mapping; keys without a value are left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            key: value for key, value in values.items() if value is not None and value is not ABSENT
        }

    @classmethod
    def from_dict(cls, values: PlainMapping) -> Self:
        """Read the values of `state.json`.

        Non-finite numbers, saved as text, become floats again; only `train`, `config` and
        `callbacks` can hold one. Unknown keys are left out, types are not checked.
        """
        field_names = {field.name for field in fields(cls)}
        arguments = {key: value for key, value in values.items() if key in field_names}
        for key in arguments.keys() & {"train", "config", "callbacks"}:
            arguments[key] = from_json(arguments[key])
        return cls(**arguments)
