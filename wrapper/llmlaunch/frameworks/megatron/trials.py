"""The six layouts that try a cluster out with Megatron core."""

from __future__ import annotations

from llmlaunch.frameworks.trials import DIES, FITS, TIGHT, Trial

TRIALS = (
    Trial(FITS, zero_stage=1, fill=0.40),
    Trial(FITS, zero_stage=1, fill=0.55, micro_batch_size=4, sizes={"tensor": 4}),
    Trial(FITS, zero_stage=1, fill=0.65, micro_batch_size=2, sizes={"pipeline": 4, "tensor": 2}),
    Trial(FITS, zero_stage=1, fill=0.70, recompute="full", sequence_factor=4, sizes={"context": 4, "tensor": 2}),
    Trial(TIGHT, zero_stage=1, micro_batch_size=2, sizes={"tensor": 2, "pipeline": 2}),
    Trial(DIES, zero_stage=0, micro_batch_size=4, sizes={"tensor": 2}),
)
