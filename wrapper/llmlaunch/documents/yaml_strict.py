"""Strict YAML: safe, small, without surprises, and with a place for every value.

YAML 1.1, which PyYAML reads, has traps that a recipe must not fall into: the last of two equal keys wins,
`12:30:00` is a number in base 60, `010` is eight, `1e9` is text, `no` is false. Duplicate keys, tags, anchors and
the first two kinds of number are refused here; the others are kept with their raw text, so that whoever knows
which type a field has can say what went wrong.

The event stream is read instead of `yaml.load`: it tells an explicit tag from a resolved one, and nothing is
ever constructed but dicts, lists, text, numbers, booleans and None.
"""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import yaml

from llmlaunch.errors import UserError
from llmlaunch.rundir.regular_files import open_regular
from llmlaunch.rundir.values import shortened

STANDARD_INPUT, STANDARD_INPUT_NAME = "-", "standard input"

MAX_BYTES = 1 << 20
MAX_DEPTH = 32

KeyPath = tuple[str | int, ...]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_BOOLEANS = {"yes": True, "no": False, "true": True, "false": False, "on": True, "off": False}
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_LARGEST = 2**63 - 1
_CONFLICT = re.compile(r"(<{7}|={7}|>{7})( .*)?")
_NO_SPACE = re.compile(r"\s*(?:- )?([A-Za-z_]\w*):([^\s/:].*)")
_EQUALS = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=\s*(\S.*)")


@dataclass(frozen=True)
class Document:
    """A parsed file. `places` says where each value stands ("recipe.yaml:12"), `raw` holds unquoted scalars as
    they were written, both by the path of keys from the top."""

    name: str
    text: str
    value: Any
    places: Mapping[KeyPath, str]
    raw: Mapping[KeyPath, str]

    def where(self, path: KeyPath = ()) -> str:
        """Return the place of the value at `path`, or of the nearest enclosing value that exists."""
        for length in range(len(path), -1, -1):
            place = self.places.get(path[:length])
            if place is not None:
                return place
        return self.name


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a small UTF-8 file.

    Raises `UserError` for a directory, a device, an unreadable or missing file, more than `max_bytes` (seen before
    anything is read), and for what is not text.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path}: is a directory; name the file in it{_such_as(path)}")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: is not a regular file; give the path of a file")
        if status.st_size > max_bytes:
            size = status.st_size / 2**20
            raise UserError(
                f"{path}: is {size:.1f} MiB, more than the {max_bytes >> 20} MiB allowed here; is it the right file?"
            )
        with open_regular(path, follow=True) as file:  # a pipe may have taken its place since
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        from llmlaunch.documents.likely_meaning import nearest

        near = nearest(path.name, _documents_in(path.parent))
        fix = f"did you mean {path.parent / near[0]}?" if near else "check the path and its rights"
        raise UserError(f"{path}: cannot be read: {error.strerror}; {fix}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; check the path and its rights") from None
    except ValueError as error:  # a NUL in the path itself
        raise UserError(f"{str(path)!r}: is not a usable path: {error}") from None
    if len(data) > max_bytes:
        raise UserError(f"{path}: is more than the {max_bytes >> 20} MiB allowed here; is it the right file?")
    if b"\0" in data:
        raise UserError(f"{path}: contains a NUL byte; it is not a text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: is not UTF-8 text; save the file as UTF-8") from None


