"""The name of a framework, a technique and a model family has one home: its own folder or file.

Other rooms ask the object there, and the few modules that name one nevertheless are listed with the reason."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from llmlaunch.families.registry import all_families
from llmlaunch.frameworks.framework import Framework, framework_named, trained_with
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, core_parser
from llmlaunch.recipe.frameworks import DEFAULT_FRAMEWORK, FRAMEWORKS, FrameworkName, named_by_packages
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.technique import declarations

PACKAGE = Path(__file__).parents[3] / "wrapper" / "llmlaunch"
NAMES = {
    *("megatron", "megatron-lm", "megatron_lm", "megatron-bridge", "megatron_bridge", "megatron-fsdp", "bridge"),
    *("deepspeed", "megatron-deepspeed", "Megatron-LM", "Megatron-Bridge", "DeepSpeed", "Megatron-DeepSpeed"),
}
MOST_MODULES = 5
# Modules outside `frameworks/` that name one, and why they must.
NAMING_A_FRAMEWORK = {
    "command_lines/trainers.py": "knows trainers that are not read, Megatron-DeepSpeed among them",
    "recipe/frameworks.py": "a recipe is read without the folders of the frameworks",
    "trainers/hook.py": "runs first in every Python of a job, where llmlaunch is not installed",
    "trainers/rank_alone.py": "runs beside the frameworks, where llmlaunch is not installed",
}
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
# Files that have the name of a family, and why.
NAMING_A_FAMILY = {
    "calibration/stated/trainers.py": "names of Megatron-Bridge's recipes, as records have them",
    "frameworks/deepspeed/hugging_face.py": "the preset that run_clm.py changes the sizes of",
    "models/shape.py": "the family of a shape whose record names none",
    "trainers/deepspeed/parallel.py": "whose masks follow no positions; trainers import nothing of ours",
    "trainers/deepspeed/train.py": "the small model that a baseline is measured with; trainers import nothing of ours",
}


@cache
def modules() -> Mapping[str, tuple[ast.AST, ...]]:
    """Return the nodes of every module, by its path."""
    return {
        path.relative_to(PACKAGE).as_posix(): tuple(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def texts() -> Mapping[str, frozenset[str]]:
    """Return the constant texts of every module, by its path, that are neither docstrings nor names it exports."""
    return {name: texts_in(nodes) for name, nodes in modules().items()}


def texts_in(nodes: tuple[ast.AST, ...]) -> frozenset[str]:
    found, left_out = set[str](), set[ast.AST]()
    for node in nodes:
        exports = isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__all__" for t in node.targets)
        if exports or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            left_out |= set(ast.walk(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            found.add(node.value)
    return frozenset(found)


def outside_frameworks() -> dict[str, frozenset[str]]:
    return {name: found for name, found in texts().items() if not name.startswith("frameworks/")}


def test_at_most_five_modules_outside_the_folders_name_a_framework() -> None:
    naming = {name for name, found in outside_frameworks().items() if NAMES & found}
    assert naming == set(NAMING_A_FRAMEWORK)
    assert len(naming) <= MOST_MODULES


def test_no_module_outside_the_folders_decides_by_the_name_of_the_backend() -> None:
    """`recipe.backend.name == ...`: what the framework is like decides, and each property is named by what it means."""
    deciding = [
        f"{name}:{node.lineno}"
        for name in outside_frameworks()
        for node in modules()[name]
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
        f"import sys; from llmlaunch.frameworks.framework import framework_named; framework_named({name!r}); "
        "print(*{module.split('.')[2] for module in sys.modules if module.startswith('llmlaunch.frameworks.')})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    folders = {traits.folder for traits in FRAMEWORKS.values()} & set(done.stdout.split())
    beneath = {FRAMEWORKS[DEFAULT_FRAMEWORK].folder} if FRAMEWORKS[name].on_megatron_core else set()
    assert folders == {FRAMEWORKS[name].folder} | beneath


MOST_FLAGS = 16


def test_hardly_any_flag_of_megatron_is_named_outside_the_folders() -> None:
    known = {flag for version in KNOWN_VERSIONS for flag in core_parser(version).flags}
    named = {flag for found in outside_frameworks().values() for flag in known & found}
    assert len(named) <= MOST_FLAGS, sorted(named)


def test_no_module_names_a_technique_that_another_one_declares() -> None:
    declared_in = {
        name: Path(inspect.getfile(section)).relative_to(PACKAGE).as_posix()
        for section in Techniques.__mro__
        for name in inspect.get_annotations(section)
        if name in declarations(Techniques)
    }
    assert declared_in.keys() == declarations(Techniques).keys()
    others = {
        (name, place)
        for place, found in outside_frameworks().items()
        for name in found & declared_in.keys()
        if declared_in[name] != place
    }
    allowed = {
        (name, place)
        for name, place in others
        if {place, place.partition("/")[0]} & OTHER_MEANINGS.get(name, {}).keys()
    }
    assert sorted(others - allowed) == []
    used = {(name, where) for name, place in allowed for where in (place, place.partition("/")[0])}
    listed = {(name, where) for name, places in OTHER_MEANINGS.items() for where in places}
    assert sorted(listed - used) == []


def test_the_name_of_a_family_has_one_home() -> None:
    homes: dict[str, str] = {}
    for name, family in all_families():
        classes = (family.vision.model_type,) if family.vision is not None else ()
        homes |= dict.fromkeys((name, *family.same, *classes), f"families/model_types/{name}.py")
    elsewhere = {
        place for place, found in texts().items() if any(homes[name] != place for name in found & homes.keys())
    }
    assert elsewhere == NAMING_A_FAMILY.keys()


def test_verdicts_have_one_home() -> None:
    assert [name for name, found in texts().items() if "unsafe" in found] == ["verdicts.py"]
