"""What a block computes and moves in one pass beside the matrices of its linear layers."""

from __future__ import annotations

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import LayerColumns, Size

RECURRENCE_BACKWARD = 3.0  # each product has two gradients, and is computed again for them


@frozen
class Amounts:
    """Amounts of one pass for each of so many `rows`, matrices of linear layers and collectives aside. Operations: of
    softmax attention (`attention`), of other kernels that are as fast as its forward pass (`recurrence`), and of
    products in the compute format (`wide`) and in that of linear layers (`linear`). `bytes` move through memory element
    by element, and `permuted_bytes` row by row. Beside the rows, `tail` are the elements of keys and values that the
    last block of queries to finish is multiplied with, which is waited for."""

    rows: FloatColumn
    attention: Size = 0.0
    recurrence: Size = 0.0
    wide: Size = 0.0
    linear: Size = 0.0
    bytes: Size = 0.0
    permuted_bytes: Size = 0.0
    tail: FloatColumn | None = None


BlockWork = tuple[Amounts, Amounts]  # forward and backward


@frozen
class ContextTraffic:
    """Columns that a token sends over context parallelism. Where heads are exchanged for sequence, `exchanged` of all
    tensor ranks together; around a ring, keys of `ring` columns on a device, and as many of values. Partial results of
    `corrected` columns are put together. A block without `ring` exchanges heads in every framework."""

    exchanged: float
    ring: FloatColumn | None = None
    corrected: float = 0.0


def causal_mean(most: int, sequence_length: int) -> float:
    """Return the mean over tokens of how many tokens up to itself each sees, of which the last `most` count: in a
    sequence of s that is most - most^2 / 2s (Beltagy et al. 2020, section 3.1: a window's cost is linear in the
    sequence)."""
    seen = float(min(most, sequence_length))
    return seen - seen * seen / (2.0 * sequence_length)


def recurrence(c: LayerColumns, operations: float, elements: float) -> BlockWork:
    """Return the work of a recurrence of which a token takes so many operations forward, and moves so many elements."""
    moved, again = c.facts.layer.activation_bytes * elements, RECURRENCE_BACKWARD
    backward = Amounts(c.share, recurrence=again * operations, bytes=again * moved)
    return Amounts(c.share, recurrence=operations, bytes=moved), backward
