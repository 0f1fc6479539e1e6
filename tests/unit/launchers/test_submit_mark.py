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


def test_one_submit_at_a_time_and_a_killed_one_leaves_its_mark(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "begun\n"
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


@pytest.mark.parametrize(
    ("host", "age_seconds", "is_left_behind"),
    [
        ("another", 5.0, False),  # a mark of another host is believed for a while
        ("another", 3600.0, True),
        (platform.node(), 0.0, True),  # its process id is used again: that process started at another time
    ],
)
def test_a_mark_is_believed_while_its_process_may_be_at_work(
    tmp_path: Path, host: str, age_seconds: float, is_left_behind: bool
) -> None:
    at = time.time() - age_seconds
    mark = {"since": at, "host": host, "pid": os.getpid(), "started": 1, "touched_at": at}
    (tmp_path / "submitting").write_text(json.dumps(mark))
    assert (submit_mark.left_behind(tmp_path) is not None) == is_left_behind


def test_a_damaged_mark_is_one_left_behind(tmp_path: Path) -> None:
    (tmp_path / "submitting").write_text('{"since": 17')
    assert submit_mark.left_behind(tmp_path) is not None
