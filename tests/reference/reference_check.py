"""Every recorded value of a case, held against what optrun does: parameters, rate and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.evaluation_weights import evaluation_weights, has_evaluation_weights
from tests.reference.reference_adapter import player
from tests.reference.reference_format import (
    ATOL,
    DTYPES,
    RTOL,
    RTOL_SCHEDULE,
    FormatError,
    check_number,
    check_same,
    fields,
    outside,
)
from tests.reference.reference_player import FUNCTION, Player
from tests.reference.reference_tfm import tfm_name
from tests.reference.reference_torch import PACKAGES

PADDLE_SLOTS = {
    "paddle_lamb": {"moment1": "exp_avg", "moment2": "exp_avg_sq"},
    "paddle_adamax": {"moment": "exp_avg", "inf_norm": "exp_inf"},
    "paddlenlp_adamwdl": {"moment1": "exp_avg", "moment2": "exp_avg_sq"},
}
POWERS = {"paddle_adamax": ("beta1_pow_acc",)}
"""Powers of the betas in the state; both where a system is not listed."""

STATE_RTOL = 2e-5
"""Of final moments and powers.

The packages hold betas as float32, so that `1 - beta2` is off by 1.3e-5.
"""
STATE_ATOL = {"exp_avg": 1e-7, "exp_avg_sq": 1e-12, "exp_inf": 1e-9}
"""Of final moments, besides a millionth of the tensor's largest entry.

