"""`sweep.json`: where every job of the last command stands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.metrics import to_json
from optrun.artifacts.objective import Objective
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.view import Board


def write_result(sweep: SweepDir, board: Board, tuned: Sequence[str], objectives: Sequence[Objective] = ()) -> None:
    """Write it anew.

    Args:
        sweep: The sweep directory.
        board: Where the jobs stand.
        tuned: Keys that tell no contenders apart.
        objectives: What is weighed against each other; none: the main metric alone.
    """
    rows: list[dict[str, Any]] = []
    for job in board.jobs:
        state = board.states[job.name]
        rows.append(
            {
                "name": job.name,
                "config_digest": job.digest,
                "overrides": list(job.overrides),
                "status": "stopped at a rung" if job.name in board.resting else state.status,
                "global_step": state.step,
                "max_steps": state.total,
                "metric": state.metric,
                "best": state.best,
                "message": state.message or board.told_of_stall(job),
                "devices": board.devices.get(job.name, []),
                "log": f"{job.name}/{sweep.run(job.name).log.name}",
            }
        )
    result: dict[str, Any] = {"format": 1, "tuned": list(tuned), "jobs": rows}
    if objectives:
        result["objectives"] = [asdict(each) for each in objectives]
    replace_text(sweep.result, json.dumps(to_json(result), indent=2, ensure_ascii=False) + "\n")
