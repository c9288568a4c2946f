"""The floors hold: arrows point down, there is no circle of files, configuration knows no torch."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import optrun

PACKAGE = Path(optrun.__file__).parent

# Each room and what of optrun it may import, from the bottom up. No room is exempt.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "artifacts": {"base"},
    "config": {"base"},
    "data": {"base", "config"},
    "param_groups": {"base", "config"},
    "scheduler": {"base", "config"},
    "distributed": {"base", "config"},
    "report": {"artifacts", "base", "config"},
    "model": {"base", "config", "data"},
    "optimizer": {"base", "config", "param_groups"},  # AdamWDL's ratio function, one pure function
    "testing": {"config", "optimizer", "param_groups"},
    "task": {"base", "config", "data"},
    "training": {"artifacts", "base", "config", "data", "distributed"},
    "runner": {
        "artifacts",
        "base",
        "config",
        "data",
        "distributed",
        "model",
        "optimizer",
        "param_groups",
        "report",
        "scheduler",
        "task",
        "training",
    },
    "sweeper": {"artifacts", "base", "config", "runner"},
    "explain": {
        "base",
        "config",
        "data",
        "distributed",
        "model",
        "optimizer",
        "param_groups",
        "scheduler",
        "task",
    },
    "certify": {"artifacts", "base", "config", "optimizer", "runner", "task"},
    "launch": {
        "artifacts",
        "base",
        "config",
        "distributed",
        "optimizer",
        "runner",
        "training",
    },
    "cli": {
        "artifacts",
        "base",
        "certify",
        "config",
        "data",
        "distributed",
        "explain",
        "launch",
        "model",
        "optimizer",
        "param_groups",
        "report",
        "runner",
        "sweeper",
        "training",
    },
    "__main__": {"cli"},
    "api": {"artifacts", "base", "cli", "config", "launch", "report", "runner"},
    "plugin": {"base", "config", "data", "optimizer", "runner", "task", "training"},
    "__init__": set(),
}


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[Path, ast.Module]:
    """Every file of the package, parsed."""
    files = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


@cache
def imports() -> dict[str, set[str]]:
    """Every module of the package and the modules of the package that it imports, also inside
    functions.
    """
    files = {module_of(path): path for path in trees() if path.suffix == ".py"}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set()
        source = (
            path.with_suffix(".pyi") if module == "optrun.plugin" else path
        )  # its names are imported when asked for
        for node in ast.walk(trees()[source]):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: imports are absolute"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        targets = {
            name if name in files else name.rpartition(".")[0]
            for name in names
            if name.startswith("optrun.")
        }
        found[module] = {target for target in targets if target in files} - {module, "optrun"}
    return found


def room_of(module: str) -> str:
    """The first name below the package."""
    return module.split(".")[1] if "." in module else "__init__"


def test_arrows_point_down() -> None:
    assert {room_of(module) for module in imports()} == set(ALLOWED), (
        "say above what each room may import"
    )
    floors: list[str] = list(ALLOWED)
    for room, below in ALLOWED.items():
        assert below <= set(floors[: floors.index(room)]), f"{room} stands below what it imports"
    wrong = [
        f"{module} imports {target}"
        for module, targets in imports().items()
        for target in targets
        if room_of(target) not in ALLOWED[room_of(module)] | {room_of(module)}
    ]
    assert wrong == []


def test_what_a_room_may_import_it_does() -> None:
    used: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for module, targets in imports().items():
        used[room_of(module)] |= {room_of(target) for target in targets}
    assert [
        f"{room}: {sorted(ALLOWED[room] - used[room])}"
        for room in ALLOWED
        if ALLOWED[room] - used[room]
    ] == []


def test_no_circle_of_files() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        raise AssertionError(f"these files import each other: {error.args[1]}") from error


def test_configuration_and_command_line_know_no_torch() -> None:
    heavy = {"torch", "transformers", "datasets", "numpy", "matplotlib", "scipy"}
    light = [
        *(PACKAGE / "config").rglob("*.py"),
        *(PACKAGE / "cli").glob("*.py"),
        *(PACKAGE / "launch").glob("*.py"),
    ]
    light += [
        PACKAGE / name for name in ("base/errors.py", "artifacts/run_dir.py", "artifacts/target.py")
    ]
    for path in light:
        top = [node for node in trees()[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {
            alias.name.split(".")[0]
            for node in top
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        names |= {
            (node.module or "").split(".")[0] for node in top if isinstance(node, ast.ImportFrom)
        }
        assert not names & heavy, path


def test_nothing_reads_a_pickle_or_runs_a_file() -> None:
    """Checkpoints, configurations and caches are data."""
    forbidden = {
        ("pickle", "load"),
        ("pickle", "loads"),
        ("torch", "load"),
        ("joblib", "load"),
        ("dill", "load"),
    }
    modules = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "runpy", "code"}
    wrong = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = [alias.name for alias in node.names]
                origin = [node.module or ""] if isinstance(node, ast.ImportFrom) else named
                loads = [
                    (name, "load")
                    for name in origin
                    if "load" in named and isinstance(node, ast.ImportFrom)
                ]
                if modules & {name.split(".")[0] for name in origin} or forbidden & set(loads):
                    wrong.append(f"{path.name}:{node.lineno}")
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                if (node.func.value.id, node.func.attr) in forbidden:
                    wrong.append(f"{path.name}:{node.lineno}")
            elif isinstance(node.func, ast.Name) and node.func.id in (
                "eval",
                "exec",
                "instantiate",
                "__import__",
            ):
                wrong.append(f"{path.name}:{node.lineno}")
            wrong += [
                f"{path.name}:{node.lineno}"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle"
                and getattr(keyword.value, "value", None) is not False
            ]
    assert wrong == []


READERS = {"open", "read_text", "read_bytes", "fdopen"}
PARSERS = {
    ("json", "load"),
    ("json", "loads"),
    ("yaml", "load"),
    ("yaml", "safe_load"),
    ("yaml", "compose"),
}
PARSERS |= {("OmegaConf", "load"), ("np", "load"), ("np", "fromfile"), ("np", "memmap")}
OTHER_DOORS = {
    "base/reading.py": "the door",
    "base/bounded_yaml.py": "the door for YAML, of what `reading` reads",
    "config/saved.py": "what `bounded_yaml` read",
    "config/yaml_files.py": "nodes of what `reading` reads, for line numbers",
    # Descriptors to write, to lock and to flush; none of their bytes is believed.
    "artifacts/atomic.py": "writes",
    "artifacts/lock.py": "locks",
    "sweeper/search.py": "a study of Optuna's",
    "data/images.py": "an image in memory",
    "training/signals.py": "the null device",
    "cli/dispatch.py": "the null device",
    "distributed/heartbeat.py": "maps the table of this start's ranks",
    "distributed/local_ranks.py": "how a rank of this start ended",
    "distributed/rendezvous.py": "messages between the ranks of one start",
    "distributed/memory_file.py": "what processes of this start write in memory",
    "distributed/silence.py": "/proc",
    "launch/rank.py": "what the process that started this rank wrote in memory",
    "certify/trial.py": "/proc, and the log of a process that it started",
    "artifacts/provenance.py": "/proc, and optrun's own files",
    # Bytes that were read or made in memory.
    "model/tokenizer.py": "the tokenizer in memory",
    "task/tokens.py": "the tokenizer in memory",
    "runner/assemble.py": "the model's configuration in memory",
    "runner/model_loading.py": "the options of its generation in memory",
    "optimizer/round_trip.py": "state in memory, through JSON and back",
    "testing.py": "state in memory, through JSON and back",
    "data/cached_arrays.py": "arrays of the cache, whose seal was checked",
    # Files that came with Python or with optrun.
    "data/stdlib.py": "the standard library",
    "optimizer/kernels/build.py": "optrun's own source",
    # Arrays whose files the cache checked, or that `resolve` looked at, are mapped and not read.
    "data/local_file.py": "reads by place what `refuse_changed` looked at",
    "data/tokens.py": "maps",
    "data/encoded.py": "maps",
    "data/content.py": "unpacks, counted",
    "data/hub_file.py": "a file of the hub, not of this machine",
}
"""Where files are opened or text is parsed beside `optrun.base.reading`, and what."""


def _reads(node: ast.AST) -> bool:
    """Whether a node opens a file to read, or parses a text."""
    if not isinstance(node, ast.Call):
        return False
    arguments = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    modes = [
        value.value
        for value in arguments
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]
    if any(mode[0] in "wax" and len(mode) <= 3 for mode in modes if mode):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "open"
    if not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    return node.func.attr in READERS or (owner, node.func.attr) in PARSERS


def test_files_of_others_come_through_one_door() -> None:
    found = set()
    for path, tree in trees().items():
        lines = [node.lineno for node in ast.walk(tree) if _reads(node)]
        name = path.relative_to(PACKAGE).as_posix()
        found |= {name} if lines else set()
        assert name in OTHER_DOORS or not lines, (
            f"{name}: lines {lines}: read it with optrun.base.reading"
        )
    assert OTHER_DOORS.keys() - found == set(), "these open nothing any more"


def _top_level_names(tree: ast.Module) -> set[str]:
    """Collect what a module binds at its top level, under `if` and `try`, too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
    return names


def test_benchmarks_and_examples_import_names_that_exist() -> None:
    """No test runs the long ones, so a name that went was missed by their next user only."""
    root = PACKAGE.parent
    missing = []
    for path in sorted([*root.glob("benchmarks/*.py"), *root.glob("examples/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("optrun"):
                continue
            base = root.joinpath(*str(node.module).split("."))
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            names = (
                _top_level_names(ast.parse(file.read_text("utf-8"))) if file.is_file() else set()
            )
            missing += [
                f"{path.name}: {node.module}.{alias.name}"
                for alias in node.names
                if alias.name not in names
                and not (base / alias.name).is_dir()
                and not (base / f"{alias.name}.py").is_file()
            ]
    assert not missing
