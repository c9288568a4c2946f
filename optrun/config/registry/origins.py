"""Record the code of others that a run uses, and require the same code on resume."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.base.reading import read_bytes
from optrun.config import registry

ALLOW = "--allow-changed-plugins"
_allowed: list[bool] = [False]


def allow_changes(allowed: bool) -> None:
    """Allow or forbid runs to continue with changed code, for the whole process."""
    _allowed[0] = allowed


def changes_allowed() -> bool:
    """Tell whether runs may continue with changed code, see `allow_changes`."""
    return _allowed[0]


def records(values: Mapping[str, object]) -> list[PlainDict]:
    """Describe the code of others used by a configuration.

    A registered name counts wherever it stands: in a group, a rule, a list of metrics. So a text
    that happens to be such a name counts, too.

    Args:
        values: A resolved, plain configuration.

    Returns:
        One mapping for each plugin, installed package or module: `plugin`, `distribution` or
        `module` with its name, `sha256` of its file or of all files of a package, and `names`, what
        the configuration uses of it, such as `optimizer=my_lion`.
    """
    used = _texts(values)
    by_origin: dict[str, PlainDict] = {}
    for row in registry.of_others():
        if row.name not in used:
            continue
        origin = str(row.origin)
        if origin not in by_origin:
            by_origin[origin] = {**_source(row), "names": []}
        by_origin[origin]["names"].append(f"{row.kind}={row.name}")
    return list(by_origin.values())


def refuse_code_of_program(values: Mapping[str, object], processes: str) -> None:
    """Refuse registered choices unless other processes can import them again.

    They can import a plugin or an installed package, but no notebook and no module of the program.

    Args:
        values: A resolved, plain configuration.
        processes: Who would import it, for the message, such as `the ranks of a run`.

    Raises:
        ConfigError: The message says how to make a plugin of it.
    """
    for record in records(values):
        if "plugin" not in record and "distribution" not in record:
            raise ConfigError(
                f"{', '.join(record['names'])}: registered in {record['module']}, which"
                f" {processes} do not see. Save it in a file, and give it as a plugin:"
                " plugins=[FILE] in Python, --plugin FILE on the command line."
            )


def unrecorded(config: PlainMapping, recorded: Iterable[PlainMapping]) -> list[str]:
    """List the chosen rows of others without a record of their code in the run.

    Args:
        config: The resolved, plain configuration of the run.
        recorded: The result of `records` in the files of the run.

    Returns:
        Such as `optimizer=my_lion`. Only rows that are registered now are known.
    """
    chosen: list[tuple[str, object]] = []  # kind and name
    callbacks = config.get("callbacks")
    if isinstance(callbacks, Mapping):
        chosen += [("callback", name) for name in callbacks]
    for group, kind in registry.GROUPS.items():
        section = config.get(group)
        # With `kind` it is a choice of ours under a name of the user's.
        if isinstance(section, Mapping) and "kind" not in section:
            chosen.append((kind, section.get("name")))
    recorded_names = {name for record in recorded for name in record["names"]}
    missing = []
    for kind, name in chosen:
        row = registry.choices(kind).get(str(name))
        is_of_others = row is not None and row.origin is not None
        if is_of_others and f"{kind}={name}" not in recorded_names:
            missing.append(f"{kind}={name}")
    return missing


def require(recorded: object, where: str) -> list[str]:
    """Refuse to continue a run or sweep without the plugin code it was made with.

    Args:
        recorded: The result of `records` in the files of a run. Entries of another form are
            ignored.
        where: The run or checkpoint, for messages.

    Returns:
        A note for each plugin that changed, if `--allow-changed-plugins` was given; else empty.

    Raises:
        ConfigError: A name is not registered, or its code changed and that was not allowed.
    """
    notes = []
    for record in recorded if isinstance(recorded, list) else ():
        if not isinstance(record, Mapping) or not isinstance(record.get("names"), list):
            continue
        change = _first_change(record, where)
        if change is None:
            continue
        if not _allowed[0]:
            raise ConfigError(
                f"{where}: {change}. Restore the former code, or give {ALLOW} to continue with"
                " the present one; the run records that."
            )
        notes.append(f"{change}; allowed by {ALLOW}")
    return notes


def _first_change(saved_origin: Mapping[str, Any], where: str) -> str | None:
    """Describe the first change of the code behind the names of an origin; None: no change.

    Raises:
        ConfigError: A name is not registered.
    """
    for name in saved_origin["names"]:
        kind, _, choice = str(name).partition("=")
        row = registry.find(kind, choice) if kind in registry.KINDS else None
        if row is None:
            raise ConfigError(
                f"{where}: {name} was registered by {_describe_origin(saved_origin)};"
                f" {_remedy(saved_origin)}."
            )
        difference = _difference(saved_origin, row)
        if difference is not None:
            return difference
    return None


def _difference(saved_origin: Mapping[str, object], row: registry.Choice) -> str | None:
    """Describe the change of a row's code since it was recorded; None: no change."""
    name = f"{row.kind}={row.name}"
    if row.origin is None:
        before = _describe_origin(saved_origin)
        return f"{name}: was registered by {before}, and is optrun's own now"
    now = _source(row)
    if now["sha256"] == saved_origin.get("sha256"):
        return None
    old_digest = str(saved_origin.get("sha256"))[:12]
    new_digest = str(now["sha256"])[:12]
    return f"{name}: {_describe_origin(now)} changed since: sha256 {old_digest}, now {new_digest}"


