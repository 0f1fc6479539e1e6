"""Models whose layers have one part each: a Mamba-2 mixer, attention, an MLP or a mixture of experts (Nemotron-H and
Nemotron 3; megatron/core/models/hybrid, core 0.19)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.validate import BadKey
from llmlaunch.rundir.values import counted

if TYPE_CHECKING:
    from llmlaunch.models.shape import ModelShape

__all__ = ["PARTS", "Mamba", "check_mamba", "head_kinds", "layer_parts", "part_kinds"]

# the letters of Megatron's --hybrid-layer-pattern and of nemotron_h's hybrid_override_pattern
PARTS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "mixture"}

Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=1, le=2**16)]


@section
class Mamba:
    """Layers that are a Mamba-2 mixer (Dao and Gu 2024) among layers that are attention, an MLP or a mixture of experts
    each by itself."""

    pattern: str = key(
        "The layers in their order: M a Mamba-2 mixer, * attention, - an MLP, E a mixture of experts",
        pattern=r"^[M*E-]+$",
        max_length=10_000,
    )
    num_heads: Count = key("Heads of a Mamba-2 mixer", default=128)
    head_dim: Size = key("Width of one of its heads", default=64)
    state_size: Size = key("Size of the state of each column of a head", default=128)
    groups: Count = key("Groups of heads that read and write their states alike", default=8)
    mtp_pattern: str | None = key(
        "The layers of a multi-token-prediction module, of which mtp_num_layers says the number",
        default=None,
        pattern=r"^[M*E-]+$",
        max_length=100,
    )

    @property
    def inner_width(self) -> int:
        """Columns of all heads, and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def convolved_width(self) -> int:
        """Columns that the convolution runs over: all heads, and how each group writes and reads states."""
        return self.inner_width + 2 * self.groups * self.state_size

    @property
    def projected_width(self) -> int:
        """Columns of the first projection: the gate, what is convolved, and a step of each head."""
        return self.inner_width + self.convolved_width + self.num_heads


def layer_parts(shape: ModelShape) -> tuple[str, ...]:
    """Return what each layer has in the place of attention: attention itself, "linear" (a gated delta net) or "mamba";
    of a model whose layers have one part each also "mlp" and "mixture"."""
    if shape.mamba is not None:
        return tuple(PARTS[letter] for letter in shape.mamba.pattern)
    return tuple("linear" if linear else "attention" for linear in shape.linear_pattern)


def part_kinds(shape: ModelShape) -> tuple[str, ...]:
    """Return the different ones of `layer_parts` in the order they first appear, and those of modules for multi-token
    prediction, without "mixture", which is counted by itself."""
    modules = shape.mamba.mtp_pattern if shape.mamba is not None and shape.mtp_num_layers else None
    parts = (*layer_parts(shape), *(PARTS[letter] for letter in modules or ""))
    return tuple(dict.fromkeys(part for part in parts if part != "mixture"))


def head_kinds(shape: ModelShape) -> tuple[int, int]:
    """Return how many layers of a multi-token-prediction module are no mixtures and how many are: those of its own
    pattern, or one like the model's last (megatron/core/transformer/multi_token_prediction.py, core 0.19)."""
    if shape.mamba is not None:
        mixtures = (shape.mamba.mtp_pattern or "").count("E")
        return len(shape.mamba.mtp_pattern or "") - mixtures, mixtures
    mixture = int(shape.moe is not None and shape.moe.layer_pattern[-1])
    return 1 - mixture, mixture


def check_mamba(shape: ModelShape, mamba: Mamba) -> None:
    """Raise `BadKey` for what does not agree with the rest of the model."""
    layers = len(mamba.pattern)
    if layers != shape.num_layers:
        raise BadKey(
            ("mamba", "pattern"),
            f"has {counted(layers, 'letter')} for {counted(shape.num_layers, 'layer')}; give one per layer",
        )
    if "M" not in mamba.pattern:
        raise BadKey(("mamba", "pattern"), "has no Mamba-2 mixer (M); remove the section")
    if mamba.num_heads % mamba.groups:
        raise BadKey(("mamba", "groups"), f"must divide the {mamba.num_heads} heads, not be {mamba.groups}")
    mixtures = [int(letter == "E") for letter in mamba.pattern]
    if shape.moe is None and (any(mixtures) or "E" in (mamba.mtp_pattern or "")):
        raise BadKey(("mamba", "pattern"), "has mixtures (E), and the model has no moe; give it, or write -")
    if shape.moe is not None and list(shape.moe.layer_pattern) != mixtures:
        raise BadKey(("moe", "layer_pattern"), "says other layers than the letters E of mamba.pattern; leave it out")
    if shape.mtp_num_layers and mamba.mtp_pattern is None:
        raise BadKey(("mamba", "mtp_pattern"), "is missing for mtp_num_layers; give the layers of a module")
    for name in ("mla", "indexer", "linear_attention", "sliding_window"):
        if getattr(shape, name) is not None:
            raise BadKey((name,), "stands beside Mamba-2 mixers in no known model; remove one of the two")
    if shape.linear_bias or shape.qkv_bias:
        raise BadKey(("linear_bias",), "Mamba-2 mixers have no biases; set linear_bias and qkv_bias to false")
    if shape.post_norms or shape.norms_after_alone:
        raise BadKey(("post_norms",), "a layer of one part has the norm before it alone; remove it")
