"""Optimizers that step batches.

A formula over gathered tensors, by the loop or by what is faster.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optrun.base.options import Group, Numbers, State
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.batches import Batch, is_plain, keep_master, usable_gradient, working_dtype
from optrun.optimizer.groups import names_of
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.plan import Part, Plan, shared_options


class BatchOptimizer(NamedOptimizer):
    """A class says its formula, its state, and which numbers a tensor has."""

    FORMULA: ClassVar[Formula]
    MOMENTS: ClassVar[tuple[str, ...]] = ()
    """State tensors of the parameter's shape, zero at first; none: all of `STATE`."""
    COUNTERS: ClassVar[tuple[str, ...]] = ("step",)
    """Numbers in the state of a parameter that a step changes."""

    _ratios: Sequence[tuple[list[str], Tensor]] = ()
    """What the formula returned in the last step, by the names of its tensors."""
    _plan: Plan | None = None

    def _take_in_groups(self) -> None:
        self._plan = None
        super()._take_in_groups()

    def _traits(self, group: Group, name: str, param: Tensor) -> Hashable:
        """Return what sets a tensor apart within its group; None if all tensors are alike.

        A hook for subclasses. Tensors of a group with equal traits and counters share one call of
        `_numbers`, which gets the traits: `(decays, adapted)` of LAMB, for instance. Computed once;
        again only if groups, names or `RULES` change.
        """
        del group, name, param
        return None

    def _numbers(self, group: Group, traits: Any, counters: Numbers) -> Numbers:
        """Return the numbers of all tensors of a group with these traits and counters.

        Here the rate, and what decay leaves of a weight. Also new values of `counters`, whose
        `step` counts this step already.
        """
        del traits, counters
        return {"lr": group["lr"], "keep": 1.0 - group["lr"] * group["weight_decay"]}

    def _sparse(self, group: Group) -> str:
        """Return the policy of a group for sparse gradients, as for `usable_gradient`."""
        del group
        return "refuse"

    def _new_state(self, group: Group, param: Tensor) -> State:
        """Make the state of a parameter before its first step.

        `step` is 0; the slots of `MOMENTS`, or of `STATE` if it has none, are zeros.
        """
        del group
        dtype = working_dtype(param.dtype)
        moments = {
            slot: torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            for slot in self.MOMENTS or self.STATE
        }
        return {"step": 0, **moments}

    def _update(self, batch: Batch) -> Tensor | None:
        """Step a batch in place."""
        return self.FORMULA.step(batch)

    def kernel(self, group: Group, device: str, *, whole: bool = True) -> str:
        """Name the kernel of a group on a type of device; `whole`: no tensor is sharded."""
        return self.FORMULA.kernel(group, device, whole=whole)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ratios_of_batches = []
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for batch in self.gather():
            if found_inf is not None and self._reads_flag(batch):
                batch.found_inf = found_inf
            elif found_inf is not None and found_inf.item():
                continue
            ratios_of_batches.append((batch.names, self._update(batch)))
            batch.done()
        self._ratios = [
            (names, ratios) for names, ratios in ratios_of_batches if ratios is not None
        ]
        return loss

    def _reads_flag(self, batch: Batch) -> bool:
        device = batch.params[0].device.type
        return bool(batch.grad_addresses) and self.kernel(batch.options, device) == "triton"

    def skips_on_device(self) -> bool:
        """Tell whether Triton's kernels, which read the `found_inf` flag, step all groups.

        False with a DTensor. A step that these kernels cannot take, such as one over a sparse
        gradient, waits for the flag.
        """
        return all(
            self.kernel(group, param.device.type) == "triton" and not isinstance(param, DTensor)
            for group in self.param_groups
            for param in group["params"]
        )

    def counters(self) -> Any:
        """Return the numbers on the host that a step changes, for `set_counters`."""
        of_params: dict[Tensor, Numbers] = {}
        for param, state in self.state.items():
            if state:
                of_params[param] = {key: state[key] for key in self.COUNTERS}
        return super().counters(), self._ratios, of_params

    def set_counters(self, counters: Any) -> None:
        """Set counters back; a parameter that had no state has none again."""
        of_groups, self._ratios, of_params = counters
        super().set_counters(of_groups)
        for param, state in self.state.items():
            if param in of_params:
                state.update(of_params[param])
            else:
                state.clear()

    def gather(self) -> list[Batch]:
        """Gather all parameters with a gradient, and count the step.

        Raises:
            RuntimeError: For complex parameters, and for gradients that `usable_gradient` refuses.
        """
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        grads = [param.grad for param in params]
        have_gradient = [grad is not None for grad in grads]
        keys = shared_options(self)
        options = [[group.get(key) for key in keys] for group in self.param_groups]
        batches = None
        if self._plan is not None and self._plan.holds(params, have_gradient, options):
            batches = self._gather_by_plan(self._plan, grads)
        if batches is None:
            self._plan = Plan(params, have_gradient, options, self._find_parts(grads, options))
            batches = self._gather_by_plan(self._plan, grads)
        assert batches is not None
        return batches

    def _find_parts(self, grads: list[Any], options: list[list[Any]]) -> list[Part]:
        """Divide the parameters into parts, and make missing state."""
        parts: dict[tuple[Hashable, ...], Part] = {}
        slots = self.MOMENTS or self.STATE
        sharded = any(isinstance(grad, DTensor) for grad in grads)
        position = -1
        for index, group in enumerate(self.param_groups):
            shared = tuple(tuple(v) if isinstance(v, list) else v for v in options[index])
            for name, param in zip(names_of(group, index), group["params"], strict=True):
                position += 1
                grad = grads[position]
                if grad is None:
                    continue
                if torch.is_complex(param):
                    raise RuntimeError(
                        f"parameter {name!r} is complex: {type(self).__name__} takes real tensors."
                    )
                state = self.state[param]
                if not state:
                    state.update(self._new_state(group, param))
                plain = not sharded and is_plain(param, grad, [state[slot] for slot in slots])
                key = (param.device, working_dtype(param.dtype), shared, plain)
                part = parts.setdefault(key, Part(is_plain=plain))
                part.append(position, name, param, index, self._traits(group, name, param))
        for part in parts.values():
            if part.is_plain:
                states = [self.state[param] for param in part.params]
                moments = [list(map(operator.itemgetter(slot), states)) for slot in slots]
                part.find_memory(moments, [grads[position] for position in part.positions])
        return list(parts.values())

    def _gather_by_plan(self, plan: Plan, grads: list[Any]) -> list[Batch] | None:
        """Gather one batch for each part of the plan, and count the step.

        None, with nothing counted, if state is missing or tensors have moved in memory.
        """
        gathered = []
        for part in plan.parts:
            states = [self.state[param] for param in part.params]
            if not all(states):
                return None
            part_grads = [grads[position] for position in part.positions]
            batch = self._batch(part, states, part_grads)
            if batch is None:
                return None
            gathered.append((part, states, batch))
        for part, states, batch in gathered:
            batch.rows, batch.row_of = self._count(part, states)
        return [batch for _, _, batch in gathered]

    def _batch(self, part: Part, states: list[State], grads: list[Tensor]) -> Batch | None:
        """Make the batch of a part, without its numbers; None if the plan holds no more."""
        slots = self.MOMENTS or self.STATE
        first = self.param_groups[part.group_of[0]]
        options = {key: first[key] for key in shared_options(self) if key in first}
        if part.memory is not None:
            return part.plain_batch(options, grads, states, slots)
        batch = Batch(options, state={slot: [] for slot in slots}, shares_memory=part.shares_memory)
        for index, (param, grad, state) in enumerate(zip(part.params, grads, states, strict=True)):
            name = part.names[index]
            group = self.param_groups[part.group_of[index]]
            usable = usable_gradient(grad, name, type(self).__name__, self._sparse(group))
            keep_master(state, param, wanted=bool(group.get("master_weights")))
            batch.append(name, param, usable, state)
        return batch

    def _count(self, part: Part, states: list[State]) -> tuple[list[Numbers], list[int]]:
        """Count the step of each tensor; return rows of numbers, and the row of each tensor."""
        counters = [list(map(operator.itemgetter(key), states)) for key in self.COUNTERS]
        if all(values.count(values[0]) == len(values) for values in counters):
            row_of = part.kind_of
            first = [values[0] for values in counters]
            keys = [(kind, *first) for kind in range(len(part.kinds))]
        else:
            of_tensors = list(zip(part.kind_of, *counters, strict=True))
            row_of_key = {key: row for row, key in enumerate(dict.fromkeys(of_tensors))}
            row_of = [row_of_key[key] for key in of_tensors]
            keys = list(row_of_key)
        kinds = list(part.kinds)
        numbers = []
        counted = []
        for kind, *values in keys:
            index, traits = kinds[kind]
            group = self.param_groups[index]
            counts = dict(zip(self.COUNTERS, values, strict=True))
            if group.get("step_count") == "optimizer":
                counts["step"] = group["step"]
            counts["step"] += 1
            counts.update(self._numbers(group, traits, counts))
            numbers.append(counts)
            counted.append({key: counts[key] for key in self.COUNTERS})
        for state, row in zip(states, row_of, strict=True):
            state.update(counted[row])
        return numbers, row_of
