"""Time and memory of a start on a text file, cold and warm, beside `datasets.map` and a bare
loop over `tokenizers`.

    python benchmarks/text.py [--sizes 10,100,1000] [--without optrun|tokenizers|datasets.map ...]

The file holds the source of the standard library again and again, each time with other numbers in
it. Each way runs in a process of its own; its seconds are those after all imports, its memory is
the most that one of its processes had. All use the same byte-level BPE of 8,192 entries. The bare
loop encodes parts of 64 KB, 32 at a time, in the threads of
`tokenizers`; `datasets.map` encodes lines in a process a core; both write the ids and look at the
text no further. optrun's start reads the file, looks for bytes that are no text, digests, holds
back the end, tokenises it as one document, and prepares blocks and a model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8192
WAYS = ("optrun", "tokenizers", "datasets.map")

START = """
import json, resource, sys, time
import torch, transformers, datasets, pyarrow
from transformers.models.gpt2 import modeling_gpt2
from optrun.config import overrides, store
from optrun.data import examples
from optrun.runner.prepare import prepare
words = ["data=files", f"data.train={sys.argv[1]}", f"model.tokenizer={sys.argv[2]}",
         "data.max_length=1024", "model.config.n_layer=2", "model.config.n_embd=64",
         "model.config.n_head=2"]
hydra = store.open_hydra()
config = store.typed(store.without_hydra(store.compose(hydra, "config",
                     overrides.parse_checked(hydra, "config", words, sweep=False))))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_ids = examples.write_ids
spent = [0.0]
def timed(*arguments):
    begun = time.process_time()
    write_ids(*arguments)
    spent[0] += time.process_time() - begun
examples.write_ids = timed
begun = time.perf_counter()
prepared = prepare(config)
fingerprint = prepared.task.train.fingerprint()
seconds = time.perf_counter() - begun
splits = (prepared.task.train, *prepared.task.eval_sets.values())
tokens = sum(int(split.lengths.sum()) for split in splits)
print(json.dumps({"seconds": seconds, "encoding": spent[0], "tokens": tokens, "before": before}))
"""
BARE = """
import json, sys, time
import numpy, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[2] + "/tokenizer.json")
begun, tokens = time.perf_counter(), 0
with open(sys.argv[1], encoding="utf-8") as text, open(sys.argv[3], "wb") as out:
    while parts := list(filter(None, ("".join(text.readlines(1 << 16)) for _ in range(32)))):
        for encoding in tokenizer.encode_batch(parts, add_special_tokens=False):
            ids = numpy.array(encoding.ids, dtype=numpy.uint16)
            ids.tofile(out)
            tokens += len(ids)
seconds = time.perf_counter() - begun
print(json.dumps({"seconds": seconds, "encoding": time.process_time(), "tokens": tokens}))
"""
MAP = """
import json, os, sys, time
import datasets, transformers
datasets.disable_progress_bars()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[2])
begun = time.perf_counter()
rows = datasets.load_dataset("text", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
def spent():
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(who)[:2]) for who in processes)
between = spent()
made = rows.map(lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]}, batched=True,
                num_proc=os.cpu_count(), remove_columns=["text"])
ended, encoding = time.perf_counter(), spent() - between
batches = made.with_format("numpy").iter(1000)
tokens = sum(len(ids) for batch in batches for ids in batch["input_ids"])
print(json.dumps({"seconds": ended - begun, "encoding": encoding, "tokens": tokens}))
"""
TOKENIZER = f"""
import sys
from optrun.model.tokenizer import train_tokenizer
text = open(sys.argv[1], encoding="utf-8").read()
tokenizer = train_tokenizer(lambda: iter([text]), vocab_size={VOCABULARY}, kind="stream")
tokenizer.save_pretrained(sys.argv[2])
"""


def write_corpus(path: Path, size: int) -> None:
    """Write a text of `size` bytes or a little more.

    The standard library, its numbers changed from round to round.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    written, turn = 0, 0
    with path.open("w", encoding="utf-8") as out:
        while written < size:
            for number, text in enumerate(texts):
                written += out.write(f"# file {number} of round {turn}\n{_raised(text, turn)}\n")
                if written >= size:
                    break
            turn += 1


def _raised(text: str, by: int) -> str:
    """A text with every number raised."""
    return re.sub(r"\d+", lambda found: str(int(found[0][:9]) + by), text) if by else text


def measured(program: str, *words: str, folder: str) -> dict[str, float]:
    """What a program prints, with the most memory that one of its processes had, in MB."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "OPTRUN_CACHE": f"{folder}/cache",
        "TOKENIZERS_PARALLELISM": "true",
    }
    code = (
        "import resource\n"
        + program
        + "\nimport sys\nwho = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)"
        "\nsys.stdout.write('%d' % max(resource.getrusage(one).ru_maxrss for one in who))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"a program ended with {done.returncode}:\n{done.stderr}")
    *_, told, memory = done.stdout.strip().splitlines()
    return {**json.loads(told), "memory": int(memory) / 1024}


def rows(megabytes: int, folder: str, without: list[str]) -> list[str]:
    """Measure one size, without some of the ways."""
    corpus, tokenizer = f"{folder}/corpus-{megabytes}.txt", f"{folder}/tokenizer"
    write_corpus(Path(corpus), megabytes * 1_000_000)
    if not Path(tokenizer).is_dir():
        measured(TOKENIZER + "\nprint('{}')", corpus, tokenizer, folder=folder)
    ways = {
        ("optrun", "optrun, cold"): (START, corpus, tokenizer),
        ("optrun", "optrun, warm"): (START, corpus, tokenizer),
        ("tokenizers", "`tokenizers` alone"): (BARE, corpus, tokenizer, f"{folder}/bare.bin"),
        ("datasets.map", "`datasets.map`"): (MAP, corpus, tokenizer, f"{folder}/map-{megabytes}"),
    }
    found = []
    for (way, name), (program, *words) in ways.items():
        if way in without:
            continue
        one = measured(program, *words, folder=folder)
        speed = f"{one['tokens'] / one['encoding'] / 1e3:.0f}" if one["encoding"] else "–"
        row = (
            f"| {megabytes:,} MB | {name} | {one['seconds']:.1f} | {speed} | {one['memory']:,.0f} |"
        )
        print(row, flush=True)
        found.append(row)
    Path(corpus).unlink()
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="10,100,1000", help="megabytes, separated by commas")
    parser.add_argument("--without", nargs="+", choices=WAYS, default=[], help="ways to leave out")
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        table = [row for size in sizes for row in rows(size, folder, given.without)]
    print(
        f"\n{VOCABULARY:,} entries, {os.cpu_count()} cores; imports alone take some 500 MB of"
        " memory.\n"
    )
    print(
        "| text | way | seconds | thousand tokens per CPU second of tokenising | peak memory, MB |"
    )
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(table))


if __name__ == "__main__":
    main()
