"""Stand-ins for packages that Megatron-Bridge imports at its top, and nothing of a text model's training calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ABSENT = (
    *("datasets", "PIL", "modelopt", "nvidia_resiliency_ext", "megatron.energon"),  # data, images, other trainings
    *("tensorboard", "google.protobuf"),  # torch's writer of TensorBoard files
)


class _AnyClass(type):
    """Every attribute of an absent class is the class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _AbsentModule(ModuleType):
    """Every attribute is a class of that name, which may be inherited from and is a decorator of functions. As a
    function it does nothing, which is what ModelOpt does with a model that is not quantized."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {"__init__": lambda self, *args: None, "__call__": lambda self, function: function}
        return _AnyClass(name, (), methods)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked after all others, so that what is installed is taken."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if any(name == absent or f"{name}.".startswith(f"{absent}.") for absent in (*ABSENT, "google")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    sys.meta_path.append(_Absent())
