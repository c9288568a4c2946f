"""Optimizers of pytorch-optimizer through a run.

Each is what its name says and comes back, or is refused before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.evaluation_weights import evaluation_weights
from optrun.optimizer.footprint import state_bytes
from optrun.optimizer.state import load_named_state, named_state
from optrun.param_groups import build_param_groups
from tests.foreign.foreign import (
    REFUSED,
    WORKS,
    Small,
    config_of,
    examine,
    names,
)
from tests.foreign.record import page
from tests.resume.test_registry import Half
from tests.running import TINY_GPT, optrun, records, state, tensors, write_text

pytest.importorskip("pytorch_optimizer")

REFUSED_NAMES = (Path(__file__).parent / "refused.txt").read_text(encoding="utf-8").split()
SAMPLE = {
    "lion": WORKS,
    "soap": WORKS,
    "spam": WORKS,
    "schedulefreeadamw": WORKS,
    "splus": WORKS,
    "galore": REFUSED,
    "muon": REFUSED,
    "emonavi": REFUSED,
    "scalableshampoo": REFUSED,
    "sophiah": REFUSED,
    "lookahead": REFUSED,
    "asgd": REFUSED,
}


def build(
    name: str,
    kwargs: dict[str, Any] | None = None,
    rules: str = "[]",
    lr: float = 1e-3,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    config = config_of(name, kwargs, rules, **options)
    decay = config.optimizer.weight_decay
    groups = build_param_groups(Small(), config.param_groups, lr=lr, weight_decay=decay)
    return build_optimizer(config.optimizer, groups, lr=lr)


def by_name(optimizer: Any, key: str) -> dict[str, Any]:
    """A key of its group, by parameter."""
    return {
        name: group.get(key) for group in optimizer.param_groups for name in group["param_names"]
    }


@pytest.mark.parametrize("name", SAMPLE)
def test_each_lands_where_it_should(name: str) -> None:
    wanted = next(there for there in names() if there.lower() == name)
    assert examine(wanted).verdict == SAMPLE[name]


@pytest.mark.slow
def test_every_class_works_or_is_refused_as_recorded() -> None:
    rows, wrong = [], []
    for name in names():
        try:
            rows.append(examine(name))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert wrong == []
    refused = [row.name.lower() for row in rows if row.verdict == REFUSED]
    assert sorted(refused) == REFUSED_NAMES
    lines = page(rows).splitlines()
    assert all(any(line.startswith(f"| {row.name.lower()} |") for line in lines) for row in rows)


def test_the_page_of_optimizers_counts_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    total, refused = len(names()), len(REFUSED_NAMES)
    assert f"{total - refused} of {total} classes work" in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("lyon", {}, "has no such optimizer. Did you mean"),
        ("sophiah", {}, "second derivatives of the loss.*Take optimizer=soap"),
        ("adahessian", {}, "second derivatives"),
        ("bsam", {}, "the loss again"),
        ("muonclip", {}, "attention logits"),
        ("lookahead", {}, "wrap another optimizer"),
        ("adamw", {}, "torch's own. Take optimizer=adamw"),
        ("a2grad", {}, "learning rate of its own"),
        ("asgd", {}, "learning rate of its own: .* Take optimizer=sgd"),
        ("adafactor", {}, "lr and the schedule .* Take optimizer=adafactor"),
        ("apollodqn", {}, "lr and the schedule"),
        ("ranger21", {"num_iterations": 9}, "a schedule of its own"),
        ("pid", {}, "is SGD"),
        ("adamc", {}, "marked"),
        ("galore", {"rank": 4}, "projects no matrix"),
        ("Muon", {}, "hidden matrices. Take optimizer=muon"),
        ("emonavi", {}, "the loss of each step"),
        ("conda", {}, "cannot be kept in a file"),
        ("lion", {"bettas": [0.9, 0.99]}, "Lion has no option 'bettas'. Did you mean betas"),
        ("lion", {"rank": 4}, "Lion has no option 'rank'"),
        ("lion", {"betas": [0.9, 1.5]}, "ValueError: beta2 must be in the range"),
        ("adopt", {"clip_lambda": 3}, "cannot be used here: it fails: TypeError"),
        ("bnb_adamw8bit", {}, "not offered: the optimizers of bitsandbytes and torchao"),
        ("torchao_adamw4bit", {}, "not offered: the optimizers of bitsandbytes and torchao"),
    ],
)
def test_refused_before_training(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        build(name, kwargs)
    assert "\n" not in str(raised.value)


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Lion has no option 'cautious'"):
        build("lion", {"cautious": True})  # it would go into **kwargs, as any word does
    with pytest.raises(ConfigError, match=r"a group of .* Lion has no option 'eps'"):
        build("lion", rules="[{pattern: body, eps: 1e-3}]")
    with pytest.raises(ConfigError, match=r"takes one clip_threshold for all parameters"):
        build("came", rules="[{pattern: body, kwargs: {clip_threshold: 0.5}}]")
    with pytest.raises(ConfigError, match=r"has no option 'weight_decay'"):
        build("msvag", weight_decay=0.1)
    groups = [{"params": list(Small().named_parameters()), "optimizer": "sgd"}]
    with pytest.raises(ConfigError, match=r"asks for optimizer=sgd"):
        build_optimizer(config_of("lion").optimizer, groups, lr=0.1)


@pytest.mark.parametrize(("name", "moments"), [("lion", 1), ("adabelief", 2)])
def test_the_state_of_one_is_known_before_a_step(name: str, moments: int) -> None:
    assert state_bytes(build(name)) == {
        key: 4 * moments * param.numel()
        for key, param in Small().named_parameters()
        if param.requires_grad
    }


def test_trying_draws_no_random_number() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    groups = build_param_groups(Small(), "standard", lr=1e-3)
    torch.set_rng_state(before)
    build_optimizer(config_of("kron").optimizer, groups, lr=1e-3)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_that_does_not_come_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it counts where no state dict reaches is found by trying."""
    import pytorch_optimizer

    class Lion(pytorch_optimizer.Lion):  # type: ignore[misc]
        __module__ = "pytorch_optimizer.optimizer.lion"

        def step(self, closure: Any = None) -> Any:
            self._hidden = [*getattr(self, "_hidden", []), 1]
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad.mul_(1 + (len(self._hidden) > 13))
                    param.data.add_(1e-3 * len(self._hidden))
            return super().step(closure)

    monkeypatch.setattr(pytorch_optimizer, "Lion", Lion)
    with pytest.raises(
        ConfigError,
        match=r"does not survive a checkpoint: .* differs after a resume",
    ):
        build("lion")


