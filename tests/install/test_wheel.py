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


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `llmlaunch` command of a wheel built from this checkout, in an environment that holds nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    built = run([sys.executable, "-m", "build", "--wheel", "--outdir", str(place), str(ROOT)], place)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = place.glob("*.whl")
    python = place / "empty" / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(place / "empty")],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)],
    ):
        done = run(command, place)
        assert done.returncode == 0, done.stdout + done.stderr
    return python.parent / "llmlaunch"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty directory"
    folder.mkdir()
    return folder


def llmlaunch(command: Path, empty: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # no GPU, no SLURM, no torch: only what a bare login node has on its PATH
    return run([str(command), *words], empty, PATH="/usr/bin:/bin", HOME=str(empty.parent))


def test_no_training_framework_came_with_it(installed: Path, empty: Path) -> None:
    listed = run([str(installed.parent / "python"), "-m", "pip", "list", "--format=json"], empty)
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert not names & {"torch", "deepspeed", "transformers", "pandas", "megatron-core", "pynvml"}
    assert {"llmlaunch", "click", "numpy", "pydantic", "nvidia-ml-py"} <= names


def test_what_only_judges_the_formulas_did_not_come_with_it(installed: Path, empty: Path) -> None:
    program = "import importlib.util, llmlaunch; print(importlib.util.find_spec('validation'), *llmlaunch.__path__)"
    found, package = run([str(installed.parent / "python"), "-c", program], empty).stdout.split(maxsplit=1)
    assert found == "None"
    assert not {"anchors.py", "fsdp.py", "megatron_deepspeed.py"} & {
        path.name for path in Path(package.strip()).rglob("*.py")
    }


def test_a_recipe_is_started_checked_planned_and_rendered(installed: Path, empty: Path) -> None:
    assert llmlaunch(installed, empty, "init", "llama3-70b").returncode == 0
    schema = llmlaunch(installed, empty, "schema").stdout
    assert json.loads(schema)["title"] == "llmlaunch recipe"
    assert (empty / "llmlaunch.schema.json").read_text() == schema
    checked = llmlaunch(installed, empty, "check", "llama3-70b.yaml", "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["verdict"] == "safe"
    planned = llmlaunch(installed, empty, "plan", "llama3-70b.yaml")
    assert planned.returncode == 0
    assert "Ranked\n" in planned.stdout
    drawn = llmlaunch(installed, empty, "plan", "llama3-70b.yaml", "--html", "plan.html")
    assert drawn.returncode == 0, drawn.stderr
    assert "</html>" in (empty / "plan.html").read_text("utf-8")
    rendered = llmlaunch(installed, empty, "render", "llama3-70b.yaml", "-o", "run")
    assert rendered.returncode == 0, rendered.stderr
    assert run(["bash", "-n", "run/job.sbatch"], empty).returncode == 0
    checkout = "backend.path=/no-such-file-system/Megatron-LM"
    dry = llmlaunch(installed, empty, "submit", "llama3-70b.yaml", checkout, "--dry-run", "--full")
    assert dry.returncode == 0, dry.stderr
    assert "#SBATCH --nodes=64" in dry.stdout
    report = llmlaunch(installed, empty, "report", "run", "--html", "report.html")
    assert report.returncode == 0, report.stderr
    assert "not submitted" in (empty / "report.html").read_text("utf-8")


def test_check_reads_no_database_and_no_framework(installed: Path, empty: Path) -> None:
    program = (
        "import sys; sys.argv = ['llmlaunch', 'check', 'r.yaml', '--json'];"
        "from llmlaunch.cli.main import _run; code = _run();"
        "heavy = {'sqlalchemy', 'torch', 'deepspeed', 'megatron', 'rich', 'pandas'};"
        "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)"
    )
    assert llmlaunch(installed, empty, "init", "llama3-70b", "-o", "r.yaml").returncode == 0
    answer = run([str(installed.parent / "python"), "-c", program], empty, HOME=str(empty.parent))
    assert answer.stderr.strip().endswith("[] 0"), answer.stderr


def test_the_node_side_runs_from_the_rendered_directory(installed: Path, empty: Path) -> None:
    assert llmlaunch(installed, empty, "init", "llama3-8b", "-o", "r.yaml").returncode == 0
    assert llmlaunch(installed, empty, "render", "r.yaml", "-o", "run").returncode == 0
    answer = run(["python3", "-I", "-S", "run/node.pyz", "--help"], empty)
    assert "monitor" in answer.stdout + answer.stderr


def test_what_traces_a_rank_came_with_it(installed: Path, empty: Path) -> None:
    """Its programs, the source of the stand-in for CUDA, and what to install beside them."""
    program = "import llmlaunch.tracing as t; print('\\n'.join(sorted(p.name for p in t.TRACER.parent.iterdir())))"
    listed = run([str(installed.parent / "python"), "-c", program], empty).stdout.split()
    source = {path.name for path in (ROOT / "wrapper" / "llmlaunch" / "tracing").iterdir() if path.is_file()}
    assert {"trace_ranks.py", "fake_cuda.cpp", "requirements.txt", "requirements-no-deps.txt"} <= source
    assert source <= set(listed)
