"""A command line is parsed once and composed once, and everything asks that one object."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from optrun.base.errors import ConfigError
from optrun.cli import train
from optrun.config import overrides, store
from optrun.config.compose import compose_line
from optrun.config.request import CommandLine
from optrun.launch import single_run

LINES = [
    [],
    ["optimizer=lamb", "lr=2e-3"],
    ["lr=2e-3", "optimizer=lamb", "optimizer.eps=1e-5", "model.config.n_layer=3"],
    ["tracking=tensorboard", "seed=3", "++task.prompt=x"],
    ["hydra.run.dir=here", "hydra.job.name=other", "clip=none"],
    ["data=files", "data.train=[a.csv,b.csv]", "run_name='a b'"],
]


class Stopped(Exception):
    """In place of a run."""


def test_a_run_parses_and_composes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []

    def count(module: object, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: object, **options: object) -> object:
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(module, name, counted)

    def stop(*args: object) -> None:
        raise Stopped

    count(overrides, "parse")
    count(overrides, "refuse_twice")
    count(store, "compose")
    monkeypatch.setattr(single_run, "refuse_used", stop)
    with pytest.raises(Stopped):
        train.run(["optimizer=lamb", "lr=2e-3"])
    assert sorted(calls) == ["compose", "parse", "refuse_twice"]


@pytest.mark.parametrize("tokens", LINES)
def test_values_are_put_in_as_hydra_composes_them(tokens: list[str]) -> None:
    hydra = store.open_hydra()
    checked, cfg = compose_line(hydra, CommandLine(overrides=tokens))
    expected = store.compose(hydra, "config", checked)
    assert cfg == expected
    assert list(cfg.hydra.overrides.task) == list(expected.hydra.overrides.task)
    assert cfg.hydra.job.override_dirname == expected.hydra.job.override_dirname


def test_a_part_of_a_command_line() -> None:
    line = CommandLine(overrides=["++lr=1e-3", "resume=latest", "seed=1"])
    assert line.resume == "latest"
    assert line.without("resume", "lr").overrides == ["seed=1"]
    override = line.override("lr")
    assert override is not None
    assert override.value() == 1e-3
    assert pickle.loads(pickle.dumps(line)).parsed == line.parsed
    with pytest.raises(ConfigError, match="lr is given twice"):
        _ = CommandLine(overrides=["lr=1", "lr=2"]).parsed
