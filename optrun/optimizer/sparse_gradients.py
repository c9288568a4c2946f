"""Sparse gradients between ranks: which layouts can reduce them."""

from __future__ import annotations

from torch import nn

from optrun.base.errors import ConfigError


def refuse_sparse_gradients(model: nn.Module, distributed: str, device_type: str = "cpu") -> None:
    """Refuse a model with sparse gradients if its ranks cannot reduce them.

    Only `ddp` on a CPU can, by gloo: each rank gets all rows that a rank has used. FSDP2 shards
    gradients as dense tensors, and NCCL has no sparse reduction. Call this before the model is
    sharded.

    Args:
        model: Its embeddings with `sparse=True` that train are found.
        distributed: The choice, `none`, `ddp` or `fsdp`.
        device_type: Type of the parameters' device.

    Raises:
        ConfigError: Naming the parameter and what to set.

    Example:
        >>> refuse_sparse_gradients(nn.Embedding(4, 2, sparse=True), "ddp")
        >>> refuse_sparse_gradients(nn.Embedding(4, 2), "fsdp")
    """
    if distributed == "none" or (distributed == "ddp" and device_type == "cpu"):
        return
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            who = "FSDP2" if distributed == "fsdp" else f"DistributedDataParallel on {device_type}"
            raise ConfigError(
                f"distributed={distributed}: {f'{name}.weight'.lstrip('.')} has sparse gradients"
                f" (torch.nn.{type(module).__name__} with sparse=True), which {who} cannot reduce."
                " Set sparse=False, with which every row is updated at every step, or train with"
                " distributed=ddp on the CPU."
            )
