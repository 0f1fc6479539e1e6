"""Asks Megatron core which layers every pipeline rank and chunk would build. Run as a program, a line for a line:

stdin   {"world_size": ..., "arguments": ["--num-layers", ...]}, arguments of `pretrain_gpt.py`
stdout  {"stages": [[rank, chunk, first layer, [kind of each layer], prediction heads], ...]}, or {"refusal": ...}

Its own parser, validate_args and TransformerConfig read the arguments; process groups are not needed, only their sizes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from typing import Any

import megatron_rank  # noqa: F401 (Megatron core imports without a GPU)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training import arguments as megatron_arguments
from megatron.training.argument_utils import gpt_config_from_args

Stage = tuple[int, int, int, list[str], int]


def stages(world_size: int, arguments: list[str]) -> list[Stage]:
    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *arguments]
    args = megatron_arguments.parse_args()
    megatron_arguments.validate_args(args, {})
    args.padded_vocab_size = args.vocab_size
    config = gpt_config_from_args(args).transformer
    chunks = args.virtual_pipeline_model_parallel_size
    parallel_state.set_pipeline_model_parallel_world_size(args.pipeline_model_parallel_size)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    found = []
    for rank in range(args.pipeline_model_parallel_size):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        for chunk in range(chunks or 1):
            found.append((rank, chunk, *_stage(config, None if chunks is None else chunk)))
    return found


def _stage(config: Any, chunk: int | None) -> tuple[int, list[str], int]:
    built = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk).layer_specs
    kinds = ["mixture" if "MoE" in str(spec.submodules.mlp) else "dense" for spec in built]
    return get_transformer_layer_offset(config, vp_stage=chunk), kinds, get_mtp_num_layers_to_build(config, chunk)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                answer: dict[str, object] = {"stages": stages(case["world_size"], case["arguments"])}
        except (Exception, SystemExit) as refusal:
            answer = {"refusal": f"{type(refusal).__name__}: {refusal}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
