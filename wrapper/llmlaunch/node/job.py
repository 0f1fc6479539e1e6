"""`node.pyz job`: the program of the batch host. It begins an attempt, starts its step on the nodes, watches and judges
it, and does what comes next, until nothing does. One loop handles all events, and one function of the facts decides
what comes next (restart_policy.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.attempt import STAYS, Attempt
from ..rundir.file_names import attempt_folder
from ..rundir.files import create
from ..rundir.run import begun_attempts
from ..rundir.run_file import ContainerRules, JobRules, read_run_file
from . import slurm_steps
from .begin import Beginning, JobError, allocation_of, begin, end_untrained, refuse_job
from .containers import IMPORT_SECONDS, ContainerError, NodeImages, StepContainer, StepRunner
from .event_loop import EventLoop
from .files import note_in_attempt, say
from .held_nodes import HeldNodes
from .line_writer import DiskThread
from .node_channel import PREFLIGHT, PREFLIGHT_SECONDS, PREPARE
from .node_environment import raise_open_files_limit
from .restart_policy import FIRST_LAYOUT, PREEMPTED, may_restart_here
from .rollback import skip_argument
from .training_step import NodeStep, StepEnd, open_log
from .watchdog import AttemptWatchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .finish import Finished

PREFLIGHT_MORE_SECONDS = 120.0
NOT_STARTED = 127  # exit code of a step whose program does not exist, as in a shell
TOO_FEW_GOOD = 3  # exit code of a job whose preflight found too few good nodes
DEVICES_SECONDS = 15.0  # killed trainers hold their device memory until the driver has cleaned up after them
TOLD_SECONDS = 1.0  # SLURM also signals the steps of a job that it ends; by then its signal must have arrived
DISK_SECONDS = 10.0
LAST_LINES = 12  # of a log that says why


def main(argv: list[str]) -> int:
    """Run the job whose run directory holds this program. Return its exit code."""
    del argv
    run_directory = Path(os.environ.get("LLMLAUNCH_RUN_DIR") or Path(sys.argv[0]).resolve().parent)
    os.chdir(run_directory)  # setup lines may have gone elsewhere
    return BatchJob(run_directory).run()


class BatchJob:
    """The job. `spec` is `job` of run.json (docs/run-files.md)."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._run = read_run_file(run_directory)
        self._spec = self._run.get("job") or JobRules()
        self._slurm = bool(os.environ.get("SLURM_JOB_ID"))
        self._job = slurm_steps.job_name(os.environ) or f"local-{int(time.time())}-{os.getpid()}"
        self._number = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._start = str(self._number)
        self._attempt = ""
        self._nodes = self._run.get("nodes") or 1  # that train
        self._told = os.environ.get("LLMLAUNCH_TOLD", "")  # a signal that came during the setup lines
        self._step: NodeStep | None = None
        self._container: StepContainer | None = None
        self._images: NodeImages | None = None  # where one of a registry is imported
        self._log = 1
        self._again = False  # another step of this job may not have ended
        self._was_tried = False
        heard = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._loop = EventLoop(heard, self._on_signal, lambda: None)
        self._disk = DiskThread()
        self._disk.start()
        self._held = HeldNodes(self._job, (), self._say)
        self._hosts: tuple[str, ...] = ()  # those that train
        self._output = os.dup(1)  # SLURM's file, which names the log of each attempt
        self._layout = ""

    def run(self) -> int:
        """Train until nothing comes next. Return the exit code of the job."""
        raise_open_files_limit()
        try:
            self._name_attempt()
        except OSError as error:
            say(f"nothing can be written to {self._run_directory}: {error.strerror}; make room there, or mount it")
            return 1
        try:
            self._name_run()
            self._warn(refuse_job(self._run_directory, self._run, os.environ))
            self._hosts = self._allocation()
            self._held = HeldNodes(self._job, self._hosts, self._say)
            if not self._spec["preflight"]:
                self._hosts = self._hosts[: self._nodes]
            container = self._spec.get("container")
            if container is not None and self._slurm:
                self._enter_container(container)
            return self._attempts()
        except (JobError, ContainerError) as error:
            return end_untrained(self._run_directory, self._attempt, str(error))
        except Exception as error:
            self._say(traceback.format_exc())
            why = f"a mistake of llmlaunch itself, or of the disk: {type(error).__name__}: {error}"
            return end_untrained(self._run_directory, self._attempt, why)
        finally:
            self._remove_containers()

    def _enter_container(self, rules: ContainerRules) -> None:
        container = StepContainer(rules, self._run_directory, self._start, os.environ)
        self._container = container
        if container.is_imported:
            runner = StepRunner(self._srun, self._run_beside)
            self._images = NodeImages(container, os.environ["SLURM_JOB_ID"], runner)

    def _say(self, text: str) -> None:
        for descriptor in {1, self._log}:
            with contextlib.suppress(OSError):
                os.write(descriptor, f"job: {text}\n".encode())

    # --- the beginning of the job ---

    def _name_attempt(self) -> None:
        """Name the attempt `<job id>.<restart count>`, or with the next free count, so that done markers of an earlier
        attempt never count for this one. Under SLURM, all output from here on goes to the log of the attempt."""
        attempts = self._run_directory / file_names.ATTEMPTS
        for folder in (file_names.LOGS, file_names.PEAKS):
            (self._run_directory / folder).mkdir(exist_ok=True)
        attempts.mkdir(exist_ok=True)
        while True:
            self._attempt = f"{self._job}.{self._number}"
            try:
                (attempts / self._attempt).mkdir()
                break
            except FileExistsError:
                self._number += 1
        folders = [file_names.DONE, file_names.RANKS]  # all nodes write into these, so they are made once, here
        launch = self._run.get("launch") or {}
        folders += [file_names.FLIGHT] if launch.get("flight_recorder") else []
        folders += [file_names.PROBES] if self._spec.get("is_probed") else []
        for folder in folders:
            (attempts / self._attempt / folder).mkdir()
        path = file_names.node_log(self._run_directory, self._attempt, file_names.BATCH_LOG_NODE)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if self._slurm:
            with contextlib.suppress(OSError):
                os.write(self._output, f"job: the log of this job is {path}\n".encode())
            for standard in (1, 2):
                os.dup2(log, standard)
            os.close(log)
            log = 1
        elif self._log != 1:
            os.close(self._log)
        self._log = log
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._say(f"run directory {self._run_directory}, attempt {self._attempt}, {now}")

    def _name_run(self) -> None:
        """Write the run's name in the store if submit has not written one. Among several jobs, the first one wins."""
        path = self._run_directory / file_names.RUN_ID
        if not path.exists():
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            with contextlib.suppress(OSError):
                create(path, f"{self._run.get('name')}-{stamp}-{os.urandom(2).hex()}\n")

    def _warn(self, warnings: Sequence[str]) -> None:
        for text in warnings:
            self._say(f"warning: {text}")

    def _allocation(self) -> tuple[str, ...]:
        nodes, warnings = allocation_of(self._run, os.environ)
        self._warn(warnings)
        if not self._slurm:
            for name in ("SLURM_NODEID", "SLURMD_NODENAME"):
                os.environ.pop(name, None)
        elif slurm_steps.signals_reach_every_process():
            os.environ["LLMLAUNCH_TERM_REACHES_RANKS"] = "1"
        return nodes

    # --- the attempts ---

    def _attempts(self) -> int:
        begun = begin(Beginning(self._run_directory, self._attempt, self._hosts))
        while True:
            if begun.exit_code is not None:
                return begun.exit_code
            self._layout = begun.layout
            end = self._train()
            finished = self._judge(end)
            follows = finished.follows
            if follows.action not in STAYS or self._told:
                break
            is_restart = follows.action == "restart"
            if is_restart:
                self._start_again(end, follows.seconds, follows.nodes)
                if self._told:
                    break
            elif self._spec["waits_for_devices"]:
                self._rest(DEVICES_SECONDS)
            self._number += 1
            self._name_attempt()
            layout = follows.layout or self._layout
            begun = begin(Beginning(self._run_directory, self._attempt, self._hosts, layout, is_restart))
            self._say(f"training with layout {layout}, in the same allocation, on {' '.join(self._hosts)}")
        return self._come_back(finished)

    def _judge(self, end: StepEnd) -> Finished:
        from .finish import Ending, finish  # imports everything about causes; the ranks need not wait for that

        self._loop.take_pending()
        if end.was_told and not self._told:
            self._rest(TOLD_SECONDS)  # whoever ends the job signals its steps first
        told = self._told or (PREEMPTED if end.was_told else "")
        held = self._held
        # nothing is asked about a node that ended well, or in a job that is being ended
        held.lose(held.lost_nodes(end, self._hosts) if self._slurm and end.code and not self._told else end.lost)
        ending = Ending(self._run_directory, self._attempt, self._nodes, end.code, told, end.done)
        finished = finish(ending._replace(lost=held.lost, pool=held.names))
        self._loop.take_pending()  # signals that came meanwhile
        return finished

    def _start_again(self, end: StepEnd, seconds: float, nodes: Sequence[str]) -> None:
        """Prepare another attempt on the chosen nodes: give back lost nodes, and end what the previous attempt left on
        the others. A signal to save and stop cuts the wait short."""
        self._again = True
        self._hosts, self._nodes = tuple(nodes), len(nodes)
        if self._slurm:
            # before anything else is asked of SLURM: scancel waits ten seconds for a node that is gone
            self._held.wait_until_given_back()
            if any(node not in self._held.lost for node in end.silent):
                slurm_steps.kill_steps(self._job)
        if self._spec["waits_for_devices"]:
            seconds = max(seconds, DEVICES_SECONDS)
        self._rest(seconds)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._loop.after(seconds, lambda: None)
        self._loop.run(lambda: bool(self._told) or time.monotonic() >= until)

    # --- one attempt ---

    def _train(self) -> StepEnd:
        """Import the image, test the nodes, prepare, and train. Return how the step ended, or what prevented its
        start."""
        failed = StepEnd(1)
        if self._told or not self._import_image():
            return failed
        if not self._was_tried and not self._try_nodes():
            return StepEnd(TOO_FEW_GOOD)
        if self._told or not self._prepare():
            return failed
        order = list(self._hosts)
        if self._slurm and self._spec["is_placed"]:
            from .place import node_order

            order = node_order(self._run_directory, self._attempt, self._layout, self._hosts)
        watchdog: AttemptWatchdog | None = None
        step = NodeStep(self._loop, self._hosts, lambda news: None if watchdog is None else watchdog.hear(news))
        step.on_stop = lambda: self._on_signal(signal.SIGUSR1)
        step.on_told = self._note_stop
        if self._slurm and may_restart_here(self._run):
            step.on_lost = lambda: self._held.give_back(step.lost)
        log = f"{file_names.LOGS}/{self._attempt}.%N.log"
        if not self._slurm:
            path = file_names.node_log(self._run_directory, self._attempt, self._hosts[0])
            self._say(f"training log: {path}")
        if not self._start_step(step, order, log, "", self._spec["late_end_seconds"]):
            return StepEnd(NOT_STARTED)
        try:
            watchdog = AttemptWatchdog(self._run_directory, self._attempt, self._layout, step, self._loop, self._disk)
        except Exception as error:  # whatever the error is, the training continues
            say(f"watchdog: {type(error).__name__}: {error}; the training continues without it")
        self._loop.run(lambda: step.is_over)
        self._step = None
        end = step.finish()
        self._say(f"the training step ended with exit code {end.code}")
        if watchdog is not None:
            watchdog.close()
            self._disk.finish(DISK_SECONDS)
        return end

    def _start_step(
        self, step: NodeStep, order: Sequence[str], log: str, what: str, late_end_seconds: float | None = None
    ) -> bool:
        """Start `node.pyz node` on the step's nodes; `order` has them by node rank. Return False if that is
        impossible."""
        words = [self._python_of_nodes(), "-I", "-S", str(self._run_directory / file_names.NODE_ARCHIVE), "node"]
        words += ["--run-dir", str(self._run_directory), "--attempt", self._attempt, "--layout", self._layout or "."]
        words += ["--nodes", str(len(order)), "--address", order[0] if self._slurm else "127.0.0.1"]
        in_slurms_order = [node for node in self._held.names if node in order]
        if list(order) != in_slurms_order:
            words += ["--node-ranks", ",".join(str(order.index(node)) for node in in_slurms_order)]
        attempt = Attempt(self._run_directory, self._attempt)
        skip = "" if what else skip_argument(attempt.skips, attempt.from_step)
        words += [what] if what else ["--skip", skip] if skip else []
        environment = self._step_environment()
        if not self._slurm:
            if self._spec.get("container"):
                self._say("the recipe names a container; without SLURM the training runs outside it, on this machine")
        elif self._container is not None:
            words = [*self._container.options(), *self._container.enter(), *words]
        try:
            if self._slurm:
                step.start([*self._srun(in_slurms_order, log), *words], environment, None, late_end_seconds)
            else:
                with open_log(log.replace("%N", self._hosts[0])) as error:
                    step.start(words, environment, error, late_end_seconds)
        except OSError as error:
            self._say(f"the step cannot be started: {error.filename or words[0]}: {error.strerror}")
            return False
        self._step = step
        return True

    def _step_environment(self) -> dict[str, str]:
        """Return the environment of the steps. It lacks the address of the webhook, a secret that the trainers do not
        need."""
        webhook = (self._run.get("notify") or {}).get("webhook")
        hidden = {webhook} - set(self._spec["secrets"])
        environment = slurm_steps.step_environment(os.environ)
        return {name: value for name, value in environment.items() if name not in hidden}

    def _python_of_nodes(self) -> str:
        """Return the recipe's Python, else LLMLAUNCH_PYTHON (which belongs to this host, not to the container), else
        the first on PATH."""
        named = self._spec["python"]
        is_inside = self._container is not None
        return named or ("" if is_inside else os.environ.get("LLMLAUNCH_PYTHON", "")) or "python3"

    def _run_step(self, nodes: Sequence[str], log: str, what: str, seconds: float | None = None) -> StepEnd:
        """Run a step other than the training to its end, for at most `seconds`."""
        step = NodeStep(self._loop, nodes, trains=False)
        if not self._start_step(step, nodes, log, what):
            return StepEnd(NOT_STARTED)
        if seconds is not None:
            self._loop.after(seconds, lambda: step.end(0.0))
        self._loop.run(lambda: step.is_over)
        self._step = None
        return step.finish()

    def _import_image(self) -> bool:
        """Import a registry's image on the nodes that lack it. LLMLAUNCH_IMPORT_SECONDS allows more time. Return False
        if fewer nodes than the training needs have the image."""
        images = self._images
        missing = [] if images is None else [node for node in self._hosts if node not in images.ready]
        if images is None or not missing:
            return True
        folder = attempt_folder(self._run_directory, self._attempt) / file_names.IMPORT
        self._say(f"importing {images.image} on {len(missing)} node(s): {folder}")
        images.bring_to(missing, folder, float(os.environ.get("LLMLAUNCH_IMPORT_SECONDS") or IMPORT_SECONDS))
        ready = [node for node in self._hosts if node in images.ready]
        if len(ready) >= self._nodes:
            return True
        self._say(f"{len(ready)} node(s) have the image, and {self._nodes} are needed; why is in {folder}")
        return False

    def _run_beside(self, words: Sequence[str], seconds: float) -> None:
        """Run a command to its end. It is killed after `seconds`, or when the job is asked to stop."""
        give_up_at = time.monotonic() + seconds
        try:
            process = subprocess.Popen(
                words,
                env=self._step_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"{words[0]}: {error.strerror}")
            return
        self._loop.after(seconds, lambda: None)
        self._loop.run(lambda: process.poll() is not None or bool(self._told) or time.monotonic() >= give_up_at)
        if process.poll() is None:
            process.kill()
            process.wait()

    def _srun(self, nodes: Sequence[str], error: str, output: str = "") -> list[str]:
        return slurm_steps.StepOptions.of(self._spec, os.environ).srun(nodes, error, self._again, output)

    def _try_nodes(self) -> bool:
        """Test all nodes for about a minute, and choose good ones for the training, in SLURM's order. On some file
        systems, importing torch takes minutes: LLMLAUNCH_PREFLIGHT_SECONDS allows more time. Return False if too few
        nodes are good."""
        self._was_tried = True
        if not self._spec["preflight"]:
            return True
        from .preflight import choose

        seconds = os.environ.setdefault("LLMLAUNCH_PREFLIGHT_SECONDS", f"{PREFLIGHT_SECONDS:g}")
        folder = attempt_folder(self._run_directory, self._attempt) / file_names.PREFLIGHT
        tried = self._hosts
        if self._images is not None:
            tried = tuple(node for node in tried if node in self._images.ready)
        self._say(f"trying {len(tried)} node(s) before the training: {folder}")
        folder.mkdir(exist_ok=True)
        self._run_step(tried, f"{folder}/%N.log", PREFLIGHT, float(seconds) + PREFLIGHT_MORE_SECONDS)
        chosen = choose(self._run_directory, self._attempt, self._hosts, self._nodes)
        if chosen:
            self._hosts = tuple(chosen)
        return bool(chosen)

    def _prepare(self) -> bool:
        """Check the arguments, and build what all nodes read, on one node. Arguments that the framework refuses end the
        job here. Without this, every node would wait for what is built until its first collective timed out."""
        if not self._spec["prepares"] or self._was_prepared():
            return True
        log = attempt_folder(self._run_directory, self._attempt) / file_names.PREPARE_LOG
        self._say(f"preparing on one node: {log}")
        end = self._run_step(self._hosts[:1], str(log), PREPARE)
        try:
            said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            said = []
        if end.code or end.silent:
            last = "\n".join(said[-LAST_LINES:])
            self._say(f"preparing failed with exit code {end.code}; why is in {log}\n{last}")
            return False
        for line in said:
            if line.startswith("note: "):
                self._say(line)
        with contextlib.suppress(OSError):  # the next attempt prepares again
            note_in_attempt(attempt_folder(self._run_directory, self._attempt), {"prepared": True})
        return True

    def _was_prepared(self) -> bool:
        layout = "" if self._layout == FIRST_LAYOUT else self._layout
        begun = begun_attempts(self._run_directory)
        return any(attempt.began.get("prepared") for attempt in begun if attempt.layout == layout)

    # --- what the job is told ---

    def _on_signal(self, number: int) -> None:
        """Handle a signal. USR1: the time limit is near, or there is a stop file. TERM: SLURM or a person ends the job.
        USR2: the trainers are to write their stacks (docs/watchdog.md)."""
        if number == signal.SIGUSR2:
            if self._step is not None:
                self._step.ask_for_stacks()
            return
        name = "USR1" if number == signal.SIGUSR1 else "TERM"
        if self._told in (name, "TERM"):
            return
        self._told = name
        self._say(f"told to stop ({name}); asking the trainers to save")
        self._note_stop(name)
        if self._step is not None:
            step = self._step
            step.is_stopping = True
            step.is_job_ending = name == "TERM"
            self._loop.after(TOLD_SECONDS if name == "TERM" and self._slurm else 0.0, step.save)

    def _note_stop(self, name: str) -> None:
        folder = attempt_folder(self._run_directory, self._attempt)
        self._disk.give(lambda: note_in_attempt(folder, {"stop_signal": name}))

    # --- the end of the job ---

    def _come_back(self, finished: Finished) -> int:
        """Put the job back into the queue, or exclude bad nodes from the jobs that follow it, if that comes next."""
        from .held_nodes import leave_out

        action = finished.follows.action
        is_requeued = (self._run.get("restart") or {}).get("by") == "requeue"
        if action == "restart" and self._told == "USR1" and is_requeued:  # a signal came before it could start again
            self._requeue(0, ())
        elif action == "requeue" and self._slurm:
            self._requeue(finished.follows.seconds, finished.at_fault)
        elif action == "chain" and self._slurm and finished.at_fault:
            leave_out(self._run_directory, self._job, finished.at_fault, chain=True)
        return finished.exit_code

    def _requeue(self, seconds: int, at_fault: Sequence[str]) -> None:
        """Put the same job back into the queue, to continue from its last checkpoint."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._remove_containers()
        if self._held.requeue(self._run_directory, seconds) and at_fault:
            from .held_nodes import leave_out

            leave_out(self._run_directory, self._job, at_fault)

    def _remove_containers(self) -> None:
        """Remove the containers of this job, unless SLURM is ending the job and starts no more steps."""
        if self._images is not None and self._images.ready and self._told != "TERM":
            folder = attempt_folder(self._run_directory, self._attempt) / file_names.IMPORT
            self._images.remove(self._held.names, folder, bool(self._told))
