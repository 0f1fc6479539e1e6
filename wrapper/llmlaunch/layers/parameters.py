"""Exact parameter counts of a model shape, of its layers and of what is outside them.

The same sums as `sum(p.numel() for p in model.parameters())` of the published models: no padding, nothing split.
Linear layers and norms as in transformers 5.23 (models/<family>) and Megatron core 0.19 (core/transformer); checked in
the tests against the published totals and against the modules themselves.
"""

from __future__ import annotations

from functools import lru_cache

from llmlaunch.frozen import frozen
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.model import Model, model_of, stream_contraction
from llmlaunch.models.shape import ModelShape


@frozen
class LayerParameters:
    """The parameters of one layer, of all its routed experts, and of those that one token goes through. A bias that
    balances the experts is a buffer and no parameter (modeling_deepseek_v3.py; core/transformer/moe/router.py, core
    0.19)."""

    total: int
    experts: int
    active_experts: int

    @property
    def active(self) -> int:
        return self.total - self.experts + self.active_experts


@frozen
class ModelParameters:
    """A whole model. `head` is 0 where it is tied to the embedding; `mtp` is 0 without multi-token prediction. What
    brings residual streams together is part of `final_norm`. `vision` is 0 without an encoder."""

    layers: tuple[LayerParameters, ...]
    embedding: int
    positions: int
    final_norm: int
    head: int
    mtp: int
    vision: int = 0

    @property
    def outside_layers(self) -> int:
        return self.embedding + self.positions + self.final_norm + self.head + self.mtp + self.vision

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.outside_layers

    @property
    def active(self) -> int:
        """Parameters one token uses: `topk` of the routed experts, everything else in full."""
        return sum(layer.active for layer in self.layers) + self.outside_layers


@lru_cache(maxsize=256)
def count_parameters(shape: ModelShape) -> ModelParameters:
    """Return the parameter counts of `shape` with its own vocabulary, unpadded."""
    model, norm = model_of(shape), int(shape.norm_parameters)
    kinds = [_layer(layer) for layer in model.kinds]
    vocabulary = shape.vocab_size * shape.hidden_size
    learned = shape.position_embedding == "learned_absolute"
    return ModelParameters(
        layers=tuple(kinds[kind] for kind in model.order),
        embedding=vocabulary,
        positions=shape.max_position_embeddings * shape.hidden_size if learned else 0,
        final_norm=norm + stream_contraction(shape),
        head=0 if shape.tied_embeddings else vocabulary,
        mtp=shape.mtp_modules * _prediction_module(shape, model, norm),
        vision=0 if shape.vision is None else _encoder(shape),
    )


def _encoder(shape: ModelShape) -> int:
    from llmlaunch.layers.encoder import encoder_of

    encoder = encoder_of(shape)
    return 0 if encoder is None else int(encoder.total_parameters)


def _layer(layer: Layer) -> LayerParameters:
    experts = [matrix for matrix in layer.matrices if matrix.of_experts]
    return LayerParameters(
        total=int(layer.total_parameters),
        experts=int(sum(matrix.total_parameters for matrix in experts)),
        active_experts=int(sum(matrix.topk * (matrix.elements + matrix.biases) for matrix in experts)),
    )


def _prediction_module(shape: ModelShape, model: Model, norm: int) -> int:
    """Return the parameters of one multi-token-prediction module: two norms, a projection of 2h to h, its layers, and a
    final norm (Megatron core 0.19, core/transformer/multi_token_prediction.py); embedding and head are shared."""
    layers = int(sum(model.kinds[kind].total_parameters for kind in model.predicts))
    return layers + 3 * norm + 2 * shape.hidden_size**2 + stream_contraction(shape)
