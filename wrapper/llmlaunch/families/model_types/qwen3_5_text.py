"""The language models of Qwen 3.5: gated delta nets before dense MLPs (transformers/models/qwen3_5, 5.23)."""

from __future__ import annotations

from llmlaunch.families.decoder import ROTARY_PERCENT
from llmlaunch.families.delta_net import (
    DELTA_NET_DEFAULTS,
    LINEAR_ATTENTION,
    delta_net_decoder,
    has_delta_net,
    written_kinds,
)
from llmlaunch.families.family import DECODER, Family, VisionClass

FAMILY = Family(
    read=delta_net_decoder,
    write=written_kinds,
    keys=(*DECODER, *ROTARY_PERCENT, *LINEAR_ATTENTION),
    defaults={**DELTA_NET_DEFAULTS, "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4},
    vision=VisionClass("qwen3_5"),
    mark=has_delta_net,
    precedence=210,
)
