"""`observe`: the command is its own, whatever becomes of the observer, and what it was is written down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.observed_job import masked_words
from llmlaunch.rundir.attempt import rank_records
from support.node_rig import LISTENER, PATIENCE_SECONDS, NodeRig, alive, run_archive, until

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "gpt", "SLURM_STEP_ID": "0", "PATH": "/usr/bin:/bin"}
HOLDS = "block = b'x' * (64 << 20)\n"
WAITS = "import sys\nsys.stdin.read()\n"
# A torch that only lets itself be imported.
TORCH = "def _lazy_call(call):\n    pass\n"


def observe(rig: NodeRig, *command: str, **more: Any) -> Any:
    """Start a command that is observed, in the rig's run directory."""
    place = ("--dir", str(rig.run_directory), "--interval", "0.02")
    return rig.start("observe", *place, "--", *command, **more)


def task(number: int, node: str, tasks: int = 2, nodes: int = 2) -> dict[str, str]:
    """The variables of one task of a step."""
    return {
        **JOB,
        "SLURM_PROCID": str(number),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURMD_NODENAME": node,
    }


def rank(number: int, world: int = 1) -> dict[str, str]:
    """The variables that torchrun gives a rank."""
    return {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}


def attempt(rig: NodeRig) -> Path:
    return next((rig.run_directory / "attempts").iterdir())


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def records(rig: NodeRig) -> dict[int, dict[str, Any]]:
    return {record["rank"]: record for record in rank_records(attempt(rig))}


