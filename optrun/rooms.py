"""Packages that can be called: `optrun.run(["lr=2e-3"])` trains, and `optrun.run.train` is a module."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """A package that has the name of a function of `optrun.api`, and is it when it is called.

    An import of `optrun.run.train` makes the package an attribute of `optrun`, over whatever had the name: see
    "Customizing module attribute access" in Python's data model.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of `optrun.api`."""
        function = getattr(importlib.import_module("optrun.api"), self.__name__.rpartition(".")[2])
        return function(*args, **kwargs)
