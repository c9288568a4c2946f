"""How long training stands still for a save, and how fast the save itself is.

    python benchmarks/checkpoint_stall.py [--mib 256] [--repeats 7] [--folder DIR] [--device cpu]

On a state of the size asked for (weights and two moments, in tensors of a few MiB as transformers
have them), each
repeat one after another:

stall       what `CheckpointManager.save` takes from the training thread
copy        `copy_` of the same tensors into memory that is there already: the least a save beside
training can cost
save        the thread beside training: safetensors, manifest with a checksum of every file,
fsync, rename
plain       one file with the same bytes: `write` in pieces of 4 MiB, `fsync`
torch.save, safetensors   a file each, and `fsync`; neither checksum nor manifest, and training
waits

The table has seconds over those of the copy or of the plain write in the same repeat: medians, and
the half of the repeats that lies in the middle.
"""

from __future__ import annotations

import argparse
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
from ratios import cells, over
from safetensors.torch import save_file

from optrun.artifacts.checkpoint import Snapshot, make_checkpoints_dir
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.tensor_file import tensor_bytes
from optrun.config.schema.checkpoint import (
    CheckpointConfig,
    OnOtherOptimizer,
    OnStorageError,
)
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


def synced(place: Path, save: Callable[[Path], object]) -> None:
    """Save one file and flush it to the disk."""
    save(place)
    with place.open("rb") as file:
        os.fsync(file.fileno())


def manager(
    run: RunDir,
    state: TrainState,
    device: torch.device,
    snapshot: Callable[[RandomStates, bool], Snapshot],
) -> CheckpointManager:
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
        allow_nonfinite=False,
    )
    setup: Any = SimpleNamespace(
        ranking=Ranking("eval/loss", "min"),
        state=state,
        train_step=SimpleNamespace(device=device),
        config=SimpleNamespace(on_nonfinite=None),
    )
    return CheckpointManager(
        run=run,
        config=config,
        setup=setup,
        snapshot=snapshot,
        sync=lambda: None,
        note=print,
        clock=time.perf_counter,
    )


def measure(
    mib: int, repeats: int, device: torch.device, folder: Path
) -> tuple[float, dict[str, list[float]]]:
    """Return MiB of the state, and seconds of each repeat by what they were spent on."""
    count = max(1, mib // 12)
    weights = {f"layer.{i}.weight": torch.randn(SIDE, SIDE, device=device) for i in range(count)}
    moments = {
        f"{n}/{k}": torch.randn_like(w)
        for n, w in weights.items()
        for k in ("exp_avg", "exp_avg_sq")
    }
    everything = {**weights, **moments}
    run = RunDir(folder / "run")
    run.path.mkdir()
    make_checkpoints_dir(run)
    copy_weights, copy_moments, own = Copier(), Copier(), Copier()
    held, state, place = own(everything), TrainState(), folder / "file"
    files = {
        "plain": lambda: plain_write(place, held),
        "torch.save": lambda: synced(place, lambda path: torch.save(held, path)),
        "safetensors": lambda: synced(place, lambda path: save_file(held, path)),
    }

    def snapshot(_random: RandomStates, _last: bool) -> Snapshot:
        metadata = CheckpointMetadata(global_step=state.global_step, train=state.to_dict())
        return Snapshot(
            state.global_step,
            copy_weights(weights),
            copy_moments(moments),
            metadata,
            finite=list(weights),
        )

    saving = manager(run, state, device, snapshot)
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        state.global_step = repeat + 1
        spent = {"stall": measured(saving.save, device)}
        saving.wait()
        spent["save"] = saving.metrics()["perf/checkpoint_write_seconds"]
        spent["copy"] = measured(lambda: own(everything), device)
        for name, save in files.items():
            spent[name] = measured(save, device)
            place.unlink()
        if repeat:  # the first one makes the memory
            for name, value in spent.items():
                seconds.setdefault(name, []).append(value)
    return (
        sum(tensor.numel() * tensor.element_size() for tensor in everything.values()) / 2**20,
        seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="optrun-stall-", dir=options.folder))
    size, seconds = measure(options.mib, options.repeats, torch.device(options.device), folder)
    rows = ["| | over | ratio of seconds | middle half |", "| --- | --- | --- | --- |"]
    for name in ("stall", "save", "torch.save", "safetensors"):
        base = "copy" if name == "stall" else "plain"
        rows.append(f"| {name} | {base} | {cells(over(seconds[name], seconds[base]))} |")
    shutil.rmtree(folder)
    copied, plain = (size / statistics.median(seconds[name]) for name in ("copy", "plain"))
    print(
        f"A state of {size:.0f} MiB on {options.device}; a copy makes {copied:.0f} MiB/s, a plain"
        f" flushed write {plain:.0f} MiB/s; {options.repeats} repeats.\n"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
