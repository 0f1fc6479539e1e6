"""The parsers of the versions of Megatron core that llmlaunch knows, as data: every flag of each one's own parser.

`parsers/<version>.json` is written by tests/frameworks/traced/dump_parser.py, and says where it was read.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.recipe.types import Recipe

KNOWN_VERSIONS = ("0.16", "0.19")
NEWEST = KNOWN_VERSIONS[-1]

_PARSERS = Path(__file__).with_name("parsers")
_VERSION = re.compile(r"(?:core_)?[rv]?(\d+\.\d+)(?!\d).*")


@dataclass(frozen=True)
class ParserFlag:
    """`values` is how many words follow the flag: a number, or "?", "*", "+" as argparse has them. `choices` are all
    that it takes; empty = anything. `default` None = none. `sets` is what a flag without words puts into `dest`, `type`
    the name of what makes a value of a word."""

    dest: str
    values: int | str
    choices: tuple[str, ...] = ()
    default: str | None = None
    sets: str | None = None
    type: str | None = None


@dataclass(frozen=True)
class CoreParser:
    """The parser of one version: `version` as the framework calls itself, `source` where it was read."""

    version: str
    source: str
    flags: Mapping[str, ParserFlag]


@functools.cache
def core_parser(known_version: str) -> CoreParser:
    """One of KNOWN_VERSIONS."""
    stored = json.loads((_PARSERS / f"{known_version}.json").read_text(encoding="utf-8"))
    flags = {
        name: ParserFlag(**(flag | {"choices": tuple(flag.get("choices", ()))}))
        for name, flag in stored["flags"].items()
    }
    return CoreParser(stored["version"], stored["source"], flags)


def known_version(version: str | None) -> str | None:
    """The one of KNOWN_VERSIONS that `version` ("0.16.1", "core_v0.19.0") is; None for any other."""
    match = _VERSION.fullmatch(version or "")
    return match[1] if match and match[1] in KNOWN_VERSIONS else None


def rendered_version(recipe: Recipe) -> str:
    """Whose flags are rendered: those of the recipe's version where it is known, else of the newest."""
    return known_version(recipe.backend.runs_version) or NEWEST


@functools.cache
def dest_of(flag: str, version: str = NEWEST) -> str:
    """Return the name under which the parser of a version keeps what a flag sets; where that version does not have the
    flag, the newest that has it; and of a flag of no version, its own name."""
    versions = (version, *reversed(KNOWN_VERSIONS))
    parsers = (core_parser(each).flags for each in versions)
    return next((flags[flag].dest for flags in parsers if flag in flags), flag.lstrip("-").replace("-", "_"))
