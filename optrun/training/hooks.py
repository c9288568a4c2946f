"""Calls every component of the loop at every hook, and keeps their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optrun.artifacts.atomic import storing
from optrun.artifacts.metrics import to_json
from optrun.base.errors import OptrunError
from optrun.base.plain import PlainMapping
from optrun.training.callback import HOOKS, Callback, StopRequest, TrainingContext
from optrun.training.state import RandomStates
from optrun.training.step import StepResult


class Hooks:
    """The components of the loop, in the order of their calls.

    On several ranks the components that write, and the user's, belong to rank 0 alone; the loop
    lets the other ranks know what they ask for.

    Args:
        training: What every hook is given.
        components: optrun's own; what they raise ends the run as it is.
        callbacks: The user's, by configuration key. What they raise ends the run with a message
            that names them; they leave random states and the model's mode as they found them.
        may_request: Whether a rank has callbacks of the user's, which may ask for a save or an end;
            None: this one.
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
        self.components = components
        self.callbacks = callbacks
        self.may_request = bool(callbacks) if may_request is None else may_request
        self.failure: BaseException | None = None
        """The first that one of them raised in a step: the others hear of the step, and it ends
        with the run saved."""
        self._final_state: dict[str, object] | None = None
        every = [*((component.key, component) for component in components), *callbacks.items()]
        self._stateful: list[tuple[str, Any]] = [
            (key, component) for key, component in every if hasattr(component, "state_dict")
        ]
        self._having = {
            hook: [(key, component) for key, component in every if _has(component, hook)]
            for hook in HOOKS
        }

    def reason_to_wait(self) -> str | None:
        """Name the component that needs the numbers of each step at once, if any."""
        for key, component in self._having["on_step"]:
            if not getattr(component, "hears_late", False):
                return f"{key or type(component).__name__}: on_step is told of each step"
        return None

    def on_train_begin(self) -> None:
        """Call the hooks before the first step of this start."""
        if self.callbacks:
            with storing(self.training.extra_dir):
                self.training.extra_dir.mkdir(exist_ok=True)
        self._call("on_train_begin")

    def on_step(self, result: StepResult) -> None:
        """Call the hooks after each step."""
        self.training.step_finished = False
        self._call("on_step", result, deferred=True)

    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        """Call the hooks after each evaluation."""
        self._call("on_evaluate", metrics, deferred=True)

    def on_log(self, record: PlainMapping, due: PlainMapping) -> None:
        """Call the hooks with each line of metrics.

        Args:
            record: The line.
            due: What callbacks hear of it: without what the end of the run alone has added to it.
        """
        self.training.step_finished = True
        self._call("on_log", record, of_callbacks=due, deferred=True)

    def on_save(self, checkpoint: Path) -> None:
        """Call the hooks after each checkpoint."""
        self._call("on_save", checkpoint)

    def on_rollback(self) -> None:
        """Call the hooks after training went back."""
        self.training.step_finished = True
        self._call("on_rollback")

    def on_train_end(self, status: str) -> None:
        """Call the hooks at the end, however it came.

        Each component hears of it, also if another one raises.

        Raises:
            Exception: The first, where the run ended well; else it is told, and what ended the run
                is what counts.
        """
        ended_well = status == "finished"
        errors = list[Exception]()
        for key, component in self._having["on_train_end"]:
            try:
                self._one(
                    key, component, "on_train_end", "failed" if ended_well and errors else status
                )
            except Exception as error:  # of a user's class, or of a disk
                errors.append(error)
        if ended_well and errors:
            raise errors[0]
        for failure in errors:
            self.training.note(f"warning: {failure}")

    def begin_final(self) -> None:
        """Begin the end of the run. Its extra evaluations do not count if the run is prolonged."""
        if not self.training.final:
            self._final_state = self.state_dict()
            self.training.final = True

    # State
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the states of components by configuration key, as JSON holds them.

        Raises:
            OptrunError: A callback's state is none that JSON can hold.
        """
        if self._final_state is not None:
            return self._final_state
        states = {}
        for key, component in self._stateful:
            with self._as(key, "state_dict"):
                state = component.state_dict()
                _refuse_other_than_json(state)
                states[key] = to_json(state, where="state_dict")
        return states

    def load_state_dict(self, states: Mapping[str, object], stop: StopRequest | None) -> None:
        """Put the states of a checkpoint back; a component without one there keeps its own."""
        self.training.stop = stop
        for key, component in self._stateful:
            if key in states:
                with self._as(key, "load_state_dict"):
                    component.load_state_dict(states[key])

    # Calls
    # ----------------------------------------------------------------------------------------------

    def _call(
        self, hook: str, *args: object, of_callbacks: object = None, deferred: bool = False
    ) -> None:
        """Call one hook of all components.

        Args:
            hook: Its name.
            *args: What the components are given.
            of_callbacks: What the user's are given instead; None: the same.
            deferred: An error of others' code waits until the step is done. What a disk or a number
                ends, ends now.

        Raises:
            OptrunError: Of optrun's own components; without `deferred` also of the user's.
        """
        for key, component in self._having[hook]:
            is_ours = key not in self.callbacks
            try:
                self._one(
                    key,
                    component,
                    hook,
                    *(args if is_ours or of_callbacks is None else (of_callbacks,)),
                )
            except Exception as error:
                if not deferred or (is_ours and isinstance(error, OptrunError | OSError)):
                    raise
                self.failure = self.failure or error

    def _one(self, key: str, component: object, hook: str, *args: object) -> None:
        if key in self.callbacks:
            with self._watching(), self._as(key, hook):
                getattr(component, hook)(self.training, *args)
            return
        self.training.caller = key
        try:
            getattr(component, hook)(self.training, *args)
        finally:
            self.training.caller = ""

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Put random states and the model's mode back after a user's callback."""
        model = self.training.model
        states = RandomStates(self.training.setup.train_step.device)
        mode = model.training
        try:
            yield
        finally:  # also where it raises: the step is saved then
            states.restore()
            if model.training != mode:
                model.train(mode)

    @contextmanager
    def _as(self, key: str, method: str) -> Iterator[None]:
        """Name a user's component in its errors.

        Raises:
            OptrunError: In place of any `Exception`, and of SystemExit, which would pass for a good
                end.
        """
        self.training.caller = key
        try:
            yield
        except (Exception, SystemExit) as error:
            if key not in self.callbacks:
                raise
            line = " ".join(str(error).split())[:500]
            raise OptrunError(
                f"{key}: {method} raised {type(error).__name__}: {line} (after step"
                f" {self.training.global_step}). HYDRA_FULL_ERROR=1 shows where. Fix it, then"
                f" run: {self.training.command(f'resume={self.training.run_dir}', mended=True)}"
            ) from error
        finally:
            self.training.caller = ""


def _has(component: object, hook: str) -> bool:
    """Tell whether a component does something there.

    What it has of `Callback` alone does nothing.
    """
    method = getattr(component, hook, None)
    return method is not None and getattr(method, "__func__", None) is not getattr(Callback, hook)


def _refuse_other_than_json(value: object, where: str = "its result") -> None:
    """Refuse values that JSON does not hand back as they were.

    Raises:
        TypeError: A key that is no text, or a value of another type.
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
