"""Hydra's insides are imported by one module, and are what the package relies on."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import version
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import OmegaConf

import optrun
from optrun.config import hydra_internals as internals
from optrun.config import store
from optrun.config.paths import config_dir
from optrun.runner.resume.saved_config import as_text

PACKAGE = Path(optrun.__file__).parent


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_one_module_imports_them() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("hydra._internal") for name in names):
                found.add(path.name)
    assert found == {"hydra_internals.py"}


def test_a_configuration_is_written_as_omegaconf_writes_it() -> None:
    values: dict[str, object] = {
        "lr": 1e-3,
        "text": "1e-3",
        "yes": "on",
        "none": None,
        "nan": float("nan"),
        "empty": {},
        "names": ["a", "\u00e4\n"],
        "nested": {
            "reference": "${oc.env:HOME}",
            "long": "word " * 40,
            "number": "0123",
            "missing": "???",
        },
    }
    assert as_text(values) == OmegaConf.to_yaml(OmegaConf.create(values))


def test_the_version_is_one_that_is_supported() -> None:
    """`pyproject.toml` says hydra-core>=1.3.8,<1.4; another one has to be looked at here first."""
    assert version("hydra-core").startswith("1.3.")


def test_hydra_composes_runs_and_shows() -> None:
    compose = parameters(internals.Hydra.compose_config)
    for name in ("config_name", "overrides", "run_mode", "from_shell", "with_log_configuration"):
        assert name in compose
    assert parameters(internals.Hydra.run)[1:4] == ["config_name", "task_function", "overrides"]
    for name in ("app_help", "hydra_help", "shell_completion", "show_cfg", "show_info"):
        assert callable(getattr(internals.Hydra, name))
    assert parameters(internals.Hydra.show_cfg)[1:] == [
        "config_name",
        "overrides",
        "cfg_type",
        "package",
        "resolve",
    ]


def test_a_loader_of_ones_own_answers_for_the_repository() -> None:
    path = internals.create_config_search_path(str(config_dir()))
    assert isinstance(path, ConfigSearchPath)
    loader = internals.ConfigLoaderImpl(config_search_path=path)
    assert isinstance(loader.repository, internals.ConfigRepository)
    assert "lamb" in loader.get_group_options("optimizer")
    assert "optimizer" in loader.list_groups("")
    source = loader.repository._find_object_source("optimizer/lamb", ObjectType.CONFIG)
    assert source is not None
    assert source.scheme() == "file"
    assert parameters(internals.ConfigLoaderImpl.get_group_options)[1:] == [
        "group_name",
        "results_filter",
        "config_name",
        "overrides",
    ]


def test_the_basic_launcher_is_named_by_the_prefix() -> None:
    cfg = store.compose(store.open_hydra(), "config", [], RunMode.MULTIRUN)
    assert OmegaConf.select(cfg, "hydra.launcher._target_").startswith(internals.CORE_PLUGINS)
    internals.Callbacks(cfg).on_run_start(config=cfg, config_name="config")


def test_the_parser_knows_the_options_that_are_answered_for() -> None:
    options = {
        option
        for action in internals.get_args_parser()._actions
        for option in action.option_strings
    }
    assert {
        "--cfg",
        "--resolve",
        "--package",
        "--info",
        "--run",
        "--multirun",
        "--config-name",
        "--config-dir",
    } <= options
    assert {
        "--help",
        "--hydra-help",
        "--shell-completion",
        "--config-path",
        "--experimental-rerun",
    } <= options
