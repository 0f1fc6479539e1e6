"""Where what decides memory was not read there is no verdict: the reason comes first, and the exit code is 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import llmlaunch as package
from llmlaunch.assets import asset
from llmlaunch.errors import NoVerdict
from support.command_line import CommandLine

CLUSTER = ("--cluster", "h100-80gb-x8")
TRAINER = (
    "sft.py --model_name_or_path meta-llama/Llama-3.1-8B --output_dir out --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 8 --max_steps 100 --max_length 4096 --bf16 True --gradient_checkpointing True "
    "--learning_rate 1e-5"
)
TORCHRUN = f"torchrun --nnodes 1 --nproc_per_node 8 {TRAINER}"
LLAMA = str(asset("recipes", "llama3-8b.yaml"))
FEW = "layout={context: 1, micro_batch_size: 1, layers_by_stage: even, recompute: none, techniques: asked}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, in which the script lies."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(text: str, name: str = "job.sh") -> str:
    Path(name).write_text(text + "\n")
    return name


def schema() -> Any:
    return json.loads(asset("docs", "schemas", "plan.schema.json").read_text("utf-8"))


def no_verdict(llmlaunch: CommandLine, *words: str) -> dict[str, Any]:
    """Return the answer of `check` in JSON, after the screen and the answer were seen to agree."""
    answer: dict[str, Any] = llmlaunch.json("check", *words, code=5)
    jsonschema.validate(answer, schema())
    assert answer["verdict"] == "unknown"
    shown = llmlaunch("check", *words, code=5)
    first = " ".join(shown.stdout.partition("\n\n")[0].split())
    assert f"{answer['recipe']}: unknown: {answer['reason']}" in first
    assert f"error: {answer['recipe']}: no verdict: {answer['reason']}" in shown.stderr
    return answer


OTHER = {  # more of them are in command_lines/test_trainers_by_name.py
    "torchtitan": "srun --nodes 2 torchrun --nproc_per_node 8 ./train.py --job.config_file ./llama.toml",
    "FSDP of accelerate": f"accelerate launch --use_fsdp --num_processes 8 --num_machines 1 {TRAINER}",
    "PyTorch's FSDP": f"{TORCHRUN} --fsdp shard_grad_op",
    "LLaMA-Factory's stage dpo": f"{TORCHRUN.replace('sft.py', 'src/train.py')} --stage dpo --template llama3",
    "--yaml-cfg (a file": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --yaml-cfg gpt.yaml",
    "FSDP2": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --use-torch-fsdp2",
}


@pytest.mark.parametrize("name", OTHER)
def test_a_trainer_that_is_not_read_is_named(llmlaunch: CommandLine, name: str) -> None:
    answer = no_verdict(llmlaunch, script(OTHER[name]), *CLUSTER)
    assert name in answer["reason"]
    assert "is not read; `llmlaunch observe --` measures it" in answer["reason"]
    assert set(answer) == {"recipe", "verdict", "reason", "launch"}


def test_no_recipe_is_made_of_a_trainer_that_is_not_read(llmlaunch: CommandLine) -> None:
    error = llmlaunch("init", "--from", script(OTHER["torchtitan"]), *CLUSTER, "-o", "r.yaml", code=5).stderr
    assert "torchtitan is not read" in error
    assert not Path("r.yaml").exists()


def test_a_mistake_comes_before_no_verdict(llmlaunch: CommandLine) -> None:
    error = llmlaunch("check", script(OTHER["torchtitan"]), "--cluster", "no-such", code=2).stderr
    assert "unknown cluster 'no-such'" in error
    lacking = script(TORCHRUN.replace("--model_name_or_path meta-llama/Llama-3.1-8B", "") + " --deepspeed nothere.json")
    error = llmlaunch("check", lacking, *CLUSTER, code=2).stderr
    assert "model: " in error
    assert "nothere.json" in error


def test_a_missing_ds_config_leaves_a_figure_for_each_stage(llmlaunch: CommandLine) -> None:
    name = script(f"{TORCHRUN} --deepspeed nothere.json")
    answer = no_verdict(llmlaunch, name, *CLUSTER)
    assert answer["reason"].startswith("nothere.json, which job.sh:1 names, is not there")
    assert [each["assumption"] for each in answer["assumed"]] == [{"layout.zero_stage": stage} for stage in range(4)]
    assert "memory" not in answer
    screen = llmlaunch("check", name, *CLUSTER, code=5).stdout
    assert all(each["verdict"] in screen for each in answer["assumed"])
    decided = llmlaunch.json("check", name, *CLUSTER, "layout.zero_stage=3")
    assert (decided["verdict"], decided["memory"]) == tuple(answer["assumed"][3][key] for key in ("verdict", "memory"))


def test_no_recipe_is_made_without_the_stage(llmlaunch: CommandLine) -> None:
    name = script(f"{TORCHRUN} --deepspeed nothere.json")
    error = llmlaunch("init", "--from", name, *CLUSTER, "-o", "r.yaml", code=2).stderr
    assert "layout.zero_stage: nothere.json" in error
    assert not Path("r.yaml").exists()
    llmlaunch("init", "--from", name, *CLUSTER, "-o", "r.yaml", "--set", "layout.zero_stage=3")
    assert "zero_stage: 3" in Path("r.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"accelerate launch --config_file no.yaml --num_processes 8 --num_machines 1 {TRAINER}", "no.yaml"),
        (
            "deepspeed --num_nodes 1 --num_gpus 8 own.py --model_name meta-llama/Llama-3.1-8B --seq_len 4096 "
            "--steps 10 --train_micro_batch_size_per_gpu 1 --lr 1e-5 --bf16",
            "own.py decides by itself how model states are shared out",
        ),
    ],
)
def test_a_stage_that_nobody_says_is_never_a_default(llmlaunch: CommandLine, text: str, told: str) -> None:
    answer = llmlaunch.json("check", script(text), *CLUSTER, code=5)
    assert told in answer["reason"]
    assert len(answer["assumed"]) == 4


def test_a_stage_that_is_filled_in_by_nobody_is_not_read(llmlaunch: CommandLine) -> None:
    Path("ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": "auto"}}))
    answer = no_verdict(llmlaunch, script(f"{TORCHRUN} --deepspeed ds.json"), *CLUSTER)
    assert "zero_optimization.stage" in answer["reason"]


def test_an_optimizer_that_is_not_priced_leaves_no_verdict(llmlaunch: CommandLine) -> None:
    words = "--optim=paged_adamw_8bit"
    answer = no_verdict(llmlaunch, script(f"{TORCHRUN} {words}"), *CLUSTER)
    assert "the optimizer's memory is unknown" in answer["reason"]
    screen = llmlaunch("check", script(f"{TORCHRUN} {words}"), *CLUSTER, code=5).stdout
    assert "priced without it: " in screen
    assert "unsafe" not in screen


@pytest.mark.parametrize("words", ["--optim adamw_torch_fused", "--use_galore False"])
def test_the_optimizer_that_is_priced_is_judged(llmlaunch: CommandLine, words: str) -> None:
    assert llmlaunch.json("check", script(f"{TORCHRUN} {words}"), *CLUSTER, code=3)["verdict"] == "unsafe"


def test_weights_in_bf16_make_no_replica_unsafe_and_nothing_else_uncertain(llmlaunch: CommandLine) -> None:
    answer = no_verdict(llmlaunch, script(f"{TORCHRUN} --torch_dtype bfloat16"), *CLUSTER)
    assert "--torch_dtype bfloat16" in answer["reason"]
    Path("ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}))
    plan = llmlaunch.json("check", script(f"{TORCHRUN} --torch_dtype bfloat16 --deepspeed ds.json"), *CLUSTER)
    assert (plan["verdict"], plan["arguments"]["unknown"]) == ("safe", [])


@pytest.mark.parametrize(("kind", "code"), [("Lamb", 5), ("adam", 0)])
def test_the_optimizer_of_a_ds_config_counts(llmlaunch: CommandLine, kind: str, code: int) -> None:
    settings = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": kind, "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3},
    }
    Path("ds.json").write_text(json.dumps(settings))
    name = script(f"{TORCHRUN} --optim adamw_8bit --deepspeed ds.json")
    answer = llmlaunch.json("check", name, *CLUSTER, code=code)
    assert answer["verdict"] == ("safe" if code == 0 else "unknown")
    assert kind in answer.get("reason", kind)


DECIDING = ("--moe-flex-dispatcher-backend", "ncclep")
BACKEND = f"backend={json.dumps({'name': 'megatron-lm', 'extra_args': DECIDING})}"


@pytest.mark.parametrize("command", [("render", "-o", "run"), ("submit", "--dry-run")], ids=lambda words: words[0])
def test_nothing_is_rendered_or_submitted_without_a_verdict(llmlaunch: CommandLine, command: tuple[str, ...]) -> None:
    error = llmlaunch(command[0], LLAMA, FEW, BACKEND, "memory.accept=tight", *command[1:], code=5).stderr
    assert "no verdict: what decides the memory was not read: --moe-flex-dispatcher-backend ncclep" in error
    assert "neutral_args: [--moe-flex-dispatcher-backend]" in error
    assert not Path("run").exists()


def test_every_reader_of_a_plan_knows_that_there_is_no_verdict(llmlaunch: CommandLine) -> None:
    answer = no_verdict(llmlaunch, LLAMA, FEW, BACKEND)
    assert answer["memory"]["worst_pipeline_rank"] >= 0  # without what is not known
    shown = llmlaunch("plan", LLAMA, FEW, BACKEND, "--html", "plan.html", code=5).stdout
    assert shown.startswith("llama3-8b: unknown: what decides the memory was not read: ")
    behind = llmlaunch("plan", LLAMA, FEW, BACKEND, "-v", code=5).stdout
    assert behind.startswith("llama3-8b: unknown: what decides the memory was not read: ")
    page = Path("plan.html").read_text("utf-8")
    assert 'class="badge unknown"' in page
    assert 'id="mark-unknown"' in page
    compared = llmlaunch.json("compare", LLAMA, FEW, BACKEND, "--clusters", "h100-80gb-x8", code=5)
    (cell,) = compared["cells"]
    assert (cell["verdict"], cell["refused"]) == ("unknown", f"unknown: {answer['reason']}")
    jsonschema.validate(compared, json.loads(asset("docs", "schemas", "compare.schema.json").read_text("utf-8")))


def test_the_python_interface_has_the_reason(tmp_path: Path) -> None:
    run = package.plan(LLAMA, [FEW, BACKEND])
    assert run.verdict == "unknown"
    assert "ncclep" in run.reason
    with pytest.raises(package.NoVerdict):
        package.render(run, tmp_path / "run")
    assert NoVerdict is package.NoVerdict
    assert package.plan(LLAMA, [FEW]).reason == ""


def test_the_persons_word_decides_it(llmlaunch: CommandLine) -> None:
    backend = {"name": "megatron-lm", "extra_args": DECIDING, "neutral_args": [DECIDING[0]]}
    assert llmlaunch.json("check", LLAMA, FEW, f"backend={json.dumps(backend)}")["verdict"] == "safe"
