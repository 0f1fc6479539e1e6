"""Watching shows steps and what happens to a run, from the files it writes, whatever of them is there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from watched_run import RUN, append, write

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.units import GIB
from llmlaunch.watch import gauges
from llmlaunch.watch.follow import SOCKETS, EventReader
from llmlaunch.watch.model import WatchedRun

# A run that does not say which stage is whose: the prediction is the worst stage's.
TWO_NODES = {
    **{key: value for key, value in RUN.items() if key not in ("devices_per_node", "pipeline")},
    "nodes": 2,
    "predicted_bytes": [60 * GIB, 66 * GIB],
    "measurement": {**RUN["measurement"], "world_size": 4},
}


class Run:
    """A run directory written piece by piece, and one who watches it."""

    def __init__(self, directory: Path, without: tuple[str, ...] = (), **changes: Any) -> None:
        self.directory = directory
        self.write("run.json", {key: value for key, value in {**TWO_NODES, **changes}.items() if key not in without})
        self.reader = EventReader(Submission("slurm", "12", directory, 0.0))

    def write(self, name: str, content: Any) -> None:
        write(self.directory / name, content)

    def log(self, attempt: str, node: str, *lines: str) -> None:
        append(self.directory / "logs" / f"{attempt}.{node}.log", *lines)

    def begins(self, attempt: str, **more: Any) -> None:
        self.write(f"attempts/{attempt}/attempt.json", {"attempt": attempt, "nodes": ["n1", "n2"], **more})

    def read(self) -> WatchedRun:
        return self.reader.read(RunStatus(self.reader.submission, JobState("running"), None, {}, {}, stopping=False))

    @property
    def news(self) -> list[str]:
        return [event.text for event in self.read().events]


def peaks(attempt: str, gibibytes: int) -> str:
    """A monitor's line: rank 0 is process 7."""
    gpu = {"uuid": "GPU-a", "total_bytes": 80 * GIB, "process_peak_bytes": {"7": gibibytes * GIB, "8": GIB}}
    processes = [{"rank": 0, "pid": 7, "resident_bytes": 1}]
    return json.dumps({"attempt": attempt, "gpus": [gpu], "processes": processes}) + "\n"


@pytest.fixture(autouse=True)
def memory_is_always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_MEMORY_SECONDS", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_step_is_shown_with_all_that_follows_from_the_job_s_shape(run: Run) -> None:
    run.begins("12.0")
    run.write("peaks/n1.jsonl", peaks("12.0", 61) + '{"attempt": "12.0", "gpus": [{"to')
    run.log("12.0", "n1", "it 40/100 loss=3.25 took 2000 ms")
    assert run.news == [
        "Attempt 1 (12.0) begins on n1, n2",
        "step 40/100 | loss 3.2500 | 2 s/step | 8,000 tokens/s (2,000 per device) | 61.0 GiB of 66.0 predicted | "
        "2 min left",
    ]
    assert run.news == []


def test_a_loss_that_is_nan_is_shown_with_the_step_it_began(run: Run) -> None:
    run.begins("12.0")
    run.log("12.0", "n1", "it 40/100 loss=3.25 took 2000 ms", "it 41/100 loss=nan took 2000 ms")
    run.log("12.0", "n1", "it 42/100 loss=NaN took 2000 ms")
    assert "| loss NaN since step 41 |" in run.news[-1]
    run.log("12.0", "n1", "it 43/100 loss=3.5 took 2000 ms")
    assert "| loss 3.5000 |" in run.news[-1]


def test_what_is_not_known_is_left_out_and_known_trainers_lines_are_read_where_a_run_names_none(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", progress={"step_patterns": [r"it (?P<step>\d+)"], "slow_patterns": []}, measurement={})
    run.begins("12.0")
    run.log("12.0", "n1", "it 7")
    assert run.news[1:] == ["step 7"]
    run = Run(tmp_path / "b", without=("progress", "measurement", "predicted_bytes"))
    run.begins("12.0")
    run.log("12.0", "n1", "step 5/40 | loss 3.1234 | 0.52 s/step | 1969 tokens/s")
    assert run.news[1:] == ["step 5/40 | loss 3.1234 | 0.52 s/step | 1,969 tokens/s | 18 s left"]


def test_what_an_own_trainer_prints_is_shown_until_its_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path, progress={**RUN["progress"], "promised": False})
    run.begins("12.0")
    run.log("12.0", "job", "the batch script's own words")
    run.log("12.0", "n1", "reading data", "it 7/9 loss=1 took 10 ms", "more words")
    _, output, step = run.read().events
    assert (output.text, output.transient) == ("n1: reading data", False)
    assert step.is_step


