"""Datasets of the hub or of local folders, and streams of files of the hub."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.reading import expand_home
from optrun.config.schema.data import HubConfig
from optrun.data import hub_access as hub
from optrun.data.content import name_inside
from optrun.data.files import read_split
from optrun.data.folders import is_saved
from optrun.data.formats import by_ending, one_format, streamed_format
from optrun.data.hub_file import HubFile
from optrun.data.reading import ReadOptions, innermost_error, silence_datasets, user_data_errors
from optrun.data.source import Source, Split
from optrun.data.stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import Dataset, DatasetBuilder

USUAL_EVAL_SPLITS = ("validation", "dev", "eval", "test")
_KEY = "data.path"


def load_hub(config: HubConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Load a dataset of the hub or a local folder; code of the dataset is not run.

    Args:
        config: The data choice.
        documents: Makes no difference.

    Returns:
        Training rows, and evaluation rows if the dataset has such a split.

    Raises:
        ConfigError: A dataset, subset or split is unknown, or a split has no rows.
    """
    if config.streaming:
        return _load_stream(config)
    notes: list[str] = []
    splits = _read_splits(config, notes)
    held_out = _pick_eval_split(config, list(splits))
    train = splits[config.train_split]
    eval_sets = {} if held_out is None else {"": splits[held_out]}
    source = Source(train, eval_sets, config, notes=notes)
    for split in source.splits:
        if len(split.rows) == 0:
            raise ConfigError(f"data.path={config.path}: {split.key} has no rows.")
    return source


def _pick_eval_split(config: HubConfig, splits: list[str]) -> str | None:
    """Pick the evaluation split: `data.eval_split`, else the first one with a usual name.

    None: there is none. `data.train_split` is not picked.

    Raises:
        ConfigError: `data.train_split` or `data.eval_split` is no split of the dataset.
    """
    for key, name in (("train_split", config.train_split), ("eval_split", config.eval_split)):
        if name is not None and name not in splits:
            raise ConfigError(
                f"data.{key}={name}: {config.path} has no split {name}."
                f" {did_you_mean(name, splits)}"
            )
    usual = (name for name in USUAL_EVAL_SPLITS if name in splits and name != config.train_split)
    return config.eval_split or next(usual, None)


def _key_and_value(config: HubConfig) -> str:
    return f"{_KEY}={config.path}" + (f" data.subset={config.subset}" if config.subset else "")


def _read_splits(config: HubConfig, notes: list[str]) -> Mapping[str, Split]:
    """Read every split of a dataset whole, from the hub or a local folder.

    1. `datasets` reads a folder of `save_to_disk`.
    2. optrun's own readers read csv and JSON files, unless something declares their types.
    3. `datasets` reads all other files.

    If the hub does not answer, `datasets` is set to its offline mode for the rest of the process,
    and only the cache is searched.

    Args:
        config: Path, subset and revision.
        notes: Gets the notes of our readers, such as encodings.

    Returns:
        Each split by its name.

    Raises:
        ConfigError: The path is a file, or the dataset cannot be fetched or read.
    """
    import datasets

    folder = expand_home(config.path)
    offline_reason = hub.why_cache_only(config.path)
    if offline_reason is not None:
        # datasets copied this setting from the hub's client when it was imported
        datasets.config.HF_HUB_OFFLINE = True
    if folder.is_file():
        raise ConfigError(
            f"data.path={config.path}: this is a file. Give its folder, or use data=files"
            f" data.train={config.path}."
        )

    def describe(error: Exception) -> str:
        if folder.exists():
            return f"cannot be loaded: {innermost_error(error)}"
        return hub.why_not_fetched(config.path, offline_reason, error)

    with user_data_errors(_key_and_value(config), describe), silence_datasets():
        # 1. A folder of `save_to_disk`.
        if is_saved(folder):
            return _key_by_split(_load_saved(config, folder))
        # 2. The csv or JSON files of each split, on this disk; None: `datasets` must read them.
        path = config.path
        if folder.is_dir():
            path = str(folder.resolve())  # `datasets` names the dataset after it; "." is no name
            files = _list_text_files(_builder(config, folder))
        elif offline_reason is not None:
            files = _find_cached_text_files(config)
        else:
            files = _fetch_text_files(config)
        # 3. All other files.
        if files is None:
            rows = datasets.load_dataset(path, name=config.subset, revision=config.revision)
            return _key_by_split(rows)
    # The readers of 2. raise errors for the user themselves.
    return {
        split: replace(read_split(_KEY, paths, ReadOptions(), notes), key=f"split {split}")
        for split, paths in files.items()
    }


