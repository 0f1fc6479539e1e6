"""Ranks traced on this machine: the tracer of tracing/ under the trace environment's own Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import ALLOCATOR_NAMES, EXPANDABLE_SEGMENTS
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.place import TraceEnvironment, refuse_another_version
from llmlaunch.rehearsal.ranks import ON_TRACE, JobAlone, RankChoice, RehearsedRank
from llmlaunch.tracing import TRACER

Say = Callable[[str], None]
LAST_WORDS = 12  # lines

_WHY = {
    "refused": "{framework} refuses these arguments",
    "dishonest": "the trace would not have been true, so it says nothing",
    "unsupported": "this cannot be traced",
}


def traced(
    environment: TraceEnvironment,
    recipe: Recipe,
    plan: Plan,
    job: JobAlone,
    chosen: Sequence[RankChoice],
    say: Say,
) -> Iterator[RehearsedRank]:
    """Each of `chosen` as it is done; `job` is what is traced of the planned one. Whoever stops asking, or is
    interrupted, ends the tracer and all it has started.

    Raises:
        UserError: the environment's framework is not the job's, or a rank cannot be traced; with the reason.
    """
    notes = refuse_another_version(environment, recipe)
    jobs = [_job(job.recipe, plan, job.rendered, chosen_rank.pipeline_rank) for chosen_rank in chosen]
    ranks = {str(chosen_rank.pipeline_rank): chosen_rank for chosen_rank in chosen}
    side_by_side = min(len(ranks), os.cpu_count() or 1)
    say(f"Tracing {_named(chosen)} of {plan.layout.describe()} with {environment.folder}, a minute or so each...")
    tracer = framework_of(recipe).tracer
    for done, answer in enumerate(_answers(environment, tracer, jobs, side_by_side), start=1):
        chosen_rank = ranks[answer["name"]]
        result = _rehearsed(chosen_rank, job, answer, environment, notes)
        say(f"pipeline rank {chosen_rank.pipeline_rank}: traced in {result.seconds:.0f} s ({done} of {len(ranks)})")
        yield result


def _job(recipe: Recipe, plan: Plan, rendered: Rendered, pipeline_rank: int) -> dict[str, Any]:
    return framework_of(recipe).traced_job(recipe, rendered, plan.layout, pipeline_rank)


def _named(chosen: Sequence[RankChoice]) -> str:
    ranks = ", ".join(str(rank.pipeline_rank) for rank in chosen)
    return f"pipeline rank{'s' if len(chosen) > 1 else ''} {ranks}"


def _answers(
    environment: TraceEnvironment, framework: str, jobs: Sequence[Mapping[str, Any]], side_by_side: int
) -> Iterator[Mapping[str, Any]]:
    command = [str(environment.python), str(TRACER), "--framework", framework, "--processes", str(side_by_side)]
    missing = {job["name"] for job in jobs}
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        tracer = _started(command, environment, complaints)
        try:
            assert tracer.stdin is not None
            assert tracer.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once: its last words say why
                tracer.stdin.write("".join(json.dumps(job) + "\n" for job in jobs))
                tracer.stdin.close()
            for line in tracer.stdout:
                answer = _read(line)
                if answer is not None and answer.get("name") in missing:
                    missing.discard(answer["name"])
                    yield answer
            code = tracer.wait()
        finally:
            _end(tracer)
        if missing:
            raise UserError(_ended_early(environment, code, complaints))


def _started(command: Sequence[str], environment: TraceEnvironment, complaints: IO[str]) -> subprocess.Popen[str]:
    """In a session of its own, so that Ctrl-C reaches it from here alone and takes its children along."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=environment.variables(),
            start_new_session=True,
        )
    except OSError as failure:
        raise UserError(f"{command[0]}: cannot be run: {failure.strerror}") from None


def _end(tracer: subprocess.Popen[str]) -> None:
    """All of its session; nothing is lost, since a trace writes no file."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(tracer.pid, signal.SIGKILL)
    for stream in (tracer.stdin, tracer.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    tracer.wait()


def _read(line: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        answer = json.loads(line)
        return answer if isinstance(answer, dict) else None
    return None


def _ended_early(environment: TraceEnvironment, code: int, complaints: IO[str]) -> str:
    complaints.seek(0)
    last_lines = [line.rstrip() for line in complaints if line.strip()][-LAST_WORDS:]
    how = f"was killed by signal {-code} ({_SIGNALS.get(-code, 'unknown')})" if code < 0 else f"ended with code {code}"
    shown = "".join(f"\n  {line}" for line in last_lines)
    return f"the tracer of {environment.folder} {how} before it was done" + (
        f"; its last words:{shown}" if last_lines else ""
    )


_SIGNALS = {number.value: number.name for number in signal.Signals}


def _rehearsed(
    chosen: RankChoice,
    job: JobAlone,
    answer: Mapping[str, Any],
    environment: TraceEnvironment,
    notes: tuple[str, ...],
) -> RehearsedRank:
    if "trace" not in answer:
        raise UserError(_failure(job.recipe, chosen, answer.get("failure")))
    trace = answer["trace"]
    return RehearsedRank(
        pipeline_rank=chosen.pipeline_rank,
        on=ON_TRACE,
        predicted=chosen.predicted,
        allocated_bytes=trace["peak_bytes"],
        reserved_bytes=_replayed(job.rendered, trace),
        stands_for=chosen.stands_for,
        terms=framework_of(job.recipe).traced_terms(trace, chosen.predicted),
        versions=trace.get("versions") or environment.versions,
        seconds=float(trace["seconds"]),
        remarks=(*notes, *_fewer(trace)),
        tracer_bytes=trace.get("resident_peak_bytes"),
        omissions=job.omissions[chosen.pipeline_rank],
    )


def _fewer(trace: Mapping[str, Any]) -> Iterator[str]:
    """The tracer runs no more micro-batches than it takes to have as many alive as ever are."""
    planned, run = trace.get("microbatches", 0), max(trace.get("microbatches_run") or [0])
    if 0 < run < planned:
        yield f"{run} of {planned} micro-batches a step were run: the rank keeps no more alive with all of them"


def _replayed(rendered: Rendered, trace: Mapping[str, Any]) -> int | None:
    """What the allocator's replay reserved, under the way to make segments that the job asks for."""
    replay = trace.get("allocator")
    if not replay:
        return None
    settings = (rendered.environment[name] for name in ALLOCATOR_NAMES if name in rendered.environment)
    expandable = EXPANDABLE_SEGMENTS in next(settings, "")
    reserved: int | None = replay["reserved_bytes"]["expandable" if expandable else "default"]
    return reserved


def _failure(recipe: Recipe, chosen: RankChoice, failure: Any) -> str:
    """What went wrong, in one message: the framework's own words, and for our own bug where it happened."""
    report = failure if isinstance(failure, dict) else {"kind": "error", "what": "", "detail": str(failure)}
    kind, what, detail = report.get("kind"), str(report.get("what") or ""), str(report.get("detail") or "")
    lines = [line for line in detail.splitlines() if line.strip()]
    if kind in _WHY:
        why = _WHY[kind].format(framework=framework_of(recipe).traced_title)
        return f"{recipe.path}: pipeline rank {chosen.pipeline_rank}: {why}: {what or (lines or ['?'])[-1].strip()}"
    tail = "".join(f"\n  {line}" for line in lines[-LAST_WORDS:])
    return (
        f"{recipe.path}: pipeline rank {chosen.pipeline_rank}: the trace failed: {what or 'no reason was given'}{tail}"
    )
