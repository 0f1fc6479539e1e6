"""A script is judged as its author's job: by its own environment, save interval and time limit, in its own words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmlaunch.app import existing_job
from llmlaunch.assets import asset
from llmlaunch.command_lines.command import LaunchProblem
from llmlaunch.imports.recipe_file import RecipeSource
from support.command_line import CommandLine
from support.soak import in_soak

CLUSTER = ("--cluster", "h100-80gb-x8")
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 128256 --seq-length 8192 "
    "--max-position-embeddings 8192 --global-batch-size 128 --tensor-model-parallel-size 2 --bf16 --lr 1e-4 --mock-data"
)
QWEN = """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:8
#SBATCH --mem=1000G
export CUDA_DEVICE_MAX_CONNECTIONS=1
srun torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py \\
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention \\
  --num-query-groups 4 --kv-channels 128 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear \\
  --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 1000000 --vocab-size 151936 \\
  --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-router-dtype fp32 \\
  --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 \\
  --seq-length 4096 --max-position-embeddings 40960 --micro-batch-size 1 --global-batch-size 4 --train-iters 500 \\
  --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \\
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-distributed-optimizer \\
  --attention-dropout 0 --hidden-dropout 0 --bf16 --lr 1e-6 --mock-data --transformer-impl transformer_engine
