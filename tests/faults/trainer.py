"""Stands in for a trainer: it trains nothing and holds no GPU (the scenario of the stand-in driver says that it does).

It prints a step now and then, until there is a file `stop` beside the scenario.
"""

import os
import sys
import time
from pathlib import Path

stop = Path(os.environ["FAKE_NVML_SCENARIO"]).with_name("stop")
step = 0
while not stop.exists():
    step += 1
    if os.environ["RANK"] == "0":
        print(f"step {step}/1000000 | loss 1.0 | 0.10 s/step | 1000 tokens/s", flush=True)
    time.sleep(0.1)
sys.exit(0)
