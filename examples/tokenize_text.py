"""Text files to token ids as `data=tokens` reads them.

Each document with the end-of-text id behind it.

    python examples/tokenize_text.py [FILE ...] [--tokenizer NAME|FOLDER] [--out tokens]

Without files: modules of Python's standard library, every twentieth of them for evaluation. Without
a tokenizer: one that is trained on the files. `recipes/pretrain_tokens.yaml` trains on what is
written.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from optrun.data.long_texts import encode_uncut
from optrun.model.tokenizer import train_tokenizer


def write(out: Path, files: list[Path], tokenizer) -> int:
    """Write the ids of files one after another; only one file is in memory."""
    dtype = (
        np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    )  # the latter is read with data.dtype=uint32
    count = 0
    with out.open("wb") as sink:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            ids = np.append(
                encode_uncut([text], tokenizer, special=False)[0], tokenizer.eos_token_id
            )
            ids.astype(dtype).tofile(sink)
            count += len(ids)
    return count


def main() -> None:
    """Write the tokenizer, `train.bin` and `eval.bin`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--tokenizer", help="hub name or folder; its end-of-text token stands between documents"
    )
    parser.add_argument("--out", type=Path, default=Path("tokens"))
    given = parser.parse_args()
    files = given.files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    given.out.mkdir(parents=True, exist_ok=True)
    if given.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    else:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        tokenizer = train_tokenizer(lambda: iter(texts), vocab_size=2048, kind="stream")
    tokenizer.save_pretrained(given.out / "tokenizer")
    held = files[::20] if len(files) > 1 else files
    for name, part in (
        ("train", [file for file in files if file not in held] or files),
        ("eval", held),
    ):
        count = write(given.out / f"{name}.bin", part, tokenizer)
        print(f"{given.out / name}.bin: {count:,} tokens of {len(part)} files")


if __name__ == "__main__":
    main()
