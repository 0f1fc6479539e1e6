"""`status --watch` in a real terminal, in a pipe and as JSON, over a run of this machine and a real monitor."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import PACKAGES, Terminal

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.run_files import latest_attempt, run_name
from support.node_rig import GIB, NODE, NodeRig, until

STEP = r"it (?P<step>\d+)/(?P<steps>\d+) loss=(?P<loss>\S+) took (?P<milliseconds>\d+) ms"
RUN = {
    "schema": 1,
    "name": "sample",
    "nodes": 1,
    "devices_per_node": 2,
    "pipeline": 1,
    "peak_kind": "device",
    "predicted_bytes": [60 * GIB],
    "measurement": {"global_batch_size": 16, "sequence_length": 1000, "world_size": 2},
    "progress": {"step_patterns": [STEP], "slow_patterns": [], "steps": 100},
}
# A step each tenth of a second, until a file says how it is to end.
JOB = f"""#!/bin/bash
attempt=local-$(date +%s)-$$.0
mkdir -p "attempts/$attempt"
printf '{{"attempt": "%s", "nodes": ["{NODE}"], "layout": ""}}' "$attempt" > "attempts/$attempt/attempt.json"
step=0
while [ ! -e end ]; do
  step=$((step + 1))
  echo "it $step/100 loss=$((9 - step % 5)).5 took 100 ms" >> "logs/$attempt.{NODE}.log"
  sleep 0.1
done
state=succeeded; [ "$(cat end)" = 0 ] || state=failed
printf '{{"schema": 1, "attempt": "%s", "state": "%s", "exit_code": %d, "nodes": [], "ranks": [], "ended_at": 1,
  "why": "as it was told"}}' "$attempt" "$state" "$(cat end)" > .status && mv .status status.json
exit "$(cat end)"
"""


class Going:
    """A run of this machine that goes on until it is told how to end."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "run.json").write_text(json.dumps(RUN))
        (directory / "plan.json").write_text(json.dumps({"memory": {"limit_bytes": 64 * GIB}}))
        (directory / "job.sbatch").write_text(JOB)
        self.directory = directory
        self.submission: Submission = LocalLauncher().submit(directory)
        self.attempt = str(until(lambda: latest_attempt(self.submission), "an attempt"))

    def end(self, code: int = 0) -> None:
        (self.directory / ".end").write_text(str(code))
        (self.directory / ".end").rename(self.directory / "end")


@pytest.fixture
def going(gpu_node: NodeRig) -> Iterator[Going]:
    """No job outlives its test."""
    run = Going(gpu_node.run_directory)
    yield run
    run.end()


def watched(rig: NodeRig, run: Going) -> None:
    """Two GPUs, of which the second comes to 70 GiB."""
    rig.scenario("gpu uuid=GPU-a\ngpu uuid=GPU-b\n")
    monitor = rig.monitor("--attempt", run.attempt)
    rig.until_event("start")
    rig.scenario("gpu uuid=GPU-a used=30G\ngpu uuid=GPU-b used=70G\n")
    rig.until_used(70.5, index=1)
    assert monitor.poll() is None


def piped(*words: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmlaunch", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(PACKAGES), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_terminal_shows_memory_against_the_prediction_and_steps_until_the_run_has_ended(
    terminal: Terminal, gpu_node: NodeRig, going: Going
) -> None:
    watched(gpu_node, going)
    terminal.type("echo what-was-here")
    terminal.llmlaunch("status", "--watch", "--interval", "0.3", going.directory)
    shown = terminal.until("117 %")
    assert "what-was-here" not in shown
    assert re.search(rf"{NODE} +1 .* 70\.0 +70\.0 +117 % +█+", shown)
    assert re.search(r"step \d+/100 \| loss \d\.5000 \| 0\.1 s/step \| 160,000 tokens/s", shown)
    assert re.search(r"GPU memory, GiB: as of \d+ s ago \| 1 above prediction", shown)
    assert re.search(r"loss \d\.5 [▁▂▃▄▅▆▇█]+ \d\.5", shown)

    terminal.resize(40, 14)
    narrow = until(
        lambda: (
            (now := terminal.text())
            and "117 %" in now
            and "s/step" in now
            and max(map(len, now.splitlines())) <= 40
            and now
        ),
        "a frame for the smaller terminal",
    )
    assert len(str(narrow).splitlines()) <= 14
    terminal.resize(100, 30)
    terminal.until("tokens/s (80,000 per device)")

    going.end()
    shown = terminal.until("code-0")
    assert terminal.whole()
    assert "what-was-here" in shown
    assert f"{run_name(going.directory)} [{going.submission.job_id}] succeeded" in shown
    assert "117 %" in shown


def test_ctrl_c_ends_the_looking_alone_and_leaves_the_terminal_whole(terminal: Terminal, going: Going) -> None:
    terminal.type("echo what-was-here")
    terminal.llmlaunch("status", "--watch", going.directory)
    terminal.until("s/step")
    assert not terminal.whole()
    terminal.press("C-c")
    shown = terminal.until("code-0")
    assert terminal.whole()
    assert "what-was-here" in shown
    assert "Traceback" not in shown
    assert "running" in shown
    assert not (going.directory / "status.json").exists()


