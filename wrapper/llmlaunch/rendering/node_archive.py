"""`node.pyz`: everything a compute node runs, in one file that needs Python >= 3.8 and nothing installed."""

from __future__ import annotations

import io
import zipfile
from importlib import metadata
from pathlib import Path

import llmlaunch.causes
import llmlaunch.node
import llmlaunch.placement
import llmlaunch.rundir
from llmlaunch.errors import UserError
from llmlaunch.trainers import HOOK, MEMORY_PROBE

__all__ = ["node_archive"]

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


def node_archive() -> bytes:
    """The bytes of `node.pyz`: the packages `node`, `causes`, `placement` and `rundir` in an otherwise empty
    `llmlaunch`, the files that `observe` gives to trainers, and NVIDIA's `pynvml.py` unchanged.

    The same versions of both give the same bytes on any machine: fixed order, times and modes, and stored, since
    what a deflater writes depends on its version. Raises UserError where nvidia-ml-py is not installed.
    """
    files = {"__main__.py": MAIN.encode(), "pynvml.py": _pynvml_source(), "llmlaunch/__init__.py": b""}
    for package in (llmlaunch.causes, llmlaunch.node, llmlaunch.placement, llmlaunch.rundir):
        folder = Path(str(package.__file__)).parent
        files |= {f"llmlaunch/{folder.name}/{path.name}": path.read_bytes() for path in folder.glob("*.py")}
    files |= {f"llmlaunch/trainers/{path.name}": path.read_bytes() for path in (HOOK, MEMORY_PROBE)}
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.create_system = 3  # Unix
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def _pynvml_source() -> bytes:
    """The binding's only file; its head is its BSD licence, so the notice travels with it."""
    try:
        return Path(str(metadata.distribution("nvidia-ml-py").locate_file("pynvml.py"))).read_bytes()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise UserError(
            "nvidia-ml-py is not installed in this Python, so node.pyz cannot be built: pip install nvidia-ml-py"
        ) from error
