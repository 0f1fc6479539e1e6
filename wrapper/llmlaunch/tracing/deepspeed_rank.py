"""One rank of a large DeepSpeed job: the shipped trainer, DeepSpeed's engine and the Hugging Face model as real code
under fake tensors.

Without a pipeline all ranks hold the same, so the rank is 0. Importing this module imports the frameworks, patched: it
must be the first to import torch. One process traces one rank.
"""

# ruff: noqa: E402 (the order of imports and patches is the point)
from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import fake_cuda

fake_cuda.install()
os.environ["DS_ACCELERATOR"] = "cuda"

import patches

patches.patch_torch()

import torch_kernels

torch_kernels.install()

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

TRAINER = Path(__file__).resolve().parents[1] / "trainers/deepspeed"
sys.path.insert(1, str(TRAINER))

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import utils as zero_utils
from transformers import masking_utils

import alone
import fake_dispatch
import group
import model
import parallel
import train
from adapters import layers_of
from caching_allocator import replayed
from fake_dispatch import InventedScalars
from live_storages import STORAGES, grouped, tensors_in
from patches import CALLS, in_phase
from trace_checks import TraceEvidence, insist_complete

fake_dispatch.install()


STEPS = 2  # the first makes the optimizer's states, and ZeRO 3 knows its order of modules from the second pass
MICROBATCHES = 2  # an earlier one, whose gradients wait, and the last
PACKAGES = (deepspeed.__name__, "transformers", "peft", "torch")
RUN_DIR = "$LLMLAUNCH_RUN_DIR/"  # words that begin so name files of the job
CONFIG = "ds_config.json"
KIB = 2**10

ENGINES: list[Any] = []  # the one of this process


def patch_frameworks() -> None:
    """What of DeepSpeed, Transformers and the trainer reads values that peers or tokens would have given."""
    # rank 0's list of module numbers, which every rank compares with its own
    zero_utils.assert_lst_len_same_as_other_ranks = lambda numbers: None
    zero_utils.get_lst_from_rank0 = lambda numbers: numbers
    # positions that jump show several sequences in one row, of which the trainer has none
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    for module, name, wrap in (
        (model, "tensor_groups", _outside_the_trace),
        (train, "train_step", _never_told_to_end),
        (train, "build_engine", _remembered),
        (train, "micro_batch_loss", partial(in_phase, phase="loss")),
    ):
        setattr(module, name, wrap(getattr(module, name)))
    # ZeRO 1 and 2 flatten parameters on the device where there is room for them twice, else on the host
    get_accelerator().available_memory = lambda: 0
    engine = deepspeed.DeepSpeedEngine
    for name, phase in (("forward", "forward"), ("backward", "backward"), ("step", "optimizer step")):
        setattr(engine, name, in_phase(getattr(engine, name), phase))


def _outside_the_trace(function: Any) -> Any:
    """torch lays a mesh of ranks by the values of a tensor."""

    def run(*args: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args)

    return run


def _never_told_to_end(step: Any) -> Any:
    def run(*args: Any) -> tuple[float, bool]:
        loss, _ = step(*args)  # whether a rank heard a signal is a number read from a tensor
        STORAGES.phase = "between"
        return loss, False

    return run


def _remembered(build: Any) -> Any:
    def run(*args: Any) -> Any:
        STORAGES.phase = "setup"
        engine = build(*args)
        ENGINES.append(engine)
        for layer in layers_of(engine.module):
            layer.forward = patches.recomputed(layer.forward)
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_mark_gradient)
        STORAGES.phase = "between"
        return engine

    return run


def _mark_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:  # ZeRO 2 and 3 may have reduced it
        STORAGES.mark([parameter.grad], "waiting_gradients")


patch_frameworks()


