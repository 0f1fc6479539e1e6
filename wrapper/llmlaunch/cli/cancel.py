"""`llmlaunch cancel`: stop runs."""

from __future__ import annotations

import click

from llmlaunch.app.run_lookup import directory_of, submission_in
from llmlaunch.cli.output import notify
from llmlaunch.errors import UserError

__all__ = ["command"]


@click.command("cancel")
@click.argument("runs", metavar="RUN|DIR...", nargs=-1, required=True)
def command(runs: tuple[str, ...]) -> int:
    """Stop each RUN, with all jobs of its chain; one that has ended is left alone.

    Where one cannot be stopped, the others are, and the exit code is that of the first such failure.
    """
    code = 0
    for run in runs:
        try:
            _cancel(run)
        except UserError as failure:
            if len(runs) == 1:
                raise
            notify(f"error: {failure}")
            code = code or failure.exit_code
    return code


def _cancel(run: str) -> None:
    from llmlaunch.launchers.choose import launcher_of
    from llmlaunch.launchers.run_files import refuse_foreign

    directory = directory_of(run)
    refuse_foreign(directory)
    submission = submission_in(directory, notify)
    launcher = launcher_of(submission, notify)
    jobs = ", ".join(submission.jobs)
    if launcher.cancel(submission):
        notify(f"Cancelling job {jobs}")
        return
    state = launcher.states([submission])[submission.job_id]
    notify(f"job {jobs} has already finished ({state.phase}); nothing was cancelled")
