"""Asks Megatron core 0.19.2 whether it takes a job, on a machine without a GPU. Run as a program, a line for a line:

stdin   {"world_size": 8, "arguments": ["--num-layers", ...], "environment": {...}, "compute_capability": "9.0",
         "pipeline_rank": 0, "until": "model" | "encoder" | "stages" | "forward" | "step"}
stdout  {"layer": null, "stages": [[rank, chunk, first layer, [kind of each layer], prediction heads], ...],
         "model": {}, "stopped": "" or what could not be run to its end}, or
        {"layer": "run time", "error": "ValueError: ...", "at": "megatron/core/transformer/moe/moe_layer.py:627"}

Megatron checks in four layers, and each is its own code here: parser and `validate_args`; TransformerConfig; process
groups, of torch's fake backend at the job's world size; and at run time the layers of every rank and chunk, then on one
pipeline rank model, DDP, optimizer and schedule under fake tensors, up to the first micro-batch's forward pass or a
whole `train_step`. Nothing is restated. Of a job until its "model" nothing runs: the answer's "model" then has the
"parameters" of the whole model, counted; "config", the TransformerConfig, and "others", what else the model is built
with, as far as they are plain values; until its "encoder", "model" has what Bridge's vision encoder before such a
decoder keeps. Frameworks are imported once, and every job has a process of its own, because
Megatron keeps its state in the process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import stand_ins  # noqa: F401 (first: it lets the next be found)

# isort: split
import megatron_rank  # the first to import torch

# isort: split
import torch
import torch._dynamo  # every optimizer imports it, which takes a second
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern, select_pipeline_segment
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.moe import experts, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training import arguments as megatron_arguments
from megatron.training import global_vars, initialize, training
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.vocab_utils import calculate_padded_vocab_size
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer_engine.pytorch import utils as engine
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import balanced_routing
import fake_cuda
from fake_dispatch import InventedScalars
from pretrain import build_model, forward_step

Stage = tuple[int, int, int, list[str], int]

DEEPEST_RECOMPUTING = 8
LONGEST_SECONDS = 60  # of processor time: what takes longer never ends
WARMING = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm
--use-distributed-optimizer --micro-batch-size 1 --global-batch-size 1 --num-experts 4 --moe-router-topk 2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-layer-freq [0,1]
--train-iters 1 --lr 1e-4 --bf16 --eval-iters 0 --eval-interval 1 --tokenizer-type NullTokenizer --vocab-size 128"""


def _at_a_narrow_product(module: Any, num_gemms: int = 1) -> None:
    """A module's first 8- or 4-bit product is prepared for kernels there are not."""
    if FP8GlobalStateManager.is_fp8_enabled():
        raise NotImplementedError("transformer_engine_torch has no 8- or 4-bit products here")
    _prepare(module, num_gemms)


_prepare = TransformerEngineBaseModule.init_fp8_metadata
TransformerEngineBaseModule.init_fp8_metadata = _at_a_narrow_product
torch.version.cuda = "12.9"  # of the cluster; torch for CPUs names none, and block scaling asks
# Megatron-FSDP with tensor or context parallelism asks for a stream of NCCL's own, which torch for CPUs has not.
parallel_state.get_nccl_options = lambda name, settings: None


def _sent(*values: Any, **options: Any) -> Any:
    raise NotImplementedError("HybridEP sends tokens between GPUs")


token_dispatcher.hybrid_ep_dispatch = token_dispatcher.hybrid_ep_combine = _sent

