"""Holds the model of torch's caching allocator (tracing/caching_allocator.py) against a real one.

    python benchmarks/gpu/allocator_replay.py RECORDS [EVENTS.xz ...] [--made-up N] [--stand-in]

The allocations and frees of traced ranks (benchmarks/gpu/events/) and of made-up ones are repeated on the GPU in the
same order: `torch.empty` where a storage was made, `del` where it was let go of. Nothing is computed, so a rank of any
model takes seconds. What torch reserves is compared with what the model says, a few hundred times on the way and at the
peak, without and with expandable segments; without them once more on a device with less room than torch would reserve,
where the cache has to be given back. Needs torch and this checkout, nothing else. The record goes into the folder
RECORDS; started again there, it goes on behind the lists that are done. About six minutes.

With --stand-in the model itself takes the place of torch: that tries the program and says nothing about the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "wrapper" / "llmlaunch" / "tracing"))

from allocation_events import made_up, read_events  # noqa: E402
from gpu_records import GIB, GRACE_SECONDS, LIMIT_SECONDS, Session, require_cuda, versions  # noqa: E402

from caching_allocator import CachingAllocator, OutOfMemory  # noqa: E402

LOOKS = 400  # at what is reserved, over all events
SETTINGS = {"default": "expandable_segments:False", "expandable": "expandable_segments:True"}
# A bound on the process (set_per_process_memory_fraction) is a smaller device for whole segments alone: pages that grow
# one are refused where all of the request would not fit beside what is reserved.
BOUNDED = ("default",)
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

Event = tuple[int, int]
Seen = dict[str, Any]


class Full(Exception):
    """No room for an allocation, even without what was cached."""


class Device(Protocol):
    """Something that hands out memory: torch on a GPU, or the model of it."""

    name: str

    def allocate(self, size: int) -> Any: ...
    def free(self, block: Any) -> None: ...
    def reserved(self) -> int: ...
    def peaks(self) -> tuple[int, int]:
        """Most reserved and most allocated bytes."""
        ...

    def retries(self) -> int: ...


class Model:
    """The model of the allocator, which is also what stands in for torch."""

    name = "stand-in"

    def __init__(self, setting: str, device_bytes: int | None) -> None:
        self.allocator = CachingAllocator(setting == "expandable", device_bytes)
        self.most_reserved = self.most_allocated = 0

    def allocate(self, size: int) -> Any:
        try:
            block = self.allocator.allocate(size)
        except OutOfMemory:
            raise Full from None
        self.most_reserved = max(self.most_reserved, self.allocator.reserved_bytes)
        self.most_allocated = max(self.most_allocated, self.allocator.allocated_bytes)
        return block

    def free(self, block: Any) -> None:
        self.allocator.free(block)

    def reserved(self) -> int:
        return self.allocator.reserved_bytes

    def peaks(self) -> tuple[int, int]:
        return self.most_reserved, self.most_allocated

    def retries(self) -> int:
        return self.allocator.retries


class Torch:
    """torch's own allocator on the first GPU. Its setting is in the environment, before torch is imported."""

    def __init__(self, device_bytes: int | None) -> None:
        import torch

        self.torch = torch
        self.name = torch.cuda.get_device_name(0)
        torch.cuda.init()
        if device_bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(device_bytes / total)

    def allocate(self, size: int) -> Any:
        try:
            return [self.torch.empty(size, dtype=self.torch.uint8, device="cuda")]
        except self.torch.OutOfMemoryError:
            raise Full from None

    def free(self, block: Any) -> None:
        block.clear()  # the last reference: the allocator has it back at once

    def reserved(self) -> int:
        return int(self.torch.cuda.memory_reserved())

    def peaks(self) -> tuple[int, int]:
        return int(self.torch.cuda.max_memory_reserved()), int(self.torch.cuda.max_memory_allocated())

    def retries(self) -> int:
        return int(self.torch.cuda.memory_stats().get("num_alloc_retries", 0))


def repeat(events: Iterable[Event], device: Device, every: int) -> Seen:
    """All events in order; `looks` are the reserved bytes after each `every`-th."""
    live: dict[int, Any] = {}
    looks, ran_out, done = [], False, 0
    for key, size in events:
        if size == 0:
            device.free(live.pop(key))
        else:
            try:
                live[key] = device.allocate(size)
            except Full:
                ran_out = True
                break
        done += 1
        if done % every == 0:
            looks.append(device.reserved())
    reserved, allocated = device.peaks()
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "retries": device.retries(),
        "ran_out": ran_out,
        "events": done,
        "looks": looks,
    }


def events_named(name: str) -> Iterator[Event]:
    """Those of a file, or `made-up-SEED`."""
    return made_up(int(name.removeprefix("made-up-"))) if name.startswith("made-up-") else read_events(Path(name))


