"""From the start of a job to the first line of its first rank: `bash job.sbatch` against torchrun alone.

The trainer is one line of Python without torch, started as two ranks on this machine, so that only what starts them is
timed. torchrun imports torch; llmlaunch's two programs also keep a log and start a monitor, and import no torch. They
run in turn, and the first pair is left out because it fills caches.

    python benchmarks/first_line.py [PAIRS]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RATIO_BAR = 0.5
LINE = "step 1/1 | loss 1.0"
TRAINER = f"print({LINE!r}, flush=True)\n"


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    folder = Path(tempfile.mkdtemp(prefix="llmlaunch-first-line-"))
    trainer, run = folder / "trainer.py", folder / "run"
    trainer.write_text(TRAINER)
    backend = json.dumps({"name": "deepspeed", "script": str(trainer)})
    words = (f"backend={backend}", f"python={sys.executable}", "training.steps=1", "restart=none", "-o", str(run))
    render = [sys.executable, "-m", "llmlaunch", "render", str(ROOT / "recipes" / "quickstart.yaml"), *words]
    subprocess.run(render, check=True, stdout=subprocess.DEVNULL)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(trainer)]
    log = folder / "torchrun.log"

    def of_job() -> str:
        return "".join(path.read_text() for path in run.glob("logs/*") if path not in before)

    taken = []
    try:
        for _ in range(pairs + 1):
            before = set(run.glob("logs/*"))
            ours = seconds_to_first_line(["bash", str(run / "job.sbatch")], Path(os.devnull), of_job)
            log.unlink(missing_ok=True)
            taken.append((ours, seconds_to_first_line(torchrun, log, log.read_text)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratio = statistics.median(ours / theirs for ours, theirs in taken[1:])
    ours, theirs = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    print(f"first line after {ours:.2f} s, with torchrun alone {theirs:.2f} s: {ratio:.2f} (bar {RATIO_BAR})")
    sys.exit(ratio > RATIO_BAR)


def seconds_to_first_line(command: Sequence[str], output: Path, printed: Callable[[], str]) -> float:
    """Start the command, wait for its end, and return when `printed` had the line."""
    with output.open("w") as file:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while LINE not in printed():
            if process.poll() is not None and LINE not in printed():
                raise RuntimeError(f"{command[0]} ended with {process.returncode} without the line")
            time.sleep(0.01)
        seconds = time.monotonic() - began
        process.wait()
    return seconds


if __name__ == "__main__":
    main()
