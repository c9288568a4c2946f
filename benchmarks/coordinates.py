"""The coordinate check over architectures and optimizers: the table of docs/transfer.md.

    python benchmarks/coordinates.py [--out FOLDER] [--only REGEX] [--widths 1,2,4,8] [--seeds 0-1]

Runs `optrun certify transfer` for each pair, base width 64, two layers, four steps, and prints the
largest deviation of
a power over all parameters: initial output / its change / own update. Bold: the check fails.
Certificates that are in the folder already are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from optrun.cli.main import run as optrun

COLUMNS = {
    "AdamW": ["optimizer=adamw"],
    "LAMB": ["optimizer=lamb"],
    "Muon": ["optimizer=muon"],
    "Lion": ["optimizer=lion"],
    "SGD, `lr=1e-3 clip=none`": ["optimizer=sgd", "lr=1e-3", "clip=none"],
    "Adam": ["optimizer=adam", "optimizer.weight_decay=0"],
    "AdamWDL": ["optimizer=adamwdl"],
    "Adamax": ["optimizer=adamax"],
    "LazyAdam": ["optimizer=lazy_adam"],
    "AdEMAMix": ["optimizer=ademamix"],
    "MARS": ["optimizer=mars"],
    "Schedule-Free": ["optimizer=schedule_free"],
}
FIRST = 5
"""Columns of the first table; the others are what goes by Adam's rule beside AdamW."""
SECOND = 7
"""Rows of the second one."""
TEXT = ["model.vocab_size=320", "data.max_length=32"]
UNTIED, TIED = ([f"model.config.tie_word_embeddings={value}"] for value in ("false", "true"))
BERT = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
LLAMA = {**BERT, "num_key_value_heads": 2}


def row(kind: str, grows: dict[str, int], fixed: dict[str, int], *words: str) -> list[str]:
    """Words of a model whose base has the sizes that grow."""
    sizes = [f"model.config.{key}={value}" for key, value in {**grows, **fixed}.items()]
    base = [f"parametrization.base.{key}={value}" for key, value in grows.items()]
    return [
        "model=from_config",
        f"model.model_type={kind}",
        *sizes,
        "parametrization=mup",
        *base,
        *words,
    ]


def rows(folder: str) -> dict[str, list[str]]:
    """Name of a model -> words."""
    layers = {"num_hidden_layers": 2}
    gpt = row("gpt2", {"n_embd": 64, "n_head": 2}, {"n_layer": 2}, *TEXT)
    llama = row("llama", LLAMA, layers, *TEXT)
    bert = row("bert", BERT, layers, "task=masked_lm", *TEXT)
    t5 = row("t5", {"d_model": 64, "num_heads": 2, "d_ff": 128}, {"d_kv": 32, "num_layers": 2})
    t5 += ["task=seq2seq_lm", "data=files", f"data.train={folder}/pairs.jsonl", *TEXT]
    image = ["task=image_classification", "data=files", f"data.train={folder}/images"]
    vit = row("vit", BERT, {**layers, "image_size": 16, "patch_size": 4}, *image)
    return {
        "GPT-2": [*gpt, *UNTIED],
        "Llama": [*llama, *UNTIED],
        "Qwen3": row("qwen3", LLAMA, {**layers, "head_dim": 32}, *TEXT, *UNTIED),
        "Granite, tied": row("granite", LLAMA, layers, *TEXT, *TIED),
        "BERT": [*bert, *UNTIED],
        "ViT": vit,
        "T5, tied": t5,
        "GPT-2, tied": [*gpt, *TIED],
        "Llama, tied": [*llama, *TIED],
        "BERT, tied": [*bert, *TIED],
        "GPT-2, standard": [
            word for word in [*gpt, *UNTIED] if not word.startswith("parametrization")
        ],
    }


def write_data(folder: Path) -> None:
    """Pairs of texts, and images of three colours with some noise, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(400):
            words = [f"w{draw.randrange(60)}" for _ in range(12)]
            file.write(
                json.dumps({"source": " ".join(words), "target": " ".join(words[5::-1])}) + "\n"
            )
    for number in range(60):
        path = folder / "images" / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shades = [
            40 + 80 * ((number + place) % 3 == 0) + draw.randrange(60)
            for place in range(3 * 16 * 16)
        ]
        Image.frombytes("RGB", (16, 16), bytes(shades)).save(path)


def deviations(check: dict[str, Any]) -> str:
    """The deviation that is largest, of each measure."""
    found = []
    for measure in ("initial", "change", "update"):
        judged = [
            line
            for line in check["lines"]
            if line["measure"] == measure and line["expected"] is not None
        ]
        off = [max(line["slope"] - line["expected"], 0) for line in judged]
        off += [min(line["slope"] - line["expected"] + line["below"], 0) for line in judged]
        found.append(f"{max(off, key=abs):+.2f}")
    text = " / ".join(found)
    return f"**{text}**" if any(line["fails"] for line in check["lines"]) else text


def cell(words: list[str], path: Path) -> str:
    """Check one pair, unless its certificate is there."""
    if not path.exists():
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as told,
        ):
            code = optrun(["certify", "transfer", *words, "--out", str(path)])
        if code not in (0, 1):
            return f"refused: {told.getvalue().strip().splitlines()[0]}"
    return deviations(json.loads(path.read_text(encoding="utf-8"))["checks"][0])


def main() -> None:
    """Check and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "coordinates")
    parser.add_argument("--only", default="", metavar="REGEX", help="of `MODEL, OPTIMIZER`")
    parser.add_argument("--widths", default="1,2,4,8")
    parser.add_argument("--seeds", default="0-1")
    given = parser.parse_args()
    write_data(given.out)
    models, names = rows(str(given.out)), list(COLUMNS)
    for columns, kinds in ((names[:FIRST], list(models)), (names[FIRST:], list(models)[:SECOND])):
        lines = [f"| model | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
        for model in kinds:
            cells, words = [], models[model]
            for column in columns:
                pair = f"{model}, {column}"
                path = given.out / f"{re.sub(r'[^a-z0-9]+', '_', pair.lower())}.json"
                asked = [*words, *COLUMNS[column], f"widths={given.widths}", f"seeds={given.seeds}"]
                cells.append(
                    cell(asked, path) if re.search(given.only, pair, re.IGNORECASE) else "–"
                )
                print(pair, cells[-1], flush=True)
            lines.append(f"| {model} | {' | '.join(cells)} |")
        print("\n" + "\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
