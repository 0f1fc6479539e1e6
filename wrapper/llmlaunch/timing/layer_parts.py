"""The parts of a decoder layer's seconds, before techniques repeat, hide or add some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.layer import Layer
from llmlaunch.timing.exchange import TensorPasses
from llmlaunch.timing.products import Rates, SplitColumns, Work

if TYPE_CHECKING:
    from llmlaunch.layers.mixture import Mixture


@frozen
class Mlps:
    """The parts of a layer's MLPs or mixture: the products of the MLPs, or of a shared expert and of latents, for every
    token; kernels (forward, backward) of all of the layer; and of a mixture its experts' products."""

    every_token: Rates
    kernels: tuple[float | FloatColumn, float | FloatColumn]
    mixture: Mixture | None = None
    experts: Work | None = None


@frozen
class LayerParts:
    """The parts of a layer before anything is recomputed: products, softmax attention, that with recurrences
    (`scores`), element-wise operations, and of these, forward, activation functions and norms; then exchanges, None
    where no layout has any. Nothing hides that of the experts' tokens."""

    layer: Layer
    linears: Work
    softmax: Work
    scores: Work
    element_wise: Work
    activation: FloatColumn
    norms: FloatColumn
    mlp: Mlps
    tensor: TensorPasses
    context: Work | None
    expert: Work | None

    @property
    def computed(self) -> Work:
        """All that the device computes."""
        return self.linears + self.scores + self.element_wise

    def products_of_every_token(self, at: SplitColumns) -> Work:
        """Return the products of MLPs, or of a shared expert and of latents."""
        return self.mlp.every_token.work(at.tokens, at.share, at.per_tensor)


@frozen
class Repeated:
    """Seconds of forward work that is done again before the backward pass, and the kernels launched for it."""

    seconds: FloatColumn
    kernels: float | FloatColumn
