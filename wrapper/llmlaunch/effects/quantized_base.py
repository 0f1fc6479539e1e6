"""The frozen weights beneath adapters in 4 bits (QLoRA, Dettmers et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import largest_matrices, linear_weights
from llmlaunch.timing.effects import LayerParts, TimeEffect
from llmlaunch.timing.products import DevicePace, SplitColumns, Work

# A weight has half a byte, a block of 64 a scale of one byte, and 256 blocks a scale of four
# (bitsandbytes/functional.py `quantize_4bit` with `compress_statistics`, 0.50).
NF4_BYTES = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0)
TERM = "dequantized_weight"


class QuantizedBaseEffect(Effect):
    """Linear layers of the blocks are kept narrow, and each is made wide again while it runs."""

    def on(self, job: Job) -> bool:
        """Where adapters have such a base."""
        return job.techniques.adapters is not None and job.techniques.adapters.base is not None

    def spared_at_rest(self, job: Job, rows: RankColumns) -> Size:
        """What linear layers take less than in the compute format. Embedding, head and norms stay as they are."""
        dense, _ = linear_weights(job, rows)
        return (job.facts.states.parameter_bytes - NF4_BYTES) * rows.sum_of(dense)

    def least_parameter_bytes(self, job: Job, least: float) -> float:
        """Those of a quantized weight."""
        return min(NF4_BYTES, least)

    def beside_layer(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """The weight of the linear layer that runs backward, in the compute format (bitsandbytes/autograd/_functions.py
        `MatMul4Bit.backward`, 0.50)."""
        return {TERM: np.asarray(job.facts.states.parameter_bytes * largest_matrices(job, rows)[0])}


class QuantizedBaseTime(TimeEffect):
    """Each pass of a linear layer writes its weight out in the compute format first."""

    def on(self, job: Job) -> bool:
        """Where adapters have such a base."""
        return job.techniques.adapters is not None and job.techniques.adapters.base is not None

    def element_wise(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Work | None:
        """What is read and written of the layer's weights."""
        narrow = (matrix for matrix in parts.layer.matrices if matrix.narrow and not matrix.of_experts)
        elements = sum(
            (matrix.count_on_device(at.layer) * matrix.elements_on_device(at.layer) for matrix in narrow), 0.0
        )
        moved = NF4_BYTES + job.facts.layer.activation_bytes
        seconds = np.asarray(moved / pace.element_wise * elements + np.zeros(len(at)))
        return Work(seconds, seconds)
