"""Writes the allocations and frees of a traced rank to a file that allocator_replay.py can replay.

    .venv-frameworks/bin/python benchmarks/gpu/record_events.py EVENTS.xz WORLD_SIZE PIPELINE_RANK -- ARGUMENTS

ARGUMENTS are those of Megatron's `pretrain_gpt.py`. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "wrapper" / "llmlaunch" / "tracing"))

from allocation_events import write_events  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=Path)
    parser.add_argument("world_size", type=int)
    parser.add_argument("pipeline_rank", type=int)
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args()
    import megatron_rank
    from live_storages import STORAGES

    traced = megatron_rank.trace(options.arguments, options.world_size, options.pipeline_rank)
    write_events(options.events, STORAGES.events())
    print(f"{options.events}: peak {traced['peak_bytes'] / 2**30:.3f} GiB, {options.events.stat().st_size} bytes")


if __name__ == "__main__":
    main()
