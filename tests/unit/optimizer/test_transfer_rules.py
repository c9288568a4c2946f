"""Rules of lr, decay and eps by width and depth.

Against mup, and against multipliers in the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.dialects import DIALECTS, dialect_options
from optrun.config.schema.optimizer import SCHEMAS
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.config.schema.parametrization import MupConfig, TransferDecay
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.coordinates import CoordinateCheck, SizedModel, coordinate_check
from optrun.optimizer.transfer import RULES, transfer_groups
from optrun.param_groups import build_param_groups
from optrun.param_groups.growth import Growth, growth_of
from optrun.param_groups.parametrization import scale_initial_weights
from optrun.testing import check_transfer

MUP = MupConfig(name="mup", base={}, weight_decay=TransferDecay.independent)


def config_of(name: str, **options: Any) -> OptimizerConfig:
    config: OptimizerConfig = choice("optimizer", SCHEMAS, name, options)
    return config


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group for group in groups for name, _ in group["params"]}


def carried(
    model: nn.Module, base: nn.Module, name: str, mup: MupConfig = MUP, **options: Any
) -> dict[str, Any]:
    config = config_of(name, **options)
    groups = build_param_groups(model, "single", lr=1.0, weight_decay=config.weight_decay)
    return by_name(transfer_groups(groups, growth_of(model, base), config, mup, lr=1.0))


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.hidden, self.readout = (
            nn.Linear(8, width),
            nn.Linear(width, width),
            nn.Linear(width, 4),
        )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.fc, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wte, self.wpe, self.h = (
            nn.Embedding(50, width),
            nn.Embedding(16, width),
            nn.ModuleList([Block(width)]),
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50, bias=False)


# mup 1.0.0: set_base_shapes of width 64 beside 16, then MuAdam and MuSGD of lr 1 and weight decay
# 1. Of each kind: the group's lr and decay, and what MuReadout multiplies its output with (1
# elsewhere).
ORACLE = {
    "vector": {
        "adam": (1.0, 1.0),
        "sgd": (4.0, 0.25),
        "forward": 1.0,
    },  # inputs, embeddings, biases, norms
    "hidden": {"adam": (0.25, 4.0), "sgd": (1.0, 1.0), "forward": 1.0},
    "readout": {"adam": (1.0, 1.0), "sgd": (4.0, 0.25), "forward": 0.25},
    "constant": {"adam": (1.0, 1.0), "sgd": (1.0, 1.0), "forward": 1.0},  # the bias of the readout
}
KINDS = {
    **dict.fromkeys(
        ["first.weight", "first.bias", "hidden.bias", "wte.weight", "wpe.weight"], "vector"
    ),
    **{f"h.0.{part}.bias": "vector" for part in ("norm1", "qkv", "proj", "norm2", "fc", "out")},
    **dict.fromkeys(["h.0.norm1.weight", "h.0.norm2.weight", "norm.weight", "norm.bias"], "vector"),
    **dict.fromkeys(
        ["hidden.weight", *(f"h.0.{part}.weight" for part in ("qkv", "proj", "fc", "out"))],
        "hidden",
    ),
    "readout.weight": "readout",
    "head.weight": "readout",
    "readout.bias": "constant",
}


@pytest.mark.parametrize("kind", [Perceptron, Decoder])
@pytest.mark.parametrize(("rule", "optimizer"), [("adam", "adamw"), ("sgd", "sgd")])
def test_scales_are_those_of_mup(kind: type[nn.Module], rule: str, optimizer: str) -> None:
    """A multiplier c on the output is a weight c W.

    Adam's lr goes with c, that of SGD with its square.
    """
    torch.manual_seed(0)
    model, base = kind(64), kind(16)
    groups = carried(model, base, optimizer, weight_decay=1.0)
    assert set(groups) <= set(KINDS)
    for name, group in groups.items():
        lr, decay = ORACLE[KINDS[name]][rule]  # type: ignore[misc]
        factor = float(ORACLE[KINDS[name]]["forward"])  # type: ignore[arg-type]
        assert group["lr"] == pytest.approx(lr * factor ** (1 if rule == "adam" else 2)), name
        assert group["lr"] * group["weight_decay"] == pytest.approx(lr * decay), (
            f"{name}: what decays in a step"
        )


@pytest.mark.parametrize("kind", [Perceptron, Decoder])
def test_initial_weights_are_those_of_mup(kind: type[nn.Module]) -> None:
    """There, a hidden matrix keeps torch's 1/sqrt(fan_in).

    Readouts and biases have the base's deviation.
    """
    torch.manual_seed(0)
    model, base = kind(256), kind(64)
    sizes = growth_of(model, base)
    scale_initial_weights(model, base, sizes)
    narrow = base.state_dict()
    for name, param in model.state_dict().items():
        wanted = {"hidden": 0.5, "readout": 0.25}.get(KINDS[name], 1.0)
        assert sizes[name].init == wanted
        if param.numel() > 200 and param.std() > 0:
            assert float(param.std() / narrow[name].std()) == pytest.approx(wanted, rel=0.15), name


def test_lamb_and_muon_by_the_spectral_condition() -> None:
    model, base = Perceptron(64), Perceptron(16)
    lamb = carried(model, base, "lamb", weight_decay=0.1)
    assert lamb["hidden.weight"]["lr"] == 0.5, "a share of a norm of sqrt(width) may be one"
    assert lamb["readout.weight"]["lr"] == lamb["first.weight"]["lr"] == 1
    assert lamb["hidden.weight"]["weight_decay"] == pytest.approx(0.4), (
        "in the ratio it counts by the weight's size"
    )
    plain = carried(model, base, "lamb", weight_decay=0.0)
    assert plain["hidden.weight"]["lr"] == plain["readout.weight"]["lr"] == 0.25, (
        "not adapted, it is Adam's"
    )
    outside = carried(model, base, "lamb", weight_decay=0.1, weight_decay_mode="decoupled")
    assert outside["hidden.weight"]["weight_decay"] == pytest.approx(0.2)
    for adjust, lr in {"original": 1.0, "match_rms_adamw": 0.5}.items():
        assert carried(model, base, "muon", adjust_lr_fn=adjust)["hidden.weight"][
            "lr"
        ] == pytest.approx(lr)
    assert carried(model, base, "muon")["readout.weight"]["lr"] == 0.25, "the companion's"
    wide = RULES["muon"](Growth("w", (64, 16), (16, 16), fan_out=4.0), {"adjust_lr_fn": "original"})
    assert wide == 1, "torch's own factor is sqrt(out / in) where a matrix is tall"


@pytest.mark.parametrize(
    ("mode", "decay"), [("decoupled", 4.0), ("fixed", 1.0), ("scheduled", 1.0), ("corrected", 16.0)]
)
def test_the_decay_of_a_step_stays(mode: str, decay: float) -> None:
    model, base = Perceptron(64), Perceptron(16)
    got = carried(model, base, "adamw", weight_decay=1.0, weight_decay_mode=mode)["hidden.weight"]
    assert got["weight_decay"] == pytest.approx(decay)
    torch_own = MupConfig(name="mup", base={}, weight_decay=TransferDecay.torch)
    assert (
        carried(model, base, "adamw", torch_own, weight_decay=1.0)["hidden.weight"]["weight_decay"]
        == 1.0
    )


def test_scales_multiply_and_eps_follows_the_gradient() -> None:
    model, base = Perceptron(64), Perceptron(16)
    config = config_of("adamw")
    rules = [
        {"pattern": "hidden", "lr_scale": 0.1, "eps": 1e-6},
        {"pattern": "readout.weight", "lr": 0.5},
    ]
    groups = build_param_groups(model, "standard", lr=2.0, weight_decay=0.1, rules=rules)
    notes: list[str] = []
    got = by_name(transfer_groups(groups, growth_of(model, base), config, MUP, lr=2.0, notes=notes))
    assert got["hidden.weight"]["lr_scale"] == pytest.approx(0.025)
    assert got["hidden.weight"]["lr"] == pytest.approx(0.05)
    assert got["hidden.weight"]["eps"] == pytest.approx(0.25e-6)
    assert got["readout.weight"]["lr"] == 0.125, "what a rule says is the base's, too"
    assert "eps" not in got["readout.weight"], "a gradient of the logits does not shrink"
    assert any("hidden matrix (in x4, out x4)" in note and "lr x0.25" in note for note in notes)
    assert "mup: hidden matrix" in got["hidden.weight"]["rule"]


@pytest.mark.parametrize(
    ("name", "options", "facts"),
    [
        ("adafactor", {}, ["optimizer=adafactor", "adamw", "transfer"]),
        ("lamb", {"max_trust": 10.0}, ["optimizer.max_trust=10.0", "null"]),
        ("lamb", {"min_trust": 0.01}, ["optimizer.min_trust=0.01", "min_trust=0"]),
        ("adam", {"weight_decay": 0.1}, ["weight decay", "optimizer=adam", "adamw"]),
        (
            "adamax",
            {"weight_decay": 0.1, "weight_decay_mode": "l2"},
            ["weight decay", "optimizer=adamax"],
        ),
    ],
)
def test_what_no_rule_carries_is_refused(
    name: str, options: dict[str, Any], facts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        carried(Perceptron(64), Perceptron(16), name, **options)
    for fact in ["parametrization=mup", *facts]:
        assert fact in str(refused.value)


def test_a_schema_names_a_rule_that_there_is() -> None:
    assert {schema.transfer for schema in SCHEMAS.values() if schema.transfer is not None} <= set(
        RULES
    )


class Residual(nn.Module):
    """Blocks of two matrices on a stream; `factor` multiplies what each adds."""

    def __init__(self, depth: int, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.factor * block[2](torch.tanh(block[1](block[0](x))))
        return x


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion"])
def test_a_scaled_branch_trains_as_the_multiplied_forward_pass(name: str) -> None:
    """CompleteP writes x + f(x) / L.

    Here the last matrix of f is that much smaller, and the model is plain.
    """
    share, depth, lr = 0.25, 4, 0.05
    options = {"weight_decay": 0.1} | ({"always_adapt": True} if name == "lamb" else {})
    config = config_of(name, **options)
    torch.manual_seed(0)
    multiplied, scaled = Residual(depth, share).double(), Residual(depth).double()
    scaled.load_state_dict(multiplied.state_dict())

    def sizes(model: nn.Module, *, ends: bool) -> Iterator[tuple[str, Growth]]:
        for key, param in model.named_parameters():
            shape = tuple(param.shape)
            yield (
                key,
                Growth(
                    key, shape, shape, branch=share, ends_branch=ends and key.split(".")[2] == "2"
                ),
            )

    optimizers = []
    for model, ends in ((multiplied, False), (scaled, True)):
        grown = dict(sizes(model, ends=ends))
        groups = build_param_groups(model, "single", lr=lr, weight_decay=0.1)
        optimizers.append(
            build_optimizer(config, transfer_groups(groups, grown, config, MUP, lr=lr), lr=lr)
        )
    with torch.no_grad():
        for key, param in scaled.named_parameters():
            param.mul_(share if key.split(".")[2] == "2" else 1.0)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(12):
        for model, optimizer in zip((multiplied, scaled), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - x.flip(0)).pow(2).mean().backward()
            optimizer.step()
        torch.testing.assert_close(scaled(x), multiplied(x), rtol=1e-6, atol=1e-9)


class Tied(nn.Module):
    """A table that is the head, too, a matrix, and the norm before the head.

    `factor` multiplies logits.
    """

    def __init__(self, width: int = 6, factor: float = 1.0, *, bias: bool = True) -> None:
        super().__init__()
        self.factor, self.table, self.hidden = (
            factor,
            nn.Embedding(50, width),
            nn.Linear(width, width),
        )
        self.norm, self.head = nn.LayerNorm(width, bias=bias), nn.Linear(width, 50, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        return self.factor * self.head(self.norm(x + torch.tanh(self.hidden(x))))


def carrying(grown: dict[str, Growth], factor: float) -> dict[str, Growth]:
    return {
        name: replace(size, logits=factor) if "norm" in name else size
        for name, size in grown.items()
    }


IDS, TARGETS = torch.arange(16), torch.arange(16).flip(0) % 4


@pytest.mark.parametrize(
    ("name", "options", "bias"),
    [
        *((name, {}, True) for name in ("adamw", "lamb", "muon", "sgd", "lion")),
        ("lamb", {"always_adapt": True}, False),
        ("sgd", {"momentum": 0.9}, True),
    ],
)
def test_a_scaled_norm_trains_as_the_multiplied_logits(
    name: str, options: dict[str, Any], bias: bool
) -> None:
    """The norm before a tied head has the factor, and the table the rule of an embedding."""
    factor, lr = 0.25, 0.05
    config = config_of(name, weight_decay=0.1, **options)
    torch.manual_seed(0)
    multiplied, scaled = Tied(factor=factor, bias=bias).double(), Tied(bias=bias).double()
    scaled.load_state_dict(multiplied.state_dict())
    optimizers = []
    for model, share in ((multiplied, 1.0), (scaled, factor)):
        groups = build_param_groups(model, "standard", lr=lr, weight_decay=0.1)
        sizes = carrying(growth_of(model, model), share)
        scale_initial_weights(model, multiplied, sizes)
        optimizers.append(
            build_optimizer(config, transfer_groups(groups, sizes, config, MUP, lr=lr), lr=lr)
        )
    for _ in range(12):
        for model, optimizer in zip((multiplied, scaled), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(IDS), TARGETS).backward()
            optimizer.step()
        torch.testing.assert_close(scaled(IDS), multiplied(IDS), rtol=1e-6, atol=1e-9)


def test_a_bias_at_zero_that_is_adapted_carries_no_factor() -> None:
    model, config = Tied(), config_of("lamb", always_adapt=True)
    groups = build_param_groups(model, "standard", lr=1.0, weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"norm.bias .*always_adapt=false"):
        transfer_groups(groups, carrying(growth_of(model, model), 0.5), config, MUP, lr=1.0)


def tied_check(name: str, carries: Callable[[float], float]) -> CoordinateCheck:
    """Check `Tied` of widths 32 to 256, whose norm has a factor on the logits by the width over
    that of the base.
    """
    config, lr = config_of(name), RATES[name]

    def trial(width: float, seed: int) -> SizedModel:
        torch.manual_seed(seed)
        base, model = (Tied(int(32 * size)).double() for size in (1, width))
        sizes = carrying(growth_of(model, base), carries(width))
        scale_initial_weights(model, base, sizes)
        groups = transfer_groups(build_param_groups(model, lr=lr), sizes, config, MUP, lr=lr)
        optimizer = build_optimizer(config, groups, lr=lr)

        def train() -> None:
            for _ in range(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(IDS), TARGETS).backward()
                optimizer.step()

        return SizedModel(model, lambda: model(IDS), train, sizes)

    return coordinate_check(trial, (1, 2, 4, 8), (0, 1))


RATES = {"adamw": 0.01, "lamb": 0.01, "sgd": 0.1, "muon": 0.02}


@pytest.mark.parametrize("name", [*RATES, "lion"])
def test_the_coordinate_check_passes(name: str) -> None:
    check_transfer(name, lr=RATES.get(name, 0.01))


BOUNDED = {
    "deepspeed": "min_trust",
    "pytorch_optimizer": "max_param_norm",
    "torch_optimizer": "max_param_norm",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects_are_carried_or_refused(name: str) -> None:
    for dialect in DIALECTS[name]:
        options = dialect_options(name, dialect, weight_decay=0.0 if name == "adamax" else 0.1)
        if name == "lamb" and dialect in BOUNDED:
            with pytest.raises(
                ConfigError, match=rf"optimizer.{BOUNDED[dialect]}=.* depends on the width"
            ):
                check_transfer(name, lr=0.01, **options)
        else:
            check_transfer(name, lr=0.01, **options)


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("power", [0.5, -0.5])
def test_a_wrong_power_in_a_rule_is_found(
    name: str, power: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = SCHEMAS[name].transfer
    assert rule is not None
    right = RULES[rule]
    monkeypatch.setitem(
        RULES, rule, lambda size, options: right(size, options) * math.pow(size.fan_in, power)
    )
    with pytest.raises(AssertionError, match=r"weight: what its update does .* lr_scale"):
        check_transfer(name, lr=RATES[name])


@pytest.mark.parametrize("name", RATES)
def test_a_tied_head_is_checked_and_a_wrong_power_of_its_norm_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not tied_check(name, lambda width: 1 / width).failures
    rule = {"sgd": "sgd", "lamb": "lamb"}.get(name, "adam")  # of a vector
    right = RULES[rule]
    for power in (0.5, -0.5):
        monkeypatch.setitem(
            RULES,
            rule,
            lambda size, options, power=power: right(size, options) * size.logits**power,
        )
        found = tied_check(name, lambda width: 1 / width).failures
        assert "norm.weight: what its update does" in found[0].describe_failure()


@pytest.mark.parametrize("power", [-1.5, -0.5])
def test_a_wrong_power_of_logits_is_found_before_any_step(power: float) -> None:
    found = tied_check("adamw", lambda width: width**power).failures
    assert "head.weight: the initial output" in found[0].describe_failure()


class SharedGain(nn.Module):
    """Heads of eight numbers, more of them the wider it is, and one norm for all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm, self.head = (
            nn.Linear(6, width),
            nn.RMSNorm(8),
            nn.Linear(width, 4, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads: Tensor = self.norm(self.inner(x).unflatten(-1, (-1, 8)))
        logits: Tensor = self.head(torch.tanh(heads).flatten(-2))
        return logits


def shared_check(steps: int, lr: float, *, by_gradient: bool) -> CoordinateCheck:
    """Check `SharedGain` of widths 32 to 512 with SGD."""
    config = config_of("sgd")
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def trial(width: float, seed: int) -> SizedModel:
        torch.manual_seed(seed)
        base, model = (SharedGain(int(32 * size)).double() for size in (1, width))
        sizes = growth_of(model, base)
        scale_initial_weights(model, base, sizes)
        groups = transfer_groups(build_param_groups(model, lr=lr), sizes, config, MUP, lr=lr)
        optimizer = build_optimizer(config, groups, lr=lr)

        def train() -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), torch.arange(4)).backward()
                optimizer.step()

        return SizedModel(model, lambda: model(batch), train, sizes)

    return coordinate_check(trial, (1, 2, 4, 8, 16), range(12), by_gradient=by_gradient)


