"""A loss whose kernels are compiled together."""

from __future__ import annotations

from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect

__all__ = ["EAGER_LOSS_BYTES", "NATIVE_LOSS_BYTES", "NativeLossTime"]

# Per logit. Kernel by kernel the eager loss reads and writes 52 bytes (to fp32, maximum, difference, exponential, sum,
# quotient, gradient, to bf16), the compiled one 32 (megatron/core/tensor_parallel/cross_entropy.py,
# fusions/fused_cross_entropy.py, core 0.19); of the first 24 are counted, because parts stay in the cache.
EAGER_LOSS_BYTES = 24.0
NATIVE_LOSS_BYTES = EAGER_LOSS_BYTES * 32.0 / 52.0


class NativeLossTime(TimeEffect):
    """The compiled loss moves fewer bytes."""

    def on(self, job: Job) -> bool:
        """Where it is compiled, or Transformer Engine's, which moves fewer bytes still, and which nobody has
        measured."""
        return job.techniques.loss in ("native", "te")

    def logit_bytes(self, moved: float) -> float:
        """Those of the compiled loss."""
        return NATIVE_LOSS_BYTES
