"""Pool the hidden states of a text to one vector, in the modes of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional

from optrun.base.errors import ConfigError
from optrun.base.reading import read_json

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

KEY = "sentence_embedding"
"""Key of the transformers configuration that holds the pooling of a trained model."""
MODES = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
"""Our name of each mode, and that of sentence-transformers."""
_OLD_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Keys by which sentence-transformers before version 6 wrote the modes."""


@dataclass(frozen=True)
class Pooling:
    """Makes one vector of the hidden states of a text's tokens."""

    mode: str
    """`mean` of all tokens, `cls` (the first token) or `last` (the last token)."""
    normalize: bool
    """Whether vectors are scaled to length 1."""

    def __call__(self, outputs: ModelOutput, mask: Tensor) -> Tensor:
        """Compute a vector for each text, padded on either side; at least float32.

        Args:
            outputs: Outputs of the model, with `last_hidden_state` of shape (texts, longest,
                width).
            mask: 1 for tokens, 0 for padding; shape (texts, longest).

        Returns:
            Shape (texts, width).
        """
        states = outputs.last_hidden_state
        if states.dtype is not torch.float64:
            states = states.float()
        if self.mode == "mean":
            weights = mask[..., None].to(states.dtype)
            vectors = (states * weights).sum(1) / weights.sum(1)
        else:
            rows = torch.arange(len(states), device=states.device)
            if self.mode == "last":
                columns = torch.arange(mask.shape[1], device=mask.device)
                position = (mask * columns).argmax(1)
            else:
                position = mask.int().argmax(1)  # the first 1
            vectors = states[rows, position]
        return functional.normalize(vectors, dim=-1) if self.normalize else vectors

    def store_in(self, config: object) -> None:
        """Store the pooling in a transformers configuration, and so in every checkpoint."""
        setattr(config, KEY, asdict(self))

    @classmethod
    def from_config(cls, config: object) -> Self:
        """Read the pooling from the configuration of a trained model."""
        return cls(**getattr(config, KEY))


@contextmanager
def without_pooling(config: object) -> Iterator[None]:
    """Remove the pooling from a configuration inside this context, and restore it afterwards.

    For exports, where other programs read it from the files of sentence-transformers.
    """
    pooling = getattr(config, KEY, None)
    if pooling is None:
        yield
        return
    delattr(config, KEY)
    try:
        yield
    finally:
        setattr(config, KEY, pooling)


def choose_pooling(
    path: str, revision: str | None, mode: str | None, normalize: bool | None
) -> tuple[Pooling, str]:
    """Choose the pooling: as configured, else as the model's modules.json says, else by default.

    The default is the mean, normalised.

    Args:
        path: Hub name or folder of the model; empty: the model is made from scratch.
        revision: Commit of the model on the hub; None: the newest.
        mode: `task.pooling`; None: not configured.
        normalize: `task.normalize`; None: not configured.

    Returns:
        The pooling, and where it comes from, in words.

    Raises:
        ConfigError: modules.json has a module or a mode that optrun lacks, and the configuration
            does not replace it.
    """
    is_configured = mode is not None or normalize is not None

    # 1. The model has no modules.json (None), or the configuration says all.
    modules_file = _find_model_file(path, "modules.json", revision)
    if modules_file is None or (mode is not None and normalize is not None):
        origin = "as asked for" if is_configured else "by default"
        return Pooling(mode or "mean", normalize is not False), origin  # normalised if None

    # 2. Read which modules the model has. A type is such as
    # "sentence_transformers.models.Pooling".
    modules = [
        module for module in read_json(modules_file, follow=True) if isinstance(module, Mapping)
    ]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds or not set(kinds) <= {"Transformer", "Pooling", "Normalize"}:
        raise ConfigError(
            f"model.path={path}: its modules.json has {', '.join(kinds) or 'no module'}, and"
            " task=embedding trains only Transformer, Pooling and Normalize. Give task.pooling"
            " and task.normalize to train it with these."
        )

    # 3. They say what is not configured.
    if mode is None:
        folder = str(modules[kinds.index("Pooling")].get("path")).rpartition("/")[2]
        mode = _folder_mode(path, folder, revision)
    if normalize is None:
        normalize = "Normalize" in kinds
    origin = "by modules.json of the model"
    if is_configured:
        origin = f"as asked for, and {origin}"
    return Pooling(mode, normalize), origin


def _folder_mode(path: str, folder: str, revision: str | None) -> str:
    """Read the pooling mode from the config.json of a model's Pooling module.

    Args:
        path: Hub name or folder of the model.
        folder: Folder of the module in it, such as `1_Pooling`.
        revision: Commit of the model on the hub; None: the newest.

    Raises:
        ConfigError: It has no mode, several, or one that optrun lacks.
    """
    # 1. Read the file.
    file = _find_model_file(path, f"{folder}/config.json", revision)
    options = {} if file is None else read_json(file, follow=True)
    if not isinstance(options, Mapping):
        options = {}

    # 2. List its modes. sentence-transformers writes `pooling_mode`, a name or a list of names;
    # before version 6 one true key for each mode.
    modes = options.get("pooling_mode")
    if not modes:
        modes = [mode for key, mode in _OLD_KEYS.items() if options.get(key)]
    if isinstance(modes, str):
        modes = [modes]

    # 3. There must be one that optrun has.
    ours = {theirs: our for our, theirs in MODES.items()}
    if len(modes) != 1 or modes[0] not in ours:
        raise ConfigError(
            f"model.path={path}: its pooling is {' and '.join(modes) or 'not given'}, and"
            f" task=embedding has {', '.join(MODES)}. Give task.pooling to train it with one of"
            " these."
        )
    return ours[modes[0]]


def _find_model_file(path: str, name: str, revision: str | None) -> Path | None:
    """Find a file of a model in its folder or on the hub.

    None if the file is missing, if there is no path, or if the hub cannot be reached.
    """
    if not path:
        return None
    from transformers.utils import cached_file

    local_path = cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if local_path is None else Path(local_path)
