"""From configurations and groups to optimizers.

Every choice, Muon's halves, rules, and the extra library.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml

import optrun.optimizer
from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.dialects import DIALECTS, own_default
from optrun.config.registry import Choice
from optrun.config.schema.optimizer import SCHEMAS, AdamWDLConfig
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.config.schema.ranges import Check, NotNegative, checks
from optrun.optimizer.base import NamedOptimizer, Params
from optrun.optimizer.build import build_optimizer, choice_of
from optrun.optimizer.classes import LIBRARY_CHOICE, class_of
from optrun.optimizer.composite import Composite
from optrun.optimizer.footprint import state_bytes
from optrun.param_groups import build_param_groups

CONF = Path(__file__).parents[3] / "conf" / "optimizer"

OWN_DEFAULTS = {
    "sgd": {"momentum"},
    "lazy_adam": {"exclude_from_weight_decay"},
    "muon": {"adjust_lr_fn"},
}
"""Values that differ from the class's on purpose; the YAML says why."""


def yaml_of(choice: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / f"{choice}.yaml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def values(choice: str) -> dict[str, Any]:
    loaded = yaml_of(choice)
    assert loaded.pop("defaults") == [f"{choice}_schema", "_self_"]
    return {key: own_default(value) for key, value in loaded.items()}


def config(choice: str, **overrides: Any) -> OptimizerConfig:
    """As Hydra hands it over, words as Enums."""
    schema = SCHEMAS[choice]
    given = {**values(choice), **overrides}
    for field in dataclasses.fields(schema):
        if isinstance(field.type, type) and issubclass(field.type, Enum):
            given[field.name] = field.type(given[field.name])
    return schema(**given)


def groups() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(64, 16),
            "hidden": torch.nn.Linear(16, 32),
            "out": torch.nn.Linear(32, 64),
        }
    )
    role = {"embed.weight": "embedding", "hidden.bias": "bias", "out.bias": "bias"}
    return [
        {
            "params": [(name, p)],
            "role": role.get(name, "matrix"),
            "lr_scale": 1.0,
            "lr": 0.1,
            "weight_decay": 0.0,
        }
        for name, p in model.named_parameters()
    ]


def test_every_choice_has_a_file_and_every_file_a_choice() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(SCHEMAS)


@pytest.mark.parametrize("choice", sorted(SCHEMAS))
def test_the_file_says_the_values_of_the_schema(choice: str) -> None:
    """The dataclass is the truth.

    What some dialect has otherwise is marked in the file, and nothing else is.
    """
    truth = Choice("optimizer", choice, SCHEMAS[choice], "").values()
    truth = {key: value.value if isinstance(value, Enum) else value for key, value in truth.items()}
    truth = {
        key: list(value) if isinstance(value, tuple) else value for key, value in truth.items()
    }
    required = {"class_name": "???"} if choice == LIBRARY_CHOICE else {}
    assert values(choice) == truth | required
    marked = {key for key, value in yaml_of(choice).items() if str(value).startswith("${dialect:")}
    assert marked == {key for preset in DIALECTS.get(choice, {}).values() for key in preset}


@pytest.mark.parametrize("choice", sorted(set(SCHEMAS) - {LIBRARY_CHOICE}))
def test_values_are_the_defaults_of_what_they_build(choice: str) -> None:
    loaded = values(choice)
    assert set(loaded) == {field.name for field in dataclasses.fields(SCHEMAS[choice])}
    assert loaded["name"] == choice
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(class_of(choice)).parameters.items()
    }
    if choice == "muon":  # the companion's
        defaults |= {"betas": (0.9, 0.999), "eps": 1e-8, "companion_lr_scale": 1.0}
    for key in loaded.keys() - {"name", "default_lr", "dialect"} - OWN_DEFAULTS.get(choice, set()):
        default = list(defaults[key]) if isinstance(defaults[key], tuple) else defaults[key]
        assert loaded[key] == default, key


@pytest.mark.parametrize("choice", sorted(set(SCHEMAS) - {LIBRARY_CHOICE}))
def test_words_of_a_schema_are_the_literals_of_the_constructor(choice: str) -> None:
    constructor: Any = class_of(choice).__init__
    hints = get_type_hints(constructor)
    for key, check in checks(SCHEMAS[choice]).items():
        if key not in hints or (choice, key) == ("muon", "eps"):
            continue
        words = [word for hint in _options(hints[key]) for word in _literals(hint)]
        for word in words:
            assert check(key, word) == word
        if words:
            assert repr(words)[1:-1] in _refusal(check, key)


