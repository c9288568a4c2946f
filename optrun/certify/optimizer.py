"""Two optimizers over the same weights, gradients and groups, step by step.

Equal, or where and by what they part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.options import Options
from optrun.base.plain import PlainDict
from optrun.certify.formulas import FORMULAS, FormulaReference, Numbers
from optrun.certify.packages import PACKAGES, ClassReference, ParamsSide
from optrun.certify.problem import Problem, make_problem
from optrun.config.dialects import DIALECTS, dialect_options
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
"""What an option is a term of."""

ALTERNATIVES: Mapping[str, Mapping[str, Sequence[object]]] = {
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
"""Values that are tried where two part, besides those of the dialects."""

Groups = Sequence[Mapping[str, Any]]
"""As `build_param_groups` returns them; only names and shapes count."""


class Stepper(Protocol):
    """One side."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """As they are now, by name."""

    def step(self, grads: Mapping[str, Tensor | None], numbers: Mapping[str, Numbers], /) -> None:
        """Take one step."""


@dataclass(frozen=True)
class Parting:
    """Where two sides part for the first time."""

    step: int
    """From 1."""
    tensor: str
    """The one that is furthest off in that step."""
    ours: float
    reference: float
    """The entry that is furthest off, on both sides."""


@dataclass
class Verdict:
    """What `optrun certify optimizer` found."""

    choice: str
    family: str | None
    """The choice of ours whose options tell the two apart."""
    dialect: str
    reference: str
    """What stood on the other side: a package with its version, a formula, a class of the user's.
    """
    steps: int
    tensors: int
    groups: int
    largest: float
    """Largest difference over the largest entry of its tensor, up to where they part."""
    parting: Parting | None = None
    terms: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    """What makes them equal; empty where they are, or where nothing that was tried does."""

    @property
    def equal(self) -> bool:
        """Whether no step parts them."""
        return self.parting is None

    def to_dict(self) -> dict[str, object]:
        """Convert to plain values for JSON."""
        return {**asdict(self), "equal": self.equal}


class Ours(ParamsSide):
    """What `build_optimizer` makes, over the problem's weights.

    Args:
        config: A configuration, or the name of a choice.
        groups: Of the model.
        problem: Gives the weights.
        lr: Base learning rate.
        **options: Beside a name.
    """

    def __init__(
        self, config: Any, groups: Groups, problem: Problem, lr: float, **options: Any
    ) -> None:
        super().__init__(problem.weights)
        own = [
            {**group, "params": [(name, self.params[name]) for name, _ in group["params"]]}
            for group in groups
        ]
        self.optimizer = build_optimizer(config, own, lr=lr, **options)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    def numbers(
        self, multiplier: float, step: int, eps: float, betas: tuple[float, float]
    ) -> dict[str, Numbers]:
        """Return the hyper-parameters of each tensor for the other side.

        `eps` and `betas` if a group has none.
        """
        names = {id(param): name for name, param in self.params.items()}
        decays = getattr(self.optimizer, "decays", lambda _: True)
        unadapted = getattr(self.optimizer, "_unadapted", ())
        found = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                peak, decay = float(group["initial_lr"]), float(group.get("weight_decay", 0.0))
                found[names[id(param)]] = Numbers(
                    lr=peak * multiplier,
                    peak=peak,
                    decay=decay if decays(names[id(param)]) else 0.0,
                    betas=tuple(group.get("betas", betas)),
                    eps=float(group.get("eps", eps)),
                    step=step,
                    excluded=names[id(param)] in unadapted,
                )
        return found

    def schedule(self, numbers: Mapping[str, Numbers]) -> None:
        """Give each group its learning rate of a step."""
        multiplier = next(
            (of_one.lr / of_one.peak for of_one in numbers.values() if of_one.peak), 1.0
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier


def apart(ours: Tensor, theirs: Tensor) -> tuple[float, int]:
    """Measure how far two tensors are apart, over the largest entry, and at which entry most.

    Two NaN are equal.

    Example:
        >>> apart(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        (0.5, 1)
    """
    if not theirs.numel():
        return 0.0, 0
    off = (ours - theirs).abs().nan_to_num(nan=torch.inf)
    off[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0.0  # two infinities leave NaN
    return float(off.max()) / max(float(theirs.abs().nan_to_num().max()), 1e-6), int(off.argmax())


@dataclass
class Trial:
    """One comparison that can be repeated with other options on our side."""

    groups: Groups
    lr: float
    problem: Problem
    numbers: list[dict[str, Numbers]]
    """Of each step."""
    reference: list[dict[str, Tensor]]
    """Weights of the other side after each step."""

    @property
    def whole(self) -> int:
        """The `agreement` of equal sides."""
        return len(self.problem.weights) * len(self.problem.grads)

    def parts(self, side: Stepper) -> tuple[Parting | None, float]:
        """Step one side along the other.

        Where they part, and the largest relative difference until then.
        """
        largest = 0.0
        path = zip(path_of(side, self.problem, self.numbers), self.reference, strict=True)
        for number, (ours, theirs) in enumerate(path, start=1):
            worst, parting = 0.0, None
            for name, weight in ours.items():
                off, at = apart(weight, theirs[name])
                largest = max(largest, off)
                if off > max(worst, RELATIVE):
                    worst = off
                    parting = Parting(
                        number, name, float(weight.flatten()[at]), float(theirs[name].flatten()[at])
                    )
            if parting is not None:
                return parting, largest
        return None, largest

    def agreement(self, choice: str, options: Mapping[str, object]) -> int:
        """Add up over tensors the steps that agree from the first on.

        -1 for options that are refused.
        """
        try:
            side = Ours(choice, self.groups, self.problem, self.lr, **options)
        except (ConfigError, TypeError, ValueError):
            return -1
        agreed, found = set(self.problem.weights), 0
        for ours, theirs in zip(
            path_of(side, self.problem, self.numbers), self.reference, strict=True
        ):
            agreed = {name for name in agreed if apart(ours[name], theirs[name])[0] <= RELATIVE}
            found += len(agreed)
            if not agreed:
                break
        return found


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
    """Hold an optimizer against a package's, a formula or another class.

    Args:
        config: Our side, as `build_optimizer` takes it.
        groups: Of the model, as `build_param_groups` returns them.
        choice: Of our side; where it is none that has dialects, `optimizer=CHOICE` of the family
            `dialect` belongs to.
        dialect: A dialect of `choice`, or the name of a registered optimizer.
        lr: Base learning rate.
        options: Keywords of our side, where it is a choice that has dialects.
        steps: How many.
        seed: Of weights and gradients.
        watch: Told what goes on.

    Raises:
        ConfigError: There is no such dialect and no such optimizer.
    """
    shapes = {name: tuple(param.shape) for group in groups for name, param in group["params"]}
    problem = make_problem(shapes, steps, seed)
    family = choice if choice in DIALECTS else family_of(dialect)
    ours = Ours(config, groups, problem, lr)
    eps, betas = float(options.get("eps", 1e-8)), tuple(options.get("betas", (0.9, 0.999)))
    numbers = [
        ours.numbers(factor, step, eps, betas)
        for step, factor in enumerate(problem.multipliers, start=1)
    ]
    title, reference = referee(family, dialect, problem, numbers[0])
    try:
        theirs = list(path_of(reference, problem, numbers))
    except Exception as error:  # whatever a class of others raises
        raise ConfigError(f"dialect={dialect}: {title} fails at a step: {error}") from error
    trial = Trial(groups, lr, problem, numbers, theirs)
    parting, largest = trial.parts(ours)
    verdict = Verdict(
        choice, family, dialect, title, steps, len(shapes), len(groups), largest, parting
    )
    if parting is None or family is None:
        return verdict
    watch("looking for the term")
    known = dict(options) if choice in DIALECTS else _fit(trial, family, config, groups, options)
    changes = None if known is None else closing(trial, family, dialect, known)
    if changes is not None:
        verdict.terms = list(dict.fromkeys(TERMS.get(key, key) for key in changes))
        verdict.overrides = [f"optimizer.{key}={_written(value)}" for key, value in changes.items()]
    return verdict


def path_of(
    side: Stepper, problem: Problem, numbers: Sequence[Mapping[str, Numbers]]
) -> Iterator[dict[str, Tensor]]:
    """Step one side through the problem, and yield its weights after each step."""
    for grads, of_step in zip(problem.grads, numbers, strict=True):
        side.step(grads, of_step)
        yield {name: weight.clone() for name, weight in side.weights.items()}


def _fit(
    trial: Trial, family: str, config: object, groups: Groups, options: Mapping[str, object]
) -> dict[str, object] | None:
    """Find the options with which a choice of ours takes the steps of a user's class.

    None: none that was tried.
    """
    own = Ours(config, groups, trial.problem, trial.lr)
    fitted = replace(trial, reference=list(path_of(own, trial.problem, trial.numbers)))
    shared = {key: options[key] for key in ("betas", "eps", "weight_decay") if key in options}
    begin = [
        {**defaults_of(family), **dialect_options(family, name, **shared)}
        for name in (None, *DIALECTS[family])
    ]
    nearest = max(begin, key=lambda candidate: fitted.agreement(family, candidate))
    changes = _climb(fitted, family, nearest)
    return None if changes is None else {**nearest, **changes}


def family_of(dialect: str) -> str | None:
    """Name the choice of ours whose dialect, or whose own name, this is; None if it is neither."""
    return next(
        (choice for choice, own in DIALECTS.items() if dialect == choice or dialect in own), None
    )


def referee(
    family: str | None, dialect: str, problem: Problem, numbers: Mapping[str, Numbers]
) -> tuple[str, Stepper]:
    """Return the other side, and what it is called.

    Raises:
        ConfigError: As `certify`.
    """
    weights = {name: weight.clone() for name, weight in problem.weights.items()}
    if family is not None and dialect in DIALECTS[family]:
        package = PACKAGES[family].get(dialect)
        cls = None if package is None else package.load()
        if package is not None and cls is not None:
            return package.title, ClassReference(cls, package.options, weights, numbers)
        formula = FORMULAS[family][dialect]
        title = (formula.__doc__ or "").partition("\n")[0].removeprefix("Compute ").rstrip(".")
        return title, FormulaReference(formula, weights)
    try:
        cls = class_of(dialect)
    except ConfigError as error:
        own = dict.fromkeys(name for presets in DIALECTS.values() for name in presets)
        raise ConfigError(
            f"dialect={dialect}: no package whose formula is known here, and no optimizer that is"
            f" registered. {did_you_mean(dialect, own)} A class of your own comes by --plugin"
            " FILE.py."
        ) from error
    try:
        return f"{cls.__qualname__}, the class of optimizer={dialect}", ClassReference(
            cls, {}, weights, numbers
        )
    except Exception as error:  # whatever a class of others raises
        raise ConfigError(
            f"dialect={dialect}: {cls.__qualname__} cannot be built over the tensors of this model"
            f" with lr, betas, eps and weight_decay alone: {error}"
        ) from error


def defaults_of(choice: str) -> PlainDict:
    """Return the keywords of a choice that a dialect or a trial may change."""
    one: Any = build_optimizer(
        choice, [{"params": [("w", torch.nn.Parameter(torch.ones(1)))]}], lr=1.0
    )
    keep = {*ALTERNATIVES[choice], *(key for preset in DIALECTS[choice].values() for key in preset)}
    return {key: value for key, value in one.get_config().items() if key in keep}


def closing(
    trial: Trial, choice: str, dialect: str, options: Mapping[str, object]
) -> dict[str, object] | None:
    """Find the fewest options that make a choice take the other side's steps.

    Args:
        trial: Says what equal means.
        choice: One that has dialects.
        dialect: Its preset is tried first.
        options: In force.

    Returns:
        Option -> value; None where nothing that was tried does.
    """
    defaults = defaults_of(choice)
    shared = {key: options[key] for key in ("eps", "weight_decay") if key in options}
    for name in dict.fromkeys(
        [*([dialect] if dialect in DIALECTS[choice] else []), None, *DIALECTS[choice]]
    ):
        wanted = {**defaults, **dialect_options(choice, name, **shared)}
        changes = {key: value for key, value in wanted.items() if options.get(key) != value}
        if trial.agreement(choice, {**options, **changes}) == trial.whole:
            for key in list(changes):
                fewer = {other: value for other, value in changes.items() if other != key}
                if trial.agreement(choice, {**options, **fewer}) == trial.whole:
                    changes = fewer
            return changes
    return _climb(trial, choice, options)


def _climb(trial: Trial, choice: str, options: Mapping[str, object]) -> dict[str, object] | None:
    """Change one option after another.

    Each time the one after which most tensors agree for most steps.
    """
    changes: dict[str, object] = {}
    best = trial.agreement(choice, options)
    while best < trial.whole:
        tried = [
            (trial.agreement(choice, {**options, **changes, key: value}), key, value)
            for key, values in ALTERNATIVES[choice].items()
            for value in values
            if key not in changes and options.get(key) != value
        ]
        most, key, value = max(tried, key=lambda trial: trial[0])
        if most <= best:
            return None
        best, changes[key] = most, value
    return changes


def _written(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
