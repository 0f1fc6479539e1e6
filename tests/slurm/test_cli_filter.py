"""The filter for administrators: real sbatch warns before the queue of a training that does not fit or cannot start,
and submits in silence where llmlaunch has nothing to say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster

pytestmark = pytest.mark.slurm

FILTER = Path(__file__).parents[2] / "slurm" / "cli_filter.lua"
PLAIN = "#!/bin/bash\n#SBATCH --partition=train --nodes=1\nhostname\n"
NOT_READ = """\
#!/bin/bash
#SBATCH --partition=train --nodes=1
torchrun --nproc_per_node 8 ./train.py --job.config_file ./llama.toml
"""
# Llama 3 8B with eight sequences in a micro-batch: 207 GiB of activations and model states on a card of 80 GB.
TRAINING = """\
#!/bin/bash
#SBATCH --partition=train
#SBATCH --nodes=1
MICRO=$1
ARGS=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
  --micro-batch-size $MICRO --global-batch-size 128 --tensor-model-parallel-size 2 --sequence-parallel
  --use-distributed-optimizer --bf16 --swiglu --normalization RMSNorm --position-embedding-type rope
  --disable-bias-linear --untie-embeddings-and-output-weights --train-iters 10 --lr 3e-4
  --vocab-size 128256 --tokenizer-type NullTokenizer --mock-data
)
torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
"""
# Two nodes, and only the first of them is told of the training.
CANNOT_START = TRAINING.replace("--nodes=1", "--nodes=2").replace("MICRO=$1", "MICRO=1")
Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sbatch(slurm: Cluster, tmp_path: Path) -> Submit:
    """sbatch of a person on a machine that has the filter, with what a site writes at its top. `answers` is what
    stands in for llmlaunch, in lines of a shell."""
    real = f'exec {sys.executable} -m llmlaunch "$@"'

    def submit(
        script: str, *arguments: str, refuse: bool = False, answers: str = real, command: str = "", seconds: int = 60
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "llmlaunch"
        program.write_text(f"#!/bin/sh\n{answers}\n")
        program.chmod(0o755)
        etc = tmp_path / "etc"
        shutil.copytree(slurm.conf.parent, etc, dirs_exist_ok=True)
        conf = etc / "slurm.conf"
        conf.write_text(slurm.conf.read_text() + "CliFilterPlugins=lua\n")
        text = FILTER.read_text()
        for before, after in (
            ('LLMLAUNCH = "llmlaunch"', f'LLMLAUNCH = "{command or program}"'),
            ("SECONDS = 20", f"SECONDS = {seconds}"),
            ("REFUSE = false", f"REFUSE = {str(refuse).lower()}"),
            ("local CLUSTERS = {", 'local CLUSTERS = { train = "h100-80gb-x8", [""] = "h100-80gb-x8",'),
        ):
            assert before in text
            text = text.replace(before, after)
        (etc / "cli_filter.lua").write_text(text)
        job = tmp_path / "it's a job.sbatch"
        job.write_text(script)
        words = ["sbatch", "--hold", "--output=/dev/null", str(job), *arguments]
        environment = {**slurm.environment, "SLURM_CONF": str(conf)}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=False)

    return submit


def test_what_does_not_fit_is_reported_and_submitted(sbatch: Submit) -> None:
    answer = sbatch(TRAINING, "8")
    assert "Submitted batch job" in answer.stdout
    assert "llmlaunch: warning: " in answer.stderr
    assert "no layout is safe" in answer.stderr
    assert "(submitted all the same)" in answer.stderr


def test_a_launch_that_cannot_work_is_reported_and_submitted(sbatch: Submit) -> None:
    answer = sbatch(CANNOT_START)
    assert "Submitted batch job" in answer.stdout
    assert "llmlaunch: warning: the launch cannot work: " in answer.stderr
    assert "srun" in answer.stderr
    assert answer.stderr.endswith("(submitted all the same)\n")


def test_a_script_without_a_verdict_is_reported_and_submitted(sbatch: Submit) -> None:
    answer = sbatch(NOT_READ, refuse=True)
    assert "Submitted batch job" in answer.stdout
    assert "no verdict: torchtitan is not read" in answer.stderr
    assert "(submitted)" in answer.stderr


def test_a_site_may_refuse_what_does_not_fit(sbatch: Submit) -> None:
    answer = sbatch(TRAINING, refuse=True, answers="echo error: no layout is safe; exit 3")
    assert answer.returncode != 0
    assert "Submitted" not in answer.stdout
    assert "no layout is safe (not submitted; LLMLAUNCH_CLI_FILTER=off submits it all the same)" in answer.stderr


def test_a_script_that_starts_no_training_starts_no_process(sbatch: Submit, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    notes = f"touch {asked}"
    plain = "#!/bin/bash\n#SBATCH --partition=train --nodes=1 --comment=train\n# torchrun train.py\nsrun ./solver in\n"
    (tmp_path / "other.sh").write_text("sh ./third.sh\n")
    (tmp_path / "third.sh").write_text("bash other.sh\n./solver\n")
    for line in ("", "source ~/.bashrc", "bash other.sh", "bash not-here.sh", "python analyse.py"):
        assert "Submitted batch job" in sbatch(f"{plain}{line}\n", answers=notes).stdout
    assert not asked.exists()
    (tmp_path / "third.sh").write_text("torchrun x.py\n")
    for line in ("bash other.sh", "bash $HOME/x.sh", "srun python pretrain.py"):
        assert "Submitted batch job" in sbatch(f"{plain}{line}\n", answers=notes).stdout
        assert asked.exists(), line
        asked.unlink()


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(TRAINING, {"answers": "exit 0"}, id="it fits"),
        pytest.param(PLAIN, {"answers": "echo error: asked; exit 3"}, id="no training"),
        pytest.param(TRAINING, {"command": "/nowhere/llmlaunch"}, id="no llmlaunch"),
        pytest.param(TRAINING, {"answers": "sleep 100", "seconds": 1}, id="a slow one"),
        pytest.param("#!/bin/bash\nif [ ((\n", {"answers": "echo error: asked; exit 3"}, id="no bash"),
    ],
)
def test_otherwise_the_job_is_submitted_silently(sbatch: Submit, script: str, options: dict[str, Any]) -> None:
    answer = sbatch(script, refuse=True, **options)
    assert "Submitted batch job" in answer.stdout
    assert answer.stderr == ""


def test_arguments_of_the_script_reach_llmlaunch_as_they_are(sbatch: Submit, tmp_path: Path) -> None:
    argument = f"$(touch {tmp_path}/never); '; touch {tmp_path}/never"
    assert "Submitted batch job" in sbatch(TRAINING, argument, answers=f'printf "%s\\n" "$@" > {tmp_path}/words').stdout
    assert f"1={argument}" in (tmp_path / "words").read_text().splitlines()
    assert not (tmp_path / "never").exists()
