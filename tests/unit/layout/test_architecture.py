"""The house stands: every room imports only from the floors below it, and what is apart stays apart."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "wrapper" / "llmlaunch"
FLOORS = (
    ("errors", "assets", "causes", "columns", "documents", "rundir", "units", "user_data"),
    ("models", "cluster", "layout", "placement", "techniques", "workload"),
    ("recipe", "memory", "timing"),
    ("backends", "planner", "calibration", "accuracy"),
    ("rendering", "report"),
    ("launchers", "store", "sinks", "rehearsal"),
    ("watch",),
    ("app",),
    ("cli",),
)
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
APART = {"node", "trainers", "tracing"}
# know where their files lie: to copy them into the run directory, or to start them under another interpreter
CARRIERS = {
    ("rendering", "node"),
    ("rehearsal", "tracing"),
    *((room, "trainers") for room in ("rendering", "backends", "launchers")),
}


def imports(path: Path) -> set[str]:
    """Rooms of llmlaunch a file imports, also inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"llmlaunch.{node.module}" if node.level == 2 else node.module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("llmlaunch.")}
    return rooms


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_down_or_sideways_never_up() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in PACKAGE.rglob("*.py")
        if room_of(path) in FLOOR
        for room in imports(path)
        if FLOOR.get(room, 0) > FLOOR[room_of(path)] or (room in APART and (room_of(path), room) not in CARRIERS)
    ]
    assert wrong == []


def test_no_two_rooms_import_each_other() -> None:
    arrows = {(room_of(p), room) for p in PACKAGE.rglob("*.py") for room in imports(p) if room != room_of(p)}
    assert [pair for pair in arrows if pair[::-1] in arrows] == []


def test_nodes_and_trainers_know_nothing_of_the_login_side() -> None:
    packed = {"causes", "placement", "rundir"}  # into node.pyz, with `node`
    for room in ("node", "trainers", "tracing", *packed):
        allowed = {room, *(packed if room == "node" else {"rundir"} if room in packed else ())}
        for path in PACKAGE.glob(f"{room}/*.py"):
            assert imports(path) <= allowed, path


def test_every_room_is_on_a_floor() -> None:
    rooms = {room_of(p) for p in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms == set(FLOOR) | APART


def test_memory_knows_no_backend_by_name() -> None:
    for path in PACKAGE.glob("memory/*.py"):
        code = ast.parse(path.read_text())
        strings = {n.value for n in ast.walk(code) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not strings & {"megatron-lm", "deepspeed"}, path


def test_every_test_module_has_a_name_of_its_own() -> None:
    """Or pytest would refuse to collect two of them in one run, while each passes alone."""
    names = [path.name for path in Path(__file__).resolve().parents[2].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
