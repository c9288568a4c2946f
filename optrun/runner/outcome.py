"""The outcome of training for its caller.

Without the training itself, which the process that starts ranks does not load.
"""

from dataclasses import dataclass

from optrun.artifacts.run_dir import RunDir
from optrun.base.plain import PlainDict

SummaryValues = PlainDict
"""`summary.json`, nested."""


@dataclass
class Outcome:
    """The result of a run that ended well."""

    run: RunDir
    summary: SummaryValues
    sample: tuple[str, str] | None = None
    """Prompt and continuation."""
