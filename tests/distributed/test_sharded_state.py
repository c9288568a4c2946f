"""Optimizer state by name under shards: whole tensors and DTensors go in, without communication."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from optrun.optimizer import Lamb
from optrun.optimizer.state import load_named_state, named_state
from tests.ranks import run_ranks


def lamb(placements: tuple[Shard | Replicate, ...] | None) -> Lamb:
    """Over an uneven matrix and a bias of one element, so that a rank holds an empty shard."""
    mesh = init_device_mesh("cpu", (2,))
    values = {
        "weight": torch.arange(15, dtype=torch.float32).reshape(5, 3),
        "bias": torch.ones(1, dtype=torch.bfloat16),
    }
    params = {
        name: Parameter(value if placements is None else distribute_tensor(value, mesh, placements))
        for name, value in values.items()
    }
    for param in params.values():
        param.grad = torch.ones_like(param)
    return Lamb(params.items(), lr=0.1)


def loaded_in_any_form(_rank: int) -> None:
    whole, sharded = lamb(None), lamb((Shard(0),))
    whole.step()
    sharded.step()
    tensors, meta = named_state(whole)
    pieces, _ = named_state(sharded)
    meta = json.loads(json.dumps(meta))
    for given in (tensors, pieces):
        fresh = lamb((Shard(0),))
        with CommDebugMode() as communication:
            load_named_state(fresh, given, meta)
        assert communication.get_total_counts() == 0
        for key, value in named_state(fresh)[0].items():
            assert isinstance(value, DTensor)
            assert value.placements == (Shard(0),)
            assert value.dtype == torch.float32, "moments of bfloat16 parameters stay float32"
            assert torch.equal(value.to_local(), pieces[key].to_local())  # type: ignore[attr-defined]
            assert torch.equal(value.full_tensor(), tensors[key])
            assert value.to_local().untyped_storage().nbytes() == value.to_local().nbytes, (
                "nothing whole is held"
            )
            assert value is not given[key]
    by_torchs_layout = lamb((Shard(0),))
    by_torchs_layout.load_state_dict(whole.state_dict())
    for key, value in named_state(by_torchs_layout)[0].items():
        assert torch.equal(value.to_local(), pieces[key].to_local())  # type: ignore[attr-defined]


def refused_in_other_forms(_rank: int) -> None:
    sharded, replicated = lamb((Shard(0),)), lamb((Replicate(),))
    sharded.step()
    tensors, meta = named_state(sharded)
    for other in (lamb(None), replicated):
        with pytest.raises(
            ValueError, match=r"'exp_avg' of parameter 'weight' is sharded as .*Shard\(dim=0\)"
        ):
            load_named_state(other, tensors, meta)
        assert not other.state, "nothing is changed where it refuses"


def test_state_is_loaded_whole_or_in_shards(tmp_path: Path) -> None:
    run_ranks(tmp_path, loaded_in_any_form)


def test_state_on_other_ranks_than_its_parameter_is_refused(tmp_path: Path) -> None:
    run_ranks(tmp_path, refused_in_other_forms)
