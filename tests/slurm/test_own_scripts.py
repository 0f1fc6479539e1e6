"""Scripts as people have them, with one line in front of the launcher: their peaks are collected and the next check
shows them. Submitted again from the recipe that `init` reads of them, the trainer gets the same folder, arguments and
environment.

The trainers only note what they get and print steps; tests/frameworks trains with the real ones.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from person import Person

from support.side_by_side import side_by_side

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ROOT / ".venv-frameworks"
# A trainer that notes what it gets, and holds as much memory as torch would.
NOTES = """\
import json, os, resource, sys, time
from pathlib import Path
if os.environ["RANK"] == "0":
    core = resource.getrlimit(resource.RLIMIT_CORE)[0]
    seen = dict(folder=os.getcwd(), words=sys.argv[1:], environment=dict(os.environ), core=core, python=sys.executable)
    Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
"""
# As Megatron-LM logs its steps; the monitor looks once a second.
TRAINS = """\
held = b"x" * 2**28
for step in range(1, 5):
    if os.environ["RANK"] == "0":
        print(f" iteration {step:8d}/       4 | elapsed time per iteration (ms): 900.0 | lm loss: {1 / step:.6E} |")
        sys.stdout.flush()
    time.sleep(0.9)
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
srun bash -c '{observe}{python} -m torch.distributed.run --nnodes 2 --nproc_per_node 1 \\
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
{observe}{python} -m torch.distributed.run --nproc_per_node 2 --master_port 29742 train.py \\
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


class Script:
    """Someone's script in his home: `plain.sbatch` as he wrote it, `job.sbatch` with the line that observes it."""

    def __init__(self, person: Person, template: str, python: Path, trainer: str) -> None:
        self.person, self.home = person, person.home
        self.code = person.folder("code")
        (self.code / "model").mkdir()
        (self.code / "model" / "config.json").write_text(json.dumps(MODEL))
        (self.code / "ds_config.json").write_text(json.dumps(DS_CONFIG))
        (self.home / "site.sh").write_text("export SITE_SETTING=given\n")
        person.llmlaunch("observe", "--write-node-pyz", self.home / "node.pyz", code=0)
        for name, observe in (
            ("plain", ""),
            ("job", f"{shlex.quote(sys.executable)} {self.home}/node.pyz observe -- "),
        ):
            text = template.format(home=self.home, python=python, observe=observe)
            (self.home / f"{name}.sbatch").write_text(text)
        self.seen = self.run("job.sbatch", trainer)
        (self.observed,) = (self.code / "observed").iterdir()

    def run(self, script: str, trainer: str) -> dict[str, Any]:
        """Return what the trainer saw that the script started; of the search path of Python llmlaunch's own folder
        comes first."""
        (self.code / "train.py").write_text(NOTES + trainer)
        ended = self.person.cluster.run(self.home, script)
        logs = [path for pattern in ("slurm-*.out", "run/logs/*") for path in self.home.glob(pattern)]
        assert ended == "0:0", "\n".join(path.read_text(errors="replace") for path in logs)
        file = self.code / "seen.json"
        seen: dict[str, Any] = json.loads(file.read_text())
        file.unlink()
        path = seen["environment"].get("PYTHONPATH", "")
        seen["environment"]["PYTHONPATH"] = path.partition("/hook:")[2] or path
        return seen

    def collected(self, ranks: int, nodes: int) -> int:
        """Collect it; the largest resident peak of its ranks, in bytes."""
        said = self.person.llmlaunch("collect", self.code / "observed", code=0)
        assert "(succeeded): collected" in said.stdout, said.stdout + said.stderr
        records = [record for record in self.person.measurements() if record["peak_kind"] == "resident"]
        assert sorted(record["global_rank"] for record in records) == list(range(ranks))
        assert len({record["node"] for record in records}) == nodes
        assert {record["run_id"] for record in records} == {self.run_id}
        assert all(record["peak_bytes"] > 2**27 and record["predicted_bytes"] > 0 for record in records), records
        return max(record["peak_bytes"] for record in records)

    @property
    def run_id(self) -> str:
        return (self.observed / "run.id").read_text().strip()

    def assert_the_recipe_starts_the_same(self, cluster: str, *variables: str) -> set[str]:
        """In the same folder, by the same interpreter, with the same limits and variables. Return the flags that the
        recipe's trainer does not get."""
        self.person.llmlaunch("init", "--from", "plain.sbatch", "-o", "recipe.yaml", "--cluster", cluster, code=0)
        self.person.llmlaunch("render", "recipe.yaml", "memory.accept=tight", "-o", "run", code=0)
        rendered = self.run("run/job.sbatch", "")
        for name in ("folder", "python", "core"):
            assert rendered[name] == self.seen[name]
        assert {name: rendered["environment"].get(name) for name in variables} == {
            name: self.seen["environment"][name] for name in variables
        }
        return flags(self.seen["words"]) - flags(rendered["words"])


