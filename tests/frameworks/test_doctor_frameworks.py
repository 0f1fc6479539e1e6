"""`llmlaunch doctor --frameworks` in a real training environment, and what a recipe that runs there makes of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]
MEGATRON_PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"


def llmlaunch(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MEGATRON"))}
    environment |= {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "llmlaunch", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip


def test_what_this_environment_holds_is_said_kept_and_used(tmp_path: Path) -> None:
    done = llmlaunch(tmp_path, "doctor", "--frameworks", sys.executable, "--local", "--json")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for name in ("torch", "deepspeed", "transformers"):
        assert seen["packages"][name] == importlib.metadata.version(name)
    assert (seen["interpreter"], seen["problem"]) == (sys.executable, "")
    checked = llmlaunch(tmp_path, "check", str(ROOT / "recipes" / "quickstart.yaml"), f"python={sys.executable}")
    assert f"Assumed: DeepSpeed {seen['packages']['deepspeed']}, as llmlaunch doctor saw" in checked.stdout


def test_the_megatron_core_of_a_checkout_goes_before_an_installed_one(tmp_path: Path) -> None:
    if not (MEGATRON_PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{MEGATRON_PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    recipe = (str(ROOT / "recipes" / "llama3-8b.yaml"), f"python={MEGATRON_PYTHON}")
    installed = llmlaunch(tmp_path, "doctor", "--frameworks", str(MEGATRON_PYTHON), "--local")
    assert "megatron-core       0.19.2" in installed.stdout, installed.stderr
    assert "Assumed: Megatron core 0.19.2, as llmlaunch doctor saw" in llmlaunch(tmp_path, "check", *recipe).stdout
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    words = ("doctor", "--frameworks", str(MEGATRON_PYTHON), "--local")
    checkout = llmlaunch(tmp_path, *words, MEGATRON_LM_PATH=str(tmp_path))
    assert "megatron-core       0.16.1" in checkout.stdout, checkout.stderr
