"""Submits several runs at once: all are planned and safe before the first is handed in, or none is."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.cli.planned import Planned, planned
from llmlaunch.cli.printed import print_json, say
from llmlaunch.cli.together import RUN, Together, Variant
from llmlaunch.errors import UserError
from llmlaunch.recipe.overrides import shown_word
from llmlaunch.rundir.messages import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import Choice

__all__ = ["plan_all", "show_sweep", "submit_all"]

FAILED = 1


def plan_all(variants: Sequence[Variant], together: Together) -> list[Planned]:
    """Each planned, in order. Raises UserError naming the first that is invalid or not safe, and where runs side by
    side would write and read each other's checkpoints."""
    from llmlaunch.planner.unsafe import refuse

    results = []
    for number, variant in enumerate(variants, start=1):
        say(f"run {number} of {len(variants)}: {variant.shown}", err=True)
        try:
            result = planned(variant.recipe, variant.overrides)
            refuse(result.plan)
            result.refuse_missing_inputs()
            result.warn_of_missing_fallbacks()
        except UserError as mistake:
            commas = [word for word in variant.overrides if "," in word]
            hint = (
                f" To try each value of a list: --grid {shown_word(commas[0])}"
                if commas and mistake.exit_code == 2
                else ""
            )
            raise type(mistake)(
                f"{variant.shown}: {mistake} None of the {len(variants)} was submitted.{hint}"
            ) from None
        results.append(result)
    if together.how in ("independent", "array"):
        _refuse_shared_checkpoints(variants, results)
    return results


def _refuse_shared_checkpoints(variants: Sequence[Variant], results: Sequence[Planned]) -> None:
    seen: dict[str, int] = {}
    for number, result in enumerate(results, start=1):
        path = result.recipe.training.checkpoint_path
        if path is not None and seen.setdefault(path, number) != number:
            raise UserError(
                f"{variants[number - 1].shown}: runs {seen[path]} and {number} would write their checkpoints into "
                f"the same folder, {path}, and go on from each other's; give each its own, by its number: "
                f"training.checkpoint_path={path}/{RUN}, or run them one after the other (--chain)"
            )


def show_sweep(
    variants: Sequence[Variant], results: Sequence[Planned], together: Together, why: str, as_json: bool
) -> int:
    """What would be written and submitted; neither is done."""
    from llmlaunch.rendering.scripts import job_script
    from llmlaunch.rendering.sweep import array_script, run_names

    names = run_names([result.recipe.name for result in results])
    scripts = {name: job_script(result.recipe, result.plan) for name, result in zip(names, results, strict=True)}
    script = array_script(_name(results), scripts, together.array_limit) if together.array else None
    if as_json:
        runs = [_described(*both) | {"plan": both[1].json} for both in zip(variants, results, strict=True)]
        print_json({"how": together.how, "runs": runs, "script": script})
        return 0
    for name, variant, result in zip(names, variants, results, strict=True):
        say(f"{name}: {variant.shown}: {result.plan.layout.describe()}")
    if script is not None:
        say(f"===== job.sbatch\n{script}")
    say(f"{counted(len(results), 'run')}, {_how_words(together)}; nothing was written or submitted. {why}", err=True)
    return 0


