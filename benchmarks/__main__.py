"""Everything that docs/performance.md has a table of, in one run.

    python -m benchmarks [--write] [--only step,start] [--rounds 3]

Each part is a program beside this file and runs in a process of its own, one after another; it
prints a table of ratios within that part, with their spread. `--write` puts the tables into
docs/performance.md. Packages to compare with are measured where they are installed (`pip install
timm pytorch_optimizer accelerate trl sentence-transformers`), and so is a GPU where there is one.
The table of a part that fails stays as it was, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from optrun.artifacts.provenance import hardware, versions

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PARTS = {
    "step": "optimizer_step.py --rounds {rounds}",
    "host": "host_cost.py",
    "drift": "optimizer_step.py --drift 10000",
    "vocabulary": "chunked_loss.py",
    "peers": "peers.py --repeats {rounds}",
    "start": "start.py --repeats {rounds}",
    "text": "text.py --sizes 10,100",
    "loop": "loop.py --steps 150 --repeats 15",
    "save": "checkpoint_stall.py --mib 192 --repeats {rounds}",
    "shards": "sharded_save.py --mib 192 --repeats {rounds}",
}
"""Name of a table -> the program that prints it."""


def machine() -> str:
    """Processor, cores, GPU, and versions of what computes."""
    here, used = hardware("cpu", 1), versions()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    computes = ", ".join(f"{name} {used[name]}" for name in ("python", "torch", "transformers"))
    return f"{here['processor']}, {here['cores']} cores, {gpu}; {computes}"


def table(words: str) -> str | None:
    """Print what a part prints, as it comes, and return the table it ends with.

    None where it failed.
    """
    print(f"\n## {words}\n", flush=True)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-u", *shlex.split(f"benchmarks/{words}")]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return last_table(lines) if process.returncode == 0 else None


def last_table(lines: list[str]) -> str:
    """The table that ends what a part printed, with the line that stands over it, a blank one
    between.

    Example:
        >>> last_table(["step 1", "", "Two rounds.", "", "| a |", "| --- |", ""])
        'Two rounds.\n\n| a |\n| --- |'
    """
    stripped = "\n".join(line.rstrip() for line in lines).rstrip().split("\n")
    begin = len(stripped)
    while begin and stripped[begin - 1].startswith("|"):
        begin -= 1
    headed = begin > 1 and not stripped[begin - 1] and stripped[begin - 2]
    return "\n".join(stripped[begin - 2 if headed else begin :])


def write(name: str, text: str) -> None:
    """Put a table between the two marks that carry its name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def parts(text: str) -> list[str]:
    """Names of parts, separated by commas."""
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}.")
    return names


def main() -> int:
    """Run the parts; returns 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=parts, default=list(PARTS), metavar="NAME,NAME", help=", ".join(PARTS)
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    given = parser.parse_args()
    print(machine())
    failed = []
    for name in given.only:
        words = PARTS[name].format(rounds=given.rounds)
        begun = time.perf_counter()
        found = table(words)
        print(f"({time.perf_counter() - begun:.0f} s)")
        if found is None:
            failed.append(name)
        elif given.write:
            write(name, f"`python benchmarks/{words}`; {machine()}.\n\n{found}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
