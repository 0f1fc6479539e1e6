"""Arguments that Megatron-LM refuses end a job on real SLURM before the first step, with a cause of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
TRACED = ROOT / "tests" / "frameworks" / "traced"
FRAMEWORKS = ROOT / ".venv-frameworks"

# The training environment's interpreter: Megatron core, and stand-ins for what this machine lacks.
PYTHON = """\
#!/bin/bash
case $1 in
*/megatron_check.py) exec "{frameworks}/bin/python" "{traced}/dataset_ranks.py" build "$@" ;;
*) exec "{frameworks}/bin/python" "$@" ;;
esac
"""

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def test_refused_arguments_end_the_job_and_nothing_starts_it_again(tmp_path: Path) -> None:
    if not (FRAMEWORKS / ".installed").exists():
        pytest.fail(f"{FRAMEWORKS} is missing: `make install-frameworks` makes it")
    python, run = tmp_path / "python", tmp_path / "run"
    python.write_text(PYTHON.format(frameworks=FRAMEWORKS, traced=TRACED))
    python.chmod(0o755)
    words = [
        *("nodes=2", "cluster=cpu-x1", "data={mock: true}", f"python={python}", "layout={micro_batch_size: 1}"),
        f"backend={{name: megatron-lm, path: {TRACED}, extra_args: [--of-nobody, '4']}}",
        *("training.save_interval=10", f"training.checkpoint_path={tmp_path / 'checkpoints'}"),  # so it would come back
    ]
    done = subprocess.run(
        [sys.executable, "-m", "llmlaunch", "submit", QUICKSTART, *words, "-o", str(run), "--follow"],
        cwd=tmp_path, env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "note: backend.extra_args: --of-nobody is no flag of Megatron core 0.19" in done.stderr
    assert "Megatron-LM refuses its arguments: unrecognized arguments: --of-nobody 4" in done.stdout
    status = json.loads((run / "status.json").read_text())
    assert status["cause"]["kind"] == "bad_arguments"
    assert status["next"]["why"] == "a restart would end in bad_arguments again"
    assert len(list((run / "attempts").iterdir())) == 1
    job_log = next((run / "logs").glob("*.job.log")).read_text()
    assert f"llmlaunch explain-args {run}" in job_log
    assert not (run / "prepared").exists()
