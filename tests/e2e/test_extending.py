"""The files of docs/plugins.md, as they stand there.

Trained, swept, resumed, explained, reported, exported.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import optrun as package
from optrun import optimizer as optrun_optimizer
from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.config.registry import plugins
from optrun.config.schema.metric import chosen_metrics
from optrun.testing import check_optimizer
from tests.faults.runs import cut
from tests.faults.test_state_file import resealed
from tests.running import TINY_GPT, optrun, summary, write_text

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
FILES = dict(
    re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )
)
RUN = [
    *TINY_GPT,
    "data=files",
    "data.train=corpus.txt",
    "training.max_steps=2",
    "training.eval_steps=2",
]
PLUGINS = ["--plugin", "my_optimizers.py", "--plugin", "my_schedules.py"]
CHOSEN = [
    "optimizer=my_lion",
    "scheduler=sawtooth",
    "scheduler.period=2",
    "checkpoint.save_steps=1",
]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, 60)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    yield
    forget_all()


def forget_all() -> None:
    for name in list(plugins.LOADED):
        plugins.forget(name)


def test_the_optimizer_and_the_schedule_are_short() -> None:
    assert all(FILES[name].count("\n") < 60 for name in ("my_optimizers.py", "my_schedules.py"))


def test_a_run_its_resume_and_what_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun(*PLUGINS, *CHOSEN, *RUN, "hydra.run.dir=run") == 0, capsys.readouterr().err
    recorded = summary(Path("run"))["plugins"]
    assert [(one["plugin"], one["names"]) for one in recorded] == [
        ("my_optimizers.py", ["optimizer=my_lion"]),
        ("my_schedules.py", ["scheduler=sawtooth"]),
    ]
    assert (
        json.loads(Path("run/checkpoints/step-00000002/state.json").read_text())["plugins"]
        == recorded
    )
    assert summary(Path("run"))["command"].startswith(
        "optrun --plugin my_optimizers.py --plugin my_schedules.py "
    )
    assert "--plugin my_optimizers.py" in capsys.readouterr().out
    forget_all()
    for verb in (
        ["resume=run", "training.max_steps=3"],
        ["evaluate", "run"],
        ["resume=run", "optimizer=adamw"],
    ):
        assert optrun(*verb) == 2
        assert (
            "optimizer=my_lion was registered by my_optimizers.py; give --plugin my_opt"
            in capsys.readouterr().err
        )
    assert optrun(*PLUGINS, "resume=run", "training.max_steps=3") == 0, capsys.readouterr().err
    assert optrun(*PLUGINS, "evaluate", "run", "--json") == 0
    capsys.readouterr()
    assert optrun(*PLUGINS, "explain", "--json", *CHOSEN, *RUN) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["optimizer"], facts["scheduler"]) == ("my_lion", "sawtooth")
    assert facts["state_bytes"] == 4 * facts["parameters"]
    forget_all()
    assert optrun("report", "run") == 0
    assert optrun("export", "run", "exported") == 0
    assert "my_lion" in Path("exported/README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with both plugins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("made"))
        write_text(folder, 60)
        for name, text in FILES.items():
            Path(name).write_text(text, encoding="utf-8")
        assert optrun(*PLUGINS, *CHOSEN, *RUN, "hydra.run.dir=run") == 0
    forget_all()
    return folder / "run"


def test_a_changed_file_is_refused_unless_it_is_allowed(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made, "run")
    before = summary(Path("run"))["plugins"]
    with Path("my_optimizers.py").open("a") as file:
        file.write("# a word more\n")
    for verb in (["resume=run", "training.max_steps=3"], ["evaluate", "run"]):
        assert optrun(*PLUGINS, *verb) == 2
        said = capsys.readouterr().err
        assert "my_optimizers.py changed" in said
        assert before[0]["sha256"][:12] in said
        assert "--allow-changed-plugins" in said
    assert optrun(*PLUGINS, "--allow-changed-plugins", "resume=run", "training.max_steps=3") == 0
    after = summary(Path("run"))
    assert after["plugins"][0]["sha256"] != before[0]["sha256"]
    assert any(
        "allowed by --allow-changed-plugins" in note for note in after["resumes"][-1]["notes"]
    )
    assert optrun(*PLUGINS, "resume=run", "training.max_steps=4") == 0  # it is what it was then


def test_a_forged_record_is_refused_though_its_checksums_are_right(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut(made, "run", 1).checkpoint(1)
    recorded = json.loads((folder / "state.json").read_text())["plugins"]
    for forged, fact in {
        "[]": "no record of optimizer=my_lion",
        "null": "no record of optimizer=my_lion",
        "5": "plugins: 5",
        "[5]": "plugins: no list of records",
        json.dumps(
            [{**recorded[0], "names": ["optimizer=lamb", "optimizer=my_lion"]}, recorded[1]]
        ): "is optrun's own now",
        json.dumps([{**recorded[0], "sha256": None}, recorded[1]]): "sha256 None, now",
    }.items():
        resealed(folder, ("plugins",), json.loads(forged))
        misshapen = forged in (
            "null",
            "5",
            "[5]",
        )  # found where `state.json` is read, whoever reads it
        for verb in ([] if misshapen else [["resume=run", "training.max_steps=2"]]) + [
            ["evaluate", "run"]
        ]:
            assert optrun(*PLUGINS, *verb) in (2, 4), forged
            assert fact in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_sweep_loads_it_in_every_process(
    launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *PLUGINS,
        "-m",
        *CHOSEN,
        *RUN,
        f"hydra/launcher={launcher}",
        "seed=0,1",
        "hydra.sweep.dir=sweep",
    ]
    assert optrun(*words) == 0, capsys.readouterr()
    commands = [
        json.loads(path.read_text())["command"] for path in Path("sweep").glob("*/summary.json")
    ]
    assert len(commands) == 2
    assert all(command.startswith("optrun --plugin my_optimizers.py") for command in commands)
    with Path("my_optimizers.py").open("a") as file:
        file.write("# a word more\n")
    assert optrun(*words) == 2
    assert "my_optimizers.py changed" in capsys.readouterr().err


def test_the_laws_hold_for_it() -> None:
    plugins.load("my_optimizers.py")
    check_optimizer("my_lion", lr=0.05)
    check_optimizer("my_lion", lr=0.05, betas=(0.5, 0.5), weight_decay=0.0)


def test_a_rule_may_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    rules = "param_groups.rules=[{pattern: wte, optimizer: my_lion}]"
    assert optrun(*PLUGINS, *RUN, "optimizer=lamb", rules, "hydra.run.dir=run") == 0, (
        capsys.readouterr().err
    )
    assert summary(Path("run"))["plugins"][0]["names"] == ["optimizer=my_lion"]
    assert optrun("explain", *RUN, "optimizer=lamb", rules.replace("my_lion", "my_tiger")) == 2
    assert "my_tiger" in capsys.readouterr().err


def install(folder: Path, name: str, points: str, group: str = "optimizers") -> None:
    """What pip leaves of a distribution that brings entry points."""
    made = folder / f"{name}-1.2.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (made / "entry_points.txt").write_text(f"[optrun.{group}]\n{points}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    registry._entry_points.cache_clear()
    yield folder
    registry._entry_points.cache_clear()
    for origin in {
        str(row.origin) for row in registry.choices("optimizer").values() if row.origin is not None
    }:
        registry.remove(origin)


def test_an_installed_metric_is_found_by_its_name(site: Path) -> None:
    install(site, "scores", "worst = scores_of_mine", group="metrics")
    (site / "scores_of_mine.py").write_text(
        "from dataclasses import dataclass\nimport optrun\nfrom optrun.config.schema.metric import"
        " MetricConfig\n@dataclass(kw_only=True)\nclass WorstConfig(MetricConfig):\n"
        "    MODE = 'min'\n@optrun.register_metric('worst', schema=WorstConfig)\n"
        "def worst(predictions, labels):\n    return 0.0\n"
    )
    (row,) = chosen_metrics(["worst"], "sequence_classification", of_numbers=False)
    registry.remove("scores 1.2")
    assert row.name == "worst"


def test_an_installed_package_brings_it(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "lions", "my_lion = lions_of_mine")
    (site / "lions_of_mine.py").write_text(FILES["my_optimizers.py"])
    assert optrun("--help") == 0
    assert "my_lion" in capsys.readouterr().out
    assert "my_lion" not in registry.choices("optimizer")  # its name is known, and nothing imported
    assert optrun("optimizer=my_lion", *RUN, "hydra.run.dir=run") == 0, capsys.readouterr().err
    (recorded,) = summary(Path("run"))["plugins"]
    assert (recorded["distribution"], recorded["version"], recorded["names"]) == (
        "lions",
        "1.2",
        ["optimizer=my_lion"],
    )
    registry.remove("lions 1.2")
    registry._entry_points.cache_clear()
    (site / "lions-1.2.dist-info" / "entry_points.txt").unlink()
    assert optrun("resume=run", "training.max_steps=3") == 2
    assert (
        "was registered by the installed package lions 1.2; install it" in capsys.readouterr().err
    )


def test_it_may_lie_inside_the_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "optrun-built-anew", "my_lion = optrun.optimizer.my_lion")
    (site / "my_lion.py").write_text(FILES["my_optimizers.py"])
    monkeypatch.setattr(optrun_optimizer, "__path__", [*optrun_optimizer.__path__, str(site)])
    check_optimizer("my_lion", lr=0.05)


@pytest.mark.parametrize(
    ("module", "facts"),
    [
        ("1 / 0", ["ZeroDivisionError", "lions 1.2", "optrun.optimizers: my_lion = broken"]),
        ("x = 1", ["registers no such name", "lions 1.2", "my_lion"]),
        (FILES["my_optimizers.py"].replace('"my_lion"', '"lamb"'), ["lamb", "taken", "lions 1.2"]),
    ],
)
def test_an_entry_point_that_fails(
    site: Path, module: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "lions", "my_lion = broken")
    (site / "broken.py").write_text(module)
    assert optrun("optimizer=my_lion", "--cfg", "job") == 2
    said = capsys.readouterr().err
    assert [fact for fact in facts if fact not in said] == []
    assert optrun("optimizer=lamb", "--cfg", "job") == 0
    import sys

    sys.modules.pop("broken", None)


def test_two_packages_that_bring_one_name(site: Path) -> None:
    install(site, "lions", "my_lion = a")
    install(site, "tigers", "my_lion = b")
    with pytest.raises(ConfigError, match=r"my_lion: (lions|tigers) 1\.2 and (lions|tigers) 1\.2"):
        registry.find("optimizer", "my_lion")


def test_importing_the_decorators_imports_no_torch() -> None:
    assert callable(package.register_optimizer)
