"""Read `config.yaml` of a run as nested mappings and as flat dotted keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optrun.bounded_yaml import unresolved_key, yaml_mapping
from optrun.errors import printable

_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_config(path: Path | str) -> dict[str, Any]:
    """Read a resolved configuration.

    Args:
        path: A YAML file with a mapping at the top.

    Returns:
        Nested plain values; `1e-3`, which YAML 1.1 takes for a word, is a number.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no YAML mapping of resolved values.
    """
    config = yaml_mapping(Path(path))
    key = unresolved_key(config)
    if key is not None:
        raise ValueError(f"{path}: {key} holds `${{`: expected a resolved value")
    return {printable(str(key)): _numbers(value) for key, value in config.items()}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten to dotted keys and their leaves; a list is one leaf, an empty mapping too.

    A choice that goes by a name of its own is told with its kind: the library's `lamb` is not ours.

    Example:
        >>> flatten({"lr": 1.0, "optimizer": {"name": "lamb", "betas": [0.9, 0.999]}})
        {'lr': 1.0, 'optimizer.name': 'lamb', 'optimizer.betas': '[0.9, 0.999]'}
        >>> flatten({"optimizer": {"kind": "pytorch_optimizer", "name": "lamb"}})
        {'optimizer.name': 'lamb (pytorch_optimizer)'}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            if not prefix and {"kind", "name"} <= set(value):
                kind = {"name": f"{value['name']} ({value['kind']})"}
                value = {key: item for key, item in value.items() if key != "kind"} | kind
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
    return flat


def _numbers(value: Any) -> Any:
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value
