"""What looks like a secret, by its name, by its form, or by where it stands: in recipes, profiles and files of code.

A recipe is copied into every run directory as it is written, comments included, and what it says reaches job scripts,
which others can often read. So nothing that looks like a secret may stand in one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.causes.redaction import KNOWN_SECRETS, without_arguments
from llmlaunch.documents.keys import dotted
from llmlaunch.documents.yaml_strict import Document, KeyPath

WEBHOOK = ("notify", "webhook")
COMMAND = ("notify", "command")  # a program and its arguments, a word each
_WEBHOOK_IS_A_NAME = (
    "must be the name of a variable: the address of a webhook is a secret, which must not stand in a recipe. Where you "
    "submit, write export NOTIFY_URL=ADDRESS, and here notify: {webhook: NOTIFY_URL}"
)
COMMENTS = "comments"  # what `not_secrets` calls the comments of a file
_NO_PLACE = "must not stand in a recipe; list the name under secrets: and set the variable where you submit"

# A name says that its value is a secret if one of these is its last word, but for what says of which kind it is.
_STRONG = frozenset(
    {
        "cookie",
        "cookies",
        "token",
        "secret",
        "password",
        "passwd",
        "passphrase",
        "credential",
        "credentials",
        "apikey",
        "jwt",
    }
)
_WEAK = frozenset({"key", "pat", "pwd", "auth"})  # with a word before them: WANDB_KEY, GITHUB_PAT
_MAY_NAME_A_FILE = _WEAK | {"credential", "credentials"}  # GOOGLE_APPLICATION_CREDENTIALS is a path
_RUN_TOGETHER = re.compile(
    r"(?:pass(?:word|wd|phrase)|(?:api|secret|access)key|(?:auth|access|hf|gh|api)token|sshpass)$"
)
_KIND = re.compile(
    r"rw|ro|r|w|read|write|readonly|admin|prod|production|dev|staging|test|ci|org|backup|old|new|main|default|primary"
    r"|secondary|b64|base64|value|string|v?\d+"
)
_OF_TEXT = re.compile(  # <|endoftext|> and its like are tokens, too
    r"eos|bos|pad|unk|sep|cls|mask|eod|special|image|video|audio|media|text|begin|end|start|stop|think|chat|tool|per|max"
    r"|min|num|decoder|next|first|last|prompt|draft|user|assistant|system|vocab|additional"
)
_OF_DATA = re.compile(  # and a dataset has keys
    r"sort|primary|foreign|partition|group|cache|column|image|video|audio|text|label|dict|json|data|dataset|prompt|input"
    r"|output|field|hot|shard|routing|lookup|completion|response|target|source|chosen|rejected|messages|id|order|ib"
)
_NO_SECRET = re.compile(
    r"|[01]|true|false|yes|no|on|off|none|null|auto|\d{1,5}|[<\[].*|\*+|\.\.\.|(?:os\.)?(?:environ|getenv)\b.*",
    re.IGNORECASE,
)
_PATH = re.compile(r"(?:/|~/|\.{1,2}/)[\w./~-]*")

_LITERAL = r"(?:\$'|[\"']{0,2})(?![\"'$`])([^\s\"',;&|)}]+)"
_ASSIGNMENT = re.compile(r"(?<![\w-])([A-Za-z_]\w*)\+?=" + _LITERAL)
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?[-=+]" + _LITERAL)
_OPTION = re.compile(r"(?:^|[\s\"'\[,])--?([A-Za-z][\w-]+)(?:=|[\"']?,?\s+)(?!-)" + _LITERAL)
_JSON = re.compile(r"[\"']([A-Za-z_][\w.-]{0,80})\\?[\"']\s*:\s*\\?[\"'](?![\"'$`<{*])([^\"'\\]{1,400})")
_HERE = re.compile(r"\bread\b[^;&|]{0,200}?\s([A-Za-z_]\w*)\s*<<<\s*" + _LITERAL)
_PRINTF = re.compile(r"\b(?:printf\s+-v|setenv|set\s+-gx)\s+([A-Za-z_]\w*)\s+" + _LITERAL)
_SETTING = re.compile(  # password: X and api_key = X, of YAML, TOML and INI files that a line writes
    r"(?<![\w/.-])([A-Za-z_][\w.-]{0,80})[\"']?\s{0,3}(?:=\s|:)\s{0,3}[\"']?((?=[^\s\"']*\d)[A-Za-z0-9][\w.~+/=-]{7,})"
)
_HEADER = re.compile(
    r"\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|bearer|token)\s+(?!\$)\S|\bbearer\s+(?!\$)[\w.~+/=-]{12,}", re.I
)
_QUERY = re.compile(r"[?&][\w-]{0,60}(?:token|key|secret|password|signature|sig|credential)=(?!\$)[^\s&#\"']{8,}", re.I)
_PASSWORD_OF_URL = re.compile(
    r"[a-z][a-z0-9+.-]{0,20}://(?:[^\s/:@\"']*:(?![$*<{])[^\s/@\"']+|(?!\$)[A-Za-z0-9_-]{20,})@"
    r"|(?<![\w./#-])[\w.-]{1,100}:(?![$*<{])[^\s/@:\"']{3,}@(?!sha\d)[\w.-]+:\d+",
    re.IGNORECASE,
)
_KNOWN = tuple((label, heads, re.compile(pattern)) for label, heads, pattern in KNOWN_SECRETS)

_OF_DATABASE = re.compile(r"(?:^|[_.-])(?:dsn|conn(?:ection)?[_-]?str(?:ing)?)$", re.IGNORECASE)
_WITH_LOGIN = re.compile(r"@|(?:pass|pwd|password|secret|key|token)\s*=\s*(?!\$)\S", re.IGNORECASE)

_BLOCK_BYTES = 1 << 20
_LONGEST_SECRET = 200  # characters of it that are enough to know it

_COMMENT = re.compile(r"(?:^|\s)#(.*)")
_COMMENTED_OUT = re.compile(r"([A-Z][A-Z0-9_]*)[\"']?:\s+[\"']?((?=\S*\d)[^\s\"',}]{8,})[\"',}]?\s*$")

_SECRET_FILE = re.compile(
    r"\.env(?:\..+|rc)?|.+\.env|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?(?:[._-].*)?(?<!\.pub)"
    r"|.+\.(?:pem|key|p12|pfx|jks|keystore|kdbx|ppk|ovpn|asc|gpg|kubeconfig)|_?\.?netrc|\.git-credentials|\.pgpass|\.my\.cnf"
    r"|\.(?:npm|pypi|yarn|docker)rc|\.npmrc|\.pypirc|\.htpasswd|\.vault-token|kubeconfig(?:[._-].*)?"
    r"|\.?(?:credentials|secrets?)(?:\.(?:json|ya?ml|toml|ini|txt|cfg|conf|env|db))?"
    r"|(?:.*[._-])?(?:service[_-]account|client_secret)[^/]*\.json|stored_tokens|terraform\.tfstate.*|.*\.tfvars",
    re.IGNORECASE,
)
_SECRET_PLACE = re.compile(
    r"(?:^|/)(?:\.ssh|\.gnupg|\.aws|\.azure|\.kube)/|(?:^|/)\.docker/config\.json$|(?:^|/)\.?huggingface/(?:token|stored_tokens)$"
    r"|(?:^|/)\.config/(?:gcloud|gh)/|(?:^|/)\.?(?:hf_|huggingface_?)?token(?:\.txt)?$",
    re.IGNORECASE,
)


def refuse_secrets(document: Document, allowed: Any, path: KeyPath = ()) -> list[str]:
    """Raise UserError where a value or a comment of `document` looks like a secret, without repeating it. `path` is
    where the whole document stands, for a word of the command line.

    `allowed` is what `not_secrets` holds: dotted keys whose values are none, `comments` for all comments. Returns those
    that were needed.
    """
    if path and isinstance(path[-1], str):  # the name decides, too
        problems = list(_value_problems({path[-1]: document.value}, path[:-1]))
    else:
        problems = list(_value_problems(document.value, path))
    comment = _comment_problem(document.text)
    if comment is not None:
        line, text = comment
        problems.append(((COMMENTS,), text))
        place = document.where() if path else f"{document.name}:{line}"
        document = replace(document, places={**document.places, (COMMENTS,): place})
    passed = allowed if isinstance(allowed, list) else []
    refused = [
        (key, text if key == WEBHOOK else f"{text} (where that is wrong: `not_secrets: [{dotted(key)}]`)")
        for key, text in problems
        if dotted(key) not in passed or key == WEBHOOK
    ]
    if refused:
        from llmlaunch.documents.problems import report

        raise report(document, refused)
    return [dotted(key) for key, _ in problems]


def _comment_problem(text: str) -> tuple[int, str] | None:
    """Return the first line with a comment that holds a secret, and the sentence about it."""
    for number, line in enumerate(text.splitlines(), 1):
        for comment in _COMMENT.findall(line):
            problem = secret_in(comment) or _commented_out(comment)
            if problem is not None:
                return number, f"{problem}, and comments are copied into every run directory; remove it"
    return None


def _value_problems(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            if known_secret(name) is not None:
                yield path, f"a key holds what looks like {known_secret(name)}, which {_NO_PLACE}"
            elif (*path, name) == WEBHOOK and isinstance(item, str) and not item.isidentifier():
                yield WEBHOOK, _WEBHOOK_IS_A_NAME
            elif not isinstance(item, (dict, list)) and is_secret_variable(name, str(item)):
                yield (*path, name), f"looks like a secret, which {_NO_PLACE}"
            else:
                yield from _value_problems(item, (*path, name))
    elif isinstance(value, list):
        if path == COMMAND and all(isinstance(word, str) for word in value):
            problem = secret_in(" ".join(value))
            if problem is not None:
                yield path, f"{problem}, which {_NO_PLACE}"
                return
        for index, item in enumerate(value):
            pair = value[index : index + 2]
            yield from _value_problems(item, (*path, index))
            if len(pair) == 2 and all(isinstance(word, str) for word in pair) and _is_option(pair[0]):
                yield from _value_problems(" ".join(pair), (*path, index + 1))
    elif isinstance(value, str):
        problem = secret_in(value)
        if problem is not None:
            yield path, f"{problem}, which {_NO_PLACE}"


def _is_option(word: str) -> bool:
    return word.startswith("-") and "=" not in word and " " not in word


def _commented_out(comment: str) -> str | None:
    match = _COMMENTED_OUT.search(comment)
    return f"gives {match[1]} a literal value" if match and looks_secret(match[1]) else None


def secret_in(text: str) -> str | None:
    """Say what in `text` looks like a secret, without repeating it; None if nothing does."""
    kind = known_secret(text)
    if kind is not None:
        return f"holds what looks like {kind}"
    for pattern in (_ASSIGNMENT, _DEFAULT, _HERE, _PRINTF, _SETTING):
        for name, value in pattern.findall(text):
            if is_secret_variable(name, value):
                return f"gives {name} a literal value"
    for name, value in _OPTION.findall(text):
        if is_secret_variable(name, value):
            return f"gives --{name} a literal value"
    for name, value in _JSON.findall(text):
        if is_secret_variable(name, value):
            return f"gives {name} a literal value"
    if _PASSWORD_OF_URL.search(text):
        return "holds a password in an address"
    if without_arguments(text, "") != text:
        return "gives a program a literal secret"
    return "holds a literal secret" if _HEADER.search(text) or _QUERY.search(text) else None


def without_passwords(value: Any) -> Any:
    """Return a value of a document without the names and passwords in the addresses that it holds."""
    if isinstance(value, dict):
        return {key: without_passwords(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_passwords(item) for item in value]
    return _PASSWORD_OF_URL.sub(_address_alone, value) if isinstance(value, str) else value


def _address_alone(match: re.Match[str]) -> str:
    scheme, divider, _ = match[0].rpartition("://")
    return scheme + divider + match[0].rpartition("@")[2]


def known_secret(text: str) -> str | None:
    """Return the kind of secret in `text` that has a form of its own, such as a service's prefix or the head of a key
    file; None if there is none.
    """
    for label, heads, form in _KNOWN:
        for head in heads:  # found far sooner than the form itself: whole trees of code are read
            place = text.find(head)
            while place >= 0:
                if form.match(text, place) is not None:
                    return label
                place = text.find(head, place + 1)
    return None


def is_secret_variable(name: str, value: str) -> bool:
    """Whether the name says that `value` is a secret, and `value` may be one: no switch, no small number, and where the
    name leaves that open no path."""
    if _NO_SECRET.fullmatch(value):
        return False
    if _OF_DATABASE.search(name):  # where a database is, and often who may enter it
        return _WITH_LOGIN.search(value) is not None
    if not looks_secret(name):
        return False
    may_name_a_file = re.split(r"[_.-]+", name.lower())[-1] in _MAY_NAME_A_FILE
    return not (may_name_a_file and _PATH.fullmatch(value))


def holds_secret(path: Path) -> bool:
    """Whether a file holds a secret of a form that nothing else has. A link holds none, and what cannot be read is not
    copied either."""
    if path.is_symlink() or not path.is_file():
        return False
    end = ""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            text = end + block.decode("latin-1")
            if known_secret(text) is not None:
                return True
            end = text[-_LONGEST_SECRET:]
    return False


def looks_secret(name: str) -> bool:
    """Whether the name of a variable or option says that its value is a secret: by its last word, since the substring
    "token" would hit TOKENIZERS_PARALLELISM."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    parts = [part for part in re.split(r"[_.-]+", spaced.lower()) if part]
    while len(parts) > 1 and _KIND.fullmatch(parts[-1]):
        parts.pop()
    if parts[-2:] == ["key", "id"]:
        parts.pop()
    if not parts:
        return False
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if last in _STRONG:
        return _OF_TEXT.fullmatch(before) is None
    if last in _WEAK:
        return bool(before) and _OF_DATA.fullmatch(before) is None
    return _RUN_TOGETHER.search(last) is not None


def is_secret_file(name: str) -> bool:
    """Whether a file of this name, a path relative to its tree, is known to hold secrets."""
    path = PurePath(name)
    return _SECRET_FILE.fullmatch(path.name) is not None or _SECRET_PLACE.search(path.as_posix()) is not None
