"""Combinations of switches that somebody has run and published, so that a plan can say when its own is none of them."""

from __future__ import annotations

from typing import NamedTuple

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import Layout
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.switches import FULL_ITERATION, WHOLE_LAYER


class ExchangeSwitches(NamedTuple):
    """What decides how a mixture's tokens travel and what hides them: the generation of the card, whether an NVLink
    domain is wider than a node, the dispatcher, whether another micro-batch's passes hide the exchange, what CUDA
    graphs hold ("none", "parts" or "whole"), and whether an expert group reaches beyond one NVLink domain."""

    generation: int
    wide_domain: bool
    dispatcher: str
    overlapped: bool
    graphs: str
    beyond_domain: bool

    @property
    def all_off(self) -> bool:
        """Whether tokens travel as Megatron-LM sends them by default."""
        return self.dispatcher != "flex" and not self.overlapped and self.graphs == "none"

    def describe(self) -> str:
        """Return the switches that are on, in words."""
        dispatcher = "DeepEP or HybridEP" if self.dispatcher == "flex" else f"the {self.dispatcher} dispatcher"
        graphs = {"none": "", "parts": "CUDA graphs of parts of a layer", "whole": "CUDA graphs of whole layers"}
        reach = "expert groups beyond one NVLink domain" if self.beyond_domain else "expert groups in one NVLink domain"
        overlap = "overlapped expert communication" if self.overlapped else ""
        return ", ".join(filter(None, (dispatcher, overlap, graphs[self.graphs], reach)))


def exchange_switches(cluster: Cluster, layout: Layout, techniques: Techniques) -> ExchangeSwitches:
    """Return the switches of a layout of a mixture on a machine."""
    scopes, capability = techniques.cuda_graphs, cluster.accelerator.compute_capability
    whole = FULL_ITERATION in scopes or WHOLE_LAYER in scopes
    domain = max(cluster.nvlink_domain_devices, cluster.devices_per_node)
    return ExchangeSwitches(
        generation=int(float(capability)) if capability else 0,
        wide_domain=domain > cluster.devices_per_node,
        dispatcher=techniques.token_dispatcher or "alltoall",
        overlapped=techniques.overlaps_experts,
        graphs="whole" if whole else "parts" if scopes else "none",
        beyond_domain=layout.expert * layout.expert_tensor > domain,
    )


# Of the public runs in tests/data/measurements/mixtures.jsonl and mixture_switches.jsonl, in the order of the fields.
MEASURED_SWITCHES = frozenset(
    ExchangeSwitches(*switches)
    for switches in (
        (9, False, "alltoall", False, "none", True),
        (9, False, "alltoall", True, "none", True),
        (9, False, "flex", False, "none", True),
        (9, False, "flex", False, "parts", True),
        (9, False, "flex", True, "none", False),
        (9, False, "flex", True, "none", True),
        (9, False, "flex", True, "parts", True),
        (10, False, "alltoall", False, "none", False),
        (10, False, "alltoall", False, "parts", False),
        (10, False, "alltoall", True, "none", False),
        (10, False, "flex", False, "none", False),
        (10, False, "flex", False, "parts", False),
        (10, False, "flex", True, "parts", True),
        (10, False, "flex", True, "whole", False),
        (10, True, "flex", False, "none", False),
        (10, True, "flex", False, "parts", False),
        (10, True, "flex", True, "parts", False),
        (10, True, "flex", True, "whole", False),
    )
)
