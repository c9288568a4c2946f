"""Publish an exported folder as a model repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optrun.base.errors import ConfigError, OptrunError
from optrun.data.hub_access import silence

KEY = "push_to_hub"


def expect_hub(name: str) -> None:
    """Make sure that a model can be published under this name, before anything is written.

    Args:
        name: `OWNER/NAME`, or `NAME` below the account that is logged in.

    Raises:
        ConfigError: No such name can be, nobody is logged in, or the hub is not reached.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{KEY}={name}: {_line(error)} Expected NAME or OWNER/NAME.") from error
    why = silence()
    if why is not None:
        raise ConfigError(
            f"{KEY}={name}: {why}, and nothing can be published without the hub. Leave {KEY} out."
        )
    if get_token() is None:
        raise ConfigError(
            f"{KEY}={name}: nobody is logged in to the hub. `hf auth login`, or set HF_TOKEN."
        )


def push(folder: Path, name: str, *, private: bool | None = None) -> str:
    """Upload a folder as one commit; what the repository held before stays in its history.

    Args:
        folder: In `save_pretrained` form.
        name: `OWNER/NAME`, or `NAME` below the account that is logged in; made where it is not
            there.
        private: Whether a new repository is; None: as the account has it.

    Returns:
        Address of the commit.

    Raises:
        ConfigError: It is there already, and open to others than asked for.
        OptrunError: The hub refused it; what it said.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="optrun")
    with _told(name):
        made = api.create_repo(name, private=private, exist_ok=True)
        if private is not None and api.model_info(made.repo_id).private is not private:
            there, said = ("public", "private=true") if private else ("private", "private=false")
            raise ConfigError(
                f"{KEY}={name} {said}: this repository is there already, and {there}. Nothing was"
                " uploaded; the exported folder is whole. Leave private out, or choose another"
                " name."
            )
        done = api.upload_folder(
            repo_id=made.repo_id, folder_path=str(folder), commit_message="Model exported by optrun"
        )
    return str(done.commit_url)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn what the hub's client raises into one message."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except OptrunError:
        raise
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else None
        rights = " Is the token one that may write there?" if code in (401, 403) else ""
        said = error.server_message or _line(error)
        raise OptrunError(
            f"{KEY}={name}: the hub refused it: {said}{rights} The exported folder is whole."
        ) from error
    except Exception as error:  # of whichever HTTP library this huggingface_hub is built on
        if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):
            raise
        raise OptrunError(
            f"{KEY}={name}: the hub was lost on the way: {_line(error)} The exported folder is"
            " whole: the same with another DEST tries again."
        ) from error


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].strip() if lines else type(error).__name__
    return text if text.endswith(".") else f"{text}."
