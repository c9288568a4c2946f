"""Compose each shipped configuration once per test process.

Hydra reads thirty files for it, several times a run.

A composition is a function of search path, schemas, name and overrides. Where all files are the
checkout's own or Hydra's, which no test changes, a second one is a copy of the first, also in a
forked process. What a test's own folder takes part in, what names its files in messages and what is
refused is composed anew each time. Programs that a test starts compose as they do for a user.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import omegaconf._utils
import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf, ValueNode

CHECKOUT = Path(__file__).resolve().parents[1]
_FILES: dict[tuple[Any, ...], Any] = {}
_COMPOSED: dict[Path, DictConfig] = {}
_CHOSEN: dict[tuple[Any, ...], DefaultsList] = {}
_KINDS: dict[int, type] = {}  # held, so that no later class has the id of one of these


folder: Path | None = None
"""That forked processes share, where copies are installed."""


def install(shared: Path | None = None) -> Path:
    """Put the copies before Hydra's own functions, for as long as this process lives.

    Args:
        shared: The folder of another process; None: a new one.

    Returns:
        The folder, to be removed at the end by who made it.
    """
    global folder
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = shared or Path(tempfile.mkdtemp(prefix="composed-", dir=memory))
    # Each composition copies its repository, and with it the store of all schemas, which hands out
    # copies itself.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    ConfigStore.store = _store_once(ConfigStore.store)  # type: ignore[method-assign]
    ConfigRepository.load_config = _read_once(ConfigRepository.load_config)  # type: ignore[method-assign]
    ConfigLoaderImpl.load_configuration = _compose_once(  # type: ignore[method-assign]
        ConfigLoaderImpl.load_configuration, folder
    )
    ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once(  # type: ignore[method-assign]
        ConfigLoaderImpl._compose_config_from_defaults_list
    )
    config_loader_impl.create_defaults_list = _choose_once(  # type: ignore[attr-defined]
        config_loader_impl.create_defaults_list  # type: ignore[attr-defined]
    )
    _interpolate_when_asked()
    _write_by_libyaml()
    DictConfig.__deepcopy__ = _copied  # type: ignore[method-assign]
    return folder


def _copied(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
    """Copy in an eighth of the time.

    Each node by its fields, instead of by constructors that convert and check.
    """
    memo[id(self)] = copied = _copied_node(self, self._get_parent())
    return copied  # type: ignore[no-any-return]


def _copied_node(node: Any, parent: Any) -> Any:
    kind, own = type(node), vars(node)
    new, metadata = object.__new__(kind), object.__new__(type(own["_metadata"]))
    vars(metadata).update(vars(own["_metadata"]))
    metadata.flags = dict(metadata.flags)
    metadata.resolver_cache = (
        copy.deepcopy(metadata.resolver_cache) if metadata.resolver_cache else defaultdict(dict)
    )
    vars(new).update(own, _metadata=metadata, _parent=parent, _flags_cache=None)
    if issubclass(kind, ValueNode):
        if type(own["_val"]) not in (str, int, float, bool, type(None)):
            vars(new)["_val"] = copy.deepcopy(own["_val"])
    elif isinstance(content := own["_content"], dict):
        vars(new)["_content"] = {key: _copied_node(inner, new) for key, inner in content.items()}
    elif isinstance(content, list):
        vars(new)["_content"] = [_copied_node(inner, new) for inner in content]
    elif isinstance(content, Node):  # of a union
        vars(new)["_content"] = _copied_node(content, new)
    return new


def _write_by_libyaml() -> None:
    """Write the YAML of a run by the C library, where PyYAML has it, in a third of the time.

    It is the same text, but that characters beyond U+FFFF are escaped, which are read as the same.
    """
    if yaml.__with_libyaml__:
        kept = {
            "str_representer_added": False,
            "str_representer": omegaconf._utils.OmegaConfDumper.str_representer,
        }
        omegaconf._utils.OmegaConfDumper = type("OmegaConfDumper", (yaml.CDumper,), kept)  # type: ignore[misc]


def _interpolate_when_asked() -> None:
    """Make the map for interpolations in a defaults list when there is one.

    Hydra makes it for each file it reads.
    """
    map_of, resolved = (
        defaults_list._create_interpolation_map,
        InputDefault._resolve_interpolation_impl,
    )

    def resolve(self: InputDefault, known: Callable[[], DictConfig], value: str | None) -> str:
        return (
            value
            if isinstance(value, str) and "${" not in value
            else resolved(self, known(), value)
        )

    defaults_list._create_interpolation_map = lambda *given: partial(map_of, *given)  # type: ignore[assignment]
    InputDefault._resolve_interpolation_impl = resolve  # type: ignore[assignment,method-assign]


def _ours(path: str) -> bool:
    return Path(path).resolve().is_relative_to(CHECKOUT)


def _store_once(original: Any) -> Any:
    def store(
        self: ConfigStore,
        name: str,
        node: Any,
        group: str | None = None,
        package: str | None = None,
        provider: str | None = None,
    ) -> None:
        there = self._open(f"{group or ''}/{name.removesuffix('.yaml')}.yaml")
        given = (node, package, provider)
        if (
            there is None
            or (OmegaConf.get_type(there.node), there.package, there.provider) != given
        ):
            original(self, name, node, group, package, provider)

    return store


def _read_once(original: Any) -> Any:
    def load_config(self: ConfigRepository, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or not (
            source.scheme() == "pkg" or (source.scheme() == "file" and _ours(source.path))
        ):
            return original(self, config_path)
        key = (source.scheme(), source.path, source.provider, config_path)
        if key not in _FILES:
            _FILES[key] = original(self, config_path)
        return copy.deepcopy(_FILES[key])  # type: ignore[no-any-return]

    return load_config


def _compose_once(original: Any, folder: Path) -> Any:
    def load_configuration(
        self: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        path = [(part.provider, str(part.path)) for part in self.config_search_path.get_path()]
        files = [name.removeprefix("file://") for _, name in path if name.startswith("file://")]
        given = (config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        # What is said of a recipe names the file that was read for it.
        if (
            config_name != "config"
            or "hydra.searchpath" in " ".join(overrides)
            or not all(map(_ours, files))
        ):
            return original(self, *given)
        key = repr(
            (given, path, _schemas(ConfigStore.instance().repo), JobRuntime.instance().get("name"))
        )
        known = folder / hashlib.sha256(key.encode()).hexdigest()
        with contextlib.suppress(OSError):
            if known not in _COMPOSED:
                _COMPOSED[known] = pickle.loads(known.read_bytes())
            again = copy.deepcopy(_COMPOSED[known])
            again.hydra.runtime.cwd = os.getcwd()  # noqa: PTH109 - as Hydra writes it
            return again
        cfg: DictConfig = original(self, *given)
        if not cfg.hydra.job.env_copy:  # nothing of this moment is in it
            with contextlib.suppress(OSError):
                aside = known.with_suffix(f".{os.getpid()}")
                aside.write_bytes(pickle.dumps(cfg))
                aside.rename(known)
        return cfg

    return load_configuration


def _choose_once(original: Any) -> Any:
    """Which files a composition has.

    A function of its choices, whatever values are given beside them.
    """

    def create_defaults_list(
        repo: IConfigRepository,
        config_name: str | None,
        overrides_list: list[Override],
        prepend_hydra: bool,
        skip_missing: bool,
    ) -> DefaultsList:
        given = (repo, config_name, overrides_list, prepend_hydra, skip_missing)
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        if not all(_ours(path) for scheme, path in sources if scheme == "file"):
            return original(*given)  # type: ignore[no-any-return]
        overrides = Overrides(repo, overrides_list)
        choices = [
            override.input_line
            for override in overrides_list
            if not override.is_sweep_override() and override not in overrides.config_overrides
        ]
        schemas = repr(_schemas(ConfigStore.instance().repo))
        key = (config_name, *choices, prepend_hydra, skip_missing, repr(sources), schemas)
        if key not in _CHOSEN:
            _CHOSEN[key] = original(*given)
        known = _CHOSEN[key]
        overrides.known_choices = dict(known.overrides.known_choices)
        return DefaultsList(
            defaults=copy.deepcopy(known.defaults),
            defaults_tree=known.defaults_tree,
            config_overrides=overrides.config_overrides,
            overrides=overrides,
        )

    return create_defaults_list


def _merge_once(original: Any) -> Any:
    """The files of a composition, merged, before the values of the command line."""

    def merge(
        self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: CachingConfigRepository
    ) -> DictConfig:
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        if not all(_ours(path) for scheme, path in sources if scheme == "file"):
            return original(self, defaults, repo)
        key = ("merged", repr(defaults), repr(sources), repr(_schemas(ConfigStore.instance().repo)))
        if key not in _FILES:
            _FILES[key] = original(self, defaults, repo)
        return copy.deepcopy(_FILES[key])  # type: ignore[no-any-return]

    return merge


def _schemas(entries: dict[str, Any]) -> list[Any]:
    """What the store holds: the class of each schema; of what has none, its values."""
    found: list[Any] = []
    for name, entry in entries.items():
        found.append(name)
        if isinstance(entry, dict):
            found += _schemas(entry)
        else:
            kind = OmegaConf.get_type(entry.node)
            _KINDS[id(kind)] = kind
            found.append(id(kind) if kind is not dict else OmegaConf.to_yaml(entry.node))
    return found
