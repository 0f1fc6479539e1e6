"""Nothing in a person's environment silently changes what was rendered."""

from __future__ import annotations

from llmlaunch.launchers.run_environment import for_local_job, for_queries, for_sbatch

SCRIPT = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --partition=gpu\nsrun true\n"


def test_sbatch_variables_do_not_override_directives() -> None:
    environment = {"SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "debug", "SBATCH_WAIT": "1", "PATH": "/bin"}
    assert for_sbatch(environment, SCRIPT) == {"PATH": "/bin"}


def test_a_site_s_default_account_fills_a_gap() -> None:
    environment = {"SBATCH_ACCOUNT": "physics"}
    assert for_sbatch(environment, SCRIPT) == environment
    for option in ("--account=chemistry", "-Achemistry", "-A chemistry"):
        assert for_sbatch(environment, SCRIPT.replace("--time=01:00:00", option)) == {}
    assert (
        for_sbatch(environment, SCRIPT + "# SBATCH --account=chemistry\n") == environment
    )  # a comment is no directive


def test_submitted_from_inside_a_job_that_job_s_options_stay_behind() -> None:
    own = {"SLURM_CONF": "/etc/slurm.conf", "HF_HOME": "/data/hf"}
    job = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "100", "SRUN_CPUS_PER_TASK": "4", "SLURMD_NODENAME": "node1"}
    assert for_sbatch({**own, **job}, SCRIPT) == own


def test_outside_a_job_the_person_s_own_settings_for_srun_stay() -> None:
    environment = {"SLURM_MPI_TYPE": "pmix", "SLURM_CONF": "/etc/slurm.conf"}
    assert for_sbatch(environment, SCRIPT) == environment


def test_questions_are_not_filtered_or_reshaped() -> None:
    environment = {"SQUEUE_STATES": "R", "SACCT_FORMAT": "jobid", "SLURM_TIME_FORMAT": "relative", "SLURM_CONF": "/c"}
    assert for_queries(environment) == {"SLURM_CONF": "/c"}


def test_a_local_job_does_not_take_itself_for_a_slurm_job() -> None:
    assert for_local_job({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1", "PATH": "/bin"}) == {"PATH": "/bin"}
