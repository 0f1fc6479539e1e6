"""The NVML binding, loaded small: 8,000 lines in a zip file, whose compiling takes 15 MB that a process would keep."""

from __future__ import annotations

import marshal
import os
import sys
import types
import zipimport


def load_small(name: str) -> None:
    """Import `name` from the zip file that this module came from, compiled by a child; nothing where it came from none.

    To be called before there are threads: it forks. Whatever it raises, an ordinary import may still do.
    """
    own = globals().get("__loader__")
    if name in sys.modules or not isinstance(own, zipimport.zipimporter):
        return
    # not by importlib: finding a module in a zip file compiles it already
    code = marshal.loads(_compiled_by_a_child(zipimport.zipimporter(own.archive), name))
    module = types.ModuleType(name)
    sys.modules[name] = module  # it looks itself up
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise


def _compiled_by_a_child(loader: zipimport.zipimporter, name: str) -> bytes:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(theirs, "wb") as file:
                file.write(marshal.dumps(loader.get_code(name)))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        code = file.read()
    os.waitpid(child, 0)
    return code
