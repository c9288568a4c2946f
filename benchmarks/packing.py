"""Tokens a second with and without packing, and what the borders between documents cost.

    python benchmarks/packing.py [--repeats 5] [--steps 40]

Runs of one command each, in turns, in processes of their own; tokens are those of the rows, without
padding, and the first ten steps are left out. Chats: `sft_tiny` in packed blocks, and in padded
batches of as many rows.
Text: blocks of the standard library, with and without `task.document_masking`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ratios import cells, over

ROOT = Path(__file__).resolve().parents[1]
BATCH = 16
CHATS = ["-cn", "sft_tiny", "task.sample_tokens=0"]
TEXT = ["task.sample_tokens=0"]
ALONE = [
    "training.eval_steps=100000",
    "checkpoint=none",
    "data.max_eval_examples=8",
    "training.logging_steps=10",
]


def summary(folder: Path, steps: int, *words: str) -> dict[str, dict[str, float]]:
    """Train for some steps.

    What the run says of itself, and its tokens a second in their middle under `speed`.
    """
    command = [
        sys.executable,
        "-m",
        "optrun",
        *words,
        *ALONE,
        f"training.max_steps={steps}",
        f"hydra.run.dir={folder}",
    ]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    subprocess.run(command, check=True, env=env, capture_output=True)
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    speeds = [
        line["perf/tokens_per_second"]
        for line in lines
        if line["step"] > 10 and "perf/tokens_per_second" in line
    ]
    told: dict[str, dict[str, float]] = json.loads(
        (folder / "summary.json").read_text(encoding="utf-8")
    )
    return {**told, "speed": {"middle": sorted(speeds)[len(speeds) // 2]}}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        blocks = summary(place / "blocks", 20, *CHATS)["data"]["train_examples"]
        rows = summary(place / "rows", 20, *CHATS, "task.packing=false")["data"]["train_examples"]
        batch = round(BATCH * rows / blocks)
        padded = ["task.packing=false", f"training.per_device_train_batch_size={batch}"]
        pairs = {
            f"chats, packed, by batches of {batch} padded rows": ([*CHATS], [*CHATS, *padded]),
            "text, documents apart, by plain blocks": ([*TEXT, "task.document_masking=true"], TEXT),
        }
        print("| tokens a second | ratio | middle half |\n| --- | --- | --- |")
        for title, ways in pairs.items():
            found: tuple[list[float], list[float]] = ([], [])
            for turn in range(given.repeats):
                for which in (0, 1) if turn % 2 else (1, 0):
                    folder = place / f"{turn}-{which}-{title[:4]}"
                    found[which].append(
                        summary(folder, given.steps, *ways[which])["speed"]["middle"]
                    )
            print(f"| {title} | {cells(over(*found))} |", flush=True)


if __name__ == "__main__":
    main()
