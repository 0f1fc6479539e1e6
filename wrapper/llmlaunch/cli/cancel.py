"""`llmlaunch cancel`: stop a run."""

from __future__ import annotations

import click

from llmlaunch.cli.submitted import submission_of

__all__ = ["command"]


@click.command("cancel")
@click.argument("run", metavar="RUN|DIR")
def command(run: str) -> int:
    """Stop RUN; one that has ended is left alone."""
    from llmlaunch.launchers.choose import launcher_of

    submission = submission_of(run)
    launcher_of(submission).cancel(submission)
    click.echo(f"told job {submission.job_id} to stop", err=True)
    return 0