def on_device(
    name: str, setting: str, device_bytes: int | None, every: int, stand_in: bool, limit_seconds: float
) -> Seen:
    """In a process of its own: torch reads its setting once, and nothing is left over from the run before."""
    words = [sys.executable, __file__, "--one", name, setting, str(device_bytes or 0), str(every)]
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = {**kept, VARIABLES[0]: SETTINGS[setting]}
    words += ["--stand-in"] * stand_in
    said = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=limit_seconds)
    if said.returncode:
        sys.exit(f"{name} ({setting}) ended with {said.returncode}:\n{said.stderr[-3000:]}")
    found: Seen = json.loads(said.stdout.splitlines()[-1])
    return found


def one(name: str, setting: str, device_bytes: int, every: int, stand_in: bool) -> None:
    """The child: repeats one list of events and prints what it saw."""
    limit = device_bytes or None
    device: Device = Model(setting, limit) if stand_in else Torch(limit)
    seen = repeat(events_named(name), device, every)
    seen["gpu"] = device.name
    if isinstance(device, Torch):
        seen["torch"], seen["cuda"] = device.torch.__version__, device.torch.version.cuda
    print(json.dumps(seen))


def compared(name: str, setting: str, device_bytes: int | None, stand_in: bool, session: Session) -> Seen:
    """Torch beside the model, for one list of events, one setting and one size of device."""
    every = max(sum(1 for _ in events_named(name)) // LOOKS, 1)
    said = repeat(events_named(name), Model(setting, device_bytes), every)
    seen = on_device(name, setting, device_bytes, every, stand_in, session.left_seconds() + GRACE_SECONDS)
    pairs = list(zip(said.pop("looks"), seen.pop("looks"), strict=False))
    return {
        "events": Path(name).name,
        "setting": setting,
        "device_bytes": device_bytes,
        "model": said,
        "torch": seen,
        "largest_difference_bytes": max((abs(model - torch) for model, torch in pairs), default=0),
        "looks": len(pairs),
        "reserved_ratio": said["reserved_bytes"] / seen["reserved_bytes"],
    }


def tight(whole: Seen) -> int:
    """Bytes of a device with room for what is allocated, but not for all that torch would reserve."""
    model = whole["model"]
    return int(model["allocated_bytes"] + 0.5 * (model["reserved_bytes"] - model["allocated_bytes"]))


def line(row: Seen) -> str:
    model, torch = row["model"], row["torch"]
    room = "" if row["device_bytes"] is None else f" in {row['device_bytes'] / GIB:.2f} GiB"
    agree = model["ran_out"] == torch["ran_out"] and model["retries"] == torch["retries"]
    return (
        f"{row['events']:28} {row['setting'] + room:28} allocated {torch['allocated_bytes'] / GIB:8.3f} "
        f"({model['allocated_bytes'] / GIB:8.3f})  reserved {torch['reserved_bytes'] / GIB:8.3f} "
        f"({model['reserved_bytes'] / GIB:8.3f}, {100 * (row['reserved_ratio'] - 1):+.2f} %)  "
        f"cache given back {torch['retries']} times{'' if agree else ' (the model says otherwise)'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="?")
    parser.add_argument("events", nargs="*", help="files; those of benchmarks/gpu/events unless said")
    parser.add_argument("--made-up", type=int, default=4, metavar="N", help="so many made-up lists besides")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS, help="no list begins after so long")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, setting, device_bytes, every = options.one
        one(name, setting, int(device_bytes), int(every), options.stand_in)
        return
    if options.records is None:
        parser.error("name a folder for the record")
    about = {"gpu": "stand-in"} if options.stand_in else versions(require_cuda(Path(__file__).name))
    session = Session("allocator_replay", options.records, options.limit_seconds, about)
    recorded = options.events or [str(path) for path in sorted((HERE / "events").glob("*.xz"))]
    for name in (*recorded, *(f"made-up-{seed}" for seed in range(options.made_up))):
        session.part(Path(name).name, partial(rows_of, name, options.stand_in, session))
    parts = session.content["parts"].values()
    worst = max((abs(row["reserved_ratio"] - 1) for part in parts for row in part["result"]), default=0.0)
    print(f"reserved: the model differs by at most {100 * worst:.2f} % from torch at the peak")
    sys.exit(session.finish())


def rows_of(name: str, stand_in: bool, session: Session) -> list[Seen]:
    """One list of events with each setting, and on a device that is too small. In parentheses what the model says."""
    rows = []
    for setting in SETTINGS:
        whole = compared(name, setting, None, stand_in, session)
        rooms = [tight(whole)] if setting in BOUNDED else []
        rows += [whole, *(compared(name, setting, room, stand_in, session) for room in rooms)]
    for row in rows:
        print(line(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
