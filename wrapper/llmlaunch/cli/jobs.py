"""`llmlaunch cancel` and `llmlaunch resume`: end the job of a run, or submit its directory again."""

from __future__ import annotations

from pathlib import Path

import click

from llmlaunch.app.run_lookup import directory_of, submission_in
from llmlaunch.cli.next_steps import run_path, while_going_on
from llmlaunch.cli.on_host import HostCommand
from llmlaunch.cli.output import notify, print_json, say_next
from llmlaunch.errors import UserError
from llmlaunch.launchers.run_files import can_be_resumed
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.values import to_type


@click.command("cancel", cls=HostCommand)
@click.argument("runs", metavar="RUN|DIR...", nargs=-1, required=True)
def cancel_command(runs: tuple[str, ...]) -> int:
    """Stop each RUN, with all jobs of its chain; one that has ended is left alone.

    Where one cannot be stopped, the others are, and the exit code is that of the first such failure.

    \b
    llmlaunch cancel last
    """
    code, last = 0, None
    for run in runs:
        try:
            last = _cancel(run)
        except UserError as failure:
            if len(runs) == 1:
                raise
            notify(f"error: {failure}")
            code = code or failure.exit_code
    if last is not None:
        place = run_path(last)
        later = [(to_type("resume", place), "goes on later")] if can_be_resumed(last) else []
        say_next((to_type("status", place), "what became of it"), *later)
    return code


def _cancel(run: str) -> Path:
    """Stop a run, and return its directory."""
    from llmlaunch.launchers.choose import launcher_of
    from llmlaunch.launchers.run_files import refuse_foreign

    directory = directory_of(run, notify)
    refuse_foreign(directory)
    submission = submission_in(directory, notify)
    launcher = launcher_of(submission, notify)
    jobs = ", ".join(submission.jobs)
    if launcher.cancel(submission):
        notify(f"Cancelling job {jobs}")
    else:
        state = launcher.states([submission])[submission.job_id]
        notify(f"job {jobs} has already finished ({state.phase}); nothing was cancelled")
    return directory


@click.command("resume", cls=HostCommand)
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
    run: str,
    options: tuple[str, ...],
    anyway: bool,
    local: bool,
    from_older: bool,
    no_exclude: bool,
    as_json: bool,
) -> int:
    """Submit RUN's directory again when its last job has ended; also one that was never submitted, or whose submit
    was interrupted or refused.

    The training goes on from its last checkpoint. Where that has vanished the job ends and says so; --from-older lets
    it go on from the newest whole checkpoint there is, or from step 0. What follows `--` goes to sbatch, where it wins
    over the script.

    The plan stays the one that was rendered, whatever would be chosen today; `llmlaunch diff RUN RECIPE` says what
    that would be.

    \b
    llmlaunch resume last
    llmlaunch resume last -- --time=24:00:00

    Exit code 0: submitted. 2: its last job has not ended, or it cannot go on. 4: the scheduler refused.
    """
    from llmlaunch.app.submission import resubmit

    directory = directory_of(run, notify)
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
        return 0
    say_next(*while_going_on(directory))
    return 0
