"""The rows of a run are made once, however many ranks of a machine want them, and give signs of
life meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from optrun.data import examples
from optrun.distributed.world import World
from optrun.runner import train
from tests.distributed.ranked_runs import Start, start_on
from tests.running import TINY_GPT, optrun, write_text

WORDS = [
    "task=causal_lm",
    "model=gpt_tiny",
    "distributed=ddp",
    "training.max_steps=2",
    "training.device=cpu",
]


@contextmanager
def counted(run: Path, world: World) -> Iterator[None]:
    """Inside, each set of rows that this rank tokenises leaves a line."""
    write = examples.write_ids

    def write_noted(
        texts: Any, encoder: Any, longest: Any, folder: Path, dtype: str, characters: int
    ) -> None:
        with (run.parent / "tokenised").open("a", encoding="utf-8") as file:
            file.write(f"{characters} characters, rank {world.rank}\n")
        write(texts, encoder, longest, folder, dtype, characters)

    world.barrier()
    cache = {
        "OPTRUN_CACHE": str(run.parent / "cache")
    }  # the server of the ranks may have another one
    with patch.dict(os.environ, cache), patch.object(examples, "write_ids", write_noted):
        yield


def test_ranks_of_a_machine_tokenise_once(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"the cat {n} sat on the mat\n" for n in range(20_000)), encoding="utf-8"
    )
    start = Start(tmp_path / "run", [*WORDS, "data=files", f"data.train={text}"], within=counted)
    start_on(2, [start], tmp_path / "meet")
    made = (tmp_path / "tokenised").read_text(encoding="utf-8").splitlines()
    sets = [line.split()[0] for line in made]
    assert made
    assert len(sets) == len(set(sets)), made


def test_the_watcher_of_a_run_hears_that_its_data_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    beat, signs = train.beat, list[str]()

    def beat_noted(*given: Any) -> Any:
        if not given:
            signs.extend(path.name for path in tmp_path.glob("cache/*"))
        return beat(*given)

    monkeypatch.setattr(train, "beat", beat_noted)
    monkeypatch.setattr("optrun.data.heartbeat._EVERY_SECONDS", 0.0)
    data = ["data=files", f"data.train={write_text(tmp_path, 20)}"]
    assert optrun(*TINY_GPT, *data, "training.max_steps=1", "checkpoint=none", "tracking=none") == 0
    assert {"tokens", "tokenizers"} <= set(signs)
