"""A week of a training on 128 nodes, simulated: the job's rendered script and the real node.pyz decide, on a clock that
jumps from event to event; SLURM, the nodes and their trainers are simulated (cluster.py, training.py).

    python benchmarks/week [--nodes 128] [--days 7] [--seed 1] [--json FILE]

Exit code 1 where an invariant is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import py_compile
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "wrapper"), str(ROOT / "tests"), str(HERE)]

from clock import SimulatedClock, Timer, kill_all  # noqa: E402
from cluster import Cluster, build  # noqa: E402
from training import ECC_ERROR, PROGRAM_ERROR, Job, Training  # noqa: E402

from llmlaunch.rundir.files import read_object  # noqa: E402
from llmlaunch.rundir.goodput import goodput_of  # noqa: E402
from llmlaunch.rundir.run import begun_attempts  # noqa: E402

BEGAN = 1_767_571_200.0  # Monday, 5 January 2026
DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
LOOK_SECONDS = 300.0  # between two looks of the watchdog in quiet times; else as often as it asks
# Llama 3: 419 unplanned stops in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4), ten times as often.
GPU_HOURS_BETWEEN_STOPS = 54 * 24 * 16384 / 419 / 10
SHARES = {
    "crash": 0.50,
    "node loss": 0.25,
    "hang": 0.05,
    "slow node": 0.05,
    "NaN": 0.05,
    "bad checkpoint": 0.05,
    "full disk": 0.05,
}
BAD_GPU_SHARE = 0.3  # of crashes: the GPU says so (Llama 3: 30 % of all stops were faulty GPUs)
AGAIN_SHARE = 0.25  # of crashes: on a node that crashed before and still trains
REPAIR_SECONDS = DAY
DISK_FULL_INTERVALS = (2 / 3, 4 / 3)  # between saves: 20 to 40 minutes
MODELS = {128: ("llama3-70b", 2048), 8: ("llama3-8b", 512)}
STEP_SECONDS = {128: 14.4, 8: 6.0}  # as planned for them, to the tenth
SPARE_NODES = {128: 4, 8: 1}
OTHER_NODES = {128: 12, 8: 4}  # of the partition, beside those of the job
SAVE_MINUTES, NON_PERSISTENT_MINUTES = 30.0, 5.0
# Of Llama 3 70B on 1,856 GPUs, which a save held up for 0.78 s (pytorch.org/blog/6x-faster-async-checkpointing).
WRITE_SECONDS = 67.0
FRUITLESS = 8  # saves that fail in a row on a full disk
LONGEST_DECISION_SECONDS = 30.0
UNWRITTEN_SECONDS = 10.0  # between two looks of the watchdog, and two of its records


@dataclass
class Stop:
    """A fault that was let loose, and what it cost."""

    kind: str
    at: float
    lost_steps: int = 0
    seconds: float = 0.0  # until the next step


@dataclass
class Ledger:
    """The simulator's own account."""

    stops: list[Stop] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    ended: str = ""


