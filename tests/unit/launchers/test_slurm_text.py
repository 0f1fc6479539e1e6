"""What the SLURM commands printed, recorded from 22.05.8, and what we read out of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from llmlaunch.launchers.slurm.text import (
    JobMatch,
    Row,
    complaint,
    parse_job_id,
    parse_late_jobs,
    parse_past_jobs,
    parse_sacct,
    parse_squeue,
    row_of,
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


EARLIEST = datetime(2026, 11, 21, 5)


def late(printed: str) -> list[JobMatch]:
    return parse_late_jobs(printed, "llmlaunch=a-1", Path("/runs/a"), EARLIEST)


def test_a_late_job_is_known_by_its_comment() -> None:
    printed = (
        "4|2026-11-21T03:58:20|/runs/a|llmlaunch=a-12\n"  # of another run
        "9|2026-11-21T05:00:01|/runs/b|project:x | llmlaunch=a-1\n"
        "10|2026-11-21T05:00:02|/runs/a|(null)\n"  # somebody's own, of the same directory
        "11|2026-11-21T05:00:02|/runs/a|llmlaunch=a-1.b\n"  # of another run that lay here
    )
    assert late(printed) == [JobMatch(9, True), JobMatch(10, False)]
    of_alps = "CLUSTER: alps\nARRAY_JOB_ID|SUBMIT_TIME|WORK_DIR|COMMENT\n9|2026-11-21T05:00:01|/runs/b|llmlaunch=a-1\n"
    assert late(of_alps) == [JobMatch(9, True, "alps")]


def test_where_the_site_drops_comments_a_late_job_is_known_by_its_directory_and_its_hour() -> None:
    printed = (
        "4|2026-11-21T03:58:20|/runs/a|(null)\n"  # an earlier job of the same directory
        "9|2026-11-21T05:00:01|/runs/a|(null)\n"
        "10|2026-11-21T05:00:02|/runs/ab|(null)\n"
        "11|N/A|/runs/a|(null)\n"
    )
    assert late(printed) == [JobMatch(9, False)]


def test_a_past_job_is_known_by_what_was_typed() -> None:
    printed = (
        "4|2026-11-21T03:58:20|/runs/a||sbatch --parsable --comment=x llmlaunch=a-1 job.sbatch\n"
        "5_2|2026-11-21T03:58:20|/runs/b|llmlaunch=a-1|sbatch\n"
        "9|2026-11-21T05:00:01|/runs/a||sbatch job.sbatch\n"
    )
    past = parse_past_jobs(printed, "llmlaunch=a-1", Path("/runs/a"), EARLIEST)
    assert past == [JobMatch(4, True), JobMatch(5, True), JobMatch(9, False)]
    of_the_completion_file = "4|2026-11-21T03:58:20|/runs/a\n9|2026-11-21T05:00:01|/runs/a\n"
    assert parse_past_jobs(of_the_completion_file, "llmlaunch=a-1", Path("/runs/a"), EARLIEST) == [JobMatch(9, False)]


def test_squeue_rows_by_job_id() -> None:
    start, at = "2026-11-21T13:41:58", datetime(2026, 11, 21, 13, 41, 58)
    printed = (
        f"7|PENDING|0|{start}|Resources|\n8|PENDING|2|N/A|Priority|\n2|FAILED|0|{start}|JobLaunchFailure|\n"
        f"3|COMPLETED|1|{start}|None|\n"
    )
    assert parse_squeue(printed) == {
        "7": Row("PENDING", "Resources", starts=at),
        "8": Row("PENDING", "Priority", restarts=2),
        "2": Row("FAILED", "JobLaunchFailure", starts=at),
        "3": Row("COMPLETED", "", starts=at, restarts=1),
    }


def test_squeue_of_another_cluster_names_it_first() -> None:
    assert parse_squeue("CLUSTER: alps\n7|RUNNING|0|N/A|None|\n") == {"7": Row("RUNNING")}


def test_a_reason_may_contain_the_separator() -> None:
    assert parse_squeue("7|PENDING|0|N/A|Nodes|down|\n")["7"].reason == "Nodes|down"


def test_an_array_goes_on_while_one_task_does() -> None:
    printed = "7_0|COMPLETED|0|N/A|None|\n7_1|RUNNING|0|N/A|None|\n7_2|PENDING|0|N/A|JobArrayTaskLimit|\n"
    running = row_of(parse_squeue(printed), "7")
    assert running is not None
    assert running.phase == "running"
    rows = parse_sacct("7_1|COMPLETED|0:0\n7_2|FAILED|3:0\n7_[3-4]|CANCELLED by 0|0:0\n")
    assert row_of(rows, "7") == Row("FAILED", exit_code=3)
    assert row_of(rows, "8") is None


def test_a_task_of_an_array_has_a_state_of_its_own() -> None:
    queue = parse_squeue("7_0|COMPLETED|0|N/A|None|\n7_2|PENDING|0|N/A|JobArrayTaskLimit|\n")
    assert (queue["7_0"].phase, queue["7_2"].reason) == ("succeeded", "JobArrayTaskLimit")
    past = parse_sacct("7_1|COMPLETED|0:0\n7_2|FAILED|3:0\n7_10|RUNNING|0:0\n")
    assert (past["7_1"].phase, past["7_2"]) == ("succeeded", Row("FAILED", exit_code=3))
    assert row_of(past, "7_1") == Row("COMPLETED", exit_code=0)  # and not 7_10


def test_tasks_that_never_began_are_listed_together() -> None:
    """Also some that have begun since: their own row counts (seen with 22.05.8)."""
    rows = parse_sacct("3_2|RUNNING|0:0\n3_[2-4,7-11:2%1]|CANCELLED by 1000|0:0\n3_[90...]|CANCELLED by 0|0:0\n")
    assert rows["3_2"].phase == "running"
    cancelled = [job for job, row in rows.items() if row.by == "1000"]
    assert sorted(cancelled) == ["3_11", "3_3", "3_4", "3_7", "3_9"]


def test_sacct_state_is_its_first_word() -> None:
    rows = parse_sacct("4|CANCELLED by 0|0:0\n5|OUT_OF_ME+|0:125\n6|TIMEOUT|0:0\n")
    phases = {job: row.phase for job, row in rows.items()}
    assert phases == {"4": "cancelled", "5": "unknown", "6": "failed"}  # cut words are not guessed at


def test_of_a_requeued_job_the_last_row_counts_and_the_others_are_its_restarts() -> None:
    assert parse_sacct("9|NODE_FAIL|0:0\n9|COMPLETED|0:0\n")["9"] == Row("COMPLETED", exit_code=0, restarts=1)
    printed = "9|REQUEUED|0:0\n9|PREEMPTED|0:0\n9|FAILED|2:0\n"
    assert parse_sacct(printed)["9"] == Row("FAILED", exit_code=2, restarts=2)


def test_a_signal_is_told_as_a_shell_tells_it() -> None:
    rows = parse_sacct("2|FAILED|0:9\n1|FAILED|5:0\n")
    assert rows == {"2": Row("FAILED", exit_code=137), "1": Row("FAILED", exit_code=5)}


def test_a_state_of_a_newer_slurm_is_unknown_and_not_failed() -> None:
    assert Row("TELEPORTING").phase == "unknown"


def test_a_complaint_is_one_line_in_the_command_s_own_words() -> None:
    first, second = "invalid partition specified: nope", "Batch job submission failed: Invalid partition name specified"
    assert complaint(f"sbatch: error: {first}\nsbatch: error: {second}\n") == f"{first}; {second}"
    other = "slurm_load_jobs error: Invalid job id specified"
    assert complaint(f"{other}\n") == other
