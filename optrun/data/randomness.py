"""Randomness of the data, by counter.

Every draw is a function of the seed and of what is drawn, never of what was drawn before. So a
resumed run, another number of workers, or an evaluation in between changes nothing; the global
torch generator belongs to the model alone.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, stream: str, *counters: int) -> np.random.Generator:
    """Make a generator of its own for one purpose and one place.

    Args:
        seed: The run's seed.
        stream: What is drawn: "order", "mask", "split", ...
        counters: Where: epoch, example index, ...; each 0 or more. Use one number of counters for
            each stream: SeedSequence pads with zeros, so that `generator(0, "mask", 5)` and
            `generator(0, "mask", 5, 0)` draw the same.

    Returns:
        Philox (Salmon et al. 2011) keyed by all of them.

    Example:
        >>> a, b = generator(0, "order", 1), generator(0, "order", 1)
        >>> bool((a.permutation(9) == b.permutation(9)).all())
        True
    """
    word = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, word, *counters])))
