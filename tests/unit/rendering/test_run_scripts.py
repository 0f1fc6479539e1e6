"""Rendered directories really started, with bash alone: job.sbatch and node.pyz on this machine, and a trainer of a few
lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import H100, NASTY, cluster, deepspeed_cpu, nasty_job, outside_slurm, write_program

from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.logs import deepspeed_lines
from llmlaunch.recipe.types import OnBadLoss, Recipe, Restart
from llmlaunch.rendering.launch import launch_json
from llmlaunch.rendering.run_directory import render_run
from llmlaunch.rundir.run import RunFiles, read_run

TRAINER = """\
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
print("rank %d trains" % rank, flush=True)
{body}
"""


def render(folder: Path, body: str = "", **changes: object) -> Path:
    """A run directory whose two ranks run `body`, with recipe fields changed."""
    of, plan, rendered = deepspeed_cpu()
    of = replace(of, **changes)  # type: ignore[arg-type]
    trainer = TRAINER.format(body=body).encode()
    rendered = replace(rendered, program=("trainer/train.py",), files={"trainer/train.py": trainer})
    return write(folder, of, plan, rendered)


def write(folder: Path, of: Recipe, plan, rendered: Rendered) -> Path:
    render_run(of, plan, {"recipe": of.name}, rendered, folder / "run")
    return folder / "run"


def environment(**more: str) -> dict[str, str]:
    return outside_slurm(**{"LLMLAUNCH_PYTHON": sys.executable, **more})


def start(run: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(run / "job.sbatch")]
    return subprocess.run(command, cwd="/", env=environment(**more), capture_output=True, text=True, timeout=120)


def training_log(run: Path) -> str:
    logs = [path for path in (run / "logs").glob("*.log") if not path.name.endswith((".job.log", ".monitor.log"))]
    return "".join(path.read_text() for path in logs)


def ends_soon(pid: int) -> bool:
    """Whether the process is gone, or a zombie nobody has waited for, within a minute: a KILL is not instant."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def only_attempt(run: Path) -> tuple[RunFiles, dict[int, dict[str, object]]]:
    files = read_run(run)
    (attempt,) = files.attempts
    return files, {rank["rank"]: dict(rank) for rank in attempt.ranks}


@pytest.mark.frameworks
def test_a_training_that_ends_well_succeeds_and_leaves_its_traces(tmp_path: Path) -> None:
    """Its setup lines may use unset variables and change the folder."""
    setup = ("cd /", 'echo "$NEVER_SET"', "export FROM_SETUP=yes")
    body = "assert os.environ['FROM_SETUP'] == 'yes'\nwhile not os.listdir('peaks'): time.sleep(0.05)"
    run = render(tmp_path, body, setup=setup)
    done = start(run)
    assert done.returncode == 0, done.stdout + done.stderr + training_log(run)
    files, ranks = only_attempt(run)
    assert files.status is not None
    assert files.status["state"] == "succeeded"
    assert {rank: record["exit_code"] for rank, record in ranks.items()} == {0: 0, 1: 0}
    assert len(files.attempts[0].done) == len(list((run / "peaks").glob("*.jsonl"))) == 1
    assert files.run_id is not None
    assert files.run_id.startswith("tiny-")
    assert "rank 1 trains" in training_log(run)
    assert (run / "logs" / f"{files.attempts[0].name}.job.log").is_file()
    assert files.problems == ()


PREPARE = """\
import os, sys
open("built", "a").write(os.environ["LLMLAUNCH_NODES"])
sys.exit({code})
"""


def prepared(run: Path, code: int) -> subprocess.CompletedProcess[str]:
    (run / "trainer" / "prepare.py").write_text(PREPARE.format(code=code))
    return start(run)


