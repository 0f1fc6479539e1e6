"""How much of the real frameworks a run of the tests asks, and what they answered before.

What a framework answers to a fixed question is a fact with a version. It is recorded in tests/data/answers/, and
`make test` compares our code with the record. It asks the framework itself a fixed share of the questions, whose
answers must equal the record. Where our own code runs inside the framework, a fixed share of the cases runs.

LLMLAUNCH_TESTS=all asks every question and runs every case (`make soak`); LLMLAUNCH_TESTS=record asks every
question and writes the record anew (`make answers`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from support.soak import RECORDING, SOAK

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = ROOT / "tests" / "data" / "answers"
ONE_IN = 24  # questions asked again in `make test`, where a test names none
SHORT = 7  # characters of a text that is not worth a number


def versions(packages: Collection[str], places: Collection[Path]) -> dict[str, str]:
    """Return the versions of packages that are installed in folders, without what only names the build."""
    installed = {
        found.name.lower().replace("_", "-"): found.version.partition("+")[0]
        for found in distributions(path=list(map(str, places)))
        if found.name
    }
    return {package: installed[package] for package in packages}


class Recorded:
    """Answers of a real framework to fixed questions, by the text of the question.

    `live` are names of questions that are always asked; without it one in `ONE_IN` is."""

    def __init__(self, name: str, versions: Mapping[str, str], live: Collection[str] | None = None) -> None:
        self._path, self._versions, self._live = ANSWERS / f"{name}.json", dict(versions), live
        self._new: dict[str, Any] = {}
        record = json.loads(self._path.read_text("utf-8")) if not RECORDING else {"versions": versions, "answers": {}}
        self._known: dict[str, Any] = _spelled_out(record["answers"], record.get("words", []))
        self._recorded_versions: dict[str, str] = record["versions"]

    def asks(self, question: str, name: str = "") -> bool:
        """Return whether this run asks the framework."""
        chosen = int(_digest(question), 16) % ONE_IN == 0 if self._live is None else name in self._live
        return SOAK or RECORDING or chosen

    def answer(self, question: str, ask: Callable[[], Any], name: str = "", exact: bool = True) -> Any:
        """Return the recorded answer; `ask` asks the framework. Fails where the two differ, and where no such question
        of these versions was recorded. What is not `exact` is never twice the same: the framework's own is returned."""
        key = f"{name} {_digest(question)}".strip()
        if RECORDING:
            if key not in self._new:
                self._new[key] = ask()
            return self._new[key]
        remedy = "`make answers` asks anew and records; read what changed before you commit it"
        if self._recorded_versions != self._versions:
            pytest.fail(f"{self._path.name} is of {self._recorded_versions}, installed are {self._versions}: {remedy}")
        if key not in self._known:
            pytest.fail(f"{self._path.name} has no answer to {key}: {question[:500]}\n{remedy}")
        known = self._known[key]
        if self.asks(question, name) and not exact:
            return json.loads(json.dumps(ask()))
        if self.asks(question, name):
            assert json.loads(json.dumps(ask())) == known, f"{name or question[:500]}: the framework answers otherwise"
        return known

    def write(self) -> None:
        """Write what was asked, an answer a line; texts that occur more than once are numbered."""
        counts = Counter(text for text in _texts(self._new) if len(text) > SHORT)
        words = sorted(text for text, count in counts.items() if count > 1)
        answers = _numbered(self._new, {text: f"@{number}" for number, text in enumerate(words)})
        lines = [f"{json.dumps(key)}: {_compact(answer)}" for key, answer in sorted(answers.items())]
        heads = [f'"versions": {json.dumps(self._versions)}', f'"words": {json.dumps(words, indent=0)}']
        text = ",\n".join([*heads, '"answers": {\n' + ",\n".join(lines) + "\n}"])
        self._path.write_text(f"{{{text}}}\n", "utf-8")


@contextmanager
def recorded(name: str, versions: Mapping[str, str], live: Collection[str] | None = None) -> Iterator[Recorded]:
    answers = Recorded(name, versions, live)
    yield answers
    if RECORDING:
        answers.write()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _numbered(value: Any, numbers: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return numbers.get(value, value)
    if isinstance(value, dict):
        return {key: _numbered(inner, numbers) for key, inner in value.items()}
    return [_numbered(inner, numbers) for inner in value] if isinstance(value, list | tuple) else value


def _spelled_out(answers: Any, words: Sequence[str]) -> Any:
    return _numbered(answers, {f"@{number}": text for number, text in enumerate(words)})


def _compact(answer: Any) -> str:
    return json.dumps(answer, separators=(",", ":"))


def _digest(question: str) -> str:
    """Return a name of the text, wherever the checkout is."""
    return hashlib.sha256(question.replace(str(ROOT), "$ROOT").encode()).hexdigest()[:12]
