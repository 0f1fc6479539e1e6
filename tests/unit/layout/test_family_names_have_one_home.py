"""The name of a model family is that of its file: no other file of wrapper/ has it."""

from __future__ import annotations

import ast
from pathlib import Path

from llmlaunch.families.registry import all_families

PACKAGE = Path(__file__).parents[3] / "wrapper" / "llmlaunch"
EXCEPTIONS = {
    "calibration/stated/megatron_records.py": "names of Megatron-Bridge's recipes, as records have them",
    "frameworks/deepspeed/hugging_face.py": "the preset that run_clm.py changes the sizes of",
    "models/shape.py": "the family of a shape whose record names none",
    "trainers/deepspeed/train.py": "the small model that a baseline is measured with; trainers import nothing of ours",
}


def names_in(path: Path) -> set[str]:
    """Return the string constants of a file but for its docstrings."""
    code = ast.parse(path.read_text("utf-8"))
    alone = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(code) if isinstance(node, ast.Constant) and id(node) not in alone)
    return {node.value for node in constants if isinstance(node.value, str)}


def test_the_name_of_a_family_has_one_home() -> None:
    homes: dict[str, str] = {}
    for name, family in all_families():
        classes = (family.vision.model_type,) if family.vision is not None else ()
        homes |= dict.fromkeys((name, *family.same, *classes), f"families/model_types/{name}.py")
    elsewhere = {
        path: names
        for file in PACKAGE.rglob("*.py")
        if (path := str(file.relative_to(PACKAGE)))
        and (names := {name for name in names_in(file) & homes.keys() if homes[name] != path})
    }
    assert {path: names for path, names in elsewhere.items() if path not in EXCEPTIONS} == {}
    assert elsewhere.keys() == EXCEPTIONS.keys()
