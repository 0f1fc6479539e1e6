"""Nothing in a person's environment silently changes what was rendered."""

from __future__ import annotations

from llmlaunch.launchers.run_environment import for_local_job, for_queries, for_sbatch

SCRIPT = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --partition=gpu\nsrun true\n"


def test_sbatch_variables_do_not_override_directives() -> None:
    given = {"SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "debug", "SBATCH_WAIT": "1", "PATH": "/bin"}
    assert for_sbatch(given, SCRIPT) == {"PATH": "/bin"}


def test_a_site_s_default_account_fills_a_gap() -> None:
    given = {"SBATCH_ACCOUNT": "physics"}
    assert for_sbatch(given, SCRIPT) == given
    assert for_sbatch(given, SCRIPT.replace("--time", "--account=chemistry --time")) == {}
    assert for_sbatch(given, SCRIPT.replace("--time=01:00:00", "-Achemistry")) == {}
    assert for_sbatch(given, SCRIPT.replace("--time=01:00:00", "-A chemistry")) == {}


def test_a_comment_is_no_directive() -> None:
    given = {"SBATCH_ACCOUNT": "physics"}
    assert for_sbatch(given, SCRIPT + "# SBATCH --account=chemistry\n") == given


def test_submitted_from_inside_a_job_that_job_s_options_stay_behind() -> None:
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_CPU": "100",
        "SRUN_CPUS_PER_TASK": "4",
        "SLURMD_NODENAME": "node1",
        "SLURM_CONF": "/etc/slurm.conf",
        "HF_HOME": "/data/hf",
    }
    assert for_sbatch(given, SCRIPT) == {"SLURM_CONF": "/etc/slurm.conf", "HF_HOME": "/data/hf"}


def test_outside_a_job_the_person_s_own_settings_for_srun_stay() -> None:
    given = {"SLURM_MPI_TYPE": "pmix", "SLURM_CONF": "/etc/slurm.conf"}
    assert for_sbatch(given, SCRIPT) == given


def test_questions_are_not_filtered_or_reshaped() -> None:
    given = {"SQUEUE_STATES": "R", "SACCT_FORMAT": "jobid", "SLURM_TIME_FORMAT": "relative", "SLURM_CONF": "/c"}
    assert for_queries(given) == {"SLURM_CONF": "/c"}


def test_a_local_job_does_not_take_itself_for_a_slurm_job() -> None:
    assert for_local_job({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1", "PATH": "/bin"}) == {"PATH": "/bin"}
