"""What a command imports: a recipe that fits needs neither what reads scripts nor what says why another does not."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import llmlaunch
from llmlaunch.assets import asset

PACKAGE = Path(llmlaunch.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "architecture.md"
RECIPE = str(asset("recipes", "llama3-8b.yaml"))
CLUSTER = ("--cluster", "h100-80gb-x8")
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
srun torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint n1:29500 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \\
  --position-embedding-type rope --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192 --bf16 \\
  --global-batch-size 128 --micro-batch-size 1 --tensor-model-parallel-size 2 --use-distributed-optimizer \\
  --lr 1e-4 --train-iters 10 --mock-data
"""
IMPORTED = """\
import sys
from llmlaunch.cli.main import main
sys.argv = ["llmlaunch", "check", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "llmlaunch"]
print(*sorted(filter(None, (module.__file__ for module in modules))), sep="\\n", file=sys.stderr)
"""


@cache
def imported(*words: str) -> list[Path]:
    """Return our files that `check` imports, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stderr.splitlines() if line.startswith(str(PACKAGE))]


def written(command: str) -> dict[str, int]:
    """Return how many files, and lines in them, the page says that a command imports."""
    row = re.search(rf"(?m)^\| `{command}` \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text("utf-8"))
    assert row is not None, command
    files, lines = (int(figure.replace(",", "")) for figure in row.groups())
    return {"files": files, "lines": lines}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "job.sbatch"
    path.write_text(SCRIPT)
    return str(path)


def size(files: list[Path]) -> dict[str, int]:
    return {"files": len(files), "lines": sum(len(path.read_text("utf-8").splitlines()) for path in files)}


def more_than(most: dict[str, int], files: list[Path]) -> dict[str, int]:
    return {name: count for name, count in size(files).items() if count > most[name]}


def test_check_of_a_recipe_imports_no_more_than_the_page_says() -> None:
    files = imported(RECIPE)
    assert PACKAGE / "planner" / "search.py" in files
    assert more_than(written("check recipe.yaml"), files) == {}


def test_check_of_a_script_imports_no_more_than_the_page_says(script: str) -> None:
    files = imported(script, *CLUSTER)
    assert PACKAGE / "imports" / "command.py" in files
    assert more_than(written("check job.sbatch"), files) == {}


def test_a_recipe_imports_nothing_that_reads_scripts() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0] for path in imported(RECIPE)}
    assert "planner" in rooms
    assert not rooms & {"command_lines", "imports"}


def test_a_recipe_whose_arguments_cannot_be_refused_imports_no_table_of_flags() -> None:
    flags = PACKAGE / "frameworks" / "megatron" / "flags"
    assert not any(flags in path.parents for path in imported(RECIPE))
    assert flags / "table.py" in imported(RECIPE, "environment={NCCL_DEBUG: WARN}")