# What balanced_routing.install answers in the place of Megatron, for one number of experts.
ANSWERED = (
    (token_dispatcher, "permute"),
    (token_dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize"),
    (experts.TEGroupedMLP, "forward"),
    (experts.SequentialMLP, "forward"),
)


@dataclass
class Job:
    """What is asked, and what of it Megatron has taken so far."""

    world_size: int
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    compute_capability: str = "9.0"
    pipeline_rank: int = 0
    until: str = "step"
    args: Any = None
    config: Any = None
    stages: list[Stage] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""


class Reached(Exception):
    """All that was asked about has passed."""


def read_arguments(job: Job) -> None:
    """Megatron's parser and `validate_args`, and the calculator of micro-batches."""
    os.environ.update(job.environment, RANK="0", WORLD_SIZE=str(job.world_size), LOCAL_RANK="0")
    capability = tuple(int(part) for part in job.compute_capability.split("."))
    fake_cuda.HOPPER.major, fake_cuda.HOPPER.minor = capability
    torch.cuda.get_device_capability = lambda *args, **options: capability
    engine._get_device_compute_capability.cache_clear()  # the warming job's
    sys.argv = ["pretrain_gpt.py", *job.arguments]
    job.args = args = megatron_arguments.parse_args()
    megatron_arguments.validate_args(args, {})
    args.use_gloo_process_groups = False  # the fake backend has none
    args.padded_vocab_size = args.padded_vocab_size or calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    global_vars.set_global_variables(args, build_tokenizer=False)


def make_config(job: Job) -> None:
    job.config = model_config(job).transformer


def model_config(job: Job) -> Any:
    made = gpt_config_from_args if job.args.hybrid_layer_pattern is None else hybrid_config_from_args
    return made(job.args)


def make_groups(job: Job) -> None:
    args = job.args
    # The pipeline is the outermost order: data parallel rank 0 and tensor rank 0 of the stage.
    args.rank = (
        job.pipeline_rank % args.pipeline_model_parallel_size * (job.world_size // args.pipeline_model_parallel_size)
    )
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=job.world_size)
    initialize._initialize_distributed(None, None, None)


def split_layers(job: Job) -> None:
    """Which layers every pipeline rank and chunk would build. Ranks are only pretended, and the own one put back."""
    own = parallel_state.get_pipeline_model_parallel_rank()
    for rank in range(job.args.pipeline_model_parallel_size):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        chunks = job.args.virtual_pipeline_model_parallel_size
        for chunk in range(chunks or 1):
            stage = _stage(job, rank, None if chunks is None else chunk)
            job.stages.append((rank, chunk, *stage))
    parallel_state.set_pipeline_model_parallel_rank(own)


def _stage(job: Job, rank: int, chunk: int | None) -> tuple[int, list[str], int]:
    config = job.config
    heads = get_mtp_num_layers_to_build(config, chunk, pp_rank=rank)
    if job.args.hybrid_layer_pattern is not None:
        ranks = {"get_rank": rank, "get_world_size": config.pipeline_model_parallel_size}
        answers = {name: mock.Mock(return_value=value) for name, value in ranks.items()}
        with mock.patch.multiple(torch.distributed, **answers):
            main = parse_hybrid_pattern(job.args.hybrid_layer_pattern).main_pattern
            letters, first = select_pipeline_segment(main, parallel_state.get_pipeline_model_parallel_group(), chunk)
        return first, letters, heads
    if config.experimental_attention_variant is None:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk, pp_rank=rank)
    else:
        block = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=chunk, pp_rank=rank)
    built = block.layer_specs
    kinds = ["mixture" if "MoE" in str(spec.submodules.mlp) else "dense" for spec in built]
    return get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=rank), kinds, heads


def train(job: Job) -> None:
    """Model, DDP, optimizer and schedule of one pipeline rank."""
    if job.until == "model":
        job.model = built_model(job)
        return
    if job.until == "encoder":
        from bridge_encoder import encoder_bytes

        initialize._set_random_seed(job.args.seed)
        job.model = encoder_bytes(job.config)
        return
    split_layers(job)
    if job.args.use_megatron_fsdp:
        job.stopped = "meshes of devices have no fake backend"
    if job.until == "stages" or job.stopped:
        return
    initialize._set_random_seed(job.args.seed)
    with FakeTensorMode(allow_non_fake_inputs=True), InventedScalars(), routing(job):
        megatron_rank.forward_step = forward_step if job.until == "step" else _first_forward
        try:
            parts = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, build_model)
            megatron_rank._train(job.args, *parts, 1)
        except Reached:
            pass
        except NotImplementedError as lacking:
            if not any(name in str(lacking) for name in ("transformer_engine_torch", "HybridEP")):
                raise
            job.stopped = str(lacking)


