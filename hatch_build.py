"""Compile the kernel of the optimizers' step while optrun is built or installed.

Without a C compiler, go without.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "optrun/optimizer/kernels"


class CompileKernel(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled kernel beside its source.

    In the wheel, or in the checkout of an editable install.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before anything is packed.

        Args:
            version: "standard" or "editable".
            build_data: What is packed besides, and the wheel's tag.
        """
        builder = _load(Path(self.root) / KERNELS / "build.py")
        folder = Path(self.root) / KERNELS
        if version != "editable":
            self._aside = tempfile.TemporaryDirectory()
            folder = Path(self._aside.name)
        reason = builder.build(folder)
        if reason is not None:
            self.app.display_warning(f"optrun goes without its compiled kernel: {reason}")
            return
        if version != "editable":
            build_data["force_include"][str(folder / builder.LIBRARY)] = (
                f"{KERNELS}/{builder.LIBRARY}"
            )
        # ctypes loads it: it depends on the system and on nothing of this Python.
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
