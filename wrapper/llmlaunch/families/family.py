"""A model family of Hugging Face: how its config.json is read and written, and how its class differs from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from llmlaunch.families.config_keys import ConfigKey
from llmlaunch.families.reader import ConfigReader
from llmlaunch.frozen import frozen
from llmlaunch.models.shape import ModelShape


@frozen
class VisionClass:
    """A class of models with a vision encoder before the decoder of a family, by its `model_type`."""

    model_type: str
    deepstack: bool = False
    """Whether blocks in the middle of the encoder have projectors into the decoder's first layers."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `text_config` whose defaults are not those of the family."""
    text_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the family that this class has one value for, and no key."""


@frozen
class Family:
    """A family of Transformers: models of one `model_type` (transformers 4.53 to 5.23)."""

    read: Callable[[ConfigReader], ModelShape]
    """Returns the shape of a config.json. Raises BadKey for anything that is not exactly so."""
    keys: tuple[ConfigKey, ...]
    """Keys of config.json that are one field of a shape."""
    defaults: Mapping[str, Any]
    """What the configuration class takes for a key that a config.json leaves out; None for a value that follows from
    others. Keys that decide neither shape nor arithmetic (special tokens, initializer_range, caches) are not here."""
    write: Callable[[ModelShape], dict[str, Any]] | None = None
    """Returns what a config.json has beside the rows of `keys` and the rotary positions."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys that the class takes (its attribute_map)."""
    other_keys: Mapping[str, str] = field(default_factory=dict)
    """The key that messages name for a field of a shape that has no row."""
    needs: tuple[str, ...] = ()
    """Sections of a shape without which the family cannot be written."""
    same: tuple[str, ...] = ()
    """Other model_types whose classes are this one to the letter."""
    vision: VisionClass | None = None
    """The class with a vision encoder before this decoder."""
    mark: Callable[[ModelShape], bool] | None = None
    """Whether a shape that names no family is taken for one of this family; None = never."""
    precedence: int = 0
    """Among families whose `mark` a shape has, the one with the highest precedence is taken."""
    has_rotary: bool = True
    balances_experts: bool = True
    """Whether the class has a loss or a bias update that keeps experts evenly used."""
    fuses_linears: bool = False
    """Whether the class has one linear for queries, keys and values, and one for gate and up."""
    gathered_mixture: bool = False
    """Whether DeepSpeed gathers the mixture of the class as one module (deepspeed/runtime/zero/leaf_module_config.py
    DEFAULT_LEAF_MODULE_CLASSES, 0.19.8)."""
    wide_norms: bool = False
    """Whether norms of the class keep what they normalized in fp32, before they multiply by their weight."""
    torch_norms: bool = False
    """Whether norms of the class are torch's own, which keep nothing beside their input, and its activation is written
    out."""
    one_projection: bool = False
    """Whether queries, keys and values come of one linear that the backward pass keeps whole, and heads lie apart."""
    wide_router: bool = False
    """Whether the router of the class computes in fp32."""
    whole_sequences: bool = False
    """Whether layers of the class read the tokens before their own, which no split of DeepSpeed's passes on."""
    has_plain_plan: bool = True
    """Whether the tensor-parallel plan of the class has the styles alone that DeepSpeed's AutoTP takes."""
    whole_heads: bool = False
    """Whether the class refuses a hidden_size that its heads do not divide, even where head_dim is given
    (validate_architecture, 5.23)."""
    plain_mixture: Mapping[str, Any] | None = None
    """Fields of a plain mixture with dense layers that change where this class builds it: no plainer class can."""
