"""Trains on this machine's CPU with Megatron-LM's own `pretrain` (core 0.19), over gloo.

    torchrun --nproc_per_node 2 train.py WORDS ...        the arguments of pretrain_gpt.py

The parser, the model, DDP, the optimizers, schedules, checkpoints, the data loader and the log are Megatron's.
"""

# ruff: noqa: E402 (the order of imports and patches is the point)
from __future__ import annotations

import sys
import typing
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traced"))

import stand_ins  # noqa: F401 (before what lies there)

warnings.filterwarnings("ignore")

import typing_extensions

typing.override = typing_extensions.override  # Megatron core takes it from typing, where Python 3.12 has it
sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its Python half alone cannot compute

import cuda_on_cpu

cuda_on_cpu.install()

import fake_triton

fake_triton.install()

from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron_patches import patch_megatron
from pretrain_gpt import datasets_provider

from pretrain import build_model, forward_step

patch_megatron()


def embedding_ranks(ranks: list[int]) -> list[int]:
    """Those of a pipeline that have a copy of the embedding table, as pretrain_gpt.py says (get_embedding_ranks)."""
    args = get_args()
    if len(ranks) == 1:
        return ranks
    tied = [] if args.untie_embeddings_and_output_weights else ranks[-1:]
    return sorted({ranks[0], *tied, *get_mtp_ranks(ranks, core_transformer_config_from_args(args))})


def train(words: list[str]) -> None:
    """What `pretrain_gpt.py` does when it is started with `words`."""
    sys.argv = ["pretrain_gpt.py", *words]
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        build_model,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    train(sys.argv[1:])
