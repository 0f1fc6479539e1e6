"""The one-machine cluster: there in seconds, gone without a trace, and nobody else's business."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from one_machine import CLUSTER_SH, Cluster, new_cluster, throw_away, wait_until
from person import NORMAL_USER, as_normal_user

pytestmark = pytest.mark.slurm


@pytest.fixture
def small(slurm_packages: None) -> Iterator[Cluster]:
    """A cluster of the test's own, not up yet, without GPUs."""
    cluster = new_cluster({"CPUS": "2", "GPUS": "0"})
    yield cluster
    throw_away(cluster)


def of_cluster(cluster: Cluster) -> list[psutil.Process]:
    """Every process that has anything to do with it: by environment, command line or an open file."""
    directory = str(cluster.directory)
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = [*process.environ().values(), *process.cmdline(), *(file.path for file in process.open_files())]
            if process.pid != os.getpid() and any(directory in word for word in words):
                processes.append(process)
    return processes


def test_up_prints_the_export_line_and_status_reports_every_node_and_sacct_every_job(small: Cluster) -> None:
    assert small.call("status").returncode == 1
    assert small.do("up", "2") == f"export SLURM_CONF={small.conf}\n" == small.do("env")
    status = small.do("status")
    assert "slurmctld pid" in status
    assert [line.split()[1] for line in status.splitlines()[-2:]] == ["idle", "idle"]
    assert small.ask("srun", "-N2", "bash", "-c", "echo $SLURMD_NODENAME").split() != []
    job_id = small.ask("sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 5").strip()
    sacct = ("sacct", "-c", "-P", "-n", "-j", job_id, "-o", "jobid,state,exitcode")  # without accounting, too
    wait_until(lambda: small.ask(*sacct) == f"{job_id}|FAILED|5:0\n", "sacct knows", instead=lambda: small.ask(*sacct))


def test_up_again_restarts_only_what_changed(small: Cluster) -> None:
    small.do("up", "1")
    controller = small.pid("slurmctld")
    small.do("up", "1")
    assert small.pid("slurmctld") == controller
    small.do("up", "2")
    assert small.pid("slurmctld") != controller
    assert len(small.nodes) == 2


def test_a_killed_node_takes_its_jobs_with_it_and_comes_back_and_down_leaves_nothing(
    small: Cluster, tmp_path: Path
) -> None:
    small.do("up", "2")
    first, second = small.nodes
    for node in (first, second):
        script = f"echo $$ > {tmp_path / node}; exec sleep 602"
        small.ask("sbatch", "-w", node, "--no-requeue", "--output=/dev/null", f"--wrap={script}")
    wait_until(lambda: (tmp_path / first).exists() and (tmp_path / second).exists(), "both jobs run")

    def sleeping() -> list[str]:
        nodes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, KeyError):
                if process.cmdline() == ["sleep", "602"]:
                    nodes.append(process.environ()["SLURMD_NODENAME"])
        return sorted(nodes)

    assert sleeping() == [first, second]
    small.do("kill-node", "2")
    wait_until(lambda: sleeping() == [first], "the second node's job is gone")
    assert f"node.{second} " not in small.call("status").stdout
    small.do("start-node", "2")
    small.wait_until_whole()  # the node is back
    down_removes_all_its_processes_and_files_and_no_others(small)


def down_removes_all_its_processes_and_files_and_no_others(small: Cluster) -> None:
    """A person's own program in a shell with SLURM_CONF exported stays, and one that reads a log; no job does."""
    bystander = subprocess.Popen(["sleep", "600"], env=small.environment)
    reader = subprocess.Popen(["tail", "-f", small.directory / "log" / "slurmctld.log"], stdout=subprocess.DEVNULL)
    assert "slurmstepd" in {process.name() for process in of_cluster(small)}
    small.do("down")
    left = {process.pid for process in of_cluster(small)}
    assert left == {bystander.pid, reader.pid}
    assert bystander.poll() is reader.poll() is None
    assert not small.directory.exists()
    for process in (bystander, reader):
        process.kill()
        process.wait()


