"""Nothing in a person's environment silently changes what was rendered."""

from __future__ import annotations

import pytest

from llmlaunch.launchers.run_environment import QUERIES, for_local_job, for_sbatch

SCRIPT = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --partition=gpu\nsrun true\n"


OWN = {"SLURM_CONF": "/etc/slurm.conf", "HF_HOME": "/data/hf"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "100", "SRUN_CPUS_PER_TASK": "4", "SLURMD_NODENAME": "node1"}


def test_sbatch_variables_do_not_override_directives_and_no_job_s_options_are_handed_on() -> None:
    asked = {"SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "debug", "SBATCH_WAIT": "1"}
    assert for_sbatch(SCRIPT).of({**OWN, **JOB, **asked}) == OWN
    outside = {**OWN, "SLURM_MPI_TYPE": "pmix"}
    assert for_sbatch(SCRIPT).of(outside) == outside, "outside a job the person's own settings for srun stay"


@pytest.mark.parametrize("option", ["--account=chemistry", "-Achemistry", "-A chemistry"])
def test_a_site_s_default_account_fills_a_gap(option: str) -> None:
    environment = {"SBATCH_ACCOUNT": "physics"}
    assert for_sbatch(SCRIPT).of(environment) == environment
    assert for_sbatch(SCRIPT.replace("--time=01:00:00", option)).of(environment) == {}
    assert for_sbatch(SCRIPT + f"# SBATCH {option}\n").of(environment) == environment  # a comment is no directive


def test_questions_are_not_filtered_and_a_local_job_does_not_take_itself_for_a_slurm_job() -> None:
    environment = {"SQUEUE_STATES": "R", "SACCT_FORMAT": "jobid", "SLURM_TIME_FORMAT": "relative", "SLURM_CONF": "/c"}
    assert QUERIES.of(environment) == {"SLURM_CONF": "/c"}
    assert for_local_job({**JOB, "PATH": "/bin"}) == {"PATH": "/bin"}
