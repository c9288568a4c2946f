"""Lines that Hydra's grammar does not have, or reads as something else.

One message, whose advice works.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from optrun.cli.verbs import VERBS
from optrun.config import overrides, store
from optrun.config.groups import GROUPS
from tests.running import optrun

GRAMMAR = (
    "expecting {",
    "BRACKET",
    "EOF",
    "Lexer",
    "no viable",
    "mismatched",
    "while evaluating",
    "Traceback",
    "hydra.cc",
)
"""Words of the parser's grammar, which a person did not type."""

ADVISED = {
    "optimizer.betas=(0.9,0.99)": "optimizer.betas=[0.9,0.99]",
    "optimizer.betas=[0.9,0.99": "optimizer.betas=[0.9,0.99]",
    "optimizer.betas=[0.9;0.99]": "optimizer.betas=[0.9,0.99]",
    "optimizer.betas=0.9,0.99": "optimizer.betas=[0.9,0.99]",
    "model.config={n_layer:1,}": "model.config={n_layer:1}",
    "lr=1e-3,": "lr=1e-3",
    "lr =1e-3": "lr=1e-3",
    ' "lr"=1e-3': "lr=1e-3",
    "run_name=a=b": 'run_name="a=b"',
    "run_name=a(b)": 'run_name="a(b)"',
    "run_name=it's": 'run_name="it\'s"',
    "run_name=a,b": 'run_name="a,b"',
    "model=gpt2": "model=pretrained model.path=gpt2",
    "model=bert-base-uncased": "model=pretrained model.path=bert-base-uncased",
    "model=owner/name": "model=pretrained model.path=owner/name",
    "data=myfile.txt": "data=files data.train=myfile.txt",
    "data=./my/rows.jsonl": "data=files data.train=./my/rows.jsonl",
    "data=owner/name": "data=hub data.path=owner/name",
    "task=text_classification": "task=sequence_classification",
    "task=text-classification": "task=sequence_classification",
    "task=ner": "task=token_classification",
    "task=summarization": "task=seq2seq_lm",
    "task=mlm": "task=masked_lm",
    "scheduler=none": "scheduler=constant scheduler.num_warmup_steps=0",
    "scheduler=linear_with_warmup": "scheduler=linear",
    "adapter=peft": "adapter=lora",
    "optimizer=adamw_torch": "optimizer=adamw",
    "optimizer=adamw_torch_fused": "optimizer=adamw optimizer.fused=true",
    "lr@x=1e-3": "lr=1e-3",
    "optimizer@x=lamb": "optimizer=lamb",
    "lr=1e\u22123": "lr=1e-3",
    "lr=1e\u20133": "lr=1e-3",
    "lr=\u201c1e-3\u201d": "lr=1e-3",
    "lr=0,001": "lr=0.001",
    "training.max_steps=1,000": "training.max_steps=1000",
    "training.max_steps=1k": "training.max_steps=1000",
    "training.max_steps=1e3": "training.max_steps=1000",
    "data.max_length=64.0": "data.max_length=64",
    "scheduler.warmup_ratio=10%": "scheduler.warmup_ratio=0.1",
    "optimizer.weight_decay=1%": "optimizer.weight_decay=0.01",
    "tracking=wandb,tensorboard": "tracking=[wandb,tensorboard]",
    "tracking=false": "tracking=none",
    "checkpoint=false": "checkpoint=none",
    "clip=1.0": "clip=global_norm clip.max_norm=1.0",
    "clip=0": "clip=none",
    "distributed=true": "distributed=ddp",
    "distributed=deepspeed": "distributed=fsdp",
    "param_groups=none": "param_groups=single",
    "scheduler=cosine_with_restarts": "scheduler=cosine scheduler.num_cycles=3",
    "optimizer=torch.optim.AdamW": "optimizer=adamw",
    "optimizer=sgd_momentum": "optimizer=sgd optimizer.momentum=0.9",
    "task=sentiment": "task=sequence_classification",
    "task=lm": "task=causal_lm",
    "task=image": "task=image_classification",
    "data=mine": "data=files data.train=mine",
    "LR=1e-3": "lr=1e-3",
    "optimizer=Lamb": "optimizer=lamb",
    "optimizer=lamb.yaml": "optimizer=lamb",
    "optimizer=lamb,": "optimizer=lamb",
    "optimiser=lamb": "optimizer=lamb",
}

_NAMES = {
    "LR=1e-3": ["Did you mean lr?"],
    "optimizer=Lamb": ["Did you mean lamb?"],
    "optimizer=lamb.yaml": ["Did you mean lamb?"],
    "optimiser=lamb": ["Did you mean optimizer?"],
}

