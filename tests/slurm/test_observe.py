"""Somebody's own sbatch with one line in front of its launcher: its peaks are collected, and the next check shows them.

The trainers are Megatron-LM's own `pretrain` and DeepSpeed's own engine; llmlaunch rendered none of it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from one_machine import Cluster
from person import Person

pytestmark = pytest.mark.slurm

HERE = Path(__file__).parent
FRAMEWORKS = HERE.parents[1] / ".venv-frameworks"
MEGATRON = HERE.parent / "frameworks" / "megatron_cpu" / "train.py"
DEEPSPEED = HERE / "own_deepspeed_trainer.py"

# Facts of a sbatch as people write it; OBSERVE is the only thing that is put in.
MEGATRON_SBATCH = """\
#!/bin/bash
#SBATCH --job-name=gpt-tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
export OMP_NUM_THREADS=1 CPU_STANDS_FOR=9.0
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
MODEL="--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --swiglu \\
  --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \\
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
TRAIN="--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 \\
  --lr 0.005 --min-lr 0.0005 --lr-decay-style cosine --use-distributed-optimizer --log-interval 1 \\
  --eval-iters 0 --eval-interval 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 250"
CPU="--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion \\
  --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion --num-workers 0"
srun bash -c '{observe} {python} -m torch.distributed.run --nnodes 2 --nproc_per_node 1 \\
  --node_rank $SLURM_NODEID --master_addr $MASTER_ADDR --master_port $MASTER_PORT \\
  {trainer} '"$MODEL $TRAIN $CPU"
"""
DEEPSPEED_SBATCH = """\
#!/bin/bash
#SBATCH --job-name=own-deepspeed
#SBATCH --nodes=1
cd {home}
{observe} {python} -m torch.distributed.run --nproc_per_node 2 --master_port {port} {trainer} \\
  --model_name_or_path ./model --max_length 64 --max_steps 3 --deepspeed --deepspeed_config ds_config.json
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 250,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000, "allgather_bucket_size": 1000000},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}  # fmt: skip


def sbatch(slurm: Cluster, person: Person, template: str, **names: object) -> Path:
    """Submit the script as it is, and again with the observing line, with not another letter changed; return the
    directory that was observed."""
    script = person.home / "job.sbatch"
    text = template.format(home=person.home, observe="{observe}", **names)
    script.write_text(text.replace("{observe}", f"{shlex.quote(sys.executable)} {person.home}/node.pyz observe --"))
    person.llmlaunch("observe", "--write-node-pyz", person.home / "node.pyz", code=0)
    ended = slurm.run(person.home, "job.sbatch")
    output = "\n".join(path.read_text(errors="replace") for path in person.home.glob("slurm-*.out"))
    assert ended == "0:0", output
    (directory,) = (person.home / "observed").iterdir()
    return directory


def collected_and_checked(person: Person, directory: Path, cluster: str, ranks: int, nodes: int) -> None:
    """The peaks land in the store beside what would have been predicted, and the next check of the same job shows
    them."""
    said = person.llmlaunch("collect", "observed", code=0)
    assert "(succeeded): collected" in said.stdout, said.stdout + said.stderr
    run_id = (directory / "run.id").read_text().strip()
    records = [record for record in person.measurements() if record["peak_kind"] == "resident"]
    assert sorted(record["global_rank"] for record in records) == list(range(ranks))
    assert len({record["node"] for record in records}) == nodes
    for record in records:
        assert record["run_id"] == run_id
        assert record["peak_bytes"] > 2**27
        assert record["predicted_bytes"] > 0, said.stderr
    check = person.llmlaunch("check", "-v", directory / "recipe.yaml")
    assert re.search(rf"This recipe ran .*\(succeeded, {re.escape(run_id)}\); measured then", check.stdout), (
        check.stdout
    )
    of_script = person.llmlaunch("check", "-v", person.home / "job.sbatch", "--cluster", cluster).stdout
    assert f"(succeeded, {run_id}); measured then" in of_script, of_script
    worst = max(record["peak_bytes"] for record in records)
    for of in ((directory / "recipe.yaml",), (person.home / "job.sbatch", "--cluster", cluster)):
        corrected = json.loads(person.llmlaunch("check", *of, "--json").stdout)["memory"]["rehearsed"]
        assert corrected["device_bytes"] == worst, of
        assert run_id in corrected["sentence"]
    assert f"rank 0 resident: {worst / 2**30:.2f}" in check.stdout


def test_a_megatron_job_of_ones_own_is_observed_collected_and_shown_by_the_next_check(
    slurm: Cluster, person: Person
) -> None:
    if not (FRAMEWORKS / ".installed").exists():
        pytest.fail(f"{FRAMEWORKS} is missing: `make install-frameworks` makes it")
    directory = sbatch(slurm, person, MEGATRON_SBATCH, python=FRAMEWORKS / "bin/python", trainer=MEGATRON, port=29731)
    assert directory.name.startswith("gpt-tiny-")
    progress = json.loads(next(directory.glob("attempts/*/progress.json")).read_text())
    assert (progress["step"], progress["steps"]) == (4, 4)
    assert progress["step_seconds"] > 0
    collected_and_checked(person, directory, "cpu-x1", ranks=2, nodes=2)
    recipe = (directory / "recipe.yaml").read_text()
    assert "megatron-lm" in recipe
    assert "zero_stage: 1" in recipe
    observed = json.loads(next(directory.glob("attempts/*/attempt.json")).read_text())["observed"]
    assert observed["batch_script"] == (person.home / "job.sbatch").read_text()
    assert "succeeded" in person.llmlaunch("status", directory).stdout
    assert "iteration        4/       4" in person.llmlaunch("logs", directory).stdout


def test_a_deepspeed_job_of_ones_own_too(slurm: Cluster, person: Person) -> None:
    (person.home / "model").mkdir()
    (person.home / "model" / "config.json").write_text(json.dumps(MODEL))
    (person.home / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    directory = sbatch(slurm, person, DEEPSPEED_SBATCH, python=sys.executable, trainer=DEEPSPEED, port=29741)
    collected_and_checked(person, directory, "cpu-x2", ranks=2, nodes=1)
    assert "stage: 1" in (directory / "recipe.yaml").read_text()