def test_a_state_of_another_form_is_refused() -> None:
    def trained(name: str) -> Any:
        half = Half(config_of(name), Small)
        half.steps(2)
        return half.train_step.optimizer

    tensors, meta = named_state(trained("adabelief"))
    with pytest.raises(ValueError, match=r"ams_bound was False, is True"):
        load_named_state(build("adabelief", {"ams_bound": True}), tensors, meta)
    load_named_state(build("adabelief", {"betas": [0.8, 0.9]}), tensors, meta)


@pytest.mark.parametrize("name", ["schedulefreeadamw", "splus"])
def test_weights_of_evaluation_leave_no_trace(name: str) -> None:
    half = Half(config_of(name), Small)
    optimizer = half.train_step.optimizer
    with evaluation_weights(optimizer):
        pass  # before the first step there is no other weight
    half.steps(3)
    before, meta = half.digests(), named_state(optimizer)[1]

    def evaluated() -> None:
        with evaluation_weights(optimizer):
            assert half.digests() != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluated()
    assert half.digests() == before
    assert named_state(optimizer)[1] == meta


RUN = [
    *TINY_GPT,
    "optimizer=pytorch_optimizer",
    "lr=1e-2",
    "scheduler=constant",
    "data=files",
    "training.per_device_train_batch_size=4",
    "training.logging_steps=3",
    "checkpoint.keep_last=9",
]


@pytest.mark.slow
def test_a_run_is_judged_saved_and_published_with_the_averaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    words = [
        *RUN,
        "optimizer.class_name=schedulefreeadamw",
        f"data.train={write_text(tmp_path, 200)}",
    ]
    assert (
        optrun(*words, "training.eval_steps=12", "training.max_steps=12", "hydra.run.dir=straight")
        == 0
    )
    often = ["training.eval_steps=4", "checkpoint.save_steps=2", "training.max_steps=7"]
    assert optrun(*words, *often, "hydra.run.dir=stopped") == 0
    assert optrun("resume=stopped", "training.eval_steps=12", "training.max_steps=12") == 0
    ended = tensors(Path("straight"), 12)
    assert tensors(Path("stopped"), 12) == ended
    told = records(Path("straight"))[-1]
    assert records(Path("stopped"))[-1] == told
    assert state(Path("stopped"), 12)["optimizer"] == state(Path("straight"), 12)["optimizer"]
    # What is saved as the model is not what was trained, and is what was judged and what others
    # load.
    name = "transformer.h.0.mlp.c_fc.weight"
    assert (
        ended[f"model.safetensors:{name}"] != ended[f"optimizer.safetensors:{name}/training_weight"]
    )
    capsys.readouterr()
    assert optrun("evaluate", "straight", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval/loss"] == pytest.approx(told["eval/loss"], rel=1e-6)
    assert optrun("export", "straight", "exported") == 0
    saved = load_file("straight/checkpoints/step-00000012/model.safetensors")
    for folder in ("straight/model", "exported"):
        there = load_file(f"{folder}/model.safetensors")
        assert there.keys() <= saved.keys()
        assert all(torch.equal(there[key], saved[key]) for key in there)


def test_a_run_with_what_is_not_offered_ends_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        optrun(*RUN, "optimizer.class_name=sophiah", "data.train=nosuch.txt", "hydra.run.dir=run")
        == 2
    )
    said = capsys.readouterr().err
    assert "optimizer.class_name=sophiah: not offered" in said
    assert "Traceback" not in said
    for name in ("adamw8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_32bit"):
        assert optrun(f"optimizer={name}") == 2
        said = capsys.readouterr().err
        assert f"optimizer={name}: not offered" in said
        assert "optimizer=adafactor" in said


def test_all_keywords_may_be_given_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "optimizer=pytorch_optimizer",
        "optimizer.class_name=soap",
        "optimizer.kwargs={precondition_frequency: 4, correct_bias: false}",
    ]
    assert optrun("--cfg", "job", *words) == 0
    assert (
        "  kwargs:\n    precondition_frequency: 4\n    correct_bias: false\n"
        in capsys.readouterr().out
    )


def test_a_sweep_refuses_before_its_first_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of its jobs would be refused by itself: that is said before the others have trained."""
    monkeypatch.chdir(tmp_path)
    assert (
        optrun(
            "-m",
            "optimizer=pytorch_optimizer",
            "optimizer.class_name=lion,sophiah",
            "hydra.sweep.dir=sweep",
        )
        == 2
    )
    assert "sophiah" in capfd.readouterr().err
    assert not (tmp_path / "sweep").exists()
