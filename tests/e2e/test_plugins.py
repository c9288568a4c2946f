"""`--plugin`.

A choice from the user's own file, and one message for each way in which it cannot be.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optrun.base.errors import ConfigError
from optrun.cli.completion import candidates
from optrun.cli.main import run
from optrun.config import registry, store
from optrun.config.registry import plugins

LION = """
from dataclasses import dataclass
import torch
import optrun
from optrun.config.schema.optimizer_base import OptimizerConfig


@dataclass(kw_only=True)
class MyLionConfig(OptimizerConfig):
    default_lr: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)


@optrun.register_optimizer("my_lion", schema=MyLionConfig)
class MyLion(torch.optim.SGD):
    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
"""


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


@pytest.fixture
def lion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_lion.py"
    path.write_text(LION)
    return path


def test_its_name_is_a_choice(lion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "optimizer=my_lion",
        "optimizer.betas=[0.8,0.9]",
        "--cfg",
        "job",
        "--plugin",
        "my_lion.py",
    ]
    assert run(argv) == 0
    assert "name: my_lion" in capsys.readouterr().out
    assert run(["--plugin=my_lion.py", "--help"]) == 0
    assert "my_lion" in capsys.readouterr().out
    assert run(["--help", "optimizer=my_lion", "--plugin", "my_lion.py"]) == 0
    assert "optimizer.betas=" in capsys.readouterr().out
    (loaded,) = plugins.LOADED.values()
    assert (loaded["path"], loaded["names"]) == (str(lion), ["optimizer=my_lion"])
    assert loaded["sha256"] == hashlib.sha256(lion.read_bytes()).hexdigest()


def test_its_keys_are_checked(lion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, fact in {
        "optimizer=my_lio": "Did you mean my_lion",
        "optimizer.beta=1": "optimizer.betas",
        "optimizer.default_lr=-1": "above 0",
        "optimizer.weight_decay=heavy": "optimizer.weight_decay=heavy",
    }.items():
        chosen = [] if word.startswith("optimizer=") else ["optimizer=my_lion"]
        assert run(["--plugin", "my_lion.py", *chosen, word]) == 2
        assert fact in capsys.readouterr().err


def test_completion_offers_it(lion: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "")
    line = "optrun --plugin my_lion.py optimizer=my"
    assert candidates(store.open_hydra(), "config", line) == ["optimizer=my_lion"]


def test_a_module_is_one_too(lion: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(lion.parent))
    assert run(["--plugin", "my_lion", "optimizer=my_lion", "--cfg", "job"]) == 0
    assert plugins.LOADED["my_lion"]["plugin"] == "my_lion"


def test_the_package_around_a_module_may_fail(
    lion: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(lion.parent))
    for name, text in {"breaking": "1 / 0", "leaving": "raise SystemExit(0)"}.items():
        Path(name).mkdir()
        Path(name, "__init__.py").write_text(text)
        Path(name, "lion.py").write_text(LION)
        assert run(["--plugin", f"{name}.lion", "optimizer=my_lion", "--cfg", "job"]) == 2
        assert f"{name}.lion: it fails at import" in capsys.readouterr().err


def test_a_package_is_read_again_with_its_modules(
    lion: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(lion.parent))
    Path("pride").mkdir()
    Path("pride/__init__.py").write_text("from . import lion")
    Path("pride/lion.py").write_text(LION)
    assert run(["--plugin", "pride", "optimizer=my_lion", "--cfg", "job"]) == 0
    plugins.forget("pride")
    assert run(["--plugin", "pride", "optimizer=my_lion", "--cfg", "job"]) == 0


def test_a_module_of_somebody_else_stays_imported() -> None:
    import json

    with pytest.raises(ConfigError, match="registers nothing"):
        plugins.load("json")
    assert sys.modules["json"] is json


def test_a_changed_file_is_read_again(
    lion: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the second, at the same size: what bytecode is matched by."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert run(["--plugin", "my_lion.py", "optimizer=my_lion", "--cfg", "job"]) == 0
    lion.write_text(LION.replace("1e-4", "3e-4"))
    capsys.readouterr()
    assert (
        run(["--plugin", "my_lion.py", "optimizer=my_lion", "--cfg", "job", "-p", "optimizer"]) == 0
    )
    assert "0.0003" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text", "facts"),
    [
        (["--plugin"], "", ["--plugin", "FILE.py"]),
        (["--plugin", "optimizer=my_lion"], "", ["--plugin optimizer=my_lion", "FILE.py"]),
        (["--plugin", "gone.py"], "", ["gone.py", "no such file"]),
        (["--plugin", "no_such_module"], "", ["no_such_module", "no such module"]),
        (["--plugin", "mine"], "", ["--plugin mine.py"]),
        (["--plugin", "https://example.org/mine.py"], "", ["https://example.org/mine.py"]),
        (["--plugin", "mine.py", "--plugin=mine.py"], "", ["mine.py", "twice"]),
        (["--plugin", "mine.py"], "x = 1", ["mine.py", "registers nothing", "register_optimizer"]),
        (["--plugin", "mine.py"], "\n1 / 0", ["mine.py", "line 2", "ZeroDivisionError"]),
        (["--plugin", "mine.py"], "x = (", ["mine.py", "line 1", "SyntaxError"]),
        (["--plugin", "mine.py"], "raise SystemExit(0)", ["mine.py", "line 1", "SystemExit"]),
        (["--plugin", "mine.py"], "raise GeneratorExit", ["mine.py", "line 1", "GeneratorExit"]),
        (
            ["--plugin", "mine.py"],
            "def deeper(): deeper()\ndeeper()",
            ["mine.py", "RecursionError"],
        ),
        (
            ["--plugin", "mine.py"],
            LION.replace("betas: tuple[float, float] = (0.9, 0.99)", "betas: set = None"),
            ["mine.py", "MyLionConfig", "betas", "set"],
        ),
        (
            ["--plugin", "mine.py"],
            LION.replace("1e-4", "'fast'"),
            ["mine.py", "MyLionConfig", "default_lr", "fast"],
        ),
        (["--plugin", "mine.py"], LION.replace("my_lion", "Null"), ["mine.py", "Null", "letters"]),
        (["--plugin", "mine.py"], LION.replace("my_lion", "l\u00f6we"), ["mine.py", "letters"]),
        (["--plugin", "~nobody_here/mine.py"], "", ["~nobody_here/mine.py", "no such file"]),
        (["--plugin", "mi\0ne.py"], "", ["path", "null byte"]),
        (
            ["--plugin", "mine.py"],
            "import not_installed_here",
            ["mine.py", "line 1", "not_installed_here"],
        ),
        (
            ["--plugin", "mine.py"],
            LION.replace('"my_lion"', '"lamb"'),
            ["mine.py", "optimizer=lamb", "optrun itself"],
        ),
        (
            ["--plugin", "mine.py"],
            LION.replace("@dataclass(kw_only=True)", ""),
            ["mine.py", "MyLionConfig"],
        ),
        (
            ["--plugin", "mine.py", "--plugin", "my_lion.py"],
            LION,
            ["my_lion", "mine.py", "my_lion.py", "taken"],
        ),
    ],
)
def test_what_is_refused(
    lion: Path, argv: list[str], text: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(text)
    assert run([*argv, "--cfg", "job"] if argv != ["--plugin"] else argv) == 2
    said = capsys.readouterr().err
    assert [fact for fact in facts if fact not in said] == []
    assert "Traceback" not in said
    assert "lamb" not in [
        row.name for row in registry.choices("optimizer").values() if row.origin is not None
    ]
    assert len(plugins.LOADED) == len([name for name in sys.modules if name.endswith("%2Epy")])


def test_a_yaml_names_no_plugin(lion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/evening.yaml").write_text("defaults: [config, _self_]\nplugin: my_lion.py\n")
    for words in (["--config-dir", "mine", "-cn", "evening"], ["plugin=my_lion.py"]):
        assert run([*words, "--cfg", "job"]) == 2
        said = capsys.readouterr().err
        assert [fact for fact in ("plugin", "--plugin", "command line") if fact not in said] == []
    assert plugins.LOADED == {}


FORGETFUL = """
    def step(self, closure=None):
        self.steps = [*getattr(self, "steps", []), 1]
        for param in self.param_groups[0]["params"]:
            param.data.sub_(0.1 * param.grad / len(self.steps))
