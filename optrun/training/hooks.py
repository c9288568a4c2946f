"""Call the components of the training loop at each hook, and save and restore their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optrun.artifacts.atomic import storage_errors
from optrun.artifacts.metrics import to_json
from optrun.base.errors import OptrunError
from optrun.base.plain import PlainMapping
from optrun.training.callback import HOOKS, Callback, StopRequest, TrainingContext
from optrun.training.state import RandomStates
from optrun.training.step import StepResult


class Hooks:
    """Calls optrun's components and then the user's callbacks, in this order.

    On several ranks components that write, and callbacks, exist on rank 0 alone; the loop sends
    their requests to the other ranks.

    Args:
        training: The context that is passed to every hook.
        components: optrun's own. Their errors are raised unchanged.
        callbacks: The user's, by configuration key. Their errors become an OptrunError that names
            them; random states and the model's mode are put back after each of their hooks.
        may_request: Whether callbacks exist on any rank, which may request a save or a stop; None:
            whether they exist on this rank.
    """

    def __init__(
        self,
        training: TrainingContext,
        components: Sequence[Callback],
        callbacks: Mapping[str, object],
        *,
        may_request: bool | None = None,
    ) -> None:
        self.training = training
        self.callbacks = callbacks
        self.may_request = bool(callbacks) if may_request is None else may_request
        self.failure: BaseException | None = None
        """The first error of a hook in a step. The other hooks of the step are still called; then
        the loop raises it, with the run saved."""
        self._final_state: dict[str, object] | None = None
        """States from before the evaluations that exist only because the run ends; None: there were
        none."""
        by_key = [*((component.key, component) for component in components), *callbacks.items()]
        self._stateful: list[tuple[str, Any]] = []
        """Components with a state, by configuration key."""
        self._components_with: dict[str, list[tuple[str, object]]] = {hook: [] for hook in HOOKS}
        """For each hook the components that define it."""
        for key, component in by_key:
            if hasattr(component, "state_dict"):
                self._stateful.append((key, component))
            for hook in HOOKS:
                if _defines_hook(component, hook):
                    self._components_with[hook].append((key, component))

    def reason_to_wait(self) -> str | None:
        """Name the first component whose `on_step` must be called before the next step begins.

        None: all components with `on_step` accept late results (`accepts_late_results`).
        """
        for key, component in self._components_with["on_step"]:
            if not getattr(component, "accepts_late_results", False):
                return f"{key or type(component).__name__}: on_step is called before the next step"
        return None

    def on_train_begin(self) -> None:
        """Call `on_train_begin`; with callbacks the folder `extra` is created first."""
        if self.callbacks:
            with storage_errors(self.training.extra_dir):
                self.training.extra_dir.mkdir(exist_ok=True)
        self._call("on_train_begin")

    def on_step(self, result: StepResult) -> None:
        """Call `on_step`; an error of a callback is stored in `failure`."""
        self.training.step_finished = False
        self._call("on_step", result, deferred=True)

    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        """Call `on_evaluate`; an error of a callback is stored in `failure`."""
        self._call("on_evaluate", metrics, deferred=True)

    def on_log(self, record: PlainMapping, callback_record: PlainMapping) -> None:
        """Call `on_log`; an error of a callback is stored in `failure`.

        Args:
            record: The line of metrics, for optrun's components.
            callback_record: The line for callbacks, without metrics that exist only because the run
                ends.
        """
        self.training.step_finished = True
        self._call("on_log", record, of_callbacks=callback_record, deferred=True)

    def on_save(self, checkpoint: Path) -> None:
        """Call `on_save` with a complete checkpoint."""
        self._call("on_save", checkpoint)

    def on_rollback(self) -> None:
        """Call `on_rollback` after training went back to a checkpoint."""
        self.training.step_finished = True
        self._call("on_rollback")

    def on_train_end(self, status: str) -> None:
        """Call `on_train_end` of every component, also if another one raises.

        After an error the remaining components get the status `failed` in place of `finished`.

        Raises:
            Exception: The first error, if the run had finished. Otherwise errors are only noted,
                since the caller raises what ended the run.
        """
        # 1. Call all of them.
        has_finished = status == "finished"
        errors = list[Exception]()
        for key, component in self._components_with["on_train_end"]:
            try:
                self._call_one(key, component, "on_train_end", status)
            except Exception as error:  # of a user's class, or of a disk
                errors.append(error)
                if has_finished:
                    status = "failed"

        # 2. Raise the first error, or note all of them.
        if has_finished and errors:
            raise errors[0]
        for failure in errors:
            self.training.note(f"warning: {failure}")

    def freeze_states(self) -> None:
        """Freeze the states of components, before an evaluation only the end of the run needs.

        `state_dict` returns the frozen states from then on, so that a prolonged run continues as if
        it had not ended. Sets `training.final`. Later calls do nothing.
        """
        if not self.training.final:
            self._final_state = self.state_dict()  # what `state_dict` returns from here on
            self.training.final = True  # `request_stop` does nothing then

    # State
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the states of components by configuration key, for JSON.

        Raises:
            OptrunError: The state of a callback cannot be written as JSON and read back unchanged.
        """
        if self._final_state is not None:  # see `freeze_states`
            return self._final_state
        states = {}
        for key, component in self._stateful:
            with self._naming_callback(key, "state_dict"):
                state = component.state_dict()
                _refuse_other_than_json(state)
                states[key] = to_json(state, where="state_dict")
        return states

    def load_state_dict(self, states: Mapping[str, object], stop: StopRequest | None) -> None:
        """Load the states of a checkpoint; a component without one keeps its present state.

        Args:
            states: By configuration key; keys without a component are ignored.
            stop: The stop request of the checkpoint; it replaces the present one.
        """
        self.training.stop = stop
        for key, component in self._stateful:
            if key in states:
                with self._naming_callback(key, "load_state_dict"):
                    component.load_state_dict(states[key])

    # Calls
    # ----------------------------------------------------------------------------------------------

    def _call(
        self, hook: str, *args: object, of_callbacks: object = None, deferred: bool = False
    ) -> None:
        """Call one hook of all components.

        Args:
            hook: Name of the hook.
            *args: Arguments after the context.
            of_callbacks: Argument for the user's callbacks in place of `args`; None: the same.
            deferred: Whether an error is stored in `failure`, for the loop to raise when the step
                is done. An OptrunError or OSError of optrun's own components is raised at once.

        Raises:
            Exception: An error that is not deferred.
        """
        for key, component in self._components_with[hook]:
            is_callback = key in self.callbacks  # the user's; other components are optrun's
            hook_args = args
            if is_callback and of_callbacks is not None:
                hook_args = (of_callbacks,)
            try:
                self._call_one(key, component, hook, *hook_args)
            except Exception as error:
                raises_now = not is_callback and isinstance(error, OptrunError | OSError)
                if raises_now or not deferred:
                    raise
                self.failure = self.failure or error  # the first one

    def _call_one(self, key: str, component: object, hook: str, *args: object) -> None:
        """Call a hook of one component; guard the run's states against a user's callback."""
        # 1. A callback. An error of it becomes an OptrunError that names it.
        if key in self.callbacks:
            with self._restoring_states(), self._naming_callback(key, hook):
                getattr(component, hook)(self.training, *args)
            return

        # 2. A component of optrun. `request_stop` records the caller.
        self.training.caller = key
        try:
            getattr(component, hook)(self.training, *args)
        finally:
            self.training.caller = ""

    @contextmanager
    def _restoring_states(self) -> Iterator[None]:
        """Restore random states and the model's mode after the block, also after an error."""
        model = self.training.model
        states = RandomStates(self.training.setup.train_step.device)
        mode = model.training
        try:
            yield
        finally:  # after an error the step is still saved
            states.restore()
            if model.training != mode:
                model.train(mode)

    @contextmanager
    def _naming_callback(self, key: str, method: str) -> Iterator[None]:
        """Turn errors of a user's callback into one that names it; set `training.caller` meanwhile.

        Errors of optrun's components are raised unchanged.

        Raises:
            OptrunError: In place of any exception of a callback, also SystemExit, which would look
                like a good end.
        """
        self.training.caller = key
        try:
            yield
        except (Exception, SystemExit) as error:
            if key not in self.callbacks:
                raise
            line = " ".join(str(error).split())[:500]  # its message in one line
            raise OptrunError(
                f"{key}: {method} raised {type(error).__name__}: {line} (after step"
                f" {self.training.global_step}). HYDRA_FULL_ERROR=1 shows where. Fix it, then"
                f" run: {self.training.command(f'resume={self.training.run_dir}', mended=True)}"
            ) from error
        finally:
            self.training.caller = ""


def _defines_hook(component: object, hook: str) -> bool:
    """Tell whether a component defines a hook; one inherited from `Callback` is empty."""
    method = getattr(component, hook, None)
    if method is None:
        return False
    return getattr(method, "__func__", None) is not getattr(Callback, hook)


def _refuse_other_than_json(value: object, where: str = "its result") -> None:
    """Refuse a value that would change if it were written as JSON and read back.

    Args:
        value: The value; lists and mappings are searched.
        where: Path of the value, for the message.

    Raises:
        TypeError: A key is no str, or a value is a tuple, tensor or another type that JSON lacks.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{where}: key {key!r}: expected a text, since JSON has no other keys"
                )
            _refuse_other_than_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_other_than_json(item, f"{where}[{index}]")
    elif not isinstance(value, bool | str | int | float | None):
        raise TypeError(
            f"{where}: expected texts, numbers, lists and mappings of them, got"
            f" {type(value).__name__}"
        )
