"""Refusal of code and secrets in a configuration, from any source.

Hydra imports and calls what `_target_` names, logging what `()` and `class` name, before a run
begins. And everything in a configuration is written into the run directory.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.errors import ConfigError
from optrun.config.hydra_internals import CORE_PLUGINS
from optrun.config.tokens import is_typed

_PLUGINS = (CORE_PLUGINS, "hydra_plugins.")
"""Modules of the launchers and sweepers that Hydra finds by name."""
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
        ConfigError: The message names the first such key, and the value if it names code.
    """
    leaves = list(_leaves(cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg)))
    for key, value in leaves:
        if _names_code(key, str(value)):
            raise code_refusal(key, value)
    for key, value in leaves:
        if isinstance(value, str) and value and _looks_like_secret(key, value):
            raise ConfigError(
                f"{key}: this looks like a secret, and a configuration is written into the run"
                " directory. Put it into the environment, of which nothing is written."
            )


def _looks_like_secret(key: str, value: str) -> bool:
    """Tell whether a key or an environment variable has the name of a secret.

    A URL with a password is a secret, too.

    Example:
        >>> _looks_like_secret("tracking.api_key", "abc"), _looks_like_secret("data.path", "abc")
        (True, False)
        >>> _looks_like_secret("data.path", "${oc.env:HF_TOKEN}")
        True
        >>> _looks_like_secret("model.config.image_token", "<image>")
        False
    """
    if _PASSWORD.match(value):
        return True
    variable = _VARIABLE.search(value)
    if variable is not None and _SECRET.search(variable[1]):
        return True
    if key.startswith("model.config.") and key.endswith("_token"):
        # Other tokens of a model are texts, such as the one that stands for an image.
        return _SECRET_TOKEN.search(key) is not None
    return _SECRET.search(key.rpartition(".")[2]) is not None


def code_refusal(key: str, value: object) -> ConfigError:
    """Build the error for a key with the name of code."""
    return ConfigError(
        f"{key}={value}: a configuration that names code is not run. Leave this key out, and give a"
        " choice by its name, such as optimizer=lamb."
    )


def _names_code(key: str, value: str) -> bool:
    """Tell whether Hydra or logging would import or call a value.

    Not counted: the launchers and sweepers that Hydra finds by name, and classes of `logging`.

    Example:
        >>> _names_code("model._target_", "os.system"), _names_code("lr", "os.system")
        (True, False)
        >>> _names_code("hydra.job_logging.handlers.file.class", "logging.FileHandler")
        False
    """
    leaf = key.rsplit(".", 1)[-1]
    if key.startswith("hydra.callbacks."):
        return True
    if leaf == "_target_":
        return not (key in _BUILT_BY_HYDRA and value.startswith(_PLUGINS))
    if key.startswith(("hydra.job_logging.", "hydra.hydra_logging.")):
        return leaf == "()" or (leaf == "class" and not value.startswith("logging."))
    return False


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a mapping or list; an empty one counts as a value.

    Example:
        >>> list(_leaves({"a": {"b": [1, {}]}}))
        [('a.b.0', 1), ('a.b.1', {})]
    """
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in items:
        if isinstance(value, dict | list) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refuse_stored_trust(cfg: DictConfig, typed: Sequence[str]) -> None:
    """Refuse `model.trust_remote_code=true` unless this command line has it.

    Args:
        cfg: A composed configuration.
        typed: The overrides of the command line.

    Raises:
        ConfigError: A file or a saved configuration sets it.
    """
    key = "model.trust_remote_code"
    if OmegaConf.select(cfg, key) and not is_typed(key, typed):
        raise trust_refusal()


def trust_refusal() -> ConfigError:
    """Build the error for a file with model.trust_remote_code=true."""
    return ConfigError(
        "model.trust_remote_code=true stands in a configuration file; it counts only on the"
        " command line, where the person who runs it sees it. Type it there if you trust the code."
    )
