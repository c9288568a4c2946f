"""Where a rank prints: rank 0 to the terminal, each other one into its log."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from optrun.artifacts.run_dir import RunDir


@contextmanager
def rank_output(rank: int, run: RunDir) -> Iterator[None]:
    """Write what any rank but the first prints into its log, warnings of libraries among it."""
    if rank == 0:
        yield
        return
    log = run.rank_log(rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    yield


@contextmanager
def printed_log() -> Iterator[None]:
    """Print what optrun logs."""
    logger, handler = logging.getLogger("optrun"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
