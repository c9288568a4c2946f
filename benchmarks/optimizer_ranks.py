"""What ranks cost each optimizer.

Collectives of a sharded step, and the time of a step against one process.

    python benchmarks/optimizer_ranks.py [--ranks 2] [--steps 5] [--hidden 128] [--layers 2]

A small Llama on gloo ranks of this machine, the same global batch everywhere. Medians over the
steps, each optimizer:

collectives   in `step()` over FSDP2 shards
update        `step()` alone: time over shards, over that of one process on whole parameters
ddp, fsdp     forward, backward and update: time of the ranks, over that of one process on the whole
batch

The last row is torch's own Muon over the same shards, which gathers within every product. Ratios
are of one run; where ranks share cores with each other, 1.0 is the best there is for `ddp` and
`fsdp`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optrun.config.schema.optimizer import SCHEMAS
from optrun.optimizer.build import build_optimizer, divide_groups
from optrun.optimizer.classes import LIBRARY_CHOICE, class_of_member

OPTIMIZERS = [
    name for name in SCHEMAS if name != LIBRARY_CHOICE and class_of_member(name).TAKES_SHARDS
]
BATCH, LENGTH, VOCABULARY = 16, 64, 512


def llama(hidden: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def built(name: str, model: nn.Module) -> Optimizer:
    return build_optimizer(name, [{"params": list(model.named_parameters())}], lr=1e-3)


def torchs_muon(_: str, model: nn.Module) -> Optimizer:
    """Over the matrices that optrun's Muon takes; the rest stands still."""
    groups, _members = divide_groups("muon", {}, [{"params": list(model.named_parameters())}])
    return torch.optim.Muon([param for _, param in groups[0]["params"]], lr=1e-3)


def timed(
    model: nn.Module, optimizer: Optimizer, part: slice, steps: int
) -> tuple[float, float, int]:
    """Medians of update and step in seconds, and the collectives of one update."""
    updates, wholes, collectives = [], [], 0
    for step in range(steps + 1):
        tokens = torch.randint(
            VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
        )[part]
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        middle = time.perf_counter()
        if step:  # the first one makes the state
            optimizer.step()
            done = time.perf_counter()
            updates.append(done - middle)
            wholes.append(done - begun)
        else:
            with CommDebugMode() as communication:
                optimizer.step()
            collectives = communication.get_total_counts()
    return statistics.median(updates), statistics.median(wholes), collectives


def measure(rank: int, folder: str, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=given.ranks
    )
    mesh = init_device_mesh("cpu", (given.ranks,))
    part = slice(rank * BATCH // given.ranks, (rank + 1) * BATCH // given.ranks)
    makers: dict[str, Callable[[str, nn.Module], Optimizer]] = dict.fromkeys(OPTIMIZERS, built)
    makers["torch.optim.Muon"] = torchs_muon
    if rank == 0:
        print("| optimizer | collectives | update | ddp | fsdp |\n| --- | --- | --- | --- | --- |")
    for name, make in makers.items():
        one: tuple[float, float, int] = (0.0, 0.0, 0)
        if rank == 0:
            alone = llama(given.hidden, given.layers)
            one = timed(alone, make(name, alone), slice(None), given.steps)
        dist.barrier()
        whole = llama(given.hidden, given.layers)
        ddp = timed(DistributedDataParallel(whole), make(name, whole), part, given.steps)
        model = llama(given.hidden, given.layers)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        fsdp = timed(model, make(name, model), part, given.steps)
        if rank == 0:
            ratios = (fsdp[0] / one[0], ddp[1] / one[1], fsdp[1] / one[1])
            print(
                f"| {name} | {fsdp[2]} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |",
                flush=True,
            )
    if rank == 0:
        parameters = sum(param.numel() for param in llama(given.hidden, given.layers).parameters())
        print(
            json.dumps({"parameters": parameters, "global_batch": [BATCH, LENGTH], **vars(given)})
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            measure, args=(folder, given), nprocs=given.ranks, start_method="forkserver"
        )


if __name__ == "__main__":
    main()
