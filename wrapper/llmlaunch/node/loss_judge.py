"""Whether the loss of a training is bad: NaN or infinite, or far above what it was and not coming back.

How far is far: OLMo 2 counts as a spike what lies seven standard deviations from the mean of the last 1,000 losses (its
spike score, arXiv 2501.00656, section 3). Here the median and the median absolute deviation stand for mean and standard
deviation, since a spike inside the window moves neither, and a window of 100 follows a falling loss more closely.
Megatron-LM's own --check-for-spiky-loss wants ten times the largest loss seen (SPIKY_LOSS_FACTOR of pretrain_gpt.py),
which no loss of a language model reaches: an untrained one has ln(vocabulary), about 11. ZClip's 2.5 standard
deviations (arXiv 2504.02507) are for clipping a gradient, which costs nothing where nothing was wrong.

How long is lasting: single steps far above are common and heal by themselves (Spike No More, arXiv 2312.16903, tells
them from spikes that ruin a run). So a spike counts after several logged steps in a row.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..rundir.attempt_files import BadLossRecord
    from ..rundir.step_lines import Step


WINDOW = 100  # losses that are compared with
FEWEST = 20  # before so many nothing is called a spike: the first steps of a warm-up
DEVIATIONS = 7.0
STANDARD = 1.4826  # standard deviations of a normal distribution in one median absolute deviation
LEAST_RISE = 0.1  # of the median, for a loss that hardly varies
SPIKE_LINES = 5  # in a row, until a loss far above the others is a spike; and as many good ones until it is over
NOT_FINITE_LINES = 2  # in a row, until NaN lasts: a step that overflowed may have been skipped (fp16's loss scale)


class LossJudge:
    """The judge of one attempt's losses, as its log shows them. `limit` is the highest loss that counts as usual before
    enough were seen; None where nothing is known of an earlier attempt."""

    def __init__(self, limit: float | None = None) -> None:
        self._first_limit = limit
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._last_step: int | None = None
        self._suspect: BadLossRecord | None = None  # what a row of bad lines may become
        self._bad_lines = self._good_lines = 0
        self._healed_at: int | None = None  # the first good step after bad ones
        self.good_step: int | None = None  # the last one whose loss was good
        self.bad: BadLossRecord | None = None  # the "bad_loss" of progress.json

    def judge(self, step: Step) -> str:
        """Take in one step line. Returns the sentence to say about it: that the loss became bad, or usual again;
        nearly always empty."""
        if step.loss is None or (step.step is not None and step.step == self._last_step):
            return ""  # several ranks may log the same step
        self._last_step = step.step
        limit = self.limit
        if math.isfinite(step.loss) and (limit is None or step.loss <= limit):
            return self._take_good(step, step.loss)
        return self._take_bad(step, step.loss)

    @property
    def limit(self) -> float | None:
        """The highest loss that counts as usual; None where too few are known."""
        if len(self._losses) < FEWEST:
            return self._first_limit
        middle = median(self._losses)
        deviation = median(abs(loss - middle) for loss in self._losses)
        return middle + max(DEVIATIONS * STANDARD * deviation, LEAST_RISE * abs(middle))

    @property
    def in_doubt(self) -> bool:
        """Whether the last loss was bad, or too few good ones came since: older checkpoints may be needed."""
        return self._bad_lines > 0 or (self.bad is not None and self.bad["recovered_step"] is None)

    @property
    def lasting(self) -> BadLossRecord | None:
        """What is bad about the loss, where it shows no sign of recovering; else None."""
        lasts = self._suspect is not None and self._bad_lines >= _lines(self._suspect["kind"], NOT_FINITE_LINES)
        return self.bad if lasts else None

    def _take_good(self, step: Step, loss: float) -> str:
        if not self._good_lines:
            self._healed_at = step.step
        self._suspect, self._bad_lines, self._good_lines = None, 0, self._good_lines + 1
        self.good_step = step.step
        self._losses.append(loss)
        if self.bad is None or self.bad["recovered_step"] is not None or self._good_lines < SPIKE_LINES:
            return ""
        self.bad["recovered_step"] = self._healed_at
        return f"the loss is as usual again{_since(self._healed_at)}: {loss:.4g}"

    def _take_bad(self, step: Step, loss: float) -> str:
        kind = "spike" if math.isfinite(loss) else "not_finite"
        if self._suspect is None or self._suspect["kind"] != kind:
            usual = round(median(self._losses), 6) if self._losses else None
            self._suspect = {"kind": kind, "since_step": step.step, "good_step": self.good_step, "usual": usual}
            self._bad_lines = 0
        self._bad_lines, self._good_lines = self._bad_lines + 1, 0
        known = self.bad is not None and self.bad["recovered_step"] is None and self.bad["kind"] in (kind, "not_finite")
        if known or self._bad_lines < _lines(kind, 1):
            return ""
        self.bad = {
            **self._suspect,
            "loss": loss if kind == "spike" else str(loss),
            "limit": _rounded(self.limit),
            "recovered_step": None,
            "ended": False,
        }
        return _sentence(self.bad)


def _lines(kind: str, not_finite: int) -> int:
    return SPIKE_LINES if kind == "spike" else not_finite


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _since(step: int | None) -> str:
    return "" if step is None else f" since step {step}"


def _sentence(bad: BadLossRecord) -> str:
    since = _since(bad["since_step"])
    if bad["kind"] == "not_finite":
        return f"the loss is {'NaN' if bad['loss'] == 'nan' else 'infinite'}{since}"
    before = "" if bad["usual"] is None else f"; it was {bad['usual']:.4g}"
    return f"the loss has spiked{since}, now {bad['loss']:.4g}{before}"
