"""Compare two optimizers over the same weights, gradients and groups, step by step.

They are equal, or the verdict names the first step that differs and the options that close the gap.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.options import Options
from optrun.base.plain import PlainDict
from optrun.certify.formulas import FORMULAS, FormulaReference, Hyperparameters
from optrun.certify.packages import PACKAGES, ClassReference, TorchStepper
from optrun.certify.problem import Problem, make_problem
from optrun.config.dialects import DIALECTS, dialect_options
from optrun.config.types import in_yaml
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.classes import class_of

RELATIVE = 1e-9
"""Largest difference over the largest entry of a tensor that counts as rounding, in float64."""

TERMS = {
    "bias_correction": "bias correction",
    "eps": "eps",
    "eps_in_trust": "eps in the trust ratio",
    "eps_form": "place of eps",
    "weight_decay": "weight decay",
    "weight_decay_mode": "weight decay",
    "max_param_norm": "clamp of the weights' norm",
    "min_trust": "clamp of the trust ratio",
    "max_trust": "clamp of the trust ratio",
    "always_adapt": "adaptation of tensors without decay",
    "exclude_from_layer_adaptation": "exclusion from adaptation",
    "step_count": "step count",
}
"""Option -> the term of the update that it belongs to, for messages."""

VALUES_TO_TRY: Mapping[str, Mapping[str, Sequence[object]]] = {
    "lamb": {
        "bias_correction": ("moments", "lr", "lr_first", "none"),
        "weight_decay_mode": ("adapted", "decoupled", "fixed", "scheduled", "corrected"),
        "max_trust": (None, 1.0, 10.0),
        "min_trust": (0.0, 0.01),
        "max_param_norm": (None, 10.0),
        "always_adapt": (True, False),
        "step_count": ("parameter", "optimizer"),
        "eps_in_trust": (True, False),
        "eps": (1e-8, 1e-7, 1e-6, 1e-5, 0.0),
        "weight_decay": (0.0,),
    },
    "adamax": {
        "eps_form": ("decayed", "gradient", "denominator"),
        "weight_decay_mode": ("l2", "l1", "decoupled"),
        "eps": (1e-8, 1e-7, 1e-6, 0.0),
        "weight_decay": (0.0,),
    },
    "adamw": {
        "weight_decay_mode": ("decoupled", "fixed", "scheduled", "corrected"),
        "eps": (1e-8, 1e-7, 1e-6, 0.0),
        "amsgrad": (False, True),
        "weight_decay": (0.0,),
    },
}
"""Values to try if two optimizers differ, besides those of the dialects."""

Groups = Sequence[Mapping[str, Any]]
"""As `build_param_groups` returns them; only names and shapes count."""


class Stepper(Protocol):
    """One of the two optimizers that are compared, over its own copy of the weights."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The current weights by name."""

    def step(
        self,
        grads: Mapping[str, Tensor | None],
        numbers: Mapping[str, Hyperparameters],
        /,
    ) -> None:
        """Take one step."""


@dataclass(frozen=True)
class FirstDifference:
    """The first step after which the weights of the two optimizers differ."""

    step: int
    """From 1."""
    tensor: str
    """The tensor with the largest relative difference in that step."""
    ours: float
    """The entry of that tensor that differs most, by our optimizer."""
    reference: float
    """The same entry, by the other optimizer."""


@dataclass
class Verdict:
    """The result of `optrun certify optimizer`."""

    choice: str
    """Name of our optimizer."""
    family: str | None
    """The choice with dialects (`lamb`, `adamax`, `adamw`) that the comparison is about, if any."""
    dialect: str
    reference: str
    """The other optimizer: a package with its version, a formula, or a class of the user."""
    steps: int
    tensors: int
    groups: int
    largest: float
    """Largest relative difference (`relative_difference`), up to the first step that differs."""
    parting: FirstDifference | None
    """None: the weights agree after every step."""
    terms: list[str] = field(default_factory=list)
    """The terms of the update that `overrides` change, see `TERMS`."""
    overrides: list[str] = field(default_factory=list)
    """Overrides that make them equal; empty if they are, or if nothing that was tried does."""

    @property
    def equal(self) -> bool:
        """Whether the weights agree after every step."""
        return self.parting is None

    def to_dict(self) -> dict[str, object]:
        """Convert to plain values for JSON."""
        return {**asdict(self), "equal": self.equal}