def flags(words: list[str]) -> set[str]:
    """Return each flag with its words."""
    return {f"--{part.strip()}" for part in " ".join(words).split("--") if part.strip()}


def a_megatron_script_is_observed_collected_checked_and_started_from_its_recipe(person: Person) -> None:
    if not (FRAMEWORKS / ".installed").exists():
        pytest.fail(f"{FRAMEWORKS} is missing: `make install-frameworks` makes it")
    script = Script(person, MEGATRON_SBATCH, FRAMEWORKS / "bin" / "python", TRAINS)
    directory = script.observed
    assert directory.name.startswith("gpt-tiny-")
    progress = json.loads(next(directory.glob("attempts/*/progress.json")).read_text())
    assert (progress["step"], progress["steps"]) == (4, 4)
    assert progress["step_seconds"] > 0
    observed = json.loads(next(directory.glob("attempts/*/attempt.json")).read_text())["observed"]
    assert observed["batch_script"] == (person.home / "job.sbatch").read_text()
    worst = script.collected(ranks=2, nodes=2)
    recipe = (directory / "recipe.yaml").read_text()
    assert "megatron-lm" in recipe
    assert "zero_stage: 1" in recipe
    assert "succeeded" in person.llmlaunch("status", directory).stdout
    assert "iteration        4/       4" in person.llmlaunch("logs", directory).stdout

    of_recipe = person.llmlaunch("check", "-v", directory / "recipe.yaml").stdout
    assert re.search(rf"This recipe ran .*\(succeeded, {re.escape(script.run_id)}\); measured then", of_recipe)
    assert f"rank 0 resident: {worst / 2**30:.2f}" in of_recipe
    of_script = json.loads(person.llmlaunch("check", "job.sbatch", "--cluster", "cpu-x1", "--json").stdout)
    corrected = of_script["memory"]["rehearsed"]
    assert corrected["device_bytes"] == worst
    assert script.run_id in corrected["sentence"]

    names = ("SITE_SETTING", "OMP_NUM_THREADS", "CPU_STANDS_FOR", "LD_LIBRARY_PATH", "WORLD_SIZE")
    assert script.assert_the_recipe_starts_the_same("h100-80gb-x8", *names) == set()


def a_deepspeed_script_is_observed_collected_and_started_from_its_recipe(person: Person) -> None:
    script = Script(person, DEEPSPEED_SBATCH, Path(sys.executable), TRAINS)
    script.collected(ranks=2, nodes=1)
    assert "stage: 1" in (script.observed / "recipe.yaml").read_text()
    names = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "OWN_SETTING", "WORLD_SIZE")
    different = script.assert_the_recipe_starts_the_same("cpu-x1", *names)
    assert different == {"--deepspeed_config ds_config.json"}
    assert (person.home / "made").is_dir()


test_own_script = side_by_side(
    a_megatron_script_is_observed_collected_checked_and_started_from_its_recipe,
    a_deepspeed_script_is_observed_collected_and_started_from_its_recipe,
)
