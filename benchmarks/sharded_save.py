"""What a sharded save costs against a save by one process, in time and bytes, in one run.

    python benchmarks/sharded_save.py [--mib 256] [--repeats 5] [--ranks 2] [--folder DIR]

Seconds over those of the whole save in the same repeat, medians and the half of the repeats that lies in the middle, on
a state of the size asked for (weights and two moments, in tensors of a few MiB as transformers have them), on gloo
ranks of this machine, which share its disk and its cores:

whole     one process writes all of it: safetensors with checksums, manifest, fsync, rename
sharded   each rank writes its shard, all at once; until the rename, as the slowest rank sees it
torch     `torch.distributed.checkpoint.save` of the same shards with its own safetensors writer: neither checksum nor
          flush nor manifest
read      the whole form and the shards, verified and read: in one process, and by the ranks that share the hashing,
          each of which takes its slices
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from ratios import cells, over
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from optrun.artifacts.checkpoint import Snapshot, load_checkpoint, make_checkpoints_dir, save_checkpoint
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir

SIDE = 1024  # a 4 MiB matrix


def measured(work: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    spent = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def alone(rank: int, work: Callable[[], Any]) -> float:
    """Seconds of rank 0, the others wait."""
    return measured(work if rank == 0 else lambda: None)


def snapshot(step: int, model: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]) -> Snapshot:
    metadata = CheckpointMetadata(global_step=step, train={"step": step})
    return Snapshot(step, model, optimizer, metadata, finite=list(model))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rank_main(rank: int, folder: str, ranks: int, mib: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    saving = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    count = max(1, mib // 12)
    rows = SIDE // ranks

    def divided(seed: int) -> DTensor:
        torch.manual_seed(seed)
        part = torch.randn(rows, SIDE)
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)

    weights = {f"layer.{i}.weight": divided(i) for i in range(count)}
    moments = {f"{n}/{k}": divided(7) for n in weights for k in ("exp_avg", "exp_avg_sq")}
    whole_weights = {name: tensor.full_tensor() for name, tensor in weights.items()}
    whole_moments = {name: tensor.full_tensor() for name, tensor in moments.items()}
    run = RunDir(folder)
    seconds: dict[str, list[float]] = {}
    sizes = {}

    def saves_and_reads(step: int) -> dict[str, float]:
        whole, sharded = run.checkpoint(step), run.checkpoint(step + 1)
        writer = dcp.HuggingFaceStorageWriter(f"{folder}/torch-{step}", save_distributed=True)
        return {
            "whole": alone(rank, lambda: save_checkpoint(run, snapshot(step, whole_weights, whole_moments))),
            "sharded": measured(lambda: save_checkpoint(run, snapshot(step + 1, weights, moments), saving=saving)),
            "torch": measured(lambda: dcp.save({**weights, **moments}, storage_writer=writer, process_group=saving)),
            "whole, read": alone(rank, lambda: load_checkpoint(whole)),
            "sharded, read by one process": alone(rank, lambda: load_checkpoint(sharded)),
            "sharded, read by its ranks": measured(lambda: load_checkpoint(sharded, like=weights, group=saving)),
        }

    for repeat in range(repeats + 1):
        step = repeat * 10 + 1
        taken = saves_and_reads(step)
        if rank == 0:
            sizes = {name: bytes_of(run.checkpoint(step + n)) for n, name in ((0, "whole"), (1, "sharded"))}
            shutil.rmtree(run.checkpoints)
            shutil.rmtree(f"{folder}/torch-{step}")
            make_checkpoints_dir(run)
        if repeat:  # the first one makes memory and page cache
            for name, value in taken.items():
                seconds.setdefault(name, []).append(value)
    if rank == 0:
        base = statistics.median(seconds["whole"])
        print(
            f"A state of {3 * count * SIDE * SIDE * 4 / 2**20:.0f} MiB, {ranks} gloo ranks; 1.00 is {base:.2f} s, "
            f"{sizes['whole']:,} bytes, sharded {sizes['sharded']:,}; {repeats} repeats.\n"
        )
        print("| | seconds over the whole save | middle half |\n| --- | --- | --- |")
        for name, spent in seconds.items():
            print(
                f"| {name.replace('torch', 'torch.distributed.checkpoint')} | {cells(over(spent, seconds['whole']))} |"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="optrun-shards-", dir=given.folder))
    make_checkpoints_dir(RunDir(folder))
    args = (str(folder), given.ranks, given.mib, given.repeats)
    mp.start_processes(rank_main, args=args, nprocs=given.ranks, start_method="forkserver")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