def test_a_gain_that_heads_share_begins_with_noise() -> None:
    """Under SGD its update is a sum over heads.

    M^-1/2 while they are noise, 1 once they learn alike.
    """
    [plain] = shared_check(1, 0.01, by_gradient=False).failures
    assert (plain.parameter, plain.measure) == ("norm.weight", "update")
    assert plain.slope == pytest.approx(-0.5, abs=0.1)
    check = shared_check(1, 0.01, by_gradient=True)
    assert not check.failures
    [line] = [line for line in check.lines if line.below]
    assert (line.parameter, line.measure, line.right) == ("norm.weight", "update", "-0.5 to +0.0")
    [learnt] = [line for line in shared_check(20, 0.5, by_gradient=True).lines if line.below]
    assert learnt.slope == pytest.approx(0, abs=0.1), "so the factor of its rule, 1, is right"


def test_wrong_initial_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Growth, "width_init", property(lambda size: size.fan_in**-0.5)
    )  # of the head, too
    with pytest.raises(AssertionError, match=r"4.weight: the initial output .* standard deviation"):
        check_transfer("adamw", lr=0.01)


def shared_heads_check(name: str) -> CoordinateCheck:
    """Llamas whose query heads grow over one key and value head."""
    ids = torch.randint(60, (4, 12), generator=torch.Generator().manual_seed(0))
    config = config_of(name)

    def build(width: int) -> nn.Module:
        llama = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16 * width,
            intermediate_size=32 * width,
            num_attention_heads=2 * width,
            num_key_value_heads=1,
            num_hidden_layers=2,
            tie_word_embeddings=False,
        )
        return transformers.LlamaForCausalLM(llama)

    def trial(width: float, seed: int) -> SizedModel:
        torch.manual_seed(seed)
        base, model = build(1), build(int(width))
        sizes = growth_of(model, base)
        scale_initial_weights(model, base, sizes)
        groups = transfer_groups(build_param_groups(model, lr=0.01), sizes, config, MUP, lr=0.01)
        optimizer = build_optimizer(config, groups, lr=0.01)

        def train() -> None:
            for _ in range(4):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()

        return SizedModel(model, lambda: model(input_ids=ids).logits, train, sizes)

    return coordinate_check(trial, (1, 2, 4, 8), (0, 1))


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_heads_of_keys_that_do_not_grow_keep_the_size_of_their_output(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial = [line for line in shared_heads_check(name).lines if line.measure == "initial"]
    assert "model.layers.1.self_attn.k_proj.weight" in {line.parameter for line in initial}
    assert not [line.describe_failure() for line in initial if line.fails]
    by_shape = property(lambda size: size.fan_in ** (-0.5 if size.fan_out != 1 else -1.0))
    monkeypatch.setattr(Growth, "width_init", by_shape)  # as if it were an output head
    found = shared_heads_check(name).failures[0]
    assert (found.parameter, found.measure) == (
        "model.layers.0.self_attn.k_proj.weight",
        "initial",
    )


def test_a_plugin_of_muons_rule_needs_no_option_of_its_name() -> None:
    wide = Growth("w", (64, 16), (16, 16), fan_out=4.0)
    assert RULES["muon"](wide, {}) == 2.0
    assert RULES["muon"](Growth("b", (64,), (16,), fan_out=4.0), {}) == 1.0
