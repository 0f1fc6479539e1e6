"""`llmlaunch logs`: what the nodes of a run have printed."""

from __future__ import annotations

import click

from llmlaunch.cli.submitted import submission_of

__all__ = ["command"]


@click.command("logs")
@click.argument("run", metavar="RUN|DIR")
@click.option("--follow", is_flag=True, help="Go on until the job has ended; Ctrl-C only ends the looking.")
def command(run: str, follow: bool) -> int:
    """Print the logs of RUN, all nodes together."""
    from llmlaunch.launchers.choose import launcher_of
    from llmlaunch.launchers.follow import follow as follow_job
    from llmlaunch.launchers.logs import JobLogs

    submission = submission_of(run)
    if follow:
        follow_job(submission.run_dir, launcher_of(submission), submission, lambda line: click.echo(line))
        return 0
    for line in JobLogs(submission).to_end():
        click.echo(line)
    return 0