def built_model(job: Job) -> dict[str, Any]:
    initialize._set_random_seed(job.args.seed)
    with FakeTensorMode(allow_non_fake_inputs=True), InventedScalars():
        model = build_model(pre_process=True, post_process=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    others = plain_fields(model_config(job))
    return {"parameters": parameters, "config": plain_fields(job.config), "others": others}


def plain_fields(config: Any) -> dict[str, Any]:
    """Return the fields that are numbers, words or lists of such; functions by their names."""
    values = {each.name: getattr(config, each.name, None) for each in fields(config)}
    return {name: getattr(value, "__name__", value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str)) or hasattr(value, "__name__")


def routing(job: Job) -> contextlib.AbstractContextManager[Any]:
    """Experts get the same number of tokens each. Where that is no whole number, or tokens are dropped, the step ends
    at the first router: what is behind it depends on values, which fake tensors have not."""
    args = job.args
    chosen, count = args.moe_router_topk, args.num_experts
    if not count:
        return contextlib.nullcontext()
    split = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    tokens = args.seq_length * args.micro_batch_size // split
    if tokens * chosen % count or args.moe_expert_capacity_factor is not None:
        MoELayer.route = _reached
        job.stopped = "at the first router"
        return contextlib.nullcontext()
    balanced_routing.install(chosen, count)
    return balanced_routing.BalancedSelection(chosen, count)


def _reached(*values: Any, **options: Any) -> Any:
    raise Reached


def _first_forward(data: Any, model: Any) -> Any:
    forward_step(data, model)
    raise Reached


LAYERS: tuple[tuple[str, Callable[[Job], None]], ...] = (
    ("arguments", read_arguments),
    ("transformer config", make_config),
    ("process groups", make_groups),
    ("run time", train),
)


def judge(job: Job) -> dict[str, object]:
    """The first layer that refuses, with its own words, or the stages of what all of them take."""
    complaints = io.StringIO()
    for layer, ask in LAYERS:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(complaints):
                ask(job)
        except (Exception, SystemExit) as refusal:
            said = complaints.getvalue().strip().splitlines()[-1:] if isinstance(refusal, SystemExit) else [refusal]
            error = f"{type(refusal).__name__}: {' '.join(' '.join(map(str, said)).split())}"
            return {"layer": layer, "error": error, "at": _place(refusal)}
    return {"layer": None, "stages": job.stages, "model": job.model, "stopped": job.stopped}


def _place(refusal: BaseException) -> str:
    """The innermost line of the frameworks' own Python."""
    frames = [
        f"{frame.filename.rpartition('/site-packages/')[2]}:{frame.lineno}"
        for frame in traceback.extract_tb(refusal.__traceback__)
        if "/site-packages/megatron/" in frame.filename or "/site-packages/transformer_engine/" in frame.filename
    ]
    return frames[-1] if frames else ""


def end_endless_recomputing() -> None:
    """A function whose recomputation is part of its own backward pass is run again for ever; a few times are enough."""
    backward, depth = CheckpointFunction.backward, 0

    def counted(ctx: Any, *gradients: Any) -> Any:
        nonlocal depth
        if depth > DEEPEST_RECOMPUTING:
            raise RecursionError("the backward pass of a recomputed function calls itself")
        depth += 1
        try:
            return backward(ctx, *gradients)
        finally:
            depth -= 1

    CheckpointFunction.backward = staticmethod(counted)


def warm_up() -> None:
    """Reads what every job needs once: the parser, and what fake tensors look up. No backward pass: a process that ran
    one cannot be forked."""
    made = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    megatron_arguments.add_megatron_arguments = lambda parser: made
    answered = [(owner, name, getattr(owner, name)) for owner, name in ANSWERED]
    answer = judge(Job(1, WARMING.split(), until="forward"))
    for owner, name, own in answered:
        setattr(owner, name, own)
    if answer["layer"] is not None:
        raise SystemExit(f"the job to warm up with was refused: {answer}")
    parallel_state.destroy_model_parallel()
    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    torch.distributed.destroy_process_group()
    gc.collect()
    gc.freeze()


def answered_apart(job: Job) -> str:
    """The answer of a process of its own, as JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_SECONDS, LONGEST_SECONDS))
        gc.disable()
        with os.fdopen(writing, "w") as out:
            out.write(json.dumps(judge(job)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    return said or json.dumps({"layer": "run time", "error": f"died with status {status}", "at": ""})


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    end_endless_recomputing()
    warm_up()
    for line in sys.stdin:
        print(answered_apart(Job(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
