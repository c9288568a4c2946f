"""The coordinate check of a configuration.

Its own data, task, groups and optimizer, at several widths and depths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Keys of transformers that grow with the width, where no base names others."""
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
    """Check a configuration's parametrization.

    Args:
        request: With a constant schedule and small batches.
        widths: Of the models, over that of the base.
        depths: The same for their number of blocks; None: 1, 2 and 4 if the base names a depth,
            else none.
        seeds: Of initial weights.
        steps: Of each model, on fixed batches.
        watch: Told what is done.

    Returns:
        One check for what varies: width, depth.

    Raises:
        ConfigError: Weights that do not start from the seed, or no key that grows; whatever a run
            would refuse.
    """
    config = request.config
    if isinstance(config.model, PretrainedConfig) or isinstance(config.adapter, LoraConfig):
        raise ConfigError(
            f"model={config.model.name} adapter={config.adapter.name}: a coordinate check builds"
            " models of several widths from scratch. Take model=from_config and adapter=none."
        )
    parametrization = config.parametrization
    base = parametrization.base if isinstance(parametrization, MupConfig) else {}
    small = replace(config, parametrization=StandardParametrizationConfig(name="standard"))
    small = replace(small, model=replace(config.model, config=merged(config.model.config, base)))
    prepared = prepare(small)
    architecture = prepared.model.config
    grows = {key: value for key, value in base.items() if not _DEPTH_KEY.search(key)}
    deepens = {key: value for key, value in base.items() if _DEPTH_KEY.search(key)}
    if not grows:
        grows = {
            key: size
            for key in WIDTH_KEYS
            if isinstance(size := getattr(architecture, key, None), int)
        }
    if depths is not None and not deepens:
        deepens = {"num_hidden_layers": getattr(architecture, "num_hidden_layers", None)}
    checks = []
    of_depth = depths or ((1, 2, 4) if deepens else ())
    for along, sizes, keys in (("width", widths, grows), ("depth", of_depth, deepens)):
        if not sizes:
            continue
        if not keys or not all(isinstance(size, int | Mapping) for size in keys.values()):
            raise ConfigError(
                f"optrun certify transfer: {along}: {type(architecture).__name__} has no key for it"
                " that is known. Name it with its value at the base:"
                " parametrization.base.KEY=NUMBER."
            )
        build = _ModelBuilder(
            replace(request, config=small), prepared, keys, parametrization, steps, along, watch
        )
        by_gradient = SCHEMAS[choice_of(config.optimizer)].transfer == "sgd"
        checks.append(coordinate_check(build, sizes, seeds, along, by_gradient=by_gradient))
    return checks


@dataclass
class _ModelBuilder:
    """Makes models of a size and a seed, with everything that trains them."""

    request: Request
    """Of the base, under the standard parametrization."""
    prepared: Prepared
    """Its data."""
    keys: Options
    """What grows, with its values at the base."""
    parametrization: ParametrizationConfig
    """Of the models that are larger than the base."""
    steps: int
    """Of each trial."""
    along: str
    """What grows, in one word."""
    watch: Callable[[str], None]
    """Told of each trial."""
    batches: list[list[dict[str, Tensor]]] = field(default_factory=list)

    def config_of(self, size: float, seed: int) -> RunConfig:
        """Make the configuration of a model.

        That of size 1 is the base, which standard parametrization is.
        """
        config = replace(self.request.config, seed=seed)
        model = replace(
            config.model, config=merged(config.model.config, _scale_values(self.keys, int(size)))
        )
        larger = self.parametrization
        if isinstance(larger, MupConfig):
            larger = replace(larger, base=dict(self.keys))
        return replace(
            config, model=model, parametrization=config.parametrization if size == 1 else larger
        )

    def __call__(self, size: float, seed: int) -> SizedModel:
        self.watch(f"{self.along} x{size:g}, seed {seed}")
        config = self.config_of(size, seed)
        model, _, sizes = initial_model(config, self.prepared.spec)
        disable_dropout(model)  # its noise has a size of its own
        prepared = replace(self.prepared, model=model.double(), sizes=sizes)
        setup = assemble(replace(self.request, config=config), prepared, torch.device("cpu")).setup
        if not self.batches:  # the same for all sizes
            steps = setup.train_loader.training(setup.plan, 0)
            self.batches = [
                [_to_float64(batch) for batch in one] for one in islice(steps, _BATCHES)
            ]
            steps.close()
        step = setup.train_step
        return SizedModel(
            model,
            lambda: step.model(**self.batches[0][0]),
            lambda: list(map(step, self._of_steps())),
            sizes,
        )

    def _of_steps(self) -> Iterator[list[dict[str, Tensor]]]:
        return islice(cycle(self.batches), self.steps)


def _scale_values(value: object, factor: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _scale_values(entry, factor) for key, entry in value.items()}
    return value * factor if isinstance(value, int) and not isinstance(value, bool) else value


def _to_float64(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: value.double() if value.is_floating_point() else value for key, value in batch.items()
    }
