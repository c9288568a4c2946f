"""The state of a run: its counters and its random states."""

from __future__ import annotations

import base64
import copy
import hashlib
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from types import NoneType
from typing import NotRequired, Self, TypedDict

import numpy as np
import torch

from optrun.base.plain import PlainDict, PlainMapping


class Best(TypedDict):
    """The best value of a metric after training began."""

    value: float
    step: int
    tied: int
    """Number of evaluations with this value."""
    loss: NotRequired[float]
    """The loss of the same evaluation, which decides between equal values."""


class Ended(TypedDict, total=False):
    """Values of `TrainState` from before the evaluation that exists only because the run ends.

    A prolonged run continues with them.
    """

    best: dict[str, Best]
    last: dict[str, float]
    ranking: dict[str, float]
    ranking_losses: dict[str, float]


@dataclass
class TrainState:
    """The counters of a run, as plain values for a checkpoint."""

    global_step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, without padding."""
    samples: int = 0
    """Examples trained on."""
    seconds: float = 0.0
    """Wall time of training, over all resumes."""
    skipped_steps: int = 0
    """Updates left out because of non-finite numbers."""
    skipped_in_a_row: int = 0
    window_loss: float = 0.0
    """Sum of losses times weights since the last log line."""
    window_weight: float = 0.0
    """Tokens or examples in that sum, or the sum of their class weights."""
    window_grad_norm: float = 0.0
    """Largest global gradient norm since the last log line, before clipping."""
    window_sources: dict[str, list[float]] = field(default_factory=dict)
    """Source of a mixture to its sum of losses, targets and examples since the last log line."""
    window_measures: dict[str, float] = field(default_factory=dict)
    """Name of a measure of the task to its sum over the examples since the last log line."""
    best: dict[str, Best] = field(default_factory=dict)
    """Metric name to its best evaluation."""
    before_training: dict[str, float] = field(default_factory=dict)
    """Metric name to its value before the first step."""
    last: dict[str, float] = field(default_factory=dict)
    """Metric name to its last value."""
    ranking: dict[str, float] = field(default_factory=dict)
    """Step (as text) to the value of the metric that ranks checkpoints."""
    ranking_losses: dict[str, float] = field(default_factory=dict)
    """Step (as text) to the loss of the same evaluation, which decides between equals."""
    ranked_by: str = ""
    """The metric that ranks checkpoints, a space, and `min` or `max`."""
    grad_norm: float = 0.0
    """Global gradient norm of the last step, before clipping."""
    lrs: dict[str, float] = field(default_factory=dict)
    """Learning rates of the last step, by metric name."""
    data_shift: int = 0
    """Steps of data that the position is ahead of `global_step` because the plan of the data was
    changed."""
    passed_steps: int = 0
    """Steps of data that were skipped by rollbacks."""
    rollbacks: int = 0
    """How often training went back to a checkpoint because of non-finite numbers."""
    unfinished: bool = False
    """Whether the run was stopped after its last step, before the evaluation and line of it."""
    without_end: Ended = field(default_factory=Ended)
    """Values without the results that only the end of the run produced; empty: it produced none.
    A prolonged run continues with them."""
    batches_digest: str = ""
    """Digest over all batches since the start, in their order; see `digest_of_batches`."""

    @property
    def position(self) -> int:
        """Count the steps of data used since the start."""
        return self.global_step + self.data_shift + self.passed_steps

    @property
    def is_before_first_step(self) -> bool:
        """Whether no step was done and the evaluation before the first step is still to come."""
        return self.position == 0 and not self.before_training

    def copy_before_end(self, *, due: bool) -> Ended:
        """Copy the values to be changed by the evaluation at the end of the run.

        If the run is prolonged, `drop_end_results` puts them back.

        Args:
            due: Whether this evaluation is scheduled anyway. Then its results stay if the run is
                prolonged, and only `last` is copied, which also has the metrics of the last line.
        """
        values = Ended(last=self.last)
        if not due:
            values |= Ended(
                best=self.best, ranking=self.ranking, ranking_losses=self.ranking_losses
            )
        return copy.deepcopy(values)

    def drop_end_results(self) -> None:
        """Drop the results of evaluations that existed only because the run ended.

        A prolonged run then continues as if it had not ended. Does nothing if there are none.
        """
        vars(self).update(self.without_end)
        self.without_end = {}

    def empty_window(self) -> PlainDict:
        """Reset the counters since the last line of metrics; return their values by name.

        They are all attributes `window_...`: `{"window_loss": 34.5, "window_weight": 12, ...}`.
        """
        window = {}
        for name, zero in vars(TrainState()).items():  # of a new state
            if name.startswith("window_"):
                window[name] = getattr(self, name)
                setattr(self, name, zero)
        return window

    def to_dict(self) -> PlainDict:
        """Convert to plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: PlainDict) -> TrainState:
        """Build a state from `to_dict`; missing counters have their defaults.

        Raises:
            ValueError: There is a counter that this version does not know.
        """
        unknown = set(values) - {entry.name for entry in fields(cls)}
        if unknown:
            raise ValueError(
                f"train state: unknown counter {min(unknown)}: it was saved by a newer optrun."
            )
        return cls(**values)


