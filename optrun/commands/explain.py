"""`optrun explain`: which parameter gets what, without training."""

from __future__ import annotations

from optrun.commands.arguments import parse_arguments
from optrun.errors import EXIT_DONE, ConfigError

USAGE = """
optrun explain [-cn RECIPE] [KEY=VALUE ...] [--all] [--json] [--png FILE]

Builds the model as shapes alone and says, without training and whatever its size: every parameter group with layer, lr
at its peak, weight decay, adaptation, parameters and the bytes its state will take; the schedule as a curve.

  --all       every tensor, not every group
  --json      one JSON object
  --png FILE  the schedule and the peaks of the groups as a picture
"""
OPTIONS = {"--all": False, "--json": False, "--png": True, "--config-name": True, "--config-dir": True}


def run(argv: list[str]) -> int:
    """Explain.

    Returns:
        0.
    """
    words = parse_arguments("explain", argv, USAGE, OPTIONS)
    if words is None:
        return EXIT_DONE
    if words.positional:
        raise ConfigError(f"optrun explain {words.positional[0]}: expected key=value. See optrun explain --help")
    resume = [word for word in words.overrides if word.lstrip("+").startswith("resume=") and word != "resume=null"]
    if resume:
        raise ConfigError(
            f"{resume[0]}: explain shows what a configuration means, not a run. Leave it out; what a run computes "
            "stands in its config.yaml."
        )
    from optrun.config import overrides as words_of
    from optrun.config import store
    from optrun.config.safety import refuse_stored_trust

    flags = words.flags
    hydra = store.open_hydra(flags.get("--config-dir"))
    name = flags.get("--config-name") or store.DEFAULT_CONFIG
    checked = words_of.checked(hydra, name, words.overrides, sweep=False)
    cfg = store.without_hydra(store.compose(hydra, name, checked))
    refuse_stored_trust(cfg, checked)
    config = store.typed(cfg)
    from optrun import explain

    explain.run(config, all_tensors="--all" in flags, as_json="--json" in flags, png=flags.get("--png"))
    return EXIT_DONE
