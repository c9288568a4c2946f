"""A run that is killed and resumed, seen from the process that kills."""

from __future__ import annotations

from typing import cast

import pytest

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_EARLY
from optrun.certify.trial import Child, Nodes, TrialFailed


class Agent:
    """Stands for the agent of a node: it ends as it is looked at, at a look that is chosen."""

    def __init__(self, code: int, looks: int) -> None:
        self.code, self.looks = code, looks

    def ended(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def last_lines(self) -> str:
        return "said"


@pytest.mark.parametrize("looks", range(3))
def test_an_agent_that_was_asked_to_stop_is_started_again_whenever_it_ends(looks: int) -> None:
    ends = iter([Agent(EXIT_STOPPED_EARLY, looks), Agent(EXIT_DONE, 0)])
    nodes = Nodes(lambda node: cast("Child", next(ends)), 1)
    while not nodes.ended():
        """Looked at, as it is while a kill is awaited."""
    assert nodes.starts == 2


def test_another_end_is_a_failure() -> None:
    nodes = Nodes(lambda node: cast("Child", Agent(EXIT_FAILED, 1)), 1)
    assert not nodes.ended()
    with pytest.raises(TrialFailed, match="node 0 ended with exit code 1:\nsaid"):
        nodes.ended()
