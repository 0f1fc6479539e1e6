"""The way back from a loss that went bad: to a checkpoint from before, past the batches around the bad step.

PaLM's 540B model went back about 100 steps before each spike and left out 200 to 500 batches, those seen before and
during it; the loss did not spike again at the same place (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1). The
same batches did no harm to a model in another state, so what is left out need not be bad by itself.

A spike grows out of a state that was bad before anybody saw it. NaN comes from one step, and a model that holds one
has a loss of NaN from then on: where the loss was a number, the checkpoint before serves, however young.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..rundir.values import whole_number
from .checkpoint import Start
from .checkpoint_folder import CheckpointFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import Progress, RollbackRecord
    from ..rundir.run_file import Checkpoints, LossPolicy, RunFile


# Between the checkpoint and the last good step after a spike, where an older checkpoint is there. Less between two bad
# steps says that the first way back was too short.
MARGIN_STEPS = 100
MOST_SKIPS = 20_000  # steps on the command line of a trainer
SET_ASIDE = ".bad-loss"  # after the name of a checkpoint's folder


class BadLoss(NamedTuple):
    """When the loss of an attempt went bad: the first bad step, and the last good one before it. `at_once`: no step
    after the checkpoint it began with was good. `limit` is the highest loss that counted as usual. `spiked`: it was a
    number to the end."""

    since_step: int
    good_step: int
    at_once: bool
    limit: float | None = None
    spiked: bool = False


class Rollback(NamedTuple):
    """What a rollback changes: where the attempt starts, the ranges of steps whose batches are left out, first and last
    included, and the highest loss that counts as usual; `record` is the "rollback" of attempt.json."""

    start: Start
    skips: list[list[int]]
    limit: float | None
    record: RollbackRecord | None


def rolls_back(run: RunFile) -> bool:
    """Whether the recipe has a bad loss followed by a rollback (run.json)."""
    return run.get("on_bad_loss", {}).get("action") == "rollback"


def bad_loss_of(cause: Mapping[str, Any] | None, progress: Progress, from_step: int) -> BadLoss | None:
    """Return when the loss went bad of an attempt that began at `from_step` and ended for `cause`; None where it ended
    for another reason.

    Megatron-LM's verdict that a second GPU computes the same NaN is one, too: it saves before the step in question, and
    the attempt with the second GPU judges that step first. That it is bad again says nothing of the checkpoint.
    """
    kind = "" if cause is None else cause.get("kind")
    if kind == "unexpected_result":
        return BadLoss(from_step + 1, from_step, at_once=False)
    if cause is None or kind != "bad_loss":
        return None
    numbers = cause.get("numbers") or {}
    since, good = whole_number(numbers.get("since_step")), whole_number(numbers.get("good_step"))
    if good is None:
        good = progress.get("good_step")
    seen = cause.get("source") == "watchdog"  # which sees logged steps alone
    at_once = good is None and from_step > 0 and (seen or since is None or since <= from_step + 1)
    if good is None:
        good = from_step - 1 if at_once else from_step
    judged = progress.get("bad_loss") or {}
    spiked = judged.get("kind") == "spike" and judged.get("recovered_step") is None
    return BadLoss(max(good + 1, since or 0), good, at_once, judged.get("limit"), spiked)


def checkpoint_before(checkpoint: Checkpoints | None, bad: BadLoss, attempts: Iterable[Attempt]) -> int | None:
    """Return the step of the checkpoint to go back to, after these `attempts`; None where there is none, or a script of
    the person's own laid out its folder as it likes.

    After NaN it is the newest whole one up to the last good step. After a spike, where the training went bad at once,
    or where it did so less than MARGIN_STEPS after the bad step of an earlier rollback, it is the newest whole one by
    MARGIN_STEPS before the last good step, if there is one, and no non-persistent one: those are as young as the damage
    may be.
    """
    if checkpoint is None or not checkpoint.get("promised", True):
        return None
    if not bad.spiked and not bad.at_once and not _again(bad, attempts):
        return CheckpointFolder(checkpoint).newest_whole(bad.good_step)[0]
    folder = CheckpointFolder(checkpoint, durable_only=True)
    early, _ = folder.newest_whole(bad.good_step - MARGIN_STEPS)
    return folder.newest_whole(bad.good_step)[0] if early is None else early


def _again(bad: BadLoss, attempts: Iterable[Attempt]) -> bool:
    rollbacks = (attempt.began.get("rollback") or {} for attempt in attempts)
    before = (rollback.get("since_step") for rollback in rollbacks)
    return any(step is not None and abs(bad.since_step - step) < MARGIN_STEPS for step in before)


def choose_rollback(run: RunFile, checkpoint: Checkpoints | None, attempts: list[Attempt]) -> Rollback | None:
    """Go back where the latest of the attempts that saved in this folder ended for its loss, and the recipe asked to
    end it; None where it did not, or nothing older is there. Newer checkpoints are set aside, not deleted."""
    policy = run.get("on_bad_loss") or {}
    if not attempts or policy.get("action") not in ("stop", "rollback"):
        return None
    latest = attempts[-1]
    bad = bad_loss_of(latest.status.get("cause"), latest.progress, latest.from_step)
    step = None if bad is None else checkpoint_before(checkpoint, bad, attempts)
    if bad is None or step is None or checkpoint is None:
        return None
    folder = CheckpointFolder(checkpoint)
    note = f"the loss was bad from step {bad.since_step} on; going back to the checkpoint of step {step}"
    skip = _skip(policy, bad, step, (run.get("progress") or {}).get("steps")) if rolls_back(run) else None
    if skip is not None:
        note += f", leaving out the batches of steps {skip[0]} to {skip[1]}"
    try:
        folder.name(step)
        names = folder.set_aside_after(step, SET_ASIDE)
    except OSError as error:
        return Rollback(
            Start(0, problem=f"{note}; but {folder.path} cannot be changed: {error.strerror}"), [], None, None
        )
    if names:
        note += f"; set aside: {', '.join(names)}"
    record: RollbackRecord = {"since_step": bad.since_step, "to_step": step, "skip": skip, "set_aside": names}
    skips = earlier_skips(latest) + ([skip] if skip is not None else [])
    return Rollback(Start(step, note), skips, bad.limit, record)


def earlier_skips(latest: Attempt | None) -> list[list[int]]:
    """The ranges that the latest attempt left out: whoever trains these steps again leaves them out again."""
    return [] if latest is None else [[first, last] for first, last in latest.skips]


def _skip(policy: LossPolicy, bad: BadLoss, step: int, steps: object) -> list[int] | None:
    """Half of the batches before the first bad step, half after it, none that the checkpoint has seen. The last step is
    always trained: it logs and saves."""
    count = policy.get("skip_batches") or 1
    first = max(step + 1, bad.good_step + 1 - count // 2)
    last = max(first + count - 1, bad.since_step)
    if isinstance(steps, int):
        last = min(last, steps - 1)
    return [first, last] if first <= last else None


def skip_argument(skips: Iterable[Sequence[int]], from_step: int) -> str:
    """Return the ranges of steps after `from_step` that the trainers leave out, as `node.pyz node --skip` has them:
    `441-460,500-500`; empty for none."""
    left = MOST_SKIPS
    ranges = []
    for first, last in skips:
        first = max(first, from_step + 1)
        last = min(last, first + left - 1)
        if first <= last:
            ranges.append(f"{first}-{last}")
            left -= last - first + 1
    return ",".join(ranges)


def skipped_steps(argument: str) -> list[int]:
    """Return the steps of such an argument."""
    spans = [span.partition("-") for span in filter(None, argument.split(","))]
    return sorted({step for first, _, last in spans for step in range(int(first), int(last) + 1)})
