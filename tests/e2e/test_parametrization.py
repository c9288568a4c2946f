"""What a user does with parametrization=mup: explain, train, stop, go on, branch, certify.

And what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from optrun import compose
from optrun.explain.build import model_spec
from optrun.model.build import build_model
from optrun.param_groups.parametrization import parametrize
from tests.faults.runs import cut
from tests.running import TINY_GPT, optrun, state, tensors, write_text

UNTIED = "model.config.tie_word_embeddings=false"
BASE = [
    "parametrization=mup",
    "parametrization.base.n_embd=16",
    "parametrization.base.n_head=1",
    UNTIED,
]
DEEP = [*BASE, "parametrization.base.n_layer=1"]


GEMMA = [
    "model=from_config",
    "model.model_type=gemma",
    "parametrization=mup",
    "parametrization.base.hidden_size=16",
]
GEMMA += [
    "parametrization.base.num_attention_heads=1",
    "parametrization.base.num_key_value_heads=1",
]
GEMMA += [
    f"model.config.{size}"
    for size in ("hidden_size=32", "num_attention_heads=2", "num_key_value_heads=2")
]
GEMMA += [
    f"model.config.{size}"
    for size in ("head_dim=16", "intermediate_size=64", "num_hidden_layers=1")
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, 120)
    return tmp_path


def words(steps: int) -> list[str]:
    data = [
        "data=files",
        "data.train=corpus.txt",
        "training.per_device_train_batch_size=4",
        "training.eval_steps=3",
    ]
    own = [
        *TINY_GPT,
        *data,
        *DEEP,
        "optimizer=lamb",
        "scheduler=constant",
        "checkpoint.save_steps=3",
    ]
    return [
        *own,
        "param_groups=layerwise",
        "param_groups.decay_rate=0.5",
        f"training.max_steps={steps}",
    ]


def test_a_run_that_goes_on_is_the_uninterrupted_one(place: Path) -> None:
    assert optrun(*words(6), "hydra.run.dir=whole") == 0
    cut("whole", "part", 3)
    assert optrun("resume=part") == 0
    assert tensors(place / "whole", 6) == tensors(place / "part", 6)
    groups = state(place / "whole", 6)["optimizer"]["groups"]
    scales = {name: group["lr_ratio"] for group in groups for name in group["param_names"]}
    assert scales["transformer.h.0.attn.c_attn.weight"] == pytest.approx(0.25 * 2**-0.5), (
        "two layers below the head"
    )
    assert (
        optrun(
            "branch_from=part/checkpoints/step-00000006",
            "training.max_steps=7",
            "hydra.run.dir=branch",
        )
        == 0
    )
    weights = load_file("whole/model/model.safetensors")
    assert json.loads(Path("whole/model/config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]
    assert "lm_head.weight" in weights, "the exported model is plain transformers"


def test_a_step_of_weights_begins_at_the_base(place: Path) -> None:
    del place
    assert optrun(*words(1), "lr=1e-12", "hydra.run.dir=run") == 0
    weights = load_file("run/model/model.safetensors")
    spread = {name: float(tensor.std()) for name, tensor in weights.items() if tensor.dim() > 1}
    assert spread["transformer.wte.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["transformer.h.0.attn.c_attn.weight"] == pytest.approx(0.02 * 2**-0.5, rel=0.1)
    assert spread["lm_head.weight"] == pytest.approx(0.01, rel=0.05)
    ends = [spread[f"transformer.h.{block}.mlp.c_proj.weight"] for block in (0, 1)]
    assert ends == pytest.approx([0.02 / 2**0.5 / 2**0.5 / 2] * 2, rel=0.1), (
        "GPT-2's 1/sqrt(2 L), of the base"
    )


def test_groups_carry_factors(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del place
    assert optrun("explain", *TINY_GPT, *DEEP, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    by_name = {tensor["name"]: tensor for tensor in facts["tensors"]}
    matrix, end = (by_name[f"transformer.h.1.mlp.{name}.weight"] for name in ("c_fc", "c_proj"))
    assert (matrix["lr_scale"], end["lr_scale"]) == (0.5, 0.25), (
        "1/m, and half of it for twice the depth"
    )
    assert by_name["lm_head.weight"]["lr_scale"] == 0.5
    assert by_name["transformer.wte.weight"]["lr_scale"] == 1
    assert "hidden matrix (in x2, out x2, depth x2, ends a branch), adam" in end["rule"]
    assert any("parametrization=mup: 1 x output matrix (in x2)" in note for note in facts["notes"])


def test_the_norm_before_a_tied_head_carries_the_factor(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del place
    tied = [word for word in words(1) if word != UNTIED]
    assert optrun("explain", *tied, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    by_name = {tensor["name"]: tensor for tensor in facts["tensors"]}
    assert (
        by_name["transformer.ln_f.weight"]["lr_scale"]
        == by_name["transformer.ln_f.bias"]["lr_scale"]
        == 0.5
    )
    assert (
        "carries logits x0.5), lamb: init x0.5, lr x0.5"
        in by_name["transformer.ln_f.weight"]["rule"]
    )
    assert optrun(*tied, "lr=1e-12", "hydra.run.dir=run") == 0
    weights = load_file("run/model/model.safetensors")
    assert float(weights["transformer.ln_f.weight"].mean()) == pytest.approx(0.5)
    assert "lm_head.weight" not in weights


def test_architectures_with_keys_of_their_own_scale_by_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [
        "hidden_size=32",
        "num_attention_heads=2",
        "num_key_value_heads=2",
        "intermediate_size=64",
    ]
    own = [f"model.config.{size}" for size in [*sizes, "num_hidden_layers=2", "logits_scaling=3.0"]]
    base = [f"parametrization.base.{size}" for size in ("hidden_size=16", "intermediate_size=32")]
    granite = [
        "model=from_config",
        "model.model_type=granite",
        "model.vocab_size=320",
        *own,
        "parametrization=mup",
        *base,
    ]
    config = compose([*granite, "model.config.tie_word_embeddings=true", "data.max_length=16"])
    spec = model_spec(config, [])
    found = parametrize(config, lambda model: build_model(model, spec, meta=True)[0])
    assert found.model.config["logits_scaling"] == 6, "tied: the logits are divided by the width"
    assert found.model.config["attention_multiplier"] == 0.5, (
        "heads twice as wide, scores by 1/head_dim"
    )


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["parametrization=mup", UNTIED], ["parametrization.base={}", "parametrization=standard"]),
        (
            ["parametrization=mup", UNTIED, "parametrization.base.n_embd=32"],
            ["n_embd: 32", "as large as the model"],
        ),
        ([*BASE, "parametrization.base.n_layers=1"], ["parametrization.base.n_layers", "n_layer"]),
        (["parametrization=mup", UNTIED, "parametrization.base.n_embd=64"], ["shrinks"]),
        (
            ["parametrization=mup", UNTIED, "parametrization.base.n_embd=16"],
            ["16", "8", "number of heads"],
        ),
        (
            ["parametrization=mup", UNTIED, "parametrization.base.n_embd=15"],
            ["parametrization.base", "15"],
        ),
        ([*BASE, "optimizer=soap"], ["optimizer=soap", "adamw"]),
        ([*BASE, "adapter=lora"], ["rslora", "parametrization=standard"]),
        (
            ["parametrization.base.n_embd=16"],
            ["parametrization.base", "belongs to parametrization=mup"],
        ),
        (
            ["parametrization.base.hidden_size=16"],
            ["parametrization.base", "belongs to parametrization=mup"],
        ),
        ([*BASE, "parametrization.weight_decay=off"], ["independent"]),
    ],
)
def test_refusals(
    place: Path, given: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    del place
    assert optrun("explain", *TINY_GPT, *given) == 2
    message = capsys.readouterr().err
    for fact in facts:
        assert fact in message


def test_a_tied_head_without_a_norm_that_scales(capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("explain", *GEMMA, "parametrization.base.intermediate_size=32") == 2
    message = capsys.readouterr().err
    for fact in (
        "model.embed_tokens.weight",
        "model.norm is not linear in its parameters",
        "tie_word_embeddings=false",
    ):
        assert fact in message


def test_certified(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = [word for word in TINY_GPT if "n_head" not in word]
    own = ["data=files", "data.train=corpus.txt", *tiny, "model.config.n_head=1", "widths=1,2,4"]
    assert (
        optrun("certify", "transfer", *own, "parametrization=mup", "seeds=0", "--out", "mup.json")
        == 0
    ), "with a tied head"
    checked = {
        line["parameter"]: line["expected"]
        for line in json.loads(Path("mup.json").read_text())["checks"][0]["lines"]
    }
    assert (checked["transformer.ln_f.bias"], checked["lm_head.weight"]) == (-1, 0)
    assert "certified: nothing grows" in capsys.readouterr().out
    assert optrun("certify", "transfer", *own, UNTIED, "--out", "standard.json", "seeds=3") == 1, (
        "the standard one"
    )
    facts = json.loads(Path("standard.json").read_text())
    assert not facts["holds"]
    assert any("lm_head.weight: the initial output" in failure for failure in facts["failures"])
    assert any("c_fc.weight: what its update does" in failure for failure in facts["failures"])
    assert "not certified: " in capsys.readouterr().out


CHECKED = ["data=files", "data.train=corpus.txt", "model.vocab_size=320", "data.max_length=16"]
CHECKED += ["model.config.n_layer=1", "model.config.n_head=1", "widths=1,2,4", "seeds=0"]


def checks_of(file: str) -> list[dict[str, object]]:
    checks: list[dict[str, object]] = json.loads(Path(file).read_text())["checks"]
    return checks


def test_dropout_is_off_in_a_coordinate_check(place: Path) -> None:
    del place
    off = [f"model.config.{name}_pdrop=0" for name in ("resid", "embd", "attn")]
    on = [f"model.config.{name}_pdrop=0.3" for name in ("resid", "embd", "attn")]
    tiny = [*CHECKED, "model.config.n_embd=32", "parametrization=mup"]
    for name, dropout in (("off", off), ("on", on), ("again", on)):
        optrun("certify", "transfer", *tiny, *dropout, "--out", f"{name}.json")
    assert checks_of("on.json") == checks_of("off.json")
    assert checks_of("again.json") == checks_of("on.json")


def test_a_narrow_base_is_told_apart_from_a_wrong_factor(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del place
    advice = "a base four times as wide"
    narrow = [*CHECKED, "model.config.n_embd=8", "parametrization=mup"]
    assert optrun("certify", "transfer", *narrow) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert advice in said
    assert "±" not in said, "one seed has no noise to tell"
    assert optrun("certify", "transfer", *CHECKED, "model.config.n_embd=32", UNTIED) == 1
    assert advice not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["widths=4,2"], ["widths=4,2", "rising"]),
        (["widths=1"], ["three or more"]),
        (["seeds=a"], ["seeds=a"]),
        (["dialect=timm"], ["certify optimizer"]),
        (["--kills", "3"], ["--kills"]),
        (["model=pretrained", "model.path=gpt2"], ["from scratch"]),
        (["branch_from=run"], ["branch_from=run", "begin at step 0"]),
        (["scheduler.warmup_ratio=0.1", "widths=1,2,3", "lr=-1"], ["lr=-1"]),
    ],
)
def test_certify_refuses(
    given: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun("certify", "transfer", *given) == 2
    message = capsys.readouterr().err
    for fact in facts:
        assert fact in message
