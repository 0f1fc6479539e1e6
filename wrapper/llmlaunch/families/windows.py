"""Layers with a sliding window, and layers of another kind at even distances among those with full attention, as
config.json lists them (`layer_types`): read, and written."""

from __future__ import annotations

from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.config_keys import MOST_LAYERS
from llmlaunch.families.reader import ConfigReader, short
from llmlaunch.models.shape import ModelShape, SlidingWindow

FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def no_window(reader: ConfigReader) -> None:
    """Raise BadKey if windows are on; Qwen has them off unless `use_sliding_window` is true, in no published model."""
    kinds = reader.values.get("layer_types") or []
    if not isinstance(kinds, list):
        raise BadKey(("layer_types",), f"must be a list, not {short(kinds)}")
    if reader.flag("use_sliding_window") or WINDOWED in kinds:
        raise BadKey(
            ("use_sliding_window",),
            "windows in some of the layers are not supported; set it to false for full attention",
        )


def whole_window(reader: ConfigReader) -> SlidingWindow | None:
    """Return the window of Mistral and Mixtral: all layers have it, or none."""
    if reader.get("sliding_window") is None:
        return None
    _remark(reader)
    return SlidingWindow(reader.size("sliding_window"))


def alternating_window(reader: ConfigReader, full_every: int, rotary_base: float | None) -> SlidingWindow | None:
    """Return the window of Gemma 2 and 3: every `full_every`-th layer attends to everything, unless `layer_types` lists
    each layer.
    """
    layers, kinds = reader.size("num_hidden_layers", largest=MOST_LAYERS), reader.get("layer_types")
    if kinds is not None:
        full_every = full_attention_period(kinds, layers, WINDOWED)
    if reader.get("sliding_window") is None or full_every == 1:
        return None
    _remark(reader)
    return SlidingWindow(reader.size("sliding_window"), full_every if full_every <= layers else 0, rotary_base)


def full_attention_period(kinds: Any, layers: int, other: str) -> int:
    """Return the period of layers with full attention among those of the `other` kind; 0 if there are none."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise BadKey(("layer_types",), f"must name a kind for each of {layers} layers, not {short(kinds)}")
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    expected = [FULL if every and not (i + 1) % every else other for i in range(layers)]
    if kinds != expected:
        inline = "; write the shape inline, without windows, for an estimate that is not too low"
        raise BadKey(
            ("layer_types",),
            f"layers of {FULL} must stand in even distances among {other}{inline if other == WINDOWED else ''}",
        )
    return every


def _remark(reader: ConfigReader) -> None:
    reader.remark(
        "layers with a window are timed by it with Megatron-LM, and as if they saw the whole sequence with DeepSpeed, "
        "where it is a mask; memory is the same with flash attention"
    )


def written_window(shape: ModelShape) -> dict[str, Any]:
    """Return the window that all layers have, or none."""
    return {"sliding_window": None if shape.sliding_window is None else shape.sliding_window.tokens}


def written_windows(shape: ModelShape) -> dict[str, Any]:
    """Return the window, which the class wants even where no layer has one, and the kind of each layer."""
    window = shape.sliding_window
    every = 1 if window is None else window.full_every
    kinds = [FULL if every and not (i + 1) % every else WINDOWED for i in range(shape.num_layers)]
    return {
        "sliding_window": shape.max_position_embeddings if window is None else window.tokens,
        "layer_types": kinds,
    }
