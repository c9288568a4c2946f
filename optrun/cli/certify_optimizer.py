"""`optrun certify optimizer dialect=NAME`: is our optimizer that package's?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from optrun.cli.certificate import ProofConsole
from optrun.cli.parser import VerbArguments

if TYPE_CHECKING:
    from optrun.certify.optimizer import Verdict
    from optrun.config.request import CommandLine, Request

DEFAULT_CHOICE = "adamw"
"""The optimizer of the embedded default."""


def run(arguments: VerbArguments, output: ProofConsole) -> int:
    """Compare the configured optimizer with another, and print the result.

    Returns:
        0 if both are equal, else 1.

    Raises:
        ConfigError: No known dialect is given, or the configuration is invalid.
    """
    steps = output.read_whole_number("steps", 20, 1)
    seed = output.read_whole_number("seed", 0, 0)
    dialect = arguments.key_values.get("dialect")
    from optrun.config.dialects import DIALECTS

    if not dialect:
        names = "; ".join(f"{choice}: {', '.join(presets)}" for choice, presets in DIALECTS.items())
        raise ConfigError(
            "optrun certify optimizer takes one dialect=NAME: a package, or an optimizer of yours"
            f" by --plugin FILE.py. Packages are, for {names}."
        )
    request, notes = _composed(arguments.command_line(), dialect)

    from optrun.certify.optimizer import certify
    from optrun.explain.build import model_spec
    from optrun.model.build import build_model
    from optrun.optimizer.build import choice_of, options_of, require_optimizer
    from optrun.param_groups import build_param_groups

    config = request.config
    require_optimizer(config.optimizer)
    model, _ = build_model(config.model, model_spec(config, []), meta=True)
    groups = build_param_groups(
        model, config.param_groups, lr=config.lr, weight_decay=config.optimizer.weight_decay
    )
    choice = choice_of(config.optimizer)
    for note in notes:
        output.say(note)
    with output.watched() as watch:
        verdict = certify(
            config.optimizer,
            groups,
            choice=choice,
            dialect=dialect,
            lr=config.lr,
            options=options_of(config.optimizer) if choice in DIALECTS else {},
            steps=steps,
            seed=seed,
            watch=watch,
        )
    output.publish(verdict.to_dict(), always=False)
    for line in describe(verdict):
        output.say(line)
    if verdict.equal:
        return EXIT_DONE
    return EXIT_FAILED


def _composed(command_line: CommandLine, dialect: str) -> tuple[Request, list[str]]:
    """Compose the configuration with the preset of the dialect; typed values win over the preset.

    If no optimizer is named, the first one with this dialect is taken, and a note says so.

    Returns:
        The composed request, and the notes.

    Raises:
        ConfigError: A run is resumed or branched, the parametrization is not standard, or the
            chosen optimizer has no such dialect.
    """
    from optrun.certify.optimizer import family_of
    from optrun.config.compose import compose_changed
    from optrun.config.dialects import DIALECTS
    from optrun.config.overrides import is_hydra
    from optrun.config.tokens import is_typed, key_of
    from optrun.optimizer.build import choice_of
    from optrun.optimizer.classes import is_builtin

    overrides = list(command_line.overrides)
    for token in overrides:
        if key_of(token) in ("resume", "branch_from") or is_hydra(token):
            raise ConfigError(f"{token}: no run is started or resumed here; leave it out.")
    notes: list[str] = []
    family = family_of(dialect)
    chosen = is_typed("optimizer", overrides) or command_line.names_config
    if not chosen and family is not None and dialect not in DIALECTS[DEFAULT_CHOICE]:
        overrides = [f"optimizer={family}", *overrides]
        notes.append(f"optimizer={family}: the first that has the dialect {dialect}")
    request = compose_changed(command_line, overrides)
    if request.config.parametrization.name != "standard":
        raise ConfigError(
            f"parametrization={request.config.parametrization.name}: a dialect is compared at one"
            " size; leave it out. optrun certify transfer checks a parametrization."
        )
    choice = choice_of(request.config.optimizer)
    presets = DIALECTS.get(choice, {})
    if dialect in presets and not is_typed("optimizer.dialect", overrides):
        overrides = [*overrides, f"optimizer.dialect={dialect}"]
    if choice in DIALECTS and dialect not in presets and family not in (None, dialect):
        raise ConfigError(
            f"dialect={dialect}: no such dialect of {choice}. optimizer={family} has it. {choice}"
            f" has {', '.join(presets)}."
        )
    if choice not in DIALECTS and is_builtin(choice) and family not in (None, dialect):
        raise ConfigError(
            f"dialect={dialect}: optimizer={choice} has no dialects. optimizer={family} has it."
        )
    return compose_changed(command_line, overrides), notes


def describe(verdict: Verdict) -> list[str]:
    """Describe a comparison of two optimizers, one string per line.

    What was compared; then `equal` with the largest difference, or the step and tensor where they
    part, with the options that would make them equal.
    """
    lines = [
        f"optimizer={verdict.choice} against {verdict.reference}",
        (
            f"{verdict.steps} steps in float64 over {verdict.tensors} tensors in {verdict.groups}"
            " groups of this model, sides cut to 8; weights and gradients drawn so that each term"
            " shows"
        ),
    ]
    parting = verdict.parting
    if parting is None:
        return [
            *lines,
            f"equal: the largest difference is {verdict.largest:.1e} of a tensor's largest entry",
        ]
    lines.append(
        f"not equal: they part at step {parting.step}, first in {parting.tensor}:"
        f" {parting.ours:.12g} here, {parting.reference:.12g} there"
    )
    if verdict.overrides:
        lines += [f"by: {', '.join(verdict.terms)}", f"equal with: {' '.join(verdict.overrides)}"]
    elif verdict.family not in (None, verdict.choice):
        lines.append(
            "the option that closes the gap: optrun certify optimizer"
            f" optimizer={verdict.family} dialect={verdict.choice}"
        )
    else:
        lines.append("by a term that no option tried here closes")
    return lines
