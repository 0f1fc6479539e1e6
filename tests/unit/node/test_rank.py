"""The rank wrapper: the program's fate is its own, and is written down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.node_rig import NODE, NodeRig, alive, until

# Prints what it hears; ends with 9 on SIGTERM.
LISTENER = """
import signal, sys, time
def hear(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(9)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, hear)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_exits_as_the_program_did(cpu_node: NodeRig, code: int) -> None:
    assert cpu_node.rank("sh", "-c", f"exit {code}").wait() == code
    record = cpu_node.record()
    assert (record["exit_code"], record["signal"]) == (code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT])
def test_ends_by_the_signal_that_ended_the_program(cpu_node: NodeRig, number: signal.Signals) -> None:
    assert cpu_node.rank("sh", "-c", f"kill -{int(number)} $$").wait() == -number
    record = cpu_node.record()
    assert (record["exit_code"], record["signal"]) == (None, number.name)


def test_the_record_is_there_from_start_to_end(cpu_node: NodeRig) -> None:
    before = time.time()
    wrapper = cpu_node.rank("sleep", "600", rank=5, CUDA_VISIBLE_DEVICES="2,3")
    start = cpu_node.until_record(5)
    assert start["pid"] == wrapper.pid
    until(lambda: Path(f"/proc/{start['program_pid']}/comm").read_text() == "sleep\n", "the program")
    assert before <= start["started_at"] <= time.time()
    assert (start["v"], start["rank"], start["local_rank"], start["node"]) == (1, 5, 5, NODE)
    assert start["visible_devices"] == "2,3"
    assert [start[key] for key in ("ended_at", "exit_code", "signal", "resident_peak_bytes")] == [None] * 4
    os.kill(start["program_pid"], signal.SIGTERM)
    assert wrapper.wait() == -signal.SIGTERM
    end = cpu_node.record(5)
    assert end["ended_at"] >= start["started_at"]
    changed = {"ended_at", "signal", "resident_peak_bytes"}
    assert {key: value for key, value in end.items() if key not in changed} == {
        key: value for key, value in start.items() if key not in changed
    }
    assert [path.name for path in (cpu_node.attempt_directory / "ranks").iterdir()] == ["5.json"]


def test_its_true_resident_peak_is_the_kernels(cpu_node: NodeRig) -> None:
    program = "block = b'x' * (64 << 20); del block; import resource as r; print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    wrapper = cpu_node.rank(sys.executable, "-c", program)
    said, _ = wrapper.communicate()
    assert cpu_node.record()["resident_peak_bytes"] >= int(said) * 1024 > 64 * 2**20


def test_every_signal_is_passed_on_once(cpu_node: NodeRig) -> None:
    """Also where the whole process group is told, as torchrun and a terminal do."""
    wrapper = cpu_node.rank(sys.executable, "-c", LISTENER, setup=os.setsid)
    assert wrapper.stdout.readline() == "ready\n"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.killpg(wrapper.pid, number)
        assert wrapper.stdout.readline() == f"{number.name}\n"
    assert wrapper.stdout.read() == ""
    assert wrapper.wait() == 9


def test_asked_to_save_the_program_gets_the_signal_it_saves_at_once(cpu_node: NodeRig) -> None:
    program = LISTENER.replace("        sys.exit(9)", "        time.sleep(0.5); sys.exit(9)")
    wrapper = cpu_node.rank(sys.executable, "-c", program)
    assert wrapper.stdout.readline() == "ready\n"
    for _ in range(3):  # a step that is told, and a node that passes it on
        wrapper.send_signal(signal.SIGUSR1)
    assert wrapper.stdout.read() == "SIGTERM\n"
    assert wrapper.wait() == 9


def test_a_program_may_save_at_another_signal(cpu_node: NodeRig) -> None:
    wrapper = cpu_node.rank(sys.executable, "-c", LISTENER, LLMLAUNCH_SAVE_SIGNAL="SIGUSR1")
    assert wrapper.stdout.readline() == "ready\n"
    wrapper.send_signal(signal.SIGUSR1)
    assert wrapper.stdout.readline() == "SIGUSR1\n"
    wrapper.send_signal(signal.SIGTERM)
    assert wrapper.wait() == 9


def test_a_wrapper_started_deaf_to_term_still_ends_its_program(cpu_node: NodeRig) -> None:
    """torchrun is started so, and ends its workers by TERM when one of them failed."""
    wrapper = cpu_node.rank("sleep", "600", setup=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    cpu_node.until_record()
    wrapper.send_signal(signal.SIGTERM)
    assert wrapper.wait() == -signal.SIGTERM


def test_a_signal_that_came_ignored_stays_ignored(cpu_node: NodeRig) -> None:
    wrapper = cpu_node.rank(
        "sh", "-c", "kill -HUP $$; exit 3", setup=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert wrapper.wait() == 3


def test_the_program_starts_as_without_the_wrapper(cpu_node: NodeRig) -> None:
    """Signal mask and handlers, standard streams, environment, working directory, niceness. But for the two signals
    SLURM sends to every process of a step, which would end a program that does not expect them."""
    program = "grep -h '^Sig[BIC]' /proc/self/status; nice; env | grep ^RANK; pwd; cat"
    plain = subprocess.Popen(
        ["sh", "-c", "trap '' USR1 USR2; exec sh -c \"$0\"", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=cpu_node.environment(RANK="0"),
    )
    expected, _ = plain.communicate("a line\n")
    place = ["--run-dir", str(cpu_node.run_directory), "--attempt", "1.0", "--node", NODE]
    wrapped = subprocess.run(
        [cpu_node.python, cpu_node.archive, "rank", *place, "--", "sh", "-c", program],
        input="a line\n",
        capture_output=True,
        text=True,
        check=True,
        env=cpu_node.environment(RANK="0"),
    )
    assert wrapped.stdout == expected
    assert wrapped.stderr == ""


def test_the_program_dies_with_its_wrapper(cpu_node: NodeRig) -> None:
    wrapper = cpu_node.rank("sleep", "600")
    program = cpu_node.until_record()["program_pid"]
    wrapper.kill()
    until(lambda: not alive(program), "the end of the program")


def test_a_program_that_is_not_there(cpu_node: NodeRig) -> None:
    wrapper = cpu_node.rank("no-such-trainer")
    _, said = wrapper.communicate()
    assert wrapper.returncode == cpu_node.record()["exit_code"] == 127
    assert said == "llmlaunch: cannot start no-such-trainer: No such file or directory\n"


def test_a_program_that_cannot_be_run(cpu_node: NodeRig, tmp_path: Path) -> None:
    (tmp_path / "trainer").write_text("no permission to execute")
    wrapper = cpu_node.rank(str(tmp_path / "trainer"))
    assert wrapper.wait() == cpu_node.record()["exit_code"] == 126


def test_ranks_side_by_side_do_not_meet(cpu_node: NodeRig) -> None:
    wrappers = [cpu_node.rank("sh", "-c", f"exit {rank}", rank=rank) for rank in range(4)]
    assert [wrapper.wait() for wrapper in wrappers] == [0, 1, 2, 3]
    assert [cpu_node.record(rank)["exit_code"] for rank in range(4)] == [0, 1, 2, 3]


def test_no_program_is_a_usage_error(cpu_node: NodeRig) -> None:
    wrapper = cpu_node.rank()
    _, said = wrapper.communicate()
    assert wrapper.returncode == 2
    assert "no PROGRAM after --" in said
