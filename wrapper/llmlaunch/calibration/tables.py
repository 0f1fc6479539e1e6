"""Which backends share a table of facts, and with it what measured runs say of their predictions. A module of its own,
because a check asks this and needs none of the tables."""

from __future__ import annotations

__all__ = ["TABLES_OF_BACKENDS"]

# The name in a measurement -> the table.
TABLES_OF_BACKENDS = {
    "megatron-lm": "megatron",
    "megatron-bridge": "megatron",
    "megatron-deepspeed": "megatron-deepspeed",
    "deepspeed": "deepspeed",
    "megatron-fsdp": "megatron-fsdp",
}
