"""`datasets.load_dataset`: a hub name, or a local folder.

Of the hub also a stream of files at one commit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.schema.data import HubConfig
from optrun.data import hub_access as hub
from optrun.data.cache import digest, digest_of, folder_for
from optrun.data.formats import one_format, streamed_format
from optrun.data.hub_file import HubFile
from optrun.data.reader import kept_rows, quiet, reason, understood
from optrun.data.source import Source, Split
from optrun.data.stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import Dataset, DatasetDict

USUAL_EVAL_SPLITS = ("validation", "dev", "eval", "test")
_KEY = "data.path"


def load_hub(config: HubConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Load a dataset; no code that comes with it is run.

    Returns:
        Training rows, and evaluation rows where the dataset has such a split or one is named.

    Raises:
        ConfigError: An unknown dataset, subset or split; a split without rows.
    """
    if config.streaming:
        return _load_stream(config)
    loaded = _load(config)
    name = _held(config, list(loaded))
    train = Split(loaded[config.train_split], f"split {config.train_split}")
    held = {} if name is None else {"": Split(loaded[name], f"split {name}")}
    for split in (train, *held.values()):
        if len(split.rows) == 0:
            raise ConfigError(f"data.path={config.path}: {split.key} has no rows.")
    return Source(train, held, config)


def _held(config: HubConfig, splits: list[str]) -> str | None:
    """Pick the evaluation split; None: there is none.

    Raises:
        ConfigError: There is no split of a name that was given.
    """
    for key, name in (("train_split", config.train_split), ("eval_split", config.eval_split)):
        if name is not None and name not in splits:
            raise ConfigError(
                f"data.{key}={name}: no such split in {config.path}. {did_you_mean(name, splits)}"
            )
    usual = (name for name in USUAL_EVAL_SPLITS if name in splits and name != config.train_split)
    return config.eval_split or next(usual, None)


def _named(config: HubConfig) -> str:
    return f"{_KEY}={config.path}" + (f" data.subset={config.subset}" if config.subset else "")


def _load(config: HubConfig) -> Mapping[str, Dataset]:
    import datasets

    local = Path(config.path).expanduser()
    missing = hub.missing(config.path)
    if missing is not None:
        datasets.config.HF_HUB_OFFLINE = (
            True  # it took this over from the hub's client when it was imported
        )
    if local.is_file():
        raise ConfigError(
            f"data.path={config.path}: this is a file. Give its folder, or use data=files"
            f" data.train={config.path}."
        )

    def why(error: Exception) -> str:
        there = local.exists()
        return (
            f"cannot be loaded: {reason(error)}"
            if there
            else hub.why_not(config.path, missing, error)
        )

    found: Mapping[str, Dataset]
    with understood(_named(config), why), quiet():
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            if config.subset is not None:
                raise ConfigError(
                    f"data.subset={config.subset}: a folder written by save_to_disk has no subsets;"
                    " leave it null."
                )
            loaded = datasets.load_from_disk(str(local))
            found = (
                loaded if isinstance(loaded, datasets.DatasetDict) else {config.train_split: loaded}
            )
            return found
        load = partial(datasets.load_dataset, name=config.subset, revision=config.revision)
        if not local.is_dir():
            found = load(config.path)
            return found

        # A folder's files are part of the address: `datasets` alone would trust their times.
        key = digest(
            str(local.resolve()), str(config.subset), str(config.revision), _listing(local)
        )

        def read(cache_dir: str) -> DatasetDict:
            # Rows may name images that were taken out of an archive: these stay.
            extracted = datasets.DownloadConfig(cache_dir=str(folder_for("extracted", key)))
            # resolved: `datasets` makes a name of the folder's, and "." has none
            address = str(local.resolve())
            return load(
                address, cache_dir=cache_dir, download_config=extracted, keep_in_memory=False
            )

        return kept_rows("folders", key, read)


