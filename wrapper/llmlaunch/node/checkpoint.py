"""The checkpoint an attempt goes on from: what the tracker file names, whether that is whole, and when to refuse.

A trainer that finds no checkpoint begins at step 0 without a word. So what an earlier attempt has seen saved is looked
for before the training starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..causes.kinds import kind_of
from ..causes.rerun_verdict import is_judged_step
from ..rundir import file_names
from ..rundir.run import begun_attempts
from ..rundir.run_file import Checkpoints, read_run_file
from ..rundir.values import byte_count, is_for_fewer_nodes, to_type
from .checkpoint_folder import CheckpointFolder, Skipped, step_named_by

if TYPE_CHECKING:
    from ..rundir.attempt import Attempt


class Start(NamedTuple):
    """`problem` is why the training must not start, and `remedy` what a person can do; else it goes on from `step`,
    `note` says what was unusual, and `skipped` which newer checkpoints are damaged. `changed_ns` is when that of `step`
    was last written, by its file system's clock."""

    step: int
    note: str = ""
    problem: str = ""
    remedy: str = ""
    skipped: tuple[Skipped, ...] = ()
    changed_ns: int | None = None


def read_tracker(checkpoint: Checkpoints | None) -> int | None:
    """The newest step that a tracker file of a run.json's "checkpoint" names, that of non-persistent checkpoints, too.
    None where no file names one."""
    durable, within = durable_step(checkpoint), (checkpoint or {}).get("non_persistent")
    if checkpoint is None or within is None:
        return durable
    newest = step_named_by(Path(str(checkpoint.get("path"))) / str(within) / str(checkpoint.get("tracker")))
    return max((step for step in (durable, newest) if step is not None), default=None)


def durable_step(checkpoint: Checkpoints | None) -> int | None:
    if checkpoint is None or "path" not in checkpoint or "tracker" not in checkpoint:
        return None
    return step_named_by(Path(str(checkpoint["path"])) / str(checkpoint["tracker"]))


def _reached_step(attempt: Attempt) -> int | None:
    """The furthest step that the tracker named while `attempt` began, ran or ended; None where it never named one."""
    steps = [record.get("tracker_step") for record in (attempt.began, attempt.progress, attempt.status)]
    return max((step for step in steps if isinstance(step, int)), default=None)


def choose_start(
    run_directory: Path, checkpoint: Checkpoints | None, attempts: list[Attempt], stops: bool = False
) -> Start:
    """Where the next attempt starts. `attempts` are those that saved in the same folder, `stops` is the recipe's
    `restart.bad_checkpoint: stop`.

    A last checkpoint that is damaged is left for the newest whole one before it, which the tracker then names, or
    refused where the recipe `stops`. A checkpoint that vanished, or a tracker that names an older one than the last
    attempt saw, is refused. The file `from_older` allows all of these. Only the trainers that llmlaunch knows are
    looked into; a script of the person's own may lay out its folder as it likes.
    """
    if checkpoint is None:
        return Start(0)
    start = _choose(run_directory, checkpoint, attempts, stops)
    changed_ns = CheckpointFolder(checkpoint).changed_ns(start.step) if start.step and not start.problem else None
    return start._replace(changed_ns=changed_ns)


def _choose(run_directory: Path, checkpoint: Checkpoints, attempts: list[Attempt], stops: bool) -> Start:
    latest = attempts[-1] if attempts else None
    named, reached = read_tracker(checkpoint), None if latest is None else _reached_step(latest)
    folder = CheckpointFolder(checkpoint)
    folder.unloadable = unloadable_steps(folder, attempts)
    before = "" if latest is None else f"attempt {latest.name} had saved step {reached}"
    if named is not None:
        wrong = folder.fault(named) if checkpoint.get("promised", True) else folder.unloadable.get(named)
        if wrong:
            return _from_the_one_before(run_directory, folder, Skipped(named, wrong), stops)
        if reached is None or named >= reached or _is_allowed(run_directory):
            return _as_named(folder, named)
        if folder.non_persistent is not None and reached - named < (byte_count(checkpoint.get("interval")) or 0):
            gone = f"the non-persistent checkpoint of step {reached} is gone; continuing from step {named}"
            return _as_named(folder, named, gone)
        problem = f"{folder.tracker} names step {named}, but {before}"
        return Start(0, problem=problem, remedy=_remedy(run_directory, f"from step {named}"))
    if not reached:
        return Start(0)
    return _without_tracker(run_directory, folder, reached, f"{folder.tracker} names no checkpoint, but {before}")


def unloadable_steps(folder: CheckpointFolder, attempts: list[Attempt]) -> dict[int, str]:
    """Map each step whose checkpoint the trainers of an attempt could not go on from, and that has not been written
    since, to the sentence that says so."""
    return {
        attempt.from_step: _why_not(attempt)
        for attempt in attempts
        if not is_for_fewer_nodes(attempt.layout)  # that it cannot be resharded is no fault of the checkpoint
        and is_load_failure(attempt, attempt.status.get("cause"))
        and attempt.began.get("checkpoint_changed_ns") == folder.changed_ns(attempt.from_step)
    }