def _options(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (UnionType, Union) else [hint]


def _literals(hint: Any) -> list[str]:
    return list(get_args(hint)) if get_origin(hint) is Literal else []


def _refusal(check: Check, key: str) -> str:
    with pytest.raises(ValueError, match=key) as refused:
        check(key, "no such word")
    return str(refused.value)


PUBLIC = [getattr(optrun.optimizer, name) for name in optrun.optimizer.__all__]
PUBLIC = [cls for cls in PUBLIC if isinstance(cls, type)]


@pytest.mark.slow
def test_mypy_reveals_the_signature_of_every_public_optimizer(tmp_path: Path) -> None:
    program = tmp_path / "theirs.py"
    names = [cls.__name__ for cls in PUBLIC]
    lines = [f"from optrun.optimizer import {', '.join(names)}"]
    lines += [f"reveal_type({name})" for name in names]
    lines += [f"{name}([], bettas=(0.9, 0.99))" for name in names]
    program.write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", str(program)]
    done = subprocess.run(command, cwd=CONF.parents[1], capture_output=True, text=True, check=False)
    ours = [line for line in done.stdout.splitlines() if "theirs.py" in line]
    notes = [line for line in ours if "Revealed type" in line]
    errors = [line for line in ours if 'Unexpected keyword argument "bettas"' in line]
    assert len(notes) == len(errors) == len(PUBLIC), done.stdout
    for cls, note in zip(PUBLIC, notes, strict=True):
        for keyword in inspect.signature(cls).parameters:
            assert f"{keyword}: " in note
            assert keyword == "params" or f"{keyword}: Any" not in note


@pytest.mark.parametrize("choice", sorted(set(SCHEMAS) - {LIBRARY_CHOICE}))
def test_every_choice_builds(choice: str) -> None:
    built = config(choice)
    assert choice_of(built) == choice
    optimizer = build_optimizer(built, groups(), lr=0.1)
    assert isinstance(optimizer, class_of(choice) if choice != "muon" else Composite)
    assert [group["role"] for group in optimizer.param_groups] == [
        group["role"] for group in groups()
    ]


@pytest.mark.parametrize(
    ("choice", "overrides", "message"),
    [
        (
            "adamw",
            {"betas": [0.9]},
            r"optimizer.betas=\[0.9\]: expected two numbers, each in \[0, 1\)",
        ),
        ("lamb", {"eps": -1.0}, r"optimizer.eps=-1.0: expected a number of 0 or more"),
        ("lamb", {"default_lr": 0.0}, r"optimizer.default_lr=0.0: expected a number above 0"),
        ("adamw", {"weight_decay": -1.0}, r"optimizer.weight_decay=-1.0"),
        ("adamax", {"weight_decay": -1.0}, r"optimizer.weight_decay=-1.0"),
        (
            "adamwdl",
            {"decay_form": "twice"},
            r"optimizer.decay_form=twice: expected one of documented, p",
        ),
        (
            "adamwdl",
            {"name_dict": "encoder"},
            r"optimizer.name_dict='encoder': expected a mapping from parameter names",
        ),
        (
            "adamwdl",
            {"name_dict": {}},
            r"optimizer.name_dict=\{\}: expected a mapping from parameter names",
        ),
        (
            "adamwdl",
            {"name_dict": {"fc": 3}},
            r"optimizer.name_dict\[fc\]=3: expected a name with encoder.layers",
        ),
        ("lazy_adam", {"loss_scale": 0.0}, r"optimizer.loss_scale=0.0"),
        (
            "sgd",
            {"nesterov": True, "momentum": 0.0},
            r"optimizer.nesterov=true: expected a momentum above 0",
        ),
        ("adafactor", {"beta2_decay": 0.1}, r"optimizer.beta2_decay=0.1"),
        ("adafactor", {"eps": [1e-3]}, r"optimizer.eps=\[0.001\]: expected two numbers"),
        ("muon", {"ns_steps": 100}, r"optimizer.ns_steps=100: expected a whole number, 1 to 99"),
    ],
)
def test_values_out_of_range_are_refused_by_key(
    choice: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(choice, **overrides)


def test_name_dict_from_the_command_line() -> None:
    hydra = store.open_hydra()
    name_dict = {
        group["params"][0][0]: f"encoder.layers.{i}.{i}" for i, group in enumerate(groups())
    }
    given = ", ".join(f"{name}: {place}" for name, place in name_dict.items())
    words = [
        "optimizer=adamwdl",
        "optimizer.layerwise_decay=0.5",
        f"optimizer.name_dict={{{given}}}",
    ]
    typed = store.typed(store.without_hydra(store.compose(hydra, "config", words))).optimizer
    assert isinstance(typed, AdamWDLConfig)
    assert typed.name_dict == name_dict
    typed.n_layers = len(name_dict)
    optimizer = build_optimizer(typed, groups(), lr=0.1)
    assert list(optimizer.lr_ratios.values()) == [0.5**5, 0.5**4, 0.5**3, 0.5**2, 0.5]  # type: ignore[attr-defined]


def test_names_that_do_not_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer=lam: there is no such optimizer. Did you mean lamb"
    ):
        build_optimizer("lam", groups(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"optimizer=addam: there is no such optimizer. Did you mean adam"
    ):
        build_optimizer("lamb", [{**groups()[0], "optimizer": "addam"}], lr=0.1)
    with pytest.raises(ConfigError, match=r"a parameter group of Lamb has no option 'momentum'"):
        build_optimizer("lamb", [{**groups()[0], "momentum": 0.9}], lr=0.1)


def members(optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        out.setdefault(group["optimizer"], []).extend(group["param_names"])
    return out


def test_muon_takes_hidden_matrices_and_no_others() -> None:
    optimizer = build_optimizer(config("muon", companion_lr_scale=0.5), groups(), lr=0.1)
    assert members(optimizer) == {
        "adamw": ["embed.weight", "hidden.bias", "out.bias"],
        "muon": ["hidden.weight", "out.weight"],
    }
    assert {group["optimizer"]: group["lr"] for group in optimizer.param_groups} == {
        "muon": 0.1,
        "adamw": 0.05,
    }


def test_the_companions_scale_leaves_an_absolute_lr_alone() -> None:
    hydra = store.open_hydra()
    words = ["optimizer=muon", "optimizer.companion_lr_scale=0.5", "lr=0.02"]
    rules = "param_groups.rules=[{pattern: bias, lr: 1e-3}, {pattern: '^embed', lr_scale: 0.1}]"
    typed = store.typed(store.without_hydra(store.compose(hydra, "config", [*words, rules])))
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(64, 16), "hidden": torch.nn.Linear(16, 32)}
    )
    optimizer = build_optimizer(
        typed.optimizer, build_param_groups(model, typed.param_groups, lr=0.02), lr=0.02
    )
    lr = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert lr == pytest.approx(
        {"embed.weight": 0.02 * 0.1 * 0.5, "hidden.weight": 0.02, "hidden.bias": 1e-3}
    )


def test_muon_leaves_heads_alone() -> None:
    def pair(name: str, *shape: int) -> tuple[str, torch.nn.Parameter]:
        return name, torch.nn.Parameter(torch.ones(shape))

    given = [
        {"params": [pair("wte", 96, 16), pair("wpe", 16, 16)], "role": "embedding"},
        # A matrix of the vocabulary's shape inside a block is a hidden one: roles say what a head
        # is.
        {"params": [pair("h.0", 16, 16), pair("h.1", 96, 16)], "role": "matrix"},
        {"params": [pair("lm_head", 96, 16), pair("classifier", 16, 32)], "role": "head"},
        {"params": [pair("score", 16, 24)], "role": "matrix", "layer": "head"},
        {"params": [pair("conv", 4, 4, 3)], "role": "matrix"},
        {"params": [pair("unknown", 16, 24), pair("table", 800, 16), pair("few", 2, 16)]},
    ]
    assert members(build_optimizer("muon", given, lr=0.1)) == {
        "adamw": ["wte", "wpe", "lm_head", "classifier", "score", "conv", "table", "few"],
        "muon": ["h.0", "h.1", "unknown"],
    }


def lora_groups(**rule: Any) -> list[dict[str, Any]]:
    """A matrix and its adapter, named as peft names them; and the group's own words."""
    names = {"q_proj.base_layer.weight": (32, 32), "q_proj.lora_A.default.weight": (8, 32)}
    names["q_proj.lora_B.default.weight"] = (32, 8)
    pairs = [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in names.items()]
    return [{"params": pairs[:1]}, {"params": pairs[1:], **rule}]


@pytest.mark.parametrize("role", [None, "lora"])
def test_muon_leaves_the_factors_of_a_lora_to_its_companion(role: str | None) -> None:
    """By name where no role is known: by shape alone, 8 x 32 would pass for a hidden matrix."""
    given = lora_groups(**({} if role is None else {"role": role}))
    factors = ["q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight"]
    assert members(build_optimizer("muon", given, lr=0.1)) == {
        "muon": ["q_proj.base_layer.weight"],
        "adamw": factors,
    }
    asked = [given[0], {**given[1], "optimizer": "muon"}]
    assert members(build_optimizer("muon", asked, lr=0.1)) == {
        "muon": ["q_proj.base_layer.weight", *factors]
    }
    with pytest.raises(
        ConfigError,
        match=r"optimizer=muon: .* factors of a LoRA \(q_proj.lora_A.* nothing to step",
    ):
        build_optimizer("muon", given[1:], lr=0.1)


def test_the_factors_of_a_lora_have_a_role_of_their_own() -> None:
    """So `optrun explain` shows them apart, with the optimizer that steps them.

    They decay as matrices do.
    """

    class Adapted(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32)
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(32, 8, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(8, 32, bias=False)})
            self.lora_embedding_A = torch.nn.ParameterDict({"default": torch.ones(8, 32)})

    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([Adapted(), Adapted()]), "lora_head": Adapted()}
    )
    for source in (model, model.named_parameters()):
        roles = {
            name: group["role"]
            for group in build_param_groups(source, "standard", lr=0.1, weight_decay=0.01)
            for name, _ in group["params"]
            if group["weight_decay"] == 0.01
        }
        assert {name for name, role in roles.items() if role == "lora"} == {
            name for name in roles if ".lora_" in name
        }
        assert roles["layers.0.weight"] == "matrix"


