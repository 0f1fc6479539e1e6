"""What SLURM and pyxis say of a job, in a log that anybody may have filled: each expression is tried on lines that
repeat its beginning without its end, twice as long and eight times as long; nothing is asserted of seconds, but a
square of these lengths would not end."""

from __future__ import annotations

import pytest

from llmlaunch.causes.attempt_cause import failed_nodes, output_of_attempt, slurm_end
from llmlaunch.causes.image_import import _IMAGE
from llmlaunch.rundir.values import MOST_BRACKETS, host_names

MANY = 400_000
LINES = [
    "CANCELLED AT ", "*** JOB 1 ON n1 CANCELLED AT ", "srun: error: a: task ", "error: Node failure on ",
    "job: the log of this job is /logs/", "pyxis: failed to ", "\n",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_the_beginning_of_a_line_repeated_without_end_costs_its_length(line: str) -> None:
    text = line * (5 * 2**20 // len(line))  # what `read_log` gives of any log
    slurm_end(text)
    failed_nodes(text)
    output_of_attempt(text, "12.0")
    output_of_attempt("job: the log of this job is " + "/logs/" * (2**20 // 6), "12.0")
    _IMAGE.search(text)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-29T08:00:00 DUE TO NODE FAILURE, SEE LOG ***", "node_fail"),
        (f"slurmstepd: error: *** JOB 7 ON {'n' * 255} CANCELLED AT 2026-11-29T08:00:00 ***", "cancelled"),
        (f"srun: error: {'n' * 255}: tasks 0-7: Out Of Memory", "host_oom"),
    ],
)
def test_what_slurm_says_is_known_as_before(line: str, kind: str) -> None:
    assert slurm_end(f"first\n{line}\nlast") == (kind, line)


def test_the_part_of_an_attempt_is_found_by_the_last_folder_of_its_log() -> None:
    begun = "job: the log of this job is /a/logs/of/logs/12.{}.job.log\n"
    text = begun.format(0) + "first\n" + begun.format(1) + "second\n"
    assert output_of_attempt(text, "12.0") == "\nfirst\n"
    assert output_of_attempt(text, "12.1") == "\nsecond\n"


@pytest.mark.parametrize("part", [",", "[", "[1-2]", "a,["])
def test_a_list_of_hosts_that_is_none_stays_as_it_is(part: str) -> None:
    names = host_names(part * MANY)
    assert sum(map(len, names)) <= len(part) * MANY
    assert host_names("error: Node failure on " + part * (MOST_BRACKETS + 1))


def test_lists_of_hosts_are_expanded_as_before() -> None:
    assert host_names("n[1-2,07],m3,,r[1]c[4-5]") == ["n1", "n2", "n07", "m3", "r1c4", "r1c5"]
    assert host_names("n[1,2") == ["n[1", "2"]
