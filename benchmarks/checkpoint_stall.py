"""How long training stands still for a save, and how fast the save itself is.

    python benchmarks/checkpoint_stall.py [--mib 256] [--repeats 7] [--folder DIR] [--device cpu] [--checksum xxh3]

Three figures, medians over the repeats, on a state of the size asked for (weights and two moments, in tensors of a few
MiB as transformers have them):

stall       what `CheckpointManager.save` takes from the training thread
pure copy   `copy_` of the same tensors into memory that is there already: the least a save beside training can cost
save        the thread beside training: safetensors with two checksums for every byte, manifest, fsync, rename
plain       one file with the same bytes: `write` in pieces of 4 MiB, `fsync`
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from optrun.artifacts.checkpoint import Snapshot, make_checkpoints_dir
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.run_manifest import RunManifest
from optrun.artifacts.tensor_file import tensor_bytes
from optrun.config.schema.checkpoint import CheckpointConfig, Checksum, OnOtherOptimizer, OnStorageError
from optrun.runner.snapshot import Copier
from optrun.training.checkpointing import CheckpointManager
from optrun.training.ranking import Ranking
from optrun.training.state import RandomStates, TrainState

SIDE = 1024  # a 4 MiB matrix


def measured(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def plain_write(place: Path, tensors: dict[str, torch.Tensor]) -> None:
    with place.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            content = tensor_bytes(tensor)
            for begin in range(0, content.nbytes, 4 * 2**20):
                file.write(content[begin : begin + 4 * 2**20])
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checksum", choices=[kind.value for kind in Checksum], default="xxh3")
    given = parser.parse_args()
    device = torch.device(given.device)
    count = max(1, given.mib // 12)
    weights = {f"layer.{i}.weight": torch.randn(SIDE, SIDE, device=device) for i in range(count)}
    moments = {f"{n}/{k}": torch.randn_like(w) for n, w in weights.items() for k in ("exp_avg", "exp_avg_sq")}
    everything = {**weights, **moments}
    size = sum(tensor.numel() * tensor.element_size() for tensor in everything.values())
    folder = Path(tempfile.mkdtemp(prefix="optrun-stall-", dir=given.folder))
    run = RunDir(folder / "run")
    run.path.mkdir()
    make_checkpoints_dir(run)
    state = TrainState()
    copy_weights, copy_moments = Copier(), Copier()

    def snapshot(_: RandomStates | None) -> Snapshot:
        step = state.global_step
        return Snapshot(
            step,
            copy_weights(weights),
            copy_moments(moments),
            CheckpointMetadata(global_step=step, train=state.to_dict()),
            finite=list(weights),
        )

    config = CheckpointConfig(
        name="default",
        enabled=True,
        save_steps=1,
        keep_last=1,
        keep_best=0,
        metric=None,
        mode=None,
        on_storage_error=OnStorageError.stop,
        on_other_optimizer=OnOtherOptimizer.refuse,
        checksum=Checksum(given.checksum),
        allow_nonfinite=False,
    )
    setup: Any = SimpleNamespace(
        ranking=Ranking("eval/loss", "min"),
        state=state,
        train_step=SimpleNamespace(device=device),
        config=SimpleNamespace(on_nonfinite=None),
    )
    saving = CheckpointManager(
        manifest=RunManifest(run),
        config=config,
        setup=setup,
        snapshot=snapshot,
        sync=lambda: None,
        note=print,
        clock=time.perf_counter,
    )
    own = Copier()
    own(everything)
    figures = SimpleNamespace(stall=[], copy=[], save=[], plain=[])
    for repeat in range(given.repeats + 1):
        state.global_step = repeat + 1
        stall = measured(saving.save, device)
        saving.wait()
        copied = measured(lambda: own(everything), device)
        plain = measured(lambda: plain_write(folder / "plain", own(everything)), device) - copied
        (folder / "plain").unlink()
        if repeat:  # the first one makes the memory
            figures.stall.append(stall)
            figures.copy.append(copied)
            figures.save.append(saving.metrics()["perf/checkpoint_write_seconds"])
            figures.plain.append(plain)
    shutil.rmtree(folder)
    median = {name: statistics.median(values) for name, values in vars(figures).items()}
    result = {
        "state_mib": round(size / 2**20, 1),
        "device": str(device),
        "checksum": given.checksum,
        "repeats": given.repeats,
        "stall_seconds": round(median["stall"], 5),
        "pure_copy_seconds": round(median["copy"], 5),
        "stall_over_copy": round(median["stall"] / median["copy"], 3),
        "save_mib_per_second": round(size / 2**20 / median["save"], 1),
        "plain_fsynced_write_mib_per_second": round(size / 2**20 / median["plain"], 1),
        "save_over_plain_throughput": round(median["plain"] / median["save"], 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