def test_a_rule_may_name_another_optimizer() -> None:
    given = groups()
    given[0]["optimizer"] = "sgd"
    given[0]["momentum"] = 0.9
    optimizer = build_optimizer(config("lamb"), given, lr=0.1)
    assert isinstance(optimizer, Composite)
    assert members(optimizer) == {
        "sgd": ["embed.weight"],
        "lamb": ["hidden.weight", "hidden.bias", "out.weight", "out.bias"],
    }
    for group in given:
        for _, param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    assert set(optimizer.trust_ratios) == {"hidden.weight", "hidden.bias", "out.weight", "out.bias"}
    assert "momentum_buffer" in optimizer.state[given[0]["params"][0][1]]
    assert {group["step"] for group in optimizer.param_groups} == {1}
    bytes_of = state_bytes(optimizer)
    assert bytes_of["embed.weight"] == 64 * 16 * 4
    assert bytes_of["out.bias"] == 64 * 8
    moved = groups()
    moved[1]["optimizer"] = "sgd"
    other = Composite(moved, members={"lamb": {}})
    with pytest.raises(ValueError, match="was stepped by sgd, now by lamb"):
        other.load_state_dict(optimizer.state_dict())
    same = build_optimizer("lamb", [{**group, "optimizer": "lamb"} for group in groups()], lr=0.1)
    assert not isinstance(same, Composite)


