"""Every kernel is the loop, whatever it is given.

Which one is taken, and why it is not the compiled one.
"""

from __future__ import annotations

import math
import platform
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.optimizer import Adamax, AdamW, Lamb, LazyAdam, Lion, Soap, torch_named
from optrun.optimizer.kernels import build, choice, library
from optrun.optimizer.kernels.report import kernel_of, kernel_row, refuse_different_kernels
from optrun.optimizer.kernels.triton.availability import why_unavailable
from tests.kernel_cases import COMPILED, OWN, OWN_IDS, ends
from tests.optimizer_cases import CASES, Case

KERNELS = ["compiled"] if build.compiler() or library.library().loaded else []


@pytest.fixture(scope="module", autouse=True)
def _built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compiled kernel, also in a checkout that was not installed."""
    if library.library().loaded is not None or not KERNELS:
        yield
        return
    folder = tmp_path_factory.mktemp("kernel")
    assert build.build(folder) is None
    made = library.load(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: made)
        yield


Kernel = Callable[[str], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return lambda name: monkeypatch.setenv(choice.VARIABLE, name)


@pytest.mark.parametrize(("case", "options"), OWN, ids=OWN_IDS)
def test_every_kernel_is_the_loop(case: Case, options: Mapping[str, Any], use: Kernel) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
        use("loop")
        truth = ends(case, options, dtype)
        for kernel in KERNELS:
            use(kernel)
            for name, value in ends(case, options, dtype).items():
                told = f"{kernel}, {dtype}: {name}"
                torch.testing.assert_close(
                    value, truth[name], rtol=tolerance, atol=tolerance, msg=told
                )


def test_mars_a_tensor_at_a_time_is_all_at_once(
    use: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("loop")
    case = next(case for case in CASES if case.name == "mars")
    once = ends(case, {"optimize_1d": True}, torch.float32)
    monkeypatch.setattr("optrun.optimizer.mars.PART_SIZE", 1)
    for name, value in ends(case, {"optimize_1d": True}, torch.float32).items():
        assert torch.equal(value, once[name]), name


@pytest.mark.parametrize("name", COMPILED)
def test_rounding_drifts_no_further_than_the_loops(name: str, use: Kernel) -> None:
    case = next(case for case in CASES if case.name == name)

    def weights(dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(64, generator=generator)
        param = torch.nn.Parameter(start.to(dtype))
        optimizer = case.build([("w", param)], lr=1e-3)
        for _ in range(150):
            param.grad = torch.randn(64, generator=generator).to(dtype)
            optimizer.step()
        return param.detach().double()

    use("loop")
    exact = weights(torch.float64)
    loop = (weights(torch.float32) - exact).abs().max().item()
    for kernel in KERNELS:
        use(kernel)
        assert (weights(torch.float32) - exact).abs().max().item() < 1.5 * loop, kernel


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("bad", [[1e25], [math.nan], [math.inf, -math.inf], [1e-30]], ids=str)
def test_numbers_that_overflow_do_as_in_the_loop(name: str, bad: list[float], use: Kernel) -> None:
    """The square of 1e25 is infinite in float32: such an entry stands still, and gets no NaN."""
    case = next(case for case in CASES if case.name == name)
    found = []
    for kernel in ("loop", *KERNELS):
        use(kernel)
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(2, 32))
        optimizer = case.build([("w", weight)])
        for step in range(3):
            weight.grad = torch.cos(torch.arange(64.0) + step).view(2, 32)
            if step == 1:
                weight.grad[0, : len(bad)] = torch.tensor(bad)
            optimizer.step()
        found.append(weight.detach())
    for weight in found[1:]:
        torch.testing.assert_close(weight, found[0], rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.skipif(not KERNELS, reason="there is no C compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_threads_change_no_bit(name: str, use: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == name)
    use("compiled")
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(library.torch, "get_num_threads", lambda threads=threads: threads)
        params = {
            f"w{i}": torch.nn.Parameter(torch.linspace(-1, 1, 9 * 16384 + i)) for i in range(2)
        }
        optimizer = case.build(params.items())
        for step in range(2):
            for param in params.values():
                param.grad = torch.cos(param.detach() * (step + 3))
            optimizer.step()
        found.append(params)
    for params in found[1:]:
        assert all(torch.equal(found[0][name], param) for name, param in params.items())


@pytest.mark.slow
@pytest.mark.skipif(
    not KERNELS or (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="no compiler, or another processor",
)
def test_instruction_sets_change_no_bit(
    tmp_path: Path, use: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loader picks, and each set for itself, as far as this processor has it."""
    use("compiled")
    has = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    found = []
    for flags in ((), ("-DFAST=",), ("-DFAST=", "-mavx2"), ("-DFAST=", "-mavx512f")):
        if flags and flags[-1].startswith("-m") and flags[-1].removeprefix("-m") not in has:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
            folder = tmp_path / str(len(found))
            folder.mkdir()
            assert build.build(folder) is None
            made = library.load(folder)
        assert made.loaded is not None
        monkeypatch.setattr(library, "library", lambda made=made: made)
        cases = [
            (case, options, dtype)
            for case, options in OWN
            for dtype in (torch.float32, torch.float64)
        ]
        found.append([ends(*case) for case in cases])
    for own in found[1:]:
        for here, truth in zip(own, found[0], strict=True):
            torch.testing.assert_close(here, truth, rtol=0, atol=0)


