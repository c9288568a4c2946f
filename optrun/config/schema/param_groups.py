"""Parameter groups: learning rate and weight decay of each parameter."""

import difflib
from dataclasses import dataclass
from typing import Any

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.schema import optimizer
from optrun.config.schema.checks import Checked, expect, expect_pattern, expecting
from optrun.config.schema.ranges import Count, Positive, not_negative

GROUPING_KEYS = {
    "lr_scale": "number of 0 or more; times the base lr, in place of the layer's own",
    "lr": "number of 0 or more; absolute",
    "weight_decay": "number, in place of the one for its kind",
    "adaptation": "true or false; Lamb's layer adaptation",
    "centralization": "true or false; LazyAdam's gradient centralization",
    "freeze": "true; takes the parameters out of training",
    "optimizer": "name of another optimizer that steps these parameters",
}
"""What a rule may say besides `pattern` and the hyper-parameters of the optimizer."""


@dataclass(kw_only=True)
class ParamGroupsConfig(Checked):
    """Base class of the choices of this group."""

    GROUP = "param_groups."
    name: str
    rules: list[dict[str, Any]]
    """Ordered; the first whose `pattern` (a regular expression searched in the name) matches a
    parameter overrides what it gets. A rule that matches nothing, or only what earlier rules took,
    is an error."""

    def __post_init__(self) -> None:
        """Refuse empty rules and unknown overrides."""
        super().__post_init__()
        for index, rule in enumerate(self.rules):
            _check_rule(f"param_groups.rules[{index}]", rule)


@dataclass(kw_only=True)
class SingleConfig(ParamGroupsConfig):
    """Every parameter alike, weight decay on all of them, unless a rule says otherwise."""


@dataclass(kw_only=True)
class StandardConfig(ParamGroupsConfig):
    """No decay on biases, norm weights and other tensors of one dimension."""

    decay_embeddings: bool
    """Whether embedding tables decay."""


@dataclass(kw_only=True)
class LayerwiseConfig(StandardConfig):
    """As `standard`, with a lower learning rate layer by layer from the head down."""

    decay_rate: Positive
    """The factor; 1 keeps all layers alike."""
    name_dict: Any
    """A mapping (not typed as one, since Hydra cannot put a mapping in the place of a typed null):
    parameter name, or a regular expression searched in it, -> where it belongs: a block number from
    0, `head`, `embeddings`, or a name with `layers.<number>` or `embedding` in it; `\1` stands for
    the first bracket. Null: read from the module tree."""
    n_layers: Count | None
    """Depth to count from; null: as found."""

    def __post_init__(self) -> None:
        """Refuse an empty name_dict and invalid entries."""
        super().__post_init__()
        if self.name_dict is not None:
            right = isinstance(self.name_dict, dict) and bool(self.name_dict)
            self.expect(right, "name_dict", "a mapping with at least one name, or null")
            for key, value in self.name_dict.items():
                expect_pattern(f"param_groups.name_dict[{key}]", key)
                expect(
                    isinstance(value, str | int) and not isinstance(value, bool),
                    f"param_groups.name_dict[{key}]",
                    value,
                    "a block number, head, embeddings, or a name with layers.<number> or embedding"
                    " in it",
                )


def hyper_parameters() -> list[str]:
    """List the hyper-parameters of all optimizers; the chosen one refuses those of others."""
    keys = {name for schema in optimizer.SCHEMAS.values() for name in schema.__dataclass_fields__}
    return sorted(keys - {"name", "default_lr", "dialect"})


def _check_rule(key: str, rule: Any) -> None:
    """Refuse a rule without a pattern or overrides, or with invalid ones.

    A valid one is `{"pattern": "bias$", "weight_decay": 0.0}`.

    Args:
        key: Such as `param_groups.rules[0]`, for messages.
        rule: Its value.
    """
    # 1. The pattern.
    expect(isinstance(rule, dict), key, rule, "a mapping with `pattern` and overrides")
    if "pattern" not in rule:
        close = difflib.get_close_matches("pattern", [str(name) for name in rule], n=1)
        if close:
            hint = f"Write `pattern` in place of `{close[0]}`."
        else:
            hint = "It is a regular expression searched in parameter names."
        raise ConfigError(f"{key}: has no `pattern`. {hint}")
    expect_pattern(f"{key}.pattern", rule["pattern"])
    # 2. The names of the overrides.
    overrides = [str(name) for name in rule if name != "pattern"]
    expect(bool(overrides), key, rule, "at least one override beside `pattern`")
    _refuse_unknown_overrides(key, overrides)
    expect(not ("lr" in rule and "lr_scale" in rule), key, rule, "either lr or lr_scale, not both")
    # 3. Their values.
    for name in ("lr", "lr_scale"):
        if name in rule:
            expecting(not_negative)(f"{key}.{name}", rule[name])
    if "optimizer" in rule:
        name = str(rule["optimizer"])
        hint = did_you_mean(name, optimizer.SCHEMAS)
        expect(
            name in optimizer.SCHEMAS, f"{key}.optimizer", name, "the name of an optimizer", hint
        )
    for name in ("adaptation", "centralization", "freeze"):
        if name in rule:
            expect(isinstance(rule[name], bool), f"{key}.{name}", rule[name], "true or false")
    if "freeze" in rule:
        hint = "To train them, leave the rule out."
        expect(rule["freeze"] is True, f"{key}.freeze", rule["freeze"], "true", hint)
        expect(
            len(overrides) == 1, key, rule, "freeze alone: frozen parameters take no other override"
        )


def _refuse_unknown_overrides(key: str, overrides: list[str]) -> None:
    """Refuse overrides of a rule unknown to every optimizer."""
    valid = {*GROUPING_KEYS, *hyper_parameters()}
    for name in overrides:
        if name == "schedule":
            raise ConfigError(
                f"{key}.schedule: not offered; one schedule drives all groups. Give lr or lr_scale"
                " to raise or lower its curve for these parameters."
            )
        if name not in valid:
            raise ConfigError(
                f"{key}.{name}: no such override. {did_you_mean(name, {*valid, 'pattern'})}"
            )


SCHEMAS: dict[str, type[ParamGroupsConfig]] = {
    "standard": StandardConfig,
    "layerwise": LayerwiseConfig,
    "single": SingleConfig,
}
