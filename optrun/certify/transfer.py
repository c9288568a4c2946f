"""The coordinate check of a configuration at several widths and depths.

It uses the configuration's own data, task, parameter groups and optimizer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from optrun.base.errors import ConfigError
from optrun.base.options import Options
from optrun.config.request import Request
from optrun.config.schema.adapter import LoraConfig
from optrun.config.schema.model import PretrainedConfig
from optrun.config.schema.optimizer import SCHEMAS
from optrun.config.schema.parametrization import (
    MupConfig,
    ParametrizationConfig,
    StandardParametrizationConfig,
    merged,
)
from optrun.config.schema.run import RunConfig
from optrun.optimizer.build import choice_of
from optrun.optimizer.coordinates import CoordinateCheck, SizedModel, coordinate_check
from optrun.runner.assemble import assemble
from optrun.runner.prepare import Prepared, initial_model, prepare
from optrun.task.dropout import disable_dropout

WIDTH_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "d_ff",
    "ffn_dim",
)
"""Configuration keys that grow with the width if `parametrization.base` names none."""
_DEPTH_KEY = re.compile(r"(^|_)layers?$")
_BATCHES = 2


def certify(
    request: Request,
    *,
    widths: Sequence[int],
    depths: Sequence[int] | None,
    seeds: Sequence[int],
    steps: int,
    watch: Callable[[str], None] = lambda text: None,  # noqa: ARG005
) -> list[CoordinateCheck]:
    """Check a configuration's parametrization by training models of several widths, then depths.

    `parametrization.base` names the configuration keys that grow, with their values at the base.
    For `base={hidden_size: 64, num_hidden_layers: 2}`, `hidden_size` grows with the width and
    `num_hidden_layers`, as any key whose last word is `layer` or `layers`, with the depth. If the
    base names no key of the width, those of `WIDTH_KEYS` grow that the model has; if none of the
    depth, `num_hidden_layers` grows, but only with `depths`. Their base values are
    the model's own.

    Args:
        request: Must have a constant schedule and small batches.
        widths: Factors of the base width.
        depths: Factors of the base's number of blocks; None: 1, 2 and 4 if the base names a depth,
            else depth is not checked.
        seeds: Seeds of the initial weights.
        steps: Optimizer steps of each model, on fixed batches.
        watch: Called with a text on what is done next, for progress.

    Returns:
        One check for the width, then one for the depth.

    Raises:
        ConfigError: Pretrained weights or an adapter, or no configuration key that grows; or
            whatever a run would refuse.
    """
    config = request.config
    if isinstance(config.model, PretrainedConfig) or isinstance(config.adapter, LoraConfig):
        raise ConfigError(
            f"model={config.model.name} adapter={config.adapter.name}: a coordinate check builds"
            " models of several widths from scratch. Take model=from_config and adapter=none."
        )
    # 1. The base model, under the standard parametrization. `merged` puts the values of `base` into
    # `model.config`, at any depth.
    parametrization = config.parametrization
    base = parametrization.base if isinstance(parametrization, MupConfig) else {}
    base_config = replace(
        config,
        parametrization=StandardParametrizationConfig(name="standard"),
        model=replace(config.model, config=merged(config.model.config, base)),
    )
    prepared = prepare(base_config)
    # 2. The width: the keys that the base names, without those of depth. If it names none, those of
    # `WIDTH_KEYS` grow that the model has. `_check_growth` refuses a check without a key.
    architecture = prepared.model.config
    width_keys = {key: value for key, value in base.items() if not _DEPTH_KEY.search(key)}
    if not width_keys:
        values = {key: getattr(architecture, key, None) for key in WIDTH_KEYS}
        width_keys = {key: value for key, value in values.items() if isinstance(value, int)}
    builder = _ModelBuilder(
        request=replace(request, config=base_config),
        prepared=prepared,
        keys=width_keys,
        parametrization=parametrization,
        steps=steps,
        along="width",
        watch=watch,
    )
    checks = [_check_growth(builder, widths, seeds)]
    # 3. The depth, if it was asked for, or the base names a key of it. The batches are drawn again:
    # all models of one check see the same.
    depth_keys = {key: value for key, value in base.items() if _DEPTH_KEY.search(key)}
    if depths or depth_keys:
        default_keys = {"num_hidden_layers": getattr(architecture, "num_hidden_layers", None)}
        builder = replace(builder, keys=depth_keys or default_keys, along="depth", batches=[])
        checks.append(_check_growth(builder, depths or (1, 2, 4), seeds))
    return checks


@dataclass
class _ModelBuilder:
    """Build the model of a size and a seed, with functions to run and to train it.

    Called as `builder(size, seed)`, see `coordinate_check`.
    """

    request: Request
    """The base, under the standard parametrization."""
    prepared: Prepared
    """The data of the base."""
    keys: Options
    """Configuration keys that grow with the size, with their values at the base."""
    parametrization: ParametrizationConfig
    """The one to check; the models that are larger than the base have it."""
    steps: int
    """Optimizer steps of each model."""
    along: str
    """What varies: `width` or `depth`."""
    watch: Callable[[str], None]
    """Called before each model is built, for progress."""
    batches: list[list[dict[str, Tensor]]] = field(default_factory=list)
    """The first steps' micro-batches, the same for all models; filled by the first one."""

    def config_of(self, size: float, seed: int) -> RunConfig:
        """Return the configuration of a model: the base with its keys multiplied by the size.

        At size 1 it has the standard parametrization, at larger sizes the one to check, with the
        keys as its `base`. For keys {"n_embd": 16} and size 4 the model has n_embd=64.
        """
        config = replace(self.request.config, seed=seed)
        grown_keys = _multiply(self.keys, int(size))
        model = replace(config.model, config=merged(config.model.config, grown_keys))
        config = replace(config, model=model)
        if size == 1:
            return config
        parametrization = self.parametrization
        if isinstance(parametrization, MupConfig):
            parametrization = replace(parametrization, base=dict(self.keys))
        return replace(config, parametrization=parametrization)

    def __call__(self, size: float, seed: int) -> SizedModel:
        """Build the model in float64 on the CPU, without dropout, with functions to run it.

        The first call draws the batches, which all models share. `size` is a factor of the base.
        """
        self.watch(f"{self.along} x{size:g}, seed {seed}")
        config = self.config_of(size, seed)
        model, _, sizes = initial_model(config, self.prepared.spec)
        disable_dropout(model)  # its noise would be measured as a change
        prepared = replace(self.prepared, model=model.double(), sizes=sizes)
        setup = assemble(replace(self.request, config=config), prepared, torch.device("cpu")).setup
        if not self.batches:  # the same for all sizes
            steps = setup.train_loader.training(setup.plan, 0)
            for micro_batches in islice(steps, _BATCHES):
                self.batches.append(list(map(_to_float64, micro_batches)))
            steps.close()
        step = setup.train_step
        return SizedModel(
            model,
            lambda: step.model(**self.batches[0][0]),
            # The first batches again and again, so that every size sees the same rows.
            lambda: list(map(step, islice(cycle(self.batches), self.steps))),
            sizes,
        )