class Week:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.clock = SimulatedClock(folder, BEGAN, LOOK_SECONDS)
        run = render(folder, options)
        described = read_object(run / "run.json") or {}
        plan = read_object(run / "plan.json") or {}
        expected = plan["job"]["expected"]
        self.plan_goodput = expected["goodput"]
        self.job = Job(
            clock=self.clock,
            random=random.Random(options.seed + 1),
            run_directory=run,
            checkpoints=Path(described["checkpoint"]["path"]),
            devices=int(described["devices_per_node"]),
            step_seconds=STEP_SECONDS[options.nodes],
            steps=int(described["progress"]["steps"]),
            save_interval=int(described["checkpoint"]["interval"]),
            non_persistent_interval=interval_steps(options.non_persistent_minutes, options.nodes),
            patterns=(described["progress"]["step_patterns"], described["progress"].get("slow_patterns")),
            pause_seconds=float(expected["save_seconds"]),
            write_seconds=WRITE_SECONDS,
        )
        nodes = options.nodes + SPARE_NODES[options.nodes] + OTHER_NODES[options.nodes]
        environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "LLMLAUNCH_PYTHON": str(Path(sys._base_executable).resolve()),  # type: ignore[attr-defined]
            "MEGATRON_LM_PATH": "/opt/Megatron-LM",
            "LC_ALL": "C.UTF-8",
            **self.clock.environment,
        }
        names = [f"n{number:03}" for number in range(1, nodes + 1)]
        self.cluster = Cluster(self.clock, self.job, names, options.nodes + SPARE_NODES[options.nodes], environment)
        self.cluster.trains = self._trains
        self.cluster.over = self._over
        self.ledger = Ledger()
        self._crashed: list[str] = []
        self._exposure = self._next_exposure()
        self._exposed_since = 0.0
        self._strike: Timer | None = None
        self._training: Training | None = None
        self._reached = 0
        self._save_seconds = options.save_minutes * MINUTE
        self._until = BEGAN + options.days * DAY

    # --- stops -----------------------------------------------------------------------------------------------

    def _next_exposure(self) -> float:
        """Seconds of the job's training until its next stop."""
        if self.options.each_minutes is not None:
            return float(self.options.each_minutes) * MINUTE
        return self.random.expovariate(self.options.nodes * 8 / GPU_HOURS_BETWEEN_STOPS / HOUR)

    def _trains(self, training: Training) -> None:
        """A new training step of the job has begun: count what the stop before it has cost."""
        if training.attempt in self.ledger.attempts:
            self.ledger.violations.append(f"two training steps have the name {training.attempt}")
        self.ledger.attempts.append(training.attempt)
        if self._training is not None:
            self._pause()
            lost = max(0, self._reached - training.loaded_step)
            stop = self.ledger.stops[-1] if self.ledger.stops else Stop("none", BEGAN)
            stop.lost_steps = max(stop.lost_steps, lost)
            self._check_loss(stop, lost)
        self._training = training
        self._exposed_since = self.clock.now
        self._strike = self.clock.after(self._exposure, self._stop_something)

    def _pause(self) -> None:
        """Nothing fails while nothing trains."""
        before = self._training
        if before is not None and self._strike is not None and not self._strike.cancelled:
            self._strike.cancel()
            self._exposure = max(1.0, self._strike.at - self.clock.now)
        if before is not None and before.last_step is not None:
            self._reached = max(before.last_step, before.loaded_step)

    def _check_loss(self, stop: Stop, lost: int) -> None:
        """No more is lost than the steps between two saves and those while the last checkpoint was being written."""
        beside = int(self.job.write_seconds / self.job.step_seconds) + 1
        often = self.job.non_persistent_interval or self.job.save_interval
        most = often + beside
        if stop.kind in ("bad checkpoint", "full disk"):
            most += often
        elif stop.kind == "NaN":
            most += self.job.save_interval  # the newest was saved after the bad step, in place of the one before
        if lost > most:
            self.ledger.violations.append(
                f"{stop.kind} at {self._clock_text(stop.at)} cost {lost} steps, more than {most}"
            )

    def _stop_something(self) -> None:
        training = self.cluster.training
        self._exposure = self._next_exposure()
        self._strike = self.clock.after(self._exposure, self._stop_something)
        if training is None or not training.active or self.clock.now > self._until:
            return
        if self.options.each_minutes is not None:
            kind = list(SHARES)[len(self.ledger.stops) % len(SHARES)]
        else:
            kind = self.random.choices(list(SHARES), list(SHARES.values()))[0]
        self.ledger.stops.append(Stop(kind, self.clock.now))
        if self.options.verbose:
            print(f"{self._clock_text(self.clock.now)} {kind} at step {training.last_step}", flush=True)
        rank = self.random.randrange(training.world)
        if kind == "crash":
            self._crash(training, rank)
        elif kind == "node loss":
            allocated = [node for node in self.cluster.allocation if node not in self.job.down]
            self.cluster.lose(self.random.choice(allocated), REPAIR_SECONDS)
        elif kind == "hang":
            training.hang(rank, answers=self.random.random() < 0.5)
        elif kind == "slow node":
            node = self.random.choice(training.order)
            self.job.slow[node] = self.clock.now
            self.clock.watch_closely(15 * MINUTE)
            self.clock.after(REPAIR_SECONDS, lambda: self.job.slow.pop(node, None))
        elif kind == "NaN":
            training.turn_nan()
        elif kind == "bad checkpoint":
            training.damage_newest_checkpoint(cut=self.random.random() < 0.5)
            self._crash(training, rank)
        else:
            self.job.disk_full_until = self.clock.now + self._save_seconds * self.random.uniform(*DISK_FULL_INTERVALS)

    def _crash(self, training: Training, rank: int) -> None:
        again = [node for node in self._crashed if node in training.order]
        if again and self.random.random() < AGAIN_SHARE:
            rank = training.order.index(self.random.choice(again)) * self.job.devices + rank % self.job.devices
        self._crashed.append(training.node_of(rank))
        training.crash(rank, ECC_ERROR if self.random.random() < BAD_GPU_SHARE else PROGRAM_ERROR)

    def _over(self, code: int) -> None:
        status = read_object(self.job.run_directory / "status.json") or {}
        why = (status.get("next") or {}).get("why") or status.get("why")
        self.ledger.ended = f"the job ended for good on {self._clock_text(self.clock.now)} with {code}: {why}"
        self.ledger.violations.append(self.ledger.ended)

    def _clock_text(self, at: float) -> str:
        seconds = int(at - BEGAN)
        return f"day {seconds // 86400 + 1}, {seconds // 3600 % 24:02}:{seconds // 60 % 60:02}"

    # --- the week --------------------------------------------------------------------------------------------

    def run(self) -> None:
        time.time = lambda: self.clock.now  # of llmlaunch's own writers in this process
        self.cluster.start()
        self.clock.run(self._until)

    def result(self) -> dict[str, object]:
        cluster, ledger, job = self.cluster, self.ledger, self.job
        training = cluster.training
        reached = training.last_step if training is not None and training.last_step is not None else self._reached
        useful_steps = sum(step <= reached for step in job.useful)
        allocated = cluster.allocated_seconds + cluster.running_seconds()
        product = goodput_of(begun_attempts(job.run_directory))
        own = useful_steps * job.step_seconds / allocated
        if self.clock.longest_decision_seconds > LONGEST_DECISION_SECONDS:
            ledger.violations.append(f"a decision took {self.clock.longest_decision_seconds:.0f} s of this machine")
        # of each attempt that is stopped, llmlaunch may not have written down the last few steps
        apart = max(0.005, UNWRITTEN_SECONDS * len(ledger.attempts) / allocated)
        if product.share is None or abs(product.share - own) > apart:
            ledger.violations.append(f"llmlaunch counts a goodput of {product.share}, the simulator {own:.4f}")
        return {
            "seed": self.options.seed,
            "nodes": self.options.nodes,
            "spare_nodes": SPARE_NODES[self.options.nodes],
            "days": self.options.days,
            "save_minutes": self.options.save_minutes,
            "gpu_hours_between_stops": GPU_HOURS_BETWEEN_STOPS,
            "at": reproduction(),
            "goodput": product.share,
            "own_goodput": own,
            "product": product.as_json(),
            "allocated_seconds": allocated,
            "queue_seconds": cluster.queue_seconds,
            "queue_waits": cluster.queue_waits,
            "attempts": len(ledger.attempts),
            "step_seconds": job.step_seconds,
            "save_interval": job.save_interval,
            "non_persistent_minutes": self.options.non_persistent_minutes,
            "non_persistent_interval": job.non_persistent_interval,
            "pause_seconds": job.pause_seconds,
            "write_seconds": job.write_seconds,
            "useful_steps": useful_steps,
            "stops": Counter(stop.kind for stop in ledger.stops),
            "each_stop": [asdict(stop) for stop in ledger.stops],
            "most_lost_steps": {
                kind: max(stop.lost_steps for stop in ledger.stops if stop.kind == kind)
                for kind in {stop.kind for stop in ledger.stops}
            },
            "longest_decision_seconds": self.clock.longest_decision_seconds,
            "violations": [*ledger.violations, *cluster.violations],
        }


