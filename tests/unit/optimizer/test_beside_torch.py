"""Our optimizers beside what others put around one.

Torch's gradient scaler, schedulers, states of other classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._python_dispatch import TorchDispatchMode

from optrun.optimizer import AdamW, Lamb
from optrun.optimizer import torch_named as ours
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.composite import Composite
from tests.optimizer_cases import CASES, GOOD, GOOD_IDS, IDS, Case, set_grads, toy

over_cases = pytest.mark.parametrize("case", CASES, ids=IDS)


def built(case: Case, **options: Any) -> tuple[dict[str, torch.nn.Parameter], Any]:
    params = toy()
    return params, case.build(params.items(), **options)


# -- torch.amp.GradScaler
# ---------------------------------------------------------------------------------------------


@over_cases
@pytest.mark.parametrize("path", [None, "foreach", "fused"])
def test_a_step_that_the_scaler_leaves_out_does_not_count(case: Case, path: str | None) -> None:
    """A fused step is run all the same, with `found_inf` set, and changes nothing."""
    if path is not None and path not in build_optimizer(case.name, groups(), lr=0.1).defaults:
        return
    params = toy()
    rates: list[int] = []

    def rate(step: int) -> float:
        rates.append(step)
        return 0.1 / (1 + step)

    optimizer = case.build(params.items(), lr=rate, **({path: True} if path else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(case.idle):
        set_grads(params, step)
        optimizer.step()
    counts = []
    for step, overflow in enumerate((False, True, True, False)):
        set_grads(params, step)
        scaler.scale(torch.ones(()))  # makes the scale
        if overflow:
            params["gain"].grad = torch.tensor(float("inf"))
        before = [param.detach().clone() for param in params.values()]
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, params.values())) == overflow
        counts.append([group["step"] - case.idle for group in optimizer.param_groups])
    assert [set(of_groups) for of_groups in counts] == [{1}, {1}, {1}, {2}]
    assert max(rates) == case.idle + 1, "the lr of a function of the step has not moved on either"


def groups() -> list[dict[str, Any]]:
    return [{"params": list(toy().items())}]


# -- schedulers of others
# ---------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [SCHEDULERS["StepLR"](o), SCHEDULERS["LinearLR"](o)], [2]
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([SCHEDULERS["StepLR"](o)], o),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
}


def test_the_list_holds_all_of_torchs_schedulers() -> None:
    known = {
        name
        for name in lr_scheduler.__all__
        if issubclass(getattr(lr_scheduler, name), LRScheduler)
    }
    assert set(SCHEDULERS) == known - {"LRScheduler"}


@over_cases
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_torchs_schedulers_drive_every_optimizer(case: Case, name: str) -> None:
    """And `set_lr` is refused by each that wraps `step`."""
    params, optimizer = built(case)
    if name in ("OneCycleLR", "CyclicLR") and case.name == "adafactor":
        with pytest.raises(
            ValueError, match="momentum or beta1"
        ):  # torch's word: there is nothing to cycle
            SCHEDULERS[name](optimizer)
        return
    scheduler = SCHEDULERS[name](optimizer)
    wraps_step = name != "ReduceLROnPlateau"
    if wraps_step:
        with pytest.raises(RuntimeError, match="drives the learning rate"):
            optimizer.set_lr(0.5)
    for step in range(4):
        set_grads(params, step)
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert all(param.isfinite().all() for param in params.values())
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    if wraps_step:
        with pytest.raises(RuntimeError, match="drives the learning rate"):
            optimizer.set_lr(0.5)


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize(
    ("main", "other"), [("muon", None), ("lamb", "sgd"), ("lamb", "adamw"), ("sgd", "adafactor")]
)
def test_a_cycled_momentum_reaches_every_member(name: str, main: str, other: str | None) -> None:
    """torch writes one key into all groups; a member that calls it beta1 gets it as that."""
    params = toy()
    split = [{"params": [(name, param)]} for name, param in params.items()]
    if other is not None:
        split[1]["optimizer"] = split[2]["optimizer"] = other  # type: ignore[assignment]
    optimizer = build_optimizer(main, split, lr=0.1)
    assert isinstance(optimizer, Composite)
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
        used = [
            group["betas"][0] if "betas" in group else group.get("momentum")
            for group in optimizer.param_groups
        ]
        wanted = [
            group["momentum"] if "momentum" in group else group["betas"][0]
            for group in optimizer.param_groups
        ]
        assert used == wanted
        assert 0.8 <= wanted[0] <= 0.95
        scheduler.step()
    assert wanted[0] not in (0.9, 0.95), "it has moved"


def test_a_member_that_comes_later_is_cycled_too() -> None:
    """All groups had betas until then."""
    optimizer = Composite(
        [{"params": [("w", torch.nn.Parameter(torch.ones(2)))]}], members={"lamb": {}}
    )
    optimizer.add_param_group(
        {"params": [("b", torch.nn.Parameter(torch.ones(2)))], "optimizer": "sgd"}
    )
    SCHEDULERS["OneCycleLR"](optimizer)
    optimizer.step()
    assert [optimizer.param_groups[0]["betas"][0], optimizer.param_groups[1]["momentum"]] == [
        0.95,
        0.95,
    ]


# -- states of other classes
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "options"), GOOD, ids=GOOD_IDS)
def test_what_is_said_to_be_kept_is_kept(case: Case, options: Any) -> None:
    params, optimizer = built(case, **options)
    set_grads(params, 0)
    optimizer.step()
    for group in optimizer.param_groups:
        member = getattr(optimizer, "members", {}).get(group.get("optimizer"), optimizer)
        for param in group["params"]:
            assert optimizer.state[param].keys() - {"step"} == member.state_keys(param, group)


@pytest.mark.parametrize(
    ("case", "other"), list(itertools.permutations(CASES, 2)), ids=lambda case: case.name
)
def test_the_state_of_another_optimizer_is_refused_by_name(case: Case, other: Case) -> None:
    params, saved = built(other)
    set_grads(params, 0)
    saved.step()
    _, optimizer = built(case)
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(
        ValueError,
        match=f"saved by {type(saved).__name__}, the optimizer is {type(optimizer).__name__}",
    ):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state
    assert [dict(group) for group in optimizer.param_groups] == before


TORCHS = [
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adafactor",
    "ASGD",
    "Rprop",
]
RIGHT = {
    "SGD": {"sgd"},
    "Adafactor": {"adafactor"},
    "Adamax": {"adamax"},
    # The moments of all of these are the same two running means of the same gradients.
    "Adam": {"adam", "lamb", "adamwdl", "lazy_adam"},
    "AdamW": {"adamw", "lamb", "adamwdl", "lazy_adam"},
    "RAdam": {"adam", "lamb", "adamwdl", "lazy_adam"},
}
"""torch's optimizers, whose states say nothing of the class, and those of ours that may go on
from them.
"""


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name != "muon"], ids=[i for i in IDS if i != "muon"]
)
@pytest.mark.parametrize("name", TORCHS)
def test_the_state_of_a_torch_optimizer_is_refused_or_goes_on(case: Case, name: str) -> None:
    params = toy()
    saved = getattr(torch.optim, name)(
        params.items(), lr=0.01, **({"momentum": 0.9} if name == "SGD" else {})
    )
    set_grads(params, 0)
    saved.step()
    again, optimizer = built(case)
    if case.name not in RIGHT.get(name, set()):
        with pytest.raises(ValueError, match=r"the saved state has|saved with"):
            optimizer.load_state_dict(saved.state_dict())
        assert not optimizer.state
        return
    optimizer.load_state_dict(saved.state_dict())
    for key in optimizer.state_keys(again["gain"], optimizer.param_groups[0]):
        assert torch.equal(optimizer.state[again["gain"]][key], saved.state[params["gain"]][key])
    set_grads(again, 1)
    optimizer.step()
    assert int(optimizer.state[again["gain"]].get("step", 2)) == 2
    assert all(param.isfinite().all() for param in again.values())


def test_an_option_that_a_class_does_not_have_is_no_silent_one() -> None:
    for saved, fresh, option in (
        (torch.optim.AdamW, ours.Adam, "decoupled_weight_decay=True"),
        (torch.optim.Adam, ours.AdamW, "decoupled_weight_decay=False"),
    ):
        with pytest.raises(ValueError, match=option):
            fresh(toy().items()).load_state_dict(saved(toy().items()).state_dict())
    up = torch.optim.Adamax(toy().items(), maximize=True).state_dict()
    with pytest.raises(ValueError, match="maximize=True"):
        build_optimizer("adamax", groups(), lr=0.1).load_state_dict(up)


def test_a_subclass_takes_the_state_of_its_parent() -> None:
    class Mine(Lamb):
        pass

    params, parent = toy(), None
    parent = Lamb(params.items())
    set_grads(params, 0)
    parent.step()
    mine = Mine(toy().items())
    mine.load_state_dict(parent.state_dict())
    assert len(mine.state) == len(params)
    with pytest.raises(ValueError, match="saved by Mine, the optimizer is Lamb"):
        parent.load_state_dict(mine.state_dict())


# -- parameters that come twice
# ---------------------------------------------------------------------------------------


@over_cases
def test_a_parameter_that_comes_twice_is_named(case: Case) -> None:
    params = toy()
    bias, gain = ("body.bias", params["body.bias"]), ("gain", params["gain"])
    tied = ("head.bias", params["body.bias"])
    for given, message in (
        ([{"params": [gain, bias, bias]}], r"'body.bias' appears twice"),
        ([{"params": [gain, bias]}, {"params": [bias]}], r"'body.bias' appears twice"),
        ([{"params": [gain, bias, tied]}], r"'body.bias' and 'head.bias' are one parameter"),
        (
            [{"params": [gain, bias]}, {"params": [tied], "optimizer": "sgd"}],
            r"'body.bias' and 'head.bias' are one",
        ),
        (
            [{"params": [gain[1], bias[1], bias[1]]}],
            r"'group 0 parameter 1' and 'group 0 parameter 2' are one",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            case.build(given)
    optimizer = case.build([{"params": [gain, bias]}])
    assert isinstance(optimizer, NamedOptimizer)
    count = len(optimizer.param_groups)
    later = {"optimizer": "sgd"} if case.name == "muon" else {}
    with pytest.raises(ValueError, match=r"'body.bias' and 'head.bias' are one parameter"):
        optimizer.add_param_group({"params": [tied], **later})
    assert len(optimizer.param_groups) == count


def test_the_plain_class_says_it_too() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"parameter 'w' appears twice"):
        AdamW([("w", weight), ("w", weight)])


# -- groups that are stepped in one call
# ------------------------------------------------------------------------------------------


class FusedCalls(TorchDispatchMode):
    """Inside, notes how many tensors each call of torch's fused kernel gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_adam" in str(func):
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def in_groups() -> list[dict[str, Any]]:
    """Two equal groups, a different one, one like the first two, and four equal ones."""
    params = list(toy().items())
    return [
        {"params": params[:1], "weight_decay": 0.1},
        {"params": params[1:2], "weight_decay": 0.1},
        {"params": params[2:3], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": params[3:], "weight_decay": 0.1},
        *({"params": [(f"more.{name}", param)]} for name, param in toy(seed=1).items()),
    ]


def as_torch_wants_them(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": [param for _, param in group["params"]]} for group in groups]


def params_of(optimizer: Optimizer) -> dict[str, torch.nn.Parameter]:
    params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {str(index): param for index, param in enumerate(params)}


def move_all_rates(optimizer: Optimizer) -> Optimizer:
    """As a schedule does."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return optimizer


def part_the_first(optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups[0]["lr"] *= 3
    return optimizer


def freeze_the_first(optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"]
    params_of(optimizer)["0"].requires_grad_(requires_grad=False)
    params_of(optimizer)["0"].grad = None
    return optimizer


def as_loaded(optimizer: Optimizer) -> Optimizer:
    """A fresh one with the same weights and the state dict of this one."""
    groups = in_groups()
    options = {"lr": 1.0, "amsgrad": optimizer.defaults["amsgrad"]}
    fresh = type(optimizer)(
        groups if isinstance(optimizer, NamedOptimizer) else as_torch_wants_them(groups), **options
    )
    fresh.load_state_dict(optimizer.state_dict())
    for param, before in zip(params_of(fresh).values(), params_of(optimizer).values(), strict=True):
        param.data.copy_(before.detach())
        param.requires_grad_(before.requires_grad)
    return fresh


def step_with_gradients(optimizer: Optimizer, number: int) -> list[int]:
    """How many tensors each call of the fused kernel got."""
    params = params_of(optimizer)
    set_grads(params, number)
    for param in params.values():
        if not param.requires_grad:
            param.grad = None
    with FusedCalls() as calls:
        optimizer.step()
    return calls.sizes


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_equal_groups_in_one_call_are_stepped_as_torch_steps_each(name: str, amsgrad: bool) -> None:
    """Bit for bit; what changes between two steps changes which groups share a call."""
    options = {"lr": 0.05, "amsgrad": amsgrad}
    mine = getattr(ours, name)(in_groups(), **options)
    torchs = getattr(torch.optim, name)(as_torch_wants_them(in_groups()), fused=True, **options)
    numbers = itertools.count()
    for change, sizes in (
        (lambda optimizer: optimizer, [2, 1, 1, 4]),
        (move_all_rates, [2, 1, 1, 4]),
        (part_the_first, [1, 1, 1, 1, 4]),
        (freeze_the_first, [1, 1, 1, 4]),
        (as_loaded, [1, 1, 1, 4]),
    ):
        mine, torchs = change(mine), change(torchs)
        for number in itertools.islice(numbers, 2):
            assert step_with_gradients(mine, number) == sizes
            assert set(step_with_gradients(torchs, number)) == {1}
        assert_same(mine, torchs)


def assert_same(optimizer: Optimizer, other: Optimizer) -> None:
    for param, truth in zip(params_of(optimizer).values(), params_of(other).values(), strict=True):
        assert torch.equal(param, truth)
        torch.testing.assert_close(
            dict(optimizer.state[param]), dict(other.state[truth]), rtol=0, atol=0
        )
