"""One call at a time in a process with other work."""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from optrun.base.errors import OptrunError
from optrun.cli.messages import storage_error

_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def one_call() -> Iterator[None]:
    """Refuse a second call in this process; restore environment, folder, warnings and Hydra.

    Random states, logging and the verbosity of transformers stay as the call left them. Signal
    handlers are put back by who takes them (`training.signals`, `sweeper.stop`).

    Raises:
        OptrunError: Another call runs in this process, or the block raised it. A disk error becomes
            a `StorageError`.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise OptrunError(
            "Another optrun call runs in this process: one call at a time. Wait until it has ended."
        )
    try:
        with warnings.catch_warnings(), _restore_environment(), _restore_hydra():
            yield
    except OSError as error:
        refused = storage_error(error)
        if refused is None:
            raise
        raise refused from error
    finally:
        _ONE_AT_A_TIME.release()


@contextmanager
def _restore_environment() -> Iterator[None]:
    """Restore environment variables and the current folder after a block.

    TOKENIZERS_PARALLELISM is set for the block, unless it was set before.
    """
    variables = dict(os.environ)
    folder = Path.cwd()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else they warn at every fork
    try:
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        os.chdir(folder)


@contextmanager
def _restore_hydra() -> Iterator[None]:
    """Restore the global state of Hydra after a block, for a host application that uses Hydra."""
    application = GlobalHydra.instance()
    config = HydraConfig.instance()
    hydra = application.hydra
    values = config.cfg
    try:
        yield
    finally:
        application.hydra = hydra
        config.cfg = values