def trace_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of a job as trace_ranks.py reads it."""
    few = not job.get("all_microbatches")
    return trace(job["arguments"], job["files"], job["world_size"], fewer=few)


def trace(arguments: Sequence[str], files: Mapping[str, Any], world_size: int, fewer: bool = True) -> dict[str, Any]:
    """Return the memory rank 0 used: lasting state, peak and what was alive at the peak (bytes, rounded to 512 as c10
    does).

    `arguments` are the trainer's, `files` the JSON files they name by a path that begins with RUN_DIR. `fewer`: run as
    few micro-batches as show the peak of all of them. Raises IncompleteTrace where not all of a training step ran, and
    what the frameworks raise where they refuse the job.
    """
    started = time.time()
    config = dict(files[CONFIG])
    planned = int(config["gradient_accumulation_steps"])
    microbatches = min(planned, MICROBATCHES) if fewer else planned
    config["gradient_accumulation_steps"] = microbatches
    if "train_batch_size" in config:
        config["train_batch_size"] = config["train_batch_size"] // planned * microbatches
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {**files, CONFIG: config}.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        placed = [word.replace(RUN_DIR, f"{folder}/") for word in arguments]
        engine, state, lasting = _trained(train.arguments([*placed, "--steps", str(STEPS)]), world_size)
    split = parallel.split_of(config, 0)
    insist_complete(_evidence(engine, microbatches, state))
    return {
        "parallel": {"tensor": split.tensor, "context": split.sequence, "data": split.data, "pipeline": 1},
        "pipeline_rank": 0,
        "microbatches": planned,
        "microbatches_run": [microbatches] * STEPS,
        "calls": dict(CALLS),
        "engine": type(engine.optimizer).__name__,
        "state": state,
        "lasting_bytes": STORAGES.now_bytes,
        "lasting": grouped(lasting),
        "peak_bytes": STORAGES.peak_bytes,
        "peak_phase": STORAGES.peak_phase,
        "peak_by_phase": STORAGES.peak_by_phase,
        "at_peak": grouped(STORAGES.alive_at_peak()),
        "allocator": replayed(STORAGES.events()),
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
        "seconds": round(time.time() - started, 1),
    }


def _trained(args: Any, world_size: int) -> tuple[Any, dict[str, Any], list[Any]]:
    """The engine after its steps, its state, and what was alive then."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    group.join()
    with FakeTensorMode(allow_non_fake_inputs=True), STORAGES, InventedScalars():
        STORAGES.phase = "setup"
        train.train(args, train.Notice())
        STORAGES.phase = "end"
        (engine,) = ENGINES
        return engine, state_of(engine), STORAGES.alive()


def state_of(engine: Any) -> dict[str, Any]:
    """How much lasts, and marks it as what it is."""
    parameters = [tensor for parameter in engine.module.parameters() for tensor in _held(parameter)]
    states = list(_optimizer_tensors(engine))
    gradients = list(_gradients(engine))
    sizes = {
        "optimizer": STORAGES.mark(states, "optimizer_states"),
        "gradients": STORAGES.mark(gradients, "gradients"),
        "parameters": STORAGES.mark(parameters, "parameters"),
    }
    transfer = getattr(engine.optimizer, "temp_grad_buffer_for_gpu_offload", None)
    STORAGES.mark(tensors_in([transfer], set()), "waiting_gradients")  # and so go on to the host
    return {
        "parameter_count": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "optimizer_state_count": alone.moments(engine),
        "least_state_count": alone.least_moments(engine, parallel.split_of(engine.config, 0)),
        "bytes": {**sizes, "other": STORAGES.now_bytes - sum(sizes.values())},
    }


def _held(parameter: Any) -> Iterator[torch.Tensor]:
    """The parameter, and of ZeRO 3 this rank's part of it."""
    yield parameter.data
    part = getattr(parameter, "ds_tensor", None)
    if part is not None:
        yield part.data


MASTERS = (
    "single_partition_of_fp32_groups",  # zero/stage_1_and_2.py
    "fp32_partitioned_groups_flat",  # zero/stage3.py
    "fp32_groups_flat_partition",  # bf16_optimizer.py
    "fp32_groups_flat",  # fp16/fused_optimizer.py
    "fp32_groups",  # fp16/unfused_optimizer.py
)
GRADIENTS = (
    "grad_partitions_flat_buffer",  # zero/stage3.py
    "fp32_groups_gradients_flat",  # bf16_optimizer.py
    "averaged_gradients",
    "all_grad_tensors",
)


def _optimizer_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Main parameters and moments."""
    for name in MASTERS:
        yield from tensors_in(getattr(engine.optimizer, name, None), set())
    for state in engine.basic_optimizer.state.values():
        yield from tensors_in(state, set())


def _gradients(engine: Any) -> Iterator[torch.Tensor]:
    for name in GRADIENTS:
        yield from tensors_in(getattr(engine.optimizer, name, None), set())
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield parameter.grad


def _evidence(engine: Any, microbatches: int, state: Mapping[str, Any]) -> TraceEvidence:
    return TraceEvidence(
        microbatches=[microbatches] * STEPS,
        forwards=[CALLS["forward"]],
        backwards=[CALLS["backward"]],
        steps=engine.global_steps,
        skipped=engine.skipped_steps,
        parameter_count=state["parameter_count"],
        optimizer_state_count=state["optimizer_state_count"],
        stateless=max(state["least_state_count"] - state["optimizer_state_count"], 0),
        peak_phase=STORAGES.peak_phase,
        peak_by_phase=STORAGES.peak_by_phase,
    )
