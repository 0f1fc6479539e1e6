"""Scripts that were once answered wrongly get their right answers, each as it is typed.

The scripts of `tests/data/script_cases` were written for this project after situations that people reported in public,
or that their public scripts contain.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.public_scripts import run_check

CASES = Path(__file__).parents[2] / "data" / "script_cases"
CLUSTER = "h100-80gb-x8"
GPT_7B, LLAMA_8B = "gpt3-6.7b changed on 2 x 8", "llama3-8b on 2 x 8"
NOT_READ = "is not read; `llmlaunch observe --` measures it"
UNKNOWN_OPTIMIZER = "the optimizer's memory is unknown"

# What the first screen says of each, with the exit code.
ANSWERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "apptainer.sh": (0, (GPT_7B, "62.7 of")),
    "bert.sh": (5, ("bert.sh:1: unknown: Megatron-LM's BERT", NOT_READ)),
    "brancharg.sh": (3, ("gpt3-6.7b changed on 1 x 8", "--use-distributed-optimizer")),
    "cd_loop.sbatch": (2, ("cd_loop.sbatch: takes more than 33,554,432 characters to read",)),
    "container.sh": (0, (GPT_7B, "62.7 of")),
    "cut_f0.sbatch": (2, ("--hidden-size, --num-attention-heads are not given", "--seq-length is not given")),
    "docker.sh": (0, (GPT_7B, "62.7 of")),
    "ds_offload_int/j.sh": (2, ("zero_optimization.offload_optimizer: must be a mapping, not '1'",)),
    "ds_ratio/j.sh": (2, ("zero_optimization.offload_optimizer.ratio: must be a number from 0 to 1",)),
    "ds_scheduler/j.sh": (2, ("scheduler.type: must be a text",)),
    "dsz3.sh": (5, ("dsz3.sh:7: unknown: Megatron-DeepSpeed", NOT_READ)),
    "err.sh": (3, ("gpt3-6.7b changed on 1 x 8",)),
    "galore.sh": (5, ("--optim galore_adamw", UNKNOWN_OPTIMIZER)),
    "galore2.sh": (5, ("--use_galore True", UNKNOWN_OPTIMIZER)),
    "glued.sh": (0, ("2.83 of",)),
    "inner.sh": (0, (GPT_7B, "62.7 of")),
    "l3_launchnode.sh": (0, (LLAMA_8B, "23.4 of")),
    "l4_ntasks.sh": (2, ("launch cannot work: l4_ntasks.sh:7:", "torchrun starts 16 times, and 2 can join", LLAMA_8B)),
    "l6_4of8.sh": (2, ("launch cannot work: l6_4of8.sh:6: 8 ranks start on each node", "4 GPUs", LLAMA_8B)),
    "l7_nnodes.sh": (0, ("2 of 4 nodes stay idle", "SLURM calls the job failed", LLAMA_8B)),
    "mamba.sh": (5, ("pretrain_mamba.py without --hybrid-layer-pattern", NOT_READ)),
    "mpi.sh": (0, ("inline on 2 x 8", "2.14 of")),
    "nnodes.sh": (0, ("gpt3-6.7b changed on 1 x 8", "67.4 of")),
    "nods.sh": (5, ("nothere.json, which nods.sh:1 names, is not there", "layout.zero_stage: 3")),
    "plain.sh": (0, ("llama3-8b on 1 x 8", "33.9 of")),
    "plus.sh": (0, (GPT_7B, "62.7 of")),
    "s06t.sh": (0, ("qwen3-30b-a3b on 1 x 8", "22.1 of")),
    "s16_hpz.sh": (0, (LLAMA_8B, "25.3 of")),
    "s22_cp.sh": (0, ("131072 tokens", "22.1 of")),
    "s22b.sh": (0, ("131072 tokens", "10.7 of")),
    "sig.sh": (0, ("sig.sh:5: the job ends after 4 h 0 min", "never reaches a checkpoint", "--save-interval 5000")),
    "superscript.sbatch": (2, ("--hidden-size, --num-attention-heads are not given",)),
    "swiftname.sh": (0, ("qwen2.5-7b-instruct on 1 x 8", "22.1 of")),
    "tr_cr.sbatch": (2, ("--hidden-size, --num-attention-heads are not given",)),
    "tr_range.sbatch": (2, ("--hidden-size, --num-attention-heads are not given",)),
    "unsetarr.sh": (0, (GPT_7B, "62.7 of")),
    "unsetopt.sh": (0, ("inline on 1 x 8", "2.14 of")),
    "unsetword.sh": (0, (GPT_7B, "62.7 of")),
    "wait.sh": (0, (GPT_7B, "62.7 of")),
    "wrap.sh": (0, ("llama3.1-8b on 1 x 8", "34.8 of")),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_script_gets_its_right_answer(name: str) -> None:
    code, says = ANSWERS[name]
    path = CASES / name
    reply = run_check(path.parent, path.name, "--cluster", CLUSTER)
    screen = " ".join((reply.stdout + reply.stderr).split())
    assert (reply.code, [words for words in says if words not in screen]) == (code, [])
    assert "remove it" not in screen
    assert "Traceback" not in screen


def test_every_script_has_an_answer() -> None:
    scripts = {str(path.relative_to(CASES)) for path in CASES.rglob("*.s*") if path.suffix in (".sh", ".sbatch")}
    assert scripts == set(ANSWERS)
