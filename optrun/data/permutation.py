"""A permutation of any number of indices that is never written down.

Each place is computed when it is asked for.
"""

from __future__ import annotations

import math

import numpy as np

from optrun.data.randomness import generator

LARGE = 1 << 22
"""Indices up to which a permutation is drawn and kept: it takes a second and 32 MB.

Checkpoints rely on the number.
"""
_ROUNDS = 8
_MIX = tuple(np.uint64(number) for number in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class KeyedPermutation:
    """A permutation of `range(size)` by seed and purpose, in no memory.

    A Feistel network over pairs (left, right) of residues modulo a and b with ab >= size: in turn
    left += f(right) modulo a and right += g(left) modulo b, eight times, every f and g the
    finalizer of SplitMix64 under its own key. Every round can be undone, so the whole is a
    permutation of the pairs; one that lands beyond `size` goes on until it is below.

    Source: Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", the generalized Feistel
    construction and cycle walking; Steele, Lea & Flood 2014, SplitMix64.

    Args:
        size: How many indices; up to 2**62.
        seed: The run's seed.
        stream: What is drawn, such as "order".
        counters: Where, such as the epoch; each 0 or more.

    Example:
        >>> order = KeyedPermutation(5, 0, "order", 1)
        >>> sorted(order[0:5].tolist()), len(order)
        ([0, 1, 2, 3, 4], 5)
    """

    def __init__(self, size: int, seed: int, stream: str, *counters: int) -> None:
        self._size = size
        self._left = max(1, math.isqrt(max(size - 1, 0)) + 1)
        self._right = max(1, -(-size // self._left))
        self._keys = generator(seed, stream, *counters).integers(
            0, 2**63, size=_ROUNDS, dtype=np.uint64
        )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """Which index stands at each place; shape (places,), int64."""
        wanted = (
            np.arange(*places.indices(self._size))
            if isinstance(places, slice)
            else np.asarray(places)
        )
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= self._size):
            raise IndexError(
                f"places from 0 to {self._size - 1} are there, not {wanted.min()} to"
                f" {wanted.max()}."
            )
        found = self._once(wanted.astype(np.uint64))
        while (beyond := found >= self._size).any():
            found[beyond] = self._once(found[beyond])
        return found.astype(np.int64)

    def _once(self, places: np.ndarray) -> np.ndarray:
        right, left = np.divmod(places, np.uint64(self._left))
        for turn, key in enumerate(self._keys):
            if turn % 2 == 0:
                left = (left + _mixed(right ^ key) % np.uint64(self._left)) % np.uint64(self._left)
            else:
                right = (right + _mixed(left ^ key) % np.uint64(self._right)) % np.uint64(
                    self._right
                )
        out: np.ndarray = right * np.uint64(self._left) + left
        return out


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix by SplitMix64's finalizer; multiplication wraps around."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
