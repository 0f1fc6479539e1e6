"""Fixtures for tests of the node side: the real node.pyz, with the real pynvml, over a scripted NVML library."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from llmlaunch.node.finish import Ending, finish
from llmlaunch.rendering.node_archive import OBSERVING, PROGRAMS, node_archive

SOURCE = Path(__file__).with_name("fake_nvml.c")
DISK_SOURCE = Path(__file__).with_name("faulty_disk.c")
GIB = 2**30
PATIENCE_SECONDS = 240.0  # for what will surely come on any machine; nothing is judged by how long it took
ATTEMPT = "17.0"
NODE = "node1"

Line = dict[str, Any]

# Prints what it hears; ends with 9 on SIGTERM.
LISTENER = """
import signal, sys, time
def hear(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(9)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, hear)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def run_archive(archive: Path, *arguments: str | Path, stdin: str = "", **options: Any) -> Any:
    """Run `node.pyz ARGUMENTS` to its end; `options` are subprocess.run's."""
    command = [options.pop("python", sys.executable), "-I", "-S", str(archive), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, **options)


def until(holds: Callable[[], Any], what: str) -> Any:
    """The first true answer of `holds`; fails the test when it never comes."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up_at:
        answer = holds()
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


def build(directory: Path, *defines: str) -> Path:
    """Compile the library into `directory` and return that."""
    directory.mkdir()
    name = "libnvidia-ml.so.1"
    _compile(SOURCE, directory / name, "-fvisibility=hidden", *defines, f"-Wl,-soname,{name}", "-lpthread")
    return directory


def build_disk(directory: Path) -> Path:
    """Compile the library that makes one folder's disk fail or hang; returns it."""
    library = directory / "faulty_disk.so"
    _compile(DISK_SOURCE, library, "-ldl")
    return library


def _compile(source: Path, library: Path, *options: str) -> None:
    compiler = shutil.which("cc")
    assert compiler, f"no C compiler for {source.name}: apt-get install gcc libc6-dev"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source), *options], check=True)


@contextlib.contextmanager
def said_on_stderr() -> Iterator[list[str]]:
    """Yield a list that has, at the end, what was written to descriptor 2 meanwhile."""
    said: list[str] = []
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said.append(file.read().decode())


def environment() -> dict[str, str]:
    """This process's variables, also while tests in other threads change them."""
    while True:
        with contextlib.suppress(KeyError, RuntimeError):
            return dict(os.environ)


