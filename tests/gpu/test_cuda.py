"""Train on a CUDA device: precision, exact resume, compile, ranks, sweeps, adapters, kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.model import chunked_loss
from optrun.optimizer import Lamb
from optrun.optimizer.guard import Guard
from optrun.optimizer.kernels.triton.availability import why_unavailable
from optrun.training.loop import Loop
from optrun.training.step import TrainStep
from tests.gpu.device import DEVICE
from tests.kernel_cases import OWN, OWN_IDS, ends
from tests.optimizer_cases import CASES, Case
from tests.resume.test_exact import COMMON, HALF, WHOLE, causal_lm, classification
from tests.running import optrun, records, state, summary, tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", [causal_lm, classification])
def test_resume_is_exact(
    task, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *task(tmp_path),
        *COMMON,
        f"training.precision={precision}",
        f"training.device={DEVICE}",
    ]
    assert optrun(*words, "hydra.run.dir=straight") == 0
    assert optrun(*words, "hydra.run.dir=again") == 0
    assert tensors(Path("straight"), WHOLE) == tensors(Path("again"), WHOLE), (
        "two straight runs are one"
    )
    codes = [
        optrun(*words, "training.max_seconds=1e-9", "hydra.run.dir=stopped", "resume=auto")
        for _ in range(WHOLE)
    ]
    assert codes == [75] * (WHOLE - 1) + [0]
    assert records(Path("straight")) == records(Path("stopped"))
    assert tensors(Path("straight"), WHOLE) == tensors(Path("stopped"), WHOLE)
    assert state(Path("straight"), WHOLE)["random"] == state(Path("stopped"), WHOLE)["random"]
    if precision == "fp16":
        assert (
            state(Path("straight"), WHOLE)["scaler"]
            == state(Path("stopped"), WHOLE)["scaler"]
            != {}
        )


OWN_NAMES = list(dict.fromkeys(case.name for case, _ in OWN))
STEPPED = [case.name for case in CASES if case.name != "soap"]
"""SOAP's bases hang on rounding where few gradients have filled its preconditioners."""


@pytest.mark.device_only
@pytest.mark.parametrize("optimizer", STEPPED)
def test_optimizers_step_as_on_the_cpu(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *causal_lm(tmp_path),
        f"optimizer={optimizer}",
        "training.max_steps=5",
        "training.logging_steps=1",
    ]
    words += [
        "model.config.resid_pdrop=0",
        "model.config.embd_pdrop=0",
        "model.config.attn_pdrop=0",
    ]
    words = list({word.split("=")[0]: word for word in words}.values())
    losses = {}
    for device in ("cpu", DEVICE):
        assert optrun(*words, f"training.device={device}", f"hydra.run.dir={device}-run") == 0
        losses[device] = [record["train/loss"] for record in records(Path(f"{device}-run"))]
    assert losses[DEVICE] == pytest.approx(losses["cpu"], rel=2e-3)


def test_compile_and_checkpointing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *causal_lm(tmp_path),
        "training.max_steps=4",
        "training.logging_steps=1",
        f"training.device={DEVICE}",
    ]
    assert optrun(*words, "hydra.run.dir=plain") == 0
    assert optrun(*words, "hydra.run.dir=compiled", "training.compile=true") == 0
    assert optrun(*words, "hydra.run.dir=recomputed", "training.gradient_checkpointing=true") == 0
    plain = [record["train/loss"] for record in records(Path("plain"))]
    assert [r["train/loss"] for r in records(Path("recomputed"))] == pytest.approx(plain, rel=1e-3)
    assert len(records(Path("compiled"))) == 4


