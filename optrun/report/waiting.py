"""Find the jobs of a sweep that have not begun: a stopped sweep leaves them to its next start."""

from __future__ import annotations

from pathlib import Path

from optrun.artifacts.run_dir import SWEEP, RunDir
from optrun.reading import read_json


def in_sweep(run: Path) -> bool:
    """Tell whether a run directory is that of a job: a sweep keeps its books beside it.

    There a job that failed always has a summary. One with no more than Hydra's folder was handed to a launcher, and
    left when the sweep was stopped.
    """
    return (run.parent / SWEEP).is_file() or (run.parent / ".sweep").is_dir()


def find_waiting(sweep: Path) -> list[tuple[Path, list[str]]]:
    """List the jobs of a sweep's last command that have not begun, each with its folder and overrides.

    Args:
        sweep: A directory; one that is no sweep, or whose `sweep.json` cannot be read, has none.
    """
    try:
        rows = read_json(sweep / SWEEP)["jobs"]
        new = [(str(row["name"]), [str(item) for item in row["overrides"]]) for row in rows if row["status"] == "new"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    # A name is one folder beneath the sweep, whatever a file from elsewhere says.
    inside = [(sweep / name, overrides) for name, overrides in new if Path(name).name == name]
    return [(path, overrides) for path, overrides in inside if not path.exists() or RunDir(path).is_unbegun()]
