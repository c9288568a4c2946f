"""Where a run has ranks: what cannot be is refused, they are started, and started again where that is allowed."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.commands.payload import Payload
from optrun.commands.rank import FOLDER, PAYLOAD
from optrun.config.request import Request
from optrun.config.schema.distributed import FsdpConfig, RanksConfig
from optrun.config.schema.run import RunConfig
from optrun.distributed.agent import Ranks, run_ranks
from optrun.distributed.join import Launched
from optrun.distributed.verdict import error_of
from optrun.errors import EXIT_FAILED, ConfigError, OptrunError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from optrun.runner.resume.checkpoint import ResumePoint
    from optrun.runner.train import Outcome

_OF_AGENT = ("training.nproc_per_node", "distributed.nnodes", "distributed.rdzv_endpoint", "distributed.max_restarts")
"""Keys that say how ranks are started: a launcher decides that by itself."""


# What cannot be -----------------------------------------------------------------------------------------------------


def refuse_unfit(config: RunConfig, overrides: Sequence[str], launched: Launched | None) -> None:
    """Refuse ranks that cannot be, before a directory is made.

    Args:
        config: Typed and checked.
        overrides: Of the command line.
        launched: What a launcher says of this process; None: optrun starts the ranks.

    Raises:
        ConfigError: With the key.
    """
    distributed, given = config.distributed, config.training.nproc_per_node
    typed = {token.lstrip("+").split("=", 1)[0] for token in overrides}
    if not isinstance(distributed, RanksConfig):
        if launched is not None and launched.size > 1:
            raise ConfigError(
                f"{launched.shown}: {launched.launcher} starts {launched.size} ranks, and distributed=none trains in "
                "one process: each would train alone, in the same directory. Add distributed=ddp or distributed=fsdp, "
                f"or start optrun without {launched.launcher}."
            )
        if "training.nproc_per_node" in typed and given != "auto":
            raise ConfigError(
                f"training.nproc_per_node={given}: has no effect with distributed=none, which trains in one process. "
                "Add distributed=ddp or distributed=fsdp, or leave it out."
            )
        return
    if launched is not None:
        _refuse_told_twice(typed, launched)
    device, kind = config.training.device, config.training.device.partition(":")[0]
    if ":" in device:
        raise ConfigError(
            f"training.device={device}: each rank has a device of its own with distributed={distributed.name}. "
            f"Expected auto, cpu or cuda; CUDA_VISIBLE_DEVICES={device.partition(':')[2]} chooses among them."
        )
    if kind == "mps":
        raise ConfigError(f"training.device={device}: one device; distributed={distributed.name} is for cuda and cpu.")
    here = launched.local_size if launched is not None else nproc(config)
    devices = device_count(config)
    if devices is not None and here > devices:
        key = f"training.nproc_per_node={given}" if launched is None else f"{launched.launcher}: {here} ranks"
        raise ConfigError(
            f"{key}: more ranks than devices: this machine has {devices} ({_visible()}). Expected at most "
            f"{devices}, or training.device=cpu."
        )
    _refuse_backend(distributed, on_cuda=devices is not None)
    world = launched.size if launched is not None else here * distributed.nnodes
    config.training.micro_batches(world)
    if isinstance(distributed, FsdpConfig):
        _refuse_degrees(distributed, world)


def _refuse_told_twice(typed: set[str], launched: Launched) -> None:
    for key in _OF_AGENT:
        if key in typed:
            raise ConfigError(
                f"{key}: has no effect under {launched.launcher} ({launched.shown}), which starts the ranks itself. "
                f"Leave it out, or start optrun without {launched.launcher}."
            )
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if launched.launcher == "torchrun" and FOLDER not in os.environ and restarts != "0" and "resume" not in typed:
        raise ConfigError(
            f"torchrun --max-restarts={restarts}: each start would begin a run of its own. Add resume=auto and "
            "hydra.run.dir=DIR, so that it goes on from the last checkpoint."
        )


def _refuse_backend(config: RanksConfig, *, on_cuda: bool) -> None:
    import torch.distributed as dist

    if config.backend == "auto":
        return
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    usable = [name for name, is_there in there.items() if is_there and (name != "nccl" or on_cuda)]
    for part in config.backend.split(","):
        device, _, name = part.rpartition(":")
        if name not in usable or device not in ("", "cpu", "cuda"):
            why = " (it needs CUDA devices)" if name == "nccl" and there["nccl"] else ""
            raise ConfigError(
                f"distributed.backend={config.backend}: there is no backend {part!r} here{why}. Expected auto, or one "
                f"of {', '.join(usable)}, for each device such as cpu:gloo,cuda:nccl."
            )


def _refuse_degrees(config: FsdpConfig, world: int) -> None:
    replicas, shards = config.data_parallel_replicate_degree, config.data_parallel_shard_degree
    if world % replicas:
        raise ConfigError(
            f"distributed.data_parallel_replicate_degree={replicas}: expected a divisor of the {world} ranks."
        )
    if shards != -1 and replicas * shards != world:
        raise ConfigError(
            f"distributed.data_parallel_shard_degree={shards}: with distributed.data_parallel_replicate_degree="
            f"{replicas} this makes {replicas * shards} ranks, and there are {world}. Expected {world // replicas}, or "
            "-1."
        )


def nproc(config: RunConfig) -> int:
    """Count the ranks of this machine."""
    given = config.training.nproc_per_node
    return int(given) if given != "auto" else device_count(config) or 1


def device_count(config: RunConfig) -> int | None:
    """Count the GPUs that ranks can have; None where they run on the CPU."""
    import torch

    kind = config.training.device.partition(":")[0]
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return None
    return torch.cuda.device_count()


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA devices" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"


def idle_note(config: RunConfig) -> str | None:
    """Say that there are accelerators which a run in one process leaves idle; None where there are none."""
    if isinstance(config.distributed, RanksConfig) or config.training.device.partition(":")[0] not in ("auto", "cuda"):
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return None
    return (
        f"1 of {count} GPUs is used (distributed=none); distributed=ddp trains on all of them, "
        "training.nproc_per_node=N on some."
    )


# Starting -----------------------------------------------------------------------------------------------------------


def train_on_ranks(request: Request, run: RunDir, console: Console, resume: ResumePoint | None) -> Outcome:
    """Start the ranks of a run on this machine, and wait for their end.

    Args:
        request: Composed; no rank runs Hydra.
        run: Where to write; exists.
        console: What rank 0 shows goes to standard output; quiet: nothing.
        resume: Where to go on; None: from the start.

    Raises:
        OptrunError: How the ranks ended, together, where not all ended well.
    """
    from optrun.runner.train import Outcome

    distributed = request.config.distributed
    assert isinstance(distributed, RanksConfig)
    payload = Payload.of(request, run, resume, quiet=console.quiet)
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="optrun-ranks-") as base:
        for attempt in range(distributed.max_restarts + 1):
            folder = Path(base, f"attempt-{attempt}")
            folder.mkdir()
            if attempt:
                payload = _again(payload, began)
            (folder / PAYLOAD).write_text(json.dumps(payload.to_dict()), encoding="utf-8")
            ranks = Ranks(
                nproc=nproc(request.config),
                nnodes=distributed.nnodes,
                rdzv_endpoint=distributed.rdzv_endpoint,
                timeout=distributed.timeout_seconds,
                command=["-m", "optrun.commands.rank"],
                environment={FOLDER: str(folder)},
                run_id=f"optrun-{attempt}",
            )
            ended = run_ranks(ranks, folder)
            error = error_of(ended.ends, run.rank_log)
            if error is None:
                return Outcome(run, read_summary(run.summary))
            console.show_cursor(True)  # rank 0 may have been killed under its display
            if ended.stops > 1 and any(end.code > 128 for end in ended.ends):
                error = OptrunError("a second signal ended all ranks at once; nothing new was saved.")
                error.exit_code = max(end.code for end in ended.ends)
            if ended.stops or error.exit_code != EXIT_FAILED or attempt == distributed.max_restarts:
                raise error
            console.print(
                printable(f"{error} Starting again, {attempt + 1} of {distributed.max_restarts} times."),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    raise AssertionError("unreachable")


def _again(payload: Payload, began: float) -> Payload:
    """The payload for ranks that are started once more: from the last checkpoint, or the start where there is none."""
    run = payload.run
    if not (run.metrics.exists() or run.summary.exists() or run.checkpoints.exists()):
        return payload
    saved_since = any(folder.stat().st_mtime >= began for folder in checkpoint_folders(run))
    return payload.again(saved_since=saved_since)
