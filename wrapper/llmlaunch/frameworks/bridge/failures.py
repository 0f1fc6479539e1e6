"""How Megatron-Bridge says what ended it, beside Megatron core's own words (`frameworks/megatron/failures.py`): rows of
the table of causes (`causes/kinds.py`), packed in `node.pyz`."""

from __future__ import annotations

from ...causes.pattern import Frame, Pattern

PATTERNS = (
    Pattern("bad_arguments", r"^Megatron-Bridge refuses its settings: ", "llmlaunch, trainers/megatron_bridge.py"),
    Pattern(
        "bad_arguments",
        r"Unsupported checkpoint format: ",
        "Megatron-Bridge 0.6, megatron/bridge/training/checkpointing.py",
    ),
)

FRAMES: tuple[Frame, ...] = ()
