"""Gradient clipping, between the backward pass and the step."""

from dataclasses import dataclass
from typing import Annotated

from optrun.config.schema.checks import Checked, expect
from optrun.config.schema.ranges import NotNegative, number


@dataclass(kw_only=True)
class ClipConfig(Checked):
    """Base class of the choices of this group."""

    GROUP = "clip."
    name: str


@dataclass(kw_only=True)
class NoClipConfig(ClipConfig):
    """Gradients stay as they are; their global norm is measured and logged all the same."""


@dataclass(kw_only=True)
class NormClipConfig(ClipConfig):
    """Each gradient tensor alone: g * min(1, max_norm / (|g| + eps))."""

    max_norm: Annotated[
        float, number("a number above 0; to leave gradients alone: clip=none", lambda x: x > 0)
    ]
    """Largest L2 norm that is left alone."""
    eps: NotNegative
    """Added to the norm before dividing. 1e-6: torch. 0: Paddle, Keras."""
    max_value: float | None
    """Clamp elementwise to [min_value, max_value] first (Keras: clipvalue); null: do not."""
    min_value: float | None
    """Null: -max_value."""

    def __post_init__(self) -> None:
        """Refuse an empty interval."""
        super().__post_init__()
        _check_values(self.min_value, self.max_value)


@dataclass(kw_only=True)
class GlobalNormClipConfig(NormClipConfig):
    """All gradients by one factor: min(1, max_norm / (|all gradients| + eps))."""


@dataclass(kw_only=True)
class ValueClipConfig(ClipConfig):
    """Each element alone: min(max(g, min_value), max_value)."""

    max_value: float
    min_value: float | None
    """Null: -max_value."""

    def __post_init__(self) -> None:
        """Refuse an empty interval."""
        super().__post_init__()
        _check_values(self.min_value, self.max_value)


def _check_values(min_value: float | None, max_value: float | None) -> None:
    """Refuse an empty interval [min_value, max_value]; min_value None means -max_value."""
    if max_value is None:
        expect(
            min_value is None,
            "clip.min_value",
            min_value,
            "null where clip.max_value is null",
            "Set both.",
        )
    elif min_value is None:
        expect(
            max_value > 0,
            "clip.max_value",
            max_value,
            "a number above 0 where clip.min_value is null",
        )
    else:
        expect(
            min_value <= max_value,
            "clip.min_value",
            min_value,
            f"at most clip.max_value={max_value}",
        )


SCHEMAS: dict[str, type[ClipConfig]] = {
    "none": NoClipConfig,
    "global_norm": GlobalNormClipConfig,
    "norm": NormClipConfig,
    "value": ValueClipConfig,
}
