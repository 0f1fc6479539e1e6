"""Shows several jobs until the last has ended: one line for each, in place on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from llmlaunch.launchers.base import JobState, Launcher, Submission
from llmlaunch.launchers.run_files import run_name
from llmlaunch.report.text import one_line
from llmlaunch.watch.events import RunWatch
from llmlaunch.watch.screen import Screen

__all__ = ["follow_all"]

_READ_SECONDS = 1.0
_SECONDS_A_RUN = 0.05
"""Between two looks for each run: a sweep of a hundred must not keep a file server busy."""


def follow_all(
    launcher: Launcher,
    submissions: Sequence[Submission],
    screen: Screen,
    poll_seconds: float = 10.0,
    patience_seconds: float = 60.0,
) -> Mapping[str, JobState]:
    """The last state of each by job id. Where a terminal shows no lines in place, a run's line is written when its
    state changes. Ctrl-C ends the looking alone; a run that nobody has known for `patience_seconds` is given up."""
    watches = {submission.job_id: RunWatch(submission) for submission in submissions}
    states: dict[str, JobState] = {submission.job_id: JobState("unknown") for submission in submissions}
    known_at = dict.fromkeys(states, time.monotonic())
    try:
        while waiting := [s for s in submissions if _goes_on(states[s.job_id], known_at[s.job_id], patience_seconds)]:
            fresh = launcher.states(waiting)  # all of them in one question
            for submission in waiting:
                before, state = states[submission.job_id], fresh[submission.job_id]
                states[submission.job_id] = state
                if state.phase != "unknown":
                    known_at[submission.job_id] = time.monotonic()
                if (state.phase, state.reason) != (before.phase, before.reason):
                    list(watches[submission.job_id].news())
                    screen.say(f"{_name(submission)} {_words(state)}")
            if all(state.ended for state in states.values()):
                break
            _show(watches, states, screen, poll_seconds)
    except KeyboardInterrupt:
        screen.say("No longer following; the jobs go on. Look again: llmlaunch runs; end one: llmlaunch cancel DIR")
    screen.clear()
    return states


def _show(watches: Mapping[str, RunWatch], states: Mapping[str, JobState], screen: Screen, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for watch in watches.values():
            for news in watch.news():
                if not news.passing:
                    screen.say(f"{_name(watch.submission)} {news.text}")
        screen.show([_line(watch, states[job_id]) for job_id, watch in watches.items()])
        time.sleep(min(max(_READ_SECONDS, len(watches) * _SECONDS_A_RUN), seconds))


def _line(watch: RunWatch, state: JobState) -> str:
    going = watch.line + watch.silence if state.phase == "running" and watch.line else ""
    return f"{_name(watch.submission)} {going or _words(state)}"


def _words(state: JobState) -> str:
    return state.phase + (f": {one_line(state.reason)}" if state.reason else "")


def _name(submission: Submission) -> str:
    return f"{run_name(submission.run_dir)} [{submission.job_id}]"


def _goes_on(state: JobState, known_at: float, patience_seconds: float) -> bool:
    return not state.ended and (state.phase != "unknown" or time.monotonic() - known_at < patience_seconds)
