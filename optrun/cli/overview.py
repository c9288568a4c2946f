"""`optrun --help`: what one can type, on one screen.

Imports neither Hydra nor torch: it is asked for at a prompt.
"""

from pathlib import Path

from optrun.cli.verbs import VERBS
from optrun.config.paths import config_dir, shipped

_TRAINING = """\
optrun [KEY=VALUE ...]                          train; without arguments a demo, no download
optrun optimizer=lamb lr=2e-3                   train with another optimizer and peak learning rate
optrun -m optimizer=lamb,adamw lr=1e-3,2e-3     a sweep: one run per combination, then a comparison
optrun -cn NAME|FILE.yaml [KEY=VALUE ...]       a recipe, or a YAML file of your own
optrun resume=RUN_DIR|CHECKPOINT|latest|auto    continue a run where it stopped
optrun branch_from=RUN_DIR|CHECKPOINT [...]     a new run from its weights and point in the data"""
_MORE = """\
optrun --help optimizer            the choices of a group, each in a sentence
optrun --help optimizer=lamb       every key of one choice
optrun --help lr                   one key: default, type, meaning
optrun VERB --help                 what a command takes
optrun --cfg job --resolve         the configuration that would run
optrun --info defaults             the files that it is composed of
optrun --hydra-help                options that come from Hydra
eval "$(optrun -sc install=bash)"  completion in bash
"""


def overview(config_folder: str | None) -> str:
    """Write the text of `optrun --help`: commands, verbs and choices.

    Args:
        config_folder: A folder of the user's own choices, `--config-dir`.
    """
    verbs = {f"{verb} {usage}": meaning for verb, (usage, meaning) in VERBS.items()}
    choices = (f"{group}: {', '.join(names)}" for group, names in groups(config_folder).items())
    return "\n".join(
        [
            "optrun: train transformers with exactly the optimizer you asked for.",
            f"Pages: {shipped('docs', 'index.md') / 'index.md'}",
            "",
            _TRAINING,
            *(f"optrun {usage:40} {meaning}" for usage, meaning in verbs.items()),
            "== Choices: group=option ==",
            *choices,
            "",
            _MORE,
        ]
    )


def groups(config_folder: str | None) -> dict[str, list[str]]:
    """Map each group to its choices, including the user's own; both in alphabetical order.

    Args:
        config_folder: A folder of the user's own choices, `--config-dir`.
    """
    from optrun.config import registry

    names_by_group = {group: set(registry.names(kind)) for group, kind in registry.GROUPS.items()}
    folders = [config_dir()]
    if config_folder:
        folders.append(Path(config_folder))
    for folder in folders:
        for path in folder.glob("*/*.yaml"):  # one's own may have the name of one of ours
            names_by_group.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(names_by_group.items())}
