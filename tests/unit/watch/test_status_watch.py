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
from watched_run import RUN, write

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.run_files import latest_attempt, run_name
from support.command_line import CommandLine
from support.node_rig import GIB, NODE, NodeRig, until
from support.terminal import PACKAGES, Terminal

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
        write(directory / "run.json", RUN)
        write(directory / "plan.json", {"memory": {"limit_bytes": 64 * GIB}})
        write(directory / "job.sbatch", JOB)
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
    monitor = rig.started_monitor("gpu uuid=GPU-a\ngpu uuid=GPU-b\n", "--attempt", run.attempt)
    rig.scenario("gpu uuid=GPU-a used=30G\ngpu uuid=GPU-b used=70G\n")
    rig.until_used(70.5, index=1)
    assert monitor.poll() is None


def piped(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmlaunch", *map(str, arguments)],
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

    def narrow_frame() -> list[str] | None:
        lines = terminal.text().splitlines()
        drawn = "117 %" in "\n".join(lines) and "s/step" in "\n".join(lines)
        return lines if drawn and max(map(len, lines)) <= 40 else None

    assert len(until(narrow_frame, "a frame for the smaller terminal")) <= 14
    terminal.resize(100, 30)
    terminal.until("tokens/s (80,000 per device)")

    going.end()
    shown = terminal.until("code-0")
    assert terminal.whole()
    assert "what-was-here" in shown
    assert f"{run_name(going.directory)} [{going.submission.job_id}] succeeded" in shown
    assert "117 %" in shown


def test_ctrl_c_ends_the_looking_alone_and_leaves_the_terminal_whole(terminal: Terminal, going: Going) -> None:
    terminal.llmlaunch("status", "--watch", "--interval", "0.3", going.directory, before="TERM=dumb")
    terminal.until("s/step")
    assert terminal.whole(), "one that cannot draw gets lines"
    terminal.press("C-c")
    terminal.until("code-0")
    terminal.type("clear; echo what-was-here")
    terminal.llmlaunch("status", "--watch", going.directory)
    until(lambda: not terminal.whole() and "s/step" in terminal.text(), "drawing")
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
    shell = terminal.command("display-message", "-p", "#{pane_pid}").strip()
    children = Path(f"/proc/{shell}/task/{shell}/children")
    os.kill(int(str(until(children.read_text, "the process that draws"))), signal.SIGTERM)
    terminal.until("ended-143")
    assert terminal.whole()


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
    rest, stderr = looking.communicate(timeout=180)
    name = f"{run_name(going.directory)} [{going.submission.job_id}]"
    assert looking.returncode == 1, stderr
    assert lines[0] == f"{name} running\n"
    assert re.fullmatch(re.escape(name) + r" step \d+/100 \| loss .* \| 70\.0 GiB of 60\.0 predicted.*\n", lines[2])
    *_, ended, empty, summary = rest.partition("Steps: ")[0].splitlines()
    assert (ended, empty) == (f"{name} failed: as it was told", "")
    assert summary.startswith("The run failed")
    assert any(line.split("#")[0].split()[:2] == ["llmlaunch", "resume"] for line in rest.splitlines())
    assert "\x1b" not in "".join(lines) + rest + stderr


def test_json_is_an_object_a_line(gpu_node: NodeRig, going: Going) -> None:
    watched(gpu_node, going)
    looking = piped("status", "--watch", "--json", "--interval", "0.2", going.directory)
    assert looking.stdout is not None
    first = json.loads(looking.stdout.readline())
    going.end()
    rest, stderr = looking.communicate(timeout=180)
    assert looking.returncode == 0, stderr
    (run,) = first["runs"]
    assert (run["phase"], run["peak_kind"], run["run_dir"]) == ("running", "device", str(going.directory))
    assert [gauge["uuid"] for gauge in run["memory"]] == ["GPU-a", "GPU-b"]
    assert run["memory"][1]["peak_bytes"] == 70 * GIB
    assert run["memory"][1]["limit_bytes"] == 64 * GIB
    assert run["progress"]["step_seconds"] == 0.1
    objects = [json.loads(line) for line in rest.splitlines()]
    assert objects[-1]["runs"][0]["phase"] == "succeeded"
    assert len({json.dumps(line["runs"]) for line in objects}) == len(objects)


def test_an_interval_is_for_watching_and_more_than_nothing(llmlaunch: CommandLine, tmp_path: Path) -> None:
    alone = llmlaunch("status", "--interval", "3", tmp_path, code=2)
    assert alone.stderr == "error: --interval: is for --watch\n"
    assert "--interval" in llmlaunch("status", "--watch", "--interval", "0", tmp_path, code=2).stderr
