"""Models whose layers have one part each: a Mamba-2 mixer, attention, an MLP or a mixture of experts (Nemotron-H and
Nemotron 3; megatron/core/models/hybrid, core 0.19)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.validate import BadKey
from llmlaunch.rundir.values import counted

__all__ = ["BESIDE_ATTENTION", "BUILT_BY_CORE", "CONV_KERNEL", "PARTS", "SCAN_CHUNK", "Mamba", "check_mamba"]

# the letters of Megatron's --hybrid-layer-pattern and of nemotron_h's hybrid_override_pattern
PARTS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "mixture"}
BESIDE_ATTENTION = "H"  # a layer of a mixer beside attention, and an MLP behind both

# tokens that the convolution spans, and those of a chunk of the scan (megatron/core/ssm/mamba_mixer.py, core 0.19)
CONV_KERNEL, SCAN_CHUNK = 4, 128
# Megatron core builds no other mixer. Digests and records name what differs from it.
BUILT_BY_CORE: Mapping[str, object] = {
    "convolution_kernel": CONV_KERNEL,
    "convolution_bias": True,
    "chunk": SCAN_CHUNK,
    "gated_norm": True,
}

Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=1, le=2**16)]


@section
class Mamba:
    """Layers that are a Mamba-2 mixer (Dao and Gu 2024) among layers that are attention, an MLP or a mixture of experts
    each by itself; or layers with a mixer beside attention."""

    pattern: str = key(
        "The layers in their order: M a Mamba-2 mixer, * attention, - an MLP, E a mixture of experts; or H for each, a "
        "mixer beside attention and an MLP behind both (Falcon-H1)",
        pattern=r"^([M*E-]+|H+)$",
        max_length=10_000,
    )
    num_heads: Count = key("Heads of a Mamba-2 mixer", default=128)
    head_dim: Size = key("Width of one of its heads", default=64)
    state_size: Size = key("Size of the state of each column of a head", default=128)
    groups: Count = key("Groups of heads that read and write their states alike", default=8)
    convolution_kernel: int = key("Tokens that the convolution spans", default=CONV_KERNEL, ge=2, le=64)
    convolution_bias: bool = key("The convolution has a bias", default=True)
    chunk: int = key("Tokens of a chunk of the scan", default=SCAN_CHUNK, ge=1, le=2**16)
    gated_norm: bool = key("A norm behind the gate of what the scan puts out", default=True)
    mtp_pattern: str | None = key(
        "The layers of a multi-token-prediction module, of which mtp_num_layers says the number",
        default=None,
        pattern=r"^[M*E-]+$",
        max_length=100,
    )


def check_mamba(mamba: Mamba, layers: int, mixtures: Sequence[int] | None, mtp_num_layers: int) -> None:
    """Raise `BadKey` for what does not agree with the rest of the model: its layers, those of them that are `mixtures`
    (None of a dense model) and its modules for multi-token prediction."""
    letters = len(mamba.pattern)
    if letters != layers:
        raise BadKey(
            ("mamba", "pattern"),
            f"has {counted(letters, 'letter')} for {counted(layers, 'layer')}; give one per layer",
        )
    if "M" not in mamba.pattern and BESIDE_ATTENTION not in mamba.pattern:
        raise BadKey(("mamba", "pattern"), "has no Mamba-2 mixer (M); remove the section")
    if mamba.num_heads % mamba.groups:
        raise BadKey(("mamba", "groups"), f"must divide the {mamba.num_heads} heads, not be {mamba.groups}")
    written = [int(letter == "E") for letter in mamba.pattern]
    if mixtures is None and (any(written) or "E" in (mamba.mtp_pattern or "")):
        raise BadKey(("mamba", "pattern"), "has mixtures (E), and the model has no moe; give it, or write -")
    if mixtures is not None and list(mixtures) != written:
        raise BadKey(("moe", "layer_pattern"), "says other layers than the letters E of mamba.pattern; leave it out")
    if mtp_num_layers and mamba.mtp_pattern is None:
        raise BadKey(("mamba", "mtp_pattern"), "is missing for mtp_num_layers; give the layers of a module")
