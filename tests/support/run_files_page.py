"""docs/run-files.md and the table of docs/run-directory.md, made from the kinds of file of a run directory and their
schemas (llmlaunch.rundir.file_kinds). `make docs-tables` writes them; a test keeps them equal to the code."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.rundir.file_kinds import FILE_KINDS, FileKind
from llmlaunch.rundir.schema import annotations_of, split_outside_brackets

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- the table of files, made by make docs-tables -->\n", "<!-- end of the table -->\n"
_PAGE = re.compile(r"(?<!\])\(([\w-]+\.md)\)")
PLAIN = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "Any": "anything"}
HEAD = """\
# Files of a run directory

This page lists the keys of the JSON files in [a run directory](run-directory.md) that have a schema. Readers limit the
size of each file, ignore keys that are not listed here, and treat a value of another type as null, empty or absent.
`a[].b` is the key `b` of each object in the list `a`; `a.*.b` is the key `b` of each object in `a`, whose own keys are
names. Unix seconds are seconds since 1970.
"""


def run_files_page() -> str:
    """Return docs/run-files.md as the schemas have it."""
    return HEAD + "".join(map(_section, with_schema()))


def with_schema() -> list[FileKind]:
    return [kind for kind in FILE_KINDS if kind.schema is not None]


def directory_page(page: str) -> str:
    """Return docs/run-directory.md with its table as the code has it."""
    before, _, rest = page.partition(BEGIN)
    rows = [f"| {_paths(kind)} | {kind.writer} | {kind.holds}{_link(kind)} |\n" for kind in FILE_KINDS]
    table = "| file | written by | holds |\n|---|---|---|\n" + "".join(rows)
    return before + BEGIN + table + END + rest.partition(END)[2]


def _paths(kind: FileKind) -> str:
    return ", ".join(f"`{path}`" for path in kind.path.split(", "))


def _link(kind: FileKind) -> str:
    return "" if kind.schema is None else f": [its keys](run-files.md#{anchor(kind)})"


def anchor(kind: FileKind) -> str:
    """Return the anchor of a file's section, as the site makes it from the heading."""
    kept = "".join(c for c in kind.path.lower() if c.isalnum() or c in "-_ ")
    return kept.replace(" ", "-")


def _section(kind: FileKind) -> str:
    assert kind.schema is not None
    lines = "One JSON object per line. " if kind.path.endswith(".jsonl") else ""
    rows = "".join(f"| `{key}` | {words} | {about} |\n" for key, words, about in rows_of(kind.schema))
    # an angle bracket would be a tag to the site, whose anchor leaves it out
    heading = re.sub(r"<(\w+)>", lambda match: match[1].upper(), kind.path)
    return f"\n## `{heading}`\n{lines}{docstring(kind.schema)}\n\n| key | value | meaning |\n|---|---|---|\n{rows}"


def docstring(schema: type) -> str:
    """Return the meaning of a schema, with pages that it names as links."""
    return _PAGE.sub(r"([\1](\1))", inspect.cleandoc(schema.__doc__ or ""))


def rows_of(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, type and meaning of each field, and of the objects below it. An object that has a section of its own
    is a link to it."""
    own = {kind.schema: kind for kind in with_schema() if prefix or kind.schema is not schema}
    for name, hint in sorted(annotations_of(schema).items(), key=lambda item: item[0] not in ("schema", "v")):
        about = meanings(schema)[name]
        inner, mark = _inner(hint, vars(sys.modules[schema.__module__]))
        if inner in own:
            about += f" ([its keys](#{anchor(own[inner])}))"
        elif inner is not None:
            about = ". ".join(filter(None, [about, docstring(inner).partition(". ")[2]]))
        yield prefix + name, words_of(hint, schema), " ".join(about.split())
        if inner is not None and inner not in own:
            yield from rows_of(inner, f"{prefix}{name}{mark}.")


def _inner(hint: str, names: Any) -> tuple[type | None, str]:
    """Return the schema of the object that a type holds, and how its keys are written below the field's."""
    for part in split_outside_brackets(hint, " | "):
        outer, _, arguments = part.partition("[")
        if outer in ("list", "tuple", "dict"):
            inner, mark = _inner(split_outside_brackets(arguments[:-1], ", ")[outer == "dict"], names)
            return inner, (".*" if outer == "dict" else "[]") + mark
        if outer in names and outer not in PLAIN and hasattr(names[outer], "__annotations__"):
            return names[outer], ""
    return None, ""


def words_of(hint: str, schema: type) -> str:
    """Return a type in words, such as `list of bytes or null`."""
    names = vars(sys.modules[schema.__module__])
    words = []
    for part in split_outside_brackets(hint, " | "):
        outer, _, arguments = part.partition("[")
        inner = split_outside_brackets(arguments[:-1], ", ")
        if outer in ("list", "tuple"):
            words.append(f"list of {words_of(inner[0], schema)}")
        elif outer == "dict":
            words.append("object" if inner[1] == "Any" else f"{words_of(inner[1], schema)} by name")
        elif part == "None":
            words.append("null")
        elif part in PLAIN:
            words.append(PLAIN[part])
        else:
            named = names[part]
            words.append(named.__metadata__[0].words if hasattr(named, "__metadata__") else "object")
    return " or ".join(words)


@cache
def meanings(schema: type) -> dict[str, str]:
    """Return the string below each field of a schema, those of its bases included."""
    found: dict[str, str] = {}
    module = ast.parse(inspect.getsource(sys.modules[schema.__module__]))
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    waiting = [schema.__name__]
    while waiting:
        node = classes[waiting.pop()]
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        for before, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(before.target, ast.Name):
                found[before.target.id] = ast.literal_eval(text.value)
    return found


if __name__ == "__main__":
    directory = DOCS / "run-directory.md"
    (DOCS / "run-files.md").write_text(run_files_page(), encoding="utf-8")
    directory.write_text(directory_page(directory.read_text("utf-8")), encoding="utf-8")
