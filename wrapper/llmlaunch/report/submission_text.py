"""What `submit` would submit, and what it submitted: at most a screen of 80 columns and 24 lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from textwrap import wrap

from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.sections import receivers
from llmlaunch.recipe.training import default_schedule
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.fewer_nodes_text import fewer_nodes_sentences
from llmlaunch.report.text import one_line
from llmlaunch.rundir.values import counted
from llmlaunch.units import DAY, duration, gib

DECAY_FLAG = "--lr-decay-style"
_COLUMNS = 80
_HEAD_COLUMNS = 13


def dry_run_text(
    recipe: Recipe, plan: Plan, of_slurm: bool, directory: Path, file_count: int, warnings: Sequence[str], now: datetime
) -> str:
    """Return what `submit --dry-run` prints: one row for each thing a person wants to be sure of before the queue.

    `directory` is where the run directory would be, with `file_count` files; `warnings` are what backends say of what
    is rendered."""
    rows = [
        ("run", f"{recipe.name}, from {recipe.path}"),
        ("goes to", _destination(recipe, of_slurm)),
        ("trains", _work(recipe)),
        ("schedule", _schedule(recipe)),
        ("machines", _machines(recipe)),
        ("environment", _environment(recipe)),
        ("data", _data(recipe)),
        ("checkpoints", _checkpoints(recipe)),
        *_notices(recipe),
        ("layout", plan.chosen.describe()),
        *([] if plan.changed is None else [("", plan.changed.sentence(plan.chosen))]),
        ("memory", memory_text(plan)),
        ("time", expected_time_text(plan, now)),
        *_fewer_nodes(recipe, plan),
        ("run folder", f"{directory}, {counted(file_count, 'file')}"),
        *(("note", warning) for warning in warnings),
    ]
    return "\n".join(["Dry run: nothing was written or submitted.", *_rows(rows)])


def submitted_text(recipe: Recipe, plan: Plan, job: str, of_slurm: bool, directory: Path, now: datetime) -> str:
    """Return what `submit` prints of one run that was taken: the job, what it trains, and what to expect of it."""
    scheduler = "SLURM" if of_slurm else "This machine"
    rows = [
        ("trains", _work(recipe)),
        ("machines", _machines(recipe)),
        ("layout", plan.chosen.describe()),
        ("memory", memory_text(plan)),
        ("time", expected_time_text(plan, now)),
        *_fewer_nodes(recipe, plan),
        ("run folder", str(directory)),
    ]
    return "\n".join([f"{scheduler} took {recipe.name} as job {job}.", *_rows(rows)])


def _fewer_nodes(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    sentences = enumerate(fewer_nodes_sentences(recipe, plan))
    return [("" if number else "if nodes lack", sentence) for number, sentence in sentences]


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return each row with its head, its text wrapped beside it."""
    lines = []
    for head, text in rows:
        first, rest = f"  {head:<{_HEAD_COLUMNS}}", " " * (_HEAD_COLUMNS + 2)
        lines += wrap(
            one_line(text),
            _COLUMNS,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _destination(recipe: Recipe, of_slurm: bool) -> str:
    if not of_slurm:
        return "this machine, without SLURM"
    options = recipe.slurm
    partition = options.get("partition")
    limit = options.get("time")
    parts = [
        f"partition {partition}" if partition else "the default partition",
        *(f"{name} {options[name]}" for name in ("account", "qos", "reservation") if options.get(name)),
        f"time limit {limit}" if limit else "the partition's time limit (slurm.time is not set)",
    ]
    return f"SLURM, {', '.join(parts)}"


def _work(recipe: Recipe) -> str:
    work = recipe.workload
    model = "an inline model" if recipe.model.name == "inline" else recipe.model.name
    return (
        f"{model} with {recipe.backend.name}: {counted(recipe.training.steps, 'step', ',')} of "
        f"{counted(work.global_batch_size, 'sequence', ',')} of {counted(work.sequence_length, 'token', ',')}, "
        f"{recipe.training.numbers.beside(work.precision)}"
    )


def _schedule(recipe: Recipe) -> str:
    """Return the peak learning rate, its warm-up and its decay, as they are rendered."""
    training, backend = recipe.training, recipe.backend
    if backend.script is not None and backend.script_kind in ("own", "pipeline") and not backend.on_megatron_core:
        return "set by your own script"
    default = default_schedule(backend.name, backend.script_kind, training.steps)
    decay = training.learning_rate_decay or default.decay
    if training.learning_rate_decay is None and any(word.startswith(DECAY_FLAG) for word in backend.extra_args):
        decay = f"decay by your {DECAY_FLAG}"
    elif decay != "constant":
        decay = f"then {decay} decay to {training.minimum_learning_rate:g}"
    warmup = default.warmup_steps if training.warmup_steps is None else training.warmup_steps
    start = "" if not warmup else f" after {counted(warmup, 'step', ',')} of warm-up"
    return f"learning rate {training.learning_rate:g}{start}, {decay}"


def _machines(recipe: Recipe) -> str:
    cluster = recipe.cluster
    device = "rank" if cluster.accelerator.kind == "cpu" else "GPU"
    spare = f", and {counted(recipe.spare_nodes, 'spare node')}" if recipe.spare_nodes else ""
    return (
        f"{counted(recipe.nodes, 'node')} x {counted(cluster.devices_per_node, device)} of {cluster.accelerator.name} "
        f"({cluster.name}){spare}"
    )


def _environment(recipe: Recipe) -> str:
    """What the trainers run in: a container, or a Python with what prepares it."""
    parts = [] if recipe.container is None else [f"container {recipe.container.image} ({recipe.container.runtime})"]
    parts += [f"python {recipe.python}"] if recipe.python else []
    parts += [counted(len(recipe.setup), "setup line")] if recipe.setup else []
    if not parts:
        parts = ["the Python that is on PATH where the job runs (no container, python or setup)"]
    return ", ".join(parts)


def _data(recipe: Recipe) -> str:
    data = recipe.data
    if data.mock:
        own = recipe.backend.script is not None and not recipe.backend.on_megatron_core
        return "read by your own script" if own else "MOCK: made-up tokens, on which a model learns nothing"
    if data.python_source:
        return "real: source files of Python's standard library, byte by byte"
    source = f"a blend of {counted(len(data.blend), 'dataset')}" if data.blend else str(data.path)
    if data.format is not None:
        source += f", {data.format} rows{', packed' if data.packed else ''}"
    return f"real: {source}" + (f", tokenizer {data.tokenizer}" if data.tokenizer else "")


def _checkpoints(recipe: Recipe) -> str:
    folder, interval = recipe.training.checkpoint_path, recipe.training.save_interval
    if folder is None:
        return "none: what is learned is gone when the job ends (training.checkpoint_path)"
    every = f", every {counted(interval, 'step', ',')}" if isinstance(interval, int) else ""
    keep = recipe.training.keep_checkpoints
    return f"{folder}{every}" + ("" if keep is None else f"; the newest {keep:,} stay")


def _notices(recipe: Recipe) -> list[tuple[str, str]]:
    """Who hears what becomes of the job; no row where nobody does."""
    return [] if recipe.notify is None else [("notices to", receivers(recipe.notify, os.environ))]


def memory_text(plan: Plan) -> str:
    """Return the verdict and its risk, and the memory of the fullest rank against its limit."""
    accepted = ", accepted by the recipe" if plan.accepted else ""
    rank = f" (pipeline rank {plan.estimate.worst.pipeline_rank})" if len(plan.estimate.ranks) > 1 else ""
    return (
        f"{plan.verdict_with_risk}{accepted}: {gib(plan.device_bytes)} of {gib(plan.limit.limit_bytes)} GiB on the "
        f"fullest rank{rank}"
    )


def expected_time_text(plan: Plan, now: datetime) -> str:
    """Return the expected seconds of a step and of all steps, and when they end if the job starts at `now`."""
    seconds = plan.length.seconds
    text = f"{plan.chosen.step_seconds:.3g} s a step, {duration(seconds)} in all"
    if seconds < 365 * DAY:
        text += f"; ends {now + timedelta(seconds=seconds):%Y-%m-%d %H:%M} if it starts now and is not stopped"
    return text
