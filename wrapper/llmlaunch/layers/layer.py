"""Branches and layers: how blocks are put together.

A layer is a tuple of residual branches. A branch is a norm, one block or several side by side that read its output,
perhaps a norm behind them, and the residual sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, reduce
from typing import TYPE_CHECKING, TypeVar

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import FP32_BYTES, Block, Parameters, Saved
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import Matrix

if TYPE_CHECKING:
    from llmlaunch.layers.mixture import Mixture
    from llmlaunch.layers.modules import Module, ModuleStyle


BlockKind = TypeVar("BlockKind", bound=Block)


@frozen
class Branch:
    """One residual branch: the norm before it, the blocks, perhaps a norm behind them. `norm_parameters` are those of
    one norm as wide as the residual stream. `mixing_parameters` mix several `streams` before and behind the blocks."""

    hidden: int
    blocks: tuple[Block, ...]
    norm_parameters: float
    post_norm: bool = False
    dropout: bool = False
    streams: int = 1
    mixing_parameters: float = 0.0

    @property
    def role(self) -> str:
        """What the names of its norms' tensors begin with."""
        return self.blocks[0].role

    @cached_property
    def norms(self) -> int:
        """Norms as wide as the residual stream."""
        return 2 if self.post_norm else 1

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of all its blocks."""
        return tuple(matrix for block in self.blocks for matrix in block.matrices)

    @cached_property
    def total_parameters(self) -> float:
        """Parameters of the whole branch."""
        own = self.norms * self.norm_parameters + self.mixing_parameters
        return own + sum(block.total_parameters for block in self.blocks)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the modules of norms and blocks, in the order in which they run forward."""
        from llmlaunch.layers.modules import Module

        before = Module((int(self.norm_parameters + self.mixing_parameters),))
        behind = [Module((int(self.norm_parameters),))] if self.post_norm else []
        return [before, *(module for block in self.blocks for module in block.modules(style)), *behind]

    @property
    def stream_width(self) -> int:
        """Columns of all residual streams together."""
        return self.streams * self.hidden

    def parameters(self, c: LayerColumns) -> Parameters:
        """Return the parameters on a device, those of norms and of the mixing of streams among them."""
        own = Parameters(self.norms * self.norm_parameters + self.mixing_parameters)
        return reduce(Parameters.__add__, (block.parameters(c) for block in self.blocks), own)

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """Return the tensors of norms, of the mixing of streams and of all blocks."""
        tensors = self._norm_tensors(c)
        if self.streams > 1:
            tensors[f"{self.role}_streams"] = Saved(self._mixed_bytes(c))
        for block in self.blocks:
            tensors |= block.saved(c)
        return tensors

    def _norm_tensors(self, c: LayerColumns) -> dict[str, Saved]:
        """A norm keeps its input and statistics, the linear after it the output; dropout before the norm keeps a
        mask. A block that multiplies the output by a constant keeps the product: nothing keeps what a constant
        multiplies. What a norm behind the blocks puts out is only added (Gemma 2)."""
        facts, role = c.facts, self.role

        def tags(name: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys(each for block in self.blocks for each in getattr(block, name)))

        mask = float(self.hidden) if self.dropout else 0.0
        per_token = (facts.residual_bytes + facts.layer.norm_extra_bytes) * self.hidden + FP32_BYTES
        tensors = {
            f"{role}_norm_input": Saved(c.stream_tokens * (per_token + mask), moved_by=tags("norm_moved_by")),
            f"{role}_norm_output": Saved(
                self.inputs * self.norm_output(c),
                freed_by=tags("norm_freed_by"),
                moved_by=tags("norm_output_moved_by"),
                read_by=tags("norm_read_by"),
            ),
        }
        if self.post_norm:
            tensors[f"{role}_post_norm_input"] = Saved(c.stream_tokens * per_token)
        return tensors

    @property
    def inputs(self) -> int:
        """Tensors that its blocks read: the norm's output, and one of each block that multiplies it by a constant."""
        multiplied = sum(block.scaled_input for block in self.blocks)
        return multiplied + (multiplied < len(self.blocks))

    def norm_output(self, c: LayerColumns) -> FloatColumn:
        """Return the bytes of what the norm puts out, as linear layers keep it."""
        tokens = c.tokens if c.facts.foreign.gathered_inputs_kept else c.stream_tokens
        return tokens * c.facts.layer.linear_input_bytes * self.hidden

    def _mixed_bytes(self, c: LayerColumns) -> FloatColumn:
        """The mixing of residual streams around one block saves all of them, what the block puts out, and the weights
        of the mixing. Unfused, the projection that makes those reads a copy in fp32 (core/transformer/
        hyper_connection.py, Megatron-LM d48bd6be)."""
        e = c.facts.layer.activation_bytes
        weights = (FP32_BYTES + e) * self.streams * (self.streams + 2) + FP32_BYTES * self.streams**2
        return c.tokens * ((e + c.facts.layer.stream_copy_bytes) * self.stream_width + e * self.hidden + weights)

    def mixing_backward(self, c: LayerColumns) -> Size:
        """Return the gradients of all streams that are summed behind a block: of the residual, of what went into the
        block and of the weights; the first of them is counted as the stream's own."""
        return 3.0 * c.facts.layer.activation_bytes * c.tokens * self.stream_width if self.streams > 1 else 0.0


@frozen
class Layer:
    """One layer of a model."""

    branches: tuple[Branch, ...]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all branches, in order."""
        return tuple(block for branch in self.branches for block in branch.blocks)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of all blocks, in order."""
        return tuple(matrix for block in self.blocks for matrix in block.matrices)

    @cached_property
    def total_parameters(self) -> float:
        """Parameters of the whole layer."""
        return sum(branch.total_parameters for branch in self.branches)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the layer's module and those inside it."""
        from llmlaunch.layers.modules import container

        return container((module for branch in self.branches for module in branch.modules(style)), layer=True)

    @cached_property
    def is_mixture(self) -> bool:
        """Whether some of its matrices are those of experts."""
        return any(matrix.of_experts for matrix in self.matrices)

    @cached_property
    def mixture(self) -> Mixture | None:
        """The mixture of experts among its blocks; None without one."""
        if not self.is_mixture:
            return None
        from llmlaunch.layers.mixture import Mixture

        return next(self.blocks_of(Mixture))

    def parameters(self, c: LayerColumns) -> Parameters:
        """Return the parameters on a device."""
        return reduce(Parameters.__add__, (branch.parameters(c) for branch in self.branches))

    @cached_property
    def token_elements(self) -> float:
        """The weights of linear layers that a token passes through."""
        return sum(block.token_elements for block in self.blocks)

    def attended_elements(self, sequence_length: int) -> float:
        """Return the elements of keys and values that a token's heads are multiplied with."""
        return sum(block.attended_elements(sequence_length) for block in self.blocks)

    @cached_property
    def recurrent_flops(self) -> float:
        """A token's operations forward in convolutions and recurrences."""
        return sum(block.recurrent_flops for block in self.blocks)

    def blocks_of(self, kind: type[BlockKind]) -> Iterator[BlockKind]:
        """Yield the blocks of one kind."""
        return (block for block in self.blocks if isinstance(block, kind))
