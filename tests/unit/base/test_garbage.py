"""When Python collects garbage: seldom while a command starts, as usual from its first step on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from optrun.base import garbage
from optrun.cli import main as cli


@pytest.fixture
def usual() -> Iterator[tuple[int, int, int]]:
    """The thresholds before, with nothing set aside.

    Put back at the end, with all set aside, as in other tests.
    """
    before = gc.get_threshold()
    gc.unfreeze()
    yield before
    garbage.resume()
    gc.freeze()
    gc.set_threshold(*before)


def test_a_command_starts_without_passes_and_trains_as_usual(
    usual: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(argv: list[str]) -> int:
        assert argv == ["lr=1"]
        assert gc.get_threshold()[0] >= 100 * usual[0]
        garbage.resume()
        assert gc.get_threshold() == usual
        assert gc.get_freeze_count() > 1000, "what a start made is no work for later passes"
        return 75

    monkeypatch.setattr(cli, "run", start)
    monkeypatch.setattr("sys.argv", ["optrun", "lr=1"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 75
    assert len(gc.get_objects()) < 10_000, (
        "next to nothing is left for the passes at the end of the process"
    )


def test_the_collector_of_another_program_is_left_alone(usual: tuple[int, int, int]) -> None:
    before = gc.get_freeze_count()
    garbage.resume()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (usual, before)
    gc.disable()
    try:
        garbage.postpone()
        assert gc.get_threshold() == usual
    finally:
        gc.enable()


def test_what_a_run_made_is_finished_at_the_end(
    usual: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Callback:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            ended.append("a callback")

    def start(argv: list[str]) -> int:
        garbage.resume()
        Callback()
        return len(argv)

    monkeypatch.setattr(cli, "run", start)
    monkeypatch.setattr("sys.argv", ["optrun"])
    with pytest.raises(SystemExit):
        cli.main()
    assert ended == ["a callback"]
    assert gc.get_threshold() == usual
