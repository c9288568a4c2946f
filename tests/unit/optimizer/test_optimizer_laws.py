"""What holds for every optimizer a user can type."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from optrun.base.errors import ConfigError
from optrun.config.schema.optimizer import SCHEMAS
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.classes import LIBRARY_CHOICE, class_of
from optrun.optimizer.footprint import state_bytes
from optrun.optimizer.state import TRAINED, load_named_state, named_state
from optrun.scheduler import build_scheduler
from tests.optimizer_cases import CASES, GOOD, GOOD_IDS, IDS, Case, quadratic, set_grads, toy

over_cases = pytest.mark.parametrize("case", CASES, ids=IDS)
over_good = pytest.mark.parametrize(("case", "options"), GOOD, ids=GOOD_IDS)


def groups_of(params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Three groups that differ in numbers."""
    return [
        {"params": [("body.weight", params["body.weight"])], "weight_decay": 0.1, "role": "matrix"},
        {
            "params": [("body.bias", params["body.bias"]), ("gain", params["gain"])],
            "lr_scale": 0.5,
            "weight_decay": 0.0,
        },
        {"params": [("start", params["start"])], "lr": 0.003},
    ]


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = named_state(optimizer)[0]
    return {key: value.clone() for key, value in tensors.items() if not key.endswith(f"/{TRAINED}")}


def test_the_table_holds_every_choice() -> None:
    assert {*IDS, LIBRARY_CHOICE} == set(SCHEMAS)


@over_good
def test_goes_down_on_a_quadratic(case: Case, options: Mapping[str, Any]) -> None:
    params = toy()
    optimizer = case.build(params.items(), **options)
    first = quadratic(params).item()
    for _ in range(60):
        optimizer.zero_grad()
        quadratic(params).backward()
        optimizer.step()
    assert quadratic(params).item() < 0.8 * first


@over_good
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_foreach_is_the_loop(case: Case, options: Mapping[str, Any], dtype: torch.dtype) -> None:
    if not case.foreach:
        return
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-14}[dtype]
    ends = []
    for foreach in (False, True):
        params = toy(dtype)
        optimizer = case.build(groups_of(params), **{"foreach": foreach, **options})
        for step in range(6):
            set_grads(params, step)
            optimizer.step()
        ends.append({**params, **state_tensors(optimizer)})
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=tolerance, atol=tolerance, msg=name)


@over_good
def test_groups_are_several_optimizers(case: Case, options: Mapping[str, Any]) -> None:
    if any(key.startswith("exclude") for key in options):
        options = {**options, "unmatched_patterns": "ignore"}
    together, apart = toy(), toy()
    one = case.build(groups_of(together), **options)
    several = [case.build([group], **options) for group in groups_of(apart)]
    for step in range(5):
        set_grads(together, step)
        set_grads(apart, step)
        one.step()
        for optimizer in several:
            optimizer.step()
    for name, param in together.items():
        torch.testing.assert_close(apart[name], param, rtol=1e-6, atol=1e-7)


@over_good
@pytest.mark.parametrize("way", ["state_dict", "named_state"])
def test_state_goes_round_by_name_in_any_order(
    case: Case, options: Mapping[str, Any], way: str
) -> None:
    params = toy()
    optimizer = case.build(groups_of(params), **options)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    again = {name: torch.nn.Parameter(param.detach().clone()) for name, param in params.items()}
    shuffled = [{**group, "params": group["params"][::-1]} for group in groups_of(again)[::-1]]
    fresh = case.build(shuffled, **options)
    if way == "state_dict":
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        tensors, meta = named_state(optimizer)
        load_named_state(fresh, tensors, json.loads(json.dumps(meta)))
    for step in range(3, 6):
        for run, one in ((params, optimizer), (again, fresh)):
            set_grads(run, step)
            one.step()
    for name, param in params.items():
        assert torch.equal(again[name], param), name
    assert fresh.param_groups[0]["step"] == 6


@over_cases
def test_state_keeps_its_dtypes(case: Case) -> None:
    """torch's own load turns the float32 moments of a bfloat16 parameter into bfloat16."""
    params = toy(torch.bfloat16)
    options = (
        {"master_weights": True} if "master_weights" in case.build(params.items()).defaults else {}
    )
    optimizer = case.build(params.items(), **options)
    set_grads(params, 0)
    optimizer.step()
    before = state_tensors(optimizer)
    if case.wide:
        assert all(value.dtype == torch.float32 for value in before.values())
    fresh = case.build(params.items(), **options)
    fresh.load_state_dict(optimizer.state_dict())
    after = state_tensors(fresh)
    assert {key: (value.dtype, value.device) for key, value in after.items()} == {
        key: (value.dtype, value.device) for key, value in before.items()
    }
    assert all(torch.equal(after[key], value) for key, value in before.items())


