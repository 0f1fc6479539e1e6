"""The form of a row of the table of causes (`kinds.py`): what can be known about a kind of cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Advice = str | Callable[[Mapping[str, Any]], str]

# whose fault it is
PERSON, PROGRAM, NODE, SITE, NOBODY = "the person's", "the program's", "the node's", "the site's", "nobody's"

# whether, and where, the job may start again
NEVER = "never: it would end in the same way wherever it runs"
IF_TRAINED = "only where the run has made a step before"
AT_ONCE = "at once in the same allocation, three times in all; later as usual"
LATER = "as usual; in the same allocation only after a wait"
LATER_IF_STEPPED = "only where this attempt made a step, after a wait"
USUAL = "as the recipe says"

# what it says against the node that it names
NO_SIGN, ONE_SIGN, ENOUGH_SIGNS = 0, 1, 2


class CauseKind(NamedTuple):
    """One kind of cause.

    `words` is how a sentence calls it. `advice` is what a person can do: a text, or a function of the cause's record
    where the evidence decides. `retry` and `fault` are one of the constants above. `signs` is the number of signs
    against the node that a record of this kind holds at fault. `is_weak`: the evidence only shows that something went
    wrong, so any other finding goes first. `repeats`: two attempts that die of it after the same step show that the
    data or the program is the reason. `planned`: a person or SLURM ended the attempt. `interrupts`: of an attempt that
    had made steps it is a stop that nobody planned, and the planner counts it. `damages_checkpoint`: the files of the
    checkpoint were seen to be damaged, so an older one may be loaded; no other cause touches a checkpoint.
    `recognised_by` is the text of the documentation.
    """

    name: str
    words: str
    advice: Advice
    recognised_by: str
    fault: str
    retry: str = USUAL
    signs: int = NO_SIGN
    is_weak: bool = False
    repeats: bool = False
    planned: bool = False
    interrupts: bool = False
    damages_checkpoint: bool = False