def interval_steps(minutes: float, nodes: int) -> int:
    return round(minutes * MINUTE / STEP_SECONDS[nodes])


def render(folder: Path, options: argparse.Namespace) -> Path:
    """Render the run as a person would."""
    model, batch = MODELS[options.nodes]
    recipe = {
        "schema": 1,
        "name": "week",
        "model": model,
        "backend": "megatron-lm",
        "cluster": "h100-80gb-x8",
        "nodes": options.nodes,
        "spare_nodes": SPARE_NODES[options.nodes],
        "training": {
            "sequence_length": 8192,
            "global_batch_size": batch,
            "steps": 1_000_000,
            "precision": "bf16",
            "save_interval": interval_steps(options.save_minutes, options.nodes),
            "non_persistent_save_interval": interval_steps(options.non_persistent_minutes, options.nodes) or None,
            "checkpoint_path": str(folder / "checkpoints"),
            "keep_checkpoints": 8,
            "async_save": True,
        },
        "data": {"mock": True},
        "restart": {"times": 1000, "fruitless": FRUITLESS, "slow_nodes": "replace"},
        "on_bad_loss": {"action": "rollback", "times": 100},
        "notify": {"command": ["/bin/true"]},
        "slurm": {"time": "14-00:00:00", "partition": "gpu"},
    }
    source, run = folder / "recipe.yaml", folder / "run"
    source.write_text(json.dumps(recipe))  # JSON is YAML
    command = [sys.executable, "-m", "llmlaunch", "render", str(source), "-o", str(run)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "wrapper"), "LLMLAUNCH_STORE": str(folder / "store.db")}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    add_compiled(run / "node.pyz")
    return run


