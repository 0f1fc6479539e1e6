"""`node.pyz node`: it starts a node's ranks, hands on what it is told, and writes down how each began and ended."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.launched_node import LaunchedNode
from support.node_rig import ATTEMPT, LISTENER, NODE, PATIENCE_SECONDS, NodeRig, alive, until

SAVES = LISTENER.replace("        sys.exit(9)", "        time.sleep(0.5); sys.exit(0)")


def heard(output: str) -> list[str]:
    """What the listeners have said since they were ready, with their ranks."""
    return sorted(line for line in output.splitlines() if line.startswith("[rank"))


@pytest.mark.parametrize(
    ("script", "code", "recorded"),
    [("exit 0", 0, (0, None)), ("exit 42", 42, (42, None)), ("kill -SEGV $$", 139, (None, "SIGSEGV"))],
)
def test_the_code_or_signal_of_a_rank_is_written_down_and_is_the_nodes(
    cpu_node: NodeRig, script: str, code: int, recorded: tuple[int | None, str | None]
) -> None:
    node = LaunchedNode(cpu_node, "sh", "-c", script, devices=1)
    assert node.train().code == code
    assert (cpu_node.record()["exit_code"], cpu_node.record()["signal"]) == recorded
    assert (cpu_node.attempt_directory / "done" / NODE).exists() == (code == 0)
    assert (cpu_node.attempt_directory / "causes" / f"{NODE}.json").exists() == (code != 0)


def test_the_record_is_there_from_start_to_end(cpu_node: NodeRig) -> None:
    before = time.time()
    node = LaunchedNode(cpu_node, "sleep", "600")
    process = node.start("--nodes", "4", "--node-ranks", "1,3,0,2", SLURM_NODEID="3", CUDA_VISIBLE_DEVICES="2")
    start = cpu_node.until_record(5)
    until(lambda: Path(f"/proc/{start['pid']}/comm").read_text() == "sleep\n", "the program")
    assert before <= start["started_at"] <= time.time()
    assert (start["v"], start["rank"], start["local_rank"], start["node"]) == (1, 5, 1, NODE)
    assert (start["program_pid"], start["visible_devices"]) == (start["pid"], "2")
    assert [start[key] for key in ("ended_at", "exit_code", "signal", "resident_peak_bytes")] == [None] * 4
    os.kill(start["pid"], signal.SIGTERM)
    assert node.ended(process).code == 128 + signal.SIGTERM
    end = cpu_node.record(5)
    assert end["ended_at"] >= start["started_at"]
    changed = {key: end[key] for key in ("ended_at", "signal", "resident_peak_bytes")}
    assert end == {**start, **changed}
    assert sorted(cpu_node.records()) == [4, 5]
    assert [path.name for path in (cpu_node.attempt_directory / "ranks").iterdir()] == [f"{NODE}.jsonl"]


def test_a_rank_starts_while_the_disk_of_its_run_takes_no_write(
    cpu_node: NodeRig, faulty_disk: Path, tmp_path: Path
) -> None:
    """Its log is on that disk, too. What the rank itself prints goes there once the disk is well."""
    started = tmp_path / "started"
    program = f"touch {started}; echo trains; while [ ! -e {tmp_path / 'end'} ]; do sleep 0.05; done"
    wandb = {"name": "", "save_dir": ""}
    node = LaunchedNode(cpu_node, "env", "-u", "LD_PRELOAD", "sh", "-c", program, devices=1, wandb=wandb)
    cpu_node.write("run.id", "tiny")
    cpu_node.write("wandb-config.json", "{}")
    log = node.run / "logs" / f"{ATTEMPT}.{NODE}.log"
    cpu_node.disk("hang writes")
    with log.open("wb") as file:
        process = node.start(stderr=file, **cpu_node.faulty(faulty_disk))
    until(started.exists, "the rank")
    assert log.read_bytes() == b""
    assert not (node.run / "config-defaults.yaml").exists()
    assert cpu_node.records() == {}
    cpu_node.disk("")
    until(cpu_node.records, "the record")
    (tmp_path / "end").touch()
    assert process.wait(PATIENCE_SECONDS) == 0
    said = log.read_text().splitlines()
    assert said[0].startswith(f"llmlaunch: {NODE}: training with ")
    assert said[1:] == ["[rank0]: trains", f"llmlaunch: {NODE}: done"]
    assert (node.run / "config-defaults.yaml").read_text() == "{}"
    assert cpu_node.record()["exit_code"] == 0


@pytest.mark.parametrize(
    ("sent", "variables", "told", "gets"),
    [
        (signal.SIGUSR1, {}, "USR1", "SIGTERM"),
        (signal.SIGTERM, {}, "TERM", "SIGTERM"),
        (signal.SIGTERM, {"LLMLAUNCH_SAVE_SIGNAL": "SIGHUP"}, "TERM", "SIGHUP"),
    ],
)
def test_asked_to_save_each_rank_gets_the_signal_it_saves_at_once(
    cpu_node: NodeRig, sent: signal.Signals, variables: dict[str, str], told: str, gets: str
) -> None:
    program = SAVES.replace("SIGTERM:", "SIGHUP:") if variables else SAVES
    node = LaunchedNode(cpu_node, sys.executable, "-c", program)
    process = node.start(**variables)
    node.until_listening(process)
    for _ in range(3):  # a step that is told, and a container that hands it on again
        process.send_signal(sent)
    end = node.ended(process)
    assert heard(end.log) == [f"[rank0]: {gets}", f"[rank1]: {gets}"]
    assert end.log.count("told to stop") == 1
    assert [line for line in end.sent if "told" in line] == [f"{NODE} told {told}"]
    assert end.code == 0


@pytest.mark.parametrize(("word", "code"), [("end", 128 + signal.SIGTERM), ("kill", 128 + signal.SIGKILL)])
def test_told_by_the_job_to_end_the_ranks_do(cpu_node: NodeRig, word: str, code: int) -> None:
    node = LaunchedNode(cpu_node, "sleep", "600")
    process = node.start()
    cpu_node.until_record(1)
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    assert node.ended(process).code == code


@pytest.mark.parametrize(("variables", "output"), [({}, ["SIGTERM"]), ({"SLURM_STEP_ID": "0"}, [])])
def test_where_the_job_is_gone_ranks_save_unless_others_may_train_in_their_place(
    cpu_node: NodeRig, variables: dict[str, str], output: list[str]
) -> None:
    """Under SLURM a node that was cut off may be replaced, and would overwrite newer checkpoints."""
    node = LaunchedNode(cpu_node, sys.executable, "-c", SAVES, devices=1)
    process = node.start(**variables)
    node.until_listening(process, ranks=1)
    process.stdin.close()
    process.stdin = None  # else it would be closed again in the end
    end = node.ended(process)
    assert heard(end.log) == [f"[rank0]: {line}" for line in output]
    assert end.code == (128 + signal.SIGKILL if variables else 0)


def test_where_slurm_signals_every_process_of_a_step_term_is_not_handed_on(cpu_node: NodeRig) -> None:
    node = LaunchedNode(cpu_node, sys.executable, "-c", SAVES)
    process = node.start(LLMLAUNCH_TERM_REACHES_RANKS="1")
    node.until_listening(process)
    until(lambda: len(cpu_node.records()) == 2, "both ranks are written down")  # by a thread, which may be late
    for pid in (process.pid, *(record["pid"] for record in cpu_node.records().values())):
        os.kill(pid, signal.SIGTERM)
    end = node.ended(process)
    assert heard(end.log) == ["[rank0]: SIGTERM", "[rank1]: SIGTERM"]
    assert end.code == 0


def test_told_to_stop_before_the_ranks_are_started_none_is(cpu_node: NodeRig) -> None:
    node = LaunchedNode(cpu_node, "true")
    node.write_python(probed="kill -USR1 $PPID")
    done = node.train()
    assert done.code == 1
    assert "told to stop (USR1) before the training began" in done.log
    assert cpu_node.records() == {}


def test_the_first_rank_that_fails_ends_the_others_and_gives_its_code(cpu_node: NodeRig) -> None:
    script = """
    if [ $RANK = 1 ]; then until [ -e up.0 ] && [ -e up.2 ]; do sleep 0.05; done; exit 7; fi
    trap "echo ended; exit 0" TERM; touch up.$RANK; while :; do sleep 0.05; done
    """
    done = LaunchedNode(cpu_node, "sh", "-c", script, devices=3).train()
    assert done.code == 7
    assert {rank: record["exit_code"] for rank, record in cpu_node.records().items()} == {0: 0, 1: 7, 2: 0}
    assert heard(done.log) == ["[rank0]: ended", "[rank2]: ended"]
    assert "rank 1 exited with 7" in done.log


def test_those_that_do_not_end_are_killed_after_half_a_minute(cpu_node: NodeRig) -> None:
    script = 'trap "" TERM; [ $RANK = 0 ] || exec sleep 600; sleep 0.5; kill -9 $$'
    before = time.monotonic()
    done = LaunchedNode(cpu_node, "sh", "-c", script).train()
    assert 30 <= time.monotonic() - before < 120
    assert done.code == 128 + signal.SIGKILL
    assert "ranks are left 30 s after the first one failed; killing them" in done.log
    assert "rank 0 was ended by SIGKILL" in done.log
    assert {record["signal"] for record in cpu_node.records().values()} == {"SIGKILL"}


def test_a_rank_that_ends_well_waits_for_the_others(cpu_node: NodeRig) -> None:
    done = LaunchedNode(cpu_node, "sh", "-c", '[ $RANK = 0 ] || sleep 1; echo "$RANK is done"').train()
    assert done.code == 0
    assert heard(done.log) == ["[rank0]: 0 is done", "[rank1]: 1 is done"]


def test_ranks_die_with_the_program_that_started_them(cpu_node: NodeRig) -> None:
    process = LaunchedNode(cpu_node, "sleep", "600").start()
    pids = [cpu_node.until_record(rank)["pid"] for rank in (0, 1)]
    process.kill()
    until(lambda: not any(map(alive, pids)), "the end of the ranks")


def test_a_rank_starts_as_a_program_of_a_shell_does(cpu_node: NodeRig) -> None:
    """No signal is blocked. Those are ignored that came ignored, and the two that SLURM sends to each process of a step
    and that would end a program that does not expect them. It has a session of its own, nothing to read, and the run
    directory as its working directory."""
    program = "grep -h '^Sig[BI]' /proc/self/status; nice; pwd; wc -c; [ $(ps -o sid= -p $$) = $$ ] && echo leads"
    done = LaunchedNode(cpu_node, "bash", "-c", program, devices=1).train()
    came_ignored = subprocess.check_output(["sed", "-n", r"s/^SigIgn:\t//p", "/proc/self/status"], text=True)
    ignored = int(came_ignored, 16) | 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGUSR2 - 1
    assert [line.removeprefix("[rank0]: ") for line in done.log.splitlines() if line.startswith("[rank0]")] == [
        f"SigBlk:\t{0:016x}", f"SigIgn:\t{ignored:016x}", str(os.nice(0)), str(cpu_node.run_directory), "0", "leads",
    ]  # fmt: skip


def test_a_signal_that_came_ignored_stays_ignored(cpu_node: NodeRig) -> None:
    node = LaunchedNode(cpu_node, "sh", "-c", "kill -HUP $$; exit 3", devices=1)
    process = node.start(setup=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert node.ended(process).code == 3


@pytest.mark.parametrize(
    ("probed", "code", "why"),
    [('rm "$0"', 127, "No such file or directory"), ('chmod -x "$0"', 126, "Permission denied")],
)
def test_a_program_that_is_not_there_or_cannot_be_run_has_the_code_of_a_shell(
    cpu_node: NodeRig, probed: str, code: int, why: str
) -> None:
    node = LaunchedNode(cpu_node, "train.py", devices=1)
    node.write_python(probed=probed)
    done = node.train()
    assert done.code == cpu_node.record()["exit_code"] == code
    assert f"[rank0]: llmlaunch: cannot start {node.python}: {why}\n" in done.log


def test_a_word_that_no_program_can_be_given_is_said(cpu_node: NodeRig) -> None:
    node = LaunchedNode(cpu_node, "a\0b", devices=1)
    done = node.train()
    assert done.code == 126
    assert f"[rank0]: llmlaunch: cannot start {node.python}: embedded null byte\n" in done.log


def test_the_last_words_of_a_rank_are_in_the_log_though_a_child_of_its_lives_on(cpu_node: NodeRig) -> None:
    script = 'sleep 600 & echo $! >"$1"; i=0; while [ $i -lt 2000 ]; do echo "line $i"; i=$((i + 1)); done'
    pid = cpu_node.run_directory.parent / "pid"
    done = LaunchedNode(cpu_node, "sh", "-c", script, "sh", str(pid), devices=1).train()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert [line for line in done.log.splitlines() if line.startswith("[rank0]")] == [
        f"[rank0]: line {number}" for number in range(2000)
    ]


def test_no_command_is_said(cpu_node: NodeRig) -> None:
    node = LaunchedNode(cpu_node)
    done = node.train()
    assert done.code == 1
    assert f"{NODE}: {node.run}/command.txt: holds no command" in done.log


def test_a_node_knows_the_words_of_every_framework(cpu_node: NodeRig) -> None:
    """Its archive has no folders to list."""
    node = LaunchedNode(cpu_node, "false", devices=1)
    log = node.run / "logs" / f"{ATTEMPT}.{NODE}.log"
    log.write_text("[rank0]: step 12: the loss is nan; lower the learning rate or check the data\n")
    assert node.train().code == 1
    cause = json.loads((node.run / "attempts" / ATTEMPT / "causes" / f"{NODE}.json").read_text())
    assert (cause["kind"], cause["numbers"]) == ("bad_loss", {"since_step": 12})


def test_node_rank_0_on_another_host_than_the_meeting_point_ends_at_once(cpu_node: NodeRig) -> None:
    end = LaunchedNode(cpu_node, "true").train(SLURMD_NODENAME="node2")
    assert end.code == 1
    assert f"node2: this is node rank 0, but the others were told to meet on {NODE}" in end.log


@pytest.mark.parametrize("room", [True, False], ids=["a disk with room", "a full disk"])
def test_what_ranks_import_lies_on_the_node_where_its_disk_has_room(cpu_node: NodeRig, room: bool) -> None:
    limit = 10**9 if room else 100_000  # bytes of a file; node.pyz has more
    script = 'echo "$PYTHONPATH"; echo "$LLMLAUNCH_NODE_FILES"; ls "${PYTHONPATH%%:*}"'
    node = LaunchedNode(cpu_node, "sh", "-c", script, devices=1, hook_files=["hook/sitecustomize.py"])
    cpu_node.write("hook/sitecustomize.py", "")
    process = node.start(setup=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)), PYTHONPATH="/mine")
    end = node.ended(process)
    path, files, *names = [line.removeprefix("[rank0]: ") for line in end.log.splitlines() if "[rank0]" in line]
    assert path == f"{files}/hook:/mine"
    assert (files != str(node.run), "takes no copy of what the ranks import" in end.log) == (room, not room)
    assert "sitecustomize.py" in names
    assert Path(files).exists() != room  # what a node kept for itself is gone


def test_a_node_is_tried_where_node_rank_0_never_says_where_it_listens(cpu_node: NodeRig) -> None:
    node = LaunchedNode(cpu_node, "true", devices=1)
    (node.run / "attempts" / ATTEMPT / "preflight").mkdir()
    place = ("--run-dir", str(node.run), "--attempt", ATTEMPT, "--nodes", "2", "--node-ranks", "1,0", "preflight")
    process = cpu_node.start("node", *place, **node.environment(LLMLAUNCH_PREFLIGHT_SECONDS="2", SLURM_NODEID="0"))
    process.wait(PATIENCE_SECONDS)
    assert (node.run / "attempts" / ATTEMPT / "preflight" / f"{NODE}.jsonl").exists()
