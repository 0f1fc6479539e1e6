"""`llmlaunch runs` and `llmlaunch status`: what became of runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.app.run_lookup import directory_of, note_ends, ongoing_directories, submission_in
from llmlaunch.cli.next_steps import Step, after_end, run_path, while_going_on, while_it_is
from llmlaunch.cli.on_host import HostCommand
from llmlaunch.cli.output import FiniteRange, notify, print_json, say, say_next, say_next_of_table
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import PHASES
from llmlaunch.report.terminal import filled, shown_on
from llmlaunch.rundir.values import counted, to_type

if TYPE_CHECKING:
    from llmlaunch.app.stored_runs import RunState
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.run_status import RunStatus


HEAD = (  # what one looks for first comes first: a narrow screen shows the others in lines below
    *("run", "state", "step", "measured GiB", "predicted GiB", "kind", "verdict (80 % rule)", "attempts", "goodput"),
    *("age", "recipe", "launcher", "job", "directory"),
)
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@click.command("runs", cls=HostCommand)
@click.option(
    "--state", "states", multiple=True, type=click.Choice(PHASES), metavar="S", help=f"Now {', '.join(PHASES)}."
)
@click.option("--recipe", metavar="R", help="Of the recipe of this name.")
@click.option("--since", metavar="7d|DATE", help="Submitted since: 30m, 12h, 7d, 2w ago, or a date.")
@click.option("--cluster", metavar="C", help="On the cluster SLURM calls so; local runs: on this host.")
@click.option("--launcher", type=click.Choice(["slurm", "local"]))
@click.option("--limit", type=click.IntRange(1, 10**9), metavar="N", help="The newest N.")
@click.option(
    "--export",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write their figures to FILE, a line of JSON each, for other tools; - is stdout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
def runs_command(
    states: tuple[str, ...],
    recipe: str | None,
    since: str | None,
    cluster: str | None,
    launcher: str | None,
    limit: int | None,
    file: Path | None,
    as_json: bool,
) -> None:
    """List the runs, the newest first: state, attempts, step, the plan's verdict and risk with Fujii's 80 % rule's in
    brackets, the worst rank's predicted and measured peak, and the goodput: the share of the allocated time in which
    steps were made that count in the end.

    Runs that have finished since are collected first; SLURM is asked once about all that go on.

    \b
    llmlaunch runs --since 7d
    llmlaunch runs --recipe llama3-8b --state failed --limit 5
    llmlaunch runs --since 7d --export runs.jsonl
    """
    from llmlaunch.app.stored_runs import runs

    with waiting_for("asking what became of the runs"):
        listed = runs(states, recipe, None if since is None else _moment(since), cluster, launcher, limit, notify)
    if file is not None:
        _export(listed, file, as_json)
    elif as_json:
        print_json({"runs": [run.to_json() for run in listed]})
    elif listed:
        say(_runs_table(listed))
        say_next_of_table(*_after_list(listed[0]))
    elif states or any(option is not None for option in (recipe, since, cluster, launcher, limit)):
        say("no such runs", err=True)
        say_next_of_table((to_type("runs"), "all of them"))
    else:
        say("no runs yet; `llmlaunch submit RECIPE` starts one", err=True)
        say_next_of_table((to_type("init"), "a starter recipe"))


def _export(listed: Sequence[RunState], file: Path, as_json: bool) -> None:
    """Write the figures of the runs to a file, or to stdout, which is then nothing else."""
    from llmlaunch.app.stored_runs import figures
    from llmlaunch.store.measurements import write_lines

    if as_json and str(file) == "-":
        raise UserError("--json: the lines of --export - are JSON already; leave one of the two out")
    lines = [json.dumps(entry) for entry in figures(listed, notify)]
    if str(file) == "-":
        for line in lines:
            say(line)
        return
    write_lines(lines, file)
    if as_json:
        print_json({"exported": len(lines), "file": str(file)})
    else:
        notify(f"{counted(len(lines), 'run')} written to {file}")


def _after_list(newest: RunState) -> list[Step]:
    """Return what to type about the newest run of a list."""
    place = run_path(newest.run.directory)
    if newest.phase in ("pending", "running"):
        return while_going_on(place)[:1]
    return [(to_type("status", place), "the newest"), (to_type("accuracy"), "predicted against measured, all runs")]


def _runs_table(listed: Sequence[RunState]) -> str:
    from llmlaunch.causes.cause import in_words
    from llmlaunch.planner.plan import risk_words
    from llmlaunch.report.text import one_line, table
    from llmlaunch.units import duration, gib

    rows, now = [], time.time()
    for entry in listed:
        run, progress, state = entry.run, entry.progress, entry.phase
        if entry.live is not None and state == "pending" and entry.live.state.reason:
            state += f" ({entry.live.state.reason})"
        elif run.cause is not None:
            state += f": {in_words(run.cause)}"
        steps = f"/{progress.steps}" if progress.steps else ""
        step = "-" if progress.step is None else f"{progress.step}{steps}"
        since = run.submitted_at or run.started_at
        sizes = ["-" if size is None else gib(size) for size in (run.measured_bytes, run.predicted_bytes)]
        fujii = "" if entry.fujii_verdict is None else f" ({entry.fujii_verdict})"
        risk = "" if entry.stated_risk is None else f", {risk_words(entry.stated_risk)}"
        verdict = f"{entry.verdict or '-'}{risk}{fujii}"
        age = "-" if since is None else duration(max(0.0, now - since))
        share = None if progress.goodput is None else progress.goodput.share
        goodput = "-" if share is None else f"{100 * share:.0f} %"
        texts = (
            *(run.run_id, state, step, *sizes, run.peak_kind, verdict, progress.chain, goodput),
            *(age, run.recipe, run.launcher, run.job_id, str(run.directory)),
        )
        rows.append([one_line(text or "-") for text in texts])
    return table(HEAD, rows, indent="")


def _moment(word: str) -> float:
    """Return the unix seconds of `7d` (ago) or of a date. Raises UserError."""
    match = re.fullmatch(r"(\d+)([mhdw])", word)
    if match:
        return time.time() - int(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError:
        raise UserError(f"--since {word}: not 30m, 12h, 7d, 2w or a date such as 2026-11-21") from None


@click.command("status", cls=HostCommand)
@click.argument("runs", metavar="[RUN|DIR]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the states as JSON.")
@click.option("--watch", is_flag=True, help="Go on looking until all have ended, with memory by GPU, steps and loss.")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=FiniteRange(0.2, 3600),
    help="With --watch: between two looks at the files [2].",
)
def status_command(runs: tuple[str, ...], as_json: bool, watch: bool, interval: float | None) -> int:
    """Say whether each RUN waits, runs or has ended, how far it got, and why; without one, of all that have not ended.

    SLURM is asked once for all of them. With --watch the exit code is 1 where a run ended without success.

    \b
    llmlaunch status                of all that go on
    llmlaunch status last --watch
    """
    if interval is not None and not watch:
        raise UserError("--interval: is for --watch")
    several = len(runs) != 1
    directories = [directory_of(run, notify) for run in runs] if runs else ongoing_directories()
    submissions: list[Submission] = []
    refused: list[RunStatus] = []
    for directory in directories:
        try:
            look = _refused(directory)
            if look is not None:
                refused.append(look)
                continue
            submissions.append(submission_in(directory, notify))
        except UserError as failure:
            if not several:
                raise
            notify(f"warning: {failure}")
    if watch and submissions:
        from llmlaunch.cli.following import watch_runs

        return watch_runs(submissions, as_json, 2.0 if interval is None else interval)
    return _show_states(submissions, refused, several, as_json, hint=not runs)


def _refused(directory: Path) -> RunStatus | None:
    """Return the state of a run that the scheduler refused; None for any other run."""
    from llmlaunch.launchers.base import JobState, Submission
    from llmlaunch.launchers.run_files import read_refusal
    from llmlaunch.launchers.run_status import RunStatus

    refusal = read_refusal(directory)
    if not refusal:
        return None
    reason = f"{refusal}; {to_type('resume', directory)} submits it again"
    submission = Submission("slurm", "-", directory.resolve(), 0.0)
    return RunStatus(submission, JobState("refused", reason=reason), None, {}, {}, stopping=False)


def _show_states(
    submissions: list[Submission], refused: list[RunStatus], several: bool, as_json: bool, hint: bool
) -> int:
    from llmlaunch.launchers.run_status import read_statuses
    from llmlaunch.report.text import paragraph

    with waiting_for("asking what became of the runs"):
        looks = read_statuses(submissions, notify, briefly=True)
    note_ends(((look.submission, look.state) for look in looks), notify)
    looks += refused
    if as_json:
        runs_json = [look.as_json() for look in looks]
        print_json({"runs": runs_json} if several else runs_json[0])
    elif not several:
        for line in filled(looks[0].sentence(), shown_on().width, others="  "):
            say(line)
        if looks[0].state.ended:
            for line in paragraph(looks[0].advice):
                say(line)
        say_next(*while_it_is(looks[0].submission.run_dir, looks[0].state, looks[0].cause))
    elif looks:
        say(_status_table(looks))
        say_next_of_table(*_after_table(looks))
    elif hint:
        say("no run is going on; llmlaunch runs lists those that have ended", err=True)
    return 0


def _after_table(looks: Sequence[RunStatus]) -> list[Step]:
    """Return what to type about several runs: about the first that failed, else how to watch what goes on."""
    for look in looks:
        if look.state.phase in ("failed", "refused"):
            return while_it_is(look.submission.run_dir, look.state, look.cause)
    if any(not look.state.ended for look in looks):
        return [(to_type("status", "--watch"), "until all have ended")]
    return after_end(looks[0].submission.run_dir, looks[0].state, looks[0].cause)


def _status_table(looks: list[RunStatus]) -> str:
    from llmlaunch.report.text import one_line, table

    rows = [[one_line(cell) for cell in look.cells()] for look in looks]
    head = ("run", "job", "phase", "step", "loss", "tokens/s")
    return table(head, [row[:-1] for row in rows], indent="", remarks=[row[-1] for row in rows])
