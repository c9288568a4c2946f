"""Imports from `hydra._internal`.

Hydra's public API neither composes twice nor takes a loader of one's own.

Nothing else of the package imports from there; `tests/unit/config/test_hydra_internals.py` says
what is relied on, so that a new Hydra is one file to look at.
"""

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from omegaconf._utils import get_omega_conf_dumper

__all__ = [
    "CORE_PLUGINS",
    "Callbacks",
    "ConfigLoaderImpl",
    "ConfigRepository",
    "Hydra",
    "create_config_search_path",
    "get_args_parser",
    "get_omega_conf_dumper",
    "get_overrides_dirname",
]

CORE_PLUGINS = "hydra._internal.core_plugins."
"""Begins the `_target_` of Hydra's own launcher and sweeper."""