def test_ctrl_z_and_sigterm_give_the_terminal_back_too(terminal: Terminal, going: Going) -> None:
    terminal.llmlaunch("status", "--watch", "--interval", "0.3", going.directory)
    terminal.until("s/step")
    terminal.press("C-z")
    until(terminal.whole, "the terminal given back")
    terminal.until("Stopped")
    terminal.type("fg; echo ended-$?")
    until(lambda: not terminal.whole() and "s/step" in terminal.text(), "drawing again")
    child = until(lambda: _child_of(terminal), "the process that draws")
    os.kill(int(child), signal.SIGTERM)
    terminal.until("ended-143")
    assert terminal.whole()


def _child_of(terminal: Terminal) -> str:
    shell = terminal.command("display-message", "-p", "#{pane_pid}").strip()
    return Path(f"/proc/{shell}/task/{shell}/children").read_text().strip()


def test_no_color_is_obeyed(terminal: Terminal, gpu_node: NodeRig, going: Going) -> None:
    watched(gpu_node, going)
    terminal.llmlaunch("status", "--watch", going.directory, before="NO_COLOR=1")
    terminal.until("117 %")
    assert not re.search(r"\x1b\[[\d;]*(3[1-7]|4[1-7]|9[1-7])m", terminal.text("-e"))
    terminal.press("C-c")
    terminal.until("code-0")
    terminal.llmlaunch("status", "--watch", going.directory)
    until(lambda: re.search(r"\x1b\[[\d;]*3[1-7]m", terminal.text("-e")), "colours without NO_COLOR")


def test_several_runs_have_a_line_each(terminal: Terminal, gpu_node: NodeRig, going: Going, tmp_path: Path) -> None:
    other = Going(tmp_path / "other")
    other.end(3)
    terminal.llmlaunch("status", "--watch", "--interval", "0.3", going.directory, other.directory)
    shown = until(lambda: (t := terminal.text()) and " failed" in t and " running" in t and t, "both runs")
    assert re.search(rf"^{run_name(going.directory)} +local-\S+ +running +\d+/100", str(shown), re.MULTILINE)
    assert re.search(rf"^{run_name(other.directory)} +local-\S+ +failed .*as it", str(shown), re.MULTILINE)
    going.end()
    terminal.until("code-1")


def test_a_pipe_gets_plain_lines_and_the_exit_code_of_a_failed_run(gpu_node: NodeRig, going: Going) -> None:
    watched(gpu_node, going)
    looking = piped("status", "--watch", "--interval", "0.2", going.directory, FORCE_COLOR="1", TERM="xterm")
    assert looking.stdout is not None
    lines = [looking.stdout.readline() for _ in range(4)]
    going.end(3)
    rest, said = looking.communicate(timeout=180)
    name = f"{run_name(going.directory)} [{going.submission.job_id}]"
    assert looking.returncode == 1, said
    assert lines[0] == f"{name} running\n"
    assert re.fullmatch(re.escape(name) + r" step \d+/100 \| loss .* \| 70\.0 GiB of 60\.0 predicted.*\n", lines[2])
    assert rest.splitlines()[-1] == f"{name} failed: as it was told"
    assert "\x1b" not in "".join(lines) + rest + said


def test_json_is_an_object_a_line(gpu_node: NodeRig, going: Going) -> None:
    watched(gpu_node, going)
    looking = piped("status", "--watch", "--json", "--interval", "0.2", going.directory)
    assert looking.stdout is not None
    first = json.loads(looking.stdout.readline())
    going.end()
    rest, said = looking.communicate(timeout=180)
    assert looking.returncode == 0, said
    (run,) = first["runs"]
    assert (run["phase"], run["peak_kind"], run["run_dir"]) == ("running", "device", str(going.directory))
    assert [gauge["uuid"] for gauge in run["memory"]] == ["GPU-a", "GPU-b"]
    assert run["memory"][1]["peak_bytes"] == 70 * GIB
    assert run["memory"][1]["limit_bytes"] == 64 * GIB
    assert run["progress"]["step_seconds"] == 0.1
    objects = [json.loads(line) for line in rest.splitlines()]
    assert objects[-1]["runs"][0]["phase"] == "succeeded"
    assert len({json.dumps(one["runs"]) for one in objects}) == len(objects)


def test_a_terminal_that_cannot_draw_gets_lines(terminal: Terminal, going: Going) -> None:
    terminal.llmlaunch("status", "--watch", "--interval", "0.3", going.directory, before="TERM=dumb")
    terminal.until("s/step")
    assert terminal.whole()
    terminal.press("C-c")
    terminal.until("code-0")


def test_interval_alone_is_a_mistake(going: Going) -> None:
    looking = piped("status", "--interval", "3", going.directory)
    _, said = looking.communicate(timeout=180)
    assert looking.returncode == 2
    assert said == "error: --interval: is for --watch\n"


def test_an_interval_must_be_more_than_nothing(going: Going) -> None:
    looking = piped("status", "--watch", "--interval", "0", going.directory)
    looking.communicate(timeout=180)
    assert looking.returncode == 2
