"""A trainer of a person's own for Megatron-LM: an argument and a model provider that pretrain_gpt.py has not."""

from __future__ import annotations

import argparse
from typing import Any

import train

# isort: split
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--scaled-weights", type=float, default=1.0)
    return parser


def own_model(*positional: Any, **named: Any) -> Any:
    """Megatron's model with smaller first weights."""
    model = train.build_model(*positional, **named)
    for parameter in model.parameters():
        parameter.data.mul_(get_args().scaled_weights)
    print(f"a model of its own, scaled by {get_args().scaled_weights}", flush=True)
    return model


if __name__ == "__main__":
    args = parse_and_validate_args(own_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    train.datasets_provider.is_distributed = True
    pretrain(
        pretrain_cfg_container_from_args(args),
        train.datasets_provider,
        ModelType.encoder_or_decoder,
        train.forward_step,
        own_model,
    )
