"""Folders shipped with the package, and the file of `-cn FILE.yaml`."""

from pathlib import Path

from optrun.base.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
VALUES_FILES: dict[str, Path] = {}
"""The file of values that the last command line names with `-cn`, by its stem; for messages."""


def shipped(folder: str, mark: str) -> Path:
    """Find a folder inside the package (wheel) or beside it (checkout, editable install).

    Args:
        folder: Its name.
        mark: A file that lies in it: another folder of that name is none of ours.

    Raises:
        ConfigError: It is in neither.
    """
    for candidate in (_PACKAGE / folder, _PACKAGE.parent / folder):
        if (candidate / mark).is_file():
            return candidate
    raise ConfigError(
        f"{folder}/{mark} is missing beside {_PACKAGE}: the installation is incomplete. Install"
        " optrun again."
    )


def config_dir() -> Path:
    """Return the folder of configuration groups."""
    return shipped("conf", "config.yaml")


def recipes_dir() -> Path:
    """Return the folder of recipes."""
    return shipped("recipes", "stdlib_gpt.yaml")
