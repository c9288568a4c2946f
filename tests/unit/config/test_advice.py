"""What is said of a mistyped line, asked of the functions that check it, on tables.

What is said names the facts, and the line that it advises works.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from optrun.base.errors import ConfigError
from optrun.cli import hydra_options
from optrun.config import overrides, store
from optrun.config.compose import compose_request
from optrun.config.groups import GROUPS
from optrun.config.request import CommandLine

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

FACTS: list[tuple[list[str], list[str]]] = [
    (["optimzer=lamb"], ["optimzer", "Did you mean optimizer?"]),
    (["data=file"], ["data=file", "files"]),
    (["optimizer.foo=1"], ["optimizer.foo", "optimizer=adamw has", "betas"]),
    (["optimizer.betas=[0.9]"], ["optimizer.betas", "[0.9]", "two numbers"]),
    (["lr=abc"], ["lr=abc", "a number"]),
    (["seed=-1"], ["seed=-1", "from 0 to 2**63 - 1"]),
    (
        ["training.max_steps=100000000000000000000"],
        ["training.max_steps=1", "2,147,483,647 or less"],
    ),
    (
        ["training.per_device_train_batch_size=3000000000"],
        ["training.per_device_train_batch_size=3000000000", "or less"],
    ),
    (["training.num_train_epochs=1e30"], ["training.num_train_epochs=1e+30", "or less"]),
    (["training.logging_steps=0"], ["training.logging_steps=0", "1 or more"]),
    (
        ["training.dataloader_num_workers=100000"],
        ["training.dataloader_num_workers=100000", "1,024"],
    ),
    (["data.max_length=100000000000"], ["data.max_length=100000000000", "or less"]),
    (["model.vocab_size=10000000000"], ["model.vocab_size=10000000000", "or less"]),
    (["seed=100000000000000000000"], ["seed=1", "2**63 - 1"]),
    (["lr=null"], ["lr=null", "not null"]),
    (["lr=high"], ["lr=high: expected a number, such as lr=3e-4."]),
    (["optimizer.betas=0.9"], ["optimizer.betas=0.9", "a list"]),
    (["optimizer.fused=maybe"], ["optimizer.fused=maybe", "true or false"]),
    (["model.config=3"], ["model.config=3", "a mapping"]),
    (["param_groups.rules=a"], ["param_groups.rules=a", "a list"]),
    (["training.eval_steps=0"], ["training.eval_steps=0", "1 or more"]),
    (["data.eval_fraction=1"], ["data.eval_fraction=1", "a number in [0, 1)"]),
    (["training.max_grad_norm=1"], ["training.max_grad_norm", "called clip.max_norm"]),
    (["data.train=x.txt"], ["data.train", "belongs to data=files"]),
    (["model.path=x"], ["model.path", "belongs to model=pretrained"]),
    (
        ["param_groups.decay_rate=0.9"],
        ["param_groups.decay_rate", "belongs to param_groups=layerwise"],
    ),
    (["run_name=[a[1]]"], ["cannot be read", 'run_name="[a[1]]"']),
    (["lr=foo(1)"], ["lr=foo(1)", "cannot be read"]),
    (["optimizer.lr=1e-3"], ["optimizer.lr", "called lr"]),
    (["max_steps=3"], ["max_steps", "training.max_steps"]),
    (["training.max_step=3"], ["training.max_step", "Did you mean training.max_steps?"]),
    (["training.max_steps=1.5"], ["training.max_steps=1.5", "a whole number"]),
    (["training.max_steps=3", "training.num_train_epochs=1"], ["both given"]),
    (["training.precision=fp64"], ["fp64", "fp32, bf16, fp16"]),
    (["-m", "optimizer=adamw,lam"], ["optimizer=lam", "lamb"]),
    (["evalute", "x"], ["evalute", "evaluate"]),
    (["--lr", "1e-3"], ["--lr: no such option", "written lr=1e-3"]),
    (["data=csv"], ["data=files data.train=FILE.csv"]),
    (["gpu=0"], ["training.device=cuda:0"]),
    (["model.hidden_size=64"], ["model.hidden_size", "model.config.hidden_size"]),
    (["--learning_rate", "1e-3"], ["--learning_rate", "written lr=1e-3"]),
    (["hydra.run.dirr=x"], ["hydra.run.dirr", "Did you mean dir?"]),
    (["-m", "hydra.sweeper.max_batch=3", "lr=1e-3"], ["hydra.sweeper.max_batch", "max_batch_size"]),
    (
        ["-m", "hydra.sweeper.max_batch_size=a", "lr=1e-3"],
        ["hydra.sweeper.max_batch_size=a", "a whole number"],
    ),
    (["--config-dir", "full", "--config-dir", "."], ["--config-dir is given twice"]),
    (["-cd", "full", "--config-dir=."], ["--config-dir is given twice"]),
    (["-cn", "stdlib_gpt", "lr=1", "-cn", "sst2_minilm"], ["--config-name is given twice"]),
    (["--cfg", "job", "--cfg", "all"], ["--cfg is given twice"]),
    (["--cfg", "job", "-p", "optimizer", "-p", "model"], ["--package is given twice"]),
    (["--info", "searchpath", "--info", "defaults"], ["--info is given twice"]),
    (["-m", "-m", "lr=1,2"], ["--multirun is given twice"]),
    (["--run", "-m", "lr=1,2"], ["--run and --multirun"]),
    (["--cfg", "job", "--info", "config"], ["--cfg and --info", "one by one"]),
    (["--help", "lr", "--cfg", "job"], ["--help and --cfg"]),
    (
        ["scheduler=piecewise", "scheduler.values=[1.0,nan,1.0]"],
        ["scheduler.values=[1.0, nan, 1.0]", "0 or more"],
    ),
    (["-p", "optimizer"], ["--package belongs to --cfg"]),
    (["-cp", "full"], ["--config-path: not offered", "--config-dir"]),
    (["--experimental-rerun", "full"], ["--experimental-rerun: not offered", "resume=RUN_DIR"]),
    (["resume=a", "resume=b"], ["resume is given twice"]),
    (["resume=nowhere", "lr=1", "lr=2"], ["lr is given twice"]),
    (["-cn="], ["-cn and --config-dir take a name"]),
    (["--config-dir", ""], ["-cn and --config-dir take a name"]),
    (["-cn", "/etc/passwd"], ["-cn /etc/passwd: no such recipe"]),
    (["-cn", "nosuch", "--help"], ["-cn nosuch: no such recipe"]),
    (["hydra/job_logging=nope"], ["hydra/job_logging=nope", "none"]),
    (["hydra/swepper=grid"], ["hydra/swepper", "Did you mean hydra/sweeper?"]),
    (["hydra.job.env_copy=[NOSUCH]"], ["hydra.job.env_copy", "NOSUCH", "not set"]),
    (["hydra.searchpath=[nowhere]"], ["hydra.searchpath=nowhere", "no such folder"]),
    (["run_name=${oc.env:NOSUCH}"], ["run_name=${oc.env:NOSUCH}", "NOSUCH is not set"]),
    (
        ["--cfg", "job", "--resolve", "run_name=${nosuch}"],
        ["run_name=${nosuch}", "there is no key nosuch"],
    ),
    (
        ["-m", "optimizer=adamw,sgd", "optimizer.always_adapt=true"],
        ["optimizer.always_adapt", "optimizer=lamb"],
    ),
    (["model=pretrained"], ["model.path", "missing"]),
    (
        ["model=pretrained", "model.path=x", "model.default_lr_factor=-1"],
        ["model.default_lr_factor=-1", "above 0"],
    ),
    (["optimizer.zzzzqq=1"], ["optimizer=adamw has: default_lr, weight_decay"]),
    (["clip=none", "clip.max_norm=1"], ["It belongs to clip=global_norm, clip=norm."]),
    (["scheduler=constant_with_warmup"], ["scheduler.num_warmup_steps=STEPS"]),
    (["scheduler=[cosine,linear]"], ["a run has one scheduler", "cosine", "linear"]),
    (["experiment=mine"], ["experiment: no such key", "-cn FILE.yaml"]),
    (["model=bert_tny"], ["Did you mean bert_tiny?"]),
    (["--learning_rate=1"], ["Here it is written lr=1."]),
    (["evaluate", "--learning_rate=1", "run"], ["Here it is written lr=1."]),
    (["--nothing_like_it=1"], ["no such option"]),
    (["--dry-run"], ["optrun explain shows what a run would do"]),
    (["—learning_rate"], ["begins with '—'", "no dash of the keyboard"]),
    (["–m"], ["begins with '–'"]),
    (["run"], ["trains without a verb"]),
    (["sweep"], ["optrun -m with several values"]),
    (["multirun"], ["optrun -m with several values"]),
    (["help"], ["optrun --help"]),
    (["version"], ["optrun --version"]),
    (["test"], ["optrun evaluate RUN_DIR"]),
    (["compare"], ["optrun report DIR"]),
    (["optrun"], ["only once"]),
    (["data.delimiter=,"], ['data.delimiter=","']),
    (["num_labels=3"], ["counted in the rows"]),
    (["dropout=0.1"], ["model.config.resid_pdrop"]),
    (["gpus=2"], ["distributed=NAME training.nproc_per_node=N"]),
    (["wandb=true"], ["tracking=wandb"]),
    (["use_lora=true"], ["Here it is called adapter=lora."]),
    (["n_embd=64"], ["model.config.n_embd"]),
    (["data.label=verdict"], ["data.label_column"]),
    (["data.text=review"], ["data.text_column"]),
    (["training.patience=3"], ["training.early_stopping_patience"]),
    (["lr=None"], ["lr=None", "expected a number"]),
    (["lr=2*1e-3"], ["lr=2*1e-3", "expected a number"]),
    (["lr=10^-3"], ["lr=10^-3", "cannot be read"]),
    (["optimizer.betas=[0.9,0.99,0.999]"], ["two numbers"]),
    (["training.max_steps=-1"], ["1 or more, or null"]),
    (["training.num_train_epochs=0"], ["a number above 0"]),
    (["scheduler.warmup_ratio=10"], ["a number in [0, 1)"]),
    (["lr=nan"], ["a finite number above 0"]),
    (["lr=inf"], ["a finite number above 0"]),
    (["lr=0"], ["a number above 0"]),
    (["lr=$LR"], ["lr=$LR", "expected a number"]),
    (["training.warmup_ratio=0.1"], ["training.warmup_ratio", "scheduler.warmup_ratio"]),
    (["trust_remote_code=true"], ["model.trust_remote_code"]),
    (["task=multiple_choice"], ["not offered", "task=sequence_classification"]),
    (["fsdp=full_shard"], ["fsdp: no such key", "called distributed=fsdp."]),
    (["num_processes=2"], ["called distributed=NAME training.nproc_per_node=N."]),
    (["--nproc_per_node", "2"], ["written training.nproc_per_node=2"]),
    (["trainer.num_nodes=2"], ["Not offered", "torchrun --nnodes=N"]),
    (["scheduler.weight_decay_curve=lr"], ["Not offered", "function of the step"]),
    (["global_batch_size=64"], ["training.global_batch_size"]),
    (["--do_predict"], ["Not offered: optrun predict RUN_DIR data.eval=FILE out=FILE"]),
    (
        ["--sweep"],
        ["Not offered: the option -m starts a sweep, as in optrun -m lr=1e-3,2e-3."],
    ),
    (["push_to_hub=true"], ["optrun export RUN_DIR DEST push_to_hub=NAME does"]),
    (["packing=true"], ["task.packing"]),
    (["training.assistant_only_loss=true"], ["task.assistant_only_loss"]),
    (["r=8"], ["adapter.r"]),
    (["lora.target_modules=[q_proj]"], ["adapter.target_modules"]),
    (["--lora-alpha", "16"], ["written adapter.lora_alpha=16."]),
    (["training.learning_rate=1e-3"], ["training.learning_rate", "called lr"]),
    (["--deepspeed", "x.json"], ["--deepspeed: no such option", "Not offered"]),
    (
        ["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=minimize", "lr=1,2"],
        ["called checkpoint.mode"],
    ),
    (
        ["-m", "hydra/sweeper=optuna", "hydra.sweeper.study_name=x", "lr=1,2"],
        ["Not offered", "hydra.sweep.dir"],
    ),
    (
        ["-m", "hydra.sweeper.n_trials=3", "lr=1,2"],
        ["hydra.sweeper.n_trials", "belongs to hydra/sweeper=optuna"],
    ),
    (["trainer.max_epochs=3"], ["trainer.max_epochs", "called training.num_train_epochs"]),
    (["--eps", "1"], ["written clip.eps=1 or optimizer.eps=1"]),
    (["--training.max_steps", "1"], ["written training.max_steps=1"]),
    (["optimizer.decay_rate=0.9"], ["optimizer.decay_rate", "param_groups.decay_rate"]),
    (["lr", "1e-3"], ["lr=1e-3"]),
    (["resume", "latest"], ["resume=latest"]),
    (["optimizer", "lamb"], ["optimizer=lamb"]),
    (["lr", "=", "1e-3"], ["lr=1e-3"]),
    (["lr", "=1e-3"], ["lr=1e-3"]),
    (["seed=1", "lr=", "1e-3"], ["lr=1e-3"]),
    (["+lr", "=", "1e-3"], ["+lr=1e-3"]),
]
"""Words of a line, and what its refusal says."""

ADVISED = {
    "optimizer.betas=0.9,0.99": "optimizer.betas=[0.9,0.99]",
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
    "tracking=false": "tracking=none",
    "checkpoint=false": "checkpoint=none",
    "clip=1.0": "clip=global_norm clip.max_norm=1.0",
    "clip=0": "clip=none",
    "distributed=true": "distributed=ddp",
    "distributed=deepspeed": "distributed=fsdp",
    "param_groups=none": "param_groups=single",
    "scheduler=cosine_with_restarts": "scheduler=cosine scheduler.num_cycles=3",
    "optimizer=torch.optim.AdamW": "optimizer=adamw",
    "data=mine": "data=files data.train=mine",
    "LR=1e-3": "lr=1e-3",
    "optimizer=Lamb": "optimizer=lamb",
    "optimizer=lamb.yaml": "optimizer=lamb",
    "optimiser=lamb": "optimizer=lamb",
}
"""A line, and the words that its refusal advises."""

_NEAREST = {
    "LR=1e-3": "Did you mean lr?",
    "optimizer=Lamb": "Did you mean lamb?",
    "optimizer=lamb.yaml": "Did you mean lamb?",
    "optimiser=lamb": "Did you mean optimizer?",
}
"""Lines of which the name alone is advised, since the rest is right."""

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
"""What cannot be read, or is not there."""

REFUSED_IN_SWEEPS = [
    "lr=range(1e-4,1e-3)",
    "lr=glob(*)",
    "optimizer=glob(zz*)",
    "hydra/launcher=glob(*)",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\n")
    return tmp_path


def check(*words: str) -> None:
    """Check a line of `optrun` without a verb as far as its configuration."""
    options = hydra_options.parse(hydra_options.parser(), list(words))
    line = CommandLine.of(words, options.overrides, options.config_name, options.config_dir)
    hydra = store.open_hydra(line.config_dir)
    if options.multirun:
        overrides.parse_checked(hydra, line.config_name, line.overrides, sweep=True)
    else:
        compose_request(hydra, line)


def refusal(*words: str) -> str:
    """Return what refuses a line, without a word of the grammar; empty if nothing does."""
    message = ""
    try:
        check(*words)
    except ConfigError as error:
        message = str(error)
    assert not [word for word in GRAMMAR if word in message], message
    return message


def test_a_key_of_other_choices_names_three_of_them_and_the_keys_here() -> None:
    message = refusal("optimizer.betas=[0.9,0.99]", "optimizer=sgd")
    owners, separator, keys_here = message.partition(" more. ")
    assert owners.startswith("optimizer.betas: no such key. It belongs to optimizer=")
    assert owners.count("optimizer=") == 3
    assert separator
    assert keys_here.startswith("optimizer=sgd has: default_lr, weight_decay, momentum")


def test_what_is_said_of_each_line() -> None:
    messages = [(words, facts, refusal(*words)) for words, facts in FACTS]
    assert [
        (words, message)
        for words, facts, message in messages
        if not message or [fact for fact in facts if fact not in message]
    ] == []


def test_advised_lines_work() -> None:
    for line, advice in ADVISED.items():
        of_group = advice.partition("=")[0] in GROUPS
        expected = _NEAREST.get(line, advice if of_group else shlex.quote(advice))
        assert expected in refusal(line), line
        check(*(advice.split() if of_group else [advice]))


def test_what_cannot_be_read_is_refused() -> None:
    for line in REFUSED:
        message = refusal(line)
        assert message, line
        advice = re.search(r"Did you mean ('.*?'|\S+)\?", message)
        if advice is not None and "=" in advice[1]:
            check(*shlex.split(advice[1]))
    for line in REFUSED_IN_SWEEPS:
        assert line in refusal("-m", line)


def test_blanks_behind_the_commas_of_a_sweep() -> None:
    values = overrides.values_of(overrides.parse(["lr=1e-3, 2e-3"])[0])
    assert values == ["0.001", "0.002"]