def test_the_same_step_said_by_several_ranks_is_one_and_so_is_what_is_slow_in_the_trainer_s_words(run: Run) -> None:
    run.begins("12.0")
    run.log("12.0", "n1", *["it 1/100 loss=3 took 10 ms"] * 4)
    run.log("12.0", "n2", "it 1/100 loss=3 took 10 ms", "it 2/100 loss=3 took 10 ms")
    run.log("12.0", "n2", *["  saving checkpoint at 2 \x1b[31m"] * 2)
    assert [text.split(" |")[0] for text in run.news[1:]] == ["step 1/100", "step 2/100", "saving checkpoint at 2"]


def test_a_step_that_is_long_in_coming_is_noticed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.begins("12.0")
    run.log("12.0", "n1", "it 1/100 loss=3 took 50000 ms")
    assert len(run.news) == 2
    now = time.monotonic()
    for later, overdue in ((149.0, False), (180.0, True)):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert (run.read().overdue_seconds is not None) == overdue


def test_out_of_memory_and_the_fallback_in_the_same_allocation(run: Run) -> None:
    run.begins("12.0")
    run.log("12.0", "n1", "it 9/100 loss=3 took 1000 ms")
    assert len(run.news) == 2
    cause = {"kind": "oom", "node": "n2", "rank": 3, "line": "CUDA out of memory: 2 GiB", "sick": False}
    following = {"action": "fallback", "layout": "fallback/1", "seconds": 0, "why": "one of 2"}
    run.write("attempts/12.0/status.json", {"state": "failed", "step": 9, "cause": cause, "next": following})
    assert run.news == [
        "Attempt 1 failed at step 9: out of GPU memory (rank 3 on n2): CUDA out of memory: 2 GiB\n"
        "  next: layout fallback/1 in the same allocation (one of 2)"
    ]
    run.write("fallback/1/run.json", {**TWO_NODES, "predicted_bytes": [40 * GIB]})
    run.write("peaks/n1.jsonl", peaks("12.1", 39))
    run.begins("12.1", layout="fallback/1", from_step=5)
    run.log("12.1", "n1", "it 6/100 loss=3 took 1000 ms")
    began, step = run.news
    assert began == "Attempt 2 (12.1) begins on n1, n2, layout fallback/1, from step 5"
    assert "39.0 GiB of 40.0 predicted" in step


def test_a_hang_and_the_requeue_after_it(run: Run) -> None:
    run.begins("12.0")
    hung = {"since_seconds": 900, "allowed_seconds": 600, "what": "a step"}
    run.write("attempts/12.0/progress.json", {"step": 3, "hung": hung})
    assert run.news[1:] == [
        "Attempt 1 hangs: no new step for 15 min; the limit for a step is 10 min. "
        "Its stacks are being collected, then it is ended"
    ]
    following = {"action": "requeue", "seconds": 60, "why": "attempt 1 of 20"}
    run.write("attempts/12.0/status.json", {"state": "failed", "cause": {"kind": "hung"}, "next": following})
    (ended,) = run.news
    assert ended == "Attempt 1 failed: hung\n  next: back into the queue in 60 s (attempt 1 of 20)"


def test_a_slow_gpu_is_shown_once(run: Run) -> None:
    run.begins("12.0")
    slow = {"node": "n2", "device": 3, "factor": 2.0, "since": 1e9, "signs": ["power brake"]}
    run.write("attempts/12.0/progress.json", {"step": 125, "slow": [slow]})
    assert run.news[1:] == ["Attempt 1: GPU 3 of n2 is 2.0 times slower than its peers (power brake)"]
    assert run.news == []


