"""Find out whether each step of a run waits for its loss before the update, and why."""

from torch.optim import Optimizer

from optrun.config import registry
from optrun.config.schema.distributed import FsdpConfig
from optrun.config.schema.run import RunConfig
from optrun.model.attention import device_type
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.torch_named import Adam, AdamW


def reason_to_wait(config: RunConfig, optimizer: Optimizer) -> str | None:
    """Explain why the update of each step waits for its loss and gradient norm.

    None: it does not wait; they are read while the next step runs. The rules are those of
    `TrainStep.reason_to_wait` and `Hooks.reason_to_wait`, without building either: a callback may
    need the loss of each step before the next one begins; and on a GPU only some kernels can leave
    an update out by themselves if the loss or norm is not finite. On a CPU nothing has to be waited
    for: values are there once they are computed.
    """
    # 1. Callbacks of the user; their classes tell, no instance is built.
    rows = registry.choices("callback")
    for name in config.callbacks:
        callback = rows[name].load()
        if getattr(callback, "accepts_late_results", False):
            continue
        on_step = getattr(callback, "on_step", None)
        # The base class `Callback` has an `on_step` that does nothing. Its module is compared by
        # name, since explain may not import training.
        if on_step is not None and on_step.__module__ != "optrun.training.callback":
            return f"callbacks.{name}: its on_step receives the loss of each step"

    # 2. The kernels of the optimizer.
    device = device_type(config.training.device)
    is_sharded = isinstance(config.distributed, FsdpConfig)
    if device == "cpu" or (device == "cuda" and _skips_on_cuda(optimizer, is_sharded=is_sharded)):
        return None
    return (
        f"optimizer={config.optimizer.name}: only torch's fused Adam and AdamW and optrun's Triton"
        " kernels need no wait here"
    )


def _skips_on_cuda(optimizer: Optimizer, *, is_sharded: bool) -> bool:
    """Tell whether all groups have CUDA kernels that can skip a step with non-finite numbers.

    These are torch's fused Adam and AdamW, and optrun's Triton kernels on unsharded tensors.
    """
    groups = optimizer.param_groups
    # 1. An optimizer of optrun: the kernel that each group would take on a GPU.
    if isinstance(optimizer, BatchOptimizer):
        kernels = [optimizer.FORMULA.kernel(group, "cuda") for group in groups]
        return not is_sharded and all(kernel == "triton" for kernel in kernels)

    # 2. An optimizer of torch.
    if not isinstance(optimizer, Adam | AdamW):
        return False
    # `fused=None` means fused on a GPU, unless `foreach` is true.
    return not any(group["foreach"] or group["fused"] is False for group in groups)
