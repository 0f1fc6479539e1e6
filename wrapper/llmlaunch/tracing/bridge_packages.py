"""Packages of Megatron-Bridge whose `__init__` imports every model family there is: here a name of theirs is imported
from its own module when somebody asks for it, and the rest is not. So Bridge's classes need nothing beside Megatron
core where they themselves do not, and a process that imports some saves 4 of 10 seconds."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = tuple(
    f"megatron.bridge{name}"
    for name in ("", ".models", ".models.conversion", ".models.hf_pretrained", ".data.builders", ".data")
)


class _Package(ModuleType):
    """A package without its `__init__`, whose imports are read and run one by one."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.__path__ = [str(folder)]
        tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        self._modules = {
            alias.asname or alias.name: (statement.module, alias.name)
            for statement in tree.body
            if isinstance(statement, ast.ImportFrom) and statement.module
            for alias in statement.names
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self._modules:
            raise AttributeError(f"{self.__name__} imports no {name}")
        module, there = self._modules[name]
        return getattr(importlib.import_module(module), there)


def install() -> Path:
    """Put the packages in place, before any of Bridge is imported, and return the folder that holds "megatron".

    Raises:
        ModuleNotFoundError: this environment has no Megatron-Bridge.
    """
    bridge = PACKAGES[0]
    namespace, _, folder_name = bridge.partition(".")
    folders = (Path(folder) for folder in importlib.import_module(namespace).__path__)
    here = next((folder for folder in folders if (folder / folder_name / "__init__.py").is_file()), None)
    if here is None:
        raise ModuleNotFoundError(f"No module named '{bridge}'", name=bridge)
    for name in PACKAGES:
        sys.modules[name] = _Package(name, here.parent.joinpath(*name.split(".")))
    return here.parent