def test_a_bad_loss_is_shown_once_and_that_it_is_over_once(run: Run) -> None:
    run.begins("12.0")
    bad = {"kind": "spike", "since_step": 120, "loss": 9.5, "usual": 3.03, "recovered_step": None}
    run.write("attempts/12.0/progress.json", {"step": 125, "bad_loss": bad})
    assert run.news[1:] == ["Attempt 1: loss spike since step 120 (9.5, was 3.03)"]
    assert run.news == []
    run.write("attempts/12.0/progress.json", {"step": 140, "bad_loss": {**bad, "recovered_step": 131}})
    assert run.news == ["Attempt 1: loss spike since step 120 (9.5, was 3.03), over at step 131"]


@pytest.mark.parametrize(("signal", "reason"), [("SIGUSR1", "its time is nearly up"), ("TERM", "being preempted")])
def test_an_order_to_stop_is_shown_once(run: Run, signal: str, reason: str) -> None:
    run.begins("12.0", stop_signal=signal)
    run.begins("12.1")
    run.write("attempts/12.1/told/n2", signal)  # as the version before wrote it
    assert [reason in order for order in run.news if "save and stop" in order] == [True, True]
    assert run.news == []


def test_the_end_of_an_attempt_is_told_before_the_next_begins(run: Run) -> None:
    run.begins("12.0", stop_signal="TERM")
    run.log("12.0", "n1", "it 1/100 loss=3 took 10 ms")
    cause = {"kind": "oom", "node": "n1", "line": "2 GiB"}
    run.write("attempts/12.0/causes/n1.json", cause)  # srun ends the step on the other node: nobody was preempted
    run.write("attempts/12.0/status.json", {"state": "failed", "cause": cause, "next": {"action": "requeue"}})
    run.begins("12.1")
    run.log("12.1", "n1", "it 2/100 loss=3 took 10 ms")
    assert [text.split(":")[0].split(" |")[0] for text in run.news] == [
        "Attempt 1 (12.0) begins on n1, n2",
        "step 1/100",
        "Attempt 1 failed",
        "Attempt 2 (12.1) begins on n1, n2",
        "step 2/100",
    ]


def test_an_attempt_is_spoken_of_when_it_says_its_layout_and_named_if_it_left_no_word(run: Run) -> None:
    (run.directory / "attempts" / "12.0").mkdir(parents=True)
    assert run.news == []
    run.begins("12.0", layout="fallback/2")
    run.begins("12.1")
    assert run.news == [
        "Attempt 1 (12.0) begins on n1, n2, layout fallback/2",
        "Attempt 1 left no status: its node was lost, or SLURM ended it at once",
        "Attempt 2 (12.1) begins on n1, n2",
    ]


@pytest.mark.parametrize("torn", ["", "{", "[]", "nul", '{"hung": 3, "next": 4, "cause": 5, "nodes": 6, "layout": 7}'])
def test_torn_files_end_nothing(run: Run, torn: str) -> None:
    run.begins("12.0")
    for name in ("attempt.json", "progress.json", "status.json", "told/n1"):
        run.write(f"attempts/12.0/{name}", torn)
    run.write("status.json", torn)
    run.write("peaks/n1.jsonl", torn)
    run.log("12.0", "n1", "it 1/100 loss=nan took 10 ms", "it x/100 loss=3 took 10 ms")
    run.read()
    run.begins("12.1")
    assert any("12.1" in text for text in run.news)


@pytest.mark.parametrize(
    ("nodes", "gigabytes_per_second", "told"), [(2, 50.0, True), (2, 1.25, False), (1, 50.0, False), (2, None, False)]
)
def test_sockets_are_told_of_once_where_the_profile_has_a_fabric(
    tmp_path: Path, nodes: int, gigabytes_per_second: float | None, told: bool
) -> None:
    run = Run(tmp_path, nodes=nodes, fabric_gigabytes_per_second=gigabytes_per_second)
    run.begins("12.0")
    run.log("12.0", "n1", *["n1:9:9 [0] NCCL INFO Using network Socket"] * 2, "it 40/100 loss=3.25 took 2000 ms")
    assert [text for text in run.news if "sockets" in text] == [SOCKETS] * told
    run.log("12.0", "n1", "it 41/100 loss=3.25 took 2000 ms")
    assert [text for text in run.news if "sockets" in text] == []
