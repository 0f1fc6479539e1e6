"""One look at any number of runs: what the launcher says of each, how far it got, and what ended it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmlaunch.causes import cause as cause_record
from llmlaunch.launchers.base import JobState, Launcher, Submission
from llmlaunch.launchers.choose import launcher_of
from llmlaunch.launchers.run_files import (
    can_be_resumed,
    gone_text,
    known_end,
    latest_attempt,
    missing_files,
    run_name,
)
from llmlaunch.report.run_text import advice_text, bad_loss_text, not_finite_text, slow_texts
from llmlaunch.report.slurm_words import pending_advice
from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.goodput import Goodput, goodput_of
from llmlaunch.rundir.notices import undelivered_notices
from llmlaunch.rundir.reached_steps import run_step
from llmlaunch.rundir.run import begun_attempts
from llmlaunch.rundir.run_file import read_run_file
from llmlaunch.rundir.values import counted, is_for_fewer_nodes


@dataclass(frozen=True)
class RunStatus:
    """What there is to say of a run now. `progress` and `cause` are those of its newest attempt (progress.json and
    status.json of docs/run-directory.md), empty where there are none."""

    submission: Submission
    state: JobState
    attempt: str | None
    progress: Mapping[str, Any]
    cause: Mapping[str, Any]
    stopping: bool
    """A person has asked it to save and stop, and it has not ended yet."""
    layout: str = ""
    """Layout of the newest attempt: "" is the planned one, else a fallback after out of memory or one for fewer
    nodes."""
    skipped_checkpoints: tuple[int, ...] = ()
    """Steps of newer checkpoints that the newest attempt did not begin with, because they are damaged."""
    goodput: Goodput | None = None
    """Where the time of all its attempts went."""
    undelivered_notices: tuple[str, ...] = ()
    """What kept notices of the newest attempt from their receivers."""
    rehearses: int | None = None
    """The pipeline rank of a job that runs here by itself; None of a job that is itself."""
    wants_back: bool = False
    """Its newest attempt ended with the word that the job goes back into the queue."""
    missing: tuple[str, ...] = ()
    """Rendered files that are gone."""
    step: int | None = None
    """The step that the run has reached, as every screen counts them; `progress` may be some seconds behind."""
    resumable: bool = True
    """Whether `llmlaunch resume` can submit it again; False of an observed run."""

    def as_json(self) -> dict[str, Any]:
        submission, state = self.submission, self.state
        return {
            "run_id": read_run_id(submission.run_dir),
            "run_dir": str(submission.run_dir),
            "launcher": submission.launcher,
            "job_id": submission.job_id,
            "phase": state.phase,
            "state": state.state,
            "reason": state.reason,
            "advice": self.advice or None,
            "exit_code": state.exit_code,
            "cluster": submission.cluster if submission.launcher == "slurm" else None,
            "jobs": list(submission.jobs),
            "link": state.link or None,
            "earlier": [job for earlier in submission.earlier for job in earlier.jobs],
            "restarts": state.restarts,
            "expected_start": state.expected_start.isoformat() if state.expected_start else None,
            "attempt": self.attempt,
            "layout": self.layout,
            "progress": self._progress_json,
            "goodput": None if self.goodput is None else self.goodput.as_json(),
            "undelivered_notices": list(self.undelivered_notices),
            "cause": dict(self.cause) or None,
            "stopping": self.stopping,
            "skipped_checkpoints": list(self.skipped_checkpoints),
            "rehearses": self.rehearses,
            "missing": list(self.missing),
        }

    def sentence(self) -> str:
        state = self.state
        words = [f"job {self._job} ({self.submission.launcher}): {state.phase}"]
        words += [f"[{state.state}]"] if state.state else []
        words += [f"exit code {state.exit_code}"] if state.exit_code is not None else []
        words += [f"- {self._because}"] if self._because else []
        figures = ", ".join(self._figures)
        lost = f"; notice not delivered: {self.undelivered_notices[-1]}" if self.undelivered_notices else ""
        return " ".join(words) + (f"; {figures}" if figures else "") + lost

    def cells(self) -> list[str]:
        """Return the cells run, job, phase, step, loss, tokens per second and reason."""
        steps, loss, speed = (self._number(name) for name in ("steps", "loss", "tokens_per_second"))
        step = self._reached
        return [
            run_name(self.submission.run_dir),
            self._job,
            self.state.phase,
            "-" if step is None else f"{step:.0f}" + (f"/{steps:.0f}" if steps else ""),
            not_finite_text(self.progress) or ("-" if loss is None else f"{loss:.4g}"),
            "-" if speed is None else f"{speed:,.0f}",
            self._because or (self.state.state if self.state.phase == "failed" else ""),
        ]

    @property
    def _job(self) -> str:
        return self.submission.jobs[max(0, self.state.link - 1)]

    @property
    def _because(self) -> str:
        """Why the run waits or how it ended, with what is unusual about it."""
        state = self.state
        of = len(self.submission.jobs)
        parts = [f"rehearsal of pipeline rank {self.rehearses}"] if self.rehearses is not None else []
        parts += [state.reason] if state.reason else []
        parts += [self.advice] if self.advice and state.phase == "pending" else []
        parts += [gone_text(self.missing)] if self.missing and state.phase != "succeeded" else []
        unexplained = (
            self.cause and state.phase != "succeeded" and cause_record.sentence(self.cause) not in state.reason
        )
        parts += [_cause_words(self.cause)] if unexplained else []
        left_out = self.wants_back and state.phase in ("failed", "stopped")
        parts += ["SLURM did not put it back into the queue"] if left_out else []
        parts += [_layout_words(self.layout)] if self.layout else []
        parts += [_skipped_words(self.skipped_checkpoints)] if self.skipped_checkpoints else []
        parts += [f"link {state.link} of {of}"] if of > 1 else []
        parts += [f"restarted {counted(state.restarts, 'time')}"] if state.restarts else []
        parts += ["asked to save and stop"] if self.stopping else []
        parts += ["ended; SLURM waits for word from every node"] if state.state == "COMPLETING" else []
        if state.phase == "running" and isinstance(self.progress.get("hung"), dict):
            parts.append(f"hangs: {self.progress['hung'].get('what') or 'no step'}")
        bad_loss = "" if not_finite_text(self.progress) else bad_loss_text(self.progress)
        parts += [f"loss: {bad_loss}"] if bad_loss and state.phase == "running" else []
        if state.phase == "running":
            parts += slow_texts(self.progress)
        if state.phase == "pending" and state.expected_start:
            parts.append(f"expected to start {state.expected_start:%Y-%m-%d %H:%M}")
        return "; ".join(parts)

    @property
    def advice(self) -> str:
        """What the person has to do before a run that waits can start, or can do about what ended it."""
        if self.state.phase == "pending":
            return pending_advice(self.state.reason)
        ended_early = self.state.phase in ("failed", "stopped")
        return advice_text(self.cause, submitted=self.resumable) if ended_early else ""

    @property
    def _figures(self) -> list[str]:
        steps, loss, speed = (self._number(name) for name in ("steps", "loss", "tokens_per_second"))
        step = self._reached
        if step is None:
            return []
        figures = [f"step {step:.0f}" + (f" of {steps:.0f}" if steps else "")]
        unusual = not_finite_text(self.progress)
        figures += [f"loss {unusual}"] if unusual else [f"loss {loss:.4g}"] if loss is not None else []
        figures += [f"{speed:,.0f} tokens/s"] if speed is not None else []
        share = None if self.goodput is None else self.goodput.share
        return figures + ([f"goodput {100 * share:.0f} %"] if share is not None else [])

    @property
    def _progress_json(self) -> dict[str, Any] | None:
        if not self.progress and self.step is None:
            return None
        names = ("step", "steps", "loss", "not_finite", "bad_loss", "tokens_per_second", "at", "hung", "slow")
        progress = {name: self.progress.get(name) for name in names}
        return progress if self.step is None else {**progress, "step": self.step}

    @property
    def _reached(self) -> float | None:
        return self._number("step") if self.step is None else self.step

    def _number(self, name: str) -> float | None:
        value = self.progress.get(name)
        return value if type(value) in (int, float) else None


def read_statuses(
    submissions: Sequence[Submission], say: Callable[[str], None], *, briefly: bool = False
) -> list[RunStatus]:
    """Return the status of each submission. SLURM is asked once for each cluster; `say` hears of waiting.

    With `briefly`, for a screen that shows runs: SLURM is not asked about a run whose files say how it ended, and may
    take a few seconds for the others. A command that submits or cancels asks the launcher itself, because a job may
    still be in the queue when its files say how it ended.
    """
    ends = {n: end for n, each in enumerate(submissions) if briefly and (end := known_end(each)) is not None}
    groups: dict[tuple[str, str | None], list[Submission]] = {}
    for n, submission in enumerate(submissions):
        if n not in ends:  # two clusters may have jobs of the same number
            groups.setdefault((submission.launcher, submission.cluster), []).append(submission)
    asking = [_Asking(launcher_of(group[0], say, briefly=briefly), group) for group in groups.values()]
    unasked = [_read(submission) for submission in submissions]  # while the schedulers think
    states = {name: query.states() for name, query in zip(groups, asking, strict=True)}
    statuses = []
    for n, status in enumerate(unasked):
        submission = status.submission
        state = ends.get(n) or states[submission.launcher, submission.cluster][submission.job_id]
        stopping = status.stopping and not state.ended
        statuses.append(replace(status, state=state, stopping=stopping))
    return statuses


class _Asking:
    """A launcher that is being asked for states, in a thread of its own."""

    def __init__(self, launcher: Launcher, submissions: Sequence[Submission]) -> None:
        self._answer: Mapping[str, JobState] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, args=(launcher, submissions), daemon=True)
        self._thread.start()

    def states(self) -> Mapping[str, JobState]:
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._answer

    def _ask(self, launcher: Launcher, submissions: Sequence[Submission]) -> None:
        try:
            self._answer = launcher.states(submissions)
        except BaseException as failure:
            self._failure = failure


def _read(submission: Submission) -> RunStatus:
    """Return what the files of a run's newest attempt say; its state is for the launcher to say."""
    name = latest_attempt(submission)
    attempt = None if name is None else Attempt(submission.run_dir, name)
    begun = begun_attempts(submission.run_dir) if attempt else []
    rehearsal = read_run_file(submission.run_dir).get("rehearsal")
    return RunStatus(
        submission,
        JobState("unknown"),
        attempt=name,
        progress=attempt.progress if attempt else {},
        cause=(attempt.status.get("cause") if attempt else None) or {},
        stopping=(submission.run_dir / file_names.STOP).exists(),
        layout=attempt.layout if attempt else "",
        skipped_checkpoints=tuple(each["step"] for each in attempt.began.get("skipped", [])) if attempt else (),
        goodput=goodput_of(begun) if attempt else None,
        step=run_step(begun if attempt is None or any(each.name == name for each in begun) else [*begun, attempt]),
        undelivered_notices=tuple(undelivered_notices(submission.run_dir, attempt.name)) if attempt else (),
        wants_back=_wants_back(attempt),
        missing=tuple(missing_files(submission.run_dir)),
        resumable=can_be_resumed(submission.run_dir),
        rehearses=rehearsal.get("pipeline_rank") if rehearsal else None,
    )


def _wants_back(attempt: Attempt | None) -> bool:
    return attempt is not None and (attempt.status.get("next") or {}).get("action") == "requeue"


def _skipped_words(steps: Sequence[int]) -> str:
    last = f"the damaged checkpoint of step {steps[0]}"
    return f"began before {last}" + (f" and {counted(len(steps) - 1, 'other')}" if len(steps) > 1 else "")


def _layout_words(layout: str) -> str:
    if is_for_fewer_nodes(layout):
        nodes = int(layout.rpartition("/")[2])
        return f"nodes were lost, so on {counted(nodes, 'node')} with {layout}"
    return f"out of memory before, so with {layout}"


def _cause_words(cause: Mapping[str, Any]) -> str:
    where = f" on {cause['node']}" if cause.get("node") else ""
    rank = f", rank {cause['rank']}" if cause.get("rank") is not None else ""
    return f"{cause_record.in_words(str(cause.get('kind') or 'crash'))}{where}{rank}"