@over_cases
def test_loading_refuses_the_first_other_name_or_shape(case: Case) -> None:
    params = toy()
    optimizer = case.build(groups_of(params))
    set_grads(params, 0)
    optimizer.step()
    tensors, meta = named_state(optimizer)
    renamed = [
        {
            **group,
            "params": [
                ("body.wait" if name == "body.weight" else name, p) for name, p in group["params"]
            ],
        }
        for group in groups_of(toy())
    ]
    wider = toy()
    wider["body.bias"] = torch.nn.Parameter(torch.zeros(8))
    for groups, message in (
        (renamed, r"no parameter 'body.wait', which the optimizer has. Did you mean body.weight"),
        (groups_of(wider), r"'body.bias'"),
    ):
        fresh = case.build(groups)
        with pytest.raises(ValueError, match=message):
            load_named_state(fresh, tensors, meta)
        if (
            case.name != "sgd" or "wait" in message
        ):  # without momentum there is nothing to have a shape
            with pytest.raises(ValueError, match=message):
                fresh.load_state_dict(optimizer.state_dict())
        assert not fresh.state
    if tensors:
        lost = dict(tensors)
        key, value = lost.popitem()
        with pytest.raises(ValueError, match=f"lacks the tensor '{key}'"):
            load_named_state(case.build(groups_of(toy())), lost, meta)
        with pytest.raises(ValueError, match=r"'body.bias/left', which belongs to nothing"):
            load_named_state(
                case.build(groups_of(toy())), {**tensors, "body.bias/left": value}, meta
            )


@over_good
def test_no_gradient_changes_nothing(case: Case, options: Mapping[str, Any]) -> None:
    params = toy()
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = case.build(params.items(), **options)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0
    for step in range(case.idle + 1):
        set_grads(params, step)
        params["body.bias"].grad = params["start"].grad = None
        optimizer.step()
    assert torch.equal(params["body.bias"], before["body.bias"])
    assert torch.equal(params["start"], before["start"])
    assert not torch.equal(params["body.weight"], before["body.weight"])
    assert not optimizer.state.get(params["body.bias"])
    assert optimizer.param_groups[0]["step"] == case.idle + 1


@over_good
def test_float32_follows_float64(case: Case, options: Mapping[str, Any]) -> None:
    if not case.exact:
        return
    narrow, wide = toy(torch.float32), toy(torch.float64)
    runs = [(run, case.build(groups_of(run), **options)) for run in (narrow, wide)]
    for step in range(8):
        for run, optimizer in runs:
            set_grads(run, step)
            optimizer.step()
    for name, param in wide.items():
        torch.testing.assert_close(narrow[name].double(), param, rtol=1e-5, atol=1e-5, msg=name)


@over_cases
def test_bad_arguments_are_refused_by_name(case: Case) -> None:
    for options, error, message in case.bad:
        with pytest.raises(ConfigError, match=message):
            case.build(toy().items(), **options)
        if case.name != "muon":
            with pytest.raises(error, match=message):
                class_of(case.name)(toy().items(), **options)


@over_cases
def test_groups_are_refused_by_name(case: Case) -> None:
    for extra, message in (
        ({"bettas": (0.9, 0.9)}, r"a parameter group of \w+ has no option 'bettas'"),
        ({"lr_scale": -1}, r"lr_scale=-1: expected a number of 0 or more"),
        ({"lr": -1}, r"lr=-1: expected a number of 0 or more"),
    ):
        group = {"params": list(toy().items()), **extra}
        with pytest.raises(ConfigError, match=message):
            case.build([group])
    params = toy()
    with pytest.raises(ConfigError, match="'gain'"):
        case.build(
            [{"params": [("gain", params["gain"])]}, {"params": [("gain", params["start"])]}]
        )


@over_good
def test_config_builds_it_again(case: Case, options: Mapping[str, Any]) -> None:
    optimizer = case.build(toy().items(), **options)
    assert isinstance(optimizer, NamedOptimizer)
    config = optimizer.get_config()
    own = {} if case.name == "muon" else options  # its companion's are not its own
    said = {
        "lr": optimizer.get_lr(),
        **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()},
    }
    assert {key: config.get(key) for key in said} == said
    if not any(callable(value) for value in options.values()):
        assert json.loads(json.dumps(config)) == config
    assert (
        type(optimizer)
        .from_config(
            toy().items() if case.name != "muon" else [{"params": list(toy().items())[:1]}], config
        )
        .get_config()
        == config
        or case.name == "muon"
    )
    with pytest.raises(TypeError, match="has no option 'bogus'"):
        type(optimizer).from_config(toy().items(), {**config, "bogus": 1})


@over_cases
def test_lr_is_read_set_and_guarded(case: Case) -> None:
    params = toy()
    optimizer = case.build(groups_of(params), lr=0.02)
    assert isinstance(optimizer, NamedOptimizer)
    assert optimizer.get_lr() == 0.02
    optimizer.set_lr(0.04)
    assert optimizer.get_lr() == 0.04
    by_name = {
        name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]
    }
    assert by_name == {"body.weight": 0.04, "body.bias": 0.02, "gain": 0.02, "start": 0.003}
    for wrong in (-1, "x", float("inf")):
        with pytest.raises((TypeError, ValueError), match="lr="):
            optimizer.set_lr(wrong)  # type: ignore[arg-type]
    optimizer._lr_driven_by = "cosine"
    with pytest.raises(RuntimeError, match=r"cosine drives the learning rate"):
        optimizer.set_lr(0.1)


