"""optrun from Python: results, errors that are raised, and nothing that outlives a call."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from torch.optim.optimizer import register_optimizer_step_post_hook

import optrun
from optrun.base.errors import CheckpointError, ConfigError, OptrunError, StoppedEarly, StorageError
from tests.running import TINY_GPT, records, summary, tensors, write_text

ROOT = Path(__file__).parents[2]
FEW = [
    "training.max_steps=3",
    "training.logging_steps=1",
    "training.eval_steps=3",
    "checkpoint.save_steps=1",
]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return [
        *TINY_GPT,
        *FEW,
        "data=files",
        f"data.train={write_text(tmp_path)}",
        "data.max_eval_examples=8",
    ]


@pytest.fixture
def at_step() -> Iterator[Callable[[int, Callable[[], Any]], None]]:
    """Do something after an optimizer step of whatever trains."""
    handles = []

    def at(step: int, act: Callable[[], Any]) -> None:
        done = [0]

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            values = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            done[0] += values > 1000  # not the trial of an optimizer on a parameter of its own
            if done[0] == step and values > 1000:
                act()

        handles.append(register_optimizer_step_post_hook(hook))

    yield at
    for handle in handles:
        handle.remove()


def process_state() -> dict[str, Any]:
    """What a host program has once."""
    return {
        "signals": [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ]
        + [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)],
        "folder": Path.cwd(),
        "environment": {
            name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")
        },
        "torch": (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.backends.cudnn.benchmark,
            torch.get_float32_matmul_precision(),
        ),
        "hydra": GlobalHydra.instance().is_initialized(),
        "warnings": list(warnings.filters),
        "excepthook": sys.excepthook,
        "output": (sys.stdout, sys.stderr),
        "threads": {
            thread.name for thread in threading.enumerate() if thread.name.startswith("optrun")
        },
    }


@pytest.fixture
def untouched() -> Iterator[None]:
    """A process in which Hydra has no application yet, compared before and after."""
    GlobalHydra.instance().clear()
    before = process_state()
    yield
    after = process_state()
    assert {name: after[name] for name in after} == before


def test_two_runs_in_one_process_are_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the first reaches the second, and a call computes what the command does."""
    for name in ("one", "two"):
        optrun.run([*words, f"hydra.run.dir={name}"], quiet=True)
        torch.rand(3)
    assert capsys.readouterr() == ("", "")
    assert records(Path("one")) == records(Path("two"))
    assert tensors(Path("one"), 3) == tensors(Path("two"), 3)
    optrun.run([*words, "hydra.run.dir=three", "seed=1"], quiet=True)
    assert tensors(Path("one"), 3) != tensors(Path("three"), 3)


