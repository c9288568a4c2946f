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


def train(*words: str, run: str = "run") -> None:
    pretrained = ["model=pretrained", "model.path=base", "data=files", "data.train=rows.jsonl"]
    assert optrun(*pretrained, *STILL, f"hydra.run.dir={run}", *words) == 0
    if run == "run":
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


def head_is_kept() -> None:
    """The head of the pretrained folder is that of the export."""
    from safetensors.torch import load_file

    before = load_file("base/model.safetensors")
    after = load_file("exported/model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.allclose(before[name], after[name], rtol=0, atol=1e-25)


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
    assert "the model's head has the classes entailment, neutral, contradiction" in said
    assert "classifier.weight" in said
    after = transformers.AutoModelForSequenceClassification.from_pretrained("run/model")
    assert list(after.config.id2label.values()) == ["politics", "sport", "weather"]
    assert not torch.allclose(after.classifier.weight, before, atol=1e-3)
    base = transformers.AutoModel.from_pretrained("base")
    assert torch.equal(
        after.bert.embeddings.word_embeddings.weight, base.embeddings.word_embeddings.weight
    )


@pytest.mark.parametrize("names", [["no", "yes"], NAMES])
def test_a_folder_that_numbers_its_labels_alone_has_their_names(names: list[str]) -> None:
    """With label2id and no id2label, transformers calls the classes LABEL_0 and so on."""
    numbers = {name: number for number, name in enumerate(reversed(names))}
    save(
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        id2label={number: name for name, number in numbers.items()},
        label2id=numbers,
    )
    config = read_json("base/config.json")
    config.pop("id2label")
    Path("base/config.json").write_text(json.dumps(config))
    rows = [{"text": sentence(n), "label": names[n % len(names)]} for n in range(24)]
    write_rows(Path("rows.jsonl"), rows)
    train("task=sequence_classification")
    files_agree("id2label")
    head_is_kept()
    assert list(read_json("exported/config.json")["id2label"].values()) == list(reversed(names))


@pytest.mark.parametrize(
    "columns",
    [["kind", "bad", "rude"], ["BAD", "Kind", "rude"], ["kind", "bad"], ["x", "y", "z"]],
    ids=["the same", "another case", "a subset", "others"],
)
def test_columns_of_labels_are_those_of_the_head(
    columns: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule of lists of labels holds for a column of 0 and 1 for each label."""
    names = ["bad", "rude", "kind"]
    save(
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        problem_type="multi_label_classification",
    )
    rows = [
        {"text": sentence(n), **{name: (n + place) % 2 for place, name in enumerate(columns)}}
        for n in range(24)
    ]
    write_rows(Path("rows.jsonl"), rows)
    several = "task.problem_type=multi_label_classification"
    column_names = f"data.label_columns=[{','.join(columns)}]"
    train("task=sequence_classification", several, column_names, "data.eval=rows.jsonl")
    said = " ".join(capsys.readouterr().out.split())
    if columns[0] == "x":
        assert (
            "the model's head has the classes bad, rude, kind, and data.label_columns has x" in said
        )
    else:
        files_agree()
        head_is_kept()
        assert ("labels are those of the model's head" in said) == (columns[0] == "BAD")
        assert ("that no row has, and stay: rude" in said) == (len(columns) == 2)
    assert optrun("evaluate", "run") == 0


def test_two_columns_for_one_class_of_the_head_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    classifier(problem_type="multi_label_classification")
    rows = [{"text": sentence(n), "Neutral": n % 2, "neutral": 1 - n % 2} for n in range(24)]
    write_rows(Path("rows.jsonl"), rows)
    words = ["model=pretrained", "model.path=base", "data=files", "data.train=rows.jsonl"]
    several = "task.problem_type=multi_label_classification"
    both = "data.label_columns=[Neutral,neutral]"
    assert optrun(*words, "task=sequence_classification", several, both) == 2
    assert "the same class of the model" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("most", [3, 2], ids=["all stars", "a subset of the stars"])
def test_numbers_are_those_that_classes_count(most: int) -> None:
    """1 is "1 star", although it is the class of number 0."""
    names = ["1 star", "2 stars", "3 stars"]
    save(
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    rows = [{"text": sentence(n), "label": n % most + 1} for n in range(24)]
    write_rows(Path("rows.jsonl"), rows)
    words = ["task=sequence_classification", "data.eval=rows.jsonl"]
    train(*words)
    files_agree()
    head_is_kept()
    first = records(Path("run"))[0]["eval/accuracy"]
    spelt = [{"text": row["text"], "label": names[int(row["label"]) - 1]} for row in rows]
    write_rows(Path("rows.jsonl"), spelt)
    train(*words, run="again")
    assert records(Path("again"))[0]["eval/accuracy"] == first


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


@pytest.mark.parametrize("task", ["causal_lm", "sft"])
def test_a_tokenizer_that_ends_every_text_ends_no_prompt(task: str) -> None:
    """Behind the end nothing is written; a row of training ends once."""
    from tokenizers import processors

    model = save("decoder", "llama", "AutoModelForCausalLM", eos_token_id=5, bos_token_id=None)
    tokenizer = tokenizer_of("decoder")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 5)]
    )
    tokenizer.save_pretrained("base")
    rows = [{"prompt": sentence(n), "completion": f" {sentence(n + 1)}"} for n in range(8)]
    if task == "causal_lm":
        rows = [{"text": f"{row['prompt']}{row['completion']}"} for row in rows]
    write_rows(Path("rows.jsonl"), rows)
    train(f"task={task}", "task.packing=false", "data.max_length=64")
    write_rows(Path("asked.jsonl"), [{"prompt": sentence(n)} for n in range(4)])
    assert optrun("predict", "run", "data.eval=asked.jsonl", "out=out.jsonl") == 0
    for number, row in enumerate(read_rows(Path("out.jsonl"))):
        ids = tokenizer(sentence(number), add_special_tokens=False, return_tensors="pt")
        written = model.generate(**ids, do_sample=False, max_new_tokens=64)[0]
        text = tokenizer.decode(written[ids.input_ids.shape[1] :], skip_special_tokens=True)
        assert row["generation"] == text != ""


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


# Tokens
# ------------------------------------------------------------------------------------------


def test_added_tokens_keep_the_rows_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """The new rows begin as the mean of the old ones, as transformers makes them."""
    model = save("decoder", "llama", "AutoModelForCausalLM", eos_token_id=5, bos_token_id=None)
    tokenizer = tokenizer_of("decoder")
    tokenizer.add_tokens(["zork", "blip"])
    tokenizer.save_pretrained("more")
    write_rows(Path("rows.jsonl"), [{"text": f"{sentence(n)} zork"} for n in range(12)])
    words = ["model=pretrained", "model.path=base", "data=files", "data.train=rows.jsonl"]
    assert optrun(*words, "model.tokenizer=more") == 2
    advice = f"model.config.vocab_size={len(tokenizer)}"
    assert advice in " ".join(capsys.readouterr().err.split())
    train("model.tokenizer=more", advice)
    before = model.get_input_embeddings().weight
    after = transformers.AutoModelForCausalLM.from_pretrained("exported").get_input_embeddings()
    old, new = after.weight[: len(before)], after.weight[len(before) :]
    assert torch.allclose(old, before, rtol=0, atol=1e-25)
    assert len(new) == 2
    assert torch.allclose(new, before.mean(0).expand_as(new), atol=1e-6)


# The law, for every task
# ------------------------------------------------------------------------------------------

BASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "sequence_classification": (
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        {"id2label": {0: "even", 1: "odd"}, "label2id": {"even": 0, "odd": 1}},
    ),
    "sets": (
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        {
            "id2label": {0: "z", 1: "a", 2: "m"},
            "label2id": {"z": 0, "a": 1, "m": 2},
            "problem_type": "multi_label_classification",
        },
    ),
    "pairs": (
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        {"id2label": {0: "same", 1: "other"}, "label2id": {"same": 0, "other": 1}},
    ),
    "regression": ("encoder", "bert", "AutoModelForSequenceClassification", {"num_labels": 1}),
    "regression of pairs": (
        "encoder",
        "bert",
        "AutoModelForSequenceClassification",
        {"num_labels": 1},
    ),
    "token_classification": (
        "encoder",
        "bert",
        "AutoModelForTokenClassification",
        {
            "id2label": {0: "O", 1: "B-X", 2: "I-X"},
            "label2id": {"O": 0, "B-X": 1, "I-X": 2},
        },
    ),
    "masked_lm": ("encoder", "bert", "AutoModelForMaskedLM", {}),
    "causal_lm": ("decoder", "llama", "AutoModelForCausalLM", {}),
    "sft": ("decoder", "llama", "AutoModelForCausalLM", {}),
    "preference": ("decoder", "llama", "AutoModelForCausalLM", {}),
    "seq2seq_lm": (
        "encoder",
        "bart",
        "AutoModelForSeq2SeqLM",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "init_std": 0.5,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "decoder_start_token_id": 3,
            "forced_eos_token_id": 3,
        },
    ),
    "embedding": ("encoder", "bert", "AutoModel", {}),
    "embedding of a decoder": ("decoder", "gpt2", "AutoModel", {}),
    "image_classification": (
        "",
        "vit",
        "AutoModelForImageClassification",
        {
            "image_size": 8,
            "patch_size": 4,
            "id2label": {0: "dark", 1: "light"},
            "label2id": {"dark": 0, "light": 1},
        },
    ),
}
ANSWERS = {"chosen": "the fox", "rejected": "the dog"}
DECODES = {"eos_token_id": 5, "bos_token_id": None}
PAIRS = ["data.text_column=text", "data.text_pair_column=other"]
NUMBERS = ["task=sequence_classification", "task.problem_type=regression"]
TASK_WORDS = {
    "sets": ["task=sequence_classification", "task.problem_type=multi_label_classification"],
    "pairs": ["task=sequence_classification", *PAIRS],
    "regression": NUMBERS,
    "regression of pairs": [*NUMBERS, *PAIRS],
    "masked_lm": ["task=masked_lm", "task.packing=false"],
    "causal_lm": ["task=causal_lm", "task.packing=false", "task.sample_tokens=0"],
    "sft": ["task=sft", "task.sample_tokens=0"],
    "embedding of a decoder": ["task=embedding"],
    "image_classification": ["task=image_classification", "data.image_column=image"],
}


def write_base(name: str) -> None:
    """Write `base/`, the folder that a run of a task begins with; its logits are far apart."""
    kind, model_type, auto_class, values = BASES[name]
    values = {"initializer_range": 0.5, **values, **(DECODES if kind == "decoder" else {})}
    if kind:
        model = save(kind, model_type, auto_class, **values)
        side = "left" if kind == "decoder" else "right"
        tokenizer = transformers.AutoTokenizer.from_pretrained("base", padding_side=side)
        if kind == "decoder":
            tokenizer.chat_template = TEMPLATE.replace("<|im_end|>", "<|end|>")
        tokenizer.save_pretrained("base")
        if model.can_generate():
            model.generation_config.update(max_new_tokens=6, repetition_penalty=1.3)
            model.save_pretrained("base")
        return
    torch.manual_seed(1)
    config = transformers.ViTConfig(**{**SMALL, **values})
    transformers.ViTForImageClassification(config).save_pretrained("base")
    size = {"height": 8, "width": 8}
    transformers.ViTImageProcessor(size=size, image_mean=[0.2] * 3).save_pretrained("base")


def pictures() -> list[dict[str, Any]]:
    from PIL import Image

    rows = []
    for number in range(8):
        Image.new("RGB", (9, 7), (30 * number, 9, 99)).save(f"{number}.png")
        rows.append({"image": f"{number}.png", "label": ["dark", "light"][number // 4]})
    return rows


def task_rows(name: str) -> list[dict[str, Any]]:
    """Rows to train on, and to predict."""
    if name == "image_classification":
        return pictures()
    said = {role: [{"role": "assistant", "content": text}] for role, text in ANSWERS.items()}
    rows: list[dict[str, Any]] = []
    for number in range(8):
        text = sentence(number)[: 20 + 3 * number].rpartition(" ")[0]
        turns = [{"role": "user", "content": text}]
        tags = (["O", "B-X", "I-X"] * 20)[: len(text.split())]
        other = {"other": sentence(number + 3)} if name.endswith("pairs") else {}
        row: dict[str, dict[str, Any]] = {
            "sequence_classification": {"text": text, "label": ["even", "odd"][number % 2]},
            "sets": {"text": text, "label": [["z", "m"], ["a"], []][number % 3]},
            "pairs": {"text": text, **other, "label": ["same", "other"][number % 2]},
            "regression": {"text": text, **other, "label": number / 4},
            "token_classification": {"tokens": text.split(), "tags": tags},
            "masked_lm": {"text": f"{text} [MASK]"},
            "causal_lm": {"text": text},
            "seq2seq_lm": {"text": text, "target": sentence(number + 1)},
            "sft": {"messages": turns + said["chosen"]},
            "preference": {"prompt": turns, **said},
            "embedding": {"anchor": text, "positive": sentence(9)[:30]},
        }
        rows.append(row[name.partition(" ")[0]])
    return rows


def asked(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """What of a row `optrun predict` is given."""
    if name.startswith("embedding"):
        return {"text": row["anchor"]}
    if name == "preference":
        return {"messages": row["prompt"]}
    keys = ("text", "other", "tokens", "image", "messages")
    return {key: row[key] for key in keys if key in row}


def plain_answers(name: str, folder: str, rows: list[dict[str, Any]]) -> list[Any]:
    """What plain transformers, or the formula of sentence-transformers, says of some rows."""
    model = getattr(transformers, BASES[name][2]).from_pretrained(folder).eval()
    if name == "image_classification":
        return plain_image_shares(model, folder, rows)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [plain_text(asked(name, row), tokenizer) for row in rows]
    words = name == "token_classification"
    pairs = [row["other"] for row in rows] if name.endswith("pairs") else None
    batch = tokenizer(texts, pairs, padding=True, return_tensors="pt", is_split_into_words=words)
    if pairs is None:
        batch.pop("token_type_ids", None)
    if model.can_generate() and name != "masked_lm":
        begin = 0 if name == "seq2seq_lm" else batch.input_ids.shape[1]
        return tokenizer.batch_decode(model.generate(**batch)[:, begin:], skip_special_tokens=True)
    with torch.no_grad():
        outputs = model(**batch)
    if name.startswith("embedding"):
        return by_modules(folder, outputs.last_hidden_state, batch.attention_mask)
    logits = outputs.logits
    if words:
        begins = [batch.word_ids(row).index(0) for row in range(len(rows))]
        ends = [begin + len(row["tokens"]) for begin, row in zip(begins, rows, strict=True)]
        pieces = zip(logits.argmax(-1), begins, ends, strict=True)
        return [row[begin:end] for row, begin, end in pieces]
    if name == "masked_lm":
        return list(logits[batch.input_ids == tokenizer.mask_token_id].softmax(-1).max(-1).values)
    if not name.startswith("regression"):
        logits = logits.sigmoid() if name == "sets" else logits.softmax(-1)
    return list(logits)


def plain_image_shares(model: Any, folder: str, rows: list[dict[str, Any]]) -> list[Any]:
    """The shares of the classes of some images, by plain transformers."""
    from PIL import Image

    prepare = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [Image.open(row["image"]).convert("RGB") for row in rows]
    with torch.no_grad():
        return list(model(**prepare(images, return_tensors="pt")).logits.softmax(-1))


def plain_text(row: dict[str, Any], tokenizer: Any) -> Any:
    """The text of a row, or its words; of a chat what is asked, with the opening of an answer."""
    if "messages" not in row:
        return row.get("text", row.get("tokens"))
    return tokenizer.apply_chat_template(
        row["messages"][:1], tokenize=False, add_generation_prompt=True
    )


def by_modules(folder: str, states: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Make vectors as `modules.json` says, by the formulas of sentence-transformers."""
    kinds = [module["type"].rpartition(".")[2] for module in read_json(folder, "modules.json")]
    pooling = read_json(folder, "1_Pooling/config.json")
    assert kinds[:2] == ["Transformer", "Pooling"]
    if pooling["pooling_mode_cls_token"]:
        vectors = states[torch.arange(len(mask)), mask.argmax(1)]
    elif pooling["pooling_mode_lasttoken"]:
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        vectors = states[torch.arange(len(mask)), last]
    else:
        vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return list(torch.nn.functional.normalize(vectors, dim=1) if len(kinds) == 3 else vectors)


def read_json(*path: str) -> Any:
    return json.loads(Path(*path).read_text())


def said_of(name: str, row: dict[str, Any]) -> Any:
    """What `optrun predict` says, as `plain_answers` has it."""
    if name == "token_classification":
        return [list(BASES[name][3]["label2id"]).index(label) for label in row["prediction"]]
    if name.startswith("regression"):
        return [row["prediction"]]
    if "probabilities" in row:
        return list(row["probabilities"].values())
    return row["embedding" if name.startswith("embedding") else "generation"]


def folder_is_kept(folder: str, *changed: str) -> None:
    """Every file of the pretrained folder is there as it was, but for some keys."""
    from safetensors.torch import load_file

    free = {"problem_type", "dtype", "transformers_version", *changed}
    for path in sorted(Path("base").iterdir()):
        other = Path(folder, path.name)
        if path.suffix == ".json":
            before, after = json.loads(path.read_text()), json.loads(other.read_text())
            keys = {key for key in {*before, *after} if before.get(key) != after.get(key)}
            assert not keys - free, (path.name, keys - free)
        elif path.suffix == ".safetensors":
            before, after = load_file(path), load_file(other)
            assert before.keys() == after.keys()
            assert all(
                torch.allclose(before[key], after[key], rtol=0, atol=1e-25) for key in before
            )
        else:
            assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.parametrize("name", BASES)
def test_a_folder_stays_what_it_says(name: str) -> None:
    """After a step at lr 0 the model of the run, its export, `optrun predict` and the plain
    libraries say the same, batched and one by one, and every file of the folder is kept.
    """
    write_base(name)
    rows = task_rows(name)
    write_rows(Path("rows.jsonl"), rows)
    train(*TASK_WORDS.get(name, [f"task={name}"]), "data.max_length=64")
    write_rows(Path("asked.jsonl"), [asked(name, row) for row in rows])
    predictions = []
    if name == "masked_lm":  # which `optrun predict` refuses
        predictions.append([value.item() for value in plain_answers(name, "base", rows)])
    for batch in (1, 8) if not predictions else ():
        words = f"training.per_device_eval_batch_size={batch}"
        out = f"{batch}.jsonl"
        assert optrun("predict", "run", "data.eval=asked.jsonl", f"out={out}", words) == 0
        predictions.append([said_of(name, row) for row in read_rows(Path(out))])
    for folder in ("run/model", "exported"):
        # Positions of GPT-2 are counted from the begin of a row: padding on the left moves them.
        folder_is_kept(folder, *(["padding_side"] if name == "embedding of a decoder" else []))
        alone = [plain_answers(name, folder, [row])[0] for row in rows]
        for answers in (alone, plain_answers(name, folder, rows)):
            for said in predictions:
                for one, other in zip(said, answers, strict=True):
                    if isinstance(other, str):
                        assert one == other
                    else:
                        assert one == pytest.approx(other.tolist(), abs=2e-5)
    if isinstance(answers[0], str):
        assert any(answers)
