"""What the job asks of SLURM: the words of an srun, and what its steps are not told."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.node import slurm_steps
from llmlaunch.node.slurm_steps import StepOptions, step_environment

JOB = {"allocated": 4, "srun": ["--mpi=none"], "step_gres": "gpu:8"}
NODES = ["n1", "n2", "n3", "n4"]


def srun(again: bool = False, nodes: list[str] = NODES, **environment: str) -> set[str]:
    return set(StepOptions.of(JOB, environment).srun(nodes, "log.%N", again))


def test_a_step_has_one_task_on_each_node_and_the_words_of_the_site() -> None:
    words = StepOptions.of(JOB, {}).srun(NODES, "log.%N", again=False)
    assert words[0] == "srun"
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--export=ALL", "--error=log.%N"} <= {*words}
    assert words[-1] == "--mpi=none"
    assert not [word for word in words if word.startswith(("--output", "--nodelist", "--overlap", "--unbuffered"))]


def test_a_step_on_some_nodes_or_beside_others_names_its_nodes() -> None:
    assert "--nodelist=n1,n3" in srun(nodes=["n1", "n3"])
    assert {"--overlap", "--mem=0", "--nodelist=n1,n2,n3,n4"} <= srun(again=True)


def test_a_task_may_run_on_all_cores_of_its_node() -> None:
    assert "--cpu-bind=none" in srun()
    assert {"--cpus-per-task=12"} == {word for word in srun(SLURM_CPUS_PER_TASK="12") if "cpu" in word}
    assert "--cpu-bind=none" not in srun(SLURM_HINT="nomultithread")


def test_devices_are_named_where_the_job_asked_for_a_total() -> None:
    assert "--gres=gpu:8" in srun(SLURM_GPUS="32")
    assert not [word for word in srun() if word.startswith("--gres")]


def test_what_slurm_exported_of_the_job_is_no_option_of_its_steps() -> None:
    of_job = (
        "NTASKS NTASKS_PER_NODE NPROCS GPUS GPUS_PER_NODE GRES CPUS_PER_TASK MEM_PER_NODE MEM_PER_CPU EXCLUSIVE "
        "DISTRIBUTION UNBUFFEREDIO LABELIO"
    )
    ours = {f"SLURM_{name}": "1" for name in of_job.split()} | {"LLMLAUNCH_SETUP": " 3:1:1", "LLMLAUNCH_TOLD": "TERM"}
    stays = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "PATH": "/bin", "HF_HOME": "/x"}
    assert step_environment({**ours, **stays, "SRUN_CPUS_PER_TASK": "3", "PWD": "/"}) == stays


@pytest.mark.parametrize(("bind", "stays"), [("none", True), ("quiet,mask_cpu:0x1", False), ("map_ldom:0", False)])
def test_a_binding_of_the_site_stays_and_the_mask_of_another_step_does_not(bind: str, stays: bool) -> None:
    environment = {"SLURM_CPU_BIND": bind, "SLURM_CPU_BIND_LIST": "0x1", "SLURM_MEM_BIND": "local"}
    assert step_environment(environment) == (environment if stays else {"SLURM_MEM_BIND": "local"})


def test_a_task_of_an_array_is_never_named_by_its_own_id() -> None:
    assert slurm_steps.job_name({"SLURM_JOB_ID": "12"}) == "12"
    array = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}
    assert slurm_steps.job_name(array) == "10_2"
    assert slurm_steps.job_name({}) == ""


COMMAND = """\
#!/bin/bash
echo "${0##*/} $* ${SLURM_NTASKS:-}" >>"${0%/*}/asked"
case "$*" in
*%N) echo 'n[1-2]' ;;
*%i) printf '7.batch\\n7.0\\n7.3\\n7.extern\\n' ;;
"show config") echo "ProctrackType = proctrack/linuxproc" ;;
*requeue*) echo "Access/permission denied" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("squeue", "scontrol", "scancel"):
        (tmp_path / name).write_text(COMMAND)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_NTASKS", "9")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "asked"


def test_slurm_is_asked_without_the_options_of_the_job(asked: Path) -> None:
    assert slurm_steps.held_nodes("7") == ["n1", "n2"]
    assert slurm_steps.signals_reach_every_process()
    slurm_steps.kill_steps("7")
    assert asked.read_text().splitlines() == [
        "squeue -h -j 7 -o %N ",
        "scontrol show config ",
        "squeue -h -s -j 7 -o %i ",
        "scancel --signal=KILL 7.0 ",
        "scancel --signal=KILL 7.3 ",
    ]


def test_nodes_are_given_back_and_scontrols_files_removed(asked: Path) -> None:
    files = [asked.with_name(f"slurm_job_7_resize.{suffix}") for suffix in ("sh", "csh")]
    for file in files:
        file.touch()
    assert slurm_steps.give_back("7", ["n1", "n3"])
    assert asked.read_text() == "scontrol update JobId=7 NodeList=n1,n3 \n"
    assert not any(file.exists() for file in files)


def test_what_slurm_says_against_it_is_said(asked: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert slurm_steps.answer_of("scontrol", "requeue", "7") == "Access/permission denied"
    assert slurm_steps.ask("scontrol", "requeue", "7") is None
    assert "scontrol requeue 7: Access/permission denied" in capfd.readouterr().err
    asked.with_name("squeue").write_text("#!/bin/sh\nexec sleep 600\n")
    assert slurm_steps.ask("squeue", seconds=0.3) is None
    asked.with_name("squeue").unlink()
    assert slurm_steps.ask("squeue-that-is-not-there") is None
