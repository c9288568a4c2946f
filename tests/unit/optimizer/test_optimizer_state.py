"""State by name: what is packed, what is refused, what a new configuration keeps."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optrun.base.errors import OtherFormatError
from optrun.optimizer import AdamW, Lamb, torch_named
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.restore import canonical, copy_to_param
from optrun.optimizer.state import load_named_state, named_state
from tests.optimizer_cases import set_grads, toy


class Keeper(torch.optim.Optimizer):
    """Keeps whatever it is told to, as optimizers of other libraries do."""

    def __init__(self, params: Any, kept: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.total = 0
        for group in self.param_groups:
            group["seen"] = 7
            for param in group["params"]:
                self.state[param] = {"kept": kept(param)}


plain = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(value=nested)
def test_any_plain_value_survives_json(value: Any) -> None:
    names = {"a/b": torch.nn.Parameter(torch.ones(2))}
    optimizer = Keeper(names.items(), lambda _: {"value": value, "pair": (value, torch.ones(3))})
    tensors, meta = named_state(optimizer)
    assert list(tensors) == ["a/b/kept/pair/1"]
    fresh = Keeper(names.items(), lambda _: None)
    fresh.param_groups[0]["seen"] = 0
    load_named_state(fresh, tensors, json.loads(json.dumps(meta, allow_nan=False)))
    kept = fresh.state[names["a/b"]]["kept"]
    assert repr(kept["value"]) == repr(value)
    assert isinstance(kept["pair"], tuple)
    assert torch.equal(kept["pair"][1], torch.ones(3))
    assert fresh.param_groups[0]["seen"] == 7, "what a group counts is restored"


def test_what_no_file_can_hold_is_refused() -> None:
    names = {"w": torch.nn.Parameter(torch.ones(2))}
    with pytest.raises(TypeError, match="state w/kept is a object"):
        named_state(Keeper(names.items(), lambda _: object()))
    with pytest.raises(ValueError, match="without parameter names"):
        named_state(Keeper(names.values(), lambda _: 1))


def test_state_of_no_parameter_and_options_no_file_can_hold() -> None:
    names = {"w": torch.nn.Parameter(torch.ones(2))}
    stray = Keeper(names.items(), lambda _: deque([torch.ones(1)], maxlen=3))
    stray.state["global"] = {"k": torch.ones(2)}  # type: ignore[index]
    stray.param_groups[0]["lr"] = torch.float32
    stray.total = 5
    tensors, meta = named_state(stray)
    fresh = Keeper(names.items(), lambda _: None)
    load_named_state(fresh, tensors, json.loads(json.dumps(meta)))
    assert torch.equal(fresh.state["global"]["k"], torch.ones(2))  # type: ignore[index]
    assert fresh.state[names["w"]]["kept"].maxlen == 3
    assert fresh.total == 5
    with pytest.raises(
        ValueError, match=r"'optimizer/global/k' has shape \(3,\), it was saved with \(2,\)"
    ):
        load_named_state(fresh, {**tensors, "optimizer/global/k": torch.ones(3)}, meta)


def trained(**options: Any) -> tuple[dict[str, Any], Lamb]:
    params = toy()
    optimizer = Lamb(params.items(), **options)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


def test_references_and_not_copies() -> None:
    params, optimizer = trained()
    tensors, _ = named_state(optimizer)
    assert tensors["gain/exp_avg"] is optimizer.state[params["gain"]]["exp_avg"]
    fresh = Lamb(toy().items())
    load_named_state(fresh, *named_state(optimizer))
    assert fresh.state[fresh.named_params()["gain"]]["exp_avg"] is not tensors["gain/exp_avg"]


def test_the_new_configuration_stays() -> None:
    _, optimizer = trained(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    tensors, meta = named_state(optimizer)
    fresh = Lamb(toy().items(), lr=0.2, betas=(0.8, 0.99), weight_decay=0.1)
    load_named_state(fresh, tensors, meta)
    group = fresh.param_groups[0]
    assert (group["lr"], group["betas"], group["step"]) == (0.2, (0.8, 0.99), 3)


def decaying(groups: list[tuple[list[str], float]]) -> Lamb:
    """LAMB over toy parameters in groups of names and weight decay."""
    params = toy()
    built = [
        {"params": [(n, params[n]) for n in names], "weight_decay": decay}
        for names, decay in groups
    ]
    return Lamb(built, lr=0.1)


def test_the_weight_decay_is_the_new_configurations() -> None:
    single = [(["body.weight", "body.bias", "gain", "start"], 0.01)]
    standard = [(["body.weight"], 0.3), (["body.bias", "gain", "start"], 0.0)]
    for before, now in ((single, standard), (standard, single)):
        tensors, meta = named_state(decaying(before))
        fresh = decaying(now)
        load_named_state(fresh, tensors, json.loads(json.dumps(meta)))
        assert [group["weight_decay"] for group in fresh.param_groups] == [wd for _, wd in now]


@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_the_base_rate_of_corrected_decay(cls: type[AdamW] | type[Lamb]) -> None:
    """It is the rate that the optimizer was built with, that of a loaded state, or what
    `set_lr` gave.
    """

    def built(lr: float) -> Any:
        weight = torch.nn.Parameter(torch.full((2,), 8.0))
        return cls(
            [{"params": [weight], "lr": 0.2}],
            lr=lr,
            weight_decay=0.5,
            weight_decay_mode="corrected",
        )

    def after_a_step(optimizer: Any) -> Any:
        weight = optimizer.param_groups[0]["params"][0]
        with torch.no_grad():
            weight.fill_(8.0)
        weight.grad = torch.zeros(2)
        optimizer.step()
        return weight.tolist()[0]

    optimizer, fresh = built(lr=0.4), built(lr=0.1)
    assert after_a_step(optimizer) == pytest.approx(8 * (1 - 0.5 * 0.2**2 / 0.4))
    assert after_a_step(fresh) == pytest.approx(8 * (1 - 0.5 * 0.2**2 / 0.1))
    fresh.load_state_dict(optimizer.state_dict())
    assert after_a_step(fresh) == pytest.approx(8 * (1 - 0.5 * 0.2**2 / 0.4))
    fresh.set_lr(0.8)
    assert after_a_step(fresh) == pytest.approx(8 * (1 - 0.5 * 0.2**2 / 0.8))


def test_groups_may_be_divided_otherwise() -> None:
    params, optimizer = trained()
    tensors, meta = named_state(optimizer)
    again = {name: torch.nn.Parameter(param.detach().clone()) for name, param in params.items()}
    fresh = Lamb([{"params": [pair]} for pair in again.items()])
    load_named_state(fresh, tensors, meta)
    for run, one in ((params, optimizer), (again, fresh)):
        set_grads(run, 9)
        one.step()
    assert all(torch.equal(again[name], param) for name, param in params.items())
    with pytest.raises(ValueError, match="are one group here"):
        trained()[1].load_state_dict(fresh.state_dict())
    uneven = named_state(fresh)[1]
    uneven["groups"][0]["step"] = 1
    with pytest.raises(ValueError, match="joins saved groups that counted differently"):
        load_named_state(Lamb(toy().items()), named_state(fresh)[0], uneven)


@pytest.mark.parametrize(
    ("name", "option", "value", "slot"),
    [
        ("adamw", "amsgrad", True, "max_exp_avg_sq"),
        ("adam", "amsgrad", True, "max_exp_avg_sq"),
    ],
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "composite"])
def test_an_option_that_needs_a_state_of_its_own_is_refused(
    name: str, option: str, value: Any, slot: str, beside: bool
) -> None:
    def build(**options: Any) -> torch.optim.Optimizer:
        groups = [{"params": [pair], **options} for pair in toy().items()]
        if beside:
            groups[1] = {"params": groups[1]["params"], "optimizer": "sgd"}
        optimizer = build_optimizer(name, groups, lr=0.1)
        set_grads({f"{i}": group["params"][0] for i, group in enumerate(optimizer.param_groups)}, 0)
        return optimizer

    saved, fresh = build(), build(**{option: value})
    saved.step()
    with pytest.raises(
        ValueError,
        match=f"'body.weight': the saved state has no '{slot}', which {option}={value} nee",
    ):
        load_named_state(fresh, *named_state(saved))
    assert not fresh.state, "nothing is changed where it refuses"
    fresh.step()
    without = build()
    load_named_state(without, *named_state(fresh))
    without.step()


@pytest.mark.parametrize("before", [False, True])
def test_master_weights_are_made_or_dropped_as_the_new_configuration_says(before: bool) -> None:
    saved_params, params = toy(torch.bfloat16), toy(torch.bfloat16)
    saved = Lamb(saved_params.items(), master_weights=before)
    set_grads(saved_params, 0)
    saved.step()
    fresh = Lamb(params.items(), master_weights=not before)
    load_named_state(fresh, *named_state(saved))
    set_grads(params, 1)
    fresh.step()
    for param in params.values():
        assert ("master_weight" in fresh.state[param]) is not before
        if not before:
            assert torch.equal(fresh.state[param]["master_weight"].bfloat16(), param)


def test_another_optimizer_or_format_is_refused() -> None:
    _, optimizer = trained()
    tensors, meta = named_state(optimizer)
    with pytest.raises(ValueError, match="saved by Lamb, the optimizer is AdamW"):
        load_named_state(AdamW(toy().items()), tensors, meta)
    with pytest.raises(OtherFormatError, match="format 99, and this optrun reads format 1"):
        load_named_state(Lamb(toy().items()), tensors, {**meta, "format": 99})


def test_tied_parameters_have_one_state() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight  # type: ignore[assignment]
    optimizer = Lamb(model.named_parameters())
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    tensors, meta = named_state(optimizer)
    assert list(meta["params"]) == ["0.weight"]
    assert set(tensors) == {"0.weight/exp_avg", "0.weight/exp_avg_sq"}
    fresh = Lamb(model.named_parameters())
    load_named_state(fresh, tensors, meta)
    assert fresh.state[model[0].weight]["step"] == 1


def test_wrappers_leave_names_alone() -> None:
    assert canonical("module._orig_mod.h.0.weight") == "h.0.weight"
    params, optimizer = trained()
    wrapped = Lamb([(f"_orig_mod.{name}", param) for name, param in toy().items()])
    wrapped.load_state_dict(optimizer.state_dict())
    assert torch.equal(
        wrapped.state[wrapped.named_params()["_orig_mod.gain"]]["exp_avg"],
        optimizer.state[params["gain"]]["exp_avg"],
    )


def test_names_that_wrappers_alone_tell_apart_are_refused() -> None:
    params = toy()
    both = {"gain": params["gain"], "module.gain": torch.nn.Parameter(torch.ones(5))}
    optimizer = Lamb(both.items())
    same = Lamb(both.items())
    same.load_state_dict(optimizer.state_dict())
    wrapped = Lamb((f"_orig_mod.{name}", param) for name, param in both.items())
    with pytest.raises(ValueError, match=r"'gain' and 'module\.gain' differ only in the prefixes"):
        wrapped.load_state_dict(optimizer.state_dict())


def test_unnamed_parameters_load_by_position() -> None:
    params = toy()
    one, two = Lamb(params.values()), Lamb(toy().values())
    set_grads(params, 0)
    one.step()
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["step"] == 1
    with pytest.raises(
        ValueError, match="group 0: the saved state has 4 parameters, the optimizer 1"
    ):
        Lamb([params["gain"]]).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="'group 0 parameter 0' has shape"):
        Lamb([torch.nn.Parameter(torch.ones(3)) for _ in range(4)]).load_state_dict(
            one.state_dict()
        )


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adafactor"])
def test_the_state_dict_of_torchs_own_class_goes_on(name: str, named: bool) -> None:
    theirs, ours = toy(), toy()
    options = {"momentum": 0.9} if name == "SGD" else {}
    torchs = getattr(torch.optim, name)(
        list(theirs.items() if named else theirs.values()), lr=0.1, **options
    )
    optimizer = getattr(torch_named, name)(ours.items(), lr=0.3)
    for step in range(4):
        set_grads(theirs, step)
        torchs.step()
        if step == 2:
            for key, param in theirs.items():
                ours[key].data.copy_(param.data)
            optimizer.load_state_dict(torchs.state_dict())
    set_grads(ours, 3)
    optimizer.step()
    for key, param in theirs.items():
        torch.testing.assert_close(ours[key], param)
    assert optimizer.get_lr() == 0.1
    optimizer.set_lr(0.05)
    assert optimizer.param_groups[0]["lr"] == 0.05
    if name != "SGD":
        assert optimizer.param_groups[0]["step"] == 4


def test_an_absolute_lr_stays_absolute_in_a_state_dict() -> None:
    saved = Lamb([{"params": list(toy().items()), "lr": 0.5}])
    fresh = Lamb(toy().items(), lr=0.1)
    fresh.load_state_dict(saved.state_dict())
    fresh.set_lr(0.2)
    assert fresh.param_groups[0]["lr"] == 0.5


def test_something_else_is_no_state_dict() -> None:
    with pytest.raises(
        ValueError, match=r"no optimizer's state dict: it has no key 'state', but \['model'\]"
    ):
        Lamb([torch.nn.Parameter(torch.ones(1))]).load_state_dict({"model": 1})


def test_a_state_of_another_width_is_refused_though_one_dimension_fits() -> None:
    one, two = (Lamb([("w", torch.nn.Parameter(torch.ones(2, columns)))]) for columns in (3, 4))
    for optimizer in (one, two):
        optimizer.param_groups[0]["params"][0].grad = torch.ones_like(
            optimizer.param_groups[0]["params"][0]
        )
        optimizer.step()
    with pytest.raises(
        ValueError,
        match=r"'exp_avg' of parameter 'w' has shape \(2, 4\), the parameter has \(2, 3\)",
    ):
        one.load_state_dict(two.state_dict())


def test_groups_of_a_state_dict_are_not_joined() -> None:
    """Each counts its own steps and has its own options: which should the one group have?"""
    params = toy()
    apart = Lamb([{"params": [pair]} for pair in params.items()])
    with pytest.raises(ValueError, match="the saved groups 0 and 1 are one group here"):
        Lamb(list(params.items())[:2]).load_state_dict(
            {**apart.state_dict(), "param_groups": apart.state_dict()["param_groups"][:2]}
        )


def test_state_goes_where_its_parameter_is_and_the_step_stays() -> None:
    there = torch.nn.Parameter(torch.ones(2, device="meta"))
    moved = {key: copy_to_param(torch.ones(2), there, {}, key) for key in ("exp_avg", "step")}
    assert {key: value.device.type for key, value in moved.items()} == {
        "exp_avg": "meta",
        "step": "cpu",
    }
    assert copy_to_param(torch.ones(()), there, {"fused": True}, "step").device.type == "meta"


def test_adamw_is_fused_however_its_parameters_are_given() -> None:
    param, number = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(()))
    for params in (
        [param, number],
        [("w", param), ("n", number)],
        [{"params": [("w", param)]}],
        [{"params": [number]}],
    ):
        assert AdamW(params).param_groups[0]["fused"] is True
    whole = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    for params in ([param, whole], [("w", param), ("c", whole)]):
        assert AdamW(params).param_groups[0]["fused"] is None


class Average:
    """A counter of another library that keeps a tensor, as an EMA of the loss does."""

    def __init__(self) -> None:
        self.mean = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.mean = values["mean"]


def test_a_tensor_in_an_attribute_is_saved() -> None:
    """It was packed, and dropped with the dict that it was packed into."""
    params = toy()
    optimizer = Keeper(params.items(), lambda param: torch.zeros_like(param))
    optimizer.average = Average()  # type: ignore[attr-defined]
    optimizer.average.mean += 3  # type: ignore[attr-defined]
    tensors, meta = named_state(optimizer)
    fresh = Keeper(params.items(), lambda param: torch.zeros_like(param))
    fresh.average = Average()  # type: ignore[attr-defined]
    load_named_state(fresh, tensors, json.loads(json.dumps(meta)))
    assert fresh.average.mean.tolist() == [3, 3]  # type: ignore[attr-defined]
