"""Read from environment variables which rank a launcher (torchrun, srun, mpirun) started."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from optrun.base.errors import ConfigError

_FIRST_PORT = 15_000
_PORT_COUNT = 20_000
"""If no launcher sets MASTER_PORT, ranks derive one of these ports from a number of their job."""


@dataclass(frozen=True)
class Launched:
    """The rank of this process, read from its launcher's environment variables."""

    launcher: str
    rank: int
    size: int
    """Number of ranks on all machines."""
    local_rank: int
    """Rank among those of this machine."""
    local_size: int
    """Number of ranks on this machine."""
    size_variable: str
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
    """Read from a launcher's variables which rank this process is; None: no launcher started it.

    The first launcher counts whose variables are set: torchrun, mpirun, srun. Many environments set
    WORLD_SIZE=1 for a single process, so a size of 1 is ignored without the rank, and for torchrun
    without MASTER_ADDR.

    Args:
        env: The environment variables.

    Example:
        >>> env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        >>> process = launched(env)
        >>> process.launcher, process.rank, process.size, process.local_rank, process.local_size
        ('torchrun', 3, 4, 1, 2)
        >>> launched({"WORLD_SIZE": "1"}) is None
        True

    Raises:
        ConfigError: A variable of the launcher is missing, is no number, or is out of range.
    """
    for names in _LAUNCHERS:
        # 1. Did this launcher start a process here?
        size_name = next((name for name in names.size if env.get(name, "").strip()), None)
        if size_name is None or (names.launcher == "srun" and not _is_started_by_srun(env)):
            continue
        # 2. Did it start this process? A size of 1 alone is no evidence.
        size = _read_number(env, size_name, names.launcher)
        lacks_address = names.launcher == "torchrun" and "MASTER_ADDR" not in env
        if size == 1 and (names.rank not in env or lacks_address):
            continue
        # 3. Its rank.
        size_variable = f"{size_name}={size}"
        rank = _read_number(env, names.rank, names.launcher, size_variable)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{names.rank}={rank}: expected 0 to {size - 1}, since {size_variable}."
            )
        local_rank, local_size = _read_local_rank(env, names, rank, size)
        return Launched(names.launcher, rank, size, local_rank, local_size, size_variable)
    return None


def _is_started_by_srun(env: Mapping[str, str]) -> bool:
    """Tell whether srun started this process as one of several tasks.

    sbatch sets SLURM_PROCID and SLURM_NTASKS for its script, too, but not the id of a step.
    """
    return "SLURM_STEP_ID" in env or "SLURM_STEPID" in env or "SLURM_JOB_ID" not in env


def _read_local_rank(
    env: Mapping[str, str], names: _Variables, rank: int, ranks: int
) -> tuple[int, int]:
    """Read the rank among those of this machine, and the number of ranks on this machine.

    If the launcher sets no local rank, all ranks are taken to be on this machine. Else the number
    of local ranks is the first of these that is known:

    1. under srun, SLURM's number of tasks on this machine;
    2. the launcher's variable for it, unless it is no plain number;
    3. the number of all ranks if SLURM has one machine;
    4. the local rank plus 1, the smallest possible number.

    Args:
        env: The environment variables.
        names: The names of the launcher's variables.
        rank: Rank of this process among all ranks.
        ranks: Number of all ranks.

    Returns:
        Local rank and local size.

    Raises:
        ConfigError: The local rank is missing although SLURM has several machines, or a variable is
            no number.
    """
    nodes = None
    if env.get("SLURM_NNODES", "").strip():
        nodes = _read_number(env, "SLURM_NNODES", "SLURM")
    # The launcher sets no local rank.
    if not env.get(names.local_rank, "").strip():
        if nodes is not None and nodes > 1:
            raise ConfigError(
                f"{names.local_rank} is missing, but SLURM_NNODES={nodes} says that the ranks are"
                f" on several machines. Let {names.launcher} set it: it selects the device of each"
                " rank."
            )
        return rank, ranks
    # It does: only the number of local ranks is open, 1. to 4.
    local_rank = _read_number(env, names.local_rank, names.launcher)
    if names.launcher == "srun":
        tasks = _count_local_tasks(env)
        if tasks is not None:
            return local_rank, tasks
    local_size = env.get(names.local_size, "").strip()
    if local_size.isdecimal():
        return local_rank, int(local_size)
    if nodes == 1:
        return local_rank, max(local_rank + 1, ranks)  # a local rank has to be below the size
    return local_rank, local_rank + 1