def test_half_of_the_steps_moves_between_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of the GPU goes on on the CPU, and back."""
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), *COMMON[:4], "scheduler=constant", f"training.max_steps={HALF}"]
    words = [
        word for word in words if not word.startswith(("scheduler.decay_steps", "scheduler=cosine"))
    ]
    assert optrun(*words, f"training.device={DEVICE}", "hydra.run.dir=run") == 0
    assert optrun("resume=run", "training.device=cpu", f"training.max_steps={WHOLE}") == 0
    assert summary(Path("run"))["global_step"] == WHOLE
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["hardware"]["device"] == "cpu"
    )


@pytest.mark.device_only
@pytest.mark.parametrize(("case", "options"), OWN, ids=OWN_IDS)
def test_triton_kernels_are_foreach_and_repeat_their_bits(
    case: Case, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_unavailable("cuda") == ""
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
        found = []
        for kernel in ("foreach", "triton", "triton"):
            monkeypatch.setenv("OPTRUN_KERNEL", kernel)
            found.append(ends(case, options, dtype, device="cuda"))
        for name, value in found[1].items():
            torch.testing.assert_close(
                value, found[0][name], rtol=tolerance, atol=tolerance, msg=f"{dtype}: {name}"
            )
            assert torch.equal(value, found[2][name]), name


@pytest.mark.device_only
@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_triton_step_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTRUN_KERNEL", "triton")
    params = [torch.nn.Parameter(torch.ones(size, device="cuda")) for size in (10000, 7)]
    optimizer = next(case for case in CASES if case.name == name).build(
        [(str(i), p) for i, p in enumerate(params)]
    )
    guard = Guard.of(optimizer, torch.device("cuda"))
    assert guard is not None
    before = []
    for step in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        numbers = torch.full((2,), float("nan") if step == 2 else 1.0, device="cuda")
        before = [param.detach().clone() for param in params]
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first one compiles
        try:
            guard.step(numbers)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, before, params)), "the last step was to be left out"


@pytest.mark.device_only
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_step_of_a_run_waits_for_nothing(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an encoder whose batches have one row: transformers reads padding and positions."""
    monkeypatch.chdir(tmp_path)
    take_step = Loop._step
    unread = []

    def watched(loop: Loop) -> None:
        is_quiet = 2 < loop.state.global_step < 5
        torch.cuda.set_sync_debug_mode("error" if is_quiet else "default")
        try:
            take_step(loop)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        unread.append(loop._pending is not None)

    monkeypatch.setattr(Loop, "_step", watched)
    words = [*classification(tmp_path), f"optimizer={optimizer}", "training.device=cuda"]
    words += ["training.max_steps=7", "training.logging_steps=7", "checkpoint=none"]
    words += ["training.per_device_train_batch_size=1", "training.eval_steps=null"]
    words = list({word.split("=")[0]: word for word in words}.values())
    assert optrun(*words) == 0
    assert any(unread)


@pytest.mark.device_only
def test_a_triton_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTRUN_KERNEL", "triton")
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = Lamb([weight])
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="not capturable"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


