"""What a sharded save costs against a save by one process, in time and bytes, in one run.

    python benchmarks/sharded_save.py [--mib 256] [--repeats 5] [--ranks 2] [--folder DIR]
    [--memory]

Seconds over those of the whole save in the same repeat, medians and the half of the repeats that
lies in the middle, on a state of the size asked for (weights and two moments, in tensors of a few
MiB as transformers have them), on gloo
ranks of this machine, which share its disk and its cores:

whole     one process writes all of it: safetensors with checksums, manifest, fsync, rename
sharded   each rank writes its shard, all at once; until the rename, as the slowest rank sees it
torch     `torch.distributed.checkpoint.save` of the same shards with its own safetensors writer:
          neither checksum nor flush nor manifest
read      the whole form and the shards, verified and read: in one process, and by the ranks that
          share the hashing, each of which takes its slices

With `--memory`: what each rank holds of a pretrained GPT-2 of that size in two steps of
`distributed=fsdp`, in MiB over what a run of a tiny model leaves in the same process; then in the
second step of a run that saved the first. Anonymous memory is sampled every 5 ms; the peak of all
includes files that are mapped, which the system may drop.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from ratios import cells, over
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from optrun.artifacts.checkpoint import (
    Snapshot,
    load_checkpoint,
    make_checkpoints_dir,
    read_local_parts,
    save_checkpoint,
)
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir

SIDE = 1024  # a 4 MiB matrix
WIDTH = 768


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


def snapshot(
    step: int, model: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]
) -> Snapshot:
    metadata = CheckpointMetadata(global_step=step, train={"step": step})
    return Snapshot(step, model, optimizer, metadata, finite=list(model))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rank_main(rank: int, folder: str, ranks: int, mib: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
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
            "whole": alone(
                rank, lambda: save_checkpoint(run, snapshot(step, whole_weights, whole_moments))
            ),
            "sharded": measured(
                lambda: save_checkpoint(run, snapshot(step + 1, weights, moments), saving=saving)
            ),
            "torch": measured(
                lambda: dcp.save(
                    {**weights, **moments}, storage_writer=writer, process_group=saving
                )
            ),
            "whole, read": alone(rank, lambda: load_checkpoint(whole)),
            "sharded, read by one process": alone(rank, lambda: load_checkpoint(sharded)),
            "sharded, read by its ranks": measured(
                lambda: read_local_parts(load_checkpoint(sharded, lazy=True), weights)
            ),
        }

    for repeat in range(repeats + 1):
        step = repeat * 10 + 1
        taken = saves_and_reads(step)
        if rank == 0:
            sizes = {
                name: bytes_of(run.checkpoint(step + n))
                for n, name in ((0, "whole"), (1, "sharded"))
            }
            shutil.rmtree(run.checkpoints)
            shutil.rmtree(f"{folder}/torch-{step}")
            make_checkpoints_dir(run)
        if repeat:  # the first one makes memory and page cache
            for name, value in taken.items():
                seconds.setdefault(name, []).append(value)
    if rank == 0:
        base = statistics.median(seconds["whole"])
        print(
            f"A state of {3 * count * SIDE * SIDE * 4 / 2**20:.0f} MiB, {ranks} gloo ranks; 1.00 is"
            f" {base:.2f} s, {sizes['whole']:,} bytes, sharded {sizes['sharded']:,}; {repeats}"
            " repeats.\n"
        )
        print("| | seconds over the whole save | middle half |\n| --- | --- | --- |")
        for name, spent in seconds.items():
            print(
                f"| {name.replace('torch', 'torch.distributed.checkpoint')} |"
                f" {cells(over(spent, seconds['whole']))} |"
            )
    dist.destroy_process_group()


class Peaks:
    """The largest memory of this process between marks, in MiB."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}
        self._anonymous = 0.0
        threading.Thread(target=self._sample, daemon=True).start()
        self.mark("")
        self.base = self.found.pop("")

    def _read(self) -> dict[str, float]:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return {
            line.split(":")[0]: int(line.split()[1]) / 1024
            for line in lines
            if line.endswith(" kB")
        }

    def _sample(self) -> None:
        while True:
            self._anonymous = max(self._anonymous, self._read()["RssAnon"])
            time.sleep(0.005)

    def mark(self, phase: str) -> None:
        """End a phase; what was released before counts no more."""
        now = self._read()
        self.found[phase] = (max(self._anonymous, now["RssAnon"]), now["VmHWM"])
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self._anonymous = 0.0

    def before(self, phase: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function end the phase before it."""

        def acting(*args: Any, **options: Any) -> Any:
            self.mark(phase)
            return act(*args, **options)

        return acting


def make_pretrained(folder: Path, mib: int) -> None:
    """Write a GPT-2 of about this size with a tokenizer of bytes, and a text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    (folder / "text.txt").write_text(
        "The cat sat on the mat and looked at the rain.\n" * 400, encoding="utf-8"
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0])
    layers = round(mib * 2**20 / 4 / (12 * WIDTH**2))
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=WIDTH,
        n_positions=64,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def memory_main(rank: int, folder: str, ranks: int) -> None:
    from rich.console import Console

    from optrun.config import store
    from optrun.config.compose import compose_request
    from optrun.config.request import CommandLine
    from optrun.distributed.world import World
    from optrun.runner import train as runner
    from optrun.training.checkpointing import CheckpointManager
    from optrun.training.display import make_display

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    timeout = timedelta(seconds=600)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timeout
    )
    world = World.join("gloo", timeout)

    def run(name: str, *words: str) -> None:
        common = [
            f"data.train={folder}/text.txt",
            "data=files",
            "data.max_length=16",
            "distributed=fsdp",
            "training.max_steps=2",
            "training.per_device_train_batch_size=1",
            "training.device=cpu",
        ]
        request = compose_request(store.open_hydra(None), CommandLine(overrides=[*common, *words]))
        place = RunDir(Path(folder) / name)
        place.path.mkdir(exist_ok=True)
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            runner.train(request, place, make_display(Console(file=nowhere), ""), world=world)

    run("tiny", "model=gpt_tiny")
    peaks = Peaks()
    with (
        patch.object(runner, "build_loop", peaks.before("load", runner.build_loop)),
        patch.object(CheckpointManager, "save", peaks.before("step", CheckpointManager.save)),
        patch.object(runner, "gather_model", peaks.before("save", runner.gather_model)),
    ):
        run("run", "model=pretrained", f"model.path={folder}/model")
    peaks.mark("end")
    gc.collect()
    with patch.object(
        CheckpointManager, "save", peaks.before("step after a save", CheckpointManager.save)
    ):
        run("saving", "model=pretrained", f"model.path={folder}/model", "checkpoint.save_steps=1")
    found = {
        phase: [a - b for a, b in zip(at, peaks.base, strict=True)]
        for phase, at in peaks.found.items()
    }
    every = world.gather_objects(found)
    if rank == 0:
        size = (
            sum(path.stat().st_size for path in Path(folder, "model").glob("*.safetensors")) / 2**20
        )
        print(f"A model of {size:.0f} MiB, {ranks} ranks: a share of {size / ranks:.0f} MiB.\n")
        print(
            "| | rank 0 | other ranks | with mapped files, rank 0 | other ranks |\n| --- | --- |"
            " --- | --- | --- |"
        )
        for phase in found:
            others = [max(own[phase][which] for own in every[1:]) for which in (0, 1)]
            row = (found[phase][0], others[0], found[phase][1], others[1])
            print(f"| {phase} | {' | '.join(f'{value:.0f}' for value in row)} |")
    world.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="optrun-shards-", dir=given.folder))
    if given.memory:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = (
            "65536"  # glibc gives back what is freed, so what is counted is in use
        )
        make_pretrained(folder, given.mib)
        args = (str(folder), given.ranks)
        mp.start_processes(memory_main, args=args, nprocs=given.ranks, start_method="forkserver")
        shutil.rmtree(folder)
        return
    make_checkpoints_dir(RunDir(folder))
    args = (str(folder), given.ranks, given.mib, given.repeats)
    mp.start_processes(rank_main, args=args, nprocs=given.ranks, start_method="forkserver")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