def _check_growth(
    builder: _ModelBuilder, sizes: Sequence[int], seeds: Sequence[int]
) -> CoordinateCheck:
    """Run the coordinate check over models that the builder makes at each size and seed.

    Raises:
        ConfigError: The builder knows no key that grows with the size, or no number for it.
    """
    keys = builder.keys
    if not keys or not all(isinstance(size, int | Mapping) for size in keys.values()):
        raise ConfigError(
            f"optrun certify transfer: {builder.along}: it is not known which key of"
            f" {type(builder.prepared.model.config).__name__} sets it. Give the key with its value"
            " at the base: parametrization.base.KEY=NUMBER."
        )
    by_gradient = SCHEMAS[choice_of(builder.request.config.optimizer)].transfer == "sgd"
    return coordinate_check(builder, sizes, seeds, builder.along, by_gradient=by_gradient)


def _multiply(value: object, factor: int) -> Any:
    """Multiply a whole number, or all in nested mappings; return other values unchanged.

    Example:
        >>> _multiply({"n_embd": 16, "text_config": {"d_ff": 64}, "act": "gelu"}, 2)
        {'n_embd': 32, 'text_config': {'d_ff': 128}, 'act': 'gelu'}
    """
    if isinstance(value, Mapping):
        return {key: _multiply(entry, factor) for key, entry in value.items()}
    if isinstance(value, int) and not isinstance(value, bool):
        return value * factor
    return value


def _to_float64(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the floating-point tensors of a batch to float64."""
    return {
        key: value.double() if value.is_floating_point() else value for key, value in batch.items()
    }
