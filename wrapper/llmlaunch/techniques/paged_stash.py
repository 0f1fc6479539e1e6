"""Pages for what experts save."""

from __future__ import annotations

from dataclasses import fields

from llmlaunch.documents.keys import key, section
from llmlaunch.techniques.technique import EXPERTS, technique

__all__ = ["PagedStash", "StashedExperts"]


@section
class PagedStash:
    """Pages in which activations of experts wait for their backward pass, in one buffer for all layers of a device.

    Both factors count room for what all layers and micro-batches in flight hold of equally shared tokens. What the
    pages on the device cannot take goes to those of the host.
    """

    page_size: int = key("Tokens of a page", default=64, ge=1, le=2**20)
    device_factor: float = key(
        "Room on the device, as a multiple of what equally shared tokens take", default=1.1, gt=0, le=100
    )
    host_factor: float = key(
        "The same in host memory, for what the device's pages cannot take; 0 = none", default=0.0, ge=0, le=100
    )

    def as_json(self) -> dict[str, object]:
        """Return all that is written of it."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@section
class StashedExperts:
    """None keeps what experts save with the rows that no token fills."""

    paged_stash: PagedStash | None = technique(
        "megatron-lm with expert_rank_capacity_factor: activations of experts wait in pages, without the rows that no "
        "token fills; {} = Megatron's own page size and factors",
        default=None,
        mapping=PagedStash,
        needs=EXPERTS,
        source="Megatron core, paged_stash.py",
        saves="of what experts save, the rows that no token fills",
        costs="copies to pages and back, beside the rest of a layer; a step that fills them is run again",
    )
