"""A line of a log as it may be kept and shown: short, on one line, without secrets."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from .secret_arguments import without_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


LINE_CHARACTERS = 400
SHORTEST_SECRET = 8  # characters; less would hide ordinary words
HIDDEN = "***"
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASS(WORD|WD|PHRASE)|SSHPASS|COOKIES?|JWT|CREDENTIALS?)$", re.IGNORECASE)

_NAME = (
    r"(?:token|(?:api|access|secret|private)[_-]?key(?:[_-]?id)?|secret|pass(?:word|wd|phrase)|pwd|sshpass|cookies?|jwt"
    r"|credentials?)"
)
_IS = r"\\?[\"']?\s*:?[:=]\s*(?:[\\$]?[\"']){0,2}"
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
KNOWN_SECRETS = (  # label, what services begin their secrets with, and the whole form
    ("a Hugging Face token", ("hf_",), r"\bhf_[A-Za-z0-9]{16,}"),
    ("an API key of OpenAI or Anthropic", ("sk-",), r"\bsk-(?:[a-z0-9]{1,20}-){0,4}[A-Za-z0-9_-]{20,}"),
    ("a GitHub token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    ("a GitHub token", ("github_pat_",), r"\bgithub_pat_\w{20,}"),
    ("a GitLab token", ("glpat-", "glptt-", "gldt-", "glrt-", "glcbt-", "glsoat-"), r"\bgl[a-z]{2,4}-[\w-]{16,}"),
    ("a Slack token", ("xox", "xapp-"), r"\b(?:xox[abeoprs]-|xapp-\d-)[\w-]{10,}"),
    ("a Slack webhook", ("hooks.slack.com/",), r"\bhooks\.slack\.com/(?:services|workflows)/[\w/]{20,}"),
    ("an AWS access key", ("AKIA", "ASIA", "ABIA", "ACCA"), r"\bA(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}\b"),
    ("a Google key", ("AIza", "ya29.", "GOCSPX-"), r"\b(?:AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,})"),
    ("an Azure key", ("AccountKey=", "8Q~"), r"(?:AccountKey=[A-Za-z0-9+/]{40,}|8Q~[\w~.-]{31,})"),
    ("an NVIDIA key", ("nvapi-",), r"\bnvapi-[\w-]{16,}"),
    ("a Weights & Biases key", ("wandb_v",), r"\bwandb_v\d_\w{20,}"),
    ("an npm token", ("npm_",), r"\bnpm_[A-Za-z0-9]{30,}"),
    ("a PyPI token", ("pypi-AgE",), r"\bpypi-AgE[\w-]{20,}"),
    ("a Docker token", ("dckr_pat_",), r"\bdckr_pat_[\w-]{20,}"),
    ("a Stripe key", ("sk_", "rk_"), r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    ("a private key", ("-----BEGIN ",), r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"),
    ("a private key", ("PuTTY-User-Key-File-", "AGE-SECRET-KEY-1"), r"PuTTY-User-Key-File-|AGE-SECRET-KEY-1"),
    ("a JSON web token", ("eyJ",), r"\beyJ[\w-]{10,999}\.[\w-]{10,999}\.[\w-]*"),
)
_BY_THEIR_LOOKS = re.compile("|".join(pattern for _, _, pattern in KNOWN_SECRETS))


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
    what is given to a name like `api_key`, and what a line gives a program, such as `curl -u`."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _PASSWORD_OF_URL.sub(r"\1:***@", text)
    for pattern in _GIVEN:
        text = pattern.sub(r"\1***", text)
    return _BY_THEIR_LOOKS.sub(HIDDEN, without_arguments(text, HIDDEN))
