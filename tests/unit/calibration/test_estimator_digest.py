"""Scores hold for the formula they were made with: its digest covers all that prices, and changes with any of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llmlaunch
from llmlaunch.calibration.calibrations import MODULES, ROOMS, digest_of, estimator_digest

ROOT = Path(llmlaunch.__file__).parent
LOADED = """
import json, sys
import llmlaunch.calibration.cases
print(json.dumps([m.__file__ for name, m in sys.modules.items() if name.startswith("llmlaunch") and m.__file__]))
"""
# What pricing a record loads and no price depends on.
SHARED = ("__init__.py", "assets.py", "columns.py", "errors.py", "frozen.py", "units.py", "user_data.py")
ASIDE = (
    *(*SHARED, "causes/", "documents/", "cluster/", "rundir/"),
    *(f"calibration/{name}.py" for name in ("evidence", "margins", "records")),
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in MODULES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_every_module_that_prices_is_in_the_digest() -> None:
    answer = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=180, check=True)
    loaded = {Path(name).relative_to(ROOT).as_posix() for name in json.loads(answer.stdout)}
    covered = {name for name in loaded if name in MODULES or name.startswith(tuple(f"{room}/" for room in ROOMS))}
    assert "memory/peak.py" in covered
    assert {name for name in loaded - covered if not (name.endswith(ASIDE[0]) or name.startswith(ASIDE))} == set()


def test_the_same_sources_have_the_same_digest_wherever_they_lie(copy: Path) -> None:
    assert digest_of(copy) == estimator_digest()


@pytest.mark.parametrize("name", ["memory/constants.json", "memory/peak.py", "calibration/cases.py", "layout.py"])
def test_a_changed_source_changes_it(copy: Path, name: str) -> None:
    with (copy / name).open("a") as file:
        file.write(" ")
    assert digest_of(copy) != estimator_digest()