"""
SFT = (
    "sft.py --model_name_or_path meta-llama/Llama-3.1-8B --output_dir out --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 8 --max_steps 100 --max_length 4096 --bf16 True --gradient_checkpointing True "
    "--learning_rate 1e-5 --save_strategy no"
)
STAGE_3 = {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
STAGE_0 = STAGE_3 | {"zero_optimization": {"stage": 0}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(text: str, name: str = "job.sh") -> str:
    Path(name).write_text(text)
    return name


def megatron(more: str = "", lines: str = "#SBATCH --time=4:00:00\n") -> str:
    return script(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n{lines}"
        "srun torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint n1:29500 pretrain_gpt.py \\\n"
        f"  {LLAMA} \\\n  {more}\n"
    )


def hugging_face(settings: dict[str, Any], more: str = "") -> str:
    Path("zero.json").write_text(json.dumps(settings))
    return script(f"#!/bin/bash\ntorchrun --nnodes 1 --nproc_per_node 8 {SFT} --deepspeed zero.json {more}\n")


# --- the environment of the script


@pytest.mark.usefixtures("all_advice")
def test_without_an_export_torch_makes_segments_by_its_default(llmlaunch: CommandLine) -> None:
    shown = llmlaunch("check", script(QWEN), *CLUSTER, code=3)
    assert "unsafe" in shown.stdout
    export = "With `export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before the trainer it is safe"
    assert export in shown.stderr
    command = next(line for line in shown.stdout.splitlines() if line.startswith("Next: "))
    assert "with that export in the script" in command
    llmlaunch(*command.removeprefix("Next: llmlaunch ").partition("  #")[0].split())


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", *in_soak("PYTORCH_CUDA_ALLOC_CONF")])
def test_segments_that_expand_are_those_of_the_script(llmlaunch: CommandLine, name: str) -> None:
    text = QWEN.replace("export CUDA_DEVICE", f"export {name}=expandable_segments:True\nexport CUDA_DEVICE")
    assert llmlaunch.json("check", script(text), *CLUSTER)["verdict"] == "safe"


# --- its lines and flags


@pytest.mark.usefixtures("all_advice")
def test_the_smallest_change_is_a_flag_of_the_script(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 1 --train-iters 10 --context-parallel-size 1", "")
    shown = llmlaunch("check", name, *CLUSTER, code=3)
    assert "Smallest change that is safe: add --use-distributed-optimizer (" in shown.stderr
    assert "layout.zero_stage=1  # add --use-distributed-optimizer" in shown.stdout
    assert "--overlap-grad-reduce" not in shown.stderr + shown.stdout


@pytest.mark.usefixtures("all_advice")
def test_a_changed_value_is_named_with_its_line(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 8 --train-iters 10 --use-distributed-optimizer", "")
    advice = llmlaunch.json("check", name, *CLUSTER, code=3)["advice"]
    assert re.search(r"set --micro-batch-size [124] \(line 6\)", advice)


@pytest.mark.usefixtures("all_advice")
def test_a_setting_is_changed_in_the_file_that_holds_it(llmlaunch: CommandLine) -> None:
    advice = llmlaunch.json("check", hugging_face(STAGE_0), *CLUSTER, code=3)["advice"]
    assert "set zero_optimization.stage: 1 in zero.json" in advice


@pytest.mark.usefixtures("all_advice")
def test_a_flag_is_spelled_as_the_script_spells_it(llmlaunch: CommandLine) -> None:
    name = hugging_face(STAGE_3)
    text = Path(name).read_text()
    Path(name).write_text(text.replace("--per_device_train_batch_size 1", "--per_device_train_batch_size=64"))
    advice = llmlaunch.json("check", name, *CLUSTER, code=3)["advice"]
    assert re.search(r"set --per_device_train_batch_size \d+ \(line 2\)", advice)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ("--micro-batch-size 3", "job.sh:5 (--global-batch-size 128)"),
        ("--micro-batch-size 1 --num-experts 6 --expert-model-parallel-size 4", "job.sh:6"),
    ],
)
def test_a_contradiction_is_at_the_line_of_the_script(llmlaunch: CommandLine, more: str, place: str) -> None:
    name = megatron(f"{more} --train-iters 10 --use-distributed-optimizer", "")
    error = llmlaunch("check", name, *CLUSTER, code=2).stderr
    assert place in error
    lines = len(Path(name).read_text().splitlines())
    assert all(int(number) <= lines for number in re.findall(r"job\.sh:(\d+)", error))


def test_what_rendering_would_change_is_no_warning_about_the_script(llmlaunch: CommandLine) -> None:
    lines = "#SBATCH --ntasks-per-node=1\nexport MASTER_ADDR=$(hostname)\n"
    name = megatron("--micro-batch-size 1 --train-iters 10 --use-distributed-optimizer", lines)
    assert "remove it" not in llmlaunch("check", name, *CLUSTER).stderr
    same = "--micro-batch-size 1 --train-iters 10 --use-distributed-optimizer --use-mcore-models --ckpt-format torch"
    assert "warning: " not in llmlaunch("check", megatron(same), *CLUSTER).stderr


# --- its save interval and time limit

SAVING = "--micro-batch-size 1 --train-iters 50000 --use-distributed-optimizer --save /scratch/ck --load /scratch/ck"


@pytest.mark.parametrize("more", ["--save-interval 500", "--save-interval 5000 --exit-signal-handler"])
def test_a_job_that_reaches_one_is_not_warned(llmlaunch: CommandLine, more: str) -> None:
    assert "never reaches" not in llmlaunch("check", megatron(f"{SAVING} {more}"), *CLUSTER).stderr


def test_a_job_that_saves_nothing_is_told_so(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 1 --train-iters 50000 --use-distributed-optimizer")
    assert "it saves nothing to go on from" in llmlaunch("check", name, *CLUSTER).stderr


# --- a launch that cannot work

BROKEN = LaunchProblem(4, "two nodes start one torchrun each, without a rendezvous", "add --rdzv-endpoint HOST:PORT")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchProblem]:
    """The problems that are found with the launch of every script."""
    problems: list[LaunchProblem] = []
    read = existing_job.read_with_settings

    def with_problems(*arguments: Any, **options: Any) -> RecipeSource:
        source = read(*arguments, **options)
        assert source.command is not None
        return replace(source, command=replace(source.command, launch_problems=tuple(problems)))

    monkeypatch.setattr(existing_job, "read_with_settings", with_problems)
    return problems


TRAINS = "--micro-batch-size 1 --train-iters 10 --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("make", "verdict"),
    [
        (lambda: megatron("--micro-batch-size 1 --train-iters 10", ""), "unsafe"),
        (lambda: hugging_face(STAGE_3, "--optim adamw_8bit"), "unknown"),
    ],
)
def test_a_launch_that_cannot_work_comes_first_and_the_figure_after_it(
    llmlaunch: CommandLine, launched: list[LaunchProblem], make: Any, verdict: str
) -> None:
    name = make()
    launched[:] = [BROKEN]
    shown = llmlaunch("check", name, *CLUSTER, code=2)
    assert shown.stdout.startswith("launch cannot work: job.sh:4: two nodes start one torchrun each")
    assert f": {verdict}" in shown.stdout
    assert "error: job.sh:4: two nodes start one torchrun each" in shown.stderr
    answer = llmlaunch.json("check", name, *CLUSTER, code=2)
    jsonschema.validate(answer, json.loads(asset("docs", "schemas", "plan.schema.json").read_text("utf-8")))
    assert answer["verdict"] == verdict
    assert answer["launch"] == [{"line": 4, "problem": BROKEN.problem, "fix": BROKEN.fix}]


def test_a_recipe_is_made_of_a_script_whose_launch_cannot_work(llmlaunch: CommandLine) -> None:
    Path("zero.json").write_text(json.dumps(STAGE_3))
    lines = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:4\n"
    launcher = "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint n1:29500"
    name = script(f"{lines}srun {launcher} {SFT} --deepspeed zero.json\n")
    shown = llmlaunch("check", name, *CLUSTER, code=2)
    assert shown.stdout.startswith("launch cannot work: job.sh:5: 8 ranks start on each node")
    assert "sft: safe" in shown.stdout
    told = llmlaunch("init", "--from", name, *CLUSTER, "-o", "made.yaml").stderr
    assert "differs: job.sh:5: 8 ranks start on each node" in told
    llmlaunch("check", "made.yaml")


# --- settings, alike everywhere

OPEN = "#!/bin/bash\nLAYERS=${1:-$DEPTH}\ntorchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS "
SMALL = (
    "--hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 10 --vocab-size 32000 --mock-data --lr 1e-4 --bf16\n"
)


def test_what_memory_depends_on_is_asked_for_by_the_variable_of_the_script(llmlaunch: CommandLine) -> None:
    error = llmlaunch("check", script(OPEN + SMALL), *CLUSTER, code=2).stderr
    assert "--num-layers reads $DEPTH (line 2), which has no value here; --set DEPTH=VALUE" in error


def test_an_argument_that_chooses_the_model_is_asked_for_with_its_sizes(llmlaunch: CommandLine) -> None:
    name = script('case "$2" in 8b) DEPTH=4;; esac\n' + OPEN + SMALL)
    error = llmlaunch("check", name, *CLUSTER, code=2).stderr
    assert "$2 has no value here and counts as empty; --set 2=VALUE gives it one" in error
    llmlaunch("check", name, *CLUSTER, "--set", "2=8b")


@pytest.mark.parametrize(
    ("name", "value"),
    [("--micro-batch-size", "$MBS"), ("--num-experts", "$(cat experts)")],
)
def test_no_default_of_megatron_stands_for_a_value_that_is_not_known(
    llmlaunch: CommandLine, name: str, value: str
) -> None:
    small = re.sub(rf"{name} \S+", "", SMALL).strip()
    error = llmlaunch("check", script(f"{OPEN.replace('$DEPTH', '4')}{small} {name} {value}"), *CLUSTER, code=2).stderr
    assert f"{name} reads $" in error
    assert "which has no value here; --set " in error


@pytest.mark.parametrize(
    ("name", "value"),
    [("--gradient_accumulation_steps", "$((64 / $(nproc)))"), ("--lora_r", "$R"), ("--optim", "$OPTIM")],
)
def test_no_default_of_the_trainer_stands_for_a_value_that_is_not_known(
    llmlaunch: CommandLine, name: str, value: str
) -> None:
    command = f"{re.sub(rf'{name} [^ ]+', '', SFT)} --use_peft {name} {value} --deepspeed ds.json"
    Path("ds.json").write_text(json.dumps(STAGE_3))
    error = llmlaunch("check", script(f"torchrun --nproc_per_node 8 {command}"), *CLUSTER, code=2).stderr
    variable = re.findall(rf"{name} reads \$(\w+) \(line 1\), which has no value here; --set \1=VALUE", error)
    assert len(variable) == 1


def test_a_file_of_arguments_that_an_argument_names_is_asked_for(llmlaunch: CommandLine) -> None:
    job = script("accelerate launch scripts/run_sft.py recipes/$1/config_$2.yaml")
    error = llmlaunch("check", job, *CLUSTER, code=2).stderr
    assert (
        "reads $1 (line 1), $2 (line 1), which have no value in the script; give --set 1=VALUE --set 2=VALUE" in error
    )


def test_a_setting_is_an_argument_or_a_variable_everywhere(llmlaunch: CommandLine) -> None:
    name = script(OPEN + SMALL)
    options = (*CLUSTER, "--set", "DEPTH=4")
    checked = llmlaunch.json("check", name, *CLUSTER, "--set", "1=4")
    assert llmlaunch.json("plan", name, *options)["memory"] == checked["memory"]
    assert "--set" in llmlaunch("compare", name, "--clusters", "h100-80gb-x8", "--set", "DEPTH=4").stdout
    llmlaunch("diff", name, name, *options)
    llmlaunch("init", "--from", name, *options, "-o", "made.yaml")
    assert llmlaunch.json("check", "made.yaml")["layout"] == checked["layout"]
    llmlaunch("submit", name, *options, code=2)
    assert "num_layers: 4" in Path("megatron.yaml").read_text()


def test_a_setting_with_a_dot_is_a_key_of_the_recipe(llmlaunch: CommandLine) -> None:
    name = script(OPEN.replace("$LAYERS", "4") + SMALL)
    options = (*CLUSTER, "--set", "training.sequence_length=256")
    assert llmlaunch.json("check", name, *options)["memory"] != llmlaunch.json("check", name, *CLUSTER)["memory"]
    llmlaunch("init", "--from", name, *options, "-o", "made.yaml")
    assert "sequence_length: 256" in Path("made.yaml").read_text()


def test_a_name_that_the_script_reads_is_its_variable_and_no_section(llmlaunch: CommandLine) -> None:
    text = OPEN.replace("$DEPTH", "$model") + SMALL
    assert llmlaunch.json("check", script(text), *CLUSTER, "--set", "model=4")["verdict"] == "safe"


# --- scripts in place of recipes


def test_a_script_is_planned_compared_and_told_apart(llmlaunch: CommandLine) -> None:
    name = megatron(TRAINS, "")
    plan = llmlaunch.json("plan", name, *CLUSTER)
    assert plan["memory"] == llmlaunch.json("check", name, *CLUSTER)["memory"]
    (cell,) = llmlaunch.json("compare", name, "--clusters", "h100-80gb-x8")["cells"]
    assert cell["check"]["memory"] == plan["memory"]
    other = script(Path(name).read_text().replace("--seq-length 8192", "--seq-length 4096"), "other.sh")
    changed = llmlaunch.json("diff", name, other, *CLUSTER, code=1)
    assert {"name": "training.sequence_length", "a": 8192, "b": 4096} in changed["recipe"]


def test_a_lock_belongs_to_a_recipe(llmlaunch: CommandLine) -> None:
    assert "init --from job.sh" in llmlaunch("plan", megatron(TRAINS, ""), *CLUSTER, "--lock", code=2).stderr


def test_a_script_is_submitted_as_the_recipe_beside_it_after_a_question(llmlaunch: CommandLine) -> None:
    name = megatron(TRAINS, "")
    told = llmlaunch("submit", name, *CLUSTER, code=2).stderr
    assert "rendering sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which the script does not" in told
    assert "nothing is submitted without asking" in told
    command = re.search(r"`llmlaunch (submit .*)`", told)
    assert command is not None
    recipe = command.group(1).split()[-1]
    llmlaunch("check", recipe)
    assert f"{recipe}: exists, and is left as it is" in llmlaunch("submit", name, *CLUSTER, code=2).stderr


def test_a_dry_run_of_a_script_writes_nothing(llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", "/opt/megatron")
    name = megatron(TRAINS, "")
    shown = llmlaunch("submit", name, *CLUSTER, "--local", "--dry-run", code=(0, 2)).stdout
    assert "nothing was written or submitted" in shown
    assert [path.name for path in Path().iterdir()] == [name]


@pytest.mark.usefixtures("all_advice")
def test_the_next_steps_of_a_script_work_as_typed(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 1 --train-iters 10", "")
    shown = llmlaunch("check", name, *CLUSTER, code=3).stdout
    steps = [line[6:].partition("  #")[0].split()[1:] for line in shown.splitlines() if "llmlaunch " in line[:17]]
    assert len(steps) > 1
    for step in steps:
        llmlaunch(*step, code=(0, 3))
    assert any("layout.zero_stage=1" in step for step in steps)


def test_a_recipe_is_made_as_the_next_step_says_with_the_overrides(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 1 --train-iters 10", "")
    shown = llmlaunch("check", name, *CLUSTER, "layout.zero_stage=1").stdout
    step = next(line for line in shown.splitlines() if line.startswith("Next: llmlaunch init --from"))
    llmlaunch(*step.partition("  #")[0].split()[2:])
    assert "zero_stage: 1" in next(Path().glob("*.yaml")).read_text()


def test_the_recipe_of_a_script_with_epochs_is_made_with_the_steps_that_were_assumed(llmlaunch: CommandLine) -> None:
    name = hugging_face(STAGE_3)
    Path(name).write_text(Path(name).read_text().replace("--max_steps 100", "--num_train_epochs 3"))
    step = next(line for line in llmlaunch("check", name, *CLUSTER).stdout.splitlines() if line.startswith("Next: "))
    assert step.endswith("(write your own training.steps)")
    llmlaunch(*step.partition("  #")[0].split()[2:])
    assert "steps: 1000" in Path("sft.yaml").read_text()


def test_no_step_leads_to_a_job_that_llmlaunch_does_not_start(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 1 --train-iters 10 --use-distributed-optimizer")
    assert "init --from" not in llmlaunch("check", name, "--cluster", "mi300x-x8").stdout


def test_a_script_that_starts_several_trainings_says_so_where_one_lacks_something(llmlaunch: CommandLine) -> None:
    name = hugging_face(STAGE_3)
    line = Path(name).read_text().splitlines()[1]
    Path(name).write_text(f"{line}\n{line.replace('meta-llama/Llama-3.1-8B', 'out')}\n")
    assert "starts 2 trainings (job.sh:1" in llmlaunch("check", name, *CLUSTER, code=2).stderr
    llmlaunch("check", name, *CLUSTER, "--command", "1")


# --- secrets


@pytest.mark.parametrize(
    "words",
    ["--dataset_name https://me:pa55word@host/data.json", "--hub_token hf_" + "pa55word" * 4],
)
def test_a_secret_of_an_argument_is_left_out_and_the_job_is_priced(llmlaunch: CommandLine, words: str) -> None:
    name = hugging_face(STAGE_3, words)
    checked = llmlaunch("check", name, *CLUSTER, "-v")
    llmlaunch("init", "--from", name, *CLUSTER)
    assert "pa55word" not in checked.stdout + checked.stderr + Path("sft.yaml").read_text()
    llmlaunch("check", "sft.yaml")


def test_a_password_in_the_address_of_an_image_is_left_out(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 1 --train-iters 10 --use-distributed-optimizer")
    srun = "srun --container-image docker://me:pa55word@nvcr.io/nvidia/pytorch:25.01-py3"
    Path(name).write_text(Path(name).read_text().replace("srun", srun))
    llmlaunch("init", "--from", name, *CLUSTER, "-o", "recipe.yaml")
    text = Path("recipe.yaml").read_text()
    assert "docker://nvcr.io/nvidia/pytorch" in text
    assert text.count("a name and password in an address are never written") == 1


def test_an_override_that_is_wrong_is_the_only_one_blamed(llmlaunch: CommandLine) -> None:
    name = megatron("--micro-batch-size 1 --train-iters 10 --save $OUT")
    error = llmlaunch("init", "--from", name, *CLUSTER, "--set", "name=!!python/x", code=2).stderr
    assert error.startswith("error: override name=")


# --- files of arguments


@pytest.mark.parametrize("more", [{}, {"hub_token": "hf_" + "pa55word" * 4}])
def test_a_file_of_arguments_without_a_cluster_is_asked_for_it(llmlaunch: CommandLine, more: dict[str, str]) -> None:
    arguments = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 1, "max_steps": 10} | more
    Path("args.json").write_text(json.dumps(arguments))
    assert "add --cluster NAME" in llmlaunch("check", "args.json", code=2).stderr


def test_a_file_of_arguments_is_known_by_its_keys(llmlaunch: CommandLine) -> None:
    Path("zero.json").write_text(json.dumps(STAGE_3))
    error = llmlaunch("check", "zero.json", *CLUSTER, code=2).stderr
    assert "what its memory depends on is not known" in error
    assert "model: " in error
    recipe = asset("recipes", "llama3-8b.yaml")
    assert "is a recipe" in llmlaunch("check", recipe, *CLUSTER, code=2).stderr


@pytest.mark.parametrize(("key", "warned"), [("datasets", False), ("peft", True)])
def test_a_mapping_is_warned_of_where_memory_may_depend_on_it(llmlaunch: CommandLine, key: str, warned: bool) -> None:
    arguments = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 1, "max_length": 2048}
    Path("args.json").write_text(json.dumps(arguments | {"bf16": True, "max_steps": 10, key: {"path": "x"}}))
    assert (f"{key}: a mapping" in llmlaunch("check", "args.json", *CLUSTER, code=3).stderr) is warned
