"""A trainer for tests: in its first life one rank never gets to the end of step 19, and the others wait for it.

    hangs_once.py FOLDER STEPS

Every tenth step is saved in FOLDER/latest, and it goes on after that one. The prints are those of no framework.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

HANGS_AT = 19  # late enough for the watchdog, which looks about once a second, to know the pace of steps


def hangs_here() -> None:
    time.sleep(3600)


def waits_for_the_other_ranks() -> None:
    while True:
        time.sleep(0.1)


def main() -> None:
    folder, steps, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
    folder.mkdir(exist_ok=True)
    latest = folder / "latest"
    began = int(latest.read_text().rpartition("-")[2]) if latest.exists() else 0
    for step in range(began + 1, steps + 1):
        time.sleep(0.5)
        if began == 0 and step == HANGS_AT:
            hangs_here() if rank == 1 else waits_for_the_other_ranks()
        if rank == 0:
            print(f"iter {step}: loss {10 / step:.3f}, time 500.0ms", flush=True)
            if step % 10 == 0:
                latest.write_text(f"step-{step}")


main()
