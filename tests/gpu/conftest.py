"""Let torch warn on a device, skip what a dry run cannot show, fail a session that ran nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.device import DRY

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch and its kernels warn, and skip what a dry run cannot show.

    Warnings are errors elsewhere. Here torch warns on a device of what no CPU shows (kernels that
    are not deterministic, prototypes), so an error would stand in the way of the test.
    """
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))
        if DRY and item.get_closest_marker("device_only"):
            reason = f"only a CUDA device can show {item.name}"
            item.add_marker(pytest.mark.skip(reason=f"a dry run: {reason}"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session that was asked for these tests and ran none of them."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    asked_for = any(
        str(argument).rstrip("/").endswith("tests/gpu") for argument in session.config.args
    )
    passed = len(reporter.stats.get("passed", [])) if reporter is not None else 1
    if asked_for and exitstatus == 0 and passed == 0:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that add in a fixed order.

    Without them two straight runs differ, and nothing could be compared.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
