"""`check` prices the job that somebody has already: a script that starts a training, or the arguments of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import CommandLine

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
    "--global-batch-size 128 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --train-iters 100 --lr 3e-4 --vocab-size 128256 "
    "--tokenizer-type NullTokenizer --mock-data"
)
CLUSTER = ("--cluster", "h100-80gb-x8", "nodes=2")


def test_arguments_are_priced_as_they_are(llmlaunch: CommandLine) -> None:
    plan = llmlaunch.json("check", "--megatron-args", LLAMA, *CLUSTER)
    layout = plan["layout"]
    assert (layout["tensor"], layout["pipeline"], layout["data"], layout["micro_batch_size"]) == (2, 1, 8, 1)
    assert (layout["zero_stage"], layout["recompute"], layout["sequence_parallel"]) == (1, "none", True)
    assert plan["searched"] == 1
    assert plan["verdict"] == "safe"
    assert plan["job"]["steps"] == 100


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (LLAMA, ("nodes=1",), "does not say which cluster it is for; add --cluster NAME"),
        (f"{LLAMA} --hidden-size nan", CLUSTER, "--hidden-size: 'nan' is no whole number"),
        (f"{LLAMA} --pipeline-model-parallel-size 3", CLUSTER, "layout.pipeline: 3 does not divide the 16 devices"),
        (f"{LLAMA} 'open", CLUSTER, "No closing quotation"),
        ("", CLUSTER, "--megatron-args: is empty"),
        (f"{LLAMA} --tokenizer-model $(touch never)", CLUSTER, None),
    ],
)
def test_what_is_missing_or_wrong_is_one_message(
    llmlaunch: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    options: tuple[str, ...],
    message: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = llmlaunch("check", "--megatron-args", arguments, *options, code=2 if message else (0, 2, 3)).stderr
    assert (message or "") in error
    assert error.count("error: ") == (1 if message else error.count("error: "))
    assert not Path("never").exists()


def test_options_of_a_script_are_refused_beside_a_recipe(llmlaunch: CommandLine, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("schema: 1\n")
    error = llmlaunch("check", recipe, "--cluster", "h100-80gb-x8", code=2).stderr
    assert "write cluster=NAME" in error


def test_check_needs_something_to_check(llmlaunch: CommandLine) -> None:
    assert "name a RECIPE or a SCRIPT" in llmlaunch("check", code=2).stderr


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=ours
#SBATCH --nodes=2
MICRO=${1:-1}
ARGS=( %s --micro-batch-size $MICRO )
touch never
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint gpu01:29500 \\
  pretrain_gpt.py "${ARGS[@]}" %s
"""


def written(folder: Path, name: str = "job.sbatch", more: str = "") -> Path:
    path = folder / name
    path.write_text(SCRIPT % (LLAMA, more))
    return path


def test_a_script_is_priced_as_its_arguments_are(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path, "train")
    plan = llmlaunch.json("check", script, "--cluster", "h100-80gb-x8")
    typed = llmlaunch.json("check", "--megatron-args", LLAMA, *CLUSTER)
    assert plan["recipe"] == "ours"
    assert {**plan, "recipe": None} == {**typed, "recipe": None}
    assert not Path("never").exists()


def test_an_unknown_argument_of_the_script_counts_where_its_cost_could_matter(
    llmlaunch: CommandLine, tmp_path: Path
) -> None:
    script = written(tmp_path, more="--my-own-flag 3")
    options = ("check", script, "--cluster")
    assert "--my-own-flag" in llmlaunch(*options, "h100-80gb-x8", "memory.limit=0.75", code=3).stderr
    llmlaunch(*options, "h100-80gb-x8", "memory.limit=0.75", "backend.neutral_args=[--my-own-flag]")
    assert "--my-own-flag 3" in llmlaunch(*options, "h200-141gb-x8", "-v").stdout


def test_a_script_without_a_training_is_one_message(llmlaunch: CommandLine, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nhostname\n")
    assert "starts no training" in llmlaunch("check", script, "--cluster", "h100-80gb-x8", code=2).stderr
    script.write_text("#!/bin/bash\nif [ ((\n")
    assert "job.sh" in llmlaunch("check", script, "--cluster", "h100-80gb-x8", code=2).stderr


def test_another_training_of_the_script_is_chosen_by_its_number(llmlaunch: CommandLine, tmp_path: Path) -> None:
    script = written(tmp_path)
    script.write_text(
        script.read_text() + 'torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --micro-batch-size 2\n'
    )
    options = ("check", script, "--cluster", "h100-80gb-x8")
    plans = [llmlaunch.json(*options, "--command", number, code=code) for number, code in (("1", 0), ("2", 3))]
    assert [plan["layout"]["micro_batch_size"] for plan in plans] == [1, 2]
    assert "there are 2 trainings; choose 1 to 2" in llmlaunch(*options, "--command", "3", code=2).stderr
