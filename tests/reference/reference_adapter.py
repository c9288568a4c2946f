"""From a recorded case to optrun's public API: names are translated, nothing is computed.

Formulas live in the package, expected numbers in the JSON files; what stands here and in the files
beside is which keyword is called what, and what a keyword that is left out means in the package the
case was recorded from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.reference.reference_mindspore import lazy_adam
from tests.reference.reference_paddle import adamwdl, paddle_adamax, paddle_lamb
from tests.reference.reference_player import FUNCTION, SCHEDULER, Player
from tests.reference.reference_tfm import tfm_lamb
from tests.reference.reference_torch import PACKAGES, of_torch


def player(
    system: str, case: dict[str, Any], *, dtype: torch.dtype, foreach: bool, driver: str = FUNCTION
) -> Player:
    """Build the optimizer of a case through the public API.

    Raises:
        FormatError: The case says something that the format does not know.
    """
    where = f"{system} {case.get('id')}"
    return SYSTEMS[system](where, case, dtype, foreach, driver)


def drivers(case: dict[str, Any]) -> list[str]:
    """Ways to play a case: where its rate changes, the schedule drives it as well."""
    config = case.get("config", {})
    rates = [
        case.get("schedule"),
        config.get("learning_rate"),
        *(group.get("lr") for group in case.get("groups") or ()),
    ]
    moves = any(isinstance(rate, dict) for rate in rates) or bool(
        config.get("decay") not in ("twice", "once", None, 0)
    )
    return [FUNCTION, SCHEDULER] if moves else [FUNCTION]


SYSTEMS: dict[str, Callable[..., Player]] = {
    "paddle_lamb": paddle_lamb,
    "paddle_adamax": paddle_adamax,
    "paddlenlp_adamwdl": adamwdl,
    "tfm_lamb": tfm_lamb,
    "mindspore_lazyadam": lazy_adam,
    **dict.fromkeys(PACKAGES, of_torch),
}
