"""DeepSpeed's optimizer classes as a table for people: docs/deepspeed-memory.md, which a test keeps equal."""

from __future__ import annotations

from llmlaunch.backends.facts.deepspeed import ENGINES, Engine, Share

__all__ = ["engines_table"]

PRECISIONS = {"half": "bf16, fp16", "fp32": "fp32"}


def engines_table() -> str:
    """One Markdown row for each class and case, bytes per parameter by phase."""
    rows = [
        "| class | ZeRO | precision | lasting | between micro-batches | end of backward | step | step, not fused "
        "| where | how known |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(rows + [_row(engine) for engine in ENGINES])


def _row(engine: Engine) -> str:
    precision = PRECISIONS[engine.precision]
    if engine.accumulation != "same":
        precision = f"bf16, gradients {engine.accumulation}"
    if engine.offload:
        precision += ", optimizer offloaded"
    whole, sharded = engine.final
    final = (whole * (2 if engine.flattened else 1), sharded)
    foreach = engine.foreach_step or engine.step
    phases = (
        engine.lasting,
        *(_sum(engine.lasting, more) for more in (engine.accumulated, final, engine.step, foreach)),
    )
    cells = " | ".join(_share(share) for share in phases)
    return f"| {engine.name} | {engine.stage} | {precision} | {cells} | `{engine.where}` | {engine.evidence} |"


def _sum(one: Share, other: Share) -> Share:
    return one[0] + other[0], one[1] + other[1]


def _share(share: Share) -> str:
    whole, sharded = share
    parts = [f"{whole:g}"] * bool(whole) + [f"{sharded:g}/D"] * bool(sharded)
    return " + ".join(parts)
