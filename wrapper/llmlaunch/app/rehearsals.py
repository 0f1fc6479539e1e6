"""Rehearse a plan: run or trace single ranks of it, record what they showed, and judge the plan by it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.app.messages import Notify
from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.app.submission import default_directory
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.search import REHEARSED
from llmlaunch.progress import report
from llmlaunch.rehearsal.place import RehearsalPlace, chosen_place
from llmlaunch.rehearsal.ranks import JobAlone, RankChoice, RehearsedRank, chosen_ranks, job_alone
from llmlaunch.rehearsal.records import records_of
from llmlaunch.rehearsal.report import rehearsal_json
from llmlaunch.rehearsal.verdict import Judgement, NextLayout, judge_plan, next_layout, unseen_by_a_trace
from llmlaunch.rundir.values import counted


@dataclass(frozen=True)
class RehearsalResult:
    """What rehearsed ranks showed: the plan's `judgement` by them, the layout to take instead of a refuted one, and the
    store that holds the records now, None where none does."""

    plan: Plan
    ranks: tuple[RehearsedRank, ...]
    judgement: Judgement
    next_layout: NextLayout | None
    store: str | None

    def to_json(self) -> dict[str, Any]:
        """Return what `llmlaunch rehearse --json` prints."""
        return rehearsal_json(self.plan, self.ranks, self.judgement, self.next_layout, self.store)


def rehearse(
    run: PlannedRun, rank: str, place: str, output: Path | None, command: str, notify: Notify
) -> RehearsalResult:
    """Run or trace pipeline ranks of a plan, one at a time or all at once under SLURM.

    `rank` is "worst", "all" or a number; `place` is "auto", "trace" or "gpu"; `output` is the run directory of a
    rehearsal on a GPU; `command` is recorded as what the person typed. What ranks showed before one failed is recorded.

    Raises:
        UserError: there is nothing to rehearse on, or a rank could not be rehearsed.
    """
    chosen = chosen_ranks(run.plan, run.recipe.model, rank)
    left_out = run.plan.refused.get(REHEARSED, 0)
    if left_out:  # what a rehearsal refuted is not chosen again, so the plan may be another one than before
        notify(f"note: {counted(left_out, 'layout')} left out: refuted by a rehearsal")
    for note in run.rendered.notes:
        notify(f"note: {note}")
    where = chosen_place(run.recipe, place, notify)
    job = job_alone(run.setting, run.recipe, run.plan, run.rendered, traced=where.environment is not None)
    ranks: list[RehearsedRank] = []
    try:
        for result in _rehearsed_ranks(run, job, chosen, where, output, notify):
            ranks.append(result)
            report("ranks", len(ranks), len(chosen))
    except UserError:
        if ranks:
            _record(run, job, ranks, command, notify)
        raise
    ranks.sort(key=lambda result: result.pipeline_rank)
    store, of_shape = _record(run, job, ranks, command, notify)
    unseen = unseen_by_a_trace(run.setting.job_of(run.recipe), run.plan.layout)
    judgement = judge_plan(run.plan, (*of_shape, *ranks), run.recipe.memory, unseen)
    return RehearsalResult(run.plan, tuple(ranks), judgement, next_layout(run.setting, run.plan, judgement), store)


def _rehearsed_ranks(
    run: PlannedRun,
    job: JobAlone,
    chosen: Sequence[RankChoice],
    where: RehearsalPlace,
    output: Path | None,
    notify: Notify,
) -> Iterator[RehearsedRank]:
    """Yield each rank as it is done."""
    if where.environment is not None:
        from llmlaunch.rehearsal.traced import traced

        if output is not None:
            raise UserError("-o: a trace leaves no run directory; it belongs to --on gpu")
        notify(where.why)
        return traced(where.environment, run.recipe, run.plan, job, chosen, notify)
    from llmlaunch.rehearsal.on_gpu import run_alone

    assert where.launcher is not None
    directory = output or default_directory(f"{run.recipe.name}-rehearsal")
    return run_alone(run.recipe, run.plan, run.json, run.rendered, job, chosen, where.launcher, directory, notify)


def _record(
    run: PlannedRun, job: JobAlone, ranks: Sequence[RehearsedRank], command: str, notify: Notify
) -> tuple[str | None, Sequence[RehearsedRank]]:
    """Record the ranks in the store; return the store, None where it cannot be written, and all it knows of this
    shape."""
    from llmlaunch.store.database import open_to_write
    from llmlaunch.store.location import where
    from llmlaunch.store.measurements import put_rehearsed, rehearsed_of

    records = records_of(run.recipe, run.plan, job, ranks, time.time(), command)
    try:
        with open_to_write() as store:
            put_rehearsed(store, records)
            return where().shown, rehearsed_of(store, run.recipe, run.plan)
    except UserError as failure:
        notify(f"warning: not recorded: {failure}")
        return None, ()
