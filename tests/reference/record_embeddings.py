"""Record what sentence-transformers computes.

PYTHONPATH=IT python -m tests.reference.record_embeddings.

Its losses of fixed vectors with their gradients, and its embeddings of texts by folders that optrun
writes.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from optrun.runner.sentence_transformers import write_modules
from optrun.task.pooling import Pooling

FILE = Path(__file__).parent / "embeddings" / "recorded.json"
ROWS, TEXTS, WIDTH = 6, 3, 8
SCORES = [0.0, 0.2, 0.4, 0.4, 0.9, 1.0]
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "anna",
    "went",
    "to",
    "paris",
]
SAID = ["the cat sat on a mat", "anna went to paris while the cat sat", "a mat", "the dog"]
POOLINGS = [("mean", True), ("cls", False), ("last", True)]
LONGEST = 8


def vectors() -> torch.Tensor:
    """Fixed ones, whatever torch draws today; shape (rows, texts, width)."""
    count = ROWS * TEXTS * WIDTH
    return (
        torch.sin(torch.arange(1, count + 1, dtype=torch.float64) ** 2)
        .float()
        .reshape(ROWS, TEXTS, WIDTH)
    )


def write_folder(folder: Path, mode: str, *, normalize: bool, left: bool = False) -> None:
    """Write a small model with fixed weights, and how it is pooled."""
    kind = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    kind.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    kind.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    side = "left" if left else "right"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind, padding_side=side, **names)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)).eval()
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(
                torch.sin(number + torch.arange(param.numel(), dtype=torch.float64)).reshape(
                    param.shape
                )
                / 2
            )
    Pooling(mode, normalize).store_in(model.config)
    tokenizer.save_pretrained(str(folder))
    model.save_pretrained(str(folder))
    write_modules(folder, model, LONGEST)


def losses() -> dict[str, Any]:
    """Value and gradient of each loss."""
    theirs: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    triplet: Any = importlib.import_module(f"{theirs.__name__}.triplet")
    scores = torch.tensor(SCORES)
    made = {
        "multiple_negatives_ranking": (theirs.MultipleNegativesRankingLoss(None, scale=20.0), 3),
        "multiple_negatives_ranking of pairs": (
            theirs.MultipleNegativesRankingLoss(None, scale=5.0),
            2,
        ),
        "multiple_negatives_symmetric_ranking": (
            theirs.MultipleNegativesSymmetricRankingLoss(None, scale=20.0),
            3,
        ),
        "cosine_similarity": (theirs.CosineSimilarityLoss(None), 2),
        "cosent": (theirs.CoSENTLoss(None, scale=20.0), 2),
        **{
            f"triplet {name}": (
                theirs.TripletLoss(None, getattr(triplet.TripletDistanceMetric, name.upper()), 1.0),
                3,
            )
            for name in ("cosine", "euclidean", "manhattan")
        },
    }
    found = {}
    for name, (loss, texts) in made.items():
        given = vectors().requires_grad_()
        value = loss.compute_loss_from_embeddings([given[:, at] for at in range(texts)], scores)
        value.backward()
        assert given.grad is not None
        found[name] = {"loss": value.item(), "gradient": given.grad.flatten().tolist()}
    return found


def embeddings() -> dict[str, Any]:
    """What it makes of texts by each folder, padded on either side."""
    theirs: Any = importlib.import_module("sentence_transformers")
    found = {}
    for mode, normalize in POOLINGS:
        for left in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                write_folder(Path(folder), mode, normalize=normalize, left=left)
                model = theirs.SentenceTransformer(folder, device="cpu")
                assert model.max_seq_length == LONGEST
                found[f"{mode} {'left' if left else 'right'}"] = model.encode(SAID).tolist()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    version = importlib.import_module("sentence_transformers").__version__
    recorded = {"sentence_transformers": version, "losses": losses(), "embeddings": embeddings()}
    FILE.write_text(json.dumps(recorded) + "\n", encoding="utf-8")
