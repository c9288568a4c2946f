"""Check a local model folder before it is loaded: what it holds, and whether it is complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.reading import expand_home, open_file, read_json

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


def refuse_no_model(path: str) -> None:
    """Refuse a local file, or a folder without a transformers model.

    A path that does not exist passes: it may be a name of the hub.

    Raises:
        ConfigError: A file; a run, a checkpoint or an adapter; no config.json.
    """
    folder = expand_home(path)
    if folder.is_file():
        raise ConfigError(
            f"model.path={path}: this is a file. Give the folder that holds config.json."
        )
    message = _why_not_a_model(folder, path) if folder.is_dir() else None
    if message is not None:
        raise ConfigError(f"model.path={path}: {message}")


def refuse_broken_weights(path: str) -> None:
    """Refuse a local folder with missing or incomplete weights, by the headers of its files.

    A path that is no folder passes: it may be a name of the hub.

    Raises:
        ConfigError: No safetensors; a file that is cut, missing or a pointer of Git LFS.
    """
    folder = expand_home(path)
    if not folder.is_dir():
        return
    problems = [_why_no_weights(folder), *map(_why_broken, weight_files(folder))]
    for problem in problems:
        if problem is not None:
            raise ConfigError(f"model.path={path}: {problem}")


def _why_not_a_model(folder: Path, path: str) -> str | None:
    """Explain why a folder is no transformers model, and what to do; None: it is one."""
    if (folder / "config.json").is_file():
        return None
    if (folder / "manifest.json").is_file() and (folder / "state.json").is_file():
        return (
            f"this is a checkpoint of optrun. Export it with: optrun export {path} DIR, then"
            " take model.path=DIR."
        )
    if (folder / "model" / "adapter_config.json").is_file():
        return (
            f"this is a run with an adapter. Export it with: optrun export {path} DIR merge=true,"
            " then take model.path=DIR."
        )
    if (folder / "model" / "config.json").is_file():
        return (
            f"this folder has no config.json, but its folder model has. Take"
            f" model.path={folder / 'model'}."
        )
    if (folder / "adapter_config.json").is_file():
        return (
            "this is an adapter (peft), not a model. Merge it into its base model, and take that:"
            " optrun export RUN_DIR DIR merge=true if it is of a run of optrun, else"
            " PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(DIR)."
        )
    return "this folder has no config.json, so it holds no transformers model."


def _why_no_weights(folder: Path) -> str | None:
    """Explain why optrun loads no weights of a folder; None: it has some to load.

    Only safetensors are opened, since others may run code.
    """
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return None
    other_files = sorted(
        path.name for pattern in (*_OTHER_WEIGHTS, "*.gguf") for path in folder.glob(pattern)
    )
    if not other_files:
        return "this folder has no weights: no *.safetensors file in it."
    return (
        f"its weights are {other_files[0]}, which is not opened: only safetensors are read. If you"
        " trust their origin, convert them: load with transformers and save_pretrained(DIR)."
    )


def weight_files(folder: Path) -> Iterable[Path]:
    """List the safetensors of a folder, also those of its index, each once.

    The files of the folder come first. Files that an index names may be missing. A malformed index
    is skipped: transformers says what is wrong with it.

    Raises:
        ConfigError: An index cannot be read.
    """
    files = dict.fromkeys(sorted(folder.glob("*.safetensors")))
    for index in folder.glob("*.safetensors.index.json"):
        try:
            indexed = read_json(index, follow=True)["weight_map"].values()
        except UnreadableFileError as error:
            raise ConfigError(str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        files.update(dict.fromkeys(folder / str(name) for name in sorted(set(indexed))))
    return files


def _why_broken(path: Path) -> str | None:
    """Describe the damage of a safetensors file; None if it is intact.

    Only its header and its length are read, not its tensors. A missing file and a pointer of Git
    LFS are damage, too.
    """
    if not path.is_file():
        return f"its index names {path.name}, which is missing. Copy it here, or fetch it again."
    with open_file(path, follow=True) as file:
        if file.read(8) == b"version ":
            return (
                f"{path.name} is a pointer of Git LFS, not the weights themselves. Fetch them: git"
                " lfs pull"
            )
    try:
        with safe_open(path, framework="pt"):
            return None
    except SafetensorError as error:
        return f"{path.name} is not a complete safetensors file: {error}. Fetch or write it again."