# What users combine on one device
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_learns_what_no_ranks_learn(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL on one device computes the run without ranks."""
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), "training.max_steps=4", "training.logging_steps=1"]
    words += [f"training.device={DEVICE}"]
    ranks = [f"distributed={strategy}", "training.nproc_per_node=1"]
    assert optrun(*words, "hydra.run.dir=plain") == 0
    assert optrun(*words, *ranks, "hydra.run.dir=ranks") == 0
    plain = [record["train/loss"] for record in records(Path("plain"))]
    assert [record["train/loss"] for record in records(Path("ranks"))] == pytest.approx(
        plain, rel=1e-4
    )


@pytest.mark.parametrize("adapter", ["lora", pytest.param("qlora", marks=pytest.mark.device_only)])
def test_an_adapter_learns(adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), f"training.device={DEVICE}", "training.max_steps=2"]
    assert optrun(*words, "hydra.run.dir=base") == 0
    model = ["model=pretrained", "model.path=base/model", f"adapter={adapter}", "lr=1e-2"]
    steps = ["training.max_steps=8", "training.logging_steps=1", f"training.device={DEVICE}"]
    data = [word for word in words if word.startswith(("data", "task"))]
    assert optrun(*data, *model, *steps, "hydra.run.dir=lora") == 0
    losses = [record["train/loss"] for record in records(Path("lora"))]
    assert losses[-1] < losses[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunks_of_the_loss_are_the_whole_loss(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), "training.max_steps=3", "training.logging_steps=1"]
    words += [f"training.device={DEVICE}", f"training.precision={precision}"]
    losses = {}
    for chunked in ("false", "true"):
        folder = f"chunked-{chunked}"
        assert optrun(*words, f"training.chunked_loss={chunked}", f"hydra.run.dir={folder}") == 0
        losses[chunked] = [record["train/loss"] for record in records(Path(folder))]
    assert losses["true"] == pytest.approx(
        losses["false"], rel=1e-4 if precision == "fp32" else 2e-2
    )


@pytest.mark.device_only
def test_chunks_of_the_loss_are_those_of_liger() -> None:
    liger = pytest.importorskip("liger_kernel.transformers")
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(4096, (256,), generator=generator).cuda()
    ends = []
    for name in ("optrun", "liger"):
        states = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).cuda()
        weight = torch.randn(4096, 64, generator=torch.Generator().manual_seed(2)).cuda() * 0.02
        states.requires_grad_()
        weight.requires_grad_()
        if name == "optrun":
            loss = chunked_loss._RowLosses.apply(states, weight, None, targets)[0].mean()
        else:
            loss = liger.LigerFusedLinearCrossEntropyLoss()(weight, states, targets)
        loss.backward()
        ends.append((loss.detach(), states.grad, weight.grad))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.device_only
def test_a_sweep_over_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), "training.max_steps=2", "training.device=cuda", "seed=0,1"]
    assert optrun("-m", *words, "hydra.sweeper.devices=auto", "hydra.sweep.dir=sweep") == 0
    summaries = [json.loads(path.read_text()) for path in Path("sweep").glob("*/summary.json")]
    assert [each["status"] for each in summaries] == ["finished", "finished"]


def test_resume_under_ranks_is_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), "training.max_steps=6", f"training.device={DEVICE}"]
    words += ["distributed=ddp", "training.nproc_per_node=1"]
    assert optrun("certify", "resume", *words, "--kills", "2") == 0


# Tests that cannot fail prove nothing
# --------------------------------------------------------------------------------------------------


def test_another_step_after_the_resume_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of `test_resume_is_exact` fails if the resumed steps are off by a rounding."""
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), *COMMON, f"training.device={DEVICE}"]
    assert optrun(*words, "hydra.run.dir=straight") == 0
    assert optrun(*words, "training.max_seconds=1e-9", "hydra.run.dir=stopped") == 75
    take_step = TrainStep.compute_gradients

    def step_and_nudge(step: TrainStep, batches: list[Any], *where: object) -> object:
        result = take_step(step, batches, *where)
        with torch.no_grad():
            next(step.model.parameters()).mul_(1 + 1e-6)
        return result

    monkeypatch.setattr(TrainStep, "compute_gradients", step_and_nudge)
    assert optrun("resume=stopped", "training.max_seconds=null") == 0
    assert tensors(Path("straight"), WHOLE) != tensors(Path("stopped"), WHOLE)


@pytest.mark.device_only
def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of the kernels fails if one of two steps uses another learning rate."""
    case, options = OWN[0]
    monkeypatch.setenv("OPTRUN_KERNEL", "foreach")
    expected = ends(case, options, torch.float32, device="cuda")
    monkeypatch.setenv("OPTRUN_KERNEL", "triton")
    computed = ends(case, {**options, "lr": case.lr * 1.001}, torch.float32, device="cuda")
    assert any(
        not torch.allclose(value, expected[name], rtol=2e-6, atol=2e-6)
        for name, value in computed.items()
    )
