"""What keys of ds_config.json do to memory (deepspeed/runtime/config.py and deepspeed/runtime/zero/config.py, 0.19.8):
one subject for each reason. The first that holds a key decides."""

from __future__ import annotations

from llmlaunch.frameworks.deepspeed.subjects import Subject
from llmlaunch.frameworks.flag_classes import DECIDES, LESS_OF_STATES, NEUTRAL, PRICED, UNKNOWN

GATHERING = Subject("buckets, and what ZeRO 3 gathers", PRICED, "the estimate counts them")
SECOND_SHARD = Subject(
    "a second shard of the parameters", PRICED, "the estimate counts it, and that it is gathered within fewer ranks"
)
QUANTIZED_WEIGHTS = Subject(
    "quantized weights",
    UNKNOWN,
    "parameters are gathered in 8 bits beside their copies, by kernels that are not counted",
)
QUANTIZED_GRADIENTS = Subject(
    "quantized gradients", UNKNOWN, "gradients are exchanged in 4 bits through buffers that are not counted"
)
GROUPS = Subject(
    "model states shared within groups",
    UNKNOWN,
    "MiCS shares model states among fewer devices than are priced",
    effect=DECIDES,
)
NO_GROUPS = Subject("no groups", NEUTRAL, "DeepSpeed's default, without MiCS")
NOT_QUANTIZED = Subject("nothing quantized", NEUTRAL, "DeepSpeed's default")
LOGS = Subject(
    "logs, curves and profiles of time",
    NEUTRAL,
    "written by the host",
    patterns="wandb.* tensorboard.* csv_monitor.* comet.* comms_logger.* comms_config.* monitor_config.*",
)
SCHEDULE = Subject(
    "numbers of the schedule and the optimizer",
    NEUTRAL,
    "numbers of the optimizer, not its states",
    patterns="scheduler.* optimizer.params.* optimizer.type=Adam,AdamW,adam,adamw",
)
LOSS_SCALE = Subject("loss scale", NEUTRAL, "one number")
ORDER = Subject(
    "how ZeRO orders its work",
    NEUTRAL,
    "which gradient or partition travels when, in place, or page-locked memory of the host",
)
CHECKPOINTS = Subject(
    "checkpoints", NEUTRAL, "weights are gathered one by one, and kept by the host", patterns="checkpoint.*"
)
OPTIMIZERS = Subject("other optimizers", UNKNOWN, "the optimizer's memory is unknown; Adam is priced", effect=DECIDES)
NARROW_MODEL = Subject("narrow model states", UNKNOWN, "model states in fp32 are priced", effect=LESS_OF_STATES)

SETTING_SUBJECTS = (
    *(GATHERING, SECOND_SHARD, QUANTIZED_WEIGHTS, QUANTIZED_GRADIENTS, GROUPS, NO_GROUPS, NOT_QUANTIZED, LOGS),
    *(SCHEDULE, LOSS_SCALE, ORDER, CHECKPOINTS, OPTIMIZERS, NARROW_MODEL),
)
