"""Every trainable parameter in exactly one group, decayed by what it is, scaled by where it
lies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.param_groups import SCHEMAS
from optrun.optimizer import AdamW, Lamb, LazyAdam
from optrun.param_groups import build_param_groups
from optrun.scheduler import build_scheduler
from tests.group_models import Tiny, bert, by_name

# -- standard and single
# ----------------------------------------------------------------------------------------------


def test_standard_decays_matrices_and_embeddings_alone() -> None:
    decay = by_name(
        build_param_groups(Tiny(1), "standard", lr=1.0, weight_decay=0.1), "weight_decay"
    )
    assert {name for name, value in decay.items() if value == 0.1} == {
        "embed.weight",
        "blocks.0.attention.weight",
        "blocks.0.up.weight",
        "blocks.0.down.weight",
        "classifier.weight",
    }
    assert set(decay.values()) == {0.0, 0.1}
    kept = by_name(
        build_param_groups(Tiny(1), "standard", weight_decay=0.1, decay_embeddings=False),
        "weight_decay",
    )
    assert {name for name in decay if decay[name] != kept[name]} == {"embed.weight"}


def test_groups_say_what_they_are() -> None:
    groups = build_param_groups(Tiny(1), lr=0.5, weight_decay=0.1)
    assert [group["role"] for group in groups] == [
        "vector",
        "embedding",
        "matrix",
        "bias",
        "norm",
        "head",
    ]
    for group in groups:
        assert (group["lr"], group["lr_scale"], group["layer_id"], group["layer"]) == (
            0.5,
            1.0,
            None,
            "all",
        )
        assert group["rule"] == "standard"
    assert "lr" not in build_param_groups(Tiny(1))[0]
    assert "weight_decay" not in build_param_groups(Tiny(1), "single")[0]


def test_single_decays_everything() -> None:
    groups = build_param_groups(Tiny(1), "single", lr=1.0, weight_decay=0.1)
    assert {group["weight_decay"] for group in groups} == {0.1}


class OddNorm(nn.Module):
    """A norm of the user's own, two-dimensional and under another name, as some models have
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 4))


class ScaleNorm(OddNorm):
    pass


class NormedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class PatchEmbeddings(nn.Module):
    """An embedding layer by its class alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("module", "leaf", "role"),
    [
        (ScaleNorm(), "gain", "norm"),
        (nn.LayerNorm((2, 4)), "weight", "norm"),
        (nn.RMSNorm(4), "weight", "norm"),
        (nn.BatchNorm2d(4), "weight", "norm"),
        (nn.GroupNorm(2, 4), "bias", "bias"),
        (NormedLinear(), "weight", "matrix"),
        (nn.Linear(4, 1), "weight", "matrix"),
        (nn.Conv1d(4, 4, 3, groups=4), "weight", "matrix"),
        (nn.Embedding(1, 4), "weight", "embedding"),
        (nn.PReLU(), "weight", "vector"),
        (PatchEmbeddings(), "kernel", "embedding"),
        (nn.MultiheadAttention(4, 2), "in_proj_bias", "bias"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", "matrix"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_roles_by_module_type(module: nn.Module, leaf: str, role: str) -> None:
    holder = nn.ModuleDict({"ln_1": module})
    assert by_name(build_param_groups(holder), "role")[f"ln_1.{leaf}"] == role


def test_weight_norm_lengths_and_disguised_vectors_do_not_decay() -> None:
    model = nn.Module()
    model.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
    model.layer_scale = nn.Parameter(torch.ones(1, 1, 8))
    model.pos_embed = nn.Parameter(torch.ones(1, 5, 8))
    roles = by_name(build_param_groups(model), "role")
    assert roles["conv.parametrizations.weight.original0"] == "norm"
    assert roles["conv.parametrizations.weight.original1"] == "matrix"
    assert roles["layer_scale"] == "vector"
    assert roles["pos_embed"] == "embedding"


def test_tied_tensors_count_once_and_frozen_ones_not_at_all() -> None:
    model = Tiny(1, tied=True)
    model.final.requires_grad_(False)
    claimed = by_name(build_param_groups(model), "role")
    assert claimed["embed.weight"] == "embedding"
    assert "classifier.weight" not in claimed
    assert not {"final.weight", "final.bias"} & set(claimed)
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter trains"):
        build_param_groups(model)


def test_a_head_with_one_output_is_a_matrix_by_its_name() -> None:
    """Where only names and shapes are known.

    A regression head decays, a disguised vector does not.
    """
    groups = build_param_groups(
        [
            ("score.weight", nn.Parameter(torch.ones(1, 8))),
            ("scale", nn.Parameter(torch.ones(1, 8))),
        ]
    )
    assert by_name(groups, "role") == {"score.weight": "matrix", "scale": "vector"}


def test_names_and_shapes_are_enough() -> None:
    model = Tiny(2)
    from_names = build_param_groups(model.named_parameters(), "layerwise", lr=1.0, decay_rate=0.5)
    from_model = build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.5)
    assert by_name(from_names, "lr") == by_name(from_model, "lr")
    with pytest.raises(
        TypeError, match=r"expected a model or \(name, parameter\) pairs, got Parameter"
    ):
        build_param_groups(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two parameters are called x"):
        build_param_groups([("x", torch.ones(1)), ("x", torch.ones(1))])


# -- rules
# --------------------------------------------------------------------------------------------------


def test_a_tensor_under_two_names_is_claimed_once_by_its_first() -> None:
    shared, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    groups = build_param_groups([("table", shared), ("bias", other), ("head", shared)], "single")
    assert [name for group in groups for name, _ in group["params"]] == ["table", "bias"]
    with pytest.raises(ConfigError, match="head is the same tensor as table"):
        build_param_groups(
            [("table", shared), ("head", shared)], "single", rules=[{"pattern": "head", "lr": 0.1}]
        )


def test_rules_override_in_order() -> None:
    rules = [
        {"pattern": r"classifier\.bias", "lr": 0.25},
        {"pattern": "classifier", "lr_scale": 10, "weight_decay": 0.0, "betas": [0.5, 0.6]},
        {"pattern": "layer.0", "freeze": True},
        {"pattern": "pooler", "adaptation": False},
        {"pattern": "layer.1", "adaptation": True, "centralization": True, "optimizer": "adamw"},
    ]
    model = bert()
    groups = build_param_groups(
        model, "layerwise", lr=0.5, weight_decay=0.1, decay_rate=0.5, rules=rules
    )
    of = {name: group for group in groups for name, _ in group["params"]}
    head = of["classifier.weight"]
    assert (head["lr"], head["lr_scale"], head["weight_decay"], head["betas"]) == (
        5.0,
        10.0,
        0.0,
        (0.5, 0.6),
    )
    assert head["rule"] == "rules[1] classifier"
    absolute = of["classifier.bias"]
    assert absolute["lr"] == 0.25
    assert "lr_scale" not in absolute
    assert not any(name.startswith("bert.encoder.layer.0.") for name in of)
    assert not model.get_parameter("bert.encoder.layer.0.output.dense.bias").requires_grad
    assert of["bert.pooler.dense.weight"]["exclude_from_layer_adaptation"] == (".*",)
    second = of["bert.encoder.layer.1.output.dense.weight"]
    assert (second["always_adapt"], second["exclude_from_layer_adaptation"]) == (True, None)
    assert (second["grad_centralization"], second["optimizer"]) == (True, "adamw")
    assert second["lr_scale"] == 0.25  # the layer's own, where the rule says nothing of it


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [{"pattern": "clasifier", "lr_scale": 2}],
            r"rules\[0\].pattern=clasifier: matches no parameter. Did you mean",
        ),
        (
            [{"pattern": "b", "lr_scale": 2}, {"pattern": "bert", "lr": 1}],
            r"rules\[1\].*taken by earlier rules",
        ),
        (
            [{"pattern": "bert", "lr_scal": 2}],
            r"rules\[0\].lr_scal: no such override. Did you mean lr_scale",
        ),
        (
            [{"patern": "bert", "lr_scale": 2}],
            r"rules\[0\]: has no `pattern`. Write `pattern` in place of `patern`",
        ),
        ([{"pattern": "bert"}], "at least one override"),
        ([{"pattern": "bert", "schedule": "constant"}], "one schedule drives all groups"),
        ([{"pattern": "(", "lr": 1}], "not a regular expression"),
        ([{"pattern": "bert", "lr": 1, "lr_scale": 2}], "either lr or lr_scale"),
        ([{"pattern": "bert", "lr_scale": -2}], r"lr_scale=-2: expected a number of 0 or more"),
        ([{"pattern": "bert", "freeze": True, "lr": 1}], "freeze alone"),
        (
            [{"pattern": "bert", "freeze": False}],
            "expected true. To train them, leave the rule out",
        ),
        ([{"pattern": "bert", "adaptation": "no"}], "expected true or false"),
        (["bert"], "expected a mapping with `pattern`"),
    ],
)
def test_rule_refusals(rules: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_param_groups(bert(), "standard", rules=rules)


def test_a_rule_for_a_tied_or_frozen_name_says_so() -> None:
    model = Tiny(1, tied=True)
    rule = [{"pattern": r"classifier\.weight", "lr_scale": 2}]
    with pytest.raises(
        ConfigError, match=r"classifier.weight is the same tensor as embed.weight; match it by that"
    ):
        build_param_groups(model, "standard", rules=rule)
    model.final.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"matches only parameters that do not train, such as final.weight"
    ):
        build_param_groups(model, "standard", rules=[{"pattern": "^final", "lr_scale": 2}])


# -- with optimizers and schedulers
# -----------------------------------------------------------------------------------


def test_the_scale_survives_a_scheduler_and_names_stay() -> None:
    model = Tiny(2)
    groups = build_param_groups(model, "layerwise", lr=1.0, weight_decay=0.1, decay_rate=0.5)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scheduler = build_scheduler(optimizer, "cosine", num_training_steps=10, num_warmup_steps=3)
    for _ in range(9):
        scheduler.step()
        top = next(group["lr"] for group in optimizer.param_groups if group["layer"] == "head")
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(top * group["lr_scale"], rel=1e-14)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_our_optimizers_take_what_rules_say() -> None:
    model = Tiny(1)
    rules = [
        {"pattern": "classifier", "adaptation": False},
        {"pattern": "^final", "adaptation": True},
        {"pattern": "embed", "betas": [0.8, 0.9], "eps": 1e-3},
    ]
    groups = build_param_groups(model, "standard", lr=1e-2, weight_decay=0.1, rules=rules)
    optimizer = Lamb(groups, lr=1e-2)
    by_name = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    adapted = {name: optimizer.adapted(name, group) for name, group in by_name.items()}
    assert adapted["blocks.0.up.weight"]
    assert adapted["final.weight"]  # not decayed, and adapted all the same
    assert not adapted["classifier.weight"]  # decayed, and not adapted
    assert by_name["embed.weight"]["eps"] == 1e-3
    centred = build_param_groups(
        model, "standard", lr=1e-2, rules=[{"pattern": "blocks", "centralization": True}]
    )
    assert any(group["grad_centralization"] for group in LazyAdam(centred, lr=1e-2).param_groups)
    with pytest.raises((TypeError, ValueError), match="grad_centralization"):
        AdamW(centred, lr=1e-2)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_parameter_is_claimed_once_whatever_the_model(data: st.DataObject) -> None:
    model = Tiny(
        data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), tied=data.draw(st.booleans())
    )
    names = [name for name, _ in model.named_parameters()]
    frozen = data.draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    training = [name for name in names if name not in frozen]
    chosen = data.draw(st.lists(st.sampled_from(training), max_size=4, unique=True))
    rules = [
        {"pattern": f"^{name}$".replace(".", r"\."), "lr_scale": scale}
        for name, scale in zip(
            chosen, data.draw(st.lists(st.floats(0, 9), min_size=4, max_size=4)), strict=False
        )
    ]
    kind = data.draw(st.sampled_from(sorted(SCHEMAS)))
    groups = build_param_groups(model, kind, lr=1.0, weight_decay=0.1, rules=rules)
    claimed = [(name, param) for group in groups for name, param in group["params"]]
    assert sorted(name for name, _ in claimed) == sorted(training)
    assert len({id(param) for _, param in claimed}) == len(claimed)
    scales = by_name(groups, "lr_scale")
    assert all(
        scales[rule["pattern"][1:-1].replace("\\", "")] == rule["lr_scale"] for rule in rules
    )
    torch.optim.SGD(groups, lr=1.0)  # torch refuses a parameter in two groups


def test_configurations_are_checked() -> None:
    for options, message in (
        ({"decay_rate": 0.0}, "param_groups.decay_rate=0.0: expected a number above 0"),
        ({"n_layers": 0}, "param_groups.n_layers=0"),
        (
            {"decay_rat": 0.5},
            (
                "param_groups.decay_rat: param_groups=layerwise has no such key. Did you mean"
                " decay_rate"
            ),
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            choice("param_groups", SCHEMAS, "layerwise", options)
    with pytest.raises(
        ConfigError, match=r"param_groups=layered: no such choice. Did you mean layerwise"
    ):
        build_param_groups(Tiny(1), "layered")


def test_matrices_above_the_blocks_are_heads() -> None:
    roles = by_name(build_param_groups(bert(), "standard"), "role")
    assert {name for name, role in roles.items() if role == "head"} == {
        "bert.pooler.dense.weight",
        "classifier.weight",
    }
    assert roles["bert.encoder.layer.2.output.dense.weight"] == "matrix"


def test_a_rule_names_an_optimizer_that_exists() -> None:
    with pytest.raises(ConfigError, match=r"rules\[0\].optimizer=lam: .*Did you mean lamb"):
        build_param_groups(bert(), "standard", rules=[{"pattern": "bert", "optimizer": "lam"}])


def test_arguments_of_another_kind_are_named() -> None:
    for wrong in (None, 3):
        with pytest.raises(TypeError, match=r"expected a model or \(name, parameter\) pairs, got"):
            build_param_groups(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lr='a': expected a number or None, got str"):
        build_param_groups(Tiny(1), lr="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight_decay=True: expected a number or None, got bool"):
        build_param_groups(Tiny(1), weight_decay=True)
