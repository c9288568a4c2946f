"""Small models whose parameters are to be grouped."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn


class Block(nn.Module):
    """A block as transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.ln = nn.LayerNorm(width)


class Tiny(nn.Module):
    """Embeddings, a stack of blocks, a norm, a head, and a number."""

    def __init__(self, depth: int = 3, width: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.final = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 10)
        self.temperature = nn.Parameter(torch.ones(()))
        if tied:
            self.classifier.weight = self.embed.weight


def by_name(groups: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """The value of a key for every parameter."""
    return {name: group.get(key) for group in groups for name, _ in group["params"]}


def bert(**options: Any) -> nn.Module:
    """A classifier of three blocks, shapes alone."""
    config = transformers.BertConfig(num_hidden_layers=3, **options)
    with torch.device("meta"):
        model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def on_meta(name: str, **options: Any) -> nn.Module:
    """Any architecture of transformers, shapes alone."""
    config = transformers.CONFIG_MAPPING[name](**options)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModel.from_config(config)
    return model
