"""`llmlaunch logs`: what the nodes of a run have printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from llmlaunch.app.run_lookup import submission_of
from llmlaunch.cli.next_steps import run_path, while_it_is
from llmlaunch.cli.on_host import HostCommand
from llmlaunch.cli.output import notify, say, say_next_of_table
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.launchers.base import JobState, Submission
    from llmlaunch.launchers.logs import JobLogs
    from llmlaunch.watch.screen import Screen


_TAIL_OF_THE_PAST = 200
"""Steps of a run that goes on are shown from these last lines of each log on."""


@click.command("logs", cls=HostCommand)
@click.argument("run", metavar="RUN|DIR")
@click.option("--node", metavar="NODE|RANK|all", default="all", help="Of one node, by its name or node rank.")
@click.option("--attempt", metavar="A|last|all", default="last", help="Of one attempt; the last unless given.")
@click.option("--job", is_flag=True, help="Of the batch script alone.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="The last N lines of each log.")
@click.option("--follow", is_flag=True, help="Go on until the job has ended; Ctrl-C only ends the looking.")
@click.option("--raw", is_flag=True, help="With --follow: the lines as they are, also of all nodes.")
def logs_command(run: str, node: str, attempt: str, job: bool, tail: int | None, follow: bool, raw: bool) -> int:
    """Print the logs of RUN: of the last attempt, all nodes, unless told otherwise.

    With --follow steps and events are shown, as `submit --follow` does; with --raw, or where a node, an attempt, --job
    or --tail is named, the lines themselves.

    \b
    llmlaunch logs last --tail 50
    llmlaunch logs last --follow
    """
    from llmlaunch.watch.follow import follow as follow_run
    from llmlaunch.watch.screen import Screen

    submission = submission_of(run, notify)
    screen = Screen(sys.stdout)
    if follow and not raw and (node, attempt, job, tail) == ("all", "last", False, None):
        _say_next(submission, follow_run(submission, screen, tail=_TAIL_OF_THE_PAST))
        return 0
    logs = _wanted(submission, node, attempt, job, tail, follow)
    if follow:
        _say_next(submission, follow_run(submission, screen, logs=logs))
    else:
        _print(submission, logs, screen)
        if (attempt, job) == ("last", False):
            _say_end(submission)
        say_next_of_table((to_type("status", run_path(submission.run_dir)), "what became of it"))
    return 0


def _say_end(submission: Submission) -> None:
    """Say how a run ended whose files say so, and what to do; nothing of one that succeeded or goes on."""
    from llmlaunch.launchers.choose import launcher_of
    from llmlaunch.launchers.run_files import known_end

    state = known_end(submission)
    if submission.launcher == "local":
        state = launcher_of(submission).states([submission])[submission.job_id]
    if state is not None and state.ended:
        _say_ending(submission, state)


def _say_ending(submission: Submission, state: JobState) -> None:
    """Say how a run ended without success; on stderr, because the logs are what a pipe wants."""
    from llmlaunch.cli.following import ending

    for line in ending(submission.run_dir, state) if state.phase != "succeeded" else ():
        say(line, err=True)


def _say_next(submission: Submission, state: JobState) -> None:
    """Say what fits the end of a run; where a person stopped looking before it, that was said then."""
    if state.ended:
        _say_ending(submission, state)
        say_next_of_table(*while_it_is(submission.run_dir, state, {}))


def _wanted(submission: Submission, node: str, attempt: str, job: bool, tail: int | None, follow: bool) -> JobLogs:
    from llmlaunch.launchers.logs import JOB, JobLogs, the_attempts, the_nodes

    attempts = the_attempts(submission, attempt)
    if job and node != "all":
        raise UserError("--job: is the batch script's own log, of no node; leave out --node")
    nodes = frozenset({JOB}) if job else the_nodes(submission, node, attempts, later=follow)
    return JobLogs(submission, nodes, attempts, later=attempt in ("last", "all"), tail=tail)


def _print(submission: Submission, logs: JobLogs, screen: Screen) -> None:
    from llmlaunch.launchers.logs import other_files

    for line in logs.to_end():
        screen.say(line)
    others = other_files(submission, logs.attempts)
    if others:
        say("also there:\n" + "\n".join(f"  {path}" for path in others), err=True)
