"""The base class of optimizers that step many tensors at once.

All tensors with a gradient are gathered into batches, over which a kernel computes the formula.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optrun.base.options import Group, Scalars, State
from optrun.optimizer.base import NamedOptimizer, evaluate_closure
from optrun.optimizer.batches import (
    Batch,
    is_plain,
    keep_master_weight,
    usable_gradient,
    working_dtype,
)
from optrun.optimizer.groups import names_of
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.plan import Plan, PlannedBatch, shared_options


class BatchOptimizer(NamedOptimizer):
    """Step parameters by a formula; a subclass names the formula, its state and its scalars.

    A new optimizer sets `FORMULA` and `STATE`, and overrides `_scalars` where its formula takes
    more scalars than `lr` and `keep`.
    """

    FORMULA: ClassVar[Formula]
    MOMENTS: ClassVar[tuple[str, ...]] = ()
    """State tensors of the parameter's shape, zero at first; empty: all of `STATE`."""
    COUNTERS: ClassVar[tuple[str, ...]] = ("step",)
    """Scalars in the state of a parameter that a step changes."""

    _ratios: Sequence[tuple[list[str], Tensor]] = ()
    """(names, ratios) of each batch of the last step whose formula returned ratios."""
    _plan: Plan | None = None

    def _refresh_groups(self) -> None:
        """Check the groups as `NamedOptimizer`, and discard the plan of batches."""
        self._plan = None
        super()._refresh_groups()

    def _traits(self, group: Group, name: str, param: Tensor) -> Hashable:
        """Return what `_scalars` must know of a tensor besides its group; None by default.

        A hook for subclasses. For LAMB the traits of a tensor are `(decays, may_adapt)`, whether
        its name lets it decay and take a trust ratio; for MARS whether it is a matrix. Tensors of a
        group with equal traits and counters share one call of `_scalars`. Traits are computed when
        batches are planned, and again only if groups, names or `RULES` change.
        """
        del group, name, param
        return None

    def _scalars(self, group: Group, traits: Any, counters: Scalars) -> Scalars:
        """Return the scalars of a step for all tensors of a group with these traits and counters.

        A hook for subclasses. By default `lr`, and `keep`: the factor 1 - lr * weight_decay that
        decay leaves of a weight.

        Args:
            group: A parameter group.
            traits: What `_traits` returned for these tensors.
            counters: Values of `COUNTERS`; `step` counts this step already. What is returned under
                a key of `COUNTERS` becomes its new value in the state.
        """
        del traits, counters
        return {"lr": group["lr"], "keep": 1.0 - group["lr"] * group["weight_decay"]}

    def _sparse_policy(self, group: Group) -> str:
        """Return the policy of a group for sparse gradients, see `usable_gradient`."""
        del group
        return "refuse"

    def _new_state(self, group: Group, param: Tensor) -> State:
        """Create the state of a parameter before its first step: `step` 0, and zero moments.

        The moments are `MOMENTS`, or `STATE` if that is empty. They have the shape, strides and
        sharding of the parameter, and its dtype, but float32 for 16-bit parameters.
        """
        del group
        dtype = working_dtype(param.dtype)
        moments = {
            slot: torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            for slot in self.MOMENTS or self.STATE
        }
        return {"step": 0, **moments}

    def _update(self, batch: Batch) -> Tensor | None:
        """Step a batch in place; return LAMB's trust ratios, None for other formulas."""
        return self.FORMULA.step(batch)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient; return the result of `closure`, or None.

        If the flag `found_inf` is set (see `step_unless`), only the counters change, such as `step`
        in the state: `gather` has counted before the flag is known. The caller restores them by
        `set_counters`. Triton's kernels read the flag themselves; for any other kernel the host
        waits for it.

        The ratios of this step (LAMB's trust ratios) replace those of the last one, also by an
        empty list; `set_counters` restores them, too.
        """
        loss = evaluate_closure(closure)
        ratios_of_batches = []
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for batch in self.gather():  # parameters with a gradient; creates missing state
            if found_inf is not None:
                if self._reads_flag(batch):  # Triton steps it
                    batch.found_inf = found_inf
                elif found_inf.item():  # waits for the device
                    continue
            ratios = self._update(batch)
            if ratios is not None:
                ratios_of_batches.append((batch.names, ratios))
            # Copies, such as the float32 copy of a 16-bit parameter. If a kernel read a set flag,
            # the copies are unchanged.
            batch.write_back()
        self._ratios = ratios_of_batches
        return loss

    def _reads_flag(self, batch: Batch) -> bool:
        """Tell whether a Triton kernel steps a batch, and so reads `found_inf` on the device."""
        device = batch.params[0].device.type
        return bool(batch.grad_addresses) and self.FORMULA.kernel(batch.options, device) == "triton"

    def skips_on_device(self) -> bool:
        """Tell whether Triton's kernels step all groups; they read the flag `found_inf`.

        False with a DTensor. A single step that these kernels cannot take, such as one over a
        sparse gradient, makes the host wait for the flag.
        """
        return all(
            self.FORMULA.kernel(group, param.device.type) == "triton"
            and not isinstance(param, DTensor)
            for group in self.param_groups
            for param in group["params"]
        )

    def counters(self) -> Any:
        """Return all counters of the last step, for `set_counters`.

        These are the step counts of the groups, the trust ratios of the last step, and the values
        of `COUNTERS` by parameter, for parameters with state.
        """
        counters_by_param: dict[Tensor, Scalars] = {}
        for param, state in self.state.items():
            if state:
                counters_by_param[param] = {key: state[key] for key in self.COUNTERS}
        return super().counters(), self._ratios, counters_by_param

    def set_counters(self, counters: Any) -> None:
        """Restore the result of `counters`, and clear state created since then.

        Changes counters only: the other tensors of the state stay as they are.
        """
        group_steps, self._ratios, counters_by_param = counters
        super().set_counters(group_steps)
        for param, state in self.state.items():
            if param in counters_by_param:
                state.update(counters_by_param[param])
            else:
                state.clear()

    def gather(self) -> list[Batch]:
        """Gather all parameters with a gradient into batches, and count the step in their state.

        Creates the state of a parameter before its first step. The division into batches is kept as
        a plan from step to step, and made again when it is no longer valid.

        Raises:
            RuntimeError: For complex parameters, and for gradients that `usable_gradient` refuses.
        """
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        grads = [param.grad for param in params]
        have_gradient = [grad is not None for grad in grads]
        keys = shared_options(self)
        options = [[group.get(key) for key in keys] for group in self.param_groups]
        if self._plan is not None and self._plan.is_valid_for(params, have_gradient, options):
            batches = self._gather_by_plan(self._plan, grads)
            if batches is not None:  # None: state is missing, or a tensor has moved in memory
                return batches
        self._plan = Plan(params, have_gradient, options, self._plan_batches(grads, options))
        batches = self._gather_by_plan(self._plan, grads)
        assert batches is not None  # a new plan fits
        return batches

    def _plan_batches(self, grads: list[Any], options: list[list[Any]]) -> list[PlannedBatch]:
        """Divide the parameters with a gradient into batches, and create missing state.

        Parameters of a batch have one device, one working dtype (`working_dtype`) and equal shared
        options. Kernels can read either all or none of its tensors by their addresses (`is_plain`);
        the addresses are stored in its `memory`.

        Args:
            grads: Gradient of each parameter of all groups, or None.
            options: Values of the `shared_options`, one list for each group.

        Raises:
            RuntimeError: A parameter is complex.
        """
        # 1. Put each parameter with a gradient into the batch of its key.
        batches: dict[tuple[Hashable, ...], PlannedBatch] = {}
        slots = self.MOMENTS or self.STATE
        is_sharded = any(isinstance(grad, DTensor) for grad in grads)
        position = -1  # among the parameters of all groups
        for group_index, group in enumerate(self.param_groups):
            # A key of a dict: lists, such as betas, become tuples.
            shared = tuple(
                tuple(value) if isinstance(value, list) else value for value in options[group_index]
            )
            for name, param in zip(names_of(group, group_index), group["params"], strict=True):
                position += 1
                grad = grads[position]
                if grad is None:
                    continue
                if torch.is_complex(param):
                    raise RuntimeError(
                        f"parameter {name!r} is complex: {type(self).__name__} takes real tensors."
                    )
                state = self.state[param]
                if not state:  # before the first step of this parameter
                    state.update(self._new_state(group, param))
                tensors = [state[slot] for slot in slots]
                plain = not is_sharded and is_plain(param, grad, tensors)
                # Parameters with an equal key take one update.
                key = (param.device, working_dtype(param.dtype), shared, plain)
                batch = batches.setdefault(key, PlannedBatch(is_plain=plain))
                traits = self._traits(group, name, param)
                batch.append(position, name, param, group_index, traits)
        # 2. Find the addresses of the tensors that kernels may read.
        for batch in batches.values():
            if batch.is_plain:
                states = [self.state[param] for param in batch.params]
                moments = [[state[slot] for state in states] for slot in slots]
                batch.set_memory(moments, [grads[position] for position in batch.positions])
        return list(batches.values())

    def _gather_by_plan(self, plan: Plan, grads: list[Any]) -> list[Batch] | None:
        """Gather one batch for each batch of the plan, and count the step in the state.

        Returns None, and counts nothing, if state is missing or tensors have moved in memory. Then
        the plan has to be made again.
        """
        gathered = []
        for planned in plan.batches:
            states = [self.state[param] for param in planned.params]
            if not all(states):  # the state of a parameter is empty
                return None
            batch_grads = [grads[position] for position in planned.positions]
            batch = self._make_batch(planned, states, batch_grads)
            if batch is None:
                return None
            gathered.append((planned, states, batch))
        # Only now, when no batch has to be planned anew: counting changes the state.
        for planned, states, batch in gathered:
            batch.rows, batch.row_of = self._count_step(planned, states)
        return [batch for _, _, batch in gathered]

    def _make_batch(
        self, planned: PlannedBatch, states: list[State], grads: list[Tensor]
    ) -> Batch | None:
        """Make a planned batch without its scalars; None if its tensors have moved in memory.

        - With known addresses (`memory`) the lists of tensors are taken as they are, for kernels
          that read by address.
        - Else each tensor is made ready by itself: its local shard, its touched rows, or a float32
          copy of a 16-bit parameter. This never returns None.

        `_count_step` computes the scalars, `rows`, and which row each tensor has, `row_of`.

        Args:
            planned: Its parameters, and the addresses of their tensors, if kernels may use them.
            states: State of each parameter; its `master_weight` is made or dropped here.
            grads: Gradient of each parameter.

        Raises:
            RuntimeError: As `usable_gradient`, for a sparse gradient.
        """
        slots = self.MOMENTS or self.STATE  # keys of the state tensors that the formula takes
        # All groups of a batch have equal shared options, so those of the first one are its
        # options.
        first = self.param_groups[planned.group_of[0]]
        options = {key: first[key] for key in shared_options(self) if key in first}
        if planned.memory is not None:
            return planned.make_plain_batch(options, grads, states, slots)
        batch = Batch(
            options, state={slot: [] for slot in slots}, shares_memory=planned.shares_memory
        )
        for index, param in enumerate(planned.params):
            name = planned.names[index]
            state = states[index]
            group = self.param_groups[planned.group_of[index]]
            policy = self._sparse_policy(group)
            grad = usable_gradient(grads[index], name, type(self).__name__, policy)
            keep_master_weight(state, param, wanted=bool(group.get("master_weights")))
            batch.append(name, param, grad, state)
        return batch

    def _count_step(
        self, planned: PlannedBatch, states: list[State]
    ) -> tuple[list[Scalars], list[int]]:
        """Count the step in the state of each tensor, and compute the scalars of the step.

        Tensors of one kind (group and traits, see `_traits`) with equal counters share a row of
        scalars, from one call of `_scalars`. The new counters of a row, such as `step`, go back
        into the states of its tensors.

        Args:
            planned: The tensors.
            states: State of each.

        Returns:
            `rows` and `row_of` of a `Batch`: the rows, and the index of the row of each tensor.
        """
        # 1. Number the rows. A map in C: this runs over all tensors at every step.
        counters = [list(map(operator.itemgetter(key), states)) for key in self.COUNTERS]
        row_of, row_keys = _number_rows(planned.kind_of, len(planned.kinds), counters)
        # 2. Count the step in each row, and compute its scalars. A kind is an index into `kinds`.
        kinds = list(planned.kinds)
        rows = []
        new_counters = []
        for kind, *values in row_keys:
            group_index, traits = kinds[kind]
            group = self.param_groups[group_index]
            row = dict(zip(self.COUNTERS, values, strict=True))
            if group.get("step_count") == "optimizer":  # in place of this parameter's own count
                row["step"] = group["step"]
            row["step"] += 1
            row.update(self._scalars(group, traits, row))  # may replace other counters, too
            rows.append(row)
            new_counters.append({key: row[key] for key in self.COUNTERS})
        # 3. Store the counters.
        for state, row_index in zip(states, row_of, strict=True):
            state.update(new_counters[row_index])
        return rows, row_of


def _number_rows(
    kind_of: list[int], kind_count: int, counters: list[list[Any]]
) -> tuple[list[int], list[tuple[Any, ...]]]:
    """Number the rows of scalars: one for each kind of tensor with equal counters.

    Args:
        kind_of: Number of the kind of each tensor.
        kind_count: Number of kinds.
        counters: For each counter, its value for each tensor.

    Returns:
        Number of the row of each tensor; and for each row its kind and its counters.

    Example:
        >>> _number_rows([0, 0, 1, 1], 2, [[4, 4, 4, 0]])
        ([0, 0, 1, 2], [(0, 4), (1, 4), (1, 0)])
        >>> _number_rows([0, 0, 1, 1], 2, [[4, 4, 4, 4]])
        ([0, 0, 1, 1], [(0, 4), (1, 4)])
    """
    if all(values.count(values[0]) == len(values) for values in counters):
        # Usually all tensors have equal counters, so a row is a kind.
        common = [values[0] for values in counters]
        return kind_of, [(kind, *common) for kind in range(kind_count)]
    key_of = list(zip(kind_of, *counters, strict=True))
    row_keys = list(dict.fromkeys(key_of))  # each once, in the order of the tensors
    row_of_key = {key: row for row, key in enumerate(row_keys)}
    return [row_of_key[key] for key in key_of], row_keys
