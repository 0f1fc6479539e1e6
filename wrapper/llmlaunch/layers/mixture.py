"""A mixture of experts in place of a layer's MLP: router, exchanges of tokens, experts, shared expert."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import FP32_BYTES, AdapterGroup, Behind, Block, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import NEITHER, Matrix, Part, fused_adapted
from llmlaunch.layers.mlp import mlp_backward, mlp_matrices, projected_bytes
from llmlaunch.layers.modules import Module, ModuleStyle, container, expert_modules, mlp_modules
from llmlaunch.layers.work import Amounts, BlockWork
from llmlaunch.layout import RECOMPUTE_SELECTIVE
from llmlaunch.models.shape import CLAMPED, SQUARED, ModelShape

FUSED_ROWS = 256.0  # of a tile of experts that are one kernel (moe_utils.py get_align_size_for_quantization)
TILE_ROWS = 128.0  # of a tile of a grouped product
# Elements that the biases of experts move for each of a routed token, forward and backward. The second bias is weighted
# by the router and added expert by expert: a product is written, read with the output and written, the experts put
# together; backward, the gradient times the weight and times the bias is written and summed, and put together
# (megatron/core/transformer/moe/experts.py TEGroupedMLP._apply_bias, core 0.19).
BIAS_ELEMENTS = (6.0, 8.0)
MOE, ACTIVATION, SHARED = ("moe",), ("moe", "moe_act"), ("moe", "shared_experts")


@frozen
class Mixture(Block):
    """Experts of `width` columns, of which a token goes to `topk`; tokens are projected to `latent` columns before,
    where that is not None. `all_scored`: scores of all experts are kept; `weighted_inputs`: they weigh what experts
    take in. `squared` and `clamped` name activation functions. The router chooses `group_topk` of the `groups` in which
    experts stand before it chooses experts; None: there is one group."""

    hidden: int
    experts: int
    topk: int
    width: int
    gated: bool = True
    squared: bool = False
    clamped: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    latent: int | None = None
    bias: bool = False
    all_scored: bool = False
    weighted_inputs: bool = False
    capacity_factor: float | None = None
    groups: int | None = None
    group_topk: int | None = None
    role = "mlp"
    norm_freed_by = ("layernorm",)
    norm_moved_by = ("mlp_norm",)
    norm_read_by = ("gate_proj", "up_proj")
    norm_always_read = True  # by the router
    repeated_modules = ("moe", "moe_act")

    @property
    def outer(self) -> int:
        """Columns that an expert takes in and puts out."""
        return self.hidden if self.latent is None else self.latent

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Router, the shared expert's gate, projections to and from latents, which are whole on every device
        (core/transformer/moe/moe_layer.py, core 0.19), experts and shared expert."""
        return (*self.routing_matrices, *self.latent_matrices, *self.expert_matrices, *self.shared_matrices)

    @cached_property
    def routing_matrices(self) -> tuple[Matrix, ...]:
        """The router, and the gate of the shared expert."""
        h = float(self.hidden)
        router = Matrix(h, (Part("", float(self.experts)),), NEITHER, bias=self.bias, linear=False, narrow=False)
        gate = Matrix(h, (Part("", 1.0),), NEITHER, linear=False, narrow=False)
        return (router, gate) if self.shared_gate else (router,)

    @cached_property
    def latent_matrices(self) -> tuple[Matrix, ...]:
        """Projections to and from what experts take in."""
        if self.latent is None:
            return ()
        h, latent = float(self.hidden), float(self.latent)
        return Matrix(h, (Part("", latent),), NEITHER), Matrix(latent, (Part("", h),), NEITHER)

    @cached_property
    def expert_matrices(self) -> tuple[Matrix, ...]:
        """Both matrices of all experts."""
        return mlp_matrices(self.outer, self.width, self.gated, self.bias, self.experts, True, self.topk)

    @cached_property
    def shared_matrices(self) -> tuple[Matrix, ...]:
        """Both matrices of the shared expert."""
        return mlp_matrices(self.hidden, self.shared_width, self.gated, self.bias) if self.shared_width else ()

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return router, experts and shared expert; one module where DeepSpeed gathers them together. The gate of the
        shared expert and projections to and from latents are counted with the router."""
        router = sum(matrix.total_parameters for matrix in (*self.routing_matrices, *self.latent_matrices))
        shared = mlp_modules(self.shared_matrices, style) if self.shared_width else []
        inside = [Module((int(router),)), *expert_modules(self.expert_matrices, style), *shared]
        if style.leaf_mixtures:
            return [Module(tuple(size for module in inside for size in module.parameters), leaf=True)]
        return container(inside)

    @property
    def activation_gates(self) -> float:
        """Gate and up, or up alone."""
        return 2.0 if self.gated else 1.0

    @property
    def collective_pairs(self) -> float:
        """Those of the shared expert: a mixture exchanges its tokens by itself."""
        return 1.0 if self.shared_width else 0.0

    @property
    def token_elements(self) -> float:
        """The weights that a token passes through: of experts with a capacity below one, those that take it."""
        taken = 1.0 if self.capacity_factor is None else min(self.capacity_factor, 1.0)
        experts = sum(matrix.elements * matrix.topk for matrix in self.products if matrix.of_experts)
        return taken * experts + sum(matrix.elements for matrix in self.products if not matrix.of_experts)

    def busiest_copies(self, c: LayerColumns) -> FloatColumn:
        """Return the copies of tokens that the busiest device's experts work on, those of all expert-tensor ranks
        together: every device's experts get, of all tokens of its expert group, as many copies as its own tokens are
        routed to, the busiest device `expert_imbalance` times that."""
        factor = c.facts.mixture.expert_imbalance
        if self.capacity_factor is not None:
            factor = min(factor, self.capacity_factor)
        return (factor * self.topk) * c.share * c.expert_tensor

    def experts_on_device(self, c: LayerColumns) -> FloatColumn:
        """Return the experts of which a device has a part, or all."""
        return self.experts / c.expert

    def expert_rows(self, c: LayerColumns) -> FloatColumn:
        """Return the rows of whole tiles that every expert's tokens fill."""
        tiles = TILE_ROWS * self.experts_on_device(c)
        return tiles * np.ceil(self.busiest_copies(c) / tiles)

    def activation_columns(self, c: LayerColumns) -> Size:
        """Return the elements between both matrices of experts and of the shared expert. Experts that one kernel
        multiplies have their activation function, and its cast to a narrower format, at the end of that kernel."""
        width = 0.0 if c.facts.mixture.experts_fused else self.width / c.expert_tensor
        return width * self.busiest_copies(c) + self.shared_width * c.share

    def memory_work(self, c: LayerColumns) -> BlockWork:
        """Tokens are permuted there and back, and after a plain exchange sorted by the device's experts and back."""
        copies = self.busiest_copies(c)
        passes: Size = 4.0
        if c.techniques.token_dispatcher not in ("flex", "allgather"):
            passes = np.where(self.experts > c.layouts.expert, 8.0, 4.0)
        e, biases = c.facts.layer.activation_bytes, float(self.bias and not c.facts.mixture.experts_fused)
        permuted = (e * self.outer) * passes
        forward, backward = (
            Amounts(copies, bytes=each * biases * e * self.hidden, permuted_bytes=permuted) for each in BIAS_ELEMENTS
        )
        return forward, backward

    def cast_elements(self, c: LayerColumns) -> tuple[Size, Size]:
        """Return what the matrices of every token take in and put out, and those of experts, where what is between
        these is cast by itself."""
        inputs, outputs = super().cast_elements(c)
        routed, etp = self.busiest_copies(c), c.expert_tensor
        between = 0.0 if c.facts.mixture.experts_fused else (self.width / etp) * routed
        return inputs + self.outer * routed + between, outputs + self.outer * routed + self.activation_gates * between

    def balanced_tokens(self, c: LayerColumns) -> FloatColumn:
        """Return topk times the tokens of a device: what its experts see of equally shared ones."""
        return c.tokens * self.topk / c.sequence_split

    def routed_tokens(self, c: LayerColumns) -> FloatColumn:
        """Return the tokens that the experts of one device see: topk of each when routing is balanced; with a capacity
        factor, experts are padded up to it and drop what exceeds it (megatron/core/transformer/moe/moe_utils.py, core
        0.19). A device's experts may have a fixed number of rows together, whole tiles of them (token_dispatcher.py
        _HybridEPManager.setup_metadata, core 0.19)."""
        routed = self.balanced_tokens(c)
        room = c.techniques.expert_rank_capacity_factor
        if room is not None:  # rows, most of them with tokens
            return np.ceil(np.floor(room * routed) / FUSED_ROWS) * FUSED_ROWS
        if self.capacity_factor is not None and self.capacity_factor > 0:
            return routed * self.capacity_factor
        return routed * c.facts.mixture.expert_imbalance

    def gathered_tokens(self, c: LayerColumns) -> FloatColumn:
        """Return the tokens that a device holds at once when the dispatcher gathers all tokens of the expert ranks
        instead of exchanging them (`--moe-token-dispatcher-type allgather`,
        megatron/core/transformer/moe/token_dispatcher.py, core 0.19)."""
        if c.techniques.token_dispatcher != "allgather":
            return c.zeros()
        ranks = c.layouts.expert * c.layouts.expert_tensor
        return np.where(ranks > 1, c.stream_tokens * ranks, 0.0)

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """A mixture routes topk copies of every token. Expert-tensor parallelism gathers the tokens of its group and
        splits the width: only the inputs grow. What comes back in latents is the input of the projection behind the
        experts, narrower where linears are. Where scores weigh what experts take in, their gradient reads what was not
        weighed yet."""
        facts, n, split, routed, outer = c.facts, c.tokens, c.sequence_split, self.routed_tokens(c), self.outer
        e, w, etp = facts.layer.activation_bytes, facts.layer.linear_input_bytes, c.layouts.expert_tensor
        width, shared = routed * self.width, n * self.shared_width / c.tensor
        first, second = ("gate_proj", "up_proj"), ("down_proj",)
        routing = (self._routing_bytes(c) + facts.mixture.router_input_bytes * self.hidden) / split
        tensors = {"moe_router": Saved(n * routing, MOE)}
        if self.latent is not None:
            tensors["moe_latents"] = Saved(n * w * outer / split, MOE)
        tensors["expert_fc1_input"] = Saved(routed * w * outer * etp, MOE, ("expert_fc1",), read_by=first)
        if self.weighted_inputs:
            tensors["expert_unweighted"] = Saved(routed * e * outer)
        columns = projected_bytes(c, self.gated) + self._scaled_bytes(c)
        tensors["expert_fc1_output"] = Saved(width * columns, MOE, ("moe_act",))
        tensors["expert_fc2_input"] = Saved(width * w, ACTIVATION, read_by=second)
        if self.clamped:
            tensors["expert_clamped"] = Saved(width * facts.layer.clamped_activation_bytes, ACTIVATION)
        tensors["moe_permuted_output"] = Saved(routed * self._combined_bytes(c) * outer * etp, MOE)
        tensors["shared_fc1_output"] = Saved(shared * projected_bytes(c, self.gated), SHARED)
        tensors["shared_fc2_input"] = Saved(shared * w, SHARED, read_by=second)
        if self.shared_gate:
            tensors["shared_expert_output"] = Saved(n * e * self.hidden / split)
        return tensors

    def _routing_bytes(self, c: LayerColumns) -> float:
        """Bytes per token of scores, probabilities and of the order experts take tokens in."""
        return (c.facts.mixture.router_bytes + c.facts.mixture.router_scores_bytes * self.all_scored) * self.experts

    def _scaled_bytes(self, c: LayerColumns) -> float:
        """Experts multiply their activation by the router's probability: fused for a gated one, else the unscaled
        activation is kept as well (megatron/core/transformer/mlp.py and moe/experts.py, core 0.12 to 0.19). A squared
        ReLU has a kernel of its own (fusions/fused_weighted_squared_relu.py)."""
        fused = (self.gated and c.facts.layer.gated_activation_fused) or self.squared
        return 0.0 if fused or c.facts.mixture.expert_output_weighted else c.facts.layer.activation_bytes

    def _combined_bytes(self, c: LayerColumns) -> float:
        """Bytes per (routed token x hidden element) of what experts put out, kept where it is weighed or combined."""
        mixture = c.facts.mixture
        return mixture.combine_bytes + (c.facts.layer.activation_bytes if mixture.expert_output_weighted else 0.0)

    def adapter_groups(self, c: LayerColumns) -> tuple[AdapterGroup, ...]:
        """Return the linear layers of the shared expert and those of experts."""
        routed = self.routed_tokens(c) * c.layouts.expert_tensor
        experts = AdapterGroup("expert_adapters", self.expert_matrices, routed, MOE, of_stream=False)
        if not self.shared_width:
            return (experts,)
        return AdapterGroup("shared_adapters", self.shared_matrices, c.tokens, SHARED), experts

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """The worst of the experts' steps and of an exchange, which holds the permuted copy, the exchanged one and the
        sorted one (traced); where tokens are gathered, the permuted copy and one of all of them."""
        e, routed = c.facts.layer.activation_bytes, self.routed_tokens(c)
        inputs = routed * self.outer * c.layouts.expert_tensor
        width = routed * self.width * (1.0 / c.mlp_pieces)
        matrices = [each.count_on_device(c) * each.elements_on_device(c) for each in self.expert_matrices]
        experts = mlp_backward(c, self.gated, width, inputs, matrices, self._activation_again(c))
        gathered = self.gathered_tokens(c)
        exchanged = e * self.outer * np.where(gathered > 0, routed + gathered, 3.0 * routed)
        return np.maximum(experts, exchanged)

    def _activation_again(self, c: LayerColumns) -> Size:
        """Return 1 where experts' activations are recomputed, which keeps them until the activation has run backward
        (megatron/core/tensor_parallel/random.py CheckpointWithoutOutput, core 0.19; traced)."""
        again = c.recomputes("moe_act")
        return np.where((c.layouts.recompute == RECOMPUTE_SELECTIVE) & again, 1.0, 0.0) if np.any(again) else 0.0

    def forward(self, c: LayerColumns) -> Size:
        """The tokens on their way to the experts and back, and what adapters add."""
        return np.asarray(np.maximum(self._exchanged(c), self._adapted(c)))

    def _exchanged(self, c: LayerColumns) -> Size:
        """Return the tokens on their way, which stay alive until all of that is done: permuted, exchanged, output by
        the experts, and sorted again where there are several; before that, where experts have biases, the output with
        its bias, expert by expert and put together; over expert-tensor ranks this rank's part of the sum, and where the
        router computes in fp32 a copy of all their tokens in that type. The shared expert's output comes on top, and
        what experts take in where they are frozen and nothing keeps it. DeepEP makes what it received, at most every
        routed copy, and permutes it, and both again behind the experts; HybridEP sends from and to its buffers
        (megatron/core/transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher, core 0.19; traced)."""
        facts, e, lay, techniques = c.facts, c.facts.layer.activation_bytes, c.layouts, c.techniques
        flex = techniques.token_dispatcher == "flex"
        if not facts.mixture.exchanges_held or techniques.token_dispatcher == "allgather":
            return 0.0
        routed, over = self.routed_tokens(c), (lay.expert_tensor > 1) & (not flex)
        gathered = routed * lay.expert_tensor
        output = 3.0 if self.bias else 1.0 + (self.experts > lay.expert)
        narrow = routed * (1.0 + (lay.expert > 1)) + gathered * output
        if flex:
            narrow = gathered * (2.0 if techniques.flex_backend == "hybridep" else 4.0)
        shared = c.tokens / c.sequence_split * (self.shared_width > 0)
        adapters = techniques.adapters
        narrow = narrow + gathered * (adapters is not None and "up_proj" not in adapters.targets)
        wide = FP32_BYTES * (gathered + routed) if self.experts >= facts.mixture.fp32_router_experts else e * routed
        return np.asarray(self.outer * (e * narrow + wide * over) + e * self.hidden * shared)

    def _adapted(self, c: LayerColumns) -> Size:
        """Return what the experts' linears add in the forward pass, as those of an MLP do; their tokens are there
        permuted and exchanged, too, and an activation that is computed again is still there (traced)."""
        adapters = c.techniques.adapters
        if adapters is None or not c.facts.adapters.adapters_fused:
            return 0.0
        names = {matrix.fused for matrix in fused_adapted(self.expert_matrices, adapters)}
        first, second = float("linear_fc1" in names), float("linear_fc2" in names)
        each = first * (2.0 * (2.0 if self.gated else 1.0) - second)
        again = self.width * self._activation_again(c)
        own = np.maximum(each * self.width, second * (3.0 * self.outer + again))
        there = np.where(own > 0, self.outer * (1.0 + (c.layouts.expert > 1)), 0.0)
        return np.asarray(c.facts.layer.activation_bytes * self.routed_tokens(c) * (own + there))


def mixture_of(shape: ModelShape) -> Mixture:
    """Return the mixture of experts of a model's layers."""
    moe = shape.moe
    assert moe is not None
    router = moe.router
    return Mixture(
        hidden=shape.hidden_size,
        experts=moe.num_experts,
        topk=moe.topk,
        width=moe.ffn_hidden_size,
        gated=shape.gated_mlp,
        squared=shape.activation == SQUARED,
        clamped=shape.activation == CLAMPED,
        shared_width=moe.shared_expert_ffn_hidden_size,
        shared_gate=moe.shared_expert_gate,
        latent=moe.latent_size,
        bias=shape.linear_bias,
        all_scored=router.score_function != "softmax" or not router.normalize_topk,
        weighted_inputs=router.weighted_inputs,
        capacity_factor=moe.capacity_factor,
        groups=router.groups,
        group_topk=router.group_topk,
    )
