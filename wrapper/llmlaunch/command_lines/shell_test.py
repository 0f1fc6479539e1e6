"""Conditions of a script: `test`, `[ … ]` and `[[ … ]]`, as far as the script's text decides them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llmlaunch.command_lines.shell_state import State, has_unset, unset_names
from llmlaunch.command_lines.shell_words import matches
from llmlaunch.rundir.foreign_values import whole_number_in

__all__ = ["test_outcome"]

_BINARY = ("=", "==", "!=", "<", ">", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-ef", "-nt", "-ot")


def test_outcome(state: State, words: Sequence[str], line: int) -> bool | None:
    """Return whether a test holds; None where only the run would show it.

    A variable that nobody sets counts as empty, as in a fresh shell; a missing argument of the script does not.
    """
    test = _Test(state, list(words), line)
    outcome = test.either()
    return outcome if not test.words else None


class _Test:
    def __init__(self, state: State, words: list[str], line: int) -> None:
        self.state, self.words, self.line = state, words, line

    def either(self) -> bool | None:
        outcome = self.both()
        while self.words[:1] in (["||"], ["-o"]):
            del self.words[0]
            other = self.both()
            outcome = True if outcome or other else None if None in (outcome, other) else False
        return outcome

    def both(self) -> bool | None:
        outcome = self.single()
        while self.words[:1] in (["&&"], ["-a"]):
            del self.words[0]
            other = self.single()
            outcome = False if False in (outcome, other) else None if None in (outcome, other) else True
        return outcome

    def single(self) -> bool | None:
        words = self.words
        if not words:
            return False
        if words[0] == "!" and len(words) > 1:
            del words[0]
            outcome = self.single()
            return None if outcome is None else not outcome
        if len(words) > 2 and words[1] in _BINARY:
            left, operator, right = words[:3]
            del words[:3]
            return self.compared(left, operator, right)
        if words[0] == "(" and ")" in words:
            del words[0]
            outcome = self.either()
            if words[:1] == [")"]:
                del words[0]
            return outcome
        if len(words) > 1 and re.fullmatch("-[a-zA-Z]", words[0]):
            operator, operand = words[:2]
            del words[:2]
            return self.examined(operator, operand)
        return self.examined("-n", words.pop(0))

    def known(self, text: str) -> str | None:
        """Return a text with variables that nobody sets as empty; None where more than the environment is missing."""
        names = unset_names(text)
        sbatch = [name for name in names if name.startswith(("SLURM_", "PMI", "OMPI_"))]
        if sbatch or any(whole_number_in(name) is not None or name in self.state.record.computed for name in names):
            return None
        for name in names:
            if name == "number_of_arguments":
                return None
            self.state.note(self.line, f"{name} is taken as not set")
            text = text.replace(f"\ue000{name}\ue001", "")
        return text

    def examined(self, operator: str, operand: str) -> bool | None:
        if operator in "-f-d-e-r-w-x-s-L-h":
            if has_unset(operand):
                return None
            place = self.state.resolved(operand)
            return True if place in self.state.files or _exists(place) else None
        text = self.known(operand)
        if operator == "-v":
            return True if operand in self.state.variables else None
        if text is None or operator not in ("-n", "-z"):
            return None
        return (text == "") == (operator == "-z")

    def compared(self, left: str, operator: str, right: str) -> bool | None:
        first, second = self.known(left), self.known(right)
        if first is None or second is None:
            return None
        if operator in ("=", "==", "!="):
            return matches(second, first) == (operator != "!=")
        if operator in ("<", ">"):
            return first < second if operator == "<" else first > second
        if operator not in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge"):
            return None
        numbers = [int(text) if re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text) else None for text in (first, second)]
        if None in numbers:
            return None
        one, other = int(numbers[0] or 0), int(numbers[1] or 0)
        return {
            "-eq": one == other, "-ne": one != other, "-lt": one < other,
            "-le": one <= other, "-gt": one > other, "-ge": one >= other,
        }[operator]  # fmt: skip


def _exists(place: str) -> bool:
    try:
        return Path(place).exists()
    except (OSError, ValueError):
        return False
