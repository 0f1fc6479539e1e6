"""The monitor of one node: true memory peaks of its GPUs and ranks into `peaks/<node>.jsonl`.

It may be killed, hang in the driver or in the file system, or meet a full disk; the training beside it does not
notice, and it always exits with 0. Peaks are cumulative: any one line is enough, and what a disk refuses today the next
line carries.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from ..rundir import file_names
from .files import PeaksFile, command_parser, node_log_tail, say
from .host_memory import HostMemory
from .line_writer import DiskThread, LineWriter
from .nvml_sampler import NvmlSampler, load_small
from .rank_memory import LoggedPeaks, RankProcesses, RankRecords
from .signals import die_with_parent, hold_end_signals, signal_name
from .window_clock import WINDOW_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from .files import Record

# How long the end waits for the file system, for the driver, and for the file system again. The node kills after 5 s.
LAST_LOOK_SECONDS, LAST_SAMPLE_SECONDS, LAST_LINE_SECONDS = 0.7, 1.5, 1.5
START_POLL_SECONDS = 0.05
# Where no peak moved by a step since the last line, every sixth beat is enough: a day of eight GPUs and eight
# ranks is then 9 MB instead of 50, and not a peak is lost.
STEP_BYTES = 64 * 2**20
QUIET_BEATS = 6
LEAP_STEPS = 16  # a peak that rose by 1 GiB is written at once: peaks only rise, so that is 80 times a GPU at most


def main(argv: list[str]) -> int:
    """Monitor until SIGTERM, or until the parent ends. Returns 0 whatever happens."""
    ends = hold_end_signals()
    try:
        options = _arguments(argv)
        os.nice(10)
        die_with_parent(signal.SIGTERM, options.parent)
        with contextlib.suppress(Exception):  # else the sampler finds out what is wrong with it
            load_small("pynvml")
        Monitor(options, ends).run()
    except SystemExit:
        pass  # a wrong argument; argparse has said which
    except Exception as error:
        say(f"monitor: {type(error).__name__}: {error}; the training continues without it")
    return 0


class Monitor:
    """The main thread: takes signals, reads /proc, and puts together what the thread of the driver and the thread of
    the run directory have seen. It never waits for either."""

    def __init__(self, options: argparse.Namespace, ends: frozenset[signal.Signals]) -> None:
        self._options = options
        self._ends = ends
        self._records = RankRecords(options.run_dir, options.attempt, options.node)
        self._ranks = RankProcesses()
        self._host = HostMemory()
        log = file_names.node_log(options.run_dir, options.attempt, options.node)
        self._log = node_log_tail(log, same_node=True)
        self._logged = LoggedPeaks()
        self._logged_records: list[Record] = []  # replaced, never changed
        self._sampler = NvmlSampler(options.interval, options.list_interval, options.pace_window)
        self._disk = DiskThread()
        peaks = PeaksFile(options.run_dir / file_names.PEAKS / f"{options.node}.jsonl")
        self._writer = LineWriter(self._disk, peaks, retry_seconds=options.beat_interval)
        self._started_at = time.monotonic()
        self._stalled = False

    def follow_log(self, path: Path, offset: int) -> None:
        """Read the peaks that the ranks print from this log, from `offset` on, in place of the node's own."""
        self._log = node_log_tail(path, offset)  # another node may write it

    def run(self) -> None:
        """Monitor until a signal."""
        self._sampler.start()
        self._disk.start()
        self._disk.give(self._look)
        self._host.sample_cgroup()
        number = self._until_ready()
        self._sample_node()
        self._write_events()
        self._write("start", self._start_fields(), sync=True)
        if number is None:
            number = self._until_signal()
        self._end(number)

    def _until_ready(self) -> int | None:
        """Wait for the driver to say what there is, or for as long as a stall may last."""
        while not self._sampler.ready and self._sampler.waiting_seconds() < self._options.stall_after:
            number = self._wait(START_POLL_SECONDS)
            if number is not None:
                return number
        return None

    def _until_signal(self) -> int:
        """Sample and write until told to end; returns the signal."""
        now = tick = look_at = written_at = beat_at = time.monotonic()
        written = self._coarse_peaks()
        while True:
            look_again = self._sample_node() or now >= look_at
            if now >= look_at:
                look_at = now + self._options.list_interval
                self._host.sample_cgroup()
            if self._disk.idle:
                self._disk.give(self._look if look_again else self._look_for_ranks)
            self._write_events()
            coarse, beat = self._coarse_peaks(), now - beat_at >= self._options.beat_interval
            leap = _largest_rise(written, coarse) >= LEAP_STEPS
            beat_at = now if beat else beat_at
            if leap or (beat and (coarse != written or now - written_at >= QUIET_BEATS * self._options.beat_interval)):
                self._write("beat", self._peak_fields(), sync=leap)
                written, written_at = coarse, now
            self._writer.settle()
            tick = max(tick + self._options.interval, time.monotonic())
            number = self._wait(tick - time.monotonic())
            if number is not None:
                return number
            now = time.monotonic()

    def _end(self, number: int) -> None:
        self._disk.give(self._look)
        self._disk.finish(LAST_LOOK_SECONDS)
        self._sample_node()
        self._host.sample_cgroup()
        answered = self._sampler.finish(LAST_SAMPLE_SECONDS)
        self._write_events()
        self._write("end", self._end_fields(number, answered), sync=True)
        if not self._writer.finish(LAST_LINE_SECONDS):
            say("monitor: the run directory cannot be written; what was measured since its last line is lost")

    def _sample_node(self) -> bool:
        """What is cheap and comes from this node's own kernel; True where a rank has just ended."""
        self._ranks.update(self._records.records)
        ended = self._ranks.sample()
        self._host.sample()
        self._sampler.rank_pids = self._ranks.pids
        if ended:
            self._sampler.list_soon()
        return ended

    # in the thread of the run directory

    def _look(self) -> None:
        self._look_for_ranks()
        self._logged.take(self._log.lines())
        self._logged_records = self._logged.records()

    def _look_for_ranks(self) -> None:
        self._records.look()

    def _wait(self, seconds: float) -> int | None:
        info = signal.sigtimedwait(self._ends, max(0.0, seconds))
        return info.si_signo if info is not None else None

    def _write_events(self) -> None:
        for event in self._sampler.events():
            name = event.pop("event")
            self._write(name, event, sync=name != "pace")
        waiting = self._sampler.waiting_seconds()
        if (waiting >= self._options.stall_after) != self._stalled:
            self._stalled = not self._stalled
            name = "nvml_stalled" if self._stalled else "nvml_back"
            self._write(name, {"waiting_seconds": round(waiting, 3)}, sync=True)

    def _write(self, event: str, fields: Record, sync: bool = False) -> None:
        base = {"v": 1, "event": event, "attempt": self._options.attempt, "node": self._options.node}
        self._writer.put({**base, "time": time.time(), **fields}, sync)

    def _coarse_peaks(self) -> list[int]:
        """Every peak in steps of STEP_BYTES."""
        gpus = self._sampler.gpus
        peaks = [gpu["device_peak_bytes"] for gpu in gpus]
        for kind in ("process_peak_bytes", "accounting_peak_bytes"):
            peaks += [peak for gpu in gpus for peak in gpu[kind].values()]
        peaks += [process["resident_peak_bytes"] for process in self._ranks.records()]
        return [(peak or 0) // STEP_BYTES for peak in peaks]

    def _peak_fields(self) -> Record:
        return {
            "gpus": self._sampler.gpus,
            "processes": self._ranks.records(),
            "host": self._host.record(),
            "logged": self._logged_records,
            "dropped": self._writer.dropped,
        }

    def _start_fields(self) -> Record:
        return {
            "pid": os.getpid(),
            "driver": self._sampler.driver,
            "interval_seconds": self._options.interval,
            **self._peak_fields(),
        }

    def _end_fields(self, number: int, answered: bool) -> Record:
        return {
            "signal": signal_name(number),
            "nvml_answered": answered,
            "cpu_seconds": round(time.process_time(), 3),
            "wall_seconds": round(time.monotonic() - self._started_at, 3),
            **self._peak_fields(),
        }


def _largest_rise(before: list[int], now: list[int]) -> int:
    """Return the largest increase between two lists of peaks. A new entry counts from zero; entries after it are then
    compared out of step, which at worst writes one extra line."""
    padded = before + [0] * (len(now) - len(before))
    return max((peak - old for old, peak in zip(padded, now)), default=0)


def monitor_options(run_directory: Path, attempt: str, node: str, interval: float) -> argparse.Namespace:
    place = ["--run-dir", str(run_directory), "--attempt", attempt, "--node", node]
    return _arguments([*place, "--interval", str(interval)])


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("monitor")
    parser.add_argument("--node", required=True)
    parser.add_argument("--parent", type=int, default=0, metavar="PID", help="end when the parent is another")
    for name, default, meaning in (
        ("--interval", 1.0, "between memory samples"),
        ("--list-interval", 30.0, "between process lists"),
        ("--beat-interval", 10.0, "between lines while peaks rise"),
        ("--pace-window", WINDOW_SECONDS, "of one line on the pace of GPUs"),
        ("--stall-after", 30.0, "in one call of the driver, to name it a stall"),
    ):
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=meaning)
    return parser.parse_args(argv)