class Ours(TorchStepper):
    """An optimizer from `build_optimizer`, over a copy of the problem's weights.

    Args:
        config: A configuration, or the name of a choice.
        groups: The parameter groups of the model.
        problem: Gives the weights.
        lr: Base learning rate.
        **options: Options of the choice, if `config` is a name.
    """

    def __init__(
        self,
        config: Any,
        groups: Groups,
        problem: Problem,
        lr: float,
        **options: Any,
    ) -> None:
        super().__init__(problem.weights)
        copied_groups = []
        for group in groups:
            params = [(name, self.params[name]) for name, _ in group["params"]]
            copied_groups.append({**group, "params": params})
        self.optimizer = build_optimizer(config, copied_groups, lr=lr, **options)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    def hyperparameters(
        self,
        multiplier: float,
        step: int,
        eps: float,
        betas: tuple[float, float],
    ) -> dict[str, Hyperparameters]:
        """Return the hyper-parameters of each tensor in one step, by name.

        They are read from the groups; the decay of a tensor that a list of names excludes is 0.

        Args:
            multiplier: Factor on the peak learning rate in this step.
            step: Number of the step, from 1.
            eps: Used for groups without `eps`.
            betas: Used for groups without `betas`.
        """
        names = {id(param): name for name, param in self.params.items()}
        # Lists of names exempt tensors from decay (`decays(name)` is False) or from adaptation
        # (they are in `_unadapted`); an optimizer may have neither.
        decays = getattr(self.optimizer, "decays", lambda _: True)
        unadapted = getattr(self.optimizer, "_unadapted", ())
        hyperparameters = {}
        for group in self.optimizer.param_groups:
            peak = float(group["initial_lr"])
            for param in group["params"]:
                name = names[id(param)]
                hyperparameters[name] = Hyperparameters(
                    lr=peak * multiplier,
                    peak=peak,
                    decay=float(group.get("weight_decay", 0.0)) if decays(name) else 0.0,
                    betas=tuple(group.get("betas", betas)),
                    eps=float(group.get("eps", eps)),
                    step=step,
                    excluded=name in unadapted,
                )
        return hyperparameters

    def set_lr(self, hyperparameters: Mapping[str, Hyperparameters]) -> None:
        """Set the lr of each group to its peak lr times the multiplier of the step.

        The multiplier is lr / peak of the first tensor whose peak is not 0; 1 if there is none.
        """
        multiplier = 1.0
        for tensor in hyperparameters.values():
            if tensor.peak:
                multiplier = tensor.lr / tensor.peak
                break
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier


def relative_difference(ours: Tensor, theirs: Tensor) -> tuple[float, int]:
    """Return the largest difference relative to the largest entry of `theirs`, and its flat index.

    That is max |ours - theirs| / max |theirs|. Of `theirs` the largest finite entry counts, but at
    least 1e-6. Two NaN are equal, as are two equal infinities; NaN against a number is an infinite
    difference. Without entries it is 0, at index 0.

    Example:
        >>> relative_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        (0.5, 1)
        >>> relative_difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 4.0]))
        (inf, 1)
        >>> relative_difference(torch.tensor([1.0, torch.inf]), torch.tensor([2.0, torch.inf]))
        (0.5, 0)
    """
    if not theirs.numel():
        return 0.0, 0
    differences = (ours - theirs).abs().nan_to_num(nan=torch.inf)
    # inf - inf and NaN - NaN are NaN, although the two entries are equal.
    are_equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differences[are_equal] = 0.0
    largest_entry = max(float(theirs.abs().nan_to_num(posinf=0.0).max()), 1e-6)
    return float(differences.max()) / largest_entry, int(differences.argmax())