def ended(process: Any, stdin: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(stdin, timeout=PATIENCE_SECONDS)
    return process.returncode, out, err


REPORT = "llmlaunch: observe: "


def own_lines(err: str) -> list[str]:
    """The lines of the command itself: those of the report come last."""
    lines = err.splitlines()
    own = [line for line in lines if not line.startswith(REPORT)]
    assert lines[: len(own)] == own
    return own


def report(err: str) -> list[str]:
    return [line[len(REPORT) :] for line in err.splitlines() if line.startswith(REPORT)]


def observer_of(waiting: Any) -> int:
    """The process beside: of the children of the one that waits the one that has the node's socket."""

    def listening() -> list[int]:
        children = Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children").read_text().split()
        return [int(pid) for pid in children if len(list(Path(f"/proc/{pid}/task").iterdir())) > 1]

    return int(until(listening, "an observer at work")[0])


def test_streams_and_exit_code_are_the_commands_own(cpu_node: NodeRig) -> None:
    process = observe(cpu_node, "sh", "-c", "cat; echo told >&2; exit 7")
    code, out, err = ended(process, "said\n")
    assert (code, out, own_lines(err)) == (7, "said\n", ["told"])
    status = cpu_node.status()
    assert (status["state"], status["exit_code"]) == ("failed", 7)
    assert "exited with 7" in status["why"]


def test_a_death_by_signal_is_passed_on_as_one(cpu_node: NodeRig) -> None:
    assert ended(observe(cpu_node, "sh", "-c", "kill -KILL $$"))[0] == -signal.SIGKILL
    assert cpu_node.status()["exit_code"] == 137


def test_a_command_that_is_not_there_ends_as_a_shell_has_it(cpu_node: NodeRig) -> None:
    code, _, err = ended(observe(cpu_node, "no-such-trainer"))
    assert code == 127
    assert own_lines(err) == ["llmlaunch: cannot start no-such-trainer: No such file or directory"]


@pytest.mark.parametrize("group", [False, True], ids=["it alone", "its whole group, as SLURM and a terminal do"])
def test_a_signal_arrives_once(cpu_node: NodeRig, group: bool) -> None:
    process = observe(cpu_node, sys.executable, "-c", LISTENER, setup=os.setsid)
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        (os.killpg if group else os.kill)(process.pid, number)
        assert process.stdout.readline() == f"{number.name}\n"
    assert process.stdout.read() == ""
    assert process.wait() == 9
    assert "told to stop (SIGTERM)" in cpu_node.status()["why"]


def test_the_command_outlives_a_killed_observer(cpu_node: NodeRig) -> None:
    process = observe(cpu_node, sys.executable, "-c", WAITS + "sys.exit(5)")
    os.kill(observer_of(process), signal.SIGKILL)
    assert ended(process)[0] == 5


def test_a_killed_wrapper_leaves_command_and_observer_at_work(cpu_node: NodeRig, tmp_path: Path) -> None:
    """Nobody waits for the exit code any more; the observer still says when it was over."""
    goes_on = tmp_path / "goes_on"
    goes_on.touch()
    process = observe(cpu_node, "sh", "-c", f"echo $$; while [ -e {goes_on} ]; do sleep 0.05; done")
    command = int(process.stdout.readline())
    until(lambda: list(cpu_node.run_directory.glob("attempts/*/observers/*.json")), "the observer's first word")
    process.kill()
    process.wait()
    assert alive(command)
    goes_on.unlink()
    end = next(cpu_node.run_directory.glob("attempts/*/observers/*.json"))
    until(lambda: read(end).get("ended_at"), "the observer's last word")
    assert read(end)["exit_code"] is None


def test_where_nothing_can_be_written_the_command_runs_unobserved(cpu_node: NodeRig) -> None:
    process = cpu_node.start("observe", "--dir", "/proc/observed", "--", "sh", "-c", "echo trained; exit 3")
    code, out, err = ended(process)
    assert (code, out) == (3, "trained\n")
    assert err.startswith("llmlaunch: observe: /proc/observed")
    assert len(err.splitlines()) == 1


def test_a_command_starts_though_the_disk_hangs_from_the_first(cpu_node: NodeRig, faulty_disk: Path) -> None:
    cpu_node.disk("hang")
    process = observe(cpu_node, "sh", "-c", "echo at work; cat; exit 4", **cpu_node.faulty(faulty_disk))
    assert process.stdout.readline() == "at work\n"
    cpu_node.disk("")
    code, _, err = ended(process)
    assert code == 4
    assert err.startswith("llmlaunch: observe: the observer is not ready; the command starts without it\n")
    assert cpu_node.status()["exit_code"] == 4  # how it ended is written down all the same


def test_a_disk_that_hangs_does_not_keep_the_command_from_its_own_end(cpu_node: NodeRig, faulty_disk: Path) -> None:
    cpu_node.disk("")
    script = f"print('at work', flush=True)\n{WAITS}sys.exit(4)"
    process = observe(cpu_node, sys.executable, "-c", script, **cpu_node.faulty(faulty_disk))
    assert process.stdout.readline() == "at work\n"  # the hook that its Python reads from the disk was read
    until(lambda: list(cpu_node.run_directory.glob("peaks/*.jsonl")), "the monitor")
    cpu_node.disk("hang")
    assert ended(process)[0] == 4


def test_a_rank_is_known_by_what_its_launcher_told_it(cpu_node: NodeRig) -> None:
    ranks = [("env", *[f"{name}={value}" for name, value in rank(number, 2).items()]) for number in (0, 1)]
    script = " & ".join(" ".join((*words, f"'{sys.executable}' -c \"$0\"")) for words in ranks) + "; wait"
    process = observe(cpu_node, "sh", "-c", script, HOLDS)
    assert ended(process)[0] == 0
    found = records(cpu_node)
    assert {number: record["local_rank"] for number, record in found.items()} == {0: 0, 1: 1}
    for record in found.values():
        assert record["world_size"] == 2
        assert record["resident_peak_bytes"] > 64 << 20
        assert record["ended_at"] is not None


def test_what_a_rank_starts_is_no_rank(cpu_node: NodeRig) -> None:
    helper = f"import subprocess, sys, os; print(os.getpid()); subprocess.run([sys.executable, '-c', {HOLDS!r}])"
    process = observe(cpu_node, sys.executable, "-c", helper, **rank(0))
    _, out, _ = ended(process)
    assert records(cpu_node)[0]["pid"] == int(out)
    assert records(cpu_node)[0]["exit_code"] == 0


def test_an_exception_is_an_exit_code_though_nobody_waits_for_that_rank(cpu_node: NodeRig) -> None:
    script = f"'{sys.executable}' -c 'raise ValueError(1)'; exit 0"
    ended(observe(cpu_node, "sh", "-c", script, **rank(0)))
    assert records(cpu_node)[0]["exit_code"] == 1
    assert cpu_node.status()["state"] == "succeeded"  # by the command's own word


@pytest.fixture
def torch_path(tmp_path: Path) -> str:
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import torch.cuda\n")
    (package / "cuda.py").write_text(TORCH)
    return str(package.parent)


def test_a_task_that_was_told_nothing_is_a_rank_once_it_has_torch(cpu_node: NodeRig, torch_path: str) -> None:
    imports = f"'{sys.executable}' -c 'import torch'"
    script = f"'{sys.executable}' -c 1; {imports} & wait"
    process = observe(cpu_node, "sh", "-c", script, PYTHONPATH=torch_path, **task(0, "n1", 1, 1), SLURM_LOCALID="0")
    assert ended(process)[0] == 0
    assert [record["source"] for record in records(cpu_node).values()] == ["SLURM_PROCID"]


def test_a_launcher_is_no_rank(cpu_node: NodeRig, torch_path: str, tmp_path: Path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text("import torch\n")
    process = observe(cpu_node, sys.executable, str(launcher), PYTHONPATH=torch_path)
    assert ended(process)[0] == 0
    assert not (attempt(cpu_node) / "ranks").exists()


def test_the_node_that_failed_is_named(cpu_node: NodeRig) -> None:
    other = observe(cpu_node, sys.executable, "-c", WAITS, **task(0, "n1"))
    assert ended(observe(cpu_node, sys.executable, "-c", "exit(3)", **rank(1, 2), **task(1, "n2")))[0] == 3
    assert cpu_node.status()["why"].startswith("the command on n2 exited with 3")
    other.terminate()
    ended(other)
    assert cpu_node.status()["exit_code"] == 3


def test_one_observer_for_each_rank_makes_one_monitor_a_node(cpu_node: NodeRig) -> None:
    tasks = [{**task(number, "n1", 2, 1), **rank(number, 2)} for number in (0, 1)]
    both = [observe(cpu_node, sys.executable, "-c", HOLDS + WAITS, **variables) for variables in tasks]
    until(lambda: len(cpu_node.records()) == 2, "both ranks")
    for process in both:
        assert ended(process)[0] == 0
    lines = (cpu_node.run_directory / "peaks" / "n1.jsonl").read_text().splitlines()
    pids = {json.loads(line)["pid"] for line in lines if json.loads(line)["event"] == "start"}
    assert len(pids) == 1
    assert {number: record["exit_code"] for number, record in records(cpu_node).items()} == {0: 0, 1: 0}


def test_ranks_that_the_command_starts_on_another_node_have_a_monitor_there(cpu_node: NodeRig) -> None:
    """`observe -- srun torchrun`: there is no observer on that node before its first rank."""
    script = f"SLURMD_NODENAME=n2 '{sys.executable}' -c \"$0\""
    process = observe(cpu_node, "sh", "-c", script, HOLDS + WAITS, **rank(0), **task(0, "n1", 1, 2))
    seen = until(lambda: list(cpu_node.run_directory.glob("peaks/n2.jsonl")), "a monitor on the other node")
    until(lambda: '"rank":0' in seen[0].read_text(), "the rank in its lines")
    assert ended(process)[0] == 0


def test_steps_are_read_of_the_jobs_own_log(cpu_node: NodeRig, tmp_path: Path) -> None:
    (tmp_path / "slurm.out").write_text("step 9/9 | loss 1.0 | 0.10 s/step | 10 tokens/s\nof an earlier command\n")
    line = "step 2/4 | loss 3.5 | 0.25 s/step | 1000 tokens/s"
    ended(observe(cpu_node, "sh", "-c", f"exec >>{tmp_path}/slurm.out; echo '{line}'"))
    assert not (attempt(cpu_node) / "progress.json").exists()  # its output went into a pipe
    words = ["--dir", str(tmp_path / "again"), "--", "sh", "-c", f"echo '{line}'"]
    with (tmp_path / "slurm.out").open("a") as log:
        command = [sys.executable, str(cpu_node.archive), "observe", *words]
        subprocess.run(command, env=cpu_node.environment(), stdout=log, check=True)
    progress = read(next((tmp_path / "again").glob("attempts/*/progress.json")))
    assert (progress["step"], progress["steps"], progress["step_seconds"]) == (2, 4, 0.25)
    logs = [path for path in (tmp_path / "again" / "logs").iterdir() if path.samefile(tmp_path / "slurm.out")]
    assert len(logs) == 1  # where `llmlaunch logs` looks


def test_a_requeued_job_is_an_attempt_more_and_a_second_command_a_run_more(archive: Path, tmp_path: Path) -> None:
    variables = {**os.environ, **JOB}
    variables.pop("SLURM_STEP_ID")
    for count in ("0", "0", "1"):
        run_archive(archive, "observe", "--", "true", cwd=tmp_path, env={**variables, "SLURM_RESTART_COUNT": count})
    attempts = {
        path.name: sorted(each.name for each in (path / "attempts").iterdir())
        for path in (tmp_path / "observed").iterdir()
    }
    assert attempts == {"gpt-17": ["17.0", "17.1"], "gpt-17-2": ["17.0"]}


def test_the_command_is_kept_as_data_and_without_secrets(cpu_node: NodeRig, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    command = ("true", "--deepspeed_config", str(tmp_path / "ds_config.json"), "--api-key", "f00dcafe1234", "a b")
    ended(observe(cpu_node, *command, NCCL_DEBUG="INFO", HF_TOKEN="hunter2hunter2"))
    kept = read(attempt(cpu_node) / "attempt.json")["observed"]
    assert kept["command"] == [*command[:4], "***", "a b"]
    assert kept["files"] == {str(tmp_path / "ds_config.json"): '{"zero_optimization": {"stage": 2}}'}
    assert kept["environment"]["NCCL_DEBUG"] == "INFO"
    assert "hunter2" not in (attempt(cpu_node) / "attempt.json").read_text()


def test_words_keep_their_places_without_secrets() -> None:
    words = [
        "run", "--hf-token=abcdef123456", "--wandb-api-key", "abcdef123456", "--lr", "0.1", "https://me:pass@host/x",
    ]  # fmt: skip
    assert masked_words(words, []) == [
        "run", "--hf-token=***", "--wandb-api-key", "***", "--lr", "0.1", "https://me:***@host/x"
    ]  # fmt: skip


def test_a_line_within_a_line_is_one(cpu_node: NodeRig, archive: Path) -> None:
    inner = (sys.executable, str(archive), "observe", "--dir", str(cpu_node.run_directory / "inner"), "--", "sh", "-c")
    assert ended(observe(cpu_node, *inner, "echo trained; exit 6"))[:2] == (6, "trained\n")
    assert not (cpu_node.run_directory / "inner").exists()


def test_at_the_end_it_says_what_was_measured_and_what_comes_next(cpu_node: NodeRig) -> None:
    script = HOLDS + "print('step 1/3 loss: 3.0', flush=True)"
    process = observe(cpu_node, sys.executable, "-c", script, **rank(0))
    code, _, err = ended(process)
    assert code == 0
    end, measured, following = report(err)
    assert end == "the command succeeded"
    assert re.search(r"peak of 1 rank: 0\.\d GiB of resident memory \(rank 0 on \S+\); main memory of \S+: ", measured)
    assert following == f"next: llmlaunch report {cpu_node.run_directory}"


def test_at_the_end_of_a_failure_it_says_the_cause_and_what_to_do(cpu_node: NodeRig, tmp_path: Path) -> None:
    """The log is a file, as in a job, so its steps and messages are read."""
    log = tmp_path / "slurm-17.out"
    script = "echo 'step 2/30 loss: 3.0'; sleep 1; echo 'OSError: [Errno 28] No space left on device'; exit 1"
    process = observe(cpu_node, "sh", "-c", script, setup=lambda: os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1))
    _, _, err = ended(process)
    end, advised, measured, _ = report(err)
    assert end.startswith("the command failed: ")
    assert "No space left on device" in end
    assert advised.startswith("Make room")
    assert "resume" not in advised
    assert measured.startswith("step 2 of 30; no peak of a rank was measured; main memory of ")


def test_of_several_tasks_one_reports(cpu_node: NodeRig) -> None:
    tasks = [observe(cpu_node, "sh", "-c", "exit 3", **task(number, "n1", nodes=1)) for number in (0, 1)]
    told = [ended(process)[2] for process in tasks]
    assert sorted(len(report(err)) > 0 for err in told) == [False, True]
