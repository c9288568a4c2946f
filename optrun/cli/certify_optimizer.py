"""`optrun certify optimizer dialect=NAME`: is our optimizer that package's?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from optrun.cli.certificate import ProofConsole
from optrun.cli.parser import VerbArguments
from optrun.config.dialects import DIALECTS

if TYPE_CHECKING:
    from optrun.certify.optimizer import Verdict
    from optrun.config.request import CommandLine, Request

DEFAULT_CHOICE = "adamw"
"""The optimizer of the embedded default."""


def run(arguments: VerbArguments, output: ProofConsole) -> int:
    """Compare the steps of the configured optimizer with those of another, and print the result.

    Returns:
        0 if both are equal, else 1.

    Raises:
        ConfigError: No known dialect is given, or the configuration is invalid.
    """
    steps = output.read_whole_number("steps", 20, 1)
    seed = output.read_whole_number("seed", 0, 0)
    dialect = arguments.key_values.get("dialect")

    if not dialect:
        names = "; ".join(f"{choice}: {', '.join(presets)}" for choice, presets in DIALECTS.items())
        raise ConfigError(
            "optrun certify optimizer takes one dialect=NAME: a package, or an optimizer of yours"
            f" by --plugin FILE.py. Packages are, for {names}."
        )
    request, notes = _compose_with_preset(arguments.command_line(), dialect)

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


def _compose_with_preset(command_line: CommandLine, dialect: str) -> tuple[Request, list[str]]:
    """Compose the configuration with the preset of a dialect; typed values win over the preset.

    A dialect is an optimizer as another package has it, such as `timm` for LAMB; its preset, the
    options for the numbers of that package, is set by `optimizer.dialect`. The name may also be
    that of an optimizer itself, optrun's or a plugin's; there is no preset then.

    If no optimizer is named and the default one lacks the dialect, the first optimizer with it is
    taken, and a note says so. `optimizer=lamb` with the dialect `timm` is composed as
    `optimizer=lamb optimizer.dialect=timm`.

    Returns:
        The composed request, and the notes.

    Raises:
        ConfigError: A run is resumed or branched, an override is for Hydra (`hydra.` or `hydra/`),
            the parametrization is not standard, or the chosen optimizer has no such dialect.
    """
    from optrun.certify.optimizer import family_of
    from optrun.config.compose import compose_changed
    from optrun.config.overrides import is_hydra
    from optrun.config.tokens import is_typed, key_of
    from optrun.optimizer.build import choice_of

    # 1. Refuse what a comparison cannot have: no run is started here.
    overrides = list(command_line.overrides)
    for token in overrides:
        if key_of(token) in ("resume", "branch_from") or is_hydra(token):
            raise ConfigError(f"{token}: certify starts and resumes no run here; leave it out.")
    # 2. Choose the optimizer, if none is named.
    notes: list[str] = []
    # The first optimizer with the dialect, or `dialect` itself if that is an optimizer with
    # dialects; None for any other name, such as an optimizer of a plugin.
    first_optimizer = family_of(dialect)
    # A recipe (`-cn`) names an optimizer, too. The default one is taken if it has the dialect.
    names_optimizer = is_typed("optimizer", overrides) or command_line.names_config
    default_has_dialect = dialect in DIALECTS[DEFAULT_CHOICE]
    if first_optimizer is not None and not names_optimizer and not default_has_dialect:
        overrides = [f"optimizer={first_optimizer}", *overrides]
        notes.append(f"optimizer={first_optimizer}: the first optimizer with the dialect {dialect}")
    request = compose_changed(command_line, overrides)
    if request.config.parametrization.name != "standard":
        raise ConfigError(
            f"parametrization={request.config.parametrization.name}: a dialect is compared at one"
            " size; leave it out. optrun certify transfer checks a parametrization."
        )
    # 3. Add the preset. `optimizer.dialect` is a key of the chosen optimizer only if that has
    # dialects, so the first composition is without it. A name of a plugin has no preset.
    choice = choice_of(request.config.optimizer)
    if first_optimizer is not None and first_optimizer != dialect:
        # Raises if `choice` is one of optrun's without this dialect; a plugin's is not refused.
        _refuse_dialect_of_another(choice, dialect, first_optimizer)
    if dialect in DIALECTS.get(choice, {}) and not is_typed("optimizer.dialect", overrides):
        overrides = [*overrides, f"optimizer.dialect={dialect}"]
    return compose_changed(command_line, overrides), notes


def _refuse_dialect_of_another(choice: str, dialect: str, first_optimizer: str) -> None:
    """Refuse a dialect unless the chosen optimizer has it, or is not one of optrun's own.

    Args:
        choice: The choice in `optimizer=`.
        dialect: The name of the dialect.
        first_optimizer: The first optimizer with this dialect.

    Raises:
        ConfigError: The message names `first_optimizer`.
    """
    from optrun.optimizer.classes import is_builtin

    presets = DIALECTS.get(choice)
    if presets is None and is_builtin(choice):
        raise ConfigError(
            f"dialect={dialect}: optimizer={choice} has no dialects."
            f" optimizer={first_optimizer} has it."
        )
    if presets is not None and dialect not in presets:
        raise ConfigError(
            f"dialect={dialect}: {choice} has no such dialect. optimizer={first_optimizer} has it."
            f" {choice} has {', '.join(presets)}."
        )


def describe(verdict: Verdict) -> list[str]:
    """Describe a comparison of two optimizers, one string per line.

    The lines say what was compared; then `equal` with the largest difference, or the first step and
    tensor that differ. After these comes the first that is known of: the options that would make
    both equal; the optimizer to compare that dialect with; that no option does.
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
        f"not equal: they first differ at step {parting.step}, in {parting.tensor}:"
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
