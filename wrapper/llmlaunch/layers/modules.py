"""The modules of a Hugging Face model, as the hooks of ZeRO 3 see them: what has parameters of its own, or runs.

Transformers keeps queries, keys and values, and gate and up, as linears of their own, all experts of a layer as two
tensors of one module (models/<family>/modeling_<family>.py, 5.23).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from llmlaunch.frozen import frozen
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Vector
from llmlaunch.techniques.requests import Adapters


@frozen
class Module:
    """A module as hooks see it: the elements of its own parameters on one device, and how many of the modules behind it
    are inside it. `layer` marks one that full recompute runs again as a whole, `shares_table` the head that is tied to
    the embedding, whose table is counted there, `frozen_table` the embedding that no backward pass reads, and `leaf` a
    mixture that stands for all that is inside it."""

    parameters: tuple[int, ...] = ()
    inside: int = 0
    layer: bool = False
    shares_table: bool = False
    frozen_table: bool = False
    leaf: bool = False


NO_PARAMETERS = Module()  # an activation, or rotary positions


@frozen
class ModuleSplit:
    """How many devices share linears, experts and the inside of an expert; `table_whole` leaves the embedding whole."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    table_whole: bool = True


@frozen
class ModuleStyle:
    """How the classes of a family are made, on devices that `split` them: `fused` ones keep one linear for queries,
    keys and values, and one for gate and up; `leaf_mixtures` are gathered as one module each."""

    split: ModuleSplit = ModuleSplit()
    adapters: Adapters | None = None
    fused: bool = False
    leaf_mixtures: bool = False


def container(modules: Iterable[Module], layer: bool = False) -> list[Module]:
    """Return a module with others inside it, these behind it."""
    inside = list(modules)
    return [Module(inside=len(inside), layer=layer), *inside]


def linear_modules(matrix: Matrix, style: ModuleStyle) -> list[list[Module]]:
    """Return the linear layers of one matrix, each with its adapter behind it."""
    inputs, widths = _inputs(matrix, style.split.tensor), _widths(matrix, style.split.tensor)
    if style.fused:
        widths = {matrix.parts[-1].name: sum(widths.values())}
    return [
        [
            Module((inputs * width, *((width,) if matrix.bias else ()))),
            *adapter_modules(name, inputs, width, style.adapters),
        ]
        for name, width in widths.items()
    ]


def vector_modules(vectors: Sequence[Vector], style: ModuleStyle) -> list[Module]:
    """Return a module for each of the vectors."""
    return [Module((int(vector.on_ranks(style.split.tensor)),)) for vector in vectors]


def expert_modules(matrices: Sequence[Matrix], style: ModuleStyle) -> Iterator[Module]:
    """Yield all experts of a device as one module, and their adapters behind it."""
    ranks, weights, biases, beside = style.split.expert_tensor, list[int](), list[int](), list[Module]()
    for matrix in matrices:
        here, inputs, widths = matrix.count // style.split.expert, _inputs(matrix, ranks), _widths(matrix, ranks)
        weights.append(here * inputs * sum(widths.values()))
        if matrix.bias:
            biases.append(here * sum(widths.values()))
        for name, width in widths.items():
            beside.extend(adapter_modules(name, here * inputs, here * width, style.adapters))
    yield Module((*weights, *biases))
    yield from beside


def adapter_modules(name: str, inputs: int, outputs: int, adapters: Adapters | None) -> Iterator[Module]:
    """Yield both matrices of the adapter beside a linear layer, where it has one."""
    if adapters is not None and name in adapters.targets:
        yield Module((adapters.rank * inputs,))
        yield Module((adapters.rank * outputs,))


def _inputs(matrix: Matrix, ranks: int) -> int:
    """Return the rows of a matrix on one of so many devices."""
    return int(matrix.inputs) // (ranks if matrix.divided == INPUTS else 1)


def _widths(matrix: Matrix, ranks: int) -> dict[str, int]:
    """Return the columns of each part of a matrix on one of so many devices."""
    split = ranks if matrix.divided == OUTPUTS else 1
    return {part.name: int(part.on_device(split)) for part in matrix.parts}


def mlp_modules(matrices: Sequence[Matrix], style: ModuleStyle) -> list[Module]:
    """Return the modules of an MLP: the activation function runs behind the gate, or behind up where there is none."""
    first, second = (linear_modules(matrix, style) for matrix in matrices)
    activated, *others = first
    return container([*activated, NO_PARAMETERS, *chain.from_iterable(others), *chain.from_iterable(second)])
