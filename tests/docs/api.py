"""Build the API reference: `python -m tests.docs.api`, a part of `make docs`.

`optrun` and `optrun.plugin` import their names when they are asked for, and pdoc looks only at
names that a module has. So they are asked for before. pdoc also runs the imports for the type
checker, and `_typeshed` exists only for that one.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

if __name__ == "__main__":
    # Here, so that pytest can collect the file where the extra `docs` is not installed.
    from pdoc.__main__ import cli

    typeshed = ModuleType("_typeshed")
    vars(typeshed)["DataclassInstance"] = object
    sys.modules["_typeshed"] = typeshed
    for name in ("optrun", "optrun.plugin"):
        module = importlib.import_module(name)
        vars(module).update({public: getattr(module, public) for public in module.__all__})
    cli(["--docformat", "google", "-o", "build/site/api", "optrun", "!optrun.__main__"])
