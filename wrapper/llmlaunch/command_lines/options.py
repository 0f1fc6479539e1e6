"""Options of a script whose own parser is not at hand: `--name value ...`, with dashes or underscores inside the name.

What the recipe says instead is taken out; the rest is handed on to the script as it was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmlaunch.command_lines.command import is_optional, is_unset, option_values
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import shortened

_NUMBER = re.compile(r"[-+]?(\d{1,32}\.?\d{0,32}|\.\d{1,32})([eE][-+]?\d{1,4})?", re.ASCII)
_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0", "none", "null")


class ScriptOptions:
    """Options by name; of several with one name the last counts, as for argparse.

    `beneath` are options that a file says, over which `words` go; only those of `words` are handed on. `names` has the
    name under which an option of another is found. A value that holds a variable without a value counts as absent.
    """

    def __init__(
        self,
        words: Sequence[str],
        place: str,
        beneath: Sequence[str] = (),
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.place = place
        own, below = ([(_name(group[0]), group) for group in _groups(each)] for each in (words, beneath))
        self._own = [(names.get(name, name), group) for name, group in own]
        self._groups = [*((names.get(name, name), group) for name, group in below), *self._own]
        self._taken: set[str] = set()

    def has(self, *names: str) -> bool:
        """Return whether one of these options is written."""
        return any(name in names for name, _ in self._groups)

    def values(self, *names: str) -> tuple[str, ...] | None:
        """Return the words after the last of these options; None where none is written. The option is handed on."""
        words = self._words(*names)
        return None if words is None or any(map(is_unset, words)) else words

    def path(self, *names: str) -> str | None:
        """Return the value of an option that names a file, also with a variable without a value in it."""
        words = self._words(*names)
        return words[0] if words else None

    def _words(self, *names: str) -> tuple[str, ...] | None:
        group = next((group for name, group in reversed(self._groups) if name in names), None)
        if group is None:
            return None
        return (group[0].partition("=")[2], *group[1:]) if "=" in group[0] else group[1:]

    def text(self, *names: str) -> str | None:
        """Return the value of an option; "True" for one without."""
        words = self.values(*names)
        return None if words is None else words[0] if words else "True"

    def whole(self, *names: str) -> int | None:
        """Return a whole number. Raises UserError for another value."""
        value = self.number(*names)
        if value is not None and value != int(value):
            raise self.wrong(names, "is no whole number")
        return None if value is None else int(value)

    def number(self, *names: str) -> float | None:
        """Return a finite number. Raises UserError for another value."""
        text = self.text(*names)
        if text is None or text.lower() in ("none", "null"):
            return None
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise self.wrong(names, "is no finite number")
        return value

    def flag(self, *names: str) -> bool | None:
        """Return true or false; true where bash drops the only word after it. Raises UserError for another value."""
        text = self.text(*names)
        if text is None:
            words = self._words(*names)
            return True if words and all(map(is_optional, words)) else None
        value = true_or_false(text)
        if value is None:
            raise self.wrong(names, "is neither true nor false")
        return value

    def take(self, *names: str) -> None:
        """Leave these options out of what is handed on."""
        self._taken.update(names)

    def rest(self) -> tuple[tuple[str, ...], ...]:
        """Return the options that are handed on, each with its words, in their order."""
        return tuple(group for name, group in self._own if name not in self._taken)

    def of_the_file(self) -> tuple[tuple[str, ...], ...]:
        """Return the options that only the file beneath says, each with its words."""
        own = {name for name, _ in self._own}
        return tuple(group for name, group in self._groups if name not in own)

    def all(self) -> tuple[tuple[str, ...], ...]:
        """Return all options, each with its words; those of a file first."""
        return tuple(group for _, group in self._groups)

    def without_value(self) -> tuple[tuple[str, ...], ...]:
        """Return the options that hold a variable without a value."""
        return tuple(group for _, group in self._groups if any(map(is_unset, group)))

    def written(self, *names: str) -> tuple[str, ...]:
        """Return the words of these options as they were written."""
        return tuple(word for name, group in self._groups if name in names for word in group)

    def wrong(self, names: Sequence[str], problem: str) -> UserError:
        """Return the error of a value that cannot be used."""
        flag = next(group[0] for name, group in reversed(self._groups) if name in names).partition("=")[0]
        return UserError(f"{self.place}: {flag}: {shortened(str(self.text(*names)))!a} {problem}; correct it")


def _groups(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each option with the words up to the next one; words before the first option make a group of their own."""
    group: list[str] = []
    for word in words:
        if _is_option(word) and group:
            yield _present(group)
            group = []
        group.append(word)
    if group:
        yield _present(group)


def _present(group: list[str]) -> tuple[str, ...]:
    """Return an option's words without variables that nobody sets, where another value is left."""
    return (group[0], *option_values(group[1:], "+")[0])


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _name(word: str) -> str:
    """Return an option's name as Python has it; a word that is no option stays apart from all names."""
    return word.lstrip("-").partition("=")[0].replace("-", "_") if _is_option(word) else f" {word}"


def true_or_false(value: Any) -> bool | None:
    """Return what a value of a file or a command line says as a truth value, None where it says none."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def whole_or_none(settings: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a file, which may be written as 5e8; None for anything else."""
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**63 else None
