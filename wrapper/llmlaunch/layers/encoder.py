"""A vision encoder before the decoder (`models.sections.Vision`): layers of the decoder's blocks, and projectors.

Megatron-Bridge splits the linears of layers and projectors, and leaves patch embedding, positions and norms whole
(modelling_qwen3_vl/vision_model.py and utils.py, Megatron-Bridge 0.6; get_vit_layer_with_transformer_engine_spec, core
0.19).
"""

from __future__ import annotations

from functools import cache, cached_property

from llmlaunch.frozen import frozen
from llmlaunch.layers.attention import Attention
from llmlaunch.layers.block import FP32_BYTES, Block
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Branch, Layer
from llmlaunch.layers.matrix import INPUTS, NEITHER, OUTPUTS, Matrix, Part, Vector
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.modules import (
    Module,
    ModuleSplit,
    ModuleStyle,
    container,
    linear_modules,
    mlp_modules,
    vector_modules,
)
from llmlaunch.models.sections import Vision
from llmlaunch.models.shape import ModelShape

NORM_VECTORS = 2  # of a LayerNorm


@frozen
class Projector(Block):
    """What makes one token of each square of patches: a LayerNorm of `normed` columns, and two linear layers with
    biases, from `width` columns to as many, and to the `hidden` ones of the decoder."""

    hidden: int
    width: int
    normed: int

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Both linear layers."""
        width = float(self.width)
        first = Matrix(width, (Part("", width),), OUTPUTS, bias=True)
        return first, Matrix(width, (Part("", float(self.hidden)),), INPUTS, bias=True)

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """The norm."""
        return (Vector(float(NORM_VECTORS * self.normed)),)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the norm, and both linear layers with the activation function between them."""
        return container([*vector_modules(self.vectors, style), *mlp_modules(self.matrices, style)[1:]])


@frozen
class PatchEmbedding(Block):
    """What makes columns of the `numbers` of a patch, and the learned `positions`."""

    hidden: int
    numbers: int
    positions: int

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """A convolution whose steps are as long as a patch."""
        return (Matrix(float(self.numbers), (Part("", float(self.hidden)),), NEITHER, bias=True),)

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """The positions."""
        return (Vector(float(self.positions * self.hidden)),)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the convolution and the table of positions."""
        return [*linear_modules(self.matrices[0], style)[0], *vector_modules(self.vectors, style)]


@frozen
class Encoder:
    """An encoder of the sizes of `vision` before a decoder that is `decoder_hidden` wide."""

    vision: Vision
    decoder_hidden: int

    @cached_property
    def embedding(self) -> PatchEmbedding:
        """What makes columns of patches."""
        vision = self.vision
        return PatchEmbedding(vision.hidden_size, vision.patch_width, vision.position_embeddings)

    @cached_property
    def layer(self) -> Layer:
        """One of the `depth` layers, which are alike: LayerNorms, attention of the patches of an image to each other,
        and an MLP, both with biases."""
        vision, h = self.vision, self.vision.hidden_size
        heads = vision.num_attention_heads
        attention = Attention(h, heads, heads, h // heads, bias=True, output_bias=True, norm_vectors=NORM_VECTORS)
        mlp = Mlp(h, vision.ffn_hidden_size, gated=False, bias=True)
        return Layer(tuple(Branch(h, (block,), float(NORM_VECTORS * h)) for block in (attention, mlp)))

    @cached_property
    def projectors(self) -> tuple[Projector, ...]:
        """The one behind the last layer, whose norm is as wide as a patch, and those of `deepstack`."""
        vision = self.vision
        widths = (vision.hidden_size, *(vision.merged_width for _ in vision.deepstack))
        return tuple(Projector(self.decoder_hidden, vision.merged_width, width) for width in widths)

    @cached_property
    def total_parameters(self) -> float:
        """Parameters of the whole encoder and its projectors."""
        layers = self.vision.depth * self.layer.total_parameters
        return self.embedding.total_parameters + layers + sum(each.total_parameters for each in self.projectors)

    def parameters(self, c: LayerColumns, trained: bool = False) -> Size:
        """Return the parameters on a device, all of them or those that are trained."""
        projectors = sum(each.parameters(c).dense for each in self.projectors)
        if trained and self.vision.frozen:
            return projectors
        layers = self.vision.depth * self.layer.parameters(c).dense
        return projectors + layers + self.embedding.parameters(c).dense

    def modules(self, split: ModuleSplit) -> list[Module]:
        """Return the modules of Qwen3-VL's encoder, which has one linear for queries, keys and values
        (transformers/models/qwen3_vl/modeling_qwen3_vl.py Qwen3VLVisionModel, 5.23)."""
        style = ModuleStyle(split, fused=True)
        layers = self.layer.modules(style) * self.vision.depth
        projectors = (module for each in self.projectors for module in each.modules(style))
        return [*self.embedding.modules(style), *layers, *projectors]

    def distinct_elements(self, c: LayerColumns) -> Size:
        """Return the elements of trained matrices on a device whose shapes differ, each once, the embedding aside."""
        every = (*self.projectors[0].matrices, *(() if self.vision.frozen else self.layer.matrices))
        distinct = {(matrix.inputs, matrix.outputs, matrix.divided): matrix for matrix in every}
        return sum(matrix.elements_on_device(c) for matrix in distinct.values())

    def saved_by_layer(self, c: LayerColumns) -> Size:
        """Return the bytes that one layer saves for each patch: inputs, statistics and outputs of two norms, queries,
        keys, values and what attention puts out, the softmax's statistics, what goes into the activation and comes out
        of it. Beside images rotary positions are no fused kernel, and a backend may make cosines and sines in every
        layer. Attention that is not fused keeps probabilities of all patches of an image, in the softmax's own type
        besides where that is wider."""
        vision, facts, e, h = self.vision, c.facts.attention, c.facts.layer.activation_bytes, self.vision.hidden_size
        norms = 2.0 * (2.0 * e * h + 2.0 * FP32_BYTES)
        attention = facts.encoder_attention_widths * e * h + FP32_BYTES * vision.num_attention_heads
        turns = FP32_BYTES * facts.turns_by_layer * (h / vision.num_attention_heads)
        if facts.attention_scores_saved:
            wider = 0.0 if facts.softmax_bytes in (None, e) else facts.softmax_bytes
            attention += (e + (wider or 0.0)) * self.scores
        return norms + turns + (attention + 2.0 * e * vision.ffn_hidden_size) / c.tensor

    @property
    def scores(self) -> float:
        """The scores of one patch in one layer."""
        return float(self.vision.num_attention_heads * self.vision.patches_per_image)


@cache
def encoder_of(shape: ModelShape) -> Encoder | None:
    """Return the vision encoder of a shape."""
    return None if shape.vision is None else Encoder(shape.vision, shape.hidden_size)
