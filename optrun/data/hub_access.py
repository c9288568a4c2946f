"""Find out once and quickly whether the hub answers."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from optrun.base.errors import message_in_one_line
from optrun.base.reading import expand_home

TIMEOUT = 5.0
"""Seconds that the hub has to answer."""


def may_be_name(path: str) -> bool:
    """Tell whether a word could be a hub name, `NAME` or `OWNER/NAME`; else it can only be a path.

    Example:
        >>> words = ("bert-base", "someone/bert", "./bert", "~x/bert", "a/b/c")
        >>> [may_be_name(word) for word in words]
        [True, True, False, False, False]
    """
    expanded = expand_home(path)
    if expanded.is_absolute() or path.startswith((".", "~")):
        return False
    return len(expanded.parts) <= 2


def why_cache_only(name: str) -> str | None:
    """Explain why a name can only be read from the cache of the hub's client.

    None: it can only be a local path, or the hub answers.

    Args:
        name: A hub name, or a local path.
    """
    if expand_home(name).exists() or not may_be_name(name):
        return None
    return why_hub_is_silent()


def describe_missing(offline_reason: str | None) -> str:
    """Explain in a clause that a name was found neither locally nor on the hub.

    Args:
        offline_reason: What `why_cache_only` returned before the search.

    Example:
        >>> describe_missing("HF_HUB_OFFLINE is set")
        'no such local folder; HF_HUB_OFFLINE is set, so only the cache was searched'
    """
    if offline_reason is None:
        return "no such local folder, and the hub did not send it"
    return f"no such local folder; {offline_reason}, so only the cache was searched"


def why_not_fetched(name: str, offline_reason: str | None, error: BaseException) -> str:
    """Explain in a sentence why a name could not be fetched, and what to do.

    Args:
        name: A hub name.
        offline_reason: What `why_cache_only` returned before the search.
        error: What the library raised; its causes are looked at, too.
    """
    # The error and its causes, and the names of all their classes, base classes included: the
    # classes themselves would have to be imported from several libraries.
    errors: list[BaseException] = []
    kinds: set[str] = set()
    cause: BaseException | None = error
    while cause is not None and cause not in errors:
        errors.append(cause)
        kinds.update(kind.__name__ for kind in type(cause).__mro__)
        cause = cause.__cause__ or cause.__context__
    if "GatedRepoError" in kinds:
        return (
            f"the hub restricts access to it. Ask for access at https://huggingface.co/{name}, then"
            " log in with `hf auth login` (or set HF_TOKEN)."
        )
    if offline_reason is not None and kinds & {
        "OSError",
        "ConnectionError",
        "LocalEntryNotFoundError",
    }:
        return f"{describe_missing(offline_reason)}, and it is not there."
    if "RevisionNotFoundError" in kinds:
        return "the hub does not have this revision of it."
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return (
            "no such local folder, and the hub shows you nothing of this name. If it is"
            " private, log in: `hf auth login`."
        )
    root_cause = errors[-1]
    return (
        f"{describe_missing(offline_reason)}: {type(root_cause).__name__}:"
        f" {message_in_one_line(root_cause)}"
    )


def cache_warnings(names: Iterable[str | None]) -> list[str]:
    """Write a warning for each name read from the cache: the hub may have changed it.

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
    """Explain why the hub does not answer; None: it answers. Asked once in a process.

    If it does not answer, its client is set to use only its cache, as HF_HUB_OFFLINE=1 does; it
    would try again for half a minute with every file.
    """
    from huggingface_hub import constants, get_session, is_offline_mode, logging

    # Our message has its warnings already, or the user can do nothing about them.
    logging.set_verbosity_error()
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # of whichever HTTP library this huggingface_hub is built on
        constants.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
    return None
