"""`node.pyz`: everything that the batch host and the nodes of a job run, in one file that needs Python 3.9 or newer and
nothing installed."""

from __future__ import annotations

import ast
import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import llmlaunch
from llmlaunch.errors import UserError
from llmlaunch.trainers import HOOK, MEMORY_PROBE

# Also parsed by a Python that is too old, so that it can say so. The archive is read once: Python's own importer opens
# it for each module, and thousands of nodes would ask one shared file server for that.
MAIN = """\
import sys

if sys.version_info < (3, 9):
    sys.exit("llmlaunch needs Python 3.9 or newer here, and %s is %d.%d; name one in LLMLAUNCH_PYTHON, or load a "
             "module in the setup lines of the recipe" % ((sys.executable,) + sys.version_info[:2]))

import io
import zipfile
from importlib.machinery import ModuleSpec


class Archive(object):
    \"\"\"Finds and loads the modules of this archive, which it holds in memory.\"\"\"

    def __init__(self, path):
        self.archive = path
        with open(path, "rb") as file:
            self._files = zipfile.ZipFile(io.BytesIO(file.read()))
        self._names = frozenset(self._files.namelist())

    def find_spec(self, name, path=None, target=None):
        inner = name.replace(".", "/")
        for file, is_package in ((inner + "/__init__.py", True), (inner + ".py", False)):
            if file in self._names:
                spec = ModuleSpec(name, self, origin=self.archive + "/" + file, is_package=is_package)
                spec.has_location = True
                if is_package:
                    spec.submodule_search_locations.append(self.archive + "/" + inner)
                return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.get_code(module.__name__), module.__dict__)

    def get_source(self, name):
        return self.get_data(self.find_spec(name).origin).decode()

    def get_code(self, name):
        return compile(self.get_source(name), self.find_spec(name).origin, "exec", dont_inherit=True)

    def get_data(self, path):
        return self._files.read(path[len(self.archive) + 1:])

    def folder(self, path):
        if not path.startswith(self.archive + "/"):
            raise ImportError(path)
        inner = path[len(self.archive) + 1:] + "/"
        return Folder(name[len(inner):] for name in self._names if name.startswith(inner))


class Folder(object):
    \"\"\"A package of the archive, for pkgutil.iter_modules.\"\"\"

    def __init__(self, names):
        self._names = sorted(names)

    def find_spec(self, name, target=None):
        return None

    def iter_modules(self, prefix=""):
        for name in self._names:
            if name.endswith("/__init__.py") and name.count("/") == 1:
                yield prefix + name[:-len("/__init__.py")], True
            elif "/" not in name and name != "__init__.py":
                yield prefix + name[:-len(".py")], False


archive = Archive(sys.path[0])
sys.meta_path.insert(0, archive)
sys.path_hooks.insert(0, archive.folder)

from llmlaunch.node.__main__ import main

main()
"""
SHEBANG = b"#!/usr/bin/env python3\n"
TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can hold
PROGRAMS = ("node/__main__.py", "node/job.py", "node/training_node.py", "node/monitor.py", "node/prune.py")
OBSERVING = ("node/__main__.py", "node/observe.py")
# Every `submit` reads a hundred modules: by these it takes a quarter of the time of Python's own tokenizer.
IMPORT = re.compile(r"^ *from (\.+)([\w.]*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)
TEXT_OR_COMMENT = re.compile(
    r"""(?P<text>(?P<three>\"{3}|'{3})(?:\\.|.)*?(?P=three)|"(?:\\.|[^"\n])*"|'(?:\\.|[^'\n])*')|\ *\#[^\n]*""",
    re.DOTALL,
)
_PACKAGE = Path(str(llmlaunch.__file__)).parent


@cache
def node_archive(programs: tuple[str, ...] = PROGRAMS) -> bytes:
    """Return the bytes of `node.pyz`: the modules that `programs` import, without docstrings and comments, in an
    otherwise empty `llmlaunch`; what each framework says when it fails; the files that trainers import first; and
    NVIDIA's `pynvml.py` unchanged.

    The same versions of both give the same bytes on any machine: fixed order, times and modes, and stored, since what a
    deflater writes depends on its version. Raises UserError where nvidia-ml-py is not installed.
    """
    modules = {*_needed_by(programs), *_failure_patterns()}
    packages = {path.parent / "__init__.py" for path in modules if path.parent != Path()} - {Path("__init__.py")}
    sources = {path: (_PACKAGE / path).read_text(encoding="utf-8") for path in modules | packages}
    files = {f"llmlaunch/{path.as_posix()}": bare_source(text).encode() for path, text in sources.items()}
    files |= {f"llmlaunch/trainers/{path.name}": path.read_bytes() for path in (HOOK, MEMORY_PROBE)}
    files |= {"__main__.py": MAIN.encode(), "pynvml.py": _pynvml_source(), "llmlaunch/__init__.py": b""}
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.create_system = 3  # Unix
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def _needed_by(programs: tuple[str, ...]) -> set[Path]:
    """Return `programs` and all modules that they import, directly or not, by their place in the package."""
    found: set[Path] = set()
    waiting = [Path(name) for name in programs]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported_by(path)
    return found


def _imported_by(path: Path) -> Iterator[Path]:
    """Yield the modules that one module imports relative to itself, at its head or where it needs them."""
    for dots, module, listed in IMPORT.findall((_PACKAGE / path).read_text(encoding="utf-8")):
        folder = path.parents[len(dots) - 1]
        base = folder.joinpath(*module.split(".")) if module else folder
        names = re.findall(r"\w+", re.sub(r"#.*| as \w+", "", listed))
        for target in (base, *(base / name for name in names)):
            for file in (target.with_suffix(".py"), target / "__init__.py"):
                if file.parent != Path() and (_PACKAGE / file).is_file():
                    yield file


def _failure_patterns() -> set[Path]:
    """Return the modules in which each framework's folder says how it fails, and the package that holds them."""
    failures = {path.relative_to(_PACKAGE) for path in (_PACKAGE / "frameworks").glob("*/failures.py")}
    return {Path("frameworks/__init__.py"), *failures}


def bare_source(source: str) -> str:
    """Return a module's source without comments, without the strings below fields and constants, without what only a
    type checker imports, and with empty docstrings: every other statement keeps its line."""
    lines = TEXT_OR_COMMENT.sub(lambda match: match["text"] or "", source).splitlines(keepends=True)
    for node in _statements([ast.parse(source)]):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            for unused in filter(_is_unused, node.body):
                last = unused.end_lineno or unused.lineno
                empty = lines[unused.lineno - 1][: unused.col_offset] + '""' if unused is node.body[0] else ""
                lines[unused.lineno - 1 : last] = [f"{empty}\n"] + ["\n"] * (last - unused.lineno)
    return "".join(lines)


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes and every statement in them, but no expression: there are ten times as many of those."""
    for node in nodes:
        yield node
        for block in ("body", "orelse", "finalbody", "handlers"):
            yield from _statements(getattr(node, block, ()))


def _is_unused(statement: ast.stmt) -> bool:
    """Whether a statement is a text, or an import for type checkers."""
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING" and not statement.orelse
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _pynvml_source() -> bytes:
    """The binding's only file; its head is its BSD licence, so the notice travels with it."""
    try:
        return Path(str(metadata.distribution("nvidia-ml-py").locate_file("pynvml.py"))).read_bytes()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise UserError(
            "nvidia-ml-py is not installed in this Python, so node.pyz cannot be built: pip install nvidia-ml-py"
        ) from error
