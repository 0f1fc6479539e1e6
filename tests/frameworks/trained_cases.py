"""Megatron jobs trained on the CPU: which model, split how. Data for test_megatron_trains.py and the table of flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmlaunch.assets import asset
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

__all__ = ["CASES", "MODELS", "STEPS", "TrainedCase", "recipe_for"]

STEPS = 5
LLAMA = (
    "model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 250}",
)
GPT = (
    "model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 256, num_attention_heads: 4, vocab_size: 250, "
    "gated_mlp: false, linear_bias: true, normalization: LayerNorm, position_embedding: learned_absolute, "
    "tied_embeddings: true}",
)
MIXTURE = (*LLAMA, "model.moe={num_experts: 4, topk: 2, ffn_hidden_size: 96}")
MODELS = {"llama": LLAMA, "gpt": GPT, "mixture": MIXTURE}
USUAL = (
    "training.sequence_length=64",
    "training.global_batch_size=8",
    f"training.steps={STEPS}",
    "training.learning_rate=0.005",
    "training.precision=fp32",
    "training.log_interval=1",
    "nodes=1",
)


@dataclass(frozen=True)
class TrainedCase:
    """One split of one of MODELS; its losses are to be those of one process, relatively within `tolerance`."""

    model: str
    layout: Layout
    overrides: tuple[str, ...] = ()
    tolerance: float = 1e-5

    @property
    def name(self) -> str:
        return " ".join((self.model, self.layout.describe(), *self.overrides))


def recipe_for(model: str, overrides: tuple[str, ...] = ()) -> Recipe:
    return load_recipe(asset("recipes", "llama3-8b.yaml"), (*MODELS[model], *USUAL, *overrides))


def start_of(model: str, folder: Path) -> tuple[str, ...]:
    """One step with a learning rate of zero (the end of a cosine) that saves the weights all splits begin with."""
    return ("training.steps=1", "training.save_interval=1", f"training.checkpoint_path={folder / model}")


CASES = (
    TrainedCase("llama", Layout(data=2)),
    TrainedCase("llama", Layout(data=2, zero_stage=1)),
    TrainedCase("llama", Layout(tensor=2)),
    TrainedCase("llama", Layout(tensor=2, sequence_parallel=1)),
    TrainedCase("llama", Layout(pipeline=2)),
    TrainedCase("llama", Layout(pipeline=2, virtual_pipeline=2)),
    TrainedCase("llama", Layout(pipeline=2, layers_by_stage=(1, 3))),
    TrainedCase("llama", Layout(tensor=2, pipeline=2)),
    TrainedCase("llama", Layout(recompute=RECOMPUTE_FULL, recompute_layers=1)),
    TrainedCase("llama", Layout(recompute=RECOMPUTE_SELECTIVE)),
    TrainedCase("gpt", Layout(tensor=2, data=2, zero_stage=1)),
    TrainedCase("gpt", Layout(pipeline=2, micro_batch_size=2)),
    TrainedCase("mixture", Layout(data=2)),
    TrainedCase("mixture", Layout(data=2, expert=2)),
    TrainedCase("mixture", Layout(data=2, expert=2), ("layout.token_dispatcher=allgather",)),
)
