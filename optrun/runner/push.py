"""Publish an exported folder as a model repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from optrun.base.errors import ConfigError, OptrunError
from optrun.data.hub_access import why_hub_is_silent

KEY = "push_to_hub"


def expect_hub(name: str) -> None:
    """Refuse a push to the hub that could not work, before anything is written.

    The hub is asked whether it answers. Whether the account may write there is seen at the upload.

    Args:
        name: `OWNER/NAME`, or `NAME` below the account that is logged in.

    Raises:
        ConfigError: The name is invalid, no account is logged in, or the hub cannot be reached.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{KEY}={name}: {error} Expected NAME or OWNER/NAME.") from error
    reason = why_hub_is_silent()
    if reason is not None:
        raise ConfigError(
            f"{KEY}={name}: {reason}, and nothing can be published without the hub. Leave {KEY}"
            " out."
        )
    if get_token() is None:
        raise ConfigError(
            f"{KEY}={name}: nobody is logged in to the hub. Run `hf auth login`, or set HF_TOKEN."
        )


def push(folder: Path, name: str, *, private: bool | None = None) -> str:
    """Upload a folder as one commit; earlier commits of the repository stay.

    Args:
        folder: A model in `save_pretrained` form.
        name: `OWNER/NAME`, or `NAME` below the account that is logged in; created if missing.
        private: Whether the repository is private; None: the default of the account.

    Returns:
        Address of the commit.

    Raises:
        ConfigError: The repository exists, and its visibility is not the one asked for.
        OptrunError: The hub refused the upload, or the connection was lost.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="optrun")
    try:
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        # An existing repository keeps its visibility, which must be the one asked for.
        is_private = None if private is None else api.model_info(repository).private
        if is_private is private:
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=str(folder),
                commit_message="Model exported by optrun",
            )
            return str(commit.commit_url)
    except Exception as error:  # the HTTP library below huggingface_hub has errors of its own
        message = " ".join(str(error).split())
        raise OptrunError(
            f"{KEY}={name}: the upload failed: {message} The exported folder is complete. To try"
            f" again: hf upload {name} {folder}"
        ) from error
    visibility = "private" if is_private else "public"
    raise ConfigError(
        f"{KEY}={name} private={str(private).lower()}: this repository exists already, and is"
        f" {visibility}. Nothing was uploaded; the exported folder is complete. Leave private out,"
        " or choose another name."
    )
