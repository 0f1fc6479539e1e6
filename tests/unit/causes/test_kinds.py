"""The table of causes: every row is whole, and every pattern names a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.cause import advice, cause
from llmlaunch.causes.cause_kind import NOBODY
from llmlaunch.causes.kinds import KINDS, kind_of, kinds_where
from llmlaunch.causes.log_scan import HARDWARE_XIDS
from llmlaunch.causes.patterns import SLURM_PATTERNS, SLURM_STATES, frames, patterns
from support.cause_table import PAGES

RECORDS: tuple[dict[str, Any], ...] = (
    {},
    {"numbers": {"unallocated_bytes": 40 * 2**30, "asked_bytes": 2**30, "shm_bytes": 2**26, "other_process_id": 9}},
    {"facts": {"ours": "2", "theirs": "4", "of": "TP", "doing": "saving", "operation": "ALLREDUCE", "phase": "x"}},
    {"facts": {"host": "localhost", "joined": "1", "expected": "2"}},
    {"numbers": "no object", "facts": ["neither"], "line": None},
)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_words_and_advice_for_any_record(name: str) -> None:
    assert KINDS[name].words
    assert KINDS[name].recognised_by
    for record in RECORDS:
        text = advice({"kind": name, **record})
        assert text.endswith(".")
        assert "\n" not in text
        assert len(text) < 800


def test_nothing_is_advised_where_nothing_is_known() -> None:
    assert advice({"kind": "of a later version"}) == advice(None) == ""
    assert kind_of({"kind": "of a later version"}).fault == NOBODY


def test_every_pattern_names_a_row_and_its_source() -> None:
    rows = [*patterns(), *SLURM_PATTERNS]
    named = {row.cause for row in rows} | {frame.cause for frame in frames() if frame.cause}
    assert named | {*HARDWARE_XIDS.values()} | {kind for _, kind in SLURM_STATES} <= set(KINDS)
    assert all(row.source for row in [*rows, *frames()])


def test_the_frameworks_rows_are_in_their_own_folders() -> None:
    sources = " ".join(row.source for row in patterns())
    assert all(framework in sources for framework in ("Megatron-LM core", "Megatron-Bridge", "DeepSpeed"))
    assert {frame.phase for frame in frames()} >= {"loading", "arguments"}


def test_only_damage_seen_in_the_files_touches_a_checkpoint() -> None:
    assert kinds_where(damages_checkpoint=True) == {"checkpoint"}


def test_what_is_planned_is_no_interruption() -> None:
    assert not kinds_where(planned=True) & kinds_where(interrupts=True)


def test_a_record_has_its_kinds_words() -> None:
    assert kind_of(cause("oom", "n1", "line", "log")).words == "out of GPU memory"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_its_table_as_the_code_has_it(path: Path) -> None:
    page = path.read_text("utf-8")
    assert page == PAGES[path](page), "run `make docs-tables`"
