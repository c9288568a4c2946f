"""AdamWDL: ratios by layer, the three decays, and master weights."""

from __future__ import annotations

import pytest
import torch

from optrun.optimizer import AdamWDL
from optrun.param_groups import NamedParam, layerwise_lr_decay
from tests.optimizer_cases import set_grads, toy


def encoder() -> dict[str, torch.nn.Parameter]:
    names = [
        "embeddings.word.weight",
        *(f"encoder.layers.{i}.linear.weight" for i in range(3)),
        "classifier.weight",
    ]
    return {name: torch.nn.Parameter(torch.ones(2)) for name in names}


def test_ratios_fall_from_the_head_to_the_embeddings() -> None:
    optimizer = AdamWDL(encoder().items(), layerwise_decay=0.5, n_layers=3)
    assert list(optimizer.lr_ratios.values()) == [0.0625, 0.125, 0.25, 0.5, 1.0]


def test_without_layers_it_is_torchs_adamw() -> None:
    ours, theirs = toy(torch.float64), toy(torch.float64)
    one = AdamWDL(ours.items(), lr=0.01, weight_decay=0.2)
    two = torch.optim.AdamW(theirs.values(), lr=0.01, weight_decay=0.2, foreach=False)
    for step in range(5):
        for params, optimizer in ((ours, one), (theirs, two)):
            set_grads(params, step)
            optimizer.step()
    for name, param in theirs.items():
        torch.testing.assert_close(ours[name], param, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("form", "scheduled", "keep"),
    [
        ("documented", False, 1 - 0.1 * 0.5 * 0.25 * 0.2),
        ("paddlenlp", False, (1 - 0.1 * 0.2) * (1 - 0.1 * 0.5 * 0.25 * 0.2)),
        ("paddlenlp", True, (1 - 0.1 * 0.5 * 0.2) * (1 - 0.1 * 0.5 * 0.25 * 0.2)),
        ("paddlenlp-2.2", False, 1 - 0.1 * 0.2),
        ("paddlenlp-2.2", True, 1 - 0.1 * 0.5 * 0.2),
    ],
)
def test_how_often_and_at_what_rate_it_decays(form: str, scheduled: bool, keep: float) -> None:
    """lr 0.1, group scale 0.5, ratio 0.25, weight decay 0.2.

    A zero gradient leaves the decay alone.
    """
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = AdamWDL(
        [{"params": [("w", weight)], "lr_scale": 0.5}],
        lr=(lambda _: 0.1) if scheduled else 0.1,
        weight_decay=0.2,
        decay_form=form,
        set_param_lr_fun=lambda *_: 0.25,
    )
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.tolist() == pytest.approx([keep, keep], rel=1e-12)


def test_a_function_in_its_place_sees_what_paddlenlp_gives_it() -> None:
    seen = []

    def ratio(rate: float, names: dict[str, str], depth: int, param: NamedParam) -> float:
        seen.append((rate, names[param.name], depth, tuple(param.tensor.shape)))
        return layerwise_lr_decay(rate, names, depth, param)

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamWDL(
        [("linear_0.w_0", weight)],
        layerwise_decay=0.5,
        n_layers=4,
        name_dict={"linear_0.w_0": "encoder.layers.1.weight"},
        set_param_lr_fun=ratio,  # type: ignore[arg-type]
    )
    assert seen == [(0.5, "encoder.layers.1.weight", 4, (3,))]
    assert optimizer.lr_ratios == {"linear_0.w_0": 0.125}
    assert optimizer.get_config()["set_param_lr_fun"] is ratio


def test_names_must_be_the_parameters_own() -> None:
    with pytest.raises(
        ValueError,
        match=r"name_dict names 'classifer', which is no parameter here. Did you mean class",
    ):
        AdamWDL(
            encoder().items(), name_dict={**{name: name for name in encoder()}, "classifer": "x"}
        )
    with pytest.raises(ValueError, match="the parameters have none"):
        AdamWDL(encoder().values(), layerwise_decay=0.5)
    with pytest.raises(ValueError, match="apply_decay_param_fun goes by parameter name"):
        AdamWDL(encoder().values(), apply_decay_param_fun=lambda name: "bias" not in name)
    AdamWDL(encoder().values())


def test_no_ratio_function_is_ratio_one() -> None:
    optimizer = AdamWDL(encoder().items(), layerwise_decay=0.5, set_param_lr_fun=None)
    assert set(optimizer.lr_ratios.values()) == {1.0}


def test_master_weights_are_a_float32_run_rounded() -> None:
    low = toy(torch.bfloat16)
    full = {name: torch.nn.Parameter(param.detach().float()) for name, param in low.items()}
    one, two = AdamWDL(low.items(), lr=1e-4, master_weights=True), AdamWDL(full.items(), lr=1e-4)
    for step in range(10):
        set_grads(low, step)
        for name, param in full.items():
            param.grad = low[name].grad.float()
        one.step()
        two.step()
    for name, param in full.items():
        assert torch.equal(low[name], param.bfloat16()), name
        assert torch.equal(one.state[low[name]]["master_weight"], param.detach()), name


def test_embeddings_alone_are_no_layers() -> None:
    """BERT's own names: `embeddings` would be found and `encoder.layer.0` not."""
    names = [
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.0.output.dense.weight",
        "classifier.weight",
    ]
    params = {name: torch.nn.Parameter(torch.ones(2)) for name in names}
    with pytest.raises(
        ValueError, match=r"layerwise_decay=0.8 scales no block: .*param_groups=layerwise"
    ):
        AdamWDL(params.items(), layerwise_decay=0.8, n_layers=1)
    structured = {name: name.replace("encoder.layer.", "encoder.layers.") for name in names}
    optimizer = AdamWDL(params.items(), layerwise_decay=0.8, n_layers=1, name_dict=structured)
    assert list(optimizer.lr_ratios.values()) == pytest.approx([0.64, 0.8, 1.0])


def test_a_model_without_blocks_scales_its_embedding() -> None:
    """As PaddleNLP: nothing is numbered, so no block is left behind at the full rate."""
    params = {
        name: torch.nn.Parameter(torch.ones(2))
        for name in ("embedding_bag.weight", "classifier.weight")
    }
    optimizer = AdamWDL(params.items(), layerwise_decay=0.5, n_layers=2)
    assert optimizer.lr_ratios == {"embedding_bag.weight": 0.125, "classifier.weight": 1.0}
