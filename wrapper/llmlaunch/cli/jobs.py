"""`llmlaunch cancel` and `llmlaunch resume`: end the job of a run, or submit its directory again."""

from __future__ import annotations

import click

from llmlaunch.app.run_lookup import directory_of, submission_in
from llmlaunch.cli.output import notify, print_json
from llmlaunch.errors import UserError
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.values import to_type

__all__ = ["cancel_command", "resume_command"]


@click.command("cancel")
@click.argument("runs", metavar="RUN|DIR...", nargs=-1, required=True)
def cancel_command(runs: tuple[str, ...]) -> int:
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


@click.command("resume")
@click.argument("run", metavar="RUN|DIR")
@click.argument("options", metavar="[-- SBATCH_OPTION...]", nargs=-1)
@click.option("--anyway", is_flag=True, help="Also where nobody knows whether the last job has ended, or it succeeded.")
@click.option("--local", is_flag=True, help="Run on this machine, also where there is SLURM.")
@click.option(
    "--from-older", is_flag=True, help="Also from an older checkpoint than the last one saved, or from step 0."
)
@click.option("--no-exclude", is_flag=True, help="Also on nodes that ended earlier runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the submission as JSON.")
def resume_command(
    run: str, options: tuple[str, ...], anyway: bool, local: bool, from_older: bool, no_exclude: bool, as_json: bool
) -> int:
    """Submit RUN's directory again when its last job has ended; also one that was never submitted, or whose submit
    was interrupted or refused.

    The training goes on from its last checkpoint. Where that has vanished the job ends and says so; --from-older lets
    it go on from the newest whole checkpoint there is, or from step 0. What follows `--` goes to sbatch, where it wins
    over the script.
    """
    from llmlaunch.app.submission import resubmit

    directory = directory_of(run)
    submission = resubmit(
        directory, options, notify, anyway=anyway, local=local, from_older=from_older, exclude_nodes=not no_exclude
    )
    if as_json:
        print_json(
            {
                "run_id": read_run_id(directory),
                "run_dir": str(directory),
                "launcher": submission.launcher,
                "job_id": submission.job_id,
                "jobs": list(submission.jobs),
                "earlier": [job for earlier in submission.earlier for job in earlier.jobs],
            }
        )
    notify(f"look again: {to_type('status', directory)}; {to_type('logs', directory)}")
    return 0
