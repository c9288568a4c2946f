"""Preferences beside TRL: the tokens, losses, gradients and metrics of its `DPOTrainer`.

ORPO and SimPO likewise.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from optrun.config.choice import choice
from optrun.config.schema.chat_tasks import PreferenceLoss
from optrun.config.schema.data import SCHEMAS as DATA
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.data.source import Source, Split
from optrun.model.configuration import router_loss_coef
from optrun.model.forward import without_cache_and_padding_check
from optrun.task import build_task
from optrun.task.chat_template import use_template
from optrun.task.evaluation import IGNORED
from optrun.task.preference import MEASURES, Preference
from tests.reference.test_trl import TOOL, chat_tokenizer, model_of, turn
from tests.running import sentence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # of TRL and of what it imports

Row = dict[str, Any]
TEXTS: list[Row] = [
    {
        "prompt": sentence(row) + " =",
        "chosen": f" {sentence(row + 9)}",
        "rejected": f" {sentence(row + 4)}",
    }
    for row in range(5)
]
TURNS: list[Row] = [
    {
        "prompt": [turn("user", row), turn("assistant", row + 1), turn("user", row + 2)][
            -1 - 2 * (row % 2) :
        ],
        "chosen": [turn("assistant", row + 9)],
        "rejected": [turn("assistant", row + 4)],
    }
    for row in range(5)
]
IMPLICIT = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in TURNS]
IMPLICIT_TEXTS = [
    {key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in TEXTS
]
TOOLS = [row | {"tools": [TOOL]} for row in TURNS]
LAYOUTS = {
    "texts": TEXTS,
    "turns": TURNS,
    "implicit": IMPLICIT,
    "implicit texts": IMPLICIT_TEXTS,
    "tools": TOOLS,
}


def ours(rows: list[Row], tokenizer: Any, max_length: int = 1024, **options: Any) -> Preference:
    data: Any = choice("data", DATA, "files", {"train": "x", "max_length": max_length})
    split = Split(Dataset.from_list(rows), "data.train")
    source = Source(split, {"": Split(split.rows.select([]), "data.eval")}, data)
    task = build_task(choice("task", TASKS, "preference", options), data, source, tokenizer, seed=0)
    assert isinstance(task, Preference)
    return task


def theirs(
    model: Any, rows: list[Row], tokenizer: Any, folder: Path, max_length: int = 1024
) -> tuple[Any, Any]:
    """TRL's trainer with a model of its own and its reference, and the batch of all rows that
    it makes.
    """
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=copy.deepcopy(model),
        ref_model=copy.deepcopy(model),
        args=DPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(rows),
            max_length=max_length,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    return trainer, trainer.data_collator(
        [trainer.train_dataset[index] for index in range(len(trainer.train_dataset))]
    )


def moved(model: Any) -> Any:
    """The same model a few steps later."""
    later = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in later.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return later


def with_reference(task: Preference, model: Any) -> Any:
    """The batch of all rows; what training keeps in float32 stays as precise as the model."""
    batch = task.collate([task.train[index] for index in range(len(task.train))])
    with torch.no_grad():
        batch["reference"] = task.forward(model, batch).logps.view(2, -1).T
    return batch


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_and_what_is_learnt_of_them(layout: str, tmp_path: Path) -> None:
    tokenizer, rows = chat_tokenizer(), LAYOUTS[layout]
    for max_length in (1024, 300 if layout == "tools" else 90):
        task = ours(rows, tokenizer, max_length, chat_template="chatml", overlong_rows="drop")
        _, prepared = theirs(model_of(len(tokenizer)), rows, tokenizer, tmp_path, max_length)
        batch = task.collate([task.train[index] for index in range(len(task.train))])
        for name in ("input_ids", "attention_mask"):
            assert batch[name].tolist() == prepared[name].tolist()
        assert (batch["labels"] != IGNORED).long().tolist() == prepared["completion_mask"].tolist()


def test_losses_gradients_and_metrics_are_those_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, also where TRL adds up in float32: what is left is the formulas."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    tokenizer = chat_tokenizer()
    use_template(tokenizer, "chatml")
    start = model_of(len(tokenizer)).double()
    trainer, prepared = theirs(start, TURNS, tokenizer, tmp_path)
    trained = moved(start)
    trainer.model.load_state_dict(trained.state_dict())
    for loss in PreferenceLoss:
        if not loss.has_reference:
            continue
        smoothing = 0.1 if loss is PreferenceLoss.robust else 0.0
        task = ours(
            TURNS,
            tokenizer,
            chat_template="chatml",
            loss_type=loss.value,
            beta=0.3,
            label_smoothing=smoothing,
        )
        trainer.loss_types, trainer.loss_weights = [loss.value], [1.0]
        trainer.beta, trainer.label_smoothing = 0.3, smoothing
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        wanted = trainer.compute_loss(trainer.model, dict(prepared))
        wanted.backward()
        mine = copy.deepcopy(trained)
        batch = with_reference(task, start)
        with without_cache_and_padding_check(mine):
            outputs = task.forward(mine, batch)
        own = task.loss(outputs, batch)
        own.backward()
        assert float(own) == pytest.approx(float(wanted), rel=1e-9), loss
        gradient, other = (
            torch.cat([param.grad.flatten() for param in model.parameters()])
            for model in (mine, trainer.model)
        )
        assert float((gradient - other).norm() / other.norm()) < 1e-9, loss
        for name, value in zip(MEASURES, task.measure(outputs, batch).tolist(), strict=True):
            (theirs_own,) = trainer._metrics["train"][name]
            assert value / task.count(batch) == pytest.approx(theirs_own, rel=1e-9), (loss, name)


def test_the_balancing_loss_of_experts_is_that_of_trl(tmp_path: Path) -> None:
    """On top of the loss of the pairs, over all tokens that are no padding."""
    from transformers import MixtralConfig, MixtralForCausalLM

    tokenizer = chat_tokenizer()
    use_template(tokenizer, "chatml")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    start = MixtralForCausalLM(config)
    trainer, prepared = theirs(start, TURNS, tokenizer, tmp_path)
    wanted = trainer.compute_loss(trainer.model, dict(prepared))
    wanted.backward()
    task = ours(TURNS, tokenizer, chat_template="chatml")
    mine = copy.deepcopy(start)
    task.adapt(mine)
    task.router_loss_coef = router_loss_coef(mine)
    batch = with_reference(task, start)
    loss = task.loss(task.forward(mine, batch), batch)
    loss.backward()
    assert float(wanted) > 0.6932 + 0.5
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    gradient, other = (
        torch.cat([param.grad.flatten() for param in model.parameters()])
        for model in (mine, trainer.model)
    )
    assert float((gradient - other).norm() / other.norm()) < 1e-5


def test_orpo_and_simpo_are_those_of_trl() -> None:
    """Of one pair: over more, TRL takes the mean of ORPO's likelihood over tokens.

    Here it is one over pairs.
    """
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    tokenizer = chat_tokenizer()
    model = model_of(len(tokenizer))
    place = SimpleNamespace(device=torch.device("cpu"))
    for row in TURNS[:2]:
        orpo = ours([row], tokenizer, chat_template="chatml", loss_type="orpo", beta=0.3)
        simpo = ours(
            [row],
            tokenizer,
            chat_template="chatml",
            loss_type="simpo",
            beta=2.0,
            label_smoothing=0.1,
        )
        batch = orpo.collate([orpo.train[0]])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        chosen, rejected = ORPOTrainer.get_batch_logps(
            logits, batch["labels"].clone(), average_log_prob=True
        ).chunk(2)
        told: Any = SimpleNamespace(beta=0.3, accelerator=place)
        ratio = ORPOTrainer.odds_ratio_loss(told, chosen, rejected)[0]
        ids = batch["input_ids"][0][batch["attention_mask"][0].bool()]
        nll = torch.nn.functional.cross_entropy(logits[0, : len(ids) - 1], ids[1:])
        assert float(orpo.loss(orpo.forward(model, batch), batch)) == pytest.approx(
            float(nll - ratio.mean()), rel=1e-6
        )
        told = SimpleNamespace(
            beta=2.0,
            label_smoothing=0.1,
            simpo_gamma=0.5,
            alpha=0.0,
            loss_type="simpo",
            accelerator=place,
        )
        losses = CPOTrainer.cpo_loss(told, chosen, rejected)[0]
        assert float(simpo.loss(simpo.forward(model, batch), batch)) == pytest.approx(
            float(losses.mean()), rel=1e-6
        )