def test_a_run_returns_its_result_and_is_opened_again(
    words: list[str], untouched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words += ["optimizer=lamb", "lr=2e-3"]
    made = optrun.run([*words, "hydra.run.dir=run"])
    assert "eval/loss" in capsys.readouterr().out
    assert made.run_dir == Path("run").resolve()
    assert (made.exit_reason, made.summary["global_step"]) == ("finished", 3)
    assert made.metrics["eval/loss"] == summary(Path("run"))["metrics"]["last"]["eval/loss"]
    assert made.summary["command"].startswith("optrun ")
    assert isinstance(made.model, transformers.GPT2LMHeadModel)
    assert made.model is made.model
    assert not made.model.training
    run = optrun.load_run("run/checkpoints/step-00000002")
    assert run == made.run == optrun.load_run(Path("run"))
    assert run.config == optrun.compose(words)
    assert [record["step"] for record in run.metrics] == [0, 1, 2, 3]
    assert run.summary["status"] == "finished"
    assert [path.name for path in run.checkpoints][-1] == "step-00000003"
    assert run.best_checkpoint in run.checkpoints
    assert run.evaluate()["eval/loss"] == pytest.approx(made.metrics["eval/loss"], rel=1e-6)
    early, final = run.load_model(run.checkpoints[0]), run.load_model()
    assert not torch.equal(early.transformer.wte.weight, final.transformer.wte.weight)
    newest = run.load_model(run.checkpoints[-1])
    assert torch.equal(newest.transformer.wte.weight, final.transformer.wte.weight)
    gone_on = run.resume(["training.max_steps=5"], quiet=True)
    assert gone_on.summary["global_step"] == 5
    assert [record["step"] for record in run.metrics] == [0, 1, 2, 3, 4, 5]
    assert run.config.training.max_steps == 5


@pytest.mark.parametrize(
    ("overrides", "error", "said"),
    [
        (["optimizer=lam"], ConfigError, "Did you mean lamb"),
        (["lr=abc"], ConfigError, "a number"),
        (["resume=nowhere"], ConfigError, "no such directory"),
        (["resume=latest"], CheckpointError, "no run in"),
        (["-m", "lr=1e-3,2e-3"], ConfigError, "optrun.sweep"),
        (["--cfg", "job"], ConfigError, "keywords here"),
        (["lr=1e-3,2e-3"], ConfigError, "several values are a sweep"),
        (["hydra.sweep.dir=x"], ConfigError, "no effect on a single run"),
        ("lr=1", TypeError, "a list of texts"),
        ([1], TypeError, "a list of texts"),
    ],
)
def test_a_refusal_is_raised(
    overrides: Any, error: type[Exception], said: str, words: list[str], untouched: None
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        optrun.run(overrides)
    assert not Path("outputs").exists()


def test_a_single_plugin_is_no_list() -> None:
    with pytest.raises(TypeError, match="expected a list of files"):
        optrun.run([], plugins="my_lion.py")


def test_what_cannot_be_opened_is_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        optrun.load_run("nowhere")
    with pytest.raises(ConfigError, match="neither a run directory"):
        optrun.load_run(tmp_path)
    optrun.run([*words, "hydra.run.dir=run", "checkpoint=none"], quiet=True)
    run = optrun.load_run("run")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run.evaluate()
    with pytest.raises(ConfigError, match=r"lr=1: has no effect on an evaluation"):
        run.evaluate(["lr=1"])
    assert run.load_model().config.n_embd == 32
    (Path("run") / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        run.load_model()


def test_ctrl_c_stops_with_everything_saved(
    words: list[str], at_step: Any, untouched: None
) -> None:
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(StoppedEarly, match="everything is saved"):
        optrun.run([*words, "hydra.run.dir=run"], quiet=True)
    run = optrun.load_run("run")
    assert run.summary["status"] == "interrupted"
    assert run.summary["global_step"] == 2
    assert run.resume(quiet=True).summary["global_step"] == 3


def test_a_second_ctrl_c_leaves_the_process_alone(
    words: list[str], at_step: Any, untouched: None
) -> None:
    at_step(2, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        optrun.run([*words, "hydra.run.dir=run"], quiet=True)
    assert optrun.load_run("run").resume(quiet=True).summary["global_step"] == 3


def test_an_exception_of_ones_own_comes_through(
    words: list[str], at_step: Any, untouched: None
) -> None:
    def fail() -> None:
        raise LookupError("mine")

    at_step(2, fail)
    with pytest.raises(LookupError, match="mine"):
        optrun.run([*words, "hydra.run.dir=run"], quiet=True)
    assert summary(Path("run"))["status"] == "failed"


def test_the_disk_is_an_error_of_ours(
    words: list[str], monkeypatch: pytest.MonkeyPatch, untouched: None
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("optrun.cli.train.train", full)
    with pytest.raises(StorageError, match="Make room"):
        optrun.run(words)


def test_off_the_main_thread(words: list[str], untouched: None) -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(optrun.run([*words, "hydra.run.dir=run"], quiet=True))
    )
    thread.start()
    thread.join()
    assert found[0].exit_reason == "finished"


def test_one_call_at_a_time(words: list[str], at_step: Any) -> None:
    """What a call puts aside exists once in a process."""
    refused: list[BaseException] = []

    def call() -> None:
        try:
            optrun.compose([])
        except OptrunError as error:
            refused.append(error)

    at_step(1, call)
    assert optrun.run([*words, "hydra.run.dir=run"], quiet=True).exit_reason == "finished"
    assert "one call at a time" in str(refused[0])
    assert optrun.compose([]).seed == 0


def test_inside_of_a_hydra_application(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "app.yaml").write_text("a: 2\n")
    GlobalHydra.instance().clear()  # left by a test that composes in this process
    with initialize_config_dir(str(tmp_path / "theirs"), version_base=None):
        optrun.run([*words, "hydra.run.dir=run"], quiet=True)
        assert compose("app").a == 2


def test_job_logging_of_hydra_ends_with_the_run(words: list[str], untouched: None) -> None:
    optrun.run(
        [*words, "hydra.run.dir=run", "hydra/job_logging=default", "hydra.verbose=true"], quiet=True
    )


def test_import_is_light(tmp_path: Path) -> None:
    program = (
        "import sys, optrun\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'rich', 'transformers'} & set(sys.modules)\n"
        "import optrun.artifacts.target, optrun.sweeper.folder\n"
        "assert callable(optrun.run) and callable(optrun.sweep)\n"
        "assert optrun.artifacts.target.find_target\n"
        "assert optrun.compose(['optimizer=lamb']).optimizer.name == 'lamb'\n"
        "try: optrun.compose(['optimizer=lam'])\n"
        "except optrun.base.errors.ConfigError: print('refused')\n"
        "assert 'torch' not in sys.modules\n"
        "try: optrun.nosuch\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "refused\nmodule 'optrun' has no attribute 'nosuch'\n"
    assert (Path(optrun.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_results_are_typed(tmp_path: Path) -> None:
    program = tmp_path / "theirs.py"
    program.write_text(
        "import optrun\n"
        "loss: float = optrun.run(['lr=1e-3'], quiet=True).metrics['eval/loss']\n"
        "lr: float = optrun.compose([]).lr\n"
        "steps: list[int] = [record['step'] for record in optrun.load_run('run').metrics]\n"
        "wrong: int = optrun.run(['lr=1e-3']).run_dir\n"
    )
    command = [sys.executable, "-m", "mypy", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ours = [line for line in done.stdout.splitlines() if "theirs.py" in line]
    assert len(ours) == 1, done.stdout
    assert "theirs.py:5" in ours[0]


@pytest.mark.parametrize("name", ["resume", "run"])
def test_example(name: str, words: list[str], untouched: None) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def test_the_example_without_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "plain_torch.py"))
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("overrides", [5, None, "lr=1", iter(["lr=-1"]), [5]])
def test_overrides_are_a_list_of_texts(overrides: Any) -> None:
    with pytest.raises(TypeError, match="expected a list of texts"):
        optrun.compose(overrides)
