"""What is to be known of the pytorch-optimizer library beside its signatures, and is not seen by trying."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

LIBRARY = "pytorch_optimizer"

REFUSED: Mapping[str, tuple[str, str]] = {
    "adahessian": (
        "needs second derivatives of the loss (create_graph), which a step here does not compute",
        "soap",
    ),
    "sophiah": ("needs second derivatives of the loss (create_graph), which a step here does not compute", "soap"),
    "bsam": ("needs the loss again at weights it has moved (a closure), and a step here computes it once", "adabelief"),
    "demo": ("exchanges compressed momenta between processes itself, where the ranks of a run share gradients", "lion"),
    "distributedmuon": ("divides the matrices between processes that it does not ask the run for", "muon"),
    "lorarite": ("takes the two factors of each LoRA layer in pairs, which are not told apart here", "lamb"),
    "muonclip": ("clips by the attention logits of each step, which it is not given here: it would be Muon", "muon"),
    "spectralsphere": ("takes 2-D parameters alone", "muon"),
}
"""By lower-case name: why one is not offered, and what of the same library is."""

_IGNORED = "lr and the schedule of this run would be ignored"
WANTED: Mapping[str, tuple[str, Any, str]] = {
    "adafactor": ("relative_step", False, f"takes a learning rate of its own, {_IGNORED}"),
    "apollodqn": ("warmup_steps", 0, f"warms up by itself from a learning rate of its own, {_IGNORED}"),
    "pid": ("momentum", 0.9, "without a momentum keeps neither integral nor derivative, and is plain SGD"),
    "ranger21": ("disable_lr_scheduler", True, f"runs a schedule of its own, {_IGNORED}"),
}
"""A keyword without which one is not what its name says, its value (for a fraction: any above 0), and the reason."""

FLAGS: Mapping[str, str] = {
    "adago": "use_muon",
    "adamuon": "use_muon",
    "muon": "use_muon",
    "normuon": "use_muon",
    "adamwsn": "sn",
}
"""Key of a group that says whether it holds hidden matrices."""

PROJECTED: Mapping[str, Mapping[str, Any]] = {
    "apollo": {"rank": 256, "update_proj_gap": 200, "scale": 1.0, "projection_type": "std"},
    "fira": {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"},
    "galore": {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"},
}
"""Keys of the groups of matrices that are projected, with the values of the papers; without them nothing is."""

MARKED: Mapping[str, str] = {"adamc": "normalized"}
"""Key of a group without which the optimizer is another one, and which only the user can place."""

TAKES_LOSS = frozenset({"emofact", "emolynx", "emonavi"})
"""Those that follow the loss, and stand still in part where `step` is not told it."""

SWITCHES = frozenset({"adam_debias", "adanorm", "adanorm_r", "cautious", "stable_adamw", "use_gc"})
"""Keywords that a constructor takes without naming them; known by being read in the class."""

_HELPERS: Mapping[str, str] = {
    "AdaGradGraft": "graft",
    "BlockPartitioner": "partition",
    "GaLoreProjector": "galore",
    "Graft": "graft",
    "PreConditioner": "preconditioner",
    "RMSPropGraft": "graft",
    "SGDGraft": "graft",
    "SQRTNGraft": "graft",
}
"""Classes of objects that stand in its states, to their module: plain values and tensors, saved as such."""


def is_helper(value: Any) -> bool:
    """Tell whether a value of an optimizer's state is an object of the library's that can be saved."""
    module = _HELPERS.get(type(value).__name__)
    return module is not None and type(value).__module__ == f"{LIBRARY}.optimizer.utils.{module}"


def new_helper(name: str, attributes: Mapping[str, Any]) -> Any:
    """Make such an object, with these attributes; a file names none but those listed here.

    Raises:
        ValueError: Another name.
    """
    if name not in _HELPERS:
        raise ValueError(f"the saved state holds a {name}, which is none of {', '.join(_HELPERS)}.")
    cls = getattr(importlib.import_module(f"{LIBRARY}.optimizer.utils.{_HELPERS[name]}"), name)
    made = cls.__new__(cls)
    vars(made).update(attributes)
    return made
