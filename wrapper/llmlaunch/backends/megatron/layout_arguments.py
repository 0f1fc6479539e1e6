"""Megatron-LM arguments for the layout (core 0.19): parallel sizes, and how layers are divided among stages.

Uneven stages have three notations beside even ones, which exclude each other (transformer_config.py __post_init__,
arguments.py validate_args): layer counts of the first and the last rank, a layer's place for the embedding or the loss,
and all stages written out.
"""

from __future__ import annotations

from itertools import groupby

from llmlaunch.backends.argument import Argument, argument
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape

__all__ = ["STAGE_FLAGS", "parallel_arguments", "stage_arguments", "stage_flags"]


def parallel_arguments(shape: ModelShape, layout: Layout) -> tuple[Argument, ...]:
    """Return the sizes of all parallel groups, the stages, and the overlap of gradient and parameter communication."""
    arguments = [
        argument("--tensor-model-parallel-size", layout.tensor, of="layout.tensor"),
        argument("--pipeline-model-parallel-size", layout.pipeline, of="layout.pipeline"),
        argument("--context-parallel-size", layout.context, of="layout.context"),
        *stage_arguments(layout, shape.mtp_num_layers),
    ]
    if layout.sequence_parallel:
        arguments += [argument("--sequence-parallel", of="layout.sequence_parallel")]
    if shape.moe is not None:
        arguments += [argument("--expert-model-parallel-size", layout.expert, of="layout.expert")]
        default = "its default is the tensor parallel size, not 1"
        size = argument("--expert-tensor-parallel-size", layout.expert_tensor, of="layout.expert_tensor", why=default)
        arguments += [size]
    if layout.zero_stage == 1:
        arguments += [argument("--use-distributed-optimizer", of="layout.zero_stage")]
        arguments += [argument(flag, of="layout.zero_stage", why="hides communication") for flag in OVERLAP]
    return tuple(arguments)


OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


Words = tuple[str, ...]
Split = tuple[int, ...]

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
CHUNKS, WRITTEN = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
# none of them may stand in backend.extra_args
STAGE_FLAGS = (FIRST, LAST, EMBEDDING, LOSS, CHUNKS, WRITTEN, "--num-layers-per-virtual-pipeline-stage")


def stage_flags(layout: Layout, mtp_layers: int = 0) -> Words:
    """The flags of the stages of `layout`. `mtp_layers` heads of multi-token prediction stand before the loss, on the
    last stage, where Megatron puts them without a layout too."""
    chunks = (CHUNKS, str(layout.virtual_pipeline)) if layout.virtual_pipeline > 1 else ()
    if len(set(layout.layers_by_stage)) <= 1:
        return chunks
    for notation in (_first_and_last, _slots):
        flags = notation(layout)
        if flags is not None:
            return (*flags, *chunks)
    return (WRITTEN, written_layout(layout.layers_by_stage, mtp_layers))


def stage_arguments(layout: Layout, mtp_layers: int = 0) -> tuple[Argument, ...]:
    """`stage_flags` with what each follows from."""
    flags, arguments = stage_flags(layout, mtp_layers), []
    for place, flag in enumerate(flags):
        if flag.startswith("--"):
            values = [word for word in flags[place + 1 : place + 2] if not word.startswith("--")]
            key = "layout.virtual_pipeline" if flag == CHUNKS else "layout.layers_by_stage"
            arguments.append(argument(flag, *values, of=key))
    return tuple(arguments)


def _first_and_last(layout: Layout) -> Words | None:
    """Layers of the first and the last rank, where all its chunks are alike and so are the ranks between."""
    p, split = layout.pipeline, layout.layers_by_stage
    ranks = split[:p]
    if split != ranks * layout.virtual_pipeline or not all(ranks):
        return None
    first, last = ranks[0] * layout.virtual_pipeline, ranks[-1] * layout.virtual_pipeline
    if p == 2:  # both counts leave no rank between, which transformer_layer.py divides by where ranks have chunks
        return (FIRST, str(first))
    middle = set(ranks[1:-1])
    if len(middle) != 1:
        return None
    usual = middle.pop()
    flags = (FIRST, str(first)) if ranks[0] != usual else ()
    return (*flags, *((LAST, str(last)) if ranks[-1] != usual else ()))


def _slots(layout: Layout) -> Words | None:
    """The first virtual stage holds one layer less for the embedding, the last one for the loss."""
    split = layout.layers_by_stage
    usual = max(split)
    embedding, loss = split[0] < usual, split[-1] < usual
    if split != (usual - embedding, *(usual,) * (len(split) - 2), usual - loss):
        return None
    return (*((EMBEDDING,) if embedding else ()), *((LOSS,) if loss else ()))


def written_layout(split: Split, mtp_layers: int = 0) -> str:
    """The stages written out: E embedding, t layer, m prediction head, L loss, | between stages, *n repeats
    (core/transformer/pipeline_parallel_layer_layout.py parse_str_to_list): "Et*3|(t*4|)*2t*3mL"."""
    stages = [_repeated("t", count) for count in split]
    stages[0] = "E" + stages[0]
    *before, last = stages
    runs = ((stage, len(list(run))) for stage, run in groupby(before))
    text = "".join(f"{stage}|" if times == 1 else f"({stage}|)*{times}" for stage, times in runs)
    return text + last + _repeated("m", mtp_layers) + "L"


def _repeated(letter: str, times: int) -> str:
    return letter * times if times < 3 else f"{letter}*{times}"
