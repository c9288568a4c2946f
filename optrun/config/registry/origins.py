"""Foreign code of a run: recorded at its start, and required on resume."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.base.reading import read_bytes
from optrun.config import registry

ALLOW = "--allow-changed-plugins"
_allowed: list[bool] = [False]


def allow_changes(allowed: bool) -> None:
    """Allow or forbid runs to go on with changed code."""
    _allowed[0] = allowed


def changes_allowed() -> bool:
    """Tell whether `allow_changes` said so."""
    return _allowed[0]


def records(values: Mapping[str, object]) -> list[PlainDict]:
    """List the foreign code chosen by a configuration.

    Args:
        values: Resolved and plain. A registered name counts wherever it stands: in a group, a rule,
            a list of metrics.

    Returns:
        One mapping for each plugin, installed package or module: what to give, `sha256` of its
        file, or of all files of a package, and `names`, the registered ones that are used.
    """
    used = _texts(values)
    by_origin: dict[str, PlainDict] = {}
    for row in registry.of_others():
        if row.name in used:
            origin = str(row.origin)
            by_origin[origin] = by_origin.get(origin) or {**_source(row), "names": []}
            by_origin[origin]["names"].append(f"{row.kind}={row.name}")
    return list(by_origin.values())


def refuse_code_of_program(values: Mapping[str, object], processes: str) -> None:
    """Refuse registered choices that other processes cannot import again.

    Only a plugin or an installed package can be; a notebook or a module of the program cannot.

    Args:
        values: Resolved and plain configuration.
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
    """List the chosen foreign rows without a record of their origin.

    Args:
        config: Of a run, resolved and plain.
        recorded: As `records`, out of the same run.

    Returns:
        Such as `optimizer=my_lion`; the rows that are registered now are what can be known.
    """
    callbacks = config.get("callbacks")
    chosen = [("callback", name) for name in callbacks] if isinstance(callbacks, Mapping) else []
    for group, kind in registry.GROUPS.items():
        section = config.get(group)
        if (
            isinstance(section, Mapping) and "kind" not in section
        ):  # else a name of the user's for a choice of ours
            chosen.append((kind, section.get("name")))
    recorded_names = {name for record in recorded for name in record["names"]}
    rows = [registry.choices(kind).get(str(name)) for kind, name in chosen]
    foreign = [
        f"{row.kind}={row.name}" for row in rows if row is not None and row.origin is not None
    ]
    return [name for name in foreign if name not in recorded_names]


def require(recorded: object, where: str) -> list[str]:
    """Refuse to continue a run or sweep without the plugin code it was made with.

    Args:
        recorded: The result of `records` in the files of a run. Anything else in its place is
            ignored.
        where: The run or checkpoint, for messages.

    Returns:
        A note for each plugin that changed, if `--allow-changed-plugins` was given.

    Raises:
        ConfigError: A name is not registered, or its code changed and that was not allowed.
    """
    notes = []
    for record in recorded if isinstance(recorded, list) else ():
        if not isinstance(record, Mapping) or not isinstance(record.get("names"), list):
            continue
        for name in record["names"]:
            kind, _, choice = str(name).partition("=")
            row = registry.find(kind, choice) if kind in registry.KINDS else None
            if row is None:
                raise ConfigError(
                    f"{where}: {name} was registered by {_who(record)}; {_remedy(record)}."
                )
            difference = _difference(record, row)
            if difference is None:
                continue
            if not _allowed[0]:
                raise ConfigError(
                    f"{where}: {difference}. Restore what it was, or give {ALLOW} to continue with"
                    " what it is; the run records that."
                )
            notes.append(f"{difference}; allowed by {ALLOW}")
            break
    return notes


def _difference(record: Mapping[str, object], row: registry.Choice) -> str | None:
    """Describe the change of a row's code since it was recorded; None: no change."""
    name = f"{row.kind}={row.name}"
    if row.origin is None:
        return f"{name}: was registered by {_who(record)}, and is optrun's own now"
    now = _source(row)
    if now["sha256"] == record.get("sha256"):
        return None
    was = str(record.get("sha256"))[:12]
    new = str(now["sha256"])[:12]
    return f"{name}: {_who(now)} changed since: sha256 {was}, now {new}"


def digest_of(path: Path) -> str:
    """Compute the sha256 of a file.

    Of a package, over all of its Python files, so that none changes unseen.
    """
    if path.name != "__init__.py":
        return hashlib.sha256(read_bytes(path, follow=True)).hexdigest()
    joint_hash = hashlib.sha256()
    for file in sorted(path.parent.rglob("*.py")):
        joint_hash.update(f"{file.relative_to(path.parent)}\0".encode())
        joint_hash.update(hashlib.sha256(read_bytes(file, follow=True)).digest())
    return joint_hash.hexdigest()


def _source(row: registry.Choice) -> PlainDict:
    """Describe the origin of a row.

    A plugin, a distribution, or a module that the program imported.
    """
    plugins = sys.modules.get("optrun.config.registry.plugins")
    for record in plugins.LOADED.values() if plugins is not None else ():
        if record["path"] == row.origin:
            return {key: record[key] for key in ("plugin", "path", "sha256")}
    name, _, version = str(row.origin).partition(" ")
    source = {"distribution": name, "version": version} if version else {"module": name}
    module = str(row.target.__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not Path(file).is_file():
        return {**source, "module": module, "sha256": None}
    path = Path(file).resolve()
    return {**source, "module": module, "path": str(path), "sha256": digest_of(path)}


def _who(record: Mapping[str, object]) -> str:
    if "plugin" in record:
        return str(record["plugin"])
    if "distribution" in record:
        return f"the installed package {record['distribution']} {record.get('version')}"
    return f"the module {record.get('module')}"


def _remedy(record: Mapping[str, object]) -> str:
    if "plugin" in record:
        return f"give --plugin {record['plugin']}"
    if "distribution" in record:
        return "install it"
    return f"import it before, or give --plugin {record.get('module')}"


def _texts(value: object) -> set[str]:
    """Collect every text in a configuration, also the keys of mappings."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        return {str(key) for key in value}.union(*map(_texts, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_texts, value))
    return set()
