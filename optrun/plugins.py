"""Code of others that registers choices: `--plugin FILE.py` or `--plugin MODULE`, on the command line only.

A file becomes a module of this package whose name holds its path, so that a process that is given an object of it (a
worker of a sweep, of a data loader) imports the same file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote

from optrun import registry
from optrun.errors import ConfigError, refuse_url

OPTION = "--plugin"

__path__: list[str] = []  # makes modules of this one possible; `_Files` finds them


@dataclass(frozen=True)
class Plugin:
    """What was loaded."""

    given: str
    """As it was written: a file or a module."""
    path: str
    """The file, absolute; of a package its `__init__.py`."""
    sha256: str
    """Of the file; of a package over all of its Python files."""
    names: tuple[str, ...]
    """What it registered, such as `optimizer=my_lion`."""


LOADED: dict[str, Plugin] = {}
"""By module name, in the order of loading."""


def take(argv: Sequence[str]) -> list[str]:
    """Load the plugins that a command line names.

    Args:
        argv: Command-line arguments after `optrun`.

    Returns:
        The other arguments.

    Raises:
        ConfigError: A plugin cannot be loaded, is given twice, or `--plugin` stands alone.
    """
    rest, given = [], []
    arguments = iter(argv)
    for argument in arguments:
        option, joined, value = argument.partition("=")
        if option != OPTION:
            rest.append(argument)
            continue
        value = value if joined else next(arguments, "")
        if not value or value.startswith("-") or "=" in value:
            raise ConfigError(f"{OPTION} {value}".rstrip() + f": expected {OPTION} FILE.py or {OPTION} MODULE.")
        if value in given:
            raise ConfigError(f"{OPTION} {value} is given twice.")
        given.append(value)
    for value in given:
        load(value)
    return rest


def options() -> list[str]:
    """The words of a command line that load again what is loaded."""
    return [word for plugin in LOADED.values() for word in (OPTION, plugin.given)]


def load(given: str) -> Plugin:
    """Load a plugin; one that is loaded and did not change stays.

    Args:
        given: A file by its path, or an importable module by its name.

    Raises:
        ConfigError: There is none, it fails, it registers nothing, or a name that is taken.
    """
    refuse_url(OPTION, given)
    is_file = given.endswith(".py") or "/" in given
    name, path = _file_module(given) if is_file else _module(given)
    digest = digest_of(path)
    known = LOADED.get(name)
    if known is not None and known.sha256 == digest:
        return known
    if known is not None:
        forget(name)
    try:
        with registry.origin(given):
            _import(name, given, path)
            names = tuple(
                f"{kind}={row.name}"
                for kind in registry.KINDS
                for row in registry.choices(kind).values()
                if row.origin == given
            )
            if not names:
                raise ConfigError(
                    f"{OPTION} {given}: it registers nothing. Expected a decorator such as "
                    '@optrun.register_optimizer("my_lion", schema=MyLionConfig).'
                )
    except BaseException:
        sys.modules.pop(name, None)
        raise
    LOADED[name] = Plugin(given, str(path), digest, names)
    return LOADED[name]


def digest_of(path: Path) -> str:
    """sha256 of a plugin's file; of a package over all of its Python files, so that none changes unseen."""
    if path.name != "__init__.py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    whole = hashlib.sha256()
    for file in sorted(path.parent.rglob("*.py")):
        whole.update(f"{file.relative_to(path.parent)}\0".encode())
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _file_module(given: str) -> tuple[str, Path]:
    path = Path(given).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        why = "no such file" if not path.exists() else "expected a Python file, FILE.py"
        raise ConfigError(f"{OPTION} {given}: {why}.")
    return f"{__name__}.{quote(str(path), safe='/').replace('.', '%2E')}", path


def _module(given: str) -> tuple[str, Path]:
    try:
        spec = importlib.util.find_spec(given)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{OPTION} {given}: no such module: {error}.") from error
    if spec is None or spec.origin is None or not spec.has_location:
        hint = f" There is a file of that name: {OPTION} {given}.py." if Path(f"{given}.py").is_file() else ""
        raise ConfigError(f"{OPTION} {given}: no such module, or none with a file.{hint}")
    return given, Path(spec.origin).resolve()


def _import(name: str, given: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError(f"{OPTION} {given}{_line(error, path)}: {error}") from error
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigError(f"{OPTION} {given}{_line(error, path)}: it fails at import: {what}.") from error


def _line(error: BaseException, path: Path) -> str:
    """The last line of a plugin's own file that an error came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    return f", line {lines[-1]}" if lines else ""


def forget(name: str) -> None:
    """Take back what a plugin registered, in a process that goes on: its file changed, or nothing is to be left."""
    registry.remove(LOADED.pop(name).given)
    sys.modules.pop(name, None)


class _Files(MetaPathFinder):
    """Finds the files of plugins by the names that `_file_module` gives them."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        head, _, quoted = fullname.partition(f"{__name__}.")
        if head or not quoted.endswith("%2Epy"):
            return None
        return importlib.util.spec_from_file_location(fullname, unquote(quoted))


sys.meta_path.append(_Files())
