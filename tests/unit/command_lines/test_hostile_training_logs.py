"""Logs of trainers that were made to take for ever: expressions whose every repeat is bounded read or refuse them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.command_lines import training_log
from llmlaunch.command_lines.training_log import LogCollector
from llmlaunch.errors import UserError
from llmlaunch.imports.logs import read_logs

UNITS = [
    "[Rank 1] (after 1 iterations) memory (MB) ", "{'train_runtime': ", "\x1b] memory (", "MA 1 GB Max_MA 1 ",
    "global_step=1, step=", "***** train metrics *****\n", "\n",
]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_a_beginning_repeated_without_end_is_no_log(unit: str, tmp_path: Path) -> None:
    line = (unit * (16_384 // len(unit))).rstrip("\n") + "\n"
    (tmp_path / "log").write_text(line * 16)
    with pytest.raises(UserError, match="holds no log that llmlaunch knows"):
        read_logs(tmp_path / "log")


def test_messages_about_memory_are_read_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[str] = []
    scan = training_log.scan
    monkeypatch.setattr(training_log, "scan", lambda text: scanned.append(text) or scan(text))
    monkeypatch.setattr(training_log, "MOST_MESSAGES", 5)
    collector = LogCollector()
    for line in range(20):
        collector.add_death([], ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"], line)
    assert len(scanned) == 5
    assert len(collector.log().deaths) == 1


def test_thousands_of_runs_in_one_file_are_read(tmp_path: Path) -> None:
    arguments = "------------------------ arguments ------------------------\n  lr .............. 0.1\n"
    ends = "-------------------- end of arguments ---------------------\n"
    step = " iteration        1/      10 | elapsed time per iteration (ms): 100.0 |\n"
    (tmp_path / "log").write_text((arguments + ends + step) * 3000)
    assert len(read_logs(tmp_path / "log")) >= 1