def digest_of(path: Path) -> str:
    """Compute the sha256 of a file; for `__init__.py`, of all Python files of the package.

    Names and digests of the files of a package are hashed together, sorted by path.
    """
    if path.name != "__init__.py":
        return hashlib.sha256(read_bytes(path, follow=True)).hexdigest()
    joint_hash = hashlib.sha256()
    for file in sorted(path.parent.rglob("*.py")):
        joint_hash.update(f"{file.relative_to(path.parent)}\0".encode())
        joint_hash.update(hashlib.sha256(read_bytes(file, follow=True)).digest())
    return joint_hash.hexdigest()


def _source(row: registry.Choice) -> PlainDict:
    """Describe the origin of a row's code, with its digest.

    Returns:
        For a plugin `plugin` (as typed), `path` and `sha256`. For an installed package
        `distribution`, `version`, `module`, `path` and `sha256`. For a module that the program
        imported `module`, `path` and `sha256`; without a file the digest is None, and no path.
    """
    plugins = sys.modules.get("optrun.config.registry.plugins")
    if plugins is not None:
        for record in plugins.LOADED.values():
            if record["path"] == row.origin:
                return {key: record[key] for key in ("plugin", "path", "sha256")}
    source: PlainDict = {}
    distribution, _, version = str(row.origin).partition(" ")  # of a module there is no version
    if version:
        source = {"distribution": distribution, "version": version}
    module = str(row.target.__module__)
    source["module"] = module
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not Path(file).is_file():
        return {**source, "sha256": None}
    path = Path(file).resolve()
    return {**source, "path": str(path), "sha256": digest_of(path)}


def _describe_origin(origin: Mapping[str, object]) -> str:
    """Name the plugin, the package with its version, or the module that registers names.

    Args:
        origin: A result of `_source`, from now or from the files of a run.
    """
    if "plugin" in origin:
        return str(origin["plugin"])
    if "distribution" in origin:
        return f"the installed package {origin['distribution']} {origin.get('version')}"
    return f"the module {origin.get('module')}"


def _remedy(origin: Mapping[str, object]) -> str:
    """Say what the user must do so that the names from a saved origin are registered again."""
    if "plugin" in origin:
        return f"give --plugin {origin['plugin']}"
    if "distribution" in origin:
        return "install it"
    return f"import it before, or give --plugin {origin.get('module')}"


def _texts(value: object) -> set[str]:
    """Collect every text in a configuration, also the keys of mappings.

    Example:
        >>> sorted(_texts({"task": {"name": "sft", "metrics": ["mine"], "packing": True}}))
        ['metrics', 'mine', 'name', 'packing', 'sft', 'task']
    """
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        return {str(key) for key in value}.union(*map(_texts, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_texts, value))
    return set()
