"""A line of a log as it may be kept and shown: short, on one line, without secrets.

A secret may be an argument of a program: `curl -u user:password`, `sshpass -p`, `mysql -ppassword`, what is written
into ~/.netrc. A program's arguments end at `;`, `&`, `|` or the end of the line; a value that begins with `$` is passed
by reference. Every part of a pattern that repeats is bounded, and its one group is the secret.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_MORE = r"(?:[^;&|\n]|\\\n){0,300}?"
_FEW = r"[^;&|\n]{0,80}?"
_LITERAL = r"(?:\\\n\s*)?(?:\$?[\"'])?((?![\"'$`<*{%\\\s-])[^\s\"'$`;&|]+)"
_LONG = r"[\"']?(?<=[\s\"'=])((?![\"'$`<*{%])[\w.~+/=%-]{8,})"
_USER = r"(?:\\\n\s*)?[\"']?(?![\"'-])[^\s\"':]{0,100}[\"']?:[\"']?(?![/?=+])"
_LOGS_IN = (
    r"(?:(?:docker|podman|nerdctl|buildah|skopeo|crane|helm|oras|apptainer|singularity|enroot|az|oc|gh|glab|hf|ngc"
    r"|huggingface-cli|wandb|weave|comet|neptune|vault)\b)"
)
_INTO = r"[\"']?\s*>>?\s*[\"']?\S{0,300}?"
_FLAGS = r"(?:--?[\w-]{1,40}(?:[\s=]S3v[24])?\s+){0,4}"
_SPACE = r"(?:\s|\\[nt]){1,20}"
_OF_NETRC = rf"password{_SPACE}((?![$\"'%<\s])[^\s\"'\\]+)"
_TOKEN_FILE = r"(?:\.vault-token|(?:huggingface|HF_HOME\}?)/token)\b"

_OPTIONS = (
    # program, what comes before the secret in its arguments
    ("curl", rf"(?:-[A-Za-z]{{0,8}}[uU]\s*|--(?:proxy-)?user[ =]){_USER}"),
    ("curl", r"(?:-b\s*|--cookie[ =])[\"']?[\w.-]{1,100}=(?=[^\s\"'$;]{6})"),
    ("https?", rf"(?:-a\s*|--auth[ =]){_USER}"),
    ("sshpass", r"-v?p\s*"),
    (r"(?:mysql\w*|mariadb[\w-]*|mycli|7z\w?)", "-p"),
    (r"(?:mongo\w*|mongosh)", r"-p\s*"),
    ("redis-cli", r"(?:-a|--pass)\s*"),
    (r"ldap\w+", r"-w\s*"),
    ("(?:smbclient|smbget)", r"-U\s*[\"']?[^\s\"'%$]{1,100}%"),
    ("lftp", r"-u\s*[\"']?[^\s\"',$]{1,100},"),
    ("(?:unzip|zip)", r"-P\s*"),
    ("htpasswd", r"-\w{0,6}b\w{0,6}\s+\S+\s+\S+\s+"),
    ("openssl", r"(?:\S{0,20}\bpass:|-[kK]\s+)"),
    ("mc", rf"(?:alias\s+set|config\s+host\s+add)\s+(?:{_FLAGS}(?!-)\S+\s+){{3}}{_FLAGS}"),
    ("aws", rf"configure\s+set\s{_FEW}(?:secret\w*|token|access_key\w*|password)[\s=]\s*"),
    ("kaggle", rf"config\s+set\s{_FEW}\s-v\s*"),
    (_LOGS_IN, rf"login\b{_MORE}(?:\s-p\s*|<<<\s*)"),
    ("(?:kinit|sudo|gpg|chpasswd|cryptsetup)", r"<<<\s*"),
    ("(?:cat|tee)", rf"\S{{0,300}}?{_TOKEN_FILE}[\"']?\s*<<<\s*"),
)
_ARGUMENTS = (
    # program, its arguments
    ("rclone", rf"config\s+(?:create|update)\s{_FEW}\b\w{{0,40}}(?:secret\w*|token|pass|key)[ =]{_LONG}"),
    ("(?:wandb|weave|comet|neptune|vault)", rf"login\b{_MORE}\s[\"']?((?![\"'$-]|\w+=)[A-Za-z0-9_-]{{8,}})"),
    (
        "(?:echo|printf)",
        rf"(?:{_LONG}(?:[\"']?\s*\|\s*(?:kinit|sudo\s+(?:-\w*S|--stdin)|chpasswd|cryptsetup|gpg\s{_MORE}\bpassphrase-fd"
        rf"|{_LOGS_IN}\s{_MORE}\blogin\b)|{_INTO}{_TOKEN_FILE})"
        rf"|[\"']?(?:[^\s:\"']{{1,100}}:){{4}}((?![$\"'])[^\s\"'$]{{1,100}}){_INTO}\.pgpass\b"
        rf"|\S{{0,40}}?(?:\b|\\[nt])(?:{_OF_NETRC}{_MORE}>>?\s*[\"']?\S{{0,300}}?netrc\b(?!\.)"
        rf"|password\s+%s{_MORE}\s[\"']?((?![\"'$])[^\s\"'$>]{{6,}})[\"']?\s*>>?))",
    ),
)
_OF_ANY_PROGRAM = (
    r"\blogin\(\s*(?:\w{1,20}\s*=\s*)?[\"']([\w.~+/-]{8,})",
    rf"\bmachine\s+\S{{1,200}}{_SPACE}(?:(?:login|account){_SPACE}\S{{1,200}}?{_SPACE}){{0,2}}{_OF_NETRC}",
    r"(?i:(?:-H|--(?:proxy-)?header)[ =]?[\"']?(?:cookie|[\w-]{0,40}(?:api-?key|token|secret|password))\s*:\s*"
    r"((?![$\"'<*{])[^\s\"']{6,}))",
    r"(?i:\b(?:uid|user id|user|username)=[^;\"']{1,100};\s*(?:pwd|password)=((?![$\"'<*{;])[^;\s\"']+))",
    r"[\"'](?:auth|username\\?[\"']\s*:[^{}]{1,200}[\"']key)\\?[\"']\s*:\s*\\?[\"']((?!\$)[A-Za-z0-9+/=]{8,})",
)


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], ...]:
    rows = "|".join(
        [rf"{program}{_MORE}\s{option}{_LITERAL}" for program, option in _OPTIONS]
        + [rf"{program}{_MORE}\s{arguments}" for program, arguments in _ARGUMENTS]
    )
    return tuple(map(re.compile, (rf"(?<![\w./-])(?:[\w./-]{{0,200}}/)?(?:{rows})", *_OF_ANY_PROGRAM)))


def without_arguments(text: str, instead: str) -> str:
    """Return the text with `instead` for each literal secret that a line gives a program."""
    for pattern in _patterns():
        text = pattern.sub(lambda match: _replaced(match, instead), text)
    return text


def _replaced(match: re.Match[str], instead: str) -> str:
    start, end = (place - match.start() for place in match.span(match.lastindex or 0))
    return match[0][:start] + instead + match[0][end:]


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
