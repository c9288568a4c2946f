"""What a program that calls optrun finds afterwards as it was.

A command may leave its process as it likes, a call not.

Signal handlers are put back by who takes them (`training.signals`, `sweeper.stop`).
"""

from __future__ import annotations

import logging
import os
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from omegaconf.basecontainer import BaseContainer

from optrun.base.errors import OptrunError
from optrun.cli.messages import storage_error

_ONE_AT_A_TIME = threading.Lock()
_OF_ONE_APPLICATION = (ConfigStore, GlobalHydra, HydraConfig, JobRuntime)
"""Singletons of Hydra that say what the application is.

A host that is a Hydra application has its own.
"""


@contextmanager
def isolated(*, trains: bool = True) -> Iterator[None]:
    """Let optrun change what a process has once, and put it back afterwards.

    Args:
        trains: Whether random numbers and the libraries of models are used, too.

    Raises:
        OptrunError: Another call is at work in this process, since all of this exists once; what
            the block raises, with an error of the disk as a `StorageError`.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise OptrunError("optrun is at work in this process already: one call at a time.")
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(_environment())
            if trains:
                stack.enter_context(_random_states())
                stack.enter_context(_transformers())  # first, since its import makes loggers
            stack.enter_context(_hydra())
            stack.enter_context(_logging())
            yield
    except OSError as error:
        refused = storage_error(error)
        if refused is None:
            raise
        raise refused from error
    finally:
        _ONE_AT_A_TIME.release()


@contextmanager
def _environment() -> Iterator[None]:
    """Restore environment variables and the current folder."""
    before, folder = dict(os.environ), Path.cwd()
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "true"
    )  # unset, tokenizers warn at every fork of a loader
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if Path.cwd() != folder:
            os.chdir(folder)


@contextmanager
def _hydra() -> Iterator[None]:
    """Restore Hydra's singletons and OmegaConf's resolvers.

    `hydra.core.singleton.Singleton.get_state` copies deeply, and loses the plugins; here the
    instances themselves stay.
    """
    Plugins.instance()  # now: what a plugin stores when it is imported is stored once, and for good
    before, resolvers = Singleton._instances, dict(BaseContainer._resolvers)
    stored = ConfigStore.instance().repo
    Singleton._instances = {
        kind: found for kind, found in before.items() if kind not in _OF_ONE_APPLICATION
    }
    ConfigStore.instance().repo = _copy(stored)
    try:
        yield
    finally:
        Singleton._instances = before
        BaseContainer._resolvers = resolvers


def _copy(folder: dict[str, object]) -> dict[str, object]:
    """Copy the folders of a configuration store, with the nodes that are in them."""
    return {
        name: _copy(found) if isinstance(found, dict) else found for name, found in folder.items()
    }


@contextmanager
def _logging() -> Iterator[None]:
    """Restore levels and handlers; `hydra/job_logging=...` configures them all."""
    known = [
        logging.getLogger(),
        *(logger for logger in logging.Logger.manager.loggerDict.values()),
    ]
    before = [
        (logger, logger.level, logger.handlers[:], logger.propagate, logger.disabled)
        for logger in known
        if isinstance(logger, logging.Logger)
    ]
    try:
        yield
    finally:
        for logger, level, handlers, propagate, disabled in before:
            logger.setLevel(level)
            for added in [handler for handler in logger.handlers if handler not in handlers]:
                added.close()
            logger.handlers[:] = handlers
            logger.propagate, logger.disabled = propagate, disabled


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch.

    No other setting of torch is changed.
    """
    import numpy as np
    import torch

    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)


@contextmanager
def _transformers() -> Iterator[None]:
    """Restore how much transformers says; a run has its own display."""
    from transformers.utils import logging as told

    verbosity, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    try:
        yield
    finally:
        told.set_verbosity(verbosity)
        (told.enable_progress_bar if bars else told.disable_progress_bar)()
