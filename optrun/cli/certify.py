"""`optrun certify resume`, `optimizer` and `transfer`: proof, on the user's own configuration."""

import importlib

from optrun.base.errors import ConfigError, refuse_existing, refuse_url
from optrun.cli.parser import VerbArguments, VerbParser


def parser() -> VerbParser:
    """Build the parser of `optrun certify resume|optimizer|transfer`, with a recipe."""
    verb_parser = VerbParser(
        "certify",
        ["resume|optimizer|transfer"],
        """
resume: trains this configuration for a few steps in a temporary folder, once undisturbed, then
killed (SIGKILL) at random moments, most of them inside a save, and resumed. Weights, optimizer
state, schedule, loss scale, random states, sample order, counters and metrics lines must be equal
to the last bit. Prints the certificate and writes it as JSON, or names the first tensor that
differs.

optimizer: steps the configured optimizer and that of a package (dialect=timm, apex, deepspeed,
optax, ...), or one that --plugin registers (dialect=ITS_NAME), over the same weights, gradients
and groups. Says that they are equal, or in which step, tensor and term they first differ, and
which options would make them equal.

transfer: trains models of several widths (multiples of parametrization.base, or of the model
itself) and depths for a few steps. The output of each layer, its change, and the share of each
parameter's update in that change must neither grow nor vanish with the size. Prints and draws the
exponents, or names the parameter that scales wrongly.

Exit code 0: it holds; 1: it does not.
""",
        keys={"dialect": "NAME", "widths": "1,2,4,8", "depths": "1,2,4", "seeds": "0-1"},
        overrides="KEY",
        are_paths=False,
    )
    verb_parser.add_recipe_options()
    verb_parser.add_argument(
        "--steps",
        metavar="N",
        help="optimizer steps (default: 12 of each run; optimizer: 20, transfer: 4)",
    )
    verb_parser.add_argument("--kills", metavar="N", help="resume: kills in all (default: 8)")
    verb_parser.add_argument(
        "--seed", metavar="N", help="chooses the moments, or the gradients (default: 0)"
    )
    verb_parser.add_argument(
        "--out", metavar="FILE", help="where the certificate goes (default: outputs/certificates/)"
    )
    verb_parser.add_argument(
        "--json", action="store_true", help="print it as JSON instead of tables"
    )
    return verb_parser


def run(arguments: VerbArguments) -> int:
    """Check the options of the named claim, prove it, and print the certificate.

    The claim is `resume`, `optimizer` or `transfer`; each has keys and options of its own.

    Returns:
        0 if the claim holds, else 1.
    """
    claim = "".join(arguments.positional)
    options = arguments.options
    if claim not in ("resume", "optimizer", "transfer"):
        raise ConfigError(
            "optrun certify takes the claim to prove: optrun certify resume [KEY=VALUE ...], optrun"
            " certify optimizer dialect=NAME [KEY=VALUE ...], or optrun certify transfer [KEY=VALUE"
            " ...]"
        )
    for key, value in arguments.key_values.items():
        claim_of_key = "optimizer" if key == "dialect" else "transfer"
        if claim != claim_of_key:
            raise ConfigError(
                f"{key}={value}: goes with optrun certify {claim_of_key}, not with {claim}."
            )
    if claim != "resume" and options.kills is not None:
        raise ConfigError(
            f"--kills: goes with optrun certify resume, not with {claim}: nothing is killed here."
        )
    if claim == "transfer" and options.seed is not None:
        raise ConfigError("--seed: does not go with optrun certify transfer; give seeds=0-2.")
    refuse_url("--out", options.out)
    if options.out is not None:
        refuse_existing(f"--out {options.out}", options.out)
    from optrun.cli.certificate import ProofConsole

    code: int = importlib.import_module(f"optrun.cli.certify_{claim}").run(
        arguments, ProofConsole(claim, options)
    )
    return code
