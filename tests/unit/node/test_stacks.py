"""Where a trainer hangs is written when it is asked, whatever holds its interpreter, asking ends nobody, and of ranks
that hang those few that stand elsewhere are named first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from llmlaunch.node.stacks import STACKS_VARIABLE, RankStacks, where_they_stand
from llmlaunch.rundir.stack_files import ranks_stacks
from llmlaunch.trainers import HOOK
from support.node_rig import NodeRig, until

# The main thread is in a C call that keeps the interpreter's lock for ever.
HANGS_IN_C = """
import ctypes, threading, time
def waits_beside():
    time.sleep(600)
threading.Thread(target=waits_beside, daemon=True).start()
def hangs_here():
    print("ready", flush=True)
    for _ in range(3):  # a signal ends one sleep early
        ctypes.PyDLL(None).sleep(600)
hangs_here()
"""


@pytest.fixture
def node(cpu_node: NodeRig) -> NodeRig:
    """A run directory with the hook."""
    cpu_node.write("hook/sitecustomize.py", HOOK.read_text())
    return cpu_node


def stacks(node: NodeRig, rank: int = 0) -> str:
    """What a rank wrote, in its node's file."""
    return ranks_stacks(node.attempt_directory).get(rank, "")


def ask_for_stacks(node: NodeRig, *program: str, **options: Any) -> Any:
    """Start the program under the wrapper, and ask the wrapper for stacks when the program is ready."""
    wrapper = node.rank(*program, **options)
    assert wrapper.stdout.readline() == "ready\n"
    wrapper.send_signal(signal.SIGUSR2)
    return wrapper


def test_all_threads_are_written_down_while_a_c_call_holds_the_lock(node: NodeRig) -> None:
    wrapper = ask_for_stacks(node, sys.executable, "-c", HANGS_IN_C, rank=3)
    until(lambda: "hangs_here" in stacks(node, 3), "the stacks")
    until(lambda: "waits_beside" in stacks(node, 3), "the other thread's")
    assert wrapper.poll() is None


def test_below_a_shell_the_python_is_asked_and_the_shell_lives(node: NodeRig) -> None:
    wrapper = ask_for_stacks(node, "bash", "-c", '"$0" -c "$1"; exit 5', sys.executable, HANGS_IN_C.replace("600", "1"))
    until(lambda: "hangs_here" in stacks(node), "the stacks")
    assert wrapper.wait() == 5


def test_a_program_that_knows_no_such_signal_is_left_alone(node: NodeRig) -> None:
    wrapper = ask_for_stacks(node, "sh", "-c", "echo ready; read line; exit 7")
    assert wrapper.communicate("go on\n")[0] == ""
    assert wrapper.returncode == 7


def test_a_trainers_own_handlers_stay_its_own(node: NodeRig) -> None:
    """Where SLURM tells every process of a step, it hears SIGUSR2 itself."""
    own = (
        "import os, signal, sys; signal.signal(signal.SIGUSR2, lambda *_: print('heard', flush=True)); "
        "print('ready', flush=True); sys.stdin.readline(); os.kill(os.getpid(), signal.SIGUSR2)"
    )
    wrapper = ask_for_stacks(node, sys.executable, "-c", own)
    until(lambda: "readline" in stacks(node) or "<module>" in stacks(node), "the stacks")
    assert wrapper.communicate("go on\n")[0] == "heard\n"


def test_a_trainer_that_was_never_asked_leaves_no_file(node: NodeRig, tmp_path: Path) -> None:
    assert node.rank(sys.executable, "-c", "", TMPDIR=str(tmp_path)).wait() == 0
    assert not (node.attempt_directory / "stacks").exists()
    assert list(tmp_path.glob("llmlaunch-stacks.*")) == []


def test_what_the_trainer_starts_itself_has_no_such_handler(node: NodeRig, tmp_path: Path) -> None:
    """A compiler it runs must not write into the trainer's file."""
    (tmp_path / "handlers.py").write_text("print(*[line for line in open('/proc/self/status') if 'SigCgt' in line])")
    start = "import subprocess, sys; exec(open(sys.argv[1]).read()); subprocess.call([sys.executable, sys.argv[1]])"
    stdout, _ = node.rank(sys.executable, "-u", "-c", start, str(tmp_path / "handlers.py")).communicate()
    caught = [int(line.split()[1], 16) >> (signal.SIGURG - 1) & 1 for line in stdout.splitlines() if line.strip()]
    assert caught == [1, 0]


