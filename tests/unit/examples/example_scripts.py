"""The scripts of docs/examples."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def run_example(name: str, lines: Iterable[str], place: Path) -> None:
    """Run a script as a person does."""
    script = EXAMPLES / f"{name}.py"
    subprocess.run([sys.executable, script, place], input="".join(lines), text=True, check=True)


def example(name: str) -> Any:
    """Import a script, to call it in this process: starting MLflow takes seconds."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
