"""The inputs of layers that full recompute keeps wait in host memory: DeepSpeed's `cpu_checkpointing`."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import ACTIVATIONS_ON_HOST, technique

__all__ = ["CheckpointOffload"]


@section
class CheckpointOffload:
    """It moves what full recompute keeps, and nothing else."""

    offload_checkpoints: bool = technique(
        "The layer inputs recompute: full keeps wait in host memory; absent = searched",
        default=False,
        bit_equal="copies come back from the host as they left",
        belongs=("recompute", "full"),
        habit=ACTIVATIONS_ON_HOST,
        on_host="checkpoints",
        source="ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1)",
        saves="the layer inputs full recompute keeps",
        costs="host memory and the link to it",
    )
