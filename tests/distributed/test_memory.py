"""A pretrained model that is cut over its ranks.

What each holds of it when it is saved, and at the end.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from optrun.artifacts.tensor_file import local_part
from optrun.distributed.world import World
from tests.distributed.ranked_runs import Start, start_on
from tests.running import TINY_GPT, write_labelled, write_text

WIDTH, LAYERS = 128, 4
LARGEST = 4 * WIDTH * 4 * WIDTH
"""Bytes of a matrix of the feed-forward part."""
SLACK = 64 * 1024
PHASES = {
    "save": (
        "optrun.training.saving.refuse_different_weights",
        "optrun.runner.train.has_evaluation_weights",
    ),
    "end": ("optrun.runner.train.gather_model", "optrun.runner.train.gather_model"),
}
"""A function with which each begins, and one with which it ends."""
ONE_STEP = [
    "training.max_steps=1",
    "training.per_device_train_batch_size=1",
    "training.global_batch_size=4",
    "data.eval_fraction=0.2",
    "data.max_length=16",
]


def peak(counted: profile, trace: Path) -> int:
    """The largest sum of bytes of the tensors that were made meanwhile.

    A file that is mapped is none.
    """
    counted.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]) for event in events if event["name"] == "[memory]"]
    mapped = {change["Addr"] for _, change in changes if change["Total Reserved"]}
    sizes = [
        change["Bytes"]
        for _, change in sorted(changes, key=lambda at: at[0])
        if change["Addr"] not in mapped
    ]
    return max(accumulate(sizes), default=0)


def bytes_held() -> int:
    """Of all tensors that are there, each memory once, on this rank."""
    gc.collect()
    tensors = [
        one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not one.is_meta
    ]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    memories = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


@contextmanager
def counted(run: Path, world: World) -> Iterator[None]:
    """Write the peak of each phase beside the run, and what was there before, for each rank."""
    profiles: dict[str, profile] = {}
    before: dict[str, int] = {}
    with ExitStack() as stack:

        def around(place: str, phase: str, *, begins: bool, ends: bool) -> None:
            module, _, name = place.rpartition(".")
            act: Callable[..., Any] = getattr(__import__(module, fromlist=[name]), name)

            def acting(*args: Any, **options: Any) -> Any:
                if begins:
                    before[f"before {phase}"] = bytes_held()
                    profiles[phase] = profile(
                        activities=[ProfilerActivity.CPU], profile_memory=True
                    )
                    profiles[phase].start()
                result = act(*args, **options)
                if ends:
                    profiles[phase].stop()
                return result

            stack.enter_context(patch(place, acting))

        for phase, (first, last) in PHASES.items():
            around(first, phase, begins=True, ends=first == last)
            if first != last:
                around(last, phase, begins=False, ends=True)
        yield
    peaks = {
        phase: peak(profiles[phase], run.with_name(f"{run.name}-{world.rank}.trace"))
        for phase in PHASES
    }
    run.with_name(f"{run.name}-{world.rank}.json").write_text(json.dumps(peaks | before))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`float32` and `bfloat16`: one model, as transformers has it."""
    folder = tmp_path_factory.mktemp("pretrained")
    sizes = [f"model.config.n_embd={WIDTH}", f"model.config.n_layer={LAYERS}"]
    words = [*TINY_GPT, *ONE_STEP, *sizes, "data=files", f"data.train={write_text(folder, 60)}"]
    start_on(1, [Start(folder / "run", words)], folder)
    shutil.copytree(folder / "run" / "model", folder / "float32")
    shutil.copytree(folder / "float32", folder / "bfloat16")
    tensors = load_file(folder / "float32" / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, folder / "bfloat16" / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(pretrained: Path, name: str, dtype: str, kind: str, *more: str) -> Start:
    """One step that changes nothing: what is exported is what was read."""
    words = [
        *ONE_STEP,
        "model=pretrained",
        f"model.path={pretrained / dtype}",
        "data=files",
        "optimizer=adamw",
        "lr=1e-30",
    ]
    run = pretrained / f"{name}-{dtype}-{kind}"
    return Start(
        run,
        [*words, f"data.train={pretrained / 'corpus.txt'}", f"distributed={kind}", *more],
        within=counted,
    )


def weights(start: Start) -> dict[str, torch.Tensor]:
    return load_file(next((start.run / "model").glob("*.safetensors")))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_saves_without_the_whole_model(pretrained: Path, tmp_path: Path, ranks: int) -> None:
    """The last save copies nothing, and gradients are gone before it.

    At the end, where all help to write the model, moments are gone, too: some of one tensor beside
    the share.
    """
    starts = [start(pretrained, f"on-{ranks}", dtype, "fsdp") for dtype in ("float32", "bfloat16")]
    start_on(ranks, starts, tmp_path / "meet")
    whole = sum(tensor.nbytes for tensor in weights(starts[0]).values())
    share = whole / ranks
    for each in starts:
        for rank in range(ranks):
            peaks = json.loads(each.run.with_name(f"{each.run.name}-{rank}.json").read_text())
            assert 3 * share <= peaks["before save"] < 3 * share + LARGEST + SLACK, (
                each.run.name,
                rank,
            )
            assert peaks["save"] < LARGEST + SLACK, (each.run.name, rank)
            assert share <= peaks["before end"] < share + LARGEST + SLACK, (each.run.name, rank)
            # A tensor is gathered beside its copy, and each of gloo's two threads lets the one
            # before go late.
            assert LARGEST <= peaks["end"] < 6 * LARGEST + SLACK < 0.6 * whole, (
                each.run.name,
                rank,
            )


@pytest.mark.slow
def test_what_ranks_read_is_what_one_process_reads(pretrained: Path, tmp_path: Path) -> None:
    """Bit for bit, also where files hold another dtype, and a head is new.

    It is made from the seed alike.
    """
    labelled = [
        f"data.train={write_labelled(tmp_path, 24)}",
        "task=sequence_classification",
        "seed=7",
    ]
    kinds: dict[str, list[str]] = {"text": [], "head": labelled, "lora": ["adapter=lora"]}
    starts = {
        kind: [
            start(pretrained, name, dtype, kind, *more)
            for dtype in ("float32", "bfloat16")
            for name, more in kinds.items()
        ]
        for kind in ("fsdp", "none")
    }
    start_on(2, starts["fsdp"], tmp_path / "meet")
    start_on(1, [Start(each.run, each.overrides) for each in starts["none"]], tmp_path)
    for ours, theirs in zip(starts["fsdp"], starts["none"], strict=True):
        found, wanted = weights(ours), weights(theirs)
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-25)
