"""What all proofs of `optrun certify` share: forced overrides, progress, the certificate's file."""

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
class ProofConsole:
    """The options and the console of one `certify` command."""

    claim: str
    """`resume`, `optimizer` or `transfer`."""
    options: argparse.Namespace
    """The options of the verb."""

    def __post_init__(self) -> None:
        """Print to stderr if stdout is for JSON."""
        self.console = Console(stderr=self.options.json, highlight=False)

    def read_whole_number(self, name: str, default: int, least: int) -> int:
        """Read a whole number of at least `least` from the option `--NAME`.

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
        """Show a status line during the proof; yields the setter of its text."""
        with self.console.status(f"certify {self.claim}") as status:
            yield lambda text: status.update(f"certify {self.claim} · {text}")

    def publish(self, facts: Mapping[str, object], *, always: bool) -> Path | None:
        """Print the certificate if `--json` is given, and write it to the file of `--out`.

        An existing file is not overwritten: FileExistsError.

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
    """Add the forced overrides of a proof, and drop the typed ones for the same keys.

    Args:
        overrides: The overrides of the command line.
        forced: Key, or group, -> the value that the proof needs; a group replaces all of its keys.

    Returns:
        The overrides with all forced ones, and a note for each override that was replaced.

    Raises:
        ConfigError: An override names a run to branch from or to resume, or is for Hydra.

    Example:
        >>> overrides, notes = with_forced(["lr=0.1", "seed=7"], {"seed": "0"})
        >>> overrides, notes
        (['lr=0.1', 'seed=0'], ['seed=7: certify takes seed=0'])
    """
    unchanged = []
    notes = []
    # Each override is refused, dropped with a note, kept, or dropped in silence because it has the
    # forced value already.
    for token in overrides:
        key = key_of(token)
        forced_key = key if key in forced else key.partition(".")[0]  # the key, or its group
        if key == BRANCH_FROM:
            raise ConfigError(f"{token}: the runs of a certificate begin at step 0; leave it out.")
        if key == "resume" or is_hydra(key):
            raise ConfigError(
                f"{token}: certify chooses its own folders and what to resume; leave it out."
            )
        if key.startswith("tracking."):
            notes.append(f"{token}: nothing is tracked here")
        elif key == "training.num_train_epochs":
            notes.append(
                f"{token}: certify takes training.max_steps={forced['training.max_steps']}"
                " (--steps)"
            )
        elif forced_key not in forced:
            unchanged.append(token)
        elif token != f"{forced_key}={forced[forced_key]}":
            option = " (--steps)" if key == "training.max_steps" else ""
            notes.append(f"{token}: certify takes {forced_key}={forced[forced_key]}{option}")
    return [*unchanged, *(f"{key}={value}" for key, value in forced.items())], notes
