"""The filter for administrators: real sbatch warns before the queue of a training that does not fit or cannot start,
and submits in silence where llmlaunch has nothing to say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
# Trains by epochs, of data that is nowhere.
EPOCHS = """\
#!/bin/bash
#SBATCH --partition=train --nodes=1
deepspeed --num_gpus 8 train.py --model_name_or_path meta-llama/Meta-Llama-3-70B --num_train_epochs 3 \\
  --per_device_train_batch_size 8 --max_seq_length 8192 --bf16 --deepspeed ds.json --dataset_name mine --output_dir out
"""
DS_CONFIG = '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto"}'


@pytest.fixture
def sbatch(slurm: Cluster, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """sbatch of a person on a machine that has the filter, with what a site writes at its top."""
    program = tmp_path / "llmlaunch"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmlaunch "$@"\n')
    program.chmod(0o755)

    def submit(script: str, *arguments: str, refuse: bool = False, command: str = str(program), seconds: int = 60):
        etc = tmp_path / "etc"
        shutil.copytree(slurm.conf.parent, etc, dirs_exist_ok=True)
        conf = etc / "slurm.conf"
        conf.write_text(slurm.conf.read_text() + "CliFilterPlugins=lua\n")
        text = FILTER.read_text()
        for before, after in (
            ('LLMLAUNCH = "llmlaunch"', f'LLMLAUNCH = "{command}"'),
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


def test_what_does_not_fit_is_said_and_submitted(sbatch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    answer = sbatch(TRAINING, "8")
    assert "Submitted batch job" in answer.stdout
    assert "llmlaunch: warning: " in answer.stderr
    assert "no layout is safe" in answer.stderr
    assert "(submitted all the same)" in answer.stderr


def test_a_launch_that_cannot_work_is_said_and_submitted(
    sbatch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    answer = sbatch(CANNOT_START)
    assert "Submitted batch job" in answer.stdout
    assert "llmlaunch: warning: the launch cannot work: " in answer.stderr
    assert "srun" in answer.stderr
    assert answer.stderr.endswith("(submitted all the same)\n")


def test_a_training_by_epochs_is_judged_too(
    sbatch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(DS_CONFIG)
    answer = sbatch(EPOCHS)
    assert "Submitted batch job" in answer.stdout
    assert "no layout is safe" in answer.stderr


def test_a_script_that_starts_no_training_starts_no_process(
    sbatch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "counts"
    program.write_text(f"#!/bin/sh\ntouch {asked}\n")
    program.chmod(0o755)
    plain = "#!/bin/bash\n#SBATCH --partition=train --nodes=1 --comment=train\n# torchrun train.py\nsrun ./solver in\n"
    assert "Submitted batch job" in sbatch(plain, command=str(program)).stdout
    assert not asked.exists()
    (tmp_path / "other.sh").write_text("sh ./third.sh\n")
    (tmp_path / "third.sh").write_text("bash other.sh\n./solver\n")
    for line in ("source ~/.bashrc", "bash other.sh", "bash not-here.sh", "python analyse.py"):
        assert "Submitted batch job" in sbatch(f"{plain}{line}\n", command=str(program)).stdout
    assert not asked.exists()
    (tmp_path / "third.sh").write_text("torchrun x.py\n")
    for line in ("bash other.sh", "bash $HOME/x.sh", "srun python pretrain.py"):
        assert "Submitted batch job" in sbatch(f"{plain}{line}\n", command=str(program)).stdout
        assert asked.exists(), line
        asked.unlink()


def test_a_site_may_refuse_it(sbatch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    answer = sbatch(TRAINING, "8", refuse=True)
    assert answer.returncode != 0
    assert "Submitted" not in answer.stdout
    assert "LLMLAUNCH_CLI_FILTER=off submits it all the same" in answer.stderr


@pytest.mark.parametrize("refuse", [False, True], ids=["says", "refuses"])
def test_without_a_verdict_it_says_so_and_lets_the_job_pass(
    sbatch: Callable[..., subprocess.CompletedProcess[str]], refuse: bool
) -> None:
    answer = sbatch(NOT_READ, refuse=refuse)
    assert "Submitted batch job" in answer.stdout
    assert "no verdict: torchtitan is not read" in answer.stderr
    assert "(submitted)" in answer.stderr


@pytest.mark.parametrize(
    ("script", "argument", "options"),
    [
        pytest.param(TRAINING, "1", {}, id="it fits"),
        pytest.param(PLAIN, "", {}, id="no training"),
        pytest.param(TRAINING, "$(touch /tmp/never); '; touch never", {}, id="an argument that is no number"),
        pytest.param(TRAINING, "8", {"command": "/nowhere/llmlaunch"}, id="no llmlaunch"),
        pytest.param(TRAINING, "8", {"command": "SLOW", "seconds": 1}, id="a slow one"),
        pytest.param("#!/bin/bash\nif [ ((\n", "", {}, id="no bash"),
    ],
)
def test_else_it_is_submitted_without_a_word(
    sbatch: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    script: str,
    argument: str,
    options: dict[str, str | int],
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 100\n")
    slow.chmod(0o755)
    if options.get("command") == "SLOW":
        options = {**options, "command": str(slow)}
    answer = sbatch(script, argument, refuse=True, **options)
    assert "Submitted batch job" in answer.stdout
    assert answer.stderr == ""
    assert not Path("/tmp/never").exists()
    assert not Path("never").exists()
