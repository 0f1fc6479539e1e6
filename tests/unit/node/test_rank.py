"""The rank wrapper: the program's fate is its own, and is written down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.node_rig import LISTENER, NODE, NodeRig, alive, run_archive, until


def listening(rig: NodeRig, program: str = LISTENER, **options: Any) -> Any:
    """Start the program under the wrapper and wait until it listens."""
    wrapper = rig.rank(sys.executable, "-c", program, **options)
    assert wrapper.stdout.readline() == "ready\n"
    return wrapper


SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT)


@pytest.mark.parametrize(
    ("script", "returned", "recorded"),
    [(f"exit {code}", code, (code, None)) for code in (0, 1, 42, 255)]
    + [(f"kill -{int(number)} $$", -number, (None, number.name)) for number in SIGNALS],
)
def test_ends_as_the_program_did_by_exit_code_or_signal(
    cpu_node: NodeRig, script: str, returned: int, recorded: tuple[int | None, str | None]
) -> None:
    assert cpu_node.rank("sh", "-c", script).wait() == returned
    assert (cpu_node.record()["exit_code"], cpu_node.record()["signal"]) == recorded


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
    changed = {key: end[key] for key in ("ended_at", "signal", "resident_peak_bytes")}
    assert end == {**start, **changed}
    assert [path.name for path in (cpu_node.attempt_directory / "ranks").iterdir()] == [f"{NODE}.jsonl"]


def test_its_true_resident_peak_is_the_kernels(cpu_node: NodeRig) -> None:
    program = "block = b'x' * (64 << 20); del block; import resource as r; print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    wrapper = cpu_node.rank(sys.executable, "-c", program)
    kilobytes, _ = wrapper.communicate()
    assert cpu_node.record()["resident_peak_bytes"] >= int(kilobytes) * 1024 > 64 * 2**20


def test_every_signal_is_passed_on_once(cpu_node: NodeRig) -> None:
    """Also where the whole process group is told, as torchrun and a terminal do."""
    wrapper = listening(cpu_node, setup=os.setsid)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.killpg(wrapper.pid, number)
        assert wrapper.stdout.readline() == f"{number.name}\n"
    assert wrapper.stdout.read() == ""
    assert wrapper.wait() == 9


def test_asked_to_save_the_program_gets_the_signal_it_saves_at_once(cpu_node: NodeRig) -> None:
    program = LISTENER.replace("        sys.exit(9)", "        time.sleep(0.5); sys.exit(9)")
    wrapper = listening(cpu_node, program)
    for _ in range(3):  # a step that is told, and a node that passes it on
        wrapper.send_signal(signal.SIGUSR1)
    assert wrapper.stdout.read() == "SIGTERM\n"
    assert wrapper.wait() == 9


def test_a_program_may_save_at_another_signal(cpu_node: NodeRig) -> None:
    wrapper = listening(cpu_node, LLMLAUNCH_SAVE_SIGNAL="SIGUSR1")
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
    arguments = ("rank", *cpu_node.place, "--node", NODE, "--", "sh", "-c", program)
    environment = cpu_node.environment(RANK="0")
    wrapped = run_archive(cpu_node.archive, *arguments, stdin="a line\n", env=environment)
    assert (wrapped.stdout, wrapped.stderr, wrapped.returncode) == (expected, "", 0)


def test_the_program_dies_with_its_wrapper(cpu_node: NodeRig) -> None:
    wrapper = cpu_node.rank("sleep", "600")
    program = cpu_node.until_record()["program_pid"]
    wrapper.kill()
    until(lambda: not alive(program), "the end of the program")


def test_a_program_that_is_not_there_or_cannot_be_run_has_the_code_of_a_shell(
    cpu_node: NodeRig, tmp_path: Path
) -> None:
    (tmp_path / "trainer").write_text("no permission to execute")
    for program, code, why in (
        ("no-such-trainer", 127, "No such file or directory"),
        (str(tmp_path / "trainer"), 126, "Permission denied"),
    ):
        wrapper = cpu_node.rank(program)
        _, stderr = wrapper.communicate()
        assert wrapper.returncode == cpu_node.record()["exit_code"] == code
        assert stderr == f"llmlaunch: cannot start {program}: {why}\n"


def test_ranks_side_by_side_do_not_meet(cpu_node: NodeRig) -> None:
    wrappers = [cpu_node.rank("sh", "-c", f"exit {rank}", rank=rank) for rank in range(4)]
    assert [wrapper.wait() for wrapper in wrappers] == [0, 1, 2, 3]
    assert [cpu_node.record(rank)["exit_code"] for rank in range(4)] == [0, 1, 2, 3]


def test_no_program_is_a_usage_error(cpu_node: NodeRig) -> None:
    wrapper = cpu_node.rank()
    _, stderr = wrapper.communicate()
    assert wrapper.returncode == 2
    assert "no PROGRAM after --" in stderr
