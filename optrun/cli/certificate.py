"""Replace overrides for a proof, show its progress, publish its certificate."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from optrun.artifacts.forks import KEY as BRANCH_FROM
from optrun.artifacts.run_dir import unused_path
from optrun.base.errors import ConfigError, printable
from optrun.config.overrides import is_hydra
from optrun.config.tokens import key_of


@dataclass
class Desk:
    """Options and output that all `certify` claims share."""

    claim: str
    options: argparse.Namespace
    """Of the verb."""

    def __post_init__(self) -> None:
        """Print to stderr if stdout is for JSON."""
        self.console = Console(stderr=self.options.json, highlight=False)

    def read_whole_number(self, name: str, default: int, least: int) -> int:
        """Read a whole number from an option.

        Raises:
            ConfigError: The value is no whole number, or too small.
        """
        text = getattr(self.options, name) or str(default)
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(
                f"optrun certify --{name} {text}: expected a whole number, {least} or more."
            )
        return int(text)

    def say(self, text: str, style: str = "") -> None:
        """Print a line; its text is never read as markup."""
        self.console.print(Text(printable(text), style=style), soft_wrap=True)

    @contextmanager
    def watched(self) -> Iterator[Callable[[str], None]]:
        """Show the progress of the proof.

        Yields a function to update it.
        """
        with self.console.status(f"certify {self.claim}") as status:
            yield lambda text: status.update(f"certify {self.claim} · {text}")

    def publish(self, facts: Mapping[str, object], *, always: bool) -> Path | None:
        """Print the certificate if `--json` is given, and write it to a file if wanted.

        Args:
            facts: The certificate.
            always: Write it even without `--out`, to outputs/certificates.

        Returns:
            The written file, or None.
        """
        text = json.dumps(facts, indent=2) + "\n"
        if self.options.json:
            sys.stdout.write(text)
        if not always and self.options.out is None:
            return None
        if self.options.out:
            path = Path(self.options.out)
        else:
            name = time.strftime(f"{self.claim}-%Y-%m-%d-%H-%M-%S.json")
            path = unused_path(Path("outputs", "certificates", name))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:  # "x": never over another file
            file.write(text)
        return path


def with_forced(overrides: Sequence[str], forced: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Replace typed overrides by those that the proof needs.

    Returns the overrides, and a note for each replaced override.
    """
    unchanged = []
    replaced = []
    for token in overrides:
        key = key_of(token)
        forced_key = key if key in forced else key.partition(".")[0]
        if key == BRANCH_FROM:
            raise ConfigError(f"{token}: the runs of a certificate begin at step 0; leave it out.")
        if key == "resume" or is_hydra(key):
            raise ConfigError(
                f"{token}: certify chooses where it runs and resumes by itself; leave it out."
            )
        if key.startswith("tracking."):
            replaced.append(f"{token}: nothing is tracked here")
        elif key == "training.num_train_epochs":
            replaced.append(
                f"{token}: certify takes training.max_steps={forced['training.max_steps']}"
                " (--steps)"
            )
        elif forced_key in forced:
            if key != forced_key or token.partition("=")[2] != forced[forced_key]:
                option = " (--steps)" if key == "training.max_steps" else ""
                replaced.append(f"{token}: certify takes {forced_key}={forced[forced_key]}{option}")
        else:
            unchanged.append(token)
    return [*unchanged, *(f"{key}={value}" for key, value in forced.items())], replaced
