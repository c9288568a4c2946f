"""What the documentation points at exists: tests, files, headings."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "tests").rglob("*.md")]
PAGES += (ROOT / ".github").rglob("*.md")


def test_every_test_that_is_named_exists() -> None:
    named = {
        (match[1], match[2])
        for page in PAGES
        for match in re.finditer(r"(tests/[\w/.-]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 80
    known: dict[str, set[str]] = {}
    for path in sorted({path for path, _ in named}):
        assert (ROOT / path).is_file(), path
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        known[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert sorted(f"{path}::{name}" for path, name in named if name not in known[path]) == []


def test_the_units_are_of_rooms() -> None:
    """As the table of tests/README.md says.

    The rooms that it names as tested whole have no folder.
    """
    (row,) = re.findall(
        r"^\| `unit/ROOM/` \|.*", (ROOT / "tests" / "README.md").read_text(encoding="utf-8"), re.M
    )
    (whole,) = re.findall(r"`(\w+)`, `(\w+)`, `(\w+)` and `(\w+)` have no units", row)
    rooms = {path.name for path in (ROOT / "optrun").iterdir() if (path / "__init__.py").is_file()}
    units = {
        path.name for path in (ROOT / "tests" / "unit").iterdir() if any(path.glob("test_*.py"))
    }
    assert units == rooms - set(whole)


def test_the_lowest_constraints_are_the_lower_bounds() -> None:
    """Of every requirement of the package and of `[dev]`, with the extras that it takes in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["dev"]]
    included = re.search(r"optrun\[(.*)\]", extras["dev"][0])
    assert included is not None
    for extra in included[1].split(","):
        requirements += extras[extra]
    bounds = {}
    for requirement in requirements:
        name, bounded, rest = requirement.partition(">=")
        if bounded:
            bounds[name] = rest.partition(",")[0]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    assert dict(line.split("==") for line in lines if not line.startswith("#")) == bounds


def test_every_benchmark_has_its_place_on_the_page() -> None:
    from benchmarks.__main__ import PAGE, PARTS

    text = PAGE.read_text(encoding="utf-8")
    for name, words in PARTS.items():
        assert (ROOT / "benchmarks" / words.split()[0]).is_file(), words
        assert 0 < text.find(f"<!-- {name}: begin -->") < text.find(f"<!-- {name}: end -->"), name


def test_every_fault_table_has_whole_rows() -> None:
    """As many cells in each row as in the head.

    A pipe in a cell would shift what is claimed beside what is proved.
    """
    for line in (ROOT / "tests" / "faults" / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and "::" in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, line
            assert "::" in cells[2], line


def anchors(page: Path) -> set[str]:
    """The names under which GitHub links to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def relative_links(page: Path) -> list[str]:
    text = re.sub(
        r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def test_a_wheel_has_what_its_pages_link_to() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    shipped = wheel["targets"]["wheel"]["force-include"]
    in_wheel = {
        ROOT / target / path.relative_to(ROOT / source): path
        for source, target in shipped.items()
        for path in (ROOT / source).rglob("*")
    }
    pages = {place: page for place, page in in_wheel.items() if page.suffix == ".md"}
    assert len(pages) > 20
    for place, page in pages.items():
        for link in relative_links(page):
            target = (place.parent / link.partition("#")[0]).resolve()
            assert link.startswith("#") or target in in_wheel, f"{page.relative_to(ROOT)}: {link}"


def test_every_file_that_a_page_names_exists() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(
            r"`((?:tests|examples|benchmarks|recipes)/[\w./-]+\.\w+)", page.read_text()
        )
        if not (ROOT / name).is_file()
    ]
    assert missing == []


def test_every_link_leads_somewhere() -> None:
    broken, checked = [], 0
    for page in PAGES:
        for link in relative_links(page):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            whole = target.exists() and (not anchor or anchor in anchors(target))
            broken += [] if whole else [f"{page.relative_to(ROOT)}: {link}"]
            checked += 1
    assert broken == []
    assert checked > 60
