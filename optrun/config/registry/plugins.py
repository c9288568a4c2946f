"""Plugins: code of the user that registers choices, by `--plugin FILE.py` or `--plugin MODULE`.

A file becomes a submodule of this module whose name holds its path. So a process that unpickles an
object of it, such as a worker of a sweep or of a data loader, imports the same file.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from urllib.parse import quote, unquote

from optrun.base.errors import ConfigError, refuse_url
from optrun.base.plain import PlainDict, PlainMapping
from optrun.base.reading import expand_home
from optrun.config import registry
from optrun.config.registry.origins import ALLOW, allow_changes, digest_of

OPTION = "--plugin"

__path__: list[str] = []  # makes this module a package; `_Files` finds its submodules

LOADED: dict[str, PlainDict] = {}
"""Name of its module -> the record of each loaded plugin, in the order of loading."""


def take(argv: Sequence[str]) -> list[str]:
    """Load the plugins of a command line, and return the other arguments.

    `--plugin X lr=1` and `--plugin=X lr=1` both load X, and return `["lr=1"]`.
    `--allow-changed-plugins` is removed, too, and takes effect.

    Args:
        argv: Command-line arguments after `optrun`.

    Raises:
        ConfigError: A plugin cannot be loaded, is given twice, or `--plugin` has no value.
    """
    others: list[str] = []
    names: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        option, has_value, value = argument.partition("=")
        if argument == ALLOW:
            continue
        if option != OPTION:
            others.append(argument)
            continue
        if not has_value:
            value = next(arguments, "")
        is_override = "=" in value and not value.endswith(".py")
        if not value or value.startswith("-") or is_override:
            raise ConfigError(
                f"{OPTION} {value}".rstrip() + f": expected {OPTION} FILE.py or {OPTION} MODULE."
            )
        if value in names:
            raise ConfigError(f"{OPTION} {value} is given twice.")
        names.append(value)
    allow_changes(ALLOW in argv)
    for name in names:
        load(name)
    return others


def options(records: Iterable[PlainMapping]) -> list[str]:
    """List the arguments to load the recorded plugins again."""
    return [word for record in records if "plugin" in record for word in (OPTION, record["plugin"])]


def load(plugin: str, path: str | None = None) -> PlainDict:
    """Load a plugin, unless it is loaded and unchanged; a changed one is loaded again.

    Args:
        plugin: A file by its path, or an importable module by its name.
        path: The file, if the current folder may differ from that in which `plugin` was typed.

    Returns:
        The record of the plugin: `plugin` as typed, `path`, `sha256`, and `names`, such as
        `["optimizer=my_lion"]`.

    Raises:
        ConfigError: There is no such plugin, it fails, registers nothing, or a name that is taken.
            Nothing of it stays registered then.
    """
    refuse_url(OPTION, plugin)
    is_file = plugin.endswith(".py") or "/" in plugin
    name, file = _file_module(plugin, path or plugin) if is_file else _module(plugin)
    origin = str(file)
    digest = digest_of(file)
    if name in LOADED:
        if LOADED[name]["sha256"] == digest:
            return LOADED[name]
        forget(name)  # drops its module and what it registered
    was_imported = name in sys.modules
    try:
        with registry.origin(origin):
            _import(name, plugin, file)
        registry.adopt(name, origin)  # rows of a module that was imported before
        names = registry.names_of(origin)
        if not names:
            raise ConfigError(
                f"{OPTION} {plugin}: it registers nothing. Expected a decorator such as "
                '@optrun.register_optimizer("my_lion", schema=MyLionConfig).'
            )
    except BaseException:
        if not was_imported:
            sys.modules.pop(name, None)
        raise
    LOADED[name] = {"plugin": plugin, "path": origin, "sha256": digest, "names": names}
    return LOADED[name]


def load_again(
    records: Sequence[PlainMapping], *, changes_allowed: bool, start: str = "sweep"
) -> None:
    """Load the plugins of a sweep in its worker, or of a run in its rank.

    Args:
        records: Records of the plugins, as `load` returns them.
        changes_allowed: As for `origins.allow_changes`, which is about runs that were begun before.
        start: What was started, `sweep` or `run`, for the message.

    Raises:
        ConfigError: A plugin cannot be loaded, or its file changed since the start.
    """
    allow_changes(changes_allowed)
    for record in records:
        digest = load(record["plugin"], record["path"])["sha256"]
        if digest != record["sha256"]:
            raise ConfigError(
                f"{OPTION} {record['plugin']}: changed since the {start} was started: sha256"
                f" {record['sha256'][:12]}, now {digest[:12]}. Start the {start} again."
            )


def _file_module(plugin: str, where: str) -> tuple[str, Path]:
    """Return the module name and the resolved path of a plugin file.

    The name holds the whole path, without dots: `optrun.config.registry.plugins./home/me/mine%2Epy`
    for /home/me/mine.py. `_Files` finds the file by it.

    Args:
        plugin: The path as typed, for messages.
        where: Where the file is.

    Raises:
        ConfigError: There is no such file.
    """
    try:
        path = expand_home(where).resolve()
        path_as_name = quote(str(path), safe="/").replace(".", "%2E")
    except (OSError, RuntimeError, ValueError) as error:
        # A circle of links, which Python 3.11 reports as RuntimeError, or bytes that are no text.
        raise ConfigError(f"{OPTION} {plugin}: cannot be read as a path: {error}") from error
    if not path.exists():
        raise ConfigError(f"{OPTION} {plugin}: no such file.")
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{OPTION} {plugin}: expected a Python file, FILE.py.")
    return f"{__name__}.{path_as_name}", path


def _module(plugin: str) -> tuple[str, Path]:
    """Find an importable module by its name, and return the name and its file.

    Raises:
        ConfigError: There is no such module, it has no file, or its package fails at import.
    """
    try:
        spec = importlib.util.find_spec(plugin)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{OPTION} {plugin}: no such module: {error}.") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by the package around the module
        raise _failure(plugin, error) from error
    if spec is None or spec.origin is None or not spec.has_location:
        hint = ""
        if Path(f"{plugin}.py").is_file():
            hint = f" There is a file of that name: {OPTION} {plugin}.py."
        raise ConfigError(f"{OPTION} {plugin}: no such module, or none with a file.{hint}")
    return plugin, Path(spec.origin).resolve()


def _import(name: str, plugin: str, path: Path) -> None:
    """Import the module of a plugin.

    Args:
        name: Name of the module.
        plugin: As typed, for messages.
        path: Its file.

    Raises:
        ConfigError: It raises anything but KeyboardInterrupt, SystemExit included; the message
            names the last line in the plugin's own file.
    """
    try:
        importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError(f"{OPTION} {plugin}{_line(error, path)}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _failure(f"{plugin}{_line(error, path)}", error) from error


def _failure(where: str, error: BaseException) -> ConfigError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ConfigError(f"{OPTION} {where}: it fails at import: {reason}.")


def _line(error: BaseException, path: Path) -> str:
    """Write the last line of a file in the traceback of an error, such as `, line 12`.

    For a syntax error in the file it is the line of that. Empty if the file is not in it.
    """
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    if lines:
        return f", line {lines[-1]}"
    return ""


def forget(name: str) -> None:
    """Remove the registry rows of a plugin, and its modules from `sys.modules`."""
    registry.remove(LOADED.pop(name)["path"])
    for module in list(sys.modules):
        if module == name or module.startswith(f"{name}."):
            del sys.modules[module]


class _Source(SourceFileLoader):
    """Compiles the present file, never cached bytecode.

    Python matches bytecode by size and whole seconds, which is too coarse after an edit.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Files(MetaPathFinder):
    """Finds the files of plugins by their module names from `_file_module`."""

    def find_spec(self, fullname: str, *_context: object) -> ModuleSpec | None:
        """Return how to import a plugin file; None for the name of any other module.

        The name of /home/me/mine.py is `optrun.config.registry.plugins./home/me/mine%2Epy`: this
        module, a dot, and the path, quoted as in a URL, its dots as `%2E`.

        Args:
            fullname: Name of a module, see `_file_module`.
            *_context: What Python's import system adds; not used.
        """
        # `head` is empty if the name begins so, and the whole name if it lacks this.
        head, _, quoted_path = fullname.partition(f"{__name__}.")
        if head or not quoted_path.endswith("%2Epy"):
            return None
        path = unquote(quoted_path)
        return importlib.util.spec_from_file_location(
            fullname, path, loader=_Source(fullname, path)
        )


sys.meta_path.append(_Files())
