"""What a person most likely meant by a word that is not known: the nearest known word, the key that the word of another
tool stands for, the number behind `8k`.

The words of a kind of document stand in a JSON file, which is read only once something is wrong: `keys` and `values`
map ours to those of others, `unknown_keys` and `unknown_values` hold sentences for words that have a reason of their
own, `inner_keys` names the key that a plain value in the place of a mapping most likely belongs to.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

MOST_LISTED = 15
ANY = "*"  # in `unknown_values`: every other value of the key
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]*)")
_THOUSANDS = re.compile(r"[0-9]{1,3}([,' _][0-9]{3})+")
_POWERS = {"k": 1, "m": 2, "g": 3, "b": 3, "t": 4}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def nearest(word: str, names: Sequence[str], most: int = 1) -> list[str]:
    """Return the names that a mistyped word is likely to mean, the likeliest first."""
    folded = {_folded(name): name for name in reversed(names)}
    wanted = _folded(word)
    near = [folded[name] for name in difflib.get_close_matches(wanted, folded, max(most, 3))]
    near.sort(key=lambda name: _folded(name)[:3] != wanted[:3])  # people get the beginning of a word right
    near = near or [name for name in names if len(wanted) > 2 and wanted in _folded(name)]
    return near[:most]


def known_and_nearest(word: str, known_names: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest known word, else what is known."""
    near = nearest(word, known_names)
    return f"did you mean {near[0]}?" if near else f"known: {listed(known_names)}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence, the first few of many."""
    if len(names) <= MOST_LISTED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_LISTED])} and {len(names) - MOST_LISTED} more"


def _folded(word: str) -> str:
    """Return a word as it is compared: `--Tensor-Parallel`, `tensor_parallel` and `tensorParallel` are one."""
    return re.sub(r"[^a-z0-9.]", "", word.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words of people and of other tools for the keys and values of a document; keys are dotted, from its top."""

    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    unknown_keys: Mapping[str, str] = field(default_factory=dict)
    unknown_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    inner_keys: Mapping[str, str] = field(default_factory=dict)

    def about_unknown_key(
        self, key: str, name: str, value: Any, siblings: Sequence[str], known_keys: Sequence[str]
    ) -> str:
        """Return what is to be said of an unknown dotted key that holds `value`: what was meant, else the known keys.

        `name` is its last part as written, `siblings` are the names that its mapping may hold, `known_keys` all dotted
        keys of the document.
        """
        sentence = self.unknown_keys.get(key)
        if sentence is not None:
            return sentence
        first, colon, rest = name.partition(":")
        if colon and first in siblings:
            return f"is not a known key; write a space after the colon: {first}: {rest}".rstrip()
        if "." in name and name in known_keys:
            return f"is not a known key; in the file write {name.rpartition('.')[2]}: below {name.rpartition('.')[0]}:"
        meant = self.keys_meant(name, known_keys)
        if meant:
            about_value = self.about_value(meant[0], value) if len(meant) == 1 else None
            return f"is not a known key; did you mean {' or '.join(meant)}?{f' {about_value}' if about_value else ''}"
        near = nearest(name, siblings) or nearest_key(name, known_keys)
        return f"is not a known key; {f'did you mean {near[0]}?' if near else f'known: {listed(siblings)}'}"

    def keys_meant(self, word: str, known_keys: Sequence[str]) -> list[str]:
        """Return the dotted keys that a word, mostly of another tool, stands for exactly; at most three."""
        wanted = _folded(word)
        theirs = [ours for ours, names in self.keys.items() if wanted in map(_folded, names)]
        same_name = [key for key in known_keys if _folded(key.rpartition(".")[2]) == wanted]
        return (theirs or same_name)[:3]

    def about_value(self, key: str, value: Any, choices: Sequence[str] = ()) -> str | None:
        """Return what is to be said of a value that is none of the `choices` of a dotted key; None for nothing."""
        if not isinstance(value, str):
            return None
        wanted = _folded(value)
        for theirs, sentence in self.unknown_values.get(key, {}).items():
            if _folded(theirs) == wanted:
                return sentence
        for ours, names in self.values.get(key, {}).items():
            if wanted in map(_folded, names):
                return f"did you mean {ours}?"
        near = nearest(value, choices)
        return f"did you mean {near[0]}?" if near else None

    def about_any_value(self, key: str) -> str:
        """Return what is to be said of a value whose meaning nobody can guess: what the key is; empty for nothing."""
        return self.unknown_values.get(key, {}).get(ANY, "")


NO_VOCABULARY = Vocabulary()


def nearest_key(name: str, known_keys: Sequence[str]) -> list[str]:
    """Return the one dotted key, anywhere in the document, whose own name is very near."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(known_keys)}
    return [by_name[near] for near in difflib.get_close_matches(name.lower(), by_name, 1, cutoff=0.85)]


@cache
def read_vocabulary(path: Path) -> Vocabulary:
    return Vocabulary(**json.loads(path.read_text(encoding="utf-8")))


def likely_number(key: str, text: str, largest: float | None = None) -> str | None:
    """Return how the number is written that a text most likely means at a key: `8k`, `4,096`, `80%`, `10 min`; None
    where it cannot be told. `largest` is the most that the key takes."""
    quoted, text = text, text.strip(" \t\"'“”‘’")
    if _THOUSANDS.fullmatch(text):
        return re.sub(r"[^0-9]", "", text)
    amount = _AMOUNT.fullmatch(text)
    if amount is None:
        return None
    number, unit = float(amount[1]), amount[2].lower()
    if not unit and "." in amount[1] and number.is_integer() and largest != 1:
        return f"{number:.0f}"
    if largest == 1 and 1 < number <= 100 and unit in ("", "%"):
        return f"{number / 100:g}"
    if not unit and text != quoted:
        return amount[1]
    if "second" in key:
        times = _SECONDS.get(unit) or _SECONDS.get(unit.rstrip("s")) or _SECONDS.get(unit[:3])
        return None if times is None else f"{number * times:.10g}"
    if unit in _POWERS:
        # sequences and vocabularies come in powers of two, steps and batches in those of ten
        base = 1024 if any(word in key for word in ("length", "position", "vocab", "size", "window")) else 1000
        return f"{number * base ** _POWERS[unit]:.0f}"
    named_in_key = unit.rstrip("s") and unit.rstrip("s") in key.lower()
    return f"{number:g}" if named_in_key else None
