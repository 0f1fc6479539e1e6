"""Where each argument, variable and setting of a rendered job comes from, for a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

WIDEST = 48
HEADS = {"argument": "arguments", "variable": "variables", "setting": "settings", "directive": "directives"}


def explained_text(program: Iterable[str], entries: Iterable[Mapping[str, Any]]) -> str:
    lines = [f"program: {' '.join(program)}"]
    for (file, kind), group in groupby(entries, key=lambda entry: (entry["file"], entry["kind"])):
        lines += ["", f"{file}: {HEADS.get(kind, kind)}"]
        for entry in group:
            lines += _lines(entry)
    return "\n".join(lines)


def _lines(entry: Mapping[str, Any]) -> list[str]:
    joined = "=" if entry["kind"] in ("variable", "directive") else " "
    word = entry["name"] + (f"{joined}{entry['value']}" if entry["value"] else "")
    reasons = [_reason(origin) for origin in entry["from"]] + ([entry["why"]] if entry["why"] else [])
    first, *others = reasons or ["llmlaunch"]
    if len(word) > WIDEST:
        return [f"  {word}", *(f"  {'':{WIDEST}}  {reason}" for reason in (first, *others))]
    return [f"  {word:{WIDEST}}  {first}", *(f"  {'':{WIDEST}}  {reason}" for reason in others)]


def _reason(origin: Mapping[str, Any]) -> str:
    place = f" ({origin['place']})" if origin["place"] else ""
    if origin["source"] in ("recipe", "default"):
        return f"{origin['said']}{place}"
    if origin["source"] == "command line":
        return f"{origin['said']} (on the command line)"
    return f"{origin['key']}: {origin['said']}{place}"
