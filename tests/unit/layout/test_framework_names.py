"""A framework's words live in its folder: the other rooms ask its object, and hardly any module names a framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from llmlaunch.frameworks.framework import Framework
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, core_parser
from llmlaunch.frameworks.registry import framework_named, trained_with
from llmlaunch.recipe.frameworks import DEFAULT_FRAMEWORK, FRAMEWORKS, FrameworkName, named_by_packages

PACKAGE = Path(__file__).parents[3] / "wrapper" / "llmlaunch"
NAMES = {
    *("megatron", "megatron-lm", "megatron_lm", "megatron-bridge", "megatron_bridge", "megatron-fsdp", "bridge"),
    *("deepspeed", "megatron-deepspeed", "Megatron-LM", "Megatron-Bridge", "DeepSpeed", "Megatron-DeepSpeed"),
}
MOST_MODULES = 5
# Modules outside `frameworks/` that name one, and why they must.
NAMING = {
    "command_lines/trainers.py": "knows trainers that are not read, Megatron-DeepSpeed among them",
    "recipe/frameworks.py": "a recipe is read without the folders of the frameworks",
    "trainers/hook.py": "runs first in every Python of a job, where llmlaunch is not installed",
    "trainers/rank_alone.py": "runs beside the frameworks, where llmlaunch is not installed",
}


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the constant texts of a module that are no docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def outside() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules outside `frameworks/` by their paths."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("frameworks/"):
            yield name, ast.parse(path.read_text("utf-8"))


def test_at_most_five_modules_outside_the_folders_name_a_framework() -> None:
    naming = {name for name, tree in outside() if NAMES & set(texts(tree))}
    assert naming == set(NAMING)
    assert len(naming) <= MOST_MODULES


def test_no_module_outside_the_folders_decides_by_the_name_of_the_backend() -> None:
    """`recipe.backend.name == ...`: what the framework is like decides, and each property is named by what it means."""
    deciding = [
        f"{name}:{node.lineno}"
        for name, tree in outside()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and any(is_backend_name(side) for side in (node.left, *node.comparators))
    ]
    assert deciding == []


def is_backend_name(node: ast.expr) -> bool:
    """Whether an expression is `backend.name`, `recipe.backend.name` or the like."""
    if not isinstance(node, ast.Attribute) or node.attr != "name":
        return False
    owner = node.value
    return "backend" in (getattr(owner, "attr", None), getattr(owner, "id", None))


def test_every_framework_of_a_recipe_has_a_folder_with_its_object() -> None:
    assert tuple(FRAMEWORKS) == get_args(FrameworkName)
    for name, traits in FRAMEWORKS.items():
        framework = framework_named(name)
        assert framework.name == traits.name == name
        assert framework.backend().name == name
        assert [attribute for attribute in Framework.__annotations__ if not hasattr(framework, attribute)] == []
        assert (PACKAGE / "frameworks" / traits.folder / "framework.py").is_file()
        assert set(framework.packages) <= set(trained_with())


def test_the_framework_of_an_environment_is_told_by_its_packages() -> None:
    core, bridge, deepspeed = (FRAMEWORKS[name] for name in ("megatron-lm", "megatron-bridge", "deepspeed"))
    assert named_by_packages(["torch", core.package]) == core
    assert named_by_packages(["torch", core.package, bridge.package]) == bridge
    assert named_by_packages(["torch", deepspeed.package, "transformers"]) == deepspeed
    assert named_by_packages([]) == FRAMEWORKS[DEFAULT_FRAMEWORK]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_asking_one_framework_imports_no_other(name: str) -> None:
    """Megatron-Bridge configures Megatron core, so it needs the folder of Megatron-LM."""
    program = (
        f"import sys; from llmlaunch.frameworks.registry import framework_named; framework_named({name!r}); "
        "print(*{module.split('.')[2] for module in sys.modules if module.startswith('llmlaunch.frameworks.')})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    folders = {traits.folder for traits in FRAMEWORKS.values()} & set(done.stdout.split())
    beneath = {FRAMEWORKS[DEFAULT_FRAMEWORK].folder} if FRAMEWORKS[name].on_megatron_core else set()
    assert folders == {FRAMEWORKS[name].folder} | beneath


MOST_FLAGS = 15


def test_hardly_any_flag_of_megatron_is_named_outside_the_folders() -> None:
    known = {flag for version in KNOWN_VERSIONS for flag in core_parser(version).flags}
    named = {flag for _, tree in outside() for flag in known & set(texts(tree))}
    assert len(named) <= MOST_FLAGS, sorted(named)
