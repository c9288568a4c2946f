"""Whose code a run was made with: recorded in the run, and asked for when it is taken up again."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.base.reading import read_bytes
from optrun.config import registry

_SEEN: dict[Path, str] = {}
"""Files that plugins imported, with the digest of each when it was first seen."""
_OWN = ("optrun", "__main__", "__mp_main__")
"""Optrun, and the program that runs: no plugin imported them from its folder, even if they lie
there."""
ALLOW = "--allow-changed-plugins"
_allowed: list[bool] = [False]


def allow_changes(allowed: bool) -> None:
    """Say whether a run may go on with code that changed since; the command line does."""
    _allowed[0] = allowed


def changes_allowed() -> bool:
    """Tell whether `allow_changes` said so."""
    return _allowed[0]


def records(values: Mapping[str, object]) -> list[PlainDict]:
    """List the code of others that a configuration chooses.

    Args:
        values: Resolved and plain. A registered name counts wherever it stands: in a group, a rule,
            a list of metrics.

    Returns:
        One mapping for each plugin, installed package or module: what to give, `sha256` of its
        file, `imports`, the digests of what it has imported from its folder so far, and `names`,
        the registered ones that are used.
    """
    used = _texts(values)
    found: dict[str, PlainDict] = {}
    for row in registry.of_others():
        if row.name in used:
            origin = str(row.origin)
            found[origin] = found.get(origin) or {**_source(row), "names": []}
            found[origin]["names"].append(f"{row.kind}={row.name}")
    return list(found.values())


def unrecorded(config: PlainMapping, recorded: Iterable[PlainMapping]) -> list[str]:
    """List what a configuration chooses of others' rows without a record of whose they were.

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
    known = {name for record in recorded for name in record["names"]}
    rows = [registry.choices(kind).get(str(name)) for kind, name in chosen]
    others = [
        f"{row.kind}={row.name}" for row in rows if row is not None and row.origin is not None
    ]
    return [name for name in others if name not in known]


def require(recorded: object, where: str) -> list[str]:
    """Refuse to take something up without the code it was made with.

    Args:
        recorded: As `records`, out of a run; what is no such mapping is left to who reads the rest
            of the file.
        where: What is taken up, for messages.

    Returns:
        Notes to show and record, where changes were allowed.

    Raises:
        ConfigError: A name is not registered now, or its code is another.
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
                    f"{where}: {difference}. Restore what it was, or give {ALLOW} to go on with"
                    " what it is; the run records that."
                )
            notes.append(f"{difference}; allowed by {ALLOW}")
            break
    return notes


def _difference(record: Mapping[str, object], row: registry.Choice) -> str | None:
    """Describe what has changed since the code of a row was recorded; None: nothing."""
    name = f"{row.kind}={row.name}"
    if row.origin is None:
        return f"{name}: was registered by {_who(record)}, and is optrun's own now"
    now = _source(row)
    if now["sha256"] == record.get("sha256"):
        changed = changed_import(record.get("imports"), Path(str(now.get("path"))).parent)
        return None if changed is None else f"{name}: {_who(now)} imports {changed}"
    was, new = str(record.get("sha256"))[:12], str(now["sha256"])[:12]
    return f"{name}: {_who(now)} changed since: sha256 {was}, now {new}"


def digest_of(path: Path) -> str:
    """Compute the sha256 of a file.

    Of a package, over all of its Python files, so that none changes unseen.
    """
    if path.name != "__init__.py":
        return hashlib.sha256(read_bytes(path, follow=True)).hexdigest()
    whole = hashlib.sha256()
    for file in sorted(path.parent.rglob("*.py")):
        whole.update(f"{file.relative_to(path.parent)}\0".encode())
        whole.update(hashlib.sha256(read_bytes(file, follow=True)).digest())
    return whole.hexdigest()


def imports_of(file: Path, module: str) -> dict[str, str]:
    """Map the files imported from the folder of a module to their digests.

    The digest is that of the file when it was first seen.

    Args:
        file: Of the module; a package is digested as a whole.
        module: Its name. Of an installed one the modules of the same package count.
    """
    if file.name == "__init__.py":
        return {}
    folder, package = file.parent, f"{module.partition('.')[0]}."
    within = f"{folder}{os.sep}"  # texts, since this looks at thousands of modules at each save
    installed = "site-packages" in folder.parts
    python = Path(sysconfig.get_path("stdlib")).resolve()
    found = {}
    for name, loaded in list(sys.modules.items()):
        real = _resolved(getattr(loaded, "__file__", None))
        if real is None or not real.startswith(within) or name.partition(".")[0] in _OWN:
            continue
        path = Path(real)
        if path == file:
            continue
        inside = path.relative_to(folder)
        others = path.is_relative_to(python) or "site-packages" in inside.parts
        if name.startswith(package) if installed else not others:
            if path not in _SEEN and path.is_file():
                _SEEN[path] = digest_of(path)
            if path in _SEEN:
                found[inside.as_posix()] = _SEEN[path]
    return dict(sorted(found.items()))


@cache
def _resolved(file: object) -> str | None:
    is_source = isinstance(file, str) and file.endswith(".py") and Path(file).is_absolute()
    return (
        str(Path(str(file)).resolve()) if is_source else None
    )  # torch has modules with a name in place of a file


def changed_import(imports: object, folder: Path) -> str | None:
    """Name a file, of those that a record says were imported, that is another one now or gone.

    None: there is none.
    """
    for name, digest in imports.items() if isinstance(imports, Mapping) else ():
        path = folder / str(name)
        if not path.is_file():
            return f"{name} is gone"
        now = digest_of(path)
        if now != digest:
            return f"{name} changed since: sha256 {str(digest)[:12]}, now {now[:12]}"
    return None


def forget_imports(imports: Mapping[str, str], folder: Path) -> None:
    """Import these files anew when they are next asked for."""
    files = {str((folder / name).resolve()) for name in imports}
    for path in files:
        _SEEN.pop(Path(path), None)
    for name, loaded in list(sys.modules.items()):
        if _resolved(getattr(loaded, "__file__", None)) in files:
            del sys.modules[name]


def _source(row: registry.Choice) -> PlainDict:
    """Describe where a row comes from.

    A plugin, a distribution, or a module that the program imported.
    """
    plugins = sys.modules.get("optrun.config.registry.plugins")
    for record in plugins.LOADED.values() if plugins is not None else ():
        if record["path"] == row.origin:
            source = {key: record[key] for key in ("plugin", "path", "sha256")}
            return {
                **source,
                "imports": imports_of(Path(record["path"]), str(row.target.__module__)),
            }
    name, _, version = str(row.origin).partition(" ")
    source = {"distribution": name, "version": version} if version else {"module": name}
    module = str(row.target.__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not Path(file).is_file():
        return {**source, "module": module, "sha256": None}
    path = Path(file).resolve()
    return {
        **source,
        "module": module,
        "path": str(path),
        "sha256": digest_of(path),
        "imports": imports_of(path, module),
    }


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
    return set().union(*map(_texts, value)) if isinstance(value, list | tuple) else set()
