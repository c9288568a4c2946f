"""The floors hold: arrows point down, rooms beside each other are strangers, configuration knows no torch."""

from __future__ import annotations

import ast
from pathlib import Path

import optrun

PACKAGE = Path(optrun.__file__).parent

# Room or module -> what of optrun it may import, besides itself and the ground.
GROUND = {"errors", "hub", "bounded_yaml"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "hub": set(),
    "bounded_yaml": set(),
    "config": set(),
    "artifacts": set(),
    "data": {"config"},
    "task": {"config", "data"},
    "model": {"config", "data"},
    "param_groups": {"config"},
    "optimizer": {"config", "param_groups"},  # AdamWDL's ratio function, one pure function
    "scheduler": {"config"},
    "clip": {"config"},
    "tracking": {"artifacts", "config"},
    "training": {"artifacts", "config", "data"},
    "report": {"artifacts"},
}
ABOVE = {
    "preparation", "data_check", "assembly", "experiment", "evaluation", "explain", "sweep", "certify", "commands",
    "outcome", "publish", "summary", "resume", "restore", "cli", "__main__",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """First pieces below `optrun` of every import of a file, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "optrun" else [f"optrun.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("optrun.")}
    return found


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_arrows_point_down() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        if room in ABOVE or room == "__init__":
            continue
        assert room in ALLOWED, f"{path.name}: say here what this room may import"
        for target in imports(path) - ALLOWED[room] - GROUND - {room, "__version__"}:
            wrong.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert wrong == []


def test_configuration_and_command_line_know_no_torch() -> None:
    heavy = {"torch", "transformers", "datasets", "numpy", "matplotlib", "scipy"}
    light = [*(PACKAGE / "config").glob("*.py"), PACKAGE / "cli.py", PACKAGE / "errors.py", PACKAGE / "resume.py"]
    for path in [*light, PACKAGE / "artifacts" / "run_dir.py", PACKAGE / "commands" / "train.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {(node.module or "").split(".")[0] for node in top if isinstance(node, ast.ImportFrom)}
        assert not names & heavy, path


def test_nothing_reads_a_pickle_or_runs_a_file() -> None:
    """Checkpoints, configurations and caches are data."""
    forbidden = {("pickle", "load"), ("pickle", "loads"), ("torch", "load"), ("joblib", "load"), ("dill", "load")}
    modules = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "runpy", "code"}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = [alias.name for alias in node.names]
                origin = [node.module or ""] if isinstance(node, ast.ImportFrom) else named
                loads = [(name, "load") for name in origin if "load" in named and isinstance(node, ast.ImportFrom)]
                if modules & {name.split(".")[0] for name in origin} or forbidden & set(loads):
                    wrong.append(f"{path.name}:{node.lineno}")
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                if (node.func.value.id, node.func.attr) in forbidden:
                    wrong.append(f"{path.name}:{node.lineno}")
            elif isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "instantiate", "__import__"):
                wrong.append(f"{path.name}:{node.lineno}")
            wrong += [
                f"{path.name}:{node.lineno}"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", None) is not False
            ]
    assert wrong == []
