"""How Megatron-LM's `pretrain_gpt.py` of core 0.16 began: `pretrain` parses the arguments, and the script's own too."""

from __future__ import annotations

import argparse

from megatron.training import pretrain


def own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--of-the-script", type=int)
    return parser


if __name__ == "__main__":
    pretrain(
        None,
        None,
        None,
        None,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=own_arguments,
    )
