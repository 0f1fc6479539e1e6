"""Asks Megatron-Bridge 0.6.2 whether it takes the settings of a job, and what Megatron core gets of them, on a machine
without a GPU. Run as a program, a line for a line:

stdin   {"world_size": 8, "settings": {"task": "pretrain", ...}, "environment": {...}, "compute_capability": "9.0",
         "arguments": ["--num-layers", ...]}
stdout  {"refused": null, "differences": {"optimizer.min_lr": ["None", "0.0"], ...}}, or
        {"refused": "AssertionError: ..."}

The rendered program itself (llmlaunch/trainers/megatron_bridge.py) makes the ConfigContainer, and Bridge's own
`runtime_config_update` validates it. `arguments` are those that Megatron-LM would be started with: its parser,
`validate_args` and its own functions make its configurations of them, and every field that the two have in common and
that is not the same is a difference, Megatron-LM's value first; so is a field of core's that Bridge lacks. "layers" is
one: what both build the first rank's layers of, as text. With "check": true the program's own check judges instead, and
the answer is its exit code and what it prints. With "defaults", names of fields, the answer is what Bridge's classes
have for each of them; with "rows": true, what Bridge's own dataset makes of the first two rows; with "packed": true,
what the program's own `--pack` leaves for the training. Each job has a process of its own, because frameworks keep
their state in the process.
"""

# ruff: noqa: E402 (frameworks are imported after what they take for granted)
from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SITE = Path(sys.prefix) / "bridge-0.6"
sys.path.insert(0, str(SITE))
sys.path.append(str(ROOT / "wrapper" / "llmlaunch" / "trainers"))

gc.disable()  # of what is imported nothing is garbage, and each job is a process of its own
logging.disable(logging.CRITICAL)  # some of it goes to stdout

import stand_ins

stand_ins.install()

import absent_packages
import torch
from megatron.core.dist_checkpointing.strategies import torch as _strategies  # noqa: F401 (before what it would look for)

import bridge_packages
import fake_cuda

absent_packages.install()
PACKAGES = bridge_packages.install()

import megatron_bridge as entry
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder
from megatron.bridge.training import config as bridge
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import _get_block_submodules
from megatron.training import arguments as megatron_arguments
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.gpt import default_layer_spec
from transformer_engine.pytorch import utils as engine

torch.version.cuda = "12.9"  # of the cluster; torch for CPUs names none, and block scaling asks

SECTIONS = ("train", "validation", "scheduler", "checkpoint", "logger", "rng", "dist", "rerun_state_machine")
NO_FIELD = "(no such field)"
Answer = dict[str, Any]


def judge(job: Answer) -> Answer:
    environment = {"RANK": "0", "WORLD_SIZE": str(job["world_size"]), "LOCAL_RANK": "0"}
    os.environ.update(job["environment"], **environment)
    capability = tuple(int(part) for part in job["compute_capability"].split("."))
    fake_cuda.HOPPER.major, fake_cuda.HOPPER.minor = capability
    torch.cuda.get_device_capability = lambda *args, **options: capability
    engine._get_device_compute_capability.cache_clear()
    settings = json.loads(json.dumps(job["settings"]), object_hook=entry.with_variables)
    if job.get("check"):
        return checked(settings, job)
    if job.get("packed"):
        return packed(settings, environment)
    try:
        container = entry.container(settings)
        if job.get("defaults"):
            return {"refused": None, "defaults": {name: default(container, name) for name in job["defaults"]}}
        bridge.runtime_config_update(container)
        if job.get("rows"):
            return {"refused": None, **first_rows(container)}
    except Exception as failure:
        at = traceback.extract_tb(failure.__traceback__)[-1]
        return {"refused": f"{type(failure).__name__}: {failure} ({Path(at.filename).name}:{at.lineno})"}
    return {"refused": None, "differences": differences(job["arguments"], container)}


def first_rows(container: Any) -> Answer:
    """The first two rows as a micro-batch: the words that are read, and which of those that follow them are learned."""
    tokenizer = build_tokenizer(container.tokenizer)
    train, validation, _ = GPTSFTDatasetBuilder(container.dataset, tokenizer).build()
    batch = train.collate_fn([train[0], train[1]])
    learned = [
        tokenizer.detokenize([label for label, counted in zip(labels, mask, strict=True) if counted])
        for labels, mask in zip(batch["labels"].tolist(), batch["loss_mask"].tolist(), strict=True)
    ]
    shape = list(batch["tokens"].shape)
    return {"shape": shape, "learned": learned, "validation": None if validation is None else len(validation)}


