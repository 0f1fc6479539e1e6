"""Two scripts as people have them, started as they are, and again from the recipe that was read of them: the trainer
sees the same folder, arguments and environment.

The trainers are Megatron-LM's own `pretrain` and DeepSpeed's own engine; a few lines before them write down what they
see.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster
from person import Person
from test_observe import DEEPSPEED, DS_CONFIG, FRAMEWORKS, MEGATRON, MODEL

pytestmark = pytest.mark.slurm

WRITES_DOWN = """\
import json, os, resource, runpy, sys
from pathlib import Path
if os.environ["RANK"] == "0":
    files = resource.getrlimit(resource.RLIMIT_CORE)[0]
    seen = dict(folder=os.getcwd(), words=sys.argv[1:], environment=dict(os.environ), core=files, python=sys.executable)
    Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
sys.path[0] = str(Path({trainer!r}).parent)
runpy.run_path({trainer!r}, run_name="__main__")
"""
MEGATRON_SBATCH = """\
#!/bin/bash
#SBATCH --job-name=gpt-tiny --nodes=2 --ntasks-per-node=1 --partition=train
source {home}/site.sh
export OMP_NUM_THREADS=1 CPU_STANDS_FOR=9.0 LD_LIBRARY_PATH={home}/lib:$LD_LIBRARY_PATH
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29741
ulimit -c 0
cd {home}/code
MODEL="--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --swiglu \\
  --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \\
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
TRAIN="--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 \\
  --lr 0.005 --min-lr 0.0005 --lr-decay-style cosine --use-distributed-optimizer --log-interval 1 \\
  --eval-iters 0 --eval-interval 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 250"
CPU="--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion \\
  --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion --num-workers 0"
srun bash -c '{python} -m torch.distributed.run --nnodes 2 --nproc_per_node 1 \\
  --node_rank $SLURM_NODEID --master_addr $MASTER_ADDR --master_port $MASTER_PORT \\
  train.py '"$MODEL $TRAIN $CPU"
"""
DEEPSPEED_SBATCH = """\
#!/bin/bash
#SBATCH --job-name=own-deepspeed --nodes=1 --partition=train
export PATH={home}/bin:$PATH
export PYTHONPATH=lib OMP_NUM_THREADS=1 OWN_SETTING="two words"
ulimit -c 0
mkdir -p {home}/made
cd {home}/code
export PYTHONPATH=$PWD/lib
{python} -m torch.distributed.run --nproc_per_node 2 --master_port 29742 train.py \\
  --model_name_or_path ./model --max_length 64 --max_steps 3 --deepspeed --deepspeed_config ds_config.json
"""


def seen_by_both(slurm: Cluster, person: Person, script: str, trainer: Path, *words: str) -> list[dict[str, Any]]:
    """Return what the trainer sees of a script that is submitted as it is, and of the job of its recipe."""
    code = person.folder("code")
    (code / "train.py").write_text(WRITES_DOWN.format(trainer=str(trainer)))
    (person.home / "job.sbatch").write_text(script)
    (person.home / "site.sh").write_text("export SITE_SETTING=given\n")
    (code / "model").mkdir()
    (code / "model" / "config.json").write_text(json.dumps(MODEL))
    (code / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    seen = [of_job(slurm, person, "job.sbatch")]
    person.llmlaunch("init", "--from", "job.sbatch", "-o", "recipe.yaml", *words, code=0)
    person.llmlaunch("render", "recipe.yaml", "memory.accept=tight", "-o", "run", code=0)
    return [*seen, of_job(slurm, person, "run/job.sbatch")]


def of_job(slurm: Cluster, person: Person, script: str) -> dict[str, Any]:
    ended = slurm.run(person.home, script)
    logs = [path for pattern in ("slurm-*.out", "run/logs/*") for path in person.home.glob(pattern)]
    assert ended == "0:0", "\n".join(path.read_text(errors="replace") for path in logs)
    file = person.home / "code" / "seen.json"
    seen: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    return seen


def assert_seen_alike(script: dict[str, Any], rendered: dict[str, Any], *variables: str) -> None:
    """Both trainers run in the same folder by the same interpreter with the same limits and variables; of the search
    path of Python llmlaunch's own folder comes first."""
    path = rendered["environment"].get("PYTHONPATH", "")
    rendered["environment"]["PYTHONPATH"] = path.partition("/hook:")[2] or path
    for name in ("folder", "python", "core"):
        assert rendered[name] == script[name]
    assert {name: rendered["environment"].get(name) for name in variables} == {
        name: script["environment"][name] for name in variables
    }


def flags(words: list[str]) -> set[str]:
    """Return each flag with its words."""
    return {f"--{part.strip()}" for part in " ".join(words).split("--") if part.strip()}


def test_megatron_sees_the_same_from_the_recipe(slurm: Cluster, person: Person) -> None:
    text = MEGATRON_SBATCH.format(home=person.home, python=FRAMEWORKS / "bin/python")
    script, rendered = seen_by_both(slurm, person, text, MEGATRON, "--cluster", "h100-80gb-x8")
    assert_seen_alike(
        script, rendered, "SITE_SETTING", "OMP_NUM_THREADS", "CPU_STANDS_FOR", "LD_LIBRARY_PATH", "WORLD_SIZE"
    )
    assert flags(script["words"]) - flags(rendered["words"]) == set()


def test_deepspeed_sees_the_same_from_the_recipe(slurm: Cluster, person: Person) -> None:
    text = DEEPSPEED_SBATCH.format(home=person.home, python=FRAMEWORKS.parent / ".venv/bin/python")
    script, rendered = seen_by_both(slurm, person, text, DEEPSPEED, "--cluster", "cpu-x1")
    assert_seen_alike(script, rendered, "PATH", "PYTHONPATH", "OMP_NUM_THREADS", "OWN_SETTING", "WORLD_SIZE")
    different = flags(script["words"]) - flags(rendered["words"])
    assert different == {"--deepspeed_config ds_config.json"}
    assert (person.home / "made").is_dir()