def alive(pid: int) -> bool:
    """Whether `pid` runs: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class NodeRig:
    """One run directory, the processes started in it, and the scenario of its NVML."""

    def __init__(self, archive: Path, directory: Path, library: Path) -> None:
        self.archive = archive
        self.run_directory = directory / "run"
        self.scenario_path = directory / "scenario"
        self.calls_path = directory / "calls"
        self.python = sys.executable
        self.library = library
        self.processes: list[subprocess.Popen[str]] = []
        self.attempt_directory = self.run_directory / "attempts" / ATTEMPT
        self.place = ("--run-dir", str(self.run_directory), "--attempt", ATTEMPT)
        self.disk_path = directory / "disk"
        self.peaks_path = self.run_directory / "peaks" / f"{NODE}.jsonl"

    def write(self, name: str, content: Any) -> Path:
        """Write a file of the run directory, as JSON unless it is text."""
        path = self.run_directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def write_attempt(self, name: str, content: Any) -> Path:
        """Write a file of the attempt's folder."""
        return self.write(f"attempts/{ATTEMPT}/{name}", content)

    def status(self) -> Line:
        return dict(json.loads((self.run_directory / "status.json").read_text()))

    def scenario(self, text: str) -> None:
        """Replace the state of the GPUs in one step; the library sees it at its next call."""
        fresh = self.scenario_path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.scenario_path)

    def calls(self) -> dict[str, int]:
        """How often each function had been called when the scenario last changed, or at the end."""
        counts = (line.split() for line in self.calls_path.read_text().splitlines())
        return {function: int(count) for function, count in counts}

    def until_sampled(self, text: str) -> None:
        """Set the scenario, and wait until device memory was read under it, be it written down or not."""
        under = None
        for _ in range(1000):
            self.calls_path.unlink(missing_ok=True)
            self.scenario(text)
            until(self.calls_path.exists, "the new scenario to be read")
            now = self.calls().get("nvmlDeviceGetMemoryInfo_v2", 0)
            under = now if under is None else under
            if now >= under + 2:
                return
        raise AssertionError("device memory is not read any more")

    def disk(self, how: str) -> None:
        """What becomes of the run directory's disk, for those who were started with `faulty`: `hang`, an errno, or
        nothing."""
        fresh = self.disk_path.with_suffix(".new")
        fresh.write_text(how)
        fresh.replace(self.disk_path)

    def faulty(self, library: Path) -> dict[str, str]:
        """The environment of a process that meets that disk."""
        under = str(self.run_directory)
        return {"LD_PRELOAD": str(library), "FAULTY_UNDER": under, "FAULTY_HOW": str(self.disk_path)}

    def environment(self, **extra: str) -> dict[str, str]:
        dropped = ("LD_LIBRARY_PATH", "PYTHONPATH", "RANK", "LOCAL_RANK", "LLMLAUNCH_NODE_RANK", "CUDA_VISIBLE_DEVICES")
        return {
            **{name: value for name, value in environment().items() if name not in dropped},
            "LD_LIBRARY_PATH": str(self.library),
            "FAKE_NVML_SCENARIO": str(self.scenario_path),
            "FAKE_NVML_CALLS": str(self.calls_path),
            **extra,
        }

    def start(self, *arguments: str, **more: Any) -> Any:
        """Start `node.pyz ARGUMENTS`; it is ended with the test at the latest."""
        return self._start([str(self.archive), *arguments], **more)

    def _start(
        self,
        words: list[str],
        setup: Callable[[], object] | None = None,
        stderr: int | IO[bytes] = subprocess.PIPE,
        **environment: str,
    ) -> Any:
        process = subprocess.Popen(
            [self.python, "-I", "-S", *words],
            env=self.environment(**environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=setup,
        )
        self.processes.append(process)
        return process

    def monitor(self, *options: str, **more: Any) -> Any:
        """Start a monitor with short intervals."""
        quick = ("--interval", "0.02", "--list-interval", "0.1", "--beat-interval", "0.05", "--stall-after", "600")
        return self.start("monitor", *self.place, "--node", NODE, *quick, *options, **more)

    def started_monitor(self, scenario: str, *options: str) -> Any:
        """Start a monitor in this scenario and wait for its first line."""
        self.scenario(scenario)
        monitor = self.monitor(*options)
        self.until_event("start")
        return monitor

    def monitored(self, scenario: str, gibibytes: float, *options: str) -> Line:
        """The last line of a monitor that is stopped once it has written this much memory in use."""
        self.scenario(scenario)
        monitor = self.monitor(*options)
        self.until_used(gibibytes)
        return self.stop(monitor)

    def rank(self, *program: str, rank: int = 0, node: str = NODE, **more: Any) -> Any:
        """Start `program` as a node starts a rank (support/one_rank.py)."""
        script = str(Path(__file__).with_name("one_rank.py"))
        words = [script, str(self.archive), str(self.run_directory), ATTEMPT, node, *program]
        return self._start(words, RANK=str(rank), LOCAL_RANK=str(rank), **more)

    def finish(self, nodes: int, code: int, **ending: Any) -> tuple[int, Line, str]:
        """Judge the attempt, as its job does; return the job's exit code, status.json and what is said."""
        with said_on_stderr() as said:
            options = {"marker_seconds": 0.0, **ending}
            finished = finish(Ending(self.run_directory, ATTEMPT, nodes, code, **options))
        return finished.exit_code, self.status(), said[0]

    def done(self, *nodes: str) -> None:
        for node in nodes:
            marker = self.attempt_directory / "done" / node
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def lines(self) -> list[Line]:
        """Every whole line of the peaks file, as a reader sees it: torn ones skipped."""
        whole = []
        text = self.peaks_path.read_text() if self.peaks_path.exists() else ""
        for line in text.splitlines():
            try:
                whole.append(json.loads(line))
            except ValueError:
                continue
        return whole

    def until_line(self, what: str, holds: Callable[[Line], Any]) -> Line:
        """Wait for a line of the peaks file that `holds`."""
        return dict(until(lambda: [line for line in self.lines() if holds(line)], what)[-1])

    def until_event(self, event: str) -> Line:
        return self.until_line(event, lambda line: line["event"] == event)

    def until_used(self, gibibytes: float, index: int = 0) -> Line:
        """Wait until the monitor has seen and written this much memory in use."""
        wanted = int(gibibytes * GIB)
        return self.until_line(
            f"{gibibytes} GiB in use on GPU {index}",
            lambda line: line.get("gpus") and line["gpus"][index]["used_bytes"] == wanted,
        )

    def records(self) -> dict[int, Line]:
        """The last record of each rank that has one, of all nodes."""
        records = {}
        for path in sorted((self.attempt_directory / "ranks").glob("*.jsonl")):
            for line in path.read_text().split("\n"):
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    records[record["rank"]] = record
        return records

    def record(self, rank: int = 0) -> Line:
        return dict(self.records()[rank])

    def until_record(self, rank: int = 0) -> Line:
        until(lambda: rank in self.records(), f"record of rank {rank}")
        return self.record(rank)

    def write_rank(self, record: Line, attempt: str = ATTEMPT) -> Path:
        """Append a record as its node does; return the file."""
        path = self.run_directory / "attempts" / attempt / "ranks" / f"{record['node']}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"\n{json.dumps(record)}\n")
        return path

    def stop(self, process: Any) -> Line:
        """SIGTERM; the monitor must exit with 0. Returns its last line."""
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, stderr
        return self.lines()[-1]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        # What such a process had started may hold its pipes open, and would be waited for.
        mark = f"FAKE_NVML_CALLS={self.calls_path}".encode()
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone, or another user's
                if mark in (directory / "environ").read_bytes().split(b"\0"):
                    os.kill(int(directory.name), signal.SIGKILL)
        for process in self.processes:
            process.communicate()


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "node.pyz"
    path.write_bytes(node_archive((*PROGRAMS, *OBSERVING)))
    return path


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml") / "driver")


@pytest.fixture(scope="session")
def old_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml") / "old_driver", "-DOLD_DRIVER")


@pytest.fixture(scope="session")
def faulty_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_disk(tmp_path_factory.mktemp("disk"))


def _closed_after(rig: NodeRig) -> Iterator[NodeRig]:
    yield rig
    rig.close()


@pytest.fixture
def gpu_node(archive: Path, nvml_library: Path, tmp_path: Path) -> Iterator[NodeRig]:
    """A node whose driver answers as the scenario says."""
    yield from _closed_after(NodeRig(archive, tmp_path, nvml_library))


@pytest.fixture
def old_gpu_node(archive: Path, old_nvml_library: Path, tmp_path: Path) -> Iterator[NodeRig]:
    """The same with a driver older than R510."""
    yield from _closed_after(NodeRig(archive, tmp_path, old_nvml_library))


@pytest.fixture
def cpu_node(archive: Path, tmp_path: Path) -> Iterator[NodeRig]:
    """A node without NVML: what is found by that name, before a real one, is no library."""
    nothing = tmp_path / "no_nvml"
    nothing.mkdir()
    (nothing / "libnvidia-ml.so.1").write_text("not a library")
    yield from _closed_after(NodeRig(archive, tmp_path, nothing))