def test_what_no_kernel_computes_the_loop_does(use: Kernel) -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def taken(optimizer: torch.optim.Optimizer, **given: Any) -> str:
        return kernel_of(optimizer, **{"device": "cpu", **given})

    use("auto")
    best = "compiled" if KERNELS else "loop"
    assert taken(Lamb([weight])) == best
    assert taken(Lamb([weight], foreach=True)) == "foreach"
    assert taken(Lamb([weight], foreach=False)) == "loop"
    assert taken(Lamb([weight]), device="cuda") == (
        "foreach" if why_unavailable("cuda") else "triton"
    )
    assert taken(Lamb([weight]), sharded=True) == "foreach"
    assert taken(AdamW([weight])) == "torch"
    assert taken(Lion([weight])) == taken(Lion([weight]), sharded=True) == best
    assert taken(Soap([weight])) == taken(Soap([weight]), device="cuda") == "loop"
    assert taken(Lion([weight]), device="cuda") == taken(Lamb([weight]), device="cuda")
    assert taken(Lion([weight], foreach=True)) == "foreach"
    groups = [
        {"params": [weight]},
        {"params": [torch.nn.Parameter(torch.ones(1))], "foreach": True},
    ]
    assert taken(Adamax(groups)) == ("compiled, foreach" if best == "compiled" else "foreach, loop")
    use("foreach")
    assert taken(LazyAdam([weight])) == "foreach"
    use("quick")
    weight.grad = torch.ones(3)
    with pytest.raises(ConfigError, match=r"OPTRUN_KERNEL='quick'.*compiled"):
        Lamb([weight]).step()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "other",
    [torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.float64), torch.zeros(1)],
    ids=["narrower", "wider", "shorter"],
)
def test_state_of_another_kind_is_no_memory_of_a_kernel(
    name: str, other: torch.Tensor, use: Kernel
) -> None:
    use(name)
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.ones(64)
    optimizer = Lamb([weight])
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = other
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"dtype|shape"):
        optimizer.step()


def _negative(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x + 1], dim=-1)[..., 0]


def _displaced(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_ones(3), x.flatten()])[3:].view(x.shape)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.clone()


class _Kind(torch.Tensor):
    """A subclass."""


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": _negative,
    "transposed": _transposed,
    "strided": _strided,
    "displaced": _displaced,
    "channels last": _channels_last,
    "subclass": lambda x: x.clone().as_subclass(_Kind),
}
OF_GRADIENTS = {
    **LAYOUTS,
    "expanded": lambda x: x.mean().expand(x.shape),
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}
PLAIN = {"expanded": lambda x: x.mean().expand(x.shape).clone(), "zero": torch.zeros_like}
"""What a gradient of another layout says, where that is not what it is made of."""


