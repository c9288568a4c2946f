"""What comes from others or should stay with oneself.

Code named in configurations, secrets, escapes, ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.safety import refuse_code_and_secrets
from tests.faults.runs import Go, Straight
from tests.running import TINY_BERT, write_labelled

TARGETS = [
    "os.system",
    "os.remove",
    "subprocess.Popen",
    "subprocess.run",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "builtins.__import__",
    "pathlib.Path.write_text",
    "shutil.rmtree",
    "runpy.run_path",
    "ctypes.CDLL",
    "importlib.import_module",
    "pickle.loads",
    "numpy.load",
    "pandas.read_pickle",
    "torch.load",
    "torch.hub.load",
    "torch.utils.collect_env.run",
    "transformers.AutoModel.from_pretrained",
    "hydra.utils.instantiate",
]
PLACES = [
    "_target_",
    "optimizer._target_",
    "model.config._target_",
    "data.train.0._target_",
    "hydra.launcher._target_",
    "hydra.sweeper._target_",
    "hydra.callbacks.mine._target_",
    "hydra.job_logging.handlers.mine.()",
    "hydra.job_logging.handlers.mine.class",
    "hydra.hydra_logging.formatters.mine.()",
]


def nested(key: str, value: Any) -> Any:
    """One value below a dotted key."""
    for piece in reversed(key.split(".")):
        value = [value] if piece == "0" else {piece: value}
    return OmegaConf.create(value)


@pytest.mark.parametrize("place", PLACES)
def test_a_configuration_names_no_code(place: str) -> None:
    for target in TARGETS:
        with pytest.raises(
            ConfigError, match="a configuration that names code is not run"
        ) as refused:
            refuse_code_and_secrets(nested(place, target))
        assert f"={target}: " in str(refused.value)
    assert len(set(TARGETS)) == 21


def test_what_hydra_builds_by_name_is_let_pass() -> None:
    for word in (
        "hydra/launcher=joblib",
        "hydra/launcher=slurm",
        "hydra/sweeper=basic",
        "hydra/job_logging=default",
    ):
        assert store.compose(store.open_hydra(), "config", [word])


RUNS_IT = "{_target_: torch.utils.collect_env.run, command: touch ran}"


@pytest.mark.parametrize(
    "words",
    [
        [
            "+hydra.callbacks.mine._target_=torch.utils.collect_env.run",
            "+hydra.callbacks.mine.command='touch ran'",
        ],
        [f"+hydra.callbacks.mine={RUNS_IT}"],
        [f"++optimizer={RUNS_IT}"],
        [f"model.config.layers={RUNS_IT}"],
        ["-m", "seed=0,1", f"+hydra.callbacks.mine={RUNS_IT}"],
        ["-m", "model.config._target_=os.system,os.remove"],
        ["-m", "seed=0,1", "hydra.launcher._target_=os.system"],
        ["--config-dir", "theirs", "-cn", "sly"],
        ["--config-dir", "theirs", "-cn", "sly", "--help"],
        ["--config-dir", "theirs", "-cn", "sly", "-m", "seed=0,1"],
        ["explain", "--config-dir", "theirs", "-cn", "sly"],
        ["certify", "resume", "--config-dir", "theirs", "-cn", "sly"],
        ["resume=run"],
    ],
    ids=" ".join,
)
def test_code_that_is_named_is_not_run(
    straight: Straight, go: Go, tmp_path: Path, words: list[str]
) -> None:
    """From the command line, a sweep's values, a stranger's recipe, the stored configuration of
    a run.
    """
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sly.yaml").write_text(
        f"defaults: [config, _self_]\nhydra:\n  callbacks:\n    mine: {RUNS_IT}\n"
    )
    if words == ["resume=run"]:
        run = straight.cut(tmp_path / "run", 3)
        stored = OmegaConf.load(run.config)
        OmegaConf.update(stored, "model.config._target_", "os.system", force_add=True)
        OmegaConf.save(stored, run.config)
    given = [] if "theirs" in words or words == ["resume=run"] else straight.words
    code, said = go(*words, *given)
    assert code == 2
    assert "code" in said or "no such" in said
    assert "_target_" in said or "optimizer" in said
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "outputs").exists()


# Secrets
# --------------------------------------------------------------------------------------------------

SECRET = "hf_neverWriteMeDown"
VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "MLFLOW_TRACKING_PASSWORD",
)


def files_with(folder: Path, text: str) -> list[str]:
    """Files beneath a folder that hold a text."""
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]


def test_no_secret_of_the_environment_is_written(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, SECRET)
    words = straight.words_with(
        "training.max_steps=2", "training.eval_steps=2", "tracking=tensorboard"
    )
    code, said = go(*words, "hydra.run.dir=run")
    assert code == 0
    assert go("resume=run", "training.max_steps=3")[0] == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()
    assert SECRET not in said
    assert files_with(tmp_path, SECRET) == []


@pytest.mark.parametrize(
    "words",
    [
        f"hf_token={SECRET}",
        f"+api_key={SECRET}",
        f"tracking.api_key={SECRET}",
        f"data.token={SECRET}",
        f"model.config.use_auth_token={SECRET}",
        f"+hydra.job.env_set.HF_TOKEN={SECRET}",
        f"+hydra.job.env_set.WANDB_API_KEY={SECRET}",
        f"data.train='https://me:{SECRET}@host/rows.csv'",
        f"-m seed=0,1 model.config.use_auth_token={SECRET}",
        f"-m seed=0,1 +hydra.job.env_set.HF_TOKEN={SECRET}",
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_written_nowhere(
    straight: Straight, go: Go, tmp_path: Path, words: str
) -> None:
    *sweep, word = words.split(" ", 2)
    code, _ = go(*sweep, *straight.words_with(word))
    assert code == 2
    assert files_with(tmp_path, SECRET) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.kwargs.api_key", SECRET),
        ("optimizer.kwargs.secret", SECRET),
        ("hydra.job.env_set.DB_PASSWORD", SECRET),
        ("tracking.tracking_uri", f"https://me:{SECRET}@host"),
    ],
)
def test_what_looks_like_a_secret_is_named_and_not_repeated(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as refused:
        refuse_code_and_secrets(nested(key, value))
    assert str(refused.value).startswith(f"{key}: ")
    assert SECRET not in str(refused.value)


@dataclass
class OfAPlugin:
    api_key: int | str = SECRET


def test_a_secret_of_two_types_is_one() -> None:
    with pytest.raises(ConfigError, match=r"^api_key: this looks like a secret"):
        refuse_code_and_secrets(OmegaConf.structured(OfAPlugin))


def test_what_only_sounds_like_a_secret_is_let_pass() -> None:
    values = {
        "model": {"config": {"image_token": "<image>"}},
        "task": {"sample_tokens": "40"},
        "data": {"path": "https://host/rows", "train": "me@host:rows"},
        "hydra": {"job": {"env_set": {"HF_TOKEN": None, "TOKENIZERS_PARALLELISM": "false"}}},
    }
    refuse_code_and_secrets(OmegaConf.create(values))


# Terminal escapes
# --------------------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1bM"
SHOWN = r"\x1b]0;owned\x07\x1bM"


def test_escapes_in_a_file_name_and_in_texts_are_shown_as_words(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    code, said = go(*straight.words_with(f"data.train='{ESCAPE}.txt'"))
    assert code == 2
    assert f"{SHOWN}.txt: no such file" in said
    assert "\x1b" not in said
    text = Path(
        next(word for word in straight.words if word.startswith("data.train=")).split("=", 1)[1]
    ).read_text()
    (tmp_path / f"{ESCAPE}.txt").write_text(text.replace(" fox", f" {ESCAPE}"))
    words = straight.words_with(
        f"data.train='{ESCAPE}.txt'", "training.max_steps=1", "task.sample_tokens=30"
    )
    code, said = go(*words, f"hydra.run.dir='{ESCAPE}'", f"run_name='{ESCAPE}'")
    assert code == 0
    assert SHOWN in said
    assert "\x1b" not in said
    log = (tmp_path / ESCAPE / "optrun.log").read_text()
    assert SHOWN in log
    assert "\x1b" not in log
    (tmp_path / ESCAPE / "checkpoints" / "step-00000001" / "state.json").write_bytes(b"")
    code, said = go("verify", ESCAPE)
    assert code == 4
    assert "\x1b" not in said
    assert SHOWN in "".join(said.split())


def test_escapes_in_labels_and_columns_are_shown_as_words(go: Go, tmp_path: Path) -> None:
    train = write_labelled(tmp_path, 12)
    train.write_text(train.read_text().replace("odd", ESCAPE))
    unseen = tmp_path / "eval.csv"
    unseen.write_text(f"text,label\nthe fox,new{ESCAPE}\n")
    words = [*TINY_BERT, "task=sequence_classification", "data=files", "data.train=train.csv"]
    code, said = go(*words, "data.eval=eval.csv")
    assert code == 2
    assert "\x1b" not in said
    assert "x1b" in said
    train.write_text(train.read_text().replace("label", f"la{ESCAPE}bel", 1))
    code, said = go(*words, "data.label_column=label")
    assert code == 2
    assert "\x1b" not in said


# Several processes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["hydra.run.dir=new"], ["resume=run"], ["-m", "seed=0,1"]])
def test_lone_ranks_are_refused_before_anything_is_touched(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    """Without distributed=ddp or fsdp each would train the whole run."""
    run = straight.cut(tmp_path / "run", 3)
    before = run.summary.read_bytes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, said = go(*words, *([] if words == ["resume=run"] else straight.words))
    assert code == 2
    for fact in ("WORLD_SIZE=2", "torchrun", "distributed=ddp"):
        assert fact in said
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert run.summary.read_bytes() == before
    if words == ["resume=run"]:
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert go(*words)[0] == 0
        straight.same(run)