def test_a_group_that_comes_later_goes_to_its_member() -> None:
    """To the main optimizer, to a member that is there, and to one that is not there yet."""
    given = groups()
    given[0]["optimizer"] = "sgd"
    optimizer = build_optimizer("lamb", given, lr=0.1)
    late = {name: torch.nn.Parameter(torch.ones(3)) for name in ("main", "known", "new")}
    optimizer.add_param_group({"params": [("main", late["main"])]})
    optimizer.add_param_group({"params": [("known", late["known"])], "optimizer": "sgd", "lr": 0.5})
    optimizer.add_param_group({"params": [("new", late["new"])], "optimizer": "adamw", "lr": 0.25})
    assert members(optimizer)["sgd"] == ["embed.weight", "known"]
    assert members(optimizer)["lamb"][-1] == "main"
    assert members(optimizer)["adamw"] == ["new"]
    there = [param for group in given for _, param in group["params"]]
    before = [param.clone() for param in there]
    for param in (*late.values(), *there):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not any(torch.equal(param, was) for param, was in zip(there, before, strict=True))
    assert late["known"].tolist() == [0.5] * 3
    assert late["new"].tolist() == pytest.approx([(1 - 0.25 * 0.01) - 0.25] * 3)
    assert late["main"].tolist() != [1.0] * 3
    with pytest.raises(ValueError, match="two parameters are called 'known'"):
        optimizer.add_param_group({"params": [("known", torch.nn.Parameter(torch.ones(1)))]})


