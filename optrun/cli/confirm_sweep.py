"""Run what a sweep chose on fresh seeds, as a sweep of its own beneath it, and report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base import shell
from optrun.base.errors import ConfigError, StorageError
from optrun.cli.sweep import SweepOutcome, run_points
from optrun.cli.values import is_place
from optrun.config import overrides, store
from optrun.config.literal import quote_path
from optrun.config.request import DEFAULT_CONFIG, CommandLine
from optrun.launch.single_run import Caller

if TYPE_CHECKING:
    from optrun.report.confirmation_plan import ConfirmationRequest
    from optrun.report.verdict import SweepVerdict


def confirm(
    sweep: Path,
    request: ConfirmationRequest,
    caller: Caller,
    of_hydra: Sequence[str],
    *,
    out: Path | None = None,
    seconds: float | None = None,
) -> SweepOutcome:
    """Plan or continue a confirmation, run it as a sweep, and report.

    The plan is written before the first run, and deleted again if the sweep is refused.

    Args:
        sweep: The sweep to confirm.
        request: Seeds, power, difference and what to compare.
        caller: The command line or a Python program, and where it prints.
        of_hydra: Hydra's overrides for the jobs, such as hydra/launcher=joblib; those of the run
            are ignored, and so is hydra.sweep.dir.
        out: Directory of its runs; None: beneath the sweep.
        seconds: The time left of hydra.sweeper.timeout after the sweep; None: the timeout in
            `of_hydra`.

    Returns:
        The outcome of the confirming sweep.

    Raises:
        ConfigError: There is nothing to confirm, or the directory holds another confirmation.
    """
    from optrun.report import confirmation_plan
    from optrun.report.build import report

    # 1. The plan: the one on record in the folder, or a new one.
    folder = sweep / confirmation_plan.FOLDER if out is None else out
    plan, note = confirmation_plan.load_or_make_plan(sweep, folder, request)
    if note:
        caller.console.print(note, markup=False, highlight=False, soft_wrap=True)
    is_new_plan = confirmation_plan.read_plan(folder) is None
    try:
        plan.write(folder)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}. out=DIR names another folder.") from error

    def compare(runs: Path, _: int) -> SweepVerdict:
        # The report of a sweep shows the confirmation in its folder, too.
        is_in_sweep = runs.resolve().parent == sweep.resolve()
        return report([sweep if is_in_sweep else runs], console=caller.console).verdict

    # 2. The command line of its runs: only the overrides that say where they run.
    again = shell.join([*request.line(sweep, out), *filter(is_place, of_hydra)])
    if seconds is not None:
        of_hydra = [token for token in of_hydra if not token.startswith("hydra.sweeper.timeout=")]
        of_hydra.append(f"hydra.sweeper.timeout={max(seconds, 1e-3)}")  # 0 is not allowed
    config_dir = plan.config_dir[-1] if plan.config_dir else None
    launching = [
        token
        for token in of_hydra
        if overrides.is_hydra(token) and not token.startswith("hydra.sweep.dir=")
    ]
    line = CommandLine(
        config_name=plan.config_name or DEFAULT_CONFIG,
        names_config=plan.config_name is not None,
        config_dir=config_dir,
        overrides=[*launching, f"hydra.sweep.dir={quote_path(folder)}"],
    )
    # 3. The runs. All overrides are checked before the first of them.
    try:
        hydra = store.open_hydra(config_dir)
        overrides.parse_checked(hydra, line.config_name, launching, sweep=True)
        for tokens in plan.contenders.values():
            overrides.parse_checked(hydra, line.config_name, tokens, sweep=False)
        return run_points(hydra, line, caller, plan.points(), compare, again=again)
    except ConfigError:
        record = folder / confirmation_plan.RECORD
        if is_new_plan and list(folder.iterdir()) == [record]:  # no run was started
            record.unlink()
            folder.rmdir()
        raise