@over_cases
def test_two_drivers_of_one_lr_are_refused_at_the_step(case: Case) -> None:
    """A group that comes later, with a function of the step, under a schedule."""
    params = toy()
    named = list(params.items())
    optimizer = case.build(named[:1], lr=0.1)
    build_scheduler(optimizer, "cosine", num_training_steps=3)
    optimizer.add_param_group(
        {"params": named[1:] if case.name != "muon" else later_matrix(), "lr": lambda _: 0.5}
    )
    set_grads(params, 0)
    with pytest.raises(RuntimeError, match="cosine drives it too: keep one of the two"):
        optimizer.step()


def later_matrix() -> list[tuple[str, torch.nn.Parameter]]:
    """A parameter that Muon takes, too."""
    return [("later.weight", torch.nn.Parameter(torch.ones(2, 2)))]


@over_cases
def test_torch_schedulers_and_copies_work(case: Case) -> None:
    params = toy()
    optimizer = case.build(params.items(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    set_grads(params, 0)
    optimizer.step()
    scheduler.step()
    assert isinstance(optimizer, NamedOptimizer)
    assert optimizer.get_lr() == pytest.approx(0.05)
    with pytest.raises(RuntimeError, match="torch lr scheduler"):
        optimizer.set_lr(0.1)
    twin = copy.deepcopy(optimizer)
    held = {
        name: param
        for group in twin.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
    for run, one in ((params, optimizer), (held, twin)):
        set_grads(run, 1)
        one.step()
    assert all(torch.equal(held[name], param) for name, param in params.items())
    assert twin.param_groups[0]["step"] == 2


@over_cases
def test_lr_and_decay_may_be_functions_of_the_step(case: Case) -> None:
    params, fixed = toy(), toy()
    rates, decays = [0.1, 0.05, 0.01], [0.0, 0.1, 0.2]
    optimizer = case.build(
        params.items(), lr=lambda step: rates[step], weight_decay=lambda step: decays[step]
    )
    other = case.build(fixed.items(), lr=rates[0], weight_decay=decays[0])
    for step in range(3):
        for group in other.param_groups:
            group["lr"], group["weight_decay"] = rates[step], decays[step]
        for run, one in ((params, optimizer), (fixed, other)):
            set_grads(run, step)
            one.step()
        assert optimizer.get_lr() == rates[step]  # type: ignore[attr-defined]
    for name, param in params.items():
        assert torch.equal(fixed[name], param), name
    with pytest.raises(RuntimeError, match="a function of the step"):
        optimizer.set_lr(0.1)  # type: ignore[attr-defined]


@over_cases
def test_a_sparse_gradient_is_taken_or_refused(case: Case) -> None:
    table = torch.nn.Parameter(torch.ones(6, 2))
    other = torch.nn.Parameter(torch.ones(6, 2))
    optimizer, dense = case.build([("table", table)]), case.build([("table", other)])
    values = torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.5, 0.5]])
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[3, 1, 3]]), values, (6, 2), check_invariants=True
    )
    other.grad = table.grad.to_dense()
    if case.sparse == "refused":
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        return
    optimizer.step()
    dense.step()
    touched = [1, 3]
    torch.testing.assert_close(table[touched], other[touched])
    if case.sparse == "rows":
        assert torch.equal(table[[0, 2, 4, 5]], torch.ones(4, 2))
    else:
        torch.testing.assert_close(table, other)


@over_good
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_are_those_of_the_state(
    case: Case, options: Mapping[str, Any], dtype: torch.dtype
) -> None:
    params = toy(dtype)
    shapes = {name: torch.empty_like(param, device="meta") for name, param in params.items()}
    before = [state_bytes(case.build(given.items(), **options)) for given in (params, shapes)]
    optimizer = case.build(params.items(), **options)
    set_grads(params, 0)
    optimizer.step()
    found = dict.fromkeys(params, 0)
    for key, value in state_tensors(optimizer).items():
        found[key.split("/", 1)[0]] += value.numel() * value.itemsize
    assert [*before, state_bytes(optimizer)] == [found] * 3
    assert all(param.device.type == "cpu" for param in optimizer.state)


@over_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_distributed_checkpoint_reads_and_sets_it(case: Case, dtype: torch.dtype) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(12, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)
        ).to(dtype)

    def built(net: torch.nn.Module) -> Any:
        return case.build(net.named_parameters())

    first, second = model(), model()
    one, two = built(first), built(second)
    for step in range(2):
        set_grads(dict(first.named_parameters()), step)
        one.step()
    second.load_state_dict(first.state_dict())
    saved = get_optimizer_state_dict(first, one)
    assert set(saved["state"]) == set(dict(first.named_parameters())) or case.name == "sgd"
    set_optimizer_state_dict(second, two, copy.deepcopy(saved))
    assert {k: v.dtype for k, v in state_tensors(two).items()} == {
        k: v.dtype for k, v in state_tensors(one).items()
    }
    for net, optimizer in ((first, one), (second, two)):
        set_grads(dict(net.named_parameters()), 2)
        optimizer.step()
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
