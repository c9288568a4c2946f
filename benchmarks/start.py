"""What a start of optrun costs beyond its libraries, beside a program of one step by hand and
by transformers.Trainer.

    python benchmarks/start.py [--repeats 3]

CPU seconds of whole processes, on one thread each, over those of a process that imports torch,
transformers and the module of the model alone. Each start takes its turn in every repeat; what only
the first start of all does (the token cache) is left out. One step of the default run is evaluated,
published and drawn; the programs beside it train one step of the same model and save it.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from ratios import cells, over

ROOT = Path(__file__).resolve().parents[1]
BARE = "import torch, transformers\nfrom transformers.models.gpt2 import modeling_gpt2\n"
MODEL = """
config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=512, n_positions=128)
model = modeling_gpt2.GPT2LMHeadModel(config)
tokens = torch.randint(512, (8, 128))
"""
BY_HAND = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
model.save_pretrained("by_hand")
"""
BY_TRAINER = """
arguments = transformers.TrainingArguments(
    "by_trainer", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
)
rows = [{"input_ids": row, "labels": row} for row in tokens]
trainer = transformers.Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.save_model()
"""
TO_FIRST_STEP = """
import os
from optrun.training.loop import Loop
step = Loop._step
Loop._step = lambda loop: (step(loop), os._exit(0))
from optrun.cli.main import run
run(["training.max_steps=1", "data.eval_fraction=0"])
"""


def starts() -> dict[str, list[str]]:
    """Name of a start -> words after `python`."""
    optrun = ["-m", "optrun"]
    return {
        "imports alone": ["-c", BARE],
        "TAB": [*optrun, "-sc", "query=bash"],
        "`optrun --help`": [*optrun, "--help"],
        "`optrun --cfg job`": [*optrun, "--cfg", "job"],
        "`optrun explain`": [*optrun, "explain"],
        "to the end of the first step, without evaluation": ["-c", TO_FIRST_STEP],
        "`optrun training.max_steps=1`": [*optrun, "training.max_steps=1"],
        "one step by hand": ["-c", BARE + MODEL + BY_HAND],
        "one step by transformers.Trainer": ["-c", BARE + MODEL + BY_TRAINER],
    }


def cpu_seconds(words: list[str], folder: str) -> float:
    """User and system time of a process and those it started."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # bytecode as installed packages have it
        "OPTRUN_CACHE": f"{folder}/cache",
        "COMP_LINE": "optrun optimizer=la",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"{words} ended with {done.returncode}:\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in starts()}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.repeats + 1):
            for name, words in starts().items():
                spent = cpu_seconds(words, folder)
                if turn:  # the first makes caches, of tokens and of compiled Python
                    seconds[name].append(spent)
    bases = seconds["imports alone"]
    base = sorted(bases)[len(bases) // 2]
    print(f"1.00 is {base:.1f} CPU seconds; {given.repeats} repeats.\n")
    print("| a start | CPU time over imports | middle half |\n| --- | --- | --- |")
    for name, spent in seconds.items():
        print(f"| {name} | {cells(over(spent, bases))} |")


if __name__ == "__main__":
    main()
