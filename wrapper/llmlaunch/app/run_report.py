"""All that one run's files and its launcher say of it, as `report --json` prints it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.messages import Notify
from llmlaunch.app.run_lookup import note_ends, submission_in
from llmlaunch.app.run_series import Point, StepTrace, memory_trace, step_trace, thinned
from llmlaunch.causes.cause import sentence
from llmlaunch.causes.redaction import masked, secret_values
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.run_files import can_be_resumed, read_refusal
from llmlaunch.report.run_text import advice_text, bad_loss_text, slow_texts
from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import read_object, read_text
from llmlaunch.rundir.goodput import goodput_of
from llmlaunch.rundir.memory_files import attempt_summary
from llmlaunch.rundir.reached_steps import ended_before_first_step, reached_step, run_step
from llmlaunch.rundir.run import RunDirectoryError, RunFiles, read_run
from llmlaunch.rundir.values import byte_count, count_above_zero, counted, number, text_or_none

if TYPE_CHECKING:
    from llmlaunch.rundir.summary import AttemptSummary, RankSummary


SCHEMA = 1
MOST_ATTEMPTS = 200  # the newest
MOST_CURVES = 6  # of memory over time: the fullest rank of so many pipeline ranks
MOST_RECIPE = 20_000  # characters
LEAST_CURVE_SECONDS = 30.0  # three lines of a monitor
ENDINGS = ("succeeded", "failed", "stopped")
NO_STEP = "It ended before its first step, so the memory that was measured is no peak to compare with the prediction."

Record = dict[str, Any]


def run_report(directory: Path, notify: Notify) -> Record:
    """Return the report of the run in `directory`. What cannot be known is null, and a sentence of `missing` says why.

    Raises UserError where `directory` is no run directory.
    """
    try:
        files = read_run(directory)
    except RunDirectoryError as error:
        raise UserError(str(error)) from None
    missing: list[str] = list(files.problems)
    begun = files.attempts[-MOST_ATTEMPTS:]
    if len(begun) < len(files.attempts):
        missing.append(f"Of {len(files.attempts)} attempts the last {MOST_ATTEMPTS} are shown.")
    traces = {attempt.name: step_trace(attempt) for attempt in begun}
    attempts = _attempts(begun, traces)
    submission = _submission(files, notify)
    state = _state(files, submission, begun, notify)
    measured = _measured_attempt(files, begun)
    plan = _plan(files, measured)
    steps = _steps(begun, traces, missing)
    memory = _memory(files, measured, plan, missing)
    report: Record = {
        "schema": SCHEMA,
        "run": _run(files, submission, plan),
        "state": state,
        "plan": plan,
        "attempts": attempts,
        "goodput": goodput_of(begun).as_json(),
        "memory": memory,
        "steps": steps,
        "compared": _compared(files, plan, memory, steps, measured),
        "recipe": _recipe(files),
        "versions": _versions(files),
        "files": _files(files),
        "missing": missing,
    }
    return _without_secrets(report)


# --- what the run is, and how it stands -----------------------------------------------------------------------------


def _run(files: RunFiles, submission: Submission | None, plan: Record) -> Record:
    run = files.run
    described = _measurement(run)
    model = _object(described, "recipe").get("model", described.get("model"))  # where earlier runs have it
    return {
        "run_id": files.run_id,
        "name": str(run.get("name") or files.directory.name),
        "directory": str(files.directory),
        "backend": text_or_none(run.get("backend")),
        "model": text_or_none(model.get("name")) if isinstance(model, dict) else None,
        "accelerator": text_or_none(described.get("gpu")),
        "nodes": count_above_zero(run.get("nodes")),
        "devices_per_node": count_above_zero(run.get("devices_per_node")),
        "devices": _devices(run),
        "launcher": None if submission is None else submission.launcher,
        "job_id": None if submission is None else submission.job_id,
        "submitted_at": submission.submitted_at if submission is not None and files.submission is not None else None,
        "steps": count_above_zero(_object(run, "progress").get("steps")) or _steps_announced(files.attempts),
        "layout": plan["layout"],
    }


def _steps_announced(attempts: Sequence[Attempt]) -> int | None:
    """How many steps the trainer said it would make, where run.json does not say."""
    announced = (attempt.progress.get("steps") or None for attempt in reversed(attempts))
    return next((steps for steps in announced if steps is not None), None)


def _measurement(run: Mapping[str, Any]) -> Record:
    return _object(run, "measurement")


def _object(record: Mapping[str, Any], name: str) -> Record:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _devices(run: Mapping[str, Any]) -> int | None:
    world = count_above_zero(_measurement(run).get("world_size"))
    nodes, devices = count_above_zero(run.get("nodes")), count_above_zero(run.get("devices_per_node"))
    return world or (nodes * devices if nodes and devices else None)


def _state(files: RunFiles, submission: Submission | None, begun: Sequence[Attempt], notify: Notify) -> Record:
    status = files.status or {}
    cause = status.get("cause")
    refusal = read_refusal(files.directory)
    known = text_or_none(status.get("state")) or ("unknown" if submission else "not submitted")
    state: Record = {
        "phase": "refused" if refusal else known,
        "why": refusal or text_or_none(status.get("why")),
        "cause": text_or_none(cause.get("kind")) if isinstance(cause, dict) else None,
        "cause_sentence": sentence(cause) if isinstance(cause, dict) else None,
        "advice": None,
        "exit_code": status.get("exit_code") if type(status.get("exit_code")) is int else None,
        "step": run_step(begun),
    }
    if isinstance(cause, dict) and known in ("failed", "stopped"):
        state["advice"] = advice_text(cause, submitted=can_be_resumed(files.directory)) or None
    if submission is None:
        return state
    from llmlaunch.launchers.run_status import read_statuses

    try:
        (look,) = read_statuses([submission], notify, briefly=True)
    except UserError as failure:
        notify(f"warning: the state is what the files say: {failure}")
        return state
    note_ends([(look.submission, look.state)], notify)
    if look.state.phase != "unknown":
        state |= {"phase": look.state.phase, "why": look.state.reason or state["why"], "advice": look.advice or None}
    return state


def _submission(files: RunFiles, notify: Notify) -> Submission | None:
    """The submission, also of a run that was started by hand; None where there is none."""
    try:
        return submission_in(files.directory, notify)
    except UserError as failure:
        if files.submission is not None:
            notify(f"warning: the state is what the files say: {failure}")
        return None


def _attempts(begun: Sequence[Attempt], traces: Mapping[str, StepTrace]) -> list[Record]:
    """One record for each attempt, oldest first; `time` says how its seconds were spent, None where nobody knows when
    it began."""
    times = iter(goodput_of(begun).attempts)
    return [
        _attempt(attempt, traces[attempt.name])
        | {"time": next(times)._asdict() if attempt.began.get("started_at") else None}
        for attempt in begun
    ]


def _attempt(attempt: Attempt, trace: StepTrace) -> Record:
    status, cause = attempt.status, attempt.status.get("cause")
    state = status.get("state")
    seconds = statistics.median(value for _, value in trace.seconds) if trace.seconds else None
    return {
        "attempt": attempt.name,
        "layout": attempt.layout or "planned",
        "nodes": len(attempt.nodes) or None,
        "state": state if state in ENDINGS else None,
        "started_at": attempt.began.get("started_at") or attempt.started_at,
        "ended_at": status.get("ended_at"),
        "from_step": attempt.from_step,
        "to_step": reached_step(attempt),
        "saved_step": status.get("saved_step"),
        "step_seconds": seconds if seconds is not None else attempt.progress.get("step_seconds"),
        "cause": cause.get("kind") if cause else None,
        "why": sentence(cause) if cause else status.get("why") or None,
        "slow": slow_texts(status if status else attempt.progress),
    }


# --- prediction and measurement -------------------------------------------------------------------------------------


def _measured_attempt(files: RunFiles, begun: Sequence[Attempt]) -> tuple[Attempt, AttemptSummary] | None:
    """The attempt that memory was measured of, with its account: the newest that made a step and has the peak of a
    rank, else the newest that has one, else the newest of which the main memory of a node is known."""
    known: list[tuple[int, Attempt, AttemptSummary]] = []
    for attempt in reversed(begun):
        summary = attempt_summary(files.directory, attempt.name)
        if any(rank.peak_bytes is not None for rank in summary.ranks):
            if not ended_before_first_step(attempt):
                return attempt, summary
            known.append((0, attempt, summary))
        elif any(node.host_peak_bytes is not None for node in summary.nodes):
            known.append((1, attempt, summary))
    best = min(known, key=lambda each: each[0], default=None)  # of equals the newest
    return None if best is None else best[1:]


def _plan(files: RunFiles, measured: tuple[Attempt, AttemptSummary] | None) -> Record:
    """The prediction of the layout that ran last."""
    layout = measured[0].layout if measured is not None else ""
    plan = read_object(files.directory / layout / file_names.PLAN) or {}
    run = (measured[0].run if measured is not None else files.run) or files.run
    memory = _object(plan, "memory")
    predicted = run.get("predicted_bytes")
    sizes = [byte_count(size) for size in predicted] if isinstance(predicted, list) else []
    by_kind = _object(run, "predicted_by_kind")
    return {
        "verdict": text_or_none(plan.get("verdict")),
        "stated_risk": number(memory.get("stated_risk")),
        "layout": _layout_words(_object(plan, "layout")),
        "layout_of": layout or "planned",
        "step_seconds": number(plan.get("step_seconds")),
        "tokens_per_second_per_device": number(plan.get("tokens_per_second_per_gpu")),
        "peak_kind": text_or_none(run.get("peak_kind")),
        "limit_bytes": byte_count(memory.get("limit_bytes")),
        "memory_bytes": byte_count(memory.get("memory_bytes")),
        "predicted_bytes": sizes,
        "predicted_by_kind": {kind: _most(by_kind.get(kind)) for kind in MEASURED_KINDS},
        "host_bytes_per_node": byte_count(by_kind.get("host")),
    }


def _layout_words(layout: Mapping[str, Any]) -> str | None:
    """The sizes of a layout that are not 1, as its JSON names them."""
    shown = [f"{name.replace('_', ' ')} {value}" for name, value in layout.items() if _tells(value)]
    return ", ".join(shown) or None


def _tells(value: object) -> bool:
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        return False
    return value not in (1, "none", "", 0)


def _most(sizes: object) -> int | None:
    counts = [byte_count(size) for size in sizes] if isinstance(sizes, list) else [byte_count(sizes)]
    return max((size for size in counts if size is not None), default=None)


def _steps(begun: Sequence[Attempt], traces: Mapping[str, StepTrace], missing: list[str]) -> Record:
    most = max(400 // max(len(begun), 1), 20)
    loss = {attempt.name: thinned(traces[attempt.name].losses, most) for attempt in begun}
    seconds = {attempt.name: thinned(traces[attempt.name].seconds, most) for attempt in begun}
    paces = [value for attempt in begun for _, value in traces[attempt.name].seconds]
    strange = [step for attempt in begun for step in traces[attempt.name].not_finite]
    logged = sum(trace.steps for trace in traces.values())
    if strange:
        missing.append(f"The loss was no number at {counted(len(strange), 'step')}, first at step {min(strange):,}.")
    for attempt in begun:
        bad_loss = bad_loss_text(attempt.progress)
        missing += [f"The loss of attempt {attempt.name}: {bad_loss}."] if bad_loss else []
    if not begun:
        missing.append("No attempt has begun, so there is nothing of steps, loss and memory.")
    elif not logged:
        missing.append("No log reports a step: the run ended before its first one, or its lines are of no known form.")
    elif not any(loss.values()):
        missing.append("The logs report steps without a loss.")
    elif not paces:
        missing.append("The logs report steps without their time.")
    last = next((traces[attempt.name].losses[-1] for attempt in reversed(begun) if traces[attempt.name].losses), None)
    return {
        "logged": logged,
        "loss": _curves(loss),
        "seconds": _curves(seconds),
        "last_loss": None if last is None else last[1],
        "median_seconds": statistics.median(paces) if paces else None,
    }


def _curves(by_attempt: Mapping[str, Sequence[Point]]) -> list[Record]:
    return [
        {"attempt": name, "points": [[_short(value) for value in point] for point in points]}
        for name, points in by_attempt.items()
        if points
    ]


def _short(value: float) -> float:
    """Six digits: a picture shows no more, and a page is to be sent."""
    return float(f"{value:.6g}")


def _is_short(attempt: Attempt) -> bool:
    """Whether it lasted less than three lines of the monitor take: nobody expects a curve of it."""
    began, ended = attempt.began.get("started_at"), attempt.status.get("ended_at")
    return began is not None and ended is not None and ended - began < LEAST_CURVE_SECONDS


def _memory(
    files: RunFiles, measured: tuple[Attempt, AttemptSummary] | None, plan: Record, missing: list[str]
) -> Record:
    memory: Record = {"attempt": None, "stages": [], "kinds": {}, "over_time": [], "remarks": []}
    if measured is None:
        if files.attempts:
            missing.append("No peak of memory was measured: no monitor, probe or rank left one.")
        return memory
    attempt, summary = measured
    ranks = [rank for rank in summary.ranks if rank.peak_bytes is not None]
    if not ranks:
        missing.append("No peak of a rank was measured, only the main memory of the nodes.")
    elif ended_before_first_step(attempt):
        missing.append(NO_STEP)
    stages = _stages(ranks, () if ended_before_first_step(attempt) else plan["predicted_bytes"])
    names = [each.name for each in files.attempts[-MOST_ATTEMPTS:]]
    curves = [_curve(files, rank, names) for rank in _fullest(ranks)]
    shown = [curve for curve in curves if len(curve["points"]) > 1]
    if ranks and not shown and not _is_short(attempt):
        missing.append("The monitors left fewer than two samples: no memory over time.")
    hosts = [node.host_peak_bytes for node in summary.nodes if node.host_peak_bytes is not None]
    kinds = {
        kind: max(sizes)
        for kind in MEASURED_KINDS
        if (sizes := [size for rank in summary.ranks if (size := getattr(rank, f"{kind}_peak_bytes")) is not None])
    }
    return memory | {
        "attempt": attempt.name,
        "stages": stages,
        "kinds": kinds | ({"host": max(hosts)} if hosts else {}),
        "over_time": shown,
        "remarks": sorted(_remarks(summary, on_cpu=plan["peak_kind"] == "resident"))[:10],
    }


def _remarks(summary: AttemptSummary, on_cpu: bool) -> set[str]:
    """What the monitors could not see; that there is no GPU's library is no news on a CPU."""
    said = {remark for node in summary.nodes for remark in node.remarks}
    bounds = sum("peak_bytes" in (rank.at_least or ()) for rank in summary.ranks)
    if bounds:
        whose = "The peak of 1 rank is" if bounds == 1 else f"The peaks of {bounds:,} ranks are"
        said.add(f"{whose} at least what was measured: monitor or probe was lost before the attempt ended")
    return {remark for remark in said if not (on_cpu and remark.startswith("NVML "))}


