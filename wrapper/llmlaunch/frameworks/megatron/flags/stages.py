"""The notations of uneven stages, which exclude each other (core 0.19): layer counts of the first and the last rank, a
layer's place for the embedding or the loss, and all stages written out (transformer_config.py __post_init__,
arguments.py validate_args)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from llmlaunch.layout import Layout

Split = tuple[int, ...]

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
CHUNKS, WRITTEN = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
LAYERS_OF_A_CHUNK = "--num-layers-per-virtual-pipeline-stage"
STAGE_FLAGS = (FIRST, LAST, EMBEDDING, LOSS, CHUNKS, WRITTEN, LAYERS_OF_A_CHUNK)


def stage_flags(layout: Layout, mtp_layers: int = 0, before_loss: bool = False) -> Mapping[str, object]:
    """Return the flags of the stages of `layout` with their values. `mtp_layers` heads of multi-token prediction stand
    before the loss, on the last stage, where Megatron puts them without a layout too, or on the stage before it
    (`before_loss`)."""
    chunks = {CHUNKS: layout.virtual_pipeline} if layout.virtual_pipeline > 1 else {}
    if before_loss and layout.uneven:
        return {WRITTEN: written_layout(layout.layers_by_stage, mtp_layers, before_loss)}
    if len(set(layout.layers_by_stage)) <= 1:
        return chunks
    for notation in (_first_and_last, _slots):
        flags = notation(layout)
        if flags is not None:
            return {**flags, **chunks}
    return {WRITTEN: written_layout(layout.layers_by_stage, mtp_layers)}


def _first_and_last(layout: Layout) -> dict[str, object] | None:
    """Layers of the first and the last rank, where all its chunks are alike and so are the ranks between."""
    p, split = layout.pipeline, layout.layers_by_stage
    ranks = split[:p]
    if split != ranks * layout.virtual_pipeline or not all(ranks):
        return None
    first, last = ranks[0] * layout.virtual_pipeline, ranks[-1] * layout.virtual_pipeline
    if p == 2:  # both counts leave no rank between, which transformer_layer.py divides by where ranks have chunks
        return {FIRST: first}
    middle = set(ranks[1:-1])
    if len(middle) != 1:
        return None
    usual = middle.pop()
    flags: dict[str, object] = {FIRST: first} if ranks[0] != usual else {}
    return flags | ({LAST: last} if ranks[-1] != usual else {})


def _slots(layout: Layout) -> dict[str, object] | None:
    """The first virtual stage holds one layer less for the embedding, the last one for the loss."""
    split = layout.layers_by_stage
    usual = max(split)
    embedding, loss = split[0] < usual, split[-1] < usual
    if split != (usual - embedding, *(usual,) * (len(split) - 2), usual - loss):
        return None
    return {flag: True for flag, present in ((EMBEDDING, embedding), (LOSS, loss)) if present}


def written_layout(split: Split, mtp_layers: int = 0, before_loss: bool = False) -> str:
    """The stages written out: E embedding, t layer, m prediction head, L loss, | between stages, *n repeats
    (core/transformer/pipeline_parallel_layer_layout.py parse_str_to_list): "Et*3|(t*4|)*2t*3mL"."""
    stages = [_repeated("t", count) for count in split]
    stages[0] = "E" + stages[0]
    stages[-2 if before_loss else -1] += _repeated("m", mtp_layers)
    *before, last = stages
    runs = ((stage, len(list(run))) for stage, run in groupby(before))
    text = "".join(f"{stage}|" if times == 1 else f"({stage}|)*{times}" for stage, times in runs)
    return text + last + "L"


def _repeated(letter: str, times: int) -> str:
    return letter * times if times < 3 else f"{letter}*{times}"
