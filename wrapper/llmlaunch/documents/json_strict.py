"""Strict JSON: one object, no key twice, finite numbers only, and one message for anything else."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from llmlaunch.documents.literals import is_deeper_than
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import shortened

MOST_DIGITS = 300  # of a whole number: more is no finite fraction, which whatever computes with it would make


def parse_object(text: str, name: str, kind: str) -> dict[str, Any]:
    """Return the object that `text` is; `name` is how messages call the file, `kind` what should stand in it, such as
    "a Hugging Face config.json". Raises UserError."""
    try:
        return strict_object(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: is not valid JSON: {error.msg}; give {kind}") from None
    except RecursionError:
        raise UserError(f"{name}: is nested too deeply for {kind.removeprefix('the ')}") from None
    except TypeError:
        raise UserError(f"{name}: is not a JSON object; give {kind}") from None
    except ValueError as error:
        raise UserError(f"{name}: {cut_to_a_line(str(error))}") from None


def strict_object(text: str) -> dict[str, Any]:
    """Return the object that `text` is.

    Raises:
        json.JSONDecodeError: it is not JSON. TypeError: it is no object. RecursionError: it is nested too deeply.
        ValueError: a key stands twice, or a number is none that JSON has; the message says which.
    """
    values = json.loads(
        text,
        parse_constant=_no_constant,
        parse_float=_finite,
        parse_int=_whole,
        object_pairs_hook=_no_duplicates,
    )
    if not isinstance(values, dict):
        raise TypeError("no object")
    if is_deeper_than(values):
        raise RecursionError("nested too deeply")
    return values


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number JSON knows; write a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is larger than any number here may be; write a finite number")
    return number


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{shortened(text)} is larger than any number here may be; write a finite number")
    return int(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {shortened(json.dumps(twice))} stands twice; remove one")
    return values


def cut_to_a_line(text: str) -> str:
    """Return `text` with "?" for what cannot be printed, and at most 120 characters of it."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 120 else shown[:117] + "..."
