"""What the SLURM commands printed, recorded from 22.05.8, and what we read out of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from llmlaunch.launchers.slurm.commands import complaint
from llmlaunch.launchers.slurm.text import (
    JobMatch,
    Row,
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


START, AT = "2026-11-21T13:41:58", datetime(2026, 11, 21, 13, 41, 58)


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (f"7|PENDING|0|{START}|Resources|", Row("PENDING", "Resources", starts=AT)),
        ("7|PENDING|2|N/A|Priority|", Row("PENDING", "Priority", restarts=2)),
        (f"7|FAILED|0|{START}|JobLaunchFailure|", Row("FAILED", "JobLaunchFailure", starts=AT)),
        (f"7|COMPLETED|1|{START}|None|", Row("COMPLETED", "", starts=AT, restarts=1)),
        ("CLUSTER: alps\n7|RUNNING|0|N/A|None|", Row("RUNNING")),
        ("7|PENDING|0|N/A|Nodes|down|", Row("PENDING", "Nodes|down")),  # a reason may contain the separator
    ],
)
def test_a_row_of_squeue(line: str, row: Row) -> None:
    assert parse_squeue(f"{line}\n8|RUNNING|0|N/A|None|\n") == {"7": row, "8": Row("RUNNING")}


def test_an_array_goes_on_while_one_task_does() -> None:
    printed = "7_0|COMPLETED|0|N/A|None|\n7_1|RUNNING|0|N/A|None|\n7_2|PENDING|0|N/A|JobArrayTaskLimit|\n"
    running = row_of(parse_squeue(printed), "7")
    assert running is not None
    assert running.phase == "running"
    rows = parse_sacct("7_1|COMPLETED|0:0\n7_2|FAILED|3:0\n7_[3-4]|CANCELLED by 0|0:0\n")
    assert row_of(rows, "7") == Row("FAILED", exit_code=3)
    assert row_of(rows, "8") is None


def test_tasks_that_were_cancelled_while_they_waited_do_not_speak_for_their_array() -> None:
    """SLURM 26.05 shows them by the array's own number."""
    rows = parse_squeue("7|CANCELLED|0|N/A|JobArrayTaskLimit|\n7_0|RUNNING|0|N/A|None|\n8|CANCELLED|0|N/A|None|\n")
    assert [row.phase for row in (row_of(rows, "7"), row_of(rows, "8")) if row] == ["running", "cancelled"]
    rows = parse_squeue("7|CANCELLED|0|N/A|JobArrayTaskLimit|\n7_0|COMPLETED|0|N/A|None|\n")
    assert row_of(rows, "7") == Row("CANCELLED", "JobArrayTaskLimit")
    assert row_of(rows, "7_1") is None


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


@pytest.mark.parametrize(
    ("printed", "row"),
    [
        ("9|CANCELLED by 0|0:0", Row("CANCELLED", exit_code=0, by="0")),
        ("9|OUT_OF_ME+|0:125", Row("OUT_OF_ME", exit_code=253)),  # cut words are not guessed at
        # of a requeued job the last row counts, and the others are its restarts
        ("9|NODE_FAIL|0:0\n9|COMPLETED|0:0", Row("COMPLETED", exit_code=0, restarts=1)),
        ("9|REQUEUED|0:0\n9|PREEMPTED|0:0\n9|FAILED|2:0", Row("FAILED", exit_code=2, restarts=2)),
        # a signal as a shell tells it
        ("9|FAILED|0:9", Row("FAILED", exit_code=137)),
        ("9|FAILED|5:0", Row("FAILED", exit_code=5)),
    ],
)
def test_a_row_of_sacct(printed: str, row: Row) -> None:
    assert parse_sacct(f"{printed}\n") == {"9": row}


def test_a_state_that_is_not_known_whole_is_unknown_and_not_failed() -> None:
    states = ("TELEPORTING", "OUT_OF_ME", "CANCELLED", "TIMEOUT")
    assert [Row(state).phase for state in states] == ["unknown", "unknown", "cancelled", "failed"]


def test_a_complaint_is_one_line_in_the_command_s_own_words() -> None:
    first, second = "invalid partition specified: nope", "Batch job submission failed: Invalid partition name specified"
    assert complaint(f"sbatch: error: {first}\nsbatch: error: {second}\n") == f"{first}; {second}"
    other = "slurm_load_jobs error: Invalid job id specified"
    assert complaint(f"{other}\n") == other
