"""Phi-3 and Phi-4 (transformers/models/phi3, 5.23); scaling by longrope is refused where it is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import COMMON, ROTARY_PERCENT, silu_decoder, whole_window, written_window
from llmlaunch.families.family import DECODER, ConfigReader, Family, read_keys
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    dropout = reader.rate("resid_pdrop")
    if reader.rate("embd_pdrop") != dropout:
        raise BadKey(("embd_pdrop",), "must be equal to resid_pdrop: one rate drops out of the residual stream here")
    return replace(
        silu_decoder(reader),
        sliding_window=whole_window(reader),
        hidden_dropout=dropout,
        **read_keys(reader, ROTARY_PERCENT),
    )


def write(shape: ModelShape) -> dict[str, Any]:
    """The class pads with a token that not every vocabulary has."""
    dropout = {"resid_pdrop": shape.hidden_dropout, "embd_pdrop": shape.hidden_dropout}
    return {**written_window(shape), **dropout, "pad_token_id": None}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER, *ROTARY_PERCENT),
    defaults={
        **COMMON,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    fuses_linears=True,
    one_projection=True,
    has_plain_plan=False,
)
