"""A mark says that a submit is under way, and whose; one that is left behind can be told from one at work."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers import submit_mark

HOLD = (
    "import sys, time, pathlib\n"
    "from llmlaunch.launchers import submit_mark\n"
    "submit_mark.begin(pathlib.Path(sys.argv[1]))\n"
    "print('begun', flush=True)\n"
    "time.sleep(60)\n"
)


def another_at_work(run_dir: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, run_dir], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_one_submit_at_a_time_and_a_killed_one_leaves_its_mark(tmp_path: Path) -> None:
    other = another_at_work(tmp_path)
    with pytest.raises(UserError, match=f"another llmlaunch is submitting it \\(process {other.pid} on "):
        submit_mark.begin(tmp_path)
    assert submit_mark.left_behind(tmp_path) is None
    other.send_signal(signal.SIGKILL)
    other.communicate()
    left = submit_mark.left_behind(tmp_path)
    assert left is not None
    mark, interrupted = submit_mark.begin(tmp_path)
    assert interrupted
    assert (mark.since, mark.pid) == (left.since, os.getpid())  # jobs are looked for since the first of them
    submit_mark.remove(tmp_path)
    assert submit_mark.was_submitting(tmp_path) is None
    assert not submit_mark.begin(tmp_path)[1]


def write_mark(run_dir: Path, host: str, at: float) -> None:
    mark = {"since": at, "host": host, "pid": os.getpid(), "started": 1, "touched_at": at}
    (run_dir / "submitting").write_text(json.dumps(mark))


def test_a_mark_of_another_host_is_believed_for_a_while(tmp_path: Path) -> None:
    for age_seconds, left_behind in ((5.0, False), (3600.0, True)):
        write_mark(tmp_path, f"not-{platform.node()}", time.time() - age_seconds)
        assert (submit_mark.left_behind(tmp_path) is not None) == left_behind


def test_a_process_id_that_is_used_again_is_not_taken_for_the_same_process(tmp_path: Path) -> None:
    write_mark(tmp_path, platform.node(), time.time())
    assert submit_mark.left_behind(tmp_path) is not None


def test_a_damaged_mark_is_one_left_behind(tmp_path: Path) -> None:
    (tmp_path / "submitting").write_text('{"since": 17')
    assert submit_mark.left_behind(tmp_path) is not None