def add_compiled(archive: Path) -> None:
    """Add the compiled modules to node.pyz: else each of the job's thousand processes would compile them anew."""
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(archive, "a") as file:
        for name in [name for name in file.namelist() if name.endswith(".py")]:
            source = file.extract(name, temporary)
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(source, f"{source}c", f"{archive}/{name}", True, invalidation_mode=unchecked)
            file.write(f"{source}c", f"{name}c")


def reproduction() -> list[str]:
    """What made this result, for whoever wants to see it again."""
    bash = subprocess.run(["bash", "--version"], capture_output=True, text=True, check=True).stdout
    commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    head = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    return [f"llmlaunch at commit {head}", f"Python {platform.python_version()}", bash.partition("(")[0].strip()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=128, choices=sorted(MODELS))
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--each-minutes", type=float, help="one stop of each kind in turn, after so many minutes of training"
    )
    parser.add_argument("--save-minutes", type=float, default=SAVE_MINUTES)
    parser.add_argument(
        "--non-persistent-minutes", type=float, default=NON_PERSISTENT_MINUTES, help="between two of these; 0: none"
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--keep", type=Path, help="an empty folder in which everything stays")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # what is written lasting need not be
    with tempfile.TemporaryDirectory(prefix="llmlaunch-week-", dir=memory) as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        build(folder, HERE)
        week = Week(folder, options)
        try:
            week.run()
            result = week.result()
        finally:
            kill_all(os.getpid())
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "each_stop"}, indent=1))
    return int(bool(result["violations"]))


if __name__ == "__main__":
    sys.exit(main())
