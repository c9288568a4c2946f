"""Pool a text's tokens to one vector, as the model's folder or the configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch.nn import functional

from optrun.base.errors import ConfigError
from optrun.base.reading import read_json

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

KEY = "sentence_embedding"
"""Of the transformers configuration: how embeddings are made of states."""
MODES = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
"""Ours, and what sentence-transformers calls them."""
_OLD_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""How sentence-transformers wrote the modes before version 6."""


@dataclass(frozen=True)
class Pooling:
    """How a vector is made of states."""

    mode: str
    """`mean` of all tokens, `cls`, the first one, or `last`."""
    normalize: bool
    """Whether it has length 1."""

    def __call__(self, outputs: ModelOutput, mask: torch.Tensor) -> torch.Tensor:
        """Compute one vector a text, on whichever side it is padded; in float32 at least.

        Args:
            outputs: What the model returned; has `last_hidden_state` of shape (texts, longest,
                width).
            mask: 1 where a token is, shape (texts, longest).

        Returns:
            Shape (texts, width).
        """
        states = outputs.last_hidden_state
        states = states if states.dtype is torch.float64 else states.float()
        if self.mode == "mean":
            weights = mask[..., None].to(states.dtype)
            vectors = (states * weights).sum(1) / weights.sum(1)
        else:
            columns = torch.arange(mask.shape[1], device=mask.device)
            at = (mask * columns).argmax(1) if self.mode == "last" else mask.int().argmax(1)
            vectors = states[torch.arange(len(states), device=states.device), at]
        return functional.normalize(vectors, dim=-1) if self.normalize else vectors

    def remember(self, config: object) -> None:
        """Write it into a transformers configuration, a part of every checkpoint."""
        setattr(config, KEY, asdict(self))

    @classmethod
    def of(cls, config: object) -> Self:
        """Read it from the configuration of a trained model."""
        return cls(**getattr(config, KEY))


@contextmanager
def without_pooling(config: object) -> Iterator[None]:
    """Hide the pooling from a configuration while it is written for others.

    Others read the files of sentence-transformers, which say the same.
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


def folder_pooling(
    path: str, revision: str | None, mode: str | None, normalize: bool | None
) -> tuple[Pooling, str]:
    """Decide how embeddings are made.

    As asked for, else as modules.json of the model says, else normalised means.

    Args:
        path: Hub name or folder of the model; empty: it is made from scratch.
        revision: Of the hub.
        mode: Asked for; None: nothing is.
        normalize: Likewise.

    Returns:
        It, and where it is from, in words.

    Raises:
        ConfigError: The folder says what does not exist here, and nothing else is asked for.
    """
    modules_file = _find_model_file(path, "modules.json", revision)
    is_asked = mode is not None or normalize is not None
    if modules_file is None or (mode is not None and normalize is not None):
        return Pooling(mode or "mean", normalize is not False), (
            "as asked for" if is_asked else "by default"
        )
    modules = [
        module for module in read_json(modules_file, follow=True) if isinstance(module, Mapping)
    ]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    unsupported = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unsupported or "Pooling" not in kinds:
        raise ConfigError(
            f"model.path={path}: its modules.json has {', '.join(kinds) or 'no module'}, and"
            " task=embedding trains Transformer, Pooling and Normalize alone. Give task.pooling"
            " and task.normalize to train it with these."
        )
    inside = str(modules[kinds.index("Pooling")].get("path")).rpartition("/")[2]
    options = _find_model_file(path, f"{inside}/config.json", revision)
    read = {} if options is None else read_json(options, follow=True)
    values = read if isinstance(read, Mapping) else {}
    folder_modes = values.get("pooling_mode") or [
        new for old, new in _OLD_KEYS.items() if values.get(old)
    ]
    folder_modes = [folder_modes] if isinstance(folder_modes, str) else folder_modes
    ours = {theirs: our for our, theirs in MODES.items()}
    if mode is None and (len(folder_modes) != 1 or folder_modes[0] not in ours):
        raise ConfigError(
            f"model.path={path}: its pooling is {' and '.join(folder_modes) or 'not said'}, and"
            f" task=embedding has {', '.join(MODES)}. Give task.pooling to train it with one of"
            " these."
        )
    chosen = Pooling(
        mode or ours[folder_modes[0]], "Normalize" in kinds if normalize is None else normalize
    )
    return (
        chosen,
        (
            "as asked for, and by modules.json of the model"
            if is_asked
            else "by modules.json of the model"
        ),
    )


def _find_model_file(path: str, name: str, revision: str | None) -> Path | None:
    """Find a file of a model; None if it has none."""
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
