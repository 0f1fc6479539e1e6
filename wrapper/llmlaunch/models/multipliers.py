"""Constants that tensors of a model are multiplied by, so that what is found on a narrow model holds for a wide one
(maximal update parametrization: Yang et al. 2022; Granite and Falcon-H1)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmlaunch.documents.keys import key, section

__all__ = ["Multipliers"]

Constant = Annotated[float, Field(gt=0, le=1e6)]


@section
class Multipliers:
    """Constants that tensors are multiplied by. A class multiplies by 1, too: a constant that is absent is a product
    that is not there."""

    embedding: Constant | None = key("What the embedding puts out", default=None)
    logits: Constant | None = key("Logits", default=None)
    residual: Constant | None = key("What attention and the MLP add to the residual stream (Granite)", default=None)
    keys: Constant | None = key("Keys, before they are turned", default=None)
    attention_input: Constant | None = key("What attention reads of the norm before it", default=None)
    attention_output: Constant | None = key("What attention adds to the residual stream", default=None)
    mamba_input: Constant | None = key("What a Mamba-2 mixer reads of the norm before it", default=None)
    mamba_parts: tuple[float, ...] | None = key(
        "The parts of its first projection: the gate, what is mixed, how states are written and read, and steps",
        default=None,
        written=tuple[Constant, ...] | None,
        min_length=5,
        max_length=5,
    )
    mamba_output: Constant | None = key("What a Mamba-2 mixer adds to the residual stream", default=None)
    gate: Constant | None = key("The gate of the MLP, before its activation", default=None)
    mlp_output: Constant | None = key("What the MLP adds to the residual stream", default=None)
