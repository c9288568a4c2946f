"""Refusal of code and secrets in a configuration, from any source.

Hydra builds what `_target_` says, logging what `()` and `class` say, before a line of a run is
executed; and everything in a configuration is written into the run directory.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.errors import ConfigError
from optrun.config.hydra_internals import CORE_PLUGINS
from optrun.config.tokens import is_typed

_PLUGINS = (CORE_PLUGINS, "hydra_plugins.")
"""Where the launchers and sweepers lie that are found by name."""
_BUILT_BY_HYDRA = ("hydra.launcher._target_", "hydra.sweeper._target_")
_SECRET = re.compile(
    r"(^|[_-])(token|api_?key|secret(_?key)?|access_?key|passw(or)?d|credentials?)$", re.IGNORECASE
)
_SECRET_TOKEN = re.compile(r"(auth|access|hf|hub|api)_?token$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{oc\.env:([^,${}]+)")
_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)


def refuse_code_and_secrets(cfg: DictConfig | dict[str, Any]) -> None:
    """Refuse a configuration with the name of code or a secret in it.

    Raises:
        ConfigError: Naming the first such key, and the value where it is code.
    """
    leaves = list(_leaves(cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg)))
    for key, value in leaves:
        if _names_code(key, str(value)):
            raise code_refusal(key, value)
    for key, value in leaves:
        if not isinstance(value, str) or not value:
            continue
        secret_name = _SECRET.search(key.rsplit(".", 1)[-1])
        if key.startswith("model.config.") and key.endswith("_token"):
            secret_name = _SECRET_TOKEN.search(
                key
            )  # others are texts, such as the one that stands for an image
        variable = _VARIABLE.search(value)
        if secret_name or _PASSWORD.match(value) or (variable and _SECRET.search(variable[1])):
            raise ConfigError(
                f"{key}: this looks like a secret, and a configuration is written into the run"
                " directory. Expected it in the environment, of which nothing is written."
            )


def code_refusal(key: str, value: object) -> ConfigError:
    """Build the error for a key with the name of code."""
    return ConfigError(
        f"{key}={value}: a configuration that names code is not run. Expected a choice by its name,"
        " such as optimizer=lamb; leave this key out."
    )


def _names_code(key: str, value: str) -> bool:
    """Tell whether Hydra or logging would import or call what a value names."""
    leaf = key.rsplit(".", 1)[-1]
    if key.startswith("hydra.callbacks."):
        return True
    if leaf == "_target_":
        return not (key in _BUILT_BY_HYDRA and value.startswith(_PLUGINS))
    if key.startswith(("hydra.job_logging.", "hydra.hydra_logging.")):
        return leaf == "()" or (leaf == "class" and not value.startswith("logging."))
    return False


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a mapping or list, before interpolation."""
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refuse_stored_trust(cfg: DictConfig, typed: Sequence[str]) -> None:
    """Refuse the code of a model unless this command line allows it.

    Args:
        cfg: Composed.
        typed: The overrides that a person typed.

    Raises:
        ConfigError: `model.trust_remote_code` is on, and not by this command line.
    """
    if OmegaConf.select(cfg, "model.trust_remote_code") and not is_typed(
        "model.trust_remote_code", typed
    ):
        raise trust_refusal()


def trust_refusal() -> ConfigError:
    """Build the error for a file with model.trust_remote_code=true."""
    return ConfigError(
        "model.trust_remote_code=true stands in a configuration file; it counts only on the"
        " command line, where the person who runs it sees it."
    )
