"""Every recorded trajectory, through public API, at the recorded tolerances.

Every file is understood to the last key.

`OPTRUN_REFERENCE_DIR` points to another folder of such files.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from optrun.optimizer import Adamax, AdamWDL, Lamb, LazyAdam
from tests.reference.reference_adapter import drivers
from tests.reference.reference_check import check_case
from tests.reference.reference_format import DTYPES, check_document, documents, entries

CASES = [
    pytest.param(document["system"], case, driver, id=f"{title}-{driver}")
    for title, document, case in entries("cases")
    for driver in drivers(case)
]
OWN = "OPTRUN_REFERENCE_DIR" not in os.environ


@pytest.mark.parametrize(("name", "document"), documents(), ids=[name for name, _ in documents()])
def test_file_is_understood(name: str, document: dict[str, Any]) -> None:
    check_document(name, document)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(("system", "case", "driver"), CASES)
def test_trajectory(system: str, case: dict[str, Any], driver: str, foreach: bool) -> None:
    """In the dtype it was recorded in; what was recorded in float32 is played in float64 too."""
    for dtype in dict.fromkeys((DTYPES.get(case["dtype"], torch.float64), torch.float64)):
        check_case(system, case, dtype=dtype, foreach=foreach, driver=driver)


@pytest.mark.skipif(not OWN, reason="counts the files of this folder")
def test_only_two_cases_leave_rows_out() -> None:
    """The two deviations of LazyAdam.

    Of those cases everything but the repeated rows is compared.
    """
    left_out = {
        case["id"]: rows
        for _, document, case in entries("cases")
        if (rows := check_case(document["system"], case, dtype=torch.float64, foreach=False))
    }
    assert left_out == {"lazy_sparse_fused_dup_wd": 2, "lazy_sparse_dup_no_dedup": 2}
    assert len(list(entries("cases"))) == 144


@pytest.mark.parametrize(
    ("optimizer", "documented"),
    [
        (
            Lamb,
            {
                "lr": 1e-3,
                "betas": [0.9, 0.999],
                "eps": 1e-6,
                "weight_decay": 0.01,
                "always_adapt": False,
            },
        ),
        (Adamax, {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
        (
            AdamWDL,
            {
                "lr": 1e-3,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": 0.01,
                "layerwise_decay": 1.0,
            },
        ),
        (AdamWDL, {"n_layers": 12}),
        (
            LazyAdam,
            {
                "lr": 1e-3,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": 0.0,
                "loss_scale": 1.0,
            },
        ),
        (LazyAdam, {"nesterov": False, "exclude_from_weight_decay": ["beta", "gamma"]}),
    ],
)
def test_defaults_are_the_documented_ones(optimizer: Any, documented: dict[str, Any]) -> None:
    """The reader fills in what a file leaves out; the classes have the same defaults."""
    config = optimizer([("w", torch.nn.Parameter(torch.ones(1)))]).get_config()
    assert {key: config[key] for key in documented} == documented
