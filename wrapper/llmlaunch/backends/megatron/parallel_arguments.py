"""How the job is split, in Megatron-LM's words (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument
from llmlaunch.backends.megatron.stages import stage_arguments
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape

__all__ = ["parallel_arguments"]


def parallel_arguments(shape: ModelShape, layout: Layout) -> tuple[Argument, ...]:
    """Sizes of all groups, the stages, and what overlaps with what."""
    made = [
        argument("--tensor-model-parallel-size", layout.tensor, of="layout.tensor"),
        argument("--pipeline-model-parallel-size", layout.pipeline, of="layout.pipeline"),
        argument("--context-parallel-size", layout.context, of="layout.context"),
        *stage_arguments(layout, shape.mtp_num_layers),
    ]
    if layout.sequence_parallel:
        made += [argument("--sequence-parallel", of="layout.sequence_parallel")]
    if shape.moe is not None:
        made += [argument("--expert-model-parallel-size", layout.expert, of="layout.expert")]
        default = "its default is the tensor parallel size, not 1"
        size = argument("--expert-tensor-parallel-size", layout.expert_tensor, of="layout.expert_tensor", why=default)
        made += [size]
    if layout.zero_stage == 1:
        made += [argument("--use-distributed-optimizer", of="layout.zero_stage")]
        made += [argument(flag, of="layout.zero_stage", why="hides communication") for flag in OVERLAP]
    return tuple(made)


OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
