"""What a run ran on: versions, hardware, source revision, and the identity of its configuration."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import optrun
from optrun.artifacts.trunk import Trunk
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
NOT_IDENTITY = ("run_name", "resume", "lr_from", "matters", "tracking", "checkpoint", "distributed")
"""Groups and keys that may differ between two runs without their results differing."""
NOT_IDENTITY_OF_TRAINING = (
    "logging_steps",
    "max_seconds",
    "dataloader_num_workers",
    "dataloader_timeout",
    "device",
    "nproc_per_node",
    "profile",
    "chunked_loss",
)
"""The same, below `training`."""

_OF_BRANCHES = ("branch_from", "branch_schedule")


def versions() -> dict[str, str]:
    """Return the versions of everything that computes."""
    found = {"optrun": optrun.__version__, "python": platform.python_version()}
    return found | {package: _installed(package) for package in _PACKAGES}


@functools.cache
def code_digest() -> str:
    """Compute a digest of optrun's own files, which a version number may hide changes of."""
    folder, digest = Path(optrun.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _installed(package: str) -> str:
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
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": threads,
        "system": platform.platform(terse=True),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_revision(folder: Path) -> dict[str, object]:
    """Commit of the repository a folder lies in, and whether tracked files were changed.

    Empty outside of one.
    """

    def ask(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *args],
                capture_output=True,
                text=True,
                timeout=5,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}


def config_digest(values: Mapping[str, object]) -> str:
    """Compute the identity of a run: a digest of its resolved configuration.

    Args:
        values: The resolved configuration, plain. Names, logging, saving, tracking and where it
            runs are left out; the learning rate counts once, at the top.

    Returns:
        16 hexadecimal digits.
    """
    text = json.dumps(identity(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity(values: PlainMapping) -> PlainDict:
    """Select what of a resolved configuration can change a result.

    Args:
        values: Plain.
    """
    kept = {
        key: value for key, value in values.items() if key not in (*NOT_IDENTITY, *_OF_BRANCHES)
    }
    if values.get("branch_from") is not None:  # digests of before there were branches hold
        kept |= {key: values.get(key) for key in _OF_BRANCHES}
        trunk = Trunk.parse(str(values["branch_from"]))
        kept["branch_from"] = (
            values["branch_from"] if trunk is None else trunk.digest
        )  # wherever it lies
    if isinstance(kept.get("training"), Mapping):
        training = {k: v for k, v in kept["training"].items() if k not in NOT_IDENTITY_OF_TRAINING}
        if training.get("global_batch_size", "") is None:
            del training["global_batch_size"]  # digests of before there was this key hold
            distributed = values.get("distributed", {})
            if distributed.get("name", "none") != "none":  # each rank adds to the batch
                training["ranks"] = [
                    values["training"].get("nproc_per_node"),
                    distributed.get("nnodes"),
                ]
        if training.get("per_device_train_batch_size", "") is None:
            training["per_device_train_batch_size"] = (
                16  # digests of before it could be left open hold
            )
        kept["training"] = training
    for group, choice in (("adapter", "none"), ("parametrization", "standard")):
        if kept.get(group) == {"name": choice}:
            del kept[group]  # digests of before there was this group hold
    if isinstance(kept.get("model"), Mapping) and kept["model"].get("dtype") == "float32":
        kept["model"] = {
            key: value for key, value in kept["model"].items() if key != "dtype"
        }  # likewise
    aside = {
        "optimizer": {"default_lr"},
        "model": {"default_lr_factor"},
        "adapter": {"default_lr_factor"},
    }
    if (
        isinstance(kept.get("optimizer"), Mapping)
        and kept["optimizer"].get("kind") == "pytorch_optimizer"
    ):
        aside["optimizer"].add(
            "kind"
        )  # its keys tell the library's kind, too: digests of before kinds were saved hold
    for group, names in aside.items():
        if isinstance(kept.get(group), Mapping):
            kept[group] = {key: value for key, value in kept[group].items() if key not in names}
    return kept
