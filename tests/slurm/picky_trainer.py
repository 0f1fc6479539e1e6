"""A trainer for tests, without torch: it runs out of memory where the micro-batch of its ds_config.json is too large.

    picky_trainer.py --fits 8 --deepspeed --deepspeed_config FILE

With a micro-batch above `--fits` it dies with the message of torch's allocator; with any other it trains six steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

STEPS = 6
# torch 2.7, c10/cuda/CUDACachingAllocator.cpp
TOO_LARGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of "
    "which 1.25 GiB is free. Including non-PyTorch memory, this process has 2.75 GiB memory in use. Of the allocated "
    "memory 2.00 GiB is allocated by PyTorch, and 256.00 MiB is reserved by PyTorch but unallocated."
)

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--fits", type=int, required=True)
parser.add_argument("--deepspeed_config", required=True)
options, _ = parser.parse_known_args()
if json.loads(Path(options.deepspeed_config).read_text())["train_micro_batch_size_per_gpu"] > options.fits:
    sys.exit(TOO_LARGE)
if os.environ["RANK"] == "0":
    for step in range(1, STEPS + 1):
        print(f"step {step}/{STEPS} | loss {1 / step:.4f} | 0.10 s/step | 1000 tokens/s", flush=True)
