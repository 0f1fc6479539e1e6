"""Trains with Megatron-Bridge: builds its ConfigContainer of the values in a JSON file and hands it to Bridge's own
`pretrain` or `finetune`.

    megatron_bridge.py bridge.json [--iterations-to-skip STEP ...]          a rank of the training
    megatron_bridge.py bridge.json --check 512 [--compute-capability 9.0]   only validates, as rank 0 of 512
    megatron_bridge.py bridge.json --pack                                   only packs rows of text into sequences, as
                                                                            the training would; on CPUs
    megatron_bridge.py bridge.json --export FOLDER [--like HF_FOLDER]       only writes the newest checkpoint for
                                                                            Hugging Face; where a GPU is

The file has a section for each field of ConfigContainer, with that class's own field names; nothing of it is run. Two
kinds of values are not written as they are: {"variable": "NAME", "suffix": "/x"} is an environment variable of this
node with "/x" behind it, and number formats have names (FORMATS). Made for Megatron-Bridge 0.6.

Exit code 3 of --check: Bridge refuses the values, and the last lines say why; 0: it takes them, or nobody here can say.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REFUSED = 3
GUESSED_CAPABILITY = "9.0"
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
# What Bridge says of values that contradict each other (ConfigContainer.validate, training/config.py, 0.6).
REFUSALS = (AssertionError, ValueError, TypeError, NotImplementedError)
Section = dict[str, Any]


def main() -> None:
    options = parse_arguments()
    text = Path(options.settings).read_text(encoding="utf-8")
    if options.export is not None:
        export(json.loads(text), options.export, options.like)
        return
    if options.pack:
        pack(json.loads(text))
        return
    settings = json.loads(text, object_hook=with_variables)
    if options.check is not None:
        check(settings, options.check, options.compute_capability)
        return
    settings["train"]["iterations_to_skip"] = options.iterations_to_skip
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    run = {"pretrain": pretrain, "finetune": finetune}[settings["task"]]
    run(container(settings), forward_step)


def with_variables(value: Section) -> Any:
    """The value of a variable of this node in place of the mapping that names it."""
    if set(value) != {"variable", "suffix"}:
        return value
    return os.environ[value["variable"]] + value["suffix"]


def container(settings: Section) -> Any:
    """Return the ConfigContainer of the settings, not yet validated.

    Raises:
        TypeError: a class of Bridge's has no field of that name.
    """
    from megatron.bridge.training import config

    return config.ConfigContainer(
        train=config.TrainingConfig(**settings["train"]),
        validation=config.ValidationConfig(**settings["validation"]),
        scheduler=config.SchedulerConfig(**settings["scheduler"]),
        model=model_provider(settings["model"]),
        optimizer=filled(config.OptimizerConfig, settings["optimizer"]),
        ddp=filled(config.DistributedDataParallelConfig, settings["ddp"]),
        dataset=dataset_config(settings["dataset"]),
        tokenizer=config.TokenizerConfig(**settings["tokenizer"]),
        checkpoint=config.CheckpointConfig(**settings["checkpoint"]),
        logger=config.LoggerConfig(**settings["logger"]),
        rng=config.RNGConfig(**settings["rng"]),
        dist=config.DistributedInitConfig(**settings["dist"]),
        rerun_state_machine=config.RerunStateMachineConfig(**settings["rerun_state_machine"]),
        peft=adapters(settings.get("peft")),
    )


def model_provider(values: Section) -> Any:
    """Bridge's own description of the model whose layers are those that Megatron-LM's pretrain_gpt.py builds, or
    pretrain_hybrid.py."""
    if values.get("hybrid_layer_pattern"):
        from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider

        return filled(HybridModelProvider, values)
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    latent = bool(values.get("multi_latent_attention"))
    provider = filled(MLAModelProvider if latent else GPTModelProvider, values)
    if values.get("experimental_attention_variant"):  # as Bridge does for Qwen3-Next
        provider.transformer_layer_spec = variants.get_transformer_block_with_experimental_attention_variant_spec
    elif latent or values.get("num_moe_experts") or values.get("qk_l2_norm"):
        # as Bridge does for DeepSeek: each layer's own kind
        provider.transformer_layer_spec = partial(
            get_gpt_decoder_block_spec, use_transformer_engine=True, qk_l2_norm=bool(values.get("qk_l2_norm"))
        )
    return provider


def filled(kind: Any, values: Section) -> Any:
    """Return an object of the class with these values, those that JSON has no type for made of their names."""
    import torch

    types = {each.name: each.type for each in dataclasses.fields(kind)}
    made = {}
    for name, value in values.items():
        if isinstance(value, str) and "dtype" in str(types.get(name)) and value in FORMATS:
            value = getattr(torch, FORMATS[value])
        elif name == "window_size":
            value = tuple(value)
        elif name == "attention_backend":
            from megatron.core.transformer.enums import AttnBackend

            value = AttnBackend[value]
        made[name] = value
    return kind(**made)


def dataset_config(section: Section) -> Any:
    """Made-up data, an indexed dataset, or rows of prompts and answers."""
    from megatron.bridge.training import config

    values = dict(section)
    kind = values.pop("kind")
    if kind == "mock":
        return config.MockGPTDatasetConfig(**values)
    if kind == "rows":
        objects = {"preprocessing": preprocessing(values["preprocessing"])}
        if "offline_packing_specs" in values:
            from megatron.bridge.data.packing import PackedSequenceSpecs

            objects["offline_packing_specs"] = PackedSequenceSpecs(**values["offline_packing_specs"])
        return config.GPTSFTDatasetConfig(**values | objects)
    from megatron.core.datasets.utils import get_blend_from_list

    splits = [values.pop(f"{name}_data_path", None) for name in ("train", "valid", "test")]
    if any(splits):
        values["blend_per_split"] = [get_blend_from_list(paths) if paths else None for paths in splits]
    return config.GPTDatasetConfig(**values)


def preprocessing(section: Section) -> Any:
    """What becomes of a row: a conversation, or a prompt with its completion."""
    from megatron.bridge.data import ChatSFTPreprocessingConfig, PromptCompletionSFTPreprocessingConfig

    values = dict(section)
    kinds = {"chat": ChatSFTPreprocessingConfig, "prompt-completion": PromptCompletionSFTPreprocessingConfig}
    return kinds[values.pop("kind")](**values)


def adapters(section: Section | None) -> Any:
    if section is None:
        return None
    from megatron.bridge.peft.lora import LoRA

    return LoRA(**section)


def check(settings: Section, world_size: int, capability: str) -> None:
    """Validate as Bridge does before it starts a process group, and leave with REFUSED where it says no."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), CUDA_VISIBLE_DEVICES="")
    try:
        answer_without_gpu(capability)
        from megatron.bridge.training.config import runtime_config_update

        made = container(settings)
    except TypeError as failure:
        refuse(failure)
    except Exception as failure:
        print(f"note: the settings were not checked: {type(failure).__name__}: {failure}; the training will say")
        return
    try:
        runtime_config_update(made)
    except REFUSALS as failure:
        refuse(failure)
    except Exception as failure:
        print(f"note: the settings were not checked: {type(failure).__name__}: {failure}; the training will say")
        return
    print(f"Megatron-Bridge takes the settings of {world_size} rank(s)")