def test_a_foreign_directory_is_left_alone(small: Cluster) -> None:
    small.directory.mkdir()
    (small.directory / "thesis.tex").touch()
    for command in ("up", "down"):
        done = small.call(command)
        assert done.returncode == 1
        assert "was not made by cluster.sh" in done.stderr
    assert (small.directory / "thesis.tex").exists()
    shutil.rmtree(small.directory)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"NODES": "0"}, "0 nodes; it must be 1 to 12"),
        ({"NODES": "13"}, "13 nodes; it must be 1 to 12"),
        ({"NODES": "2", "SWITCHES": "3"}, "3 switches for 2 nodes"),
        ({"CPUS": "two"}, "LLMLAUNCH_SLURM_CPUS is 'two'"),
        ({"ACCOUNTING": "yes"}, "LLMLAUNCH_SLURM_ACCOUNTING is 'yes'"),
        ({"CGROUPS": "v2"}, "LLMLAUNCH_SLURM_CGROUPS is 'v2'; it must be 0 or 1"),
        ({"LIMITS": "strict"}, "LLMLAUNCH_SLURM_LIMITS is 'strict'; it must be enforced or default"),
        ({"AFFINITY": "1", "CPUS": "4096"}, "4096 CPUs for each node, but "),
    ],
)
def test_the_message_names_a_wrong_setting(small: Cluster, settings: dict[str, str], message: str) -> None:
    done = replace(small, settings=settings).call("up")
    assert done.returncode == 1
    assert message in done.stderr
    assert not small.directory.exists()


def test_clusters_made_at_once_share_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.sample", lambda bases, count: bases)  # as chance may have it: both begin at the same
    clusters = [new_cluster({}), new_cluster({})]
    first, second = (cluster.port for cluster in clusters)
    for cluster in clusters:
        throw_away(cluster)
    assert abs(first - second) >= 23


def test_the_message_names_a_port_in_use(slurm: Cluster, small: Cluster) -> None:
    done = replace(small, port=slurm.port).call("up")
    assert f"port {slurm.port} is taken" in done.stderr


TOO_LONG = ("sbatch", "--partition=debug", "--time=30-0", "--hold", "--output=/dev/null", "--wrap=true")


def test_limits_are_enforced_and_one_partition_never_requeues(slurm: Cluster) -> None:
    done = subprocess.run(TOO_LONG, env=slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Requested time limit is invalid" in done.stderr
    assert requeue_of(slurm) == requeue_of(slurm, "--requeue") == "Requeue=1"
    assert requeue_of(slurm, "--no-requeue") == requeue_of(slurm, "--requeue", "--partition=once") == "Requeue=0"


def requeue_of(cluster: Cluster, *options: str) -> str:
    job = cluster.ask("sbatch", "--parsable", "--hold", "--output=/dev/null", *options, "--wrap=true").strip()
    (word,) = (word for word in cluster.ask("scontrol", "show", "job", job).split() if word.startswith("Requeue="))
    return word


def test_a_normal_user_runs_a_cluster_without_enforced_limits(slurm_packages: None) -> None:
    user = NORMAL_USER if os.getuid() == 0 else os.getuid()
    person = as_normal_user()
    plain = new_cluster({"CPUS": "2", "CGROUPS": "1", "LIMITS": "default"})
    # The checkout may lie where only root may look.
    scripts = shutil.copytree(CLUSTER_SH.parent, plain.directory.parent / "scripts")
    plain = replace(plain, script=scripts / "cluster.sh", prefix=person)
    try:
        up = plain.call("up", "2")
        assert up.returncode == 0, up.stderr
        assert "no cgroups: they take root and namespaces; " in up.stderr
        assert plain.directory.stat().st_uid == user
        assert plain.nodes == ["127.77.0.1", "127.77.0.2"]
        task = (
            "import os, socket; address = socket.gethostbyname(os.environ['SLURMD_NODENAME']);"
            "print(os.environ['SLURM_NODEID'], address)"
        )
        printed = plain.ask(
            *person, "srun", "-N2", shutil.which("python3", path="/usr/bin") or sys.executable, "-c", task
        )
        assert sorted(printed.splitlines()) == ["0 127.77.0.1", "1 127.77.0.2"]
        plain.ask(*person, *TOO_LONG)
        assert plain.ask(*person, "squeue", "-h", "-o", "%r").strip() in ("JobHeldUser", "PartitionTimeLimit")
        plain.ask(*person, "sbatch", "-N2", "--output=/dev/null", "--wrap=srun sleep 603")
        wait_until(lambda: "RUNNING" in plain.ask(*person, "squeue", "-h", "-o", "%T"), "the job runs")
        plain.do("kill-node", "2")
        plain.do("down")
        assert of_cluster(plain) == []
    finally:
        throw_away(plain)