def _stages(ranks: Sequence[RankSummary], predicted: Sequence[int | None]) -> list[Record]:
    """The ranks of each pipeline rank together: thousands have few stages."""
    groups: dict[int | None, list[RankSummary]] = {}
    for rank in ranks:
        groups.setdefault(rank.pipeline_rank, []).append(rank)
    stages = []
    for stage in sorted(groups, key=lambda each: -1 if each is None else each):
        sizes = sorted(rank.peak_bytes or 0 for rank in groups[stage])
        worst = max(groups[stage], key=lambda rank: (rank.peak_bytes or 0, -rank.rank))
        stages.append(
            {
                "pipeline_rank": stage,
                "ranks": len(sizes),
                "peak_bytes": sizes[-1],
                "median_bytes": int(statistics.median(sizes)),
                "least_bytes": sizes[0],
                "worst_rank": worst.rank,
                "node": worst.node,
                "source": worst.peak_source,
                "predicted_bytes": predicted[stage] if stage is not None and stage < len(predicted) else None,
            }
        )
    return stages


def _fullest(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """The fullest rank of each pipeline rank, those that hold the most first."""
    fullest: dict[int | None, RankSummary] = {}
    for rank in ranks:
        other = fullest.get(rank.pipeline_rank)
        if rank.node is not None and (other is None or (rank.peak_bytes or 0) > (other.peak_bytes or 0)):
            fullest[rank.pipeline_rank] = rank
    return sorted(fullest.values(), key=lambda rank: -(rank.peak_bytes or 0))[:MOST_CURVES]


def _curve(files: RunFiles, rank: RankSummary, attempts: Iterable[str]) -> Record:
    on_device = files.run.get("peak_kind") != "resident"
    trace = memory_trace(
        files.directory, rank.rank, rank.pipeline_rank, str(rank.node), rank.gpu_uuid if on_device else None, attempts
    )
    held = thinned([(moment, float(now)) for moment, now, _ in trace.samples])
    most = thinned([(moment, float(peak)) for moment, _, peak in trace.samples])
    points = [[round(now[0], 1), now[1], now[2], peak[3]] for now, peak in zip(held, most, strict=True)]
    return {"rank": rank.rank, "pipeline_rank": rank.pipeline_rank, "node": rank.node, "points": points}


def _compared(
    files: RunFiles, plan: Record, memory: Record, steps: Record, measured: tuple[Attempt, AttemptSummary] | None
) -> list[Record]:
    """Prediction beside measurement. What was held before the first step is no peak that a prediction is about."""
    if measured is not None and ended_before_first_step(measured[0]):
        memory = memory | {"stages": [], "kinds": {}}
    return compared(plan, memory, _pace(steps, measured), _tokens_of_a_device(files.run))


def _pace(steps: Record, measured: tuple[Attempt, AttemptSummary] | None) -> float | None:
    seconds: float | None = steps["median_seconds"]
    return measured[1].step_seconds if seconds is None and measured is not None else seconds


def _tokens_of_a_device(run: Mapping[str, Any]) -> float | None:
    tokens, devices = count_above_zero(_object(run, "progress").get("tokens_per_step")), _devices(run)
    return tokens / devices if tokens and devices else None


# --- the recipe, the versions, the files ----------------------------------------------------------------------------


def _recipe(files: RunFiles) -> Record:
    try:
        text = read_text(files.directory / file_names.RECIPE)[:MOST_RECIPE]
    except OSError:
        text = ""
    overrides = files.run.get("overrides")
    return {"text": text, "overrides": [str(word) for word in overrides] if isinstance(overrides, list) else []}


def _versions(files: RunFiles) -> Record:
    code = read_object(files.directory / "code.json") or {}
    described = {"llmlaunch": code.get("llmlaunch_version"), "backend": _measurement(files.run).get("backend_version")}
    container, git = _object(code, "container"), _object(code, "git")
    described |= {"container": container.get("digest") or container.get("image"), "commit": git.get("commit")}
    packages = [read_object(attempt.folder / file_names.VERSIONS) or {} for attempt in files.attempts[-MOST_ATTEMPTS:]]
    described |= {name: version for record in packages for name, version in record.items()}
    return {str(name): version for name, version in described.items() if isinstance(version, str)}


def _files(files: RunFiles) -> list[str]:
    names = (
        *(file_names.RECIPE, file_names.PLAN, file_names.ARGUMENTS, file_names.JOB_SCRIPT, file_names.RUN),
        *(file_names.STATUS, file_names.LOGS, file_names.PEAKS, file_names.ATTEMPTS),
    )
    return [str(files.directory / name) for name in names if (files.directory / name).exists()]


def _without_secrets(report: Record) -> Record:
    secrets = secret_values(os.environ)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return masked(value, secrets)
        if isinstance(value, list):
            return value if value and isinstance(value[0], int | float) else [clean(item) for item in value]
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        return value

    cleaned: Record = clean(report)
    return cleaned


MEASURED_KINDS = ("allocated", "reserved")  # peaks of torch's allocator, in addition to the run's own kind


def compared(
    plan: Mapping[str, Any], memory: Mapping[str, Any], pace: float | None, tokens_of_a_device: float | None
) -> list[Record]:
    """Return prediction and measurement for everything that has at least one of them. `pace` is the measured seconds
    per step, and `tokens_of_a_device` the tokens of one device per step."""
    kind = plan["peak_kind"] or "device"
    worst = max((stage["peak_bytes"] for stage in memory["stages"]), default=None)
    predicted = max((size for size in plan["predicted_bytes"] if size is not None), default=None)
    rows = [_row(f"{kind} memory", "bytes", predicted, worst)]
    for name in MEASURED_KINDS:
        if memory["kinds"].get(name) is not None:
            rows.append(_row(f"{name} memory", "bytes", plan["predicted_by_kind"][name], memory["kinds"][name]))
    if memory["kinds"].get("host") is not None:
        rows.append(_row("host memory of a node", "bytes", plan["host_bytes_per_node"], memory["kinds"]["host"]))
    rows.append(_row("step time", "seconds", plan["step_seconds"], pace))
    rate = tokens_of_a_device / pace if tokens_of_a_device and pace else None
    rows.append(_row("throughput of a device", "tokens/s", plan["tokens_per_second_per_device"], rate))
    return [row for row in rows if row["predicted"] is not None or row["measured"] is not None]


def _row(name: str, unit: str, predicted: float | None, measured: float | None) -> Record:
    error = predicted / measured - 1.0 if predicted and measured else None
    return {"name": name, "unit": unit, "predicted": predicted, "measured": measured, "error": error}
