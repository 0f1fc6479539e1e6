"""The return to a checkpoint from before the loss went bad, skipping the batches around the bad step.

For PaLM's 540B model, training went back about 100 steps before each spike and skipped 200 to 500 batches, those seen
before and during the spike. The loss did not spike again at the same place (Chowdhery et al. 2022, arXiv 2204.02311,
section 5.1). The same batches did no harm to a model in another state, so the skipped batches need not be bad in
themselves.

A spike grows out of a state that was bad before anybody saw it. NaN comes from a single step, and a model that contains
one has a NaN loss from then on. So if the loss was still a number, the checkpoint before it is good, however recent.
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


# Steps between the checkpoint and the last good step after a spike, if there is an older checkpoint. If two bad steps
# are less than this apart, the first rollback did not go back far enough.
MARGIN_STEPS = 100
MOST_SKIPS = 20_000  # steps on the command line of a trainer
SET_ASIDE = ".bad-loss"  # after the name of a checkpoint's folder


class BadLoss(NamedTuple):
    """When the loss of an attempt went bad: the first bad step, and the last good one before it. `at_once` means that
    no step after the checkpoint was good. `limit` is the highest loss that counted as normal. `spiked` means that the
    loss was a number to the end."""

    since_step: int
    good_step: int
    at_once: bool
    limit: float | None = None
    spiked: bool = False


class Rollback(NamedTuple):
    """What a rollback changes: where the attempt starts, the ranges of steps whose batches are skipped (first and last
    step), and the highest loss that counts as normal. `record` is the value of "rollback" in attempt.json."""

    start: Start
    skips: list[list[int]]
    limit: float | None
    record: RollbackRecord | None


def rolls_back(run: RunFile) -> bool:
    """Whether the recipe asks for a rollback after a bad loss (run.json)."""
    return run.get("on_bad_loss", {}).get("action") == "rollback"


def bad_loss_of(cause: Mapping[str, Any] | None, progress: Progress, from_step: int) -> BadLoss | None:
    """Return when the loss went bad in an attempt that started at `from_step` and ended for `cause`, or None if it
    ended for another reason.

    Megatron-LM's verdict that a second GPU computes the same NaN counts as well. It saves before the step in question,
    and the attempt with the second GPU judges that step first. That the step is bad again says nothing about the
    checkpoint.
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
    seen = cause.get("source") == "watchdog"  # which sees only logged steps
    at_once = good is None and from_step > 0 and (seen or since is None or since <= from_step + 1)
    if good is None:
        good = from_step - 1 if at_once else from_step
    judged = progress.get("bad_loss") or {}
    spiked = judged.get("kind") == "spike" and judged.get("recovered_step") is None
    return BadLoss(max(good + 1, since or 0), good, at_once, judged.get("limit"), spiked)


def checkpoint_before(checkpoint: Checkpoints | None, bad: BadLoss, attempts: Iterable[Attempt]) -> int | None:
    """Return the step of the checkpoint to go back to, after these `attempts`. Return None if there is none, or if a
    script of the user's own laid out its folder in its own way.

    After NaN it is the newest complete checkpoint up to the last good step. It is an older one after a spike, if the
    training went bad at once, or if it went bad less than MARGIN_STEPS from the bad step of an earlier rollback: the
    newest complete checkpoint at least MARGIN_STEPS before the last good step, if there is one. Non-persistent
    checkpoints do not count then, because they are as recent as the damage may be.
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
    """Return the rollback to make if the latest attempt that saved in this folder ended because of its loss, and the
    recipe asked for that end. Return None if it did not, or if there is no older checkpoint. Newer checkpoints are set
    aside, not deleted."""
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
    """Return the ranges that the latest attempt skipped. An attempt that trains these steps again skips them again."""
    return [] if latest is None else [[first, last] for first, last in latest.skips]


def _skip(policy: LossPolicy, bad: BadLoss, step: int, steps: object) -> list[int] | None:
    """Return the first and last step to skip: half of the batches before the first bad step and half after it, but none
    that the checkpoint has seen. The last step is always trained, because it logs and saves."""
    count = policy.get("skip_batches") or 1
    first = max(step + 1, bad.good_step + 1 - count // 2)
    last = max(first + count - 1, bad.since_step)
    if isinstance(steps, int):
        last = min(last, steps - 1)
    return [first, last] if first <= last else None


def skip_argument(skips: Iterable[Sequence[int]], from_step: int) -> str:
    """Return the ranges of steps after `from_step` that the trainers skip, in the form of `node.pyz node --skip`:
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
    """Return the steps in an argument made by `skip_argument`."""
    spans = [span.partition("-") for span in filter(None, argument.split(","))]
    return sorted({step for first, _, last in spans for step in range(int(first), int(last) + 1)})
