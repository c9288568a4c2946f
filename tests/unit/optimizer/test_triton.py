"""The Triton kernels are the loop.

In an environment without Triton on a stand-in for its language.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.optimizer import (
    Adamax,
    AdamWDL,
    AdEMAMix,
    Lamb,
    LazyAdam,
    Lion,
    Mars,
    ScheduleFreeAdamW,
    Soap,
)
from optrun.optimizer.guard import Guard
from optrun.optimizer.kernels import choice
from optrun.optimizer.kernels.report import kernel_of, kernel_row
from optrun.optimizer.kernels.rows import SCALARS
from optrun.optimizer.kernels.triton import availability, launch
from optrun.optimizer.kernels.triton import trial as trials
from optrun.optimizer.state import named_state
from tests import triton_stand_in
from tests.kernel_cases import OWN, OWN_IDS, ends, odd, set_odd_grads
from tests.optimizer_cases import CASES, Case

INSTALLED = find_spec("triton") is not None
DEVICE = "optrun.optimizer.kernels.triton.device"
KERNELS = (
    "adam",
    "adamax",
    "lamb_moments",
    "set_ratios",
    "lamb_update",
    "lion",
    "schedule_free",
    "ademamix",
    "mars_norm",
    "mars_update",
)
CHUNK, BLOCK = 64, 32
LONG = 2 * CHUNK + 37
"""Several chunks, and a tail behind whole blocks."""

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_cuda.py has them on the device"
)


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Any]:
    """The kernels, as the interpreter or its stand-in runs them, in small pieces."""
    with pytest.MonkeyPatch.context() as patch:
        if not INSTALLED:
            patch.delitem(sys.modules, DEVICE, raising=False)
            with triton_stand_in.installed():
                module = importlib.import_module(DEVICE)
        else:
            module = importlib.import_module(DEVICE)
        patch.setattr(module, "CHUNK", CHUNK)
        patch.setattr(module, "_CHUNK", type(module._CHUNK)(CHUNK))
        patch.setattr(module, "_BLOCK", type(module._BLOCK)(BLOCK))
        availability.why_unavailable.cache_clear()
        yield module
    if not INSTALLED:
        del sys.modules[DEVICE]
        del sys.modules[DEVICE.rpartition(".")[0]].device
    availability.why_unavailable.cache_clear()


Kernel = Callable[[str], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return lambda name: monkeypatch.setenv(choice.VARIABLE, name)


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_what_runs_them() -> None:
    assert availability.why_unavailable("cpu") == ""
    assert ("triton.runtime.interpreter" in sys.modules) is INSTALLED


@pytest.mark.parametrize(("case", "options"), OWN, ids=OWN_IDS)
def test_they_are_the_loop(case: Case, options: Mapping[str, Any], use: Kernel) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
        use("loop")
        truth = ends(case, options, dtype, steps=2, long=LONG)
        use("triton")
        for name, value in ends(case, options, dtype, steps=2, long=LONG).items():
            torch.testing.assert_close(
                value, truth[name], rtol=tolerance, atol=tolerance, msg=f"{dtype}: {name}"
            )


@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize(("case", "options"), OWN, ids=OWN_IDS)
def test_a_step_that_is_left_out_changes_nothing(
    case: Case, options: Mapping[str, Any], bad_step: int, use: Kernel
) -> None:
    """Neither weights, state nor counters, and the steps after it are those without it."""
    use("triton")
    ended = []
    for is_left_out in (False, True):
        params = odd(torch.float32, long=LONG)
        optimizer = case.build(params.items(), **options)
        guard = Guard(optimizer)
        for step in range(4):
            if is_left_out and step == bad_step:
                for param in params.values():
                    param.grad = torch.full_like(param, float("nan"))
                guard.step_on_device(torch.ones(()))
                guard.take_back()
            set_odd_grads(params, step)
            guard.step_on_device(torch.zeros(()))
        tensors, metadata = named_state(optimizer)
        weights = {name: param.detach() for name, param in params.items()}
        ended.append(({**weights, **tensors}, metadata))
    (tensors, metadata), (others, other_metadata) = ended
    assert metadata == other_metadata
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # numpy's, in Triton's interpreter
def test_numbers_that_are_none_are_the_loops(use: Kernel) -> None:
    """What overflows, is infinite or is no number; an eps of 0 where nothing has moved yet."""
    grad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e-30, 0.0, 1.0])
    for make in (
        lambda weight: Lamb([weight], weight_decay=0.1, l2=0.1),
        lambda weight: Lamb([weight], eps=0.0),
        lambda weight: Adamax([weight], eps=0.0),
        lambda weight: AdamWDL([weight], eps=0.0),
        lambda weight: LazyAdam([weight], nesterov=True, weight_decay=0.1),
        lambda weight: Lion([weight]),
        lambda weight: ScheduleFreeAdamW([weight]),
        lambda weight: AdEMAMix([weight]),
        lambda weight: Mars([weight], optimize_1d=True),
    ):
        for bad in (grad, grad[3:], grad[6:], torch.zeros(3)):
            found = []
            for name in ("loop", "triton"):
                use(name)
                weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, len(bad)))
                optimizer = make(weight)
                for now in (bad, bad, torch.ones_like(bad)):
                    weight.grad = now.clone()
                    optimizer.step()
                found.append(
                    [
                        weight.detach(),
                        *(v for k, v in optimizer.state[weight].items() if k != "step"),
                    ]
                )
            for ours, loops in zip(found[1], found[0], strict=True):
                torch.testing.assert_close(ours, loops, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["lamb", "adamwdl"])
def test_master_weights_are_the_loops(name: str, use: Kernel) -> None:
    near = {
        torch.float32: 2e-6,
        torch.bfloat16: 2**-7,
    }  # a last bit of a float32 may turn one of a bfloat16
    for options in ({}, {"master_weights": True}):
        use("loop")
        truth = ends(case_of(name), options, torch.bfloat16, steps=2, long=LONG)
        use("triton")
        for key, value in ends(case_of(name), options, torch.bfloat16, steps=2, long=LONG).items():
            tolerance = near[value.dtype] if options else 2**-7
            torch.testing.assert_close(
                value, truth[key], rtol=tolerance, atol=tolerance, msg=f"{options}: {key}"
            )


class Launches:
    """A kernel that writes down its name."""

    def __init__(self, name: str, kernel: Any, seen: list[str]) -> None:
        self.name, self.kernel, self.seen = name, kernel, seen

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        self.seen.append(self.name)
        return self.kernel[grid]


def stepped(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for _ in range(2):
        for param in params:
            param.grad = torch.cos(3 * param.detach())
        optimizer.step()
    return {
        f"{param.numel()}/{i}": v
        for param in params
        for i, v in enumerate([param, *optimizer.state[param].values()])
    }


def tensors(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1.0, 1.0, size)) for size in sizes]


@pytest.mark.parametrize(
    ("make", "launches"),
    [
        (Lamb, ["lamb_moments", "set_ratios", "lamb_update"]),
        (Adamax, ["adamax"]),
        (AdamWDL, ["adam"]),
        (Lion, ["lion"]),
        (ScheduleFreeAdamW, ["schedule_free"]),
        (AdEMAMix, ["ademamix"]),
        (Mars, ["mars_norm", "set_ratios", "mars_update"]),
    ],
)
def test_few_launches_and_the_same_bits_beside_whatever(
    make: Callable[..., Any],
    launches: list[str],
    device: Any,
    use: Kernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use("triton")
    seen: list[str] = []
    for name in KERNELS:
        monkeypatch.setattr(device, name, Launches(name, getattr(device, name), seen))
    sizes = (LONG, 3, BLOCK)
    groups = [{"params": [param], "lr": 0.1 / (1 + i)} for i, param in enumerate(tensors(*sizes))]
    together = stepped(make(groups))
    assert seen == 2 * launches, "however many tensors and groups"
    for i, size in enumerate(sizes):
        for key, value in stepped(make(tensors(size), lr=0.1 / (1 + i))).items():
            assert torch.equal(torch.as_tensor(together[key]), torch.as_tensor(value)), key


def test_whole_vectors_are_loaded_where_all_addresses_allow_it(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Asked:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *given, ALIGNED, **constants: told.append(ALIGNED)

    monkeypatch.setattr(device, "adam", Asked())
    whole = torch.ones(9)
    for one in (whole, whole[1:], whole[4:]):
        for grad, moment in ((one, whole), (whole, one)):
            table = launch.Table("adam", [[whole], [grad], [whole], [moment]])
            table.step([grad.data_ptr()], [dict(SCALARS)], [0])
    assert told == [True, True, False, False, True, True]


def test_tables_are_made_on_the_cpu_whatever_the_default_device_is() -> None:
    tensors = [torch.ones(size) for size in (CHUNK + 1, 0, 5)]
    with torch.device("meta"):
        table = launch.Table("lamb", [tensors] * 4)
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert table._chunks.tolist() == [[0, 0], [0, CHUNK], [2, 0]]
    assert table._tensor_table.tolist() == [
        [addresses[0], addresses[0], addresses[0], 0, CHUNK + 1, 0],
        [addresses[1], addresses[1], addresses[1], 0, 0, 2],
        [addresses[2], addresses[2], addresses[2], 0, 5, 2],
    ]


def test_nothing_to_step(use: Kernel) -> None:
    use("triton")
    optimizer = Lamb([("none", torch.nn.Parameter(torch.ones(0, 3)))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(0, 3)
    optimizer.step()
    assert optimizer.trust_ratios == {"none": 1.0}


def test_what_is_no_list_of_numbers_goes_to_foreach(use: Kernel) -> None:
    use("triton")
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.ones(64)
    optimizer = Lamb([weight])
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(64, dtype=torch.bfloat16)
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="dtype"):
        optimizer.step()


def test_which_are_taken(use: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    lamb = Lamb([weight])
    use("auto")
    assert kernel_of(lamb, "cpu") != "triton", "an interpreter is slow"
    assert kernel_row(lamb, "cuda") == "foreach; the Triton one: there is no CUDA or ROCm device"
    assert kernel_row(Lamb([weight], foreach=True), "cuda") == "foreach"
    assert kernel_row(Soap([weight]), "cuda") == "loop"
    assert "not for mps" in kernel_row(lamb, "mps")
    monkeypatch.setattr(choice, "why_unavailable", lambda device: "")
    for cls in (Lamb, Adamax, AdamWDL, LazyAdam, Lion, ScheduleFreeAdamW, AdEMAMix, Mars):
        optimizer = cls([weight])
        assert kernel_of(optimizer, "cuda") == "triton"
    assert kernel_of(lamb, "cuda", sharded=True) == "foreach"
    assert kernel_of(Lion([weight]), "cuda", sharded=True) == "triton"
    assert kernel_of(Lamb([weight], foreach=False), "cuda") == "loop"
    use("foreach")
    assert kernel_of(lamb, "cuda") == "foreach"
    use("triton")
    assert kernel_of(lamb, "cpu") == "triton"
    assert kernel_of(lamb, "cpu", sharded=True) == kernel_of(Mars([weight]), "cuda", sharded=True)


def test_why_there_are_none(device: Any, use: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    why_unavailable = availability.why_unavailable.__wrapped__
    monkeypatch.setattr(choice, "why_unavailable", why_unavailable)
    use("triton")
    with pytest.raises(ConfigError, match=r"OPTRUN_KERNEL=triton: .* on cuda: there is no CUDA"):
        kernel_of(Lamb([torch.nn.Parameter(torch.ones(1))]), "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "TRITON_INTERPRET is set" in why_unavailable("cuda")
    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(trials, "trial", lambda device: "they fail there: a compiler is missing")
    assert why_unavailable("cuda") == "they fail there: a compiler is missing"
    with pytest.raises(
        ConfigError, match=r"OPTRUN_KERNEL=triton: .* on cpu: they need .*TRITON_INTERPRET=1"
    ):
        kernel_of(Lamb([torch.nn.Parameter(torch.ones(1))]), "cpu")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, DEVICE)
    monkeypatch.delattr(sys.modules[DEVICE.rpartition(".")[0]], "device")
    assert why_unavailable("cuda") == "triton is not installed"


def test_a_device_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(trials, "SIZES", (LONG, 5, 0))
    assert trials.trial(cpu) == ""
    step = launch.Table.step
    steps_of_lamb = []

    def fails(table: launch.Table, *_: Any) -> None:
        raise OSError("no compiler\nat all")

    def idles(table: launch.Table, *_: Any) -> None:
        """Change nothing."""

    def steps_all_but_lamb(table: launch.Table, *numbers: Any) -> None:
        if table._formula != "lamb":
            step(table, *numbers)

    def differs(table: launch.Table, *numbers: Any) -> None:
        step(table, *numbers)
        if table._formula == "lamb":
            steps_of_lamb.append(table)
            if len(steps_of_lamb) == 2:
                address = int(table._tensor_table[0, 0])
                ctypes.c_float.from_address(address).value += 1e-7

    for wrong, message in (
        (fails, "they fail there: OSError: no compiler"),
        (idles, "they compute another lamb there"),
        (steps_all_but_lamb, "they compute another lamb there"),
        (differs, "they compute other bits of lamb there the second time"),
    ):
        monkeypatch.setattr(launch.Table, "step", wrong)
        assert trials.trial(cpu) == message


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed (tests/README.md)")
def test_they_compile_for_devices_that_are_not_here() -> None:
    """NVIDIA's and AMD's; on Triton's compiler alone, in a process that does not interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.triton_compiled"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(rows) == len(KERNELS) * 3 * 2
    for row in rows:
        assert row["atomics"] == 0, f"{row}: sums would be added in any order"
        loads = row["vector loads"] > 0 or row["kernel"] == "set_ratios"
        assert loads, f"{row}: whole blocks are loaded as vectors"
