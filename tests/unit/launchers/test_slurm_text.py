"""What the SLURM commands printed, recorded from 22.05.8, and what we read out of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from llmlaunch.launchers.slurm_text import (
    Row,
    complaint,
    parse_job_id,
    parse_late_jobs,
    parse_sacct,
    parse_squeue,
)


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("12\n", ("12", None)),
        ("12;alps\n", ("12", "alps")),
        ("Welcome to Alps! Your quota: 98 %\n4711\n", ("4711", None)),
        ("", None),
        ("Submitted batch job 12\n", None),  # not what --parsable prints: rather nothing than a guess
    ],
)
def test_job_id_of_sbatch(printed: str, job: tuple[str, str | None] | None) -> None:
    assert parse_job_id(printed) == job


def test_a_late_job_is_known_by_its_directory_and_its_hour() -> None:
    printed = (
        "4|2026-11-21T03:58:20|/runs/a\n"  # an earlier job of the same directory
        "9|2026-11-21T05:00:01|/runs/a\n"
        "10|2026-11-21T05:00:02|/runs/ab\n"
    )
    assert parse_late_jobs(printed, Path("/runs/a"), datetime(2026, 11, 21, 5)) == [9]


def test_squeue_rows_by_job_id() -> None:
    start, at = "2026-11-21T13:41:58", datetime(2026, 11, 21, 13, 41, 58)
    printed = (
        f"7|7|PENDING|{start}|Resources\n8|8|PENDING|N/A|Priority\n2|2|FAILED|{start}|JobLaunchFailure\n"
        f"3|3|COMPLETED|{start}|None\n"
    )
    assert parse_squeue(printed) == {
        "7": Row("PENDING", "Resources", starts=at),
        "8": Row("PENDING", "Priority"),
        "2": Row("FAILED", "JobLaunchFailure", starts=at),
        "3": Row("COMPLETED", "", starts=at),
    }


def test_squeue_of_another_cluster_names_it_first() -> None:
    assert parse_squeue("CLUSTER: alps\n7|7|RUNNING|N/A|None\n") == {"7": Row("RUNNING")}


def test_a_reason_may_contain_the_separator() -> None:
    assert parse_squeue("7|7|PENDING|N/A|Nodes|down\n")["7"].reason == "Nodes|down"


def test_an_array_goes_on_while_one_task_does() -> None:
    printed = "7_0|7|COMPLETED|N/A|None\n7_1|7|RUNNING|N/A|None\n7_2|7|PENDING|N/A|JobArrayTaskLimit\n"
    assert parse_squeue(printed)["7"].phase == "running"
    assert parse_sacct("7_1|COMPLETED|0:0\n7_2|FAILED|3:0\n7_[3-4]|CANCELLED by 0|0:0\n")["7"] == Row(
        "FAILED", exit_code=3
    )


def test_a_task_of_an_array_has_a_state_of_its_own() -> None:
    queue = parse_squeue("7_0|7|COMPLETED|N/A|None\n7_2|7|PENDING|N/A|JobArrayTaskLimit\n")
    assert (queue["7_0"].phase, queue["7_2"].reason) == ("succeeded", "JobArrayTaskLimit")
    past = parse_sacct("7_1|COMPLETED|0:0\n7_2|FAILED|3:0\n")
    assert (past["7_1"].phase, past["7_2"]) == ("succeeded", Row("FAILED", exit_code=3))


def test_sacct_state_is_its_first_word() -> None:
    assert parse_sacct("4|CANCELLED by 0|0:0\n")["4"].phase == "cancelled"
    assert parse_sacct("5|OUT_OF_ME+|0:125\n")["5"].phase == "unknown"  # cut words are not guessed at
    assert parse_sacct("6|TIMEOUT|0:0\n")["6"].phase == "failed"


def test_of_a_requeued_job_the_last_row_counts() -> None:
    assert parse_sacct("9|NODE_FAIL|0:0\n9|COMPLETED|0:0\n")["9"] == Row("COMPLETED", exit_code=0)
    assert parse_sacct("9|REQUEUED|0:0\n9|FAILED|2:0\n")["9"] == Row("FAILED", exit_code=2)


def test_a_signal_is_told_as_a_shell_tells_it() -> None:
    assert parse_sacct("2|FAILED|0:9\n1|FAILED|5:0\n") == {
        "2": Row("FAILED", exit_code=137),
        "1": Row("FAILED", exit_code=5),
    }


def test_a_state_of_a_newer_slurm_is_unknown_and_not_failed() -> None:
    assert Row("TELEPORTING").phase == "unknown"


def test_a_complaint_is_one_line_in_the_command_s_own_words() -> None:
    printed = (
        "sbatch: error: invalid partition specified: nope\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    )
    assert complaint(printed) == (
        "invalid partition specified: nope; Batch job submission failed: Invalid partition name specified"
    )
    assert complaint("slurm_load_jobs error: Invalid job id specified\n") == (
        "slurm_load_jobs error: Invalid job id specified"
    )