def test_muon_leaves_what_a_rule_gives_to_another_optimizer() -> None:
    given = groups()
    given[1]["optimizer"] = "sgd"
    assert members(build_optimizer("muon", given, lr=0.1)) == {
        "adamw": ["embed.weight", "hidden.bias", "out.bias"],
        "sgd": ["hidden.weight"],
        "muon": ["out.weight"],
    }


def test_patterns_and_name_dicts_are_held_against_all_groups_of_a_member() -> None:
    """Whichever comes first, and in the order that was given."""
    given = groups()
    given[1]["optimizer"] = "sgd"
    order = [group["params"][0][0] for group in given]
    lamb = build_optimizer(config("lamb", exclude_from_weight_decay=["out"]), given, lr=0.1)
    assert isinstance(lamb, Composite)
    assert [name for group in lamb.param_groups for name in group["param_names"]] == order
    assert [lamb.members[name].decays("out.weight") for name in ("lamb", "sgd")] == [False, True]
    of_members = {
        id(group): name for name, member in lamb.members.items() for group in member.param_groups
    }
    assert of_members == {id(group): group["optimizer"] for group in lamb.param_groups}
    with pytest.raises(ConfigError, match=r"'hidden.weight' matches none of 4 parameter names"):
        build_optimizer(config("lamb", exclude_from_weight_decay=["hidden.weight"]), given, lr=0.1)
    names = {name: f"encoder.layers.0.{name}" for name in order if name != "hidden.weight"}
    wdl = build_optimizer(
        "adamwdl", given, lr=0.1, name_dict=names, layerwise_decay=0.5, n_layers=1
    )
    assert isinstance(wdl, Composite)
    assert wdl.members["adamwdl"].lr_ratios == dict.fromkeys(names, 0.5)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"two parameters are called 'out.bias'"):
        build_optimizer("lamb", [*given, {**groups()[-1], "optimizer": "sgd"}], lr=0.1)


def test_composites_count_a_closure_once() -> None:
    given = groups()
    optimizer = build_optimizer("muon", given, lr=0.1)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = sum(param.square().sum() for group in given for _, param in group["params"])
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    first = optimizer.step(closure)
    assert isinstance(first, torch.Tensor)
    assert calls == [1]
    assert optimizer.step(closure).item() < first.item()


def test_another_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optrun.optimizer.other_libraries.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install"):
        build_optimizer(config("pytorch_optimizer", class_name="lion"), groups(), lr=0.1)


@dataclasses.dataclass(kw_only=True)
class _PlainConfig(OptimizerConfig):
    default_lr: float = 0.5
    weight_decay: float = 0.0
    strength: NotNegative = 2.0
    form: str = "any"


class _Plain(NamedOptimizer):
    OPTIONS = _PlainConfig

    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.5,
        weight_decay: float = 0.0,
        strength: float = 2.0,
        form: str = "any",
    ) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "strength": strength, "form": form}
        super().__init__(params, options)


def test_a_class_of_others_checks_its_options_by_its_schema() -> None:
    params = [("w", torch.nn.Parameter(torch.ones(2)))]
    built = _Plain(params, strength=3)
    assert built.get_config() == {"lr": 0.5, "weight_decay": 0.0, "strength": 3.0, "form": "any"}
    for given, message in (
        ({"strength": -1.0}, r"strength=-1.0: expected a number of 0 or more"),
        ({"strenght": 1.0}, r"_Plain has no option 'strenght'. Did you mean strength"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            _Plain(params, **given)
    with pytest.raises(TypeError, match="positional"):
        _Plain(params, 0.1)  # type: ignore[misc]
    with pytest.raises(
        ConfigError, match=r"optimizer.strength=-1.0: expected a number of 0 or more"
    ):
        _PlainConfig(name="plain", strength=-1.0)
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay=nan: expected a finite number"):
        _PlainConfig(name="plain", weight_decay=float("nan"))
