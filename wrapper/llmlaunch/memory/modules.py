"""The modules of a whole Hugging Face model that have parameters of their own, in the order in which they run forward.

Those of layers are what their blocks say; a part that no known class computes is one tensor. The elements add up to
those of `memory.weights.rank_parameters` on one pipeline rank.
"""

from __future__ import annotations

from functools import lru_cache

from llmlaunch.families.registry import family_named
from llmlaunch.layers.encoder import encoder_of
from llmlaunch.layers.model import model_of
from llmlaunch.layers.modules import NO_PARAMETERS, Module, ModuleSplit, ModuleStyle, container
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques.requests import Adapters


@lru_cache(maxsize=64)
def modules_of(shape: ModelShape, split: ModuleSplit, adapters: Adapters | None) -> tuple[Module, ...]:
    """Return the modules of a whole model on one device, those of low-rank adapters among them, each before what is
    inside it."""
    counts, model, encoder = count_parameters(shape), model_of(shape), encoder_of(shape)
    divided, tied = counts.embedding // split.tensor, shape.tied_embeddings
    family = family_named(shape.family)
    style = ModuleStyle(split, adapters, family.fuses_linears, family.gathered_mixture)
    kinds = [layer.modules(style) for layer in model.kinds]
    table = Module(
        (counts.embedding if split.table_whole else divided,), frozen_table=adapters is not None and not tied
    )
    positions = [Module((counts.positions,))] if counts.positions else []
    images = encoder.modules(split) if encoder is not None else []
    layers = (module for kind in model.order for module in kinds[kind])
    body = container([table, *positions, *images, NO_PARAMETERS, *layers, Module((counts.final_norm,))])
    head = Module(() if tied else (divided,), shares_table=tied)
    further = [Module((counts.mtp,))] if counts.mtp else []
    return tuple(container([*body, head, *further]))
