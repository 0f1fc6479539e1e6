"""Asks DeepSpeed's own DeepSpeedConfig whether it takes a ds_config.json. Run as a program, one JSON object in and out:

stdin   {"cases": [{"name": ..., "world_size": ..., "config": {...}}, ...]}
stdout  {"<name>": null or "why not", ...}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig


class Mesh:
    """The process mesh DeepSpeed asks for its data parallel size."""

    def __init__(self, data: int) -> None:
        self.data = data

    def get_data_parallel_world_size(self) -> int:
        return self.data


def judge(config: dict[str, Any], world_size: int) -> str | None:
    try:
        taken = DeepSpeedConfig(config, mpu=Mesh(world_size))
    except Exception as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    if taken.world_size != world_size:
        return f"judged for {taken.world_size} ranks instead of {world_size}"
    if taken.zero_optimization_stage != config["zero_optimization"]["stage"]:
        return f"ZeRO stage {taken.zero_optimization_stage} was understood"
    return None


def main() -> None:
    # Without a process group the class would silently judge for one rank.
    comm.get_rank = lambda group=None: 0
    cases = json.load(sys.stdin)["cases"]
    json.dump({case["name"]: judge(case["config"], case["world_size"]) for case in cases}, sys.stdout)


if __name__ == "__main__":
    main()
