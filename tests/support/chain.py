"""A run from recipe to store, as on a cluster: `submit --local`, job.sbatch, the programs of the job and the node, the
monitor with the real pynvml, `collect`, `measurements export`. The driver and the trainer (trainer.py) stand in.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support import judge
from support.forked_commands import run_forked
from support.node_rig import GIB, alive, environment, until

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "llama2-7b-deepspeed.yaml"
TRAINER = ROOT / "tests" / "faults" / "trainer.py"
# Of a call, as measured on a real driver (MangoHud pull request 2104); none of these is asked for the fan, 137 us.
LATENCIES = """\
slow nvmlDeviceGetComputeRunningProcesses_v3 us=4491
slow nvmlDeviceGetMemoryInfo_v2 us=12
slow nvmlDeviceGetUtilizationRates us=3
"""


@dataclass
class Gpu:
    """What the driver says of one GPU. It reserves half a GiB beside what is used."""

    uuid: str
    used_gib: float = 0.0
    pid: int | None = None
    peak_gib: float | None = None
    words: str = ""

    def lines(self, number: int, sliced: bool) -> str:
        used = 0 if self.pid else self.used_gib
        gpu = f"{'slice 0' if sliced else 'gpu'} uuid={self.uuid} used={used * 1024:.0f}M {self.words}\n"
        peak = "" if self.peak_gib is None else f" peak={self.peak_gib * 1024:.0f}M"
        index = number + 100 if sliced else number
        return gpu + (f"proc {index} pid={self.pid} mem={self.used_gib * 1024:.0f}M{peak}\n" if self.pid else "")


class Driver:
    """The scripted driver of one machine: so many GPUs with accounting on, or so many MIG slices of one, which have
    none."""

    def __init__(self, place: Path, devices: int, sliced: bool = False) -> None:
        self.path, self.sliced = place / "scenario", sliced
        kind, words = ("MIG", "total=80G") if sliced else ("GPU", "accounting=1")
        self.gpus = [Gpu(f"{kind}-{index}", words=words) for index in range(devices)]
        self.rules = LATENCIES
        self.tell()

    def tell(self) -> None:
        """In one step; the library sees it at its next call."""
        fresh = self.path.with_suffix(".new")
        whole = "gpu uuid=GPU-whole mig=1\n" if self.sliced else ""
        fresh.write_text(whole + "".join(gpu.lines(n, self.sliced) for n, gpu in enumerate(self.gpus)) + self.rules)
        fresh.replace(self.path)

    def asked(self, function: str = "nvmlDeviceGetMemoryInfo_v2") -> int:
        """How often a function had been called when the library last saw a new scenario."""
        path = self.path.with_name("calls")
        words = path.read_text().split() if path.exists() else []
        return int(words[words.index(function) + 1]) if function in words else 0

    def until_sampled(self, samples: int) -> None:
        """Wait for so many more samples of every GPU."""

        def now() -> int:
            self.tell()
            time.sleep(0.05)
            return self.asked()

        begun = now()
        until(lambda: now() >= begun + samples * len(self.gpus), f"{samples} samples")

    def hold(self, gib: float, pids: dict[int, int] | None = None) -> None:
        """Every GPU holds so much, those beyond the first one GiB more each: all peaks differ. `pids` are of whom."""
        for index, gpu in enumerate(self.gpus):
            gpu.used_gib, gpu.peak_gib = gib + index, max(gpu.peak_gib or 0, gib + index)
            gpu.pid = (pids or {}).get(index, gpu.pid)
        self.tell()


@dataclass
class Chain:
    """One run and its store, in `place`. Everything of it that still runs is killed by `close`."""

    place: Path
    library: Path
    devices: int = 2
    folder: Path | None = None  # where the run directory is made; `place` unless given
    quick: bool = True  # the monitor writes a line every tenth of a second instead of every ten seconds
    sliced: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = (self.folder or self.place) / "run"
        self.driver = Driver(self.place, self.devices, self.sliced)
        places = {"XDG_DATA_HOME": self.place / "data", "XDG_CACHE_HOME": self.place / "cache"}
        self.environment = {
            **environment(),
            **{name: str(path) for name, path in places.items()},
            "LD_LIBRARY_PATH": str(self.library),
            "FAKE_NVML_SCENARIO": str(self.driver.path),
            "FAKE_NVML_CALLS": str(self.place / "calls"),
            "LLMLAUNCH_PYTHON": sys.executable,
            "LLMLAUNCH_STORE": str(self.place / "store.db"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.place),  # what a killed script leaves there
            **self.variables,
        }
        if self.quick:
            self.environment["LLMLAUNCH_TEMPLATES"] = str(quick_templates(self.place))

    def words(self, trainer: Path = TRAINER) -> tuple[str, ...]:
        """Of the recipe."""
        return (
            "nodes=1", f"cluster={{base: a100-80gb-x8, devices_per_node: {self.devices}}}",
            "model={base: llama2-7b, num_layers: 4}", f"backend={{name: deepspeed, script: {trainer}}}",
            "layout={zero_stage: 2}", f"monitor.interval_seconds={0.1 if self.quick else 1}",
        )  # fmt: skip

    def start(self, *more: str, trainer: Path = TRAINER) -> Chain:
        """Submit it."""
        words = (str(RECIPE), *self.words(trainer), *more, "--local", "--json", "-o", str(self.run))
        done = self.llmlaunch("submit", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return self

    def train(self, gib: float = 40.0) -> Chain:
        """Wait until all ranks train and the monitor has written down that each holds so much."""
        until(lambda: len(self.ranks()) == self.devices, f"{self.devices} ranks")
        # what a GPU holds at the monitor's first look is counted as other people's
        self.driver.until_sampled(1)
        self.driver.hold(gib, {rank: record["program_pid"] for rank, record in self.ranks().items()})
        self.until_written(gib)
        return self

    def until_written(self, gib: float) -> None:
        """Wait for a line that says every GPU has held at least this."""
        until(lambda: self.peaks("process_peak_bytes") >= self.devices * gib * GIB, f"{gib} GiB on every GPU, written")

    def peaks(self, name: str) -> int:
        """The sum over the ranks of what is on disk."""
        return sum(peaks.get(name, 0) for peaks in self.on_disk().ranks.values())

    def on_disk(self) -> judge.OnDisk:
        return judge.on_disk(self.run)

    def ranks(self) -> dict[int, dict[str, Any]]:
        """The rank records of the newest attempt."""
        paths = self.run.glob("attempts/*/ranks/*.jsonl")
        return {record["rank"]: record for path in sorted(paths) for record in judge.lines(path)}

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of the monitor."""
        return [line for path in self.run.glob("peaks/*.jsonl") for line in judge.lines(path)]

    def pid(self, role: str) -> int | None:
        """Of the process that is `job`, `node`, `monitor` or `trainer N`; None where there is none (any more)."""
        name, _, rank = role.partition(" ")
        if name == "job":
            submission = json.loads((self.run / "submission.json").read_text())
            pid = int(submission["job_id"].rpartition("-")[2])
        elif rank:
            pid = self.ranks().get(int(rank), {}).get("program_pid") or 0
        else:
            found = [one for one in self.processes() if name in _command(one)[:5]]
            pid = found[0].pid if found else 0
        return pid if pid and alive(pid) else None

    def roles(self) -> list[str]:
        """Those of which there is a process."""
        names = ["job", "node", "monitor", *(f"trainer {rank}" for rank in range(self.devices))]
        return [name for name in names if self.pid(name)]

    def kill(self, *roles: str) -> judge.OnDisk:
        """SIGKILL them, one right after the other; what was on disk just before."""
        pids = [pid for role in roles if (pid := self.pid(role))]
        before = self.on_disk()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return before

    def processes(self) -> list[psutil.Process]:
        """The job and all that it started, as far as it still runs."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = process.environ().get("LLMLAUNCH_RUN_DIR") == str(self.run)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def stop(self) -> None:
        """Let the trainers end with exit code 0, and wait until nothing of the run is left."""
        (self.place / "stop").touch()
        self.wait()

    def wait(self) -> None:
        def over() -> bool:
            return not self.pid("job") and not self.processes()

        try:  # twice: a process that is becoming another one shows no environment
            until(lambda: over() and not time.sleep(0.1) and over(), "the end of the run")
        except AssertionError as error:
            left = [f"{one.pid} {' '.join(_command(one))}" for one in self.processes()]
            raise AssertionError("\n".join([str(error), *left, *self._told()])) from error

    def _told(self) -> list[str]:
        """The last lines of every log."""
        logs = sorted(path for path in self.run.rglob("*.log") if path.is_file())
        return [f"{path}:\n{path.read_text(errors='replace')[-2000:]}" for path in logs]

    def llmlaunch(self, *words: str) -> subprocess.CompletedProcess[str]:
        """In an interpreter of its own, which finds the stand-in library."""
        return subprocess.run(
            [sys.executable, "-m", "llmlaunch", *words],
            cwd=self.place, env=self.environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """All that the store has, after `collect` of this run."""
        return collect_and_export(self.run, self.environment)

    def judged(self, *faults: judge.OnDisk) -> list[dict[str, Any]]:
        """Collect twice, and judge: every peak that was on disk at a fault is in the store, once."""
        now = self.on_disk()
        first, again = self.records(), self.records()
        wrong = [one for before in (*faults, now) for one in judge.judge(self.run, before, now, first)]
        assert not wrong, "\n".join(wrong)
        changed = [(one, other) for one, other in zip(first, again, strict=False) if one != other]
        assert (len(again), changed) == (len(first), [])
        return first

    def close(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        job = self.pid("job") if (self.run / "submission.json").exists() else None
        if job:
            os.kill(job, signal.SIGKILL)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def collect_and_export(run: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """All that the store has, after `collect` of a run."""
    exported = run.with_name("exported.jsonl")
    for words in (("collect", run), ("measurements", "export", exported)):
        done = run_forked(tuple(map(str, words)), run.parent, environment)
        assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in exported.read_text().splitlines()]


def quick_templates(place: Path) -> Path:
    """The shipped job script, with a monitor that need not be waited for."""
    folder = place / "templates"
    folder.mkdir()
    text = (ROOT / "templates" / "job.sbatch.j2").read_text()
    words = '"--beat-interval", "0.1", "--list-interval", "0.2", "--interval"'
    quicker = f"""sed -i 's/"--interval"/{words}/' "$LLMLAUNCH_RUN_DIR/run.json"\n"""
    assert text.count("\nexec ") == 1
    (folder / "job.sbatch.j2").write_text(text.replace("\nexec ", f"\n{quicker}exec "))
    return folder