def _key_by_split(splits: Mapping[str, Dataset]) -> dict[str, Split]:
    """Make a `Split` of the rows of each split; messages call it `split NAME`."""
    return {name: Split(rows, f"split {name}") for name, rows in splits.items()}


def _load_saved(config: HubConfig, folder: Path) -> Mapping[str, Dataset]:
    """Load a folder of `save_to_disk`; a single table is the split `data.train_split`.

    Raises:
        ConfigError: `data.subset` is set.
    """
    import datasets

    if config.subset is not None:
        raise ConfigError(
            f"data.subset={config.subset}: a folder written by save_to_disk has no subsets; leave"
            " it null."
        )
    loaded: Any = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.DatasetDict):
        return {config.train_split: loaded}
    splits: Mapping[str, Dataset] = loaded
    return splits


def _builder(config: HubConfig, path: Path | str, revision: str | None = None) -> DatasetBuilder:
    """Make the `datasets` builder of a local folder or a hub name; it lists each split's files."""
    import datasets

    name = str(path.resolve()) if isinstance(path, Path) else path
    return datasets.load_dataset_builder(name, name=config.subset, revision=revision)


def _list_text_files(builder: DatasetBuilder) -> dict[str, list[Path]] | None:
    """List the csv or JSON files of each split, if nothing declares the types of their columns.

    `datasets` would turn some of these texts into numbers, dates and truth values; our readers do
    not.

    Args:
        builder: As `_builder` returns it.

    Returns:
        Name of the split to paths; those of a hub dataset are addresses, `hf:/datasets/...`. None:
        `datasets` must read the files, since they are of other formats, or the card of the dataset
        declares types or sets an option of a reader.
    """
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json

    options: Any = builder.config
    # 1. Other formats, or types that the card declares.
    if not isinstance(builder, Csv | Json) or builder.info.features is not None:
        return None
    # 2. Options of a reader: the key of the rows inside of a JSON file, the columns of a csv file.
    if getattr(options, "field", None) or getattr(options, "names", None):
        return None
    # 3. Endings that our readers do not know.
    files: dict[str, list[Path]] = {}
    for split, paths in (options.data_files or {}).items():
        files[str(split)] = [Path(path) for path in paths]
    every_path = chain.from_iterable(files.values())
    endings = {Path(name_inside(path)).suffix.lower() for path in every_path}
    if not endings or not endings <= by_ending().keys():
        return None
    return files


