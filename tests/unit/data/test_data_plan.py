"""Examples of like length share a step, each once an epoch, by seed and epoch alone."""

from __future__ import annotations

import numpy as np

from optrun.data.loader import EpochPlan


def test_group_by_length() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, size=1001)
    plain = EpochPlan(examples=1001, batch_size=4, accumulation=2, seed=1)
    grouped = EpochPlan(examples=1001, batch_size=4, accumulation=2, seed=1, lengths=lengths)
    order = grouped.order(0)
    assert sorted(order) == list(range(1001))
    assert (order == grouped.order(0)).all()
    assert (order != grouped.order(1)).any()

    def padded(plan: EpochPlan) -> int:
        steps = [plan.order(0)[begin : begin + 8] for begin in range(0, 1001, 8)]
        return sum(int(lengths[step].max()) * len(step) for step in steps)

    assert padded(grouped) < 1.1 * lengths.sum() < 0.8 * padded(plain)
    first = [float(lengths[step].mean()) for step in order[:1000].reshape(-1, 8)]
    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.3, (
        "long and short steps come mixed"
    )
