"""What is trained on, in Megatron-LM's words (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe

__all__ = ["data_arguments"]


def data_arguments(recipe: Recipe) -> tuple[Argument, ...]:
    """Raises UserError for data that only the DeepSpeed trainer reads."""
    data = recipe.data
    if data.python_source:
        raise UserError(
            f"{recipe.path}: data.python_source: is for the DeepSpeed trainer; Megatron-LM reads indexed datasets "
            "(data.path) or made-up data (data.mock: true)"
        )
    causal = "fused attention is causal by itself; masks would take sequence x sequence bytes of every sample"
    made = [argument("--no-create-attention-mask-in-dataloader", why=causal)]
    if data.mock:
        return (*made, argument("--mock-data", of="data.mock"), *_numbers(recipe))
    made += [argument("--data-path", data.path, of="data.path")]
    made += [argument("--split", "99,1,0", why="a hundredth is kept apart")]
    if data.tokenizer is None:
        return (*made, *_numbers(recipe))
    made += [argument("--tokenizer-type", "HuggingFaceTokenizer", of="data.tokenizer")]
    return (*made, argument("--tokenizer-model", data.tokenizer, of="data.tokenizer"))


def _numbers(recipe: Recipe) -> list[Argument]:
    none = "tokens are numbers already"
    return [
        argument("--tokenizer-type", "NullTokenizer", of="data.tokenizer", why=none),
        argument("--vocab-size", recipe.model.vocab_size, of="model.vocab_size"),
    ]