SWEEPS = {
    "lr=1e-3..1e-2": "lr=1e-3,1e-2",
    "lr=1e-3-1e-2": "lr=1e-3,1e-2",
    "lr=1e-3:1e-2": "lr=1e-3,1e-2",
    "lr=[1e-3,1e-2]": "lr=0.001,0.01",
    "seed=0..4": "seed=0,1,2,3,4",
    "seed=0-2": "seed=0,1,2",
    "seed=[0,1]": "seed=0,1",
}
"""What is meant as several runs, and the words behind -m."""

REFUSED = [
    "lr=foo(1)",
    "lr=range(a,b)",
    "lr=range()",
    "lr=range(1,2)",
    "lr=interval(1,)",
    "lr=interval(0,1)",
    "lr=choice()",
    "lr=choice(1,2)",
    "lr=tag(a,1)",
    "lr=sort(3,1)",
    "lr=shuffle(1,2)",
    "lr=int(a)",
    "lr=str(1",
    "lr=extend_list(1)",
    "lr=glob(*)",
    "optimizer=glob(zz*)",
    "optimizer=glob(ad*)",
    "optimizer=glob()",
    "optimizer=(adamw)",
    "optimizer={a:1}",
    "optimizer=[a,b]",
    "optimizer=",
    "optimizer=interval(0,1)",
    "~lr",
    "~optimizer",
    "~nosuch",
    "~",
    "++lr=abc",
    "+nosuch=1",
    "+++lr=1",
    "lr=",
    "==",
    'lr="1',
    "lr='1",
    "run_name=${",
    "lr=,1",
    "optimizer@x:y=lamb",
    "a b=1",
    "lr:1",
    "hydra=1",
    "model.config={n_layer 1}",
    "lr=1,2",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert optrun(*words) == 2
    said = capsys.readouterr().err
    assert not [word for word in GRAMMAR if word in said], said
    assert said.count("optrun: error: ") == 1
    return said


@pytest.mark.parametrize("line", ADVISED)
def test_the_advised_line_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, line, "--cfg", "job")
    token = ADVISED[line]
    group = token.partition("=")[0] in GROUPS
    # a name alone is advised where the rest is right as it was typed
    assert any(
        form in said for form in (token if group else shlex.quote(token), *_NAMES.get(line, ()))
    )
    assert optrun(*(token.split() if group else [token]), "--cfg", "job") == 0