def _documents_in(folder: Path) -> list[str]:
    """Return the names of the YAML files in a folder, sorted; none where it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _such_as(folder: Path) -> str:
    """Return the end of a sentence that names the first YAML file of a folder."""
    names = _documents_in(folder)
    return f", such as {folder / names[0]}" if names else ""


def read_document(path: Path) -> Document:
    """Read and parse a YAML (or JSON) file whose top level is a mapping; a path of - is standard input."""
    if str(path) == STANDARD_INPUT and sys.stdin is not None:
        return parse_document(_whole(sys.stdin), STANDARD_INPUT_NAME)
    return parse_document(read_text(path), str(path))


@lru_cache(maxsize=1)
def _whole(stream: TextIO) -> str:
    """Return the text of a stream, which can be read once, however often it is asked for."""
    name = STANDARD_INPUT_NAME
    try:
        text = stream.read(MAX_BYTES + 1)
    except (UnicodeDecodeError, ValueError, OSError) as error:
        raise UserError(f"{name}: cannot be read ({error}); give the path of a file") from None
    if len(text) > MAX_BYTES:
        raise UserError(f"{name}: is more than the {MAX_BYTES >> 20} MiB allowed here; is it the right file?")
    return text.removeprefix("\ufeff")


def parse_document(text: str, name: str) -> Document:
    """Parse YAML text whose top level is a mapping; `name` is how messages call the file."""
    _refuse_conflict(text, name)
    document = _Parser(text, name).parse()
    if document.value is None:
        raise UserError(f"{name}: is empty; write `key: value` lines")
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        likely = _likely_line(text, 0, len(text))
        fix = f"; line {likely[0]}: {likely[1]}" if likely else ""
        raise UserError(f"{document.where()}: the file is {kind}, not a mapping; write `key: value` lines{fix}")
    return document


def _refuse_conflict(text: str, name: str) -> None:
    """Raise UserError for the marks that git leaves in a file whose two versions it could not merge."""
    if "<<<<<<<" not in text and ">>>>>>>" not in text:
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if _CONFLICT.fullmatch(line.rstrip()):
            raise UserError(
                f"{name}:{number}: {_short(line.strip())} marks a merge conflict; keep one of the two versions and "
                "remove the lines of <<<<<<<, ======= and >>>>>>>"
            )


def _likely_line(text: str, first: int, last: int) -> tuple[int, str] | None:
    """Return the line, of the `first` to the `last` counted from 0, that is most likely no YAML, and how to mend it."""
    lines = text.split("\n")
    for i in range(max(first, 0), min(last + 1, len(lines))):
        line = lines[i].split(" #")[0].rstrip()
        if line.lstrip().startswith("#"):
            continue
        no_space, equals = _NO_SPACE.fullmatch(line), _EQUALS.fullmatch(line)
        if no_space is not None:
            return i + 1, f"write a space after the colon: `{no_space[1]}: {shortened(no_space[2])}`"
        if equals is not None and ": " not in line:
            return i + 1, f"write a colon and a space: `{equals[1]}: {shortened(equals[2])}`"
    return None


def parse_value(text: str, name: str) -> Document:
    """Parse one YAML value, of any kind; every place is `name` itself (for words of a command line)."""
    return _Parser(text, name, numbered=False).parse()


class _Parser:
    """Turns YAML events into plain values. For one use."""

    def __init__(self, text: str, name: str, numbered: bool = True) -> None:
        self.text, self.name, self.numbered = text, name, numbered
        self.places: dict[KeyPath, str] = {}
        self.raw: dict[KeyPath, str] = {}
        self.loader: Any = None

    def parse(self) -> Document:
        try:
            self.loader = _Loader(self.text)
            try:
                value = self._documents()
            finally:
                self.loader.dispose()
        except yaml.YAMLError as error:
            raise UserError(self._syntax(error)) from None
        except UnicodeError:  # surrogates: a command line that was not UTF-8
            raise UserError(f"{self.name}: is not UTF-8 text") from None
        return Document(self.name, self.text, value, self.places, self.raw)

    def _documents(self) -> Any:
        self.loader.get_event()  # stream start
        event = self.loader.get_event()
        value = None
        if isinstance(event, yaml.DocumentStartEvent):
            value = self._value(self.loader.get_event(), ())
            self.loader.get_event()  # document end
            event = self.loader.get_event()
        if not isinstance(event, yaml.StreamEndEvent):
            raise self._error(event, "a second document begins here; keep one document in the file")
        return value

    def _value(self, event: Any, path: KeyPath) -> Any:
        self.places.setdefault(path, self._place(event))
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._error(event, "anchors (&) and aliases (*) are not accepted; write the value out")
        if event.tag is not None:
            raise self._error(event, f"the YAML tag {_short(event.tag)} is not accepted; remove it")
        if len(path) > MAX_DEPTH:
            raise self._error(event, f"nested more than {MAX_DEPTH} levels deep; a file of this kind is flat")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._scalar(event, path)

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := self.loader.get_event(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
                raise self._error(event, "a key must be plain text")
            key = event.value  # as written: `on:` and `010:` are keys like any other
            inner = (*path, key)
            if key in result:
                first = self.places[inner]
                raise self._error(event, f"the key {_short(key)} stands twice (first at {first}); remove one")
            if key == "<<":
                raise self._error(event, "merge keys (<<) are not accepted; write the values out")
            self.places[inner] = self._place(event)
            result[key] = self._value(self.loader.get_event(), inner)
        return result

    def _sequence(self, path: KeyPath) -> list[Any]:
        result: list[Any] = []
        while not isinstance(event := self.loader.get_event(), yaml.SequenceEndEvent):
            result.append(self._value(event, (*path, len(result))))
        return result

    def _scalar(self, event: Any, path: KeyPath) -> Any:
        if not event.implicit[0]:  # quoted, or a block of text
            return event.value
        text = event.value
        self.raw[path] = text
        tag = self.loader.resolve(yaml.ScalarNode, text, (True, False)).removeprefix(_TAG)
        if tag == "null":
            return None
        if tag == "bool":
            return _BOOLEANS[text.lower()]
        if tag not in ("int", "float"):
            return text
        if ":" in text:
            raise self._error(event, f'YAML reads {text} as a number in base 60; quote it: "{text}"')
        if _OCTAL.fullmatch(text) and tag == "int":
            raise self._error(
                event, f'YAML reads {text} as an octal number; write it without the 0, or quote it: "{text}"'
            )
        try:
            return _number(text, tag)
        except ValueError:
            raise self._error(event, f"{_short(text)} is not a usable number") from None

    def _place(self, event: Any) -> str:
        return f"{self.name}:{event.start_mark.line + 1}" if self.numbered else self.name

    def _error(self, event: Any, problem: str) -> UserError:
        return UserError(f"{self._place(event)}: {problem}")

    def _syntax(self, error: yaml.YAMLError) -> str:
        """Return the sentence for text that is no YAML, at the line that is to be mended where it can be told."""
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        begin = getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        line = None if mark is None or not self.numbered else mark.line
        unclosed = any(sign in str(problem) for sign in ("end of stream", "expected ','", "expected node content"))
        fix = ""
        lines = self.text.split("\n")
        if line is not None:
            first = line - 1 if begin is None else min(begin.line, line - 1)
            likely = _likely_line(self.text, first, line)
            if line < len(lines) and "\t" in lines[line]:
                fix = "; indent with spaces, not tabs"
            elif likely is not None:
                line, fix = likely[0] - 1, f"; {likely[1]}"
            elif "mapping values" in str(problem):
                fix = "; quote a value that has a colon and a space in it, and indent keys of one mapping alike"
            elif begin is not None and begin.line < line and unclosed:
                line, fix = begin.line, f"; what begins with {lines[begin.line][begin.column]} in this line never ends"
        elif unclosed:
            fix = "; a quote or bracket that is opened must be closed; for the shell, quote the whole word"
        place = f"{self.name}:{line + 1}" if line is not None else self.name
        return f"{place}: is not valid YAML: {' '.join(str(problem).split())}{fix}"


def _number(text: str, tag: str) -> int | float:
    plain = text.replace("_", "")
    if tag == "int":
        # beyond 64 bits a fraction like any other, which whole numbers are told from: each key names its own bounds
        if len(plain) > 200:
            raise ValueError("is no number that anything here could hold")
        number = int(plain, 0)
        return number if abs(number) <= _LARGEST else float(number)
    lowered = plain.lower().lstrip("+-")
    if lowered in (".inf", ".nan"):
        return float(plain.lower().replace(".", ""))
    return float(plain)


def _short(text: str) -> str:
    return repr(shortened(text))
