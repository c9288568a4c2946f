"""Plant a sample of small bugs and say which of them the tests find.

    python -m tests.mutation --count 60 --report mutants.jsonl optrun/optimizer --
    tests/unit/optimizer

Sample and order follow from the seed. A mutant is killed where a test fails or the time is up. What
survives is either
a gap in the tests or an equivalent: code that means the same. Code outside of functions is left
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.mutants import sample
from tests.mutation.runner import MutationPlugin

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run the tool; 0 where nothing survived."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "places", nargs="+", help="files or folders of the package; after `--`: tests"
    )
    parser.add_argument("--count", type=int, default=60, help="mutants, evenly drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one mutant")
    parser.add_argument(
        "--report", type=Path, default=Path("mutants.jsonl"), help="a line for each; is added to"
    )
    parser.add_argument("--only", type=Path, help="a report: plant only what survived there")
    given = parser.parse_args(words[:cut])
    files = [str(p.relative_to(ROOT)) for place in given.places for p in _files(ROOT / place)]
    chosen = sample(ROOT, files, given.count, given.seed)
    if given.only is not None:
        lines = [json.loads(line) for line in given.only.read_text(encoding="utf-8").splitlines()]
        wanted = {
            line["mutant"] for line in lines if line["outcome"] not in ("killed", "timed out")
        }
        chosen = [mutant for mutant in chosen if mutant.title in wanted]
    plugin = MutationPlugin(ROOT, chosen, given.timeout, given.report)
    pytest.main(
        ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *words[cut + 1 :]],
        plugins=[plugin],
    )
    last = {
        line["mutant"]: line["outcome"]
        for line in map(json.loads, given.report.open(encoding="utf-8"))
    }
    counts = Counter(last[mutant.title] for mutant in chosen)
    print(
        f"{len(chosen)} mutants: "
        + ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
    )
    return 0 if set(counts) <= {"killed", "timed out"} else 1


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.glob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