def pack(settings: Section) -> None:
    """Have Bridge write the sequences that its rank 0 would write while all other ranks wait, into the time-out of
    their first collective where there are many rows. What is there already is taken as it is.

    Leaves with a message where the rows cannot be packed, or are too few for a step.
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
    try:
        from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder
        from megatron.bridge.training.config import TokenizerConfig
        from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

        rows, tokenizer = dataset_config(settings["dataset"]), build_tokenizer(TokenizerConfig(**settings["tokenizer"]))
    except Exception as failure:
        print(f"note: the rows were not packed: {type(failure).__name__}: {failure}; the training will")
        return
    root = settings["dataset"]["dataset_root"]
    try:
        with alone(root):
            builder = GPTSFTDatasetBuilder(rows, tokenizer)
            refuse_older_packs(builder)
            train, validation, _ = builder.build()
    except Exception as failure:
        traceback.print_exc()
        sys.exit(f"the rows of {root} cannot be packed: {type(failure).__name__}: {failure}")
    length, wanted = settings["dataset"]["seq_length"], settings["train"]["global_batch_size"]
    for name, sequences in (("training", train), ("validation", validation)):
        if sequences is not None:
            print(f"{name}.jsonl of {root} fills {len(sequences)} sequence(s) of {length} tokens")
            if len(sequences) < wanted:  # Bridge leaves out what is left of a global batch, and ends where that is all
                sys.exit(
                    f"{name}.jsonl of {root} fills {len(sequences)} sequence(s) of {length} tokens, fewer than the "
                    f"{wanted} of training.global_batch_size, which a step and an evaluation take at once; lower that, "
                    "or give more rows"
                )


def refuse_older_packs(builder: Any) -> None:
    """Leave with a message where rows were changed after they were packed: Bridge would train on the older ones."""
    splits = [
        (builder.train_path, builder.train_path_packed),
        (builder.validation_path, builder.validation_path_packed),
    ]
    for rows, packed in ((Path(rows), Path(packed)) for rows, packed in splits):
        if packed.exists() and rows.exists() and rows.stat().st_mtime > packed.stat().st_mtime:
            sys.exit(
                f"{rows} was changed after its rows were packed; remove {packed}, and {rows.name}.idx.* beside the "
                "rows, so that they are packed again"
            )


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """One job at a time, where the file system has locks: Bridge takes a file that another one is writing for whole."""
    with contextlib.ExitStack() as locks:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = locks.enter_context(os.fdopen(os.open(f"{folder}/packed.lock", flags, 0o666), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def export(settings: Section, folder: str, like: str | None) -> None:
    """Write the newest checkpoint in Hugging Face's format, adapters in that of peft, with the other files as in the
    folder `like`: without one, as in that which the training began with."""
    checkpoint = settings["checkpoint"]
    pattern, trained = like or checkpoint.get("pretrained_checkpoint"), checkpoint.get("save")
    if trained is None:
        sys.exit("these settings write no checkpoints (training.checkpoint_path)")
    if pattern is None or not (Path(pattern) / "config.json").is_file():
        sys.exit("--like: name the Hugging Face folder of this model, which holds a config.json")
    newest = newest_checkpoint(trained)
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "--export: there is no GPU here, and Transformer Engine makes no layers without one, though their weights "
            "stay in the host's memory; run this where a GPU is"
        )
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(pattern)
    write = bridge.export_ckpt if settings.get("peft") is None else bridge.export_adapter_ckpt
    write(newest, folder)


def newest_checkpoint(folder: str) -> str:
    """Return the folder of the last checkpoint that was written to its end, as Bridge notes it. Bridge's own export
    takes the highest number that it finds, and of adapters it takes `folder` alone.

    Leaves with a message where there is none.
    """
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    try:
        return str(tracker.with_name(f"iter_{int(tracker.read_text()):07d}"))
    except (OSError, ValueError) as failure:
        sys.exit(f"no checkpoint was finished in {folder}: {failure}")


def refuse(failure: Exception) -> None:
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    message = " ".join((str(failure).strip() or str(frame.line)).split())
    run = os.environ.get("LLMLAUNCH_RUN_DIR", "RUN")
    print(f"Megatron-Bridge refuses its settings: {message}")
    print(f"  said by {frame.filename}, line {frame.lineno} ({frame.name})")
    print("  They were rendered by llmlaunch. From which line of the recipe each follows:")
    print(f"    llmlaunch explain-args {shlex.quote(run)}")
    print("  No step was run.")
    sys.exit(REFUSED)


def answer_without_gpu(capability: str) -> None:
    """Bridge asks what the GPU is; answered for the training's."""
    import torch

    major, minor = (int(part) for part in capability.split("."))
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=major, minor=minor, name="")
    torch.cuda.get_device_capability = lambda *_: (major, minor)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", help="bridge.json of the run directory")
    parser.add_argument("--iterations-to-skip", type=int, nargs="+", default=[], help="whose batches are left out")
    parser.add_argument("--pack", action="store_true", help="only pack rows of text into sequences")
    parser.add_argument("--export", metavar="FOLDER", help="only write the newest checkpoint for Hugging Face")
    parser.add_argument("--like", metavar="HF_FOLDER", help="whose tokenizer and configuration go with it")
    parser.add_argument("--check", type=int, metavar="RANKS", help="only validate, as rank 0 of so many")
    parser.add_argument("--compute-capability", default=GUESSED_CAPABILITY)
    return parser.parse_args()


if __name__ == "__main__":
    main()
