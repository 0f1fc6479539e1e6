"""A trainer for tests, without torch: it runs out of memory where the micro-batch of its ds_config.json is too large.

    picky_trainer.py --fits 8 [--steps-before 3] [--of host] --deepspeed --deepspeed_config FILE

With a micro-batch above `--fits` it dies after `--steps-before` steps, with the message of torch's allocator of a GPU,
or of the host with `--of host`; with any other it trains six steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

STEPS = 6
# torch 2.7, c10/cuda/CUDACachingAllocator.cpp
DEVICE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of "
    "which 1.25 GiB is free. Including non-PyTorch memory, this process has 2.75 GiB memory in use. Of the allocated "
    "memory 2.00 GiB is allocated by PyTorch, and 256.00 MiB is reserved by PyTorch but unallocated."
)
# torch 2.7, c10/core/impl/alloc_cpu.cpp
HOST = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 17179869184 bytes. Error code 12 (Cannot allocate memory)"
)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fits", type=int, required=True)
    parser.add_argument("--steps-before", type=int, default=0)
    parser.add_argument("--of", choices=["device", "host"], default="device")
    parser.add_argument("--deepspeed_config", required=True)
    options, _ = parser.parse_known_args()
    config = json.loads(Path(options.deepspeed_config).read_text(encoding="utf-8"))
    size = config["train_micro_batch_size_per_gpu"]
    fits = size <= options.fits
    for step in range(1, (STEPS if fits else options.steps_before) + 1):
        if os.environ["RANK"] == "0":
            print(f"step {step}/{STEPS} | loss {1 / step:.4f} | 0.10 s/step | 1000 tokens/s", flush=True)
    if not fits:
        print(DEVICE if options.of == "device" else HOST, file=sys.stderr, flush=True)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