@dataclass
class Comparison:
    """The steps of the other optimizer, to compare ours with under several options."""

    groups: Groups
    lr: float
    problem: Problem
    hyperparameters: list[dict[str, Hyperparameters]]
    """Hyper-parameters by tensor, one mapping a step."""
    reference: list[dict[str, Tensor]]
    """Weights of the other optimizer after each step."""

    @property
    def full_agreement(self) -> int:
        """The `count_agreement` of two equal optimizers: tensors times steps."""
        return len(self.problem.weights) * len(self.problem.grads)

    def find_first_difference(self, ours: Stepper) -> tuple[FirstDifference | None, float]:
        """Find the first step after which a tensor differs by more than `RELATIVE`.

        Args:
            ours: Our optimizer, before its first step; it is stepped.

        Returns:
            That step with the tensor that differs most, or None; and the largest relative
            difference of any tensor up to that step.
        """
        largest = 0.0
        steps = weights_after_steps(ours, self.problem, self.hyperparameters)
        for step, (weights, reference) in enumerate(zip(steps, self.reference, strict=True), 1):
            differences = {
                name: relative_difference(weight, reference[name])
                for name, weight in weights.items()
            }
            name = max(differences, key=lambda name: differences[name][0])
            difference, index = differences[name]
            largest = max(largest, difference)
            if difference > RELATIVE:
                our_entry = float(weights[name].flatten()[index])
                their_entry = float(reference[name].flatten()[index])
                return FirstDifference(step, name, our_entry, their_entry), largest
        return None, largest

    def count_agreement(self, choice: str, options: Mapping[str, object]) -> int:
        """Count the steps of each tensor before its first difference; sum the counts.

        The search for options maximises it. Of two tensors and three steps, if one tensor agrees
        always and the other in the first step alone, it is 3 + 1 = 4; `full_agreement` is 6.

        Args:
            choice: Name of our optimizer.
            options: Its keywords; -1 is returned if it refuses them.
        """
        try:
            ours = Ours(choice, self.groups, self.problem, self.lr, **options)
        except (ConfigError, TypeError, ValueError):
            return -1
        agreeing_names = set(self.problem.weights)
        count = 0
        steps = weights_after_steps(ours, self.problem, self.hyperparameters)
        for weights, reference in zip(steps, self.reference, strict=True):
            for name in list(agreeing_names):
                if relative_difference(weights[name], reference[name])[0] > RELATIVE:
                    agreeing_names.remove(name)
            count += len(agreeing_names)
            if not agreeing_names:
                break
        return count


