"""The name of a technique has one home: the file that declares it, and the folders of the frameworks that run it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from llmlaunch.techniques import Techniques
from llmlaunch.techniques.technique import declarations

PACKAGE = Path(__file__).parents[3] / "wrapper" / "llmlaunch"
HOME, FRAMEWORKS = PACKAGE / "techniques", PACKAGE / "frameworks"
# Modules, and rooms, where the same word means something else.
OTHER_MEANINGS = {
    "adapters": {
        "calibration/step_time_errors.py": "how a page says what is trained",
        "tracing/megatron_rank.py": "settings that frameworks/ writes; the tracer imports nothing of llmlaunch",
    },
    "cuda_graphs": {"effects/cuda_graphs.py": "a term of an estimate"},
    "loss": {
        **dict.fromkeys(("app", "cli", "launchers", "report", "watch"), "the loss that a training reports"),
        **dict.fromkeys(("causes", "node", "rundir"), "the loss in a line of a log"),
        "tracing/deepspeed_rank.py": "a moment of a traced step",
    },
    "paged_stash": {"effects/paged_stash.py": "a term of an estimate"},
    "weight_versions": {
        "memory/peak.py": "a term of an estimate",
        "effects/weight_versions.py": "a term of an estimate",
    },
}


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the constant texts of a module that are neither docstrings nor names it exports."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        exports = isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        )
        if exports or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            left_out |= {id(child) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def namings() -> Iterator[tuple[str, Path]]:
    """Yield each technique with each module outside `frameworks/` that names it."""
    names = set(declarations(Techniques))
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.is_relative_to(FRAMEWORKS):
            for name in names.intersection(texts(ast.parse(path.read_text("utf-8")))):
                yield name, path


def test_no_module_names_a_technique_that_another_one_declares() -> None:
    declared_in = {name: Path(inspect.getfile(section)) for section in Techniques.__mro__ for name in own_keys(section)}
    assert declared_in.keys() == declarations(Techniques).keys()
    others = {(name, path.relative_to(PACKAGE).as_posix()) for name, path in namings() if path != declared_in[name]}
    allowed = {
        (name, place)
        for name, place in others
        if {place, place.partition("/")[0]} & OTHER_MEANINGS.get(name, {}).keys()
    }
    assert sorted(others - allowed) == []
    used = {(name, where) for name, place in allowed for where in (place, place.partition("/")[0])}
    assert [
        (name, where) for name in OTHER_MEANINGS for where in OTHER_MEANINGS[name] if (name, where) not in used
    ] == []


def own_keys(section: type) -> list[str]:
    return [name for name in inspect.get_annotations(section) if name in declarations(Techniques)]
