"""torch's elastic agent, with optrun's judgement of which ends are worth another start."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import cast

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous

from optrun.distributed.verdict import RankEnd, error_of

Ends = list[RankEnd]

_HEARSAY_SECONDS = 16.0
"""For the agent of another machine to say how its ranks ended.

Where those of this one only lost them.

One that died has left the next meeting by then: torch counts it in for 15 s, and would wait for it
there.
"""
_ANSWER_SECONDS = 15
"""For an agent that has come to a meeting to say what the others wait for.

One that died there never does.
"""
_PARTING_SECONDS = 10.0
"""For the agents of other machines to hear how the ranks of this one ended."""
_LOOK_SECONDS = 0.1


class Agent(LocalElasticAgent):  # type: ignore[misc, unused-ignore]
    """Runs the ranks of this machine, and starts them again with those of the others.

    An end is worth another start if the code of all ends together says that the run failed; a
    refusal, a stop or a full disk would only come again. Agents tell each other how their ranks
    ended, so that they come to one judgement.

    Args:
        spec: What torch's agent starts.
        begin: Called before the ranks are started, told how those before them ended; None: they are
            the first.
        ends: Says how the ranks ended, by the exit codes that are not 0.
        stopped: Called when no rank of this machine runs any more.
        asked_to_stop: Whether the run is to end.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        begin: Callable[[Ends | None], None],
        ends: Callable[[dict[int, int]], Ends],
        stopped: Callable[[], None],
        asked_to_stop: Callable[[], bool],
    ) -> None:
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=os.devnull),
            exit_barrier_timeout=_PARTING_SECONDS,
            shutdown_timeout=30,
        )
        self._begin = begin
        self._ends = ends
        self._stopped = stopped
        self._asked_to_stop = asked_to_stop
        self.ended: Ends | None = None
        """How the ranks that were started last ended, with those of other machines that said so.

        None: they run.
        """
        self.is_meeting = False
        """Whether it waits for the agents of other machines."""

    @property
    def has_begun(self) -> bool:
        """Whether it has met the agents of the other machines."""
        return self._worker_group.store is not None

    @property
    def restarts_left(self) -> int:
        """How often the ranks may be started again."""
        return self._remaining_restarts

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks to their end.

        Raises:
            RendezvousClosedError: The other machines have come to theirs without this one; torch's
                agent says nothing.
        """
        result: RunResult | None = super().run(role)
        if result is None:
            raise RendezvousClosedError
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # The next store is a new one, at an address that a machine which comes later can read, too:
        # torch's handler would keep the first.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        self.is_meeting = True
        try:
            super()._rendezvous(worker_group)
        finally:
            self.is_meeting = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._begin(self.ended)
        self.ended = None
        started: dict[int, object] = super()._start_workers(worker_group)
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        if (
            self.ended is None
        ):  # torch stops ranks that are well, since those of another machine start again
            self.ended = self._heard(0.0)[0]
        self._stopped()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            own = self._ends(
                {failure.local_rank: failure.exitcode for failure in result.failures.values()}
            )
            if not self._is_worth_another(own):
                self._part(own)
        return result

    def _is_worth_another(self, own: Ends) -> bool:
        """Judge the ends of this machine's ranks, and hear of those of the others."""
        knows = any(end.code and not end.lost_rank for end in own)
        if not knows:
            self._tell(own, final=False)
        others, final = self._heard(0.0 if knows else _HEARSAY_SECONDS)
        self.ended = [*own, *others]
        error = error_of(self.ended)
        worth = not final and not self._asked_to_stop() and (error is None or error.exit_code == 1)
        if worth and self._remaining_restarts:
            self._tell(own, final=False)
            return True
        return False

    def _exit_barrier(self) -> None:
        if self.ended is None:
            self._part(self._ends({}))

    def _part(self, own: Ends) -> None:
        """End here: tell the agents of other machines, and let them hear it."""
        self._remaining_restarts = 0
        self._tell(own, final=True)
        if self.ended is None:
            self.ended = [*own, *self._heard(0.0)[0]]
        super()._exit_barrier()

    # What agents tell each other, in the store of this meeting
    # ---------------------------------------------------

    @property
    def _shared(self) -> Store:
        return cast(
            "Store", self._worker_group.store
        )  # there is one as soon as the agents have met

    def _tell(self, own: Ends, *, final: bool) -> None:
        told = {"ends": [asdict(end) for end in own], "final": final}
        try:
            self._shared.set(f"optrun/ends/{self._worker_group.group_rank}", json.dumps(told))
        except RuntimeError:
            return  # it is gone with the machine that held it

    def _heard(self, seconds: float) -> tuple[Ends, bool]:
        """Hear how the ranks of other machines ended, and whether one of their agents has ended for good.

        Args:
            seconds: To wait for one that knows the cause.
        """
        group, deadline = self._worker_group, time.monotonic() + seconds
        keys = [
            f"optrun/ends/{at}"
            for at in range(group.group_world_size or 0)
            if at != group.group_rank
        ]
        try:
            while True:
                told = [
                    json.loads(self._shared.get(key)) for key in keys if self._shared.check([key])
                ]
                known = any(
                    one["final"] or not all(end["lost_rank"] for end in one["ends"]) for one in told
                )
                if known or len(told) == len(keys) or time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_SECONDS)
        except RuntimeError:
            return [], False
        return [RankEnd(**end) for one in told for end in one["ends"]], any(
            one["final"] for one in told
        )


def handler_of(endpoint: str | None, fewest: int, nnodes: int, seconds: int) -> RendezvousHandler:
    """Make what the agents of a run meet by, once for its life.

    Args:
        endpoint: HOST:PORT; None: there is one machine.
        fewest: Machines that will do; torch waits 30 s more for the others.
        nnodes: Machines.
        seconds: To wait for them.
    """
    return rendezvous.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=endpoint or "127.0.0.1:0",
            run_id="optrun",
            min_nodes=fewest,
            max_nodes=nnodes,
            local_addr="127.0.0.1" if nnodes == 1 else None,
            timeout=seconds,
            join_timeout=seconds,
            read_timeout=min(seconds, _ANSWER_SECONDS),
        )
    )


def spec_of(
    command: Sequence[str], nproc: int, handler: RendezvousHandler, max_restarts: int
) -> WorkerSpec:
    """Say what torch's agent starts: so many interpreters with this command."""
    return WorkerSpec(
        role="default_role",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=tuple(command),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )


def is_lost_machine(error: Exception) -> bool:
    """Tell whether agents did not meet, or one that the others need has left."""
    return isinstance(error, RendezvousError | DistError)


def is_late(error: Exception) -> bool:
    """Tell whether machines did not come where agents that know each other met again.

    That start was counted.
    """
    return isinstance(error, RendezvousTimeoutError)