def _listing(folder: Path) -> str:
    """Digest the names, sizes and times of a folder's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_of(
        f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in files
    )


def commit_of(config: HubConfig) -> str:
    """Find the commit that the configured revision is at now, by its whole sha.

    Raises:
        ConfigError: A local folder; the hub does not answer, or has no such dataset or revision.
    """
    from huggingface_hub import HfApi

    named = f"{_KEY}={config.path}" + (
        f" data.revision={config.revision}" if config.revision else ""
    )
    if Path(config.path).expanduser().exists():
        raise ConfigError(
            f"{named}: data.streaming=true reads a dataset of the hub, and this lies here. Its"
            " files are read as a "
            f'stream by data=files "data.train={config.path}/*.parquet" data.streaming=true.'
        )
    missing = hub.missing(config.path)
    if missing is not None:
        raise ConfigError(
            f"{named}: data.streaming=true reads from the hub while it trains, and {missing}. Take"
            " data.streaming=false, which reads what was fetched before, or files of your own"
            " (data=files)."
        )
    with understood(named, partial(hub.why_not, config.path, missing)):
        found = HfApi().dataset_info(config.path, revision=config.revision, timeout=hub.TIMEOUT).sha
    if not found:
        raise ConfigError(f"{named}: the hub does not say which commit this is.")
    return found


def _load_stream(config: HubConfig) -> Source:
    """Load the training split as a stream, and the evaluation split whole.

    Of other splits nothing is fetched.
    """
    commit = commit_of(config)
    files = _files(config, commit)
    train, held = config.train_split, _held(config, list(files))
    if held is None and config.eval_fraction:
        raise ConfigError(
            f"data.streaming=true: {config.path} has no split to evaluate on (it has"
            f" {', '.join(files)}), and none is cut from a stream. Name one with"
            " data.eval_split=NAME, or take data.eval_fraction=0."
        )
    notes = [f"{config.path} is read at revision {commit}, also after a resume"]
    rows: object = open_stream(_KEY, files[train], config.shuffle_window, notes)
    sets = {} if held is None else {"": Split(_whole(held, files[held]), f"split {held}")}
    return Source(Split(rows, f"split {train}"), sets, config, notes=notes)


def _files(config: HubConfig, commit: str) -> dict[str, list[HubFile]]:
    """Find the files of each split, as `datasets` does by their names or the card."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    address = f"hf://datasets/{config.path}@{commit}/"
    with understood(_named(config), partial(hub.why_not, config.path, None)):
        with quiet():
            builder = datasets.load_dataset_builder(
                config.path, name=config.subset, revision=commit
            )
        splits = {
            str(split): [str(url) for url in urls]
            for split, urls in (builder.config.data_files or {}).items()
        }
        elsewhere = next(
            (url for urls in splits.values() for url in urls if not url.startswith(address)), None
        )
        if elsewhere is not None:
            raise ConfigError(
                f"{_KEY}={config.path}: {elsewhere} is not in its repository, so it has no"
                " revision."
            )
        paths = sorted({url.removeprefix(address) for urls in splits.values() for url in urls})
        found: dict[str, HubFile] = {}
        for begin in range(0, len(paths), 500):
            some = paths[begin : begin + 500]
            for each in HfApi().get_paths_info(
                config.path, some, revision=commit, repo_type="dataset"
            ):
                assert isinstance(each, RepoFile)
                sha = f"sha1:{each.blob_id}" if each.lfs is None else f"sha256:{each.lfs.sha256}"
                found[each.path] = HubFile(config.path, commit, each.path, each.size, sha)
        return {
            split: [found[url.removeprefix(address)] for url in urls]
            for split, urls in splits.items()
        }


def _whole(split: str, files: list[HubFile]) -> Dataset:
    """Fetch the rows of an evaluation split, and keep them like those of files."""
    import datasets

    kind = one_format(_KEY, (streamed_format(_KEY, file) for file in files)).name
    urls = {split: [str(file) for file in files]}

    def read(cache_dir: str) -> DatasetDict:
        return datasets.load_dataset(
            kind, data_files=urls, cache_dir=cache_dir, keep_in_memory=False
        )

    with understood(f"split {split} of {files[0].repo}: cannot be read"):
        return kept_rows("hub", digest(kind, split, *(file.content for file in files)), read)[split]