"""


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            LION.replace("lr, betas, weight_decay", "lr, weight_decay"),
            ["optimizer=my_lion", "MyLion", "betas"],
        ),
        (LION + FORGETFUL, ["optimizer=my_lion: MyLion cannot be used here", "after a resume"]),
        (LION.replace("(torch.optim.SGD)", ""), ["optimizer=my_lion", "MyLion", "torch optimizer"]),
    ],
)
def test_the_state_of_a_plain_torch_optimizer_makes_a_round_trip_first(
    lion: Path, text: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lion.write_text(text)
    assert run(["--plugin", "my_lion.py", "explain", "optimizer=my_lion"]) == 2
    said = capsys.readouterr().err
    assert [fact for fact in facts if fact not in said] == []


def test_a_worker_refuses_another_file(lion: Path) -> None:
    record = dict(plugins.load("my_lion.py"))
    plugins.load_again([record], changes_allowed=False)
    lion.write_text(LION + "# a word more\n")
    with pytest.raises(
        ConfigError, match=r"my_lion\.py: changed since the sweep was started: sha256 \w{12}, now"
    ):
        plugins.load_again([record], changes_allowed=False)
    lion.unlink()
    with pytest.raises(ConfigError, match=r"no such file"):
        plugins.load_again([record], changes_allowed=False)


def test_a_worker_that_got_an_object_of_it_has_its_rows(lion: Path) -> None:
    """As joblib's do: an object is unpickled, and the plugin loaded afterwards."""
    record = dict(plugins.load("my_lion.py"))
    (name,) = plugins.LOADED
    text = pickle.dumps(registry.schemas("optimizer")["my_lion"](name="my_lion"))
    plugins.forget(name)
    assert pickle.loads(text).default_lr == 1e-4
    plugins.load_again([record], changes_allowed=False)
    assert plugins.LOADED[name] == record