def certify(
    config: object,
    groups: Groups,
    *,
    choice: str,
    dialect: str,
    lr: float,
    options: Options,
    steps: int,
    seed: int,
    watch: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Compare our optimizer with a package's, a formula or another class, step by step.

    Args:
        config: Our optimizer, as `build_optimizer` takes it.
        groups: Parameter groups of the model, from `build_param_groups`.
        choice: Name of our optimizer, such as `lamb`. If it has no dialects, such as a class of the
            user, no options are tried that make the two equal.
        dialect: The other optimizer: a dialect (a package such as `timm`, whose variant of LAMB is
            meant), or the name of a registered optimizer.
        lr: Base learning rate.
        options: The options in `config` as keywords of our class, to try others in their place;
            empty if its choice has no dialects.
        steps: How many steps to compare.
        seed: Draws weights and gradients.
        watch: Called with a text on what is done next, for progress.

    Raises:
        ConfigError: There is no such dialect and no such optimizer; or the other class cannot be
            built or fails at a step.
    """
    # 1. Set up both optimizers over copies of the same weights, and hyper-parameters of each step.
    shapes = {name: tuple(param.shape) for group in groups for name, param in group["params"]}
    problem = make_problem(shapes, steps, seed)
    family = choice if choice in DIALECTS else family_of(dialect)  # None: no dialects at all
    ours = Ours(config, groups, problem, lr)
    eps = float(options.get("eps", 1e-8))
    betas = tuple(options.get("betas", (0.9, 0.999)))
    hyperparameters = [
        ours.hyperparameters(multiplier, step, eps, betas)
        for step, multiplier in enumerate(problem.multipliers, start=1)
    ]
    title, reference = build_reference(family, dialect, problem, hyperparameters[0])
    # 2. Step both, and compare.
    try:
        theirs = list(weights_after_steps(reference, problem, hyperparameters))
    except Exception as error:  # whatever a class of others raises
        raise ConfigError(f"dialect={dialect}: {title} fails at a step: {error}") from error
    comparison = Comparison(groups, lr, problem, hyperparameters, theirs)
    first_difference, largest = comparison.find_first_difference(ours)
    verdict = Verdict(
        choice, family, dialect, title, steps, len(shapes), len(groups), largest, first_difference
    )
    # 3. If they differ, find the options that make them equal, and the terms these belong to. Only
    # a choice with dialects knows what to try.
    if first_difference is None or choice not in DIALECTS:
        return verdict
    watch("looking for the term")
    changes = find_equalizing_options(comparison, choice, dialect, options)
    if changes is not None:  # None: nothing that was tried makes them equal
        verdict.terms = list(dict.fromkeys(TERMS.get(key, key) for key in changes))
        verdict.overrides = [f"optimizer.{key}={in_yaml(value)}" for key, value in changes.items()]
    return verdict


def weights_after_steps(
    optimizer: Stepper,
    problem: Problem,
    hyperparameters: Sequence[Mapping[str, Hyperparameters]],
) -> Iterator[dict[str, Tensor]]:
    """Take all steps of the problem, and yield a copy of the weights after each, by name."""
    for grads, hyperparameters_of_step in zip(problem.grads, hyperparameters, strict=True):
        optimizer.step(grads, hyperparameters_of_step)
        yield {name: weight.clone() for name, weight in optimizer.weights.items()}


def family_of(dialect: str) -> str | None:
    """Name the choice of a dialect, or itself if it has dialects; None for other names.

    Example:
        >>> family_of("timm"), family_of("adamax"), family_of("mine")
        ('lamb', 'adamax', None)
    """
    for choice, dialects in DIALECTS.items():
        if dialect == choice or dialect in dialects:
            return choice
    return None


def build_reference(
    family: str | None,
    dialect: str,
    problem: Problem,
    hyperparameters: Mapping[str, Hyperparameters],
) -> tuple[str, Stepper]:
    """Return the title of the optimizer to compare with, and the optimizer.

    For a dialect it is the class of its package, or a formula if the package is not installed or
    has no class for torch. Any other name is that of a registered optimizer.

    Args:
        family: The choice with dialects, see `family_of`.
        dialect: Name of the dialect or of the registered optimizer.
        problem: Gives the weights, which are copied.
        hyperparameters: Of each tensor in the first step.

    Raises:
        ConfigError: There is no such optimizer, or its class cannot be built with lr, betas, eps
            and weight_decay.
    """
    weights = {name: weight.clone() for name, weight in problem.weights.items()}
    # 1. A dialect: the class of its package, else the formula.
    if family is not None and dialect in DIALECTS[family]:
        package = PACKAGES[family].get(dialect)
        cls = package.load() if package else None  # None: not installed
        if package and cls:
            return package.title, ClassReference(cls, package.options, weights, hyperparameters)
        formula = FORMULAS[family][dialect]
        # Its docstring begins with "Compute".
        title = (formula.__doc__ or "").partition("\n")[0].removeprefix("Compute ").rstrip(".")
        return title, FormulaReference(formula, weights)
    # 2. A registered optimizer.
    try:
        cls = class_of(dialect)
    except ConfigError as error:
        dialects = dict.fromkeys(chain.from_iterable(DIALECTS.values()))
        raise ConfigError(
            f"dialect={dialect}: expected a package whose formula is known here, or a registered"
            f" optimizer. {did_you_mean(dialect, dialects)} For a class of your own, add --plugin"
            " FILE.py."
        ) from error
    title = f"{cls.__qualname__}, the class of optimizer={dialect}"
    try:
        return title, ClassReference(cls, {}, weights, hyperparameters)
    except Exception as error:  # whatever a class of others raises
        raise ConfigError(
            f"dialect={dialect}: {cls.__qualname__} cannot be built over the tensors of this model"
            f" with lr, betas, eps and weight_decay alone: {error}"
        ) from error


def defaults_of(choice: str) -> PlainDict:
    """Return the default of each option that a dialect sets or `VALUES_TO_TRY` varies, by name.

    A dialect is a preset of options that gives the numbers of another package, see `DIALECTS`.

    Args:
        choice: An optimizer with dialects.
    """
    params = [("w", torch.nn.Parameter(torch.ones(1)))]
    optimizer: Any = build_optimizer(choice, [{"params": params}], lr=1.0)
    keys = {*VALUES_TO_TRY[choice], *chain.from_iterable(DIALECTS[choice].values())}
    return {key: value for key, value in optimizer.get_config().items() if key in keys}


def find_equalizing_options(
    comparison: Comparison,
    choice: str,
    dialect: str,
    options: Mapping[str, object],
) -> dict[str, object] | None:
    """Find a few changes of options to make our optimizer equal to the other one.

    First the presets are tried: that of `dialect`, none, and those of other dialects. A dialect is
    a preset of options that gives the numbers of another package, see `DIALECTS`. `eps` and
    `weight_decay` stay. From the first preset that works, changes that are not needed are removed.
    If none works, one option after another is changed, see `_change_one_by_one`.

    Args:
        comparison: The steps of the other optimizer.
        choice: Our optimizer, one with dialects.
        dialect: The dialect whose preset is tried first.
        options: Current options of our optimizer.

    Returns:
        New value by option; None if nothing makes them equal.
    """
    defaults = defaults_of(choice)
    shared = {key: options[key] for key in ("eps", "weight_decay") if key in options}
    presets = [None, *DIALECTS[choice]]
    if dialect in DIALECTS[choice]:
        presets = [dialect, *presets]
    # None is our optimizer without a preset; `dict.fromkeys` drops the second one of `dialect`.
    for preset in dict.fromkeys(presets):
        # What a preset does not set goes back to its default.
        target = {**defaults, **dialect_options(choice, preset, **shared)}
        changes = {key: value for key, value in target.items() if options.get(key) != value}
        if _makes_equal(comparison, choice, options, changes):
            return _without_unneeded(comparison, choice, options, changes)
    return _change_one_by_one(comparison, choice, options)


def _without_unneeded(
    comparison: Comparison,
    choice: str,
    options: Mapping[str, object],
    changes: dict[str, object],
) -> dict[str, object]:
    """Drop every change without which the optimizers are still equal; return the other changes.

    They are tried in order, each together with the changes that remain.
    """
    for key in list(changes):
        fewer = {k: value for k, value in changes.items() if k != key}
        if _makes_equal(comparison, choice, options, fewer):
            changes = fewer
    return changes


def _makes_equal(
    comparison: Comparison,
    choice: str,
    options: Mapping[str, object],
    changes: Mapping[str, object],
) -> bool:
    """Tell whether our optimizer with changed options agrees in all tensors at all steps."""
    return comparison.count_agreement(choice, {**options, **changes}) == comparison.full_agreement


def _change_one_by_one(
    comparison: Comparison,
    choice: str,
    options: Mapping[str, object],
) -> dict[str, object] | None:
    """Change one option after another to a value to try, until the optimizers are equal.

    A greedy search over `VALUES_TO_TRY`: each time it makes the change that adds most to the
    agreement (see `Comparison.count_agreement`), the first of equally good ones. Returns the new
    value by option, empty if they are equal at once; None if no change adds anything and the
    optimizers still differ.
    """
    changes: dict[str, object] = {}
    agreement = comparison.count_agreement(choice, options)
    while agreement < comparison.full_agreement:
        # 1. The changes so far with one more, of an option that is not changed yet.
        candidates: list[dict[str, object]] = []
        for key, values in VALUES_TO_TRY[choice].items():
            if key not in changes:
                new_values = [value for value in values if value != options.get(key)]
                candidates += [{**changes, key: value} for value in new_values]
        # 2. The best of them.
        agreements = [
            comparison.count_agreement(choice, {**options, **candidate}) for candidate in candidates
        ]
        best_agreement = max(agreements, default=agreement)
        if best_agreement <= agreement:
            return None
        changes = candidates[agreements.index(best_agreement)]
        agreement = best_agreement
    return changes