def _why_not(attempt: Attempt) -> str:
    if is_judged_step(attempt.status.get("cause") or {}):
        return f"attempt {attempt.name} has judged the step it was saved for, and whoever loads it ends there again"
    return f"the trainers of attempt {attempt.name} could not load it, and none of its files has changed since"


def is_load_failure(attempt: Attempt, cause: object) -> bool:
    """Whether the trainers of `attempt`, which ended for this cause, could not go on from the checkpoint it began with:
    a log says so, or Megatron-LM had saved it to judge its step again; and they made no step."""
    made_a_step = attempt.status.get("step") is not None or attempt.progress.get("step") is not None
    return (
        isinstance(cause, dict)
        and ((kind_of(cause).damages_checkpoint and cause.get("source") == "log") or is_judged_step(cause))
        and attempt.from_step > 0
        and not made_a_step
    )


def _from_the_one_before(run_directory: Path, folder: CheckpointFolder, last: Skipped, stops: bool) -> Start:
    before, between = folder.newest_whole(last.step - 1)
    problem = f"the last checkpoint, step {last.step} in {folder.path}, is damaged: {last.why}"
    problem += "".join(f"; so is that of step {skipped.step}: {skipped.why}" for skipped in between)
    if stops and not _is_allowed(run_directory):
        older = "from step 0" if before is None else f"from step {before}, the newest whole one"
        problem = f"{problem}; restart.bad_checkpoint is stop"
        return Start(0, problem=problem, remedy=_remedy(run_directory, older))
    if before is not None:
        start = _renamed(folder, before, f"{problem}; continuing from step {before}, the one before it")
        return start._replace(skipped=(last, *between))
    if _is_allowed(run_directory):
        return _set_aside(folder, f"{problem}; starting at step 0, as {file_names.FROM_OLDER} allows")
    problem = f"{problem}; there is no whole one before it"
    return Start(0, problem=problem, remedy=_remedy(run_directory, "from step 0"))


def _as_named(folder: CheckpointFolder, step: int, note: str = "") -> Start:
    return Start(step, note) if folder.non_persistent is None else _renamed(folder, step, note)


def _without_tracker(run_directory: Path, folder: CheckpointFolder, reached: int, problem: str) -> Start:
    whole, _ = folder.newest_whole(reached)
    if whole == reached:
        return _renamed(folder, whole, f"{problem}, which is there and whole: continuing from it")
    if _is_allowed(run_directory):
        if whole is None:
            return _set_aside(folder, f"{problem}; starting at step 0, as {file_names.FROM_OLDER} allows")
        return _renamed(folder, whole, f"{problem}; continuing from step {whole}, as {file_names.FROM_OLDER} allows")
    if not folder.path.is_dir():
        problem = f"{problem} there; the folder {folder.path} is missing (is its file system mounted on this node?)"
    older = "from step 0" if whole is None else f"from step {whole}, the newest whole one"
    return Start(0, problem=problem, remedy=_remedy(run_directory, older))


def _renamed(folder: CheckpointFolder, step: int, note: str) -> Start:
    try:
        folder.name(step)
    except OSError as error:
        what = f"{note}; but " if note else ""
        return Start(0, problem=f"{what}{folder.path} cannot be written: {error.strerror}")
    return Start(step, note)


def _set_aside(folder: CheckpointFolder, note: str) -> Start:
    """A tracker that names what cannot be loaded would end the trainers."""
    try:
        folder.name_none()
    except OSError as error:
        return Start(0, problem=f"{note}; but {folder.tracker} cannot be moved away: {error.strerror}")
    return Start(0, note)


def _is_allowed(run_directory: Path) -> bool:
    return (run_directory / file_names.FROM_OLDER).exists()


def _remedy(run_directory: Path, older: str) -> str:
    return (
        f"Nothing was trained. Put the checkpoint back and run {to_type('resume', run_directory)}; "
        f"or train {older}: {to_type('resume', run_directory, '--from-older')}"
    )


def checkpoint_of(run_directory: Path, layout: str) -> Checkpoints | None:
    """Where this layout saves; None where no checkpoints are written."""
    return read_run_file(run_directory, layout).get("checkpoint")


def saved_step(run_directory: Path, layout: str) -> int:
    """The step of the last whole checkpoint this layout would go on from; 0 where there is none.

    Of a script that may write another tracker, and wrote none, the last step that was due to be saved stands for it.
    """
    checkpoint = checkpoint_of(run_directory, layout)
    step = read_tracker(checkpoint)
    if step is None and checkpoint is not None and not checkpoint.get("promised", True):
        return _step_due(run_directory, checkpoint)
    return step or 0


def _step_due(run_directory: Path, checkpoint: Checkpoints) -> int:
    """The furthest step due to be saved that a log has shown, of all attempts that save in the same place."""
    furthest = 0
    for attempt in begun_attempts(run_directory):
        if checkpoint_of(run_directory, attempt.layout) == checkpoint:
            furthest = max(furthest, attempt.progress.get("step") or 0)
    return furthest - furthest % (checkpoint.get("interval") or 1)


def attempts_in_folder(attempts: list[Attempt], run_directory: Path, checkpoint: Checkpoints | None) -> list[Attempt]:
    """Those of `attempts` that save in the same place, in their order."""
    return [item for item in attempts if checkpoint_of(run_directory, item.layout) == checkpoint]
