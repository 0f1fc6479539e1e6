"""`llmlaunch status`: what became of one run."""

from __future__ import annotations

import click

from llmlaunch.cli.planned import print_json
from llmlaunch.cli.submitted import note_end, submission_of

__all__ = ["command"]


@click.command("status")
@click.argument("run", metavar="RUN|DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
def command(run: str, as_json: bool) -> int:
    """Say whether RUN waits, runs or has ended, and why."""
    from llmlaunch.launchers.choose import launcher_of

    submission = submission_of(run)
    state = launcher_of(submission).states([submission])[submission.job_id]
    note_end(submission, state)
    if as_json:
        print_json(
            {
                "run_dir": str(submission.run_dir),
                "launcher": submission.launcher,
                "job_id": submission.job_id,
                "phase": state.phase,
                "state": state.state,
                "reason": state.reason,
                "exit_code": state.exit_code,
            }
        )
        return 0
    words = [f"job {submission.job_id} ({submission.launcher}): {state.phase}"]
    words += [f"[{state.state}]"] if state.state else []
    words += [f"exit code {state.exit_code}"] if state.exit_code is not None else []
    words += [f"- {state.reason}"] if state.reason else []
    click.echo(" ".join(words))
    return 0
