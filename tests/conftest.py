"""Every test runs offline, on few threads, with its own cache, and leaves the random state as
it found it.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A run flushes some sixty times: in memory that takes no time. What is told of a disk, the tests
# say for themselves.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 6 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

import pytest
import torch

if (
    not torch.cuda.is_available()
):  # Triton reads it where it is imported: by transformers, or for a test of a kernel
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import compose_cache

# Without a device, torch notes each seed for CUDA, XPU and MTIA with the stack it came from: 4 ms
# before every test.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
torch.set_num_threads(1)
_COMPOSED = compose_cache.install()
_LONGEST = (
    "tests/zoo/test_zoo.py::test_every_architecture",
    "tests/docs/test_quickstart.py",
    "tests/sweep/test_killed.py",
    "tests/distributed/test_torchruns.py",
)
"""Beginnings of names of tests, more than a minute each."""


@pytest.fixture(autouse=True)
def _same_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    _seed(0)
    yield
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _no_notes_of_another_test() -> Iterator[None]:
    """What a test left untold of a cache it had damaged is not told by the next one in the same
    process.
    """
    yield
    if (cache := sys.modules.get("optrun.data.cache")) is not None:
        cache.pop_discard_messages()


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for tokenizers and tokens per session.

    So that nothing is read from or left in the user's own.
    """
    before = os.environ.get("OPTRUN_CACHE")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(before) if before else shared / "optrun-cache"
    folder.mkdir(exist_ok=True)
    os.environ["OPTRUN_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["OPTRUN_CACHE"]


@pytest.fixture
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the runs of most tests, which look at no picture.

    Those that do ask for `pictures`.
    """
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("optrun.runner.train.draw_curves", lambda path: None)


@pytest.fixture
def pictures() -> None:
    """Runs draw `curves.png`, as a user's do."""


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a sweep are forked from this process.

    Which has torch loaded, and its report draws nothing.
    """
    from tests.sweep.forked import fork_jobs

    fork_jobs(monkeypatch)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder that flushes at once, where there is one.

    For tests of what is called, not of how long it takes.
    """
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        yield Path(folder)


_frozen = 0


def pytest_collection_finish() -> None:
    """Modules and tests, which stay, are out of the way of the collector and of walks over all
    objects.
    """
    _freeze()


def pytest_runtest_teardown() -> None:
    """As are modules that a test was the first to need."""
    if len(sys.modules) > _frozen + 10:
        _freeze()


def _freeze() -> None:
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


def pytest_unconfigure(config: pytest.Config) -> None:
    """What was kept of compositions goes."""
    shutil.rmtree(_COMPOSED, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests begin first, lest one process end with one alone.

    What needs CUDA is left out without it.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))
    if torch.cuda.is_available() or os.environ.get("OPTRUN_GPU_DRY") == "1":
        return
    here = [item for item in items if "gpu" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
    items[:] = here
