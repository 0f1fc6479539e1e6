"""Trainers whose commands are recognized and not read: what a person is told of them, by name.

Each is recognized by its program (a path, or a module with slashes) or by options and words that only it takes. The
names were read in the trainers' own repositories: pytorch/torchtitan torchtitan/config, volcengine/verl verl/trainer,
OpenRLHF/OpenRLHF openrlhf/cli, huggingface/trl trl/scripts, NVIDIA/NeMo examples/nlp/language_modeling,
NVIDIA/Megatron-LM (pretrain_*.py, train_rl.py), meta-llama/llama-cookbook, pytorch/torchtune, mosaicml/llm-foundry,
Lightning-AI/litgpt, huggingface/nanotron, EleutherAI/gpt-neox, hpcaitech/ColossalAI.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath

from llmlaunch.errors import NoVerdict
from llmlaunch.frozen import frozen

__all__ = [
    "FSDP",
    "MEGATRON_DEEPSPEED",
    "not_read",
    "other_trainer",
    "refuse_other_trainer",
    "starts_other_trainer",
    "takes_megatron_arguments",
]

MEGATRON_DEEPSPEED = "Megatron-DeepSpeed"
FSDP = "PyTorch's FSDP"
# Every command line of a trainer of Megatron's kind has one of these, and none of a Hugging Face trainer does.
OF_MEGATRON = frozenset(
    {"num_layers", "micro_batch_size", "tensor_model_parallel_size", "use_checkpoint_args", "yaml_cfg"}
)
OF_DEEPSPEED = frozenset(
    {"deepspeed", "deepspeed_config", "deepspeed_activation_checkpointing", "ds_sequence_parallel_size"}
)


@frozen
class OtherTrainer:
    """A trainer that is not read. `programs` are patterns of its path or module, `commands` first words of a command
    line that starts it, `words` patterns of its own options, without dashes and with underscores, and of its other
    words. `bare` is whether a program by that name trains without any option that other trainers know."""

    name: str
    programs: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    bare: bool = True


def _of_megatron(name: str, *programs: str) -> OtherTrainer:
    return OtherTrainer(f"Megatron-LM's {name}", tuple(f"{program}.py" for program in programs))


OTHER_TRAINERS = (
    OtherTrainer("torchtitan", ("torchtitan/*",), ("job.*", "parallelism.*", "training.local_batch_size")),
    OtherTrainer("verl", ("verl/*",), ("actor_rollout_ref.*", "algorithm.adv_estimator=*")),
    OtherTrainer("OpenRLHF", ("openrlhf/*",)),
    OtherTrainer(
        "TRL's GRPO",
        ("*grpo*",),
        ("num_generations", "max_completion_length", "vllm_mode"),
        (("trl", "grpo"), ("trl", "rloo")),
        bare=False,
    ),
    OtherTrainer(
        "preference tuning (DPO, KTO, PPO, reward models)",
        ("dpo.py", "*_dpo.py", "kto.py", "ppo.py", "orpo.py", "reward.py", "reward_modeling.py", "swift/cli/rlhf.py"),
        ("rlhf_type",),
        (("swift", "rlhf"), *(("trl", name) for name in ("dpo", "kto", "ppo", "orpo", "reward"))),
        bare=False,
    ),
    OtherTrainer(
        "NeMo 1",
        (
            "megatron_gpt_pretraining.py",
            "megatron_gpt_finetuning.py",
            "megatron_gpt_sft.py",
            "megatron_*_pretraining.py",
        ),
        ("model.tensor_model_parallel_size=*", "model.megatron_amp_O2=*"),
    ),
    OtherTrainer("NeMo", commands=(("nemo", "llm"),)),
    OtherTrainer("llama-cookbook's FSDP", ("llama_recipes/*", "llama_cookbook/*"), ("enable_fsdp",)),
    OtherTrainer("FSDP2", ("*fsdp2*",), ("fsdp2", "use_fsdp2"), bare=False),
    OtherTrainer("torchtune", ("torchtune/*",), (), (("tune", "run"),)),
    OtherTrainer("llm-foundry", (), (), (("composer",),)),
    OtherTrainer(
        "litgpt", ("litgpt/*",), (), (("litgpt", "pretrain"), ("litgpt", "finetune"), ("litgpt", "finetune_full"))
    ),
    OtherTrainer("nanotron", ("nanotron/*",)),
    OtherTrainer("GPT-NeoX", ("deepy.py",)),
    OtherTrainer(MEGATRON_DEEPSPEED, (f"{MEGATRON_DEEPSPEED}/pretrain_*.py",), bare=False),
    OtherTrainer("Colossal-AI", (), (), (("colossalai", "run"),)),
    _of_megatron("BERT (pretrain_bert.py)", "pretrain_bert"),
    _of_megatron("T5 (pretrain_t5.py)", "pretrain_t5"),
    _of_megatron("vision-language model (pretrain_vlm.py)", "pretrain_vlm"),
    _of_megatron("retrieval model", "pretrain_ict", "pretrain_realm", "pretrain_retro", "pretrain_biencoder"),
    _of_megatron("vision model", "pretrain_vision_*"),
    _of_megatron("reinforcement learning (train_rl.py)", "train_rl"),
)


def takes_megatron_arguments(arguments: Sequence[str]) -> bool:
    """Return whether a command line is of a trainer that takes Megatron's arguments."""
    return not OF_MEGATRON.isdisjoint(map(_word, arguments))


