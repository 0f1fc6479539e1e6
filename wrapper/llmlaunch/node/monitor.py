"""The monitor of one node: true memory peaks of its GPUs and ranks into `peaks/<node>.jsonl`.

It may be killed, hang in the driver or meet a full disk; the training beside it does not notice, and it always
exits with 0. Peaks are cumulative: any one line is enough.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .files import say
from .peaks import PeaksFile
from .processes import RankProcesses
from .sampler import NvmlSampler
from .signals import die_with_parent, hold_end_signals, signal_name

if TYPE_CHECKING:
    from .files import Record

LAST_SAMPLE_SECONDS = 1.5  # how long the end waits for the driver
START_POLL_SECONDS = 0.05
# Where no peak moved by a step since the last line, every sixth beat is enough: a day of eight GPUs and eight
# ranks is then 5 MB instead of 28, and not a peak is lost.
STEP_BYTES = 64 * 2**20
QUIET_BEATS = 6


def main(argv: list[str]) -> int:
    """Monitor until SIGTERM, or until the parent ends. Returns 0 whatever happens."""
    ends = hold_end_signals()
    try:
        options = _arguments(argv)
        os.nice(10)
        die_with_parent(signal.SIGTERM)
        Monitor(options, ends).run()
    except SystemExit:
        pass  # a wrong argument; argparse has said which
    except Exception as error:
        say(f"monitor: {type(error).__name__}: {error}; the training goes on without it")
    return 0


class Monitor:
    """The one writer: takes signals, reads /proc, and writes what the sampler saw."""

    def __init__(self, options: argparse.Namespace, ends: frozenset[signal.Signals]) -> None:
        self._options = options
        self._ends = ends
        self._peaks = PeaksFile(options.run_dir / "peaks" / f"{options.node}.jsonl")
        node_rank = os.environ.get("LLMLAUNCH_NODE_RANK", "")
        self._ranks = RankProcesses(
            options.run_dir, options.attempt, options.node, int(node_rank) if node_rank.isdigit() else None
        )
        self._sampler = NvmlSampler(options.interval, options.list_interval)
        self._started_at = time.monotonic()
        self._stalled = False

    def run(self) -> None:
        self._sampler.start()
        number = self._until_ready()
        self._write_events()
        self._write("start", self._start_fields(), sync=True)
        if number is None:
            number = self._until_signal()
        answered = self._sampler.finish(LAST_SAMPLE_SECONDS)
        self._ranks.sample()
        self._ranks.reread()
        self._write_events()
        self._write("end", self._end_fields(number, answered), sync=True)

    def _until_ready(self) -> int | None:
        """Wait for the driver to say what there is, or for as long as a stall may last."""
        while not self._sampler.ready and self._sampler.waiting_seconds() < self._options.stall_after:
            number = self._wait(START_POLL_SECONDS)
            if number is not None:
                return number
        return None

    def _until_signal(self) -> int:
        """Sample and write until told to end; returns the signal."""
        now = tick = reread_at = written_at = beat_at = time.monotonic()
        written = self._coarse_peaks()
        while True:
            self._ranks.sample()
            self._sampler.rank_pids = self._ranks.pids
            if now >= reread_at:
                self._ranks.reread()
                reread_at = now + self._options.list_interval
            self._write_events()
            if now - beat_at >= self._options.beat_interval:
                beat_at, coarse = now, self._coarse_peaks()
                if coarse != written or now - written_at >= QUIET_BEATS * self._options.beat_interval:
                    self._write("beat", self._peak_fields())
                    written, written_at = coarse, now
            tick = max(tick + self._options.interval, time.monotonic())
            number = self._wait(tick - time.monotonic())
            if number is not None:
                return number
            now = time.monotonic()

    def _wait(self, seconds: float) -> int | None:
        told = signal.sigtimedwait(self._ends, max(0.0, seconds))
        return told.si_signo if told is not None else None

    def _write_events(self) -> None:
        for event in self._sampler.events():
            self._write(event.pop("event"), event, sync=True)
        waiting = self._sampler.waiting_seconds()
        if (waiting >= self._options.stall_after) != self._stalled:
            self._stalled = not self._stalled
            name = "nvml_stalled" if self._stalled else "nvml_back"
            self._write(name, {"waiting_seconds": round(waiting, 3)}, sync=True)

    def _write(self, event: str, fields: Record, sync: bool = False) -> None:
        base = {"v": 1, "event": event, "attempt": self._options.attempt, "node": self._options.node}
        self._peaks.append({**base, "time": time.time(), **fields}, sync)

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
            "dropped": self._peaks.dropped,
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


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.pyz monitor")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--node", required=True)
    for name, default, meaning in (
        ("--interval", 1.0, "between memory samples"),
        ("--list-interval", 30.0, "between process lists"),
        ("--beat-interval", 10.0, "between lines while peaks rise"),
        ("--stall-after", 30.0, "in one call, to name it a stall"),
    ):
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=meaning)
    return parser.parse_args(argv)
