"""`node.pyz`: everything a compute node runs, in one file that needs Python >= 3.8 and nothing installed."""

from __future__ import annotations

import io
import marshal
import zipfile
from functools import cache
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from types import CodeType

import llmlaunch.causes
import llmlaunch.frameworks
import llmlaunch.node
import llmlaunch.placement
import llmlaunch.rundir
from llmlaunch.errors import UserError
from llmlaunch.trainers import HOOK, MEMORY_PROBE

# Also parsed by the Python that is too old, so that it can say so.
MAIN = """\
import sys

if sys.version_info < (3, 8):
    sys.exit("llmlaunch: node.pyz needs Python >= 3.8; %s is %d.%d" % ((sys.executable,) + sys.version_info[:2]))

from llmlaunch.node.__main__ import main

main()
"""
SHEBANG = b"#!/usr/bin/env python3\n"
TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can hold
UNCHECKED_HASH = (1).to_bytes(4, "little")  # flags of bytecode that is not compared with its source (PEP 552)


@cache
def node_archive() -> bytes:
    """The bytes of `node.pyz`: the packages `node`, `causes`, `placement` and `rundir` in an otherwise empty
    `llmlaunch`, what each framework says when it fails, the files that `observe` gives to trainers, and NVIDIA's
    `pynvml.py` unchanged.

    Beside each module of ours lies its bytecode, which a Python of this one's version loads; any other reads the
    source. A job runs some ten commands on each node, and compiling took half of their time.

    The same versions of all three give the same bytes on any machine: fixed order, times and modes, and stored, since
    what a deflater writes depends on its version. Raises UserError where nvidia-ml-py is not installed.
    """
    modules: dict[str, Path] = {}
    for package in (llmlaunch.causes, llmlaunch.node, llmlaunch.placement, llmlaunch.rundir):
        folder = Path(str(package.__file__)).parent
        modules |= {f"llmlaunch/{folder.name}/{path.name}": path for path in folder.glob("*.py")}
    modules |= _failure_patterns()
    files = {"__main__.py": MAIN.encode(), "pynvml.py": _pynvml_source(), "llmlaunch/__init__.py": b""}
    files |= {f"llmlaunch/trainers/{path.name}": path.read_bytes() for path in (HOOK, MEMORY_PROBE)}
    for name, path in modules.items():
        files |= {name: path.read_bytes(), f"{name}c": _bytecode(name, path)}
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.create_system = 3  # Unix
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def _failure_patterns() -> dict[str, Path]:
    """Return the modules in which each framework's folder says how it fails, and the packages that hold them."""
    backends = Path(str(llmlaunch.frameworks.__file__)).parent
    failures = sorted(backends.glob("*/failures.py"))
    paths = [backends / "__init__.py", *(path.with_name("__init__.py") for path in failures), *failures]
    return {f"llmlaunch/{path.relative_to(backends.parent).as_posix()}": path for path in paths}


def _pynvml_source() -> bytes:
    """The binding's only file; its head is its BSD licence, so the notice travels with it."""
    try:
        return Path(str(metadata.distribution("nvidia-ml-py").locate_file("pynvml.py"))).read_bytes()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise UserError(
            "nvidia-ml-py is not installed in this Python, so node.pyz cannot be built: pip install nvidia-ml-py"
        ) from error


def _bytecode(name: str, path: Path) -> bytes:
    """What a `.pyc` of the module at `path` holds (PEP 552), compiled anew only where no cache of it is at hand.

    Of marshal's formats, the second is the newest whose bytes do not depend on who else refers to an object.
    """
    module = path.stem
    code = SourceFileLoader(module, str(path)).get_code(module)
    assert isinstance(code, CodeType)
    return MAGIC_NUMBER + UNCHECKED_HASH + source_hash(path.read_bytes()) + marshal.dumps(_named(code, name), 2)


def _named(code: CodeType, name: str) -> CodeType:
    """The same code as if compiled from a file `name`, with all that is defined in it: tracebacks show it, and no path
    of this machine."""
    constants = tuple(_named(item, name) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_filename=name, co_consts=constants)