@pytest.mark.frameworks
def test_what_is_built_once_is_built_before_the_first_training_alone(tmp_path: Path) -> None:
    of, plan, rendered = deepspeed_cpu()
    files = {"trainer/train.py": TRAINER.format(body="").encode(), "trainer/prepare.py": b""}
    words = (NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/prepare.py"), "--world-size", "2")
    run = write(tmp_path, of, plan, replace(rendered, program=("trainer/train.py",), files=files, prepare=words))
    failed = prepared(run, code=5)
    assert failed.returncode == 1
    assert "preparing failed with exit code 5; why is in" in failed.stdout
    assert training_log(run) == ""
    assert [prepared(run, code=0).returncode, start(run).returncode] == [0, 0]
    assert (run / "built").read_text() == "11"  # in vain, and once
    assert [len(attempt.done) for attempt in read_run(run).attempts] == [0, 1, 1]
    assert len((run / "run.id").read_text().splitlines()) == 1


CHECK = """\
print("note: this checkout is another version")
print("Megatron-LM refuses its arguments: unrecognized arguments: " + repr(__import__("sys").argv[1:]))
raise SystemExit({code})
"""


@pytest.mark.frameworks
def test_arguments_that_are_refused_end_the_job_before_anything_is_built_or_trained(tmp_path: Path) -> None:
    of, plan, rendered = deepspeed_cpu()
    of = replace(of, restart=Restart())
    here = "LLMLAUNCH_RUN_DIR"
    texts = {"train": TRAINER.format(body=""), "prepare": PREPARE.format(code=0), "check": CHECK.format(code=3)}
    files = {f"trainer/{name}.py": text.encode() for name, text in texts.items()}
    rendered = replace(rendered, program=("trainer/train.py",), files=files)
    rendered = replace(rendered, check=(NodeVariable(here, "/trainer/check.py"), "a 'word'"))
    run = write(tmp_path, of, plan, replace(rendered, prepare=(NodeVariable(here, "/trainer/prepare.py"),)))
    refused = start(run)
    assert refused.returncode == 1
    assert """refuses its arguments: unrecognized arguments: ["a 'word'"]""" in refused.stdout
    cause, after = (read_run(run).status[key] for key in ("cause", "next"))
    assert (cause["kind"], after["action"]) == ("bad_arguments", "end")
    assert after["why"] == "a restart would end in bad_arguments again"
    assert not (run / "built").exists()
    assert training_log(run) == ""
    (run / "trainer" / "check.py").write_text(CHECK.format(code=0))
    taken = start(run)
    assert taken.returncode == 0, taken.stderr
    assert "job: note: this checkout is another version" in taken.stdout
    assert (run / "built").exists()


@pytest.mark.frameworks
def test_a_port_that_was_taken_meanwhile_is_answered_with_another(tmp_path: Path) -> None:
    """Between the look and the listening another job may come: the ranks then say so, and nothing has been trained."""
    body = """
if rank == 0 and not os.path.exists("port"):
    open("port", "w").write(os.environ["MASTER_PORT"])
    sys.exit("torch.distributed.DistNetworkError: code: -98, name: EADDRINUSE, message: address already in use")
assert rank or open("port").read() != os.environ["MASTER_PORT"]
"""
    run = render(tmp_path, body)
    done = start(run)
    assert done.returncode == 0, done.stdout + done.stderr + training_log(run)
    first, second = read_run(run).attempts
    assert (first.status["cause"]["kind"], first.status["next"]["action"]) == ("port_taken", "again")
    assert second.status["state"] == "succeeded"


@pytest.mark.frameworks
def test_told_to_stop_it_stops_the_ranks_and_still_judges(tmp_path: Path) -> None:
    run = render(tmp_path, "open(f'here-{rank}', 'w').close()\ntime.sleep(600)")
    with subprocess.Popen(["bash", str(run / "job.sbatch")], env=environment(), stdout=subprocess.PIPE) as job:
        while not all((run / f"here-{rank}").exists() for rank in (0, 1)):
            assert job.poll() is None, training_log(run)
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=240) == 75  # it was asked to, and had made no step
    files, ranks = only_attempt(run)
    assert files.status is not None
    assert (files.status["state"], files.status["cause"]) == ("stopped", None)
    for record in ranks.values():
        assert ends_soon(int(str(record["program_pid"])))
    assert "told to stop" in training_log(run)


