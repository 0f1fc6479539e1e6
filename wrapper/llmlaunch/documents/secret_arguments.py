"""Secrets that a command line gives to a program as an argument, by the program's own options: `curl -u user:password`,
`sshpass -p`, `mysql -ppassword`, what is written into ~/.netrc.

A row is a program and what in its arguments is a literal secret; a value that begins with `$` is passed by reference. A
program's arguments end at `;`, `&`, `|` or the end of the line, and every part that repeats is bounded.
"""

from __future__ import annotations

import re

_MORE = r"[^;&|\n]{0,300}?"
_FEW = r"[^;&|\n]{0,80}?"
_LITERAL = r"[\"']?(?![\"'$`<*{%\s-])[^\s\"'$`;&|]"
_PAIR = r"[\"']?(?![\"'$`-])[^\s\"':$]{1,100}:(?![\"'$`<*{/\s])[^\s\"'$`;&|]"  # user:password
_LONG = r"[\"']?(?<=[\s\"'=])(?![\"'$`<*{%])[\w.~+/=%-]{8,}"
_PRINTS = r"(?:echo|printf)"
_INTO = r"[\"']?\s*>>?\s*[\"']?\S{0,300}?"

_PROGRAMS = (
    # program, what follows it
    (r"curl", rf"{_MORE}\s(?:-[A-Za-z]{{0,8}}[uU]\s*|--(?:proxy-)?user[ =]){_PAIR}"),
    (r"curl", rf"{_MORE}\s(?:-b\s*|--cookie[ =])[\"']?[\w.-]{{1,100}}=(?!\$)[^\s\"'$;]{{6,}}"),
    (r"https?", rf"{_MORE}\s(?:-a\s*|--auth[ =]){_PAIR}"),
    (r"sshpass", rf"{_MORE}\s-p\s*{_LITERAL}"),
    (r"(?:mysql\w*|mariadb[\w-]*|mycli)", rf"{_MORE}\s-p{_LITERAL}"),
    (r"(?:mongo\w*|mongosh)", rf"{_MORE}\s-p\s*{_LITERAL}"),
    (r"redis-cli", rf"{_MORE}\s-a\s*{_LITERAL}"),
    (r"ldap\w+", rf"{_MORE}\s-w\s*{_LITERAL}"),
    (r"(?:smbclient|smbget)", rf"{_MORE}\s-U\s*[\"']?[^\s\"'%$]{{1,100}}%(?![$\"'\s])\S"),
    (r"lftp", rf"{_MORE}\s-u\s*[\"']?[^\s\"',$]{{1,100}},(?![$\"'\s])\S"),
    (r"(?:unzip|zip)", rf"{_MORE}\s-P\s*{_LITERAL}"),
    (r"7z\w?", rf"{_MORE}\s-p{_LITERAL}"),
    (r"htpasswd", rf"\s+-\w{{0,6}}b\w{{0,6}}\s+\S+\s+\S+\s+{_LITERAL}"),
    (r"openssl", rf"{_MORE}\bpass:(?![\"'$`<*{{\s])\S"),
    (r"mc", rf"{_MORE}\b(?:alias\s+set|config\s+host\s+add)\s+\S+\s+\S+\s+\S+\s+{_LITERAL}"),
    (r"aws", rf"{_MORE}\bconfigure\s+set\s+\S*(?:secret\w*|token|access_key\w*|password)\s+{_LITERAL}"),
    (r"rclone", rf"{_MORE}\bconfig\s+(?:create|update)\s{_FEW}\b\w{{0,40}}(?:secret\w*|token|pass|key)[ =]{_LONG}"),
    (r"kaggle", rf"\s+config\s+set\s{_MORE}\s-v\s*{_LITERAL}"),
    (r"(?:kinit|sudo|gpg|chpasswd|cryptsetup)", rf"{_MORE}<<<\s*{_LITERAL}"),
    (_PRINTS, rf"\s{_MORE}{_LONG}[\"']?\s*\|\s*(?:kinit|sudo\s+-\w*S|gpg\b{_MORE}passphrase-fd|chpasswd|cryptsetup)"),
    (_PRINTS, rf"\s{_MORE}{_LONG}{_INTO}(?:\.vault-token|huggingface/token)\b"),
    (_PRINTS, rf"\s{_MORE}(?:[^\s:\"']{{1,100}}:){{4}}(?![$\"'])[^\s\"'$]{{1,100}}{_INTO}\.pgpass\b"),
    (r"printf", rf"\s{_MORE}\bpassword\s+%s{_MORE}\s[\"']?(?![\"'$])[^\s\"'$>]{{6,}}[\"']?\s*>>?"),
)  # fmt: skip
_GIVEN = re.compile("|".join(rf"(?<![\w./-])(?:[\w./-]*/)?{program}{arguments}" for program, arguments in _PROGRAMS))
_NETRC = re.compile(r"\bmachine\s+\S{1,200}[\s\\n]{1,20}login\s+\S{1,200}?[\s\\n]{1,20}password\s+(?![$\"'%<])\S")
_HEADER = re.compile(
    r"(?:-H|--header)[ =]?[\"']?(?:cookie|[\w-]{0,40}(?:api-?key|token|secret|password))\s*:\s*(?![$\"'<*{])\S{6,}",
    re.I,
)
_CONNECTION = re.compile(
    r"\b(?:uid|user id|user|username)=[^;\"']{1,100};\s*(?:pwd|password)=(?![$\"'<*{;])[^;\s\"']", re.I
)
_REGISTRY = re.compile(r"[\"']auth\\?[\"']\s*:\s*\\?[\"'](?!\$)[A-Za-z0-9+/=]{8,}")


def gives_secret(text: str) -> bool:
    """Return whether a line gives a program a literal secret."""
    return any(pattern.search(text) is not None for pattern in (_GIVEN, _NETRC, _HEADER, _CONNECTION, _REGISTRY))