def other_trainer(program: str, arguments: Sequence[str]) -> str | None:
    """Return the name of the trainer that is not read, None for any other. `program` is the path of a script, or a
    module after `-m`, or a command.

    Megatron-DeepSpeed shares the name of its script with Megatron-LM, and is known by arguments of both frameworks in
    one command (deepspeedai/Megatron-DeepSpeed megatron/arguments.py, 4efb479).
    """
    path, words = _path(program), [_word(argument) for argument in arguments]
    for trainer in OTHER_TRAINERS:
        by_program = _matches(path, trainer.programs)
        by_words = any(fnmatchcase(word, pattern) for word in words for pattern in trainer.words)
        if by_program or by_words or _is_command(trainer, program, arguments):
            return trainer.name
    of_both = takes_megatron_arguments(arguments) and not OF_DEEPSPEED.isdisjoint(words)
    return MEGATRON_DEEPSPEED if of_both else None


def starts_other_trainer(program: str, arguments: Sequence[str]) -> bool:
    """Return whether a program without a launcher, or a command, is a trainer that is not read: by its name alone."""
    path = _path(program)
    return any(
        (trainer.bare and _matches(path, trainer.programs)) or _is_command(trainer, program, arguments)
        for trainer in OTHER_TRAINERS
    )


def refuse_other_trainer(program: str, arguments: Sequence[str], place: str) -> None:
    """Raise NoVerdict for a command of a trainer that is not read."""
    name = other_trainer(program, arguments)
    if name is not None:
        raise not_read(name, place)


def not_read(name: str, place: str) -> NoVerdict:
    """Return the error for a trainer that is not read; `place` is where its command is written."""
    return NoVerdict.on(place, f"{name} is not read; `llmlaunch observe --` measures it")


def _path(program: str) -> str:
    """Return a script's path or a module as one path with slashes."""
    if program.endswith(".py") or "/" in program:
        return program
    return program.replace(".", "/")


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a path, from any of its folders on, is one of these patterns."""
    parts = PurePath(path).parts
    return any(fnmatchcase("/".join(parts[place:]), pattern) for place in range(len(parts)) for pattern in patterns)


def _word(argument: str) -> str:
    """Return an option without its dashes and its value, with underscores, and an assignment as it is; "" for any other
    word, which is a value."""
    if argument.startswith("--"):
        return argument.lstrip("-").partition("=")[0].replace("-", "_")
    return argument if "=" in argument else ""


def _is_command(trainer: OtherTrainer, program: str, arguments: Sequence[str]) -> bool:
    words = (PurePath(program).name, *arguments[:1])
    return any(words[: len(command)] == command for command in trainer.commands)
