"""What is trained on, in Megatron-LM's words (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument, number
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Data, Recipe

__all__ = ["data_arguments"]

DEFAULT_SPLIT = "99,1,0"
NUMBERS, HUGGING_FACE = "NullTokenizer", "HuggingFaceTokenizer"


def data_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Raises UserError for data that only the DeepSpeed trainer reads."""
    data = recipe.data
    if data.python_source:
        raise UserError(
            f"{recipe.path}: data.python_source: is for the DeepSpeed trainer; Megatron-LM reads indexed datasets "
            "(data.path, data.blend) or made-up data (data.mock: true)"
        )
    causal = "fused attention is causal by itself; masks would take sequence x sequence bytes of every sample"
    mask = argument("--no-create-attention-mask-in-dataloader", why=causal)
    source = [argument("--mock-data", of="data.mock")] if data.mock else _files(data)
    return (mask, *source, *_tokenizer(recipe, layout))


def _files(data: Data) -> list[Argument]:
    """Weights stand before the paths they belong to (get_blend_from_list, core/datasets/utils.py, core 0.19)."""
    if data.blend:
        words = [word for part in data.blend for word in (number(part.weight), part.path)]
        made = [argument("--data-path", *words, of="data.blend")]
    else:
        made = [argument("--data-path", data.path, of="data.path")]
    kept = "" if data.split else "a hundredth is kept apart"
    made += [argument("--split", data.split or DEFAULT_SPLIT, of="data.split", why=kept)]
    if data.cache_path is not None:
        made += [argument("--data-cache-path", data.cache_path, of="data.cache_path")]
    return made


def _tokenizer(recipe: Recipe, layout: Layout) -> list[Argument]:
    """Megatron makes as many rows of the embedding as the tokenizer has words, padded (build_tokenizer,
    core/tokenizers/utils/build_tokenizer.py, core 0.19), unless it is told: the plan's are said."""
    data, shape = recipe.data, recipe.model
    kind = data.tokenizer_type or (HUGGING_FACE if data.tokenizer else NUMBERS)
    none = "tokens are numbers already" if kind == NUMBERS else ""
    made = [argument("--tokenizer-type", kind, of=("data.tokenizer", "data.tokenizer_type"), why=none)]
    if kind == NUMBERS:
        return [*made, argument("--vocab-size", shape.vocab_size, of="model.vocab_size")]
    if data.tokenizer is not None:
        made += [argument("--tokenizer-model", data.tokenizer, of="data.tokenizer")]
    planned = "the plan's number, whatever the tokenizer counts"
    size = shape.padded_vocab_size(layout.tensor)
    return [*made, argument("--padded-vocab-size", size, of=("model.vocab_size", "layout.tensor"), why=planned)]
