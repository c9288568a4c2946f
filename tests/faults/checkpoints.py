"""Checkpoints without training, for tests of what happens on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optrun.artifacts.checkpoint import Snapshot, make_checkpoints_dir, save_checkpoint
from optrun.artifacts.manifest import checksum_of
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def snapshot(step: int, numbers: int = 35) -> Snapshot:
    """A state that is another one at every step, with tensors of several kinds."""
    generator = torch.Generator().manual_seed(step)
    weight, moment = torch.randn(2, numbers // 5, 5, generator=generator)
    bias = torch.randn(3, generator=generator).bfloat16()
    return Snapshot(
        global_step=step,
        model={
            "weight": weight,
            "bias": bias,
            "none": torch.empty(0, 4),
            "mask": torch.tensor([True, False]),
        },
        optimizer={"weight/exp_avg": moment, "weight/step": torch.tensor(float(step))},
        metadata=CheckpointMetadata(
            global_step=step,
            train={"tokens": 10 * step},
            config_digest="0" * 16,
            trainable=["weight"],
        ),
        finite=["weight", "bias"],
    )


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as one would who knows how it is sealed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256")
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": checksum_of(manifest)}))


def make_run(folder: Path, steps: tuple[int, ...] = ()) -> RunDir:
    """A run directory with checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDir(folder)
    make_checkpoints_dir(run)
    for step in steps:
        save_checkpoint(run, snapshot(step))
    return run
