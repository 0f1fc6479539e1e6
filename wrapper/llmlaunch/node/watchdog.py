"""The watchdog beside the training step, on the batch host: it notes the progress, judges the loss, names slow devices,
ends the step when it hangs, and looks for the stop file.

Whatever goes wrong in here ends the watchdog with one line, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.attempt import Attempt
from ..rundir.file_names import attempt_folder
from ..rundir.files import read_object, replace_json
from ..rundir.rank_records import rank_files, rank_records
from ..rundir.stack_files import ranks_stacks
from ..rundir.step_lines import StepLines
from ..rundir.values import number
from .allocation import replaceable_nodes
from .checkpoint import durable_step, read_tracker
from .files import command_parser, say
from .loss_judge import LossJudge
from .notice_texts import first_step_text, stall_text
from .notices import notify
from .pace_watch import PaceWatch
from .process_tree import Process, descendants, kill_tree
from .progress import NodeLogs, StepTracker
from .prune import Pruner, kept_count
from .restart_policy import may_restart_here
from .signals import die_with_parent, hold_end_signals
from .stacks import where_they_stand
from .window_clock import WINDOW_SECONDS

if TYPE_CHECKING:
    from ..rundir.step_lines import Step
    from .files import Record

WRITE_SECONDS = 5.0  # between two progress.json
DUMP_SECONDS = 20.0  # for stacks and flight recorder
TERM_SECONDS = 60.0  # from TERM to KILL
STOOD_STILL_SECONDS = 10.0
LINGER_SECONDS = 10.0  # from the last node's end to the launcher's, before the job is judged without it
# From the first node's failure to the others' ends, before their step is ended; and from its TERM to its KILL: srun
# waits for a node that is gone until SLURM has noticed.
BEHIND_SECONDS, BEHIND_TERM_SECONDS = 10.0, 5.0


def main(argv: list[str]) -> int:
    """Watch until the child is gone, or TERM. Always returns 0."""
    ends = hold_end_signals()
    try:
        options = _arguments(argv)
        parent = os.getppid()
        die_with_parent(signal.SIGTERM)
        if os.getppid() == parent:
            AttemptWatchdog(options).watch(ends)
    except Exception as error:  # whatever it is, the training goes on
        say(f"watchdog: ended by {type(error).__name__}: {error}; the training continues without it")
    return 0


class AttemptWatchdog:
    """The watchdog of one attempt. Raises OSError or ValueError where its run.json cannot be used."""

    def __init__(self, options: argparse.Namespace) -> None:
        run = read_object(options.run_dir / options.layout / file_names.RUN) or {}
        progress = run.get("progress") or {}
        self._run_directory, self._attempt = options.run_dir, options.attempt
        self._stop_file = options.run_dir / file_names.STOP
        self._directory = attempt_folder(options.run_dir, options.attempt)
        self._checkpoint = run.get("checkpoint")
        self._saved_step: int | None = None
        prunes = kept_count(self._checkpoint) > 0
        self._pruner = Pruner(options.run_dir, options.attempt, options.layout) if prunes else None
        self._behind: Record | None = None
        begun = read_object(self._directory / file_names.ATTEMPT) or {}
        # a script of the person's own may count its steps anew
        self._from_step = int(begun.get("tracker_step") or 0) if progress.get("promised") else 0
        nodes = int(run.get("nodes") or 1)
        self._ranks = nodes * int(run.get("devices_per_node") or 1)
        self._child = Process(options.child)
        self._stop_pid = options.shell or options.child
        self._shell: int | None = options.shell
        self._nodes = nodes
        self._linger_seconds = options.linger
        self._all_ended_at: float | None = None
        self._restarts_here = may_restart_here(run)
        self._first_failed_at: float | None = None
        self._nodes_blamed_before: set[str] = set()
        self._poll = _poll_seconds(options.poll, progress.get("floor_seconds"))
        self._clock = Clock(self._poll + STOOD_STILL_SECONDS)
        self._tracker = StepTracker(progress, self._clock.now())
        self._loss_judge: LossJudge | None = LossJudge(number(begun.get("loss_limit")))
        self._on_bad_loss = run.get("on_bad_loss") or {}
        step_lines = StepLines(progress.get("step_patterns"), progress.get("slow_patterns"))
        self._logs = NodeLogs(options.run_dir / file_names.LOGS, options.attempt, step_lines, nodes)
        self._pace = PaceWatch(options.run_dir, options.attempt, begun.get("nodes"), options.pace_window)
        self._replaced: list[str] = []  # slow nodes for which the trainers were asked to end
        self._silent_until = None if progress.get("promised") else progress.get("first_step_seconds")
        self._stop_requested = self._unwritten = False
        self._written_at = -WRITE_SECONDS
        self._first_step_at: float | None = None  # unix seconds
        self._at: float | None = None  # unix seconds of the last step

    def watch(self, ends: frozenset[signal.Signals]) -> None:
        """Watch until one of the signals `ends` comes, or the child ends."""
        while self._child.alive():
            self._look()
            self._check_stop_file()
            self._warn_if_no_step()
            if self._began_behind():
                self._end_child(ends)
                return
            if self._ends_for_loss():
                self._kill_trainers(ends)
                return
            if self._all_nodes_ended():
                self._request_verdict()
            elif self._some_nodes_stay_behind():
                self._end_child(ends, BEHIND_TERM_SECONDS)
                return
            elif self._overdue() and self._hangs(ends):
                return
            if signal.sigtimedwait(ends, self._poll) is not None:
                break
        self._look(everywhere=True)
        self._write()

    def _look(self, everywhere: bool = False) -> bool:
        is_first = not self._tracker.any_step
        news = self._logs.look(everywhere)
        fresh = self._tracker.update(news, self._clock.now())
        self._judge_loss(news.steps)
        if fresh:
            self._at, self._unwritten = time.time(), True
        if fresh and is_first:
            self._first_step_at = time.time()
            notify(self._run_directory, self._attempt, "first_step", first_step_text(self._tracker.record()))
        if self._pace.look():
            self._unwritten = True
            self._replace_slow_nodes()
        if self._unwritten and self._clock.now() - self._written_at >= WRITE_SECONDS:
            self._write()
        return fresh

    def _replace_slow_nodes(self) -> None:
        """Have the trainers save and end where spare nodes are to take the place of slow ones. The job script is not
        told, since it would not start again in its allocation."""
        if self._replaced or self._stop_requested or not self._tracker.any_step:
            return
        self._replaced = replaceable_nodes(Attempt(self._run_directory, self._attempt), self._pace.slow)
        if self._replaced:
            self._write()
            names = ", ".join(self._replaced)
            say(f"watchdog: asking the trainers to save and end: spare nodes take the place of {names}")
            self._child.signal(signal.SIGUSR1)

    def _judge_loss(self, steps: list[Step]) -> None:
        """Say what is bad about the loss, once. A mistake in here costs this judgement alone."""
        if self._loss_judge is None:
            return
        try:
            sentences = [self._loss_judge.judge(step) for step in steps]
        except Exception as error:
            say(f"watchdog: the loss is judged no more: {type(error).__name__}: {error}")
            self._loss_judge = None
            return
        for sentence in filter(None, sentences):
            say(f"watchdog: {sentence}")
            notify(self._run_directory, self._attempt, "bad_loss", sentence)
            self._unwritten = True

    def _overdue(self) -> Record | None:
        return self._tracker.overdue(self._clock.now(), saving=is_there(self._directory / file_names.STOP_SIGNALS))

    def _hangs(self, ends: frozenset[signal.Signals]) -> bool:
        """Look into every log; where none has news, ask for stacks and end the child. Returns False where a step
        completed after all."""
        self._look(everywhere=True)
        hung = self._overdue()
        if hung is None:
            return False
        self._write(hung)
        say(
            f"watchdog: hung: no sign of {hung['what']} for {hung['since_seconds']:.0f} s "
            f"(limit {hung['allowed_seconds']:.0f} s); requesting the stacks of all ranks"
        )
        self._child.signal(signal.SIGUSR2)
        self._wait_for_dumps()
        if self._look(everywhere=True):
            say("watchdog: a step completed after all; the training continues")
            self._write()
            return False
        hung["where"] = where_they_stand(self._directory, self._ranks)
        self._write(hung)
        say(f"watchdog: ending the training step; {hung['where'] or 'no rank wrote its stacks'}")
        notify(self._run_directory, self._attempt, "stall", stall_text(hung, self._tracker.record()))
        self._end_child(ends)
        return True

    def _end_child(self, ends: frozenset[signal.Signals], term_seconds: float = TERM_SECONDS) -> None:
        """Send TERM, and KILL after `term_seconds`. Until then one of `ends` leaves the rest to whoever sent it."""
        self._child.signal(signal.SIGTERM)
        give_up_at = time.monotonic() + term_seconds
        while self._child.alive() and time.monotonic() < give_up_at:
            if signal.sigtimedwait(ends, 0.2) is not None:
                return
        if self._child.alive():
            say(f"watchdog: the training step did not end within {term_seconds:.0f} s of SIGTERM; killing it")
            kill_tree(self._child)

    def _began_behind(self) -> bool:
        """Whether the trainers did not load the checkpoint: their first step is one that the checkpoint contains.
        Without this they would train again, and save over it."""
        first = self._tracker.first_step
        if first is None or first > self._from_step:
            return False
        self._behind = {"first_step": first, "checkpoint_step": self._from_step}
        self._write()
        say(f"watchdog: the trainers began at step {first}, not after the checkpoint of step {self._from_step}; ending")
        return True

    def _ends_for_loss(self) -> bool:
        """Whether the loss is bad and stays so, and the recipe has the training ended for it."""
        bad = self._loss_judge.lasting if self._loss_judge else None
        if bad is None or self._on_bad_loss.get("action") not in ("stop", "rollback"):
            return False
        if bad["kind"] == "spike" and not self._on_bad_loss.get("spike"):
            return False
        bad["ended"] = True
        self._write()
        say("watchdog: ending the training step for its loss, without a save")
        return True

    def _kill_trainers(self, ends: frozenset[signal.Signals]) -> None:
        """End the step so that no trainer saves a bad model over good checkpoints, as each would at SIGTERM. srun makes
        a KILL of a TERM; without SLURM the child is train.sh, which would ask for a save."""
        if not os.environ.get("SLURM_JOB_ID"):
            pids = {record.get("program_pid") for record in rank_records(self._directory)}
            for pid in filter(pids.__contains__, descendants(self._child.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            give_up_at = time.monotonic() + TERM_SECONDS
            while pids and self._child.alive() and time.monotonic() < give_up_at:
                if signal.sigtimedwait(ends, 0.2) is not None:
                    return
        self._end_child(ends)

    def _wait_for_dumps(self) -> None:
        """Wait until every rank's stacks are there and grow no more, DUMP_SECONDS at most."""
        give_up_at = time.monotonic() + DUMP_SECONDS
        before = None
        while time.monotonic() < give_up_at and self._child.alive():
            now = [_file_sizes(self._directory / folder) for folder in (file_names.STACKS, file_names.FLIGHT)]
            if now == before and self._all_wrote(*now):
                return
            before = now
            time.sleep(max(0.5, self._ranks / 1000.0))  # each look asks the file system for every node's files

    def _all_wrote(self, stacks: dict[str, int] | None, flight: dict[str, int] | None) -> bool:
        """Whether every rank wrote its stacks and, where there is a flight recorder, its last collectives."""
        if stacks is None or len(stacks) < self._nodes or (flight is not None and len(flight) < self._ranks):
            return False
        return len(ranks_stacks(self._directory)) >= self._ranks

    def _check_stop_file(self) -> None:
        if self._stop_requested or not is_there(self._stop_file):
            return
        self._stop_requested = True
        say(f"watchdog: {self._stop_file} is there: asking the trainers to save and stop")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._stop_pid, signal.SIGUSR1)

    def _all_nodes_ended(self) -> bool:
        """Whether train.sh of every node left its done marker, or the cause of its end. A hidden file there was written
        before the training, and a node that the preflight found faulty has a cause, but no ranks."""
        done = {path.name for path in (self._directory / file_names.DONE).glob("[!.]*")}
        failed = self._nodes_with_causes() - done
        if len(done) + len(failed) < self._nodes:
            return False
        return len(done | (failed and failed & self._nodes_with_ranks())) >= self._nodes

    def _nodes_with_causes(self) -> set[str]:
        return {path.stem for path in (self._directory / file_names.CAUSES).glob("[!.]*.json")}

    def _nodes_with_ranks(self) -> set[str]:
        return {path.stem for path in rank_files(self._directory)}

    def _some_nodes_stay_behind(self) -> bool:
        """Whether nodes have not ended for BEHIND_SECONDS after one failed, and the job is to start again here."""
        if not self._restarts_here:
            return False
        now = self._clock.now()
        if self._first_failed_at is None:
            causes = self._nodes_with_causes() - self._nodes_blamed_before
            if causes and not causes & self._nodes_with_ranks():
                self._nodes_blamed_before |= causes  # by the preflight
            elif causes:
                self._first_failed_at = now
        if self._first_failed_at is None or now - self._first_failed_at < BEHIND_SECONDS:
            return False
        say("watchdog: a node has failed and others have not ended; ending the training step")
        return True

    def _request_verdict(self) -> None:
        """URG to the shell, once, where the launcher lingers: it may wait for a container to be removed."""
        now = self._clock.now()
        if self._all_ended_at is None:
            self._all_ended_at = now
        if self._shell is not None and now - self._all_ended_at >= self._linger_seconds:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._shell, signal.SIGURG)
            self._shell = None

    def _warn_if_no_step(self) -> None:
        if self._silent_until is None or self._clock.now() < self._silent_until:
            return
        self._silent_until = None
        if not self._tracker.any_step:
            say("watchdog: no log line reports a step, so a hang cannot be detected; only the stop file is watched")

    def _write(self, hung: Record | None = None) -> None:
        nothing_to_say = hung is None and not self._tracker.any_step and not self._pace.slow
        if nothing_to_say and self._written_at < 0.0:
            return
        named = read_tracker(self._checkpoint)
        if named is not None:  # a tracker that vanishes later does not unsay it
            self._saved_step = max(named, self._saved_step or 0)
            trusted = self._loss_judge is None or not self._loss_judge.in_doubt
            if self._pruner is not None and trusted and self._child.alive():
                with contextlib.suppress(OSError):  # no memory or no process left: after a later step
                    self._pruner.start(durable_step(self._checkpoint) or 0)
        record = {
            "schema": 1,
            **self._tracker.record(),
            "tracker_step": self._saved_step,
            "first_step": self._tracker.first_step,
            "first_step_at": self._first_step_at,
            "at": self._at,
            "hung": hung,
            "behind": self._behind,
            "good_step": self._loss_judge.good_step if self._loss_judge else None,
            "bad_loss": self._loss_judge.bad if self._loss_judge else None,
            "slow": [device.as_json() for device in self._pace.slow],
            **({"replaced": self._replaced} if self._replaced else {}),
        }
        with contextlib.suppress(OSError):  # full, read-only, gone: the next one may be written
            replace_json(self._directory / file_names.PROGRESS, record)
        self._unwritten, self._written_at = False, self._clock.now()