_DIGESTED_BYTES = 32 * 2**10
"""Bytes at either end of a tensor that its digest covers."""


def digest_of_batch(batch: dict[str, torch.Tensor]) -> bytes:
    """Digest a micro-batch, to compare the data of two runs.

    The digest covers name, shape and dtype of each tensor, and its first and last 32 KiB.

    Args:
        batch: Tensors on the CPU.

    Returns:
        A sha256 digest, 32 bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(batch):
        tensor = batch[name]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel():
            # Its bytes: the first ones, and the last ones of the rest, so that none counts twice.
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(content[:_DIGESTED_BYTES])
            digest.update(content[_DIGESTED_BYTES:][-_DIGESTED_BYTES:])
    return digest.digest()


def digest_of_batches(before: str, digests: Iterable[bytes]) -> str:
    """Add the batches of a step to the digest of a run; their order counts.

    Args:
        before: The digest before this step; empty at the start.
        digests: Digests of the step's micro-batches, over all ranks in their order.

    Returns:
        32 hexadecimal digits.
    """
    return hashlib.sha256(before.encode() + b"".join(digests)).hexdigest()[:32]


class RandomStates:
    """A copy of the states of all global generators: Python, NumPy, torch and the device.

    Args:
        device: The device of the model; on CUDA or MPS its generator is copied, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy: PlainDict = np.random.get_state(legacy=False)
        self._torch = {"torch": torch.get_rng_state()}
        if device.type == "cuda":
            self._torch["cuda"] = torch.cuda.get_rng_state(device)
        if device.type == "mps":
            self._torch["mps"] = torch.mps.get_rng_state()

    @classmethod
    def unpack(cls, states: PlainMapping, device: torch.device) -> Self:
        """Read states from `packed`; global generators stay as they are.

        Each state is tried on a new generator first, since a damaged one must not be restored. A
        device that is missing in `states` keeps its present state.

        Raises:
            Exception: Whatever a generator raises for an invalid state.
        """
        unpacked = cls(device)  # the present states, which are replaced one by one

        # 1. Python. `setstate` on a new generator raises for a state that is damaged.
        version, key, gauss_next = states["python"]
        if not isinstance(gauss_next, (float, NoneType)):  # setstate takes anything here
            raise TypeError(f"python: {gauss_next!r} is no number that comes next")
        unpacked._python = (version, tuple(key), gauss_next)
        random.Random().setstate(unpacked._python)

        # 2. NumPy: the position in the key is where the next number is taken from.
        legacy = states["numpy"]
        if not 0 <= legacy["pos"] <= len(legacy["key"]):  # numpy would read outside its memory
            raise ValueError(f"numpy: position {legacy['pos']} of {len(legacy['key'])}")
        unpacked._numpy = {
            "bit_generator": legacy["bit_generator"],
            "state": {"key": np.array(legacy["key"], dtype=np.uint32), "pos": legacy["pos"]},
            "has_gauss": legacy["has_gauss"],
            "gauss": legacy["gauss"],
        }
        np.random.RandomState().set_state(unpacked._numpy)

        # 3. torch, and the device. A state of CUDA or MPS cannot be tried on a machine without it.
        for name in ("torch", "cuda", "mps"):
            if name in states:
                unpacked._torch[name] = _unpack(states[name])
        torch.Generator().set_state(_unpack(states["torch"]))
        return unpacked

    def restore(self) -> None:
        """Set all global generators to these states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch["torch"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._torch["cuda"], self._device)
        if self._device.type == "mps":
            torch.mps.set_rng_state(self._torch["mps"])

    def packed(self) -> PlainDict:
        """Convert the states to JSON values; torch's become base64.

        Keys: `python`, `numpy`, `torch`, and on CUDA or MPS `cuda` or `mps`; see `unpack`.
        """
        version, key, gauss_next = self._python
        legacy = self._numpy
        return {
            **{
                name: base64.b64encode(state.numpy().tobytes()).decode()
                for name, state in self._torch.items()
            },
            "python": [version, list(key), gauss_next],
            "numpy": {
                "bit_generator": legacy["bit_generator"],
                "key": [int(number) for number in legacy["state"]["key"]],
                "pos": int(legacy["state"]["pos"]),
                "has_gauss": int(legacy["has_gauss"]),
                "gauss": float(legacy["gauss"]),
            },
        }


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def seed_random_states(seed: int, device: torch.device) -> None:
    """Seed the global generators of Python, NumPy, torch and the device.

    As `torch.manual_seed`, which costs a millisecond more: it records the call stack for each kind
    of accelerator that is missing (`torch.cuda._lazy_call`).

    Args:
        seed: Below 2**63; NumPy gets its lowest 32 bits.
        device: The device of the model.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_of_micro_batch(seed: int, position: int, number: int) -> int:
    """Compute the seed of the forward pass over a micro-batch, the same on any rank.

    Args:
        seed: Seed of the run.
        position: Steps of data used before this one.
        number: Number of the micro-batch in its step, over all ranks; -1: the optimizer's update.

    Returns:
        A number of 63 bits.
    """
    text = f"{seed}/{position}/{number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
