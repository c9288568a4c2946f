"""What a user does with a sharded checkpoint in one process: verify, evaluate, export, resume."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from optrun.artifacts.atomic import remove_folder
from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.artifacts.run_dir import RunDir
from tests.distributed.shards import divide, group, in_ranks, meshes
from tests.distributed.test_sharded_faults import MODEL, flip
from tests.running import TINY_GPT, optrun, tensors, write_text

HALF, WHOLE = 4, 8


def saves_again(folder: Path, rank: int) -> None:
    """Replace a checkpoint that one process wrote by the same in shards."""
    run, saving = RunDir(folder), group()
    whole = load_checkpoint(run.checkpoint(HALF))
    model, optimizer = (
        divide({name: tensor for name, tensor in part.items() if tensor.dim()}, *meshes(2)["fsdp"])
        | {name: tensor.clone() for name, tensor in part.items() if not tensor.dim()}
        for part in (whole.model, whole.optimizer)
    )
    dist.barrier()
    if rank == 0:
        remove_folder(run.checkpoint(HALF))
    dist.barrier()
    save_checkpoint(run, replace(whole, model=model, optimizer=optimizer), saving=saving)


def words(folder: Path) -> list[str]:
    return [
        *TINY_GPT,
        "data=files",
        f"data.train={write_text(folder, 120)}",
        "optimizer=lamb",
        "scheduler=cosine",
        "scheduler.decay_steps=20",
        "training.per_device_train_batch_size=4",
        "training.logging_steps=2",
        "training.eval_steps=4",
        "checkpoint.keep_last=9",
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`, a run that was never stopped.

    `half`, which was, and whose checkpoint is in shards.
    """
    folder = tmp_path_factory.mktemp("runs")
    assert (
        optrun(*words(folder), f"training.max_steps={WHOLE}", f"hydra.run.dir={folder}/whole") == 0
    )
    assert optrun(*words(folder), f"training.max_steps={HALF}", f"hydra.run.dir={folder}/half") == 0
    run = RunDir(folder / "half")
    shutil.copytree(run.checkpoint(HALF), folder / "as-one-process-wrote-it")
    in_ranks(run.path, partial(saves_again, run.path))
    return folder


def test_verify(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("verify", str(runs / "half")) == 0, capsys.readouterr().err
    suffixes = {
        path.suffix for path in (runs / "half" / "checkpoints").rglob("*") if path.is_file()
    }
    assert suffixes == {"", ".json", ".safetensors"}, "pointers, and no pickle"


def test_evaluate(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for folder in (
        runs / "half" / "checkpoints" / f"step-{HALF:08d}",
        runs / "whole/checkpoints" / f"step-{HALF:08d}",
    ):
        assert optrun("evaluate", str(folder)) == 0
        out = capsys.readouterr().out
        shown.append([line for line in out.splitlines() if "eval/" in line])
    assert shown[0]
    assert shown[0] == shown[1]


def test_export(runs: Path) -> None:
    assert (
        optrun("export", str(runs / "half" / "checkpoints" / "last"), str(runs / "exported")) == 0
    )
    exported = load_file(runs / "exported" / "model.safetensors")
    saved = load_file(runs / "as-one-process-wrote-it" / "model.safetensors")
    assert all(torch.equal(exported[name], saved[name]) for name in exported)


def test_resume_goes_on_to_the_last_bit(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "half", tmp_path / "half")
    assert optrun(f"resume={tmp_path}/half", f"training.max_steps={WHOLE}") == 0
    assert tensors(tmp_path / "half", WHOLE) == tensors(runs / "whole", WHOLE)
    assert optrun("verify", str(tmp_path / "half")) == 0


def test_resume_from_a_damaged_shard(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "half", tmp_path / "half")
    run = RunDir(tmp_path / "half")
    flip(run.checkpoint(HALF) / MODEL)
    assert optrun(f"resume={run.path}", f"training.max_steps={WHOLE}") == 4
    assert f"step-{HALF:08d}/{MODEL}" in capsys.readouterr().err
    for verb in ("evaluate", "verify"):
        assert optrun(verb, str(run.checkpoint(HALF))) == 4
        assert MODEL in capsys.readouterr().err
