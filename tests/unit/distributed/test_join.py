"""Which rank a process is, in the words of each launcher."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.distributed.join import launched, set_torch_environment
from optrun.launch.rank_checks import refuse_unfit, shared_device
from optrun.training.device import pick_device
from tests.running import composed

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 1, 2)),
        (SRUN, ("srun", 3, 4, 1, 2)),
        (
            {**SRUN, "SLURM_NTASKS_PER_NODE": "4"},
            ("srun", 3, 4, 1, 2),
        ),  # as sbatch was told, of all its steps
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
            ("srun", 3, 4, 0, 1),
        ),
        (MPIRUN, ("mpirun", 1, 2, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("mpirun", 0, 2, 0, 2)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ("srun", 1, 2, 1, 2)),
    ],
)
def test_each_launcher_says_who_this_is(
    env: dict[str, str], expected: tuple[str, int, int, int, int]
) -> None:
    found = launched(env)
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == expected


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": " "},
        {"WORLD_SIZE": "1", "RANK": "1"},
        {
            "SLURM_JOB_ID": "1",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
        },  # the script of sbatch, which is alone
    ],
)
def test_started_by_itself(env: dict[str, str]) -> None:
    assert launched(env) is None


@pytest.mark.parametrize(
    ("env", "facts"),
    [
        ({"WORLD_SIZE": "2"}, ["RANK is missing", "WORLD_SIZE=2", "distributed=ddp"]),
        ({"WORLD_SIZE": "x", "RANK": "0"}, ["WORLD_SIZE=x", "whole number"]),
        ({"WORLD_SIZE": "2", "RANK": "2"}, ["RANK=2", "0 to 1"]),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, ["RANK=-1"]),
        ({**SRUN, "SLURM_NNODES": "1-2"}, ["SLURM_NNODES=1-2", "whole number"]),
        (
            {name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"},
            ["SLURM_LOCALID is missing", "SLURM_NNODES=2", "srun"],
        ),
    ],
)
def test_half_an_environment_is_refused(env: dict[str, str], facts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        launched(env)
    for fact in facts:
        assert fact in str(refused.value)


def set_for(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> dict[str, str]:
    """What torch finds in the environment where a launcher set this."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = launched(env)
    assert found is not None
    set_torch_environment(found)
    return dict(os.environ)


def test_slurm_has_the_first_node_and_a_port_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set_for(monkeypatch, SRUN)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert found["MASTER_ADDR"] == "gpu07"
    port = found["MASTER_PORT"]
    assert 1024 < int(port) < 65536
    assert (
        set_for(monkeypatch, {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})["MASTER_PORT"]
        == port
    )
    assert set_for(monkeypatch, {**SRUN, "SLURM_STEP_ID": "3"})["MASTER_PORT"] != port


def test_mpirun_on_one_machine_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_for(monkeypatch, MPIRUN)["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_on_several_machines_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        set_for(
            monkeypatch,
            {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        )
    for fact in ("MASTER_ADDR", "mpirun -x"):
        assert fact in str(refused.value)


def test_what_is_given_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set_for(monkeypatch, {**SRUN, "MASTER_ADDR": "login", "MASTER_PORT": "29501"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("login", "29501")


def test_one_visible_device_per_task_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun --gpus-per-task=1` shows them.

    One device for two ranks that optrun starts is not.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    refuse_unfit(composed("distributed=ddp", "training.device=cuda"), (), launched(SRUN))
    assert pick_device("cuda", 1) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="more ranks than devices"):
        refuse_unfit(composed("distributed=ddp", "training.nproc_per_node=2"), (), None)


def test_a_device_beyond_the_last_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(
        ConfigError, match=r"training.device=cuda:2: .* Usable: cpu, cuda:0, cuda:1"
    ):
        pick_device("cuda:2")


@pytest.mark.parametrize("resumes", [True, False])
def test_torchrun_that_starts_again_needs_a_run_to_go_on_with(
    monkeypatch: pytest.MonkeyPatch, *, resumes: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    config = composed("distributed=ddp", "training.device=cpu")
    with nullcontext() if resumes else pytest.raises(ConfigError, match="resume=auto"):
        refuse_unfit(config, (), launched(TORCHRUN), resumes=resumes)


def test_ranks_that_are_shown_one_device_are_named() -> None:
    assert shared_device(["a 1", "a 2", "b 1", None]) is None
    said = shared_device(["a 1", "b 1", "a 1"])
    assert said is not None
    for fact in ("ranks 0, 2", "one device", "a 1"):
        assert fact in said


def test_a_reference_is_not_divided() -> None:
    """Before a rank starts.

    The start model that preferences are measured against is needed whole.
    """
    given = [
        "task=preference",
        "data.train=pairs.jsonl",
        "training.nproc_per_node=2",
        "training.device=cpu",
    ]
    with pytest.raises(
        ConfigError, match="distributed=fsdp: task=preference keeps the start model unsharded"
    ):
        refuse_unfit(composed(*given, "data=files", "distributed=fsdp"), (), None)
    refuse_unfit(
        composed(*given, "data=files", "distributed=fsdp", "task.loss_type=orpo"), (), None
    )
    refuse_unfit(composed(*given, "data=files", "distributed=ddp"), (), None)