def _count_local_tasks(env: Mapping[str, str]) -> int | None:
    """Read the number of srun's tasks on this machine; None if SLURM does not set it.

    SLURM_STEP_TASKS_PER_NODE=4(x2),1 means 4 tasks on each of two machines and 1 on the third;
    SLURM_NODEID is the index of this machine. SLURM_NTASKS_PER_NODE is not used: it is the number
    of tasks that were requested, and a step may start fewer.

    Example:
        >>> _count_local_tasks({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"})
        1
    """
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks_of_nodes: list[int] = []
    for tasks, repeats in entries:
        tasks_of_nodes += [int(tasks)] * int(repeats or 1)
    node = env.get("SLURM_NODEID", "0")
    if node.isdecimal() and int(node) < len(tasks_of_nodes):
        return tasks_of_nodes[int(node)]
    return None


def _read_number(env: Mapping[str, str], name: str, launcher: str, size: str = "") -> int:
    """Read a non-negative integer from a launcher's variable.

    Args:
        env: The environment variables.
        name: Name of the variable.
        launcher: The launcher that sets it, for messages.
        size: The variable with the number of ranks, as `NAME=VALUE`, for the message that the
            variable is missing. Leave it out for a variable that is known to be set.

    Raises:
        ConfigError: The variable is missing, or is no such number.
    """
    text = env.get(name, "").strip()
    if not text:
        raise ConfigError(
            f"{name} is missing, but {size} says that {launcher} started several ranks. Set both"
            f" and use distributed=ddp; or unset {size.partition('=')[0]}, and optrun starts the"
            " ranks itself."
        )
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: expected a whole number, as {launcher} sets it.")
    return int(text)


def set_torch_environment(launched: Launched) -> None:
    """Set the environment variables of `torch.distributed`, as torchrun does.

    An existing MASTER_ADDR or MASTER_PORT is kept.

    Raises:
        ConfigError: The address or port of rank 0 is unknown.
    """
    env = os.environ
    values: dict[str, object] = {
        "RANK": launched.rank,
        "WORLD_SIZE": launched.size,
        "LOCAL_RANK": launched.local_rank,
        "LOCAL_WORLD_SIZE": launched.local_size,
    }
    if "MASTER_ADDR" not in env:
        values["MASTER_ADDR"] = _rank_0_address(launched)
    if "MASTER_PORT" not in env:
        values["MASTER_PORT"] = _shared_port(launched)
    env.update({name: str(value) for name, value in values.items()})


def _rank_0_address(launched: Launched) -> str:
    """Return the host of rank 0: under srun the first host of the step, else 127.0.0.1.

    Raises:
        ConfigError: torchrun without MASTER_ADDR, or mpirun on several machines.
    """
    if launched.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
        if nodes:
            return first_node(nodes)
        return "127.0.0.1"
    if launched.launcher == "mpirun" and launched.local_size == launched.size:
        return "127.0.0.1"
    raise ConfigError(
        f"MASTER_ADDR is missing ({launched.size_variable}): expected the host of rank 0. torchrun"
        " sets it; on several machines, call mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500. To"
        " let optrun start the ranks, run it without a launcher, with distributed=ddp."
    )


def _shared_port(launched: Launched) -> str:
    """Derive the same port on all ranks: from SLURM's job and step, or from mpirun's process id.

    Nothing is sent between ranks for it. Two jobs on a machine may derive the same port.

    Raises:
        ConfigError: torchrun without MASTER_PORT, or mpirun on several machines.
    """
    if launched.launcher == "srun":
        job = int(os.environ.get("SLURM_JOB_ID") or os.getppid())
        step_text = os.environ.get("SLURM_STEP_ID", "0")
        step = int(step_text) if step_text.isdecimal() else 0
        return str(_FIRST_PORT + (job * 7 + step) % _PORT_COUNT)  # 7: steps of a job differ
    if launched.launcher == "mpirun" and launched.local_size == launched.size:
        return str(_FIRST_PORT + os.getppid() % _PORT_COUNT)  # all ranks are children of mpirun
    raise ConfigError(
        f"MASTER_PORT is missing ({launched.size_variable}): expected a free port of rank 0's"
        " machine, such as 29500, the same for all ranks."
    )


def first_node(nodes: str) -> str:
    """Return the first host of a list in SLURM's notation.

    Example:
        >>> first_node("gpu[07-09,12],cpu1"), first_node("node1,node2")
        ('gpu07', 'node1')
        >>> first_node("a[1-2]b[3-4]-ib")
        'a1b3-ib'
    """
    # A repetition of: one character that is neither comma nor "[", or a whole bracket.
    until_comma_outside_brackets = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    assert until_comma_outside_brackets is not None
    # Of each bracket only its first number.
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", until_comma_outside_brackets[0])