class Clock:
    """Seconds since the start, without those in which this process stood still itself (suspended by SLURM, stuck in
    a file system): the training may have stood still with it."""

    def __init__(self, longest_tick: float) -> None:
        self._longest_tick = longest_tick
        self._read_at = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        read_at = time.monotonic()
        self._seconds += min(read_at - self._read_at, self._longest_tick)
        self._read_at = read_at
        return self._seconds


def _poll_seconds(requested: float, floor: object) -> float:
    """A small floor needs quick looks."""
    return min(requested, max(0.1, floor / 10.0)) if isinstance(floor, (int, float)) else requested


def is_there(path: Path) -> bool:
    """False also where the file system does not say (a stale handle, no permission)."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _file_sizes(directory: Path) -> dict[str, int] | None:
    """Map the names of the non-empty files in `directory` to their bytes; None where there is no such folder."""
    try:
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
    except OSError:
        return None
    return {name: size for name, size in sizes.items() if size}


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("watchdog")
    parser.add_argument("--layout", default="", help="folder in the run directory whose run.json counts")
    parser.add_argument("--child", required=True, type=int, help="process of the training step: srun or train.sh")
    parser.add_argument("--shell", type=int, help="is sent USR1 when the stop file is there; the child where absent")
    parser.add_argument(
        "--pace-window",
        type=float,
        default=WINDOW_SECONDS,
        metavar="SECONDS",
        help="of monitors' lines on the pace",
    )
    parser.add_argument(
        "--linger", type=float, default=LINGER_SECONDS, metavar="SECONDS", help="before the shell is sent URG"
    )
    parser.add_argument("--poll", type=float, default=2.0, metavar="SECONDS")
    return parser.parse_args(argv)
