"""Asks the Megatron core 0.16.1 of the published wheel, which holds no `megatron/training`, whether it takes a job. Run
as a program, a line for a line:

stdin   {"world_size": 8, "arguments": ["--num-layers", ...]}
stdout  {"layer": null, "stages": [[rank, chunk, first layer, number of layers], ...]}, or
        {"layer": "transformer config", "error": "ValueError: ..."}

TransformerConfig, process groups (torch's fake backend at the job's world size) and the split of layers are core's own.
The parser is made of the flags that `llmlaunch/frameworks/megatron/parsers/0.16.json` lists; what `validate_args` and
`core_transformer_config_from_args` of core_v0.16.1 then make of them is restated here, as far as jobs of ours need it.
"""

# ruff: noqa: E402 (Megatron core is imported after what it takes for granted)
from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CORE = Path(sys.prefix) / "megatron-0.16"
FLAGS = json.loads((ROOT / "wrapper/llmlaunch/frameworks/megatron/parsers/0.16.json").read_text())["flags"]

sys.path.insert(0, str(CORE))

import stand_ins

stand_ins.install()

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

TYPES = {"int": int, "float": float, "str": str, "bool": lambda word: word == "True"}
PRECISIONS = (("bf16", torch.bfloat16), ("fp16", torch.half))


def value(word: str | None) -> Any:
    """A default as it was written down: a literal, else text."""
    try:
        return None if word is None else ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def parser() -> argparse.ArgumentParser:
    """Of the listed flags: their names, numbers of words, choices, types and defaults are 0.16's."""
    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    spellings: dict[tuple[str, str], list[str]] = {}
    for name, flag in FLAGS.items():
        spellings.setdefault((flag["dest"], json.dumps(flag)), []).append(name)
    for (dest, written), names in spellings.items():
        flag = json.loads(written)
        if flag["values"] == 0:
            made.add_argument(*names, dest=dest, action="store_const", const=value(flag.get("sets")))
        else:
            kind, count = TYPES.get(flag.get("type", "str"), str), None if flag["values"] == 1 else flag["values"]
            choices = [kind(choice) for choice in flag["choices"]] if "choices" in flag else None
            made.add_argument(*names, dest=dest, nargs=count, choices=choices, type=kind)
        made.set_defaults(**{dest: value(flag.get("default"))})
    return made


def read(world_size: int, words: list[str]) -> argparse.Namespace:
    """The arguments, and what validate_args of core_v0.16.1 derives of them."""
    args = parser().parse_args(words)
    args.world_size = world_size
    layout = args.pipeline_model_parallel_layout
    chunks = args.num_virtual_stages_per_pipeline_rank
    if layout is not None:
        args.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(
            layout, args.pipeline_model_parallel_size
        )
        chunks = args.pipeline_model_parallel_layout.virtual_pipeline_model_parallel_size
        chunks = chunks if chunks > 1 else None
    args.virtual_pipeline_model_parallel_size = chunks
    args.overlap_p2p_comm = chunks is not None
    args.params_dtype = next((dtype for name, dtype in PRECISIONS if getattr(args, name)), torch.float)
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    for name in ("moe_layer_freq", "no_rope_freq"):
        pattern = getattr(args, name)
        setattr(args, name, ast.literal_eval(pattern) if isinstance(pattern, str) else pattern)
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        entries = getattr(args, name)
        if isinstance(entries, list) and len(entries) == 1:
            setattr(args, name, entries[0])
    args.attention_backend = AttnBackend.auto
    return args


def config(args: argparse.Namespace) -> Any:
    """As core_transformer_config_from_args of core_v0.16.1 makes it."""
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    known = {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)}
    known |= {
        "deallocate_pipeline_outputs": True,
        "pipeline_dtype": args.params_dtype,
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "num_moe_experts": args.num_experts,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "fp8_param": args.fp8_param_gather,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "cp_comm_type": args.cp_comm_type[0],
        "bias_activation_fusion": args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
    }
    known |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True} if args.swiglu else {}
    if args.rope_type is None:
        known.pop("rope_type", None)
    return kind(**known)


def groups(args: argparse.Namespace) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )


def stages(args: argparse.Namespace, made: Any) -> list[tuple[int, int, int, int]]:
    """Which layers every pipeline rank and chunk would build. Ranks are only pretended."""
    found = []
    for rank in range(args.pipeline_model_parallel_size):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        for chunk in range(args.virtual_pipeline_model_parallel_size or 1):
            virtual = None if args.virtual_pipeline_model_parallel_size is None else chunk
            number = get_num_layers_to_build(made, vp_stage=virtual, pp_rank=rank)
            found.append((rank, chunk, get_transformer_layer_offset(made, vp_stage=virtual, pp_rank=rank), number))
    return found


def judge(world_size: int, words: list[str]) -> dict[str, object]:
    """The first layer that refuses, with its own words, or the stages of what all of them take."""
    layer = "arguments"
    try:
        args = read(world_size, words)
        layer = "transformer config"
        made = config(args)
        layer = "process groups"
        groups(args)
        layer = "split of layers"
        return {"layer": None, "stages": stages(args, made)}
    except (Exception, SystemExit) as refusal:
        return {"layer": layer, "error": f"{type(refusal).__name__}: {refusal}"}
    finally:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def main() -> None:
    if not megatron.core.__version__.startswith("0.16."):
        raise SystemExit(f"{CORE} holds Megatron core {megatron.core.__version__}, not 0.16")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            job = json.loads(line)
            answer = judge(job["world_size"], job["arguments"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
