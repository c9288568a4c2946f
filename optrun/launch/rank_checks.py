"""Count the ranks and devices of this machine, and refuse impossible combinations of them."""

import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from optrun.base.errors import ConfigError
from optrun.config.schema.chat_tasks import PreferenceConfig
from optrun.config.schema.distributed import FsdpConfig, RanksConfig
from optrun.config.schema.run import RunConfig
from optrun.config.tokens import key_of
from optrun.distributed.contract import Ranks
from optrun.distributed.join import Launched
from optrun.distributed.rendezvous import name_ranks

OF_STARTER = ("training.nproc_per_node", "distributed.max_restarts")
"""Keys that say how ranks are started: a launcher decides that by itself."""


def nproc(config: RunConfig) -> int:
    """Count the ranks of this machine."""
    nproc_per_node = config.training.nproc_per_node
    if nproc_per_node != "auto":
        return int(nproc_per_node)
    return device_count(config) or 1


def device_count(config: RunConfig) -> int | None:
    """Count the visible GPUs; None if `training.device` lets ranks run on the CPU.

    `auto` means the CPU on a machine without a GPU. Imports torch.
    """
    import torch

    kind = config.training.device.partition(":")[0]
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return None
    return torch.cuda.device_count()


def idle_note(config: RunConfig) -> str | None:
    """Write a note on GPUs left idle by a run in one process.

    None for a distributed run, and on a machine with at most one GPU.
    """
    count = device_count(config) or 0
    if isinstance(config.distributed, RanksConfig) or count < 2:
        return None
    return (
        f"1 of {count} GPUs is used (distributed=none); distributed=ddp trains on all of them, "
        "training.nproc_per_node=N on some."
    )


def refuse_unfit(
    config: RunConfig, overrides: Sequence[str], launched: Launched | None, *, resumes: bool = False
) -> None:
    """Refuse ranks impossible for this machine, its launcher or the configuration.

    Called before a run directory is made. Refused are, in this order:

    1. with `distributed=none`, several processes of a launcher, and a typed number of ranks;
    2. with `ddp` or `fsdp`, another system than Linux;
    3. under a launcher, keys that it decides, and restarts that would not continue the run;
    4. a configuration that no machine could run on so many ranks, see `refuse_composed`;
    5. more ranks than devices on this machine, and a backend that it does not have.

    Args:
        config: Typed and checked.
        overrides: The overrides on the command line.
        launched: The rank of this process under a launcher; None: optrun starts the ranks.
        resumes: Whether the same command, if repeated, continues the run.

    Raises:
        ConfigError: The message names the key.
    """
    distributed = config.distributed
    nproc_per_node = config.training.nproc_per_node
    typed = set(map(key_of, overrides))
    # 1. One process.
    if not isinstance(distributed, RanksConfig):
        if launched is not None and launched.size > 1:
            refuse_one_process(launched)
        if "training.nproc_per_node" in typed:
            refuse_idle_nproc(nproc_per_node)
        return
    # 2. The system.
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"distributed={distributed.name}: ranks share files in memory, which needs Linux;"
            f" this is {sys.platform}. distributed=none trains in one process."
        )
    # 3. The ranks of this machine, and of all machines: started by optrun, or by a launcher.
    if launched is None:
        local_ranks = nproc(config)
        all_ranks = local_ranks
        key = f"training.nproc_per_node={nproc_per_node}"
    else:
        _refuse_keys_of_launcher(typed, launched, resumes=resumes)
        local_ranks = launched.local_size
        all_ranks = launched.size
        key = f"{launched.launcher}: {local_ranks} ranks"
    # 4. The configuration.
    refuse_composed(config, all_ranks)
    # 5. The devices; None: the ranks run on the CPU, which takes any number. With
    # srun --gpus-per-task=1 each rank sees only its own device.
    devices = device_count(config)
    has_own_device = launched is not None and devices == 1
    if devices is not None and local_ranks > devices and not has_own_device:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "CUDA devices" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
        raise ConfigError(
            f"{key}: more ranks than devices: this machine has {devices} ({seen}). Start at most"
            f" {devices} ranks, or add training.device=cpu."
        )
    _refuse_backend(distributed, on_cuda=devices is not None)


def refuse_idle_nproc(nproc_per_node: object) -> None:
    """Refuse a number of ranks (any but `auto`) together with `distributed=none`.

    Raises:
        ConfigError: The message names the key.
    """
    if nproc_per_node != "auto":
        raise ConfigError(
            f"training.nproc_per_node={nproc_per_node}: has no effect with distributed=none,"
            " which trains in one process. Add distributed=ddp or distributed=fsdp, or leave it"
            " out."
        )