def submit_all(
    variants: Sequence[Variant],
    results: Sequence[Planned],
    together: Together,
    choice: Choice,
    words_for: Callable[[Path], Sequence[str]],
    record: Callable[[Planned, Submission], None],
    output: Path | None,
    follow: bool,
    as_json: bool,
) -> int:
    """Render all, hand all in, record all; with `follow` to the end of the last. `words_for` are sbatch's words for a
    run directory beside those that say what it waits for."""
    from llmlaunch.launchers.sweep import submit_sweep
    from llmlaunch.rendering.sweep import render_sweep, run_names

    if choice.launcher.name != "slurm":
        raise UserError(
            f"several runs at once need SLURM, which shares out the machines; submit one by one. {choice.why}"
        )
    waits = together.sbatch_words()
    if together.array:
        _refuse_array(variants, results)
    names = run_names([result.recipe.name for result in results])
    directory = output or _directory(_name(results))
    described = [_described(*both) for both in zip(variants, results, strict=True)]
    writers = {name: result.write_run for name, result in zip(names, results, strict=True)}
    run_dirs = render_sweep(directory, _name(results), together.how, writers, described, together.array_limit)
    say(choice.why, err=True)
    by_directory = dict(zip(run_dirs, results, strict=True))

    def taken(submission: Submission) -> None:
        record(by_directory[submission.run_dir], submission)
        say(f"job {submission.job_id} in {submission.run_dir}", err=True)

    submissions = submit_sweep(choice.launcher, directory.resolve(), run_dirs, together.how, waits, words_for, taken)
    if as_json:
        print_json({"sweep": str(directory.resolve()), "how": together.how, "runs": [_json(s) for s in submissions]})
    if not follow:
        say("look again: llmlaunch runs; llmlaunch status DIR; llmlaunch logs DIR", err=True)
        return 0
    return _follow(submissions, aside=as_json)


def _refuse_array(variants: Sequence[Variant], results: Sequence[Planned]) -> None:
    """What no array can be; SLURM is asked how long one may be."""
    from llmlaunch.launchers.sweep import max_array_size, refuse_array
    from llmlaunch.rendering.recovery_json import restart_by

    for variant, result in zip(variants, results, strict=True):
        if restart_by(result.recipe) == "chain":
            raise UserError(
                f"--array: {variant.shown}: comes back by follow-up jobs (restart.by: chain), which a task of an array "
                "cannot have; say restart.by=requeue, restart=none, or leave out --array"
            )
    refuse_array(len(results), max_array_size())


def _follow(submissions: Sequence[Submission], aside: bool) -> int:
    """To the end of all, also where the terminal is closed on the way; then each is collected."""
    from llmlaunch.cli.outcome import ending
    from llmlaunch.cli.submitted import note_end
    from llmlaunch.launchers.run_files import run_name
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store
    from llmlaunch.watch.follow import follow_several
    from llmlaunch.watch.screen import Screen, outliving_the_terminal

    warn = Screen(sys.stderr, lasting=True)
    screen = warn if aside else Screen(sys.stdout, lasting=True)
    with outliving_the_terminal():
        states = follow_several(submissions, screen)
        ended = [one for one in submissions if states[one.job_id].ended]
        for submission in ended:
            note_end(submission, states[submission.job_id])
        with open_store() as store:
            for outcome in collect(store, [submission.run_dir for submission in ended]):
                warn.say(outcome.sentence())
        bad = [one for one in ended if states[one.job_id].phase != "succeeded"]
        for submission in bad:
            screen.say(f"{run_name(submission.run_dir)}:")
            for line in ending(submission.run_dir, states[submission.job_id]):
                screen.say(f"  {line}")
        screen.say(f"{len(ended) - len(bad)} of {counted(len(submissions), 'run')} succeeded")
    return FAILED if bad else 0


def _directory(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(os.environ.get("LLMLAUNCH_RUNS", "runs")) / f"{name}-{stamp}-{secrets.token_hex(2)}"


def _name(results: Sequence[Planned]) -> str:
    """Of the sweep: the recipe's, where it is one."""
    names = {result.recipe.name for result in results}
    return f"{results[0].recipe.name}-sweep" if len(names) == 1 else "sweep"


def _how_words(together: Together) -> str:
    limit = f", {together.array_limit} at a time" if together.array_limit else ""
    return {
        "array": f"one array{limit}",
        "independent": "jobs of their own",
        "afterok": "each when the one before has succeeded",
        "afterany": "each when the one before has ended",
    }[together.how]


def _described(variant: Variant, result: Planned) -> dict[str, Any]:
    return {"recipe": result.recipe.name, "file": variant.recipe, "overrides": list(variant.overrides)}


def _json(submission: Submission) -> dict[str, Any]:
    from llmlaunch.rundir.files import read_run_id

    return {
        "run_id": read_run_id(submission.run_dir),
        "run_dir": str(submission.run_dir),
        "launcher": submission.launcher,
        "job_id": submission.job_id,
    }
