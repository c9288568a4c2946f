"""Ranks of another launcher: the first composes the run, and the others follow it."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Self

from rich.console import Console

from optrun.base.errors import EXIT_DONE, EXIT_FAILED
from optrun.distributed.rendezvous import Rendezvous
from optrun.distributed.verdict import LostRankError
from optrun.launch.payload import Payload
from optrun.launch.rank import PARTING_SECONDS, Rank, take_part

if TYPE_CHECKING:
    from optrun.artifacts.run_dir import RunDir
    from optrun.config.request import Request
    from optrun.runner.outcome import Outcome
    from optrun.runner.resume.checkpoint import ResumePoint

_COMPOSING_SECONDS = 60.0
"""Time for rank 0 to compose the run, beyond the timeout."""
_PAYLOAD = "payload"
"""Key of the rendezvous for the run to train."""
_LEFT = "left"
"""Key of the rendezvous for ranks that leave because rank 0 cannot start."""


class Leader:
    """Rank 0 of a launcher: it composes the run and sends it to the others.

    Args:
        rank: This process.
        rendezvous: With the other ranks.
    """

    def __init__(self, rank: Rank, rendezvous: Rendezvous) -> None:
        self.launched = rank.launched
        self._rank = rank
        self._rendezvous = rendezvous
        self._sent = False

    def lead(
        self,
        request: Request,
        run: RunDir,
        console: Console,
        resume: ResumePoint | None,
    ) -> Outcome:
        """Send the run to all other ranks, and train with them.

        Returns:
            The run directory, the values of `summary.json`, and a generated sample, if there is
            one.

        Raises:
            OptrunError: Some ranks failed; the message says how all of them ended.
        """
        payload = Payload.of(request, run, resume, quiet=console.quiet)
        self._sent = True
        self._rendezvous.send(_PAYLOAD, asdict(payload))
        # Raises the error of the run after all ranks have reported their ends.
        outcome = take_part(self._rank, payload, self._rendezvous)
        assert outcome is not None  # None on other ranks than 0 only
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let the others go if there is nothing to run."""
        if not self._sent:
            with contextlib.suppress(LostRankError):
                self._rendezvous.send(
                    _PAYLOAD,
                    {"exit_code": getattr(error, "exit_code", EXIT_FAILED) if error else 0},
                )
                self._rendezvous.collect(_LEFT, range(1, self._rendezvous.size), PARTING_SECONDS)


def follow_leader(rank: Rank, rendezvous: Rendezvous) -> int:
    """Receive the run from rank 0, and train as another rank of a launcher.

    Waits for rank 0 as long as that may take to compose the run.

    Returns:
        The exit code: that of rank 0 if it has refused to start, and has printed why.

    Raises:
        OptrunError: A rank failed; one error for the ends of all known ranks.
    """
    message = rendezvous.receive(_PAYLOAD, 0, rendezvous.timeout + _COMPOSING_SECONDS)
    if "exit_code" in message:
        with contextlib.suppress(LostRankError):  # rank 0 need not wait, and may be gone
            rendezvous.send(_LEFT, None)
        return int(message["exit_code"])
    take_part(rank, Payload(**message), rendezvous)
    return EXIT_DONE
