"""`node.pyz job`: what ends it before it trains, and what follows an attempt. The nodes and SLURM's commands are
scripts that note how they are called."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from llmlaunch.node.begin import failed_setup_lines
from support.node_rig import PATIENCE_SECONDS, NodeRig, run_archive, until

HOST = os.uname().nodename.partition(".")[0]
# Each step does what the next line of `plan` says.
STEP = """\
#!/bin/bash
[[ $* != *" true" ]] || exit 0
cd {run}
echo "$*" >>calls
number=$(wc -l <calls)
env -0 >"env.$number"
ended() {{ for name; do echo "$name ended 0"; done; }}
failed() {{ echo "$1 failed $2"; echo "$1 ended $2"; exit "$2"; }}
heard() {{ while read -r line; do [[ $line != "$1" ]] || return 0; done; exit 1; }}
eval "$(sed -n "${{number}}p" plan)"
"""
SLURM = """\
#!/bin/bash
echo "${{0##*/}} $*" >>{run}/asked
case "${{0##*/}} $*" in
*%N) echo "n[1-2]" ;;
"scontrol show job"*) echo "JobId=7 ExcNodeList=(null) " ;;
sinfo*) printf 'n1 idle\\nn2 idle\\nn3 idle\\nn4 idle\\n' ;;
esac
"""
RESTART = {"by": "requeue", "times": 3, "fruitless": 2, "backoff_seconds": 0}
FALLBACK = {"layout": "fallback/1", "keeps_checkpoints": False}


class JobRig:
    """A run directory, and a job in it."""

    def __init__(self, rig: NodeRig) -> None:
        self.rig, self.run = rig, rig.run_directory
        self.tools = rig.run_directory.parent / "bin"
        self.tools.mkdir()
        self.run.mkdir(exist_ok=True)
        for name, text in {"step": STEP, "srun": STEP, **dict.fromkeys(("scontrol", "squeue", "sinfo"), SLURM)}.items():
            (self.tools / name).write_text(text.format(run=self.run))
            (self.tools / name).chmod(0o755)
        self.spec = {
            **dict.fromkeys(("preflight", "prepares", "is_placed", "is_probed", "waits_for_devices"), False),
            **{"allocated": 1, "python": str(self.tools / "step"), "secrets": [], "late_end_seconds": 600},
            **{"srun": [], "step_gres": "", "container": None},
        }

    def start(self, *plan: str, run: dict[str, Any] | None = None, **environment: str) -> Any:
        """Start it; each step does what its line of the plan says."""
        described = {"schema": 1, "name": "r", "nodes": 1, "devices_per_node": 1, "job": self.spec, **(run or {})}
        self.rig.write("run.json", described)
        self.rig.write("fallback/1/run.json", described)
        (self.run / "plan").write_text("".join(f"{line}\n" for line in plan))
        variables = {"PATH": f"{self.tools}:/usr/bin:/bin", "LLMLAUNCH_RUN_DIR": str(self.run), **environment}
        return self.rig.start("job", **variables)

    def end(self, *plan: str, **more: Any) -> tuple[int, dict[str, Any], str]:
        """Run it to its end; return its exit code, status.json and what it said."""
        process = self.start(*plan, **more)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        status = self.run / "status.json"
        return process.returncode, json.loads(status.read_text()) if status.exists() else {}, out + err

    def in_slurm(self, nodes: int = 2, **more: str) -> dict[str, str]:
        self.spec |= {"allocated": nodes, "python": "python3"}
        return {
            "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]" if nodes == 2 else "n1",
            "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_PARTITION": "train", "SLURM_NTASKS_PER_NODE": "8", **more,
        }  # fmt: skip

    def lines(self, name: str) -> list[str]:
        path = self.run / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def attempts(self) -> list[str]:
        return sorted(path.name for path in (self.run / "attempts").iterdir())


@pytest.fixture
def job(cpu_node: NodeRig, monkeypatch: pytest.MonkeyPatch) -> JobRig:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return JobRig(cpu_node)


def test_a_training_that_ends_well_ends_its_job(job: JobRig) -> None:
    code, status, said = job.end(f"ended {HOST}")
    assert (code, status["state"]) == (0, "succeeded"), said
    assert len(job.attempts) == 1
    assert status["attempt"].startswith("local-")
    assert (job.run / "run.id").read_text().startswith("r-")


def test_the_code_of_the_first_rank_that_failed_is_the_jobs(job: JobRig) -> None:
    code, status, _ = job.end(f"failed {HOST} 7")
    assert (code, status["state"], status["exit_code"]) == (7, "failed", 7)


def test_a_setup_line_that_failed_ends_the_job_with_its_words_and_code(job: JobRig) -> None:
    job.rig.write("job.sbatch", "#!/bin/bash\nmodule load cuda/12.6\n")
    code, status, _ = job.end(LLMLAUNCH_SETUP=" 1:9:2 2:1:1")
    assert (code, status["state"], job.lines("calls")) == (1, "failed", [])
    assert "line 2 of job.sbatch, a setup line, failed with exit code 1: module load cuda/12.6" in status["why"]


def test_a_command_within_a_sourced_file_is_not_the_line(job: JobRig) -> None:
    assert failed_setup_lines(" 3:1:2 7:127:1 9:2:1") == [(7, 127), (9, 2)]
    assert failed_setup_lines("") == []


@pytest.mark.parametrize(
    ("spec", "environment", "why"),
    [
        ({"secrets": ["HF_TOKEN_OF_MINE"]}, {}, "HF_TOKEN_OF_MINE: a secret of the recipe; export it"),
        ({"allocated": 3}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}, "planned for 3 node(s), but"),
    ],
)
def test_what_would_only_fail_on_the_nodes_is_said_first(
    job: JobRig, spec: dict[str, Any], environment: dict[str, str], why: str
) -> None:
    job.spec |= spec
    code, status, _ = job.end(**environment)
    assert (code, job.lines("calls")) == (1, [])
    assert why in status["why"]


def test_several_nodes_need_slurm(job: JobRig) -> None:
    code, status, _ = job.end(run={"nodes": 2})
    assert code == 1
    assert "planned for 2 nodes; without SLURM it runs on one" in status["why"]


def test_a_job_that_was_told_during_its_setup_starts_no_step_and_comes_back_later(job: JobRig) -> None:
    code, status, _ = job.end(LLMLAUNCH_TOLD="USR1")
    assert (code, status["state"], job.lines("calls")) == (75, "stopped", [])


def test_a_damaged_run_json_leaves_a_status(job: JobRig) -> None:
    del job.spec["late_end_seconds"]
    code, status, said = job.end("ended")
    assert (code, status["state"]) == (1, "failed")
    assert "a mistake of llmlaunch itself, or of the disk: KeyError: 'late_end_seconds'" in status["why"]
    assert "Traceback" in said


def test_a_program_that_is_not_there_is_named_and_judged(job: JobRig) -> None:
    job.spec["python"] = "/no/such/python"
    code, status, said = job.end()
    assert (code, status["state"]) == (127, "failed")
    assert "the step cannot be started: /no/such/python: No such file or directory" in said


def test_where_nothing_can_be_written_one_sentence_says_so(job: JobRig) -> None:
    (job.run / "attempts").touch()
    code, _, said = job.end()
    assert code == 1
    assert f"nothing can be written to {job.run}" in said
    assert "Traceback" not in said


def test_a_told_job_asks_its_trainers_to_save(job: JobRig) -> None:
    process = job.start(f"touch started; heard save; ended {HOST}")
    until((job.run / "started").exists, "the step")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=PATIENCE_SECONDS)
    status = json.loads((job.run / "status.json").read_text())
    assert (process.returncode, status["state"]) == (75, "stopped")
    begun = json.loads((job.run / "attempts" / status["attempt"] / "attempt.json").read_text())
    assert begun["stop_signal"] == "USR1"


def test_another_layout_is_tried_in_the_same_job_and_the_attempts_count_on(job: JobRig) -> None:
    (job.run / "attempts" / "7.0").mkdir(parents=True)
    oom = 'mkdir -p attempts/7.1/causes; echo \'{"kind": "oom", "node": "n1", "source": "log", "line": "x"}\' '
    oom += ">attempts/7.1/causes/n1.json; failed n1 1"
    code, status, said = job.end(oom, "ended n1", run={"fallbacks": [FALLBACK]}, **job.in_slurm(1))
    assert (code, status["state"], status["layout"]) == (0, "succeeded", "fallback/1"), said
    assert job.attempts == ["7.0", "7.1", "7.2"]
    assert "--layout fallback/1" in job.lines("calls")[1]


def test_a_step_gets_nothing_that_slurm_exported_of_the_job(job: JobRig) -> None:
    code, _, said = job.end("ended n1 n2", run={"nodes": 2}, **job.in_slurm(LLMLAUNCH_TOLD=""))
    assert code == 0, said
    variables = (job.run / "env.1").read_text().split("\0")
    names = {variable.partition("=")[0] for variable in variables}
    assert "SLURM_JOB_ID" in names
    assert not names & {"SLURM_NTASKS_PER_NODE", "LLMLAUNCH_TOLD", "LLMLAUNCH_SETUP"}
    (call,) = job.lines("calls")
    assert call.startswith("--nodes=2 --ntasks=2 ")
    assert "--address n1" in call


def test_what_the_job_says_is_in_the_log_of_its_attempt(job: JobRig) -> None:
    _, _, said = job.end("ended n1", **job.in_slurm(1))
    log = job.run / "logs" / "7.0.job.log"
    assert said == f"job: the log of this job is {log}\n"
    assert "attempt 7.0 succeeded" in log.read_text()


def test_a_job_that_goes_back_to_the_queue_leaves_a_node_at_fault_out(job: JobRig) -> None:
    sick = '{"kind": "ecc", "node": "n2", "source": "log", "line": "Xid 48", "sick": true}'
    plan = f"mkdir -p attempts/7.0/causes; echo '{sick}' >attempts/7.0/causes/n2.json; "
    plan += "echo 'n1 steps [[[5, 40, 3.0, null, null]], false]'; failed n2 1"
    restart = {**RESTART, "backoff_seconds": 60}
    code, status, _ = job.end(plan, run={"nodes": 2, "restart": restart}, **job.in_slurm())
    assert (code, status["next"]["action"]) == (1, "requeue"), status["why"]
    commands = [line for line in job.lines("asked") if line.startswith(("scontrol requeue", "scontrol update"))]
    assert commands[0] == "scontrol requeue 7"
    assert commands[1].startswith("scontrol update JobId=7 StartTime=now+")
    assert commands[2] == "scontrol update JobId=7 ExcNodeList=n2"


def test_a_training_that_failed_starts_again_on_good_nodes_of_its_allocation(job: JobRig) -> None:
    sick = '{"kind": "ecc", "node": "n1", "source": "log", "line": "Xid 48", "sick": true}'
    plan = f"mkdir -p attempts/7.0/causes; echo '{sick}' >attempts/7.0/causes/n1.json; "
    plan += "echo 'n1 steps [[[5, 40, 3.0, null, null]], false]'; failed n1 1"
    run = {"nodes": 1, "restart": {**RESTART, "within": "job"}}
    code, status, said = job.end(plan, "ended n2", run=run, **job.in_slurm())
    assert (code, status["state"], status["attempt"]) == (0, "succeeded", "7.1"), said
    first, second = job.lines("calls")
    assert "--nodelist=n1 " in first
    assert "--overlap --mem=0 --nodelist=n2 " in second
    assert "--address n2" in second


def test_the_jobs_own_archive_has_all_it_imports(job: JobRig) -> None:
    answer = run_archive(job.rig.archive, "job", env={"LLMLAUNCH_RUN_DIR": str(job.run), "PATH": "/usr/bin:/bin"})
    assert answer.returncode == 1
    assert "says nothing of how to run the job" in answer.stdout + answer.stderr