@pytest.mark.parametrize("line", SWEEPS)
def test_the_advised_sweep_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"A sweep tries several: -m {SWEEPS[line]}" in refusal(capsys, line)
    hydra = store.open_hydra()
    assert overrides.checked(hydra, "config", [SWEEPS[line]], sweep=True) == [SWEEPS[line]]


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        (["lr", "1e-3"], "lr=1e-3"),
        (["resume", "latest"], "resume=latest"),
        (["optimizer", "lamb"], "optimizer=lamb"),
        (["lr", "=", "1e-3"], "lr=1e-3"),
        (["lr", "=1e-3"], "lr=1e-3"),
        (["seed=1", "lr=", "1e-3"], "lr=1e-3"),
        (
            ["--learning_rate", "5e-5", "--num_train_epochs", "3"],
            "lr=5e-5 training.num_train_epochs=3",
        ),
        (["--learning-rate=5e-5", "--seed", "3"], "lr=5e-5 seed=3"),
        (
            ["--model_name_or_path", "gpt2", "--train_file", "a.csv", "--do_train", "--fp16"],
            "model=pretrained model.path=gpt2 data=files data.train=a.csv training.precision=fp16",
        ),
        (
            ["--max_seq_length", "64", "--optim=lamb", "seed=1"],
            "data.max_length=64 optimizer=lamb seed=1",
        ),
    ],
)
def test_a_line_of_another_program(
    words: list[str], advised: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advised in refusal(capsys, *words)
    assert "resume" in words or optrun(*advised.split(), "--cfg", "job") == 0


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("resume=true", ["resume=True", "resume=latest"]),
        ("scheduler=constant_with_warmup", ["scheduler.num_warmup_steps=STEPS"]),
        ("scheduler=[cosine,linear]", ["a run has one scheduler", "cosine", "linear"]),
        ("experiment=mine", ["DIR/experiment/mine.yaml", "--config-dir DIR"]),
        ("model=bert_tny", ["Did you mean bert_tiny?"]),
        ("--learning_rate=1", ["Here it is written lr=VALUE"]),
        ("--nothing_like_it=1", ["no such option"]),
        ("--dry-run", ["optrun explain shows what a run would do"]),
        ("\u2014learning_rate", ["begins with '\u2014'", "no dash of the keyboard"]),
        ("\u2013m", ["begins with '\u2013'"]),
        ("run", ["trains without a verb"]),
        ("sweep", ["optrun -m with several values"]),
        ("multirun", ["optrun -m with several values"]),
        ("help", ["optrun --help"]),
        ("version", ["optrun --version"]),
        ("test", ["optrun evaluate RUN_DIR"]),
        ("compare", ["optrun report DIR"]),
        ("optrun", ["stands once"]),
        ("data.delimiter=,", ['data.delimiter=","']),
        ("num_labels=3", ["counted in the rows"]),
        ("dropout=0.1", ["model.config.resid_pdrop"]),
        ("gpus=2", ["distributed=NAME training.nproc_per_node=N"]),
        ("bs=32", ["training.per_device_train_batch_size"]),
        ("lrate=1e-3", ["Here it is called lr."]),
        ("wandb=true", ["tracking=wandb"]),
        ("use_lora=true", ["Here it is called adapter=lora."]),
        ("n_embd=64", ["model.config.n_embd"]),
        ("data.label=verdict", ["data.label_column"]),
        ("data.text=review", ["data.text_column"]),
        ("data.test=test.csv", ["data.eval"]),
        ("training.patience=3", ["training.early_stopping_patience"]),
        ("training.on_nan=skip", ["training.on_nonfinite"]),
        ("training.time_limit=60", ["training.max_seconds"]),
        ("task=qa", ["task=seq2seq_lm"]),
        ("task=multiple_choice", ["not offered", "task=sequence_classification"]),
        ("trust_remote_code=true", ["model=pretrained model.trust_remote_code=true"]),
        ("lr=None", ["lr=None", "expected a number"]),
        ("lr=2*1e-3", ["lr=2*1e-3", "expected a number"]),
        ("lr=10^-3", ["unexpected '^'"]),
        ("optimizer.betas=[0.9,0.99,0.999]", ["two numbers"]),
        ("training.max_steps=-1", ["1 or more, or null"]),
        ("training.num_train_epochs=0", ["a number above 0"]),
        ("training.device=gpu", ["cuda:N or mps"]),
        ("scheduler.warmup_ratio=10", ["a number in [0, 1)"]),
        ("lr=nan", ["a finite number above 0"]),
        ("lr=inf", ["a finite number above 0"]),
        ("lr=0", ["a number above 0"]),
        ("hydra.run.dir=/dev/null", ["this is a file"]),
        ("resume=no/such/run", ["no such directory"]),
        ("branch_from=no/such/run", ["no such directory"]),
        ("lr=$LR", ["lr=$LR", "expected a number"]),
        ("-cn=mine", ["For the file mine.yaml write --config-dir . -cn mine"]),
    ],
)
def test_what_is_said_of_it(
    line: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("defaults: [config, _self_]\n")
    said = refusal(capsys, line)
    assert [fact for fact in facts if fact not in said] == [], said


def test_a_file_alone_is_what_start_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my rows.csv").write_text("text,label\na,b\n")
    assert "optrun start 'my rows.csv'" in refusal(capsys, "my rows.csv")
    for verb in ("train", "fit"):
        said = refusal(capsys, verb, "my rows.csv")
        assert "trains without a verb" in said
        assert "transfer" not in said


def test_blanks_behind_the_commas_of_a_sweep() -> None:
    assert [str(value) for value in overrides.values_of(overrides.parse(["lr=1e-3, 2e-3"])[0])] == [
        "0.001",
        "0.002",
    ]


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_read_or_meant(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, line, "--cfg", "job")
    advised = re.search(r"Did you mean ('.*?'|\S+)\?", said)
    if advised is not None and "=" in advised[1]:
        assert optrun(*shlex.split(advised[1]), "--cfg", "job") == 0


@pytest.mark.parametrize(
    "line",
    [
        "lr=range(1e-4,1e-3)",
        "lr=glob(*)",
        "optimizer=glob(zz*)",
        "lr=interval(1,2)",
        "hydra/launcher=glob(*)",
    ],
)
def test_what_a_sweep_refuses(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refusal(capsys, "-m", line)


def test_a_sweep_over_a_glob_of_names() -> None:
    given = ["optimizer=glob([ad*,la*],exclude=ada*)", "lr=1e-3"]
    hydra = store.open_hydra()
    assert overrides.checked(hydra, "config", given, sweep=True) == [
        "optimizer=ademamix,lamb,lazy_adam",
        "lr=1e-3",
    ]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("before", [("--config-dir", "."), ("--json",)])
def test_options_before_a_verb_are_as_those_after_it(
    verb: str, before: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    codes, said = [], []
    for words in ((*before, verb, "nowhere"), (verb, *before, "nowhere")):
        codes.append(optrun(*words))
        said.append(capsys.readouterr().err)
    assert codes == [2, 2]
    assert said[0] == said[1]
    assert "expected key=value. Did you mean the command" not in said[0]


def test_a_recipe_may_be_called_like_a_verb(tmp_path: Path) -> None:
    (tmp_path / "report.yaml").write_text("defaults: [config, _self_]\n")
    assert optrun("--config-dir", ".", "-cn", "report", "--cfg", "job") == 0
