"""The frozen corpus: code may move, and plans, bytes, seconds and rendered files may not.

CONTRIBUTING.md says what it holds and what equal means; `make soak` compares all of it, this module a sample.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest

from support.corpus.compare import changed_rows
from support.corpus.difference import MOST_ULPS, differences
from support.corpus.kinds import KINDS, is_of
from support.corpus.program import gallery
from support.corpus.sample import sample
from support.corpus.storage import PARTS, read_part

BACKENDS = ("megatron-lm", "megatron-bridge", "deepspeed")
PER_BACKEND = 200
SCRIPTS_READ = 25
LEAST_OF_A_KIND = 10

Row = dict[str, Any]


@cache
def rows_of(part: str) -> list[Row]:
    return read_part(part)


@pytest.mark.parametrize("part", PARTS)
def test_a_sample_is_answered_as_when_it_was_frozen(part: str) -> None:
    changed = [
        f"{row['name']}:\n" + "\n".join(lines) for row, _, lines in map(changed_rows, sample(rows_of(part))) if lines
    ]
    assert not changed, (
        "answers changed; `PYTHONPATH=tests python -m support.corpus compare` shows all:\n\n" + "\n\n".join(changed)
    )


def test_every_recipe_of_the_gallery_is_in_it() -> None:
    assert {row["name"]: row["recipe"] for row in rows_of("gallery")} == {
        f"gallery/{name}": text for name, text in gallery().items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_has_its_random_recipes_most_of_which_are_planned(backend: str) -> None:
    rows = rows_of(backend)
    planned = [row for row in rows if "plan" in row["answer"]]
    rendered = [row for row in planned if "files" in row["answer"]]
    assert len(rows) == len({row["name"] for row in rows}) == PER_BACKEND
    assert len(planned) >= 0.9 * PER_BACKEND
    assert len(rendered) >= 0.75 * PER_BACKEND
    assert len({str((row["recipe"], row.get("files"))) for row in rows}) == PER_BACKEND


@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_enough_jobs_of_every_kind(kind: str) -> None:
    rows = [row for backend in BACKENDS for row in rows_of(backend)]
    assert sum(is_of(kind, row, row["answer"]) for row in rows) >= LEAST_OF_A_KIND


def test_it_holds_every_verdict() -> None:
    rows = [row for part in ("gallery", *BACKENDS) for row in rows_of(part)]
    verdicts = Counter(row["answer"]["plan"]["verdict"] for row in rows if "plan" in row["answer"])
    assert verdicts.keys() >= {"safe", "tight", "unsafe"}, verdicts


def test_enough_scripts_are_read_into_recipes() -> None:
    rows = rows_of("scripts")
    assert sum("recipe" in row["answer"] for row in rows) >= SCRIPTS_READ
    assert {row["answer"]["check"]["exit_code"] for row in rows} >= {0, 2, 3, 5}


def answered() -> Row:
    row = next(row for row in rows_of("gallery") if row["name"] == "gallery/llama3-70b")
    answer: Row = copy.deepcopy(row["answer"])
    return answer


def test_a_single_byte_of_one_term_is_a_difference() -> None:
    before, after = answered(), answered()
    terms = after["plan"]["memory"]["ranks"][0]["terms"]
    name = next(iter(terms))
    terms[name] += 1
    assert list(differences(before, after)) == [
        f"plan.memory.ranks[0].terms.{name}: {terms[name] - 1}, now {terms[name]}"
    ]


@pytest.mark.parametrize("ulps", [1, MOST_ULPS, MOST_ULPS + 1])
def test_seconds_may_differ_by_four_units_in_the_last_place(ulps: int) -> None:
    before, after = answered(), answered()
    seconds = before["plan"]["step_seconds"]
    after["plan"]["step_seconds"] = seconds + ulps * math.ulp(seconds)
    assert bool(list(differences(before, after))) == (ulps > MOST_ULPS)


def test_changed_lines_of_a_file_are_shown() -> None:
    before, after = answered(), answered()
    after["files"]["command.txt"] = after["files"]["command.txt"].replace("--num-layers", "--layers")
    [shown] = differences(before, after)
    assert "-" in shown
    assert any(line.startswith("-") and "--num-layers" in line for line in shown.splitlines())
    assert any(line.startswith("+") and "--layers" in line for line in shown.splitlines())


def test_another_reason_of_an_argument_is_a_difference() -> None:
    before, after = answered(), answered()
    after["rendered"]["arguments"][0]["reason"]["why"] = "because"
    assert list(differences(before, after)) == ["rendered.arguments[0].reason.why: '', now 'because'"]


def test_the_order_of_keys_is_kept() -> None:
    before, after = answered(), answered()
    after["plan"] = dict(reversed(after["plan"].items()))
    assert len(list(differences(before, after))) == 1
