"""What a run on ranks imports: read once by the fork server of `preloaded.py`. Nothing is computed here, since threads
of a pool would not survive the fork."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read while torch is imported; see `optrun.commands.rank.begin`

import datasets
import matplotlib.pyplot
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor
import torch.nn.parallel
import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2

import optrun.commands.rank
import optrun.commands.resume
import optrun.commands.run_here
import optrun.commands.sweep
import optrun.commands.train
import optrun.runner.console
import optrun.runner.follow
import optrun.runner.train
import optrun.task.causal_lm
from optrun.config import store

store.register_schemas()
