"""Files that nobody recorded.

Other kinds, other orders, arguments left out, expected values from float64 formulas.

The formulas are written out of the description of the packages with numpy alone, a few lines a
package; no line of optrun computes them. `write_variants` makes a folder for
`OPTRUN_REFERENCE_DIR`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.variant_cases import LAYERS, SHAPES, STEPS, Case, file_of, rate_of, table_of

# -- Paddle Lamb
# --------------------------------------------------------------------------------------------------


def lamb_case(
    name: str, lr: Any = None, *, wd: float = 0.01, skip: tuple[str, ...] = (), **entries: Any
) -> Case:
    """Paddle's Lamb.

    The parameters in `skip` miss their first gradient, for which their count waits.
    """
    case = Case(name, SHAPES, "float64", **entries)
    group_of = {p: group for group in entries.get("groups", ()) for p in group["params"]}
    own = {n: group_of.get(n, {}) for n in SHAPES}
    at = rate_of(entries.get("schedule", lr))
    for step in range(STEPS):
        given: list[Any] = []
        for n, w in case.w.items():
            if step == 0 and n in skip:
                given.append(None)
                continue
            g = case.grads[step][n]
            given.append(g.ravel().tolist())
            c, decay = own[n].get("weight_decay"), own[n].get("lamb_weight_decay", wd)
            g = g + (c["coeff"] * np.sign(w) if isinstance(c, dict) else (c or 0.0) * w)
            m, v = case.moments(n, g)
            r = m / (np.sqrt(v) + 1e-6) + decay * w
            norms = np.linalg.norm(w), np.linalg.norm(r)
            k = norms[0] / norms[1] if decay > 0 and min(norms) > 0 else 1.0
            case.w[n] = w - at(step) * own[n].get("learning_rate", 1.0) * k * r
        case.record(at(step), given)
    case.entry["state"] = {
        n: {
            "moment1": case.first[n].ravel().tolist(),
            "moment2": case.second[n].ravel().tolist(),
            "beta1_pow_acc": [0.9 ** (case.t[n] + 1)],
            "beta2_pow_acc": [0.999 ** (case.t[n] + 1)],
        }
        for n in case.w
    }
    return case


def paddle_lamb() -> dict[str, Any]:
    """Defaults left out, schedules of the other packages of Paddle, groups with few keys."""
    inverse_sqrt = {"kind": "InverseSquareRootSchedule", "warmup_steps": 3, "last_epoch": 1}
    groups = [
        {"params": ["zero", "scale"], "learning_rate": 0.5, "lamb_weight_decay": 0.2},
        {"params": ["enc.weight"], "weight_decay": {"kind": "L1", "coeff": 0.1}},
        {"params": ["out.bias"], "weight_decay": 0.3},
    ]
    clips = [
        {
            "clip": {"kind": "value", "max": 0.5},
            "dtype": "float64",
            "need_clip": [True, False],
            "shapes": [[2], [1]],
            "grads": [[-0.25, -2.0], [3.0]],
            "clipped": [[-0.25, -0.5], [3.0]],
        },
        {
            "clip": {"kind": "global_norm", "clip_norm": 2.5},
            "dtype": "float64",
            "need_clip": [True, True],
            "shapes": [[2], []],
            "grads": [[3.0, 0.0], [4.0]],
            "clipped": [[1.5, 0.0], [2.0]],
        },
    ]
    return file_of(
        "paddle_lamb",
        lamb_case("all_left_out", skip=("scale",), clear_grad_set_to_zero=False),
        lamb_case(
            "noam", schedule={"kind": "NoamDecay", "d_model": 16, "warmup_steps": 2}, groups=groups
        ),
        lamb_case("step", schedule={"kind": "StepDecay", "learning_rate": 0.05, "step_size": 3}),
        lamb_case("inverse_sqrt", schedule=inverse_sqrt),
        clip_values=clips,
    )


# -- Paddle Adamax
# --------------------------------------------------------------------------------------------------


def paddle_adamax() -> dict[str, Any]:
    """L1 for all, a parameter with a scale and a regularizer of its own, clips, a piecewise
    rate, a rate by hand.
    """
    file = file_of("paddle_adamax")
    piecewise = {"kind": "PiecewiseDecay", "boundaries": [1, 4], "values": [0.02, 0.3, 0.001]}
    by_hand = [
        {"before_step": 5, "op": "set_lr", "value": 0.3},
        {"before_step": 2, "op": "set_lr", "value": 0.02},
    ]
    for name, entries in (("piecewise", {"schedule": piecewise}), ("by_hand", {"events": by_hand})):
        case = Case(name, SHAPES, "float64", **entries)
        case.entry["config"] = {
            "weight_decay": {"kind": "L1", "coeff": 0.05},
            "grad_clip": {"kind": "norm", "clip_norm": 0.4},
        }
        case.entry["params"][1] |= {
            "regularizer": {"kind": "L2", "coeff": 0.2},
            "lr_scale": 0.5,
            "need_clip": False,
        }
        lr = 0.001
        for step in range(STEPS):
            lr = next((event["value"] for event in by_hand if event["before_step"] == step), lr)
            now = rate_of(piecewise)(step) if name == "piecewise" else lr
            for n, w in case.w.items():
                own = n == "enc.weight"
                g = case.grads[step][n]
                g = g if own else g * min(1.0, 0.4 / max(np.linalg.norm(g), 1e-30))
                g = g + (0.2 * w if own else 0.05 * np.sign(w))
                case.t[n] += 1
                case.first[n] = 0.9 * case.first[n] + 0.1 * g
                case.second[n] = np.maximum(0.999 * case.second[n] + 1e-8, np.abs(g))
                case.w[n] = (
                    w
                    - now
                    * (0.5 if own else 1.0)
                    / (1 - 0.9 ** case.t[n])
                    * case.first[n]
                    / case.second[n]
                )
            case.record(now)
        case.entry["state"] = {
            n: {
                "moment": case.first[n].ravel().tolist(),
                "inf_norm": case.second[n].ravel().tolist(),
                "beta1_pow_acc": [0.9 ** (STEPS + 1)],
            }
            for n in case.w
        }
        file["cases"].append(case.entry)
    return file


# -- PaddleNLP AdamWDL
# ------------------------------------------------------------------------------------------------


def adamwdl() -> dict[str, Any]:
    """Nearly everything left out, a schedule of Keras' package beside, parameters without a key
    of the framework.
    """
    fractional = table_of("InverseSquareRootSchedule", warmup_steps=2.5)
    noam = {"kind": "NoamDecay", "d_model": 4, "warmup_steps": 3}
    file = file_of(
        "paddlenlp_adamwdl",
        layerwise_ratios=[
            {"decay_rate": 0.5, "n_layers": 2, "name": "encoder.layers.1.weight", "ratio": 0.5},
            {"decay_rate": 0.5, "n_layers": 2, "name": "my.embedding", "ratio": 0.125},
            {"decay_rate": 0.5, "n_layers": 2, "name": "encoder.layers", "raises": "IndexError"},
        ],
        inverse_square_root=[{"args": fractional["args"], "values": fractional["values"]}],
        inverse_square_root_warmup_0_raises="ZeroDivisionError",
        paddle_schedules=[
            table_of("StepDecay", learning_rate=2, step_size=3),
            table_of("InverseSquareRootSchedule", warmup_steps=3, last_epoch=4),
            table_of("PiecewiseDecay", boundaries=[2], values=[0.0, 3.0]),
        ],
    )
    for name, config, schedule in (
        ("left_out", {"layerwise_decay": 0.5, "n_layers": 2}, None),
        ("once", {"decay": "once", "n_layers": 2, "layerwise_decay": 0.8}, noam),
    ):
        case = Case(name, LAYERS, "float64", **({"schedule": schedule} if schedule else {}))
        case.entry["config"] = config
        case.entry["params"][1] |= {"key": "linear_1.w_0", "lr_scale": 0.5}
        at, d = rate_of(schedule), config["layerwise_decay"]
        ratios = dict(zip(LAYERS, (1.0, d, d**2, d**3), strict=True))
        for step in range(STEPS):
            for n, w in case.w.items():
                s = 0.5 if n == "encoder.layers.1.weight" else 1.0
                m, v = case.moments(n, case.grads[step][n])
                w = w * (1 - at(step) * (s if schedule else 1.0) * 0.01)
                if "decay" not in config:
                    w = w * (1 - at(step) * s * ratios[n] * 0.01)
                case.w[n] = w - at(step) * s * ratios[n] * m / (np.sqrt(v) + 1e-8)
            case.record(at(step))
        case.entry["state"] = {
            n: {
                "moment1": case.first[n].ravel().tolist(),
                "moment2": case.second[n].ravel().tolist(),
                "beta1_pow_acc": [0.9 ** (STEPS + 1)],
                "beta2_pow_acc": [0.999 ** (STEPS + 1)],
            }
            for n in case.w
        }
        file["cases"].append(case.entry)
    return file


# -- TF Model Garden LAMB
# ---------------------------------------------------------------------------------------------


def tfm_lamb() -> dict[str, Any]:
    """Every kind of Keras with its defaults left out, the count of the optimizer, names with a
    number at the end.
    """
    cycle = {
        "kind": "PolynomialDecay",
        "initial_learning_rate": 0.1,
        "decay_steps": 3,
        "cycle": True,
    }
    stairs = {
        "kind": "InverseTimeDecay",
        "initial_learning_rate": 0.1,
        "decay_steps": 2,
        "decay_rate": 3.0,
        "staircase": True,
    }
    upwards = {"kind": "CosineDecay", "initial_learning_rate": 0.01, "decay_steps": 5, "alpha": 3.0}
    tables = {
        "keras_schedules": [
            table_of("PolynomialDecay", initial_learning_rate=0.1, decay_steps=4),
            table_of(
                "PolynomialDecay", initial_learning_rate=0.1, decay_steps=3, power=2.0, cycle=True
            ),
            table_of(
                "PolynomialDecay", initial_learning_rate=0.001, decay_steps=4, end_learning_rate=0.1
            ),
            table_of(
                "InverseTimeDecay",
                initial_learning_rate=0.1,
                decay_steps=3,
                decay_rate=0.5,
                staircase=True,
            ),
            table_of("CosineDecay", initial_learning_rate=0.1, decay_steps=6),
            table_of(
                "ExponentialDecay", initial_learning_rate=0.1, decay_steps=2.5, decay_rate=0.5
            ),
            table_of("PiecewiseConstantDecay", boundaries=[2, 3], values=[0.1, 0.3, 0.2]),
        ],
        "normalised_names": [{"variable_name": "b/k:0:12", "pattern_is_searched_in": "b/k:0"}],
        "get_config": [
            {
                "kwargs": {"lr": 0.02, "decay": 0.5, "global_clipnorm": 2.0},
                "get_config": {
                    "name": "LAMB",
                    "global_clipnorm": 2.0,
                    "learning_rate": 0.02,
                    "weight_decay_rate": 0.0,
                    "decay": 0.5,
                    "beta_1": 0.9,
                    "beta_2": 0.999,
                    "epsilon": 1e-6,
                },
            }
        ],
    }
    file = file_of("tfm_lamb", **tables)
    for name, config, schedule, by_hand in (
        ("left_out", {}, None, {}),
        (
            "cycle",
            {"weight_decay_rate": 0.1, "exclude_from_weight_decay": "z", "name": "X"},
            cycle,
            {},
        ),
        ("stairs", {"decay": 0.2, "lr": 7.0}, stairs, {}),
        ("upwards", {}, upwards, {3: 0.05}),
    ):
        shapes = {f"{n}:0": s for n, s in SHAPES.items()}
        case = Case(name, shapes, "float64", **({"schedule": schedule} if schedule else {}))
        case.entry |= {"config": config}
        case.entry["events"] = [
            {"before_step": at, "op": "set_lr", "value": value} for at, value in by_hand.items()
        ]
        late, wd = "scale:0", config.get("weight_decay_rate", 0.0)
        for step in range(STEPS):
            base = by_hand[3] if by_hand and step >= 3 else rate_of(schedule)(step)
            lr, given = base / (1 + config.get("decay", 0.0) * step), []
            for n, w in case.w.items():
                if step == 0 and n == late:
                    given.append(None)
                    continue
                given.append(case.grads[step][n].ravel().tolist())
                excluded = name == "cycle" and "z" in n
                case.t[n] = step
                m, v = case.moments(n, case.grads[step][n])
                r = m / (np.sqrt(v) + 1e-6) + (0.0 if excluded else wd) * w
                norms = np.linalg.norm(w), np.linalg.norm(r)
                case.w[n] = (
                    w - lr * (norms[0] / norms[1] if min(norms) > 0 and not excluded else 1.0) * r
                )
            case.record(lr, given)
        scope, early = config.get("name", "LAMB"), [n for n in case.w if n != late]
        slots = [(n, s) for s in "mv" for n in early] + [(late, s) for s in "mv"]
        values = {"m": case.first, "v": case.second}
        case.entry["state"] = {
            "iterations": STEPS,
            "weight_names": [
                "iter:0" if schedule else f"{scope}/iter:0",
                *(f"{scope}/{n[:-2]}/{s}:0" for n, s in slots),
            ],
            "weights": [STEPS, *(values[s][n].ravel().tolist() for n, s in slots)],
        }
        file["cases"].append(case.entry)
    return file


# -- MindSpore LazyAdam
# -----------------------------------------------------------------------------------------------


def lazy_adam() -> dict[str, Any]:
    """Rates and decays of groups, an order, a schedule in the case, repeated rows without and
    with decay.
    """
    warmup = {"kind": "WarmUpLR", "learning_rate": 0.05, "warmup_steps": 4}
    polynomial = {
        "kind": "PolynomialDecayLR",
        "learning_rate": 0.04,
        "end_learning_rate": 0.01,
        "decay_steps": 5,
        "power": 2.0,
    }
    decay = {"kind": "list", "values": [0.0, 0.1, 0.2, 0.0, 0.3, 0.1, 0.2]}
    groups = [
        {"params": ["scale", "out.bias"], "lr": polynomial, "weight_decay": decay},
        {"params": ["zero"], "lr": 0.002},
        {"params": ["enc.weight"]},
        {"order_params": ["enc.weight", "zero", "scale", "out.bias"]},
    ]
    file = file_of(
        "mindspore_lazyadam",
        mindspore_schedules=[
            table_of("ExponentialDecayLR", learning_rate=0.1, decay_rate=0.5, decay_steps=3),
            table_of("CosineDecayLR", min_lr=0.0, max_lr=0.1, decay_steps=4),
            table_of("WarmUpLR", learning_rate=0.2, warmup_steps=5),
        ],
    )
    for name, schedule, entries in (
        ("left_out", None, {}),
        ("cosine", {"kind": "CosineDecayLR", "min_lr": 0.01, "max_lr": 0.1, "decay_steps": 4}, {}),
        ("groups", warmup, {"groups": groups}),
        ("repeated_rows", None, {"sparse_mode": "dedup"}),
    ):
        if schedule:
            entries = {**entries, "schedule": schedule}
        shapes = {**SHAPES, "table.beta": [4, 2]} if name == "repeated_rows" else SHAPES
        case = Case(name, shapes, "float32", **entries)
        if name == "repeated_rows":
            case.entry["config"] = {"weight_decay": 0.1}
        for step in range(STEPS):
            lrs, given = {}, []
            for n, w in case.w.items():
                own = (
                    next((group for group in groups if n in group.get("params", ())), {})
                    if name == "groups"
                    else {}
                )
                lrs[n] = rate_of(own.get("lr", schedule))(step)
                wd = rate_of(own.get("weight_decay"), 0.0)(step)
                g, rows = case.grads[step][n], slice(None)
                if n == "table.beta":
                    rows = [1, 3]
                    given.append({"rows": [3, 1, 3], "values": g[:3].ravel().tolist()})
                    g = np.stack([g[1], g[0] + g[2]])
                else:
                    given.append(g.ravel().tolist())
                    wd = 0.1 if name == "repeated_rows" else wd
                keep = np.array(case.first[n]), np.array(case.second[n]), np.array(w)
                m, v = keep[0], keep[1]
                index = rows if w.ndim else ...
                g = g + wd * w[index]
                m[index] = 0.9 * m[index] + 0.1 * g
                v[index] = 0.999 * v[index] + 0.001 * g * g
                a = lrs[n] * math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
                keep[2][index] -= a * m[index] / (np.sqrt(v[index]) + 1e-8)
                case.first[n], case.second[n], case.w[n] = keep
            case.record(list(lrs.values()) if name == "groups" else lrs["zero"], given)
        order = groups[-1]["order_params"] if name == "groups" else list(case.w)
        case.entry["state"] = {
            "global_step": STEPS,
            "beta1_power": 0.9**STEPS,
            "beta2_power": 0.999**STEPS,
            "optimizer_order": order,
            "moment1": {n: case.first[n].ravel().tolist() for n in order},
            "moment2": {n: case.second[n].ravel().tolist() for n in order},
        }
        file["cases"].append(case.entry)
    return file


def variants() -> list[dict[str, Any]]:
    """One file a system, as JSON gives them back."""
    files = (paddle_lamb(), paddle_adamax(), adamwdl(), tfm_lamb(), lazy_adam())
    return [json.loads(json.dumps(file)) for file in files]


def write_variants(folder: Path) -> None:
    """A folder for `OPTRUN_REFERENCE_DIR`."""
    for file in variants():
        (folder / f"unseen_{file['system']}.json").write_text(json.dumps(file), encoding="utf-8")
