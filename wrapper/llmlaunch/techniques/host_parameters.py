"""Parameters rest on the host: DeepSpeed's `offload_param` of ZeRO 3."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import TechniqueHabit, technique

__all__ = ["HostParameters"]


@section
class HostParameters:
    """Each pass reads the parameters over the host's link."""

    offload_parameters: bool = technique(
        "Parameters rest on the host and are streamed in (ZeRO 3); absent = searched",
        default=False,
        bit_equal="copies come back from the host as they left",
        habit=TechniqueHabit("parameters on the host", 0.10, "every pass then waits for the host's link"),
        on_host="parameters",
        source="ZeRO-Infinity; Superpipeline; KARMA; M6-10T",
        saves="the parameters, but those that run now",
        costs="host memory, every pass reads them over the link",
    )
