"""Stands in for a trainer with the real torch, whose CUDA allocator's C functions are stood in for (tests/support).

Each rank holds 30 GiB, one more than the rank before. When there is a file `spike` beside the scenario it holds 30 GiB
more for 20 ms, gives them back, and resets torch's counters, as frameworks do when they log.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import fake_allocator as fake
import torch

place, rank = Path(os.environ["FAKE_NVML_SCENARIO"]).parent, int(os.environ["LOCAL_RANK"])
fake.install()
torch.cuda.init()
torch.cuda.set_device(rank)
fake.hold((30 + rank) * fake.GIB, device=rank)
while not (place / "spike").exists():
    time.sleep(0.02)
fake.hold(30 * fake.GIB, device=rank)
time.sleep(0.02)
fake.release(30 * fake.GIB, device=rank)
fake.empty_cache(device=rank)
torch.cuda.reset_peak_memory_stats()
while not (place / "stop").exists():
    time.sleep(0.02)
