"""What a run ran on: versions, hardware, digests of code, and the digest of its configuration."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import optrun
from optrun.artifacts.forks import Trunk
from optrun.base.plain import PlainDict, PlainMapping

_PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "hydra-core",
    "omegaconf",
)
KEYS_WITHOUT_EFFECT = (
    "run_name",
    "resume",
    "lr_from",
    "matters",
    "tracking",
    "checkpoint",
    "distributed",
)
"""Groups and keys that may differ between two runs without their results differing."""
TRAINING_KEYS_WITHOUT_EFFECT = (
    "logging_steps",
    "max_seconds",
    "dataloader_num_workers",
    "dataloader_timeout",
    "device",
    "nproc_per_node",
    "chunked_loss",
)
"""The same, below `training`."""

_OF_BRANCHES = ("branch_from", "branch_schedule")


def versions() -> dict[str, str]:
    """Return the versions of optrun, Python and the computing packages."""
    own_versions = {"optrun": optrun.__version__, "python": platform.python_version()}
    return own_versions | {package: _installed(package) for package in _PACKAGES}


@functools.cache
def code_digest() -> str:
    """Compute a digest of optrun's own Python files, more precise than its version.

    The digest has 12 hexadecimal digits, and is computed once in a process.
    """
    folder = Path(optrun.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _installed(package: str) -> str:
    """Return the installed version of a package, or `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def hardware(device: str, threads: int) -> dict[str, object]:
    """Describe the machine.

    Args:
        device: Name of the device that trains.
        threads: CPU threads that torch uses.
    """
    return {
        "device": device,
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": threads,
        "system": platform.platform(terse=True),
    }


def processor() -> str:
    """Name the processor of this machine.

    It is the "model name" of Linux, such as "AMD EPYC 7763 64-Core Processor"; elsewhere what
    Python knows, perhaps only the architecture.
    """
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def config_digest(values: Mapping[str, object]) -> str:
    """Digest the result-deciding values of a resolved configuration.

    Two runs with the same digest compute the same, up to rounding and the device.

    Args:
        values: The resolved configuration, as plain values; see `result_deciding_values` for what
            counts.

    Returns:
        16 hexadecimal digits.
    """
    text = json.dumps(result_deciding_values(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def result_deciding_values(values: PlainMapping) -> PlainDict:
    """Select the values of a resolved configuration that decide the result of the run.

    Names, logging, saving, tracking and hardware are left out. Some of their keys come back where
    they decide something: the metric of early stopping, for instance, see `conditional_keys`.

    Args:
        values: The resolved configuration, as plain values; not changed.

    Returns:
        Values nested as before. `branch_from` is the digest of the checkpoint, wherever it lies,
        and `training.ranks` is new where the batch grows with the ranks.

    Example:
        >>> result_deciding_values({"lr": 0.1, "run_name": "a", "optimizer": {"default_lr": 1.0}})
        {'lr': 0.1, 'optimizer': {}}
    """
    # 1. Whole groups and keys, except those without effect; `branch_from` counts only if it is set.
    result = {
        key: value
        for key, value in values.items()
        if key not in (*KEYS_WITHOUT_EFFECT, *_OF_BRANCHES)
    }
    if values.get("branch_from") is not None:
        result |= {key: values.get(key) for key in _OF_BRANCHES}
        trunk = Trunk.parse(str(values["branch_from"]))
        if trunk is not None:
            result["branch_from"] = trunk.digest  # and not its path
    if isinstance(values.get("training"), Mapping):
        result["training"] = _result_deciding_training(values)
    # 2. Single keys of groups that step 1 left out: pairs such as ("checkpoint", "metric"), which
    # count if other values make them matter, and the dtypes of `distributed`, which always count.
    training = values.get("training") or {}
    conditional = conditional_keys(
        training.get("early_stopping_patience"),
        training.get("on_nonfinite"),
        values.get("branch_from"),
    )
    for group, key in (*conditional, *DISTRIBUTED_DTYPES):
        chosen = values.get(group)
        if isinstance(chosen, Mapping) and chosen.get(key) is not None:
            result.setdefault(group, {})[key] = chosen[key]
    # 3. Factors of the default lr: they have done their work once `lr` is resolved. Groups are
    # replaced and not changed, since `values` holds the same mappings.
    for group, key in _DERIVED:
        chosen = result.get(group)
        if isinstance(chosen, Mapping):
            result[group] = {name: value for name, value in chosen.items() if name != key}
    return result


DISTRIBUTED_DTYPES = (("distributed", "param_dtype"), ("distributed", "reduce_dtype"))
"""What ranks compute in, and reduce gradients in, decides results; where they run does not."""
_DERIVED = (
    ("optimizer", "default_lr"),
    ("model", "default_lr_factor"),
    ("adapter", "default_lr_factor"),
)
"""They make `lr`, which counts at the top."""


def _result_deciding_training(values: PlainMapping) -> PlainDict:
    """Select the result-deciding keys of `training`; add `ranks` if the batch depends on them.

    Args:
        values: The whole configuration, with `training` and perhaps `distributed`.

    Returns:
        Keys of `training`, without those in `TRAINING_KEYS_WITHOUT_EFFECT`.
    """
    training = values["training"]
    result = {
        key: value for key, value in training.items() if key not in TRAINING_KEYS_WITHOUT_EFFECT
    }
    distributed = values.get("distributed") or {}
    has_ranks = distributed.get("name", "none") != "none"
    if has_ranks and training.get("global_batch_size") is None:  # each rank adds to the batch
        result["ranks"] = training.get("nproc_per_node")
    return result


def conditional_keys(
    early_stopping_patience: object, on_nonfinite: object, branch_from: object
) -> Iterator[tuple[str, str]]:
    """Yield group and name of keys that change the result only with these values.

    Args:
        early_stopping_patience: `training.early_stopping_patience`.
        on_nonfinite: `training.on_nonfinite`.
        branch_from: `branch_from`.

    Example:
        >>> list(conditional_keys(3, "skip", None))
        [('checkpoint', 'metric'), ('checkpoint', 'mode')]
    """
    if early_stopping_patience is not None:  # the metric decides when training ends
        yield "checkpoint", "metric"
        yield "checkpoint", "mode"
    if on_nonfinite == "rollback":  # training goes back to the last scheduled save
        yield "checkpoint", "save_steps"
        yield "checkpoint", "allow_nonfinite"
    if branch_from is not None:
        yield "checkpoint", "on_other_optimizer"
