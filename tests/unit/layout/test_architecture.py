"""The house stands: every room imports only from the floors below it, and what is apart stays apart."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from llmlaunch.memory.effects import Effect, effects_in
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.technique import declarations
from llmlaunch.timing.effects import TimeEffect

PACKAGE = Path(__file__).parents[3] / "wrapper" / "llmlaunch"
PAGE = PACKAGE.parents[1] / "docs" / "architecture.md"
FLOORS = (
    ("assets", "columns", "errors", "frozen", "placement", "progress", "rundir", "units", "user_data"),
    ("causes", "verdicts"),
    ("documents",),
    ("cluster", "facts", "models", "techniques", "workload"),
    ("families",),
    ("layout", "recipe"),
    ("findings", "layers"),
    ("memory",),
    ("timing",),
    ("effects",),
    ("command_lines",),
    ("frameworks",),
    ("calibration", "imports"),
    ("accuracy", "planner"),
    ("rendering", "report"),
    ("launchers",),
    ("readiness", "rehearsal", "watch"),
    ("store",),
    ("app",),
    ("cli",),
)
KINDS: tuple[type[Any], ...] = (Effect, TimeEffect)
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
APART = {"node", "trainers", "tracing"}
# know where their files lie: to copy them into the run directory, or to start them under another interpreter
CARRIERS = {
    ("rendering", "node"),
    ("cli", "node"),  # `observe` is the same program, installed or from node.pyz
    ("rehearsal", "tracing"),
    *((room, "trainers") for room in ("rendering", "frameworks", "launchers")),
}


@cache
def modules() -> dict[Path, tuple[ast.AST, ...]]:
    """Return the nodes of every module of the package."""
    return {path: tuple(ast.walk(ast.parse(path.read_text("utf-8")))) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what a file imports, also inside functions and by relative names: the module, and the name in it."""
    folder = path.relative_to(PACKAGE.parent).parts[:-1]
    for node in modules()[path]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            home = ".".join([*above, *filter(None, [node.module])])
            yield from ((home, alias.name) for alias in node.names)


@cache
def imports(path: Path) -> set[str]:
    """Return the rooms of llmlaunch that a file imports."""
    names = (f"{module}.{name}".split(".") for module, name in imported(path))
    return {name[1] for name in names if name[0] == "llmlaunch" and len(name) > 1 and name[1]}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_a_room_imports_only_from_floors_below_it() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in modules()
        if room_of(path) in FLOOR
        for room in imports(path) - {room_of(path)}
        if FLOOR.get(room, -1) >= FLOOR[room_of(path)] or (room in APART and (room_of(path), room) not in CARRIERS)
    ]
    assert wrong == []


def test_what_only_judges_the_formulas_is_no_part_of_the_wheel() -> None:
    """No room imports `validation/`, and the wheel is made of this package alone."""
    assert [path for path in modules() if any(name.split(".")[0] == "validation" for name, _ in imported(path))] == []
    settings = (PACKAGE.parents[1] / "pyproject.toml").read_text("utf-8")
    built = settings.partition("[tool.hatch.build.targets.wheel]")[2].partition("[tool.ruff]")[0]
    assert 'packages = ["wrapper/llmlaunch"]' in built
    assert "validation" not in built


def test_the_page_names_the_floors() -> None:
    rows = re.findall(r"(?m)^\| (\d+) \| ([^|]+) \|", PAGE.read_text("utf-8"))
    documented = {(int(floor), room) for floor, rooms in rows for room in re.findall(r"`(\w+)(?:/|\.py)`", rooms)}
    assert documented == {(floor, room) for room, floor in FLOOR.items()}


def walk_of(heading: str) -> list[Path]:
    """Return the modules that a walk on the page names, in its order."""
    section = PAGE.read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"(?m)^\d+\. (.*)$", section)
    return [PACKAGE / path for step in steps for path in re.findall(r"`(\w+/\w+\.py)`", step)]


def test_the_walk_of_a_peak_names_few_modules_that_are_there() -> None:
    steps = walk_of("How a peak is measured and learned from")
    assert 0 < len(steps) <= 8
    assert [path for path in steps if not path.exists()] == []


def imported_modules(path: Path) -> set[str]:
    """Return the modules a file imports. `from a import b` counts as `a` and as `a.b`."""
    return {name for module, part in imported(path) for name in (module, f"{module}.{part}")}


def test_no_module_imports_itself_through_others() -> None:
    """Imports for type checkers count, too; those of the package's own `__init__` do not: it imports on demand."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    graph = {name: imported_modules(path) & names.keys() - {name} for name, path in names.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"modules import each other: {error.args[1]}") from None


# What modules of `memory/` read of techniques: which effects they have; and what is a part of the model: which rank has
# prediction heads, and the modules that ZeRO 3 gathers.
READ_OF_TECHNIQUES = {"effect_modules", "heads_before_loss", "adapters"}


def test_memory_asks_effects_and_names_no_technique() -> None:
    named = {
        f"{path.name}: {node.attr}"
        for path in (PACKAGE / "memory").glob("*.py")
        for node in modules()[path]
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute | ast.Name)
        and ast.unparse(node.value).rpartition(".")[2] == "techniques"
        and node.attr not in READ_OF_TECHNIQUES
    }
    assert named == set()


def test_a_module_of_effects_is_one_that_a_technique_declares() -> None:
    modules = {path.stem for path in (PACKAGE / "effects").glob("*.py")} - {"__init__"}
    assert {module for declared in declarations(Techniques).values() for module in declared.effects} == modules
    assert [name for name in modules if not any(effects_in([name], kind) for kind in KINDS)] == []


def test_a_public_class_name_has_one_home() -> None:
    homes: dict[str, set[str]] = {}
    for path, (module, *_) in modules().items():
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_modules_are_no_walls() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_nodes_and_trainers_know_nothing_of_the_login_side() -> None:
    packed = {"causes", "placement", "rundir"}  # into node.pyz, with `node`
    for room in ("node", "trainers", "tracing", *packed):
        allowed = {room, *(packed if room == "node" else {"rundir"} if room in packed else ())}
        for path in PACKAGE.glob(f"{room}/*.py"):
            assert imports(path) <= allowed, path


def test_every_room_is_on_a_floor() -> None:
    rooms = {room_of(path) for path in modules()} - {"__init__", "__main__"}
    assert rooms == set(FLOOR) | APART


def test_memory_knows_no_backend_by_name() -> None:
    for path in PACKAGE.glob("memory/*.py"):
        nodes = modules()[path]
        strings = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not strings & {"megatron-lm", "deepspeed"}, path


def test_every_test_module_has_a_name_of_its_own() -> None:
    """Or pytest would refuse to collect two of them in one run, while each passes alone."""
    names = [path.name for path in Path(__file__).resolve().parents[2].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