@pytest.mark.frameworks
def test_hostile_arguments_and_variables_arrive_as_they_are(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    trainer = tmp_path / "a trainer.py"
    trainer.write_text(
        "import json, os, sys\n"
        f"path = os.path.join({str(seen)!r}, os.environ['RANK'])\n"
        "open(path, 'w').write(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    run = write(tmp_path, *nasty_job(trainer))
    done = start(run)
    assert done.returncode == 0, training_log(run)
    for rank in ("0", "1"):
        arguments, variables = json.loads((seen / rank).read_text())
        assert tuple(arguments) == NASTY
        assert tuple(variables[f"NASTY_{index}"] for index in range(len(NASTY))) == NASTY
    assert list(tmp_path.rglob("PWNED")) == []


def test_trainers_start_in_the_folder_that_the_recipe_names(tmp_path: Path) -> None:
    code = tmp_path / "it's code"
    code.mkdir()
    body = "if rank == 0: open('seen', 'w').write(os.getcwd())"
    of, plan, rendered = deepspeed_cpu()
    files = {"trainer/train.py": TRAINER.format(body=body).encode()}
    rendered = replace(rendered, program=(NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/train.py"),), files=files)
    run = write(tmp_path, replace(of, workdir=str(code)), plan, rendered)
    assert start(run).returncode == 0
    assert (code / "seen").read_text() == str(code)
    assert only_attempt(run)[0].status["state"] == "succeeded"


def test_a_folder_that_no_node_can_enter_fails_the_job_and_is_named(tmp_path: Path) -> None:
    run = render(tmp_path, workdir="/nowhere/code")
    assert start(run).returncode != 0
    assert (
        "cannot enter /nowhere/code, the folder in which the training starts (workdir: in the recipe)"
        in training_log(run)
    )
    assert "trains" not in training_log(run).replace("training", "")


def test_a_setup_line_that_fails_is_named_and_nothing_is_trained(tmp_path: Path) -> None:
    setup = ("cd /", "grep -q nothing /dev/null || true", "false # no module", 'echo "$NEVER_SET"')
    run = render(tmp_path, setup=setup)
    done = start(run)
    assert done.returncode != 0
    said = done.stdout + done.stderr + "".join(path.read_text() for path in (run / "logs").glob("*.job.log"))
    assert "a setup line, failed with exit code 1: false # no module" in said
    assert "trains" not in training_log(run)


@pytest.mark.parametrize(
    ("changes", "variables", "message"),
    [
        ({"secrets": ("HF_TOKEN",)}, {}, "HF_TOKEN: a secret of the recipe; export it where you submit"),
        ({"nodes": 2}, {}, "planned for 2 nodes; without SLURM it runs on one"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(tmp_path, changes, variables, message: str) -> None:
    run = render(tmp_path, **changes)
    done = start(run, **variables)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert training_log(run) == ""
    status = read_run(run).status
    assert status is not None
    assert status["state"] == "failed"


def test_a_node_that_cannot_train_says_why(tmp_path: Path) -> None:
    without_torch = f'#!/bin/sh\n[ "$1" != -c ] || exit 1\nexec {sys.executable} "$@"\n'
    python = str(write_program(tmp_path / "python", without_torch))
    run = render(tmp_path, python=python)
    assert start(run).returncode != 0
    assert f"no torch in {python}: name the training environment's interpreter" in training_log(run)
    status = read_run(run).status
    assert status is not None
    assert status["state"] == "failed"


def test_an_interpreter_that_is_not_there_is_named_by_bash(tmp_path: Path) -> None:
    done = start(render(tmp_path), LLMLAUNCH_PYTHON="/nowhere/python")
    assert done.returncode == 127
    assert "/nowhere/python: No such file or directory" in done.stderr


def test_a_variable_the_backend_needs_is_asked_for(tmp_path: Path) -> None:
    of, plan, rendered = deepspeed_cpu()
    run = write(tmp_path, of, plan, replace(rendered, required_variables=("MEGATRON_LM_PATH",)))
    assert start(run).returncode != 0
    assert "MEGATRON_LM_PATH is needed on every node" in training_log(run)


STUBBORN = """\
import os, signal, time
def main(argv):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    open("monitor.pid", "w").write(str(os.getpid()))
    time.sleep(600)
"""


def replace_monitor(run: Path, text: str) -> None:
    """Put another monitor into node.pyz."""
    path = run / "node.pyz"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name != "llmlaunch/node/monitor.pyc"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, "llmlaunch/node/monitor.py": text.encode()}.items():
            archive.writestr(name, content)


@pytest.mark.frameworks
@pytest.mark.faults
def test_a_monitor_that_does_not_stop_is_killed_and_the_training_counts(tmp_path: Path) -> None:
    run = render(tmp_path, "while not os.path.exists('monitor.pid'):\n    time.sleep(0.1)")
    replace_monitor(run, STUBBORN)
    done = start(run)
    assert done.returncode == 0, training_log(run)
    assert ends_soon(int((run / "monitor.pid").read_text()))


@pytest.mark.frameworks
@pytest.mark.faults
def test_a_monitor_that_dies_at_once_leaves_its_words_and_the_training_counts(tmp_path: Path) -> None:
    body = "while not os.path.getsize(os.environ['LLMLAUNCH_NODE_FILES'] + '/monitor.log'): time.sleep(0.05)"
    run = render(tmp_path, body)
    replace_monitor(run, "import sys\nsys.exit('no monitor today')\n")
    assert start(run).returncode == 0, training_log(run)
    (log,) = (run / "logs").glob("*.monitor.log")
    assert log.read_text() == "no monitor today\n"


# What it finds, and whether each rank's pipe can be made where it is told to.
FLIGHT_TRAINER = b"""\
import os
rank = os.environ["RANK"]
os.mkfifo(os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe")
open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "w").close()
if rank == "0":
    for name in sorted(os.environ):
        if name.startswith(("TORCH_FR", "TORCH_NCCL")):
            print(name, os.environ[name], flush=True)
"""


@pytest.mark.frameworks
def test_the_variables_of_this_torch_and_a_place_for_the_pipes(tmp_path: Path) -> None:
    of, plan, rendered = deepspeed_cpu()
    of = replace(of, cluster=cluster(H100, 2), environment={"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"})
    files = {"trainer/train.py": FLIGHT_TRAINER, "trainer/prepare.py": b""}
    rendered = replace(rendered, program=("trainer/train.py",), prepare=("trainer/prepare.py",), files=files)
    run = write(tmp_path, of, plan, rendered)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = start(run, TMPDIR=str(scratch))
    (attempt,) = (run / "attempts").iterdir()
    log = training_log(run)
    assert done.returncode == 0, done.stderr + log
    lines = (line.removeprefix("[rank0]: ") for line in log.splitlines())
    variables = dict(line.split() for line in lines if line.startswith("TORCH_"))
    pipes = variables.pop("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    variables.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING")  # as torchrun sets it
    assert variables == {
        "TORCH_FR_BUFFER_SIZE": "50",
        "TORCH_FR_DUMP_TEMP_FILE": f"{attempt}/flight/rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{attempt}/flight/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "50",
    }
    assert pipes.startswith(str(scratch))
    assert list(scratch.glob("llmlaunch*")) == []  # of the trainer, and of what was prepared before it
    assert sorted(path.name for path in (attempt / "flight").iterdir()) == ["rank_0", "rank_1"]


def test_without_gpus_or_without_a_watchdog_there_is_none() -> None:
    of, _, rendered = deepspeed_cpu()
    on_gpus = replace(of, cluster=cluster(H100, 2))
    jobs = (of, on_gpus, replace(on_gpus, watchdog=None))
    assert [launch_json(job, rendered, None)["flight_recorder"] for job in jobs] == [False, True, False]


# Saves every two steps as the shipped script does, and at SIGTERM; from a checkpoint named 2 on its loss is NaN at step
# 5, unless it leaves that out.
NAN_AT_STEP_5 = """\
import pathlib, zipfile
skipped = [int(step) for step in sys.argv[sys.argv.index("--skip-steps") + 1 :]] if "--skip-steps" in sys.argv else []
folder, nan = pathlib.Path({checkpoints!r}), False
folder.mkdir(exist_ok=True)
def save(step):
    place = folder / ("step-%d" % step)
    place.mkdir(exist_ok=True)
    with zipfile.ZipFile(place / "model_states.pt", "w") as archive:
        archive.writestr("archive/data.pkl", "nan" if nan else "good")
    (folder / "latest").write_text("step-%d" % step)
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: (save(99), sys.exit(0)))
latest = folder / "latest"
done = int(latest.read_text().partition("-")[2]) if latest.exists() else 0
for step in range(done + 1, 11):
    if step in skipped:
        continue
    nan = nan or step == 5
    if rank == 0:
        print("step %d/10 | loss %s | 0.1 s/step | 100 tokens/s" % (step, "nan" if nan else 3.0), flush=True)
        if step % 2 == 0:
            save(step)
    time.sleep(0.1 if not nan else 600 if step == 10 else 0)  # at once, before anybody has seen the first
"""


def render_nan(folder: Path, **policy: object) -> Path:
    checkpoints = str(folder / "checkpoints")
    of, plan, rendered = deepspeed_cpu()
    training = replace(of.training, checkpoint_path=checkpoints, save_interval=2, steps=10)
    of = replace(of, training=training, on_bad_loss=OnBadLoss(**policy))  # type: ignore[arg-type]
    trainer = TRAINER.format(body=NAN_AT_STEP_5.format(checkpoints=checkpoints)).encode()
    files = {"trainer/train.py": trainer}
    rendered = replace(rendered, program=("trainer/train.py",), files=files, progress=deepspeed_lines())
    return write(folder, of, plan, rendered)


@pytest.mark.frameworks
def test_a_training_that_goes_on_with_nan_is_ended_without_a_save_where_the_recipe_stops(tmp_path: Path) -> None:
    run = render_nan(tmp_path, action="stop")
    done = start(run)
    assert done.returncode != 0
    files, ranks = only_attempt(run)
    assert files.status is not None
    assert (files.status["cause"]["kind"], files.status["next"]["action"]) == ("bad_loss", "end")
    assert not (tmp_path / "checkpoints" / "step-99").exists()
    assert {record["signal"] for record in ranks.values()} == {"SIGKILL"}
    job_log = (run / "logs" / f"{files.attempts[0].name}.job.log").read_text()
    assert job_log.count("the loss is NaN since step 5") + done.stderr.count("the loss is NaN since step 5") >= 1


@pytest.mark.frameworks
def test_a_rollback_goes_on_in_the_same_job_past_the_batches_and_sets_bad_checkpoints_aside(tmp_path: Path) -> None:
    run = render_nan(tmp_path, action="rollback", skip_batches=2)
    done = start(run)
    assert done.returncode == 0, done.stdout + done.stderr + training_log(run)
    files = read_run(run)
    assert files.status is not None
    assert files.status["state"] == "succeeded"
    first, second = files.attempts
    assert first.status["next"]["action"] == "rollback"
    assert (second.from_step, second.began["skips"]) == (4, [[5, 6]])
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert "step-6.bad-loss" in kept
    assert "step-99" not in kept
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-10"
