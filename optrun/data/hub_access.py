"""Find out once and quickly whether the hub answers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

TIMEOUT = 5.0
"""Seconds that the hub has to answer."""


def may_be_name(path: str) -> bool:
    """Tell whether a word could be a hub name, `NAME` or `OWNER/NAME`; else it can only be a path.

    Example:
        >>> words = ("bert-base", "someone/bert", "./bert", "/data/bert", "a/b/c")
        >>> [may_be_name(word) for word in words]
        [True, True, False, False, False]
    """
    expanded = Path(path).expanduser()
    return not expanded.is_absolute() and not path.startswith(".") and len(expanded.parts) <= 2


def why_cache_only(name: str) -> str | None:
    """Explain why a name can only come from the cache.

    None if it is on this disk, or the hub can be asked.

    Args:
        name: A hub name, or a local path.
    """
    if Path(name).expanduser().exists() or not may_be_name(name):
        return None
    return why_hub_is_silent()


def describe_missing(missing: str | None) -> str:
    """Explain that a name was found neither here nor there.

    Args:
        missing: As `why_cache_only` gave it, before the search.

    Example:
        >>> describe_missing("HF_HUB_OFFLINE is set")
        'no such local folder; HF_HUB_OFFLINE is set, so it was looked for in the cache alone'
    """
    if missing is None:
        return "no such local folder, and not to be had from the hub"
    return f"no such local folder; {missing}, so it was looked for in the cache alone"


def why_not_fetched(name: str, missing: str | None, error: BaseException) -> str:
    """Explain why a name could not be fetched.

    Args:
        name: A hub name.
        missing: As `why_cache_only` gave it, before the search.
        error: What the library raised.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds: set[str] = set()
    for cause_seen in seen:
        kinds.update(kind.__name__ for kind in type(cause_seen).__mro__)
    if "GatedRepoError" in kinds:
        return (
            f"the hub has it behind a gate. Ask for access at https://huggingface.co/{name}, then"
            " log in with `hf auth login` (or set HF_TOKEN)."
        )
    if missing is not None and kinds & {"OSError", "ConnectionError", "LocalEntryNotFoundError"}:
        return f"{describe_missing(missing)}, and it is not there."
    if "RevisionNotFoundError" in kinds:
        return "the hub has no such revision of it."
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return (
            "no such local folder, and the hub has nothing of this name for you. If it is private:"
            " `hf auth login`."
        )
    message = " ".join(str(seen[-1]).split())
    if len(message) > 300:
        message = f"{message[:300]} ..."
    return f"{describe_missing(missing)}: {type(seen[-1]).__name__}: {message}"


def cache_warnings(names: Iterable[str | None]) -> list[str]:
    """Warn of each name read from the cache: it may have changed since.

    Args:
        names: Hub names and local paths.
    """
    reasons = {name: why_cache_only(name) for name in names if name is not None}
    return [
        f"{name} comes from the cache, as it was when it was fetched: {why}."
        for name, why in reasons.items()
        if why
    ]


@functools.cache
def why_hub_is_silent() -> str | None:
    """Explain why the hub does not answer; None: it answers.

    Left alone its client asks again and again, half a minute for every file. Where it gets no
    answer it is told to look into its cache alone, as HF_HUB_OFFLINE=1 does.
    """
    from huggingface_hub import constants, get_session, is_offline_mode, logging

    # its warnings are in our message already, or nothing the user can act on
    logging.set_verbosity_error()
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # of whichever HTTP library this huggingface_hub is built on
        constants.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
    return None
