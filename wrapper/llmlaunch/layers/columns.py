"""What a block of a layer may look at: sizes of splits as floats, the facts of the framework, the techniques."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.facts import MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.techniques import Techniques

Size = float | FloatColumn

# what one layer of a split depends on, of the split: a layer sees no pipeline and no data size
SPLIT_FIELDS_OF_A_LAYER = ("tensor", "context", "expert", "expert_tensor", "micro_batch_size", "sequence_parallel")
DEFAULT_MODULES = ("core_attn",)  # of selective recompute


@frozen
class LayerColumns:
    """One row for each split of `layouts`, on one device and for one micro-batch."""

    facts: MemoryFacts
    techniques: Techniques
    sequence_length: int
    layouts: LayoutColumns
    mlp_pieces: float = 1.0  # of the sequence, which MLPs compute one after the other
    pieces_again: bool = False  # a piece is computed again for its backward pass, and of an MLP its input alone is kept
    kept_rows: float = 1.0  # the share of the rows of its input that a linear layer keeps
    whole: LayerColumns | None = None  # those of the same splits whatever is recomputed: the sizes below are theirs

    def __len__(self) -> int:
        return len(self.layouts)

    @cached_property
    def tensor(self) -> FloatColumn:
        """The tensor-parallel size."""
        return self.layouts.tensor.astype(np.float64) if self.whole is None else self.whole.tensor

    @cached_property
    def expert(self) -> FloatColumn:
        """The expert-parallel size."""
        return self.layouts.expert.astype(np.float64) if self.whole is None else self.whole.expert

    @cached_property
    def expert_tensor(self) -> FloatColumn:
        """The expert-tensor-parallel size."""
        if self.whole is not None:
            return self.whole.expert_tensor
        return self.layouts.expert_tensor.astype(np.float64)

    @cached_property
    def tokens(self) -> FloatColumn:
        """Tokens of one micro-batch on one context-parallel rank."""
        if self.whole is not None:
            return self.whole.tokens
        return self.sequence_length * self.layouts.micro_batch_size / self.layouts.context

    @cached_property
    def per_tensor(self) -> FloatColumn:
        """1 / the tensor-parallel size."""
        return 1.0 / self.tensor if self.whole is None else self.whole.per_tensor

    @cached_property
    def share(self) -> FloatColumn:
        """The part of the tokens that one tensor-parallel rank has, as matrices or the sequence are divided."""
        return self.tokens * self.per_tensor if self.whole is None else self.whole.share

    @cached_property
    def sequence_split(self) -> FloatColumn:
        """Divisor of norms, residuals and dropout: the tensor-parallel size with sequence parallelism, else 1."""
        if self.whole is not None:
            return self.whole.sequence_split
        return np.where(self.layouts.sequence_parallel > 0, self.tensor, 1.0)

    @cached_property
    def stream_tokens(self) -> FloatColumn:
        """Tokens of the residual stream on one device."""
        return self.tokens / self.sequence_split if self.whole is None else self.whole.stream_tokens

    def zeros(self) -> FloatColumn:
        """Return a column of zeros."""
        return np.zeros(len(self))

    def recomputes(self, module: str) -> bool | BoolColumn:
        """Whether selective recompute takes `module`: of all layouts alike, or a column where they differ in it."""
        layouts = self.layouts
        if layouts.modules is None:
            return module in (self.techniques.recompute_modules or DEFAULT_MODULES)
        return self._in_sets([module in (modules.recompute or DEFAULT_MODULES) for modules in layouts.module_sets])

    def offloads(self, module: str) -> bool | BoolColumn:
        """Whether the activations of `module` wait in host memory: of all layouts alike, or a column where they
        differ."""
        layouts = self.layouts
        if layouts.modules is None:
            return module in self.techniques.offload_modules
        return self._in_sets([module in modules.offload for modules in layouts.module_sets])

    def _in_sets(self, holds: list[bool]) -> bool | BoolColumn:
        if all(holds) or not any(holds):
            return holds[0]
        assert self.layouts.modules is not None
        column: BoolColumn = np.array(holds)[self.layouts.modules]
        return column
