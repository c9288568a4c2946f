"""Read from environment variables which rank a launcher (torchrun, srun, mpirun) started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from optrun.base.errors import ConfigError

_FIRST_PORT, _PORTS = 15000, 20000
"""Where ranks meet that no launcher gave a port: this many from here on, by a number that the job's
ranks share."""


@dataclass(frozen=True)
class Launched:
    """The rank of this process, as its launcher's environment variables give it."""

    launcher: str
    rank: int
    size: int
    """Number of ranks on all machines."""
    local_rank: int
    """Rank among those of this machine."""
    local_size: int
    """Number of ranks on this machine."""
    shown: str
    """The variable that gives the number of ranks, as `NAME=VALUE`; for messages."""


@dataclass(frozen=True)
class _Variables:
    """The environment variables that a launcher sets."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Variables("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Variables(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables("mpirun", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Variables(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
    ),
)


def launched(env: Mapping[str, str]) -> Launched | None:
    """Read which rank this process is; None: no launcher started it.

    WORLD_SIZE=1, which many environments set, is none without RANK and MASTER_ADDR.

    Args:
        env: The environment variables.

    Raises:
        ConfigError: A variable of the launcher is missing, is no number, or is out of range.
    """
    for names in _LAUNCHERS:
        size = next((name for name in names.size if env.get(name, "").strip()), None)
        if size is None or (names.launcher == "srun" and not _is_started_by_srun(env)):
            continue
        ranks = _read_number(env, size, names.launcher)
        if ranks == 1 and (
            names.rank not in env or (names.launcher == "torchrun" and "MASTER_ADDR" not in env)
        ):
            continue  # WORLD_SIZE=1 stands in many a profile
        rank = _read_number(env, names.rank, names.launcher, f"{size}={ranks}")
        if not 0 <= rank < ranks:
            raise ConfigError(
                f"{names.rank}={rank}: expected 0 to {ranks - 1}, since {size}={ranks}."
            )
        local_rank, local_size = _read_local_rank(env, names, rank, ranks)
        return Launched(names.launcher, rank, ranks, local_rank, local_size, f"{size}={ranks}")
    return None


def _is_started_by_srun(env: Mapping[str, str]) -> bool:
    """Tell whether srun started this process as a task of a step.

    A script of sbatch has SLURM_PROCID and SLURM_NTASKS, too, but is a single process.
    """
    return "SLURM_STEP_ID" in env or "SLURM_STEPID" in env or "SLURM_JOB_ID" not in env


def _read_local_rank(
    env: Mapping[str, str], names: _Variables, rank: int, ranks: int
) -> tuple[int, int]:
    """Read the rank among those of this machine, and their number.

    Without a variable for the local rank, all ranks are taken to be on this machine. With one,
    their number is the first of these that is known:

    1. under srun, SLURM's number of tasks on this machine;
    2. the launcher's variable for it, unless it is no plain number;
    3. the number of all ranks if SLURM has one machine;
    4. the local rank plus 1, the smallest number that fits.

    Args:
        env: The environment variables.
        names: Those of the launcher.
        rank: Rank of this process among all ranks.
        ranks: Number of all ranks.

    Raises:
        ConfigError: The local rank is missing although SLURM has several machines, or is no number.
    """
    if not env.get(names.local_rank, "").strip():
        if int(env.get("SLURM_NNODES", "1")) > 1:
            raise ConfigError(f"{names.local_rank} is missing: it says which device this rank has.")
        return rank, ranks
    local_rank = _read_number(env, names.local_rank, names.launcher)
    tasks = _count_local_tasks(env) if names.launcher == "srun" else None
    if tasks is not None:
        return local_rank, tasks
    local_size = env.get(names.local_size, "").strip()
    if local_size.isdecimal():
        return local_rank, int(local_size)
    if env.get("SLURM_NNODES") == "1":
        return local_rank, max(local_rank + 1, ranks)
    return local_rank, local_rank + 1


def _count_local_tasks(env: Mapping[str, str]) -> int | None:
    """Read how many tasks srun starts on this machine; None: SLURM does not say.

    SLURM_STEP_TASKS_PER_NODE=4(x2),1 means 4 tasks on each of the first two machines. This is not
    SLURM_NTASKS_PER_NODE, which a step need not use up.
    """
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for count, times in entries:
        counts += [int(count)] * int(times or 1)
    node = env.get("SLURM_NODEID", "0")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    return None


def _read_number(env: Mapping[str, str], name: str, launcher: str, others: str = "") -> int:
    """Read a whole number from a launcher's variable; refuse one that is missing or no number."""
    text = env.get(name, "").strip()
    if not text:
        raise ConfigError(
            f"{name} is missing, although {others} says that there are several ranks, as {launcher}"
            f" does. Expected both, with distributed=ddp; or no {others.partition('=')[0]}, and"
            " optrun starts the ranks itself."
        )
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: expected a whole number, as {launcher} sets it.")
    return int(text)


def set_torch_environment(launched: Launched) -> None:
    """Set the variables that `torch.distributed` reads, as torchrun would have.

    Raises:
        ConfigError: Nobody says where the ranks meet, and they are on several machines.
    """
    env = os.environ
    values = {
        "RANK": launched.rank,
        "WORLD_SIZE": launched.size,
        "LOCAL_RANK": launched.local_rank,
        "LOCAL_WORLD_SIZE": launched.local_size,
        "MASTER_ADDR": env["MASTER_ADDR"] if "MASTER_ADDR" in env else _rank_0_address(launched),
        "MASTER_PORT": env["MASTER_PORT"] if "MASTER_PORT" in env else _shared_port(launched),
    }
    env.update({name: str(value) for name, value in values.items()})


def _rank_0_address(launched: Launched) -> str:
    """Return the address of rank 0: of srun the first host, on a single machine 127.0.0.1.

    Raises:
        ConfigError: The launcher does not say where rank 0 is.
    """
    if launched.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
        if nodes:
            return first_node(nodes)
        return "127.0.0.1"
    if launched.launcher == "mpirun" and launched.local_size == launched.size:
        return "127.0.0.1"
    raise ConfigError(
        f"MASTER_ADDR is missing ({launched.shown}): expected the host of rank 0, as torchrun sets"
        " it, and with mpirun on several machines: mpirun -x MASTER_ADDR=HOST -x"
        " MASTER_PORT=29500. To let optrun start the ranks, start it by itself with"
        " distributed=ddp."
    )


def _shared_port(launched: Launched) -> str:
    """Derive a port that is the same for all ranks: from SLURM's job and step, or mpirun's process.

    Raises:
        ConfigError: torchrun without MASTER_PORT, or mpirun on several machines.
    """
    if launched.launcher == "srun":
        shared = os.environ.get("SLURM_JOB_ID") or str(os.getppid())
        step = os.environ.get("SLURM_STEP_ID", "0")
        return str(_FIRST_PORT + (int(shared) * 7 + int(step if step.isdecimal() else 0)) % _PORTS)
    if launched.launcher == "mpirun" and launched.local_size == launched.size:
        return str(_FIRST_PORT + os.getppid() % _PORTS)  # mpirun started them all
    raise ConfigError(
        f"MASTER_PORT is missing ({launched.shown}): expected the port where the ranks meet, such"
        " as 29500."
    )


def first_node(nodes: str) -> str:
    """Read the first host of a list as SLURM writes it.

    Example:
        >>> first_node("gpu[07-09,12],cpu1"), first_node("node1,node2")
        ('gpu07', 'node1')
        >>> first_node("a[1-2]b[3-4]-ib")
        'a1b3-ib'
    """
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    assert match is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
