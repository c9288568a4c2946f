"""Pretrained weights that stay in their files, mapped into memory.

Each rank reads the slices that it keeps.

transformers gives a parameter the memory of its file where neither dtype nor layout changes. Such a
model costs a rank nothing until it is used, and `fully_shard` copies a slice of it. Where the files
hold another float than the model is to have, slices are cast after they were cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import nn

from optrun.config.schema.model import PretrainedConfig
from optrun.model.folder import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "_optrun_mapped"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Report = Mapping[str, Iterable[object]]


def new_names(report: Report) -> list[str]:
    """List the parameters missing from the weights, or there in another shape."""
    mismatched = (
        str(entry[0] if isinstance(entry, tuple) else entry)
        for entry in report.get("mismatched_keys", ())
    )
    return [*map(str, report.get("missing_keys", ())), *mismatched]


def load_mapped(
    load: partial[tuple[PreTrainedModel, Report]], config: PretrainedConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, Report] | str:
    """Load a model without reading its weights.

    What they lack is made from torch's generator, as else.

    Args:
        load: `from_pretrained` with all its keywords but the dtype.
        config: Says where the weights are.
        dtype: That the model is to have.

    Returns:
        The model and the report of transformers; `put_in` gives it weights of another dtype. Or the
        reason why the weights have to be read whole.
    """
    stored = _stored_dtype(config)
    if isinstance(stored, str):
        return stored
    generator = torch.get_rng_state()
    model, report = load(dtype=stored)
    new = {*new_names(report)}
    weights = {name: param.data for name, param in model.named_parameters() if name not in new}
    for name, tensor in weights.items():
        if tensor.untyped_storage().resizable():  # torch's own memory, so it is a copy
            torch.set_rng_state(generator)
            return f"{name} is made of other tensors than the files hold"
    if stored is not dtype:
        torch.set_rng_state(generator)
        model = _in_dtype(load, model, weights, new, dtype)
    setattr(model, _MARK, (dtype, weights if stored is not dtype else {}))
    return model, report


def _in_dtype(
    load: partial[tuple[PreTrainedModel, Report]],
    stored: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    new: set[str],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Build a model again in another dtype.

    Buffers, what is new, and for the weights tensors of one element.
    """
    buffers = {
        name: tensor
        for name, tensor in stored.named_buffers()
        if name in stored.state_dict().keys() - new
    }
    state = buffers | {
        name: torch.zeros((), dtype=dtype).expand(tensor.shape) for name, tensor in weights.items()
    }
    model: PreTrainedModel = type(stored).from_pretrained(
        None, state_dict=state, dtype=dtype, **load.keywords
    )[0]
    copied = ("_name_or_path", "_commit_hash", "name_or_path", "generation_config")
    for mine, theirs in ((model, stored), (model.config, stored.config)):
        vars(mine).update({name: value for name, value in vars(theirs).items() if name in copied})
    return model


def _stored_dtype(config: PretrainedConfig) -> torch.dtype | str:
    """Find the one dtype of the floats in the files of a model.

    Or say why there is none to be found.
    """
    from transformers.utils import cached_file

    folder = Path(config.path).expanduser()
    if not folder.is_dir():
        folder = Path(str(cached_file(config.path, "config.json", revision=config.revision))).parent
    kinds = set()
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            kinds |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  # no mapping
    kinds = {kind for kind in kinds if "F" in kind}
    if len(kinds) == 1 and kinds <= _FLOATS.keys():
        return _FLOATS[kinds.pop()]
    return (
        f"they are of several dtypes, {', '.join(sorted(kinds))}"
        if kinds
        else "they are not on this machine yet"
    )


def put_in(model: nn.Module) -> None:
    """Give a model the weights of its files, in their dtype.

    Those of modules that peft has wrapped, too.
    """
    weights: Mapping[str, torch.Tensor] = getattr(model, _MARK, (None, {}))[1]
    for name, param in model.named_parameters():
        for part in ("base_layer.", "original_module.", "modules_to_save.default."):
            name = name.replace(part, "")
        if name in weights:
            param.data = weights[name]


def mapped_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the final dtype of a model with mapped weights.

    None: it has no such weights.
    """
    dtype: torch.dtype | None = getattr(model, _MARK, (None, {}))[0]
    return dtype


def cast_slices(model: nn.Module) -> None:
    """Convert the slices of a sharded model to its dtype, and let its files go."""
    dtype, weights = getattr(model, _MARK, (None, {}))
    if weights:
        model.to(dtype=dtype)
    if dtype is not None:
        delattr(model, _MARK)