First moments are sums that cancel.
"""


def check_case(
    system: str, raw: dict[str, Any], *, dtype: torch.dtype, foreach: bool, driver: str = FUNCTION
) -> int:
    """Play a case and assert that every recorded value is reached.

    Returns:
        Rows that were left out, for one of the two deviations of LazyAdam that the README
        describes.

    Raises:
        FormatError: The case says something that the format does not know.
        AssertionError: A value that is not the recorded one.
    """
    play = player(system, raw, dtype=dtype, foreach=foreach, driver=driver)
    case = play.case
    if case.dtype not in DTYPES or (system, case.dtype) not in ATOL:
        raise FormatError(f"{system} {case.id}: no {case.dtype} in files of this system.")
    for key in ("lr", "params_after"):
        check_same(f"{case.id}: number of steps in {key}", len(getattr(case, key)), len(case.grads))
    left_out: dict[str, set[int]] = {}
    for step in range(len(case.grads)):
        play.step(step)
        _leave_out(system, play, step, left_out)
        _check_lr(system, play, step)
        for (name, param), want in zip(play.params.items(), case.params_after[step], strict=True):
            what = f"{case.id}: {name} after step {step} ({dtype}, {driver})"
            atol, rtol = ATOL[system, case.dtype], RTOL.get(system, 1e-6)
            _check_tensor(what, param.detach(), want, atol, rtol, left_out.get(name))
        play.advance()
    STATES[system](system, play, left_out)
    return sum(map(len, left_out.values()))


def _check_moment(
    what: str, key: str, state: dict[str, Any], want: Any, left_out: set[int] | None = None
) -> None:
    atol = STATE_ATOL[key] + 1e-6 * float(state[key].abs().max())
    _check_tensor(what, state[key], want, atol, STATE_RTOL, left_out)


def _check_tensor(
    what: str, got: Tensor, want: Any, atol: float, rtol: float, left_out: set[int] | None = None
) -> None:
    check_same(f"{what}: number of values", len(want), got.numel())
    wanted = torch.tensor(want, dtype=torch.float64).reshape(got.shape)
    wrong = outside(got, wanted, atol=atol, rtol=rtol)
    if left_out:
        wrong[sorted(left_out)] = False
    assert not wrong.any(), f"{what}: {got[wrong].tolist()}, recorded {wanted[wrong].tolist()}"


def _leave_out(system: str, play: Player, step: int, left_out: dict[str, set[int]]) -> None:
    """Repeated rows that the package computes in another way on purpose; see the README."""
    if system != "mindspore_lazyadam":
        return
    for name, grad in zip(play.params, play.case.grads[step], strict=True):
        rows = grad["rows"] if isinstance(grad, dict) else []
        repeated = {row for row in rows if rows.count(row) > 1}
        if repeated and (play.case.sparse_mode == "rows" or play.decays[name](step) != 0):
            left_out.setdefault(name, set()).update(repeated)


def _check_lr(system: str, play: Player, step: int) -> None:
    want, what = play.case.lr[step], f"{play.case.id}: lr of step {step}"
    rtol = RTOL_SCHEDULE["paddle" if system.startswith("paddle") else "float32"]
    if system != "mindspore_lazyadam":
        check_number(what, play.optimizer.get_lr(), want, rtol=rtol)
        return
    own = {id(param): group for group in play.optimizer.param_groups for param in group["params"]}
    rates = [float(own[id(param)]["lr"]) for param in play.params.values()]
    wanted = want if isinstance(want, list) else [want] * len(rates)
    for name, got, expected in zip(play.params, rates, wanted, strict=True):
        # A fixed rate beside a dynamic one has gone through float32 `lr + 1 - 1`.
        check_number(
            f"{what} of {name}",
            got,
            expected,
            rtol=rtol,
            atol=6e-8 if isinstance(want, list) else 0.0,
        )


def _group_of(play: Player, param: Tensor) -> dict[str, Any]:
    for group in play.optimizer.param_groups:
        if any(param is own for own in group["params"]):
            return dict(group)
    raise FormatError(f"{play.case.id}: a state for a parameter of no group.")


def _paddle_state(system: str, play: Player, _left_out: dict[str, set[int]]) -> None:
    """By parameter and slot; empty for one that never had a gradient.

    Powers are those of the next step.
    """
    slots, powers = PADDLE_SLOTS[system], POWERS.get(system, ("beta1_pow_acc", "beta2_pow_acc"))
    for name in play.case.state:
        if name not in play.params:
            raise FormatError(f"{play.case.id} state: unknown parameter {name!r}.")
    for name, param in play.params.items():
        own, what = play.optimizer.state.get(param), f"{play.case.id}: state of {name}"
        recorded = play.case.state.get(name, {})
        if not own:
            check_same(what, {}, recorded)
            continue
        saved = vars(fields(what, recorded, *slots, *powers))
        for slot, key in slots.items():
            _check_moment(f"{what}, {slot}", key, own, saved[slot])
        for beta, slot in zip(_group_of(play, param)["betas"], powers, strict=False):
            power = torch.tensor([beta ** (own["step"] + 1)], dtype=torch.float64)
            _check_tensor(f"{what}, {slot}", power, saved[slot], 0.0, STATE_RTOL)


def _tfm_state(_system: str, play: Player, _left_out: dict[str, set[int]]) -> None:
    """The count, then m's and v's of the variables in the order in which they first had a
    gradient.
    """
    saved = fields(
        f"{play.case.id} state", play.case.state, "iterations", "weight_names", "weights"
    )
    made = play.optimizer.param_groups[0]["step"]
    names: list[str] = []
    values: list[tuple[str, dict[str, Any]]] = []
    met: set[str] = set()
    for grads in play.case.grads:
        new = [
            name
            for name, grad in zip(play.params, grads, strict=True)
            if grad is not None and name not in met
        ]
        met.update(new)
        for slot, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            names += [f"{play.case.config.name}/{tfm_name(name)}/{slot}:0" for name in new]
            values += [(key, play.optimizer.state[play.params[name]]) for name in new]
    check_same(f"{play.case.id}: iterations", made, saved.iterations)
    counter = saved.weight_names[
        0
    ]  # made outside of the optimizer's name scope where a schedule asks for it first
    if counter not in ("iter:0", f"{play.case.config.name}/iter:0"):
        raise FormatError(
            f"{play.case.id} state: the first weight is {counter!r}, expected the step count."
        )
    check_same(f"{play.case.id}: weight_names", names, saved.weight_names[1:])
    check_same(f"{play.case.id}: weights[0]", made, saved.weights[0])
    for name, (key, own), want in zip(names, values, saved.weights[1:], strict=True):
        _check_moment(f"{play.case.id}: state {name}", key, own, want)


def _mindspore_state(_system: str, play: Player, left_out: dict[str, set[int]]) -> None:
    """One counter and pair of powers for the whole optimizer, and two moments by name."""
    known = ("global_step", "beta1_power", "beta2_power", "optimizer_order", "moment1", "moment2")
    saved, what = fields(f"{play.case.id} state", play.case.state, *known), f"{play.case.id}: state"
    made = play.optimizer.param_groups[0]["step"]
    check_same(f"{what}, global_step", made, saved.global_step)
    check_same(f"{what}, optimizer_order", play.order, saved.optimizer_order)
    for name, beta in zip(
        ("beta1_power", "beta2_power"), play.optimizer.param_groups[0]["betas"], strict=True
    ):
        check_number(f"{what}, {name}", beta**made, getattr(saved, name), rtol=STATE_RTOL)
    for slot, key in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq")):
        recorded = getattr(saved, slot)
        check_same(f"{what}, {slot}", sorted(recorded), sorted(play.order))
        for name in play.order:
            own = play.optimizer.state.get(play.params[name]) or {
                key: torch.zeros_like(play.params[name])
            }
            _check_moment(f"{what}, {slot} of {name}", key, own, recorded[name], left_out.get(name))


def _torch_state(system: str, play: Player, _left_out: dict[str, set[int]]) -> None:
    """By parameter and slot of the package; empty for one that never had a gradient."""
    check_same(f"{play.case.id}: state", sorted(play.case.state), sorted(play.params))
    for name, param in play.params.items():
        own, slots = play.optimizer.state.get(param), PACKAGES[system].slots
        saved = vars(
            fields(
                f"{play.case.id}: state of {name}", play.case.state[name], *(slots if own else ())
            )
        )
        for slot, want in saved.items():
            atol, rtol = ATOL[system, play.case.dtype], RTOL[system]
            _check_tensor(f"{play.case.id}: state of {name}, {slot}", own[slot], want, atol, rtol)
    if has_evaluation_weights(play.optimizer):
        with evaluation_weights(play.optimizer):
            for (name, param), want in zip(play.params.items(), play.case.evaluated, strict=True):
                _check_tensor(
                    f"{play.case.id}: {name} for evaluation", param.detach(), want, 1e-12, 1e-12
                )


STATES = {
    "paddle_lamb": _paddle_state,
    "paddle_adamax": _paddle_state,
    "paddlenlp_adamwdl": _paddle_state,
    "tfm_lamb": _tfm_state,
    "mindspore_lazyadam": _mindspore_state,
    **dict.fromkeys(PACKAGES, _torch_state),
}
