"""`optrun transfer`.

The learning rate for a size that was not swept, from sweeps at smaller ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.base.formatting import rate
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from optrun.report.lr_scaling.predict import Answer


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "transfer",
        ["DIR", "..."],
        """
Predicts the best learning rate for another width, depth, length or batch size from sweeps over lr
at two sizes or more, and suggests runs that test it. Trains nothing.

  to      the size to predict for, by keys that varied between the sweeps:
          to="model.config.n_embd=512"
  metric  judge by this metric, such as eval/loss; default: the main metric of the runs
""",
        keys={"to": '"KEY=VALUE ..."', "metric": "NAME"},
        instead={"out": "The answer is printed, and optrun report DIR draws the sweeps."},
    )


def run(arguments: VerbArguments) -> int:
    """Predict the learning rate of another size, and print it.

    Returns:
        0.
    """
    from rich.console import Console

    from optrun.report.lr_scaling.predict import predict, write_size
    from optrun.report.table import Table, to_rich

    target = _parse_target(arguments.key_values.get("to", ""))
    prediction = predict(arguments.positional, target, arguments.key_values.get("metric"))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for answer in prediction.answers:
        best = f"lr {rate(answer.lr.value)} (90 % interval {answer.lr.interval()})"
        size = write_size(answer.target)
        console.print(f"{answer.contender}: {best} for {size}{_write_law(answer)}.", style="bold")
        table = Table(["size", "best lr", "90 % interval"], [False, True, True])
        table.rows += [[size, rate(lr.value), lr.interval()] for size, lr in answer.optima.items()]
        table.rows += [[size, "none", reason] for size, reason in answer.missing.items()]
        table.styles += [""] * len(table.rows)
        console.print(to_rich(table))
        console.print(f"The runs that would test it:\n  {answer.test}\n")
    for contender, reason in prediction.refused.items():
        console.print(f"{contender}: no answer. {reason}")
    return EXIT_DONE


def _parse_target(text: str) -> dict[str, float]:
    """Read a size such as `model.config.n_embd=512 training.max_steps=10000`."""
    target: dict[str, float] = {}
    for token in text.split():
        key, _, value = token.partition("=")
        if key in target:
            raise ConfigError(f"to: {key} is given twice: which one is meant?")
        try:
            target[key] = float(value)
        except ValueError:
            raise ConfigError(
                f"to: {token}: expected KEY=NUMBER, as in training.max_steps=10000."
            ) from None
    if not target:
        raise ConfigError(
            'to is missing: the size that lr is for, as in to="model.config.n_embd=512".'
        )
    return target


def _write_law(answer: Answer) -> str:
    """Write the power law behind an answer; empty if the size itself was swept."""
    powers = []
    for key, exponent in answer.exponents.items():
        power = f"{key}^{exponent.value:+.2f}"
        if exponent.is_bounded:
            power += f" ({exponent.low:+.2f} to {exponent.high:+.2f})"
        powers.append(power)
    if powers:
        return f", if lr* ~ {' '.join(powers)} holds"
    return ""
