"""A YAML file of a person's own, given as `-cn FILE.yaml`: values over the default configuration.

It needs no defaults list. `optimizer: lamb` chooses, and so does a `name` among the values of a
group; every other entry is a value. All become overrides before those of the command line.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped,unused-ignore]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base.bounded_yaml import yaml_text
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.plain import PlainDict, flat
from optrun.base.reading import expand_home
from optrun.config.groups import GROUPS
from optrun.config.literal import in_grammar
from optrun.config.paths import VALUES_FILES
from optrun.config.safety import trust_refusal
from optrun.config.tokens import OTHER_LENGTH, key_of
from optrun.config.yaml_files import refuse_numerals, unreadable


def find_values_file(config_name: str) -> Path | None:
    """Return the path after `-cn` if it is a YAML file; None if it names a recipe.

    Raises:
        ConfigError: There is no such file.
    """
    if not config_name.endswith((".yaml", ".yml")):
        return None
    path = expand_home(config_name)
    if path.is_file():
        return path
    files_there = [str(file) for file in path.parent.glob("*.y*ml")]
    hint = did_you_mean(config_name, files_there)
    raise ConfigError(f"-cn {config_name}: no such file (looked from {Path.cwd()}). {hint}".strip())


def read_values_file(path: Path) -> PlainDict:
    """Read a YAML file of values, interpolations as written.

    Raises:
        ConfigError: The file cannot be read, is empty or no mapping; the message names file and
            line.
    """
    try:
        text = yaml_text(path, follow=True)
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text else None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError) as error:
        raise unreadable(path, error) from error
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path}: expected keys and values, such as `lr: 1e-3` on a line.")
    return {str(key): value for key, value in values.items()}


def file_overrides(path: Path, values: Mapping[str, Any], typed: Sequence[str]) -> list[str]:
    """Write the entries of a file as overrides; keys of the command line win.

    A typed length of the run, such as `training.max_steps`, also replaces the other one. The file
    is recorded in `VALUES_FILES`, so that messages name it.

    Args:
        path: The file, for messages.
        values: Its entries.
        typed: The overrides of the command line.

    Raises:
        ConfigError: YAML reads a number where a text is meant, or the file trusts a model's code.
    """
    VALUES_FILES[path.stem] = path
    refuse_numerals(path, path.stem)
    typed_keys = {key_of(token) for token in typed}
    replaced = typed_keys | {OTHER_LENGTH[key] for key in typed_keys & OTHER_LENGTH.keys()}
    overrides = []
    for key, value in _entries(values):
        if key == "model.trust_remote_code" and value:
            raise trust_refusal()
        if key in replaced:
            continue
        is_choice = key in GROUPS or "/" in key
        overrides.append(f"{key}={value if is_choice else in_grammar(value)}")
    return overrides


def _entries(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield overrides as (key, value): the choice of a group, then each of its values.

    The keys of `hydra` are written out to the last level.

    Example:
        >>> list(_entries({"optimizer": {"name": "lamb", "eps": 0.1}, "lr": 0.01}))
        [('optimizer', 'lamb'), ('optimizer.eps', 0.1), ('lr', 0.01)]
    """
    for key, value in values.items():
        if key == "hydra" and isinstance(value, Mapping):
            yield from flat(value, "hydra.").items()
        elif key in GROUPS and isinstance(value, Mapping):
            if "name" in value:
                yield key, value["name"]
            for name, inner in value.items():
                if name != "name":
                    yield from _expand_mapping(f"{key}.{name}", inner)
        else:
            yield from _expand_mapping(key, value)


def _expand_mapping(key: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the items of a value for a mapping field, else the key with its value.

    Example:
        >>> list(_expand_mapping("model.config", {"n_layer": 2, "n_head": 4}))
        [('model.config.n_layer', 2), ('model.config.n_head', 4)]
        >>> list(_expand_mapping("data.eval", {"dev": "dev.csv"}))
        [('data.eval', {'dev': 'dev.csv'})]
    """
    group, _, name = key.partition(".")
    hints = [get_type_hints(schema).get(name) for schema in GROUPS.get(group, {}).values()]
    takes_any_key = any(get_origin(hint) is dict for hint in hints)
    if takes_any_key and isinstance(value, Mapping):
        for item, inner in value.items():
            yield f"{key}.{item}", inner
    else:
        yield key, value
