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
    """Build the parser of `optrun transfer DIR ...`; `to` is the target size."""
    return VerbParser(
        "transfer",
        ["DIR", "..."],
        """
Predicts the best learning rate for another width, depth, length or batch size from sweeps over lr
at two sizes or more, and suggests runs that test it. Trains nothing.

  to      the size to predict for, by varied keys: to="model.config.n_embd=512"
  metric  judge by this metric, such as eval/loss; default: the main metric of the runs
""",
        keys={"to": '"KEY=VALUE ..."', "metric": "NAME"},
        instead={"out": "The answer is printed, and optrun report DIR draws the sweeps."},
    )


def run(arguments: VerbArguments) -> int:
    """Predict the learning rate of another size, and print it.

    Returns:
        0.

    Raises:
        ConfigError: `to` is missing or no size, or the sweeps of no contender suffice.
    """
    from rich.console import Console

    from optrun.report.lr_scaling.predict import predict

    target = _parse_target(arguments.key_values.get("to", ""))
    prediction = predict(arguments.positional, target, arguments.key_values.get("metric"))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for answer in prediction.answers:
        headline, *details = _describe(answer)
        console.print(headline, style="bold")
        console.print("\n".join(details), end="\n\n")
    for contender, reason in prediction.refused.items():
        console.print(f"{contender}: no answer. {reason}")
    return EXIT_DONE


def _describe(answer: Answer) -> list[str]:
    """Write an answer as lines: the lr, its power law, the optimum of each size, the test.

    The power law is one line for each varied key, such as `if lr* ~ model.config.n_embd^-0.98
    holds`.
    """
    from optrun.report.lr_scaling.predict import write_size

    best = f"lr {rate(answer.lr.value)} (90 % interval {answer.lr.interval()})"
    lines = [f"{answer.contender}: {best} for {write_size(answer.target)}"]
    for key, exponent in answer.exponents.items():
        line = f"  if lr* ~ {key}^{exponent.value:+.2f} holds"
        if exponent.is_bounded:
            line += f"; 90 % interval {exponent.low:+.2f} to {exponent.high:+.2f}"
        lines.append(line)
    for size, lr in answer.optima.items():
        lines.append(f"  {size}: best lr {rate(lr.value)} (90 % interval {lr.interval()})")
    return [*lines, f"The runs that would test it:\n  {answer.test}"]


def _parse_target(text: str) -> dict[str, float]:
    """Read a size such as `model.config.n_embd=512 training.max_steps=10000`.

    Raises:
        ConfigError: The text is empty, or a word is not `KEY=NUMBER`.
    """
    target: dict[str, float] = {}
    for token in text.split():
        key, _, value = token.partition("=")
        if key in target:
            raise ConfigError(f"to: {key} is given twice; leave one out.")
        try:
            target[key] = float(value)
        except ValueError as error:
            example = "expected KEY=NUMBER, as in training.max_steps=10000."
            raise ConfigError(f"to: {token}: {example}") from error
    if not target:
        raise ConfigError(
            'to is missing: the size of the new run, as in to="training.max_steps=10000".'
        )
    return target
