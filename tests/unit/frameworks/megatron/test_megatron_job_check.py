"""What the check at job start takes for a refusal of the arguments, and which flags it names."""

from __future__ import annotations

from typing import Any

import pytest

from llmlaunch.trainers.megatron_check import flags_in_question, is_refusal

ARGUMENTS, CONFIG = "/m/megatron/training/arguments.py", "/m/megatron/core/transformer/transformer_config.py"
HELPER, TOKENIZER = "/m/megatron/core/utils.py", "/usr/lib/transformers/tokenizer.py"


def failing(file: str, statement: str, inside: bool = True) -> BaseException:
    """What `statement` raises in a file: in a function of it, or while it is imported."""
    source = f"def validate_args():\n    {statement}" if inside else statement
    names: dict[str, Any] = {}
    try:
        exec(compile(source, file, "exec"), names)
        names["validate_args"]()
    except (Exception, SystemExit) as failure:
        return failure
    raise AssertionError(f"{statement} raised nothing")


@pytest.mark.parametrize(
    ("file", "statement", "refused"),
    [
        (ARGUMENTS, "assert False, 'pipeline size must divide the layers'", True),
        (ARGUMENTS, "raise ValueError('no such recompute module')", True),
        (ARGUMENTS, "raise SystemExit(2)", True),
        (CONFIG, "raise ValueError('num_attention_heads (33) must be a multiple')", True),
        (ARGUMENTS, "raise SystemExit(0)", False),
        (ARGUMENTS, "import a_package_that_is_not_here", False),
        (ARGUMENTS, "raise OSError('no tokenizer at hub.example')", False),
        (ARGUMENTS, "raise RuntimeError('Found no NVIDIA driver on your system')", False),
        (ARGUMENTS, "raise AssertionError('Torch not compiled with CUDA enabled')", False),
        (ARGUMENTS, "object().total_memory", False),
        (HELPER, "assert False", False),
        (TOKENIZER, "raise ValueError('unknown')", False),
    ],
)
def test_only_megatrons_own_checks_refuse(file: str, statement: str, refused: bool) -> None:
    assert is_refusal(failing(file, statement)) is refused


def test_what_fails_while_megatron_is_imported_says_nothing_of_the_arguments() -> None:
    assert not is_refusal(failing(ARGUMENTS, "assert False, 'needs Transformer Engine 2.9'", inside=False))


def test_the_flags_a_check_names_or_reads_are_shown_with_their_values() -> None:
    words = ["--num-layers", "32", "--cp-comm-type", "a2a", "p2p", "--swiglu", "--lr=3e-4"]
    assert flags_in_question("--num-layers must be even", "", words) == ["--num-layers 32"]
    assert flags_in_question("", "assert len(args.cp_comm_type) == 1 and args.lr", words) == [
        "--cp-comm-type a2a p2p",
        "--lr=3e-4",
    ]
    assert flags_in_question("num_layers (32) is odd", "if not self.swiglu: raise", words) == [
        "--num-layers 32",
        "--swiglu",
    ]
