"""Run a function as several gloo ranks on CPU, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import preloaded


def rank_main(rank: int, folder: str, ranks: int, check: Callable[[int], None]) -> None:
    """What each process does: meet the others, and call `check(rank)`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    try:
        check(rank)
    finally:
        dist.destroy_process_group()


def run_ranks(folder: Path, check: Callable[[int], None], ranks: int = 2) -> None:
    """Call `check(rank)` in every rank; the ranks meet by a file in `folder`, an empty directory.

    By a fork server, because its children leave without finalizing the interpreter: gloo's threads
    outlive
    `destroy_process_group`, and one that frees a tensor while Python is being taken down aborts the
    process ("terminate called without an active exception"; 2 of 40 runs on a loaded machine when
    spawned).

    The server has imported what ranks need; without that each rank does, for seconds.

    Raises torch.multiprocessing.ProcessRaisedException with the traceback of the first rank that
    failed.
    """
    preloaded.server()
    mp.start_processes(
        rank_main, args=(str(folder), ranks, check), nprocs=ranks, start_method="forkserver"
    )
