"""The wheel alone is enough: installed into an empty environment and run from an empty directory, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600
# The search has other tests.
FEW = "layout={context: 1, micro_batch_size: 1, recompute: none, techniques: asked}"
# `check` in a process that then says which of these it has imported, and its exit code.
CHECK = (
    f"import sys; sys.argv = ['llmlaunch', 'check', 'llama3-8b.yaml', '{FEW}', '--json'];"
    "from llmlaunch.cli.main import _run; code = _run();"
    "heavy = {'sqlalchemy', 'torch', 'deepspeed', 'megatron', 'rich', 'pandas'};"
    "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)"
)
# Where the package is, whether `validation` came with it, and what lies beside the program that traces a rank.
PACKAGE = (
    "import importlib.util, json, llmlaunch, llmlaunch.tracing as t;"
    "print(json.dumps([llmlaunch.__path__[0], importlib.util.find_spec('validation') is None,"
    " [p.name for p in t.TRACER.parent.iterdir()]]))"
)


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel of this checkout, what that wants, and nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    python = place / "empty" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(place / "empty")],
        [*pip, "install", "--no-compile", str(ROOT)],
    ):
        done = run(command, place)
        assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty directory"
    folder.mkdir()
    return folder


def test_the_package_holds_what_traces_a_rank_and_nothing_that_only_judges_the_formulas(
    python: Path, empty: Path
) -> None:
    package, no_validation, tracing = json.loads(run([str(python), "-c", PACKAGE], empty).stdout)
    assert no_validation
    judges = {"anchors.py", "fsdp.py", "megatron_deepspeed.py"}
    assert not judges & {path.name for path in Path(package).rglob("*.py")}
    source = {path.name for path in (ROOT / "wrapper" / "llmlaunch" / "tracing").iterdir() if path.is_file()}
    assert {"trace_ranks.py", "fake_cuda.cpp", "requirements.txt", "requirements-no-deps.txt"} <= source
    assert source <= set(tracing)
    installed = {path.name.partition("-")[0].lower() for path in Path(package).parent.glob("*.dist-info")}
    assert not installed & {"torch", "deepspeed", "transformers", "pandas", "megatron_core", "pynvml"}
    assert {"llmlaunch", "click", "numpy", "pydantic", "nvidia_ml_py"} <= installed


def test_a_recipe_is_started_checked_planned_and_rendered(python: Path, empty: Path) -> None:
    def llmlaunch(*words: str) -> str:
        """What it prints with what a bare login node has on its PATH: no GPU, no SLURM, no torch."""
        command = [str(python.with_name("llmlaunch")), *words]
        done = run(command, empty, PATH="/usr/bin:/bin", HOME=str(empty.parent))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    llmlaunch("init", "llama3-8b")
    schema = llmlaunch("schema")
    assert json.loads(schema)["title"] == "llmlaunch recipe"
    assert (empty / "llmlaunch.schema.json").read_text() == schema
    checked = run([str(python), "-c", CHECK], empty, HOME=str(empty.parent))
    assert checked.stderr.strip().endswith("[] 0"), checked.stderr
    assert json.loads(checked.stdout)["verdict"] == "safe"
    llmlaunch("plan", "llama3-8b.yaml", FEW, "--html", "plan.html")
    assert "</html>" in (empty / "plan.html").read_text("utf-8")
    llmlaunch("render", "llama3-8b.yaml", FEW, "-o", "run")
    assert run(["bash", "-n", "run/job.sbatch"], empty).returncode == 0
    helped = run(["python3", "-I", "-S", "run/node.pyz", "--help"], empty)
    assert "monitor" in helped.stdout + helped.stderr
    checkout = "backend.path=/no-such-file-system/Megatron-LM"
    assert "#SBATCH --nodes=4" in llmlaunch("submit", "llama3-8b.yaml", FEW, checkout, "--dry-run", "--full")
    llmlaunch("report", "run", "--html", "report.html")
    assert "not submitted" in (empty / "report.html").read_text("utf-8")
