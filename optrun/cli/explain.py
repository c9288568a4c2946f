"""`optrun explain`: what each parameter gets, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from optrun.config.schema.run import RunConfig
    from optrun.explain.facts import TrunkState


def parser() -> VerbParser:
    """Build the parser of `optrun explain [KEY=VALUE ...]`, with a recipe (-cn, -cd) and --json."""
    verb_parser = VerbParser(
        "explain",
        [],
        """
Shows what a configuration would train: the layers, peak lr, weight decay, parameters and optimizer
state of each group, the schedule as a curve, and the rows, tokens and labels of the data. Trains
nothing and allocates no weights, so it works for a model of any size.
""",
        overrides="KEY",
        instead={
            "all": "--json has every tensor.",
            "png": "The schedule is drawn in the terminal, and --json gives its values;"
            " curves.png of a run shows loss and lr.",
        },
    )
    verb_parser.add_recipe_options()
    verb_parser.add_argument("--json", action="store_true", help="print one JSON object")
    return verb_parser


def run(arguments: VerbArguments) -> int:
    """Print the groups, the schedule and the data of a configuration; nothing is trained.

    With `--json` stdout holds one JSON object; the origin of an automatic lr then goes to stderr.

    Returns:
        0.

    Raises:
        ConfigError: An override resumes a run or is for Hydra, or a key or value does not fit.
    """
    from rich.console import Console

    from optrun.cli.auto_lr import compose_new
    from optrun.config import store
    from optrun.config.compose import build_request
    from optrun.config.overrides import is_hydra
    from optrun.config.tokens import key_of

    for token in arguments.overrides:
        if key_of(token) == "resume" and token != "resume=null":
            raise ConfigError(
                f"{token}: explain shows a configuration, not a run. Leave it out; the run's own"
                " configuration is in its config.yaml."
            )
        if is_hydra(token) and not token.startswith("hydra.searchpath="):
            raise ConfigError(f"{token}: explain starts no run, so it has no effect; leave it out.")
    command_line = arguments.command_line()
    options = arguments.options
    checked, cfg = compose_new(
        store.open_hydra(command_line.config_dir), command_line, Console(stderr=options.json)
    )
    config = build_request(command_line, cfg, checked).config
    from optrun import explain

    explain.run(config, as_json=options.json, trunk=_trunk(config))
    return EXIT_DONE


def _trunk(config: RunConfig) -> TrunkState | None:
    """Describe the checkpoint in `branch_from`, the trunk; None for a run without one.

    Returns:
        Its step, the step that the schedule of the run counts from by `branch_schedule`, and of
        its optimizer state the name, dtype and shape of each tensor. The tensors are not read.
    """
    from optrun.artifacts.checkpoint import open_verified
    from optrun.artifacts.forks import Trunk
    from optrun.artifacts.sharded import StoredTensors
    from optrun.explain.facts import TrunkState
    from optrun.runner.forks.start import schedule_from

    trunk = Trunk.parse(config.branch_from)
    if trunk is None:
        return None
    saved = open_verified(trunk.folder, lazy=True)
    assert isinstance(saved.optimizer, StoredTensors)
    return TrunkState(
        folder=str(trunk.folder),
        step=saved.global_step,
        schedule_from=schedule_from(saved.metadata, config.branch_schedule),
        optimizer=saved.metadata.optimizer,
        tensors={
            name: (entry["dtype"], tuple(entry["shape"]))
            for name, entry in saved.optimizer.described.items()
        },
    )