def packed(settings: Answer, environment: dict[str, str]) -> Answer:
    """What the program's own `--pack` says, which runs on a node before the training, and the sequences that Bridge
    then trains on, with the settings as it validates them."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            entry.pack(settings)
    except SystemExit as ended:
        return {"refused": str(ended.code)}
    os.environ.update(environment)
    container = entry.container(settings)
    bridge.runtime_config_update(container)
    tokenizer = build_tokenizer(container.tokenizer)
    again = io.StringIO()
    with contextlib.redirect_stdout(again):
        train, _, _ = GPTSFTDatasetBuilder(container.dataset, tokenizer).build()
    batches = (train.collate_fn([train[place]]) for place in range(len(train)))
    sequences = [sequence(tokenizer, batch) for batch in batches]
    found = again.getvalue().count("already exists")
    return {"refused": None, "said": output.getvalue(), "sequences": sequences, "found": found}


def sequence(tokenizer: Any, batch: Any) -> Answer:
    """Tokens that are read, where rows end, and those words that are learned."""
    labels, counted = batch["labels"][0].tolist(), batch["loss_mask"][0].tolist()
    return {
        "tokens": batch["tokens"].shape[1],
        "ends": batch.get("cu_seqlens_q_padded", batch["cu_seqlens_q"])[0].tolist(),
        "learned": tokenizer.detokenize([label for label, learned in zip(labels, counted, strict=True) if learned]),
        "mask": batch["attention_mask"],
    }


def checked(settings: Answer, job: Answer) -> Answer:
    """What the program's own `--check` says, which runs on a node before the training."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output):
        try:
            entry.check(settings, job["world_size"], job["compute_capability"])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return {"code": code, "said": output.getvalue()}


def differences(words: list[str], container: Any) -> dict[str, list[str]]:
    """Raises what Megatron-LM refuses its arguments with."""
    sys.argv = ["pretrain_gpt.py", *words]
    args = megatron_arguments.parse_args()
    megatron_arguments.validate_args(args, {})
    hybrid = args.hybrid_layer_pattern is not None
    model = (hybrid_config_from_args if hybrid else gpt_config_from_args)(args)
    ours = vars(container.model)
    others = {each.name: getattr(model, each.name) for each in dataclasses.fields(model) if each.name in ours}
    pairs = {
        # what both have, GPTModelConfig writes into the other (training/models/gpt.py __setattr__, core 0.19)
        "model": (others | vars(model.transformer), ours),
        "optimizer": (vars(training.get_megatron_optimizer_config(args)[0]), vars(container.optimizer)),
        "ddp": (vars(training.get_megatron_ddp_config(args)), vars(container.ddp)),
    }
    for section in SECTIONS:
        part = getattr(container, section)
        pairs[section] = (vars(args), {each.name: getattr(part, each.name) for each in dataclasses.fields(part)})
    unlike: dict[str, list[str]] = {}
    for section, (theirs, ours) in pairs.items():
        names = theirs.keys() & ours.keys() if section in SECTIONS else theirs.keys()
        for name in sorted(names):
            values = [written(side[name]) if name in side else NO_FIELD for side in (theirs, ours)]
            if values[0] != values[1]:
                unlike[f"{section}.{name}"] = values
    specs = hybrid_specs(model, container.model) if hybrid else layer_specs(model, container.model)
    layers = [text_of(spec) for spec in specs]
    return unlike if layers[0] == layers[1] else unlike | {"layers": layers}


def layer_specs(model: Any, provider: Any) -> tuple[Any, Any]:
    """What Megatron-LM and Bridge build the layers of the first pipeline rank of, of its first chunk."""
    parallel_state.set_pipeline_model_parallel_rank(0)
    chunk = 0 if provider.virtual_pipeline_model_parallel_size else None
    chosen = provider.transformer_layer_spec
    takes = inspect.signature(chosen).parameters  # as GPTModelProvider.provide asks
    ours = chosen(provider, vp_stage=chunk) if "vp_stage" in takes else chosen(provider)
    both = ((model.transformer, default_layer_spec(model, chunk)), (provider, ours))
    theirs, ours = (_get_block_submodules(config, spec, chunk, 0) for config, spec in both)
    return theirs, ours


def hybrid_specs(model: Any, provider: Any) -> tuple[Any, Any]:
    """What both build layers of one part each of; which part each has, says the pattern."""
    return model.hybrid_stack_spec, provider._resolve_hybrid_stack_spec()


def text_of(spec: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(spec))


def written(value: Any) -> str:
    """A value as text: functions by their name, which is all that two of them can be compared by."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value)


def default(container: Any, name: str) -> str:
    """What the class has for a field, by the field's dotted name."""
    *places, last = name.split(".")
    owner = container
    for place in places:
        owner = getattr(owner, place)
    field = next((each for each in dataclasses.fields(owner) if each.name == last), None)
    if field is None:  # a parameter of its own __init__, or nothing
        return written(vars(owner)[last]) if last in vars(owner) else NO_FIELD
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return written(made)


def answer_in_a_child(line: str) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                answer = judge(json.loads(line))
            except BaseException as failure:
                answer = {"refused": f"by the judge: {traceback.format_exception(failure)[-1]}"}
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


if __name__ == "__main__":
    for line in sys.stdin:
        print(answer_in_a_child(line), flush=True)
    os._exit(0)  # taking the frameworks apart takes seconds
