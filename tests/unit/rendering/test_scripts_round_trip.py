"""A script becomes a recipe, and the job of that recipe starts the trainer as the script does: the same arguments,
folder, environment, modules, container and options of sbatch.

Each way to prepare and launch a training is tried with one of three trainings, in a long test with all of them, and the
rendered job is read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.command_lines.command import Reading, ScriptContainer
from llmlaunch.documents.yaml_strict import read_document
from llmlaunch.imports.command import read_command
from llmlaunch.imports.recipe_file import read_source
from support.command_line import CommandLine
from support.rendered_jobs import RenderedJob, rendered_job
from support.soak import SOAK

MEGATRON = """pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --bf16 \
--normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --disable-bias-linear --mock-data \
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 \
--global-batch-size 128 --train-iters 1000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100 \
--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --tensor-model-parallel-size 2 --sequence-parallel \
--use-distributed-optimizer --tokenizer-type NullTokenizer --vocab-size 128256 --save ckpt --save-interval 250 \
--load ckpt --log-interval 5 --tensorboard-dir tb --seed 7 --distributed-timeout-minutes 20"""
MIXTURE = """pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 1024 --num-attention-heads 16 --bf16 \
--num-experts 64 --moe-router-topk 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --swiglu \
--expert-model-parallel-size 8 --seq-length 4096 --max-position-embeddings 4096 --normalization RMSNorm \
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 2 \
--global-batch-size 256 --train-iters 500 --lr 1e-4 --use-distributed-optimizer --tokenizer-type NullTokenizer \
--vocab-size 50304 --data-path data/text_document --split 99,1,0 --recompute-granularity selective \
--attention-dropout 0 --hidden-dropout 0 --overlap-grad-reduce --pipeline-model-parallel-size 1"""
HUGGING_FACE = """finetune.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --max_steps 500 \
--gradient_accumulation_steps 4 --learning_rate 1e-5 --warmup_steps 20 --weight_decay 0.05 --bf16 \
--gradient_checkpointing --deepspeed ds.json --output_dir out --save_steps 100 --max_seq_length 4096 \
--dataset_name my/data --report_to wandb --logging_steps 5 --seed 3 --lr_scheduler_type cosine"""
TRAININGS = {"megatron": MEGATRON, "mixture": MIXTURE, "hugging-face": HUGGING_FACE}
DS_CONFIG = """{"zero_optimization": {"stage": 3, "overlap_comm": true}, "bf16": {"enabled": true},
 "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
"""
HEAD = "#!/bin/bash\n#SBATCH --job-name=mine --nodes=2 --gpus-per-node=h100:8 --ntasks-per-node=1 --time=04:00:00\n"
ADDRESS = "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500\n"
TORCHRUN = (
    "torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT"
)
# What may differ between what a script's trainer is given and what that of its recipe is, by the key that was read.
MAY_DIFFER = {
    "name": "the job's name is in sbatch's options",
    "nodes": "compared apart",
    "slurm": "compared apart",
    "setup": "compared apart",
    "python": "compared apart",
    "workdir": "compared apart",
    "container": "compared apart",
    "environment": "compared apart",
    "secrets": "compared apart",
    "layout.techniques": "asked: only what the script asks for",
    "backend.path": "the script is named by its whole path",
    "backend.script": "the script is named by its whole path",
}


# Flags whose words may differ.
OTHER_WORDS = {"--deepspeed": "names the rendered file, of which each setting is compared"}


@dataclass(frozen=True)
class Preparation:
    """A script of which `{}` is the training, and what its trainer sees: variables, setup lines, and so on.

    `folder` is that in which the trainer starts, within the script's own unless it is absolute.
    """

    script: str
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    folder: str = "."
    python: str | None = None
    container: ScriptContainer | None = None
    slurm: Mapping[str, str | int | bool] = field(default_factory=lambda: {"time": "04:00:00"})
    secrets: tuple[str, ...] = ()


PREPARATIONS = {
    "plain": Preparation(f"{HEAD}{ADDRESS}srun {TORCHRUN} {{}}\n"),
    "modules": Preparation(
        f"{HEAD}module purge\nmodule load cuda/12.4 nccl/2.21\nml gcc/12\nmodule list\n{ADDRESS}srun {TORCHRUN} {{}}\n",
        setup=("module purge", "module load cuda/12.4 nccl/2.21", "ml gcc/12"),
    ),
    "conda": Preparation(
        f"{HEAD}conda activate llm\n{ADDRESS}srun {TORCHRUN} {{}}\n",
        setup=('eval "$(conda shell.bash hook)"', "conda activate llm"),
    ),
    "conda by path": Preparation(
        f"{HEAD}conda activate /envs/llm\n{ADDRESS}srun {TORCHRUN} {{}}\n",
        setup=('eval "$(conda shell.bash hook)"', "conda activate /envs/llm"),
        python="/envs/llm/bin/python",
    ),
    "interpreter": Preparation(
        f"{HEAD}{ADDRESS}srun /opt/llm/bin/{TORCHRUN} {{}}\n", python="/opt/llm/bin/python"
    ),
    "search paths": Preparation(
        f"{HEAD}export PATH=/x/bin:$PATH\nmodule load late\nexport LD_LIBRARY_PATH=/x/lib:$LD_LIBRARY_PATH\n"
        f"export PYTHONPATH=/x/src\nulimit -n 65536\n{ADDRESS}srun {TORCHRUN} {{}}\n",
        environment={"PYTHONPATH": "/x/src"},
        setup=(
            'export PATH="/x/bin:${PATH}"',
            "module load late",
            'export LD_LIBRARY_PATH="/x/lib:${LD_LIBRARY_PATH}"',
            "ulimit -n 65536",
        ),
    ),
    "variables": Preparation(
        f"{HEAD}export NCCL_DEBUG=INFO HF_HOME=/scratch/hf UCX_TLS=rc,sm https_proxy=http://proxy:3128\n"
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567\n"
        f"export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512\n{ADDRESS}srun {TORCHRUN} {{}}\n",
        environment={
            "NCCL_DEBUG": "INFO",
            "HF_HOME": "/scratch/hf",
            "UCX_TLS": "rc,sm",
            "https_proxy": "http://proxy:3128",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
        },
        secrets=("WANDB_API_KEY",),
    ),
    "another folder": Preparation(
        f'{HEAD}cd code\nexport PYTHONPATH=.:lib:$PYTHONPATH\n{ADDRESS}srun {TORCHRUN} {{}}\n',
        setup=('export PYTHONPATH="HERE/code:HERE/code/lib:${PYTHONPATH}"',),
        folder="code",
    ),
    "a shell on each node": Preparation(
        f'{HEAD}module load cuda\n{ADDRESS}srun bash -c "cd code && {TORCHRUN} {{}}"\n',
        setup=("module load cuda",),
        folder="code",
    ),
    "options of sbatch": Preparation(
        "#!/bin/bash\n#SBATCH -J mine -N 2 --ntasks-per-node=8 -c 12 --gpus-per-task=1 -p train -A proj --mem=0\n"
        "#SBATCH -t 1-00 --exclusive -x node7 --mail-type=END\n"
        "export MASTER_ADDR=localhost\nsrun --ntasks-per-node=8 python {}\n",
        slurm={
            "partition": "train", "account": "proj", "mem": "0", "time": "1-00", "cpus-per-task": "96",
            "exclusive": True, "exclude": "node7", "mail-type": "END", "gpus-per-node": "8",
        },
    ),
    "pyxis": Preparation(
        f"{HEAD}{ADDRESS}srun --container-image=/img/a.sqsh --container-mounts=/data:/data,/code:/code:ro "
        f"{TORCHRUN} {{}}\n",
        container=ScriptContainer("/img/a.sqsh", ("/data:/data", "/code:/code:ro"), "pyxis"),
    ),
    "pyxis in a folder": Preparation(
        f"{HEAD}source host.sh\n{ADDRESS}srun --container-image=nvcr.io#nvidia/pytorch:25.08-py3 "
        f"--container-mounts=$PWD:/w --container-workdir=/w --no-container-mount-home {TORCHRUN} {{}}\n",
        setup=("source host.sh",),
        folder="/w",
        container=ScriptContainer("nvcr.io#nvidia/pytorch:25.08-py3", ("HERE:/w",), "pyxis"),
    ),
    "a shell in a container": Preparation(
        f"{HEAD}{ADDRESS}srun --container-image=/img/a.sqsh --container-mounts=/data:/data bash -c "
        f"'source /venv/bin/activate; cd code; export INSIDE=1; {TORCHRUN} {{}}'\n",
        environment={"INSIDE": "1"},
        folder="code",
        python="/venv/bin/python",
        container=ScriptContainer("/img/a.sqsh", ("/data:/data",), "pyxis"),
    ),
    "apptainer": Preparation(
        f"{HEAD}{ADDRESS}srun apptainer exec --nv -B /data -B /a:/b:ro /img/a.sif {TORCHRUN} {{}}\n",
        container=ScriptContainer("/img/a.sif", ("/data:/data", "/a:/b:ro"), "apptainer"),
    ),
}  # fmt: skip


PAIRS = list(product(PREPARATIONS, TRAININGS))
SOME = [(preparation, [*TRAININGS][number % 3]) for number, preparation in enumerate(PREPARATIONS)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "code"):
        place.mkdir(exist_ok=True)
        (place / "ds.json").write_text(DS_CONFIG)
        for script in ("pretrain_gpt.py", "finetune.py"):
            (place / script).write_text("import torch\n")
    return tmp_path


@pytest.mark.parametrize(("preparation", "training"), PAIRS if SOAK else SOME)
def test_the_job_of_the_recipe_starts_the_trainer_as_the_script_does(
    preparation: str, training: str, llmlaunch: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = PREPARATIONS[preparation]
    script = folder / "job.sbatch"
    script.write_text(expected.script.format(TRAININGS[training]))
    for name in expected.secrets:
        monkeypatch.setenv(name, "set where it is submitted")
    llmlaunch("init", "--from", script, "--cluster", "h100-80gb-x8", "-o", "mine.yaml")
    llmlaunch("render", "mine.yaml", "-o", "run", "memory.accept=tight")
    job, source = rendered_job(folder / "run"), read_source(script)
    assert_started_alike(job, expected, folder)
    assert read_document(Path("mine.yaml")).value.get("secrets", []) == list(expected.secrets)
    assert dict(differences(source.reading, read_command(job.command))) == {}
    assert source.command is not None
    assert dict(other_words(source.command.arguments, job.command.arguments, source.command.folder)) == {}
    if training == "hugging-face":
        rendered = dict(leaves(json.loads((folder / "run" / "ds_config.json").read_text())))
        original = {key: value for key, value in leaves(json.loads(DS_CONFIG)) if value != "auto"}
        assert {key: rendered[key] for key in original} == original


def assert_started_alike(job: RenderedJob, expected: Preparation, folder: Path) -> None:
    """The trainers of a rendered job start where, in what and after what those of the script do."""
    assert (job.command.nodes, job.command.devices_per_node) == (2, 8)
    in_image = expected.container is not None and expected.container.runtime == "pyxis" and expected.folder == "."
    assert job.workdir == (None if in_image else str((folder / expected.folder).resolve()))
    assert job.python == expected.python
    assert job.setup == tuple(line.replace("HERE", str(folder)) for line in expected.setup)
    assert job.container == (
        expected.container
        and replace(
            expected.container,
            mounts=tuple(mount.replace("HERE", str(folder)) for mount in expected.container.mounts),
        )
    )
    assert {name: job.command.environment.get(name) for name in expected.environment} == expected.environment
    assert {name: str(job.directives.get(name)) for name in expected.slurm} == {
        name: str(value) for name, value in expected.slurm.items()
    }
    assert job.directives["job-name"] == "mine"


def differences(original: Reading, rendered: Reading) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what was read of a script and is read differently of the job of its recipe, by its dotted key."""
    after = dict(leaves(rendered.document))
    for key, value in leaves(original.document):
        if not any(key == each or key.startswith(f"{each}.") for each in MAY_DIFFER) and after.get(key) != value:
            yield key, (value, after.get(key))


def other_words(script: Sequence[str], rendered: Sequence[str], folder: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the flags of a script that the rendered trainer is not given, or with other words, but for those that may
    differ. A path in `folder` may be given whole, and a flag alone as True."""
    after = dict(flags_with_words(rendered))
    for flag, words in flags_with_words(script):
        alike = (words or "True", words, str(folder / words))
        if after.get(flag, "absent") not in alike and flag not in OTHER_WORDS:
            yield flag, (words, after.get(flag, "absent"))


def flags_with_words(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag with its words, numbers by their value."""
    flag, words = "", []
    for word in (*arguments, "--"):
        if word.startswith("--"):
            if flag:
                yield flag, " ".join(words)
            flag, words = word, []
        else:
            words.append(str(float(word)) if re.fullmatch(r"[-+.\deE]*\d[-+.\deE]*", word) else word)


def leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