def _trained(
    case: Case, options: Mapping[str, Any], grad_of: Any, param_of: Any = torch.clone
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((12, 9), (3, 4, 2, 2))
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    params = [torch.nn.Parameter(param_of(value), requires_grad=True) for value in start]
    optimizer = case.build([("body.weight", params[0]), ("body.image", params[1])], **options)
    for _ in range(4):
        for param in params:
            param.grad = grad_of(torch.randn(param.shape, generator=generator, dtype=torch.float64))
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_is_the_same_however_tensors_lie_in_memory(case: Case, use: Kernel) -> None:
    """By the loop, by foreach and by every kernel.

    Of each tensor the loop over plain ones is the truth.
    """
    ways: list[tuple[str, dict[str, Any]]] = [
        (kernel, {}) for kernel in ("loop", "foreach", *KERNELS)
    ]
    ways += [("auto", {"foreach": flag}) for flag in (False, True) if case.foreach]
    tolerance = 1e-6 if case.name == "soap" else 1e-12
    use("loop")
    truths = {layout: _trained(case, {}, PLAIN.get(layout, torch.clone)) for layout in OF_GRADIENTS}
    for kernel, options in ways:
        use(kernel)
        for layout, change in OF_GRADIENTS.items():
            for found, truth in zip(_trained(case, options, change), truths[layout], strict=True):
                told = f"{kernel}, {options}: gradients that are {layout}"
                torch.testing.assert_close(found, truth, rtol=tolerance, atol=tolerance, msg=told)
        for layout, change in LAYOUTS.items():
            try:
                made = _trained(case, options, torch.clone, change)
            except RuntimeError as error:
                if layout == "negative" and "negation" in str(
                    error
                ):  # torch's foreach refuses to write there
                    continue
                raise
            for found, truth in zip(made, truths["negative"], strict=True):
                told = f"{kernel}, {options}: parameters that are {layout}"
                torch.testing.assert_close(
                    found.as_subclass(torch.Tensor), truth, rtol=tolerance, atol=tolerance, msg=told
                )


@pytest.mark.parametrize("name", COMPILED)
def test_tensors_that_share_memory_are_stepped_one_after_another(name: str, use: Kernel) -> None:
    case = next(case for case in CASES if case.name == name)

    def trained() -> torch.Tensor:
        memory = torch.linspace(-1, 1, 40, dtype=torch.float64)
        params = [torch.nn.Parameter(memory[:24]), torch.nn.Parameter(memory[16:])]
        optimizer = case.build([(f"w{i}", param) for i, param in enumerate(params)])
        for _ in range(3):
            for param in params:
                param.grad = param.detach()
            optimizer.step()
        return memory

    use("loop")
    truth = trained()
    for kernel in KERNELS:
        use(kernel)
        assert torch.equal(trained(), truth), kernel


def test_plain_tensors_are_not_laid_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual step: one look at all tensors, none at each."""
    looked: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch_named, "_with_strides_of", lambda param, tensor: looked.append(tensor) or tensor
    )
    params = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2, 3).t())]
    for param, count in zip(params, (0, 3), strict=True):
        param.grad = torch.ones(3, 2)
        torch_named.AdamW([("w", param)], fused=True).step()
        assert len(looked) == count


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_fused_kernels_of_torch_write_into_no_gaps(name: str) -> None:
    """State of another layout is laid out as its parameter.

    A parameter with gaps is refused, or not stepped fused.
    """
    case = next(case for case in CASES if case.name == name)
    memory = torch.zeros(4, 6)
    param = torch.nn.Parameter(memory[:, ::2])
    param.grad = torch.ones(4, 3)
    case.build([("w", param)]).step()
    assert not memory[:, 1::2].any()
    assert memory[:, ::2].all()
    with pytest.raises(RuntimeError, match=r"fused=True.*\(4, 3\).*fused=False"):
        case.build([("w", param)], fused=True).step()
    found = []
    for flag in (False, True):
        moved = torch.nn.Parameter(torch.linspace(-1, 1, 24).view(2, 3, 2, 2))
        optimizer = case.build([("w", moved)], fused=flag)
        for step in range(3):
            moved.grad = torch.cos(torch.arange(24.0) * (step + 1)).view(2, 3, 2, 2)
            optimizer.step()
            moved.data = moved.data.contiguous(memory_format=torch.channels_last)
        found.append(moved.detach())
    torch.testing.assert_close(found[1], found[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["loop", "foreach", *KERNELS])
def test_a_graph_from_before_the_step_is_refused(name: str, use: Kernel) -> None:
    use(name)
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight**3).sum()
    loss.backward(retain_graph=True)
    Lamb([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_why_there_is_none(tmp_path: Path, use: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not built" in library.load(tmp_path).missing
    (tmp_path / build.LIBRARY).write_bytes(b"no library")
    broken = library.load(tmp_path)
    assert "does not load" in broken.missing
    monkeypatch.setattr(library, "library", lambda: broken)
    use("compiled")
    with pytest.raises(ConfigError, match=r"OPTRUN_KERNEL=compiled: .*does not load"):
        kernel_of(Lamb([torch.nn.Parameter(torch.ones(1))]), "cpu")
    use("auto")
    taken = kernel_of(Lamb([torch.nn.Parameter(torch.ones(1))]), "cpu")
    assert taken == "loop"
    assert "does not load" in kernel_row(Lamb([torch.nn.Parameter(torch.ones(1))]), "cpu")
    assert kernel_row(Soap([torch.nn.Parameter(torch.ones(1))]), "cpu") == "loop"


def test_a_library_of_another_source_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = SimpleNamespace(optrun_digest=lambda: b"of before")
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: stale)
    (tmp_path / build.LIBRARY).touch()
    assert "another step.c" in library.load(tmp_path).missing


def test_without_a_compiler_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen, said in (
        ("no-such-compiler", "no C compiler"),
        ("false", "false failed: exit code 1"),
    ):
        monkeypatch.setenv("CC", chosen)
        assert said in str(build.build(tmp_path))
    with pytest.raises(SystemExit, match="no compiled kernel: false failed"):
        runpy.run_module("optrun.optimizer.kernels", run_name="__main__")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert "no C compiler" in str(build.build(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: ["false"])
    assert "cannot be written" in str(build.build(tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_would_step_by_different_kernels_are_refused() -> None:
    refuse_different_kernels(["compiled, torch", "compiled, torch"])
    with pytest.raises(ConfigError, match=r"rank 0: triton, rank 1: foreach.*OPTRUN_KERNEL"):
        refuse_different_kernels(["triton", "foreach"])
