"""A dataset of the hub as a stream: which files each split has at one commit, read where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optrun.base.errors import ConfigError, OptrunError
from optrun.config.schema.data import HubConfig
from optrun.data import hub_access as hub
from optrun.data.cache import digest
from optrun.data.formats import one_format, streamed_format
from optrun.data.hub_file import HubFile
from optrun.data.reader import kept_rows, quiet, reason
from optrun.data.source import Source, Split
from optrun.data.stream import open_stream

_KEY = "data.path"


def commit_of(config: HubConfig) -> str:
    """Find the commit that the configured revision is at now, by its whole sha.

    Raises:
        ConfigError: A local folder; the hub does not answer, or has no such dataset or revision.
    """
    from huggingface_hub import HfApi

    named = f"{_KEY}={config.path}" + (f" data.revision={config.revision}" if config.revision else "")
    if Path(config.path).expanduser().exists():
        raise ConfigError(
            f"{named}: data.streaming=true reads a dataset of the hub, and this lies here. Its files are read as a "
            f'stream by data=files "data.train={config.path}/*.parquet" data.streaming=true.'
        )
    missing = hub.missing(config.path)
    if missing is not None:
        raise ConfigError(
            f"{named}: data.streaming=true reads from the hub while it trains, and {missing}. Take "
            "data.streaming=false, which reads what was fetched before, or files of your own (data=files)."
        )
    try:
        found: str | None = HfApi().dataset_info(config.path, revision=config.revision, timeout=hub.TIMEOUT).sha
    except Exception as error:  # the hub's client, and whichever HTTP library it is built on
        raise ConfigError(f"{named}: {hub.why_not(config.path, missing, error)}") from error
    if not found:
        raise ConfigError(f"{named}: the hub does not say which commit this is.")
    return found


def load_stream(config: HubConfig, pick: Any) -> Source:
    """Load the training split as a stream, and the evaluation split whole; of other splits nothing is fetched.

    Args:
        config: With `streaming`.
        pick: From the names of the splits to that of the training and of the evaluation split.

    Raises:
        ConfigError: An unknown dataset, revision, subset or split; files that cannot be read in the middle; nothing to
            evaluate on.
    """
    commit = commit_of(config)
    files = _files(config, commit)
    train, held = pick(list(files))
    if held is None and config.eval_fraction:
        raise ConfigError(
            f"data.streaming=true: {config.path} has no split to evaluate on (it has {', '.join(files)}), and none is "
            "cut from a stream. Name one with data.eval_split=NAME, or take data.eval_fraction=0."
        )
    notes = [f"{config.path} is read at revision {commit}, also after a resume"]
    rows: Any = open_stream(_KEY, files[train], config.shuffle_window, notes)
    sets = {} if held is None else {"": Split(_whole(held, files[held]), f"split {held}")}
    return Source(Split(rows, f"split {train}"), sets, config, notes=notes)


def _files(config: HubConfig, commit: str) -> dict[str, list[HubFile]]:
    """Find the files of each split, as `datasets` does by their names or by what the dataset's card says."""
    import datasets
    from huggingface_hub import HfApi

    address = f"hf://datasets/{config.path}@{commit}/"
    try:
        with quiet():
            builder = datasets.load_dataset_builder(config.path, name=config.subset, revision=commit)
        splits = {str(split): [str(url) for url in urls] for split, urls in (builder.config.data_files or {}).items()}
        elsewhere = next((url for urls in splits.values() for url in urls if not url.startswith(address)), None)
        if elsewhere is not None:
            raise ConfigError(f"{_KEY}={config.path}: {elsewhere} is not in its repository, so it has no revision.")
        paths = sorted({url.removeprefix(address) for urls in splits.values() for url in urls})
        found: dict[str, HubFile] = {}
        for begin in range(0, len(paths), 500):
            for each in HfApi().get_paths_info(
                config.path, paths[begin : begin + 500], revision=commit, repo_type="dataset"
            ):
                found[each.path] = _described(config.path, commit, each)
        return {split: [found[url.removeprefix(address)] for url in urls] for split, urls in splits.items()}
    except OptrunError:
        raise
    except Exception as error:  # the hub's client, the reader and the network each have errors of their own
        key = f"{_KEY}={config.path}" + (f" data.subset={config.subset}" if config.subset else "")
        raise ConfigError(f"{key}: {hub.why_not(config.path, None, error)}") from error


def _described(repo: str, commit: str, info: Any) -> HubFile:
    sha = f"sha1:{info.blob_id}" if info.lfs is None else f"sha256:{info.lfs.sha256}"
    return HubFile(repo, commit, info.path, info.size, sha)


def _whole(split: str, files: list[HubFile]) -> Any:
    """Fetch the rows of an evaluation split, and keep them like those of files."""
    import datasets

    kind = one_format(_KEY, (streamed_format(_KEY, file) for file in files)).name
    urls = [str(file) for file in files]

    def read(cache_dir: str) -> Any:
        return datasets.load_dataset(kind, data_files={split: urls}, cache_dir=cache_dir, keep_in_memory=False)

    try:
        return kept_rows("hub", digest(kind, split, *(file.content for file in files)), read)[split]
    except OptrunError:
        raise
    except Exception as error:
        raise ConfigError(f"split {split} of {files[0].repo}: cannot be read: {reason(error)}") from error
