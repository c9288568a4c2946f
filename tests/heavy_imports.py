"""What ranks import: once, by the fork server of `preloaded.py`.

Nothing is computed, since threads do not survive a
fork."""

import importlib
import os

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # read with torch; `optrun.launch.rank.begin` comes too late

for _module in (
    "datasets",
    "matplotlib.pyplot",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.debug",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "optrun.launch.rank",
    "optrun.cli.resume",
    "optrun.launch.run_here",
    "optrun.cli.train",
    "optrun.runner.console",
    "optrun.runner.train",
    "optrun.task.causal_lm",
    "optrun.testing",
    "tests.optimizer_cases",
):
    importlib.import_module(_module)

importlib.import_module("optrun.config.store").register_schemas()
