"""What a search tries on the best layouts: kernels, exchanges, and what runs beside them."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import EXPERTS, SHARED_EXPERT, technique

GraphScope = Literal["full_iteration", "layer", "attn", "mlp", "moe_router", "moe_preprocess"]
FULL_ITERATION, WHOLE_LAYER = "full_iteration", "layer"


@section
class CudaGraphs:
    """Kernels are captured once and replayed as CUDA graphs. The scopes are those of Megatron core."""

    cuda_graphs: tuple[str, ...] = technique(
        "megatron-lm: what is captured once and replayed as CUDA graphs: the whole iteration, whole layers, or parts "
        "of each layer; [] = nothing, absent = searched",
        default=(),
        written=tuple[GraphScope, ...] | None,
        bit_equal="the same kernels, launched at once",
        effects=("cuda_graphs",),
        source="CUDA graphs (NVIDIA, 2019); Megatron core, cuda_graphs.py",
        saves="the host's launches of what is captured",
        costs="memory of graphs, which nothing else can use, for every micro-batch in flight",
    )


@section
class ContextExchange:
    """How context parallelism exchanges: keys and values in a ring, or heads by all-to-all. None leaves the choice to
    the backend."""

    context_comm: str | None = technique(
        "megatron-lm: keys and values travel in a ring, or heads by all-to-all; absent = searched",
        default=None,
        written=Literal["p2p", "a2a"] | None,
        rounding="a ring merges attention over parts of the sequence, an all-to-all computes it whole",
        matters=("context",),
        source="Ring Attention (Liu et al. 2023); DeepSpeed-Ulysses (Jacobs et al. 2023)",
        saves="nothing: a2a spares the steps of the ring",
        costs="a2a: the attention's output twice; heads must divide",
    )


@section
class TensorOverlap:
    """Gathers and scatters of tensor parallelism hide behind the products. Megatron's `--tp-comm-overlap`."""

    tp_comm_overlap: bool = technique(
        "megatron-lm: gathers and scatters of tensor parallelism run beside the products (user buffers); absent = "
        "searched",
        default=False,
        written=bool | None,
        rounding="the sums over tensor ranks are made piece by piece",
        matters=("tensor",),
        source="Transformer Engine, user buffers",
        saves="nothing: gathers and scatters hide behind the products",
        costs="buffers of ten layer inputs, three workspaces more",
    )


@section
class ExpertOverlap:
    """The exchange of one micro-batch hides behind the products of another one. Megatron's
    `--overlap-moe-expert-parallel-comm`."""

    overlap_expert_communication: bool = technique(
        "megatron-lm: tokens of one micro-batch travel to experts while another one computes; absent = searched",
        default=False,
        written=bool | None,
        bit_equal="the passes of two micro-batches take turns, gradients are added up in their order",
        effects=("expert_overlap",),
        source="DeepSeek-V3 (2024), DualPipe",
        saves="nothing: the exchange hides behind another micro-batch",
        costs="what about one more layer keeps; the exchange takes a share of the device; no full recompute",
    )


@section
class SharedExpertOverlap:
    """The shared expert computes while tokens travel to the others. It runs on a stream beside the exchange."""

    overlap_shared_expert: bool = technique(
        "megatron-lm: the shared expert computes while tokens travel to the others; absent = searched",
        default=False,
        written=bool | None,
        bit_equal="the same kernels, on a stream beside the others",
        matters=("expert", "expert_tensor"),
        needs=SHARED_EXPERT,
        elsewhere="where no token travels to its experts",
        effects=("shared_expert_overlap",),
        source="Megatron core, SharedExpertMLP",
        saves="nothing: time that is not estimated",
        costs="the shared expert and the exchange share the device",
    )


BETWEEN_EXPERTS = ("expert", "expert_tensor")
OTHER_ORDER = "the outputs of a token's experts are added up in another order"


@section
class TokenDispatch:
    """How tokens reach their experts: gathered, by all-to-all, or by a library. None leaves the choice to the
    backend."""

    token_dispatcher: str | None = technique(
        "How tokens reach their experts; absent = searched",
        default=None,
        written=Literal["alltoall", "allgather", "flex"] | None,
        rounding=OTHER_ORDER,
        matters=BETWEEN_EXPERTS,
        needs=EXPERTS,
        effects=("token_dispatch",),
        source="Pipeline-MoE (Chen et al. 2023)",
        saves="with allgather the buffers of the all-to-all",
        costs="every expert-parallel rank sees all tokens of its group",
    )
    flex_backend: str | None = technique(
        "megatron-lm: library that carries them with token_dispatcher: flex; absent = deepep",
        default=None,
        written=Literal["deepep", "hybridep"] | None,
        rounding=OTHER_ORDER,
        matters=BETWEEN_EXPERTS,
        belongs=("token_dispatcher", "flex"),
        source="DeepEP (DeepSeek-V3, 2024); HybridEP (NVIDIA)",
        saves="nothing that is estimated: a token crosses the network once, however many of its experts are there",
        costs="a library of its own on the nodes, and its buffers, which the estimate does not know",
    )


@section
class DelayedWeightGradients:
    """Weight gradients are computed in a pass of their own, after those of the activations. Megatron-LM has it in the
    schedule that overlaps the communication of experts."""

    delay_weight_gradients: bool = technique(
        "Weight gradients in a pass of their own; absent = searched",
        default=False,
        written=bool | None,
        bit_equal="the same products, later, added up in the same order of micro-batches",
        effects=("expert_overlap", "delayed_weight_gradients"),
        source="2BP (Rae et al. 2024)",
        saves="nothing: output gradients wait, the peak rises",
        costs="memory, for overlapped communication",
    )


@section
class MlpChunks:
    """An MLP computes pieces of the sequence one after the other. One piece is the whole sequence."""

    mlp_chunks: int = technique(
        "Pieces of the sequence the MLP computes one after the other; absent = searched",
        default=1,
        written=int | None,
        ge=1,
        le=2**20,
        rounding="an MLP's weight gradient is a sum over the chunks",
        effects=("mlp_chunks",),
        source="MsT (Luo et al. 2024), MLP",
        saves="an MLP's temporaries but one piece's; in DeepSpeed also all it saves but its input",
        costs="smaller matrices; in DeepSpeed the MLP's forward pass once more",
    )


@section
class Loss:
    """The kernel of the loss, and tiles of the sequence in which it is computed. None is torch's own loss."""

    loss: str | None = technique(
        "Kernel of the loss: unfused, fused, Transformer Engine's, fused with the head, in tiles; absent = searched",
        default=None,
        written=Literal["none", "native", "te", "fused_linear", "tiled"] | None,
        words={"none": None},
        rounding="another kernel adds the exponentials of a row up",
        effects=("loss_kernels",),
        source="MsT (Luo et al. 2024), LM head",
        saves="tiled: all logits but one piece's; native saves time alone",
        costs="tiled: one more pass of the head",
    )
    loss_tiles: int = technique(
        "Pieces of the sequence for loss: tiled; absent = 8",
        default=8,
        written=int | None,
        ge=2,
        le=2**20,
        belongs=("loss", "tiled"),
        rounding="the head's weight gradient is a sum over the tiles",
    )
