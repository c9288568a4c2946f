"""What a pretrained folder says about itself is kept and used.

The model of the run, its export, `optrun predict` and plain transformers agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.prediction_runs import read_rows, write_rows
from tests.running import optrun, records, sentence

NAMES = ["entailment", "neutral", "contradiction"]
STILL = ["lr=1e-30", "optimizer=sgd", "training.max_steps=1", "clip=none"]
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("optrun.runner.train.draw_curves", lambda path: None)


def tokenizer_of(kind: str) -> Any:
    """A tokenizer of words, with the special tokens of an encoder or a decoder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted({word for number in range(60) for word in sentence(number).split()})
    special = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "<|end|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    turns = ["user", "assistant"]
    vocabulary = {word: number for number, word in enumerate([*special, *turns, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    if kind == "encoder":
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    else:
        names |= {"eos_token": "<|end|>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        **names,
    )


def save(kind: str, model_type: str, auto_class: str, **values: Any) -> Any:
    """Write `base/`, a pretrained folder; returns the model."""
    tokenizer = tokenizer_of(kind)
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer), pad_token_id=0, **{**SMALL, **values}
    )
    model = getattr(transformers, auto_class).from_config(config)
    model.save_pretrained("base")
    tokenizer.save_pretrained("base")
    return model.eval()


def train(*words: str) -> None:
    pretrained = ["model=pretrained", "model.path=base", "data=files", "data.train=rows.jsonl"]
    assert optrun(*pretrained, *STILL, "hydra.run.dir=run", *words) == 0
    assert optrun("export", "run/checkpoints/last", "exported") == 0


def files_agree(*changed: str) -> None:
    """The folders of the run and of the export have the values of the pretrained one."""
    for name in ("config.json", "generation_config.json"):
        if not Path("base", name).exists():
            continue
        before = json.loads(Path("base", name).read_text())
        for folder in ("run/model", "exported"):
            after = json.loads(Path(folder, name).read_text())
            different = {key for key in {*before, *after} if before.get(key) != after.get(key)} - {
                "problem_type",
                "dtype",
                "transformers_version",
                *changed,
            }
            assert not different, (name, folder, different)


# Classes
# ------------------------------------------------------------------------------------------


def classifier(**values: Any) -> Any:
    return save(
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        id2label=dict(enumerate(NAMES)),
        label2id={name: number for number, name in enumerate(NAMES)},
        **values,
    )


def labelled(model: Any, spell: Any, keep: Any = lambda label: True) -> list[dict[str, Any]]:
    """Rows with the labels that a model gives them."""
    tokenizer = tokenizer_of("encoder")
    rows = []
    for number in range(48):
        with torch.no_grad():
            logits = model(**tokenizer(sentence(number), return_tensors="pt")).logits
        label = int(logits[0, :].argmax()) if number % 4 else number // 4 % 3
        if keep(label):
            rows.append({"text": sentence(number), "label": spell(label)})
    write_rows(Path("rows.jsonl"), rows)
    return rows


SPELLINGS = {
    "the same names": lambda label: NAMES[label],
    "another case": lambda label: f" {NAMES[label].upper()}",
    "numbers": lambda label: label,
    "LABEL_0": lambda label: f"LABEL_{label}",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_classes_are_those_of_the_head(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier()
    rows = labelled(model, SPELLINGS[spelling])
    train("task=sequence_classification", "data.eval=rows.jsonl")
    said = capsys.readouterr().out
    assert ("labels are those of the model's head" in said) == (spelling != "the same names")
    assert "new, " not in said
    files_agree()
    text_only = [{"text": row["text"]} for row in rows]
    write_rows(Path("texts.jsonl"), text_only)
    assert optrun("predict", "run", "data.eval=texts.jsonl", "out=out.jsonl") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
    for folder in ("base", "run/model", "exported"):
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        for row in read_rows(Path("out.jsonl")):
            with torch.no_grad():
                shares = plain(**tokenizer(row["text"], return_tensors="pt")).logits.softmax(-1)[0]
            assert row["prediction"] == plain.config.id2label[int(shares.argmax())]
            assert list(row["probabilities"]) == NAMES
            assert list(row["probabilities"].values()) == pytest.approx(shares.tolist(), abs=1e-5)
    right = [
        str(row["label"]).strip().lower()
        in (row_out["prediction"], str(NAMES.index(row_out["prediction"])))
        or str(row["label"]) == f"LABEL_{NAMES.index(row_out['prediction'])}"
        for row, row_out in zip(rows, read_rows(Path("out.jsonl")), strict=True)
    ]
    assert records(Path("run"))[0]["eval/accuracy"] == pytest.approx(sum(right) / len(right))
    assert sum(right) / len(right) > 0.7, "the rows are what the model says"
    capsys.readouterr()
    assert optrun("evaluate", "run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["eval/accuracy"] == pytest.approx(sum(right) / len(right))


def test_a_subset_of_the_classes_keeps_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier()
    labelled(model, lambda label: NAMES[label], lambda label: label != 1)
    train("task=sequence_classification", "data.eval=rows.jsonl")
    assert "that no row has, and stay: neutral" in capsys.readouterr().out
    files_agree()


def test_other_classes_make_a_new_head(capsys: pytest.CaptureFixture[str]) -> None:
    """Also if there are as many of them: the old rows of the head mean something else."""
    before = classifier().classifier.weight
    labelled(classifier(), lambda label: ["sport", "politics", "weather"][label])
    train("task=sequence_classification", "data.eval=rows.jsonl")
    said = " ".join(capsys.readouterr().out.split())
    assert "the model's head tells entailment, neutral, contradiction apart" in said
    assert "classifier.weight" in said
    after = transformers.AutoModelForSequenceClassification.from_pretrained("run/model")
    assert list(after.config.id2label.values()) == ["politics", "sport", "weather"]
    assert not torch.allclose(after.classifier.weight, before, atol=1e-3)
    base = transformers.AutoModel.from_pretrained("base")
    assert torch.equal(
        after.bert.embeddings.word_embeddings.weight, base.embeddings.word_embeddings.weight
    )


def test_labels_of_words_are_those_of_the_head() -> None:
    names = ["O", "B-PER", "I-PER"]
    model = save(
        "encoder",
        "bert",
        "AutoModelForTokenClassification",
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    tokenizer = tokenizer_of("encoder")
    rows = []
    for number in range(24):
        words = sentence(number).split()
        with torch.no_grad():
            logits = model(**tokenizer(sentence(number), return_tensors="pt")).logits[0, 1:-1]
        rows.append({"tokens": words, "tags": [names[int(row.argmax())] for row in logits]})
    write_rows(Path("rows.jsonl"), rows)
    train("task=token_classification", "data.eval=rows.jsonl")
    assert records(Path("run"))[0]["eval/accuracy"] == 1
    files_agree()


def test_sets_of_labels_are_those_of_the_head() -> None:
    classifier(problem_type="multi_label_classification")
    rows = [
        {"text": sentence(number), "label": [NAMES[number % 3], NAMES[(number + 1) % 3]]}
        for number in range(24)
    ]
    write_rows(Path("rows.jsonl"), rows)
    several = "task.problem_type=multi_label_classification"
    train("task=sequence_classification", several, "data.eval=rows.jsonl")
    files_agree()


# Generation
# ------------------------------------------------------------------------------------------


def test_generation_is_that_of_the_folder() -> None:
    """Beams, penalties, forced tokens and ends of a pretrained encoder-decoder."""
    tokenizer = tokenizer_of("encoder")
    torch.manual_seed(1)
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=len(tokenizer),
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=128,
            init_std=0.5,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
            decoder_start_token_id=3,
            forced_eos_token_id=3,
        )
    )
    model.generation_config = transformers.GenerationConfig(
        num_beams=3,
        no_repeat_ngram_size=2,
        forced_bos_token_id=9,
        forced_eos_token_id=3,
        eos_token_id=[3, 5],
        decoder_start_token_id=3,
        pad_token_id=0,
        bos_token_id=2,
        max_length=12,
        length_penalty=2.0,
        early_stopping=True,
    )
    model.save_pretrained("base")
    tokenizer.save_pretrained("base")
    rows = [{"text": sentence(number), "target": sentence(number + 1)} for number in range(12)]
    write_rows(Path("rows.jsonl"), rows)
    train("task=seq2seq_lm")
    files_agree()
    for number, batch in enumerate((1, 8)):
        words = f"training.per_device_eval_batch_size={batch}"
        assert optrun("predict", "run", "data.eval=rows.jsonl", f"out={number}.jsonl", words) == 0
    for folder in ("base", "run/model", "exported"):
        plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
        texts = []
        for row in rows:
            ids = plain.generate(**tokenizer(row["text"], return_tensors="pt"))
            texts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
        assert any(texts)
        for out in ("0.jsonl", "1.jsonl"):
            assert [row["generation"] for row in read_rows(Path(out))] == texts


def chats() -> None:
    rows = []
    for number in range(24):
        said = [("user", sentence(number)), ("assistant", sentence(number + 1))]
        rows.append({"messages": [{"role": role, "content": text} for role, text in said]})
    write_rows(Path("rows.jsonl"), rows)


TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def test_a_published_chat_model_stops(capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the template's turn is an end of the tokenizer and of the generation."""
    save("decoder", "llama", "AutoModelForCausalLM", eos_token_id=5, bos_token_id=None)
    Path("mine.jinja").write_text(TEMPLATE)
    chats()
    train("task=sft", "task.chat_template=mine.jinja", "data.max_length=64")
    said = " ".join(capsys.readouterr().out.split())
    assert "the tokenizer's end of text is now <|im_end|>" in said
    for folder in ("run/model", "exported"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        generation = transformers.GenerationConfig.from_pretrained(folder)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert tokenizer.eos_token == "<|im_end|>"
        assert generation.eos_token_id == [end, 5]
    files_agree("eos_token_id")


def test_a_template_that_ends_no_answer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    save("decoder", "llama", "AutoModelForCausalLM", eos_token_id=5, bos_token_id=None)
    Path("mine.jinja").write_text(TEMPLATE.replace("<|im_end|> ", ""))
    chats()
    words = ["model=pretrained", "model.path=base", "data=files", "data.train=rows.jsonl"]
    assert optrun(*words, "task=sft", "task.chat_template=mine.jinja") == 2
    assert "writes nothing behind an answer" in capsys.readouterr().err


# Experts
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_perplexity_is_without_the_loss_of_experts(smoothing: float) -> None:
    """Which is trained on, and a metric of its own; also with label smoothing."""
    model = save(
        "decoder",
        "mixtral",
        "AutoModelForCausalLM",
        eos_token_id=5,
        bos_token_id=None,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    write_rows(Path("rows.jsonl"), [{"text": sentence(3)}] * 8)
    train(
        "data.eval=rows.jsonl",
        "task.packing=false",
        f"training.label_smoothing_factor={smoothing}",
        "training.logging_steps=1",
        "training.per_device_train_batch_size=8",
    )
    tokenizer = tokenizer_of("decoder")
    ids = tokenizer([f"{sentence(3)} <|end|>"] * 8, return_tensors="pt").input_ids
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=ids)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        entropy = torch.nn.functional.cross_entropy(logits, targets)
        smoothed = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing)
    experts = float(outputs.loss - entropy)
    assert experts > 0.5
    first, last = records(Path("run"))[0], records(Path("run"))[-1]
    assert first["eval/loss"] == pytest.approx(float(entropy), rel=1e-4)
    assert first["eval/perplexity"] == pytest.approx(float(entropy.exp()), rel=1e-4)
    assert first["eval/router_loss"] == pytest.approx(experts, rel=1e-3)
    assert last["train/loss"] == pytest.approx(float(smoothed) + experts, rel=1e-4)


def test_preferences_train_experts_too() -> None:
    """As TRL's DPOTrainer: the loss of the pairs, which is ln 2 at the start, and that of
    experts.
    """
    save(
        "decoder",
        "mixtral",
        "AutoModelForCausalLM",
        eos_token_id=5,
        bos_token_id=None,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=0.5,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    rows = [
        {
            "prompt": sentence(number),
            "chosen": sentence(number + 1),
            "rejected": sentence(number + 2),
        }
        for number in range(16)
    ]
    write_rows(Path("rows.jsonl"), rows)
    train("task=preference", "data.max_length=64", "training.logging_steps=1")
    last = records(Path("run"))[-1]
    assert last["train/loss"] > 0.6932 + 0.5
    assert last["eval/rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert last["eval/loss"] == pytest.approx(last["train/loss"], rel=0.02), "as TRL's"