def _find_cached_text_files(config: HubConfig) -> dict[str, list[Path]] | None:
    """List the csv or JSON files of a hub dataset in the cache of the hub's client.

    As `_list_text_files`; None also if the dataset is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            config.path, repo_type="dataset", revision=config.revision, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    return _list_text_files(_builder(config, Path(folder)))


def _fetch_text_files(config: HubConfig) -> dict[str, list[Path]] | None:
    """Fetch the csv or JSON files of a hub dataset into the cache of the hub's client.

    As `_list_text_files`; None also if a file is in another repository. Nothing is fetched then.
    """
    from huggingface_hub import snapshot_download

    # 1. Ask the hub for the addresses, such as hf:/datasets/OWNER/NAME@COMMIT/data/train.csv: a
    #    Path writes hf:// with one slash.
    files_on_hub = _list_text_files(_builder(config, config.path, config.revision))
    if files_on_hub is None:
        return None
    prefix = f"hf:/datasets/{config.path}@"
    addresses = list(map(str, chain.from_iterable(files_on_hub.values())))
    if not all(address.startswith(prefix) for address in addresses):
        return None  # a file of another repository
    # 2. Fetch COMMIT, but only data/train.csv and the like, and the card, by which `datasets` finds
    #    the splits in the fetched folder.
    commit = addresses[0].removeprefix(prefix).partition("/")[0]
    paths_in_repo = [address.removeprefix(f"{prefix}{commit}/") for address in addresses]
    folder = snapshot_download(
        config.path,
        repo_type="dataset",
        revision=commit,
        allow_patterns=["README.md", *paths_in_repo],
    )
    return _list_text_files(_builder(config, Path(folder)))


def commit_of(config: HubConfig) -> str:
    """Ask the hub for the sha of the commit of `data.revision`, by default of its main branch.

    Raises:
        ConfigError: The path is a local folder, the hub does not answer, or it does not have the
            dataset or the revision.
    """
    from huggingface_hub import HfApi

    address_key = f"{_KEY}={config.path}"
    if config.revision:
        address_key += f" data.revision={config.revision}"
    if expand_home(config.path).exists():
        raise ConfigError(
            f"{address_key}: data.streaming=true reads a dataset of the hub, and this is a local"
            " folder. Its files are read as a stream by"
            f' data=files "data.train={config.path}/*.parquet" data.streaming=true.'
        )
    offline_reason = hub.why_cache_only(config.path)
    if offline_reason is not None:
        raise ConfigError(
            f"{address_key}: data.streaming=true reads from the hub while it trains, and"
            f" {offline_reason}. Take data.streaming=false, which reads what was fetched before, or"
            " files of your own (data=files)."
        )
    with user_data_errors(address_key, partial(hub.why_not_fetched, config.path, None)):
        info = HfApi().dataset_info(config.path, revision=config.revision, timeout=hub.TIMEOUT)
        commit = info.sha
    if not commit:
        raise ConfigError(f"{address_key}: the hub does not say which commit this is.")
    return commit


def _load_stream(config: HubConfig) -> Source:
    """Open the training split as a stream, and read the evaluation split whole.

    Raises:
        ConfigError: There is no evaluation split, and `data.eval_fraction` is not 0.
    """
    commit = commit_of(config)
    files = _find_split_files(config, commit)
    train = config.train_split
    eval_split = _pick_eval_split(config, list(files))
    if eval_split is None and config.eval_fraction:
        raise ConfigError(
            f"data.streaming=true: {config.path} has no split to evaluate on (it has"
            f" {', '.join(files)}), and none is cut from a stream. Name one with"
            " data.eval_split=NAME, or take data.eval_fraction=0."
        )
    notes = [f"{config.path} is read at revision {commit}, also after a resume"]
    rows: object = open_stream(_KEY, files[train], config.shuffle_window, notes)
    sets = {} if eval_split is None else {"": _read_eval_split(eval_split, files[eval_split])}
    return Source(Split(rows, f"split {train}"), sets, config, notes=notes)


def _find_split_files(config: HubConfig, commit: str) -> dict[str, list[HubFile]]:
    """List the files of each split at a commit, as `datasets` finds them by names or the card.

    Args:
        config: Path and subset.
        commit: Its whole sha.

    Returns:
        Name of the split to its files, with the sizes and digests that the hub lists.

    Raises:
        ConfigError: The hub does not answer, or a file is in another repository.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    address = f"hf://datasets/{config.path}@{commit}/"
    files: dict[str, list[HubFile]] = {}
    with user_data_errors(_key_and_value(config), partial(hub.why_not_fetched, config.path, None)):
        # 1. The addresses of the files of each split, and all files of the repository.
        with silence_datasets():
            builder = _builder(config, config.path, commit)
        tree = HfApi().list_repo_tree(
            config.path, recursive=True, revision=commit, repo_type="dataset"
        )
        entry_of_path = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
        # 2. Size and digest of each of these files.
        for split, urls in (builder.config.data_files or {}).items():
            for url in map(str, urls):
                entry = entry_of_path.get(url.removeprefix(address))
                if entry is None:
                    raise ConfigError(
                        f"{_KEY}={config.path}: {url} is not in its repository, so it has no"
                        " revision."
                    )
                sha = f"sha1:{entry.blob_id}"
                if entry.lfs is not None:  # the blob is a pointer to a file in large storage
                    sha = f"sha256:{entry.lfs.sha256}"
                file = HubFile(config.path, commit, entry.path, entry.size, sha)
                files.setdefault(str(split), []).append(file)
    return files


def _read_eval_split(split: str, files: list[HubFile]) -> Split:
    """Fetch the files of an evaluation split, at least one, and read them like local files.

    Raises:
        ConfigError: They cannot be fetched or read, or are not of one format that a stream takes.
    """
    from huggingface_hub import hf_hub_download

    key = f"split {split}"
    one_format(_KEY, (streamed_format(_KEY, file) for file in files))
    with user_data_errors(f"{key} of {files[0].repo}: cannot be read"), silence_datasets():
        paths = [
            Path(hf_hub_download(file.repo, file.path, repo_type="dataset", revision=file.revision))
            for file in files
        ]
        return replace(read_split(_KEY, paths, ReadOptions(), []), key=key)
