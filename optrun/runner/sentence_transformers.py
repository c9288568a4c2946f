"""Write the files that sentence-transformers needs to load a model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from optrun.task.pooling import Pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_modules(folder: Path, model: PreTrainedModel, max_length: int) -> None:
    """Write `modules.json` and the module configurations of sentence-transformers.

    With them `SentenceTransformer(folder)` computes the embeddings of training. The modules are the
    transformer, its pooling, and normalization if the model was trained so.

    Args:
        folder: A folder with the model and its tokenizer.
        model: A model trained by `task=embedding`.
        max_length: Largest number of tokens of a text.
    """
    import transformers

    pooling = Pooling.from_config(model.config)
    names = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{name}" if at else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for at, name in enumerate(names)
    ]
    width = int(model.config.get_text_config().hidden_size)
    modes = {
        "pooling_mode_cls_token": pooling.mode == "cls",
        "pooling_mode_mean_tokens": pooling.mode == "mean",
        "pooling_mode_lasttoken": pooling.mode == "last",
    }
    versions = {"transformers": transformers.__version__, "pytorch": torch.__version__}
    files: dict[str, object] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": versions,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {"word_embedding_dimension": width, **modes},
    }
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir(exist_ok=True)
    for path, values in files.items():
        (folder / path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
