"""What was changed between two starts of a run.

Shown key by key, applied for real, or refused by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from optrun.artifacts.checkpoint import Snapshot, load_checkpoint, save_checkpoint
from optrun.artifacts.run_dir import RunDir
from optrun.data.loader import EpochPlan
from optrun.runner.resume.config_diff import EFFECTS, effect_of_change
from optrun.runner.resume.data_position import plan_values, shift_data_position
from optrun.training.state import TrainState
from tests.faults.checkpoints import edit_manifest
from tests.faults.runs import STEPS, Go, Straight
from tests.running import TINY_BERT, TINY_GPT, records, summary, tensors, write_labelled, write_text

HARMLESS = [
    "training.logging_steps=2",
    "training.eval_steps=4",
    "training.per_device_eval_batch_size=7",
    "training.dataloader_num_workers=1",
    "checkpoint.save_steps=3",
    "checkpoint.keep_last=5",
    "training.on_nonfinite=skip",
    "checkpoint.keep_best=0",
    "tracking=tensorboard",
    "run_name=other",
]


def key_of(word: str) -> str:
    """What is changed by a word: a choice is named by its name."""
    key = word.split("=")[0]
    return key if "." in key or key in ("lr", "run_name") else f"{key}.name"


def line_of(key: str, said: str) -> str:
    """Where both values of a key stand."""
    return next(line for line in said.splitlines() if line.startswith(f"  {key} "))


def test_harmless_keys_change_no_number_and_are_recorded(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    code, said = go("resume=run", *HARMLESS)
    assert code == 0
    keys = [key_of(word) for word in HARMLESS]
    for key, word in zip(keys, HARMLESS, strict=True):
        line = line_of(key, said)
        assert f"-> {word.split('=')[1]} " in line
        assert line.endswith(EFFECTS[effect_of_change(key)]), line
        assert effect_of_change(key) in ("harmless", "evaluation", "nonfinite", "rounding"), line
    assert tensors(run.path, STEPS) == tensors(straight.path, STEPS)
    changes = summary(run.path)["resumes"][-1]["changes"]
    assert changes["training.logging_steps"] == [1, 2]
    assert {key for key in changes if not key.startswith("tracking.") or key in keys} == set(keys)
    assert sorted(path.name for path in run.checkpoints.glob("step-*"))[-1] == "step-00000006"


COMPUTED, EXAMPLES = "changes the weights from here on", "changes which examples come next"
GROUPS = {
    "lr=5e-4": COMPUTED,
    "clip.max_norm=0.01": COMPUTED,
    "param_groups=single": COMPUTED,
    "training.precision=bf16": COMPUTED,
    "model.config.resid_pdrop=0.4": COMPUTED,
    "optimizer.betas=[0.7,0.9]": COMPUTED,
    "scheduler=linear": COMPUTED,
    "data.max_length=8": EXAMPLES,
    "training.gradient_accumulation_steps=2": EXAMPLES,
    "task.sample_tokens=5": EXAMPLES,
}


@pytest.mark.parametrize("word", GROUPS)
def test_a_field_of_every_group_is_applied_for_real(
    straight: Straight, go: Go, tmp_path: Path, word: str
) -> None:
    """Training goes on from the saved weights and moments with the new value.

    Which is said, with the old one.
    """
    run = straight.cut(tmp_path / "run", 3)
    code, said = go("resume=run", word)
    assert code == 0
    line = line_of(key_of(word), said)
    assert " -> " in line
    assert line.endswith(GROUPS[word])
    assert key_of(word) in summary(run.path)["resumes"][-1]["changes"]
    assert records(run.path)[:3] == records(straight.path)[:3]
    same = word.startswith("task.")  # the length of samples
    assert (tensors(run.path, STEPS) == tensors(straight.path, STEPS)) is same
    assert (records(run.path)[3:] == records(straight.path)[3:]) is same
    # Said once: the next start takes it from the run's own configuration.
    again = json.loads((run.checkpoint(STEPS) / "state.json").read_text())["config"]
    if word.startswith("lr="):
        assert again["lr"] == 5e-4
        assert (
            "learning rate of the next step: 1e-3 with the saved configuration, 2.5e-4 now" in said
        )


def test_another_length_is_told_where_the_schedule_hangs_on_it(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    straight.cut(tmp_path / "run", 3)
    code, said = go("resume=run", "training.max_steps=12")
    assert code == 0
    assert "changes the length" in said
    assert "learning rate of the next step" in said
    assert len(records(Path("run"))) == 12


def test_another_optimizer_is_refused_by_name_unless_told(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    before = (run.path / "config.yaml").read_bytes()
    code, said = go("resume=run", "optimizer=lamb")
    assert code == 2
    assert "optimizer.name=lamb" in said
    assert "saved by AdamW, the optimizer is Lamb" in said
    assert "First saved tensor: " in said
    assert "checkpoint.on_other_optimizer=reset" in said
    assert (run.path / "config.yaml").read_bytes() == before
    code, said = go("resume=run", "optimizer=lamb", "checkpoint.on_other_optimizer=reset")
    assert code == 0
    assert "state starts anew, as asked" in said
    loaded = load_checkpoint(run.checkpoint(STEPS))
    assert loaded.metadata.optimizer["optimizer"] == "Lamb"
    assert loaded.model.keys() == load_checkpoint(run.checkpoint(3)).model.keys()
    # The same command again, as a requeueing scheduler gives it, does not start the state anew once
    # more.
    code, said = go(
        "resume=run",
        "optimizer=lamb",
        "checkpoint.on_other_optimizer=reset",
        "training.max_steps=7",
    )
    assert code == 0
    assert "starts anew" not in said


def test_an_option_that_needs_another_state_is_refused_before_anything_is_written(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    before = (run.path / "config.yaml").read_bytes()
    code, said = go("resume=run", "optimizer.amsgrad=true")
    assert code == 2
    assert (
        "optimizer.amsgrad=True: the saved optimizer state does not fit: parameter"
        " 'transformer.wte.weight'" in said
    )
    assert "has no 'max_exp_avg_sq', which amsgrad=True needs" in said
    other = go("resume=run", "optimizer=lamb")[1]
    assert "error: optimizer.name=lamb: the saved optimizer state does not fit" in other
    assert "checkpoint.on_other_optimizer=reset" in said
    assert (run.path / "config.yaml").read_bytes() == before
    assert go("resume=run", "optimizer.amsgrad=true", "checkpoint.on_other_optimizer=reset")[0] == 0
    assert (
        "transformer.wte.weight/max_exp_avg_sq" in load_checkpoint(run.checkpoint(STEPS)).optimizer
    )


def test_what_cannot_be_taken_over_is_refused_by_name(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    shape = "model.config.n_embd=16: transformer.wte.weight: shape (320, 32) in the checkpoint"
    for word, said in {
        "model.config.n_embd=16": shape,
        "model.config.n_layer=2": (
            "model.config.n_layer=2: the checkpoint has no tensor transformer.h.1."
        ),
        "model.vocab_size=300": "the tokenizer is another one",
    }.items():
        code, out = go("resume=run", word)
        assert (word, code) == (word, 2)
        assert said in out
    straight_names = sorted(path.name for path in run.checkpoints.iterdir())
    assert straight_names == ["step-00000001", "step-00000002", "step-00000003"]
    assert go("resume=run")[0] == 0  # nothing was changed by the refusals
    straight.same(run)


def edit(run: RunDir, step: int, change: Callable[[Snapshot], object]) -> None:
    """A whole checkpoint of another model."""
    loaded = load_checkpoint(run.checkpoint(step))
    change(loaded)
    shutil.rmtree(run.checkpoint(step))
    save_checkpoint(run, loaded)


NORM, HEAD = "transformer.ln_f.weight", "lm_head.weight"
MODELS: dict[str, tuple[Callable[[Snapshot], object], str]] = {
    "removed": (lambda s: s.model.pop(NORM), f"the checkpoint has no tensor {NORM}"),
    "reshaped": (
        lambda s: s.model.update({NORM: torch.ones(31)}),
        f"{NORM}: shape (31,) in the checkpoint, (32,)",
    ),
    "other dtype": (
        lambda s: s.model.update({NORM: s.model[NORM].double()}),
        f"{NORM}: torch.float64 in the checkpoint, torch.float32 in the model",
    ),
    "untied": (
        lambda s: s.model.update({HEAD: s.model["transformer.wte.weight"].clone()}),
        f"a tensor {HEAD}, which the model does not have",
    ),
    "state renamed": (
        lambda s: s.optimizer.update({"gamma/exp_avg": s.optimizer.pop(f"{NORM}/exp_avg")}),
        f"{NORM}",
    ),
    "state reshaped": (
        lambda s: s.optimizer.update({f"{NORM}/exp_avg": torch.ones(31)}),
        "has shape (31,)",
    ),
}


@pytest.mark.parametrize("how", MODELS)
def test_a_checkpoint_of_another_model_is_refused_by_tensor(
    straight: Straight, go: Go, tmp_path: Path, how: str
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    change, expected = MODELS[how]
    edit(run, 3, change)
    code, said = go("resume=run")
    assert code == 4
    assert expected in said
    assert [path.name for path in sorted(run.checkpoints.glob("step-*"))][-1] == "step-00000003"
    assert len(records(run.path)) == STEPS  # nothing was cut off either


def test_a_head_that_is_no_longer_tied_is_refused_by_key(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    straight.cut(tmp_path / "run", 3)
    code, said = go("resume=run", "model.config.tie_word_embeddings=false")
    assert code == 2
    assert (
        "model.config.tie_word_embeddings=False: the checkpoint has no tensor lm_head.weight"
        in said
    )


def test_other_rows_without_a_word_are_refused(straight: Straight, go: Go, tmp_path: Path) -> None:
    original = next(
        Path(word.split("=", 1)[1]) for word in straight.words if word.startswith("data.train=")
    )
    corpus = tmp_path / "corpus.txt"
    shutil.copy(original, corpus)
    assert (
        go(
            *straight.words_with(f"data.train={corpus}", "training.max_steps=2"),
            "hydra.run.dir=run",
        )[0]
        == 0
    )
    lines = corpus.read_text().splitlines()
    for how, changed in {
        "order": [lines[1], lines[0], *lines[2:]],
        "fewer": lines[:-9],
        "more": [*lines, *lines[:9]],
    }.items():
        corpus.write_text("\n".join(changed) + "\n")
        code, said = go("resume=run", "training.max_steps=3")
        assert (how, code) == (how, 2)
        assert (
            "rows, their order or their content changed" in said
            or "the tokenizer is another one" in said
        ), how


def test_other_classes_are_refused(go: Go, tmp_path: Path) -> None:
    """With a tokenizer that stays, other training rows may only rename what the weights tell
    apart.
    """
    write_labelled(tmp_path)
    small = (word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT)
    words = [
        *small,
        "data.max_length=16",
        "task=sequence_classification",
        "data=files",
        "training.max_steps=1",
    ]
    assert go(*words, "data.train=train.csv", "hydra.run.dir=first")[0] == 0
    words += ["model.tokenizer=first/tokenizer", "data.train=train.csv", "data.eval=train.csv"]
    assert go(*words, "hydra.run.dir=run")[0] == 0
    text = Path("train.csv").read_text()
    Path("train.csv").write_text(text.replace(",odd", ",bird"))
    Path("more.csv").write_text(text.replace(",odd", ",bird"))
    for more in ([], ["data.train=more.csv"]):
        code, said = go("resume=run", "training.max_steps=2", *more)
        assert code == 2
        assert "the classes are bird, even, but the trained weights predict even, odd" in said
    Path("more.csv").write_text(text + "one more,odd\n")
    assert (
        go("resume=run", "training.max_steps=2", "data.train=more.csv", "data.eval=more.csv")[0]
        == 0
    )


def test_another_seed_begins_a_new_epoch(straight: Straight, go: Go, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", 3)
    code, said = go("resume=run", "seed=1")
    assert code == 0
    assert "training continues at the start of a new epoch" in said
    assert tensors(run.path, STEPS) != tensors(straight.path, STEPS)


def test_changed_rows_are_refused(straight: Straight, go: Go, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", 3)
    corpus = next(
        Path(word.split("=")[1]) for word in straight.words if word.startswith("data.train=")
    )
    text = corpus.read_text()
    try:
        corpus.write_text(text.replace(" fox", " box", 1))
        code, said = go("resume=run")
    finally:
        corpus.write_text(text)
    assert code == 2
    assert "the data is not what the run was started with" in said
    assert go("resume=run")[0] == 0
    straight.same(run)


def test_another_folder_is_no_permission_to_change_rows(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path means the same file from anywhere.

    Its rows are compared, and no change is recorded.
    """
    corpus = write_text(tmp_path, 100)
    words = [
        *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
        "data=files",
        "data.train=[corpus.txt]",
        "training.logging_steps=1",
        "checkpoint.keep_last=9",
    ]
    assert (
        go(*words, "training.max_steps=2", "checkpoint.save_steps=1", "hydra.run.dir=run")[0] == 0
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = corpus.read_text()
    corpus.write_text(text.replace(" fox", " box", 1))
    code, said = go("resume=../run", "training.max_steps=3")
    assert code == 2
    assert "the data is not what the run was started with" in said
    corpus.write_text(text)
    code, said = go("resume=../run", "training.max_steps=3")
    assert code == 0
    assert "\n  data.train " not in said
    assert set(summary(Path("../run"))["resumes"][-1]["changes"]) == {"training.max_steps"}
    # The run's configuration names the whole path by now, its older checkpoints do not.
    monkeypatch.chdir(tmp_path)
    corpus.write_text(text.replace(" fox", " box", 1))
    code, said = go("resume=run/checkpoints/step-00000001")
    assert code == 2
    assert "the data is not what the run was started with" in said
    shutil.copy(corpus, "other.txt")
    assert go("resume=run", "data.train=[other.txt]", "training.max_steps=4")[0] == 0
    assert "data.train" in summary(Path("run"))["resumes"][-1]["changes"]


def test_another_batch_size_goes_on_behind_what_was_seen(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    code, said = go("resume=run", "training.per_device_train_batch_size=8")
    assert code == 0
    assert "changes which examples come next" in said
    assert "12 of " in said
    assert "4 are left out of this epoch, none comes twice" in said
    code, said = go(
        "resume=run", "training.max_steps=8"
    )  # the plan is the new one now: no further move
    assert code == 0
    assert "left out" not in said
    train = load_checkpoint(run.checkpoint(8)).metadata.train
    assert (train["global_step"], train["data_shift"], train["samples"]) == (8, -1, 12 + 5 * 8)


def seen(plan: EpochPlan, first: int, count: int) -> list[int]:
    steps = plan.steps(first)
    return [index for _ in range(count) for batch in next(steps) for _, index in batch]


@pytest.mark.parametrize("batch", [1, 3, 4, 8, 50])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_example_comes_twice(batch: int, accumulation: int) -> None:
    """Whatever the plans.

    What is trained on after the change is behind what was seen, in the same order.
    """
    old, new = EpochPlan(50, 4, 2, 0), EpochPlan(50, batch, accumulation, 0)
    for done in (0, 1, 4, 6, 7, 13):
        state = TrainState(global_step=done)
        sentence = shift_data_position(plan_values(old, "a-b"), state, new, "a-b")
        assert (sentence is None) == (batch * accumulation == 8)  # however a step is divided
        epoch, _ = old.locate(done)
        before = seen(old, old.steps_per_epoch * epoch, done - old.steps_per_epoch * epoch)
        new_epoch, place = new.locate(state.position)
        rest = seen(new, state.position, new.steps_per_epoch - place) if new_epoch == epoch else []
        assert not set(before) & set(rest)
        order = [int(index) for index in old.order(epoch)]
        assert rest == order[len(order) - len(rest) :]
        assert len(order) - len(rest) - len(before) < batch * accumulation


def test_an_order_by_length_is_another_one_with_another_batch_size() -> None:
    old, new = (EpochPlan(50, size, 1, 0, np.arange(50)) for size in (4, 8))
    state = TrainState(global_step=5)
    assert shift_data_position(plan_values(old, "a-b"), state, old, "a-b") is None
    assert "start of a new epoch" in str(
        shift_data_position(plan_values(old, "a-b"), state, new, "a-b")
    )
    assert state.position == new.steps_per_epoch


def test_other_examples_begin_with_an_epoch() -> None:
    state = TrainState(global_step=9, passed_steps=2)
    sentence = shift_data_position(
        plan_values(EpochPlan(50, 4, 2, 0), "a-b"), state, EpochPlan(40, 4, 1, 0), "c-b"
    )
    assert "start of a new epoch; 18 examples of epoch 2 are left out" in str(sentence)
    assert state.position == 20
    state = TrainState(global_step=14)
    shift_data_position(
        plan_values(EpochPlan(50, 4, 2, 0), "a-b"), state, EpochPlan(50, 4, 2, 1), "a-b"
    )
    assert state.position == 14  # it stood at the start of one already
    state = TrainState(global_step=9)
    assert (
        shift_data_position(
            plan_values(EpochPlan(50, 4, 2, 0), "a-b"), state, EpochPlan(50, 4, 2, 0), "a-c"
        )
        is not None
    )
    assert state.position == 9  # only the evaluation examples are others


def test_parameters_in_another_order_are_matched_by_name(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Moments go to the parameter of that name, wherever it stands."""
    from optrun.runner import assemble as assembly

    run = straight.cut(tmp_path / "run", 3)
    original = assembly.build_run_groups

    def reversed_groups(*args: object, **options: object) -> list[dict[str, object]]:
        groups = original(*args, **options)  # type: ignore[arg-type]
        return [{**group, "params": group["params"][::-1]} for group in groups[::-1]]

    with monkeypatch.context() as patch:
        patch.setattr(assembly, "build_run_groups", reversed_groups)
        assert go("resume=run", "clip=none")[0] == 0
    one = load_checkpoint(run.checkpoint(STEPS))
    other = straight.cut(tmp_path / "other", 3)
    assert go("resume=other", "clip=none")[0] == 0
    two = load_checkpoint(other.checkpoint(STEPS))
    assert one.model.keys() == two.model.keys()
    assert all(one.model[name].equal(two.model[name]) for name in one.model)
    assert all(one.optimizer[name].equal(two.optimizer[name]) for name in two.optimizer)


def test_another_environment_is_warned_of_and_recorded(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    path = run.checkpoint(3) / "state.json"
    values = json.loads(path.read_text())
    values["environment"] |= {"torch": "1.0", "torch threads": 64}
    text = json.dumps(values).encode()
    path.write_bytes(text)
    import hashlib

    entry = {"name": "state.json", "size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    edit_manifest(run.checkpoint(3), lambda manifest: manifest["files"].__setitem__(2, entry))
    code, said = go("resume=run")
    assert code == 0
    assert f"torch 1.0 then, {torch.__version__.split('+')[0]}" in said
    assert "torch threads 64 then, 1 now" in said
    assert "may differ in the last bits from those of an uninterrupted run" in said
    assert "torch 1.0 then" in summary(run.path)["resumes"][-1]["notes"][0]


def test_every_key_has_a_meaning(straight: Straight) -> None:
    from optrun.base.plain import flat
    from optrun.config.saved import read_config

    kinds = {key: effect_of_change(key) for key in flat(read_config(RunDir(straight.path).config))}
    assert kinds["lr"] == kinds["optimizer.eps"] == kinds["model.config.n_embd"] == "mathematics"
    assert (
        kinds["seed"]
        == kinds["data.max_length"]
        == kinds["training.gradient_accumulation_steps"]
        == "data"
    )
    assert kinds["training.max_steps"] == "length"
    assert kinds["checkpoint.keep_last"] == kinds["tracking.name"] == "harmless"
    assert kinds["checkpoint.metric"] == kinds["checkpoint.mode"] == "best"
    assert kinds["checkpoint.save_steps"] == kinds["training.on_nonfinite"] == "nonfinite"


def test_a_counter_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown counter zeal"):
        TrainState.from_dict({"zeal": 1})
