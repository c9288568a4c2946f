"""`optrun evaluate`: metrics of a checkpoint on the evaluation split."""

from __future__ import annotations

import json
import sys

from optrun.commands.arguments import parse_arguments
from optrun.errors import EXIT_DONE, ConfigError

USAGE = """
optrun evaluate RUN_DIR|CHECKPOINT [KEY=VALUE ...] [--json]

Metrics of a checkpoint (of a run: its newest) on the evaluation split, with the configuration it was trained with and
the changes given here, such as data.eval=other.tsv. Tokenizer and classes are those it was trained with. Nothing is
written. --json prints one JSON object.
"""


def run(argv: list[str]) -> int:
    """Evaluate and tell.

    Returns:
        0.
    """
    words = parse_arguments("evaluate", argv, USAGE, {"--json": False})
    if words is None:
        return EXIT_DONE
    if len(words.positional) != 1:
        raise ConfigError(
            "optrun evaluate takes one run directory or checkpoint: optrun evaluate RUN_DIR [KEY=VALUE ...]"
        )
    from optrun.artifacts.checkpoint import read_state
    from optrun.config import saved, store
    from optrun.config.original_cwd import original_cwd, rebase_paths
    from optrun.run.resume.target import checkpoint_of

    run_dir, checkpoint = checkpoint_of(words.positional[0])
    hydra = store.open_hydra()
    before = saved.with_schemas(read_state(checkpoint)["config"], str(checkpoint))
    rebase_paths(before, original_cwd(run_dir.hydra))
    after = saved.changed(hydra, before, words.overrides)
    from optrun.config.safety import refuse_stored_trust

    refuse_stored_trust(after, words.overrides)
    config = store.typed(after)

    from rich.console import Console
    from rich.table import Table

    from optrun.data.cache import discarded
    from optrun.formatting import number
    from optrun.run.evaluate import evaluate_checkpoint

    found = evaluate_checkpoint(config, run_dir, checkpoint)
    for sentence in [*discarded(), *([] if found.warning is None else [found.warning])]:
        sys.stderr.write(f"optrun: {sentence}\n")
    if "--json" in words.flags:
        from optrun.artifacts.metrics import to_json

        numbers = {"checkpoint": str(checkpoint), "step": found.step, "examples": found.examples, **found.metrics}
        print(json.dumps(to_json(numbers)))  # noqa: T201
        return EXIT_DONE
    console = Console()
    table = Table(
        title=f"{checkpoint} · step {found.step:,} · {found.examples:,} examples",
        title_justify="left",
        title_style="dim",
    )
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in found.metrics.items():
        table.add_row(name, number(value))
    console.print(table)
    return EXIT_DONE