def test_where_no_file_can_be_made_the_stacks_go_to_the_log(node: NodeRig, tmp_path: Path) -> None:
    stacks = RankStacks(node.attempt_directory, "node1", 0, tmp_path / "gone")
    stacks.close()
    hook = {"PYTHONPATH": str(node.run_directory / "hook"), STACKS_VARIABLE: stacks.variable}
    command = [sys.executable, "-c", HANGS_IN_C]
    trainer = subprocess.Popen(command, env=node.environment(**hook), stdout=PIPE, stderr=PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stderr is not None
    assert trainer.stdout.readline() == "ready\n"
    trainer.send_signal(signal.SIGURG)
    assert any("hangs_here" in line for line in iter(trainer.stderr.readline, ""))
    trainer.kill()
    trainer.communicate()


def test_what_it_wrote_last_is_delivered_when_it_has_ended(node: NodeRig) -> None:
    """Two ranks of a node write into one file, also where one is killed before it was looked at."""
    stack = (
        "import faulthandler, os; faulthandler.dump_traceback(open(os.environ['COPY'], 'a')); os.kill(os.getpid(), 9)"
    )
    for rank in (0, 1):
        stacks_file = f"import glob, os; os.environ['COPY'] = glob.glob(os.environ['TMPDIR'] + '/*.{rank}.txt')[0]; "
        assert node.rank(sys.executable, "-c", stacks_file + stack, rank=rank, TMPDIR=str(node.library)).wait() == -9
    assert sorted(ranks_stacks(node.attempt_directory)) == [0, 1]
    assert [path.name for path in (node.attempt_directory / "stacks").iterdir()] == ["node1.txt"]
    assert list(node.library.glob("llmlaunch-stacks.*")) == []


def test_the_sitecustomize_of_the_site_runs_as_without_the_hook(node: NodeRig, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SITE'] = __file__\nmine = 42\n")
    program = "import os, sitecustomize; print(os.environ['SITE'], sitecustomize.mine)"
    stdout, _ = node.rank(sys.executable, "-c", program, PYTHONPATH=str(tmp_path)).communicate()
    assert stdout == f"{tmp_path / 'sitecustomize.py'} 42\n"


def test_one_that_fails_is_reported_by_python_and_the_trainer_goes_on(node: NodeRig, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('the site is broken')\n")
    wrapper = node.rank(sys.executable, "-c", "print('trains')", PYTHONPATH=str(tmp_path))
    stdout, _ = wrapper.communicate()
    assert (stdout.splitlines()[-1], wrapper.returncode) == ("trains", 0)
    assert "the site is broken" in stdout


def test_the_flight_recorders_pipe_is_written_to(node: NodeRig, tmp_path: Path) -> None:
    pipe = tmp_path / "rank_2.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    stem = str(tmp_path / "rank_")
    wrapper = ask_for_stacks(node, "sh", "-c", "echo ready; read line", rank=2, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=stem)
    assert until(lambda: _read(reader), "the request") == b"1\n"
    os.close(reader)
    wrapper.send_signal(signal.SIGUSR2)  # nobody reads: nothing happens
    wrapper.communicate("\n")
    assert wrapper.returncode == 0


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 100)
    except BlockingIOError:
        return b""


BESIDE = 'Thread 0x00007f01 (most recent call first):\n  File "/lib/threading.py", line 324 in wait\n\n'


def stacks_of(folder: Path, node: str) -> Path:
    (folder / "stacks").mkdir(exist_ok=True)
    return folder / "stacks" / f"{node}.txt"


def write(folder: Path, rank: int, function: str, line: int, *, times: int = 1) -> None:
    main = (
        "Current thread 0x00007f00 (most recent call first):\n"
        f'  File "/site/torch/distributed/{function}.py", line {line} in {function}\n'
        '  File "/train.py", line 9 in main\n'
    )
    with stacks_of(folder, f"node{rank // 8}").open("a") as file:
        file.write(f"\n=== rank {rank} ===\n" + (BESIDE + main) * times)


def test_the_fewest_come_first(tmp_path: Path) -> None:
    for rank in range(16):
        write(tmp_path, rank, "all_reduce", 2900, times=2)
    write(tmp_path, 11, "read", 7)
    write(tmp_path, 3, "save", 70)
    write(tmp_path, 5, "save", 70)
    assert where_they_stand(tmp_path, 16) == (
        "rank 11 in read (read.py line 7), ranks 3, 5 in save (save.py line 70), "
        "13 ranks in all_reduce (all_reduce.py line 2900)"
    )


def test_each_in_a_place_of_its_own_is_cut_short(tmp_path: Path) -> None:
    for rank in range(64):
        write(tmp_path, rank, "step", rank)
    assert where_they_stand(tmp_path, 64).endswith("rank 2 in step (step.py line 2), others in 61 more places")


def test_files_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    assert where_they_stand(tmp_path / "none", 3) == ""
    stacks_of(tmp_path, "node0").write_text("")
    stacks_of(tmp_path, "node1").write_bytes(b"\n=== rank 1 ===\n" + b"\xff" * 100_000)
    frameless = "Current thread 0x0 (most recent call first):\n  <no Python frame>\n"
    stacks_of(tmp_path, "node2").write_text(f"\n=== rank 2 ===\n{frameless}")
    stacks_of(tmp_path, "notes").write_text(f"of a person\n=== rank 99999999999 ===\n{frameless}")
    assert where_they_stand(tmp_path, 3) == ""


def test_who_gave_no_answer_comes_before_all(tmp_path: Path) -> None:
    """Stopped, or stuck in the kernel."""
    for rank in (0, 3):
        write(tmp_path, rank, "all_reduce", 2900)
    (tmp_path / "ranks").mkdir()
    for rank, name in ((1, "node1"), (3, "node2")):
        (tmp_path / "ranks" / f"{name}.jsonl").write_text(json.dumps({"rank": rank, "node": name}))
    assert where_they_stand(tmp_path, 4) == (
        "no answer from ranks 1 on node1, 2, ranks 0, 3 on node2 in all_reduce (all_reduce.py line 2900)"
    )
