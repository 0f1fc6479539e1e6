"""The six layouts that try a cluster out with DeepSpeed."""

from __future__ import annotations

from llmlaunch.frameworks.trials import DIES, FITS, TIGHT, Trial

TRIALS = (
    Trial(FITS, zero_stage=1, fill=0.40),
    Trial(FITS, zero_stage=2, fill=0.55, micro_batch_size=4),
    Trial(FITS, zero_stage=3, fill=0.45, micro_batch_size=2, recompute="full"),
    Trial(FITS, zero_stage=3, fill=0.70, sequence_factor=4, sizes={"context": 4}),
    Trial(TIGHT, zero_stage=2, micro_batch_size=2, sizes={"tensor": 2}),
    Trial(DIES, zero_stage=0, micro_batch_size=4),
)
