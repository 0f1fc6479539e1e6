"""What ended an attempt, within a budget: its verdict is written whatever becomes of the diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..causes.attempt_cause import cause_of, cause_of_ranks
from .files import say
from .own_process import answer_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import Cause, RankRecord


ATTEMPT_SECONDS = 45.0  # logs have 20 s of it and the flight recorder's dumps another 20


def cause_within(
    attempt: Attempt, ranks: Sequence[RankRecord], code: int, node_failure: Cause | None = None
) -> Cause | None:
    """Return what ended the attempt, as `cause_of` does; where that fails or does not end within ATTEMPT_SECONDS, what
    was known by then, else how the ranks ended. Raises nothing, and says on stderr that the diagnosis is not complete.
    """
    answer = answer_within(
        ATTEMPT_SECONDS, lambda tell: cause_of(attempt, ranks, code, node_failure=node_failure, tell=tell)
    )
    if not answer.problem:
        return answer.value  # type: ignore[no-any-return]
    say(f"what ended attempt {attempt.name} is not looked into to the end: {answer.problem}")
    try:
        return answer.value or node_failure or cause_of_ranks(ranks)
    except Exception:  # ranks of an odd form
        return None
