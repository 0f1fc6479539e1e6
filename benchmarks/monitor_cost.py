"""What the monitor costs a node: share of one core after its start-up, and resident memory.

The real node.pyz with the real binding over the scripted driver (tests/fake_nvml), at its own intervals: 8 GPUs with
accounting, 8 ranks under their wrappers, a log that grows. The driver's calls take what they take on real ones: process
lists 4.5 ms, memory 12 us, utilization 2.5 us (MangoHud pull request 2104), power and energy 365 us (gpustat issue
76). Once they sleep all that time, once they spend it at work. Bars: 0.5 % of a core, 40 MB.

    python benchmarks/monitor_cost.py [SECONDS]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "wrapper"), str(ROOT / "tests")]

from llmlaunch.rendering.node_archive import node_archive  # noqa: E402
from support.node_rig import ATTEMPT, NODE, NodeRig, build  # noqa: E402

GPUS = RANKS = 8
START_UP_SECONDS = 15.0
LATENCIES = {
    "nvmlDeviceGetComputeRunningProcesses_v3": 4500,
    "nvmlDeviceGetMemoryInfo_v2": 12,
    "nvmlDeviceGetUtilizationRates": 3,
    "nvmlDeviceGetPowerUsage": 365,
    "nvmlDeviceGetTotalEnergyConsumption": 365,
    "nvmlDeviceGetAccountingStats": 12,
}
STEP_LINE = (
    " iteration {}/ 100000 | consumed samples: 1 | elapsed time per iteration (ms): 1000.0 | lm loss: 2.0E+00 |\n"
)


def scenario(pids: list[int], how: str) -> str:
    gpus = ["gpu accounting=1 util=97 power=600"] * GPUS
    processes = [f"proc {gpu} pid={pid} mem=70G" for gpu, pid in enumerate(pids)]
    return "\n".join([*gpus, *processes, *(f"{how} {call} us={us}" for call, us in LATENCIES.items()), ""])


def cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond (/proc/pid/stat counts hundredths of a second)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


class Node:
    """One monitor with its ranks and its driver."""

    def __init__(self, place: Path, archive: Path, library: Path, how: str) -> None:
        place.mkdir()
        self.rig = NodeRig(archive, place, library)
        self.how = how
        self.log = self.rig.run_directory / "logs" / f"{ATTEMPT}.{NODE}.log"
        self.log.parent.mkdir(parents=True)
        for rank in range(RANKS):
            self.rig.rank("sleep", "100000", rank=rank)
        pids = [self.rig.until_record(rank)["program_pid"] for rank in range(RANKS)]
        self.rig.scenario(scenario(pids, how))
        place_words = ("--run-dir", str(self.rig.run_directory), "--attempt", ATTEMPT, "--node", NODE)
        self.pid = self.rig.start("monitor", *place_words).pid  # as the node program starts it: its own intervals
        self.rig.until_event("start")

    def say_a_step(self, step: int) -> None:
        with self.log.open("a") as file:
            file.write(STEP_LINE.format(step))


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "node.pyz"
        archive.write_bytes(node_archive())
        library = build(Path(folder) / "driver")
        nodes = [Node(Path(folder) / how, archive, library, how) for how in ("slow", "spin")]
        time.sleep(START_UP_SECONDS)
        started_at, before = time.monotonic(), [cpu_seconds(node.pid) for node in nodes]
        for step in range(seconds):
            for node in nodes:
                node.say_a_step(step)
            time.sleep(max(0.0, started_at + step + 1 - time.monotonic()))
        elapsed = time.monotonic() - started_at
        for node, cpu in zip(nodes, before, strict=True):
            share = (cpu_seconds(node.pid) - cpu) / elapsed
            now, most = (memory_bytes(node.pid, name) / 1e6 for name in ("VmRSS", "VmHWM"))
            written = node.rig.peaks_path.stat().st_size / (elapsed + START_UP_SECONDS) * 86400 / 1e6
            how = "asleep" if node.how == "slow" else "at work"
            print(
                f"calls {how}: {share:.2%} of a core over {elapsed:.0f} s, {cpu:.2f} s at the start; "
                f"resident {now:.1f} MB, at most {most:.1f} MB; {written:.0f} MB written a day"
            )
            node.rig.close()


if __name__ == "__main__":
    main()
