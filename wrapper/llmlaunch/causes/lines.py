"""A line of a log as it may be kept and shown: short, on one line, without secrets."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["LINE_CHARACTERS", "harmless", "masked", "secret_values"]

LINE_CHARACTERS = 400
SHORTEST_SECRET = 8  # characters; less would hide ordinary words
HIDDEN = "***"
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)

_NAME = r"(?:token|(?:api|access|secret|private)[_-]?key(?:[_-]?id)?|secret|password|passwd|credentials?)"
_IS = r"[\"']?\s*[:=]\s*[\"']?"
_VALUE = r"(?![0-9.eE+-]+\b)[A-Za-z0-9][^\s\"',;&\\]{7,}"  # no number, and none of a tokenizer's <|words|>
_GIVEN = tuple(  # what comes before the secret is kept; every part that repeats is bounded, so no text takes long
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"([?&][\w-]{0,60}(?:" + _NAME + r"|signature|sig)=)[^\s&#\"']+",
        r"(\bauthorization" + _IS + r"(?:basic|bearer|token)\s+)[^\s\"']+",
        r"(\bbearer\s+)[\w.~+/=-]{12,}",
        r"(\b[\w-]{0,60}" + _NAME + _IS + r")" + _VALUE,
        r"(\b(?-i:[A-Z0-9_]{1,60}_KEY)" + _IS + r")" + _VALUE,
        r"(--[\w-]{0,60}(?:" + _NAME + r"|[_-]key)[\"']?,?\s+[\"']?)" + _VALUE,
    )
)
_PASSWORD_OF_URL = re.compile(r"(://[^\s/:@\"']*):[^\s/@\"']+@")
_BY_THEIR_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-(?:[a-z]+-){0,3}[A-Za-z0-9_]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{10,999}\.[\w-]{10,999}\.[\w-]*)"  # a JSON web token
)


def harmless(line: str, environment: Mapping[str, str] | None = None) -> str:
    """`line` without secrets, which a message may quote, with a space for each character that a terminal would obey,
    and at most LINE_CHARACTERS long."""
    line = masked(line[: 10 * LINE_CHARACTERS], secret_values(os.environ if environment is None else environment))
    return "".join(c if c.isprintable() else " " for c in line).strip()[:LINE_CHARACTERS]


def secret_values(environment: Mapping[str, str], names: Iterable[str] = ()) -> list[str]:
    """What this environment holds under the name of a secret (HF_TOKEN, WANDB_API_KEY ...) or under one of `names`."""
    listed = set(names)
    return [
        value
        for name, value in environment.items()
        if len(value) >= SHORTEST_SECRET and (name in listed or _SECRET.search(name))
    ]


def masked(text: str, values: Iterable[str] = ()) -> str:
    """`text` without these values, and without what looks like a secret: passwords of URLs, tokens of known services,
    and what is given to a name like `api_key`."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _PASSWORD_OF_URL.sub(r"\1:***@", text)
    for given in _GIVEN:
        text = given.sub(r"\1***", text)
    return _BY_THEIR_LOOKS.sub(HIDDEN, text)