def refuse_composed(config: RunConfig, ranks: int | None) -> None:
    """Refuse a configuration for several ranks if no machine could run it.

    Args:
        config: Typed and checked, with `distributed=ddp` or `fsdp`.
        ranks: Number of all ranks; None: the machine decides.

    Raises:
        ConfigError: The message names the key.
    """
    distributed = config.distributed
    device = config.training.device
    kind = device.partition(":")[0]
    if ":" in device:
        raise ConfigError(
            f"training.device={device}: each rank has a device of its own with"
            f" distributed={distributed.name}. Expected auto, cpu or cuda;"
            f" CUDA_VISIBLE_DEVICES={device.partition(':')[2]} chooses among them."
        )
    if kind == "mps":
        raise ConfigError(
            f"training.device={device}: distributed={distributed.name} runs on cuda or cpu. Take"
            " distributed=none, or training.device=cpu."
        )
    if ranks is not None:
        config.training.step_over(ranks)
    if not isinstance(distributed, FsdpConfig):
        return
    from optrun.distributed.shard import data_parallel_degrees
    from optrun.optimizer.build import refuse_unshardable

    if ranks is not None:
        data_parallel_degrees(distributed, ranks)
    task = config.task
    if isinstance(task, PreferenceConfig) and task.loss_type.has_reference:
        raise ConfigError(
            "distributed=fsdp: task=preference keeps the start model unsharded, as its reference."
            " Take distributed=ddp, or a loss without a reference, task.loss_type=orpo or simpo."
        )
    refuse_unshardable(config.optimizer, distributed.name, config.param_groups.rules)


def refuse_one_process(launched: Launched) -> NoReturn:
    """Refuse to train in one process if a launcher has started several.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"{launched.size_variable}: {launched.launcher} starts {launched.size} ranks, and"
        " distributed=none trains in one process: each would train alone, in the same directory."
        f" Add distributed=ddp or distributed=fsdp, or start optrun without {launched.launcher}."
    )


def _refuse_keys_of_launcher(typed: set[str], launched: Launched, *, resumes: bool) -> None:
    """Refuse keys decided by the launcher, and restarts of torchrun without a resume.

    Args:
        typed: Keys on the command line.
        launched: What the launcher told this process.
        resumes: Whether the same command, if repeated, continues the run.

    Raises:
        ConfigError: The message names the key, or torchrun's option.
    """
    for key in OF_STARTER:
        if key in typed:
            raise ConfigError(
                f"{key}: has no effect under {launched.launcher} ({launched.size_variable}), which"
                " starts the ranks itself. Leave it out, or start optrun without"
                f" {launched.launcher}."
            )
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if launched.launcher == "torchrun" and restarts != "0" and not resumes:
        raise ConfigError(
            f"torchrun --max-restarts={restarts}: each start would begin a run of its own. Add"
            " resume=auto and hydra.run.dir=DIR, so that it continues from the last checkpoint."
        )


def _refuse_backend(config: RanksConfig, *, on_cuda: bool) -> None:
    """Refuse an unavailable torch.distributed backend, or NCCL without CUDA.

    `auto` passes. A backend may be one name, or `DEVICE:NAME` for each of cpu and cuda.

    Raises:
        ConfigError: The message names the part that is wrong.
    """
    import torch.distributed as dist

    if config.backend == "auto":
        return
    for part in config.backend.split(","):
        device, _, name = part.rpartition(":")
        lacks_cuda = name == "nccl" and not on_cuda
        if lacks_cuda or not dist.is_backend_available(name) or device not in ("", "cpu", "cuda"):
            why = " (it needs CUDA devices)" if name == "nccl" else ""
            raise ConfigError(
                f"distributed.backend={config.backend}: there is no backend {part!r} here{why}."
                " Expected auto, or one of torch's such as gloo, for each device such as"
                " cpu:gloo,cuda:nccl."
            )


def refuse_shared_device(config: RunConfig, ranks: Ranks) -> None:
    """Refuse several ranks on one device; all ranks must call this.

    Only ranks that see exactly one device are compared: `srun --gpus-per-task` may give each rank
    its own, or all the same.

    Raises:
        ConfigError: The message names the ranks and the device.
    """
    own_device = None  # not compared
    if device_count(config) == 1:
        import torch

        own_device = f"{socket.gethostname()} {torch.cuda.get_device_properties(0).uuid}"
    message = ranks.all_reduce("devices", own_device, shared_device)
    if message is not None:
        raise ConfigError(message)


def shared_device(devices: Sequence[str | None]) -> str | None:
    """Write the message on the first device shared by several ranks; None without one.

    Args:
        devices: Machine and device of each rank; None for a rank that sees several, or none.
    """
    for device in devices:
        ranks = [rank for rank, rank_device in enumerate(devices) if rank_device == device]
        if device is not None and len(ranks) > 1:
            return (
                f"{name_ranks(ranks)}: one device for several ranks ({device}). Expected a device"
                " for each rank, such as by srun --gpus-per-task=1, or fewer ranks."
            )
    return None
