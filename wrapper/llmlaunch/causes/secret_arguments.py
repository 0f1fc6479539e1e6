"""Secrets that a command line gives to a program as an argument, by the program's own options: `curl -u user:password`,
`sshpass -p`, `mysql -ppassword`, what is written into ~/.netrc.

A program's arguments end at `;`, `&`, `|` or the end of the line; a value that begins with `$` is passed by reference.
Every part that repeats is bounded, and the one group of a pattern is the secret.
"""

from __future__ import annotations

import re
from functools import lru_cache

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
