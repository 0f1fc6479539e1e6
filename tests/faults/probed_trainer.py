"""Stands in for a trainer with the real torch, whose CUDA allocator's C functions are stood in for (tests/support).

It holds 30 GiB. When there is a file `spike` beside the scenario it holds 30 GiB more for 20 ms, gives them back, and
resets torch's counters, as frameworks do when they log.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import fake_allocator as fake
import torch

place = Path(os.environ["FAKE_NVML_SCENARIO"]).parent
fake.install()
torch.cuda.init()
torch.cuda.set_device(0)
fake.hold(30 * fake.GIB, device=0)
while not (place / "spike").exists():
    time.sleep(0.02)
fake.hold(30 * fake.GIB, device=0)
time.sleep(0.02)
fake.release(30 * fake.GIB, device=0)
fake.empty_cache(device=0)
torch.cuda.reset_peak_memory_stats()
while not (place / "stop").exists():
    time.sleep(0.02)
